"""Thousands of virtual workers: how often the rules that compare them are wrong, and how soon they are right.

A worker's squared gradient norm is drawn as

    |g|^2 = 1 + noise X + 2 sqrt(noise / dims) e,    X = chi-square(dims) / dims * tail,    e normal,

the signal common to all being 1, and `noise` being tr(Sigma)/b. `dims` is the number of directions that the noise
effectively has. The tail, tails / chi-square(tails), makes single batches far larger than the others, as text and
clicks have them. On top, `own` is a level of each worker's shard that drifts slowly.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.bench import markdown_table
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.diagnose.rules.ranks import HighDispersion, LowDispersion
from gradvitals.functional.dispersion import leave_one_out_z, norm_dispersion, norm_ratios
from gradvitals.types import Finding, Reading

Floats = NDArray[np.float64]

WORLDS = (2, 4, 8, 64, 1024, 4096)
SCALES = (1.5, 2.0, 3.0, 10.0)

EVERY = 100
"""Steps from one audit to the next."""

RUN_AUDITS = 200
"""Audits of one clean run: 20,000 steps."""

PLANTED_AT = 10
"""The audit from which on one worker's gradient is scaled."""

PATIENCE = 30
"""Audits within which that must be found."""


@dataclass(frozen=True)
class Noise:
    """How the workers' gradients differ in a healthy run."""

    name: str
    noise: float
    dims: float
    tails: float = math.inf
    own: float = 0.0

    def norms(self, rng: np.random.Generator, audits: int, world: int) -> Floats:
        """One row of local norms for each audit."""
        shape = (audits, world)
        x = rng.chisquare(self.dims, shape) / self.dims
        if math.isfinite(self.tails):
            x *= self.tails / rng.chisquare(self.tails, shape)
        cross = 2 * math.sqrt(self.noise / self.dims) * rng.standard_normal(shape)
        # Where the cross term would make a norm negative, the signal is all but cancelled.
        squared = np.maximum(1 + self.noise * x + cross, 0.05 * (1 + self.noise * x))
        return np.asarray(np.sqrt(squared) * np.exp(self.own * _drifting(rng, shape)))


NOISES = (
    Noise("large batches", noise=0.2, dims=200),
    Noise("usual", noise=3.0, dims=20),
    Noise("small batches", noise=20.0, dims=4),
    Noise("heavy tails", noise=3.0, dims=20, tails=3),
    Noise("shards unlike", noise=3.0, dims=20, own=0.05),
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One cell: so many workers, this noise, and one of them scaled, or none (scale 1)."""

    world: int
    noise: str
    scale: float
    spread: float
    """Standard deviation of the logarithm of a healthy worker's norm."""
    audits: int
    """Clean audits that were judged."""
    high_alarms: int
    """Findings of high_dispersion in them."""
    low_alarms: int
    runs: int
    """Runs with a scaled worker."""
    found: int
    named: int
    """Those whose finding names the right rank; of two workers, none is named, as it cannot be told."""
    median_audits: float | None
    """Audits from the fault to its finding."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)


def simulate(
    worlds: Sequence[int] = WORLDS,
    scales: Sequence[float] = SCALES,
    noises: Sequence[Noise] = NOISES,
    *,
    audits: int = 2000,
    runs: int = 20,
    seed: int = 0,
    processes: int = 1,
) -> Iterator[Record]:
    """Judge virtual runs by the rules themselves.

    Args:
        worlds: Numbers of workers.
        scales: By which one worker's gradient is multiplied.
        noises: What healthy workers differ by.
        audits: Clean audits of each cell, in runs of `RUN_AUDITS`.
        runs: Runs with a fault, for each scale.
        seed: Of everything that is drawn.
        processes: How many share the work; the answer is the same.
    """
    cells = [(world, noise) for world in worlds for noise in noises]
    cell = partial(_cell, scales=scales, audits=audits, runs=runs, seed=seed)
    if processes == 1:
        for records in map(cell, cells):
            yield from records
        return
    with multiprocessing.get_context("spawn").Pool(min(processes, len(cells))) as pool:
        for records in pool.imap(cell, cells):
            yield from records


def _cell(cell: tuple[int, Noise], *, scales: Sequence[float], audits: int, runs: int, seed: int) -> list[Record]:
    """Clean runs of one number of workers and one noise, then those with a fault. Draws from a generator of its own."""
    world, noise = cell
    rng = np.random.default_rng([seed, world, NOISES.index(noise) if noise in NOISES else len(NOISES)])
    spread = float(np.log(noise.norms(rng, 50, max(world, 64))).std())
    high = low = judged = 0
    while judged < audits:
        found = [finding.id for finding in _judge(noise.norms(rng, min(RUN_AUDITS, audits - judged), world))]
        judged += min(RUN_AUDITS, audits - judged)
        high += found.count("high_dispersion")
        low += found.count("low_dispersion")
    common: dict[str, Any] = {"world": world, "noise": noise.name, "spread": spread}
    clean: dict[str, Any] = {"audits": judged, "high_alarms": high, "low_alarms": low}
    records = [Record(**common, **clean, scale=1.0, runs=0, found=0, named=0, median_audits=None)]
    for scale in scales:
        power = _power(noise, rng, world, scale, runs)
        records.append(Record(**common, scale=scale, audits=0, high_alarms=0, low_alarms=0, runs=runs, **power))
    return records


def _power(noise: Noise, rng: np.random.Generator, world: int, scale: float, runs: int) -> dict[str, Any]:
    waited, named = [], 0
    for _ in range(runs):
        norms = noise.norms(rng, PLANTED_AT + PATIENCE, world)
        bad = int(rng.integers(world))
        norms[PLANTED_AT:, bad] *= scale
        for finding in _judge(norms, stop_at_first=True):
            assert finding.found_step is not None
            at = finding.found_step // EVERY - PLANTED_AT
            if finding.id == "high_dispersion" and at >= 0:
                waited.append(at + 1)
                named += finding.rank == bad
    return {"found": len(waited), "named": named, "median_audits": float(median(waited)) if waited else None}


def _judge(norms: Floats, *, stop_at_first: bool = False) -> list[Finding]:
    """What the rules find in one run, shown to them as an audit would."""
    diagnosis = Diagnosis(rules=[HighDispersion(), LowDispersion()], info=RunInfo(world_size=norms.shape[1]))
    for audit, row in enumerate(norms):
        values = {"grad/norm": 1.0, "ranks/norm_dispersion": norm_dispersion(row)}
        ranks = {"ranks/norm": row, "ranks/norm_ratio": norm_ratios(row), "ranks/norm_z": leave_one_out_z(row)}
        diagnosis.read([Reading(step=audit * EVERY, time=0.0, values=values, ranks=ranks)])
        if stop_at_first and diagnosis.findings:
            break
    return diagnosis.findings


def _drifting(rng: np.random.Generator, shape: tuple[int, int], kept: float = 0.9) -> Floats:
    """Normal noise of spread 1 along the first axis, each value like the one before it."""
    noise = rng.standard_normal(shape)
    for audit in range(1, shape[0]):
        noise[audit] = kept * noise[audit - 1] + math.sqrt(1 - kept**2) * noise[audit]
    return noise


def per_10000(alarms: int, audits: int) -> str:
    """A rate per 10,000 audits; where none was seen, what it is below with 95 % confidence.

    >>> per_10000(0, 10_000), per_10000(3, 10_000)
    ('0 (< 3)', '3')
    """
    if not audits:
        return "-"
    rate = 10_000 / audits
    return f"{alarms * rate:.3g}" if alarms else f"0 (< {3 * rate:.3g})"


def table(records: Iterable[Record]) -> str:
    """Markdown: one line for each number of workers and noise."""
    records = list(records)
    scales = sorted({record.scale for record in records if record.runs})
    head = ["workers", "noise", "spread", "high, per 10,000 audits", "low, per 10,000 audits"]
    rows = [head + [f"x {scale:g}: found, audits" for scale in scales]]
    for clean in (record for record in records if not record.runs):
        cells = [f"{clean.world:,}", clean.noise, f"{clean.spread:.3f}"]
        cells += [per_10000(clean.high_alarms, clean.audits), per_10000(clean.low_alarms, clean.audits)]
        for scale in scales:
            of = [r for r in records if (r.world, r.noise, r.scale) == (clean.world, clean.noise, scale) and r.runs]
            cells.append(_found(of[0]) if of else "-")
        rows.append(cells)
    return markdown_table(rows, left=(1,))


def _found(record: Record) -> str:
    after = "" if record.median_audits is None else f", {record.median_audits:g}"
    return f"{100 * record.found / record.runs:.0f} %{after}"
