"""A simulated round: what overlaps costs nothing, what is waited for does, and every byte is counted once."""

import pytest

from speccascade.planning import hlo, rounds

SPEED = 10 / rounds.EFFICIENCY  # so that the memory moves ten bytes a cycle
COST = 'backend_config={"estimated_cycles":"%d"}'
PROPOSE = 'metadata={op_name="jit(run)/while/body/propose_0/x"}, '
SCORE = 'metadata={op_name="jit(run)/while/body/score_1/feed_1/x"}, '
TEXT = """HloModule jit_f

%%slices (w: f32[100,8], i: s32[]) -> f32[1,8] {
  %%w.1 = f32[100,8]{1,0} parameter(0)
  %%i.1 = s32[] parameter(1)
  ROOT %%row = f32[1,8]{1,0} dynamic-slice(%%w.1, %%i.1, %%i.1), dynamic_slice_sizes={1,8}
}

%%adds (v: f32[100,8]) -> f32[100,8] {
  %%v.1 = f32[100,8]{1,0} parameter(0)
  ROOT %%sum = f32[100,8]{1,0} add(%%v.1, %%v.1)
}

%%tiled (w: f32[100,8]) -> f32[100,8] {
  %%w.2 = f32[100,8]{1,0} parameter(0)
  ROOT %%t.1 = f32[100,8]{0,1} copy(%%w.2)
}

%%slices_tiled (w: f32[100,8], i: s32[]) -> f32[1,8] {
  %%w.3 = f32[100,8]{1,0} parameter(0)
  %%other = f32[100,8]{0,1} fusion(%%w.3), kind=kLoop, calls=%%tiled
  %%i.3 = s32[] parameter(1)
  ROOT %%row.3 = f32[1,8]{1,0} dynamic-slice(%%other, %%i.3, %%i.3), dynamic_slice_sizes={1,8}
}

%%short (b: f32[2]) -> f32[2] {
  %%b.1 = f32[2]{0:S(1)} parameter(0)
  ROOT %%f = f32[2]{0:S(1)} add(%%b.1, %%b.1), SCORE cost(7)
}

%%long (b: f32[2]) -> f32[2] {
  %%b.2 = f32[2]{0:S(1)} parameter(0)
  ROOT %%g = f32[2]{0:S(1)} add(%%b.2, %%b.2), SCORE cost(70)
}

%%body (state: (f32[100,8], f32[2], s32[], pred[])) -> (f32[100,8], f32[2], s32[], pred[]) {
  %%state = (f32[100,8]{1,0}, f32[2]{0:S(1)}, s32[], pred[]) parameter(0)
  %%w = f32[100,8]{1,0} get-tuple-element(%%state), index=0
  %%b = f32[2]{0:S(1)} get-tuple-element(%%state), index=1
  %%i = s32[] get-tuple-element(%%state), index=2
  %%p = pred[] get-tuple-element(%%state), index=3
BODY
  ROOT %%out = (f32[100,8]{1,0}, f32[2]{0:S(1)}, s32[], pred[]) tuple(%%w, %%b, %%i, %%p)
}

%%condition (state: (f32[100,8], f32[2], s32[], pred[])) -> pred[] {
  %%state.1 = (f32[100,8]{1,0}, f32[2]{0:S(1)}, s32[], pred[]) parameter(0)
  ROOT %%more = pred[] get-tuple-element(%%state.1), index=3
}

ENTRY %%main (w: f32[100,8], b: f32[2], i: s32[], p: pred[]) -> (f32[100,8], f32[2], s32[], pred[]) {
  %%w.9 = f32[100,8]{1,0} parameter(0)
  %%b.9 = f32[2]{0:S(1)} parameter(1)
  %%i.9 = s32[] parameter(2)
  %%p.9 = pred[] parameter(3)
  %%all = (f32[100,8]{1,0}, f32[2]{0:S(1)}, s32[], pred[]) tuple(%%w.9, %%b.9, %%i.9, %%p.9)
  ROOT %%while = (f32[100,8]{1,0}, f32[2]{0:S(1)}, s32[], pred[]) while(%%all), condition=%%condition, body=%%body
}
"""
FETCH = '  %start = (f32[100,8]{1,0:S(1)}, f32[100,8]{1,0}, u32[]{:S(2)}) copy-start(%w)'  # 3200 bytes: 320 cycles
FETCHED = '  %done = f32[100,8]{1,0:S(1)} copy-done(%start)'


def compute(name: str, cycles: int, where: str = PROPOSE) -> str:
  """Return an instruction that touches nothing of the memory."""
  return f'  %{name} = f32[2]{{0:S(1)}} add(%b, %b), {where}{COST % cycles}'


def simulated(*lines: str, **settings) -> rounds.Round:
  """Return the round of a body of these instructions."""
  text = TEXT.replace('%%', '%').replace('BODY', '\n'.join(lines)).replace('SCORE ', SCORE)
  for cycles in (7, 70):
    text = text.replace(f'cost({cycles})', COST % cycles)
  return rounds.simulate(hlo.Module(text), SPEED, 1, **settings)


@pytest.mark.parametrize('beside, waits', [(100, 220), (320, 0), (500, 0)])
def test_a_copy_moves_beside_the_core_which_waits_for_the_rest(beside, waits):
  found = simulated(FETCH, compute('a', beside), FETCHED)
  assert found.cycles == pytest.approx(beside + waits) and found.traffic == pytest.approx(320)
  assert found.parts.get(rounds.WAITING, 0) == pytest.approx(waits)


def test_copies_queue_and_one_that_was_never_asked_for_still_moves():
  again = FETCH.replace('%start', '%start.2')
  found = simulated(FETCH, again, FETCHED.replace('%start', '%start.2'))
  assert found.cycles == found.traffic == pytest.approx(640)


def test_an_instruction_reads_the_parts_of_an_operand_that_it_uses():
  part = f'  %s = f32[1,8]{{1,0:S(1)}} fusion(%w, %i), kind=kLoop, calls=%slices, {COST % 1}'
  whole = f'  %t = f32[100,8]{{1,0:S(1)}} fusion(%w), kind=kLoop, calls=%adds, {COST % 1}'
  assert simulated(part).traffic == pytest.approx((32 + 4) / 10)  # a row, and the index
  assert simulated(part.replace('slices', 'slices_tiled')).traffic == pytest.approx((32 + 4) / 10)
  assert simulated(whole).cycles == pytest.approx(320)


def test_of_branches_the_longest_runs_or_the_shortest():
  chosen = '  %c = f32[2]{0:S(1)} conditional(%p, %b, %b), true_computation=%long, false_computation=%short'
  assert simulated(chosen).cycles == 70 and simulated(chosen, shortest=True).cycles == 7


def test_of_loops_of_which_one_runs_the_longest_does_or_the_shortest():
  loop = '  %%l%d = f32[2]{0:S(1)} while(%%b), condition=%%condition, body=%%%s, metadata={op_name="body/%s/while"}'
  once = [loop % (i, body, f'score_1/branch_{i % 2}_of_2') for i, body in enumerate(['short', 'long', 'long', 'short'])]
  assert simulated(*once[:2]).cycles == 70 and simulated(*once[:2], shortest=True).cycles == 7
  assert simulated(*once).cycles == 140  # two choices
  assert simulated(*(loop % (i, 'long', 'score_1') for i in range(2))).cycles == 140  # loops that choose nothing


def test_phases_are_known_by_their_scopes_and_the_floor_overlaps_within_each():
  found = simulated(FETCH, compute('a', 100), FETCHED, compute('b', 400, SCORE))
  assert found.phases == pytest.approx({'propose_0': 320, 'score_1': 400})
  assert found.floor == pytest.approx(320 + 400)
  alone = simulated(compute('a', 100), FETCH, FETCHED, compute('b', 400))
  assert alone.cycles == pytest.approx(820) and alone.floor == pytest.approx(500)


def test_a_kernel_of_ours_takes_the_longer_of_its_bytes_and_of_the_cycles_that_it_states():
  declared = 'custom_call_target="tpu_custom_call", config={"bytes_accessed":"{N}"}'
  stated = 'frontend_attributes={kernel_metadata={\n"cycles":"4000"\n}}'  # as XLA writes it
  kernel = f'  %k = f32[2]{{0:S(1)}} custom-call(%cache), {stated}, {declared}'
  cache = '  %cache = bf16[4,2,1,256,128]{4,3,2,1,0} bitcast(%w)'
  few, many = (simulated(cache, kernel.replace('{N}', str(n))) for n in (10, 100_000))
  assert few.cycles == 4000 and many.cycles == pytest.approx(10_000)
  assert list(few.parts) == [rounds.KERNELS]


REDUCE = '  %sum = f32[2]{0:S(1)} all-reduce(%b), replica_groups={{0,1}}, ' + SCORE + 'to_apply=%add'
BEGUN = REDUCE.replace('%sum', '%begun').replace('all-reduce', 'all-reduce-start')
ENDED = '  %ended = f32[2]{0:S(1)} all-reduce-done(%begun), ' + SCORE


def test_a_collective_takes_its_time_on_the_links_beside_the_core_if_it_is_only_started():
  network = lambda operation, size, chips: {'all-reduce': 10.0}[operation] * size * chips
  assert simulated(compute('a', 5), REDUCE).cycles == 5
  found = simulated(compute('a', 5), REDUCE, network=network)
  assert found.cycles == 5 + 160 and found.collectives == found.parts[rounds.COLLECTIVES] == 160
  found = simulated(BEGUN, compute('a', 50), ENDED, network=network)
  assert found.cycles == 160 and found.collectives == 110
  found = simulated(BEGUN, REDUCE, ENDED, network=network)  # one after the other
  assert found.cycles == found.collectives == 320
