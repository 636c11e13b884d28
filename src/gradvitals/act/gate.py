"""What a step is about to do, against the limits: on the device, where the host need not wait for it.

The limits come from steps before and are plain numbers. The comparison is a handful of operations on single numbers;
what came of it reaches the host a few steps later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradvitals.act.limits import LARGEST_NORM
from gradvitals.act.together import Together
from gradvitals.distributed.shards import local
from gradvitals.collect.recorder import StepInputs

Parts = list[tuple[Sequence[int], Tensor]]
"""ParameterTable, and a norm for each."""

LAG = 8
"""Steps after which the numbers of a step that was decided on a GPU are looked at. The host is hardly ever so far
ahead, so it does not wait; and as it is always the same number, decisions do not depend on how fast the host was."""


@dataclass(frozen=True)
class Seen:
    """The gradient's norm and the loss of a step, as single numbers on one device; the same on all ranks."""

    norm: Tensor
    loss: Tensor
    """nan where the loop told none."""
    tensor_norms: list[tuple[Sequence[int], Tensor]]
    """ParameterTable, and the norms of their gradients; -1 for a row that only other ranks have."""
    refused: Tensor | None = None
    """Not 0 where the GradScaler of any rank leaves the step out; None in a single process, which knows its own."""


@torch.no_grad()
def look(
    arrival: StepInputs | None, *, each: bool, together: Together | None = None, refused: Tensor | float = 0.0
) -> Seen | None:
    """What an optimizer is about to step with. Several ranks see the same: the norm of the whole gradient.

    Args:
        arrival: As the Monitor read it; None where it read nothing.
        each: Whether the norms of single tensors are wanted.
        together: The ranks of the run. With several, all of them must look, whether they have something to tell or not.
        refused: Not 0 where a GradScaler leaves the step out.
    """
    several = together is not None and together.several
    parts = _parts(arrival, unscaled=each or several)
    if together is not None and several:
        return _look_together(arrival, parts, each, together, refused)
    if not parts or arrival is None:
        return None
    device = parts[0][1].device
    totals = [torch.linalg.vector_norm(values) for _, values in parts]
    norm = totals[0]
    if len(totals) > 1:
        norm = torch.linalg.vector_norm(torch.stack([total.to(device, torch.float64) for total in totals]))
    norm = norm.float()
    if arrival.scale is not None and not each:
        norm = norm / arrival.scale.to(device)
    norm = _broken_by_hand(arrival, parts, norm)
    return Seen(norm, _mean(arrival.losses, device), parts if each else [])


def _look_together(
    arrival: StepInputs | None, parts: Parts, each: bool, together: Together, refused: Tensor | float
) -> Seen:
    """All that is decided by, in one sum over ranks: a NaN on one of them is one on all.

    The loss is the mean over the ranks that told one: that of the step's whole batch, as a single process would see.
    """
    device = parts[0][1].device if parts else together.device
    square = torch.zeros((), dtype=torch.float64, device=device)
    rows = torch.zeros(together.num_rows if each else 0, dtype=torch.float64, device=device)
    for part_rows, values in parts:
        weights, numbers = together.shares(part_rows, values.device)
        weighted = (values.double().square() * weights).to(device)
        square = square + weighted.sum()
        if each:
            rows.index_add_(0, numbers.to(device), weighted)
    losses = arrival.losses if arrival is not None else []
    if arrival is not None:
        square = _broken_by_hand(arrival, parts, square)
    loss = _mean(losses, device).double() if losses else torch.zeros_like(square)
    told = torch.full_like(square, 1.0 if losses else 0.0)
    if isinstance(refused, Tensor):
        refused = refused.to(device, torch.float64).reshape(())
    else:
        refused = torch.full_like(square, refused)
    numbers = together.summed(torch.cat([torch.stack([square, loss, told, refused]), rows]))
    loss = torch.where(numbers[2] > 0, (numbers[1] / numbers[2]).nan_to_num(math.inf, math.inf, math.inf), math.nan)
    norms = numbers[4:].sqrt().float()
    return Seen(
        numbers[0].sqrt().float(),
        loss.float(),
        [(together.local_rows(), norms)] if each else [],
        refused=numbers[3],
    )


def _parts(arrival: StepInputs | None, *, unscaled: bool) -> Parts:
    """ParameterTable and the norms of what this rank holds of their gradients."""
    found = []
    for rows, values in arrival.norms if arrival is not None else ():
        norms = local(values) if isinstance(values, Tensor) else torch.stack([local(value) for value in values])
        if arrival is not None and arrival.scale is not None and unscaled:
            norms = norms / arrival.scale.to(norms.device)
        found.append((rows, norms))
    return found


def _broken_by_hand(arrival: StepInputs, parts: Parts, number: Tensor) -> Tensor:
    """A norm, or NaN or Inf where what the loop did to gradients since has made them so."""
    if not arrival.by_hand:
        return number
    grads = [local(grad) for rows, _ in parts for row in rows if (grad := arrival.parameters[row].grad) is not None]
    if not grads:
        return number
    now = torch.stack([torch.linalg.vector_norm(grad).to(number.device, torch.float32) for grad in grads]).sum()
    return torch.where(now <= LARGEST_NORM, number, now.to(number.dtype))


def _mean(losses: Sequence[Tensor | float], device: torch.device) -> Tensor:
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    if len(losses) == 1 and tensors:
        return tensors[0].to(device, torch.float32, non_blocking=True)
    if not tensors:
        # Losses may be of any size here, and infinite both ways: what comes out then is inf or nan, never an error.
        value = sum(losses) / len(losses) if losses else math.nan
        return torch.as_tensor(value, dtype=torch.float32).to(device, non_blocking=True)
    as_tensors = [torch.as_tensor(loss, dtype=torch.float32).to(device, non_blocking=True) for loss in losses]
    return torch.stack(as_tensors).mean()


class DeviceGate:
    """Leaves steps out on the device: bad ones, `max_streak` in a row at most, and all that are not finite."""

    def __init__(self, max_streak: int) -> None:
        self._max_streak = max_streak
        self.streak: Tensor | float = 0.0
        """Bad steps in a row, a number on the device."""

    @torch.no_grad()
    def left_out(self, seen: Seen, norm_limit: float, loss_limit: float) -> Tensor:
        """1 where the step is to be left out, else 0, as optimizers take it for ``found_inf``.

        Args:
            seen: What the step is about to be made with.
            norm_limit: The norm that is bad, inf for none.
            loss_limit: The loss that is bad, inf for none.
        """
        finite = seen.norm <= LARGEST_NORM  # neither NaN nor infinite
        bad = seen.norm > min(norm_limit, LARGEST_NORM)
        if loss_limit < math.inf:
            bad = bad | (seen.loss > loss_limit)
        self.streak = torch.where(bad | ~finite, self.streak + 1, 0.0)
        left_out = ~finite | (bad & (self.streak <= self._max_streak))
        return (left_out if seen.refused is None else left_out | (seen.refused > 0)).float()


@dataclass(frozen=True)
class Landed:
    """A step that was decided on the device, as the host gets to know it."""

    step: int
    limits: tuple[float, float]
    """Of the norm and of the loss, as they were."""
    clipping: bool
    """Whether gradients were multiplied by `factor`; in a dry run, or with a spent budget, they were not."""
    norm: float
    loss: float
    left_out: bool
    scaler_skipped: bool
    """Whether a GradScaler left it out."""
    factor: float
    """What was left of the gradient by clipping."""
    streak: float
    """Bad steps in a row, this one included."""


class Landing:
    """Numbers of the last steps on their way to the host, each looked at a fixed number of steps later."""

    def __init__(self, lag: int = LAG) -> None:
        self._lag = lag
        self._flying: deque[tuple[int, tuple[float, float], bool, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int, limits: tuple[float, float], clipping: bool, *numbers: Tensor) -> None:
        """Start the copy of a step's norm, loss, left_out, what a scaler said, clipping factor and streak."""
        here = torch.stack([number.float().reshape(()) for number in numbers])
        event = None
        if here.device.type == "cuda":
            host = torch.empty(len(numbers), pin_memory=True)
            host.copy_(here, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(here.device))
            here = host
        self._flying.append((step, limits, clipping, here, event))

    def landed(self, now: int | None = None) -> list[Landed]:
        """The steps that are to be looked at now, before this step; all where it is None."""
        arrived = []
        while self._flying and (now is None or self._flying[0][0] <= now - self._lag):
            arrived.append(_landed(*self._flying.popleft()))  # long there: the device was to be that far a while ago
        return arrived

    def still_flying(self) -> Callable[[], list[dict[str, Any]]]:
        """What is on its way now, for a snapshot: what is returned waits for it, on another thread."""
        flying = list(self._flying)
        return lambda: [asdict(_landed(*one)) for one in flying]

    def take_off(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Have on their way what a snapshot has saved."""
        self._flying.clear()
        for one in saved:
            numbers = [one[name] for name in ("norm", "loss", "left_out", "scaler_skipped", "factor", "streak")]
            values = torch.tensor(numbers, dtype=torch.float32)
            self._flying.append((one["step"], tuple(one["limits"]), one["clipping"], values, None))


def _landed(
    step: int, limits: tuple[float, float], clipping: bool, values: Tensor, event: torch.cuda.Event | None
) -> Landed:
    if event is not None:
        event.synchronize()
    norm, loss, left_out, theirs, factor, streak = values.tolist()
    return Landed(step, limits, clipping, norm, loss, left_out > 0, theirs > 0, factor, streak)
