"""AdamW in one pass, optimizers that weigh the gradient by how much of it is signal (VRGD), and their baselines."""

from gradvitals.optim import schedules
from gradvitals.optim.adamw import AdamW
from gradvitals.optim.family import VRLAMB, VRLARS, VRSGD, VRAdam
from gradvitals.optim.lamb import LAMB
from gradvitals.optim.lars import LARS
from gradvitals.optim.options import VROptions
from gradvitals.optim.reduced import VarianceReduced
from gradvitals.optim.vradamw import VRAdamW
from gradvitals.optim.wrapper import VRGD

__all__ = [
    "LAMB",
    "LARS",
    "VRGD",
    "VRLAMB",
    "VRLARS",
    "VRSGD",
    "AdamW",
    "VRAdam",
    "VRAdamW",
    "VROptions",
    "VarianceReduced",
    "schedules",
]
