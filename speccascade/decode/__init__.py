"""Decode prompts with a method, all at once (`decode`) or row by row as they end (`stream`)."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from speccascade import sampling
from speccascade.backends import sharding
from speccascade.decode import sequence_cascade
from speccascade.engine import engine, inputs, loop, plans, requests, results, scheduler, validate
from speccascade.engine.method import SequenceCascade, Strategy
from speccascade.host.errors import known_as
from speccascade.host.progress import Progress
from speccascade.types import checked_int, Model

_LOOKS = 8  # rounds between two looks for stop strings
_WORDS = {name: f'sampler=speccascade.Sampler({name}=…)' for name in sampling.NEUTRAL} | {
  'max_tokens': 'max_new_tokens=…'
}
_WORDS |= {name: f'speccascade.Request(prompt, {name}=…)' for name in ('stop', 'stop_tokens', 'logit_bias', 'n')}


@known_as('decode', **_WORDS)
def decode(
  method: Strategy,
  models: Sequence[Model],
  prompts: str | requests.Request | Sequence,
  *,
  max_new_tokens: int | None = None,
  sampler: sampling.Sampler = sampling.Sampler(),
  seed: int = 0,
  example_ids: Sequence[int] | None = None,
  batch_size: int | None = None,
  max_prompt_tokens: int | None = None,
  truncate: bool = False,
  processor: Callable | None = None,
  trace: bool = False,
  progress: bool = False,
  keep_faults: bool = False,
) -> results.Decoded:
  """Continue each prompt by at most `max_new_tokens` tokens.

  The EOS ids of the last model that the method runs end a sequence.

  Args:
    method: A method of `speccascade.methods`.
    models: The models, in the order of the method's numbers.
    prompts: A text, a token list, chat messages or a `Request`, or a list of these. A token list alone needs a list
      around it.
    max_new_tokens: The most new tokens of a sequence, for requests without a number of their own.
    sampler: The sampler, of which a request may replace numbers.
    seed: Keys the random numbers, together with `example_ids`. A request with a seed of its own uses neither.
    example_ids: A number for each prompt, by default its index. So the output of a prompt does not depend on the other
      sequences of its batch.
    batch_size: The most rows that are decoded at once; the other prompts are queued. A batch is padded to 1, 2, 3, 4,
      6, 8, 12, … rows.
    max_prompt_tokens: The padded length of prompts, so that calls with other prompts compile nothing. By default
      prompts are padded to one of such steps.
    truncate: Whether a prompt of more tokens than `max_prompt_tokens`, or than the models' positions leave beside the
      new ones, is shortened instead of being refused: a decoder-only model's after its first token, an
      encoder–decoder's before its last.
    processor: `processor(logits [V], tokens [T], count)` returns what the logits of every model become after the first
      `count` of these tokens. Arrays that change are bound to it with `functools.partial`.
    trace: Whether to record each output token's log-probability under every model that scored it, after the request's
      bias and the processor, at temperature 1 without filters or penalties.
    progress: Whether to show a bar.
    keep_faults: Whether rows that end as faults are returned without a warning. Otherwise they are warned of, and the
      first is raised if there are no other rows.

  Returns:
    Texts, tokens, finish reasons and statistics, in the order of the prompts.

  Raises:
    ValueError: If an argument is invalid, or all rows end as faults.
  """
  models = inputs.check_models(method, models)
  call = dict(max_new_tokens=max_new_tokens, sampler=sampler, seed=seed, example_ids=example_ids)
  rows = requests.rows(models, prompts, truncate=truncate, max_prompt_tokens=max_prompt_tokens, **call)
  settings = dict(batch_size=batch_size, max_prompt_tokens=max_prompt_tokens, processor=processor, progress=progress)
  if isinstance(method, SequenceCascade):
    if trace:
      raise ValueError('trace records one decode, and a sequence cascade is two; trace each with autoregressive().')
    ended = sequence_cascade.decode(method, models, rows, lambda *args, **more: _decode(*args, **settings, **more))
  else:
    ended = _decode(method, models, rows, trace=trace, **settings)
  return results.collect(ended, keep_faults=keep_faults)


@known_as('stream', **_WORDS)
def stream(
  method: Strategy,
  models: Sequence[Model],
  prompts,
  *,
  max_new_tokens: int | None = None,
  sampler: sampling.Sampler = sampling.Sampler(),
  seed: int = 0,
  example_ids: Sequence[int] | None = None,
  batch_size: int | None = None,
  max_prompt_tokens: int | None = None,
  truncate: bool = False,
  processor: Callable | None = None,
  trace: bool = False,
  every: int | None = None,
  skip: Collection[int] = (),
) -> Iterator[tuple[int, results.Row]]:
  """Yield each row as it ends, with what `decode` would return of it.

  The arguments that are not listed are those of `decode`.

  Args:
    every: Yield rows that go on as well, at least once in so many rounds, with `finish_reason` None. Each text begins
      with the one before it: half a character, and what may begin a stop string, are held back.
    skip: The indices of rows that are left out, such as those of an earlier call that was stopped. The programs are
      those of all rows.

  Yields:
    (index, row); the index counts the samples of all prompts.

  Raises:
    ValueError: If an argument is invalid.
  """
  models = inputs.check_models(method, models)
  if isinstance(method, SequenceCascade):
    raise ValueError('a sequence cascade knows an answer only when both models are done: use decode.')
  call = dict(max_new_tokens=max_new_tokens, sampler=sampler, seed=seed, example_ids=example_ids)
  rows = requests.rows(models, prompts, truncate=truncate, max_prompt_tokens=max_prompt_tokens, **call)
  every = None if every is None else checked_int('every', every)
  if not isinstance(skip, Iterable):
    raise ValueError(f'skip={skip!r} is not a list of row numbers, as in [0, 2].')
  skip = frozenset(checked_int('skip', i, 0) for i in skip)
  if skip and max(skip) >= len(rows):
    raise ValueError(f'skip has {max(skip)}, and the rows are 0 … {len(rows) - 1}; skip those of an earlier call.')
  sizes = dict(batch_size=batch_size, max_prompt_tokens=max_prompt_tokens, skip=skip)
  some = _serve(method, models, rows, trace=trace, processor=processor, every=every, drain=False, **sizes)
  return (row for rows in some for row in rows)  # a generator, which a caller can close


def _decode(
  method, models, rows, *, skip: frozenset[int] = frozenset(), progress: bool = False, **settings
) -> list[results.Row]:
  ended = {}
  with Progress('decode', len(rows) - len(skip), unit='texts', shown=progress) as bar:
    for some in _serve(method, models, rows, every=None, drain=True, skip=skip, **settings):
      ended |= dict(some)
      bar.add(len(some))
  return [ended[i] for i in sorted(ended)]


def _serve(
  method, models, rows, *, batch_size, max_prompt_tokens, trace=False, processor=None, every, drain, skip=frozenset()
) -> Iterator[list[tuple[int, results.Row]]]:
  """Return lists of (index, row) that ended or, with `every`, are under way, while the device goes on."""
  needs = requests.features(rows)
  size = inputs.bucket(len(rows), 1)
  size = size if batch_size is None else min(size, checked_int('batch_size', batch_size))
  shards = sharding.row_shards([models[m] for m in method.slots])
  size = sharding.even(size, shards)
  width = inputs.prompt_width(models, rows, max_prompt_tokens)
  max_new = max(row.max_new for row in rows)
  validate.check_targets(method, inputs.vocabulary(models), rows[0].sampler)
  for row in rows:
    plans.check_sampler(method.origin, row.sampler)
  method = method.at(size)
  made = engine.Engine(
    method, models, needs=needs, size=size, width=width, max_new=max_new, trace=trace, processor=processor
  )
  rounds = min(every or loop.FOREVER, _LOOKS if needs.texts else loop.FOREVER)
  reader = results.RowReader(method, models, rows, processor)
  queue = scheduler.Queue(made, rows, skip, shards)
  return scheduler.serve(queue, reader, unfinished=every is not None, drain=drain, rounds=rounds)
