"""Question "saliency": which inputs an answer depends on, by four methods that check each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.probe.data import Names, Subject
from gradvitals.probe.opening import IGNORED, Opening, Outcome, eval_mode, predicts_own_tokens
from gradvitals.probe.verdict import item

INTEGRAL_POINTS = 32
MAX_INTEGRAL_POINTS = 256
TOLERANCE = 0.01
"""Error of integrated gradients at which no more points are needed."""

NOISE_PAIRS = 16
NOISE_SHARE = 0.15
"""Standard deviation of SmoothGrad's noise, as a share of each example's range."""

SIGNED = ("gradient_x_input", "integrated_gradients")
"""Methods whose values have a sign: they add to the answer or subtract from it."""

PICTURE_SIDE = 48
"""Pictures in the record are averaged down to this many pixels per side."""
MAX_EXAMPLES = 64
MAX_SHOWN = 6
MAX_TOKENS = 200
MAX_CLASSES = 20

Score = Callable[[Outcome], Tensor]
"""Maps an outcome to what is explained: one number, or one per example."""


def saliency_record(
    subject: Subject, batch: Any, names: Names, tick: Callable[[str], object] = lambda label: None
) -> dict[str, Any]:
    r"""Which parts of the data the answer depends on, over the first examples of a batch, in eval mode.

    With f the answer, x an example and x' = 0 the baseline:

    - gradient (Simonyan et al. 2014): :math:`\partial f/\partial x`, how steep the answer is.
    - gradient_x_input: :math:`x \, \partial f/\partial x`, its first-order share of the answer.
    - integrated_gradients (Sundararajan et al. 2017): :math:`(x-x') \int_0^1 \partial f(x'+t(x-x'))/\partial x \,
      dt`, whose sum is exactly :math:`f(x)-f(x')`.
    - smoothgrad (Smilkov et al. 2017): the mean gradient at :math:`x + n`, n normal.

    A token has one value for each method: over its embedding vector, the norm of the first and the last method's, the
    sum of the others'. docs/probe.md lists the fields.

    Raises:
        GradvitalsError: when the data have no gradient; the message says why.
    """
    batch = subject.take(batch, 0, MAX_EXAMPLES)
    with eval_mode(subject.model):
        opening = Opening(subject, batch)
        with torch.no_grad():
            start = opening.run(opening.values)
        score, explains, labels = explained(start, opening)
        tick("saliency: gradient")
        gradient, _ = opening.gradient(opening.values, score)
        tick("saliency: integrated gradients")
        integrated, completeness = integrated_gradients(opening, score)
        tick("saliency: SmoothGrad")
        smooth = smoothgrad(opening, score)
    raw = {
        "gradient": gradient,
        "gradient_x_input": gradient * opening.values,
        "integrated_gradients": integrated,
        "smoothgrad": smooth,
    }
    values = {method: _per_example(method, tensor, opening) for method, tensor in raw.items()}
    axes = _axes(subject.model, opening)
    profiles = {method: _profile(found, axes) for method, found in values.items()}
    feature_names = list(names.features) if "feature" in axes else []
    return {
        "where": opening.kind,
        "place": opening.name,
        "shape": list(values["gradient"].shape[1:]),
        "explains": explains,
        "examples": len(values["gradient"]),
        "profiles": profiles,
        "by_class": _by_class(values["integrated_gradients"], axes, labels, names),
        "tokens": _by_token(values["integrated_gradients"], opening, names),
        "shown": _shown_examples(values, opening, start.output, labels, names),
        "names": {"feature": feature_names} if feature_names else {},
        "completeness": completeness,
        "verdict": _verdict(profiles["gradient"], completeness, feature_names),
    }


def explained(start: Outcome, opening: Opening) -> tuple[Score, str, Tensor | None]:
    """Returns what is explained: a function of the outcome, its description, and the class of each example if any.

    A classifier is explained by the score of the label's class, a language model by the log-probability of the last
    token of each example, a model with one number per example by that number, and any other by the loss.
    """
    output, target = start.output, opening.target
    labels = _classes(output, target)
    if labels is not None:
        whose = "the label's class" if target is not None else "the predicted class"
        return lambda outcome: _output(outcome).gather(1, labels[:, None]).squeeze(1), f"the score of {whose}", labels
    if output is not None and output.ndim == 3 and target is not None and target.shape == output.shape[:2]:
        known = target != IGNORED
        if not target.is_floating_point() and bool(known.any()) and bool((target < output.shape[2]).all()):
            score = _last_token_score(target.to(output.device), predicts_own_tokens(target, opening.ids))
            return score, "the log-probability of the last token", None
    if output is not None and output.ndim and output.numel() == len(output):
        return lambda outcome: _output(outcome).reshape(-1), "the output", None
    return lambda outcome: outcome.loss, "the loss", None


def _output(outcome: Outcome) -> Tensor:
    assert outcome.output is not None
    return outcome.output


def _classes(output: Tensor | None, target: Tensor | None) -> Tensor | None:
    """Returns the class to explain each example by, if the output has one score per class and example."""
    if output is None or output.ndim != 2 or output.shape[1] < 2:
        return None
    if target is None:
        return output.argmax(dim=1)
    if target.is_floating_point() or target.shape != output.shape[:1]:
        return None
    in_range = bool(((target >= 0) & (target < output.shape[1])).all())
    return target.to(output.device, torch.int64) if in_range else None


def _last_token_score(target: Tensor, shifted: bool) -> Score:
    if shifted:
        target = target[:, 1:]
    known = target != IGNORED
    last = torch.where(known, torch.arange(target.shape[1], device=target.device), 0).amax(dim=1)
    rows = torch.arange(len(target), device=target.device)
    token = target[rows, last].clamp_min(0)

    def score(outcome: Outcome) -> Tensor:
        scores: Tensor = _output(outcome)[rows, last].log_softmax(dim=-1)[rows, token]
        return scores * known.any(dim=1)  # an example without any target has no last token

    return score


def integrated_gradients(
    opening: Opening, score: Score, points: int = INTEGRAL_POINTS
) -> tuple[Tensor, dict[str, float]]:
    """Returns integrated gradients from a baseline of zeros, and how well they add up.

    The integral is by Gauss-Legendre, which with n points is exact for polynomials of degree 2n - 1 along the path.
    The points double, up to 256, until the values add up to within 1 %.

    Returns:
        Values shaped as the data, and `expected` (change of the answer from the baseline), `found` (sum of the
        values) and `error` (their distance over the larger of |expected| and the sum of absolute values shown).
    """
    x = opening.values
    with torch.no_grad():
        expected = float((score(opening.run(x)) - score(opening.run(torch.zeros_like(x)))).sum())
    while True:
        places, weights = np.polynomial.legendre.leggauss(points)
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for place, weight in zip((places + 1) / 2, weights / 2, strict=True):
            total += opening.gradient(x * float(place), score)[0] * float(weight)
        parts = total * x
        # Of a token only the sum over its embedding is shown: coordinates that cancel must not hide an error.
        shown = parts.double().sum(-1) if opening.kind == "embeddings" else parts.double()
        found, size = float(shown.sum()), max(abs(expected), float(shown.abs().sum()))
        error = abs(found - expected) / size if size else 0.0
        if error <= TOLERANCE or 2 * points > MAX_INTEGRAL_POINTS:
            return parts, {"expected": expected, "found": found, "error": error}
        points *= 2


def smoothgrad(opening: Opening, score: Score, pairs: int = NOISE_PAIRS) -> Tensor:
    """Returns the mean gradient over normal noise around the data, drawn in pairs of opposite sign."""
    x = opening.values
    flat = x.reshape(len(x), -1)
    width = (flat.amax(dim=1) - flat.amin(dim=1)).reshape(-1, *[1] * (x.ndim - 1)) * NOISE_SHARE
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for _ in range(pairs):
        noise = torch.randn(x.shape, generator=generator).to(x) * width
        total += opening.gradient(x + noise, score)[0] + opening.gradient(x - noise, score)[0]
    return total / (2 * pairs)


def _per_example(method: str, tensor: Tensor, opening: Opening) -> Tensor:
    """Returns values on the host: one per token, or one per number of each example."""
    if opening.ids is not None:
        tensor = tensor.float().sum(dim=-1) if method in SIGNED else tensor.float().norm(dim=-1)
        return tensor.detach().cpu().reshape(len(opening.ids), -1)
    return _host(tensor)


def _host(tensor: Tensor) -> Tensor:
    host = tensor.detach().float().cpu()
    return host if host.ndim > 1 else host.reshape(-1, 1)


def _axes(model: nn.Module, opening: Opening) -> tuple[str, ...]:
    """Returns the meaning of each axis of an example; the last two of an image are one picture."""
    rank = opening.values.ndim - 1
    if opening.kind == "embeddings":
        return ("position",)
    if rank <= 1:
        return ("feature",)
    if rank == 2:
        convolved = any(isinstance(module, nn.Conv1d) for module in model.modules())
        return ("channel", "position") if convolved else ("position", "feature")
    between = {3: (), 4: ("frame",)}.get(rank, tuple(f"axis {at}" for at in range(2, rank - 1)))
    return ("channel", *between, "picture")


def _profile(found: Tensor, axes: tuple[str, ...]) -> dict[str, list[Any]]:
    """Returns the mean absolute value over examples and all other axes, for each axis."""
    profile: dict[str, list[Any]] = {}
    for at, axis in enumerate(axes, start=1):
        own = (at, at + 1) if axis == "picture" else (at,)
        mean = found.abs().mean(dim=[dim for dim in range(found.ndim) if dim not in own])
        profile[axis] = (_small(mean) if axis == "picture" else mean).tolist()
    return profile


def _small(picture: Tensor) -> Tensor:
    size = (min(picture.shape[0], PICTURE_SIDE), min(picture.shape[1], PICTURE_SIDE))
    return nn.functional.adaptive_avg_pool2d(picture[None, None], size)[0, 0]


def _by_class(found: Tensor, axes: tuple[str, ...], labels: Tensor | None, names: Names) -> dict[str, Any]:
    if labels is None:
        return {}
    host = labels.cpu()
    classes = host.unique().tolist()[:MAX_CLASSES]
    return {names.label(label): _profile(found[host == label], axes) for label in classes}


def _by_token(found: Tensor, opening: Opening, names: Names) -> list[dict[str, Any]]:
    """Returns the tokens with the largest mean absolute value."""
    if opening.ids is None:
        return []
    ids, place, count = opening.ids.cpu().reshape(-1).unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(ids)).index_add_(0, place, found.reshape(-1).abs()) / count
    return [
        {"id": int(ids[at]), "text": names.token(int(ids[at])), "count": int(count[at]), "score": float(mean[at])}
        for at in mean.argsort(descending=True)[:MAX_TOKENS].tolist()
    ]


def _shown_examples(
    values: dict[str, Tensor], opening: Opening, output: Tensor | None, labels: Tensor | None, names: Names
) -> list[dict[str, Any]]:
    """Returns some examples one by one, of as many classes as possible."""
    if opening.ids is None and opening.values.ndim not in (1, 2, 4):
        return []
    classes: list[Any] = [None] * len(opening.values) if labels is None else labels.tolist()
    predicted: list[Any] = classes if labels is None or output is None else output.argmax(dim=1).tolist()
    before = [classes[:row].count(label) for row, label in enumerate(classes)]
    shown = []
    for row in sorted(sorted(range(len(classes)), key=lambda row: before[row])[:MAX_SHOWN]):
        example: dict[str, Any] = {
            "index": row,
            "label": None if classes[row] is None else names.label(classes[row]),
            "predicted": None if predicted[row] is None else names.label(predicted[row]),
        }
        if opening.ids is not None:
            example["texts"] = [names.token(token) for token in opening.ids[row].reshape(-1)[:MAX_TOKENS].tolist()]
            example["scores"] = {method: found[row][:MAX_TOKENS].tolist() for method, found in values.items()}
        elif opening.values.ndim == 4:
            example["image"] = [_small(channel).tolist() for channel in _host(opening.values)[row]]
            # One number per pixel: the sum over channels, of absolute values if the sign has no meaning.
            example["scores"] = {
                method: _small((found[row] if method in SIGNED else found[row].abs()).sum(dim=0)).tolist()
                for method, found in values.items()
            }
        else:
            example["values"] = _host(opening.values)[row].tolist()
            example["scores"] = {method: found[row].tolist() for method, found in values.items()}
        shown.append(example)
    return shown


def _verdict(profile: dict[str, list[Any]], completeness: dict[str, float], names: list[str]) -> list[dict[str, Any]]:
    """Returns the verdict: inputs without influence, and integrals that do not add up."""
    found = []
    axis = next((axis for axis in ("feature", "channel") if len(profile.get(axis, ())) > 1), None)
    if axis is not None:
        scores = profile[axis]
        unused = [names[at] if at < len(names) else str(at) for at, score in enumerate(scores) if score == 0]
        if len(unused) == len(scores):
            advice = "check that the input reaches the output"
            found.append(item("critical", "saliency", "no input matters", "no answer changes with it", (), advice))
        elif unused:
            title = f"{len(unused)} of {len(scores)} {axis}s have no influence"
            detail = f"their gradient is exactly zero in every example: {', '.join(unused[:8])}"
            advice = f"check that these {axis}s reach the model and are not constant; leave them out if so"
            found.append(item("warning", "saliency", title, detail, unused, advice))
    if completeness["error"] > 0.05:
        detail = f"they sum to {completeness['found']:.3g}, the answer changes by {completeness['expected']:.3g}"
        title, advice = "integrated gradients do not add up", "read them with care: the answer has steps between"
        found.append(item("info", "saliency", title, detail, (), advice))
    return found
