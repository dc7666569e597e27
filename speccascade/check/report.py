"""What a check found."""

import dataclasses
from typing import NamedTuple


class Finding(NamedTuple):
  """The answer to one question; `ok` is None where either answer will do."""

  question: str
  ok: bool | None
  message: str


@dataclasses.dataclass(frozen=True)
class Report:
  """The findings of a check; `str` prints them."""

  name: str
  findings: tuple[Finding, ...]

  @property
  def ok(self) -> bool:
    """Whether nothing is wrong."""
    return all(f.ok is not False for f in self.findings)

  def __str__(self):
    marks = {True: 'yes', False: 'NO', None: '–'}
    wide = max(len(f.question) for f in self.findings)
    lines = [f'  {f.question:<{wide}}  {marks[f.ok]:<3}  {f.message}'.rstrip() for f in self.findings]
    return '\n'.join([f'{self.name}: {"all is well" if self.ok else "something is wrong"}', *lines])
