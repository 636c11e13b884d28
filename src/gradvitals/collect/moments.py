"""Reads the moments an optimizer keeps, and what it reports of its own step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradvitals import kernels
from gradvitals.collect import reductions
from gradvitals.collect.parameters import MOMENT_OPTIMIZERS, HeadView
from gradvitals.collect.schedule import Due
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed.shards import local
from gradvitals.kernels.tables import upload
from gradvitals.metrics import SUMS

SHARE_ELEMENTS = 2**10
"""Coordinates sampled per tensor to count those below 1 and find the median: errors under 2 % in rank."""

MOST_SETS = 16
"""Sets of tensors whose tables are kept."""


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that keeps the moments: the inner one of a ZeroRedundancyOptimizer."""
    inner = getattr(optimizer, "optim", None) if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else None
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def unavailable_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why this optimizer's moments give no GSNR; None if they do."""
    if hasattr(optimizer, "register_factors_hook"):
        return f"{type(optimizer).__name__} averages gradients that it has scaled, element by element"
    if isinstance(stepping(optimizer), MOMENT_OPTIMIZERS):
        return None
    known = ", ".join(kind.__name__ for kind in MOMENT_OPTIMIZERS)
    return f"{type(optimizer).__name__} does not keep averages of the gradient and of its square; {known} do"


class _State(NamedTuple):
    """An optimizer's moments, tensor by tensor."""

    rows: list[int]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    betas: dict[int, tuple[float, float]]
    kept: list[tuple[nn.Parameter, dict[str, Any], Tensor, Any]]
    """Place at which each was found, to check that it is still there."""
    groups: list[Any]
    """The betas of every group."""


class MomentSums:
    """Reads the moments of one optimizer's parameters after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = stepping(optimizer)
        self._samplers: dict[tuple[int, ...], list[tuple[reductions.Sampler, list[int]]]] = {}
        self._readers: dict[tuple[Any, ...], Any] = {}
        self._state = _State([], [], [], [], {}, [], [])

    @torch.no_grad()
    def add(
        self, buffer: ReadingBuffer, rows: Sequence[int], parameters: Sequence[nn.Parameter], wanted: Collection[str]
    ) -> dict[int, tuple[float, float]]:
        """Put the wanted sums of `metrics.SUMS` into the buffer; returns the betas of every row read."""
        state = self._found(rows, parameters)
        if not state.rows:
            return {}
        left, rest = self._add_by_kernels(buffer, state, wanted)
        if left:
            first, second = ([column[p] for p in left] for column in (state.first, state.second))
            left_rows = [state.rows[p] for p in left]
            reductions.add(buffer, "first_moment", reductions.norms, left_rows, first)
            reductions.add(buffer, "second_moment", reductions.sums_of_positive, left_rows, second)
        for step_rows, steps in (
            reductions.by_device_and_dtype(state.rows, state.steps) if "adam_step" in wanted else ()
        ):
            if steps[0].device.type == "cpu":  # the optimizer counts in place, and the buffer is read later
                buffer.add("adam_step", torch.stack(steps), step_rows)
            else:
                buffer.add_each("adam_step", steps, step_rows)
        if left and "below_one" in wanted:
            self._add_sampled(buffer, state, left, below_one=True, median=False)
        if rest:
            self._add_sampled(buffer, state, rest, below_one=False, median=True)
        return state.betas

    def _found(self, rows: Sequence[int], parameters: Sequence[nn.Parameter]) -> _State:
        if not self._holds(parameters):
            self._state = self._look_up(rows, parameters)
            self._samplers.clear()
        return self._state

    # -- by kernels ---------------------------------------------------------------------------------------------

    def _add_by_kernels(
        self, buffer: ReadingBuffer, state: _State, wanted: Collection[str]
    ) -> tuple[list[int], list[int]]:
        """Put what kernels can read into the buffer.

        Returns:
            Positions of the tensors whose sums are left for torch, and of those whose medians are. Of small tensors,
            torch reads all coordinates and finds the exact median.
        """
        every = list(range(len(state.rows)))
        sums, median = "first_moment" in wanted, "median_sum" in wanted
        found: set[int] = set()
        counted: set[int] = set()
        if kernels.on_device(state.first[0]) and kernels.ready("moments") is not None:
            readable = [p for p in every if _readable(state.first[p], state.second[p])]
            large = [p for p in readable if state.first[p].numel() > SHARE_ELEMENTS] if median else []
            for some in _alike(state, readable) if sums else ():
                numbers = self._read("sums", state, some, _limits(state, some, torch.float32))
                names = ["first_moment", "second_moment", *(["alive", "below_one"] if "below_one" in wanted else [])]
                for name, values in zip(names, () if numbers is None else numbers, strict=False):
                    buffer.add(name, values, [state.rows[p] for p in some])
                    found.update(some)
            for some in _alike(state, large):
                if (medians := self._read("medians", state, some)) is not None:
                    add_median(buffer, medians, state, some)
                    counted.update(some)
        return [p for p in every if sums and p not in found], [p for p in every if median and p not in counted]

    def _read(self, what: str, state: _State, places: Sequence[int], *more: Tensor) -> Tensor | None:
        """Returns sums or medians of moments of one device and dtype; None if kernels fail."""
        firsts, seconds = ([column[p] for p in places] for column in (state.first, state.second))
        key = (firsts[0].device, firsts[0].dtype, tuple([m.numel() for m in firsts]))
        try:
            if key not in self._readers:
                if len(self._readers) >= MOST_SETS:
                    self._readers.clear()
                module: Any = kernels.ready("moments")
                self._readers[key] = module.MomentReader(key[2], key[0])
            result: Tensor = getattr(self._readers[key], what)(firsts, seconds, *more)
        except Exception as error:
            kernels.give_up("moments", error, "moments are read by torch")
            return None
        return result

    # -- as they are found --------------------------------------------------------------------------------------

    def _holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Returns whether the moments are still the same tensors: loading a checkpoint replaces them."""
        kept, state = self._state.kept, self.optimizer.state
        return (
            len(kept) == len(parameters) == len(state)
            and self._state.groups == [group["betas"] for group in self.optimizer.param_groups]
            and all(
                state[parameter] is entry and entry["exp_avg"] is first and entry["step"] is step
                for parameter, entry, first, step in kept
            )
        )

    def _look_up(self, rows: Sequence[int], parameters: Sequence[nn.Parameter]) -> _State:
        groups = self.optimizer.param_groups
        betas_of = {id(p): group["betas"] for group in groups for p in group["params"]}
        state = _State([], [], [], [], {}, [], [group["betas"] for group in groups])
        for row, parameter in zip(rows, parameters, strict=True):
            kept = self.optimizer.state.get(parameter)
            beta1, beta2 = betas_of.get(id(parameter), (None, None))
            # Betas may be tensors on the device, which would take a synchronization.
            if kept and "exp_avg" in kept and isinstance(beta1, float) and isinstance(beta2, float):
                state.betas[row] = (beta1, beta2)
                state.rows.append(row)
                state.first.append(local(kept["exp_avg"]))
                state.second.append(local(kept["exp_avg_sq"]))
                state.steps.append(local(torch.as_tensor(kept["step"])))  # a number in old states
                state.kept.append((parameter, kept, kept["exp_avg"], kept["step"]))
        return state

    def _add_sampled(
        self, buffer: ReadingBuffer, state: _State, left: Sequence[int], *, below_one: bool, median: bool
    ) -> None:
        """Count sampled coordinates that are alive and those whose GSNR is below 1, and find the median."""
        rows = [state.rows[p] for p in left]
        if tuple(rows) not in self._samplers:
            self._samplers[tuple(rows)] = reductions.samplers(rows, [state.first[p] for p in left], SHARE_ELEMENTS)
        for sampler, positions in self._samplers[tuple(rows)]:
            places = [left[p] for p in positions]
            mean = sampler.gather([state.first[p] for p in places])
            square = sampler.gather([state.second[p] for p in places])
            in_order = [places[p] for p in sampler.order]
            alive = sampler.sums((square > 0).to(mean.dtype))
            if below_one:
                threshold = _limits(state, in_order, mean.dtype)
                limit = torch.repeat_interleave(threshold, sampler.lengths, output_size=mean.numel())
                below = (mean.square() < limit * square) & (square > 0)
                buffer.add("alive", alive, sampler.rows)
                buffer.add("below_one", sampler.sums(below.to(mean.dtype)), sampler.rows)
            if median:
                medians = _medians(mean.double().square() / square.double(), sampler.lengths, alive)
                add_median(buffer, medians, state, in_order)


def add_median(buffer: ReadingBuffer, medians: Tensor, state: _State, places: Sequence[int]) -> None:
    """Add medians, each multiplied by the size of its tensor: those of shards are averaged by size."""
    rows = [state.rows[p] for p in places]
    sizes = torch.tensor([state.first[p].numel() for p in places], dtype=torch.float64)
    weights = upload(sizes, medians.device)
    buffer.add("median_sum", medians.nan_to_num(nan=0.0) * weights, rows)
    buffer.add("median_size", torch.where(medians.isnan(), 0.0, weights), rows)


def _readable(first: Tensor, second: Tensor) -> bool:
    well = kernels.usable(first) and kernels.usable(second) and bool(first.numel())
    return well and first.stride() == second.stride() and first.dtype == second.dtype


def _alike(state: _State, places: Sequence[int]) -> list[list[int]]:
    """Returns positions grouped by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place in places:
        found.setdefault((state.first[place].device, state.first[place].dtype), []).append(place)
    return list(found.values())


def _limits(state: _State, places: Sequence[int], kind: torch.dtype) -> Tensor:
    """Returns, for each tensor, the factor t for which a coordinate's GSNR is below 1 if m² < t v.

    With bias-corrected m and v, r < 1 if 2 m² < (1 + c1) v. c1 and both corrections depend on the step count, which
    may be on the device, so they are computed there.
    """
    device = state.first[places[0]].device
    step = torch.stack([state.steps[p] for p in places]).to(device, kind, non_blocking=True)
    betas = [state.betas[state.rows[p]] for p in places]
    b1, b2 = (
        torch.tensor([pair[which] for pair in betas], dtype=kind).to(device, non_blocking=True) for which in (0, 1)
    )
    debias1, debias2 = 1 - b1**step, 1 - b2**step
    variance_of_mean = (1 - b1) / (1 + b1) * (1 + b1**step) / debias1
    return (1 + variance_of_mean) / 2 * debias1**2 / debias2


def _medians(ratios: Tensor, lengths: Tensor, alive: Tensor) -> Tensor:
    """Returns the median of each segment's numbers that are not NaN; NaN if there are none. Does not synchronize."""
    if not ratios.numel():
        return torch.full_like(alive, torch.nan, dtype=torch.float64)
    segments = torch.arange(len(lengths), device=ratios.device)
    begins = torch.cumsum(lengths, 0) - lengths
    which = torch.repeat_interleave(segments, lengths, output_size=ratios.numel())
    # One sort for all segments: the integer part is the segment, the fraction orders the ratios, NaN last.
    most = 1 - 2.0**-20
    inside = torch.where(ratios.isnan(), 1.0, (ratios / (1 + ratios)).clamp(max=most))
    inside = (which + most * inside).sort().values
    number = alive.to(torch.int64)
    found = torch.zeros_like(alive, dtype=torch.float64)
    for middle in ((number - 1) // 2, number // 2):
        place = (begins + middle.clamp(min=0)).clamp(max=ratios.numel() - 1)  # an empty segment has none
        share = (inside[place] - segments) / most
        found += share / (1 - share) / 2
    return torch.where(number > 0, found, torch.nan)


REPORTED = {"norm": "square", "first_moment": "first", "second_moment": "second", "adam_step": "step"}
"""Names of the numbers of a `Vitals` that differ from those in `metrics.SUMS`."""


class VitalSums:
    """Listens to one optimizer, if it reports what it reads in its step."""

    def __init__(self, optimizer: torch.optim.Optimizer, wanted: Collection[str]) -> None:
        self.optimizer: Any = optimizer
        # A variance-reduced optimizer reads gradients that it has scaled.
        self.available = hasattr(optimizer, "register_vitals_hook") and not hasattr(optimizer, "register_factors_hook")
        self._wanted = wanted
        self._handle: Any = None
        self._rows: dict[int, int] = {}
        self._heads: Mapping[int, HeadView] = {}
        self._told: list[Any] = []

    @property
    def expected(self) -> bool:
        """Whether the next step will most likely report."""
        return self.available and self._handle is not None and bool(self.optimizer.reports_vitals)

    @property
    def max_norm(self) -> float | None:
        """The norm that the optimizer itself clips gradients to."""
        limit: float | None = getattr(self.optimizer, "max_norm", None)
        return limit

    def follow(self, rows: Sequence[int], parameters: Sequence[nn.Parameter], heads: Mapping[int, HeadView]) -> None:
        """Follow these rows; heads are reported too if they are contiguous in memory."""
        if not self.available:
            return
        self.stop()
        self._rows = {id(parameter): row for row, parameter in zip(rows, parameters, strict=True)}
        self._heads = heads
        views = {p: heads[row] for row, p in zip(rows, parameters, strict=True) if row in heads}
        slices = {p: len(view.heads) for p, view in views.items() if view.lie_apart(p)}
        self._handle = self.optimizer.register_vitals_hook(self._told.append, slices)

    def stop(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin(self) -> None:
        """Forget reports of earlier steps."""
        self._told.clear()

    def take(
        self, buffer: ReadingBuffer, gradients: ReadingBuffer | None, due: Due
    ) -> tuple[set[int], dict[int, tuple[float, float]]]:
        """Put what the optimizer reported of its step into buffers.

        Args:
            buffer: Receives what is read after the step.
            gradients: Receives what was reported of gradients; None if they were read before the step.
            due: What is due at this step.

        Returns:
            The rows it was reported of, and the betas of those whose moments were.
        """
        rows: set[int] = set()
        betas: dict[int, tuple[float, float]] = {}
        wanted = {
            name: buffer if kind.after_step else gradients
            for name, kind in SUMS.items()
            if name in self._wanted and kind.is_due(full=due.full, detail=due.detail)
        }
        for vitals in self._told:
            places = [i for i, p in enumerate(vitals.parameters) if id(p) in self._rows]
            mine = [self._rows[id(vitals.parameters[i])] for i in places]
            whole = len(places) == len(vitals.parameters)
            rows.update(mine)
            for name, into in wanted.items():
                values = vitals.numbers.get(REPORTED.get(name, name))
                if values is not None and into is not None:
                    into.add(name, values if whole else values[places], mine)
            if gradients is not None and due.full:
                for parameter, norms in vitals.slices.items():
                    row = self._rows.get(id(parameter))
                    if row is not None:
                        gradients.add("heads", norms, self._heads[row].slots)
            if "first_moment" in wanted:
                betas |= dict.fromkeys(mine, vitals.betas)
        self._told.clear()
        return rows, betas


AS_GOOD_AS_ONE = 1 - 1e-6
"""A ratio of two equal numbers may be rounded to just below 1."""


class FactorSums:
    """Listens to a variance-reduced optimizer during a full reading."""

    def __init__(self, optimizer: torch.optim.Optimizer, on_error: Callable[[Exception], None]) -> None:
        self.optimizer: Any = optimizer
        self.on_error = on_error
        self.available = hasattr(optimizer, "register_factors_hook")
        self._handle: Any = None
        self._rows: dict[int, int] = {}
        self._packet = ReadingBuffer()

    def listen(self, buffer: ReadingBuffer, rows: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        """Put the factors of the next step into a buffer."""
        self._packet, self._rows = buffer, {id(p): row for p, row in zip(parameters, rows, strict=True)}
        self.stop()
        self._handle = self.optimizer.register_factors_hook(self._receive)

    def stop(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _receive(self, parameters: Sequence[Tensor], factors: Sequence[Tensor], gamma: float) -> None:
        try:
            mine = [(self._rows[id(p)], f) for p, f in zip(parameters, factors, strict=True) if id(p) in self._rows]
            if mine:
                self._add([row for row, _ in mine], [factor.detach() for _, factor in mine], gamma)
        except Exception as error:
            self.stop()
            self.on_error(error)

    def _add(self, rows: Sequence[int], factors: Sequence[Tensor], gamma: float) -> None:
        buffer = self._packet
        buffer.add_each("factor_sum", torch._foreach_norm(list(factors), 1.0), rows)  # none is negative
        buffer.add_each("factor_low", [torch.count_nonzero(factor <= gamma) for factor in factors], rows)
        buffer.add_each("factor_one", [torch.count_nonzero(factor >= AS_GOOD_AS_ONE) for factor in factors], rows)
