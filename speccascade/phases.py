"""The phases that every method is made of: `Score`, `Propose`, `Verify`; `Elect` and `BySize` choose among phases.

A phase maps (context, state) to a state. Its numbers that may change without compiling are pytree leaves; what shapes
the program is static. A row that is not `active` passes through unchanged, whatever its batch mates do.
"""

from collections.abc import Callable
import functools

from flax import struct
import jax
from jax import lax, tree_util
import jax.numpy as jnp

from speccascade import acceptance, backends, layout, packing, probs, rules, scheduling
from speccascade.types import (
  Array,
  ASKED,
  BONUS,
  Combiner,
  Context,
  DRAFT,
  FINAL,
  OWN,
  Phase,
  places,
  RESIDUAL,
  State,
  take,
  take1,
  Top,
)


def _static(**kwargs):
  return struct.field(pytree_node=False, **kwargs)


def _feed(context: Context, state: State, m: int, width: int, need: Array, total: int | None = None,
          slot: Array | int | None = None, last: bool = False) -> tuple[State, Array]:  # fmt: skip
  """Feed model m the `need` [B] next tokens of each row and note the logits after them, which are returned as well.

  Windows are padded to `width` or, where a total is given, packed to so many tokens of the batch. Where a slot is
  given, the logits of every row are noted from that slot on, what lies beyond its tokens too; or those after its `last`
  token alone.
  """
  w = state.window
  position = state.fed[:, m][:, None] + places(width)
  c = context.cache_of[m]
  packed = None if total is None else packing.Packing.of(need, width, total)
  with packing.use(packed):
    logits, cache = context.extend[m](state.caches[c], take(state.tokens, position), position)
  if logits.shape[:2] != position.shape:  # a network may leave its windows as they are
    logits = packed.unpack(logits)
  logits = layout.computed(logits, m)[..., : w.logits[m].shape[-1]]
  logits = _process(context, state, logits.astype(jnp.float32), position)
  state = state.replace(
    fed=_column(state.fed, m, state.fed[:, m] + need),
    caches=state.caches[:c] + (cache,) + state.caches[c + 1 :],
  )
  logits = layout.as_head(logits, m)
  # The first output is the law of position fed + 1, whose slot is fed + 1 - length.
  first = position[:, 0] + 1 - state.length
  if slot is not None:
    window = lax.dynamic_update_slice_in_dim(w.logits[m], take1(logits, need - 1)[:, None] if last else logits, slot, 1)
  elif width == 1:
    window = backends.current().put(w.logits[m], first, logits[:, 0], (need > 0) & (first >= 0))
  else:
    j = places(w.logits[m].shape[1]) - first[:, None]
    new = (j >= 0) & (j < need[:, None])
    window = jnp.where(new[..., None], take(logits, jnp.clip(j, 0, width - 1)), w.logits[m])
  window = layout.as_head(window, m)
  return state.replace(window=w.replace(logits=w.logits[:m] + (window,) + w.logits[m + 1 :])), logits


def _process(context: Context, state: State, logits: Array, position: Array) -> Array:
  """Return the logits [B, L, V] of the tokens after `position` [B, L] as the requests want every model's.

  Where these are no law the number says why: it is NaN if the model's own were none, else an infinity.
  """
  limits = state.limits
  if limits.bias is None and limits.least is None and context.processor is None:
    return logits
  own = _finite(logits)[..., None]
  if limits.bias is not None:
    logits = logits + limits.bias[:, None]
  if limits.least is not None:
    early = (position + 1 < limits.least[:, None])[..., None]
    logits = jnp.where(early & _ends_a_row(context, state, logits.shape[-1])[:, None], -jnp.inf, logits)
  if context.processor is not None:
    by_slot = jax.vmap(context.processor, (0, None, 0))
    logits = jax.vmap(by_slot)(logits, state.tokens, position + 1).astype(jnp.float32)
  return jnp.where(own, jnp.where(jnp.isnan(logits), jnp.inf, logits), jnp.nan)


def _finite(logits: Array) -> Array:
  """Return [...]: whether the largest of logits [..., V] is finite: none is NaN or +inf, nor all -inf."""
  return jnp.isfinite(logits.max(-1))


def _ends_a_row(context: Context, state: State, vocab: int) -> Array:
  """Return [B, V]: which tokens end a row."""
  tokens = jnp.broadcast_to(places(vocab), (state.length.shape[0], vocab))
  return _is_end(context, state, tokens)


def _is_end(context: Context, state: State, tokens: Array) -> Array:
  """Return which of the tokens [B, ...] end their row: EOS, and what its request stops at."""
  ends = functools.reduce(jnp.logical_or, [tokens == i for i in context.eos_ids], jnp.zeros(tokens.shape, bool))
  stops = state.limits.stop_ids
  for k in range(stops.shape[1]):
    ends = ends | (tokens == stops[:, k].reshape((-1,) + (1,) * (tokens.ndim - 1)))
  return ends


def _charge(state: State, m: int, **counts: Array | int) -> State:
  """Add to the statistics of model m, each count [B] or one for all rows."""
  s = state.stats
  return state.replace(stats=s.replace(**{k: _column(x := getattr(s, k), m, x[:, m] + n) for k, n in counts.items()}))


def _column(x: Array, m: int, value: Array) -> Array:
  """Return x [B, M] with its column m set to value [B]."""
  return jnp.where(places(x.shape[1]) == m % x.shape[1], value[:, None], x)


@struct.dataclass
class Score:
  """Feed a model every pending token that it has not seen, so that it knows the law after each.

  `widths` are the tokens a row to compile for, ascending. Where there are several, rows differ in their need: one row's
  window has the smallest width that holds it, those of a batch are packed to so many tokens a row on average; where the
  backend gains nothing by either, for so few tokens, all have the widest. `limit` bounds how many pending tokens are
  fed; `drop` forgets the others. `after` is a model whose call must end first.
  A `level` model has seen every committed token but the last in each row, so that its logits begin at slot 0. Such are
  the models of a `Verify` without `keep`.
  """

  model: int = _static()
  widths: tuple[int, ...] = _static()
  limit: Callable[[Context, State], Array] | None = None
  drop: bool = _static(default=False)
  after: int | None = _static(default=None)
  level: bool = _static(default=False)

  def __str__(self):
    return f'score({self.model})' if self.limit is None else f'score({self.model}, {self.limit}{", drop" * self.drop})'

  def __call__(self, context: Context, state: State, last: bool = False) -> State:
    """Feed, and note the logits after each token; with `last`, where nothing is pending, those after the last alone."""
    size = state.window.size
    if self.limit is not None:
      size = jnp.where(state.active, self.limit(context, state), size)
    if self.drop:
      state = state.replace(window=state.window.replace(size=size))
    if self.after is not None:
      tokens, _ = lax.optimization_barrier((state.tokens, state.window.logits[self.after][0, 0, 0]))
      state = state.replace(tokens=tokens)
    need = jnp.where(state.active, state.length + size - state.fed[:, self.model], 0)
    need = jnp.clip(need, 0, self.widths[-1])
    rows = need.shape[0]
    many = rows * self.widths[-1] >= backends.current().pack_from
    sizes = self.widths if many else self.widths[-1:]
    packs = 1 < rows <= packing.MOST and len(sizes) > 1
    widths = jnp.array(sizes, jnp.int32)
    over = need.sum() > widths[:-1] * rows if packs else need.max() > widths[:-1]
    which = jnp.sum(over.astype(jnp.int32))
    computed = need + _shared(widths[which] * rows - need.sum(), rows) if packs else widths[which]
    state = _charge(state, self.model, calls=(need > 0).astype(jnp.int32), positions=need, computed=computed)

    noted = dict(slot=0 if self.level or last else None, last=last)

    def feed(state, width):
      if packs and width < sizes[-1]:
        return _feed(context, state, self.model, self.widths[-1], need, width * rows, **noted)[0]
      return _feed(context, state, self.model, width, need, **noted)[0]

    branches = [functools.partial(feed, width=n) for n in sizes]
    return branches[0](state) if len(branches) == 1 else backends.current().choose(which, branches, state)


def _shared(n: Array, rows: int) -> Array:
  """Return n in as equal parts as can be: [B]."""
  return (n + jnp.arange(rows)) // rows


@struct.dataclass
class Propose:
  """Draw up to n tokens from the model's own law, each fed before the next is drawn; they become pending.

  The model first catches up, in a window of one of `widths`, and nothing is pending yet; with no widths it has seen
  every token, and some may be. The last token drawn is not fed: its law is known, and its test needs no more.
  """

  model: int = _static()
  n: int = _static()
  widths: tuple[int, ...] = _static(default=(1,))

  def __str__(self):
    return f'propose({self.model}, {self.n})'

  def __call__(self, context: Context, state: State) -> State:
    before, budget = state, context.policy.length(state.policy, self.n)
    budget = min(budget, self.n) if isinstance(budget, int) else jnp.minimum(budget, self.n)
    first, going = 0, state.active
    if self.widths != (1,):  # a window of one is the loop's first turn
      if self.widths:
        state = before = Score(self.model, self.widths)(context, state, last=True)
      laws = state.window.logits[self.model]
      law = laws[:, 0] if self.widths else take1(laws, state.window.size)
      going, state = self.draw(context, state, law, going & self._knows(state) & (budget > 0), 0)
      first, going = 1, going & (budget > 1)

    def turn(carry):
      i, going, state = carry
      need = state.length + state.window.size - state.fed[:, self.model]
      need = jnp.where(going, jnp.clip(need, 0, 1), 0)
      state, logits = _feed(context, state, self.model, 1, need, slot=i if self.widths else None)
      going, state = self.draw(context, state, logits[:, 0], going & self._knows(state) & (i < budget), i)
      return i + 1, going & (i + 1 < budget), state

    carry = jnp.int32(first), going, state
    if isinstance(budget, int) and not context.policy.stops_early():
      last, _, state = lax.fori_loop(first, budget, lambda _, carry: turn(carry), carry)
    else:
      last, _, state = lax.while_loop(lambda carry: carry[1].any(), turn, carry)
    drafted, fed = state.window.size - before.window.size, state.fed[:, self.model] - before.fed[:, self.model]
    return _charge(state, self.model, drafted=drafted, calls=fed, positions=fed, computed=last - first)

  def _knows(self, state: State) -> Array:
    """Return which rows' next law the model has computed."""
    return state.fed[:, self.model] == state.length + state.window.size

  def draw(self, context: Context, state: State, logits: Array, going: Array, turn: Array | int) -> tuple[Array, State]:
    """Draw a token in each row that is going and does not stop before it; return the rows that go on after it."""
    w = state.window
    end = state.length + w.size
    sampler = probs.at_window(state).at(w.size)
    going = going & (end < state.limit) & _finite(logits) & ~context.policy.before(logits, sampler)
    q = layout.as_head(sampler(logits), self.model)
    token, noise = state.noise.draw(q, end, DRAFT, state.length)
    put = backends.current().put
    if self.widths:  # the slot is the same in all rows that are going, and what the others have there means nothing
      note = lambda x, new: lax.dynamic_update_slice_in_dim(x, new[:, None], turn, 1)
    else:
      note = lambda x, new: put(x, w.size, new, going)
    state = state.replace(
      tokens=put(state.tokens, end, token, going),
      window=w.replace(
        size=w.size + going.astype(jnp.int32),
        probs=None if w.probs is None else note(w.probs, q),
        source=note(w.source, jnp.full_like(end, self.model)),
      ),
      noise=noise,
    )
    doubtful = context.policy.after(probs.at_token(sampler.soft(logits, q), token))
    return going & ~(doubtful | _is_end(context, state, token) | (end + 1 >= state.limit)), state


@struct.dataclass
class Verify:
  """Test, in order, the pending tokens whose target is known; commit the accepted and at most one token more.

  The target is `combiner(logits of models)`. It is known as far as all of `models` have scored, and up to the first
  place at which it is no law; a row that needs a token there ends as a fault. After a rejection one
  token follows from the residual; if all pending tokens were accepted and the target after them is known, one from it
  (the bonus token); else none. The other pending tokens are dropped, or, with `keep`, stay where none was rejected.
  """

  combiner: Combiner
  models: tuple[int, ...] = _static()
  accept: Callable = tree_util.Partial(acceptance.token_wise)
  defer: Callable | None = None  # the rule's decision, for the count of deferrals
  keep: bool = _static(default=False)

  def __str__(self):
    name = rules.name_of(self.accept)
    how = '' if name == 'token_wise' else f', {name}'
    rule = self.combiner.keywords.get('rule', self.combiner)
    return f'verify({rules.name_of(rule)} of {self.models}{how}{", keep" * self.keep})'

  def __call__(self, context: Context, state: State) -> State:
    w, length = state.window, state.length
    width = w.source.shape[1]
    known = functools.reduce(jnp.minimum, [state.fed[:, m] for m in self.models]) - length + 1
    scored = jnp.clip(known - 1, 0, w.size)
    position = length[:, None] + places(width)
    pending = take(state.tokens, position)
    if w.probs is None:
      w = w.replace(probs=jax.nn.one_hot(pending, w.logits[0].shape[-1], dtype=jnp.float32))
    logits = jnp.stack([w.logits[m] for m in self.models])  # [M, B, W+1, V]
    sampler = probs.at_window(state)
    pi = self.combiner(logits, sampler=sampler)
    lawful = jnp.minimum(known, acceptance.leading(self._laws(logits, pi)))
    tested = jnp.where(state.active, jnp.clip(jnp.minimum(w.size, lawful), 0), 0)
    trial = acceptance.Trial(w, pending, tested, pi, position, length, state.noise, sampler)
    verdict, noise = self.accept(trial)
    kept = verdict.kept
    rejected = kept < tested
    more = rejected | (state.active & (kept == w.size) & (lawful > w.size))
    final = self.final(logits, sampler, w, verdict, rejected)
    token, noise = noise.draw(final, length + kept, FINAL, length)
    state = state.replace(noise=noise)
    deferred = self._deferred(logits, sampler)
    lost = state.active & (kept == lawful) & (lawful < known)
    state = self._commit(context, state, scored, tested, kept, more, rejected, token, deferred)
    return self._lose(state, lost & ~state.done, logits, pi, kept)

  def _laws(self, logits: Array, pi: Array) -> Array:
    """Return [B, W+1]: whether the logits [M, B, W+1, V] and the target are laws."""
    sound = _finite(logits).all(0)
    return sound if rules.lawful(self.combiner) else sound & rules.is_law(pi)

  def _lose(self, state: State, lost: Array, logits: Array, pi: Array, at: Array) -> State:
    """End rows whose next token, at a slot [B], has no law, and note why."""
    largest, fault, no_law = jax.vmap(take1, (0, None))(logits.max(-1), at), state.fault, state.no_law
    for m, x in zip(self.models, largest, strict=True):
      why = jnp.where(jnp.isnan(x), OWN, ASKED)
      fault = _column(fault, m, jnp.where(lost & ~jnp.isfinite(x), why, fault[:, m]))
    if not rules.lawful(self.combiner):
      by_target = lost & jnp.isfinite(largest).all(0)
      fault = _column(fault, -1, jnp.where(by_target, OWN, fault[:, -1]))
      found = jnp.stack([take1(x, at) for x in (pi.sum(-1), pi.min(-1))], 1)
      no_law = jnp.where(by_target[:, None], found, no_law)
    return state.replace(done=state.done | lost, active=state.active & ~lost, fault=fault, no_law=no_law)

  def final(self, logits, sampler, w, verdict, rejected) -> Array:
    """Return what the token after the accepted ones is drawn from. Only its position's target is computed again."""
    at = verdict.kept
    pi = self.combiner(jax.vmap(take1, (0, None))(logits, at), sampler=sampler.at(at))
    q = take1(w.probs, at) * jnp.where(rejected, verdict.subtract, 0)[:, None]
    scale = jnp.where(rejected, verdict.scale, 1)[:, None]
    return jnp.where(rejected[:, None], probs.residual(scale * pi, q), pi)

  def _deferred(self, logits, sampler) -> Array | int:
    if self.defer is None:
      return 0
    rest = {'rest': sampler(logits[1])} if rules.takes(self.defer, 'rest') else {}
    return self.defer(logits[0], logits[1], sampler=sampler, **rest).astype(jnp.int32)

  def _commit(self, context, state, scored, tested, kept, more, rejected, token, deferred) -> State:
    """Append the kept tokens and the one more; end rows at EOS and at their limit; count."""
    w, length = state.window, state.length
    width = w.source.shape[1]
    slot = places(width + 1)
    tokens = backends.current().put(state.tokens, length + kept, token, more)
    emitted = kept + more.astype(jnp.int32)
    new = take(tokens, length[:, None] + slot)
    ends = _is_end(context, state, new) & (slot < emitted[:, None])
    emitted = jnp.where(ends.any(1), ends.argmax(1) + 1, emitted)
    emitted = jnp.minimum(emitted, state.limit - length)
    after = length + emitted
    origin = jnp.where(rejected, RESIDUAL, BONUS)[:, None]
    origin = jnp.where(slot < kept[:, None], jnp.pad(w.source, ((0, 0), (0, 1))), origin)
    stats = _count(state, scored, tested, kept, emitted, origin, deferred)
    stay = self.keep & ~more
    valid = jnp.minimum(state.fed, jnp.minimum(length + kept, after - 1)[:, None])
    valid = jnp.where(stay[:, None], state.fed, valid)
    if self.keep:
      w = jax.tree.map(lambda x: take(x, slot[:, : x.shape[1]] + kept[:, None]) if x.ndim > 1 else x, w)
    live = state.active & (tested > 0)
    fresh = slot < emitted[:, None]
    return state.replace(
      tokens=tokens,
      length=after,
      done=state.done | ends.any(1) | (after >= state.limit),
      fed=jnp.where(state.active[:, None], valid, state.fed),
      window=w.replace(size=jnp.where(state.active, jnp.where(stay, w.size - kept, 0), w.size)),
      policy=context.policy.update(state.policy, jnp.minimum(tested, kept + 1), kept, live, width),
      seen=None if state.seen is None else state.seen | (_tally(new, fresh, state.seen.shape[1]) > 0),
      counts=None if state.counts is None else state.counts + _tally(new, fresh, state.counts.shape[1]),
      stats=stats,
      logprobs=None if state.logprobs is None else _note(state, new, emitted),
      top=None if state.top is None else _note_top(state, self.models[-1], emitted),
    )


def _count(state: State, scored, tested, kept, emitted, origin, deferred):
  """Add a verification to the statistics, leaving out what lies after a row's end."""
  s = state.stats
  width = state.window.source.shape[1]
  place = places(width)
  reached = jnp.minimum(jnp.minimum(tested, kept + 1), emitted)[:, None]  # tests up to the first failure
  accepted = jnp.minimum(kept, emitted)[:, None]
  slot, fresh = _fresh(state, s.source.shape[1], emitted)
  round_ = state.active & (emitted > 0)
  lengths, verified = places(width + 1) == accepted, places(width + 1) == scored[:, None]
  return s.replace(
    rounds=s.rounds + round_.astype(jnp.int32),
    tested=s.tested + reached[:, 0],
    accepted=s.accepted + accepted[:, 0],
    emitted=s.emitted + emitted,
    deferred=s.deferred + jnp.sum(jnp.where(places(width + 1) < emitted[:, None], deferred, 0), 1),
    accepted_lengths=s.accepted_lengths + (lengths & (round_ & (tested > 0))[:, None]).astype(jnp.int32),
    verified_lengths=s.verified_lengths + (verified & round_[:, None]).astype(jnp.int32),
    tested_at=s.tested_at + (place < reached).astype(jnp.int32),
    accepted_at=s.accepted_at + (place < accepted).astype(jnp.int32),
    source=jnp.where(fresh, take(origin, jnp.minimum(slot, width)), s.source),
  )


def _tally(new: Array, fresh: Array, vocab: int) -> Array:
  """Count each token among the fresh ones of new [B, W+1]: [B, V]."""
  return jnp.where(fresh[..., None], jax.nn.one_hot(new, vocab, dtype=jnp.int32), 0).sum(1)


def _fresh(state: State, buffer: int, emitted: Array) -> tuple[Array, Array]:
  """Return for every place of a buffer [B, T] the window slot that it has, and whether that was just emitted."""
  slot = places(buffer) - state.length[:, None]
  return jnp.maximum(slot, 0), (slot >= 0) & (slot < emitted[:, None])


def _note(state: State, new: Array, emitted: Array) -> Array:
  """Note the unscaled log-probability of each new token under each model that has scored it (else NaN)."""
  width = new.shape[1]
  slot, fresh = _fresh(state, state.logprobs.shape[2], emitted)
  models = []
  for m, logits in enumerate(state.window.logits):
    logp = probs.at_token(probs.log_softmax(logits), new)
    logp = jnp.where(places(width) <= (state.fed[:, m] - state.length)[:, None], logp, jnp.nan)
    models.append(jnp.where(fresh, take(logp, jnp.minimum(slot, width - 1)), state.logprobs[:, m]))
  return jnp.stack(models, 1)


def _note_top(state: State, model: int, emitted: Array) -> Top:
  """Note the likeliest tokens at each new position."""
  count = state.top.ids.shape[2]
  values, ids = lax.top_k(probs.log_softmax(state.window.logits[model]), count)  # [B, W+1, K]
  slot, fresh = _fresh(state, state.top.ids.shape[1], emitted)
  slot, fresh = jnp.minimum(slot, ids.shape[1] - 1), fresh[..., None]
  return Top(jnp.where(fresh, take(ids, slot), state.top.ids), jnp.where(fresh, take(values, slot), state.top.logprobs))


@struct.dataclass
class Elect:
  """Run the branch of the model that most rows want, the others idle: collaborative decoding's alternation.

  A row wants the model that has seen the fewest of its tokens, the lowest number on ties (Fu et al. 2025,
  Algorithm 2).
  """

  branches: tuple[tuple[Phase, ...], ...]

  def __str__(self):
    return 'elect[' + ' | '.join(' · '.join(map(str, branch)) for branch in self.branches) + ']'

  def __call__(self, context: Context, state: State) -> State:
    wanted = jnp.argmin(state.fed, 1)
    votes = jnp.sum((wanted[:, None] == places(len(self.branches))) & state.active[:, None], 0)
    turn = jnp.argmax(votes)
    rows = state.active
    state = state.replace(active=rows & (wanted == turn))
    branches = [lambda s, b=branch: run(b, context, s) for branch in self.branches]
    state = backends.current().choose(turn, branches, state)
    return state.replace(active=rows & ~state.done)


@struct.dataclass
class BySize:
  """Run the branch that is meant for batches of so many rows, which are known when the loop is traced.

  `rows` ascend: a branch is for batches of at most its number, the last one for larger ones too. `Method.at` puts the
  branch in its place before anything is made for it.
  """

  branches: tuple[tuple[Phase, ...], ...]
  rows: tuple[int, ...] = _static()

  def __str__(self):
    of = zip(self.rows, self.branches, strict=True)
    return 'by size[' + ' | '.join(f'{n}: ' + ' · '.join(map(str, branch)) for n, branch in of) + ']'

  def __call__(self, context: Context, state: State) -> State:
    return run(self.at(state.length.shape[0]), context, state)

  def at(self, rows: int) -> tuple[Phase, ...]:
    """Return the branch for a batch of so many rows."""
    return self.branches[scheduling.meant(self.rows, rows)]


def run(phases: tuple[Phase, ...], context: Context, state: State) -> State:
  """Run phases one after another."""
  for phase in phases:
    state = phase(context, state)
  return state
