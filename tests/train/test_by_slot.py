"""The α of the slots of a draft, chosen for whole texts, as a job."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from speccascade import decode, embedded, methods, rules, Sampler
from speccascade.train import router
from speccascade.train.by_slot import BySlot, decision, FILE


@pytest.fixture(scope='module')
def models():
  return embedded.models()


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_decision_is_that_of_opt(models, temperature):
  rng = np.random.default_rng(0)
  q, p = (jnp.float32(rng.normal(0, 3, (40, 6))) for _ in range(2))
  read = dict(
    features=np.asarray(rules.features(q, p)), first_q=np.asarray(q.argmax(-1)), first_p=np.asarray(p.argmax(-1))
  )
  tokens = router.Tokens(**dict.fromkeys(router.Tokens.__dataclass_fields__) | read)
  gain, rejection = decision(tokens, greedy=temperature == 0)
  for alpha in (0.0, 0.1, 0.5):
    rule = functools.partial(rules.opt, alpha=np.float32(alpha))
    found = rules.target(rule, (q, p), Sampler(temperature))
    np.testing.assert_array_equal(found.deferred, gain > alpha * rejection)


def test_a_job_writes_alphas_by_which_the_loop_decodes(models, tmp_path):
  lines = []
  job = BySlot('greedy', models, embedded.task(count=8), costs=(0.2, 0.5), block=3, greedy=True)
  rows = job.run(tmp_path, lines.append)
  assert json.loads((tmp_path / 'greedy' / FILE).read_text()) == rows and len(lines) == 2
  assert all(row['calls'] <= row['same_loss_calls'] + 1e-6 for row in rows)
  assert rows[0]['calls'] > rows[1]['calls']
  prompts = [e.prompt for e in embedded.task(count=4).examples]
  calls = []
  for row in rows:
    method = methods.speculative(functools.partial(rules.by_slot(rules.opt), alpha=tuple(row['alphas'])), block=3)
    stats = decode(method, models, prompts, max_new_tokens=24, sampler=Sampler(0.0), batch_size=4).stats
    calls.append(stats.rounds.sum() / stats.emitted.sum())
  assert calls[0] >= calls[1]


def test_a_job_of_three_models_is_refused(models):
  with pytest.raises(ValueError, match='3 models'):
    BySlot('greedy', [*models, models[-1]], embedded.task(count=1))
