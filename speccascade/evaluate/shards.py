"""A run in shares: of n processes, on as many machines as there are, each takes every n-th call of every plan.

  RUN/shards/1-of-3/        the journals of shard 1, and its lock
  RUN/shards/0-of-3/        of shard 0 also what all share: models.json
  RUN/…                     what one process would leave, made from these when all are complete

No shard waits for another. What they share in the run directory, each writes alike.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import re

from speccascade.evaluate import rundir
from speccascade.host.errors import RunError
from speccascade.host.runs import Journal, RunDir, SHARDS


@dataclasses.dataclass(frozen=True)
class Shard:
  """The share of a plan that one process has: the calls whose turn leaves this rest."""

  index: int
  count: int

  def __str__(self) -> str:
    return f'{self.index}/{self.count}'

  def has(self, turn: int) -> bool:
    """Return whether a call is this shard's."""
    return turn % self.count == self.index

  def folder(self, run: RunDir) -> RunDir:
    """Return where its journals are."""
    return run / SHARDS / f'{self.index}-of-{self.count}'


ALL = Shard(0, 1)  # of a run in one process


def all_of(count: int) -> list[Shard]:
  """Return all shards of a run."""
  return [Shard(i, count) for i in range(count)]


def count(run: RunDir) -> int | None:
  """Return how many shards a run has, None for a run of one process."""
  counts = {int(m.group(1)) for m in (re.fullmatch(r'\d+-of-(\d+)', name) for name in run.names(SHARDS)) if m}
  if len(counts) > 1:
    raise RunError(f'{run.path / SHARDS} has shards of {min(counts)} and of {max(counts)}; remove those of one kind.')
  return min(counts, default=None)


def check_none(run: RunDir, folders: Iterable[RunDir]):
  """Refuse to go on as one process with a run of shards of which not all results are written."""
  if (n := count(run)) and not all(folder.exists('results.json') for folder in folders):
    raise RunError(f'{run} has a run of {n} shards: resume it with --shard=i/{n}, or write its results with --merge.')


@contextlib.contextmanager
def locked(run: RunDir, shard: Shard, prepare: Callable[[], None]) -> Iterator[None]:
  """Lock a shard, next to processes that have locked others, having prepared what they share."""
  own = RunDir(shard.folder(run).path, 'give another --shard')
  rundir.check(run)
  _check(run, shard)
  try:
    prepare()
  except RunError as error:
    raise RunError(f'shard {shard}: {error}') from None
  with own.locked():
    own.clean()
    yield


def _check(run: RunDir, shard: Shard):
  """Refuse a shard of another number of them, and of a run that one process began."""
  n = count(run)
  if n is None and run.measured():
    raise RunError(f'{run} has a run of one process; resume it without --shard, or {run.elsewhere}.')
  if n is not None and n != shard.count:
    raise RunError(
      f'--shard={shard}: {run} has a run of {n} shards; give --shard=i/{n}, {run.elsewhere}, or remove '
      f'{run.path / SHARDS} to measure again.'
    )


def missing(run: RunDir, plans: dict[str, Sequence[int]], files: Sequence[str], count: int) -> list[str]:
  """Return in words which shards lack what; plans give each journal the turns of its lines, files are shard 0's."""
  lacking = []
  begun = run.names(SHARDS)
  for shard in all_of(count):
    folder = shard.folder(run)
    wanted = {name: sum(map(shard.has, turns)) for name, turns in plans.items()}
    total = sum(wanted.values())
    there = sum(min(n, folder.count(name)) for name, n in wanted.items())
    lacks = [name for name in files if shard.index == 0 and not folder.exists(name)]
    if folder.path.name not in begun and total:
      lacking.append(f'{shard} (not begun)')
    elif there < total:
      lacking.append(f'{shard} ({there} of {total} lines)')
    elif lacks:
      lacking.append(f'{shard} (without {", ".join(lacks)})')
  return lacking


def merged(parts: Sequence[Journal], turns: Iterable[int]) -> Iterator[bytes]:
  """Yield the lines of all shards' journals in the order of the plan."""
  lines = [part.raw() for part in parts]
  for turn in turns:
    yield next(lines[turn % len(lines)])
