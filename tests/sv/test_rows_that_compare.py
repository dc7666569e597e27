"""Budgets that compare rows: what two rows emit that both decide, by enumeration of all their random numbers."""

from flax import struct
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import two_rows

from speccascade import decode, methods
from speccascade.drafters import one_pass
from speccascade.models import toy
from speccascade.sv import predictors
from speccascade.sv.plans import Profile
from speccascade.sv.verification import Budget, Causal, Goodput, Stale, TopK
from speccascade.types import ACCEPT, DRAFT, FINAL, Model

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


def cells(cuts, draws, tests, finals=(), row=0, start=0):
  """Return the cuts of places: of drafts, tests and last tokens."""
  places = {DRAFT: draws, ACCEPT: tests, FINAL: finals}
  return {(row, start, place, purpose): cuts[purpose][place] for purpose in places for place in places[purpose]}


# Row 0 looks at its second token, and rejects its first. The fifth token of the two drafts is row 1's if that second
# token was 1; then row 1 is longer, and its next draft poor, so that row 0 tests its second token, which comes again.
FAIR = [always(0.5, 0.5), always(0.9, 0.1)]
BONUS = methods.scheduled(before, 3, **GREEDY, ending='bonus')
EACH = {DRAFT: [(0.5,)] * 4, ACCEPT: [(0.2,)] * 4, FINAL: [(0.9,)] * 4}
OTHER = cells(EACH, range(3), range(3), row=1)
BY_POSITION = cells(EACH, range(2), range(2), range(2)) | OTHER
BY_ROUND = cells(EACH, range(2), range(2), range(2)) | cells(EACH, [0], [0], [0], start=1) | OTHER


def second_token(by_round):
  cuts = BY_ROUND if by_round else BY_POSITION
  return two_rows.distribution(BONUS, FAIR, cuts, by_round=by_round, most=7, measured=2).sum(0)[0]


@pytest.mark.full
def test_rows_that_are_compared_before_a_bonus_token_need_numbers_by_round():
  assert BONUS.by_round and BONUS.keeps_distribution
  assert second_token(True) == pytest.approx(0.9, abs=1e-6)
  assert second_token(False) == pytest.approx(0.8964, abs=1e-6)


# A drafter in one pass: (.9, .1) at the first place, and even chances behind it, where it read a mask, token 2.
ONE_PASS = [one_pass(always([0.9, 0.1, 0], [0.9, 0.1, 0], [0.5, 0.5, 0]), 2), always(0.6, 0.4, 0)]
TEST = methods.scheduled(after, 3, **GREEDY)
FIRST = {DRAFT: [(0.9,), (0.5,), (0.5,), (0.5,)], ACCEPT: [(2 / 3,), (0.8,), (0.8,), (0.8,)]}
BOTH = {DRAFT: [(0.9,), (0.5, 0.9), (0.5, 0.9)], ACCEPT: [(2 / 3,), (2 / 3, 0.8), (2 / 3, 0.8)]}
MATE = cells(FIRST, range(4), range(4), row=1)


def third_token(by_round):
  cuts = cells(FIRST if by_round else BOTH, range(3), range(3)) | MATE
  if by_round:
    cuts |= cells(FIRST, [0, 1], [0, 1], start=1) | cells(FIRST, [0], [0], start=2)
  return two_rows.distribution(TEST, ONE_PASS, cuts, by_round=by_round, most=8, measured=3).sum((0, 1))[0]


@pytest.mark.long
def test_rows_that_are_compared_beside_a_drafter_in_one_pass_need_numbers_by_round():
  made = TEST.of([model.network for model in ONE_PASS])
  assert made.by_round and not TEST.by_round  # a drafter whose tokens are the same in every round needs none
  assert third_token(False) == pytest.approx(0.588975, abs=1e-6)
  assert third_token(True) == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize('ending', ['bonus', 'test'])
def test_numbers_are_keyed_by_round_where_rows_are_compared_and_a_number_may_come_again(ending):
  def by_round(budget, models):
    made = methods.scheduled(predictors.max_q, 3, budget=budget, plan=GREEDY['plan'], ending=ending)
    return made.of([model.network for model in models]).by_round

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
