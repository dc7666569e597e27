"""A small sentencepiece vocabulary for a corpus, of T5's kind: pad 0, end of sequence 1, unknown 2.

`python -m speccascade.train.vocabulary FILE` writes that of the package's sentences.
"""

from collections.abc import Iterable, Sequence
import itertools
from pathlib import Path
import sys

from speccascade import embedded
from speccascade.host import commands, storage


def make(file, texts: Iterable[str], *, size: int) -> Path:
  """Learn a unigram vocabulary of `size` pieces from texts, and write it."""
  import sentencepiece  # lazily: training models needs a tokenizer only where texts are given

  file = Path(file).expanduser().absolute()
  file.parent.mkdir(parents=True, exist_ok=True)
  with file.open('wb') as f:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts), model_writer=f, vocab_size=size, model_type='unigram', character_coverage=1.0,
      pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name='identity', num_threads=1, minloglevel=2,
    )  # fmt: skip
  return file


def of_generated(file, *, size: int = 1000, count: int = 20000) -> Path:
  """Write the vocabulary of the package's first `count` training pairs, both languages."""
  pairs = embedded.sentences('train', count)
  return make(file, itertools.chain.from_iterable(pairs), size=size)


def main(argv: Sequence[str] | None = None) -> int:
  """Write the vocabulary of the package's sentences; return the exit code."""
  parser = commands.Parser('speccascade.train.vocabulary', __doc__)
  parser.add_argument('file', help='the file to write')
  return commands.run(parser, lambda args: print(of_generated(storage.local(args.file))), argv, 'interrupted')


if __name__ == '__main__':
  sys.exit(main())
