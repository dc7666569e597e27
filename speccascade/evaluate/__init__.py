"""Experiments: curves of methods compared on a task, in quality, time and counts."""

from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.evaluate.curves import Curve, Point
from speccascade.evaluate.experiment import Experiment
