"""When a middle model pays: calls and speed-ups of three models and more, as functions of acceptance rates.

Times are in units of one token of the large model; `docs/methods/three_models.md` derives the formulas.

Example:
  >>> print(middle_break_even(0.7, 0.8, c=0.1).round(2))
  0.45
  >>> print(calls_cos((0.7, 0.8, 0.9), (3, 1, 1)).round(2))
  [1.12 0.37 0.36]
  >>> chains = best_nested([[0, 0.9, 0.6], [0, 0, 0.8], [0, 0, 0]], costs=(0.01, 0.1, 1.0))
  >>> {models: blocks for models, (_, blocks) in chains.items()}
  {(0, 1, 2): (6, 2), (1, 2): (6,), (0, 2): (7,)}
"""

from collections.abc import Iterator, Sequence
import itertools

import numpy as np

from speccascade import theory


def speedup_chain(alpha, gamma, costs: Sequence, overhead=0.0):
  r"""Return the speed-up over the last of n models of a cascade of all of them for which model 0 drafts.

  .. math:: \frac{1 - \alpha^\gamma}{(1 - \alpha)(\gamma c_0 + c_1 + \dots + c_{n-1})}

  It is that of `methods.naive_cos` with a rule. With two models and γ + 1 for γ it is `theory.speedup_cascade`.

  Args:
    alpha: The acceptance rate of model 0's tokens for the target of the cascade, or the rates by position.
    gamma: γ.
    costs: The time of a call of each model; the last one's is that of its call for a block.
    overhead: The time of a round on top of its calls.
  """
  time = gamma * costs[0] + sum(costs[1:])
  return theory.tokens_per_round_without_bonus(alpha, gamma) * (1 + overhead) / (time + overhead)


def middle_break_even(alpha_pair, alpha_chain, c: float, v: float = 1.0, most: int = 64) -> float:
  r"""Return the time of a call of a middle model at which the cascade of three models is as fast as that of two.

  .. math:: \max_\gamma \Bigl(T\,\frac{1 - \alpha_3^\gamma}{1 - \alpha_3} - \gamma c - v\Bigr), \qquad
            T = \min_\gamma \frac{(1 - \alpha_2)(\gamma c + v)}{1 - \alpha_2^\gamma}

  Both have their best block of 1 … `most`. A middle model whose call takes longer slows the cascade down; a number
  under 0 means that any does.

  Args:
    alpha_pair: :math:`\alpha_2`, the acceptance rate of the drafter for the target of drafter and verifier.
    alpha_chain: :math:`\alpha_3`, that for the target of all three models.
    c: The time of a call of the drafter.
    v: The time of the verifier's call for a block.
    most: The largest γ.
  """
  gammas = np.arange(1, most + 1)
  round_ = gammas * c + v
  per_token = (round_ / theory.tokens_per_round_without_bonus(alpha_pair, gammas)).min()
  return (per_token * theory.tokens_per_round_without_bonus(alpha_chain, gammas) - round_).max()


def calls_cos(alphas: Sequence[float], blocks: Sequence[int]) -> np.ndarray:
  """Return the calls of each of n models of `methods.cos` per token, in the long run.

  The turns are a Markov chain, since a turn depends on whose tokens are pending and on what each model has read. These
  are the calls of its stationary distribution, over its tokens.

  Args:
    alphas: The acceptance rate of each model's tokens for the combination.
    blocks: γ of each model.

  Returns:
    [n].
  """
  alphas = np.asarray(alphas, float)
  states = [((-1,) * alphas.size, ())]
  outcomes = []
  for state in states:  # which grows as new states are reached
    outcomes.append(list(_turn(*state, alphas, blocks)))
    states += dict.fromkeys(after for _, after, _, _ in outcomes[-1] if after not in states)
  index = {state: i for i, state in enumerate(states)}
  equations = -np.eye(len(states) + 1, len(states))
  totals = np.zeros((len(states), 1 + alphas.size))
  for i, some in enumerate(outcomes):
    for chance, after, tokens, calls in some:
      equations[index[after], i] += chance
      totals[i] += chance * np.append(tokens, calls)
  equations[-1] = 1
  stationary = np.linalg.lstsq(equations, np.append(np.zeros(len(states)), 1.0), rcond=None)[0]
  tokens, *calls = stationary @ totals
  return np.array(calls) / tokens


def _turn(read: tuple[int, ...], pending: tuple[int, ...], alphas: np.ndarray, blocks: np.ndarray) -> Iterator[tuple]:
  """Yield (chance, state after it, tokens, calls [n]) of every outcome of a turn of `methods.cos`.

  A state has how many tokens beyond the committed ones each model has read, -1 where the last committed one is missing,
  and the model that proposed each pending token.
  """
  model = int(np.argmin(read))
  read = np.array(read)
  calls = np.zeros(len(read))
  calls[model] = 1
  read[model] = len(pending)
  tested = min(len(pending), read.min() + 1)
  rates = alphas[list(pending[:tested])]
  for accepted, rate in enumerate(rates):
    if rate < 1:
      yield rates[:accepted].prod() * (1 - rate), ((-1,) * len(read), ()), accepted + 1, calls
  if rates.prod() == 0:
    return
  read -= tested
  pending = pending[tested:]
  if read[model] == len(pending):  # it knows the next distribution, so the first of its tokens takes no call
    pending += (model,) * int(blocks[model])
    read[model] += blocks[model] - 1
    calls = calls + (blocks[model] - 1) * (np.arange(len(read)) == model)
  yield rates.prod(), (tuple(read.tolist()), pending), tested, calls


def speedup_nested(alphas: Sequence, blocks: Sequence, costs: Sequence, overhead=0.0):
  r"""Return the speed-up over the last of n models of speculative decoding in which each model drafts for the next.

  Model 0 drafts :math:`\gamma_1` tokens a round of model 1. A draft for model i + 1 is :math:`\gamma_{i+1}` rounds of
  model i, each of its accepted tokens and one more. With :math:`D_i(s) = G_{i-1}(s)^{\gamma_i}` for the generating
  function of the tokens of a draft,

  .. math::

     G_0(s) = s, \qquad
     G_i(s) = s\,\frac{1 - \alpha_i + \alpha_i (1 - s)\,D_i(\alpha_i s)}{1 - \alpha_i s}, \qquad
     E_i = \frac{1 - \alpha_i D_i(\alpha_i)}{1 - \alpha_i}, \qquad T_i = \gamma_i T_{i-1} + c_i

  are the tokens and the time of a round of model i, and the speed-up is :math:`E_{n-1} / T_{n-1}`. Whether a model
  accepts a token is taken to be independent of whether the model before it did. With two models it is
  `theory.speedup_speculative`. `decode` has no such method.

  Args:
    alphas: The n - 1 acceptance rates of each model's tokens for the next model's distribution.
    blocks: :math:`\gamma_1 \dots \gamma_{n-1}`.
    costs: The time of a call of each of the n models; the last one's is that of its call for a block.
    overhead: The time of a round of the last model on top of its calls.
  """
  time, *others = costs
  tokens = 1.0
  made = lambda s: s
  for alpha, gamma, cost in zip(alphas, blocks, others, strict=True):
    draft = lambda s, before=made, n=gamma: before(s) ** n
    certain = np.asarray(alpha) >= 1 - 1e-6  # all of the draft is accepted, and one token more comes out: the limit
    below = np.where(certain, 0, alpha)
    tokens = np.where(certain, 1 + gamma * tokens, (1 - below * draft(below)) / (1 - below))
    made = lambda s, a=alpha, d=draft: s * (1 - a + a * (1 - s) * d(a * s)) / (1 - a * s)
    time = gamma * time + cost
  return (tokens * (1 + overhead) / (time + overhead))[()]


def best_nested(acceptance, costs: Sequence[float], most: int = 16) -> dict[tuple[int, ...], tuple]:
  """Return the best speed-up and blocks of each chain of some of the models before the last (`speedup_nested`).

  A middle model pays if the longest chain is the fastest.

  Args:
    acceptance: [n, n] at [i, j], i < j, the acceptance rate of model i's tokens for model j's distribution.
    costs: The time of a call of each model; the last one's is that of its call for a block.
    most: The largest block.

  Returns:
    {numbers of models: (speed-up, blocks)}, the fastest first.
  """
  last = len(costs) - 1
  found = {}
  for drafters in itertools.chain.from_iterable(itertools.combinations(range(last), n) for n in range(1, last + 1)):
    models = (*drafters, last)
    blocks = np.meshgrid(*[np.arange(1, most + 1)] * len(drafters), indexing='ij')
    rates = [acceptance[i][j] for i, j in itertools.pairwise(models)]
    speedups = speedup_nested(rates, blocks, [costs[m] for m in models])
    best = np.unravel_index(np.argmax(speedups), speedups.shape)
    found[models] = float(speedups[best]), tuple(int(i) + 1 for i in best)
  return dict(sorted(found.items(), key=lambda item: -item[1][0]))
