"""What the documents say of the families, made of their declarations."""

from speccascade.checkpoints.hf import FAMILIES

HEADER = '| model_type | options |\n| --- | --- |\n'


def table() -> str:
  """Return the table of the page on models; families of one description have one row."""
  rows = {}
  for family in FAMILIES.values():
    if family.tiny:
      rows.setdefault(family.about, []).append(family)
  return HEADER + ''.join(f'| {_names(families)} | {about} |\n' for about, families in rows.items())


def _names(families: list) -> str:
  names = ', '.join(f'`{name}`' for family in families for name in (family.model_type, family.inside) if name)
  models = ', '.join(family.models for family in families if family.models)
  return f'{names} ({models})' if models else names
