"""Models and methods that several tests decode with, each method with the reference of its distribution."""

from functools import cache, partial
import inspect

import docstrings
import jax.numpy as jnp
import numpy as np
import reference
from reference import RULES

from speccascade import acceptance, methods, rules, Sampler, stopping
from speccascade.drafters import one_pass, translated
from speccascade.engine.phases import Verify
from speccascade.models import toy
from speccascade.sv.plans import Profile
from speccascade.sv.predictors import AcceptanceTable

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
AT_ONCE = one_pass(SMALL, 0)
PROMPT = [1, 1]  # which is of every vocabulary
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


@cache
def alpha(name, share=0.5):
  """Return the α at which that share of what a rule can reject of the pair is rejected."""
  tables = [np.asarray(model.params['table'], np.float64) for model in PAIR]
  return reference.telling(name, list(zip(*tables)), share)


def bound(name, share=0.5):
  return reference.bound(name, alpha(name, share))


# ---- reference steps, functions of the models and the sampler's settings ----


def lockstep(pi):
  """Return the step of a method whose tokens follow pi(logits of the models, sampler)."""
  return partial(reference.lockstep, pi=pi)


def own(models, **sampler):
  """Return the step of the last model alone."""
  return reference.lockstep(models[-1:], lambda l, s: s(l[0]), **sampler)


def of_rule(name):
  return lockstep(lambda l, s: reference.chained(name, l, alpha(name), s))


def without_drafter(step):
  """Return the step of the models before the last one, which drafts for them."""
  return lambda models, **sampler: step(models[:-1], **sampler)


def mean(weights):
  return lockstep(lambda l, s: reference.weighted(l, weights, s))


def cascaded(name, alpha, max_draft):
  return partial(reference.token_cascade, name=name, alpha=alpha, max_draft=max_draft)


def of_bild(fallback, rollback, max_draft):
  return partial(reference.bild, fallback=fallback, rollback=rollback, max_draft=max_draft)


BY_SLOT = (0.3, 0.1, -0.2)
WEIGHTS2, WEIGHTS3 = (0.4, 0.6), (0.5, 0.2, 0.3)
weighted2 = partial(rules.weighted, weights=WEIGHTS2)
weighted3 = partial(rules.weighted, weights=WEIGHTS3)
opt, chow = bound('opt'), bound('chow')


def user_combiner(models):
  """A geometric mean, as a user would write it."""
  return models[0].sampler(sum(model.logits for model in models) / len(models))


@rules.rule(by_slot=True)
def opt_by_slot(q, p, *, alpha):
  """OPT with an α for each token of a draft, as a user would write it."""
  return rules.opt(q, p, alpha=jnp.take(jnp.asarray(alpha), q.slot))


RARELY = 0.1  # a token cascade defers, so that drafts also end by their length


def alone(name):
  """Return the method, models and step of a token cascade."""
  return methods.token_cascade(bound(name, RARELY), max_draft=2), PAIR, cascaded(name, alpha(name, RARELY), 2)


LOOSE = dict(limit=0.6, window=1, block=2)
ROWS_OF_THREE = (2 * V**2) ** 3  # by which three tokens are enumerated

# name: (method, models, the reference step)
METHODS = {
  'autoregressive': (methods.autoregressive(1), PAIR, own),
  'ensemble weighted': (methods.ensemble(weighted2), PAIR, mean(WEIGHTS2)),
  'ensemble contrastive': (
    methods.ensemble(partial(rules.contrastive, mu=0.3)),
    PAIR,
    lockstep(lambda l, s: reference.contrastive(l, 0.3, s)),
  ),
  'ensemble_parallel realign': (
    methods.ensemble_parallel(partial(rules.realign, lam=0.3)),
    PAIR,
    lockstep(lambda l, s: reference.realign(l, 0.3, s)),
  ),
  'oracle diff': (methods.oracle(bound('diff')), PAIR, of_rule('diff')),
  **{f'token_cascade {name}': alone(name) for name, rule in RULES.items() if rule.declaration.drafter_alone},
  'bild': (methods.bild(0.45, 1.0, max_draft=2), PAIR, of_bild(0.45, 1.0, 2)),
  'speculative block verification': (methods.speculative(block=2, accept=acceptance.block), COINS, own),
  'cascade block verification': (methods.speculative(opt, block=1, accept=acceptance.block), COINS, of_rule('opt')),
  'speculative heuristic': (methods.speculative(block=3, policy=stopping.Heuristic(1)), PAIR, own),
  'cascade confidence': (
    methods.speculative(bound('token_v3'), block=2, policy=stopping.Confidence(0.5)),
    PAIR,
    of_rule('token_v3'),
  ),
  'speculative moving average': (
    methods.speculative(block=3, policy=stopping.MovingAverage(0.6, 0.5)),
    PAIR,
    own,
  ),
  'naive_cos': (methods.naive_cos(weighted3, block=2, models=3), TRIO, mean(WEIGHTS3)),
  'ensemble_sd': (methods.ensemble_sd(weighted2, block=2), PAIR, mean(WEIGHTS2)),
  'cos 2': (methods.cos(weighted2, (2, 1)), PAIR, mean(WEIGHTS2)),
  'cos 3': (methods.cos(weighted3, (2, 1, 1)), TRIO, mean(WEIGHTS3)),
  'cos cascade of 3': (methods.cos(opt, (1, 1, 1)), TRIO, of_rule('opt')),
  'cos speculative of 3': (methods.cos(rules.speculative, (2, 1, 1)), TRIO, own),
  'naive_cos cascade of 3': (methods.naive_cos(bound('token_v3'), block=2, models=3), TRIO, of_rule('token_v3')),
  'ensemble cascade of 3': (methods.ensemble(chow, models=3), TRIO, of_rule('chow')),
  'cos user': (methods.cos(user_combiner, (1, 2)), PAIR, lockstep(lambda l, s: s((l[0] + l[1]) / 2))),
  'cascade by slot': (
    methods.speculative(partial(opt_by_slot, alpha=BY_SLOT), block=2),
    PAIR,
    partial(reference.by_slot, name='opt', alphas=BY_SLOT),
  ),
  'FLy': (methods.speculative(block=2, accept=acceptance.FLy(0.6, window=1)), COINS, partial(reference.fly, **LOOSE)),
  'cascade phased': (
    methods.speculative(partial(rules.phased, inside=bound('lossy'), begin=(1, 0), end=(2,)), block=2),
    PAIR,
    partial(reference.phased, name='lossy', alpha=alpha('lossy'), begin=(1, 0), end=(2,)),
  ),
  'sv_exact': (methods.sv_exact(profile(ROWS_OF_THREE), block=2), TRIO, own),
  'one pass': (methods.speculative(block=2), [AT_ONCE, LARGE], own),
  'one pass beside a cascade': (
    methods.speculative(opt, block=2, drafter=2),
    [SMALL, LARGE, AT_ONCE],
    without_drafter(of_rule('opt')),
  ),
  'one pass beside an ensemble': (
    methods.ensemble_sd(weighted2, block=2, drafter=2),
    [SMALL, LARGE, AT_ONCE],
    without_drafter(mean(WEIGHTS2)),
  ),
  'one pass, drafts of different lengths': (
    methods.speculative(block=3, policy=stopping.Confidence(0.45)),
    [AT_ONCE, LARGE],
    own,
  ),
  'drafter beside a cascade': (
    methods.speculative(opt, block=2, drafter=2),
    [SMALL, LARGE, MIDDLE],
    without_drafter(of_rule('opt')),
  ),
  'translated cascade': (methods.speculative(opt, block=2), FOREIGN_PAIR, of_rule('opt')),
  'translated cos': (methods.cos(weighted3, (2, 1, 1)), FOREIGN_TRIO, mean(WEIGHTS3)),
  'translated sv_exact': (methods.sv_exact(profile(ROWS_OF_THREE), block=2), FOREIGN_TRIO, own),
  **{f'speculative {name}': (methods.speculative(bound(name), block=2), PAIR, of_rule(name)) for name in RULES},
}


def of_target(method):
  """Return the step of a method by the target that it declares: a rule by its definition, a combiner by itself."""
  combiner = method.target[1]
  name = rules.name_of(combiner)
  if name in RULES:
    numbers = [float(x) for x in combiner.keywords.values()]
    return lockstep(lambda l, s: reference.chained(name, l, *numbers, s))
  return own if name == 'own' else lockstep(lambda l, s: made_by(combiner, l, s))


def made_by(combiner, logits, sampler):
  """Return what a combiner of the package makes of logits, with the penalties applied before."""
  plain = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, min_p=sampler.min_p)
  return np.float64(rules.target(combiner, np.float32([sampler.penalised(x) for x in logits]), plain).probs)


def without_a_row():
  """Yield methods, policies and acceptors of the package that have no row, as their docstrings have them."""
  tabled = [method for method, _, _ in METHODS.values()]
  verifies = [phase for method in tabled for phase in method.all_phases if isinstance(phase, Verify)]
  known = {type(method.policy) for method in tabled} | {rules.inside(phase.accept) for phase in verifies}
  made = [make() for make in docstrings.of_methods() if make.func.__name__ not in {m.about.name for m in tabled}]
  for policy in stopping.known().values():
    if policy not in known:
      made.append(methods.speculative(block=2, policy=docstrings.of_class(policy, 'stopping')))
  for accept in acceptance.known().values():
    if inspect.isfunction(accept) and accept not in known:
      made.append(methods.speculative(block=2, accept=accept))
  for method in made:
    if isinstance(method, methods.Method) and method.keeps_distribution:
      models = COINS if method.by_round else [LARGE] if method.models == 1 else {2: PAIR, 3: TRIO}[method.models]
      yield str(method), (method, models, of_target(method))


METHODS |= without_a_row()


# ---- longer texts, whose late tokens χ² looks at ----

ROWS, FALSE_ALARM = 131_072, 1e-6  # per test; the seeds are fixed, so a test that passes once passes always
LARGE5 = toy.model(11, 5, scale=1.2)
SMALL5 = toy.model(12, 5, scale=0.8, near=LARGE5)
MIDDLE5 = toy.model(13, 5, scale=0.6, near=LARGE5)
PAIR5, TRIO5 = [SMALL5, LARGE5], [SMALL5, MIDDLE5, LARGE5]


LATE = {
  'speculative': (methods.speculative(block=3), PAIR5, own),
  'cascade': (methods.speculative(opt, block=3), PAIR5, of_rule('opt')),
  'cascade, drafts of different lengths': (
    methods.speculative(opt, block=3, policy=stopping.Confidence(0.4)),
    PAIR5,
    of_rule('opt'),
  ),
  'block verification': (methods.speculative(block=3, accept=acceptance.block), PAIR5, own),
  'cascade with block verification': (
    methods.speculative(opt, block=3, accept=acceptance.block),
    PAIR5,
    of_rule('opt'),
  ),
  'token_cascade': (
    methods.token_cascade(bound('chow', RARELY), max_draft=3),
    PAIR5,
    cascaded('chow', alpha('chow', RARELY), 3),
  ),
  'bild': (methods.bild(0.4, 1.5, max_draft=3), PAIR5, of_bild(0.4, 1.5, 3)),
  'naive_cos': (methods.naive_cos(weighted3, 3, 3), TRIO5, mean(WEIGHTS3)),
  'ensemble_sd': (methods.ensemble_sd(weighted3, 3, 3), TRIO5, mean(WEIGHTS3)),
  'cos': (methods.cos(weighted3, (3, 2, 1)), TRIO5, mean(WEIGHTS3)),
  'sv_exact': (methods.sv_exact(profile(ROWS), block=3), TRIO5, own),
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
