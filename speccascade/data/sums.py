"""Word problems with one right answer, chains of sums in GSM8K's form: {"question": …, "answer": "26+4=30 #### 30"}.

The same seed makes the same problems. They are the texts of the family `sums`: `family:sums/train.jsonl` has 20 000,
`family:sums/test.jsonl` 600 others.
"""

from collections.abc import Iterator
import itertools
import json
import random

TRAIN, TEST = 20_000, 600
NAMES = ('Ada', 'Bilal', 'Chen', 'Dora', 'Emil', 'Farah', 'Goran', 'Hana', 'Ivan', 'Juno', 'Kofi', 'Lin', 'Mara')
THINGS = ('acorns', 'beads', 'bricks', 'candles', 'dice', 'eggs', 'lemons', 'maps', 'nails', 'pears', 'seeds', 'shells')
BOXES = ('baskets', 'boxes', 'crates', 'sacks', 'trays')
LARGEST = 250

Step = tuple[str, list[tuple[int, str, int]]]  # a sentence, and its operations


def steps(rng: random.Random, number: int, owner: str, other: str, things: str) -> list[Step]:
  """Return one sentence of each kind that may follow when the owner has a number of things."""
  k, packs, each, times = rng.randint(1, 50), rng.randint(2, 9), rng.randint(2, 12), rng.randint(2, 4)
  lost = rng.randint(1, max(1, number - 1))
  parts = [d for d in range(2, 7) if number % d == 0]
  more = number + k
  listed = [
    (f'{owner} picks up {k} more.', [(number, '+', k)]),
    (f'A parcel brings {k} {things}.', [(number, '+', k)]),
    (f'{lost} of them get lost.', [(number, '-', lost)]),
    (f'{owner} passes {lost} on to {other}.', [(number, '-', lost)]),
    (f'Their number is multiplied by {times}.', [(number, '*', times)]),
    (f'{owner} fetches {packs} {rng.choice(BOXES)} of {each}.', [(packs, '*', each), (number, '+', packs * each)]),
    (f'{other} owns {k} more than {owner} and leaves them all to {owner}.', [(number, '+', k), (number, '+', more)]),
  ]
  if parts:
    part = rng.choice(parts)
    listed.append((f'{owner} makes {part} equal heaps and keeps only one.', [(number, '/', part)]))
  return listed


def value(a: int, sign: str, b: int) -> int:
  """Return the result of an operation, whose division leaves nothing over."""
  return {'+': a + b, '-': a - b, '*': a * b, '/': a // b}[sign]


def problem(rng: random.Random) -> dict[str, str]:
  """Return a problem of one to four steps, whose numbers lie in 1 … LARGEST."""
  owner, other = rng.sample(NAMES, 2)
  things = rng.choice(THINGS)
  number = rng.randint(3, 60)
  sentences = [f'{owner} starts with {number} {things}.']
  sums = []
  for _ in range(rng.randint(1, 4)):
    fitting = [s for s in steps(rng, number, owner, other, things) if 1 <= value(*s[1][-1]) <= LARGEST]
    sentence, operations = rng.choice(fitting)
    sentences.append(sentence)
    sums += [f'{a}{sign}{b}={value(a, sign, b)}' for a, sign, b in operations]
    number = value(*operations[-1])
  sentences.append(
    rng.choice((f'How many {things} are left with {owner}?', f"What is the number of {owner}'s {things}?"))
  )
  return {'question': ' '.join(sentences), 'answer': f'{"; ".join(sums)} #### {number}'}


def problems(seed: int = 0) -> Iterator[dict[str, str]]:
  """Yield problems without end, no question twice."""
  rng = random.Random(seed)
  seen = set()
  while True:
    made = problem(rng)
    if made['question'] not in seen:
      seen.add(made['question'])
      yield made


def lines(first: int, last: int) -> Iterator[bytes]:
  """Yield some of the problems, a JSON object a line."""
  for made in itertools.islice(problems(), first, last):
    yield json.dumps(made).encode() + b'\n'
