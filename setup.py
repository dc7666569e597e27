"""Package metadata. Extras: cuda and tpu (JAX for them), k8s (processes of Kubernetes), seqio, lm-eval (the evaluation
harness), buckets (gs://), gguf (files of llama.cpp), parity (reference implementations), libraries (whose decoders are
decoded here), test, docs, dev.
"""

from pathlib import Path
import re

import setuptools

ROOT = Path(__file__).parent
SEQIO = [
  'seqio==0.0.20',
  'tensorflow-text>=2.21,<2.22',
  'tensorflow-datasets>=4.9.10,<5',
  'importlib_resources',
]
BUCKETS = ['gcsfs>=2025.3', 'universal-pathlib>=0.3']


def readme() -> str:
  """Return the README without links into a clone, which would lead nowhere on the page of an index."""
  text = re.sub(r'!\[[^\]]*\]\((?!https?:)[^)]+\)', '', (ROOT / 'README.md').read_text(encoding='utf-8'))
  return re.sub(r'\[([^\]]+)\]\((?!https?:|#)[^)]+\)', r'\1', text)


def version() -> str:
  """Return the version that the package says it has."""
  text = (ROOT / 'speccascade' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE).group(1)


setuptools.setup(
  name='speccascade',
  version=version(),
  description='Speculative decoding, cascades, collaborative decoding and speculative verification as one JAX program',
  long_description=readme(),
  long_description_content_type='text/markdown',
  keywords=['speculative decoding', 'cascades', 'JAX', 'Flax', 'T5', 'LLM inference'],
  classifiers=[
    'Development Status :: 4 - Beta',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX',
    'Programming Language :: Python :: 3',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  packages=[*setuptools.find_packages(include=['speccascade', 'speccascade.*']), 'speccascade.gin_configs'],
  package_dir={'speccascade.gin_configs': 'gin_configs'},
  package_data={
    'speccascade.gin_configs': ['*.gin', '*/*.gin', '*/*/*.gin'],
    'speccascade': ['evaluate/default.gin', 'evaluate/published.csv', 'py.typed'],
    'speccascade.embedded': ['pretrained/*/*', 'sentences/*'],
    'speccascade.evaluate.report': ['report.*'],
  },
  install_requires=[
    'flax>=0.12.8,<0.13',
    'gin-config==0.5.0',
    'huggingface_hub>=1.0',
    'jax>=0.10,<0.13',
    'jinja2>=3.1',
    'matplotlib>=3.9',
    'ml_dtypes>=0.5',
    'msgpack>=1',
    'numpy>=2',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12.8,<0.13',
    'rouge-score==0.1.2',
    'sacrebleu>=2.6,<3',
    'safetensors>=0.7',
    'scipy>=1.14',
    'sentencepiece>=0.2',
    'tensorstore>=0.1.84',
    'tokenizers>=0.22',
    'tqdm>=4.66',
  ],
  extras_require={
    'seqio': SEQIO,
    'cuda': ['jax[cuda13]>=0.10,<0.13'],
    'tpu': ['jax[tpu]>=0.10,<0.13'],
    'k8s': ['jax[k8s]>=0.10,<0.13'],
    'buckets': BUCKETS,
    'gguf': ['gguf>=0.19,<1'],
    'lm-eval': ['lm_eval>=0.4.13,<0.5'],
    'parity': ['lm_eval[hf]>=0.4.13,<0.5', 'torch>=2.6', 'transformers>=5.23,<6'],
    'libraries': [
      'sentencepiece<0.2.2',  # later ones need a protobuf that these exclude
      'gemma>=4,<5',
      'google-tunix>=0.1.7,<0.2',
      'kauldron>=1.4',  # of gemma, which asks for no version
      'keras-hub>=0.32,<0.33',
      'transformers>=5',  # of google-tunix; a resolver may choose an ancient one
    ],
    'test': [
      *SEQIO,
      *BUCKETS,
      'gcp-storage-emulator',
      'hypothesis',
      'ipykernel',
      'nbclient',
      'nbformat',
      'pytest>=9',
      'pytest-xdist',
      'setuptools>=77',
    ],
    'docs': ['latex2mathml>=3.78,<4', 'myst-nb>=1.4,<2', 'sphinx>=9,<10', 'sphinx-book-theme>=1.4,<2'],
    'dev': ['pre-commit', 'ruff>=0.15'],
  },
)
