"""The replay of trees: paths that are likeliest, and rounds that go along them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.leaves import trees

CHANCES = (0.5, 0.2, 0.1)


def test_a_tree_has_the_likeliest_paths_and_all_that_lead_to_them():
  every = [path for n in (1, 2, 3) for path in itertools.product(range(3), repeat=n)]
  chance = {path: np.prod([CHANCES[rank] for rank in path]) for path in every}
  found = trees.tree(CHANCES, 9, 3)
  assert len(found) == 9 and all(path[:-1] in found for path in found if len(path) > 1)
  assert min(chance[path] for path in found) >= max(chance[path] for path in every if path not in found) - 1e-12


def test_leaves_have_no_children_and_the_chain_is_whole():
  found = trees.tree(CHANCES, 6, 3, chain=True)
  assert found == {(0,), (0, 0), (0, 0, 0), (1,), (2,), (0, 1)}


def test_a_round_commits_what_the_tree_has_and_one_token_more():
  paths = {(0,), (0, 0), (1,)}
  tokens, rounds = trees.replay([np.array([0, 0, 0, 1, 2, 2, 0])], paths)  # 0 0|0, 1 2, 2, 0 at the end
  assert tokens.tolist() == [7] and rounds.tolist() == [4]


def test_with_one_noise_the_rank_is_that_in_the_drafters_race():
  logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]], [[0.1, 0.2, 0.7]]]))[:, None].repeat(4000, 2).reshape(2, 4, 1000, 3)
  tokens = jnp.broadcast_to(jnp.arange(4)[:, None], (4, 1000)) % 3
  found = jax.jit(lambda *x: trees.ranks(1.0, *x))(logits, tokens)
  assert jnp.array_equal(found['likeliest'], tokens)  # the drafter has them in this order
  q, p = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
  same = sum(1 / np.maximum(q / q[v], p / p[v]).sum() for v in range(3))  # Pr[both races have one winner]
  assert abs(float((found['one noise'] == 0).mean()) - same) < 4 * np.sqrt(same * (1 - same) / 4000)
