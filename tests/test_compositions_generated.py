"""Compositions that are drawn: what the package says of them is what is found."""

import os

import compositions
from found_out import judge, Size
import jax
import pytest

from speccascade import acceptance, stopping
from speccascade.engine import job, lowering, method, phases
from speccascade.sv.verification import Scheduled

SEED = os.environ.get('SPECCASCADE_COMPOSITIONS', '0')  # another one draws others

# ---- faults of the past, each planted ----


def by_position(patch):
  patch.setattr(Scheduled, 'compares', False)


def aligned(patch):
  """A model that is fed twice in a round is taken for one that is fed once."""
  feeding = lowering.Facts.feeding
  patch.setattr(lowering.Facts, 'feeding', lambda self, model: feeding(self, model)[-1:])


def behind_the_end(patch):
  """A row that ended goes on in the round."""
  commit = phases.commit
  patch.setattr(phases, 'commit', lambda context, state, *a, **k: commit(context, state, *a, **k).replace(active=state.active))


class Unclipped:
  """`jax.numpy`, in which what an acceptor says is not bounded by what was tested."""

  def __getattr__(self, name):
    return getattr(jax.numpy, name)

  def clip(self, x, low, high=None):
    return x if isinstance(high, jax.Array) else jax.numpy.clip(x, low, high)


def unclipped(patch):
  patch.setattr(phases, 'jnp', Unclipped())


def block_ahead(patch):
  keeps = Scheduled.keeps_distribution
  patch.setattr(Scheduled, 'keeps_distribution', lambda self, by_round: keeps(self, by_round and not self.spare))


def same_numbers(patch):
  patch.setattr(job, '_check_numbers', lambda *_: None)


def misread(patch):
  patch.setattr(method, '_misread', lambda *_: None)


def nosy(patch):
  patch.setattr(stopping.Policy, 'exact', True)


def everything(patch):
  patch.setattr(acceptance.everything, 'declaration', acceptance.Declaration((), False, True))


OWN = dict(sampler='T=1', request='plain', text='decoder', seeds='own')
FAULTS = {
  'numbers by position where rows are compared': (by_position, dict(round='scheduled', budget='TopK of 2', ending='bonus', γ='3')),
  'the same of greedy goodput': (by_position, dict(round='scheduled', budget='greedy Goodput', ending='bonus', γ='3')),
  'the same before a test, of a drafter in one pass': (
    by_position,
    dict(round='scheduled', budget='greedy Goodput', ending='test', drafter='one pass', γ='3'),
  ),
  'the same before a test, of a head': (
    by_position,
    dict(round='scheduled', budget='greedy Goodput', ending='test', drafter='head', γ='3'),
  ),
  'a model that is fed twice': (aligned, dict(round='drawn', accept='token_wise', policy='Policy')),
  'a round that goes on behind its end': (behind_the_end, dict(round='drawn', request='stop token')),
  'more is accepted than was tested': (unclipped, dict(round='speculative', accept='generous')),
  'block verification under a budget that looks ahead': (
    block_ahead,
    dict(round='scheduled', accept='block', budget='Goodput', ending='test', predictor='drawn_q'),
  ),
  'a memory of an equal seed': (same_numbers, dict(round='speculative', drafter='lookup with memory', seeds='equal')),
  'a head in the target': (misread, dict(round='speculative', drafter='head', target='opt')),
  'a drafter in one pass in the target': (misread, dict(round='speculative', drafter='one pass', target='opt')),
  'a policy that learns from what was not tested': (nosy, dict(round='speculative', policy='Nosy')),
  'an acceptor that accepts everything': (everything, dict(round='speculative', accept='everything')),
}
TRIES = 24
MANY = Size(2, 7, tables=48, boxes=200_000), Size(2, 7, tables=8)


@pytest.mark.full
@pytest.mark.parametrize('name', FAULTS)
def test_a_fault_of_the_past_is_found(name, monkeypatch):
  plant, fixed = FAULTS[name]

  def sound(case):
    with pytest.MonkeyPatch.context() as without:
      return not judge(case, MANY).contradicts

  plant(monkeypatch)
  fixed = ({} if 'request' in fixed else OWN | {'seeds': fixed.get('seeds', 'own')}) | fixed
  drawn = (compositions.draw((SEED, name, i), fixed) for i in range(TRIES))
  assert any(judge(case, MANY).contradicts and sound(case) for case in filter(None, drawn))
