"""The verdict in Python: of a run, of a Monitor that still trains, in a test, and in a notebook."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import gradvitals as gv
from gradvitals.errors import ConfigError, RunError


def train(path: Path, steps: int = 60, *, zero: bool = True, close: bool = True) -> gv.Monitor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gv.watch(model, optimizer, run=path, config=gv.Config(quiet=True))
    for _ in range(steps):
        inputs = torch.randn(16, 4)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if zero:
            optimizer.zero_grad()
        loss.backward()
        monitor.observe(loss)
        optimizer.step()
    if close:
        monitor.close()
    return monitor


def test_a_monitor_has_the_verdict_of_its_run(tmp_path: Path) -> None:
    monitor = train(tmp_path / "run", zero=False, close=False)
    live = monitor.verdict
    assert live.live
    assert live.level in ("attention", "unhealthy")
    assert "zero_grad" in str(live.fix)
    assert live.findings[0].id == "stale_gradients"
    assert live.headline in str(live)
    assert "zero_grad" in live._repr_html_()
    monitor.close()
    assert monitor.verdict.to_json() == gv.open_run(tmp_path / "run").verdict.to_json()


def test_before_the_first_step_there_is_no_verdict(tmp_path: Path) -> None:
    monitor = train(tmp_path / "run", steps=0, close=False)
    with pytest.raises(RunError, match="no step was recorded yet"):
        _ = monitor.verdict
    monitor.close()


def test_a_monitor_shows_ten_names(tmp_path: Path) -> None:
    monitor = train(tmp_path / "run", steps=1)
    shown = [name for name in dir(monitor) if not name.startswith("_")]
    assert shown == sorted(shown)
    assert len(shown) <= 10
    assert all(hasattr(monitor, name) for name in shown)


def test_assert_healthy_passes_and_fails_with_the_cause_and_the_fix(tmp_path: Path) -> None:
    good, bad = train(tmp_path / "good"), train(tmp_path / "bad", zero=False)
    with gv.open_run(good.run_path) as run:
        assert gv.testing.assert_healthy(run).level == gv.testing.assert_healthy(good).level == "healthy"
    with pytest.raises(AssertionError) as failure:
        gv.testing.assert_healthy(bad.run_path)
    for part in (
        f"{bad.run_path} is not healthy",
        "Gradients are not zeroed",
        "Fix: ",
        "zero_grad()",
        "gradvitals doctor",
    ):
        assert part in str(failure.value)
    gv.testing.assert_healthy(bad, ignore=tuple(finding.id for finding in bad.verdict.findings))
    with pytest.raises(AssertionError, match="has 60 steps; expected 100 or more"):
        gv.testing.assert_healthy(good.verdict, min_steps=100)
    with pytest.raises(ValueError, match="fail_on is 'bad'; expected one of info, warning, critical"):
        gv.testing.assert_healthy(good, fail_on="bad")  # type: ignore[arg-type]


def test_a_failing_assertion_shows_the_line_of_the_test_alone(tmp_path: Path) -> None:
    bad = train(tmp_path / "bad", zero=False)
    lines = (
        "import gradvitals as gv",
        "def test_training_is_healthy():",
        f"    gv.testing.assert_healthy({str(bad.run_path)!r})",
    )
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_it.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "1 failed" in shown
    assert ">       gv.testing.assert_healthy(" in shown
    assert "AssertionError: " in shown
    assert "Likely cause: " in shown
    assert "testing.py" not in shown
    assert "raise AssertionError" not in shown


def test_a_folder_stands_for_the_run_that_was_to_be_kept_there(tmp_path: Path) -> None:
    """Neither closed nor in that folder, which holds an earlier run."""
    train(tmp_path / "run", steps=40)
    bad = train(tmp_path / "run", steps=40, zero=False, close=False)
    assert bad.run_path == tmp_path / "run-2"
    with pytest.raises(AssertionError, match="run-2 is not healthy"):
        gv.testing.assert_healthy(tmp_path / "run", min_steps=40)
    bad.close()
    with pytest.raises(AssertionError, match="run-2 is not healthy"):
        gv.testing.assert_healthy(tmp_path / "run")


def test_no_alerts_and_no_sinks_may_be_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gv.watch(model, optimizer, run=tmp_path / "run", sinks=None, alerts=None).close()


def test_a_notebook_card_follows_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradvitals.report.notebook import show_live

    updates: list[str] = []
    fresh = threading.Event()

    class Handle:
        def update(self, html: str) -> None:
            updates.append(html)
            fresh.set()

    fake: Any = types.ModuleType("IPython.display")
    fake.HTML = str
    fake.display = lambda html, display_id: updates.append(html) or Handle()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monitor = train(tmp_path / "run", steps=30, zero=False, close=False)
    show_live(monitor, every=0.01)
    assert fresh.wait(10)
    monitor.close()
    [card] = [thread for thread in threading.enumerate() if thread.name == "gradvitals-card"] or [None]
    if card is not None:
        card.join(10)
    assert "running, step" in updates[0]
    assert "finished, 30 steps" in updates[-1]
    assert "Fix" in updates[-1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_every": "a"}, "tensor_every is 'a'; expected a whole number of steps, 1 or more"),
        ({"tensor_every": 1.5}, "tensor_every is 1.5; expected a whole number"),
        ({"overhead_budget": "1%"}, "overhead_budget is '1%'; expected a share between 0 and 1"),
        ({"metrics": "gsnr"}, "metrics is 'gsnr'; expected a tuple of names"),
        ({"quiet": "yes"}, "quiet is 'yes'; expected True or False"),
        ({"rules": ["explosion"]}, r"rules is \['explosion'\]; expected a dict"),
        ({"rules": {"explsion": False}}, "there is no rule 'explsion'; did you mean 'explosion'?"),
        ({"rules": {"explosion": {"ratoi": 3}}}, "rule 'explosion' has no setting 'ratoi'; did you mean 'ratio'?"),
        ({"include": 3}, "include is 3; expected a regular expression"),
        ({"include": "("}, "include"),
        ({"gsnr_window": 1}, "gsnr_window"),
        ({"window_steps": 5}, "window_steps"),
        ({"metrics": ("grad/nrom",)}, "metrics"),
        ({"sources": ("rank",)}, "sources"),
        ({"micro_batch_weights": "tokens"}, "micro_batch_weights"),
    ],
)
def test_a_wrong_setting_is_reported_where_it_is_made(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        gv.Config(**settings)


def test_every_setting_is_documented() -> None:
    text = gv.Config.__doc__ or ""
    assert [name for name in gv.Config.__dataclass_fields__ if f"\n        {name}: " not in text] == []


def test_a_sink_by_its_name_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = f"jsonl:{tmp_path / 'readings.jsonl'}"
    with gv.watch(model, optimizer, run=tmp_path / "run", sinks=sink, config=gv.Config(quiet=True)):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert (tmp_path / "readings.jsonl").exists()
