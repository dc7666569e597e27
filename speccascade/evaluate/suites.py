"""The papers' suites of curves: each function returns texts, as `evaluate.texts` reads them.

A suite is named in `Experiment.curves`, as in 'cascades' or 'cascades(block=3)'. An experiment adds its reference,
'target only', by itself.
"""

from collections.abc import Callable, Sequence
import inspect

TARGET = 'target only'
DRAFT = 'draft only'
MIDDLE = "autoregressive(model=1, name='middle only')"
THIRDS = (0.333333, 0.333333, 0.333334)
TENTHS = tuple((round(w / 10, 1), round(1 - w / 10, 1)) for w in range(1, 10))


# ---- speculative cascades (Narasimhan et al. 2024): two models, values from the large one's end ----


def cascades(block: int = 5) -> list[str]:
  """Table 2 and Figure 2: cascades by answers and by tokens, speculative decoding, and its rules for 0-1 loss."""
  # The thresholds of log-probabilities, eq. 1 and its mean over the tokens, are for answers of some twenty tokens.
  answers = [
    "sequence_cascade(score='sum', threshold=[-6.0, -14.0, -24.0, -36.0, -50.0], name='SeqCascade [Chow]')",
    "sequence_cascade(score='mean', threshold=[-0.3, -0.7, -1.2, -1.8, -2.5], name='SeqCascade [Chow, mean]')",
  ]
  names = 'lossy', 'bild_star', 'chow', 'diff', 'opt', 'token_v3'
  return [DRAFT, *answers, 'token_cascade(rule=chow)', *_speculative(block, 'speculative', *names)]


def oracles(block: int = 5) -> list[str]:
  """Figure 1, against calls of the large model: both models at every position, which no sequential cascade can do."""
  return [DRAFT, 'token_cascade(rule=chow)', *_speculative(block, 'speculative'), 'oracle(rule=diff)']


def lossy_rules(block: int = 5) -> list[str]:
  """Figure 5: lossy decoding with β = 1 and with β found at each position."""
  return [DRAFT, *_speculative(block, 'speculative', 'lossy', 'lossy_star')]


def lossy_tests(block: int = 5) -> list[str]:
  """The lossy tests of engines and papers."""
  names = 'lossy', 'mentored', 'typical', 'medusa', 'relaxed', 'thresholds', 'fuzzy', 'token_v3', 'token_v3_tested'
  ahead = f"speculative(accept=FLy(limit=0.6, window=2), block={block}, name='FLy')"
  return [DRAFT, *_speculative(block, 'speculative', *names), ahead]


def log_rules(block: int = 5) -> list[str]:
  """Table 3: the rules for log loss, whose thresholds are entropies."""
  first = [DRAFT, 'token_cascade(rule=chow_log)', *_speculative(block, 'speculative'), 'oracle(rule=diff_log)']
  return [*first, *_speculative(block, 'chow_log', 'diff_log', 'opt_log')]


def token_rules(block: int = 5) -> list[str]:
  """The figures of Gemma: the rules that judge tokens among the others."""
  names = 'lossy', 'bild_star', 'chow', 'diff', 'opt', 'token_v1', 'token_v2', 'token_v3'
  return [DRAFT, *_speculative(block, 'speculative', *names)]


def _speculative(block: int, *names: str) -> list[str]:
  return [f'speculative(rule={name}, block={block})' for name in names]


# ---- collaborative decoding (Fu et al. 2025): the reference is 'ensemble' ----


def ensembles(weights: Sequence[float] = (0.5, 0.5), blocks: Sequence[int] = (5, 1)) -> list[str]:
  """Table 2, and Figure 6 by its blocks: π = Σ λ_i p_i in lockstep and sped up; two models draft 5 tokens or 1."""
  return _combined(f'combiner=weighted, weights={tuple(weights)}', blocks)


def contrasts(mu: float = 0.1, blocks: Sequence[int] = (5, 1)) -> list[str]:
  """Tables 3 and 4: contrastive decoding, π = softmax(ℓ_p - μ ℓ_q), of a small model and a large one."""
  return _combined(f'combiner=contrastive, mu={mu}', blocks)


def ensembles_of_3(weights: Sequence[float] = THIRDS) -> list[str]:
  """Table 2, its last rows: an ensemble of three models, each of which drafts one token."""
  return _combined(f'combiner=weighted, weights={tuple(weights)}', (1,), models=3)


def _combined(of: str, blocks: Sequence[int], models: int = 2) -> list[str]:
  """Return a combination in lockstep and sped up; only the first model drafts more than one token."""
  several = '' if models == 2 else f', models={models}'
  turns = [(block, *[1] * (models - 1)) for block in blocks]
  return [
    f"ensemble({of}{several}, name='ensemble')",
    f"ensemble_parallel({of}{several}, name='ensemble, parallel')",
    f"ensemble_sd({of}{several}, block={list(blocks)}, name='speculative, opaque')",
    f"naive_cos({of}{several}, block={list(blocks)}, name='naive CoS')",
    f"cos({of}, blocks={turns}, name='CoS')",
  ]


def ensembles_by_weight(weights: Sequence[tuple] = TENTHS[::-1]) -> list[str]:
  """Figure 4: a weighted ensemble over its weights, the first of them that of the model that proposes."""
  return _over(f'combiner=weighted, weights={list(weights)}')


def contrasts_by_mu(mu: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5)) -> list[str]:
  """Figure 5: contrastive decoding over μ."""
  return _over(f'combiner=contrastive, mu={list(mu)}')


def _over(of: str) -> list[str]:
  turns = [f"cos({of}, blocks=({block}, 1), name='CoS, γ = {block}')" for block in (1, 5)]
  return [f"ensemble({of}, name='ensemble')", *turns]


def ensemble_tradeoff(weights: Sequence[tuple] = TENTHS) -> list[str]:
  """Figure 8: quality against speed over the weight of the drafter, next to plain speculative decoding."""
  sped = f"cos(combiner=weighted, weights={list(weights)}, blocks=(5, 1), name='CoS')"
  return [TARGET, "speculative(block=5, name='speculative')", sped]


# ---- speculative verification: drafter, companion and verifier ----


def verification(plan: str, block: int = 5) -> list[str]:
  """Speculative verification by a plan next to plain decoding, speculative decoding and shorter drafts."""
  drafts = 'speculative(pair=(0, 2), block=7, policy='
  return [
    TARGET,
    "speculative(pair=(0, 2), block=[3, 5, 7], name='speculative')",
    f"{drafts}Confidence(threshold=0.4), name='speculative, by confidence')",
    f"{drafts}MovingAverage(threshold=0.3, decay=0.8), name='speculative, by moving average')",
    *goodputs(plan, block),
    f"planned(plan={plan!r}, name='planned by batch')",
  ]


def goodputs(plan: str, block: int | list[int] = 5) -> list[str]:
  """Speculative verification as published, by both readings of its goodput, and exact."""
  by = f'plan={plan!r}, block={block}'
  published = ('tokens', 'all tokens'), ('accepted', 'accepted tokens')
  readings = [f"sv({by}, goodput='{goodput}', name='SV, as published, {name}')" for goodput, name in published]
  return [*readings, f"sv_exact({by}, name='SV, exact')"]


def verification_by_block(plan: str, blocks: Sequence[int] = (5, 7)) -> list[str]:
  """Figures 4 to 6: drafts of several lengths for speculative decoding and verification."""
  return [f"speculative(pair=(0, 2), block={list(blocks)}, name='speculative')", *goodputs(plan, list(blocks))]


# ---- three models: 0 drafts, 1 is between, 2 is the large one ----


def chains(alphas: Sequence[float] = (0.0, 0.2), shares: Sequence[float] = (0.5,), block: int = 5) -> list[str]:
  """Cascades of three models next to those of their pairs: OPT by `alphas` and Token by `shares`."""
  turns = f'blocks=({block}, 1, 1)'
  texts = [TARGET, MIDDLE, DRAFT]
  texts += [f"speculative(block={block}, pair=({i}, 2), name='SpecDecode {i}-2')" for i in (0, 1)]
  texts += [f"cos(combiner=speculative, {turns}, name='SpecDecode 0-1-2, in turns')"]
  texts += [*_pairs('OPT', 'opt', alphas, block, (0, 2), (1, 2)), _chain('OPT', 'opt', alphas, block)]
  texts += [f"cos(combiner=opt, alpha={list(alphas)}, {turns}, name='OPT 0-1-2, in turns')"]
  return [
    *texts,
    *_pairs('Token', 'token_v3', shares, block, (0, 2), (1, 2)),
    _chain('Token', 'token_v3', shares, block),
  ]


def lower_chains(alphas: Sequence[float] = (0.0, 0.2), shares: Sequence[float] = (0.5,), block: int = 5) -> list[str]:
  """The first two of three models; the reference is 'middle only'."""
  return [MIDDLE, *_pairs('OPT', 'opt', alphas, block, (0, 1)), *_pairs('Token', 'token_v3', shares, block, (0, 1))]


def averages_of_3(weights: Sequence[float] = THIRDS) -> list[str]:
  """The mean of three models, the reference 'ensemble': in lockstep, with drafts of model 0, in turns."""
  of = f'combiner=weighted, weights={tuple(weights)}'
  turns = [(block, 1, 1) for block in (5, 2, 1)]
  return [
    f"ensemble({of}, models=3, name='ensemble')",
    f"naive_cos({of}, models=3, block=[5, 2, 1], name='naive CoS')",
    f"cos({of}, blocks={turns}, name='CoS')",
  ]


def _pairs(name: str, rule: str, values: Sequence[float], block: int, *pairs: tuple[int, int]) -> list[str]:
  head = f'speculative(rule={rule}, alpha={list(values)}, block={block}'
  return [f"{head}, pair={pair}, name='{name} {pair[0]}-{pair[1]}')" for pair in pairs]


def _chain(name: str, rule: str, values: Sequence[float], block: int) -> str:
  # A cascade of two drafts block + 1 tokens and scores block, and so does the chain of three, by a block of one more.
  return f"naive_cos(combiner={rule}, alpha={list(values)}, block={block + 1}, models=3, name='{name} 0-1-2')"


# ---- families ----


def policies(block: int = 8) -> list[str]:
  """When a draft ends: after `block` tokens, after a number that adapts, or by what the drafter says."""
  by = 'Heuristic()', 'Confidence(threshold=0.4)', 'MovingAverage(threshold=0.3, decay=0.8)'
  return [f'speculative(block={block})', *(f'speculative(block={block}, policy={policy})' for policy in by)]


def acceptors(block: int = 5) -> list[str]:
  """How a block is tested: each token alone, or jointly, which accepts more."""
  return [f'speculative(block={block})', f'speculative(block={block}, accept=block)']


def known() -> dict[str, Callable[..., list[str]]]:
  """Return the suites by name."""
  made = {name: x for name, x in globals().items() if inspect.isfunction(x) and x.__module__ == __name__}
  return {name: x for name, x in made.items() if not name.startswith('_') and x is not known}
