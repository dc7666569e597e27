"""Experiments: curves of methods compared on a task, in quality, time and counts."""

from speccascade.evaluate.curves import Checkpoint, Curve, Point
from speccascade.evaluate.experiment import Experiment
