"""Every method as a short list of phases, repeated until each row has ended. docs/methods.md lists them.

A target that reads q needs the drafter's law wherever it is used, also after the block. So a cascade drafts γ + 1
tokens, the verifier scores γ of them, which gives its law at γ + 1 positions, and all γ + 1 are tested: the last
token is tested instead of being drawn as a bonus. The drafter makes the same γ + 1 calls, a round gives as many
tokens, and the law at every position is π whatever the block size.
"""

from collections.abc import Callable, Mapping, Sequence
import numbers

from jax import tree_util
import numpy as np

from speccascade import acceptance, rules, stopping
from speccascade.engine import plans, verification
from speccascade.engine.method import ByBatch, Method, SequenceCascade
from speccascade.engine.phases import Elect, Propose, Score, Verify
from speccascade.models import packing
from speccascade.types import Combiner, Phase, Rule, whole


def _models(models: int, combiner: tree_util.Partial) -> int:
  weights = combiner.keywords.get('weights')
  if weights is not None and len(weights) != models:
    raise ValueError(f'{rules.name_of(combiner)} has {len(weights)} weights for {models} models; give one for each.')
  return whole('models', models, 2)


def _defer(rule: tree_util.Partial) -> tree_util.Partial | None:
  """Return a rule's decision δ, where it makes one."""
  decision = getattr(rule.func, 'defer', None)
  return None if decision is None else tree_util.Partial(decision, **rule.keywords)


def _pair(pair: Sequence[int]) -> tuple[int, int]:
  if not isinstance(pair, Sequence) or len(pair) != 2 or pair[0] == pair[1]:
    raise ValueError(f'pair={pair!r} is not two models; give the numbers of drafter and verifier, as in (0, 1).')
  return whole('pair', pair[0], 0), whole('pair', pair[1], 0)


def _real(name: str, value: float) -> float:
  if isinstance(value, str) or np.ndim(value) or np.iscomplexobj(value):
    raise ValueError(f'{name}={value!r} is not a number.')
  return value


def _blocks(name: str, block: int | Sequence[int]) -> tuple[int, ...]:
  if isinstance(block, (str, numbers.Number)) or not isinstance(block, Sequence):
    raise ValueError(f'{name}={block!r} is not a list of the γ of each model; give one for each, as in (5, 1).')
  return tuple(whole(name, n) for n in block)


def autoregressive(model: int | None = None) -> Method:
  """Decode with one model alone: the only one that is given, or of several the one of this number."""
  number = 0 if model is None else whole('model', model, 0)
  phases = (Score(0, (1,), level=True), Verify(rules.bind(rules.own), (0,)))
  return Method(phases, (number,), 1, kind='autoregressive', extra_models=model is not None)


def ensemble(combiner: Combiner | Rule, models: int = 2) -> Method:
  """Combine n models in lockstep, one call of each per token: the standard ensemble, the baseline of `cos`."""
  return _lockstep(combiner, models, 'ensemble', in_turn=True)


def ensemble_parallel(combiner: Combiner | Rule, models: int = 2) -> Method:
  """Combine n models in lockstep, no call waiting for another, so that the device may run them side by side."""
  return _lockstep(combiner, models, 'ensemble_parallel', in_turn=False)


def oracle(rule: Rule) -> Method:
  """Cascade token by token with a rule that reads both models at every position (diff: the paper's oracle).

  Report it against `stats.deferred`, the number of tokens deferred, never against time.
  """
  return _lockstep(rules.lift(rule), 2, 'oracle', in_turn=True)


def _lockstep(combiner, models, kind, *, in_turn: bool) -> Method:
  bound = rules.bind_combiner(combiner)
  everyone = tuple(range(_models(models, bound)))
  scores = tuple(Score(m, (1,), after=m - 1 if in_turn and m else None, level=True) for m in everyone)
  rule = bound.keywords.get('rule') if len(everyone) == 2 else None
  defer = None if rule is None else _defer(rule)
  return Method((*scores, Verify(bound, everyone, defer=defer)), everyone, 1, kind=kind)


def speculative(
  rule: Rule = rules.speculative,
  block: int = 5,
  *,
  policy: stopping.Policy = stopping.Policy(),
  accept: Callable = acceptance.token_wise,
  pair: Sequence[int] = (0, 1),
) -> Method:
  """Draft with one model, verify with another towards the rule's target; `block` is γ, the tokens scored per round.

  The rule makes the method: `rules.speculative` is plain speculative decoding, a deferral rule a speculative cascade,
  `rules.lossy` lossy decoding. `policy` may end a draft early; `accept=acceptance.block` verifies the block jointly.
  `pair` are the numbers of the two, of as many models as are given.
  """
  bound, gamma, slots = rules.bind_rule(rule), whole('block', block), _pair(pair)
  accept, by_round = acceptance.bind(accept)
  plain, policy = bound.func is rules.speculative, stopping.check(policy)
  widths = (gamma + 1,) if type(policy) is stopping.Policy else packing.thirds(gamma + 1)
  if plain:
    phases = _drafted(gamma, 1, widths, accept)
    window = gamma
  else:
    verify = Verify(rules.lift(rule), (0, 1), accept, _defer(bound))
    phases = Propose(0, gamma + 1), Score(1, widths, verification.First(gamma), level=True), verify
    window = gamma + 1
  kind = 'speculative' if plain else 'cascade'
  return Method(phases, slots, window, policy, by_round, kind, rules.name_of(rule))


def _drafted(gamma: int, verifier: int, widths: tuple[int, ...], accept: Callable) -> tuple[Phase, ...]:
  """Return the phases of speculative decoding."""
  verify = Verify(rules.bind(rules.own), (verifier,), accept)
  return Propose(0, gamma, (2,)), Score(verifier, widths, level=True), verify


def token_cascade(rule: Rule, max_draft: int = 10) -> Method:
  """Emit from model 0 until the rule defers or `max_draft` tokens stand; then model 1 emits one token.

  The rule decides from the drafter alone: `rules.chow` or `rules.chow_log`.
  """
  bound, most = rules.bind_rule(rule), whole('max_draft', max_draft)
  if not getattr(bound.func, 'alone', False):
    raise ValueError(f'token_cascade: rule {rules.name_of(rule)} reads the verifier; use chow, chow_log or oracle().')
  phases = (
    Propose(0, most, (2,)),
    Score(1, packing.thirds(most + 1), level=True),
    Verify(rules.bind(rules.own), (1,), rules.bind(acceptance.everything)),
  )
  policy, name = stopping.Deferral(bound), rules.name_of(rule)
  return Method(phases, (0, 1), most, policy, kind='token_cascade', rule=name)


def sequence_cascade(score: Callable = np.mean, threshold: float = -1.0) -> SequenceCascade:
  """Let model 0 answer, and model 1 where `score` of the answer's token log-probabilities is under the threshold.

  Scores in use: `numpy.sum`, `numpy.mean`, and quantiles (Gupta et al. 2024).
  """
  if not callable(score):
    raise ValueError(f'sequence_cascade: score={score!r} is not a function of an array of log-probabilities.')
  if np.isnan(_real('sequence_cascade: threshold', threshold)):
    raise ValueError(f'sequence_cascade: threshold={threshold!r} is not a number.')
  return SequenceCascade(score, float(threshold))


def bild(fallback: float = 0.5, rollback: float = 2.0, max_draft: int = 10) -> Method:
  """Big Little Decoder (Kim et al. 2023): draft until max q < `fallback`, roll back to the first D(q, p) > `rollback`.

  The verifier's token stands at the roll-back, and after a draft that stays.
  """
  if not 0 <= _real('fallback', fallback) <= 1:
    raise ValueError(f'bild needs 0 <= fallback <= 1, a probability, not fallback={fallback}.')
  if not _real('rollback', rollback) >= 0:
    raise ValueError(f'bild needs rollback >= 0, a cross-entropy, not rollback={rollback}.')
  most = whole('max_draft', max_draft)
  phases = (
    Propose(0, most, (2,)),
    Score(1, packing.thirds(most + 1), level=True),
    Verify(rules.bind(rules.own), (1,), acceptance.Threshold(rollback)),
  )
  return Method(phases, (0, 1), most, stopping.Fallback(fallback), kind='bild')


def naive_cos(combiner: Combiner | Rule, block: int = 5, models: int = 2) -> Method:
  """Speculate towards a combination: model 0 drafts γ tokens, the others score them; no bonus token."""
  bound, gamma = rules.bind_combiner(combiner), whole('block', block)
  everyone = tuple(range(_models(models, bound)))
  scores = tuple(Score(m, (gamma,), verification.First(gamma - 1), level=True) for m in everyone[1:])
  return Method((Propose(0, gamma), *scores, Verify(bound, everyone)), everyone, gamma, kind='naive_cos')


def ensemble_sd(combiner: Combiner | Rule, block: int = 5, models: int = 2) -> Method:
  """Speculate towards an ensemble that is one opaque model: all n models score the block, the drafter anew."""
  bound, gamma = rules.bind_combiner(combiner), whole('block', block)
  slots = tuple(range(1, _models(models, bound) + 1))
  scores = tuple(Score(m, (gamma + 1,), after=m - 1, level=True) for m in slots)
  phases = (Propose(0, gamma, (2,)), *scores, Verify(bound, slots))
  return Method(phases, (0, *range(models)), gamma, kind='ensemble_sd')


def cos(combiner: Combiner | Rule, blocks: tuple[int, ...] = (5, 1)) -> Method:
  """Collaborative decoding via speculation: the models take turns to propose; `blocks` are their γ_1 … γ_n."""
  bound, blocks = rules.bind_combiner(combiner), _blocks('blocks', blocks)
  everyone = tuple(range(_models(len(blocks), bound)))
  window = sum(blocks)
  verify = Verify(bound, everyone, keep=True)
  branches = tuple((Score(m, packing.thirds(window + 1)), verify, Propose(m, blocks[m], ())) for m in everyone)
  return Method((Elect(branches),), everyone, window, kind='cos')


def sv(plan: plans.Profile | plans.Plan | str, block: int = 5) -> Method:
  """Speculative verification as published: models are drafter, companion, verifier; `plan` may be a file's path.

  The companion's agreement predicts which drafted tokens the verifier would accept, and only those worth it are
  verified, chosen while goodput rises. Above temperature 0 the output is biased, because a token is dropped for what it
  is and the next one is then drawn afresh; `sv_exact` is unbiased, for one drafter call more.
  """
  gamma, measured = whole('block', block), plans.profile_of(plan)
  goodput = verification.Goodput(measured.table, measured.latency, companion=1, most=gamma, greedy=True)
  phases = (
    Propose(0, gamma, (2,)),
    Score(1, (gamma + 1,), verification.First(gamma - 1)),
    Score(2, packing.steps(gamma + 1), goodput, drop=True, level=True),
    Verify(rules.bind(rules.own), (2,)),
  )
  return Method(phases, (0, 1, 2), gamma, kind='sv', origin=measured.origin)


def sv_exact(plan: plans.Profile | plans.Plan | str, block: int = 5, *, greedy: bool = False) -> Method:
  """Speculative verification with the verifier's distribution: the first token not scored is tested, not redrawn.

  γ + 1 tokens are drafted and at most γ of them scored, which gives the verifier's distribution at the position after
  the last of those too: the drafted token there is tested where the published method draws another. So every token of
  the output comes from a test, by random numbers of its position; which tokens are scored when changes neither
  distribution nor text. The total is the best of all, with `greedy` the one before goodput first falls, as published.
  """
  gamma, measured = whole('block', block), plans.profile_of(plan)
  goodput = verification.Goodput(
    measured.table, measured.latency, companion=1, most=gamma, drafts=gamma + 1, spare=1, greedy=greedy
  )
  phases = (
    Propose(0, gamma + 1),
    Score(1, (gamma + 1,), verification.First(gamma - 1)),
    Score(2, packing.steps(gamma + 1), goodput, level=True),
    Verify(rules.bind(rules.own), (2,)),
  )
  return Method(phases, (0, 1, 2), gamma + 1, kind='sv_exact', origin=measured.origin)


def planned(plan: plans.Plan | str) -> ByBatch:
  """Decode each batch by the method that a plan found fastest for its size; `plan` may be a file's path.

  All of them have the verifier's distribution: the verifier alone, speculative decoding and, of three models,
  `sv_exact`. The texts that are drawn are others in each.
  """
  found = plans.get(plan)
  last = len(found.origin.names) - 1
  make = {
    'autoregressive': lambda _: autoregressive(last),
    'speculative': lambda gamma: speculative(block=gamma, pair=(0, last)),
    'sv_exact': lambda gamma: sv_exact(found, gamma),
  }
  return by_batch(
    {rows: make[choice.method](choice.block).replace(origin=found.origin) for rows, choice in found.choices.items()}
  )


def by_batch(choices: Mapping[int, Method]) -> ByBatch:
  """Choose the method by the size of the batch: `choices` are {rows: method}, each for batches of at most so many rows.

  The largest number of rows serves larger batches too. All methods decode with the same list of models, so a method of
  fewer says which: `autoregressive(2)`, `speculative(pair=(0, 2))`.
  """
  if not isinstance(choices, Mapping) or not choices:
    raise ValueError(f'by_batch: choices={choices!r} is not {{rows: method}}, as in {{1: speculative(block=5), 8: …}}.')
  for method in choices.values():
    if not isinstance(method, Method):
      raise ValueError(f'by_batch: {method!r} is not made of phases; give methods such as speculative(block=5).')
  rows = sorted(whole('rows', n) for n in choices)
  return ByBatch(tuple(choices[n] for n in rows), tuple(rows))
