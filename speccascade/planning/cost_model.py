"""The speed-up of a method by the formulas of `theory`, from its counts on some data and times of forward passes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from speccascade import stopping, theory

LEAST = 20  # tests of a place in the block that make a rate of their own
FORMULAS = {
  'speculative': theory.speedup_speculative,
  'cascade': theory.speedup_cascade,
  'token_cascade': theory.speedup_token_cascade,
  'naive_cos': theory.speedup_naive_cos,
  'ensemble_sd': theory.speedup_ensemble_sd,
}
ENSEMBLES = ('ensemble', 'naive_cos', 'cos', 'ensemble_sd')  # their speed-up is over the standard ensemble


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
  drafters are taken to be accepted alike. Acceptance is one rate, or those by place in the block. Times, of the
  drafter's call, of the verifier's window and of what a round costs beside its calls, are in units of the verifier's
  time for one token. For any other kind there is no formula: None.
  """
  if kind in ('autoregressive', 'ensemble'):
    return 1.0
  rate = acceptance if np.ndim(acceptance) == 0 else theory.ByPlace(acceptance)
  blocks = tuple(block) if isinstance(block, Sequence) else (block, 1)
  if kind == 'cos' and len(blocks) == 2:
    return float(theory.speedup_cos_steady(rate, rate, *blocks, cost_ratio, verify_cost, overhead))
  formula = FORMULAS.get(kind)
  return None if formula is None else float(formula(rate, blocks[0], cost_ratio, verify_cost, overhead))


def predict_method(
  method: Any, counts: Mapping[str, Any], forward: Sequence[Mapping], overhead: float = 0.0
) -> dict[str, float] | None:
  """Return {'ratio', 'cost_ratio', 'acceptance', 'overhead'} of a method, None where there is no formula.

  `counts` has rounds, tested_at and accepted_at as in `types.Stats`, summed over rows; `forward` has {width: seconds}
  for each of its slots, the drafter first and the verifier last, for width 1 and others; `overhead` is the seconds that
  a round costs beside its calls.
  """
  block = _block(method)
  if block is None:
    return None
  tested, accepted = counts['tested_at'], counts['accepted_at']
  if method.kind == 'token_cascade':  # whatever is drafted is kept; the question at each place was whether to draft
    tested, accepted = [counts['rounds'], *tested[:-1]], tested
  if not sum(tested):
    return None
  rates, (small, large) = by_place(tested, accepted), (by_width(forward[0]), by_width(forward[-1]))
  gamma = block[0] if isinstance(block, tuple) else block
  if method.kind == 'token_cascade':
    width = theory.tokens_per_round(theory.ByPlace(rates), gamma)
  else:
    width = window(method.kind, gamma)
  one, cost = large[1], small[1] / large[1]
  ratio = predict(method.kind, rates, cost, block, at_width(large, width) / one, overhead / one)
  acceptance = float(sum(accepted) / sum(tested))
  return dict(ratio=ratio, cost_ratio=float(cost), acceptance=acceptance, overhead=float(overhead / one))


def by_place(tested: Sequence[int], accepted: Sequence[int]) -> tuple[float, ...]:
  """Return the acceptance rate at each place in the block, one rate for the places from where tests are few."""
  tested, accepted = np.asarray(tested), np.asarray(accepted)
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


def _block(method: Any) -> int | tuple[int, ...] | None:
  """Return a method's γ, or its γ of each model; None where there is no formula for it."""
  kind = method.kind
  if kind not in (*FORMULAS, 'cos') or (method.models != 2 and len(method.slots) != 2):
    return None
  if kind == 'cos':
    return tuple(branch[-1].n for branch in method.phases[0].branches)
  if kind != 'token_cascade' and type(method.policy) is not stopping.Policy:
    return None  # how long its drafts are is not known beforehand
  return method.window - 1 if kind == 'cascade' else method.window
