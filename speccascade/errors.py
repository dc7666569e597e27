"""The error of the commands."""


class RunError(RuntimeError):
  """What a user has to put right, said in one line."""
