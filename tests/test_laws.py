"""Every method emits exactly the law of its lockstep definition."""

import dataclasses
import functools

import jax.numpy as jnp
from law import AS_USERS, chi_square, emitted_law
import numpy as np
import pytest
import reference
from tiers import quick

from speccascade import acceptance, backends, methods, rules, Sampler, stopping
from speccascade.check import enumeration
from speccascade.check.enumeration import distance
from speccascade.engine.loop import decode_batch
from speccascade.engine.plans import Profile
from speccascade.engine.verification import AcceptanceTable
from speccascade.models import toy
from speccascade.types import ASKED

V = 3
LARGE = toy.model(1, V, scale=1.2)
SMALL = toy.model(2, V, scale=0.8, near=LARGE)
MIDDLE = toy.model(3, V, scale=0.6, near=LARGE)
PAIR, TRIO = [SMALL, LARGE], [SMALL, MIDDLE, LARGE]
# Block verification looks at a whole block before it drops a part, so each round has decisions of its own to
# enumerate; two tokens are what that leaves room for.
COIN = toy.model(4, 2, scale=1.2)
COINS = [toy.model(5, 2, scale=0.8, near=COIN), COIN]
PROMPT = [2, 2]
ALPHA = dict(
  speculative=0.0, chow=0.5, chow_log=0.9, diff=-0.05, diff_log=-0.1, opt=0.1, opt_log=-0.3, bild_star=1.0,
  token_v1=0.1, token_v2=0.2, token_v3=0.5, lossy=0.3, lossy_star=0.3,
)  # fmt: skip
SAMPLERS = {
  'T=0': dict(temperature=0.0),
  'T=.7': dict(temperature=0.7),
  'T=1': dict(),
  'T=0 penalty': dict(temperature=0.0, repetition_penalty=1.7),
  'T=.7 filters': dict(temperature=0.7, top_k=2, top_p=0.9, repetition_penalty=1.3),
  'T=1 counts': dict(min_p=0.2, presence_penalty=0.4, frequency_penalty=0.3),
}
TABLE = AcceptanceTable(np.float32([0.75]), np.float32([[0.9], [0.95]]), np.float32([[0.1, 0.6], [0.2, 0.9]]))


def profile(rows, table=TABLE):
  """Return a profile by which a batch of that many rows verifies some of its tokens and not others."""
  return Profile(table, np.float32(3 * rows + np.arange(5 * rows)))


def bound(name):
  rule = getattr(rules, name)
  return rule if name == 'speculative' else functools.partial(rule, alpha=ALPHA[name])


def rule_step(name, models=PAIR, **sampler):
  return reference.lockstep(models, lambda l, s: reference.target(name, *l, ALPHA[name], s), **sampler)


def own_step(model, **sampler):
  return reference.lockstep([model], lambda l, s: s(l[0]), **sampler)


WEIGHTS2, WEIGHTS3 = (0.4, 0.6), (0.5, 0.2, 0.3)
weighted2 = functools.partial(rules.weighted, weights=WEIGHTS2)
weighted3 = functools.partial(rules.weighted, weights=WEIGHTS3)


def chained(l, s):
  tail = reference.target('opt', l[1], l[2], ALPHA['opt'], s)
  return reference.target('opt', l[0], l[1], ALPHA['opt'], s, tail=tail)


def user_combiner(logits, *, sampler):
  """A geometric mean, as a user would write it."""
  return sampler(logits.mean(0))


def combined(pi, models):
  return lambda **sampler: reference.lockstep(models, pi, **sampler)


# name: (method, models, the reference step as a function of the sampler's settings)
METHODS = {
  'autoregressive': (methods.autoregressive(1), PAIR, lambda **s: own_step(LARGE, **s)),
  'ensemble weighted': (
    methods.ensemble(weighted2), PAIR, combined(lambda l, s: reference.weighted(l, WEIGHTS2, s), PAIR)),
  'ensemble contrastive': (
    methods.ensemble(functools.partial(rules.contrastive, mu=0.3)), PAIR,
    combined(lambda l, s: reference.contrastive(l, 0.3, s), PAIR)),
  'ensemble_parallel realign': (
    methods.ensemble_parallel(functools.partial(rules.realign, lam=0.3)), PAIR,
    combined(lambda l, s: reference.realign(l, 0.3, s), PAIR)),
  'oracle diff': (methods.oracle(bound('diff')), PAIR, lambda **s: rule_step('diff', **s)),
  'token_cascade chow': (
    methods.token_cascade(bound('chow'), max_draft=2), PAIR,
    lambda **s: reference.token_cascade(PAIR, 'chow', ALPHA['chow'], 2, **s)),
  'token_cascade chow_log': (
    methods.token_cascade(bound('chow_log'), max_draft=2), PAIR,
    lambda **s: reference.token_cascade(PAIR, 'chow_log', ALPHA['chow_log'], 2, **s)),
  'bild': (
    methods.bild(0.45, 1.0, max_draft=2), PAIR, lambda **s: reference.bild(PAIR, 0.45, 1.0, 2, **s)),
  'speculative block verification': (
    methods.speculative(block=2, accept=acceptance.block), COINS, lambda **s: own_step(COIN, **s)),
  'cascade block verification': (
    methods.speculative(bound('opt'), block=1, accept=acceptance.block), COINS,
    lambda **s: rule_step('opt', COINS, **s)),
  'speculative heuristic': (
    methods.speculative(block=3, policy=stopping.Heuristic(1)), PAIR, lambda **s: own_step(LARGE, **s)),
  'cascade confidence': (
    methods.speculative(bound('token_v3'), block=2, policy=stopping.Confidence(np.float32(0.5))), PAIR,
    lambda **s: rule_step('token_v3', **s)),
  'speculative moving average': (
    methods.speculative(block=3, policy=stopping.MovingAverage(np.float32(0.6), np.float32(0.5))), PAIR,
    lambda **s: own_step(LARGE, **s)),
  'naive_cos': (
    methods.naive_cos(weighted3, block=2, models=3), TRIO,
    combined(lambda l, s: reference.weighted(l, WEIGHTS3, s), TRIO)),
  'ensemble_sd': (
    methods.ensemble_sd(weighted2, block=2), PAIR, combined(lambda l, s: reference.weighted(l, WEIGHTS2, s), PAIR)),
  'cos 2': (
    methods.cos(weighted2, (2, 1)), PAIR, combined(lambda l, s: reference.weighted(l, WEIGHTS2, s), PAIR)),
  'cos 3': (
    methods.cos(weighted3, (2, 1, 1)), TRIO, combined(lambda l, s: reference.weighted(l, WEIGHTS3, s), TRIO)),
  'cos cascade of 3': (
    methods.cos(bound('opt'), (1, 1, 1)), TRIO, combined(chained, TRIO)),
  'cos user': (
    methods.cos(user_combiner, (1, 2)), PAIR, combined(lambda l, s: s((l[0] + l[1]) / 2), PAIR)),
  'sv_exact': (methods.sv_exact(profile((2 * V**2) ** 3), block=2), TRIO, lambda **s: own_step(LARGE, **s)),
}  # fmt: skip
for _name in ALPHA:
  METHODS[f'speculative {_name}'] = (
    methods.speculative(bound(_name), block=2), PAIR, functools.partial(rule_step, _name)
  )  # fmt: skip


# Each kind of method at T = 1 and a cascade under every sampler; the other pairs are of the full tier. Penalties by
# count no method sees in a way of its own.
EVERYWHERE = ('autoregressive', 'speculative opt', 'speculative token_v3', 'speculative lossy', 'cos 2', 'bild')
CASES = [(n, s) for n in METHODS for s in SAMPLERS if s != 'T=1 counts' or n in EVERYWHERE]
MORE = ('ensemble_parallel', 'cascade confidence', 'speculative moving average', 'cos 2', 'cos cascade of 3')
MORE += tuple(f'speculative {n}' for n in ALPHA if n not in ('speculative', 'lossy'))
FIRST = [(n, s) for n, s in CASES if n == 'speculative opt' or s == 'T=1' and n not in MORE]


def off_by(name, setting, options=None):
  """Return the distance of a method's exact law to the lockstep law, and of its sum to 1."""
  method, models, step = METHODS[name]
  prompt = PROMPT if models is not COINS else [1, 0]
  law = emitted_law(method, models, prompt, 3, Sampler(**SAMPLERS[setting]), options)
  return distance(law, reference.joint_law(step(**SAMPLERS[setting]), prompt, 3))


@pytest.mark.parametrize('name, setting', quick(CASES, FIRST))
def test_joint_law_of_three_tokens_is_the_lockstep_law(name, setting):
  off, unnormalised = off_by(name, setting)
  assert off < 1e-5 and unnormalised < 1e-5


@pytest.mark.parametrize('setting', quick(['T=0', 'T=.7 filters'], ['T=.7 filters']))
@pytest.mark.parametrize('name', quick(['speculative speculative', 'speculative opt', 'cos 2'], ['speculative opt']))
def test_the_law_is_the_same_as_users_compile(name, setting):
  off, unnormalised = off_by(name, setting, AS_USERS)
  assert off < 1e-5 and unnormalised < 1e-5


# ---- texts that end where nothing may follow ----

KINDS = (
  'speculative speculative', 'speculative opt', 'cos 2', 'cascade block verification', 'sv_exact', 'token_cascade chow',
  'bild', 'naive_cos', 'ensemble_sd', 'oracle diff',
)  # fmt: skip
BACKENDS = {'plain': backends.Backend(), 'cpu': backends.CPU(), 'gpu': backends.GPU(), 'tpu': backends.TPU()}
ENDINGS = [(n, t, 'plain') for n in METHODS for t in ('T=0', 'T=1')]
ENDINGS += [(n, t, b) for n in KINDS for t in ('T=0', 'T=1') for b in BACKENDS if b != 'plain']


def automaton(logits, tokens, count):
  """After the prompt 0 goes on; EOS ends the text, any other token is a dead end, and nothing follows the limit."""
  over = (count > reference.BEGIN) & (tokens[count - 1] > 0) | (count >= reference.BEGIN + 3)
  return jnp.where(over, -jnp.inf, logits)


@pytest.mark.parametrize('name, setting, backend', quick(ENDINGS, [(n, 'T=1', 'plain') for n in KINDS]))
def test_only_a_token_of_the_output_without_a_law_is_a_fault(name, setting, backend, monkeypatch):
  monkeypatch.setattr(backends, 'of', lambda *_: BACKENDS[backend])
  (method, models, step), states = METHODS[name], []
  vocab, prompt = models[0].network.vocab_size, PROMPT if models is not COINS else [1, 0]
  ending = [m.replace(network=dataclasses.replace(m.network, eos_ids=(vocab - 1,))) for m in models]

  def decode(*args, **settings):
    states.append(decode_batch(*args, **settings, processor=automaton))
    return states[0]

  sampler = SAMPLERS[setting]
  law = enumeration.emitted_law(method, ending, prompt, 3, Sampler(**sampler), decode)
  off, unnormalised = distance(law, reference.joint_law(step(**sampler), prompt, 3, eos_ids=range(1, vocab)))
  assert off < 1e-5 and unnormalised < 1e-5
  end = np.asarray(states[0].length)
  last = np.asarray(states[0].tokens)[np.arange(end.size), end - 1]
  stuck = (last > 0) & (last < vocab - 1) & (end < len(prompt) + 3)
  np.testing.assert_array_equal((states[0].fault >= 0).any(1), stuck)
  assert set(np.unique(states[0].fault)) <= {-1, ASKED} and (vocab == 2 or stuck.any())


# ---- late tokens, by χ² ----

ROWS, FALSE_ALARM = 131_072, 1e-6  # per test; the seeds are fixed, so a test that passes once passes always
LARGE5 = toy.model(11, 5, scale=1.2)
SMALL5 = toy.model(12, 5, scale=0.8, near=LARGE5)
MIDDLE5 = toy.model(13, 5, scale=0.6, near=LARGE5)
PAIR5, TRIO5 = [SMALL5, LARGE5], [SMALL5, MIDDLE5, LARGE5]


def opt5(l, s):
  return reference.target('opt', *l, ALPHA['opt'], s)


def weighted5(l, s):
  return reference.weighted(l, WEIGHTS3, s)


LATE = {
  'speculative': (methods.speculative(block=3), PAIR5, reference.lockstep(PAIR5[1:], lambda l, s: s(l[0]))),
  'cascade': (methods.speculative(bound('opt'), block=3), PAIR5, reference.lockstep(PAIR5, opt5)),
  'cascade, drafts of different lengths': (
    methods.speculative(bound('opt'), block=3, policy=stopping.Confidence(np.float32(0.4))), PAIR5,
    reference.lockstep(PAIR5, opt5)),
  'speculative, heuristic lengths': (
    methods.speculative(block=4, policy=stopping.Heuristic(2)), PAIR5,
    reference.lockstep(PAIR5[1:], lambda l, s: s(l[0]))),
  'block verification': (
    methods.speculative(block=3, accept=acceptance.block), PAIR5,
    reference.lockstep(PAIR5[1:], lambda l, s: s(l[0]))),
  'cascade with block verification': (
    methods.speculative(bound('opt'), block=3, accept=acceptance.block), PAIR5, reference.lockstep(PAIR5, opt5)),
  'token_cascade': (
    methods.token_cascade(bound('chow'), max_draft=3), PAIR5,
    reference.token_cascade(PAIR5, 'chow', ALPHA['chow'], 3)),
  'bild': (methods.bild(0.4, 1.5, max_draft=3), PAIR5, reference.bild(PAIR5, 0.4, 1.5, 3)),
  'naive_cos': (methods.naive_cos(weighted3, 3, 3), TRIO5, reference.lockstep(TRIO5, weighted5)),
  'ensemble_sd': (methods.ensemble_sd(weighted3, 3, 3), TRIO5, reference.lockstep(TRIO5, weighted5)),
  'cos': (methods.cos(weighted3, (3, 2, 1)), TRIO5, reference.lockstep(TRIO5, weighted5)),
  'sv_exact': (
    methods.sv_exact(profile(ROWS), block=3), TRIO5,
    reference.lockstep(TRIO5[2:], lambda l, s: s(l[0]))),
}  # fmt: skip


@pytest.mark.parametrize('name', quick(LATE, ['cascade']))
def test_late_tokens_follow_the_lockstep_law(name):
  method, models, step = LATE[name]
  expected = reference.late_law(step, PROMPT, 5, 2, first=6, count=3)
  p_value, _ = chi_square(method, models, PROMPT, Sampler(), expected, first=6, rows=ROWS)
  assert p_value > FALSE_ALARM


@pytest.mark.full
def test_published_sv_is_biased_above_temperature_0_as_documented():
  rows = 20_000
  table = AcceptanceTable(np.float32([1.0]), np.float32([[0.9], [1.0]]), np.float32([[0.05, 0.9], [0.5, 0.5]]))
  expected = reference.late_law(reference.lockstep(TRIO5[2:], lambda l, s: s(l[0])), PROMPT, 5, 2, 6, 3)
  run = functools.partial(chi_square, prompt=PROMPT, sampler=Sampler(), expected=expected, first=6, rows=rows)
  assert run(methods.sv(profile(rows, table), block=3), TRIO5)[0] < FALSE_ALARM
  assert run(methods.sv_exact(profile(rows, table), block=3), TRIO5)[0] > FALSE_ALARM
