"""Make the sentencepiece vocabulary of texts, as T5's: pad 0, end of sequence 1, unknown 2.

That of the package is `make(FILE, itertools.chain.from_iterable(embedded.sentences('train', 20000)), size=1000)`.
"""

from collections.abc import Iterable, Mapping, Sequence
import io
import itertools
import json
from pathlib import Path
from typing import Any

from speccascade.data import files
from speccascade.host import storage


def make(file, texts: Iterable[str], *, size: int, **settings) -> Path:
  """Learn a vocabulary of `size` pieces from texts, and write it; `settings` of sentencepiece replace those of T5."""
  import sentencepiece  # lazily: token ids alone need no tokenizer library

  file = Path(file).expanduser().absolute()
  of_t5 = dict(
    model_type='unigram',
    character_coverage=1.0,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    normalization_rule_name='identity',
    num_threads=1,
    minloglevel=2,
  )
  written = io.BytesIO()
  settings = dict(vocab_size=size) | of_t5 | settings
  sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=written, **settings)
  storage.write(file, written.getvalue())
  return file


def learned_vocabulary(
  file: str, paths: Sequence[str], *, size: int, field: str | None = None, settings: Mapping[str, Any] | None = None
) -> str:
  """Return the path of a vocabulary; where there is no such file yet, it is learned from the texts of some files.

  What it was learned of is written next to it, and has to be what is asked for where the file is there already.

  Args:
    file: The vocabulary.
    paths: The files of texts, as `data.files.texts` reads them.
    size: Number of pieces.
    field: Field or template of a text in JSON objects; None takes the lines of a text file.
    settings: Settings of sentencepiece that replace those of T5.

  Raises:
    ValueError: The file is there, and was learned of something else, or nothing says of what.
  """
  texts = list(itertools.chain.from_iterable(files.texts(path, field) for path in paths))
  asked = dict(size=size, settings=dict(settings or {}), texts=storage.digest_of_json(texts))
  record = Path(f'{file}.of.json').expanduser()
  if not Path(file).expanduser().exists():
    storage.write(record, json.dumps(asked))  # first: one without its vocabulary is written over
    make(file, texts, size=size, **(settings or {}))
  elif (found := _recorded(record)) != json.loads(json.dumps(asked)):
    differs = [key for key in asked if found.get(key) != asked[key]]
    raise ValueError(
      f'{file} is there already, and {record.name} does not say that it was learned with this {" and ".join(differs)}: '
      'remove it or name another file; a vocabulary of yours is given by its path alone'
    )
  return file


def _recorded(record: Path) -> dict[str, Any]:
  try:
    found = json.loads(record.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}
