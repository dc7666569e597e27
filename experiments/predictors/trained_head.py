"""How much a head tells of acceptance that is trained on the drafter's hidden state, at T = 1.

  python -m experiments.predictors.trained_head gsm8k [--count 600] [--judged 200]

Texts are samples of the verifier. All models read them, and at each position a token is drawn from the drafter and has
a chance of acceptance. The first texts judge what the others fit; the models were trained on neither.

Axis letters: B batch, L tokens of a text, M models, V vocabulary, E embedding, N tokens of all texts, F features.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.helpers import families
from experiments.learned_deferral.learned import head
from experiments.learned_deferral.train_rules import fit
from experiments.predictors.measure_signals import area, explained
from speccascade import checkpoints, decode, methods, Sampler, sampling
from speccascade.backends import Backend
from speccascade.decode.scoring import read
from speccascade.models.around import Around
from speccascade.models.base import Base
from speccascade.planning import fitting
from speccascade.sv import predictors
from speccascade.types import Array, Cache, Model, Params, Prompt

DECAYS = (1e-3, 1e-1, 1.0)  # of the hidden layer
PENALTIES = (1e-3, 1.0, 10.0, 100.0)  # of a logistic curve, on all tokens together
RESAMPLES = 1000
AT_ONCE = 2000  # texts whose states are held


@dataclasses.dataclass(frozen=True)
class States(Around):
  """A network whose logits are what its head reads, [B, L, E]."""

  model: Base

  @property
  def inner(self) -> Base:
    """Return the network."""
    return self.model

  @property
  def vocab_size(self) -> int:
    """Return how many tokens it reads."""
    return self.model.vocab_size

  @property
  def start_id(self) -> int | None:
    """Return the decoder's first token."""
    return self.model.start_id

  def on(self, backend: Backend) -> 'States':
    """Return the network for a backend."""
    return States(self.model.on(backend))

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Read prompts."""
    return self.model.prefill(params, prompt, max_len)

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens; return states and the cache."""
    _, cache, states = self.model.observe(params, cache, tokens, positions, (-1,))
    return states, cache


@struct.dataclass
class Tokens:
  """Tokens with their features, as `fit` takes them."""

  features: np.ndarray  # [N, F]
  accept: np.ndarray  # [N]


def _signals(logits: Array, tokens: Array) -> dict[str, Array]:
  """Return what the logits [M, B, L, V] of drafter, companion and verifier make of a token drawn from the first."""
  q, c, p = (jax.nn.softmax(x) for x in logits)
  drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), tokens.sum()), logits[0])
  top = jax.lax.top_k(logits[0], 2)[0]
  return {
    'accept': predictors.ratio(q, p, drawn),
    's': jnp.minimum(q, c).sum(-1),
    'a': predictors.ratio(q, c, drawn),
    'margin': jnp.minimum(top[..., 0] - top[..., 1], predictors.MOST),
    'max_q': q.max(-1),
    'drawn_q': sampling.at_token(q, drawn),
    'drawn': drawn,
  }


def _states(logits: Array, tokens: Array) -> Array:
  return logits[0]


def states(drafter: Model, prompts: Sequence, outputs: Sequence[Sequence[int]]) -> list[np.ndarray]:
  """Return the drafter's final states [n, E], each of what precedes a token of an output."""
  return read([drafter.replace(network=States(drafter.network))], prompts, outputs, _states, batch_size=32)


def after(drafter: Model, prompts: Sequence, outputs: Sequence, drawn: Sequence, before: Sequence) -> list[np.ndarray]:
  """Return the drafter's final states [n, E], each behind the token that was drawn in an output's place."""
  found = [np.concatenate([x[1:], x[:1]]) for x in before]  # right where the drawn token is the output's
  other = [
    (i, k) for i, (y, x) in enumerate(zip(outputs, drawn)) for k in range(len(y)) if k == len(y) - 1 or y[k] != x[k]
  ]
  for at in range(0, len(other), AT_ONCE):
    some = other[at : at + AT_ONCE]
    rows = [[*outputs[i][:k], int(drawn[i][k]), 0] for i, k in some]
    for (i, k), made in zip(some, states(drafter, [prompts[i] for i, _ in some], rows)):
      found[i][k] = made[-1]
  return found


def observe(family: str, count: int, new_tokens: int) -> dict[str, np.ndarray]:
  """Return what is known of each token [N, …] of texts that the verifier samples."""
  models = [checkpoints.load(f'family:{family}/{name}', dtype='float32') for name in families.TRIOS[family]]
  prompts = [models[-1].tokenizer.encode(x) for x in families.prompts(family, count)]
  settings = dict(max_new_tokens=new_tokens, sampler=Sampler(1.0), batch_size=32)
  out = decode(methods.speculative(block=5), [models[0], models[-1]], prompts, **settings)
  outputs = [[int(t) for t in text] for text in out.tokens]
  made = read(models, prompts, outputs, _signals, batch_size=32)
  before = states(models[0], prompts, outputs)
  behind = after(models[0], prompts, outputs, [x['drawn'] for x in made], before)
  samples = {name: np.concatenate([x[name] for x in made]) for name in made[0]}
  text = np.repeat(np.arange(len(outputs)), [len(x) for x in outputs])
  return samples | dict(before=np.concatenate(before), behind=np.concatenate(behind), text=text)


def logistic(features: np.ndarray, accept: np.ndarray, decay: float) -> Callable:
  """Return a logistic curve of features [N, F], by Newton's method."""
  mean, scale = features.mean(0), features.std(0) + 1e-6
  scaled = lambda x: np.hstack([np.ones((len(x), 1)), (x - mean) / scale])
  x = scaled(features)
  penalty = decay * np.diag([0.0] + [1.0] * features.shape[1])
  weights = np.zeros(x.shape[1])
  for _ in range(15):
    p = 1 / (1 + np.exp(-x @ weights))
    hessian = (x.T * (p * (1 - p))) @ x + penalty + 1e-6 * np.eye(len(weights))
    weights += np.linalg.solve(hessian, x.T @ (accept - p) - penalty @ weights)
  return lambda new: 1 / (1 + np.exp(-scaled(new) @ weights))


def _loss(outputs: Array, tokens: Tokens) -> Array:
  x = outputs[:, 0]
  return (jax.nn.softplus(x) - tokens.accept * x).mean()


def hidden_layer(features: np.ndarray, accept: np.ndarray, decay: float) -> Callable:
  """Return a head with one hidden layer."""
  weights = fit(_loss, Tokens(np.float32(features), np.float32(accept)), decay=decay, steps=300)
  return lambda new: np.float64(jax.nn.sigmoid(head(weights, jnp.asarray(new, jnp.float32))[:, 0]))


def best(
  make: Callable, decays: Sequence[float], features: np.ndarray, accept: np.ndarray, text: np.ndarray
) -> Callable:
  """Return a head with the decay that is best on a fifth of the texts, trained on all."""
  apart = text % 5 == 0
  score = lambda decay: explained(accept[apart], make(features[~apart], accept[~apart], decay)(features[apart]))
  return make(features, accept, max(decays, key=score))


def table(accept: np.ndarray, *signals: np.ndarray) -> Callable:
  """Return a table of one signal or two."""
  bins = fitting.BINS if len(signals) > 1 else (1, fitting.BINS[0])
  return fitting.table(accept, signals[0], signals[-1], bins).predict


def chances(samples: dict[str, np.ndarray], judged: int) -> dict[str, np.ndarray]:
  """Return what each predictor says of the tokens of the texts that judge."""
  new = samples['text'] < judged
  known = {name: x[~new] for name, x in samples.items()}
  unseen = {name: x[new] for name, x in samples.items()}
  found = {}
  for name, fields in {'companion': ('s', 'a'), 'max q': ('max_q',), 'drawn q': ('drawn_q',)}.items():
    found[name] = table(known['accept'], *(known[x] for x in fields))(*(unseen[x] for x in fields))
  margin = fitting.curve(known['accept'], known['margin'])
  found['margin'] = margin.predict(unseen['margin'])
  logs = lambda x: np.stack([np.log(x['drawn_q']), np.log(x['max_q']), x['margin']], 1)
  sets = {
    'drawn q, max q and margin': logs,
    'state before the token': lambda x: x['before'],
    'state before the token, with these': lambda x: np.hstack([x['before'], logs(x)]),
    'state behind the token': lambda x: x['behind'],
    'state behind the token, with these': lambda x: np.hstack([x['behind'], logs(x)]),
    'both states, with these': lambda x: np.hstack([x['before'], x['behind'], logs(x)]),
  }
  for name, of in sets.items():
    found[name] = best(logistic, PENALTIES, of(known), known['accept'], known['text'])(of(unseen))
    if name in ('drawn q, max q and margin', 'both states, with these'):
      found[f'{name}: 32 hidden units'] = best(hidden_layer, DECAYS, of(known), known['accept'], known['text'])(
        of(unseen)
      )
  return found


def interval(accept: np.ndarray, chance: np.ndarray, other: np.ndarray, text: np.ndarray) -> tuple[float, float]:
  """Return the 95 % interval of how much more of the entropy one explains than another, over resampled texts."""
  groups = [np.flatnonzero(text == i) for i in np.unique(text)]
  draws = np.random.default_rng(0).integers(0, len(groups), (RESAMPLES, len(groups)))
  some = [np.concatenate([groups[i] for i in draw]) for draw in draws]
  low, high = np.quantile(
    [explained(accept[i], chance[i]) - explained(accept[i], other[i]) for i in some], (0.025, 0.975)
  )
  return 100 * low, 100 * high


def main():
  """Print what each predictor tells."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('family', choices=families.TRIOS)
  parser.add_argument('--count', type=int, default=600)
  parser.add_argument('--judged', type=int, default=200)
  parser.add_argument('--max_new_tokens', type=int, default=48)
  args = parser.parse_args()
  samples = observe(args.family, args.count, args.max_new_tokens)
  new = samples['text'] < args.judged
  accept, text = samples['accept'][new], samples['text'][new]
  print(f'{args.family}: {(~new).sum()} tokens fit, {new.sum()} judge, accepted {accept.mean():.3f}', flush=True)
  found = chances(samples, args.judged)
  for name, chance in found.items():
    low, high = interval(accept, chance, found['drawn q'], text)
    more = 100 * (explained(accept, chance) - explained(accept, found['drawn q']))
    told = f'{100 * explained(accept, chance):.1f} %, {area(accept, chance):.3f}'
    print(f'{name} | {told} | {more:+.1f} [{low:.1f}, {high:.1f}]', flush=True)


if __name__ == '__main__':
  main()
