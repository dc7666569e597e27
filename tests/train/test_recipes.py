"""The shipped recipes train from a T5X checkpoint on prepared data sets, truncating what is too long."""

import itertools
import json
import pathlib
import warnings

import jax
from matching import having, says
import numpy as np
import pytest
from small import quiet, settings
from tiers import long_but

with warnings.catch_warnings():
  warnings.simplefilter('ignore')  # of TensorFlow's and seqio's imports
  seqio = pytest.importorskip('seqio')
  import tensorflow as tf
  import tensorflow_datasets as tfds

from speccascade import checkpoints
from speccascade.checkpoints import t5x
from speccascade.data.tokenizers import find
from speccascade.host.errors import RunError
from speccascade.models.t5 import T5, T5Config
from speccascade.train import __main__, data, jobs
from speccascade.train.loop import train
from speccascade.types import Model

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
FOLDER = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'train'
TINY = T5(T5Config(384, 8, 2, 4, 16, 1, 1))
RECORDS = {
  'wmt14_ende': (
    'wmt14_translate',
    'de-en',
    [dict(en=f'Train {i}.', de=f'Zug {i} ' + 'fährt ' * 20) for i in range(5)],
  ),
  'xsum': ('xsum', None, [dict(document='A ship is late. ' * n, summary='Late.') for n in (70, 80, 90)]),
  'cnn_dailymail': ('cnn_dailymail', None, [dict(article='Rain again. ' * n, highlights='Rain .') for n in (180, 200)]),
}
TRUNCATED = {'wmt14_ende': (0, 4), 'xsum': (4, 0), 'cnn_dailymail': (4, 0)}  # of the four pairs that two steps see


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """Return a folder of data sets, prepared as TensorFlow Datasets prepares them."""
  folder = tmp_path_factory.mktemp('tfds')
  for name, config, records in RECORDS.values():
    columns = {key: [record[key] for record in records] for key in records[0]}
    tfds.dataset_builders.store_as_tfds_dataset(
      name=name,
      version='1.0.0',
      config=config,
      features=tfds.features.FeaturesDict(dict.fromkeys(columns, tfds.features.Text())),
      data_dir=folder,
      disable_shuffling=True,
      split_datasets={'train': tf.data.Dataset.from_tensor_slices(columns)},
    )
  return str(folder)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """Return a checkpoint as T5X writes it, without a gin file next to it."""
  folder = t5x.write(tmp_path_factory.mktemp('t5x'), Model(jax.jit(TINY.init)(jax.random.key(0)), TINY), step=5)
  (folder / 'config.json').unlink()
  return folder


def arguments(name: str, checkpoint, byt5: str, data_dir: str, *more: str) -> list[str]:
  """Return the arguments of a recipe for a tiny checkpoint and two short steps."""
  bound = dict(CHECKPOINT=str(checkpoint), TOKENIZER=byt5, DATA_DIR=data_dir)
  short = ('train.Job.network=None', 'train.Settings.batch_size=2', 'train.Settings.steps=2')
  return [
    f'--gin_file={FOLDER / name}.gin',
    *(f'--gin.{key}={value!r}' for key, value in bound.items()),
    *(f'--gin.{binding}' for binding in short),
    *more,
  ]


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(RECORDS, ['wmt14_ende']))
def test_a_recipe_fine_tunes_a_t5x_checkpoint_and_counts_what_it_truncates(
  name, checkpoint, byt5, data_dir, tmp_path, capsys
):
  given = arguments(name, checkpoint, byt5, data_dir, f'--out={tmp_path}')
  assert __main__.main(given) == 0
  sources, targets = TRUNCATED[name]
  last = json.loads((tmp_path / 'small' / 'log.jsonl').read_text().splitlines()[-1])
  assert (last['truncated_sources'], last['truncated_targets']) == (sources, targets)
  out = capsys.readouterr().out
  assert f'truncated_sources {sources}' in out and f'truncated {sources} sources ({sources / 4:.1%})' in out
  trained = checkpoints.read(tmp_path / 'small' / 'model')
  before = checkpoints.read(checkpoint, activation='gelu')
  assert trained.network.config == before.network.config
  moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), trained.params, before.params)
  assert 0 < moved['decoder']['logits_dense']['kernel'] < 0.1
  assert __main__.main(given) == 0  # a finished run counts the same again
  assert f'truncated {sources} sources' in capsys.readouterr().out


@pytest.mark.long
def test_a_recipe_is_distilled_from_what_another_trained(checkpoint, byt5, data_dir, tmp_path, capsys):
  common = checkpoint, byt5, data_dir, f'--out={tmp_path}'
  assert __main__.main(arguments('xsum', *common, '--gin.SIZE="xl"')) == 0
  more = f'--gin_file={FOLDER / "distill"}.gin', f'--gin.TEACHER={str(tmp_path / "xl" / "model")!r}'
  assert __main__.main(arguments('xsum', *common, *more)) == 0
  assert 'forward_kl' in json.loads((tmp_path / 'small' / 'log.jsonl').read_text().splitlines()[-1])


def test_a_recipe_has_the_network_of_its_size_and_needs_its_checkpoint():
  read = lambda *bindings: jobs.read([str(FOLDER / 'wmt14_ende.gin')], ["TOKENIZER = 'x'", *bindings])
  (job,) = read("CHECKPOINT = 'y'", "SIZE = 'large'", 'SCAN = True')
  assert job.name == 'large' and job.network.config.embed_dim == 1024 and job.network.scan and job.start.path == 'y'
  with pytest.raises(RunError, match=having("'huge'", 'small', 'xxl')):
    read("CHECKPOINT = 'y'", "SIZE = 'huge'")
  with pytest.raises(RunError, match='CHECKPOINT'):
    read()


def job(task, **settings_of_a_job):
  return jobs.Job('job', TINY, task, settings(), **settings_of_a_job)


def learned(task: str, tokenizer=None):
  """Return what a job of a task learns."""
  return data.pairs(job(task).task(), tokenizer)


def test_a_registered_seqio_task_is_learned_as_an_experiment_names_it(byt5):
  def dataset(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensor_slices(dict(inputs=list('abcd'), targets=list('wxyz')))

  seqio.TaskRegistry.add(
    'letters',
    source=seqio.FunctionDataSource(dataset, splits=['train']),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={key: seqio.Feature(seqio.ByteVocabulary()) for key in ('inputs', 'targets')},
    metric_fns=[],
  )
  tokenizer = find(byt5)
  expected = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip('abcd', 'wxyz', strict=True)]
  lengths = "{'inputs': 9, 'targets': 9}"
  try:
    for task in (
      "seqio_task(name='letters', split='train', max_prompt_tokens=9, max_new_tokens=9, metrics=['bleu'])",
      f"t5x_task(mixture_or_task_name='letters', split='train', task_feature_lengths={lengths}, metrics=['bleu'])",
    ):
      first, again = (list(itertools.islice(learned(task, tokenizer), 8)) for _ in range(2))
      assert first == again and sorted(first[:4]) == sorted(first[4:]) == expected
  finally:
    seqio.TaskRegistry.remove('letters')


def test_mistakes_in_a_task_are_named(byt5, data_dir, tmp_path):
  of = f'data_dir={data_dir!r}'
  (tmp_path / 'asked.json').write_text('{"turns": ["Name a tree."]}')
  for task, parts in (
    (f"wmt14_ende(split='dev', {of})", ("'dev'", 'train')),
    ('wmt14_ende', ('no split', "wmt14_ende(split='train')")),
    ("wmt14_end(split='train')", ("'wmt14_end'", 'wmt14_ende')),
    (3, ('task=3', 'embedded')),
    (f'conversations(path={str(tmp_path / "asked.json")!r})', ('example 0', 'no reference')),
    (f"wmt14_ende(split='train', {of})", ("'Train ", 'train.Job.tokenizer')),
  ):
    with pytest.raises(ValueError, match=having(*parts)):
      next(learned(task))
  with pytest.raises(FileNotFoundError, match='tfds build xsum'):
    learned(f"xsum(split='train', data_dir={str(tmp_path)!r})")


def test_texts_are_learned_by_the_tokenizer_of_the_start_or_the_teacher(byt5, tmp_path, monkeypatch):
  taken = {}
  model = Model(jax.jit(TINY.init)(jax.random.key(0)), TINY, tokenizer=find(byt5))
  monkeypatch.setattr(jobs.Job, '_model', lambda self, out, given, **_: given and model)
  monkeypatch.setattr(jobs, 'train', lambda out, network, pairs, *_, tokenizer, **__: taken.update({out: next(pairs)}))
  for name in ('start', 'teacher'):
    job("embedded(split='train', count=1)", **{name: 'x'}).run(tmp_path / name)
  assert len(taken) == 2 and len({str(pair) for pair in taken.values()}) == 1


@pytest.mark.long
def test_truncation_is_an_error_unless_asked_for(tmp_path):
  long = [([2] * 9 + [1], [3, 1])] * 24
  with pytest.raises(ValueError, match=having('source of pair 0', '10 tokens', 'truncate')):
    train(tmp_path / 'strict', TINY, long, settings(), echo=quiet)
  printed = []
  train(tmp_path / 'run', TINY, long, settings(truncate=True), echo=lambda text, **_: printed.append(text))
  assert says(printed[-1], '24 sources (100.0%)', '0 targets', '24 pairs')
  with pytest.raises(ValueError, match='truncate'):
    train(tmp_path / 'run', TINY, long, settings(widths=(8,)), echo=quiet)
