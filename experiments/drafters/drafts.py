"""The drafts of a drafter from every token of texts, and what signals make of them."""

import dataclasses

from flax import struct
import jax.numpy as jnp
import numpy as np

from speccascade import rules
from speccascade.engine import engine, job, limits, lowering, method, phases
from speccascade.planning.profiling import Noted
from speccascade.sv import predictors, verification
from speccascade.types import iota

MOST = 8  # tokens of a draft: γ = 7, and one that is tested alone
SIGNALS = ('drawn_q', 'max_q', 'margin')


@struct.dataclass
class Note(lowering.Phase):
  """Note at the next position the draft from there: its size, its tokens, and each signal of them."""

  def records(self, rows, positions):
    """Return nothing noted."""
    names = ('size', *(f'{name}_{k}' for name in ('token', *SIGNALS) for k in range(MOST)))
    return {'notes': Noted({name: jnp.zeros((rows, positions)) for name in names})}

  def __call__(self, context, state):
    """Note what is pending."""
    draft = verification.drafted(state, MOST)
    seen = {'token': draft.tokens} | {name: getattr(predictors, name)(draft) for name in SIGNALS}
    new = {f'{name}_{k}': x[:, k] for name, x in seen.items() for k in range(MOST)} | {'size': state.window.size}
    here = (iota(state.tokens.shape[1]) == state.length[:, None]) & state.active[:, None]
    notes = {
      name: jnp.where(here, jnp.float32(new[name])[:, None], x) for name, x in state.records['notes'].values.items()
    }
    return state.replace(records=state.records | {'notes': Noted(notes)})


def observe(models, prompts, size: int, **call) -> dict[str, np.ndarray]:
  """Return the draft from each token [N] of the texts, and how many of its tokens are the text's: `leading`."""
  noting = (
    phases.Propose(0, MOST),
    Note(),
    phases.Score(1, limits.First(0)),
    phases.Verify(rules.bind(rules.own), (1,)),
  )
  made = job.DecodeJob.of(method.Method(noting, (0, 1)), models, prompts, **call)
  loop = engine.Engine(dataclasses.replace(made, size=size))
  parts = []
  for at in range(0, len(made.rows), size):
    rows = made.rows[at : at + size]
    prefix = loop.prefill([row.tokens for row in rows], size)
    _, ended = loop.collect(loop.run(loop.begin(prefix, loop.insert_batch(rows, None, list(range(len(rows)))))))
    for i, row in enumerate(rows):
      span = slice(row.tokens.size if models[1].network.start_id is None else 1, ended['length'][i])
      notes, said = {name: x[i, span] for name, x in ended['notes'].values.items()}, ended['tokens'][i, span]
      part = {name: np.stack([notes[f'{name}_{k}'] for k in range(MOST)], 1) for name in ('token', *SIGNALS)}
      ahead = np.lib.stride_tricks.sliding_window_view(np.pad(said, (0, MOST - 1), constant_values=-1), MOST)
      same = (part['token'] == ahead) & (np.arange(MOST) < notes['size'][:, None])
      parts.append(
        part | dict(leading=np.cumprod(same, 1).sum(1), size=notes['size'], said=said, text=0 * said + at + i)
      )
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
