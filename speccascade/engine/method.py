"""What `decode` takes as a method: phases over models, a choice of methods by batch size, or a cascade of texts.

What plans, times, scores or reports a method asks it here (`calls`, `block`, `verifier_width`, `target`,
`keeps_distribution`) and reads no phase.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import struct
from jax import tree_util

from speccascade import acceptance, rules, stopping
from speccascade.engine.lowering import flat, lower, mapped, Phase, rounds
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.engine.verification import index_for
from speccascade.types import static

Target = tuple[tuple[int, ...], tree_util.Partial | None]


class Strategy:
  """Base of all that `decode` takes as a method: it has a `kind`, `phases` and `slots`, the numbers of its models."""

  extra_models = False  # whether more models may be given than it decodes with
  origin = None  # of the profile that it decides by
  block: int | tuple[int, ...] | None = None  # γ, or γ of each model; None where it has none
  policy = stopping.Policy()  # how long drafts are
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
    return len(rounds(self.phases)) > 1

  @property
  def drafts(self) -> bool:
    """Whether a model proposes tokens that others test."""
    return any(phase.draws for phase in self.all_phases)

  @property
  def verifier_width(self) -> int:
    """The most tokens that a model other than a drafter is fed at once; 1 where each call is of one token."""
    return 1

  @property
  def of_batches(self) -> tuple['Strategy', ...]:
    """The methods that batches are decoded by."""
    return (self,)

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
  policy: stopping.Policy = stopping.Policy()
  kind: str = static(default='method')
  rule: str | None = static(default=None)  # its name, for the name of the method
  extra_models: bool = static(default=False)
  origin: Any = static(default=None)

  def __str__(self):
    policy = '' if not self.policy.varies() else f' (drafts end by {type(self.policy).__name__})'
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
    # A token cascade's also depends on the length of the draft, that of a rule by slot on where drafts begin.
    return super().keeps_distribution and all(phase.exact for phase in self.all_phases)

  def _tests(self) -> list[Verify]:
    return [p for p in self.all_phases if isinstance(p, Verify)]

  def accepting(self, accept: Callable) -> 'Method':
    """Return the method with another acceptor, as one whose acceptance is forced while a round is timed."""
    bound = acceptance.bind(accept)
    return self.replace(phases=mapped(lambda p: p.replace(accept=bound) if isinstance(p, Verify) else p, self.phases))

  @property
  def window(self) -> int:
    """W, the most tokens ever pending."""
    return lower(self).window

  @property
  def by_round(self) -> bool:
    """Whether random numbers are keyed by round as well."""
    return any(phase.by_round for phase in self.all_phases)

  @property
  def verifier_width(self) -> int:
    return max((max(p.widths) for p in lower(self).parts if isinstance(p, Score)), default=1)

  @property
  def draft_turns(self) -> int:
    """The most turns of a loop over drafts, a number that a compiled program need not have; 1 without such a loop."""
    return max((p.n - (p.catch_up != 1) for p in lower(self).parts if isinstance(p, Propose)), default=1)

  def calls(self) -> list[dict[int, int]]:
    """Return {slot: model calls} of a round; where models take turns, of the round of each."""
    return [_calls(phases) for phases in rounds(lower(self).phases)]


def _calls(phases: Sequence[Phase]) -> dict[int, int]:
  calls: dict[int, int] = {}
  for phase in phases:
    if phase.feeds is not None:
      calls[phase.feeds[0]] = calls.get(phase.feeds[0], 0) + phase.calls
  return calls


@struct.dataclass
class ByBatch(Strategy):
  """A method for each batch size: `choices[i]` decodes batches of at most `rows[i]` rows, the last larger ones too.

  It is resolved on the host, before anything is made for the batch.
  """

  choices: tuple[Method, ...]
  rows: tuple[int, ...] = static()
  kind: str = static(default='by_batch')

  @property
  def of_batches(self) -> tuple[Strategy, ...]:
    return self.choices

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
  def verifier_width(self) -> int:
    return max(choice.verifier_width for choice in self.choices)

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
