"""What a rule or a combiner reads, returns and declares.

A *rule* reads the `Prediction` of a drafter q and of a verifier p, a *combiner* a list of any number of predictions.
What a rule returns says what it is:

* bool [...] is a decision δ: where it is true, the output defers to the verifier;
* bool [..., V] is a set S of tokens that the drafter may emit;
* float [..., V] is the target π itself.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
import math
from types import MappingProxyType
from typing import Any, NamedTuple

from flax import struct
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.types import Array, Combiner, Rule

INF = math.inf
# how far a distribution may be from summing to 1, and an entry under 0
TOLERANCE = 1e-3
ROUNDING = 1e-6


class Prefix(NamedTuple):
  """The tokens before some positions of a batch."""

  tokens: Array  # [B, T]
  length: Array  # [B, …] how many of them are before each position


class Prediction:
  r"""What one model predicts at some positions. Each part is computed when it is first read, once in a program.

  Attributes:
    logits: The model's logits [..., V], with the biases of the requests, float32.
    sampler: The sampler, which makes :math:`\tilde q` of logits.
  """

  def __init__(
    self,
    logits: Array,
    sampler: sampling.Sampler = sampling.Sampler(),
    slot: Array | None = None,
    probs: Array | None = None,
    prefix: Prefix | None = None,
  ):
    self.logits = logits
    self.sampler = sampler
    self._slot = slot
    self._prefix = prefix
    if probs is not None:
      self.probs = probs

  def again(self) -> 'Prediction':
    """Return it with nothing computed but `probs`."""
    return Prediction(self.logits, self.sampler, self._slot, self.probs, self._prefix)

  @functools.cached_property
  def probs(self) -> Array:
    r"""The distribution [..., V] that is sampled from, :math:`\tilde q`: penalties, temperature and filters.

    It is one-hot at temperature 0. In a cascade of three or more models that of the verifier is what the models from it
    on would emit.
    """
    return self.sampler(self.logits)

  @functools.cached_property
  def soft(self) -> Array:
    """The distribution [..., V] before any arg max: at temperature 0 `plain` with penalties, else `probs`."""
    return self.sampler.soft(self.logits)

  @functools.cached_property
  def plain(self) -> Array:
    """The model's own distribution [..., V], at temperature 1 without filters."""
    return sampling.softmax(self.logits)

  @functools.cached_property
  def log_plain(self) -> Array:
    """The logarithm of `plain` [..., V]."""
    return sampling.log_softmax(self.logits)

  @functools.cached_property
  def confidence(self) -> Array:
    """The largest probability [...] of `plain`."""
    return sampling.confidence(self.logits)

  @functools.cached_property
  def entropy(self) -> Array:
    """The entropy [...] of `plain`, in nats."""
    return sampling.entropy(self.logits)

  @functools.cached_property
  def argmax(self) -> Array:
    """The likeliest token [...]."""
    return sampling.argmax(self.logits)

  @property
  def slot(self) -> Array:
    """The place [...] of each token in its draft, from 0."""
    if self._slot is None:
      raise ValueError('slot: what depends on the place of a token in its draft says so: @rules.rule(by_slot=True).')
    return self._slot

  @property
  def prefix(self) -> Prefix:
    """The tokens before each position, the pending ones among them; of the output alone for an encoder–decoder."""
    if self._prefix is None:
      raise ValueError('prefix: only decoding gives the tokens before a position, and to rules with by_prefix=True.')
    return self._prefix


class Position(NamedTuple):
  """What a declaration's `definition` reads of one model at one position, in numpy's float64."""

  logits: Any  # [V]
  plain: Any  # [V], as of a Prediction
  probs: Any  # [V]
  greedy: bool  # whether the temperature is 0


class Target(NamedTuple):
  """The distribution that the output follows, and all that a test needs to know of it."""

  probs: Array  # π [..., V]
  # [...] where the drafter's choice is left to another model, NaN where that is no decision; None: nowhere is it one
  deferred: Array | None = None
  normalized: bool = False  # whether π is a distribution by construction, which the loop need not check


class Range(NamedTuple):
  """The values of α, from `low` to `high`, the ends at which π is one model's distribution, and those of a curve."""

  low: float = -INF
  high: float = INF
  drafter: float | None = None
  verifier: float | None = None
  curve: Sequence[float] = ()


class CombinerFacts(NamedTuple):
  """What is said of a rule or a combiner by its decorator.

  Attributes:
    is_rule: Whether it reads two predictions, and cascades any number of models; else it combines a list of them.
    alpha: The range of `alpha`, the cost of deferring; None: any number.
    definition: The same for one position in numpy, as a function of `Position`s and `alpha`, for `speccascade.check`.
    normalized: Whether the float array that it returns is a distribution by construction.
    drafter_alone: Whether a rule reads the drafter alone, so that p may be None, as `methods.token_cascade` needs.
    by_slot: Whether it reads the place of a token in its draft, so that the output depends on where drafts begin.
    by_prefix: Whether it reads the tokens before a position, which nothing but decoding gives.
    models: How many models a combiner takes, a number or a function of its numbers; None: any.
    adds_logits: Whether a combiner adds up logits, so that a token that a model lacks needs one.
    check: A function of its numbers that raises ValueError where one is out of range, with the end of a sentence.
    labels: What reports call its curve over `alpha`, by the name of the method; without one, the text of the curve.
  """

  is_rule: bool
  alpha: Range | None = None
  definition: Callable | None = None
  normalized: bool = False
  drafter_alone: bool = False
  by_slot: bool = False
  by_prefix: bool = False
  models: int | Callable | None = None
  adds_logits: bool = False
  check: Callable | None = None
  labels: Mapping[str, str] = MappingProxyType({})


class NoTarget(ValueError):
  """What a rule or a combiner returned is no target; the text is the end of a sentence."""


def rule(function: Rule | None = None, **facts) -> Any:
  """Declare a rule: a function of the predictions q and p, and of numbers by keyword.

  Args:
    function: The function; without it a decorator is returned.
    **facts: Fields of `CombinerFacts`.

  Example:
    >>> @rules.rule(alpha=rules.Range(0, 1, drafter=1), definition=lambda q, p, alpha: q.plain.max() < 1 - alpha)
    ... def unsure(q, p, *, alpha):
    ...   return q.confidence < 1 - alpha
  """
  return declared(CombinerFacts(True, **facts), function)


def combiner(function: Combiner | None = None, **facts) -> Any:
  """Declare a combiner: a function of a list of predictions, and of numbers by keyword.

  Args:
    function: The function; without it a decorator is returned.
    **facts: Fields of `CombinerFacts`.
  """
  return declared(CombinerFacts(False, **facts), function)


def declared(facts: Any, function: Callable | None = None) -> Any:
  """Return a function with its declaration, which is read as that of rules, acceptors and signals; or a decorator."""

  def decorate(function):
    function.declaration = facts
    return function

  return decorate if function is None else decorate(function)


def inside(function: Any) -> Any:
  """Return the function that values are bound to."""
  while isinstance(function, functools.partial):  # jax.tree_util.Partial is one too
    function = function.func
  return function


def name_of(function: Callable) -> str:
  """Return the name of a rule, a combiner or another function, whether bound or not."""
  function = inside(function)
  return getattr(function, '__name__', type(function).__name__)


def declaration(function: Callable) -> CombinerFacts:
  """Return what a rule or a combiner declares; without a decorator a function of two predictions is a rule."""
  function = inside(function)
  found = getattr(function, 'declaration', None)  # a function of a user's needs no decorator
  if found is not None:
    return found
  kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
  parameters = inspect.signature(function).parameters.values()
  needed = [p for p in parameters if p.kind in kinds and p.default is p.empty]
  if len(needed) not in (1, 2):
    raise ValueError(
      f'{name_of(function)} is neither a rule, a function of two predictions (q, p), nor a combiner, one of a list of '
      f'predictions; a method is the result of a call, {name_of(function)}(…).'
    )
  return CombinerFacts(len(needed) == 2)


def numbers_of(function: Callable) -> list[str]:
  """Return the names of the numbers that a rule or a combiner takes."""
  function = inside(function)
  names = list(inspect.signature(function).parameters)
  return names[2 if declaration(function).is_rule else 1 :]


def target(
  function: Rule | Combiner,
  logits: Sequence[Array],
  sampler: sampling.Sampler = sampling.Sampler(),
  slot: Array | None = None,
  prefix: Prefix | None = None,
) -> Target:
  """Return the target of a rule or combiner with its numbers bound.

  A rule of more than two models cascades: it keeps model i, or defers to the target of the models from i + 1 on.

  Args:
    function: The rule or combiner.
    logits: The logits [..., V] of each model, or [M, ..., V].
    sampler: The sampler of all of them.
    slot: The place of each token in its draft [...], from 0.
    prefix: The tokens before each position.

  Example:
    >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
    >>> found = rules.target(functools.partial(rules.diff, alpha=0.1), logits)  # defers: 0.6 < 0.8 - 0.1
    >>> print(np.asarray(found.probs).round(2), found.deferred)
    [0.1 0.1 0.8] True
  """
  facts = declaration(function)
  before = dict(slot=slot if facts.by_slot else None, prefix=prefix if facts.by_prefix else None)
  predictions = [Prediction(x, sampler, **before) for x in logits]
  if not facts.is_rule:
    return as_target(function(predictions), predictions, facts)
  *drafters, last = predictions
  found = None
  for q in reversed(drafters):
    found = as_target(function(q, last), (q, last), facts)
    last = Prediction(q.logits, sampler, probs=found.probs, **before)
  return found


def as_target(returned: Any, predictions: Sequence[Prediction], facts: CombinerFacts) -> Target:
  """Return the target that a decision δ, a set S or a distribution π stands for."""
  if isinstance(returned, Target):
    return returned
  shape = predictions[0].logits.shape
  expected = 'return a decision bool [...], a set of tokens bool [..., V] or probabilities float32 [..., V]'
  if not hasattr(returned, 'dtype'):
    raise NoTarget(f'returns {"None" if returned is None else type(returned).__name__}; {expected}')
  if facts.is_rule and returned.dtype == bool and returned.shape == shape[:-1]:
    q, p = predictions
    return Target(jnp.where(returned[..., None], p.probs, q.probs), returned, True)
  if returned.shape != shape:
    raise NoTarget(f'returns the shape {list(returned.shape)} for logits {list(shape)}; {expected}')
  if facts.is_rule and returned.dtype == bool:
    q, p = predictions
    accepted = jnp.where(returned, q.probs, 0)
    return Target(accepted + p.probs * missing(accepted), None, True)
  if returned.dtype not in (jnp.float32, jnp.float64):
    raise NoTarget(f'returns {returned.dtype}; {expected}')
  return Target(returned, None, facts.normalized)


@struct.dataclass
class OneOf:
  """One of several rules, chosen while a program runs: methods that differ by their rule alone then share a program.

  Attributes:
    which: The number of the rule.
    choices: The rules, with their numbers bound.
  """

  which: Array
  choices: tuple[Rule, ...]

  @property
  def declaration(self) -> CombinerFacts:
    """That of any of them; what they differ in shapes no program."""
    return declaration(self.choices[0])

  @property
  def __name__(self) -> str:
    return ' or '.join(map(name_of, self.choices))

  def __call__(self, q: Prediction, p: Prediction) -> Target:
    normalized = []

    def branch(rule: Rule, *predictions: Prediction) -> Callable:
      def of():
        found = as_target(rule(*predictions), predictions, declaration(rule))
        normalized.append(found.normalized)
        deferred = jnp.nan if found.deferred is None else found.deferred.astype(jnp.float32)
        return found.probs, jnp.broadcast_to(deferred, found.probs.shape[:-1])

      return of

    # What a rule computes of a prediction beside `probs` stays in its branch.
    probs, deferred = lax.switch(self.which, [branch(rule, q.again(), p.again()) for rule in self.choices])
    return Target(probs, deferred, all(normalized))


def defined(function: Rule, q: Position, p: Position, **numbers) -> Any:
  """Return π [V] of a rule at one position by its declaration's definition, in numpy."""
  with np.errstate(divide='ignore'):  # log 0
    returned = declaration(function).definition(q, p, **numbers)
  if np.ndim(returned) == 0:
    return p.probs if returned else q.probs
  if returned.dtype != bool:
    return returned
  accepted = q.probs * returned
  return accepted + p.probs * (1 - accepted.sum())


def missing(accepted: Array) -> Array:
  """Return the mass [..., 1] that is left to give; rounding must not make it negative."""
  return jnp.maximum(1 - accepted.sum(-1, keepdims=True), 0)


def is_distribution(distribution: Array) -> Array:
  """Return whether entries [..., V] are distributions: finite, not negative, with sum 1."""
  total = distribution.sum(-1)  # NaN compares as False
  return (abs(total - 1) <= TOLERANCE) & (distribution.min(-1) >= -ROUNDING)
