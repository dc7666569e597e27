"""The parameters of several models as one argument of a program, in which each array is there once."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.tree_util import DictKey, keystr


@jax.tree_util.register_pytree_with_keys_class
class Parameters(tuple):
  """The parameters of each slot.

  An early exit has arrays of its model, and a head has those of its verifier. A program that took an array for each
  slot would count it as often, and be refused by a device that has room for one.
  """

  @functools.cached_property
  def flat(self) -> tuple[tuple, tuple]:
    """The arrays, each once, and how the slots are made of them."""
    leaves, tree = jax.tree.flatten(tuple(self))
    number: dict[int, int] = {}
    index = tuple(number.setdefault(id(x), len(number)) for x in leaves)
    return tuple(dict(zip(index, leaves)).values()), (tree, index)

  def tree_flatten(self) -> tuple[tuple, tuple]:
    """Return the arrays, each once, and how the slots are made of them."""
    return self.flat

  def tree_flatten_with_keys(self) -> tuple[list, tuple]:
    """Return the same with the place of each array in its first slot."""
    arrays, (tree, index) = self.flat
    paths = self.once([path for path, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten(index))])
    keys = [DictKey(keystr(path, simple=True, separator='/')) for path in paths]
    return list(zip(keys, arrays, strict=True)), (tree, index)

  def once(self, of_leaves: Sequence[Any]) -> list:
    """Return, of what there is for each leaf of the slots one after the other, that for each array's first place."""
    _, (_, index) = self.flat
    first = dict(zip(reversed(index), reversed(of_leaves)))
    return [first[i] for i in range(len(first))]

  @classmethod
  def tree_unflatten(cls, how: tuple, arrays: Any) -> 'Parameters':
    """Return the slots that are made of arrays; of whatever these are, the structure stays."""
    arrays = tuple(arrays)
    tree, index = how
    made = cls(tree.unflatten([arrays[i] for i in index]))
    made.flat = arrays, how
    return made
