"""Compositions of what the package has, drawn from its registries, each to be judged and found out.

A composition is drawn axis by axis: a round, a drafter, a target, an acceptor, a policy, a predictor, a budget, an
ending, a sampler, what is requested, how many rows, whether seeds are equal. The values of an axis are

* rounds: the functions of `methods.known()`, whose arguments are drawn by their names, and `drawn` lists of phases;
* targets, acceptors, policies, predictors, budgets: those of `rules`, `acceptance`, `stopping`, `sv.predictors` and
  `sv.verification`, with numbers by which they tell;
* drafters and whatever else a file of `tests/crossed` defines: a new file is crossed without another edit.

`draw(seed, fixed)` returns a `found_out.Case`, or None where its parts don't go together. `pairs()` are all pairs of
values of two axes. `found_out` asks the package for its verdict of a case and finds out what is true:

* by enumeration of the compiled loop with two rows or three that all decide, all random numbers, γ to 3, some rounds;
* under `coupling='gumbel'` by the equality of texts.

So a verdict of exact holds or not, to 2·10⁻⁶; one of lossy shows, or not; a refusal was needed, or not.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import importlib
import inspect
import itertools
import pathlib
import random
from typing import Any

import docstrings
from found_out import Case
import jax.numpy as jnp
import numpy as np
import reference

from speccascade import acceptance, methods, Request, rules, Sampler, stopping
from speccascade.engine.limits import Every, First
from speccascade.engine.method import Method
from speccascade.engine.phases import Alternate, Propose, Score, Truncate, Verify, Wait
from speccascade.models import toy
from speccascade.sv import predictors, verification
from speccascade.sv.plans import Profile
from speccascade.types import Model

MOST = 7  # tokens that a row emits at most: three that are measured, and a draft behind them

# ---- worlds ----


@functools.cache
def world(vocab: int, encoder: bool = False, seed: int = 0):
  """Return the models of a vocabulary."""
  from crossed.drafters import World

  large = toy.model(10 * seed + 1, vocab, scale=1.2, encoder=encoder)
  near = lambda i, scale: toy.model(10 * seed + i, vocab, scale=scale, near=large, encoder=encoder)
  return World(vocab, large, near(3, 0.6), near(2, 1.2 if seed % 2 else 0.8))


# ---- registries ----


@functools.cache
def crossed() -> list[Any]:
  """Return what the files of `tests/crossed` define."""
  files = sorted(pathlib.Path(__file__).parent.joinpath('crossed').glob('[a-z]*.py'))
  modules = [importlib.import_module(f'crossed.{file.stem}') for file in files]
  return [x for module in modules for x in vars(module).values() if getattr(x, '__module__', '') == module.__name__]


def _own(kind: type) -> list[Any]:
  """Return the classes of a kind that a file of `tests/crossed` defines."""
  return [x for x in crossed() if isinstance(x, type) and issubclass(x, kind) and x is not kind]


def _declared(kind: type) -> list[Any]:
  return [x for x in crossed() if isinstance(getattr(x, 'declaration', None), kind)]


@functools.cache
def drafters() -> Mapping[str, Any]:
  """Return the kinds of drafters by name."""
  crossed()
  from crossed.drafters import DRAFTERS

  return DRAFTERS


@functools.cache
def targets() -> Mapping[str, Any]:
  """Return rules and combiners with numbers by which their target is no model's."""
  tables = [np.asarray(m.params['table'], float) for m in (world(2).small, world(2).large)]
  logits = list(zip(*tables))
  found = {}
  for name, thing in {**rules.known(), **{rules.name_of(x): x for x in _declared(rules.base.CombinerFacts)}}.items():
    if name in reference.RULES:
      found[name] = reference.bound(name, reference.telling(name, logits))
    else:
      found[name] = functools.partial(thing, **_numbers(thing))
  return found


NUMBERS = dict(weights=(0.4, 0.6), mu=0.3, lam=0.3, alpha=0.2, begin=(1,), end=(0,))


def _numbers(thing) -> dict[str, Any]:
  takes = inspect.signature(rules.inside(thing)).parameters
  made = {name: NUMBERS[name] for name in takes if name in NUMBERS}
  if 'inside' in takes:
    made['inside'] = functools.partial(rules.lossy, alpha=0.3)
  return made


@functools.cache
def acceptors() -> Mapping[str, Any]:
  """Return acceptors, with the numbers of their docstrings."""
  own = {rules.name_of(x): x for x in _declared(acceptance.AcceptorFacts)}
  return {name: _made(x, 'acceptance') for name, x in (acceptance.known() | own).items()}


def _made(thing, module):
  return thing if inspect.isfunction(thing) else _with_numbers(docstrings.of_class(thing, module))


@functools.cache
def policies() -> Mapping[str, Any]:
  """Return policies, with numbers by which drafts of the toy models differ."""
  known = stopping.known() | {x.__name__: x for x in _own(stopping.Policy)}
  return {name: _with_numbers(docstrings.of_class(x, 'stopping')) for name, x in known.items()}


@functools.cache
def signals() -> Mapping[str, Any]:
  return predictors.known() | {x.__name__: x for x in _declared(predictors.SignalFacts)}


@functools.cache
def fits() -> Mapping[str, Any]:
  """Return fits: none, which takes the signal's own, and those of the package."""
  classes = [x for x in verification.known().values() if isinstance(x, type) and issubclass(x, predictors.Fit)]
  return {'its own': None} | {x.__name__: x() for x in (*classes, *_own(predictors.Fit))}


@functools.cache
def budgets() -> Mapping[str, Any]:
  """Return budgets; of one with a yes or no in it both, of one around another one around each."""
  known = [x for x in verification.known().values() if isinstance(x, type) and issubclass(x, verification.Budget)]
  plain, around = {}, []
  for thing in (*known, *_own(verification.Budget)):
    fields = {field.name: field for field in dataclasses.fields(thing)}
    if 'budget' in fields:
      around.append(thing)
      continue
    plain[thing.__name__] = _with_numbers(thing())
    if 'k' in fields:
      plain[f'{thing.__name__} of 2'] = plain[thing.__name__].replace(k=2)
    for name, field in fields.items():
      if isinstance(field.default, bool) and name == 'greedy':
        plain[f'{name} {thing.__name__}'] = _with_numbers(thing(**{name: not field.default}))
  return plain | {f'{x.__name__} {name}': x(budget=plain[name]) for x in around for name in ('TopK', 'Goodput')}


TOLD = dict(threshold=0.7, first=2, decay=0.5, k=1, window=1)


def _with_numbers(thing):
  """Return a policy or budget with numbers that tell of toy models."""
  for name, value in vars(thing).items():
    if callable(value):  # a rule
      thing = thing.replace(**{name: rules.bind(value)})
  whole = lambda x: isinstance(x, int)
  names = {field.name for field in dataclasses.fields(thing)} & TOLD.keys()
  return thing.replace(**{name: TOLD[name] for name in names if whole(getattr(thing, name)) == whole(TOLD[name])})


@functools.cache
def rounds() -> tuple[str, ...]:
  """Return the methods of the package, and lists of phases that are drawn."""
  return (*(x for x in methods.known() if x not in NOT_DRAWN), 'drawn', 'drawn', 'drawn with turns', 'by_batch')


# of two methods, see `_by_batch`; of a file; of whole texts
NOT_DRAWN = ('by_batch', 'planned', 'sequence_cascade')

SAMPLERS = {
  'T=1': ({}, {}),
  'T=0': (dict(temperature=0.0), dict(temperature=0.0)),
  'filters': (dict(temperature=1.2, top_p=0.8), dict(top_p=0.8)),
  'mixed': ({}, dict(temperature=0.0)),
  'penalties': (dict(repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3), {}),
  'min-p': (dict(min_p=0.4), dict(temperature=1.3)),
}


def shifted(logits, tokens, count):
  """Make a token less likely that depends on the place in the text and on the last token."""
  there = jnp.arange(logits.shape[0]) == (tokens[count - 1] + count) % logits.shape[0]
  return logits - 0.7 * there.astype(logits.dtype)


def leads_nowhere(logits, tokens, count):
  """Let nothing follow some tokens."""
  return jnp.where((tokens[count - 1] == 1) & (count % 2 == 0), -jnp.inf, logits)


REQUESTS = {
  'plain': ({}, {}, None),
  'stop token': (dict(stop_tokens=[1]), dict(stop_tokens=[1]), None),
  'least length': (dict(stop_tokens=[0], min_new_tokens=2), {}, None),
  'a short row': ({}, dict(max_new_tokens=2), None),
  'few tokens': (dict(max_new_tokens=3), dict(max_new_tokens=4), None),
  'bias': (dict(logit_bias={0: 0.6}), {}, None),
  'processor': ({}, {}, shifted),
  'dead ends': ({}, {}, leads_nowhere),
}

MIDDLES = {  # what stands between a model's score and the next phase of a drawn list, of a slot and a test
  'nothing': lambda score, test: (score,),
  'a cut': lambda score, test: (score, Truncate(score.model)),
  'a wait': lambda score, test: (score, Wait(score.model)),
  'all twice': lambda score, test: (score, Score(score.model)),
  'the bonus, then all': lambda score, test: (Score(score.model, First(0)), score),
  'a token, then all': lambda score, test: (Score(score.model, First(1)), Score(score.model)),
  'a test': lambda score, test: (score, test),
  'a test, then all': lambda score, test: (score, test, Score(score.model)),
}

LEAVES = {'none': (), 'two at first': (2,), 'two': (2, 2, 2), 'divided': 3, 'three later': (1, 3, 2)}

AXES = {
  'γ': lambda: ('1', '2', '2', '3'),
  'round': rounds,
  'drafter': lambda: tuple(drafters()),
  'target': lambda: tuple(targets()),
  'accept': lambda: tuple(acceptors()),
  'policy': lambda: tuple(policies()),
  'predictor': lambda: tuple(signals()),
  'fit': lambda: tuple(fits()),
  'budget': lambda: tuple(budgets()),
  'ending': lambda: ('test', 'bonus'),
  'leaves': lambda: tuple(LEAVES),
  'middle': lambda: tuple(MIDDLES),
  'kept': lambda: ('no', 'yes'),
  'sampler': lambda: tuple(SAMPLERS),
  'request': lambda: tuple(REQUESTS),
  'text': lambda: ('decoder', 'encoder–decoder'),
  'seeds': lambda: ('own', 'equal'),
  'rows': lambda: ('2', '3'),
}
USUAL = dict(
  accept='token_wise',
  policy='Policy',
  leaves='none',
  middle='nothing',
  sampler='T=1',
  request='plain',
  text='decoder',
  seeds='own',
  rows='2',
)


# ---- to draw ----


class Unfit(Exception):
  """What was drawn does not go together."""


class Hand:
  """What is drawn of each axis, as far as it is asked for."""

  def __init__(self, seed: Any, fixed: Mapping[str, str]):
    self.rng = random.Random(str(seed))
    self.fixed = dict(fixed)
    self.taken: dict[str, str] = {}

  def __call__(self, axis: str) -> str:
    if axis not in self.taken:
      usual = axis in USUAL and self.rng.random() < 0.55
      drawn = USUAL[axis] if usual else self.rng.choice(AXES[axis]())
      self.taken[axis] = self.fixed.get(axis, drawn)
    return self.taken[axis]

  def some(self, *values):
    return self.rng.choice(values)


def draw(seed: Any, fixed: Mapping[str, str] = {}) -> Case | None:
  """Return a composition; None where its parts are refused when it is made, or some of `fixed` are not parts of it."""
  listed = {'middle', 'kept'} & fixed.keys()  # which only a drawn list has
  hand = Hand(seed, {'round': 'drawn'} | fixed if listed else fixed)
  try:
    case = _case(hand)
  except (ValueError, TypeError, Unfit):
    return None
  return case if fixed.items() <= hand.taken.items() else None


def _case(hand: Hand) -> Case:
  kind = hand('drafter')
  vocab = 3 if kind in ('translated', 'frequent') and hand.some(True, True, False) else 2
  here = world(vocab, hand('text') == 'encoder–decoder', hand.some(*range(6)))
  made = drafters()[kind](here)
  drafter, large = made if isinstance(made, tuple) else (made, here.large)
  here = here._replace(large=large)
  method = _method(hand, here, int(hand('γ')) if vocab == 2 else min(int(hand('γ')), 2))
  models = _models(method, hand, here, drafter)
  if drafter not in models:
    hand.taken.pop('drafter')
    if 'drafter' in hand.fixed:
      raise Unfit('no drafter')
  first, second, processor = REQUESTS[hand('request')]
  prompts = hand.some(([1, 0], [1]), ([0], [0]), ([1], [0]))
  warm, cold = SAMPLERS[hand('sampler')]
  others = [Request(prompts[1], **dict(max_new_tokens=MOST) | second | cold)] * (int(hand('rows')) - 1)
  requests = (Request(prompts[0], **dict(max_new_tokens=MOST) | first | warm), *others)
  equal = hand('seeds') == 'equal'
  return Case(method, tuple(models), requests, processor=processor, equal=equal, chosen=tuple(hand.taken.items()))


def _models(method, hand: Hand, here, drafter: Model) -> list[Model]:
  """Return the models of a method, the drafter in the slot that drafts first."""
  count = method.models
  drawing = [p.model for p in method.all_phases if isinstance(p, Propose)]
  if not drawing and hand.some(True, False):
    drawing = [0]
  models = {1: [here.large], 2: [here.small, here.large], 3: [here.small, here.middle, here.large]}[count]
  last = method.slots[-1]
  models = models[-1:] if count == 1 else [*models[:last], here.large, *models[last:-1]]
  for slot in drawing[:1]:
    if method.slots[slot] != last:
      models[method.slots[slot]] = drafter
  return models


def _method(hand: Hand, here, gamma: int):
  name = hand('round')
  if name.startswith('drawn'):
    return _phases(hand, gamma, name)
  if name == 'by_batch':
    return _by_batch(hand, gamma)
  return _by_name(hand, methods.known()[name], gamma)


ALWAYS = ('rule', 'combiner', 'block', 'blocks', 'max_draft', 'plan', 'predictor', 'budget', 'ending', 'fallback')


def _by_name(hand: Hand, make, gamma: int):
  """Return a method of the package, its arguments drawn by their names."""
  pieces = {
    'rule': lambda: targets()[hand('target')],
    'combiner': lambda: targets()[hand('target')],
    'block': lambda: gamma,
    'blocks': lambda: (gamma, 1),
    'max_draft': lambda: gamma,
    'models': lambda: 2,
    'model': lambda: None,
    'policy': lambda: policies()[hand('policy')],
    'accept': lambda: acceptors()[hand('accept')],
    'drafter': lambda: 2,
    'fallback': lambda: 0.6,
    'rollback': lambda: 0.8,
    'predictor': lambda: signals()[hand('predictor')],
    'fit': lambda: fits()[hand('fit')],
    'budget': lambda: budgets()[hand('budget')],
    'plan': lambda: _profile(hand),
    'ending': lambda: hand('ending'),
    'leaves': lambda: leaves_for(hand, gamma),
    'goodput': lambda: hand.some(*verification.COUNTS),
    'greedy': lambda: hand.some(True, False),
  }
  given = {}
  for name, parameter in inspect.signature(make).parameters.items():
    asked = {'policy', 'accept', 'predictor', 'fit', 'budget', 'ending', 'leaves'} & {name}
    if parameter.default is parameter.empty or name in ALWAYS or asked or hand.some(True, False, False):
      if name in pieces:
        given[name] = pieces[name]()
      elif parameter.default is parameter.empty:
        raise Unfit(name)
  made = make(**given)
  takes = 'accept' in inspect.signature(make).parameters
  own = [p for p in made.all_phases if isinstance(p, Verify) and rules.inside(p.accept) is acceptance.token_wise]
  if not takes and own and (hand.some(*[False] * 4, True) or 'accept' in hand.fixed):
    made = made.accepting(acceptors()[hand('accept')])
  return made


def leaves_for(hand: Hand, drafted: int):
  """Return leaves for so many drafted tokens at least."""
  leaves = LEAVES[hand('leaves')]
  return leaves if isinstance(leaves, int) else leaves[:drafted]


def _by_batch(hand: Hand, gamma: int):
  """Return a method for one row, and another for more."""
  names = [name for name in methods.known() if name not in NOT_DRAWN]
  one, more = (_by_name(hand, methods.known()[hand.some(*names)], n) for n in hand.some((gamma, 1), (1, gamma)))
  if one.slots != more.slots:
    raise Unfit('other models')
  return methods.by_batch({1: one, 2: more})


def _profile(hand: Hand) -> Profile:
  """Return times of 2 rows and 0, 1, … tokens by which some tokens are worth it and others not."""
  rng = np.random.default_rng(hand.rng.randrange(1000))
  steps = 1 + (gain := rng.uniform(0.55, 0.98, 10)) / (2 + gain * np.arange(10))  # about what a token is worth
  if hand.some(True, False):  # the fifth token of two rows is worth it if it is very likely, the sixth never
    steps[:] = [1.1] * 3 + [1.15] * 2 + [1.3] * 5
  elif rng.random() < 0.5:  # tokens are worth it two at a time, so that the first depends on the second
    steps[::2], steps[1::2] = rng.uniform(1.2, 1.6), 1.001
  table = predictors.AcceptanceTable(
    np.float32([0.8]), np.float32([[0.9], [0.95]]), np.float32([[0.2, 0.6], [0.4, 0.95]])
  )
  return Profile(table, np.float32([1, 1, *np.cumprod([1, *steps])]))


def _scheduled(hand: Hand, gamma: int, slot: int, ending: str):
  """Return a limit that a schedule makes of what is drawn."""
  made = methods.scheduled(
    signals()[hand('predictor')],
    gamma,
    budget=budgets()[hand('budget')],
    plan=_profile(hand),
    fit=fits()[hand('fit')],
    ending=ending,
  )
  if len(made.slots) != 2 or slot == 0:
    raise Unfit('a companion')
  limit = next(p.limit for p in made.phases if isinstance(p, Score) and p.limit is not None)
  return limit, made.policy


def _phases(hand: Hand, gamma: int, name: str) -> Method:
  """Return a list of phases in an order of its own."""
  three = hand.some(True, False, False)
  slots = (0, 1, 2) if three else (0, 1)
  last = len(slots) - 1
  target = hand.some('own', 'own', 'all', 'others' if three else 'all')
  tested = {'own': (last,), 'all': slots, 'others': slots[1:]}[target]
  combiner = rules.bind(rules.own) if len(tested) == 1 else _combiner(targets()[hand('target')], len(tested))
  accept = acceptance.bind(acceptors()[hand('accept')])
  verify = lambda keep: Verify(combiner, tested, accept, keep)
  policy = policies()[hand('policy')]
  if 'turns' in name:
    return _turns(hand, gamma, slots, verify, policy)
  leaves = methods.speculative(block=gamma, leaves=leaves_for(hand, gamma)).phases[0].leaves
  phases: list[Any] = [Propose(0, gamma, leaves=leaves)]
  scored = sorted({*tested, last} - ({0} if hand.some(True, True, False) else set()))
  among = hand.some(*scored)
  for slot in scored:
    limit = Every()
    if slot == last and hand.some(True, False, False):
      ending = hand('ending')
      limit, own = _scheduled(hand, gamma - (ending == 'test') or 1, slot, ending)
      policy = own if hand('policy') == 'Policy' else policy
    elif hand.some(True, False, False):
      limit = First(hand.some(*range(gamma + 1)))
    middle = MIDDLES[hand('middle') if slot == among else 'nothing']
    phases += middle(Score(slot, limit), verify(True))
  if hand.some(True, False, False):
    hand.rng.shuffle(phases)
  if hand.some(*[False] * 4, True):
    phases.remove(hand.some(*phases))
  if len(phases) > 4:
    raise Unfit('too many phases')
  return Method((*phases, verify(hand('kept') == 'yes')), slots, policy)


def _combiner(function, models: int):
  """Return a rule or combiner for so many models."""
  if 'weights' in getattr(function, 'keywords', {}):
    function = functools.partial(function, weights=(0.4, 0.6) if models == 2 else (0.5, 0.2, 0.3))
  bound = rules.bind_combiner(function)
  if rules.models_of(bound) not in (None, models):
    raise Unfit('another number of models')
  return bound


def _turns(hand: Hand, gamma, slots, verify, policy):
  branches = []
  for slot in slots:
    branch = [Score(slot), verify(True), Propose(slot, hand.some(1, gamma))]
    if hand.some(*[False] * 4, True):
      hand.rng.shuffle(branch)
    branches.append(tuple(branch))
  return Method((Alternate(tuple(branches)),), slots, policy)


def draw_text(seed: Any) -> tuple[Case, int] | None:
  """Return a composition whose texts are compared under the coupling, with more requests, and the size of its batch."""
  case = draw(('text', seed), {'accept': 'token_wise'}) or draw(('text', seed))
  if case is None or ('accept', 'token_wise') not in case.chosen and 'accept' in dict(case.chosen):
    return None
  rng = random.Random(f'text {seed}')
  vocab = case.models[-1].network.vocab_size

  def request():
    how: dict[str, Any] = dict(temperature=rng.choice([0.0, 0.7, 1.0]), max_new_tokens=rng.randrange(4, 14))
    more = dict(top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={0: 1.0}, stop_tokens=[1], n=2)
    more |= dict(stop=rng.choice(['ab', 'bb', ['aab', 'ba']]), min_new_tokens=3)
    how |= {name: more[name] for name in rng.sample(sorted(more), 2)}
    return Request([rng.randrange(vocab) for _ in range(rng.randrange(1, 5))], **how)

  asked = tuple(request() for _ in range(5))
  models = tuple(m.replace(tokenizer=Letters()) if m.network.vocab_size == vocab else m for m in case.models)
  coupled = Sampler(coupling='gumbel')
  return dataclasses.replace(case, models=models, requests=asked, sampler=coupled), rng.choice([1, 2, 3])


class Letters:
  """A tokenizer of letters."""

  vocab_size = 3

  def encode(self, text):
    return ['abc'.index(x) for x in text]

  def decode(self, ids):
    return ''.join('abc'[i] for i in ids)


# ---- to cover ----

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs() -> list[Pair]:
  """Return all pairs of values of two axes."""
  values = [(axis, value) for axis, some in AXES.items() for value in dict.fromkeys(some())]
  return [(a, b) for a, b in itertools.combinations(values, 2) if a[0] != b[0]]


def covered(case: Case) -> list[Pair]:
  """Return the pairs of values that a composition has."""
  return list(itertools.combinations(sorted(case.chosen, key=lambda x: list(AXES).index(x[0])), 2))


def covering(seed: Any = 0, tries: int = 12) -> Iterator[Case]:
  """Yield compositions that together have every pair of values that go together."""
  left = dict.fromkeys(pairs())
  while left:
    pair = next(iter(left))
    left.pop(pair)
    drawn = [case for i in range(tries) if (case := draw((seed, pair, i), dict(pair))) is not None]
    if drawn:
      case = max(drawn, key=lambda case: sum(other in left for other in covered(case)))
      for other in covered(case):
        left.pop(other, None)
      yield case


def by_chance(seed: Any) -> Iterator[Case]:
  """Yield compositions without end."""
  return filter(None, (draw((seed, i)) for i in itertools.count()))
