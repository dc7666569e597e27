"""What networks around another one have in common."""

from speccascade.types import Cache, Network, Params


class Around(Network):
  """A network around another, `inner`, of which it has what depends on positions, heads and experts."""

  @property
  def inner(self) -> Network:
    raise NotImplementedError

  @property
  def max_positions(self) -> int | None:
    return self.inner.max_positions

  @property
  def context(self) -> int | None:
    return self.inner.context

  @property
  def head_counts(self) -> tuple[int, int]:
    return self.inner.head_counts

  @property
  def experts(self) -> tuple[int, int]:
    return self.inner.experts

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    return self.inner.reads(params, cache)


class SameTokens(Around):
  """A network around another one, with its tokens."""

  @property
  def vocab_size(self) -> int:
    return self.inner.vocab_size

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return self.inner.eos_ids

  @property
  def start_id(self) -> int | None:
    return self.inner.start_id
