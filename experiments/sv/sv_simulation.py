"""Whether speculative verification pays for models and chips that are not here, by simulated rounds.

Drafts, S, A and acceptance are those that a plan of three small models observed; the times of calls are those that
`compiled_times` has of large ones.
"""

from collections.abc import Mapping, Sequence
import dataclasses

from experiments.sv import sv_costs
from experiments.sv.compiled_times import PassTimes
from speccascade import backends
from speccascade.models import packing
from speccascade.planning import sv_model
from speccascade.sv import plans

BLOCKS = (1, 2, 3, 5, 7)  # γ; of each method the best
FIXED = 5  # the γ of the paper, which speculative decoding is compared with at every batch size


@dataclasses.dataclass(frozen=True)
class Trio:
  """The times of a drafter, a companion and a verifier, which takes any total of tokens or those of the decode loop.

  The loop packs to a few totals, from as many tokens on as the TPU backend packs.
  """

  draft: PassTimes
  companion: PassTimes
  verifier: PassTimes
  any_total: bool = False

  def profile(self, observed: plans.Profile, batch: int, block: int) -> plans.Profile:
    """Return a profile with the samples of another and the times of these models at a batch size."""
    most = batch * (block + 1)
    packed = [batch * n for n in backends.TPU().window_widths(batch, packing.fine_widths(block + 1))]
    totals = range(batch, most + 1) if self.any_total else packed
    times = {batch: {n: self.verifier.seconds(batch, n / batch) for n in totals}}
    steps = self.draft.seconds(batch, 1), self.companion.seconds(batch, block), self.verifier.seconds(batch, 1), 0.0
    return plans.Profile.of(observed.table, observed.origin, observed.samples, times, {batch: steps})


@dataclasses.dataclass(frozen=True)
class Result:
  """A method with its best γ: its speed over plain decoding; what a companion reads and may read, over a step."""

  speed: float
  block: int
  reads: float = 0.0
  may_read: float = 0.0

  def __str__(self):
    return f'{self.speed:.2f} ({self.block})'


def compare(observed: plans.Profile, trio: Trio, batch: int, blocks: Sequence[int] | None = None) -> dict[str, Result]:
  """Return the result of speculative decoding, with γ = 5 and with the best, and of each variant of verification.

  What a companion may read is what makes a variant as fast as the faster of plain and speculative decoding. `blocks`
  are the γ to choose from, `FIXED` among them, those of `BLOCKS` that were observed if not given.
  """
  blocks = blocks or [n for n in BLOCKS if n <= observed.origin.block]
  profiles = {n: trio.profile(observed, batch, n) for n in blocks}
  speeds = {n: sv_costs.speculative(p, batch, n) / sv_costs.plain(p, batch) for n, p in profiles.items()}
  best = max(speeds, key=speeds.get)
  results = {'speculative': Result(speeds[best], best), 'fixed': Result(speeds[FIXED], FIXED)}
  bar = max(1.0, speeds[best])
  for name, variant in sv_costs.VARIANTS.items():
    speeds = {n: sv_model.simulate(profile, batch, n, variant)['sv'] for n, profile in profiles.items()}
    best = max(speeds, key=speeds.get)
    draft, companion, alone, _ = profiles[best].steps[batch]
    may_read = sv_costs.break_even(profiles[best], batch, bar, best, variant)
    results[name] = Result(
      speeds[best] / sv_costs.plain(profiles[best], batch), best, companion / alone, may_read / alone
    )
  return results


def table(title: str, observed: plans.Profile, trio: Trio, batches: Sequence[int]) -> dict:
  """Return the table of a trio: speeds over plain decoding, each with its best γ, and what a companion may read."""
  rows = []
  for batch in batches:
    results = compare(observed, trio, batch)
    plain = 1e3 * trio.verifier.seconds(batch, 1)
    rows.append([batch, f'{plain:.1f}', *_cells(results), f'{results["SV exact"].reads:.3f}'])
  columns = ['batch', 'plain ms', *_COLUMNS, 'companion reads']
  note = "Speed over plain decoding (best γ); a companion's reading of a draft over a step of the verifier."
  return dict(title=title, columns=columns, rows=rows, note=note)


def by_slope(observed: plans.Profile, slopes: Sequence[float], drafter: float, batch: int = 64) -> dict:
  """Return the same by what a token more of each row costs the verifier, in its steps; the companion reads for nothing.

  This is the ratio of costs that decides: 0 where reading the weights bounds a call, near 1 where its tokens do.
  """
  free = PassTimes((1, 2), (0.0, 0.0), 0.0)
  draft = PassTimes((1, 2), (drafter, drafter), 0.0)
  rows = []
  for slope in slopes:
    verifier = PassTimes((batch, 2 * batch), (1.0, 1.0 + slope), 0.0)
    rows.append([slope, *_cells(compare(observed, Trio(draft, free, verifier, any_total=True), batch))])
  note = f'In steps of the verifier; a step of the drafter costs {drafter:g}, the companion nothing.'
  return dict(title='By the cost of a token more', columns=['a token more costs', *_COLUMNS], rows=rows, note=note)


_COLUMNS = [f'γ = {FIXED}', 'speculative', *sv_costs.VARIANTS, 'may read, all', 'may read, accepted', 'may read, exact']


def _cells(results: Mapping[str, Result]) -> list[str]:
  """Return the cells of `_COLUMNS`."""
  variants = [results[name] for name in sv_costs.VARIANTS]
  speeds = f'{results["fixed"].speed:.2f}', str(results['speculative']), *map(str, variants)
  return [*speeds, *(f'{x.may_read:.3f}' for x in variants)]
