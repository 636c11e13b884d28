from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.store import min_max_buckets


@given(st.lists(st.floats(), max_size=60), st.integers(1, 20))
def test_no_peak_is_lost(values, buckets):
    steps = np.arange(len(values)) * 3
    found, low, high = min_max_buckets(steps, values, buckets)
    assert len(found) == len(low) == len(high) == min(buckets, len(values))
    assert np.all(np.diff(found) > 0)
    assert set(found.tolist()) <= set(steps.tolist())
    finite = [value for value in values if not np.isnan(value)]
    if finite:
        assert np.nanmin(low) == min(finite)
        assert np.nanmax(high) == max(finite)
    else:
        assert np.isnan(low).all()


def test_a_short_series_is_left_as_it_is():
    steps, low, high = min_max_buckets([1, 2], [3.0, float("nan")], 5)
    assert steps.tolist() == [1, 2]
    np.testing.assert_array_equal(low, [3.0, np.nan])
    np.testing.assert_array_equal(high, low)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="buckets"):
        min_max_buckets([1], [1.0], 0)
    with pytest.raises(ValueError, match="shape"):
        min_max_buckets([1, 2], [1.0], 3)
