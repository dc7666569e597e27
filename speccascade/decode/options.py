"""The options that commands share: one name, one help and one default for one thing. Dashes and underscores are one."""

import argparse
from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

from speccascade import acceptance, checkpoints, methods, rules, sampling, stopping
from speccascade.drafters import translation
from speccascade.engine.method import Strategy
from speccascade.host import commands, names, storage
from speccascade.host.errors import RunError
from speccascade.types import Combiner, Model, Rule

_METHODS = [name for name in methods.known() if name != 'by_batch']  # which takes other methods
LONGEST = 256  # γ that may be planned


# ---- values ----


def named(find: Callable[[str], Any]) -> Callable[[str], Any]:
  """Return the type of an option whose value `find` returns by its name."""

  def value(text: str) -> Any:
    try:
      return find(text)
    except (ValueError, TypeError) as error:
      raise argparse.ArgumentTypeError(f'{text}: {error}') from None

  return value


@named
def rule(text: str) -> Rule | Combiner:
  """Return the rule or combiner of a text, as of `rules.find`: opt:0.1, opt(alpha=0.1), my_rules:mine(alpha=0.3)."""
  found = rules.find(text)
  rules.bind_combiner(found)
  return found


def mesh(text: str) -> dict[str, int]:
  """Return {axis: devices} of 'data=1,model=4'."""
  try:
    return {name: int(count) for name, count in (item.split('=') for item in text.split(','))}
  except ValueError:
    wrong = 'has two meshes, where one is taken; give it as --mesh=data=1,model=4' if '/' in text else None
    raise argparse.ArgumentTypeError(f"'{text}' {wrong or 'is not like data=1,model=4'}") from None


def meshes(text: str) -> dict[str, int] | list[dict[str, int]]:
  """Return what `mesh` returns, of each of two in 'data=4/model=4'."""
  found = [mesh(one) for one in text.split('/')]
  return found if len(found) > 1 else found[0]


def dtype(text: str) -> str:
  """Return a text of dtypes that commas separate."""
  if wrong := [name for name in text.split(',') if name not in checkpoints.DTYPES]:
    raise argparse.ArgumentTypeError(f'{wrong[0]!r} is none of {", ".join(checkpoints.DTYPES)}')
  return text


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


def add_models(parser: commands.Parser, *, positional: bool = False, apart: bool = True):
  """Let a command take checkpoints, after `--models` or as positional arguments; `load_models` loads them.

  Drafters may have a mesh of their own where the command can decode so, `apart`.
  """
  text = 'checkpoints, the drafter first and the verifier last; FOLDER@4 is the first four layers of FOLDER'
  if positional:
    parser.add_argument('models', nargs='*', metavar='MODEL', help=text)
    parser.add_argument('--models', nargs='+', dest='models_option', metavar='MODEL', help='the same as an option')
  else:
    parser.add_argument(
      '--models', nargs='+', required=True, metavar='MODEL', help=f'{text}; another option or -- ends them'
    )
  add_dtype(parser, None, 'as stored; float32 on a CPU')
  about = "let models with another vocabulary draft with the last one's tokens"
  parser.add_argument('--translate', action='store_true', help=about)
  two = '; of the drafters and of the verifier in data=4/model=4' if apart else ''
  about = f'devices by axis, as in data=1,model=4{two} (one device)'
  parser.add_argument('--mesh', type=meshes if apart else mesh, help=about)


def add_dtype(parser: argparse._ActionsContainer, default: str | None, by_default: str):
  """Let a command take the dtype of the models."""
  text = f'{", ".join(checkpoints.DTYPES)} (weights alone); of all models, or of each: int8,bfloat16 ({by_default})'
  parser.add_argument('--dtype', type=dtype, default=default, help=text)


def models(args: argparse.Namespace) -> list[str]:
  """Return the paths of the models, positional or after `--models`."""
  return args.models or getattr(args, 'models_option', None) or []


def digests(args: argparse.Namespace) -> list[str]:
  """Return the digests of the checkpoints; a path without one is an error, before anything is loaded."""
  return [checkpoints.digest(path) for path in models(args)]


def settings(args: argparse.Namespace, but: Sequence[str]) -> dict[str, Any]:
  """Return the options other than `but` as JSON: the method as it is spelled, with the source of one's own.

  A plan is known by its content.
  """
  given = {name: value for name, value in vars(args).items() if name not in (*but, *_ARGUMENTS)}
  given['method'] = methods.spelled(args.method)
  own = [*names.sources(args.method), *names.of_modules(args.imports)]
  given |= {f'source of {name}': storage.digest(text.encode()) for name, text in own}
  if plan := args.method.keywords.get('plan'):
    given['plan'] = storage.digest(storage.local(plan).read_bytes())
  return given


def load_models(args: argparse.Namespace) -> list[Model]:
  """Return the models on the mesh that was asked for."""
  loaded = checkpoints.load_all(models(args), dtype=args.dtype, mesh=args.mesh)
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


_ARGUMENTS = ('rule', 'block', 'policy', 'accept', 'plan')  # options that set an argument of the method


def add_method(parser: argparse._ActionsContainer):
  """Let a command take a method by its name, and by options some of its arguments; `method` makes it of them."""
  text = (
    f'NAME, NAME(ARGUMENT=VALUE, …) or MODULE:NAME, as in speculative(rule=opt:0.1, block=5): {", ".join(_METHODS)}'
  )
  parser.add_argument('--method', type=named(methods.find), help=f'{text} (speculative, or planned with --plan)')
  parser.add_argument('--rule', type=rule, help='a rule or combiner: opt:0.1, weighted:.5,.5, my_rules:mine(alpha=0.3)')
  parser.add_argument('--block', type=commands.count, help='γ, the block size (5)')
  policies = ', '.join(stopping.known())
  parser.add_argument(
    '--policy', type=named(stopping.find), help=f'when drafts end: {policies}, as in Heuristic(first=3)'
  )
  acceptors = ', '.join(acceptance.known())
  parser.add_argument('--accept', type=named(acceptance.find), help=f'the acceptor: {acceptors} (token_wise)')
  parser.add_argument('--plan', metavar='FILE', help='of planned, sv, sv_exact, scheduled: a file of speccascade.plan')


def method(args: argparse.Namespace, count: int) -> Strategy:
  """Return the method that was asked for, of so many models; `args.method` is then the call that makes it."""
  make = args.method or methods.find('planned' if args.plan else 'speculative')
  name = make.func.__name__
  takes = inspect.signature(make.func).parameters
  given = {key: value for key in _ARGUMENTS if (value := getattr(args, key)) is not None}
  if 'combiner' in takes and 'rule' in given:
    given['combiner'] = given.pop('rule')
  for key in given:
    option = '--rule' if key == 'combiner' else f'--{key}'
    if key not in takes:
      raise RunError(f'{name} takes no {option}; it takes {", ".join(takes) or "no argument"}.')
    if key in make.keywords:
      raise RunError(f'{name} has {key} twice, as an argument of --method and by {option}; drop one.')
  given |= make.keywords
  for key, parameter in takes.items():
    if parameter.default is parameter.empty and key not in given:
      by_option = {'combiner': 'rule'}.get(key, key)
      option = f'--{by_option}, or --method=' if by_option in _ARGUMENTS else '--method='
      raise RunError(f'{name} needs {key}; give {option}"{name}({key}=…)".')
  made = make.func(**given, **({'models': count} if 'models' in takes and 'models' not in given else {}))
  if not isinstance(made, Strategy):
    raise RunError(f'{name} returns {type(made).__name__}, and no method; return speccascade.methods.Method(…).')
  args.method = functools.partial(make.func, **{key: given[key] for key in takes if key in given})
  return made
