"""Monte-Carlo coverage of the 95 % interval of `gsnr`.

``PYTHONPATH=src python tests/functional/test_coverage.py`` prints the whole table, as `docs/estimators.md` shows it.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from gradvitals.functional import gsnr, gsnr_interval
from gradvitals.functional.gsnr import _shape_of_noise, _sums


def _ar_spectrum(rho, n):
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.sort(np.linalg.eigvalsh(rho**lags))[::-1]


SPECTRA = {
    "one": np.ones(1),
    "four": np.ones(4),
    "many": np.ones(200),
    "ar": _ar_spectrum(0.95, 100),
    "low rank": np.concatenate([[10.0, 5.0, 2.0], np.full(60, 0.02)]),
    "spiked": np.concatenate([[10.0], np.full(300, 0.1)]),
}
"""Eigenvalues of the noise covariance; the law of the statistics does not depend on the basis."""

SIGNALS = [("none", 0.0), ("spread", 0.1), ("spread", 1.0), ("spread", 10.0), ("top", 0.1), ("top", 1.0), ("top", 10.0)]
"""Direction of the mean gradient, and its GSNR: all over the spectrum, or along the largest noise."""


def mean_gradient(spectrum, direction, value):
    size = len(spectrum)
    mean = np.eye(size)[0] if direction == "top" else np.random.default_rng(3).standard_normal(size)
    return mean * np.sqrt(value * spectrum.sum() / (mean @ mean))


def coverage(spectrum, direction, value, num_samples, repetitions, seed, noise="gauss"):
    """Share of repetitions whose interval holds the true value.

    It is `gsnr` step by step, except that the intervals of all repetitions are solved for at once.
    """
    rng = np.random.default_rng(seed)
    mean = mean_gradient(spectrum, direction, value)
    ratio, dimension, alignment, heaviness = np.empty((4, repetitions))
    for i in range(repetitions):
        shape = (num_samples, len(spectrum))
        draws = rng.standard_normal(shape) if noise == "gauss" else rng.standard_t(5, shape) / np.sqrt(5 / 3)
        sums = _sums(torch.from_numpy(mean + draws * np.sqrt(spectrum)))
        ratio[i] = num_samples * (num_samples - 1) * sums.sq_norm_of_mean / sums.spread
        dimension[i], alignment[i], heaviness[i] = _shape_of_noise(sums, num_samples)
    low, high = gsnr_interval(ratio, dimension, alignment, num_samples, heaviness)
    return float(np.mean((low <= value) & (value <= high)))


def test_the_shortcut_is_gsnr():
    x = torch.randn(8, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    sums = _sums(x)
    dimension, alignment, heaviness = _shape_of_noise(sums, 8)
    low, high = gsnr_interval(8 * 7 * sums.sq_norm_of_mean / sums.spread, dimension, alignment, 8, heaviness)
    estimate = gsnr(x)
    assert (estimate.low, estimate.high) == (pytest.approx(float(low)), pytest.approx(float(high)))


@pytest.mark.parametrize("num_samples", [8, 100])
@pytest.mark.parametrize(
    ("kind", "direction", "value"),
    [
        ("one", "none", 0.0),
        ("one", "spread", 0.1),
        ("one", "spread", 1.0),
        ("four", "none", 0.0),
        ("four", "spread", 1.0),
        ("many", "none", 0.0),
        ("many", "spread", 1.0),
        ("ar", "none", 0.0),
        ("ar", "top", 1.0),
        ("low rank", "none", 0.0),
        ("low rank", "spread", 1.0),
        ("low rank", "top", 1.0),
    ],
)
def test_interval_holds_the_truth_in_95_percent(kind, direction, value, num_samples):
    share = coverage(SPECTRA[kind], direction, value, num_samples, repetitions=500, seed=num_samples)
    assert 0.92 <= share <= 0.98


@pytest.mark.parametrize("num_samples", [8, 20])
@pytest.mark.parametrize("kind", ["ar", "low rank", "spiked"])
def test_interval_is_not_too_short_for_a_weak_signal_in_correlated_noise(kind, num_samples):
    # Here it errs on the long side: docs/estimators.md has the numbers.
    assert coverage(SPECTRA[kind], "spread", 0.1, num_samples, repetitions=300, seed=1) >= 0.93


def test_heavy_tails_are_allowed_for():
    # Without the allowance it is 76 %.
    assert coverage(SPECTRA["many"], "spread", 10.0, 100, repetitions=300, seed=2, noise="t5") >= 0.92


def print_table(repetitions):
    heads = [f"{direction} {value:g}" if value else "no signal" for direction, value in SIGNALS]
    print("| noise | effective dimensions | T | " + " | ".join(heads) + " |")
    print("|---" * (3 + len(heads)) + "|")
    rows = [(name, spectrum, "gauss") for name, spectrum in SPECTRA.items()]
    rows += [(f"{name}, Student t noise", SPECTRA[name], "t5") for name in ("one", "many")]
    for name, spectrum, noise in rows:
        for num_samples in (4, 8, 20, 100):
            shares = [
                coverage(spectrum, direction, value, num_samples, repetitions, seed=0, noise=noise)
                if len(spectrum) > 1 or direction != "top"
                else None
                for direction, value in SIGNALS
            ]
            cells = ["" if share is None else f"{100 * share:.1f}" for share in shares]
            dimensions = spectrum.sum() ** 2 / (spectrum**2).sum()
            print(f"| {name} | {dimensions:.1f} | {num_samples} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    print_table(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
