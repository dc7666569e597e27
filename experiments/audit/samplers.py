"""The speculative samplers of other packages, as `speccascade.check_sampler` takes them.

A sampler that draws its draft itself is given models of fixed distributions by position. Of a package that imports
all that it serves with, the module that verifies is imported alone (`_bare`).
"""

import functools
import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

os.environ.setdefault('KERAS_BACKEND', 'torch')
os.environ.setdefault('TRITON_INTERPRET', '1')  # kernels run on the CPU

TPU = 'tpu_inference.layers.jax.sample'
PROMPT = torch.zeros((1, 1), dtype=torch.long)


def _tensor(x) -> torch.Tensor:
  return torch.tensor(np.asarray(x), dtype=torch.float32)


def _logits(x) -> torch.Tensor:
  return torch.log(_tensor(x))


def _seeded(rng: torch.Generator) -> int:
  """Seed the generator that torch draws from where it is given none."""
  torch.manual_seed(rng.initial_seed())
  return rng.initial_seed()


@functools.cache
def _bare(module: str) -> ModuleType:
  """Import a module without the `__init__` files above it."""
  parents = module.split('.')[:-1]
  if parents[0] not in sys.modules:
    [folder] = importlib.util.find_spec(parents[0]).submodule_search_locations
    for i in range(1, len(parents) + 1):
      _package('.'.join(parents[:i]), os.path.join(folder, *parents[1:i]))
  return importlib.import_module(module)


def _package(name: str, folder: str):
  """Let a folder be a package without its `__init__` file."""
  sys.modules[name] = ModuleType(name)
  sys.modules[name].__path__ = [folder]


def _model(distributions, result=lambda logits: logits):
  """Return a model of tokens [1, T] that follows the distributions by position, the last one behind them."""
  logits = _logits(distributions)

  def model(tokens, **_):
    return result(logits[torch.arange(tokens.shape[1]).clamp(max=len(logits) - 1)][None])

  return model


# ---- of given drafts ----


def _transformers(tokens, q, p, rng, **settings):
  from transformers.generation import utils

  _seeded(rng)
  given = torch.tensor([list(tokens)]), _logits(q)[None], len(tokens), _logits(p)[None]
  return utils._speculative_sampling(*given, **settings)[0][0].tolist()


def transformers(tokens, q, p, rng):
  """What assisted generation verifies with."""
  return _transformers(tokens, q, p, rng)


def transformers_ensemble(tokens, q, p, rng, weight=0.5):
  """The same towards v = w p + (1 - w) q: `p` here is v, so the verifier's own distributions follow from it."""
  own = np.clip((p - (1 - weight) * np.vstack([q, q[-1:]])) / weight, 0, None)
  return _transformers(tokens, q, own / own.sum(-1, keepdims=True), rng, assistant_ensemble_weight=weight)


@functools.cache
def _of_tpu_inference():
  """Return a device, the class of the rejection sampler, the function that draws bonus tokens, and their settings.

  What stands in for the rest of the package and for vLLM names the axes of the mesh, and places nothing.
  """
  import jax

  axes = SimpleNamespace(ShardingAxisName=SimpleNamespace(ATTN_DATA='data', MLP_TENSOR='model'))
  options = SimpleNamespace(get_sampling_compiler_options=dict)
  stand_ins = {'layers.common.sharding': axes, 'models.common.compiler_options': options}
  for name in ('runner.input_batch', 'utils', *stand_ins):
    sys.modules[f'tpu_inference.{name}'] = stand_ins.get(name, MagicMock())
  for name in ('vllm', 'vllm.config', 'vllm.config.model', 'vllm.v1', 'vllm.v1.outputs'):
    sys.modules.setdefault(name, MagicMock())
  rejection, sampling, metadata = (_bare(f'{TPU}.{x}') for x in ('rejection_sampler', 'sampling', 'sampling_metadata'))
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))
  return mesh, rejection.RejectionSampler(mesh), sampling.sample, metadata.TPUSupportedSamplingMetadata


def tpu_inference_batch(tokens, q, p, key, temperature, top_k, top_p, lengths):
  """What vLLM on TPUs verifies a batch with, called as its runner does: without q, for its drafts are arg maxima.

  The test then accepts with p(x), which is right whatever drew x. A greedy row has the temperature -1; the bonus tokens
  are drawn beforehand.
  """
  import jax
  import jax.numpy as jnp

  mesh, sampler, sample, Settings = _of_tpu_inference()
  bonus_key, key = jax.random.split(key)
  settings = Settings()
  if temperature.any():
    given = np.where(temperature == 0, -1, temperature), np.where(top_k == p.shape[-1], -1, top_k), top_p
    settings = Settings(*map(jnp.asarray, map(np.float32, given)), do_sampling=True)
    settings.top_k = settings.top_k.astype(int)
  with np.errstate(divide='ignore'):
    logits = np.log(np.float32(p))
  ends = jnp.asarray(logits[np.arange(len(p)), lengths])
  bonus, _ = sample(bonus_key, mesh, ends, settings, allow_distributed_sampling=False)
  drafted = np.arange(tokens.shape[1]) < lengths[:, None]
  flat = np.int32(tokens[drafted]), np.int32(lengths), None, logits[:, :-1][drafted]
  out = sampler(*(x if x is None else jnp.asarray(x) for x in flat), bonus, settings, key)
  return sampler.parse_output(out, p.shape[-1], lengths, len(p), drafted.sum(), 1, {0: range(len(p))})


def tpu_inference(tokens, q, p, key, temperature, top_k, top_p):
  """The same for a batch of one."""
  settings = (np.array([x]) for x in (temperature, top_k, top_p))
  return tpu_inference_batch(tokens[None], q[None], p[None], key, *settings, np.array([len(tokens)]))[0]


def lmdeploy(tokens, q, p, rng):
  """What its default backend verifies with; the bonus token is drawn beforehand, as there."""
  sampling = _bare('lmdeploy.pytorch.backends.default.rejection_sampling')
  _seeded(rng)
  bonus = torch.multinomial(_tensor(p[-1]), 1)
  given = _logits(p[:-1])[None], torch.tensor([list(tokens)]), bonus
  out = sampling.DefaultRejectionSamplingImpl().forward(*given, is_greedy=None, draft_probs=_tensor(q)[None])
  return [t for t in out[0][0].tolist() if t >= 0]


def _sglang(tokens, q, p, rng, **settings):
  kernels = _bare('sglang.kernels.ops.speculative.reject_sampling')
  slots = len(tokens) + 1
  predicts, index = torch.zeros(slots, dtype=torch.int32), torch.full((1, slots), -1, dtype=torch.int32)
  count, at = torch.zeros(1, dtype=torch.int32), torch.arange(slots)[None]
  coins = torch.rand((1, slots), generator=rng), torch.rand(1, generator=rng)
  given = predicts, index, count, torch.tensor([[0, *tokens]]), at, at, at, *coins, _tensor(p)[None], _tensor(q)[None]
  kernels.chain_speculative_sampling_triton(*given, 1.0, 1.0, True, **settings)
  return predicts[: count[0] + 1].tolist()


def sglang(tokens, q, p, rng):
  """What a chain of drafts is verified with."""
  return _sglang(tokens, q, p, rng)


def sglang_block(tokens, q, p, rng):
  """The same by block verification."""
  return _sglang(tokens, q, p, rng, block_verification=True)


def flashspec(tokens, q, p, rng):
  """What a step of its engine verifies with."""
  from flashspec.sampling import rejection

  given = torch.tensor([list(tokens)]), _logits(q)[None], _logits(p)[None]
  accepted, last = rejection.rejection_step(*given, generator=rng)[0].tolist()
  return [*tokens[:accepted], last]


def economize(tokens, q, p, rng):
  """Its verifier by rejection."""
  from economize.decoding import TopPSampler, verifiers

  selector = TopPSampler(1.0, seed=rng.initial_seed())
  given = _logits(p), list(map(int, tokens)), _tensor(q), selector, PROMPT[0], 1
  accepted, last = verifiers.RejectionVerifier.verify(None, *given)
  return [*tokens[:accepted], last]


def dflash(tokens, q, p, rng):
  """What block drafts are verified with."""
  from dflash import model

  _seeded(rng)
  accepted, last = model._rejection_sample(torch.tensor([list(tokens)]), _tensor(p)[None], _tensor(q)[None])
  return [*tokens[:accepted], int(last)]


def specdec(tokens, q, p, rng):
  """Its decoder's verification."""
  from specdec.decoder import SpecDecoder

  _seeded(rng)
  big = _model(p, lambda logits: SimpleNamespace(logits=logits))
  decoder = SimpleNamespace(device='cpu', big_model=big)
  return SpecDecoder.verify(decoder, PROMPT, list(tokens), list(_tensor(q)[:, None]))


def mtplx(tokens, q, p, rng):
  """Its test of single tokens, in the order of the block."""
  sampling = _bare('mtplx.sampling')
  for i, x in enumerate(tokens):
    decision = sampling.verify_one_token(p[i], q[i], int(x), rng)
    if not decision.accepted:
      return [*tokens[:i], decision.token_id]
  return [*tokens, sampling.sample_from_distribution(p[-1], rng)]


# ---- with their drafts ----


def keras_hub(q, p, rng):
  """`SpeculativeSampler`, for a row or, given [rows, K, V], for a batch."""
  from keras_hub.samplers import RandomSampler, SpeculativeSampler

  seed = rng.initial_seed()
  batch = np.ndim(q) == 3
  drafter, verifier = (_logits(x if batch else x[None]) for x in (q, p))
  rows, block, _ = drafter.shape
  sampler = SpeculativeSampler(block, base_sampler=RandomSampler(seed=seed), seed=seed)
  of = lambda x, at: x[:, min(int(at) - 1, x.shape[1] - 1)]
  out = sampler(
    next=None,
    draft_next=lambda prompt, cache, at: (of(drafter, at), None, cache),
    verify_next=lambda prompt, cache, at, k: (torch.stack([of(verifier, at + i) for i in range(k + 1)], 1), cache),
    prompt=torch.zeros((rows, block + 2), dtype=torch.int32),
    index=1,
  )
  texts = out[:, 1:].tolist()
  return texts if batch else texts[0]


def _seqspecdecod(step, q, p, rng):
  _seeded(rng)
  models = (_model(x, lambda logits: SimpleNamespace(logits=logits)) for x in (q, p))
  return step(*models, PROMPT, len(q), 1.0, 1.0)[0][0, 1:].tolist()


def seqspecdecod(q, p, rng):
  """Its step by tokens."""
  from seqspecdecod.standard_sd import standard_speculative_step

  return _seqspecdecod(standard_speculative_step, q, p, rng)


def seqspecdecod_naive_hsd(q, p, rng):
  """Its step by the divergences of branches."""
  from seqspecdecod.naive_hsd import naive_hsd_step

  return _seqspecdecod(naive_hsd_step, q, p, rng)


def seqspecdecod_capped_hsd(q, p, rng):
  """The same with capped ratios."""
  from seqspecdecod.capped_hsd import capped_hsd_step

  return _seqspecdecod(capped_hsd_step, q, p, rng)


def speculative_decoding(q, p, rng):
  """Its loop of rounds, up to the text of K + 1 tokens."""
  from speculative_decoding import speculative_decoding as decode

  _seeded(rng)
  caches = lambda logits: (logits, (torch.zeros(1, 1, logits.shape[1], 1), None))
  nets = _model(p, caches), _model(q, caches)
  return decode(*nets, PROMPT, len(q) + 2, gamma=len(q), filter_thres=0.0)[0][0].tolist()


def mini_infer(q, p, rng):
  """Its step."""
  from mini_infer.speculative.verifier import speculative_step

  _seeded(rng)
  of = lambda x: _model(x, lambda logits: (logits, None))
  return speculative_step(of(p), of(q), PROMPT, len(q), temperature=1.0)[0]
