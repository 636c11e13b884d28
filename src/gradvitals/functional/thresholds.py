"""Thresholds on the norm that follow from the learning rate alone: a start where a run has no history yet."""

from __future__ import annotations


def is_vanishing(norm: float, lr: float, factor: float = 1e-10) -> bool:
    r"""Whether a plain gradient step would move the weights by less than `factor`.

    .. math:: \|g\| < \mathrm{factor} / \mathrm{lr}

    The rule is not scale-free: the size of the weights does not enter it.

    Args:
        norm: norm of the gradient of a tensor.
        lr: learning rate.
        factor: smallest step worth the name.

    Returns:
        The answer; False for a nan norm, and at a learning rate of 0, where no step says anything about the gradient.

    Raises:
        ValueError: when `lr` is negative.

    Example:
        >>> is_vanishing(1e-8, lr=1e-3), is_vanishing(1e-6, lr=1e-3)
        (True, False)
    """
    return _check(lr) > 0 and norm < factor / lr


def is_exploding(norm: float, lr: float, factor: float = 1.0) -> bool:
    r"""Whether a plain gradient step would move the weights by more than `factor`.

    .. math:: \|g\| > \mathrm{factor} / \mathrm{lr}

    Args:
        norm: norm of the gradient of a tensor.
        lr: learning rate.
        factor: largest step that can be right.

    Returns:
        The answer; True for an infinite norm, False for a nan one (`grad/nonfinite` counts those) and at a learning
        rate of 0.

    Raises:
        ValueError: when `lr` is negative.

    Example:
        >>> is_exploding(2000.0, lr=1e-3), is_exploding(10.0, lr=1e-3)
        (True, False)
    """
    return _check(lr) > 0 and norm > factor / lr


def _check(lr: float) -> float:
    if lr < 0:
        raise ValueError(f"lr is {lr!r}; expected a learning rate of 0 or above")
    return lr
