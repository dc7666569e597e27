"""The training loop: checkpoints from which the same command goes on, progress, and the model at the end.

  <out>/train.json    the settings, with which a run can be continued and no others
  <out>/state/        Orbax: parameters, optimizer state and step
  <out>/log.jsonl     what was printed
  <out>/model/        the result, for `speccascade.load`

The data are read from the start again after a restart and stepped over, so what they give must be the same each time.
"""

from collections.abc import Iterable
import dataclasses
import functools
import itertools
import json
import logging
from pathlib import Path
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from speccascade import tokenizers
from speccascade.checkpoints import hf_write, orbax
from speccascade.train.batches import Batch, batches, Pair
from speccascade.train.losses import Distillation, loss
from speccascade.train.optimizers import Optimizer
from speccascade.types import Model, Network, whole


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
  format: str = 'orbax'  # or hf, for T5

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

  `start` gives the first parameters, random ones without it. With a teacher its laws are learnt, as
  `settings.distillation` says.
  """
  _check(network, settings, start, teacher)
  tokenizer = None if tokenizer is None else tokenizers.load(tokenizer)
  out = Path(out).expanduser().absolute()
  out.mkdir(parents=True, exist_ok=True)
  _same_settings(
    out / 'train.json',
    {'network': repr(network), 'settings': repr(dataclasses.replace(settings, log_every=1, save_every=1))},
  )
  params = start.params if start else jax.jit(network.init)(jax.random.key(settings.seed))
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)  # a copy: steps take their state's memory over
  transform = settings.optimizer.build(network, settings.steps)
  with _checkpoints(out / 'state') as manager:
    state = _restored(manager, {'params': params, 'optimizer': transform.init(params)})
    done = manager.latest_step() or 0
    stream = batches(pairs, settings.batch_size, settings.widths, seed=settings.seed)
    if done:
      say(f'going on after step {done} of {settings.steps} in {out}')
    state = _steps(network, transform, state, itertools.islice(stream, done, None), done, settings, teacher, manager,
                   Progress(out / 'log.jsonl', settings, done, say))  # fmt: skip
  model = Model(state['params'], network, tokenizer, out.name)
  _write(out / 'model', model, settings)
  return model


def _steps(network, transform, state, stream, done: int, settings: Settings, teacher, manager, progress):
  """Return the state after the last step."""
  step = make_step(network, transform, teacher is not None and (settings.distillation or Distillation()) or None)
  for number in range(done + 1, settings.steps + 1):
    batch = next(stream, None)
    if batch is None:
      raise ValueError(f'the data end after {number - 1} steps, not {settings.steps}: repeat them, or lower steps')
    state, parts = step(state, batch, teacher)
    progress.add(number, parts, int(batch.target_length.sum()))
    if number % settings.save_every == 0 or number == settings.steps:
      _save(manager, number, state)
  return state


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


class Progress:
  """Prints a line every `log_every` steps: the loss since the last one, the rate and the time left."""

  def __init__(self, file: Path, settings: Settings, done: int, say):
    self._file, self._settings, self._say = file, settings, say
    self._first, self._start = done, time.monotonic()
    self._parts, self._tokens = [], 0
    if file.is_file():  # lines of steps that are now done again
      lines = [line for line in file.read_text(encoding='utf-8').splitlines(True) if line.endswith('}\n')]
      file.write_text(''.join(line for line in lines if json.loads(line)['step'] <= done), encoding='utf-8')

  def add(self, step: int, parts: dict[str, jax.Array], tokens: int) -> None:
    """Count a step; its numbers stay on the device until they are printed."""
    self._parts.append(parts)
    self._tokens += tokens
    if step % self._settings.log_every and step != self._settings.steps:
      return
    means = {name: float(np.mean([p[name] for p in self._parts])) for name in parts}
    self._parts = []
    if not np.isfinite(means['loss']):
      raise FloatingPointError(f'the loss is {means["loss"]} before step {step}: lower learning_rate, or raise warmup')
    seconds = time.monotonic() - self._start
    rate = (step - self._first) / seconds
    left = (self._settings.steps - step) / rate
    values = ' '.join(f'{name} {value:.3f}' for name, value in means.items())
    self._say(f'step {step}/{self._settings.steps}  {values}  {rate:.2f} steps/s  '
              f'{self._tokens / seconds:.0f} tokens/s  {_clock(left)} left', flush=True)  # fmt: skip
    with self._file.open('a', encoding='utf-8') as f:
      f.write(json.dumps({'step': step, **means, 'seconds': seconds}) + '\n')


def _clock(seconds: float) -> str:
  return f'{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}'


def _check(network: Network, settings: Settings, start: Model | None, teacher: Model | None) -> None:
  """Raise before any work for what cannot be trained."""
  if start is not None and start.network.config != network.config:
    raise ValueError(f'start is a {start.network.config}, but network a {network.config}: give them the same sizes')
  if settings.distillation is not None and teacher is None:
    raise ValueError('distillation needs a teacher: give one, or leave distillation out')
  if teacher is not None and (teacher.network.start_id is None) != (network.start_id is None):
    raise ValueError(f'{teacher.name} cannot teach: one of both is an encoder–decoder, one is not')
  if network.dtype != 'float32':
    raise ValueError(f'network.dtype={network.dtype!r}: parameters are trained in float32; save_dtype sets the result')


def _same_settings(file: Path, settings: dict[str, str]) -> None:
  """Write the settings of a new run, or raise where a run of others is there."""
  if file.is_file():
    before = json.loads(file.read_text(encoding='utf-8'))
    for name, value in settings.items():
      if before.get(name) != value:
        raise ValueError(
          f'{file.parent} holds a run with {name} {before.get(name)}, not {value}: choose another folder, or remove it'
        )
  file.write_text(json.dumps(settings, indent=1) + '\n', encoding='utf-8')


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
  """Write the result, rounded to the dtype it is to be kept in."""
  shutil.rmtree(folder, ignore_errors=True)
  network = dataclasses.replace(model.network, dtype=settings.save_dtype)
  params = jax.tree.map(lambda x: x.astype(settings.save_dtype), model.params)
  model = Model(params, network, model.tokenizer, model.name)
  (orbax.save if settings.format == 'orbax' else hf_write.write)(folder, model)
