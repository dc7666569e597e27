"""Check anyone's speculative sampler: does what it emits follow the verifier's distribution?

The sampler is a function of small, given distributions (`cases`). It is run; where it asks its `rng` for nothing but
uniform numbers, and few of them, its law is computed (`laws`); else it is run many times, and an anytime-valid test
bets against it (Waudby-Smith and Ramdas 2024): the chance that a right sampler is ever refused is `FALSE_ALARM`.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from speccascade.check.sampler import laws
from speccascade.check.sampler.calls import Call, Failed, taken
from speccascade.check.sampler.cases import ASKED, Case, cases, number, numbers, SETTINGS
from speccascade.check.sampler.evidence import Bet, excluded, FALSE_ALARM
from speccascade.types import checked_int

RNGS = ('generator', 'jax', 'torch')
EXACT = 1e-6  # to which an enumerated law is compared, in total variation
_TOGETHER = 100  # runs between two looks at the evidence


@dataclasses.dataclass(frozen=True)
class SamplerReport:
  """Whether a sampler is right.

  Attributes:
    ok: Whether no case shows a bias.
    text: A sentence; of a wrong sampler with its smallest counter-example.
    distance: The total variation distance of what it emits there; 0 where it is right.
    excluded: The total variation above which no case has a bias; NaN where there is one.
  """

  ok: bool
  text: str
  distance: float = 0.0
  excluded: float = float('nan')

  def __str__(self):
    return self.text


def check_sampler(
  sampler: Callable,
  *,
  rng: str = 'generator',
  drafts: bool = False,
  choices: int = 1,
  rows: int = 1,
  runs: int = 20_000,
  given: Sequence[Case] | None = None,
) -> SamplerReport:
  """Check a function that verifies drafted tokens.

  A sampler that has a parameter `temperature`, `top_k` or `top_p` is given it, and p is the verifier's distribution
  before: tokens are to follow p after the temperature, then top-k, then top-p. At temperature 0 that is the likeliest
  token; top_k = V and top_p = 1 are off. Of a batch these are arrays [rows], and rows differ in them. A sampler of a
  batch that has a parameter `lengths` [rows] is told how many tokens are drafted in each row, which may be 0.

  Args:
    sampler: `sampler(tokens [K], q [K, V], p [K + 1, V], rng)` returns the tokens that it emits, 1 to K + 1 of them:
      those that it accepts and one more. The arrays are copies, which it may write into.
    rng: What `rng` is: 'generator', a numpy Generator, which is enumerated if only its `random` is asked; 'jax', a key;
      'torch', a Generator.
    drafts: Whether the sampler draws the draft itself: `sampler(q, p, rng)`.
    choices: How many independent drafts C there are for each token: with more than one, tokens are [K, C].
    rows: Of a batch: `sampler(tokens [rows, K], q [rows, K, V], p [rows, K + 1, V], rng)` returns a list for each row.
    runs: How often it is run for each case where it cannot be enumerated.
    given: The cases; None for those of `cases`.

  Returns:
    A report, whose text has the smallest counter-example, or the smallest bias that is excluded.

  Raises:
    ValueError: If an argument is invalid, or the sampler fails or emits what is no token.

  Example:
    >>> def verify(tokens, q, p, rng):
    ...   x = tokens[0]
    ...   if rng.random() < min(1, p[0, x] / q[0, x]):
    ...     return [x]
    ...   return [int(p[0].argmax())]
    >>> print(check_sampler(verify))
    p = (.6, .4), q = (.9, .1): emits (.9, .1), total variation .3
  """
  if rng not in RNGS:
    raise ValueError(f'rng={rng!r} is none of {", ".join(RNGS)}.')
  checked_int('rows', rows)
  if checked_int('choices', choices) > 1 and drafts:
    raise ValueError(
      f'choices={choices} are of drafts that a sampler is given; this one draws its draft: leave one out.'
    )
  checked_int('runs', runs)
  takes = taken(sampler, drafts)
  judge = _Judge(_maker(rng), runs, enumerates=rng == 'generator')
  for case in cases(rows, takes, choices) if given is None else given:
    if drafts and not any(case.drafted):
      continue
    found = judge(Call(sampler, case, drafts, takes))
    if found is not None:
      return found
  return judge.verdict(_left_out(takes, rows) if given is None else [])


def _left_out(takes: frozenset[str], rows: int) -> list[str]:
  """Return what a sampler cannot be asked, for it does not take it."""
  return [name for name in ASKED if name not in takes and (rows > 1 or name in SETTINGS)]


def _maker(rng: str) -> Callable[[int], Any]:
  """Return what makes the rng of the n-th run."""
  if rng == 'jax':
    import jax

    return lambda n: jax.random.fold_in(jax.random.key(0), n)
  if rng == 'torch':
    import torch

    return lambda n: torch.Generator().manual_seed(n)
  return lambda n: np.random.default_rng(n)


# ---- a case after the other ----


class _Judge:
  """Judges a sampler case by case: it runs it first, then enumerates it, until that is given up once."""

  def __init__(self, make: Callable[[int], Any], runs: int, enumerates: bool):
    self.make, self.runs, self.enumerates = make, runs, enumerates
    self.enumerated = 0
    self.excluded: list[float] = []  # by case that is run
    self.notes: list[str] = []

  def __call__(self, call: Call) -> SamplerReport | None:
    """Return what shows that a sampler is wrong, None where nothing does."""
    try:
      law = self._law(call)
      return self._sampled(call) if law is None else self._compared(call.case, law)
    except Failed as error:
      if any(call.case.drafted) or not (self.enumerated or self.excluded):
        raise
      self.notes.append(f'where nothing is drafted {str(error).rstrip(".")}')
    return None

  def verdict(self, left_out: Sequence[str]) -> SamplerReport:
    """Return what is said of a sampler that no case shows to be wrong."""
    ways = [f'{self.enumerated} enumerated, which excludes a bias above {number(EXACT)}'] if self.enumerated else []
    worst = max([EXACT, *self.excluded])
    if self.excluded:
      above = number(np.ceil(100 * worst) / 100)
      ways.append(f'{len(self.excluded)} run {self.runs} times, which excludes a bias above {above}')
    if left_out:
      self.notes.append(f'not asked: {", ".join(left_out)}, which it does not take')
    count = self.enumerated + len(self.excluded)
    text = f"emits the verifier's distribution in {count} cases: {', '.join(ways)}"
    return SamplerReport(True, '; '.join([text, *self.notes]), excluded=worst)

  def _law(self, call: Call) -> np.ndarray | None:
    """Return the law of the first L tokens, None where it is not enumerated."""
    if not self.enumerates:
      return None
    self.enumerates = laws.tried(call)
    try:
      return laws.enumerated(call) if self.enumerates else None
    except laws.GaveUp:
      self.enumerates = False
    return None

  def _compared(self, case: Case, law: np.ndarray) -> SamplerReport | None:
    self.enumerated += 1
    distance = 0.5 * abs(law - case.law).sum()
    return _wrong(case, law, distance, '') if distance > EXACT else None

  def _sampled(self, call: Call) -> SamplerReport | None:
    """Run a sampler; return what refutes it, None if nothing does."""
    law = call.case.law.reshape(-1)
    bet, counts = Bet(law.size), np.zeros(law.size)
    for outcomes in self._outcomes(call):
      counts += np.bincount(outcomes, minlength=law.size)
      bet.add(outcomes[:, None] == np.arange(law.size), law)
      if bet.refuted:
        found, done = counts / counts.sum(), int(counts.sum())
        how = f" in {done} runs, whose chance under the verifier's is below {FALSE_ALARM:g}"
        return _wrong(call.case, found.reshape(call.case.law.shape), 0.5 * abs(found - law).sum(), how)
    self.excluded.append(excluded(counts / counts.sum(), law, self.runs))
    return None

  def _outcomes(self, call: Call):
    """Yield which first L tokens are emitted, some runs at a time."""
    drafts, chances = zip(*call.drafted, strict=True)
    random = np.random.default_rng(0)
    which = random.choice(len(drafts), self.runs, p=np.array(chances) / sum(chances))
    last = random.random(self.runs)  # what the sampler left open follows the target
    for start in range(0, self.runs, _TOGETHER):
      some = range(start, min(start + _TOGETHER, self.runs))
      found = np.stack([call(drafts[which[i]], self.make(i)).reshape(-1) for i in some])
      yield np.argmax(found.cumsum(1) > last[some.start : some.stop, None], 1)


def _wrong(case: Case, law: np.ndarray, distance: float, how: str) -> SamplerReport:
  kind = 'rows ' if case.batch else ('', 'pairs ', 'texts ')[min(case.tokens, 3) - 1]
  what = f'emits {kind}{numbers(law.reshape(-1))}, total variation {number(distance)}{how}'
  return SamplerReport(False, f'{case}: {what}', float(distance))
