"""Package metadata. Extras: seqio, parity (reference implementations), test, dev."""

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
  install_requires=[
    'flax>=0.12.8,<0.13',
    'jax>=0.10,<0.13',
    'ml_dtypes',
    'msgpack',
    'numpy>=2',
    'orbax-checkpoint>=0.12.8,<0.13',
    'safetensors>=0.8',
    'sentencepiece>=0.2',
    'tensorstore>=0.1.84',
    'tokenizers>=0.23',
  ],
  extras_require={
    'seqio': SEQIO,
    'parity': ['torch>=2.6', 'transformers>=5.23,<6'],
    'test': ['hypothesis', 'pytest>=9', 'pytest-xdist', 'sacrebleu>=2.6,<3', 'scipy'],
    'dev': ['pre-commit', 'ruff>=0.15'],
  },
)
