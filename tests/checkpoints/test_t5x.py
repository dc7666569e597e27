"""T5X checkpoints of every layout, and one clear error for each damage."""

import functools
import json
import shutil

from flax import serialization
import jax
from matching import having, says
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from tiers import long_but
from tiny import assert_equal, error_of, LLAMA, model_of, T5_V1_1

from speccascade.checkpoints import t5x
from speccascade.models.layers import stack_layers

V1_1 = T5_V1_1 | {'num_layers': 2, 'num_decoder_layers': 3}
V1_0 = V1_1 | {'feed_forward_proj': 'relu', 'tie_word_embeddings': True}
EMBEDDING = 'target.token_embedder.embedding'
_error = functools.partial(error_of, functools.partial(t5x.read, activation='gelu'))


def _model(config=V1_1, dtype='float32'):
  model = model_of(config, dtype)
  return model.replace(params=jax.device_get(model.params))


def _write_msgpack(folder, target, root='optimizer'):
  folder.mkdir(parents=True, exist_ok=True)
  tree = {'version': 3, 'optimizer': {'target': target, 'state': {'step': np.int32(5)}}}
  (folder / 'checkpoint').write_bytes(serialization.msgpack_serialize(tree if root else {'target': target}))
  return folder


def _write_zarr(folder, tree, name='target'):
  """Write arrays as T5X did: chunked, and with the path and driver of the file system that it ran on."""
  if isinstance(tree, dict):
    return {key: _write_zarr(folder, x, f'{name}.{key}') for key, x in tree.items()}
  metadata = {'shape': list(tree.shape), 'chunks': [-(-n // 2) for n in tree.shape], 'compressor': {'id': 'gzip'}}
  spec = {'driver': 'zarr', 'dtype': tree.dtype.name, 'metadata': metadata}
  here = {'kvstore': {'driver': 'file', 'path': f'{folder / name}/'}, 'create': True}
  ts.open(spec | here).result().write(tree).result()
  return spec | {'kvstore': {'driver': 'gcs', 'bucket': 'models', 'path': f'x/checkpoint_5/{name}/'}}


@pytest.mark.full
def test_arrays_are_chunked_and_compressed_as_t5x_expects(tmp_path, monkeypatch):
  monkeypatch.setattr(t5x.writer, '_CHUNK_BYTES', 100)
  model = _model()
  folder = t5x.write(tmp_path / 'checkpoint_3', model)
  zarray = json.loads((folder / EMBEDDING / '.zarray').read_text())
  assert zarray['chunks'] == [3, 8] and zarray['compressor']['id'] == 'gzip' and zarray['zarr_format'] == 2
  tree = serialization.msgpack_restore((folder / 'checkpoint').read_bytes())
  spec = tree['optimizer']['target']['token_embedder']['embedding']
  assert spec['kvstore'] == {'driver': 'file', 'path': f'{EMBEDDING}/'} and tree['optimizer']['state'] == {'step': 3}
  assert_equal(t5x.read(folder)[1], model.params)


@pytest.mark.full
@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize('layout', long_but(['inline', 'zarr', 'old'], ['zarr']))
def test_checkpoints_of_other_origin_are_read(tmp_path, layout, dtype):
  params = jax.tree.map(lambda x: x.astype(dtype), _model().params)
  folder = tmp_path / 'checkpoint_5'
  target = params if layout == 'inline' else _write_zarr(folder, params)
  _write_msgpack(folder, target, root=None if layout == 'old' else 'optimizer')
  network, read = t5x.read(folder, activation='gelu')
  assert network == _model(dtype=np.dtype(dtype).name).network  # sizes, gating and tying are in the shapes
  assert_equal(read, params)
  network, read = t5x.read(folder, dtype='bfloat16', scan=True, activation='gelu')
  assert network.scan and network.dtype == 'bfloat16'
  assert_equal(read, stack_layers(jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params)))


@pytest.mark.parametrize('layout', ['inline', 'zarr'])
def test_float64_is_read_as_float32_and_integers_are_refused(tmp_path, layout):
  folder = tmp_path / 'checkpoint_5'
  written = lambda params: _write_msgpack(folder, params if layout == 'inline' else _write_zarr(folder, params))
  network, read = t5x.read(written(jax.tree.map(np.float64, _model().params)), activation='gelu')
  assert network == _model().network
  assert_equal(read, _model().params)
  shutil.rmtree(folder)
  message = _error(written(jax.tree.map(np.int8, _model().params)))
  assert says(message, "tensor '", 'int8', 'unquantised')


@pytest.mark.parametrize('ocdbt', [True, False])
def test_the_orbax_managers_state_is_read(tmp_path, ocdbt):
  params = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), _model().params)
  tree = {'target': params, 'state': {'step': np.int32(5), 'param_states': {'x': np.ones(3, np.float32)}}}
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(tmp_path / 'checkpoint_5' / 'state', tree)
  assert_equal(t5x.read(tmp_path, activation='gelu')[1], params)
  if ocdbt:
    (tmp_path / 'checkpoint_5' / 'state' / 'manifest.ocdbt').write_bytes(b'x')
    assert 'checkpoint_5/state' in _error(tmp_path)


@pytest.mark.full
def test_the_latest_finished_step_is_read(tmp_path):
  latest = _model(V1_0)
  t5x.write(tmp_path, _model(), step=2)
  t5x.write(tmp_path, latest, step=10)
  (tmp_path / 'checkpoint_11.tmp-1').mkdir()
  assert t5x.find(tmp_path).name == 'checkpoint_10'
  network, params = t5x.read(tmp_path)
  assert network == latest.network
  assert_equal(params, latest.params)


def test_config_json_and_gin_say_what_shapes_do_not(tmp_path):
  folder = _write_msgpack(tmp_path / 'checkpoint_5', _model(V1_0).params)
  assert t5x.read(folder, activation='relu')[0].config.scale_outputs
  (tmp_path / 'config.gin').write_text("network.T5Config.mlp_activations = ('silu',)\n")
  assert t5x.read(folder)[0].config.activation == 'silu'
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 't5', 'tie_word_embeddings': False, 'd_kv': 4}))
  config = t5x.read(folder)[0].config
  assert config.tied and not config.scale_outputs  # tying is seen in the tensors, scaling is not
  (tmp_path / 'config.json').write_text(json.dumps({'feed_forward_proj': 'relu'}))
  assert t5x.read(folder)[0].config.activation == 'relu'  # config.json has the last word
  assert t5x.read(folder, activation='gelu')[0].config.activation == 'gelu_tanh'
  (tmp_path / 'config.json').write_text(json.dumps({'d_kv': 8}))
  assert says(_error(folder), 'config.json', 'd_kv', '8', '4')
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'llama'}))
  assert says(_error(folder), 'config.json', "'llama'")


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / 'checkpoint_5'
  return _write_msgpack(folder, _write_zarr(folder, _model().params))


def test_truncated_msgpack_names_the_file(folder):
  file = folder / 'checkpoint'
  data = file.read_bytes()
  for other in (data[: len(data) // 2], b'', data + b'x', b'\xc1' + data):
    file.write_bytes(other)
    assert says(_error(folder), f'{file}', f'{len(other)} bytes')
  file.write_bytes(serialization.msgpack_serialize({'weights': np.ones(2)}))
  assert 'optimizer/target' in _error(folder)
  file.write_bytes(serialization.msgpack_serialize(np.ones(2)))
  assert 'ndarray' in _error(folder)


def test_missing_pieces_name_file_and_tensor(folder):
  (folder / EMBEDDING / '1.0').unlink()
  message = _error(folder)
  assert says(message, f'{folder / EMBEDDING}', "'token_embedder.embedding'", '[11, 8]')
  assert '1.0' in message and 'missing' in message and len(message.replace(str(folder), '')) < 230
  (folder / EMBEDDING / '.zarray').unlink()
  assert says(_error(folder, FileNotFoundError), f'{folder / EMBEDDING}/.zarray', "tensor 'token")
  for file in (folder / EMBEDDING).iterdir():
    file.unlink()
  (folder / EMBEDDING).rmdir()
  assert says(_error(folder, FileNotFoundError), f'{folder / EMBEDDING}', "tensor 'token")
  (folder / 'checkpoint').unlink()
  assert says(_error(folder, FileNotFoundError), "'checkpoint'", "'state'")


def test_damaged_chunks_name_file_and_tensor(folder):
  chunk = folder / EMBEDDING / '0.0'
  chunk.write_bytes(chunk.read_bytes()[:12])
  message = _error(folder)
  assert says(message, f'{folder / EMBEDDING}', "'token_embedder.embedding'", '[11, 8]')
  (folder / EMBEDDING / '.zarray').write_text('{')
  assert says(_error(folder), f'{folder / EMBEDDING}', "'token_embedder.embedding'")


def test_a_half_written_checkpoint_is_recognised(tmp_path, folder):
  folder.rename(tmp_path / 'checkpoint_5.tmp-1700000000')
  assert 'checkpoint_5.tmp-1700000000' in _error(folder)
  assert 'checkpoint_5.tmp-1700000000' in _error(tmp_path / 'checkpoint_5.tmp-1700000000')
  assert 'checkpoint_5.tmp-1700000000' in _error(tmp_path, FileNotFoundError)


def test_wrong_shapes_and_names_are_named(tmp_path):
  def broken(path, x):
    target = _model().params
    tree = target
    *modules, leaf = path.split('.')
    for module in modules:
      tree = tree[module]
    tree.pop(leaf) if x is None else tree.update({leaf: x})
    return _error(_write_msgpack(tmp_path / 'checkpoint_5', target))

  message = broken('decoder.layers_1.mlp.wi_0.kernel', np.zeros((8, 7), np.float32))
  assert says(message, "'decoder.layers_1.mlp.wi_0.kernel'", '[8, 7]', '[8, 6]')
  assert "'decoder.layers_1.mlp.wo.kernel' [6, 8] is missing" in broken('decoder.layers_1.mlp.wo.kernel', None)
  assert "'token_embedder.embedding' is missing" in broken('token_embedder.embedding', None)
  assert 'expected two axes' in broken('token_embedder.embedding', np.zeros((8,), np.float32))
  assert 'does not divide into the 5 heads' in broken(
    'encoder.relpos_bias.rel_embedding', np.zeros((5, 32), np.float32)
  )
  assert 'an encoder-only model' in broken('decoder', None)
  assert "'encoder.extra' [2] is unexpected" in broken('encoder.extra', np.zeros((2,), np.float32))
  bad = np.full((6, 8), np.nan, np.float32)
  assert "'decoder.layers_0.mlp.wo.kernel' has NaN or Inf" in broken('decoder.layers_0.mlp.wo.kernel', bad)


def test_writing_refuses_other_families_and_what_exists(tmp_path):
  with pytest.raises(ValueError, match=having('Decoder', 'write hf')):
    t5x.write(tmp_path, model_of(LLAMA))
  assert not list(tmp_path.iterdir())
  t5x.write(tmp_path, _model())
  with pytest.raises(FileExistsError, match='checkpoint_1'):
    t5x.write(tmp_path, _model())
  assert t5x.write(tmp_path, _model(), overwrite=True).name == 'checkpoint_1'
