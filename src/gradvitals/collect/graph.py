"""The graph that autograd builds of a loss: its head, from the loss to the last layers, and the body before it.

Everything is read from the names of its operations and the tensors they saved, so it does not matter whether a model
uses modules or functions. What torch.compile has compiled is one node, which tells nothing; what the loop computes
outside of it, most often the loss, is seen as ever.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.types import ACTIVATIONS, LOSSES

MAX_NODES = 20_000
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
ATTENTION = ("ScaledDotProduct", "EfficientAttention", "FlashAttention")
ORDERLESS = (
    *("AddmmBackward", "MmBackward", "LinearBackward", "BmmBackward", *NORMS, *LOOKUPS, *PASS_THROUGH, *VIEWS),
    *("torch::autograd::AccumulateGrad", "CloneBackward", "SelectBackward", "SplitBackward", "UnbindBackward"),
    *("NativeDropoutBackward", "UnsafeSplitBackward"),
)
"""Operations that treat all places of a sequence alike."""
FEW_UNITS = 3
"""Units of a hidden layer that are reported if everything must pass them."""
SUM = 2
"""The reduction of a loss that is summed, in the terms of ATen."""


def is_op(node: Any, names: tuple[str, ...]) -> bool:
    """Returns whether a node is one of these operations, by the start of its name."""
    return _starts_with(node.name(), names)


@functools.cache
def _starts_with(name: str, names: tuple[str, ...]) -> bool:
    return name.startswith(names)


def shape_of(node: Any) -> list[int]:
    """Returns the shape of what a node computed; empty if it is unknown."""
    metadata = node._input_metadata
    return [int(size) for size in metadata[0].shape] if metadata else []


def saved(node: Any, *names: str) -> Tensor | None:
    """Returns the first of these saved tensors that there is."""
    for name in names:
        with contextlib.suppress(AttributeError, RuntimeError):
            value = getattr(node, f"_saved_{name}")
            if isinstance(value, Tensor):
                return value.detach()
    return None


def inputs_of(node: Any) -> list[Any]:
    """Returns the nodes whose results a node was given; None for what needs no gradient."""
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
            is_layer = is_op(node, LAYERS) and self._has_weight(node)
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
            for before in inputs_of(node):
                if before is not None and before not in seen:
                    seen.add(before)
                    waiting.append((before, in_head and not is_layer))

    def weight_row(self, layer: Any) -> int:
        """Returns the row of a layer's weight; -1 if it belongs to another model."""
        found = [self._rows.get(id(leaf), -1) for leaf in _leaves(layer) if leaf.dim() > 1 or is_op(layer, NORMS)]
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
            if is_op(node, ("AddBackward", "CatBackward", "StackBackward")) and None in inputs_of(node):
                return False  # data is added or joined here
            following = [before for before in inputs_of(node) if before is not None and before not in seen]
            if is_op(node, LAYERS) and self._has_weight(node) and feeds_data(node):
                return False
            seen.update(following)
            waiting += following
        return True

    def before(self, node: Any) -> int:
        """Returns the row of the layer whose output a node acts on; -1 if there is none."""
        for _ in range(8):
            if is_op(node, LAYERS):
                return self.weight_row(node)
            following = [before for before in inputs_of(node) if before is not None]
            if len(following) != 1:
                return -1
            node = following[0]
        return -1


def _range(weights: Tensor, *, with_one: bool) -> Tensor:
    """Returns the largest weight over the smallest that is not 0; weights of positives are beside 1 for negatives."""
    weights = weights.detach().float().reshape(-1)
    weights = torch.cat([weights, weights.new_ones(1)]) if with_one else weights
    return weights.amax() / torch.where(weights > 0, weights, math.inf).amin()


def feeds_data(layer: Any) -> bool:
    """Whether a layer acts on data rather than on another layer's output."""
    if is_op(layer, LOOKUPS):
        return True
    data = saved(layer, "mat1", "input", "self")
    through = [before for before in inputs_of(layer) if before is not None]
    only_weights = all(hasattr(b, "variable") or is_op(b, PASS_THROUGH) for b in through)
    return data is not None and only_weights and len(through) <= len(list(_leaves(layer)))


def _leaves(node: Any) -> Iterator[Tensor]:
    """Yields the parameters that a node uses."""
    for before in inputs_of(node):
        for _ in range(4):
            if before is None or not is_op(before, PASS_THROUGH):
                break
            before = next(iter(inputs_of(before)), None)
        if before is not None and hasattr(before, "variable"):
            yield before.variable


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
        squashes = [(node, SQUASHES[name]) for node in nodes for name in SQUASHES if is_op(node, (name,))]
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
            kind = next((kind for name, kind in by_name.items() if is_op(node, (name,))), "")
            if kind:
                self.loss = kind
                self.error_node, self.weights = node, saved(node, "weight", "pos_weight")
                is_mean = getattr(node, "_saved_reduction", 1) != SUM and self.weights is None
                self.is_mean = is_mean and self._is_whole(node)
                target = saved(node, "target")
                own = self.outputs = saved(node, "self")
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
            if is_op(node, ("PowBackward", "AbsBackward")) and self._is_difference(node):
                self.loss = "l1" if is_op(node, ("AbsBackward",)) else "mse"
                self.error_node = node
                self.is_mean = self._is_whole(node)
                self._targets_from_difference(node)
                return
        if self._finds_product():
            return
        logs = [node for node in self.nodes if is_op(node, ("LogBackward", "LogSoftmaxBackward"))]
        for node in self.nodes:
            if logs and is_op(node, ("MulBackward",)):
                other = self._constant(node)
                if other is not None and other.dim() > 0 and other.is_floating_point():
                    self.loss, self.targets = "log", other
                    return

    def _is_whole(self, node: Any) -> bool:
        """Whether the loss is this node or its mean: no other term is added to it, and nothing scales it."""
        above = self.nodes[0]
        while above is not node and is_op(above, ("MeanBackward", *VIEWS)):
            above = inputs_of(above)[0]
        return above is node

    def _finds_product(self) -> bool:
        """Finds cross-entropy and the KL divergence of targets that are shares of classes.

        Both end in a product of the targets with what should be log-probabilities, summed up.
        """
        node, scale = self.nodes[0] if self.nodes else None, False
        while node is not None and is_op(node, ("NegBackward", "DivBackward", *REDUCED)):
            scale |= is_op(node, ("DivBackward", "MeanBackward"))
            operands = inputs_of(node)
            node = operands[0] if all(one is None for one in operands[1:]) else None
        kind = "cross_entropy"
        if node is not None and is_op(node, ("SubBackward",)):
            operands = inputs_of(node)
            kind, node = "kl", operands[1] if operands[0] is None else None
        targets = self._constant(node) if node is not None and is_op(node, ("MulBackward",)) else None
        if targets is None or targets.dim() < 2:
            return False
        factor = next(one for one in inputs_of(node) if one is not None)
        if not is_op(factor, ("LogSoftmaxBackward",) if kind == "cross_entropy" else ("SoftmaxBackward",)):
            return False
        self.loss, self.targets, self.classes = kind, targets, targets.shape[1]
        self.is_mean = scale and targets.dim() == 2
        return True

    def _is_difference(self, node: Any) -> bool:
        before = inputs_of(node)[0]
        while before is not None and is_op(before, PASS_THROUGH):
            before = inputs_of(before)[0]
        exponent = getattr(node, "_saved_exponent", 2) if is_op(node, ("PowBackward",)) else 2
        return exponent == 2 and before is not None and is_op(before, ("SubBackward", "RsubBackward"))

    def _targets_from_difference(self, node: Any) -> None:
        """The loss saved outputs minus targets; the outputs are computed again from what their layer saved."""
        difference, before = saved(node, "self"), inputs_of(node)[0]
        operands = inputs_of(before)
        output = _output_of(next((one for one in operands if one is not None), None))
        if difference is None or output is None or output.shape != difference.shape:
            return
        if sum(one is not None for one in operands) == 1:
            targets = output - difference if operands[0] is not None else output + difference
            self.targets = torch.where(output.isfinite(), targets, 0.0)  # else it is the output that is broken

    def _constant(self, node: Any) -> Tensor | None:
        """Returns the factor of a product that needs no gradient."""
        operands = inputs_of(node)
        if len(operands) == 2 and operands[1] is None:
            return saved(node, "other")
        return saved(node, "self") if len(operands) == 2 and operands[0] is None else None

    @property
    def has_targets(self) -> bool:
        """Whether it is known what the outputs are compared with."""
        return self.labels is not None or self.targets is not None

    def error(self) -> Tensor | None:
        """Returns the mean error of the outputs, if the loss has other terms too; None if it is all there is."""
        if self.is_mean or self.error_node is None or self.weights is not None:
            return None
        node, own, target = self.error_node, saved(self.error_node, "self"), saved(self.error_node, "target")
        if own is None:
            return None
        if target is None:  # a difference
            return (sampled(own).square() if self.loss == "mse" else sampled(own).abs()).float().mean()
        if self.loss in ("nll", "cross_entropy"):
            return nn.functional.nll_loss(own.float(), target, ignore_index=self.ignored) if own.dim() == 2 else None
        if own.shape != target.shape or own.dim() == 0 or is_op(node, ("Huber",)):
            return None
        own, target = sampled(own).float(), sampled(target).float()
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
            flat = sampled(outputs).argmax(1).reshape(-1)
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
        shape = shape_of(last[0]) if last else []
        if shape:
            found["head/units"] = float(shape[1] if is_op(last[0], ("ConvolutionBackward",)) else shape[-1])
            found["head/samples"] = float(shape[0])
        if self._squash is not None and self.activation in ("softmax", "log_softmax"):
            shape, dims = shape_of(self._squash), softmax_dims(self._squash)
            found["head/softmax_units"] = float(shape[dims[0]]) if dims and dims[0] < len(shape) else math.nan
        elif self.loss == "cross_entropy":
            found["head/softmax_units"] = float(self.classes)
        tops = [softmax_dims(node) for node in self.nodes if is_op(node, LOG_SOFTMAX) and len(shape_of(node)) == 2]
        found["head/batch_softmax"] = float([0] in tops)
        found["head/broadcast"] = float(any(self._broadcasts(node) for node in self.nodes))
        logs = [node for node in self.nodes if is_op(node, ("LogBackward",))]
        found["head/scrambled"] = float(self.loss == "cross_entropy" and self._is_scrambled())
        found["head/log"] = float(any(self._is_bare_log(node) for node in logs))
        found["head/negated"] = 0.0 if maximizes else self._negated()
        found["head/root"] = float(any(self._is_root(node) for node in self.nodes))
        found["head/raw_log"] = float(self.loss == "log" and any(self._is_raw_log(node) for node in logs))
        found["head/logs"] = float(len(logs))
        foreign = [layer for layer in last if graph.weight_row(layer) < 0]
        found["head/foreign"] = float(bool(last) and len(foreign) == len(last))
        if self.weights is not None:
            found["head/weights"] = _range(self.weights, with_one=saved(self.error_node, "pos_weight") is not None)
        products = [node for node in self.nodes if is_op(node, ("MmBackward", "BmmBackward"))]
        found["head/products"] = float(bool(products))
        norms = [node for node in self.nodes if is_op(node, ("LinalgVectorNormBackward", "NormBackward"))]
        if products and norms and self.loss == "cross_entropy" and self.outputs is not None and self.outputs.dim() == 2:
            scores = self.outputs[:MAX_SAMPLES]
            found["head/cosine_range"] = (scores.amax(1) - scores.amin(1)).float().mean()
        found["head/dropout"] = float(any(is_op(node, ("NativeDropoutBackward",)) for node in self.nodes))
        scaled = [node for node in self.nodes if is_op(node, ("MulBackward",)) and self._scales_output(node)]
        masks = [mask for node in scaled if (mask := self._constant(node)) is not None and mask.numel() > 1]
        if masks:
            found["head/dropout"] = torch.stack([_is_dropout(mask).float() for mask in masks]).amax()
        found["head/normalized"] = float(any(is_op(node, NORMS[:2]) for node in (*self.nodes, *last)))
        found["head/chosen"] = float(any(is_op(node, ("GatherBackward", "IndexBackward")) for node in self.nodes))
        found["head/scaled"] = float(any(is_op(n, ("MulBackward", "DivBackward", "AddBackward")) for n in self.nodes))
        found["head/terms"] = float(len(last))
        signs = [self._both_signs(node) for node in self.nodes if is_op(node, ("MulBackward",))]
        if known := [sign for sign in signs if sign is not None]:
            found["head/signed_weights"] = torch.stack(known).amax()
        found["head/encouraged"] = float(not maximizes and self._encourages())
        used = [leaf for node in self.nodes for leaf in _leaves(node) if leaf.dim() > 1]
        found["head/penalty"] = float(bool(used))
        return found

    def body_numbers(self) -> dict[str, Tensor | float]:
        """Returns what there is to know about the layers before it."""
        graph = self._graph
        matrices = [layer for layer in graph.layers if is_op(layer, MATRIX)]
        found: dict[str, Tensor | float] = {"body/layers": float(len(matrices))}
        bent = [n for n in graph.others if not is_op(n, LINEAR) and not self._is_scaling(n)]
        bent += [layer for layer in graph.layers if is_op(layer, (*RECURRENT, NORMS[2], NORMS[3]))]
        found["body/nonlinear"] = float(len(bent))
        shares = [
            shape_of(fed)[-1] for layer in matrices if (fed := _fed_by(layer)) is not None and is_op(fed, SOFTMAX)
        ]
        found["body/softmax_units"] = float(max(shares, default=0))
        found["body/narrow"] = float(self._narrow())
        found["body/unordered"] = float(self._is_unordered())
        softmaxes = [(shape_of(n), softmax_dims(n)) for n in graph.others if is_op(n, SOFTMAX)]
        found["body/single_softmax"] = float(sum(shape[d] == 1 for shape, dims in softmaxes for d in dims if shape[d:]))
        return found

    def _scales_output(self, node: Any) -> bool:
        """Whether a product is one of what a last layer puts out."""
        operand = next((one for one in inputs_of(node) if one is not None), None)
        while operand is not None and is_op(operand, VIEWS):
            operand = inputs_of(operand)[0]
        return operand in self._graph.last

    def _narrow(self) -> int:
        """Returns the units of the narrowest hidden layer that all data must pass, if they are few; else 0."""
        hidden = [
            one for one in self._graph.layers if one not in self._graph.last and is_op(one, (*MATRIX, *RECURRENT))
        ]
        sizes = [
            (shape_of(one)[1 if is_op(one, ("ConvolutionBackward",)) else -1], one) for one in hidden if shape_of(one)
        ]
        few = sorted((size for size in sizes if size[0] <= FEW_UNITS), key=lambda size: size[0])[:8]
        return next((units for units, layer in few if self._graph.passes_all(layer)), 0)

    def _is_unordered(self) -> bool:
        """Whether attention is fed a sequence that nothing was added to or joined with: it cannot know its order."""
        attention = [node for node in self._graph.others if is_op(node, ATTENTION) or compares_places(node)]
        blind = 0
        for node in attention:
            waiting, seen, ordered = inputs_of(node), set(), _is_told_order(node)
            while waiting and not ordered:
                one = waiting.pop()
                if one is None or one in seen:
                    continue
                seen.add(one)
                bias = is_op(one, ("AddBackward",)) and any(leaf.dim() == 1 for leaf in _leaves(one))
                scalar = is_op(one, ("MulBackward", "DivBackward")) and self._is_scaling(one)
                ordered = not (bias or scalar or is_op(one, ORDERLESS))
                waiting += inputs_of(one)
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
            operands = inputs_of(node)
            constant = self._constant(node) if is_op(node, ("MulBackward", "DivBackward")) else None
            if is_op(node, ("MulBackward",)) and constant is not None and self._both_signs(node) is not None:
                factor = next(one for one in operands if one is not None)
                if (own := _sign_of_log(factor)) != 0:
                    signs.add(sign * own)
                continue
            if constant is not None and constant.numel() == 1 and constant.device.type == "cpu":
                sign *= math.copysign(1.0, float(constant))
            flips = [is_op(node, ("NegBackward", "RsubBackward")), is_op(node, ("NegBackward",))]
            if is_op(node, ("SubBackward",)):
                flips = [False, True]
            through = (*REDUCED, "AddBackward", "SubBackward", "NegBackward", "RsubBackward", "MulBackward")
            if is_op(node, (*through, "DivBackward", "MinimumBackward", "StackBackward", "CatBackward")):
                pairs = zip(operands, [*flips, *[flips[0]] * len(operands)], strict=False)
                waiting += [(one, -sign if flip else sign) for one, flip in pairs if one is not None]
        return signs == {1.0} and not _is_about_costs()

    def _is_scaling(self, node: Any) -> bool:
        return is_op(node, ("MulBackward", "DivBackward")) and sum(one is not None for one in inputs_of(node)) <= 1

    def _broadcasts(self, node: Any) -> bool:
        """Whether targets of another shape have made a square of a column: (n, 1) and (n,) give (n, n)."""
        if is_op(node, ("SubBackward", "RsubBackward")):
            shape, operands = shape_of(node), [one for one in inputs_of(node) if one is not None]
            before = shape_of(operands[0]) if len(operands) == 1 else shape
        elif is_op(node, ("ExpandBackward",)):
            shape, before = shape_of(node), shape_of(inputs_of(node)[0])
        else:
            return False
        square = len(shape) == 2 and shape[0] == shape[1] > 1
        return square and math.prod(before) == shape[0] and before != shape

    def _is_scrambled(self) -> bool:
        """Whether a reshape put the last layer's units elsewhere: (n, length, units) read as (n, units, length)."""
        node = next((node for node in self.nodes if is_op(node, ("LogSoftmaxBackward",))), None)
        shape = shape_of(node) if node is not None else []
        while node is not None and not is_op(node, LAYERS):
            operands = [one for one in inputs_of(node) if one is not None]
            if len(operands) != 1:
                return False
            before, own = shape_of(operands[0]), shape_of(node)
            flat = len(own) == 2 < len(before) and own[1] == before[1] and math.prod(before[2:]) > 1
            if is_op(node, VIEWS[:3]) and flat and is_op(operands[0], ("ConvolutionBackward",)):
                return True  # (n, units, height, width) read as (n * height * width, units)
            if is_op(node, VIEWS[:3]) and len(own) == len(before) == 3 and own == shape:
                return own != before and own == [before[0], before[2], before[1]]
            if own != before and not is_op(node, VIEWS):
                return False
            node = operands[0]
        return False

    def _is_bare_log(self, node: Any) -> bool:
        """Whether the log of a probability is taken that nothing keeps from being 0."""
        for _ in range(3):
            operands = [one for one in inputs_of(node) if one is not None]
            if len(operands) != 1:
                return False
            node = operands[0]
            if is_op(node, ("SoftmaxBackward", "SigmoidBackward")):
                return True
            if not is_op(node, ("RsubBackward", "SubBackward", *PASS_THROUGH, *VIEWS)):
                return False
        return False

    def _negated(self) -> Tensor | float:
        """Whether the loss is an error with a minus before it: a loss function of torch, or squares and the like."""
        negated, node = False, self.nodes[0] if self.nodes else None
        while node is not None and is_op(node, ("NegBackward", *REDUCED)):
            negated ^= is_op(node, ("NegBackward",))
            node = next(iter(inputs_of(node)), None)
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
        if is_op(node, ERRORS) or (is_op(node, ("PowBackward",)) and getattr(node, "_saved_exponent", 1) == 2):
            return True
        operands = [one for one in inputs_of(node) if one is not None]
        weight = self._constant(node) if is_op(node, ("MulBackward", "DivBackward")) else None
        if weight is not None:
            weights.append(weight)
        if not (weight is not None or is_op(node, (*REDUCED, "AddBackward"))):
            return False
        return bool(operands) and all(self._is_error(one, weights, depth + 1) for one in operands)

    def _is_root(self, node: Any) -> bool:
        exponent = getattr(node, "_saved_exponent", 1) if is_op(node, ("PowBackward",)) else 1
        return 0 < exponent < 1 if isinstance(exponent, float) else is_op(node, ("SqrtBackward",))

    def _is_raw_log(self, node: Any) -> bool:
        """Whether the log of what a layer puts out is taken, clamped or not."""
        for _ in range(4):
            operands = [one for one in inputs_of(node) if one is not None]
            if len(operands) != 1:
                return False
            node = operands[0]
            if is_op(node, MATRIX):
                return True
            if not is_op(node, ("ClampBackward", "RsubBackward", "SubBackward", "AddBackward", *PASS_THROUGH)):
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
    mask = saved(node, "attn_mask", "attn_bias")
    own = mask is not None and mask.dim() > 1 and mask.shape[-2] > 1 and mask.stride(-2) != 0
    return own or bool(getattr(node, "_saved_is_causal", False))


def compares_places(node: Any) -> bool:
    """Whether a node is the softmax of attention written out: of products of what the model computed."""
    if not is_op(node, SOFTMAX):
        return False
    for _ in range(6):
        operands = [one for one in inputs_of(node) if one is not None]
        if len(operands) != 1:
            return False
        node = operands[0]
        if is_op(node, ("BmmBackward",)):
            return len([one for one in inputs_of(node) if one is not None]) == 2
    return False


def _is_about_costs() -> bool:
    """Whether the code that called backward names costs: their log-probabilities belong into a loss without a minus."""
    # The graph of a reward that lacks its minus is that of a cost, which needs none. Only names tell them apart, and
    # keep a correct loss of costs, or an ELBO, from a note that its sign is wrong (`loss_mismatch`).
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
        operands = [one for one in inputs_of(node) if one is not None]
        if is_op(node, ("NegBackward",)):
            sign = -sign
        elif is_op(node, ("NllLoss", "BinaryCrossEntropy")):
            return -sign
        elif is_op(node, ("GatherBackward", "IndexBackward")):
            logs = ("SoftmaxBackward", "SigmoidBackward") if is_log else ("LogSoftmax", "Logsumexp", "LogBackward")
            return sign if comes_from(operands[0], logs) else 0.0
        elif (
            is_op(node, ("SubBackward",)) and comes_from(node, ("PowBackward",)) and comes_from(node, ("LogBackward",))
        ):
            return sign  # of a normal distribution
        elif not is_op(node, (*REDUCED, "ExpBackward", "SubBackward", "ClampBackward", "LogBackward")) or not operands:
            return 0.0
        is_log |= is_op(node, ("LogBackward",))
        node = operands[0]
    return 0.0


def comes_from(node: Any, names: tuple[str, ...], depth: int = 6) -> bool:
    """Whether one of the last operations before a node, or itself, is one of these."""
    if node is None or depth == 0 or is_op(node, LAYERS):
        return False
    return is_op(node, names) or any(comes_from(one, names, depth - 1) for one in inputs_of(node))


def softmax_dims(node: Any) -> list[int]:
    """Returns the dimensions that an operation works along, counted from the first."""
    dims = getattr(node, "_saved_dim", None)
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    rank = len(shape_of(inputs_of(node)[0])) if inputs_of(node)[0] is not None else 0
    dims = [dim - (1 << 64) if dim >= 1 << 63 else dim for dim in dims]
    return [dim + rank if dim < 0 else dim for dim in dims]


def _fed_by(layer: Any) -> Any:
    """Returns the operation whose result a linear layer is fed, dropout and views aside; None if there is none."""
    fed = [one for one in inputs_of(layer) if one is not None and not hasattr(one, "variable")]
    weights = [one for one in fed if is_op(one, ("TBackward",)) and hasattr(inputs_of(one)[0], "variable")]
    fed = [one for one in fed if one not in weights]
    node = fed[0] if len(fed) == 1 and weights else None
    while node is not None and is_op(node, ("NativeDropoutBackward", *VIEWS)):
        node = inputs_of(node)[0]
    return node


def _output_of(node: Any) -> Tensor | None:
    """Returns what an operation put out, if what it saved tells: a linear layer or an activation."""
    if node is None:
        return None
    if is_op(node, VIEWS):
        output = _output_of(inputs_of(node)[0])
        return None if output is None or output.numel() != math.prod(shape_of(node)) else output.reshape(shape_of(node))
    if is_op(node, tuple(SQUASHES)):
        return saved(node, "result")
    first, second = saved(node, "mat1", "self"), saved(node, "mat2")
    if not is_op(node, ("AddmmBackward", "MmBackward")) or first is None or second is None:
        return None
    bias = [leaf for leaf in _leaves(node) if leaf.dim() == 1]
    return first @ second + (bias[0].detach() if bias else 0.0)


def sampled(values: Tensor) -> Tensor:
    """Returns some rows of a matrix."""
    rows = max(1, min(MAX_SAMPLES, MAX_ELEMENTS // max(math.prod(values.shape[1:]), 1)))
    return values if len(values) <= rows else values[:: -(-len(values) // rows)]
