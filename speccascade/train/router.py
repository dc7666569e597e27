"""Learned deferral: the head of `rules.learned` and `rules.learned_opt`, trained on what both models make of texts.

A job reads the texts of a task with both models in one pass, records `rules.features` of each token, and fits the head
by one of `LOSSES`. OUT/NAME/router.json has its weights, the names of its models and what it was trained on; `load`
makes the rule of it.

Axis letters: B batch, L target, N tokens, F features, V vocabulary.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from speccascade import methods, rules, sampling
from speccascade.checkpoints import digests
from speccascade.data.examples import Task
from speccascade.data.prompts import truncation
from speccascade.decode import decode, scoring
from speccascade.engine import inputs
from speccascade.engine.requests import Request
from speccascade.host import storage
from speccascade.host.errors import first_line
from speccascade.models import continued
from speccascade.sampling import Sampler
from speccascade.train import data
from speccascade.train.batches import Batch, collate, Pair
from speccascade.train.losses import logits_of
from speccascade.types import Array, checked_int, Model, Network, Params

FILE = 'router.json'
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # of the tokens, for which a job has the α that defers so many
RULES = {True: rules.learned_alone, False: rules.learned}  # by whether the head reads the drafter alone


@struct.dataclass
class Tokens:
  """Tokens of texts, with what both models make of each."""

  features: Array  # [N, F] rules.features, those of the drafter first
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


# ---- losses: of the head's outputs [N, 2], and of the tokens ----


def swap_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict whether a token of the drafter lowers the metric of the text (in the sense of AutoJudge).

  .. math:: -y \log \sigma(s) - (1 - y) \log \sigma(-s), \qquad s = \hat\ell_q - \hat\ell_p
  """
  return optax.sigmoid_binary_cross_entropy(outputs[:, 0] - outputs[:, 1], tokens.matters.astype(jnp.float32)).mean()


def expected_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict the 0–1 losses of both models, which the plug-in rules replace by 1 − max q and 1 − max p.

  .. math:: (\hat\ell_q - [\arg\max q \ne y])^2 + (\hat\ell_p - [\arg\max p \ne y])^2

  The head that minimises it is the conditional expectation of the losses, for which deferring where their difference
  is over α minimises E[loss] + α · P(defer), for every α at once.
  """
  losses = jnp.stack([tokens.first_q != tokens.token, tokens.first_p != tokens.token], -1)
  return jnp.square(outputs - losses.astype(jnp.float32)).sum(-1).mean()


def expected_log_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict the log losses of both models, which the plug-in rules replace by the entropies.

  .. math:: (\hat\ell_q + \log q(y))^2 + (\hat\ell_p + \log p(y))^2
  """
  return jnp.square(outputs + jnp.stack([tokens.logq, tokens.logp], -1)).sum(-1).mean()


def expected_draw_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Predict the chances that a token drawn from either model is another one than the text's, for decoding at T = 1.

  .. math:: (\hat\ell_q - (1 - q(y)))^2 + (\hat\ell_p - (1 - p(y)))^2
  """
  missed = 1 - jnp.exp(jnp.stack([tokens.logq, tokens.logp], -1))
  return jnp.square(outputs - missed).sum(-1).mean()


def marginal_loss(outputs: Array, tokens: Tokens) -> Array:
  r"""Let the text itself choose between the models: the marginal likelihood, without labels (Shen et al. 2024).

  .. math:: -\log\bigl(\sigma(-s)\,q(y) + \sigma(s)\,p(y)\bigr), \qquad s = \hat\ell_q - \hat\ell_p
  """
  score = outputs[:, 0] - outputs[:, 1]
  return -jnp.logaddexp(jax.nn.log_sigmoid(-score) + tokens.logq, jax.nn.log_sigmoid(score) + tokens.logp).mean()


LOSSES: dict[str, Callable[[Array, Tokens], Array]] = {
  'swap': swap_loss,
  'expected': expected_loss,
  'expected_log': expected_log_loss,
  'expected_draw': expected_draw_loss,
  'marginal': marginal_loss,
}


# ---- data, which the models and the loop make ----


def read(models: Sequence[Model], pairs: Sequence[Pair], *, batch_size: int = 32) -> Tokens:
  """Return every target token of pairs (source, target tokens) with what both models make of it.

  Args:
    models: drafter and verifier.
    pairs: the texts; a source is token ids, a text or chat messages, as in decoding.
    batch_size: texts that are read at once.

  Raises:
    ValueError: a source is empty, or a text is longer than a model has positions.
  """
  sources, targets = zip(*pairs, strict=True)
  sources = inputs.encode(models, sources)
  scoring.check_fits(models, sources, targets)
  pairs = list(zip(sources, targets, strict=True))
  networks = tuple(m.network for m in models)
  params = tuple(m.params for m in models)
  vocab = inputs.vocabulary(models)
  widths = tuple(inputs.bucket(max(map(len, side))) for side in zip(*pairs, strict=True))  # so one program is compiled
  found = []
  for start in range(0, len(pairs), batch_size):
    rows = pairs[start : start + batch_size]
    filled = rows + rows[:1] * (batch_size - len(rows))
    batch = dataclasses.replace(collate(filled, [widths]), truncated=None)
    made = jax.device_get(_read_batch(networks, vocab, params, batch))
    text, at = np.indices(batch.target.shape)
    real = (at < batch.target_length[:, None]) & (text < len(rows))
    tokens = Tokens(**made, token=batch.target, text=text + start, at=at, matters=np.zeros(text.shape, bool))
    found.append(tokens[real])
  return jax.tree.map(lambda *x: np.concatenate(x), *found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_batch(networks: Sequence[Network], vocab: int, params: Sequence[Params], batch: Batch) -> dict[str, Array]:
  q, p = (logits_of(n, x, batch)[..., :vocab] for n, x in zip(networks, params, strict=True))
  return {
    'features': rules.features(q, p),
    'logq': sampling.at_token(sampling.log_softmax(q), batch.target),
    'logp': sampling.at_token(sampling.log_softmax(p), batch.target),
    'first_q': sampling.argmax(q),
    'first_p': sampling.argmax(p),
  }


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
  prompts = [row.tolist() for row in inputs.encode(models, [e.prompt for e in task.examples])]
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
  tokenizer = _tokenizer(model)
  if model.network.start_id is not None:
    end = tokenizer.eos_ids[0]
    if wrong := [i for i in begun if prompts[i][-1] != end]:
      raise ValueError(
        f'example {wrong[0]}: the prompt ends with token {prompts[wrong[0]][-1]}, but its output is told from it by '
        f'{end}, the end of a text: give the text, or ids that end with {end}.'
      )
    model = model.replace(network=continued.Continued(model.network, end))
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


def _tokenizer(model: Model):
  if model.tokenizer is None:
    raise ValueError(
      f'{model.name} has no tokenizer, and references and outputs are texts; add its tokenizer.json or .model.'
    )
  return model.tokenizer


# ---- training ----


def fit(
  loss: Callable[[Array, Tokens], Array],
  tokens: Tokens,
  *,
  alone: bool = False,
  hidden: int = 32,
  steps: int = 2000,
  learning_rate: float = 1e-2,
  decay: float = 1e-3,
  seed: int = 0,
) -> Any:
  """Return the weights of a head that minimises a loss over tokens, for `rules.head`.

  Args:
    loss: one of `LOSSES`, or one like them.
    tokens: what to train on; each step takes all of them.
    alone: whether the head reads the drafter's features only.
    hidden: units of the hidden layer.
    steps: steps of Adam, with a cosine schedule.
    learning_rate: the largest learning rate.
    decay: weight decay.
    seed: of the initial weights.
  """
  x = tokens.features[:, : rules.TOP + 1] if alone else tokens.features
  mean = x.mean(0)
  scale = x.std(0) + 1e-3
  x = jnp.asarray((x - mean) / scale)
  keys = jax.random.split(jax.random.key(seed))
  sizes = (x.shape[1], hidden, 2)
  init = [(jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:])]
  transform = optax.adamw(optax.cosine_decay_schedule(learning_rate, steps), weight_decay=decay)

  @jax.jit
  def train(weights, tokens):
    def step(carry, _):
      weights, state = carry
      value, gradient = jax.value_and_grad(lambda w: loss(rules.head(w, x), tokens))(weights)
      with jax.numpy_dtype_promotion('standard'):  # optax raises its decay to the power of an integer count
        updates, state = transform.update(gradient, state, weights)
      return (optax.apply_updates(weights, updates), state), value

    return jax.lax.scan(step, (weights, transform.init(weights)), length=steps)[0][0]

  (kernel, bias), last = jax.device_get(train(init, jax.tree.map(jnp.asarray, tokens)))
  kernel = kernel / scale[:, None]  # the head reads features as they are
  return (kernel, bias - mean @ kernel), last


Models = Sequence[Model | Callable[[], Model]]


def loaded(job: Any) -> Any:
  """Return a job whose `models` are loaded, those that are functions by calling them."""
  return dataclasses.replace(job, models=[m() if callable(m) else m for m in job.models])


@dataclasses.dataclass(frozen=True)
class Router:
  """A learned rule to train, as a job of `python -m speccascade.train`.

  Attributes:
    name: the job's name, and its folder.
    models: drafter and verifier, or functions that load them when the job's turn has come, as @train.load without ().
    task: the prompts, with references; for the loss 'swap' its first metric judges each output.
    loss: one of `LOSSES`.
    alone: whether the head reads the drafter alone, as `methods.token_cascade` needs.
    texts: what all losses but 'swap' read: 'references', or 'verifier' for its greedy outputs.
    tolerance: of the loss 'swap': how much of the metric a token of the drafter may cost.
    hidden: units of the head's hidden layer.
    steps: steps of Adam.
    learning_rate: the largest learning rate.
    decay: weight decay.
    batch_size: texts that are read or decoded at once.
    seed: of the initial weights.
  """

  name: str
  models: Models
  task: Task
  loss: str = 'expected'
  alone: bool = False
  texts: str = 'references'
  tolerance: float = 0.0
  hidden: int = 32
  steps: int = 2000
  learning_rate: float = 1e-2
  decay: float = 1e-3
  batch_size: int = 32
  seed: int = 0

  def __post_init__(self):
    if self.loss not in LOSSES:
      raise ValueError(f'router {self.name}: loss={self.loss!r}; choose from {", ".join(LOSSES)}.')
    if self.texts not in ('references', 'verifier'):
      raise ValueError(f"router {self.name}: texts={self.texts!r}; choose 'references' or 'verifier'.")
    if len(self.models) != 2:
      raise ValueError(f'router {self.name} has {len(self.models)} models; give drafter and verifier.')
    for name in ('hidden', 'steps', 'batch_size'):
      checked_int(f'router {self.name}: {name}', getattr(self, name))

  def run(self, out: Path, echo: Callable = print) -> functools.partial:
    """Train in `out`/name, unless that was done; return the rule. One that was trained otherwise is refused."""
    return loaded(self)._run(out, echo)

  def _run(self, out: Path, echo: Callable) -> functools.partial:
    file = out / self.name / FILE
    identity = self._identity()
    if file.is_file():
      storage.check_identity(f'{file} was trained with', json.loads(file.read_text()), identity)
    else:
      tokens = self._tokens(echo)
      settings = {name: getattr(self, name) for name in ('alone', 'hidden', 'steps', 'learning_rate', 'decay', 'seed')}
      weights = fit(LOSSES[self.loss], tokens, **settings)
      found = scores(functools.partial(RULES[self.alone], weights=weights), tokens)
      quantiles = {f'{share:.0%}': float(np.quantile(found, 1 - share)) for share in SHARES}  # α by what it defers
      save(file.parent, weights, self.models, **identity, quantiles=quantiles)
    for share, alpha in json.loads(file.read_text())['quantiles'].items():
      echo(f'α = {alpha:.4g} defers {share} of the tokens')
    return load(file, self.models)

  def _identity(self) -> dict[str, Any]:
    """Return what decides the weights: settings, and digests of the models and of the task; rounding apart."""
    names = ('loss', 'alone', 'texts', 'tolerance', 'hidden', 'steps', 'learning_rate', 'decay', 'seed')
    identity = {name: getattr(self, name) for name in names}
    identity |= {k: digests.of_params(m.params) for k, m in zip(('drafter', 'verifier'), self.models, strict=True)}
    task = self.task
    about = [task.max_prompt_tokens, task.max_new_tokens, list(task.stop), list(task.metrics)]
    texts = [[e.prompt, e.references, e.info] for e in task.examples]
    return identity | {'task': storage.digest_of_json([*about, texts])}

  def _tokens(self, echo: Callable) -> Tokens:
    if self.loss == 'swap':
      return labelled(self.models, self.task, self.tolerance, self.batch_size, echo)
    if self.texts == 'references':
      return of_references(self.models, self.task, self.batch_size)
    prompts = [row.tolist() for row in inputs.encode(self.models, [e.prompt for e in self.task.examples])]
    _, outputs = _continued(self.models[-1], prompts, self.task, self.batch_size, {i: [] for i in range(len(prompts))})
    return read(self.models, [(prompts[i], row) for i, row in outputs.items()], batch_size=self.batch_size)


def of_references(models: Sequence[Model], task: Task, batch_size: int) -> Tokens:
  """Return the tokens of the first reference of each example."""
  for e in task.examples:
    if not e.references:
      raise ValueError(f'example {e.index} has target={e.target!r}: give it a reference, or leave it out.')
  texts = [('', e.references[0]) for e in task.examples]  # of targets alone, for a prompt may be no text
  targets = [target for _, target in data.tokenised(texts, _tokenizer(models[-1]))]
  pairs = list(zip([e.prompt for e in task.examples], targets, strict=True))
  return read(models, pairs, batch_size=batch_size)


def labelled(models: Sequence[Model], task: Task, tolerance: float, batch_size: int, echo: Callable) -> Tokens:
  """Return the tokens of `swaps`, and print the metric that the labels themselves reach, and what they defer."""
  tokens, texts = swaps(models, task, tolerance=tolerance, batch_size=batch_size)
  (name, metric), *_ = task.metrics.items()
  value = metric(task.examples, task.judged(task.examples, texts))
  share = f'{tokens.matters.mean():.2%} of {tokens.token.size} tokens'
  differ = (tokens.first_q != tokens.first_p).mean()
  echo(f'{name} {value:.2f} by the labels, which defer {share}; the models disagree at {differ:.2%}')
  return tokens


def scores(rule: functools.partial, tokens: Tokens) -> np.ndarray:
  """Return what a learned rule compares with α at each token [N]."""
  weights = rule.keywords['weights']
  (kernel, _), _ = weights
  losses = np.asarray(rules.head(weights, jnp.asarray(tokens.features[:, : len(kernel)])))
  return losses[:, 0] - losses[:, 1]


# ---- files ----


def save(folder, weights: Any, models: Sequence[Any], *, alone: bool, **about) -> None:
  """Write a head with the names of its models, drafter first, and whatever else describes it, to FOLDER/router.json."""
  names = [m.name for m in models]
  content = {'models': names, 'alone': alone, **about, 'weights': jax.tree.map(np.ndarray.tolist, weights)}
  storage.write(storage.local(folder) / FILE, json.dumps(content) + '\n')


def load(path, models: Sequence[Any], *, rejections: bool = False) -> functools.partial:
  """Return the rule of a trained head, which needs an α: `functools.partial(load(…), alpha=0.1)`.

  Args:
    path: the folder that the training wrote, or its file.
    models: drafter and verifier, or anything with their names.
    rejections: whether α is the cost of a rejected token, as in `rules.learned_opt`, and not of a deferral.

  Raises:
    FileNotFoundError: there is none.
    ValueError: the file has no head, or one for models of other names, or one that cannot tell what is rejected.
  """
  file = storage.local(path)
  file = file / FILE if file.is_dir() else file
  if not file.is_file():
    raise FileNotFoundError(f'{file}: no such router; train it with python -m speccascade.train (gin_configs/train/).')
  try:
    content = json.loads(file.read_bytes())
    alone, named = content['alone'], content['models']
    weights = tuple((np.float32(kernel), np.float32(bias)) for kernel, bias in content['weights'])
    rules.head(weights, np.zeros((1, rules.TOP + 1 if alone else len(rules.FEATURES)), np.float32))
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(f'{file} is no router ({first_line(error, named=True)}); train it anew.') from error
  names = [m.name for m in models]
  if names != named:
    raise ValueError(
      f'{file} decides between {" and ".join(content["models"])}, not {" and ".join(map(str, names))}: give those '
      'models, or train a router for these.'
    )
  if rejections and alone:
    raise ValueError(f'{file} reads the drafter alone, which cannot tell what is rejected; load it without rejections.')
  return functools.partial(rules.learned_opt if rejections else RULES[alone], weights=weights)
