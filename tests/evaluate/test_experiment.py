"""An experiment is checked completely before anything is loaded."""

import dataclasses
import functools
import importlib

import jax
from matching import having, says
import numpy as np
import pytest
import toys

from speccascade import acceptance, methods, rules, Sampler, sampling
from speccascade.checkpoints import hf
from speccascade.data import metrics
from speccascade.evaluate import Checkpoint, Curve, Experiment
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model

TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
OPT = Curve('opt', methods.speculative, rules.opt, 'alpha', (0.0, 0.5), {'block': 2})


def make(**changes) -> Experiment:
  fields = dict(task=toys.task, models=toys.models, curves=[TARGET, OPT]) | changes
  return Experiment(**fields)


def error(**changes) -> str:
  with pytest.raises(ValueError) as caught:
    make(**changes)
  return str(caught.value)


def test_models_come_from_anything_that_gives_them_and_have_names_of_their_own():
  small, large = toys.models()
  twin = small.replace(name=large.name)
  for models in (toys.models, [small, large], [lambda: small, large]):
    assert [m.name for m in make(models=models).load()] == ['toy2', 'toy1']
  assert [m.name for m in make(models=[twin, large]).load()] == ['toy1', 'toy1 2']
  with pytest.raises(ValueError, match=having('target only', '2 models', '1')):
    make(models=lambda: [small]).load()
  with pytest.raises(ValueError, match=having('int', 'Model')):
    make(models=[lambda: 3, large]).load()


def with_a_rule_of_one_model():
  method = methods.speculative(functools.partial(rules.opt, alpha=0.1), block=2)
  *before, verify = method.phases
  return dataclasses.replace(method, phases=(*before, dataclasses.replace(verify, models=(1,))))


def test_a_target_that_has_none_is_found_before_anything_is_decoded():
  with pytest.raises(ValueError, match=having('mine', 'opt')) as caught:
    make(curves=[TARGET, OPT, Curve('mine', with_a_rule_of_one_model)]).load()
  assert '\n' not in str(caught.value)


def test_prompts_that_cannot_be_decoded_are_refused_before_decoding():
  examples = [dataclasses.replace(e, prompt=[*e.prompt, 1, 2, 3][: 2 + e.index * 3]) for e in toys.task(3).examples]
  task, models = dataclasses.replace(toys.task(), examples=examples), toys.models()
  assert make().encode(models)[1] == [1, 6]
  with pytest.raises(ValueError, match=having('example 1', '5 tokens', 'max_prompt_tokens=4')):
    make(task=task).encode(models)
  twice = dataclasses.replace(task, examples=[toys.task().examples[0]] * 2)
  with pytest.raises(ValueError, match='index'):
    make(task=twice).encode(models)


def test_an_experiment_takes_all_numbers_of_a_sampler():
  numbers = dict(top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
  assert make(**numbers).sampler(0.7) == Sampler(0.7, **numbers) and {'temperature', *numbers} == set(sampling.NEUTRAL)
  assert 'min_p=1.0' in error(min_p=1.0)


def test_mistakes_are_named():
  assert says(error(reference='ensemble'), "reference='ensemble'", 'target only, opt')
  assert says(error(curves=[TARGET, OPT, OPT]), 'two', 'opt')
  assert says(error(curves=[TARGET, Curve]), 'curves[1]', '@scope/Curve()')
  assert make(curves=TARGET).curves == make(curves=[[TARGET]]).curves == (TARGET,)
  assert says(error(task=3), 'task', '3')
  assert 'no examples' in error(task=dataclasses.replace(toys.task(), examples=[]))
  unanswered = dataclasses.replace(toys.task(), metrics={'final_number': metrics.final_number})
  unanswered.examples[4:5] = [dataclasses.replace(unanswered.examples[4], target='none')]
  assert says(error(task=unanswered), 'example 4', 'final_number')
  assert 'no metrics' in error(task=dataclasses.replace(toys.task(), metrics={}))
  assert 'temperature=-1' in error(temperatures=[-1])
  assert 'no temperatures' in error(temperatures=[])
  assert says(error(temperatures=[1.0, 1.0]), 'temperatures', 'differ')
  assert 'quality_batch=0' in error(quality_batch=0)
  assert 'latency_examples=1.5' in error(latency_examples=1.5)
  assert says(error(latency_examples=3, latency_batches=[4]), 'batch of 4', 'latency_examples', '3')
  assert says(error(latency_examples=5, latency_batches=[2], latency_queue=3), 'latency_queue of 3', '6', '5')
  assert 'latency_queue=2' in error(latency_queue=2)
  assert 'no latency_batches' in error(latency_examples=5, latency_batches=[])
  unsaid = Curve('alone', methods.autoregressive)
  assert "alone decodes with one of 2 models; say which, as in settings = {'model': 1}" in error(
    curves=[TARGET, unsaid], models=[toys.models, toys.models]
  )
  assert 'opt alpha=0.0 needs 2 models, but there are 1' in error(
    models=toys.models()[:1], curves=[Curve('target only', methods.autoregressive), OPT]
  )
  bad = Curve('chow', methods.speculative, rules.chow, 'alpha', (2.0,))
  assert says(error(curves=[TARGET, bad]), 'chow, alpha=2.0', '0 <= alpha <= 1')


def test_each_value_may_have_a_reference_of_its_own():
  other = dataclasses.replace(OPT, name='other', values=(0.5,))
  experiment = make(curves=[TARGET, OPT, other], reference='opt')
  assert [experiment.reference_of(p) and experiment.reference_of(p).key for p in experiment.points] == [
    None,
    ('opt', 0.0),
    ('opt', 0.5),
    ('opt', 0.5),
  ]
  assert [make().reference_of(p).key for p in make().points] == [('target only', None)] * 3
  missing = dataclasses.replace(other, values=(0.0, 0.7))
  assert says(error(curves=[OPT, missing], reference='opt'), 'other', 'alpha=0.7', 'opt')
  blocks = Curve('by block', methods.speculative, rules.speculative, 'block', (1, 2))
  assert says(error(curves=[OPT, blocks], reference='opt'), '2 values of alpha', 'by block', 'varies block')


def test_the_description_changes_with_all_that_decides_the_results():
  base = make().describe()
  assert base == make().describe() and 'data: 10 examples' in base
  others = [
    make(seed=1),
    make(quality_batch=4),
    make(task=toys.task(9)),
    make(task=toys.task(10, 7)),
    make(curves=[TARGET, dataclasses.replace(OPT, settings={'block': 3})]),
    make(temperatures=[0.0]),
    make(top_k=5),
  ]
  changed = dataclasses.replace(toys.task().examples[3], target='x')
  examples = [*toys.task().examples[:3], changed, *toys.task().examples[4:]]
  others.append(make(task=dataclasses.replace(toys.task(), examples=examples)))
  assert len({base, *(o.describe() for o in others)}) == len(others) + 1


def test_functions_in_a_description_have_names_and_no_addresses():
  partial = functools.partial
  choices = {1: methods.speculative(block=3), 8: methods.autoregressive(1)}
  curves = [
    TARGET,
    Curve('own', methods.by_batch, settings={'choices': choices}),
    Curve('texts', methods.sequence_cascade, settings={'score': partial(np.quantile, q=0.2)}),
    Curve('chain', methods.naive_cos, partial(rules.opt, alpha=0.1)),
  ]
  text = make(curves=curves, models=partial(toys.task, new=3)).describe()
  assert ' at 0x' not in text and 'models: task(new=3)' in text
  assert 'sequence_cascade(score=quantile(q=0.2))' in text and 'naive_cos() of opt(alpha=0.1)' in text
  others = [{**choices, 1: methods.speculative(block=2)}, {**choices, 1: methods.speculative(accept=acceptance.block)}]
  others += [{**choices, 1: methods.speculative(partial(rules.opt, alpha=a), block=3)} for a in (0.1, 0.2)]
  assert len({str(Curve('own', methods.by_batch, settings={'choices': c})) for c in [choices, *others]}) == 5


def test_the_description_changes_with_the_source_of_a_rule_of_ones_own(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)

  def describe(body):
    name = f'own_rules_{len(list(tmp_path.iterdir()))}'
    (tmp_path / f'{name}.py').write_text(f'def mine(q, p):\n  return {body}\n')
    mine = importlib.import_module(name).mine
    return make(curves=[TARGET, Curve('mine', methods.speculative, mine)]).describe()

  first = describe('p.probs')
  assert 'source of mine: ' in first and 'source of' not in make().describe()
  assert describe('p.probs') == first != describe('q.probs')


@pytest.mark.full
def test_the_description_changes_with_the_weights(tmp_path):
  def describe(seed):
    network = T5(T5Config(12, 16, 2, 8, 32, 1, 1))
    hf.write(tmp_path / 'small', Model(network.init(jax.random.key(seed)), network), overwrite=True)
    path = str(tmp_path / 'small')
    return make(models=[Checkpoint(path), Checkpoint(path)]).describe()

  first = describe(0)
  assert f'weights of {tmp_path}/small: ' in first and describe(0) == first != describe(1)
