"""Rules compared at the same share of deferred tokens, on texts that none of them was trained on.

Every token is read by both models once, so any rule that decides by a threshold can be judged at any share: it defers
the tokens of its largest scores. Four losses of a token are compared:

  0-1    whether the arg max of the model that the rule chose is another token than the reference's
  log    minus the log-probability of the reference's token under that model
  draw   the chance that a token drawn from that model is another than the reference's
  swap   whether the drafter's token is taken where it lowers the metric of the verifier's greedy output

A learned rule knows whether both arg max are one token, where greedy decoding gains nothing by deferring. So each
plug-in rule is compared as it is, and restricted to the tokens at which they differ. The label oracle sees the losses
themselves, and bounds what any rule can reach at that share.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.learned_deferral.learned import FEATURES
from experiments.learned_deferral.reading import Tokens

LOSSES = ('0-1', 'log', 'draw', 'swap')
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)
RESAMPLES = 500
ORACLE = 'label oracle'
RESTRICTED = 'where they differ'


def plug_in_scores(features: np.ndarray) -> dict[str, np.ndarray]:
  """Return by rule what it compares with α at each token, the more the sooner it defers [N]."""
  read = dict(zip(FEATURES, features.T, strict=True))
  max_q = np.exp(read['log q 1'])
  max_p = np.exp(read['log p 1'])
  entropy_q = read['entropy q']
  entropy_p = read['entropy p']
  tv = np.maximum(read['tv'], 1e-9)
  found = {
    'chow': -max_q,
    'chow_log': entropy_q,
    'diff': max_p - max_q,
    'diff_log': entropy_q - entropy_p,
    'opt': (max_p - max_q) / tv,
    'opt_log': (entropy_q - entropy_p) / tv,
  }
  agree = read['agree'] == 1
  return found | {f'{name}, {RESTRICTED}': np.where(agree, -np.inf, score) for name, score in found.items()}


def losses_of(tokens: Tokens, kind: str) -> tuple[np.ndarray, np.ndarray]:
  """Return the losses of drafter and verifier at each token [N]."""
  if kind == '0-1':
    return (tokens.first_q != tokens.token).astype(float), (tokens.first_p != tokens.token).astype(float)
  if kind == 'log':
    return -tokens.logq.astype(float), -tokens.logp.astype(float)
  if kind == 'draw':
    return 1 - np.exp(tokens.logq.astype(float)), 1 - np.exp(tokens.logp.astype(float))
  return tokens.matters.astype(float), np.zeros(len(tokens.matters))


def mean_losses(scores: np.ndarray, loss_q: np.ndarray, loss_p: np.ndarray, shares: Sequence[float]) -> np.ndarray:
  """Return the mean loss at each share of deferred tokens: those of the largest scores; ties share their mean."""
  _, group = np.unique(-scores, return_inverse=True)
  size = np.bincount(group)
  gained = np.bincount(group, loss_q - loss_p)
  share = np.concatenate([[0], np.cumsum(size)]) / len(scores)
  total = np.concatenate([[0], np.cumsum(gained)]) / len(scores)
  return loss_q.mean() - np.interp(shares, share, total)


def compare(
  tokens: Tokens,
  kind: str,
  learned: Mapping[str, np.ndarray],
  *,
  shares: Sequence[float] = SHARES,
  seed: int = 0,
) -> dict:
  """Return the mean loss of each rule at each share, and how much of the gap to the oracle the learned ones close.

  Args:
    tokens: the tokens of held-out texts.
    kind: '0-1', 'log', 'draw' or 'swap'.
    learned: scores of the learned rules at the tokens, by name.
    shares: shares of deferred tokens.
    seed: of the resamples of texts, by which the intervals of 95 % are made.

  Returns:
    `loss`: by rule, the losses of the shares; `closed`: by learned rule, for each of them, how much of the gap between
    the best plug-in rule and the oracle it closes, with an interval.
  """
  loss_q, loss_p = losses_of(tokens, kind)
  plug_ins = plug_in_scores(tokens.features)
  scores = {**plug_ins, **learned, ORACLE: loss_q - loss_p}
  measured = lambda at: {n: mean_losses(s[at], loss_q[at], loss_p[at], shares) for n, s in scores.items()}
  everything = measured(np.arange(len(loss_q)))
  _, text = np.unique(tokens.text, return_inverse=True)
  rows = np.split(np.argsort(text, kind='stable'), np.cumsum(np.bincount(text))[:-1])
  rng = np.random.default_rng(seed)
  drawn = lambda: np.concatenate([rows[i] for i in rng.integers(len(rows), size=len(rows))])
  draws = [measured(drawn()) for _ in range(RESAMPLES)]
  closed = {}
  for name in learned:
    value = _closed(everything, plug_ins, name)
    low, high = np.quantile([_closed(draw, plug_ins, name) for draw in draws], (0.025, 0.975), axis=0)
    closed[name] = np.stack([value, low, high], 1).round(4).tolist()
  ends = {'drafter': float(loss_q.mean()), 'verifier': float(loss_p.mean())}
  return {
    'tokens': len(loss_q),
    'texts': len(rows),
    'shares': list(shares),
    'loss': {name: [round(float(x), 5) for x in values] for name, values in everything.items()} | ends,
    'closed': closed,
  }


def _closed(losses: Mapping[str, np.ndarray], plug_ins, name: str) -> np.ndarray:
  """Return the share of the gap between the best plug-in rule and the oracle that a rule closes, by deferred share."""
  best = np.min([losses[n] for n in plug_ins], 0)
  gap = best - losses[ORACLE]
  return (best - losses[name]) / np.where(gap > 0, gap, np.inf)


def table(found: dict) -> list[str]:
  """Return the lines of a table in Markdown: a rule's losses by share, and the share of the gap that it closes."""
  row = lambda cells: '| ' + ' | '.join(cells) + ' |'
  lines = [row(['rule', *(f'{s:.0%}' for s in found['shares'])]), row(['---'] * (1 + len(found['shares'])))]
  lines += [row([n, *(f'{v:.4f}' for v in x)]) for n, x in found['loss'].items() if isinstance(x, list)]
  for name, values in found['closed'].items():
    lines.append(row([f'gap closed by {name}', *(f'{v:.0%} ({a:.0%} … {b:.0%})' for v, a, b in values)]))
  return lines
