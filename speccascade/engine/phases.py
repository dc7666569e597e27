"""The phases that every method is made of: `Propose`, `Score`, `Verify`, and `Alternate` among lists of phases.

A phase maps (context, state) to a state. Its numbers that may change without compiling are pytree leaves; what shapes
the program is static. A row that is not `active` passes through unchanged, whatever the other rows of its batch do.
The `model` and `models` of a phase are slots of the method: slot s runs model `slots[s]`.

Axis letters: B batch, M models of a method, L new tokens, W window of pending tokens, V vocabulary.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import struct
import jax
from jax import lax, tree_util
import jax.numpy as jnp

from speccascade import acceptance, rules, sampling
from speccascade.backends import ops
from speccascade.backends.ops import take, take1
from speccascade.engine import stats
from speccascade.engine.feeding import draw, feed, finite, is_end, masked_window, store_by_row, store_from_slot
from speccascade.engine.lowering import Facts, flat, mapped, Phase, rounds
from speccascade.engine.state import Context, sampler_for_window, State, Window
from speccascade.engine.verification import Limit
from speccascade.models.packing import coarse_widths, fine_widths, MOST
from speccascade.types import Array, ASKED, Combiner, FINAL, iota, OWN, Rule, static

# ---- phases ----


@struct.dataclass
class Score(Phase):
  """Feed a model every pending token that it has not seen, so that it knows the distribution after each.

  `limit` bounds how many pending tokens are fed; `drop` forgets the others. `after` is a slot whose call must end
  first.

  The rest follows from the round. `widths` are the numbers of tokens per row that are compiled, ascending;
  where there are several, rows differ in their need. An `aligned` model has seen all committed tokens but the last in
  every row, so that its logits begin at the start of the window.
  """

  model: int = static()
  limit: Limit | None = None
  drop: bool = static(default=False)
  after: int | None = static(default=None)
  widths: tuple[int, ...] = static(default=())
  aligned: bool = static(default=False)

  def __str__(self):
    return f'score({self.model})' if self.limit is None else f'score({self.model}, {self.limit}{", drop" * self.drop})'

  calls = 1

  @property
  def feeds(self) -> tuple[int, int | None]:
    return self.model, None if self.limit is None else self.limit.most

  @property
  def reads(self) -> tuple[int, ...] | None:
    limit = () if self.limit is None else self.limit.reads
    return None if limit is None else (*limit, *(() if self.after is None else (self.after,)))

  @property
  def exact(self) -> bool:
    return not self.drop  # what a goodput drops, it drops for what it is

  def lowered(self, facts: Facts) -> 'Score':
    known = facts.known(self.model, facts.drafted)
    emitted = facts.emitted(facts.drafted)
    widest = facts.window + 1 if facts.in_turn else max(known, emitted)
    if self.limit is not None and self.limit.fine:
      widths = fine_widths(widest)
    else:
      widths = coarse_widths(widest) if facts.varies else (widest,)
    # A model of the test has read what was emitted, since no more is. Of any other a limit may leave tokens unread.
    may_leave = self.limit is not None and self.limit.varies
    reads_all = self.model in facts.tested or (not may_leave and known >= emitted)
    return self.replace(widths=widths, aligned=not facts.in_turn and reads_all)

  def __call__(self, context: Context, state: State) -> State:
    size = state.window.size
    if self.limit is not None:
      size = jnp.where(state.active, self.limit(context, state), size)
    if self.drop:
      state = state.replace(window=state.window.replace(size=size))
    if self.after is not None:
      # Without the barrier the compiler may run both calls at once, or this one first.
      tokens, _ = lax.optimization_barrier((state.tokens, state.window.logits[self.after][0, 0, 0]))
      state = state.replace(tokens=tokens)
    # A need of 0 leaves a row as it is: one that is not active, or all of whose pending tokens the model has read.
    need = jnp.where(state.active, state.length + size - state.fed[:, self.model], 0)
    need = jnp.clip(need, 0, self.widths[-1])
    return self._feed(context, state, need)

  def _feed(self, context: Context, state: State, need: Array) -> State:
    """Feed windows of the least width that covers the need [B], or, of several rows, packed to the least total."""
    rows = need.shape[0]
    m = self.model
    widest = self.widths[-1]
    # Each width is a branch of the program. Where a backend gains nothing by fewer tokens, the widest is the only one.
    sizes = self.widths if rows * widest >= context.backend.pack_from else (widest,)
    packs = len(sizes) > 1 and 1 < rows <= MOST and context.packs[m]
    widths = jnp.array(sizes, jnp.int32)
    # A window is as wide as the row that needs most; packed tokens are as many as the rows need together.
    over = need.sum() > widths[:-1] * rows if packs else need.max() > widths[:-1]
    which = jnp.sum(over.astype(jnp.int32))
    if packs:  # the rows share the padding of the batch equally
      computed = need + (widths[which] * rows - need.sum() + jnp.arange(rows)) // rows
    else:
      computed = widths[which]
    called = (need > 0).astype(jnp.int32)
    state = state.replace(stats=state.stats.charge(m, calls=called, positions=need, computed=computed))

    def at_width(state, width):
      packed = packs and width < widest
      first = state.fed[:, m] + 1 - state.length  # the slot of the first output
      if packed:
        state, logits = feed(context, state, m, widest, need, width * rows)
      else:
        state, logits = feed(context, state, m, width, need)
      if self.aligned:
        return store_from_slot(context, state, m, logits, 0)
      return store_by_row(context, state, m, logits, first, need)

    branches = [functools.partial(at_width, width=n) for n in sizes]
    return branches[0](state) if len(branches) == 1 else context.backend.choose(which, branches, state)


@struct.dataclass
class Propose(Phase):
  """Draw up to n tokens from the model's own distribution, each fed before the next is drawn; they become pending.

  The last token drawn is not fed: its distribution is known, and its test needs no more.

  `catch_up` follows from the round: the most committed tokens that the model has to read before it draws.
  With 1 that is the last committed token, which the loop's first turn feeds. After a round whose last token came from
  another model there are 2. With 0 the model has read everything, and other models' tokens may be pending.
  """

  model: int = static()
  n: int = static()
  catch_up: int = static(default=1)

  def __str__(self):
    return f'propose({self.model}, {self.n})'

  @property
  def draws(self) -> int:
    return self.n

  @property
  def feeds(self) -> tuple[int, int | None]:
    return self.model, None

  @property
  def calls(self) -> int:
    return self.n - (self.catch_up == 0)  # a model that has read everything knows the distribution of its first token

  @property
  def reads(self) -> tuple[int, ...]:
    return () if self.catch_up else (self.model,)

  def lowered(self, facts: Facts) -> 'Propose':
    drafts = range(self.n + 1) if facts.varies else [self.n]
    return self.replace(catch_up=0 if facts.in_turn else 1 + max(0, *(facts.emitted(n) - n for n in drafts)))

  def __call__(self, context: Context, state: State) -> State:
    budget = context.policy.length(state.policy, self.n)
    budget = min(budget, self.n) if isinstance(budget, int) else jnp.minimum(budget, self.n)
    first = 0
    m = self.model
    going = state.active  # rows whose draft goes on
    in_step = self.catch_up > 0  # nothing was pending, so the slot is the same in all rows that are going
    if self.catch_up > 1:
      state, logits = self._catch_up(context, state)
    elif not self.catch_up:  # an earlier phase has computed the distribution after the last pending token
      logits = take1(state.window.logits[m], state.window.size)
    before = state
    if self.catch_up != 1:  # the logits of the first token are there, so it needs no turn of the loop
      going = going & self._knows(state) & (budget > 0)
      going, state = draw(context, state, m, logits, going, 0 if in_step else None)
      first = 1
      going = going & (budget > 1)

    def turn(carry):  # feed the last token, draw the next
      i, going, state = carry
      need = jnp.where(going, jnp.clip(state.length + state.window.size - state.fed[:, m], 0, 1), 0)
      slot = state.fed[:, m] + 1 - state.length
      state, logits = feed(context, state, m, 1, need)
      if in_step:
        state = store_from_slot(context, state, m, logits, i)
      else:
        state = store_by_row(context, state, m, logits, slot, need)
      going = going & self._knows(state) & (i < budget)
      going, state = draw(context, state, m, logits[:, 0], going, i if in_step else None)
      return i + 1, going & (i + 1 < budget), state

    carry = jnp.int32(first), going, state
    # The compiler knows the length of the first loop, so that on a GPU the host reads no predicate. A draft of no token
    # feeds the last committed one too, for those who read the drafter's distribution after it.
    if isinstance(budget, int) and not context.policy.stops_early():
      last, _, state = lax.fori_loop(first, max(budget, 1), lambda _, carry: turn(carry), carry)
    else:
      last, _, state = lax.while_loop(lambda carry: carry[1].any(), turn, carry)
    drafted = state.window.size - before.window.size
    fed = state.fed[:, m] - before.fed[:, m]
    counts = state.stats.charge(m, drafted=drafted, calls=fed, positions=fed, computed=last - first)
    return state.replace(stats=counts)

  def _catch_up(self, context: Context, state: State) -> tuple[State, Array]:
    """Read the committed tokens that the model has not seen; return the logits [B, V] after the last."""
    m = self.model
    need = jnp.where(state.active, jnp.clip(state.length - state.fed[:, m], 0, self.catch_up), 0)
    called = (need > 0).astype(jnp.int32)
    state = state.replace(stats=state.stats.charge(m, calls=called, positions=need, computed=self.catch_up))
    state, logits = feed(context, state, m, self.catch_up, need)
    last = take1(logits, need - 1)
    return store_from_slot(context, state, m, last[:, None], 0), last

  def _knows(self, state: State) -> Array:
    """Return [B]: in which rows the model has computed the next distribution."""
    return state.fed[:, self.model] == state.length + state.window.size


@struct.dataclass
class Verify(Phase):
  """Test, in order, the pending tokens whose target is known; commit the accepted and at most one token more.

  The target is `combiner(logits of models)`. It is known as far as all of `models` have scored, and up to the first
  slot at which it is no distribution; a row that needs a token there ends as a fault. After a rejection one token
  follows from the residual; if all pending tokens were accepted and the target after them is known, one from it (the
  bonus token); else none. The other pending tokens are dropped, or, with `keep`, stay pending where none was rejected.
  """

  combiner: Combiner | Rule
  models: tuple[int, ...] = static()
  accept: Callable = tree_util.Partial(acceptance.token_wise)
  keep: bool = static(default=False)
  final_defers: bool = static(default=False)  # whether a token after the accepted ones is a deferral

  def __str__(self):
    name = rules.name_of(self.accept)
    acceptor = '' if name == 'token_wise' else f', {name}'
    return f'verify({rules.name_of(self.combiner)} of {self.models}{acceptor}{", keep" * self.keep})'

  @property
  def reads(self) -> tuple[int, ...] | None:
    more = acceptance.declaration(self.accept).reads
    return None if more is None else (*self.models, *more)

  @property
  def tests(self) -> tuple[int, ...]:
    return self.models

  @property
  def adds_logits(self) -> tuple[int, ...]:
    return self.models if rules.declaration(self.combiner).adds_logits else ()

  @property
  def by_round(self) -> bool:
    return acceptance.declaration(self.accept).by_round

  @property
  def exact(self) -> bool:
    return acceptance.declaration(self.accept).exact and not rules.declaration(self.combiner).by_slot

  def __call__(self, context: Context, state: State) -> State:
    w = state.window
    length = state.length
    width = w.source.shape[1]
    position = length[:, None] + iota(width)
    pending = take(state.tokens, position)
    if w.probs is None:  # all rows are greedy: each token was drawn from its own one-hot distribution
      w = w.replace(probs=jax.nn.one_hot(pending, w.vocab, dtype=jnp.float32))

    # 1. Targets. A model that has read n tokens beyond the last committed one knows the distributions of n + 1 slots.
    known = functools.reduce(jnp.minimum, [state.fed[:, m] for m in self.models]) - length + 1
    logits = jnp.stack([w.logits[m] for m in self.models])  # [M, B, W+1, V]
    sampler = sampler_for_window(state)
    target = rules.target(self.combiner, logits, sampler, iota(width + 1))
    pi = target.probs  # [B, W+1, V]
    sound = finite(logits).all(0)  # [B, W+1]
    if not target.certain:
      sound = sound & rules.is_distribution(pi)
    gives_distribution = jnp.minimum(known, acceptance.leading(sound))
    tested = jnp.where(state.active, jnp.clip(jnp.minimum(w.size, gives_distribution), 0), 0)

    # 2. Tests, in order, up to the first rejection.
    trial = acceptance.Trial(masked_window(context, w), pending, tested, pi, position, length, state.noise, sampler)
    verdict, noise = self.accept(trial)
    accepted = verdict.accepted
    rejected = accepted < tested

    # 3. One token more. The bonus token follows the target like every other token, so its slot has to be known as well.
    bonus = state.active & (accepted == w.size) & (gives_distribution > w.size)
    final = self.final(w, sampler, verdict, rejected)
    token, noise = noise.draw(final, length + accepted, FINAL, length)

    # 4. Commit. A row that needs a token where its target is no distribution ends as a fault.
    no_target = state.active & (accepted == gives_distribution) & (gives_distribution < known)
    scored = jnp.clip(known - 1, 0, w.size)
    deferred = iota(width + 1) == accepted[:, None] if self.final_defers else target.deferred
    round_ = stats.Round(scored, tested, accepted, rejected, rejected | bonus, token, deferred)
    state = self._commit(context, state.replace(noise=noise), round_)
    return self._end_faulty(state, no_target & ~state.done, logits, target, accepted)

  def _end_faulty(self, state: State, lost: Array, logits: Array, target: rules.Target, at: Array) -> State:
    """End rows whose next token, at a slot [B], has no distribution, and record why."""
    largest = jax.vmap(take1, (0, None))(logits.max(-1), at)  # [M, B]
    fault = state.fault
    fault_target = state.fault_target
    for m, x in zip(self.models, largest, strict=True):
      why = jnp.where(jnp.isnan(x), OWN, ASKED)
      fault = stats.with_column(fault, m, jnp.where(lost & ~jnp.isfinite(x), why, fault[:, m]))
    if not target.certain:
      by_target = lost & jnp.isfinite(largest).all(0)
      fault = stats.with_column(fault, -1, jnp.where(by_target, OWN, fault[:, -1]))
      sum_and_least = jnp.stack([take1(x, at) for x in (target.probs.sum(-1), target.probs.min(-1))], 1)
      fault_target = jnp.where(by_target[:, None], sum_and_least, fault_target)
    return state.replace(done=state.done | lost, active=state.active & ~lost, fault=fault, fault_target=fault_target)

  def final(self, w: Window, sampler, verdict: acceptance.Verdict, rejected: Array) -> Array:
    """Return what the token after the accepted ones is drawn from [B, V]: the residual, or the target.

    The target is computed again for this one slot, so that no second array of the window's size is alive.
    """
    at = verdict.accepted
    logits = jnp.stack([take1(w.logits[m], at) for m in self.models])  # [M, B, V]
    pi = rules.target(self.combiner, logits, sampler.at(at), at).probs
    q = take1(w.probs, at) * jnp.where(rejected, verdict.subtract, 0)[:, None]
    scale = jnp.where(rejected, verdict.scale, 1)[:, None]
    return jnp.where(rejected[:, None], sampling.residual(scale * pi, q), pi)

  def _commit(self, context: Context, state: State, r: stats.Round) -> State:
    """Append the accepted tokens and the one more; end rows at EOS and at their limit; count."""
    w = state.window
    length = state.length
    width = w.source.shape[1]
    slot = iota(width + 1)
    tokens = ops.put(state.tokens, length + r.accepted, r.token, r.more)
    new = take(tokens, length[:, None] + slot)  # [B, W+1]

    # An EOS inside the block ends the row there; so does its limit.
    emitted = r.accepted + r.more.astype(jnp.int32)
    ends = is_end(context, state, new) & (slot < emitted[:, None])
    emitted = jnp.where(ends.any(1), ends.argmax(1) + 1, emitted)
    emitted = jnp.minimum(emitted, state.limit - length)
    after = length + emitted

    # Rolling back is lowering `fed`: a slot beyond it is written again before it is seen.
    stay = self.keep & ~r.more
    valid = jnp.minimum(state.fed, jnp.minimum(length + r.accepted, after - 1)[:, None])
    valid = jnp.where(stay[:, None], state.fed, valid)
    if self.keep:
      w = jax.tree.map(lambda x: take(x, slot[:, : x.shape[1]] + r.accepted[:, None]) if x.ndim > 1 else x, w)
    left = jnp.where(stay, w.size - r.accepted, 0)

    live = state.active & (r.tested > 0)
    recorded = self._recorded(state.replace(window=masked_window(context, state.window)), r, new, emitted)
    return state.replace(
      tokens=tokens,
      length=after,
      done=state.done | ends.any(1) | (after >= state.limit),
      fed=jnp.where(state.active[:, None], valid, state.fed),
      window=w.replace(size=jnp.where(state.active, left, w.size)),
      policy=context.policy.update(state.policy, jnp.minimum(r.tested, r.accepted + 1), r.accepted, live, width),
      **recorded,
    )

  def _recorded(self, state: State, r: stats.Round, new: Array, emitted: Array) -> dict[str, Any]:
    """Return what is recorded of the first `emitted` [B] of the new tokens [B, W+1], where it is asked for."""
    fresh = iota(new.shape[1]) < emitted[:, None]
    span = dict(length=state.length, emitted=emitted)
    recorded = {'stats': r.count(state, emitted)}
    if state.seen is not None:
      recorded['seen'] = state.seen | (stats.tally(new, fresh, state.seen.shape[1]) > 0)
    if state.counts is not None:
      recorded['counts'] = state.counts + stats.tally(new, fresh, state.counts.shape[1])
    if state.logprobs is not None:
      recorded['logprobs'] = stats.record_logprobs(state.logprobs, state.window, state.fed, new=new, **span)
    if state.top is not None:
      recorded['top'] = stats.record_top(state.top, state.window.logits[self.models[-1]], **span)
    return recorded


@struct.dataclass
class Alternate(Phase):
  """Run the branch of the model that most rows want, the other rows idle: collaborative decoding's alternation.

  A row wants the model that has seen the fewest of its tokens, the lowest number on ties (Fu et al. 2025,
  Algorithm 2).
  """

  branches: tuple[tuple[Phase, ...], ...]

  def parts(self):
    return flat([phase for branch in self.branches for phase in branch])

  def rounds(self):
    return [some for branch in self.branches for some in rounds(branch)]

  def mapped(self, change):
    return self.replace(branches=tuple(mapped(change, branch) for branch in self.branches))

  def __str__(self):
    return 'alternate[' + ' | '.join(' · '.join(map(str, branch)) for branch in self.branches) + ']'

  def __call__(self, context: Context, state: State) -> State:
    wanted = jnp.argmin(state.fed, 1)  # a model that proposes has read its own tokens, so the others come next
    votes = jnp.sum((wanted[:, None] == iota(len(self.branches))) & state.active[:, None], 0)
    turn = jnp.argmax(votes)
    rows = state.active
    state = state.replace(active=rows & (wanted == turn))
    branches = [lambda s, b=branch: run(b, context, s) for branch in self.branches]
    state = context.backend.choose(turn, branches, state)
    return state.replace(active=rows & ~state.done)


def run(phases: tuple[Phase, ...], context: Context, state: State) -> State:
  """Run phases one after another."""
  for phase in phases:
    state = phase(context, state)
  return state
