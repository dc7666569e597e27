"""The speed-up of a method from acceptance and the times of forward passes.

Times are in units of the verifier's time for one token, c_p(1) = 1: the drafter's is the cost ratio c, the verifier's
for the window that it scores at once is the verify cost, c_p(γ + 1). The formulas of `theory` are the case of verify
cost 1. Acceptance is one rate, or the rates by place in the block, each given that all before were accepted: drafts go
astray the further they go, and one rate for all places then promises too much of a long block.
"""

from collections.abc import Mapping, Sequence
import functools
import math
from typing import Any

import numpy as np

from speccascade import stopping, theory

LEAST = 20  # tests of a place in the block that make a rate of their own
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

  Kinds are names of methods ('speculative[opt]' too): autoregressive; speculative; cascade, which drafts γ + 1 tokens;
  token_cascade, where acceptance is the share of tokens not deferred and `block` its `max_draft`; ensemble, naive_cos,
  ensemble_sd and cos, whose `block` is (γ_q, γ_p), or γ_q for (γ_q, 1), and whose two drafters are taken to be accepted
  alike. `overhead` is what a round costs beside its calls. For any other kind there is no formula: None.
  """
  c, v = _positive('cost_ratio', cost_ratio), _positive('verify_cost', verify_cost)
  kind, gammas = _kind(kind), tuple(block) if isinstance(block, Sequence) else (block, 1)
  standard = 1 + c if kind in ENSEMBLES else 1.0
  if kind in ('autoregressive', 'ensemble'):
    return 1.0
  gamma, tokens = gammas[0], functools.partial(_tokens, acceptance)
  match kind:
    case 'speculative':
      gain, time = tokens(gamma + 1), c * gamma + v
    case 'cascade':
      gain, time = tokens(gamma + 1), c * (gamma + 1) + v
    case 'token_cascade':  # the drafter runs once more for a token that it then defers
      gain, time = tokens(gamma + 1), c * tokens(gamma) + v
    case 'naive_cos':
      gain, time = tokens(gamma), c * gamma + v
    case 'ensemble_sd':  # the drafter scores the block anew, its window as dear beside its token as the verifier's
      gain, time = tokens(gamma + 1), c * gamma + (1 + c) * v
    case 'cos' if len(gammas) == 2:  # theory.speedup_cos_steady, which tells the terms
      whole, whole_p = (tokens(g + 1) - tokens(g) for g in gammas)
      gain, time = tokens(gamma) + whole * tokens(gammas[1]), c * gamma + v
      time += whole * (gammas[1] - 1 + c * (1 - whole_p))
    case _:
      return None
  return float(gain * standard / (time + overhead))


def predict_method(method: Any, counts: Mapping[str, Any], forward: Sequence[Mapping]) -> dict[str, float] | None:
  """Return {'ratio', 'cost_ratio', 'acceptance'} of a method from its counts on some data, None without a formula.

  `counts` has rounds, tested_at and accepted_at as in `types.Stats`, summed over rows; `forward` has {width: seconds}
  for the drafter first and the verifier last, for width 1 and others.
  """
  block = _block(method)
  if block is None:
    return None
  kind, tested, accepted = _kind(method.name), counts['tested_at'], counts['accepted_at']
  if kind == 'token_cascade':  # whatever is drafted is kept; the question at each place was whether to draft
    tested, accepted = [counts['rounds'], *tested[:-1]], tested
  if not sum(tested):
    return None
  rates, (small, large) = by_place(tested, accepted), (by_width(forward[0]), by_width(forward[-1]))
  gamma = block[0] if isinstance(block, tuple) else block
  width = _tokens(rates, gamma + 1) if kind == 'token_cascade' else window(kind, gamma)
  cost = small[1] / large[1]
  ratio = predict(kind, rates, cost, block, at_width(large, width) / large[1])
  return dict(ratio=ratio, cost_ratio=float(cost), acceptance=float(sum(accepted) / sum(tested)))


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


def _kind(name: str) -> str:
  """Return the formula's name of a method's name."""
  base, _, rule = name.partition('[')
  return 'cascade' if base == 'speculative' and rule not in ('', 'speculative]') else base


def _block(method: Any) -> int | tuple[int, ...] | None:
  """Return a method's γ, or its γ of each model; None where there is no formula for it."""
  kind = _kind(method.name)
  if kind not in ('speculative', 'cascade', 'token_cascade', 'naive_cos', 'ensemble_sd', 'cos') or method.models != 2:
    return None
  if kind == 'cos':
    return tuple(branch[-1].n for branch in method.phases[0].branches)
  if kind != 'token_cascade' and type(method.policy) is not stopping.Policy:
    return None  # how long its drafts are is not known beforehand
  return method.window - 1 if kind == 'cascade' else method.window


def _tokens(acceptance: float | Sequence[float], n: int) -> float:
  """Return the expected tokens of a round that n places can give: Σ_{i<n} of the chance to keep the first i."""
  if np.ndim(acceptance) == 0:
    return float(theory.tokens_per_round_without_bonus(acceptance, n))
  rates = np.asarray(acceptance, np.float64)
  if not rates.size or not ((rates >= 0) & (rates <= 1)).all():
    raise ValueError(f'acceptance={acceptance} is not a list of rates between 0 and 1.')
  rates = np.append(rates, np.full(max(n - rates.size, 0), rates[-1]))[: n - 1]
  return float(1 + np.cumprod(rates).sum())


def _positive(name: str, value: float) -> float:
  if not (value > 0 and math.isfinite(value)):
    raise ValueError(f'{name}={value} is not a ratio of times; give a time over that of one token of the verifier.')
  return float(value)
