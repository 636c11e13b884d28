"""Made-up runs for advice, whose norms, noise scale, learning rate and loss are known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradvitals.advise import Advised, advise
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Action, Finding, Layout, Reading, Source, TensorInfo

LAYERS = ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
ADAM = {"optimizer": "AdamW", "betas": [0.9, 0.999], "eps": 1e-8}
Tensors = Callable[[int], Sequence[float]]


def layout(layers: Sequence[str] = LAYERS, frozen: bool = False) -> Layout:
    tensors = tuple(
        TensorInfo(
            index=i,
            name=f"{name}.weight",
            shape=(10, 10),
            dtype="float32",
            layer=name,
            depth=i,
            frozen=frozen and i == 0,
        )
        for i, name in enumerate(layers)
    )
    return Layout(tensors=tensors, layers=tuple(layers))


def write_run(
    path: Path,
    *,
    steps: int = 600,
    norm: Callable[[int], float] | None = lambda step: 1.0,
    loss: Callable[[int], float] | None = lambda step: 4.0 - 0.004 * step,
    lr: Callable[[int], float] | None = lambda step: 1e-3 * min(1.0, (step + 1) / 20),
    gsnr: Callable[[int], float] | None = None,
    gsnr_error: float = 0.05,
    source: Source = "microbatch",
    batch_size: Callable[[int], float | None] = lambda step: 64.0,
    micro_batches: int = 4,
    every: int = 10,
    norms: Tensors = lambda step: [0.5] * len(LAYERS),
    updates: Tensors = lambda step: [1e-3] * len(LAYERS),
    layer_gsnr: Tensors | None = None,
    update: Callable[[int], float] | None = None,
    ratio: Callable[[int], float] | None = None,
    max_norm: float | None = None,
    facts: dict[str, Any] | None = None,
    findings: Sequence[Finding] = (),
    actions: Sequence[Action] = (),
    first_step: int = 0,
    stage: Any = "raw",
    frozen: bool = False,
) -> Path:
    """Write a run. `gsnr` is that of one micro-batch, and its interval is `gsnr_error` to either side."""
    with RunWriter(path, meta={"facts": ADAM if facts is None else facts}) as writer:
        writer.write(layout(frozen=frozen))
        for step in range(first_step, first_step + steps):
            read = {"loss": loss, "lr": lr, "grad/norm": norm, "update/rms": update, "update/ratio": ratio}
            values = {name: make(step) for name, make in read.items() if make is not None}
            if max_norm is not None:
                values["clip/max_norm"] = max_norm
            tensors = {}
            full = step % every == 0 or step in (1, 2, 4, 8)
            if full:
                moved = np.array(updates(step))
                tensors = {"grad/norm": np.array(norms(step)), "update/norm": moved, "weight/norm": np.ones(len(moved))}
            size = batch_size(step)
            writer.write(
                Reading(step=step, time=float(step), stage=stage, batch_size=size, values=values, tensors=tensors)
            )
            if gsnr is not None and full:
                writer.write(_gsnr_reading(step, gsnr, gsnr_error, source, size, micro_batches, layer_gsnr))
        for record in (*findings, *actions):
            writer.write(record)
    return path


def _gsnr_reading(
    step: int,
    gsnr: Callable[[int], float],
    error: float,
    source: Source,
    size: float | None,
    micro_batches: int,
    of_layers: Tensors | None,
) -> Reading:
    def interval(value: Any) -> dict[str, Any]:
        return {"gsnr": value, "gsnr_low": value - error, "gsnr_high": value + error}

    layers = {} if of_layers is None else interval(np.array(of_layers(step)))
    own = size if size is None or source == "adam" else size / micro_batches
    values = interval(gsnr(step))
    if source == "microbatch" and own is not None:
        values["noise_scale"] = own / gsnr(step) if gsnr(step) > error else np.nan
    return Reading(step=step, time=float(step), source=source, batch_size=own, values=values, layers=layers)


def advised(path: Path, **made: Any) -> Advised:
    """The advice on such a run."""
    with open_run(write_run(path, **made)) as run:
        return advise(run)


def lognormal(level: float, spread: float, *, seed: int = 0, steps: int = 100_000) -> Callable[[int], float]:
    """Independent norms whose quantiles are known: level × exp(spread × z)."""
    drawn = level * np.exp(spread * np.random.default_rng(seed).normal(size=steps))
    return lambda step: float(drawn[step])
