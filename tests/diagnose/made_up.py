"""Made-up runs with known GSNR: what a monitor would read of them, step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose import Diagnosis, Rule, RunInfo
from gradvitals.functional import ratio_of_means
from gradvitals.types import Finding, Layout, Reading, Source, TensorInfo

Floats = NDArray[np.float64]
Run = list[list[Reading]]

WINDOW = 20
"""Readings that a live GSNR is averaged over."""


def make_layout(layers: Sequence[str] = (), heads: Sequence[str] = ()) -> Layout:
    names = layers or [f"blocks.{i}" for i in range(6)]
    tensors = tuple(
        TensorInfo(index=i, name=f"{name}.weight", shape=(8, 8), dtype="float32", layer=name, depth=i)
        for i, name in enumerate(names)
    )
    return Layout(tensors=tensors, layers=tuple(names), heads=tuple(heads))


class Live:
    """Signal and noise of one reading after another, averaged as a monitor averages them."""

    def __init__(self, rows: int) -> None:
        self.steps: list[int] = []
        self.pairs: list[tuple[Floats, Floats]] = []
        self.rows = rows

    def read(self, step: int, signal: Floats, noise: Floats) -> dict[str, Floats]:
        """The ratio of means over recent readings, with its interval."""
        self.steps.append(step)
        self.pairs.append((signal, noise))
        recent = [pair for at, pair in zip(self.steps, self.pairs, strict=True) if at >= step / 2][-WINDOW:]
        x, y = (np.array([pair[i] for pair in recent]) for i in (0, 1))
        count = len(recent)
        with np.errstate(all="ignore"):
            dx, dy, dof = x - x.mean(0), y - y.mean(0), count - 1 or np.nan
            var_x, var_y, cov = (dx**2).sum(0) / dof, (dy**2).sum(0) / dof, (dx * dy).sum(0) / dof
            value, low, high = ratio_of_means(x.mean(0), y.mean(0), var_x, var_y, cov, count)
            value = np.where((y.mean(0) == 0) & (x.mean(0) > 0), np.inf, value)
        return {"gsnr": value, "gsnr_low": low, "gsnr_high": high}


def due(step: int, every: int) -> bool:
    return step % every == 0 or step in (1, 2, 4, 8)


def make_run(
    *,
    steps: int = 400,
    gsnr: Callable[[int], float | Floats] | None = None,
    loss: Callable[[int], float] = lambda step: 2.0 + 2.0 * math.exp(-step / 100),
    loss_noise: float = 0.02,
    norm: Callable[[int], float] = lambda step: 1.0,
    update: float = 3e-3,
    lr: Callable[[int], float] = lambda step: 1e-3 * min(1.0, (step + 1) / 20),
    batch_size: Callable[[int], float | None] = lambda step: 64.0,
    micro_batches: int = 4,
    every: int = 10,
    source: Source = "microbatch",
    rows: Sequence[str] = (),
    heads: int = 0,
    spread: float = 0.3,
    seed: int = 0,
) -> Run:
    """A run whose GSNR, at the batch of one micro-batch, is known at every step.

    Args:
        steps: How long.
        gsnr: By step: one number for the model, or one a layer and then one a head, of which the model is the mean.
            None for a run without any source.
        loss: By step, to which noise is added as a share.
        loss_noise: That share.
        norm: By step.
        update: Share of the weights that one step changes.
        lr: By step.
        batch_size: By step: samples of one optimizer step.
        micro_batches: How many it is split into.
        every: Steps from one reading to the next.
        source: Of the samples.
        rows: Names of layers.
        heads: How many of the last rows are heads.
        spread: Standard error of the signal in one reading, as a GSNR.
        seed: Of all noise.
    """
    rng = np.random.default_rng(seed)
    live: Live | None = None
    run: Run = []
    for step in range(steps):
        size = batch_size(step)
        values = {"loss": loss(step) * (1 + loss_noise * rng.normal()), "lr": lr(step)}
        values |= {"grad/norm": norm(step) * math.exp(0.1 * rng.normal()), "grad/spike_ratio": 1.0}
        values |= {"update/ratio": update} if due(step, every) else {}
        readings = [Reading(step=step, time=0.0, batch_size=size, values=values)]
        if gsnr is not None and due(step, every):
            of_rows = np.atleast_1d(np.asarray(gsnr(step), dtype=np.float64))
            live = live or Live(len(of_rows) + 1)
            whole = np.append(np.nanmean(of_rows), of_rows)
            with np.errstate(all="ignore"):
                noise = np.where(whole == np.inf, 0.0, np.where(np.isnan(whole), 0.0, rng.gamma(20, 0.05, len(whole))))
                signal = np.where(np.isfinite(whole), whole * noise + spread * rng.normal(size=len(whole)), 1.0)
            signal = np.where(np.isnan(whole), 0.0, signal)
            read = live.read(step, signal, noise)
            num_layers = len(of_rows) - heads
            readings.append(
                Reading(
                    step=step,
                    time=0.0,
                    source=source,
                    batch_size=size if size is None or source == "adam" else size / micro_batches,
                    values={name: float(part[0]) for name, part in read.items()},
                    tensors={name: part[1 : 1 + num_layers] for name, part in read.items()},
                    layers={name: part[1 : 1 + num_layers] for name, part in read.items()},
                    heads={name: part[1 + num_layers :] for name, part in read.items()} if heads else {},
                )
            )
        run.append(readings)
    return run


def diagnose(
    run: Iterable[Sequence[Reading]], *rules: Rule, layout: Layout | None = None, info: RunInfo | None = None
) -> list[Finding]:
    """What rules find in a run."""
    diagnosis = Diagnosis(rules=rules, info=info)
    diagnosis.describe(layout or make_layout())
    for readings in run:
        diagnosis.read(readings)
    return diagnosis.findings


def diagnose_with_breaks(
    run: Sequence[Sequence[Reading]], make: Callable[[], Rule], breaks: Sequence[int], layout: Layout | None = None
) -> list[Finding]:
    """The same, with the run stopped and resumed from a JSON file at some steps."""
    diagnosis = Diagnosis(rules=[make()])
    diagnosis.describe(layout or make_layout())
    for readings in run:
        if readings[0].step in breaks:
            saved = json.loads(json.dumps(diagnosis.state_dict()))
            diagnosis = Diagnosis(rules=[make()])
            diagnosis.describe(layout or make_layout())
            diagnosis.load_state_dict(saved)
        diagnosis.read(readings)
    return diagnosis.findings


def same_findings(a: Sequence[Finding], b: Sequence[Finding]) -> bool:
    """Whether two lists hold the same, where nan is nan."""
    return json.dumps([one.to_json() for one in a]) == json.dumps([one.to_json() for one in b])


def alarms(findings: Iterable[Finding]) -> list[Finding]:
    """Those of severity warning or above."""
    return [finding for finding in findings if finding.severity != "info"]


def words_of(finding: Finding) -> str:
    """Everything that is said of it."""
    return "\n".join((finding.title, *finding.causes, *finding.fixes))
