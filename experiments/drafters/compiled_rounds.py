"""Compile a round with each kind of drafter for a TPU that need not be there, and print its simulated cycles.

python -m experiments.drafters.compiled_rounds [--pair t5_small_xl] [--batches 1,8] [--block 5]
"""

import argparse
import dataclasses
import sys

import jax

from speccascade import methods, Sampler
from speccascade.drafters import hidden, layerskip, one_pass
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.medusa import Medusa, MedusaConfig
from speccascade.host import commands
from speccascade.models import shapes
from speccascade.models.decoder import DecoderConfig, Span
from speccascade.planning import aot, program_report
from speccascade.types import Model


def drafters(small: Model, large: Model) -> dict[str, list[Model]]:
  """Return {drafter: models} beside a large model, heads of its sizes."""
  network = large.network
  c, depth = network.config, network.depth
  layer = DecoderConfig(c.vocab_size, c.embed_dim, *network.head_counts, c.head_dim, c.mlp_dim, (Span(),))
  third = HeadConfig('eagle3', layer, (2, depth // 2, depth - 3), states=3)
  heads = {
    'EAGLE-1': Eagle(HeadConfig('eagle', layer, (-1,)), 'bfloat16'),
    'EAGLE-3': Eagle(third, 'bfloat16'),
    'P-EAGLE': Eagle(dataclasses.replace(third, mask_token=3, own_embedding=True), 'bfloat16'),
    'Medusa': Medusa(MedusaConfig(c.embed_dim, c.vocab_size, 5, own_scores=False), 'bfloat16'),
  }
  return {
    'small, token by token': [small, large],
    'small, one pass': [one_pass(small, 3), large],
    'layer skip, a third of the layers': [layerskip.layerskip(large, depth // 3), large],
    **{name: hidden.beside(aot.shaped(head), large) for name, head in heads.items()},
  }


def main():
  """Compile and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--topology', default='v5e:2x2')
  parser.add_argument('--pair', default='t5_small_xl', choices=list(shapes.PAIRS))
  parser.add_argument('--batches', type=commands.counts, default=(1, 8))
  parser.add_argument('--drafters', nargs='*', help='parts of the names of those to compile (all)')
  parser.add_argument('--block', type=commands.count, default=5)
  args = parser.parse_args()
  method = methods.speculative(block=args.block)
  print(
    '| drafter | batch | a round, M cycles | drafting | scoring | over traffic | row loops, cache copies |', flush=True
  )
  print('| --- | --- | --- | --- | --- | --- | --- |', flush=True)
  for name, models in drafters(*aot.models_of([args.pair], 'bfloat16')).items():
    chosen = args.drafters is None or any(part in name for part in args.drafters)
    for batch in args.batches if chosen else ():
      report = program_report.of_topology(args.topology, method, models, aot.Sizes(batch, 256, 128), Sampler(1.0))
      parts = {kind: 0.0 for kind in ('propose', 'score')}
      for phase, cycles in report['cycles_by_phase'].items():
        kind = phase.partition('_')[0]
        parts[kind] = parts.get(kind, 0.0) + cycles / 1e6
      whole, traffic = (report[f'{kind}_cycles'] / 1e6 for kind in ('simulated', 'traffic'))
      zeros = f'{report["row_loops"]}, {report["cache_copies"]}'
      figures = f'{whole:.2f} | {parts["propose"]:.2f} | {parts["score"]:.2f} | {whole / traffic:.2f} | {zeros}'
      print(f'| {name} | {batch} | {figures} |', flush=True)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sys.exit(main())
