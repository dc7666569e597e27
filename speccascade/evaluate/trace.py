"""The probability of each token of an output under the models and the target, and where the token came from.

Outputs are fed to every model in one pass behind their prompts (teacher forcing), and the method's own combiner is
applied at each position.
"""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import rules, sampling
from speccascade.data.examples import Example
from speccascade.decode import scoring
from speccascade.engine import inputs
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.protocols import Loaded
from speccascade.host import multihost
from speccascade.types import Array, BONUS, RESIDUAL


def selected(experiment: Experiment) -> list[Point]:
  """Return the point of each curve that is traced, the middle one."""
  return [points[(len(points) - 1) // 2] for points in (c.points() for c in experiment.curves)]


def traces(experiment: Experiment, loaded: Loaded, lines: Iterable[dict]) -> list[dict]:
  """Return the traces of the first examples at every temperature, from the lines of the quality protocol."""
  examples = _examples(experiment)

  def key(line):
    return (line['temperature'], line['curve'], str(line['value']), line['example'])

  by_key = {key(line): line for line in wanted(experiment, lines)}
  made = []
  for temperature in experiment.temperatures:
    for point in selected(experiment):
      name, value = point.key
      lines = [by_key.get((temperature, name, str(value), e.index)) for e in examples]
      if None in lines or not lines:
        continue
      tokens = _trace(experiment, loaded, point, temperature, examples, lines)
      for example, trace in zip(examples, tokens, strict=True):
        made.append(
          dict(
            curve=name,
            value=value,
            temperature=temperature,
            example=example.index,
            prompt=example.prompt if isinstance(example.prompt, str) else ' '.join(map(str, example.prompt)),
            target=example.target,
            tokens=trace,
          )
        )
  return made


def wanted(experiment: Experiment, lines: Iterable[dict]) -> Iterator[dict]:
  """Yield the lines of the quality protocol of which traces are made."""
  indices = {e.index for e in _examples(experiment)}
  return (line for line in lines if line['example'] in indices)


def _examples(experiment: Experiment) -> list[Example]:
  """Return the first examples of those that are decoded."""
  return list(experiment.task.examples[: experiment.quality_examples][: experiment.trace_examples])


def _trace(experiment, loaded, point, temperature, examples, lines) -> list[list[dict]]:
  """Return for each example its tokens with q̃, p̃ and π."""
  method = point.build()
  outputs = [np.asarray(line['tokens'], np.int32) for line in lines]
  tokens = inputs.pad(outputs, len(outputs), experiment.task.max_new_tokens).tokens
  models = loaded.models
  prompts = [loaded.prompts[e.index] for e in examples]
  slots, combiner = method.target
  used = tuple(sorted({*method.slots}))
  sampler = experiment.sampler(temperature)
  logits = _logits(models, prompts, [line['tokens'] for line in lines], tokens.shape[1])
  if sampler.penalises:
    counts = _emitted_before(outputs, logits[used[-1]].shape)
    seen = counts > 0
    start = models[used[-1]].network.start_id
    for row, prompt in zip(seen, prompts, strict=True):
      row[:, prompt if start is None else start] = True
    sampler = sampler.bind(jnp.asarray(seen), jnp.asarray(counts))
  distributions = {}
  if len(used) > 1:
    distributions['q'] = _chance(logits[used[0]], tokens, sampler)
  distributions['p'] = _chance(logits[used[-1]], tokens, sampler)
  if combiner is not None and not method.reads_prefix:
    distributions['pi'] = _combined(combiner, tuple(logits[m] for m in slots), tokens, sampler)
  distributions = jax.device_get(multihost.to_host(distributions))
  names = _sources(method)
  pieces = models[-1].tokenizer.pieces() if models[-1].tokenizer is not None else None
  return [
    [
      dict(
        text=pieces[token] if pieces else str(token),
        source=names.get(int(lines[i]['source'][j]), 'drafter'),
        **{k: _rounded(distributions[k][i, j]) if k in distributions else None for k in ('q', 'p', 'pi')},
      )
      for j, token in enumerate(row)
    ]
    for i, row in enumerate(outputs)
  ]


def _logits(models, prompts, outputs, length: int) -> np.ndarray:
  """Return the logits [M, B, L, V] from which each model draws the tokens of outputs, which are read."""
  read = scoring.read(models, prompts, outputs, lambda logits, tokens: jnp.moveaxis(logits, 0, 2))
  logits = np.zeros((len(models), len(read), length, read[0].shape[-1]), np.float32)
  for i, of_text in enumerate(read):
    logits[:, i, : len(of_text)] = np.moveaxis(of_text, 1, 0)
  return logits


def _rounded(chance: np.float32) -> float | None:
  """Return a chance for reading, None where a model's logits were not finite."""
  return round(float(chance), 5) if np.isfinite(chance) else None


def _sources(method) -> dict[int, str]:
  """Return in words where a token came from, by the code of `stats.source`."""
  numbers = sorted({*method.slots})
  drafters = ('drafter', 'second drafter', 'third drafter', 'fourth drafter')
  names = {m: drafters[min(i, 3)] for i, m in enumerate(numbers)}
  if not method.takes_turns and numbers[-1] > 0:
    names[numbers[-1]] = 'verifier'
  return names | {RESIDUAL: 'residual', BONUS: 'bonus' if method.drafts else 'combined'}


def _emitted_before(outputs, shape) -> np.ndarray:
  """Return [B, L, V]: how often each token was emitted before each output token, for the penalties."""
  counts = np.zeros(shape, np.float32)
  for row, output in zip(counts, outputs, strict=True):
    for i, token in enumerate(output):
      row[i + 1 :, token] += 1
  return counts


@jax.jit
def _chance(logits: Array, tokens: Array, sampler: sampling.Sampler) -> Array:
  return sampling.at_token(sampler(logits), tokens)


@jax.jit
def _combined(combiner, logits: tuple[Array, ...], tokens: Array, sampler: sampling.Sampler) -> Array:
  return sampling.at_token(rules.target(combiner, logits, sampler).probs, tokens)
