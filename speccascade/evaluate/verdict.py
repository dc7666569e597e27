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
  faulty = [p for p in points if p.get('faults') and p['batch'] == points[0]['batch']]
  said = f'{len(names)} methods in {settings} settings, {" → ".join(results["models"])}, compared on {asked} examples'
  said = f'{said}, {timed} of them timed.' if timed else f'{said}; no times were measured.'
  if not faulty:
    return said
  return f'{said} {sum(p["faults"] for p in faulty)} outputs ended as faults and are not timed. {faulty[0]["fault"]}'


def findings(results: dict) -> list[tuple[str, str, str]]:
  """Return for each temperature (and batch size) its title, 'yes', 'no' or 'open', and the best finding."""
  return [(title, *finding(results, points)) for title, points in tables.groups(results)]


def finding(results: dict, points: Sequence[dict]) -> tuple[str, str]:
  """Return whether anything pays, and what: the fastest measured setting that has the reference's quality.

  Over an ensemble, and where no quality was measured, the fastest setting. 'open' where the question was not measured,
  or not well enough to tell.
  """
  reference, metric = results['reference'], results['metric']
  base, others = tables.at(points, reference), _others(results, points)
  timed = [p for p in others if tables.ratio(p) is not None]
  if not others:
    return 'open', f'Only {reference} was measured; there is nothing to compare it with.'
  if base is None or not timed:
    return 'open', _untimed(results, others, base)
  if reference != tables.LARGE or tables.quality(base, metric) is None:
    return _speed(max(timed, key=tables.ratio), base, f'runs at {{ratio}} the speed of {reference}')
  best = fastest_as_good(results, points)
  if best is None:
    return _nearest(results, timed, base)
  shown = f"the large model's {tables.metric_name(metric)} ({_against(best, base, metric)})"
  return _speed(best, base, f'reaches {shown} at {{ratio}} its speed')


def fastest_as_good(results: dict, points: Sequence[dict]) -> dict | None:
  """Return the fastest measured setting with at least the reference's quality, beside the models alone."""
  metric, base = results['metric'], tables.at(points, results['reference'])
  wanted = None if base is None else tables.quality(base, metric)
  rated = [p for p in _others(results, points) if None not in (tables.ratio(p), tables.quality(p, metric), wanted)]
  return max((p for p in rated if tables.quality(p, metric) >= wanted), key=tables.ratio, default=None)


def _others(results: dict, points: Sequence[dict]) -> list[dict]:
  """Return what is compared with the reference, settings that decoded alike once, not the luckiest of them."""
  alone = (results['reference'], tables.LARGE, tables.SMALL)
  return [p for p in tables.distinct(points) if p['curve'] not in alone]


def _untimed(results: dict, others: Sequence[dict], base: dict | None) -> str:
  """Return what quality alone says."""
  metric = results['metric']
  rated = [p for p in others if tables.quality(p, metric) is not None]
  if not rated:
    return 'Neither quality nor time was measured.'
  best = max(rated, key=lambda p: tables.quality(p, metric))
  said = f'{tables.quality(best, metric):.2f}'
  if base is not None and tables.quality(base, metric) is not None:
    said = _against(best, base, metric, of=f' of {results["reference"]}')
  return f'{named(best)} has the best {tables.metric_name(metric)}, {said}. No times were measured.'


def _nearest(results: dict, timed: Sequence[dict], base: dict) -> tuple[str, str]:
  """Return what comes nearest to the reference's quality where nothing has it."""
  metric = results['metric']
  shown, rated = tables.metric_name(metric), [p for p in timed if tables.quality(p, metric) is not None]
  if not rated:
    return 'open', f'{shown} was measured of {results["reference"]} alone.'
  near = max(rated, key=lambda p: (tables.quality(p, metric), tables.ratio(p)))
  return 'open' if _apart(near, metric) is False else 'no', (
    f"Nothing reaches the large model's {shown}; nearest is {named(near)} ({_against(near, base, metric)}), "
    f'at {tables.ratio(near):.2f}× its speed.'
  )


def _against(point: dict, base: dict, metric: str, of: str = '') -> str:
  """Return a quality beside the reference's, and what the interval of their difference says."""
  had, wanted = tables.quality(point, metric), tables.quality(base, metric)
  if had == wanted:
    return f'{had:.2f}'
  said, apart = f'{had:.2f} against {wanted:.2f}{of}', _apart(point, metric)
  return said if apart is None else f'{said}, {"more than chance" if apart else "too near to tell apart"}'


def _apart(point: dict, metric: str) -> bool | None:
  """Tell whether a quality differs from the reference's by more than the interval, None where there is none."""
  interval = (point.get('quality_gain_ci') or {}).get(metric)
  return None if interval is None else interval[0] > 0 or interval[1] < 0


def _speed(point: dict, base: dict, does: str) -> tuple[str, str]:
  """Return whether a setting is faster, by its interval, and the sentence."""
  ratio, interval = tables.ratio(point), point['latency'].get('ratio_ci')
  within = '' if interval is None else f' [{interval[0]:.2f} … {interval[1]:.2f}]'
  said = f'{named(point)} {does.format(ratio=f"{ratio:.2f}×{within}")}{_outputs(point, base)}'
  if ratio <= 1:
    return 'no', f'Nothing pays: the best, {said}.'
  if interval is None:
    return 'open', f'{said}; timed on too little for an interval, it may be chance.'
  if interval[0] <= 1:
    return 'no', f'No gain that the measurement can tell: the best, {said}.'
  return 'yes', f'{said}.'


def _outputs(point: dict, base: dict) -> str:
  """Return what a time hides: outputs of another length than the reference's, or cut off more often."""
  mine, its = (p.get('counts') or {} for p in (point, base))
  if not (mine.get('length') and its.get('length')):
    return ''
  longer, cut = mine['length'] / its['length'] - 1, mine['cut_off'] - its['cut_off']
  said = f', with outputs {abs(longer):.0%} {"longer" if longer > 0 else "shorter"}' if abs(longer) > 0.05 else ''
  return said + (f', {mine["cut_off"]:.0%} of them cut off' if cut > 0.02 else '')


def named(point: dict) -> str:
  """Return a point as it is called: its curve and its setting."""
  setting = tables.label(point)
  return f'{point["curve"]} at {setting}' if setting else point['curve']
