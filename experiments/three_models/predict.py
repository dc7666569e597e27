"""Model calls for a token of the output, counted in a run and predicted from acceptance rates.

  python -m experiments.three_models.predict RUN > calls.md

The rates are means over texts of the reference, of three models the large one: each model reads them, and at each token
its distribution is compared with the method's target. `theory` and `middle` make calls of them.
"""

from collections.abc import Iterator
import json
from pathlib import Path
import sys

import jax.numpy as jnp
import numpy as np

from experiments.three_models import middle
from speccascade import rules, theory
from speccascade.decode import scoring
from speccascade.evaluate import config

EXAMPLES = 50  # whose texts are read


def predicted(method, rates: dict[int, float]) -> dict[int, float]:
  """Return {model: calls for a token} of a method whose models' tokens are accepted at these rates."""
  if method.takes_turns:
    return dict(enumerate(middle.calls_cos([rates[m] for m in method.slots], method.block)))
  tokens = 1.0
  if method.drafts:
    bonus = method.slots[0] not in method.target[0]  # where the drafter is not tested with, a token follows the draft
    formula = theory.tokens_per_round if bonus else theory.tokens_per_round_without_bonus
    tokens = formula(rates[method.slots[0]], method.window)
  (calls,) = method.calls()
  return {method.slots[slot]: n / tokens for slot, n in calls.items()}


def acceptance(method, sampler, models, prompts, outputs) -> dict[int, float]:
  """Return the mean acceptance rate of each model's tokens for the target, on texts."""
  slots, combiner = method.target
  numbers = sorted({*method.slots})

  def rates(logits, tokens):
    pi = rules.target(combiner, logits[jnp.array(slots)], sampler).probs
    return jnp.stack([jnp.minimum(sampler(logits[m]), pi).sum(-1) for m in numbers], -1)

  found = np.concatenate(scoring.read(models, prompts, outputs, rates)).mean(0)
  return dict(zip(numbers, found.tolist(), strict=True))


def rows(experiment, lines: list[dict]) -> Iterator[tuple]:
  """Yield (temperature, curve, value, rate counted, rate predicted, calls counted [M], calls predicted [M])."""
  models = experiment.load()
  prompts = experiment.encode(models)
  for temperature in experiment.temperatures:
    here = [line for line in lines if line['temperature'] == temperature]
    own = [line for line in here if line['curve'] == experiment.reference][:EXAMPLES]
    texts = [prompts[line['example']] for line in own], [line['tokens'] for line in own]
    for point in experiment.points:
      method = point.build()
      name, value = point.key
      mine = [line for line in here if (line['curve'], line['value']) == (name, value)]
      rates = acceptance(method, experiment.sampler(temperature), models, *texts)
      calls = predicted(method, rates)
      total = lambda field, of=mine: np.sum([line[field] for line in of], 0)
      counted = total('calls') / total('emitted')
      rate = total('accepted') / total('tested') if total('tested') else None
      expected = rates[method.slots[0]] if method.drafts else None
      yield temperature, name, value, rate, expected, counted, [calls.get(m, 0.0) for m in range(len(counted))]


def main():
  """Print a table for each experiment of a run directory."""
  run = Path(sys.argv[1])
  config.parse([str(run / 'config.gin')])
  cell = lambda x: '' if x is None else f'{x:.2f}'
  for experiment in config.build():
    lines = [json.loads(line) for line in (run / experiment.name / 'examples.jsonl').read_text().splitlines()]
    print(f'\n{experiment.name}\n\n| T | curve | value | accepted | predicted | calls of each model | predicted |')
    print('|' + ' --- |' * 7)
    for temperature, curve, value, rate, expected, *calls in rows(experiment, lines):
      three = [' '.join(f'{x:.2f}' for x in some) for some in calls]
      value = '' if value is None else value
      row = [f'{temperature:g}', curve, value, cell(rate), cell(expected), *three]
      print('| ' + ' | '.join(map(str, row)) + ' |', flush=True)


if __name__ == '__main__':
  main()
