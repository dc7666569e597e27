r"""Losses under teacher forcing: cross-entropy with the data, and distances from a teacher's distributions.

Each loss is a mean over the tokens of the targets, without padding and without the prompt of a decoder-only model.

The distance `log_acceptance` trains a drafter for the target π of a rule:

.. math:: -\log \sum_v \min(\tilde q(v), \pi(v))

π depends on the drafter, and the gradient is that of the sum as it is: it goes through both arguments of the minimum.
A rule's decision δ, or its set S of tokens, is a step, whose derivative is 0. So the drafter learns to be accepted
where the rule defers, and nothing where it does not; it is not paid for being so sure of itself that the rule stops
deferring.

Axis letters: B batch, S source, L target, M logits of a row, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

from speccascade import rules
from speccascade.backends.ops import take
from speccascade.sampling import Sampler
from speccascade.train.batches import Batch
from speccascade.train.forcing import Drafting, forced, logits_of
from speccascade.types import Array, Model, Network, Params, Rule

# name -> distance of the teacher's log-probabilities p from the student's q, [..., V] -> [...]
DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
  'forward_kl': lambda p, q: (jnp.exp(p) * (p - q)).sum(-1),
  'reverse_kl': lambda p, q: (jnp.exp(q) * (q - p)).sum(-1),
  'tv': lambda p, q: jnp.abs(jnp.exp(p) - jnp.exp(q)).sum(-1) / 2,  # 1 minus the acceptance of speculative decoding
  'log_acceptance': lambda p, q: -jnp.log(accepted(jnp.exp(q), jnp.exp(p))),
}


def accepted(q: Array, pi: Array) -> Array:
  """Return the acceptance rate Σ_v min(q̃(v), π(v)) of a drafter's tokens, [..., V] -> [...], above 0."""
  return jnp.maximum(jnp.minimum(q, pi).sum(-1), jnp.finfo(jnp.float32).tiny)


def companion_gap(q: Array, c: Array, p: Array) -> Array:
  r"""Return by how much a companion is wrong about which drafted tokens the verifier accepts.

  .. math:: \sum_v \bigl|\min(\tilde q(v), \tilde c(v)) - \min(\tilde q(v), \tilde p(v))\bigr|

  Speculative verification predicts from :math:`A = \min(1, \tilde c(x) / \tilde q(x))` whether a drafted token x is
  accepted, which has the probability :math:`\min(1, \tilde p(x) / \tilde q(x))`: this is the mean of the error over x
  drawn from q̃. It is at least the difference of :math:`S = \sum_v \min(\tilde q, \tilde c)` from the acceptance rate.

  Args:
    q: The drafter's probabilities [..., V].
    c: The companion's.
    p: The verifier's.

  Returns:
    [...].
  """
  return jnp.abs(jnp.minimum(q, c) - jnp.minimum(q, p)).sum(-1)


@dataclasses.dataclass(frozen=True, repr=False)
class Distillation:
  """Token-level distillation: `weight` × distance(teacher, student) + (1 − weight) × cross-entropy.

  Attributes:
    distance: 'forward_kl', 'reverse_kl', 'tv' or 'log_acceptance'.
    weight: Of the distance, in 0 … 1.
    rule: The rule whose acceptance rate is logged and which the distance 'log_acceptance' trains for, with its numbers
      bound, as in functools.partial(rules.opt, alpha=0.1), or its text, as 'opt:0.1'; of its two models the student
      is the drafter.
    companion: The weight of `companion_gap`, for a drafter that is used with the companion that the job names.
  """

  distance: str = 'forward_kl'
  weight: float = 1.0
  rule: Rule | str = rules.speculative
  companion: float = 0.0

  def __post_init__(self):
    if self.distance not in DISTANCES:
      raise ValueError(f'distance={self.distance!r}: choose from {", ".join(DISTANCES)}')
    if not 0 <= self.weight <= 1:
      raise ValueError(f'weight={self.weight} must lie in 0…1')
    if not self.companion >= 0:
      raise ValueError(f'companion={self.companion} must be a weight of at least 0')
    if isinstance(self.rule, str):
      object.__setattr__(self, 'rule', rules.find(self.rule))
    rules.bind_rule(self.rule)  # raises for what is no rule

  def __repr__(self):
    """Return the settings with the rule by name: runs are identified by this text, in which a function has none."""
    bound = rules.bind(self.rule).keywords  # trees, as weights are; JSON has one sequence, be it a tuple or an array
    numbers = json.loads(json.dumps(bound, sort_keys=True, default=lambda x: np.asarray(x).tolist()))
    names = (field.name for field in dataclasses.fields(self) if field.name != 'rule')
    settings = ', '.join(f'{name}={getattr(self, name)!r}' for name in names)
    return f'Distillation({settings}, rule={rules.name_of(self.rule)}, {numbers})'


def loss(
  network: Network,
  params: Params,
  batch: Batch,
  teacher: Model | None = None,
  distillation: Distillation | None = None,
  companion: Model | None = None,
  drafting: Drafting | None = None,
  drafted: tuple[int, ...] | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Return the loss of a batch.

  Args:
    network: The network to train.
    params: Its parameters.
    batch: Token lists [B, S] and [B, L].
    teacher: Model to distil; without one the loss is the cross-entropy.
    distillation: How to distil; forward KL by default.
    companion: The companion of speculative verification, for its gap.
    drafting: How a drafter of several tokens is trained.
    drafted: The ids [D] of the tokens that a head scores, of others it has no logit; the cross-entropy is of texts'
      tokens among them. The teacher's chances are those over all tokens.

  Returns:
    The loss, and its parts by name: cross-entropy, accuracy and, with a teacher, the distance and the acceptance; with
    a companion, its gap and the acceptance rate that it predicts.
  """
  said = forced(network, params, batch, teacher, drafting)
  labels = jnp.take_along_axis(jnp.asarray(batch.target), said.at, axis=1)
  among = said
  if drafted is not None:
    write = np.full(network.vocab_size, -1)
    write[np.array(drafted)] = np.arange(len(drafted))
    labels = jnp.asarray(write, jnp.int32)[labels]
    among = said.replace(weight=jnp.where(labels < 0, 0.0, said.weight))
  parts = {
    'cross_entropy': among.mean(optax.softmax_cross_entropy_with_integer_labels(said.logits, jnp.maximum(labels, 0))),
    'accuracy': said.mean((said.logits.argmax(-1) == labels).astype(jnp.float32)),
  }
  if teacher is None:
    return parts['cross_entropy'], parts
  taught = logits_of(teacher.network, teacher.params, batch) if said.taught is None else said.taught
  others = [taught] if companion is None else [taught, logits_of(companion.network, companion.params, batch)]
  d = distillation or Distillation()
  if drafted is None:
    fixed = [jax.lax.stop_gradient(take(x, said.at)) for x in others]
    found = _distilled(d, said.logits, *fixed)
  else:
    p = jax.lax.stop_gradient(take(jax.nn.log_softmax(taught)[..., np.array(drafted)], said.at))
    found = _compared(d, p, jax.nn.log_softmax(said.logits), jnp.exp(p))
  parts |= {name: said.mean(x) for name, x in found.items()}
  value = d.weight * parts[d.distance] + (1 - d.weight) * parts['cross_entropy']
  if said.apart is not None:
    parts['features'] = said.mean(said.apart)
    value = value + drafting.features * parts['features']
  return value + d.companion * parts.get('companion_gap', 0.0), parts


def _compared(d: Distillation, p: Array, log_q: Array, pi: Array) -> dict[str, Array]:
  """Return the distance of q from p, both logarithms, and how often a rule's target π accepts its tokens."""
  rate = accepted(jnp.exp(log_q), pi)
  distance = -jnp.log(rate) if d.distance == 'log_acceptance' else DISTANCES[d.distance](p, log_q)
  return {d.distance: distance, 'acceptance': rate}


def _distilled(d: Distillation, logits: Array, *others: Array) -> dict[str, Array]:
  """Return [B, L] what is logged of the student's logits next to the teacher's and, where given, the companion's."""
  vocab = min(x.shape[-1] for x in (logits, *others))  # logits beyond the shared vocabulary are padding
  logits, teacher, *companion = (x[..., :vocab] for x in (logits, *others))
  p = jax.nn.log_softmax(teacher)
  log_q = jax.nn.log_softmax(logits)
  q = jnp.exp(log_q)
  parts = _compared(d, p, log_q, rules.target(d.rule, (logits, teacher), Sampler()).probs)
  for c in (jax.nn.softmax(x) for x in companion):
    parts |= {'predicted': accepted(q, c), 'companion_gap': companion_gap(q, c, jnp.exp(p))}
  return parts
