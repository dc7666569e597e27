"""How many bytes fit on a device: its own, or for a CPU what the machine, its control groups and ulimit allow."""

import os
from pathlib import Path
import resource

import jax

GROUPS = Path('/sys/fs/cgroup')
OWN = Path('/proc/self/cgroup')


def memory(device: jax.Device) -> int:
  """Return how many bytes the arrays and programs of this process may take on a device."""
  limit = (device.memory_stats() or {}).get('bytes_limit')
  return limit or min(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'), *_groups(), *_addresses())


def _addresses() -> list[int]:
  """Return the limit of `ulimit -v`, less the addresses that are in use without memory behind them."""
  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  statm = Path('/proc/self/statm')
  if limit == resource.RLIM_INFINITY or not statm.exists():
    return []
  mapped, resident, *_ = map(int, statm.read_text().split())
  return [max(0, limit - (mapped - resident) * os.sysconf('SC_PAGE_SIZE'))]


def _groups() -> list[int]:
  """Return the limits of the control groups that this process is in, of both versions."""
  if not OWN.exists():
    return []
  limits = []
  for line in OWN.read_text().splitlines():
    _, kinds, path = line.split(':', 2)
    if kinds not in ('', 'memory'):
      continue
    root, name = (GROUPS / 'memory', 'memory.limit_in_bytes') if kinds else (GROUPS, 'memory.max')
    group = root / path.lstrip('/')
    paths = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    limits += [int(text) for x in paths if x.is_file() and (text := x.read_text().strip()).isdecimal()]
  return limits
