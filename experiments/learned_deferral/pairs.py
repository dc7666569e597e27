"""The two pairs of models, each with the texts that rules are trained on and those that they are compared on."""

import speccascade
from speccascade.data import files


def multi30k(split: str = 'val', count: int | None = 600):
  """Return the T5 pair, which was trained on the split `train`, texts to train on, and test texts."""
  models = [speccascade.load(f'family:multi30k/{n}', dtype='float32') for n in ('small', 'large')]
  named = lambda split: [f'family:multi30k/{split}.{language}' for language in ('en', 'de')]
  limits = dict(max_prompt_tokens=64, max_new_tokens=64)
  test = files.parallel_text(*named('test_2016_flickr'), count=400, **limits)
  return models, files.parallel_text(*named(split), count=count, **limits), test


def sums():
  """Return the Llama pair, problems that it was trained on too, and test problems."""
  models = [speccascade.load(f'family:sums/{n}', dtype='float32') for n in ('draft', 'target')]
  fields = dict(prompt_field='Question: {question}\nAnswer:', target_field='answer', metrics=['final_number'])
  settings = fields | dict(stop=['\nQuestion:'], max_prompt_tokens=96, max_new_tokens=80)
  of = lambda name, count: files.jsonl(f'family:sums/{name}.jsonl', count=count, **settings)
  return models, of('train', 600), of('test', 200)


PAIRS = {'multi30k': multi30k, 'sums': sums}
