"""Tasks by texts, which are spelled as `host.names` has it.

'gsm8k'  'gsm8k(shots=0, count=200)'         a benchmark of `data.benchmarks`
"problems(path='problems.jsonl')"            a file
'my_task:capitals(count=2)'                  one of yours, a function that returns a task

The tokenizer that shortens prompts is that of the experiment's last model, where that is a checkpoint or a model.
"""

from collections.abc import Callable, Mapping
import functools
import inspect
from types import MappingProxyType
from typing import Any

from speccascade import embedded
from speccascade.data import files, harness
from speccascade.data.benchmarks import BENCHMARKS
from speccascade.data.examples import Task
from speccascade.data.metrics import METRICS
from speccascade.data.seqio import tasks
from speccascade.data.spec_bench import spec_bench
from speccascade.evaluate import plugins
from speccascade.host import names

_PROMPTS = dict(seed=0, chat=True, max_prompt_tokens=1024, max_new_tokens=1024)  # on which drafters are compared
_BOXED = '{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}.'


@functools.cache
def known() -> dict[str, Callable[..., Task]]:
  """Return what makes a task, by name."""
  question = dict(prompt_field='Question: {question}\nAnswer:', target_field='answer', stop=('\nQuestion:',))
  return {
    'jsonl': files.jsonl,
    'problems': functools.partial(files.jsonl, metrics=('final_number',), **question),
    'parallel_text': files.parallel_text,
    'conversations': files.conversations,
    'sharegpt': functools.partial(files.conversations, seed=0, name='sharegpt'),
    'spec_bench': spec_bench,
    'mt_bench': functools.partial(files.conversations, domain='category', name='mt_bench', **_PROMPTS),
    'math500': functools.partial(
      files.jsonl,
      prompt_field=_BOXED,
      target_field='answer',
      domain='subject',
      metrics=('words',),
      name='math500',
      **_PROMPTS,
    ),
    **{name: functools.partial(tasks.seqio_task, name=name) for name in BENCHMARKS},
    'seqio_task': tasks.seqio_task,
    't5x_task': tasks.t5x_task,
    'lm_eval_task': harness.lm_eval_task,
    'embedded': embedded.task,
  }


def find(text: str, find_tokenizer: Callable[[], Any] = lambda: None) -> Task:
  """Return the task that a text names, with what a config binds on its function.

  Args:
    text: The text.
    find_tokenizer: Returns the models' tokenizer, for tasks that shorten prompts and are given none.

  Raises:
    ValueError: The text names none, or what it names does not take its arguments.
  """
  return reader(text, find_tokenizer)()


def reader(
  text: str,
  find_tokenizer: Callable[[], Any] = lambda: None,
  *,
  needed: Mapping[str, str] = MappingProxyType({}),
  more: Mapping[str, Callable] = MappingProxyType({}),
) -> Callable[[], Any]:
  """Return what reads the task that a text names; nothing is read yet.

  Args:
    text: The text.
    find_tokenizer: As in `find`.
    needed: Arguments that a task which takes them has to be given, each with a value for example.
    more: What else has a name.

  Raises:
    ValueError: The text names none, or lacks an argument.
  """
  named = names.find(text, 'task', known() | dict(more), METRICS)
  if isinstance(named.value, Task):
    return lambda: named.value
  if named.short:
    raise ValueError(f'{text!r}: a task takes its arguments by name, as in {named.name}(count=100)')
  given = plugins.bound(names.inside(named.value)) | named.arguments
  if named.name in BENCHMARKS:
    given['name'] = named.name
  takes = inspect.signature(named.value).parameters
  for name, value in needed.items():
    if name in takes and name not in given:
      raise ValueError(f'{text!r} names no {name}; name one, as in {named.name}({name}={value!r})')
  registered = named.value is tasks.seqio_task and given.get('name') not in BENCHMARKS  # with its own vocabularies

  def read() -> Any:
    if 'tokenizer' in takes and 'tokenizer' not in given and not registered:
      given['tokenizer'] = find_tokenizer()
    return named.call(**given)

  return read
