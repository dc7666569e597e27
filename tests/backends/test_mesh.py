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
from tiers import quick

from speccascade.checkpoints import hf, orbax, t5x
from speccascade.planning.synthetic import random_params
from speccascade.types import Model

HERE = pathlib.Path(__file__).parent  # of the scripts that run in processes of their own
KINDS = ['gpt2', 'gpt_neox', 'mixtral', 't5x', 't5x scanned', 'orbax']
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


def test_a_mesh_decodes_what_one_device_decodes():
  cases = ['t5:speculative:1:2x4:batch', 'decoder:opt:0:4x2:queue:distributions', 'decoder:opt:1:2x1/1x4:queue']
  listed, apart = check(cases, others=('listed', 'apart'))
  assert listed == {'shards': 8, 'same': True}  # a network whose parameters are no dict
  assert apart['error'].startswith('s and l do not lie on the same mesh: load both with one mesh=…')


@pytest.mark.full
def test_phases_of_each_kind_and_drafters_of_another_are_the_same_on_a_mesh():
  names = ['cos of three', 'block verification', 'bild', 'sv']
  phases = [f'{("t5", "decoder")[i % 2]}:{name}:{i // 2}:{MESHES[i]}:queue' for i, name in enumerate(names)]
  check(phases, ['decoder:head:1:2x4:batch', 't5:one pass:0:4x2:queue'])


@pytest.mark.full
def test_halves_of_a_batch_take_turns_on_the_meshes_of_drafters_and_verifier():
  maximal = ['t5:cos of two:1:1x1/1x1:batch', 'decoder:naive cos:1:2x1/1x4:queue:distributions']
  coupled = ['t5:opaque ensemble:1:1x2/2x1:queue:gumbel', 'decoder:sv:1:4x1/1x4:batch:gumbel:texts']
  (apart,) = check(maximal, coupled, ['t5:sv exact:1:2x1/1x4:queue:texts'], others=('refused',))
  assert apart == {'error': 'head reads the states of l: load both with one mesh=….'}


@pytest.mark.long
@pytest.mark.parametrize('name', [*DRAFTED, *LOCKSTEP, 'one pass', 'translated'])
@pytest.mark.parametrize('family', ['t5', 'decoder'])
def test_every_method_is_the_same_where_halves_take_turns(family, name):
  kinds = ['batch:gumbel', 'queue', 'queue:distributions:gumbel']
  kinds = [kinds[1]] if name in ('block verification', 'bild') else kinds  # which have no coupling
  kinds = [f'{kind}:texts' for kind in kinds] if name.startswith('sv') else kinds
  kinds = [kind for kind in kinds if name != 'sv' or 'gumbel' in kind]
  meshes = '2x1/1x4', '4x1/2x2', '1x1/2x1'
  check([f'{family}:{name}:{t}:{meshes[i]}:{k}' for t in (0, 1) for i, k in enumerate(kinds)], accepts=name in DRAFTED)


@pytest.mark.full
def test_coupled_texts_and_a_kernel_for_the_heads_of_each_chip_are_the_same_on_a_mesh():
  coupled = ['gpt_neox:speculative:1:1x8:queue:gumbel', 't5gemma:opt:1:4x2:batch:distributions:gumbel']
  kernels = ['t5 on tpus:opt:0:2x4:queue', 'decoder on tpus:opt:1:4x2:batch']
  check(coupled, ['mixtral:speculative:0:2x2x2:queue'], kernels)


@pytest.mark.long
def test_families_are_the_same_on_a_mesh():
  others = {'gpt_neox': '1x8', 'stablelm': '1x8', 'mixtral': '2x2x2', 'qwen3_moe': '2x2x2', 't5gemma': '4x2'}
  check(*([f'{n}:speculative:{t}:{m}:queue' for t, m in enumerate(('2x4', other))] for n, other in others.items()))


@pytest.mark.long
def test_more_coupled_texts_and_a_kernel_are_the_same_on_a_mesh():
  cases = ['t5:speculative:1:2x4:queue', 'decoder:opt:1:4x2:batch:distributions', 't5:cos of two:1:1x8:batch']
  check([f'{case}:gumbel' for case in cases], ['t5gemma on tpus:opt:0:4x2:batch'])


@pytest.mark.long
@pytest.mark.parametrize('name', DRAFTED + LOCKSTEP)
@pytest.mark.parametrize('family', ['t5', 'decoder'])
def test_every_method_is_the_same_on_every_mesh(family, name):
  kinds = ['batch', 'queue', 'batch:distributions', 'queue:distributions']
  of = lambda i, t: f'{family}:{name}:{t}:{MESHES[i]}:{kinds[(i + t) % 4]}'
  check([of(i, t) for t in (0, 1) for i in range(4)], accepts=name in DRAFTED)


@pytest.mark.long
@pytest.mark.parametrize('family', ['t5', 'decoder'])
def test_every_rule_is_the_same_on_a_mesh(family):
  kinds = ['batch', 'queue:distributions', 'queue', 'batch:distributions']
  check([f'{family}:{r}:{t}:{MESHES[(i + 2 * t) % 4]}:{kinds[i % 4]}' for i, r in enumerate(RULES) for t in (0, 1)])


@pytest.mark.long
def test_made_drafters_and_scanned_layers_are_the_same_on_a_mesh():
  cases = [f'{f}:translated:{t}:2x4:{k}' for t, f, k in ((0, 't5', 'batch'), (1, 'decoder', 'queue:distributions'))]
  cases += [
    f'{f}:{n}:{t}:{m}:queue' for n in ('one pass', 'head') for f, t, m in (('t5', 0, '2x4'), ('decoder', 1, '4x2'))
  ]
  cases += [f'decoder:layerskip:{t}:{m}:{k}' for t, m, k in ((0, '2x4', 'batch'), (1, '4x2', 'queue'))]
  check(cases + [f't5 scanned:speculative:{t}:{m}:queue' for t, m in ((0, '1x8'), (1, '2x4'))])


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
  if kind == 'orbax':
    return str(orbax.save(folder / kind, model))
  if kind.startswith('t5x'):
    (folder / 'config.gin').write_text("network.T5Config.mlp_activations = ('gelu', 'linear')\n")
    return str(t5x.write(folder / 'checkpoint_1', model, scan=kind == 't5x scanned'))
  save_file(hf.export(network, config['model_type'], jax.device_get(model.params)), folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(config))
  return str(folder)


@pytest.mark.parametrize('kind', quick(['hf', *KINDS], ['hf'], ['t5x scanned']))
def test_a_checkpoint_is_read_into_its_shards_no_byte_twice(tmp_path, kind):
  path = written(tmp_path, kind)
  both = run('mesh_load.py', path, '2x4', 'both')
  assert len(both) == 2
  for found in both:
    assert found['equal'] and found['most'] == 1 and found['sharded'] > (8 if kind == 'mixtral' else 10)
    assert found['read'] >= found['all']


@pytest.mark.full
def test_a_checkpoint_is_quantised_in_its_shards_and_decodes_what_one_device_decodes(tmp_path):
  for found in run('mesh_load.py', written(tmp_path, 'hf'), '2x4', 'both', 'int8'):
    assert found['equal'] and found['most'] == 1 and found['sharded'] > 10
  check(['decoder of int8:opt:1:4x2:queue', 't5 of int8:speculative:0:2x4:batch'])


@pytest.mark.parametrize('kind', quick(['hf', *KINDS], [], ['orbax']))
def test_each_of_two_processes_reads_what_its_devices_hold(tmp_path, kind):
  path = written(tmp_path, kind)
  for shape, whole in (('2x4', True), ('1x8', False)):  # of 2x4 each holds a row
    lines = two_processes(path, shape, 'both')
    assert len(lines) == 4
    for found in lines:
      assert found['most'] == 1 and found['read'] >= found['held']
      assert (found['read'] >= found['all']) == whole and (found['held'] == found['all']) == whole


def two_processes(*args: str) -> list[dict]:
  """Return the lines of a script in each of two processes that JAX knows as one system."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = str(free.getsockname()[1])
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return sum(pool.map(lambda i: run('mesh_load.py', *args, str(i), port), range(2)), [])


@pytest.mark.long
def test_a_large_checkpoint_takes_the_memory_of_its_shards_and_one_tensor(tmp_path):
  path = written(tmp_path, 'hf', LARGE)
  for found in two_processes(path, '2x4'):
    assert found['most'] == 1 and found['all'] * 4 > 2.5e9
    assert found['peak_bytes'] <= found['shard_bytes'] + found['largest_bytes'] + 5e7
