"""What speculative decoding and speculative verification gain over plain decoding, by the cost model of a plan."""

from collections.abc import Mapping

import numpy as np

from speccascade.planning.cost_model import Costs
from speccascade.planning.sv_model import ends_of, simulate, Variant, visits, windows
from speccascade.sv import plans

VARIANTS = {
  'SV, all tokens': Variant(exact=False, greedy=True),
  'SV, accepted tokens': Variant(exact=False, greedy=True, counts='accepted'),
  'SV exact': Variant(),
}


def costs(profile: plans.Profile, batch: int) -> Costs:
  """Return what rounds without the companion cost at a batch size that was measured."""
  draft, _, alone, overhead = profile.steps[batch]
  if profile.rounds:
    windows = {block + 1: seconds - block * draft for block, seconds in profile.rounds[batch].items()}
    return Costs(draft, {**windows, 1: alone})
  windows = {size // batch: seconds for size, seconds in profile.times[batch].items()}
  return Costs(draft, {**windows, 1: alone}, overhead)


def tokens_a_round(samples: Mapping[str, np.ndarray], most: int, block: int) -> float:
  """Return the tokens that a round of speculative decoding is expected to give one row, in windows of γ = `most`."""
  seen = windows(samples, most)
  begun = visits(seen['accept'], ends_of(seen['text']), block)
  return float(begun @ (1 + np.cumprod(seen['accept'][:, :block], 1).sum(1)) / begun.sum())


def plain(profile: plans.Profile, batch: int) -> float:
  """Return the tokens a second of the verifier alone."""
  return batch / costs(profile, batch).token


def speculative(profile: plans.Profile, batch: int, block: int) -> float:
  """Return the tokens a second of speculative decoding with this γ."""
  tokens = batch * tokens_a_round(profile.samples, profile.origin.block, block)
  return tokens / costs(profile, batch).round(block, block + 1)


def speedup(profile: plans.Profile, batch: int, name: str, block: int) -> float:
  """Return the simulated speed over plain decoding of one of `VARIANTS`, or of 'speculative, γ = N'."""
  if name.startswith('speculative'):
    return speculative(profile, batch, int(name.split()[-1])) / plain(profile, batch)
  result = simulate(profile, batch, block, VARIANTS[name])
  return result['sv'] / plain(profile, batch)


def slack(batch: int, result: Mapping[str, float], bar: float) -> float:
  """Return by how much longer a companion may read until the speed of `simulate`'s result is `bar`, tokens a second."""
  emitted = batch * (1 - result['wasted']) * (1 + result['verified'])
  return emitted / bar - emitted / result['sv']


def break_even(profile: plans.Profile, batch: int, over_plain: float, *args, **kwargs) -> float:
  """Return the seconds that a companion may read for this speed over plain decoding; 0 if it may not read at all.

  The other arguments are those of `simulate`. What is verified changes with what the companion costs, so the cost is
  raised from nothing until the speeds are equal.
  """
  companion = 0.0
  for _ in range(8):
    result = simulate(with_companion(profile, batch, companion), batch, *args, **kwargs)
    more = slack(batch, result, over_plain * plain(profile, batch))
    if more <= 1e-3 * companion:
      break
    companion += more
  return companion


def with_companion(profile: plans.Profile, batch: int, seconds: float) -> plans.Profile:
  """Return a profile of one batch size whose companion reads a draft in so many seconds."""
  draft, _, alone, overhead = profile.steps[batch]
  steps = {batch: (draft, seconds, alone, overhead)}
  times = {batch: profile.times[batch]}
  rounds = profile.rounds and {batch: profile.rounds[batch]}
  return plans.Profile.of(profile.table, profile.origin, profile.samples, times, steps, rounds)
