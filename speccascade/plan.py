"""Find the fastest method and γ at each batch size, or why speculation will not pay: measure, predict, and try.

  python -m speccascade.plan SMALL LARGE --prompts FILE --rule opt:0.1
  python -m speccascade.plan DRAFT COMPANION TARGET --prompts FILE --batches 1,8,32 --out plan.json
  python -m speccascade.plan SMALL LARGE --prompts FILE --topology v6e:2x4 --mesh model=8 --dtype bfloat16

The plan that is saved goes to `speccascade.decode --plan` and, in Python and gin, to `methods.planned('plan.json')`,
which decode each batch by the fastest method for its size; of three models also to `methods.sv_exact('plan.json')`.
With --predictor margin the plan also serves `methods.scheduled(predictors.margin, plan='plan.json')`.

With --topology it is a plan for TPUs that are not here: acceptance is measured on this machine, and rounds are compiled
for those chips and simulated, with the models' dtype.
"""

import argparse
from collections.abc import Sequence
import json
import sys

from speccascade import rules, sampling
from speccascade.data import files, sources
from speccascade.decode import lines, options
from speccascade.engine.requests import Request
from speccascade.host import commands, storage
from speccascade.host.errors import RunError
from speccascade.planning import engines
from speccascade.planning.elsewhere import Elsewhere
from speccascade.planning.planner import plan
from speccascade.sv import predictors


def main(argv: Sequence[str] | None = None) -> int:
  """Load the models, plan, print and save; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.plan', __doc__)
  options.add_models(parser, positional=True, apart=False)
  about = 'a text file, a prompt a line; or requests as of speccascade.decode, all of one sampler, if its name ends '
  about += 'in .jsonl; .gz or not'
  parser.add_argument('--prompts', metavar='INPUT', required=True, help=about)
  about = "of JSON lines of any kind: a field, or a template: 'Question: {question}\\nAnswer:'"
  parser.add_argument('--prompt_field', help=about)
  parser.add_argument('--count', type=commands.count, default=32, help='how many of the prompts are used (32)')
  parser.add_argument('--blocks', type=options.spans, default=tuple(range(1, 9)), help='γ to plan, as in 1,3,5 (1-8)')
  parser.add_argument('--batches', type=commands.counts, default=(1,), help='rows decoded at once, as in 1,8,32 (1)')
  about = 'a cascade or combiner to plan too, as in opt:0.1 or weighted:.5,.5; may repeat'
  parser.add_argument('--rule', type=_named_rule, action='append', default=[], help=about)
  about = 'schedule verification by it too: margin, max_q, drawn_q or MODULE:NAME; may repeat'
  signal = options.named(predictors.find)
  parser.add_argument('--predictor', dest='predictors', type=signal, action='append', default=[], help=about)
  about = 'plan plain speculative decoding with so many leaves too, as in 5,10'
  parser.add_argument('--leaves', type=commands.counts, default=(), help=about)
  options.add_max_new_tokens(parser, 64)
  options.add_sampler(parser)
  parser.add_argument('--trials', type=int, default=3, help='timings of each run; with 0 the prediction chooses (3)')
  about = 'plan for such TPUs, as v6e:2x4, of which --mesh has the axes, as model=8 (the devices here)'
  parser.add_argument('--topology', help=about)
  about = 'seconds after which only what a plan cannot do without is begun; 0 for no limit (60; with --topology 0)'
  parser.add_argument('--budget', type=_seconds, metavar='SECONDS', help=about)
  parser.add_argument('--out', metavar='FILE', help='save the plan')
  about = (
    'take the acceptance of plain speculative decoding from records of an engine, or of lines of speccascade.decode'
  )
  parser.add_argument('--acceptance', metavar='FILE', help=about)
  about = 'print for each method the --speculative-config by which vLLM times the measured acceptance without a drafter'
  parser.add_argument('--export', choices=('vllm',), help=about)
  parser.add_argument('--overwrite', action='store_true', help='replace FILE')
  return parser


def _seconds(text: str) -> float:
  """Return a number of seconds."""
  try:
    seconds = float(text)
  except ValueError:
    seconds = -1.0
  if not 0 <= seconds < float('inf'):
    raise argparse.ArgumentTypeError(f'{text!r} is no number of seconds, as in 60, or 0 for no limit')
  return seconds


def _named_rule(text: str):
  found = options.rule(text)
  return rules.spelled(found), found


def _prompts(path: str, field: str | None, count: int) -> list:
  if field is None and path.removesuffix('.gz').endswith('.jsonl'):
    text = files.read_text(path)
    try:
      return lines.parse(path, text)[:count]
    except ValueError as error:
      raise RunError(f'{error}; objects of another kind need --prompt_field.') from None
  return files.texts(path, field and field.replace('\\n', '\n'), count)


def _sampler(prompts: Sequence, sampler: sampling.Sampler) -> sampling.Sampler:
  """Return the sampler with the numbers that the requests have of their own, which are the same in all of them."""
  own = {}  # the first request with each
  for number, prompt in enumerate(prompts, 1):
    own.setdefault(prompt.sampled_by(sampler) if isinstance(prompt, Request) else sampler, number)
  if len(own) > 1:
    (one, first), (other, second) = list(own.items())[:2]
    name = next(n for n in sampling.NEUTRAL if getattr(one, n) != getattr(other, n))
    raise RunError(
      f'line {first} has {name}={getattr(one, name)} and line {second} {getattr(other, name)}; a plan is of one '
      'sampler: plan the lines of each by themselves.'
    )
  return next(iter(own), sampler)


def _run(args: argparse.Namespace):
  if (count := len(options.models(args))) not in (2, 3):
    raise RunError(f'give two models, or three with a companion in the middle, not {count}.')
  out = storage.output_file(storage.local(args.out), args.overwrite) if args.out else None
  for predictor in args.predictors if args.out else ():
    predictors.check_declared(predictors.spelled(predictor))
  prompts = _prompts(args.prompts, args.prompt_field, args.count)
  sampler = _sampler(prompts, options.sampler(args))
  rates = None if args.acceptance is None else engines.acceptance(args.acceptance)
  where = None
  if args.topology is not None:
    where = Elsewhere(args.topology, args.mesh)
    args.mesh = None  # models lie on one device here
  options.digests(args)
  settings = {name: getattr(args, name) for name in ('blocks', 'batches', 'leaves', 'max_new_tokens', 'seed', 'trials')}
  default = 60.0 if where is None else 0.0
  settings |= dict(where=where, budget=(default if args.budget is None else args.budget) or None)
  settings |= dict(sampler=sampler, rules=dict(args.rule), predictors=args.predictors, acceptance=rates)
  data = sources.resolve(args.prompts).name
  report = plan(options.load_models(args), prompts, data=data, progress=True, **settings)
  if out is not None:
    report.save(out)
  print(report)
  for name, config in report.vllm().items() if args.export else ():
    print(f'\n{name}:\n{json.dumps(config)}')


if __name__ == '__main__':
  sys.exit(main())
