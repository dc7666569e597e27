"""How often the test of samples refuses right samplers: 10 000 runs, each of up to 4 000 draws, looked at every 100.

python -m experiments.audit.false_alarms [RUNS]
"""

import itertools
import sys

import numpy as np

from experiments.audit.audit import LONG
from speccascade.check.sampler.cases import Case, cases
from speccascade.check.sampler.evidence import Bet, FALSE_ALARM

DRAWS, TOGETHER = 4000, 100


def draw(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Return a token of each row of weights."""
  total = weights.cumsum(-1)
  return (total <= rng.random(len(weights))[:, None] * total[:, -1:]).sum(-1)


def finished(case: Case, drafted, accepted, rest, rng) -> np.ndarray:
  """Return the first tokens [N, L]: what is accepted, a token of `rest`, and what follows p."""
  rest = np.where(rest.sum(-1, keepdims=True) > 0, rest, case.p[accepted])
  drawn, i = draw(rest, rng), np.arange(case.tokens)
  follow = np.stack([draw(np.tile(case.p[k], (len(drafted), 1)), rng) for k in i], 1)
  given = np.pad(drafted, [(0, 0), (0, 1)])[:, : case.tokens]
  return np.where(i < accepted[:, None], given, np.where(i == accepted[:, None], drawn[:, None], follow))


def drafts(case: Case, rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return drafted tokens [N, K], and q and p of them."""
  x = np.stack([draw(np.tile(q, (DRAWS, 1)), rng) for q in case.q], 1)
  k = np.arange(x.shape[1])
  return x, case.q[k, x], case.p[k, x]


def by_the_papers(case: Case, rng) -> np.ndarray:
  """Emit by the test of Leviathan et al. 2023."""
  x, q, p = drafts(case, rng)
  accepted = np.cumprod(rng.random(x.shape) * q < p, 1).sum(1)
  padded = np.vstack([case.q, 0 * case.q[:1]])
  return finished(case, x, accepted, np.maximum(case.p - padded, 0)[accepted], rng)


def whatever_drew_x(case: Case, rng) -> np.ndarray:
  """Accept with p(x), else emit p without x, as SGLang does."""
  x, _, p = drafts(case, rng)
  accepted = np.cumprod(rng.random(x.shape) < p, 1).sum(1)
  rejected = np.pad(x, [(0, 0), (0, 1)], constant_values=-1)[np.arange(len(x)), accepted]
  rest = np.where(np.arange(case.p.shape[1]) == rejected[:, None], 0, case.p[accepted])
  return finished(case, x, accepted, rest, rng)


def block_verification(case: Case, rng) -> np.ndarray:
  """Emit by block verification (Sun et al. 2025)."""
  x, q, p = drafts(case, rng)
  s = np.ones((len(x), 1))
  for k in range(x.shape[1]):
    s = np.hstack([s, np.minimum(1, s[:, -1] * p[:, k] / q[:, k])[:, None]])
  rest = np.maximum(s[..., None] * case.p - np.vstack([case.q, 0 * case.q[:1]]), 0)
  mass = rest[:, :-1].sum(-1)
  chance = np.hstack([mass / np.maximum(mass + 1 - s[:, :-1], 1e-12), s[:, -1:]])
  chance[:, 0] = 1
  passed = rng.random(chance.shape) < chance
  accepted = np.where(passed, np.arange(chance.shape[1]), 0).max(1)
  return finished(case, x, accepted, rest[np.arange(len(x)), accepted], rng)


def coupled(case: Case, rng) -> np.ndarray:
  """Emit the target's tokens by Gumbel noise."""
  clocks = rng.exponential(size=(DRAWS, *case.p[: case.tokens].shape))
  with np.errstate(divide='ignore'):
    return (clocks / case.p[: case.tokens]).argmin(-1)


def main():
  """Print how many runs are refused, and how large the evidence becomes."""
  runs = int(sys.argv[1]) if sys.argv[1:] else 10_000
  every = [
    *itertools.product(
      (by_the_papers, whatever_drew_x, block_verification, coupled), [*(x for x in cases() if len(x.q)), LONG]
    )
  ]
  rng = np.random.default_rng(0)
  largest = []
  for run in range(runs):
    sampler, case = every[run % len(every)]
    law = case.law.reshape(-1)
    outcomes = np.ravel_multi_index(sampler(case, rng).T, case.law.shape)
    bet, evidence = Bet(law.size), -np.inf
    for some in np.split(outcomes, DRAWS // TOGETHER):
      bet.add(some[:, None] == np.arange(law.size), law)
      evidence = max(evidence, bet.evidence)
    largest.append(evidence)
  top = np.exp(largest)
  shares = ', '.join(f'{x}: {(top >= x).mean():.4f}' for x in (10, 100, 1000))
  print(f'{(top >= 1 / FALSE_ALARM).sum()} of {runs} runs refused; evidence of {shares} of them; most {top.max():.0f}')


if __name__ == '__main__':
  main()
