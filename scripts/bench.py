"""Measure decoding next to its floor and next to transformers, interleaved in one run.

python scripts/bench.py FOLDER/small FOLDER/large --prompts FILE [--reference] [--out result.json]
python scripts/bench.py --shapes small large [--acceptance 0.8] [--reference]   # T5 v1.1's sizes, random weights
python scripts/bench.py … --against result.json      # fail where a ratio got worse by more than its noise

With random weights the drafted tokens are accepted with a given chance, whatever the models predict; the work is that
of real ones. What is timed, each with compilation excluded and the other measurements in between:
  floor      one forward pass of each model alone at widths 1, 2 and γ + 1, in a loop on the device
  ours       each method at each batch size: tokens per second, prefill and host included; at batch 1 also the
             speed-up that prefill and the model calls made would give if nothing else took time, calls at what they
             cost alone or (`in_turn`) in texts of calls and nothing else; and, in a long text, the time of a round over
             the sum of its model calls (γ drafter steps and one verifier pass, as measured above) and over the time of
             the same calls in turn, in a loop that does nothing else; and the speed-up over the one that the tokens per
             round and the calls predict. All without what a text costs once (the difference to a decode of one token)
  reference  transformers' generate, plain and assisted, same weights, prompts and (greedy) outputs; `over_generate` is
             each method's tokens per second over the better of the two [--reference]
  cold       import, load, compile and first answer in a fresh process
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import functools
import importlib.util
import json
import os
from pathlib import Path
import platform
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, checkpoints, decode, methods, rules, Sampler
from speccascade.data import files
from speccascade.engine import inputs
from speccascade.engine.loop import positions, prefill
from speccascade.host import commands, storage
from speccascade.models import shapes
from speccascade.planning import synthetic, timing
from speccascade.types import named_apart

PROMPT_TOKENS = 48  # to which prompts are padded
COLD = """
import sys, time
start = time.perf_counter()
import speccascade
imported = time.perf_counter()
model = speccascade.load(sys.argv[1])
loaded = time.perf_counter()
speccascade.decode(speccascade.methods.autoregressive(), [model], ['A man.'], max_new_tokens=32)
print(imported - start, loaded - imported, time.perf_counter() - loaded)
"""


def bandwidth() -> Callable[[], float]:
  """Return a function that times a matrix–vector product with a matrix that no cache holds, in GB/s."""
  side = 1 << 13
  matrix = jnp.ones((side, side))

  @jax.jit
  def loop(matrix, x):
    return jax.lax.fori_loop(0, 8, lambda _, x: matrix @ (x / side), x)

  def once() -> float:
    x = jnp.ones(side)
    seconds, _ = timing.timed(lambda: loop(matrix, x).block_until_ready())
    return 8 * matrix.nbytes / seconds / 1e9

  once()  # compiles
  return once


def our_methods(block: int, rate: float | None) -> dict[str, methods.Method]:
  """Return the methods that are timed; the first is the base of the speed-ups."""
  speculative = methods.speculative(block=block)
  cascade = methods.speculative(functools.partial(rules.opt, alpha=0.1), block)
  if rate is not None:
    speculative, cascade = (method.accepting(timing.forced(rate)) for method in (speculative, cascade))
  made = {'autoregressive': methods.autoregressive(1), 'speculative': speculative, 'cascade opt': cascade}
  if rate is not None:
    return made
  return made | {
    'token cascade': methods.token_cascade(functools.partial(rules.chow, alpha=0.3)),
    'cos': methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), (block, 1)),
    'ensemble': methods.ensemble(functools.partial(rules.weighted, weights=(0.5, 0.5))),
  }


def our_runs(models, prompts, our, temperature, batch, tokens):
  """Return {name: function that decodes all prompts once and returns (seconds, Decoded)}."""

  def once(method):
    sizes = dict(max_new_tokens=tokens, batch_size=batch, max_prompt_tokens=PROMPT_TOKENS)
    return timing.timed(lambda: decode(method, models, prompts, sampler=Sampler(temperature), **sizes))

  return {name: functools.partial(once, method) for name, method in our.items()}


def reference_models(paths, models):
  """Return transformers' models for the same checkpoints, or of the same sizes."""
  import torch
  import transformers

  for path, model in zip(paths, models, strict=True):
    if path is None:
      c = model.network.config
      config = transformers.T5Config(
        vocab_size=c.vocab_size,
        d_model=c.embed_dim,
        d_kv=c.head_dim,
        d_ff=c.mlp_dim,
        num_layers=c.encoder_layers,
        num_heads=c.heads,
        feed_forward_proj='gated-gelu',
        decoder_start_token_id=0,
        eos_token_id=None,
      )
      yield transformers.T5ForConditionalGeneration(config).eval()
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


def reference_runs(paths, models, prompts, batch, tokens):
  """Return the same for transformers' greedy generate, plain and (one row at a time, real weights) assisted."""
  import torch

  small, large = reference_models(paths, models)
  rows = [p if isinstance(p, list) else models[1].tokenizer.encode(p) for p in prompts]
  rows = [rows[i] for i in inputs.by_length(rows)]  # batches of like length, as ours
  causal, ends = models[1].network.start_id is None, large.generation_config.eos_token_id

  def once(**kwargs):
    start, count = time.perf_counter(), 0
    for i in range(0, len(rows), batch):
      ids, mask = (torch.tensor(x) for x in padded(rows[i : i + batch], left=causal))
      with torch.no_grad():
        out = large.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **kwargs)
      count += answered(out[:, ids.shape[1] if causal else 1 :].numpy(), ends)
    return time.perf_counter() - start, count

  runs = {'generate': once}
  if batch == 1 and paths[0] is not None:
    runs['generate assisted'] = functools.partial(once, assistant_model=small)
  return runs


TIMED = ('autoregressive', 'speculative', 'cascade opt')  # whose rounds and calls are compared with the floor


def passes_alone(models, block: int, **sizes) -> dict[str, Callable[[], float]]:
  """Return functions that time a drafter step, a verifier step and a verifier window, in this order."""
  small, large = models
  passes = ((small, 1), (large, 1), (large, block + 1))
  return {f'{m.name} {w}': timing.forward_seconds(m, 1, w, **sizes) for m, w in passes}


def rounds(models, prompt, our, temperature, args) -> dict[str, dict[str, float]]:
  """Return how near a round is to its calls, and a speed-up to what they predict, in one interleaved run."""
  models = timing.endless(models)
  long = functools.partial(timing.round_seconds, tokens=args.long, sampler=Sampler(temperature))
  some = {n: long(our[n], models, [prompt]) for n in TIMED}
  drafts = {'speculative': args.block, 'cascade opt': args.block + 1}
  sizes = dict(tokens=args.long, most=args.long)  # as long as the text: the first passes of a loop are dearer
  floor = passes_alone(models, args.block, **sizes)
  passes = {name: [(models[0], 1, n), (models[1], args.block + 1, 1)] for name, n in drafts.items()}
  turns = {f'calls of {name}': timing.passes_seconds(row, **sizes) for name, row in passes.items()}
  done = timing.interleave(some | floor | turns, max(args.trials, 5))
  draft, plain, verify = (float(np.median(done[n])) for n in floor)
  found = {n: [float(np.median(x)) for x in zip(*done[n], strict=True)] for n in TIMED}
  result = {'autoregressive': {'round_over_calls': found['autoregressive'][0] / plain}}
  for name, n in drafts.items():
    calls = n * draft + verify
    speedup = found['autoregressive'][1] / found[name][1]
    predicted = found[name][2] * plain / calls
    result[name] = dict(
      round_over_calls=found[name][0] / calls,
      over_calls_in_turn=found[name][0] / np.median(done[f'calls of {name}']),
      tokens_per_round=found[name][2],
      long_speedup=speedup,
      predicted=predicted,
      measured_over_predicted=speedup / predicted,
    )
  return result


def possible(models, prompts, runs, calls, args) -> dict[str, dict[str, float]]:
  """Return the speed-up on the prompts that prefill and model calls alone would give, and how much of it there is.

  Calls are those that were made, {method: [M, texts]}; a prompt is read as in `decode`, by one program for all models
  of the method. A call costs what it costs alone or, for `of_possible_in_turn`, in its sequence: in texts of calls and
  nothing else.
  """
  rows = inputs.encode(models, prompts)
  slots = positions(models[1].network, PROMPT_TOKENS, args.tokens, args.block + 1)
  padded = [inputs.pad([row], 1, PROMPT_TOKENS) for row in rows]
  backend, _ = backends.prepared(models)

  def loop_of(some, widths) -> Callable:
    return timing.passes_loop([m.network for m in some], backend, widths, 1, PROMPT_TOKENS, slots)

  def texts(some, loop=None, calls=None) -> Callable[[], float]:
    networks = tuple(m.network.on(backend.for_slot(n)) for n, m in enumerate(some))
    _, params = backends.prepared(some)

    def seconds() -> float:
      start = time.perf_counter()
      for i, prompt in enumerate(padded):
        caches = prefill(networks, params, prompt, slots)
        jax.block_until_ready(loop(params, caches, calls[-1][i], list(calls[:, i])) if loop else caches)
      return time.perf_counter() - start

    return seconds

  large, by_turns = models[1:], loop_of(models, (1, args.block + 1))
  floor = passes_alone(models, args.block, source=PROMPT_TOKENS, tokens=args.tokens, window=args.block + 1)
  alone = {'read by one': texts(large), 'read by both': texts(models)} | floor
  bare = {f'calls of {n}': texts(models, by_turns, calls[n]) for n in TIMED[1:]}
  bare |= {'calls of autoregressive': texts(large, loop_of(large, (1,)), calls['autoregressive'][-1:])}
  timed = {n: lambda run=runs[n]: run()[0] for n in TIMED}
  took = {n: float(np.median(x)) for n, x in timing.interleave(timed | alone | bare, max(args.trials, 9)).items()}
  by_one, by_two, draft, plain, window = (took[n] for n in alone)
  least, found = by_one + plain * calls['autoregressive'][-1].sum(), {}
  for name in TIMED[1:]:
    drafts, verified = calls[name].sum(1)
    speedup = took['autoregressive'] / took[name]
    most = float(least / (by_two + draft * drafts + window * verified))
    most_in_turn = took['calls of autoregressive'] / took[f'calls of {name}']
    found[name] = dict(possible=most, of_possible=speedup / most, of_possible_in_turn=speedup / most_in_turn)
  return found


def cold_start(path: str) -> dict[str, float]:
  """Return the seconds of import, load, and the first answer, in a new process without a compilation cache."""
  env = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
  out = subprocess.run([sys.executable, '-c', COLD, path], capture_output=True, text=True, check=True, env=env)
  return dict(zip(('import', 'load', 'compile and first answer'), map(float, out.stdout.split()), strict=True))


def floors(models, batch: int, block: int, trials: int) -> dict:
  """Return the median seconds of forward passes, and the bandwidth that they reach next to a plain product's."""
  source = dict(source=PROMPT_TOKENS)
  seconds = timing.measure(models, (2, block + 1), batch=batch, trials=trials, **source)
  one = {m.name: timing.forward_seconds(m, batch, window=block + 1, **source) for m in models}
  done = timing.interleave(one | {'product': bandwidth()}, max(trials, 5))
  speed = {'product': float(np.median(done['product']))}
  for m in models:
    seconds[m.name] = {'1': float(np.median(done[m.name])), **seconds[m.name]}
    speed[m.name] = synthetic.weight_bytes(backends.prepared([m])[1][0]) / seconds[m.name]['1'] / 1e9
  return {'seconds': seconds, 'GB/s': speed}


def measure(args, models, prompts) -> Iterator[dict]:
  """Yield one record for each temperature and batch size."""
  for batch in args.batches:
    stage(f'batch {batch}: forward passes')
    floor = floors(models, batch, args.block, args.trials)
    for temperature in args.temperatures:
      our = our_methods(args.block, args.acceptance if args.shapes else None)
      runs = our_runs(models, prompts, our, temperature, batch, args.tokens)
      if args.reference and temperature == 0:
        runs |= reference_runs((args.small, args.large), models, prompts, batch, args.tokens)
      stage(f'batch {batch}, T = {temperature:g}: {", ".join(runs)}')
      done = timing.interleave(runs, args.trials)
      rates = {}
      for name, trials in done.items():
        counts = [x if isinstance(x, int) else int(x.stats.emitted.sum()) for _, x in trials]
        rates[name] = [c / s for c, (s, _) in zip(counts, trials, strict=True)]
      base = np.array(rates['autoregressive'])
      theirs = [rate for name, rate in rates.items() if name.startswith('generate')]
      record = dict(batch=batch, temperature=temperature, floor=floor, methods={})
      for name, rate in rates.items():
        ratio = np.array(rate) / base
        record['methods'][name] = dict(
          tokens_per_second=float(np.median(rate)), speedup=float(np.median(ratio)), noise=float(np.ptp(ratio) / 2)
        )
        if theirs:
          record['methods'][name]['over_generate'] = float(np.median(np.array(rate) / np.max(theirs, 0)))
      if batch == 1:
        stage(f'batch {batch}, T = {temperature:g}: rounds of a long text')
        for name, found in rounds(models, prompts[0], our, temperature, args).items():
          record['methods'][name] |= found
        calls = {n: done[n][0][1].stats.calls.astype(np.int32) for n in TIMED}
        best = possible(models, prompts, runs, calls, args)
        for name in TIMED[1:]:
          s = done[name][0][1].stats
          record['methods'][name] |= best[name]
          record['methods'][name]['acceptance'] = float(s.accepted.sum() / s.tested.sum())
      show(record)
      yield record


def cpu() -> str:
  """Return the processor's name, and which of the instructions that make products fast it has."""
  info = Path('/proc/cpuinfo')
  text = info.read_text() if info.exists() else ''
  name = re.search(r'^model name\s*:\s*(.*)$', text, re.MULTILINE)
  fast = [x for x in ('avx2', 'avx512f', 'amx_tile') if re.search(rf'^flags\b.*\b{x}\b', text, re.MULTILINE)]
  return ' '.join([name[1] if name else platform.processor(), *fast])


def stage(text: str):
  """Say what is being measured."""
  print(f'{time.strftime("%H:%M:%S")} {text} …', file=sys.stderr, flush=True)


SHOWN = (
  'over_generate',
  'possible',
  'of_possible',
  'of_possible_in_turn',
  'round_over_calls',
  'over_calls_in_turn',
  'acceptance',
  'tokens_per_round',
  'long_speedup',
  'predicted',
  'measured_over_predicted',
)


def show(record: dict):
  """Print one record as a table."""
  print(f'\nbatch {record["batch"]}, T = {record["temperature"]:g}')
  for name, seconds in record['floor']['seconds'].items():
    print(f'  {name}, ms by width: ' + ', '.join(f'{w}: {1e3 * s:.3g}' for w, s in seconds.items()))
  print('  weights read, GB/s: ' + ', '.join(f'{k} {v:.1f}' for k, v in record['floor']['GB/s'].items()))
  for name, m in record['methods'].items():
    more = ''.join(f'  {k} {m[k]:.2f}' for k in SHOWN if k in m)
    print(
      f'  {name:<20}{m["tokens_per_second"]:9.1f} tokens/s  {m["speedup"]:5.2f}× ± {m["noise"]:.2f}{more}', flush=True
    )


def earlier(path: str) -> list[dict]:
  """Return the records of an earlier run."""
  try:
    return json.loads(Path(path).read_text())['records']
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise argparse.ArgumentTypeError(f'{path} cannot be read ({error!r}): give a file that --out wrote') from error


def compare(new: list[dict], old: list[dict]) -> list[str]:
  """Return what got worse than before by more than the noise of both."""
  worse, before = [], {(r['batch'], r['temperature']): r['methods'] for r in old}
  for record in new:
    for name, m in before.get((record['batch'], record['temperature']), {}).items():
      now = record['methods'].get(name)
      if now and now['speedup'] < m['speedup'] - m['noise'] - now['noise']:
        worse.append(
          f'batch {record["batch"]}, T = {record["temperature"]:g}, {name}: {m["speedup"]:.2f}× → {now["speedup"]:.2f}×'
        )
  return worse


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('small', nargs='?', help='checkpoint of the drafter')
  parser.add_argument('large', nargs='?', help='checkpoint of the verifier')
  parser.add_argument('--shapes', nargs=2, choices=shapes.T5_V1_1, help='instead of checkpoints: sizes of T5 v1.1')
  parser.add_argument('--acceptance', type=float, default=0.8, help='with --shapes: the acceptance rate')
  parser.add_argument('--prompts', type=Path, help='with checkpoints: a text file, one prompt a line, .gz or not')
  parser.add_argument('--count', type=commands.count, default=32, help='prompts to decode')
  parser.add_argument('--tokens', type=commands.count, default=64, help='the most new tokens')
  parser.add_argument('--ignore-eos', action='store_true', help='let every text have --tokens tokens')
  parser.add_argument(
    '--long', type=commands.count, default=192, help='new tokens of the long decode that rounds are timed in'
  )
  parser.add_argument('--block', type=commands.count, default=5, help='γ')
  parser.add_argument('--batches', type=commands.count, nargs='+', default=[1, 4, 16, 32])
  parser.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  parser.add_argument('--trials', type=commands.count, default=5)
  parser.add_argument('--reference', action='store_true', help="also time transformers' generate (extra: parity)")
  parser.add_argument('--out', type=Path, help='write the figures as JSON')
  parser.add_argument('--against', type=earlier, default=[], help='compare with the figures of an earlier run')
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Parse the command line, measure, write."""
  parser = _parser()
  args = parser.parse_args(argv)
  if args.reference and None in map(importlib.util.find_spec, ('torch', 'transformers')):
    parser.error("--reference needs torch and transformers: pip install -e '.[parity]', or omit it")
  if args.shapes:
    prompts = [[5 + i % 90 for i in range(16)]] * args.count
    models = named_apart([synthetic.random_model(shapes.t5(shape, 'float32'), shape) for shape in args.shapes])
  elif not (args.small and args.large and args.prompts):
    parser.error('give two checkpoints and --prompts, or --shapes')
  else:
    prompts = files.lines(args.prompts)[: args.count]
    models = checkpoints.load_all((args.small, args.large))
    models = timing.endless(models) if args.ignore_eos else models
  machine = dict(device=jax.devices()[0].device_kind, cpu=cpu(), cores=os.cpu_count(), jax=jax.__version__)
  cold = cold_start(args.large) if args.large else None
  print(f'{machine}\ncold start, s: {cold}')
  result = dict(machine=machine, cold=cold, command=sys.argv[1:] if argv is None else list(argv), records=[])
  for record in measure(args, models, prompts):
    result['records'].append(record)
    if args.out:
      storage.write(args.out, json.dumps(result, indent=1) + '\n')
  worse = compare(result['records'], args.against)
  print('\n'.join(['', *(f'worse: {w}' for w in worse)]))
  return 1 if worse else 0


if __name__ == '__main__':
  sys.exit(main())
