"""A config's mistakes are found before anything is made, in one line that says what was probably meant."""

import pathlib
import re

import gin
from matching import having, says
import pytest
from runs import GOOD
import toys

from speccascade import methods, rules
from speccascade.evaluate import config
from speccascade.host.errors import RunError

ROOT = pathlib.Path(__file__).parents[2]
RUNS = sorted((ROOT / 'gin_configs' / 'runs').glob('*.gin'))


def parse(text: str, tmp_path, **kwargs) -> str:
  path = tmp_path / 'test.gin'
  path.write_text(text)
  return config.parse([str(path)], **kwargs)


def build(text: str, tmp_path, **kwargs) -> list:
  parse(text, tmp_path, **kwargs)
  return config.build()


def error(text: str, tmp_path, **kwargs) -> str:
  with pytest.raises(RunError) as caught:
    parse(text, tmp_path, **kwargs)
  assert '\n' not in str(caught.value)
  return str(caught.value)


def built_error(text: str, tmp_path, **kwargs) -> str:
  parse(text, tmp_path, **kwargs)
  with pytest.raises(RunError) as caught:
    config.build()
  assert '\n' not in str(caught.value)
  return str(caught.value)


def test_a_config_makes_experiments_and_repeats_itself(tmp_path):
  text = parse(GOOD, tmp_path, bindings=['Experiment.seed = 3'])
  (experiment,) = config.build()
  assert [p.key for p in experiment.points] == [('target only', None), ('opt', 0.0), ('opt', 0.5)]
  assert experiment.seed == 3 and experiment.curves[1].rule is rules.opt
  assert parse(text, tmp_path) == text
  assert config.build()[0].describe() == experiment.describe()


def test_a_value_under_a_name_that_nothing_uses_is_refused(tmp_path):
  used = GOOD.replace("{'block': 2}", "{'block': %BLOCK}\nBLOCK = 2")
  assert says(built_error(used, tmp_path, bindings=['BLOK = 3']), '%BLOK', 'BLOCK?')
  build(GOOD + 'MODELS = [@toys.models]\n', tmp_path)  # a file may offer what another one takes
  build(used, tmp_path, bindings=["opt/Curve.settings = {'block': 4}"])


def test_what_a_binding_replaces_leaves_no_scope_without_use(tmp_path):
  scoped = "task/data.jsonl.path = 'nowhere'\nExperiment.task = @task/data.jsonl()\n"
  seeded = 'N = 3\nExperiment.seed = %N\n'
  bindings = ["Experiment.name = 'mine'", 'Experiment.task = @toys.task()', 'Experiment.seed = 4']
  text = parse(GOOD + scoped + seeded, tmp_path, bindings=bindings)
  assert config.build()[0].name == 'mine'
  assert parse(text, tmp_path) == text


def test_a_text_of_the_command_line_needs_no_quotes(tmp_path):
  for value in ('/data/x', 'large', '~/x', '../shared', 'org/large-2.5'):
    assert build(GOOD, tmp_path, bindings=[f'Experiment.name = {value}'])[0].name == value


def test_a_mesh_is_given_to_every_experiment(tmp_path):
  parse(GOOD, tmp_path)
  (without,) = config.build()
  parse(GOOD + "mesh.shape = {'data': 1, 'model': 1}\n", tmp_path)
  (one,) = config.build()
  assert without.mesh is None and dict(one.mesh.shape) == {'data': 1, 'model': 1}
  assert "mesh: {'data': 1, 'model': 1}" in one.describe() and 'mesh' not in without.describe()
  parse(GOOD + 'mesh.shape = {}\n', tmp_path)
  assert config.build()[0].mesh == one.mesh
  with pytest.raises(RunError, match=having('data', 'model', '1 device')):
    parse(GOOD + "mesh.shape = {'data': 2}\n", tmp_path)
    config.build()
  (elsewhere,) = config.build(placed=False)  # as what reads a run does
  assert "mesh: {'data': 2, 'model': 1}" in elsewhere.describe()
  parse(GOOD + "mesh.shape = [{'data': 2}, {'model': 4}]\n", tmp_path)
  (two,) = config.build(placed=False)
  assert "mesh: [{'data': 2, 'model': 1}, {'data': 1, 'model': 4}]" in two.describe()
  with pytest.raises(ValueError, match='at most 1 device '):
    elsewhere.load()


def test_a_module_may_be_next_to_the_gin_file(tmp_path):
  (tmp_path / 'rules_beside.py').write_text('import gin\n@gin.register\ndef named(): return "beside"\n')
  parse('import rules_beside\n' + GOOD + 'Experiment.name = @rules_beside.named()\n', tmp_path)
  assert config.build()[0].name == 'beside'


def test_the_source_of_modules_that_a_config_imports_is_a_part_of_it(tmp_path):
  own = 'import gin, numpy\nfrom helper_here import x\n@gin.register\ndef name(): return "a"\n'
  (tmp_path / 'rules_here.py').write_text(own)
  (tmp_path / 'helper_here.py').write_text('x = 1\n')
  whole = lambda: parse('import rules_here\n' + GOOD, tmp_path)
  first = whole()
  assert re.findall(r'# source of (\w+): [0-9a-f]{16}', first) == ['helper_here', 'rules_here', 'toys']
  assert parse(first, tmp_path) == first == whole()
  (tmp_path / 'helper_here.py').write_text('x = 2\n')
  second = whole()
  (tmp_path / 'rules_here.py').write_text('import helper_here\n')
  assert len({first, second, whole()}) == 3


@pytest.mark.parametrize('binding', ['Experiment.temperatures', 'speccascade.Experiment.temperatures'])
def test_a_binding_that_every_scope_overrides_is_refused_and_names_what_to_bind(tmp_path, binding):
  scoped = 'a/Experiment.temperatures = [0.0]\nb/Experiment.temperatures = [1.0]\n'
  text = GOOD.replace('[@Experiment()]', '[@a/Experiment(), @b/Experiment()]') + scoped
  message = built_error(text, tmp_path, bindings=[f'{binding} = [0.3]'])
  assert says(message, f'--gin.{binding}', f'a/{binding}', f'b/{binding}')
  for taken in ('Experiment.seed = 1', f'a/{binding} = [0.3]', 'opt/Curve.values = [0.2]'):
    build(text, tmp_path, bindings=[taken])
  build(text.replace('b/Experiment.temp', '# '), tmp_path, bindings=[f'{binding} = [0.3]'])
  build(GOOD + 'Experiment.temperatures = [0.0]\n', tmp_path, bindings=[f'{binding} = [0.3]'])


def test_a_binding_in_a_scope_that_only_an_overridden_or_unused_value_names_is_refused(tmp_path):
  curve = "{0}/Curve.name = '{0}'\n{0}/Curve.method = @methods.autoregressive\n"
  lost = 'OFFERED = [@u/Curve()]\nExperiment.curves = [@t/Curve()]\n' + curve.format('t') + curve.format('u')
  text = GOOD.replace('@Experiment()', '@a/Experiment()').replace('Experiment.curves', 'a/Experiment.curves') + lost
  for scope in ('t', 'u'):
    binding = f"{scope}/Curve.name = 'x'"
    assert f'--gin.{scope}/Curve.name has no effect' in built_error(text, tmp_path, bindings=[binding])
  build(text, tmp_path, bindings=["opt/Curve.name = 'x'", "target/Curve.settings = {'model': 0}"])


def test_a_binding_of_what_is_called_later_has_an_effect(tmp_path):
  (tmp_path / 'later_here.py').write_text(
    'import gin\n@gin.register\ndef size(n=2): return n\n@gin.register\ndef models(seed=0): raise KeyError(size())\n'
  )
  text = 'import later_here\n' + GOOD.replace('@toys.models', '@later_here.models')
  bindings = ['SEED = 3', 'later_here.models.seed = %SEED', 'later_here.size.n = 3', 'embedded.models.dtype = None']
  build(text, tmp_path, bindings=bindings[:3])
  for binding in bindings[3:]:
    assert 'embedded.models.dtype has no effect' in built_error(text, tmp_path, bindings=[binding])


def test_the_files_of_the_package_can_be_named_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  parse("include 'papers/cos/table2.gin'\n" + GOOD, tmp_path)
  for name in ('gin_configs/runs/gsm8k_cos.gin', 'runs/gsm8k_cos.gin'):
    assert 'run.experiments' in config.parse([name])


def test_a_run_is_one_experiment_unless_it_says_otherwise_and_has_its_reference(tmp_path):
  lists = GOOD.replace('run.experiments = [@Experiment()]', '')
  lists = lists.replace('@toys.models', '[@a/Checkpoint(), @b/Checkpoint()]')
  curves = "Experiment.curves = [[@opt/Curve()]]\na/Checkpoint.path = 'a'\nb/Checkpoint.path = 'b'\n"
  (experiment,) = build(lists + curves, tmp_path)
  assert [curve.name for curve in experiment.curves] == ['target only', experiment.curves[1].name]
  assert experiment.references[0].build().slots == (1,)


def test_the_file_to_copy_runs_with_other_paths_alone(tmp_path, monkeypatch):
  (tmp_path / 'my_rules.py').write_text('def mine(q, p, *, alpha):\n  return q.confidence < 1 - alpha\n')
  (tmp_path / 'problems.jsonl').write_text('{"question": "A dog runs.", "answer": "#### 4"}\n' * 60)
  pretrained = ROOT / 'speccascade' / 'embedded' / 'pretrained'
  text = (ROOT / 'gin_configs' / 'forkme.gin').read_text()
  for name in ('small', 'large'):
    text = text.replace(f"'google/flan-t5-{name}'", repr(str(pretrained / name)))
  monkeypatch.chdir(tmp_path)
  (experiment,) = build(text, tmp_path)
  assert len(text.splitlines()) <= 14 and 'org/' not in text
  mine = experiment.curves[-1]
  assert mine.name == 'mine' and len(experiment.curves) > 10 and mine.build(0.3).target[1].keywords['alpha'] == 0.3
  assert [model.name for model in experiment.load()] == ['small', 'large']


def test_what_is_not_bound_is_asked_for(tmp_path):
  assert says(built_error(GOOD.replace('Experiment.models = @toys.models', ''), tmp_path), "'models'", 'Experiment')
  assert says(built_error(GOOD.replace('opt/Curve.method', '#'), tmp_path), "'method'", 'Curve')


def test_a_mistake_inside_names_the_scope(tmp_path):
  takes = (
    'settings has blok, but speculative takes rule, block, policy, accept, pair, drafter, leaves (config scope opt)'
  )
  assert takes in built_error(GOOD.replace("'block'", "'blok'"), tmp_path)


def test_includes_may_be_next_to_and_above_the_file_and_on_the_search_path(tmp_path):
  (tmp_path / 'methods').mkdir()
  (tmp_path / 'runs').mkdir()
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'methods' / 'good.gin').write_text(GOOD)
  (tmp_path / 'elsewhere' / 'seed.gin').write_text('Experiment.seed = 5')
  run = tmp_path / 'runs' / 'r.gin'
  run.write_text("include 'methods/good.gin'\ninclude 'seed.gin'\n")
  config.parse([str(run)], search_paths=[str(tmp_path / 'elsewhere')])
  assert config.build()[0].seed == 5
  with pytest.raises(RunError, match='no file seed.gin .In file .*r.gin", line 2.; give its path, or the folder with'):
    config.parse([str(run)])  # the folder is forgotten


def test_an_include_takes_effect_at_its_place_and_keeps_imports_and_line_numbers(tmp_path):
  (tmp_path / 'seed.gin').write_text('Experiment.seed = 5\n')
  parse(f"{GOOD}Experiment.seed = 4\ninclude 'seed.gin'  # another seed\n", tmp_path)
  assert config.build()[0].seed == 5
  parse(f"{GOOD}include 'seed.gin'\nExperiment.seed = 6\n", tmp_path)
  assert config.build()[0].seed == 6
  dynamic = 'from __gin__ import dynamic_registration\nfrom speccascade.evaluate import experiment\n'
  (tmp_path / 'seed.gin').write_text(f'{dynamic}experiment.Experiment.seed = 5\n')
  parse(f"{dynamic}import toys\ninclude 'seed.gin'\nexperiment.Experiment.task = @toys.task()\n", tmp_path)
  assert gin.get_bindings('Experiment', resolve_references=False).keys() == {'seed', 'task'}
  (tmp_path / 'seed.gin').write_text('Experiment.seed = 5\n')
  found = error(GOOD + "include 'seed.gin'\n\nExperiment.sed = 3\n", tmp_path)
  assert 'no parameter sed' in found and f'line {GOOD.count(chr(10)) + 3}' in found
  assert 'test.gin includes itself' in error("include 'test.gin'\n", tmp_path)


def test_the_names_cover_every_rule_and_method():
  known = dict(config.names())
  assert {f'rules.{r.__name__}' for r in rules.known().values()} < set(known)
  assert {f'methods.{name}' for name in methods.known()} < set(known) and 'methods.find' not in known
  assert {'stopping.Heuristic', 'acceptance.block', 'rules.weighted'} < set(known)


@pytest.mark.parametrize('path', RUNS, ids=[p.stem for p in RUNS])
def test_every_config_of_the_project_parses_repeats_itself_and_opens_with_its_command(path, tmp_path):
  text = path.read_text()
  assert text.startswith('# ') and f'--gin_file=gin_configs/runs/{path.name}' in text.split('\n\n')[0]
  for word in ('Hardware:', 'Expected:'):
    assert word in text.split('\n\n')[0], word
  written = config.parse([str(path)])
  assert 'run.experiments' in written and parse(written, tmp_path) == written


def test_the_default_config_is_in_the_package_and_builds():
  config.parse([str(ROOT / 'speccascade' / 'evaluate' / 'default.gin')])
  (experiment,) = config.build()
  assert {c.name for c in experiment.curves} >= {'target only', 'draft only', 'SpecCascade [OPT]'}
  assert experiment.latency_examples > 0 and 0.0 in experiment.temperatures
  assert toys.VOCAB  # the module of the other tests stays importable
