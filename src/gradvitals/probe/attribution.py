"""Methods of attribution: an answer of the model, shared out among the data that led to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradvitals.probe.perturb import Opening, Outcome, class_scores

IGNORED = -100  # the target that torch's cross entropy leaves out

Score = Callable[[Outcome], Tensor]
"""Makes of an outcome what is to be explained: one number, or one for each example."""


def integrated_gradients(opening: Opening, answer: Score, steps: int = 32) -> tuple[Tensor, dict[str, float]]:
    """Integrated gradients from a baseline of zeros, and how well they add up.

    Gauss-Legendre with n points is exact for polynomials of degree 2n - 1 along the path.

    Args:
        opening: where the data enter.
        answer: what is explained.
        steps: points of the integral.

    Returns:
        Values shaped as the data, and `expected` (change of the answer from the baseline), `found` (sum of the
        values) and `error` (their distance over the larger of |expected| and the sum of absolute values).
    """
    x = opening.values
    points, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        grad, _ = opening.gradient(x * float(point), answer)
        total += grad * float(weight)
    parts = total * x
    with torch.no_grad():
        change = (answer(opening.run(x)) - answer(opening.run(torch.zeros_like(x)))).sum()
    expected, found = float(change), float(parts.double().sum())
    size = max(abs(expected), float(parts.double().abs().sum()))
    return parts, {"expected": expected, "found": found, "error": abs(found - expected) / size if size else 0.0}


def smoothgrad(opening: Opening, answer: Score, draws: int = 16, spread: float = 0.15, seed: int = 0) -> Tensor:
    """Mean gradient over normal noise around the data, drawn in pairs of opposite sign.

    Args:
        opening: where the data enter.
        answer: what is explained.
        draws: pairs of noise.
        spread: standard deviation of the noise, as a share of each example's range.
        seed: of the noise.

    Returns:
        Values shaped as the data.
    """
    x = opening.values
    flat = x.reshape(len(x), -1)
    width = (flat.amax(dim=1) - flat.amin(dim=1)).reshape(-1, *[1] * (x.ndim - 1)) * spread
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for _ in range(draws):
        noise = torch.randn(x.shape, generator=generator).to(x) * width
        for signed in (noise, -noise):
            total += opening.gradient(x + signed, answer)[0]
    return total / (2 * draws)


def answer_of(start: Outcome, target: Tensor | None, tokens: Tensor | None = None) -> tuple[Score, str, Tensor | None]:
    """What is explained: as a function of the outcome, in words, and the class of each example where there are classes.

    It is the score of the label's own class for a classifier, the log-probability of the last token of each example for
    a language model, the output where there is one number an example, and otherwise the loss.

    Args:
        start: what the model gave for the data as they are.
        target: what it should have given.
        tokens: what the model was called with, where these are tokens.

    Returns:
        The function, whose sum over examples is differentiated, its name in words, and a class an example or None.
    """
    labels = class_scores(start.output, target)
    if labels is not None:
        whose = "the label's class" if target is not None else "the predicted class"
        return partial(_of_label, labels), f"the score of {whose}", labels
    output = start.output
    if output is not None and target is not None and _is_next_token(output, target):
        return partial(_of_last_token, target.to(output.device), tokens), "the log-probability of the last token", None
    if output is not None and output.ndim and output.numel() == len(output):
        return _of_output, "the output", None
    return _of_loss, "the loss", None


def predicts_own_tokens(target: Tensor, tokens: Tensor | None) -> bool:
    """Whether the targets are the model's own tokens: it then shifts them itself, and predicts the one after each.

    >>> predicts_own_tokens(torch.tensor([[-100, 5, 6]]), torch.tensor([[4, 5, 6]]))
    True
    """
    if tokens is None or target.ndim != 2 or target.shape != tokens.shape:
        return False
    return bool((target == tokens.to(target.device))[target != IGNORED].all())


def _is_next_token(output: Tensor, target: Tensor) -> bool:
    if output.ndim != 3 or target.is_floating_point() or target.shape != output.shape[:2]:
        return False
    return bool((target != IGNORED).any()) and bool((target < output.shape[2]).all())


def _of_label(labels: Tensor, outcome: Outcome) -> Tensor:
    assert outcome.output is not None
    return outcome.output.gather(1, labels[:, None]).squeeze(1)


def _of_last_token(target: Tensor, tokens: Tensor | None, outcome: Outcome) -> Tensor:
    assert outcome.output is not None
    output = outcome.output
    if predicts_own_tokens(target, tokens):
        output, target = output[:, :-1], target[:, 1:]
    known = target != IGNORED
    places = torch.arange(target.shape[1], device=target.device)
    last = torch.where(known, places, 0).amax(dim=1, keepdim=True)
    rows = torch.arange(len(target), device=target.device)[:, None]
    word = target[rows, last].clamp_min(0)
    scores = output[rows, last].log_softmax(dim=-1).gather(-1, word[..., None])
    return scores.reshape(-1) * known.any(dim=1)  # an example without any target has no last token


def _of_output(outcome: Outcome) -> Tensor:
    assert outcome.output is not None
    return outcome.output.reshape(-1)


def _of_loss(outcome: Outcome) -> Tensor:
    return outcome.loss
