"""What is said of a run holds for what it speaks of: up to which step, of which loss, from which tensor on."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.show.checkup import Checkup, examine
from gradvitals.show.run_page import run_page
from gradvitals.show.standouts import first_nonzero
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, Source, TensorInfo

LAYERS = ("0", "1", "2", "3")


def layout() -> Layout:
    tensors = tuple(
        TensorInfo(index=2 * depth + i, name=f"{name}.{kind}", shape=(2,), dtype="float32", layer=name, depth=depth)
        for depth, name in enumerate(LAYERS)
        for i, kind in enumerate(("weight", "bias"))
    )
    return Layout(tensors=tensors, layers=LAYERS)


def write(
    path: Path,
    *findings: Finding,
    steps: int = 400,
    loss: bool = True,
    broken: Callable[[int], Any] = lambda step: np.zeros(8),
    meta: dict[str, Any] | None = None,
) -> Path:
    with RunWriter(path, meta={"facts": {}, **(meta or {})}) as writer:
        writer.write(layout())
        for step in range(steps):
            values = {"grad/norm": 1.0, "lr": 0.1, "grad/nonfinite": float(broken(step).sum())}
            values |= {"loss": 2.0 - 0.001 * step} if loss else {}
            tensors = {"grad/norm": np.ones(8), "grad/nonfinite": broken(step)}
            writer.write(Reading(step=step, time=float(step), values=values, tensors=tensors))
        for finding in findings:
            writer.write(finding)
    return path


def checkup(path: Path) -> Checkup:
    with open_run(path) as run:
        return examine(run)


def printed(*args: str) -> str:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, args).stdout


def nan_at(step: int, last: int | None = None) -> Finding:
    return Finding(id="nonfinite", severity="critical", title="NaN", first_step=step, last_step=last)


def test_after_nan_nothing_is_fine_any_more(tmp_path: Path) -> None:
    path = write(tmp_path / "run", nan_at(251))
    judged = checkup(path)
    assert judged.fine_until == judged.to_json()["fine_until"] == 250
    assert "\nFine up to step 250: " in printed("doctor", str(path))
    assert "\nWhat is fine up to step 250, before NaN or Inf\n" in printed("doctor", str(path), "--all")
    with open_run(path) as run:
        assert "What is fine up to step 250, before NaN or Inf (" in run_page(run)


def test_a_nan_that_is_over_takes_nothing_from_what_is_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "run", nan_at(251, 251))
    assert checkup(path).fine_until is None
    assert "up to step" not in printed("doctor", str(path))


def test_what_takes_more_steps_than_were_finite_was_not_judged(tmp_path: Path) -> None:
    late, early = checkup(write(tmp_path / "late", nan_at(251))), checkup(write(tmp_path / "early", nan_at(60)))
    assert "loss_plateau" in {item.id for item in late.fine}
    reasons = {name: item.reason for item in early.not_judged for name in item.ids}
    assert reasons["loss_plateau"] == "too early: it needs more than 100 steps before NaN or Inf"
    none = checkup(write(tmp_path / "none", nan_at(0)))
    assert none.fine == ()
    assert "stale_gradients" in next(item.ids for item in none.not_judged if item.reason == "no step was finite")


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "No loss was observed, so nothing about it was judged: in a loop of one's own, call observe(loss)"),
        ({"imported": {}}, "No loss was imported, so nothing about it was judged: --map COLUMN=loss says which"),
    ],
)
def test_the_verdict_says_that_no_loss_was_observed(tmp_path: Path, meta: dict[str, Any], said: str) -> None:
    assert said in checkup(write(tmp_path / "without", loss=False, meta=meta)).verdict.line
    assert "loss was" not in checkup(write(tmp_path / "with", meta=meta)).verdict.line


def test_the_tensors_that_broke_first_are_listed_as_backward_comes_to_them(tmp_path: Path) -> None:
    path = write(tmp_path / "run", broken=lambda step: np.where((step >= 20) & (np.arange(8) != 7), 1.0, 0.0))
    with open_run(path) as run:
        worst = first_nonzero(run, "grad/nonfinite")
    assert [(item.name, item.step) for item in worst] == [
        ("3.weight", 20),
        ("2.bias", 20),
        ("2.weight", 20),
        ("1.bias", 20),
        ("1.weight", 20),
    ]


def write_gsnr(
    path: Path, *findings: Finding, source: Source = "adam", gsnr: tuple[float, float, float], layers: list[float]
) -> Path:
    """A run whose GSNR and its interval are these, as are the lower ends of its layers'."""
    names = ("gsnr", "gsnr_low", "gsnr_high")
    lows = np.array(layers)
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(layout())
        for step in range(400):
            writer.write(Reading(step=step, time=float(step), batch_size=8.0, values={"loss": 1.0, "grad/norm": 1.0}))
            if step % 10 == 0:
                writer.write(
                    Reading(
                        step=step,
                        time=float(step),
                        source=source,
                        batch_size=8.0,
                        values=dict(zip(names, gsnr, strict=True)),
                        layers={"gsnr": lows + 0.1, "gsnr_low": lows, "gsnr_high": lows + 0.2},
                    )
                )
        for finding in findings:
            writer.write(finding)
    return path


def told_of_gsnr(path: Path) -> str:
    """What is fine of how well the GSNR is known, or why that was not judged."""
    judged = checkup(path)
    fine = [item.text for item in judged.fine if item.id == "estimator_unreliable"]
    return " ".join(fine or [item.reason for item in judged.not_judged if "estimator_unreliable" in item.ids])


@pytest.mark.parametrize(
    ("gsnr", "layers", "told"),
    [
        ((0.2, 0.1, 0.3), [0.1, 0.1, 0.1, 0.1], "the GSNR of the model is known within a factor of ten"),
        (
            (0.2, 0.1, 0.3),
            [0.1, -0.1, 0.0, np.nan],
            "the GSNR of the model is known within a factor of ten; of 2 of 3 layers it cannot be told from 0",
        ),
        ((-0.2, -0.3, -0.1), [0.1] * 4, "the GSNR from Adam's averages cannot be told from 0 as last read"),
        ((0.2, 0.0, 0.4), [0.1] * 4, "the GSNR from Adam's averages cannot be told from 0 as last read"),
        ((0.2, 0.01, 0.4), [0.1] * 4, "the GSNR from Adam's averages is not known within a factor of ten as last read"),
    ],
)
def test_how_well_a_gsnr_is_known_holds_for_what_it_is_said_of(
    tmp_path: Path, gsnr: tuple[float, float, float], layers: list[float], told: str
) -> None:
    assert told_of_gsnr(write_gsnr(tmp_path / "run", gsnr=gsnr, layers=layers)) == told


@pytest.mark.parametrize(
    ("source", "gsnr", "layers", "said"),
    [
        ("adam", 0.2, [0.1, 0.1, 0.1, 0.1], ""),
        ("adam", 0.2, [0.1, 0.1, 0.1, -0.4], "where gradients have shrunk or undo each other"),
        ("adam", -0.2, [0.1, 0.1, 0.1, 0.1], "where gradients have shrunk or undo each other"),
        ("microbatch", 0.2, [0.1, 0.1, 0.1, -0.4], "where a step's passes are not samples of one thing"),
    ],
)
def test_a_gsnr_below_zero_is_not_shown_without_what_it_means(
    tmp_path: Path, source: Source, gsnr: float, layers: list[float], said: str
) -> None:
    path = write_gsnr(tmp_path / "run", source=source, gsnr=(gsnr, gsnr - 0.1, gsnr + 0.1), layers=layers)
    with open_run(path) as run:
        page = run_page(run)
    for text in (printed("report", str(path)), unescape(page)):
        assert ("a GSNR cannot be below 0: read one that is as 0" in text) == bool(said)
        assert said in " ".join(text.split())


def test_the_doctor_says_so_of_a_finding_that_names_one(tmp_path: Path) -> None:
    for name, gsnr, said in (
        ("estimator_unreliable", 0.1, False),
        ("estimator_unreliable", -0.1, True),
        ("noisy_gradients", -0.1, False),  # which is told without its numbers
    ):
        seen = {"gsnr": gsnr, "source": "adam"}
        found = Finding(id=name, severity="info", title="not well known", first_step=9, evidence={"seen": seen})
        path = write_gsnr(tmp_path / f"{name} {gsnr}", found, gsnr=(0.2, 0.1, 0.3), layers=[0.1] * 4)
        assert ("Note: a GSNR cannot be below 0" in printed("doctor", str(path))) == said
