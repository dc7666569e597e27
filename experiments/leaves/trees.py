"""What trees of drafts would give, by replay of texts: tokens a round of chains, chains with leaves, and trees.

python -m experiments.leaves.trees [--families sums gsm8k multi30k] [--count 64] [--temperatures 0 1] [--out trees.csv]
python -m experiments.leaves.trees --models OUT/draft/model smollm2 --prompts asked.txt --new_tokens 128

The verifier writes texts, and both models read them. At each place the target's token has a rank among the drafter's
choices: `likeliest`, by its distribution, as engines draft, and `one noise`, in the drafter's own race, as leaves are
drawn. A tree has the nodes whose paths are likeliest by the measured chances of ranks, of at most γ levels, so that it
takes as many calls of the drafter as the chain. A round of the replay goes along the tree as long as it has the
target's token, and commits one token more. What is there is not measured again.
"""

import argparse
from collections.abc import Sequence
import functools
import heapq
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.helpers import families, rows
from experiments.leaves.measure import NEW_TOKENS, tokens_a_round
import speccascade
from speccascade import decode, methods, Sampler
from speccascade.data import files
from speccascade.decode import scoring
from speccascade.types import Array, Model

MOST = 64  # ranks that are told apart


def ranks(temperature: float, logits: Array, tokens: Array) -> dict[str, Array]:
  """Return the rank [B, L] of the target's token among a drafter's choices, by how they are made."""
  q, p = logits / (temperature or 1.0)
  found = {'likeliest': (q, tokens)}
  if temperature:
    noise = jax.random.gumbel(jax.random.key(tokens.sum()), q.shape)
    found['one noise'] = (q + noise, (p + noise).argmax(-1))
  at = {name: jnp.take_along_axis(x, token[..., None], -1) for name, (x, token) in found.items()}
  return {name: (x > at[name]).sum(-1) for name, (x, _) in found.items()}


def tree(chances: Sequence[float], nodes: int, depth: int, chain: bool = False) -> set[tuple[int, ...]]:
  """Return the likeliest paths of ranks.

  Args:
    chances: Of each rank, at any place.
    nodes: How many there are.
    depth: The levels.
    chain: Whether the first choices of all levels are there, and other choices have no children.
  """
  first = [(0,) * k for k in range(1, depth + 1)] if chain else []
  found, heap = set(first), []

  def push(path: tuple[int, ...], chance: float):
    for rank, more in enumerate(chances):
      heapq.heappush(heap, (-chance * more, (*path, rank)))

  push((), 1.0)
  while heap and len(found) < nodes:
    chance, path = heapq.heappop(heap)
    found.add(path)
    if len(path) < depth and not (chain and any(path)):
      push(path, -chance)
  return found


def replay(texts: list[np.ndarray], paths: set[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
  """Return the tokens and the rounds of each text whose ranks are given."""
  rounds = []
  for text in texts:
    at, count = 0, 0
    while at < len(text):
      inside = 0
      while tuple(text[at : at + inside + 1]) in paths and at + inside < len(text):
        inside += 1
      at, count = at + inside + 1, count + 1
    rounds.append(count)
  return np.array([len(x) for x in texts]), np.array(rounds)


def drafts(nodes: Sequence[int], leaves: Sequence[int], block: int) -> dict[str, tuple[int, bool]]:
  """Return the number of nodes of each draft, and whether it is a chain with leaves."""
  return {f'{n} leaves': (block + n, True) for n in (0, *leaves)} | {f'tree of {n}': (n, False) for n in nodes}


def of_pair(models: list[Model], prompts: list, temperature: float, new_tokens: int) -> dict[str, list[np.ndarray]]:
  """Return by scheme the ranks of the tokens of texts that the verifier writes."""
  how = dict(max_new_tokens=new_tokens, sampler=Sampler(temperature), batch_size=16, seed=0)
  out = decode(methods.autoregressive(), models[1:], prompts, **how).tokens
  kept = [(prompt, list(map(int, text))) for prompt, text in zip(prompts, out, strict=True) if len(text)]
  asked, texts = zip(*kept, strict=True)
  found = scoring.read(models, asked, texts, functools.partial(ranks, temperature), batch_size=4)
  return {name: [np.minimum(x[name], MOST) for x in found] for name in found[0]}


def main():
  """Measure what is missing, a line each."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--families', nargs='+', default=[*NEW_TOKENS], choices=[*NEW_TOKENS])
  parser.add_argument('--models', nargs=2, help='a pair of your own, in place of families')
  parser.add_argument('--prompts', help='its prompts, a file of lines')
  parser.add_argument('--new_tokens', type=int, default=128)
  parser.add_argument('--count', type=int, default=64)
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--temperatures', type=float, nargs='+', default=[0.0, 1.0])
  parser.add_argument('--leaves', type=int, nargs='+', default=[5, 10])
  parser.add_argument('--nodes', type=int, nargs='+', default=[18, 30, 60])
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('trees.csv'))
  args = parser.parse_args()
  for name in args.models[:1] if args.models else args.families:
    for temperature in args.temperatures:
      key = dict(pair=name, temperature=temperature)
      if rows.has(args.out, key):
        continue
      if args.models:
        models = [speccascade.load(path, dtype='float32') for path in args.models]
        chats = [[{'role': 'user', 'content': line}] for line in files.lines(args.prompts)[: args.count]]
        found = of_pair(models, chats, temperature, args.new_tokens)
      else:
        models, prompts = families.pair(name), families.prompts(name, args.count, 'val')
        found = of_pair(models, prompts, temperature, NEW_TOKENS[name])
      for scheme, texts in found.items():
        counts = np.bincount(np.concatenate(texts), minlength=MOST + 1)
        chances = counts[:MOST] / counts.sum()
        for draft, (nodes, chain) in drafts(args.nodes, args.leaves, args.block).items():
          tokens, half = tokens_a_round(*replay(texts, tree(chances, nodes, args.block, chain)))
          number = dict(tokens_a_round=f'{tokens:.3f}', half=f'{half:.3f}')
          rows.append(args.out, key | dict(scheme=scheme, draft=draft) | number)


if __name__ == '__main__':
  main()
