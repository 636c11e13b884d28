"""However a program ends, its run has every step and says how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import warm_python

import gradvitals as gv

SCRIPT = """
import sys, torch, gradvitals as gv
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gv.watch(model, optimizer, run=sys.argv[1], config=gv.Config(quiet=True, overhead_budget=1))  # not closed
for step in range(130):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 128:
        {ending}
"""


def endings(path: Path, steps: int) -> list[tuple[str, str]]:
    with gv.open_run(path) as run:
        assert run.series("grad/norm")[0].tolist() == list(range(steps))
        assert run.dropped == 0
        return [(f.severity, f.title) for f in run.findings if f.id == "training_stopped"]


@pytest.mark.parametrize(
    ("ending", "steps", "expected"),
    [
        ("pass", 130, []),
        (
            "raise RuntimeError('out of luck\\nand more')",
            129,
            [("critical", "Training stopped with RuntimeError: out of luck")],
        ),
        ("raise KeyboardInterrupt", 129, [("info", "Training was stopped manually")]),
    ],
)
def test_a_program_that_ends(tmp_path: Path, ending: str, steps: int, expected: list[tuple[str, str]]) -> None:
    script = SCRIPT.format(ending=ending)
    warm_python.run("-c", script, tmp_path / "run")
    assert endings(tmp_path / "run", steps) == expected


def test_a_with_block_that_is_left_by_an_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        train()
    assert endings(tmp_path / "run", 1) == [("critical", "Training stopped with ValueError: no more data")]


def test_a_slow_alert_in_the_worker_does_not_count_as_a_worker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradvitals.monitor.HANG_SECONDS", 0.2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alert = gv.alerts.Command(["sh", "-c", f"sleep 1; echo sent >> {tmp_path}/sent"])
    config = gv.Config(worker="process", quiet=True)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config, alerts=[alert]) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).sum() * (float("nan") if step == 2 else 1.0)).backward()
            optimizer.step()
        monitor.flush()
    assert (tmp_path / "sent").exists()
    with gv.open_run(tmp_path / "run") as run:
        assert run.meta["finished_at"] is not None
