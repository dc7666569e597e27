"""What is counted of decoded texts, with intervals over them."""

from typing import Any

import numpy as np

from speccascade.evaluate import intervals


def ratio(name: str, over: Any, under: Any) -> dict[str, float]:
  """Return the ratio of two sums over texts, and its interval."""
  over, under = np.asarray(over), np.asarray(under)
  weights = intervals.draws(0, len(over))
  low, high = intervals.interval((weights @ over) / np.maximum(weights @ under, 1))
  return {name: over.sum() / max(under.sum(), 1), f'{name}_low': low, f'{name}_high': high}


def acceptance(stats: Any, block: int, drafter: int) -> dict[str, float]:
  """Return the acceptance of drafts of a model, in all and at each of the places, and tokens and its calls a round."""
  row = ratio('acceptance', stats.accepted, stats.tested) | ratio('tokens_per_round', stats.emitted, stats.rounds)
  tested, accepted = stats.tested_at.sum(0), stats.accepted_at.sum(0)
  row |= {f'accepted_{k + 1}': accepted[k] / max(tested[k], 1) for k in range(block)}
  return row | {'drafter_calls_per_round': stats.calls[drafter].sum() / stats.rounds.sum()}


def same(texts: list, others: list | None) -> float:
  """Return how many texts are those of others, NaN where there are none."""
  return float('nan') if others is None else sum(a == b for a, b in zip(texts, others, strict=True))
