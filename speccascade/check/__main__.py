"""Check your own rule, combiner, method or model, in seconds, or the speculative sampler of any program.

  python -m speccascade.check my_rules:mine --alpha 0 0.3 0.7
  python -m speccascade.check 'my_combiners:geometric(power=0.5)'
  python -m speccascade.check 'speculative(rule=opt:0.1, block=2, policy=my_policies:Entropy(limit=1.2))'
  python -m speccascade.check my_network:model
  python -m speccascade.check --sampler my_engine:verify
  python -m speccascade.check --samples samples.jsonl

A rule, a combiner or a method, tried on toy models, is given by its name; a module is of the current folder or an
installed one. So is a `speccascade.Model`, whose logits in windows are compared with those token by token.

A sampler is a function `verify(tokens [K], q [K, V], p [K + 1, V], rng)` that returns the tokens that it emits. One
with parameters `temperature`, `top_k` or `top_p` is asked to apply them to p, with --rows to each row its own; one with
`lengths` is given rows without a draft.

Samples are objects {"token": …, "top_logprobs": {TOKEN: LOGPROB}}, or responses in the form of OpenAI, a line each, of
any server. Their log-probabilities have to be those after temperature, top-p and top-k: start vLLM with
`--logprobs-mode processed_logprobs`.
"""

import argparse
from collections.abc import Sequence
import inspect
from pathlib import Path
import sys
from typing import Any

from speccascade import acceptance, methods, rules, stopping
from speccascade.check import enumeration
from speccascade.check.sampler import judge, samples
from speccascade.engine.method import Strategy
from speccascade.host import commands, names
from speccascade.host.errors import RunError
from speccascade.sv import verification
from speccascade.types import Model


def main(argv: Sequence[str] | None = None) -> int:
  """Check and print the report; return the exit code, 1 where something is wrong."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.check', __doc__)
  parser.add_argument(
    'what', nargs='?', metavar='MODULE:NAME', help='my_rules:mine, or of the package opt or bild(max_draft=2)'
  )
  parser.add_argument('--alpha', type=float, nargs='+', help='values of alpha to try (some of 0 … 0.9)')
  sampler = parser.add_argument_group('a sampler, or its samples')
  sampler.add_argument('--sampler', metavar='MODULE:NAME', help='a function that verifies drafted tokens')
  sampler.add_argument('--rng', choices=judge.RNGS, default='generator', help="what its rng is (numpy's generator)")
  sampler.add_argument('--drafts', action='store_true', help='it draws the draft itself: sampler(q, p, rng)')
  sampler.add_argument(
    '--runs', type=commands.count, default=20_000, help='of a case that cannot be enumerated (20000)'
  )
  sampler.add_argument(
    '--samples',
    type=Path,
    metavar='FILE',
    help='JSON lines of tokens and log-probabilities, after temperature and filters: vLLM gives those with '
    '--logprobs-mode processed_logprobs',
  )
  return parser


def _run(args: argparse.Namespace) -> int:
  if sum(x is not None for x in (args.what, args.sampler, args.samples)) != 1:
    raise RunError('give a rule, method or model, or --sampler MODULE:NAME, or --samples FILE.')
  if args.samples is not None:
    report = samples.check_file(args.samples)
  elif args.sampler is not None:
    function = names.find(args.sampler, 'sampler', {}).made()
    report = judge.check_sampler(function, rng=args.rng, drafts=args.drafts, runs=args.runs)
  else:
    report = enumeration.check(_value(args.what), args.alpha, progress=True)
  print(report)
  return 0 if report.ok else 1


def _value(what: str) -> Any:
  """Return what a text names, a rule, a combiner, a method or a model: arguments that a rule has not are a method's."""
  inner = rules.known() | stopping.known() | acceptance.known() | verification.known()
  named = names.find(what, 'rule or method', methods.known() | rules.known(), inner)
  if isinstance(named.value, Strategy | Model):
    return named.value
  parameters = inspect.signature(named.value).parameters.values()
  numbers = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
  of_rule = named.short or not named.called or (named.arguments and named.arguments.keys() <= numbers)
  if of_rule and named.value in methods.known().values():
    raise ValueError(f'{named.name} is neither a rule nor a combiner; it makes a method: call it, as {named.name}(…)')
  if of_rule:
    return rules.find(what)
  return named._replace(value=methods.find(what)).call()


if __name__ == '__main__':
  sys.exit(main())
