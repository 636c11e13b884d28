"""Question "robustness": how little it takes to change the model's answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradvitals.probe.data import Subject
from gradvitals.probe.opening import IGNORED, Opening, Outcome, eval_mode, predicts_own_tokens
from gradvitals.probe.verdict import item

SIZES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Perturbation sizes to try, in standard deviations of the data."""
MAX_EXAMPLES = 128
PGD_STEPS = 7
NOISE_DRAWS = 3
POWER_ITERATIONS = 8


def robustness_record(
    subject: Subject, batch: Any, tick: Callable[[str], object] = lambda label: None
) -> dict[str, Any]:
    r"""Loss and accuracy under changes of the data of growing size, by chance and by intent.

    All three kinds move each value by up to :math:`\epsilon`, and differ in the direction:

    - noise: :math:`x + \epsilon s` with random signs s; the mean over a few draws.
    - fgsm (Goodfellow et al. 2015): :math:`x + \epsilon \, \mathrm{sign} \nabla_x L`, the worst change of a loss
      that is linear.
    - pgd (Madry et al. 2018): steps of :math:`2.5 \epsilon / \mathrm{steps}` in that direction, each projected back
      to within :math:`\epsilon` of x, from the FGSM point; the highest loss on the way, so never below FGSM's.

    The model runs in eval mode on the first examples of the batch. docs/probe.md lists the fields.

    Raises:
        GradvitalsError: when the data have no gradient; the message says why.
    """
    batch = subject.take(batch, 0, MAX_EXAMPLES)
    with eval_mode(subject.model):
        opening = Opening(subject, batch)
        x, target = opening.values, opening.target
        units = _units(x, columns=opening.kind == "inputs" and x.ndim == 2)
        scale = float(units[units > 0].double().median())
        grad, clean = opening.gradient(x, _loss)
        generator = torch.Generator().manual_seed(0)

        def score(outcome: Outcome) -> tuple[float, float]:
            return float(outcome.loss), accuracy(outcome.output, target, opening.ids)

        curves = {kind: [score(clean)] for kind in ("noise", "fgsm", "pgd")}
        for size in SIZES:
            tick(f"robustness: size {size:g}")
            radius = size * units
            with torch.no_grad():
                draws = [score(opening.run(noisy)) for noisy in _noise(x, radius, generator)]
            curves["noise"].append((_mean([loss for loss, _ in draws]), _mean([share for _, share in draws])))
            fgsm, worst = _attack(opening, x + radius * grad.sign(), radius)
            curves["fgsm"].append(score(fgsm))
            curves["pgd"].append(score(worst))
        tick("robustness: Lipschitz constant")
        constants = torch.tensor(lipschitz(opening, generator), dtype=torch.float64)
    sizes = [0.0, *SIZES]
    start = curves["pgd"][0][1]
    chance, error = _chance(clean.output, target, opening.ids)
    half_at = dict.fromkeys(curves, math.nan)
    if start > chance + error:
        half_at = {kind: _half_at(sizes, [share for _, share in curve], chance) for kind, curve in curves.items()}
    return {
        "where": opening.kind,
        "place": opening.name,
        "examples": len(x),
        "scale": scale,
        "relative": sizes,
        "sizes": [size * scale for size in sizes],
        "curves": {
            kind: {"loss": [loss for loss, _ in curve], "accuracy": [share for _, share in curve]}
            for kind, curve in curves.items()
        },
        # In units of `sizes`, so that a table's columns count by how far each moves.
        "slope": float((grad.double().abs() * units.double()).sum()) / scale,
        "lipschitz": {
            "median": float(constants.median()) if len(constants) else math.nan,
            "largest": float(constants.max()) if len(constants) else math.nan,
            "loss": float((grad.double() * len(x)).reshape(len(x), -1).norm(dim=1).median()),
        },
        "chance": chance,
        "half_at": half_at,
        "verdict": _verdict(start, chance, half_at),
    }


def _loss(outcome: Outcome) -> Tensor:
    return outcome.loss


def _units(x: Tensor, *, columns: bool) -> Tensor:
    """Returns one standard deviation of all values, or of each column of a table; 0 for a constant column."""
    if columns and len(x) > 1 and bool((own := x.double().std(dim=0)).any()):
        return own.to(x)
    whole = float(x.double().std()) if x.numel() > 1 else 0.0
    return x.new_tensor(whole or float(x.double().abs().mean()) or 1.0)


def _noise(x: Tensor, radius: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(NOISE_DRAWS):
        yield x + radius * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x)


def _attack(opening: Opening, first: Tensor, radius: Tensor) -> tuple[Outcome, Outcome]:
    """Returns the outcome at the first point, and the one with the highest loss on the way of PGD from there."""
    center = opening.values
    point, outcomes = first, []
    for _ in range(PGD_STEPS):
        grad, outcome = opening.gradient(point, _loss)
        outcomes.append(outcome)
        point = point + 2.5 * radius / PGD_STEPS * grad.sign()
        point = torch.minimum(torch.maximum(point, center - radius), center + radius)
    with torch.no_grad():
        outcomes.append(opening.run(point))
    return outcomes[0], max(outcomes, key=lambda outcome: float(outcome.loss))


def lipschitz(opening: Opening, generator: torch.Generator, iterations: int = POWER_ITERATIONS) -> list[float]:
    r"""Local Lipschitz constant of the output at each example: the largest singular value of its Jacobian J.

    .. math:: \sigma = \max_{\|v\|=1} \|J^\top v\|

    Power iteration: u = J'v by backward, then v = Ju by a difference of two forward passes. The value is an exact norm
    of J'v, so it is never too large; only the direction v comes from the difference.

    Returns:
        One number per example; none if the model's output is not one row per example.
    """
    x = opening.values
    with torch.no_grad():
        base = opening.run(x).output
    if base is None or base.ndim == 0 or base.numel() % len(x) or len(base) % len(x):
        return []
    rows = len(x)
    direction = _unit(torch.randn(rows, base.numel() // rows, generator=generator).to(base))
    best = torch.zeros(rows, dtype=torch.float64, device=x.device)
    reach = math.sqrt(torch.finfo(x.dtype).eps) * x.reshape(rows, -1).norm(dim=1, keepdim=True).clamp_min(1e-3)

    def flat(outcome: Outcome) -> Tensor:
        assert outcome.output is not None
        return outcome.output.reshape(rows, -1)

    for _ in range(iterations):
        u, outcome = opening.gradient(x, lambda outcome: flat(outcome) * direction)  # noqa: B023 - called at once
        best = torch.maximum(best, u.reshape(rows, -1).double().norm(dim=1))
        with torch.no_grad():
            ahead = opening.run((x.reshape(rows, -1) + reach * _unit(u.reshape(rows, -1))).reshape(x.shape))
        direction = _unit((flat(ahead) - flat(outcome)) / reach)
    found: list[float] = best.tolist()
    return found


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny)


def accuracy(output: Tensor | None, target: Tensor | None, tokens: Tensor | None = None) -> float:
    """Returns the fraction of correct answers; nan if answers cannot be correct or wrong.

    Classes are the highest score along the last axis, or the second as in torch's cross entropy; a target of -100 does
    not count. If the targets are the model's own tokens, it predicts the next one, as language models do that shift
    their labels themselves. One output per example with targets 0 and 1 is a yes-or-no question: yes is above 0, or
    above one half if all outputs are probabilities.

    Example:
        >>> accuracy(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
        0.5
    """
    found = _answers(output, target, tokens)
    return math.nan if found is None else float((found[0] == found[1]).double().mean())


def _chance(output: Tensor | None, target: Tensor | None, tokens: Tensor | None) -> tuple[float, float]:
    """Returns the accuracy of always giving the most common answer, and two standard errors of it."""
    found = _answers(output, target, tokens)
    if found is None:
        return math.nan, math.nan
    counts = found[1].unique(return_counts=True)[1].double()
    share = float(counts.max() / counts.sum())
    return share, 2 * math.sqrt(share * (1 - share) / float(counts.sum()))


def _answers(output: Tensor | None, target: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Returns the answers that count and their targets; None if they cannot be correct or wrong."""
    if output is None or target is None:
        return None
    target = target.to(output.device)
    if target.numel() == output.numel():
        if not target.numel() or not bool(((target == 0) | (target == 1)).all()):
            return None
        if (
            output.ndim == 2
            and output.shape[1] > 1
            and target.shape == output.shape
            and bool((target.sum(1) == 1).all())
        ):
            return output.argmax(1), target.argmax(1)
        middle = 0.5 if bool(((output >= 0) & (output <= 1)).all()) else 0.0
        return output.reshape(-1) > middle, target.reshape(-1) > 0.5
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


def _half_at(sizes: list[float], accuracies: list[float], chance: float) -> float:
    """Returns where the curve first crosses halfway to chance, by linear interpolation; nan if never."""
    half = (accuracies[0] + chance) / 2
    for at in range(1, len(sizes)):
        before, after = accuracies[at - 1], accuracies[at]
        if after <= half < before:
            return sizes[at - 1] + (sizes[at] - sizes[at - 1]) * (before - half) / (before - after)
    return math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _verdict(clean: float, chance: float, half_at: dict[str, float]) -> list[dict[str, Any]]:
    """Returns the verdict if a barely visible perturbation, adversarial or random, halves the accuracy above chance."""
    hostile = "adversarial training where inputs can be hostile; without it this is usual"
    for kind, severity, title, advice in (
        ("noise", "warning", "random noise breaks the model", "noise or augmentation in training"),
        ("pgd", "info", "small directed changes break the model", hostile),
    ):
        if half_at[kind] <= 0.1:
            detail = (
                f"accuracy falls from {clean:.3g} halfway to that of the most common answer, {chance:.3g}, at "
                f"{half_at[kind]:.2g} standard deviations of the data"
            )
            return [item(severity, "robustness", title, detail, (), advice)]
    return []
