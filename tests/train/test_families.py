"""The gin files that train families of models from public data: their sizes, their vocabularies, a stop on the way."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from tiers import long_but

import speccascade
from speccascade.data import families, files, sums
from speccascade.evaluate import config
from speccascade.train import __main__, data, jobs, loop, vocabulary

ROOT = pathlib.Path(__file__).parents[2]
LLAMA = 'train.learned_vocabulary.size=340', 'train.DecoderConfig.vocab_size=340'
TINY_LLAMA = (
  *('draft/train.DecoderConfig.embed_dim=16', 'draft/train.DecoderConfig.head_dim=8', 'draft/train.Settings.steps=6'),
  'train.Settings.widths=((224, 192),)',
)
FAMILIES = {  # bindings of the data, those that make the first job small, and the millions of parameters of all
  'multi30k_trio': (
    ['SOURCE="text.en"', 'TARGET="text.de"'],
    ['train.learned_vocabulary.size=28', 'train.T5Config.vocab_size=28', 'small/train.T5Config.embed_dim=16']
    + ['small/train.T5Config.head_dim=4', 'small/train.Settings.steps=6'],
    {'small': 2.32, 'base': 7.80, 'large': 25.26},
  ),
  'gsm8k_trio': (['PATH="train.jsonl"'], [*LLAMA, *TINY_LLAMA], {'draft': 0.93, 'companion': 1.97, 'target': 20.98}),
  'sums_trio': (['PATH="train.jsonl"'], [*LLAMA, *TINY_LLAMA], {'draft': 0.27, 'companion': 0.67, 'target': 4.26}),
}


@pytest.fixture
def corpora(tmp_path, monkeypatch):
  """Write small corpora into a folder, which becomes the current one."""
  monkeypatch.chdir(tmp_path)
  pathlib.Path('train.jsonl').write_bytes(b''.join(sums.lines(0, 64)))
  for language, words in (('en', 'a red dog runs and sleeps'), ('de', 'ein roter Hund läuft und schläft')):
    texts = [' '.join(words.split()[i % 3 :]) for i in range(64)]
    pathlib.Path(f'text.{language}').write_text('\n'.join(texts) + '\n')


def arguments(name, bindings, *more):
  return [f'--gin_file={ROOT}/gin_configs/train/{name}.gin', *(f'--gin.{b}' for b in bindings), *more]


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(FAMILIES, ['sums_trio']))
def test_a_family_is_trained_with_a_vocabulary_of_its_texts_and_goes_on_after_a_stop(
  name, corpora, monkeypatch, capsys
):
  of_data, small, sizes = FAMILIES[name]
  bindings = [*of_data, *small, 'VOCABULARY="tokenizer.model"', 'train.Settings.batch_size=4']
  given = arguments(name, [*bindings, 'train.Settings.save_every=2'], f'--job={next(iter(sizes))}')
  assert __main__.main([*given, '--out=whole']) == 0
  add = loop.Log.add

  def stopping(self, step, *rest):
    if step == 5:
      raise KeyboardInterrupt
    add(self, step, *rest)

  learned = pathlib.Path('tokenizer.model').read_bytes()
  pathlib.Path('tokenizer.model').unlink()  # and is learned anew, to the same bytes
  with monkeypatch.context() as patch:
    patch.setattr(loop.Log, 'add', stopping)
    assert __main__.main([*given, '--out=stopped']) == 130
  assert __main__.main([*given, '--out=stopped']) == 0
  assert 'going on after step 4 of 6' in capsys.readouterr().out
  whole, stopped = (speccascade.load(f'{run}/{next(iter(sizes))}/model') for run in ('whole', 'stopped'))
  assert pathlib.Path('tokenizer.model').read_bytes() == learned
  jax.tree.map(np.testing.assert_array_equal, whole.params, stopped.params)
  assert whole.tokenizer.decode(whole.tokenizer.encode('a 12')).strip() == 'a 12' or name == 'multi30k_trio'


@pytest.mark.parametrize('name', FAMILIES)
def test_a_family_has_its_sizes(name):
  read = jobs.read([f'{ROOT}/gin_configs/train/{name}.gin'], ['TOKENIZER = None'])
  counted = {}
  for job in read:
    shapes = jax.eval_shape(job.network.init, jax.random.key(0))
    counted[job.name] = round(sum(x.size for x in jax.tree.leaves(shapes)) / 1e6, 2)
  assert counted == FAMILIES[name][2]


def test_a_file_of_objects_gives_pairs_whose_targets_continue_their_sources(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_text('{"q": "one two", "a": "three"}\n')
  texts = [f'Q: one two A: three {"four five six seven eight nine ten"[:i]}' for i in range(30)]
  settings = dict(unk_id=0, bos_id=1, eos_id=2, pad_id=3, byte_fallback=True)
  tokenizer = vocabulary.make(tmp_path / 'x.model', texts, size=340, hard_vocab_limit=False, **settings)
  tokenizer = speccascade.data.tokenizers.load(tokenizer)
  source, target = next(data.pairs(files.jsonl(str(path), prompt_field='Q: {q} A:', target_field='a'), tokenizer))
  decode = tokenizer.decode
  assert source[0] == 1 and target[-1] == 2 and 1 not in target and 2 not in source
  assert decode([*source, *target]) == 'Q: one two A: three'


def test_a_tied_table_begins_with_logits_of_the_size_of_one(corpora):
  (job, *_) = jobs.read([f'{ROOT}/gin_configs/train/sums_trio.gin'], ['TOKENIZER = None'])
  params = loop._initial(job.network, jax.random.key(0))
  table = params['token_embedder']['embedding']
  np.testing.assert_allclose(np.square(table).sum(-1).mean(), 1, atol=0.05)


def test_the_models_of_a_family_are_compared_by_one_config(monkeypatch, tmp_path):
  monkeypatch.delenv(families.FOLDER, raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  trained = families.folder('sums') / 'target' / 'model'
  trained.mkdir(parents=True)
  vocabulary.make(trained / 'tokenizer.model', ['one two three'] * 9, size=20, hard_vocab_limit=False)
  (trained / 'config.json').write_text('{}')
  config.parse([f'{ROOT}/experiments/sums_trio/family.gin'])
  (experiment,) = config.build()
  assert [checkpoint.path for checkpoint in experiment.models] == [
    f'family:sums/{name}' for name in ('draft', 'companion', 'target')
  ]
  methods = {point.curve.name: point.build() for point in experiment.points}
  slots = {'target only': (2,), 'companion only': (1,), 'draft only': (0,), 'SpecDecode': (0, 2)}
  assert {name: method.slots for name, method in methods.items()} == slots and len(experiment.task.examples) == 600


@pytest.mark.full
def test_a_family_is_trained_to_where_it_is_looked_for(monkeypatch, tmp_path, capsys):
  monkeypatch.delenv(families.FOLDER, raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  of_data, small, _ = FAMILIES['sums_trio']
  recipe = tmp_path / 'small.gin'
  recipe.write_text("include 'train/sums_trio.gin'\n" + '\n'.join([*small, 'train.Settings.batch_size=4']))
  monkeypatch.setitem(families.FAMILIES, 'sums', dataclasses.replace(families.FAMILIES['sums'], recipe=str(recipe)))
  assert __main__.main(['family:sums/draft', '--gin.train.Settings.batch_size=2']) == 1
  assert 'give --out' in capsys.readouterr().err
  assert __main__.main(['family:sums/draft']) == 0
  model = speccascade.load('family:sums/draft')
  assert model.name == 'draft' and model.tokenizer.decode(model.tokenizer.encode('a 12')).strip() == 'a 12'
  assert not (families.folder('sums') / 'companion').exists()
  errors = {'family:sums/test.jsonl': 'is no model: train family:sums/draft', 'family:sum': 'did you mean sums?'}
  for text, said in errors.items():
    assert __main__.main([text]) == 1 and said in capsys.readouterr().err
  mine = tmp_path / 'mine' / 'sums' / 'draft'
  mine.mkdir(parents=True)
  monkeypatch.setenv(families.FOLDER, str(tmp_path / 'mine'))
  assert __main__.main(['family:sums/target']) == 1 and 'vocabulary of their own' in capsys.readouterr().err
