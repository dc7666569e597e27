"""Training jobs from gin files.

A config binds `train.jobs`, a list of `@train.Job()`. Job `large` of `--out=OUT` is in OUT/large; a later job can name
it as its teacher or start.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from pathlib import Path

import gin

from speccascade import checkpoints, embedded
from speccascade.host import gin_files
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config
from speccascade.train import data
from speccascade.train.batches import Pair
from speccascade.train.loop import Settings, train
from speccascade.train.losses import Distillation
from speccascade.train.optimizers import Optimizer
from speccascade.types import Model, Network


@dataclasses.dataclass(frozen=True)
class Job:
  """A network to train.

  Attributes:
    name: the job's name, and its folder.
    network: the network.
    pairs: (source tokens, target tokens).
    settings: how to train.
    tokenizer: path of the tokenizer to save with the model.
    teacher: the model to distil: an earlier job's name, or a checkpoint's path.
    start: the model with the initial parameters, named likewise.
  """

  name: str
  network: Network
  pairs: Iterable[Pair]
  settings: Settings
  tokenizer: str | None = None
  teacher: str | None = None
  start: str | None = None

  def __post_init__(self):
    if not isinstance(self.pairs, Iterable):
      raise ValueError(f'job {self.name}: pairs={self.pairs!r} are no pairs; write @train.generated(), with ().')

  def run(self, out: Path, echo=print) -> Model:
    """Train, or resume a stopped run in `out`/name."""
    start = _model(out, self.start, scan=self.network.scan)
    models = dict(start=start, teacher=_model(out, self.teacher))
    folder = out / self.name
    return train(folder, self.network, self.pairs, self.settings, tokenizer=self.tokenizer, echo=echo, **models)


def _model(out: Path, name: str | None, *, scan: bool = False) -> Model | None:
  """Return the model of an earlier job or of a path, in float32."""
  if name is None:
    return None
  trained = out / name / 'model'
  return checkpoints.read(trained if trained.is_dir() else name, dtype='float32', scan=scan, name=name)


def _jobs(jobs: Sequence[Job]) -> list[Job]:
  """Return the jobs that a config binds as train.jobs."""
  return list(jobs)


@functools.cache
def register() -> None:
  """Register the names of a config with gin, once."""
  classes = (Job, Settings, Optimizer, Distillation, T5, T5Config, Decoder, DecoderConfig, Span, Rope)
  sources = (data.generated, data.generated_sources, data.parallel_text, data.from_teacher)
  for thing in (*classes, *sources, checkpoints.load, embedded.vocabulary):
    gin.external_configurable(thing, name=f'speccascade.train.{thing.__name__}')
  gin.external_configurable(_jobs, name='speccascade.train')


def read(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> list[Job]:
  """Return the jobs of gin files and bindings; a file's includes are searched next to it and in the folder above."""
  register()
  gin_files.read(files, bindings, search_paths)
  if 'jobs' not in gin.get_bindings('speccascade.train', resolve_references=False):
    raise ValueError('the config has no train.jobs: bind it, as in train.jobs = [@train.Job()]')
  with gin_files.explained():
    return gin.get_configurable('speccascade.train')()
