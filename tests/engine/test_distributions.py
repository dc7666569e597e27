"""Every method emits exactly the distribution of its lockstep definition."""

import dataclasses

from cases import FALSE_ALARM, LATE, METHODS, own, PAIR, PROMPT, ROWS, SAMPLERS
from compiling import AS_USERS
from emitted import chi_square, emitted_distribution
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiers import long_but

from speccascade import backends, rules, Sampler
from speccascade.check import enumeration
from speccascade.check.enumeration import distance
from speccascade.engine.loop import decode_batch
from speccascade.engine.phases import Verify
from speccascade.types import NO_FAULT, of_logits


def composition(method):
  """Return what a round of a method is made of."""
  phases = method.all_phases
  acceptors = [rules.name_of(phase.accept) for phase in phases if isinstance(phase, Verify)]
  return method.by_round, *((type(p), p.reads, p.feeds) for p in phases), *acceptors


# A method of each composition at T = 1, a cascade under samplers, and what reads or draws in a way of its own.
KINDS = {'speculative opt', *{composition(METHODS[name][0]): name for name in reversed(METHODS)}.values()}
KINDS -= {'cascade block verification', 'cos 2'}  # enumerated in tests/test_acceptance.py, and of three models
OWN = {
  'oracle diff',
  'ensemble contrastive',
  'speculative speculative',
  'speculative moving average',
  'cascade by slot',
}
OWN |= {'cascade phased', 'translated cascade', 'one pass beside a cascade', 'one pass, drafts of different lengths'}
EVERYWHERE = ('autoregressive', 'speculative opt', 'speculative token_v3', 'speculative lossy', 'cos 2', 'bild')
# Of a method that follows its target, compositions that are drawn cross that with samplers.
ALONE = {n for n, (method, _, _) in METHODS.items() if not method.keeps_distribution}
CASES = [(n, s) for n in METHODS for s in SAMPLERS if s == 'T=1' or n in EVERYWHERE or n in ALONE and s != 'T=1 counts']
FIRST = [(n, 'T=1') for n in KINDS | OWN] + [('speculative opt', s) for s in ('T=0', 'T=.7 filters', 'T=1 counts')]


def off_by(name, setting, options=None):
  """Return the distance of a method's exact distribution to the lockstep distribution, and of its sum to 1."""
  method, models, step = METHODS[name]
  distribution = emitted_distribution(method, models, PROMPT, 3, Sampler(**SAMPLERS[setting]), options)
  return distance(distribution, reference.joint_distribution(step(models, **SAMPLERS[setting]), PROMPT, 3))


def test_the_alphas_that_are_found_tell():
  """The distribution of a rule is neither model's, and that of a token cascade depends on the length of its drafts."""
  of = lambda step: reference.joint_distribution(step, PROMPT, 3)
  models = [of(own([model])) for model in PAIR]
  for name in reference.RULES.keys() - {'speculative'}:
    _, _, step = METHODS[f'speculative {name}']
    assert min(distance(of(step(PAIR)), other)[0] for other in models) > 0.01, name
  for name in [name for name in METHODS if name.startswith('token_cascade ')]:
    _, _, step = METHODS[name]
    assert distance(of(step(PAIR)), of(step(PAIR, max_draft=3)))[0] > 0.01, name


@pytest.mark.parametrize('name, setting', long_but(CASES, FIRST))
def test_joint_distribution_of_three_tokens_is_the_lockstep_distribution(name, setting):
  off, unnormalised = off_by(name, setting)
  assert off < 1e-5 and unnormalised < 1e-5


USERS = [(n, s) for n in ('speculative speculative', 'speculative opt', 'cos 2') for s in ('T=0', 'T=.7 filters')]


@pytest.mark.full
@pytest.mark.parametrize('name, setting', long_but(USERS, [('speculative speculative', 'T=.7 filters')]))
def test_the_law_is_the_same_as_users_compile(name, setting):
  off, unnormalised = off_by(name, setting, AS_USERS)
  assert off < 1e-5 and unnormalised < 1e-5


# ---- texts that end where nothing may follow ----

BACKENDS = {'plain': backends.Backend(), **backends.by_name()}
ENDING = [n for n in METHODS if n != 'FLy']  # which reads the distributions after an end, too
ENDINGS = [(n, t, 'plain') for n in ENDING for t in ('T=0', 'T=1')]
ENDINGS += [(n, t, b) for n in ENDING for t in ('T=0', 'T=1') for b in BACKENDS if b != 'plain' and n in KINDS]
FEW_ENDINGS = ('autoregressive', 'speculative opt', 'ensemble_sd', 'bild', 'one pass')


def automaton(logits, tokens, count):
  """After the prompt 0 goes on; EOS ends the text, any other token is a dead end, and nothing follows the limit."""
  over = (count > reference.BEGIN) & (tokens[count - 1] > 0) | (count >= reference.BEGIN + 3)
  return jnp.where(over, -jnp.inf, logits)


@pytest.mark.parametrize('name, setting, backend', long_but(ENDINGS, [(n, 'T=1', 'plain') for n in FEW_ENDINGS]))
def test_only_a_token_of_the_output_without_a_law_is_a_fault(name, setting, backend, monkeypatch):
  monkeypatch.setattr(backends, 'backend_for', lambda *_: BACKENDS[backend])
  (method, models, step), states = METHODS[name], []
  vocab = models[0].network.vocab_size
  ending = [m.replace(network=dataclasses.replace(m.network, eos_ids=(vocab - 1,))) for m in models]

  def decode(*args, **settings):
    states.append(decode_batch(*args, **settings, processor=automaton))
    return states[0]

  sampler = SAMPLERS[setting]
  distribution = enumeration.emitted_distribution(method, ending, PROMPT, 3, Sampler(**sampler), decode)
  off, unnormalised = distance(
    distribution, reference.joint_distribution(step(models, **sampler), PROMPT, 3, eos_ids=range(1, vocab))
  )
  assert off < 1e-5 and unnormalised < 1e-5
  end = np.asarray(states[0].length)
  last = np.asarray(states[0].tokens)[np.arange(end.size), end - 1]
  stuck = (last > 0) & (last < vocab - 1) & (end < len(PROMPT) + 3)
  code, by_request = np.asarray(states[0].fault.code), [of_logits(m, asked=1) for m in range(len(method.slots))]
  np.testing.assert_array_equal(code != NO_FAULT, stuck)
  assert set(code) <= {NO_FAULT, *by_request} and (vocab == 2 or stuck.any())


# ---- late tokens, by χ² ----


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(LATE, ['speculative', 'block verification']))
def test_late_tokens_follow_the_lockstep_distribution(name):
  method, models, step = LATE[name]
  expected = reference.late_distribution(step(models), PROMPT, 5, 2, first=6, count=3)
  p_value, _ = chi_square(method, models, PROMPT, Sampler(), expected, first=6, rows=ROWS)
  assert p_value > FALSE_ALARM
