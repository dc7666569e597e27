"""What a user asks for, one request a row: checked before anything is computed, then arrays by row.

Axis letters: B batch, S prompt, K stop tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import numbers
from typing import Any

import numpy as np

from speccascade import sampling
from speccascade.engine import inputs
from speccascade.engine.state import Arrays, Limits
from speccascade.host.errors import known_as
from speccascade.types import checked_int

_LIMIT = 256  # tokens that one request may stop at
_BIAS = 1e8  # times the temperature: float32 has no digits for the softmax of much more
_SAMPLES = 1 << 20  # of one request
_TOKENS = 1 << 30  # of one output, so that with its prompt 32 bits number its positions


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt and how to continue it; what is None is that of the call.

  Random numbers are keyed by the seed and `example_id`, by default the index in the list. For a request with a seed of
  its own it is 0 by default, so that the seed alone reproduces the output anywhere.

  Attributes:
    prompt: A text, token ids, or chat messages [{'role': …, 'content': …}, …] for the tokenizer's template.
    max_new_tokens: The most new tokens.
    min_new_tokens: Nothing ends the output before so many; a stop string counts only if it begins after them.
    seed: The seed.
    example_id: What the random numbers are keyed by in addition to the seed.
    stop: Texts before which the output ends; a special token of the tokenizer, as ``<|im_end|>``, is a stop token.
    stop_tokens: Token ids that end it as EOS does.
    temperature: Of the sampler, as are the numbers that follow, up to `frequency_penalty`.
    logit_bias: {token: number}, added to the logits of every model.
    n: How many samples; they share one prefill, and each has random numbers of its own.
    logprobs: How many of the likeliest tokens under the last model are returned at each position, with their
      log-probabilities after the bias and the logits processor, at temperature 1 without filters or penalties.
    processed: Whether those are of the distribution that the token is drawn from instead, as of `trace='target'`.
    chat_template_kwargs: Other arguments of the chat template, as {'tools': […], 'enable_thinking': False}.
  """

  prompt: Any
  max_new_tokens: int | None = None
  min_new_tokens: int | None = None
  seed: int | None = None
  example_id: int | None = None
  stop: Sequence[str] | str | None = None
  stop_tokens: Sequence[int] | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  logit_bias: dict[int, float] | None = None
  n: int = 1
  logprobs: int | None = None
  processed: bool = False
  chat_template_kwargs: dict[str, Any] | None = None

  def sampled_by(self, sampler: sampling.Sampler) -> sampling.Sampler:
    """Return a sampler with the numbers that the request has of its own."""
    own = {name: getattr(self, name) for name in sampling.NEUTRAL}
    return dataclasses.replace(sampler, **{name: x for name, x in own.items() if x is not None})


Request.__init__ = known_as('Request', max_tokens='max_new_tokens=…')(Request.__init__)


@dataclasses.dataclass(frozen=True)
class RequestRow:
  """A request with every number filled in: what one row of a batch decodes."""

  tokens: np.ndarray  # the prompt
  source: int  # the prompt's number
  stream: int  # streams of one seed are independent
  sample: int
  max_new: int
  min_new: int
  seed: np.uint32
  example_id: np.uint32
  sampler: sampling.Sampler
  stop: tuple[str, ...]
  stop_tokens: tuple[int, ...]
  bias: tuple[tuple[int, float], ...]
  logprobs: int
  processed: bool = False


@dataclasses.dataclass(frozen=True)
class Features:
  """What the requests of a call need of the program other than shapes: the same for all its batches."""

  greedy: bool
  mixed: bool
  numbers: tuple[str, ...]  # of the sampler
  stops: int
  least: bool
  bias: bool
  top: int
  processed: bool
  texts: bool  # whether the host looks for stop strings


def rows(
  models,
  prompts,
  *,
  max_new_tokens: int | None,
  sampler: sampling.Sampler,
  seed: int,
  example_ids=None,
  truncate: bool = False,
  max_prompt_tokens: int | None = None,
) -> list[RequestRow]:
  """Return a row for every sample of every prompt or request, each checked.

  Args:
    models: The models.
    prompts: As of `speccascade.decode`.
    max_new_tokens: The most new tokens, for requests without a number of their own.
    sampler: The sampler of requests that leave its numbers out.
    seed: The seed of requests without one.
    example_ids: A number for each prompt; None for its index.
    truncate: As of `speccascade.decode`.
    max_prompt_tokens: The most tokens of a prompt that is truncated.

  Returns:
    The rows, the samples of a prompt next to each other.

  Raises:
    ValueError: If a request is invalid.
  """
  if isinstance(prompts, (str, Request)) or inputs.is_chat(prompts):
    prompts = [prompts]
  asked = inputs.listed(prompts)
  given = [x if isinstance(x, Request) else Request(x) for x in asked]
  ids = inputs.check_ids(example_ids, len(given))
  ids[[x.seed is not None for x in given]] = 0
  vocab = inputs.vocabulary(models)
  tokens = inputs.encode(models, [x.prompt for x in given], [x.chat_template_kwargs for x in given])
  if truncate:
    most = [checked_int('max_new_tokens', x.max_new_tokens or max_new_tokens) for x in given]
    tokens = [inputs.truncated(models, x, n, max_prompt_tokens) for x, n in zip(tokens, most, strict=True)]
  made = []
  for i, request in enumerate(given):
    try:
      made += _samples(models, vocab, request, i, tokens[i], ids[i], max_new_tokens, sampler, seed)
    except ValueError as error:
      raise inputs.PromptError(i, f'prompt {i}: {error}') if isinstance(asked[i], Request) else error from None
  return made


def _samples(
  models, vocab, request: Request, i: int, tokens, example_id, max_new_tokens, sampler, seed
) -> list[RequestRow]:
  def pick(value, default):
    return default if value is None else value

  max_new = checked_int('max_new_tokens', pick(request.max_new_tokens, max_new_tokens), most=_TOKENS)
  min_new = checked_int('min_new_tokens', pick(request.min_new_tokens, 0), 0)
  if min_new > max_new:
    raise ValueError(f'min_new_tokens={min_new} is more than max_new_tokens={max_new}.')
  sampler = request.sampled_by(sampler)
  for name in sampling.NEUTRAL:
    if np.ndim(value := getattr(sampler, name)):
      raise ValueError(f'{name} has the shape {list(np.shape(value))}; give one number, or a Request for each prompt.')
  stop = _stop(models, request.stop)
  row = RequestRow(
    tokens=tokens,
    source=i,
    stream=0,
    sample=0,
    max_new=max_new,
    min_new=min_new,
    seed=inputs.check_seed(pick(request.seed, seed)),
    example_id=example_id if request.example_id is None else inputs.check_ids([request.example_id], 1)[0],
    sampler=sampler,
    stop=stop,
    stop_tokens=(*_stop_tokens(vocab, request.stop_tokens), *_special(models, vocab, stop)),
    bias=_bias(vocab, request.logit_bias, sampler.temperature),
    logprobs=checked_int('logprobs', pick(request.logprobs, 0), 0),
    processed=request.processed,
  )
  if not isinstance(row.processed, bool):
    raise ValueError(f'processed={row.processed!r} is neither True nor False.')
  if row.logprobs > vocab:
    raise ValueError(f'logprobs={row.logprobs} is more than the {vocab} tokens of the vocabulary.')
  samples = checked_int('n', request.n, most=_SAMPLES)
  return [dataclasses.replace(row, sample=sample) for sample in range(samples)]


def _stop(models, stop) -> tuple[str, ...]:
  texts = () if stop is None else (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
  if not all(isinstance(x, str) and x for x in texts):
    raise ValueError(f'stop={stop!r} must be texts, none of them empty; for token ids use stop_tokens.')
  if texts and models[-1].tokenizer is None:
    raise ValueError(f'stop={stop!r} needs a tokenizer, and {models[-1].name} has none; use stop_tokens.')
  return texts


def _special(models, vocab: int, stop: tuple[str, ...]) -> list[int]:
  """Return the ids of stop strings that are special tokens, which no text has."""
  ids = getattr(models[-1].tokenizer, 'special_ids', {}) if stop else {}  # a tokenizer of one's own may not tell
  return [ids[text] for text in stop if ids.get(text, vocab) < vocab]


def _stop_tokens(vocab: int, tokens) -> tuple[int, ...]:
  if not isinstance(tokens, Iterable | None):
    raise ValueError(f'stop_tokens={tokens!r} is not a list of token ids.')
  tokens = () if tokens is None else tuple(tokens)
  if len(tokens) > _LIMIT:
    raise ValueError(f'stop_tokens has {len(tokens)} ids, more than {_LIMIT}.')
  return tuple(_token('stop_tokens', vocab, x) for x in tokens)


def _bias(vocab: int, bias, temperature: float) -> tuple[tuple[int, float], ...]:
  if not isinstance(bias, Mapping | None):
    raise ValueError(f'logit_bias={bias!r} is not numbers by token id, as in {{17: -1.5}}.')
  most = min(sampling.LARGEST, _BIAS * temperature) if temperature else sampling.LARGEST
  for value in (bias or {}).values():
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not (value == -np.inf or -sampling.LARGEST <= value <= most):
      known = f'a number of -{sampling.LARGEST:g} … {most:g} at temperature {temperature:g}'
      raise ValueError(f'logit_bias has {value!r}, not {known}; use -inf to forbid a token.')
  by_token = tuple((_token('logit_bias', vocab, token), float(value)) for token, value in (bias or {}).items())
  if sum(value == -np.inf for _, value in by_token) == vocab:
    raise ValueError(f'logit_bias forbids all {vocab} tokens; leave one.')
  return by_token


def _token(name: str, vocab: int, token) -> int:
  if not isinstance(token, numbers.Integral) or isinstance(token, bool) or not 0 <= token < vocab:
    raise ValueError(f'{name} has {token!r}, not a token id of 0 … {vocab - 1}.')
  return int(token)


def features(some: Sequence[RequestRow]) -> Features:
  """Return what the rows need of a program."""
  cold = {row.sampler.greedy for row in some}
  mixed = len(cold) == 2 or any(row.sampler.mixed for row in some)
  given = [name for name in sampling.NEUTRAL if name != 'temperature' and any(row.sampler.given(name) for row in some)]
  return Features(
    greedy=cold == {True} and not mixed,
    mixed=mixed,
    numbers=tuple(given),
    stops=inputs.bucket(n, 1) if (n := max(len(row.stop_tokens) for row in some)) else 0,
    least=any(row.min_new for row in some),
    bias=any(row.bias for row in some),
    top=max(row.logprobs for row in some),
    processed=any(row.processed for row in some),
    texts=any(row.stop for row in some),
  )


def arrays(some: Sequence[RequestRow], needs: Features, size: int, width: int, vocab: int) -> Arrays:
  """Return rows as a batch of `size`; those beyond the real ones have one token 0."""
  padded = [*some, *[some[0]] * (size - len(some))]

  def by_row(values, dtype):
    return np.asarray(list(values), dtype)

  return Arrays(
    prompt=inputs.pad([row.tokens for row in some], size, width),
    key=np.stack([by_row(x, np.uint32) for x in zip(*((r.seed, r.stream, r.example_id, r.sample) for r in padded))], 1),
    max_new=by_row((row.max_new for row in padded), np.int32),
    sampler=_stack_samplers([row.sampler for row in padded], needs),
    limits=_limits(padded, needs, vocab),
    real=np.arange(size) < len(some),
  )


def _stack_samplers(samplers: list[sampling.Sampler], needs: Features) -> sampling.Sampler:
  names = needs.numbers if needs.greedy else ('temperature', *needs.numbers)

  def value(sampler, name):
    return getattr(sampler, name) if sampler.given(name) else sampling.NEUTRAL[name]

  stacked = {name: np.asarray([value(s, name) for s in samplers], np.float32) for name in names}
  fixed = dict(mixed=needs.mixed, coupling=samplers[0].coupling)
  return sampling.Sampler(**({'temperature': 0.0} if needs.greedy else {}) | stacked, **fixed)


def _limits(padded: Sequence[RequestRow], needs: Features, vocab: int) -> Limits:
  stop_ids = np.full((len(padded), needs.stops), -1, np.int32)
  bias = np.zeros((len(padded), vocab), np.float32) if needs.bias else None
  for i, row in enumerate(padded):
    stop_ids[i, : len(row.stop_tokens)] = row.stop_tokens
    for token, value in row.bias:
      bias[i, token] = value
  least = np.asarray([row.min_new for row in padded], np.int32) if needs.least else None
  processed = np.asarray([row.processed for row in padded]) if needs.processed else None
  return Limits(stop_ids, least, bias, processed)
