"""What the documents print works for a stranger: every command, as printed, on a hub of tiny checkpoints.

A command is cut to two examples and a few tokens. What a stranger replaces, as SMALL and FILE, is replaced; a mesh of
devices that are not here is left out, and `test_a_mesh_that_is_not_here_is_refused_in_one_sentence` has its sentence.
"""

import dataclasses
import importlib
import json
import pathlib
import re
import shlex

import pytest
import test_papers as papers
from tiers import long_but

from speccascade import Sampler
from speccascade.evaluate import config
from speccascade.evaluate.curves import Curve
from speccascade.evaluate.experiment import Experiment

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = re.compile(r'python -m speccascade(?:\.\w+)*')
PAGES = ['README.md', *(str(p.relative_to(ROOT)) for p in (ROOT / 'docs' / 'start').glob('*.md'))]
PAGES += ['docs/experiments.md', 'docs/experiments/plan.md', 'docs/experiments/run_directory.md', 'docs/tasks.md']
HEADS = [
  *(ROOT / 'gin_configs' / 'runs').glob('*.gin'),
  *(ROOT / 'gin_configs' / 'papers').rglob('*.gin'),
]  # those of `train` are run by tests/train


def commands_of(text: str) -> list[str]:
  """Return the commands of the lines that begin with one, continued lines joined."""
  joined = re.sub(r' \\\n\s*', ' ', text)
  return [line for line in joined.splitlines() if COMMAND.match(line)]


def of_head(file: pathlib.Path) -> list[str]:
  """Return the commands of the comment that a gin file begins with."""
  head = '\n'.join(line[1:].strip() for line in file.read_text().split('\n\n')[0].splitlines() if line[:1] == '#')
  return commands_of(head)


def of_page(name: str) -> list[str]:
  """Return the commands of the code blocks of a page."""
  return [
    c for block in re.findall(r'```\w*\n(.*?)```', (ROOT / name).read_text(), re.DOTALL) for c in commands_of(block)
  ]


FOUND = {f'papers: {row["item"]} {i}': papers.command_of(row) for i, row in enumerate(papers.RUNS)}
FOUND |= {f'{file.relative_to(ROOT)} {i}': c for file in sorted(HEADS) for i, c in enumerate(of_head(file))}
FOUND |= {f'{page} {i}': command for page in sorted(PAGES) for i, command in enumerate(of_page(page))}

# ---- what a stranger has ----

SMALL, LARGE = 'Qwen/Qwen2.5-0.5B-Instruct', 'Qwen/Qwen2.5-7B-Instruct'
REPLACED = {  # words that stand for something of a user's
  'DRAFT': SMALL,
  'TARGET': LARGE,
  'SMALL': SMALL,
  'LARGE': LARGE,
  'PATH/small': SMALL,
  'PATH/large': LARGE,
  'T5_V1_1_SMALL': 'checkpoints/t5_v1_1_small',
  'T5_V1_1_LARGE': 'checkpoints/t5_v1_1_large',
  'T5_V1_1_XL': 'checkpoints/t5_v1_1_xl',
  'FILE': 'in.jsonl',
}
PLANS = {  # by their samplers
  'runs/gsm8k_T0.json': Sampler(0.0),
  'runs/gsm8k_T0.6.json': Sampler(0.6, top_p=0.9),
  'runs/multi30k_T0.json': Sampler(0.0),
  'runs/multi30k_T0.7.json': Sampler(0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
  'runs/sums_T1.json': Sampler(),
  'runs/sv_plan.json': Sampler(0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
  **dict.fromkeys(
    ('runs/llama_gsm8k.json', 'runs/vicuna_gsm8k.json', 'runs/codellama_humaneval.json', 'runs/layerskip.json'),
    Sampler(0.6, top_p=0.9),
  ),
}
FAMILIES = {
  'sums': ('JackFram/llama', ('draft', 'companion', 'target')),
  'gsm8k': ('JackFram/llama', ('draft', 'companion', 'target')),
  'multi30k': ('google/t5', ('small', 'base', 'large')),
}
EXAMPLES = dict(question='What is 2 + 2?', answer='2 + 2 = 4 #### 4', problem='What is 2 + 2?', solution='4')
EXAMPLES |= dict(turns=['Name a tree.'], category='prose', question_id=1, prompt='Name a tree.')
LINES = {
  'problems.jsonl': EXAMPLES,
  'test.jsonl': EXAMPLES,
  'question.jsonl': EXAMPLES,
  'train.jsonl': EXAMPLES,
  'in.jsonl': dict(prompt='Name a tree.'),
}


ROWS = 32  # of a file, for batches of as many
DOORS = ''.join(f'A red door, number {i}.\n' for i in range(ROWS))
hub, prepared = papers.hub, papers.prepared  # fixtures


@pytest.fixture
def house(monkeypatch, tmp_path, prepared, hub):
  """Make the current folder that of a stranger: files of theirs, families, and nothing else."""
  hub.fetched.clear()
  for name, line in LINES.items():
    pathlib.Path(name).write_text(f'{json.dumps(line)}\n' * ROWS)
  for name in ('val.en', 'val.de'):
    pathlib.Path(name).write_text(DOORS)
  for name in ('small', 'large'):
    pathlib.Path(name).symlink_to(hub.made(SMALL if name == 'small' else LARGE))
  readme = (ROOT / 'README.md').read_text()
  pathlib.Path('mine.gin').write_text(re.search(r'```gin\n(.*?)```', readme, re.DOTALL)[1])
  pathlib.Path('my_rules.py').write_text(
    re.search(r'```python\n([^`]*?def average_where_unsure.*?)```', readme, re.DOTALL)[1]
  )
  for path, sampler in PLANS.items():
    papers.save_plan_of(path, sampler, 'float32' if '_T' in path else 'bfloat16')
  for family, (kind, members) in FAMILIES.items():
    (tmp_path / 'families' / family).mkdir(parents=True)
    for i, member in enumerate(members):
      (tmp_path / 'families' / family / member).symlink_to(hub.made(f'{kind}-{i}'))
    for name in ('train', 'test'):
      (tmp_path / 'families' / family / f'{name}.jsonl').write_text(f'{json.dumps(EXAMPLES)}\n' * ROWS)
    for name in ('train', 'val', 'test_2016_flickr'):
      for side in ('en', 'de'):
        (tmp_path / 'families' / family / f'{name}.{side}').write_text(DOORS)
  monkeypatch.setenv('SPECCASCADE_FAMILIES', str(tmp_path / 'families'))
  return hub


def stand_in_for_datasets(monkeypatch):
  """Let the harness find the examples, for each data set that it asks the hub for."""
  pytest.importorskip('lm_eval')
  datasets = pytest.importorskip('datasets')
  splits = {name: datasets.Dataset.from_list([EXAMPLES] * ROWS) for name in ('train', 'test')}
  monkeypatch.setattr(datasets, 'load_dataset', lambda *_, **__: datasets.DatasetDict(splits))


def words_of(command: str, page: str) -> list[str]:
  """Return the arguments of a command, with what stands for something of a user's replaced."""
  command = re.sub(r'\$(\w)/', lambda m: re.search(rf'\b{m[1]}=(\S+)', page)[1] + '/', command)
  for word, value in REPLACED.items():
    command = re.sub(rf'(?<![\w/.-]){word}(?![\w/.-])(?!=)', value, command)
  return shlex.split(command)[2:]


def cut(experiment: Experiment, most: int = 3, examples: int = 2) -> Experiment:
  """Return an experiment of few examples of a few tokens, with one value of its first curves and of the reference."""
  rows = experiment.latency_batches[0] * experiment.latency_queue
  count = max(examples, rows if experiment.latency_examples else 0)
  task = dataclasses.replace(experiment.task, examples=experiment.task.examples[:count], max_new_tokens=4)
  curves = [c for i, c in enumerate(experiment.curves) if i < most or c.name == experiment.reference]
  curves = [dataclasses.replace(c, values=c.values and c.values[:1]) if isinstance(c, Curve) else c for c in curves]
  counts = dict(quality_batch=2, latency_examples=min(count, experiment.latency_examples), latency_trials=1)
  counts |= dict(latency_batches=experiment.latency_batches[:1], trace_examples=0)
  return dataclasses.replace(experiment, task=task, curves=curves, temperatures=experiment.temperatures[:1], **counts)


BUILD = config.build
FEWER = '--count=4', '--max_new_tokens=4', '--blocks=1-2', '--trials=1', '--batches=2', '--overwrite'


def run(command: str, page: str, monkeypatch, **kept: int) -> int:
  """Run a command, cut, in this process; return its exit code."""
  monkeypatch.setattr(config, 'build', lambda **given: [cut(experiment, **kept) for experiment in BUILD(**given)])
  module, *words = words_of(command, page)
  words = [w for i, w in enumerate(words) if '--mesh' not in (w, words[i - 1])]
  words = [w for w in words if not w.startswith(('--gin.mesh', '--gin.CELL'))]
  if module == 'speccascade.run':
    words += ['--gin.mesh.shape=None']  # a config may have one too
  else:
    words = ['in.jsonl' if w == 'prompts.jsonl' else w for w in words]
  words = {'speccascade.plan': [*words, *FEWER], 'speccascade.decode': [*words, '--max_new_tokens=4']}.get(
    module, words
  )
  if module == 'speccascade.calibrate':  # of the run of the command before it
    before = next(command for command in FOUND.values() if f'--run_dir={words[0]}' in command)
    run(before, page, monkeypatch, most=9, examples=8)
  if module == 'speccascade.figure':
    run(f'python -m speccascade.run --run_dir={words[0]}', page, monkeypatch, most=20)
  name = f'{module}.__main__' if importlib.import_module(module).__file__.endswith('__init__.py') else module
  return importlib.import_module(name).main(words)


def text_of(name: str) -> str:
  """Return the text that a command stands in."""
  return (ROOT / ('docs/papers.md' if name.startswith('papers') else name.rpartition(' ')[0])).read_text()


IN_CI = 'papers: speculative cascades 0', 'papers: Table 2, another pair 12', 'docs/start/first_decode.md 1'
NOT_HERE = {  # what a command needs that is no example
  'gin_configs/runs/t5x_eval.gin 0': "a seqio module and T5X's checkpoints of a user's: tests/integrations",
}


@pytest.mark.full
@pytest.mark.parametrize('name', long_but([name for name in FOUND if name not in NOT_HERE], IN_CI))
def test_a_command_works_as_it_is_printed(name, house, monkeypatch, capsys):
  if 'speccascade.compile' in FOUND[name] or '--topology' in FOUND[name]:
    pytest.importorskip('libtpu')
  if 'lm_eval_task' in FOUND[name]:
    stand_in_for_datasets(monkeypatch)
  code = run(FOUND[name], text_of(name), monkeypatch)
  said = capsys.readouterr()
  assert code == 0, said.err
  assert not any(file.endswith('.bin') for some in house.fetched.values() for file in some)
