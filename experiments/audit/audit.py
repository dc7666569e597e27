"""Judge the speculative samplers of the installed packages, a line each.

python -m experiments.audit.audit [NAME ...]     # with the packages of requirements.txt; those named, or all
"""

from importlib import metadata
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from experiments.audit import samplers
from speccascade.check.sampler import check_sampler
from speccascade.check.sampler.cases import Case, cases

LONG = Case(
  np.array([(0.6, 0.4), (0.3, 0.7), (0.8, 0.2), (0.1, 0.9)]), np.array([(0.9, 0.1), (0.6, 0.4), (0.5, 0.5)]), tokens=3
)
GIVEN = [[*cases()][i] for i in (0, 1, 4, 6, 10)] + [LONG]
V, Q = np.array([[0.75, 0.25]] * 2), np.array([[0.9, 0.1]])


class Entry(NamedTuple):
  """A sampler of a package, and how it is run."""

  package: str
  runs: int = 3000
  rng: str = 'torch'
  drafts: bool = False
  rows: int = 1
  given: Any = GIVEN
  name: str = ''  # of the function, that of the entry if none


ENTRIES = {
  'transformers': Entry('transformers'),
  'transformers_ensemble': Entry('transformers', given=[Case(V, Q, 1), Case(V, Q, 2)]),
  'keras_hub': Entry('keras-hub', 1000, drafts=True),
  'keras_hub, a batch of two': Entry('keras-hub', 1000, drafts=True, rows=2, given=None, name='keras_hub'),
  'tpu_inference': Entry('tpu-inference', rng='jax', given=None),
  'tpu_inference, a batch of two': Entry('tpu-inference', rng='jax', rows=2, given=None, name='tpu_inference_batch'),
  'sglang': Entry('sglang', 1000),
  'sglang_block': Entry('sglang', 1000),
  'lmdeploy': Entry('lmdeploy'),
  'mtplx': Entry('mtplx', rng='generator'),
  'flashspec': Entry('flashspec'),
  'economize': Entry('economize', 1000),
  'dflash': Entry('dflash'),
  'specdec': Entry('specdec'),
  'seqspecdecod': Entry('sequential-speculative-decoding', drafts=True),
  'seqspecdecod_naive_hsd': Entry('sequential-speculative-decoding', 1000, drafts=True),
  'seqspecdecod_capped_hsd': Entry('sequential-speculative-decoding', 1000, drafts=True),
  'speculative_decoding': Entry('speculative-decoding', 1000, drafts=True),
  'mini_infer': Entry('mini-infer', drafts=True),
}


def main():
  """Print a line for each sampler."""
  for name in sys.argv[1:] or ENTRIES:
    entry = ENTRIES[name]
    try:
      version = metadata.version(entry.package)
    except metadata.PackageNotFoundError:
      print(f'| {entry.package} | `{name}` | not installed |', flush=True)
      continue
    start = time.perf_counter()
    how = dict(rng=entry.rng, drafts=entry.drafts, rows=entry.rows, runs=entry.runs, given=entry.given)
    report = check_sampler(getattr(samplers, entry.name or name), **how)
    seconds = time.perf_counter() - start
    print(f'| {entry.package} {version} | `{name}` | {report} | {seconds:.0f} s |', flush=True)


if __name__ == '__main__':
  main()
