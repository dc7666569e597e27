"""Evaluate a method with the tasks of the lm-evaluation-harness.

  python -m speccascade.integrations.lm_eval --model speccascade --tasks gsm8k --batch_size 16 \\
    --model_args models=DRAFT:TARGET,method=speculative,rule=opt:0.1,block=5

The command is the harness's own, `lm_eval`, with one more model. It needs the extra `lm-eval`. The options of the
harness: python -m speccascade.integrations.lm_eval run --help
"""

from collections.abc import Sequence
import logging
from pathlib import Path
import re
import sys
import textwrap
from typing import Any

import numpy as np

from speccascade import decode, Decoded, Request, sampling
from speccascade.data import tokenizer_formats
from speccascade.decode import options, scoring
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Strategy
from speccascade.host import commands, names
from speccascade.host.errors import RunError
from speccascade.types import checked_int, Model

try:
  from lm_eval import utils
  from lm_eval.__main__ import cli_evaluate
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  import lm_eval.models  # noqa: F401  registers the harness's models, which it does only where there are none
  from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
  raise ImportError(
    f"{error}; pip install 'speccascade[lm-eval]' for the evaluation harness.", name=error.name
  ) from None

_LONGEST = 2048  # the length of texts where no model names its own, as in the harness's Hugging Face model
_UNITS = ('texts', 'tokens', 'rounds', 'verifier_calls', 'drafts_tested', 'drafts_accepted')
_NEUTRAL = [('num_beams', 1), ('top_k', 0)]  # settings of transformers that change nothing
_logger = logging.getLogger(f'lm_eval.{__name__}')  # the harness shows what its own loggers print


@register_model('speccascade')
class SpecCascade(TemplateLM):
  """A method with its models, as the harness calls it.

  Generation is decoding with the method. Log-likelihoods are those of its target distribution; see `scoring.score`.

  Args:
    models: The checkpoints, as DRAFT:TARGET or a list, or loaded models.
    method: The name of a method, as for `speccascade.decode`, or a method.
    batch_size: Rows decoded or scored at once; 'auto' is the default of `speccascade.decode`.
    max_length: The most tokens of a text with its prompt; by default the shortest context of the models.
    max_gen_toks: The most new tokens of a text whose task has no number.
    prefix_token_id: The token that precedes a text without a prompt; by default BOS, or EOS.
    seed: The seed of tasks that sample.
    max_batch_size: Ignored.
    device: Ignored; JAX chooses the device.
    **settings: Other options of `speccascade.decode`, of what is not loaded or made already: rule, block, dtype, ….
  """

  def __init__(
    self,
    models: str | Sequence[str] | Sequence[Model] | None = None,
    method: str | Strategy | None = None,
    *,
    batch_size: int | str | None = None,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    prefix_token_id: int | None = None,
    seed: int = 0,
    max_batch_size: int | None = None,
    device: str | None = None,
    **settings,
  ):
    super().__init__()
    if models is None:
      raise RunError('models is missing: give the checkpoints, as in --model_args models=DRAFT:TARGET.')
    made = isinstance(method, Strategy)
    settings |= {} if made or method is None else {'method': method}
    settings |= {} if batch_size is None or str(batch_size).startswith('auto') else {'batch_size': batch_size}
    loaded = not isinstance(models, str) and all(isinstance(m, Model) for m in models)
    args = _parse(None if loaded else models, settings, made)
    self.models = list(models) if loaded else options.load_models(args)
    self.method = method if made else options.method(args, len(self.models))
    self.models = DecodeJob.of_models(self.method, self.models).models
    self.batch_size = args.batch_size
    self.max_gen_toks = max_gen_toks
    self.seed = seed
    last = self.models[-1]
    if last.tokenizer is None:
      raise RunError(f'{last.name} has no tokenizer, and tasks are texts; add its tokenizer.json or .model.')
    self._texts = last.tokenizer
    self._format = tokenizer_formats.read(last.tokenizer.path)
    self.backend = 'causal' if last.network.start_id is None else 'seq2seq'
    known = [n for m in self.models for n in (m.network.max_positions, m.network.context) if n]
    self.max_length = checked_int('max_length', max_length or min(known, default=_LONGEST), 2)
    self._prefix_token_id = prefix_token_id
    self._counts: dict[str, dict[str, Any]] = {}

  # ---- tokens ----

  @property
  def eot_token_id(self) -> int:
    """The token that ends a text."""
    return (*self.models[-1].network.eos_ids, *self._texts.eos_ids)[0]

  @property
  def prefix_token_id(self) -> int:
    """The token that precedes a text without a prompt."""
    if self._prefix_token_id is not None:
      return self._prefix_token_id
    settings = tokenizer_formats.read_settings(Path(self._texts.path).parent)
    bos = tokenizer_formats.content(settings.get('bos_token'))
    named = (self._format.pieces.index(bos),) if bos in self._format.pieces else ()
    return (*self._format.prefix, *named, self.eot_token_id)[0]

  @property
  def tokenizer_name(self) -> str:
    """The name by which the harness caches requests."""
    return self._texts.path.replace('/', '__')

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    """Return the ids of a text, by default with what precedes and ends one unless the text has it."""
    tokens = self._format.encode(string)
    prefix = list(self._format.prefix)
    if add_special_tokens is None:
      add_special_tokens = not prefix or tokens[: len(prefix)] != prefix
    return [*prefix, *tokens, *self._format.suffix] if add_special_tokens else tokens

  def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Return the text of messages; without the prompt of an answer it ends with the last message, to be continued."""
    text = self._texts.chat_text(chat_history, add_generation_prompt=add_generation_prompt)
    if add_generation_prompt:
      return text
    last = chat_history[-1]['content'].strip()
    return text[: text.rindex(last) + len(last)]

  # ---- requests ----

  def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
    """Return the continuations of prompts, decoded by the method."""
    if not requests:
      return []
    asked = [self._request(*instance.args) for instance in requests]
    how = dict(seed=self.seed, batch_size=self.batch_size, progress=not disable_tqdm)
    out = decode(self.method, self.models, asked, trace='target' if self.method.keeps_distribution else False, **how)
    self._count([instance.task_name for instance in requests], out)
    for instance, text in zip(requests, out.texts, strict=True):
      self.cache_hook.add_partial('generate_until', instance.args, text)
    return out.texts

  def _request(self, context: str, gen_kwargs: dict[str, Any]) -> Request:
    """Return what a task asks for, its prompt shortened from the left to what the models have room for."""
    kwargs = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
    most = kwargs.pop('max_gen_toks')
    until = kwargs.pop('until')
    numbers = {'temperature': 0.0} | kwargs
    if not numbers.pop('do_sample'):
      numbers['temperature'] = 0.0
    numbers = {name: x for name, x in numbers.items() if x is not None and (name, x) not in _NEUTRAL}
    if unknown := numbers.keys() - {*sampling.NEUTRAL, 'min_new_tokens'}:
      raise ValueError(f'generation_kwargs {", ".join(sorted(unknown))} cannot be decoded with; remove them.')
    room = self.max_length - (most if self.backend == 'causal' else 0)
    if room < 1:
      raise ValueError(f'max_gen_toks={most} leaves no room for a prompt in {self.max_length} tokens; ask for fewer.')
    prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
    return Request(prompt, max_new_tokens=most, stop=[text for text in until if text], **numbers)

  def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
    """Return the log-likelihood of each text, in windows of `max_length` tokens."""
    windows = []
    owners = []
    for i, instance in enumerate(requests):
      tokens = self.tok_encode(*instance.args)
      rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
      pairs = [(None, *utils.make_disjoint_window(window)) for window in rolling]
      windows += pairs
      owners += [i] * len(pairs)
    totals = [0.0] * len(requests)
    for i, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
      totals[i] += logprob
    for instance, total in zip(requests, totals, strict=True):
      self.cache_hook.add_partial('loglikelihood_rolling', instance.args, total)
    return totals

  def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
    """Return the log-likelihood of continuations given contexts, and whether greedy decoding writes them."""
    if not requests:
      return []
    contexts = []
    for text, context, continuation in requests:
      if not continuation:
        raise ValueError(f'the continuation {text[1]!r} of a context adds no token to it; correct the task.')
      room = self.max_length + 1 - len(continuation) if self.backend == 'causal' else self.max_length
      if room < 1:
        raise ValueError(f'a continuation has {len(continuation)} tokens, and max_length is {self.max_length}.')
      contexts.append(context[-room:])
    scores = scoring.score(self.method, self.models, contexts, [r[2] for r in requests], batch_size=self.batch_size)
    answers = [(float(s.logprobs.sum(dtype=np.float64)), bool(s.greedy.all())) for s in scores]
    for (text, _, _), answer in zip(requests, answers, strict=True):
      if text is not None:  # a window of a longer text
        self.cache_hook.add_partial('loglikelihood', text, answer)
    return answers

  # ---- counts ----

  def _count(self, tasks: Sequence[str], out: Decoded):
    """Note what the texts of tasks cost in this call, which has all of an evaluation, and log it."""
    stats = out.stats
    for task in dict.fromkeys(tasks):
      rows = np.array([name == task for name in tasks])
      cost = [rows, stats.emitted, stats.rounds, stats.calls[self.method.slots[-1]], stats.tested, stats.accepted]
      self._counts[task] = {unit: int(x[rows].sum()) for unit, x in zip(_UNITS, cost, strict=True)}
      if out.target_logprobs is not None:  # greedy ones are 0
        logprobs = [x for x, mine in zip(out.target_logprobs, rows, strict=True) if mine]
        self._counts[task]['target_logprob'] = round(float(np.concatenate(logprobs).sum(dtype=np.float64)), 4)
      _logger.info('%s: %s', task, ', '.join(f'{name} {x}' for name, x in self._summary(task).items()))

  def _summary(self, task: str) -> dict[str, Any]:
    counts = self._counts[task]
    per_call = counts['tokens'] / max(counts['verifier_calls'], 1)
    rate = counts['drafts_accepted'] / max(counts['drafts_tested'], 1)
    return counts | {'tokens_per_verifier_call': round(per_call, 4), 'acceptance_rate': round(rate, 4)}

  def get_model_info(self) -> dict[str, Any]:
    """Return what the harness writes into the config of its results: the method, the models, and counts by task."""
    about = {
      'method': self.method.name,
      'phases': str(self.method),
      'models': [m.name for m in self.models],
      'digests': [m.digest for m in self.models],
      'decoding': {task: self._summary(task) for task in self._counts},
    }
    return {'speccascade': about}


def _parse(models: str | Sequence[str] | None, settings: dict[str, Any], made: bool):
  """Return the settings as options of `speccascade.decode`, without those of what is loaded or made already."""
  parser = _parser(models is not None, not made)
  paths = re.split(r'(?<!\bfamily):(?!//)', models) if isinstance(models, str) else models

  def text(value):
    return ','.join(map(str, value)) if isinstance(value, list | tuple) else str(value)

  switches = {name: value for name, value in settings.items() if isinstance(value, bool)}
  given = [f'--{name}={text(value)}' for name, value in settings.items() if name not in switches]
  given += [f'--{name}' for name in switches]
  args = parser.parse_args([*(['--models', *paths] if paths else []), *given])  # refuses unknown names
  vars(args).update(switches)
  for name in args.imports:
    names.module(name)
  return args


def _parser(models: bool, method: bool, **kwargs) -> commands.Parser:
  """Return the parser of the settings, those of models that are to be loaded and of a method that is to be made."""
  parser = commands.Parser('speccascade.integrations.lm_eval', __doc__, **kwargs)
  if models:
    options.add_models(parser)
  if method:
    options.add_method(parser)
  options.add_batch_size(parser)
  return parser


def _described() -> str:
  """Return the arguments of the model as text for --help."""
  known = {action.dest: action.help for action in _parser(True, True, add_help=False)._actions}
  known['models'] = 'DRAFT:TARGET, checkpoints; FOLDER@4 is the first four layers of FOLDER'
  known |= dict(max_length='the most tokens of prompt and output together', seed='of tasks that sample (0)')
  known |= dict(max_gen_toks='new tokens where a task has no number (256)', prefix_token_id='BOS, else EOS')
  known['import'] = known.pop('imports')
  left_out = ('debug', 'compilation_cache', 'batch_size')  # which are options
  names = [(f'{name}=', text) for name, text in known.items() if name not in left_out]

  def fill(name, text):
    return textwrap.fill(text, 79, initial_indent=f'  {name:<22}', subsequent_indent=' ' * 24)

  return '\n'.join(['--model_args, by commas:', *(fill(name, text) for name, text in names)])


def main() -> int:
  """Run the command of the harness, with the errors, signals and the cache of programs of all commands."""
  own = [a for a in sys.argv if a == '--debug' or a.startswith('--compilation_cache=')]
  sys.argv = [a for a in sys.argv if a not in own]
  if sys.argv[1:] in ([], ['-h'], ['--help']):  # with other arguments it is the harness's help that is asked for
    own = ['--help']
  parser = commands.Parser('speccascade.integrations.lm_eval', __doc__, epilog=_described())
  return commands.run(parser, lambda _: cli_evaluate(), own, 'interrupted')


if __name__ == '__main__':
  sys.exit(main())
