"""Imported once, by the process that those of `warm_process` are forks of: what training under gradvitals needs."""

from __future__ import annotations

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor.parallel

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # for which torch imports a compiler

gc.freeze()  # a fork that collected what is here would copy it first
