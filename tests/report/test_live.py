from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from gradvitals.report.live import DemoLines, Panel, live_view

LATEST = {"grad/norm": 1.5, "gsnr": 0.25, "noise_scale": 64.0, "noise_scale_low": 50.0, "noise_scale_high": 90.0}


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), width=100, **options)  # type: ignore[arg-type]


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_panel_shows_progress_and_all_three_lines() -> None:
    panel = Panel(total=10)
    for step in range(1, 6):
        panel.update(step, 4.0 / step, LATEST)
    screen = console()
    screen.print(panel)
    shown = printed(screen)
    for part in ("step 5/10", "loss", "0.8", "gradient norm", "1.5", "GSNR", "0.25", "64 (50 to 90) samples", "█"):
        assert part in shown


def test_panel_before_the_first_step_and_without_values() -> None:
    panel = Panel(total=3)
    screen = console()
    screen.print(panel)
    panel.update(1, math.nan, {})
    screen.print(panel)
    assert "not identifiable yet" in printed(screen)


def test_plain_lines_come_now_and_then_and_at_a_spike() -> None:
    screen = console()
    lines = DemoLines(screen, total=120)
    for step in range(1, 121):
        lines.update(step, 2.0, LATEST | {"grad/spike_ratio": 9.0 if step == 77 else 1.0})
    shown = printed(screen).splitlines()
    assert 10 < len(shown) < 16
    assert [line for line in shown if "jumped" in line] == [
        "step   77/120  the gradient norm jumped to 1.5, 9 times its moving average"
    ]


@pytest.mark.parametrize(("environment", "plain"), [({"CI": "true"}, True), ({"TERM": "dumb"}, True), ({}, False)])
def test_the_view_suits_the_place(environment: dict[str, str], plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = Console(file=io.StringIO(), width=100, force_terminal=True)
    with live_view(screen, 3) as view:
        view.update(1, 2.0, LATEST)
        assert isinstance(view, DemoLines) == plain


def test_no_terminal_no_control_codes() -> None:
    screen = console()
    with live_view(screen, 3) as view:
        view.update(1, 2.0, LATEST)
    assert "\x1b" not in printed(screen)
