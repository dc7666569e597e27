"""Measure how long loading a large checkpoint takes and how much memory, and how long a large model compiles.

python scripts/measure_load.py [--billions 3]

A Llama-like checkpoint of random bfloat16 weights is written to the temporary directory and removed again. It is
loaded in a new process, whose peak resident memory is reported over the checkpoint's size.
"""

import argparse
import json
from pathlib import Path
import resource
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from speccascade.checkpoints.hf import network_from_config
from speccascade.types import Prompt

LOAD = """
import resource, sys, time
from speccascade import checkpoints
start = time.perf_counter()
checkpoints.read(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter() - start)
"""
CONFIG = dict(
  model_type='llama',
  hidden_size=3072,
  intermediate_size=8192,
  vocab_size=128256,
  num_attention_heads=24,
  num_key_value_heads=8,
  tie_word_embeddings=True,
  rms_norm_eps=1e-5,
  eos_token_id=2,
)


def write(folder: Path, billions: float) -> int:
  """Write a random checkpoint in two shards; return its bytes."""
  layers = round(28 * billions / 3.2)
  width, inner, vocab = (CONFIG[name] for name in ('hidden_size', 'intermediate_size', 'vocab_size'))
  kv = CONFIG['num_key_value_heads'] * (width // CONFIG['num_attention_heads'])
  (folder / 'config.json').write_text(json.dumps(CONFIG | {'num_hidden_layers': layers}))
  rng = np.random.default_rng(0)

  def tensor(*shape):
    return (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

  shapes = {
    'self_attn.q_proj': (width, width),
    'self_attn.k_proj': (kv, width),
    'self_attn.v_proj': (kv, width),
    'self_attn.o_proj': (width, width),
    'mlp.gate_proj': (inner, width),
    'mlp.up_proj': (inner, width),
    'mlp.down_proj': (width, inner),
    'input_layernorm': (width,),
    'post_attention_layernorm': (width,),
  }
  where = {}
  for shard in range(2):
    name, tensors = f'model-{shard + 1:05d}-of-00002.safetensors', {}
    for i in range(shard, layers, 2):
      tensors |= {f'model.layers.{i}.{k}.weight': tensor(*shape) for k, shape in shapes.items()}
    if shard == 0:
      tensors |= {'model.embed_tokens.weight': tensor(vocab, width), 'model.norm.weight': tensor(width)}
    save_file(tensors, folder / name)
    where |= dict.fromkeys(tensors, name)
    del tensors
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': where}))
  return sum(f.stat().st_size for f in folder.glob('*.safetensors'))


def compile_times():
  """Print trace and compile seconds of one decoding step of T5 shapes, unrolled and scanned."""
  sizes = {'T5-large': (1024, 16, 2816, 24), 'T5-XL': (2048, 32, 5120, 24)}
  for name, (width, heads, inner, layers) in sizes.items():
    config = dict(
      model_type='t5',
      d_model=width,
      num_heads=heads,
      d_kv=64,
      d_ff=inner,
      num_layers=layers,
      vocab_size=32128,
      feed_forward_proj='gated-gelu',
      tie_word_embeddings=False,
      decoder_start_token_id=0,
      eos_token_id=1,
    )
    for scan in (False, True):
      network = network_from_config(config, dtype='bfloat16', scan=scan)
      params, tokens = network.param_shapes(), jnp.zeros((1, 1), jnp.int32)
      prompt = Prompt(jax.ShapeDtypeStruct((1, 64), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
      cache = jax.eval_shape(lambda p, t, network=network: network.prefill(p, t, 128), params, prompt)
      start = time.perf_counter()
      jax.jit(network.extend).lower(params, cache, tokens, tokens).compile()
      print(f'{name} {"scan" if scan else "unrolled":<9} {time.perf_counter() - start:.1f} s', flush=True)


def main():
  """Write, load in another process, report."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--billions', type=float, default=3.2)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    size = write(Path(folder), args.billions)
    out = subprocess.run([sys.executable, '-c', LOAD, folder], capture_output=True, text=True, check=True)
  peak, seconds = (float(x) for x in out.stdout.split())
  print(f'{size / 1e9:.2f} GB: {seconds:.1f} s, peak {peak * 1024 / size:.2f} × its size')
  print(f'(writing it: peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB)')
  compile_times()


if __name__ == '__main__':
  main()
