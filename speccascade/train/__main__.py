"""Train models: `python -m speccascade.train --gin_file=FILE --out=FOLDER`.

The same command goes on where it was stopped, with the same result as if it had not been.
"""

import functools
from pathlib import Path
import sys

from absl import app, flags

from speccascade.errors import RunError

_OUT = flags.DEFINE_string('out', None, 'The folder of the run; each job has one of its own in it.', required=True)
_FILES = flags.DEFINE_multi_string('gin_file', [], 'A gin file that binds train.jobs; may be given several times.')
_BINDINGS = flags.DEFINE_multi_string('gin_bindings', [], 'A binding that comes after the files.')
_PATHS = flags.DEFINE_multi_string('gin_search_paths', [], 'A folder to look for gin files in.')
_ONLY = flags.DEFINE_multi_string('job', [], 'The name of a job to run; without it all of them run.')


def main(argv: list[str]) -> int:
  """Run the jobs; return 0, or 1 after printing what was wrong."""
  from speccascade.train import jobs  # after the flags are read, so that --help is quick

  if argv[1:]:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  out = Path(_OUT.value).expanduser().absolute()
  try:
    found = jobs.read(_FILES.value, _BINDINGS.value, _PATHS.value)
    names = [job.name for job in found]
    for name in _ONLY.value:
      if name not in names:
        raise ValueError(f'--job={name}: the config has {", ".join(names)}')
    for job in found:
      if not _ONLY.value or job.name in _ONLY.value:
        job.run(out, functools.partial(print, f'[{job.name}]'))
        print(f'[{job.name}] done: {out / job.name / "model"}')
  except (RunError, ValueError, TypeError, OSError, FloatingPointError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  app.run(main)
