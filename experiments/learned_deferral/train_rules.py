"""Train the heads of learned rules on texts, and compare the rules with others on texts that none has seen.

  python -m experiments.learned_deferral.train_rules multi30k runs/routers_multi30k
  python -m experiments.learned_deferral.train_rules sums runs/routers_sums
  python -m experiments.learned_deferral.train_rules sums runs/routers_sums mixture

OUT/NAME.json has the head of each of `JOBS`, or of those named; one that
is there is not trained again. OUT/held_out.json has the comparison of all. Most of the time is for `swap`, which
decodes.

Axis letters: N tokens, F features.
"""

from collections.abc import Callable, Sequence
import functools
import json
from pathlib import Path
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.learned_deferral import held_out, pairs, reading
from experiments.learned_deferral.learned import FEATURES, head, learned, learned_alone, load, save, TOP
from experiments.learned_deferral.reading import Tokens
from speccascade.types import Array, Model

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # of the tokens, for which the α that defers so many is printed
REJECTION = 0.5  # λ of a learned mixture: nats that a rejected token costs
JOBS = {  # name: the loss, and whether the head reads the drafter alone
  'expected': ('expected', False),
  'expected_log': ('expected_log', False),
  'expected_draw': ('expected_draw', False),
  'marginal': ('marginal', False),
  'mixture': ('mixture', False),
  'alone': ('expected', True),
  'swap': ('swap', False),
}


# ---- losses: of the head's outputs [N, 2], and of the tokens ----


def swap_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict whether a token of the drafter lowers the metric of the text (in the sense of AutoJudge).

  .. math:: -y \log \sigma(s) - (1 - y) \log \sigma(-s), \qquad s = \hat\ell_q - \hat\ell_p
  """
  return optax.sigmoid_binary_cross_entropy(outputs[:, 0] - outputs[:, 1], tokens.matters.astype(jnp.float32)).mean()


def expected_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict the 0–1 losses of both models, which the plug-in rules replace by 1 − max q and 1 − max p.

  .. math:: (\hat\ell_q - [\arg\max q \ne y])^2 + (\hat\ell_p - [\arg\max p \ne y])^2

  The head that minimises it is the conditional expectation of the losses, for which deferring where their difference
  is over α minimises E[loss] + α · P(defer), for every α at once.
  """
  losses = jnp.stack([tokens.first_q != tokens.token, tokens.first_p != tokens.token], -1)
  return jnp.square(outputs - losses.astype(jnp.float32)).sum(-1).mean()


def expected_log_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict the log losses of both models, which the plug-in rules replace by the entropies.

  .. math:: (\hat\ell_q + \log q(y))^2 + (\hat\ell_p + \log p(y))^2
  """
  return jnp.square(outputs + jnp.stack([tokens.logq, tokens.logp], -1)).sum(-1).mean()


def expected_draw_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict the chances that a token drawn from either model is another one than the text's, for decoding at T = 1.

  .. math:: (\hat\ell_q - (1 - q(y)))^2 + (\hat\ell_p - (1 - p(y)))^2
  """
  missed = 1 - jnp.exp(jnp.stack([tokens.logq, tokens.logp], -1))
  return jnp.square(outputs - missed).sum(-1).mean()


def marginal_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Let the text itself choose between the models: the marginal likelihood, without labels (Shen et al. 2024).

  .. math:: -\log\bigl(\sigma(-s)\,q(y) + \sigma(s)\,p(y)\bigr), \qquad s = \hat\ell_q - \hat\ell_p
  """
  score = outputs[:, 0] - outputs[:, 1]
  return -jnp.logaddexp(jax.nn.log_sigmoid(-score) + tokens.logq, jax.nn.log_sigmoid(score) + tokens.logp).mean()


def mixture_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Weigh how well a mixture explains the text against how often it is accepted, for `learned_mixture` (DIVERSED).

  .. math:: -\log\bigl((1 - w)\,q(y) + w\,p(y)\bigr) + \lambda\,w\,\mathrm{TV}(q, p), \qquad w = \sigma(s)

  The chance of a rejection is w TV. The published reward is that of whole drawn texts; this one needs references.
  """
  rejected = jax.nn.sigmoid(outputs[:, 0] - outputs[:, 1]) * tokens.features[:, FEATURES.index('tv')]
  return marginal_loss(outputs, tokens) + REJECTION * rejected.mean()


LOSSES: dict[str, Callable[[Array, Tokens], Array]] = {
  'swap': swap_loss,
  'expected': expected_loss,
  'expected_log': expected_log_loss,
  'expected_draw': expected_draw_loss,
  'marginal': marginal_loss,
  'mixture': mixture_loss,
}


# ---- training ----


def fit(
  loss: Callable[[Array, Tokens], Array],
  tokens: Tokens,
  *,
  alone: bool = False,
  hidden: int = 32,
  steps: int = 2000,
  learning_rate: float = 1e-2,
  decay: float = 1e-3,
  seed: int = 0,
) -> Any:
  """Return the weights of a head that minimises a loss over tokens, for `head`.

  Args:
    loss: one of `LOSSES`, or one like them.
    tokens: what to train on; each step takes all of them.
    alone: whether the head reads the drafter's features only.
    hidden: units of the hidden layer.
    steps: steps of Adam, with a cosine schedule.
    learning_rate: the largest learning rate.
    decay: weight decay.
    seed: of the initial weights.
  """
  x = tokens.features[:, : TOP + 1] if alone else tokens.features
  mean = x.mean(0)
  scale = x.std(0) + 1e-3
  x = jnp.asarray((x - mean) / scale)
  keys = jax.random.split(jax.random.key(seed))
  sizes = (x.shape[1], hidden, 2)
  init = [(jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:])]
  transform = optax.adamw(optax.cosine_decay_schedule(learning_rate, steps), weight_decay=decay)

  @jax.jit
  def train(weights, tokens):
    def step(carry, _):
      weights, state = carry
      value, gradient = jax.value_and_grad(lambda w: loss(head(w, x), tokens))(weights)
      with jax.numpy_dtype_promotion('standard'):  # optax raises its decay to the power of an integer count
        updates, state = transform.update(gradient, state, weights)
      return (optax.apply_updates(weights, updates), state), value

    return jax.lax.scan(step, (weights, transform.init(weights)), length=steps)[0][0]

  (kernel, bias), last = jax.device_get(train(init, jax.tree.map(jnp.asarray, tokens)))
  kernel = kernel / scale[:, None]  # the head reads features as they are
  return (kernel, bias - mean @ kernel), last


def scores(rule: functools.partial, tokens: Tokens) -> np.ndarray:
  """Return what a learned rule compares with α at each token [N]."""
  weights = rule.keywords['weights']
  (kernel, _), _ = weights
  losses = np.asarray(head(weights, jnp.asarray(tokens.features[:, : len(kernel)])))
  return losses[:, 0] - losses[:, 1]


def train(name: str, tokens: Tokens, file: Path, **settings):
  """Train the rule of a job, write it, and print which α defers what share of the tokens."""
  loss, alone = JOBS[name]
  weights = fit(LOSSES[loss], tokens, alone=alone, **settings)
  found = scores(functools.partial(learned_alone if alone else learned, weights=weights), tokens)
  quantiles = {f'{share:.0%}': float(np.quantile(found, 1 - share)) for share in SHARES}
  save(file, weights, alone=alone, loss=loss, quantiles=quantiles)
  for share, alpha in quantiles.items():
    print(f'{name}: α = {alpha:.4g} defers {share} of the tokens', flush=True)


def compare(models: Sequence[Model], task: Any, out: Path, names: Sequence[str] = tuple(JOBS)) -> dict:
  """Compare the trained rules on a task, print the tables and write them to OUT/held_out.json."""
  trained = {name: load(out / f'{name}.json') for name in names}
  references = reading.read(models, reading.references(models, task))
  found = {}
  for kind in held_out.LOSSES:
    tokens = reading.labelled(models, task) if kind == 'swap' else references
    found[kind] = held_out.compare(tokens, kind, {name: scores(rule, tokens) for name, rule in trained.items()})
    for line in held_out.table(found[kind]):
      print(f'{kind}: {line}', flush=True)
  (out / 'held_out.json').write_text(json.dumps(found, indent=1) + '\n')
  return found


def main():
  """Train what is missing, and compare."""
  name, out, *named = sys.argv[1:]
  models, task, unseen = pairs.PAIRS[name]()
  tokens = {False: functools.cache(lambda: reading.read(models, reading.references(models, task)))}
  tokens[True] = functools.cache(lambda: reading.labelled(models, task))
  for job in named or JOBS:
    loss, _ = JOBS[job]
    file = Path(out) / f'{job}.json'
    if not file.exists():
      train(job, tokens[loss == 'swap'](), file)
  if not named:
    compare(models, unseen, Path(out))


if __name__ == '__main__':
  main()
