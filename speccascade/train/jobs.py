"""Training jobs from gin files.

A config binds `train.jobs`, a list of `@train.Job()`; tasks, rules, models and `mesh.shape` are those of a run. Job
`large` of `--out=OUT` is in OUT/large; a later job can name it as its teacher or start.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import gin
import jax
from jax.sharding import Mesh

from speccascade import embedded
from speccascade.backends import sharding
from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.data import tokenizers
from speccascade.data.examples import Task
from speccascade.drafters import one_pass
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.frequent import frequent
from speccascade.drafters.medusa import Medusa, MedusaConfig
from speccascade.evaluate import config, tasks
from speccascade.host import gin_files
from speccascade.models import shapes
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.train import data
from speccascade.train.forcing import Drafting
from speccascade.train.loop import Settings, train
from speccascade.train.losses import Distillation
from speccascade.train.optimizers import Optimizer
from speccascade.train.vocabulary import learned_vocabulary
from speccascade.types import checked_int, Model, Network


@dataclasses.dataclass(frozen=True)
class Job:
  """A network to train.

  Attributes:
    name: The job's name, and its folder.
    network: The network; None for that of `start`.
    task: What to learn: a task, or its text as an experiment takes it, of whose examples the first reference;
      'decoded(prompts="in.jsonl", outputs="out.jsonl")', a teacher's outputs; or pairs of a prompt and what follows it,
      texts or tokens. A list is learned without end, anything else as far as it goes.
    settings: How to train.
    tokenizer: Path of the tokenizer to save with the model; None takes that of `start` or else of `teacher`.
    teacher: The model to distil: an earlier job's name, the path of a checkpoint, or a `Checkpoint`.
    companion: The companion of speculative verification, likewise; `train.Distillation.companion` is its weight.
    frequent: How many tokens a head of EAGLE-3 scores, those that are the most frequent in what is learned; 0 for all.
    mask_token: The token by which the network is trained to draft in one pass, as `drafters.one_pass` takes it.
    start: The model with the initial parameters, likewise.
    mesh: Mesh to train on; `mesh.shape = {'data': 2, 'model': 4}` sets it for all jobs.
    rules: Sharding rules of network and teacher, as `load` takes them.
  """

  name: str
  network: Network | None
  task: str | Task | Iterable[data.Learned] | Callable[[], Any]
  settings: Settings
  tokenizer: str | None = None
  teacher: str | Checkpoint | None = None
  start: str | Checkpoint | None = None
  mesh: Mesh | None = None
  rules: Any = None
  companion: str | Checkpoint | None = None
  mask_token: int | None = None
  frequent: int = 0

  def __post_init__(self):
    checked_int('frequent', self.frequent, 0)
    if self.network is None and self.start is None:
      raise ValueError(f'job {self.name} has no network: give one, or start, a model whose network it is to have')
    for given in (self.teacher, self.start, self.companion):
      if isinstance(given, Checkpoint) and given.dtype not in (None, 'float32'):
        raise ValueError(f'job {self.name}: Checkpoint.dtype={given.dtype!r}, and training is in float32: leave it out')
    if isinstance(self.task, str):
      more = {'decoded': data.decoded}
      object.__setattr__(self, 'task', tasks.reader(self.task, needed={'split': 'train'}, more=more))
    if not (isinstance(self.task, Task | Iterable) or callable(self.task)):
      raise ValueError(f'job {self.name}: task={self.task!r} is no task: name one, as "embedded(split=\'train\')".')

  def run(self, out: Path, echo=print) -> Model:
    """Train, or resume a stopped run in `out`/name."""
    start = self._model(out, self.start, scan=self.network is not None and self.network.scan)
    network = self.network or start.network
    if self.mask_token is not None:
      network = one_pass(Model({}, network, name=self.name), self.mask_token).network
    teacher = self._model(out, self.teacher)
    tokenizer = self.tokenizer or next((x.tokenizer for x in (start, teacher) if x and x.tokenizer), None)
    tokenizer = tokenizer and tokenizers.load(tokenizer)
    task = self.task() if callable(self.task) else self.task
    if self.frequent:
      head = start or Model(network.init(jax.random.key(self.settings.seed)), network)
      start = self._cut(head, task, tokenizer, teacher)
      network = start.network
    return train(
      out / self.name,
      network,
      data.pairs(task, tokenizer),
      self.settings,
      tokenizer=tokenizer,
      start=start and (lambda: start),
      teacher=teacher,
      companion=self._model(out, self.companion),
      mesh=self.mesh,
      rules=self.rules,
      echo=echo,
    )

  def over_frequent(self, network: Network) -> Eagle:
    """Return a head over `frequent` tokens, as training takes it."""
    if not isinstance(network, Eagle):
      raise ValueError(f'job {self.name}: frequent={self.frequent} is of heads of EAGLE-3: leave it 0')
    return dataclasses.replace(network.over(self.frequent), spreads=False)

  def _cut(self, start: Model, task, tokenizer: tokenizers.Tokenizer | None, teacher: Model | None) -> Model:
    """Return a head over the tokens that are the most frequent in the targets of a task."""
    self.over_frequent(start.network)  # raises for what is no such head
    if not isinstance(task, Task | Sequence):
      raise ValueError(f'job {self.name}: frequent={self.frequent} needs a list whose tokens it can count: leave it 0')
    learned = itertools.islice(data.pairs(task, tokenizer), len(task.examples if isinstance(task, Task) else task))
    counts = collections.Counter(token for _, target in learned for token in target)
    ids = [token for token, _ in counts.most_common(self.frequent)]
    return frequent(start.replace(name=self.name), ids, teacher)

  def _model(self, out: Path, given: str | Checkpoint | None, **settings) -> Model | None:
    """Return the model of an earlier job or of a checkpoint, in float32, on the mesh."""
    if given is None:
      return None
    if isinstance(given, str):
      trained = out / given / 'model'
      given = Checkpoint(str(trained) if trained.is_dir() else given, name=given)
    settings |= dict(dtype='float32', rules=given.rules or self.rules)
    return dataclasses.replace(given, **settings).load(self.mesh)


def _jobs(jobs: Sequence[Job]) -> list[Job]:
  """Return the jobs that a config binds as train.jobs."""
  for job in jobs:
    if not os.path.normpath(job.name).strip('./') or '..' in Path(job.name).parts or os.path.isabs(job.name):
      raise ValueError(f'name={job.name!r}: a job is a folder of --out; give it the name of one, as large')
  return list(jobs)


def register() -> None:
  """Register the names of a config with gin, those of a run among them."""
  config.register()
  classes = (Job, Settings, Optimizer, Distillation, Drafting)
  classes += (T5, T5Config, T5GemmaConfig, Decoder, DecoderConfig, Span, Rope, Eagle, HeadConfig, Medusa, MedusaConfig)
  for thing in (*classes, t5, learned_vocabulary, embedded.vocabulary):
    gin_files.register(thing, f'speccascade.train.{thing.__name__}')
  gin_files.register(_jobs, 'speccascade.train')


def t5(size: str, *, scan: bool = False) -> T5:
  """Return T5 v1.1 of a published size, 'small' to 'xxl', in float32."""
  if size not in shapes.T5_V1_1:
    raise ValueError(f'size={size!r}: T5 v1.1 is {", ".join(shapes.T5_V1_1)}')
  return dataclasses.replace(shapes.t5(size, 'float32'), scan=scan)


def read(
  files: Sequence[str],
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  devices: Sequence | None = None,
) -> list[Job]:
  """Return the jobs of gin files and bindings; a file's includes are searched next to it and in the folder above.

  Args:
    files: Gin files.
    bindings: Bindings that follow them.
    search_paths: Further folders of includes.
    devices: Devices of `mesh.shape`, by default those of this machine.
  """
  register()
  gin_files.read(files, bindings, search_paths)
  if 'jobs' not in gin.get_bindings('speccascade.train', resolve_references=False):
    raise ValueError('the config has no train.jobs: bind it, as in train.jobs = [@train.Job()]')
  with gin_files.building():
    shape = gin.get_configurable('speccascade.mesh')()
    if not isinstance(shape, Mapping | None):
      raise ValueError(f"mesh.shape={shape!r}: training has one mesh; bind one, as {{'data': 4, 'model': 4}}")
    found = gin.get_configurable('speccascade.train')()
    if shape is None:
      return found
    on = sharding.mesh(shape, devices)
    return [dataclasses.replace(job, mesh=on) for job in found]
