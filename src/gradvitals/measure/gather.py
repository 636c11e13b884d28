"""What is read: the watched rows of a model, and what one optimizer's part of them shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.config import Config
from gradvitals.measure import stats
from gradvitals.measure.clock import Clock
from gradvitals.measure.microbatch import MicrobatchSums, add_heads
from gradvitals.measure.moments import MomentSums, unavailable_reason
from gradvitals.measure.packet import Packet
from gradvitals.measure.updates import UpdateNorms
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
        self.layout = Layout()
        self.windows: dict[int, SlidingWindow] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Look for parameters not watched yet (a new group, an unfrozen layer). Returns whether there were any."""
        known = {id(parameter) for parameter in self.parameters}
        current = watched_parameters(self.model, self.optimizers, self.config)
        fresh = {name: parameter for name, parameter in current.items() if id(parameter) not in known}
        if not fresh:
            return False
        self.named |= fresh
        self.parameters = list(self.named.values())
        self.order += range(len(self.order), len(self.parameters))
        views, self.head_names = find_heads(self.model, self.named, self.config)
        self.heads = {view.row: view for view in views}
        self.slots = [(view.row, head) for view in views for head in view.heads]
        self._describe()
        self._open_windows()
        return True

    def learn_order(self, backward: Sequence[int]) -> None:
        """Take the depth of every layer from a backward pass: what it reached last is nearest the input."""
        reached = set(backward)
        self.order = [*reversed(backward), *(row for row in self.order if row not in reached)]
        self._describe()

    def _describe(self) -> None:
        self.layout = build_layout(self.named, list(self.heads.values()), self.head_names, self.order)

    def _open_windows(self) -> None:
        if "window" not in self.config.sources or "gsnr" not in self.config.metrics:
            return
        chosen = self.config.window_tensors
        if chosen is None:
            chosen = tuple(default_tensors(self.model, {id(p): name for name, p in self.named.items()}))
        for row, (name, parameter) in enumerate(self.named.items()):
            if name in chosen and row not in self.windows:
                self.windows[row] = SlidingWindow(row, parameter, self.config.window_steps)


class Station:
    """One optimizer: its rows, the instruments that read them, and where it is in the current step."""

    def __init__(self, index: int, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self.index = index
        self.optimizer = optimizer
        self.config = config
        self.updates = UpdateNorms()
        self.moments: MomentSums | None = None
        if "gsnr" in config.metrics and "adam" in config.sources and unavailable_reason(optimizer) is None:
            self.moments = MomentSums(optimizer)
        self.micro: MicrobatchSums | None = None
        self.rows: list[int] = []
        self.parameters: list[nn.Parameter] = []
        self.num_members = 0
        self.backwards = 0
        """Backward passes that reached the sentinel since this optimizer's last step."""
        self.reading: Packet | None = None
        self.read_at = -1
        self.stepped = False
        self.in_scaler_step = False
        self._sentinel: nn.Parameter | None = None
        self._sentinel_hook: Any = None
        self._version: tuple[int, int] | None = None

    def assign(self, rows: Sequence[int], watched: Rows, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        """Take charge of these rows."""
        self.num_members = self._count_members()
        if list(rows) == self.rows:
            return
        self.rows = list(rows)
        self.parameters = [watched.parameters[row] for row in rows]
        if self.micro is not None:
            self.micro.disarm()
        if "gsnr" in self.config.metrics and "microbatch" in self.config.sources:
            self.micro = MicrobatchSums(
                watched.parameters,
                watched.heads,
                rows=self.rows,
                clock=clock,
                on_error=on_error,
            )
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        if self._sentinel is None and trainable:
            self.follow(trainable[-1])

    def _count_members(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def has_grown(self) -> bool:
        """Whether the optimizer was given a parameter group since its rows were assigned."""
        return self._count_members() != self.num_members

    def follow(self, parameter: nn.Parameter) -> None:
        """Count backward passes by the gradients this parameter receives."""
        if self._sentinel is parameter:
            return
        self.unhook()
        self._sentinel = parameter
        self._sentinel_hook = parameter.register_post_accumulate_grad_hook(self._after_accumulation)

    def unhook(self) -> None:
        """Stop counting."""
        if self._sentinel_hook is not None:
            self._sentinel_hook.remove()
            self._sentinel_hook = None

    def _after_accumulation(self, parameter: Tensor) -> None:
        self.backwards += 1
        self._version = _version(parameter)

    def changed_by_hand(self) -> bool:
        """Whether the loop altered gradients since backward by means nobody hears: the counter of changes moved."""
        if self._sentinel is None or self._version is None:
            return False
        return _version(self._sentinel) != self._version

    def depart(self) -> None:
        """The optimizer has stepped, or was skipped."""
        self.stepped = True
        self.backwards, self._version = 0, None

    def reset(self) -> None:
        """A new step begins."""
        self.reading, self.read_at, self.stepped = None, -1, False

    @torch.no_grad()
    def read(
        self,
        watched: Rows,
        *,
        full: bool,
        detail: bool,
        norms: dict[int, Tensor],
        scale: Tensor | None,
        scaled: bool,
        windows: Packet | None,
        count_nonfinite: bool,
    ) -> dict[int, int | None]:
        """Gather what the gradients show right now.

        Args:
            watched: All rows.
            full: Whether to take more than the norms.
            detail: Whether to take the costly metrics too.
            norms: Norms already known by row, e.g. from clipping; they are not computed again.
            scale: The loss scale in force, if any.
            scaled: Whether gradients still carry that scale.
            windows: Where the sliding windows put their sums; None keeps this gradient out of them.
            count_nonfinite: Whether to count NaN and infinite elements, which takes a pass of its own.

        Returns:
            For each row that went into a sliding window: the steps in a block where the window is complete, or None.
        """
        if self.micro is not None:
            self.micro.flush()
        self.reading, self.read_at = Packet(), self.backwards
        packet, wants = self.reading, self.config.metrics
        if scale is not None:
            packet.add("scale", scale)
        rows = [row for row in self.rows if watched.parameters[row].grad is not None]
        grads = [grad.detach() for row in rows if (grad := watched.parameters[row].grad) is not None]
        if not rows:
            return {}
        reused = [row for row in rows if row in norms]
        if reused:
            packet.add_each("norm", [norms[row] for row in reused], reused)
        own = [(row, grad) for row, grad in zip(rows, grads, strict=True) if row not in norms]
        if own:
            stats.add_norms(packet, "norm", [row for row, _ in own], [grad for _, grad in own])
        if full and self.micro is not None and self.micro.armed:
            add_heads(packet, "heads", watched.heads, rows, grads)
        if detail and "grad/max" in wants:
            stats.add_largest(packet, "max", rows, grads)
        if detail and "grad/zero_fraction" in wants:
            stats.add_nonzero_counts(packet, "nonzero", rows, grads)
        if count_nonfinite:
            stats.add_nonfinite_counts(packet, "nonfinite", rows, grads)
        if windows is None:
            return {}
        still = scale if scaled else None
        return {
            row: watched.windows[row].push(grad, still, windows)
            for row, grad in zip(rows, grads, strict=True)
            if row in watched.windows
        }

    def read_moments(self, packet: Packet, *, detail: bool) -> dict[int, tuple[float, float]]:
        """Gather the optimizer's moments after its step; returns the betas of the rows read."""
        if self.moments is None:
            return {}
        below_one = detail and "gsnr/below_one_fraction" in self.config.metrics
        return self.moments.add(packet, self.rows, self.parameters, below_one=below_one)

    @torch.no_grad()
    def read_weights(self, packet: Packet) -> dict[int, float]:
        """Gather weights and their change after the step; returns the share of each tensor the change covers."""
        wants = self.config.metrics
        if self.parameters and {"weight/norm", "update/norm", "radial_gsnr"} & set(wants):
            stats.add_norms(packet, "weight", self.rows, [parameter.detach() for parameter in self.parameters])
        return self.updates.after(packet, self.parameters) if "update/norm" in wants else {}


def _version(parameter: Tensor) -> tuple[int, int] | None:
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)
