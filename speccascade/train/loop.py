"""The training loop: checkpoints from which the same command goes on, progress, and the model at the end.

  <out>/train.json    the settings, and digests of models and tokenizer: with these a run goes on and with no others
  <out>/data.json     digests of the data up to the first and the last saved steps, which must be the same again
  <out>/state/        Orbax: parameters, optimizer state and step
  <out>/log.jsonl     the lines that were printed
  <out>/lock          the process that trains
  <out>/model/        the result, for `speccascade.load`, written once

The data are read from the start again after a restart and stepped over, so what they give must be the same each time.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from pathlib import Path
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from speccascade.checkpoints import digests, hf, orbax
from speccascade.data import tokenizers
from speccascade.host import multihost, storage
from speccascade.host.journal import Journal
from speccascade.train.batches import Batch, batches, Pair
from speccascade.train.losses import Distillation, loss
from speccascade.train.optimizers import Optimizer
from speccascade.types import Model, Network, Params, whole

# Settings that may change while a run goes on: its steps are the same under all of them.
_FREE = {'log_every': 1, 'save_every': 1, 'save_dtype': 'float32', 'format': 'orbax'}


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to train, apart from what and on what."""

  steps: int
  batch_size: int = 64
  widths: tuple[int, ...] = (16, 32, 64)  # to one of which a batch is padded; the last is the limit
  optimizer: Optimizer = Optimizer()
  distillation: Distillation | None = None  # token-level, where there is a teacher
  seed: int = 0
  log_every: int = 50
  save_every: int = 500
  save_dtype: str = 'float32'  # of <out>/model
  format: str = 'orbax'  # or hf

  def __post_init__(self):
    for name in ('steps', 'batch_size', 'log_every', 'save_every'):
      whole(name, getattr(self, name))
    if not self.widths or min(self.widths) < 1:
      raise ValueError(f'widths={self.widths} must be token counts of at least 1')
    if self.format not in ('orbax', 'hf') or self.save_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
        f'format={self.format!r} must be orbax or hf, save_dtype={self.save_dtype!r} float32 or bfloat16'
      )


def train(
  out, network: Network, pairs: Iterable[Pair], settings: Settings, *, tokenizer=None, start: Model | None = None,
  teacher: Model | None = None, say=print,
) -> Model:  # fmt: skip
  """Train a network on pairs of (source tokens, target tokens), or go on where a run in `out` was stopped.

  `start` gives the first parameters, random ones without it. With a teacher its distributions are learnt, as
  `settings.distillation` says. Of several devices, also those of several processes, which share `out`, each has the
  parameters and, where their number divides the batch, a share of it.
  """
  out = Path(out).expanduser().absolute()
  _check(out.name, network, settings, start, teacher)
  tokenizer = None if tokenizer is None else tokenizers.load(tokenizer)
  with multihost.on_writer(storage.lock(out / 'lock', 'choose another folder')):
    identity = _identity(network, settings, tokenizer, start=start, teacher=teacher)
    multihost.once(lambda: _same_settings(out / 'train.json', identity, (out / 'model').exists()))
    params = _train(out, network, pairs, settings, start, teacher, say)
    model = Model(params, network, tokenizer, out.name)
    if not multihost.once((out / 'model').exists):
      _write(out / 'model', model, settings)
  return model


def _train(out: Path, network: Network, pairs: Iterable[Pair], settings: Settings, start, teacher, say) -> Params:
  """Return the parameters after the last step, going on from the last one that is saved."""
  params = start.params if start else jax.jit(network.init)(jax.random.key(settings.seed))
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)  # a copy: steps take their state's memory over
  transform = settings.optimizer.build(network, settings.steps)
  with _checkpoints(out / 'state') as manager:
    state = _restored(manager, multihost.replicated({'params': params, 'optimizer': transform.init(params)}))
    done = manager.latest_step() or 0
    networks = [network] if teacher is None else [network, teacher.network]
    all_batches = batches(pairs, settings.batch_size, settings.widths, networks=networks, seed=settings.seed)
    stream = _Stream(all_batches, out / 'data.json')
    stream.step_over(done, finished=done >= settings.steps)
    if done < settings.steps:
      if done:
        say(f'going on after step {done} of {settings.steps} in {out}')
      if settings.batch_size % jax.device_count():
        say(f'each of {jax.device_count()} devices computes all of a batch: give a batch_size that they divide')
      teacher = multihost.replicated(teacher)
      with contextlib.closing(Log(out / 'log.jsonl', settings, done, say)) as log:
        state = _steps(network, transform, state, stream, done, settings, teacher, manager, log)
  return jax.device_put(multihost.to_host(state['params']), jax.local_devices()[0])


def _identity(network: Network, settings: Settings, tokenizer, **models: Model | None) -> dict[str, str | None]:
  """Return what belongs to a run: with another of these it does not go on."""
  found = {'network': repr(network), 'settings': repr(dataclasses.replace(settings, **_FREE))}
  found |= {name: model and digests.of_params(model.params) for name, model in models.items()}
  found['tokenizer'] = tokenizer and digests.of_files({Path(p).name: Path(p) for p in tokenizer.files()})
  return found | {'model': f'{settings.format}, {settings.save_dtype}'}


def _steps(network, transform, state, stream, done: int, settings: Settings, teacher, manager, log):
  """Return the state after the last step."""
  step = make_step(network, transform, teacher is not None and (settings.distillation or Distillation()) or None)
  before = ()
  try:
    for number in range(done + 1, settings.steps + 1):
      batch = next(stream, None)
      if batch is None:
        raise ValueError(f'the data end after {number - 1} steps, not {settings.steps}: repeat them, or lower steps')
      with _undisturbed():
        state, parts = step(state, multihost.by_rows(batch), teacher)
        jax.block_until_ready(before)  # no more than two steps are under way, so that a stop is soon answered
        before = parts
        log.add(number, parts, int(batch.target_length.sum()))
        if number % settings.save_every == 0 or number == settings.steps:
          stream.write_digest(number)
          _save(manager, number, state)
  except KeyboardInterrupt:
    jax.block_until_ready(state)  # a process that leaves while its device computes may crash
    raise
  return state


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
  """Hold Ctrl-C and SIGTERM back to the end of the block: numpy and Orbax lose what is raised while they run."""
  if threading.current_thread() is not threading.main_thread():  # no handler of Python's runs in it
    yield
    return
  received, before = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  for number in before:
    signal.signal(number, lambda number, _: received.append(number))
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
      signal.raise_signal(received[0])


class _Stream:
  """Batches, with a digest of all that were read, by which a run that goes on knows its data again."""

  def __init__(self, stream: Iterator[Batch], file: Path):
    self._stream, self._file, self._read = stream, file, hashlib.sha256()

  def __next__(self) -> Batch:
    batch = next(self._stream)
    for x in jax.tree.leaves(batch):
      self._read.update(x.tobytes())
    return batch

  def write_digest(self, step: int):
    """Store the digest of the data up to a step before its state is saved, next to those of earlier states."""
    multihost.once(lambda: self._write(step))

  def _write(self, step: int):
    known = list(_stored(self._file).items()) if self._file.is_file() else []
    storage.write(self._file, json.dumps(dict(known[:1] + known[1:][-2:]) | {str(step): self._read.hexdigest()}))

  def step_over(self, steps: int, finished: bool = False):
    """Read the batches of the steps that are done, and raise where they are not the ones that these were made with.

    Of a run that is finished they are those up to its first saved step.
    """
    known = multihost.once(lambda: _stored(self._file) if self._file.is_file() else {})
    steps = int(next(iter(known), steps)) if finished else steps
    for _ in range(steps):
      next(self, None)
    if not steps:
      return
    if known.get(str(steps)) != self._read.hexdigest():
      raise ValueError(
        f'{self._file.parent} holds a run on other data than these, in its first {steps} steps: give it the same '
        'again, choose another folder, or remove it'
      )


def make_step(network: Network, transform: optax.GradientTransformation, distillation: Distillation | None):
  """Return the jitted step: (state, batch, teacher) -> (state, parts of the loss)."""

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, batch: Batch, teacher):
    def objective(params):
      return loss(network, params, batch, teacher, distillation)

    (value, parts), gradient = jax.value_and_grad(objective, has_aux=True)(state['params'])
    with jax.numpy_dtype_promotion('standard'):  # optax multiplies rates by its integer counts
      updates, optimizer = transform.update(gradient, state['optimizer'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates), 'optimizer': optimizer}, {'loss': value, **parts}

  return step


class Log:
  """Prints and stores a line every `log_every` steps: the loss since the last one, the rate and the time left."""

  def __init__(self, file: Path, settings: Settings, done: int, say):
    self._settings, self._say = settings, say
    self._first, self._start = done, time.monotonic()
    self._parts, self._tokens = [], 0
    self._journal = Journal(file, ('step',), elsewhere='choose another folder')
    self._journal.keep_while(lambda line: line['step'] <= done)  # later steps are now done again

  def add(self, step: int, parts: dict[str, jax.Array], tokens: int) -> None:
    """Count a step; its numbers stay on the device until they are printed."""
    self._parts.append(parts)
    self._tokens += tokens
    if step % self._settings.log_every and step != self._settings.steps:
      return
    values = jax.device_get(self._parts)
    self._parts = []
    means = {name: float(np.mean([p[name] for p in values])) for name in parts}
    if not np.isfinite(means['loss']):
      raise FloatingPointError(f'the loss is {means["loss"]} before step {step}: lower learning_rate, or raise warmup')
    seconds = time.monotonic() - self._start
    self._journal.append([{'step': step, **means, 'seconds': seconds}])
    if multihost.is_writer():
      self._print(step, means, seconds)

  def _print(self, step: int, means: dict[str, float], seconds: float):
    rate = (step - self._first) / seconds
    left = tqdm.tqdm.format_interval((self._settings.steps - step) / rate)
    values = ' '.join(f'{name} {value:.3f}' for name, value in means.items())
    speed = f'{rate:.2f} steps/s  {self._tokens / seconds:.0f} tokens/s'
    self._say(f'step {step}/{self._settings.steps}  {values}  {speed}  {left} left', flush=True)

  def close(self):
    """Close the file."""
    self._journal.close()


def _check(name: str, network: Network, settings: Settings, start: Model | None, teacher: Model | None) -> None:
  """Raise before any work for what cannot be trained, or not written."""
  if settings.format == 'hf':
    hf.check(network, name)
  if start is not None and start.network.config != network.config:
    raise ValueError(f'start is a {start.network.config}, but network a {network.config}: give them the same sizes')
  if start is not None and start.network.scan != network.scan:
    raise ValueError(f'start has scan={start.network.scan}, but network scan={network.scan}: load start like network')
  if settings.distillation is not None and teacher is None:
    raise ValueError('distillation needs a teacher: give one, or leave distillation out')
  if teacher is not None and (teacher.network.start_id is None) != (network.start_id is None):
    raise ValueError(f'{teacher.name} cannot teach: one of both is an encoder–decoder, one is not')
  if network.dtype != 'float32':
    raise ValueError(f'network.dtype={network.dtype!r}: parameters are trained in float32; save_dtype sets the result')


def _stored(file: Path) -> dict:
  """Return the JSON object in a file of the run."""
  try:
    value = json.loads(file.read_bytes())
  except ValueError:
    value = None
  if not isinstance(value, dict):
    raise ValueError(f'{file} is damaged: remove {file.parent} to train anew, or choose another folder')
  return value


def _same_settings(file: Path, settings: dict[str, str | None], finished: bool) -> None:
  """Write the settings of a new run, or raise where a run of others is there; how a model is written may change."""
  if file.is_file():
    before = _stored(file)
    if finished and before.get('model') != settings['model']:
      raise ValueError(
        f'{file.parent}/model is there, written as {before.get("model")}, and is not written again as '
        f'{settings["model"]}: python -m speccascade.convert gives another format, or remove it'
      )
    for name, value in settings.items():
      if name != 'model' and before.get(name) != value:
        raise ValueError(
          f'{file.parent} holds a run with {name} {before.get(name)}, not {value}: choose another folder, or remove it'
        )
  storage.write(file, json.dumps(settings, indent=1) + '\n')


def _checkpoints(folder: Path):
  import orbax.checkpoint as ocp  # lazily: a second of imports

  logging.getLogger('absl').setLevel(logging.ERROR)  # its remarks on how one process should use it
  options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
  return ocp.CheckpointManager(folder, options=options)


def _save(manager, step: int, state) -> None:
  import orbax.checkpoint as ocp  # lazily: a second of imports

  manager.save(step, args=ocp.args.StandardSave(state))


def _restored(manager, state):
  """Return the newest state of a run, or the given one where there is none."""
  import orbax.checkpoint as ocp  # lazily: a second of imports

  step = manager.latest_step()
  if step is None:
    return state
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  return manager.restore(step, args=ocp.args.StandardRestore(shapes))


def _write(folder: Path, model: Model, settings: Settings) -> None:
  """Write the result, rounded to the dtype of the file."""
  network = dataclasses.replace(model.network, dtype=settings.save_dtype)
  params = jax.tree.map(lambda x: x.astype(settings.save_dtype), model.params)
  model = Model(params, network, model.tokenizer, model.name)
  multihost.once(lambda: _save_model(folder, model, settings))


def _save_model(folder: Path, model: Model, settings: Settings) -> None:
  (orbax.save if settings.format == 'orbax' else hf.write)(folder, model, overwrite=True)
