"""What rounds take on chips that are not here: each method's program is compiled for them, and a round simulated."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax

from speccascade import sampling
from speccascade.engine.method import Method
from speccascade.host.errors import out_of_memory
from speccascade.planning import aot, program_report
from speccascade.sv import plans
from speccascade.types import Model


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What was found of a program: seconds of a round, those of its collectives in it, and bytes of memory on a chip.

  Of a program that does not fit, nothing is known.
  """

  seconds: float = math.nan
  collectives: float = math.nan
  used: int = 0

  @property
  def fits(self) -> bool:
    """Whether the program fits into a chip's memory."""
    return self.used > 0


class Elsewhere:
  """Chips of a topology that need not be here, as a mesh.

  Args:
    topology: Chips and their layout, as 'v6e:2x4'.
    mesh: {axis: chips}; one chip where there is none.

  Raises:
    ValueError: If there are no such chips, or their rounds cannot be simulated.
  """

  def __init__(self, topology: str, mesh: Mapping[str, int] | None = None):
    self.topology = topology
    self.mesh = dict(mesh or {})
    self.devices = [*aot.Placement(aot.describe(topology).devices, self.mesh).mesh.devices.flat]
    self.chip = aot.chip_of(topology)
    if self.chip.links is None:
      raise ValueError(f'topology={topology!r}: rounds are simulated for TPUs alone; plan on the GPU itself.')

  def __str__(self):
    return ' '.join([self.topology, *(f'{axis}={n}' for axis, n in self.mesh.items())])

  @property
  def data(self) -> int:
    """Over how many chips the rows of a batch are sharded."""
    return self.mesh.get('data', 1)

  def device(self, models: Sequence[Model]) -> str:
    """Return what a plan calls these chips, with the dtype of the last of the models."""
    return plans.device_of(models, self.devices)

  def compiled(self, method: Method, models: Sequence[Model], sizes: aot.Sizes, sampler: sampling.Sampler) -> Compiled:
    """Compile a method's loop, with the parameters of models as shapes, and simulate a round of it."""
    shapes: dict[int, Any] = {}  # an array of two models is one

    def shape(x):
      return shapes.setdefault(id(x), jax.ShapeDtypeStruct(x.shape, x.dtype))

    models = [model.replace(params=jax.tree.map(shape, model.params)) for model in models]
    try:
      found = program_report.of_topology(self.topology, method, models, sizes, sampler, self.mesh)
    except jax.errors.JaxRuntimeError as error:
      if not out_of_memory(error):
        raise
      return Compiled()
    clock = self.chip.clock
    return Compiled(found['simulated_cycles'] / clock, found['collective_cycles'] / clock, found['used_bytes'])
