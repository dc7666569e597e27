"""Folders that are written: whole, or recognised as half, never over anything else, and if they are large in shards."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
from matching import having
import pytest
from tiny import assert_equal, error_of, LLAMA, model_of, T5

from speccascade import checkpoints
from speccascade.checkpoints import files, hf
from speccascade.drafters.ngram import NGram
from speccascade.types import Model


def test_only_a_checkpoint_of_ours_is_replaced_on_request_and_not_before_the_new_one_is_whole(tmp_path, monkeypatch):
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'chapter1.tex').write_text('x')
  with pytest.raises(FileExistsError, match=having('thesis', 'chapter1.tex')):
    hf.write(tmp_path / 'thesis', model_of(T5), overwrite=True)
  assert (tmp_path / 'thesis' / 'chapter1.tex').read_text() == 'x'
  (tmp_path / 'empty').mkdir()
  hf.write(tmp_path / 'empty', model_of(T5), overwrite=True)
  folder = hf.write(tmp_path / 'a', model_of(T5))
  with pytest.raises(FileExistsError, match='a exists'):
    hf.write(folder, model_of(LLAMA))
  with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
    patched.setattr(files, 'write_generation', lambda *_: 1 / 0)
    hf.write(folder, model_of(LLAMA), overwrite=True)
  assert hf.read(folder)[0] == model_of(T5).network
  hf.write(folder, model_of(LLAMA), overwrite=True)
  assert hf.read(folder)[0] == model_of(LLAMA).network
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'empty', 'thesis']


def test_two_writers_of_one_checkpoint_do_not_share_a_scratch_folder(tmp_path):
  with files.atomic_dir(tmp_path / 'a', overwrite=True) as one:
    (one / 'model.safetensors').write_text('1')
    with files.atomic_dir(tmp_path / 'a', overwrite=True) as other:
      (other / 'model.safetensors').write_text('2')
    assert (tmp_path / 'a' / 'model.safetensors').read_text() == '2' and one.is_dir()
  assert (tmp_path / 'a' / 'model.safetensors').read_text() == '1'
  with pytest.raises(FileExistsError, match='b exists'):
    with files.atomic_dir(tmp_path / 'b') as one:
      (tmp_path / 'a').rename(tmp_path / 'b')
  assert [p.name for p in tmp_path.iterdir()] == ['b']


def test_a_network_without_parameters_of_its_own_is_refused(tmp_path):
  with pytest.raises(ValueError, match=having('NGram', 'T5')):
    hf.write(tmp_path / 'a', Model({}, NGram(vocab_size=4)))
  assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_writer_that_was_killed_leaves_a_recognised_half(tmp_path):
  code = f"""
    import os, signal
    import jax
    from speccascade.checkpoints import hf
    from speccascade.types import Model
    network = hf.network_from_config({T5!r})
    hf.writer._save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # half-way: a config, but no weights
    hf.write({str(tmp_path / 'a')!r}, Model(network.init(jax.random.key(0)), network))
  """
  env = os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[2]), 'JAX_PLATFORMS': 'cpu'}
  assert subprocess.run([sys.executable, '-c', textwrap.dedent(code)], env=env).returncode == -9
  (left,) = tmp_path.iterdir()
  assert left.name.startswith('a.tmp-') and (left / 'config.json').is_file()
  for path in (tmp_path / 'a', left):
    assert f'{left}' in error_of(checkpoints.read, path)
  hf.write(tmp_path / 'a', model_of(T5))
  assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_what_is_large_is_written_in_shards(tmp_path, monkeypatch):
  monkeypatch.setattr(hf.writer, 'SHARD', 1000)
  model = model_of(LLAMA)
  folder = hf.write(tmp_path / 'a', model)
  index = json.loads((folder / 'model.safetensors.index.json').read_text())
  shards = sorted(p.name for p in folder.glob('*.safetensors'))
  assert len(shards) > 2 and shards == sorted({*index['weight_map'].values()})
  assert shards[0] == f'model-00001-of-{len(shards):05}.safetensors'
  assert index['metadata']['total_size'] == sum(x.nbytes for x in jax.tree.leaves(model.params))
  assert max((folder / name).stat().st_size for name in shards) < 1000 + 1000  # and a header
  assert len({p.stat().st_mode for p in folder.iterdir()}) == 1
  network, params = hf.read(folder)
  assert network == hf.settled(model.network)
  assert_equal(params, model.params)
  hf.write(folder, model, overwrite=True)
