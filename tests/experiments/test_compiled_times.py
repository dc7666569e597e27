"""The times of compiled passes: exact at what was compiled, on lines between, and of as many layers as asked."""

import functools

import pytest

from experiments.sv import compiled_times
from experiments.sv.compiled_times import PassTimes
from speccascade.models import shapes
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.planning import aot

TIMES = PassTimes((8, 16, 48), (1.0, 1.0, 2.0), 0.125)


@pytest.mark.parametrize(
  'rows, width, seconds', [(8, 1, 2.0), (4, 1, 1.5), (8, 2, 2.0), (8, 4, 2.5), (16, 2, 3.5), (8, 10, 4.0)]
)
def test_a_pass_costs_its_tokens_and_its_rows(rows, width, seconds):
  assert TIMES.seconds(rows, width) == pytest.approx(seconds)


def test_the_roofline_is_flat_to_the_knee_and_then_a_line():
  chip = aot.CHIPS['v6e']
  times = compiled_times.roofline(shapes.llama('7b', layers=2), 'v6e:2x2', source=128, tokens=128)
  weights = 2 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
  dense = lambda rows, width: times.seconds(rows, width) - rows * times.cache
  assert dense(1, 1) == pytest.approx(2 * weights / chip.bandwidth, rel=0.01)
  assert dense(100, 4) == pytest.approx(dense(1, 1), rel=0.01)
  assert dense(1000, 4) == pytest.approx(2 * weights * 4000 / chip.flops, rel=0.01)
  assert times.cache == pytest.approx(2 * 2 * 4096 * 2 * 192 / chip.bandwidth, rel=0.01)


@pytest.mark.long
def test_a_network_of_more_layers_costs_what_two_smaller_ones_say():
  pytest.importorskip('libtpu')
  make = lambda n: Decoder(DecoderConfig(512, 256, 4, 4, 64, 512, (Span(),) * n), (1,), 'bfloat16')
  of = functools.partial(compiled_times.compiled, make, topology='v5e:2x2', grid=((8, 1), (8, 4)), source=64, tokens=32)
  five, nine = of(5), of(9)
  direct = compiled_times._cycles(make(5), 'v5e:2x2', aot.Sizes(8, 64, 32), 4)
  clock = aot.CHIPS['v5e'].clock
  assert five.seconds(8, 4) == pytest.approx(sum(direct) / clock, rel=0.05)
  assert five.tokens == (8, 32) and five.seconds(8, 1) < five.seconds(8, 4) < nine.seconds(8, 4)
  assert nine.cache == pytest.approx(9 / 5 * five.cache, rel=0.05) and five.cache > 0
