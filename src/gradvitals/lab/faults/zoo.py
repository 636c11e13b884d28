"""All faults by name."""

from __future__ import annotations

from gradvitals.lab.faults.data_faults import DATA_FAULTS
from gradvitals.lab.faults.fault import Fault
from gradvitals.lab.faults.model_faults import MODEL_FAULTS
from gradvitals.lab.faults.optimizer_faults import OPTIMIZER_FAULTS

FAULTS: dict[str, Fault] = {fault.id: fault for fault in (*DATA_FAULTS, *OPTIMIZER_FAULTS, *MODEL_FAULTS)}
