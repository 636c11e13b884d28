"""All ways in which several processes train one model, by name."""

from __future__ import annotations

from rank_data_parallel import ByHand, Compiled, Ddp, Fsdp, Hsdp, Way, Zero, ZeroByHand
from rank_model_parallel import (
    FsdpTp,
    FsdpTpSequence,
    Pipeline,
    PipelineByHand,
    PipelineFsdp,
    Tp,
    TpByHand,
    TpSequence,
)

WAYS: dict[str, type[Way]] = {
    "ddp": Ddp,
    "compiled": Compiled,
    "by_hand": ByHand,
    "zero": Zero,
    "zero_by_hand": ZeroByHand,
    "fsdp": Fsdp,
    "hsdp": Hsdp,
    "tp": Tp,
    "tp_sequence": TpSequence,
    "tp_by_hand": TpByHand,
    "fsdp_tp": FsdpTp,
    "fsdp_tp_sequence": FsdpTpSequence,
    "pipeline": Pipeline,
    "pipeline_by_hand": PipelineByHand,
    "pipeline_fsdp": PipelineFsdp,
}
