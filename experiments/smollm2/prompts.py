"""Requests for the teacher's texts: public prompts, and prompts that the model has written itself.

python -m experiments.smollm2.prompts own.jsonl --own 1500
python -m experiments.smollm2.prompts asked.jsonl --gsm8k train.jsonl --multi30k train.en --spec_bench question.jsonl
    --written written.jsonl

The first asks the model for prompts: texts that begin where a user speaks. `python -m speccascade.decode` writes them.
The second makes a request of each prompt and temperature, the sources in turns, so that any beginning of the output is
a sample of all. Of Spec-Bench it takes every second prompt of the tasks that are not measured elsewhere; `measured` has
the others.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
import itertools
import json
import pathlib

from speccascade.data import files, spec_bench, tokenizers
from speccascade.data.examples import Example

MODEL = 'smollm2'
NEW_TOKENS = 256
PROMPT_TOKENS = 192  # of the longest prompt; longer ones are left out
TOP = 32  # log-probabilities of each token that are kept
GREEDY_EACH = 3  # of so many answers one is greedy
LANGUAGES = ('German', 'French', 'Spanish')
WHOLE = (*spec_bench.MT_BENCH, 'math_reasoning')  # of Spec-Bench: measured as a whole, for their like is measured, too


def halves(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
  """Return the prompts of Spec-Bench that drafters learn from, and those that they are measured on."""
  learned, measured = [], []
  for category in dict.fromkeys(x.info['category'] for x in examples):
    some = [x for x in examples if x.info['category'] == category]
    learned += [] if category in WHOLE else some[1::2]
    measured += some if category in WHOLE else some[::2]
  return learned, measured


def own(count: int) -> Iterator[dict]:
  """Yield a request for prompts: the chat's text up to where its user speaks."""
  tokenizer = tokenizers.load(MODEL)
  ids = tokenizer.chat([{'role': 'user', 'content': ''}])
  last = max(i for i, token in enumerate(ids) if token in tokenizer.eos_ids)  # with which the user ends
  yield {'prompt': ids[:last], 'n': count, 'temperature': 1.0, 'max_new_tokens': 96}


def sources(args: argparse.Namespace) -> list[list[str]]:
  """Return the texts of each source."""
  found = []
  if args.written:
    rows = map(json.loads, files.lines(args.written))
    found.append([row['text'] for row in rows if row['finish_reason'] == 'eos' and row['text'].strip()])
  if args.gsm8k:
    found.append([json.loads(line)['question'] for line in files.lines(args.gsm8k)])
  if args.spec_bench:
    learned, _ = halves(spec_bench.spec_bench(args.spec_bench).examples)
    found.append([example.prompt[-1]['content'] for example in learned])
  if args.multi30k:
    languages = itertools.cycle(LANGUAGES)
    found.append([f'Translate into {next(languages)}: {line}' for line in files.lines(args.multi30k)])
  return found


def requests(texts: Iterable[Sequence[str]], rounds: int) -> Iterator[dict]:
  """Yield requests, a prompt of each source in turns; a source that is at its end begins anew, at another sample."""
  tokenizer = tokenizers.load(MODEL)
  fit = []
  for source in texts:
    chats = ([{'role': 'user', 'content': text}] for text in source)
    fit.append([*itertools.islice((x for x in chats if len(tokenizer.chat(x)) <= PROMPT_TOKENS), rounds)])
  for i in range(rounds):
    for number, chats in enumerate(fit):
      greedy = (i + number) % GREEDY_EACH == 0 and i < len(chats)  # once: a second one would be the same
      settings = dict(temperature=0.0 if greedy else 1.0, max_new_tokens=NEW_TOKENS, logprobs=TOP)
      yield {'prompt': chats[i % len(chats)], **settings}


def main():
  """Write requests."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('out', type=pathlib.Path)
  parser.add_argument('--own', type=int, help='ask for so many prompts of the model, and for nothing else')
  parser.add_argument('--gsm8k', help='train.jsonl of GSM8K')
  parser.add_argument('--multi30k', help='train.en of Multi30k, sentences to translate')
  parser.add_argument('--spec_bench', help='question.jsonl of Spec-Bench')
  parser.add_argument('--written', help="the output of --own's request")
  parser.add_argument('--rounds', type=int, default=1500, help='prompts of each source (1500)')
  args = parser.parse_args()
  if not args.own and not (texts := sources(args)):
    parser.error('name a source of prompts, as --gsm8k train.jsonl, or --own COUNT')
  lines = own(args.own) if args.own else requests(texts, args.rounds)
  args.out.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))


if __name__ == '__main__':
  main()
