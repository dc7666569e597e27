"""A rule that gives no distribution, cannot be traced or sees other positions fails before it decodes anything."""

import functools
import importlib
import inspect
import re
import runpy
import sys
import types

from cases import METHODS
from flax import struct
import jax.numpy as jnp
from matching import having, says
import pytest

import speccascade
from speccascade import acceptance, check, methods, rules, Sampler
from speccascade.check import enumeration
from speccascade.check.sampler.cases import number
from speccascade.engine import validate
from speccascade.engine.lowering import Phase
from speccascade.models import toy
from speccascade.types import Told


def average(q, p, *, alpha):
  return jnp.where((q.confidence >= 1 - alpha)[..., None], q.probs, (q.probs + p.probs) / 2)


def average_of_sampled(q, p, *, alpha):
  return jnp.where(q.probs.max(-1, keepdims=True) >= 1 - alpha, q.probs, (q.probs + p.probs) / 2)


def raw_logits(q, p):
  return p.logits


def half(q, p):
  return 0.5 * p.probs


def negative(q, p):
  return 2 * p.probs - q.probs


def whole_numbers(q, p):
  return (p.logits > q.logits).astype(jnp.int32)


def branches(q, p, *, alpha):
  return p.probs if alpha > 0.5 else q.probs


def one_token(q, p):
  return p.argmax


def nothing(q, p):
  p.sampler(p.logits)


def misspelt(q, p):
  return p.softmax


def whole_batch(q, p, *, alpha):
  return jnp.where(q.probs.max() >= 1 - alpha, q.probs, p.probs)


def backwards(q, p, *, alpha):
  return rules.opt(q, p, alpha=-alpha)


def geometric(models):
  return models[0].sampler(sum(model.logits for model in models) / len(models))


MINE = '\n\n'.join(['import jax.numpy as jnp\n', *map(inspect.getsource, (average, half, branches))])


def answers(report):
  return {f.question: f.ok for f in report.findings}


# ---- what is asked before anything is compiled ----


@pytest.mark.parametrize(
  'rule, said',
  [
    (functools.partial(branches, alpha=0.3), r'branches .*test_check\.py:\d+ \(return p\.probs'),
    (one_token, having('one_token', '[2, 3]', '[2, 3, 11]')),
    (nothing, having('nothing', 'None')),
    (whole_numbers, having('whole_numbers', 'int32', 'float32')),
    (misspelt, r"misspelt .*test_check\.py:\d+ \(return .*AttributeError: 'Prediction'"),
  ],
)
def test_a_rule_that_cannot_run_is_refused_by_name_before_it_does(rule, said):
  for method in (methods.speculative(rule), methods.oracle(rule), methods.cos(rule)):
    with pytest.raises(ValueError, match=said):
      validate.check_targets(method, 11, Sampler(repetition_penalty=1.2))


def test_the_methods_of_the_package_pass():
  for method in (methods.sequence_cascade(), *(method for method, *_ in METHODS.values())):
    for sampler in (Sampler(0.0), Sampler(0.7, top_k=3, top_p=0.9, repetition_penalty=1.2)):
      validate.check_targets(method, 11, sampler)


@pytest.mark.parametrize('other', [rules.weighted, methods.speculative()])
def test_alphas_of_what_has_none_are_refused(other):
  with pytest.raises(ValueError, match=having('alphas=[0.7]', getattr(other, 'name', 'weighted'))):
    check(other, [0.7])


def test_a_token_cascade_asks_its_rule_without_the_verifier():
  @rules.rule(alpha=rules.Range(0, 1), drafter_alone=True)
  def reads_both(q, p, *, alpha):
    return p.confidence < alpha

  with pytest.raises(ValueError, match=having('reads_both', 'test_check.py')):
    validate.check_targets(methods.token_cascade(functools.partial(reads_both, alpha=0.3)), 11, Sampler())


def test_importing_the_command_leaves_the_function():
  importlib.import_module('speccascade.check.__main__')
  assert isinstance(speccascade.check, types.FunctionType)


# ---- what is enumerated ----


@pytest.mark.full
def test_a_rule_of_ones_own_is_a_law_monotone_and_emitted_exactly():
  report = check(average, (0.1, 0.5, 0.9))
  assert report.ok and answers(report) == dict.fromkeys(answers(report), True)
  assert len(report.findings) == 6 and 'all is well' in str(report)
  assert 'distance' in str(report) and 'rejected at alpha = 0.1' in str(report)


@pytest.mark.parametrize(
  'rule, said', [(raw_logits, 'has the entry'), (half, 'sums to 0.5'), (negative, 'has the entry -1')]
)
def test_what_is_no_law_is_found(rule, said):
  report = check(rule)
  assert not report.ok and answers(report)['is a distribution'] is False and said in str(report)


def test_a_rule_that_looks_at_other_positions_is_found():
  report = check(whole_batch)
  assert answers(report) == {'is traced': True, 'is a distribution': True, 'reads one position': False}
  assert 'reduce over the last axis only' in str(report)


@pytest.mark.full
def test_a_rule_that_reads_its_confidence_off_one_hot_vectors_is_said_never_to_defer():
  report = check(average_of_sampled, (0.1, 0.5, 0.9))
  assert report.ok and answers(report)['defers at T = 0'] is None
  assert 'at T = 0 it never defers' in str(report) and 'q.plain' in str(report)


@pytest.mark.full
def test_a_rule_that_is_not_what_it_is_defined_as_is_found():
  define = functools.partial(rules.rule, alpha=rules.Range(-1, 1))

  def surer(q, p, *, alpha):
    return q.confidence < p.confidence - alpha

  right = define(definition=lambda q, p, alpha: max(q.plain) < max(p.plain) - alpha)(surer)
  assert answers(check(right, (0.0, 0.2)))['is what it is defined as'] is True
  other = define(definition=lambda q, p, alpha: max(q.probs) < max(p.plain) - alpha)(surer)
  report = check(other, (0.0, 0.2))
  assert not report.ok and answers(report)['is what it is defined as'] is False and 'T = 0' in str(report)


@pytest.mark.full
def test_a_rule_that_defers_more_as_alpha_grows_is_said_to():
  report = check(backwards, (0.0, 0.5))
  assert report.ok and answers(report)['rejects less as alpha grows'] is None
  assert 'no: at alpha = 0.5 a draft is rejected more often' in str(report)


def test_a_rule_that_cannot_be_traced_is_one_line():
  report = check(branches)
  assert not report.ok and len(report.findings) == 1 and 'branches' in report.name


@pytest.mark.full
def test_a_combiner_and_a_method_are_checked_too():
  assert check(geometric).ok
  assert check(methods.bild()).findings[0].ok is None


def of_two_tokens(monkeypatch, **declared):
  """Check, at T = 1 and by the first two tokens alone, a method that accepts everything."""
  monkeypatch.setattr(enumeration, 'COUNT', 2)
  monkeypatch.setattr(enumeration, '_EMITTED', ('T = 1',))

  @acceptance.acceptor(told=Told.NOTHING, **declared)
  def keeps_all(trial):
    return acceptance.everything(trial)

  return check(methods.speculative(block=1, accept=keeps_all))


@pytest.mark.full
def test_a_method_that_emits_another_law_is_found_with_the_smallest_counter_example(monkeypatch):
  report = of_two_tokens(monkeypatch)
  assert answers(report)['is emitted at T = 1'] is False and 'something is wrong' in str(report)
  large = toy.model(1, 3, scale=1.2)
  every = toy.model(2, 3, scale=0.8, near=large), large
  q, p = (enumeration.lockstep_distribution(rules.bind(rules.own), [x], [1, 0], 1, Sampler()) for x in every)
  token = max(p, key=lambda x: abs(q[x] - p[x]))
  chances = f'{number(q[token])} here, {number(p[token])} by definition'
  assert f'after the prompt [1, 0] the tokens {[*token]} have the probability {chances}' in str(report)


def test_a_counter_example_is_the_fewest_tokens_that_differ():
  defined = {(a, b): 0.25 for a in range(2) for b in range(2)}
  here = defined | {(1, 0): 0.3, (1, 1): 0.2}
  said = enumeration._counter_example(here, defined)
  assert said == 'after the prompt [1, 0] the tokens [1, 0] have the probability .3 here, .25 by definition'


@pytest.mark.full
def test_a_method_that_declares_itself_lossy_is_no_error(monkeypatch):
  report = of_two_tokens(monkeypatch, exact=False)
  assert report.ok and answers(report)['is emitted at T = 1'] is None
  assert re.search(r'declared lossy: \.\d+ from its target', str(report)) and 'wrong' not in str(report)


def test_only_a_method_that_declares_itself_lossy_may_be_off():
  defined, here = {(0,): 0.5, (1,): 0.5}, {(0,): 0.517, (1,): 0.483}
  lossy, exact = (types.SimpleNamespace(keeps_distribution=x, name='mine') for x in (False, True))
  ok, said = enumeration._compared(here, defined, lossy)
  assert ok is None and 'declared lossy: .017 from its target' in said
  ok, said = enumeration._compared(here, defined, exact)
  assert ok is False and 'the tokens [0] have the probability .517 here, .5 by definition' in said
  assert enumeration._compared({(0,): 0.5}, defined, lossy)[0] is False  # which is no distribution


# ---- the command ----


def run(folder, monkeypatch, name, *arguments):
  """Run the command in a folder; return its exit code."""
  (folder / 'mine.py').write_text(MINE)
  (folder / 'pasted.py').write_text('method = methods.speculative(block=5)\n')
  monkeypatch.chdir(folder)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.setattr(sys, 'argv', ['check', name, *arguments])
  for module in ('mine', 'pasted'):
    sys.modules.pop(module, None)
  with pytest.raises(SystemExit) as ended:
    runpy.run_module('speccascade.check', run_name='__main__')
  return ended.value.code


@pytest.mark.parametrize(
  'arguments, code, parts',
  [
    (['mine:average', '--alpha', '0.1', '0.5', '0.9'], 0, ['average: all is well']),
    (['mine:half'], 1, ['half: something is wrong', 'sums to 0.5']),
    (['mine:branches'], 1, ['at mine.py:13 (return p.probs if alpha']),
  ],
)
def test_the_command_finds_rules_in_its_folder_and_says_what_they_are(
  arguments, code, parts, tmp_path, monkeypatch, capsys
):
  assert run(tmp_path, monkeypatch, *arguments) == code
  said = capsys.readouterr()
  assert says(said.out, *parts) and (code or re.fullmatch(r'check: 5/5 questions .*\n', said.err))


@pytest.mark.parametrize(
  'name, parts',
  [
    ('mine:rule', ['mine.py', 'rule']),
    ('pasted:method', ['pasted', 'NameError', 'methods']),
    ('speccascade.methods:speculative', ['speculative', 'neither a rule', 'speculative(…)']),
  ],
)
def test_an_error_of_the_command_is_one_line(name, parts, tmp_path, monkeypatch, capsys):
  assert run(tmp_path, monkeypatch, name) == 1
  error = capsys.readouterr().err
  assert says(error, *parts) and error.count('\n') == 1


@struct.dataclass
class GoesOn(Phase):
  """Let texts go on that have ended."""

  def __call__(self, context, state):
    return state.replace(done=state.length >= state.limit)


def test_texts_end_on_the_toys_of_a_check():
  plain = methods.speculative(block=1)
  found = check(plain.replace(phases=(*plain.phases, GoesOn())))
  assert not found.ok and 'by definition' in str(found)
