"""The trained families that tests decode with, and where they are."""

import contextlib
import os
import pathlib
import tempfile

NEW = 40
NAMES = [
  *(f'multi30k/{name}' for name in ('small', 'base', 'large')),
  *(f'gsm8k/{name}' for name in ('draft', 'companion', 'target')),
]

BESIDE = pathlib.Path(__file__).parents[2] / 'shared'  # a folder of checkpoints and data may lie beside the project
BY_FAMILY = {'multi30k': 't5_multi30k', 'gsm8k': 'llama_gsm8k', 'sums': 'llama_sums'}


def folder() -> pathlib.Path | None:
  """Return the folder of families that a user names, else links to what lies beside the project."""
  if given := os.environ.get('SPECCASCADE_FAMILIES'):
    return pathlib.Path(given)
  if not (BESIDE / 'checkpoints').is_dir():
    return None
  root = pathlib.Path(tempfile.gettempdir()) / 'speccascade-test-families'
  for name, checkpoints in BY_FAMILY.items():
    (root / name).mkdir(parents=True, exist_ok=True)
    for file in (*(BESIDE / 'checkpoints' / checkpoints).iterdir(), *(BESIDE / 'data' / name).iterdir()):
      with contextlib.suppress(FileExistsError):
        (root / name / file.name.replace('test_first600', 'test')).symlink_to(file)
  return root
