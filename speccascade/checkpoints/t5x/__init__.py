"""T5X checkpoints: read of any origin, written as T5X reads them, and T5X's parameters in memory as a model."""

from speccascade.checkpoints.t5x.params import model, with_params
from speccascade.checkpoints.t5x.reader import find, is_checkpoint, model_files, read
from speccascade.checkpoints.t5x.writer import write
