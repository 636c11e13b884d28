"""Optimizers and schedulers of many kinds, and the bad batches that they are to be kept from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from guarded_runs import Makes, Run, adamw, without
from torch.optim import lr_scheduler

import gradvitals as gv
import gradvitals.optim as gvo

QUICK = gv.guard.Skip(mode="on", first_steps=10)
ACT = {"mode": "act", "skip": QUICK}
ON_DEVICE = {**ACT, "decide": "device"}
STEPS = 34
BAD = {0: "nan", 3: "nan", 25: "huge", 26: "huge", 30: "nan"}
LATE = {25: "huge", 30: "huge"}

HOST: dict[str, Makes] = {
    "momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)],
    "adam": lambda net: [torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)],
    "adamw": adamw,
    "fused": lambda net: adamw(net, fused=True),
    "tensor_lr": lambda net: [torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01), foreach=False)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=0.01)],
    "vr_adamw": lambda net: [gvo.VRAdamW(net.parameters(), lr=0.01)],  # from micro-batches, see below
    "two": lambda net: [
        torch.optim.SGD(net.body.parameters(), lr=0.01, momentum=0.9),
        torch.optim.Adam(net.head.parameters(), lr=0.01),
    ],
}
DEVICE: dict[str, Makes] = {
    "amsgrad": lambda net: [torch.optim.Adam(net.parameters(), lr=0.01, fused=True, amsgrad=True)],
    "adamw": lambda net: adamw(net, fused=True),
    "momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=0.01, fused=True)],
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one_cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.02, total_steps=60),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 40),
    "multiplicative": lambda one: lr_scheduler.MultiplicativeLR(one, lambda count: 0.97),
    "step": lambda one: lr_scheduler.StepLR(one, 5, 0.5),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda count: 1 / (1 + count)),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=2),
    "sequential": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(one, 30)], [5]
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(one, 0.1, total_iters=5), lr_scheduler.ExponentialLR(one, 0.98)]
    ),
}


def never_had_them(bad: dict[int, str], **settings: Any) -> Run:
    return Run(**settings).train(without(range(STEPS), bad))
