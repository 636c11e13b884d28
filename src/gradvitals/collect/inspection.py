"""A look at the batches where bugs show: what the model is fed, what it puts out, and the loss that meets it.

Everything is read from the graph that autograd has built when backward starts: the names of its operations, and the
tensors they saved. So it does not matter whether a model uses modules or functions. ``torch.autograd.backward`` is
wrapped for the first steps, for those due for a detailed reading, and while gradients are not finite. Numbers stay on
their device and leave with the step. What torch.compile has compiled is one node, which tells nothing; what the loop
computes outside of it, most often the loss, is seen as ever.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as PRE_HOOKS

from gradvitals.collect.parameters import ParameterTable
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.metrics import INSPECTED
from gradvitals.types import ACTIVATIONS, LOSSES

PLACES = {name: place for place, name in enumerate(INSPECTED)}
"""Where the journal has each number."""

FIRST_STEPS = 10
"""Steps from the start that are inspected."""

MAX_NODES = 20_000
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
MAX_SAMPLES = 512
"""Rows of inputs and targets that are looked at."""
MAX_ELEMENTS = 1 << 17
"""Elements of one activation that are looked at."""

MATRIX = ("AddmmBackward", "MmBackward", "ConvolutionBackward", "LinearBackward", "BaddbmmBackward")
RECURRENT = ("MkldnnRnnLayerBackward", "CudnnRnnBackward", "MiopenRnnBackward", "ThnnFusedLstm", "ThnnFusedGru")
NORMS = ("NativeBatchNormBackward", "CudnnBatchNormBackward", "NativeLayerNormBackward", "NativeGroupNormBackward")
LOOKUPS = ("EmbeddingBackward", "EmbeddingBagBackward")
LAYERS = (*MATRIX, *RECURRENT, *NORMS, *LOOKUPS)
PASS_THROUGH = ("TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward", "ExpandBackward", "ToCopyBackward")
"""What may lie between a weight and the operation that uses it."""
LINEAR = (
    *(*MATRIX, *PASS_THROUGH, *NORMS[:2], *LOOKUPS, "AddBackward", "SubBackward", "NegBackward", "SumBackward"),
    *("MeanBackward", "CloneBackward", "SliceBackward", "SelectBackward", "CatBackward", "UnsqueezeBackward"),
    *("SqueezeBackward", "ReshapeAliasBackward", "UnsafeViewBackward", "AvgPool", "AdaptiveAvgPool", "StackBackward"),
    *("AsStridedBackward", "torch::autograd::AccumulateGrad", "torch::autograd::CopySlices", "NativeDropoutBackward"),
)
"""Operations that a model without a nonlinearity is made of."""
SQUASHES = {
    "SoftmaxBackward": "softmax",
    "SigmoidBackward": "sigmoid",
    "ReluBackward": "relu",
    "TanhBackward": "tanh",
    "LogSoftmaxBackward": "log_softmax",
    "LogSigmoidBackward": "log_sigmoid",
}
VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward")
"""Operations that change the shape and keep the order of elements."""
REDUCED = ("MeanBackward", "SumBackward", *VIEWS)
ERRORS = (
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "NllLoss", "BinaryCrossEntropy", "AbsBackward", "ReluBackward"),
    *("SoftplusBackward", "ClampMinBackward"),
)
"""Operations whose results are not negative, as errors are."""
MAX_TERMS = 12
"""Operations in a row that are looked through for errors."""
SOFTMAX = ("SoftmaxBackward",)
LOG_SOFTMAX = (*SOFTMAX, "LogSoftmaxBackward")
HARD = ("ReluBackward", "ThresholdBackward")
SOFT = ("SigmoidBackward", "TanhBackward")
ATTENTION = ("ScaledDotProduct", "EfficientAttention", "FlashAttention")
ORDERLESS = (
    *("AddmmBackward", "MmBackward", "LinearBackward", "BmmBackward", *NORMS, *LOOKUPS, *PASS_THROUGH, *VIEWS),
    *("torch::autograd::AccumulateGrad", "CloneBackward", "SelectBackward", "SplitBackward", "UnbindBackward"),
    *("NativeDropoutBackward", "UnsafeSplitBackward"),
)
"""Operations that treat all places of a sequence alike."""
FEW_PLACES = 4
"""Places that attention chooses from, at least, for its choice to say something."""
FEW_UNITS = 3
"""Units of a hidden layer that are reported if everything must pass them."""
SUM = 2
"""The reduction of a loss that is summed, in the terms of ATen."""


def _is(node: Any, names: tuple[str, ...]) -> bool:
    return _starts_with(node.name(), names)


@functools.cache
def _starts_with(name: str, names: tuple[str, ...]) -> bool:
    return name.startswith(names)


def _shape(node: Any) -> list[int]:
    metadata = node._input_metadata
    return [int(size) for size in metadata[0].shape] if metadata else []


def _saved(node: Any, *names: str) -> Tensor | None:
    """Returns the first of these saved tensors that there is."""
    for name in names:
        with contextlib.suppress(AttributeError, RuntimeError):
            value = getattr(node, f"_saved_{name}")
            if isinstance(value, Tensor):
                return value.detach()
    return None


def _inputs(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions]


class Graph:
    """The graph of one loss: its head, from the loss to the last layers, and the body before it.

    Args:
        root: The node of the loss.
        rows: The row of each watched parameter, by its id.
    """

    def __init__(self, root: Any, rows: dict[int, int]) -> None:
        self.root = root
        self._rows = rows
        self.head: list[Any] = []
        """Nodes from the loss down to the last layers, in the order of their distance from the loss."""
        self.last: list[Any] = []
        """The last layers."""
        self.layers: list[Any] = []
        self.others: list[Any] = []
        """Every other node of the body."""
        self.leaves: dict[int, Tensor] = {}
        """The tensors that backward reaches, by id."""
        self.is_ours = False
        """Whether one of them is a watched parameter."""
        waiting, seen = deque([(root, True)]), {root}
        while waiting and len(seen) < MAX_NODES:
            node, in_head = waiting.popleft()
            is_layer = _is(node, LAYERS) and self._has_weight(node)
            if is_layer:
                self.layers.append(node)
                if in_head:
                    self.last.append(node)
            elif in_head:
                self.head.append(node)
            else:
                self.others.append(node)
            if (variable := getattr(node, "variable", None)) is not None:
                self.leaves[id(variable)] = variable
                self.is_ours |= id(variable) in rows
            for before in _inputs(node):
                if before is not None and before not in seen:
                    seen.add(before)
                    waiting.append((before, in_head and not is_layer))

    def weight_row(self, layer: Any) -> int:
        """Returns the row of a layer's weight; -1 if it belongs to another model."""
        found = [self._rows.get(id(leaf), -1) for leaf in _leaves(layer) if leaf.dim() > 1 or _is(layer, NORMS)]
        return max(found, default=-1)

    def weight_row_of(self, weight: Tensor) -> int:
        """Returns the row of a watched parameter; -1 for other tensors."""
        return self._rows.get(id(weight), -1)

    def _has_weight(self, node: Any) -> bool:
        return any(True for _ in _leaves(node))

    def passes_all(self, layer: Any) -> bool:
        """Whether no other layer that is fed data reaches the loss but through this one: a bottleneck."""
        waiting, seen = [self.root], {self.root, layer}
        while waiting:
            node = waiting.pop()
            if _is(node, ("AddBackward", "CatBackward", "StackBackward")) and None in _inputs(node):
                return False  # data is added or joined here
            following = [before for before in _inputs(node) if before is not None and before not in seen]
            if _is(node, LAYERS) and self._has_weight(node) and _feeds_data(node):
                return False
            seen.update(following)
            waiting += following
        return True

    def before(self, node: Any) -> int:
        """Returns the row of the layer whose output a node acts on; -1 if there is none."""
        for _ in range(8):
            if _is(node, LAYERS):
                return self.weight_row(node)
            following = [before for before in _inputs(node) if before is not None]
            if len(following) != 1:
                return -1
            node = following[0]
        return -1


def _range(weights: Tensor, *, with_one: bool) -> Tensor:
    """Returns the largest weight over the smallest that is not 0; weights of positives are beside 1 for negatives."""
    weights = weights.detach().float().reshape(-1)
    weights = torch.cat([weights, weights.new_ones(1)]) if with_one else weights
    return weights.amax() / torch.where(weights > 0, weights, math.inf).amin()


def _feeds_data(layer: Any) -> bool:
    """Whether a layer acts on data rather than on another layer's output."""
    if _is(layer, LOOKUPS):
        return True
    data = _saved(layer, "mat1", "input", "self")
    through = [before for before in _inputs(layer) if before is not None]
    only_weights = all(hasattr(b, "variable") or _is(b, PASS_THROUGH) for b in through)
    return data is not None and only_weights and len(through) <= len(list(_leaves(layer)))


def _leaves(node: Any) -> Iterator[Tensor]:
    """Yields the parameters that a node uses."""
    for before in _inputs(node):
        for _ in range(4):
            if before is None or not _is(before, PASS_THROUGH):
                break
            before = next(iter(_inputs(before)), None)
        if before is not None and hasattr(before, "variable"):
            yield before.variable


class _Wrapper:
    """Wraps a function of torch for all Monitors together, from the first that listens to the last.

    One wrapper for all: Monitors come and go in any order, and a wrapper of each would pile up.

    Args:
        owner: The module or class that holds the function.
        name: Its name there.
        before: Called with a listener and the arguments before each call.
        after: Called with a listener and the result after each call.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._owner, self._name, self._before, self._after = owner, name, before, after
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._original: Any = None
        self._replacement: Any = None

    def add(self, listener: Any) -> None:
        """Call this listener too."""
        self._listeners.add(listener)
        if self._replacement is not None:
            return
        original = self._original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._call(self._before, *args, **kwargs)
            result = original(*args, **kwargs)
            if self._after is not None:
                self._call(self._after, result)
            return result

        # A loop that is compiled as a whole must not compile this too.
        self._replacement = torch.compiler.disable(replacement) if _is_compiled() else replacement
        setattr(self._owner, self._name, self._replacement)

    def discard(self, listener: Any) -> None:
        """Call this listener no more; with the last one gone, torch is as it was."""
        self._listeners.discard(listener)
        # If another tool has wrapped the function since, ours stays, and does nothing without listeners.
        if not self._listeners and getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
            self._replacement = None

    def _call(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        for listener in tuple(self._listeners):
            try:
                method(listener, *args, **kwargs)
            except Exception:  # ours, in the middle of the script's own call: it must continue
                self._listeners.discard(listener)


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
        """How often each tensor was changed that no optimizer is known to hold."""
        self._failed = False
        self._lost: set[str] = set()
        """Groups of numbers that an unusual graph has made fail: not read again."""
        self._held: tuple[Tensor, float, int] | None = None
        """What the first layer was fed at the last inspected step, its checksum, and how often it was drawn anew."""

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
            if not _is_compiled():  # which may trace through the hooks of a checkpoint
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
        entries = [layer for layer in reversed(graph.layers) if _feeds_data(layer)]
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
        """Whether an optimizer raises the loss, as it is told to."""
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
        data, checksum = _saved(entry, "indices", "mat1", "input", "self"), found.get("input/checksum")
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
        ids = _saved(entry, "indices") if entry is not None and _is(entry, LOOKUPS) else None
        recurrent = any(isinstance(module, nn.RNNBase) for module in self._table.model.modules())
        if ids is None or ids.dim() != 2 or ids.shape[1] < FEW_PLACES or not recurrent:
            return {}
        nodes = [*graph.others, *graph.head]
        ends = [n for n in nodes if _is(n, ("SelectBackward",)) and n._saved_index in (-1, (1 << 64) - 1)]
        if not ends or any(_is(node, ("PackPadded",)) for node in nodes):
            return {}
        ids = ids[:MAX_SAMPLES]
        same = (ids == ids[:, -1].mode().values).flip(1).long().cummin(1).values  # from the end on
        return {"input/padded": same.float().mean()}

    def _reads_samples_as_time(self, graph: Graph, head: Head) -> bool:
        """Whether the second dimension of a recurrent layer's output is read as time, which is its first."""
        layers = [m for m in self._table.model.modules() if isinstance(m, nn.RNNBase)]
        if not layers or any(layer.batch_first for layer in layers):
            return False
        picks = [n for n in (*graph.others, *head.nodes) if _is(n, ("SelectBackward", "MeanBackward"))]
        return any(_dims(node) == [1] and _is_time_major(_inputs(node)[0]) for node in picks)

    def _same_numbers(self, entries: list[Any]) -> dict[str, Tensor | float]:
        """Returns whether all samples of the batch have the same input, in every layer that is fed data."""
        recurrent = any(isinstance(m, (nn.RNNBase, nn.RNNCellBase)) for m in self._table.model.modules())
        fed = [_saved(layer, "indices", "mat1", "input", "self") for layer in entries]
        known = [_sampled(data) for data in fed if data is not None and data.dim() > 0 and len(data) > 1]
        if not known or len(known) < len(entries):
            return {}
        same = torch.stack([(data == data[:1]).all() for data in known]).all()
        if not recurrent or any(_is(layer, LOOKUPS) for layer in entries):
            return {"input/same": same}
        # A recurrence starts from zeros.
        return {"input/same": same & torch.stack([(data != 0).any() for data in known]).any()}

    def _read_activations(self, graph: Graph) -> dict[str, Tensor | float]:
        """Reads how many units are off or saturated, of each layer; returns nothing."""
        dead: dict[int, Tensor] = {}
        saturated: dict[int, Tensor] = {}
        for node in graph.others:
            kind = dead if _is(node, HARD) else saturated if _is(node, SOFT) else None
            result = _saved(node, "result", "self") if kind is not None else None
            row = graph.before(node) if result is not None else -1
            if kind is None or result is None or row < 0 or result.dim() < 2 or row in kind:
                continue
            units = _sampled(result.flatten(2) if result.dim() == 4 else result.reshape(-1, result.shape[-1]))
            if kind is dead:
                over = (0, 2) if units.dim() == 3 else (0,)
                kind[row] = (units <= 0).all(over[-1] if len(over) == 1 else -1).float()
                kind[row] = (kind[row] if units.dim() == 2 else kind[row].amin(0)).mean()
            else:
                middle, reach = (0.5, 0.49) if _is(node, SOFT[:1]) else (0.0, 0.98)
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
                found = {name: found[name] for name in ("head/purity", "target/purity", "target/dominant")}
        elif targets is not None and targets.numel():
            flat = _sampled(targets.reshape(len(targets), -1) if targets.dim() > 1 else targets[:, None]).float()
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
                later = ("head/purity", "target/nonfinite", "target/purity", "target/dominant")
                found = {name: found[name] for name in later if name in found}
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


class Head:
    """What lies between the last layers and the loss.

    Args:
        graph: The graph of the loss.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        nodes = graph.head
        self.nodes, self._members = nodes, set(nodes)
        self.labels: Tensor | None = None
        """Classes as integers."""
        self.targets: Tensor | None = None
        """Targets of any other kind."""
        self.classes = 0
        self.ignored = -100
        """The label that the loss leaves out."""
        self.targets_seen = 0
        """How many labels there are."""
        self.outputs: Tensor | None = None
        """What the loss function is fed, if it is one for classes."""
        self.loss = ""
        self.error_node: Any = None
        """The operation that compares outputs with targets."""
        self.weights: Tensor | None = None
        """The weights that it gives to classes or samples."""
        self.is_mean = True
        """Whether it is an ordinary mean over targets, of the size that a prediction of their mean would make."""
        squashes = [(node, SQUASHES[name]) for node in nodes for name in SQUASHES if _is(node, (name,))]
        self._find_loss()
        if self.loss in ("nll", "cross_entropy") and squashes and squashes[0][1] == "log_softmax":
            self.loss = "cross_entropy"
            squashes = squashes[1:]
        self.activation = squashes[-1][1] if squashes else ""
        """What the last layer's output goes through, besides what is part of the loss."""
        self._squash = squashes[-1][0] if squashes else None

    def _find_loss(self) -> None:
        by_name = {
            "NllLoss": "nll",
            "BinaryCrossEntropyWithLogits": "bce_logits",
            "BinaryCrossEntropy": "bce",
            "MseLoss": "mse",
            "SmoothL1Loss": "smooth_l1",
            "HuberLoss": "smooth_l1",
            "KlDiv": "kl",
        }
        for node in self.nodes:
            kind = next((kind for name, kind in by_name.items() if _is(node, (name,))), "")
            if kind:
                self.loss = kind
                self.error_node, self.weights = node, _saved(node, "weight", "pos_weight")
                is_mean = getattr(node, "_saved_reduction", 1) != SUM and self.weights is None
                self.is_mean = is_mean and self._is_whole(node)
                target = _saved(node, "target")
                own = self.outputs = _saved(node, "self")
                if kind == "nll" and target is not None:
                    self.labels = target.reshape(-1)[:MAX_SAMPLES]
                    self.targets_seen = target.numel()
                    index = getattr(node, "_saved_ignore_index", -100)
                    self.ignored = index - (1 << 64) if index >= 1 << 63 else index  # autograd gives it unsigned
                    self.classes = own.shape[1 if own.dim() > 1 else 0] if own is not None else 0
                else:
                    self.targets = target
                return
        for node in self.nodes:
            if _is(node, ("PowBackward", "AbsBackward")) and self._is_difference(node):
                self.loss = "l1" if _is(node, ("AbsBackward",)) else "mse"
                self.error_node = node
                self.is_mean = self._is_whole(node)
                self._targets_from_difference(node)
                return
        if self._finds_product():
            return
        logs = [node for node in self.nodes if _is(node, ("LogBackward", "LogSoftmaxBackward"))]
        for node in self.nodes:
            if logs and _is(node, ("MulBackward",)):
                other = self._constant(node)
                if other is not None and other.dim() > 0 and other.is_floating_point():
                    self.loss, self.targets = "log", other
                    return

    def _is_whole(self, node: Any) -> bool:
        """Whether the loss is this node or its mean: no other term is added to it, and nothing scales it."""
        above = self.nodes[0]
        while above is not node and _is(above, ("MeanBackward", *VIEWS)):
            above = _inputs(above)[0]
        return above is node

    def _finds_product(self) -> bool:
        """Finds cross-entropy and the KL divergence of targets that are shares of classes.

        Both end in a product of the targets with what should be log-probabilities, summed up.
        """
        node, scale = self.nodes[0] if self.nodes else None, False
        while node is not None and _is(node, ("NegBackward", "DivBackward", *REDUCED)):
            scale |= _is(node, ("DivBackward", "MeanBackward"))
            operands = _inputs(node)
            node = operands[0] if all(one is None for one in operands[1:]) else None
        kind = "cross_entropy"
        if node is not None and _is(node, ("SubBackward",)):
            operands = _inputs(node)
            kind, node = "kl", operands[1] if operands[0] is None else None
        targets = self._constant(node) if node is not None and _is(node, ("MulBackward",)) else None
        if targets is None or targets.dim() < 2:
            return False
        factor = next(one for one in _inputs(node) if one is not None)
        if not _is(factor, ("LogSoftmaxBackward",) if kind == "cross_entropy" else ("SoftmaxBackward",)):
            return False
        self.loss, self.targets, self.classes = kind, targets, targets.shape[1]
        self.is_mean = scale and targets.dim() == 2
        return True

    def _is_difference(self, node: Any) -> bool:
        before = _inputs(node)[0]
        while before is not None and _is(before, PASS_THROUGH):
            before = _inputs(before)[0]
        exponent = getattr(node, "_saved_exponent", 2) if _is(node, ("PowBackward",)) else 2
        return exponent == 2 and before is not None and _is(before, ("SubBackward", "RsubBackward"))

    def _targets_from_difference(self, node: Any) -> None:
        """The loss saved outputs minus targets; the outputs are computed again from what their layer saved."""
        difference, before = _saved(node, "self"), _inputs(node)[0]
        operands = _inputs(before)
        output = _output_of(next((one for one in operands if one is not None), None))
        if difference is None or output is None or output.shape != difference.shape:
            return
        if sum(one is not None for one in operands) == 1:
            targets = output - difference if operands[0] is not None else output + difference
            self.targets = torch.where(output.isfinite(), targets, 0.0)  # else it is the output that is broken

    def _constant(self, node: Any) -> Tensor | None:
        """Returns the factor of a product that needs no gradient."""
        operands = _inputs(node)
        if len(operands) == 2 and operands[1] is None:
            return _saved(node, "other")
        return _saved(node, "self") if len(operands) == 2 and operands[0] is None else None

    @property
    def has_targets(self) -> bool:
        """Whether it is known what the outputs are compared with."""
        return self.labels is not None or self.targets is not None

    def error(self) -> Tensor | None:
        """Returns the mean error of the outputs, if the loss has other terms too; None if it is all there is."""
        if self.is_mean or self.error_node is None or self.weights is not None:
            return None
        node, own, target = self.error_node, _saved(self.error_node, "self"), _saved(self.error_node, "target")
        if own is None:
            return None
        if target is None:  # a difference
            return (_sampled(own).square() if self.loss == "mse" else _sampled(own).abs()).float().mean()
        if self.loss in ("nll", "cross_entropy"):
            return nn.functional.nll_loss(own.float(), target, ignore_index=self.ignored) if own.dim() == 2 else None
        if own.shape != target.shape or own.dim() == 0 or _is(node, ("Huber",)):
            return None
        own, target = _sampled(own).float(), _sampled(target).float()
        if self.loss == "mse":
            return nn.functional.mse_loss(own, target)
        if self.loss == "bce":
            return nn.functional.binary_cross_entropy(own, target)
        return nn.functional.binary_cross_entropy_with_logits(own, target) if self.loss == "bce_logits" else None

    def predicted(self) -> Tensor | None:
        """Returns how many samples the outputs put into each class; None if the loss is none for classes."""
        outputs = self.outputs
        if outputs is None or outputs.dim() == 0 or len(outputs) < 2:
            return None
        if self.loss in ("nll", "cross_entropy") and self.classes > 1:
            flat = _sampled(outputs).argmax(1).reshape(-1)
            return torch.zeros(self.classes, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat).float())
        if self.loss in ("bce", "bce_logits") and outputs.numel() == len(outputs):
            share = (outputs > (0.5 if self.loss == "bce" else 0.0)).float().mean()
            return torch.stack((share, 1 - share))
        return None

    def numbers(self, *, maximizes: bool) -> dict[str, Tensor | float]:
        """Returns what there is to know about it; a minus says nothing if the optimizer maximizes."""
        graph, last = self._graph, self._graph.last
        found: dict[str, Tensor | float] = {}
        found["head/loss"] = float(LOSSES.index(self.loss))
        found["head/activation"] = float(ACTIVATIONS.index(self.activation))
        shape = _shape(last[0]) if last else []
        if shape:
            found["head/units"] = float(shape[1] if _is(last[0], ("ConvolutionBackward",)) else shape[-1])
            found["head/samples"] = float(shape[0])
        if self._squash is not None and self.activation in ("softmax", "log_softmax"):
            shape, dims = _shape(self._squash), _dims(self._squash)
            found["head/softmax_units"] = float(shape[dims[0]]) if dims and dims[0] < len(shape) else math.nan
        elif self.loss == "cross_entropy":
            found["head/softmax_units"] = float(self.classes)
        tops = [_dims(node) for node in self.nodes if _is(node, LOG_SOFTMAX) and len(_shape(node)) == 2]
        found["head/batch_softmax"] = float([0] in tops)
        found["head/broadcast"] = float(any(self._broadcasts(node) for node in self.nodes))
        logs = [node for node in self.nodes if _is(node, ("LogBackward",))]
        found["head/scrambled"] = float(self.loss == "cross_entropy" and self._is_scrambled())
        found["head/log"] = float(any(self._is_bare_log(node) for node in logs))
        found["head/negated"] = 0.0 if maximizes else self._negated()
        found["head/root"] = float(any(self._is_root(node) for node in self.nodes))
        found["head/raw_log"] = float(self.loss == "log" and any(self._is_raw_log(node) for node in logs))
        found["head/logs"] = float(len(logs))
        foreign = [layer for layer in last if graph.weight_row(layer) < 0]
        found["head/foreign"] = float(bool(last) and len(foreign) == len(last))
        if self.weights is not None:
            found["head/weights"] = _range(self.weights, with_one=_saved(self.error_node, "pos_weight") is not None)
        products = [node for node in self.nodes if _is(node, ("MmBackward", "BmmBackward"))]
        found["head/products"] = float(bool(products))
        norms = [node for node in self.nodes if _is(node, ("LinalgVectorNormBackward", "NormBackward"))]
        if products and norms and self.loss == "cross_entropy" and self.outputs is not None and self.outputs.dim() == 2:
            scores = self.outputs[:MAX_SAMPLES]
            found["head/cosine_range"] = (scores.amax(1) - scores.amin(1)).float().mean()
        found["head/dropout"] = float(any(_is(node, ("NativeDropoutBackward",)) for node in self.nodes))
        scaled = [node for node in self.nodes if _is(node, ("MulBackward",)) and self._scales_output(node)]
        masks = [mask for node in scaled if (mask := self._constant(node)) is not None and mask.numel() > 1]
        if masks:
            found["head/dropout"] = torch.stack([_is_dropout(mask).float() for mask in masks]).amax()
        found["head/normalized"] = float(any(_is(node, NORMS[:2]) for node in (*self.nodes, *last)))
        found["head/chosen"] = float(any(_is(node, ("GatherBackward", "IndexBackward")) for node in self.nodes))
        found["head/scaled"] = float(any(_is(n, ("MulBackward", "DivBackward", "AddBackward")) for n in self.nodes))
        found["head/terms"] = float(len(last))
        signs = [self._both_signs(node) for node in self.nodes if _is(node, ("MulBackward",))]
        if known := [sign for sign in signs if sign is not None]:
            found["head/signed_weights"] = torch.stack(known).amax()
        found["head/encouraged"] = float(not maximizes and self._encourages())
        used = [leaf for node in self.nodes for leaf in _leaves(node) if leaf.dim() > 1]
        found["head/penalty"] = float(bool(used))
        return found

    def body_numbers(self) -> dict[str, Tensor | float]:
        """Returns what there is to know about the layers before it."""
        graph = self._graph
        matrices = [layer for layer in graph.layers if _is(layer, MATRIX)]
        found: dict[str, Tensor | float] = {"body/layers": float(len(matrices))}
        bent = [n for n in graph.others if not _is(n, LINEAR) and not self._is_scaling(n)]
        bent += [layer for layer in graph.layers if _is(layer, (*RECURRENT, NORMS[2], NORMS[3]))]
        found["body/nonlinear"] = float(len(bent))
        shares = [_shape(fed)[-1] for layer in matrices if (fed := _fed_by(layer)) is not None and _is(fed, SOFTMAX)]
        found["body/softmax_units"] = float(max(shares, default=0))
        found["body/narrow"] = float(self._narrow())
        found["body/unordered"] = float(self._is_unordered())
        softmaxes = [(_shape(n), _dims(n)) for n in graph.others if _is(n, SOFTMAX)]
        found["body/single_softmax"] = float(sum(shape[d] == 1 for shape, dims in softmaxes for d in dims if shape[d:]))
        return found

    def _scales_output(self, node: Any) -> bool:
        """Whether a product is one of what a last layer puts out."""
        operand = next((one for one in _inputs(node) if one is not None), None)
        while operand is not None and _is(operand, VIEWS):
            operand = _inputs(operand)[0]
        return operand in self._graph.last

    def _narrow(self) -> int:
        """Returns the units of the narrowest hidden layer that all data must pass, if they are few; else 0."""
        hidden = [one for one in self._graph.layers if one not in self._graph.last and _is(one, (*MATRIX, *RECURRENT))]
        sizes = [(_shape(one)[1 if _is(one, ("ConvolutionBackward",)) else -1], one) for one in hidden if _shape(one)]
        few = sorted((size for size in sizes if size[0] <= FEW_UNITS), key=lambda size: size[0])[:8]
        return next((units for units, layer in few if self._graph.passes_all(layer)), 0)

    def _is_unordered(self) -> bool:
        """Whether attention is fed a sequence that nothing was added to or joined with: it cannot know its order."""
        attention = [node for node in self._graph.others if _is(node, ATTENTION) or _compares_places(node)]
        blind = 0
        for node in attention:
            waiting, seen, ordered = _inputs(node), set(), _is_told_order(node)
            while waiting and not ordered:
                one = waiting.pop()
                if one is None or one in seen:
                    continue
                seen.add(one)
                bias = _is(one, ("AddBackward",)) and any(leaf.dim() == 1 for leaf in _leaves(one))
                scalar = _is(one, ("MulBackward", "DivBackward")) and self._is_scaling(one)
                ordered = not (bias or scalar or _is(one, ORDERLESS))
                waiting += _inputs(one)
            blind += not ordered
        return blind > 0

    def _encourages(self) -> bool:
        """Whether lowering the loss lowers the log-probability of what has a high weight, as a lost minus does."""
        signs = set()
        waiting = [(self.nodes[0], 1.0)] if self.nodes else []
        for _ in range(200):
            if not waiting:
                break
            node, sign = waiting.pop()
            operands = _inputs(node)
            constant = self._constant(node) if _is(node, ("MulBackward", "DivBackward")) else None
            if _is(node, ("MulBackward",)) and constant is not None and self._both_signs(node) is not None:
                factor = next(one for one in operands if one is not None)
                if (own := _sign_of_log(factor)) != 0:
                    signs.add(sign * own)
                continue
            if constant is not None and constant.numel() == 1 and constant.device.type == "cpu":
                sign *= math.copysign(1.0, float(constant))
            flips = [_is(node, ("NegBackward", "RsubBackward")), _is(node, ("NegBackward",))]
            if _is(node, ("SubBackward",)):
                flips = [False, True]
            through = (*REDUCED, "AddBackward", "SubBackward", "NegBackward", "RsubBackward", "MulBackward")
            if _is(node, (*through, "DivBackward", "MinimumBackward", "StackBackward", "CatBackward")):
                pairs = zip(operands, [*flips, *[flips[0]] * len(operands)], strict=False)
                waiting += [(one, -sign if flip else sign) for one, flip in pairs if one is not None]
        return signs == {1.0} and not _is_about_costs()

    def _is_scaling(self, node: Any) -> bool:
        return _is(node, ("MulBackward", "DivBackward")) and sum(one is not None for one in _inputs(node)) <= 1

    def _broadcasts(self, node: Any) -> bool:
        """Whether targets of another shape have made a square of a column: (n, 1) and (n,) give (n, n)."""
        if _is(node, ("SubBackward", "RsubBackward")):
            shape, operands = _shape(node), [one for one in _inputs(node) if one is not None]
            before = _shape(operands[0]) if len(operands) == 1 else shape
        elif _is(node, ("ExpandBackward",)):
            shape, before = _shape(node), _shape(_inputs(node)[0])
        else:
            return False
        square = len(shape) == 2 and shape[0] == shape[1] > 1
        return square and math.prod(before) == shape[0] and before != shape

    def _is_scrambled(self) -> bool:
        """Whether a reshape put the last layer's units elsewhere: (n, length, units) read as (n, units, length)."""
        node = next((node for node in self.nodes if _is(node, ("LogSoftmaxBackward",))), None)
        shape = _shape(node) if node is not None else []
        while node is not None and not _is(node, LAYERS):
            operands = [one for one in _inputs(node) if one is not None]
            if len(operands) != 1:
                return False
            before, own = _shape(operands[0]), _shape(node)
            flat = len(own) == 2 < len(before) and own[1] == before[1] and math.prod(before[2:]) > 1
            if _is(node, VIEWS[:3]) and flat and _is(operands[0], ("ConvolutionBackward",)):
                return True  # (n, units, height, width) read as (n * height * width, units)
            if _is(node, VIEWS[:3]) and len(own) == len(before) == 3 and own == shape:
                return own != before and own == [before[0], before[2], before[1]]
            if own != before and not _is(node, VIEWS):
                return False
            node = operands[0]
        return False

    def _is_bare_log(self, node: Any) -> bool:
        """Whether the log of a probability is taken that nothing keeps from being 0."""
        for _ in range(3):
            operands = [one for one in _inputs(node) if one is not None]
            if len(operands) != 1:
                return False
            node = operands[0]
            if _is(node, ("SoftmaxBackward", "SigmoidBackward")):
                return True
            if not _is(node, ("RsubBackward", "SubBackward", *PASS_THROUGH, *VIEWS)):
                return False
        return False

    def _negated(self) -> Tensor | float:
        """Whether the loss is an error with a minus before it: a loss function of torch, or squares and the like."""
        negated, node = False, self.nodes[0] if self.nodes else None
        while node is not None and _is(node, ("NegBackward", *REDUCED)):
            negated ^= _is(node, ("NegBackward",))
            node = next(iter(_inputs(node)), None)
        weights: list[Tensor] = []
        if not (negated and self._is_error(node, weights)):
            return 0.0
        positive = [(weight >= 0).all() for weight in weights]
        if not all(one for one in positive if one.device.type == "cpu"):
            return 0.0
        positive = [one for one in positive if one.device.type != "cpu"]  # not to be waited for
        return torch.stack(positive).all().float() if positive else 1.0

    def _is_error(self, node: Any, weights: list[Tensor], depth: int = 0) -> bool:
        """Whether a node is a sum of what cannot be negative, if the weights that it adds are not."""
        if node is None or depth > MAX_TERMS or node not in self._members:
            return False
        if _is(node, ERRORS) or (_is(node, ("PowBackward",)) and getattr(node, "_saved_exponent", 1) == 2):
            return True
        operands = [one for one in _inputs(node) if one is not None]
        weight = self._constant(node) if _is(node, ("MulBackward", "DivBackward")) else None
        if weight is not None:
            weights.append(weight)
        if not (weight is not None or _is(node, (*REDUCED, "AddBackward"))):
            return False
        return bool(operands) and all(self._is_error(one, weights, depth + 1) for one in operands)

    def _is_root(self, node: Any) -> bool:
        exponent = getattr(node, "_saved_exponent", 1) if _is(node, ("PowBackward",)) else 1
        return 0 < exponent < 1 if isinstance(exponent, float) else _is(node, ("SqrtBackward",))

    def _is_raw_log(self, node: Any) -> bool:
        """Whether the log of what a layer puts out is taken, clamped or not."""
        for _ in range(4):
            operands = [one for one in _inputs(node) if one is not None]
            if len(operands) != 1:
                return False
            node = operands[0]
            if _is(node, MATRIX):
                return True
            if not _is(node, ("ClampBackward", "RsubBackward", "SubBackward", "AddBackward", *PASS_THROUGH)):
                return False
        return False

    def _both_signs(self, node: Any) -> Tensor | None:
        """Whether outputs are weighted by numbers of both signs, such as advantages; NaN-free and on the device."""
        other = self._constant(node)
        if other is None or other.dim() == 0 or other.numel() < 2 or not other.is_floating_point():
            return None
        whole = (other == other.round()).all()
        return ((other.min() < 0) & (other.max() > 0) & ~whole).float()


def _is_told_order(node: Any) -> bool:
    """Whether a mask of attention differs between places, as a causal one or ALiBi does and one of padding does not."""
    mask = _saved(node, "attn_mask", "attn_bias")
    own = mask is not None and mask.dim() > 1 and mask.shape[-2] > 1 and mask.stride(-2) != 0
    return own or bool(getattr(node, "_saved_is_causal", False))


def _compares_places(node: Any) -> bool:
    """Whether a node is the softmax of attention written out: of products of what the model computed."""
    if not _is(node, SOFTMAX):
        return False
    for _ in range(6):
        operands = [one for one in _inputs(node) if one is not None]
        if len(operands) != 1:
            return False
        node = operands[0]
        if _is(node, ("BmmBackward",)):
            return len([one for one in _inputs(node) if one is not None]) == 2
    return False


def _is_about_costs() -> bool:
    """Whether the code that called backward names costs: their log-probabilities belong into a loss without a minus."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "gradvitals"):
        frame = frame.f_back
    names = () if frame is None else (*frame.f_code.co_names, *frame.f_code.co_varnames)
    return any(word in ("cost", "costs", "elbo", "energy") for name in names for word in name.lower().split("_"))


def _is_dropout(mask: Tensor) -> Tensor:
    """Whether a factor is what dropout multiplies by on a CPU: zeros and one number over 1."""
    most = mask.amax()
    return ((mask == 0) | (mask == most)).all() & (mask == 0).any() & (most > 1) & mask.is_floating_point()


def _sign_of_log(node: Any) -> float:
    """Returns 1 if a node is the log-probability of what was chosen, -1 if it is its negative, 0 if it is neither."""
    sign, is_log = 1.0, False
    for _ in range(8):
        operands = [one for one in _inputs(node) if one is not None]
        if _is(node, ("NegBackward",)):
            sign = -sign
        elif _is(node, ("NllLoss", "BinaryCrossEntropy")):
            return -sign
        elif _is(node, ("GatherBackward", "IndexBackward")):
            logs = ("SoftmaxBackward", "SigmoidBackward") if is_log else ("LogSoftmax", "Logsumexp", "LogBackward")
            return sign if _comes_from(operands[0], logs) else 0.0
        elif (
            _is(node, ("SubBackward",)) and _comes_from(node, ("PowBackward",)) and _comes_from(node, ("LogBackward",))
        ):
            return sign  # of a normal distribution
        elif not _is(node, (*REDUCED, "ExpBackward", "SubBackward", "ClampBackward", "LogBackward")) or not operands:
            return 0.0
        is_log |= _is(node, ("LogBackward",))
        node = operands[0]
    return 0.0


def _comes_from(node: Any, names: tuple[str, ...], depth: int = 6) -> bool:
    """Whether one of the last operations before a node, or itself, is one of these."""
    if node is None or depth == 0 or _is(node, LAYERS):
        return False
    return _is(node, names) or any(_comes_from(one, names, depth - 1) for one in _inputs(node))


def _dims(node: Any) -> list[int]:
    """Returns the dimensions that an operation works along, counted from the first."""
    dims = getattr(node, "_saved_dim", None)
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    rank = len(_shape(_inputs(node)[0])) if _inputs(node)[0] is not None else 0
    dims = [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in dims]
    return [dim + rank if dim < 0 else dim for dim in dims]


def _is_time_major(node: Any) -> bool:
    """Whether a node puts out all steps of a recurrence, one after the other along its first dimension."""
    if node is not None and _is(node, ("CatBackward",)):  # two directions
        return all(_is_time_major(one) for one in _inputs(node))
    return node is not None and (_is(node, RECURRENT) or (_is(node, ("StackBackward",)) and _dims(node)[:1] == [0]))


def _fed_by(layer: Any) -> Any:
    """Returns the operation whose result a linear layer is fed, dropout and views aside; None if there is none."""
    fed = [one for one in _inputs(layer) if one is not None and not hasattr(one, "variable")]
    weights = [one for one in fed if _is(one, ("TBackward",)) and hasattr(_inputs(one)[0], "variable")]
    fed = [one for one in fed if one not in weights]
    node = fed[0] if len(fed) == 1 and weights else None
    while node is not None and _is(node, ("NativeDropoutBackward", *VIEWS)):
        node = _inputs(node)[0]
    return node


def _output_of(node: Any) -> Tensor | None:
    """Returns what an operation put out, if what it saved tells: a linear layer or an activation."""
    if node is None:
        return None
    if _is(node, VIEWS):
        output = _output_of(_inputs(node)[0])
        return None if output is None or output.numel() != math.prod(_shape(node)) else output.reshape(_shape(node))
    if _is(node, tuple(SQUASHES)):
        return _saved(node, "result")
    first, second = _saved(node, "mat1", "self"), _saved(node, "mat2")
    if not _is(node, ("AddmmBackward", "MmBackward")) or first is None or second is None:
        return None
    bias = [leaf for leaf in _leaves(node) if leaf.dim() == 1]
    return first @ second + (bias[0].detach() if bias else 0.0)


def _sampled(values: Tensor) -> Tensor:
    """Returns some rows of a matrix."""
    rows = max(1, min(MAX_SAMPLES, MAX_ELEMENTS // max(math.prod(values.shape[1:]), 1)))
    return values if len(values) <= rows else values[:: -(-len(values) // rows)]


def _has_more_like(data: Tensor) -> bool:
    """Whether the program holds a tensor with these samples and many more; asked at most once in a run."""
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
    if _is(layer, LOOKUPS):
        indices = _saved(layer, "indices")
        found: dict[str, Tensor | float] = {"input/lookup": 1.0}
        if indices is not None:
            flat = indices.reshape(-1)[: MAX_SAMPLES * 8].float()
            found["input/checksum"] = (flat * torch.arange(1, len(flat) + 1, device=flat.device)).mean()
        return found
    data = _saved(layer, "mat1", "input", "self")
    assert data is not None
    if data.dim() == 4 or _is(layer, ("ConvolutionBackward",)):
        channels = data.shape[1] if data.dim() > 2 else 1
        flat = data[:64].transpose(0, 1).reshape(channels, -1).T if data.dim() > 2 else data
    else:
        flat = data.reshape(-1, data.shape[-1])
    values = _sampled(flat).float()
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
        "input/normalized": float(_is(layer, NORMS)),
        "input/misread": float(_is_misread(getattr(layer, "_saved_input", data))),
    }
    return found


def _mixing_numbers(graph: Graph, head: Head) -> dict[str, Tensor | float]:
    """Returns whether samples of the batch are mixed with each other, and how sharply attention starts to choose."""
    samples = _shape(graph.last[0])[:1] if graph.last and len(_shape(graph.last[0])) > 1 else []
    softmaxes = [(_shape(node), _dims(node)) for node in graph.others if _is(node, SOFTMAX)]
    over_batch = [dims == [0] and shape[:1] == samples != [1] and len(shape) > 1 for shape, dims in softmaxes]
    found: dict[str, Tensor | float] = {"body/batch_softmax": float(any(over_batch))}
    outputs = head.outputs
    pooled = [n for n in (*graph.others, *head.nodes) if _is(n, ("MeanBackward", "SumBackward", "AmaxBackward"))]
    over_batch = [_dims(node) == [0] and _shape(_inputs(node)[0])[:1] == samples for node in pooled]
    if outputs is not None and outputs.dim() > 1 and len(outputs) > 1 and any(over_batch):
        found["body/batch_mean"] = (_sampled(outputs) == outputs[:1]).all().float()
    chosen = [
        result for node in graph.others if _compares_places(node) if (result := _saved(node, "result")) is not None
    ]
    if peaks := [_sampled(one).float().amax(-1).mean() for one in chosen if one.shape[-1] >= FEW_PLACES]:
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
    data = _saved(entry, "mat1") if entry is not None and not _is(entry, LOOKUPS) else None
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
        getattr(node, "_saved_is_causal", False) or _saved(node, "attn_mask", "attn_bias") is not None
        for node in graph.others
        if _is(node, ATTENTION)
    ]
    written = [node for node in graph.others if _compares_places(node)]
    masks = ("MaskedFill", "WhereBackward", "AddBackward", "SubBackward", "Tril")
    given += [_comes_from(node, masks, 5) for node in written]
    return bool(given) and not any(given)


def _text_numbers(entries: list[Any], head: Head, graph: Graph) -> dict[str, Tensor | float]:
    """Returns how the labels of tokens compare with the tokens at the same places."""
    lookups = [_saved(entry, "indices") for entry in entries if _is(entry, LOOKUPS)]
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
    is_padding = (pads == padded).all() & (pad_label != head.ignored)
    found: dict[str, Tensor | float] = {"target/visible": ahead}
    return found | {"target/copied": (ids == labels).all().float(), "target/padding": is_padding * pads.float().mean()}


def _mode_numbers(model: nn.Module, graph: Graph, *, first: bool) -> dict[str, Tensor | float]:
    """Returns what the modes of layers show: evaluation mode, dropout, and, at first, frozen layers and batch norm."""
    found: dict[str, Tensor | float] = {}
    norms = [node for node in graph.layers if _is(node, NORMS[:2])]
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
    shapes = [_shape(node) for node in norms if getattr(node, "_saved_training", False)]
    if counts := [math.prod(shape) / shape[1] for shape in shapes if len(shape) > 1]:
        found["mode/norm_samples"] = float(min(counts))
    return found


VALIDATED = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "kl_div"),
)
"""Losses of torch.nn.functional whose values count as validation losses."""

MAX_LOSSES = 10_000
"""Losses of one evaluation that are averaged."""

MAX_BLOCKS = 200
"""Blocks without gradients in a row that do not call the model, after which nobody looks any more."""

MAX_SILENT = 20
"""Evaluations in a row without such a loss, after which nobody listens any more."""


class Validation:
    """Finds the validation loss of an ordinary loop: what torch's losses return between model.eval() and model.train().

    A training step costs nothing: only ``nn.Module.train`` is wrapped, and the losses while the model evaluates.

    It also counts how often the script evaluates the model in training mode: calls it under torch.no_grad() while it
    drops activations or uses the statistics of the batch. A hook of torch's, not of the model's, sees the calls while
    such a block is open: the model can be copied and pickled as ever.

    Args:
        model: The model.
        report: Called on the training thread with the mean loss of each evaluation.
    """

    def __init__(self, model: nn.Module, report: Callable[[Tensor], None]) -> None:
        self._model, self._report = weakref.ref(model), weakref.WeakMethod(report)
        self._losses: list[Tensor] = []
        self._silent = 0
        self._evaluations = 0
        self._fed: weakref.ref[Tensor] | None = None
        """What the model was called with first since the script last built a graph."""
        self._graphs = -1
        """Autograd's count of nodes then."""
        self.has_evaluated = False
        """Whether the script has ever switched the model to evaluation mode."""
        self._block: Any = None
        """The block without gradients that is open."""
        self._blocks = 0
        """Blocks without gradients in a row that did not call the model."""
        _TRAIN.add(self)
        if any(map(_acts_in_training, model.modules())) and not _is_compiled():
            for wrapper in _BLOCKS:
                wrapper.add(self)

    @property
    def in_training_mode(self) -> int:
        """Evaluations in training mode so far, with steps between them; a single one may be a dry run."""
        return self._evaluations if self._evaluations > 1 else 0

    def stop(self) -> None:
        """Report what is left, and take everything away."""
        _TRAIN.discard(self)
        self._stop_counting()
        self._switch(True)

    def before_train(self, module: nn.Module, mode: bool = True) -> None:
        """A module is about to switch between training and evaluation."""
        if module is self._model():
            self.has_evaluated |= not mode
            if self.has_evaluated:
                self._stop_counting()
            self._switch(mode)

    def _stop_counting(self) -> None:
        for wrapper in _BLOCKS:
            wrapper.discard(self)
        self._leave_block()

    def before_block(self, block: Any, *_: Any) -> None:
        """Gradients are about to be turned off: by the script, if not by torch."""
        model, frame = self._model(), sys._getframe(3)
        caller = frame.f_globals.get("__name__", "")
        if caller == "torch.utils._contextlib":  # a decorator: of whose function?
            caller = getattr(frame.f_locals.get("func"), "__globals__", {}).get("__name__", "")
        ours = caller.startswith(("torch.", "gradvitals."))
        if ours or model is None or not model.training or self._block is not None:
            return
        self._blocks += 1
        if self._blocks > MAX_BLOCKS or _is_compiled():
            self._stop_counting()
        else:  # in this order, no other thread leaves the hook behind
            PRE_HOOKS[id(self)] = self._called
            self._block = block

    def after_block(self, block: Any, *_: Any) -> None:
        """A block without gradients ends."""
        if block is self._block:
            self._leave_block()

    def _leave_block(self) -> None:
        self._block = None
        PRE_HOOKS.pop(id(self), None)

    def _called(self, module: nn.Module, fed: tuple[Any, ...]) -> None:
        """A module is called while a block without gradients is open."""
        if not torch.compiler.is_compiling() and module is self._model():
            with contextlib.suppress(Exception):  # ours, in the middle of the script's own call
                self._count(module, fed[0] if fed else None)

    def _count(self, model: nn.Module, fed: Any) -> None:
        """Count the first call since the script last built a graph, unless the second one has the same input."""
        if torch.is_grad_enabled() or not any(map(_acts_in_training, model.modules())):
            self._leave_block()
            return
        self._blocks = 0
        if (graphs := torch._C._autograd._get_sequence_nr()) != self._graphs:
            self._evaluations += 1
            self._graphs, self._fed = graphs, weakref.ref(fed) if isinstance(fed, Tensor) else None
            return
        self._leave_block()
        if self._fed is not None and fed is not None and fed is self._fed():  # Monte Carlo dropout is meant to drop
            self._evaluations -= 1
        self._fed = None

    def after_loss(self, loss: Any) -> None:
        """A loss was computed while the model evaluates."""
        single = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.requires_grad
        if single and len(self._losses) < MAX_LOSSES and (not self._losses or self._losses[0].device == loss.device):
            self._losses.append(loss.detach().reshape(()).float())
            self._silent = 0

    def _switch(self, trains: bool) -> None:
        for wrapper in _LOSSES:
            wrapper.discard(self)
        losses, self._losses = self._losses, []
        report = self._report()
        if losses and report is not None:
            report(torch.stack(losses).mean())
        if not trains and self._silent < MAX_SILENT and not _is_compiled():
            self._silent += 1
            for wrapper in _LOSSES:
                wrapper.add(self)


_BACKWARD = _Wrapper(torch.autograd, "backward", before=Inspection.before_backward)
_SAVED_HOOKS = _Wrapper(saved_tensors_hooks, "__enter__", before=Inspection.before_saved_hooks)
_TRAIN = _Wrapper(nn.Module, "train", before=Validation.before_train)
_BLOCKS = [
    _Wrapper(kind, name, before=before)
    for kind in (torch.no_grad, torch.inference_mode)
    for name, before in (("__enter__", Validation.before_block), ("__exit__", Validation.after_block))
]
_LOSSES = [_Wrapper(nn.functional, name, after=Validation.after_loss) for name in VALIDATED]


def _acts_in_training(module: nn.Module) -> bool:
    """Whether a layer is in training mode, and acts differently in it."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.training and module.p > 0
    return module.training and isinstance(module, nn.modules.batchnorm._BatchNorm)


def _is_initial(weight: Tensor) -> Tensor:
    """Whether a matrix looks like torch's own initialization: uniform between plus and minus 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
    largest, spread = weight.abs().max() / bound, weight.std() * math.sqrt(3) / bound
    return ((largest > 0.9) & (largest <= 1) & (spread > 0.9) & (spread < 1.1)).float()


def _is_compiled() -> bool:
    """Whether torch.compile is in use."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
