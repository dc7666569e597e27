"""Fits of predictors of acceptance to what was observed: a logistic curve, or a table.

Axis letters: N samples.
"""

from collections.abc import Sequence

import numpy as np

from speccascade.sv.predictors import AcceptanceTable, Fit, Logistic, Predictor

BINS = 20, 15  # of S, and of A in each
_PSEUDO = 8.0  # samples that a bin borrows from its row, and a row from all


def fitted(predictor: Predictor, accept: np.ndarray, *signals: np.ndarray) -> Fit:
  """Return a fit to samples [N]: a curve where the signal's own is one, else a table."""
  if isinstance(predictor.declaration.fit, Logistic):
    return curve(accept, *signals)
  return table(accept, signals[0], signals[-1], BINS if len(signals) > 1 else (1, BINS[0]))


def curve(accept: np.ndarray, x: np.ndarray) -> Logistic:
  """Return the logistic curve of samples [N] by Newton's method."""
  features = np.stack([np.ones_like(x), x])
  weights = np.zeros(2)
  for _ in range(25):
    p = 1 / (1 + np.exp(-weights @ features))
    hessian = (features * p * (1 - p)) @ features.T + 1e-3 * np.eye(2)
    weights = weights + np.linalg.solve(hessian, features @ (accept - p) - 1e-3 * weights)
  return Logistic(*map(float, weights))


def table(accept: np.ndarray, s: np.ndarray, a: np.ndarray, bins: Sequence[int]) -> AcceptanceTable:
  """Return the mean acceptance of samples [N] in bins of equal counts: so many of S and, within each, of A.

  A bin with few samples is drawn towards the mean of its row, a row towards that of all.
  """
  s_edges = edges(s, bins[0])
  row = np.searchsorted(s_edges, s, side='right')
  a_edges = [edges(a[row == i], bins[1]) for i in range(len(s_edges) + 1)]
  shape = len(a_edges), max(len(e) for e in a_edges) + 1
  row, column = AcceptanceTable.of(s_edges, a_edges, np.zeros(shape)).cells(s, a)
  total, count = (np.zeros(shape) for _ in range(2))
  np.add.at(total, (row, column), accept)
  np.add.at(count, (row, column), 1)
  of_row = (total.sum(1, keepdims=True) + _PSEUDO * accept.mean()) / (count.sum(1, keepdims=True) + _PSEUDO)
  return AcceptanceTable.of(s_edges, a_edges, (total + _PSEUDO * of_row) / (count + _PSEUDO))


def edges(x: np.ndarray, bins: int) -> np.ndarray:
  """Return the inner edges of at most `bins` bins with equal counts of x; equal values stay together."""
  if not x.size or bins == 1:
    return np.zeros(0)
  inner = np.unique(np.quantile(x, np.arange(1, bins) / bins, method='inverted_cdf'))
  return inner[inner > x.min()]
