"""A head over some tokens: a drafter that scores the tokens it is likely to draft, and reads no weights of the others.

With a large vocabulary much of what a small drafter reads in a step are the rows of its output matrix, most of them of
tokens that it hardly ever draws. Zhao et al. 2025, "FR-Spec: Accelerating Large-Vocabulary Language Models via
Frequency-Ranked Speculative Sampling", keep the rows of the most frequent ones. Tokens without a row have the logit -∞,
so q is the drafter's distribution on the others, renormalised. A test against the target p needs no more: the output
follows p whatever q leaves out. A rule that reads q, as those of cascades, reads the renormalised one, and its target
is made of that.

Axis letters: B batch, L new tokens, S prompt, V vocabulary, D tokens with a row.
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from speccascade.backends import Backend
from speccascade.drafters.eagle import Eagle
from speccascade.host import storage
from speccascade.models.around import SameTokens
from speccascade.models.base import Base
from speccascade.types import Array, Cache, checked_int, Model, Network, Params, Prompt

HEAD = 'frequent'  # its name among the parameters


@dataclasses.dataclass(frozen=True)
class Frequent(SameTokens):
  """A network with a head over `count` of its tokens.

  Its parameters are those of the drafter, and {'head', 'write'}: the rows, and [V] the number of each token's row, -1
  for none.
  """

  drafter: Base
  count: int  # D

  @property
  def inner(self) -> Base:
    return self.drafter

  @property
  def narrow(self) -> Base:
    """The network whose vocabulary is D."""
    return dataclasses.replace(self.drafter, config=dataclasses.replace(self.drafter.config, vocab_size=self.count))

  @property
  def mask_token(self) -> int | None:
    return self.drafter.mask_token

  def endless(self) -> 'Frequent':
    return dataclasses.replace(self, drafter=self.drafter.endless())

  def on(self, backend: Backend) -> 'Frequent':
    return dataclasses.replace(self, drafter=self.drafter.on(backend))

  def param_shapes(self) -> Params:
    write = jax.ShapeDtypeStruct((self.vocab_size,), jnp.int32)
    head = _head(self.narrow.param_shapes(), self.drafter.head_path)
    return {**self.drafter.param_shapes(), HEAD: {'head': head, 'write': write}}

  def param_axes(self) -> Params:
    axes = self.drafter.param_axes()
    return {**axes, HEAD: {'head': _head(axes, self.drafter.head_path), 'write': PartitionSpec('tokens')}}

  def shares_cache(self, params: Params, other: Network, other_params: Params) -> bool:
    return self.drafter.shares_cache(_own(params), other, other_params)

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    """Leave out the head over all tokens."""
    own, cache = self.drafter.reads(unflatten_dict(self._headless(params)), cache)
    return {**own, HEAD: params[HEAD]}, cache

  def lacks(self, params: Params) -> Array:
    return params[HEAD]['write'] < 0

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    return self.drafter.prefill(_own(params), prompt, max_len)

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens [B, L]; return logits [B, L, V] of the tokens after them, and the cache."""
    own = _own(params)
    _, cache, x = self.drafter.observe(own, cache, tokens, positions, (-1,))  # the logits are not used, nor computed
    head = {(*self.drafter.head_path, *name): leaf for name, leaf in flatten_dict(params[HEAD]['head']).items()}
    logits = self.narrow.scores(unflatten_dict(self._headless(params) | head), x)
    return self.drafter.backend.spread(logits, params[HEAD]['write']), cache

  def _headless(self, params: Params) -> dict[tuple[str, ...], Array]:
    """Return {path: parameter} of the drafter without its head over all tokens."""
    path = self.drafter.head_path
    return {name: leaf for name, leaf in flatten_dict(_own(params)).items() if name[: len(path)] != path}


def _own(params: Params) -> Params:
  """Return the drafter's parameters."""
  return {name: x for name, x in params.items() if name != HEAD}


def _head(tree: Params, path: tuple[str, ...]) -> Params:
  """Return the part of a tree at a path."""
  for name in path:
    tree = tree[name]
  return tree


def frequent(model: Model, tokens: Sequence[int], verifier: Model | None = None) -> Model:
  """Return a model that scores some of its tokens alone, the most frequent ones: as a drafter it reads less.

  The output follows every target as before. A rule that reads q reads it without the other tokens, renormalised.

  Args:
    model: T5, a decoder-only model, or a head of EAGLE-3; the result shares its arrays, and has the rows of the tokens
      once more.
    tokens: The ids, in any order, as `frequent_tokens` counts them. The ids that end a text are added.
    verifier: The verifier of a head, whose rows those of a head without a matrix of its own are.

  Raises:
    ValueError: If the network is another, or an id none of the vocabulary.
  """
  network = model.network
  if isinstance(network, Eagle) and network.config.kind == 'eagle3' and not network.config.draft_vocab:
    return _cut_head(model, tokens, verifier)
  if not isinstance(network, Base) or network.drafts_only:
    raise ValueError(
      f'{model.name} is a {type(network).__name__}, whose head is not cut: take T5, a decoder or a head of EAGLE-3 '
      'over all tokens.'
    )
  ids, write = _numbered(tokens, network)
  made = Frequent(network, len(ids))

  def rows(x, shape):
    axis = next(i for i, (old, new) in enumerate(zip(x.shape, shape.shape)) if old != new)
    return jnp.take(x, ids, axis=axis)

  head = _head(model.params, network.head_path)
  if len(ids) < network.vocab_size:
    head = jax.tree.map(rows, head, made.param_shapes()[HEAD]['head'])
  params = {**model.params, HEAD: {'head': head, 'write': jnp.asarray(write)}}
  digest = model.digest and storage.digest(b''.join([model.digest.encode(), write.tobytes()]))
  return model.replace(params=params, network=made, name=f'{model.name}-frequent{len(ids)}', digest=digest)


def _numbered(tokens: Sequence[int], network: Base) -> tuple[np.ndarray, np.ndarray]:
  """Return the ids, ascending, and [V] the number of each token among them, -1 for none."""
  ids = np.unique([checked_int('tokens', i, 0, network.vocab_size - 1) for i in (*tokens, *network.eos_ids)])
  write = np.full(network.vocab_size, -1, np.int32)
  write[ids] = np.arange(len(ids))
  return ids, write


def _cut_head(head: Model, tokens: Sequence[int], verifier: Model | None) -> Model:
  """Return a head of EAGLE-3 with a matrix over some tokens, cut out of its own or of the verifier's."""
  if verifier is None:
    raise ValueError(f'{head.name} is a head: give its verifier, too')
  ids, write = _numbered(tokens, verifier.network)
  if head.network.own_scores:
    kernel = head.params['logits_dense']['kernel'][:, ids]
  else:
    path = verifier.network.head_path
    matrix = _head(verifier.params, path)
    theirs = verifier.network.config
    if any(getattr(theirs, name) for name in ('final_cap', 'logits_divisor', 'projected_dim')):
      raise ValueError(f'{verifier.name} does not score tokens by its matrix alone: cut a head that has its own')
    kernel = matrix['kernel'][:, ids] if 'kernel' in matrix else matrix['embedding'][ids].T
  network = head.network.over(len(ids))
  params = {**head.params, 'logits_dense': {'kernel': kernel}, 'write': jnp.asarray(write)}
  digest = head.digest and storage.digest(b''.join([head.digest.encode(), write.tobytes()]))
  return head.replace(params=params, network=network, name=f'{head.name}-frequent{len(ids)}', digest=digest)


def frequent_tokens(model: Model, texts: Iterable[str], count: int | None = None) -> list[int]:
  """Return the ids of the tokens that are the most frequent in texts, the most frequent ones first.

  Args:
    model: The model, with its tokenizer; special tokens come before all others.
    texts: Texts as the model writes them, the lines of a file for example.
    count: How many; None for all that occur.
  """
  if model.tokenizer is None:
    raise ValueError(f'{model.name} has no tokenizer to count tokens by; load it with tokenizer=.')
  counts = collections.Counter(token for text in texts for token in model.tokenizer.encode(text))
  found = [*model.network.eos_ids, *model.tokenizer.special_ids.values(), *(i for i, _ in counts.most_common())]
  found = [i for i in dict.fromkeys(found) if i < model.network.vocab_size]
  return found if count is None else found[: checked_int('count', count, 1, model.network.vocab_size)]
