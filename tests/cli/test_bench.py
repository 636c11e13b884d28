from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.cli.bench import STORE_LABELS


@pytest.fixture
def overhead_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    from gradvitals.lab import overhead

    calls: list[dict[str, Any]] = []

    def run_overhead(*, progress: Any, **options: Any) -> dict[str, Any]:
        progress("half way")
        calls.append(options)
        return {"ratio": 1.002, "spread": float("nan")}

    monkeypatch.setattr(overhead, "run_overhead", run_overhead)
    monkeypatch.setattr(overhead, "format_overhead", lambda result: f"ratio {result['ratio']}")
    return calls


def test_overhead_passes_its_options_on(overhead_calls: list[dict[str, Any]]) -> None:
    args = ["bench", "overhead", "--device", "cpu", "--shape", "mlp", "--shape", "cnn", "--steps", "5", "--rounds", "2"]
    args += ["--variant", "default", "--variant", "bare", "--no-keep-memory"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0
    assert result.stdout == "ratio 1.002\n"
    assert result.stderr == "half way\n"
    expected = {"device": "cpu", "shapes": ("mlp", "cnn"), "variants": ("default", "bare"), "steps": 5, "rounds": 2}
    assert overhead_calls == [{**expected, "keeps_memory": False}]


def test_overhead_leaves_what_is_not_given_to_the_measurement(overhead_calls: list[dict[str, Any]]) -> None:
    result = CliRunner().invoke(main, ["bench", "overhead", "--json"])
    assert json.loads(result.stdout) == {"ratio": 1.002, "spread": "nan"}
    expected = {"device": "auto", "shapes": None, "variants": None, "steps": None, "rounds": None}
    assert overhead_calls == [{**expected, "keeps_memory": True}]


def test_the_shapes_offered_are_those_there_are() -> None:
    from gradvitals.cli.bench import SHAPES
    from gradvitals.lab import shapes

    assert set(SHAPES) == set(shapes.SHAPES)


def test_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradvitals.store import selftest

    measured = dict.fromkeys(STORE_LABELS, 0.5) | {"bytes_per_value": 4.25, "dropped": 0}
    monkeypatch.setattr(selftest, "measure_store", lambda: measured)
    shown = CliRunner().invoke(main, ["bench", "store"]).stdout
    assert "on disk, everything included" in shown
    assert "4.25 bytes a value" in shown
    assert json.loads(CliRunner().invoke(main, ["bench", "store", "--json"]).stdout)["dropped"] == 0
