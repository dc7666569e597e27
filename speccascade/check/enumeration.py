"""The exact distribution of what the compiled loop emits on toy models, by enumeration; the check of a user's rule.

`check(rule)` tells whether JAX traces a rule or combiner, whether it gives distributions, reads each position by itself
and rejects less as α grows, and whether the loop emits its distribution; `check(method)` does the same for a method.
`check(model)` tells whether a model gives the same logits however a text is cut. The command is
`python -m speccascade.check`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import methods, rules, sampling
from speccascade.check import windows
from speccascade.check.report import Finding, Report
from speccascade.check.sampler.cases import number
from speccascade.engine import law, validate
from speccascade.engine.loop import decode_batch
from speccascade.engine.method import Method, Strategy
from speccascade.host.progress import Progress
from speccascade.models import toy
from speccascade.types import (
  ACCEPT,
  Array,
  check_bits,
  DRAFT,
  FINAL,
  Model,
  NO_SOURCE,
  Prompt,
  RESIDUAL,
  STALLED,
  static,
)

Distribution = dict[tuple[int, ...], float]  # {emitted tokens: probability}
PROMPT = [1, 0]
COUNT = 3  # tokens whose joint distribution is enumerated
CLOSE = 1e-5  # a distance of distributions that float32 explains
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SAMPLERS = {
  'T = 0': sampling.Sampler(0.0),
  'T = 0.7, top-k 5, top-p 0.9': sampling.Sampler(0.7, top_k=5, top_p=0.9),
  'T = 1': sampling.Sampler(),
}
_EMITTED = ('T = 0', 'T = 1')  # the samplers at which the loop's distribution is enumerated


# ---- the distribution of what is emitted ----


@struct.dataclass
class Enumerated(sampling.Noise):
  """Noise that takes every decision from a row's digits and notes the probability that the decision had.

  A decision has the key (position, purpose), as in `sampling.Keyed`, and the last one made under a key counts: an
  earlier one belonged to a drafted token that no test reached. With `by_round` the round's start is part of the key.
  """

  digits: Array  # [B, R, P, 3]
  chances: Array  # [B, R, P, 3]
  base: int = static()
  by_round: bool = static(default=False)

  def _cell(self, position, start):
    rows = jnp.arange(position.shape[0])
    return rows, (start - self.base if self.by_round else jnp.zeros_like(start)), position - self.base

  def _note(self, cell, purpose, chance):
    return self.replace(chances=self.chances.at[(*cell, purpose)].set(chance, mode='drop'))

  def draw(self, weights: Array, position: Array, purpose: int, start: Array) -> tuple[Array, 'Enumerated']:
    """Return the tokens that the digits name."""
    cell = self._cell(position, start)
    token = self.digits[(*cell, purpose)]
    total = weights.sum(-1)  # of no distribution where nothing is drawn, so that any chance will do that sums to 1
    chance = jnp.where(total > 0, sampling.at_token(weights, token) / total, 1 / weights.shape[-1])
    return token, self._note(cell, purpose, chance)

  def accept(self, numerator: Array, denominator: Array, position: Array, start: Array) -> tuple[Array, 'Enumerated']:
    """Return the outcomes that the digits name."""
    noise = self
    outcomes = []
    for j in range(position.shape[1]):
      cell = self._cell(position[:, j], start)
      a = numerator[:, j]
      b = denominator[:, j]
      sure = jnp.where(b > 0, jnp.minimum(1, a / jnp.where(b > 0, b, 1)), (a > 0).astype(jnp.float32))
      sure = jnp.where(jnp.isnan(sure), 0, sure)  # a position without a distribution, which no test reaches
      yes = self.digits[(*cell, ACCEPT)] == 0
      noise = noise._note(cell, ACCEPT, jnp.where(yes, sure, 1 - sure))
      outcomes.append(yes)
    return jnp.stack(outcomes, 1), noise


def emitted_distribution(
  method: Method,
  models: Sequence[Model],
  prompt: Sequence[int],
  count: int,
  sampler: sampling.Sampler,
  decode: Callable = decode_batch,
) -> Distribution:
  """Return the distribution of the first `count` tokens that the compiled loop emits; a text that ends has fewer.

  `decode` decodes a batch with noise of one's own, as `engine.loop.decode_batch` does.
  """
  vocab = models[-1].network.vocab_size
  by_round = method.for_networks([m.network for m in models]).by_round
  rounds = count if by_round else 1
  radix = np.array([vocab, 2, vocab])
  # With rounds, a round that starts at token r decides about positions from r on.
  cells = [(r, p) for r in range(rounds) for p in range(r, count)]
  total = int(np.prod(radix)) ** len(cells)
  digits = np.zeros((total, rounds, count, 3), np.int32)
  rest = np.arange(total)
  for r, p in cells:
    for purpose in range(3):
      rest, digits[:, r, p, purpose] = np.divmod(rest, radix[purpose])
  chances = jnp.asarray(np.tile((1 / radix).astype(np.float32), (total, rounds, count, 1)))
  noise = Enumerated(jnp.asarray(digits), chances, base=len(prompt), by_round=by_round)
  batch = Prompt(jnp.tile(jnp.array([prompt], jnp.int32), (total, 1)), jnp.full(total, len(prompt), jnp.int32))
  state = jax.device_get(decode(method, models, batch, max_new_tokens=count, sampler=sampler, noise=noise))
  if (stalled := state.fault.code == STALLED).any():
    raise ValueError(validate.no_token(method.at(total), int(state.length[stalled][0])))
  weight = _weights(state, len(prompt), count, radix, by_round, rounds)
  emitted = state.tokens[:, len(prompt) : len(prompt) + count]
  emitted = np.where(np.arange(count) < (state.length - len(prompt))[:, None], emitted, -1)
  outcomes, which = np.unique(emitted, axis=0, return_inverse=True)
  mass = np.bincount(which.ravel(), weight)
  return {tuple(int(t) for t in o if t >= 0): m for o, m in zip(outcomes, mass, strict=True) if m > 0}


def _weights(state, base, count, radix, by_round, rounds) -> np.ndarray:
  """Return each row's probability: the chances of the decisions that its tokens came from, the others being free."""
  chance = state.noise.chances.astype(np.float64)
  if by_round:  # every decision ever made counts; those of cells that do not exist have chance 1
    exists = np.arange(count)[None, :] >= np.arange(rounds)[:, None]
    return np.where(exists[None, :, :, None], chance, 1).prod((1, 2, 3))
  source = state.stats.source[:, base : base + count]
  free = 1 / radix.astype(np.float64)
  drafted = (source >= 0) | (source == RESIDUAL)
  weight = np.where(drafted, chance[:, 0, :, DRAFT] * chance[:, 0, :, ACCEPT], free[DRAFT] * free[ACCEPT])
  final = (source < 0) & (source != NO_SOURCE)
  return (weight * np.where(final, chance[:, 0, :, FINAL], free[FINAL])).prod(1)


def distance(distribution: Distribution, reference: Distribution) -> tuple[float, float]:
  """Return the total variation distance of two distributions, and how far the first is from summing to 1."""
  keys = distribution.keys() | reference.keys()
  return 0.5 * sum(abs(distribution.get(k, 0) - reference.get(k, 0)) for k in keys), abs(sum(distribution.values()) - 1)


def lockstep_distribution(
  combiner: Callable, models: Sequence[Model], prompt: Sequence[int], count: int, sampler: sampling.Sampler
) -> Distribution:
  """Return the distribution of tokens that are each drawn from a combiner's distribution after those before it.

  A text ends at a token of the last model's `eos_ids`.
  """
  ended: Distribution = {}
  distributions: Distribution = {(): 1.0}
  for _ in range(count):
    prefixes = list(distributions)
    tokens = jnp.asarray([[*prompt, *p] for p in prefixes], jnp.int32)
    logits = jnp.stack([_next_logits(m, tokens) for m in models])
    pi = np.asarray(_target(combiner, logits, sampler, tokens), np.float64)
    rows = zip(prefixes, pi, strict=True)
    distributions = {(*p, v): distributions[p] * m for p, row in rows for v, m in enumerate(row) if m}
    ends = [p for p in distributions if p[-1] in models[-1].network.eos_ids]
    ended |= {p: distributions.pop(p) for p in ends}
    if not distributions:
      break
  return ended | distributions


def _next_logits(model: Model, tokens: Array) -> Array:
  """Return the logits [N, V] after token lists [N, L], read from the start."""
  length = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
  cache = model.network.prefill(model.params, Prompt(tokens, length), tokens.shape[1] + 1)
  return model.network.extend(model.params, cache, tokens[:, -1:], length[:, None] - 1)[0][:, 0]


# ---- what a rule, a combiner or a method is ----


def check(rule: Any, alphas: Sequence[float] | None = None, *, progress: bool = False) -> Report:
  """Check that a rule, a combiner or a method gives distributions, and that the loop emits exactly them.

  Of a model, check that its logits are the same in windows and token by token, after a roll-back too.

  Args:
    rule: A rule, a combiner, a method or a model.
    alphas: The values that are tried of a rule whose α is not bound; None for some of its range.
    progress: Whether to show a bar on standard error.

  Returns:
    A report; `report.ok` is whether nothing is wrong, and `print(report)` shows every finding.
  """
  check_bits()
  if isinstance(rule, Model):
    if alphas is not None:
      raise ValueError(f'alphas={list(alphas)} are tried of a rule, and {rule.name} is a model')
    return Report(rule.name, tuple(windows.findings(rule)))
  if alphas is not None and (isinstance(rule, Strategy) or not rules.declaration(rule).is_rule):
    name = rule.name if isinstance(rule, Strategy) else rules.name_of(rule)
    raise ValueError(
      f'alphas={list(alphas)} are tried of a rule, and {name} is none: bind its numbers, or check its rule'
    )
  bar = Progress('check', len(SAMPLERS) + len(_EMITTED), unit='questions', shown=progress)
  if isinstance(rule, Strategy):
    found = _check_choices(rule, bar)
  elif rules.declaration(rule).is_rule:
    found = _check_rule(rule, alphas, bar)
  else:
    found = _check_combiner(rule, bar)
  bar.end()
  return found


def _check_choices(method: Strategy, bar: Progress) -> Report:
  """Check what a method decodes each batch by."""
  findings = []
  for batch, choice in method.of_batches.items():
    findings += [f._replace(question=batch + f.question) for f in _check_method(choice, bar)]
  return Report(method.name, tuple(findings))


def _check_method(method: Strategy, bar: Progress) -> list[Finding]:
  models, combiner = method.target
  if combiner is None:
    message = 'its tokens follow no distribution of one position: a verifier may rewrite what was written'
    return [Finding('emits one distribution', None, message)]
  findings = _of_distributions([('', combiner)], len(models), bar)
  return [*findings, _judged(method), *(_emitted(method, bar) if all(f.ok for f in findings) else ())]


def _judged(method: Strategy) -> Finding:
  """Return what follows from what the parts of a method say of themselves."""
  verdict = law.law(method)
  message = verdict.why or 'no decision was told what would change the distribution'
  return Finding('follows its target, as its parts say', verdict.exact or None, message)


def _check_combiner(combiner: Callable, bar: Progress) -> Report:
  bound = rules.bind_combiner(combiner)
  count = rules.models_of(bound) or 2
  findings = _of_distributions([('', bound)], count, bar)
  if all(f.ok for f in findings):
    findings += _emitted(methods.cos(bound, (2, *[1] * (count - 1))), bar)
  return Report(rules.name_of(combiner), tuple(findings))


def _check_rule(rule: Callable, alphas: Sequence[float] | None, bar: Progress) -> Report:
  bound = rules.bind(rule)
  settings = [(f' at alpha = {a:g}', rules.bind_rule(rules.bind(bound, alpha=a))) for a in _alphas(bound, alphas)]
  settings = settings or [('', rules.bind_rule(bound))]
  findings = _of_distributions(settings, 2, bar)
  if all(f.ok for f in findings):
    if rules.declaration(rule).definition is not None:
      findings.append(_as_defined(settings))
    if len(settings) > 1:
      findings.append(_monotone(settings))
    findings += [*_greedy(settings), *_emitted(methods.speculative(settings[len(settings) // 2][1], block=2), bar)]
  return Report(rules.name_of(rule), tuple(findings))


def _alphas(bound: Any, given: Sequence[float] | None) -> Sequence[float]:
  """Return the values to try of a rule: those given, else some of its range where it has an α that is not bound."""
  if given is not None:
    return sorted(given)
  if 'alpha' in bound.keywords or 'alpha' not in rules.numbers_of(bound):
    return ()
  low, high, *_ = rules.declaration(bound).alpha or rules.Range()
  return [a for a in ALPHAS if low <= a <= high]


def _of_distributions(settings: Iterable[tuple[str, Callable]], models: int, bar: Progress) -> list[Finding]:
  """Return whether combiners are traced and, if so, give distributions and read each position by itself."""
  settings = list(settings)
  logits = _logits(models)
  for sampler in SAMPLERS.values():
    if problem := validate.untraced(settings[0][1], models, logits.shape[-1], sampler):
      return [Finding('is traced', False, f'it {problem}')]
  half = logits.shape[1] // 2
  others = logits.at[:, half:].set(logits[:, :1])
  wrong = []
  alone = []
  for setting, sampler in SAMPLERS.items():
    for where, combiner in settings:
      pi = _target(combiner, logits, sampler)
      wrong += _not_distributions(pi, f'{where}, {setting}')
      if not np.allclose(pi[:half], _target(combiner, others, sampler)[:half], atol=CLOSE, equal_nan=True):
        alone.append(f'other positions change its distribution{where}, {setting}; reduce over the last axis only')
    bar.add(1, f'distributions, {setting}')
  tried = f'at {logits.shape[1]} positions under {len(SAMPLERS)} samplers'
  return [
    Finding('is traced', True, ''),
    Finding('is a distribution', not wrong, wrong[0] if wrong else tried),
    Finding('reads one position', not alone, alone[0] if alone else ''),
  ]


@jax.jit
def _target(combiner: Callable, logits: Array, sampler: sampling.Sampler, tokens: Array | None = None) -> Array:
  """Return the target of logits [M, N, V] after token lists [N, L], which a rule may read."""
  none = jnp.zeros(logits.shape[1:-1], jnp.int32)
  prefix = rules.Prefix(none[:, None] - 1, none + 1) if tokens is None else rules.Prefix(tokens, none + tokens.shape[1])
  return rules.target(combiner, logits, sampler, none, prefix).probs


def _logits(models: int) -> Array:
  """Return logits [M, N, V] of models that often agree: mild and extreme ones, and some with masked tokens."""
  rng = np.random.default_rng(0)
  last = rng.normal(size=(60, 7)) * np.repeat([1, 4, 20], 20)[:, None]
  rows = [last + (0.7 * i) * rng.normal(size=last.shape) * abs(last).mean(1, keepdims=True) for i in range(models)]
  logits = np.float32(rows[::-1])
  logits[:, ::6, 2] = -np.inf
  return jnp.asarray(logits)


def _not_distributions(pi: Array, where: str) -> list[str]:
  """Return what is wrong with the first of the distributions that is none."""
  bad = np.flatnonzero(~np.asarray(rules.is_distribution(pi)))
  if not bad.size:
    return []
  row = np.asarray(pi[bad[0]])
  what = f'has the entry {row.min():.4g}' if row.min() < -rules.ROUNDING else f'sums to {row.sum():.4g}'
  return [f'{bad.size} of {len(pi)} are none; the first {what}{where}']


def _as_defined(settings: Sequence[tuple[str, Callable]]) -> Finding:
  """Return whether a rule gives what its definition gives in numpy, position by position."""
  logits = _logits(2)
  for setting, sampler in SAMPLERS.items():
    parts = np.asarray([logits, sampling.softmax(logits), sampler(logits)], np.float64)  # [3, M, N, V]
    q, p = ([rules.Position(*of_one, sampler.greedy) for of_one in parts[:, m].swapaxes(0, 1)] for m in range(2))
    for where, rule in settings:
      pi = np.asarray(_target(rule, logits, sampler))
      for i in range(len(pi)):
        close = (rules.defined(rule, q[i], p[i], **numbers) for numbers in _nearby(rule.keywords))
        if not any(np.allclose(pi[i], x, atol=1e-4) for x in close):
          return Finding('is what it is defined as', False, f'position {i}{where}, {setting}, differs')
  return Finding('is what it is defined as', True, f'at {logits.shape[1]} positions under {len(SAMPLERS)} samplers')


def _nearby(numbers: dict) -> Iterable[dict]:
  """Yield numbers, and with them an α that rounding does not tell apart, for a decision may lie on its edge."""
  yield numbers
  if 'alpha' in numbers:
    alpha = np.float64(numbers['alpha'])
    yield from (numbers | {'alpha': alpha + sign * CLOSE * (1 + abs(alpha))} for sign in (-1, 1))


def _greedy(settings: Sequence[tuple[str, Callable]]) -> list[Finding]:
  """Return a finding about a rule that is the drafter alone at temperature 0, whatever its α."""
  logits = _logits(2)
  sampler = SAMPLERS['T = 0']
  if any(bool((_target(rule, logits, sampler) != sampler(logits[0])).any()) for _, rule in settings):
    return []
  message = 'at T = 0 it never defers: q.probs is one-hot there, so let it read q.plain or q.confidence'
  return [Finding('defers at T = 0', None, f'no: {message}')]


def _monotone(settings: Sequence[tuple[str, Callable]]) -> Finding:
  """Return whether the chance that a draft is rejected, TV(q̃, π), falls at every position as α grows."""
  logits = _logits(2)
  sampler = SAMPLERS['T = 1']
  q = sampler(logits[0])
  rejected = [np.asarray(sampling.tv(q, _target(combiner, logits, sampler))) for _, combiner in settings]
  for i in range(1, len(settings)):
    worse = rejected[i] - rejected[i - 1]
    if worse.max() > CLOSE:
      message = (
        f'{settings[i][0].strip()} a draft is rejected more often, by {worse.max():.3f}, than{settings[i - 1][0]}'
      )
      return Finding('rejects less as alpha grows', None, f'no: {message}')
  first = rejected[0].mean()
  last = rejected[-1].mean()
  message = f'{first:.2f} of drafts rejected{settings[0][0]}, {last:.2f}{settings[-1][0]}'
  return Finding('rejects less as alpha grows', True, message)


def _emitted(method: Method, bar: Progress) -> list[Finding]:
  """Return whether the compiled loop emits the target of a method, by its exact distribution on toy models."""
  models, combiner = method.target
  vocab = 2 if method.by_round else 3
  large = toy.model(1, vocab, scale=1.2, eos_ids=(vocab - 1,))
  every = [*(toy.model(i + 2, vocab, scale=0.8, near=large) for i in range(method.models - 1)), large]
  found = []
  for name in _EMITTED:
    sampler = SAMPLERS[name]
    distribution = emitted_distribution(method, every, PROMPT, COUNT, sampler)
    expected = lockstep_distribution(combiner, [every[m] for m in models], PROMPT, COUNT, sampler)
    ok, message = _compared(distribution, expected, method)
    found.append(Finding(f'is emitted at {name}', ok, message))
    bar.add(1, f'the loop, {name}')
  return found


def _compared(distribution: Distribution, expected: Distribution, method: Method) -> tuple[bool | None, str]:
  """Return whether a method emits what it is to emit, None where it declares that it does not, and how it compares."""
  off, missing = distance(distribution, expected)
  if missing < CLOSE <= off and method.keeps_distribution is False:
    return None, f'declared lossy: {number(off)} from its target in the joint distribution of {COUNT} tokens'
  message = f'distance {off:.1e} of the joint distribution of {COUNT} tokens from its definition, by {method.name}'
  if max(off, missing) < CLOSE:
    return True, message
  return False, f'{_counter_example(distribution, expected)} ({message})'


def _counter_example(distribution: Distribution, expected: Distribution) -> str:
  """Return the fewest first tokens whose probability is another than by definition."""
  for count in range(1, COUNT + 1):
    here, defined = (_first(x, count) for x in (distribution, expected))
    wrong = {x: abs(here.get(x, 0) - defined.get(x, 0)) for x in sorted(here.keys() | defined.keys())}
    tokens = max(wrong, key=wrong.get)
    if wrong[tokens] >= CLOSE / len(wrong):
      break
  chances = f'{number(here.get(tokens, 0))} here, {number(defined.get(tokens, 0))} by definition'
  return f'after the prompt {PROMPT} the tokens {[*tokens]} have the probability {chances}'


def _first(distribution: Distribution, count: int) -> Distribution:
  """Return the distribution of the first tokens."""
  found: Distribution = {}
  for tokens, chance in distribution.items():
    found[tokens[:count]] = found.get(tokens[:count], 0) + chance
  return found
