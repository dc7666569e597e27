"""How tests compile: as quickly as XLA can, and, where a test reads a program, as users do."""

from importlib import metadata
import os

# XLA since jaxlib 0.11 has one kind of fusions, and ends the process at a flag that it does not know.
_EMITTERS = tuple(map(int, metadata.version('jaxlib').split('.')[:2])) < (0, 11)
# Tests compile much and compute little; a program in one piece has fewer memory mappings.
QUICK = {'xla_backend_optimization_level': 0, 'xla_cpu_parallel_codegen_split_count': 1}
QUICK |= {'xla_cpu_use_fusion_emitters': 'false'} if _EMITTERS else {}
AS_USERS = {'xla_backend_optimization_level': 3}
AS_USERS |= {'xla_cpu_use_fusion_emitters': True} if _EMITTERS else {}


def flags(options: dict) -> str:
  """Return options as the environment variable XLA_FLAGS has them."""
  return ' '.join(f'--{name}={value}' for name, value in options.items())


def quickly():
  """Compile quickly from now on; call it before the first use of JAX."""
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flags(QUICK)}'
