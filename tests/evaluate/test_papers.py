"""docs/papers.md and gin_configs/papers: every row's config builds, every config has a row, its numbers are right."""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import shlex
import sys
import types

import fake_hub
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import long_but

from speccascade import checkpoints, methods, Sampler
from speccascade.checkpoints import hf
from speccascade.data import sources
from speccascade.data.seqio import tasks
from speccascade.engine.job import DecodeJob
from speccascade.evaluate import config, published
from speccascade.evaluate.experiment import Experiment
from speccascade.models import shapes
from speccascade.planning import aot, cost_model
from speccascade.planning.synthetic import tree_bytes, weight_bytes
from speccascade.sv import plans
from speccascade.sv.predictors import AcceptanceTable
from speccascade.types import Model, Network, Prompt

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'papers.md').read_text()
CONFIGS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / 'gin_configs' / 'papers').rglob('*.gin'))


def tables(page: str) -> Iterator[dict[str, str]]:
  """Yield the rows of a page's tables, cells by the names of their columns."""
  cells = lambda line: [cell.strip() for cell in line.split('|')[1:-1]]
  for table in re.findall(r'(?:^\|.*\n)+', page, re.MULTILINE):
    header, _, *lines = map(cells, table.splitlines())
    yield from (dict(zip(header, line, strict=True)) for line in lines)


ROWS = list(tables(PAGE))
RUNS = [row for row in ROWS if 'speccascade.run' in row.get('command', '')]
ACCEPTANCE = 0.7


def decoder(family: str, width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more) -> Network:
  settings = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=vocab, **more)
  settings |= dict(ffn_dim=mlp) if family == 'opt' else dict(num_key_value_heads=kv_heads, intermediate_size=mlp)
  return hf.network_from_config(dict(model_type=family, **settings), dtype='bfloat16')


qwen = functools.partial(decoder, 'qwen2', vocab=151936)
llama = functools.partial(decoder, 'llama', vocab=32000, max_position_embeddings=2048)
NETWORKS = {
  'checkpoints/t5_v1_1_small': lambda: shapes.t5('small'),
  'checkpoints/t5_v1_1_large': lambda: shapes.t5('large'),
  'checkpoints/t5_v1_1_xl': lambda: shapes.t5('xl'),
  'google/flan-t5-small': lambda: shapes.t5('small'),
  'google/flan-t5-xl': lambda: shapes.t5('xl'),
  'google/gemma-2-2b': lambda: shapes.gemma2('2b'),
  'google/gemma-2-9b': lambda: shapes.gemma2('9b'),
  'JackFram/llama-68m': lambda: llama(768, 2, 12, 12, 3072),
  'JackFram/llama-160m': lambda: llama(768, 12, 12, 12, 3072),
  'meta-llama/Llama-2-7b-hf': lambda: shapes.llama('7b'),
  'lmsys/vicuna-7b-v1.5': lambda: shapes.llama('7b'),
  'meta-llama/Llama-2-13b-hf': lambda: llama(5120, 40, 40, 40, 13824, max_position_embeddings=4096),
  'meta-llama/Llama-3.2-1B': lambda: llama(
    2048, 16, 32, 8, 8192, vocab=128256, max_position_embeddings=131072, tie_word_embeddings=True
  ),
  'meta-llama/Llama-3.1-8B-Instruct': lambda: llama(
    4096, 32, 32, 8, 14336, vocab=128256, max_position_embeddings=131072
  ),
  'facebook/opt-125m': lambda: decoder('opt', 768, 12, 12, 12, 3072, 50272),
  'facebook/opt-13b': lambda: decoder('opt', 5120, 40, 40, 40, 20480, 50272, word_embed_proj_dim=5120),
  'facebook/layerskip-llama2-70B': lambda: shapes.llama('70b'),
  'facebook/layerskip-codellama-34B': lambda: llama(8192, 48, 64, 8, 22016, max_position_embeddings=16384),
  'codellama/CodeLlama-34b-hf': lambda: llama(8192, 48, 64, 8, 22016, max_position_embeddings=16384),
  'TinyLlama/TinyLlama_v1.1_math_code': lambda: llama(2048, 22, 32, 4, 5632),
  'amd/AMD-Llama-135m': lambda: llama(768, 12, 12, 12, 2048),
  'Qwen/Qwen2.5-0.5B-Instruct': lambda: qwen(896, 24, 14, 2, 4864, tie_word_embeddings=True),
  'unsloth/Qwen2.5-0.5B': lambda: qwen(896, 24, 14, 2, 4864, tie_word_embeddings=True),
  **dict.fromkeys(
    ('Qwen/Qwen2.5-1.5B-Instruct', 'Qwen/Qwen2.5-Coder-1.5B-Instruct', 'Qwen/Qwen2.5-Math-1.5B-Instruct'),
    lambda: qwen(1536, 28, 12, 2, 8960, tie_word_embeddings=True),
  ),
  **dict.fromkeys(
    ('Qwen/Qwen2.5-3B-Instruct', 'Qwen/Qwen2.5-Coder-3B-Instruct'),
    lambda: qwen(2048, 36, 16, 2, 11008, tie_word_embeddings=True),
  ),
  'Qwen/Qwen2.5-7B-Instruct': lambda: qwen(3584, 28, 28, 4, 18944, vocab=152064),
  'Qwen/Qwen2.5-32B-Instruct': lambda: qwen(5120, 64, 40, 8, 27648, vocab=152064),
  'Qwen/Qwen2.5-72B-Instruct': lambda: qwen(8192, 80, 64, 8, 29568, vocab=152064),
}


def flags(command: str, name: str) -> list[str]:
  return [word.removeprefix(name) for word in shlex.split(command) if word.startswith(name)]


def command_of(row: dict[str, str]) -> str:
  (command,) = re.findall('`(python -m speccascade.run .*)`', row['command'])
  return command


@functools.cache
def model(path: str) -> Model:
  """Return the model at a path as shapes; layers are stacked, where all are in it: quicker to trace."""
  base, layers = sources.parse(path)
  network = dataclasses.replace(NETWORKS[base](), scan=layers is None)
  return checkpoints.part_of(Model(network.param_shapes(), network, name=path), layers)


# A record of each data set, and how many its split has.
RECORDS = {
  'wmt14_translate/de-en': (3000, dict(en='A door opens.', de='Eine Tür geht auf.')),
  'xsum': (11332, dict(document='The bridge was closed for a day.', summary='A bridge closed.')),
  'cnn_dailymail': (13368, dict(article='The ferry sailed late on Monday.', highlights='Ferry late .')),
  'gsm8k': (1319, dict(question='What is 2 + 2?', answer='2 + 2 = 4.\n#### 4')),
  'openai__openai_humaneval': (
    164,
    dict(
      prompt='def same(x):\n',
      canonical_solution='  return x\n',
      test='def check(f):\n  assert f(1) == 1\n',
      entry_point='same',
    ),
  ),
  'cais__mmlu/all': (14042, dict(question='Which?', subject='trees', choices=['ash', 'oak', 'elm', 'fir'], answer=1)),
  'bigcode__humanevalpack/python': (
    164,
    {
      'prompt': 'def same(x):\n',
      'canonical_solution': '  return x\n',
      'test': 'assert same(1) == 1\n',
      'entry_point': 'same',
      'declaration': 'def same(x):\n',
      'import': '',
      'test_setup': '',
    },
  ),
  'web_questions': (2032, dict(question='Where do eels live?', answers=['in rivers'])),
}


@dataclasses.dataclass
class Prepared:
  """Stands in for the builder of a data set."""

  dataset: str

  def as_dataset(self, split: str) -> list[dict]:
    count, record = RECORDS[self.dataset]
    return [{name: encoded(value) for name, value in record.items()}] * count


def encoded(value: str | int | list[str]):
  """Return a value as TensorFlow Datasets has it."""
  if isinstance(value, str):
    return value.encode()
  return np.array([text.encode() for text in value] if isinstance(value, list) else value)


@pytest.fixture(scope='session')
def hub(tmp_path_factory):
  return fake_hub.Hub(tmp_path_factory.mktemp('hub'))


@pytest.fixture
def prepared(monkeypatch, tmp_path, hub):
  """Stand in for prepared data sets, each as long as its split, for the hub, and for a folder with local files."""
  hub.stand_in(monkeypatch)
  data_sets = types.ModuleType('tensorflow_datasets')
  data_sets.as_numpy = lambda data: data
  monkeypatch.setitem(sys.modules, 'tensorflow_datasets', data_sets)

  def read(benchmark, data_dir):
    return functools.partial(tasks._prepared_records, benchmark, Prepared(benchmark.dataset))

  monkeypatch.setattr(tasks, 'prepared', read)
  monkeypatch.chdir(tmp_path)
  pathlib.Path('checkpoints').mkdir()
  for size in ('small', 'large', 'xl'):
    pathlib.Path(f'checkpoints/t5_v1_1_{size}').symlink_to(hub.made(f'checkpoints/t5_{size}'))
  lines = [dict(prompt='Name a tree.', target='An oak.', domain='prose')] * 20
  pathlib.Path('prompts.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  turns = [{'from': 'human', 'value': 'Name a tree.'}, {'from': 'gpt', 'value': 'An oak.'}]
  pathlib.Path('sharegpt.json').write_text(json.dumps([{'conversations': turns}] * 1024))


def experiments(command: str) -> list[Experiment]:
  """Return what a command runs, on one device, by a plan made here."""
  here = ['mesh.shape = None']
  config.parse(flags(command, '--gin_file='), [*flags(command, '--gin.'), *here])
  if '/sv/' in command:
    (path,) = flags(command, '--gin.PLAN=') or ["'runs/sv_plan.json'"]
    save_plan(path.strip("'"))
  return config.build()


def save_plan(path: str):
  """Save a plan of speculative verification for the sampler of the config that was read."""
  given = {name: gin.query_parameter(f'Experiment.{name}') for name in ('top_k', 'top_p', 'repetition_penalty')}
  save_plan_of(path, Sampler(gin.query_parameter('Experiment.temperatures')[0], **given))


def save_plan_of(path: str, sampler: Sampler, dtype: str = 'bfloat16'):
  """Save a plan of speculative verification for a sampler and models of a dtype."""
  table = AcceptanceTable(np.float32([0.5]), np.float32([[0.5], [0.5]]), np.float32([[0.2, 0.5], [0.4, 0.9]]))
  origin = plans.Origin(('d', 'c', 't'), (None,) * 3, plans.sampler_of(sampler), f'cpu, {dtype}', 'none', 13)
  times = {rows: {rows: 1.0, 2 * rows: 1.1} for rows in (4, 80)}
  samples = dict.fromkeys(('s', 'a', 's_target', 'accept', 'position', 'request'), np.zeros(1))
  profile = plans.Profile.of(table, origin, samples, times, dict.fromkeys(times, (0.1, 0.1, 1.0, 0.1)))
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  plans.Plan(origin, {4: plans.Choice('speculative', 5)}, {}, profile).save(path)


def models_of(experiment: Experiment) -> list[Model]:
  return [model(checkpoint.path) for checkpoint in experiment.models]


def of_one_vocabulary(models: list[Model]) -> list[Model]:
  """Return models without the rows by which their embeddings are padded; their tokenizers are not here to tell."""
  least = min(model.network.vocab_size for model in models)
  config = lambda network: dataclasses.replace(network.config, vocab_size=least)
  return [m.replace(network=dataclasses.replace(m.network, config=config(m.network))) for m in models]


@functools.cache
def cache_bytes(path: str, rows: int, source: int, new: int) -> int:
  """Return the bytes of a model's caches."""
  network = model(path).network
  slots = new + (source if network.start_id is None else 0)
  prompt = Prompt(jax.ShapeDtypeStruct((rows, source), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32))
  return tree_bytes(jax.eval_shape(lambda p, x: network.prefill(p, x, slots), model(path).params, prompt))


def gibibytes(experiment: Experiment) -> float:
  """Return the weights of the models and their caches for the largest batch of the longest texts."""
  task = experiment.task
  batches = experiment.latency_batches if experiment.latency_examples else ()
  rows = max(experiment.quality_batch, *batches, 1)
  paths = {sources.parse(checkpoint.path)[0] for checkpoint in experiment.models}
  caches = sum(cache_bytes(path, rows, task.max_prompt_tokens, task.max_new_tokens) for path in paths)
  return (caches + sum(tree_bytes(model(path).params) for path in paths)) / 2**30


def hours(experiment: Experiment, chip: aot.Chip, chips: int) -> float:
  """Return the hours of decoding, by the formula of the page."""
  calls = [weight_bytes(m.network.reads(m.params, ())[0]) / chip.bandwidth / chips for m in models_of(experiment)]
  task = experiment.task
  examples = len(task.examples) if experiment.quality_examples is None else experiment.quality_examples
  batches = examples / experiment.quality_batch
  for rows in experiment.latency_batches:
    batches += math.ceil(experiment.latency_examples / rows) * experiment.latency_trials
  token = sum(seconds(point.build(), calls) for point in experiment.points)
  return batches * task.max_new_tokens * token * len(experiment.temperatures) / 3600


def seconds(method, calls: list[float]) -> float:
  """Return the time of a token of each row of a batch."""
  if not method.drafts:
    return sum(calls[m] for m in method.slots)
  alone = sum(calls[m] for m in method.about.over.models(range(len(calls))))
  if method.name.startswith('sv'):
    method = methods.speculative(block=method.block)
  return alone / (cost_model.predict(method, ACCEPTANCE, calls[0] / calls[-1]) or 1.0)


def max_positions(experiment: Experiment) -> float:
  """Return how many positions all decoder-only models have."""
  networks = [m.network for m in models_of(experiment) if m.network.start_id is None]
  return min([n.max_positions or math.inf for n in networks], default=math.inf)


def figures(made: Sequence[Experiment], chips: str) -> tuple[float, float]:
  """Return GiB and hours of what a row runs, on chips as in '4 h100'."""
  count, chip = chips.split()
  return max(map(gibibytes, made)), sum(hours(e, aot.CHIPS[chip], int(count)) for e in made)


FIRST = list({re.search(r'papers/\S+', row['command'])[0]: row for row in reversed(RUNS)}.values())  # of each config


@pytest.mark.full
@pytest.mark.parametrize('row', long_but(RUNS, FIRST), ids=lambda row: row['item'])
def test_the_config_of_a_row_builds_and_its_figures_are_right(row, prepared):
  made = experiments(command_of(row))
  for experiment in made:
    for point in experiment.points:
      DecodeJob.of_models(point.build(), of_one_vocabulary(models_of(experiment)))
    assert max_positions(experiment) >= experiment.task.max_prompt_tokens + experiment.task.max_new_tokens
    assert not experiment.cell or published.of_cell(experiment.cell)
  count, chip = row['chips'].split()
  memory, time = figures(made, row['chips'])
  assert (float(row['GiB']), float(row['hours'])) == (pytest.approx(memory, rel=0.06), pytest.approx(time, rel=0.06))
  assert memory < int(count) * aot.CHIPS[chip].memory


def test_every_row_says_whether_its_models_and_data_are_public():
  said = {word for row in ROWS if 'item' in row for word in row['public'].split(', ')}
  assert said == {'yes', 'licence', 'data', 'prompts', '–', 'above', 'below', 'as there'}
  for row in RUNS:
    hub = set(re.findall(r"['=]((?:meta-llama|google/gemma|facebook/layerskip)[\w./-]*)", row['command']))
    assert not hub or row['public'] == 'licence', row['item']


PAIRS = {row['pair'].strip('`'): (row['DRAFT'].strip('`'), row['TARGET'].strip('`')) for row in ROWS if 'pair' in row}
TASKS = {row['cells'].strip('`'): row['task'].strip('`') for row in ROWS if 'cells' in row and 'metric' not in row}


EVERY = list(itertools.product(PAIRS, TASKS))
FEW = list(zip(PAIRS, itertools.cycle(TASKS)))


@pytest.mark.full
@pytest.mark.parametrize('pair, cell', long_but(EVERY, FEW))
def test_every_pair_and_task_of_collaborative_decoding_is_a_cell(pair, cell, prepared):
  known = {row['cell'] for row in published.read()}
  (table,) = [name for name in ('table2', 'table3') if f'cos/{name}/{pair}/{cell}' in known]
  macros = dict(zip(('DRAFT', 'TARGET', 'CELL'), (*PAIRS[pair], f'cos/{table}/{pair}/{cell}'), strict=True))
  bound = macros | {'Experiment.task': TASKS[cell]}
  words = [f'--gin_file=gin_configs/papers/cos/{table}.gin', *(f'--gin.{k}={v!r}' for k, v in bound.items())]
  (experiment,) = experiments(shlex.join(words))
  assert [checkpoint.path for checkpoint in experiment.models] == [*PAIRS[pair]]
  assert experiment.cell == macros['CELL'] and TASKS[cell].startswith(experiment.task.name)
  for point in experiment.points:
    DecodeJob.of_models(point.build(), of_one_vocabulary(models_of(experiment)))
  assert max_positions(experiment) >= experiment.task.max_prompt_tokens + experiment.task.max_new_tokens


def test_every_config_has_a_row_and_opens_with_its_command():
  assert {file for row in RUNS for file in flags(command_of(row), '--gin_file=') if '/papers/' in file} == set(CONFIGS)
  for file in CONFIGS:
    head = (ROOT / file).read_text().split('\n\n')[0]
    assert f'--gin_file={file}' in head and 'Hardware:' in head and 'Expected:' in head


def test_published_cells_are_those_of_the_page():
  cells = {tuple(row['cell'].split('/')[:4]) for row in published.read()}
  commands = {tuple(cell.strip("'").split('/')[:2]) for row in RUNS for cell in flags(command_of(row), '--gin.CELL=')}
  assert {cell[:2] for cell in cells} == commands | {('cos', 'table9'), ('cos', 'table10')}
  assert all(f'`{name}`' in PAGE for _, _, *names in cells for name in names if name not in ('small-large', 'small-xl'))


def test_published_speeds_are_the_published_ratios():
  """Tables 5 and 6 of collaborative decoding have the speeds that 2 to 4 divide, but for what the page names."""
  rows = {(r['cell'], r['curve'], r['temperature'], r['measure']): r['published'] for r in published.read()}
  compared = 0
  for (cell, curve, temperature, measure), speed in rows.items():
    ratio = rows.get((cell.rpartition('/')[0], curve, temperature, 'best_tokens_per_s_ratio'))
    if measure == 'best_tokens_per_s' and ratio is not None and not re.search('of-3/(gsm8k|cnndm)', cell):
      alone = rows[cell, 'ensemble', temperature, measure]
      assert speed / alone == pytest.approx(ratio, abs=0.06)
      compared += 1
  assert compared == 76


@pytest.mark.full
def test_the_models_of_the_page_have_its_sizes():
  """Weights of the models that a row names, each once, in GiB."""
  compared = [row for row in ROWS if 'GiB of weights' in row]
  for row in compared:
    paths = [cell.strip('`') for name, cell in row.items() if name.isupper()]
    weights = sum(tree_bytes(model(path).params) for path in {sources.parse(path)[0] for path in paths})
    assert float(row['GiB of weights']) == pytest.approx(weights / 2**30, abs=0.06), row
  assert len(compared) == 15
