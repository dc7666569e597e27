"""What `decode` takes as a method: phases over models, a choice of methods by batch size, or a cascade of texts.

What plans, times, scores or reports a method asks it here (`calls`, `block`, `verifier_width`, `target`,
`keeps_distribution`) and reads no phase.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from flax import struct
from jax import tree_util

from speccascade import acceptance, rules, stopping
from speccascade.engine.phases import Alternate, flat, mapped, Propose, rounds, Score, Verify
from speccascade.engine.verification import First, index_for
from speccascade.models.packing import coarse_widths, fine_widths
from speccascade.types import Phase, static

Target = tuple[tuple[int, ...], tree_util.Partial | None]


class Strategy:
  """Base of all that `decode` takes as a method: it has a `kind`, `phases` and `slots`, the numbers of its models."""

  extra_models = False  # whether more models may be given than it decodes with
  origin = None  # of the profile that it decides by
  block: int | tuple[int, ...] | None = None  # γ, or γ of each model; None where it has none
  target: Target = (), None  # the models and the combiner whose distribution the output follows, or None

  @property
  def name(self) -> str:
    """What the method is called where its settings do not matter."""
    return self.kind

  @property
  def keeps_distribution(self) -> bool:
    """Whether each token follows the distribution of `target`, given nothing but the tokens before it."""
    return self.target[1] is not None

  @property
  def models(self) -> int:
    """The number of models that the method decodes with."""
    return max(self.slots) + 1

  @property
  def all_phases(self) -> tuple[Phase, ...]:
    """The phases, those of every branch where models take turns."""
    return flat(self.phases)

  @property
  def takes_turns(self) -> bool:
    """Whether the models take turns to propose."""
    return any(isinstance(p, Alternate) for p in self.phases)

  @property
  def drafts(self) -> bool:
    """Whether a model proposes tokens that others test."""
    return any(isinstance(p, Propose) for p in self.all_phases)

  @property
  def verifier_width(self) -> int:
    """The most tokens that a model other than a drafter is fed at once; 1 where each call is of one token."""
    return max((max(p.widths) for p in self.all_phases if isinstance(p, Score)), default=1)

  def at(self, batch: int) -> 'Strategy':
    """Return the method for a batch of this size."""
    return self


@struct.dataclass
class Method(Strategy):
  """Phases over `slots`; slot s runs the model number `slots[s]`, each slot with a cache of its own.

  `kind` is the function that made it, except that `speculative` with a rule that reads both models makes a 'cascade'.
  """

  phases: tuple[Phase, ...]
  slots: tuple[int, ...] = static()
  window: int = static()  # W, the most tokens ever pending
  policy: stopping.Policy = stopping.Policy()
  by_round: bool = static(default=False)  # whether random numbers are keyed by round as well
  kind: str = static(default='method')
  rule: str | None = static(default=None)  # its name, for the name of the method
  extra_models: bool = static(default=False)
  origin: Any = static(default=None)

  @classmethod
  def of_phases(
    cls,
    phases: Sequence[Phase],
    slots: Sequence[int],
    *,
    policy: stopping.Policy = stopping.Policy(),
    window: int | None = None,
    **settings,
  ) -> 'Method':
    """Make a method of phases, having derived what they must provide.

    Args:
      phases: what a round does, in order; it commits tokens by a `Verify`.
      slots: the number of the model that each slot runs.
      policy: how long drafts are.
      window: the most tokens ever pending, where phases of one's own add some; None: those that `Propose` draws.
      **settings: the other fields.

    Returns:
      The method, its phases with their `widths`, `aligned` and `catch_up`.
    """
    drafted = _drafted(phases)
    window = max(drafted, 1) if window is None else window
    return cls(derived(phases, window, policy), tuple(slots), window, policy, **settings)

  def __str__(self):
    policy = '' if type(self.policy) is stopping.Policy else f' (drafts end by {type(self.policy).__name__})'
    return ' · '.join(map(str, self.phases)) + policy

  @property
  def name(self) -> str:
    kind = 'speculative' if self.kind == 'cascade' else self.kind
    return kind if self.rule is None else f'{kind}[{self.rule}]'

  @property
  def block(self) -> int | tuple[int, ...] | None:
    if self.takes_turns:
      return tuple(p.n for p in self.all_phases if isinstance(p, Propose))
    unscored = self.kind in ('cascade', 'sv_exact')  # a token that is tested without being scored
    return self.window - unscored if self.drafts else None

  @property
  def target(self) -> Target:
    if self.kind == 'bild':
      return (), None
    tests = self._tests()
    if isinstance(self.policy, stopping.Deferral) and rules.inside(tests[0].accept) is acceptance.everything:
      return (0, 1), self.policy.rule  # a token cascade
    return tuple(self.slots[s] for s in tests[0].models), tests[0].combiner

  @property
  def keeps_distribution(self) -> bool:
    # A token cascade's also depends on the length of the draft, that of a rule by slot on where drafts begin; what a
    # goodput drops, it drops for what it is.
    tests = self._tests()
    biased = any(not getattr(rules.inside(p.accept), 'exact', True) for p in tests)
    drops = any(getattr(p, 'drop', False) for p in self.all_phases)
    by_slot = any(rules.declaration(p.combiner).by_slot for p in tests)
    return super().keeps_distribution and not biased and not drops and not by_slot

  def _tests(self) -> list[Verify]:
    return [p for p in self.all_phases if isinstance(p, Verify)]

  def accepting(self, accept: Callable) -> 'Method':
    """Return the method with another acceptor, as one whose acceptance is forced while a round is timed."""
    bound, by_round = acceptance.bind(accept)
    phases = mapped(lambda p: p.replace(accept=bound) if isinstance(p, Verify) else p, self.phases)
    return self.replace(phases=phases, by_round=by_round)

  def blended(self) -> set[int]:
    """Return the slots whose logits a combiner adds up, so that a token without one has no value."""
    return {slot for p in self._tests() if rules.declaration(p.combiner).adds_logits for slot in p.models}

  def logits_read(self) -> set[int]:
    """Return the slots whose logits a later phase reads."""
    every = set(range(len(self.slots)))
    reads = [getattr(phase, 'reads', None) for phase in self.all_phases]
    return every if None in reads else {slot for some in reads for slot in some}

  def turns(self, rows: int) -> int:
    """Return in how many rounds at least one of so many rows commits a token."""
    return rows * len(rounds(self.phases)) if self.takes_turns else 1

  @property
  def draft_turns(self) -> int:
    """The most turns of a loop over drafts, a number that a compiled program need not have; 1 without such a loop."""
    return max((p.n - (p.catch_up != 1) for p in self.all_phases if isinstance(p, Propose)), default=1)

  def calls(self) -> list[dict[int, int]]:
    """Return {slot: model calls} of a round; where models take turns, of the round of each."""
    return [dict(sum(map(_calls, phases), collections.Counter())) for phases in rounds(self.phases)]


def _calls(phase: Phase) -> collections.Counter:
  if isinstance(phase, Propose):  # a model that has read everything knows the distribution of its first token
    return collections.Counter({phase.model: phase.n - (phase.catch_up == 0)})
  return collections.Counter({phase.model: 1} if isinstance(phase, Score) else {})


def _drafted(phases: Sequence[Phase]) -> int:
  return sum(p.n for p in flat(phases) if isinstance(p, Propose))


def derived(phases: Sequence[Phase], window: int, policy: stopping.Policy) -> tuple[Phase, ...]:
  """Return phases with what follows from the round that they make.

  A model that scores k of the drafted tokens knows k + 1 distributions, a drafter as many as it draws. A round emits at
  most what all models of its `Verify` know. What a model has not read of that comes on top in the next round.
  """
  every = flat(phases)
  in_turn = any(isinstance(p, Alternate) for p in phases)
  varies = in_turn or type(policy) is not stopping.Policy
  own = any(not isinstance(p, Propose | Score | Verify) for p in every)  # may add pending tokens
  drafted = max(_drafted(phases), window) if own else _drafted(phases)
  tested = {m for p in every if isinstance(p, Verify) for m in p.models}
  most = {p.model: getattr(p.limit, 'most', drafted) for p in every if isinstance(p, Score)}
  drafters = {p.model for p in every if isinstance(p, Propose)} - set(most)

  def known(model: int, drafted: int) -> int:
    """Return how many distributions a model knows at most after a draft."""
    return min(most.get(model, 0), drafted) + 1 if model not in drafters else drafted

  def emitted(drafted: int) -> int:
    return min((known(m, drafted) for m in tested), default=1)

  def derive(phase: Phase) -> Phase:
    if isinstance(phase, Propose):
      drafts = range(phase.n + 1) if varies else [phase.n]
      return phase.replace(catch_up=0 if in_turn else 1 + max(0, *(emitted(n) - n for n in drafts)))
    if not isinstance(phase, Score):
      return phase
    widest = window + 1 if in_turn else max(known(phase.model, drafted), emitted(drafted))
    if getattr(phase.limit, 'fine', False):
      widths = fine_widths(widest)
    else:
      widths = coarse_widths(widest) if varies else (widest,)
    # A model of the test has read what was emitted, since no more is. Of any other a limit may leave tokens unread.
    exact = phase.limit is None or isinstance(phase.limit, First)
    reads_all = phase.model in tested or (exact and known(phase.model, drafted) >= emitted(drafted))
    return phase.replace(widths=widths, aligned=not in_turn and reads_all)

  return mapped(derive, phases)


@struct.dataclass
class ByBatch(Strategy):
  """A method for each batch size: `choices[i]` decodes batches of at most `rows[i]` rows, the last larger ones too.

  It is resolved on the host, before anything is made for the batch.
  """

  choices: tuple[Method, ...]
  rows: tuple[int, ...] = static()
  kind: str = static(default='by_batch')

  def __str__(self):
    return 'by batch[' + ' | '.join(f'{n}: {choice}' for n, choice in zip(self.rows, self.choices, strict=True)) + ']'

  @property
  def phases(self) -> tuple[Phase, ...]:
    return tuple(phase for choice in self.choices for phase in choice.phases)

  @property
  def slots(self) -> tuple[int, ...]:
    """The models of all choices, the verifier last."""
    last = self.choices[-1].slots[-1]
    return (*sorted({s for choice in self.choices for s in choice.slots} - {last}), last)

  @property
  def extra_models(self) -> bool:
    return any(choice.extra_models for choice in self.choices)

  @property
  def origin(self) -> Any:
    return next((choice.origin for choice in self.choices if choice.origin is not None), None)

  @property
  def target(self) -> Target:
    return self.choices[-1].target

  @property
  def keeps_distribution(self) -> bool:
    return all(choice.keeps_distribution for choice in self.choices)

  def at(self, batch: int) -> Method:
    return self.choices[index_for(self.rows, batch)]


@struct.dataclass
class SequenceCascade(Strategy):
  """Model 0 writes the complete answer; model 1 writes it anew where the answer's score is under the threshold."""

  score: Callable = static()
  threshold: float = static()

  kind = 'sequence_cascade'
  phases = ()
  slots = (0, 1)
