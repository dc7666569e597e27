"""The cost model of speculative verification: rounds made of drafts that were observed and of times that were measured.

Axis letters: N samples, B rows, W drafted tokens of a row.
"""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.engine import plans, verification
from speccascade.planning.cost_model import Costs

ROUNDS = 400  # simulated rounds of a batch


@dataclasses.dataclass(frozen=True)
class Variant:
  """How a round chooses what is verified: as `methods.sv_exact` does, or `methods.sv`, which drafts a token less."""

  exact: bool = True
  greedy: bool = False
  counts: str = 'tokens'


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


def windows(samples: Mapping[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
  """Return {s, a, accept} [N, W] of what a draft from each position would show, its tokens being those of the text.

  The W-th token is tested in the end whatever was scored; a text's last positions begin no window.
  """
  request = samples['request']
  starts = np.flatnonzero(request[:-block] == request[block:])
  at = starts[:, None] + np.arange(block + 1)[None]
  return {name: samples[name][at] for name in ('s', 'a', 'accept')}


def simulate(
  profile: plans.Profile, batch: int, block: int | None = None, variant: Variant = Variant(), rounds: int = ROUNDS
) -> dict:
  """Return tokens a second of plain, speculative and speculative verification at a batch size.

  `speculative` has the best γ up to `block`, `fixed` this γ; `verified` is how many tokens of a row are scored on
  average, `wasted` the share of those scored from which no token comes.
  """
  most = profile.origin.block
  block = block or most
  seen = windows(profile.samples, most)
  cost = costs(profile, batch)
  if not len(seen['s']):
    raise ValueError(f'no text of the plan is longer than γ = {most}: plan with more tokens, or with a smaller γ.')
  pick = np.random.default_rng(batch).integers(0, len(seen['s']), (rounds, batch))
  accepted = np.cumprod(seen['accept'][:, :block], 1)[pick]  # [rounds, B, γ] the chance that all so far are accepted
  promised = profile.table.predict(seen['s'].reshape(-1), seen['a'].reshape(-1)).reshape(seen['s'].shape)
  gains = np.cumprod(np.where(np.arange(most + 1) < block, promised, 0), 1)[pick]
  chosen, spent = _chosen(profile, batch, block, gains, variant)
  scored = np.arange(block) < chosen[:, :, None]
  emitted = batch + np.where(scored, accepted, 0).sum((1, 2))  # the token after those scored comes out in any case
  by_block = {n: (batch + accepted[:, :, :n].sum((1, 2)).mean()) / cost.round(n, n + 1) for n in range(1, block + 1)}
  best = max(by_block, key=by_block.get)
  return dict(
    plain=batch / cost.token,
    speculative=by_block[best],
    block=best,
    fixed=by_block[block],
    sv=emitted.sum() / spent.sum(),
    verified=chosen.mean(),
    wasted=1 - emitted.sum() / (chosen + 1).sum(),
  )


def speedup(profile: plans.Profile, batch: int, name: str, block: int) -> float:
  """Return the simulated speed over plain decoding of one of `VARIANTS`, or of 'speculative, γ = N'."""
  if name.startswith('speculative'):
    result = simulate(profile, batch, int(name.split()[-1]))
    return result['fixed'] / result['plain']
  result = simulate(profile, batch, block, VARIANTS[name])
  return result['sv'] / result['plain']


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
    more = slack(batch, result, over_plain * result['plain'])
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


def _chosen(profile: plans.Profile, batch: int, block: int, gains: np.ndarray, variant: Variant) -> tuple:
  """Return how many tokens of each row are scored in rounds of gains [rounds, B, W], and the seconds of the rounds."""
  seconds, steps = profile.latency.at(batch, jnp.int32(batch), gains[0].size + 1)
  seconds = np.asarray(seconds, np.float64)
  (draft, companion) = np.asarray(steps, np.float64)
  others = (block + variant.exact) * draft + companion
  decides = np.float32(seconds + others * (not variant.greedy))
  certain = verification.certain(variant.counts, batch)
  choice = np.asarray(_lengths(np.float32(gains), decides, certain, variant.greedy))
  return choice, others + seconds[choice.sum(1)]


@functools.partial(jax.jit, static_argnums=3)
def _lengths(gains: jax.Array, seconds: jax.Array, certain: int, greedy: bool) -> jax.Array:
  """Return the choice [rounds, B] in rounds of gains [rounds, B, W]."""
  return jax.vmap(lambda g: verification.lengths(g, seconds, certain, greedy))(gains)
