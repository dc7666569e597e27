"""A run in shares: of n processes, on as many machines as there are, each takes every n-th call of every plan.

  RUN/shards/1-of-3/        the journals of shard 1, and its lock
  RUN/shards/0-of-3/        of shard 0 also what one process measures for all: models.json, floor.json
  RUN/…                     what one process would leave, made from these when all are whole

No shard waits for another. What they share in the run directory is written by one of them at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import fcntl
from pathlib import Path
import re

from speccascade.evaluate import journals, rundir
from speccascade.host import buckets, disk, multihost
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
    """Tell whether a call is this shard's."""
    return turn % self.count == self.index

  def folder(self, run: Path) -> Path:
    """Return where its journals are."""
    return run / FOLDER / f'{self.index}-of-{self.count}'


WHOLE = Shard(0, 1)


def of(count: int) -> list[Shard]:
  """Return all shards of a run."""
  return [Shard(i, count) for i in range(count)]


def count(run: Path) -> int | None:
  """Return how many shards a run has been cut in, if it has been."""
  with rundir.told(f'{run} cannot be read', 'permit it, or choose another --run_dir'):
    names = disk.names(run / FOLDER)
  found = {int(m.group(1)) for m in (re.fullmatch(r'\d+-of-(\d+)', name) for name in names) if m}
  if len(found) > 1:
    raise RunError(f'{run / FOLDER} has shards of {min(found)} and of {max(found)}; remove those of one kind.')
  return min(found, default=None)


def check_none(run: Path, folders: Iterable[Path]):
  """Refuse to go on as one process with a run of shards of which not all results are written."""
  if (n := count(run)) and not all(rundir.exists(folder / 'results.json') for folder in folders):
    raise RunError(f'{run} holds a run of {n} shards: go on with --shard=i/{n}, or write its results with --merge.')


def held(run: Path, shard: Shard, prepare: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
  """Hold a shard for this process, beside those that hold others, having prepared what they share.

  `prepare` is told whether another has `begun` to use that.
  """
  return multihost.held(_held(run, shard, prepare))


@contextlib.contextmanager
def _held(run: Path, shard: Shard, prepare: Callable[..., None]) -> Iterator[None]:
  with rundir.locked(run, shared=True), contextlib.ExitStack() as stack:
    with alone(run):
      _check(run, shard)
      others = {other.folder(run).name for other in of(shard.count) if other != shard}
      try:
        prepare(begun=not others.isdisjoint(disk.names(run / FOLDER)))
      except RunError as error:
        raise RunError(f'shard {shard}: {error}') from None
      stack.enter_context(rundir.owned(shard.folder(run), 'give another --shard'))
      rundir.clean(shard.folder(run))
    yield


def alone(run: Path) -> contextlib.AbstractContextManager[None]:
  """Wait until no other process is at what the shards share, and keep them from it; a bucket lets them."""
  return multihost.held(_alone(run))


@contextlib.contextmanager
def _alone(run: Path) -> Iterator[None]:
  folder = run / FOLDER
  if buckets.inside(run):
    yield
    return
  with rundir.told(f'{folder} cannot be made', 'choose another --run_dir'):
    disk.make(folder)
    handle = open(folder / rundir.LOCK, 'a', opener=disk.unlinked)
  with handle:
    fcntl.flock(handle, fcntl.LOCK_EX)
    rundir.clean(run)
    yield


def _check(run: Path, shard: Shard):
  """Refuse a shard of another number of them, and of a run that one process began."""
  n = count(run)
  if n is None and rundir.measured(run):
    raise RunError(f'{run} holds a run of one process; go on without --shard, or choose another --run_dir.')
  if n is not None and n != shard.count:
    raise RunError(
      f'--shard={shard}: {run} holds a run of {n} shards; give --shard=i/{n}, choose another --run_dir, or remove '
      f'{run / FOLDER} to measure anew.'
    )


def missing(run: Path, plans: dict[str, Sequence[int]], files: Sequence[str], shards: Sequence[Shard]) -> list[str]:
  """Return in words which shards lack what; plans give each journal the turns of its lines, files are shard 0's."""
  said, begun = [], disk.names(run / FOLDER)
  for shard in shards:
    folder, total, there = shard.folder(run), 0, 0
    for journal, turns in plans.items():
      wanted = sum(map(shard.has, turns))
      total, there = total + wanted, there + min(wanted, journals.count(folder / journal))
    lacks = [name for name in files if shard.index == 0 and not (folder / name).exists()]
    if folder.name not in begun and total:
      said.append(f'{shard} (not begun)')
    elif there < total:
      said.append(f'{shard} ({there} of {total} lines)')
    elif lacks:
      said.append(f'{shard} (without {", ".join(lacks)})')
  return said


def merged(parts: Sequence[journals.Journal], turns: Iterable[int]) -> Iterator[bytes]:
  """Yield the lines of all shards' journals in the order of the plan."""
  lines = [journal.raw() for journal in parts]
  for turn in turns:
    yield next(lines[turn % len(lines)])
