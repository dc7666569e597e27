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

DRAFTS = 12800  # that are simulated, in at least `ROUNDS` rounds
ROUNDS = 64


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

  The W-th token is tested in the end whatever was scored; a text's last positions begin no window. `text` [N] is the
  number of a window's text.
  """
  request = samples['request']
  starts = np.flatnonzero(request[:-block] == request[block:])
  at = starts[:, None] + np.arange(block + 1)[None]
  seen = {name: samples[name][at] for name in ('s', 'a', 'accept')} | {'text': request[starts]}
  if not starts.size:
    raise ValueError(f'no text of the plan is longer than γ = {block}: plan with more tokens, or with a smaller γ.')
  return seen


def tokens_a_round(samples: Mapping[str, np.ndarray], most: int, block: int) -> float:
  """Return the tokens that a round of speculative decoding is expected to give one row.

  The observed texts are decoded from their beginnings, so a round begins behind a rejection more often than elsewhere.
  Where drafts are accepted in some parts of a text and not in others, that gives fewer tokens than rounds that begin
  anywhere. Positions are those that begin a window of γ = `most`.
  """
  seen = windows(samples, most)
  accepted = np.cumprod(np.pad(seen['accept'][:, :block], ((0, 0), (1, 0)), constant_values=1), 1)
  chances = accepted - np.pad(accepted[:, 1:], ((0, 0), (0, 1)))  # of 1, 2, … γ + 1 tokens
  rounds, tokens = 0.0, 0.0
  for text in np.unique(seen['text']):
    mine = np.flatnonzero(seen['text'] == text)
    begins = np.zeros(mine.size + block + 1)  # how many rounds begin at each window, on average
    begins[0] = 1
    for i, window in enumerate(mine):
      begins[i + 1 : i + block + 2] += begins[i] * chances[window]
    rounds += begins[: mine.size].sum()
    tokens += begins[: mine.size] @ accepted[mine].sum(1)
  return tokens / rounds


def speculative(profile: plans.Profile, batch: int, block: int) -> float:
  """Return the tokens a second of speculative decoding with this γ."""
  tokens = batch * tokens_a_round(profile.samples, profile.origin.block, block)
  return tokens / costs(profile, batch).round(block, block + 1)


def simulate(profile: plans.Profile, batch: int, block: int | None = None, variant: Variant = Variant()) -> dict:
  """Return tokens a second of plain decoding and of speculative verification, `plain` and `sv`, at a batch size.

  Every row goes through observed texts, one after another. `verified` is how many tokens of a row are scored on
  average, `wasted` the share of those scored from which no token comes.
  """
  most = profile.origin.block
  block = block or most
  seen = windows(profile.samples, most)
  promised = profile.table.predict(seen['s'].reshape(-1), seen['a'].reshape(-1)).reshape(seen['s'].shape)
  gains = np.cumprod(np.where(np.arange(most + 1) < block, promised, 0), 1)
  seconds, steps = profile.latency.at(batch, jnp.int32(batch), batch * (most + 1) + 1)
  seconds = np.asarray(seconds, np.float64)
  draft, companion = np.asarray(steps, np.float64)
  others = (block + variant.exact) * draft + companion
  decides = np.float32(seconds + others * (not variant.greedy))
  certain = verification.certain(variant.counts, batch)
  begins = np.flatnonzero(np.diff(seen['text'], prepend=-1))
  walked = np.float32(gains), np.float32(seen['accept']), np.int32(seen['text']), begins, decides
  scored, emitted = _walk(*walked, batch, certain, variant.greedy)
  scored = np.asarray(scored)
  emitted = np.float64(emitted).sum()
  return dict(
    plain=batch / costs(profile, batch).token,
    sv=emitted / (others + seconds[scored]).sum(),
    verified=scored.mean() / batch,
    wasted=1 - emitted / (scored + batch).sum(),
  )


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _walk(gains, accept, text, begins, seconds, batch: int, certain: int, greedy: bool) -> tuple[jax.Array, jax.Array]:
  """Return the scored tokens of rounds [rounds], and the tokens that are expected to come out of each [rounds].

  Args:
    gains: [N, W] of the window at each position.
    accept: [N, W] the chance that each of its tokens is accepted.
    text: [N] which text a window is of.
    begins: [T] the first window of each text.
    seconds: by which the choice is made, of a round that scores 0, 1, … tokens.
    batch: the number of rows.
    certain: as in `verification.best_total`.
    greedy: likewise.
  """
  width = gains.shape[1]

  def turn(at, key):
    draws, next_text = jax.random.split(key)
    chosen = verification.lengths(gains[at], seconds, certain, greedy)
    scored = jnp.arange(width)[None] < chosen[:, None]
    emitted = batch + jnp.where(scored, jnp.cumprod(accept[at], 1), 0).sum()  # the token after those in any case
    accepted = jnp.cumprod((jax.random.uniform(draws, (batch, width)) < accept[at]) & scored, 1).sum(1)
    after = at + 1 + accepted
    goes_on = (after < len(text)) & (text[jnp.minimum(after, len(text) - 1)] == text[at])
    return jnp.where(goes_on, after, jax.random.choice(next_text, begins, (batch,))), (chosen.sum(), emitted)

  keys = jax.random.split(jax.random.key(batch), 1 + max(ROUNDS, DRAFTS // batch))
  start = jax.random.randint(keys[0], (batch,), 0, len(text))
  return jax.lax.scan(turn, start, keys[1:])[1]


def speedup(profile: plans.Profile, batch: int, name: str, block: int) -> float:
  """Return the simulated speed over plain decoding of one of `VARIANTS`, or of 'speculative, γ = N'."""
  if name.startswith('speculative'):
    return speculative(profile, batch, int(name.split()[-1])) * costs(profile, batch).token / batch
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
