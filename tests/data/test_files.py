"""The user's files become tasks, and errors name what is wrong with a file."""

import dataclasses
import gzip
import json
import pathlib

from matching import having
import pytest

from speccascade import embedded
from speccascade.data import files, prompts
from speccascade.data.examples import Example
from speccascade.data.spec_bench import spec_bench
from speccascade.data.tokenizers import find
from speccascade.engine import inputs
from speccascade.evaluate import config, tasks
from speccascade.models import toy

ENGLISH = ['A dog runs.', 'Two children play.', 'A woman reads a book.']
GERMAN = ['Ein Hund läuft.', 'Zwei Kinder spielen.', 'Eine Frau liest ein Buch.']
PROBLEMS = [
  {'question': 'How much is 2 + 2?', 'answer': '#### 4', 'notes': {'hard': False}},
  {'question': 'How much is 3 {plus} 3?', 'answer': '#### 6', 'notes': {'hard': True}},
]


@pytest.fixture
def pair(tmp_path):
  (tmp_path / 'val.en').write_text('\n'.join(ENGLISH) + '\n', encoding='utf-8')
  with gzip.open(tmp_path / 'val.de.gz', 'wt', encoding='utf-8', newline='') as f:
    f.write('\r\n'.join(GERMAN))
  return str(tmp_path / 'val.en'), str(tmp_path / 'val.de.gz')


@pytest.fixture
def problems(tmp_path):
  path = tmp_path / 'problems.jsonl'
  path.write_text('\n\n'.join(json.dumps(p) for p in PROBLEMS) + '\n')
  return str(path)


def test_lines_pair_up_plain_or_gzipped_with_any_line_end(pair):
  task = files.parallel_text(*pair)
  assert [(e.index, e.prompt, e.target) for e in task.examples] == list(zip(range(3), ENGLISH, GERMAN))
  assert (task.name, list(task.metrics), task.max_prompt_tokens, task.max_new_tokens) == ('val', ['bleu'], 80, 80)


def test_selected_lines_keep_their_index(pair):
  chosen = [files.parallel_text(*pair, count=1, seed=seed, prefix='to German: ').examples for seed in range(9)]
  assert {e.index for (e,) in chosen} == {0, 1, 2}
  assert all(e == Example(e.index, f'to German: {ENGLISH[e.index]}', GERMAN[e.index]) for (e,) in chosen)
  assert len(files.parallel_text(*pair, count=99).examples) == 3


def test_several_reference_files_are_several_references(pair):
  assert files.parallel_text(pair[0], [pair[1], pair[0]]).examples[0].target == [GERMAN[0], ENGLISH[0]]


def test_only_line_feeds_end_a_line(tmp_path):
  path = tmp_path / 'odd'
  path.write_text('a\u2028b\x0bc\n\nd\n', encoding='utf-8')
  assert [e.prompt for e in files.parallel_text(str(path), str(path)).examples] == ['a\u2028b\x0bc', '', 'd']


def test_damaged_files_are_named_with_the_line(tmp_path, pair):
  cases = {
    'empty': (b'', 'empty'),
    'latin': ('gut\nschön\n'.encode('latin-1'), 'line 2 .*UTF-8'),
    'cut.gz': (gzip.compress(b'x\n' * 999)[:-9], 'gzip'),
    'short': (b'one line\n', having('3 lines', 'short', '1')),
  }
  for name, (data, match) in cases.items():
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=match):
      files.parallel_text(pair[0], str(tmp_path / name))
  with pytest.raises(FileNotFoundError, match='nowhere'):
    files.parallel_text(pair[0], str(tmp_path / 'nowhere'))


def test_a_selection_without_examples_is_an_error(pair, tmp_path):
  with pytest.raises(ValueError, match='count=0'):
    files.parallel_text(*pair, count=0)
  (tmp_path / 'none.json').write_text('[]')
  with pytest.raises(ValueError, match='none.json has no examples'):
    files.jsonl(str(tmp_path / 'none.json'))


def test_json_lines_fill_a_template(problems):
  task = files.jsonl(
    problems,
    prompt_field='Question: {question}\nAnswer:',
    target_field='answer',
    info_fields=['notes'],
    metrics=('final_number',),
  )
  first, second = task.examples
  assert first == Example(0, 'Question: How much is 2 + 2?\nAnswer:', '#### 4', {'notes': {'hard': False}})
  assert '3 {plus} 3' in second.prompt and task.metrics['final_number'](task.examples, ['4', '7']) == 50


def test_a_field_alone_needs_no_template_and_lists_are_references(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_text('{"prompt": "a", "target": ["b", "c"], "n": 3}')
  assert files.jsonl(str(path)).examples == [Example(0, 'a', ['b', 'c'])]
  assert files.jsonl(str(path), target_field='n').examples[0].target == '3'
  assert files.jsonl(str(path), target_field='{n} of {prompt}').examples[0].target == '3 of a'


@pytest.mark.parametrize(
  'settings, match',
  [
    (dict(prompt_field='nothing'), having("'nothing'", 'question, answer')),
    (dict(prompt_field='{question} {nothing}'), "'nothing'"),
    (dict(prompt_field='{question'), '{question'),
    (dict(prompt_field='{{question}}'), 'no field'),
    (dict(prompt_field='question', stop='x'), 'stop='),
    (dict(prompt_field='question', metrics=('blue',)), "'blue'"),
  ],
)
def test_wrong_settings_are_named(problems, settings, match):
  with pytest.raises(ValueError, match=match):
    files.jsonl(problems, target_field='answer', **settings)


def test_a_prediction_ends_at_the_first_stop(problems):
  task = files.jsonl(problems, prompt_field='question', target_field='answer', stop=('\n\n', 'Question:'))
  for text, end in (('a Question: b\n\nc', 'a '), ('a\n\nQuestion:', 'a'), ('all', 'all')):
    assert task.postprocess(text, task.examples[0]) == end


def test_a_long_prompt_is_cut_in_its_text_and_nowhere_else(problems, pair, byt5):
  task = files.jsonl(
    problems, prompt_field='Question: {question}\nAnswer:', target_field='answer', tokenizer=byt5, max_prompt_tokens=30
  )
  tokenizer = find(byt5)
  assert task.examples[0].prompt == 'Question: How much is\nAnswer:'
  assert all(len(tokenizer.encode(e.prompt)) == 30 for e in task.examples)
  lines = files.parallel_text(*pair, prefix='de: ', tokenizer=byt5, max_prompt_tokens=20).examples
  assert [e.prompt for e in lines] == ['de: A dog runs.', 'de: Two children pl', 'de: A woman reads a']


def test_worked_examples_come_before_the_question(problems, tmp_path, byt5):
  settings = dict(prompt_field='{question} <', target_field='answer', prefix='> ')
  two = files.jsonl(problems, shots=1, **settings).examples
  assert [e.prompt for e in two] == [
    '> How much is 2 + 2? <',
    '> How much is 2 + 2? < #### 4\n\nHow much is 3 {plus} 3? <',
  ]
  (tmp_path / 'shots.json').write_text(json.dumps([{'question': f'Q{i}?\n', 'answer': ['A', 'B']} for i in range(3)]))
  asked = files.jsonl(str(tmp_path / 'shots.json'), shots=2, prompt_field='question', target_field='answer').examples
  assert asked[2].prompt == 'Q0?\nA\n\nQ1?\nA\n\nQ2?\n'
  fitted = files.jsonl(problems, shots=1, tokenizer=byt5, max_prompt_tokens=40, **settings).examples[1]
  assert fitted.prompt == '> How much is 3 {plus} 3? <'


def test_an_array_of_objects_is_read_as_lines_are(tmp_path):
  path = tmp_path / 'x.json'
  path.write_text('[{"prompt": "a", "target": "b"},\n {"prompt": "c", "target": "d"}]')
  assert files.jsonl(str(path)).examples == [Example(0, 'a', 'b'), Example(1, 'c', 'd')]
  path.write_text('[{"prompt": "a", "target": "b"}, 3]')
  with pytest.raises(ValueError, match='object 2 .*int'):
    files.jsonl(str(path))


HELLO = [{'role': 'user', 'content': 'Hello, how are you?'}]


@pytest.fixture
def chatty(byt5, tmp_path):
  """Return a folder of a tokenizer with a chat template."""
  settings = dict(tokenizer_class='ByT5Tokenizer', chat_template='{% for m in messages %}<{{ m.content }}>{% endfor %}')
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  return str(tmp_path)


def test_a_prompt_may_be_messages_and_becomes_one_on_request(problems, chatty, tmp_path):
  settings = dict(target_field='answer', chat='Count.', tokenizer=chatty, max_prompt_tokens=24)
  first, _ = files.jsonl(problems, prompt_field='{question}', **settings).examples
  assert first.prompt == [{'role': 'system', 'content': 'Count.'}, {'role': 'user', 'content': 'How much is 2 '}]
  assert len(find(chatty).chat(first.prompt)) == 24
  model = dataclasses.replace(toy.model(0, 384), tokenizer=find(chatty))
  (tokens,) = inputs.encode([model], [first.prompt])
  assert tokens.tolist() == find(chatty).chat(first.prompt)
  (tmp_path / 'chats').write_text(json.dumps({'prompt': HELLO, 'target': 'Hi!'}))
  path = str(tmp_path / 'chats')
  assert files.jsonl(path).examples[0].prompt == HELLO and files.texts(path, 'prompt') == [HELLO]
  for wrong in (dict(prefix='x'), dict(chat=True), dict(shots=1)):
    with pytest.raises(ValueError, match=having('chats, line 1', 'prompt')):
      files.jsonl(path, **wrong)


def test_conversations_ask_their_first_turns(chatty, tmp_path):
  path = tmp_path / 'talks.json'
  talks = [
    [('human', 'Hello, how are you?'), ('gpt', 'Fine.'), ('human', 'And why?')],
    [('gpt', 'As before.'), ('human', 'Go on.')],
    [('gpt', 'Nobody asked.')],
    [('system', 'Be kind.'), ('human', 'Name a bird.')],
  ]
  path.write_text(json.dumps([{'conversations': [dict(zip(('from', 'value'), x)) for x in talk]} for talk in talks]))
  task = files.conversations(str(path))
  assert [(e.index, e.prompt, e.target) for e in task.examples] == [
    (0, 'Hello, how are you?', []),
    (1, 'Go on.', []),
    (3, 'Name a bird.', []),
  ]
  assert list(task.metrics) == ['words'] and task.metrics['words'](task.examples, ['a b', '', 'c']) == 1
  (two,) = files.conversations(str(path), turns=2, chat='Short.').examples
  assert [m['role'] for m in two.prompt] == ['system', 'user', 'assistant', 'user'] and two.prompt[-1][
    'content'
  ] == 'And why?'
  cut = files.conversations(str(path), chat=True, tokenizer=chatty, max_prompt_tokens=10, count=1).examples[0]
  assert cut.prompt == [{'role': 'user', 'content': 'Hello, h'}]
  assert files.conversations(str(path), count=2, seed=0, name='talks').name == 'talks'
  for wrong, match in (
    (dict(turns=2), 'turns=2'),
    (dict(count=0), 'count=0'),
    (dict(turns=3, chat=True), '3 turns'),
  ):
    with pytest.raises(ValueError, match=match):
      files.conversations(str(path), **wrong)
  path.write_text('{"messages": [{"role": "user", "content": "Hi."}]}\n{"talk": []}\n')
  with pytest.raises(ValueError, match=having('line 2', 'messages', 'talk')):
    files.conversations(str(path))


def test_the_turns_of_a_benchmark_are_what_the_user_says(tmp_path):
  path = tmp_path / 'question.jsonl'
  rows = [('writing', ['Write.', 'Shorten it.']), ('math', ['Add.']), ('qa', ['Who?']), ('rag', ['Read.'])]
  lines = [dict(question_id=i, category=category, turns=turns) for i, (category, turns) in enumerate(rows)]
  path.write_text('\n'.join(map(json.dumps, lines)))
  task = spec_bench(str(path))
  assert [e.prompt for e in task.examples] == [[{'role': 'user', 'content': turns[0]}] for _, turns in rows]
  assert [e.info['domain'] for e in task.examples] == ['mt_bench', 'mt_bench', 'qa', 'rag']
  assert [e.info['category'] for e in task.examples] == [category for category, _ in rows]
  for wrong, parts in (
    (dict(turns=2, chat=True), ('turns=2', 'line 1', 'answers')),
    (dict(info_fields=['topic']), ('line 1', "'topic'", 'category')),
  ):
    with pytest.raises(ValueError, match=having(*parts)):
      files.conversations(str(path), **wrong)


FIELDS = {'problem': 'What is $1 + {1}$?', 'answer': '2', 'subject': 'Algebra'}


@pytest.mark.parametrize(
  'name, record, prompt, domain',
  [
    ('spec_bench', {'category': 'stem', 'turns': ['Explain.', 'Why?']}, 'Explain.', 'mt_bench'),
    ('mt_bench', {'category': 'stem', 'turns': ['Explain.', 'Why?']}, 'Explain.', 'stem'),
    ('math500', FIELDS, 'What is $1 + {1}$?\nPlease reason step by step, and put your final', 'Algebra'),
  ],
)
def test_a_text_makes_a_benchmark_of_prompts_from_its_own_file(name, record, prompt, domain, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('x.jsonl').write_text(json.dumps(record))
  task = tasks.find(f"{name}(path='x.jsonl')")
  (example,) = task.examples
  ((message,), info) = example.prompt, example.info
  assert message['content'].startswith(prompt) and info['domain'] == domain
  assert task.name == name and task.max_new_tokens == 1024


def test_a_task_is_a_text_with_what_a_config_binds_and_the_tokenizer_of_the_last_model(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('x.jsonl').write_text(json.dumps({'question': 'What? ' * 300, 'answer': '#### 2'}) + '\n')
  pathlib.Path('mine.py').write_text(
    'from speccascade.data.examples import Task, Example\n'
    "def task(count=1):\n  return Task('mine', [Example(0, 'a', 'b')] * count, 8, 8, {'x': print})\n"
    'def length(example, prediction):\n  return 1.0\n'
  )
  large = str(pathlib.Path(embedded.vocabulary()).parents[1] / 'large')
  text = "problems(path='x.jsonl', max_prompt_tokens=64)"
  bindings = [f'Experiment.models = ["{large}"]', f'Experiment.task = "{text}"', 'data.jsonl.max_new_tokens = 7']
  given = tmp_path / 'x.gin'
  given.write_text('\n'.join(bindings))
  config.parse([str(given)], ["Experiment.curves = ['target only']"])
  (experiment,) = config.build()
  (example,) = experiment.task.examples
  assert experiment.task.max_new_tokens == 7 and [*experiment.task.metrics] == ['final_number']
  assert len(find(embedded.vocabulary()).encode(example.prompt)) <= 64 < len('What? ' * 300)
  assert len(tasks.find('mine:task(count=3)').examples) == 3
  assert [*tasks.find("problems(path='x.jsonl', metrics=[mine:length])").metrics] == ['length']
  for wrong, said in {
    'problem': "no task is called 'problem'; did you mean problems",
    'gsm8k(shot=1)': 'shot',
    'gsm8k:5': 'by name, as in gsm8k(count=100)',
    'problems': 'path',
  }.items():
    with pytest.raises(ValueError, match=having(said)):
      tasks.find(wrong)


def test_cutting_never_splits_a_character(byt5):
  tokenizer = find(byt5)
  for limit in range(4, 12):
    cut = prompts.Fitter(byt5, limit)(lambda text: f'{text}!', 'ääää')
    assert cut.strip('ä') == '!' and len(tokenizer.encode(cut)) <= limit


def test_cutting_keeps_what_the_tokenizer_cannot_write():
  vocabulary = find(embedded.vocabulary())
  text = 'the man {who} has </s> a  hat\nand 日本 a dog. ' * 20
  for limit in (16, 100, 300):
    fit = prompts.Fitter(vocabulary.path, limit)
    cut = fit(lambda text: f'{text}!', text)
    assert text.startswith(cut[:-1]) and limit - 2 <= len(vocabulary.encode(cut)) <= limit
  counts = []
  fit.excess = lambda prompt: counts.append(1) or prompts.Fitter.excess(fit, prompt)
  fit(lambda text: f'{text}!', text * 20)
  assert len(counts) < 40


def test_a_prompt_without_room_for_a_text_and_a_missing_tokenizer_are_errors(pair, byt5, tmp_path):
  with pytest.raises(ValueError, match='max_prompt_tokens=5'):
    files.parallel_text(*pair, prefix='to German: ', tokenizer=byt5, max_prompt_tokens=5)
  with pytest.raises(FileNotFoundError, match='nowhere/x'):
    files.parallel_text(*pair, tokenizer=str(tmp_path / 'nowhere' / 'x'))


def test_a_gzip_of_too_much_text_is_refused_before_all_of_it_is_unpacked(tmp_path, monkeypatch):
  (tmp_path / 'x.gz').write_bytes(gzip.compress(b'a\n' * 1000))
  assert len(files.lines(tmp_path / 'x.gz')) == 1000
  monkeypatch.setattr(files, '_MOST_BYTES', 1999)
  with pytest.raises(ValueError, match='x.gz'):
    files.lines(tmp_path / 'x.gz')
