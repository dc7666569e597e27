"""The definitions once more, in float64 numpy and in the plainest form, for tests to compare with.

A rule's is the `definition` that it declares. Nothing else here is shared with the package: the sampler is written from
its equations, distributions recurse over prefixes.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools

import numpy as np
import scipy.stats

from speccascade import rules
from speccascade.drafters.translation import Translated
from speccascade.types import Model


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def one_hot(i, n):
  return np.eye(n)[i]


def entropy(p):
  p = p[p > 0]
  return -(p * np.log(p)).sum()


def tv(a, b):
  return 0.5 * np.abs(a - b).sum()


@dataclasses.dataclass
class Sampler:
  """Penalties, temperature, top-k, top-p, min-p for one prefix; `emitted` are the tokens of it that are output."""

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  repetition_penalty: float = 1.0
  seen: Sequence[int] = ()
  min_p: float | None = None
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  emitted: Sequence[int] = ()

  @property
  def greedy(self):
    return self.temperature == 0

  def penalised(self, logits):
    out = np.array(logits, np.float64)
    for v in set(self.seen):
      out[v] = out[v] / self.repetition_penalty if out[v] > 0 else out[v] * self.repetition_penalty
    for v in set(self.emitted):
      out[v] -= self.presence_penalty + self.frequency_penalty * list(self.emitted).count(v)
    return out

  def __call__(self, logits):
    x = self.penalised(logits)
    if self.greedy:
      return one_hot(x.argmax(), len(x))
    x = x / self.temperature
    if self.top_k:
      x = np.where(x >= np.sort(x)[-min(self.top_k, len(x))], x, -np.inf)
    if self.top_p:
      p = softmax(x)
      x = np.where([p[p > v].sum() < self.top_p for v in p], x, -np.inf)
    if self.min_p:
      p = softmax(x)
      x = np.where(p >= self.min_p * p.max(), x, -np.inf)
    return softmax(x)

  def soft(self, logits):
    return softmax(self.penalised(logits)) if self.greedy else self(logits)

  def harden(self, p):
    return one_hot(p.argmax(), len(p)) if self.greedy else p


BEGIN = 2  # tokens of the prompt in every test of a distribution


def at_prefix(tokens, **sampler):
  """Return the sampler of the token after a prompt and what was emitted."""
  return Sampler(**sampler, seen=tokens, emitted=tokens[BEGIN:])


def positions(lq, lp, sampler, tail=None):
  """Return what a rule's definition reads of two models at one position; `tail` stands for p̃ in a longer cascade."""
  return (
    rules.Position(lq, softmax(lq), sampler(lq), sampler.greedy),
    rules.Position(lp, softmax(lp), sampler(lp) if tail is None else tail, sampler.greedy),
  )


DECLARED = (x for x in vars(rules).values() if callable(x) and hasattr(x, 'declaration'))
# of q and p alone, by which those that read the tokens before are made
RULES = {rules.name_of(x): x for x in DECLARED if x.declaration.is_rule and not x.declaration.by_prefix}


def bound(name, alpha):
  """Return a rule of the package with its numbers."""
  return functools.partial(RULES[name], **_numbers(name, alpha))


def telling(name, pairs, share=0.5):
  """Return the α at which that share of the mass of pairs of logits that any α rejects is rejected; None without α."""

  def rejected(alpha):
    return sum(tv(softmax(lq), target(name, lq, lp, alpha, Sampler())) for lq, lp in pairs)

  if not _numbers(name, 0):
    return None
  low, high, *_ = RULES[name].declaration.alpha or rules.Range()
  low, high = max(low, -8), min(high, 8)
  most, least = rejected(low), rejected(high)
  for _ in range(12):  # no more: a jump of the mass would be met exactly
    middle = (low + high) / 2
    low, high = (middle, high) if rejected(middle) > least + share * (most - least) else (low, middle)
  return (low + high) / 2


def _numbers(name, alpha):
  return {'alpha': alpha} if 'alpha' in rules.numbers_of(RULES[name]) else {}


def _definition(name):
  return RULES[name].declaration.definition


def deferral(name, lq, lp, alpha, sampler, tail=None):
  """Return the decision of a rule that makes one."""
  return _definition(name)(*positions(lq, lp, sampler, tail), **_numbers(name, alpha))


def target(name, lq, lp, alpha, sampler, tail=None):
  """Return π of a rule; `tail` stands for p̃ where models follow the second."""
  q, p = positions(lq, lp, sampler, tail)
  found = _definition(name)(q, p, **_numbers(name, alpha))
  if np.ndim(found) == 0:  # a decision
    return p.probs if found else q.probs
  if found.dtype == bool:  # a set of tokens
    kept = q.probs * found
    return kept + p.probs * (1 - kept.sum())
  return found


def chained(name, logits, alpha, sampler):
  """Return π of a rule that cascades any number of models."""
  tail = sampler(logits[-1])
  for lq, lp in reversed(list(itertools.pairwise(logits))):
    tail = target(name, lq, lp, alpha, sampler, tail=tail)
  return tail


def phased(models, name, alpha, begin, end, **sampler):
  """Return the step of a rule between two markers, and of the last model alone outside."""

  def step(tokens, carry):
    tokens = tuple(tokens)
    ended = lambda marker: max((i for i in range(len(tokens)) if tokens[: i + 1][-len(marker) :] == marker), default=-1)
    logits = [table_logits(m, tokens) for m in models]
    s = at_prefix(tokens, **sampler)
    return [(chained(name, logits, alpha, s) if ended(begin) > ended(end) else s(logits[-1]), None)]

  return step


def fly(models, limit, window, block, **sampler):
  """Return the step of FLy; the carry is what the round has committed beyond."""

  def passes(x, q, p):  # with which chance
    return min(1, p[x] / q[x]) if q[x] > 0 else 0

  def round_of(tokens):
    """Yield (tokens of a round, probability), by every draft and the outcomes of all its tests."""
    for draft in itertools.product(range(len(table_logits(models[0], tokens))), repeat=block):
      logits = [[table_logits(m, [*tokens, *draft[:i]]) for m in models] for i in range(block + 1)]
      s = [at_prefix([*tokens, *draft[:i]], **sampler) for i in range(block + 1)]
      q, p = ([sampler_(x[m]) for sampler_, x in zip(s, logits)] for m in (0, 1))
      drafted = np.prod([q[i][x] for i, x in enumerate(draft)])
      for outcome in itertools.product((True, False), repeat=block) if drafted else ():
        chances = [passes(x, q[i], p[i]) for i, x in enumerate(draft)]
        chance = drafted * np.prod([c if ok else 1 - c for c, ok in zip(chances, outcome)])
        kept = 0
        for i, x in enumerate(draft):
          largest = np.sort(softmax(logits[i][1]))[-3:]
          unsure = -(largest * np.log(largest)).sum() >= limit and s[i].soft(logits[i][1])[x] > 0
          after = outcome[i + 1 : i + 1 + window]
          if not (outcome[i] or unsure and len(after) == window and all(after)):
            break
          kept += 1
        rest = p[kept] if kept == block else np.maximum(p[kept] - q[kept], 0)
        for v, mass in enumerate(rest / rest.sum() if chance else ()):
          yield (*draft[:kept], v), chance * mass

  def step(tokens, later):
    n = len(table_logits(models[0], tokens))
    if later:
      return [(one_hot(later[0], n), later[1:])]
    return [(mass * one_hot(some[0], n), some[1:]) for some, mass in round_of(list(tokens)) if mass]

  return step


def weighted(logits, weights, sampler):
  return sampler.harden(sum(w * sampler.soft(x) for w, x in zip(weights, logits)))


def contrastive(logits, mu, sampler):
  return sampler(logits[1] - mu * logits[0])


def realign(logits, lam, sampler):
  return sampler((1 - lam) * logits[0] + lam * logits[1])


def table_logits(model, tokens, source=None):
  """Return a toy model's logits after `tokens`."""
  network = model.network
  if isinstance(network, Translated):
    return translated_logits(model, tokens)
  context = ([0] * network.order + list(tokens))[-network.order :]
  index = 0
  for token in context:
    index = index * network.vocab_size + token
  logits = np.asarray(model.params['table'], np.float64)[index]
  if source is not None:
    logits = logits + np.asarray(model.params['source'], np.float64)[sum(source) % network.vocab_size]
  return logits


def translated_logits(model, tokens):
  """Return a translated toy model's logits: those of the drafter after its own tokens, at the tokens that both have."""
  tables = {name: np.asarray(x).tolist() for name, x in model.params['translation'].items()}
  own = table_logits(Model(model.params, model.network.drafter), [tables['read'][t] for t in tokens])
  return np.array([own[i] if i >= 0 else -np.inf for i in tables['write']])


# ---- steps: (tokens, carry) -> [(sub-distribution [V], next carry)] ----


def lockstep(models, pi, **sampler):
  """Return the step of a method whose every token follows pi(logits of all models, sampler)."""

  def step(tokens, carry):
    logits = [table_logits(m, tokens) for m in models]
    return [(pi(logits, at_prefix(tokens, **sampler)), None)]

  return step


def by_slot(models, name, alphas, **sampler):
  """Return the step of a speculative cascade with an α a slot; the carry is the slot of the next token in its draft."""

  def step(tokens, slot):
    slot = slot or 0
    lq, lp = (table_logits(m, tokens) for m in models)
    s = at_prefix(tokens, **sampler)
    q, pi = s(lq), target(name, lq, lp, alphas[slot], s)
    accepted = np.minimum(q, pi)
    return [(accepted, (slot + 1) % len(alphas)), (pi - accepted, 0)]

  return step


def in_drafts(models, defers, max_draft, **sampler):
  """Return the step of a drafter that defers single tokens; the carry counts its tokens since the verifier's last."""

  def step(tokens, drafted):
    drafted = drafted or 0
    lq, lp = (table_logits(m, tokens) for m in models)
    s = at_prefix(tokens, **sampler)
    if drafted == max_draft or defers(lq, lp, s):
      return [(s(lp), 0)]
    return [(s(lq), drafted + 1)]

  return step


def token_cascade(models, name, alpha, max_draft, **sampler):
  """Return the step of the sequential cascade."""
  return in_drafts(models, lambda lq, lp, s: deferral(name, lq, lp, alpha, s), max_draft, **sampler)


def bild(models, fallback, rollback, max_draft, **sampler):
  """Return the step of BiLD."""
  unsure = lambda lq, lp, s: softmax(lq).max() < fallback or deferral('bild_star', lq, lp, rollback, s)
  return in_drafts(models, unsure, max_draft, **sampler)


def joint_distribution(step, prompt, count, eos_ids=()):
  """Return {emitted tokens: probability} of `count` tokens, or fewer where EOS ends them."""
  distribution = {}

  def go(tokens, carry, prob, emitted):
    if len(emitted) == count or (emitted and emitted[-1] in eos_ids):
      distribution[emitted] = distribution.get(emitted, 0) + prob
      return
    for part, after in step(list(prompt) + list(emitted), carry):
      for v, mass in enumerate(part):
        if mass > 0:
          go(tokens + (v,), after, prob * mass, (*emitted, v))

  go((), None, 1.0, ())
  return distribution


def late_distribution(step, prompt, vocab, order, first, count):
  """Return the joint distribution [V]*count of the tokens from number `first` on, for models of that Markov order."""
  states = {(tuple(prompt), None): 1.0}  # (last tokens, carry): probability
  for _ in range(first):
    following = {}
    for (tokens, carry), prob in states.items():
      for part, after in step(tokens, carry):
        for v, mass in enumerate(part):
          key = ((*tokens, v)[-order:], after)
          following[key] = following.get(key, 0) + prob * mass
    states = following
  distribution = np.zeros((vocab,) * count)
  for (tokens, carry), prob in states.items():
    resumed = lambda tokens, later, carry=carry: step(tokens, carry if later is None else later)
    for emitted, mass in joint_distribution(resumed, tokens, count).items():
      distribution[emitted] += prob * mass
  return distribution


def goodness(observed, distribution):
  """Return the p-value of rows of tokens [N, k] against their joint distribution [V]*k, and χ²/df."""
  rows, counts = len(observed), np.zeros_like(distribution)
  np.add.at(counts, tuple(np.asarray(observed).T), 1)
  likely = distribution * rows >= 5
  impossible = counts[distribution <= 0].sum()
  seen = np.append(counts[likely], counts[~likely].sum())
  wanted = np.append(distribution[likely], distribution[~likely].sum()) * rows
  if wanted[-1] < 5:
    seen, wanted = seen[:-1], wanted[:-1]
  statistic, df = ((seen - wanted) ** 2 / wanted).sum(), len(wanted) - 1
  if df == 0:
    return float(impossible == 0), 0.0
  return (0.0 if impossible else scipy.stats.chi2.sf(statistic, df)), statistic / df
