"""Another vocabulary: a drafter seen through the tokens of a verifier that has other ones.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", draft from the drafter's distribution on the tokens that both vocabularies have (token-level
intersection, TLI). Here that is a network around the drafter's. It takes and returns the verifier's ids, so that every
method, rule and sampler sees one vocabulary. Two tables of integers are all that it adds:

  read [V]   the drafter's id that a token of the verifier is fed as;
  write [V]  the drafter's id whose logit a token has, -1 for a token that the drafter lacks.

The logits are gathered by `write`, and are -∞ for the tokens that the drafter lacks. So the drafter's distribution is
its own on the common tokens, renormalised, and what the sampler does comes after it, as for every model.

Two tokens are the same if they write the same bytes inside a text, however their formats spell them: `▁the` of
sentencepiece is `Ġthe` of byte-level BPE, and `<0x0A>` is a newline. Special tokens are the same if they end or begin a
sequence in both, or else have the same name. A token that the drafter lacks, in the prompt or in the text, is fed as
the drafter's longest token that it ends in: what follows depends most on what is next to it. One token is fed as one,
so a position is the same in both models, and to roll back stays to lower a number.

Whatever the drafter reads and whatever it proposes, a test against π makes the output follow π: the tables decide how
much is accepted, and nothing else. A rule that reads q reads the renormalised distribution.

Axis letters: B batch, L new tokens, S prompt, V vocabulary.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from speccascade.backends import Backend, ops
from speccascade.data import tokenizer_formats, tokenizers
from speccascade.host import storage
from speccascade.models.around import Around
from speccascade.types import Array, Cache, Model, Network, Params, Prompt

TABLES = 'translation'  # their name among the parameters
LEAST = 2  # common tokens without which there is nothing to draft


@dataclasses.dataclass(frozen=True)
class Translated(Around):
  """A drafter's network with the ids of a verifier; its parameters are the drafter's and the two tables."""

  drafter: Network
  vocab_size: int
  eos_ids: tuple[int, ...] = ()
  start_id: int | None = None

  @property
  def inner(self) -> Network:
    return self.drafter

  @property
  def packs(self) -> bool:
    """Whether `extend` takes a packed window."""
    return self.drafter.packs

  def param_shapes(self) -> Params | None:
    """As of the drafter, and those of the tables."""
    table = jax.ShapeDtypeStruct((self.vocab_size,), jnp.int32)
    return _with_tables(self.drafter.param_shapes(), {'read': table, 'write': table})

  def param_axes(self) -> Params | None:
    """As of the drafter, and those of the tables."""
    return _with_tables(self.drafter.param_axes(), {name: PartitionSpec('tokens') for name in ('read', 'write')})

  def lacks(self, params: Params) -> Array:
    own, tables = _apart(params)
    none = tables['write'] < 0
    inside = self.drafter.lacks(own)  # as of a head over some of its tokens
    return none if inside is None else none | _looked_up(inside, jnp.maximum(tables['write'], 0))

  def on(self, backend: Backend) -> 'Translated':
    """Return the network for a backend."""
    return dataclasses.replace(self, drafter=self.drafter.on(backend))

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Return the drafter's cache of the prompt [B, S]."""
    own, tables = _apart(params)
    return self.drafter.prefill(own, Prompt(_looked_up(tables['read'], prompt.tokens), prompt.length), max_len)

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array, *packing) -> tuple[Array, Cache]:
    """Feed tokens [B, L]; return logits [B, L, V] of the tokens after them, and the cache."""
    own, tables = _apart(params)
    logits, cache = self.drafter.extend(own, cache, _looked_up(tables['read'], tokens), positions, *packing)
    return ops.spread(logits, tables['write']), cache


def _with_tables(own: Params | None, tables: Params) -> Params | None:
  return None if own is None else {**own, TABLES: tables}


def _apart(params: Params) -> tuple[Params, Params]:
  """Return the drafter's parameters, and the tables."""
  return {name: x for name, x in params.items() if name != TABLES}, params[TABLES]


def _looked_up(table: Array, tokens: Array) -> Array:
  return jnp.take(table, tokens, mode='clip')


def translated(drafter: Model, *, for_: Model, tables: tuple[Sequence[int], Sequence[int]] | None = None) -> Model:
  """Return a drafter as a model with the tokens of a verifier.

  Args:
    drafter: The drafter; the result shares its arrays.
    for_: The verifier, which stays as it is.
    tables: (read, write), V ids of the drafter each, as this module explains them; None for those of the tokenizers.

  Returns:
    The drafter with the verifier's ids and tokenizer.

  Raises:
    ValueError: If the models cannot share a text, there are no tokenizers, or fewer than two tokens are common.
  """
  if drafter.network.mask_token is not None or drafter.network.remembers:
    kind = 'drafts in one pass' if drafter.network.mask_token is not None else 'has a memory'
    raise ValueError(f'{drafter.name} {kind}, which it would not do in another vocabulary: translate it without that.')
  size = for_.network.vocab_size
  names = f'{drafter.name} and {for_.name}'
  if (drafter.network.start_id is None) != (for_.network.start_id is None):
    raise ValueError(f'{names} cannot share a text: one is an encoder–decoder, one is not.')
  if tables is None:
    if lacking := [model.name for model in (drafter, for_) if not tokenizers.has_pieces(model)]:
      raise ValueError(
        f'{lacking[0]} has no tokenizer files to compare tokens by; load it with tokenizer=, or give tables=.'
      )
    tables = _tables(drafter, for_)
  read, write = (np.asarray(table, np.int32) for table in tables)
  least = {'read': read.min(initial=0), 'write': write.min(initial=0) + 1}
  for name, table in {'read': read, 'write': write}.items():
    if table.shape != (size,) or least[name] < 0 or table.max() >= drafter.network.vocab_size:
      raise ValueError(
        f'the table {name} has {list(table.shape)} ids of {table.min()} … {table.max()}; give one id of '
        f'{drafter.name} (0 … {drafter.network.vocab_size - 1}) for each of the {size} tokens of {for_.name}.'
      )
  ids, counts = np.unique(write[write >= 0], return_counts=True)
  if counts.max(initial=1) > 1:
    raise ValueError(
      f'the table write has the id {ids[counts.argmax()]} of {drafter.name} {counts.max()} times; give each id to one '
      'token, or its probability counts twice.'
    )
  if (common := int((write >= 0).sum())) < LEAST:
    raise ValueError(f'{names} have {common} tokens in common, of {size}: {drafter.name} cannot draft for it.')
  digest = drafter.digest and storage.digest(b''.join([drafter.digest.encode(), read.tobytes(), write.tobytes()]))
  return Model(
    {**drafter.params, TABLES: _next_to(drafter.params, {'read': read, 'write': write})},
    Translated(drafter.network, size, tuple(for_.network.eos_ids), for_.network.start_id),
    for_.tokenizer,
    f'{drafter.name}-translated',
    digest,
    drafter.generation,
  )


def for_the_last(models: Sequence[Model]) -> list[Model]:
  """Return models, those with other tokens than the last one translated for it."""
  *others, last = models
  return [*(m if tokenizers.are_alike(m, last) else translated(m, for_=last) for m in others), last]


def common(model: Model) -> np.ndarray | None:
  """Return [V]: which of a model's tokens it drafts; None where it drafts all."""
  lacks = model.network.lacks(model.params)
  return None if lacks is None else ~np.asarray(lacks)


def _next_to(params: Params, tables: dict[str, np.ndarray]) -> dict[str, Array]:
  """Put the tables on the devices of the parameters, replicated on a mesh."""
  array = next((x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)), None)
  if array is None:
    return tables
  where = array.sharding
  if isinstance(where, NamedSharding):
    where = NamedSharding(where.mesh, PartitionSpec())
  return jax.device_put(tables, where)


# ---- the tables of two tokenizers ----


def _tables(drafter: Model, large: Model) -> tuple[np.ndarray, np.ndarray]:
  """Return `read` and `write` for two models with tokenizers."""
  own, theirs = (tokenizer_formats.read(model.tokenizer.path) for model in (drafter, large))
  sizes = drafter.network.vocab_size, large.network.vocab_size
  ids = _ids(own, sizes[0])
  read = np.full(sizes[1], ids.get(b' ', 0), np.int32)  # what has no end in common is fed as a space
  write = np.full(sizes[1], -1, np.int32)
  for i, spelling in enumerate(theirs.spellings()[: sizes[1]]):
    read[i] = next((ids[end] for end in _ends(spelling) if end in ids), read[i])
  for spelling, i in _ids(theirs, sizes[1]).items():
    write[i] = ids.get(spelling, -1)
  same = [*zip(theirs.prefix, own.prefix), *zip(large.network.eos_ids, drafter.network.eos_ids)]
  if large.network.start_id is not None:
    same.append((large.network.start_id, drafter.network.start_id))
  for i, own_id in same:
    if i < sizes[1] and own_id < sizes[0]:
      write[write == own_id] = -1  # no logit counts twice
      read[i] = write[i] = own_id
  return read, write


def _ids(tokens: tokenizer_formats.Format, size: int) -> dict[bytes | str, int]:
  """Return the id of each spelling; a piece counts before a byte that it would be written with if it were missing."""
  spellings = tokens.spellings()[:size]
  order = sorted(range(len(spellings)), key=lambda i: not tokens.pieces[i].startswith('<0x'))
  return {spellings[i]: i for i in order if spellings[i] is not None}


def _ends(spelling: bytes | str | None) -> Iterator[bytes | str]:
  """Yield what a token writes and all its ends, the longest first; of a special token its name."""
  if isinstance(spelling, bytes):
    yield from (spelling[start:] for start in range(len(spelling)))
  elif spelling is not None:
    yield spelling
