from __future__ import annotations

from benchmarks.store import LABELS, format_store, measure_store


def test_the_measurement_runs_and_the_file_is_compact() -> None:
    found = measure_store(num_tensors=100, steps=20, series_steps=1500)
    assert found["bytes_per_value"] <= 5
    assert all(found[name] > 0 for name in LABELS)
    assert "100 tensors" in format_store(found)
