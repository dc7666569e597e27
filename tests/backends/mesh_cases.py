"""Decode on meshes of 8 virtual devices and on one, and say of each case whether tokens and statistics are the same.

  python tests/backends/mesh_cases.py FAMILY:METHOD:TEMPERATURE:MESH:batch|queue[:gumbel][:texts][:target] …

It runs in a process of its own, for JAX counts its devices when it starts. The drafter is replicated, the other models
are sharded. MESH is DATAxMODEL, DATAxMODELxEXPERT with an axis for experts, or the drafters' and the verifier's, as in
2x1/1x4. With `texts` statistics may differ, as where a method decides for the batch; with `target` its
log-probabilities are compared too. Cases of TPUs come last: all after
them run on that backend.
"""

import dataclasses
import functools
import json
import os
import sys

WAIT = '--xla_cpu_collective_call_terminate_timeout_seconds=300'  # eight threads may share two busy cores
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8 {WAIT}'

from flax import struct  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import reference  # noqa: E402

from speccascade import acceptance, backends, decode, methods, Request, rules, Sampler, stopping
from speccascade.backends import sharding
from speccascade.backends.quantised import quantised  # noqa: E402
from speccascade.checkpoints.hf import FAMILIES, network_from_config
from speccascade.drafters import one_pass, translation  # noqa: E402
from speccascade.drafters.eagle import Eagle, HeadConfig  # noqa: E402
from speccascade.drafters.layerskip import layerskip  # noqa: E402
from speccascade.drafters.ngram import drafter  # noqa: E402
from speccascade.models import toy  # noqa: E402
from speccascade.models.decoder import Decoder, DecoderConfig, Span  # noqa: E402
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig  # noqa: E402
from speccascade.planning import planner
from speccascade.sv import plans, predictors, verification
from speccascade.sv.predictors import AcceptanceTable  # noqa: E402
from speccascade.train import losses
from speccascade.train.batches import collate
from speccascade.types import Model, Told  # noqa: E402

VOCAB, BATCH = 512, 8
STACK = DecoderConfig(VOCAB, 32, 8, 4, 8, 64, (Span(), Span(6)), norms='sandwich', attention_cap=4.0, final_cap=4.0)
NETWORKS = {
  't5': T5(T5Config(VOCAB, 32, 8, 8, 64, encoder_layers=1, decoder_layers=1)),
  't5 scanned': T5(T5Config(VOCAB, 32, 8, 8, 64, encoder_layers=1, decoder_layers=2), scan=True),
  't5 on tpus': T5(T5Config(VOCAB, 32, 8, 64, 64, encoder_layers=1, decoder_layers=1)),
  't5 scanned on tpus': T5(T5Config(VOCAB, 32, 8, 64, 64, encoder_layers=1, decoder_layers=2), scan=True),
  'decoder': Decoder(DecoderConfig(VOCAB, 32, 8, 4, 8, 64, (Span(), Span(6)), tied=True), (1,)),
  'decoder of int8': Decoder(DecoderConfig(VOCAB, 32, 8, 4, 8, 64, (Span(), Span(6)), tied=True), (1,), quantised=True),
  't5 of int8': T5(T5Config(VOCAB, 32, 8, 8, 64, encoder_layers=1, decoder_layers=1), quantised=True),
  't5gemma': T5(
    T5GemmaConfig(**vars(STACK) | dict(tied=True), encoder=dataclasses.replace(STACK, heads=16, kv_heads=8))
  ),
  't5gemma2': T5(T5GemmaConfig(**vars(STACK) | dict(tied=True), encoder=STACK, merged=True)),
  't5gemma on tpus': T5(T5GemmaConfig(**vars(STACK) | dict(heads=4, kv_heads=2, head_dim=64), encoder=STACK)),
  'grouped on tpus': Decoder(DecoderConfig(VOCAB, 32, 8, 2, 128, 64, (Span(), Span(6)), tied=True), (1,)),
  'decoder on tpus': Decoder(DecoderConfig(VOCAB, 32, 4, 2, 64, 64, (Span(), Span(6)), tied=True), (1,)),
}
TABLE = AcceptanceTable(np.float32([0.75]), np.float32([[0.9], [0.95]]), np.float32([[0.1, 0.6], [0.2, 0.9]]))
PROFILE = plans.Profile(TABLE, np.float32(3 * BATCH + np.arange(5 * BATCH)))


def weighted(*weights):
  return functools.partial(rules.weighted, weights=weights)


@struct.dataclass
class Likely(verification.Budget):
  """Verify a row's tokens up to the first that is less likely than some; its draft goes on."""

  told = Told.NOTHING

  def __call__(self, chances, active):
    return acceptance.leading(chances >= 0.003)


METHODS = {  # the method, and which of the models it runs
  'autoregressive': (methods.autoregressive(0), 'l'),
  'speculative': (methods.speculative(block=4), 'sl'),
  'block verification': (methods.speculative(block=4, accept=acceptance.block), 'sl'),
  'ensemble': (methods.ensemble(weighted(0.5, 0.5)), 'sl'),
  'ensemble in parallel': (methods.ensemble_parallel(weighted(0.5, 0.5)), 'sl'),
  'oracle': (methods.oracle(functools.partial(rules.diff, alpha=-0.002)), 'sl'),
  'naive cos': (methods.naive_cos(weighted(0.5, 0.5), 4), 'sl'),
  'opaque ensemble': (methods.ensemble_sd(weighted(0.5, 0.5), 4), 'sl'),
  'cos of two': (methods.cos(weighted(0.5, 0.5), (4, 1)), 'sl'),
  'cos of three': (methods.cos(weighted(0.4, 0.3, 0.3), (2, 1, 1)), 'sml'),
  'sv': (methods.sv(PROFILE, 4), 'sml'),
  'sv exact': (methods.sv_exact(PROFILE, 4), 'sml'),
  'scheduled': (methods.scheduled(predictors.drawn_q, 4, budget=Likely()), 'sl'),
  'by batch': (
    methods.by_batch({2: methods.autoregressive(2), BATCH: methods.speculative(block=3, pair=(0, 2))}),
    'sml',
  ),
  'sequence cascade': (methods.sequence_cascade(threshold=-3.0), 'sl'),
  'bild': (methods.bild(0.02, 6.0, 4), 'sl'),
  'token cascade': (methods.token_cascade(functools.partial(rules.chow, alpha=0.97), 4), 'sl'),
  'layerskip': (methods.speculative(block=3), 'fl'),
  'translated': (methods.speculative(functools.partial(rules.opt, alpha=0.1), 3), 'xl'),
  'one pass': (methods.speculative(block=3), 'ol'),
  'head': (methods.speculative(functools.partial(rules.opt, alpha=0.1), block=3, drafter=2), 'slh'),
  'ngram': (methods.speculative(block=3, policy=stopping.Fallback(np.float32(0.5))), 'nl'),
}


def declared(family: str):
  """Return a tiny network of a declared family, of sizes that divide."""
  sizes = {'vocab_size': VOCAB, 'num_attention_heads': 8, 'num_key_value_heads': 4, 'head_dim': 8}
  sizes |= {'hidden_size': 64, 'num_hidden_layers': 2}
  sizes |= {key: 4 for key in ('num_local_experts', 'num_experts') if key in FAMILIES[family].tiny}
  return network_from_config({'model_type': family, **FAMILIES[family].tiny, **sizes})


@functools.cache
def models(family: str) -> dict[str, Model]:
  """Return a verifier and models near it."""
  network = NETWORKS[family] if family in NETWORKS else declared(family)
  large = dataclasses.replace(network, quantised=False).init(jax.random.key(0))
  if (
    'final_norm' in large
  ):  # a tied head's distributions would be all but certain, and ties of their confidence rounding
    large['final_norm']['scale'] *= 0.2

  def near(seed: int, scale: float):
    leaves, tree = jax.tree.flatten(large)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([x * (1 + scale * jax.random.normal(k, x.shape)) for x, k in zip(leaves, keys, strict=True)])

  made = {'s': near(1, 0.3), 'm': near(2, 0.2), 'l': large}
  made = {name: quantised(params) if network.quantised else params for name, params in made.items()}
  return {name: Model(params, network, name=name) for name, params in made.items()}


@functools.cache
def logits(family: str) -> list:
  """Return pairs of logits of the drafter and the verifier of a family."""
  tokens = np.random.default_rng(1).integers(2, VOCAB, (BATCH, 12)).tolist()
  batch = collate([(row[:4], row[4:]) for row in tokens], [(4, 8)])
  found = (losses.logits_of(m.network, m.params, batch) for m in map(models(family).get, 'sl'))
  return list(zip(*(np.asarray(x, np.float64).reshape(-1, VOCAB) for x in found), strict=True))


def method(family: str, name: str):
  """Return a method and which of the models it runs: one of `METHODS`, or a cascade by a rule of the package."""
  if name in METHODS:
    return METHODS[name]
  rule = reference.bound(name, reference.telling(name, logits(family)))
  return methods.speculative(rule, 4), 'sl'


def translated(model: Model) -> Model:
  """Return a model that lacks every third of its own tokens."""
  ids = np.arange(VOCAB)
  return translation.translated(model, for_=model, tables=(ids, np.where(ids % 3 == 2, -1, ids)))


@functools.cache
def head() -> Model:
  """Return a head for a verifier of 32 numbers."""
  layer = DecoderConfig(VOCAB, 32, 8, 4, 8, 64, (Span(),))
  network = Eagle(HeadConfig('eagle', layer, (-1,)))
  return Model(network.init(jax.random.key(3)), network, name='head')


def chosen(family: str, names: str, place) -> list[Model]:
  """Return the models of a method, each as `place` puts it."""
  at = {name: place(name, m) for name, m in models(family).items() if name in names}
  large = models(family)['l']
  made = {'f': lambda: layerskip(at['l'], 1), 'n': lambda: drafter(at['l']), 'x': lambda: translated(place('x', large))}
  made |= {'o': lambda: one_pass(place('o', large), 5), 'h': lambda: place('s', head())}
  return [at[name] if name in at else made[name]() for name in names]


def run(family: str, name: str, sampler: Sampler, line: bool, place, trace=False):
  """Return what a method decodes."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(2, VOCAB, rng.integers(3, 12)).tolist() for _ in range(2 * BATCH if line else BATCH)]
  decoded, names = method(family, name)
  limits = [8 + 5 * (i % 4) for i in range(len(prompts))]
  requests = [Request(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
  given = dict(sampler=sampler, seed=3, batch_size=BATCH, trace=trace)
  return decode(decoded, chosen(family, names, place), requests, **given)


@functools.cache
def alone(*case):
  *case, trace = case
  return run(*case, lambda name, model: model, trace)


def same(case: str) -> dict:
  """Return whether a case gives what one device gives."""
  family, name, temperature, shape, kind, *options = case.split(':')
  of_axes = lambda one: dict(zip(('data', 'model', 'expert'), map(int, one.split('x'))))
  meshes = sharding.meshes(*map(of_axes, shape.split('/')))
  if family.endswith('tpus'):  # their kernel, run without one
    backends.register('cpu', backends.TPU(interpret=True))
  mesh = lambda name: meshes[-1 if name == 'l' else 0]
  rule = lambda name: sharding.REPLICATED if name == 's' else sharding.SHARDED
  sampler = Sampler(float(temperature), coupling='gumbel' if 'gumbel' in options else 'maximal')
  trace = 'target' if 'target' in options else False
  ours = run(family, name, sampler, kind == 'queue', lambda n, m: sharding.place(m, mesh(n), rule(n)), trace)
  one = alone(family, name, sampler, kind == 'queue', trace)
  flat = lambda x: np.concatenate([np.ravel(y) for y in jax.tree.leaves(x)])
  pairs = [(name, flat(x), flat(getattr(ours.stats, name))) for name, x in vars(one.stats).items()]
  # Where halves take turns, a round may follow after which no row goes on.
  pairs = [x for x in pairs if len(meshes) == 1 or x[0] != 'computed']
  differ = [name for name, a, b in pairs if not np.array_equal(a, b, equal_nan=a.dtype.kind == 'f')]
  differ = [] if 'texts' in options else differ
  if trace and not np.allclose(flat(ours.target_logprobs), flat(one.target_logprobs), atol=1e-5):
    differ.append('target_logprobs')
  return dict(case=case, tokens=one.tokens == ours.tokens, differ=differ, accepted=int(one.stats.accepted.sum()))


def apart() -> dict:
  """Return what is said of models of which one lies on a mesh and one does not."""
  mesh = sharding.mesh({'data': 8})
  try:
    run('t5', 'speculative', Sampler(0.0), False, lambda n, m: sharding.place(m, mesh) if n == 'l' else m)
  except ValueError as error:
    return {'error': str(error)}
  return {'error': None}


def refused() -> dict:
  """Return what is said of a head that lies apart from its verifier."""
  drafters, verifier = sharding.meshes({'data': 2}, {'model': 2})
  try:
    run('decoder', 'head', Sampler(0.0), False, lambda n, m: sharding.place(m, verifier if n == 'l' else drafters))
  except ValueError as error:
    return {'error': str(error)}
  return {'error': None}


class Listed(toy.Table):
  """A network whose parameters are a tuple of a list, and whose cache is one array."""

  def prefill(self, params, prompt, max_len):
    return super().prefill({}, prompt, max_len)['slots']

  def extend(self, params, cache, *args):
    logits, cache = super().extend({'table': params[0][0]}, {'slots': cache}, *args)
    return logits, cache['slots']


def listed() -> dict:
  """Return over how many devices rows of a network are sharded that has no dict, and what it decodes."""
  models = [Model(([toy.model(i, VOCAB, order=1).params['table']],), Listed(VOCAB, 1), name=str(i)) for i in (0, 1)]
  mesh = sharding.mesh({'data': 8})
  placed = [sharding.place(m, mesh) for m in models]
  prompts = [[i] for i in range(BATCH)]
  one, ours = (decode(methods.speculative(), some, prompts, max_new_tokens=8).tokens for some in (models, placed))
  return dict(shards=sharding.row_shards(placed), same=one == ours)


def planned() -> dict:
  """Return the widths of the windows that a plan decodes and times on a mesh of TPUs: by their kernel, by plain XLA."""
  tpu = backends.TPU(interpret=True)
  backends.register('cpu', tpu)
  extend, widths = type(tpu).extend, {False: set(), True: set()}

  def noted(self, q, *args, **kwargs):
    widths[self._plain(q)].add(q.shape[1])
    return extend(self, q, *args, **kwargs)

  type(tpu).extend = noted
  mesh = sharding.mesh({'data': 2, 'model': 4})
  pair = [sharding.place(m, mesh, 'sharded') for m in chosen('t5 on tpus', 'sl', lambda _, m: m)]
  planner.plan(pair, [[5, 6, 7], [8, 9]], blocks=[2, 5], batches=[2], max_new_tokens=4, sampler=Sampler(0.0))
  return dict(kernel=sorted(widths[False]), plain=sorted(widths[True]))


if __name__ == '__main__':
  jax.config.update('jax_numpy_dtype_promotion', 'strict')
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  named = {'apart': apart, 'refused': refused, 'listed': listed, 'planned': planned}
  for each in sys.argv[1:]:
    print(json.dumps(named[each]() if each in named else same(each)), flush=True)
