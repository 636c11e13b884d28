from __future__ import annotations

from benchmarks.store import measure_store


def test_the_measurement_runs_and_the_file_is_compact():
    found = measure_store(num_tensors=100, num_metrics=10, steps=20, series_steps=1500)
    assert found["bytes_per_value"] <= 5
    assert found["dropped"] == 0
    assert all(number >= 0 for number in found.values())
