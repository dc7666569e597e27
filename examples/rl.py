"""Policy gradient with speculative rollouts: a translator learns from BLEU, while a frozen drafter drafts for it.

  python examples/rl.py

Of each prompt the large model of the package writes some translations by speculative decoding. The small one drafts
them, and the texts follow the large model all the same. `trace='target'` gives the log-probability ℓ of each token
under the distribution that it was drawn from, which is what the ratio of a policy gradient divides by:

  loss = − mean over tokens of exp(log π(x) − ℓ) · A,   A = (BLEU − mean) / deviation of the prompt's texts

At the first update of a batch the ratio is 1, by which a rollout is checked against the trainer. The weights change at
each step, and nothing is compiled again. The drafter stays as it was, so the printed acceptance tells how it ages: in
30 steps, two minutes on two cores, BLEU went from 65 to 79 and acceptance from .87 to .80.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sacrebleu

import speccascade
from speccascade import embedded, methods, Request, Sampler
from speccascade.sampling import at_token, log_softmax
from speccascade.train.batches import collate
from speccascade.train.losses import logits_of

BLOCK, TOKENS = 4, 48
SOURCES, WIDTH = 64, 48  # tokens of prompts and texts, to which all batches are padded
METHOD = methods.speculative(block=BLOCK)


def rollouts(models, prompts, samples, step):
  """Return the texts of each prompt: tokens, log-probabilities, texts, and the share of drafted tokens accepted."""
  requests = [Request(prompt, n=samples) for prompt in prompts]
  call = dict(max_new_tokens=TOKENS, max_prompt_tokens=SOURCES, sampler=Sampler(1.0), seed=step, trace='target')
  out = speccascade.decode(METHOD, models, requests, **call)
  return out.tokens, out.target_logprobs, out.texts, out.stats.accepted.sum() / out.stats.tested.sum()


def advantages(texts, targets, samples):
  """Return the BLEU of each text, and by how many standard deviations it is above the mean of the prompt's."""
  scorer = sacrebleu.BLEU(effective_order=True)
  wanted = np.repeat(targets, samples)
  rewards = np.array([scorer.sentence_score(text, [target]).score for text, target in zip(texts, wanted, strict=True)])
  of_prompt = rewards.reshape(-1, samples)
  apart = (of_prompt - of_prompt.mean(1, keepdims=True)) / (of_prompt.std(1, keepdims=True) + 1)
  return rewards, apart.reshape(-1).astype(np.float32)


def padded(rows):
  """Return rows of numbers as an array [rows, WIDTH]."""
  found = np.zeros((len(rows), WIDTH), np.float32)
  for i, row in enumerate(rows):
    found[i, : len(row)] = row
  return found


def learner(network, optimizer):
  """Return the jitted step: (params, state, batch, ℓ, A) to params, state, and how far the ratio is from 1."""

  def loss(params, batch, before, advantage):
    logits = logits_of(network, params, batch)
    logp = at_token(log_softmax(logits.astype(jnp.float32)), batch.target)
    real = jnp.arange(WIDTH) < batch.target_length[:, None]
    ratio = jnp.exp(jnp.where(real, logp - before, 0))
    gain = jnp.where(real, ratio * advantage[:, None], 0)
    return -gain.sum() / real.sum(), jnp.abs(ratio - 1).max()

  @jax.jit
  def step(params, state, batch, before, advantage):
    (_, off), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, before, advantage)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, off

  return step


def main():
  """Train, and print a line for each step."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--steps', type=int, default=30)
  parser.add_argument('--prompts', type=int, default=16, help='of a step, half of all')
  parser.add_argument('--samples', type=int, default=4, help='of a prompt')
  parser.add_argument('--rate', type=float, default=1e-4, help='learning rate of Adam')
  args = parser.parse_args()
  small, large = embedded.models('float32')
  pairs = embedded.sentences('train', 2 * args.prompts)
  optimizer = optax.adam(args.rate)
  state = optimizer.init(large.params)
  learn = learner(large.network, optimizer)
  for step in range(args.steps):
    prompts, targets = zip(*pairs[step % 2 :: 2], strict=True)
    tokens, before, texts, accepted = rollouts([small, large], prompts, args.samples, step)
    rewards, advantage = advantages(texts, targets, args.samples)
    sources = [large.tokenizer.encode(prompt) for prompt in np.repeat(prompts, args.samples)]
    batch = collate([*zip(sources, tokens, strict=True)], [(SOURCES, WIDTH)])
    params, state, off = learn(large.params, state, batch, padded(before), advantage)
    assert off < 1e-4, f'the rollout and the trainer differ by {off}'
    large = large.replace(params=params)
    print(f'step {step}: BLEU {rewards.mean():.1f}, accepted {accepted:.3f}, ratio off 1 by {off:.0e}', flush=True)


if __name__ == '__main__':
  main()
