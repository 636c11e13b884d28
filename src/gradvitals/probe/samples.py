"""Per-example gradients: which examples agree with the others, and which stand out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradvitals.collect.reductions import accumulator
from gradvitals.errors import GradvitalsError
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.norms import squared_norm
from gradvitals.probe.data import Subject, map_tensors, tensors_of
from gradvitals.probe.gradients import Stream, gradients, noise_scale_of
from gradvitals.probe.state import same_randomness
from gradvitals.types import FloatArray

SEEDS_A_BATCH = 1_000_003


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

    Batch norm takes its running statistics, as in eval mode: with those of the batch, one example's gradient would
    depend on the others.

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

    def freeze_batch_norm(self) -> list[str]:
        """Make batch norm use its running statistics. Returns the names of the modules that this changes."""
        frozen = []
        for name, module in self.subject.model.named_modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                module.eval()
                frozen.append(name)
        return frozen

    def chunks(self, batch: Any, size: int, number: int = 0) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yields, for some examples at a time, their losses `[n]` and gradients `[n, ...]` for each parameter.

        Random numbers are those of the batch's number and the place in it: another pass draws the same.
        """
        start = 0
        whole = self.subject.size(batch)
        per_example = [leaf.dim() > 0 and leaf.shape[0] == whole for leaf in tensors_of(batch)]
        while start < size:
            stop = min(start + self.chunk, size)
            part = self.subject.take(batch, start, stop)
            seed = SEEDS_A_BATCH * number + start
            if self.method == "vmap":
                try:
                    with same_randomness(seed):
                        found = self._by_vmap(part, per_example)
                    yield found
                    start = stop
                    continue
                except torch.cuda.OutOfMemoryError:
                    if self.chunk == 1:
                        raise
                    self.chunk = max(1, self.chunk // 2)
                    continue
                except Exception as error:  # vmap raises errors of many types
                    self.method, self.why = "loop", self._reason(error)
            with same_randomness(seed):
                found = self._by_loop(part, stop - start)
            yield found
            start = stop

    def _by_vmap(self, batch: Any, per_example: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        module = _Loss(self.subject)
        leaves = tensors_of(batch)
        mapped = [0 if own else None for own in per_example]

        def loss_of_one(parameters: dict[str, Tensor], *of_one: Tensor) -> Tensor:
            fed = iter([leaf if dim is None else leaf.unsqueeze(0) for leaf, dim in zip(of_one, mapped, strict=True)])
            one = map_tensors(batch, lambda _: next(fed))
            loss: Tensor = torch.func.functional_call(module, parameters, (one,))
            return loss

        both = torch.func.vmap(torch.func.grad_and_value(loss_of_one), in_dims=(None, *mapped), randomness="different")
        fixed = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        with warnings.catch_warnings():
            # Without a batching rule, as for a recurrent layer, vmap loops and warns.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found, losses = both(fixed, *leaves)
        return losses.detach(), [found[name] for name in fixed]

    def _by_loop(self, batch: Any, size: int) -> tuple[Tensor, list[Tensor]]:
        losses, rows = [], []
        for i in range(size):
            loss = self.subject.loss(self.subject.take(batch, i, i + 1))
            losses.append(loss.detach())
            rows.append(self._whole(gradients(loss, list(self.parameters.values()))))
        return torch.stack(losses), [torch.stack(column) for column in zip(*rows, strict=True)]

    def _reason(self, error: Exception) -> str:
        """Returns why vmap failed, and a workaround if one is known."""
        text = (str(error) or type(error).__name__).strip().splitlines()[0].removeprefix("vmap: ")
        if ".item()" in text or "data-dependent" in text:
            text = "the model, or its loss, looks at values to decide what to do"
        attention = getattr(getattr(self.subject.model, "config", None), "_attn_implementation", None)
        way_out = "; a model made with attn_implementation='eager' may do" if attention not in (None, "eager") else ""
        return (text if len(text) <= 160 else text[:157] + "...") + way_out

    def _whole(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [
            torch.zeros_like(p) if grad is None else grad.to_dense() if grad.is_sparse else grad
            for grad, p in zip(grads, self.parameters.values(), strict=True)
        ]


MOST_NAMED = 10
FEWEST = 5
"""The fewest examples of a class to have a median of its own; rarer classes are compared with all examples."""

FAR = 3.0
"""Tukey's outer fence: an outlier is this many interquartile ranges above the upper quartile."""


def excess_losses(losses: Sequence[float], targets: Sequence[int | None]) -> FloatArray:
    """Returns the loss of each example above the median of its class, or of all if there are no classes.

    Example:
        >>> excess_losses([1.0, 1.0, 2.0, 5.0], [None] * 4).tolist()
        [-0.5, -0.5, 0.5, 3.5]
    """
    values = np.array(losses, dtype=np.float64)
    usual = np.full(len(values), _median(values))
    labels = np.array([math.nan if target is None else target for target in targets], dtype=np.float64)
    for label in np.unique(labels[np.isfinite(labels)]):
        own = labels == label
        if np.isfinite(values[own]).sum() >= FEWEST:
            usual[own] = _median(values[own])
    found: FloatArray = values - usual
    return found


def standing_out(excess: FloatArray, norms: FloatArray) -> NDArray[np.bool_]:
    """Returns which examples have an outlying loss, and loss and gradient above the root mean square of all.

    The latter, since where a model has learnt nearly all, an example may be far out that it has right.
    """
    return (excess > _fence(excess)) & (excess > _root_mean_square(excess)) & (norms > _root_mean_square(norms))


def add_examples(record: dict[str, Any], label: Callable[[int], str] = str) -> None:
    """Add the lists of single examples to the record of `samples`; `label` returns the name of a class."""
    norms, cosines = np.array(record["norms"]), np.array(record["cosines"])
    excess = excess_losses(record["losses"], record["targets"])
    # Non-finite examples come first among the suspects; those without a direction last among the contrary.
    order = np.argsort(-np.nan_to_num(excess, nan=np.inf), kind="stable")
    odd = standing_out(excess, norms)
    record["standing_out"] = [int(i) for i in order if odd[i]]
    rows = _rows(record, excess, label)
    orders = {
        "suspects": order,
        "largest": np.argsort(-np.nan_to_num(norms, nan=np.inf), kind="stable"),
        "contrary": np.argsort(np.nan_to_num(cosines, nan=np.inf), kind="stable"),
    }
    for key, found in orders.items():
        record[key] = [rows(int(i)) for i in found[:MOST_NAMED]]


def _rows(record: dict[str, Any], excess: FloatArray, label: Callable[[int], str]) -> Callable[[int], dict[str, Any]]:
    usual = _median(np.array(record["norms"]))

    def row(i: int) -> dict[str, Any]:
        target = record["targets"][i]
        return {
            "index": i,
            "dataset_index": record["dataset_indices"][i],
            "batch": record["places"][i][0],
            "position": record["places"][i][1],
            "norm": record["norms"][i],
            "norm_over_median": record["norms"][i] / usual if usual > 0 else math.nan,
            "cosine": record["cosines"][i],
            "loss": record["losses"][i],
            "excess_loss": float(excess[i]),
            "target": target,
            "label": None if target is None else label(target),
        }

    return row


def _median(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _root_mean_square(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return math.sqrt(float(np.mean(finite**2))) if len(finite) else math.inf


def _fence(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.inf
    low, high = np.quantile(finite, [0.25, 0.75])
    return float(high + FAR * (high - low))


BINS = 20
USUAL = 256
"""The default number of examples."""


def osgr(gsnr: float, train_size: float) -> float:
    r"""One-step generalization ratio from the aggregate GSNR of one example.

    .. math:: \frac{R}{R + 1/n}

    Args:
        gsnr: R, debiased; what is below 0 counts as 0.
        train_size: n, examples in the training set.

    Returns:
        Between 0 and 1: which share of a small step's gain on the training set is also had on new data.

    Example:
        >>> osgr(0.01, 100)
        0.5
    """
    signal = max(gsnr, 0.0) if not math.isnan(gsnr) else math.nan
    if math.isinf(signal):
        return 1.0
    return signal / (signal + 1 / train_size)


def samples_record(
    subject: Subject,
    parameters: dict[str, nn.Parameter],
    batches: Sequence[Any],
    *,
    most: int = USUAL,
    memory_limit: int = 1 << 29,
    train_size: int | None = None,
    indices: Callable[[int, int], Sequence[int | None]] = lambda batch, size: [None] * size,
    label: Callable[[int], str] = str,
    tick: Callable[[str], object] = lambda label: None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the answer as a plain record, and notes on what differs from the request.

    Args:
        subject: The model and its loss; batch norm is set to eval mode and left so.
        parameters: By name.
        batches: Those to take examples from, in the loader's order.
        most: Examples to look at.
        memory_limit: Bytes for the gradients that are held at once.
        train_size: Examples of the training set; None where it is not known.
        indices: Gives, for the number of a batch and its size, the places of its examples in the data set.
        label: Gives the name of a class.
        tick: Called after each batch.
    """
    reader = PerExample(subject, parameters, memory_limit)
    frozen = reader.freeze_batch_norm()
    parts = _first_examples(subject, batches, most)
    count = sum(size for _, _, size in parts)
    if count < 2:
        raise GradvitalsError(f"{count} example was found; expected 2 or more to compare examples with each other")
    stream, votes = Stream(list(parameters.values()), count), _Votes(list(parameters.values()))
    losses: list[float] = []
    held: list[list[Tensor]] | None = [] if count <= reader.chunk else None
    for number, batch, size in parts:
        for chunk_losses, grads in reader.chunks(batch, size, number):
            losses += chunk_losses.double().tolist()
            for i in range(len(chunk_losses)):
                stream.add([grad[i] for grad in grads])
            votes.add(grads)
            if held is not None:
                held.append(grads)
        tick("examples")
    inner = _inner_products(reader, parts, votes, held, tick)
    rows = list(range(len(parameters)))
    total, *each = stream.gsnr([rows, *([row] for row in rows)])
    norms = np.sqrt(np.square(np.array(stream.norms)).sum(axis=1))
    cosines = cosines_with_the_others(np.array(inner), votes.norm_of_sum())
    targets = [target for _, batch, size in parts for target in _targets(subject, batch, size)]
    sizes = [subject.size(batch) for batch in batches]
    places = [[number, i] for number, _, size in parts for i in range(size)]
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
        **dict(zip(("osgr", "osgr_low", "osgr_high"), _osgr(total, n), strict=True)),
        "train_size": n,
        "tensors": [_tensor(name, gsnr, n) for name, gsnr in zip(parameters, each, strict=True)],
        "norms": norms.tolist(),
        "losses": losses,
        "cosines": cosines.tolist(),
        "places": places,
        "dataset_indices": [found for number, _, size in parts for found in indices(number, sizes[number])[:size]],
        "targets": targets,
        "histogram": _histogram(cosines),
    }
    add_examples(record, label)
    return record, _notes(reader, frozen, train_size, count, most)


def cosines_with_the_others(inner: Any, norm_of_sum: float) -> Any:
    r"""Cosine of each example's gradient with the mean direction of all others.

    With directions :math:`u_i = g_i/\|g_i\|` and their sum U, that of the others is :math:`U - u_i`: an example is not
    compared with itself. Each has one vote, however long its gradient is: once a model has learnt, the mean of
    gradients as they are is made by the few examples that it has wrong, and the others seem to point against it.

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


class _Votes:
    """The sum of gradient directions, one per row."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.sum = [torch.zeros(p.shape, dtype=accumulator(p.dtype), device=p.device) for p in parameters]

    def add(self, grads: Sequence[Tensor]) -> None:
        """Add the gradients of some examples; zero or non-finite ones have no direction."""
        norms = row_norms(grads)
        known = (norms > 0) & norms.isfinite()
        for total, grad in zip(self.sum, grads, strict=True):
            rows = grad[known].flatten(1).to(total.dtype)
            total += ((1 / norms[known]).to(total.dtype) @ rows).view(total.shape)

    def inner(self, grads: Sequence[Tensor]) -> list[float]:
        """Returns the cosine of each direction with the sum."""
        products = torch.stack(
            [g.flatten(1).to(total.dtype) @ total.flatten() for g, total in zip(grads, self.sum, strict=True)]
        ).double()
        found: list[float] = (products.sum(0) / row_norms(grads)).tolist()
        return found

    def norm_of_sum(self) -> float:
        """Returns the length of the sum."""
        return math.sqrt(sum(squared_norm(total) for total in self.sum))


def row_norms(grads: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each example's gradient over all parameters, in float64."""
    each = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in grads])
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    return norms


def _first_examples(subject: Subject, batches: Sequence[Any], most: int) -> list[tuple[int, Any, int]]:
    """(number of the batch, batch, examples in it) until there are enough."""
    parts: list[tuple[int, Any, int]] = []
    left = most
    for number, raw in enumerate(batches):
        if left <= 0:
            break
        batch = subject.move(raw)
        size = min(subject.size(batch), left)
        parts.append((number, subject.take(batch, 0, size), size))
        left -= size
    return parts


def _inner_products(
    reader: PerExample,
    parts: Sequence[tuple[int, Any, int]],
    votes: _Votes,
    held: list[list[Tensor]] | None,
    tick: Callable[[str], object],
) -> list[float]:
    """Returns the cosine of each example with the sum, from a second pass if not all gradients fit in memory."""
    found = [value for grads in held or () for value in votes.inner(grads)]
    if held is None:
        for number, batch, size in parts:
            for _, grads in reader.chunks(batch, size, number):
                found += votes.inner(grads)
            tick("examples, second pass")
    return found


def _osgr(gsnr: Estimate, n: int) -> tuple[float, float, float]:
    return osgr(gsnr.value, n), osgr(gsnr.low, n), osgr(gsnr.high, n)


def _tensor(name: str, gsnr: Estimate, n: int) -> dict[str, Any]:
    return {"name": name, "gsnr": gsnr.value, "low": gsnr.low, "high": gsnr.high, "osgr": osgr(gsnr.value, n)}


def _targets(subject: Subject, batch: Any, size: int) -> list[int | None]:
    """Returns the class of each example, if it has one."""
    target = subject.target(batch)
    if isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point() and len(target) == size:
        return [int(value) for value in target.tolist()]
    return [None] * size


def _histogram(cosines: Any) -> dict[str, list[float]]:
    counts, edges = np.histogram(cosines[np.isfinite(cosines)], bins=BINS, range=(-1.0, 1.0))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _notes(reader: PerExample, frozen: list[str], train_size: int | None, count: int, most: int) -> list[str]:
    notes = []
    if count < most and most != USUAL and (train_size is None or count < train_size):
        notes.append(f"samples: {count} of {most} examples: the batches read had no more; n_batches reads more")
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        notes.append(
            f"samples: batch norm ({frozen[0]}{more}) took its running statistics, since with those of the batch one "
            "example's gradient depends on the others"
        )
    if reader.method == "loop":
        notes.append(f"samples: gradients were taken one example at a time, since vmap could not: {reader.why}")
    if train_size is None:
        notes.append(f"samples: the size of the training set is not known; OSGR is for the {count} examples seen")
    return notes
