"""Several processes over loopback run one program: the first writes, and where one dies the others say so and end."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
from matching import says
import numpy as np
import pytest
from runs import finish, GOOD, lines_in, same_bytes, start, wait_until, written
from tiers import long_but

import speccascade
from speccascade.checkpoints import hf
from speccascade.host import multihost
from speccascade.host.errors import RunError
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = '--xla_force_host_platform_device_count='


def address() -> str:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{free.getsockname()[1]}'


def environment(where: str, process: int, devices: int = 2) -> dict[str, str]:
  """Return what tells a process which of two it is."""
  flags = f'{os.environ["XLA_FLAGS"]} {DEVICES}{devices}'
  return dict(
    JAX_COORDINATOR_ADDRESS=where,
    JAX_NUM_PROCESSES='2',
    JAX_PROCESS_ID=str(process),
    XLA_FLAGS=flags,
    JAX_PLATFORMS='cpu',
    PYTHONPATH=str(ROOT),
  )


TOGETHER = """
import contextlib, sys
from speccascade import decode, embedded, load, mesh, methods, place
from speccascade.decode import scoring
from speccascade.host import multihost
from speccascade.host.errors import RunError
from speccascade.models import toy
from speccascade.planning import timing

several = sys.argv[1] == 'two'
say = lambda *said: print('>', *said, file=sys.stderr, flush=True)  # Gloo writes to the other stream
if several:
  multihost.start(60)
  mine = 1.0 if multihost.is_writer() else 2.0
  assert timing.interleave({(1, 2): lambda: mine}, 2) == {(1, 2): [1.0, 1.0]}  # by which a plan goes on
on = mesh({'data': 2, 'model': 2})
models = [load(f'{embedded._FOLDER}/{name}', mesh=on, rules='sharded') for name in ('small', 'large')]
scores = scoring.score(methods.speculative(), models, ['A dog runs.', 'A man.'], [[5, 6, 1], [7, 1]])
toys = [place(toy.model(i), on) for i in range(2)]
texts = decode(methods.speculative(block=2), toys, [[i] for i in range(4)], max_new_tokens=6).tokens
say([(x.logprobs.tolist(), x.greedy.tolist()) for x in scores], texts)
if not several:
  sys.exit()

@contextlib.contextmanager
def noted():
  say('entered')
  yield
  say('left')

def refuse():
  raise RunError('not so')

found = [multihost.is_writer(), multihost.count(), multihost.threads()]
found += [multihost.once(lambda: multihost.once(lambda: 'first') + f' {multihost.is_writer()}')]
found += [len(multihost.broadcast('x' * 3_000_000 if multihost.is_writer() else None))]
with multihost.on_writer(noted()):
  multihost.barrier()
try:
  multihost.once(refuse)
except RunError as error:
  found.append(str(error))
say(found)
multihost.LIMIT = 2
if not multihost.is_writer():
  multihost.leave(3)
try:
  multihost.barrier()
except RunError as error:
  say(error)
multihost.leave(4)
"""


def together(program: str, *args, alone: int) -> tuple[list[int], list[tuple[str, str]]]:
  """Run a program in two processes and in one of so many devices; return how each ended and what each printed."""
  where = address()
  started = [
    subprocess.Popen(
      [sys.executable, '-c', program, *(str(arg).format(kind=kind) for arg in args), kind],
      env=os.environ | environment(where, i, devices),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i, kind, devices in ((0, 'two', 2), (1, 'two', 2), (0, 'one', alone))
  ]
  found = [process.communicate(timeout=200) for process in started]
  return [process.returncode for process in started], found


@pytest.mark.full
def test_all_decode_and_know_what_the_writer_does_and_wait_no_longer_than_the_limit():
  codes, found = together(TOGETHER, alone=4)
  first, second, alone = ([x[2:] for x in said.splitlines() if x.startswith('> ')] for _, said in found)
  assert codes == [4, 3, 0] and first[0] == second[0] == alone[0]
  shared = "2, 1, 'first True', 3000000, 'not so']"
  assert first[1:4] == ['entered', 'left', f'[True, {shared}'] and second[1:] == [f'[False, {shared}']
  assert says(first[-1], 'nother process', '2 s (')


TRAINING = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from speccascade.host import multihost
from speccascade.checkpoints import hf
from speccascade.models.t5 import T5, T5Config
from speccascade.train.loop import Settings, train
from speccascade.train.optimizers import Optimizer
from speccascade.types import Model

out, several = sys.argv[1], sys.argv[2] == 'two'
if several:
  multihost.start(60)
network = T5(T5Config(12, 8, 2, 4, 8, 1, 1))
params = jax.jit(network.init)(jax.random.key(0))
if several:
  rows = NamedSharding(Mesh(np.array(jax.devices()), ('x',)), PartitionSpec('x'))
  spread = lambda x: jax.make_array_from_callback(x.shape, rows, lambda part: np.asarray(x)[part])
  params = jax.tree.map(lambda x: spread(x) if len(x) % 4 == 0 else x, params)
  assert not all(x.is_fully_addressable for x in jax.tree.leaves(params))
hf.write(f'{out}/saved', Model(params, network))

def pairs(stop=None):
  rng = np.random.default_rng(0)
  for i in range(2000):
    if i == stop:
      raise KeyboardInterrupt
    row = [*rng.integers(2, 12, rng.integers(2, 6)).tolist(), 1]
    yield row, row

optimizer = Optimizer(learning_rate=1e-2, warmup=2, schedule='constant')
settings = Settings(20, batch_size=4, widths=(8,), optimizer=optimizer, log_every=2, save_every=3)
said = []
say = lambda text, **_: said.append(text)
try:
  train(f'{out}/trained', network, pairs(64 if several else None), settings, echo=say)
except KeyboardInterrupt:
  train(f'{out}/trained', network, pairs(), settings, echo=say)
print('\\n'.join(said), flush=True)
"""


@pytest.mark.long
def test_two_processes_save_and_train_together_as_one_does_and_go_on(tmp_path):
  codes, found = together(TRAINING, tmp_path / '{kind}', alone=1)
  assert codes == [0, 0, 0], found
  assert 'going on after step 15 of 20' in found[0][0] and 'step 20/20' in found[0][0] and 'step 20' not in found[1][0]
  for name, tolerance in (('saved', 0), ('trained/model', 1e-4)):
    one, two = (speccascade.load(tmp_path / kind / name).params for kind in ('one', 'two'))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
      np.testing.assert_allclose(x, y, atol=tolerance, rtol=0)
  steps = [json.loads(line)['step'] for line in (tmp_path / 'two' / 'trained' / 'log.jsonl').read_text().splitlines()]
  assert steps == list(range(2, 21, 2))


def test_one_process_waits_for_nobody():
  assert multihost.is_writer() and multihost.count() == 1 and multihost.threads() == multihost.cpus()
  assert multihost.once(lambda: (1, 2)) == (1, 2) and multihost.broadcast(None) is None
  multihost.barrier()
  assert multihost.leave(1) == 1


PAIR = """
small/Checkpoint.path = 'small'
small/Checkpoint.rules = 'replicated'
large/Checkpoint.path = 'large'
large/Checkpoint.rules = 'sharded'
Experiment.temperatures = [1.0]
Experiment.quality_batch = 4
Experiment.trace_examples = 2
Experiment.latency_examples = 2
Experiment.latency_trials = 1
"""
UNLIKE = """
import os
from speccascade.planning import timing
timing.ENOUGH = 10.0 ** (9 if os.environ['JAX_PROCESS_ID'] == '0' else -9)  # as if one ran much faster
"""


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """Return a config of two models, beside them and the run of one process, which has them whole."""
  folder = tmp_path_factory.mktemp('pair')
  network = T5(T5Config(32, 16, 8, 4, 24, 1, 2))
  params = network.init(jax.random.key(0))
  noise = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
  near = jax.tree.map(lambda x: x * (1 + 0.3 * jax.random.normal(next(noise), x.shape)), params)
  for name, some in (('small', near), ('large', params)):
    hf.write(folder / name, Model(some, network))
  config = folder / 'pair.gin'
  config.write_text(GOOD.replace('@toys.models', '[@small/Checkpoint(), @large/Checkpoint()]') + PAIR)
  code, _, err = finish(start(config, 'one'))
  assert code == 0, err
  return config


@pytest.mark.parametrize(
  ('data', 'parts', 'victim'),
  long_but([(1, 4, 1), (2, 2, 0)], []),
)
def test_a_model_cut_over_two_processes_decodes_what_it_does_in_one(pair, data, parts, victim):
  folder, shape = pair.parent / f'{data}x{parts}', f"--gin.mesh.shape={{'data': {data}, 'model': {parts}}}"

  def begin(**more) -> list[subprocess.Popen]:
    where, flags = address(), ('--distributed', '--host_timeout=30', shape)
    return [start(pair, folder, *flags, **more, **environment(where, i)) for i in range(2)]

  both = begin()
  wait_until(lambda: lines_in(folder / 'examples.jsonl'), *both)
  both[victim].send_signal(signal.SIGKILL)
  code, out, err = finish(both[1 - victim])
  finish(both[victim])
  assert code and 'Report' not in out, (code, out, err)
  if victim:  # with the first process JAX's service is gone, and JAX aborts the others
    (error,) = [line for line in err.splitlines() if line.startswith('error: ')]
    assert code == 1 and 'nother process' in error and 'all hosts' in error
  for code, _, err in map(finish, begin(before=UNLIKE)):
    assert code == 0, err
  for name in ('examples.jsonl', 'models.json'):
    assert (folder / name).read_bytes() == (pair.parent / 'one' / name).read_bytes()
  assert len((folder / 'traces.jsonl').read_text().splitlines()) == 4
  environment_of = json.loads((folder / 'environment.json').read_text())
  assert environment_of['devices'] == 4


@pytest.mark.full
def test_what_the_first_process_cannot_do_is_one_error_of_both(tmp_path):
  config = written(tmp_path)
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'thesis.tex').write_text('x')
  where = address()
  both = [start(config, tmp_path / 'thesis', '--distributed', **environment(where, i)) for i in range(2)]
  for code, out, err in map(finish, both):
    assert code == 1 and not out and err.splitlines()[-1].startswith('error: ') and 'thesis.tex' in err


@pytest.mark.long
def test_a_process_of_several_that_is_told_to_end_does(tmp_path):
  config = written(tmp_path)
  alone = environment(address(), 0) | dict(JAX_NUM_PROCESSES='1', TOYS_SLEEP='60')
  process = start(config, tmp_path / 'run', '--distributed', **alone)
  wait_until((tmp_path / 'run' / 'examples.jsonl').exists, process)
  process.send_signal(signal.SIGTERM)
  code, out, err = finish(process)
  assert code == 143 and not out and err.splitlines()[-1] == 'interrupted; the same command goes on from here'


def test_processes_that_nothing_tells_of_each_other_are_told_what_to_set(monkeypatch):
  with pytest.raises(RunError, match='JAX_COORDINATOR_ADDRESS'):
    multihost.start(1)


@pytest.mark.long
def test_two_processes_of_which_each_was_killed_once_come_to_one_processs_bytes(tmp_path):
  config = written(tmp_path)
  (tmp_path / 'one').mkdir()
  (tmp_path / 'two').mkdir()

  def begin() -> list[subprocess.Popen]:
    where, flags = address(), ('--distributed', '--host_timeout=8')
    return [start(config, 'run', *flags, cwd=tmp_path / 'two', **environment(where, i)) for i in range(2)]

  lines = tmp_path / 'two' / 'run' / 'examples.jsonl'
  for victim, count in ((1, 4), (0, 24)):
    both = begin()
    wait_until(lambda count=count: lines_in(lines) >= count, *both)
    both[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    code, out, err = finish(both[1 - victim])
    finish(both[victim])
    assert code and not out and time.monotonic() - began < 20, (code, out, err)
    if victim:  # with the first process JAX's service is gone, and JAX aborts the others
      (error,) = [line for line in err.splitlines() if line.startswith('error: ')]
      assert code == 1 and 'it died, hangs, or needs more than 8 s' in error and 'all hosts' in error
  assert lines_in(lines) < 60
  (code, out, err), (other, silent, said) = map(finish, begin())
  assert code == other == 0 and 'Report: run/report.html' in out and not silent, (err, said)
  assert 'quality: 60/60 examples' in err and 'quality' not in said
  one = finish(start(config, 'run', cwd=tmp_path / 'one', XLA_FLAGS=f'{os.environ["XLA_FLAGS"]} {DEVICES}4'))
  assert one[0] == 0, one
  same_bytes(tmp_path / 'one' / 'run', tmp_path / 'two' / 'run')
