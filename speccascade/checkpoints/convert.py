"""Convert a checkpoint from any format that is read to one that is written, and verify it by reading it back."""

import math
from pathlib import Path
import time

from speccascade import checkpoints
from speccascade.checkpoints import files, hf, t5x
from speccascade.host import storage
from speccascade.types import Model

_WRITERS = {'hf': hf.write, 't5x': t5x.write}
FORMATS = tuple(_WRITERS)
_ANEW = 'remove the folder, check the disk, and convert again'


def convert(
  src,
  dst,
  *,
  form: str = 'hf',
  dtype: str | None = None,
  overwrite: bool = False,
  step: int | None = None,
  scan: bool = False,
  activation: str | None = None,
) -> Path:
  """Write a checkpoint in another format or dtype, check it by reading it back, and print a summary.

  Args:
    src: Path of the checkpoint to read, as `load` takes it, on this machine, a GGUF file or a hub id.
    dst: Folder to write.
    form: 'hf' or 't5x'.
    dtype: Dtype to write; None for that of each stored tensor.
    overwrite: Replace a checkpoint that is at `dst`.
    step: Number of the checkpoint; t5x only.
    scan: Stack the layers, as T5X's scalable_t5 has them; t5x only.
    activation: Activation of the source's MLPs, as `load` takes it.

  Returns:
    The folder of the checkpoint that was written.

  Raises:
    ValueError: the source cannot be read, or written in that format, or what is read back differs.
    OSError: `dst` exists or cannot be written.
  """
  if form != 't5x' and (scan or step is not None):
    raise ValueError(f'{"scan=True" if scan else f"step={step}"} is for the format t5x, not {form}: leave it out')
  src = storage.local(src)
  dst = storage.local(dst).absolute()
  if form == 't5x' and t5x.find(dst) != dst:  # a folder of steps, where another is written next to them
    dst = dst / f'checkpoint_{1 if step is None else step}'
  overwrite = _check_destination(dst, form, overwrite)
  source = t5x.find(checkpoints.folder_of(src))
  if dst == source or dst in source.parents:
    raise ValueError(f'{dst} is or contains the source {source}: choose another destination')
  start = time.perf_counter()
  model = checkpoints.read(src, dtype=dtype, activation=activation)
  read = time.perf_counter()
  expected = files.facts(model.params)
  network = model.network
  count = sum(math.prod(facts['shape']) for facts in expected.values())
  options = {'step': step, 'scan': scan} if form == 't5x' else {}
  folder = _WRITERS[form](dst, model, overwrite=overwrite, **options)
  written = time.perf_counter()
  del model
  back = checkpoints.read(folder)
  _verify(folder, expected, hf.settled(network) if form == 'hf' else network, back)
  size = sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())
  print(f'read      {src}: {count / 1e6:.2f} M parameters, {read - start:.1f} s')
  print(f'written   {folder}: {size / 1e6:.2f} MB as {form}, {written - read:.1f} s')
  print(f'verified  {len(expected)} tensors equal in shape, dtype and CRC-32, {time.perf_counter() - written:.1f} s')
  print(f'tokenizer {"none" if back.tokenizer is None else back.tokenizer.path}')
  return folder


def _check_destination(dst: Path, form: str, overwrite: bool) -> bool:
  """Return whether `dst` may be replaced; raise where writing fails, or would replace no checkpoint."""
  storage.check_writable(dst)
  if not dst.exists():
    return overwrite
  if dst.is_dir() and not any(dst.iterdir()):
    return True
  storage.check_free(dst, overwrite)
  if dst.is_file():
    raise NotADirectoryError(f'{dst} is a file: choose a folder')
  checkpoints.kind(dst)  # raises for a folder of anything else, which is never replaced
  if form != 't5x':  # which is written into a folder of `dst`
    files.check_free(dst, overwrite)
  return True


def _verify(folder: Path, expected: dict[str, dict], network, back: Model) -> None:
  """Raise for the first tensor, or the network, that differs from what was written."""
  result = files.facts(back.params)
  for name in sorted(expected.keys() | result.keys()):
    if expected.get(name) != result.get(name):
      raise ValueError(
        f"{folder}: tensor '{name}' was written as {expected.get(name)} and read back as {result.get(name)}: {_ANEW}"
      )
  if back.network != network:
    raise ValueError(f'{folder}: the network was {network} and was read back as {back.network}: {_ANEW}')
