"""The one cost model: a round costs its calls, each as it was measured, and an overhead.

Plans, reports and the studies of speculative verification predict with it by the formulas of `theory`; the floor of a
compiled program is the same sum, of bytes.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from speccascade import stopping, theory

LEAST = 20  # tests of a position in the block that make a rate of their own
FORMULAS = {
  'speculative': theory.speedup_speculative,
  'cascade': theory.speedup_cascade,
  'token_cascade': theory.speedup_token_cascade,
  'naive_cos': theory.speedup_naive_cos,
  'ensemble_sd': theory.speedup_ensemble_sd,
}
ENSEMBLES = ('ensemble', 'naive_cos', 'cos', 'ensemble_sd')  # their speed-up is over the standard ensemble


def calls_cost(method: Any, cost: Callable[[int], float]) -> float:
  """Return what the calls of a round cost, the dearest where models take turns; a call of a slot costs `cost(slot)`."""
  return max(sum(count * cost(slot) for slot, count in calls.items()) for calls in method.calls())


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds at one batch size.

  Attributes:
    draft: a call of the drafter.
    verify: {tokens of each row: a call of the verifier}; those of one token are in it.
    overhead: a round, apart from its calls.
    start: a batch, once: its prefill and the host's work.
    start_alone: the same where the verifier decodes alone.
  """

  draft: float
  verify: Mapping[int, float]
  overhead: float = 0.0
  start: float = 0.0
  start_alone: float = 0.0

  @property
  def token(self) -> float:
    """A token of the verifier alone."""
    return self.verify[1]

  @property
  def ratio(self) -> float:
    """A call of the drafter over one of the verifier."""
    return self.draft / self.token

  def window(self, width: float) -> float:
    """Return the seconds of a call of the verifier with so many tokens of each row."""
    return at_width(self.verify, width)

  def round(self, drafts: float, width: float) -> float:
    """Return the seconds of a round of so many calls of the drafter and one of the verifier."""
    return drafts * self.draft + self.window(width) + self.overhead


def speedup(
  kind: str, acceptance: Sequence[float], block: int | Sequence[int], costs: Costs, lengths: Sequence[int] = ()
) -> float | None:
  """Return the predicted speed-up of a kind of method at these costs, None where there is no formula.

  It is that of long texts or, over the verifier alone, of texts of the given lengths: what starts a batch counts, and
  so does the end of a text, which cuts its last round short.
  """
  gamma = block[0] if isinstance(block, Sequence) else block
  width = costs.window(window(kind, gamma)) / costs.token
  steady = predict(kind, acceptance, costs.ratio, block, width, costs.overhead / costs.token)
  if not len(lengths) or kind not in ('speculative', 'cascade'):
    return steady
  lengths, counts = np.unique(lengths, return_counts=True)
  spent = costs.round(gamma + (kind == 'cascade'), gamma + 1)
  alone = costs.start_alone + lengths * (costs.token + costs.overhead)
  sped = costs.start + rounds(acceptance, gamma, lengths[-1])[lengths] * spent
  return float((counts * alone).sum() / (counts * sped).sum())


def speedup_of_texts(costs: Costs, seconds: float, lengths: Sequence[int]) -> float:
  """Return the speed-up over the verifier alone of texts whose tokens take so long, with what starts a batch."""
  alone = costs.start_alone + np.asarray(lengths) * (costs.token + costs.overhead)
  return float(alone.sum() / (costs.start + np.asarray(lengths) * seconds).sum())


def mean_rate(acceptance: Sequence[float], block: int) -> float:
  """Return the share of the tested tokens of drafts of γ tokens that is accepted."""
  accepted = theory.ByPosition(acceptance).all_accepted(np.arange(block + 1))
  return float(accepted[1:].sum() / accepted[:-1].sum())


def rounds(acceptance: Sequence[float], block: int, longest: int) -> np.ndarray:
  """Return how many rounds texts of 0, 1, … `longest` tokens are expected to take: [longest + 1]."""
  accepted = theory.ByPosition(acceptance).all_accepted(np.arange(block + 1))
  chances = accepted - np.append(accepted[1:], 0)  # that a round gives 1, 2, … block + 1 tokens
  expected = np.zeros(longest + 1)
  for n in range(1, longest + 1):
    before = np.maximum(n - 1 - np.arange(block + 1), 0)
    expected[n] = 1 + chances @ expected[before]
  return expected


def predict(
  kind: str,
  acceptance: float | Sequence[float],
  cost_ratio: float,
  block: int | Sequence[int],
  verify_cost: float = 1.0,
  overhead: float = 0.0,
) -> float | None:
  """Return the predicted speed-up of a kind of method: over the verifier, or for ensembles over the standard one.

  Kinds are those of `Method`: for autoregressive and ensemble it is 1; for token_cascade acceptance is the share of
  tokens not deferred and `block` its `max_draft`; for cos `block` is (γ_q, γ_p), or γ_q for (γ_q, 1), and its two
  drafters are taken to be accepted alike. Acceptance is one rate, or those by position in the block. Times, of the
  drafter's call, of the verifier's window and of what a round costs apart from its calls, are in units of the
  verifier's time for one token. For any other kind there is no formula: None.
  """
  if kind in ('autoregressive', 'ensemble'):
    return 1.0
  rate = acceptance if np.ndim(acceptance) == 0 else theory.ByPosition(acceptance)
  blocks = tuple(block) if isinstance(block, Sequence) else (block, 1)
  if kind == 'cos' and len(blocks) == 2:
    return float(theory.speedup_cos_steady(rate, rate, *blocks, cost_ratio, verify_cost, overhead))
  formula = FORMULAS.get(kind)
  return None if formula is None else float(formula(rate, blocks[0], cost_ratio, verify_cost, overhead))


def predict_method(method: Any, counts: Mapping[str, Any], costs: Costs) -> dict[str, float] | None:
  """Return {'ratio', 'cost_ratio', 'acceptance', 'overhead'} of a method, None where there is no formula.

  `counts` has rounds, tested_at and accepted_at as in `engine.stats.Stats`, summed over rows.
  """
  if not _has_formula(method) or not sum(counts['tested_at']):
    return None
  tested = counts['tested_at']
  accepted = counts['accepted_at']
  acceptance = float(sum(accepted) / sum(tested))
  if method.kind == 'token_cascade':
    # Every drafted token is accepted; the question at each position was whether to draft.
    rates = by_position([counts['rounds'], *tested[:-1]], tested)
    width = theory.tokens_per_round(theory.ByPosition(rates), method.block)
    ratio = predict(
      method.kind, rates, costs.ratio, method.block, costs.window(width) / costs.token, costs.overhead / costs.token
    )
  else:
    ratio = speedup(method.kind, by_position(tested, accepted), method.block, costs)
  return dict(ratio=ratio, cost_ratio=costs.ratio, acceptance=acceptance, overhead=costs.overhead / costs.token)


def _has_formula(method: Any) -> bool:
  """Tell whether there is a formula of two models whose drafts are as long as the method says."""
  if method.kind not in (*FORMULAS, 'cos') or (method.models != 2 and len(method.slots) != 2):
    return False
  return method.kind in ('token_cascade', 'cos') or type(method.policy) is stopping.Policy


def by_position(tested: Sequence[int], accepted: Sequence[int]) -> tuple[float, ...]:
  """Return the acceptance rate at each position in the block, one rate for the positions from where tests are few."""
  tested = np.asarray(tested)
  accepted = np.asarray(accepted)
  few = tested < LEAST
  first = int(np.argmax(few)) if few.any() else tested.size
  rates = list(accepted[:first] / tested[:first])
  if tested[first:].sum():
    rates.append(accepted[first:].sum() / tested[first:].sum())
  if not rates:
    raise ValueError('No drafted token was tested; give more prompts, or longer outputs.')
  return tuple(map(float, rates))


def window(kind: str, gamma: int) -> int:
  """Return how many tokens the verifier is fed at once: γ drafted ones and the one before them."""
  return gamma if kind == 'naive_cos' else gamma + 1


def at_width(forward: Mapping[int, float], width: float) -> float:
  """Return the time of a window, between measured widths on the line between them, beyond them that of the widest."""
  return float(np.interp(width, sorted(forward), [forward[w] for w in sorted(forward)]))


def by_width(forward: Mapping) -> dict[int, float]:
  """Return {width: seconds} with numbers for keys, which JSON has as text."""
  return {int(w): float(s) for w, s in forward.items()}
