"""Write the logits of tiny models by transformers, tests/models/golden/golden.json, and the table of docs/models.md.

  PYTHONPATH=. python tests/models/make_golden.py        # needs torch and transformers

The weights come from tests/models/test_golden.py. The configurations are those here, partly in the older spelling
(`rope_theta`, `rope_scaling`), which the parity tests, saved by a new transformers, do not meet; and of each other
family its tiny one.
"""

import importlib
import json
from pathlib import Path
import re
import sys
import tempfile

import numpy as np
from safetensors.numpy import save_file
import torch
import transformers

from speccascade.checkpoints.hf import export, FAMILIES, names, network_from_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / 'tests'))
table, header = (getattr(importlib.import_module('families'), x) for x in ('table', 'HEADER'))
GOLDEN, PROMPT, weights = (getattr(importlib.import_module('test_golden'), x) for x in ('GOLDEN', 'PROMPT', 'weights'))

VOCAB = 61
LENGTH = 11

_BASE = {
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'intermediate_size': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 12,
  'max_position_embeddings': 64,
  'eos_token_id': 2,
  'bos_token_id': 1,
  'pad_token_id': 0,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8,
}
_GEMMA = _BASE | {'sliding_window': 4, 'query_pre_attn_scalar': 20, 'final_logit_softcapping': 4.0}
_GPT2 = {'vocab_size': VOCAB, 'n_embd': 32, 'n_head': 4, 'n_layer': 3, 'n_positions': 32, 'eos_token_id': 2}
_OPT = {
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'ffn_dim': 24,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'max_position_embeddings': 32,
  'word_embed_proj_dim': 32,
}
_T5 = {
  'vocab_size': VOCAB,
  'd_model': 32,
  'd_kv': 12,
  'd_ff': 24,
  'num_layers': 2,
  'num_decoder_layers': 3,
  'num_heads': 4,
  'decoder_start_token_id': 0,
}

CONFIGS = {
  'llama2': {'model_type': 'llama', **_BASE, 'rope_theta': 5000.0},
  'llama3': {'model_type': 'llama', **_BASE, 'rope_theta': 500000.0, 'rope_scaling': _LLAMA3},
  'llama_linear': {'model_type': 'llama', **_BASE, 'rope_scaling': {'type': 'linear', 'factor': 2.0}},
  'mistral': {'model_type': 'mistral', **_BASE, 'sliding_window': 5, 'rope_theta': 10000.0},
  'qwen2': {'model_type': 'qwen2', **_BASE, 'head_dim': 8, 'tie_word_embeddings': True, 'rope_theta': 1000000.0},
  'qwen3': {'model_type': 'qwen3', **_BASE, 'rope_theta': 1000000.0},
  'gemma2': {'model_type': 'gemma2', **_GEMMA, 'attn_logit_softcapping': 2.0},
  'gemma3': {
    'model_type': 'gemma3_text',
    **_GEMMA,
    'sliding_window_pattern': 2,
    'rope_theta': 1000000.0,
    'rope_local_base_freq': 10000.0,
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
  },
  'opt': {'model_type': 'opt', **_OPT},
  'opt_350m': {'model_type': 'opt', **_OPT, 'do_layer_norm_before': False, 'word_embed_proj_dim': 20},
  'gpt2': {'model_type': 'gpt2', **_GPT2},
  't5_v1_0': {'model_type': 't5', **_T5, 'feed_forward_proj': 'relu'},
  't5_v1_1': {'model_type': 't5', **_T5, 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
  'mt5': {'model_type': 'mt5', **_T5, 'tie_word_embeddings': False},
}
_HERE = {config['model_type'] for config in CONFIGS.values()}
CONFIGS |= {n: {'model_type': n, **f.tiny} for n, f in FAMILIES.items() if f.hf and n not in _HERE}


def reference(config: dict, tensors: dict[str, np.ndarray]):
  """Return transformers' model with these weights, all of them used."""
  seq2seq = network_from_config(config).start_id is not None
  auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
  with tempfile.TemporaryDirectory() as folder:
    Path(folder, 'config.json').write_text(json.dumps(config))
    save_file(tensors, Path(folder, 'model.safetensors'), metadata={'format': 'pt'})
    model, info = auto.from_pretrained(folder, attn_implementation='eager', output_loading_info=True)
  missing = {name for name in info['missing_keys'] if not names.ignored(name)}
  missing -= {'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight'}
  if missing or info['unexpected_keys']:
    raise ValueError(f'{config["model_type"]}: missing {missing}, unexpected {info["unexpected_keys"]}')
  return model.eval()


def golden(config: dict, seed: int) -> dict:
  """Return one entry of the file."""
  network = network_from_config(config)
  model = reference(config, export(network, config['model_type'], weights(network, seed)))
  random = np.random.RandomState(seed + 1)
  tokens = [0, *random.randint(3, VOCAB, LENGTH - 1).tolist()]
  case = {'config': config, 'seed': seed, 'tokens': tokens}
  inputs = {'input_ids': torch.tensor([tokens])}
  if network.start_id is not None:
    case['source'] = random.randint(3, VOCAB, 7).tolist()
    inputs = {'input_ids': torch.tensor([case['source']]), 'decoder_input_ids': torch.tensor([tokens])}
  with torch.no_grad():
    logits = model(**inputs).logits[0].numpy()[0 if 'source' in case else PROMPT - 1 :]
  ids = [0, 1, 17, 42, network.vocab_size - 1]
  numbers = [[round(float(x), 6) for x in row] for row in logits[:, ids]]
  return case | {'ids': ids, 'logits': numbers, 'argmax': logits.argmax(-1).tolist()}


def main():
  """Write the files."""
  cases = {name: golden(config, seed) for seed, (name, config) in enumerate(CONFIGS.items())}
  GOLDEN.parent.mkdir(exist_ok=True)
  lines = [f'{json.dumps(name)}: {json.dumps(case)}' for name, case in cases.items()]
  GOLDEN.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
  page = ROOT / 'docs' / 'models.md'
  page.write_text(re.sub(re.escape(header) + r'(\|.*\n)*', lambda _: table(), page.read_text()))


if __name__ == '__main__':
  main()
