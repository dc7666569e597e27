"""A run in shares: of n processes, on as many machines as there are, each takes every n-th call of every plan.

  RUN/shards/1-of-3/        the journals of shard 1, and its lock
  RUN/shards/0-of-3/        of shard 0 also what one process measures for all: models.json, floor.json
  RUN/…                     what one process would leave, made from these when all are complete

No shard waits for another. What they share in the run directory is written by one of them at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
from pathlib import Path
import re

from speccascade.evaluate import rundir
from speccascade.host import journal, storage
from speccascade.host.errors import RunError

FOLDER = rundir.SHARDS


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

  def folder(self, run: Path) -> Path:
    """Return where its journals are."""
    return run / FOLDER / f'{self.index}-of-{self.count}'


ALL = Shard(0, 1)  # of a run in one process


def all_of(count: int) -> list[Shard]:
  """Return all shards of a run."""
  return [Shard(i, count) for i in range(count)]


def count(run: Path) -> int | None:
  """Return how many shards a run has, None for a run of one process."""
  with storage.one_sentence(f'{run} cannot be read', rundir.READ):
    names = storage.names(run / FOLDER)
  counts = {int(m.group(1)) for m in (re.fullmatch(r'\d+-of-(\d+)', name) for name in names) if m}
  if len(counts) > 1:
    raise RunError(f'{run / FOLDER} has shards of {min(counts)} and of {max(counts)}; remove those of one kind.')
  return min(counts, default=None)


def check_none(run: Path, folders: Iterable[Path]):
  """Refuse to go on as one process with a run of shards of which not all results are written."""
  if (n := count(run)) and not all(rundir.exists(folder / 'results.json') for folder in folders):
    raise RunError(f'{run} has a run of {n} shards: resume it with --shard=i/{n}, or write its results with --merge.')


@rundir.by_writer
def locked(run: Path, shard: Shard, prepare: Callable[..., None]) -> Iterator[None]:
  """Lock a shard, next to processes that have locked others, having prepared what they share.

  `prepare(begun=…)` learns whether another has begun to use that.
  """
  with rundir.locked(run, shared=True), contextlib.ExitStack() as stack:
    with alone(run):
      _check(run, shard)
      others = {other.folder(run).name for other in all_of(shard.count) if other != shard}
      try:
        prepare(begun=not others.isdisjoint(storage.names(run / FOLDER)))
      except RunError as error:
        raise RunError(f'shard {shard}: {error}') from None
      stack.enter_context(rundir.owned(shard.folder(run), 'give another --shard'))
      rundir.clean(shard.folder(run))
    yield


@rundir.by_writer
def alone(run: Path) -> Iterator[None]:
  """Lock what the shards share, waiting until it is free; in a bucket it cannot be locked."""
  if storage.in_bucket(run):
    yield
    return
  with storage.lock(run / FOLDER / rundir.LOCK, 'choose another --run_dir', wait=True):
    rundir.clean(run)
    yield


def _check(run: Path, shard: Shard):
  """Refuse a shard of another number of them, and of a run that one process began."""
  n = count(run)
  if n is None and rundir.measured(run):
    raise RunError(f'{run} has a run of one process; resume it without --shard, or choose another --run_dir.')
  if n is not None and n != shard.count:
    raise RunError(
      f'--shard={shard}: {run} has a run of {n} shards; give --shard=i/{n}, choose another --run_dir, or remove '
      f'{run / FOLDER} to measure again.'
    )


def missing(run: Path, plans: dict[str, Sequence[int]], files: Sequence[str], count: int) -> list[str]:
  """Return in words which shards lack what; plans give each journal the turns of its lines, files are shard 0's."""
  lacking = []
  begun = storage.names(run / FOLDER)
  for shard in all_of(count):
    folder = shard.folder(run)
    total = 0
    there = 0
    for name, turns in plans.items():
      wanted = sum(map(shard.has, turns))
      total = total + wanted
      there = there + min(wanted, journal.count(folder / name))
    lacks = [name for name in files if shard.index == 0 and not (folder / name).exists()]
    if folder.name not in begun and total:
      lacking.append(f'{shard} (not begun)')
    elif there < total:
      lacking.append(f'{shard} ({there} of {total} lines)')
    elif lacks:
      lacking.append(f'{shard} (without {", ".join(lacks)})')
  return lacking


def merged(parts: Sequence[journal.Journal], turns: Iterable[int]) -> Iterator[bytes]:
  """Yield the lines of all shards' journals in the order of the plan."""
  lines = [part.raw() for part in parts]
  for turn in turns:
    yield next(lines[turn % len(lines)])
