"""The cost model of scheduled verification: rounds made of drafts that were observed and of times that were measured.

Axis letters: N samples, B rows, W drafted tokens of a row.
"""

from collections.abc import Mapping
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.sv import plans, verification

DRAFTS = 12800  # that are simulated, in at least `ROUNDS` rounds
ROUNDS = 64


@dataclasses.dataclass(frozen=True)
class Variant:
  """How a round chooses what is verified: as `methods.sv_exact` does, or `methods.sv`, which drafts a token less.

  `predictor` is the name of its signal.
  """

  predictor: str = 'companion'
  exact: bool = True
  greedy: bool = False
  counts: str = 'tokens'


def windows(samples: Mapping[str, np.ndarray], block: int) -> dict[str, np.ndarray]:
  """Return each sample [N, W] of what a draft from each position would show, its tokens being those of the text.

  The W-th token is tested in the end whatever was scored; a text's last positions begin no window. `text` [N] is the
  number of a window's text.
  """
  request = samples['request']
  starts = np.flatnonzero(request[:-block] == request[block:])
  if not starts.size:
    raise ValueError(f'no text of the plan is longer than γ = {block}: plan with more tokens, or with a smaller γ.')
  at = starts[:, None] + np.arange(block + 1)[None]
  return {name: x[at] for name, x in samples.items()} | {'text': request[starts]}


def visits(accept: np.ndarray, ends: np.ndarray, block: int) -> np.ndarray:
  """Return how many rounds of speculative decoding are expected to begin at each window [N].

  Every observed text is decoded once, from its beginning. So rounds begin behind rejections, which are where a text is
  hard, more often than elsewhere. `accept` [N, W] are the chances of a window's tokens, `ends` [N] those of `ends_of`.
  """
  accepted = np.cumprod(np.pad(accept[:, :block], ((0, 0), (1, 1)), constant_values=(1, 0)), 1)
  chances = accepted[:, :-1] - accepted[:, 1:]  # of 1, 2, … γ + 1 tokens
  begun = np.zeros(len(accept))
  begun[[0, *np.unique(ends)[:-1]]] = 1
  for i, end in enumerate(ends):
    after = min(block + 1, end - 1 - i)  # beyond its end a text has no window
    begun[i + 1 : i + 1 + after] += begun[i] * chances[i, :after]
  return begun


def ends_of(text: np.ndarray) -> np.ndarray:
  """Return for each window [N] the first window behind its text; the windows of a text follow each other."""
  last = np.flatnonzero(np.append(np.diff(text) != 0, True))
  return np.repeat(last + 1, np.diff(last, prepend=-1))


def predicted(profile: plans.Profile, name: str) -> np.ndarray:
  """Return the chances of acceptance [N] that a signal of a name predicts for the samples of a profile."""
  if name == 'companion':
    return profile.table.predict(profile.samples['s'], profile.samples['a'])
  return profile.fits[name].predict(profile.samples[name])


def simulate(profile: plans.Profile, batch: int, block: int | None = None, variant: Variant = Variant()) -> dict:
  """Return `sv`, the tokens a second of a schedule at a batch size.

  The rows begin evenly apart among the rounds of all observed texts, and go through one text after another. `verified`
  is how many tokens of a row are scored on average, `wasted` the share of those scored from which no token comes.
  """
  most = profile.origin.block
  block = block or most
  seen = windows(profile.samples | {'promised': predicted(profile, variant.predictor)}, most)
  gains = np.cumprod(np.where(np.arange(most + 1) < block, seen['promised'], 0), 1)
  seconds, steps = profile.latency.at(batch, jnp.int32(batch), batch * (most + 1) + 1)
  seconds = np.asarray(seconds, np.float64)
  draft, companion, rest = np.asarray(steps, np.float64)
  others = (block + variant.exact) * draft + rest + companion * (variant.predictor == 'companion')
  decides = np.float32(seconds + others * (not variant.greedy))
  certain = verification.certain(variant.counts, batch)
  ends = ends_of(seen['text'])
  begun = np.cumsum(visits(seen['accept'], ends, block))
  start = np.searchsorted(begun, (np.arange(batch) + 0.5) / batch * begun[-1])
  scored, emitted = _walk(np.float32(gains), np.float32(seen['accept']), ends, start, decides, certain, variant.greedy)
  scored = np.asarray(scored)
  emitted = np.float64(emitted).sum()
  return dict(
    sv=emitted / (others + seconds[scored]).sum(),
    verified=scored.mean() / batch,
    wasted=1 - emitted / (scored + batch).sum(),
  )


@functools.partial(jax.jit, static_argnums=(5, 6))
def _walk(gains, accept, ends, start, seconds, certain: int, greedy: bool) -> tuple[jax.Array, jax.Array]:
  """Return the scored tokens of rounds [rounds], and the tokens that are expected to come out of each [rounds].

  Args:
    gains: [N, W] of the window at each position.
    accept: [N, W] the chance that each of its tokens is accepted.
    ends: [N] the first window of the text after a window's own.
    start: [B] the window at which each row begins.
    seconds: By which the choice is made, of a round that scores 0, 1, … tokens.
    certain: As in `verification.best_total`.
    greedy: Likewise.
  """
  count, width = gains.shape
  batch = len(start)

  def turn(at, key):
    chosen = verification.lengths(gains[at], seconds, certain, greedy)
    scored = jnp.arange(width)[None] < chosen[:, None]
    emitted = batch + jnp.where(scored, jnp.cumprod(accept[at], 1), 0).sum()  # the token after those in any case
    accepted = jnp.cumprod((jax.random.uniform(key, (batch, width)) < accept[at]) & scored, 1).sum(1)
    return jnp.minimum(at + 1 + accepted, ends[at]) % count, (chosen.sum(), emitted)

  keys = jax.random.split(jax.random.key(batch), max(ROUNDS, DRAFTS // batch))
  return jax.lax.scan(turn, start, keys)[1]
