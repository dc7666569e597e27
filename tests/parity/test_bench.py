"""The tokens that the benchmark counts of transformers are those of the answers, whatever the family."""

from types import SimpleNamespace

import bench
import numpy as np
import pytest

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

SIZES = dict(vocab_size=67, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22]]


def decoder():
  torch.manual_seed(0)
  config = transformers.LlamaConfig(**SIZES, initializer_range=0.5, bos_token_id=1, pad_token_id=0, eos_token_id=None)
  return transformers.LlamaForCausalLM(config).eval()


def encoder_decoder():
  torch.manual_seed(0)
  config = transformers.T5Config(
    vocab_size=67, d_model=16, d_kv=8, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=None
  )
  return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize('made, start', [(decoder, None), (encoder_decoder, 0)])
def test_an_answer_is_counted_without_its_prompt_and_is_that_of_the_prompt_alone(made, start, monkeypatch):
  large, answers, count = made(), [], bench.answered
  monkeypatch.setattr(bench, 'reference_models', lambda paths, models: [large, large])
  monkeypatch.setattr(bench, 'answered', lambda out, ends: answers.append(out) or count(out, ends))
  models = [SimpleNamespace(network=SimpleNamespace(start_id=start))] * 2
  for batch in (1, len(PROMPTS)):
    run = bench.reference_runs(('small', 'large'), models, PROMPTS, batch, 6)['generate']
    assert run()[1] == 6 * len(PROMPTS)
  *alone, together = answers
  assert np.array_equal(np.concatenate(alone), together)


def test_what_fills_up_an_ended_answer_is_not_counted():
  out = np.array([[4, 2, 0, 0], [0, 5, 6, 7], [3, 2, 2, 2]])
  assert bench.answered(out, 2) == bench.answered(out, [2, 9]) == 2 + 4 + 2
  assert bench.answered(out, None) == 12 and bench.answered(out, [2, 5]) == 2 + 2 + 2
