"""AdamW in one pass, optimizers that scale gradients by their signal-to-noise ratio (VRGD), and their baselines."""

from gradvitals.optim import schedules
from gradvitals.optim.adamw import AdamW
from gradvitals.optim.layerwise import LAMB, LARS
from gradvitals.optim.vrgd import VarianceReduced, VROptions
from gradvitals.optim.vrgd_optimizers import VRGD, VRLAMB, VRLARS, VRSGD, VRAdam, VRAdamW

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
