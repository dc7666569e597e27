"""A translated drafter's tables and distribution are those of token-level intersection as its authors published it.

Their implementation is in transformers. It compares tokens by their spelling, so both vocabularies are byte-level BPE.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.translated import give_vocabulary
from speccascade import drafters, embedded
from speccascade.data import tokenizers
from speccascade.models import toy
from speccascade.types import Prompt

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
candidates = pytest.importorskip('transformers.generation.candidate_generator')


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """Return the folders of two vocabularies, the drafter's of English alone, and models of one table each."""
  folder = tmp_path_factory.mktemp('vocabularies')
  english, german = zip(*embedded.sentences('train', 600))
  give_vocabulary.byte_level(folder / 'drafter', list(english), 420, begins=True)
  give_vocabulary.byte_level(folder / 'verifier', [*english, *german], 500, begins=True)
  made = []
  for seed, name in enumerate(('drafter', 'verifier')):
    tokenizer = tokenizers.load(folder / name)
    model = toy.model(seed, len(tokenizer.pieces()), order=1, scale=2.0)
    network = dataclasses.replace(model.network, eos_ids=tokenizer.eos_ids)
    made.append(model.replace(network=network, tokenizer=tokenizer))
  return folder, made


def test_tables_and_distribution_are_those_of_the_published_code(pair):
  folder, (drafter, verifier) = pair
  theirs = candidates.AssistantToTargetTranslator(
    *(transformers.AutoTokenizer.from_pretrained(folder / name) for name in ('verifier', 'drafter')),
    target_vocab_size=verifier.network.vocab_size,
  )
  ours = drafters.translated(drafter, for_=verifier)
  write = np.asarray(ours.params['translation']['write'])
  common = {int(i): int(write[i]) for i in np.flatnonzero(write >= 0)}
  assert common == theirs.target_to_assistant_input_ids
  assert 100 < len(common) < verifier.network.vocab_size

  prompt = Prompt(jnp.array([[7, 30, 41]]), jnp.array([3]))
  read = [int(np.asarray(ours.params['translation']['read'])[i]) for i in (7, 30, 41)]
  cache = ours.network.prefill(ours.params, prompt, 8)
  logits, _ = ours.network.extend(ours.params, cache, prompt.tokens[:, -1:], jnp.array([[2]]))
  own = drafter.network.prefill(drafter.params, Prompt(jnp.array([read]), jnp.array([3])), 8)
  q, _ = drafter.network.extend(drafter.params, own, jnp.array([read[-1:]]), jnp.array([[2]]))
  expected = theirs.get_target_logits(torch.tensor(np.asarray(q))).softmax(-1).numpy()
  np.testing.assert_allclose(jax.nn.softmax(logits), expected, atol=1e-6)
  assert (expected[..., write < 0] == 0).all()
