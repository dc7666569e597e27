"""Whatever the config.json of a head says, it is read or refused in a sentence that names the file."""

import json

from matching import having
import numpy as np
import pytest
from safetensors.numpy import save_file
import test_heads
from tiers import long_but

from speccascade.checkpoints import hf

BAD = (None, True, False, 'x', 'false', '', -1, 0, 1, 1.5, -0.5, 1e400, float('nan'), 2**70, 10**9)
BAD += ([], [1], [-1], ['x'], [None], [[1]], [1.5], [10**9], {}, {'x': 1}, {'type': 'x'}, {'rope_type': 5})
FIELDS = (  # that heads read, and that no config of the tests need have
  'architectures model_type speculators_model_type projector_type medusa_num_heads medusa_num_layers draft_vocab_size '
  'transformer_layer_config target_hidden_size norm_before_residual norm_output eagle_aux_hidden_state_layer_ids '
  'eagle_config mask_token_id ptd_token_id pard_token dflash_config aux_hidden_state_layer_ids target_layer_ids '
  'block_size markov_rank markov_head_type rope_scaling rope_parameters rope_theta sliding_window layer_types '
  'hidden_act attention_bias mlp_bias rms_norm_eps head_dim num_hidden_layers eos_token_id quantization_config '
  'tie_word_embeddings use_sliding_window max_window_layers partial_rotary_factor torch_dtype'
).split()
INNER = (  # of an object of a head's own
  'eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids target_layer_ids mask_token_id block_size markov_rank '
  'markov_head_type'
).split()


def changes(config):
  """Yield configs in each of which one field, at the top or inside, has another value or is missing."""
  for key in dict.fromkeys([*config, *FIELDS]):
    yield {k: x for k, x in config.items() if k != key}
    yield from (config | {key: x} for x in BAD)
    if isinstance(config.get(key), dict):
      yield from (config | {key: inner} for inner in changes_inside(config[key]))
  key = 'dflash_config' if 'dflash_config' in config else 'eagle_config'
  yield from (config | {key: (config.get(key) or {}) | {field: x}} for field in INNER for x in BAD)


def changes_inside(config):
  for key in config:
    yield {k: x for k, x in config.items() if k != key}
    yield from (config | {key: x} for x in BAD)


def refused(folder):
  """Return why a head is not read, None where it is."""
  try:
    hf.read(folder)
  except (ValueError, FileNotFoundError) as error:
    assert str(folder) in str(error) and '\n' not in str(error), error
    return str(error)


@pytest.mark.parametrize('name', long_but(test_heads.FORMATS, []))
def test_a_field_of_a_config_is_read_or_refused_in_a_sentence(name, tmp_path):
  folder, _, config = test_heads.FORMATS[name](tmp_path / 'head')
  config = json.loads((folder / 'config.json').read_text())
  assert refused(folder) is None
  for changed in changes(config):
    (folder / 'config.json').write_text(json.dumps(changed))
    try:
      refused(folder)
    except Exception as error:
      different = [k for k in {*config, *changed} if str(config.get(k, '-')) != str(changed.get(k, '-'))]
      raise AssertionError({k: changed.get(k, 'absent') for k in different}) from error


@pytest.mark.parametrize('value', ['false', 0, 1, [True], 'true'])
@pytest.mark.parametrize('key', ['norm_before_residual', 'norm_output'])
def test_a_switch_of_a_head_is_true_or_false(key, value, tmp_path):
  folder, *_ = test_heads.eagle_3(tmp_path / 'head', **{key: value})
  with pytest.raises(ValueError, match=having('config.json', f"'{key}' is {value!r}", 'true or false')):
    hf.read(folder)


WRONG = {
  'missing': lambda x: None,
  'empty': lambda x: x[:0],
  'a number': lambda x: x.reshape(-1)[0].reshape(()),
  'a vector': lambda x: x.reshape(-1),
  'floats': lambda x: x.astype(np.float16) + np.float16(0.5),
  'whole numbers': lambda x: x.astype(np.int32),
  'truth values': lambda x: x.astype(bool),
  'one axis more': lambda x: x[None],
}


@pytest.mark.parametrize('name', long_but(test_heads.FORMATS, ['EAGLE-3', 'Medusa']))
def test_a_tensor_of_a_head_is_read_or_refused_in_a_sentence(name, tmp_path):
  folder, tensors, _ = test_heads.FORMATS[name](tmp_path / 'head')
  (file,) = folder.glob('*.safetensors')
  for tensor, x in tensors.items():
    for wrong, change in WRONG.items():
      changed = {k: y for k, y in (tensors | {tensor: change(x)}).items() if y is not None}
      save_file({k: np.array(y, order='C') for k, y in changed.items()}, file)
      try:
        refused(folder)
      except Exception as error:
        raise AssertionError(f'{tensor}: {wrong}') from error
  save_file({}, file)
  assert refused(folder)
  save_file({k: x.astype(np.int32) for k, x in tensors.items()}, file)
  assert refused(folder)


@pytest.mark.parametrize(
  ('made', 'tensor', 'said'),
  [
    (test_heads.medusa, '100000.0.linear.weight', '3.0.linear.weight'),
    (test_heads.medusa, f'0.{"9" * 5000}.linear.weight', 'linear.weight'),
    (test_heads.eagle_3, 'layers.9999.mlp.up_proj.weight', 'layers.1.'),
    (test_heads.dflash, 'layers.9999.mlp.up_proj.weight', 'layers.2.'),
  ],
)
def test_a_tensor_of_a_far_number_is_refused_at_once(made, tensor, said, tmp_path):
  folder, tensors, _ = made(tmp_path / 'head')
  (file,) = folder.glob('*.safetensors')
  save_file(tensors | {tensor: np.zeros((8, 8), np.float32)}, file)
  assert said in refused(folder)


def test_the_first_head_of_medusa_is_missed(tmp_path):
  folder, tensors, _ = test_heads.medusa(tmp_path / 'head')
  save_file({k: x for k, x in tensors.items() if not k.startswith('0.')}, folder / 'medusa_lm_head.safetensors')
  assert '0.0.linear.weight' in refused(folder)


@pytest.mark.parametrize('d2t', [np.arange(5) + 0.5, np.arange(4), np.zeros((5, 1), int), np.zeros(5, bool)])
def test_the_numbers_of_drafted_tokens_are_whole_and_as_many_as_are_drafted(d2t, tmp_path):
  folder, tensors, _ = test_heads.eagle_3(tmp_path / 'head')
  save_file(tensors | {'d2t': d2t}, folder / 'model.safetensors')
  assert all(part in refused(folder) for part in ("'d2t'", '[5]'))
