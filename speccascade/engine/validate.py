"""Methods, rules, processors and networks of a user, checked before anything is compiled."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

import jax
from jax import tree_util
import jax.numpy as jnp

from speccascade import rules, sampling
from speccascade.engine.limits import Every, Limit
from speccascade.engine.method import Method, Strategy
from speccascade.engine.phases import Score, Verify
from speccascade.host.errors import first_line, line_of
from speccascade.host.memo import memo
from speccascade.types import Combiner, Model, NEGATIVE, Prompt

# of the logits that a rule is asked with
ROWS = 2
POSITIONS = 3


def check_method(method: Any, models: int):
  """Refuse what is no method, and a number of models that it does not decode with."""
  if not isinstance(method, Strategy):
    name = getattr(rules.inside(method), '__name__', None)
    call = f'; call it, as in methods.{name}(…)' if callable(method) and name else ''
    raise ValueError(f'{name or repr(method)} is not a method{call or "; give one of speccascade.methods"}.')
  for choice in method.of_batches.values():
    if choice is not method:
      check_method(choice, models)
    elif not method.whole_texts and (problem := _unknown(method)):
      raise ValueError(f'{method.name}: {problem}.')
  if models < method.models or (models > method.models and not method.extra_models):
    example = method.about.choose
    which = f' Say which, as in {example}.' if example and models > method.models else ''
    which = which or ' Give the drafter first, then the verifier.' * (models == 1)
    count = 'one model' if method.models == 1 else f'{method.models} models'
    given = 'one was' if models == 1 else f'{models} were'
    raise ValueError(f'{method.name} decodes with {count}, but {given} given.{which}')


def check_sampler(sampler: Any):
  """Refuse what is no sampler."""
  if not isinstance(sampler, sampling.Sampler):
    raise ValueError(
      f'sampler={sampler!r} is not a speccascade.Sampler, as in sampler=speccascade.Sampler(temperature=1.0).'
    )


def _unknown(method: Method) -> str | None:
  """Return what keeps phases from committing tokens, as a sentence."""
  phases = method.all_phases
  if plain := [leaf for leaf in jax.tree.leaves(method) if callable(leaf)]:
    name = rules.name_of(plain[0])
    return f'{name} is a plain function, which no program takes as an argument; give rules.bind({name})'
  for phase in phases:
    limit = phase.limit if isinstance(phase, Score) else Every()
    if not isinstance(limit, Limit):
      return f'limit={rules.name_of(limit)} is no limit; it is a subclass of speccascade.engine.limits.Limit'
    if limit.policy is not None and type(limit.policy) is not type(method.policy):
      return f'{phase} reads what {type(limit.policy).__name__} keeps; give the method policy=limit.policy'
    named = {*(() if phase.feeds is None else (phase.feeds,)), *(phase.reads or ()), *phase.tests}
    if out := sorted(s for s in named if not 0 <= s < len(method.slots)):
      return f'{phase} names slot {out[0]}, and slots={method.slots} has 0 … {len(method.slots) - 1}'
  if not any(phase.tests for phase in phases):
    return 'none of its phases is a Verify, so that no token is ever committed; end the round in one'
  fed = {phase.feeds for phase in phases}
  for phase in phases:
    if missing := [slot for slot in phase.tests if slot not in fed]:
      return f'{phase} waits for slot {missing[0]}, which no Score or Propose feeds'
  return None


def check_targets(method: Strategy, vocab: int, sampler: Any):
  """Refuse a method whose rule or combiner JAX cannot trace, or whose result has not the shape of distributions."""
  checked = memo(jax.tree.structure((method, sampler)), vocab)  # numbers that are traced change nothing
  if checked:
    return
  for name, function, models in _asked(method):
    problem = untraced(function, models, vocab, sampler)
    if problem:
      raise ValueError(f'{method.name}: {name} {problem}.')
  checked['sound'] = True


def _asked(method: Strategy) -> Iterator[tuple[str, Combiner, int]]:
  """Yield the combiners of a method, each with its name and its number of models."""
  for phase in method.all_phases:
    if isinstance(phase, Verify):
      yield rules.name_of(phase.combiner), phase.combiner, len(phase.models)
  if (rule := method.policy.asks()) is not None:
    yield rules.name_of(rule), tree_util.Partial(_alone, rule=rule), 1


@rules.combiner
def _alone(models, *, rule):
  """Ask a rule as a token cascade does, without the verifier."""
  return jnp.where(rule(models[0], None)[..., None], models[0].logits, 0)


def untraced(combiner: Combiner, models: int, vocab: int, sampler: Any) -> str | None:
  """Return what keeps a combiner of so many models from giving distributions, as the end of a sentence, or None."""
  shape = (ROWS, POSITIONS, vocab)
  logits = jax.ShapeDtypeStruct((models, *shape), jnp.float32)
  if sampler.penalises:
    sampler = dataclasses.replace(sampler, seen=jax.ShapeDtypeStruct(shape, jnp.bool_))
  slot = jax.ShapeDtypeStruct((1, POSITIONS), jnp.int32)
  prefix = rules.Prefix(*(jax.ShapeDtypeStruct((ROWS, POSITIONS), jnp.int32) for _ in range(2)))
  return _traced(lambda *args: rules.target(*args).probs, combiner, logits, sampler, slot, prefix)[1]


def _traced(function: Callable, *args) -> tuple[Any, str | None]:
  """Return what a function of a user's gives, as shapes, or what keeps JAX from tracing it."""
  try:
    return jax.eval_shape(function, *args), None
  except jax.errors.ConcretizationTypeError as error:
    message = f'cannot be traced{line_of(error)}: it asks in Python for a value of the device; use jnp.where'
  except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError) as error:
    message = f'cannot be traced{line_of(error)}: it gives a value of the device to numpy or Python; use jax.numpy'
  except rules.NoTarget as error:
    message = str(error)
  except Exception as error:  # whatever a function of a user's raises
    message = f'fails{line_of(error)}: {first_line(error, named=True)}'
  return None, message


def bind_processor(processor: Callable | None) -> tree_util.Partial | None:
  """Return a logits processor as a pytree: what `functools.partial` binds to it are arguments of the program."""
  if processor is None or isinstance(processor, tree_util.Partial):
    return processor
  if isinstance(processor, type) or not callable(processor):
    raise ValueError(f'processor={processor!r} is not a function of logits [V], tokens [T] and how many tokens.')
  given = processor if isinstance(processor, functools.partial) else functools.partial(processor)
  for value in jax.tree.leaves((given.args, given.keywords)):
    if isinstance(value, (str, bool, complex)):
      raise ValueError(
        f'processor {rules.name_of(processor)} is bound to {value!r}: only numbers and arrays can be bound; write '
        'anything else into the function.'
      )
  return tree_util.Partial(given.func, *given.args, **given.keywords)


def check_processor(processor: Callable | None, vocab: int, positions: int) -> tree_util.Partial | None:
  """Return a logits processor as a pytree on the device, having refused one that does not give logits [V]."""
  bound = bind_processor(processor)
  if bound is None:
    return None
  logits = jax.ShapeDtypeStruct((vocab,), jnp.float32)
  tokens = jax.ShapeDtypeStruct((positions,), jnp.int32)
  count = jax.ShapeDtypeStruct((), jnp.int32)
  result, problem = _traced(lambda f, *args: f(*args), bound, logits, tokens, count)
  many = not isinstance(result, jax.ShapeDtypeStruct)
  if problem is None and (many or result.shape != (vocab,) or not jnp.issubdtype(result.dtype, jnp.floating)):
    message = type(result).__name__ if many else f'{result.dtype}{list(result.shape)}'
    problem = f'returns {message}, not logits float32[{vocab}]'
  if problem:
    raise ValueError(f'processor {rules.name_of(processor)} {problem}.')
  return jax.tree.map(jnp.array, bound)


def check_network(model: Model):
  """Refuse a network of a user's that lacks what decoding calls, or whose logits or cache have not the shapes of it."""
  network = model.network
  name = type(model.network).__name__
  if type(network).__module__.startswith('speccascade.'):
    return
  try:
    checked = memo(network)
    if checked:
      return
    traced = {
      rows: jax.eval_shape(lambda params, rows=rows: _read(network, params, rows), model.params)
      for rows in (ROWS, 2 * ROWS)
    }
  except Exception as error:  # whatever a user's network raises
    raise ValueError(f'{name} cannot decode{line_of(error)}: {first_line(error, named=True)}.') from error
  before, logits, after = traced[ROWS]
  if logits.shape != (ROWS, POSITIONS, network.vocab_size):
    raise ValueError(
      f'{name}.extend returns logits {list(logits.shape)}, not [B, L, V] = {[ROWS, POSITIONS, network.vocab_size]}.'
    )
  if before != after:
    raise ValueError(f'{name}.extend returns a cache of other shapes than it was given; write into that.')
  if any(y.shape[:1] != (2 * x.shape[0],) for x, y in zip(*map(jax.tree.leaves, (before, traced[2 * ROWS][0])))):
    raise ValueError(f'{name}.prefill returns a cache that has not the sequences of the batch on axis 0.')
  checked['sound'] = True


def _read(network: Any, params: Any, rows: int) -> tuple:
  """Return a cache of prompts, and the logits and the cache after more tokens."""
  prompt = Prompt(jnp.zeros((rows, POSITIONS), jnp.int32), jnp.full(rows, POSITIONS))
  cache = network.prefill(params, prompt, 4 * POSITIONS)
  positions = jnp.broadcast_to(POSITIONS + jnp.arange(POSITIONS)[None], (rows, POSITIONS))
  logits, after = network.extend(params, cache, jnp.zeros((rows, POSITIONS), jnp.int32), positions)
  return cache, logits, after


def no_token(method: Method, position: int) -> str:
  """Return the sentence for a row that ended because a round committed no token."""
  return (
    f'{method.name}: a round has committed no token at position {position}: {method}; every round must end in a Verify '
    'whose models have scored what is pending, as those of speccascade.methods do.'
  )


def not_a_distribution(method: Method, position: int, fault: int, value: float) -> str:
  """Return the sentence for a row whose target was no distribution: its sum, or if `NEGATIVE` its least entry."""
  name = ', '.join(dict.fromkeys(n for n, *_ in _asked(method)))
  what = f'has the entry {value:.4g}' if fault == NEGATIVE else f'sums to {value:.4g}'
  return (
    f'{method.name}: what {name} returns at position {position} {what}, so it is no distribution; a rule must return '
    f'probabilities that are not negative and sum to 1. speccascade.check({name}) says more.'
  )
