"""One law: whether the output of a method follows its target, and how its random numbers are keyed.

A decision about a drafted token says what it was *told* beyond the committed text (`types.Told`). A drafted token may
be left untested, dropped, and drawn again. Its position keeps the target's distribution if nothing that left it
untested was told of it, nor of what its number makes again. Where a decision was told more, one of these helps:

- The dropped token comes again, the same: its number is keyed by position, and its drafter's q̃ is a function of the
  text. So it was only put off.
- Numbers are keyed by round: what other rows or an earlier round told comes no more. It does not help where the token
  itself was told of.
- Temperature 0, or one noise for both models (`Sampler(coupling='gumbel')`): the output is the target's own token.

How numbers are keyed follows from this; nothing declares it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from speccascade.engine.facts import rounds_of, Untested
from speccascade.sampling import Sampler
from speccascade.types import Model, Network, Told

Method = Any  # `method.Method`, which imports this
Phase = Any


class Exactness(NamedTuple):
  """Whether the output follows the target.

  Attributes:
    exact: Whether it does; None: that is not known.
    why: What keeps it from being so or known, as a sentence; empty where it is exact.
    refused: Whether nothing is decoded by it.
  """

  exact: bool | None
  why: str = ''
  refused: bool = False


def law(method: Method, sampler: Sampler | None = None) -> Exactness:
  """Return whether the output of a method follows its target, with a sampler or, without, at temperature 1."""
  gumbel = sampler is not None and sampler.coupling == 'gumbel'
  own = gumbel or sampler is not None and sampler.greedy  # the output is the target's own token
  found = [*_parts(method), *(() if own else _choices(method))]
  found += [] if gumbel or sampler is None else _uncoupled(method)
  worst = sorted(found, key=lambda verdict: (not verdict.refused, verdict.exact is None))
  return worst[0] if worst else Exactness(True)


def by_round(method: Method) -> bool:
  """Return whether random numbers are keyed by round, so that those of one round are used in no other."""
  tests = (phase.told for phase in method.all_phases if phase.tests)
  return any(told is None or Told.LATER in told for told in tests) or any(_comparing(method))


def same_numbers(method: Method, slots: Sequence[Model]) -> list[str]:
  """Return why two rows may not have the same random numbers: what these made of one decides about the other."""
  some = [f'{model.name} drafts one from the text of another' for model in slots if model.network.remembers]
  if law(method).exact is not False:
    some += [f'{phase.limit} compares the draft of one with that of another' for phase in _comparing(method)]
  return some


def misread(method: Method, networks: Sequence[Network]) -> tuple[int, str] | None:
  """Return a slot that is asked for a distribution which is none of the text before a token, and why; None: no slot is.

  A network with masks has such distributions where it drafts, a head of all tokens that are pending.
  """
  phases = method.all_phases
  asked = {slot for phase in phases if phase.tests for slot in phase.reads or ()}
  drafting = {phase.feeds for phase in phases if phase.draws and phase.feeds is not None}
  blind = {slot for slot in drafting if networks[slot].mask_token is not None}
  if blind and (blind & asked or method.about.accepts_all or method.takes_turns):
    return min(blind), 'which drafts in one pass: that of a token does not know those before it'
  tested = {slot for phase in phases for slot in phase.tests} | (drafting if method.about.accepts_all else set())
  for slot in sorted(tested):
    if networks[slot].remembers:
      return slot, 'which remembers: that of a token is another after each text that ends'
    if networks[slot].provisional and drafting:
      return slot, 'a head: that of a drafted token is another once the verifier has read the tokens before it'
  return None


def _parts(method: Method) -> Iterator[Exactness]:
  """Yield what each part keeps from being exact, or known, by itself."""
  if method.target[1] is None:
    yield Exactness(False, 'no combination of models describes its output')
  if method.policy.told is None:
    yield Exactness(None, f'nothing says what {type(method.policy).__name__} was told: give it `told`')
  for phase in method.all_phases:
    if phase.follows is False:
      yield Exactness(False, f'{phase} says that what it commits does not follow its target')
    elif phase.follows is None or phase.told is None:
      yield Exactness(None, f'nothing says what {phase} was told; give it `told`, an acceptor `exact` too')
    elif Told.PLACE in phase.told:
      yield Exactness(False, f'{phase} decides by the place of a token in its draft')


def _uncoupled(method: Method) -> Iterator[Exactness]:
  """Yield what needs one noise for both models."""
  for phase in method.all_phases:
    if phase.coupled:
      yield Exactness(False, f"{phase} reads the noise of coupling='gumbel'; decode with it, or take margin", True)


def _choices(method: Method) -> Iterator[Exactness]:
  """Yield what choices of how much of a draft is tested keep from being exact."""
  keyed_by_round = by_round(method)
  for phase, left in _untested(method):
    again = _comes_again(method, left)
    if Told.EARLIER in phase.told:  # numbers by round, where the dropped token does not come again the same
      continue
    itself = Told.LATER in phase.told or Told.TOKEN in phase.told and left.ahead < 1
    if not itself or again and not keyed_by_round:
      continue
    if left.replaced:
      yield Exactness(False, f'{phase} drops a token for what it is or what follows it, and the next is drawn afresh')
    elif again:
      yield Exactness(False, f'{phase} looks at tokens that the next round draws afresh, by numbers of its own')
    else:
      problem = 'looks ahead at tokens that this drafter may draw again from another distribution'
      remedy = "take Goodput(greedy=True), or decode with coupling='gumbel'"
      yield Exactness(
        False, f'{phase.limit} {problem}, so that the output would not follow the verifier; {remedy}', True
      )


def _comparing(method: Method) -> Iterator[Phase]:
  """Yield the phases told by other rows, or an earlier round, of what may come again otherwise."""
  for phase, left in _untested(method):
    if phase.told & (Told.OTHERS | Told.EARLIER) and not _comes_again(method, left):
      yield phase


def _untested(method: Method) -> Iterator[tuple[Phase, Untested]]:
  """Yield each phase that chooses how much is tested, with what it may leave untested."""
  phases = method.all_phases
  found = set().union(*(notes.untested for notes in rounds_of(method.phases, method.policy, len(method.slots)).notes))
  for left in sorted(found):
    if phases[left.limit].told is not None:
      yield phases[left.limit], left


def _comes_again(method: Method, left: Untested) -> bool:
  """Return whether an untested token is drawn again, by the same number from the same distribution."""
  return not left.replaced and not any(phase.redraws for phase in method.all_phases)
