"""The phases that every method is made of: `Propose`, `Score`, `Verify`, `Truncate`, `Wait`, and `Alternate`.

A phase maps (context, state) to a state. Its numbers that may change without compiling are pytree leaves; what shapes
the program is static. A row that is not `active` passes through unchanged, whatever the other rows of its batch do.
The `model` and `models` of a phase are slots of the method: slot s runs model `slots[s]`.

Axis letters: B batch, M models of a method, L new tokens, W window of pending tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
import functools

from flax import struct
import jax
from jax import lax, tree_util
import jax.numpy as jnp

from speccascade import acceptance, rules, sampling
from speccascade.backends.ops import take, take1, with_column
from speccascade.engine.facts import Notes, RowFacts, Untested
from speccascade.engine.feeding import (
  commit,
  draw,
  drawn_window,
  feed,
  finite,
  masked_window,
  process,
  read,
  store_by_row,
  store_from_slot,
)
from speccascade.engine.limits import Every, Limit
from speccascade.engine.lowering import flat, mapped, Phase, rounds
from speccascade.engine.state import Commit, Context, Fault, sampler_for_window, State
from speccascade.models.packing import coarse_widths, fine_widths, MOST, Packing
from speccascade.types import (
  Array,
  Combiner,
  FINAL,
  iota,
  NEGATIVE,
  Network,
  of_logits,
  Rule,
  static,
  SUM,
  Told,
  Window,
)

# ---- phases ----


@struct.dataclass
class Score(Phase):
  """Feed a model every pending token that it has not seen, so that it knows the distribution after each.

  `limit` bounds how many pending tokens are fed.

  The rest follows from the round. `widths` are the numbers of tokens per row that are compiled, ascending;
  where there are several, rows differ in their need. An `aligned` model has seen all committed tokens but the last in
  every row, so that its logits begin at the start of the window.
  """

  model: int = static()
  limit: Limit = Every()
  widths: tuple[int, ...] = static(default=())
  aligned: bool = static(default=False)

  def __str__(self):
    limit = '' if self.limit == Every() else f', {self.limit}'
    return f'score({self.model}{limit})'

  @property
  def calls(self) -> int:
    return int(self.widths != (0,))  # else its model has always read everything

  @property
  def feeds(self) -> int:
    return self.model

  @property
  def reads(self) -> tuple[int, ...] | None:
    return self.limit.reads

  @property
  def told(self) -> Told | None:
    return self.limit.told

  @property
  def coupled(self) -> bool:
    return self.limit.coupled

  def facts(self, row: RowFacts, notes: Notes) -> Iterable[RowFacts]:
    for count in self.limit.counts(row.pending):
      notes.feeds(row, self.model, count)
      after = row.reads(self.model, min(row.unread[self.model], -count))
      if row.leaves is not None:
        notes.leaves = True
        after = after.scores_leaves(self.model)
      yield after.chooses(notes.number, count) if self.limit.varies else after

  def lowered(self, notes: Notes) -> 'Score':
    most = notes.need
    if self.limit.fine:
      widths = fine_widths(most)
    else:
      widths = coarse_widths(most) if notes.varies else (most,)
    return self.replace(widths=widths, aligned=notes.aligned)

  def __call__(self, context: Context, state: State) -> State:
    if not self.calls:
      return state
    # A need of 0 leaves a row as it is: one that is not active, or all of whose pending tokens the model has read.
    need = state.length + self.limit.size(context, state) - state.fed[:, self.model]
    need = jnp.where(state.active, need, 0)
    need = jnp.clip(need, 0, self.widths[-1])
    return self._feed(context, state, need)

  def _feed(self, context: Context, state: State, need: Array) -> State:
    """Feed windows of the least width that covers the need [B], or, of several rows, packed to the least total."""
    rows = need.shape[0]
    m = self.model
    widest = self.widths[-1]
    sizes = context.backend.window_widths(rows, self.widths)  # each is a branch of the program
    leaves = state.window.leaves.scored_by(m)
    packs = len(sizes) > 1 and 1 < rows <= MOST and context.packs[m] and not leaves
    widths = jnp.array(sizes, jnp.int32)
    if packs:  # a window has as many tokens as the rows need together, which share its padding equally
      which = jnp.sum((need.sum() > widths[:-1] * rows).astype(jnp.int32))
      computed = need + (widths[which] * rows - need.sum() + jnp.arange(rows)) // rows
      windows = [(widest, [n * rows]) for n in sizes[:-1]] + [(widest, [])]
    else:  # a window is as wide as the row that needs most
      which = jnp.sum((need.max() > widths[:-1]).astype(jnp.int32))
      computed = widths[which]
      windows = [(n, []) for n in sizes]
    called = (need > 0).astype(jnp.int32)
    state = state.charge(m, calls=called, positions=need + leaves * called, computed=computed + leaves)

    def fed(state, width, totals):
      first = state.fed[:, m] + 1 - state.length  # the slot of the first output
      packing = [Packing.of(need, width, total) for total in totals]
      state, logits = feed(context, state, m, width, need, packing)
      if self.aligned:
        return store_from_slot(context, state, m, logits, 0)
      return store_by_row(context, state, m, logits, first, need)

    branches = [functools.partial(fed, width=width, totals=totals) for width, totals in windows]
    return branches[0](state) if len(branches) == 1 else context.backend.choose(which, branches, state)


@struct.dataclass
class Truncate(Phase):
  """Forget the pending tokens that a model has not read.

  A limit that looked at those tokens leaves them out for what they are, so the output is biased, which the limit says.
  """

  model: int = static()

  reads = ()
  told = Told.NOTHING

  def facts(self, row: RowFacts, notes: Notes) -> Iterable[RowFacts]:
    yield row.forgets(min(row.pending, max(-row.unread[self.model], 0)))

  def __str__(self):
    return f'truncate({self.model})'

  def __call__(self, context: Context, state: State) -> State:
    read = jnp.clip(state.fed[:, self.model] - state.length, 0, state.window.size)
    size = jnp.where(state.active, read, state.window.size)
    return state.replace(window=state.window.replace(size=size))


@struct.dataclass
class Wait(Phase):
  """Begin the next call only when that of a model has ended; without it the compiler may run both at once."""

  model: int = static()

  def __str__(self):
    return f'wait({self.model})'

  @property
  def reads(self) -> tuple[int, ...]:
    return (self.model,)

  told = Told.NOTHING

  def __call__(self, context: Context, state: State) -> State:
    tokens, _ = lax.optimization_barrier((state.tokens, state.window.logits[self.model][0, 0, 0]))
    return state.replace(tokens=tokens)


@struct.dataclass
class Propose(Phase):
  """Draw up to n tokens from the model's own distribution, each fed before the next is drawn; they become pending.

  The last token drawn is not fed: its distribution is known, and its test needs no more.

  `catch_up` follows from the round: the most committed tokens that the model has to read before it draws.
  With 1 that is the last committed token, which the loop's first turn feeds. After a round whose last token came from
  another model there are 2. With 0 the model has read everything, and other models' tokens may be pending.

  With `leaves`, of each token the next choices of the model are kept too, of the first `leaves[0]` in all and so on.
  The models that score the draft score them beside it, and if the token that follows a rejection is one of them, one
  token more follows at once: the distribution after it is known.

  `provisional` and `remembers` are those of the network. What is provisional the model reads again as soon as it is
  committed. A network that drafts in one pass makes it a `ProposeInOnePass`.
  """

  model: int = static()
  n: int = static()
  catch_up: int = static(default=1)
  leaves: tuple[int, ...] = static(default=())
  provisional: bool = static(default=False)
  remembers: bool = static(default=False)

  def __str__(self):
    leaves = ', of ' + '·'.join(map(str, self.leaves)) if self.leaves else ''
    return f'propose({self.model}, {self.n}{leaves})'

  @property
  def draws(self) -> int:
    return self.n

  told = Told.NOTHING

  @property
  def feeds(self) -> int:
    return self.model

  @property
  def calls(self) -> int:
    return self.n - (self.catch_up == 0)  # a model that has read everything knows the distribution of its first token

  @property
  def turns(self) -> int:
    """The most turns of the loop over calls."""
    return self.n - (self.catch_up != 1)

  @property
  def reads(self) -> tuple[int, ...]:
    return () if self.catch_up else (self.model,)

  def for_networks(self, networks: Sequence[Network]) -> 'Propose':
    network = networks[self.model]
    if network.mask_token is not None:
      return ProposeInOnePass(self.model, self.n, leaves=self.leaves, mask_token=network.mask_token)
    return self.replace(provisional=network.provisional, remembers=network.remembers)

  def facts(self, row: RowFacts, notes: Notes) -> Iterable[RowFacts]:
    unread = row.unread[self.model]
    knows = unread == -row.pending
    notes.behind |= knows or row.pending > 0
    sits_out = not knows and (notes.goes_on or row.pending > 0)
    if sits_out or row.closed:
      yield row
    if sits_out:
      return
    notes.needs.add(max(unread, 0))
    varies = notes.drafts_vary
    for count in range(self.n + 1):
      for closed in (False, True):
        if (count == self.n or varies) if not closed else count > 0:
          notes.drafted = max(notes.drafted, count)
          # The last token that was drawn is not fed, but where the policy ended the draft before another.
          for read in {count, max(count - 1, 0)} if varies and not closed else {max(count - 1, 0)}:
            read = 0 if self.reads_again else row.pending + read
            drafted = row.reads(self.model, -read).drafts(count, closed)
            yield drafted._replace(leaves=()) if self.leaves else drafted

  def lowered(self, notes: Notes) -> 'Propose':
    if notes.reached and (not notes.drafted or notes.goes_on and self.reads_again):
      unread = f'tokens that slot {self.model} has not read; put score({self.model}) before it'
      raise ValueError(f'{self} drafts behind {unread}.')
    if self.leaves and notes.goes_on:
      raise ValueError(f'{self} has leaves and drafts behind pending tokens: leave them out.')
    if self.leaves and not (len(self.leaves) <= self.n and self.leaves[-1] > 1):
      raise ValueError(f'{self}: give choices at {self.n} places at most, the last of them 2 or more, as in (3, 2).')
    return self.replace(catch_up=0 if notes.goes_on else notes.need)

  @property
  def redraws(self) -> bool:
    return self.reads_again or self.remembers

  @property
  def reads_again(self) -> bool:
    """Whether the model has to read the drafted tokens again once they are committed."""
    return self.provisional

  def __call__(self, context: Context, state: State) -> State:
    budget = context.policy.length(state.policy, self.n)
    budget = min(budget, self.n) if isinstance(budget, int) else jnp.minimum(budget, self.n)
    return self.draft(context, state, budget)

  def draft(self, context: Context, state: State, budget: Array | int) -> State:
    """Draw as many tokens as the policy allows."""
    state, logits = self._first_logits(context, state)
    before = state
    first = 0
    going = state.active  # rows whose draft goes on
    if logits is not None:  # the first token needs no turn of the loop
      going = going & self._knows(state) & (budget > 0)
      going, state = draw(context, state, self.model, logits, going, 0 if self.in_step else None)
      first = 1
      going = going & (budget > 1)
    turn = functools.partial(self._turn, context, budget)
    carry = jnp.int32(first), going, state
    # The compiler knows the length of the first loop, so that on a GPU the host reads no predicate. A draft of no token
    # feeds the last committed one too, for those who read the drafter's distribution after it.
    if isinstance(budget, int) and not context.policy.stops_early():
      last, _, state = lax.fori_loop(first, max(budget, 1), lambda _, carry: turn(carry), carry)
    else:
      last, _, state = lax.while_loop(lambda carry: carry[1].any(), turn, carry)
    drafted = state.window.size - before.window.size
    fed = state.fed[:, self.model] - before.fed[:, self.model]
    state = self._forgotten(state) if self.provisional else state
    return state.charge(self.model, drafted=drafted, calls=fed, positions=fed, computed=last - first)

  def _forgotten(self, state: State) -> State:
    """Return a state in which the model has read what is committed, and nothing behind it."""
    fed = jnp.where(state.active, state.length, state.fed[:, self.model])
    return state.replace(fed=with_column(state.fed, self.model, fed))

  @property
  def in_step(self) -> bool:
    """Whether nothing is pending before, so that the slot of a token is the same in all rows that are going."""
    return self.catch_up > 0

  def _first_logits(self, context: Context, state: State) -> tuple[State, Array | None]:
    """Return the logits [B, V] after the last token, None where the loop's first turn computes them."""
    if self.catch_up == 1:
      return state, None
    if not self.catch_up:  # an earlier phase has computed them
      return state, take1(state.window.logits[self.model], state.window.size)
    need = jnp.where(state.active, jnp.clip(state.length - state.fed[:, self.model], 0, self.catch_up), 0)
    called = (need > 0).astype(jnp.int32)
    state = state.charge(self.model, calls=called, positions=need, computed=self.catch_up)
    state, logits = feed(context, state, self.model, self.catch_up, need)
    last = take1(logits, need - 1)
    return store_from_slot(context, state, self.model, last[:, None], 0), last

  def _turn(self, context: Context, budget: Array | int, carry: tuple) -> tuple:
    """Feed the last token, and draw the next."""
    i, going, state = carry
    m = self.model
    need = jnp.where(going, jnp.clip(state.length + state.window.size - state.fed[:, m], 0, 1), 0)
    slot = state.fed[:, m] + 1 - state.length
    state, logits = feed(context, state, m, 1, need)
    if self.in_step:
      state = store_from_slot(context, state, m, logits, i)
    else:
      state = store_by_row(context, state, m, logits, slot, need)
    going = going & self._knows(state) & (i < budget)
    going, state = draw(context, state, m, logits[:, 0], going, i if self.in_step else None)
    return i + 1, going & (i + 1 < budget), state

  def _knows(self, state: State) -> Array:
    """Return [B]: in which rows the model has computed the next distribution."""
    return state.fed[:, self.model] == state.length + state.window.size


@struct.dataclass
class ProposeInOnePass(Propose):
  """Draw up to n tokens from one call, each from a distribution that does not know those before it.

  So no target can read it. The model is fed `mask_token` in the place of tokens that are not drawn yet, and what that
  has written it reads again as soon as tokens are committed.
  """

  mask_token: int = static(default=0)

  calls = 1
  turns = 1
  reads_again = True

  def __str__(self):
    return f'{super().__str__()[:-1]} in one pass)'

  @property
  def beyond(self) -> int:
    return self.catch_up + self.n - 2

  def draft(self, context: Context, state: State, budget: Array | int) -> State:
    """Feed what was committed and masks behind it, and draw every token from the logits of this one call."""
    m = self.model
    before = state
    unread = state.length - state.fed[:, m]
    need = jnp.where(state.active, unread + self.n - 1, 0)
    width = self.catch_up + self.n - 1
    tokens = jnp.where(iota(state.tokens.shape[1]) < state.length[:, None], state.tokens, self.mask_token)
    state, logits = read(context, state, m, tokens, width, need)  # not as the requests want it: no text is complete
    state = self._forgotten(state)
    logits = take(logits, jnp.clip(unread[:, None] - 1 + iota(self.n), 0, width - 1))

    def turn(i, carry):
      going, state = carry
      now = lax.dynamic_slice_in_dim(logits, i, 1, 1)
      if (corrected := context.corrected[m]) is not None:
        now = corrected(now[:, 0], take1(state.tokens, state.length + i - 1))[:, None]
      now = process(context, state, now, (state.length + i - 1)[:, None], state.tokens[:, None])
      state = store_from_slot(context, state, m, now, i)
      return draw(context, state, m, now[:, 0], going & (i < budget), i)

    _, state = lax.fori_loop(0, self.n, turn, (state.active, state))
    called = (need > 0).astype(jnp.int32)
    drafted = state.window.size - before.window.size
    return state.charge(m, drafted=drafted, calls=called, positions=need, computed=width)


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
  def told(self) -> Told | None:
    told = acceptance.declaration(self.accept).told
    return told if told is None or not rules.declaration(self.combiner).by_slot else told | Told.PLACE

  @property
  def follows(self) -> bool | None:
    return acceptance.declaration(self.accept).exact

  def facts(self, row: RowFacts, notes: Notes) -> Iterable[RowFacts]:
    known = 1 - max(row.unread[m] for m in self.models)
    tested = max(min(row.pending, known), 0)
    for accepted in range(tested):
      yield row.commits(accepted, 1)
      if row.leaves is not None:
        yield row.commits_leaf(accepted, (m for m in self.models if m not in row.leaves))
    if row.closed and tested == row.pending:
      return  # the text has ended
    more = int(known > row.pending)
    if row.dropped or tested < row.pending:
      notes.untested |= {Untested(number, tested - count, bool(more)) for number, count in row.chosen}
    yield row.commits(tested, more, self.keep)

  def __call__(self, context: Context, state: State) -> State:
    w = drawn_window(state)
    sampler = sampler_for_window(state)
    slots = iota(w.source.shape[1] + 1)

    # 1. Targets. A model that has read n tokens beyond the last committed one knows the distributions of n + 1 slots.
    known = functools.reduce(jnp.minimum, [state.fed[:, m] for m in self.models]) - state.length + 1
    logits = jnp.stack([w.logits[m] for m in self.models])  # [M, B, W+1, V]
    before = rules.Prefix(state.tokens, state.length[:, None] + slots)
    target = rules.target(self.combiner, logits, sampler, slots, before)
    usable = jnp.minimum(known, acceptance.leading(self.lawful(logits, target)))  # [B] slots

    # 2. Tests, in order, up to the first rejection.
    tested = jnp.where(state.active, jnp.clip(jnp.minimum(w.size, usable), 0), 0)
    position = state.length[:, None] + slots[:, :-1]
    pending = take(state.tokens, position)
    window = masked_window(context, w)
    trial = acceptance.Trial(
      window, pending, tested, target.probs, position, state.length, state.noise, sampler, self.models
    )
    verdict, noise = self.accept(trial)
    accepted = jnp.clip(verdict.accepted, 0, tested)  # whatever an acceptor of one's own says
    verdict = verdict._replace(accepted=accepted)
    rejected = accepted < tested

    # 3. One token more. The bonus token follows the target like every other token, so its slot has to be known as well.
    bonus = state.active & (accepted == w.size) & (usable > w.size)
    token = verdict.token
    if token is None:
      final = self.final(w, sampler, verdict, rejected, before._replace(length=state.length + accepted))
      token, noise = noise.draw(final, state.length + accepted, FINAL, state.length)

    # 4. Commit. A row that needs a token where its target is no distribution ends as a fault.
    scored = jnp.clip(known - 1, 0, w.size)
    deferred = self.deferred(target, slots, accepted[:, None])
    outcome = Commit(
      scored, tested, accepted, rejected, rejected | bonus, token, deferred, self.models[-1], target.probs
    )
    state, outcome = state.window.leaves.go_on(self, context, state.replace(noise=noise), outcome)
    after = commit(context, state, outcome, keep=self.keep)
    lost = state.active & (accepted == usable) & (usable < known) & ~after.done
    now = jax.tree.map(lambda new, old: jnp.where(lost, new, old), self._fault(logits, target, accepted), after.fault)
    return after.replace(done=after.done | lost, active=after.active & ~lost, fault=now)

  def deferred(self, target: rules.Target, slot: Array, accepted: Array) -> Array | None:
    """Return whether the rule deferred at slots of a target; None where it makes no decision."""
    return slot == accepted if self.final_defers else target.deferred

  def lawful(self, logits: Array, target: rules.Target) -> Array:
    """Return where the target of logits [M, …, V] is a distribution […]."""
    lawful = finite(logits).all(0)
    return lawful if target.normalized else lawful & rules.is_distribution(target.probs)

  def _fault(self, logits: Array, target: rules.Target, at: Array) -> Fault:
    """Return why the target of logits [M, B, W+1, V] is no distribution at a slot [B] of each row."""
    why = jnp.full(at.shape, SUM, jnp.int32)
    value = jnp.zeros(at.shape)
    if not target.normalized:
      total, least = (take1(x, at) for x in (target.probs.sum(-1), target.probs.min(-1)))
      negative = least < -rules.ROUNDING
      why = jnp.where(negative, NEGATIVE, SUM)
      value = jnp.where(negative, least, total)
    largest = jax.vmap(take1, (0, None))(logits.max(-1), at)  # [M, B]
    for m, x in reversed([*zip(self.models, largest, strict=True)]):
      by_request = (~jnp.isnan(x)).astype(jnp.int32)  # NaN marks logits that made no distribution before
      why = jnp.where(jnp.isfinite(x), why, of_logits(m, by_request))
    return Fault(why, value)

  def final(self, w: Window, sampler, verdict: acceptance.Verdict, rejected: Array, before: rules.Prefix) -> Array:
    """Return what the token after the accepted ones is drawn from [B, V]: the residual, or the target.

    The target is computed again for this one slot, so that no second array of the window's size is alive.
    """
    at = verdict.accepted
    logits = jnp.stack([take1(w.logits[m], at) for m in self.models])  # [M, B, V]
    pi = rules.target(self.combiner, logits, sampler.at(at), at, before).probs
    q = take1(w.probs, at) * jnp.where(rejected, verdict.subtract, 0.0)[:, None]
    scale = jnp.where(rejected, verdict.scale, 1.0)[:, None]
    return jnp.where(rejected[:, None], sampling.residual(scale * pi, q), pi)


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

  def only(self, slots):
    fed = [{phase.feeds for phase in flat(branch) if phase.feeds is not None} for branch in self.branches]
    if mixed := [some for some in fed if some & {*slots} and some - {*slots}]:
      raise ValueError(f'it feeds the models {sorted(mixed[0])} in one turn')
    return self.replace(branches=tuple(b if f <= {*slots} else () for b, f in zip(self.branches, fed, strict=True)))

  def run(self, run, rows, number):
    after = set(rows)  # a row waits where most want another turn
    for turn, branch in enumerate(self.branches):
      mine = {row for row in rows if max(range(len(row.unread)), key=lambda m: row.unread[m]) == turn}
      first = number
      ran, number = run.through(branch, mine, number)
      after |= ran
      others = rows - mine
      needed = any(row.pending or min(row.unread) < 1 for row in others)
      for notes in run.notes[first:number]:
        notes.waits |= bool(others)
        notes.beside |= needed
    return after, number

  def mapped(self, change):
    return self.replace(branches=tuple(mapped(change, branch) for branch in self.branches))

  def __str__(self):
    return 'alternate[' + ' | '.join(' · '.join(map(str, branch)) for branch in self.branches) + ']'

  def __call__(self, context: Context, state: State) -> State:
    least = jnp.argmin(state.fed, 1)  # a model that proposes has read its own tokens, so the others come next
    votes = jnp.sum((least[:, None] == iota(len(self.branches))) & state.active[:, None], 0)
    turn = jnp.argmax(votes)
    rows = state.active
    state = state.replace(active=rows & (least == turn))
    branches = [lambda s, b=branch: run(b, context, s) for branch in self.branches]
    state = context.backend.choose(turn, branches, state)
    return state.replace(active=rows & ~state.done)


def run(phases: tuple[Phase, ...], context: Context, state: State) -> State:
  """Run phases one after another, each under its name in the compiled program."""
  for phase in phases:
    slot = '' if phase.feeds is None else f'_{phase.feeds}'
    with jax.named_scope(type(phase).__name__.lower() + slot):
      state = phase(context, state)
  return state
