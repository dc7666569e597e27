"""The two measurements: quality, on splits in fixed batches, and latency, every point in turn on each example.

Both make their plan beforehand and write a journal in its order, so that a killed run resumes at the first line that
is missing. A part is decoded the same whether its run was interrupted or not.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from pathlib import Path
import sys
import time

import jax
import numpy as np

from speccascade import decode, Decoded, Model, Request
from speccascade.data.examples import Example
from speccascade.engine import inputs
from speccascade.engine.method import Strategy
from speccascade.engine.stats import PER_MODEL, Stats
from speccascade.evaluate import programs, throughput
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.shards import ALL, Shard
from speccascade.host import multihost
from speccascade.host.progress import Progress
from speccascade.host.runs import Journal
from speccascade.planning.timing import timed

MAPS = 40_000  # a decode loop has some 400 memory mappings, and the kernel allows a process 65 530
BATCHES = 8  # in a part of the quality protocol, so that its end, where the queue is empty, is a small share
PER_ROW = ('rounds', 'tested', 'accepted', 'emitted', 'deferred')
BY_POSITION = ('accepted_lengths', 'verified_lengths', 'tested_at', 'accepted_at')
QUALITY_KEYS = ('temperature', 'curve', 'value', 'example')
LATENCY_KEYS = ('temperature', 'batch', 'trial', 'examples', 'curve', 'value')


@dataclasses.dataclass(frozen=True)
class Loaded:
  """Models in memory with the prompts in their tokens, made before any clock runs."""

  models: list[Model]
  prompts: dict[int, list[int]]  # by the example's index

  @classmethod
  def of(cls, experiment: Experiment) -> 'Loaded':
    """Load the models of an experiment and encode its prompts."""
    models = experiment.load()
    return cls(models, experiment.encode(models))


def run_method(
  experiment: Experiment,
  loaded: Loaded,
  method: Strategy,
  temperature: float,
  examples: Sequence[Example],
  batch: int | None = None,
) -> Decoded:
  """Decode examples in the shapes of the task, as one batch or with `batch` of them at a time."""
  used, prompts, settings = _arguments(experiment, loaded, method, temperature, examples)
  return decode(method, used, prompts, batch_size=batch or len(examples), keep_faults=True, **settings)


def _arguments(
  experiment: Experiment, loaded: Loaded, method: Strategy, temperature: float, examples: Sequence[Example]
) -> tuple[list[Model], list[Request], dict]:
  """Return the models, the prompts and the other arguments of every decode of these examples."""
  task = experiment.task
  used = loaded.models if method.extra_models else loaded.models[: method.models]
  settings = dict(
    max_new_tokens=task.max_new_tokens,
    max_prompt_tokens=task.max_prompt_tokens,
    sampler=experiment.sampler(temperature),
    seed=experiment.seed,
    example_ids=[e.index for e in examples],
  )
  return used, [Request(loaded.prompts[e.index], stop=task.stop) for e in examples], settings


def few_executables():
  """Drop compiled programs before their memory mappings reach the kernel's limit; they load again from the cache."""
  maps = Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > MAPS:
    jax.clear_caches()


# ---- quality ----


@dataclasses.dataclass(frozen=True)
class Part:
  """What one call of the quality protocol decodes: some examples with one point."""

  turn: int  # which shard's it is
  temperature: float
  point: Point
  examples: list[Example]

  def keys(self) -> list[tuple]:
    """What the journal calls its lines."""
    return [(self.temperature, *self.point.key, e.index) for e in self.examples]


def quality_plan(experiment: Experiment) -> list[Part]:
  """Return every call in order; a shard that has the longest prompts with one point has shorter ones with the next."""
  examples = quality_examples(experiment)
  parts = _parts(examples, quality_batch(experiment)) if examples else []
  runs = [(t, p) for t in experiment.temperatures for p in experiment.points]
  return [Part(i + j, *run, part) for i, run in enumerate(runs) for j, part in enumerate(parts)]


def quality(
  experiment: Experiment,
  load: Callable[[], Loaded],
  journal: Journal,
  shard: Shard = ALL,
  row: Callable[[float, Point, list[dict]], str] | None = None,
):
  """Decode the split with every point at every temperature, one line an example.

  Args:
    experiment: What is measured.
    load: Loads the models and prompts, if anything is left to decode.
    journal: Where the lines go.
    shard: The share that this process decodes.
    row: Makes a text of all lines of a point at a temperature, which is printed as soon as this process has decoded
      them; without it nothing is printed.
  """
  parts = [part for part in quality_plan(experiment) if shard.has(part.turn)]
  plan = [key for part in parts for key in part.keys()]
  journal.agree(QUALITY_KEYS, plan)
  if journal.count >= len(plan):
    return
  loaded = load()
  examples = quality_examples(experiment)
  batch = quality_batch(experiment)
  progress = Progress('quality', len(plan), journal.count)
  decoded = None, []  # a point at a temperature, and its lines so far
  for temperature, group in itertools.groupby(_unfinished(parts, journal.count), lambda x: x[0].temperature):
    group = list(group)
    few_executables()
    call = _caller(experiment, loaded, batch, queued=len(examples) > batch > 1)
    start = time.monotonic()
    runs = [(temperature, experiment.methods[part.point.name]) for part, _ in group]
    programs.compiled(call, runs, batch, f'compiling, T = {temperature:g}')
    progress.leave_out(time.monotonic() - start)
    for part, missing in group:
      out = run_method(experiment, loaded, experiment.methods[part.point.name], temperature, part.examples, batch)
      _warn_of_faults(out, part.point)
      lines = [_line(out, i, key, len(loaded.models)) for i, key in enumerate(part.keys())]
      journal.append(lines[len(lines) - missing :])
      progress.add(missing, f'{part.point.label}, T = {temperature:g}')
      key = temperature, part.point.label
      decoded = key, (decoded[1] if decoded[0] == key else []) + lines
      if row is not None and len(decoded[1]) == len(examples) and multihost.is_writer():
        progress.write(row(temperature, part.point, decoded[1]), file=sys.stderr)


def _unfinished(parts: Sequence[Part], written: int) -> list[tuple[Part, int]]:
  """Return the parts that the journal lacks, each with the number of its lines that are missing."""
  unfinished = []
  end = 0
  for part in parts:
    end += len(part.examples)
    if end > written:
      unfinished.append((part, min(end - written, len(part.examples))))
  return unfinished


def _caller(
  experiment: Experiment, loaded: Loaded, batch: int, queued: bool = False
) -> Callable[[Strategy, float], Decoded]:
  """Return a function that decodes some examples with a method at a temperature."""
  examples = experiment.task.examples
  some = [examples[min(i, len(examples) - 1)] for i in range(batch + queued)]
  return lambda method, temperature: run_method(experiment, loaded, method, temperature, some, batch)


def quality_batch(experiment: Experiment) -> int:
  """Return the batch size in which the quality protocol decodes, 0 where it decodes nothing."""
  return min(experiment.quality_batch, len(experiment.task.examples[: experiment.quality_examples]))


def quality_examples(experiment: Experiment) -> list[Example]:
  """Return the examples in the order in which they are decoded, the longest prompts first."""
  examples = experiment.task.examples[: experiment.quality_examples]
  return [examples[i] for i in inputs.by_length([e.prompt for e in examples])]


def _parts(examples: list[Example], batch: int) -> list[list[Example]]:
  """Divide examples into parts that one call decodes; a killed run repeats its part with the same examples.

  All parts are longer than the batch, or none is, so that they share their programs.
  """
  count = -(-len(examples) // (BATCHES * batch if batch > 1 else 1))
  bounds = [i * len(examples) // count for i in range(count + 1)]
  return [examples[a:b] for a, b in itertools.pairwise(bounds)]


def _line(out: Decoded, i: int, key: tuple, models: int) -> dict:
  """Return the line of one decoded example."""
  tokens = out.tokens[i]
  text = out.texts[i] if out.texts is not None else ' '.join(map(str, tokens))
  line = dict(zip(QUALITY_KEYS, key, strict=True))
  line |= dict(prediction=text, tokens=tokens, cut_off=out.finish_reasons[i] == 'length')
  for field in dataclasses.fields(Stats):
    array = getattr(out.stats, field.name)
    if field.name in PER_MODEL:
      counts = array[:, i].tolist()
      line[field.name] = counts + [0] * (models - len(counts))
    else:
      line[field.name] = None if field.name == 'deferred' and np.isnan(array[i]) else np.asarray(array[i]).tolist()
  return line if out.faults[i] is None else line | {'fault': out.faults[i]}


def _warn_of_faults(out: Decoded, point: Point):
  """Warn of sequences that ended as faults; the run continues, and its tables count them."""
  if (faults := [fault for fault in out.faults if fault]) and multihost.is_writer():
    print(f'warning: {point.label}: {len(faults)} of {len(out.faults)} ended as faults. {faults[0]}', file=sys.stderr)


# ---- latency ----


@dataclasses.dataclass(frozen=True)
class Timing:
  """One timed call: which point decodes which examples in which trial."""

  turn: int  # which shard's it is: of the same examples always the same one's
  temperature: float
  batch: int
  trial: int
  examples: tuple[int, ...]  # places in the split
  point: Point

  def keys(self) -> list[tuple]:
    """What the journal calls its line."""
    return [(self.temperature, self.batch, self.trial, list(self.examples), *self.point.key)]

  def group(self) -> tuple:
    """What all points share that are timed in turn."""
    return self.temperature, self.batch, self.trial, self.examples


def latency_plan(experiment: Experiment) -> list[Timing]:
  """Return every timed call in order: all points decode each group of examples in turn, in a new random order."""
  count = len(experiment.task.examples)
  rng = np.random.default_rng(experiment.seed)
  chosen = rng.choice(count, min(experiment.latency_examples, count), replace=False).tolist()
  points = experiment.points
  plan = []
  for temperature in experiment.temperatures:
    for batch in experiment.latency_batches:
      size = batch * experiment.latency_queue
      groups = [tuple(chosen[i : i + size]) for i in range(0, len(chosen) - size + 1, size)]
      for trial in range(experiment.latency_trials):
        for turn, group in enumerate(groups):
          order = rng.permutation(len(points))
          plan += [Timing(turn, temperature, batch, trial, group, points[i]) for i in order]
  return plan


def latency(experiment: Experiment, load: Callable[[], Loaded], journal: Journal, shard: Shard = ALL):
  """Time the plan, each program warmed up with one call before the first that counts.

  A line of a queue has the time and tokens of its steady part too, as `steady_seconds` and `steady_tokens`. In the
  first trial, where there is no queue, the line also has `prefill_seconds`: those of reading the same prompts once
  more, alone and after the timed call, which they are not a part of.
  """
  plan = [timing for timing in latency_plan(experiment) if shard.has(timing.turn)]
  journal.agree(LATENCY_KEYS, [key for timing in plan for key in timing.keys()])
  if journal.count >= len(plan):
    return
  loaded = load()
  progress = Progress('latency', len(plan), journal.count, unit='calls')
  warm = None
  for (temperature, batch, trial, group), timings in itertools.groupby(plan[journal.count :], Timing.group):
    examples = [experiment.task.examples[i] for i in group]
    lines = []
    if (temperature, batch) != warm:
      few_executables()
      warm = temperature, batch
      start = time.monotonic()
      _warm_up(experiment, loaded, *warm)
      reference = experiment.methods[experiment.references[0].name]
      run_method(experiment, loaded, reference, temperature, examples, batch)  # the first of this thread
      progress.leave_out(time.monotonic() - start)
    for timing in timings:
      (key,) = timing.keys()
      line = dict(zip(LATENCY_KEYS, key, strict=True))
      lines.append(line | _timed_call(experiment, loaded, timing, examples))
    journal.append(lines)
    progress.add(len(lines), f'batch {batch}, T = {temperature:g}, trial {trial + 1}')


def _timed_call(experiment: Experiment, loaded: Loaded, timing: Timing, examples: Sequence[Example]) -> dict:
  """Return what is measured of a call: seconds and tokens, and what there is of faults, steady part and prefill."""
  method = experiment.methods[timing.point.name]
  if experiment.latency_queue > 1 and not method.whole_texts:
    used, prompts, settings = _arguments(experiment, loaded, method, timing.temperature, examples)
    return throughput.steady(method, used, prompts, timing.batch, **settings)
  call = functools.partial(run_method, experiment, loaded, method, timing.temperature, examples, timing.batch)
  seconds, out = timed(call)
  line = {'seconds': seconds, 'tokens': int(out.stats.emitted.sum())}
  if faults := sum(fault is not None for fault in out.faults):
    line['faults'] = faults
  if timing.trial == 0 and experiment.latency_queue == 1 and not method.whole_texts:
    used, prompts, settings = _arguments(experiment, loaded, method, timing.temperature, examples)
    sizes = {name: settings[name] for name in ('max_new_tokens', 'max_prompt_tokens', 'sampler')}
    line['prefill_seconds'] = throughput.prefill_seconds(method, used, prompts, **sizes)
  return line


def _warm_up(experiment: Experiment, loaded: Loaded, temperature: float, batch: int):
  """Call every program once, untimed, so that nothing is compiled or read from the disk while the clock runs."""
  runs = [(temperature, method) for method in experiment.methods.values()]
  call = _caller(experiment, loaded, batch, queued=experiment.latency_queue > 1)
  programs.compiled(call, runs, batch, f'warm-up, batch {batch}, T = {temperature:g}')


def batches(experiment: Experiment) -> list[int]:
  """Return the sizes of the batches that an experiment decodes."""
  return sorted({*experiment.latency_batches, quality_batch(experiment)} - {0})


@dataclasses.dataclass(frozen=True)
class Protocol:
  """A measurement: its journal, whose lines have a key, and its plan."""

  journal: str
  keys: Sequence[str]
  plan: Callable[[Experiment], list[Part] | list[Timing]]

  def lines(self, experiment: Experiment) -> list[tuple[int, tuple]]:
    """Return the plan as (turn, key) of each line of a complete journal."""
    return [(call.turn, key) for call in self.plan(experiment) for key in call.keys()]


PROTOCOLS = (
  Protocol('examples.jsonl', QUALITY_KEYS, quality_plan),
  Protocol('latency.jsonl', LATENCY_KEYS, latency_plan),
)
