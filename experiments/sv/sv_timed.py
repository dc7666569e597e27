"""Time speculative verification with random weights of any shapes, and compare the ratios with the cost model's.

  python -m experiments.sv.sv_timed plan.json --verifier 1024x16 --companion 192x3 --draft 128x2 --batch 32 --block 5

Tokens are accepted, and the companion promises acceptance, as in a draft that the plan's models were observed with; the
models only do the work. So the verifier may be as large as memory allows. Run it on a quiet machine: each line is the
median of trials that take turns, rounds of full batches over plain decoding, and what `sv_costs` predicts from
the times of calls.
"""

import argparse
import sys

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.sv.sv_simulated import compare, timed_methods
from speccascade import acceptance, Model, Sampler
from speccascade.engine.phases import Score
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.planning import profiling, sv_model, timing
from speccascade.sv import plans
from speccascade.sv.verification import Goodput
from speccascade.types import Told

HEAD = 64


def pick(start: jax.Array, count: int) -> jax.Array:
  """Return the number of the recorded draft of each row [B], by its position in the text."""
  row = jnp.arange(start.shape[0], dtype=jnp.uint32)
  mixed = (start.astype(jnp.uint32) * np.uint32(2654435761)) ^ (row * np.uint32(2246822519))
  return ((mixed ^ (mixed >> 15)) % np.uint32(count)).astype(jnp.int32)


@struct.dataclass
class Recorded(Goodput):
  """A choice that does the work of `Goodput` and goes by what the table promised of recorded drafts [N, W]."""

  promised: jax.Array = None

  def acceptance(self, state):
    """Return the recorded promises of the tokens that may be scored [B, most]."""
    own = super().acceptance(state)
    recorded = self.promised[pick(state.length, len(self.promised)), : own.shape[1]]
    return jnp.where(own >= 0, jnp.where(own > 0, recorded, 0), own)


@acceptance.acceptor(reads=(), told=Told.NOTHING)
def accept_recorded(trial, *, chances):
  """Accept each token with the chance [N, W] of the recorded draft, whatever the models compute."""
  pi, q = acceptance.at_tokens(trial)
  recorded = chances[pick(trial.start, len(chances)), : pi.shape[1]]
  recorded = jnp.pad(recorded, ((0, 0), (0, pi.shape[1] - recorded.shape[1])))
  ok, noise = trial.noise.accept(recorded + 0 * pi, jnp.ones_like(q), trial.position, trial.start)
  return acceptance.Verdict(acceptance.leading(ok & acceptance.in_test(trial))), noise


def model_of(shape: str, vocab: int, name: str):
  """Return a decoder of random weights, EMBEDxLAYERS."""
  embed, layers = map(int, shape.split('x'))
  heads = max(1, embed // HEAD)
  config = DecoderConfig(vocab, embed, heads, heads, HEAD, 4 * embed, (Span(),) * layers)
  network = Decoder(config, (), 'float32')
  return Model(jax.jit(network.init)(jax.random.key(0)), network, name=name)


def prepare(observed: plans.Profile, models, args) -> tuple[plans.Profile, dict]:
  """Return the profile of these models with the plan's samples, and the methods to time."""
  seen = sv_model.windows(observed.samples, args.block)
  chances = jnp.asarray(seen['accept'], jnp.float32)
  promised = observed.table.predict(seen['s'].reshape(-1), seen['a'].reshape(-1)).reshape(seen['s'].shape)
  accept = jax.tree_util.Partial(accept_recorded, chances=chances)
  sizes = dict(source=args.source, tokens=args.tokens)
  times, steps = profiling.measure_times(models, args.block, [args.batch], trials=args.trials, **sizes)
  prompts = [list(range(args.source))] * args.batch
  all_tokens = dict(max_new_tokens=args.tokens, max_prompt_tokens=args.source, sampler=Sampler())
  full = lambda method: timing.full_rounds(method, models, prompts, args.batch, **all_tokens)
  draft, companion, alone = steps[args.batch]
  rounds = timing.interleave({'all': full(profiling.scoring_all(args.block))}, args.trials)['all']
  spent = np.median([one.seconds / one.rounds for one in rounds])
  whole = times[args.batch][args.batch * (args.block + 1)]
  overhead = profiling.overhead(float(spent), args.block, draft, companion, whole)
  steps = {args.batch: (draft, companion, alone, overhead)}
  profile = plans.Profile.of(observed.table, observed.origin, observed.samples, times, steps)

  def recorded(method):
    return method.replace(phases=tuple(map(scored, method.phases)), origin=None).accepting(accept)

  def scored(phase):
    if not (isinstance(phase, Score) and isinstance(phase.limit, Goodput)):
      return phase
    fields = {name: getattr(phase.limit, name) for name in Goodput.__dataclass_fields__}
    return phase.replace(limit=Recorded(**fields, promised=jnp.asarray(promised, jnp.float32)))

  made = timed_methods(plans.Profile(profile.table, profile.latency), args.block, {1, 3, args.block})
  runs = {'plain': full(made.pop('plain'))}
  for name, method in made.items():
    runs[name] = full(recorded(method) if name.startswith('SV') else method.accepting(accept))
  return profile, runs


def main():
  """Time and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('plan', help='a plan of three models, for its samples; its γ is at least --block')
  parser.add_argument('--draft', default='128x2')
  parser.add_argument('--companion', default='192x3')
  parser.add_argument('--verifier', default='1024x16')
  parser.add_argument('--vocab', type=int, default=4096)
  parser.add_argument('--batch', type=int, default=32)
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--source', type=int, default=32)
  parser.add_argument('--tokens', type=int, default=64)
  parser.add_argument('--trials', type=int, default=5)
  args = parser.parse_args()
  shapes = zip((args.draft, args.companion, args.verifier), ('draft', 'companion', 'verifier'), strict=True)
  models = timing.endless([model_of(shape, args.vocab, name) for shape, name in shapes])
  profile, runs = prepare(plans.profile_of(args.plan), models, args)
  draft, companion, alone, overhead = profile.steps[args.batch]
  widths = {n // args.batch: seconds / alone for n, seconds in profile.times[args.batch].items()}
  calls = ', '.join(f'{n} {x:.2f}' for n, x in widths.items())
  print(f'verifier {1e3 * alone:.2f} ms a step; over it: draft {draft / alone:.3f}, companion {companion / alone:.3f}')
  print(f'overhead of a round {overhead / alone:.3f}; verifier by tokens of each row: {calls}')
  compare(profile, args.batch, args.block, runs, args.trials)


if __name__ == '__main__':
  sys.exit(main())
