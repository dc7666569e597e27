"""A task and a pair of toy models that a config can name: `import toys`."""

import os
import time

import gin

from speccascade.data import metrics
from speccascade.data.examples import Example, Task
from speccascade.models import toy

VOCAB = 16


@metrics.mean
def overlap(example, prediction):
  """Score the share of the target's tokens that the prediction has in place."""
  wanted = example.target.split()
  return sum(a == b for a, b in zip(wanted, prediction.split())) / len(wanted)


@gin.register(module='toys')
def task(count=10, new=6):
  examples = [
    Example(i, [i % VOCAB, (5 * i + 1) % VOCAB], ' '.join(str((i + j) % VOCAB) for j in range(new)))
    for i in range(count)
  ]
  return Task('toys', examples, max_prompt_tokens=4, max_new_tokens=new, metrics={'overlap': overlap})


@gin.register(module='toys')
def models():
  time.sleep(float(os.environ.get('TOYS_SLEEP', 0)))
  large = toy.model(1, VOCAB, scale=2.0, eos_ids=(VOCAB - 1,))
  return [toy.model(2, VOCAB, scale=0.8, near=large, eos_ids=(VOCAB - 1,)), large]


@gin.register(module='toys')
def mean(q, p, *, weight):
  """A rule of one's own."""
  return weight * q.probs + (1 - weight) * p.probs
