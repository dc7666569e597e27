"""A hub without a network: of any id that the documents name a tiny random checkpoint, in the layout of its family.

Configs and tokenizer files are of the published kind; sizes are not. Every id of one kind has the same vocabulary.
"""

import fnmatch
import functools
import json
import pathlib
import re
import shutil
import types

import huggingface_hub
import jax
import tokenizers as hf_tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from speccascade import embedded
from speccascade.checkpoints import hf
from speccascade.data import sources
from speccascade.train import vocabulary
from speccascade.types import Model

CHAT = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
  "{{ '<|im_start|>assistant\n' }}"
)
SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
DEEP = dict(SIZES, num_hidden_layers=26)  # of which an early exit takes 25
T5 = dict(d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2, feed_forward_proj='gated-gelu')


def _texts() -> list[str]:
  return [text for pair in embedded.sentences('train', 300) for text in pair]


def _spiece(folder: pathlib.Path, **settings) -> int:
  """Write a sentencepiece vocabulary, and return its size."""
  file = folder / settings.pop('file')
  vocabulary.make(file, _texts(), size=400, hard_vocab_limit=False, **settings)
  import sentencepiece

  return sentencepiece.SentencePieceProcessor(model_file=str(file)).vocab_size()


def _byte_level(folder: pathlib.Path, special: list[str], begin: str | None = None) -> int:
  """Write tokenizer.json of byte pairs, and return its size."""
  made = hf_tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  made.train_from_iterator(_texts(), trainer)
  if begin:
    made.post_processor = processors.TemplateProcessing(
      single=f'{begin} $A', special_tokens=[(begin, made.token_to_id(begin))]
    )
  made.save(str(folder / 'tokenizer.json'))
  return made.get_vocab_size()


def _t5(folder: pathlib.Path) -> dict:
  size = _spiece(folder, file='spiece.model')
  (folder / 'tokenizer_config.json').write_text(json.dumps(dict(eos_token='</s>', extra_ids=0)))
  return dict(model_type='t5', vocab_size=size, tie_word_embeddings=False, decoder_start_token_id=0, **T5)


def _of_sentencepiece(folder: pathlib.Path, kind: str, **config) -> dict:
  size = _spiece(
    folder, file='tokenizer.model', model_type='bpe', byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, pad_id=3
  )
  settings = dict(add_bos_token=True, bos_token='<s>', eos_token='</s>')
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return dict(model_type=kind, vocab_size=size, bos_token_id=1, eos_token_id=2, **config)


def _qwen(folder: pathlib.Path) -> dict:
  size = _byte_level(folder, ['<|endoftext|>', '<|im_start|>', '<|im_end|>'])
  settings = dict(chat_template=CHAT, eos_token='<|im_end|>', bos_token=None)
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return dict(model_type='qwen2', vocab_size=size, eos_token_id=2, max_position_embeddings=4096, **SIZES)


def _llama3(folder: pathlib.Path) -> dict:
  size = _byte_level(folder, ['<|begin_of_text|>', '<|end_of_text|>'], begin='<|begin_of_text|>')
  settings = dict(bos_token='<|begin_of_text|>', eos_token='<|end_of_text|>')
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return dict(model_type='llama', vocab_size=size, eos_token_id=1, max_position_embeddings=4096, **SIZES)


def _opt(folder: pathlib.Path) -> dict:
  size = _byte_level(folder, ['<s>', '<pad>', '</s>', '<unk>'], begin='</s>')
  (folder / 'tokenizer_config.json').write_text(json.dumps(dict(bos_token='</s>', eos_token='</s>')))
  sizes = dict(hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16)
  return dict(model_type='opt', vocab_size=size, eos_token_id=2, max_position_embeddings=2048, **sizes)


LLAMA = functools.partial(_of_sentencepiece, kind='llama', max_position_embeddings=4096, **SIZES)
KINDS = {  # by what an id begins with
  r'google/(flan-)?t5|checkpoints/t5': _t5,
  r'google/gemma-2': functools.partial(_of_sentencepiece, kind='gemma2', head_dim=8, **SIZES),
  r'(Qwen|unsloth)/Qwen2.5': _qwen,
  r'meta-llama/Llama-3': _llama3,
  r'facebook/opt': _opt,
  r'facebook/layerskip': functools.partial(_of_sentencepiece, kind='llama', max_position_embeddings=4096, **DEEP),
  r'(meta-llama/Llama-2|JackFram|lmsys|codellama|amd/AMD-Llama|TinyLlama)': LLAMA,
}


class Hub:
  """Repositories that a test gives or that are made when they are first asked for; what was fetched of each."""

  def __init__(self, root: pathlib.Path):
    self.root = root
    self.given: dict[tuple[str, str | None], pathlib.Path] = {}  # by id and revision
    self.fetched: dict[str, list[str]] = {}

  def stand_in(self, monkeypatch):
    """Take the place of `huggingface_hub`."""
    sources._listed.cache_clear()
    for name in ('model_info', 'snapshot_download', 'hf_hub_download'):
      monkeypatch.setattr(huggingface_hub, name, getattr(self, name))

  def made(self, hub_id: str, seed: int | None = None) -> pathlib.Path:
    """Return the folder of a checkpoint."""
    folder = self.root / hub_id
    if not folder.exists():
      make = next((make for begins, make in KINDS.items() if re.match(begins, hub_id)), None)
      if make is None:
        raise OSError(f'404: no repository {hub_id}')
      described = self.root / 'described' / hub_id
      described.mkdir(parents=True)
      config = make(described)
      network = hf.network_from_config(config)
      key = jax.random.key(len(hub_id) if seed is None else seed)
      hf.write(folder, Model(network.init(key), network, name=hub_id.partition('/')[2]))
      for file in described.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder

  def folder(self, hub_id: str, revision: str | None = None) -> pathlib.Path:
    """Return the folder of a repository."""
    return self.given.get((hub_id, revision)) or self.made(hub_id)

  def names(self, hub_id: str, revision: str | None = None) -> list[str]:
    """Return the names of the files of a repository."""
    folder = self.folder(hub_id, revision)
    return sorted(str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file())

  def model_info(self, hub_id: str, revision: str | None = None):
    """Stand in for the function of `huggingface_hub`, as those that follow."""
    names = self.names(hub_id, revision)
    return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=name) for name in names])

  def snapshot_download(
    self, hub_id: str, revision: str | None = None, allow_patterns=(), local_files_only: bool = False
  ) -> str:
    cache = self.root / 'cache' / hub_id / 'snapshots' / f'0123abc{revision or ""}'
    for name in self.names(hub_id, revision):
      if not local_files_only and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
        self.fetched.setdefault(hub_id, []).append(name)
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        if not (cache / name).exists():
          (cache / name).symlink_to(self.folder(hub_id, revision) / name)
    return str(cache)

  def hf_hub_download(self, hub_id: str, name: str, revision: str | None = None) -> str:
    return str(self.folder(hub_id, revision) / name)
