"""Compiling ahead of time: where arguments lie, the floor by bytes, and the report on a program for TPUs."""

import json

import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from speccascade import ahead, compile, methods
from speccascade.models import shapes
from speccascade.models.decoder import Decoder, DecoderConfig, Span

T5 = {
  'model_type': 't5',
  'vocab_size': 512,
  'd_kv': 64,
  'feed_forward_proj': 'gated-gelu',
  'tie_word_embeddings': False,
}
SMALL = T5 | {'d_kv': 64, 'd_model': 128, 'd_ff': 256, 'num_layers': 1, 'num_heads': 2}
LARGE = T5 | {'d_kv': 64, 'd_model': 256, 'd_ff': 512, 'num_layers': 2, 'num_heads': 4}


@pytest.fixture
def pair(tmp_path) -> list[str]:
  paths = [tmp_path / 'small.json', tmp_path / 'large.json']
  for path, config in zip(paths, (SMALL, LARGE), strict=True):
    path.write_text(json.dumps(config))
  return [str(path) for path in paths]


def run(capsys, *args) -> dict:
  assert compile.main([*args, '--json']) == 0
  return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_an_autoregressive_step_for_a_tpu_has_no_row_loops_no_cache_copies_and_no_weights_laid_out_anew(pair, capsys):
  pytest.importorskip('libtpu')
  found = run(capsys, '--topology', 'v5e:2x2', '--pair', *pair, '--method', 'autoregressive', '--batch', '1')
  assert (found['row_loops'], found['cache_copies'], found['entry_relayouts']) == (0, 0, 0)
  assert found['collectives'] == {} and found['estimated_cycles'] > found['floor_cycles'] > 0
  assert found['argument_bytes'] >= sum(found['arguments'].values()) > found['floor_bytes']
  assert sum(found['cycles_by_part'].values()) == pytest.approx(found['estimated_cycles'], rel=0.01)


def test_a_verifier_that_is_cut_over_chips_talks_and_holds_a_part(pair, capsys):
  pytest.importorskip('libtpu')
  args = ('--topology', 'v5e:2x2', '--pair', *pair, '--method', 'autoregressive', '--batch', '2')
  one, four = run(capsys, *args), run(capsys, *args, '--mesh', 'data=1,model=4')
  assert four['collectives']['all-reduce'][0] >= 6  # two layers: attention twice, MLP once
  assert four['arguments']['weights'] < 0.3 * one['arguments']['weights']
  assert four['floor_cycles'] == pytest.approx(one['floor_cycles'] / 4, abs=1)


def test_weights_are_cut_along_axes_that_divide_and_heads_as_a_whole():
  small, large = shapes.pair('t5_small_xl')
  layer = ahead.weight_specs(large, 4)['decoder']['layers_0']
  assert layer['self_attention']['query']['kernel'] == PartitionSpec(None, 'model')
  assert layer['mlp']['wo']['kernel'] == PartitionSpec('model', None)
  uneven = ahead.weight_specs(small, 4)['decoder']['layers_0']  # six heads
  assert uneven['self_attention']['query']['kernel'] == PartitionSpec(None, None)
  assert uneven['mlp']['wi_0']['kernel'] == PartitionSpec(None, 'model')
  whole = jax.tree.leaves(ahead.weight_specs(small, 1), is_leaf=lambda x: isinstance(x, PartitionSpec))
  assert all(name is None for spec in whole for name in spec)


def tiny(layers: int) -> Decoder:
  return Decoder(DecoderConfig(97, 32, 4, 1, 16, 48, (Span(),) * layers), (1,), 'bfloat16')


def test_the_floor_is_the_weights_and_used_caches_of_every_call():
  networks, sizes = (tiny(1), tiny(3)), ahead.Sizes(batch=2, source=100, tokens=60)
  step = ahead.floor_bytes(methods.autoregressive(1), networks, sizes)
  weights = 3 * (32 * 64 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 32 * 97  # not the embedding table
  assert step == 2 * (weights + 2 * 3 * 2 * 16 * 130)
  small = ahead.floor_bytes(methods.autoregressive(0), networks, sizes)
  assert ahead.floor_bytes(methods.speculative(block=5), networks, sizes) == step + 5 * small
  assert ahead.floor_bytes(compile.METHODS['opt'](5), networks, sizes) == step + 6 * small


def test_a_t5_step_does_not_read_the_encoder_or_what_reads_the_encoded_source():
  networks, sizes = shapes.pair('t5_small_xl'), ahead.Sizes(batch=1, source=256, tokens=128)
  cycles = ahead.floor_bytes(methods.speculative(block=5), networks, sizes) / 819e9 * 0.94e9
  assert cycles == pytest.approx(3.8e6, rel=0.02)
  weights = 24 * (6 * 2048**2 + 3 * 2048 * 5120 + 3 * 2048) + 2048 + 2048 * 32128 + 32 * 32
  caches = 2 * 24 * 2048 * (256 + 65)
  assert ahead.floor_bytes(methods.autoregressive(1), networks, sizes) == 2 * (weights + caches) + 4


def test_turns_of_the_drafts_are_those_after_the_window_that_catches_up():
  assert ahead.turns(methods.speculative(block=5)) == 4
  assert ahead.turns(compile.METHODS['opt'](5)) == 6
  assert ahead.turns(methods.autoregressive(1)) == 1


@pytest.mark.parametrize(
  'args, message',
  [
    (['--topology', 'v3:2x2', '--pair', 't5_small_xl'], "no chip 'v3': choose from v4, v5e"),
    (['--pair', 't5_huge'], "no pair 't5_huge': choose from"),
  ],
)
def test_what_is_not_known_is_said_in_a_line(args, message, capsys, monkeypatch):
  if '--topology' not in args:
    monkeypatch.setattr(ahead, 'describe', lambda name: type('Topology', (), {'devices': np.array(jax.devices())}))
  assert compile.main(args) == 1
  error = capsys.readouterr().err
  assert message in error and error.count('\n') == 1


def test_a_mesh_needs_its_chips_and_axes(capsys):
  for mesh in ({'data': 2, 'model': 4}, {'rows': 1}):
    with pytest.raises(ValueError, match='give data and model, at most 4 chips'):
      ahead.Placement([None] * 4, mesh)
  assert compile.main(['--pair', 't5_small_xl', '--mesh', 'model']) == 1
  assert "'model' is not like data=1,model=4" in capsys.readouterr().err
