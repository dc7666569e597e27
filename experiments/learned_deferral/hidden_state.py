"""What a learned rule gains by the drafter's last hidden state, on texts that it was not trained on.

  python -m experiments.learned_deferral.hidden_state [TEXTS]

The heads learn from the validation split of Multi30k, or from the first
TEXTS of its training split, which both models were trained on too.

Logits are a linear function of the last hidden state. So as many principal components of the drafter's logits as it has
dimensions are that state, up to a linear map, which the first layer of the head learns.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments.learned_deferral import held_out, pairs, reading
from experiments.learned_deferral.learned import head, learned
from experiments.learned_deferral.train_rules import fit, LOSSES, scores
from speccascade.decode.scoring import read

KINDS = {'expected': '0-1', 'expected_log': 'log', 'expected_draw': 'draw'}
DECAYS = (1e-3, 1.0, 5.0)
BASIS_TEXTS = 300


def projected(small, texts, basis=None) -> np.ndarray:
  """Return the logits [N, V] of all tokens without their mean, which changes no distribution, or these @ basis."""
  made = read([small], *zip(*texts, strict=True), jax.tree_util.Partial(_projected, basis), batch_size=32)
  return np.concatenate(made)


def _projected(basis, logits, tokens):
  centred = logits[0] - logits[0].mean(-1, keepdims=True)
  return centred if basis is None else centred @ basis


def components(logits: np.ndarray, count: int) -> np.ndarray:
  """Return the principal components [V, count] of logits [N, V]."""
  return np.linalg.svd(logits - logits.mean(0), full_matrices=False)[2][:count].T


def value_of(loss, weights, tokens: reading.Tokens) -> float:
  """Return a head's loss over tokens."""
  return float(loss(head(weights, jnp.asarray(tokens.features)), tokens))


def best_fit(loss, tokens: reading.Tokens):
  """Return the head whose weight decay is best on a fifth of the texts, trained on the others; with its losses."""
  apart = tokens.text % 5 == 0
  fits = []
  for decay in DECAYS:
    weights = fit(loss, tokens[~apart], decay=decay)
    fits.append((value_of(loss, weights, tokens[apart]), value_of(loss, weights, tokens[~apart]), weights))
  return min(fits, key=lambda fit: fit[0])


def main():
  """Print what each head closes of the gap to the label oracle."""
  count = int(sys.argv[1]) if len(sys.argv) > 1 else None
  pair, task, test = pairs.multi30k('train' if count else 'val', count)
  small = pair[0]
  seen, unseen = (reading.references(pair, some) for some in (task, test))
  tokens, new = (reading.read(pair, texts) for texts in (seen, unseen))
  basis = jnp.asarray(components(projected(small, seen[:BASIS_TEXTS]), small.network.config.embed_dim))
  with_state = lambda found, of: found.replace(features=np.hstack([found.features, projected(small, of, basis)]))
  sets = {
    'distributions': (tokens, new),
    'and hidden state': (with_state(tokens, seen), with_state(new, unseen)),
  }
  print(f'{len(seen)} texts, {len(tokens.token)} tokens; held out {len(unseen)}, {len(new.token)}')
  for name, kind in KINDS.items():
    loss = LOSSES[name]
    found = {}
    for features, (known, other) in sets.items():
      apart, trained, weights = best_fit(loss, known)
      test_loss = value_of(loss, weights, other)
      found[features] = scores(functools.partial(learned, weights=weights), other)
      print(
        f'{name}, {features}: loss {trained:.4f} of its texts, {apart:.4f} apart, {test_loss:.4f} held out', flush=True
      )
    for line in held_out.table(held_out.compare(new, kind, found)):
      if 'closed' in line or 'rule' in line:
        print(line, flush=True)


if __name__ == '__main__':
  main()
