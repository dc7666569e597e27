r"""Rules and combiners: the target distribution π of the output, from what the models predict at one position.

A *rule* reads the predictions of a drafter q and a verifier p, a *combiner* those of any number of models::

  rule(q, p, *, alpha)       # a decision bool [...], a set bool [..., V] or π [..., V]
  combiner(models, *, …)     # π [..., V]

:math:`q, p` (`plain`, `confidence`, `entropy`) are the models' distributions at temperature 1, without filters.
:math:`\tilde q, \tilde p` (`probs`) are those that the sampler makes: penalties, temperature, top-k, top-p, min-p;
one-hot at temperature 0. Confidence, entropy H and D read q and p; the mixture and the total variation TV read
:math:`\tilde q` and :math:`\tilde p` (Narasimhan et al. 2024, "Faster Cascades via Speculative Decoding", §4 and
Remark 3).

Bind the numbers of a rule with `functools.partial`. They are traced, so another α compiles nothing. A rule cascades
three or more models too: it compares model i with model i + 1, whose `probs` are the target of the models from i + 1
on.

Example:
  >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
  >>> print(np.asarray(rules.target(functools.partial(rules.diff, alpha=0.1), logits).probs).round(2))  # defers
  [0.1 0.1 0.8]
"""

from speccascade.rules.base import (
  combiner,
  CombinerFacts,
  declaration,
  defined,
  INF,
  inside,
  is_distribution,
  missing,
  name_of,
  NoTarget,
  numbers_of,
  Position,
  Prediction,
  Prefix,
  Range,
  ROUNDING,
  rule,
  Target,
  target,
)
from speccascade.rules.binding import bind, bind_combiner, bind_rule, models_of
from speccascade.rules.cascades import *
from speccascade.rules.combiners import *
from speccascade.rules.lossy_decoding import *
from speccascade.rules.names import find, known, spelled
