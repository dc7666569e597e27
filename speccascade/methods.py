r"""Decoding methods, each a short list of phases that repeat until every sequence has ended.

Models are numbered in the order of the list given to `decode`. The printed form of a method shows its phases. A model
is named there by its slot: slot s runs model `method.slots[s]`, which for most methods is model s. Pending tokens are
those that were drafted and not yet tested.

* `score(s)` feeds the model the pending tokens that it has not read; `first n` limits their number, `goodput` chooses
  it. `truncate(s)` forgets those that the model has then not read. `wait(s)` lets the model's call end before the next.
* `propose(s, n)` drafts up to n tokens from the model's own distribution, and feeds it each but the last.
* `verify(target of slots)` tests the pending tokens in order, as far as their target is known. It commits the accepted
  ones and one more: from the residual after a rejection; after all, from the target where that is known (the bonus
  token). `keep` leaves untested tokens pending. `own` is the target that is a model's own distribution.
* `alternate[… | …]` runs the branch of the model that most sequences of the batch want; the others wait.

With a target :math:`\pi`, a token x drafted from :math:`\tilde q` is accepted with probability :math:`\min(1, \pi(x) /
\tilde q(x))`. At the first rejection a token is drawn from :math:`\mathrm{norm}(\max(0, \pi - \tilde q))`, and the rest
of the draft is dropped. The output then follows π, for every :math:`\tilde q` (Leviathan et al. 2023).
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
from typing import Any

from jax import tree_util
import numpy as np

from speccascade import acceptance, rules, stopping, theory
from speccascade.engine.limits import First
from speccascade.engine.method import About, ALONE, ByBatch, LOCKSTEP, Method, Strategy, Target
from speccascade.engine.phases import Alternate, Propose, Score, Truncate, Verify, Wait
from speccascade.engine.sequence_cascade import SequenceCascade
from speccascade.host import names
from speccascade.sv import plans, predictors, verification
from speccascade.types import checked_int, Combiner, Rule

MOST_LEAVES = 64  # in a round


def _models(models: int, combiner: tree_util.Partial) -> int:
  takes = rules.models_of(combiner)
  if takes is not None and takes != models:
    raise ValueError(f'{rules.name_of(combiner)} combines {takes} models, and there are {models} models.')
  return checked_int('models', models, 2)


def _pair(pair: Sequence[int]) -> tuple[int, int]:
  if not isinstance(pair, Sequence) or len(pair) != 2 or pair[0] == pair[1]:
    raise ValueError(f'pair={pair!r} is not two models; give the numbers of drafter and verifier, as in (0, 1).')
  return checked_int('pair', pair[0], 0), checked_int('pair', pair[1], 0)


def _leaves(leaves: Sequence[int] | int, drafted: int) -> tuple[int, ...]:
  """Return how many choices there are at each place of a draft, as `Propose` takes it; a number is divided."""
  if isinstance(leaves, int) and not isinstance(leaves, bool):
    return theory.divide_leaves(checked_int('leaves', leaves, 0, MOST_LEAVES), drafted)
  if not isinstance(leaves, Sequence) or isinstance(leaves, str):
    raise ValueError(f'leaves={leaves!r} is no number of leaves, nor that of the choices at each place, as in (3, 2).')
  counts = [checked_int('leaves', n, 1) for n in leaves]
  if len(counts) > drafted or sum(counts) - len(counts) > MOST_LEAVES:
    raise ValueError(f'leaves={tuple(counts)}: there are {drafted} drafted tokens, and at most {MOST_LEAVES} leaves.')
  while counts and counts[-1] == 1:
    counts.pop()
  return tuple(counts)


def _real(name: str, value: float) -> float:
  if isinstance(value, str) or np.ndim(value) or np.iscomplexobj(value):
    raise ValueError(f'{name}={value!r} is not a number.')
  return value


def autoregressive(model: int | None = None) -> Method:
  r"""Decode with one model alone.

  .. math:: \pi = \tilde p_m

  Cost of a token: one call of one position.

  Args:
    model: The number of the model. None takes the only model of a list of one.

  Example:
    >>> print(methods.autoregressive(1))
    score(0) · verify(own of (0,))
  """
  number = 0 if model is None else checked_int('model', model, 0)
  phases = Score(0), Verify(rules.bind(rules.own), (0,))
  about = About('autoregressive', over=ALONE, is_baseline=True, choose='methods.autoregressive(1)')
  return Method(phases, (number,), about=about, extra_models=model is not None)


def ensemble(combiner: Combiner | Rule, models: int = 2) -> Method:
  """Combine n models in lockstep: standard collaborative decoding, the baseline of `methods.cos` (Fu et al. 2025).

  Cost of a token: one call of each model, one after the other.

  Args:
    combiner: A combiner, or a rule, which cascades the models.
    models: n.

  Example:
    >>> print(methods.ensemble(functools.partial(rules.weighted, weights=(0.5, 0.5))))
    score(0) · wait(0) · score(1) · verify(weighted of (0, 1))
  """
  return _lockstep(combiner, models, About('ensemble', over=LOCKSTEP, is_baseline=True), in_turn=True)


def ensemble_parallel(combiner: Combiner | Rule, models: int = 2) -> Method:
  """Combine n models in lockstep, with calls that do not wait for each other.

  The output is that of `methods.ensemble`; it takes less time where the device runs the calls side by side.

  Args:
    combiner: A combiner, or a rule, which cascades the models.
    models: n.

  Example:
    >>> print(methods.ensemble_parallel(functools.partial(rules.contrastive, mu=0.1)))
    score(0) · score(1) · verify(contrastive of (0, 1))
  """
  return _lockstep(combiner, models, About('ensemble_parallel'), in_turn=False)


def oracle(rule: Rule) -> Method:
  """Cascade token by token with both models at every position (with `rules.diff` the oracle of Narasimhan et al. 2024).

  Report it against `stats.deferred`, the number of deferred tokens. Its time is no measure: both models run for every
  token.

  Args:
    rule: A rule of two models.

  Example:
    >>> print(methods.oracle(functools.partial(rules.diff, alpha=0.1)))
    score(0) · wait(0) · score(1) · verify(diff of (0, 1))
  """
  return _lockstep(rules.bind_rule(rule), 2, About('oracle'), in_turn=True)


def _lockstep(combiner, models, about: About, *, in_turn: bool) -> Method:
  bound = rules.bind_combiner(combiner)
  everyone = tuple(range(_models(models, bound)))
  scores = _in_turn(everyone) if in_turn else tuple(Score(m) for m in everyone)
  return Method((*scores, Verify(bound, everyone)), everyone, about=about)


def _in_turn(slots: Sequence[int]) -> tuple[Score | Wait, ...]:
  """Return calls of models of which each waits for the one before it."""
  first, *others = slots
  return Score(first), *(phase for m in others for phase in (Wait(m - 1), Score(m)))


def speculative(
  rule: Rule = rules.speculative,
  block: int = 5,
  *,
  policy: stopping.Policy = stopping.Policy(),
  accept: Callable = acceptance.token_wise,
  pair: Sequence[int] | None = None,
  drafter: int | None = None,
  leaves: Sequence[int] | int = (),
) -> Method:
  r"""Draft with one model and verify with another, towards the target of a rule.

  `rules.speculative` makes it plain speculative decoding (Leviathan et al. 2023; Chen et al. 2023), a deferral rule a
  speculative cascade (Narasimhan et al. 2024), `rules.lossy` lossy speculative decoding (Tran-Thien 2023).

  Cost of a round, plain: γ calls of the drafter and one of the verifier with γ + 1 positions. With acceptance rate a at
  every position it commits :math:`(1 - a^{\gamma+1}) / (1 - a)` tokens.

  A rule that reads q needs the drafter's distribution after the block too, at one more call of the drafter. The method
  uses that call to draft the (γ + 1)-th token. The verifier scores γ, which gives its distribution at γ + 1 positions,
  and the last token is tested instead of a bonus token being drawn. A round commits as many tokens as a plain one. As
  every token is drafted and tested, the text of a seed is the same for every γ, which that of a plain one is not.

  Args:
    rule: The rule, with its numbers bound.
    block: γ, the number of drafted tokens that the verifier scores in a round.
    policy: When a draft ends before γ tokens.
    accept: How the block is tested; `acceptance.block` tests it jointly.
    pair: The numbers of drafter and verifier among the given models. None takes a list of these two.
    drafter: The number of a third model that drafts for the pair, which both score: prompt lookup, a model that drafts
      in one pass, or one that is nearer to the target than the small model of the pair.
    leaves: How many choices of the drafter there are at each place of the draft, the drafted token among them, or the
      number of others, which is divided. The verifier scores the others beside the draft; if the token after a
      rejection is one of them, the round commits one token more. The distribution of the output is the same.

  Example:
    >>> print(methods.speculative(block=5))
    propose(0, 5) · score(1) · verify(own of (1,))
    >>> print(methods.speculative(block=5, leaves=(3, 3, 2)))
    propose(0, 5, of 3·3·2) · score(1) · verify(own of (1,))
    >>> print(methods.speculative(functools.partial(rules.opt, alpha=0.1), block=5))
    propose(0, 6) · score(1, first 5) · verify(opt of (0, 1))
    >>> print(methods.speculative(block=5, accept=acceptance.block))
    propose(0, 5) · score(1) · verify(own of (1,), block)
    >>> print(methods.speculative(block=5, policy=stopping.Heuristic()))
    propose(0, 5) · score(1) · verify(own of (1,)) (drafts end by Heuristic)
    >>> print(methods.speculative(functools.partial(rules.opt, alpha=0.1), block=5, drafter=2))
    propose(0, 5) · score(1) · wait(1) · score(2) · verify(opt of (1, 2))
  """
  bound = rules.bind_rule(rule)
  gamma = checked_int('block', block)
  slots = (0, 1) if pair is None else _pair(pair)
  accept = acceptance.bind(accept)
  policy = stopping.check(policy)
  if drafter is not None:
    if bound.func is rules.speculative:
      raise ValueError(f'drafter={drafter}: the target is the verifier alone; give pair=({drafter}, {slots[1]}).')
    if checked_int('drafter', drafter, 0) in slots:
      raise ValueError(f'drafter={drafter} is a model of the pair {slots}; leave it out, or give a third model.')
    draft = Propose(0, gamma, leaves=_leaves(leaves, gamma))
    phases = draft, *_in_turn((1, 2)), Verify(bound, (1, 2), accept)
    about = About('speculative', rules.name_of(rule), block=gamma, over=ALONE)
    return Method(phases, (drafter, *slots), policy, about, extra_models=pair is not None)
  if bound.func is rules.speculative:
    draft = Propose(0, gamma, leaves=_leaves(leaves, gamma))
    phases = draft, Score(1), Verify(rules.bind(rules.own), (1,), accept)
    facts = dict(speedup=theory.speedup_speculative, choose='methods.speculative(pair=(0, 2))')
  else:
    draft = Propose(0, gamma + 1, leaves=_leaves(leaves, gamma + 1))
    phases = draft, Score(1, First(gamma)), Verify(bound, (0, 1), accept)
    facts = dict(speedup=theory.speedup_cascade, choose='methods.speculative(rule, pair=(0, 2))')
  about = About('speculative', rules.name_of(rule), block=gamma, over=ALONE, **facts)
  return Method(phases, slots, policy, about, extra_models=pair is not None)


def token_cascade(rule: Rule, max_draft: int = 10) -> Method:
  r"""Emit from model 0 until the rule defers, then one token from model 1 (Narasimhan et al. 2024).

  Model 1 also emits one after `max_draft` tokens of model 0. Every drafted token is accepted. So the output follows
  :math:`\tilde q` where the rule follows the drafter, and :math:`\tilde p` where it defers or the draft is full. It is
  that of the lockstep cascade only if `max_draft` is at least its length.

  Cost: one call of the drafter for each token that it drafts or defers, one of the verifier for each token that the
  verifier emits.

  Args:
    rule: A rule that reads the drafter alone: `rules.chow` or `rules.chow_log`.
    max_draft: The most tokens between two of the verifier's.

  Example:
    >>> print(methods.token_cascade(functools.partial(rules.chow, alpha=0.3), max_draft=10))
    propose(0, 10) · score(1) · verify(own of (1,), everything) (drafts end by Deferral)
  """
  bound = rules.bind_rule(rule)
  most = checked_int('max_draft', max_draft)
  if not rules.declaration(bound).drafter_alone:
    raise ValueError(f'token_cascade: rule {rules.name_of(rule)} reads the verifier; use chow, chow_log or oracle().')
  phases = (
    Propose(0, most),
    Score(1),
    Verify(rules.bind(rules.own), (1,), rules.bind(acceptance.everything), final_defers=True),
  )
  about = About(
    'token_cascade',
    rules.name_of(rule),
    block=most,
    over=ALONE,
    speedup=theory.speedup_token_cascade,
    accepts_all=True,
    target=_of_deferral,
  )
  return Method(phases, (0, 1), stopping.Deferral(bound), about)


def _of_deferral(method: Method) -> Target:
  return method.slots, method.policy.rule


def sequence_cascade(score: Callable | str | float = np.mean, threshold: float = -1.0) -> SequenceCascade:
  """Let model 0 write the answer, and model 1 rewrite it where the answer's score is low (Gupta et al. 2024).

  Cost: all of model 0, and all of model 1 for the answers that are rewritten, in batches of the same size however few.

  Args:
    score: A function of the answer's token log-probabilities [n]. `numpy.sum` is the probability of the answer
      (Narasimhan et al. 2024, Equation 1); `numpy.mean` and quantiles do not defer an answer for its length. 'mean' and
      'sum' name these two, a number of 0 … 1 a quantile.
    threshold: Answers with a score under it are rewritten; a lower one defers less.

  Example:
    >>> print(methods.sequence_cascade(np.sum, threshold=-20.0).threshold)
    -20.0
  """
  if isinstance(score, float | int) and 0 <= score <= 1:
    score = functools.partial(np.quantile, q=float(score))
  score = {'mean': np.mean, 'sum': np.sum}.get(score, score) if isinstance(score, str) else score
  if not callable(score):
    raise ValueError(f'sequence_cascade: score={score!r} is no function of log-probabilities, mean, sum or quantile.')
  if np.isnan(_real('sequence_cascade: threshold', threshold)):
    raise ValueError(f'sequence_cascade: threshold={threshold!r} is not a number.')
  return SequenceCascade(score, float(threshold), (autoregressive(0), autoregressive(1)))


def bild(fallback: float = 0.5, rollback: float = 2.0, max_draft: int = 10) -> Method:
  r"""Draft until the drafter is unsure; roll back to the first token that the verifier doubts (Kim et al. 2023).

  A draft ends before a token with :math:`\max q <` `fallback`. The first drafted token with :math:`D(q, p) >`
  `rollback` (`rules.discrepancy`) is replaced by the verifier's; a draft without one is followed by the verifier's
  token. Nothing is resampled from a residual, so above temperature 0 no simple distribution describes the output;
  `rules.bild_star` is the speculative cascade with the same D.

  Args:
    fallback: A probability; a higher one drafts less.
    rollback: A cross-entropy; a higher one accepts more.
    max_draft: The most tokens in a draft.

  Example:
    >>> print(methods.bild(fallback=0.5, rollback=2.0, max_draft=10))
    propose(0, 10) · score(1) · verify(own of (1,), Threshold) (drafts end by Fallback)
  """
  if not 0 <= _real('fallback', fallback) <= 1:
    raise ValueError(f'bild needs 0 <= fallback <= 1, a probability, not fallback={fallback}.')
  if not _real('rollback', rollback) >= 0:
    raise ValueError(f'bild needs rollback >= 0, a cross-entropy, not rollback={rollback}.')
  most = checked_int('max_draft', max_draft)
  phases = Propose(0, most), Score(1), Verify(rules.bind(rules.own), (1,), acceptance.Threshold(rollback))
  return Method(phases, (0, 1), stopping.Fallback(fallback), About('bild', block=most, over=ALONE, target=None))


def naive_cos(combiner: Combiner | Rule, block: int = 5, models: int = 2) -> Method:
  r"""Speculate towards a combination: model 0 drafts γ tokens, the others score them (Fu et al. 2025).

  There is no bonus token: the combination at γ + 1 would need one more call of the drafter. The cost of a round is γ
  calls of the drafter and one of each other model with γ positions. It commits :math:`(1 - a^\gamma) / (1 - a)` tokens,
  with acceptance rate :math:`a = 1 - \mathrm{TV}(\tilde q, \pi)`.

  Args:
    combiner: A combiner, or a rule, which cascades the models.
    block: γ.
    models: The number of models.

  Example:
    >>> print(methods.naive_cos(functools.partial(rules.contrastive, mu=0.1), block=5))
    propose(0, 5) · score(1, first 4) · verify(contrastive of (0, 1))
  """
  bound = rules.bind_combiner(combiner)
  gamma = checked_int('block', block)
  everyone = tuple(range(_models(models, bound)))
  scores = tuple(Score(m, First(gamma - 1)) for m in everyone[1:])
  about = About('naive_cos', block=gamma, over=LOCKSTEP, speedup=theory.speedup_naive_cos)
  return Method((Propose(0, gamma), *scores, Verify(bound, everyone)), everyone, about=about)


def ensemble_sd(
  combiner: Combiner | Rule, block: int = 5, models: int = 2, *, drafter: int = 0, leaves: Sequence[int] | int = ()
) -> Method:
  """Speculate towards an ensemble as one opaque model: all n models score the block (Fu et al. 2025).

  This is the paper's baseline of speculative decoding for an ensemble. The drafter scores its own block again with a
  second KV cache: slots 0 and 1 both run model 0. Cost of a round: γ calls of the drafter and one of each model with
  γ + 1 positions.

  Args:
    combiner: A combiner, or a rule, which cascades the models.
    block: γ.
    models: The number of models.
    drafter: The number of the model that drafts; one after those that are combined drafts beside them, as prompt lookup
      and a model that drafts in one pass do.
    leaves: As of `speculative`.

  Example:
    >>> print(methods.ensemble_sd(functools.partial(rules.weighted, weights=(0.5, 0.5)), block=5))
    propose(0, 5) · score(1) · wait(1) · score(2) · verify(weighted of (1, 2))
  """
  bound = rules.bind_combiner(combiner)
  gamma = checked_int('block', block)
  slots = tuple(range(1, _models(models, bound) + 1))
  phases = Propose(0, gamma, leaves=_leaves(leaves, gamma)), *_in_turn(slots), Verify(bound, slots)
  if checked_int('drafter', drafter, 0) > models:
    raise ValueError(f'drafter={drafter}: the models are 0 … {models - 1}, and one beside them is model {models}.')
  speedup = theory.speedup_ensemble_sd if drafter == 0 else None
  about = About('ensemble_sd', block=gamma, over=LOCKSTEP, speedup=speedup)
  return Method(phases, (drafter, *range(models)), about=about)


def cos(combiner: Combiner | Rule, blocks: tuple[int, ...] = (5, 1)) -> Method:
  r"""Collaborative decoding via speculation: the models take turns to propose (Fu et al. 2025).

  A model that scores a draft also gets its distribution at the position after it. A token drawn from that is the
  model's own proposal, and opens its draft of :math:`\gamma_i` tokens. A pending token is tested against the
  combination, with the distribution that it was drawn from, as soon as all models have scored it. After a rejection
  everything pending is dropped, and model 0 proposes.

  Args:
    combiner: A combiner, or a rule, which cascades the models.
    blocks: γ_1 … γ_n, one for each model.

  Example:
    >>> print(methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), blocks=(5, 1)))
    alternate[score(0) · verify(weighted of (0, 1), keep) · propose(0, 5) |
      score(1) · verify(weighted of (0, 1), keep) · propose(1, 1)]
  """
  bound = rules.bind_combiner(combiner)
  if isinstance(blocks, str) or not isinstance(blocks, Sequence):
    raise ValueError(f'blocks={blocks!r} is not a list of the γ of each model; give one for each, as in (5, 1).')
  blocks = tuple(checked_int('blocks', n) for n in blocks)
  everyone = tuple(range(_models(len(blocks), bound)))
  verify = Verify(bound, everyone, keep=True)
  branches = tuple((Score(m), verify, Propose(m, blocks[m])) for m in everyone)
  about = About('cos', block=blocks, over=LOCKSTEP, speedup=_speedup_of_turns)
  return Method((Alternate(branches),), everyone, about=about)


def _speedup_of_turns(rate: theory.Rate, blocks: tuple[int, int], *times) -> np.ndarray:
  """Return the speed-up of `cos` for two models whose tokens are accepted alike."""
  return theory.speedup_cos_steady(rate, rate, *blocks, *times)


def sv(plan: plans.Profile | plans.Plan | str, block: int = 5, *, goodput: str = 'tokens') -> Method:
  """Speculative verification as published ("Speculative Verification", 2025): biased above temperature 0.

  Models are drafter, companion and verifier. The companion's agreement predicts which drafted tokens the verifier would
  accept, and only those are verified that raise goodput. A token is dropped for what it is, and the next is drawn
  afresh: that is the bias, which `methods.sv_exact` does not have. At temperature 0 the output is the verifier's.

  Cost of a round: γ calls of the drafter, one of the companion, one of the verifier with 1 to γ + 1 positions.

  Args:
    plan: A plan of three models, the path of its file, or a measured profile.
    block: γ.
    goodput: What is counted over the verifier's time: all emitted `'tokens'`, of which each sequence gets one whatever
      is verified, or the drafted ones that are `'accepted'`. The paper can be read as either.

  Example:
    >>> print(methods.sv(profile, block=5))
    propose(0, 5) · score(1, first 4) · score(2, greedy goodput by companion) · truncate(2) · verify(own of (2,))
  """
  budget = verification.Goodput(greedy=True, counts=goodput)
  return _scheduled('sv', predictors.companion, block, budget, plans.profile_of(plan), 'bonus')


def sv_exact(
  plan: plans.Profile | plans.Plan | str, block: int = 5, *, greedy: bool = False, goodput: str = 'tokens'
) -> Method:
  """Speculative verification that follows the verifier's distribution exactly.

  γ + 1 tokens are drafted and at most γ scored. Scoring k tokens gives the verifier's distribution at k + 1 positions,
  and the last of them tests the drafted token there instead of drawing another. So every token of the output comes from
  a test, by the random numbers of its position, and neither distribution nor text depends on which tokens are scored
  when.

  Cost of a round: γ + 1 calls of the drafter, one of the companion, one of the verifier with 1 to γ + 1 positions.

  Args:
    plan: A plan of three models, the path of its file, or a measured profile.
    block: γ.
    greedy: Whether to stop before goodput first falls, as published. Otherwise the best total of all is verified.
    goodput: What is counted over the time: all emitted `'tokens'`, or the drafted ones that are `'accepted'`. With
      `'tokens'` goodput is the speed of a round.

  Example:
    >>> print(methods.sv_exact(profile, block=5))
    propose(0, 6) · score(1, first 4) · score(2, goodput by companion) · verify(own of (2,))
  """
  budget = verification.Goodput(greedy=greedy, counts=goodput)
  return _scheduled('sv_exact', predictors.companion, block, budget, plans.profile_of(plan), 'test')


def scheduled(
  predictor: Callable,
  block: int = 5,
  *,
  budget: verification.Budget | None = None,
  plan: plans.Profile | plans.Plan | str | None = None,
  fit: predictors.Fit | None = None,
  ending: str = 'test',
  pair: Sequence[int] | None = None,
  leaves: Sequence[int] | int = (),
) -> Method:
  """Speculative decoding in which a predictor of acceptance tells how much of each draft is verified.

  `methods.sv` and `methods.sv_exact` are this with a companion for the predictor, the third model of three. All other
  predictors read what drafting computes anyway. docs/methods/scheduled.md says which predictors, budgets and endings
  keep the verifier's distribution; with `ending='test'` all do, and those that would not beside a drafter in one pass
  or a head are refused.

  Cost of a round: γ + 1 calls of the drafter, of fewer where the budget ends drafts, and one of the verifier with 1 to
  γ + 1 positions; `predictors.companion` adds a call of the companion.

  Args:
    predictor: A signal of `sv.predictors`, or a function of a `stopping.Draft` to the chance of acceptance.
    block: γ, the most tokens of a sequence that are verified in a round.
    budget: How the chances become numbers of tokens. None is `Goodput()` with a plan, else `Causal()`.
    plan: A plan, the path of its file, or a profile: the times for `Goodput`, and the fit of the signal.
    fit: How the signal becomes a chance. None takes that of the plan, else the signal's own.
    ending: What follows the verified tokens of a sequence: a `'test'` of the next drafted token, which the method
      drafts one token more for, or a `'bonus'` token.
    pair: The numbers of drafter and verifier among the given models. None takes a list of these two, or of three.
    leaves: As of `speculative`.

  Example:
    >>> print(methods.scheduled(predictors.margin, block=5))
    propose(0, 6) · score(1, causal by margin) · verify(own of (1,)) (drafts end by Scheduling)
    >>> print(methods.scheduled(predictors.max_q, block=5, budget=verification.TopK(2), ending='bonus'))
    propose(0, 5) · score(1, top 2 by max_q) · truncate(1) · verify(own of (1,))
  """
  profile = None if plan is None else plans.profile_of(plan)
  budget = (verification.Causal() if profile is None else verification.Goodput()) if budget is None else budget
  return _scheduled('scheduled', predictor, block, budget, profile, ending, fit, pair, leaves)


def _scheduled(
  name: str, signal: Callable, block: int, budget, profile, ending: str, fit=None, pair=None, leaves=()
) -> Method:
  gamma = checked_int('block', block)
  if ending not in ('test', 'bonus'):
    raise ValueError(f"ending={ending!r} is neither 'test' nor 'bonus'; give what follows the verified tokens.")
  spare = int(ending == 'test')
  if fit is None and profile is not None:
    fit = profile.fit_of(signal, required=name != 'scheduled')
  predictor = predictors.Predictor.of(signal, fit)
  reads = predictor.declaration.companion
  if reads and pair is not None:
    raise ValueError(f'pair={pair!r}: {predictor.name} is of three models; leave pair out, or take margin.')
  slots = (0, 1, 2) if reads else (0, 1) if pair is None else _pair(pair)
  latency = None if profile is None else profile.latency
  budget = verification.check(budget).measured(latency, gamma + spare, reads)
  limit = verification.Scheduled(predictor, budget, most=gamma, spare=spare)
  last = len(slots) - 1
  phases = (
    Propose(0, gamma + spare, leaves=_leaves(leaves, gamma + spare)),
    *((Score(1, First(gamma - 1)),) if reads else ()),
    Score(last, limit),
    *(() if spare else (Truncate(last),)),
    Verify(rules.bind(rules.own), (last,)),
  )
  rule = predictor.name if name == 'scheduled' else None
  choose = None if reads else 'methods.scheduled(predictor, pair=(0, 2))'
  about = About(name, rule, block=gamma, over=ALONE, choose=choose)
  origin = None if profile is None else profile.origin
  return Method(phases, slots, limit.policy or stopping.Policy(), about, extra_models=pair is not None, origin=origin)


def planned(plan: plans.Plan | str) -> Method | ByBatch:
  """Decode each batch by the method that a plan found fastest for its size.

  All of them have the verifier's distribution: the verifier alone, speculative decoding, and where they were planned
  `methods.sv_exact` and `methods.scheduled`. Above temperature 0 their samples differ.

  Args:
    plan: A plan, or the path of its file, which `python -m speccascade.plan … --out` writes.

  Returns:
    The choice of the plan, by the size of the batch.

  Raises:
    ValueError: If the file is no plan.
    FileNotFoundError: If there is no such file.

  Example:
    >>> print(methods.planned(plan))
    by batch[1: propose(0, 3) · score(1) · verify(own of (1,)) | 8: score(0) · verify(own of (0,))]
  """
  plan = plans.get(plan)
  last = len(plan.origin.names) - 1
  make = {
    'autoregressive': lambda: autoregressive(last),
    'speculative': lambda gamma, leaves=0: speculative(block=gamma, pair=(0, last), leaves=leaves),
    'sv_exact': lambda gamma: sv_exact(plan, gamma),
    'scheduled': lambda gamma, predictor: scheduled(predictors.find(predictor), gamma, plan=plan, pair=(0, last)),
  }
  chosen = {rows: make[method](*filter(None, of)) for rows, (method, *of) in plan.choices.items()}
  return by_batch({rows: method.replace(origin=plan.origin) for rows, method in chosen.items()})


def by_batch(choices: Mapping[int, Method]) -> Method | ByBatch:
  """Choose the method by the size of the batch.

  All methods decode with the same list of models, so a method of fewer models names them: `autoregressive(2)`,
  `speculative(pair=(0, 2))`. The choice is made on the host, before anything is compiled for the batch.

  Args:
    choices: {rows: method}; each method is for batches of at most so many rows, the last one for larger batches too.

  Returns:
    A method whose phases are those of the choice for the batch; of a single choice, that method.

  Raises:
    ValueError: If a number of rows is not positive, or a choice has no phases.

  Example:
    >>> print(methods.by_batch({1: methods.speculative(block=3), 8: methods.autoregressive(1)}))
    by batch[1: propose(0, 3) · score(1) · verify(own of (1,)) | 8: score(0) · verify(own of (0,))]
  """
  if not isinstance(choices, Mapping) or not choices:
    raise ValueError(f'by_batch: choices={choices!r} is not {{rows: method}}, as in {{1: speculative(block=5), 8: …}}.')
  for method in choices.values():
    if not isinstance(method, Method):
      raise ValueError(f'by_batch: {method!r} is not made of phases; give methods such as speculative(block=5).')
  rows = sorted(checked_int('rows', n) for n in choices)
  if len(rows) == 1:
    return choices[rows[0]]
  return ByBatch(tuple(choices[n] for n in rows), tuple(rows))


# ---- by name ----


def _known() -> dict[str, Callable[..., Strategy]]:
  """Return the functions of this module that make a method, by name."""
  made = {name: x for name, x in globals().items() if inspect.isfunction(x) and x.__module__ == __name__}
  return {name: x for name, x in made.items() if not name.startswith('_')}


def _made(named: names.Named) -> functools.partial:
  """Return a function with its arguments; a call of what is returned makes the method."""
  if named.short or not inspect.isfunction(named.value):
    raise ValueError(f'{named.text!r} names no function that makes a method; name one, as in speculative(block=3)')
  takes = inspect.signature(named.value).parameters
  if unknown := [name for name in named.arguments if name not in takes]:
    raise ValueError(f'{named.name} takes no {unknown[0]}; it takes {", ".join(takes) or "no argument"}')
  return functools.partial(named.value, **named.arguments)


def _parts() -> dict[str, Any]:
  """Return what is named inside the arguments of a method."""
  return rules.known() | stopping.known() | acceptance.known() | verification.known()


_METHODS = names.Catalogue('method', _known, _parts, _made)
known, find, spelled = _METHODS.known, _METHODS.find, _METHODS.spelled
