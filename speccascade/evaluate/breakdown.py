"""Acceptance divided by round, by prompt and by domain, from the lines of the quality protocol."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccascade.evaluate.experiment import Experiment
from speccascade.types import AFTER_LEAF, BONUS, RESIDUAL

NAMES = ('accepted_by_round', 'texts_by_round', 'acceptance_by_prompt', 'acceptance_by_domain')
OF_DOMAIN = ('tested', 'accepted', 'emitted', 'rounds')
BINS = 10  # of the acceptance of a prompt


def acceptance(experiment: Experiment, lines: Sequence[dict]) -> dict[str, Any]:
  """Return how acceptance is distributed.

  Args:
    experiment: What was decoded; its `domain` names the field of an example's info that has the domain.
    lines: Those of one point.

  Returns:
    accepted_by_round: tokens accepted in the first, second, … round, summed over texts; None if nothing was drafted.
    texts_by_round: the texts that have such a round.
    acceptance_by_prompt: of BINS bins of equal width in 0 … 1, the texts whose acceptance lies in each, or None.
    acceptance_by_domain: {domain: {examples, tested, accepted, emitted, rounds}}, None where no example has a domain.
  """
  drafted = [line for line in lines if line['tested']]
  if not drafted:
    return dict.fromkeys(NAMES)
  rounds = [some for some in map(accepted_by_round, drafted) if some is not None]
  last = max(map(len, rounds), default=0)
  columns = [[some[i] for some in rounds if i < len(some)] for i in range(last)]
  rates = np.array([line['accepted'] / line['tested'] for line in drafted])
  return dict(
    accepted_by_round=[sum(column) for column in columns] or None,
    texts_by_round=[len(column) for column in columns] or None,
    acceptance_by_prompt=np.histogram(rates, BINS, (0, 1))[0].tolist(),
    acceptance_by_domain=_by_domain(experiment, drafted),
  )


def accepted_by_round(line: dict) -> list[int] | None:
  """Return the tokens accepted in each round of a text that drafted, None where its tokens do not tell.

  A round ends with a token that was drawn again or is a bonus, with one after a leaf, with a full block, or with the
  text. The lengths are compared with those that the loop counted; they may differ where the block changes from round to
  round.
  """
  block = len(line['tested_at'])
  rounds = []
  accepted = 0
  for i, source in enumerate(line['source']):
    drawn = source in (RESIDUAL, BONUS, AFTER_LEAF)
    accepted = accepted + (not drawn)
    following = line['source'][i + 1] if i + 1 < len(line['source']) else None
    ended = drawn and following != AFTER_LEAF or accepted == block and following != BONUS
    if ended or following is None:
      rounds.append(accepted)
      accepted = 0
  counted = line['accepted_lengths']
  return rounds if np.bincount(rounds, minlength=len(counted)).tolist() == counted else None


def domains_of(experiment: Experiment) -> dict[int, str | None]:
  """Return the domain of each example by its index, None where it has none."""
  found = {e.index: e.info.get(experiment.domain) for e in experiment.task.examples}
  return {index: None if domain is None else str(domain) for index, domain in found.items()}


def _by_domain(experiment: Experiment, lines: Sequence[dict]) -> dict[str, dict[str, int]] | None:
  domains = domains_of(experiment)
  counts: dict[str, dict[str, int]] = {}
  for line in lines:
    if (domain := domains[line['example']]) is not None:
      count = counts.setdefault(domain, dict.fromkeys(('examples', *OF_DOMAIN), 0))
      count['examples'] += 1
      for name in OF_DOMAIN:
        count[name] += line[name]
  return counts or None
