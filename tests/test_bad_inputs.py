"""Every bad input ends in one sentence that says what is wrong: through Python, through gin, and as a command.

A row has what is given and the values, names and remedies that the error must contain. A command exits with 1 for all
of them, wrong arguments included, and prints that sentence alone.
"""

import dataclasses
import functools
import json
import os
import pathlib
import runpy
import sys
from typing import Any
from unittest import mock

from cases import TABLE
from flax import struct
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import speccascade
from speccascade import (
  __main__ as package,
)
from speccascade import (
  acceptance,
  backends,
  calibrate,
  checkpoints,
  compile,
  convert,
  decode,
  figure,
  methods,
  plan,
  Request,
  rules,
  run,
  Sampler,
  stopping,
)
from speccascade.checkpoints import hf
from speccascade.checkpoints.hf import FAMILIES
from speccascade.data import files
from speccascade.decode import __main__ as decoding
from speccascade.decode import scoring
from speccascade.drafters import ngram
from speccascade.engine.limits import Limit
from speccascade.engine.phases import Alternate, Propose, Score, Verify
from speccascade.evaluate import Checkpoint, config
from speccascade.host import commands, gin_files, multihost
from speccascade.models import toy
from speccascade.models.t5 import T5, T5Config
from speccascade.sv import predictors
from speccascade.sv.plans import Profile
from speccascade.sv.verification import Goodput
from speccascade.train import __main__ as training
from speccascade.types import Model, Network

CONFIG = {'model_type': 't5', 'vocab_size': 11, 'd_model': 8, 'd_kv': 4, 'd_ff': 6, 'num_layers': 1, 'num_heads': 3}
partial = functools.partial


# ---- through Python ----

LARGE = toy.model(0)
PAIR = [toy.model(1, near=LARGE), LARGE]
SHORT = LARGE.replace(network=toy.Table(5, max_positions=10))
OPT, EVEN = partial(rules.opt, alpha=0.1), partial(rules.weighted, weights=(0.5, 0.5))


def decoded(method=None, models=PAIR, prompts=((1, 2),), **settings):
  """Decode a little."""
  prompts = list(map(list, prompts)) if isinstance(prompts, tuple) else prompts
  return decode(method or methods.speculative(block=2), models, prompts, **dict(max_new_tokens=4) | settings)


def stepped(folder: pathlib.Path, name: str) -> str:
  """Write an empty file in folders of that folder."""
  (folder / name).parent.mkdir(parents=True)
  return written(folder, name, '')


def written(folder: pathlib.Path, name: str, content: str | bytes) -> str:
  """Write a file and return its path."""
  file = folder / name
  file.write_bytes(content.encode() if isinstance(content, str) else content)
  return str(file)


def checkpoint(folder: pathlib.Path, **changes) -> str:
  """Write a folder with a config of such changes, and some weights."""
  written(folder, 'config.json', json.dumps(CONFIG | changes))
  save_file({'shared.weight': np.zeros((11, 8), np.float32)}, folder / 'model.safetensors')
  return str(folder)


def stored(folder: pathlib.Path, tensors: dict[str, list[int]] | bytes) -> str:
  """Write a checkpoint whose weights are such bytes, or of a value each that lies at such places."""
  path = checkpoint(folder)
  if isinstance(tensors, dict):
    entries = {name: {'dtype': 'F32', 'shape': [1], 'data_offsets': place} for name, place in tensors.items()}
    header = json.dumps(entries).encode()
    tensors = len(header).to_bytes(8, 'little') + header + bytes(8)
  written(folder, 'model.safetensors', tensors)
  return path


def records(folder: pathlib.Path, line: str) -> str:
  """Write JSON lines, the third of which is given."""
  return written(folder, 'x.jsonl', '{"prompt": "a", "target": "b"}\n\n' + line)


def shouting(q, p):
  """A rule that gives logits, no distribution."""
  return p.logits


def branching(q, p, *, alpha):
  """A rule that JAX cannot trace."""
  return p.probs if alpha > 0.5 else q.probs


def of_logits(q_logits, p_logits, *, sampler):
  """A rule of an earlier form."""
  return sampler(p_logits)


class Patient(stopping.Policy):
  """A policy without its decorator."""


@dataclasses.dataclass(frozen=True)
class Doubling(backends.Backend):
  """A backend whose matmul is called otherwise."""

  factor: Any

  def matmul(self, x, kernel):
    return self.factor * x @ kernel


def narrow(q, p):
  """A rule of the wrong shape."""
  return p.probs[..., 0]


def silent(*_, **__):
  """A rule, or what a network does, that fails without a word."""
  raise AssertionError


def failing(examples, predictions):
  """A metric that judges nothing."""
  raise KeyError(examples[0].index)


def short(logits, tokens, count):
  """A processor of the wrong shape."""
  return logits[:3]


def nothing(context, state):
  """What feeds nothing, without its base."""
  return -jnp.ones_like(state.window.size)


@struct.dataclass
class NothingFed(Limit):
  """A limit under every need, so that nothing is scored."""

  def __call__(self, context, state):
    return nothing(context, state)


OWN = rules.bind(rules.own)
VERIFIED = Score(1), Verify(OWN, (1,))


def own_phases(*phases, **settings):
  """Decode with phases of one's own over two models."""
  return decoded(methods.Method(phases, (0, 1), **settings))


PYTHON = {
  # rules and combiners
  'a rule of logits': (lambda _: decoded(methods.speculative(shouting)), 'shouting'),
  'half a distribution': (lambda _: decoded(methods.speculative(lambda q, p: 0.5 * p.probs)), 'sum'),
  'a rule of whole numbers': (
    lambda _: decoded(methods.speculative(lambda q, p: jnp.zeros(p.logits.shape, jnp.int32))),
    'int32',
  ),
  'a rule that branches': (lambda _: decoded(methods.speculative(partial(branching, alpha=0.3))), 'branching'),
  'a rule of another shape': (lambda _: decoded(methods.speculative(narrow)), 'narrow'),
  'a rule of nothing': (lambda _: decoded(methods.speculative(lambda q, p: None)), 'None'),
  'a rule without its alpha': (lambda _: methods.speculative(rules.opt), ('opt', 'alpha')),
  'alpha out of range': (lambda _: methods.speculative(partial(rules.chow, alpha=2.0)), ('chow', '0 <= alpha <= 1')),
  'alpha beyond float32': (
    lambda _: methods.speculative(partial(rules.opt, alpha=-1e39)),
    ('opt', 'alpha=-1e+39', 'float32'),
  ),
  'a complex alpha': (lambda _: methods.speculative(partial(rules.opt, alpha=1j)), ('opt', 'alpha')),
  'alpha on the device': (lambda _: methods.speculative(partial(rules.lossy, alpha=jnp.float32(1.5))), 'alpha=1.5'),
  'alpha as a text': (lambda _: methods.speculative(partial(rules.opt, alpha='0.1')), 'alpha=0.1'),
  'a number that a rule lacks': (lambda _: methods.speculative(partial(OPT, beta=1)), ('opt', 'beta')),
  'a rule of logits and a sampler': (
    lambda _: methods.speculative(of_logits),
    ('of_logits', 'sampler', '(q, p, *, alpha)'),
  ),
  'a function of three': (lambda _: methods.cos(lambda q, m, p: p.probs), ('lambda', 'q, p')),
  'a weight of NaN': (lambda _: methods.cos(partial(rules.weighted, weights=(np.nan, 0.5))), 'weights'),
  'a combiner for a rule': (lambda _: methods.speculative(EVEN), ('weighted', 'combiner')),
  'mu of 1e30': (lambda _: methods.ensemble(partial(rules.contrastive, mu=1e30)), ('contrastive', 'mu', '-1000')),
  # methods and policies
  'a method that was not called': (lambda _: decoded(methods.speculative), 'methods.speculative(…)'),
  'a method by its name': (lambda _: decoded('speculative'), "'speculative'"),
  'block=0': (lambda _: methods.speculative(block=0), 'block=0'),
  'a pair of one': (lambda _: methods.speculative(pair=(1, 1)), 'pair=(1, 1)'),
  'model=-1': (lambda _: methods.autoregressive(-1), 'model=-1'),
  'token_cascade of opt': (lambda _: methods.token_cascade(OPT), ('opt', 'chow, chow_log')),
  'bild(2)': (lambda _: methods.bild(fallback=2), '0 <= fallback <= 1'),
  'a score of no name': (lambda _: methods.sequence_cascade('median'), "score='median'"),
  'a threshold of NaN': (lambda _: methods.sequence_cascade(threshold=np.nan), 'threshold=nan'),
  'a table for a plan': (lambda _: methods.sv_exact(TABLE, 3), ('plan', 'AcceptanceTable')),
  'a predictor that is none': (lambda _: methods.scheduled(OPT, 3), ('predictor', 'opt', 'margin')),
  'a predictor that is a number': (lambda _: methods.scheduled(0.5, 3), ('predictor=0.5', 'margin')),
  'a fit that is none': (lambda _: methods.scheduled(predictors.margin, fit=0.5), ('fit=0.5', 'Logistic')),
  'a rate under 0': (lambda _: predictors.Logistic(rate=-1), 'rate=-1'),
  'a budget that is none': (lambda _: methods.scheduled(predictors.margin, budget=2), ('budget=2', 'TopK')),
  'goodput without times': (lambda _: methods.scheduled(predictors.margin, budget=Goodput()), ('times', 'plan')),
  'an ending that is none': (lambda _: methods.scheduled(predictors.margin, ending='last'), ("'last'", "'bonus'")),
  'a pair and a companion': (lambda _: methods.scheduled(predictors.companion, pair=(0, 1)), ('three', 'margin')),
  'a time under 0': (lambda _: Profile(TABLE, [1.0, -1.0]), 'latency'),
  'phases without a Verify': (lambda _: own_phases(Score(0)), 'Verify'),
  'a model that nothing feeds': (lambda _: own_phases(Score(0), Verify(OWN, (1,))), 'slot 1'),
  'a slot out of range': (lambda _: own_phases(Score(2), Verify(OWN, (0,))), 'slot 2'),
  'a phase that is none': (lambda _: own_phases(lambda context, state: state, *VERIFIED), ('lambda', 'phases.Phase')),
  'two drafters in a round': (
    lambda _: own_phases(Propose(0, 1), Propose(1, 1), *VERIFIED),
    ('propose(1, 1)', 'score(1)'),
  ),
  'a drafter before branches with drafters': (
    lambda _: own_phases(Propose(0, 1), Alternate(((Propose(1, 1), *VERIFIED), (Propose(1, 1), *VERIFIED)))),
    ('propose(0, 1)', 'score(0)'),
  ),
  'two drafters in a nested branch': (
    lambda _: own_phases(Alternate(((Alternate(((Propose(0, 1), Propose(1, 1), *VERIFIED), VERIFIED)),), VERIFIED))),
    ('propose(1, 1)', 'score(1)'),
  ),
  'rounds that commit nothing': (
    lambda _: own_phases(Propose(0, 2), Score(1, NothingFed()), Verify(OWN, (1,))),
    ('no token', 'position 2', 'Verify'),
  ),
  'a limit without its base': (
    lambda _: own_phases(Propose(0, 2), Score(1, rules.bind(nothing)), Verify(OWN, (1,))),
    ('nothing', 'limits.Limit'),
  ),
  'a branch for one of two models': (
    lambda _: own_phases(Alternate(((Score(0), Verify(OWN, (0,))),))),
    ('no token', 'alternate', 'Verify'),
  ),
  'a combiner that is not bound': (lambda _: own_phases(VERIFIED[0], Verify(rules.own, (1,))), 'rules.bind(own)'),
  'blocks of a text': (lambda _: methods.cos(rules.speculative, '51'), "blocks='51'"),
  'blocks=5': (lambda _: methods.cos(EVEN, blocks=5), ('blocks=5', '(5, 1)')),
  'a policy that is a class': (lambda _: methods.speculative(policy=stopping.Heuristic), 'Heuristic'),
  'a policy that is not called': (lambda _: methods.speculative(policy=partial(stopping.Heuristic, first=3)), 'policy'),
  'a policy that is a text': (lambda _: methods.speculative(policy='heuristic'), "policy='heuristic'"),
  'an acceptor that is a text': (lambda _: methods.speculative(accept='block'), "accept='block'"),
  'an acceptor that is a class': (lambda _: methods.speculative(accept=acceptance.Threshold), 'Threshold'),
  'FLy that looks at no token': (lambda _: acceptance.FLy(0.3, window=0), 'window=0'),
  'FLy(nan)': (lambda _: acceptance.FLy(np.nan), ('FLy', 'limit >= 0', 'nan')),
  'FLy with coupled noise': (
    lambda _: decoded(methods.speculative(accept=acceptance.FLy(0.3)), sampler=Sampler(coupling='gumbel')),
    ('gumbel', 'token_wise'),
  ),
  'a phased rule without its rule': (
    lambda _: methods.speculative(partial(rules.phased, begin=(1,), end=(2,))),
    ('phased', 'inside'),
  ),
  'a phased rule with texts for markers': (
    lambda _: methods.speculative(partial(rules.phased, inside=OPT, begin='<think>', end=(2,))),
    ('phased', 'begin=<think>', 'numbers'),
  ),
  'a phased rule of a combiner': (
    lambda _: methods.speculative(partial(rules.phased, inside=EVEN, begin=(1,), end=(2,))),
    ('weighted', 'combiner'),
  ),
  'a phased rule without tokens': (
    lambda _: rules.target(partial(rules.phased, inside=OPT, begin=(1,), end=(2,)), jnp.zeros((2, 1, 5))),
    ('prefix', 'by_prefix=True'),
  ),
  'Fallback of float32': (lambda _: stopping.Fallback(np.float32(-1)), ('Fallback', '0 <= threshold <= 1')),
  'a policy that is no dataclass': (
    lambda _: methods.speculative(policy=Patient()),
    ('Patient', '@flax.struct.dataclass'),
  ),
  "Confidence('0.5')": (lambda _: stopping.Confidence('0.5'), ('Confidence', '0 <= threshold <= 1')),
  'bild of a list': (lambda _: methods.bild(rollback=[2.0]), 'rollback=[2.0]'),
  'Heuristic(0)': (lambda _: stopping.Heuristic(0), ('Heuristic', 'first=0')),
  # requests and samplers
  'decode(temperature=…)': (
    lambda _: decoded(temperature=0.5),
    ('temperature', 'sampler=speccascade.Sampler(temperature='),
  ),
  'Request(max_tokens=…)': (lambda _: Request([1], max_tokens=4), ('max_tokens', 'max_new_tokens')),
  'a temperature of float32': (lambda _: Sampler(np.float32(-1)), ('temperature', '-1')),
  'temperature=1e-9': (lambda _: Sampler(1e-9), 'temperature=1e-09'),
  'temperature=[1.0]': (lambda _: Sampler(temperature=[1.0]), 'temperature=[1.0]'),
  'a complex array': (lambda _: Sampler(top_p=np.array([1j])), 'top_p=array([0.+1.j])'),
  'temperatures by prompt': (lambda _: decoded(sampler=Sampler(np.array([0.5, 1.0]))), ('temperature', '[2]')),
  'stop=5': (lambda _: decoded(prompts=[Request([1], stop=5)]), 'stop=5'),
  'stop_tokens=5': (lambda _: decoded(prompts=[Request([1], stop_tokens=5)]), 'stop_tokens=5'),
  'logit_bias=[5]': (lambda _: decoded(prompts=[Request([1], logit_bias=[5])]), 'logit_bias=[5]'),
  'a bias of 1e9': (
    lambda _: decoded(prompts=[Request([1], logit_bias={1: 1e9}, temperature=0.5)]),
    ('logit_bias', '1000000000', '5e+07', 'temperature 0.5'),
  ),
  'max_new_tokens=2**63': (
    lambda _: decoded(max_new_tokens=2**63),
    ('max_new_tokens=9223372036854775808', '1073741824'),
  ),
  'a bias of all': (
    lambda _: decoded(prompts=[Request([1], logit_bias=dict.fromkeys(range(5), -np.inf))]),
    ('logit_bias', '5'),
  ),
  'logprobs of more than there are': (lambda _: decoded(prompts=[Request([1], logprobs=6)]), ('logprobs=6', '5')),
  'n=10**12': (lambda _: decoded(prompts=[Request([1], n=10**12)]), ('n=1000000000000', '1048576')),
  'seed=True': (lambda _: decoded(seed=True), 'seed=True'),
  # logits processors
  'a processor of fewer logits': (lambda _: decoded(processor=short), ('short', 'float32[3]', 'float32[5]')),
  'a processor of whole numbers': (
    lambda _: decoded(processor=lambda l, t, n: l > 0),
    ('processor', 'bool[5]', 'float32[5]'),
  ),
  'a processor that asks for a value': (lambda _: decoded(processor=lambda l, t, n: l if t[0] else -l), 'processor'),
  'a processor of two arguments': (lambda _: decoded(processor=lambda l, t: l), ('processor', 'TypeError')),
  'a processor that is a text': (lambda _: decoded(processor='json'), "processor='json'"),
  # streams and meshes
  'logit_bias of true': (
    lambda _: decoded(prompts=[Request([1], logit_bias={1: True})]),
    ('logit_bias', 'True'),
  ),
  'skip=0': (
    lambda _: speccascade.stream(methods.autoregressive(1), PAIR, [[1]], max_new_tokens=2, skip=0),
    ('skip=0', '[0, 2]'),
  ),
  'a text to score that is not in a list': (
    lambda _: scoring.score(methods.autoregressive(1), PAIR, 'ab', [[1], [2]]),
    ("prompts='ab'", "['ab']"),
  ),
  'outputs=5': (lambda _: scoring.score(methods.autoregressive(1), PAIR, [[1]], 5), ('outputs=5', '[[3, 4]]')),
  'skip beyond the rows': (
    lambda _: speccascade.stream(methods.autoregressive(1), PAIR, [[1]], max_new_tokens=2, skip=[99]),
    ('skip', '99'),
  ),
  'mesh(5)': (lambda _: speccascade.mesh(5), ('mesh 5', "'data'", "'model'")),
  'mesh of half a device': (lambda _: speccascade.mesh({'data': 0.5}), 'data=0.5'),
  # models and prompts
  'models by their paths': (lambda _: decoded(models=['PATH/small', 'PATH/large']), ('models', "'PATH/small'")),
  'models=PATH': (lambda _: decoded(models='PATH/small'), 'models=PATH/small'),
  'two models for one': (lambda _: decoded(methods.autoregressive()), ('methods.autoregressive(', '2')),
  'one model for two': (
    lambda _: decoded(models=[LARGE]),
    ('speculative[speculative]', '2 models', 'one was', 'drafter first'),
  ),
  'two vocabularies': (lambda _: decoded(models=[toy.model(1, 7), LARGE]), ('vocabular', 'toy1', '7', 'toy0', '5')),
  'an encoder–decoder and another': (lambda _: decoded(models=[toy.model(1, encoder=True), LARGE]), 'encoder–decoder'),
  'a prompt of more than the positions': (
    lambda _: decoded(methods.autoregressive(), [SHORT], ([1], [1] * 8)),
    ('prompt 1', 'max_new_tokens=4', '12', 'toy0', '10'),
  ),
  'an n-gram in a sequence cascade': (
    lambda _: decoded(methods.sequence_cascade(), models=[ngram.drafter(LARGE), LARGE]),
    ('ngram', 'sequence cascade'),
  ),
  'a score of an answer that is no number': (
    lambda _: decoded(methods.sequence_cascade(lambda logprobs: logprobs[:1] * np.nan)),
    ('score <lambda>', 'nan', '4 tokens'),
  ),
  'a score of an answer that is NaN': (lambda _: decoded(methods.sequence_cascade(lambda _: np.nan)), ('score', 'nan')),
  'an n-gram as verifier': (lambda _: decoded(models=[LARGE, ngram.drafter(LARGE)]), 'ngram'),
  'models=large': (lambda _: decoded(methods.autoregressive(), models=LARGE), 'models'),
  'prompts=None': (lambda _: decoded(prompts=None), 'prompts'),
  'nested uneven prompts': (lambda _: decoded(prompts=[[[1, 2], [3]]]), 'prompt 0'),
  'a lone surrogate': (
    lambda _: decoded(models=speccascade.embedded.models(), prompts=['a\ud800']),
    ('prompt 0', 'surrogate'),
  ),
  'sampler=1.0': (lambda _: decoded(sampler=1.0), 'sampler=1.0'),
  # checkpoints
  'load(torch_dtype=…)': (lambda _: speccascade.load('x', torch_dtype=1), ('torch_dtype', 'dtype=')),
  'a start token of 1e9': (
    lambda d: speccascade.load(checkpoint(d, decoder_start_token_id=10**9)),
    ("'decoder_start_token_id'", '1000000000'),
  ),
  'a negative EOS': (lambda d: speccascade.load(checkpoint(d, eos_token_id=-1)), ("'eos_token_id'", '-1')),
  'an EOS of the generation config': (
    lambda d: written(d, 'generation_config.json', '{"eos_token_id": [1, "x"]}') and speccascade.load(checkpoint(d)),
    ("'eos_token_id'", "'x'"),
  ),
  'an adapter alone': (lambda d: written(d, 'adapter_config.json', '{}') and speccascade.load(d), 'adapter'),
  'an adapter next to a model': (
    lambda d: written(d, 'adapter_config.json', '{}') and speccascade.load(checkpoint(d)),
    ('not applied', 'merge_and_unload', 'move adapter_config.json'),
  ),
  'a checkpoint of Orbax': (lambda d: written(d, '_METADATA', '{}') and speccascade.load(d), ('Orbax', 'by_row')),
  'steps of Orbax': (
    lambda d: stepped(d, '10/default/manifest.ocdbt') and speccascade.load(d),
    ('Orbax', 'Tunix', 'integrations.by_row'),
  ),
  'a preset of Keras': (
    lambda d: written(d, 'task.json', '{}') and written(d, 'config.json', '{}') and speccascade.load(d),
    ('Keras', 'by_row.keras_hub'),
  ),
  'a folder of GGUF': (lambda d: written(d, 'm.gguf', 'GGUF') and speccascade.load(d), ('llama.cpp', 'NAME.gguf')),
  'a file of that name only': (lambda d: speccascade.load(written(d, 'm.gguf', 'none')), ('m.gguf', 'no GGUF file')),
  'a pipe for a file of a checkpoint': (
    lambda d: speccascade.load(with_pipe(checkpoint(d), 'generation_config.json')),
    ('generation_config.json', 'pipe'),
  ),
  'a pipe for the weights': (
    lambda d: speccascade.load(with_pipe(checkpoint(d), 'model.safetensors')),
    ('model.safetensors', 'pipe'),
  ),
  'a pointer of Git LFS': (
    lambda d: speccascade.load(stored(d, b'version https://git-lfs.github.com/spec/v1\n')),
    ('model.safetensors', 'git lfs pull'),
  ),
  'a tensor from a negative byte': (lambda d: speccascade.load(stored(d, {'a': [-4, 0]})), 'model.safetensors'),
  'tensors that overlap': (lambda d: speccascade.load(stored(d, {'a': [0, 4], 'b': [2, 6]})), 'model.safetensors'),
  'a bucket whose package is not there': (lambda _: Checkpoint('abfs://b/x'), ('abfs://b/x', 'pip install')),
  'an address of no kind': (lambda _: speccascade.load('nope://b/model'), 'nope://b/model'),
  'an address of a file here': (lambda _: speccascade.load('file:///tmp/model'), 'file://'),
  'an address that is a path': (lambda _: speccascade.load(pathlib.Path('gs://b/model')), 'gs:/b/model'),
  'an address that names no bucket': (lambda _: Checkpoint('gs://'), ('gs://', 'gs://BUCKET/PATH')),
  'a file that weights point out to': (
    lambda d: speccascade.load(pointing_out(d)),
    ('model.safetensors.index.json', '../../x.safetensors'),
  ),
  'a folder that is not ours': (lambda d: overwritten(d), 'thesis.tex'),
  'a family whose maker takes other arguments': (
    lambda _: checkpoints.family('mine', like='llama', network=lambda config: None),
    '(config, *, eos_ids',
  ),
  'a family like one that is not there': (lambda _: checkpoints.family('mine', like='lama'), "like='lama'"),
  'a family that is there': (lambda _: checkpoints.family('t5', network=made), ('model_type', "'t5'")),
  'a family that cannot read its config': (
    lambda d: loaded_as_mine(d, lambda config, **_: config['d_model'] // '2'),
    ('TypeError', '//'),
  ),
  'a family that needs what config.json has not': (
    lambda d: loaded_as_mine(d, lambda config, **_: config['width']),
    ('config.json', "'width'"),
  ),
  'a family whose network holds a list': (
    lambda d: loaded_as_mine(d, lambda config, **_: T5(T5Config(11, 8, 2, 4, 8, 1, 1), [0])),
    "unhashable type: 'list'",
  ),
  'a family with a number for a name': (
    lambda _: checkpoints.family('mine', network=made, names={'head': 3}),
    "names['head']=3",
  ),
  'a family with a part that is none': (lambda _: checkpoints.family('mine', like='llama', bias=1), 'bias=1'),
  'a family with a field that is none': (
    lambda _: checkpoints.family('mine', like='llama', keys={'width': 'n'}),
    ("keys['width']='n'", 'embed_dim'),
  ),
  'a family with a field in a name': (
    lambda _: checkpoints.family('mine', network=made, names={'layers.mlp.wi': 'block.{n}.up'}),
    ('block.{n}.up', '{}'),
  ),
  'a family without the name of a tensor': (
    lambda d: loaded_as_mine(d, lambda config, **_: T5(T5Config(11, 8, 2, 4, 8, 1, 1))),
    'is no module of the names of',
  ),
  'no generation_config.json': (lambda _: speccascade.Sampler.of(LARGE), ('toy0', 'generation_config.json')),
  # networks
  'a network without what it must have': (
    lambda _: decoded(methods.autoregressive(), [Model({}, object())]),
    ('types.Network', 'vocab_size', 'eos_ids', 'start_id'),
  ),
  'a network that cannot be hashed': (lambda _: decoded_by(some_logits, __hash__=None), "unhashable type: 'Mine'"),
  'a network that fails': (lambda _: decoded_by(lambda *_: 1 // 0), 'ZeroDivisionError'),
  'a network of few logits': (
    lambda _: decoded_by(some_logits, vocab_size=7),
    ('Mine.extend', '[2, 3, 5]', '[2, 3, 7]'),
  ),
  'a network that returns another cache': (
    lambda _: decoded_by(lambda self, p, cache, tokens, at: (jnp.zeros((*tokens.shape, 5)), cache[:, :1])),
    ('Mine.extend', 'cache'),
  ),
  'a network whose cache has no rows': (
    lambda _: decoded_by(some_logits, lambda self, params, prompt, most: jnp.zeros(most)),
    'axis 0',
  ),
  # backends
  'a backend that is a class': (lambda _: backends.register('tpu', backends.CPU), 'CPU'),
  'a backend that holds an array': (lambda _: backends.register('tpu', Doubling(np.ones(3))), 'Doubling'),
  'a backend whose matmul lacks an argument': (
    lambda _: backends.register('tpu', Doubling(2.0)),
    ('Doubling.matmul', '(self, x, kernel)'),
  ),
  # several processes
  'a first host without a port': (lambda _: joining(JAX_COORDINATOR_ADDRESS='localhost'), ('localhost', 'HOST:PORT')),
  'a port that is no number': (lambda _: joining(JAX_COORDINATOR_ADDRESS='a:b'), 'JAX_COORDINATOR_ADDRESS=a:b'),
  'a text for a number of processes': (lambda _: joining(JAX_NUM_PROCESSES='two'), 'JAX_NUM_PROCESSES=two'),
  # data
  'data in a bucket whose package is not there': (lambda _: files.lines('abfs://b/x.txt'), 'adlfs'),
  'a prompt of null': (lambda d: files.jsonl(records(d, '{"prompt": null, "target": ""}')), ('line 3', "'prompt'")),
  'a reference of null': (
    lambda d: files.jsonl(records(d, '{"prompt": "a", "target": [null]}')),
    ('line 3', "'target'"),
  ),
  'a reference list of none': (
    lambda d: files.jsonl(records(d, '{"prompt": "a", "target": []}'), metrics=['bleu']),
    ('line 3', 'bleu'),
  ),
  'a reference without a number': (
    lambda d: files.jsonl(written(d, 'y', '\n{"prompt": "a", "target": "b"}'), metrics=['final_number']),
    ('y, line 2', 'final_number'),
  ),
  'a metric that fails': (
    lambda d: files.jsonl(records(d, '{"prompt": "a", "target": ""}'), metrics=[failing]),
    ('failing', 'KeyError: 0'),
  ),
  'a lone surrogate in data': (
    lambda d: files.jsonl(records(d, r'{"prompt": "\ud800", "target": ""}')),
    ('line 3', "'prompt'"),
  ),
  'a line of brackets': (lambda d: files.jsonl(records(d, '[' * 100_000)), ('line 3', 'JSON')),
  'a line that is a list': (lambda d: files.jsonl(records(d, '[1]')), ('line 3', 'list')),
  'half a character in messages': (
    lambda d: files.jsonl(records(d, r'{"prompt": [{"role": "user", "content": "a \ud83d"}], "target": ""}')),
    ('line 3', "'prompt'", 'half a character'),
  ),
  'a line that is no JSON': (lambda d: files.jsonl(records(d, '{"prompt"')), ('line 3', 'JSON')),
  'a line without a field': (lambda d: files.jsonl(records(d, '{"prompt": "a"}')), ('line 3', "'target'")),
}


def with_pipe(folder: str, name: str) -> str:
  """Put a pipe into the place of a file of a folder."""
  pathlib.Path(folder, name).unlink(missing_ok=True)
  os.mkfifo(pathlib.Path(folder, name))
  return folder


def pointing_out(folder: pathlib.Path) -> str:
  """Write a checkpoint whose index names a file outside."""
  written(folder, 'config.json', json.dumps(CONFIG))
  written(folder, 'model.safetensors.index.json', json.dumps({'weight_map': {'shared.weight': '../../x.safetensors'}}))
  return str(folder)


def overwritten(folder: pathlib.Path):
  """Save a model over a folder of something else."""
  (folder / 'thesis').mkdir()
  written(folder / 'thesis', 'thesis.tex', 'x')
  network = T5(T5Config(11, 8, 2, 4, 8, 1, 1))
  hf.write(folder / 'thesis', Model({}, network), overwrite=True)


def network(extend, prefill=None, **parts):
  """Return a network that extends as is said, with a cache of a slot for each position."""
  plain = lambda self, params, prompt, max_len: jnp.zeros((prompt.tokens.shape[0], max_len))
  parts = dict(vocab_size=5, eos_ids=(), start_id=None, max_positions=None) | parts
  return type('Mine', (Network,), parts | dict(prefill=prefill or plain, extend=extend))()


def decoded_by(*args, **parts):
  """Decode with a model of such a network."""
  return decoded(methods.autoregressive(), [Model({}, network(*args, **parts))])


def some_logits(self, params, cache, tokens, positions):
  return jnp.zeros((*tokens.shape, 5)), cache


def made(config, *, eos_ids, dtype, scan):
  """Make no network."""


def loaded_as_mine(folder: pathlib.Path, network) -> Model:
  """Load a checkpoint of a family that is registered for it, with the names of Llama."""
  with mock.patch.dict(FAMILIES):
    checkpoints.family('mine', like='llama', network=network)
    return speccascade.load(checkpoint(folder, model_type='mine'))


def joining(**environment):
  """Join other processes as an environment says."""
  with mock.patch.dict(os.environ, environment):
    multihost.start(1)


def sentence(said: str) -> bool:
  """Tell whether a message is one line of words that a person can read at once."""
  return '\n' not in said and 10 < len(said) < 600 and 'Traceback' not in said and 'object at 0x' not in said


def assert_says(said: str, parts: str | tuple[str, ...], folder: pathlib.Path | str = ''):
  """Check that an error is a sentence that has every one of the values and names that it must."""
  parts = (parts,) if isinstance(parts, str) else parts
  missing = [part for part in parts if part.replace('{tmp}', str(folder)) not in said]
  assert not missing and sentence(said), (missing, said)


@pytest.mark.parametrize('name', PYTHON)
def test_python_says_it_in_one_sentence(name, tmp_path):
  call, part = PYTHON[name]
  with pytest.raises(commands.FAILURES) as caught:
    call(tmp_path)
  assert_says(str(caught.value), part)


# ---- through gin ----

OPT_CURVE = [  # a curve that no text makes
  'Experiment.curves = [@opt/Curve()]',
  "opt/Curve.name = 'SpecCascade [OPT]'",
  'opt/Curve.method = @methods.speculative',
  'opt/Curve.rule = @rules.opt',
  "opt/Curve.parameter = 'alpha'",
  'opt/Curve.values = [0.1]',
]
GIN = {
  'a folder that nothing uses': (['FOLDER = /data'], '%FOLDER'),
  'a word for a list of models': (['Experiment.models = large'], "models='large'"),
  'true in lower case': (['Experiment.translate = true'], ('--gin.Experiment.translate = true', 'gin cannot read')),
  'a folder that is a number': (['run.folder = 5'], ('run.folder', '5')),
  'no value': (['Experiment.seed'], ('Experiment.seed', '--gin.NAME=VALUE')),
  'a macro that is not bound': (['Experiment.curves = %CURVES'], '%CURVES'),
  'a name that is none': (['Experimnt.seed = 1'], ('Experimnt', 'Experiment?')),
  'a parameter that is none': (['Experiment.sed = 1'], ('sed', 'seed?')),
  'a scope that is none': ([*OPT_CURVE, 'optt/Curve.values = [0.1]'], ('optt', 'opt?')),
  'a value that is a call': ([*OPT_CURVE, "opt/Curve.values = [float('nan')]"], 'opt/Curve.values'),
  'a value that is infinite': ([*OPT_CURVE, 'opt/Curve.values = [0.1, 1e999]'], ('SpecCascade [OPT]', 'values', 'inf')),
  'a value that every scope overrides': (
    ['Experiment.seed = 1', 'run.experiments = [@opt/Experiment()]', 'opt/Experiment.seed = 2'],
    ('--gin.Experiment.seed', 'opt/Experiment.seed'),
  ),
  'a value of what nothing makes': (['methods.naive_cos.block = 9'], ('--gin.methods.naive_cos.block', 'no effect')),
  'a value of what another value leaves out': (
    ['Experiment.curves = [@lossy/Curve()]', *OPT_CURVE, 'lossy/Curve.values = [0.1]'],
    ('--gin.lossy/Curve.values', 'no effect'),
  ),
  'a macro that another value leaves out': (
    ['SEED = 7', 'Experiment.seed = %SEED', 'Experiment.seed = 3'],
    ('--gin.SEED', 'no effect'),
  ),
  'the end of several names': (['speculative.block = 9'], ('methods.speculative', 'rules.speculative')),
  'a module that is none': (['import my_rules_of_nowhere'], ('my_rules_of_nowhere', 'PYTHONPATH')),
  'a file that is none': (["include 'nope.gin'"], 'nope.gin'),
  'a number for a list': (['Experiment.temperatures = 0.0'], 'temperatures=0.0'),
  'a number for a name': (['Experiment.name = 5'], ('Experiment.name=5', "'5'")),
  'a number for a list of models': (['Experiment.models = 5'], ('models=5', 'list')),
  'a curve that is none': (['Experiment.curves = cascade'], ("'cascade'", 'cascades', 'MODULE:NAME')),
  'a curve in words': (['Experiment.curves = speculative rule=opt'], ("'speculative rule=opt'", 'NAME(alpha=0.1)')),
  'a curve with an argument that is none': (['Experiment.curves = opt(alhpa=[0.1])'], ('alhpa', 'alpha?', 'block')),
  'a curve that varies two values': (['Experiment.curves = opt(alpha=[0.1], block=[3])'], ('alpha and block', 'one')),
  'a curve of a module that is none': (['Experiment.curves = nowhere:mine'], ('nowhere', 'imported')),
  'a suite without what it needs': (['Experiment.curves = verification'], ('verification', "'plan'")),
  'two curves of one name': (["Experiment.curves = ['opt', 'opt(alpha=[0.1])']"], ('SpecCascade [OPT]', 'name=')),
  'a number for a curve': (['Experiment.curves = 5'], ('curves[1]', 'text')),
  'a function for what it makes': ([*OPT_CURVE, 'Experiment.curves = [@opt/Curve]'], '@scope/Curve()'),
  'a rule that was called': ([*OPT_CURVE, 'opt/Curve.rule = @rules.opt()'], '@rules.opt'),
  'a chance over 1': (
    ['methods.speculative.policy = @stopping.Fallback()', 'stopping.Fallback.threshold = 2.0'],
    ('Fallback', '0 <= threshold <= 1'),
  ),
  'alpha out of range': (['Experiment.curves = token_v3(alpha=[2.0])'], ('Token', '0 <= alpha <= 1')),
  'a family that is none': (["Experiment.models = ['family:sum/draft']"], ("no family 'sum'", 'did you mean sums?')),
}


# Of these, what the command of a run is given too: an error while reading, while building, of a binding, of a file.
ON_THE_COMMAND_LINE = (
  'a word for a list of models',
  'no value',
  'a name that is none',
  'a value that every scope overrides',
  'a number for a list',
  'alpha out of range',
  'a family that is none',
)


@pytest.mark.parametrize('name', GIN)
def test_gin_says_it_in_one_sentence(name):
  bindings, part = GIN[name]
  with pytest.raises(commands.FAILURES) as caught:
    config.parse([str(run.DEFAULT)], bindings)
    config.build()
  assert_says(str(caught.value), part)


# ---- as commands ----


def check(argv: list[str]) -> int:
  """Run speccascade.check, which as a module would take the place of the function of its name."""
  with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
    patched.setattr(sys, 'argv', ['check', *argv])
    runpy.run_module('speccascade.check', run_name='__main__')
  if argv == ['--help']:
    raise ended.value
  return ended.value.code


MAIN = {
  'run': run.main,
  'train': training.main,
  'plan': plan.main,
  'convert': convert.main,
  'check': check,
  'compile': compile.main,
  'decode': decoding.main,
  'calibrate': calibrate.main,
  'figure': figure.main,
  'speccascade': package.main,
}
COMMANDS = {
  'run': [
    (['--gin_fil=x'], '--gin_fil=x'),
    (['config.gin'], 'config.gin'),
    (['--gin_file=nope.gin'], ('nope.gin', '--gin_search_paths')),
    (['--gin_file=gs://b/x.gin'], 'gs://b/x.gin'),
    (['--run_dir=gs:/b/r'], ('gs:/b/r', 'gs://BUCKET/PATH')),
    (['--run_dir=http://127.0.0.1:9/x'], 'http://127.0.0.1:9/x'),
    (['--run_dir=abfs://b/run'], ('abfs://b/run', 'pip install')),
    (['--distributed', '--host_timeout=10000000'], ('--host_timeout', '10000000', '1000000')),
    (['--shard=3/3'], ('--shard', "'3/3'")),
    (['--shard=0/99999999'], ('--shard', "'0/99999999'", '10000')),
    (['--shard=0/2', '--merge'], ('--shard', '--merge')),
    (['--run_dir={tmp}/none', '--merge'], ('{tmp}/none', 'shards')),
    (['--only=nothing', '--run_dir={tmp}/run'], ('only=nothing', 'experiments here are experiment')),
    (['--run_dir={tmp}/file'], '{tmp}/file'),
    (['--run_dir={tmp}/thesis'], ('{tmp}/thesis', 'thesis.tex')),
    (['--run_dir={tmp}/lost'], ('{tmp}/lost', 'config.gin')),
    *(
      (['--run_dir={tmp}/run', *(f'--gin.{b.replace(" = ", "=")}' for b in bindings)], part)
      for bindings, part in map(GIN.get, ON_THE_COMMAND_LINE)
    ),
  ],
  'train': [
    ([], '--out'),
    (['--out={tmp}/out'], 'train.jobs'),
    (['--out=gs://b/out'], 'gs://b/out'),
    (['--out={tmp}/out', '--gin_file=train/embedded.gin', '--gin.train.T5.config=abc'], ("config='abc'", 'T5Config')),
    (['--out={tmp}/out', '--gin_file=train/embedded.gin', '--gin.train.Job.task=3'], ('task', '3')),
    *(
      (['--out={tmp}/out', '--gin_file=train/embedded.gin', f'--gin.train.Settings.{name}={value}'], f'{name}={value}')
      for name, value in dict(seed="'x'", widths=3, optimizer=3, truncate="'x'", distillation=4).items()
    ),
    (
      ['--out={tmp}/out', '--gin_file=train/embedded.gin', '--gin.train.Job.teacher=@Checkpoint()']
      + ["--gin.Checkpoint.path='x'", "--gin.Checkpoint.dtype='bfloat16'"],
      ("Checkpoint.dtype='bfloat16'", 'float32'),
    ),
    (['--out={tmp}/out', '--gin_file=train/embedded.gin', '--job=medium'], ('--job=medium', 'large, small')),
    (['--out={tmp}/file', '--gin_file=train/embedded.gin'], '{tmp}/file'),
    (['--out={tmp}/out', '--gin_file=train/embedded.gin', "--gin.small/train.Job.name='../x'"], ('../x', '--out')),
  ],
  'plan': [
    (['a'], '--prompts'),
    (['a', '--prompts={tmp}/file'], 'not 1'),
    (['--models', 'a', '--prompts={tmp}/file'], 'not 1'),
    *(
      ([*'ab', '--prompts={tmp}/file', *more], part)
      for more, part in [
        (['--rule=opt:abc'], ('--rule', 'opt:abc')),
        (['--rule=op:1'], ('--rule', "'op'", 'speculative')),
        (['--rule=chow:2'], ('chow:2', '0 <= alpha <= 1')),
        (['--rule=opt'], ('needs a value for alpha', 'opt:VALUE after --rule; see --help')),
        (['--blocks=a-b'], ('--blocks', "'a-b'")),
        (['--blocks=1-999999999'], ('--blocks', "'1-999999999'", '256')),
        (['--budget=x'], ('--budget', "'x'", '0 for no limit')),
        (['--count=-1'], ('--count', "'-1'")),
        (['--dtype=int8,int4'], ('--dtype', "'int4'")),
        ([], 'a '),
      ]
    ),
    ([*'ab', '--prompts={tmp}/file', '--mesh=data=1/model=1'], ('two meshes', '--mesh=data=1,model=4')),
    ([*'ab', '--prompts={tmp}/none'], '{tmp}/none'),
    ([*'ab', '--prompts={tmp}/none', '--out={tmp}', '--overwrite'], '{tmp} is a folder'),
    ([*'ab', '--prompts={tmp}/none', '--out={tmp}/file/plan.json'], ('{tmp}/file/plan.json', 'choose another')),
    (['abfs://b/x', 'b', '--prompts={tmp}/file'], ('abfs://b/x', 'pip install')),
  ],
  'convert': [
    (['{tmp}/none', '{tmp}/out'], '{tmp}/none'),
    (['{tmp}/none', '{tmp}/file/out'], '{tmp}/file'),
    (['{tmp}/none', 's3://b/x'], 's3://b/x'),
    (['{tmp}/none', '{tmp}/out', '--format=gguf'], ('--format', "'gguf'")),
    (['{tmp}/none', '{tmp}/thesis', '--overwrite'], ('{tmp}/thesis', 'thesis.tex')),
  ],
  'check': [
    ([], 'MODULE:NAME'),
    (['rules'], ("'rules'", 'MODULE:NAME')),
    (['speccascade.rules:otp'], ('otp', 'did you mean opt?')),
    (['my_rules_of_nowhere:mine'], 'my_rules_of_nowhere'),
    (['speccascade.rules:opt', '--alpha=x'], ('--alpha', "'x'")),
    (['--sampler=speccascade.rules:opt'], ('the sampler is called with (tokens, q, p, rng)', '(q, p')),
    (['--sampler=speccascade.check.sampler.cases:AFTER'], ('the sampler is {2:', 'a function')),
    (['--sampler=statistics:mean', '--rng=dice'], ('--rng', "'dice'")),
    (['--sampler=random:gammavariate', '--runs=0'], ('--runs', "'0'")),
    (['--samples={tmp}/file'], ('{tmp}/file, line 1', 'no JSON')),
    (['--samples={tmp}/none'], '{tmp}/none'),
  ],
  'compile': [
    ([], '--models'),
    (['--models', 't5_small_xl', '--dtype=int8,int8,int8'], ('int8,int8,int8', '2 models')),
    (['--models', 'a', 'b', 'c'], ('a is no config.json', 'each model')),
    (['--models=a'], "'a'"),
    (['--models=t5_huge'], ("'t5_huge'", 't5_small_xl')),
    (['--topology=v3:2x2', '--models=t5_small_xl'], ("'v3'", 'v4, v5e')),
    (['--models=a', '--mesh=model'], ("'model'", 'data=1,model=4')),
    (['--models=a', '--mesh=data=1/model=2'], ("'data=1/model=2'", 'data=1,model=4')),
    (['--models=a', '--batch-size=x'], ('--batch_size', "'x'")),
    (['--models', '{tmp}/thesis', '{tmp}/thesis'], ('{tmp}/thesis', 'config.json')),
    (['--models', '{tmp}/file', '{tmp}/file'], ('{tmp}/file', 'JSON')),
    (['--models=a', f'--max_new_tokens={2**63}'], ('--max_new_tokens', str(2**63))),
    (['--models=a', '--text={tmp}'], '{tmp} is a folder'),
    (['--models', '{tmp}/none', '--head={tmp}/thesis'], ('{tmp}/none', 'config.json')),
    (['--models', 'a@mtp', 'b'], ('@mtp', '--head')),
    (['--models=t5_small_xl', '--frequent=99999'], ('frequent=99999', '32128')),
    (['--models=a', '--text={tmp}/file/x'], ('{tmp}/file/x', 'choose another')),
  ],
  'decode': [
    (['--models', 'a', 'b'], ('INPUT', 'OUTPUT')),
    (['--models', 'a', 'b', '{tmp}/file', '{tmp}/out'], ('INPUT', '--models takes all', '-- before')),
    *(
      ([*more, '--models', 'a', 'b', '--', '{tmp}/file', '{tmp}/out'], part)
      for more, part in [
        (['--method=autoregressive', '--block=3'], ('autoregressive', '--block', 'model')),
        (['--method=autoregressive'], ('autoregressive', '2')),
        (['--method=cos'], ('cos', '--rule')),
        (['--method=sv'], ('sv', '--plan')),
        (['--method=scheduled(predictor=margins)'], ("'margins'", 'mean margin')),
        (['--method=sv_exact', '--plan=no.json'], ('no.json', 'python -m speccascade.')),
        (['--plan=no.json'], ('no.json', 'python -m speccascade.')),
        (['--method=speculative(goodput="accepted")'], ('speculative', 'goodput', 'block')),
        (['--method=speculative(block=2)', '--block=3'], ('speculative', 'block', 'twice')),
        (['--method=specultive'], ('--method', "'specultive'", 'token_cascade', 'MODULE:NAME')),
        (['--method=speculative(block=0)'], 'block=0'),
        (['--method=speculative(rule=opt(beta=1))'], ('opt', 'beta')),
        (['--method=speculative(policy=Heuristic(last=2))'], ('Heuristic', 'last', 'first')),
        (['--method=bild(max_draft)'], ('bild', 'by name')),
        (['--method=nowhere:mine'], ('nowhere', 'cannot be imported')),
        (['--method=json:loads'], ('loads', 's')),
        (['--policy=Heuristic(first=0)'], ('--policy', 'first=0')),
        (['--policy=Confidence:2'], ('--policy', 'threshold=2')),
        (["--policy=subprocess:Popen(args=['touch','x'])"], ('--policy', 'Popen', 'Policy')),
        (['--rule=opt:1e39'], ('opt', '1e+39', 'float32')),
        (['--policy=speculative'], ('--policy', "'speculative'", 'Heuristic')),
        (['--accept=greedily'], ('--accept', "'greedily'", 'token_wise')),
        (['--import=nowhere'], ('nowhere', 'cannot be imported')),
        (['--rule=op:1'], ('--rule', "'op'")),
        (['--temperature=-1'], '--temperature=-1.0'),
        (['--method=cos(blocks=(5, x))'], ('--method', 'blocks', "'x'")),
        ([], ('{tmp}/file, line 1', 'JSON')),
      ]
    ),
    (['--models', 'a', '--', '{tmp}/file', '{tmp}/out'], ('2', 'one was')),
    (['--models', 'a', 'b', '--', '{tmp}/none', '{tmp}/out'], '{tmp}/none'),
    (['--models', 'a', 'b', '--', '{tmp}/file', 's3://b/x'], 's3://b/x'),
    (['--models', 'a', 'b', '--', '{tmp}/file', '{tmp}/file/x'], ('{tmp}/file/x', 'choose another')),
    (['--models', 'a', 'b', '--', '{tmp}/file', f'{{tmp}}/{"x" * 245}'], ('x' * 245, 'choose another')),
    (['--models', 'a', 'b', '--overwrite', '--', '{tmp}/file', '{tmp}/file'], ('{tmp}/file', 'input')),
    (['--models', 'a', 'b', '--', '{tmp}/damaged.gz', '{tmp}/out'], ('damaged.gz', 'gzip')),
    (['--models', 'a', 'b', '--overwrite', '--', '{tmp}/prompts', '{tmp}/thesis'], ('{tmp}/thesis', 'folder')),
    (['--models', 'a', 'b', '--', '{tmp}/file', '{tmp}/thesis/thesis.tex'], ('thesis.tex', '--overwrite')),
    (['--models', '{tmp}/none', 'b', '--', '{tmp}/prompts', '{tmp}/out'], '{tmp}/none'),
  ],
  'calibrate': [
    ([], ('RUN', '--loss', '--at_most')),
    *(
      ([*more, '--loss=chrf'], part)
      for more, part in [
        (['{tmp}/none'], '--at_most'),
        (['{tmp}/none', '--at_most=x'], ('--at_most', "'x'")),
        (['{tmp}/none', '--at_most=1'], ('{tmp}/none', 'speccascade.run')),
        (['{tmp}/thesis', '--at_most=1'], ('{tmp}/thesis', 'speccascade.run')),
        (['abfs://b/run', '--at_most=1'], ('abfs://b/run', 'pip install')),
      ]
    ),
  ],
  'figure': [
    ([], ('RUN', '--out')),
    (['{tmp}/none', '--out={tmp}/fig.gif'], ('fig.gif', 'pdf, svg, png')),
    (['{tmp}/none', '--out={tmp}/fig.pdf'], ('{tmp}/none', 'speccascade.run')),
    (['{tmp}/none', '--out={tmp}/fig.pdf', '--width=33'], ('--width=33', '20 inches')),
    (['{tmp}/none', '--out={tmp}/file/fig.pdf'], ('{tmp}/file/fig.pdf', 'choose another')),
    (['abfs://b/run', '--out={tmp}/fig.pdf'], ('abfs://b/run', 'pip install')),
  ],
  'speccascade': [(['run'], 'run')],
}
ROWS = [(name, argv, part) for name, rows in COMMANDS.items() for argv, part in rows]


@pytest.mark.parametrize(('name', 'argv', 'part'), ROWS, ids=[f'{n} {" ".join(a)}'[:60] for n, a, _ in ROWS])
def test_a_command_says_it_in_one_sentence_and_exits_with_1(name, argv, part, tmp_path, capsys, monkeypatch):
  written(tmp_path, 'file', 'a prompt\n')
  written(tmp_path, 'prompts', '"a prompt"\n')
  written(tmp_path, 'damaged.gz', b'\x1f\x8b\x08')
  for folder, file in (('thesis', 'thesis.tex'), ('lost', 'examples.jsonl')):
    (tmp_path / folder).mkdir()
    written(tmp_path / folder, file, '{}\n')
  monkeypatch.chdir(tmp_path)
  argv = [a.replace('{tmp}', str(tmp_path)) for a in argv]
  assert MAIN[name](argv) == 1
  out, error = capsys.readouterr()
  assert not out and error.startswith('error: ') and error.endswith('\n'), error
  said = error.removeprefix('error: ').removesuffix('\n')
  assert_says(said, part, tmp_path)


@pytest.mark.parametrize('name', MAIN)
def test_help_exits_with_0(name, capsys):
  with pytest.raises(SystemExit) as ended:
    MAIN[name](['--help'])
  out = capsys.readouterr().out
  assert ended.value.code == 0 and out.startswith('usage: python -m speccascade')
  assert '--debug' in out and (name == 'speccascade' or '--import MODULE' in out)


def test_an_error_is_raised_on_request(tmp_path):
  with pytest.raises(commands.FAILURES, match='none'):
    convert.main([f'{tmp_path}/none', f'{tmp_path}/out', '--debug'])


def test_the_files_that_ship_are_found():
  assert (gin_files.SHIPPED / 'forkme.gin').is_file()
