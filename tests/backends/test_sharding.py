"""Which models are sharded over a mesh, the layout of a program's arrays, and what is refused."""

import dataclasses
import types

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from matching import having
import pytest

from speccascade import mesh, place
from speccascade.backends import sharding
from speccascade.models import shapes, toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span

FOUR = AbstractMesh((1, 4), ('data', 'model'))
EIGHT = AbstractMesh((2, 4), ('data', 'model'))
GROUPED = Decoder(DecoderConfig(97, 32, 8, 2, 16, 48, (Span(),), tied=True))


def flat(tree) -> list:
  return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


SIZES = [('small', 'replicated'), ('base', 'replicated'), ('large', 'sharded'), ('xxl', 'sharded')]


@pytest.mark.full
@pytest.mark.parametrize('size, rules', SIZES)
def test_a_model_is_sharded_where_that_saves_more_than_its_collectives_cost(size, rules):
  assert sharding.default_rules(shapes.t5(size), FOUR) == sharding.NAMED_RULES[rules]
  assert sharding.default_rules(shapes.t5(size), AbstractMesh((4,), ('data',))) == sharding.REPLICATED


def test_what_does_not_divide_is_replicated_with_one_warning_a_model():
  sharding._warn.cache_clear()
  with pytest.warns(UserWarning) as warned:
    sharded = [sharding.specs(GROUPED, FOUR, 'sharded') for _ in range(2)][0]
    sharding.specs(dataclasses.replace(GROUPED, scan=True), FOUR, 'sharded')
  names = ("'joined_kv_heads' of 2", "'vocab' of 97")
  count = sum(x.size for x in jax.tree.leaves(GROUPED.param_shapes()))
  where, remedy = f'Decoder of {count:,} parameters', 'does not divide over 4 devices and is replicated.'
  expected = [f'{where}: {x} {remedy}' for x in names]
  assert sorted(str(w.message) for w in warned) == sorted(2 * expected)
  assert sharded['layers_0']['attention']['query']['kernel'] == PartitionSpec(None, 'model')
  assert sharded['layers_0']['attention']['key']['kernel'] == PartitionSpec(None, None)
  assert sharded['token_embedder']['embedding'] == PartitionSpec(None, None)


def test_heads_that_do_not_divide_are_replicated_and_the_rest_is_sharded():
  kernels = lambda layer: [layer[part][name]['kernel'] for part, name in (('self_attention', 'query'), ('mlp', 'wi_0'))]
  sharded = sharding.specs(shapes.t5('xl'), FOUR, 'sharded')['decoder']['layers_0']
  assert kernels(sharded) == [PartitionSpec(None, 'model')] * 2
  sharding._warn.cache_clear()
  with pytest.warns(UserWarning, match=having('T5', 'of 6', '4 devices')):
    uneven = sharding.specs(shapes.t5('small'), FOUR, 'sharded')['decoder']['layers_0']
  assert kernels(uneven) == [PartitionSpec(None, None), PartitionSpec(None, 'model')]


def test_no_axis_of_a_mesh_shards_a_parameter_twice_and_one_may_be_sharded_over_two():
  large = shapes.t5('xl')
  both = sharding.specs(large, EIGHT, (('mlp', 'model'), ('embed', 'model')))['decoder']['layers_0']['mlp']
  assert both['wo']['kernel'] == PartitionSpec('model', None)
  both = sharding.specs(large, EIGHT, (('vocab', ('data', 'model')),))
  assert both['token_embedder']['embedding'] == PartitionSpec(('data', 'model'), None)


def test_rules_that_are_none_are_named():
  for rules, message in (
    ((('heads', 'z'),), "the mesh has no axis 'z'"),
    ('halved', "neither 'sharded' nor 'replicated'"),
  ):
    with pytest.raises(ValueError, match=having(message)):
      sharding.specs(GROUPED, FOUR, rules)


def test_caches_are_sharded_by_rows_and_by_the_heads_that_the_weights_are_sharded_by():
  sharded = sharding.Sharded(EIGHT, ((('joined_kv_heads', 'model'), ('mlp', 'model')), ()))
  entry = lambda *shape: {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in ('key', 'value')}
  text = {'slots': jax.ShapeDtypeStruct((6, 9), jnp.int32)}
  first, second = sharded.caches((entry(6, 3, 8, 16, 4), {'target': (entry(6, 8, 16, 4),), **text}))
  assert first['key'] == PartitionSpec('data', None, 'model')
  assert flat(second) == [PartitionSpec('data')] * 3
  assert sharded.bytes(entry(6, 3, 8, 16, 4), first) == 2 * 4 * 3 * 3 * 2 * 16 * 4


def test_a_model_axis_is_of_prime_factors_and_what_does_not_divide_by_all_is_sharded_over_the_first():
  made = sharding.mesh({'data': 2, 'model': 12}, devices=[*range(24)])
  assert dict(made.shape) == {'data': 2, 'model': 2, 'model_2': 2, 'model_3': 3}
  assert sharding.shape_of(made) == {'data': 2, 'model': 12} and sharding.shape_of(FOUR) == {'data': 1, 'model': 4}
  assert dict(sharding.mesh({'data': 2}, devices=[*range(2)]).shape) == {'data': 2, 'model': 1}
  eight = AbstractMesh((1, 2, 2, 2), ('data', 'model', 'model_2', 'model_3'))
  network = dataclasses.replace(GROUPED, config=dataclasses.replace(GROUPED.config, kv_heads=4, vocab_size=96))
  specs = sharding.specs(network, eight, 'sharded')  # 8 heads on 4
  attention = specs['layers_0']['attention']
  assert attention['query']['kernel'] == PartitionSpec(None, ('model', 'model_2', 'model_3'))
  assert attention['key']['kernel'] == PartitionSpec(None, ('model', 'model_2'))
  entry = {'key': jax.ShapeDtypeStruct((6, 4, 16, 4), jnp.float32)}
  assert sharding.planned([network], eight, [specs]).caches((entry,))[0]['key'] == PartitionSpec(
    None, ('model', 'model_2')
  )


def test_what_is_no_mesh_and_no_rule_is_refused():
  for shape in ({'data': 2, 'model': 4}, {'rows': 1}, {'data': 0}):
    with pytest.raises(ValueError, match=having('data', 'model', '1 device')):
      mesh(shape)
  with pytest.raises(ValueError, match="rules='halved'"):
    sharding.specs(GROUPED, FOUR, 'halved')
  with pytest.raises(ValueError, match=having("'rows'", "'data', 'model'")):
    sharding.specs(GROUPED, FOUR, (('mlp', 'rows'),))


def test_meshes_share_no_device_and_the_last_model_has_the_other_of_two():
  devices = [f'chip {i}' for i in range(8)]
  drafters, verifier = sharding.meshes({'data': 2}, {'data': 1, 'model': 4}, devices=devices)
  assert drafters.devices.ravel().tolist() == devices[:2] and verifier.devices.ravel().tolist() == devices[2:6]
  with pytest.raises(ValueError, match="mesh {'model': 4}.* at most 3 devices"):
    sharding.meshes({'data': 5}, {'model': 4}, devices=devices)
  with pytest.raises(ValueError, match='at most 1 device in all'):
    sharding.mesh({'data': 2}, devices[:1])
  assert sharding.of_each((drafters, verifier), 3) == [drafters, drafters, verifier]
  assert sharding.of_each(verifier, 2) == [verifier] * 2 and sharding.of_each(None, 2) == [None, None]
  assert sharding.of_each({'data': 1}, 2) == sharding.of_each([{'data': 1}], 2)
  with pytest.raises(ValueError, match='3 meshes: give one for all models, or two'):
    sharding.of_each([{'data': 1}] * 3, 3)


def test_a_mesh_leaves_no_process_out(monkeypatch):
  found = [types.SimpleNamespace(process_index=i // 2) for i in range(4)]
  monkeypatch.setattr(jax, 'devices', lambda: found)
  with pytest.raises(ValueError, match=having('process 1', '4 devices')):
    mesh({'model': 2})


def test_one_device_has_the_layout_of_one():
  model = place(toy.model(0), mesh({'data': 1}))
  assert sharding.layout_for([model]) == sharding.Layout() and sharding.row_shards([model]) == 1
