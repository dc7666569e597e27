"""A checkpoint that a config names, of an experiment or a training job."""

from collections.abc import Callable
import dataclasses
from typing import Any

from speccascade import checkpoints
from speccascade.data import sources, tokenizers
from speccascade.host.errors import first_line
from speccascade.types import Model


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model by its path, loaded when it is needed.

  Attributes:
    path: The source of a checkpoint, or of a part of it, as `load` takes it.
    dtype: Float32, bfloat16, float16 or int8, of the weights alone; None: as stored, but float32 on a CPU.
    name: The name in results; None: that of the checkpoint.
    tokenizer: The source of another tokenizer than the checkpoint's.
    scan: Whether the layers are one loop in the compiled program.
    activation: Of a T5X checkpoint without its gin file.
    rules: How the parameters are sharded over a mesh: 'replicated', 'sharded' or pairs of axes.
  """

  path: str
  dtype: str | None = None
  name: str | None = None
  tokenizer: str | None = None
  scan: bool = False
  activation: str | None = None
  rules: Any = dataclasses.field(default=None, repr=False)

  def __post_init__(self):
    if not isinstance(self.path, str) or not self.path:
      raise ValueError(f'Checkpoint: path={self.path!r} is not a path; give the folder of a checkpoint.')
    sources.check(self.path)

  def find_tokenizer(self) -> Any:
    """Return the tokenizer, without loading the model; None where the checkpoint has none."""
    if self.tokenizer is not None:
      return tokenizers.load(self.tokenizer)
    return tokenizers.find(self.path)

  def digest(self) -> str:
    """Return a digest of the files at the path."""
    return self._read(checkpoints.digest, tokenizer=self.tokenizer)

  def load(self, mesh: Any = None, loaded: list | None = None) -> Model:
    """Return the model at the path; whatever is wrong with the files is an error that names it.

    `loaded` are the checkpoints that were loaded so far, to which this one is added; models of one share its arrays.
    """
    names = ('dtype', 'tokenizer', 'scan', 'activation', 'rules')
    settings = {name: getattr(self, name) for name in names}
    model = self._read(checkpoints.load_shared, loaded=[] if loaded is None else loaded, mesh=mesh, **settings)
    return model if self.name is None else model.replace(name=self.name)

  def _read(self, read: Callable, **settings) -> Any:
    try:
      return read(self.path, **settings)
    except (ValueError, OSError, MemoryError):
      raise
    except Exception as error:  # the libraries that read weights raise what they like
      raise ValueError(f'{self.path} cannot be loaded ({first_line(error)}); fetch the checkpoint again.') from error
