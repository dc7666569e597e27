"""The engine: requests in, prefill, insert, the jitted loop around the phases of a method, rows out."""

from speccascade.engine.engine import Engine
from speccascade.engine.overlap import engine_for
