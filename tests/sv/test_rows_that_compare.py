"""Budgets that compare rows: what one of two rows emits that both decide, by enumeration of its random numbers."""

from flax import struct
from found_out import Case, CLOSE, find_law
import jax.numpy as jnp
from law_of_a_row import Size
from matching import having
import numpy as np
import pytest

from speccascade import decode, methods, Request
from speccascade.drafters import one_pass
from speccascade.engine import law
from speccascade.models import toy
from speccascade.sv import predictors
from speccascade.sv.plans import Profile
from speccascade.sv.verification import Budget, Causal, Goodput, Stale, TopK
from speccascade.types import Model

# Seconds of 2 rows and 0, 1, … of their tokens. The fifth is worth it of a token that is very likely, the sixth never.
GREEDY = dict(
  budget=Goodput(greedy=True), plan=Profile(None, np.float32([1, 1, *np.cumprod([1, *[1.1] * 3, 1.15, 1.15, 1.3])]))
)


def always(*chances):
  """Return a model that predicts the same after every token; a list for each token says another for it."""
  table = np.atleast_2d(np.float32(chances))
  table = np.broadcast_to(table, (table.shape[1], table.shape[1])) if len(table) == 1 else table
  return Model({'table': jnp.log(table)}, toy.Table(table.shape[1], 1), name='always')


def last_of_three(draft, likely):
  """Return the chances by place: the first by its position, the second .99, the third by what is `likely`."""
  first = jnp.array([0.99, 0.99, 0.5, 0.5, 0.99, 0.05])[jnp.minimum(draft.position[:, :1], 5)]
  second = jnp.full_like(first, 0.99)
  third = jnp.where(likely, 0.99, 0.95)
  return jnp.concatenate([first, second, third], 1)[:, : draft.tokens.shape[1]]


@predictors.signal(drawn=False)
def before(draft):
  """The third token of a draft is likely if the second is 0."""
  return last_of_three(draft, draft.tokens[:, 1:2] == 0)


@predictors.signal(drawn=True)
def after(draft):
  """The third token of a draft is likely if it is 0."""
  return last_of_three(draft, draft.tokens[:, 2:3] == 0)


def off(method, models, size, monkeypatch, by_round=True):
  """Return how far from the verifier's is the law of a row beside another, given each of some numbers of that one."""
  if not by_round:
    monkeypatch.setattr(law, '_comparing', lambda _: iter(()))
  return find_law(Case(method, tuple(models), (Request([0], max_new_tokens=size.most),) * 2), size).off


# Row 0 looks at its second token, and rejects its first. The fifth token of the two drafts is row 1's if that second
# token was 1; then row 1 is longer, and its next draft poor, so that row 0 tests its second token, which comes again.
FAIR = [always(0.5, 0.5), always(0.9, 0.1)]
BONUS = methods.scheduled(before, 3, **GREEDY, ending='bonus')


@pytest.mark.full
def test_rows_that_are_compared_before_a_bonus_token_need_numbers_by_round(monkeypatch):
  assert BONUS.by_round and BONUS.keeps_distribution
  assert off(BONUS, FAIR, Size(2, 7), monkeypatch) < CLOSE
  assert off(BONUS, FAIR, Size(2, 7), monkeypatch, by_round=False) == pytest.approx(0.02, abs=1e-6)


# A drafter in one pass: (.9, .1) at the first place, and even chances behind it, where it read a mask, token 2.
ONE_PASS = [one_pass(always([0.9, 0.1, 0], [0.9, 0.1, 0], [0.5, 0.5, 0]), 2), always(0.6, 0.4, 0)]
TEST = methods.scheduled(after, 3, **GREEDY)


@pytest.mark.long
def test_rows_that_are_compared_beside_a_drafter_in_one_pass_need_numbers_by_round(monkeypatch):
  made = TEST.for_networks([model.network for model in ONE_PASS])
  assert made.by_round and not TEST.by_round  # a drafter whose tokens are the same in every round needs none
  assert off(TEST, ONE_PASS, Size(3, 8, tables=8), monkeypatch) < CLOSE
  assert off(TEST, ONE_PASS, Size(3, 8, tables=8), monkeypatch, by_round=False) == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize('ending', ['bonus', 'test'])
def test_numbers_are_keyed_by_round_where_rows_are_compared_and_a_number_may_come_again(ending):
  def by_round(budget, models):
    made = methods.scheduled(predictors.max_q, 3, budget=budget, plan=GREEDY['plan'], ending=ending)
    return made.for_networks([model.network for model in models]).by_round

  for models in (FAIR, ONE_PASS):
    assert not by_round(Causal(), models)
    for budget in (TopK(1), GREEDY['budget'], Stale(TopK(1))):
      assert by_round(budget, models) == (ending == 'bonus' or models is ONE_PASS)


@struct.dataclass
class Stops(Budget):
  """Stop drafts, by no chance that it says."""

  stops = True


def test_a_budget_that_stops_drafts_says_at_which_chance():
  with pytest.raises(ValueError, match=having('Stops', 'threshold')):
    methods.scheduled(predictors.max_q, 2, budget=Stops())


@struct.dataclass
class SaysNothing(Budget):
  """Verify what it likes."""

  def __call__(self, chances, active):
    return active.astype('int32')


def test_a_budget_that_says_nothing_may_look_ahead():
  bonus, test = (methods.scheduled(predictors.max_q, 2, budget=SaysNothing(), ending=x) for x in ('bonus', 'test'))
  assert bonus.keeps_distribution is False and test.keeps_distribution


def test_a_signal_that_reads_a_companion_declares_it():
  method = methods.scheduled(lambda draft: draft.companion.max(-1), 2)
  with pytest.raises(ValueError, match=having('companion', 'signal(companion=True)')):
    decode(method, FAIR, [[0]], max_new_tokens=2)
