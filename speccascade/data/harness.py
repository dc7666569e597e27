"""Tasks of the lm-evaluation-harness as tasks of experiments; `lm_eval` is imported when one is read."""

import functools
from typing import Any

from speccascade.data import metrics, prompts
from speccascade.data.examples import Example, Metric, Task
from speccascade.host.errors import first_line, RunError

FIRST = 8  # examples whose references are scored


def lm_eval_task(
  name: str,
  *,
  limit: int | None = None,
  num_fewshot: int | None = None,
  max_prompt_tokens: int = 2048,
  max_new_tokens: int | None = None,
  confirm_run_unsafe_code: bool = False,
) -> Task:
  """Return a task of the lm-evaluation-harness with its prompts, stop strings and metrics; sampling is not the task's.

  Args:
    name: Its name in the harness, or the path of a YAML file.
    limit: Number of examples, the first ones; None for all.
    num_fewshot: Number of worked examples; None takes the task's.
    max_prompt_tokens: The longest prompt; a longer one is an error.
    max_new_tokens: Tokens to generate at most; None takes the task's.
    confirm_run_unsafe_code: Whether a task may run programs that a model wrote, by the harness, in this process.

  Raises:
    PermissionError: if the task runs programs and may not.
    RunError: if lm_eval is missing or cannot read the task, or the task does not generate one text an example.
  """
  task, settings = _read(name, confirm_run_unsafe_code, limit, num_fewshot)
  stop = [text for text in settings['until'] if text]

  def target(doc):
    return list(map(str, x)) if isinstance(x := task.doc_to_target(doc), list) else str(x)

  examples = [Example(x.doc_id, x.args[0], target(x.doc), dict(x.doc)) for x in task.instances]
  limits = max_prompt_tokens, max_new_tokens or settings['max_gen_toks']
  return Task(task.task_name, examples, *limits, _metrics(task, examples), prompts.truncation(stop), stop)


def _read(name: str, consent: bool, limit: int | None, num_fewshot: int | None) -> tuple[Any, dict]:
  """Return a task of the harness with its requests, and their settings."""
  try:
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
  except ImportError as error:
    raise RunError(f"{error}; tasks of lm_eval need the extra: pip install 'speccascade[lm-eval]'.") from None
  unsafe = PermissionError(
    f'{name} runs programs of a model: in a container, give confirm_run_unsafe_code=True and set HF_ALLOW_CODE_EVAL=1.'
  )
  try:  # the harness takes seconds to list its own tasks
    (task,) = TaskManager(include_defaults=not name.endswith('.yaml')).load(name)['tasks'].values()
  except Exception as error:  # whatever the code of a task raises; of a group, that it has several
    if 'HF_ALLOW_CODE_EVAL' in str(error):
      raise unsafe from None
    raise RunError(f'lm_eval reads no task {name} ({first_line(error, named=True)}).') from error
  if task.get_config('unsafe_code') and not consent:
    raise unsafe
  if task.OUTPUT_TYPE != 'generate_until' or (task.get_config('repeats') or 1) > 1:
    raise RunError(f'{name} generates not one text an example; python -m speccascade.integrations.lm_eval runs it.')
  task.set_config('num_fewshot', task.get_config('num_fewshot') if num_fewshot is None else num_fewshot)
  task.set_fewshot_seed(1234)  # the harness's
  task.build_all_requests(limit=limit)
  return task, normalize_gen_kwargs(task.instances[0].args[1])


def _metrics(task: Any, examples: list[Example]) -> dict[str, Metric]:
  """Return the metrics of which more is better, means in per cent.

  The references of the first examples tell which there are, and which of them are in per cent themselves.
  """
  from lm_eval.api.instance import Instance
  from lm_eval.api.metrics import mean

  docs = {x.doc_id: x.doc for x in task.instances}

  @functools.cache  # greedy outputs recur from point to point
  def scores(index: int, text: str) -> dict[tuple[str, str], Any]:
    instance = Instance('generate_until', docs[index], (), 0, resps=[text])
    for one in task._filters:
      one.apply([instance])
    results = {name: task.process_results(instance.doc, [x]) for name, x in instance.filtered_resps.items()}
    return {(metric, name): x for name, result in results.items() for metric, x in result.items()}

  known = [scores(e.index, next(iter(e.references), '')) for e in examples[:FIRST]]
  made: dict[str, Metric] = {}
  for key in known[0]:

    def score(example, text, key=key):
      return scores(example.index, text)[key]

    aggregate = task.aggregation().get(key[0], mean)

    def of_all(some, texts, score=score, aggregate=aggregate):
      return aggregate(list(map(score, some, texts)))

    if task.higher_is_better().get(key[0], True):
      label = ', '.join(key[: len(task._filters)])  # with the filter's name where there are several
      made[label] = of_all
      if aggregate is mean:
        made[label] = metrics.Mean(score, scale=1 if max(x[key] for x in known) > 1 else 100)
  return made
