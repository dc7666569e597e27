"""Time decoding on the device that JAX finds; what is compared takes turns, and compilation is not counted.

python scripts/bench.py FOLDER/small FOLDER/large --prompts FILE [--reference]  # checkpoints
python scripts/bench.py t5_small_xl --batches 1 8 32   # published sizes, random weights; as llama_68m_7b, gemma2_2b_9b
python scripts/bench.py tiny                           # a small pair, to try it out

With random weights drafted tokens are accepted with the chance --acceptance, whatever the models predict, and no text
ends; the work is that of real ones. Each batch size and temperature prints a table, with --json a line of JSON:
  calls_ms   forward passes alone: a drafter's token, a verifier's token and its window of γ + 1; `floor` is the time to
             read the verifier's decoder and caches at the speed of a copy on the device
  decodes    of all prompts, prefill and host included: tokens a second, the speed-up over autoregressive decoding, and
             `over_generate`, over the better of transformers' generate, plain and assisted [--reference]
  rounds     of long texts, without what a text costs once (long texts less short ones): milliseconds, over the round's
             model calls alone, over the same calls `in turn` in a loop that does nothing else, tokens a round, the
             speed-up, and over the one that tokens and calls predict
  without    on a CPU with --ablate, instead of the others: the time of a decode without a piece of the backend over the
             time with all of them, quartiles
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, checkpoints, decode, methods, rules, Sampler
from speccascade.backends import Backend, CPU, ops
from speccascade.data import files
from speccascade.engine import inputs
from speccascade.engine.loop import positions
from speccascade.engine.method import Strategy
from speccascade.evaluate.report import formats
from speccascade.host import commands
from speccascade.models import shapes
from speccascade.models.t5 import T5, T5Config
from speccascade.planning import aot, synthetic, timing
from speccascade.types import Model, Network

FAMILIES = {
  't5': (shapes.t5, shapes.T5_V1_1),
  'llama': (shapes.llama, shapes.LLAMA),
  'gemma2': (shapes.gemma2, shapes.GEMMA2),
  't5gemma': (shapes.t5gemma, shapes.T5GEMMA),
  't5gemma2': (shapes.t5gemma2, shapes.GEMMA3),
}
PIECES = {  # of a CPU's backend: what is plain XLA's instead
  'products in parts, where the CPU has tiles': (),
  'kernels by row, sums of products': ('prepare', 'matmul_rows'),
  'caches with heads in front': ('entry', 'write', '_attend', 'slot_axis'),
  'a slot written row by row': ('put',),
  'arg max by two maxima': ('argmax',),
}
PLAIN = {'put': ops.masked_put, 'argmax': ops.plain_argmax}  # of indexed operations
Runs = dict[str, Callable[[], Any]]
Table = dict[str, dict[str, float]]


# ---- what is timed ----


def pair_of(name: str, dtype: str) -> list[Network]:
  """Return the drafter and the verifier of a pair of published sizes: FAMILY_SMALL_LARGE, or tiny."""
  if name == 'tiny':
    return [shapes.in_dtype(T5(T5Config(97, width, 4, 8, 64, 1, 2)), dtype) for width in (16, 32)]
  family, *sizes = name.split('_')
  make, known = FAMILIES.get(family, (None, {}))
  if len(sizes) != 2 or not {*sizes} <= {*known}:
    raise ValueError(f'{name!r} is no pair: give tiny, {", ".join(shapes.PAIRS)}, or two checkpoints')
  return [make(size, dtype) for size in sizes]


def our_methods(block: int, rate: float | None) -> dict[str, methods.Method]:
  """Return the methods whose rounds are timed; with a rate, drafted tokens are accepted with that chance."""
  speculative = methods.speculative(block=block)
  cascade = methods.speculative(functools.partial(rules.opt, alpha=0.1), block)
  if rate is not None:
    speculative, cascade = (method.accepting(timing.forced(rate)) for method in (speculative, cascade))
  return {'autoregressive': methods.autoregressive(1), 'speculative': speculative, 'cascade opt': cascade}


def more_methods(block: int) -> dict[str, methods.Method]:
  """Return the methods that are timed with trained models alone, for no chance can stand for what they accept."""
  half = functools.partial(rules.weighted, weights=(0.5, 0.5))
  return {
    'token cascade': methods.token_cascade(functools.partial(rules.chow, alpha=0.3)),
    'cos': methods.cos(half, (block, 1)),
    'ensemble': methods.ensemble(half),
  }


def copy_bandwidth(count: int = 1 << 24) -> float:
  """Return the bytes a second that a copy of so many numbers on the device reads and writes, a median."""
  loop = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: x + 1, x), donate_argnums=0)
  x = jax.block_until_ready(loop(jnp.zeros(count)))
  seconds = []
  for _ in range(5):
    took, x = timing.timed(lambda x=x: jax.block_until_ready(loop(x)))
    seconds.append(took)
  return 2 * 20 * x.nbytes / float(np.median(seconds))


# ---- transformers ----


def reference_models(paths: Sequence[str | None], models: Sequence[Model]) -> Iterator:
  """Yield transformers' models for the same checkpoints, or of the same sizes of T5."""
  import torch
  import transformers

  for path, model in zip(paths, models, strict=True):
    if path is None:
      c = model.network.config
      sizes = dict(d_model=c.embed_dim, d_kv=c.head_dim, d_ff=c.mlp_dim, num_layers=c.encoder_layers, num_heads=c.heads)
      ends = dict(feed_forward_proj='gated-gelu', decoder_start_token_id=0, eos_token_id=None)
      yield transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=c.vocab_size, **sizes, **ends)
      ).eval()
    else:
      kind = 'AutoModelForCausalLM' if model.network.start_id is None else 'AutoModelForSeq2SeqLM'
      there = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()
      if not model.network.eos_ids:
        there.generation_config.eos_token_id = None
      yield there


def padded(rows: list[list[int]], *, left: bool) -> tuple[list[list[int]], list[list[int]]]:
  """Return rows of one width and their mask; a causal model's are filled up on the left, so that answers follow."""
  width = max(map(len, rows))
  fill = [[0] * (width - len(r)) for r in rows]
  if left:
    return [f + r for f, r in zip(fill, rows)], [f + [1] * len(r) for f, r in zip(fill, rows)]
  return [r + f for f, r in zip(fill, rows)], [[1] * len(r) + f for f, r in zip(fill, rows)]


def answered(out: np.ndarray, ends: int | list[int] | None) -> int:
  """Return how many tokens of answers there are, each with its end and without what fills it up."""
  ended = np.isin(out, [] if ends is None else ends)
  return int((ended.cumsum(1) - ended == 0).sum())


def reference_runs(
  paths: Sequence[str | None], models: Sequence[Model], prompts: Sequence, batch: int, tokens: int
) -> Runs:
  """Return decodes by transformers' greedy generate, plain and (one row at a time, real weights) assisted."""
  import torch

  small, large = reference_models(paths, models)
  rows = [p if isinstance(p, list) else models[1].tokenizer.encode(p) for p in prompts]
  rows = [rows[i] for i in inputs.by_length(rows)]  # batches of like length, as ours
  causal = models[1].network.start_id is None
  ends = large.generation_config.eos_token_id

  def all_rows(**kwargs) -> int:
    count = 0
    for i in range(0, len(rows), batch):
      ids, mask = (torch.tensor(x) for x in padded(rows[i : i + batch], left=causal))
      with torch.no_grad():
        out = large.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **kwargs)
      count += answered(out[:, ids.shape[1] if causal else 1 :].numpy(), ends)
    return count

  runs = {'generate': lambda: timing.timed(all_rows)}
  if batch == 1 and paths[0] is not None:
    runs['generate assisted'] = lambda: timing.timed(functools.partial(all_rows, assistant_model=small))
  return runs


# ---- the measurements ----


def decodes(models, prompts, our, sampler: Sampler, batch: int, args: argparse.Namespace) -> Table:
  """Return how fast all prompts are decoded by each method, and by transformers."""

  def once(method) -> tuple[float, int]:
    sizes = dict(max_new_tokens=args.tokens, batch_size=batch, max_prompt_tokens=args.prompt_tokens)
    seconds, out = timing.timed(lambda: decode(method, models, prompts, sampler=sampler, **sizes))
    return seconds, int(out.stats.emitted.sum())

  runs: Runs = {name: functools.partial(once, method) for name, method in our.items()}
  if args.reference and sampler.temperature == 0:
    runs |= reference_runs(args.paths, models, prompts, batch, args.tokens)
  done = timing.interleave(runs, args.trials)
  rates = {name: np.array([count / seconds for seconds, count in trials]) for name, trials in done.items()}
  theirs = [rate for name, rate in rates.items() if name.startswith('generate')]
  found = {}
  for name, rate in rates.items():
    ratio = rate / rates['autoregressive']
    found[name] = dict(tokens_per_second=np.median(rate), speedup=np.median(ratio), noise=np.ptp(ratio) / 2)
    if theirs:
      found[name]['over_generate'] = np.median(rate / np.max(theirs, 0))
  return found


class Pace(NamedTuple):
  """Seconds a round, seconds a token of one row, tokens a round of one row, and seconds before the first round."""

  round: float
  token: float
  tokens: float
  start: float


def round_seconds(
  method: Strategy, models: Sequence[Model], prompts: Sequence, *, tokens: int, least: int = 1, **kwargs
) -> Callable[[], Pace]:
  """Return a function that times batches of texts of `tokens` and of `least` tokens: their `pace`."""
  run = functools.partial(batch_totals, method, models, prompts, **kwargs)
  return lambda: pace(run(max_new_tokens=tokens), run(max_new_tokens=least))


def pace(long: np.ndarray, short: np.ndarray) -> Pace:
  """Return what rounds cost by the difference of two runs, totals of `batch_totals`, which differ in their rounds.

  The prefill and the host's work, which a batch costs once, make the start.
  """
  seconds, rounds, tokens = np.subtract(long, short)
  return Pace(
    seconds / rounds, seconds / tokens if tokens else np.nan, tokens / rounds, long[0] - long[1] * seconds / rounds
  )


def batch_totals(
  method: Strategy, models: Sequence[Model], prompts: Sequence, *, batch_size: int | None = None, **kwargs
) -> np.ndarray:
  """Decode; return the mean seconds of a batch, the rounds of the row that needs most, and the mean tokens of a row."""
  seconds, out = timing.timed(lambda: decode(method, models, prompts, batch_size=batch_size, **kwargs))
  batches = -(-len(prompts) // (batch_size or len(prompts)))
  return np.array([seconds / batches, out.stats.rounds.max(), out.stats.emitted.mean()])


def rounds(models, prompts, our, sampler: Sampler, batch: int, args: argparse.Namespace) -> dict[str, Table]:
  """Return what calls and rounds take in long texts: `calls_ms` and `rounds`."""
  small, large = models = timing.endless(models)
  some = list(itertools.islice(itertools.cycle(prompts), batch))
  texts = dict(tokens=args.long, least=args.long * 2 // 3 + 1, max_prompt_tokens=args.prompt_tokens)  # of one program
  runs = {name: round_seconds(method, models, some, sampler=sampler, **texts) for name, method in our.items()}
  drafts = {'speculative': args.block, 'cascade opt': args.block + 1}
  passes = {'draft': [(small, 1, 1)], 'plain': [(large, 1, 1)], 'window': [(large, args.block + 1, 1)]}
  turns = {f'calls of {name}': [(small, 1, n), (large, args.block + 1, 1)] for name, n in drafts.items()}
  sizes = dict(source=args.prompt_tokens, tokens=args.long, window=args.block + 1, most=args.long)
  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:  # they compile side by side
    made = pool.map(lambda row: timing.passes_seconds(row, batch, **sizes), (passes | turns).values())
  done = timing.interleave(runs | dict(zip(passes | turns, made, strict=True)), args.trials)
  draft, plain, window = (float(np.median(done[name])) for name in passes)
  slots = positions(large.network, args.prompt_tokens, args.long, args.block + 1)
  caches = aot.caches(large, aot.Sizes(batch, args.prompt_tokens, args.long), slots)
  weights, caches = large.network.reads(large.params, caches)
  floor = (synthetic.weight_bytes(weights) + synthetic.tree_bytes(caches)) / args.bandwidth
  calls = {'draft': draft, 'plain': plain, 'window': window, 'floor': floor}
  paces = {name: Pace(*np.median(done[name], 0)) for name in our}
  base = paces['autoregressive']
  found = {'autoregressive': dict(ms=1e3 * base.round, over_calls=base.round / plain, over_floor=base.round / floor)}
  for name, n in drafts.items():
    pace = paces[name]
    speedup = base.token / pace.token
    found[name] = dict(
      ms=1e3 * pace.round,
      over_calls=pace.round / (n * draft + window),
      in_turn=pace.round / np.median(done[f'calls of {name}']),
      tokens=pace.tokens,
      speedup=speedup,
      over_predicted=speedup / (pace.tokens * plain / (n * draft + window)),
    )
  return {'calls_ms': {'ms': {name: 1e3 * seconds for name, seconds in calls.items()}}, 'rounds': found}


# ---- the CPU backend without a piece ----


def without(names: tuple[str, ...]) -> Backend:
  """Return the CPU's backend with members of plain XLA's; with none, one that uses no tiles.

  It is its own class, so that programs of different pieces are different programs.
  """
  if not names:
    return CPU(tiles=False)
  members = {name: getattr(Backend, name) for name in names if name not in PLAIN}
  return dataclasses.dataclass(frozen=True)(type('CPU', (CPU,), members))()


@contextlib.contextmanager
def plain_operations(names: tuple[str, ...]) -> Iterator[None]:
  """Trace with XLA's own form of indexed operations."""
  own = {name: getattr(ops, name) for name in names if name in PLAIN}
  try:
    for name in own:
      setattr(ops, name, PLAIN[name])
    yield
  finally:
    for name, operation in own.items():
      setattr(ops, name, operation)


def ablation(models, prompts, our, sampler: Sampler, batch: int, args: argparse.Namespace) -> Table:
  """Return the time of decodes without each piece over the time with all: quartiles by method."""
  sizes = dict(max_new_tokens=args.tokens, batch_size=batch, sampler=sampler)

  def seconds(name: str, backend: Backend, method) -> float:
    backends.register('cpu', backend)
    with plain_operations(PIECES.get(name, ())):
      return timing.timed(lambda: decode(method, models, prompts, **sizes))[0]

  everything = {'': CPU()} | {name: without(names) for name, names in PIECES.items()}
  found = {name: {} for name in PIECES}
  for of, method in our.items():
    runs = {name: functools.partial(seconds, name, backend, method) for name, backend in everything.items()}
    done = timing.interleave(runs, args.trials)
    for name, row in found.items():
      low, middle, high = np.quantile(np.divide(done[name], done['']), (0.25, 0.5, 0.75))
      row |= {of: middle, f'{of}, from': low, f'{of}, to': high}
  return found


# ---- the command ----


def measure(models, prompts, args: argparse.Namespace) -> Iterator[dict]:
  """Yield a record for each batch size and temperature."""
  our = our_methods(args.block, None if args.prompts else args.acceptance)
  for batch, temperature in itertools.product(args.batches, args.temperatures):
    given = models, prompts, our, Sampler(temperature), batch, args
    record = dict(batch=batch, temperature=temperature)
    if args.ablate:
      record['without'] = ablation(*given)
    else:
      record |= rounds(*given)
      ours = our | more_methods(args.block) if args.prompts else our
      record['decodes'] = decodes(models, prompts, ours, *given[3:])
      record['peak_bytes'] = (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use')
    yield record


def show(record: dict) -> str:
  """Return a record as Markdown tables."""
  tables = [f'batch {record["batch"]}, T = {record["temperature"]:g}']
  for title, section in record.items():
    if isinstance(section, dict):
      columns = list(dict.fromkeys(column for row in section.values() for column in row))
      rows = [[name, *(row.get(column) for column in columns)] for name, row in section.items()]
      rows = [[float(x) if isinstance(x, np.floating) else x for x in row] for row in rows]
      tables.append(formats.markdown(dict(title=title, columns=['', *columns], rows=rows, note='')))
  return '\n\n'.join(tables)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument(
    'models', nargs='+', metavar='MODEL', help='two checkpoints, the small one first, or the name of a pair'
  )
  parser.add_argument('--dtype', default='bfloat16', help='of a pair (bfloat16)')
  parser.add_argument('--acceptance', type=float, default=0.8, help='of a pair: the chance to accept a token (.8)')
  parser.add_argument('--prompts', help='with checkpoints: a text file, one prompt a line, .gz or not')
  parser.add_argument('--count', type=commands.count, default=32, help='prompts to decode (32)')
  parser.add_argument('--prompt-tokens', type=commands.count, default=64, help='to which they are padded (64)')
  parser.add_argument('--tokens', type=commands.count, default=64, help='the most new tokens of a decode (64)')
  parser.add_argument('--ignore-eos', action='store_true', help='let every text have as many')
  parser.add_argument('--long', type=commands.count, default=192, help='new tokens where rounds are timed (192)')
  parser.add_argument('--block', type=commands.count, default=5, help='γ (5)')
  parser.add_argument('--batches', type=commands.count, nargs='+', default=[1, 8, 32])
  parser.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  parser.add_argument('--trials', type=commands.count, default=5)
  parser.add_argument('--jobs', type=commands.count, default=4, help='programs that are compiled side by side (4)')
  parser.add_argument('--reference', action='store_true', help="also time transformers' generate (extra: parity)")
  parser.add_argument('--ablate', action='store_true', help="on a CPU: time each piece of its backend's code instead")
  parser.add_argument('--json', action='store_true', help='print JSON, a line for each batch size and temperature')
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Parse the command line, measure, print."""
  parser = _parser()
  args = parser.parse_args(argv)
  if args.reference and None in map(importlib.util.find_spec, ('torch', 'transformers')):
    parser.error("--reference needs torch and transformers: pip install -e '.[parity]', or omit it")
  if (len(args.models), args.prompts is None) not in ((2, False), (1, True)):
    parser.error('give two checkpoints and --prompts, or the name of a pair')
  if args.prompts:
    args.paths = args.models
    prompts = files.texts(args.prompts, count=args.count)
    models = checkpoints.load_all(args.paths)
    models = timing.endless(models) if args.ignore_eos else models
  else:
    args.paths = (None, None)
    prompts = [[5 + (i + j) % 80 for j in range(args.prompt_tokens)] for i in range(args.count)]
    try:
      pair = zip(('small', 'large'), pair_of(*args.models, args.dtype), strict=True)
    except ValueError as error:
      parser.error(str(error))
    models = [synthetic.random_model(network, name, i) for i, (name, network) in enumerate(pair)]
  args.bandwidth = copy_bandwidth()
  machine = dict(device=jax.devices()[0].device_kind, cores=os.cpu_count(), jax=jax.__version__)
  machine |= dict(copy_gb_per_second=args.bandwidth / 1e9, command=sys.argv[1:] if argv is None else list(argv))
  print(json.dumps(machine), flush=True)
  for record in measure(models, prompts, args):
    print(json.dumps(record, default=float) if args.json else show(record), flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main())
