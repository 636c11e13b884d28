"""The watched parameters of a model: which row is which, where it stands, what it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.config import Config
from gradvitals.measure.ranks.partial import Summand, set_aside, sums_of_partial
from gradvitals.measure.ranks.shards import is_summand, local, local_like, placements
from gradvitals.measure.views import HeadView, build_layout, find_heads, watched_parameters
from gradvitals.measure.window import SlidingWindow, default_tensors
from gradvitals.types import Layout


class Rows:
    """The watched parameters of a model. A row, once given, keeps its number; new ones come after the others."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], config: Config) -> None:
        self.model = model
        self.optimizers = optimizers
        self.config = config
        self.named: dict[str, nn.Parameter] = {}
        self.parameters: list[nn.Parameter] = []
        self.heads: dict[int, HeadView] = {}
        self.head_names: list[str] = []
        self.slots: list[tuple[int, int]] = []
        """Row and head that each number of the head views belongs to."""
        self.order: list[int] = []
        """Rows from the input to the output: as registered, until a backward pass has shown it."""
        self.arrivals: list[int] = []
        """Rows in the order in which backward reaches them, as far as seen."""
        self.looked_up: set[int] = set()
        """Rows of embeddings: most of their coordinates do not change at most steps, and need not."""
        self.layout = Layout()
        self.weights: list[float] | None = None
        """What each row counts beside those of other ranks; None for a single process."""
        self.change_weights: list[float] | None = None
        """The same for how far it was moved: 0 where another rank moves it."""
        self._summed: dict[int, Tensor] = {}
        self.aside: dict[int, Summand] = {}
        """Gradients of which this rank holds a summand, as they were when the others were read."""
        self._is_spread = False
        self._trainable: list[bool] = []
        self.windows: dict[int, SlidingWindow] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for parameters not watched yet (a new group, an unfrozen layer)."""
        known = {id(parameter) for parameter in self.parameters}
        current = watched_parameters(self.model, self.optimizers, self.config)
        fresh = {name: parameter for name, parameter in current.items() if id(parameter) not in known}
        if not fresh:
            return
        for name in fresh:  # a module was replaced: its row goes on with the new tensor, its window does not
            if name in self.named:
                self.windows.pop(list(self.named).index(name), None)
        self.named |= fresh
        self.parameters = list(self.named.values())
        self._is_spread = any(placements(parameter) for parameter in self.parameters)
        self.order += range(len(self.order), len(self.parameters))
        views, self.head_names = find_heads(self.model, self.named, self.config)
        self.heads = {view.row: view for view in views}
        self.slots = [(view.row, head) for view in views for head in view.heads]
        tables = (nn.Embedding, nn.EmbeddingBag)
        looked_up = {id(module.weight) for module in self.model.modules() if isinstance(module, tables)}
        self.looked_up = {row for row, parameter in enumerate(self.parameters) if id(parameter) in looked_up}
        self._describe()
        self._open_windows()

    def tensor(self, row: int) -> Tensor:
        """This rank's part of a parameter."""
        return local(self.parameters[row]).detach()

    def gradient(self, row: int) -> Tensor | None:
        """This rank's part of a parameter's gradient; None where it has none."""
        if row in self._summed:
            return self._summed[row]
        grad = self.parameters[row].grad
        return None if grad is None else local(grad).detach()

    def lay_out(self, rows: Sequence[int]) -> None:
        """Bring gradients that do not lie like their parameters into that form, where they are to be read.

        Under sequence parallelism every rank holds a summand of some of them, and no norm can be had from these. They
        are set aside as they are now, to be summed at a moment that all ranks come to: `add_up`.
        """
        self._summed, self.aside = {}, {}
        if not self._is_spread:
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
        """Sum what was set aside, over the ranks that hold summands; returns the rows."""
        aside, self.aside = self.aside, {}
        self._summed |= sums_of_partial(aside)
        return list(aside)

    def weight(self, row: int) -> float:
        """What a row counts in a sum over all ranks: less than 1 where several hold the same."""
        return 1.0 if self.weights is None else self.weights[row]

    def by_optimizer(self) -> list[list[int]]:
        """The rows each optimizer steps. Trainable ones that none steps are read with the first."""
        unclaimed = {id(parameter): row for row, parameter in enumerate(self.parameters)}
        claims = []
        for optimizer in self.optimizers:
            members = [id(p) for group in optimizer.param_groups for p in group["params"]]
            claims.append([unclaimed.pop(member) for member in members if member in unclaimed])
        claims[0] += unclaimed.values()
        return [sorted(claim) for claim in claims]

    def learn_order(self) -> None:
        """Take the depth of every layer from the backward passes seen: what they reach last is nearest the input.

        Rows they do not reach, such as frozen ones, stand behind the one that the model has registered before them.
        """
        reached, order = set(self.arrivals), list(reversed(self.arrivals))
        for row in range(len(self.parameters)):
            if row not in reached:
                order.insert(order.index(row - 1) + 1 if row else 0, row)
        self.order = order
        self._describe()

    def note_frozen(self) -> None:
        """Describe the rows anew where one was frozen or thawed since."""
        if [parameter.requires_grad for parameter in self.parameters] != self._trainable:
            self._describe()

    def _describe(self) -> None:
        self._trainable = [parameter.requires_grad for parameter in self.parameters]
        self.layout = build_layout(self.named, list(self.heads.values()), self.head_names, self.order)

    def _open_windows(self) -> None:
        if "window" not in self.config.sources or "gsnr" not in self.config.metrics:
            return
        chosen = self.config.window_tensors
        if chosen is None:
            chosen = tuple(default_tensors(self.model, {id(p): name for name, p in self.named.items()}))
        for row, (name, parameter) in enumerate(self.named.items()):
            if name in chosen and row not in self.windows:
                self.windows[row] = SlidingWindow(row, local(parameter), self.config.window_steps)

    def windows_state(self) -> dict[str, Any]:
        """The sliding windows by the name of their parameter; none where ranks hold different parts of it."""
        if self._is_spread:
            return {}
        names = list(self.named)
        return {names[row]: window.state_dict() for row, window in self.windows.items()}

    def load_windows_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the sliding windows of a saved state."""
        names = list(self.named)
        for row, window in self.windows.items():
            if names[row] in state:
                window.load_state_dict(state[names[row]])
