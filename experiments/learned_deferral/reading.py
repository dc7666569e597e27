"""What both models make of texts: of references, or of outputs whose tokens are swapped for the drafter's.

Axis letters: B batch, L target, N tokens, F features, V vocabulary, M models.
"""

from collections.abc import Sequence
import functools

from flax import struct
import jax
import numpy as np

from experiments.learned_deferral.continued import Continued
from experiments.learned_deferral.learned import features
from speccascade import decode, methods, Request, Sampler, sampling
from speccascade.data.examples import Task
from speccascade.data.prompts import truncation
from speccascade.decode.scoring import read as read_logits
from speccascade.types import Array, Model


@struct.dataclass
class Tokens:
  """Tokens of texts, with what both models make of each."""

  features: Array  # [N, F] features, those of the drafter first
  logq: Array  # [N] the log-probability of the token under the drafter, at temperature 1
  logp: Array  # [N] under the verifier
  first_q: Array  # [N] the drafter's arg max
  first_p: Array  # [N] the verifier's
  token: Array  # [N]
  text: Array  # [N] the number of the token's text
  at: Array  # [N] its position there
  matters: Array  # [N] whether the drafter's arg max in its place lowers the metric; 0 where that was not tried

  def __getitem__(self, index) -> 'Tokens':
    return jax.tree.map(lambda x: x[index], self)


def read(models: Sequence[Model], texts: Sequence[tuple], *, batch_size: int = 32) -> Tokens:
  """Return every target token of texts (prompt, target tokens) with what drafter and verifier make of it."""
  prompts, targets = zip(*texts, strict=True)
  found = []
  for text, made in enumerate(read_logits(models, prompts, targets, _of_both, batch_size=batch_size)):
    count = len(made['token'])
    about = dict(text=np.full(count, text), at=np.arange(count), matters=np.zeros(count, bool))
    found.append(Tokens(**made, **about))
  return jax.tree.map(lambda *x: np.concatenate(x), *found)


def _of_both(logits: Array, tokens: Array) -> dict[str, Array]:
  """Return the fields of `Tokens` that logits [2, B, L, V] of tokens [B, L] decide."""
  q, p = logits
  return {
    'features': features(q, p),
    'logq': sampling.at_token(sampling.log_softmax(q), tokens),
    'logp': sampling.at_token(sampling.log_softmax(p), tokens),
    'first_q': sampling.argmax(q),
    'first_p': sampling.argmax(p),
    'token': tokens,
  }


def references(models: Sequence[Model], task: Task) -> list[tuple]:
  """Return the texts (prompt, target tokens) of the first reference of each example."""
  tokenizer = models[-1].tokenizer
  eos = tokenizer.eos_ids[0]
  ended = lambda row: row if row[-1:] == [eos] else [*row, eos]
  return [(e.prompt, ended(tokenizer.encode(e.references[0], begins=False))) for e in task.examples]


def swaps(
  models: Sequence[Model], task: Task, *, tolerance: float = 0.0, batch_size: int = 32
) -> tuple[Tokens, list[str]]:
  """Return the tokens of greedy outputs, each with whether the drafter's token in its place would lower the metric.

  It begins with the verifier's outputs. At the first disagreement of an output the drafter's token takes the place of
  the verifier's, and the verifier goes on from there. If the metric of that output is lower by more than `tolerance`,
  the token matters, and the output stays as it was; else the new output replaces it. Then comes its next disagreement.

  Args:
    models: drafter and verifier.
    task: the prompts, the limits and, first of its metrics, the metric; it is called on one example at a time.
    tolerance: how much of the metric a swap may cost.
    batch_size: texts that are decoded at once.

  Returns:
    The tokens, and the texts: what deferring by the labels themselves emits.
  """
  metric = next(iter(task.metrics.values()))
  judge = lambda i, text: metric([task.examples[i]], task.judged([task.examples[i]], [text]))
  prompts = [models[-1].tokenizer.encode(e.prompt) for e in task.examples]
  go_on = functools.partial(_continued, models[-1], prompts, task, batch_size)
  texts, outputs = go_on({i: [] for i in range(len(prompts))})
  values = {i: judge(i, text) for i, text in texts.items()}
  reached = np.zeros(len(prompts), np.int32)
  active = np.arange(len(prompts))
  found = []
  while active.size:
    tokens = read(models, [(prompts[i], outputs[i]) for i in active], batch_size=batch_size)
    tokens = tokens.replace(text=active[tokens.text])
    tokens = tokens[tokens.at >= reached[tokens.text]]
    first = _earliest(tokens[tokens.first_q != tokens.token])
    end = np.full(len(prompts), task.max_new_tokens)
    end[first.text] = first.at
    found.append(tokens[tokens.at < end[tokens.text]])  # where both agree, nothing is swapped
    active = first.text
    begun = {i: [*outputs[i][:at], int(q)] for i, at, q in zip(active, first.at, first.first_q, strict=True)}
    new_texts, new_outputs = go_on(begun)
    new_values = {i: judge(i, text) for i, text in new_texts.items()}
    matters = np.array([new_values[i] < values[i] - tolerance for i in active], bool)
    found.append(first.replace(matters=matters))
    reached[active] = first.at + 1
    for i in active[~matters]:
      texts[i], outputs[i], values[i] = new_texts[i], new_outputs[i], new_values[i]
  return jax.tree.map(lambda *x: np.concatenate(x), *found), [texts[i] for i in range(len(prompts))]


def _earliest(tokens: Tokens) -> Tokens:
  """Return the earliest token of each text."""
  order = np.lexsort((tokens.at, tokens.text))
  tokens = tokens[order]
  return tokens[np.unique(tokens.text, return_index=True)[1]]


def _continued(model: Model, prompts: Sequence[list[int]], task: Task, batch_size: int, begun: dict[int, list[int]]):
  """Return texts and tokens of the greedy outputs that begin with given tokens, by the number of their prompt."""
  tokenizer = model.tokenizer
  if model.network.start_id is not None:
    model = model.replace(network=Continued(model.network, tokenizer.eos_ids[0]))
  outputs = dict(begun)
  ended = lambda row: len(row) >= task.max_new_tokens or bool(row) and row[-1] in model.network.eos_ids
  if asked := [i for i, row in begun.items() if not ended(row)]:
    filled = asked + asked[:1] * (batch_size - len(asked))  # all calls are of one shape, so one program is compiled
    rows = [Request(prompts[i] + begun[i], stop=task.stop) for i in filled]
    limits = dict(max_prompt_tokens=task.max_prompt_tokens + task.max_new_tokens, max_new_tokens=task.max_new_tokens)
    out = decode(methods.autoregressive(), [model], rows, sampler=Sampler(0.0), batch_size=batch_size, **limits)
    written = {i: begun[i] + list(map(int, tokens)) for i, tokens in zip(asked, out.tokens)}
    outputs |= {i: row[: task.max_new_tokens] for i, row in written.items()}
  texts = {i: tokenizer.decode(row) for i, row in outputs.items()}
  if truncate := truncation(task.stop):
    texts = {i: truncate(text, task.examples[i]) for i, text in texts.items()}
  return texts, outputs


def labelled(models: Sequence[Model], task: Task, batch_size: int = 32) -> Tokens:
  """Return the tokens of `swaps`, and print the metric that the labels themselves reach, and what they defer."""
  tokens, texts = swaps(models, task, batch_size=batch_size)
  (name, metric), *_ = task.metrics.items()
  value = metric(task.examples, task.judged(task.examples, texts))
  share = f'{tokens.matters.mean():.2%} of {tokens.token.size} tokens'
  differ = (tokens.first_q != tokens.first_p).mean()
  print(f'{name} {value:.2f} by the labels, which defer {share}; the models disagree at {differ:.2%}')
  return tokens
