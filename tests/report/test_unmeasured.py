"""A check that lacks a number says why, and does not ask for what the loop already does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.report.live import look, plain_line
from gradvitals.report.report import Report
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading, TensorInfo


def write(path: Path, *, batch_size: float | None = None, heads: tuple[str, ...] = ()) -> Path:
    tensor = TensorInfo(index=0, name="att.in_proj_weight", shape=(6, 2), dtype="float32", layer="att", depth=0)
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(Layout(tensors=(tensor,), layers=("att",), heads=heads))
        for step in range(60):
            values = {"loss": 1.0, "grad/norm": 1.0}
            writer.write(Reading(step=step, time=step, batch_size=batch_size, values=values))
    return path


def reason(path: Path, rule: str) -> str:
    with open_run(path) as run:
        [missing] = [reason for reason, names in Report(run).checks.skipped.items() if rule in names]
    return missing


@pytest.mark.parametrize("told", [None, 16.0])
def test_a_known_batch_size_is_not_asked_for(tmp_path: Path, told: float | None) -> None:
    run = write(tmp_path / "run", batch_size=told)
    report = CliRunner().invoke(main, ["report", str(run)]).stdout
    assert "needs two or more backward passes per step" in report
    for text in (reason(run, "batch_too_small"), report):
        assert ("watch(..., batch_size=...)" in text) == (told is None), text


def test_heads_that_were_found_but_not_read_are_not_called_missing(tmp_path: Path) -> None:
    found = write(tmp_path / "found", heads=("att/head0", "att/head1"))
    assert reason(found, "sparse_feature_noise").startswith("no GSNR of attention heads, which needs two or more")
    assert (
        reason(write(tmp_path / "none"), "sparse_feature_noise")
        == "no attention heads found; set them with Config.heads"
    )


def test_a_noise_scale_that_is_not_measured_is_not_promised(tmp_path: Path) -> None:
    ended = look(write(tmp_path / "run"))
    assert "noise scale" not in plain_line(replace(ended, ended=False))
    scale = replace(ended.summary.noise_scale, measured=True)
    unclear = replace(ended, summary=replace(ended.summary, noise_scale=scale))
    assert plain_line(replace(unclear, ended=False)).endswith("noise scale not identifiable yet")
    assert "noise scale" not in plain_line(unclear)


def test_a_run_with_the_retired_source_examples_opens_and_no_rule_judges_by_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tensor = TensorInfo(index=0, name="norm.weight", shape=(6,), dtype="float32", layer="norm", depth=0)
    with RunWriter(run, meta={"facts": {}, "config": {"example_dim": None}}) as writer:
        writer.write(Layout(tensors=(tensor,), layers=("norm",)))
        for step in range(600):
            writer.write(Reading(step=step, time=step, batch_size=16.0, values={"loss": 1.0, "grad/norm": 1.0}))
            scale = {"gsnr": 0.5, "noise_scale": 20.0, "noise_scale_low": 15.0, "noise_scale_high": 30.0}
            source: Any = "examples"
            writer.write(Reading(step=step, time=step, source=source, batch_size=16.0, values=scale))
    assert reason(run, "batch_too_small").startswith("no noise scale, which needs two or more backward passes per step")
    for command in (["doctor", str(run)], ["report", str(run)], ["advise", str(run)]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    with open_run(run) as opened:
        assert opened.series("noise_scale", source="examples")[1][-1] == 20.0
