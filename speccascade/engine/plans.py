"""What was measured of a drafter, a companion and a verifier for speculative verification, kept in one file.

A profile holds the acceptance table, the times it was chosen with, every sample that the table came from, and of which
models, sampler, device and data all of that is. `python -m speccascade.profile` makes one.

Axis letters: N samples, I bins of S, J bins of A.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np

from speccascade import sampling
from speccascade.engine.verification import AcceptanceTable, index_for, Latency
from speccascade.host import disk
from speccascade.types import whole

FORMAT = 3
FIELDS = ('s', 'a', 's_target', 'accept', 'place', 'request')  # of a sample, see `Profile`
KINDS = ('plain', 'speculative', 'sv')  # of a way to decode, each with more to it than the one before
_PSEUDO = 8.0  # samples that a bin borrows from its row, and a row from all
_Z = 1.96


class Way(NamedTuple):
  """A way to decode by the verifier's law: plainly, by speculative decoding, or by speculative verification."""

  kind: str  # of KINDS
  block: int = 0  # γ

  def __str__(self):
    return f'{self.kind}, γ = {self.block}' if self.block else self.kind


@dataclasses.dataclass(frozen=True)
class Origin:
  """Of what a profile is. Models are drafter, companion, verifier; a digest is None for one that is in no folder."""

  names: tuple[str, ...]
  digests: tuple[str | None, ...]
  sampler: tuple[tuple[str, float], ...]
  device: str
  data: str
  block: int
  source: int = 64  # the length of a prompt with which times were measured


@dataclasses.dataclass(frozen=True)
class Profile:
  """An acceptance table and a verifier's times; `origin` None is checked against nothing.

  `samples` has an array [N] for each of `FIELDS`: S and A of drafter and companion, the same of drafter and verifier
  (`accept` is the chance that the verifier keeps the token), the place in the block and the number of the prompt.
  `times` is {rows: {tokens: seconds}} of the verifier, `steps` {rows: [3]} the seconds of a token of the drafter, of
  the companion's reading and of a token of the verifier alone; `latency` is made of both. `ways` is {rows: Way}, the
  fastest at that batch; `measured` has the tokens a second {rows: {Way: …}} of those that were tried, if any was.
  """

  table: AcceptanceTable
  latency: Latency
  origin: Origin | None = None
  samples: Mapping[str, np.ndarray] | None = None
  times: Mapping[int, Mapping[int, float]] | None = None
  steps: Mapping[int, Sequence[float]] | None = None
  ways: Mapping[int, Way] | None = None
  measured: Mapping[int, Mapping[Way, float]] | None = None

  def __post_init__(self):
    if not isinstance(self.latency, Latency):
      object.__setattr__(self, 'latency', Latency.of(self.latency))
    _check(self)

  def way(self, batch: int) -> Way:
    """Return the way to decode a batch of so many rows."""
    rows = sorted(self.ways)
    return self.ways[rows[index_for(rows, batch)]]

  def save(self, path) -> None:
    """Write the profile to a file."""
    bins = binned(self.table, self.samples['s'], self.samples['a'], self.samples['accept'])
    found = dict(
      speccascade_profile=FORMAT,
      origin=dataclasses.asdict(self.origin),
      table=_plain_table(self.table) | {name: np.round(x, 5).tolist() for name, x in bins.items()},
      times={str(n): {str(t): s for t, s in some.items()} for n, some in self.times.items()},
      steps={str(n): list(s) for n, s in self.steps.items()},
      ways={str(n): list(way) for n, way in self.ways.items()},
      measured={str(n): [[*way, x] for way, x in some.items()] for n, some in (self.measured or {}).items()},
      samples={name: np.round(np.asarray(x, np.float64), 5).tolist() for name, x in self.samples.items()},
    )
    disk.write(disk.local(path), json.dumps(found))


def load(path) -> Profile:
  """Return the profile in a file, which is read once."""
  file = disk.local(path)
  if not file.is_file():
    raise FileNotFoundError(f'{file}: no such profile; make one with python -m speccascade.profile.')
  return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(file: Path, _changed: int) -> Profile:
  try:
    found = json.loads(file.read_text())
    if found['speccascade_profile'] != FORMAT:
      raise ValueError(f'format {found["speccascade_profile"]}')
    origin = {k: tuple(map(_tuple, v)) if isinstance(v, list) else v for k, v in found['origin'].items()}
    origin = Origin(**origin)
    table = table_of(found['table']['s_edges'], found['table']['a_edges'], found['table']['means'])
    times = {int(n): {int(t): s for t, s in some.items()} for n, some in found['times'].items()}
    steps = {int(n): tuple(s) for n, s in found['steps'].items()}
    samples = {name: np.asarray(found['samples'][name]) for name in FIELDS}
    ways = {int(n): Way(*way) for n, way in found['ways'].items()}
    measured = {int(n): {Way(*way): x for *way, x in some} for n, some in found['measured'].items()}
    return Profile(table, Latency.of(times, steps), origin, samples, times, steps, ways, measured or None)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    said = f'{error} is missing' if isinstance(error, KeyError) else str(error).removesuffix('.')
    raise ValueError(f'{file} is no profile of this version ({said}); make one with speccascade.profile.') from None


def _check(found: Profile) -> None:
  """Refuse a profile of which a part cannot have been measured, by the name of that part."""
  if found.origin is not None:
    _check_origin(found.origin)
  _check_table(found.table)
  _within('samples', list((found.samples or {}).values()), 1e9)
  for name in ('s', 'a', 's_target', 'accept'):
    _within(f'samples.{name}', (found.samples or {}).get(name, ()))
  if len({len(x) for x in (found.samples or {}).values()}) > 1:
    raise ValueError('samples do not have as many numbers of each kind')
  _within('times', [list(some.values()) for some in (found.times or {}).values()], 1e9)
  _within('steps', list((found.steps or {}).values()), 1e9)
  if found.steps is not None and not all(len(found.steps.get(rows, ())) == 3 for rows in found.times):
    raise ValueError('steps are not three times for each of the batches that times has')
  if found.ways is not None and not found.ways:
    raise ValueError('ways is empty: it needs a way to decode for a batch of one row at least')
  measured = found.measured or {}
  _within('measured', [list(some.values()) for some in measured.values()], 1e9)
  for rows in (found.times, found.ways, found.measured):
    for n in rows or ():
      whole('a number of rows', n)
  for way in [*(found.ways or {}).values(), *(way for some in measured.values() for way in some)]:
    _check_way(way, found.origin.block if found.origin else np.inf)


def _check_origin(origin: Origin) -> None:
  texts = [*origin.names, *(x for x in origin.digests if x is not None), origin.device, origin.data]
  if (len(origin.names), len(origin.digests)) != (3, 3) or not all(isinstance(x, str) for x in texts):
    raise ValueError('origin does not have names and digests of three models, a device and data')
  sampling.Sampler(**dict(origin.sampler))
  whole('origin.block', origin.block)
  whole('origin.source', origin.source)


def _check_table(table: AcceptanceTable) -> None:
  rows = np.asarray(table.a_edges)
  _within('table.s_edges', table.s_edges)
  _within('table.a_edges', rows[~np.isposinf(rows)])  # rows of fewer bins are padded
  _within('table.means', table.means)
  if np.shape(table.means) != (len(table.s_edges) + 1, rows.shape[1] + 1) or len(rows) != len(table.s_edges) + 1:
    raise ValueError('table.means does not have a row for each bin of S and a column for each bin of A')
  for name, edges in [('s_edges', table.s_edges), *(('a_edges', row[np.isfinite(row)]) for row in rows)]:
    if (np.diff(edges) <= 0).any() or not np.isfinite(edges).all():
      raise ValueError(f'table.{name} do not ascend')


def _check_way(way: Way, most: float) -> None:
  number = isinstance(way.block, int) and not isinstance(way.block, bool)
  if way.kind not in KINDS or not number or (way.kind == 'plain') != (way.block == 0) or not 0 <= way.block <= most:
    of = '' if most == np.inf else f' of at most {most}'
    raise ValueError(f'{way!r} is no way to decode; give one of {", ".join(KINDS)}, and γ{of} unless it is plain.')


def _within(name: str, values: Any, most: float = 1.0) -> None:
  """Refuse what are no numbers from 0 to `most`, but for rounding."""
  values = values if isinstance(values, list) else [values]
  for some in values:
    try:
      x = np.asarray(some, np.float64).ravel()
    except (ValueError, TypeError):
      raise ValueError(f'{name} are not numbers alone') from None
    if bad := x[~((x >= 0) & (x <= most * (1 + 1e-4)))].tolist():
      raise ValueError(f'{name} has {bad[0]:g}, not numbers from 0 to {most:g}')


def _tuple(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value


def get(profile: Any) -> Profile:
  """Return a profile that is given, or the one in the file whose path is given."""
  if isinstance(profile, (str, Path)):
    return load(profile)
  if isinstance(profile, Profile):
    return profile
  raise ValueError(
    f'profile={profile!r} is no profile; give the path of one that python -m speccascade.profile made, or a '
    'profiles.Profile(table, latency).'
  )


# ---- the table ----


def fit(s: np.ndarray, a: np.ndarray, accept: np.ndarray, bins: Sequence[int] = (20, 15)) -> AcceptanceTable:
  """Return mean acceptance in bins of equal counts: `bins` of S and, within each of those, of A.

  A bin with few samples is drawn towards the mean of its row, a row towards that of all.
  """
  s_edges = edges(s, bins[0])
  row = np.searchsorted(s_edges, s, side='right')
  a_edges = [edges(a[row == i], bins[1]) for i in range(len(s_edges) + 1)]
  shape = len(a_edges), max(len(e) for e in a_edges) + 1
  row, column = cells(table_of(s_edges, a_edges, np.zeros(shape)), s, a)
  total, count = (_sums(row, column, shape, x) for x in (accept, np.ones_like(accept)))
  of_all = accept.mean()
  of_row = (total.sum(1, keepdims=True) + _PSEUDO * of_all) / (count.sum(1, keepdims=True) + _PSEUDO)
  return table_of(s_edges, a_edges, (total + _PSEUDO * of_row) / (count + _PSEUDO))


def edges(x: np.ndarray, bins: int) -> np.ndarray:
  """Return the inner edges of at most `bins` bins with equal counts of x; equal values stay together."""
  if not x.size:
    return np.zeros(0)
  found = np.unique(np.quantile(x, np.arange(1, bins) / bins, method='inverted_cdf')) if bins > 1 else np.zeros(0)
  return found[found > x.min()]


def table_of(s_edges, a_edges, means) -> AcceptanceTable:
  """Return a table, the edges of A padded so that rows of fewer bins stand beside rows of more."""
  padded = np.full((len(a_edges), max(map(len, a_edges), default=0)), np.inf, np.float32)
  try:
    for i, some in enumerate(a_edges):
      padded[i, : len(some)] = some
    return AcceptanceTable(np.asarray(s_edges, np.float32), padded, np.asarray(means, np.float32))
  except (ValueError, TypeError):
    raise ValueError('table has edges or means that are no numbers, or rows of different lengths') from None


def cells(table: AcceptanceTable, s: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return the row and the column of each sample in a table."""
  row = np.searchsorted(table.s_edges, np.float32(s), side='right')
  return row, (table.a_edges[row] <= np.float32(a)[:, None]).sum(1)


def predicted(table: AcceptanceTable, s: np.ndarray, a: np.ndarray) -> np.ndarray:
  """Return the acceptance that a table promises each sample."""
  return np.asarray(table.means, np.float64)[cells(table, s, a)]


def binned(table: AcceptanceTable, s: np.ndarray, a: np.ndarray, accept: np.ndarray) -> dict[str, np.ndarray]:
  """Return {counts, low, high} [I, J]: how many samples each bin has, and Wilson's 95 % interval of their mean."""
  shape = np.shape(table.means)
  row, column = cells(table, s, a)
  total, n = (_sums(row, column, shape, x) for x in (accept, np.ones_like(accept)))
  low, high = wilson(total, n)
  return dict(counts=n, low=low, high=high)


def wilson(total: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return Wilson's 95 % interval of a share; of a mean of numbers in [0, 1] it is no narrower than it should be."""
  size = np.maximum(n, 1e-9)
  middle = (total / size + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
  share = np.clip(total / size, 0, 1)
  half = _Z / (1 + _Z**2 / size) * np.sqrt(share * (1 - share) / size + (_Z / (2 * size)) ** 2)
  return np.where(n > 0, np.maximum(middle - half, 0), 0), np.where(n > 0, np.minimum(middle + half, 1), 1)


def _sums(row, column, shape, weight) -> np.ndarray:
  return np.bincount(row * shape[1] + column, weight, shape[0] * shape[1]).reshape(shape)


def _plain_table(table: AcceptanceTable) -> dict[str, list]:
  rows = [row[np.isfinite(row)].tolist() for row in np.asarray(table.a_edges)]
  return dict(s_edges=np.asarray(table.s_edges).tolist(), a_edges=rows, means=np.asarray(table.means).tolist())


# ---- what it is of ----


def sampler_of(sampler: sampling.Sampler) -> tuple[tuple[str, float], ...]:
  """Return the numbers of a sampler that are given."""
  given = [name for name in sampling.NEUTRAL if name == 'temperature' or sampler.given(name)]
  return tuple((name, float(getattr(sampler, name))) for name in given)


def device_of(models: Sequence) -> str:
  """Return the device and the dtype that the last of the models computes with."""
  leaf = max(jax.tree.leaves(models[-1].params), key=np.size)
  devices = leaf.devices() if isinstance(leaf, jax.Array) else jax.devices()[:1]
  many = f'{len(devices)} × ' if len(devices) > 1 else ''
  return f'{many}{next(iter(devices)).device_kind}, {leaf.dtype}'


def check_models(origin: Origin | None, models: Sequence) -> None:
  """Refuse models that a profile is not of; warn where they run on another device."""
  if origin is None:
    return
  check_digests(origin, models)
  if (here := device_of(models)) != origin.device:
    warnings.warn(
      f'the profile was measured on {origin.device}, and this is {here}: acceptance is the same, times are not; '
      'python -m speccascade.profile --times PROFILE --data FILE measures them anew.', stacklevel=5
    )  # fmt: skip


def check_digests(origin: Origin, models: Sequence) -> None:
  """Refuse models that a profile is not of."""
  roles = ('drafter', 'companion', 'verifier')
  for role, name, digest, model in zip(roles, origin.names, origin.digests, models, strict=True):
    if None not in (digest, model.digest) and digest != model.digest:
      raise ValueError(
        f'the profile was measured with {name} ({digest}) as {role}, not with {model.name} ({model.digest}); make one '
        'of these models with python -m speccascade.profile.'
      )


def check_sampler(origin: Origin | None, sampler: sampling.Sampler) -> None:
  """Refuse a sampler under which a profile was not measured."""
  if origin is not None and _law(sampler_of(sampler)) != _law(origin.sampler):
    said = lambda numbers: ', '.join(f'{name} {value:g}' for name, value in numbers)
    raise ValueError(
      f'the profile was measured with {said(origin.sampler)}, not with {said(sampler_of(sampler))}; make one with this '
      'sampler with python -m speccascade.profile.'
    )


def _law(numbers: Sequence[tuple[str, float]]) -> dict[str, Any]:
  """Return the numbers that decide the law, as the program has them; no filter changes what is likeliest."""
  greedy = dict(numbers)['temperature'] == 0
  return {name: np.float32(x) for name, x in numbers if not (greedy and name in ('top_k', 'top_p', 'min_p'))}


def digest_of(rows: Sequence[Sequence[int]]) -> str:
  """Return 16 hex digits that tell prompts from any other."""
  return hashlib.sha256(json.dumps([list(map(int, row)) for row in rows]).encode()).hexdigest()[:16]
