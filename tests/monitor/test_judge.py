"""The diagnosis of a live run: what it learns about the run, what it says, what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import gradvitals as gv
from gradvitals.errors import ConfigError
from gradvitals.judge import Judge, facts_of
from gradvitals.types import Finding, Layout, Reading


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.99), weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: gv.Monitor, steps: int, bad: int = -1) -> None:
    torch.manual_seed(1)
    for step in range(steps):
        inputs = torch.randn(32, 4)
        targets = inputs.sum(1, keepdim=True) * (1e4 if step == bad else 1.0)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        monitor.observe(loss)
        optimizer.step()


def test_a_bad_batch_is_said_when_it_comes_and_when_it_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = make()
    with gv.watch(model, optimizer, run=tmp_path / "run") as monitor:
        train(model, optimizer, monitor, 260, bad=150)
    lines = [line for line in capsys.readouterr().err.splitlines() if "explosion" in line]
    assert "step 150" in lines[0]
    assert "fix:" in lines[0]
    assert lines[-1].startswith("gradvitals: over since step 151")
    with gv.open_run(tmp_path / "run") as run:
        kept = {finding.id: finding for finding in run.findings()}
    assert kept["explosion"].first_step == kept["explosion"].last_step == 150
    assert kept["explosion"].to_json() == next(f for f in monitor.findings if f.id == "explosion").to_json()


def test_quiet_and_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, config in {"quiet": gv.Config(quiet=True), "off": gv.Config(diagnose=False)}.items():
        model, optimizer = make()
        with gv.watch(model, optimizer, run=tmp_path / name, config=config) as monitor:
            train(model, optimizer, monitor, 170, bad=150)
        assert capsys.readouterr().err == ""
        assert ("explosion" in {f.id for f in monitor.findings}) == (name == "quiet")


def test_settings_reach_the_rules(tmp_path: Path) -> None:
    model, optimizer = make()
    config = gv.Config(quiet=True, rules={"explosion": False})
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        train(model, optimizer, monitor, 170, bad=150)
    assert "explosion" not in {f.id for f in monitor.findings}
    with pytest.raises(ConfigError, match="no rule 'explosoin'"):
        gv.watch(*make(), run=tmp_path / "other", config=gv.Config(rules={"explosoin": False}))


def test_facts() -> None:
    _, optimizer = make()
    facts = facts_of([optimizer])
    assert (facts.optimizer, facts.betas, facts.weight_decay) == ("AdamW", (0.8, 0.99), 0.1)
    assert gv.diagnose.RunInfo.from_json(facts.to_json()) == facts
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    assert facts_of([sgd]).momentum == 0.9


def test_autocast_is_noticed(tmp_path: Path) -> None:
    model, optimizer = make()
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.ones(2, 4)).mean()
            loss.backward()
            optimizer.step()
        monitor.flush()
    with gv.open_run(tmp_path / "run") as run:
        assert run.meta["facts"]["autocast"] == "bfloat16"
    assert not hasattr(torch.amp.autocast_mode.autocast.__enter__, "__wrapped__"), "torch must be as it was"


def test_nothing_is_put_on_the_model(tmp_path: Path) -> None:
    model, optimizer = make()
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_watched_model_still_compiles_whole(tmp_path: Path, when: str) -> None:
    model, optimizer = make()
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if when == "after":
        compiled(torch.ones(2, 4))
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                compiled(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # One graph for each way it was called: bare before the watch, and in autocast.
    assert counter.frame_count == (2 if when == "after" else 1)


def test_gradients_that_nobody_zeroes_are_told(tmp_path: Path) -> None:
    for zeroed in (True, False, None):
        model, optimizer = make()
        with gv.watch(model, optimizer, run=tmp_path / f"run{zeroed}", config=gv.Config(quiet=True)) as monitor:
            for _ in range(12):
                for _ in range(2):  # two micro-batches add up, which is as it should be
                    model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                if zeroed is not False:
                    optimizer.zero_grad(set_to_none=zeroed is None)
        stale = [f for f in monitor.findings if f.id == "stale_gradients"]
        assert bool(stale) == (zeroed is False)
        if stale:
            assert stale[0].first_step == 1
            assert "zero_grad" in stale[0].fixes[0]


def test_what_points_elsewhere_now_is_not_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finding of an earlier time that is over, and one that is open: the root of both is found later."""
    judge = Judge([make()[1]], gv.Config(), world_size=1, on_error=lambda name, error: None)
    old = Finding(id="loss_spike", severity="warning", title="a jump", first_step=3, last_step=3, found_step=3)
    now = Finding(id="loss_spike", severity="warning", title="a jump", first_step=50, found_step=50)
    root = Finding(id="lr_too_high", severity="warning", title="too high", first_step=0, found_step=60)
    steps = [[now], [old, now, root]]
    monkeypatch.setattr(judge.diagnosis, "read", lambda readings: steps.pop(0))
    for step in (50, 60):
        judge.read([Reading(step=step, time=0.0)], Layout(tensors=(), layers=(), heads=()))
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("(")[2] for line in lines] == ["loss_spike)", "lr_too_high)"]
    assert [finding.id for _, finding in judge.opened] == ["loss_spike", "lr_too_high"]
