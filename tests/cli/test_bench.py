from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from gradvitals.cli import main


@pytest.fixture
def overhead_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    from gradvitals import bench

    calls: list[dict[str, Any]] = []

    def run_overhead(*, progress: Any, **options: Any) -> dict[str, Any]:
        progress("half way")
        calls.append(options)
        return {"ratio": 1.002, "spread": float("nan")}

    monkeypatch.setattr(bench, "run_overhead", run_overhead)
    monkeypatch.setattr(bench, "format_overhead", lambda result: f"ratio {result['ratio']}")
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


def test_the_shapes_and_variants_offered_are_those_there_are() -> None:
    from gradvitals import bench
    from gradvitals.cli.bench import SHAPES, VARIANTS

    assert set(SHAPES) == set(bench.SHAPES)
    assert VARIANTS == bench.VARIANTS
