"""The stop strings of a task end its decoding."""

import dataclasses

from speccascade import embedded, methods
from speccascade.evaluate import Curve, Experiment, protocols

CURVE = Curve('target only', methods.autoregressive, settings={'model': 0})


def test_what_follows_a_stop_string_is_not_decoded():
  task = embedded.task(count=3)
  experiment = Experiment(task, embedded.models, [CURVE], temperatures=[0.0])
  loaded = protocols.Loaded.of(experiment)
  decode = lambda experiment: protocols.run_method(experiment, loaded, CURVE.points()[0].build(), 0.0, task.examples)
  free = decode(experiment)
  word = free.texts[0].split()[2]
  stopping = dataclasses.replace(experiment, task=dataclasses.replace(task, stop=(f' {word}',)))
  stopped = decode(stopping)
  assert stopped.finish_reasons[0] == 'stop' and stopped.texts[0] == free.texts[0].partition(f' {word}')[0]
  assert len(stopped.tokens[0]) < len(free.tokens[0])
  assert stopped.tokens[0] == free.tokens[0][: len(stopped.tokens[0])]
  assert f"stop [' {word}']" in stopping.describe() and 'stop [' not in experiment.describe()
