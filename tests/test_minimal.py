"""The example of one file emits the tokens of the package, and stays small."""

import ast
import contextlib
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
import minimal
import numpy as np
import pytest
from tiers import long_but

import speccascade
from speccascade import methods, rules
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.types import Model

PROMPTS = [[5, 6, 7, 8, 2, 11, 30, 9], [9], [3, 2, 60], [17, 40, 3, 3, 12], [22, 4], [33, 34, 35, 36]]
GAMMA = 4
MAX_NEW = 30
ALPHA = 0.1
RULES = {
  'speculative': (Partial(minimal.speculative), rules.speculative),
  'opt': (Partial(minimal.opt, alpha=ALPHA), functools.partial(rules.opt, alpha=ALPHA)),
}


@functools.cache
def pair() -> tuple[dict, dict]:
  """Return the parameters of a drafter, one layer of the verifier, and of the verifier."""
  verifier = minimal.random_params(seed=0, layers=2)
  return {name: jax.tree.map(jnp.copy, x) for name, x in verifier.items() if name != 'layers_1'}, verifier


def model(params: dict) -> Model:
  """Return the package's model of the same parameters."""
  layers = sum(name.startswith('layers_') for name in params)
  heads = minimal.EMBED // minimal.HEAD_DIM
  config = DecoderConfig(
    vocab_size=minimal.VOCAB,
    embed_dim=minimal.EMBED,
    heads=heads,
    kv_heads=heads,
    head_dim=minimal.HEAD_DIM,
    mlp_dim=minimal.MLP,
    spans=(Span(),) * layers,
    norm_eps=minimal.NORM_EPS,
  )
  network = Decoder(config, eos_ids=(minimal.EOS,))
  assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, network.param_shapes())
  return Model(params, network)


@contextlib.contextmanager
def plain_jax():
  """Promote dtypes and ranks, as JAX does by default."""
  with jax.numpy_rank_promotion('allow'), jax.numpy_dtype_promotion('standard'):
    yield


def by_minimal(rule, temperature: float, seed: int):
  lengths = np.array([len(x) for x in PROMPTS])
  prompts = np.array([x + [0] * (max(lengths) - len(x)) for x in PROMPTS])
  with plain_jax():
    state = minimal.decode(
      pair(), prompts, lengths, rule, seed=seed, temperature=temperature, gamma=GAMMA, max_new=MAX_NEW
    )
  return [np.asarray(x)[n:end].tolist() for x, n, end in zip(state.tokens, lengths, state.length)], state


CASES = [(rule, temperature) for rule in RULES for temperature in (0.0, 1.0)]


@pytest.mark.full
@pytest.mark.parametrize('rule, temperature', long_but(CASES, [('opt', 1.0)]))
def test_it_emits_the_tokens_of_the_package(rule, temperature):
  own, packaged = RULES[rule]
  method = methods.speculative(packaged, block=GAMMA)
  sampler = speccascade.Sampler(temperature=temperature)
  models = [model(params) for params in pair()]
  reasons = set()
  lengths = 0  # how often a round accepted so many
  for seed in (0, 1) if temperature else (0,):
    tokens, state = by_minimal(own, temperature, seed)
    out = speccascade.decode(method, models, PROMPTS, max_new_tokens=MAX_NEW, sampler=sampler, seed=seed)
    assert tokens == out.tokens
    for n, name in enumerate(('rounds', 'tested', 'accepted')):
      np.testing.assert_array_equal(state.counts[:, n], getattr(out.stats, name))
    lengths += out.stats.accepted_lengths.sum(0)
    assert rule == 'speculative' or 0 < out.stats.deferred.sum() < out.stats.emitted.sum()
    reasons |= {*out.finish_reasons}
  assert lengths.all() and (reasons == {'eos', 'length'} or not temperature)


@pytest.mark.long
def test_it_prints_rows_and_their_acceptance(capsys):
  with plain_jax():
    minimal.main()
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 4 * (2 + 3 * 2) and sum('drafted tokens accepted' in line for line in lines) == 12


def test_it_is_one_short_file_that_imports_nothing_but_jax_and_numpy():
  text = pathlib.Path(minimal.__file__).read_text()
  assert text.count('\n') <= 250
  nodes = list(ast.walk(ast.parse(text)))
  names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
  names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
  assert {name.split('.')[0] for name in names} == {'functools', 'typing', 'jax', 'numpy'}
