"""An experiment: a task, its models, the curves to compare on it, and how much of it is measured."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

from speccascade import rules, sampling
from speccascade.backends import sharding
from speccascade.data import metrics
from speccascade.data.examples import Task
from speccascade.engine import inputs, plans
from speccascade.evaluate.curves import Checkpoint, Curve, Point
from speccascade.host import storage
from speccascade.types import checked_int, Model

TARGET = 'target only'


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What is compared on what. Models are loaded when the run starts, in the order of the methods' model numbers.

  Quality is measured on the first `quality_examples` (all: None) at every temperature, in batches fixed by the split.
  Latency is measured on `latency_examples` chosen by the seed, every point in turn on each of them, `latency_trials`
  times, and is given relative to the curve `reference`. 0 examples measure nothing. `cell` names the cell of a paper's
  table or figure that this reproduces, as in 'cascades/table2/wmt14/small-large'.
  """

  task: Task
  models: Sequence[Checkpoint | Model | Callable[[], Any]] | Callable[[], Sequence[Model]]
  curves: Sequence[Curve]
  name: str = 'experiment'
  cell: str = ''
  reference: str = TARGET
  temperatures: Sequence[float] = (0.0, 1.0)
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  seed: int = 0
  quality_examples: int | None = None
  quality_batch: int = 32
  latency_examples: int = 0
  latency_trials: int = 3
  latency_batches: Sequence[int] = (1,)
  trace_examples: int = 4
  mesh: Any = None  # jax.sharding.Mesh on which the models are loaded; None: one device

  def __post_init__(self):
    object.__setattr__(self, 'task', self.task() if callable(self.task) else self.task)
    if not isinstance(self.task, Task):
      raise ValueError(f'{self.name}: task={self.task!r} is not a task; see speccascade.data.')
    if not len(self.task.examples):
      raise ValueError(f'{self.name}: the task {self.task.name} has no examples.')
    if not self.task.metrics:
      raise ValueError(f'{self.name}: the task {self.task.name} has no metrics.')
    ours = {name: metric for name, metric in self.task.metrics.items() if isinstance(metric, metrics.Summed)}
    metrics.check(ours, self.task.examples, lambda example: f'{self.task.name}: example {example.index}')
    for name in ('curves', 'temperatures', 'latency_batches'):
      value = getattr(self, name)
      if isinstance(value, (str, float, int, Curve)):
        raise ValueError(f'{self.name}: {name}={value!r} is not a list.')
      object.__setattr__(self, name, tuple(value))
    if not callable(self.models):
      object.__setattr__(self, 'models', tuple(self.models))
    self._check_counts()
    self._check_curves()

  def _check_counts(self):
    least = {
      'quality_examples': 0,
      'quality_batch': 1,
      'latency_examples': 0,
      'latency_trials': 1,
      'trace_examples': 0,
      'seed': 0,
    }
    for name, low in least.items():
      value = getattr(self, name)
      if (name, value) != ('quality_examples', None):
        checked_int(f'{self.name}: {name}', value, low)
    for batch in self.latency_batches:
      if checked_int(f'{self.name}: a latency batch', batch) > self._most_latency_examples() and self.latency_examples:
        raise ValueError(
          f'{self.name}: a latency batch of {batch} needs at least as many latency_examples, not '
          f'{self._most_latency_examples()}.'
        )
    if len(set(self.latency_batches)) < len(self.latency_batches) or len(set(self.temperatures)) < len(
      self.temperatures
    ):
      raise ValueError(f'{self.name}: temperatures and latency_batches must differ from each other.')
    if not self.temperatures:
      raise ValueError(f'{self.name} has no temperatures; give [0.0] for greedy decoding.')
    for temperature in self.temperatures:
      self.sampler(temperature)

  def _check_curves(self):
    names = [c.name if isinstance(c, Curve) else None for c in self.curves]
    if None in names:
      raise ValueError(f'{self.name}: curves[{names.index(None)}] is not a Curve; write @scope/Curve(), with ().')
    if twice := sorted({n for n in names if names.count(n) > 1}):
      raise ValueError(f'{self.name}: two curves are called {twice[0]}; names must differ.')
    if self.reference not in names:
      raise ValueError(
        f'{self.name}: reference={self.reference!r} is none of the curves: {", ".join(names) or "none"}.'
      )
    reference = self.curves[names.index(self.reference)]
    if len(reference.values) > 1:
      raise ValueError(f'{self.name}: the reference {reference.name} has {len(reference.values)} values; give it one.')
    made = [(point, point.build()) for point in self.points]  # whose values are in range
    for (point, method), temperature in itertools.product(made, self.temperatures):
      try:
        plans.check_sampler(method.origin, self.sampler(temperature))
      except ValueError as error:
        raise ValueError(f'{self.name}: {point.label}, T = {temperature:g}: {error}') from None
    if not callable(self.models):
      self._check_models(made, len(self.models))

  def _check_models(self, made: Sequence[tuple[Point, Any]], count: int):
    """Refuse a method that needs more models, and one that does not say which of them it decodes alone."""
    for point, method in made:
      if method.models > count:
        raise ValueError(f'{self.name}: {point.label} needs {method.models} models, but there are {count}.')
      if method.kind == 'autoregressive' and count > 1 and not method.extra_models:
        raise ValueError(
          f"{self.name}: {point.label} decodes with one of {count} models; say which, as in settings = {{'model': 1}}."
        )

  def _most_latency_examples(self) -> int:
    return min(self.latency_examples, len(self.task.examples))

  @property
  def points(self) -> list[Point]:
    """Every point of every curve, in the order of the results."""
    return [point for curve in self.curves for point in curve.points()]

  @property
  def reference_point(self) -> Point:
    """The point that latency is relative to."""
    return next(p for p in self.points if p.curve.name == self.reference)

  def sampler(self, temperature: float) -> sampling.Sampler:
    """Return the sampler of all models at a temperature."""
    numbers = {name: getattr(self, name) for name in sampling.NEUTRAL if name != 'temperature'}
    return sampling.Sampler(temperature, **numbers)

  def load(self) -> list[Model]:
    """Load the models; their names are made to differ."""
    given = self.models() if callable(self.models) else self.models
    loaded: list = []
    models = [_load(m, self.mesh, loaded) for m in given]
    made = [(point, point.build()) for point in self.points]
    self._check_models(made, len(models))
    for _, method in made:
      inputs.check_models(method, models)
    names: list[str] = []
    for model in models:
      name = model.name
      count = 2
      while name in names:
        name = f'{model.name} {count}'
        count = count + 1
      names.append(name)
    return [m.replace(name=n) for m, n in zip(models, names, strict=True)]

  def encode(self, models: Sequence[Model]) -> dict[int, list[int]]:
    """Return the prompts as token ids by example, each checked against the task's limit."""
    examples = self.task.examples
    most = self.task.max_prompt_tokens
    rows = inputs.encode(models, [e.prompt for e in examples])
    prompts = {e.index: row.tolist() for e, row in zip(examples, rows, strict=True)}
    if len(prompts) < len(examples):
      raise ValueError(f'{self.task.name}: two examples have one index; each needs its own.')
    for index, row in prompts.items():
      if len(row) > most:
        raise ValueError(
          f'{self.task.name}: example {index} has {len(row)} tokens, more than max_prompt_tokens={most}; raise the '
          "limit, or give the task the models' tokenizer, to cut texts to it."
        )
    return prompts

  def describe(self) -> str:
    """Return all that decides the results, defaults, data and digests of checkpoints included, as lines."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    fields |= {'task': self.task.name, 'models': _described(self.models)}
    curves = fields.pop('curves')
    mesh = fields.pop('mesh')
    fields |= {} if mesh is None else {'mesh': dict(mesh.shape)}
    data = [[e.index, e.prompt, e.target, e.info] for e in self.task.examples]
    digest = storage.digest(json.dumps(data, default=str).encode())
    lines = [f'{name}: {value}' for name, value in fields.items()] + _sources(curves)
    given = () if callable(self.models) else self.models
    lines += [f'weights of {m.path}: {m.digest()}' for m in given if isinstance(m, Checkpoint)]
    paths = sorted({str(p.plan) for p in self.points if isinstance(p.plan, (str, Path))})
    lines += [f'plan {path}: {storage.digest(storage.local(path).read_bytes())}' for path in paths]
    task = f'{len(data)} examples {digest}, {self.task.max_prompt_tokens} tokens in, {self.task.max_new_tokens} out'
    task += f', stop {list(self.task.stop)}' if self.task.stop else ''
    return '\n'.join([*lines, f'data: {task}, {", ".join(self.task.metrics)}', *map(str, curves)])


def _sources(curves: Sequence[Curve]) -> list[str]:
  """Return a line with a digest of the source of each method and rule that is not of this package."""
  own = [f for c in curves for f in (c.method, c.rule) if f and not str(f.__module__).startswith('speccascade.')]
  found = set()
  for function in own:
    with contextlib.suppress(OSError, TypeError):  # one that was typed in
      code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
      digest = storage.digest(inspect.getsource(code).encode())
      found.add(f'source of {rules.name_of(function)}: {digest}')
  return sorted(found)


def _described(models: Any) -> str:
  if callable(models):
    return getattr(models, '__name__', repr(models))
  return ', '.join(m.name if isinstance(m, Model) else _described(m) if callable(m) else str(m) for m in models)


def _load(given: Any, mesh: Any, loaded: list) -> Model:
  if isinstance(given, Checkpoint):
    return given.load(mesh, loaded)
  model = given if isinstance(given, Model) else given.load() if hasattr(given, 'load') else given()
  if not isinstance(model, Model):
    raise ValueError(f'{given!r} gave {type(model).__name__}, not a Model.')
  return model if mesh is None or sharding.shared([model]) == mesh else sharding.place(model, mesh)
