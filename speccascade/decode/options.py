"""The options that commands share: one name, one help and one default for one thing. Dashes and underscores are one."""

import argparse
from collections.abc import Sequence
import inspect
from typing import Any

from speccascade import checkpoints, methods, rules, sampling
from speccascade.backends import sharding
from speccascade.engine.method import Strategy
from speccascade.host import commands, storage
from speccascade.host.errors import RunError
from speccascade.models import translation
from speccascade.sv.verification import COUNTS
from speccascade.types import Combiner, Model, Rule

_FROM_PYTHON = {'sequence_cascade', 'by_batch'}  # which need a function or other methods
METHODS = [
  name
  for name, made in vars(methods).items()
  if inspect.isfunction(made) and made.__module__ == methods.__name__ and name[0] != '_' and name not in _FROM_PYTHON
]
LONGEST = 256  # γ that may be planned
SETTINGS = ('model', 'rule', 'block', 'blocks', 'max_draft', 'fallback', 'rollback', 'plan', 'goodput')


# ---- values ----


def rule(text: str) -> Rule | Combiner:
  """Return the rule or combiner of a text, as of `rules.find`: opt:0.1, opt(alpha=0.1), my_rules:mine(alpha=0.3)."""
  try:
    found = rules.find(text)
    rules.bind_combiner(found)
  except (ValueError, TypeError, SyntaxError) as error:
    raise argparse.ArgumentTypeError(f'{text}: {error}') from None
  return found


def mesh(text: str) -> dict[str, int]:
  """Return {axis: devices} of 'data=1,model=4'."""
  try:
    return {name: int(count) for name, count in (item.split('=') for item in text.split(','))}
  except ValueError:
    raise argparse.ArgumentTypeError(f"'{text}' is not like data=1,model=4") from None


def pair(text: str) -> tuple[str, str]:
  """Return (name, value) of 'NAME=VALUE'."""
  name, equals, value = text.removeprefix('--').partition('=')
  if not equals:
    raise argparse.ArgumentTypeError(f"'{text}' is not like NAME=VALUE")
  return name, value


def spans(text: str) -> tuple[int, ...]:
  """Return the whole numbers of '1-8' or '1,3,5', ascending."""
  numbers: set[int] = set()
  for item in text.split(','):
    low, _, high = item.partition('-')
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
      raise argparse.ArgumentTypeError(f'{text!r} is no list of whole numbers from 1 on, as in 1-8 or 1,3,5')
    if int(high or low) > LONGEST:
      raise argparse.ArgumentTypeError(f'{text!r} is more than {LONGEST}, the longest draft; give smaller numbers')
    numbers |= set(range(int(low), int(high or low) + 1))
  return tuple(sorted(numbers))


# ---- models ----


def add_models(parser: commands.Parser, *, positional: bool = False):
  """Let a command take checkpoints, after `--models` or as positional arguments; `load_models` loads them."""
  text = 'checkpoints, the drafter first and the verifier last; FOLDER@4 is the first four layers of FOLDER'
  if positional:
    parser.add_argument('models', nargs='*', metavar='MODEL', help=text)
    parser.add_argument('--models', nargs='+', dest='models_option', metavar='MODEL', help='the same as an option')
  else:
    parser.add_argument(
      '--models', nargs='+', required=True, metavar='MODEL', help=f'{text}; another option or -- ends them'
    )
  parser.add_argument('--dtype', choices=checkpoints.DTYPES, help='of the models (as stored; float32 on a CPU)')
  about = "let models with another vocabulary draft with the last one's tokens"
  parser.add_argument('--translate', action='store_true', help=about)
  add_mesh(parser)


def add_mesh(parser: argparse._ActionsContainer):
  """Let a command take the shape of a mesh."""
  parser.add_argument('--mesh', type=mesh, help='devices by axis, as in data=1,model=4 (one device)')


def models(args: argparse.Namespace) -> list[str]:
  """Return the paths of the models, positional or after `--models`."""
  return args.models or getattr(args, 'models_option', None) or []


def digests(args: argparse.Namespace) -> list[str]:
  """Return the digests of the checkpoints; a path without one is an error, before anything is loaded."""
  return [checkpoints.digest(path) for path in models(args)]


def settings(args: argparse.Namespace, but: Sequence[str]) -> dict[str, Any]:
  """Return the options other than `but` as JSON, a rule by its name and numbers, a plan by its content."""
  given = {name: value for name, value in vars(args).items() if name not in but}
  if args.rule:
    given['rule'] = rules.spelled(args.rule)
    if source := rules.source(args.rule):
      given['source of the rule'] = storage.digest(source.encode())
  if args.plan:
    given['plan'] = storage.digest(storage.local(args.plan).read_bytes())
  return given


def load_models(args: argparse.Namespace) -> list[Model]:
  """Return the models on the mesh that was asked for."""
  where = None if args.mesh is None else sharding.mesh(args.mesh)
  loaded = checkpoints.load_all(models(args), dtype=args.dtype, mesh=where)
  return translation.for_the_last(loaded) if args.translate else loaded


# ---- sampler and sizes ----


def add_sampler(parser: argparse._ActionsContainer):
  """Let a command take the numbers of a sampler, which `sampler` makes of them, and a seed."""
  for name in sampling.NEUTRAL:
    kind = int if name == 'top_k' else float
    text = '0 is greedy (1)' if name == 'temperature' else 'as of speccascade.Sampler (off)'
    parser.add_argument(f'--{name}', type=kind, help=text)
  coupling = 'gumbel: the text is the same whatever drafts, and fewer drafted tokens are accepted (maximal)'
  parser.add_argument('--coupling', choices=sampling.COUPLINGS, default='maximal', help=coupling)
  parser.add_argument('--seed', type=int, default=0, help='of the random numbers (0)')


def sampler(args: argparse.Namespace) -> sampling.Sampler:
  """Return the sampler of the numbers that were given."""
  numbers = {name: x for name in sampling.NEUTRAL if (x := getattr(args, name)) is not None}
  return sampling.Sampler(**numbers, coupling=args.coupling)


def add_max_new_tokens(parser: argparse._ActionsContainer, default: int = 128):
  """Let a command take the most new tokens of a text."""
  parser.add_argument('--max_new_tokens', type=commands.count, default=default, help=f'of a sequence ({default})')


def add_batch_size(parser: argparse._ActionsContainer, default: int = 16):
  """Let a command take the number of rows that are decoded at once."""
  parser.add_argument('--batch_size', type=commands.count, default=default, help=f'rows decoded at once ({default})')


# ---- methods ----


def add_method(parser: argparse._ActionsContainer):
  """Let a command take a method of `speccascade.methods` with its settings, which `method` makes of them."""
  text = f'{", ".join(METHODS)} (speculative, or planned with --plan)'
  parser.add_argument('--method', choices=METHODS, help=text, metavar='NAME')
  parser.add_argument('--rule', type=rule, help='a rule or combiner: opt:0.1, weighted:.5,.5, my_rules:mine(alpha=0.3)')
  parser.add_argument('--block', type=commands.count, help='γ, the block size (5)')
  parser.add_argument('--blocks', type=commands.counts, help='of cos: γ of each model, as in 5,1')
  parser.add_argument('--model', type=int, help='of autoregressive: the number of the model, from 0')
  parser.add_argument('--max_draft', type=commands.count, help='of token_cascade and bild: the longest draft (10)')
  parser.add_argument('--fallback', type=float, help='of bild: the confidence under which a draft ends (0.5)')
  parser.add_argument('--rollback', type=float, help='of bild: the largest D(q, p) of an accepted token (2)')
  parser.add_argument('--plan', metavar='FILE', help='of planned, sv and sv_exact: a file of speccascade.plan')
  parser.add_argument('--goodput', choices=COUNTS, help='of sv and sv_exact: what they count over the time (tokens)')


def method(args: argparse.Namespace, count: int, settings: Sequence[str] = SETTINGS) -> Strategy:
  """Return the method that was asked for, of so many models; `args.method` names it."""
  name = args.method = args.method or ('planned' if args.plan else 'speculative')
  make = getattr(methods, name)
  takes = inspect.signature(make).parameters
  given = {key: value for key in settings if (value := getattr(args, key)) is not None}
  if 'combiner' in takes and 'rule' in given:
    given['combiner'] = given.pop('rule')
  option = lambda key: '--rule' if key == 'combiner' else f'--{key}'
  for key in given.keys() - takes.keys():
    known = [option(n) for n in takes if n in settings or n == 'combiner']
    raise RunError(f'{name} takes no {option(key)}; it takes {" and ".join(known)}.')
  for key, parameter in takes.items():
    if parameter.default is parameter.empty and key not in given:
      raise RunError(f'{name} needs {option(key)}; see --help.')
  return make(**given, **({'models': count} if 'models' in takes else {}))
