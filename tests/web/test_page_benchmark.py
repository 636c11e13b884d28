"""The benchmark of the page runs whole and reports what it says. No test looks at a time."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

from benchmarks import page as bench
from benchmarks.page import BARS, format_page, main, run_page
from gradvitals.errors import GradvitalsError


@pytest.mark.browser
def test_the_page_is_measured_in_a_real_browser(browser: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOADS", "DRAWS", "NEW_STEPS"):
        monkeypatch.setattr(bench, name, 2)
    # Playwright allows one driver at a time in a thread: the one of the tests is lent.
    monkeypatch.setattr(bench, "_chromium", lambda: _Lent(browser))
    result = CliRunner().invoke(
        main, ["--steps", "3000", "--tensors", "14", "--runs", "3", "--json"], catch_exceptions=False
    )
    found = json.loads(result.stdout)
    assert all(math.isfinite(found[name]) and found[name] > 0 for name in BARS)
    assert found["memory_peak_mb"] >= found["memory_mb"]
    text = format_page(found)
    assert text.startswith("a run of 3,000 steps x 14 tensors")
    assert text.count("aim:") == len(BARS)


class _Lent:
    def __init__(self, browser: object) -> None:
        self.browser = browser

    def __enter__(self) -> object:
        return self.browser

    def __exit__(self, *_: object) -> None: ...


def test_without_a_browser_it_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.shutil, "which", lambda _: None)
    monkeypatch.delenv("GRADVITALS_CHROMIUM", raising=False)
    with pytest.raises(GradvitalsError, match="needs a Chromium"):
        run_page(steps=1000, tensors=14, runs=1)
