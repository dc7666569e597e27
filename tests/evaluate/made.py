"""Results made by hand, for what reads them: plausible, complete and known numbers."""

import dataclasses

from speccascade.evaluate.report.points import PointResult

TIMES = dict(median_s=0.2, iqr_s=[0.15, 0.25], tokens_per_s=100.0, trials=3, examples=20)


def point(curve, value=None, quality=None, ratio=None, *, parameter='alpha', temperature=0.0, batch=1, **more):
  """Return one point; quality None or ratio None: not measured."""
  record = dict(
    curve=curve,
    parameter=None if value is None else parameter,
    value=value,
    temperature=temperature,
    batch=batch,
    examples=50,
    quality=None,
    quality_ci=None,
    latency=None,
    counts=None,
  )
  if quality is not None:
    record |= dict(quality={'bleu': quality}, quality_ci={'bleu': [quality - 1.5, quality + 1.5]})
  if ratio is not None:
    record['latency'] = TIMES | dict(
      median_s=0.2 / ratio,
      iqr_s=[0.15 / ratio, 0.25 / ratio],
      tokens_per_s=100 * ratio,
      ratio=ratio,
      ratio_ci=[ratio - 0.04, ratio + 0.04],
    )
  record |= more
  record['latency'] = record['latency'] and TIMES | record['latency']
  return PointResult.from_json(record)


def timed(point, **more):
  """Return a point with other times."""
  return dataclasses.replace(point, latency=dataclasses.replace(point.latency, **more))


def counts(rate, deferred=None, block=5, length=20.0, cut_off=0.0):
  """Return the counts of 1000 rounds whose tokens are all accepted with one chance."""
  reached = [round(1000 * rate**i) for i in range(block + 2)]
  tested, accepted = reached[:block], reached[1 : block + 1]
  emitted = 1000 + sum(accepted)
  return dict(
    calls=[1000 * block, 1000],
    positions=[1000 * block, 1000 * (block + 1)],
    computed=[1000 * block, 6000],
    drafted=[1000 * block, 0],
    rounds=1000,
    tested=sum(tested),
    accepted=sum(accepted),
    emitted=emitted,
    deferred=0 if deferred is None else round(deferred * emitted),
    deferral_rate=deferred,
    acceptance=sum(accepted) / sum(tested),
    tokens_per_round=emitted / 1000,
    tested_at=tested,
    accepted_at=accepted,
    length=length,
    cut_off=cut_off,
    accepted_lengths=[a - b for a, b in zip([1000, *accepted], [*accepted, 0])],
  )


def results(points, *, reference='target only', **more):
  """Return results of these points."""
  record = dict(
    name='small → large',
    task='en→de',
    metric='bleu',
    metrics=['bleu'],
    models=['small', 'large'],
    reference=reference,
    environment={'device': 'cpu', 'versions': {'jax': '0.10.2', 'flax': '0.12.8'}, 'cpus': 2},
    command='python -m speccascade.run',
    points=points,
    tables=[],
    traces=[],
  )
  return record | more


def cascades(temperatures=(0.0, 1.0)):
  """Return the results of a comparison of cascades, every part present."""
  points = []
  sweeps = {
    'TokenCascade [Chow]': [(0.1, 27.4, 0.98, 0.7, 0.5), (0.4, 26.1, 1.12, 0.8, 0.3), (0.8, 22.0, 1.6, 0.95, 0.1)],
    'SpecDecode [Lossy]': [(0.1, 28.0, 1.2, 0.66, None), (0.3, 27.2, 1.32, 0.72, None), (0.6, 25.0, 1.6, 0.83, None)],
    'SpecCascade [Chow]': [(0.1, 28.1, 1.21, 0.7, 0.5), (0.4, 27.4, 1.4, 0.8, 0.3), (0.8, 23.0, 1.7, 0.9, 0.1)],
    'SpecCascade [Diff]': [(0.0, 28.3, 1.24, 0.7, 0.4), (0.1, 28.2, 1.36, 0.76, 0.3), (0.3, 27.0, 1.6, 0.85, 0.15)],
    'SpecCascade [OPT]': [(0.0, 28.3, 1.24, 0.7, 0.4), (0.1, 28.6, 1.4, 0.78, 0.3), (0.3, 27.6, 1.7, 0.88, 0.14)],
  }
  for t in temperatures:
    worse = 3 * t
    points += [
      point('target only', quality=28.1 - worse, ratio=1.0, temperature=t, counts=counts(0.0) | {'tested_at': []}),
      point('draft only', quality=20.3 - 2 * worse, ratio=3.9, temperature=t),
      point('SpecDecode', quality=28.1 - worse, ratio=1.15, temperature=t, counts=counts(0.62)),
    ]
    for name, rows in sweeps.items():
      for value, quality, ratio, rate, deferred in rows:
        points.append(
          point(
            name,
            value,
            quality - worse,
            ratio - 0.1 * t,
            temperature=t,
            counts=counts(rate, deferred),
          )
        )
  points += [
    point('SpecDecode, by γ', g, 28.1, r, parameter='block', counts=counts(0.62, block=g))
    for g, r in ((1, 1.1), (3, 1.2), (5, 1.15), (7, 1.05))
  ]
  return results(points, traces=[trace('SpecCascade [OPT]', 0.1), trace('target only', None)])


def trace(curve, value, prompt='Two dogs run.', **more):
  """Return a trace of a few tokens of every source."""
  rows = [('▁Zwei', 'drafter'), ('▁Hunde', 'drafter'), ('▁laufen', 'residual'), ('.', 'bonus'), ('</s>', 'verifier')]
  tokens = [dict(text=text, source=source) for text, source in rows]
  record = dict(curve=curve, value=value, temperature=0.0, example=3, prompt=prompt, target='Zwei Hunde laufen.')
  return record | dict(tokens=tokens) | more
