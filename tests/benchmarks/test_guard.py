"""What guarding costs is measured on runs that are really guarded, and quiet."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.guard import VARIANTS, format_guarding, run_guarding
from gradvitals import bench


@pytest.mark.slow
def test_every_variant_is_timed_beside_bare_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "mlp", partial(bench.mlp, micro_batch_size=8, width=64))
    result = run_guarding("cpu", ["mlp"], steps=12, rounds=1)
    (shape,) = result["shapes"]
    assert set(shape["variants"]) == set(VARIANTS)
    assert shape["snapshots"] >= 1
    ratios = {name: found["ratio"] for name, found in shape["variants"].items()}
    assert shape["guard_over_monitor"]["ratio"] == pytest.approx(ratios["guard"] / ratios["monitor"])
    text = format_guarding(result)
    assert "guard over monitor" in text
    assert "a snapshot costs" in text
