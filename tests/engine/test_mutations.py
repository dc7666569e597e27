"""Each known mistake, planted in the loop, makes the distribution tests fail."""

import dataclasses

from cases import bound, FALSE_ALARM, LATE, METHODS, PAIR, PROMPT, RARELY
from emitted import chi_square, emitted_distribution
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiers import long_but

from speccascade import acceptance, methods, rules, Sampler, sampling
from speccascade.check import enumeration
from speccascade.check.enumeration import distance
from speccascade.engine import phases
from speccascade.engine.loop import decode_batch
from speccascade.engine.phases import Truncate
from speccascade.types import DRAFT, FINAL, iota, Prompt, Told


@pytest.fixture(autouse=True)
def nothing_compiled():
  """Make sure that a planted bug is traced, and that it does not outlive its test."""
  jax.clear_caches()
  yield
  jax.clear_caches()


def off(name, method=None, setting=None, tokens=3):
  """Return the distance of a method's exact distribution to the lockstep distribution, and of its sum to 1."""
  own, models, step = METHODS[name]
  setting = setting or {}
  distribution = emitted_distribution(method or own, models, PROMPT, tokens, Sampler(**setting))
  return max(distance(distribution, reference.joint_distribution(step(models, **setting), PROMPT, tokens)))


def late(name, method=None, rows=20_000):
  """Return the p-value of late tokens of a method, or of one in its place, under its distribution."""
  own, models, step = LATE[name]
  expected = reference.late_distribution(step(models), PROMPT, 5, 2, first=6, count=3)
  return chi_square(method or own, models, PROMPT, Sampler(), expected, first=6, rows=rows)[0]


def with_accept(name, accept):
  """Return a method with another acceptor and the random numbers of its own."""
  method = METHODS[name][0]
  declared = acceptance.acceptor(told=Told.LATER if method.by_round else Told.NOTHING)
  return method.accepting(declared(lambda trial: accept(trial)))


@pytest.mark.full
def test_a_bonus_token_from_the_verifier_is_caught(monkeypatch):
  final = phases.Verify.final

  def bonus_from_p(self, w, sampler, verdict, rejected, before):
    p = sampler.at(verdict.accepted)(phases.take1(w.logits[self.models[-1]], verdict.accepted))
    return jnp.where(rejected[:, None], final(self, w, sampler, verdict, rejected, before), p)

  monkeypatch.setattr(phases.Verify, 'final', bonus_from_p)
  assert off('ensemble_sd') > 0.01


@pytest.mark.full
def test_a_cascade_that_forgets_that_its_target_reads_q_is_caught():
  # Drafting γ tokens, scoring all and drawing a bonus token needs q after the block; p is not the target there.
  method = methods.speculative(bound('opt'), block=2)
  propose = dataclasses.replace(method.phases[0], n=2)
  score = dataclasses.replace(method.phases[1], limit=phases.Every())
  verify = dataclasses.replace(method.phases[2], models=(1,), combiner=rules.bind(rules.own))
  assert off('speculative opt', method.replace(phases=(propose, score, verify))) > 0.01


@pytest.mark.full
def test_a_residual_that_is_not_normalised_is_caught(monkeypatch):
  # A draw that takes its weights for probabilities gives what is missing to the last token.
  def absolute(weights, u, layout):
    hit = jnp.cumsum(weights, -1) > u[..., :1]
    return jnp.where(hit.any(-1), hit.argmax(-1), weights.shape[-1] - 1).astype(jnp.int32)

  monkeypatch.setattr(sampling.noise, 'draw', absolute)
  assert late('speculative') > FALSE_ALARM  # harmless by itself
  monkeypatch.setattr(sampling, 'residual', lambda pi, q: jnp.maximum(pi - q, 0))
  jax.clear_caches()
  assert late('speculative') < FALSE_ALARM


@pytest.mark.long
def test_a_residual_that_is_not_clipped_is_caught(monkeypatch):
  monkeypatch.setattr(sampling, 'residual', lambda pi, q: pi)
  assert off('speculative speculative') > 0.01


@pytest.mark.long
def test_q_compared_in_another_type_than_it_was_drawn_in_is_caught():
  def rounded(trial):
    coarse = trial.window.probs.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return acceptance.token_wise(trial._replace(window=trial.window.replace(probs=coarse)))

  assert off('speculative speculative', with_accept('speculative speculative', rounded)) > 1e-4


@struct.dataclass
class Lowest(sampling.Noise):
  """Noise whose every uniform is 0, the least value that one can take."""

  def draw(self, weights, position, purpose, start):
    return sampling.draw(weights, jnp.zeros((*position.shape, 2))), self

  def accept(self, numerator, denominator, position, start):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sampling.Keyed, 'uniform', lambda self, position, *_: jnp.zeros((*position.shape, 2)))
      keyed = sampling.Keyed(jnp.zeros((position.shape[0], 2), jnp.uint32))
      return keyed.accept(numerator, denominator, position, start)[0], self


@pytest.mark.full
def test_an_accept_test_with_at_most_lets_impossible_tokens_through(monkeypatch):
  def impossible():
    """Count emitted tokens that the target gives no mass, with u = 0 at every test."""
    prompt = Prompt(jnp.array([[1, 0]] * 3), jnp.array([2] * 3))
    state = decode_batch(
      METHODS['speculative speculative'][0], PAIR, prompt, max_new_tokens=12, sampler=Sampler(top_k=1), noise=Lowest()
    )
    s, count = reference.Sampler(top_k=1), 0
    for row in np.asarray(state.tokens):
      count += sum(s(reference.table_logits(PAIR[1], row[:i]))[row[i]] == 0 for i in range(2, 14))
    return count

  assert impossible() == 0

  def at_most(self, numerator, denominator, position, start):
    return 0 * denominator <= numerator, self

  monkeypatch.setattr(Lowest, 'accept', at_most)
  jax.clear_caches()
  assert impossible() > 0


@pytest.mark.long
def test_discarding_a_token_for_what_it_is_is_caught():
  # The published speculative verification drops the first token that it does not verify and draws another.
  method, models, _ = METHODS['sv_exact']
  phases = (*method.phases[:3], Truncate(2), method.phases[3])
  assert off('sv_exact', method.replace(phases=phases), tokens=2) > 0.003  # its numbers are of a round: many


@pytest.mark.long
def test_one_key_for_two_rounds_of_block_verification_is_caught():
  # It drops tokens that it has looked at, so they may not be drawn again with the same number.
  name = 'block verification'
  accept = acceptance.acceptor(reads=(), told=Told.NOTHING)(lambda trial: acceptance.block(trial))
  assert late(name, LATE[name][0].accepting(accept), 131_072) < FALSE_ALARM


@pytest.mark.long
def test_a_deferral_read_from_a_draft_that_ran_out_is_caught():
  # Where a draft ends by its length, the next token is the verifier's, not a token of a rule that was not asked.
  method, models, _ = METHODS['token_cascade chow']
  verify = dataclasses.replace(method.phases[2], combiner=rules.bind_combiner(bound('chow', RARELY)), models=(0, 1))
  propose = dataclasses.replace(method.phases[0], n=3)
  assert off('token_cascade chow', method.replace(phases=(propose, method.phases[1], verify))) > 0.01


# ---- mistakes that others have shipped ----


SHARED = {  # the purpose whose number is drawn in the place of each
  'one key for two purposes': lambda purpose: 0,
  # The number that drew a rejected token is no longer uniform: it would draw the residual's token next to it.
  'a residual drawn with the noise of the draft': lambda purpose: DRAFT if purpose == FINAL else purpose,
}


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(SHARED, ['one key for two purposes']))
def test_noise_that_purposes_share_is_caught(monkeypatch, name):
  uniform = sampling.Keyed.uniform
  shared = lambda self, position, purpose, start: uniform(self, position, SHARED[name](purpose), start)
  monkeypatch.setattr(sampling.Keyed, 'uniform', shared)
  assert late('speculative') < FALSE_ALARM


@pytest.mark.long
def test_arg_max_drafts_tested_with_a_soft_law_are_caught(monkeypatch):
  # A drafter that proposes its likeliest token has a one-hot distribution, whatever its softmax says.
  def likeliest(self, weights, position, purpose, start):
    return draw(self, sampling.one_hot_max(weights) if purpose == DRAFT else weights, position, purpose, start)

  draw = enumeration.Enumerated.draw
  monkeypatch.setattr(enumeration.Enumerated, 'draw', likeliest)
  assert off('speculative speculative') > 0.01


FILTERS = dict(temperature=0.4, top_p=0.9)


def filtered_first(sampler, logits):
  """Filter the unscaled distribution, then apply the temperature."""
  return sampling.softmax(sampling.keep_top_p(logits, sampler.top_p[:, None]) / sampler.temperature[:, None])


@pytest.mark.long
def test_filters_before_the_temperature_for_the_bonus_alone_are_caught(monkeypatch):
  final = phases.Verify.final

  def bonus(self, w, sampler, verdict, rejected, before):
    p = filtered_first(sampler.at(verdict.accepted), phases.take1(w.logits[self.models[-1]], verdict.accepted))
    return jnp.where(rejected[:, None], final(self, w, sampler, verdict, rejected, before), p)

  monkeypatch.setattr(phases.Verify, 'final', bonus)
  assert off('speculative speculative', setting=FILTERS) > 0.003


@pytest.mark.long
def test_a_draft_drawn_from_a_rounded_law_and_tested_with_the_exact_one_is_caught(monkeypatch):
  draw = enumeration.Enumerated.draw

  def rounded(self, weights, position, purpose, start):
    coarse = weights.astype(jnp.bfloat16).astype(jnp.float32) if purpose == DRAFT else weights
    return draw(self, coarse, position, purpose, start)

  monkeypatch.setattr(enumeration.Enumerated, 'draw', rounded)
  assert off('speculative speculative') > 1e-4


def block_with(*, capped=True, from_left=True):
  """Return block verification: with the product of ratios capped, and each prefix tested by what is left, or not."""

  def accept(trial):
    width = trial.tokens.shape[1]
    pi, q = sampling.at_token(trial.pi[:, :width], trial.tokens), sampling.at_token(trial.window.probs, trial.tokens)
    ratio = jnp.where(q > 0, pi / jnp.where(q > 0, q, 1), 0)
    scales = [jnp.ones_like(ratio[:, 0])]
    for i in range(width):
      s = scales[-1] * ratio[:, i]
      scales.append(jnp.minimum(1, s) if capped else s)
    s = jnp.stack(scales[1:], 1)
    after = jnp.pad(trial.window.probs[:, 1:], ((0, 0), (0, 1), (0, 0)))
    left = sampling.tv(s[..., None] * trial.pi[:, 1:], after)
    inner = jnp.where(s >= 1, 1, left / jnp.maximum(left + 1 - s, 1e-30)) if from_left else jnp.minimum(1, s)
    last = iota(width) == trial.tested[:, None] - 1
    ok, noise = trial.noise.accept(jnp.where(last, s, inner), jnp.ones_like(s), trial.position, trial.start)
    accepted = jnp.max(jnp.where(ok & acceptance.in_test(trial), iota(width) + 1, 0), 1)
    scale = phases.take1(jnp.stack(scales, 1), accepted)
    return acceptance.Verdict(accepted, scale), noise

  return accept


@pytest.mark.long
@pytest.mark.parametrize('changed', [dict(capped=False), dict(from_left=False)], ids=str)
def test_block_verification_in_another_form_is_caught(changed):
  name = 'speculative block verification'
  assert off(name, with_accept(name, block_with(**changed))) > 0.003
