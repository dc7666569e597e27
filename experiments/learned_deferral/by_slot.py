"""An α for each token of a draft: the rule, the α that are best for whole texts, and a command that chooses them.

  python -m experiments.learned_deferral.by_slot OUT

writes OUT/greedy.json and OUT/sampled.json, with a row for each cost of a call. `same_loss_calls` are the verifier's
calls per token of `rules.opt` with the one α that has the same loss.
"""

import json
from pathlib import Path
import sys

import gin
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from experiments.learned_deferral import held_out, pairs, reading
from experiments.learned_deferral.learned import FEATURES
from speccascade import rules

COSTS = (0.1, 0.2, 0.3, 0.5, 0.8)
BLOCK = 5


@gin.register(module='by_slot')
@rules.rule(by_slot=True)
def opt_by_slot(q, p, *, alpha):
  r"""Defer as `rules.opt` does, with an α for each slot: :math:`(\alpha_0, \dots, \alpha_\gamma)`.

  A slot is a token's place in its draft. A rejection drops the rest of the draft, which is much at its first token and
  nothing at its last. A single α charges both the same. Each token follows the rule's target with the α of its slot,
  exactly. So the output depends on where drafts begin, and on γ.
  """
  return rules.opt(q, p, alpha=jnp.take(jnp.asarray(alpha), q.slot, mode='clip'))


def alphas_by_slot(gain: ArrayLike, rejection: ArrayLike, cost: float, gamma: int) -> np.ndarray:
  r"""Return the α of each slot, a token's place in its draft, that minimise loss + cost · verifier calls of a sequence.

  At every token a rule may defer: its loss is then lower by the gain, and the token is rejected with probability
  `rejection`. A rejection ends the round. The gains and rejections of the tokens of a sequence are taken as
  independent. Let r be the average loss and cost of a token, and :math:`W_i` the least expected loss and cost from slot
  i to the end of the round, less r for each token. Dynamic programming gives

  .. math:: W_i = \mathbb E \min(0, -\text{gain} - \text{rejection} \cdot W_{i+1}) - r + W_{i+1}, \qquad
            W_{\gamma+1} = 0, \qquad \text{cost} + W_0 = 0

  so the rule defers where gain > α_i · rejection, with :math:`\alpha_i = -W_{i+1}`: `opt_by_slot`.

  Args:
    gain: By how much the verifier's loss is lower [N]; for `rules.opt`, max p − max q.
    rejection: The total variation of both models' distributions, as they are sampled [N].
    cost: Of a call of the verifier, in units of the loss.
    gamma: γ.

  Returns:
    :math:`\alpha_0, \dots, \alpha_\gamma`; the last is 0.

  Example:
    >>> alphas_by_slot([0.3, 0.1], [0.5, 0.2], cost=0.5, gamma=2).round(2).tolist()
    [0.4, 0.24, 0.0]
  """
  gain = np.asarray(gain, np.float64)
  rejection = np.asarray(rejection, np.float64)
  low = -np.abs(gain).mean() - abs(cost)  # of r, whose round costs nothing more
  high = abs(cost) + np.abs(gain).mean()
  for _ in range(60):
    r = (low + high) / 2
    value = [0.0]
    for _ in range(gamma + 1):
      value.append(np.minimum(0, -gain - rejection * value[-1]).mean() - r + value[-1])
    low, high = (r, high) if cost + value[-1] > 0 else (low, r)
  return 0.0 - np.array(value[-2::-1])


def rates_by_slot(gain: ArrayLike, rejection: ArrayLike, alphas: ArrayLike) -> tuple[float, float]:
  """Return by how much deferring lowers the loss of a token, and the verifier's calls per token, of an α for each slot.

  Args:
    gain: As in `alphas_by_slot`.
    rejection: As there.
    alphas: α_0 … α_γ.

  Example:
    >>> gain, calls = rates_by_slot([0.3, 0.1], [0.5, 0.2], alphas=[0.4, 0.2, 0.0])
    >>> print(round(gain, 2), round(calls, 2))
    0.2 0.48
  """
  gain, rejection = np.broadcast_arrays(np.asarray(gain, np.float64), np.asarray(rejection, np.float64))
  defers = gain > np.asarray(alphas)[:, None] * rejection  # [γ + 1, N]
  reached = np.cumprod(np.append(1.0, 1 - (defers * rejection).mean(1)))[:-1]
  return float(reached @ (defers * gain).mean(1) / reached.sum()), float(1 / reached.sum())


def decision(tokens: reading.Tokens, greedy: bool) -> tuple[np.ndarray, np.ndarray]:
  """Return the gain of deferring as `rules.opt` sees it, and the chance of a rejection if it defers, of each token."""
  gain = held_out.plug_in_scores(tokens.features)['diff']
  differ = (tokens.first_q != tokens.first_p).astype(np.float64)
  return gain, differ if greedy else tokens.features[:, FEATURES.index('tv')].clip(0, 1)


def row(gain: np.ndarray, rejection: np.ndarray, cost: float, block: int) -> dict:
  """Return the α of a cost, and what they and the one α of the same loss come to."""
  alphas = alphas_by_slot(gain, rejection, cost, block)
  lowered, calls = rates_by_slot(gain, rejection, alphas)
  low = 0.0
  high = 1e3
  for _ in range(60):  # the larger the one α, the less it defers
    alpha = (low + high) / 2
    other, other_calls = rates_by_slot(gain, rejection, np.full(block + 1, alpha))
    low, high = (alpha, high) if other > lowered else (low, alpha)
  found = dict(cost=cost, alphas=alphas.round(4).tolist(), gain=lowered, calls=calls)
  return found | dict(same_loss_alpha=alpha, same_loss_calls=other_calls)


def choose(tokens: reading.Tokens, out: Path, *, greedy: bool, costs=COSTS, block: int = BLOCK) -> list[dict]:
  """Choose the α, print them and write them to `out`."""
  gain, rejection = decision(tokens, greedy)
  rows = [row(gain, rejection, cost, block) for cost in costs]
  for found in rows:
    alphas = ', '.join(f'{a:.3f}' for a in found['alphas'])
    calls = f'{found["calls"]:.4f} calls per token; one α of the same loss needs {found["same_loss_calls"]:.4f}'
    print(f'cost {found["cost"]:g}: α = ({alphas}), {calls}')
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(rows, indent=1) + '\n')
  return rows


def main():
  """Choose the α of both temperatures for the pair of Multi30k."""
  (out,) = map(Path, sys.argv[1:])
  models, task, _ = pairs.multi30k()
  tokens = reading.read(models, reading.references(models, task))
  for name, greedy in (('greedy', True), ('sampled', False)):
    choose(tokens, out / f'{name}.json', greedy=greedy)


if __name__ == '__main__':
  main()
