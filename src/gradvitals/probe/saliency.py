"""Which inputs an answer depends on: integrated gradients, SmoothGrad and checks of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.errors import expect
from gradvitals.probe.data import Names
from gradvitals.probe.perturb import Opening, Outcome, Sample, Where, at_rest, class_scores, first_examples
from gradvitals.probe.verdict import item
from gradvitals.types import FloatArray

if TYPE_CHECKING:
    from gradvitals.probe.data import Subject

ENOUGH = 0.01
"""Error of integrated gradients at which no more points are needed."""
MOST_POINTS = 256

IGNORED = -100  # the target that torch's cross entropy ignores

Score = Callable[[Outcome], Tensor]
"""Maps an outcome to what is explained: one number, or one per example."""


def integrated_gradients(opening: Opening, answer: Score, steps: int = 32) -> tuple[Tensor, dict[str, float]]:
    """Returns integrated gradients from a baseline of zeros, and how well they add up.

    Gauss-Legendre with n points is exact for polynomials of degree 2n - 1 along the path.

    Args:
        opening: where the data enter.
        answer: what is explained.
        steps: points of the integral; twice as many, up to 256, until the values add up to within 1%.

    Returns:
        Values shaped as the data, and `expected` (change of the answer from the baseline), `found` (sum of the
        values) and `error` (their distance over the larger of |expected| and the sum of absolute values shown).
    """
    x = opening.values
    with torch.no_grad():
        change = (answer(opening.run(x)) - answer(opening.run(torch.zeros_like(x)))).sum()
    expected = float(change)
    while True:
        points, weights = np.polynomial.legendre.leggauss(steps)
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            grad, _ = opening.gradient(x * float(point), answer)
            total += grad * float(weight)
        parts = total * x
        # Of a token only the sum over its embedding is shown: coordinates that cancel must not hide an error.
        shown = parts.double().sum(-1) if opening.kind == "embeddings" else parts.double()
        found, size = float(shown.sum()), max(abs(expected), float(shown.abs().sum()))
        error = abs(found - expected) / size if size else 0.0
        if error <= ENOUGH or 2 * steps > MOST_POINTS:
            return parts, {"expected": expected, "found": found, "error": error}
        steps *= 2


def smoothgrad(opening: Opening, answer: Score, draws: int = 16, spread: float = 0.15, seed: int = 0) -> Tensor:
    """Returns the mean gradient over normal noise around the data, drawn in pairs of opposite sign.

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
    """Returns what is explained: a function of the outcome, its description, and the class of each example if any.

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
    """Whether the targets are the model's own tokens: it then shifts them itself and predicts the next one.

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


Method = Literal["gradient", "gradient_x_input", "integrated_gradients", "smoothgrad"]
METHODS: tuple[Method, ...] = ("gradient", "gradient_x_input", "integrated_gradients", "smoothgrad")
SIGNED = ("gradient_x_input", "integrated_gradients")
"""Methods whose values have a sign: they add to the answer or subtract from it."""

PICTURE_SIDE = 48
"""Pictures in the record are averaged down to this many pixels per side."""
MOST_EXAMPLES = 64
_MOST_TOKENS = 200
_MOST_CLASSES = 20


@dataclass(frozen=True, kw_only=True)
class Saliency:
    """How much each part of the data moves the model's answer, over a batch of examples."""

    where: str
    """`inputs`, or `embeddings` for data made of tokens."""
    place: str
    """Name of the argument or of the embedding."""
    shape: tuple[int, ...]
    """Of one example: features, (channels, rows, columns), or positions for tokens."""
    explains: str
    """What was differentiated, in words."""
    examples: int
    profiles: dict[str, dict[str, FloatArray]]
    """By method and axis (`feature`, `channel`, `position`, ...): mean absolute value over examples and other axes.
    An image also has `picture`, rows by columns."""
    by_class: dict[str, dict[str, FloatArray]]
    """By class and axis: the integrated gradients of its own score, over the examples of the class."""
    tokens: list[dict[str, Any]]
    """For tokens: `id`, `text`, `count` and mean absolute `score` (integrated gradients), the strongest first."""
    shown: list[dict[str, Any]]
    """Some examples one by one: `label`, `predicted`, `scores` by method, and the data: `image`, `values` or
    `texts`."""
    names: dict[str, list[str]]
    """By axis, the names of its entries, if known."""
    completeness: dict[str, float]
    """Whether integrated gradients sum to the change of the answer from the baseline, as they must: `expected` is that
    change, `found` their sum, and `error` the distance of the two over the larger of |expected| and the sum of
    absolute values."""
    verdict: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Returns the record as nested dicts and lists."""
        plain: dict[str, Any] = _listed(asdict(self))
        return plain


def examine_saliency(
    subject: Subject, batch: Any, *, tick: Callable[[str], object] = lambda words: None, names: Names | None = None
) -> dict[str, Any]:
    """Returns the saliency of a batch's first examples, as the plain record that `gv.probe` keeps.

    Args:
        subject: the model and how its batches are read.
        batch: one batch, on the model's device.
        tick: told what is being done.
        names: what features, classes and tokens are called.

    Returns:
        The fields of `Saliency`.
    """
    some = subject.take(batch, 0, MOST_EXAMPLES) if subject.size(batch) > MOST_EXAMPLES else batch
    target = subject.target(some)
    known = target if isinstance(target, Tensor) else None
    return saliency(
        subject.model, Sample(loss=lambda: subject.loss(some), target=known), tick=tick, names=names
    ).record()


def saliency(
    model: nn.Module,
    sample: Sample,
    *,
    where: Where = "auto",
    steps: int = 32,
    draws: int = 16,
    spread: float = 0.15,
    seed: int = 0,
    names: Names | None = None,
    tick: Callable[[str], object] = lambda words: None,
) -> Saliency:
    r"""Which parts of the data the answer depends on, by four methods.

    With f the answer, x an example and x' = 0 the baseline:

    - gradient (Simonyan et al. 2014): :math:`\partial f/\partial x`, how steep the answer is.
    - gradient_x_input: :math:`x \, \partial f/\partial x`, its first-order share of the answer.
    - integrated_gradients (Sundararajan et al. 2017): :math:`(x-x') \int_0^1 \partial f(x'+t(x-x'))/\partial x \,
      dt`, whose sum is exactly :math:`f(x)-f(x')`; the integral by Gauss-Legendre, and the record says how far off
      the sum is.
    - smoothgrad (Smilkov et al. 2017): the mean gradient at :math:`x + n`, n normal with a standard deviation of
      `spread` times the range of the example; drawn in pairs n, -n, so that what is odd in n cancels.

    The answer is what `attribution.answer_of` says: for a classifier, the score of the label's own class. The model
    is asked in eval mode, and left as it was.

    A token has one value for each method: over its embedding vector, the norm of the first and the last method's,
    the sum of the others'.

    Args:
        model: any module.
        sample: a batch as its loss and its targets.
        where: which data to look at; see `perturb.Opening`.
        steps: points of the integral.
        draws: pairs of noise for SmoothGrad.
        spread: its noise, as a share of each example's range.
        seed: of that noise; the global random numbers are not touched.
        names: what features, classes and tokens are called.
        tick: told what is being done.

    Returns:
        The record.

    Raises:
        CannotPerturb: where the data have no gradient; the message says why.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> x, y = torch.tensor([[1.0, 3.0]]), torch.zeros(1, 1)
        >>> found = saliency(model, Sample(loss=lambda: nn.functional.mse_loss(model(x), y), target=y))
        >>> found.explains, found.profiles["integrated_gradients"]["feature"].round(3).tolist()
        ('the output', [2.0, 6.0])
    """
    expect(steps >= 1, "steps", steps, "1 or more points of the integral")
    expect(draws >= 1, "draws", draws, "1 or more pairs of noise")
    expect(spread >= 0, "spread", spread, "0 or a share of the range")
    with at_rest(model):
        opening = Opening(model, sample, where)
        with torch.no_grad():
            start = opening.run(opening.values)
        answer, explains, labels = answer_of(start, sample.target, opening.ids)
        tick("saliency: gradient")
        plain, _ = opening.gradient(opening.values, answer)
        tick("saliency: integrated gradients")
        integrated, completeness = integrated_gradients(opening, answer, steps)
        tick("saliency: SmoothGrad")
        smooth = smoothgrad(opening, answer, draws, spread, seed)
    raw = {
        "gradient": plain,
        "gradient_x_input": plain * opening.values,
        "integrated_gradients": integrated,
        "smoothgrad": smooth,
    }
    tokens = opening.kind == "embeddings"
    values = {
        method: _per_token(method, tensor, opening) if tokens else _rows(tensor) for method, tensor in raw.items()
    }
    axes = _axes(model, opening)
    names = names or Names()
    profiles = {method: _profile(found, axes) for method, found in values.items()}
    of_class = _by_class(values["integrated_gradients"], axes, labels, names)
    feature_names = list(names.features) if "feature" in axes else []
    return Saliency(
        where=opening.kind,
        place=opening.name,
        shape=tuple(values["gradient"].shape[1:]),
        explains=explains,
        examples=len(values["gradient"]),
        profiles=profiles,
        by_class=of_class,
        tokens=_by_token(values["integrated_gradients"], opening, names),
        shown=_shown(values, opening, start.output, labels, names),
        names={"feature": feature_names} if feature_names else {},
        completeness=completeness,
        verdict=_verdict(profiles["gradient"], completeness, feature_names),
    )


def _rows(tensor: Tensor) -> Tensor:
    """Returns values on the host, with at least one axis besides that of the examples."""
    host = tensor.detach().float().cpu()
    return host if host.ndim > 1 else host.reshape(-1, 1)


def _per_token(method: str, tensor: Tensor, opening: Opening) -> Tensor:
    assert opening.ids is not None
    folded = tensor.float().sum(dim=-1) if method in SIGNED else tensor.float().norm(dim=-1)
    return folded.detach().cpu().reshape(len(opening.ids), -1)


def _axes(model: nn.Module, opening: Opening) -> tuple[str, ...]:
    """Returns the meaning of each axis of an example; the last two of an image are one picture."""
    rank = opening.values.ndim - 1
    if opening.kind == "embeddings" or rank <= 1:
        return ("position",) if opening.kind == "embeddings" else ("feature",)
    if rank == 2:
        convolved = any(isinstance(module, nn.Conv1d) for module in model.modules())
        return ("channel", "position") if convolved else ("position", "feature")
    if rank == 3:
        return ("channel", "picture")
    return ("channel", *(("frame",) if rank == 4 else tuple(f"axis {at}" for at in range(2, rank - 1))), "picture")


def _profile(found: Tensor, axes: tuple[str, ...]) -> dict[str, FloatArray]:
    strength = found.abs()
    profile: dict[str, FloatArray] = {}
    for at, axis in enumerate(axes, start=1):
        others = [dim for dim in range(found.ndim) if dim != at and not (axis == "picture" and dim == at + 1)]
        mean = strength.mean(dim=others)
        profile[axis] = (_small(mean) if axis == "picture" else mean).numpy()
    return profile


def _by_class(
    found: Tensor, axes: tuple[str, ...], labels: Tensor | None, names: Names
) -> dict[str, dict[str, FloatArray]]:
    if labels is None:
        return {}
    host = labels.cpu()
    classes = host.unique().tolist()[:_MOST_CLASSES]
    return {names.label(label): _profile(found[host == label], axes) for label in classes}


def _by_token(found: Tensor, opening: Opening, names: Names) -> list[dict[str, Any]]:
    if opening.ids is None:
        return []
    ids, place, count = opening.ids.cpu().reshape(-1).unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(ids)).index_add_(0, place, found.reshape(-1).abs()) / count
    best = mean.argsort(descending=True)[:_MOST_TOKENS].tolist()
    return [
        {"id": int(ids[at]), "text": names.token(int(ids[at])), "count": int(count[at]), "score": float(mean[at])}
        for at in best
    ]


def _shown(
    values: dict[str, Tensor],
    opening: Opening,
    output: Tensor | None,
    labels: Tensor | None,
    names: Names,
    most: int = 6,
) -> list[dict[str, Any]]:
    predicted = output.argmax(dim=1).tolist() if labels is not None and output is not None else None
    kinds = labels.tolist() if labels is not None else [None] * len(opening.values)
    shown = []
    for row in first_examples(range(len(kinds)), most, of=lambda row: kinds[row]):
        example: dict[str, Any] = {
            "index": row,
            "label": None if kinds[row] is None else names.label(kinds[row]),
            "predicted": None if predicted is None else names.label(predicted[row]),
        }
        if opening.ids is not None:
            ids = opening.ids[row].reshape(-1)[:_MOST_TOKENS].tolist()
            example["texts"] = [names.token(token) for token in ids]
            example["scores"] = {method: found[row][:_MOST_TOKENS].numpy() for method, found in values.items()}
        elif opening.values.ndim == 4:
            example["image"] = torch.stack([_small(channel) for channel in _rows(opening.values)[row]]).numpy()
            example["scores"] = {method: _map(method, found[row]) for method, found in values.items()}
        elif opening.values.ndim <= 2:
            example["values"] = _rows(opening.values)[row].numpy()
            example["scores"] = {method: found[row].numpy() for method, found in values.items()}
        else:
            continue
        shown.append(example)
    return shown


def _map(method: str, found: Tensor) -> FloatArray:
    """Returns one number per pixel: the sum over channels, of absolute values if the sign has no meaning."""
    array: FloatArray = _small(found.sum(dim=0) if method in SIGNED else found.abs().sum(dim=0)).numpy()
    return array


def _small(picture: Tensor) -> Tensor:
    size = (min(picture.shape[0], PICTURE_SIDE), min(picture.shape[1], PICTURE_SIDE))
    return nn.functional.adaptive_avg_pool2d(picture[None, None], size)[0, 0]


def _verdict(profile: dict[str, FloatArray], completeness: dict[str, float], names: list[str]) -> list[dict[str, Any]]:
    """Returns the verdict: inputs that nothing depends on, and integrals that do not add up."""
    found = []
    axis = next((axis for axis in ("feature", "channel") if axis in profile and len(profile[axis]) > 1), None)
    if axis is not None:
        scores = profile[axis]
        unused = [names[at] if at < len(names) else str(at) for at in np.flatnonzero(scores == 0)]
        if not scores.any():
            advice = "check that the input reaches the output"
            found.append(item("critical", "saliency", "no input matters", "no answer changes with it", (), advice))
        elif unused:
            found.append(
                item(
                    "warning",
                    "saliency",
                    f"{len(unused)} of {len(scores)} {axis}s have no influence",
                    f"their gradient is exactly zero in every example looked at: {', '.join(unused[:8])}",
                    unused,
                    f"check that these {axis}s reach the model and are not constant; leave them out if so",
                )
            )
    if completeness["error"] > 0.05:
        detail = f"they sum to {completeness['found']:.3g}, the answer changes by {completeness['expected']:.3g}"
        title, advice = "integrated gradients do not add up", "read them with care: the answer has steps between"
        found.append(item("info", "saliency", title, detail, (), advice))
    return found


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_listed(item) for item in value]
    return value
