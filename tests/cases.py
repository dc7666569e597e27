"""Models and methods that several tests decode with, each method with the reference of its distribution."""

import functools

import numpy as np
import reference

from speccascade import acceptance, methods, rules, stopping
from speccascade.engine.plans import Profile
from speccascade.engine.verification import AcceptanceTable
from speccascade.models import toy, translated

V = 3
LARGE = toy.model(1, V, scale=1.2)
SMALL = toy.model(2, V, scale=0.8, near=LARGE)
MIDDLE = toy.model(3, V, scale=0.6, near=LARGE)
PAIR, TRIO = [SMALL, LARGE], [SMALL, MIDDLE, LARGE]
# Block verification looks at a whole block before it drops a part, so each round has decisions of its own to
# enumerate; two tokens are what that leaves room for.
COIN = toy.model(4, 2, scale=1.2)
COINS = [toy.model(5, 2, scale=0.8, near=COIN), COIN]
# Of its four tokens two are the verifier's, a third is what it reads for the one that it lacks; so half is masked.
FOREIGN = translated(toy.model(6, 4, scale=1.2), for_=LARGE, tables=([3, 1, 0], [3, -1, 0]))
FOREIGN_PAIR, FOREIGN_TRIO = [FOREIGN, LARGE], [FOREIGN, MIDDLE, LARGE]
PROMPT = [2, 2]
ALPHA = dict(
  speculative=0.0,
  chow=0.5,
  chow_log=0.9,
  diff=-0.05,
  diff_log=-0.1,
  opt=0.1,
  opt_log=-0.3,
  bild_star=1.0,
  token_v1=0.1,
  token_v2=0.2,
  token_v3=0.5,
  lossy=0.3,
  lossy_star=0.3,
  learned=0.9,
  learned_opt=2.0,
  learned_alone=-2.6,
)
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
  weights = {'weights': reference.HEADS[name]} if name in reference.HEADS else {}
  return rule if name == 'speculative' else functools.partial(rule, alpha=ALPHA[name], **weights)


def rule_step(name, models=PAIR, **sampler):
  return reference.lockstep(models, lambda l, s: reference.target(name, *l, ALPHA[name], s), **sampler)


def own_step(model, **sampler):
  return reference.lockstep([model], lambda l, s: s(l[0]), **sampler)


BY_SLOT = (0.3, 0.1, -0.2)
WEIGHTS2, WEIGHTS3 = (0.4, 0.6), (0.5, 0.2, 0.3)
weighted2 = functools.partial(rules.weighted, weights=WEIGHTS2)
weighted3 = functools.partial(rules.weighted, weights=WEIGHTS3)


def chained(l, s, name='opt'):
  tail = reference.target(name, l[1], l[2], ALPHA[name], s)
  return reference.target(name, l[0], l[1], ALPHA[name], s, tail=tail)


def user_combiner(logits, *, sampler):
  """A geometric mean, as a user would write it."""
  return sampler(logits.mean(0))


def combined(pi, models):
  return lambda **sampler: reference.lockstep(models, pi, **sampler)


# name: (method, models, the reference step as a function of the sampler's settings)
METHODS = {
  'autoregressive': (methods.autoregressive(1), PAIR, lambda **s: own_step(LARGE, **s)),
  'ensemble weighted': (
    methods.ensemble(weighted2),
    PAIR,
    combined(lambda l, s: reference.weighted(l, WEIGHTS2, s), PAIR),
  ),
  'ensemble contrastive': (
    methods.ensemble(functools.partial(rules.contrastive, mu=0.3)),
    PAIR,
    combined(lambda l, s: reference.contrastive(l, 0.3, s), PAIR),
  ),
  'ensemble_parallel realign': (
    methods.ensemble_parallel(functools.partial(rules.realign, lam=0.3)),
    PAIR,
    combined(lambda l, s: reference.realign(l, 0.3, s), PAIR),
  ),
  'oracle diff': (methods.oracle(bound('diff')), PAIR, lambda **s: rule_step('diff', **s)),
  'token_cascade chow': (
    methods.token_cascade(bound('chow'), max_draft=2),
    PAIR,
    lambda **s: reference.token_cascade(PAIR, 'chow', ALPHA['chow'], 2, **s),
  ),
  'token_cascade chow_log': (
    methods.token_cascade(bound('chow_log'), max_draft=2),
    PAIR,
    lambda **s: reference.token_cascade(PAIR, 'chow_log', ALPHA['chow_log'], 2, **s),
  ),
  'token_cascade learned_alone': (
    methods.token_cascade(bound('learned_alone'), max_draft=2),
    PAIR,
    lambda **s: reference.token_cascade(PAIR, 'learned_alone', ALPHA['learned_alone'], 2, **s),
  ),
  'bild': (methods.bild(0.45, 1.0, max_draft=2), PAIR, lambda **s: reference.bild(PAIR, 0.45, 1.0, 2, **s)),
  'speculative block verification': (
    methods.speculative(block=2, accept=acceptance.block),
    COINS,
    lambda **s: own_step(COIN, **s),
  ),
  'cascade block verification': (
    methods.speculative(bound('opt'), block=1, accept=acceptance.block),
    COINS,
    lambda **s: rule_step('opt', COINS, **s),
  ),
  'speculative heuristic': (
    methods.speculative(block=3, policy=stopping.Heuristic(1)),
    PAIR,
    lambda **s: own_step(LARGE, **s),
  ),
  'cascade confidence': (
    methods.speculative(bound('token_v3'), block=2, policy=stopping.Confidence(np.float32(0.5))),
    PAIR,
    lambda **s: rule_step('token_v3', **s),
  ),
  'speculative moving average': (
    methods.speculative(block=3, policy=stopping.MovingAverage(np.float32(0.6), np.float32(0.5))),
    PAIR,
    lambda **s: own_step(LARGE, **s),
  ),
  'naive_cos': (
    methods.naive_cos(weighted3, block=2, models=3),
    TRIO,
    combined(lambda l, s: reference.weighted(l, WEIGHTS3, s), TRIO),
  ),
  'ensemble_sd': (
    methods.ensemble_sd(weighted2, block=2),
    PAIR,
    combined(lambda l, s: reference.weighted(l, WEIGHTS2, s), PAIR),
  ),
  'cos 2': (methods.cos(weighted2, (2, 1)), PAIR, combined(lambda l, s: reference.weighted(l, WEIGHTS2, s), PAIR)),
  'cos 3': (methods.cos(weighted3, (2, 1, 1)), TRIO, combined(lambda l, s: reference.weighted(l, WEIGHTS3, s), TRIO)),
  'cos cascade of 3': (methods.cos(bound('opt'), (1, 1, 1)), TRIO, combined(chained, TRIO)),
  'cos speculative of 3': (methods.cos(rules.speculative, (2, 1, 1)), TRIO, lambda **s: own_step(LARGE, **s)),
  'naive_cos cascade of 3': (
    methods.naive_cos(bound('token_v3'), block=2, models=3),
    TRIO,
    combined(functools.partial(chained, name='token_v3'), TRIO),
  ),
  'ensemble cascade of 3': (
    methods.ensemble(bound('chow'), models=3),
    TRIO,
    combined(functools.partial(chained, name='chow'), TRIO),
  ),
  'cos user': (methods.cos(user_combiner, (1, 2)), PAIR, combined(lambda l, s: s((l[0] + l[1]) / 2), PAIR)),
  'cascade by slot': (
    methods.speculative(functools.partial(rules.by_slot(rules.opt), alpha=BY_SLOT), block=2),
    PAIR,
    lambda **s: reference.by_slot(PAIR, 'opt', BY_SLOT, **s),
  ),
  'sv_exact': (methods.sv_exact(profile((2 * V**2) ** 3), block=2), TRIO, lambda **s: own_step(LARGE, **s)),
}
METHODS |= {
  'translated cascade': (
    methods.speculative(bound('opt'), block=2),
    FOREIGN_PAIR,
    lambda **s: rule_step('opt', FOREIGN_PAIR, **s),
  ),
  'translated cos': (
    methods.cos(weighted3, (2, 1, 1)),
    FOREIGN_TRIO,
    combined(lambda l, s: reference.weighted(l, WEIGHTS3, s), FOREIGN_TRIO),
  ),
  'translated sv_exact': (
    methods.sv_exact(profile((2 * V**2) ** 3), block=2),
    FOREIGN_TRIO,
    lambda **s: own_step(LARGE, **s),
  ),
}
for _name in ALPHA:
  METHODS[f'speculative {_name}'] = (
    methods.speculative(bound(_name), block=2),
    PAIR,
    functools.partial(rule_step, _name),
  )


# ---- longer texts, whose late tokens χ² looks at ----

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
    methods.speculative(bound('opt'), block=3, policy=stopping.Confidence(np.float32(0.4))),
    PAIR5,
    reference.lockstep(PAIR5, opt5),
  ),
  'speculative, heuristic lengths': (
    methods.speculative(block=4, policy=stopping.Heuristic(2)),
    PAIR5,
    reference.lockstep(PAIR5[1:], lambda l, s: s(l[0])),
  ),
  'block verification': (
    methods.speculative(block=3, accept=acceptance.block),
    PAIR5,
    reference.lockstep(PAIR5[1:], lambda l, s: s(l[0])),
  ),
  'cascade with block verification': (
    methods.speculative(bound('opt'), block=3, accept=acceptance.block),
    PAIR5,
    reference.lockstep(PAIR5, opt5),
  ),
  'token_cascade': (
    methods.token_cascade(bound('chow'), max_draft=3),
    PAIR5,
    reference.token_cascade(PAIR5, 'chow', ALPHA['chow'], 3),
  ),
  'bild': (methods.bild(0.4, 1.5, max_draft=3), PAIR5, reference.bild(PAIR5, 0.4, 1.5, 3)),
  'naive_cos': (methods.naive_cos(weighted3, 3, 3), TRIO5, reference.lockstep(TRIO5, weighted5)),
  'ensemble_sd': (methods.ensemble_sd(weighted3, 3, 3), TRIO5, reference.lockstep(TRIO5, weighted5)),
  'cos': (methods.cos(weighted3, (3, 2, 1)), TRIO5, reference.lockstep(TRIO5, weighted5)),
  'sv_exact': (methods.sv_exact(profile(ROWS), block=3), TRIO5, reference.lockstep(TRIO5[2:], lambda l, s: s(l[0]))),
}


class Letters:
  """A tokenizer of letters."""

  vocab_size = 7

  def encode(self, text):
    return ['abcdefg'.index(x) for x in text]

  def decode(self, ids):
    return ''.join('abcdefg'[i] for i in ids if i != 6)

  def chat(self, messages):
    return self.encode(''.join(m['content'] for m in messages))
