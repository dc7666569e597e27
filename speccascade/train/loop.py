"""The training loop: a run that the same command resumes, its log, and the model at the end.

  <out>/train.json    what identifies the run: settings, and digests of models and tokenizer; others cannot resume it
  <out>/state/        Orbax: parameters, optimizer state, step, and a digest of the data read so far
  <out>/log.jsonl     the log
  <out>/lock          the process that trains
  <out>/model/        the result, for `speccascade.load`, written once

A resumed run reads the data from the start and skips the steps it has done, so the data must be the same each time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import orbax.checkpoint as ocp
import tqdm

from speccascade.backends import sharding
from speccascade.checkpoints import digests, hf
from speccascade.data import tokenizers
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.hidden import beside, Head
from speccascade.drafters.medusa import Medusa
from speccascade.host import interrupt, multihost, storage, streams
from speccascade.host.runs import as_json, RunDir
from speccascade.models.decoder import Decoder
from speccascade.train import layout
from speccascade.train.batches import Batch, batches, by_size, Pair, Width
from speccascade.train.forcing import Drafting
from speccascade.train.losses import Distillation
from speccascade.train.optimizers import Optimizer
from speccascade.train.step import make_step, State
from speccascade.types import checked_int, Model, Network, Params

IDENTITY = 'train.json'
# Settings that may change when a run is resumed: its steps are the same under all of them, and under `microbatches`,
# `remat` and another mesh up to rounding.
_FREE = {'log_every': 1, 'save_every': 1, 'save_dtype': 'float32'}


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to train.

  Attributes:
    steps: Number of optimizer steps.
    batch_size: Pairs of a step.
    widths: Lengths to which batches are padded, for source and target alike or as (source, target); the largest is
      the longest text allowed.
    optimizer: The optimizer.
    distillation: The loss against a teacher; None for forward KL if there is a teacher.
    seed: Of the initial parameters and the order of batches.
    log_every: Steps between lines of the log.
    save_every: Steps between checkpoints.
    save_dtype: Dtype of <out>/model, float32 or bfloat16.
    truncate: Shorten what is longer than the largest width, as T5X does, and count it, instead of raising an error.
    microbatches: Parts of a batch whose gradients are computed one after another and summed, to save memory.
    remat: Recompute each layer in the backward pass instead of storing what it computed, to save memory.
    drafting: How a drafter in one pass, or a head beside a verifier, is trained; None for `Drafting()`.
  """

  steps: int
  batch_size: int = 64
  widths: tuple[Width, ...] = (16, 32, 64)
  optimizer: Optimizer = Optimizer()
  distillation: Distillation | None = None
  seed: int = 0
  log_every: int = 50
  save_every: int = 500
  save_dtype: str = 'float32'
  truncate: bool = dataclasses.field(default=False, repr=False)  # runs are identified by what is in the repr
  microbatches: int = dataclasses.field(default=1, repr=False)
  remat: bool = dataclasses.field(default=False, repr=False)
  drafting: Drafting | None = dataclasses.field(default=None, repr=False)

  def __post_init__(self):
    for name in ('steps', 'batch_size', 'log_every', 'save_every', 'microbatches'):
      checked_int(name, getattr(self, name))
    checked_int('seed', self.seed, 0)
    kinds = dict(widths=Sequence, optimizer=Optimizer, distillation=Distillation | None, truncate=bool, remat=bool)
    kinds |= dict(drafting=Drafting | None)
    for name, kind in kinds.items():
      if not isinstance(value := getattr(self, name), kind):
        raise ValueError(f'train.Settings: {name}={value!r} is no {getattr(kind, "__name__", kind)}.')
    by_size(self.widths)  # raises for what are no widths
    if self.save_dtype not in ('float32', 'bfloat16'):
      raise ValueError(f'save_dtype={self.save_dtype!r} must be float32 or bfloat16')


def train(
  out,
  network: Network,
  pairs: Iterable[Pair],
  settings: Settings,
  *,
  tokenizer=None,
  start: Model | Callable[[], Model] | None = None,
  teacher: Model | None = None,
  companion: Model | None = None,
  mesh: Mesh | None = None,
  rules: sharding.Rules | str | None = None,
  echo=print,
) -> Model:
  """Train a network, or resume the run in `out`.

  Parameters, optimizer state and teacher are sharded over the mesh as in decoding, batches over its rows. Several
  processes share `out`.

  Args:
    out: Folder of the run.
    network: The network, in float32.
    pairs: (source tokens, target tokens), the same each time the run is resumed.
    settings: How to train.
    tokenizer: Path of the tokenizer to save with the model.
    start: Model with the initial parameters; random ones by default. A function that returns it donates its arrays:
      they are freed when they are copied.
    teacher: Model whose distributions `settings.distillation` approximates.
    companion: Companion of speculative verification, with which the network is to draft for the teacher.
    mesh: Mesh of `speccascade.mesh`, on which the returned model lies, too; by default all devices have the parameters
      and share the rows, and the returned model lies on one of them.
    rules: Sharding rules of network and teacher, as `load` takes them; None for those of each one's size.
    echo: Prints a line of progress.

  Returns:
    The trained model, which is also in `out`/model.

  Raises:
    ValueError: if the network cannot be trained or saved so, the mesh does not divide it or the batches, the data do
      not fit it, or `out` has another run.
    FloatingPointError: if the loss or a parameter is not finite; no such state is saved.
  """
  out = RunDir(Path(out).expanduser().absolute(), 'choose another folder')
  name = out.path.name
  donated = callable(start)
  start = start() if donated else start
  _check(name, network, settings, start, teacher, companion)
  on = mesh or sharding.mesh({sharding.DATA: jax.device_count()})
  trained, initial, write = network, start, None
  if isinstance(network, Eagle) and network.config.draft_vocab:  # which tokens it scores is given, not trained
    trained = dataclasses.replace(network, spreads=False)
    write = start.params['write']
    initial = start.replace(params={key: x for key, x in start.params.items() if key != 'write'})
  run = _Run(out, trained, settings, on, rules, [teacher, companion], echo, None if write is None else _ids_of(write))
  tokenizer = None if tokenizer is None else tokenizers.load(tokenizer)
  with out.locked():
    out.clean()
    identity = _identity(network, settings, tokenizer, start=start, teacher=teacher, companion=companion)
    _check_identity(out, identity)
    params = run(pairs, initial, donated) | ({} if write is None else {'write': write})
    if mesh is None:
      params = jax.device_put(multihost.to_host(params), jax.local_devices()[0])
    model = Model(params, network, tokenizer, name)
    if not out.exists('model'):
      _write(out.path / 'model', model, settings.save_dtype)
  return model


class _Run:
  """A run on a mesh: its state is made or restored, and trained to the last step."""

  def __init__(
    self,
    out: RunDir,
    network: Network,
    settings: Settings,
    mesh: Mesh,
    rules,
    others: Sequence[Model | None],
    echo,
    drafted: tuple[int, ...] | None = None,
  ):
    self._out = out
    self._drafted = drafted
    self._network = network
    self._settings = settings
    self._mesh = mesh
    self._echo = echo
    self._transform = settings.optimizer.build(network, settings.steps)
    layout.check_rows(mesh, settings.batch_size, settings.microbatches)
    self._shapes = layout.of_state(out.path.name, network, self._transform, mesh, rules)
    self._shardings = layout.shardings(self._shapes)
    self._others = [x for x in others if x is not None]  # teacher and companion
    self._their_shardings = [layout.of_params(x.name, x.network, x.params, mesh, rules) for x in self._others]

  def __call__(self, pairs: Iterable[Pair], start: Model | None, donated: bool) -> Params:
    """Return the parameters after the last step, resuming from the last checkpoint.

    Args:
      pairs: (source tokens, target tokens).
      start: Model with the initial parameters.
      donated: Free its arrays.
    """
    settings = self._settings
    networks = [self._network, *(x.network for x in self._others)]
    options = dict(networks=networks, seed=settings.seed, truncate=settings.truncate)
    stream = _Stream(batches(pairs, settings.batch_size, settings.widths, **options))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    hints = streams.errors_alone('absl')  # Orbax's for a single process
    with hints, ocp.CheckpointManager(self._out.path / 'state', options=options) as manager:
      done = manager.latest_step() or 0
      state, unlogged = self._restored(manager, done, stream) if done else (self._first(start), [])
      if donated:
        jax.tree.map(lambda x: x.delete(), start.params)
      if done < settings.steps:
        if done:
          self._echo(f'going on after step {done} of {settings.steps} in {self._out}')
        log = Log(self._out, settings, done, unlogged, self._echo)
        state = self._steps(state, stream, done, manager, log)
    if settings.truncate:
      self._echo(f'truncated {stream.truncation(settings.steps * settings.batch_size)}')
    return state['params']

  def _first(self, start: Model | None) -> State:
    """Return the state before the first step."""
    shardings = self._shardings
    if start is None:
      key = jax.random.key(self._settings.seed)
      params = jax.jit(functools.partial(_initial, self._network), out_shardings=shardings['params'])(key)
    else:
      params = layout.put(start.params, shardings['params'])  # copies, for steps donate their state
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    optimizer = jax.jit(self._transform.init, out_shardings=shardings['optimizer'])(params)
    return {'params': params, 'optimizer': optimizer}

  def _restored(self, manager: ocp.CheckpointManager, step: int, stream: '_Stream') -> tuple[State, list]:
    """Return the state of a step and the losses since the last line of its log; skip the batches up to it.

    The batches are checked to be those that it was trained on.
    """
    items = ocp.args.Composite(state=ocp.args.StandardRestore(self._shapes), data=ocp.args.JsonRestore())
    saved = manager.restore(step, args=items)
    for _ in range(step):
      next(stream, None)
    unlogged = saved.data.pop('unlogged')
    if saved.data != stream.digest():
      raise ValueError(
        f'{self._out} has a run on other data, as its first {step} steps show: give it the same data, or choose '
        'another folder'
      )
    return saved.state, unlogged

  def _steps(self, state: State, stream: '_Stream', done: int, manager: ocp.CheckpointManager, log: 'Log') -> State:
    """Return the state after the last step."""
    settings = self._settings
    placed = zip(self._others, self._their_shardings, strict=True)
    others = [x.replace(params=layout.put(x.params, on, copy=False)) for x, on in placed] or [None]
    distillation = settings.distillation or Distillation() if self._others else None
    names = ('drafting', 'microbatches', 'remat')
    options = {name: getattr(settings, name) for name in names}
    options |= {'shardings': self._shardings, 'drafted': self._drafted}
    step = make_step(self._network, self._transform, distillation, **options)
    previous = ()
    try:
      for number in range(done + 1, settings.steps + 1):
        batch = next(stream, None)
        if batch is None:
          raise ValueError(f'the data end after {number - 1} steps, not {settings.steps}: repeat them, or lower steps')
        with interrupt.deferred():
          state, parts = step(state, layout.put_rows(batch, self._mesh), *others)
          jax.block_until_ready(previous)  # no more than two steps run at once, so that a stop waits for no others
          previous = parts
          log.add(number, parts, int(batch.target_length.sum()), stream)
          if number % settings.save_every == 0 or number == settings.steps:
            unlogged = log.unlogged()
            for value in unlogged:
              _check_finite(f'the loss is {value["loss"]}', np.isfinite(value['loss']), number)
            _check_finite('a parameter is not finite', _all_finite(state['params']), number)
            data = stream.digest() | {'unlogged': unlogged}
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
            manager.save(number, args=items)
    except KeyboardInterrupt:
      jax.block_until_ready(state)  # a process that exits while its device computes may crash
      raise
    return state


def _ids_of(write: jax.Array | np.ndarray) -> tuple[int, ...]:
  """Return the ids of tokens by their numbers [V], which are -1 for those without one."""
  write = np.asarray(write)
  return tuple(np.argsort(write, kind='stable')[np.count_nonzero(write < 0) :].tolist())


def _initial(network: Network, key: jax.Array) -> Params:
  """Return random parameters; the rows of a decoder's tied table, which score its tokens too, have a length of about 1.

  At the length √E of other tables the logits of the first step would be as large.
  """
  params = network.init(key)
  if not isinstance(network, Decoder) or not network.config.tied:
    return params
  return params | {'token_embedder': jax.tree.map(lambda x: x * x.shape[-1] ** -0.5, params['token_embedder'])}


@jax.jit
def _all_finite(params: Params) -> jax.Array:
  return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()


def _check_finite(found: str, finite: bool | jax.Array, step: int) -> None:
  if not finite:
    raise FloatingPointError(f'{found} by step {step}: lower learning_rate, or raise warmup')


class _Stream:
  """Batches, with a digest of all that were read and the number of texts that were truncated."""

  def __init__(self, stream: Iterator[Batch]):
    self._stream = stream
    self._hash = hashlib.sha256()
    self._truncated = np.zeros(2, int)

  def __next__(self) -> Batch:
    batch = next(self._stream)
    self._truncated += batch.truncated
    batch = batch.replace(truncated=None)
    for x in jax.tree.leaves(batch):
      self._hash.update(x.tobytes())
    return batch

  def digest(self) -> dict[str, str]:
    """Return the digest, for JSON."""
    return {'sha256': self._hash.hexdigest()}

  def truncated(self) -> dict[str, int]:
    """Return the numbers of truncated texts so far, for the log."""
    return dict(zip(('truncated_sources', 'truncated_targets'), self._truncated.tolist(), strict=True))

  def truncation(self, pairs: int) -> str:
    """Return the truncated shares of so many pairs."""
    sources, targets = self._truncated
    return f'{sources} sources ({sources / pairs:.1%}) and {targets} targets ({targets / pairs:.1%}) of {pairs} pairs'


class Log:
  """Prints and records a line every `log_every` steps: the mean loss since the last one, the rate and the time left."""

  def __init__(self, run: RunDir, settings: Settings, done: int, unlogged: list[dict[str, float]], echo):
    self._settings = settings
    self._echo = echo
    self._done = done
    self._start = time.monotonic()
    self._parts = list(unlogged)
    self._tokens = 0
    self._journal = run.journal('log.jsonl')
    self._journal.keep_while(lambda line: line['step'] <= done)  # later steps are done again

  def add(self, step: int, parts: dict[str, jax.Array], tokens: int, stream: _Stream) -> None:
    """Add a step; its numbers stay on the device until they are printed."""
    self._parts.append(parts)
    self._tokens += tokens
    if step % self._settings.log_every and step != self._settings.steps:
      return
    values = self.unlogged()
    self._parts = []
    means = {name: float(np.mean([value[name] for value in values])) for name in parts}
    _check_finite(f'the loss is {means["loss"]}', np.isfinite(means['loss']), step)
    seconds = time.monotonic() - self._start
    truncated = stream.truncated() if self._settings.truncate else {}
    self._journal.append([{'step': step, **means, **truncated, 'seconds': seconds}])
    if multihost.is_writer():
      self._print(step, means, seconds, ''.join(f'  {name} {n}' for name, n in truncated.items()))

  def unlogged(self) -> list[dict[str, float]]:
    """Return the losses of the steps since the last line, for the run that goes on here."""
    return jax.tree.map(float, jax.device_get(self._parts))

  def _print(self, step: int, means: dict[str, float], seconds: float, truncated: str):
    rate = (step - self._done) / seconds
    left = tqdm.tqdm.format_interval((self._settings.steps - step) / rate)
    losses = ' '.join(f'{name} {value:.3f}' for name, value in means.items())
    speed = f'{rate:.2f} steps/s  {self._tokens / seconds:.0f} tokens/s'
    self._echo(f'step {step}/{self._settings.steps}  {losses}{truncated}  {speed}  {left} left', flush=True)


# ---- before and after ----


def _check(name: str, network: Network, settings: Settings, start, teacher, companion) -> None:
  """Raise for what cannot be trained or saved."""
  hf.check(network, name)
  if start is not None:
    _check_sizes(start.network, network)
    if start.network.scan != network.scan:
      raise ValueError(f'start has scan={start.network.scan}, but network scan={network.scan}: load start like network')
  if settings.distillation is not None and teacher is None:
    raise ValueError('distillation needs a teacher: give one, or leave distillation out')
  if (settings.distillation is not None and settings.distillation.companion > 0) != (companion is not None):
    raise ValueError('a companion needs a weight, train.Distillation.companion, and that a companion: give both')
  if isinstance(network, Head):
    _check_head(name, network, teacher)
  if isinstance(network, Eagle) and network.config.draft_vocab:
    _check_drafted(name, network.config, settings, start)
  for other in (teacher, companion):
    if (
      not isinstance(network, Head)
      and other is not None
      and (other.network.start_id is None) != (network.start_id is None)
    ):
      raise ValueError(f'{other.name} cannot teach: one of both is an encoder–decoder, one is not')
  if network.dtype != 'float32':
    raise ValueError(f'network.dtype={network.dtype!r}: parameters are trained in float32; save_dtype sets the result')


def _check_head(name: str, network: Head, teacher: Model | None) -> None:
  """Raise for a head that cannot be trained beside its teacher."""
  if teacher is None:
    raise ValueError(f'{name} is a {type(network).__name__}, trained beside its verifier: give that as the teacher')
  if not isinstance(network, Eagle | Medusa):
    raise ValueError(f'{name} is a {type(network).__name__}, which is read, not trained: train an Eagle or a Medusa')
  beside(Model({}, network, name=name), teacher)  # raises where they do not fit


def _check_drafted(name: str, config: HeadConfig, settings: Settings, start: Model | None) -> None:
  """Raise for a head over some tokens that does not know which, or whose loss needs all."""
  if start is None:
    raise ValueError(
      f'{name}: draft_vocab={config.draft_vocab} does not say which tokens: leave it 0 and give train.Job.frequent, or '
      'start with a head that drafters.frequent has cut'
    )
  d = settings.distillation or Distillation()
  if repr(d) != repr(Distillation(d.distance, d.weight)):
    raise ValueError(f'{name} scores {config.draft_vocab} tokens, and {d} is of all: leave rule and companion out')


def _check_sizes(start: Network, network: Network) -> None:
  """Raise where the parameters of a start are not those of the network; its context is no size."""
  theirs, ours = ({'type': type(n).__name__, **vars(n.config), 'context': None} for n in (start, network))
  names = [name for name in theirs if name in ours and theirs[name] != ours[name]]
  if names:
    has, wanted = (', '.join(f'{name}={sizes[name]!r}' for name in names) for sizes in (theirs, ours))
    raise ValueError(f'start has {has}, but network {wanted}: give them the same sizes')


def _identity(network: Network, settings: Settings, tokenizer, **models: Model | None) -> dict[str, Any]:
  """Return what identifies a run, and as 'model' in which dtype its result is saved."""
  identity = {'network': repr(network), 'settings': repr(dataclasses.replace(settings, **_FREE))}
  identity['truncate'] = settings.truncate or None
  if network.mask_token is not None or isinstance(network, Head):  # its chains begin elsewhere in other microbatches
    identity['drafting'] = f'{settings.drafting or Drafting()}, {settings.microbatches} microbatches'
  identity |= {name: model and digests.of_params(model.params) for name, model in models.items()}
  identity['tokenizer'] = tokenizer and digests.of_files({Path(p).name: Path(p) for p in tokenizer.files()})
  return identity | {'model': settings.save_dtype}


def _check_identity(out: RunDir, identity: dict[str, Any]) -> None:
  """Write the identity of a run, or raise if the folder has another run; what is not saved may get another dtype."""
  if out.exists(IDENTITY):
    try:
      before = dict(json.loads(out.read(IDENTITY)))
    except (ValueError, TypeError):
      raise ValueError(
        f'{out.path / IDENTITY} is damaged: remove {out} to train anew, or choose another folder'
      ) from None
    if out.exists('model') and before.get('model') != identity['model']:
      raise ValueError(
        f'{out}/model exists, saved as {before.get("model")}, not {identity["model"]}: python -m '
        'speccascade.convert gives another dtype; or remove it'
      )
    others = {name: value for name, value in identity.items() if name != 'model'}
    storage.check_identity(f'{out} has a run with', before, others)
  out.write(IDENTITY, as_json(identity))


def _write(folder: Path, model: Model, dtype: str) -> None:
  """Write the result, rounded to a dtype."""
  network = dataclasses.replace(model.network, dtype=dtype)
  params = jax.tree.map(lambda x: x.astype(dtype), multihost.to_host(model.params))
  hf.write(folder, Model(params, network, model.tokenizer, model.name), overwrite=True)
