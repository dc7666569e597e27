"""Decode prompts from a file of JSON lines into another: a line a prompt, a line an answer.

  python -m speccascade.decode --models SMALL LARGE --method speculative --rule opt:0.1 --block 5 in.jsonl out.jsonl
  python -m speccascade.decode --models SMALL LARGE --plan plan.json in.jsonl out.jsonl

A line of the input is a text in quotes, a list of token ids or of chat messages, or an object with the fields of
speccascade.Request: {"prompt": "Hello.", "stop": ["\\n"], "temperature": 0.7, "n": 2}. What it leaves out is as the
options say. A line of the output has index (the input's lines from 0), sample, text, tokens, finish_reason, and the
calls by model, rounds and tokens emitted that it took. Rows are kept in OUTPUT.part as they end; the same command goes
on where it was stopped, and OUTPUT, in the order of the input, is there when all is done. Written to - or a pipe, rows
come as they end and are not kept. The exit code is 1 where a row has a fault, which it says under "fault".
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import gzip
import hashlib
from pathlib import Path
import sys
from typing import Any
import zlib

import jax

from speccascade import __version__, rules
from speccascade.decode import lines, options, stream
from speccascade.engine import inputs, plans, requests, validate
from speccascade.host import commands, progress, storage
from speccascade.host.errors import RunError

STDOUT = Path('/dev/stdout')


def main(argv: Sequence[str] | None = None) -> int:
  """Decode a file; return the exit code."""
  return commands.run(_parser(), _run, argv, 'stopped; the same command goes on with the rows that are missing')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.decode', __doc__)
  parser.add_argument('input', metavar='INPUT', help='JSON lines, also as .gz; - is standard input')
  parser.add_argument('output', metavar='OUTPUT', help='the file to write; - is standard output')
  options.add_models(parser)
  parser.add_argument('--overwrite', action='store_true', help='replace OUTPUT')
  options.add_method(parser.add_argument_group('the method, of speccascade.methods'))
  call = parser.add_argument_group('what requests leave out')
  options.add_max_new_tokens(call)
  options.add_sampler(call)
  call.add_argument('--plain_chat', action='store_true', help='refuse chat messages that hold special tokens, as </s>')
  size = parser.add_argument_group('sizes; more rows than a batch has are queued')
  options.add_batch_size(size)
  size.add_argument('--max_prompt_tokens', type=commands.count, help='the padded length of prompts (the longest one)')
  return parser


def _run(args: argparse.Namespace) -> int:
  source = Path('/dev/stdin') if args.input == '-' else storage.local(args.input)
  output = STDOUT if args.output == '-' else storage.local(args.output)
  _check_output(source, output, args.overwrite)
  method = options.method(args, len(args.models))
  validate.check_method(method, len(args.models))
  sampler = options.sampler(args)
  text = _text(source)
  asked = lines.parse(source, text)
  header = _header(args, options.digests(args), text)
  models = options.load_models(args)
  if args.plain_chat and models[-1].tokenizer is not None:
    models[-1] = models[-1].replace(tokenizer=dataclasses.replace(models[-1].tokenizer, plain_chat=True))
  call = dict(max_new_tokens=args.max_new_tokens, sampler=sampler, seed=args.seed)
  inputs.check_models(method, models)
  _check(source, method, models, asked, call, args.max_prompt_tokens)
  names = [(index, sample) for index, request in enumerate(asked) for sample in range(request.n)]
  with _opened(output, header, names) as rows:
    sizes = dict(batch_size=args.batch_size, max_prompt_tokens=args.max_prompt_tokens)
    _decode(rows, names, method, models, asked, **call, **sizes)
    rows.finish(args.overwrite)
  if rows.faults:
    print(f'{len(rows.faults)} of {len(names)} rows ended as faults. {rows.faults[0]}', file=sys.stderr)
  return 1 if rows.faults else 0


def _check_output(source: Path, output: Path, overwrite: bool):
  """Raise where the output would take the place of a file that is to stay."""
  if output.is_dir():
    raise RunError(f'{output} is a folder: name a file in it.')
  for path in (output, output.with_name(f'{output.name}.part')):
    if path.is_file() and source.exists() and path.samefile(source):
      raise RunError(f'{path} is the input: name another output.')
  if output.exists() and not overwrite and not _is_stream(output):
    raise RunError(f'{output} is there already: remove it, name another file, or give --overwrite.')


def _is_stream(path: Path) -> bool:
  """Tell whether a path is standard output, a pipe or a device, of which nothing can be read again."""
  return path == STDOUT or path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def _opened(output: Path, header: dict[str, Any], names: Sequence) -> Iterator[lines.File | lines.Stream]:
  """Yield what rows are written to."""
  if output == STDOUT:
    yield lines.Stream(sys.stdout.buffer)
  elif _is_stream(output):
    with open(output, 'wb') as file:
      yield lines.Stream(file)
  else:
    with lines.opened(output, header, names) as rows:
      yield rows


def _decode(output, names: Sequence[tuple[int, int]], method, models, asked: Sequence[requests.Request], **settings):
  """Decode the rows that are not there yet."""
  done = {i for i, name in enumerate(names) if name in output.done}
  bar = progress.Progress('decode', len(names), len(done), unit='texts')
  if len(done) < len(names):
    for i, row in stream(method, models, asked, skip=done, **settings):
      output.add(lines.record(row, *names[i]))
      bar.add(1)


def _text(path: Path) -> str:
  if path.is_dir() or not path.exists():
    raise FileNotFoundError(f'{path}: no such file; give the path of JSON lines.')
  data = path.read_bytes()
  try:
    return (gzip.decompress(data) if data[:2] == b'\x1f\x8b' else data).decode('utf-8-sig')
  except (OSError, EOFError, zlib.error) as e:
    raise ValueError(f'{path}: a damaged gzip file ({e}); compress it again.') from None
  except UnicodeDecodeError as e:
    raise ValueError(f'{path}: not UTF-8 ({e}); convert the file, as with iconv.') from None


def _check(path: Path, method, models, asked: Sequence[requests.Request], call: dict[str, Any], longest: int | None):
  """Raise for the first line whose request cannot be decoded."""
  for number, request in enumerate(asked, 1):
    try:
      found = requests.rows(models, request, **call)
      inputs.check_fits(models, found, longest)
      for row in found:
        plans.check_sampler(method.origin, row.sampler)
    except ValueError as e:
      raise ValueError(f'{path}, line {number}: {str(e).replace("prompt 0", "the prompt", 1)}') from None


def _header(args: argparse.Namespace, digests: list[str], text: str) -> dict[str, Any]:
  """Return what has to be the same for a run to go on."""
  leave = {'input', 'output', 'overwrite', 'debug', 'compilation_cache', 'models', 'rule', 'plan', 'mesh'}
  settings = {name: value for name, value in vars(args).items() if name not in leave}
  rule = args.rule and [rules.name_of(args.rule), getattr(args.rule, 'keywords', {})]
  settings |= {'plan': hashlib.sha256(storage.local(args.plan).read_bytes()).hexdigest()[:16]} if args.plan else {}
  made = {lines.MARK: __version__, 'device': jax.devices()[0].device_kind}
  return made | {'models': digests, 'input': hashlib.sha256(text.encode()).hexdigest()[:16], 'rule': rule, **settings}


if __name__ == '__main__':
  sys.exit(main())
