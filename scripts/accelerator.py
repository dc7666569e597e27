"""Check distributions and time decoding on the accelerator that JAX finds, within a budget of seconds.

python scripts/accelerator.py --out DIR [--budget 570] [--only checks t5_small_xl …] [--batches 1 8 32]
python scripts/accelerator.py --out DIR --tiny   # all of it on a small scale, for a CPU

Each figure is a line of DIR/figures.jsonl as soon as it is there; a table ends the run; a failed check makes it fail.
  chi²      tokens 7 to 9 of toy models at T = 1 by χ² against their exact distribution; a check fails where p < 1e-6
  equality  random T5 and decoder models. At T = 0 speculative decoding gives the tokens of the verifier alone, a
            cascade those of both models in lockstep; rows of a batch are those of a batch of one. In float32, with
            products of the highest precision, all of it is exact; in bfloat16 the first token that differs must be a
            tie of the verifier's
  timings   published sizes, random bfloat16 weights, endless texts, a given chance to accept a drafted token.
            `over floor`: an autoregressive step over the time to read the decoder's weights and the caches at the speed
            of a copy on the device; `over call`: over one forward pass in a loop of nothing else; `over calls`: a
            speculative round over γ drafter steps and a verifier window, each in its own loop, `in turn` in one
            loop; `speed-up` over autoregressive, and the one that the tokens of a round and the calls predict;
            `memory`: the peak over weights and caches, empty where an earlier peak hides it. The cost of a text
            that does not grow with it is subtracted: long texts less short ones, medians of --trials
"""

import argparse
from collections.abc import Callable
import concurrent.futures
import functools
import json
from pathlib import Path
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
import reference  # noqa: E402

from speccascade import acceptance, decode, methods, rules, Sampler  # noqa: E402
from speccascade.engine.loop import positions  # noqa: E402
from speccascade.host import commands  # noqa: E402
from speccascade.models import shapes, toy  # noqa: E402
from speccascade.models.decoder import Decoder, DecoderConfig, Span  # noqa: E402
from speccascade.models.t5 import T5, T5Config  # noqa: E402
from speccascade.planning import aot, synthetic, timing  # noqa: E402
from speccascade.types import Model  # noqa: E402

FALSE_ALARM = 1e-6  # of a distribution check; the seeds are fixed
TIE = {'float32': 1e-4, 'bfloat16': 0.25}  # log-probabilities so near each other may swap by rounding
OPT = functools.partial(rules.opt, alpha=0.1)
WEIGHTED = functools.partial(rules.weighted, weights=(0.4, 0.6))
TINY = DecoderConfig(97, 32, 4, 2, 8, 64, (Span(), Span(4)), tied=True)
TINY_PAIR = [T5(T5Config(97, e, 4, 8, 64, 1, 2), dtype='bfloat16') for e in (16, 32)]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [40, 3], [20, 21, 22, 23], [7, 7, 7], [90, 1, 50], [33]]
GUESS = 120.0  # seconds that a cell of the timings takes where none has been measured


class Figures:
  """The figures so far: each a line of a file as soon as it is there."""

  def __init__(self, folder: Path, budget: float):
    folder.mkdir(parents=True, exist_ok=True)
    self.path, self.rows = folder / 'figures.jsonl', []
    self.path.write_text('')
    self.end = time.perf_counter() + budget

  def add(self, kind: str, **figure) -> None:
    """Write one figure."""
    self.rows.append(dict(kind=kind, **figure))
    with self.path.open('a') as file:
      file.write(json.dumps(self.rows[-1]) + '\n')
    print(f'{self.left():5.0f} s left  {kind} {figure}', flush=True)

  def left(self) -> float:
    """Return the seconds left."""
    return self.end - time.perf_counter()

  @property
  def failed(self) -> list[dict]:
    """Return the checks that failed, and the steps that raised."""
    return [row for row in self.rows if row.get('passed') is False or row['kind'] == 'error']


# ---- checks ----


def distribution_checks(dtype: str, rows: int) -> dict[str, Callable[[], dict[str, dict]]]:
  """Return {name: check of late tokens} of toy models whose tables have this dtype."""
  large = toy.model(11, 5, scale=1.2)
  models = [toy.model(12, 5, scale=0.8, near=large), large]
  models = [m.replace(params=jax.tree.map(lambda x: x.astype(dtype), m.params)) for m in models]
  own = reference.lockstep(models[1:], lambda logits, s: s(logits[0]))
  opt = reference.lockstep(models, lambda logits, s: reference.target('opt', *logits, OPT.keywords['alpha'], s))
  mean = reference.lockstep(models, lambda logits, s: reference.weighted(logits, WEIGHTED.keywords['weights'], s))
  cases = {
    'speculative': (methods.speculative(block=3), own),
    'cascade': (methods.speculative(OPT, 3), opt),
    'block verification': (methods.speculative(block=3, accept=acceptance.block), own),
    'collaborative': (methods.cos(WEIGHTED, (3, 1)), mean),
  }

  def check(name, method, step) -> dict:
    distribution = reference.late_distribution(step, [2, 2], 5, 2, first=6, count=3)
    tokens = decode(method, models, [[2, 2]] * rows, max_new_tokens=9).tokens
    p, ratio = reference.goodness(np.array(tokens)[:, 6:], distribution)
    return {name: dict(p=float(p), chi_square_over_df=float(ratio), rows=rows, passed=bool(p > FALSE_ALARM))}

  return {name: functools.partial(check, f'distribution of {name}', *case) for name, case in cases.items()}


def small_pair(kind: str, dtype: str) -> list[Model]:
  """Return a random verifier and a drafter near it."""
  t5 = T5Config(97, 32, 4, 8, 64, encoder_layers=1, decoder_layers=2)
  network = T5(t5, (96,), dtype=dtype) if kind == 't5' else Decoder(TINY, (96,), dtype)
  draw = lambda seed: jax.tree.map(lambda x: 3 * x.astype(jnp.float32), network.init(jax.random.key(seed)))
  large, other = draw(1), draw(2)
  small = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, large, other)
  cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
  return [Model(cast(p), network, name=name) for name, p in (('small', small), ('large', large))]


def first_gap(one, other) -> float:
  """Return the largest difference, over rows, of the verifier's log-probabilities of the first tokens that differ."""
  gaps = [0.0]
  for a, b, x, y in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
    if a != b:
      at = next((i for i, (s, t) in enumerate(zip(a, b)) if s != t), min(len(a), len(b)) - 1)
      gaps.append(abs(float(x[-1, at] - y[-1, at])))
  return float(np.max(gaps))


def equality_checks(kind: str, dtype: str, tokens: int) -> dict[str, dict]:
  """Return {name: figures} of pairs of decodes that must agree."""
  models = small_pair(kind, dtype)
  run = functools.partial(decode, models=models, max_new_tokens=tokens, max_prompt_tokens=8, trace=True)
  greedy = functools.partial(run, prompts=PROMPTS, sampler=Sampler(0.0))

  def agree(one, other, tie: float | None) -> dict:
    same = np.mean([a == b for a, b in zip(one.tokens, other.tokens, strict=True)])
    gap = first_gap(one, other)
    passed = bool(same == 1) if dtype == 'float32' else None if tie is None else gap <= tie
    rate = float(other.stats.accepted.sum() / other.stats.tested.sum())
    return dict(rows_equal=float(same), gap=gap, acceptance=rate, passed=passed)

  def apart(method) -> dict:
    outs = [run(method, prompts=[p], example_ids=[i]) for i, p in enumerate(PROMPTS)]
    alone = types.SimpleNamespace(tokens=[o.tokens[0] for o in outs], logprobs=[o.logprobs[0] for o in outs])
    return agree(alone, run(method, prompts=PROMPTS), None)

  spec, cascade = methods.speculative(block=3), methods.speculative(OPT, 3)
  return {
    f'{kind}: speculative = autoregressive': agree(greedy(methods.autoregressive(1)), greedy(spec), TIE[dtype]),
    f'{kind}: cascade = lockstep': agree(greedy(methods.oracle(OPT)), greedy(cascade), None),
    f'{kind}: batch = rows alone, T = 1': apart(spec),
  }


def check(figures: Figures, dtype: str, args) -> None:
  """Run the checks of a dtype at once: none is timed."""
  checks = distribution_checks(dtype, args.rows)
  for kind in args.kinds[dtype]:
    checks[kind] = functools.partial(equality_checks, kind, dtype, args.check_tokens)
  precision = 'highest' if dtype == 'float32' else None

  def run(name: str) -> dict[str, dict]:
    with jax.default_matmul_precision(precision):
      return checks[name]()

  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    for done in concurrent.futures.as_completed([pool.submit(run, name) for name in checks]):
      if done.exception():
        figures.add('error', name=f'{dtype} checks', error=repr(done.exception())[:500])
      else:
        for name, result in done.result().items():
          figures.add('check', name=f'{dtype} {name}', **result)


# ---- timings ----


def copy_bandwidth(bytes_: int) -> float:
  """Return the bytes a second that a copy on the device reads and writes, the median of five loops."""
  loop = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: x + 1, x), donate_argnums=0)
  x, seconds = loop(jnp.zeros(bytes_ // 4)), []
  for _ in range(5):
    start = time.perf_counter()
    x = jax.block_until_ready(loop(x))
    seconds.append(time.perf_counter() - start)
  return 2 * 20 * x.nbytes / float(np.median(seconds))


def cache_bytes(model: Model, batch: int, args) -> int:
  """Return the bytes of a model's caches."""
  slots = positions(model.network, args.prompt_tokens, args.tokens, args.block)
  return synthetic.tree_bytes(aot.caches(model.network, aot.Sizes(batch, args.prompt_tokens, args.tokens), slots))


def peak_bytes() -> int | None:
  """Return the most memory that the device has had in use, where it counts it."""
  return (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use')


def make_runs(models: list[Model], batch: int, args) -> tuple[dict, dict]:
  """Return {name: function that times} of decodes, and of calls alone."""
  prompts = [[5 + (i + j) % 80 for j in range(args.prompt_tokens)] for i in range(batch)]
  kwargs = dict(
    tokens=args.tokens, least=args.least, sampler=Sampler(args.temperature), max_prompt_tokens=args.prompt_tokens
  )
  spec = methods.speculative(block=args.block, accept=timing.forced(args.acceptance))
  ours = {
    'speculative': timing.round_seconds(spec, models, prompts, **kwargs),
    'autoregressive': timing.round_seconds(methods.autoregressive(1), models, prompts, **kwargs),
  }
  small, large = models
  sizes = dict(source=args.prompt_tokens, tokens=args.tokens, window=args.block)
  passes = {
    'draft': [(small, 1, 1)],
    'plain': [(large, 1, 1)],
    'verify': [(large, args.block + 1, 1)],
    'turn': [(small, 1, args.block), (large, args.block + 1, 1)],
  }
  make = lambda some: functools.cache(lambda: timing.passes_seconds(some, batch, **sizes))  # made while it warms up
  return ours, {name: lambda timer=make(some): timer()() for name, some in passes.items()}


def time_cell(models: list[Model], batch: int, bandwidth: float, args) -> dict:
  """Return the figures of a pair at a batch size."""
  ours, calls = make_runs(models, batch, args)
  before, start = peak_bytes(), time.perf_counter()
  ours['speculative']()  # first and alone, for the peak of its memory
  peak = peak_bytes()
  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    list(pool.map(lambda run: run(), [ours['autoregressive'], *calls.values()]))
  compiled = time.perf_counter() - start
  done = timing.interleave(ours | calls, args.trials)
  draft, plain, verify, turn = (float(np.median(done[name])) for name in calls)
  (step, step_token, *_), (round_, token, gain, _) = (
    np.median(done[n], 0).tolist() for n in ('autoregressive', 'speculative')
  )
  caches = [cache_bytes(m, batch, args) for m in models]
  least = (synthetic.weight_bytes(models[1].params) + caches[1]) / bandwidth
  needed = synthetic.tree_bytes([m.params for m in models]) + sum(caches)
  alone = args.block * draft + verify
  return dict(
    step_ms=1e3 * step,
    step_over_floor=step / least,
    step_over_call=step / plain,
    call_over_floor=plain / least,
    round_ms=1e3 * round_,
    round_over_calls=round_ / alone,
    round_over_turn=round_ / turn,
    tokens_per_round=gain,
    speedup=step_token / token,
    predicted=gain * plain / alone,
    tokens_per_second=batch / token,
    draft_ms=1e3 * draft,
    plain_ms=1e3 * plain,
    verify_ms=1e3 * verify,
    turn_ms=1e3 * turn,
    floor_ms=1e3 * least,
    weights_and_caches_bytes=needed,
    peak_bytes=peak,
    memory=peak / needed if peak and peak > before else None,
    compile_seconds=compiled,
    spread_ms={n: 1e3 * float(np.ptp([np.ravel(v)[0] for v in x])) for n, x in done.items()},
  )


def time_pair(figures: Figures, name: str, bandwidth: float, args) -> None:
  """Add the figures of a pair at every batch size that the budget has room for."""
  took = args.guess
  networks = TINY_PAIR if args.tiny else shapes.pair(name)
  models = [synthetic.random_model(network, str(i), i) for i, network in enumerate(networks)]
  for batch in args.batches:
    if figures.left() < took:
      figures.add('skipped', pair=name, batch=batch, needs=took, left=figures.left())
      continue
    start = time.perf_counter()
    try:
      figures.add('timing', pair=name, batch=batch, **time_cell(models, batch, bandwidth, args))
    except Exception as e:  # as out of memory: the other cells are still worth having
      figures.add('error', pair=name, batch=batch, error=repr(e)[:500])
    took = time.perf_counter() - start
  jax.clear_caches()


SHOWN = {
  'step_ms': 'step ms',
  'step_over_floor': 'over floor',
  'step_over_call': 'over call',
  'round_ms': 'round ms',
  'round_over_calls': 'over calls',
  'round_over_turn': 'in turn',
  'tokens_per_round': 'tokens',
  'speedup': 'speed-up',
  'predicted': 'predicted',
  'memory': 'memory',
}


def show(figures: Figures) -> None:
  """Print the figures as tables."""
  for row in figures.rows:
    if row['kind'] == 'check':
      rest = ', '.join(f'{k} {v:.3g}' for k, v in row.items() if isinstance(v, float) and k != 'seconds')
      print(f'{ {True: "ok", False: "FAILED", None: "–"}[row["passed"]]:<7}{row["name"]:<50}{rest}')
  print(f'\n{"":<18}batch' + ''.join(f'{title:>11}' for title in SHOWN.values()))
  for row in figures.rows:
    if row['kind'] == 'timing':
      cells = ''.join(f'{"–" if row[k] is None else format(row[k], ".2f"):>11}' for k in SHOWN)
      print(f'{row["pair"]:<18}{row["batch"]:>5}{cells}')
  for row in figures.rows:
    if row['kind'] in ('error', 'skipped'):
      print(row)


def parse(argv: list[str] | None) -> argparse.Namespace:
  """Return the options; `--tiny` makes everything small."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=Path, required=True, help='folder of the figures')
  parser.add_argument('--budget', type=float, default=570, help='seconds; what no longer fits is skipped')
  parser.add_argument('--tiny', action='store_true', help='small models and few rows, for a CPU')
  parser.add_argument('--only', nargs='+', choices=['checks', *shapes.PAIRS], help='checks, names of pairs')
  parser.add_argument('--batches', type=commands.count, nargs='+', default=[1, 8, 32])
  parser.add_argument('--prompt-tokens', type=commands.count, default=64)
  parser.add_argument('--tokens', type=commands.count, default=192, help='of the long texts')
  parser.add_argument(
    '--least', type=commands.count, default=129, help='of the short texts, long enough to share programs'
  )
  parser.add_argument('--block', type=commands.count, default=5, help='γ')
  parser.add_argument('--acceptance', type=float, default=0.8, help='the chance to accept a drafted token')
  parser.add_argument('--temperature', type=float, default=1.0)
  parser.add_argument('--trials', type=commands.count, default=3)
  parser.add_argument('--jobs', type=commands.count, default=4, help='programs that are compiled side by side')
  args = parser.parse_args(argv)
  both = ('t5', 'decoder')
  sizes = dict(rows=1 << 16, check_tokens=48, copied=1 << 30, guess=GUESS, kinds=dict(float32=both, bfloat16=both))
  pairs = ('t5_small_xl', 'llama_68m_7b', 'gemma2_2b_9b')
  if args.tiny:
    sizes |= dict(
      rows=2048, check_tokens=8, copied=1 << 20, guess=5.0, trials=1, kinds=dict(float32=both[:1], bfloat16=both[1:])
    )
    sizes |= dict(batches=[2], prompt_tokens=8, tokens=24, least=17, block=2)
    pairs = pairs[:1]
  args.__dict__.update(sizes)
  args.only = args.only or ['checks', *pairs]
  return args


def main(argv: list[str] | None = None) -> int:
  """Check, time, print; return 1 where a check failed or a step raised."""
  args = parse(argv)
  figures = Figures(args.out, args.budget)
  device = jax.devices()[0]
  bandwidth = copy_bandwidth(args.copied)
  figures.add('machine', device=device.device_kind, jax=jax.__version__, copy_gb_per_second=bandwidth / 1e9)
  if 'checks' in args.only:
    for dtype in ('float32', 'bfloat16'):
      check(figures, dtype, args)
  for name in args.only:
    if name != 'checks':
      time_pair(figures, name, bandwidth, args)
  show(figures)
  return 1 if figures.failed else 0


if __name__ == '__main__':
  sys.exit(main())
