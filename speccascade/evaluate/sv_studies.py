"""Studies of speculative verification: what a companion tells of acceptance, and from which batch on that pays.

Everything is computed from the samples and times of a profile, as tables of `tables.Table`'s form. Entropies are in
bits; acceptance is cut in ten equal bins for them.

Axis letters: N samples, B rows, W drafted tokens of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.engine import profiles, verification

Samples = Mapping[str, np.ndarray]

TARGET_BINS = 10
RELIABILITY = 'Reliability of the predicted acceptance'
FAIRNESS = 'Verified lengths by request'
PAYS = 1.05  # a gain up to this is lost in the noise of a measurement, and in what the cost model leaves out
_ROUNDS = 400  # simulated rounds of a batch


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


def information(
  samples: Samples, table: verification.AcceptanceTable, resolutions: Sequence[int] = (5, 10, 20)
) -> dict:
  """Return the paper's table of uncertainty and information gain by resolution, the last that of the table."""
  target = equal_width(samples['accept'], TARGET_BINS)
  found = {}
  for n in resolutions:
    s, a = equal_width(samples['s'], n), equal_width(samples['a'], n)
    found[f'{n} ({n}×{n} for both)'] = s, a, s * n + a
  adaptive = _adaptive(samples, table)
  found[f'adaptive ({len(np.unique(adaptive[2]))} bins)'] = adaptive
  rows = []
  for name, labels in found.items():
    g = gains(target, *labels)
    share = g['gain'] / max(g['alone'], 1e-9)
    rows.append([name, g['alone'], g['s'], g['a'], g['both'], g['gain'], share, g['chance']])
  columns = ['resolution', 'H(A_p)', 'H(A_p | S)', 'H(A_p | A)', 'H(A_p | S, A)', 'gain', 'share', 'by chance']
  note = (
    f'{len(target)} tested tokens; bits, the acceptance A_p in {TARGET_BINS} equal bins. S of drafter and companion '
    f'correlates with S of drafter and verifier: {correlation(samples):.2f}.'
  )
  return dict(title='Information gain of the companion', columns=columns, rows=rows, note=note)


def _adaptive(samples: Samples, table: verification.AcceptanceTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return the bins of equal counts of S alone, of A alone, and of both as a table has them."""
  a, bins = samples['a'], np.shape(table.means)[1]
  row, column = profiles.cells(table, samples['s'], a)
  return row, np.searchsorted(profiles.edges(a, bins), a, side='right'), row * bins + column


def correlation(samples: Samples) -> float:
  """Return the correlation of S(q, c) and S(q, p); NaN where either never changes."""
  s, target = samples['s'], samples['s_target']
  return float(np.corrcoef(s, target)[0, 1]) if s.std() and target.std() else float('nan')


# ---- prediction ----


def reliability(table: verification.AcceptanceTable, samples: Samples, bins: int = 10) -> dict:
  """Return mean acceptance by predicted acceptance, with intervals: what a reliability diagram shows."""
  said = profiles.predicted(table, samples['s'], samples['a'])
  label, rows = equal_width(said, bins), []
  for i in range(bins):
    here = label == i
    if here.any():
      total, n = samples['accept'][here].sum(), float(here.sum())
      low, high = profiles.wilson(np.array(total), np.array(n))
      name = f'{i / bins:.1f} … {(i + 1) / bins:.1f}'
      rows.append([name, said[here].mean(), total / n, float(low), float(high), int(n)])
  columns = ['predicted', 'mean predicted', 'mean accepted', 'low', 'high', 'tokens']
  return dict(title=RELIABILITY, columns=columns, rows=rows, note='')


def log_loss(table: verification.AcceptanceTable, samples: Samples) -> float:
  """Return the mean of -log₂ of what a table promised for what happened, in bits a token."""
  said = np.clip(profiles.predicted(table, samples['s'], samples['a']), 1e-4, 1 - 1e-4)
  accept = samples['accept']
  return float(-(accept * np.log2(said) + (1 - accept) * np.log2(1 - said)).mean())


def robustness(found: Mapping[str, profiles.Profile]) -> dict:
  """Return how well each profile's table predicts the samples of each: other data, another temperature, another γ."""
  names = list(found)
  rows = [[name, *(log_loss(found[name].table, found[other].samples) for other in names)] for name in names]
  rows.append(['no companion', *(log_loss(_constant(found[other].samples), found[other].samples) for other in names)])
  note = 'Bits a token; a table was fitted to the samples of its own column, so that one is at an advantage.'
  return dict(title='Tables on the samples of others', columns=['table of', *names], rows=rows, note=note)


def _constant(samples: Samples) -> verification.AcceptanceTable:
  """Return a table that promises the mean."""
  return profiles.table_of([], [[]], [[samples['accept'].mean()]])


# ---- what pays ----


def windows(samples: Samples, block: int) -> dict[str, np.ndarray]:
  """Return {s, a, accept} [N, W] of what a draft from each position would show, its tokens being those of the text.

  The W-th token is tested in the end whatever was scored; a text's last positions begin no window.
  """
  request = samples['request']
  starts = np.flatnonzero(request[:-block] == request[block:])
  at = starts[:, None] + np.arange(block + 1)[None]
  return {name: samples[name][at] for name in ('s', 'a', 'accept')}


def simulate(found: profiles.Profile, batch: int, block: int | None = None, *, greedy: bool = False) -> dict:
  """Return tokens a second of plain, speculative and speculative verification at a batch, by the cost model.

  Rounds are made of windows that were observed and times that were measured; what a round costs beside its model calls
  is left out. `speculative` has the best γ up to `block`, `verified` is how many tokens of a row are scored on average.
  """
  most = found.origin.block
  block, seen = block or most, windows(found.samples, most)
  if not len(seen['s']):
    raise ValueError(f'no text of the profile is longer than γ = {most}: profile with more tokens.')
  pick = np.random.default_rng(batch).integers(0, len(seen['s']), (_ROUNDS, batch))
  kept = np.cumprod(seen['accept'][:, :block], 1)[pick]  # [rounds, B, γ] the chance that all tokens so far are kept
  said = profiles.predicted(found.table, seen['s'].reshape(-1), seen['a'].reshape(-1)).reshape(seen['s'].shape)
  gains = np.cumprod(np.where(np.arange(most + 1) < block, said, 0), 1)[pick]
  seconds, steps = found.latency.at(batch, jnp.int32(batch), gains[0].size + 1)
  seconds, (draft, companion) = np.asarray(seconds, np.float64), np.asarray(steps, np.float64)
  expected = lambda n: batch + kept[:, :, :n].sum((1, 2)).mean()
  sizes = sorted(found.times[batch])
  window = lambda n: np.interp(batch * (n + 1), sizes, [found.times[batch][size] for size in sizes])
  by_block = {n: expected(n) / (n * draft + window(n)) for n in range(1, block + 1)}
  beside = (block + 1) * draft + companion
  chosen = np.asarray(_lengths(np.float32(gains), np.float32(seconds + beside * (not greedy)), batch, greedy))
  scored = np.arange(block) < chosen[:, :, None]
  emitted = batch + np.where(scored, kept, 0).sum((1, 2))  # the token after those scored comes out in any case
  spent = beside + seconds[chosen.sum(1)]
  best = max(by_block, key=by_block.get)
  return dict(
    plain=batch / found.steps[batch][2], speculative=by_block[best], block=best, fixed=by_block[block],
    sv=emitted.sum() / spent.sum(), verified=chosen.mean(), wasted=1 - emitted.sum() / (chosen + 1).sum(),
  )  # fmt: skip


@functools.partial(jax.jit, static_argnums=3)
def _lengths(gains: jax.Array, seconds: jax.Array, rows: int, greedy: bool) -> jax.Array:
  """Return the choice [rounds, B] in rounds of gains [rounds, B, W]."""
  return jax.vmap(lambda g: verification.lengths(g, seconds, jnp.asarray(rows), greedy))(gains)


def candidates(found: profiles.Profile, batch: int) -> dict[profiles.Way, float]:
  """Return the ways of decoding a batch that may be the fastest, each with tokens a second by the cost model.

  These are plain decoding, speculative decoding with the best γ, those beside it and the profile's, and speculative
  verification with its best γ and the profile's.
  """
  most = found.origin.block
  speed = {n: simulate(found, batch, n) for n in range(1, most + 1)}
  best, verified = (max(speed, key=lambda n: speed[n][kind]) for kind in ('fixed', 'sv'))
  drafted = [n for n in speed if abs(n - best) <= 1 or n == most]
  said = {profiles.Way('plain'): speed[most]['plain']}
  said |= {profiles.Way('speculative', n): speed[n]['fixed'] for n in drafted}
  return said | {profiles.Way('sv', n): speed[n]['sv'] for n in sorted({verified, most})}


def best_ways(found: profiles.Profile) -> dict[int, profiles.Way]:
  """Return the fastest way at each batch as measured or, where nothing was, by the cost model.

  A way with more to it has to be faster by `PAYS`.
  """
  best = {}
  for batch in found.times:
    speed = (found.measured or {}).get(batch) or candidates(found, batch)
    chosen = profiles.Way('plain')
    for kind in profiles.KINDS[1:]:
      way = max((w for w in speed if w.kind == kind), key=speed.get)
      chosen = way if speed[way] > PAYS * speed[chosen] else chosen
    best[batch] = chosen
  return best


def ways(found: profiles.Profile) -> dict:
  """Return what was measured of each way of decoding at each batch beside what the cost model says of it."""
  plain, rows = profiles.Way('plain'), []
  for batch, chosen in (found.ways or {}).items():
    said, measured = candidates(found, batch), (found.measured or {}).get(batch, {})
    for way in measured or said:
      speeds = [(some[way], some[way] / some[plain]) if way in some else (None, None) for some in (measured, said)]
      rows.append([batch, str(way), *speeds[0], *speeds[1], 'yes' if way == chosen else ''])
  columns = ['batch', 'way', 'measured', 'over plain', 'by the cost model', 'over plain', 'taken']
  note = 'Tokens a second. sv_exact without a block decodes in the way that is taken; they all have the same law.'
  return dict(title='Ways to decode by batch', columns=columns, rows=rows, note=note)


def break_even(found: profiles.Profile) -> dict:
  """Return at each measured batch what the cost model says of every way to decode, and what a companion may cost."""
  rows = []
  for batch in found.times:
    x = simulate(found, batch)
    others = max(x['plain'], x['speculative'])
    slack = _slack(found, batch, x, others)
    rows.append([
      batch, x['plain'], x['fixed'], x['speculative'], x['block'], x['sv'], x['sv'] / x['fixed'], x['sv'] / others,
      x['verified'], x['wasted'], 1e3 * found.steps[batch][1], 1e3 * slack,
    ])  # fmt: skip
  gamma = f'γ = {found.origin.block}'
  columns = [
    'batch', 'plain', f'speculative, {gamma}', 'with the best γ', 'γ', f'sv_exact, {gamma}', f'over {gamma}',
    'over the best', 'verified', 'wasted', 'companion ms', 'may cost ms',
  ]  # fmt: skip
  note = (
    'Tokens a second by the cost model, from measured forward passes and observed acceptance; '
    'rounds cost nothing beside. A companion that costs more than the last column does not pay.'
  )
  return dict(title='Break-even by batch', columns=columns, rows=rows, note=note)


def _slack(found: profiles.Profile, batch: int, x: Mapping[str, float], others: float) -> float:
  """Return the seconds a companion may take for speculative verification to equal the better of the others."""
  emitted = batch * (1 - x['wasted']) * (1 + x['verified'])
  return max(0.0, emitted / others - (emitted / x['sv'] - found.steps[batch][1]))


# ---- of a run ----


def of_run(points: Sequence[Any], lines: Iterable[Mapping], batches: Sequence[int] = ()) -> list[dict]:
  """Return the tables of a run: of each profile that its points decode by, and of what was verified in vain.

  `batches` are the sizes that it decodes.
  """
  used = {id(profile): profile for profile in (profiles.get(p.profile) for p in points if p.profile is not None)}
  if not used:
    return []
  found = []
  for profile in used.values():
    if profile.samples is not None:
      found += [information(profile.samples, profile.table), reliability(profile.table, profile.samples)]
      found += [break_even(profile), ways(profile)]
  found += _taken(points, batches)
  groups: dict[tuple, list] = {}
  for line in lines:
    groups.setdefault((line['curve'], str(line['value']), line['temperature']), []).append(line)
  found.append(_waste({key: some for key, some in groups.items() if sum(map(bool, some[0]['calls'])) > 1}))
  of_profile = {p.curve.name for p in points if p.profile is not None}
  chosen = {key: some for key, some in groups.items() if key[0] in of_profile}
  return found + [fairness(' '.join(str(x) for x in key if x != 'None'), some) for key, some in chosen.items()]


def _taken(points: Sequence[Any], batches: Sequence[int]) -> list[dict]:
  """Return the table of how the curves that leave this to their profile decode each batch, where there are any."""
  by_size = [p for p in points if p.profile is not None and p.build().kind == 'by_batch']
  by_size = [p for p in by_size if 'block' not in (*p.curve.settings, p.curve.parameter)]
  rows = [[p.label, batch, str(profiles.get(p.profile).way(batch))] for p in by_size for batch in batches]
  return [dict(title='Way taken by batch', columns=['curve', 'batch', 'way'], rows=rows, note='')] if rows else []


def _waste(groups: Mapping[tuple, list[Mapping]]) -> dict:
  """Return the share of the positions the verifier scored whose law no token of the output came from."""
  rows = []
  for (curve, value, temperature), lines in groups.items():
    scored, emitted, rounds = sum(map(_scored, lines)), *(sum(x[name] for x in lines) for name in ('emitted', 'rounds'))
    rows.append([curve, value, temperature, emitted / rounds, scored / rounds, 1 - emitted / scored])
  columns = ['curve', 'value', 'T', 'tokens a round', 'positions scored a round', 'wasted']
  return dict(title='Verification in vain', columns=columns, rows=rows, note='')


def _scored(line: Mapping) -> int:
  return line['positions'][-1]


def fairness(name: str, lines: Sequence[Mapping], count: int = 5) -> dict:
  """Return in how many rounds so many tokens were verified, of the requests with the shortest and the longest mean."""
  mean = [(_scored(x) - x['rounds']) / max(x['rounds'], 1) for x in lines]
  order = sorted(range(len(lines)), key=mean.__getitem__)
  count = min(count, len(order) // 2)
  few, many = order[:count], order[len(order) - count :][::-1]
  most = max(len(x['verified_lengths']) for x in lines)
  of = lambda x: [*x['verified_lengths'], *[0] * (most - len(x['verified_lengths']))]
  rows = [
    [kind, lines[i]['example'], mean[i], lines[i]['rounds'], *of(lines[i])]
    for kind, some in (('fewest', few), ('most', many)) for i in some
  ]  # fmt: skip
  total = [sum(column) for column in zip(*map(of, lines), strict=True)]
  rows.append(['all', len(lines), sum(mean) / len(mean), sum(x['rounds'] for x in lines), *total])
  columns = ['verified', 'request', 'mean length', 'rounds', *(f'of {n}' for n in range(most))]
  note = 'Rounds in which so many drafted tokens were verified, of the requests where they were fewest and most.'
  return dict(title=f'{FAIRNESS}: {name}', columns=columns, rows=rows, note=note)
