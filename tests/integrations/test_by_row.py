"""A decoder whose cache has one index for all rows decodes as any model."""

import dataclasses
import functools
import os
import runpy
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import long_but

import speccascade
from speccascade import methods, Sampler
from speccascade.drafters import ngram
from speccascade.integrations import by_row
from speccascade.models import toy
from speccascade.types import Network

VOCAB, DIM, LAYERS = 13, 8, 2
PROMPTS = [[1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8, 9, 7], [4, 4], [12, 0, 12]]
SAMPLERS = {'greedy': Sampler(0.0), 'coupled': Sampler(0.8, coupling='gumbel')}


class Layer(nnx.Module):
  """Attention over a cache, written at the index of its first row."""

  def __init__(self, rngs):
    self.project = nnx.Linear(DIM, 3 * DIM, use_bias=False, rngs=rngs)

  def __call__(self, x, cache, mask):
    q, *new = jnp.split(self.project(x), 3, -1)
    start = 0, cache['index'][0], 0
    k, v = (jax.lax.dynamic_update_slice(cache[name], y, start) for name, y in zip('kv', new))
    weights = jax.nn.softmax(jnp.where(mask, q @ jnp.swapaxes(k, 1, 2), -1e9))
    return x + weights @ v, {'k': k, 'v': v, 'index': cache['index'] + x.shape[1]}


class Decoder(nnx.Module):
  def __init__(self, seed):
    rngs = nnx.Rngs(seed)
    self.token = nnx.Embed(VOCAB, DIM, rngs=rngs)
    self.place = nnx.Embed(64, DIM, rngs=rngs)
    self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
    self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

  def __call__(self, tokens, positions, cache, mask):
    x = self.token(tokens) + self.place(positions)
    caches = []
    for layer, of_layer in zip(self.layers, cache):
      x, of_layer = layer(x, of_layer, mask)
      caches.append(of_layer)
    return 3 * self.head(x), caches


def empty(params, rows, slots):
  zeros = jnp.zeros((rows, slots, DIM))
  return [{'k': zeros, 'v': zeros, 'index': jnp.zeros(rows, jnp.int32)}] * LAYERS


def made(seed, seen=lambda positions: positions, **settings):
  """Return a decoder as a model; `seen` gives the last position that each token sees."""
  graph, params = nnx.split(Decoder(seed))

  def call(params, cache, tokens, positions):
    cache = [{**layer, 'index': positions[:, 0]} for layer in cache]
    mask = jnp.arange(cache[0]['k'].shape[1])[None, None] <= seen(positions)[..., None]
    return nnx.merge(graph, params)(tokens, positions, cache, mask)

  return by_row.model(params, call, empty, name=f'decoder{seed}', **settings)


large = functools.cache(lambda: made(0, eos_ids=(11,)))
small = functools.cache(lambda: made(1))
DRAFTERS = {'prompt lookup': lambda: ngram.drafter(large()), 'a small one': small}


@functools.cache
def decoded(sampler, batch_size=None, drafter=None):
  models = [large()] if drafter is None else [DRAFTERS[drafter](), large()]
  method = methods.autoregressive() if drafter is None else methods.speculative(block=3)
  settings = dict(max_new_tokens=16, sampler=SAMPLERS[sampler], batch_size=batch_size, seed=2)
  return speccascade.decode(method, models, PROMPTS, **settings)


CASES = [(s, d, size) for s in SAMPLERS for d in DRAFTERS for size in (None, 2)]
QUICK = [('greedy', 'prompt lookup', 2), ('coupled', 'a small one', None), ('coupled', 'a small one', 2)]


@pytest.mark.parametrize('sampler, drafter, batch_size', long_but(CASES, QUICK))
def test_a_text_is_the_same_with_and_without_a_drafter(sampler, drafter, batch_size):
  out = decoded(sampler, batch_size, drafter)
  assert out.tokens == decoded(sampler).tokens
  assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()  # the rows of a batch go apart


def test_greedy_tokens_are_those_of_the_module():
  module = Decoder(0)
  for prompt, tokens in zip(PROMPTS, decoded('greedy').tokens, strict=True):
    text = jnp.asarray([prompt + tokens])
    mask = jnp.tril(jnp.ones((1, text.size, text.size), bool))
    logits, _ = module(text, jnp.arange(text.size)[None], empty(None, 1, text.size), mask)
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_parameters_of_a_trainer_need_no_other_program():
  other = large().replace(params=nnx.state(Decoder(5)))
  assert other.network == large().network and hash(other.network) == hash(large().network)
  assert made(0).network != large().network
  settings = dict(max_new_tokens=16, sampler=SAMPLERS['greedy'])
  assert speccascade.decode(methods.autoregressive(), [other], PROMPTS, **settings).tokens != decoded('greedy').tokens


def test_logits_in_windows_are_those_token_by_token():
  report = speccascade.check(large())
  assert report.ok and len(report.findings) == 4, report


def of_a_prompt(positions):
  """Let each token of a window see as much as a token of a prompt does, from its start."""
  return positions - positions[:, :1] if positions.shape[1] > 1 else positions


@pytest.mark.parametrize(
  'seen, wrong',
  [
    (of_a_prompt, 'reads windows as single tokens'),
    (lambda positions: positions + 1, 'forgets what is rolled back'),
    (lambda positions: positions[:, -1:], 'reads windows as single tokens'),
  ],
  ids=['the mask of a prompt', 'a slot that is stale', 'later tokens of a window'],
)
def test_a_decoder_that_reads_windows_otherwise_is_found(seen, wrong):
  report = speccascade.check(made(0, seen))
  assert not report.ok and wrong in [f.question for f in report.findings if not f.ok], report


@dataclasses.dataclass(frozen=True)
class Mixed(Network):
  """A network that adds the logits of the first row to those of all."""

  vocab_size: int = 5

  def prefill(self, params, prompt, max_len):
    return jnp.zeros((prompt.tokens.shape[0], max_len))

  def extend(self, params, cache, tokens, positions):
    logits = params[tokens]
    return logits + logits[:1], cache


def test_a_network_whose_rows_depend_on_each_other_is_found():
  report = speccascade.check(speccascade.Model(jax.random.normal(jax.random.key(0), (5, 5)), Mixed()))
  assert 'reads each row by itself' in [f.question for f in report.findings if not f.ok], report


def test_networks_of_the_package_are_checked_alike():
  for encoder in (False, True):
    report = speccascade.check(toy.model(0, encoder=encoder))
    assert report.ok and len(report.findings) == 4 - encoder, report


def test_a_model_that_cannot_be_checked_says_why():
  assert 'max_positions=9' in str(speccascade.check(made(0, max_positions=9)))
  assert 'NameError' in str(speccascade.check(made(0).replace(network=Unread())))
  with pytest.raises(ValueError, match=having('alphas=[0.3]', 'toy0')):
    speccascade.check(toy.model(0), [0.3])


class Unread(Network):
  vocab_size = 5

  def prefill(self, params, prompt, max_len):
    return nothing  # noqa: F821


def test_the_command_checks_a_model(tmp_path, monkeypatch, capsys):
  (tmp_path / 'my_toy.py').write_text('from speccascade.models import toy\n\nlarge = toy.model(0)\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'argv', ['check', 'my_toy:large'])
  with pytest.raises(SystemExit) as ended:
    runpy.run_module('speccascade.check', run_name='__main__')
  said = capsys.readouterr().out
  assert ended.value.code == 0 and 'toy0: all is well' in said and 'windows' in said


@pytest.mark.parametrize(
  'call, parts',
  [
    (lambda p, cache, tokens, positions: (tokens, cache), ('mine', '[1, 2]')),
    (lambda p, cache, tokens, positions: (p[tokens], cache[:, :1]), ('mine', 'float32[1, 8]', 'float32[1, 1]')),
    (lambda p, cache, tokens, positions: (p[tokens], ()), ('mine', 'float32[1, 8]', '()')),
  ],
  ids=['logits', 'shapes', 'structure'],
)
def test_functions_that_do_not_fit_are_refused(call, parts):
  with pytest.raises(ValueError, match=having(*parts)):
    by_row.model(np.eye(5, dtype=np.float32), call, lambda p, rows, slots: jnp.zeros((rows, slots)), name='mine')


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import test_by_row as here
from speccascade.drafters import ngram
from speccascade import decode, methods

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ('fsdp', 'tp'))
spec = lambda x: PartitionSpec(*('tp' if n % 2 == 0 else None for n in x.shape[:1]))
params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), here.large().params)
large = here.large().replace(params=params)
settings = dict(max_new_tokens=16, sampler=here.SAMPLERS['coupled'], seed=2)
out = decode(methods.speculative(block=3), [ngram.drafter(large), large], here.PROMPTS, **settings)
assert any(x.sharding.spec == PartitionSpec('tp') for x in jax.tree.leaves(large.params))
print(out.tokens)
"""


@pytest.mark.full
def test_sharded_parameters_stay_where_they_lie():
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=4'
  path = os.pathsep.join(sys.path)
  ran = subprocess.run(
    [sys.executable, '-c', SHARDED],
    env=os.environ | {'XLA_FLAGS': flags, 'PYTHONPATH': path},
    capture_output=True,
    text=True,
  )
  assert ran.stdout.strip() == str(decoded('coupled').tokens), ran.stderr
