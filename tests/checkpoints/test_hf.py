"""Reading Hugging Face folders, and one clear error for each damage."""

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
from matching import having, says
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiers import long_but
import tiny
from tiny import assert_equal, error_of

from speccascade import checkpoints
from speccascade.checkpoints import hf, stored
from speccascade.models.decoder import Span
from speccascade.models.layers import stack_layers
from speccascade.models.rope import Rope
from speccascade.types import Model, Network

LLAMA = tiny.LLAMA | {'num_hidden_layers': 2, 'num_key_value_heads': 1, 'tie_word_embeddings': False}
GPT2 = {'model_type': 'gpt2', 'vocab_size': 11, 'n_embd': 8, 'n_head': 2, 'n_layer': 2, 'n_positions': 16}
OPT = {'model_type': 'opt', 'vocab_size': 11, 'hidden_size': 8, 'ffn_dim': 6, 'num_hidden_layers': 1}
OPT |= {'num_attention_heads': 2, 'max_position_embeddings': 16}
GEMMA3 = LLAMA | {'model_type': 'gemma3_text', 'head_dim': 4, 'tie_word_embeddings': True, 'query_pre_attn_scalar': 4}
MISTRAL = LLAMA | {'model_type': 'mistral'}
PHI3 = LLAMA | {'model_type': 'phi3'}
STABLELM = LLAMA | {'model_type': 'stablelm'}
MIXTRAL = LLAMA | {'model_type': 'mixtral', 'num_key_value_heads': 2, 'num_local_experts': 3}
MOE = LLAMA | {'model_type': 'qwen3_moe', 'moe_intermediate_size': 4, 'num_experts': 3, 'num_experts_per_tok': 2}
NEOX = LLAMA | {'model_type': 'gpt_neox', 'rotary_pct': 0.5}
T5 = tiny.T5_V1_1 | {'num_layers': 2}
_error = functools.partial(error_of, hf.read)
CONFIGS = {'llama': LLAMA, 'gpt2': GPT2, 'opt': OPT, 'gemma3': GEMMA3, 'gpt_neox': NEOX, 'mixtral': MIXTRAL, 't5': T5}


def _model(config):
  model = tiny.model_of(config)
  return model.params, hf.export(model.network, config['model_type'], model.params)


def _save(folder, config, tensors):
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(tensors, folder / 'model.safetensors')
  return folder


@pytest.fixture
def llama(tmp_path):
  params, tensors = _model(LLAMA)
  return _save(tmp_path, LLAMA, tensors), params, tensors


@pytest.mark.parametrize('name', long_but(CONFIGS, ['opt', 'mixtral']))
def test_every_tensor_becomes_its_parameter_layers_apart_or_stacked(tmp_path, name):
  params, tensors = _model(CONFIGS[name])
  folder = _save(tmp_path, CONFIGS[name], tensors)
  for scan, expected in ((False, params), (True, stack_layers(params))):
    network, read = hf.read(folder, scan=scan)
    assert network.scan == scan
    assert_equal(read, expected)
    stated = jax.tree.map(lambda x: (x.shape, x.dtype), network.param_shapes())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), read) == stated


def test_shards_are_found_through_their_index(tmp_path):
  params, tensors = _model(LLAMA)
  names = sorted(tensors)
  weight_map = {}
  for i, part in enumerate((names[:5], names[5:])):
    file = f'model-0000{i + 1}-of-00002.safetensors'
    stale = {name: np.zeros_like(x) for name, x in tensors.items() if i and name not in part}
    save_file({name: tensors[name] for name in part} | stale, tmp_path / file)
    weight_map |= dict.fromkeys(part, file)
  (tmp_path / 'config.json').write_text(json.dumps(LLAMA))
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  assert_equal(hf.read(tmp_path)[1], params)

  (tmp_path / 'model-00002-of-00002.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match=having('model-00002-of-00002.safetensors', "weight'")):
    hf.read(tmp_path)
  (tmp_path / 'model.safetensors.index.json').unlink()
  with pytest.raises(FileNotFoundError, match='index'):
    hf.read(tmp_path)


@pytest.mark.parametrize('weight_map', [None, {}, ['a.safetensors'], 'a.safetensors'])
def test_an_index_is_a_map_of_tensors_to_files(tmp_path, weight_map):
  (tmp_path / 'config.json').write_text(json.dumps(LLAMA))
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  with pytest.raises(ValueError, match=having('index.json', "'weight_map'")):
    hf.read(tmp_path)


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (LLAMA | {'hidden_size': '8'}, having("'hidden_size'", "'8'")),
    (LLAMA | {'num_hidden_layers': 2.5}, having("'num_hidden_layers'", '2.5')),
    (LLAMA | {'num_hidden_layers': -1}, having("'num_hidden_layers'", '-1')),
    (LLAMA | {'tie_word_embeddings': 'false'}, having("'tie_word_embeddings'", "'false'")),
    (LLAMA | {'rope_scaling': {'type': 'linear', 'factor': 'two'}}, having("'factor'", "'two'")),
    (LLAMA | {'rope_scaling': {'type': 'linear', 'factor': 0}}, having("'factor'", 'is 0', 'above 0')),
    (T5 | {'d_ff': None}, having("'d_ff'", 'None')),
    (T5 | {'num_decoder_layers': [2]}, having("'num_decoder_layers'", '[2]')),
    (LLAMA | {'rope_scaling': [2]}, having("'rope_scaling'", '[2]')),
    (LLAMA | {'rope_scaling': {'type': 'linear'}}, having("'factor'", 'None', 'linear')),
    (LLAMA | {'hidden_act': ['silu']}, having("'hidden_act'", "['silu']")),
    ({'model_type': 'gemma3', 'text_config': None}, having("'text_config'", 'None')),
    (GEMMA3 | {'layer_types': ['full_attention']}, having("'layer_types'", 'has 1', '2 layers')),
    (GEMMA3 | {'layer_types': ['full_attention', 'chunked_attention']}, having("'layer_types'", 'chunked_attention')),
    (GEMMA3 | {'sliding_window_pattern': 0}, having("'sliding_window_pattern'", 'is 0')),
    (GEMMA3 | {'query_pre_attn_scalar': 0}, having("'query_pre_attn_scalar'", 'is 0', 'above 0')),
    (LLAMA | {'num_key_value_heads': 3}, having("'num_key_value_heads'", 'is 3', 'of 2')),
    (LLAMA | {'head_dim': 3}, having("'head_dim'", 'is 3', 'even')),
    ({}, having("'model_type'")),
    ({'model_type': ['llama']}, having("'model_type'", "['llama']")),
    ({'model_type': 'llama'}, having("'vocab_size'")),
    (LLAMA | {'quantization_config': {'bits': 4}}, having('unquantised')),
    (LLAMA | {'quantization_config': {'quant_method': 'gptq'}}, having("'gptq'", 'dequantize')),
    *(
      (MISTRAL | {'sliding_window': window}, having("'sliding_window'", str(window)))
      for window in (-5, 1.5, float('nan'), '4096', True)
    ),
    (MISTRAL | {'num_hidden_layers': 10**9}, having("'num_hidden_layers'", '1000000000', 'at most')),
    (LLAMA | {'rms_norm_eps': float('inf')}, having("'rms_norm_eps'", 'inf', 'finite')),
    (LLAMA | {'rms_norm_eps': 10**400}, having("'rms_norm_eps'", '1329 bits', 'finite')),
    (GEMMA3 | {'final_logit_softcapping': 0}, having("'final_logit_softcapping'", 'is 0', 'above 0')),
    (OPT | {'num_attention_heads': 16}, having("'num_attention_heads'", '16', "'hidden_size'")),
    (T5 | {'relative_attention_num_buckets': 1}, having("'relative_attention_num_buckets'", 'is 1')),
    (LLAMA | {'rms_norm_eps': None}, having("'rms_norm_eps'", 'None')),
    ({'model_type': 't5gemma', 'encoder': 3}, having("'encoder'", 'is 3')),
    ({'model_type': 't5gemma', 'decoder': {'vocab_size': 9}}, having('vocab_size', '9', '256000')),
    ({'model_type': 't5gemma2', 'encoder': {'text_config': 3}}, having("'text_config'", 'is 3')),
    ({'model_type': 't5gemma2', 'decoder': {'hidden_size': 640}}, having("'hidden_size'", '2304', '640')),
    ({'model_type': 't5gemma', 'decoder_start_token_id': -1}, having("'decoder_start_token_id'", '-1')),
    (LLAMA | {'eos_token_id': 10**30}, having("'eos_token_id'", 'no token id')),
  ],
)
def test_values_that_are_missing_or_of_another_type_are_named(config, message):
  with pytest.raises(ValueError, match=having('config.json') + message):
    hf.network_from_config(config)


@pytest.mark.parametrize(
  ('scaling', 'rope'),
  [
    ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, Rope(1e6, 'linear', 2.0)),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 1e5}}, Rope(1e5, 'linear', 2.0)),
    ({'rope_parameters': {'full_attention': {'rope_type': 'linear', 'factor': 2.0}}}, Rope(1e4, 'linear', 2.0)),
    ({'rope_parameters': {'rope_theta': 1e6, 'rope_type': 'default', 'partial_rotary_factor': None}}, Rope(1e6)),
  ],
)
def test_a_scaling_that_is_added_to_what_transformers_wrote_counts(scaling, rope):
  config = LLAMA | {'rope_parameters': {'rope_theta': 1e6, 'rope_type': 'default'}} | scaling
  assert hf.network_from_config(config).config.kinds == (Span(0, rope),)


def test_a_mistral_has_windows_where_its_layers_say_so():
  config = LLAMA | {'model_type': 'mistral', 'sliding_window': 4}
  mixed = config | {'layer_types': ['full_attention', 'sliding_attention']}
  windows = [[span.window for span in hf.network_from_config(c).config.spans] for c in (config, mixed)]
  assert windows == [[4, 4], [0, 4]]


def test_the_gelu_of_the_first_gemma_is_the_approximate_one():
  networks = [hf.network_from_config(LLAMA | {'model_type': name, 'hidden_act': 'gelu'}) for name in ('gemma', 'llama')]
  assert [network.config.activation for network in networks] == ['gelu_tanh', 'gelu']


def test_dtype_is_as_stored_unless_asked_for(tmp_path):
  params, tensors = _model(LLAMA)
  stored = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
  stored['model.norm.weight'] = tensors['model.norm.weight']
  folder = _save(tmp_path, LLAMA, stored)
  network, read = hf.read(folder)
  assert network.dtype == 'bfloat16' and read['token_embedder']['embedding'].dtype == jnp.bfloat16
  assert read['final_norm']['scale'].dtype == jnp.float32
  network, read = hf.read(folder, dtype='float32')
  assert network.dtype == 'float32'
  assert_equal(read, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params))


def test_a_fused_tensor_is_read_once(tmp_path, monkeypatch):
  _, tensors = _model(GPT2)
  folder = _save(tmp_path, GPT2, tensors)
  reads = []
  read = stored._read_safetensors
  monkeypatch.setattr(stored, '_read_safetensors', lambda file, name, *at: reads.append(name) or read(file, name, *at))
  hf.read(folder)
  assert sorted(reads) == sorted(tensors)


def test_names_of_older_and_enclosing_classes_are_understood(tmp_path):
  gpt2, tensors = _model(GPT2)
  tensors = {name.removeprefix('transformer.'): x for name, x in tensors.items()}
  tensors['h.0.attn.bias'] = np.ones((1, 1, 4, 4), np.float32)
  (tmp_path / 'gpt2').mkdir()
  assert_equal(hf.read(_save(tmp_path / 'gpt2', GPT2, tensors))[1], gpt2)

  opt, tensors = _model(OPT)
  (tmp_path / 'opt').mkdir()
  tensors = {name.removeprefix('model.'): x for name, x in tensors.items()}
  assert_equal(hf.read(_save(tmp_path / 'opt', OPT, tensors))[1], opt)


@pytest.mark.parametrize('prefix', ['language_model.model.', 'model.language_model.'])
def test_the_text_model_of_a_multi_modal_checkpoint_is_read(tmp_path, prefix):
  params, tensors = _model(GEMMA3)
  tensors = {prefix + name.removeprefix('model.'): x for name, x in tensors.items()}
  tensors['model.vision_tower.x.weight'] = np.ones((2, 2), np.float32)
  config = {'model_type': 'gemma3', 'text_config': GEMMA3, 'eos_token_id': [1, 106]}
  network, read = hf.read(_save(tmp_path, config, tensors))
  assert network.eos_ids == (1, 106)
  assert_equal(read, params)


def test_tying_follows_the_tensors_and_scaling_the_config(tmp_path):
  _, tensors = _model(T5)
  head = tensors.pop('lm_head.weight')
  network, params = hf.read(_save(tmp_path, T5, tensors))
  assert network.config.tied and not network.config.scale_outputs and 'logits_dense' not in params['decoder']
  v1_0 = T5 | {'tie_word_embeddings': True}
  network, _ = hf.read(_save(tmp_path, v1_0, tensors | {'lm_head.weight': tensors['shared.weight']}))
  assert network.config.tied and network.config.scale_outputs
  resaved = v1_0 | {'scale_decoder_outputs': False}
  network, params = hf.read(_save(tmp_path, resaved, tensors | {'lm_head.weight': head}))
  assert not network.config.tied and not network.config.scale_outputs and 'logits_dense' in params['decoder']


def test_the_shared_embedding_may_be_saved_under_another_name(tmp_path):
  params, tensors = _model(T5)
  tensors['decoder.embed_tokens.weight'] = tensors.pop('shared.weight')
  assert_equal(hf.read(_save(tmp_path, T5, tensors))[1], params)


def test_end_of_sequence_comes_from_the_generation_config_first(llama):
  folder, _, _ = llama
  assert hf.read(folder)[0].eos_ids == (2,)
  (folder / 'generation_config.json').write_text('{"eos_token_id": [0, 7]}')
  assert hf.read(folder)[0].eos_ids == (0, 7)


def test_start_id_and_positions_follow_the_family():
  networks = {name: hf.network_from_config(config) for name, config in CONFIGS.items()}
  assert {name: n.start_id for name, n in networks.items()} == {n: 0 if n == 't5' else None for n in networks}
  assert {name: n.max_positions for name, n in networks.items() if n.max_positions} == {'gpt2': 16, 'opt': 16}
  assert hf.network_from_config(T5 | {'decoder_start_token_id': 5}).start_id == 5
  assert {name: n.context for name, n in networks.items() if n.start_id is None} == {
    'llama': 2048,
    'gpt2': None,
    'opt': None,
    'gemma3': 131072,
    'gpt_neox': 2048,
    'mixtral': 131072,
  }
  yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 2048}
  assert hf.network_from_config(LLAMA | {'rope_scaling': yarn}).context == 4 * 2048


def test_a_file_that_is_cut_off_or_corrupt_is_named_with_its_size(llama):
  folder, _, _ = llama
  file = folder / 'model.safetensors'
  data = file.read_bytes()
  header = json.dumps({'model.norm.weight': {'dtype': 'F32', 'shape': [8], 'data_offsets': [0, 12]}}).encode()
  too_short = len(header).to_bytes(8, 'little') + header + bytes(64)
  for damaged in (data[:-40], data[:100], b'', data[:9] + b'\xff\xff\xff' + data[12:], too_short):
    file.write_bytes(damaged)
    assert f'{file} is truncated or corrupt, it has {len(damaged)} bytes' in _error(folder)


@pytest.mark.parametrize(
  ('changes', 'parts'),
  [
    ({'model.layers.1.mlp.up_proj.weight': np.zeros((8, 6))}, ('[8, 6]', '[6, 8]')),
    ({'model.layers.0.mlp.up_proj.weight': None, 'lm_head.weight': None}, ('[6, 8]', '1 more')),
    ({'model.layers.0.self_attn.q_proj.lora_A.weight': np.zeros((2, 8))}, ('[2, 8]',)),
    ({'model.layers.1.self_attn.o_proj.weight': np.diag([np.nan] + [0.0] * 7)}, ('NaN or Inf',)),
    ({'model.layers.1.self_attn.o_proj.weight': np.diag([np.inf] + [0.0] * 7)}, ('NaN or Inf',)),
  ],
)
def test_a_tensor_that_is_wrong_missing_unexpected_or_not_finite_is_named(llama, changes, parts):
  folder, _, tensors = llama
  tensors |= {name: x if x is None else x.astype(np.float32) for name, x in changes.items()}
  message = _error(_save(folder, LLAMA, {name: x for name, x in tensors.items() if x is not None}))
  assert says(message, f"'{next(iter(changes))}'", *parts)


def test_other_weights_than_safetensors_come_with_a_remedy(llama):
  folder, _, tensors = llama
  (folder / 'model.safetensors').rename(folder / 'model-Q8_0.gguf')
  assert says(_error(folder, FileNotFoundError), 'model-Q8_0.gguf', 'llama.cpp', 'FOLDER/NAME.gguf')
  for dtype, parts in ((np.int8, ('I8', 'unquantised')), (np.float64, ('F64', 'float32'))):
    _save(folder, LLAMA, tensors | {'model.norm.weight': np.zeros(8, dtype)})
    for asked in (None, 'float32'):
      message = error_of(functools.partial(hf.read, dtype=asked), folder)
      assert says(message, "'model.norm.weight'", 'F32, F16, BF16 are read', *parts)


def _as_torch(folder, tensors, **settings):
  """Write tensors as PyTorch does, in place of the folder's safetensors."""
  torch = pytest.importorskip('torch')
  state = {name: torch.from_numpy(np.array(x)) for name, x in tensors.items()}
  torch.save(state, folder / 'pytorch_model.bin', **settings)
  (folder / 'model.safetensors').unlink(missing_ok=True)
  return state


@pytest.mark.parametrize('mapped', [True, False])  # False as torch wrote before 1.6
def test_weights_of_torch_are_those_of_their_safetensors_twin(llama, mapped):
  folder, params, tensors = llama
  before = checkpoints.digest(folder)
  ignored = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(2, np.float64)}
  _as_torch(folder, tensors | ignored, _use_new_zipfile_serialization=mapped)
  assert_equal(hf.read(folder)[1], params)
  digests = {before, checkpoints.digest(folder)}
  _as_torch(folder, tensors | ignored | {'lm_head.weight': tensors['lm_head.weight'] + 1})
  assert len(digests | {checkpoints.digest(folder)}) == 3


def test_shards_of_torch_are_found_through_their_index_in_the_dtype_that_is_stored(llama):
  torch = pytest.importorskip('torch')
  folder, params, tensors = llama
  state = {name: x.bfloat16() for name, x in _as_torch(folder, tensors).items()}
  (folder / 'pytorch_model.bin').unlink()
  weight_map = {name: f'pytorch_model-0000{i % 2 + 1}-of-00002.bin' for i, name in enumerate(sorted(state))}
  for file in {*weight_map.values()}:
    torch.save({name: x for name, x in state.items() if weight_map[name] == file}, folder / file)
  (folder / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': weight_map}))
  assert_equal(hf.read(folder)[1], jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def test_a_file_of_torch_that_is_damaged_or_more_than_tensors_is_named(llama):
  torch = pytest.importorskip('torch')
  folder, _, tensors = llama
  state = _as_torch(folder, tensors)
  file = folder / 'pytorch_model.bin'
  content = file.read_bytes()
  file.write_bytes(content[: len(content) // 2])
  assert says(_error(folder), f'{file}', 'truncated', f'{len(content) // 2} bytes')
  torch.save(state | {'lm_head.weight': pathlib.Path('x')}, file)  # whose class would be imported
  assert says(_error(folder), f'{file}', 'more than tensors')
  torch.save({'model': state}, file)
  assert says(_error(folder), f'{file}', 'names to tensors')
  torch.save(state | {'model.norm.weight': torch.zeros(8, dtype=torch.int8)}, file)
  assert says(_error(folder), "'model.norm.weight'", 'int8', 'unquantised')


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ({'model_type': 'bert'}, having("'bert'", 'llama, mistral')),
    (LLAMA | {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "'dynamic'"),
    (LLAMA | {'hidden_act': 'tanh'}, "'tanh'"),
    (PHI3 | {'rope_scaling': {'type': 'longrope', 'short_factor': [1.0], 'long_factor': [2.0]}}, "'longrope'"),
    (PHI3 | {'rope_scaling': {'type': 'yarn', 'factor': 2.0}}, "'yarn'"),
    (PHI3 | {'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    (STABLELM | {'qk_layernorm': True}, "'qk_layernorm' is True"),
    (MIXTRAL | {'num_experts_per_tok': 4}, having("'num_experts_per_tok' is 4", 'at most 3')),
    (MOE | {'num_experts': 'many'}, having("'num_experts' is 'many'")),
    (MOE | {'decoder_sparse_step': 2}, "'decoder_sparse_step' is 2"),
    (MOE | {'mlp_only_layers': [0]}, having("'mlp_only_layers' is [0]")),
    (NEOX | {'rotary_pct': 0.3}, having("'head_dim' is 4", '0.3 is turned')),
    (NEOX | {'rotary_pct': 'half'}, having("'rotary_pct' is 'half'")),
    (STABLELM | {'partial_rotary_factor': 0.25}, having("'head_dim' is 4", "'partial_rotary_factor' 0.25")),
    (LLAMA | {'model_type': 'smollm3', 'no_rope_layers': [1, 2]}, having("'no_rope_layers'", 'has 2', '0 or 1')),
    (LLAMA | {'model_type': 'gemma', 'use_bidirectional_attention': True}, "'use_bidirectional_attention' is True"),
    (OPT | {'layer_norm_elementwise_affine': False}, "'layer_norm_elementwise_affine' is False"),
    (GPT2 | {'scale_attn_by_inverse_layer_idx': True}, "'scale_attn_by_inverse_layer_idx' is True"),
  ],
)
def test_what_is_not_supported_is_said(config, message):
  with pytest.raises(ValueError, match=message):
    hf.network_from_config(config)


def test_an_error_of_a_configuration_has_the_path_of_its_file(llama):
  folder, _, tensors = llama
  quantised = {'quantization_config': {'quant_method': 'awq'}}
  for config in (LLAMA | {'hidden_act': 'tanh'}, LLAMA | quantised, {'a': 1}, {'model_type': []}):
    assert f'{folder}/config.json' in _error(_save(folder, config, tensors))
  _save(folder, LLAMA, tensors)
  (folder / 'generation_config.json').write_text('{"eos_token_id": [true]}')
  assert f"{folder}/generation_config.json: 'eos_token_id'" in _error(folder)
  (folder / 'config.json').write_text('{"rms_norm_eps": %s}' % ('9' * 5000))
  assert says(_error(folder), f'{folder}/config.json', 'JSON')


@dataclasses.dataclass(frozen=True)
class Bigram(Network):
  """A network of nobody's family: no config, no dtype, no layers."""

  vocab_size: int
  eos_ids: tuple[int, ...] = ()

  def param_shapes(self):
    shape = lambda *n: jax.ShapeDtypeStruct(n, jnp.float32)
    return {'head': {'kernel': shape(3, self.vocab_size), 'bias': shape(self.vocab_size)}}


@mock.patch.dict(hf.FAMILIES)
def test_a_network_of_ones_own_is_read_by_the_names_that_are_declared(tmp_path):
  make = lambda config, *, eos_ids, **_: Bigram(config['vocab_size'], eos_ids)
  checkpoints.family('bigram', network=make, names={'head': 'out'})
  tensors = {'out.weight': np.arange(15, dtype=np.float32).reshape(5, 3), 'out.bias': np.ones(5, np.float32)}
  config = {'model_type': 'bigram', 'vocab_size': 5, 'eos_token_id': 4, 'architectures': ['MedusaOfOurs']}
  _save(tmp_path, config, tensors)
  model = checkpoints.load(tmp_path, scan=True)
  assert hf.network_of(tmp_path / 'config.json') == model.network
  assert model.network == Bigram(5, (4,))
  assert_equal(model.params, {'head': {'kernel': tensors['out.weight'].T, 'bias': tensors['out.bias']}})


@mock.patch.dict(hf.FAMILIES)
def test_a_family_of_other_sizes_has_the_names_and_the_orientation_of_the_one_it_is_like(tmp_path):
  sizes = dict(n_embd=8, n_head=2, n_layer=1, n_inner=8, n_positions=16, vocab_size=11)
  network = hf.network_from_config(dict(model_type='gpt2', **sizes))
  folder = hf.write(tmp_path / 'model', Model(network.init(jax.random.key(0)), network))
  expected = checkpoints.load(folder).params
  checkpoints.family('gpt2_of_ours', like='gpt2', network=lambda config, **_: network)
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | {'model_type': 'gpt2_of_ours'}))
  assert_equal(checkpoints.load(folder).params, expected)
