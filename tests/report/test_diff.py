from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

LAYOUT = Layout(
    tensors=tuple(
        TensorInfo(index=i, name=f"{i}.weight", shape=(2, 2), dtype="float32", layer=str(i), depth=i) for i in range(2)
    ),
    layers=("0", "1"),
)
Curve = Callable[[int], float]


def write(
    path: Path, loss: Curve, *findings: Finding, lr: float = 0.1, norms: Curve = lambda step: 1.0, steps: int = 400
) -> Path:
    rng = np.random.default_rng(0)
    with RunWriter(path, meta={"facts": {"optimizer": "SGD"}, "extra": {"lr": lr}}) as writer:
        writer.write(LAYOUT)
        for step in range(steps):
            values = {"loss": loss(step) + 0.01 * rng.normal(), "lr": lr, "grad/norm": 1.0}
            tensors = {"grad/norm": np.array([1.0, norms(step)])}
            writer.write(Reading(step=step, time=float(step), values=values, tensors=tensors))
        for finding in findings:
            writer.write(finding)
        writer.commit()
    return path


def falling(step: int) -> float:
    return 1.0 + 2.0 * float(np.exp(-step / 100))


def test_equal_runs_do_not_part(tmp_path: Path) -> None:
    found = gv.diff(write(tmp_path / "a", falling), write(tmp_path / "b", falling))
    assert [part.step for part in found.curves] == [None, None, None]
    assert "The losses are the same at every step." in str(found)
    assert "All recorded settings are equal." in str(found)
    assert "Both runs have the same findings." in str(found)


@pytest.mark.parametrize("change", [0.5, -0.3, float("nan")])
def test_runs_part_where_one_changes_for_good(tmp_path: Path, change: float) -> None:
    b = write(tmp_path / "b", lambda step: falling(step) + (change if step >= 250 else 0.0))
    part = gv.diff(write(tmp_path / "a", falling), b).curve("loss")
    assert part is not None
    assert (part.step, part.window, part.final_window) == (250, 9, 20)
    text = str(gv.diff(tmp_path / "a", b))
    assert "step 250 (medians of the 9 steps from there: " in text
    assert "Final loss (median of the last 20 steps): " in text


def test_the_final_loss_of_the_longer_run_is_its_own(tmp_path: Path) -> None:
    short, long = write(tmp_path / "a", falling, steps=100), write(tmp_path / "b", falling, steps=400)
    part = gv.diff(short, long).curve("loss")
    assert part is not None
    assert part.final_a == pytest.approx(falling(97), rel=0.02)
    assert part.final_b == pytest.approx(falling(397), rel=0.02)
    assert "in A at step 99, " in str(gv.diff(short, long))


def test_curves_that_were_apart_and_met_again_are_not_called_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    wild = lambda step: float(np.exp(rng.normal())) * 300 * 0.97**step if step < 150 else 0.0  # noqa: E731
    found = gv.diff(write(tmp_path / "a", falling), write(tmp_path / "b", lambda step: falling(step) + wild(step)))
    part = found.curve("loss")
    assert part is not None
    assert part.step is None
    assert part.apart is not None
    assert part.apart[0] <= 3
    assert 100 <= part.apart[1] <= 150
    assert "The losses are apart from step " in str(found)
    assert "and meet again (medians of the last " in str(found)


def test_the_last_few_steps_are_not_for_good(tmp_path: Path) -> None:
    b = write(tmp_path / "b", lambda step: falling(step) + (0.5 if step >= 396 else 0.0))
    part = gv.diff(write(tmp_path / "a", falling), b).curve("loss")
    assert part is not None
    assert part.step is None


def test_a_passing_spike_is_no_parting(tmp_path: Path) -> None:
    b = write(tmp_path / "b", lambda step: falling(step) + (50.0 if 100 <= step < 103 else 0.0))
    part = gv.diff(write(tmp_path / "a", falling), b).curve("loss")
    assert part is not None
    assert (part.step, part.first_difference) == (None, 100)


def test_noise_is_no_parting(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    b = write(tmp_path / "b", lambda step: falling(step) + 0.2 * rng.normal())
    part = gv.diff(write(tmp_path / "a", falling), b).curve("loss")
    assert part is not None
    assert part.step is None
    assert part.first_difference == 0


def test_settings_findings_and_the_layer_that_parts_first(tmp_path: Path) -> None:
    gone = Finding(id="explosion", severity="critical", title="x", first_step=50)
    new = Finding(id="loss_rising", severity="warning", title="y", first_step=60)
    note = Finding(id="clip_idle", severity="info", title="z", first_step=60)
    a = write(tmp_path / "a", falling, gone, gone)
    b = write(tmp_path / "b", falling, new, note, lr=0.5, norms=lambda step: 1.0 if step < 300 else 4.0)
    found = gv.diff(a, b)
    assert (found.gained, found.lost) == (("loss_rising",), ("explosion",))
    assert found.settings["lr"] == (0.1, 0.5)
    layer = found.curves[-1]
    assert (layer.layer, layer.step, layer.a, layer.b) == ("1", 300, 1.0, 4.0)
    printed = CliRunner().invoke(main, ["diff", str(a), str(b)]).output
    assert printed == f"{found}\n"
    data = json.loads(CliRunner().invoke(main, ["diff", str(a), str(b), "--json"]).output)
    assert data["findings"] == {"gained": ["loss_rising"], "lost": ["explosion"]}
    assert data["sentences"] == list(found.sentences())
    assert "Only in A: gradient explosion [explosion]." in data["sentences"]


def test_diff_takes_the_newest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("runs/one"), falling)
    result = CliRunner().invoke(main, ["diff"])
    assert result.exit_code == 2
    assert "there is only one run in runs" in result.stderr
    write(Path("runs/two"), falling)
    assert [line.split()[1] for line in CliRunner().invoke(main, ["diff"]).output.splitlines()[:2]] == [
        "runs/one",
        "runs/two",
    ]
