"""What a user gets: texts, tokens, why they ended and statistics, by row and by model."""

from collections.abc import Sequence
import dataclasses
import os
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import rules
from speccascade.engine import requests, validate
from speccascade.engine.job import DecodeJob
from speccascade.engine.stats import Counts, derive, PER_MODEL, Stats
from speccascade.types import AFTER_LEAF, BONUS, NO_FAULT, NO_SOURCE, RESIDUAL, STALLED


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a batch, ended or under way.

  Attributes:
    tokens: The tokens, with EOS or the stop token where one ended them.
    text: The text, without them; it ends before a stop string. None without a tokenizer.
    finish_reason: 'eos', 'stop', 'length' or 'fault'; None while it goes on.
    stats: Numbers and arrays by model [M, …].
    fault: Why the next token has no distribution.
    logprobs: [M, n], each token's under every model that scored it, where `trace` was asked for.
    top_logprobs: {token: log-probability} for each token, where a request asked for it.
    target_logprobs: [n], each token's under the distribution that it was drawn from, with `trace='target'`.
    request: The number of its request or prompt in the call, from 0.
    sample: Which of the request's samples it is, from 0.
  """

  tokens: list[int]
  text: str | None
  finish_reason: str | None
  stats: dict[str, Any]
  fault: str | None = None
  logprobs: np.ndarray | None = None  # [M, n]
  top_logprobs: list[dict[int, float]] | None = None
  target_logprobs: np.ndarray | None = None  # [n]
  request: int = 0
  sample: int = 0


@dataclasses.dataclass(frozen=True)
class Decoded:
  """The result of `decode`, in the order of the prompts, the samples of one prompt after each other.

  Attributes:
    texts: The texts; None without a tokenizer.
    tokens: The tokens of each row, with EOS where the model ended it.
    stats: Arrays by row, those of models with the models in front; `source[i]` is the origin of each token of
      `tokens[i]`.
    logprobs: [M, n] for each row, where `trace` was asked for.
    finish_reasons: 'eos', 'stop', 'length' or 'fault', of each row.
    faults: For each row why its next token has no distribution, or None.
    top_logprobs: A dict {token: log-probability} for each token of each row, where a request asked for it.
    target_logprobs: [n] for each row, with `trace='target'`.
  """

  texts: list[str] | None
  tokens: list[list[int]]
  stats: Stats
  logprobs: list[np.ndarray] | None = None
  finish_reasons: tuple[str, ...] = ()
  faults: tuple[str | None, ...] = ()
  top_logprobs: list | None = None
  target_logprobs: list[np.ndarray] | None = None

  def raise_for_fault(self) -> 'Decoded':
    """Return self, or raise the fault of the first faulty row."""
    for fault in self.faults:
      if fault is not None:
        raise ValueError(fault)
    return self


class RowReader:
  """Take rows out of what a batch gave."""

  def __init__(self, job: DecodeJob):
    self.method = job.method.at(job.size)
    self.models = job.models
    self.rows = job.rows
    self.processor = job.processor
    last = job.models[self.method.slots[-1]].network
    self.eos_ids = last.eos_ids if job.eos_ids is None else job.eos_ids
    self.begins = last.start_id is not None
    self.tokenizer = job.models[-1].tokenizer

  def stops(self, index: int, batch: dict, at: int) -> bool:
    """Return whether a row's text contains a stop string."""
    row = self.rows[index]
    return bool(row.stop) and self._at_stop(row, self._tokens(index, batch, at)) is not None

  def tokens(self, index: int, batch: dict, at: int) -> tuple[np.ndarray, int]:
    """Return the tokens of a row, of a decoder-only model with its prompt, and where the output begins."""
    return batch['tokens'][at, : batch['length'][at]], self._start(index)

  def row(self, index: int, batch: dict, at: int) -> Row:
    """Return a row, its finish reason None where it goes on."""
    row = self.rows[index]
    tokens = self._tokens(index, batch, at)
    fault = self._fault(row, batch, at, len(tokens))
    reason = None
    if fault is not None:
      reason = 'fault'
    elif batch['done'][at]:
      reason = 'eos' if tokens[-1] in self.eos_ids else 'stop' if tokens[-1] in row.stop_tokens else 'length'
    written = tokens[:-1] if reason in ('eos', 'stop') else tokens
    text = None if self.tokenizer is None else self.tokenizer.decode(written)
    start = self._start(index)
    stopped = self._at_stop(row, written)  # a stop string that the last token would complete is in no text
    if stopped is not None:
      (tokens, text) = stopped
      reason = 'stop'
      fault = None
    if reason is None and text is not None:
      text = _complete_part(text, row.stop)
    span = slice(start, start + len(tokens))
    logprobs = self._by_model(batch['logprobs'].values[at][:, span]) if 'logprobs' in batch else None
    return Row(
      tokens,
      text,
      reason,
      self._stats(batch['stats'], at, span),
      fault,
      logprobs,
      self._top(row, batch, at, span),
      batch['target_logprobs'].values[at, span] if 'target_logprobs' in batch else None,
      row.source,
      row.sample,
    )

  def _start(self, index: int) -> int:
    return 1 if self.begins else self.rows[index].tokens.size

  def _tokens(self, index: int, batch: dict, at: int) -> list[int]:
    return batch['tokens'][at, self._start(index) : batch['length'][at]].tolist()

  def _at_stop(self, row: requests.RequestRow, tokens: list[int]) -> tuple[list[int], str] | None:
    """Return the fewest tokens whose text has a stop string after the least length, and the text before it."""
    if not row.stop:
      return None
    decode = self.tokenizer.decode
    text = decode(tokens)
    least = len(os.path.commonprefix([text, decode(tokens[: row.min_new])])) if row.min_new else 0

    def matches(text):
      return [at for stop in row.stop if (at := text.find(stop, least)) >= 0]

    if not matches(text):
      return None
    low = 1
    high = len(tokens)
    while low < high:
      middle = (low + high) // 2
      low, high = (low, middle) if matches(decode(tokens[:middle])) else (middle + 1, high)
    text = decode(tokens[:low])
    return tokens[:low], text[: min(matches(text))]

  def _fault(self, row: requests.RequestRow, batch: dict, at: int, emitted: int) -> str | None:
    fault = int(batch['fault'].code[at])
    if fault == NO_FAULT:
      return None
    position = int(batch['length'][at])
    prompt = f'prompt {row.source}, ' if row.source and not row.example_id else ''  # a seed of its own keys any as 0
    example = f'{prompt}example {row.example_id}'
    if fault == STALLED:
      return f'{example}: {validate.no_token(self.method, position)}'
    if fault < 0:
      return f'{example}: {validate.not_a_distribution(self.method, position, fault, batch["fault"].value[at])}'
    slot, by_request = divmod(fault, 2)  # `types.of_logits`
    asked = self._asked(row, emitted) if by_request else ''
    made = f'what {asked} made of ' if asked else ''
    number = self.method.slots[slot]
    remedy = 'Leave some token a finite logit, and none NaN or inf.'
    return (
      f'{example}: {made}the logits of model {number} ({self.models[number].name}) are not finite '
      f'after position {position - 1}. '
      + (remedy if asked else 'Check its weights for NaN, or decode in float32 if they overflow.')
    )

  def _asked(self, row: requests.RequestRow, emitted: int) -> str:
    """Name what the logits of a row's next token went through."""
    processor = '' if self.processor is None else f'the processor {rules.name_of(self.processor)}'
    least = 'min_new_tokens' if emitted < row.min_new else ''
    return ' and '.join(filter(None, ('logit_bias' if row.bias else '', least, processor)))

  def _by_model(self, by_slot: np.ndarray) -> np.ndarray:
    by_model = np.full((self.method.models, *by_slot.shape[1:]), np.nan, by_slot.dtype)
    by_model[list(self.method.slots)] = by_slot
    return by_model

  def _stats(self, stats: Counts, at: int, span: slice) -> dict[str, Any]:
    """Return a row's statistics; those of slots that run the same model are added up."""
    derived = derive({f.name: getattr(stats, f.name)[at] for f in dataclasses.fields(stats)})
    derived = {name: x.copy() for name, x in derived.items()}  # a row's own, not views of its batch
    for name in PER_MODEL:
      by_model = np.zeros(self.method.models, np.int64)
      np.add.at(by_model, list(self.method.slots), derived[name])
      derived[name] = by_model
    bonus = BONUS if len(self.method.slots) > 1 else self.method.slots[0]  # a model alone writes every token
    # The codes -4 … -1 stay as they are.
    number = np.array([*self.method.slots, AFTER_LEAF, NO_SOURCE, bonus, RESIDUAL])
    return derived | {'source': number[derived['source'][span]]}

  def _top(self, row: requests.RequestRow, batch: dict, at: int, span: slice) -> list | None:
    if not row.logprobs:
      return None
    ids, values = (x[at, span, : row.logprobs].tolist() for x in (batch['top'].ids, batch['top'].logprobs))
    return [dict(zip(some, those, strict=True)) for some, those in zip(ids, values, strict=True)]


def _complete_part(text: str, stop: Sequence[str]) -> str:
  """Return what stays of a text that goes on: not half a character, nor what a stop string may begin with."""
  text = text.rstrip('\ufffd')
  pending = max((n for x in stop for n in range(1, len(x)) if text.endswith(x[:n])), default=0)
  return text[: len(text) - pending]


def collect(rows: Sequence[Row], *, keep_faults: bool = False) -> Decoded:
  """Join rows; raise where all of them are faulty, warn where some are, unless `keep_faults`."""
  faults = tuple(row.fault for row in rows)
  decoded = Decoded(
    texts=None if rows[0].text is None else [row.text for row in rows],
    tokens=[row.tokens for row in rows],
    stats=_join([row.stats for row in rows]),
    logprobs=None if rows[0].logprobs is None else [row.logprobs for row in rows],
    finish_reasons=tuple(row.finish_reason for row in rows),
    faults=faults,
    top_logprobs=[row.top_logprobs for row in rows] if any(row.top_logprobs for row in rows) else None,
    target_logprobs=None if rows[0].target_logprobs is None else [row.target_logprobs for row in rows],
  )
  if keep_faults:
    return decoded
  if None not in faults:
    decoded.raise_for_fault()
  if some := [fault for fault in faults if fault]:
    warnings.warn(f'{len(some)} of {len(rows)} rows ended as faults. {some[0]}', stacklevel=4)
  return decoded


def warn_of_silent_drafters(job: DecodeJob, rows: Sequence[Row]) -> None:
  """Warn of drafters that drafted no token, where their parameters are why: the text is the verifier's all the same."""
  method = job.method.at(job.size)
  drafters = {method.slots[phase.feeds] for phase in method.all_phases if phase.draws and phase.feeds is not None}
  if not drafters or any(np.sum(row.stats['drafted']) for row in rows):
    return
  for number in sorted(drafters):
    leaves = jax.tree.leaves(job.models[number].params)
    if not all(jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)):
      warnings.warn(
        f'model {number} ({job.models[number].name}) drafted nothing, for its parameters are not finite; load or train '
        'it again',
        stacklevel=3,
      )


def _join(stats: Sequence[dict]) -> Stats:
  def join(name):
    return np.stack([x[name] for x in stats], 1 if name in PER_MODEL else 0)

  return Stats(**{name: [x[name] for x in stats] if name == 'source' else join(name) for name in stats[0]})
