"""Run experiments from gin files: decode with every method, measure quality and speed, write tables and a report.

  python -m speccascade.run
      compares methods on a small pair of models that comes with the package
  python -m speccascade.run --gin_file=gin_configs/runs/multi30k_table2.gin --run_dir=runs/table2
      runs an experiment; the same command goes on with a run that was killed
  python -m speccascade.run --gin_bindings='Experiment.latency_examples = 100'
      changes one value; --gin.NAME=VALUE is short for it

Exit codes: 0 done, 1 something to put right (one line says what), 130 interrupted.
"""

import hashlib
import os
from pathlib import Path
import shlex
import sys

from absl import app, flags

from speccascade.errors import RunError

DEFAULT = Path(__file__).parent / 'configs' / 'default.gin'
CACHE = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'speccascade' / 'jax'
FAILURES = (ValueError, OSError, RuntimeError, MemoryError)  # what a user can put right; all else is a mistake here

FLAGS = flags.FLAGS
flags.DEFINE_multi_string('gin_file', None, 'A gin file; may be repeated. Without one the embedded default runs.')
flags.DEFINE_multi_string('gin_bindings', [], "A binding, as in 'Experiment.seed = 1'; may be repeated.")
flags.DEFINE_list('gin_search_paths', ['.'], 'Folders, by commas, in which gin files and their includes are looked up.')
flags.DEFINE_list('only', [], 'Names of experiments, by commas, to measure now. Default: all that the config has.')
flags.DEFINE_string('run_dir', None, 'Where results go. Default: runs/NAME-DIGEST, one folder for each config.')
flags.DEFINE_string('compilation_cache', str(CACHE), "Folder that keeps compiled programs between runs; '' for none.")
flags.DEFINE_bool('debug', False, 'Show the traceback of an error.')


def main(argv: list[str]) -> int:
  """Parse, build, run, report."""
  try:
    if argv[1:]:
      raise ValueError(f'arguments without a flag: {" ".join(argv[1:])}; see --help.')
    return _run()
  except KeyboardInterrupt:
    print('interrupted; the same command goes on from here', file=sys.stderr)
    return 130
  except FAILURES as error:
    if FLAGS.debug:
      raise
    print(f'error: {_said(error)}', file=sys.stderr)
    return 1


def _said(error: Exception) -> str:
  """Return what went wrong: our own errors whole, of any other the first line."""
  text = str(error).strip()
  if isinstance(error, RunError) or '\n' not in text:
    return text or type(error).__name__
  return f'{text.splitlines()[0]} … (--debug shows all of it)'


def _run() -> int:
  import jax  # lazily: --help needs none of this

  if FLAGS.compilation_cache:
    jax.config.update('jax_compilation_cache_dir', FLAGS.compilation_cache)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  from speccascade.evaluate import config, formats, runner

  files = FLAGS.gin_file or [str(DEFAULT)]
  text = config.parse(files, FLAGS.gin_bindings, FLAGS.gin_search_paths)
  folder = Path(FLAGS.run_dir) if FLAGS.run_dir else _folder(files[-1], text)
  command = shlex.join(['python', '-m', 'speccascade.run', *sys.argv[1:]])
  folders = runner.run(config.build(), folder, config=text, command=command, only=FLAGS.only)
  print(formats.closing(folders, shown=not FLAGS.gin_file))
  return 0


def _folder(file: str, text: str) -> Path:
  """Return a run directory that is the same for the same config."""
  return Path('runs') / f'{Path(file).stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


def _flags(argv: list[str]) -> list[str]:
  """Parse the command line, --gin.NAME=VALUE being a binding."""
  return app.parse_flags_with_usage(
    [f'--gin_bindings={a.removeprefix("--gin.")}' if a.startswith('--gin.') else a for a in argv]
  )


if __name__ == '__main__':
  app.run(main, flags_parser=_flags)
