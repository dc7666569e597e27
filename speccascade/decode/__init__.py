"""Decode prompts with a method, all at once (`decode`) or row by row as they end (`stream`)."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
import functools

from speccascade import sampling
from speccascade.engine import engine_for, loop, requests, results, scheduler
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Strategy
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
  trace: bool | str = False,
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
      bias and the processor, at temperature 1 without filters or penalties. With 'target', the log-probability of
      each token under the distribution that it was drawn from: of the rule or combiner, with all that the request and
      the sampler do.
    progress: Whether to show a bar.
    keep_faults: Whether rows that end as faults are returned without a warning. Otherwise they are warned of, and the
      first is raised if there are no other rows.

  Returns:
    Texts, tokens, finish reasons and statistics, in the order of the prompts.

  Raises:
    ValueError: If an argument is invalid, or all rows end as faults.
  """
  numbers = dict(max_new_tokens=max_new_tokens, seed=seed, example_ids=example_ids, truncate=truncate)
  sizes = dict(batch_size=batch_size, max_prompt_tokens=max_prompt_tokens)
  job = DecodeJob.of(method, models, prompts, sampler=sampler, processor=processor, trace=trace, **sizes, **numbers)
  ended = method.decode(job, functools.partial(_decode, progress=progress))
  results.warn_of_silent_drafters(job, ended)
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
  trace: bool | str = False,
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
    (index, row); the index counts the samples of all prompts, `row.request` the prompts, and `row.sample` those of one.

  Raises:
    ValueError: If an argument is invalid.
  """
  if method.whole_texts:
    raise ValueError(f'{method.name} knows an answer only when both models are done: use decode.')
  numbers = dict(max_new_tokens=max_new_tokens, seed=seed, example_ids=example_ids, truncate=truncate)
  sizes = dict(batch_size=batch_size, max_prompt_tokens=max_prompt_tokens)
  job = DecodeJob.of(method, models, prompts, sampler=sampler, processor=processor, trace=trace, **sizes, **numbers)
  every = None if every is None else checked_int('every', every)
  if not isinstance(skip, Iterable):
    raise ValueError(f'skip={skip!r} is not a list of row numbers, as in [0, 2].')
  skip = frozenset(checked_int('skip', i, 0) for i in skip)
  if skip and max(skip) >= len(job.rows):
    raise ValueError(f'skip has {max(skip)}, and the rows are 0 … {len(job.rows) - 1}; skip those of an earlier call.')
  some = _serve(job, every=every, drain=False, skip=skip)
  return (row for rows in some for row in rows)  # a generator, which a caller can close


def _decode(job: DecodeJob, *, skip: frozenset[int] = frozenset(), progress: bool = False) -> list[results.Row]:
  ended = {}
  with Progress('decode', len(job.rows) - len(skip), unit='texts', shown=progress) as bar:
    for some in _serve(job, every=None, drain=True, skip=skip):
      ended |= dict(some)
      bar.add(len(some))
  return [ended[i] for i in sorted(ended)]


def _serve(
  job: DecodeJob, *, every: int | None, drain: bool, skip: frozenset[int]
) -> Iterator[list[tuple[int, results.Row]]]:
  """Return lists of (index, row) that ended or, with `every`, are under way, while the device goes on."""
  made = engine_for(job)
  rounds = min(every or loop.FOREVER, _LOOKS if made.needs.texts else loop.FOREVER)
  queue = scheduler.Queue(made, job, skip)
  return scheduler.serve(queue, results.RowReader(job), unfinished=every is not None, drain=drain, rounds=rounds)
