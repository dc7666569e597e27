"""The cost model of speculative verification: rounds made of drafts that were observed and of times that were measured.

Axis letters: N samples, B rows, W drafted tokens of a row.
"""

from collections.abc import Mapping
import functools

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.engine import plans, verification
from speccascade.planning.cost_model import Costs

_ROUNDS = 400  # simulated rounds of a batch


def costs(profile: plans.Profile, batch: int) -> Costs:
  """Return what rounds without the companion cost at a batch size that was measured."""
  draft, _, alone, overhead = profile.steps[batch]
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


def simulate(profile: plans.Profile, batch: int, block: int | None = None, *, greedy: bool = False) -> dict:
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
  pick = np.random.default_rng(batch).integers(0, len(seen['s']), (_ROUNDS, batch))
  kept = np.cumprod(seen['accept'][:, :block], 1)[pick]  # [rounds, B, γ] the chance that all tokens so far are kept
  promised = profile.table.predict(seen['s'].reshape(-1), seen['a'].reshape(-1)).reshape(seen['s'].shape)
  gains = np.cumprod(np.where(np.arange(most + 1) < block, promised, 0), 1)[pick]
  chosen, spent = _chosen(profile, batch, block, gains, greedy)
  scored = np.arange(block) < chosen[:, :, None]
  emitted = batch + np.where(scored, kept, 0).sum((1, 2))  # the token after those scored comes out in any case
  by_block = {n: (batch + kept[:, :, :n].sum((1, 2)).mean()) / cost.round(n, n + 1) for n in range(1, block + 1)}
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


def _chosen(profile: plans.Profile, batch: int, block: int, gains: np.ndarray, greedy: bool) -> tuple:
  """Return how many tokens of each row are scored in rounds of gains [rounds, B, W], and the seconds of the rounds."""
  seconds, steps = profile.latency.at(batch, jnp.int32(batch), gains[0].size + 1)
  seconds = np.asarray(seconds, np.float64)
  (draft, companion) = np.asarray(steps, np.float64)
  beside = (block + 1) * draft + companion
  choice = np.asarray(_lengths(np.float32(gains), np.float32(seconds + beside * (not greedy)), batch, greedy))
  return choice, beside + seconds[choice.sum(1)]


@functools.partial(jax.jit, static_argnums=3)
def _lengths(gains: jax.Array, seconds: jax.Array, rows: int, greedy: bool) -> jax.Array:
  """Return the choice [rounds, B] in rounds of gains [rounds, B, W]."""
  return jax.vmap(lambda g: verification.lengths(g, seconds, jnp.asarray(rows), greedy))(gains)
