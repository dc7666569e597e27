"""A curve builds the method it says, takes what a config binds on its functions, and refuses what it would ignore."""

import dataclasses
import functools
import inspect

import gin
from matching import having, says
import numpy as np
import pytest

from speccascade import acceptance, checkpoints, methods, rules, stopping
from speccascade.evaluate import Checkpoint, config, Curve


def curve_of(text: str) -> Curve:
  """Return Curve() of a config."""
  config.register()
  with gin.unlock_config():
    gin.parse_config(text)
  return gin.get_configurable('Curve')()


def error(*args, **kwargs) -> str:
  with pytest.raises(ValueError) as caught:
    Curve(*args, **kwargs)
  return str(caught.value)


def test_a_curve_has_a_point_for_each_value():
  curve = Curve('opt', methods.speculative, rules.opt, 'alpha', (0.0, 0.1), {'block': 3})
  assert [p.key for p in curve.points()] == [('opt', 0.0), ('opt', 0.1)]
  assert [p.label for p in curve.points()] == ['opt alpha=0.0', 'opt alpha=0.1']
  expected = methods.speculative(functools.partial(rules.opt, alpha=0.1), 3)
  built = curve.points()[1].build()
  assert str(built) == str(expected) and built.phases[2].combiner.keywords == {'alpha': np.float32(0.1)}


def test_the_parameter_is_the_rules_or_else_the_methods():
  by_block = Curve('sd', methods.speculative, rules.speculative, 'block', (2, 4))
  assert [p.build().window for p in by_block.points()] == [2, 4]
  by_weights = Curve('cos', methods.cos, rules.weighted, 'weights', [[0.5, 0.5], (0.3, 0.7)], {'blocks': (2, 1)})
  assert [p.key[1] for p in by_weights.points()] == [[0.5, 0.5], [0.3, 0.7]]
  assert by_weights.build((0.3, 0.7)).phases[0].branches[0][1].combiner.keywords['weights'] == (
    np.float32(0.3),
    np.float32(0.7),
  )
  alone = Curve('draft only', methods.autoregressive)
  assert [p.key for p in alone.points()] == [('draft only', None)] and alone.build().slots == (0,)


def test_values_are_what_results_can_hold():
  curve = Curve('opt', methods.speculative, rules.opt, 'alpha', list(np.linspace(0, 0.5, 2)))
  assert curve.values == (0.0, 0.5) and all(type(v) is float for v in curve.values)
  pairs = [tuple(np.array([w, 1 - w])) for w in (0.25, 0.5)]
  curve = Curve('we', methods.naive_cos, rules.weighted, 'weights', pairs)
  assert [str(p.key[1]) for p in curve.points()] == ['[0.25, 0.75]', '[0.5, 0.5]']
  assert says(str(curve), '[(0.25, 0.75), (0.5, 0.5)]')
  for value in (stopping.Heuristic(), acceptance.block):
    name = 'accept' if callable(value) else 'policy'
    assert says(error('mine', methods.speculative, None, name, (value,)), 'mine', 'values', 'results cannot hold')


def test_settings_of_the_rule_are_bound_to_it():
  curve = Curve('we', methods.ensemble, rules.weighted, rule_settings={'weights': (0.5, 0.5)})
  partial = Curve('we', methods.ensemble, functools.partial(rules.weighted, weights=(0.5, 0.5)))
  for built in (curve.build(), partial.build()):
    assert built.phases[-1].combiner.keywords['weights'] == (np.float32(0.5), np.float32(0.5))


@pytest.mark.parametrize(
  ('score', 'expected'),
  [('mean', -2.0), ('sum', -6.0), (0.5, -2.0), (0.0, -3.0), (np.max, -1.0)],
)
def test_a_sequence_cascade_names_its_score(score, expected):
  curve = Curve('seq', methods.sequence_cascade, None, 'threshold', (-1.0,), {'score': score})
  built = curve.build(-1.0)
  assert isinstance(built, methods.SequenceCascade) and built.threshold == -1.0
  assert built.score(np.array([-1.0, -2.0, -3.0])) == expected


def test_what_would_be_ignored_is_refused():
  spec, opt = methods.speculative, rules.opt
  assert says(error('a', spec, opt, rule_settings={'alhpa': 1}), 'rule_settings', 'alhpa', 'opt', 'alpha')
  assert says(error('a', spec, opt, settings={'blok': 1}), 'settings', 'blok', 'speculative', 'block')
  assert "rule_settings={'alpha': 1}" in error('a', methods.bild, rule_settings={'alpha': 1})
  assert 'values=(0.1,)' in error('a', spec, opt, values=(0.1,))
  assert 'beta' in error('a', spec, opt, 'beta', (0.1,))
  assert says(error('a', spec, opt, 'alpha', (0.1,), rule_settings={'alpha': 0.2}), 'alpha', 'setting')
  assert 'different' in error('a', spec, opt, 'alpha', (0.1, 0.1))
  assert 'None' in error('a', spec, opt, 'alpha')
  assert says(error('a', spec, opt, 'alpha', ()), 'no', 'values')
  assert '[0.1]' in error('a', spec, opt, 'alpha', 0.1)
  assert says(error('a', spec, 'otp'), "'otp'", 'token_v3', 'MODULE:NAME')
  assert says(error('a', 3, opt), 'method=3', '@methods.NAME')
  assert says(error('a', spec, opt, settings=[1]), '[1]', 'dict')


def test_a_config_hands_over_the_function_itself():
  curve = curve_of("""
    Curve.name = 'sd'
    Curve.method = @methods.speculative
    Curve.rule = @rules.speculative
  """)
  assert curve.rule is rules.speculative and curve.method is methods.speculative
  assert curve.build().window == 5  # with the bonus token of plain speculative decoding, not the γ + 1 of a cascade


def test_bindings_on_rules_and_methods_work():
  curve = curve_of("""
    Curve.name = 'cos'
    Curve.method = @methods.cos
    Curve.rule = @rules.weighted
    rules.weighted.weights = (0.25, 0.75)
    methods.cos.blocks = (3, 1)
  """)
  assert curve.rule_settings == {'weights': (0.25, 0.75)} and curve.settings == {'blocks': (3, 1)}
  assert str(curve) == 'cos: cos(blocks=(3, 1)) of weighted(weights=(0.25, 0.75))'
  assert dataclasses.replace(curve, name='mine').settings == curve.settings  # which is bound and given, and the same


def test_scoped_bindings_on_rules_work(monkeypatch):
  monkeypatch.setattr(inspect, 'getclosurevars', None)  # a scope is that of a reference of the config, in gin's words
  curve = curve_of("""
    Curve.name = 'cos'
    Curve.method = @methods.ensemble
    Curve.rule = @thirds/rules.weighted
    rules.weighted.weights = (0.5, 0.5)
    thirds/rules.weighted.weights = (0.3, 0.7)
  """)
  assert curve.rule is rules.weighted and curve.rule_settings == {'weights': (0.3, 0.7)}


def test_a_value_given_twice_is_refused():
  with pytest.raises(ValueError, match=having('block', 'settings')):
    curve_of("""
      Curve.name = 'sd'
      Curve.method = @methods.speculative
      Curve.settings = {'block': 3}
      methods.speculative.block = 4
    """)


def test_functions_inside_settings_come_out_of_their_wrappers():
  curve = curve_of("""
    Curve.name = 'block'
    Curve.method = @methods.speculative
    Curve.settings = {'accept': @acceptance.block, 'policy': @stopping.Heuristic()}
    stopping.Heuristic.first = 3
  """)
  assert curve.settings['accept'] is acceptance.block
  built = curve.build()
  assert built.by_round and built.policy == stopping.Heuristic(3)


def test_dynamic_registration_finds_the_functions_too():
  curve = curve_of("""
    from __gin__ import dynamic_registration
    from speccascade import evaluate
    from speccascade import methods
    from speccascade import rules
    evaluate.Curve.name = 'we'
    evaluate.Curve.method = @methods.ensemble
    evaluate.Curve.rule = @rules.weighted
    rules.weighted.weights = (0.5, 0.5)
  """)
  assert curve.rule is rules.weighted and curve.rule_settings == {'weights': (0.5, 0.5)}


def test_making_a_checkpoint_reads_nothing_and_loading_says_what_is_wrong(tmp_path):
  missing = Checkpoint(str(tmp_path / 'nowhere'), name='large')
  with pytest.raises(FileNotFoundError, match='nowhere'):
    missing.load()
  with pytest.raises(ValueError, match='path=None'):
    Checkpoint(None)


def test_any_failure_to_load_names_the_checkpoint(monkeypatch):
  def fail(path, **_):
    raise KeyError('decoder.final_norm\nand more')

  monkeypatch.setattr(checkpoints, 'load', fail)
  with pytest.raises(ValueError, match=having('weights/large', "'decoder.final_norm")):
    Checkpoint('weights/large').load()
