"""How often the target's token is among K choices of the drafter, by how they are made, at places of texts.

python -m experiments.leaves.chances [--families sums gsm8k multi30k] [--count 32] [--places 150] [--out chances.csv]

The verifier writes texts at T = 1, both models read them, and `theory.acceptance_of_list` is averaged over some of
their places, of the 1000 likeliest tokens of either model. A chart is written beside the table. What is there
is not measured again.
"""

import argparse
import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.helpers import families, rows
from experiments.leaves.measure import NEW_TOKENS
from speccascade import decode, methods, Sampler, theory
from speccascade.decode import scoring
from speccascade.evaluate.report import drawing
from speccascade.evaluate.report.charts import Chart, Mark, Panel, Series
from speccascade.types import Array

CHOICES = (1, 2, 3, 5, 9)
LIKELIEST = 1000  # the formula of one noise takes the square of their number
SCHEMES = {  # the names of `theory.acceptance_of_list`
  'gumbel': 'one noise, as leaves have',
  'iid': 'the best test of independent drafts',
  'greedy': 'the likeliest and one drawn',
  'top': 'the likeliest',
}


def laws(logits: Array, tokens: Array) -> Array:
  """Return both models' distributions [B, L, 2, V] at the places of texts."""
  return jnp.moveaxis(jax.nn.softmax(logits), 0, 2)


def measured(family: str, count: int, places: int) -> dict[str, list[float]]:
  """Return P_K of each scheme, for each number of choices."""
  models, prompts = families.pair(family), families.prompts(family, count, 'val')
  how = dict(max_new_tokens=NEW_TOKENS[family], sampler=Sampler(1.0), batch_size=16, seed=0)
  outputs = [list(map(int, row)) for row in decode(methods.autoregressive(1), models, prompts, **how).tokens]
  found = np.concatenate(scoring.read(models, prompts, outputs, laws)).astype(np.float64)
  q, pi = found[:, 0], found[:, 1]
  some = np.random.default_rng(0).permutation(len(q))[:places]
  likeliest = np.argsort(-np.maximum(q[some], pi[some]))[:, :LIKELIEST]
  q, pi = (np.take_along_axis(x[some], likeliest, -1) for x in (q, pi))
  left_out = 1 - min(x.sum(-1).mean() for x in (q, pi))
  print(f'{family}: {len(q)} places, {left_out:.1e} of the probability left out')
  q, pi = (x / x.sum(-1, keepdims=True) for x in (q, pi))
  return {s: [float(theory.acceptance_of_list(q, pi, k, s).mean()) for k in CHOICES] for s in SCHEMES}


def panel(family: str, found: list[dict[str, str]]) -> Panel:
  """Return the chart of a family's rows."""
  marks = {row['scheme']: [Mark(k, float(row[f'K={k}'])) for k in CHOICES] for row in found}
  series = [Series(name, i, marks[scheme]) for i, (scheme, name) in enumerate(SCHEMES.items())]
  return Panel(family, 'choices at a place', "the target's token is among them", series, integer_x=True)


def main():
  """Measure all families, and draw them."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--families', nargs='+', default=[*NEW_TOKENS], choices=[*NEW_TOKENS])
  parser.add_argument('--count', type=int, default=32, help='prompts')
  parser.add_argument('--places', type=int, default=150, help='places of the texts, drawn at random')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('chances.csv'))
  args = parser.parse_args()
  for family in args.families:
    if rows.has(args.out, dict(family=family)):
      continue
    for scheme, chances in measured(family, args.count, args.places).items():
      named = {f'K={k}': f'{chance:.3f}' for k, chance in zip(CHOICES, chances, strict=True)}
      rows.append(args.out, dict(family=family, scheme=scheme) | named)
  with args.out.open(newline='') as opened:
    found = [*csv.DictReader(opened)]
  panels = [panel(family, [row for row in found if row['family'] == family]) for family in args.families]
  args.out.with_suffix('.svg').write_bytes(drawing.draw(Chart('', args.out.stem, panels)).svg)


if __name__ == '__main__':
  main()
