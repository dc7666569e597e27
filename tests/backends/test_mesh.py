"""Decoding on a mesh: the tokens and statistics of one device, from checkpoints that are read into their shards."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest
from reference import RULES
from safetensors.numpy import save_file
from tiers import long_but

from speccascade.checkpoints import hf, t5x
from speccascade.planning.synthetic import random_params
from speccascade.types import Model

HERE = pathlib.Path(__file__).parent  # of the scripts that run in processes of their own
KINDS = ['gpt2', 'gpt_neox', 'mixtral', 't5x', 't5x scanned']
MESHES = ['8x1', '4x2', '2x4', '1x8']
DRAFTED = [
  'speculative',
  'block verification',
  'naive cos',
  'opaque ensemble',
  'cos of two',
  'cos of three',
  'sv',
  'sv exact',
  'by batch',
  'bild',
  'token cascade',
  'ngram',
]
LOCKSTEP = ['autoregressive', 'ensemble', 'ensemble in parallel', 'oracle', 'sequence cascade']


def run(script: str, *args: str) -> list[dict]:
  """Return the lines of a script that runs in a process of its own."""
  env = os.environ | {
    'PYTHONPATH': os.pathsep.join([str(HERE.parent), str(HERE.parents[1]), os.environ.get('PYTHONPATH', '')]),
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run([sys.executable, str(HERE / script), *args], env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-4000:]
  return [json.loads(line) for line in done.stdout.splitlines()]


def check(*groups: list[str], accepts: bool = True, others: tuple[str, ...] = ()) -> list[dict]:
  """Check that groups of cases are the same on a mesh; return what other cases of the same process say."""
  cases = [case for group in groups for case in group]
  found = run('mesh_cases.py', *cases, *others)
  same = found[: len(cases)]
  assert [x['case'] for x in same] == cases
  assert not [x['case'] for x in same if not x['tokens'] or x['differ']]
  assert not accepts or all({*group} & {x['case'] for x in same if x['accepted']} for group in groups)
  return found[len(cases) :]


@pytest.mark.full
def test_a_mesh_decodes_what_one_device_decodes():
  halves = 'decoder:opt:1:2x1/1x4:queue:gumbel'
  cases = ['t5:speculative:1:2x4:batch', halves]
  listed, apart, head = check(cases, others=('listed', 'apart', 'refused'))
  assert listed == {'shards': 8, 'same': True}  # a network whose parameters are no dict
  assert apart['error'].startswith('s and l do not lie on the same mesh: load both with one mesh=…')
  assert head == {'error': 'head reads the states of l: load both with one mesh=….'}


@pytest.mark.long
def test_experts_turns_packed_windows_and_a_kernel_for_the_heads_of_each_chip_are_the_same_on_a_mesh():
  turns, packed = 't5:cos of two:1:4x2:batch', 'decoder:sv:1:1x8:batch'
  check(['mixtral:speculative:0:2x2x2:queue'], [turns, packed], ['decoder on tpus:opt:1:4x2:batch'])


OTHERS = {'gpt_neox': '1x8', 'stablelm': '1x8', 'mixtral': '2x2x2', 'qwen3_moe': '2x2x2', 't5gemma': '4x2'}
OTHERS['t5gemma2'] = '4x2'
MORE = {
  **{n: [f'{n}:speculative:{t}:{m}:queue' for t, m in enumerate(('2x4', other))] for n, other in OTHERS.items()},
  'coupled': ['gpt_neox:speculative:1:1x8:queue:gumbel', 't5gemma:opt:1:4x2:batch:gumbel'],
  'coupled schedule': ['decoder:scheduled:1:2x1/1x4:queue:gumbel', 't5:scheduled:1:2x1/1x4:batch'],
  'coupled turns': ['t5:cos of two:1:1x8:batch:gumbel', 'decoder:opt:1:4x2:batch:gumbel'],
  'kernels': [f't5{kind} on tpus:opt:0:2x4:queue' for kind in ('', ' scanned')] + ['t5gemma on tpus:opt:0:4x2:batch'],
  'few key-value heads': ['decoder:opt:1:1x8:queue', 'grouped on tpus:opt:0:1x8:batch'],
  'log-probabilities': ['decoder:opt:1:2x1/1x4:queue:gumbel:target', 't5:cos of two:1:1x8:batch:gumbel:target'],
  'translated': ['t5:translated:0:2x4:batch', 'decoder:translated:1:2x4:queue'],
  'one pass': ['t5:one pass:0:2x4:queue', 'decoder:one pass:1:4x2:queue'],
  'head': ['t5:head:0:2x4:queue', 'decoder:head:1:4x2:queue'],
  'layerskip': ['decoder:layerskip:0:2x4:batch', 'decoder:layerskip:1:4x2:queue'],
  'scanned': ['t5 scanned:speculative:0:1x8:queue', 't5 scanned:speculative:1:2x4:queue'],
  'int8': ['t5 of int8:speculative:0:2x4:batch', 'decoder of int8:opt:1:4x2:queue'],
}


@pytest.mark.long
@pytest.mark.parametrize('name', MORE)
def test_families_and_drafters_are_the_same_on_a_mesh(name):
  check(MORE[name])


@pytest.mark.long
@pytest.mark.parametrize('name', [*DRAFTED, *LOCKSTEP, 'one pass', 'translated'])
@pytest.mark.parametrize('family', ['t5', 'decoder'])
def test_every_method_is_the_same_where_halves_take_turns(family, name):
  kinds = ['batch:gumbel', 'queue', 'queue:gumbel']
  kinds = [kinds[1]] if name in ('block verification', 'bild') else kinds  # which have no coupling
  kinds = [f'{kind}:texts' for kind in kinds] if name.startswith('sv') else kinds
  kinds = [kind for kind in kinds if name != 'sv' or 'gumbel' in kind]
  meshes = '2x1/1x4', '4x1/2x2', '1x1/2x1'
  check([f'{family}:{name}:{t}:{meshes[i]}:{k}' for t in (0, 1) for i, k in enumerate(kinds)], accepts=name in DRAFTED)


@pytest.mark.long
@pytest.mark.parametrize('name', DRAFTED + LOCKSTEP)
@pytest.mark.parametrize('family', ['t5', 'decoder'])
def test_every_method_is_the_same_on_every_mesh(family, name):
  of = lambda i, t: f'{family}:{name}:{t}:{MESHES[i]}:{("batch", "queue")[(i + t) % 2]}'
  check([of(i, t) for t in (0, 1) for i in range(4)], accepts=name in DRAFTED)


@pytest.mark.long
@pytest.mark.parametrize('family', ['t5', 'decoder'])
def test_every_rule_is_the_same_on_a_mesh(family):
  of = lambda i, name, t: f'{family}:{name}:{t}:{MESHES[(i + 2 * t) % 4]}:{("batch", "queue")[i % 2]}'
  check([of(i, name, t) for i, name in enumerate(RULES) for t in (0, 1)])


@pytest.mark.long
def test_a_plan_times_the_kernel_that_decoding_on_a_mesh_runs():
  assert run('mesh_cases.py', 'planned') == [{'kernel': [1, 2, 3, 6], 'plain': []}]


T5 = {'model_type': 't5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False, 'eos_token_id': 1}
SMALL = {'vocab_size': 64, 'd_model': 16, 'd_kv': 4, 'd_ff': 24, 'num_layers': 2, 'num_heads': 8} | T5
LARGE = {'vocab_size': 8192, 'd_model': 2048, 'd_kv': 128, 'd_ff': 8192, 'num_layers': 6, 'num_heads': 16} | T5
GPT2 = {'model_type': 'gpt2', 'vocab_size': 64, 'n_embd': 16, 'n_layer': 2, 'n_head': 8, 'n_positions': 32}
EIGHT = {'vocab_size': 64, 'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 8}
DECODERS = {'gpt2': GPT2, 'gpt_neox': EIGHT | {'model_type': 'gpt_neox', 'rotary_pct': 1.0}}
DECODERS['mixtral'] = EIGHT | {'model_type': 'mixtral', 'num_local_experts': 4}


def written(folder: pathlib.Path, kind: str, config=SMALL) -> str:
  """Write a model with random weights in one of the formats."""
  config = DECODERS.get(kind, config)
  network = hf.network_from_config(config)
  model = Model(random_params(network), network)
  if kind.startswith('t5x'):
    (folder / 'config.gin').write_text("network.T5Config.mlp_activations = ('gelu', 'linear')\n")
    return str(t5x.write(folder / 'checkpoint_1', model, scan=kind == 't5x scanned'))
  save_file(hf.export(network, config['model_type'], jax.device_get(model.params)), folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(config))
  return str(folder)


@pytest.mark.full
@pytest.mark.parametrize('kind', long_but(['hf', *KINDS], ['hf']))
def test_a_checkpoint_is_read_and_quantised_in_its_shards_no_byte_twice(tmp_path, kind):
  cases = '2x4:float32', f'2x4:{"int8" if kind == "hf" else "float32"}:scan'
  for case, found in zip(cases, run('mesh_load.py', written(tmp_path, kind), *cases), strict=True):
    assert found['equal'] and found['most'] == 1 and found['sharded'] > (8 if kind == 'mixtral' else 10)
    assert found['read'] >= found['all'] or 'int8' in case


@pytest.mark.long
@pytest.mark.parametrize('kind', ['hf', *KINDS])
def test_each_of_two_processes_reads_what_its_devices_hold(tmp_path, kind):
  cases = ['2x4:float32', '2x4:float32:scan', '1x8:float32', '1x8:float32:scan']
  for lines in two_processes(written(tmp_path, kind), *cases):
    for i, (found, whole) in enumerate(zip(lines, (True, True, False, False), strict=True)):  # of 2x4 each holds a row
      assert found['most'] == 1 and found['read'] >= found['held'], cases[i]
      assert (found['read'] >= found['all']) == whole and (found['held'] == found['all']) == whole, cases[i]


def two_processes(*args: str) -> list[list[dict]]:
  """Return the lines of a script in each of two processes that JAX knows as one system."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = str(free.getsockname()[1])
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return list(pool.map(lambda i: run('mesh_load.py', *args, str(i), port), range(2)))


@pytest.mark.long
def test_a_large_checkpoint_takes_the_memory_of_its_shards_and_one_tensor(tmp_path):
  path = written(tmp_path, 'hf', LARGE)
  for (found,) in two_processes(path, '2x4:float32'):
    assert found['most'] == 1 and found['all'] * 4 > 2.5e9
    assert found['peak_bytes'] <= found['shard_bytes'] + found['largest_bytes'] + 5e7
