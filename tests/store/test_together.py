"""Several metrics in one pass are what each is alone; records are counted without loading them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gradvitals as gv
from gradvitals.errors import RunError
from gradvitals.store.writer import RunWriter
from gradvitals.types import Action, Finding, Reading


def written(path: Path, steps: range, *, resume: bool = False, first_step: int = 0) -> None:
    with RunWriter(path, meta={"facts": {}}, resume=resume, first_step=first_step) as writer:
        for step in steps:
            writer.write(Reading(step=step, time=10.0 + step, values={"loss": step / 7, "grad/norm": step / 3}))
            if step % 2:
                writer.write(Reading(step=step, time=10.5 + step, source="adam", values={"gsnr": step / 5}))
        writer.commit()


@pytest.mark.parametrize("since", [None, 250])
@pytest.mark.parametrize("until", [None, 600])
def test_several_metrics_are_what_each_is_alone(tmp_path: Path, since: int | None, until: int | None) -> None:
    written(tmp_path / "run", range(700))
    with gv.open_run(tmp_path / "run") as run:
        steps, times, (loss, norm) = run.several(["loss", "grad/norm"], since=since, until=until)
        within = slice(None) if until is None else run.series("loss", since=since)[0] <= until
        np.testing.assert_array_equal(steps, run.series("loss", since=since)[0][within])
        np.testing.assert_array_equal(times, run.times("loss", since=since)[1][within])
        np.testing.assert_array_equal(loss, run.series("loss", since=since)[1][within])
        np.testing.assert_array_equal(norm, run.series("grad/norm", since=since)[1][within])


def test_steps_done_again_are_shown_as_they_were_done_last(tmp_path: Path) -> None:
    written(tmp_path / "run", range(400))
    written(tmp_path / "run", range(300, 350), resume=True, first_step=300)
    with gv.open_run(tmp_path / "run") as run:
        steps, _, (loss,) = run.several(["loss"])
        np.testing.assert_array_equal(steps, np.arange(350))
        np.testing.assert_array_equal(loss, run.series("loss")[1])


def test_what_was_not_read_with_the_first_is_nan(tmp_path: Path) -> None:
    written(tmp_path / "run", range(50))
    with gv.open_run(tmp_path / "run") as run:
        steps, _, (gsnr, loss) = run.several(["gsnr", "loss"], source="adam")
        np.testing.assert_array_equal(steps, np.arange(1, 50, 2))
        np.testing.assert_array_equal(gsnr, run.series("gsnr")[1])
        assert np.isnan(loss).all()
        with pytest.raises(RunError, match="no metric 'nope'"):
            run.several(["nope"])


def test_a_row_of_a_table_and_its_metrics(write_run: Callable[..., Path]) -> None:
    with gv.open_run(write_run(steps=300)) as run:
        name = run.names("tensors")[1]
        _, _, (norm, weight) = run.several(["grad/norm", "weight/norm"], tensor=name)
        np.testing.assert_array_equal(norm, run.series("grad/norm", tensor=name)[1])
        np.testing.assert_array_equal(weight, run.series("weight/norm", tensor=name)[1])


def test_findings_and_actions_are_counted(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", meta={}) as writer:
        for step in range(3):
            writer.write(Finding(id=f"f{step}", severity="info", title="t"))
        writer.write(Action(kind="skip", step=1, finding="f0", taken=True))
    with gv.open_run(tmp_path / "run") as run:
        assert run.num_records() == 4
