"""Our own checkpoints: complete, or recognised as damaged, bit for bit, and onto a mesh."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import textwrap

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
from matching import having, says
import numpy as np
import pytest
from tiers import long_but
from tiny import assert_equal, error_of, model_of, T5

from speccascade.checkpoints import files, orbax
from speccascade.data import tokenizers
from speccascade.drafters.ngram import NGram
from speccascade.types import Model

SMALL = T5 | {'vocab_size': 16, 'd_ff': 24, 'num_layers': 2, 'num_heads': 4}
GEMMA = {'model_type': 'gemma3_text', 'vocab_size': 16, 'hidden_size': 8, 'intermediate_size': 24, 'head_dim': 4}
GEMMA |= {'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'query_pre_attn_scalar': 4}
GEMMA |= {'sliding_window_pattern': 2, 'eos_token_id': [1, 5]}
_error = functools.partial(error_of, orbax.read)


KINDS = [(c, d, s) for c in (SMALL, GEMMA) for d in ('float32', 'bfloat16') for s in (False, True)]


@pytest.mark.parametrize('config, dtype, scan', long_but(KINDS, [KINDS[6]]))
def test_what_is_saved_is_read_bit_for_bit(tmp_path, config, dtype, scan):
  model = model_of(config, dtype, scan)
  network, params = orbax.read(orbax.save(tmp_path / 'a', model))
  assert network == model.network and hash(network) == hash(model.network)
  assert_equal(params, model.params)


@pytest.mark.long
def test_a_relative_path_is_understood(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  orbax.save('a', model_of(SMALL))
  assert_equal(orbax.read('a')[1], model_of(SMALL).params)


def test_only_a_checkpoint_of_ours_is_replaced_on_request_and_not_before_the_new_one_is_whole(tmp_path, monkeypatch):
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'chapter1.tex').write_text('x')
  with pytest.raises(FileExistsError, match=having('thesis', 'chapter1.tex')):
    orbax.save(tmp_path / 'thesis', model_of(SMALL), overwrite=True)
  assert (tmp_path / 'thesis' / 'chapter1.tex').read_text() == 'x'
  (tmp_path / 'empty').mkdir()
  orbax.save(tmp_path / 'empty', model_of(SMALL), overwrite=True)
  folder = orbax.save(tmp_path / 'a', model_of(SMALL))
  with pytest.raises(FileExistsError, match='a exists'):
    orbax.save(folder, model_of(GEMMA))
  with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
    patched.setattr(files, 'copy_tokenizer', lambda *_: 1 / 0)
    orbax.save(folder, model_of(GEMMA), overwrite=True)
  assert orbax.read(folder)[0] == model_of(SMALL).network
  orbax.save(folder, model_of(GEMMA), overwrite=True)
  assert orbax.read(folder)[0] == model_of(GEMMA).network
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'empty', 'thesis']


def test_two_writers_of_one_checkpoint_do_not_share_a_scratch_folder(tmp_path):
  with files.atomic_dir(tmp_path / 'a', overwrite=True) as one:
    (one / 'speccascade.json').write_text('1')
    with files.atomic_dir(tmp_path / 'a', overwrite=True) as other:
      (other / 'speccascade.json').write_text('2')
    assert (tmp_path / 'a' / 'speccascade.json').read_text() == '2' and one.is_dir()
  assert (tmp_path / 'a' / 'speccascade.json').read_text() == '1'
  with pytest.raises(FileExistsError, match='b exists'):
    with files.atomic_dir(tmp_path / 'b') as one:
      (tmp_path / 'a').rename(tmp_path / 'b')
  assert [p.name for p in tmp_path.iterdir()] == ['b']


def test_a_network_without_parameters_of_its_own_is_refused(tmp_path):
  with pytest.raises(ValueError, match=having('NGram', 'T5')):
    orbax.save(tmp_path / 'a', Model({}, NGram(vocab_size=4)))
  assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_writer_that_was_killed_leaves_a_recognised_half(tmp_path):
  code = f"""
    import os, signal, sys
    import jax
    from speccascade.checkpoints import files, hf, orbax
    from speccascade.types import Model
    network = hf.network_from_config({SMALL!r})
    files.copy_tokenizer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # half-way: parameters, but no sidecar
    orbax.save({str(tmp_path / 'a')!r}, Model(network.init(jax.random.key(0)), network))
  """
  assert _python(code).returncode == -9
  (left,) = tmp_path.iterdir()
  assert left.name.startswith('a.tmp-') and (left / 'params').is_dir()
  assert f'{left}' in _error(tmp_path / 'a')
  assert f'{left}' in _error(left)
  orbax.save(tmp_path / 'a', model_of(SMALL))
  assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_damage_is_one_error_that_names_the_file(tmp_path):
  folder = orbax.save(tmp_path / 'a', model_of(SMALL))
  data = max((folder / 'params' / 'd').iterdir(), key=lambda p: p.stat().st_size)  # has all of so small a model
  content = data.read_bytes()
  data.write_bytes(content[: len(content) // 2])
  message = _error(folder)
  assert says(message, f'{data}', f'{len(content) // 2} bytes', f'{len(content)}', "tensor '")
  data.unlink()
  message = _error(folder)
  assert says(message, f'{data}', 'missing', "tensor '")
  data.write_bytes(content)
  sidecar = folder / orbax.SIDECAR
  text = sidecar.read_text()
  sidecar.write_text(text.replace('"T5Config"', '"T6Config"'))
  assert "'T6Config'" in _error(folder)
  sidecar.write_text(text.replace('"format": 1', '"format": 2'))
  assert says(_error(folder), 'format 2', 'format 1')
  sidecar.write_text(text[:50])
  assert says(_error(folder), 'speccascade.json', 'JSON')
  sidecar.unlink()
  assert says(_error(folder), 'speccascade.json', 'missing')


def test_a_flipped_bit_in_a_small_file_is_one_error_that_names_the_file(tmp_path):
  (tmp_path / 'tokenizer.json').write_text('{"model": {}}')
  model = model_of(SMALL).replace(tokenizer=tokenizers.find(tmp_path), generation='{"temperature": 0.6}')
  folder = orbax.save(tmp_path / 'a', model)
  for name in ('tokenizer.json', 'generation_config.json'):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    assert says(_error(folder), f'{folder / name}', 'corrupt')
    (folder / name).write_bytes(content)
  content = (folder / orbax.SIDECAR).read_text()
  assert '1e-06' in content
  (folder / orbax.SIDECAR).write_text(content.replace('1e-06', '1e-07'))
  assert says(_error(folder), f'{folder / orbax.SIDECAR}', 'corrupt')


@pytest.mark.long
def test_a_flipped_byte_never_goes_unnoticed(tmp_path):
  model = model_of(SMALL)
  folder = orbax.save(tmp_path / 'a', model)
  mesh, lost = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('x',)), 0
  both = lambda: [orbax.read(folder, **more)[1] for more in ({}, dict(mesh=mesh, rules=()))]
  for file in sorted(p for p in (folder / 'params').rglob('*') if p.is_file()):
    content = file.read_bytes()
    for at in range(len(content) // 7, len(content), max(1, len(content) // 2)):
      file.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
      try:
        for params in both():
          assert_equal(params, model.params)  # Orbax leaves files behind that nothing refers to
      except ValueError as error:
        assert says(str(error), f'{file}', "tensor '", 'corrupt')
        lost += 1
    file.write_bytes(content)
  assert lost > 0


def test_wrong_and_non_finite_tensors_are_named(tmp_path):
  model = model_of(SMALL)
  folder = orbax.save(tmp_path / 'a', model)
  sidecar = json.loads((folder / orbax.SIDECAR).read_text())
  name = 'decoder.layers_1.mlp.wo.kernel'

  def altered(**kwargs):
    changed = json.loads(json.dumps(sidecar))
    changed['tensors'][name].update(kwargs)
    (folder / orbax.SIDECAR).write_text(json.dumps(changed))
    return _error(folder)

  message = altered(shape=[24, 9])
  assert f"tensor '{name}' has shape [24, 9]" in message and 'should have [24, 8]' in message
  params = flatten_dict(model.params, sep='.')
  params[name] = params[name].at[3, 2].set(jnp.nan)
  folder = orbax.save(tmp_path / 'b', model.replace(params=unflatten_dict(params, sep='.')))
  assert f"tensor '{name}' has NaN or Inf as float32" in _error(folder)


def _python(code: str, **env) -> subprocess.CompletedProcess:
  root = pathlib.Path(__file__).parents[2]
  env = os.environ | {'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu'} | env
  return subprocess.run([sys.executable, '-c', textwrap.dedent(code)], env=env, capture_output=True, text=True)


@pytest.mark.long
def test_parameters_are_restored_onto_a_mesh_of_eight_devices(tmp_path):
  orbax.save(tmp_path / 't5', model_of(SMALL))
  orbax.save(tmp_path / 'gemma', model_of(GEMMA, scan=True))
  code = f"""
    import jax, jax.numpy as jnp, numpy as np, pathlib, warnings
    from speccascade.checkpoints import orbax
    from flax.traverse_util import flatten_dict
    folder, rules = pathlib.Path({str(tmp_path)!r}), (('vocab', 'y'), ('mlp', ('x', 'y')), ('embed', 'x'))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('x', 'y'))
    for name in ('t5', 'gemma'):
      network, params = orbax.read(folder / name, mesh=mesh, rules=rules)
      alone = orbax.read(folder / name)[1]
      for key, x in flatten_dict(params, sep='.').items():
        assert len(x.sharding.device_set) == 8
        np.testing.assert_array_equal(x, flatten_dict(alone, sep='.')[key])
      table = params['token_embedder']['embedding']
      assert table.sharding.shard_shape(table.shape) == (4, 4)
      wo = [x for key, x in flatten_dict(params, sep='.').items() if key.endswith('mlp.wo.kernel')][0]
      assert wo.sharding.shard_shape(wo.shape)[-2:] == (3, 8), wo.sharding  # 'embed' finds x taken by 'mlp'
      cast = orbax.read(folder / name, mesh=mesh, rules=rules, dtype='bfloat16')[1]['token_embedder']['embedding']
      assert cast.dtype == jnp.bfloat16 and cast.sharding == table.sharding
      other = orbax.save(folder / (name + '-sharded'), __import__('speccascade').Model(params, network))
      np.testing.assert_array_equal(orbax.read(other)[1]['token_embedder']['embedding'], table)
    with warnings.catch_warnings(record=True) as caught:
      for _ in range(2):
        orbax.read(folder / 't5', mesh=mesh, rules=(('heads', ('x', 'y')),))
    end = " parameters: 'heads' of 4 does not divide over 8 devices and is replicated."
    assert [str(w.message).endswith(end) for w in caught] == [True]
    named = "neither 'sharded' nor 'replicated'"
    for bad, message in ((('heads', 'z'),), "the mesh has no axis 'z'"), ('halved', named):
      try:
        orbax.read(folder / 't5', mesh=mesh, rules=bad)
      except ValueError as error:
        assert message in str(error), error
      else:
        raise AssertionError(message)
    print('all well')
  """
  done = _python(code, XLA_FLAGS=f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=8')
  assert done.stdout.strip() == 'all well', done.stderr[-3000:]
