"""Write tests/checkpoints/t5x_written.tar.xz: checkpoints of tiny models that T5X itself wrote, and its own logits.

  PYTHONPATH=.:T5X python tests/checkpoints/record_t5x.py    # T5X: a copy of its repository whose `import t5x` works

Every variant is a folder with `checkpoint_<step>/` as T5X's Checkpointer (or its Orbax manager) leaves it, and
`expected.npz`: source, length, inputs and the logits of T5X's own forward pass with the weights that it restores.
"""

import functools
import io
import itertools
from pathlib import Path
import tarfile
import tempfile

import flax
import jax
import jax.numpy as jnp
import numpy as np
from t5x import adafactor, checkpoints, partitioning, train_state
from t5x.examples.decoder_only import network as decoder_only
from t5x.examples.scalable_t5 import network as scalable
from t5x.examples.t5 import network as t5

OUT = Path(__file__).with_name('t5x_written.tar.xz')
SIZES = dict(vocab_size=13, emb_dim=8, num_heads=2, num_encoder_layers=2, num_decoder_layers=3, head_dim=3, mlp_dim=10)
SOURCE = np.array([[3, 5, 2, 9, 4, 1], [7, 12, 1, 0, 0, 0]], np.int32)
INPUTS = np.array([[0, 4, 6, 11, 8], [0, 2, 2, 10, 5]], np.int32)
NETWORKS = {  # name: (network, what is set in its config)
  't5': (t5, {}),
  'scanned': (scalable, {}),
  'scanned_axis0': (scalable, {'param_scan_axis': 0}),
  'bias_by_layer': (scalable, {'scan_layers': False}),
}
GELU, RELU = ('gelu', 'linear'), ('relu',)


def variants():
  """Yield (name, network, activations, tied, dtype, version, inlined)."""
  for name, dtype, version, inlined in itertools.product(NETWORKS, ('float32', 'bfloat16'), (2, 3), (False, True)):
    label = f'{name}-{dtype}-v{version}' + '-inlined' * inlined
    yield label, name, GELU, False, dtype, version, inlined
  for acts, tied in itertools.product(
    (('gelu',), ('silu',), ('swish',), RELU, ('relu', 'linear'), ('silu', 'linear')), (False, True)
  ):
    yield f'{"_".join(acts)}-{"tied" if tied else "untied"}', 't5', acts, tied, 'float32', 3, True
  yield 'scanned-tied', 'scanned', GELU, True, 'float32', 3, True


class Inlined(partitioning.PjitPartitioner):
  """A partitioner that partitions nothing, so that T5X writes every array into its msgpack file."""

  def get_mesh_axes(self, state):
    """Return no axes."""
    return jax.tree.map(lambda _: None, super().get_mesh_axes(state))


def module_of(name: str, acts, tied: bool):
  """Return T5X's module of a variant."""
  network, extra = NETWORKS[name]
  return network.Transformer(network.T5Config(**SIZES, **extra, mlp_activations=acts, logits_via_embedding=tied))


def batch():
  """Return T5X's features; targets hide nothing."""
  return dict(encoder_input_tokens=SOURCE, decoder_input_tokens=INPUTS, decoder_target_tokens=np.ones_like(INPUTS))


@functools.cache
def made(module):
  """Return a module's variables as T5X makes them."""
  return jax.device_get(module.init(jax.random.key(0), **batch(), enable_dropout=False))


def initial(module, seed: int):
  """Return variables of which no two layers, no relative bias and no norm are as they start."""
  random = np.random.default_rng(seed)
  change = lambda x: (x + random.normal(0, 0.1, x.shape)).astype(x.dtype)
  variables = flax.core.unfreeze(made(module))
  return {**variables, 'params': jax.tree.map(change, variables['params'])}


@functools.partial(jax.jit, static_argnums=0)
def logits(module, params):
  """Return what T5X computes."""
  return module.apply({'params': params}, **batch(), enable_dropout=False)


def save(folder: Path, state, dtype: str, version: int, inlined: bool):
  """Let T5X write a state."""
  partitioner = (Inlined if inlined else partitioning.PjitPartitioner)(num_partitions=1)
  checkpoints.VERSION = version
  if version == 2 and dtype == 'bfloat16' and not inlined:  # as it was: the bits as whole numbers
    bits = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16).view(np.uint16), state.params)
    state, dtype = state.replace_params(bits), 'uint16'
  checkpoints.Checkpointer(state, partitioner, str(folder), save_dtype=jnp.dtype(dtype)).save(state)


def record(folder: Path, name: str, acts, tied: bool, dtype: str, version: int, inlined: bool):
  """Write one variant and what T5X computes with it."""
  module = module_of(name, acts, tied)
  variables = initial(module, 1)
  state = train_state.InferenceState.create(flax.core.freeze(variables)).replace_step(jnp.asarray(7))
  save(folder, state, dtype, version, inlined)
  params = jax.tree.map(lambda x: np.asarray(x, jnp.dtype(dtype)).astype(np.float32), variables['params'])
  np.savez(folder / 'expected.npz', source=SOURCE, inputs=INPUTS, logits=logits(module, params))


def record_others(root: Path):
  """Write a state of training, one by the Orbax manager, scanned layers that share a bias, and a decoder_only model."""
  module = module_of('t5', GELU, False)
  variables = flax.core.freeze(initial(module, 2))
  factored = adafactor.Adafactor(1e-3, logical_factor_rules=adafactor.standard_logical_factor_rules())
  state = train_state.FlaxOptimTrainState.create(factored, variables).replace_step(jnp.asarray(7))
  expected = dict(source=SOURCE, inputs=INPUTS, logits=logits(module, variables['params']))
  save(root / 'training', state, 'float32', 3, False)
  np.savez(root / 'training' / 'expected.npz', **expected)
  shape, partitioner = jax.eval_shape(lambda: state), partitioning.PjitPartitioner(num_partitions=1)
  (root / 'orbax').mkdir()
  manager = checkpoints.OrbaxCheckpointManagerInterface(str(root / 'orbax'), shape, partitioner, save_dtype=jnp.float32)
  manager.save(state)
  manager.close()
  np.savez(root / 'orbax' / 'expected.npz', **expected)

  module = module_of('scanned', GELU, False)
  variables = initial(module, 3)
  for stack in ('encoder', 'decoder'):
    bias = variables['params'][stack][stack]['relpos_bias']
    bias['rel_embedding'] = np.repeat(bias['rel_embedding'][:, :1], bias['rel_embedding'].shape[1], axis=1)
  state = train_state.InferenceState.create(flax.core.freeze(variables)).replace_step(jnp.asarray(7))
  save(root / 'scanned-one_bias', state, 'float32', 3, True)
  expected['logits'] = logits(module, variables['params'])
  np.savez(root / 'scanned-one_bias' / 'expected.npz', **expected)

  sizes = {k: v for k, v in SIZES.items() if 'coder_layers' not in k}
  module = decoder_only.DecoderWrapper(decoder_only.TransformerConfig(**sizes, num_layers=2))
  variables = flax.core.freeze(jax.device_get(module.init(jax.random.key(0), INPUTS, INPUTS, enable_dropout=False)))
  state = train_state.InferenceState.create(variables).replace_step(jnp.asarray(7))
  save(root / 'decoder_only', state, 'float32', 3, True)


def main():
  """Write the archive."""
  with tempfile.TemporaryDirectory() as scratch:
    root = Path(scratch)
    for label, *rest in variants():
      record(root / label, *rest)
    record_others(root)
    with tarfile.open(OUT, 'w:xz', preset=9) as archive:
      for path in sorted(p for p in root.rglob('*') if p.is_file()):
        info = tarfile.TarInfo(str(path.relative_to(root)))  # neither owner nor time, for the same bytes each time
        data = path.read_bytes()
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    print(f'{OUT}: {OUT.stat().st_size / 1e3:.0f} kB, {len(list(root.iterdir()))} variants')


if __name__ == '__main__':
  main()
