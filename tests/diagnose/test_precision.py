"""Gradients at the end of float16."""

from __future__ import annotations

import numpy as np
from by_hand import Run, healthy_run, layout_of, only

from gradvitals.diagnose import RunInfo


def small(factor: float, dtype: str = "float16") -> Run:
    run = healthy_run(60)
    run.layout = layout_of(dtype)
    run.scale_gradient(slice(None), np.full(60, factor))
    return run


def test_gradients_near_the_smallest_number_of_float16() -> None:
    finding = only(small(1e-6).findings("precision_underflow"))
    assert finding.severity == "warning"
    assert finding.found_step < 10
    assert len(finding.tensors) == 8
    assert "no loss scale" in finding.causes[0]
    assert "bfloat16" in finding.fixes[0]


def test_the_same_numbers_are_fine_in_other_types() -> None:
    assert small(1e-6, "float32").findings("precision_underflow") == []
    assert small(1e-6, "bfloat16").findings("precision_underflow") == []
    assert small(1.0).findings("precision_underflow") == []


def test_autocast_counts_as_float16() -> None:
    run = small(1e-6, "float32")
    run.info = RunInfo(autocast="float16")
    assert only(run.findings("precision_underflow")).severity == "warning"


def test_small_gradients_with_many_zeros_count_and_rows_that_are_rarely_used_do_not() -> None:
    run = small(1e-3)
    assert run.findings("precision_underflow") == []
    run.tensors["grad/zero_fraction"] = np.zeros((60, 8))
    run.tensors["grad/zero_fraction"][:, 2] = 0.7
    assert only(run.findings("precision_underflow")).tensors == ("layers.1.weight",)
    run = small(1.0)
    run.tensors["grad/zero_fraction"] = np.full((60, 8), 0.9)
    assert run.findings("precision_underflow") == []


def test_under_a_loss_scale_small_readings_are_no_sign() -> None:
    run = small(1e-6)
    run.stage = "unscaled"
    assert run.findings("precision_underflow") == []
    run.tensors["grad/zero_fraction"] = np.full((60, 8), 0.8)
    run.scale_gradient(slice(None), np.full(60, 1e-3))
    assert "loss scale became too small" in only(run.findings("precision_underflow")).causes[0]
