"""The simulation of many workers runs, counts what it should, and is the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.distributed.simulation import NOISES, Noise, simulate, table


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_squared_norms_are_signal_and_noise(noise: Noise) -> None:
    norms = noise.norms(np.random.default_rng(0), 200, 200)
    assert np.isfinite(norms).all()
    assert norms.min() > 0
    # F-like tails of 3 degrees have the mean 3.
    expected = 1 + noise.noise * (3 if noise.tails == 3 else 1)
    assert np.mean(norms**2) == pytest.approx(expected, rel=0.2)


def test_a_clean_cell_and_one_with_a_fault() -> None:
    def run() -> list[object]:
        return list(simulate((4,), (10.0,), NOISES[1:2], audits=60, runs=3, seed=1))

    clean, faulty = records = run()
    assert records == run()
    assert (clean.audits, clean.high_alarms, clean.low_alarms, clean.scale) == (60, 0, 0, 1.0)
    assert (faulty.runs, faulty.found, faulty.named, faulty.scale) == (3, 3, 3, 10.0)
    assert 3 <= faulty.median_audits <= 6
    text = table(records)
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "0 (< 500)" in text
    assert "100 %, " in text


@pytest.mark.usefixtures("warm_spawn")
def test_several_processes_give_the_same_answer() -> None:
    def run(processes: int) -> list[object]:
        return list(simulate((3, 4), (10.0,), NOISES[1:2], audits=20, runs=1, seed=1, processes=processes))

    assert run(1) == run(2)
