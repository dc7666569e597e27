"""An experiment: a task, its models, the curves to compare on it, and how much of it is measured."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

from speccascade import methods, sampling
from speccascade.backends import sharding
from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.data import metrics
from speccascade.data.examples import Task
from speccascade.drafters import translation
from speccascade.engine import inputs
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Strategy
from speccascade.evaluate import plugins, programs, tasks, texts
from speccascade.evaluate.curves import Curve, Point
from speccascade.evaluate.suites import TARGET
from speccascade.host import names, storage
from speccascade.types import checked_int, Model, named_apart


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A task, models, the curves that are compared, and how much is measured.

  Attributes:
    task: The task: a text (see `evaluate.tasks`), a Task, or a function that makes it.
    models: Paths, hub ids, checkpoints, models or functions that make them, in the order of the methods' model numbers;
      they are loaded when the run starts.
    curves: What is compared: texts (see `evaluate.texts`), curves, and lists of them. The last model alone, 'target
      only', is added where it is the reference and none of them.
    name: The name in results, which have the names of the models where none is given, and of the folder where a run has
      several experiments.
    cell: The cell of a paper's table or figure that this reproduces, as 'cascades/table2/wmt14/small-large'.
    reference: The curve that times and qualities are compared with: its one point, or of several the one of the same
      value.
    temperatures: Of the sampler. Its other settings, top_k to coupling, are those of `speccascade.Sampler`.
    one_program: Whether temperature 0 shares its programs with the others, and rules of one method theirs: a third as
      much to compile, but a greedy round then computes distributions that it does not need, and a rule is chosen in it.
    seed: Of the random numbers, of what is timed, and of the resamples.
    quality_examples: How many examples of the split are decoded for quality, the first ones; None: all; 0: none.
    quality_batch: How many of them at a time.
    latency_examples: How many examples are timed, chosen by the seed; 0: none.
    latency_trials: How often each is timed, all points in turn.
    latency_batches: The batch sizes.
    latency_queue: Examples per row in a timed call. With 3 or more, throughput is also that of the steady part.
    domain: The field of an example's info by which acceptance is shown.
    trace_examples: How many examples are shown token by token.
    mesh: The jax.sharding.Mesh on which the models are loaded, or one of `sharding.unplaced`; two of them, of the
      drafters and of the last model; None: one device.
    translate: Whether models that have other tokens than the last one are seen through its tokens.
  """

  task: Any
  models: Sequence[str | Checkpoint | Model | Callable[[], Any]] | Callable[[], Sequence[Model]]
  curves: Any
  name: str = 'experiment'
  cell: str = ''
  reference: str = TARGET
  temperatures: Sequence[float] = (0.0, 1.0)
  one_program: bool = False
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  coupling: str = 'maximal'
  seed: int = 0
  quality_examples: int | None = None
  quality_batch: int = 32
  latency_examples: int = 0
  latency_trials: int = 3
  latency_batches: Sequence[int] = (1,)
  latency_queue: int = 1
  domain: str = 'domain'
  trace_examples: int = 4
  mesh: Any = None
  translate: bool = False

  def __post_init__(self):
    for name in ('name', 'cell', 'reference', 'domain'):
      if not isinstance(value := getattr(self, name), str):
        raise ValueError(f'Experiment.{name}={value!r} is not a text; write {str(value)!r}.')
    if not callable(self.models):
      object.__setattr__(self, 'models', self._listed_models())
    object.__setattr__(self, 'task', self._made_task())
    if not isinstance(self.task, Task):
      raise ValueError(f'{self.name}: task={self.task!r} is not a task; see speccascade.data.')
    if not len(self.task.examples):
      raise ValueError(f'{self.name}: the task {self.task.name} has no examples.')
    if not self.task.metrics:
      raise ValueError(f'{self.name}: the task {self.task.name} has no metrics.')
    ours = {name: metric for name, metric in self.task.metrics.items() if isinstance(metric, metrics.Summed)}
    metrics.check(ours, self.task.examples, lambda example: f'{self.task.name}: example {example.index}')
    for name in ('temperatures', 'latency_batches'):
      value = getattr(self, name)
      if isinstance(value, (str, float, int)):
        raise ValueError(f'{self.name}: {name}={value!r} is not a list.')
      object.__setattr__(self, name, tuple(value))
    object.__setattr__(self, 'curves', self._listed_curves())
    self._check_counts()
    self._check_curves()

  def _made_task(self) -> Any:
    if not isinstance(self.task, str):
      return self.task() if callable(self.task) else self.task
    try:
      return tasks.find(self.task, self._find_tokenizer)
    except ValueError as error:
      raise ValueError(f'{self.name}: {error}') from error

  def _find_tokenizer(self) -> Any:
    """Return the tokenizer of the last model, None where it has none, or where models are made by a function."""
    last = None if callable(self.models) or not self.models else self.models[-1]
    if isinstance(last, Checkpoint):
      return last.find_tokenizer()
    return last.tokenizer if isinstance(last, Model) else None

  def _listed_models(self) -> tuple:
    if not isinstance(self.models, Sequence) or isinstance(self.models, str):
      raise ValueError(f'{self.name}: models={self.models!r} is not a list; write [@scope/Checkpoint(), …].')
    models = [Checkpoint(**{**plugins.bound(Checkpoint), 'path': m}) if isinstance(m, str) else m for m in self.models]
    for i, model in enumerate(models):
      if not isinstance(model, Checkpoint | Model) and not callable(model):
        raise ValueError(
          f'{self.name}: models[{i}]={model!r} is no model; give a path, a Checkpoint, a Model or what makes one.'
        )
    return tuple(models)

  def _listed_curves(self) -> tuple:
    try:
      curves = [*texts.flat(self.curves)]
    except ValueError as error:
      raise ValueError(f'{self.name}: {error}') from error
    names = [curve.name if isinstance(curve, Curve) else curve for curve in curves]
    if self.reference == TARGET and TARGET not in names:
      curves.insert(0, TARGET)
    alone = Curve(TARGET, methods.autoregressive, settings=self._last_model(curves))
    return tuple(alone if isinstance(curve, str) else curve for curve in curves)

  def _last_model(self, curves: Sequence[Any]) -> dict[str, int]:
    """Return the number of the last model; of models that are not there yet, the last that a curve decodes with."""
    if not callable(self.models):
      return {'model': len(self.models) - 1}
    used = [point.build().models for curve in curves if isinstance(curve, Curve) for point in curve.points()]
    return {'model': max(used) - 1} if used else {}

  def _check_counts(self):
    least = {
      'quality_examples': 0,
      'quality_batch': 1,
      'latency_examples': 0,
      'latency_trials': 1,
      'latency_queue': 1,
      'trace_examples': 0,
      'seed': 0,
    }
    for name, low in least.items():
      value = getattr(self, name)
      if (name, value) != ('quality_examples', None):
        checked_int(f'{self.name}: {name}', value, low)
    if self.latency_queue == 2:
      raise ValueError(f'{self.name}: latency_queue=2 has no steady part; give 1, or 3 and more.')
    most = min(self.latency_examples, len(self.task.examples))
    for batch in self.latency_batches:
      needed = checked_int(f'{self.name}: a latency batch', batch) * self.latency_queue
      if needed > most and self.latency_examples:
        queue = f' with a latency_queue of {self.latency_queue}' if self.latency_queue > 1 else ''
        raise ValueError(
          f'{self.name}: a latency batch of {batch}{queue} needs at least {needed} latency_examples, not {most}.'
        )
    for values in (self.temperatures, self.latency_batches):
      if len(set(values)) < len(values):
        raise ValueError(f'{self.name}: temperatures and latency_batches must differ from each other.')
    if not self.temperatures:
      raise ValueError(f'{self.name} has no temperatures; give [0.0] for greedy decoding.')
    if self.latency_examples and not self.latency_batches:
      raise ValueError(f'{self.name} has no latency_batches; give [1], or latency_examples=0 to time nothing.')
    for temperature in self.temperatures:
      self.sampler(temperature)

  def _check_curves(self):
    names = [c.name if isinstance(c, Curve) else None for c in self.curves]
    if None in names:
      raise ValueError(
        f'{self.name}: curves[{names.index(None)}] is no Curve; write a text, or @scope/Curve(), with ().'
      )
    if twice := sorted({n for n in names if names.count(n) > 1}):
      raise ValueError(f'{self.name}: two curves are called {twice[0]}; names must differ. A text may give name=.')
    if self.reference not in names:
      raise ValueError(
        f'{self.name}: reference={self.reference!r} is none of the curves: {", ".join(names) or "none"}.'
      )
    self._check_reference(self.curves[names.index(self.reference)])
    made = [(point, point.build()) for point in self.points]  # whose values are in range
    for (point, method), temperature in itertools.product(made, self.temperatures):
      try:
        method.check_sampler(self.sampler(temperature))
      except ValueError as error:
        raise ValueError(f'{self.name}: {point.label}, T = {temperature:g}: {error}') from None
    if not callable(self.models):
      self._check_models(made, len(self.models))

  def _check_reference(self, reference: Curve):
    """Refuse a reference of several values where a curve varies something else."""
    if len(reference.values) == 1:
      return
    for curve in self.curves:
      if curve.parameter is None:
        continue
      if curve.parameter != reference.parameter:
        raise ValueError(
          f'{self.name}: the reference {reference.name} has {len(reference.values)} values of {reference.parameter}, '
          f'but {curve.name} varies {curve.parameter}; give the reference one value, or both the same parameter.'
        )
      if missing := [value for value in curve.values if value not in reference.values]:
        raise ValueError(
          f'{self.name}: {curve.name} has {curve.parameter}={missing[0]}, but the reference {reference.name} has not; '
          'give it the same values.'
        )

  def _check_models(self, made: Sequence[tuple[Point, Any]], count: int):
    """Refuse a method that needs more models, and one that does not say which of them it decodes alone."""
    for point, method in made:
      if method.models > count:
        raise ValueError(f'{self.name}: {point.label} needs {method.models} models, but there are {count}.')
      if method.models == 1 < count and not method.extra_models:
        raise ValueError(
          f"{self.name}: {point.label} decodes with one of {count} models; say which, as in settings = {{'model': 1}}."
        )

  @property
  def points(self) -> list[Point]:
    """Every point of every curve, in the order of the results."""
    return [point for curve in self.curves for point in curve.points()]

  @functools.cached_property
  def methods(self) -> dict[tuple[str, str], Strategy]:
    """The method of each point, by its name: made once, for the functions that it may make anew are other programs."""
    points = self.points
    made = [point.build() for point in points]
    made = programs.sharing(made) if self.one_program else made
    return {point.name: method for point, method in zip(points, made, strict=True)}

  @property
  def references(self) -> list[Point]:
    """The points that others are compared with: one, or one for each value of a parameter."""
    return next(c.points() for c in self.curves if c.name == self.reference)

  def reference_of(self, point: Point) -> Point | None:
    """Return the point that a point is compared with: of several the one of its value, None without one."""
    if len(self.references) == 1:
      return self.references[0]
    return next((p for p in self.references if p.value == point.value), None)

  def sampler(self, temperature: float) -> sampling.Sampler:
    """Return the sampler of all models at a temperature."""
    numbers = {name: getattr(self, name) for name in sampling.NEUTRAL if name != 'temperature'}
    mixed = self.one_program and 0 in self.temperatures and len(self.temperatures) > 1
    return sampling.Sampler(temperature, **numbers, mixed=mixed, coupling=self.coupling)

  def load(self) -> list[Model]:
    """Load the models; their names are made to differ."""
    given = self.models() if callable(self.models) else self.models
    loaded: list = []
    models = [_load(m, mesh, loaded) for m, mesh in zip(given, sharding.of_each(self.mesh, len(given)), strict=True)]
    models = translation.for_the_last(models) if self.translate else models
    made = [(point, point.build()) for point in self.points]
    self._check_models(made, len(models))
    for point, method in made:
      for temperature in self.temperatures:
        try:
          DecodeJob.of_models(method, models, sampler=self.sampler(temperature))
        except ValueError as error:
          raise ValueError(f'{self.name}: {point.label}: {error}') from None
    return named_apart(models)

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
          "limit, or give the task the models' tokenizer, which shortens texts to it."
        )
    return prompts

  def describe(self) -> str:
    """Return all that decides the results, defaults, data and digests of checkpoints included, as lines."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    fields |= {'task': self.task.name, 'models': _described(self.models)}
    curves = fields.pop('curves')
    mesh = fields.pop('mesh')
    shapes = [dict(one.shape) for one in (mesh if isinstance(mesh, tuple) else (mesh,)) if one is not None]
    fields |= {'mesh': shapes[0] if len(shapes) == 1 else shapes} if shapes else {}
    for name in ('one_program', 'translate'):
      if not fields[name]:
        del fields[name]
    lines = [f'{name}: {value}' for name, value in fields.items()] + _sources(curves)
    given = () if callable(self.models) else self.models
    lines += [f'weights of {m.path}: {m.digest()}' for m in given if isinstance(m, Checkpoint)]
    paths = sorted({str(p.plan) for p in self.points if isinstance(p.plan, (str, Path))})
    lines += [f'plan {path}: {storage.digest(storage.local(path).read_bytes())}' for path in paths]
    return '\n'.join([*lines, self.describe_data(), *map(str, curves)])

  def describe_data(self) -> str:
    """Return the task with a digest of its examples, as a line."""
    data = [[e.index, e.prompt, e.target, e.info] for e in self.task.examples]
    digest = storage.digest(json.dumps(data, default=str).encode())
    task = f'{len(data)} examples {digest}, {self.task.max_prompt_tokens} tokens in, {self.task.max_new_tokens} out'
    task += f', stop {list(self.task.stop)}' if self.task.stop else ''
    return f'data: {task}, {", ".join(self.task.metrics)}'


def _sources(curves: Sequence[Curve]) -> list[str]:
  """Return a line with a digest of the source of each method, rule and setting that is not of this package."""
  own = names.sources([(c.method, c.settings, c.rule, c.rule_settings) for c in curves])
  return sorted({f'source of {name}: {storage.digest(text.encode())}' for name, text in own})


def _described(models: Any) -> str:
  if callable(models):
    return plugins.described(models)
  return ', '.join(m.name if isinstance(m, Model) else _described(m) if callable(m) else str(m) for m in models)


def _load(given: Any, mesh: Any, loaded: list) -> Model:
  if isinstance(given, Checkpoint):
    return given.load(mesh, loaded)
  model = given if isinstance(given, Model) else given()
  if not isinstance(model, Model):
    raise ValueError(f'{given!r} gave {type(model).__name__}, not a Model.')
  return model if mesh is None or sharding.shared([model]) == mesh else sharding.place(model, mesh)
