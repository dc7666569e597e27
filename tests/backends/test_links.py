"""Times of collectives by the model of the links between chips."""

import pytest

from speccascade.backends.links import Links, prime_factors

PLANE = Links(bandwidth=1e9, axes=2, ring=4, hop=1.0)
SPACE = Links(bandwidth=1e9, axes=3, ring=4, hop=1.0)


def test_a_group_is_a_rectangle_as_even_as_possible():
  assert [PLANE.grid(n) for n in (1, 2, 4, 8, 32, 12)] == [[], [2], [2, 2], [4, 2], [8, 4], [3, 4]]
  assert [SPACE.grid(n) for n in (8, 16, 64)] == [[2, 2, 2], [4, 2, 2], [4, 4, 4]]
  assert [prime_factors(n) for n in (1, 12, 7)] == [[], [2, 2, 3], [7]]


def test_a_collective_crosses_the_hops_and_moves_its_bytes_over_all_links():
  assert PLANE.seconds('all-reduce', 1e9, 1) == 0
  # Two chips: one hop, one link, half of the bytes, there and back.
  assert PLANE.seconds('all-reduce', 1e9, 2) == pytest.approx(2 * (1 + 0.5), abs=1e-5)
  assert PLANE.seconds('all-gather', 1e9, 2) == pytest.approx(1 + 0.5, abs=1e-5)
  # 4 × 2: the first axis is a ring, of two hops and two links, the other of one.
  assert PLANE.seconds('reduce-scatter', 1e9, 8) == pytest.approx(2 + 1 + 7 / 8 / 3, abs=1e-5)
  assert PLANE.seconds('collective-permute', 1e9, 8) == pytest.approx(1 + 1, abs=1e-5)
