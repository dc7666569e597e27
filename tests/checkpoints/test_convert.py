"""The converter preserves every bit, verifies it, and destroys nothing."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys

from flax.traverse_util import flatten_dict
import jax
from matching import having
import pytest
from tiers import long_but
from tiny import assert_equal, model_of, T5

import speccascade
from speccascade import checkpoints, convert
from speccascade.checkpoints import files, hf, t5x
from speccascade.models import t5 as networks
from speccascade.models.decoder import DecoderConfig, Span
from speccascade.types import Model

SWITCHES = [
  {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
  {'feed_forward_proj': 'relu', 'tie_word_embeddings': True},
  {'feed_forward_proj': 'gated-silu', 'tie_word_embeddings': True, 'scale_decoder_outputs': False},
  {'tie_word_embeddings': False, 'scale_decoder_outputs': True, 'num_decoder_layers': 2, 'eos_token_id': [1, 3]},
  {'model_type': 'umt5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False, 'num_decoder_layers': 2},
  {'relative_attention_max_distance': 20, 'relative_attention_num_buckets': 8, 'decoder_start_token_id': 2},
]


@pytest.fixture
def source(tmp_path):
  return hf.write(tmp_path / 'source', model_of(T5))


@pytest.mark.full
@pytest.mark.parametrize('switches', long_but(SWITCHES, SWITCHES[:1]))
def test_a_t5_survives_every_format_in_turn(tmp_path, switches):
  model = model_of(T5 | switches, 'bfloat16')
  folder = t5x.write(tmp_path / 'start', model)
  for i, form in enumerate(('hf', 't5x', 'hf')):
    unscaled = form == 'hf' and not (model.network.config.shared_bias or model.network.config.scale_outputs)
    with pytest.warns(UserWarning, match='√d') if unscaled else contextlib.nullcontext():
      folder = convert.convert(folder, tmp_path / f'{i}-{form}', form=form)
    loaded = checkpoints.read(folder)
    assert loaded.network == model.network
    assert_equal(loaded.params, model.params)


def test_the_command_prints_what_it_did(source, tmp_path, capsys):
  assert convert.main([str(source), str(tmp_path / 'b'), '--format', 't5x', '--dtype', 'bfloat16']) == 0
  out = capsys.readouterr().out
  assert f'{tmp_path}/b/checkpoint_1' in out and 'verified' in out and 'M parameters' in out
  assert checkpoints.read(tmp_path / 'b').network.dtype == 'bfloat16'


def test_errors_of_the_command_are_one_line(source, tmp_path, capsys):
  for wrong, part in (
    (['--step', '3'], '--step=3'),
    (['--format', 'hf', '--scan'], '--scan'),
    (['--format', 't5x', '--step', '-1'], '--step=-1'),
    (['--activation', 'relu'], 'relu'),
  ):
    assert convert.main([str(source), str(tmp_path / 'b'), *wrong]) == 1
    err = capsys.readouterr().err
    assert part in err and err.count('\n') == 1
    assert not (tmp_path / 'b').exists()


UNEVEN = T5 | {'model_type': 'umt5', 'num_decoder_layers': 2}


@pytest.mark.parametrize('config', long_but([T5, UNEVEN], [T5]), ids=['t5', 'umt5'])
def test_t5x_gets_a_step_and_scanned_layers(tmp_path, config):
  model = model_of(config)
  source = hf.write(tmp_path / 'source', model)
  folder = convert.convert(source, tmp_path / 'b', form='t5x', step=12, scan=True)
  assert folder == tmp_path / 'b' / 'checkpoint_12'
  assert (folder / 'target.decoder.decoder.self_attention.query.kernel').is_dir()
  assert not (folder / 'target.decoder.layers_0.self_attention.query.kernel').exists()
  loaded = checkpoints.read(tmp_path / 'b')
  assert loaded.network == model.network
  assert_equal(loaded.params, model.params)
  assert convert.convert(source, tmp_path / 'b', form='t5x', step=13) == tmp_path / 'b' / 'checkpoint_13'
  with pytest.raises(FileExistsError, match=having('checkpoint_13', '--overwrite')):
    convert.convert(source, tmp_path / 'b', form='t5x', step=13)
  with pytest.raises(ValueError, match=having('checkpoint_3', '4')):
    convert.convert(source, tmp_path / 'checkpoint_3', form='t5x', step=4)


@pytest.mark.long
def test_a_t5gemma_that_was_made_here_is_written_with_contexts_and_not_as_t5x(tmp_path):
  stack = DecoderConfig(11, 8, 2, 1, 4, 6, (Span(3), Span()), activation='gelu_tanh', norm_offset=1.0, norms='sandwich')
  stack = dataclasses.replace(stack, embed_scale=8**0.5, attention_scale=0.5)
  network = networks.T5(networks.T5GemmaConfig(**vars(stack), encoder=stack), start_id=2)
  model = Model(network.init(jax.random.key(0)), network, name='mine')
  source = hf.write(tmp_path / 'mine', model)
  back = checkpoints.read(convert.convert(source, tmp_path / 'hf', form='hf'))
  assert back.network == hf.settled(network) and back.network.config.encoder.context == 2048
  assert_equal(back.params, model.params)
  with pytest.raises(ValueError, match=having('mine is a T5Gemma', 'write hf')):
    t5x.write(tmp_path / 't5x', model)
  for switch in (dict(experts=4, experts_per_token=2), dict(norms='shared')):
    with pytest.raises(ValueError, match=having(f'{[*switch][0]}={[*switch.values()][0]!r}')):
      dataclasses.replace(network.config, encoder=dataclasses.replace(stack, **switch))


@pytest.mark.long
def test_a_bias_for_each_layer_comes_with_a_warning(tmp_path):
  model = model_of(T5 | {'model_type': 'umt5', 'tie_word_embeddings': False})
  with pytest.warns(UserWarning, match=having('transformers 5', '√d')):
    hf.write(tmp_path / 'hf', model)


@pytest.mark.long
def test_a_full_disk_names_the_folder_and_what_to_do(source, tmp_path):
  limited = (
    'import resource, sys; from speccascade import convert; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); '
    "print([convert.main([*sys.argv[1:], f'--format={form}']) for form in ('t5x', 'hf')])"
  )
  out = subprocess.run([sys.executable, '-c', limited, source, tmp_path / 'b'], capture_output=True, text=True)
  assert out.stdout == '[1, 1]\n'
  said = [line for line in out.stderr.splitlines() if line.startswith('error: ')]
  assert len(said) == 2 and all(f'{tmp_path}/b' in line for line in said), said
  assert all('cannot be written (File too large): free some space, then run' in line for line in said), said


def test_nothing_is_destroyed(source, tmp_path):
  with pytest.raises(ValueError, match='source'):
    convert.convert(source, source, overwrite=True)
  with pytest.raises(ValueError, match='source'):
    convert.convert(source, tmp_path, overwrite=True)
  with pytest.raises(ValueError, match='source'):
    convert.convert(f'{source}@1', source, overwrite=True)
  step = convert.convert(source, tmp_path / 't5x', form='t5x')
  with pytest.raises(ValueError, match='source'):
    convert.convert(step.parent, step.parent, form='t5x', dtype='bfloat16', overwrite=True)
  target = convert.convert(source, tmp_path / 'b')
  with pytest.raises(FileExistsError, match='pass --overwrite'):
    convert.convert(source, target)
  assert convert.convert(source, target, form='hf', overwrite=True) == target
  assert checkpoints.kind(target) == 'hf'
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'chapter1.tex').write_text('x')
  with pytest.raises(ValueError, match=having('thesis', 'chapter1.tex')):
    convert.convert(source, tmp_path / 'thesis', overwrite=True)
  shutil.copytree(target, tmp_path / 'foreign')
  (tmp_path / 'foreign' / 'model.safetensors').rename(tmp_path / 'foreign' / 'model-00001-of-00001.safetensors')
  with pytest.raises(FileExistsError, match='foreign is no checkpoint of ours'):
    convert.convert(tmp_path / 'nowhere', tmp_path / 'foreign', overwrite=True)  # before the source is read
  (tmp_path / 'file').write_text('x')
  with pytest.raises(NotADirectoryError, match='/file'):
    convert.convert(source, tmp_path / 'file', overwrite=True)
  (tmp_path / 'empty').mkdir()
  assert convert.convert(source, tmp_path / 'empty') == tmp_path / 'empty'


def test_reading_back_notices_a_changed_tensor_and_network(source, tmp_path, monkeypatch):
  checksum = files.checksum
  seen = []
  count = len(flatten_dict(model_of(T5).params, sep='.'))
  monkeypatch.setattr(files, 'checksum', lambda x: seen.append(1) or checksum(x) + (len(seen) == count + 3))
  with pytest.raises(ValueError, match="tensor '.*' .* read back"):
    convert.convert(t5x.write(tmp_path / 'a', model_of(T5)), tmp_path / 'b', form='hf')
  monkeypatch.undo()
  monkeypatch.setattr(hf.writer, 'config_of', lambda network: T5 | {'relative_attention_max_distance': 7})
  with pytest.raises(ValueError, match=having('network', 'read back', 'convert again')):
    convert.convert(source, tmp_path / 'c', form='hf')


def test_the_generation_config_comes_along(tmp_path):
  source = hf.write(tmp_path / 'source', model_of(T5))
  config = {'do_sample': True, 'temperature': 0.5, 'eos_token_id': [2, 3]}
  (source / 'generation_config.json').write_text(json.dumps(config))
  loaded = checkpoints.read(convert.convert(source, tmp_path / 'b'))
  assert speccascade.Sampler.of(loaded).temperature == 0.5
  assert json.loads(loaded.generation) == config and loaded.network.eos_ids == (2, 3)
  network = dataclasses.replace(loaded.network, eos_ids=(4,))
  assert checkpoints.read(hf.write(tmp_path / 'c', loaded.replace(network=network))).network.eos_ids == (4,)


def test_the_tokenizer_comes_along(families, tmp_path):
  family = families / 'gsm8k'
  source = tmp_path / 'source'
  shutil.copytree(family / 'draft', source)
  for file in (family / 'hf_tokenizer').iterdir():
    shutil.copyfile(file, source / file.name)
  folder = convert.convert(source, tmp_path / 'far' / 'away')
  loaded = checkpoints.read(folder)
  assert loaded.tokenizer.path == str(folder / 'tokenizer.json')
  assert json.loads((folder / 'tokenizer_config.json').read_text())['bos_token'] == '<s>'
  assert loaded.tokenizer.encode('Question: 12') == checkpoints.read(family / 'draft').tokenizer.encode('Question: 12')
