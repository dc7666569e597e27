"""Judge many compositions: `python tests/compositions_run.py pairs|chance --number N --out FILE.jsonl [--shard I/N]`.

Each case appends a line to the file, and a call goes on where the file ends. At the end, or with `--number 0` of what
the file has, it prints what contradicts the law (exit code 1), refusals that nothing needed, and what is lossy by
verdict alone. The long tier concludes by the same functions.
"""

import argparse
import collections
from collections.abc import Iterable, Iterator
import itertools
import json
import pathlib
import re
import sys
import time
from typing import Any

import compiling

if __name__ == '__main__':
  compiling.quickly()

import compositions  # noqa: E402
from found_out import Case, judge  # noqa: E402
import jax  # noqa: E402

NEEDLESS = pathlib.Path(__file__).parent / 'needless_refusals.txt'
Line = dict[str, Any]


def stem(sentence: str) -> str:
  """Return a refusal without numbers, names of what was drawn, of schedules and, at its start, of the method."""
  names = sorted({str(x) for axis in compositions.AXES.values() for x in axis()}, key=len, reverse=True)
  plain = re.sub('|'.join(rf'\b{re.escape(n)}\b' for n in names), '…', sentence)
  plain = re.sub(r'^(method|…(\[…\])?) ', '… ', re.sub(r'\d+', 'N', plain))
  return re.sub(r'(stale )?(greedy )?(goodput( of accepted tokens)?|top \S+|causal|…\(\)) by …', '… by …', plain)[:90]


def line(number: int, case: Case) -> Line:
  """Judge a case."""
  begun = time.perf_counter()
  judged = judge(case)
  return dict(
    number=number,
    chosen=dict(case.chosen),
    verdict=judged.verdict.kind,
    stem=stem(judged.verdict.sentence),
    off=judged.found.off,
    differs=judged.differs,
    error=judged.error,
    contradicts=judged.contradicts,
    case=str(judged) if judged.contradicts else str(case.method),
    seconds=round(time.perf_counter() - begun, 1),
  )


def cases(which: str, seed: Any) -> Iterator[Case]:
  """Return the cases of a run, in an order that a seed fixes."""
  return compositions.covering(seed) if which == 'pairs' else compositions.by_chance(seed)


def run(drawn: Iterable[Case], path: pathlib.Path, shard: tuple[int, int] = (0, 1)) -> list[Line]:
  """Judge the cases of a shard that a file lacks; return all of its lines."""
  lines = read(path)
  has = {one['number'] for one in lines}
  missing = ((i, case) for i, case in enumerate(drawn) if i % shard[1] == shard[0] and i not in has)
  with path.open('a') as file:
    for count, (number, case) in enumerate(missing):
      lines.append(line(number, case))
      print(json.dumps(lines[-1], ensure_ascii=False), file=file, flush=True)
      if count % 25 == 24:
        jax.clear_caches()  # memory mappings have a limit
  return lines


def read(path: pathlib.Path) -> list[Line]:
  """Return the lines of a file; one that was cut off is removed."""
  if not path.exists():
    return []
  whole = path.read_bytes().rpartition(b'\n')
  if whole[2]:
    path.write_bytes(b''.join(whole[:2]))
  return [json.loads(one) for one in whole[0].splitlines()]


def conclusions(lines: Iterable[Line]) -> dict[str, list[str]]:
  """Return contradictions, needless refusals that are not listed, and what is lossy by verdict alone."""
  lossy, refused = collections.defaultdict(list), collections.defaultdict(list)
  wrong = []
  for one in lines:
    if one['contradicts']:
      wrong.append(f'{one["number"]}: {one["case"]}')
    if one['verdict'] == 'lossy' and one['differs'] is not None:
      kind = ' · '.join(f'{axis} {one["chosen"].get(axis)}' for axis in ('accept', 'predictor', 'budget', 'ending'))
      lossy[kind].append(one['differs'])
    if one['verdict'] == 'refused' and one['differs'] is not None:
      refused[one['stem']].append(one['differs'])
  listed = NEEDLESS.read_text().splitlines()
  return {
    'contradictions': wrong,
    'needless refusals': sorted(s for s, differ in refused.items() if not any(differ) and s not in listed),
    'lossy by verdict alone': sorted(k for k, differ in lossy.items() if len(differ) > 5 and not any(differ)),
  }


def summary(lines: list[Line]) -> str:
  """Return the conclusions, and how many cases had which verdict."""
  kinds = collections.Counter(one['verdict'] for one in lines)
  seen = sum(one['differs'] is not None for one in lines)
  seconds = sum(one['seconds'] for one in lines)
  said = [f'{len(lines)} cases in {seconds:.0f} s, {seen} found out: {", ".join(f"{n} {k}" for k, n in kinds.items())}']
  for name, some in conclusions(lines).items():
    said += [f'{name}: {len(some)}', *some]
  return '\n'.join(said)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('which', choices=('pairs', 'chance'))
  parser.add_argument('--number', type=int, help='how many cases are drawn; all pairs without')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--shard', default='0/1', help='I/N: every N-th case from the I-th')
  parser.add_argument('--seed', default='0', help='others draw others')
  asked = parser.parse_args(argv)
  if asked.which == 'chance' and asked.number is None:
    parser.error('chance needs --number')
  at, of = map(int, asked.shard.split('/'))
  lines = run(itertools.islice(cases(asked.which, asked.seed), asked.number), asked.out, (at, of))
  print(summary(lines))
  return int(any(one['contradicts'] for one in lines))


if __name__ == '__main__':
  jax.config.update('jax_numpy_dtype_promotion', 'strict')
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  sys.exit(main())
