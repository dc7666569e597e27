"""Studies of speculative verification: what a companion predicts of acceptance, and from which batch that pays.

  python -m experiments.sv.sv_studies plan PLAN [OTHER …]   a plan of three models, and how others predict its samples
  python -m experiments.sv.sv_studies run RUN [OUT]         a finished run: its plans, what was verified and wasted

They print Markdown; reliability diagrams and histograms of verified lengths go to OUT. Everything is computed from the
samples and times of a plan's profile. Entropies are in bits; acceptance is counted in ten equal bins for them.

Axis letters: N samples, B rows, W drafted tokens of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
import json
from pathlib import Path
import sys
from typing import Any

import numpy as np

from experiments.sv import sv_costs
from speccascade import methods
from speccascade.evaluate import config
from speccascade.evaluate.report.formats import markdown
from speccascade.planning import sv_model
from speccascade.planning.fitting import edges
from speccascade.sv import plans
from speccascade.sv.predictors import AcceptanceTable

Samples = Mapping[str, np.ndarray]

BINS = 10  # of acceptance
RELIABILITY = 'Reliability of the predicted acceptance'
FAIRNESS = 'Verified lengths by request'
_Z = 1.96


# ---- information ----


def entropy(*labels: np.ndarray) -> float:
  """Return the joint entropy of labels [N], by their counts."""
  counts = np.unique(np.stack(labels), axis=1, return_counts=True)[1]
  share = counts / counts.sum()
  return float(-(share * np.log2(share)).sum())


def equal_width(x: np.ndarray, bins: int) -> np.ndarray:
  """Return the number of the bin of equal width in [0, 1] that each x lies in."""
  return np.minimum((np.asarray(x) * bins).astype(int), bins - 1)


def gains(target: np.ndarray, s: np.ndarray, a: np.ndarray, both: np.ndarray) -> dict[str, float]:
  """Return the entropy of labels `target`, alone and given those of s, of a and of both, and the gain of both.

  `chance` is the gain that labels of the same counts without any connection would show: what of it many bins make up.
  """
  given = lambda *labels: entropy(target, *labels) - entropy(*labels)
  alone = entropy(target)
  mixed = np.random.default_rng(0).permutation(target)
  chance = alone - (entropy(mixed, both) - entropy(both))
  return dict(alone=alone, s=given(s), a=given(a), both=given(both), gain=alone - given(both), chance=chance)


def information(samples: Samples, table: AcceptanceTable, resolutions: Sequence[int] = (5, 10, 20)) -> dict:
  """Return the paper's table of uncertainty and information gain by resolution, the last that of the table."""
  target = equal_width(samples['accept'], BINS)
  labelled = {}
  for n in resolutions:
    s = equal_width(samples['s'], n)
    a = equal_width(samples['a'], n)
    labelled[f'{n} ({n}×{n} for both)'] = s, a, s * n + a
  adaptive = _adaptive(samples, table)
  labelled[f'adaptive ({len(np.unique(adaptive[2]))} bins)'] = adaptive
  rows = []
  for name, labels in labelled.items():
    g = gains(target, *labels)
    share = g['gain'] / max(g['alone'], 1e-9)
    rows.append([name, g['alone'], g['s'], g['a'], g['both'], g['gain'], share, g['chance']])
  columns = ['resolution', 'H(A_p)', 'H(A_p | S)', 'H(A_p | A)', 'H(A_p | S, A)', 'gain', 'share', 'by chance']
  note = (
    f'{len(target)} tested tokens; bits, the acceptance A_p in {BINS} equal bins. S of drafter and companion '
    f'correlates with S of drafter and verifier: {correlation(samples):.2f}.'
  )
  return dict(title='Information gain of the companion', columns=columns, rows=rows, note=note)


def _adaptive(samples: Samples, table: AcceptanceTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return the bins of equal counts of S alone, of A alone, and of both as a table has them."""
  a = samples['a']
  bins = np.shape(table.means)[1]
  row, column = table.cells(samples['s'], a)
  return row, np.searchsorted(edges(a, bins), a, side='right'), row * bins + column


def correlation(samples: Samples) -> float:
  """Return the correlation of S(q, c) and S(q, p); NaN where either never changes."""
  s = samples['s']
  target = samples['s_target']
  return float(np.corrcoef(s, target)[0, 1]) if s.std() and target.std() else float('nan')


# ---- prediction ----


def reliability(table: AcceptanceTable, samples: Samples) -> dict:
  """Return mean acceptance by predicted acceptance, with intervals: what a reliability diagram shows."""
  predicted = table.predict(samples['s'], samples['a'])
  label = equal_width(predicted, BINS)
  rows = []
  for i in range(BINS):
    here = label == i
    if here.any():
      total = samples['accept'][here].sum()
      n = float(here.sum())
      low, high = wilson(total, n)
      name = f'{i / BINS:.1f} … {(i + 1) / BINS:.1f}'
      rows.append([name, predicted[here].mean(), total / n, float(low), float(high), int(n)])
  columns = ['predicted', 'mean predicted', 'mean accepted', 'low', 'high', 'tokens']
  return dict(title=RELIABILITY, columns=columns, rows=rows, note='')


def wilson(total: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return Wilson's 95 % interval of a share; of a mean of numbers in [0, 1] it is no narrower than it should be."""
  size = np.maximum(n, 1e-9)
  middle = (total / size + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
  share = np.clip(total / size, 0, 1)
  half = _Z / (1 + _Z**2 / size) * np.sqrt(share * (1 - share) / size + (_Z / (2 * size)) ** 2)
  return np.where(n > 0, np.maximum(middle - half, 0), 0), np.where(n > 0, np.minimum(middle + half, 1), 1)


def log_loss(table: AcceptanceTable, samples: Samples) -> float:
  """Return the mean of -log₂ of what a table promised for what happened, in bits a token."""
  predicted = np.clip(table.predict(samples['s'], samples['a']), 1e-4, 1 - 1e-4)
  accept = samples['accept']
  return float(-(accept * np.log2(predicted) + (1 - accept) * np.log2(1 - predicted)).mean())


def robustness(profiles: Mapping[str, plans.Profile]) -> dict:
  """Return how well each profile's table predicts the samples of each: other data, another temperature, another γ."""
  samples = [profile.samples for profile in profiles.values()]
  means = [AcceptanceTable.of([], [[]], [[some['accept'].mean()]]) for some in samples]
  rows = [[name, *(log_loss(profile.table, some) for some in samples)] for name, profile in profiles.items()]
  rows.append(['no companion', *map(log_loss, means, samples)])
  note = 'Bits a token; a table was fitted to the samples of its own column, so that one is at an advantage.'
  return dict(title='Tables on the samples of others', columns=['table of', *profiles], rows=rows, note=note)


# ---- what pays ----


def speeds(plan: plans.Plan) -> dict:
  """Return what was measured of each method at each batch size next to what was predicted."""
  rows = []
  for batch, tried in plan.speeds.items():
    chosen = plan.choices[batch]
    for x in tried:
      name = str(plans.Choice(x.name, x.block))
      taken = 'yes' if name == str(chosen) else ''
      rows.append([batch, name, x.median, x.median / tried[0].median, x.predicted, taken])
  columns = ['batch', 'method', 'measured', 'over the verifier alone', 'predicted', 'chosen']
  note = (
    'Tokens a second. methods.planned decodes with the one that is chosen, which has the distribution of the verifier.'
  )
  return dict(title='Methods by batch', columns=columns, rows=rows, note=note)


def break_even(profile: plans.Profile) -> dict:
  """Return at each measured batch size what the cost model says of each method, and what a companion may cost."""
  gamma = f'γ = {profile.origin.block}'
  columns = [
    'batch',
    'plain',
    f'speculative, {gamma}',
    'with the best γ',
    'γ',
    f'sv_exact, {gamma}',
    f'over {gamma}',
    'over the best',
    'verified',
    'wasted',
    'companion ms',
    'may cost ms',
  ]
  note = (
    'Tokens a second by the cost model, from measured calls and observed acceptance. '
    'A companion that costs more than the last column does not pay.'
  )
  rows = [_break_even_at(profile, batch) for batch in profile.times]
  return dict(title='Break-even by batch', columns=columns, rows=rows, note=note)


def _break_even_at(profile: plans.Profile, batch: int) -> list:
  """Return the row of a batch size; a companion may cost what makes `sv_exact` equal the better of the others."""
  x = sv_model.simulate(profile, batch)
  speculative = {n: sv_costs.speculative(profile, batch, n) for n in range(1, profile.origin.block + 1)}
  best = max(speculative, key=speculative.get)
  fixed = speculative[profile.origin.block]
  plain = sv_costs.plain(profile, batch)
  others = max(plain, speculative[best])
  companion = profile.steps[batch][1]
  slack = max(0.0, companion + sv_costs.slack(batch, x, others))
  speeds = plain, fixed, speculative[best], best, x['sv'], x['sv'] / fixed, x['sv'] / others
  return [batch, *speeds, x['verified'], x['wasted'], 1e3 * companion, 1e3 * slack]


# ---- of a run ----


def of_plan(profile: plans.Profile, others: Mapping[str, plans.Profile]) -> list[dict]:
  """Return the tables of a plan of three models, with how well the tables of other plans predict its samples."""
  tables = [information(profile.samples, profile.table), break_even(profile)]
  if others:
    tables.append(robustness({'this plan': profile} | dict(others)))
  return tables


def of_run(points: Sequence[Any], lines: Iterable[Mapping], batches: Sequence[int] = ()) -> list[dict]:
  """Return the tables of a run: of each plan that its points decode by, and of what was verified and wasted.

  `batches` are the sizes that it decodes.
  """
  used = [point for point in points if point.plan is not None]
  if not used:
    return []
  tables = []
  loaded = [p.plan if isinstance(p.plan, plans.Profile) else plans.get(p.plan) for p in used]
  for plan in {id(plan): plan for plan in loaded}.values():
    profile = getattr(plan, 'profile', plan)
    if profile is not None and profile.samples is not None:
      tables += [information(profile.samples, profile.table), reliability(profile.table, profile.samples)]
      tables.append(break_even(profile))
    tables += [speeds(plan)] if isinstance(plan, plans.Plan) else []
  planned = [(point.label, point.build()) for point in used if point.curve.method is methods.planned]
  if rows := [[label, batch, method.at(batch).name] for label, method in planned for batch in batches]:
    tables.append(dict(title='Method by batch', columns=['curve', 'batch', 'method'], rows=rows, note=''))
  groups: dict[tuple, list] = {}
  for line in lines:
    value = '' if line['value'] is None else str(line['value'])
    groups.setdefault((line['curve'], value, line['temperature']), []).append(line)
  tables.append(_waste(groups))
  of_profile = {point.curve.name for point in used}
  chosen = {key: some for key, some in groups.items() if key[0] in of_profile}
  return tables + [fairness(' '.join(filter(None, map(str, key))), some) for key, some in chosen.items()]


def _waste(groups: Mapping[tuple, list[Mapping]]) -> dict:
  """Return the share of the positions the verifier scored whose distribution no token of the output came from.

  Groups that one model decoded, or in which the last model scored nothing, are left out.
  """
  rows = []
  for (curve, value, temperature), lines in groups.items():
    scored = sum(map(_scored, lines))
    emitted = sum(x['emitted'] for x in lines)
    rounds = sum(x['rounds'] for x in lines)
    called = [sum(column) > 0 for column in zip(*(x['calls'] for x in lines), strict=True)]
    if sum(called) < 2 or not rounds or not scored:
      continue
    rows.append([curve, value, temperature, emitted / rounds, scored / rounds, 1 - emitted / scored])
  columns = ['curve', 'value', 'T', 'tokens a round', 'positions scored a round', 'wasted']
  return dict(title='Wasted verification', columns=columns, rows=rows, note='')


def _scored(line: Mapping) -> int:
  return line['positions'][-1]


def fairness(name: str, lines: Sequence[Mapping]) -> dict:
  """Return in how many rounds so many tokens were verified, of the requests with the shortest and the longest mean."""
  mean = [(_scored(x) - x['rounds']) / max(x['rounds'], 1) for x in lines]
  order = sorted(range(len(lines)), key=mean.__getitem__)
  count = min(5, len(order) // 2)
  few = order[:count]
  many = order[len(order) - count :][::-1]
  most = max(len(x['verified_lengths']) for x in lines)
  of = lambda x: [*x['verified_lengths'], *[0] * (most - len(x['verified_lengths']))]
  rows = [
    [kind, lines[i]['example'], mean[i], lines[i]['rounds'], *of(lines[i])]
    for kind, some in (('fewest', few), ('most', many))
    for i in some
  ]
  total = [sum(column) for column in zip(*map(of, lines), strict=True)]
  rows.append(['all', len(lines), sum(mean) / len(mean), sum(x['rounds'] for x in lines), *total])
  columns = ['verified', 'request', 'mean length', 'rounds', *(f'of {n}' for n in range(most))]
  note = 'Rounds in which so many drafted tokens were verified, of the requests where they were fewest and most.'
  return dict(title=f'{FAIRNESS}: {name}', columns=columns, rows=rows, note=note)


# ---- files ----


def of_folder(run: Path) -> list[dict]:
  """Return the tables of each experiment of a run directory."""
  config.parse([str(run / 'config.gin')])
  tables = []
  for experiment in config.build(placed=False):
    own = run / experiment.name
    text = ((own if own.is_dir() else run) / 'examples.jsonl').read_text()
    batches = sorted({*experiment.latency_batches, experiment.quality_batch} - {0})
    tables += of_run(experiment.points, map(json.loads, text.splitlines()), batches)
  return tables


def draw(tables: Sequence[dict], out: Path):
  """Draw the reliability diagrams and the histograms of verified lengths."""
  import matplotlib.pyplot as plt

  out.mkdir(parents=True, exist_ok=True)
  for start, name, axes_of in (
    (RELIABILITY, 'reliability', _draw_reliability),
    (FAIRNESS, 'verified_lengths', _draw_lengths),
  ):
    for i, table in enumerate((t for t in tables if t['title'].startswith(start)), 1):
      figure, axes = plt.subplots(layout='constrained')
      axes.set_title(table['title'])
      axes_of(axes, table['rows'])
      figure.savefig(out / f'{name}_{i}.svg')
      plt.close(figure)


def _draw_reliability(axes, rows):
  _, predicted, mean, low, high, _ = (np.array(column) for column in zip(*rows, strict=True))
  axes.errorbar(predicted, mean, np.maximum((mean - low, high - mean), 0), fmt='o')
  axes.plot((0, 1), (0, 1), linestyle='--', color='grey')
  axes.set(xlabel='predicted acceptance', ylabel='accepted by the verifier')


def _draw_lengths(axes, rows):
  names = {'fewest': 'verified fewest', 'most': 'verified most', 'all': 'all requests'}
  for kind, _, _, rounds, *counts in rows:
    axes.stairs(np.array(counts) / max(rounds, 1), np.arange(len(counts) + 1) - 0.5, label=names.pop(kind, None))
  axes.set(xlabel='drafted tokens verified in a round', ylabel='share of rounds')
  axes.legend()


def main():
  """Print the tables of a plan or a run."""
  command, path, *more = sys.argv[1:]
  if command == 'plan':
    tables = of_plan(plans.profile_of(path), {other: plans.profile_of(other) for other in more})
  else:
    tables = of_folder(Path(path))
    if more:
      draw(tables, Path(*more))
  print('', *map(markdown, tables), sep='\n')


if __name__ == '__main__':
  main()
