"""A right speculative sampler, and twenty mistakes that were found in others, each with what it emits.

python -m speccascade.check --sampler faults:residual_p     # in this folder

and so for each; one that draws its draft itself, by its entry in `FAULTS`, takes `--drafts`, and one of a batch is
checked in Python, by `check_sampler(…, rows=2)`.
"""

import functools

import numpy as np


def draw(weights, u):
  """Return the token at u of a cumulative sum."""
  total = np.cumsum(weights)
  return int(np.argmax(total > u * total[-1]))


def accepts(u, x, q, p):
  return u * q[x] < p[x]


def ours(p, q, x):
  return np.maximum(p - q, 0)


def sampler(residual=ours, tested=lambda q: q, bonus=lambda p, q: p[-1], drop=None):
  """Return a sampler with parts that may be wrong."""

  def verify(tokens, q, p, rng):
    for i, x in enumerate(tokens):
      if x == drop:
        return [*tokens[:i], draw(p[i], rng.random())]
      if not accepts(rng.random(), x, tested(q[i]), p[i]):
        return [*tokens[:i], draw(residual(p[i], q[i], x), rng.random())]
    return [*tokens, draw(bonus(p, q), rng.random())]

  return verify


right = sampler()
without_drafted = lambda p, q, x: np.where(np.arange(len(p)) == x, 0, p)
unscaled = lambda q: np.sqrt(q) / np.sqrt(q).sum()
likeliest = lambda q: np.eye(len(q))[q.argmax()]
residual_p = sampler(residual=lambda p, q, x: p)
residual_absolute = sampler(residual=lambda p, q, x: abs(p - q))
residual_without_x = sampler(residual=without_drafted)
q_unscaled = sampler(tested=unscaled)
q_filtered = sampler(tested=likeliest)
dropped = sampler(drop=1)
bonus_early = sampler(bonus=lambda p, q: p[-2])
bonus_of_p = sampler(bonus=lambda p, q: 2 * p[-1] - q[-1])


def of_lists(next_target=lambda p, left: left, last=lambda p, left: left):
  """Return a sampler of several drafts of each token: each is tested against what those before it left over."""

  def verify(tokens, q, p, rng):
    emitted = []
    for i, drafts in enumerate(tokens):
      left = p[i]
      for x in drafts:
        if accepts(rng.random(), x, q[i], left):
          emitted.append(x)
          break
        left = next_target(p[i], ours(left, q[i], x) / max(ours(left, q[i], x).sum(), 1e-300))
      else:
        return [*emitted, draw(last(p[i], left), rng.random())]
    return [*emitted, draw(p[-1], rng.random())]

  return verify


def sglang(tokens, q, p, rng):
  """Accept with p(x), else emit p without x: right, whatever drew x."""
  for i, x in enumerate(tokens):
    if rng.random() >= p[i, x]:
      return [*tokens[:i], draw(without_drafted(p[i], q[i], x), rng.random())]
  return [*tokens, draw(p[-1], rng.random())]


def drafting(q, p, rng):
  """Draw a draft and verify it."""
  return right([draw(x, rng.random()) for x in q], q, p, rng)


def arg_max_draft(q, p, rng):
  return right([int(x.argmax()) for x in q], q, p, rng)


def one_number(q, p, rng):
  u = rng.random()
  x = draw(q[0], u)
  return [x, draw(p[1], rng.random())] if accepts(u, x, q[0], p[0]) else [draw(ours(p[0], q[0], x), rng.random())]


def one_noise(q, p, rng):
  clocks = -np.log(rng.random(q.shape[1]))
  first = lambda weights: int(np.argmin(clocks / np.maximum(weights, 1e-30)))
  x = first(q[0])
  return [x, draw(p[1], rng.random())] if accepts(rng.random(), x, q[0], p[0]) else [first(ours(p[0], q[0], x))]


def counted(tokens, q, p, rng):
  accepted = sum(accepts(rng.random(), x, *both) for x, *both in zip(tokens, q, p))
  rest = ours(p[accepted], q[accepted], None) if accepted < len(tokens) else p[-1]
  return [*tokens[:accepted], draw(rest if rest.sum() else p[accepted], rng.random())]


def one_test_number(tokens, q, p, rng):
  u = rng.random()
  for i, x in enumerate(tokens):
    if not accepts(u, x, q[i], p[i]):
      return [*tokens[:i], draw(ours(p[i], q[i], x), rng.random())]
  return [*tokens, draw(p[-1], rng.random())]


def block_with_s1(tokens, q, p, rng):
  s = [1.0]
  for i, x in enumerate(tokens):
    s.append(min(1.0, s[-1] * p[i, x] / q[i, x]))
  accepted = next((n for n in range(len(tokens), 0, -1) if rng.random() < s[n]), 0)
  if accepted == len(tokens):
    return [*tokens, draw(p[-1], rng.random())]
  rest = np.maximum(s[accepted] * p[accepted] - q[accepted], 0)
  return [*tokens[:accepted], draw(rest if rest.sum() else p[accepted], rng.random())]


def by_row(tokens, q, p, rng):
  """A right sampler of batches."""
  return [right(list(x), *both, rng) for x, *both in zip(tokens, q, p)]


def all_or_none(tokens, q, p, rng):
  ok = [accepts(rng.random(), x[0], a[0], b[0]) for x, a, b in zip(tokens, q, p)]
  if all(ok):
    return [[x[0], draw(b[1], rng.random())] for x, b in zip(tokens, p)]
  residuals = [ours(b[0], a[0], None) for a, b in zip(q, p)]
  return [[draw(r if r.sum() else b[0], rng.random())] for r, b in zip(residuals, p)]


def one_key(q, p, rng):
  return [drafting(q[0], p[0], rng)] * len(q)


def block(tokens, q, p, rng):
  """Block verification, as it is right (Sun et al. 2025)."""
  s = [1.0]
  for i, x in enumerate(tokens):
    s.append(min(1.0, s[-1] * p[i, x] / q[i, x]))
  rest = [np.maximum(w * a - b, 0) for w, a, b in zip(s, p, q)]
  chance = [r.sum() / (r.sum() + 1 - w) if r.sum() + 1 - w else 0 for w, r in zip(s, rest)]
  chance.append(s[-1])
  accepted = max([n for n in range(1, len(tokens) + 1) if rng.random() < chance[n]], default=0)
  after = p[-1] if accepted == len(tokens) else rest[accepted]
  return [*tokens[:accepted], draw(after if after.sum() else p[accepted], rng.random())]


def settled(p, temperature=1.0, top_k=None, top_p=1.0):
  """Return p [V] after the temperature, top-k and top-p."""
  if temperature == 0:
    return np.eye(len(p))[p.argmax()]
  p = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
  p = np.where(p >= np.sort(p)[::-1][: top_k or len(p)][-1], p, 0)
  order = np.argsort(-p)
  dropped = order[np.cumsum(p[order]) - p[order] >= top_p * p.sum() - 1e-9]
  p[dropped] = 0
  return p / p.sum()


def filtered_first(p, temperature=1.0, top_k=None, top_p=1.0):
  return settled(settled(p, top_k=top_k, top_p=top_p), temperature)


def turned(p, temperature=1.0, **filters):
  """Take temperature 0 for -1, as one of a batch that has sampled rows too."""
  return settled(p, temperature or -1, **filters)


def with_settings(settle):
  """Return a sampler that applies its settings."""

  def verify(tokens, q, p, rng, temperature, top_k, top_p):
    return right(tokens, q, np.array([settle(x, temperature, top_k=top_k, top_p=top_p) for x in p]), rng)

  return verify


def batch_with_settings(settle, cut=True):
  """Return a sampler of a batch whose rows have settings, and drafts of their own length."""

  def verify(tokens, q, p, rng, temperature, top_k, top_p, lengths):
    texts = []
    for x, a, b, n, *each in zip(tokens, q, p, lengths, temperature, top_k, top_p):
      n = n if cut else len(x)
      b = np.array([settle(y, each[0], top_k=each[1], top_p=each[2]) for y in b])
      texts.append(right(list(x[:n]), a[:n], b[: n + 1], rng))
    return texts

  return verify


by_settings = with_settings(settled)
filters_before_temperature = with_settings(filtered_first)
batch_by_settings = batch_with_settings(settled)
greedy_turned = batch_with_settings(turned)


def no_draft_forgotten(tokens, q, p, rng, lengths):
  """Test whatever stands in a row that has no draft."""
  return [row[: n + 1] for row, n in zip(by_row(tokens, q, p, rng), lengths)]


def too_often(tokens, q, p, rng):
  for i, x in enumerate(tokens):
    if rng.random() >= p[i, x] / q[i, x] + 1e-3:
      return [*tokens[:i], draw(ours(p[i], q[i], x), rng.random())]
  return [*tokens, draw(p[-1], rng.random())]


def in_64ths(tokens, q, p, rng):
  for i, x in enumerate(tokens):
    if rng.random() >= round(64 * min(1, p[i, x] / q[i, x])) / 64:
      rest = ours(p[i], q[i], x)
      return [*tokens[:i], draw(rest if rest.sum() else p[i], rng.random())]
  return [*tokens, draw(p[-1], rng.random())]


def first_q(tokens, q, p, rng):
  return right(tokens, np.array([q[0]] * len(q)).reshape(q.shape), p, rng)


def one_residual_number(tokens, q, p, rng):
  """Draw what follows in all rows by one number."""
  ok = [accepts(rng.random(), x[0], a[0], b[0]) for x, a, b in zip(tokens, q, p)]
  u = rng.random()
  after = [(b[1] if yes else ours(b[0], a[0], None)) for yes, a, b in zip(ok, q, p)]
  return [[x[0], draw(w, u)] if yes else [draw(w, u)] for yes, x, w in zip(ok, tokens, after)]


def writing_p(tokens, q, p, rng):
  p[:] = np.eye(p.shape[1])[0]
  return [0]


def writing_q(tokens, q, p, rng):
  emitted = [int(p[0].argmax())]
  q[:], p[:] = 0, np.eye(p.shape[1])[p[0].argmax()]
  return emitted


def rejecting(weights, rng):
  """Draw by rejection: how many numbers are asked for is not known beforehand."""
  while True:
    x = int(rng.random() * len(weights))
    if rng.random() < weights[x] / weights.max():
      return x


def by_rejection(tokens, q, p, rng):
  for i, x in enumerate(tokens):
    if not accepts(rng.random(), x, q[i], p[i]):
      return [*tokens[:i], rejecting(ours(p[i], q[i], x), rng)]
  return [*tokens, rejecting(p[-1], rng)]


def racing(weights, rng):
  return int(np.argmin(-np.log(rng.random(len(weights))) / np.maximum(weights, 1e-30)))


def by_race(tokens, q, p, rng):
  for i, x in enumerate(tokens):
    if not accepts(rng.random(), x, q[i], p[i]):
      return [*tokens[:i], racing(ours(p[i], q[i], x), rng)]
  return [*tokens, racing(p[-1], rng)]


TWO, AFTER = ((0.6, 0.4), (0.9, 0.1)), (0.1, 0.9)
THREE = ((0.2, 0.4, 0.4), (0.6, 0.3, 0.1))
P = functools.partial
# name: (sampler, p of the first token, q, K, tokens compared, total variation, options)
FAULTS = {
  'residual p': (residual_p, *TWO, 1, 1, 0.18, {}),
  'residual |p - q|': (residual_absolute, *TWO, 1, 1, 0.15, {}),
  'residual p without x': (residual_without_x, *THREE, 1, 1, 0.1, {}),
  'arg-max draft, soft q': (arg_max_draft, *TWO, 1, 1, 0.0667, dict(drafts=True)),
  'one number draws and tests': (one_number, *TWO, 1, 1, 0.0667, dict(drafts=True)),
  "the draft's noise draws the residual": (one_noise, *THREE, 1, 1, 0.044, dict(drafts=True)),
  'q before temperature in the test': (q_unscaled, *TWO, 1, 1, 0.12, {}),
  'q filtered in the test alone': (q_filtered, *TWO, 1, 1, 0.06, {}),
  'B dropped, a bonus in its place': (dropped, *TWO, 1, 1, 0.06, {}),
  'bonus one early': (bonus_early, *TWO, 1, 2, 0.35, {}),
  'bonus from p, target (p + q) / 2': (
    bonus_of_p,
    (0.75, 0.25),
    (0.9, 0.1),
    1,
    2,
    0.1275,
    dict(after=(0.75, 0.25)),
  ),
  'accepts counted, not the prefix': (counted, *TWO, 2, 1, 0.21, {}),
  'one test number for the block': (one_test_number, *TWO, 2, 2, 0.18, {}),
  'block verification tests with s_1': (block_with_s1, *TWO, 2, 1, 0.15, {}),
  'residual for all unless all accept': (all_or_none, *TWO, 1, 1, None, dict(rows=2)),
  'one key for two rows': (one_key, *TWO, 1, 1, 0.48, dict(drafts=True, rows=2)),
  'accepted .001 too often': (too_often, *TWO, 1, 1, 0.0009, {}),
  'the ratio in 64ths': (in_64ths, (0.5, 0.5), (0.9, 0.1), 1, 1, 0.0063, {}),
  'q of the first position at all': (first_q, *TWO, 2, 2, None, {}),
  "one number for all rows' residuals": (one_residual_number, *THREE, 1, 1, 0.06, dict(rows=2)),
}
RIGHT = {
  'by the papers': (right, {}),
  'whatever drew x': (sglang, {}),
  'with its draft': (drafting, dict(drafts=True)),
  'of a batch': (by_row, dict(rows=2)),
  'block verification': (block, {}),
  'with settings': (by_settings, {}),
  'of a batch with settings': (batch_by_settings, dict(rows=2)),
}
