"""Tasks of the lm-evaluation-harness have the scores that its own model has on the same weights."""

import functools
import json
import logging
import os
from pathlib import Path
import re
import subprocess
import sys

import numpy as np
import pytest
from vocabularies import t5

from speccascade import decode, methods
from speccascade.checkpoints import load
from speccascade.data import tokenizers

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('lm_eval', reason="needs the extra 'lm-eval'")
yaml = pytest.importorskip('yaml')

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from speccascade import embedded  # noqa: E402
from speccascade.integrations.lm_eval import main, SpecCascade  # noqa: E402

torch.set_num_threads(1)  # tiny models: more threads only wait for each other

LENGTH = 128  # positions of the random models
CLOSE = 2e-3  # of log-likelihoods of tens of tokens
ITEMS = [
  ('Which is heavier', ['a feather', 'a brick'], 1, 'The brick hung from a rope. The rope held.'),
  ('Which is colder', ['snow', 'soup', 'tea'], 0, 'Snow fell on the roof all night; by noon it was gone.'),
  ('Which has wheels', ['a boat', 'a cart'], 1, 'The cart stood by the gate.'),
  ('Which one swims', ['an eel', 'a hen'], 0, 'Eels swim by night, hens sleep.'),
  ('Which is round', ['a coin', 'a plank', 'a knife'], 0, 'He kept one coin in his left shoe. ' * 8),
  ('Which one barks', ['the moon', 'a dog'], 1, 'A dog barked at the moon, and the moon said nothing.'),
]
ASK = '{{question}}?'
GENERATE = {'output_type': 'generate_until', 'doc_to_text': ASK, 'doc_to_target': '{{choices[label]}}'}
GENERATE |= {'metric_list': [{'metric': 'exact_match', 'aggregation': 'mean', 'higher_is_better': True}]}
CHOOSE = {'output_type': 'multiple_choice', 'doc_to_text': ASK, 'doc_to_choice': 'choices', 'doc_to_target': 'label'}
CHOOSE |= {'metric_list': [{'metric': 'acc'}, {'metric': 'acc_norm'}]}
ROLL = {'output_type': 'loglikelihood_rolling', 'doc_to_text': '', 'doc_to_target': '{{story}}'}
ROLL |= {'metric_list': [{'metric': name} for name in ('word_perplexity', 'byte_perplexity', 'bits_per_byte')]}
TASKS = {
  'generate_line': GENERATE | {'generation_kwargs': {'until': ['\n'], 'max_gen_toks': 24}},
  'generate_word': GENERATE | {'generation_kwargs': {'until': [' ', '.', 'e'], 'max_gen_toks': 24}},
  'generate_on': GENERATE | {'generation_kwargs': {'until': [], 'max_gen_toks': 40, 'do_sample': False}},
  'generate_shots': GENERATE | {'num_fewshot': 2, 'generation_kwargs': {'until': ['?'], 'max_gen_toks': 16}},
  'choose': CHOOSE,
  'choose_shots': CHOOSE | {'num_fewshot': 1},
  'choose_alone': CHOOSE | {'doc_to_text': '', 'target_delimiter': ''},
  'word': {
    'output_type': 'loglikelihood',
    'doc_to_text': ASK,
    'doc_to_target': ' {{choices[label]}}',
    'metric_list': [{'metric': 'perplexity'}, {'metric': 'acc'}],
  },
  'story': ROLL,
  'stories': ROLL | {'doc_to_target': '{{story}} {{story}} {{question}}'},
}


@pytest.fixture(scope='module')
def tasks(tmp_path_factory) -> Path:
  """Return a folder of tasks over a local file."""
  folder = tmp_path_factory.mktemp('tasks')
  fields = ('question', 'choices', 'label', 'story')
  lines = [json.dumps(dict(zip(fields, item, strict=True))) for item in ITEMS]
  (folder / 'items.jsonl').write_text('\n'.join(lines) + '\n')
  data = {'dataset_path': 'json', 'dataset_kwargs': {'data_files': {'test': str(folder / 'items.jsonl')}}}
  for name, task in TASKS.items():
    settings = {'task': name, **data, 'test_split': 'test', 'fewshot_split': 'test', **task}
    (folder / f'{name}.yaml').write_text(yaml.safe_dump(settings))
  return folder


@pytest.fixture(autouse=True)
def offline(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path_factory.getbasetemp() / 'datasets'))


def write_tokenizer(folder: Path):
  """Write a byte-level vocabulary with BOS, EOS and a chat template."""
  from tokenizers import decoders, models, pre_tokenizers, processors, Tokenizer

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  special = ['<s>', '</s>', '<pad>']
  vocab = {piece: i for i, piece in enumerate([*special, *alphabet, 'Ġa', 'he'])}
  tokenizer = Tokenizer(models.BPE(vocab, [('Ġ', 'a'), ('h', 'e')]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.post_processor = processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 0)])
  template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
  template += '{% if add_generation_prompt %}<s>assistant: {% endif %}'
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>', pad_token='<pad>', chat_template=template
  )
  fast.save_pretrained(folder)
  return len(vocab)


@pytest.fixture(scope='module')
def llamas(tmp_path_factory) -> list[str]:
  """Return a random verifier and a drafter near it, drafter first."""
  folder = tmp_path_factory.mktemp('llamas')
  vocab = write_tokenizer(folder)
  config = transformers.LlamaConfig(
    vocab_size=vocab,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
    initializer_range=0.25,
  )
  return save_pair(folder, transformers.LlamaForCausalLM, config, write_tokenizer)


@pytest.fixture(scope='module')
def t5s(tmp_path_factory) -> list[str]:
  """Return a random encoder–decoder and a drafter near it, drafter first."""
  special = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>', 'extra_ids': 0}
  tokenizer = functools.partial(t5, tokenizer_class='T5Tokenizer', **special)
  config = transformers.T5Config(
    vocab_size=len(tokenizers.load(embedded.vocabulary()).pieces()),
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
    feed_forward_proj='gated-gelu',
    tie_word_embeddings=False,
  )
  return save_pair(tmp_path_factory.mktemp('t5s'), transformers.T5ForConditionalGeneration, config, tokenizer)


def save_pair(folder: Path, kind, config, write_tokenizer) -> list[str]:
  """Save a random model as 'target', and one near it as 'draft'."""
  torch.manual_seed(0)
  model = kind(config)
  for name in ('target', 'draft'):
    model.save_pretrained(folder / name)
    write_tokenizer(folder / name)
    with torch.no_grad():
      for parameter in model.parameters():
        parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
  return [str(folder / 'draft'), str(folder / 'target')]


def reference(pair: list[str]) -> dict:
  """Return the arguments of the harness's own model for the verifier."""
  return {'pretrained': pair[1], 'dtype': 'float32', 'device': 'cpu'}


def run(model, tasks: Path, names, **settings) -> dict:
  """Return the harness's results of tasks."""
  manager = TaskManager(include_path=str(tasks), include_defaults=False)
  return simple_evaluate(
    model, tasks=list(names), task_manager=manager, log_samples=True, bootstrap_iters=0, batch_size=4, **settings
  )


def check_equal(ours: dict, theirs: dict):
  """Check that metrics and every response are equal, log-likelihoods up to rounding."""
  for name, samples in theirs['samples'].items():
    for a, b in zip(ours['samples'][name], samples, strict=True):
      assert a['doc_id'] == b['doc_id'] and a['arguments'] == b['arguments']
      for (one,), (other,) in zip(a['resps'], b['resps'], strict=True):
        if isinstance(other, tuple):
          assert one[1] == other[1]
          one, other = one[0], other[0]
        if isinstance(other, str):
          assert one == other, name
        else:
          np.testing.assert_allclose(one, other, atol=CLOSE, err_msg=name)
    for metric, value in theirs['results'][name].items():
      if isinstance(value, float):
        np.testing.assert_allclose(ours['results'][name][metric], value, rtol=1e-4, err_msg=f'{name} {metric}')


def test_ten_tasks_have_the_scores_of_transformers(tasks, llamas, caplog):
  theirs = run('hf', tasks, TASKS, model_args=reference(llamas))
  args = {'models': ':'.join(llamas), 'method': 'speculative', 'block': 4, 'dtype': 'float32'}
  with caplog.at_level(logging.INFO, 'lm_eval'):
    ours = run('speccascade', tasks, TASKS, model_args=args)
  check_equal(ours, theirs)
  about = ours['config']['speccascade']
  assert about['method'] == 'speculative[speculative]' and about['models'] == ['draft', 'target']
  assert set(about['decoding']) == {name for name in TASKS if name.startswith('generate')}
  for name, counts in about['decoding'].items():
    texts = [sample['resps'][0][0] for sample in ours['samples'][name]]
    assert counts['texts'] == len(ITEMS) == len(texts)
    assert 0 < counts['drafts_accepted'] < counts['drafts_tested']
    assert counts['tokens_per_verifier_call'] > 1 and counts['verifier_calls'] < counts['tokens']
    assert counts['target_logprob'] == 0  # of greedy texts
    assert f'{name}: texts 6, tokens {counts["tokens"]}' in caplog.text


@pytest.mark.long
def test_an_encoder_decoder_has_the_scores_of_transformers(tasks, t5s):
  names = [name for name in TASKS if 'shots' not in name]
  theirs = run('hf', tasks, names, model_args=reference(t5s) | {'backend': 'seq2seq'})
  args = {'models': t5s, 'method': 'speculative', 'block': 3, 'dtype': 'float32'}
  ours = run('speccascade', tasks, names, model_args=args)
  # The harness's model adds the prompt's length to the limit of an encoder–decoder's output, so texts that end at the
  # limit are prefixes of its own.
  for name in ('generate_line', 'generate_word', 'generate_on'):
    for a, b in zip(ours['samples'].pop(name), theirs['samples'].pop(name), strict=True):
      ((text,),) = a['resps']
      assert text and b['resps'][0][0].startswith(text)
  check_equal(ours, theirs)


def test_a_cascade_is_scored_by_its_own_distribution(tasks, llamas):
  args = {'models': ':'.join(llamas), 'method': 'speculative', 'rule': 'opt:0.1', 'block': 4, 'dtype': 'float32'}
  cascade = run('speccascade', tasks, ['word'], model_args=args)
  oracle = run(
    'speccascade', tasks, ['word'], model_args={k: v for k, v in args.items() if k != 'block'} | {'method': 'oracle'}
  )
  verifier = run('speccascade', tasks, ['word'], model_args={'models': llamas[1:], 'method': 'autoregressive'})
  perplexity = lambda results: results['results']['word']['perplexity,none']
  np.testing.assert_allclose(perplexity(cascade), perplexity(oracle), rtol=1e-5)
  assert abs(perplexity(cascade) / perplexity(verifier) - 1) > 1e-3
  with pytest.raises(ValueError, match='bild'):
    run('speccascade', tasks, ['word'], model_args={'models': llamas, 'method': 'bild'})


def test_calls_are_the_verifiers_whatever_its_number(tasks, llamas):
  draft, target = (load(path, dtype='float32') for path in llamas)
  found = []
  for models, pair in (([draft, target], (0, 1)), ([target, draft], (1, 0))):
    lm = SpecCascade(models, methods.speculative(block=4, pair=pair), batch_size=4)
    for _ in range(2):  # the second evaluation counts its own texts
      (counts,) = run(lm, tasks, ['generate_line'])['config']['speccascade']['decoding'].values()
      found.append(counts)
  assert found == found[:1] * 4 and found[0]['texts'] == len(ITEMS)


def test_a_continuation_without_a_token_is_refused(llamas):
  lm = SpecCascade(llamas, dtype='float32')
  with pytest.raises(ValueError, match="continuation '' .* correct the task"):
    lm.loglikelihood([Instance('loglikelihood', {}, ('a', ''), 0)], disable_tqdm=True)


def test_the_example_of_the_page_runs(tasks, llamas):
  page = (Path(__file__).parents[2] / 'docs' / 'lm_eval.md').read_text()
  (code,) = re.findall(r'^```python\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
  assert "tasks=['gsm8k']" in code
  local = "tasks=['generate_line'], task_manager=manager"
  small, large = (load(path, dtype='float32') for path in llamas)
  names = {'small': small, 'large': large, 'manager': TaskManager(include_path=str(tasks), include_defaults=False)}
  exec(code.replace("tasks=['gsm8k']", local), names)
  (counts,) = names['results']['config']['speccascade']['decoding'].values()
  assert counts['texts'] == len(ITEMS) and counts['drafts_tested'] > 0


def test_chats_are_rendered_as_by_transformers(llamas):
  lm = SpecCascade(llamas, dtype='float32')
  tokenizer = transformers.AutoTokenizer.from_pretrained(llamas[1])
  messages = [{'role': 'user', 'content': 'Hello there.'}]
  expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert lm.apply_chat_template(messages) == expected
  assert lm.tok_encode(expected) == tokenizer(expected, add_special_tokens=False)['input_ids']
  messages.append({'role': 'assistant', 'content': 'Well'})
  expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
  assert lm.apply_chat_template(messages, add_generation_prompt=False) == expected


def test_a_special_token_stops_and_sampling_is_asked_for(llamas):
  lm = SpecCascade(llamas, dtype='float32')
  asked = lm._request('x', {'until': ['</s>', 'yes', ''], 'max_gen_toks': 7, 'num_beams': 1, 'top_k': 0})
  assert (asked.stop, asked.max_new_tokens, asked.temperature) == (['</s>', 'yes'], 7, 0.0)
  asked = lm._request(
    'x' * 999, {'until': 'a', 'do_sample': True, 'temperature': 0.5, 'top_p': 0.9, 'max_gen_toks': 28}
  )
  assert (asked.temperature, asked.top_p, len(asked.prompt)) == (0.5, 0.9, LENGTH - 28)
  with pytest.raises(ValueError, match='num_beams'):
    lm._request('x', {'until': [], 'num_beams': 4})
  with pytest.raises(ValueError, match='max_gen_toks=200'):
    lm._request('x', {'until': [], 'max_gen_toks': 200})
  with pytest.raises(ValueError, match='max_length=-1'):
    SpecCascade(llamas, dtype='float32', max_length=-1)


def test_sampled_texts_have_a_log_probability(llamas):
  lm = SpecCascade(llamas, method='speculative', block=3, dtype='float32')
  how = {'do_sample': True, 'temperature': 0.7, 'max_gen_toks': 8, 'until': []}
  asked = [Instance('generate_until', {}, (text, how), i, ('some', i, 1)) for i, text in enumerate(['Hello', 'Well'])]
  texts = lm.generate_until(asked, disable_tqdm=True)
  requests = [lm._request(*one.args) for one in asked]
  out = decode(lm.method, lm.models, requests, seed=lm.seed, batch_size=lm.batch_size, trace='target')
  assert texts == out.texts
  expected = sum(float(x.sum()) for x in out.target_logprobs)
  assert lm.get_model_info()['speccascade']['decoding']['some']['target_logprob'] == pytest.approx(expected, abs=1e-3)
  assert expected < -1


@pytest.mark.parametrize(
  'settings, part',
  [
    ({'method': 'speculate'}, 'speculate'),
    ({'blok': 3}, '--blok'),
    ({'tranlate': False}, '--tranlate'),
    ({'block': True}, '--block'),
    ({'rule': 'opt:x'}, 'opt:x'),
  ],
)
def test_wrong_arguments_are_named(llamas, settings, part):
  with pytest.raises(RuntimeError, match=part):
    SpecCascade(':'.join(llamas), **settings)


@pytest.mark.parametrize(
  'settings, part',
  [(dict(method=methods.speculative(), block=9), '--block=9'), (dict(dtype='bfloat16'), '--dtype=bfloat16')],
)
def test_settings_of_what_is_made_already_are_refused(llamas, settings, part):
  models = [load(path, dtype='float32') for path in llamas]
  with pytest.raises(RuntimeError, match=part):
    SpecCascade(models, **settings)


@pytest.fixture
def no_other_tasks(monkeypatch):
  """Let a command look at the tasks that it is given alone: the harness has thousands."""
  monkeypatch.setattr('lm_eval.tasks.TaskManager', functools.partial(TaskManager, include_defaults=False))


@pytest.mark.long
def test_the_command_is_the_harnesss_own_and_writes_our_counts(tasks, llamas, tmp_path):
  command = [sys.executable, '-m', 'speccascade.integrations.lm_eval', '--model', 'speccascade', '--batch_size', '4']
  command += ['--model_args', f'models={":".join(llamas)},method=speculative,rule=opt:0.1,block=5,dtype=float32']
  command += ['--tasks', 'generate_line,word', '--include_path', str(tasks), '--output_path', str(tmp_path / 'out')]
  environment = os.environ | {'HF_HUB_OFFLINE': '1', 'JAX_PLATFORMS': 'cpu', 'XDG_CACHE_HOME': str(tmp_path)}
  out = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
  assert out.returncode == 0, out.stderr
  assert 'generate_line' in out.stdout and 'drafts_accepted' in out.stderr
  (file,) = (tmp_path / 'out').rglob('results_*.json')
  config = json.loads(file.read_text())['config']['speccascade']
  assert config['method'] == 'speculative[opt]' and config['decoding']['generate_line']['texts'] == len(ITEMS)


@pytest.mark.usefixtures('no_other_tasks')
def test_a_model_without_arguments_is_one_sentence(monkeypatch, capsys, tasks):
  monkeypatch.setattr(
    'sys.argv', ['lm_eval', '--model', 'speccascade', '--tasks', 'word', '--include_path', str(tasks)]
  )
  assert main() == 1 and 'models=DRAFT:TARGET' in capsys.readouterr().err.splitlines()[-1]
