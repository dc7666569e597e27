"""An α for each token of a draft, chosen for whole texts: those of `rules.by_slot(rules.opt)`."""

from collections.abc import Callable, Sequence
import dataclasses
import json
from pathlib import Path

import numpy as np

from speccascade import rules, theory
from speccascade.data.examples import Task
from speccascade.host import storage
from speccascade.train import held_out, router
from speccascade.types import checked_int

FILE = 'by_slot.json'


@dataclasses.dataclass(frozen=True)
class BySlot:
  """A job of `python -m speccascade.train`: `theory.alphas_by_slot` of the tokens of a task's references.

  OUT/NAME/by_slot.json has a row for each cost. `same_loss_calls` are the verifier's calls per token of `rules.opt`
  with the one α that has the same loss.

  Attributes:
    name: the job's name, and its folder.
    models: drafter and verifier, as of a router.
    task: prompts with references.
    costs: of a call of the verifier, in units of the 0–1 loss.
    block: γ.
    greedy: whether decoding is greedy; else it is at temperature 1.
    batch_size: texts that are read at once.
  """

  name: str
  models: router.Models
  task: Task
  costs: Sequence[float] = (0.1, 0.2, 0.3, 0.5, 0.8)
  block: int = 5
  greedy: bool = False
  batch_size: int = 32

  def __post_init__(self):
    if len(self.models) != 2:
      raise ValueError(f'by_slot {self.name} has {len(self.models)} models; give drafter and verifier.')
    for name in ('block', 'batch_size'):
      checked_int(f'by_slot {self.name}: {name}', getattr(self, name))

  def run(self, out: Path, echo: Callable = print) -> list[dict]:
    """Choose the α, print them and write them to `out`."""
    tokens = router.of_references(router.loaded(self).models, self.task, self.batch_size)
    gain, rejection = decision(tokens, self.greedy)
    rows = [self._row(gain, rejection, cost) for cost in self.costs]
    for row in rows:
      alphas = ', '.join(f'{a:.3f}' for a in row['alphas'])
      calls = f'{row["calls"]:.4f} calls per token; one α of the same loss needs {row["same_loss_calls"]:.4f}'
      echo(f'cost {row["cost"]:g}: α = ({alphas}), {calls}')
    storage.write(out / self.name / FILE, json.dumps(rows, indent=1) + '\n')
    return rows

  def _row(self, gain: np.ndarray, rejection: np.ndarray, cost: float) -> dict:
    alphas = theory.alphas_by_slot(gain, rejection, cost, self.block)
    lowered, calls = theory.rates_by_slot(gain, rejection, alphas)
    low = 0.0
    high = 1e3
    for _ in range(60):  # the larger the one α, the less it defers
      alpha = (low + high) / 2
      other, other_calls = theory.rates_by_slot(gain, rejection, np.full(self.block + 1, alpha))
      low, high = (alpha, high) if other > lowered else (low, alpha)
    found = dict(cost=cost, alphas=alphas.round(4).tolist(), gain=lowered, calls=calls)
    return found | dict(same_loss_alpha=alpha, same_loss_calls=other_calls)


def decision(tokens: router.Tokens, greedy: bool) -> tuple[np.ndarray, np.ndarray]:
  """Return the gain of deferring as `rules.opt` sees it, and the chance of a rejection if it defers, of each token."""
  gain = held_out.plug_in_scores(tokens.features)['diff']
  differ = (tokens.first_q != tokens.first_p).astype(np.float64)
  return gain, differ if greedy else tokens.features[:, rules.FEATURES.index('tv')].clip(0, 1)
