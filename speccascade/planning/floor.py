"""The time of one forward pass of each model: what any decoding method pays for a call at the least."""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, sampling
from speccascade.backends import sharding
from speccascade.engine.inputs import vocabulary
from speccascade.engine.loop import positions, prefill
from speccascade.host import multihost
from speccascade.models.packing import Packing
from speccascade.types import Model, Network, Prompt

STEPS = 32  # the most passes in one loop on the device, unless said
ENOUGH = 0.2  # seconds that a loop should take, where fewer passes do


def forward_seconds(model: Model, batch: int = 1, width: int = 1, **sizes) -> Callable[[], float]:
  """Return a function that times one forward pass of `width` tokens a row, by `passes_seconds` of these sizes."""
  return passes_seconds([(model, width, 1)], batch, **sizes)


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

  After another model's pass, caches and threads are not as a model's own loop leaves them; so the first of the rounds,
  of which there are `most` at the most, are dearer. The models' caches have the slots of a decode of at most `tokens`
  new tokens with windows of `window`, or of the widest pass; `caches` are those of `filled` where many timers share
  them. With `total`, windows are packed to so many tokens, a multiple of the batch.
  """
  models, widths, times = zip(*passes, strict=True)
  window = window or max(widths)
  backend, params = backends.prepared(models, sharding.of(models, batch, window, vocabulary(models)))
  networks = tuple(m.network for m in models)
  slots = positions(networks[-1], source, tokens, window)
  caches = filled(models, batch, source, slots) if caches is None else caches
  options = backends.known(backend.xla)
  loop = passes_loop(networks, backend, widths, batch, source, slots, times, total, options=options)

  def seconds(rounds: int) -> float:
    start = time.perf_counter()
    loop(params, caches, rounds).block_until_ready()
    return (time.perf_counter() - start) / rounds

  @functools.cache
  def rounds() -> int:  # at the first call, not while other loops compile beside this one; of all processes as many
    return multihost.broadcast(int(np.clip(ENOUGH / seconds(2), 2, most)))

  seconds(1)  # compiles
  return lambda: seconds(rounds())


def filled(models: Sequence[Model], batch: int, source: int, slots: int) -> tuple:
  """Return the models' caches after prompts of `source` tokens."""
  layout = sharding.of(models)
  backend, params = backends.prepared(models, layout)
  networks = tuple(backends.bind(m.network, backend.for_slot(n)) for n, m in enumerate(models))
  prompt = Prompt(np.ones((batch, source), np.int32), np.full(batch, source, np.int32))
  return prefill(networks, params, prompt, slots, layout=layout)


def passes_loop(
  networks: Sequence[Network], backend: backends.Backend, widths: Sequence[int], batch: int, source: int, slots: int,
  times: Sequence[int] | None = None, total: int | None = None,
  options: Sequence[tuple[str, str]] = (),
) -> Callable:  # fmt: skip
  """Return a jitted function of (params, caches, rounds, totals) that feeds each pass's output on.

  The networks take turns: in a round the n-th makes `times[n]` passes of `widths[n]` tokens or, where that is not
  given, as many as make `totals[n]` over all rounds. Layout, and options of XLA, are those of a decode.
  """
  first = source if networks[-1].start_id is None else 1
  start, room = jnp.ones((batch, max(widths)), jnp.int32), slots - first - max(widths)
  layout = backend.layout
  networks = [backends.bind(network, backend.for_slot(n)) for n, network in enumerate(networks)]
  pinned = (lambda caches: caches) if layout is None else lambda caches: layout.pin(caches, layout.caches(caches))

  @functools.partial(jax.jit, compiler_options=dict(options))
  def loop(params, caches, rounds, totals=None):
    def turn(i, carry):
      def feed(n, carry):
        tokens, cache = carry
        position = jnp.broadcast_to(first + i % room + jnp.arange(widths[n])[None], (batch, widths[n]))
        args = params[n], cache, tokens[:, : widths[n]], position
        if total:
          packing = Packing.of(jnp.full(batch, total // batch), widths[n], total)
          logits, cache = networks[n].extend(*args, packing)
          logits = packing.unpack(logits)
        else:
          logits, cache = networks[n].extend(*args)
        logits = sharding.as_head(layout, sharding.computed(layout, logits, n), n)
        return tokens.at[:, : widths[n]].set(jnp.minimum(sampling.argmax(logits), 5)), cache

      tokens, caches = carry[0], list(carry[1])
      for n in range(len(networks)):
        count = times[n] if times else totals[n] * (i + 1) // rounds - totals[n] * i // rounds  # as even as can be
        tokens, caches[n] = jax.lax.fori_loop(0, count, lambda _, x, n=n: feed(n, x), (tokens, caches[n]))
      return tokens, pinned(tuple(caches))

    return jax.lax.fori_loop(0, rounds, turn, (start, tuple(caches)))[0]

  return loop


def measure(
  models: Sequence[Model],
  widths: Sequence[int],
  *,
  batch: int = 1,
  source: int = 16,
  tokens: int = 64,
  trials: int = 5,
  tell: Callable[[str, int], None] = lambda name, width: None,
) -> dict[str, dict[str, float]]:
  """Return {model: {width: median seconds}}, the measurements interleaved; `tokens` are the most new ones.

  `tell(model's name, width)` is called when a pass is compiled, which takes the most of it.
  """
  keys = [(m, w) for m in models for w in sorted({*widths})]
  with concurrent.futures.ThreadPoolExecutor(multihost.threads()) as pool:  # they compile side by side
    sizes = dict(source=source, tokens=tokens, window=max(widths))
    measured = lambda key: forward_seconds(key[0], batch, key[1], **sizes)
    made, timers = pool.map(measured, keys), {}
    for (m, w), timer in zip(keys, made, strict=True):
      timers[m.name, str(w)] = timer
      tell(m.name, w)
  found = {m.name: {} for m in models}
  for (name, width), values in interleave(timers, trials).items():
    found[name][width] = float(np.median(values))
  return found


def interleave(runs: Mapping[Any, Callable[[], Any]], trials: int) -> dict[Any, list]:
  """Return what each run gives: everything once unrecorded, then `trials` times in turn."""
  results = {name: [] for name in runs}
  for trial in range(trials + 1):
    for name, run in runs.items():
      value = run()
      if trial:
        results[name].append(value)
  return results
