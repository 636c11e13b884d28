"""Runs made of numbers, for rules to be shown: the answer is known, as the fault is put in by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose import RULES, Diagnosis, RunInfo
from gradvitals.types import Finding, Layout, Reading, Stage, TensorInfo

Floats = NDArray[np.float64]

SHAPES = ((64, 32), (32,), (32, 32), (32,), (32, 32), (32,), (10, 32), (10,))
"""Four layers, each a weight and a bias."""


def layout_of(dtype: str = "float32") -> Layout:
    layers = tuple(f"layers.{depth}" for depth in range(len(SHAPES) // 2))
    kinds = ("weight", "bias") * len(layers)
    tensors = tuple(
        TensorInfo(
            index=i, name=f"layers.{i // 2}.{kind}", shape=shape, dtype=dtype, layer=layers[i // 2], depth=i // 2
        )
        for i, (shape, kind) in enumerate(zip(SHAPES, kinds, strict=True))
    )
    return Layout(tensors=tensors, layers=layers)


def smooth_noise(rng: np.random.Generator, shape: tuple[int, ...], correlation: float) -> Floats:
    """Normal noise of spread 1 along the first axis, each value like the one before it."""
    noise = rng.standard_normal(shape)
    for t in range(1, shape[0]):
        noise[t] = correlation * noise[t - 1] + np.sqrt(1 - correlation**2) * noise[t]
    return noise


@dataclass
class Run:
    """What a monitor would read of a run. Tests change it, then have it diagnosed."""

    values: dict[str, Floats]
    tensors: dict[str, Floats]
    """One row a step."""
    info: RunInfo = field(default_factory=RunInfo)
    layout: Layout = field(default_factory=layout_of)
    stage: Stage = "raw"
    every: int = 10
    """Steps from one reading of the weights to the next."""

    RARE = ("weight/norm", "update/norm", "update/ratio", "grad/zero_fraction")

    def __len__(self) -> int:
        return len(self.values["lr"])

    def scale_gradient(self, steps: Any, factor: Any, tensor: int | None = None) -> None:
        """Make gradients larger or smaller at some steps."""
        if tensor is None:
            self.tensors["grad/norm"][steps] *= np.asarray(factor)[..., None]
        else:
            self.tensors["grad/norm"][steps, tensor] *= factor
        self.add_up()

    def add_up(self) -> None:
        """Have the whole follow from its parts."""
        norms = self.tensors["grad/norm"]
        self.values["grad/norm"] = np.sqrt(np.nansum(norms**2, axis=1))
        self.tensors["grad/nonfinite"] = np.where(np.isnan(norms), np.nan, 0.0)
        self.values["grad/nonfinite"] = np.zeros(len(norms))

    def readings(self, first: int = 0, last: int | None = None) -> list[list[Reading]]:
        """The steps of the run, or some of them."""
        found = []
        for t in range(first, len(self) if last is None else last):
            full = t % self.every == 0 or t in (1, 2, 4, 8)
            values = {k: float(v[t]) for k, v in self.values.items() if full or k not in self.RARE}
            tensors = {k: v[t] for k, v in self.tensors.items() if full or k not in self.RARE}
            found.append([Reading(step=t, time=0.0, stage=self.stage, batch_size=64, values=values, tensors=tensors)])
        return found

    def diagnosis(self, *ids: str, settings: Mapping[str, Any] | None = None) -> Diagnosis:
        """A diagnosis with some rules, or with all of them."""
        others = {name: False for name in RULES if ids and name not in ids}
        diagnosis = Diagnosis(info=self.info, settings={**others, **(settings or {})})
        diagnosis.describe(self.layout)
        return diagnosis

    def findings(self, *ids: str, settings: Mapping[str, Any] | None = None) -> list[Finding]:
        """What some rules, or all of them, find; the same where it is saved halfway as JSON and goes on from that."""
        straight, first, second = (self.diagnosis(*ids, settings=settings) for _ in range(3))
        middle = len(self) // 2
        for number, step in enumerate(self.readings()):
            straight.read(step)
            if number < middle:
                first.read(step)
                continue
            if number == middle:
                second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            second.read(step)
        assert [str(f.to_json()) for f in second.findings] == [str(f.to_json()) for f in straight.findings]
        assert [f for f in straight.findings if "?" in " ".join((f.title, *f.causes[:1], *f.fixes[:1]))] == []
        return straight.findings


def healthy_run(
    steps: int = 400,
    seed: int = 0,
    *,
    spread: float = 0.25,
    loss_spread: float = 0.05,
    warmup: int = 20,
    floor: float = 0.25,
    correlation: float = 0.3,
) -> Run:
    """A run that learns: norms and losses with noise and drift, a warmup and a cosine decay.

    Args:
        steps: How long.
        seed: Of the noise.
        spread: Of the norms, in units of log.
        loss_spread: Of the loss, likewise.
        warmup: Steps.
        floor: The loss at the end as a share of that at the start.
        correlation: Of the noise of one step and the next.
    """
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    lr = 1e-3 * np.minimum(1, (t + 1) / warmup) * (0.1 + 0.45 * (1 + np.cos(np.pi * t / steps)))
    count = len(SHAPES)
    sizes = np.array([np.prod(shape) for shape in SHAPES], dtype=float)
    level = np.exp(-2 * np.minimum(t / 50, 1) + 0.3 * np.sin(t / 400))  # falls fast at first, then wanders
    common = smooth_noise(rng, (steps, 1), correlation)
    own = smooth_noise(rng, (steps, count), correlation)
    norms = level[:, None] * np.sqrt(sizes / sizes.sum()) * np.exp(spread * (0.8 * common + 0.6 * own))
    loss = 2.3 * (floor + (1 - floor) * np.exp(-t / 60)) * np.exp(loss_spread * smooth_noise(rng, (steps,), 0.1))
    moves = lr[:, None] * np.exp(0.05 * smooth_noise(rng, (steps, count), 0.9))
    weights = np.sqrt(sizes) * 0.1 * np.ones((steps, 1))
    run = Run(
        values={
            "loss": loss,
            "lr": lr,
            "update/rms": np.sqrt((moves**2 * sizes).sum(1) / sizes.sum()),
            "update/cosine": 0.9 + 0.02 * rng.standard_normal(steps),
        },
        tensors={
            "grad/norm": norms,
            "update/rms": moves,
            "weight/norm": weights,
            "update/norm": moves * np.sqrt(sizes),
            "update/ratio": moves * np.sqrt(sizes) / weights,
        },
        info=RunInfo(optimizer="AdamW", betas=(0.9, 0.999), weight_decay=0.01),
    )
    run.add_up()
    for name in ("weight/norm", "update/norm"):
        run.values[name] = np.sqrt((run.tensors[name] ** 2).sum(1))
    run.values["update/ratio"] = run.values["update/norm"] / run.values["weight/norm"]
    return run


def only(findings: list[Finding]) -> Finding:
    """The one finding there is."""
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]
