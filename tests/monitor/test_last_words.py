"""What a plain loop says at its end."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm_python
from torch import nn

import gradvitals as gv
from gradvitals.diagnose import RunInfo
from gradvitals.types import Layout
from gradvitals.worker.worker import LiveDiagnosis

LOOP = """
import torch, gradvitals as gv

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = gv.watch(model, optimizer, run="runs/plain")
for _ in range(60):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    monitor.observe(loss)
    optimizer.step()
"""


def test_a_script_that_just_ends_says_how_it_went_and_where_to_read_more(tmp_path: Path) -> None:
    done = warm_python.run("-c", LOOP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-2].startswith("gradvitals: Healthy: 60 steps")
    assert lines[-1] == f"gradvitals: details: gradvitals doctor {Path('runs/plain')}"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("config", "steps", "said"),
    [
        (gv.Config(), 3, 2),
        (gv.Config(), 0, 0),  # nothing was trained
        (gv.Config(quiet=True), 3, 0),
        (gv.Config(diagnose=False), 3, 0),  # nobody asked for a verdict
    ],
)
def test_when_it_speaks(
    config: gv.Config, steps: int, said: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    monitor.close()  # once more: it is said once
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "3 steps" in line or "doctor" in line]) == said


def test_findings_of_one_drain_are_printed_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveDiagnosis(RunInfo(), gv.Config(), lambda rule, error: None)
    late = gv.Finding(id="explosion", severity="warning", title="late", first_step=30)
    early = gv.Finding(id="dead_units", severity="critical", title="early", first_step=3, found_step=31)
    found = {30: [late], 31: [early], 40: [replace(late, last_step=39)]}
    live.diagnosis.read = lambda readings: found[readings[0].step]  # type: ignore[method-assign]
    for step in found:
        live.read([gv.Reading(step=step, time=0.0, values={})], Layout())
    assert capsys.readouterr().err == ""
    live.print_news()
    lines = [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()]
    assert lines == ["critical since step 3", "warning at step 30", "resolved at step 40"]


def test_a_stderr_that_is_full_ends_nothing(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    script = f"{LOOP}\nmonitor.close()\nprint('went on')"
    with Path("/dev/full").open("w") as full:
        done = warm_python.run("-c", script, cwd=tmp_path, stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == "went on\n"


def test_a_sick_run_prints_its_findings_as_they_open_and_its_fix_at_the_end(tmp_path: Path) -> None:
    stale = LOOP.replace("    optimizer.zero_grad()\n", "").replace("lr=0.01", "lr=0.3")
    lines = warm_python.run("-c", stale, cwd=tmp_path).stderr.splitlines()
    assert any(
        line.startswith("gradvitals: ") and " since step 1: Gradients are not zeroed" in line for line in lines
    ), lines
    assert lines[-2] == "gradvitals: fix: Call optimizer.zero_grad() once per step, before the first backward"
    assert all(len(line) < 160 for line in lines if " step " in line and "Worst" not in line)
