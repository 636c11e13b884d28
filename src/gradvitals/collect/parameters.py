"""Finds the watched parameters of a model: names, rows, layers in depth order, attention heads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.collect.window import SlidingWindow, default_tensors
from gradvitals.config import Config
from gradvitals.distributed.shards import (
    Summand,
    is_summand,
    local,
    local_like,
    placements,
    rows_held,
    set_aside,
    sums_of_partial,
)
from gradvitals.types import Layout, TensorInfo

MOMENT_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
"""Optimizers that keep averages of the gradient and of its square."""

COMPILED_PREFIX = "_orig_mod."
"""The prefix of names in a model wrapped by torch.compile."""

SHARED_HEAD_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups")
HEAD_COUNT_NAMES = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
FUSED_NAMES = ("qkv", "c_attn", "Wqkv", "qkv_proj", "in_proj", "to_qkv", "query_key_value", "attn_qkv")
INTERLEAVED_NAMES = ("query_key_value",)  # GPT-NeoX and BLOOM keep q, k and v of one head together
SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
)


@dataclass(frozen=True)
class HeadView:
    """The cut of one weight into attention heads: equal slices, one per head."""

    row: int
    heads: tuple[int, ...]
    """The head of each slice, numbered over the whole model."""
    dim: int
    """The dimension that is cut: 0, or 1 for weights stored as [in, out]."""
    first_slot: int
    """Index of its first slice among those of all views."""

    @property
    def slots(self) -> range:
        """The indices of its slices among those of all views."""
        return range(self.first_slot, self.first_slot + len(self.heads))

    held: range | None = None
    """If the weight is sharded: the rows along `dim` that this rank holds."""
    whole: int = 0
    """The number of rows along `dim` of the whole weight."""

    def lie_apart(self, tensor: Tensor) -> bool:
        """Returns whether every slice of a tensor is complete and contiguous in memory."""
        whole = self.held is None or tensor.shape[self.dim] == self.whole
        return self.dim == 0 and whole and tensor.is_contiguous()

    def norms(self, grad: Tensor) -> Tensor:
        """Returns the norm of every slice of this rank's part of a gradient, in float32 or better."""
        kind = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if self.held is not None and grad.shape[self.dim] != self.whole:
            return self._norms_of_shard(grad, kind)
        if self.dim == 0:
            slices: Tensor = torch.linalg.vector_norm(grad.reshape(len(self.heads), -1), dim=1, dtype=kind)
        else:
            cut = grad.reshape(grad.shape[0], len(self.heads), -1)
            slices = torch.linalg.vector_norm(cut, dim=(0, 2), dtype=kind)
        return slices

    def _norms_of_shard(self, grad: Tensor, kind: torch.dtype) -> Tensor:
        """Returns the same for a shard, which may begin and end within a slice."""
        assert self.held is not None
        norms = torch.linalg.vector_norm(grad, dim=1 - self.dim, dtype=kind)
        slots = torch.arange(self.held.start, self.held.stop, device=grad.device) // (self.whole // len(self.heads))
        sums: Tensor = norms.new_zeros(len(self.heads)).index_add_(0, slots, norms.square())
        return sums.sqrt_()


def watched_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Config
) -> dict[str, nn.Parameter]:
    """Returns every parameter to watch by name: the model's trainable ones, and those that only an optimizer has.

    A tied parameter appears once, under its first name. Parameters without elements are skipped.
    """
    stepped = {id(p): (opt, g, i) for opt in optimizers for g, i, p in _optimizer_parameters(opt)}
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    prefix = stage_prefix(config)
    for full_name, parameter in model.named_parameters():
        name = prefix + _plain(full_name, model)
        seen.add(id(parameter))
        # Complex parameters are skipped: the metrics are defined for real ones.
        readable = parameter.numel() and not parameter.is_complex()
        if (parameter.requires_grad or id(parameter) in stepped) and readable and config.watches(name):
            named[name] = parameter
    for optimizer in optimizers:
        for group, index, parameter in _optimizer_parameters(optimizer):
            if id(parameter) in seen or not parameter.numel() or parameter.is_complex():
                continue
            seen.add(id(parameter))
            names = optimizer.param_groups[group].get("param_names")
            name = prefix + (names[index] if names else f"group{group}.{index}")
            while name in named:  # two optimizers may both have a nameless group0.0
                name += "'"
            if config.watches(name):
                named[name] = parameter
    return named


def stage_prefix(config: Config) -> str:
    """Returns the prefix of names if pipeline stages use the same ones."""
    return "" if config.pipeline_stage is None else f"stage{config.pipeline_stage}."


def _plain(name: str, model: nn.Module) -> str:
    """Returns a name without the prefixes of wrappers."""
    name = name.replace(COMPILED_PREFIX, "")
    wrapped = getattr(model, "_orig_mod", model)
    return name.removeprefix("module.") if isinstance(wrapped, nn.parallel.DistributedDataParallel) else name


def _optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterable[tuple[int, int, nn.Parameter]]:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield group_index, index, parameter


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: its name up to the first number, or its module.

    >>> layer_of("transformer.h.3.attn.qkv.weight"), layer_of("head.weight"), layer_of("scale")
    ('transformer.h.3', 'head', 'scale')
    """
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name


def build_layout(
    parameters: Mapping[str, nn.Parameter],
    heads: Sequence[HeadView],
    head_names: Sequence[str],
    order: Sequence[int],
    classes: Mapping[int, str] | None = None,
    idle: Container[int] = (),
) -> Layout:
    """Returns the description of the rows of every per-tensor, per-layer and per-head array.

    Args:
        parameters: Watched parameters by name, in row order.
        heads: Head views, to note how many heads a tensor was split into.
        head_names: Name of every head.
        order: Rows from the input of the network to its output. A layer has the place of its first row.
        classes: By the `id` of a parameter, the class of its module.
        idle: Rows that are not trained, such as those of an average of the weights.
    """
    names = list(parameters)
    depth: dict[str, int] = {}
    for row in order:
        depth.setdefault(layer_of(names[row]), len(depth))
    heads_of = {view.row: len(set(view.heads)) for view in heads}
    tensors = tuple(
        TensorInfo(
            index=row,
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            layer=layer_of(name),
            depth=depth[layer_of(name)],
            heads=heads_of.get(row, 0),
            frozen=row in idle or not parameter.requires_grad,
            module=(classes or {}).get(id(parameter), ""),
        )
        for row, (name, parameter) in enumerate(parameters.items())
    )
    return Layout(tensors=tensors, layers=tuple(depth), heads=tuple(head_names))


def find_heads(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], config: Config
) -> tuple[list[HeadView], list[str]]:
    """Returns the head views of all attention modules, and the names of the heads.

    The number of heads comes from the user's config, the module, or the model's own config, in this order.
    """
    if config.heads == 0:
        return [], []
    rows = {id(parameter): row for row, parameter in enumerate(parameters.values())}
    views: list[HeadView] = []
    names: list[str] = []
    num_slots = 0
    for path, module in model.named_modules():
        weights = _attention_weights(module)
        if not weights:
            continue
        path = _plain(path, model)
        owners = (module, getattr(module, "config", None), getattr(model, "config", None))
        count = _head_count(path, owners, config)
        shares = _first_count(owners, SHARED_HEAD_COUNT_NAMES) not in (0, count)
        num_queries = weights[0][0].shape[1 if weights[0][3] else 0]
        found: list[HeadView] = []
        for weight, fused, interleaved, transposed in weights:
            out_features = weight.shape[1 if transposed else 0]
            num_slices = 3 * count if fused else count
            if id(weight) not in rows or not count or out_features % num_slices:
                continue
            # Keys and values that several heads share belong to none of them alone.
            if (fused and shares) or (not fused and weight is not weights[0][0] and out_features < num_queries):
                continue
            heads = [s // 3 if interleaved else s % count for s in range(num_slices)]
            own = tuple(len(names) + head for head in heads)
            dim = 1 if transposed else 0
            held = rows_held(weight, dim)
            found.append(HeadView(rows[id(weight)], own, dim, num_slots, held, out_features))
            num_slots += num_slices
        if found:
            views.extend(found)
            names.extend(f"{stage_prefix(config)}{path or 'model'}/head{head}" for head in range(count))
    return views, names


def _attention_weights(module: nn.Module) -> list[tuple[Tensor, bool, bool, bool]]:
    """Returns the q, k, v weights of a module as (weight, fused, interleaved, transposed)."""
    if isinstance(module, nn.MultiheadAttention):
        fused: Any = module.in_proj_weight  # None where q, k and v have sizes of their own
        if fused is not None:
            return [(fused, True, False, False)]
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return [(weight, False, False, False) for weight in separate if isinstance(weight, Tensor)]
    children = dict(module.named_children())
    for name in FUSED_NAMES:
        if (weight := _matrix(children.get(name))) is not None:
            return [(weight, True, name in INTERLEAVED_NAMES, _is_transposed(children[name]))]
    for trio in SEPARATE_NAMES:
        weights = [_matrix(children.get(name)) for name in trio]
        if all(weight is not None for weight in weights):
            return [
                (weight, False, False, _is_transposed(children[name]))
                for name, weight in zip(trio, weights, strict=True)
                if weight is not None
            ]
    return []


def _matrix(module: nn.Module | None) -> Tensor | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # transformers' GPT-2 keeps its weights as [in, out]


def _head_count(path: str, owners: Sequence[Any], config: Config) -> int:
    if isinstance(config.heads, int):
        return config.heads
    if isinstance(config.heads, Mapping) and path in config.heads:
        return config.heads[path]
    return _first_count(owners, HEAD_COUNT_NAMES)


def _first_count(owners: Sequence[Any], names: Sequence[str]) -> int:
    """Returns the first positive integer attribute of these names among the owners, or 0."""
    for owner in owners:
        for name in names:
            count = getattr(owner, name, None)
            if isinstance(count, int) and count > 0:
                return count
    return 0


def without_graph(grad: Tensor) -> Tensor:
    """Returns a gradient detached from its own graph, which it has after `backward(create_graph=True)`."""
    return grad.detach() if grad.requires_grad else grad


class ParameterTable:
    """The watched parameters of a model. A row keeps its number; new ones are appended."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Config) -> None:
        self.model = model
        self.optimizers = optimizers
        self.config = config
        self.named: dict[str, nn.Parameter] = {}
        self.parameters: list[nn.Parameter] = []
        self.heads: dict[int, HeadView] = {}
        self.head_names: list[str] = []
        self.slots: list[tuple[int, int]] = []
        """Row and head of each number of the head views."""
        self.order: list[int] = []
        """Rows from the input to the output: in order of registration until a backward pass shows it."""
        self.arrivals: list[int] = []
        """Rows in the order in which backward reaches them, as far as seen."""
        self.looked_up: set[int] = set()
        """Rows of embeddings, most of whose coordinates do not change in most steps."""
        self.layout = Layout()
        self.weights: list[float] | None = None
        """The weight of each row in a sum over ranks; None for a single process."""
        self.change_weights: list[float] | None = None
        """The same for updates: 0 if another rank makes them."""
        self._summed: dict[int, Tensor] = {}
        self.aside: dict[int, Summand] = {}
        """Gradients of which this rank holds a partial sum, as they were when the others were read."""
        self.is_spread = False
        """Whether a parameter is a DTensor."""
        self.has_sparse = False
        """Whether a module makes sparse gradients."""
        self._trainable: list[bool] = []
        self.windows: dict[int, SlidingWindow] = {}
        self.refresh()

    def refresh(self) -> None:
        """Add parameters that are not watched yet (a new group, an unfrozen layer)."""
        known = {id(parameter) for parameter in self.parameters}
        current = watched_parameters(self.model, self.optimizers, self.config)
        fresh = {name: parameter for name, parameter in current.items() if id(parameter) not in known}
        if not fresh:
            return
        for name in fresh:  # a replaced module keeps its row but not its window
            if name in self.named:
                self.windows.pop(list(self.named).index(name), None)
        self.named |= fresh
        self.parameters = list(self.named.values())
        self.is_spread = any(placements(parameter) for parameter in self.parameters)
        self.order += range(len(self.order), len(self.parameters))
        views, self.head_names = find_heads(self.model, self.named, self.config)
        self.heads = {view.row: view for view in views}
        self.slots = [(view.row, head) for view in views for head in view.heads]
        tables = (nn.Embedding, nn.EmbeddingBag)
        looked_up = {id(module.weight) for module in self.model.modules() if isinstance(module, tables)}
        self.has_sparse = any(getattr(module, "sparse", False) for module in self.model.modules())
        self.looked_up = {row for row, parameter in enumerate(self.parameters) if id(parameter) in looked_up}
        self._describe()
        self._open_windows()

    def tensors(self, rows: Iterable[int]) -> list[Tensor]:
        """Returns this rank's parts of these parameters, to be read without gradients."""
        parameters = self.parameters
        return [local(parameters[row]) for row in rows] if self.is_spread else [parameters[row] for row in rows]

    def gradient(self, row: int) -> Tensor | None:
        """Returns this rank's part of a parameter's gradient; None if it has none."""
        if row in self._summed:
            return self._summed[row]
        grad = self.parameters[row].grad
        return None if grad is None else without_graph(local(grad))

    def gradients(self, rows: Iterable[int]) -> list[tuple[int, Tensor]]:
        """Returns the gradients of these rows that have one, each with its row."""
        if not (self.is_spread or self._summed):
            parameters = self.parameters
            return [(row, without_graph(grad)) for row in rows if (grad := parameters[row].grad) is not None]
        return [(row, grad) for row in rows if (grad := self.gradient(row)) is not None]

    def lay_out(self, rows: Sequence[int]) -> None:
        """Redistribute gradients whose placements differ from those of their parameters.

        Under sequence parallelism every rank holds a partial sum of some of them. Copy these now, and sum them at a
        point that all ranks reach: `add_up`.
        """
        self._summed, self.aside = {}, {}
        if not self.is_spread:
            return
        for row in rows:
            grad, parameter = self.parameters[row].grad, self.parameters[row]
            if grad is None or placements(grad) == placements(parameter):
                continue
            if is_summand(grad, parameter):
                self.aside[row] = set_aside(grad)
            else:
                self._summed[row] = local_like(grad, parameter)

    def add_up(self) -> list[int]:
        """Sum the copied partial sums over ranks; returns their rows."""
        aside, self.aside = self.aside, {}
        self._summed |= sums_of_partial(aside)
        return list(aside)

    def weight(self, row: int) -> float:
        """Returns the weight of a row in a sum over ranks: less than 1 if several hold the same."""
        return 1.0 if self.weights is None else self.weights[row]

    def by_optimizer(self) -> list[list[int]]:
        """Returns the rows that each optimizer steps. The first also gets those that none steps."""
        unclaimed = {id(parameter): row for row, parameter in enumerate(self.parameters)}
        claims = []
        for optimizer in self.optimizers:
            members = [id(p) for group in optimizer.param_groups for p in group["params"]]
            claims.append([unclaimed.pop(member) for member in members if member in unclaimed])
        claims[0] += unclaimed.values()
        return [sorted(claim) for claim in claims]

    def learn_order(self) -> None:
        """Learn the depth of every layer from backward passes: what they reach last is nearest the input.

        Rows they do not reach, such as frozen ones, follow the one registered before them.
        """
        reached, order = set(self.arrivals), list(reversed(self.arrivals))
        for row in range(len(self.parameters)):
            if row not in reached:
                order.insert(order.index(row - 1) + 1 if row else 0, row)
        self.order = order
        self._describe()

    def note_frozen(self) -> None:
        """Update the layout if a parameter was frozen or unfrozen."""
        if [parameter.requires_grad for parameter in self.parameters] != self._trainable:
            self._describe()

    def _describe(self) -> None:
        self._trainable = [parameter.requires_grad for parameter in self.parameters]
        classes = {
            id(parameter): type(module).__name__.removeprefix("FSDP")
            for module in self.model.modules()
            for parameter in module.parameters(recurse=False)
        }
        idle: set[int] = set()
        if self.arrivals:  # not reached by backward and not stepped, such as an EMA copy
            stepped = {
                id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
            }
            idle = {row for row, parameter in enumerate(self.parameters) if id(parameter) not in stepped}
            idle.difference_update(self.arrivals)
        self.layout = build_layout(self.named, list(self.heads.values()), self.head_names, self.order, classes, idle)

    def _open_windows(self) -> None:
        if "window" not in self.config.sources or "gsnr" not in self.config.metrics:
            return
        chosen = self.config.window_tensors
        if chosen is None:
            if "adam" in self.config.sources and any(isinstance(one, MOMENT_OPTIMIZERS) for one in self.optimizers):
                return  # Adam's moments cover every tensor and cost nothing between readings
            chosen = tuple(default_tensors(self.model, {id(p): name for name, p in self.named.items()}))
        for row, (name, parameter) in enumerate(self.named.items()):
            if name in chosen and row not in self.windows:
                self.windows[row] = SlidingWindow(row, local(parameter), self.config.window_steps)

    def windows_state(self) -> dict[str, Any]:
        """Returns the state of the sliding windows by parameter name; empty for sharded parameters."""
        if self.is_spread:
            return {}
        names = list(self.named)
        return {names[row]: window.state_dict() for row, window in self.windows.items()}

    def load_windows_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the sliding windows of a saved state."""
        names = list(self.named)
        for row, window in self.windows.items():
            if names[row] in state:
                window.load_state_dict(state[names[row]])
