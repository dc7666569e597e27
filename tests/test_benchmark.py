"""The benchmark on a small scale; models with random weights and dialled acceptance."""

import dataclasses
import importlib.util
import json

import bench
import jax
import jax.numpy as jnp
from matching import says
import numpy as np
import pytest
from tiers import long_but

from speccascade import decode, methods
from speccascade.models import shapes
from speccascade.models.t5 import T5, T5Config
from speccascade.planning import synthetic, timing

NETWORK = T5(T5Config(97, 32, 4, 8, 64, 1, 2), dtype='bfloat16')


def test_a_benchmark_beside_transformers_asks_for_them_before_it_works(monkeypatch, capsys):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'torch' else find(name))
  with pytest.raises(SystemExit):
    bench.main(['tiny', '--reference'])
  assert "--reference needs torch and transformers: pip install -e '.[parity]'" in capsys.readouterr().err


@pytest.mark.parametrize(
  'given, part', [(['a', 'b'], '--prompts'), (['t5_small'], 't5_small'), (['tiny', '--trials', '0'], "'0'")]
)
def test_a_benchmark_of_nothing_is_refused(given, part, capsys):
  with pytest.raises(SystemExit):
    bench.main(given)
  assert says(capsys.readouterr().err, part)


SMALL = (
  'tiny --dtype float32 --batches 2 --temperatures 0 --trials 1 --count 2 --tokens 8 --prompt-tokens 8 --block 2 --json'
)


@pytest.mark.long
@pytest.mark.parametrize('more', ['--long 24', '--ablate'])
def test_a_benchmark_prints_every_figure_of_a_record(more, capsys):
  assert bench.main([*SMALL.split(), *more.split()]) == 0
  machine, record = map(json.loads, capsys.readouterr().out.splitlines())
  assert machine['copy_gb_per_second'] > 0 and machine['command'][0] == 'tiny' and record['batch'] == 2
  if more == '--ablate':
    assert record['without'].keys() == bench.PIECES.keys()
    assert all(0 < row['speculative, from'] <= row['speculative'] for row in record['without'].values())
  else:
    assert record['calls_ms']['ms'].keys() == {'draft', 'plain', 'window', 'floor'}
    assert 1 < record['rounds']['speculative']['tokens'] <= 3
    assert all(row['tokens_per_second'] > 0 for row in record['decodes'].values())
  assert 'speculative' in bench.show(record)


def test_random_weights_are_noise_that_differs_by_place_parameter_and_seed():
  one, other = (synthetic.random_params(NETWORK, seed) for seed in (0, 1))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(
    lambda x: (x.shape, x.dtype), NETWORK.param_shapes()
  )
  wi = one['decoder']['layers_0']['mlp']['wi_0']['kernel'].astype(jnp.float32)
  assert abs(float(wi.mean())) < 0.01 and 0.9 < float(wi.std()) * 32**0.5 < 1.1
  assert np.unique(np.asarray(wi)).size > 300
  assert abs(np.corrcoef(np.asarray(wi)[:-1].ravel(), np.asarray(wi)[1:].ravel())[0, 1]) < 0.1
  for there in (one['decoder']['layers_1'], other['decoder']['layers_0']):
    assert (wi != there['mlp']['wi_0']['kernel'].astype(jnp.float32)).mean() > 0.9


@pytest.mark.full
def test_dialled_acceptance_keeps_that_share_of_tokens_whatever_the_models_say():
  models = [synthetic.random_model(NETWORK, str(i), i) for i in range(2)]
  method = methods.speculative(block=2, accept=timing.forced(0.75))
  stats = decode(method, models, [[5, 6]] * 32, max_new_tokens=32).stats
  assert (stats.emitted == 32).all()  # no text ends by itself
  assert stats.accepted.sum() / stats.tested.sum() == pytest.approx(0.75, abs=0.04)


BILLIONS = {
  't5_small_xl': (0.077, 2.85),
  't5_small_xxl': (0.077, 11.1),
  'llama_68m_7b': (0.068, 6.74),
  'llama_7b_70b': (6.74, 69.0),
  'gemma2_2b_9b': (2.61, 9.24),
  'gemma2_2b_27b': (2.61, 27.2),
  't5gemma_2b_9b': (5.59, 20.3),
  't5gemma2_270m_4b': (0.368, 7.09),
}


@pytest.mark.parametrize('name', long_but(BILLIONS, ['t5_small_xl', 'llama_68m_7b']))
def test_pairs_have_the_published_numbers_of_parameters(name):
  for network, expected in zip(shapes.pair(name), BILLIONS[name], strict=True):
    scanned = dataclasses.replace(network, scan=True)  # which has as many, and is traced sooner
    assert synthetic.tree_bytes(scanned.param_shapes()) / 2e9 == pytest.approx(expected, rel=0.01)


def test_a_round_and_a_start_follow_from_two_runs():
  assert bench.pace(np.array([5.0, 20, 40]), np.array([2.0, 5, 10])) == pytest.approx((0.2, 0.1, 2.0, 1.0))
