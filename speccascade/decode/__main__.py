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
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys
from typing import Any

import jax

from speccascade import __version__, rules
from speccascade.decode import lines, options, stream
from speccascade.engine import inputs, requests, validate
from speccascade.host import commands, progress, storage


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
  output = lines.STDOUT if args.output == '-' else storage.local(args.output)
  lines.check_output(source, output, args.overwrite)
  method = options.method(args, len(args.models))
  validate.check_method(method, len(args.models))
  sampler = options.sampler(args)
  text = lines.read_text(source)
  asked = lines.parse(source, text)
  header = _header(args, options.digests(args), text)
  models = options.load_models(args)
  if args.plain_chat and models[-1].tokenizer is not None:
    models[-1] = models[-1].replace(tokenizer=dataclasses.replace(models[-1].tokenizer, plain_chat=True))
  call = dict(max_new_tokens=args.max_new_tokens, sampler=sampler, seed=args.seed)
  inputs.check_models(method, models)
  lines.check_requests(source, method, models, asked, call, args.max_prompt_tokens)
  names = [(index, sample) for index, request in enumerate(asked) for sample in range(request.n)]
  with lines.opened_output(output, header, names) as rows:
    sizes = dict(batch_size=args.batch_size, max_prompt_tokens=args.max_prompt_tokens)
    _decode(rows, names, method, models, asked, **call, **sizes)
    rows.finish(args.overwrite)
  if rows.faults:
    print(f'{len(rows.faults)} of {len(names)} rows ended as faults. {rows.faults[0]}', file=sys.stderr)
  return 1 if rows.faults else 0


def _decode(output, names: Sequence[tuple[int, int]], method, models, asked: Sequence[requests.Request], **settings):
  """Decode the rows that are not there yet."""
  done = {i for i, name in enumerate(names) if name in output.done}
  bar = progress.Progress('decode', len(names), len(done), unit='texts')
  if len(done) < len(names):
    for i, row in stream(method, models, asked, skip=done, **settings):
      output.add(lines.record(row, *names[i]))
      bar.add(1)


def _header(args: argparse.Namespace, digests: list[str], text: str) -> dict[str, Any]:
  """Return what has to be the same for a run to go on."""
  leave = {'input', 'output', 'overwrite', 'debug', 'compilation_cache', 'models', 'rule', 'plan', 'mesh'}
  settings = {name: value for name, value in vars(args).items() if name not in leave}
  rule = args.rule and [rules.name_of(args.rule), getattr(args.rule, 'keywords', {})]
  settings |= {'plan': storage.digest(storage.local(args.plan).read_bytes())} if args.plan else {}
  made = {lines.MARK: __version__, 'device': jax.devices()[0].device_kind}
  return made | {'models': digests, 'input': storage.digest(text.encode()), 'rule': rule, **settings}


if __name__ == '__main__':
  sys.exit(main())
