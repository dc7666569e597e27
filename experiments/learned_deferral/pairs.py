"""The two pairs of models, each with the texts that rules are trained on and those that they are compared on."""

import functools

from experiments.helpers import families


def multi30k(split: str = 'val', count: int | None = 600):
  """Return the T5 pair, which was trained on the split `train`, texts to train on, and test texts."""
  of = functools.partial(families.task, 'multi30k', new_tokens=64)
  return families.pair('multi30k'), of(split, count), of('test_2016_flickr', 400)


def sums():
  """Return the Llama pair, problems that it was trained on too, and test problems."""
  of = functools.partial(families.task, 'sums', new_tokens=80)
  return families.pair('sums'), of('train', 600), of('test', 200)


PAIRS = {'multi30k': multi30k, 'sums': sums}
