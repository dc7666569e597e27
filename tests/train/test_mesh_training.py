"""Training on a mesh learns what one device learns, is sharded, and goes on to the same bits after SIGKILL."""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys

from jax.sharding import AbstractMesh
from matching import having
import numpy as np
import pytest
from small import copies, quiet, settings, T5_NET
from tiers import long_but

from speccascade.models import shapes
from speccascade.train import layout
from speccascade.train.loop import train

HERE = Path(__file__).parent
RATE = 1e-2  # of mesh_runs.py, and its steps
STEPS = 6
TERMS = 256  # of the longest sum: the vocabulary; a batch has 16 · 8 tokens, a layer 128 units


def run(out: Path, *cases: str) -> subprocess.CompletedProcess:
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.pathsep.join(map(str, sys.path))}
  command = [sys.executable, str(HERE / 'mesh_runs.py'), str(out), *cases]
  return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def lines(out: Path, *cases: str) -> list[dict]:
  done = run(out, *cases)
  assert done.returncode == 0, done.stderr[-4000:]
  return [json.loads(line) for line in done.stdout.splitlines()]


def check_equal(out: Path, one: str, other: str) -> None:
  """Compare the parameters of two runs, up to the rounding of float32 numbers.

  A step adds to each parameter, with a rounding of 2⁻²⁴ of it on either side, RATE times the root mean square of its
  tensor times an update, whose tensor has a root mean square of no more than 1. The update's relative error is that of
  sums in another order: 2⁻²⁴ for each term, on either side.
  """
  params = [np.load(out / f'{case}.npz') for case in (one, other)]
  assert len(params[0].files) > 10
  for name in params[0].files:
    a, b = (x[name] for x in params)
    tolerance = STEPS * 2**-23 * (np.abs(a).max() + RATE * TERMS * np.sqrt((a**2).mean()))
    np.testing.assert_allclose(b, a, rtol=0, atol=tolerance, err_msg=name)


def losses(out: Path, case: str) -> list[float]:
  return [json.loads(line)['loss'] for line in (out / case / 'log.jsonl').read_text().splitlines()]


@pytest.mark.long
def test_a_mesh_trains_what_one_device_trains_and_after_sigkill_goes_on_to_the_same_bits(tmp_path):
  case = 't5:adafactor:2x4:2'
  one, mesh = lines(tmp_path, 't5:adafactor:1x1:1', case)
  assert one['digest'] != mesh['digest'] and mesh['devices'] == 8
  check_equal(tmp_path, one['case'], case)
  np.testing.assert_allclose(losses(tmp_path, case), losses(tmp_path, one['case']), rtol=1e-6)
  (total, own), (rows, own_rows) = mesh['state'], mesh['batch']
  assert own < 0.27 * total and own_rows == rows / 2  # but for norms, all is divided by four
  killed = run(tmp_path / 'killed', f'{case}:killed')
  assert killed.returncode == -signal.SIGKILL and not killed.stdout
  (resumed,) = lines(tmp_path / 'killed', case)
  assert resumed['steps'] == 3 and resumed['digest'] == mesh['digest']


TRAINED = [
  ('t5:adafactor:1x1:1', ['t5:adafactor:2x4:2']),
  ('t5:adafactor:1x1:1', ['t5:adafactor:4x2:1', 't5:adafactor:all:1']),
  ('scanned:adafactor:1x1:1', ['scanned:adafactor:2x4:2']),
  ('decoder:adafactor:1x1:1', ['decoder:adafactor:2x4:4', 'decoder:adafactor:8x1:1']),
  ('taught:adafactor:1x1:1', ['taught:adafactor:2x4:1']),
  ('masked:adafactor:1x1:1', ['masked:adafactor:2x4:1']),
  ('head:adafactor:1x1:1', ['head:adafactor:2x4:1']),
]


@pytest.mark.full
@pytest.mark.parametrize('one, others', long_but(TRAINED, [TRAINED[0]]))
def test_every_network_is_trained_alike_on_a_mesh(one, others, tmp_path):
  _, *found = lines(tmp_path, one, *others)
  for other, line in zip(others, found, strict=True):
    check_equal(tmp_path, one, other)
    assert line['devices'] == (1 if ':all:' in other else 8)
    total, own = line['teacher']
    assert own < 0.27 * total if one.startswith(('taught', 'head')) else not total
    total, own = line['state']
    # But for norms, and what a head reads states by, all is divided by four.
    most = 0.4 if one.startswith('head') else 0.27
    assert own < most * total or ':2x4:' not in other


@pytest.mark.long
def test_adams_moments_are_sharded_and_its_losses_those_of_one_device(tmp_path):
  one, mesh = 'decoder:adamw:1x1:1', 'decoder:adamw:2x4:1'
  _, line = lines(tmp_path, one, mesh)
  total, own = line['state']
  assert own < 0.27 * total
  np.testing.assert_allclose(losses(tmp_path, mesh), losses(tmp_path, one), rtol=1e-5)


def mesh_of(data: int, model: int) -> AbstractMesh:
  return AbstractMesh((data, model), ('data', 'model'))


def test_what_a_mesh_does_not_divide_is_an_error_before_any_work(tmp_path):
  with pytest.raises(ValueError, match=having('batch_size=4', 'microbatches=3', 'multiple of 3')):
    train(tmp_path / 'run', T5_NET, copies(), settings(microbatches=3), echo=quiet)
  assert not (tmp_path / 'run').exists()
  with pytest.raises(ValueError, match=having('batch_size=6', 'data=4', 'multiple of 8')):
    layout.check_rows(mesh_of(4, 1), 6, 2)
  small = shapes.t5('small', 'float32')  # six heads
  with pytest.raises(ValueError, match=having('drafter', 'heads', "'model': 4", 'mesh.shape', "'replicated'")):
    layout.of_params('drafter', small, small.param_shapes(), mesh_of(1, 4), 'sharded')
  for mesh, rules in ((mesh_of(1, 2), 'sharded'), (mesh_of(1, 4), 'replicated'), (mesh_of(4, 1), 'sharded')):
    assert layout.of_params('drafter', small, small.param_shapes(), mesh, rules)
