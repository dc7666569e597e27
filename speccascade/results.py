"""What a user gets: texts, tokens and statistics, by example and by model."""

import dataclasses

import numpy as np

from speccascade.types import BONUS, NOWHERE, RESIDUAL, Stats

PER_MODEL = ('calls', 'positions', 'computed', 'drafted')  # statistics with an axis of models


@dataclasses.dataclass(frozen=True)
class Decoded:
  """What `decode` returns, in the order of the prompts.

  `tokens[i]` ends with EOS where the model ended it. `stats` holds numpy arrays, rows being examples, `source[i]` the
  origin of each token of `tokens[i]`. `logprobs[i]` is [M, n] when `trace` was asked for.
  """

  texts: list[str] | None
  tokens: list[list[int]]
  stats: Stats
  logprobs: list[np.ndarray] | None = None


def rows_of(out: dict, places: list[int]) -> dict:
  """Return what a batch gave of the rows in these places."""
  fields = {
    f.name: getattr(out['stats'], f.name).take(places, 1 if f.name in PER_MODEL else 0)
    for f in dataclasses.fields(Stats)
  }
  by_row = {name: out[name].take(places, 0) for name in ('tokens', 'length')}
  by_model = {name: None if out[name] is None else out[name].take(places, 1) for name in ('fault', 'logprobs')}
  return dict(**by_row, **by_model, stats=Stats(**fields))


def check_finite(method, models, out: dict, ids: np.ndarray):
  """Raise where a model gave logits that are not finite, naming the example."""
  for slot, row in np.argwhere(out['fault'] >= 0):
    if slot == len(method.slots):
      raise ValueError(
        f'example {ids[row]}: the target of {method.name} is not a law at position {out["fault"][slot, row]}; its rule '
        'or combiner returned NaN or infinity.'
      )
    name = models[method.slots[slot]].name
    raise ValueError(
      f'example {ids[row]}: the logits of model {method.slots[slot]} ({name}) are not finite after position '
      f'{out["fault"][slot, row]}. Check its weights for NaN, or decode in float32 if they overflow.'
    )


def collect(method, models, rows, outs: list[dict], order: list[int]) -> Decoded:
  """Join batches that hold the rows in that order; sum slots that run the same model."""
  count, places = len(rows), np.argsort(order)
  start = [1] * count if models[method.slots[-1]].network.start_id is not None else [r.size for r in rows]

  def join(arrays, axis=0):
    return np.concatenate(list(arrays), axis).take(places, axis)

  fields = {}
  for field in dataclasses.fields(Stats):
    arrays = [getattr(o['stats'], field.name) for o in outs]
    if field.name in PER_MODEL:
      by_model = np.zeros((method.models, count), np.int64)
      np.add.at(by_model, list(method.slots), join(arrays, 1))
      fields[field.name] = by_model
    else:
      fields[field.name] = join(arrays)
  tokens, length = (join(o[k] for o in outs) for k in ('tokens', 'length'))
  spans = [slice(a, b) for a, b in zip(start, length, strict=True)]
  bonus = BONUS if len(method.slots) > 1 else method.slots[0]  # a model alone writes every token
  number = np.array([*method.slots, NOWHERE, bonus, RESIDUAL])  # the codes -3, -2, -1 stand for themselves
  fields['source'] = [number[row[span]] for row, span in zip(fields['source'], spans, strict=True)]
  texts = None
  lists = [row[span].tolist() for row, span in zip(tokens, spans, strict=True)]
  if models[-1].tokenizer is not None:
    texts = [models[-1].tokenizer.decode(x) for x in lists]
  logprobs = None
  if outs[0]['logprobs'] is not None:
    noted = join((o['logprobs'] for o in outs), 1)
    by_model = np.full((method.models, *noted.shape[1:]), np.nan, noted.dtype)
    by_model[list(method.slots)] = noted
    logprobs = [by_model[:, i, span] for i, span in enumerate(spans)]
  return Decoded(texts, lists, Stats(**fields), logprobs)
