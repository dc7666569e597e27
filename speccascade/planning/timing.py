"""The one timer: calls that are compared take turns, the first turn is not counted, and medians are reported.

It times whatever is callable: a decode, rounds inside the decode loop (`full_rounds`), a forward pass alone
(`passes_seconds`). With `forced` acceptance a method does the work of a round whatever its models compute.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import acceptance, backends, sampling
from speccascade.backends import sharding
from speccascade.engine import Engine, engine_for, requests
from speccascade.engine.job import DecodeJob
from speccascade.engine.loop import positions, prefilled
from speccascade.engine.method import Method
from speccascade.host import multihost
from speccascade.models.packing import Packing
from speccascade.types import Array, Model, Network, Prompt, Told

STEPS = 32  # the most passes in one loop on the device, where nothing else is given
ENOUGH = 0.2  # seconds that a loop should take, where fewer passes do


class Interval(NamedTuple):
  """The median of some measurements, and their quartiles."""

  median: float
  low: float
  high: float

  @classmethod
  def of(cls, values: Sequence[float]) -> 'Interval':
    """Summarise measurements."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return cls(float(median), float(low), float(high))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
  """Return the seconds that a call takes and what it returns."""
  start = time.perf_counter()
  result = call()
  return time.perf_counter() - start, result


def interleave(
  runs: Mapping[Any, Callable[[], Any]],
  trials: int,
  allows: Callable[[float], bool] = lambda share: True,
  least: int = 1,
) -> dict[Any, list]:
  """Return what each run gives: everything once uncounted, then `trials` times in turn.

  All processes get the values of the first, for they have to go on alike.

  Args:
    runs: By name, those that matter most first.
    trials: The turns.
    allows: Tells, of all processes alike, whether less than a share of the time is gone. After half of it no other run
      than the `least` first begins, and after all of it no other turn than the first.
    least: How many runs are made in any case.
  """
  results: dict[Any, list] = {}
  for name, run in runs.items():
    if len(results) >= least and not allows(0.5):
      break
    run()
    results[name] = []
  for trial in range(trials):
    if trial and not allows(1.0):
      break
    for name, values in results.items():
      values.append(runs[name]())
  return dict(zip(results, multihost.broadcast(list(results.values())), strict=True))


# ---- rounds of a decode ----


def forced(rate: float | None) -> Callable:
  """Return an acceptor that accepts each drafted token with this chance, whatever the models compute.

  With None it is `acceptance.token_wise`, in the same compiled program.
  """
  return functools.partial(_forced, rate=-1.0 if rate is None else rate)


@acceptance.acceptor(reads=(), told=Told.NOTHING)  # so that what is timed is the program that decodes
def _forced(trial, *, rate):
  pi, q = acceptance.at_tokens(trial)
  pi = jnp.where(rate < 0, pi, rate)
  q = jnp.where(rate < 0, q, 1.0)
  ok, noise = trial.noise.accept(pi, q, trial.position, trial.start)
  return acceptance.Verdict(acceptance.leading(ok & acceptance.in_test(trial))), noise


def endless(models: Sequence[Model]) -> list[Model]:
  """Return the models without EOS, so that every text is as long as it may be."""
  return [m.replace(network=m.network.endless()) for m in models]


class TimedRounds(NamedTuple):
  """Rounds of batches in which no text has ended, and the tokens that all rows committed in them."""

  seconds: float
  rounds: int
  tokens: int

  @property
  def speed(self) -> float:
    """Tokens a second."""
    return self.tokens / self.seconds


def full_rounds(
  method: Method, models: Sequence[Model], prompts: Sequence[Any], batch_size: int, **sizes: Any
) -> Callable[[], TimedRounds]:
  """Return a function that times the rounds of batches until the first text of each ends: no prefill, no idle row.

  Prompts that fill no batch are left out. `sizes` are those of `engine_of`.
  """
  starts = range(0, len(prompts) - batch_size + 1, batch_size)
  runs = [_full_batch(method, models, prompts[i : i + batch_size], **sizes) for i in starts]
  return lambda: TimedRounds(*map(sum, zip(*(run() for run in runs), strict=True)))


def _full_batch(
  method: Method, models: Sequence[Model], prompts: Sequence[Any], **sizes: Any
) -> Callable[[], TimedRounds]:
  """Return the same of one batch."""
  engine, rows = engine_of(method, models, prompts, **sizes)
  prefix = engine.prefill([row.tokens for row in rows], engine.size)
  batch = engine.insert_batch(rows, None, range(len(rows)))

  def run() -> TimedRounds:
    state = jax.block_until_ready(engine.begin(prefix, batch))
    before = int(state.length.sum())
    seconds, (_, found) = timed(lambda: engine.collect(engine.run(state, ended=engine.size - len(rows) + 1)))
    rounds = found['stats'].verified_lengths.sum(-1).max()
    return TimedRounds(seconds, int(rounds), int(found['length'].sum()) - before)

  return run


def engine_of(
  method: Method,
  models: Sequence[Model],
  prompts: Sequence[Any],
  *,
  max_new_tokens: int,
  max_prompt_tokens: int | None,
  sampler: sampling.Sampler,
) -> tuple[Engine, list[requests.RequestRow]]:
  """Return an engine for one batch of prompts, as `decode` has it, and their rows."""
  sizes = dict(max_new_tokens=max_new_tokens, max_prompt_tokens=max_prompt_tokens, sampler=sampler)
  job = DecodeJob.of(method, models, prompts, seed=0, **sizes)
  job = dataclasses.replace(job, size=sharding.even(len(job.rows), job.shards))  # no more rows than there are
  return engine_for(job), job.rows


# ---- forward passes alone ----


def passes_seconds(
  passes: Sequence[tuple[Model, int, int]],
  batch: int = 1,
  *,
  source: int = 16,
  tokens: int = 64,
  window: int = 0,
  most: int = STEPS,
  total: int | None = None,
  caches: tuple | None = None,
) -> Callable[[], float]:
  """Return a function that times passes in turn, (model, width, how many) each, as a loop that does nothing else.

  After another model's pass, caches and threads are not as a model's own loop leaves them; so the first rounds are
  dearer. There are at most `most` rounds. The models' caches have the slots of a decode of at most `tokens`
  new tokens with windows of `window`, or of the widest pass; `caches` are those of `filled` where many timers share
  them. With `total`, windows are packed to so many tokens, a multiple of the batch.
  """
  models, widths, times = zip(*passes, strict=True)
  window = window or max(widths)
  backend, params = backends.prepared(models, sharding.layout_for(models))
  networks = tuple(m.network for m in models)
  slots = positions(networks[-1], source, tokens, window)
  caches = filled(models, batch, source, slots) if caches is None else caches
  options = backends.known(backend.xla)
  loop = passes_loop(networks, backend, widths, batch, source, slots, times, total, options=options)

  def seconds(rounds: int) -> float:
    return timed(lambda: loop(params, caches, rounds).block_until_ready())[0] / rounds

  @functools.cache
  def rounds() -> int:  # at the first call, not while other loops compile at the same time; of all processes as many
    return multihost.broadcast(int(np.clip(ENOUGH / seconds(2), 2, most)))

  seconds(1)  # compiles
  return lambda: seconds(rounds())


def filled(models: Sequence[Model], batch: int, source: int, slots: int) -> tuple:
  """Return the models' caches after prompts of `source` tokens."""
  layout = sharding.layout_for(models)
  backend, params = backends.prepared(models, layout)
  networks = tuple(m.network.on(backend.for_slot(n)) for n, m in enumerate(models))
  prompt = Prompt(np.ones((batch, source), np.int32), np.full(batch, source, np.int32))
  return prefilled(networks, params, prompt, slots, layout)


def passes_loop(
  networks: Sequence[Network],
  backend: backends.Backend,
  widths: Sequence[int],
  batch: int,
  source: int,
  slots: int,
  times: Sequence[int],
  total: int | None = None,
  options: Sequence[tuple[str, str]] = (),
) -> Callable:
  """Return a jitted function of (params, caches, rounds) that feeds each pass's output on.

  The networks take turns: in a round the n-th makes `times[n]` passes of `widths[n]` tokens. The tokens of a pass
  differ, so that they choose as many experts as others would. Layout, and options of XLA, are those of a decode.
  """
  first = source if networks[-1].start_id is None else 1
  spread = jnp.arange(batch * max(widths)).reshape(batch, -1)  # ids, of which each pass adds its own to
  vocab = min(network.vocab_size for network in networks)
  start = spread % vocab
  span = slots - first - max(widths)
  layout = backend.layout
  networks = [network.on(backend.for_slot(n)) for n, network in enumerate(networks)]

  @functools.partial(jax.jit, compiler_options=dict(options))
  def loop(params, caches, rounds):
    def turn(i, carry):
      def feed(n, carry):
        tokens, cache = carry
        position = jnp.broadcast_to(first + i % span + jnp.arange(widths[n])[None], (batch, widths[n]))
        logits, cache = _extended(networks[n], params[n], cache, tokens[:, : widths[n]], position, total)
        logits = layout.as_head(logits, n)
        fed = (spread[:, : widths[n]] + jnp.minimum(sampling.argmax(logits), 5)) % vocab
        return tokens.at[:, : widths[n]].set(fed), cache

      tokens = carry[0]
      caches = list(carry[1])
      for n in range(len(networks)):
        tokens, caches[n] = jax.lax.fori_loop(0, times[n], lambda _, x, n=n: feed(n, x), (tokens, caches[n]))
      return tokens, layout.pin(tuple(caches), layout.caches(caches))

    return jax.lax.fori_loop(0, rounds, turn, (start, tuple(caches)))[0]

  return loop


def _extended(network: Network, params, cache, tokens: Array, position: Array, total: int | None) -> tuple[Array, Any]:
  """Return the logits of a forward pass and the cache; with `total`, windows are packed to so many tokens."""
  if not total:
    return network.extend(params, cache, tokens, position)
  batch, width = tokens.shape
  packing = Packing.of(jnp.full(batch, total // batch), width, total)
  logits, cache = network.extend(params, cache, tokens, position, packing)
  return packing.unpack(logits), cache
