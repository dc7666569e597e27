"""PyTorch's files are read without torch, and nothing that a pickle names is called."""

import builtins
import functools
import os
import pathlib
import sys
import zipfile

import jax
import jax.numpy as jnp
from matching import having
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
import test_heads
import torch_files

import speccascade
from speccascade import checkpoints
from speccascade.checkpoints import hf, pickled, stored

STATE = {
  'a': np.arange(12, dtype=np.float32).reshape(3, 4),
  'b': np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
  'c': np.arange(4).astype(np.float16),
  'ids': np.array([3, 1, 2]),
  'empty': np.zeros((0, 3), np.float32),
  'scalar': np.array(7, np.float32),
}


def in_place(folder, name):
  """Put a file of PyTorch in the place of the safetensors of a folder."""
  (single,) = folder.glob('*.safetensors')
  write = torch_files.write_old if name.endswith('.old') else torch_files.write
  write(folder / name.removesuffix('.old'), load_file(single))
  single.unlink()


@pytest.mark.parametrize('write', [torch_files.write, torch_files.write_old])
def test_tensors_are_read_without_torch_whole_and_in_part(write, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)  # importing it is an error
  write(tmp_path / 'x.bin', STATE)
  found = stored.of_torch(tmp_path / 'x.bin')
  assert found.keys() == STATE.keys()
  for name, x in STATE.items():
    assert found[name].shape == x.shape and found[name].read().dtype == x.dtype
    np.testing.assert_array_equal(found[name].read(), x)
  np.testing.assert_array_equal(found['a'].read((slice(1, 3), slice(0, 2))), STATE['a'][1:3, :2])


def test_a_tensor_may_be_a_part_of_its_storage_and_transposed(tmp_path):
  x = np.arange(12, dtype=np.float32)
  torch_files.write(tmp_path / 'x.bin', {'t': torch_files.Stored(x, '0', shape=(3, 2), strides=[1, 4], offset=1)})
  found = stored.of_torch(tmp_path / 'x.bin')['t']
  np.testing.assert_array_equal(found.read(), [[1, 5], [2, 6], [3, 7]])
  np.testing.assert_array_equal(found.read((slice(2, 3), slice(0, 2))), [[3, 7]])


@pytest.mark.parametrize(
  'made, name',
  [
    (test_heads.eagle_1, 'pytorch_model.bin'),
    (test_heads.eagle_1, 'pytorch_model.bin.old'),
    (test_heads.eagle_3, 'pytorch_model.bin'),
    (test_heads.medusa, 'medusa_lm_head.pt'),
  ],
)
def test_a_head_in_a_file_of_torch_is_its_safetensors_twin(made, name, tmp_path):
  folder, *_ = made(tmp_path / 'head')
  twin = hf.read(folder)
  in_place(folder, name)
  network, params = hf.read(folder)
  assert network == twin[0]
  jax.tree.map(np.testing.assert_array_equal, params, twin[1])
  assert speccascade.load(folder).network == twin[0]


def test_a_head_of_bfloat16_keeps_its_dtype(tmp_path):
  folder, tensors, _ = test_heads.eagle_1(tmp_path / 'head')
  (folder / 'model.safetensors').unlink()
  state = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
  torch_files.write(folder / 'pytorch_model.bin', state)
  params = hf.read(folder)[1]
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_the_digest_knows_the_numbers_of_a_head_in_a_file_of_torch(tmp_path):
  digests = set()
  for factor in (1, 2):
    folder, tensors, _ = test_heads.medusa(tmp_path / 'head')
    (folder / 'medusa_lm_head.safetensors').unlink()
    torch_files.write(folder / 'medusa_lm_head.pt', {name: factor * x for name, x in tensors.items()})
    digests.add(checkpoints.digest(folder))
  assert len(digests) == 2


class Called:
  """Pickled as the call of a function."""

  def __init__(self, function, *arguments):
    self.function = function
    self.arguments = arguments

  def __reduce__(self):
    return self.function, self.arguments


@pytest.mark.parametrize('write', [torch_files.write, torch_files.write_old])
@pytest.mark.parametrize(
  'value, said',
  [
    (Called(os.system, 'touch executed'), 'system'),
    (Called(builtins.eval, "__import__('pathlib').Path('executed').touch()"), 'eval'),
    (Called(getattr, 'x', 'y'), 'getattr'),
    (Called(functools.partial, print), 'partial'),
    (pathlib.PurePosixPath('x'), 'pathlib'),
    (7, 'names'),
    ({'inner': {}}, 'names'),
  ],
)
def test_a_pickle_calls_nothing_else(write, value, said, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write('x.bin', STATE | {'z': value})
  with pytest.raises(ValueError, match=having('x.bin', said, 'torch.save(model.state_dict()')):
    stored.of_torch(pathlib.Path('x.bin'))
  assert not pathlib.Path('executed').exists()


def test_what_a_pickle_changes_of_what_it_may_call_is_gone_afterwards(tmp_path):
  opcodes = b'\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b.'
  with zipfile.ZipFile(tmp_path / 'x.bin', 'w') as archive:
    archive.writestr('archive/data.pkl', opcodes)
  with pytest.raises(ValueError, match='x.bin'):
    stored.of_torch(tmp_path / 'x.bin')
  assert all(not function.__defaults__ for function in pickled._callables().values())


@pytest.mark.parametrize(
  'changed, said',
  [
    (dict(offset=9), 'larger than its storage'),
    (dict(offset=-1), 'none'),
    (dict(strides=[400, 1]), 'larger than its storage'),
    (dict(strides=[-4, 1]), 'none'),
    (dict(strides=[4, 1.5]), 'none'),
  ],
)
def test_a_tensor_lies_in_its_storage(changed, said, tmp_path):
  torch_files.write(tmp_path / 'x.bin', {'a': torch_files.Stored(STATE['a'], '0', **changed)})
  with pytest.raises(ValueError, match=having('x.bin', said)):
    stored.of_torch(tmp_path / 'x.bin')


@pytest.mark.parametrize('write', [torch_files.write, torch_files.write_old])
def test_a_file_that_is_cut_or_compressed_is_refused_in_a_sentence(write, tmp_path):
  write(tmp_path / 'x.bin', STATE)
  content = (tmp_path / 'x.bin').read_bytes()
  for size in range(0, len(content) - 1, 37):
    (tmp_path / 'x.bin').write_bytes(content[:size])
    with pytest.raises(ValueError, match='x.bin'):
      stored.of_torch(tmp_path / 'x.bin')
  torch_files.write(tmp_path / 'x.bin', STATE, compress=zipfile.ZIP_DEFLATED)
  with pytest.raises(ValueError, match=having('x.bin', 'compressed')):
    stored.of_torch(tmp_path / 'x.bin')


def test_a_pickle_that_claims_many_objects_makes_no_room_for_them(tmp_path):
  with zipfile.ZipFile(tmp_path / 'x.bin', 'w') as archive:
    archive.writestr('archive/data.pkl', b'\x80\x02}r\xff\xff\xff\xff.')  # an empty dictionary, number 4e9 of a memory
  assert stored.of_torch(tmp_path / 'x.bin') == {}
