"""Checkpoints that T5X itself wrote (record_t5x.py) are read, with the logits of T5X's own forward pass."""

import functools
from pathlib import Path
import shutil
import tarfile

import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import long_but

from speccascade import checkpoints
from speccascade.types import Prompt

ARCHIVE = Path(__file__).parent / 't5x_written.tar.xz'
with tarfile.open(ARCHIVE) as _archive:
  NAMES = sorted({name.split('/')[0] for name in _archive.getnames()} - {'decoder_only'})


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp('t5x')
  with tarfile.open(ARCHIVE) as archive:
    archive.extractall(folder, filter='data')
  return folder


def activation(name: str) -> str:
  return name.split('-')[0].split('_')[0] if name.endswith('tied') and not name.startswith('scanned') else 'gelu'


@functools.partial(jax.jit, static_argnums=0)
def logits(network, params, source, inputs):
  cache = network.prefill(params, Prompt(source, (source > 0).sum(1)), inputs.shape[1])
  positions = jnp.tile(jnp.arange(inputs.shape[1])[None], (len(inputs), 1))
  return network.extend(params, cache, inputs, positions)[0]


def error(written, name, scan=False) -> float:
  """Return the greatest difference from T5X's logits."""
  expected = np.load(written / name / 'expected.npz')
  model = checkpoints.load(written / name, dtype='float32', activation=activation(name), scan=scan)
  ours = logits(model.network, model.params, expected['source'], expected['inputs'])
  assert np.ptp(expected['logits']) > 1
  return float(np.abs(ours - expected['logits']).max())


@pytest.mark.parametrize('name', long_but(NAMES, NAMES[::8]))
def test_logits_are_t5xs(written, name):
  assert error(written, name) < 1e-5


SCANNED = ['scanned-float32-v3', 'bias_by_layer-bfloat16-v2', 't5-float32-v3']


@pytest.mark.parametrize('name', long_but(SCANNED, SCANNED[1:2]))
def test_logits_are_t5xs_with_layers_scanned_here(written, name):
  assert error(written, name, scan=True) < 1e-5


def test_the_archive_has_what_it_is_for():
  for part in ('t5-', 'scanned-', 'scanned_axis0-', 'bias_by_layer-', '-v2', '-inlined', 'bfloat16', '-tied', 'orbax'):
    assert [name for name in NAMES if part in name], part
  assert len(NAMES) >= 38


def test_stored_numbers_are_kept(written):
  for version in ('v2', 'v3', 'v2-inlined'):
    model = checkpoints.read(written / f't5-bfloat16-{version}', activation='gelu')
    assert model.network.dtype == 'bfloat16'
    assert {x.dtype.name for x in jax.tree.leaves(model.params)} == {'bfloat16'}


def test_a_bias_that_all_layers_have_is_one(written):
  biases = {
    name: checkpoints.read(written / name, activation='gelu').network.config.shared_bias
    for name in ('scanned-one_bias', 'scanned-float32-v3', 'bias_by_layer-float32-v3', 't5-float32-v3')
  }
  assert biases == {name: name in ('scanned-one_bias', 't5-float32-v3') for name in biases}


def test_decoder_only_is_refused_by_name(written):
  with pytest.raises(ValueError, match='decoder_only/checkpoint_7: .*decoder_only'):
    checkpoints.read(written / 'decoder_only', activation='gelu')


def test_the_activation_is_said_or_the_checkpoint_refused(written, tmp_path):
  folder = tmp_path / 'model'
  shutil.copytree(written / 'silu_linear-untied', folder)
  with pytest.raises(ValueError, match=having('config.gin', "activation='gelu'")):
    checkpoints.read(folder)
  with pytest.raises(ValueError, match=having("activation='tanh'", 'relu, gelu, silu')):
    checkpoints.read(folder, activation='tanh')

  def activation_with(**files):
    for file in folder.rglob('*.gin'):
      file.unlink()
    for name, text in files.items():
      (folder / f'{name}.gin').write_text(text)
    return checkpoints.read(folder).network.config.activation

  right, wrong = (
    "network.T5Config.mlp_activations = ('silu', 'linear')",
    "T5Config.mlp_activations = ('relu', 'linear')",
  )
  assert activation_with(config=right) == 'silu'
  assert activation_with(config=f'{right}\n# {wrong}', another=wrong) == 'silu'
  macro = "from __gin__ import dynamic_registration\nACTS = %OURS\nOURS = ('silu', %NONE)\nNONE = 'linear'\n"
  assert activation_with(a='x = 3', b=f'{macro}network.T5Config:\n  emb_dim = 8\n  mlp_activations = %ACTS') == 'silu'
  assert activation_with(config='network.T5Config.emb_dim = 8', b=right) == 'silu'
  for files, message in (
    (dict(a=right, b=wrong), having('a.gin', "('silu', 'linear')", 'b.gin')),
    (dict(config='network.T5Config.mlp_activations = %ACTS'), having('mlp_activations', 'ACTS')),
    (dict(config="T5Config.mlp_activations = ('linear', 'silu')"), having('mlp_activations', "('linear', 'silu')")),
    (dict(config="T5Config.mlp_activations = ('silu',)"), having('1', 'wi', '2')),
    (dict(config='# ' + right), "activation='gelu'"),
    (dict(config=right + '\n)'), 'config.gin'),
  ):
    with pytest.raises(ValueError, match=message):
      activation_with(**files)
  assert checkpoints.read(folder, activation='silu').network.config.activation == 'silu'
