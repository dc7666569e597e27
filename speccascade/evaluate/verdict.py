"""What an experiment found, in sentences: what was compared, and whether anything pays."""

from collections.abc import Sequence

from speccascade.evaluate import tables


def compared(results: dict) -> str:
  """Return in a sentence what was compared."""
  points = results['points']
  names = list(dict.fromkeys(p['curve'] for p in points))
  settings = len({(p['curve'], str(p['value'])) for p in points})
  asked = max((p['examples'] for p in points), default=0)
  timed = max(((p['latency'] or {}).get('examples', 0) for p in points), default=0)
  said = f'{len(names)} methods in {settings} settings, {" → ".join(results["models"])}, compared on {asked} examples'
  return f'{said}, {timed} of them timed.' if timed else f'{said}; no times were measured.'


def findings(results: dict) -> list[tuple[str, str, str]]:
  """Return for each temperature (and batch size) its title, 'yes', 'no' or 'open', and the best finding."""
  return [(title, *finding(results, points)) for title, points in tables.groups(results)]


def finding(results: dict, points: Sequence[dict]) -> tuple[str, str]:
  """Return whether anything pays, and what: the fastest measured setting that has the reference's quality.

  Over an ensemble, and where no quality was measured, the fastest setting. 'open' where the question was not measured.
  """
  reference, metric = results['reference'], results['metric']
  shown = tables.metric_name(metric)
  base = tables.at(points, reference)
  others = [p for p in points if p['curve'] not in (reference, tables.LARGE, tables.SMALL)]
  timed = [p for p in others if tables.ratio(p) is not None]
  if not others:
    return 'open', f'Only {reference} was measured; there is nothing to compare it with.'
  if base is None or not timed:
    rated = [p for p in others if tables.quality(p, metric) is not None]
    if not rated:
      return 'open', 'Neither quality nor time was measured.'
    best = max(rated, key=lambda p: tables.quality(p, metric))
    had = None if base is None else tables.quality(base, metric)
    beside = '' if had is None else f' against {had:.2f} of {reference}{_overlap(best, base, metric)}'
    said = f'{named(best)} has the best {shown}, {tables.quality(best, metric):.2f}{beside}'
    return 'open', f'{said}. No times were measured.'
  wanted = tables.quality(base, metric)
  if reference != tables.LARGE or wanted is None:
    return _speed(max(timed, key=tables.ratio), f'runs at {{ratio}} the speed of {reference}')
  best = fastest_as_good(results, points)
  if best is not None:
    had = tables.quality(best, metric)
    beside = f'{had:.2f}' if had == wanted else f'{had:.2f} against {wanted:.2f}'
    return _speed(best, f"reaches the large model's {shown} ({beside}) at {{ratio}} its speed")
  rated = [p for p in timed if tables.quality(p, metric) is not None]
  if not rated:
    return 'open', f'{shown} was measured of {reference} alone.'
  near = max(rated, key=lambda p: (tables.quality(p, metric), tables.ratio(p)))
  return 'no', (
    f"Nothing reaches the large model's {shown} of {wanted:.2f}; nearest is {named(near)} with "
    f'{tables.quality(near, metric):.2f}, at {tables.ratio(near):.2f}× its speed.'
  )


def _overlap(one: dict, other: dict, metric: str) -> str:
  """Return a warning where the 95 % intervals of two qualities have a value in common."""
  intervals = [(p.get('quality_ci') or {}).get(metric) for p in (one, other)]
  if None in intervals or max(low for low, _ in intervals) > min(high for _, high in intervals):
    return ''
  return ' (their 95 % intervals overlap)'


def fastest_as_good(results: dict, points: Sequence[dict]) -> dict | None:
  """Return the fastest measured setting with at least the reference's quality, beside the models alone."""
  metric, base = results['metric'], tables.at(points, results['reference'])
  wanted = None if base is None else tables.quality(base, metric)
  others = [p for p in points if p['curve'] not in (results['reference'], tables.LARGE, tables.SMALL)]
  rated = [p for p in others if None not in (tables.ratio(p), tables.quality(p, metric), wanted)]
  return max((p for p in rated if tables.quality(p, metric) >= wanted), key=tables.ratio, default=None)


def _speed(point: dict, does: str) -> tuple[str, str]:
  """Return whether a setting is faster, by its interval where there is one, and the sentence."""
  ratio, interval = tables.ratio(point), point['latency'].get('ratio_ci')
  within = '' if interval is None else f' [{interval[0]:.2f} … {interval[1]:.2f}]'
  said = f'{named(point)} {does.format(ratio=f"{ratio:.2f}×{within}")}'
  if (ratio if interval is None else interval[0]) > 1:
    return 'yes', f'{said}.'
  if ratio > 1:
    return 'no', f'No gain that the measurement can tell: the best, {said}.'
  return 'no', f'Nothing pays: the best, {said}.'


def named(point: dict) -> str:
  """Return a point as it is called: its curve and its setting."""
  setting = tables.label(point)
  return f'{point["curve"]} at {setting}' if setting else point['curve']
