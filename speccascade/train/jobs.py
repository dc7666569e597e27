"""Jobs from gin files: what a config may name, and running one job after the other.

A config binds `train.jobs`, a list of `@train.Job()`. Job `large` of `--out=OUT` lives in OUT/large; a later job may
have it for a teacher or start from it by its name.
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
  """A network to train, on what and how; `teacher` and `start` are an earlier job's name or a checkpoint's path."""

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

  def run(self, out: Path, say=print) -> Model:
    """Train, or go on with what a stopped run left in `out`/name."""
    start, teacher = _model(out, self.start, scan=self.network.scan), _model(out, self.teacher)
    return train(
      out / self.name, self.network, self.pairs, self.settings, tokenizer=self.tokenizer, start=start,
      teacher=teacher, say=say,
    )  # fmt: skip


def _model(out: Path, given: str | None, *, scan: bool = False) -> Model | None:
  """Return the model of an earlier job or of a path, in float32."""
  if given is None:
    return None
  here = out / given / 'model'
  return checkpoints.read(here if here.is_dir() else given, dtype='float32', scan=scan, name=given)


def _jobs(jobs: Sequence[Job]) -> list[Job]:
  """Return the jobs; it is what a config binds as train.jobs."""
  return list(jobs)


@functools.cache
def register() -> None:
  """Give gin the names that a config may use, once."""
  networks = (T5, T5Config, Decoder, DecoderConfig, Span, Rope)
  sources = (data.generated, data.generated_sources, data.parallel_text, data.from_teacher, checkpoints.load)
  named = {'vocabulary': embedded.vocabulary} | {
    x.__name__: x for x in (Job, Settings, Optimizer, Distillation, *networks, *sources)
  }
  for name, thing in named.items():
    gin.external_configurable(thing, name=f'speccascade.train.{name}')
  gin.external_configurable(_jobs, name='speccascade.train')


def read(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> list[Job]:
  """Return the jobs of gin files and bindings; a file's includes are looked for beside it and in the folder above."""
  register()
  gin_files.read(files, bindings, search_paths)
  if 'jobs' not in gin.get_bindings('speccascade.train', resolve_references=False):
    raise ValueError('the config has no train.jobs: bind it, as in train.jobs = [@train.Job()]')
  with gin_files.explained():
    return gin.get_configurable('speccascade.train')()
