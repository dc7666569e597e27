"""`load` recognises the format of a path, and raises one clear error for anything else."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import fake_hub
import jax
import jax.numpy as jnp
from matching import having, says
import pytest
import safetensors
from tiers import long_but
from tiny import assert_equal, error_of, model_of
from tiny import T5_V1_1 as T5

from speccascade import checkpoints, decode, methods, sampling
from speccascade.backends import cpu
from speccascade.checkpoints import hf, t5x
from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.data import gguf, sources, tokenizers
from speccascade.drafters import layerskip, ngram
from speccascade.engine import state
from speccascade.host import storage
from speccascade.models.layers import stack_layers
from speccascade.types import Model

_error = functools.partial(error_of, checkpoints.read)
GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / 'models' / 'golden' / 'golden.json').read_text())


@pytest.fixture(scope='module')
def model():
  return model_of(T5)


def test_a_sampler_is_what_a_checkpoint_asks_for(tmp_path, model):
  folder = hf.write(tmp_path / 'm', model)

  def of(**settings) -> sampling.Sampler:
    (folder / 'generation_config.json').write_text(json.dumps(settings))
    return sampling.Sampler.of(checkpoints.load(folder))

  assert of(temperature=0.6, top_p=0.9) == sampling.Sampler(0.0, top_p=0.9)
  sampled = dict(do_sample=True, top_k=20, top_p=0.8, min_p=None, repetition_penalty=1.05, eos_token_id=[1, 2])
  assert of(temperature=0.7, **sampled) == sampling.Sampler(0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
  assert of(do_sample=True, top_k=0, typical_p=1.0) == sampling.Sampler()
  with pytest.warns(UserWarning, match='num_beams=4'):
    assert of(num_beams=4) == sampling.Sampler(0.0)
  with pytest.raises(ValueError, match="temperature='warm'"):
    of(do_sample=True, temperature='warm')


@pytest.mark.long
def test_a_path_may_mean_the_first_layers_which_share_the_arrays(tmp_path):
  network = hf.network_from_config(T5 | {'num_layers': 3})
  saved = hf.write(tmp_path / 'deep', Model(network.init(jax.random.key(0)), network))
  first, second, deep = checkpoints.load_all([f'{saved}@1', f'{saved}@2', saved])
  assert [m.name for m in (first, second, deep)] == ['deep-first1', 'deep-first2', 'deep']
  for part in (first, second):
    assert part.network.shares_cache(part.params, deep.network, deep.params)
  assert checkpoints.digest(f'{saved}@1') == first.digest == f'{deep.digest}-first1'
  assert state.cache_slots([first, second, deep]) == (2, 2, 2)
  assert [m.name for m in checkpoints.load_all([saved, saved])] == ['deep', 'deep 2']
  wholes = []
  given = [Checkpoint(f'{saved}@1', name='part'), Checkpoint(str(saved))]
  part, deep = (c.load(None, wholes) for c in given)
  assert part.name == 'part' and part.network.shares_cache(part.params, deep.network, deep.params)
  with pytest.raises(ValueError, match=having('layers=3', '1 to 2', 'deep')):
    checkpoints.load(f'{saved}@3')
  with pytest.raises(ValueError, match=having('layers=1', 'deep-first1', 'one layer')):
    layerskip.layerskip(first, 1)
  shutil.move(saved, tmp_path / 'deep@1')  # a folder of that name is that folder
  assert checkpoints.load(tmp_path / 'deep@1').name == 'deep@1'
  with pytest.raises(FileNotFoundError, match='deep'):
    checkpoints.load(f'{saved}@2')


def test_a_path_may_mean_prompt_lookup_for_its_model(tmp_path, model):
  saved = hf.write(tmp_path / 'deep', model)
  drafter, verifier = checkpoints.load_all([f'{saved}@lookup', saved])
  assert isinstance(drafter.network, ngram.NGram) and drafter.network.vocab_size == verifier.network.vocab_size
  assert checkpoints.digest(f'{saved}@lookup') == drafter.digest == f'{verifier.digest}@lookup'
  given = [Checkpoint(f'{saved}@lookup'), Checkpoint(str(saved))]
  assert [c.load(None).digest for c in given] == [drafter.digest, verifier.digest]


@pytest.fixture
def folders(tmp_path, model):
  return {
    'hf': hf.write(tmp_path / 'hf', model),
    't5x': t5x.write(tmp_path / 't5x', model, step=3),
    'steps': tmp_path / 't5x',
  }


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(GOLDEN, ['t5_v1_1']))
def test_what_was_loaded_and_decoded_with_is_saved_and_read_back_equal(tmp_path, monkeypatch, name):
  monkeypatch.setattr(cpu, '_CACHED', 0)  # the backend prepares kernels of its own, however small
  monkeypatch.setattr(cpu, '_fuses_sums', lambda: True)
  config = GOLDEN[name]['config']
  loaded = checkpoints.load(hf.write(tmp_path / 'hf', model_of(config)))
  decode(methods.autoregressive(), [loaded], [[3, 4]], max_new_tokens=2)
  writers = {'hf': hf.write}
  if config['model_type'] in ('t5', 'mt5', 'umt5'):
    writers |= {'t5x': functools.partial(t5x.write, step=1)}
  for kind, write in writers.items():
    back = checkpoints.load(write(tmp_path / f'{kind} again', loaded))
    assert back.network == loaded.network
    assert_equal(back.params, loaded.params)


def test_dtype_scan_and_name_are_as_asked_for(folders, model):
  expected = stack_layers(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
  for folder in folders.values():
    loaded = checkpoints.read(str(folder), dtype=jnp.bfloat16, scan=True, name='large')
    assert loaded.name == 'large' and loaded.network.scan and loaded.network.dtype == 'bfloat16'
    assert_equal(loaded.params, expected)
  with pytest.raises(ValueError, match=having('int4', 'float32')):
    checkpoints.read(folders['hf'], dtype='int4')
  with pytest.raises(ValueError, match=having('half-ish', 'float32')):
    checkpoints.read(folders['hf'], dtype='half-ish')


def test_a_tokenizer_may_be_given(folders, families, tmp_path):
  family = families / 'multi30k'
  loaded = checkpoints.read(folders['hf'], tokenizer=family / 'small')
  assert loaded.tokenizer == tokenizers.Tokenizer(str(family / 'spiece.model'))
  assert checkpoints.read(folders['hf'], tokenizer=loaded.tokenizer).tokenizer is loaded.tokenizer
  with pytest.raises(FileNotFoundError, match='tokenizer.json'):
    checkpoints.read(folders['hf'], tokenizer=tmp_path / 't5x')


@pytest.mark.parametrize(('family', 'size'), [('multi30k', 'small'), ('gsm8k', 'draft')])
def test_the_shared_checkpoints_load_with_their_tokenizer(families, family, size):
  loaded = checkpoints.read(families / family / size)
  assert loaded.name == size and loaded.network.dtype == 'bfloat16'
  assert len(loaded.tokenizer.pieces()) == loaded.network.vocab_size
  assert loaded.tokenizer.eos_ids == loaded.network.eos_ids


def test_an_activation_is_given_to_t5x_alone(folders):
  with pytest.raises(ValueError, match="activation='relu'"):
    checkpoints.load(folders['hf'], activation='relu')


def test_a_path_that_is_nothing_says_what_was_found_and_expected(tmp_path):
  message = _error(tmp_path / 'nowhere', FileNotFoundError)
  assert says(message, f'{tmp_path}/nowhere', 'Hugging Face', 'org/name') and 'mean' not in message
  assert 'did you mean smollm2?' in _error(tmp_path / 'smolm2', FileNotFoundError)
  assert says(_error(tmp_path, ValueError), 'empty', 'Hugging Face')
  (tmp_path / 'notes.txt').write_text('x')
  assert f'{tmp_path}/notes.txt is a file' in _error(tmp_path / 'notes.txt', NotADirectoryError)
  (tmp_path / 'small').mkdir()
  (tmp_path / 'small' / 'config.json').write_text('{}')
  message = _error(tmp_path, ValueError)
  assert says(message, 'notes.txt, small/', f'{tmp_path}/small?')
  for i in range(20):
    (tmp_path / f'a{i:02}').write_text('')
  assert 'a07 and 14 more' in _error(tmp_path, ValueError)


def test_half_of_a_folder_is_told_from_nothing(folders, tmp_path):
  (folders['hf'] / 'model.safetensors').unlink()
  assert 'model.safetensors' in _error(folders['hf'], FileNotFoundError)
  folders['hf'].rename(tmp_path / 'other[1].tmp-write')
  assert 'other[1].tmp-write' in _error(tmp_path / 'other[1]', ValueError)
  (folders['t5x'] / 'checkpoint').unlink()
  assert says(_error(folders['t5x'], FileNotFoundError), "'checkpoint'", "'state'")


@pytest.fixture
def hub(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  made = fake_hub.Hub(tmp_path / 'hub')
  made.stand_in(monkeypatch)
  return made


def test_of_a_hub_id_what_is_read_is_fetched_and_it_gives_the_name(folders, hub, tmp_path):
  shutil.copytree(folders['hf'], tmp_path / 'there')
  others = 'pytorch_model.bin', 'consolidated.safetensors', 'original/params.json', 'onnx/model.safetensors', 'x.md'
  for name in others:
    (tmp_path / 'there' / name).parent.mkdir(exist_ok=True)
    (tmp_path / 'there' / name).write_text('{}')
  hub.given['org/name', None] = hub.given['org/name', 'v2'] = tmp_path / 'there'
  model = checkpoints.read('org/name')
  assert model.network.config.embed_dim == 8 and model.name == 'name'
  assert {*hub.fetched['org/name']} == {p.name for p in folders['hf'].iterdir()}
  for text, settings in (('org/name@v2', {}), ('org/name', dict(revision='v2')), ('org/name@v2', dict(revision='v2'))):
    hub.fetched.clear()
    assert checkpoints.load(text, **settings).name == 'name' and 'model.safetensors' in hub.fetched['org/name']
  assert sources.parse('org/name@v2@1') == ('org/name@v2', 1)
  with pytest.raises(ValueError, match=having('org/name@v2', "revision='v3'", 'leave one out')):
    checkpoints.load('org/name@v2', revision='v3')
  with pytest.raises(ValueError, match=having('hf', "revision='v9'")):
    checkpoints.load(folders['hf'], revision='v9')
  assert 'there/missing' in _error('there/missing', FileNotFoundError)  # there/ is a folder here


def test_a_folder_called_as_an_organisation_hides_no_model_of_it_but_the_one_that_it_has(folders, hub, tmp_path):
  hub.given['org/name', None] = hub.given['org/other', None] = folders['hf']
  (tmp_path / 'org' / 'other').mkdir(parents=True)
  assert checkpoints.read('org/name').name == 'name' and [*hub.fetched] == ['org/name']
  assert 'empty' in _error('org/other', ValueError) and 'X.gguf' in _error('org/other/X.gguf', FileNotFoundError)


def test_a_file_of_llama_cpp_has_a_revision_and_capitals_as_any_source_may(hub, monkeypatch, tmp_path):
  (tmp_path / 'there').mkdir()
  monkeypatch.setattr(gguf, 'folder', lambda file: file)
  for name in ('X.gguf', 'X.GGUF'):
    (tmp_path / 'there' / name).write_text('')
    hub.given['org/name', 'refs/pr/1'] = hub.given['org/name', None] = tmp_path / 'there'
    for text in (f'org/name/{name}', f'org/name/{name}@refs/pr/1', f'there/{name}'):
      path, called = sources.find(text, storage.everything)
      assert (path.name, called) == (name, 'X'), text
  with pytest.raises(ValueError, match=having("revision='v3'", 'leave one out')):
    sources.find('org/name/X.gguf@v2', storage.everything, revision='v3')


def test_a_step_of_t5x_is_called_as_the_folder_above_it(folders):
  for path in (folders['t5x'], folders['steps']):
    assert checkpoints.read(path).name == 't5x'


def test_of_weights_in_shards_those_of_the_index_are_fetched(folders, hub, tmp_path):
  there = tmp_path / 'there'
  shutil.copytree(folders['hf'], there)
  (there / 'model.safetensors').rename(there / 'model-00001-of-00001.safetensors')
  with safetensors.safe_open(there / 'model-00001-of-00001.safetensors', 'np') as file:
    index = {'weight_map': dict.fromkeys(file.keys(), 'model-00001-of-00001.safetensors')}
  (there / 'model.safetensors.index.json').write_text(json.dumps(index))
  (there / 'consolidated.safetensors').write_text('')
  hub.given['org/name', None] = there
  assert checkpoints.read('org/name').network.config.embed_dim == 8
  fetched = hub.fetched['org/name']
  assert 'model-00001-of-00001.safetensors' in fetched and 'consolidated.safetensors' not in fetched
  (there / 'model.safetensors.index.json').write_text('{')
  assert 'model.safetensors.index.json is not valid JSON' in _error('org/name', ValueError)


def test_a_hub_id_is_a_tokenizer_of_which_no_weights_are_fetched(families, hub):
  folder = families / 'sums' / 'hf_tokenizer'
  hub.given['org/name', None] = hub.given['org/name', 'v2'] = folder
  tokenizer = tokenizers.load(folder)
  for text in ('org/name', 'org/name@v2', 'org/name@2', 'org/name@v2@frequent=x.txt'):
    assert tokenizers.load(text).encode('4+4=8') == tokenizer.encode('4+4=8')
  assert {*hub.fetched['org/name']} == {p.name for p in folder.iterdir()}
  hub.given['org/model', None] = families / 'sums' / 'draft'
  with pytest.raises(FileNotFoundError, match='org/model: no tokenizer there'):
    tokenizers.load('org/model')
  assert {*hub.fetched['org/model']} == {'config.json', 'generation_config.json'}


def test_what_the_hub_lacks_or_this_machine_cannot_reach_is_explained(hub, monkeypatch, tmp_path):
  import huggingface_hub

  (tmp_path / 'there').mkdir()
  (tmp_path / 'there' / 'model-Q4_K_M.gguf').write_text('')
  hub.given['org/name', None] = tmp_path / 'there'
  assert says(_error('org/name', ValueError), 'name', 'llama.cpp') and not hub.fetched

  def unreachable(*_, **__):
    raise OSError('Name or service not known\nand forty more lines')

  sources._listed.cache_clear()
  monkeypatch.setattr(huggingface_hub, 'model_info', unreachable)
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', unreachable)
  message = _error('org/name', FileNotFoundError)
  assert says(message, 'org/name', '(Name or service not known)')
  assert 'download' in message and '\n' not in message
  for text, settings in (('org/name', dict(revision='v9')), ('org/name@v9', {})):
    with pytest.raises(FileNotFoundError, match=having("'v9'", 'hf download org/name --revision v9 --local-dir')):
      checkpoints.load(text, **settings)


def test_without_a_network_a_model_that_was_fetched_is_read_and_half_a_model_is_explained(folders, hub, monkeypatch):
  import huggingface_hub

  hub.given['org/name', None] = folders['hf']
  expected = checkpoints.read('org/name').digest

  def unreachable(*_, **__):
    raise OSError('Name or service not known')

  sources._listed.cache_clear()
  monkeypatch.setattr(huggingface_hub, 'model_info', unreachable)
  assert checkpoints.read('org/name').digest == expected
  cache = pathlib.Path(huggingface_hub.snapshot_download('org/name', local_files_only=True))
  (cache / 'model.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match=having('org/name', 'Name or service not known', 'hf download org/name')):
    checkpoints.read('org/name')


def test_a_digest_is_of_what_is_read(folders, tmp_path):
  digest = checkpoints.digest(folders['hf'])
  for name in ('pytorch_model.bin.index.json', 'consolidated.safetensors'):
    (folders['hf'] / name).write_text('{}')
  assert checkpoints.digest(folders['hf']) == digest


def test_the_tokenizer_of_steps_is_that_of_the_latest(tmp_path, model):
  path = tmp_path / 'm'
  for step, name in ((9, 'old'), (10, 'new')):
    (path / f'checkpoint_{step}').mkdir(parents=True)
    (path / f'checkpoint_{step}' / 'tokenizer.json').write_text(name)
  assert pathlib.Path(tokenizers.find(path).path).parent.name == 'checkpoint_10'
  for given in ('smollm2', 'family:sums/draft', tmp_path / 'none'):
    with pytest.raises(ValueError, match=having('no hub model', "revision='v9'")):
      checkpoints.load(given, revision='v9')


def test_a_digest_tells_weights_apart(folders, model, tmp_path):
  digests = {kind: checkpoints.digest(folder) for kind, folder in folders.items()}
  assert digests.pop('steps') == digests['t5x'] and len(set(digests.values())) == 2
  shutil.copytree(folders['hf'], tmp_path / 'copy')
  (tmp_path / 'copy' / 'README.md').write_text('of no matter')
  assert checkpoints.digest(tmp_path / 'copy') == digests['hf']
  decoder = model.params['decoder']
  norm = {'scale': decoder['decoder_norm']['scale'] + 1e-3}
  model = dataclasses.replace(model, params={**model.params, 'decoder': {**decoder, 'decoder_norm': norm}})
  others = {
    'hf': hf.write(tmp_path / 'b' / 'hf', model),
    't5x': t5x.write(tmp_path / 'b' / 't5x', model, step=3),
  }
  for kind, folder in others.items():
    assert checkpoints.digest(folder) != digests[kind]
  (folders['t5x'].parent / 'config.gin').write_text('x')
  assert checkpoints.digest(folders['steps']) != digests['t5x']


def test_a_digest_tells_tokenizers_apart_inside_a_folder_and_beside_it(folders, tmp_path):
  shutil.copytree(folders['hf'], tmp_path / 'models' / 'small')
  folder, seen = tmp_path / 'models' / 'small', set()
  (tmp_path / 'mine.json').write_text('[ ]')
  for name, content in (('models/tokenizer.json', '{}'), ('models/tokenizer.json', '{ }'), ('mine.json', '[]')):
    (tmp_path / name).write_text(content)
    seen |= {checkpoints.digest(folder), checkpoints.digest(folder, tokenizer=tmp_path / 'mine.json')}
  (folder / 'tokenizer.json').write_text('{ }')
  assert len(seen) == 4 and checkpoints.digest(folder) not in seen
  shutil.copytree(tmp_path / 'models', tmp_path / 'other' / 'folder')
  other = tmp_path / 'other' / 'folder' / 'small'
  for path in (tmp_path / 'models', None):
    assert checkpoints.digest(folder, tokenizer=path) == checkpoints.digest(other, tokenizer=path)


def test_a_digest_samples_every_tensor_of_a_huge_file(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  file, giga = tmp_path / 'model.safetensors', 1 << 30
  entries = {
    'large': {'dtype': 'F32', 'shape': [25 * giga], 'data_offsets': [0, 100 * giga]},
    'small': {'dtype': 'F32', 'shape': [8], 'data_offsets': [100 * giga, 100 * giga + 32]},
    'last': {'dtype': 'F32', 'shape': [giga], 'data_offsets': [100 * giga + 32, 104 * giga + 32]},
  }
  header = json.dumps(entries).encode()
  file.write_bytes(len(header).to_bytes(8, 'little') + header)
  os.truncate(file, 8 + len(header) + 104 * giga + 32)  # a hole: to read all of it would take minutes
  seen = {checkpoints.digest(tmp_path)}
  for offset in (8 + len(header) + 50 * giga, 8 + len(header) + 100 * giga + 31):
    with file.open('r+b') as f:
      f.seek(offset)
      f.write(b'x')
    seen.add(checkpoints.digest(tmp_path))
  assert len(seen) == 3
