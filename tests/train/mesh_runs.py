"""Train on meshes of 8 virtual devices, in a process of its own, for JAX counts its devices when it starts.

  python tests/train/mesh_runs.py OUT NETWORK:OPTIMIZER:DATAxMODEL:MICROBATCHES[:killed] …

Instead of a mesh, `all` is the one that training makes by itself. Each run is in a folder of OUT with the name of its
case, writes its parameters to OUT/CASE.npz, and prints a JSON line: the digest of their bits, the number of devices
that have each of them, and how the arguments of the first step were sharded. A case that ends in `killed` gets SIGKILL
in its fifth step, after one checkpoint; the same command without it goes on.
"""

import hashlib
import json
import os
from pathlib import Path
import signal
import sys

WAIT = '--xla_cpu_collective_call_terminate_timeout_seconds=300'  # eight threads may share two busy cores
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8 {WAIT}'

from flax.traverse_util import flatten_dict  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from small import copies, quiet, settings  # noqa: E402

from speccascade.backends import sharding  # noqa: E402
from speccascade.drafters.eagle import Eagle, HeadConfig  # noqa: E402
from speccascade.models.decoder import Decoder, DecoderConfig, Span  # noqa: E402
from speccascade.models.t5 import T5, T5Config  # noqa: E402
from speccascade.train import loop  # noqa: E402
from speccascade.train.optimizers import Optimizer  # noqa: E402
from speccascade.types import Model  # noqa: E402

T5_NET = T5(T5Config(256, 128, 8, 16, 128, encoder_layers=1, decoder_layers=2))
NETWORKS = {
  't5': T5_NET,
  'scanned': T5(T5_NET.config, scan=True),
  'taught': T5_NET,  # by a teacher
  'decoder': Decoder(DecoderConfig(256, 128, 8, 4, 32, 128, (Span(), Span(4)), tied=True), eos_ids=(1,)),
  'masked': T5(T5_NET.config, mask_token=255),
  'head': Eagle(HeadConfig('eagle3', DecoderConfig(256, 128, 8, 4, 32, 128, (Span(),)), (0, 1, 1), states=3)),
}
RATE = 1e-2
STEPS = 6


def run(out: Path, case: str) -> None:
  name, optimizer, shape, microbatches, *killed = case.split(':')
  mesh = None
  if shape != 'all':
    data, model = map(int, shape.split('x'))
    mesh = sharding.mesh({'data': data, 'model': model}, jax.devices()[: data * model])
  network = NETWORKS[name]
  shardings = []
  make = loop.make_step

  def noting(*args, **options):
    step = make(*args, **options)

    def call(state, batch, teacher):
      call.steps += 1
      if killed and call.steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
      given = {'state': state, 'batch': batch, 'teacher': teacher and teacher.params}
      shardings.append({name: shares(tree) for name, tree in given.items()})
      return step(state, batch, teacher)

    call.steps = 0
    return call

  loop.make_step = noting
  options = dict(batch_size=16, steps=STEPS, save_every=3, microbatches=int(microbatches), remat=int(microbatches) > 1)
  optimizer = Optimizer(optimizer, learning_rate=RATE, schedule='constant', warmup=0)
  teacher = None
  if name in ('taught', 'head'):
    teacher = Model(jax.jit(T5_NET.init)(jax.random.key(7)), T5_NET, name='teacher')
  kwargs = dict(teacher=teacher, mesh=mesh, rules='sharded', echo=quiet)
  folder = case.removesuffix(':killed')
  trained = loop.train(out / folder, network, copies(), settings(optimizer=optimizer, **options), **kwargs)
  loop.make_step = make
  params = {name: np.asarray(x) for name, x in flatten_dict(trained.params, sep='.').items()}
  np.savez(out / f'{folder}.npz', **params)
  digest = hashlib.sha256(b''.join(x.tobytes() for x in params.values())).hexdigest()
  devices = len(jax.tree.leaves(trained.params)[0].devices())
  line = {'case': case, 'digest': digest, 'devices': devices, 'steps': len(shardings), **shardings[0]}
  print(json.dumps(line), flush=True)


def shares(tree) -> list[int]:
  """Return, for the elements of a tree on all devices, how many there are and how many on each device."""
  leaves = jax.tree.leaves(tree)
  own = sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in leaves)
  return [sum(x.size for x in leaves), own]


if __name__ == '__main__':
  for case in sys.argv[2:]:
    run(Path(sys.argv[1]), case)
