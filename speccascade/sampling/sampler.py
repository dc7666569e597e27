"""The sampler: penalties, temperature and filters, the same for every model of a run.

Temperature 0 is the one-hot distribution of the arg max, and `Sampler` is the only place that knows it.
"""

from collections.abc import Callable
import dataclasses
import json
import numbers
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends.base import Backend
from speccascade.backends.ops import take1
from speccascade.sampling.distributions import one_hot_max, softmax
from speccascade.types import Array, Model

PLAIN = Backend()


def keep_top_k(logits: Array, k: Array, backend: Backend = PLAIN) -> Array:
  """Mask all but the k largest logits; ties with the k-th stay."""
  logits = jnp.where(logits == 0, 0, logits.astype(jnp.float32))  # -0 is a tie with 0
  bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
  bits = jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)  # negative numbers order in reverse
  least = backend.threshold(bits, k, -(2**31), 2**31 - 1, mass=False)
  return jnp.where(bits >= least, logits, -jnp.inf)


def keep_top_p(logits: Array, top_p: Array, backend: Backend = PLAIN) -> Array:
  """Mask every token whose strictly likelier ones already have `top_p` of the mass; ties stay together."""
  bits = jax.lax.bitcast_convert_type(softmax(logits), jnp.int32)  # which order as the numbers do
  least = backend.threshold(bits, top_p, -1, int(np.float32(1).view(np.int32)) + 1, mass=True)
  return jnp.where((bits >= least) | (jnp.asarray(top_p) >= 1), logits, -jnp.inf)


def keep_min_p(logits: Array, min_p: Array) -> Array:
  """Mask every token less likely than `min_p` times the likeliest."""
  far = jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny))
  return jnp.where(logits - logits.max(-1, keepdims=True) >= far, logits, -jnp.inf)


def number(value: Any) -> Any:
  """Return a concrete array without axes as a number; anything else as it is."""
  concrete = isinstance(value, (np.generic, np.ndarray, jax.Array)) and not isinstance(value, jax.core.Tracer)
  return value.item() if concrete and np.ndim(value) == 0 and value.dtype.kind in 'iufV' else value


NEUTRAL = dict(
  temperature=1.0,
  top_k=2.0**24,
  top_p=1.0,
  min_p=0.0,
  repetition_penalty=1.0,
  presence_penalty=0.0,
  frequency_penalty=0.0,
)
COUPLINGS = ('maximal', 'gumbel')
# What else transformers' generation may do, each with the value that does nothing.
_NOT_OURS = dict(
  num_beams=1, typical_p=1.0, no_repeat_ngram_size=0, epsilon_cutoff=0.0, eta_cutoff=0.0, penalty_alpha=0.0
)
LARGEST = 1e30  # of a number; float32 holds it, also over the lowest temperature
_LEAST = 1 / LARGEST
_VALID = {
  'temperature': (lambda x: x == 0 or 1e-4 <= x <= LARGEST, f'a number 0 (greedy) or of 0.0001 … {LARGEST:g}'),
  'top_k': (
    lambda x: 1 <= x <= LARGEST and float(x).is_integer(),
    f'a whole number of 1 … {LARGEST:g}; leave it out for no filter',
  ),
  'top_p': (lambda x: _LEAST <= x <= 1, f'a number over 0, of {_LEAST:g} … 1'),
  'min_p': (lambda x: 0 <= x < 1, 'a number of at least 0 and under 1'),
  'repetition_penalty': (lambda x: _LEAST <= x <= LARGEST, f'a number over 0, of {_LEAST:g} … {LARGEST:g}'),
  'presence_penalty': (lambda x: abs(x) <= LARGEST, f'a number of -{LARGEST:g} … {LARGEST:g}'),
  'frequency_penalty': (lambda x: abs(x) <= LARGEST, f'a number of -{LARGEST:g} … {LARGEST:g}'),
}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampler:
  """Turn logits into the distribution that is sampled from: penalties → temperature → top-k → top-p → min-p.

  One sampler serves all models of a run. Its numbers are traced, so changing them compiles nothing; which of them are
  given at all, and whether the temperature is 0, is part of the program. In the loop a number is an array [B], one for
  each row.

  Attributes:
    temperature: 0 is greedy.
    top_k: How many of the largest logits remain; ties with the last remain, too.
    top_p: A token remains if the likelier ones have less than this probability together.
    repetition_penalty: Over 1, makes tokens of the sequence less likely: divides their logits, or multiplies negative
      ones.
    min_p: The least probability that remains, relative to the largest.
    presence_penalty: Subtracted from the logits of tokens that were emitted.
    frequency_penalty: Subtracted from them for each occurrence.
    coupling: How the drafted token and the target's belong together. `'maximal'` accepts as many as can be; the text
      depends on what drafts. With `'gumbel'` both are drawn by the same noise, fewer are accepted, and the text is one
      of the prompt, the seed and the target alone.
    seen: [..., V] the tokens before each position, bound by the loop.
    counts: [..., V] how often each was emitted, bound by the loop.
    mixed: Whether the program serves temperature 0 and others; the loop sets it where rows differ.
    backend: What computes the filters, set by the loop.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  repetition_penalty: float | None = None
  min_p: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  seen: Array | None = None  # [..., V] of bool
  counts: Array | None = None  # [..., V]
  mixed: bool = False
  coupling: str = 'maximal'
  backend: Backend = PLAIN

  def __post_init__(self):
    if self.coupling not in COUPLINGS:
      raise ValueError(f"Sampler: coupling={self.coupling!r} is neither 'maximal' nor 'gumbel'.")
    for name, (valid, expected) in _VALID.items():
      value = number(getattr(self, name))
      real = isinstance(value, numbers.Real) and not isinstance(value, bool)
      array = hasattr(value, 'dtype') and not np.iscomplexobj(value)  # by row, or traced
      left_out = value is None and name != 'temperature'
      if not (valid(value) if real else array or left_out):
        raise ValueError(f'Sampler: {name}={value!r} is not {expected}.')
      if real:
        object.__setattr__(self, name, float(value))

  @classmethod
  def of(cls, model: Model) -> 'Sampler':
    """Return what a checkpoint's generation_config.json asks for; without `do_sample` that is greedy."""
    if model.generation is None:
      raise ValueError(f'{model.name} has no generation_config.json: give numbers, as in Sampler(temperature=0.7).')
    config = json.loads(model.generation)
    others = [f'{n}={config[n]}' for n, neutral in _NOT_OURS.items() if config.get(n) not in (None, neutral)]
    if others:
      warnings.warn(f'{model.name}: its generation_config.json also has {", ".join(others)}, left out.', stacklevel=2)
    given = {n: config[n] for n in NEUTRAL if config.get(n) is not None and (n, config[n]) != ('top_k', 0)}
    try:
      return cls(**given | ({} if config.get('do_sample') else {'temperature': 0.0}))
    except ValueError as error:
      raise ValueError(f'{model.name}: its generation_config.json does not do: {error}') from None

  @property
  def greedy(self) -> bool:
    return _is_number(self.temperature, 0)

  @property
  def penalises(self) -> bool:
    """Whether the tokens so far matter."""
    return self.repeats or self.counting

  @property
  def repeats(self) -> bool:
    return self.given('repetition_penalty')

  @property
  def counting(self) -> bool:
    return self.given('presence_penalty') or self.given('frequency_penalty')

  def given(self, name: str) -> bool:
    value = getattr(self, name)
    return not (value is None or _is_number(value, NEUTRAL[name]))

  def tree_flatten(self):
    values = [traced(getattr(self, name)) if self.given(name) else None for name in NEUTRAL if name != 'temperature']
    temperature = None if self.greedy else traced(self.temperature)
    return (temperature, *values, self.seen, self.counts), (self.greedy, self.mixed, self.coupling, self.backend)

  @classmethod
  def tree_unflatten(cls, static, values):
    greedy, mixed, coupling, backend = static
    *numbers_, seen, counts = values
    fixed = dict(mixed=mixed, coupling=coupling, backend=backend)
    given = dict(zip(NEUTRAL, numbers_, strict=True), seen=seen, counts=counts, **fixed)
    made = object.__new__(cls)  # the numbers were checked when they were given
    for name, value in (given | ({'temperature': 0.0} if greedy else {})).items():
      object.__setattr__(made, name, value)
    return made

  def bind(self, seen: Array | None, counts: Array | None = None) -> 'Sampler':
    """Return the sampler for positions after the tokens `seen` [..., V]."""
    return dataclasses.replace(self, seen=seen, counts=counts)

  def at(self, slot: Array) -> 'Sampler':
    """Return a sampler that is bound to a window, at one slot [B] of each row."""
    sampler = self.by_number(lambda x: x[:, 0])
    if not self.penalises:
      return sampler

    def some(x):
      return None if x is None else take1(x, slot)

    return sampler.bind(some(self.seen), some(self.counts))

  def by_number(self, change: Callable) -> 'Sampler':
    """Return the sampler with each number that is an array changed."""
    arrays = {n: getattr(self, n) for n in NEUTRAL}
    changed = {n: change(x) for n, x in arrays.items() if np.ndim(x) and isinstance(x, (jax.Array, np.ndarray))}
    return dataclasses.replace(self, **changed)

  def penalised(self, logits: Array) -> Array:
    """Apply the penalties: seen tokens' logits move towards -∞ by a factor, emitted tokens' by amounts."""
    logits = logits.astype(jnp.float32)
    if self.repeats and self.seen is not None:
      penalty = _broadcast(self.repetition_penalty, logits)
      factor = jnp.where(logits > 0, 1 / penalty, penalty)
      logits = jnp.where(self.seen, logits * factor, logits)
    if self.counting and self.counts is not None:
      for name, times in (('presence_penalty', self.counts > 0), ('frequency_penalty', self.counts)):
        if self.given(name):
          logits = logits - _broadcast(getattr(self, name), logits) * times.astype(jnp.float32)
    return logits

  def by_temperature(self, greedy: Callable[[], Array], sampled: Callable[[], Array], axes: int = 0) -> Array:
    """Return what is computed at temperature 0, or above it, or either by row; `axes` follow those of positions."""
    if self.greedy or not self.mixed:
      return greedy() if self.greedy else sampled()
    x = sampled()
    zero = self.temperature == 0
    return jnp.where(zero.reshape((1,) * (x.ndim - axes - zero.ndim) + zero.shape + (1,) * axes), greedy(), x)

  def __call__(self, logits: Array) -> Array:
    """Return the sampled distribution of logits [..., V]."""
    logits = self.penalised(logits)
    return self.by_temperature(lambda: one_hot_max(logits), lambda: self._warm(logits), 1)

  def _warm(self, logits: Array) -> Array:
    temperature = _broadcast(self.temperature, logits)
    logits = logits / (jnp.where(temperature == 0, 1, temperature) if self.mixed else temperature)
    for name, keep in (('top_k', keep_top_k), ('top_p', keep_top_p)):
      if self.given(name):
        logits = keep(logits, _broadcast(getattr(self, name), logits), self.backend)
    return softmax(keep_min_p(logits, _broadcast(self.min_p, logits)) if self.given('min_p') else logits)

  def soft(self, logits: Array, sampled: Array | None = None) -> Array:
    """Return the distribution before any arg max: at temperature 0 the unscaled one, else `sampled`."""
    return self.by_temperature(
      lambda: softmax(self.penalised(logits)), lambda: self(logits) if sampled is None else sampled, 1
    )

  def harden(self, probs: Array) -> Array:
    """Finish a combination of probabilities: at temperature 0 its arg max, else itself."""
    return self.by_temperature(lambda: one_hot_max(probs), lambda: probs, 1)


def _broadcast(value: Any, x: Array) -> Any:
  """Return a number, or numbers by row [B] or [B, 1], with as many axes as x [..., V], to broadcast against it."""
  if not np.ndim(value):
    return value
  return value.reshape((1,) * (x.ndim - 1 - value.ndim) + value.shape + (1,))


def _is_number(value: Any, number: float) -> bool:
  return isinstance(value, numbers.Real) and value == number


def traced(value: Any) -> Any:
  """Return a number as float32, so that 1 and 1.0 and .7 are one program; anything else as it is."""
  value = number(value)
  return np.float32(value) if isinstance(value, numbers.Real) else value
