"""The command that decodes files: what it reads, what it writes, and that it goes on where it was killed."""

import dataclasses
import gzip
import json
import os
from pathlib import Path
import resource
import signal
import subprocess
import sys
import threading
import time

import jax
from matching import having, says
import pytest

import speccascade
from speccascade import embedded, methods, Request
from speccascade.decode import __main__ as command
from speccascade.decode import lines, options
from speccascade.host import storage

FOLDER = Path(embedded.__file__).parent / 'pretrained'
MODELS = ['--models', str(FOLDER / 'small'), str(FOLDER / 'large'), '--seed', '0']
OPT = ['--rule', 'opt:0.1', '--block', '3', '--max-new-tokens', '24', '--batch-size', '4']
REQUESTS = [
  *(example.prompt for example in embedded.task(count=9).examples),
  {'prompt': 'A dog runs.', 'n': 3, 'temperature': 1.0},
  {'prompt': [4, 5, 1], 'stop': ['.'], 'temperature': 0.0, 'logprobs': 2, 'max_new_tokens': 7},
]


def write(path: Path, requests=REQUESTS) -> Path:
  path.write_text(''.join(json.dumps(request) + '\n' for request in requests))
  return path


def rows(path: Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def run(source, output, *more, stream=speccascade.stream) -> int:
  """Run the command with rows of a stream; return its exit code."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lines, 'stream', stream)
    return command.main([*MODELS, *OPT, *more, str(source), str(output)])


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> tuple[Path, Path]:
  """Return a file of requests and what one run makes of it."""
  folder = tmp_path_factory.mktemp('whole')
  source, output = write(folder / 'in.jsonl'), folder / 'out.jsonl'
  assert run(source, output) == 0
  return source, output


def test_a_line_of_the_output_is_what_decode_returns(whole):
  found = rows(whole[1])
  asked = [Request(**r) if isinstance(r, dict) else Request(r) for r in REQUESTS]
  settings = dict(max_new_tokens=24, batch_size=4)
  rule = options.rule('opt:0.1')
  out = speccascade.decode(methods.speculative(rule, 3), embedded.models(), asked, **settings)
  assert [row['text'] for row in found] == out.texts and [row['tokens'] for row in found] == out.tokens
  assert tuple(row['finish_reason'] for row in found) == out.finish_reasons
  assert [(row['index'], row['sample']) for row in found] == [*((i, 0) for i in range(10)), (9, 1), (9, 2), (10, 0)]
  assert [row['calls'] for row in found[:12]] == out.stats.calls.T[:12].tolist()
  assert len(found[-1]['top_logprobs']) == len(found[-1]['tokens'])
  assert not whole[1].with_name('out.jsonl.part').exists()


@pytest.mark.parametrize('had', [1, 7])
def test_a_run_goes_on_from_any_line_and_writes_the_same_file(whole, tmp_path, had):
  source, output = tmp_path / 'in.jsonl', tmp_path / 'out.jsonl'
  source.write_bytes(whole[0].read_bytes())
  decoded = []

  def stopping(*args, **kwargs):
    for i, row in speccascade.stream(*args, **kwargs):
      if len(decoded) == had:
        raise KeyboardInterrupt
      decoded.append(i)
      yield i, row

  assert run(source, output, stream=stopping) == 130
  part = tmp_path / 'out.jsonl.part'
  assert len(rows(part)) == had + 1 and not output.exists()
  with open(part, 'a') as file:
    file.write('{"index": 3, "sam')  # a line that was not written to its end
  again = []

  def counting(*args, skip, **kwargs):
    again.extend(sorted(skip))
    return speccascade.stream(*args, skip=skip, **kwargs)

  assert run(source, output, stream=counting) == 0
  assert again == sorted(decoded)
  expected, found = rows(whole[1]), rows(output)
  assert found[:-1] == expected[:-1] and not part.exists()
  for name in ('text', 'tokens', 'finish_reason'):  # a stop string is looked for now and then: counts may go beyond it
    assert found[-1][name] == expected[-1][name]


@pytest.mark.long
def test_a_long_loop_ends_at_once_and_keeps_what_had_ended(tmp_path, capsys):
  long = {'prompt': 'ein Hund', 'min_new_tokens': 12_000, 'max_new_tokens': 12_000}
  source = write(tmp_path / 'in.jsonl', [*[{'prompt': 'zwei Hunde', 'max_new_tokens': 2}] * 2, *[long] * 2])
  part, over, told = tmp_path / 'out.jsonl.part', threading.Event(), []

  def end():
    while not over.wait(0.05):
      if part.exists() and part.read_bytes().count(b'\n') == 3:
        told.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)
        return

  thread = threading.Thread(target=end)
  thread.start()
  code, ended = run(source, tmp_path / 'out.jsonl'), time.monotonic()
  over.set()
  thread.join()
  assert code == 143 and 'stopped; the same command' in capsys.readouterr().err and ended - told[0] < 10
  assert {row['index'] for row in rows(part)[1:]} == {0, 1}


@pytest.mark.full
def test_rows_of_other_settings_or_another_input_are_refused_by_name(tmp_path, capsys):
  source, output = write(tmp_path / 'in.jsonl', ['A dog runs.']), tmp_path / 'out.jsonl'
  part = tmp_path / 'out.jsonl.part'
  assert run(source, output, stream=lambda *_, **__: 1 / 0) == 1 and part.exists()
  with open(part, 'a') as file:
    file.write('{"index": 0, "sample": 0}\n')
  header = rows(part)[0]
  assert header['speccascade'] and header['device'] == jax.devices()[0].device_kind
  capsys.readouterr()
  assert run(source, output, '--temperature', '0.5') == 1
  assert says(capsys.readouterr().err, 'temperature', 'its default', '0.5')
  assert run(source, output, '--rule', 'opt:0.2') == 1
  assert says(capsys.readouterr().err, 'rule', 'opt:0.1', 'opt:0.2')
  write(source, ['A cat runs.'])
  assert run(source, output) == 1
  assert says(capsys.readouterr().err, 'out.jsonl.part', 'another run', 'input')


@pytest.mark.parametrize('content', ['notes', 'notes\n', '"a speccascade"\n', '{"a": 1}\n', '{"a": 1}'])
def test_a_file_that_is_no_journal_of_ours_is_left_alone(tmp_path, content):
  part = tmp_path / 'x.part'
  part.write_text(content)
  with pytest.raises(RuntimeError, match='x.part'), lines.opened(tmp_path / 'x', {lines.MARK: '1'}, [(0, 0)]):
    pass
  assert part.read_text() == content


@pytest.mark.parametrize(
  'row', ['{"index": 9, "sample": 0}', '{"index": 0, "sample": 1}', '{"index": "0", "sample": 0}']
)
def test_a_row_that_nothing_asked_for_is_refused(tmp_path, row):
  (tmp_path / 'x.part').write_text(f'{{"{lines.MARK}": "1"}}\n{row}\n')
  with pytest.raises(RuntimeError, match='x.part has a row'), lines.opened(tmp_path / 'x', {lines.MARK: '1'}, [(0, 0)]):
    pass


@pytest.mark.full
def test_a_full_disk_names_the_file_and_what_to_do_and_keeps_the_rows(tmp_path, capsys):
  source, part = write(tmp_path / 'in.jsonl', ['A dog runs.'] * 3), tmp_path / 'out.jsonl.part'
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)

  def full(*args, **kwargs):
    for i, row in speccascade.stream(*args, **kwargs):
      resource.setrlimit(resource.RLIMIT_FSIZE, (part.stat().st_size + 200 * (i == 0), limit[1]))
      yield i, row

  try:
    assert run(source, tmp_path / 'out.jsonl', stream=full) == 1
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  assert f'{part} cannot be written: File too large' in capsys.readouterr().err
  assert run(source, tmp_path / 'out.jsonl') == 0
  assert [row['index'] for row in rows(tmp_path / 'out.jsonl')] == [0, 1, 2]


def test_a_journal_without_rows_is_begun_anew_and_one_with_rows_goes_on(tmp_path):
  path, kept = tmp_path / 'x.part', [{'index': 0, 'sample': sample} for sample in range(2)]
  names = [(0, 0), (0, 1)]
  for header in ({lines.MARK: '1', 'seed': 'a longer one'}, {lines.MARK: '1', 'seed': 1}):
    with lines.opened(tmp_path / 'x', header, names) as journal:
      assert not journal.done and rows(path) == [header]
  for had in range(2):
    with lines.opened(tmp_path / 'x', header, names) as journal:
      assert list(journal.done) == [(0, sample) for sample in range(had)]
      journal.add(kept[had])
  assert rows(path) == [header, *kept]
  with (
    pytest.raises(RuntimeError, match=having('another run', 'seed', '1', '2')),
    lines.opened(tmp_path / 'x', {'seed': 2}, names),
  ):
    pass


@pytest.mark.full
def test_a_prompt_that_is_too_long_is_named_with_its_line(tmp_path, capsys):
  source = write(tmp_path / 'in.jsonl', [[4, 5], [4, 5, 6, 1]])
  assert run(source, tmp_path / 'out.jsonl', '--max-prompt-tokens', '3') == 1
  said = 'line 2: the prompt has 4 tokens, more than --max_prompt_tokens=3; shorten it or raise the limit'
  assert said in capsys.readouterr().err and not (tmp_path / 'out.jsonl.part').exists()
  assert run(source, tmp_path / 'out.jsonl', '--max-prompt-tokens', '3', '--truncate') == 0


def test_special_tokens_in_a_chat_are_refused_where_it_is_to_be_plain(tmp_path, capsys):
  source = write(tmp_path / 'in.jsonl', [[{'role': 'user', 'content': 'A </s> dog.'}]])
  assert run(source, tmp_path / 'out.jsonl', '--plain-chat') == 1
  assert 'line 1: message 0 contains </s>' in capsys.readouterr().err


@pytest.mark.full
def test_a_file_that_is_there_is_kept_unless_told(tmp_path, capsys):
  source, output = write(tmp_path / 'in.jsonl', ['A dog runs.']), tmp_path / 'out.jsonl'
  output.write_text('mine')
  assert run(source, output) == 1 and output.read_text() == 'mine'
  assert run(source, output, '--overwrite') == 0 and len(rows(output)) == 1
  capsys.readouterr()
  for other in (source, tmp_path / 'in.jsonl.part'):
    if other != source:
      source.rename(other)
    read = other.read_text()
    assert run(other, source, '--overwrite') == 1 and other.read_text() == read
    assert f'{other} is the input: name another output' in capsys.readouterr().err


def test_an_output_that_is_a_link_stays_one(tmp_path, monkeypatch, capsys):
  source, target = write(tmp_path / 'in.jsonl', ['A dog runs.']), tmp_path / 'elsewhere' / 'out.jsonl'
  target.parent.mkdir()
  link = tmp_path / 'link.jsonl'
  link.symlink_to(target)
  assert run(source, link) == 0 and link.is_symlink() and len(rows(target)) == 1  # it dangled
  target.write_text('mine')
  assert run(source, link) == 1 and target.read_text() == 'mine'
  assert run(source, link, '--overwrite') == 0 and link.is_symlink() and len(rows(target)) == 1
  capsys.readouterr()
  monkeypatch.setattr(sys, 'stdout', None)
  assert run(source, '-') == 1 and says(capsys.readouterr().err, 'standard output is closed')


def test_an_output_that_appears_meanwhile_is_kept_and_so_are_the_rows(tmp_path, capsys):
  source, output = write(tmp_path / 'in.jsonl', ['A dog runs.']), tmp_path / 'out.jsonl'

  def slow(*args, **kwargs):
    yield from speccascade.stream(*args, **kwargs)
    output.write_text('mine')

  assert run(source, output, stream=slow) == 1 and output.read_text() == 'mine'
  assert 'out.jsonl was written meanwhile, and' in capsys.readouterr().err
  output.unlink()
  assert run(source, output) == 0 and len(rows(output)) == 1


def test_faults_make_the_exit_code_and_those_of_before_are_counted(tmp_path, capsys):
  source, output = write(tmp_path / 'in.jsonl', ['A dog runs.'] * 3), tmp_path / 'out.jsonl'

  def faulty(*args, skip, **kwargs):
    if skip:
      yield from speccascade.stream(*args, skip=skip, **kwargs)
    else:
      for i, row in speccascade.stream(*args, **kwargs):
        yield i, dataclasses.replace(row, fault='example 0: broken', finish_reason='fault')
        break
      raise KeyboardInterrupt

  assert run(source, output, stream=faulty) == 130
  assert run(source, output, stream=faulty) == 1
  assert '1 of 3 rows ended as faults. example 0: broken' in capsys.readouterr().err
  assert [row['finish_reason'] == 'fault' for row in rows(output)].count(True) == 1


def test_pipes_and_gzipped_files_are_read_and_written(tmp_path, capsys):
  source, output = write(tmp_path / 'in.jsonl', ['A dog runs.']), tmp_path / 'out.jsonl'
  assert run(source, output) == 0
  expected = rows(output)
  (tmp_path / 'in.jsonl.gz').write_bytes(gzip.compress(source.read_bytes() + b'\n\n'))  # and blank lines at the end
  assert run(tmp_path / 'in.jsonl.gz', tmp_path / 'again.jsonl') == 0
  assert run(tmp_path / 'in.jsonl.gz', tmp_path / 'again.jsonl.gz') == 0
  assert gzip.decompress((tmp_path / 'again.jsonl.gz').read_bytes()) == (tmp_path / 'again.jsonl').read_bytes()
  assert rows(tmp_path / 'again.jsonl') == expected
  capsys.readouterr()
  before = os.dup(0)
  with open(source) as file:
    os.dup2(file.fileno(), 0)
  try:
    assert run('-', '-') == 0
  finally:
    os.dup2(before, 0)
    os.close(before)
  assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  reader = subprocess.Popen(['cat', str(pipe)], stdout=subprocess.PIPE, text=True)
  assert run(source, pipe) == 0
  assert [json.loads(line) for line in reader.communicate()[0].splitlines()] == expected


def test_a_pipe_or_a_device_is_written_into_and_not_replaced(tmp_path):
  storage.check_writable(Path(os.devnull))
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  reader = subprocess.Popen(['cat', str(pipe)], stdout=subprocess.PIPE, text=True)
  storage.write(pipe, 'a')
  assert pipe.is_fifo() and reader.communicate()[0] == 'a'


def test_two_processes_do_not_write_one_file(tmp_path):
  with lines.opened(tmp_path / 'x', {lines.MARK: '1'}, []):
    with pytest.raises(RuntimeError, match='another process'), lines.opened(tmp_path / 'x', {lines.MARK: '1'}, []):
      pass


@pytest.mark.parametrize(
  'line, said',
  [
    ('{"prompt": "a", "temprature": 1}', "line 2: a request has no field 'temprature'; there are prompt, max_new"),
    ('{"stop": "a"}', 'line 2: a request needs a prompt'),
    ('A dog.', 'line 2: not JSON'),
    ('', 'line 2: not JSON'),
    ('[' * 100_000, 'line 2: its brackets are nested too deep'),
    ('{"prompt": "a", "n": 1, "n": 2}', "line 2: the key 'n'"),
    ('{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', 'line 2: logit_bias has the token 5 twice'),
    ('{"prompt": "a", "chat_template_kwargs": []}', 'line 2: chat_template_kwargs=[] is not an object'),
    ('{"prompt": "a", "chat_template_kwargs": {}}', 'line 2: the prompt: chat_template_kwargs={} is for chat messages'),
    ('3', 'line 2: prompt=3 is not a text, token ids or chat messages'),
    ('{"prompt": "a", "temperature": "hot"}', "line 2: temperature='hot' is not a number"),
    ('{"prompt": "a", "temperature": -1}', 'line 2: the prompt: Sampler: temperature=-1'),
    ('{"prompt": "a", "top_k": true}', 'line 2: top_k=True is not a number'),
    ('{"prompt": "a", "stop": 3}', 'line 2: stop=3 is not a text or a list'),
    ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias has 'x', not a token id"),
    ('{"prompt": "a", "logit_bias": {"٥": 1}}', "line 2: logit_bias has '٥', not a token id"),
    ('{"prompt": "a", "logit_bias": {"5000": 1}}', 'line 2: the prompt: logit_bias has 5000'),
    ('{"prompt": "a", "n": 0}', 'line 2: n=0'),
    ('[]', 'line 2: the prompt is empty'),
    ('[7000]', 'line 2: the prompt has values that are not token ids'),
    ('[{"role": "user", "content": "a"}]', 'chat_template.jinja'),
  ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, capsys, line, said):
  source = tmp_path / 'in.jsonl'
  source.write_text(f'"A dog."\n{line}\n"A cat."\n')
  assert run(source, tmp_path / 'out.jsonl') == 1
  error = capsys.readouterr().err
  assert said in error and error.count('\n') == 1
  assert not (tmp_path / 'out.jsonl.part').exists()


def test_settings_make_the_method_that_they_name():
  make = lambda *more: options.method(command._parser().parse_args([*MODELS, *more, 'in', 'out']), 2)
  assert str(make('--block', '4')) == str(methods.speculative(block=4))
  assert str(make('--method', 'cos(blocks=(5, 1))', '--rule', 'weighted:.5,.5')) == str(
    methods.cos(options.rule('weighted:.5,.5'), (5, 1))
  )
  assert str(make('--method', 'ensemble', '--rule', 'contrastive:0.1')).count('score') == 2
  assert make('--method', 'autoregressive(model=1)').slots == (1,)


@pytest.mark.long
def test_a_killed_process_leaves_rows_and_the_next_one_ends_the_file(tmp_path):
  source, part = write(tmp_path / 'in.jsonl', REQUESTS[:9] * 10), tmp_path / 'out.jsonl.part'
  line = [sys.executable, '-m', 'speccascade.decode', *MODELS, *OPT, str(source)]
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  process = subprocess.Popen([*line, str(tmp_path / 'out.jsonl')], env=env, stderr=subprocess.DEVNULL)
  while process.poll() is None and not (part.exists() and len(part.read_bytes().splitlines()) > 5):
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert part.exists() and 5 < len(part.read_bytes().splitlines()) < 91
  for name in ('out.jsonl', 'whole.jsonl'):
    assert command.main([*line[3:], str(tmp_path / name)]) == 0
  assert (tmp_path / 'out.jsonl').read_bytes() == (tmp_path / 'whole.jsonl').read_bytes()
