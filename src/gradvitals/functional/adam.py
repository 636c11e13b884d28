"""GSNR from the two moments Adam keeps anyway. The value stands for the optimizer's batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from gradvitals.functional.distributions import Array
from gradvitals.functional.norms import double_chunks, squared_norm

if TYPE_CHECKING:
    from torch import Tensor


def adam_gsnr(
    exp_avg: Tensor, exp_avg_sq: Tensor, *, beta1: float, beta2: float, step: int, debias: bool = True
) -> float:
    r"""GSNR of one tensor from Adam's raw state: coordinates are summed first and divided after.

    With :math:`\hat m = m/(1-\beta_1^t)`, :math:`\hat v = v/(1-\beta_2^t)` and independent gradients,
    :math:`E \hat m^2 = \mu^2 + c_1 \sigma^2` and :math:`E \hat v = \mu^2 + \sigma^2`, hence

    .. math:: \hat R = \frac{\sum (\hat m^2 - c_1 \hat v)}{\sum (\hat v - \hat m^2)}, \qquad
              c_1(t) = \frac{1-\beta_1}{1+\beta_1} \cdot \frac{1+\beta_1^t}{1-\beta_1^t}

    Without the debiasing it is the proxy :math:`\sum \hat m^2 / \sum (\hat v - \hat m^2)`, which under pure noise
    does not read 0 but :math:`(1-\beta_1)/(2\beta_1)`, 0.0556 at 0.9. Both see gradients of different steps as
    samples of one: as the parameters move, the change of the mean gradient counts as noise, over the
    :math:`1/(1-\beta_2)` steps that v remembers.

    Args:
        exp_avg: m as the optimizer stores it, not bias-corrected.
        exp_avg_sq: v as the optimizer stores it, not bias-corrected.
        beta1: decay of m.
        beta2: decay of v.
        step: optimizer steps taken, t.
        debias: False for the proxy.

    Returns:
        The ratio. It is nan before step 2, where m and v hold one gradient, and for all-zero state; inf where the sum
        of v does not exceed that of m squared, which happens when the signal is far above the noise.

    Raises:
        ValueError: when a beta is not in [0, 1), or the shapes differ.

    Example:
        After many steps at beta1 = 0.6, c1 is 1/4: m of 1 and v of 2 give (1 - 0.5) / (2 - 1).

        >>> import torch
        >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
        >>> round(adam_gsnr(one, two, beta1=0.6, beta2=0.9, step=1000), 12)
        0.5

    References:
        Balles and Hennig, "Dissecting Adam: the sign, magnitude and variance of stochastic gradients", ICML 2018.
    """
    _check_shapes(exp_avg, exp_avg_sq)
    sum_v = sum(float(piece.sum()) for piece in double_chunks(exp_avg_sq.reshape(1, -1)))
    ratio = adam_gsnr_from_sums(squared_norm(exp_avg), sum_v, beta1=beta1, beta2=beta2, step=step, debias=debias)
    return float(ratio)


def adam_gsnr_from_sums(
    sum_sq_exp_avg: ArrayLike,
    sum_exp_avg_sq: ArrayLike,
    *,
    beta1: ArrayLike,
    beta2: ArrayLike,
    step: ArrayLike,
    debias: bool = True,
) -> Array:
    r"""`adam_gsnr` from the two sums of a tensor, for many tensors at once.

    Args:
        sum_sq_exp_avg: sum of squares of the raw m of each tensor.
        sum_exp_avg_sq: sum of the raw v of each tensor.
        beta1: decay of m, one or one for each tensor.
        beta2: decay of v, one or one for each tensor.
        step: optimizer steps taken, one or one for each tensor.
        debias: False for the proxy.

    Returns:
        The ratios in float64, elementwise; nan and inf as in `adam_gsnr`. With beta1 = 0 there is no averaging that
        could tell signal from noise, and the debiased ratio is nan.

    Raises:
        ValueError: when a beta is not in [0, 1).

    Example:
        >>> adam_gsnr_from_sums([1.0, 0.0], [2.0, 0.0], beta1=0.6, beta2=0.9, step=1000).round(12)
        array([0.5, nan])
    """
    signal, noise = adam_signal_and_noise(
        sum_sq_exp_avg, sum_exp_avg_sq, beta1=beta1, beta2=beta2, step=step, debias=debias
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(noise > 0, signal / noise, np.where((noise < 0) | (signal > 0), np.inf, np.nan))
    return np.where(np.isnan(signal + noise), np.nan, value)


def adam_signal_and_noise(
    sum_sq_exp_avg: ArrayLike,
    sum_exp_avg_sq: ArrayLike,
    *,
    beta1: ArrayLike,
    beta2: ArrayLike,
    step: ArrayLike,
    debias: bool = True,
) -> tuple[Array, Array]:
    r"""The two sums whose ratio is `adam_gsnr`, for those who average before they divide.

    .. math:: \sum (\hat m^2 - c_1 \hat v), \qquad \sum (\hat v - \hat m^2)

    Args and errors are those of `adam_gsnr_from_sums`.

    Returns:
        Signal and noise in float64, elementwise; signal is nan before step 2 and where beta1 is 0.

    Example:
        >>> signal, noise = adam_signal_and_noise(1.0, 2.0, beta1=0.6, beta2=0.9, step=1000)
        >>> round(float(signal), 12), round(float(noise), 12)
        (0.5, 1.0)
    """
    b1, b2, t = (np.asarray(x, dtype=np.float64) for x in (beta1, beta2, step))
    for name, beta in (("beta1", b1), ("beta2", b2)):
        if not np.all((beta >= 0) & (beta < 1)):
            raise ValueError(f"{name} is {beta.tolist()!r}; expected a decay in [0, 1), as given to the optimizer")
    t = np.where(t >= 2, t, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        m_sq = np.asarray(sum_sq_exp_avg, dtype=np.float64) / (1 - b1**t) ** 2
        v = np.asarray(sum_exp_avg_sq, dtype=np.float64) / (1 - b2**t)
        c1 = _mean_variance(b1, t)
        signal = np.where(c1 < 1, m_sq - c1 * v, np.nan) if debias else m_sq
    return signal, v - m_sq


def adam_gsnr_below_one(exp_avg: Tensor, exp_avg_sq: Tensor, *, beta1: float, beta2: float, step: int) -> float:
    r"""Share of a tensor's coordinates whose own debiased GSNR is below 1.

    .. math:: \hat r_j < 1 \iff 2 \hat m_j^2 < (1 + c_1) \hat v_j

    The right-hand form needs no division, so a coordinate whose :math:`\hat v - \hat m^2` is negative counts as one
    with plenty of signal. One coordinate is a noisy witness: read the share, not the coordinates.

    Args:
        exp_avg: raw m.
        exp_avg_sq: raw v.
        beta1: decay of m.
        beta2: decay of v.
        step: optimizer steps taken.

    Returns:
        The share among coordinates that have seen a gradient (v above 0); nan when there are none, or before step 2.

    Raises:
        ValueError: when the shapes differ.

    Example:
        >>> import torch
        >>> m, v = torch.tensor([0.1, 0.9, 0.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> adam_gsnr_below_one(m, v, beta1=0.9, beta2=0.999, step=100_000)
        0.5
    """
    _check_shapes(exp_avg, exp_avg_sq)
    if step < 2:
        return math.nan
    factor = (1 + float(_mean_variance(np.array(beta1), np.array(step)))) / (1 - beta2**step) * (1 - beta1**step) ** 2
    below = alive = 0
    pieces = zip(double_chunks(exp_avg.reshape(1, -1)), double_chunks(exp_avg_sq.reshape(1, -1)), strict=True)
    for m, v in pieces:
        below += int(((2 * m.square() < factor * v) & (v > 0)).sum())
        alive += int((v > 0).sum())
    return below / alive if alive else math.nan


def _mean_variance(beta1: Array, step: Array) -> Array:
    """c1: the variance of the bias-corrected m, in units of the variance of one gradient."""
    power = beta1**step
    result: Array = (1 - beta1) / (1 + beta1) * (1 + power) / (1 - power)
    return result


def _check_shapes(exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    if exp_avg.shape != exp_avg_sq.shape:
        raise ValueError(
            f"exp_avg has shape {tuple(exp_avg.shape)} and exp_avg_sq {tuple(exp_avg_sq.shape)}; "
            "expected the two moments of one parameter"
        )
