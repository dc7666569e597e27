"""Decode prompts from a file of JSON lines into another: a line for each prompt, a line for each output.

  python -m speccascade.decode --models SMALL LARGE --rule opt:0.1 --block 5 -- in.jsonl out.jsonl
  python -m speccascade.decode --models SMALL LARGE --method 'my_methods:mine(block=3)' -- in.jsonl out.jsonl
  python -m speccascade.decode --models SMALL LARGE --plan plan.json in.jsonl out.jsonl

A line of the input is a text in quotes, a list of token ids or of chat messages, or an object with the fields of
speccascade.Request: {"prompt": "Hello.", "stop": ["\\n"], "temperature": 0.7, "n": 2}. The options give what it leaves
out. A line of the output has index (the line of the input, from 0), sample, text, tokens, finish_reason, calls (by
model), rounds and emitted. Lines are written to OUTPUT.part as sequences end; the same command resumes where it was
stopped, and OUTPUT, in the order of the input, exists when all is done. Written to - or a pipe, lines come as sequences
end. The exit code is 1 if a sequence has a fault, whose cause is the field "fault" of its line.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys

from speccascade.data import files
from speccascade.decode import lines, options
from speccascade.engine import validate
from speccascade.host import commands, storage

_OF_NO_ROW = ('imports', 'input', 'output', 'overwrite', 'debug', 'compilation_cache', 'models', 'mesh')  # options


def main(argv: Sequence[str] | None = None) -> int:
  """Decode a file; return the exit code."""
  return commands.run(_parser(), _run, argv, 'stopped; the same command goes on with the rows that are missing')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.decode', __doc__)
  parser.add_argument('input', metavar='INPUT', help='JSON lines, also as .gz; - is standard input')
  parser.add_argument('output', metavar='OUTPUT', help='the file to write, gzipped as .gz; - is standard output')
  options.add_models(parser)
  parser.add_argument('--overwrite', action='store_true', help='replace OUTPUT')
  options.add_method(parser.add_argument_group('the method, of speccascade.methods'))
  call = parser.add_argument_group('what requests leave out')
  options.add_max_new_tokens(call)
  options.add_sampler(call)
  call.add_argument(
    '--plain_chat', action='store_true', help='refuse chat messages that contain special tokens, as </s>'
  )
  about = 'write the log-probability of each token under the distribution that it was drawn from'
  parser.add_argument('--target_logprobs', action='store_true', help=about)
  size = parser.add_argument_group('sizes; more rows than a batch has are queued')
  options.add_batch_size(size)
  size.add_argument('--max_prompt_tokens', type=commands.count, help='the padded length of prompts (the longest one)')
  size.add_argument(
    '--truncate', action='store_true', help='shorten prompts beyond that and the positions of the models'
  )
  return parser


def _run(args: argparse.Namespace) -> int:
  source = Path('/dev/stdin') if args.input == '-' else storage.local(args.input)
  asked = lines.STDOUT if args.output == '-' else storage.local(args.output)
  output = lines.checked_output(source, asked, args.overwrite)
  method = options.method(args, len(args.models))
  validate.check_method(method, len(args.models))
  call = dict(sampler=options.sampler(args), seed=args.seed, max_new_tokens=args.max_new_tokens, truncate=args.truncate)
  text = files.read_text(source)
  requests = lines.parse(source, text)
  header = lines.header(options.digests(args), text, options.settings(args, but=_OF_NO_ROW))
  models = options.load_models(args)
  if args.plain_chat and models[-1].tokenizer is not None:
    models[-1] = models[-1].replace(tokenizer=dataclasses.replace(models[-1].tokenizer, plain_chat=True))
  sizes = dict(batch_size=args.batch_size, max_prompt_tokens=args.max_prompt_tokens)
  sizes |= dict(trace='target') if args.target_logprobs else {}
  lines.check_requests(source, method, models, requests, **call, **sizes)
  with lines.opened_output(output, header, requests) as rows:
    lines.decode_to(rows, method, models, requests, **call, **sizes)
    rows.finish(args.overwrite)
  if rows.faults:
    count = len(lines.names(requests))
    print(f'{len(rows.faults)} of {count} rows ended as faults. {rows.faults[0]}', file=sys.stderr)
  return 1 if rows.faults else 0


if __name__ == '__main__':
  sys.exit(main())
