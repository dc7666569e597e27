"""The findings of an experiment, in sentences: what was compared, and whether anything pays."""

from collections.abc import Sequence

from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report.points import PointResult


def compared(results: dict) -> str:
  """Return in a sentence what was compared; with a second one if outputs ended as faults."""
  points = results['points']
  names = {p.curve for p in points}
  settings = {(p.curve, str(p.value)) for p in points}
  examples = max((p.examples for p in points), default=0)
  timed = max((p.time('examples') or 0 for p in points), default=0)
  text = f'{len(names)} methods in {len(settings)} settings, {" → ".join(results["models"])}, compared on '
  text += f'{examples} examples, {timed} of them timed.' if timed else f'{examples} examples; no times were measured.'
  faulty = [p for p in points if p.faults and p.batch == points[0].batch]
  if not faulty:
    return text
  return f'{text} {sum(p.faults for p in faulty)} outputs ended as faults and are not timed. {faulty[0].fault}'


def findings(results: dict) -> list[tuple[str, str, str]]:
  """Return the title of each temperature and batch size, with the outcome and the sentence of its `finding`."""
  return [(title, *finding(results, points)) for title, points in pts.groups(results)]


def finding(results: dict, points: Sequence[PointResult]) -> tuple[str, str]:
  """Return whether the fastest setting that has the reference's quality pays, and the sentence that says so.

  Over an ensemble, and if nothing judged the quality, it is the fastest setting of all. It pays ('yes'), it does not
  ('no'), or that was not measured well enough to tell ('open').
  """
  reference = results['reference']
  metric = results['metric']
  base = pts.first(points, reference)
  alone = (reference, pts.LARGE, pts.SMALL)
  others = [p for p in pts.distinct(points) if p.curve not in alone]  # of those that decoded alike not the luckiest
  timed = [p for p in others if p.ratio is not None]
  if not others:
    return 'open', f'Only {reference} was measured; there is nothing to compare it with.'
  if base is None or not timed:
    return 'open', _untimed(results, others, base)
  if reference != pts.LARGE or base.quality_of(metric) is None or metric in pts.DESCRIPTIONS:
    fastest = max(timed, key=lambda p: p.ratio)
    base = pts.reference(results, points, fastest)
    value = f' at {base.setting}' if base.setting else ''
    return _speed(fastest, base, 'runs at', f'the speed of {reference}{value}')
  wanted = base.quality_of(metric)
  rated = [p for p in timed if p.quality_of(metric) is not None]
  best = max((p for p in rated if p.quality_of(metric) >= wanted), key=lambda p: p.ratio, default=None)
  if best is None:
    return _nearest(results, rated, base)
  shown = f"the large model's {pts.metric_name(metric)} ({_against(best, base, metric)})"
  return _speed(best, base, f'reaches {shown} at', 'its speed')


def _untimed(results: dict, others: Sequence[PointResult], base: PointResult | None) -> str:
  """Return the finding about quality alone."""
  metric = results['metric']
  rated = [p for p in others if p.quality_of(metric) is not None]
  if not rated or metric in pts.DESCRIPTIONS:
    return 'Neither quality nor time was measured.'
  best = max(rated, key=lambda p: p.quality_of(metric))
  value = f'{best.quality_of(metric):.2f}'
  if base is not None and base.quality_of(metric) is not None:
    value = _against(best, base, metric, of=f' of {results["reference"]}')
  return f'{best.label} has the best {pts.metric_name(metric)}, {value}. No times were measured.'


def _nearest(results: dict, rated: Sequence[PointResult], base: PointResult) -> tuple[str, str]:
  """Return the finding about the setting that comes nearest to the reference's quality."""
  metric = results['metric']
  shown = pts.metric_name(metric)
  if not rated:
    return 'open', f'{shown} was measured of {results["reference"]} alone.'
  near = max(rated, key=lambda p: (p.quality_of(metric), p.ratio))
  return 'open' if _apart(near, metric) is False else 'no', (
    f"Nothing reaches the large model's {shown}; nearest is {near.label} ({_against(near, base, metric)}), "
    f'at {near.ratio:.2f}× its speed.'
  )


def _against(point: PointResult, base: PointResult, metric: str, of: str = '') -> str:
  """Return a quality next to the reference's, and whether the interval of their difference excludes chance."""
  mine = point.quality_of(metric)
  wanted = base.quality_of(metric)
  if mine == wanted:
    return f'{mine:.2f}'
  apart = _apart(point, metric)
  judged = {None: '', True: ', more than chance', False: ', too near to tell apart'}[apart]
  return f'{mine:.2f} against {wanted:.2f}{of}{judged}'


def _apart(point: PointResult, metric: str) -> bool | None:
  """Tell whether a quality differs from the reference's by more than the interval, None without one."""
  interval = point.quality_gain_ci.get(metric)
  return None if interval is None else interval[0] > 0 or interval[1] < 0


def _speed(point: PointResult, base: PointResult, does: str, speed: str) -> tuple[str, str]:
  """Return whether a setting is faster, by its interval, and the sentence that has the times between its parts."""
  ratio = point.ratio
  interval = point.time('ratio_ci')
  bounds = '' if interval is None else f' [{interval[0]:.2f} … {interval[1]:.2f}]'
  text = f'{point.label} {does} {ratio:.2f}×{bounds} {speed}{_outputs(point, base)}'
  if interval is None:
    return 'open', f'{text}; timed on too little for an interval, it may be chance.'
  if interval[0] > 1:
    return 'yes', f'{text}.'
  if interval[1] <= 1:
    return 'no', f'Nothing pays: the best, {text}.'
  return 'open', f'No gain that the measurement can tell: the best, {text}.'


def _outputs(point: PointResult, base: PointResult) -> str:
  """Return what a time hides: outputs of another length than the reference's, or cut off more often."""
  mine = point.count('length')
  reference = base.count('length')
  if not (mine and reference):
    return ''
  longer = mine / reference - 1
  cut_off = point.count('cut_off')
  text = f', with outputs {abs(longer):.0%} {"longer" if longer > 0 else "shorter"}' if abs(longer) > 0.05 else ''
  return text + (f', {cut_off:.0%} of them cut off' if cut_off - base.count('cut_off') > 0.02 else '')
