"""Compositions that are drawn: what the package says of them is what is found."""

import itertools
import os

import compositions
from compositions_run import conclusions, run
from found_out import find_text, judge, Size, verdict
import jax
import pytest
from tiers import long_but

from speccascade import acceptance, stopping
from speccascade.engine import facts, job, law, phases
from speccascade.types import Told

SEED = os.environ.get('SPECCASCADE_COMPOSITIONS', '0')  # another one draws others

FEW = Size(3, 7, tables=2, boxes=12_000), Size(2, 7, tables=2)

# ---- verdicts ----


@pytest.mark.full
@pytest.mark.parametrize('number', long_but(range(40), range(3)))
def test_what_is_drawn_by_chance_is_what_is_said_of_it(number):
  judged = judge(next(iter(compositions.by_chance((SEED, number)))), FEW)
  assert not judged.contradicts, str(judged)


def is_exact(drawn):
  return drawn is not None and verdict(*drawn).kind == 'exact'


@pytest.mark.full
@pytest.mark.parametrize('number', long_but(range(40), range(2)))
def test_coupled_texts_are_those_of_the_target_in_lockstep(number):
  drawn = (compositions.draw_text((SEED, number, i)) for i in range(200))
  case, batch = next(filter(is_exact, drawn))
  assert not find_text(case, batch), str(case)


@pytest.mark.long
def test_verdicts_of_all_pairs_are_true(tmp_path):
  found = conclusions(run(compositions.covering(SEED), tmp_path / 'pairs.jsonl'))
  assert not any(found.values()), '\n'.join(itertools.chain(*([f'{name}:', *some] for name, some in found.items())))


# ---- faults of the past, each planted ----


def by_position(patch):
  patch.setattr(law, '_comparing', lambda _: iter(()))


def aligned(patch):
  """A model that is fed twice in a round is taken for one that is fed once."""
  patch.setattr(facts.Notes, 'aligned', True)


def forgets(patch):
  """What a model knows of pending tokens is not noted where it has nothing to read."""
  feeds = facts.Notes.feeds
  noted = lambda self, row, model, pending: row.unread[model] + pending > 0 and feeds(self, row, model, pending)
  patch.setattr(facts.Notes, 'feeds', noted)
  patch.setattr(facts, 'memo', lambda *_: {})  # what is known without the fault, and with it


def behind_the_end(patch):
  """A row that ended goes on in the round."""
  commit = phases.commit
  patch.setattr(
    phases, 'commit', lambda context, state, *a, **k: commit(context, state, *a, **k).replace(active=state.active)
  )


class Unclipped:
  """`jax.numpy`, in which what an acceptor says is not bounded by what was tested."""

  def __getattr__(self, name):
    return getattr(jax.numpy, name)

  def clip(self, x, low, high=None):
    return x if isinstance(high, jax.Array) else jax.numpy.clip(x, low, high)


def unclipped(patch):
  patch.setattr(phases, 'jnp', Unclipped())


def block_ahead(patch):
  patch.setattr(law, '_choices', lambda _: iter(()))


def same_numbers(patch):
  patch.setattr(job, '_check_numbers', lambda *_: None)


def misread(patch):
  """What a head or a drafter in one pass knows of its draft counts as its distribution after the text."""
  patch.setattr(law, 'misread', lambda *_: None)
  patch.setattr(phases.Propose, '_forgotten', lambda self, state: state)


def nosy(patch):
  patch.setattr(stopping.Policy, 'told', Told.NOTHING)


def everything(patch):
  patch.setattr(acceptance.everything, 'declaration', acceptance.AcceptorFacts((), Told.NOTHING, True))


OWN = dict(sampler='T=1', request='plain', text='decoder', seeds='own', rows='2')
FAULTS = {
  'numbers by position where the budget of three rows is a number': (
    by_position,
    dict(
      round='scheduled',
      budget='TopK',
      ending='bonus',
      γ='3',
      drafter='small',
      predictor='raced_before',
      fit='its own',
      rows='3',
    ),
  ),
  'numbers by position where rows are compared before a bonus token': (
    by_position,
    dict(
      round='scheduled',
      budget='greedy Goodput',
      ending='bonus',
      γ='3',
      drafter='small',
      predictor='third_before',
      fit='its own',
    ),
  ),
  'numbers by position before a test, of a drafter in one pass': (
    by_position,
    dict(
      round='scheduled',
      budget='greedy Goodput',
      ending='test',
      drafter='one pass',
      γ='3',
      predictor='third_drawn',
      fit='its own',
    ),
  ),
  'numbers by position before a test, of a head': (
    by_position,
    dict(
      round='scheduled',
      budget='greedy Goodput',
      ending='test',
      drafter='head',
      γ='3',
      predictor='third_drawn',
      fit='its own',
    ),
  ),
  'a model that is fed twice': (
    aligned,
    dict(round='drawn', middle='all twice', accept='token_wise', policy='Policy', drafter='small'),
  ),
  'a model that is fed again while tokens are pending': (
    forgets,
    dict(
      round='drawn', middle='the bonus, then all', kept='yes', accept='token_wise', policy='Policy', drafter='small'
    ),
  ),
  'a round that goes on behind its end': (
    behind_the_end,
    dict(
      OWN,
      round='drawn',
      middle='a test, then all',
      request='stop token',
      accept='token_wise',
      policy='Policy',
      drafter='small',
    ),
  ),
  'more is accepted than was tested': (unclipped, dict(round='speculative', accept='generous')),
  'block verification under a budget that looks ahead': (
    block_ahead,
    dict(
      round='scheduled',
      accept='block',
      budget='Goodput',
      ending='test',
      predictor='mixed_drawn',
      fit='its own',
      drafter='small',
      γ='2',
    ),
  ),
  'a memory of an equal seed': (
    same_numbers,
    dict(round='speculative', drafter='lookup with memory', seeds='equal', target='speculative', accept='token_wise'),
  ),
  'a head in the target': (misread, dict(round='naive_cos', drafter='head', target='weighted', γ='3')),
  'a drafter in one pass in the target': (
    misread,
    dict(round='naive_cos', drafter='one pass', target='weighted', γ='3'),
  ),
  'a policy that learns from what was not tested': (nosy, dict(round='speculative', policy='Nosy')),
  'an acceptor that accepts everything': (everything, dict(round='speculative', accept='everything')),
}
TRIES, MOST = 2000, 30  # draws, and cases of them that are judged


MANY = Size(3, 7, tables=10, boxes=100_000), Size(2, 7, tables=16)
# which the full tier has
QUICK = 'a model that is fed', 'a head in', 'a drafter in one pass in'
SEARCHED = [name for name in FAULTS if name.startswith(('numbers', 'block'))]


def drawn(name):
  fixed = FAULTS[name][1]
  usual = {} if 'request' in fixed else OWN
  cases = filter(None, (compositions.draw((SEED, name, i), usual | fixed) for i in range(TRIES)))
  return itertools.islice(cases, MOST)


def catches(case, plant, sizes):
  """Tell whether a case shows a fault, and nothing without it."""
  with pytest.MonkeyPatch.context() as patch:
    plant(patch)
    if not judge(case, sizes).contradicts:
      return False
  return not judge(case, sizes).contradicts


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(FAULTS, [name for name in FAULTS if name.startswith(QUICK)]))
def test_a_fault_of_the_past_is_found(name):
  sizes = MANY if name in SEARCHED else FEW
  assert any(catches(case, FAULTS[name][0], sizes) for case in drawn(name))
