"""Files as PyTorch writes them, made without it: of arrays, or of whatever is to be pickled."""

import contextlib
import pickle
import sys
import types
import zipfile

import numpy as np

STORAGES = {'float32': 'FloatStorage', 'float16': 'HalfStorage', 'bfloat16': 'BFloat16Storage', 'int64': 'LongStorage'}
STORAGES |= {'bool': 'BoolStorage', 'int8': 'CharStorage', 'float64': 'DoubleStorage'}
MAGIC = 0x1950A86A20F9469CFC6C


class Stored:
  """An array as a tensor of PyTorch: pickled as the call of a function of storage, offset, shape and strides."""

  def __init__(self, array, key, *, offset=0, strides=None, shape=None):
    self.array = array
    self.shape = array.shape if shape is None else shape
    self.key = key
    self.offset = offset
    self.strides = strides or [n // array.itemsize for n in array.strides]

  def __reduce__(self):
    rebuild = sys.modules['torch._utils']._rebuild_tensor_v2
    storage = ('storage', STORAGES[self.array.dtype.name], self.key, 'cpu', self.array.size)
    return rebuild, (Storage(storage), self.offset, self.shape, tuple(self.strides), False, {})


class Storage(tuple):
  """What a pickle refers to."""

  def __new__(cls, values):
    return super().__new__(cls, values)


@contextlib.contextmanager
def _torch():
  """Let `torch` and `torch._utils` be modules that pickle can name."""
  before = {name: sys.modules.get(name) for name in ('torch', 'torch._utils')}
  torch, utils = (types.ModuleType(name) for name in before)
  for name in STORAGES.values():
    setattr(torch, name, type(name, (), {'__module__': 'torch', '__qualname__': name}))
  exec('def _rebuild_tensor_v2(*_): pass', vars(utils))
  sys.modules.update({'torch': torch, 'torch._utils': utils})
  try:
    yield torch
  finally:
    sys.modules.update({name: module for name, module in before.items() if module is not None})
    for name in [name for name, module in before.items() if module is None]:
      del sys.modules[name]


def pickled(state, file):
  """Pickle a value to a file, arrays as tensors, and return the arrays by the keys of their storages."""
  arrays = {}

  def made(x):
    if isinstance(x, np.ndarray):
      x = Stored(np.array(x, order='C'), str(len(arrays)))
    if isinstance(x, Stored):
      arrays[x.key] = x.array
    return x

  with _torch() as torch:

    class Pickler(pickle._Pickler):
      def persistent_id(self, x):
        return (x[0], getattr(torch, x[1]), *x[2:]) if isinstance(x, Storage) else None

    Pickler(file, 2).dump({name: made(x) for name, x in state.items()} if isinstance(state, dict) else state)
  return arrays


def write(path, state, *, compress=zipfile.ZIP_STORED):
  """Write a file as PyTorch does since 1.6."""
  with zipfile.ZipFile(path, 'w', compress) as archive:
    with archive.open('archive/data.pkl', 'w') as file:
      arrays = pickled(state, file)
    archive.writestr('archive/byteorder', 'little')
    for key, array in arrays.items():
      archive.writestr(f'archive/data/{key}', array.tobytes())
    archive.writestr('archive/version', '3\n')


def write_old(path, state):
  """Write a file as PyTorch did before 1.6."""
  with open(path, 'wb') as file:
    for x in (MAGIC, 1001, {'protocol_version': 1001, 'little_endian': True, 'type_sizes': {}}):
      pickle.dump(x, file, 2)
    arrays = pickled(state, file)
    pickle.dump(list(arrays), file, 2)
    for array in arrays.values():
      file.write(np.int64(array.size).tobytes() + array.tobytes())
