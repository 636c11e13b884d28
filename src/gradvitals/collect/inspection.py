"""A look at the batches where bugs show: what the model is fed, what it puts out, and the loss that meets it.

All of it is read from the graph of the loss when backward starts. ``torch.autograd.backward`` is wrapped for the first
steps, for those due for a detailed reading, and while gradients are not finite. Numbers stay on their device and leave
with the step.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradvitals.collect.graph import (
    ATTENTION,
    LOOKUPS,
    MAX_SAMPLES,
    NORMS,
    RECURRENT,
    SOFTMAX,
    Graph,
    Head,
    comes_from,
    compares_places,
    feeds_data,
    inputs_of,
    is_op,
    sampled,
    saved,
    shape_of,
    softmax_dims,
)
from gradvitals.collect.parameters import ParameterTable
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.collect.wrapper import Wrapper, is_compiled
from gradvitals.metrics import INSPECTED

PLACES = {name: place for place, name in enumerate(INSPECTED)}
"""Place of each number in the journal."""
LATER = ("head/purity", "target/nonfinite", "target/purity", "target/dominant")
"""Facts about the targets that are still read after the first steps."""

FIRST_STEPS = 10
"""Steps from the start that are inspected."""
DRAWN_AGAIN = 6
"""Copies of the same batch in a row that are no coincidence."""
MAX_COLUMNS = 4096
"""Input columns that are compared with the target."""
MANY_MORE = 4
"""Times as many samples that a script has, at least, if a batch is only a part of them."""
MAX_TENSORS = 10_000
MAX_COMPARED = 1 << 20
"""Tensors, and rows or elements of them, that are looked through for many more samples."""
TELLING = 8
"""Columns that a row is looked for by first: those that differ most."""
HARD = ("ReluBackward", "ThresholdBackward")
SOFT = ("SigmoidBackward", "TanhBackward")
FEWEST_PLACES = 32
"""Places of a batch, at least, at which labels and ids do not coincide by chance."""
FEW_PLACES = 4
"""Places that attention chooses from, at least, for its choice to say something."""


class Inspection:
    """Inspects the batches of a model, from `arm` to the backward pass of the next step.

    Args:
        table: The watched parameters.
        buffer: Returns the buffer of the step in progress.
        on_error: Called with what could not be read, once, and the error.
    """

    def __init__(
        self,
        table: ParameterTable,
        buffer: Callable[[], ReadingBuffer],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self._table, self._buffer, self._on_error = table, buffer, on_error
        self.is_armed = False
        """Whether the next backward pass is inspected."""
        self._has_hooks = False
        """Whether saved tensors are packed by someone's hooks: to look at them may compute the forward pass again."""
        self._first = False
        self._counts: Tensor | None = None
        self._sums: tuple[Tensor, Tensor, int] | None = None
        self._hidden: dict[int, int] | None = None
        """Version counters of tensors that no known optimizer holds."""
        self._failed = False
        self._lost: set[str] = set()
        """Groups of numbers that an unusual graph has made fail: not read again."""
        self._held: tuple[Tensor, float, int] | None = None
        """Input of the first layer at the last inspected step, its checksum, and how often it was drawn again."""

    def arm(self, *, first: bool) -> None:
        """Inspect the next backward pass.

        Args:
            first: Look at everything; else only at activations, inputs and targets.
        """
        if self._failed:
            return
        self._first = first
        if not self.is_armed:
            self.is_armed = True
            _BACKWARD.add(self)
            if not is_compiled():  # which may trace through the hooks of a checkpoint
                _SAVED_HOOKS.add(self)

    def disarm(self) -> None:
        """Inspect nothing until it is armed again."""
        self.is_armed = False
        _BACKWARD.discard(self)
        _SAVED_HOOKS.discard(self)

    def before_backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        """Look at the graph of a loss."""
        if self.is_armed:
            self._look(tensors)

    def before_saved_hooks(self, *_: Any) -> None:
        """Note that the script packs saved tensors."""
        self._has_hooks = True

    @torch.no_grad()
    def look_at_broken(self, loss: Tensor) -> None:
        """Count the broken values in the batch of a loss that is not finite, before backward frees its graph."""
        if self._has_hooks or is_compiled() or loss.grad_fn is None:  # reading what a checkpoint saved runs its forward
            return
        graph = Graph(loss.grad_fn, {id(parameter): row for row, parameter in enumerate(self._table.parameters)})
        entry = next((layer for layer in reversed(graph.layers) if feeds_data(layer)), None) if graph.is_ours else None
        if entry is None:
            return
        head = Head(graph)
        if (targets := head.targets) is not None and (broken := ~targets.isfinite()).any():
            self._write({"target/nonfinite": broken.sum()})
        data = None if is_op(entry, LOOKUPS) else saved(entry, "mat1", "input", "self")
        if data is not None:
            wanted = head.labels if targets is None else targets
            batch = len(wanted) if wanted is not None and wanted.dim() else 0
            self._write(_broken_numbers(data, is_image=_is_image(entry, data), batch=batch))

    def state_dict(self) -> dict[str, Any]:
        """Returns what is known of the targets so far."""
        counts, sums = self._counts, self._sums
        return {
            "counts": None if counts is None else counts.tolist(),
            "sums": None if sums is None else (sums[0].tolist(), sums[1].tolist(), sums[2]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        counts, sums = state["counts"], state["sums"]
        device = self._table.parameters[0].device
        self._counts = None if counts is None else torch.tensor(counts, device=device)
        if sums is not None:
            self._sums = torch.tensor(sums[0], device=device), torch.tensor(sums[1], device=device), sums[2]

    def _look(self, tensors: Any) -> None:
        root = tensors if isinstance(tensors, Tensor) else None
        try:
            if root is None or root.numel() != 1 or self._has_hooks:
                return
            if root.grad_fn is not None:
                with torch.no_grad():
                    self._inspect(root)
            elif self._first and root.requires_grad and not isinstance(root, nn.Parameter):
                self._write({"head/reached": -1.0})  # nothing computed it: backward ends where it starts
        except Exception as error:  # an unusual graph: not inspected, and the backward pass continues
            self._failed = True
            self.disarm()
            self._on_error("inspection", error)

    def _inspect(self, loss: Tensor) -> None:
        table = self._table
        graph = Graph(loss.grad_fn, {id(parameter): row for row, parameter in enumerate(table.parameters)})
        if not graph.is_ours:  # the loss of another model; one of ours may follow
            if self._first:
                self._write({"head/reached": 0.0})
            return
        self.disarm()
        entries = [layer for layer in reversed(graph.layers) if feeds_data(layer)]
        entry = entries[0] if entries else None
        head = functools.cache(lambda: Head(graph))
        found: dict[str, Tensor | float] = {"head/reached": 1.0} if self._first else {}
        groups: dict[str, Callable[[], dict[str, Tensor | float]]] = {
            "inputs": lambda: _input_numbers(entry),
            "activations": lambda: self._read_activations(graph),
            "targets": lambda: self._target_numbers(head()),
            "modes": lambda: _mode_numbers(table.model, graph, first=self._first),
        }
        if self._first:
            groups |= {
                "head": lambda: head().numbers(maximizes=self._maximizes()),
                "body": lambda: head().body_numbers(),
                "text": lambda: _text_numbers(entries, head(), graph),
                "leak": lambda: _leak_numbers(entry, head()),
                "layers": lambda: self._layer_numbers(graph),
                "mixing": lambda: _mixing_numbers(graph, head()),
                "padding": lambda: self._padding_numbers(graph, entry),
                "time": lambda: {"body/time_first": float(self._reads_samples_as_time(graph, head()))},
                "again": lambda: (
                    {"input/part": 1.0} if head().has_targets and self._is_drawn_again(entry, found) else {}
                ),
                "same": lambda: self._same_numbers(entries),
            }
        else:  # evaluation may have left the model in its mode since
            self._held = None
        for name, read in groups.items():
            try:
                found |= read() if name not in self._lost else {}
            except Exception as error:  # an unusual graph: the other groups are read as ever
                self._lost.add(name)
                self._on_error(f"inspection of {name}", error)
        self._write(found)

    def _maximizes(self) -> bool:
        """Whether an optimizer maximizes the loss."""
        return any(group.get("maximize") for one in self._table.optimizers for group in one.param_groups)

    def _layer_numbers(self, graph: Graph) -> dict[str, Tensor | float]:
        """Returns how many tensors no optimizer sees, and how many matrices start with equal rows."""
        hidden = {
            id(weight): weight._version
            for module in self._table.model.modules()
            for kept in vars(module).values()
            if isinstance(kept, (list, tuple, dict)) and kept is not module._modules
            for layer in (kept.values() if isinstance(kept, dict) else kept)
            if isinstance(layer, nn.Module)
            for weight in layer.parameters()
            if id(weight) in graph.leaves and graph.weight_row_of(weight) < 0
        }
        before, self._hidden = self._hidden, hidden
        found: dict[str, Tensor | float] = {}
        if before is None:
            matrices = [weight.detach() for weight in graph.leaves.values() if weight.dim() > 1 and len(weight) > 1]
            if matrices:  # a single layer may start at zero, not all of them
                zero = torch.stack([(weight == 0).all() for weight in matrices])
                equal = torch.stack([(weight == weight[:1]).all() for weight in matrices])
                found["body/equal_units"] = (equal & (~zero | (zero.all() & (len(zero) > 1)))).sum()
        else:  # what another optimizer holds has changed since
            found["body/hidden"] = float(sum(before.get(weight) == version for weight, version in hidden.items()))
        return found

    def _is_drawn_again(self, entry: Any, found: dict[str, Tensor | float]) -> bool:
        """Whether each step makes a copy of the same few samples, of which the script has many more."""
        data, checksum = saved(entry, "indices", "mat1", "input", "self"), found.get("input/checksum")
        if data is None or data.device.type != "cpu" or data.dim() < 2 or not isinstance(checksum, Tensor):
            return False
        if len(data) < 2 or data.numel() < 2 * len(data):  # points of a line, say
            return False
        held, now = self._held, float(checksum)
        # A batch that is still held cannot have been overwritten: another address is another copy.
        again = held is not None and held[1] == now and held[0].data_ptr() != data.data_ptr()
        self._held = data, now, held[2] + 1 if again and held is not None else 0
        return self._held[2] == DRAWN_AGAIN and _has_more_like(data)

    def _padding_numbers(self, graph: Graph, entry: Any) -> dict[str, Tensor | float]:
        """Returns how much of what a recurrent layer read last is padding, if only its last step is used."""
        ids = saved(entry, "indices") if entry is not None and is_op(entry, LOOKUPS) else None
        recurrent = any(isinstance(module, nn.RNNBase) for module in self._table.model.modules())
        if ids is None or ids.dim() != 2 or ids.shape[1] < FEW_PLACES or not recurrent:
            return {}
        nodes = [*graph.others, *graph.head]
        ends = [n for n in nodes if is_op(n, ("SelectBackward",)) and n._saved_index in (-1, (1 << 64) - 1)]
        if not ends or any(is_op(node, ("PackPadded",)) for node in nodes):
            return {}
        ids = ids[:MAX_SAMPLES]
        same = (ids == ids[:, -1].mode().values).flip(1).long().cummin(1).values  # from the end on
        return {"input/padded": same.float().mean()}

    def _reads_samples_as_time(self, graph: Graph, head: Head) -> bool:
        """Whether the second dimension of a recurrent layer's output is read as time, which is its first."""
        layers = [m for m in self._table.model.modules() if isinstance(m, nn.RNNBase)]
        if not layers or any(layer.batch_first for layer in layers):
            return False
        picks = [n for n in (*graph.others, *head.nodes) if is_op(n, ("SelectBackward", "MeanBackward"))]
        return any(softmax_dims(node) == [1] and _is_time_major(inputs_of(node)[0]) for node in picks)

    def _same_numbers(self, entries: list[Any]) -> dict[str, Tensor | float]:
        """Returns whether all samples of the batch have the same input, in every layer that is fed data."""
        recurrent = any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in self._table.model.modules())
        fed = [saved(layer, "indices", "mat1", "input", "self") for layer in entries]
        known = [sampled(data) for data in fed if data is not None and data.dim() > 0 and len(data) > 1]
        if not known or len(known) < len(entries):
            return {}
        same = torch.stack([(data == data[:1]).all() for data in known]).all()
        if not recurrent or any(is_op(layer, LOOKUPS) for layer in entries):
            return {"input/same": same}
        # A recurrence starts from zeros.
        return {"input/same": same & torch.stack([(data != 0).any() for data in known]).any()}

    def _read_activations(self, graph: Graph) -> dict[str, Tensor | float]:
        """Reads how many units are off or saturated, of each layer; returns nothing."""
        dead: dict[int, Tensor] = {}
        saturated: dict[int, Tensor] = {}
        for node in graph.others:
            kind = dead if is_op(node, HARD) else saturated if is_op(node, SOFT) else None
            result = saved(node, "result", "self") if kind is not None else None
            row = graph.before(node) if result is not None else -1
            if kind is None or result is None or row < 0 or result.dim() < 2 or row in kind:
                continue
            units = sampled(result.flatten(2) if result.dim() == 4 else result.reshape(-1, result.shape[-1]))
            if kind is dead:
                over = (0, 2) if units.dim() == 3 else (0,)
                kind[row] = (units <= 0).all(over[-1] if len(over) == 1 else -1).float()
                kind[row] = (kind[row] if units.dim() == 2 else kind[row].amin(0)).mean()
            else:
                middle, reach = (0.5, 0.49) if is_op(node, SOFT[:1]) else (0.0, 0.98)
                kind[row] = ((units - middle).abs() > reach).float().mean()
        for name, numbers in (("activation/dead_fraction", dead), ("activation/saturated_fraction", saturated)):
            if numbers:
                self._buffer().add_each(name, list(numbers.values()), list(numbers))
        return {}

    def _target_numbers(self, head: Head) -> dict[str, Tensor | float]:
        labels, targets = head.labels, head.targets
        found: dict[str, Tensor | float] = {}
        trivial: Tensor | None = None
        if (said := head.predicted()) is not None:
            found["head/purity"] = said.max() / said.sum()
        if labels is not None and head.classes > 0:
            one = torch.zeros(head.classes, device=labels.device)
            counted = (labels >= 0) & (labels < head.classes) & (labels != head.ignored)
            one.scatter_add_(0, labels.clamp(0, head.classes - 1), counted.to(one.dtype))
            self._counts = one if self._counts is None or len(self._counts) != len(one) else self._counts + one
            share = self._counts / self._counts.sum()
            found |= {"target/purity": one.max() / one.sum(), "target/classes": (share > 0).sum()}
            found["target/dominant"] = one.argmax()
            trivial = -torch.special.xlogy(share, share).sum()
            if head.is_mean:
                found["target/trivial_loss"] = trivial
            if not self._first:  # what is pooled would differ in a run that was resumed
                found = {name: found[name] for name in LATER if name in found}
        elif targets is not None and targets.numel():
            flat = sampled(targets.reshape(len(targets), -1) if targets.dim() > 1 else targets[:, None]).float()
            finite = torch.where(flat.isfinite(), flat, 0.0)
            sums, squares, count = self._sums or (torch.zeros(()), torch.zeros(()), 0)
            if sums.shape != finite.shape[1:]:
                sums, squares, count = torch.zeros_like(finite[0]), torch.zeros_like(finite[0]), 0
            sums, squares, count = sums + finite.sum(0), squares + finite.square().sum(0), count + len(finite)
            self._sums = sums, squares, count
            mean = sums / count
            variance = squares / count - mean.square()
            found |= {"target/min": finite.min(), "target/max": finite.max(), "target/mean": mean.mean()}
            found |= {"target/batch_mean": finite.mean(), "target/batch_std": finite.std(0).mean()}
            found |= {"target/std": (squares.mean() / count - mean.mean().square()).clamp_min(0).sqrt()}
            found |= {"target/integer": (finite == finite.round()).float().mean()}
            found |= {"target/row_sum": finite.sum(1).mean(), "target/columns": float(finite.shape[1])}
            found |= {"target/nonfinite": (~flat.isfinite()).sum()}
            one_hot = (finite.sum(1) == 1) & (finite.max(1).values == 1)
            found |= {"target/one_hot": one_hot.float().mean()}
            if head.loss not in ("cross_entropy", "bce", "bce_logits"):
                pass
            elif finite.shape[1] == 1:
                share, whole = finite.mean(), ((finite == 0) | (finite == 1)).all()
                found |= {"target/purity": whole * torch.maximum(share, 1 - share), "target/dominant": share > 0.5}
            else:
                share = finite.mean(0)
                found |= {"target/purity": one_hot.all() * share.max(), "target/dominant": share.argmax()}
            if head.loss == "mse":
                trivial = variance.mean()
            elif head.loss == "cross_entropy":
                trivial = -torch.special.xlogy(mean, mean).sum()
            elif head.loss in ("bce", "bce_logits"):
                p = mean.clamp(0, 1)
                trivial = -(torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p)).mean()
            if head.is_mean and trivial is not None:
                found["target/trivial_loss"] = trivial
            if not self._first:
                found = {name: found[name] for name in LATER if name in found}
        if (error := head.error()) is not None and trivial is not None:
            found |= {"head/error": error} | ({"target/trivial_error": trivial} if self._first else {})
        return found

    def _write(self, found: dict[str, Tensor | float]) -> None:
        buffer, constants = self._buffer(), {}
        for name, value in found.items():
            if isinstance(value, Tensor):
                buffer.add("look", value.detach().to(torch.float32).reshape(()), [PLACES[name]])
            else:
                constants[name] = float(value)
        if constants:
            numbers = torch.tensor(list(constants.values()), dtype=torch.float32)
            buffer.add("look", numbers, [PLACES[name] for name in constants])


def _is_time_major(node: Any) -> bool:
    """Whether a node puts out all steps of a recurrence, one after the other along its first dimension."""
    if node is not None and is_op(node, ("CatBackward",)):  # two directions
        return all(_is_time_major(one) for one in inputs_of(node))
    return node is not None and (
        is_op(node, RECURRENT) or (is_op(node, ("StackBackward",)) and softmax_dims(node)[:1] == [0])
    )


def _has_more_like(data: Tensor) -> bool:
    """Whether the program holds a tensor with these samples and many more; asked at most once in a run."""
    # `next(iter(loader))` at every step copies the same samples each time (`data_order`), and so does a run that has no
    # others. The batch does not show which it is: only the data that the program holds does.
    rows, left = data.reshape(len(data), -1), MAX_COMPARED
    spread = rows[:MAX_SAMPLES, :MAX_COLUMNS].float().var(0).nan_to_num()
    telling = spread.topk(min(TELLING, len(spread))).indices.tolist()
    tensors = (thing for thing in gc.get_objects() if type(thing) is Tensor)
    for one in itertools.islice(tensors, MAX_TENSORS):
        if _may_hold(one, rows):
            some = one.detach().reshape(-1, rows.shape[1])[:left]
            left -= len(some)
            if all(_has_row(some, row, telling) for row in (rows[0], rows[-1])):
                return True
    return False


def _may_hold(one: Tensor, rows: Tensor) -> bool:
    """Whether a tensor of the program has the shape of many more such rows, in memory that is still there."""
    if one.layout != torch.strided or one.is_nested or one.device != rows.device or one.dtype != rows.dtype:
        return False
    more = one.numel() >= MANY_MORE * rows.numel() and one.numel() % rows.shape[1] == 0
    if not more or one.dim() < 2 or one.requires_grad or not one.is_contiguous():
        return False
    return one.untyped_storage().nbytes() >= (one.storage_offset() + one.numel()) * one.element_size()


def _has_row(some: Tensor, row: Tensor, columns: list[int]) -> bool:
    places = torch.arange(len(some))
    for column in columns:
        places = places[some[places, column] == row[column]]
    places = places[: max(1, MAX_COMPARED // len(row))]
    return bool((some[places] == row).all(1).any())


def _extent(data: Tensor) -> int:
    """Returns the bytes from the first sample to the last: a column of a sequence reaches over all of it."""
    return max(data.numel(), len(data) * data.stride(0)) * data.element_size()


def _input_numbers(layer: Any) -> dict[str, Tensor | float]:
    """Returns the scale of what a layer is fed, by columns or channels."""
    if layer is None:
        return {}
    if is_op(layer, LOOKUPS):
        indices = saved(layer, "indices")
        found: dict[str, Tensor | float] = {"input/lookup": 1.0}
        if indices is not None:
            flat = indices.reshape(-1)[: MAX_SAMPLES * 8].float()
            found["input/checksum"] = (flat * torch.arange(1, len(flat) + 1, device=flat.device)).mean()
        return found
    data = saved(layer, "mat1", "input", "self")
    assert data is not None
    is_image = _is_image(layer, data)
    values = sampled(_columns(data[:64] if is_image and data.dim() > 2 else data, is_image=is_image)).float()
    finite = values.isfinite()
    clean = torch.where(finite, values, 0.0)
    mean, std = clean.mean(0), clean.std(0, correction=0)
    moving = std > 1e-7 * (1 + mean.abs())
    ramp = torch.arange(1, clean.numel() + 1, device=clean.device) % 997
    found = {
        "input/mean": clean.mean(),
        "input/std": clean.std(correction=0),
        "input/max": clean.abs().max(),
        "input/min": clean.min(),
        "input/offset": mean.abs().max(),
        "input/spread_high": std.max(),
        "input/spread_low": torch.where(moving, std, math.inf).min(),
        "input/constant": (~moving).sum(),
        "input/columns": float(values.shape[1]),
        "input/integer": (clean == clean.round()).float().mean(),
        "input/nonfinite": (~finite).sum(),
        "input/nonfinite_columns": (~finite).all(0).sum(),
        "input/checksum": (clean.reshape(-1) * ramp).mean(),
        "input/part": float(data.untyped_storage().nbytes() > 4 * _extent(data)),
        "input/normalized": float(is_op(layer, NORMS)),
        "input/misread": float(_is_misread(getattr(layer, "_saved_input", data))),
    }
    return found


def _broken_numbers(data: Tensor, *, is_image: bool, batch: int) -> dict[str, Tensor | float]:
    """Returns how many values of a batch are NaN or infinite, and where the first of them is."""
    columns = _columns(~data.isfinite(), is_image=is_image)
    found: dict[str, Tensor | float] = {"input/nonfinite": columns.sum(), "input/columns": float(columns.shape[1])}
    if columns.any():
        found["input/broken_column"] = columns.any(0).int().argmax()
        if len(columns) > 1:
            found["input/nonfinite_columns"] = columns.all(0).sum()
        if len(data) == batch:  # else the rows are not samples: those of a sequence are its steps
            found["input/broken_sample"] = (~data.isfinite()).flatten(1).any(1).int().argmax()
    return found


def _is_image(layer: Any, data: Tensor) -> bool:
    """Whether the second dimension of what a layer is fed are channels."""
    return data.dim() == 4 or is_op(layer, ("ConvolutionBackward",))


def _columns(data: Tensor, *, is_image: bool) -> Tensor:
    """Returns data as a matrix with one column per feature, or per channel of images."""
    if not is_image:
        return data.reshape(-1, data.shape[-1])
    return data.transpose(0, 1).reshape(data.shape[1], -1).T if data.dim() > 2 else data


def _mixing_numbers(graph: Graph, head: Head) -> dict[str, Tensor | float]:
    """Returns whether samples of the batch are mixed with each other, and how sharply attention starts to choose."""
    samples = shape_of(graph.last[0])[:1] if graph.last and len(shape_of(graph.last[0])) > 1 else []
    softmaxes = [(shape_of(node), softmax_dims(node)) for node in graph.others if is_op(node, SOFTMAX)]
    over_batch = [dims == [0] and shape[:1] == samples != [1] and len(shape) > 1 for shape, dims in softmaxes]
    found: dict[str, Tensor | float] = {"body/batch_softmax": float(any(over_batch))}
    outputs = head.outputs
    pooled = [n for n in (*graph.others, *head.nodes) if is_op(n, ("MeanBackward", "SumBackward", "AmaxBackward"))]
    over_batch = [softmax_dims(node) == [0] and shape_of(inputs_of(node)[0])[:1] == samples for node in pooled]
    if outputs is not None and outputs.dim() > 1 and len(outputs) > 1 and any(over_batch):
        found["body/batch_mean"] = (sampled(outputs) == outputs[:1]).all().float()
    chosen = [result for node in graph.others if compares_places(node) if (result := saved(node, "result")) is not None]
    if peaks := [sampled(one).float().amax(-1).mean() for one in chosen if one.shape[-1] >= FEW_PLACES]:
        found["body/peaked"] = torch.stack(peaks).max()
    return found


def _is_misread(data: Tensor) -> bool:
    """Whether a view gave the data another order of dimensions than it has in memory, as a permutation would not."""
    base = data._base
    if (
        base is None
        or data.dim() < 3
        or base.dim() != data.dim()
        or not (data.is_contiguous() and base.is_contiguous())
    ):
        return False
    before, after = ([size for size in one.shape[1:] if size > 1] for one in (base, data))
    return before != after and sorted(before) == sorted(after)


def _leak_numbers(entry: Any, head: Head) -> dict[str, Tensor | float]:
    """Returns whether a column of the inputs is the target."""
    data = saved(entry, "mat1") if entry is not None and not is_op(entry, LOOKUPS) else None
    given = head.labels if head.labels is not None else head.targets
    if (
        data is None
        or given is None
        or not 1 < data.shape[1] <= MAX_COLUMNS
        or given.numel() != len(data)
        or len(data) < 8
    ):
        return {}
    values, target = data[:MAX_SAMPLES].float(), given.reshape(-1)[:MAX_SAMPLES].float()
    if head.labels is None and head.loss not in ("bce", "bce_logits"):
        return {"input/leak": (values == target[:, None]).all(0).any().float() * (target.std() > 0)}
    values, target = values - values.mean(0), target - target.mean()
    size = values.norm(dim=0) * target.norm()
    return {"input/leak": ((values.T @ target).abs() > 0.9999 * size.clamp_min(1e-12)).any().float()}


def _sees_ahead(graph: Graph) -> bool:
    """Whether there is attention between the places of a sequence, and none of it has a mask."""
    given = [
        getattr(node, "_saved_is_causal", False) or saved(node, "attn_mask", "attn_bias") is not None
        for node in graph.others
        if is_op(node, ATTENTION)
    ]
    written = [node for node in graph.others if compares_places(node)]
    masks = ("MaskedFill", "WhereBackward", "AddBackward", "SubBackward", "Tril")
    given += [comes_from(node, masks, 5) for node in written]
    return bool(given) and not any(given)


def _text_numbers(entries: list[Any], head: Head, graph: Graph) -> dict[str, Tensor | float]:
    """Returns how the labels of tokens compare with the tokens at the same places."""
    lookups = [saved(entry, "indices") for entry in entries if is_op(entry, LOOKUPS)]
    labels = head.labels
    ids = next((one for one in lookups if one is not None and one.dim() > 1 and one.numel() == head.targets_seen), None)
    if ids is None or labels is None:
        return {}
    ahead: Tensor | float = 0.0
    if ids.shape[1] > 2 and _sees_ahead(graph) and labels.numel() >= ids.shape[1]:
        rows = min(labels.numel() // ids.shape[1], 8)
        next_ones = labels[: rows * ids.shape[1]].reshape(rows, -1)
        ahead = (next_ones[:, :-1] == ids[:rows, 1:]).all().float()
    ids = ids.reshape(-1)[:MAX_SAMPLES]
    pad_id, pad_label = ids.mode().values, labels.mode().values
    pads, padded = ids == pad_id, labels == pad_label
    is_padding = (pads == padded).all() & (pad_label != head.ignored) & (ids.numel() >= FEWEST_PLACES)
    found: dict[str, Tensor | float] = {"target/visible": ahead}
    return found | {"target/copied": (ids == labels).all().float(), "target/padding": is_padding * pads.float().mean()}


def _mode_numbers(model: nn.Module, graph: Graph, *, first: bool) -> dict[str, Tensor | float]:
    """Returns what the modes of layers show: evaluation mode, dropout, and, at first, frozen layers and batch norm."""
    found: dict[str, Tensor | float] = {}
    norms = [node for node in graph.layers if is_op(node, NORMS[:2])]
    drops = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
    evaluating = sum(not getattr(node, "_saved_training", True) for node in norms)
    if not model.training and type(model) is not nn.ModuleDict:
        evaluating += sum(not drop.training for drop in drops)
        found["mode/eval"] = float(evaluating)
    found["mode/dropout"] = max((float(drop.p) for drop in drops if drop.training), default=0.0)
    if not first:
        return found
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dim() > 1 and p.numel() >= 64]
    if frozen and frozen[0].is_floating_point():
        found["mode/frozen_random"] = torch.stack([_is_initial(p.detach()) for p in frozen[:8]]).sum()
    shapes = [shape_of(node) for node in norms if getattr(node, "_saved_training", False)]
    if counts := [math.prod(shape) / shape[1] for shape in shapes if len(shape) > 1]:
        found["mode/norm_samples"] = float(min(counts))
    return found


_BACKWARD = Wrapper(torch.autograd, "backward", before=Inspection.before_backward)
_SAVED_HOOKS = Wrapper(saved_tensors_hooks, "__enter__", before=Inspection.before_saved_hooks)


def _is_initial(weight: Tensor) -> Tensor:
    """Whether a matrix looks like torch's own initialization: uniform between plus and minus 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
    largest, spread = weight.abs().max() / bound, weight.std() * math.sqrt(3) / bound
    return ((largest > 0.9) & (largest <= 1) & (spread > 0.9) & (spread < 1.1)).float()
