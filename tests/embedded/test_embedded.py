"""The pair, its sentences and the task that come with the package."""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from speccascade import embedded, methods, Sampler
from speccascade.decode import decode
from speccascade.train import data, losses
from speccascade.train.batches import collate


@pytest.fixture(scope='module')
def pair():
  return embedded.models()


@pytest.fixture(scope='module')
def outputs(pair):
  """Return the task and the greedy translations by each model."""
  task = embedded.task(count=64)
  prompts = [e.prompt for e in task.examples]
  run = dict(prompts=prompts, max_new_tokens=task.max_new_tokens, sampler=Sampler(0.0))
  return task, [decode(methods.autoregressive(), [model], **run).texts for model in pair]


def _size(tree) -> int:
  return sum(x.size for x in jax.tree.leaves(tree))


def test_the_pair_shares_a_vocabulary_and_is_apart_in_size(pair):
  small, large = pair
  assert (small.name, large.name) == ('small', 'large')
  assert small.tokenizer.pieces() == large.tokenizer.pieces() and large.network.vocab_size == 1000
  assert _size(large.params['decoder']) > 8 * _size(small.params['decoder'])


def test_the_pair_is_small_enough_for_a_package():
  folder = Path(embedded.__file__).parent / 'pretrained'
  assert sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()) < 16e6


@pytest.mark.full
def test_the_verifier_translates_better_than_the_drafter(outputs):
  task, (small, large) = outputs
  examples = list(task.examples)
  bleu = [task.metrics['bleu'](examples, texts) for texts in (small, large)]
  assert bleu[1] > bleu[0] + 8, bleu


def test_the_drafter_is_accepted_often_but_not_always(pair):
  small, large = pair
  texts = [(e.prompt, e.target) for e in embedded.task(count=64).examples]
  logits = jax.jit(losses.logits_of, static_argnums=0)
  batch = collate(list(data.tokenised(texts, large.tokenizer)), (64,))
  q, p = (np.asarray(jax.nn.softmax(logits(m.network, m.params, batch))) for m in (small, large))
  inside = np.arange(64)[None] < batch.target_length[:, None]
  assert 0.6 < np.minimum(p, q).sum(-1)[inside].mean() < 0.92


@pytest.mark.parametrize('split', ['validation', 'test'])
def test_every_sentence_fits_the_limits_of_the_task(pair, split):
  task = embedded.task(split, 2000)
  assert max(len(pair[0].tokenizer.encode(e.prompt)) for e in task.examples) <= task.max_prompt_tokens
  assert max(len(pair[0].tokenizer.encode(e.target)) for e in task.examples) < task.max_new_tokens
  assert list(task.metrics) == ['bleu']


# Published figures are of these sentences in this order. Data drawn anew need new figures and a new pair.
DIGESTS = {
  'train': 'dd1023c26bf9a182766bbdc838ea535298dada75c1f1b469e94d79a3a6ce17f4',
  'validation': 'e6200d483164a2f2bc510e70d32b719072791bf2d3109ad2cbed93793140fcf9',
  'test': '82f6fb070fe41965e8f3dfe518c960fbf64b663f23ada64df963459ec5f499ae',
}


@pytest.mark.parametrize('split', embedded.SPLITS)
def test_the_sentences_are_those_of_the_published_figures(split):
  text = json.dumps(embedded.sentences(split), ensure_ascii=False)
  assert hashlib.sha256(text.encode()).hexdigest() == DIGESTS[split]


def test_no_english_sentence_occurs_twice_within_or_across_splits():
  sizes = {split: len(embedded.sentences(split)) for split in embedded.SPLITS}
  assert sizes == {'train': 40000, 'validation': 2000, 'test': 2000}
  assert len({source for split in sizes for source, _ in embedded.sentences(split)}) == sum(sizes.values())


def test_fewer_examples_are_the_first_of_more():
  default, fewer = embedded.task().examples, embedded.task(count=20).examples
  assert len(default) == 500 and fewer == default[:20]
  assert [(e.index, e.prompt, e.target) for e in fewer] == [
    (i, *pair) for i, pair in enumerate(embedded.sentences('validation', 20))
  ]


@pytest.mark.parametrize('count', [0, -1, 2001, 2.5, '5'])
def test_a_count_or_a_split_that_is_not_there_is_an_error(count):
  with pytest.raises(ValueError, match=f'count={count!r}: .* ask for 1 to 2000'):
    embedded.task(count=count)
  with pytest.raises(ValueError, match="split='dev': .*train, validation, test"):
    embedded.task('dev', count)
