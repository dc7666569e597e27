"""Package metadata. Extras: seqio, parity (reference implementations), tpu (its compiler, too), test, dev."""

import setuptools

SEQIO = [
  'seqio==0.0.20',
  'tensorflow-text>=2.21,<2.22',
  'tensorflow-datasets>=4.9.10,<5',
  'importlib_resources',
]

setuptools.setup(
  name='speccascade',
  version='0.1.0',
  description='Speculative decoding, cascades, collaborative decoding and speculative verification as one JAX program',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  packages=setuptools.find_packages(include=['speccascade', 'speccascade.*']),
  package_data={
    'speccascade': ['configs/*.gin'],
    'speccascade.embedded': ['pretrained/*/*'],
    'speccascade.evaluate': ['report.html', 'report.css', 'report.js'],
  },
  install_requires=[
    'absl-py',
    'flax>=0.12.8,<0.13',
    'gin-config==0.5.0',
    'huggingface_hub>=1.0',
    'jax>=0.10,<0.13',
    'matplotlib>=3.9',
    'ml_dtypes',
    'msgpack',
    'numpy>=2',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12.8,<0.13',
    'rouge-score==0.1.2',
    'sacrebleu>=2.6,<3',
    'safetensors>=0.8',
    'sentencepiece>=0.2',
    'tensorboardX>=2.6',
    'tensorstore>=0.1.84',
    'tokenizers>=0.23',
  ],
  extras_require={
    'seqio': SEQIO,
    'tpu': ['jax[tpu]>=0.10,<0.13'],
    'parity': ['torch>=2.6', 'transformers>=5.23,<6'],
    'test': [*SEQIO, 'hypothesis', 'ipykernel', 'nbclient', 'nbformat', 'pytest>=9', 'pytest-xdist', 'scipy'],
    'dev': ['pre-commit', 'ruff>=0.15'],
  },
)
