"""Package metadata. Extras: seqio, lm-eval (the evaluation harness), buckets (gs://), gguf (files of
llama.cpp), parity (reference implementations), tpu (its compiler), test, docs, dev.

The addresses of the project are those of the clone's remote `origin`, where that is on GitHub.
"""

from pathlib import Path
import re
import subprocess

import setuptools

ROOT = Path(__file__).parent
PAGES = {'Documentation': 'docs', 'Changelog': 'CHANGELOG.md'}
SEQIO = [
  'seqio==0.0.20',
  'tensorflow-text>=2.21,<2.22',
  'tensorflow-datasets>=4.9.10,<5',
  'importlib_resources',
]
BUCKETS = ['gcsfs>=2025.3', 'universal-pathlib>=0.3']


def address() -> str | None:
  """Return the page of the repository, None where none is known."""
  try:
    asked = subprocess.run(['git', 'remote', 'get-url', 'origin'], cwd=ROOT, capture_output=True, text=True)
  except OSError:  # no git
    return None
  found = re.search(r'github\.com[:/]([\w.-]+/[\w.-]+?)(\.git)?$', asked.stdout.strip())
  return found and f'https://github.com/{found.group(1)}'


def readme() -> str:
  """Return the README with links that lead somewhere from another page too."""
  text, page = (ROOT / 'README.md').read_text(encoding='utf-8'), address()
  return re.sub(r'\]\((?!https?:|#)', f']({page}/blob/main/', text) if page else text


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
  url=address(),
  project_urls={n: f'{address()}/blob/main/{p}' for n, p in PAGES.items()} if address() else {},
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
    'ml_dtypes',
    'msgpack',
    'numpy>=2',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12.8,<0.13',
    'rouge-score==0.1.2',
    'sacrebleu>=2.6,<3',
    'safetensors>=0.8',
    'scipy>=1.14',
    'sentencepiece>=0.2',
    'tensorstore>=0.1.84',
    'tokenizers>=0.23',
    'tqdm>=4.66',
  ],
  extras_require={
    'seqio': SEQIO,
    'tpu': ['jax[tpu]>=0.10,<0.13'],
    'buckets': BUCKETS,
    'gguf': ['gguf>=0.19,<1'],
    'lm-eval': ['lm_eval>=0.4.13,<0.5'],
    'parity': ['lm_eval[hf]>=0.4.13,<0.5', 'torch>=2.6', 'transformers>=5.23,<6'],
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
