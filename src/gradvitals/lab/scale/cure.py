"""The same language model with and without learnable multipliers, at several weight decays and from several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from gradvitals.lab.scale.stack import Shape, StackedLM
from gradvitals.lab.scale.training import Schedule, Texts, evaluate, train_stack
from gradvitals.multipliers import WEIGHT_DECAY, Kind

ARMS: dict[str, Kind | None] = {"none": None, "scalar": "scalar", "row": "row", "both": "both"}
EVAL_WINDOWS = 2048


@dataclass(frozen=True, kw_only=True)
class CureRow:
    """One training."""

    arm: str
    lr: float
    decay: float
    seed: int
    loss: float
    """On text that was not learnt, in nats a byte."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def try_cure(
    arm: str,
    shape: Shape,
    schedule: Schedule,
    decays: Sequence[float],
    seeds: Sequence[int],
    texts: Texts,
    *,
    steps: int,
    batch: int,
    windows: int = EVAL_WINDOWS,
    graphs: bool = True,
) -> list[CureRow]:
    """Train one arm: all weight decays and seeds as one stack. Seeds are those of the weights; batches are the same.

    Args:
        arm: One of `ARMS`.
        shape: Of the model.
        schedule: Learning rate; its weight decay is not used.
        decays: Weight decays.
        seeds: Of the weights.
        texts: What it learns, and what it is judged by.
        steps: How long.
        batch: Windows of a step.
        windows: Windows of the text that it is judged by.
        graphs: On a GPU, replay the passes of a step as one CUDA graph.
    """
    cells = [(decay, seed) for decay in decays for seed in seeds]
    device = texts.train.bytes.device
    model = StackedLM(shape, [seed for _, seed in cells], kind=ARMS[arm]).to(device)
    train_stack(
        model,
        texts.train,
        schedule,
        steps=steps,
        batch=batch,
        seed=12345,
        decays=torch.tensor([decay for decay, _ in cells]),
        multiplier_decay=WEIGHT_DECAY,
        graphs=graphs,
    )
    losses = evaluate(model, texts.unseen, windows).tolist()
    return [
        CureRow(arm=arm, lr=schedule.lr, decay=decay, seed=seed, loss=loss)
        for (decay, seed), loss in zip(cells, losses, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What multipliers did, against the same seeds without."""

    arm: str
    lr: float
    decay: float
    loss: float
    gain: float
    """Mean fall of the loss; positive is better."""
    error: float
    """Standard error of it over seeds."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def gains(rows: Sequence[CureRow]) -> list[Gain]:
    """Each arm at each setting against ``none``, seed by seed."""
    plain = {(row.lr, row.decay, row.seed): row.loss for row in rows if row.arm == "none"}
    found = []
    for arm, lr, decay in dict.fromkeys((row.arm, row.lr, row.decay) for row in rows):
        mine = [row for row in rows if (row.arm, row.lr, row.decay) == (arm, lr, decay)]
        falls = [plain[key] - row.loss for row in mine if (key := (lr, decay, row.seed)) in plain]
        error = float(np.std(falls, ddof=1)) / math.sqrt(len(falls)) if len(falls) > 1 else math.nan
        found.append(
            Gain(
                arm=arm,
                lr=lr,
                decay=decay,
                loss=float(np.mean([row.loss for row in mine])),
                gain=float(np.mean(falls)) if falls else math.nan,
                error=error,
            )
        )
    return found
