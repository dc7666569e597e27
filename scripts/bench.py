"""Measure decoding beside its floor and beside transformers, interleaved in one run.

python scripts/bench.py FOLDER/small FOLDER/large --prompts FILE [--reference] [--out result.json]
python scripts/bench.py … --against result.json      # fail where a ratio got worse by more than its noise

What is timed, each with compilation excluded and the other measurements in between:
  floor      one forward pass of each model alone at widths 1, 2 and γ + 1, in a loop on the device
  ours       each method at each batch size: tokens per second; at batch 1 also the time of a round over the sum
             of its model calls (γ drafter steps and one verifier pass, as measured above)
  reference  transformers' generate, plain and assisted, same weights, prompts and (greedy) outputs [--reference]
  cold       import, load, compile and first answer in a fresh process
"""

import argparse
import dataclasses
import functools
import gzip
import json
import os
from pathlib import Path
import platform
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import speccascade
from speccascade import decode, methods, rules, Sampler
from speccascade.types import Prompt

COLD = """
import sys, time
start = time.perf_counter()
import speccascade
imported = time.perf_counter()
model = speccascade.load(sys.argv[1], dtype='float32')
loaded = time.perf_counter()
speccascade.decode(speccascade.methods.autoregressive(), [model], ['A man.'], max_new_tokens=32)
print(imported - start, loaded - imported, time.perf_counter() - loaded)
"""


def forward_seconds(model, batch: int, width: int, *, source: int = 16, slots: int = 128, steps: int = 64):
  """Return a function that times one forward pass of `width` tokens, in a loop that feeds each pass's output on."""
  network, tokens = model.network, jnp.ones((batch, width), jnp.int32)
  prompt = Prompt(jnp.ones((batch, source), jnp.int32), jnp.full(batch, source, jnp.int32))
  cache = jax.jit(network.prefill, static_argnums=2)(model.params, prompt, slots)

  @jax.jit
  def loop(params, cache):
    def step(i, carry):
      tokens, cache = carry
      position = jnp.broadcast_to(16 + i % 32 + jnp.arange(width)[None], (batch, width))
      logits, cache = network.extend(params, cache, tokens, position)
      return jnp.minimum(logits.argmax(-1).astype(jnp.int32), 5), cache

    return jax.lax.fori_loop(0, steps, step, (tokens, cache))[0]

  loop(model.params, cache).block_until_ready()

  def once():
    start = time.perf_counter()
    loop(model.params, cache).block_until_ready()
    return (time.perf_counter() - start) / steps

  return once


def weight_bytes(model) -> int:
  """Return the bytes of the parameters that a decoding step reads: not the encoder, not the embedding table."""
  leaves = jax.tree_util.tree_leaves_with_path(model.params)
  tied = 'logits_dense' not in model.params and 'logits_dense' not in model.params.get('decoder', {})
  skip = ['encoder'] + ([] if tied else ['token_embedder'])
  return sum(x.nbytes for path, x in leaves if path[0].key not in skip)


def our_methods(block: int) -> dict[str, methods.Method]:
  """Return the methods that are timed; the first is the base of the speed-ups."""
  return {
    'autoregressive': methods.autoregressive(1),
    'speculative': methods.speculative(block=block),
    'cascade opt': methods.speculative(functools.partial(rules.opt, alpha=0.1), block),
    'token cascade': methods.token_cascade(functools.partial(rules.chow, alpha=0.3)),
    'cos': methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), (block, 1)),
    'ensemble': methods.ensemble(functools.partial(rules.weighted, weights=(0.5, 0.5))),
  }


def our_runs(models, prompts, block, temperature, batch, tokens):
  """Return {name: function that decodes all prompts once and returns (seconds, Decoded)}."""

  def once(method):
    start = time.perf_counter()
    out = decode(
      method, models, prompts, max_new_tokens=tokens, sampler=Sampler(temperature), batch_size=batch,
      max_prompt_tokens=48,
    )  # fmt: skip
    return time.perf_counter() - start, out

  return {name: functools.partial(once, method) for name, method in our_methods(block).items()}


def reference_runs(paths, models, prompts, batch, tokens):
  """Return the same for transformers' greedy generate, plain and (one row at a time) assisted."""
  import torch
  import transformers

  small, large = (
    transformers.AutoModelForSeq2SeqLM.from_pretrained(p, dtype=torch.float32).eval() if m.network.start_id is not None
    else transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval()
    for p, m in zip(paths, models, strict=True)
  )  # fmt: skip
  rows = [models[1].tokenizer.encode(p) for p in prompts]

  def once(**kwargs):
    start, count = time.perf_counter(), 0
    for i in range(0, len(rows), batch):
      some = rows[i : i + batch]
      width = max(len(r) for r in some)
      ids = torch.tensor([r + [0] * (width - len(r)) for r in some])
      mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in some])
      with torch.no_grad():
        out = large.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **kwargs)
      count += int((out[:, 1:] != 0).sum())
    return time.perf_counter() - start, count

  runs = {'generate': once}
  if batch == 1:
    runs['generate assisted'] = functools.partial(once, assistant_model=small)
  return runs


def round_seconds(models, prompt: str, method, temperature: float, tokens: int = 192):
  """Return a function that times a round of a long decode of one prompt, EOS ignored."""
  models = [m.replace(network=dataclasses.replace(m.network, eos_ids=())) for m in models]

  def once():
    start = time.perf_counter()
    out = decode(method, models, [prompt], max_new_tokens=tokens, sampler=Sampler(temperature))
    return (time.perf_counter() - start) / out.stats.rounds[0]

  return once


def cold_start(path: str) -> dict[str, float]:
  """Return the seconds of import, load, and the first answer, in a process of its own without a compilation cache."""
  env = {k: v for k, v in os.environ.items() if k != 'JAX_COMPILATION_CACHE_DIR'}
  out = subprocess.run([sys.executable, '-c', COLD, path], capture_output=True, text=True, check=True, env=env)
  return dict(zip(('import', 'load', 'compile and first answer'), map(float, out.stdout.split()), strict=True))


def interleave(runs: dict, trials: int) -> dict[str, list]:
  """Run everything once unrecorded, then `trials` times in turn."""
  results = {name: [] for name in runs}
  for trial in range(trials + 1):
    for name, run in runs.items():
      value = run()
      if trial:
        results[name].append(value)
  return results


def floors(models, batch: int, block: int, trials: int) -> dict:
  """Return the median seconds of forward passes and the bandwidth that they reach."""
  runs = {
    f'{m.name} width {w}': forward_seconds(m, batch, w) for m in models for w in (1, 2, block + 1)
  }  # fmt: skip
  seconds = {name: float(np.median(x)) for name, x in interleave(runs, trials).items()}
  bandwidth = {m.name: weight_bytes(m) / seconds[f'{m.name} width 1'] / 1e9 for m in models}
  return {'seconds': seconds, 'weight GB/s': bandwidth}


def measure(args, models, prompts) -> list[dict]:
  """Return one record for each temperature and batch size."""
  records = []
  small, large = models
  for batch in args.batches:
    floor = floors(models, batch, args.block, args.trials)
    one, verify = floor['seconds'][f'{small.name} width 1'], floor['seconds'][f'{large.name} width {args.block + 1}']
    for temperature in args.temperatures:
      runs = our_runs(models, prompts, args.block, temperature, batch, args.tokens)
      if args.reference and temperature == 0:
        runs |= reference_runs((args.small, args.large), models, prompts, batch, args.tokens)
      done = interleave(runs, args.trials)
      rates = {}
      for name, trials in done.items():
        counts = [x if isinstance(x, int) else int(x.stats.emitted.sum()) for _, x in trials]
        rates[name] = [c / s for c, (s, _) in zip(counts, trials, strict=True)]
      base = np.array(rates['autoregressive'])
      record = dict(batch=batch, temperature=temperature, floor=floor, methods={})
      for name, rate in rates.items():
        ratio = np.array(rate) / base
        record['methods'][name] = dict(
          tokens_per_second=float(np.median(rate)), speedup=float(np.median(ratio)), noise=float(np.ptp(ratio) / 2)
        )
      if batch == 1:
        for name, calls in (('speculative', args.block), ('cascade opt', args.block + 1)):
          method = our_methods(args.block)[name]
          each = np.median(
            interleave({name: round_seconds(models, prompts[0], method, temperature)}, args.trials)[name]
          )
          record['methods'][name]['round_over_calls'] = float(each / (calls * one + verify))
          s = done[name][0][1].stats
          record['methods'][name]['acceptance'] = float(s.accepted.sum() / s.tested.sum())
      records.append(record)
      show(record)
  return records


def show(record: dict):
  """Print one record as a table."""
  print(f'\nbatch {record["batch"]}, T = {record["temperature"]:g}')
  print('  forward, ms: ' + ', '.join(f'{k} {1e3 * v:.2f}' for k, v in record['floor']['seconds'].items()))
  print('  weights, GB/s: ' + ', '.join(f'{k} {v:.1f}' for k, v in record['floor']['weight GB/s'].items()))
  for name, m in record['methods'].items():
    more = ''.join(f'  {k} {m[k]:.2f}' for k in ('round_over_calls', 'acceptance') if k in m)
    print(
      f'  {name:<20}{m["tokens_per_second"]:9.1f} tokens/s  {m["speedup"]:5.2f}× ± {m["noise"]:.2f}{more}', flush=True
    )


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


def main() -> int:
  """Parse the command line, measure, write."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('small', help='checkpoint of the drafter')
  parser.add_argument('large', help='checkpoint of the verifier')
  parser.add_argument('--prompts', type=Path, required=True, help='a text file, one prompt a line, .gz or not')
  parser.add_argument('--count', type=int, default=32, help='prompts to decode')
  parser.add_argument('--tokens', type=int, default=64, help='the most new tokens')
  parser.add_argument('--block', type=int, default=5, help='γ')
  parser.add_argument('--batches', type=int, nargs='+', default=[1, 4, 16, 32])
  parser.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  parser.add_argument('--trials', type=int, default=5)
  parser.add_argument('--reference', action='store_true', help="also time transformers' generate (extra: parity)")
  parser.add_argument('--out', type=Path, help='write the figures as JSON')
  parser.add_argument('--against', type=Path, help='compare with the figures of an earlier run')
  args = parser.parse_args()
  opener = gzip.open if args.prompts.suffix == '.gz' else open
  with opener(args.prompts, 'rt', encoding='utf-8') as f:
    prompts = [line.rstrip('\n') for line in f][: args.count]
  models = [speccascade.load(p, dtype='float32') for p in (args.small, args.large)]
  machine = dict(
    device=jax.devices()[0].device_kind, cpu=platform.processor(), cores=os.cpu_count(), jax=jax.__version__
  )
  cold = cold_start(args.large)
  print(f'{machine}\ncold start, s: {cold}')
  result = dict(machine=machine, cold=cold, command=sys.argv[1:], records=measure(args, models, prompts))
  if args.out:
    args.out.write_text(json.dumps(result, indent=1) + '\n')
  worse = compare(result['records'], json.loads(args.against.read_text())['records']) if args.against else []
  print('\n'.join(['', *(f'worse: {w}' for w in worse)]))
  return 1 if worse else 0


if __name__ == '__main__':
  sys.exit(main())
