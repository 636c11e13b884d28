"""The parts of the experiment one after the other, and what they found as one record that can be kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.scale_adaptation.adaptation import (
    ARMS,
    EVAL_WINDOWS,
    CureRow,
    Size,
    TensorRow,
    measure_adaptation,
    try_cure,
)
from experiments.scale_adaptation.simulation import LEVELS, Case, SimRow, cases, simulate
from experiments.scale_adaptation.training import Schedule, Shape, Texts, read_texts
from gradvitals.errors import GradvitalsError

PARTS = ("simulation", "adaptation", "cure")

MODELS: dict[str, Shape] = {
    "two layers": Shape(),
    "four layers": Shape(num_layers=4),
    "with scalars": Shape(width=96, num_heads=3, scalars=True),
}
SCHEDULES = (
    Schedule(lr=4e-3, decay=0.2),
    Schedule(lr=2e-3, decay=0.5),
    Schedule(lr=6e-3, decay=0.2, form="cosine"),
)
CURE_LRS = (2e-3, 6e-3)
CURE_DECAYS = (0.02, 0.1, 0.5)

Progress = Callable[[int, int, str], object]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything."""

    parts: tuple[str, ...] = PARTS
    sim_seeds: int = 3
    sim_steps: int = 400
    levels: tuple[float, ...] = LEVELS
    models: tuple[str, ...] = tuple(MODELS)
    schedules: tuple[Schedule, ...] = SCHEDULES
    shape: Shape | None = None
    """Instead of those that the names of `models` stand for."""
    size: Size = field(default_factory=Size)
    cure_steps: int = 2000
    cure_seeds: int = 5
    cure_lrs: tuple[float, ...] = CURE_LRS
    cure_decays: tuple[float, ...] = CURE_DECAYS
    arms: tuple[str, ...] = tuple(ARMS)
    windows: int = EVAL_WINDOWS
    """Windows of unseen text that the cure is judged by."""

    def model(self, name: str) -> Shape:
        """The shape that a name stands for."""
        return MODELS[name] if self.shape is None else self.shape


QUICK = Plan(
    sim_seeds=2,
    sim_steps=200,
    levels=LEVELS[::2],
    models=("tiny",),
    schedules=(Schedule(lr=1e-2, decay=0.5),),
    shape=Shape(width=16, num_layers=1, context=16, scalars=True),
    size=Size(steps=120, batch=4, num_parts=6, every=15),
    cure_steps=100,
    cure_seeds=2,
    cure_lrs=(1e-2,),
    cure_decays=(0.1, 0.5),
    arms=("none", "scalar"),
    windows=256,
)
"""Enough to see how it goes, on a CPU in half a minute; not enough for its numbers to mean anything."""


@dataclass
class Results:
    """Everything that was found."""

    simulation: list[SimRow] = field(default_factory=list)
    adaptation: list[TensorRow] = field(default_factory=list)
    cure: list[CureRow] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rows = {part: [row.to_json() for row in getattr(self, part)] for part in PARTS}
        return {**rows, "seconds": self.seconds, "setting": self.setting}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        """The inverse of `to_json`."""
        case = ("shape", "optimizer", "noise", "target")
        simulated = [
            SimRow(
                case=Case(**{name: row[name] for name in case}),
                **{name: value for name, value in row.items() if name not in case},
            )
            for row in data["simulation"]
        ]
        known = TensorRow.__dataclass_fields__
        adapted = [TensorRow(**{k: v for k, v in row.items() if k in known}) for row in data["adaptation"]]
        cured = [CureRow(**row) for row in data["cure"]]
        return cls(simulated, adapted, cured, dict(data.get("seconds", {})), dict(data.get("setting", {})))


def run_plan(
    plan: Plan,
    *,
    data: Path | None = None,
    device: str = "cpu",
    out: Path | None = None,
    graphs: bool = True,
    progress: Progress | None = None,
) -> Results:
    """Do what a plan says.

    Args:
        plan: What to do.
        data: Folder with text; see `read_texts`.
        device: ``cpu`` or ``cuda``.
        out: File to keep what was found in, written anew after every training. What it has from before stays, and
            trainings that were made in the same way are not made again.
        graphs: On a GPU, replay the passes of a step as one CUDA graph.
        progress: Told what is done.
    """
    results = read_results(out) if out is not None and out.exists() else Results()
    place = torch.device(device)
    texts = read_texts(data, place) if {"adaptation", "cure"} & set(plan.parts) else None
    source = "plays" if data is None else "books"
    for part in plan.parts:
        how = _conditions(plan, part, source)
        if results.setting.get(part) != how or part == "simulation":
            setattr(results, part, [])
            results.seconds[part] = 0.0
        results.setting[part] = how
    results.setting["device"] = device
    made = {(row.model, row.schedule) for row in results.adaptation} | {(row.arm, row.lr) for row in results.cure}
    jobs = _jobs(plan, texts, graphs, made)
    for number, (part, label, job) in enumerate(jobs, 1):
        began = time.perf_counter()
        getattr(results, part).extend(job())
        results.seconds[part] += time.perf_counter() - began
        if out is not None:
            write_results(out, results)
        if progress is not None:
            progress(number, len(jobs), label)
    if out is not None:
        write_results(out, results)
    return results


def _conditions(plan: Plan, part: str, source: str) -> dict[str, Any]:
    """What the rows of a part were made with, but for what they say themselves: others are not added to them."""
    if part == "simulation":
        return {"steps": plan.sim_steps, "seeds": plan.sim_seeds}
    shape = None if plan.shape is None else str(plan.shape)
    if part == "adaptation":
        return {"size": str(plan.size), "shape": shape, "text": source}
    seeds, decays = plan.cure_seeds, list(plan.cure_decays)
    like = {
        "steps": plan.cure_steps,
        "seeds": seeds,
        "decays": decays,
        "windows": plan.windows,
        "batch": plan.size.batch,
    }
    return {**like, "model": plan.models[0], "shape": shape, "text": source}


Job = tuple[str, str, Callable[[], Sequence[Any]]]


def _jobs(plan: Plan, texts: Texts | None, graphs: bool, made: Collection[object]) -> list[Job]:
    jobs: list[Job] = []
    if "simulation" in plan.parts:
        for case in cases():
            label = f"simulated {case.shape}, {case.optimizer}, {case.noise} noise, target {case.target}"
            jobs.append(("simulation", label, partial(_simulated, plan, case)))
    if "adaptation" in plan.parts:
        for name in plan.models:
            for schedule in (some for some in plan.schedules if (name, some.name) not in made):
                train = partial(_adapted, plan, name, schedule, texts, graphs)
                jobs.append(("adaptation", f"model {name}, {schedule.name}", train))
    if "cure" in plan.parts:
        for lr in plan.cure_lrs:
            for arm in (some for some in plan.arms if (some, lr) not in made):
                cure = partial(_cured, plan, arm, lr, texts, graphs)
                jobs.append(("cure", f"multipliers {arm}, learning rate {lr:g}", cure))
    return jobs


def _simulated(plan: Plan, case: Case) -> list[SimRow]:
    return simulate(case, seeds=plan.sim_seeds, steps=plan.sim_steps, levels=plan.levels)


def _adapted(plan: Plan, name: str, schedule: Schedule, texts: Texts | None, graphs: bool) -> list[TensorRow]:
    assert texts is not None
    return measure_adaptation(name, plan.model(name), schedule, texts, plan.size, graphs=graphs)


def _cured(plan: Plan, arm: str, lr: float, texts: Texts | None, graphs: bool) -> list[CureRow]:
    assert texts is not None
    return try_cure(
        arm,
        plan.model(plan.models[0]),
        Schedule(lr=lr, decay=0.0, form="cosine"),
        plan.cure_decays,
        range(plan.cure_seeds),
        texts,
        steps=plan.cure_steps,
        batch=plan.size.batch,
        windows=plan.windows,
        graphs=graphs,
    )


def write_results(path: Path, results: Results) -> None:
    """Keep what was found."""
    from gradvitals.types import json_ready

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(json_ready(results.to_json()), allow_nan=False) + "\n", "utf-8")
    fresh.replace(path)


def read_results(path: Path) -> Results:
    """What `write_results` kept.

    Raises:
        GradvitalsError: when the file is not there, or holds something else.
    """
    try:
        data = json.loads(path.read_text("utf-8"), object_hook=_numbers)
        return Results.from_json(data)
    except FileNotFoundError:
        raise GradvitalsError(
            f"{path} is not there; expected what `python -m experiments.scale_adaptation --out` wrote"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise GradvitalsError(
            f"{path} cannot be read ({error!r}); expected what `python -m experiments.scale_adaptation --out` wrote"
        ) from None


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no nan: it is a string there."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in values.items()}
