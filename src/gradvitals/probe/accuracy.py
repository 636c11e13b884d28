"""Right and wrong answers, and what the commonest answer alone would get."""

from __future__ import annotations

import math

from torch import Tensor

from gradvitals.probe.attribution import IGNORED, predicts_own_tokens


def accuracy(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> float:
    """Share of right answers; nan where answers are not of a kind that is right or wrong.

    Classes are the highest score along the last axis (or the second, as torch's cross entropy has it); a target of
    -100 does not count. Where the targets are the model's own tokens, it predicts the next one, as language models
    do that shift their labels themselves. One output an example with targets 0 and 1 is a yes-or-no question: yes is
    above 0, or above one half where all outputs are probabilities.

    Args:
        output: of the model.
        target: what it should be.
        tokens: the tokens the model was called with.

    Returns:
        A number from 0 to 1, or nan.

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
        0.5
    """
    found = answers(output, target, tokens)
    return math.nan if found is None else float((found[0] == found[1]).double().mean())


def by_chance(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> tuple[float, float]:
    """What the commonest answer alone would get, and two standard errors of that, over as many answers.

    Returns:
        Both nan where answers are not right or wrong.
    """
    found = answers(output, target, tokens)
    if found is None:
        return math.nan, math.nan
    counts = found[1].unique(return_counts=True)[1]
    share, total = float(counts.max()) / float(counts.sum()), float(counts.sum())
    return share, 2 * math.sqrt(share * (1 - share) / total)


def answers(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """The answers that count, and what they should be; None where they are not of a kind that is right or wrong."""
    if output is None or target is None:
        return None
    target = target.to(output.device)
    if target.shape == output.shape or target.numel() == output.numel():
        return _yes_or_no(output, target)
    if target.is_floating_point() or output.ndim < 2:
        return None
    if output.shape[:-1].numel() == target.numel():
        answer = output.argmax(-1).reshape(target.shape)
    elif output.shape[:1] + output.shape[2:] == target.shape:
        answer = output.argmax(1)
    else:
        return None
    if predicts_own_tokens(target, tokens):
        answer, target = answer[:, :-1], target[:, 1:]
    counted = target != IGNORED
    return (answer[counted], target[counted]) if bool(counted.any()) else None


def _yes_or_no(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    if not target.numel() or not bool(((target == 0) | (target == 1)).all()):
        return None
    one_hot = output.ndim == 2 and output.shape[1] > 1 and target.shape == output.shape
    if one_hot and bool((target.sum(1) == 1).all()):
        return output.argmax(1), target.argmax(1)
    middle = 0.5 if bool(((output >= 0) & (output <= 1)).all()) else 0.0
    return output.reshape(-1) > middle, target.reshape(-1) > 0.5
