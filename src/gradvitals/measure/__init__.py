"""Readings from a live run: when gradients are read, what is read, and how the host makes sense of it."""

from gradvitals.measure.interpret import Interpreter
from gradvitals.measure.rawstep import RawStep
from gradvitals.measure.tap import Tap

__all__ = ["Interpreter", "RawStep", "Tap"]
