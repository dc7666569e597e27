"""Hugging Face folders of models and heads, read and written without torch or transformers."""

from speccascade.checkpoints.hf import families as families  # declares those of the package
from speccascade.checkpoints.hf.family import FAMILIES, network_from_config
from speccascade.checkpoints.hf.reader import generation_config, network_of, read, read_mtp
from speccascade.checkpoints.hf.writer import check, export, settled, write, write_config
