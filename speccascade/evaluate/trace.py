"""Outputs token by token: where each token of some examples came from."""

from collections.abc import Iterable, Iterator
import itertools

from speccascade.data.examples import Example
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.protocols import Loaded
from speccascade.types import AFTER_LEAF, BONUS, RESIDUAL


def selected(experiment: Experiment) -> list[Point]:
  """Return the point of each curve that is traced, the middle one."""
  return [points[(len(points) - 1) // 2] for points in (c.points() for c in experiment.curves)]


def traces(experiment: Experiment, loaded: Loaded, lines: Iterable[dict]) -> list[dict]:
  """Return the traces of the first examples at every temperature, from the lines of the quality protocol."""
  examples = _examples(experiment)
  by_key = {(x['temperature'], x['curve'], str(x['value']), x['example']): x for x in wanted(experiment, lines)}
  tokenizer = loaded.models[-1].tokenizer
  pieces = None if tokenizer is None else tokenizer.pieces()
  made = []
  for temperature, point in itertools.product(experiment.temperatures, selected(experiment)):
    name, value = point.key
    some = [by_key.get((temperature, *point.name, e.index)) for e in examples]
    if None in some:
      continue
    sources = _sources(point.build())
    for example, line in zip(examples, some, strict=True):
      tokens = [
        dict(text=pieces[token] if pieces else str(token), source=sources.get(source, 'drafter'))
        for token, source in zip(line['tokens'], line['source'], strict=True)
      ]
      prompt = example.prompt if isinstance(example.prompt, str) else ' '.join(map(str, example.prompt))
      texts = dict(example=example.index, prompt=prompt, target=example.target)
      made.append(dict(curve=name, value=value, temperature=temperature, **texts, tokens=tokens))
  return made


def wanted(experiment: Experiment, lines: Iterable[dict]) -> Iterator[dict]:
  """Yield the lines of the quality protocol of which traces are made."""
  indices = {e.index for e in _examples(experiment)}
  return (line for line in lines if line['example'] in indices)


def _examples(experiment: Experiment) -> list[Example]:
  """Return the first examples of those that are decoded."""
  return list(experiment.task.examples[: experiment.quality_examples][: experiment.trace_examples])


def _sources(method) -> dict[int, str]:
  """Return in words where a token came from, by the code of `stats.source`."""
  numbers = sorted({*method.slots})
  drafters = ('drafter', 'second drafter', 'third drafter', 'fourth drafter')
  names = {m: drafters[min(i, 3)] for i, m in enumerate(numbers)}
  if not method.takes_turns and numbers[-1] > 0:
    names[numbers[-1]] = 'verifier'
  if any(phase.leaves for phase in method.all_phases):
    names[AFTER_LEAF] = 'after a leaf'
  return names | {RESIDUAL: 'residual', BONUS: 'bonus' if method.drafts else 'combined'}
