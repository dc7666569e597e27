"""Convert a checkpoint from any format that is read to one that is written, and prove it by reading it back.

python -m speccascade.convert SRC DST [--format orbax|t5x|hf] [--dtype float32|bfloat16] [--step N] [--scan]

Orbax keeps every family and restores onto a mesh, hf every family for transformers and vLLM; t5x is for T5 only. T5X is
written without `param_states`, an optimizer's: T5X evaluates and infers with it, and trains on from it with
`RestoreCheckpointConfig.fallback_to_scratch = True` and `assignment_map = (('state/param_states.*', None),)`.
"""

import argparse
from collections.abc import Sequence
import os
from pathlib import Path
import sys
import tempfile
import time

import jax
import numpy as np

from speccascade import checkpoints
from speccascade.checkpoints import files, hf_write, orbax, t5x
from speccascade.host import commands, storage
from speccascade.types import Model


def main(argv: Sequence[str] | None = None) -> int:
  """Run the command line; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _run(args: argparse.Namespace):
  convert(
    args.src, args.dst, form=args.format, dtype=args.dtype, overwrite=args.overwrite, step=args.step, scan=args.scan,
    activation=args.activation, revision=args.revision,
  )  # fmt: skip


def convert(
  src,
  dst,
  *,
  form: str = 'orbax',
  dtype: str | None = None,
  overwrite: bool = False,
  step: int | None = None,
  scan: bool = False,
  activation: str | None = None,
  revision: str | None = None,
) -> Path:
  """Write the checkpoint at `src` to `dst`, check it by reading it back, and return its folder.

  `step` and `scan` (the layers stacked, as T5X's scalable_t5 has them) are for T5X; `activation` and `revision` are
  `load`'s.
  """
  if form != 't5x' and (scan or step is not None):
    raise ValueError(f'{"scan=True" if scan else f"step={step}"} is for the format t5x, not {form}: leave it out')
  src, dst = storage.local(src), storage.local(dst).absolute()
  _check_destination(src, dst, overwrite)
  start = time.perf_counter()
  model = checkpoints.read(src, dtype=dtype, activation=activation, revision=revision)
  read = time.perf_counter()
  expected, network, count = _facts(model), model.network, sum(x.size for x in jax.tree.leaves(model.params))
  folder = _write(form, dst, model, overwrite, step, scan)
  written = time.perf_counter()
  del model
  back = checkpoints.read(folder)
  _verify(folder, expected, hf_write.settled(network) if form == 'hf' else network, back)
  done = time.perf_counter()
  print(f'read      {src}: {count / 1e6:.2f} M parameters, {read - start:.1f} s')
  print(f'written   {folder}: {_size(folder) / 1e6:.2f} MB as {form}, {written - read:.1f} s')
  print(f'verified  {len(expected)} tensors equal in shape, dtype and CRC-32, {done - written:.1f} s')
  print(f'tokenizer {"none found" if back.tokenizer is None else back.tokenizer.path}')
  return folder


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.convert', __doc__)
  parser.add_argument('src', metavar='SRC', help='folder or hub id of the checkpoint to read')
  parser.add_argument('dst', metavar='DST', help='folder to write; t5x writes DST/checkpoint_STEP unless DST is one')
  parser.add_argument('--format', choices=['orbax', 't5x', 'hf'], default='orbax', help='what to write (orbax)')
  parser.add_argument('--dtype', choices=['float32', 'bfloat16'], help='dtype to write (default: as stored)')
  parser.add_argument('--step', type=int, help='of t5x: the number of the checkpoint (1; T5X passes over 0)')
  parser.add_argument('--scan', action='store_true', help="of t5x: layers stacked, for T5X's scalable_t5")
  parser.add_argument('--activation', help="of SRC's MLPs, where it is T5X without its gin: gelu, relu, silu, swish")
  parser.add_argument('--revision', help='branch, tag or commit, where SRC is a hub id')
  parser.add_argument('--overwrite', action='store_true', help='replace a checkpoint that is at DST')
  return parser


def _check_destination(src, dst: Path, overwrite: bool) -> None:
  """Raise before any work where writing would fail, or would destroy the source or what is no checkpoint."""
  source = Path(os.path.abspath(checkpoints.whole(src)[0]))
  source = t5x.find(source) if source.is_dir() else source
  if source.exists() and (dst == source or dst in source.parents):
    raise ValueError(f'{dst} is or holds the source {source}: choose another destination')
  _check_writable(dst)
  if not dst.exists() or (dst.is_dir() and not any(dst.iterdir())):
    return
  if not overwrite:
    raise FileExistsError(f'{dst} exists: choose another folder, or pass --overwrite')
  if dst.is_file():
    raise NotADirectoryError(f'{dst} is a file: choose a folder')
  checkpoints.kind(dst)  # raises for a folder of anything else, which is not ours to replace


def _check_writable(dst: Path) -> None:
  """Raise where the folder that is to hold `dst` lets no folder be made in it."""
  place = next(p for p in dst.parents if p.exists())
  try:
    with tempfile.TemporaryDirectory(dir=place):
      pass
  except OSError as error:
    raise PermissionError(
      f'{dst} cannot be written, for {place} may not be written to ({error.strerror}): choose another'
    ) from None


def _write(form: str, dst: Path, model: Model, overwrite: bool, step: int | None, scan: bool) -> Path:
  overwrite = overwrite or (dst.is_dir() and not any(dst.iterdir()))
  if form == 'orbax':
    return orbax.save(dst, model, overwrite=overwrite)
  if form == 't5x':
    return t5x.write(dst, model, step=step, scan=scan, overwrite=overwrite)
  return hf_write.write(dst, model, overwrite=overwrite)


def _facts(model: Model) -> dict[str, tuple]:
  """Return shape, dtype and checksum of every tensor."""
  tensors = files.named(model.params)
  return {name: (list(x.shape), x.dtype.name, f'{files.checksum(np.asarray(x)):08x}') for name, x in tensors.items()}


def _verify(folder: Path, expected: dict[str, tuple], network, back: Model) -> None:
  """Raise for the first tensor, or the network, that was not read back as it was written."""
  found = _facts(back)
  for name in sorted(expected.keys() | found.keys()):
    if expected.get(name) != found.get(name):
      raise ValueError(
        f"{folder}: tensor '{name}' was written as {expected.get(name)} and read back as {found.get(name)}: "
        'remove the folder, check the disk, and convert again'
      )
  if back.network != network:
    raise ValueError(f'{folder}: the network was {network} and was read back as {back.network}: write orbax instead')


def _size(folder: Path) -> int:
  return sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())


if __name__ == '__main__':
  sys.exit(main())
