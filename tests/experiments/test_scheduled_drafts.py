"""Rounds that `experiments/drafters` counts from observed drafts are those of the loop."""

import pytest

from experiments.drafters import scheduled
from experiments.drafters.drafts import observe
from experiments.sv.compiled_times import PassTimes
from speccascade import Sampler
from speccascade.drafters import one_pass
from speccascade.models import toy

LARGE = toy.model(11, 5, scale=1.2)
SMALL = toy.model(12, 5, scale=0.8, near=LARGE)
PROMPTS = [[1, 1], [2, 3], [4, 2], [3, 3], [0, 2], [2, 2], [1, 4], [3, 0]] * 3  # as many as are packed on a TPU


@pytest.mark.long
@pytest.mark.parametrize('kind', ['small', 'one_pass'])
def test_counted_rounds_are_those_of_the_loop(kind):
  models = [one_pass(SMALL, 0) if kind == 'one_pass' else SMALL, LARGE]
  call = dict(max_new_tokens=20, sampler=Sampler(coupling='gumbel'), seed=0)
  seen = observe(models, PROMPTS, 24, **call)
  costs = scheduled.Costs(kind, PassTimes((1, 2), (0.1, 0.1), 0.0), PassTimes((24, 192), (1.0, 4.0), 0.0), 24)
  found = scheduled.compared(seen, costs, models, PROMPTS, call)
  (rounds, counted), (scored, chosen) = (found[name].split(' for ') for name in ('rounds', 'scored'))
  assert rounds == counted and scored == chosen
  assert 0 < int(scored) < 4 * int(rounds)  # of γ = 7
  assert found['same'] == len(PROMPTS)
