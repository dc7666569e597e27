"""A pair of models and costs of their calls, for what predicts and plans."""

import functools

from speccascade import rules
from speccascade.models import toy
from speccascade.planning import cost_model

PROMPTS = [[i % 5, (3 * i + 1) % 5] for i in range(16)]
OPT = functools.partial(rules.opt, alpha=0.3)
EVEN = functools.partial(rules.weighted, weights=(0.5, 0.5))


def pair():
  large = toy.model(1, scale=2.0).replace(digest='b')
  return [toy.model(2, scale=0.6, near=large).replace(digest='a'), large]


def costs(drafter, slope=0.0, **more):
  """Return costs in tokens of the verifier, whose windows cost more by a slope."""
  return cost_model.Costs(drafter, {w: 1 + slope * (w - 1) for w in range(1, 12)}, **more)


def seconds_of(out, costs):
  """Return what the calls of a decode would take at these costs, each as wide as its positions are a call."""
  calls, positions = out.stats.calls.sum(1), out.stats.positions.sum(1)
  return calls[0] * costs.draft + calls[1] * costs.window(positions[1] / calls[1])
