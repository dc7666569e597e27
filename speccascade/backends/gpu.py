"""GPUs: few kernels, and few predicates, for the host has to read each."""

import dataclasses

from speccascade.backends.base import Backend
from speccascade.backends.registry import backend


@backend('gpu', 'cuda', 'rocm')
@dataclasses.dataclass(frozen=True)
class GPU(Backend):
  """Plain XLA, whose scatters and selects are single kernels on a GPU."""

  graphs: bool = True  # whether a decode is one CUDA graph, its loops included; else the host starts parts of a round

  short_products = True
  slot_multiple = 16
  pack_from = 256  # in bfloat16 an H100 computes with some 300 tokens in the time that it takes to read the weights

  @property
  def xla(self) -> tuple[tuple[str, str], ...]:
    # XLA's default is all but the last. A driver older than CUDA 12.3 has no loops in graphs, and XLA leaves them out.
    kinds = 'FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE'
    return (('xla_gpu_enable_command_buffer', kinds),) if self.graphs else ()
