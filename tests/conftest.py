"""Strict settings for every test, and a persistent compilation cache so that a second run is short."""

import gc
import os
import pathlib
import signal
import sys
import tempfile
import zlib

import compiling

# This must stand before the first use of JAX.
compiling.quickly()
os.environ |= {  # of the processes that tests start, too
  'JAX_COMPILATION_CACHE_DIR': os.path.join(tempfile.gettempdir(), 'speccascade-test-cache'),
  'JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES': 'none',  # as commands have it, or no program would be shared with them
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
}

import gin  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
import trained  # noqa: E402

gc.set_threshold(50_000, 20, 100)  # tracing makes many small objects that stay
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script, which commands would inherit
  signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


if found := trained.folder():  # of the processes that tests start, too
  os.environ['SPECCASCADE_FAMILIES'] = str(found)


@pytest.fixture(scope='session')
def families() -> pathlib.Path:
  """Return the folder of trained families, NAME/MEMBER, or skip where there is none."""
  if not found:
    pytest.skip('no trained families here; set SPECCASCADE_FAMILIES to the folder that holds them')
  return found


@pytest.fixture(scope='session')
def byt5(tmp_path_factory) -> str:
  """Return the folder of a tokenizer of bytes, which ends its texts and begins none."""
  folder = tmp_path_factory.mktemp('byt5')
  (folder / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer"}')
  return str(folder)


@pytest.hookimpl(tryfirst=True)  # before -m looks
def pytest_collection_modifyitems(config, items):
  """Leave a case of the long tier out of the full one, whatever its test is in; keep one shard of all where asked."""
  for item in items:
    if item.get_closest_marker('long'):
      item.own_markers[:] = [mark for mark in item.own_markers if mark.name != 'full']
  if shard := os.environ.get('SPECCASCADE_SHARD'):
    index, count = map(int, shard.split('/'))
    assert 0 <= index < count, f'SPECCASCADE_SHARD={shard} is no shard: 0/8 to 7/8 are those of eight'
    inside = lambda item: zlib.crc32(item.nodeid.encode()) % count == index
    config.hook.pytest_deselected(items=[item for item in items if not inside(item)])
    items[:] = filter(inside, items)


COMPILED = []  # since mappings were counted, which takes longer than many a test
jax.monitoring.register_event_duration_secs_listener(
  lambda event, *_, **__: COMPILED.append(event) if event.endswith('backend_compile_duration') else None
)


@pytest.fixture(autouse=True)
def few_executables():
  """Drop compiled programs before their memory mappings (over 100 for a decode loop) reach the kernel's limit."""
  yield
  if len(COMPILED) > 40:
    COMPILED.clear()
    maps = pathlib.Path('/proc/self/maps')
    if maps.exists() and maps.read_bytes().count(b'\n') > 25_000:
      jax.clear_caches()


@pytest.fixture(autouse=True)
def empty_config():
  """Leave no config to the next test."""
  yield
  with gin.unlock_config():
    gin.clear_config()


@pytest.fixture(autouse=True)
def no_command_imported():
  """Let `runpy` run the command of a package that has a function of its name."""
  sys.modules.pop('speccascade.check.__main__', None)
