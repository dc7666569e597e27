"""What is claimed of a composition, and what is found out of it.

`verdict(case)` asks the package; it is the only place that does. `find_law(case)` compares the exact law of what the
compiled loop emits with the definition of the target, `law_of_a_row` having enumerated it, whatever the package says of
it. `find_text(case)` compares texts under `coupling='gumbel'` with those of the target's models in lockstep.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import itertools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import law_of_a_row
from law_of_a_row import Law, Noted, Size
import numpy as np

from speccascade import acceptance, backends, decode, methods, Request, rules, Sampler, stopping
from speccascade.drafters import hidden, ngram
from speccascade.engine import feeding, inputs, law, loop, requests, validate
from speccascade.engine.job import DecodeJob
from speccascade.engine.lowering import lower
from speccascade.engine.method import Strategy
from speccascade.engine.phases import Score, Verify
from speccascade.engine.state import cache_slots
from speccascade.types import Model, NO_FAULT, Prompt

SEED = 5  # of the calls; a memory that has the text of an equal seed has this one
CLOSE = 2e-6  # what float32 leaves of an exact law
TELLING = 1e-5  # what shows a difference


@dataclasses.dataclass(frozen=True)
class Case:
  """A composition: a method with models, and what some rows ask for; the first of them is looked at."""

  method: Strategy
  models: tuple[Model, ...]
  requests: tuple[Request, ...]
  sampler: Sampler = Sampler()
  processor: Callable | None = None
  equal: bool = False  # whether the rows have equal seeds; of a memory, its texts and the rows
  chosen: tuple[tuple[str, str], ...] = ()  # what it is drawn of

  def __str__(self):
    what = ' · '.join(f'{axis} {name}' for axis, name in self.chosen)
    return f'{what}\n    {self.method}'

  @property
  def memory(self) -> Model | None:
    """The model that remembers."""
    return next((m for m in self.models if m.network.remembers), None)


# ---- what is claimed ----


class Verdict(NamedTuple):
  """What the package says of row 0: 'exact', 'lossy', 'unknown' or 'refused', and why it is not exact."""

  kind: str
  sentence: str = ''


def verdict(case: Case, batch: int | None = None) -> Verdict:
  """Ask the package, without decoding anything; a batch has all rows unless it is said."""
  models = [
    m if m is not case.memory else ngram.remembering(m, [[0]], seed=SEED + (not case.equal)) for m in case.models
  ]
  asked = [dataclasses.replace(r, seed=SEED, example_id=0 if case.equal else i) for i, r in enumerate(case.requests)]
  try:
    job = DecodeJob.of(
      case.method,
      models,
      asked,
      sampler=case.sampler,
      processor=case.processor,
      max_new_tokens=4,
      seed=SEED,
    )
    made = job.method.at(batch or len(asked))
    lower(made)
  except ValueError as error:
    return Verdict('refused', str(error))
  said = law.law(made, case.requests[0].sampled_by(case.sampler))
  return Verdict({True: 'exact', False: 'lossy', None: 'unknown'}[said.exact], said.why)


@contextlib.contextmanager
def unchecked():
  """Let the loop run what the package refuses."""
  with mock.patch.object(law, 'misread', lambda *_: None):
    yield


# ---- the law ----


class Found(NamedTuple):
  """The largest difference from the target; a counter-example; None where there is nothing to compare with."""

  off: float | None
  example: str = ''


def find_law(case: Case, size: Size) -> Found:
  """Enumerate the loop, and compare it with the target of the method."""
  made = case.method.at(len(case.requests))
  target = made.target
  if target[1] is None:
    return Found(None)
  with unchecked():
    run, shape, prunes = _runner(case, size)
    found = law_of_a_row.laws(run, shape, size, prunes, len(case.requests))
  wanted = expected(case, target, size.count)
  off = [law_of_a_row.distance(law, wanted) for law in found]
  worst = found[int(np.argmax(off))]
  text = max(worst.keys() | wanted.keys(), key=lambda x: abs(worst.get(x, 0) - wanted.get(x, 0)))
  prompts = [list(r.prompt) for r in case.requests]
  example = f'prompts {prompts}: P{list(text)} = {worst.get(text, 0):.6f}, by definition {wanted.get(text, 0):.6f}'
  return Found(max(off), example)


def _rows(case: Case, models: Sequence[Model]):
  return requests.rows(models, list(case.requests), sampler=case.sampler, max_new_tokens=None, seed=SEED)


def _runner(case: Case, size: Size):
  """Return a function of tables of numbers to the first tokens of row 0, the shape of a table, whether it prunes."""
  models = hidden.attached(case.models, case.method.slots[-1])
  made = case.method.at(len(case.requests)).for_networks([m.network for m in models])
  lowered = lower(made)
  slots = [models[m] for m in made.slots]
  rows = _rows(case, models)
  needs = requests.features(rows)
  width = max(len(row.tokens) for row in rows)
  vocab = inputs.vocabulary(models)
  buffer = loop.positions(slots[-1].network, width, size.most, lowered.beyond)
  backend, params = backends.prepared(slots, None, None)
  program = loop.Program(tuple(s.network for s in slots), cache_slots(slots), buffer, vocab, backend)
  arrays = requests.arrays(rows, needs, len(rows), width, vocab)
  start = slots[-1].network.start_id
  base = arrays.prompt.length if start is None else np.ones(len(rows), np.int32)
  places = size.most + lowered.window + 1
  shape = (size.most + 1 if lowered.by_round else 1, places)
  acceptors = [rules.inside(p.accept) for p in lowered.parts if isinstance(p, Verify)]
  limits = [p.limit for p in lowered.parts if isinstance(p, Score)]
  plain = all(a is acceptance.token_wise for a in acceptors)
  near = plain and type(made.policy) is stopping.Policy and all(x is None or x.fine is False for x in limits)
  own = acceptance.known().values()
  prunes = not case.equal and all(a in own or type(a) in own for a in acceptors)
  own = tuple(range(len(rows)))
  processor = validate.bind_processor(case.processor)
  which = next((s for s, m in enumerate(slots) if m.network.remembers), None)

  def once(params, noted, table, of_rows, whole=False):
    noise = Noted(
      jnp.zeros((len(rows), 2), jnp.uint32),
      greedy=needs.greedy,
      by_round=lowered.by_round,
      table=table,
      noted=noted,
      base=jnp.asarray(base),
      rows=of_rows,
      count=size.count,
      in_order=plain,
      near=near,
    )
    state = loop.first_state(program, lowered.start, loop.caches_of(program, params, arrays.prompt), arrays, noise)
    # Each table has a state of its own from the start, or loops would be batched leaf by leaf, again and again.
    state = jax.tree.map(lambda x: jnp.where(table.ravel()[0] < 2, x, x), state)
    # A row that goes on emits a token in each round, unless it waits for its turn.
    rounds = loop.FOREVER if whole or lowered.branches > 1 else size.count
    return loop._rounds(program, lowered, params, state, jnp.array([len(rows), rounds]), processor)

  def run(table):
    noted = jnp.broadcast_to(jnp.array(law_of_a_row.NOTHING), (*table.shape, 3))
    if which is None:
      state = once(params, noted, table, (0,) * len(rows) if case.equal else own)
    else:  # the text of a first call is remembered by a second one
      first = once(params, noted, table, own if case.equal else (1, *own[1:]), whole=True)
      text = first.tokens[0, max(0, int(base[0]) - 3) : int(base[0]) + size.most]
      kept = jnp.concatenate([params[which]['memory'], text, jnp.full(1, -1)])[-params[which]['memory'].size :]
      again = tuple({'memory': kept} if s == which else p for s, p in enumerate(params))
      state = once(again, first.noise.noted, table, own)
    at = slice(int(base[0]), int(base[0]) + size.count)
    number = jnp.clip(state.length[0] - int(base[0]), 0, size.count)
    lost = (state.fault.code[0] != NO_FAULT) & (number < size.count)
    return state.tokens[0, at], number, lost, state.stats.source[0, at], state.noise.noted[0]

  return run, shape, prunes


# ---- the definition ----


def expected(case: Case, target, count: int) -> Law:
  """Return the law of row 0's first tokens, each drawn from the target after the text so far."""
  numbers, combiner = target
  models = [case.models[m] for m in numbers]
  asked = case.requests[0]
  sampler = asked.sampled_by(case.sampler)
  last = case.models[case.method.slots[-1]].network
  ends = {*last.eos_ids, *(asked.stop_tokens or ())}
  most = min(count, asked.max_new_tokens)
  ended, law = {}, {(): 1.0}
  for n in range(most):
    texts = list(law)
    outputs = np.array(texts, np.int32).reshape(len(texts), n)
    logits = jnp.stack([_logits(m, asked.prompt, outputs, _verifier_of(m, case.models)) for m in models])
    logits = _asked(case, models, combiner, logits, asked, outputs, ends)
    lawful = np.isfinite(logits.max(-1)).all(0)
    lost = sum(law[t] for t in itertools.compress(texts, ~lawful))
    ended[law_of_a_row.FAULT] = ended.get(law_of_a_row.FAULT, 0) + lost
    texts, logits, outputs = list(itertools.compress(texts, lawful)), logits[:, lawful], outputs[lawful]
    if not texts:
      return ended
    pi = np.asarray(_target(combiner, logits, sampler, *_prefix(last, asked.prompt, outputs)), float)
    law = {(*t, v): law[t] * p for t, row in zip(texts, pi) for v, p in enumerate(row) if p > 0}
    ended |= {t: law.pop(t) for t in list(law) if t[-1] in ends}
  return ended | law


def _prefix(network, prompt, outputs):
  """Return what is before each position as a rule reads it [N, T], and the output alone [N, n]."""
  if network.start_id is not None:
    return np.pad(outputs, ((0, 0), (1, 0)), constant_values=network.start_id), outputs
  return np.concatenate([np.tile(np.array(prompt, np.int32), (len(outputs), 1)), outputs], 1), outputs


def _verifier_of(model: Model, models: Sequence[Model]) -> Model | None:
  """Return the model in whose cache a head works, None of all others."""
  if not model.network.provisional:
    return None
  return next((m for m in models if model.network.shares_cache(model.params, m.network, m.params)), None)


def _logits(model: Model, prompt: Sequence[int], outputs: np.ndarray, verifier: Model | None) -> jax.Array:
  """Return the logits [N, V] after outputs [N, n], each text read from its start; a head reads beside its verifier."""
  text, _ = _prefix(model.network, prompt, outputs)
  n, length = text.shape
  read = Prompt(jnp.tile(jnp.asarray([prompt], jnp.int32), (n, 1)), jnp.full(n, len(prompt), jnp.int32))
  owner = verifier or model
  cache = owner.network.prefill(owner.params, read, length + len(prompt) + 1)
  tokens, positions = jnp.asarray(text), jnp.tile(jnp.arange(length)[None], (n, 1))
  if verifier is None:
    return model.network.extend(model.params, cache, tokens, positions)[0][:, -1].astype(jnp.float32)
  for i in range(length):
    at = slice(i, i + 1)
    logits, cache = model.network.extend(model.params, cache, tokens[:, at], positions[:, at])
    _, cache = verifier.network.extend(verifier.params, cache, tokens[:, at], positions[:, at])
  return logits[:, -1]


def _asked(case, models, combiner, logits, asked, outputs, ends):
  """Return logits [M, N, V] as the request wants them."""
  if rules.declaration(combiner).adds_logits:
    lacks = [m.network.lacks(m.params) for m in models]
    logits = jnp.stack([feeding.filled(x, l[:, None])[:, 0] for x, l in zip(lacks, logits)])
  for token, value in (asked.logit_bias or {}).items():
    logits = logits.at[..., token].add(value)
  if outputs.shape[1] < (asked.min_new_tokens or 0):
    logits = logits.at[..., list(ends)].set(-jnp.inf)
  if case.processor is not None:
    text, _ = _prefix(models[-1].network, asked.prompt, outputs)
    call = lambda x, t: case.processor(x, t, jnp.int32(text.shape[1]))
    logits = jnp.stack([jax.vmap(call)(x, jnp.asarray(text)) for x in logits])
  return logits


def _target(combiner, logits, sampler, text, output):
  if sampler.penalises:
    times = jax.nn.one_hot(output, logits.shape[-1], dtype=jnp.int32).sum(1)
    seen = jax.nn.one_hot(text, logits.shape[-1], dtype=jnp.int32).sum(1) > 0
    sampler = sampler.bind(seen if sampler.repeats else None, times if sampler.counting else None)
  none = jnp.zeros(logits.shape[1:-1], jnp.int32)
  prefix = rules.Prefix(jnp.asarray(text), none[:, None] + text.shape[1])
  return rules.target(combiner, logits[:, :, None], _wide(sampler), none[:, None], prefix).probs[:, 0]


def _wide(sampler):
  wide = lambda x: None if x is None else x[:, None]
  return sampler.bind(wide(sampler.seen), wide(sampler.counts))


# ---- texts ----


def find_text(case: Case, batch: int) -> str:
  """Return the first difference from the texts of the target's models in lockstep, by the same noise; '' for none."""
  numbers, combiner = case.method.at(batch).target
  alone = rules.inside(combiner) is rules.own
  lockstep = methods.autoregressive() if alone else methods.ensemble(combiner, models=len(numbers))
  asked = dict(sampler=case.sampler, processor=case.processor, seed=SEED, keep_faults=True)
  got = decode(case.method, list(case.models), list(case.requests), batch_size=batch, **asked)
  wanted = decode(lockstep, [case.models[m] for m in numbers], list(case.requests), batch_size=8, **asked)
  for i, (a, b) in enumerate(zip(got.tokens, wanted.tokens, strict=True)):
    if list(a) != list(b):
      return f'row {i}: {list(a)}, in lockstep {list(b)}'
  return ''


# ---- both ----


class Judged(NamedTuple):
  """A verdict, what was found, and the error of a loop that could not be run."""

  case: Case
  verdict: Verdict
  found: Found
  error: str = ''

  @property
  def differs(self) -> bool | None:
    """Whether the output was found to be another than the target's; None where that was not found out."""
    if self.error:
      return None if self.error.startswith('TooMany') else True
    return None if self.found.off is None else bool(self.found.off > TELLING)

  @property
  def contradicts(self) -> bool:
    """Whether the verdict is wrong by itself: exact, which does not hold, or not refused, where the loop fails."""
    fails = bool(self.error) and self.differs is True
    off = bool(self.differs) or (self.found.off or 0) > CLOSE
    return self.verdict.kind != 'refused' and bool(fails or self.verdict.kind == 'exact' and off)

  def __str__(self):
    found = self.error or f'off by {self.found.off}: {self.found.example}'
    return f'{self.verdict.kind} {self.verdict.sentence}\n    {found}\n    {self.case}'


SIZES = Size(3, 7), Size(2, 7, tables=2), Size(2, 7, tables=1, boxes=200_000)


def judge(case: Case, sizes: Sequence[Size] = SIZES) -> Judged:
  """Ask for the verdict, and find out the law, of fewer tokens where there are too many boxes."""
  asked, found, error = verdict(case), Found(None), ''
  for size in sizes:
    try:
      return Judged(case, asked, find_law(case, size))
    except law_of_a_row.TooMany as many:
      error = f'TooMany: {many}'
    except Exception as problem:  # whatever a loop raises that was not refused
      error = f'{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ""}'
      break
  return Judged(case, asked, found, error)
