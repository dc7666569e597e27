"""Compiling ahead of time: where arguments lie, the floor by bytes, and the report on a program for TPUs."""

from collections import Counter
import contextlib
import functools
import importlib.util
import json
import os
import pathlib

import jax
from matching import having, says
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends, compile, methods, rules, Sampler
from speccascade.checkpoints import hf
from speccascade.drafters import hidden, layerskip
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.integrations import t5x
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.planning import aot, elsewhere, hlo, program_report, timing
from speccascade.planning.synthetic import random_params, weight_bytes
from speccascade.types import Model

T5 = {
  'model_type': 't5',
  'vocab_size': 512,
  'd_kv': 64,
  'feed_forward_proj': 'gated-gelu',
  'tie_word_embeddings': False,
}
ASKED = {
  'autoregressive': ['--method', 'autoregressive(model=1)'],
  'speculative': ['--block', '5'],
  'one pass': ['--block', '5'],
  'frequent tokens': ['--block', '5', '--frequent', '200'],
  'opt': ['--rule', 'opt:0.1', '--block', '5'],
}
OPT = methods.speculative(functools.partial(rules.opt, alpha=0.1), 5)
SMALL = T5 | {'d_kv': 64, 'd_model': 128, 'd_ff': 256, 'num_layers': 1, 'num_heads': 2}
LARGE = T5 | {'d_kv': 64, 'd_model': 256, 'd_ff': 512, 'num_layers': 2, 'num_heads': 8}


@pytest.fixture
def pair(tmp_path) -> list[str]:
  paths = [tmp_path / 'small.json', tmp_path / 'large.json']
  for path, config in zip(paths, (SMALL, LARGE), strict=True):
    path.write_text(json.dumps(config))
  return [str(path) for path in paths]


def run(capsys, *args) -> dict:
  assert compile.main([*args, '--json']) == 0
  return json.loads(capsys.readouterr().out.splitlines()[-1])


ROUNDS = [
  ('autoregressive', '1'),
  ('speculative', '1'),
  ('speculative', '8'),
  ('opt', '4'),
  ('one pass', '8'),
  ('frequent tokens', '8'),
]


@pytest.mark.parametrize('method, batch', long_but(ROUNDS, [('speculative', '8'), ('opt', '4')]))
def test_a_round_for_a_tpu_has_no_row_loops_no_cache_copies_and_no_weights_laid_out_anew(pair, capsys, method, batch):
  pytest.importorskip('libtpu')
  if method == 'one pass':
    pathlib.Path(pair[0]).write_text(json.dumps(SMALL | {'pard_token': 3}))
  more = ['--prefill'] if method == 'opt' else []
  found = run(capsys, '--topology', 'v5e:2x2', '--models', *pair, *ASKED[method], '--batch_size', batch, *more)
  assert (found['row_loops'], found['cache_copies'], found['entry_relayouts']) == (0, 0, 0)
  assert not more or found['reading_bytes'] > 0
  assert found['collectives'] == {}
  assert found['simulated_cycles'] >= found['floor_cycles'] >= found['traffic_cycles'] > 0
  assert found['argument_bytes'] >= sum(found['arguments'].values()) > 0
  for kind in ('part', 'phase'):
    assert sum(found[f'cycles_by_{kind}'].values()) == pytest.approx(found['simulated_cycles'], rel=0.01)


@pytest.mark.parametrize('drafter', long_but(['a head', 'an early exit'], ['a head']))
def test_a_round_of_one_cache_for_two_models_copies_nothing(pair, capsys, tmp_path, drafter):
  pytest.importorskip('libtpu')
  layer = DecoderConfig(512, 256, 8, 8, 64, 512, (Span(),))
  network = Eagle(HeadConfig('eagle', layer, (-1,)))
  hf.write(tmp_path / 'head', Model(network.init(jax.random.key(0)), network))
  models = ['--head', str(tmp_path / 'head'), '--models'] if drafter == 'a head' else ['--models', f'{pair[1]}@1']
  found = run(capsys, '--topology', 'v5e:2x2', *models, pair[1], '--block', '5', '--batch_size', '8')
  large = run(capsys, '--topology', 'v5e:2x2', '--models', *pair, *ASKED['autoregressive'], '--batch_size', '8')
  more = found['arguments']['weights'] - large['arguments']['weights']
  of_head = 2 * (2 * 256 * 256 + 4 * 256 * 512 + 3 * 256 * 512)
  assert more == pytest.approx(of_head if drafter == 'a head' else 0, rel=0.01, abs=2**12)
  assert (found['row_loops'], found['cache_copies'], found['entry_relayouts']) == (0, 0, 0)
  assert found['simulated_cycles'] >= found['floor_cycles'] >= found['traffic_cycles'] > 0


@pytest.mark.long
def test_a_round_of_int8_reads_a_byte_a_weight(pair, capsys):
  pytest.importorskip('libtpu')
  args = ('--topology', 'v5e:2x2', '--models', *pair, *ASKED['speculative'], '--prefill', '--dtype')
  short, long = (run(capsys, *args, dtype) for dtype in ('int8', 'bfloat16'))
  assert (short['row_loops'], short['cache_copies'], short['entry_relayouts']) == (0, 0, 0)
  assert short['arguments']['weights'] < 0.6 * long['arguments']['weights']
  assert short['traffic_cycles'] < 0.75 * long['traffic_cycles'] and short['reading_bytes'] > 0


@pytest.mark.parametrize(('topology', 'install'), [('h100', 'speccascade[cuda]'), ('v5e:2x2', 'speccascade[tpu]')])
def test_a_chip_whose_compiler_is_missing_says_what_to_install(topology, install, monkeypatch):
  def missing(*args, **kwargs):
    raise NotImplementedError('topology not implemented')

  monkeypatch.setattr(aot.topologies, 'get_topology_desc', missing)
  with pytest.raises(ValueError, match=having(f"pip install '{install}'")):
    aot.describe(topology)


def test_what_the_compiler_of_tpus_writes_is_shown_where_it_fails_alone(monkeypatch, capfd):
  def describing(error):
    def describe(*args, **kwargs):
      os.write(2, b'could not determine TPU worker hostnames')
      if error:
        raise RuntimeError('no TPU')

    monkeypatch.setattr(aot.topologies, 'get_topology_desc', describe)
    with pytest.raises(ValueError) if error else contextlib.nullcontext():
      aot.describe('v5e:2x2')
    return capfd.readouterr().err

  assert describing(error=False) == '' and 'hostnames' in describing(error=True)


@pytest.mark.parametrize('method', ['autoregressive', 'opt'])
def test_a_decode_for_a_gpu_is_one_graph_and_copies_nothing(pair, capsys, method, tmp_path):
  if not any(map(importlib.util.find_spec, ('jax_cuda12_plugin', 'jax_cuda13_plugin'))):
    pytest.skip('no plugin of CUDA')
  text = [f'--xla={option}' for option in (f'xla_dump_to={tmp_path}', 'xla_dump_hlo_as_text=True')]
  found = run(capsys, '--topology', 'h100', '--models', *pair, *ASKED[method], '--batch_size', '4', *text)
  (steps,) = tmp_path.glob('*run*thunk_sequence_after_thunk_passes.txt')  # what the host starts
  outer = [line for line in steps.read_text().splitlines() if line[:1].isdigit()]
  assert len(outer) == 1 and 'kCommandBuffer' in outer[0] and steps.read_text().count('kWhile') >= 1
  assert (found['row_loops'], found['cache_copies'], found['entry_relayouts']) == (0, 0, 0)
  assert found['kernels'] > 20 and found['simulated_cycles'] is None and found['floor_bytes'] > 0


def test_kernels_before_a_rotation_are_not_laid_out_anew(tmp_path, capsys):
  pytest.importorskip('libtpu')
  config = {'model_type': 'llama', 'vocab_size': 512, 'hidden_size': 1024, 'intermediate_size': 1024}
  config |= {'num_hidden_layers': 2, 'num_attention_heads': 8}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  path = str(tmp_path / 'config.json')
  args = ['--models', path, path, '--batch_size=4', '--max_prompt_tokens=64']
  assert run(capsys, *args, *ASKED['autoregressive'])['entry_relayouts'] == 0


def test_an_option_of_xla_reaches_the_compiler(pair, capsys):
  pytest.importorskip('libtpu')
  args = ['--models', *pair, '--method', 'autoregressive(model=1)']
  assert compile.main([*args, '--xla', 'xla_no_such_option=1']) == 1
  assert 'xla_no_such_option' in capsys.readouterr().err
  assert compile.main([*args, '--xla', 'one']) == 1
  assert says(capsys.readouterr().err, "'one'", 'NAME=VALUE')


@pytest.mark.long
def test_a_verifier_that_is_cut_over_chips_talks_and_holds_a_part(pair, capsys):
  pytest.importorskip('libtpu')
  args = ('--topology', 'v5e:2x2', '--models', *pair, '--method', 'autoregressive(model=1)', '--batch_size', '2')
  one, four = run(capsys, *args), run(capsys, *args, '--mesh', 'data=1,model=4', '--rules', 'replicated,sharded')
  assert four['collectives']['all-reduce'][0] >= 6  # two layers: attention twice, MLP once
  assert four['arguments']['weights'] < 0.3 * one['arguments']['weights']
  assert four['floor_bytes'] == pytest.approx(one['floor_bytes'] / 4, rel=0.01)  # norms are replicated


def tiny(layers: int) -> Decoder:
  return Decoder(DecoderConfig(97, 32, 4, 1, 16, 48, (Span(),) * layers), (1,), 'bfloat16')


def test_three_models_are_read_and_tables_may_be_padded_differently(tmp_path):
  paths = []
  for i, vocab in enumerate((500, 512, 540)):
    paths.append(str(tmp_path / f'{i}.json'))
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=vocab)
    (tmp_path / f'{i}.json').write_text(json.dumps(dict(model_type='llama', **sizes)))
  models = aot.models_of(paths, 'bfloat16')
  assert [model.network.vocab_size for model in models] == [500, 512, 540]
  method = methods.cos(functools.partial(rules.weighted, weights=(0.2, 0.3, 0.5)), blocks=(2, 1, 1))
  placement = aot.Placement(jax.devices(), {'data': 1})
  loop, (fixed, *given) = aot.program(
    method, models, aot.Sizes(2, 16, 8), Sampler(1.0), placement, backends.named('cpu')
  )
  assert fixed.vocab == 500 and jax.eval_shape(functools.partial(loop, fixed), *given)


def test_the_floor_is_the_weights_and_used_caches_of_every_call():
  models, sizes = (aot.shaped(tiny(1)), aot.shaped(tiny(3))), aot.Sizes(batch=2, source=100, tokens=60)
  step = aot.floor_bytes(methods.autoregressive(1), models, sizes)
  weights = 3 * (32 * 64 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32 + 32 * 97  # not the embedding table
  assert step == 2 * (weights + 2 * 3 * 2 * 16 * 130)
  small = aot.floor_bytes(methods.autoregressive(0), models, sizes)
  assert aot.floor_bytes(methods.speculative(block=5), models, sizes) == step + 5 * small
  assert aot.floor_bytes(OPT, models, sizes) == step + 6 * small


def test_the_floor_of_experts_is_those_that_the_tokens_of_a_call_are_expected_to_choose():
  config = DecoderConfig(97, 32, 4, 2, 16, 48, (Span(),) * 2, tied=True, experts=16, experts_per_token=2)
  network = Decoder(config, (1,))
  kernels, sizes = 2 * 3 * 16 * 32 * 48 * 4, aot.Sizes(batch=3, source=100, tokens=60)
  model = aot.shaped(network)
  rest = weight_bytes(network.reads(model.params, ())[0]) - kernels
  caches = aot.floor_bytes(methods.autoregressive(0), [model], sizes) - rest - kernels * (1 - (14 / 16) ** 3)
  drafts, window = (kernels * (1 - (14 / 16) ** n) for n in (3, 18))
  found = aot.floor_bytes(methods.speculative(block=5), [model, model], sizes)
  assert found == pytest.approx(6 * (rest + caches) + 5 * drafts + window, abs=6)
  assert caches == 2 * 2 * 3 * 2 * 16 * 130 * 4


def test_the_tokens_of_a_timed_pass_differ_as_those_of_rows_do():
  network, backend = tiny(1), backends.named('cpu')
  cache = network.on(backend).empty_cache(random_params(network), 3, 16)
  loop = timing.passes_loop([network], backend, (2,), 3, 4, 16, (1,))
  tokens = loop((random_params(network),), (cache,), np.int32(2))
  assert len(np.unique(tokens)) > 3


@pytest.mark.parametrize('mesh, rules, rows', [({'data': 4}, (), 2), ({'model': 4}, ('replicated',) * 2, 8)])
def test_the_floor_of_a_chip_has_all_of_what_is_replicated(mesh, rules, rows):
  models, placement = (aot.shaped(tiny(1)), aot.shaped(tiny(3))), aot.Placement(jax.devices()[:1] * 4, mesh, rules)
  alone, shared = (aot.Sizes(batch, source=100, tokens=60) for batch in (rows, 8))
  assert aot.floor_bytes(OPT, models, shared, placement) == aot.floor_bytes(OPT, models, alone)


def test_a_t5_step_does_not_read_the_encoder_or_what_reads_the_encoded_source():
  model = aot.shaped(hf.network_from_config(LARGE, dtype='bfloat16'))
  weights = 2 * (6 * 256 * 512 + 3 * 256 * 512 + 3 * 256) + 256 + 256 * 512 + 32 * 8
  caches = 2 * 2 * 512 * (256 + 65)
  sizes = aot.Sizes(batch=1, source=256, tokens=128)
  assert aot.floor_bytes(methods.autoregressive(0), [model], sizes) == 2 * (weights + caches) + 4


def test_turns_of_the_drafts_are_those_after_the_window_that_catches_up():
  assert methods.speculative(block=5).draft_turns == 4
  assert OPT.draft_turns == 6
  assert methods.autoregressive(1).draft_turns == 1


def test_a_mesh_needs_its_chips_and_axes():
  with pytest.raises(ValueError, match=having('data', 'model', '4 devices')):
    aot.Placement([None] * 4, {'data': 2, 'model': 4})
  with pytest.raises(ValueError, match="'half'"):
    aot.Placement(jax.devices(), {}, ['replicated', 'half'])


XL = T5 | {'vocab_size': 32128, 'd_model': 2048, 'd_ff': 5120, 'num_layers': 3, 'num_heads': 32}
SMALL_OF_XL = T5 | {'vocab_size': 32128, 'd_model': 512, 'd_ff': 1024, 'num_layers': 2, 'num_heads': 6}
GEMMA = {
  'model_type': 'gemma2',
  'vocab_size': 256000,
  'head_dim': 128,
  'hidden_size': 512,
  'intermediate_size': 1024,
  'num_hidden_layers': 2,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'query_pre_attn_scalar': 128,
}


def loop_of(configs, topology: str, mesh: dict, rules, method, batch: int, scan: bool = False) -> hlo.Module:
  """Return the decode loop of two configs as it is compiled for a mesh of chips."""
  models = [aot.shaped(hf.network_from_config(c, dtype='bfloat16', scan=scan)) for c in configs]
  place = aot.Placement(aot.describe(topology).devices, mesh, rules)
  sizes = aot.Sizes(batch, source=128, tokens=64)
  return hlo.Module(aot.compiled(method, models, sizes, Sampler(1.0), place, 'tpu').as_text())


def talks(module: hlo.Module) -> list[tuple[str, hlo.Instruction]]:
  """Return the collectives of a round, each with the computation that it stands in."""
  return [(c, x) for c, x, _ in module.runs(1) if x.op.removesuffix('-start') in hlo.COLLECTIVES]


def gathered(module: hlo.Module) -> int:
  """Return the bytes of the largest array that a round gathers."""
  moves = [x for _, x in talks(module) if x.op.startswith(('all-gather', 'all-to-all'))]
  return max(map(module.result_bytes, moves), default=0)


def test_a_small_drafter_stays_whole_and_the_logits_of_a_sharded_verifier_stay_sharded():
  pytest.importorskip('libtpu')
  pair, method = (SMALL_OF_XL, XL), methods.speculative(block=5)
  module = loop_of(pair, 'v5e:2x2', {'model': 4}, ['replicated', 'sharded'], method, 8, scan=True)
  where = Counter(c for c, x in talks(module) if 'all-reduce' in x.op)
  assert where.pop(module.body) < 12 and list(where.values()) == [3]  # of each layer: two attentions and the MLP
  assert gathered(module) == 8 * 32128 * 4  # the distribution of one position, for a draw
  assert not module.thin_arrays()  # no window lies in the lanes
  assert not module.relayouts()
  assert not [x for _, x, _ in module.runs(1) if x.path.endswith('/dynamic_slice') and hlo.shape_bytes(x.shape) > 2**17]
  assert {module.group_size(x) for _, x in talks(module)} == {4}


def test_rounds_elsewhere_are_compiled_with_the_arrays_that_models_share():
  pytest.importorskip('libtpu')
  large = Model(random_params(tiny(3)), tiny(3))
  models = [layerskip.layerskip(large, 1), large]
  chips = elsewhere.Elsewhere('v5e:2x2', {'model': 2})
  found = chips.compiled(methods.speculative(block=2), models, aot.Sizes(2, 16, 16), Sampler(1.0))
  assert found.fits and 0 <= found.collectives < found.seconds < 1e-2 and found.used < 16 << 20
  assert chips.device(models) == '2 × TPU v5 lite, bfloat16' and str(chips) == 'v5e:2x2 model=2' and chips.data == 1
  with pytest.raises(ValueError, match='v7'):
    elsewhere.Elsewhere('v7:2x2')


def attention(module: hlo.Module) -> Counter:
  """Return how many kernels of each shape the loops of a program run."""
  runs = (x for loop in module.loops(module.entry) for x in module.computations[loop.called['body'][0]])
  return Counter(str([(a.dtype, a.dims) for a in hlo.arrays(x.shape)]) for x in runs if x.target in hlo.KERNELS)


@pytest.mark.long
@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'model': 2}])
def test_timed_passes_and_a_step_that_another_program_partitions_have_the_attention_of_the_loop(mesh):
  pytest.importorskip('libtpu')
  method, (batch, source, tokens) = methods.speculative(block=3), (4, 128, 64)
  place = aot.Placement(aot.describe('v5e:2x2').devices, mesh, ['replicated', 'sharded'])
  networks = [hf.network_from_config(c, dtype='bfloat16') for c in (SMALL, LARGE)]
  run, args = aot.program(
    method, [*map(aot.shaped, networks)], aot.Sizes(batch, source, tokens), Sampler(0.0), place, backends.TPU()
  )
  program, params, state = args[0], args[2], args[3]
  of_loop = attention(compiled_for_tpus(run, *args))

  timed = timing.passes_loop(networks, program.backend, (1, 4), batch, source, program.buffer, (1, 1))
  of_passes = attention(compiled_for_tpus(timed, params, state.caches, np.int32(2)))
  assert len(of_passes) > 2 and of_passes.items() <= of_loop.items()

  drafter = Model(jax.tree.map(np.asarray, random_params(networks[0])), networks[0])

  def step(params, batch):
    models = [drafter, Model(params, networks[1])]
    return t5x.decode_batch(method, models, batch, sampler=Sampler(0.0), mesh=place.mesh)[0]

  names = {'encoder_input_tokens': source, 'decoder_input_tokens': tokens}
  batch = place.put({name: np.zeros((batch, width), np.int32) for name, width in names.items()})
  assert attention(compiled_for_tpus(jax.jit(step), params[1], batch)) == of_loop


def compiled_for_tpus(run, *args) -> hlo.Module:
  """Return a jitted function as it is compiled for the chips that its arguments lie on."""
  return hlo.Module(aot.compile_for('tpu', run, args).as_text())


@pytest.mark.long
@pytest.mark.parametrize('topology, mesh', [('v5e:2x2', (2, 2)), ('v5e:4x4', (4, 4))])
def test_no_cache_and_no_law_is_gathered_in_a_round(topology, mesh):
  pytest.importorskip('libtpu')
  method = methods.speculative(functools.partial(rules.opt, alpha=0.1), 5)
  mesh = dict(zip(('data', 'model'), mesh, strict=True))
  module = loop_of((GEMMA, GEMMA), topology, mesh, ['replicated', 'sharded'], method, 8 * mesh['data'])
  own_cache = 8 * 4 // mesh['model'] * 128 * 256 * 2
  assert gathered(module) < min(own_cache, 8 * 256000 * 4 // mesh['model'])


@pytest.mark.full
def test_a_program_that_does_not_fit_needs_a_mesh_of_more_chips(monkeypatch, capsys):
  def full(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 15G')

  monkeypatch.setattr(program_report, 'of_topology', full)
  assert compile.main(['--models', 't5_small_xl']) == 1
  assert says(capsys.readouterr().err, 'v5e:2x2', 'a chip', 'Used 20G of 15G', '--mesh=', '--batch_size')


def test_the_floor_of_turns_is_that_of_the_dearest():
  models, sizes = (aot.shaped(tiny(1)), aot.shaped(tiny(3))), aot.Sizes(batch=2, source=100, tokens=60)
  small, large = (aot.floor_bytes(methods.autoregressive(m), models, sizes) for m in (0, 1))
  turns = methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), (2, 1))
  assert aot.floor_bytes(turns, models, sizes) == max(2 * small, large)


@pytest.mark.full
def test_a_head_and_an_early_exit_work_in_the_cache_of_their_model():
  layer, large = DecoderConfig(97, 32, 4, 1, 16, 48, (Span(),)), aot.shaped(tiny(3))
  head = aot.shaped(Eagle(HeadConfig('eagle', layer, (-1,)), 'bfloat16'))
  sizes, place = aot.Sizes(batch=2, source=100, tokens=60), aot.Placement(jax.devices(), {})
  step = aot.floor_bytes(methods.autoregressive(1), [large, large], sizes)
  weights = 2 * 32 * 32 + 2 * 32 * 64 + 2 * 32 * 16 + 3 * 32 * 48 + 32 + 32 * 97  # fc … norm; the verifier's scores
  ring = 2 * hidden.RING * (2 * 32 + 2 * 4)  # features, and what they are of
  of_head = 2 * (weights + 2 * 2 * 16 * 130) + ring
  first = layerskip.layerskip(large, 1)
  of_exit = aot.floor_bytes(methods.autoregressive(0), [first, large], sizes)
  for models, draft, more in ((hidden.beside(head, large), of_head, ring), ([first, large], of_exit, 0)):
    method, backend = methods.speculative(block=2), backends.named('cpu')
    loop, (fixed, *given) = aot.program(method, models, sizes, Sampler(1.0), place, backend)
    assert fixed.cache_of == (1, 1) and jax.eval_shape(functools.partial(loop, fixed), *given)
    assert aot.floor_bytes(method, models, sizes) == step + more + 2 * draft
