"""The command for accelerators, on a small scale; models with random weights and dialled acceptance."""

import importlib.util
import json
from types import SimpleNamespace

import accelerator
import bench
import jax
import jax.numpy as jnp
from matching import says
import numpy as np
import pytest
from tiers import quick

from speccascade import decode, methods
from speccascade.models import shapes, toy
from speccascade.models.t5 import T5, T5Config
from speccascade.planning import synthetic, timing
from speccascade.types import Model

NETWORK = T5(T5Config(97, 32, 4, 8, 64, 1, 2), dtype='bfloat16')


def test_a_benchmark_beside_transformers_asks_for_them_before_it_works(monkeypatch, capsys):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'torch' else find(name))
  with pytest.raises(SystemExit):
    bench.main(['no', 'models', '--prompts', 'none', '--reference'])
  assert "--reference needs torch and transformers: pip install -e '.[parity]'" in capsys.readouterr().err


@pytest.mark.parametrize('option', ['--count', '--trials', '--batches'])
def test_a_benchmark_of_nothing_is_refused(capsys, option):
  with pytest.raises(SystemExit):
    bench.main(['models', 'none', '--prompts', 'nowhere', option, '0'])
  assert says(capsys.readouterr().err, option, "'0'", 'at least 1')


@pytest.mark.full
def test_a_benchmark_tells_what_calls_alone_would_give(monkeypatch):
  network = T5(T5Config(12, 8, 2, 4, 8, 1, 1))
  models = [Model(network.init(jax.random.key(i)), network, name=name) for i, name in enumerate(('small', 'large'))]
  monkeypatch.setattr(timing, 'interleave', lambda runs, trials: {name: [run()] for name, run in runs.items()})
  calls = dict.fromkeys(bench.TIMED, np.array([[4, 2], [2, 1]]))
  runs = dict.fromkeys(bench.TIMED, lambda: (1.0,))
  found = bench.possible(models, [[2, 3], [4]], runs, calls, SimpleNamespace(tokens=4, block=2, trials=1))
  assert found.keys() == {*bench.TIMED[1:]} and all(x > 0 for row in found.values() for x in row.values())


def test_a_benchmark_is_compared_with_the_figures_before_it(monkeypatch, tmp_path, capsys):
  record = lambda speedup: dict(batch=1, temperature=0.0, methods={'cos': dict(speedup=speedup, noise=0.1)})
  out = tmp_path / 'out.json'
  out.write_text(json.dumps({'records': [record(2.0)]}))
  monkeypatch.setattr(synthetic, 'random_model', lambda *_: toy.model(0))
  monkeypatch.setattr(bench, 'measure', lambda *_: [record(1.0)])
  args = ['--shapes', 'small', 'small', '--out', str(out), '--against']
  assert bench.main([*args, str(out)]) == 1
  with pytest.raises(SystemExit):
    bench.main([*args, 'nowhere.json'])
  assert says(capsys.readouterr().err, 'nowhere.json', '--out')
  assert json.loads(out.read_text())['records'] == [record(1.0)]


@pytest.mark.full
def test_the_command_writes_every_figure_and_passes_its_checks(tmp_path, capsys):
  assert accelerator.main(['--tiny', '--out', str(tmp_path)]) == 0
  rows = [json.loads(line) for line in (tmp_path / 'figures.jsonl').read_text().splitlines()]
  checks = [row for row in rows if row['kind'] == 'check']
  assert {row['name'].split()[0] for row in checks if row['passed']} == {'float32', 'bfloat16'}
  assert len(checks) == 14 and all(0 < row['acceptance'] < 1 for row in checks if 'acceptance' in row)
  (timing,) = (row for row in rows if row['kind'] == 'timing')
  assert 1 < timing['tokens_per_round'] <= 3 and timing['plain_ms'] > 0 and timing['floor_ms'] > 0
  assert np.isfinite([timing[name] for name in accelerator.SHOWN if name != 'memory']).all()  # noise may turn signs
  assert 't5_small_xl' in capsys.readouterr().out


def test_what_no_longer_fits_the_budget_is_left_out_and_said(tmp_path):
  assert accelerator.main(['--tiny', '--budget', '1', '--only', 't5_small_xl', '--out', str(tmp_path)]) == 0
  rows = [json.loads(line) for line in (tmp_path / 'figures.jsonl').read_text().splitlines()]
  assert [row['kind'] for row in rows] == ['machine', 'skipped']


def test_a_failed_check_fails_the_command(tmp_path, monkeypatch):
  wrong = lambda *_: {'distribution': lambda: {'distribution of x': dict(p=0.0, passed=False)}}
  monkeypatch.setattr(accelerator, 'distribution_checks', wrong)
  monkeypatch.setattr(accelerator, 'equality_checks', lambda *_: {})
  assert accelerator.main(['--tiny', '--only', 'checks', '--out', str(tmp_path)]) == 1


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
}


@pytest.mark.parametrize('name', quick(BILLIONS, ['t5_small_xl', 'llama_68m_7b']))
def test_pairs_have_the_published_numbers_of_parameters(name):
  for network, expected in zip(shapes.pair(name), BILLIONS[name], strict=True):
    assert synthetic.tree_bytes(network.param_shapes()) / 2e9 == pytest.approx(expected, rel=0.01)
