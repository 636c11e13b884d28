"""Question "samples": which single examples agree with the others, and which stand out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradvitals.collect.reductions import accumulator
from gradvitals.diagnose.history import finite_median
from gradvitals.errors import GradvitalsError
from gradvitals.format import listed
from gradvitals.functional.norms import squared_norm
from gradvitals.probe.data import Subject, map_tensors, tensors_of
from gradvitals.probe.gradients import Stream, gradients, noise_scale_of
from gradvitals.probe.state import same_randomness
from gradvitals.types import FloatArray

SEED_STRIDE = 1_000_003
"""Distance between the random seeds of two batches."""

MAX_NAMED = 10
BINS = 20
DEFAULT_EXAMPLES = 256

MIN_PER_CLASS = 5
"""The fewest examples of a class to have a median of its own; rarer classes are compared with all examples."""

FENCE = 3.0
"""Tukey's outer fence: an outlier is this many interquartile ranges above the upper quartile."""


class _Loss(nn.Module):
    """The loss as a module, so that `functional_call` can give the model other parameters."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        self.subject = subject

    def forward(self, batch: Any) -> Tensor:
        return self.subject.loss(batch)


class PerExample:
    """Gradients of single examples: by `torch.func.vmap` if the model supports it, else one by one.

    Args:
        subject: The model and its loss.
        parameters: By name, as in `model.named_parameters()`.
        memory_limit: Bytes that the gradients of one chunk may take, together with about as much for the pass.
    """

    def __init__(self, subject: Subject, parameters: dict[str, nn.Parameter], memory_limit: int) -> None:
        self.subject, self.parameters = subject, parameters
        size = sum(p.numel() * p.element_size() for p in parameters.values())
        self.chunk = max(1, memory_limit // (2 * max(1, size)))
        self.method, self.why = "vmap", ""

    def chunks(self, batch: Any, size: int, number: int = 0) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yields, for some examples at a time, their losses `[n]` and gradients `[n, ...]` for each parameter.

        The random numbers follow from the batch's number and the place in it: another pass draws the same.
        """
        start = 0
        whole = self.subject.size(batch)
        per_example = [leaf.dim() > 0 and leaf.shape[0] == whole for leaf in tensors_of(batch)]
        while start < size:
            stop = min(start + self.chunk, size)
            part = self.subject.take(batch, start, stop)
            try:
                with same_randomness(SEED_STRIDE * number + start):
                    found = self._by_vmap(part, per_example) if self.method == "vmap" else self._by_loop(part)
            except torch.cuda.OutOfMemoryError:
                if self.chunk == 1:
                    raise
                self.chunk = max(1, self.chunk // 2)
                continue
            except Exception as error:  # vmap raises errors of many types
                if self.method == "loop":
                    raise
                self.method, self.why = "loop", self._reason(error)
                continue
            yield found
            start = stop

    def _by_vmap(self, batch: Any, per_example: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        module = _Loss(self.subject)
        dims = [0 if own else None for own in per_example]

        def loss_of_one(parameters: dict[str, Tensor], *leaves: Tensor) -> Tensor:
            fed = iter([leaf if dim is None else leaf.unsqueeze(0) for leaf, dim in zip(leaves, dims, strict=True)])
            one = map_tensors(batch, lambda _: next(fed))
            loss: Tensor = torch.func.functional_call(module, parameters, (one,))
            return loss

        both = torch.func.vmap(torch.func.grad_and_value(loss_of_one), in_dims=(None, *dims), randomness="different")
        fixed = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        with warnings.catch_warnings():
            # Without a batching rule, as for a recurrent layer, vmap loops and warns.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found, losses = both(fixed, *tensors_of(batch))
        return losses.detach(), [found[name] for name in fixed]

    def _by_loop(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        losses, rows = [], []
        for i in range(self.subject.size(batch)):
            loss = self.subject.loss(self.subject.take(batch, i, i + 1))
            losses.append(loss.detach())
            rows.append(gradients(loss, list(self.parameters.values())))
        return torch.stack(losses), [torch.stack(column) for column in zip(*rows, strict=True)]

    def _reason(self, error: Exception) -> str:
        """Returns why vmap failed, and a workaround if one is known."""
        text = (str(error) or type(error).__name__).strip().splitlines()[0].removeprefix("vmap: ")
        if ".item()" in text or "data-dependent" in text:
            text = "the model, or its loss, looks at values to decide what to do"
        attention = getattr(getattr(self.subject.model, "config", None), "_attn_implementation", None)
        way_out = "; attn_implementation='eager' may help" if attention not in (None, "eager") else ""
        return (text if len(text) <= 160 else text[:157] + "...") + way_out


def samples_record(
    subject: Subject,
    parameters: dict[str, nn.Parameter],
    batches: Sequence[Any],
    *,
    most: int = DEFAULT_EXAMPLES,
    memory_limit: int = 1 << 29,
    train_size: int | None = None,
    indices: Callable[[int, int], Sequence[int | None]] = lambda batch, size: [None] * size,
    label: Callable[[int], str] = str,
    tick: Callable[[str], object] = lambda label: None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the answer as a plain record, and notes on what differs from the request.

    Batch norm is left in eval mode: with the statistics of the batch, one example's gradient would depend on the
    others. `indices` maps the number of a batch and its size to the places of its examples in the data set.
    """
    frozen = _freeze_batch_norm(subject.model)
    parts: list[tuple[int, Any, int]] = []
    for number, raw in enumerate(batches):
        batch = subject.move(raw)
        size = min(subject.size(batch), most - sum(size for _, _, size in parts))
        if size > 0:
            parts.append((number, subject.take(batch, 0, size), size))
    count = sum(size for _, _, size in parts)
    if count < 2:
        raise GradvitalsError(f"{count} example was found; expected 2 or more to compare examples with each other")
    reader = PerExample(subject, parameters, memory_limit)
    stream, directions = Stream(list(parameters.values()), count), _Directions(list(parameters.values()))
    losses: list[float] = []
    held: list[list[Tensor]] | None = [] if count <= reader.chunk else None
    for number, batch, size in parts:
        for chunk_losses, grads in reader.chunks(batch, size, number):
            losses += chunk_losses.double().tolist()
            stream.extend(grads)
            directions.add(grads)
            if held is not None:
                held.append(grads)
        tick("examples")
    inner = [value for grads in held or () for value in directions.inner(grads)]
    if held is None:  # not all gradients fit in memory
        for number, batch, size in parts:
            for _, grads in reader.chunks(batch, size, number):
                inner += directions.inner(grads)
            tick("examples, second pass")
    rows = list(range(len(parameters)))
    total, *each = stream.gsnr([rows, *([row] for row in rows)])
    norms = np.sqrt(np.square(np.array(stream.norms, dtype=np.float64)).sum(axis=1))
    cosines = cosines_with_the_others(np.array(inner), math.sqrt(sum(squared_norm(one) for one in directions.sum)))
    histogram, edges = np.histogram(cosines[np.isfinite(cosines)], bins=BINS, range=(-1.0, 1.0))
    n = train_size or count
    record = {
        "method": reader.method,
        "why": reader.why,
        "examples": count,
        "chunk": reader.chunk if reader.method == "vmap" else 1,
        "gsnr": total.value,
        "low": total.low,
        "high": total.high,
        **noise_scale_of(total, 1),
        "osgr": osgr(total.value, n),
        "osgr_low": osgr(total.low, n),
        "osgr_high": osgr(total.high, n),
        "train_size": n,
        "tensors": [
            {"name": name, "gsnr": gsnr.value, "low": gsnr.low, "high": gsnr.high, "osgr": osgr(gsnr.value, n)}
            for name, gsnr in zip(parameters, each, strict=True)
        ],
        "norms": norms.tolist(),
        "losses": losses,
        "cosines": cosines.tolist(),
        "places": [[number, i] for number, _, size in parts for i in range(size)],
        "dataset_indices": [
            found for number, _, size in parts for found in indices(number, subject.size(batches[number]))[:size]
        ],
        "targets": [target for _, batch, size in parts for target in _targets(subject, batch, size)],
        "histogram": {"edges": edges.tolist(), "counts": histogram.tolist()},
    }
    _add_example_lists(record, label)
    notes = []
    if count < most and most != DEFAULT_EXAMPLES and (train_size is None or count < train_size):
        notes.append(f"samples: {count} of {most} examples: the batches had no more; n_batches reads more")
    if frozen:
        notes.append(
            f"samples: batch norm ({listed(frozen, 1)}) used its running statistics, since with those of the batch one "
            "example's gradient depends on the others"
        )
    if reader.method == "loop":
        notes.append(f"samples: gradients were taken one example at a time, since vmap failed: {reader.why}")
    if train_size is None:
        notes.append(f"samples: the size of the training set is not known; OSGR is for the {count} examples seen")
    return record, notes


def _freeze_batch_norm(model: nn.Module) -> list[str]:
    """Make batch norm use its running statistics. Returns the names of the modules that this changes."""
    frozen = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            module.eval()
            frozen.append(name)
    return frozen


def _targets(subject: Subject, batch: Any, size: int) -> list[int | None]:
    """Returns the class of each example, if it has one."""
    target = subject.target(batch)
    if isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point() and len(target) == size:
        return [int(value) for value in target.tolist()]
    return [None] * size


def osgr(gsnr: float, train_size: float) -> float:
    r"""One-step generalization ratio from the aggregate GSNR of one example.

    .. math:: \frac{R}{R + 1/n}

    Args:
        gsnr: R, debiased; a value below 0 counts as 0.
        train_size: n, examples in the training set.

    Returns:
        Between 0 and 1: the share of a small step's gain on the training set that carries over to new data.

    Example:
        >>> osgr(0.01, 100)
        0.5
    """
    signal = max(gsnr, 0.0) if not math.isnan(gsnr) else math.nan
    return 1.0 if math.isinf(signal) else signal / (signal + 1 / train_size)


class _Directions:
    """The sum of the directions of gradients, whatever their length."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.sum = [torch.zeros(p.shape, dtype=accumulator(p.dtype), device=p.device) for p in parameters]

    def add(self, grads: Sequence[Tensor]) -> None:
        """Add the gradients of some examples; zero or non-finite ones have no direction."""
        norms = _norms(grads)
        known = (norms > 0) & norms.isfinite()
        for total, grad in zip(self.sum, grads, strict=True):
            rows = grad[known].reshape(-1, total.numel()).to(total.dtype)
            total += ((1 / norms[known]).to(total.dtype) @ rows).view(total.shape)

    def inner(self, grads: Sequence[Tensor]) -> list[float]:
        """Returns the inner product of each direction with the sum."""
        products = torch.stack(
            [g.reshape(len(g), -1).to(total.dtype) @ total.flatten() for g, total in zip(grads, self.sum, strict=True)]
        ).double()
        found: list[float] = (products.sum(0) / _norms(grads)).tolist()
        return found


def _norms(grads: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each example's gradient over all parameters, in float64."""
    each = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1, dtype=torch.float64) for g in grads])
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    return norms


def cosines_with_the_others(inner: Any, norm_of_sum: float) -> Any:
    r"""Cosine of each example's gradient with the mean direction of all others.

    With directions :math:`u_i = g_i/\|g_i\|` and their sum U, that of the others is :math:`U - u_i`: an example is not
    compared with itself. Each has one vote, however long its gradient is: once a model has learned, a few wrong
    examples dominate the mean of the raw gradients, and the others seem to point against it.

    Args:
        inner: :math:`\langle u_i, U \rangle`, `[n]`; nan for an example without a direction.
        norm_of_sum: :math:`\|U\|`.

    Example:
        Two gradients at a right angle; U is (1, 1).

        >>> cosines_with_the_others(np.array([1.0, 1.0]), 2**0.5).tolist()
        [0.0, 0.0]
    """
    square = norm_of_sum**2 - 2 * inner + 1
    # If the others cancel out, only rounding is left, which has no direction.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(square > 1e-9, np.clip((inner - 1) / np.sqrt(np.maximum(square, 0.0)), -1.0, 1.0), math.nan)


def excess_losses(losses: Sequence[float], targets: Sequence[int | None]) -> FloatArray:
    """Returns the loss of each example above the median of its class, or of all if there are no classes.

    Example:
        >>> excess_losses([1.0, 1.0, 2.0, 5.0], [None] * 4).tolist()
        [-0.5, -0.5, 0.5, 3.5]
    """
    values = np.array(losses, dtype=np.float64)
    usual = np.full(len(values), finite_median(values))
    labels = np.array([math.nan if target is None else target for target in targets], dtype=np.float64)
    for label in np.unique(labels[np.isfinite(labels)]):
        own = labels == label
        if np.isfinite(values[own]).sum() >= MIN_PER_CLASS:
            usual[own] = finite_median(values[own])
    found: FloatArray = values - usual
    return found


def standing_out(excess: FloatArray, norms: FloatArray) -> Any:
    """Returns which examples have an outlying loss, and loss and gradient above the root mean square of all.

    The second condition matters once a model has learned nearly all: an example that it has right may be far out.
    """
    finite = excess[np.isfinite(excess)]
    if not len(finite):
        return np.zeros(len(excess), dtype=bool)
    low, high = np.quantile(finite, [0.25, 0.75])
    fence = high + FENCE * (high - low)
    return (excess > fence) & (excess > _root_mean_square(excess)) & (norms > _root_mean_square(norms))


def _add_example_lists(record: dict[str, Any], label: Callable[[int], str]) -> None:
    """Add the lists of single examples to the record of `samples`."""
    norms, cosines = np.array(record["norms"]), np.array(record["cosines"])
    excess, median = excess_losses(record["losses"], record["targets"]), finite_median(norms)
    # Non-finite examples come first among the suspects; those without a direction last among the contrary.
    orders = {
        "suspects": np.argsort(-np.nan_to_num(excess, nan=np.inf), kind="stable"),
        "largest": np.argsort(-np.nan_to_num(norms, nan=np.inf), kind="stable"),
        "contrary": np.argsort(np.nan_to_num(cosines, nan=np.inf), kind="stable"),
    }
    odd = standing_out(excess, norms)
    record["standing_out"] = [int(i) for i in orders["suspects"] if odd[i]]
    for key, order in orders.items():
        record[key] = [
            {
                "index": i,
                "dataset_index": record["dataset_indices"][i],
                "batch": record["places"][i][0],
                "position": record["places"][i][1],
                "norm": record["norms"][i],
                "norm_over_median": record["norms"][i] / median if median > 0 else math.nan,
                "cosine": record["cosines"][i],
                "loss": record["losses"][i],
                "excess_loss": float(excess[i]),
                "target": (target := record["targets"][i]),
                "label": None if target is None else label(target),
            }
            for i in map(int, order[:MAX_NAMED])
        ]


def _root_mean_square(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return math.sqrt(float(np.mean(finite**2))) if len(finite) else math.inf
