"""What is read from the text of compiled programs: recorded ones of a TPU, and one compiled here."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from speccascade.planning import hlo, program_report

RECORDED = pathlib.Path(__file__).parent / 'recorded'
# Laid out as XLA writes it: a weight copied to another layout through a faster memory in parts, a cache through a
# fusion that transposes, a weight that is only fetched, and one that is computed with.
ENTRY = """HloModule jit_f

%body (state: (bf16[8,4], bf16[8,4])) -> (bf16[8,4], bf16[8,4]) {
  %state = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) parameter(0)
  %cache = bf16[8,4]{1,0} get-tuple-element(%state), index=0
  %laid = bf16[8,4]{0,1} copy(%cache)
  %fetched-start = (bf16[8,4]{1,0:S(1)}, bf16[8,4]{1,0}, u32[]{:S(2)}) copy-start(%cache)
  %fetched = bf16[8,4]{1,0:S(1)} copy-done(%fetched-start)
  %back-start = (bf16[8,4]{1,0}, bf16[8,4]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%fetched)
  %back = bf16[8,4]{1,0} copy-done(%back-start)
  ROOT %tuple = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%back, %back)
}

%condition (state: (bf16[8,4], bf16[8,4])) -> pred[] {
  %state.1 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%transposes (x: bf16[8,4]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  ROOT %y = bf16[8,4]{0,1} copy(%x)
}

ENTRY %main (w: bf16[8,4], v: bf16[8,4], u: bf16[8,4], c: bf16[8,4]) -> bf16[8,4] {
  %w = bf16[8,4]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %v = bf16[8,4]{1,0} parameter(1), metadata={op_name="params[\\'v\\']"}
  %u = bf16[8,4]{1,0} parameter(2), metadata={op_name="params[\\'u\\']"}
  %c = bf16[8,4]{1,0} parameter(3), metadata={op_name="caches[0]"}
  %start = ((bf16[8,4]{1,0}), bf16[4,4]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:4], [0:4]}
  %done = bf16[4,4]{1,0:S(1)} slice-done(%start)
  %joined = bf16[8,4]{1,0:S(1)} custom-call(%done, %done), custom_call_target="ConcatBitcast"
  %laid.1 = bf16[8,4]{0,1} copy(%joined)
  %v-start = (bf16[8,4]{1,0:S(1)}, bf16[8,4]{1,0}, u32[]{:S(2)}) copy-start(%v)
  %v-done = bf16[8,4]{1,0:S(1)} copy-done(%v-start)
  %double = bf16[8,4]{1,0} add(%u, %u)
  %laid.2 = bf16[8,4]{0,1} copy(%double)
  %laid.3 = bf16[8,4]{0,1} fusion(%c), kind=kLoop, calls=%transposes
  %first = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%laid.1, %laid.3)
  %while = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) while(%first), condition=%condition, body=%body
  ROOT %out = bf16[8,4]{1,0} get-tuple-element(%while), index=0
}
"""


ONCE = """HloModule jit_f

%body (state: (pred[], f32[8])) -> (pred[], f32[8]) {
  %state = (pred[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %false = pred[] constant(false)
  %placed = pred[]{:S(6)} copy(%false)
  ROOT %tuple = (pred[]{:S(6)}, f32[8]{0}) tuple(%placed, %x)
}

%condition (state: (pred[], f32[8])) -> pred[] {
  %state.1 = (pred[], f32[8]{0}) parameter(0)
  ROOT %going = pred[] get-tuple-element(%state.1), index=0
}

ENTRY %main (first: (pred[], f32[8])) -> (pred[], f32[8]) {
  %first = (pred[], f32[8]{0}) parameter(0)
  ROOT %while = (pred[], f32[8]{0}) while(%first), condition=%condition, body=%body
}
"""


def module(name: str) -> hlo.Module:
  return hlo.Module((RECORDED / f'{name}.txt').read_text())


def test_a_write_of_rows_one_by_one_is_found_in_a_round_and_counted_with_its_turns():
  rows = module('rows_and_kernel_v5e')
  (loop,) = rows.row_loops()
  assert loop.path.endswith('/scatter') and rows.trips(loop, unknown=99) == 4
  other = next(x for x in rows.loops(rows.body) if x is not loop)
  assert rows.trips(other, unknown=3) == 3  # until no row goes on, which no text tells


def test_a_loop_whose_body_ends_it_takes_one_turn_wherever_the_predicate_lies():
  for text, turns in ((ONCE, 1), (ONCE.replace('copy(%false)', 'not(%false)'), 9)):
    program = hlo.Module(text)
    assert program.trips(program.decode_loop, unknown=9) == turns


COUNTED = """HloModule jit_f

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%body (state: (s32[])) -> (s32[]) {
  ROOT %state = (s32[]) parameter(0)
}

%condition (state: (s32[])) -> pred[] {
  %state.1 = (s32[]) parameter(0)
  %seven = s32[] constant(7)
  %index = s32[] get-tuple-element(%state.1), index=0
  ROOT %going = pred[] fusion(%index, %seven), kind=kLoop, calls=%less
}

ENTRY %main (first: (s32[])) -> (s32[]) {
  %first = (s32[]) parameter(0)
  ROOT %while = (s32[]) while(%first), condition=%condition, body=%body
}
"""


def test_a_loop_takes_the_turns_of_its_bound_wherever_a_fusion_compares_it():
  inside = COUNTED.replace('%b = s32[] parameter(1)', '%b = s32[] constant(7)').replace('(%index, %seven)', '(%index)')
  for text in (COUNTED, inside):
    program = hlo.Module(text)
    assert program.trips(program.decode_loop, unknown=-1) == 7


def test_kernels_of_a_round_count_with_the_turns_of_its_loops():
  rows = module('rows_and_kernel_v5e')
  drafts = next(x for x in rows.loops(rows.body) if x not in rows.row_loops())
  inside = [x.op for x in rows.computations[drafts.called['body'][0]] if x.op not in hlo.CONTROL]
  assert 'fusion' in inside and not {'while', 'tuple', 'parameter'} & set(inside)
  assert rows.kernels(3) - rows.kernels(1) == 2 * len(inside)


def test_collectives_of_a_round_are_counted_with_their_bytes():
  assert module('all_reduce_v5e').collectives() == {'all-reduce': [1, 1, 8 * 512 * 2]}
  assert module('rows_and_kernel_v5e').collectives() == {}


def test_arguments_laid_out_anew_before_the_loop_are_told_from_those_fetched_or_computed_with():
  found = hlo.Module(ENTRY).relayouts(least=1)
  assert [(path, array.order) for path, array in found] == [("params['w']", '{0,1}'), ('caches[0]', '{0,1}')]
  assert hlo.Module(ENTRY).relayouts() == []  # too small to matter


def test_a_copy_goes_to_another_layout_or_back_from_a_faster_memory():
  program = hlo.Module(ENTRY)
  assert [x.name for x, _, _ in program.copies(program.body)] == ['laid', 'back-start']


@pytest.mark.parametrize(
  'shape, size',
  [
    ('bf16[8,4]{1,0:T(8,128)(2,1)S(1)}', 64),
    ('(f32[2], s4[3]{0}, pred[])', 8 + 2 + 1),
    ('f8e4m3fn[16]', 16),
    ('token[]', 0),
  ],
)
def test_bytes_of_a_shape(shape, size):
  assert hlo.shape_bytes(shape) == size


def test_a_program_compiled_here_is_read():
  def put(row, new, at):
    return jax.lax.dynamic_update_slice(row, new, (at,))

  def loop(params, caches, at):
    def step(carry):
      caches, at = carry
      new = jnp.tanh(caches[:, :8] @ params['w'])
      caches = jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(x), caches)
      return jax.vmap(put)(caches, new, at), at + 1

    return jax.lax.while_loop(lambda carry: carry[1].min() < 50, step, (caches, at))

  args = dict(w=jnp.ones((8, 8))), jnp.ones((4, 64)), jnp.arange(4)
  program = hlo.Module(jax.jit(loop).lower(*args).compile().as_text())
  assert hlo.shape_bytes(program.decode_loop.shape) >= 4 * 64 * 4
  inner = program.loops(program.body)
  assert 7 in [program.trips(x, unknown=-1) for x in inner]
  (weight,) = (x for x in program.computations[program.entry] if x.op == 'parameter' and 'params' in x.path)
  assert weight.path == "params['w']" and hlo.shape_bytes(weight.shape) == 256


def test_what_is_no_program_is_said():
  with pytest.raises(ValueError, match='ENTRY'):
    hlo.Module('module @jit_f {\n}')


def test_copies_of_whole_caches_in_a_round_are_those_as_large_as_one():
  assert program_report.cache_moves(hlo.Module(ENTRY)) == ['bf16[8, 4]'] * 2
  smaller = ENTRY.replace('%c = bf16[8,4]', '%c = bf16[8,2]')
  assert program_report.cache_moves(hlo.Module(smaller)) == []
  assert program_report.argument_bytes(hlo.Module(ENTRY)) == {'weights': 3 * 64, 'caches': 64, 'window': 0, 'rest': 0}


@pytest.mark.parametrize(
  'groups, size',
  [
    ('{{0,1,2},{3,4,5}}', 3),
    ('[2,4]<=[8]', 4),
    ('[2,4]<=[4,2]T(1,0)', 4),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
    ("mesh['axis_0'=8] {'axis_0':(1)2}", 2),
    ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
    ("mesh['axis_0'=2,'axis_1'=4], device_ids=([8]) {'axis_1','axis_0'}", 8),
    ('{}', 8),
  ],
)
def test_the_devices_of_a_group_are_counted(groups, size):
  line = f'  %x = f32[4]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, use_global_device_ids=true'
  text = 'HloModule m, num_partitions=8\n\nENTRY %main (a: f32[4]) -> f32[4] {\n  %a = f32[4]{0} parameter(0)\n'
  module = hlo.Module(f'{text}{line}\n}}\n')
  assert module.group_size(module.by_name('main')['x']) == size
