"""What a learned rule gains by the drafter's last hidden state, on texts that it was not trained on.

  python experiments/learned_deferral/hidden_state.py SHARED [TEXTS]

SHARED is the folder of data and checkpoints. The heads learn from the validation split of Multi30k, or from the first
TEXTS of its training split, which both models were trained on too.

Logits are a linear function of the last hidden state. So as many principal components of the drafter's logits as it has
dimensions are that state, up to a linear map, which the first layer of the head learns.
"""

import dataclasses
import functools
from pathlib import Path
import sys

import jax
import jax.numpy as jnp
import numpy as np

import speccascade
from speccascade import rules
from speccascade.data import files
from speccascade.train import data, held_out, router
from speccascade.train.batches import collate
from speccascade.train.losses import logits_of

LOSSES = {'expected': '0-1', 'expected_log': 'log', 'expected_draw': 'draw'}
DECAYS = (1e-3, 1.0, 5.0)
BATCH = 32
BASIS_TEXTS = 300
WIDTH = 64


@functools.partial(jax.jit, static_argnums=0)
def _centred_logits(network, params, batch):
  """Return logits [B, L, V] without their mean, which changes no distribution."""
  logits = logits_of(network, params, batch)
  return logits - logits.mean(-1, keepdims=True)


def read(pair, texts) -> tuple[list, router.Tokens]:
  """Return the tokenised pairs of texts, and their tokens."""
  pairs = list(data.tokenised(zip(*texts, strict=True), pair[1].tokenizer))
  return pairs, router.read(pair, pairs, batch_size=BATCH)


def projected(small, pairs, project) -> np.ndarray:
  """Return project(centred logits [n, V]) of all tokens, a batch at a time."""
  found = []
  for start in range(0, len(pairs), BATCH):
    rows = pairs[start : start + BATCH]
    filled = rows + rows[:1] * (BATCH - len(rows))
    batch = dataclasses.replace(collate(filled, [(WIDTH, WIDTH)]), truncated=None)
    real = np.arange(WIDTH) < np.asarray(batch.target_length)[:, None]
    real[len(rows) :] = False
    found.append(project(np.asarray(_centred_logits(small.network, small.params, batch))[real]))
  return np.concatenate(found)


def components(logits: np.ndarray, count: int) -> np.ndarray:
  """Return the principal components [V, count] of logits [N, V]."""
  return np.linalg.svd(logits - logits.mean(0), full_matrices=False)[2][:count].T


def value_of(loss, weights, tokens: router.Tokens) -> float:
  """Return a head's loss over tokens."""
  return float(loss(rules.head(weights, jnp.asarray(tokens.features)), tokens))


def best_fit(loss, tokens: router.Tokens):
  """Return the head whose weight decay is best on a fifth of the texts, trained on the others; with its losses."""
  apart = tokens.text % 5 == 0
  fits = []
  for decay in DECAYS:
    weights = router.fit(loss, tokens[~apart], decay=decay)
    fits.append((value_of(loss, weights, tokens[apart]), value_of(loss, weights, tokens[~apart]), weights))
  return min(fits, key=lambda fit: fit[0])


def main():
  """Print what each head closes of the gap to the label oracle."""
  folder = Path(sys.argv[1])
  count = int(sys.argv[2]) if len(sys.argv) > 2 else None
  checkpoints, texts = folder / 'checkpoints' / 't5_multi30k', folder / 'data' / 'multi30k'
  pair = small, _ = [speccascade.load(checkpoints / n, dtype='float32') for n in ('small', 'large')]
  lines = lambda split, n: [files.lines(texts / f'{split}.{language}.gz')[:n] for language in ('en', 'de')]
  pairs, tokens = read(pair, lines('train' if count else 'val', count))
  held_out_pairs, unseen = read(pair, lines('test_2016_flickr', 400))
  basis = components(projected(small, pairs[:BASIS_TEXTS], lambda x: x), small.network.config.embed_dim)
  project = lambda x: x @ basis
  state = lambda of: projected(small, of, project)
  with_state = lambda found, of: found.replace(features=np.concatenate([found.features, state(of)], 1))
  sets = {
    'distributions': (tokens, unseen),
    'and hidden state': (with_state(tokens, pairs), with_state(unseen, held_out_pairs)),
  }
  print(f'{len(pairs)} texts, {len(tokens.token)} tokens; held out {len(held_out_pairs)}, {len(unseen.token)}')
  for name, kind in LOSSES.items():
    loss = router.LOSSES[name]
    scores = {}
    for features, (seen, new) in sets.items():
      apart, trained, weights = best_fit(loss, seen)
      test = value_of(loss, weights, new)
      scores[features] = router.scores(functools.partial(rules.learned, weights=weights), new)
      print(f'{name}, {features}: loss {trained:.4f} of its texts, {apart:.4f} apart, {test:.4f} held out', flush=True)
    for line in held_out.table(held_out.compare(unseen, kind, scores)):
      if 'closed' in line or 'rule' in line:
        print(line, flush=True)


if __name__ == '__main__':
  main()
