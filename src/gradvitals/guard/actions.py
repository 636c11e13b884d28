"""The actions of a Guard: wraps `optimizer.step`, checks it on the host or the device, clips, skips."""

from __future__ import annotations

import copy
import functools
import math
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradvitals.collect.optimizer_state import StepInputs
from gradvitals.distributed.shards import local
from gradvitals.functional.clipping import adagc_factors, clip_factor, zclip_norm
from gradvitals.guard.policy import LARGEST_NORM, Clip, Peak, Skip, StepBaseline
from gradvitals.guard.ranks import Ranks
from gradvitals.schedules import lr_factors

LAG = 8
"""Steps after which the host reads what was decided on a GPU. The host is hardly ever that far ahead, so it does not
wait; and as the number is fixed, decisions do not depend on how fast the host runs."""

# -- the numbers of a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepNumbers:
    """The gradient norm and the loss of a step, as scalars on one device; the same on all ranks."""

    norm: Tensor
    loss: Tensor  # NaN if the loop observed none
    tensor_norms: Sequence[tuple[Sequence[int], Tensor]] = ()
    """Rows, and the norms of their gradients; row -1 for one that only other ranks hold."""
    surprise: Tensor | None = None
    """The largest change of a buffer in this step's forward pass, over that buffer's largest change so far."""
    scaler_skips: Tensor | None = None
    """Nonzero if the GradScaler of any rank skips the step; None in a single process, which knows its own."""


@torch.no_grad()
def step_numbers(
    inputs: StepInputs | None,
    *,
    per_tensor: bool,
    ranks: Ranks | None = None,
    surprise: Tensor | None = None,
    scaler_skips: Tensor | float = 0.0,
) -> StepNumbers | None:
    """The norm that the optimizer steps with, of the whole gradient, and the loss; None if nothing was read.

    If there are several ranks, all of them must call this. `scaler_skips` is nonzero if a GradScaler skips the step.
    """
    several = ranks is not None and ranks.several
    parts: list[tuple[Sequence[int], Tensor]] = []
    for rows, values in inputs.norms if inputs is not None else ():
        norms = local(values) if isinstance(values, Tensor) else torch.stack([local(value) for value in values])
        if inputs is not None and inputs.scale is not None and (per_tensor or several):
            norms = norms / inputs.scale.to(norms.device)
        parts.append((rows, norms))
    if ranks is not None and several:
        return _reduced(inputs, parts, per_tensor, ranks, surprise, scaler_skips)
    if not parts or inputs is None:
        return None
    device = parts[0][1].device
    totals = [torch.linalg.vector_norm(values) for _, values in parts]
    norm = totals[0]
    if len(totals) > 1:
        norm = torch.linalg.vector_norm(torch.stack([total.to(device, torch.float64) for total in totals]))
    norm = norm.float()
    if inputs.scale is not None and not per_tensor:
        norm = norm / inputs.scale.to(device)
    norm = _clipped(inputs, _recheck(inputs, parts, norm))
    return StepNumbers(norm, _mean(inputs.losses, device), parts if per_tensor else [], surprise)


def _clipped(inputs: StepInputs | None, norm: Tensor) -> Tensor:
    """The norm after the loop's own clipping."""
    limit = None if inputs is None else inputs.max_norm
    return norm if limit is None else torch.where(norm <= LARGEST_NORM, norm.clamp(max=limit), norm)


def _reduced(
    inputs: StepInputs | None,
    parts: Sequence[tuple[Sequence[int], Tensor]],
    per_tensor: bool,
    ranks: Ranks,
    surprise: Tensor | None,
    scaler_skips: Tensor | float,
) -> StepNumbers:
    """The same over ranks, in one all-reduce: a NaN on one rank is a NaN on all.

    The loss is the mean over the ranks that observed one: that of the step's whole batch.
    """
    device = parts[0][1].device if parts else ranks.device
    square = torch.zeros((), dtype=torch.float64, device=device)
    per_row = torch.zeros(ranks.num_rows if per_tensor else 0, dtype=torch.float64, device=device)
    for rows, values in parts:
        weights, numbers = ranks.shares(rows, values.device)
        weighted = (values.double().square() * weights).to(device)
        square = square + weighted.sum()
        if per_tensor:
            per_row.index_add_(0, numbers.to(device), weighted)
    losses = inputs.losses if inputs is not None else ()
    if inputs is not None:
        square = _recheck(inputs, parts, square)
    loss = _mean(losses, device).double() if losses else torch.zeros_like(square)
    observed = torch.full_like(square, 1.0 if losses else 0.0)
    if isinstance(scaler_skips, Tensor):
        skips = scaler_skips.to(device, torch.float64).reshape(())
    else:
        skips = torch.full_like(square, scaler_skips)
    largest = torch.zeros_like(square) if surprise is None else surprise.to(square)
    total = ranks.sum(torch.cat([torch.stack([square, loss, observed, skips, largest]), per_row]))
    loss = torch.where(total[2] > 0, (total[1] / total[2]).nan_to_num(math.inf, math.inf, math.inf), math.nan)
    tensor_norms = [(ranks.local_rows(), total[5:].sqrt().float())] if per_tensor else []
    norm = _clipped(inputs, total[0].sqrt().float())
    return StepNumbers(norm, loss.float(), tensor_norms, total[4].float(), scaler_skips=total[3])


def _recheck(inputs: StepInputs, parts: Sequence[tuple[Sequence[int], Tensor]], number: Tensor) -> Tensor:
    """The number; NaN or Inf if the loop has changed the gradients since and they are so now."""
    if not inputs.by_hand:
        return number
    grads = [local(grad) for rows, _ in parts for row in rows if (grad := inputs.parameters[row].grad) is not None]
    if not grads:
        return number
    now = torch.stack([torch.linalg.vector_norm(grad).to(number.device, torch.float32) for grad in grads]).sum()
    return torch.where(now <= LARGEST_NORM, number, now.to(number.dtype))


def _mean(losses: Sequence[Tensor | float], device: torch.device) -> Tensor:
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    if len(losses) == 1 and tensors:
        return tensors[0].to(device, torch.float32, non_blocking=True)
    if not tensors:
        value = sum(losses) / len(losses) if losses else math.nan  # Inf or NaN for odd losses, never an error
        return torch.as_tensor(value, dtype=torch.float32).to(device, non_blocking=True)
    as_tensors = [torch.as_tensor(loss, dtype=torch.float32).to(device, non_blocking=True) for loss in losses]
    return torch.stack(as_tensors).mean()


# -- deciding on the device --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Facts about a step for its judgment on the host: at once, or later if the device has decided it."""

    step: int
    limit: float  # limit of the norm at that step
    norm: float
    loss: float
    surprise: float  # of the buffers
    factor: float  # what clipping leaves of the gradient
    clipping: bool | None = None  # whether the device has multiplied gradients by `factor`; None if the host decides
    skipped: bool | None = None  # whether the device has skipped the step; None if the host decides
    scaler_skipped: bool = False
    streak: float = 0.0  # spikes in a row that the device has seen, this one included


class DeviceCheck:
    """Compares a step with its limit on the device, so that the host need not wait.

    Skips spikes, at most `max_streak` in a row, and all that is not finite. The host reads the result `LAG` steps
    later.
    """

    def __init__(self, max_streak: int) -> None:
        self._max_streak = max_streak
        self.streak: Tensor | float = 0.0  # spikes in a row, a number on the device
        self._pending: deque[tuple[int, float, bool, Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def skips(self, numbers: StepNumbers, limit: float, most_surprise: float) -> Tensor:
        """1 if the step is to be skipped, else 0, as optimizers expect ``found_inf``. A limit may be inf."""
        finite = numbers.norm <= LARGEST_NORM  # False for NaN
        bad = numbers.norm > min(limit, LARGEST_NORM)
        if numbers.surprise is not None and most_surprise < math.inf:
            bad = bad | ~(numbers.surprise.to(bad.device) <= most_surprise)
        self.streak = torch.where(bad | ~finite, self.streak + 1, 0.0)
        skips = ~finite | (bad & (self.streak <= self._max_streak))
        return (skips if numbers.scaler_skips is None else skips | (numbers.scaler_skips > 0)).float()

    def send(self, step: int, limit: float, clipping: bool, *numbers: Tensor) -> None:
        """Start copying a step's norm, loss, skipped, scaler_skipped, factor, streak and surprise to the host."""
        here = torch.stack([number.float().reshape(()).to(numbers[0].device) for number in numbers])
        event = None
        if here.device.type == "cuda":
            host = torch.empty(len(numbers), pin_memory=True)
            host.copy_(here, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(here.device))
            here = host
        self._pending.append((step, limit, clipping, here, event))

    def results(self, now: int | None = None) -> list[StepResult]:
        """The results to read before step `now`; all of them for None."""
        found = []
        while self._pending and (now is None or self._pending[0][0] <= now - LAG):
            found.append(_result(*self._pending.popleft()))
        return found

    def state_later(self) -> Callable[[], list[dict[str, Any]]]:
        """Returns a function that waits on another thread for what is pending."""
        pending = list(self._pending)
        return lambda: [asdict(_result(*one)) for one in pending]

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue with saved pending results."""
        self._pending.clear()
        for one in saved:
            values = torch.tensor([one[name] for name in SENT], dtype=torch.float32)
            self._pending.append((one["step"], one["limit"], one["clipping"], values, None))
        self.streak = saved[-1]["streak"] if saved else 0.0


SENT = ("norm", "loss", "skipped", "scaler_skipped", "factor", "streak", "surprise")


def _result(step: int, limit: float, clipping: bool, values: Tensor, event: torch.cuda.Event | None) -> StepResult:
    if event is not None:
        event.synchronize()
    sent = dict(zip(SENT, values.tolist(), strict=True))
    flags = {name: sent.pop(name) > 0 for name in ("skipped", "scaler_skipped")}
    return StepResult(step=step, limit=limit, clipping=clipping, **flags, **sent)


# -- clipping ----------------------------------------------------------------------------------------------------


class Clipper:
    """Computes the clip factors of one optimizer's gradients, and applies them."""

    BETA = 0.98  # decay of the moving average of each tensor's norm, as in AdaGC

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self._norms: deque[float] = deque(maxlen=clip.window)
        """The last norms, as they were after clipping for ``method="zscore"``."""
        self._averages: list[Tensor] = []  # of each tensor's norm, for ``method="tensor"``
        self._count = 0

    @property
    def per_tensor(self) -> bool:
        """Whether it needs the norms of single tensors."""
        return self.clip.method == "tensor" and self.clip.mode != "off"

    @torch.no_grad()
    def factors(self, numbers: StepNumbers, inputs: StepInputs) -> list[Tensor] | None:
        """One factor for all gradients, or one per tensor for each part of `tensor_norms`; None for no clipping."""
        clip = self.clip
        if clip.mode == "off" or (inputs.clipped and (inputs.max_norm is None or self.per_tensor)):
            return None  # off, or the loop has clipped them to an unknown norm
        if self.per_tensor:
            return self._tensor_factors(numbers)
        if len(self._norms) < clip.first_steps:
            return None
        if clip.method == "zscore":
            mean = sum(self._norms) / len(self._norms)
            std = math.sqrt(sum((norm - mean) ** 2 for norm in self._norms) / len(self._norms))
            return [clip_factor(numbers.norm, zclip_norm(numbers.norm, mean, max(std, 1e-6 * mean), clip.z_threshold))]
        ordered = sorted(self._norms)
        place = min(len(ordered) - 1, math.ceil(clip.quantile * len(ordered)) - 1)
        return [clip_factor(numbers.norm, ordered[place])]

    def learn(self, norm: float, factor: float) -> None:
        """Add the norm of a step that was made, and what clipping left of it."""
        if self.clip.mode != "off" and 0 < norm <= LARGEST_NORM:
            self._norms.append(norm * factor if self.clip.method == "zscore" else norm)

    def _tensor_factors(self, numbers: StepNumbers) -> list[Tensor] | None:
        norms = [values for _, values in numbers.tensor_norms]
        self._count += 1
        if [values.shape for values in self._averages] != [values.shape for values in norms]:
            self._averages, self._count = [values.clone() for values in norms], 1
        averages = [kept.to(now) for kept, now in zip(self._averages, norms, strict=True)]
        if self._count <= self.clip.first_steps:
            self._averages = [_smaller(kept, now) for kept, now in zip(averages, norms, strict=True)]
            return None
        # A norm of 0 belongs to a tensor without a gradient in this step: there is nothing to clip.
        factors = [
            torch.where(now == 0, 1.0, adagc_factors(now, kept, self.clip.tensor_ratio).where(kept != 0, 1.0))
            for now, kept in zip(norms, averages, strict=True)
        ]
        self._averages = [
            torch.where((now <= LARGEST_NORM) & (now > 0), self.BETA * kept + (1 - self.BETA) * factor * now, kept)
            .where(kept != 0, now.where(now <= LARGEST_NORM, 0.0))
            for now, kept, factor in zip(norms, averages, factors, strict=True)
        ]  # fmt: skip
        return factors

    @torch.no_grad()
    def apply(
        self, factors: list[Tensor], numbers: StepNumbers, inputs: StepInputs, optimizer: torch.optim.Optimizer
    ) -> None:
        """Multiply the gradients in place; each rank scales its shard by the same factor."""
        if not self.per_tensor:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in _parameters(optimizer):
                if parameter.grad is not None:
                    by_device.setdefault(parameter.grad.device, []).append(local(parameter.grad))
            for device, grads in by_device.items():
                torch._foreach_mul_(grads, factors[0].to(device))
            return
        mine = set(map(id, _parameters(optimizer)))
        for (rows, _), several in zip(numbers.tensor_norms, factors, strict=True):
            for row, factor in zip(rows, several.unbind(), strict=True):
                grad = inputs.parameters[row].grad if row >= 0 and id(inputs.parameters[row]) in mine else None
                if grad is not None:
                    local(grad).mul_(factor.to(grad.device, grad.dtype))

    def state_dict(self) -> dict[str, Any]:
        """The moving averages, as a function that waits for the device."""
        averages = [values.clone() for values in self._averages]
        own = {"norms": list(self._norms), "count": self._count}
        return {**own, "averages": lambda: [values.tolist() for values in averages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved averages."""
        self._norms = deque(state["norms"], maxlen=self.clip.window)
        self._averages = [torch.tensor(values) for values in state["averages"]]
        self._count = int(state["count"])


def smallest(factors: Sequence[Tensor] | None, like: Tensor) -> Tensor:
    """The smallest of all factors; 1 for none."""
    if factors is None:
        return torch.ones_like(like)
    if len(factors) == 1:
        return factors[0].min()
    return torch.stack([several.min().to(factors[0].device) for several in factors]).min()


def _smaller(kept: Tensor, now: Tensor) -> Tensor:
    known = (kept <= LARGEST_NORM) & (kept > 0)
    return torch.where((now < kept) & (now > 0), now, kept.where(known, now))


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- standing in for optimizer.step ------------------------------------------------------------------------------


class StepWrapper:
    """One guarded optimizer: wraps its `step`, on this object alone, until `unwrap`."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: Clip, skip: Skip) -> None:
        self.optimizer = optimizer
        self.baseline = StepBaseline()
        self.clipper = Clipper(clip)
        self.check = DeviceCheck(skip.max_streak)
        self.lr_limit: float | None = None  # what its learning rate is held at, once a higher one has damaged the model
        self.is_new = True
        """Whether the optimizer has no state yet: some create it in a skipped step, and do not fill it."""
        self.unwrap: Callable[[], None] = lambda: None  # gives the optimizer its own `step` back
        self._scaler_found_inf: Tensor | None = None
        self._marked = False

    def wrap(
        self,
        before: Callable[[StepWrapper], bool],
        after: Callable[[StepWrapper, bool], object],
        failed: Callable[[StepWrapper], object],
        unguarded: Callable[[], object],
    ) -> None:
        """Replace the optimizer's `step`: `before` says whether to make it. One with a closure is `unguarded`."""
        optimizer, original = self.optimizer, self.optimizer.step
        own = "step" in vars(optimizer)

        # A bound method, because schedulers wrap `step` as well, with its signature, which GradScaler inspects.
        @functools.wraps(original)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if (args[0] if args else kwargs.get("closure")) is not None:
                unguarded()
                return original(*args, **kwargs)
            if not before(self):
                after(self, False)
                return None
            try:
                result = original(*args, **kwargs)
            except BaseException:  # Ctrl-C too
                self._unmark()
                failed(self)
                raise
            self._unmark()
            after(self, True)
            return result

        step.guarded = True  # type: ignore[attr-defined]
        replacement = types.MethodType(step, optimizer)
        optimizer.step = replacement  # type: ignore[method-assign]

        def unwrap() -> None:
            if vars(optimizer).get("step") is not replacement:
                return  # wrapped again since; every step passes from now on
            if own:
                optimizer.step = original  # type: ignore[method-assign]
            else:
                del optimizer.step

        self.unwrap = unwrap

    def hold_lr(self) -> None:
        """Lower the rates of the next step if need be; see `gradvitals.schedules.LRFactors`."""
        if self.lr_limit is not None:
            factor = min(1.0, self.lr_limit / max(largest_lr(self.optimizer), 1e-300))
            lr_factors(self.optimizer).set(self, factor)

    def release_lr(self) -> None:
        """Stop holding the rate."""
        if self.lr_limit is not None:
            lr_factors(self.optimizer).drop(self)

    def mark(self, skips: Tensor, scaler_skips: Tensor | None = None) -> Tensor:
        """Make the optimizer's step do nothing if `skips` is 1 or a GradScaler, of any rank, has found Inf.

        Returns whether a scaler has: nonzero or 0.
        """
        theirs: Tensor | None = getattr(self.optimizer, "found_inf", None)
        self._marked, self._scaler_found_inf = True, theirs
        both = skips if theirs is None else torch.maximum(skips, theirs.to(skips))
        self.optimizer.found_inf = both  # type: ignore[attr-defined]
        if scaler_skips is not None:
            return (scaler_skips > 0).to(skips)
        return torch.zeros_like(skips) if theirs is None else theirs

    def _unmark(self) -> None:
        if self._marked and self._scaler_found_inf is not None:
            self.optimizer.found_inf = self._scaler_found_inf  # type: ignore[attr-defined]  # the scaler removes it
        elif self._marked:
            vars(self.optimizer).pop("found_inf", None)
        self._marked, self._scaler_found_inf = False, None

    def state_dict(self) -> dict[str, Any]:
        """Its learned state; values that are not on the host yet are functions that wait for them."""
        learned = {"baseline": asdict(self.baseline), "clipper": self.clipper.state_dict(), "is_new": self.is_new}
        return {**learned, "lr_limit": self.lr_limit, "pending": self.check.state_later()}

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Continue from a saved state; `shift` is added to its step numbers."""
        self.baseline = StepBaseline.from_state(state["baseline"], shift)
        self.lr_limit = state["lr_limit"]
        self.clipper.load_state_dict(state["clipper"])
        self.is_new = bool(state["is_new"])
        self.check.load(state["pending"])


def is_guarded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a Guard wraps this optimizer already."""
    return getattr(optimizer.step, "guarded", False) is True


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's step does nothing if its ``found_inf`` is 1, as torch's fused ones."""
    in_torch = type(optimizer).__module__.startswith("torch.optim")
    return in_torch and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def largest_lr(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of its groups; 0 if the rates are on a GPU, where reading them would wait."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    return max((float(lr) for lr in rates if not (isinstance(lr, Tensor) and lr.is_cuda)), default=0.0)


# -- undoing the side effects of a skipped step -------------------------------------------------------------------


class BufferBackup:
    """Copies of all buffers after the last step that was made, to undo what a skipped batch did to them.

    A skipped batch has gone through the model all the same, and a NaN in the running statistics of batch norm would
    never leave them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[nn.Module, str, bool]] = []
        """Module, name, and whether to copy the buffer at every step."""
        self._kept: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By place: the buffer, its copy, and its version when copied."""
        self._changing: tuple[int, ...] = ()  # places of the floating-point buffers that forward passes change
        self._peaks = self._changes = torch.zeros(0)
        """Of each of them: the largest change in one step, and the change in this one."""
        self.count = 0  # steps whose changes it has learned
        self.save()
        reference = weakref.WeakMethod(self.save)  # a checkpoint that is loaded later must not be undone
        self._hook = model.register_load_state_dict_post_hook(lambda *_: (reference() or int)())

    def close(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    @torch.no_grad()
    def save(self) -> None:
        """Copy the buffers that have changed."""
        if any(name not in one._buffers for one, name, _ in self._places) or not self._places:
            # Batch norm writes its statistics without bumping the version; all other changes show in it.
            modules = list(self._model.modules())
            self._places = [(one, name, isinstance(one, _NormBase)) for one in modules for name in one._buffers]
            self._kept.clear()
        changed: list[tuple[Tensor, Tensor]] = []
        for place, (module, name, always) in enumerate(self._places):
            live = module._buffers[name]
            if live is None:
                continue
            kept = self._kept.get(place)
            if kept is None or kept[0] is not live:
                self._kept[place] = (live, local(live).clone(), _version(live))
            elif always or kept[2] != _version(live):
                changed.append((kept[1], local(live)))
                self._kept[place] = (live, kept[1], _version(live))
        copy_all(changed)

    @torch.no_grad()
    def surprise(self, least: float) -> Tensor | None:
        """The largest change of a buffer in this step, over its largest change so far; 0 if that is not over `least`.

        A batch on another scale shows here, and nowhere else if batch norm hides it from the gradient. None if forward
        passes change no buffer.
        """
        found: list[tuple[int, Tensor, Tensor]] = []
        for place, (live, kept, version) in self._kept.items():
            module, name, always = self._places[place]
            if kept.is_floating_point() and module._buffers.get(name) is live and (always or _version(live) != version):
                found.append((place, local(live), kept))
        if not found:
            self._changing = ()
            return None
        changes = torch._foreach_norm(torch._foreach_sub([live for _, live, _ in found], [kept for *_, kept in found]))
        self._changes = torch.stack([change.to(changes[0].device, torch.float32) for change in changes])
        places = tuple(place for place, *_ in found)
        if places != self._changing:
            self._changing, self._peaks = places, torch.zeros_like(self._changes)
        ratios = torch.where(self._peaks > 0, self._changes / self._peaks, 0.0).nan_to_num(math.inf)
        return torch.where(ratios.max() > least, ratios.max(), 0.0)

    @torch.no_grad()
    def learn(self, skips: Tensor | None = None) -> None:
        """The step was made, unless `skips` is 1 on the device: its changes are normal."""
        self.count += 1
        if self._changing:
            changes = self._changes if skips is None else torch.where(skips.to(self._changes) > 0, 0.0, self._changes)
            self._peaks = torch.maximum(changes.nan_to_num(0.0, 0.0), Peak.FADE * self._peaks)

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """Undo what the last forward pass did; on the device, only where `where` is not 0."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for place, (live, kept, version) in self._kept.items():
            module, name, always = self._places[place]
            now = module._buffers.get(name)
            if now is not live and where is None:
                module._buffers[name] = now = live  # a forward pass may also have put a new tensor there
            if now is not None and (always or now is not live or _version(live) != version):
                here = local(now)
                pairs.append((here, kept if where is None else torch.where(where.to(here.device) != 0, kept, here)))
        copy_all(pairs)

    def state_dict(self) -> dict[str, Any]:
        """Its learned state, with the peaks as a function that waits for the device."""
        peaks = self._peaks.clone()
        return {"count": self.count, "changing": list(self._changing), "peaks": lambda: peaks.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, with the buffers as they are now."""
        self.save()
        self.count, self._changing = int(state["count"]), tuple(state["changing"])
        device = self._kept[self._changing[0]][1].device if self._changing else "cpu"
        self._peaks = torch.tensor(state["peaks"], device=device)


class WeightCheck:
    """The norm of every parameter now and then, read by the host at the next look: it waits for no GPU."""

    EVERY = 10

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if local(parameter).is_floating_point()]
        self._before: list[float] = []
        self._pending: Tensor | None = None
        self._sum: Tensor | None = None
        self.lags = any(local(parameter).is_cuda for parameter in self._parameters)
        """Whether a look shows the norms of the look before."""

    def reset(self) -> None:
        """Forget the last norms, as after a rollback."""
        self._before, self._pending, self._sum = [], None, None

    @torch.no_grad()
    def growth(self, *, wait: bool) -> float:
        """The largest growth of a parameter's norm between the last two looks; 1 if there are no two.

        On a GPU those of the look before are the newest, unless it is to `wait`.
        """
        now = self._norms()
        if wait or not self.lags:
            newest: Tensor | None = now
        else:
            newest, self._pending = self._pending, torch.empty(len(now), pin_memory=True)
            self._pending.copy_(now, non_blocking=True)
        if newest is None:
            return 1.0
        before, self._before = self._before, newest.tolist()
        pairs = zip(self._before, before, strict=False)
        return max((after / then if after < math.inf else math.inf for after, then in pairs if then > 0), default=1.0)

    @torch.no_grad()
    def are_finite(self) -> bool:
        """Whether all parameters are finite; on a GPU, whether they were at the last call."""
        now = self._norms().sum()
        if not self.lags:
            return math.isfinite(now.item())
        newest, self._sum = self._sum, torch.empty((), pin_memory=True)
        self._sum.copy_(now, non_blocking=True)
        return newest is None or math.isfinite(newest.item())

    def _norms(self) -> Tensor:
        norms = torch._foreach_norm([local(parameter).detach() for parameter in self._parameters])
        return torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])


def _version(buffer: Tensor) -> int:
    part = local(buffer)
    return buffer._version + (0 if part is buffer else part._version)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into its first, without waiting for a device."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        groups.setdefault((target.device, target.dtype), []).append((target, source))
    with torch.no_grad():
        for group in groups.values():
            torch._foreach_copy_([target for target, _ in group], [source for _, source in group], non_blocking=True)


@dataclass
class _Scheduler:
    scheduler: Any
    count: int
    """Its ticks when its optimizer's last step started, or was skipped."""
    each_step: bool = True
    """Whether it ticked after the last step that was made; assumed at first."""
    started: bool = False
    saved: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
    """Its state and its groups' settings when a step was skipped."""

    def belongs_to(self, optimizer: torch.optim.Optimizer | None) -> bool:
        return optimizer is None or getattr(self.scheduler, "optimizer", optimizer) is optimizer


class SkippedTicks:
    """Takes back the tick that a loop gives its schedulers and its GradScaler after a skipped step.

    A scheduler is corrected right before its optimizer's next step. One that ticks once per epoch is left alone.
    """

    def __init__(self, schedulers: Sequence[Any], scaler: torch.amp.GradScaler | None) -> None:
        self._schedulers = [_Scheduler(scheduler, _ticks(scheduler)) for scheduler in schedulers]
        self._scaler = scaler

    def step_skipped(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """A step of one optimizer, or of all, is skipped: remember the schedulers as they are now."""
        for one in self._schedulers:
            if one.belongs_to(optimizer):
                groups = [_settings(group) for group in one.scheduler.optimizer.param_groups]
                one.saved = copy.deepcopy(one.scheduler.state_dict()), groups
                one.count = _ticks(one.scheduler)

    def step_starts(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The next step starts: take back the tick for a skipped one."""
        for one in self._schedulers:
            if not one.belongs_to(optimizer):
                continue
            ticked = _ticks(one.scheduler) != one.count
            if one.saved is None:
                one.each_step = ticked if one.started else one.each_step
            elif ticked and one.each_step:
                state, groups = one.saved
                one.scheduler.load_state_dict(state)
                for group, saved in zip(one.scheduler.optimizer.param_groups, groups, strict=True):
                    for name, value in saved.items():
                        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                            group[name].copy_(value)
                        else:
                            group[name] = value
            one.saved, one.started, one.count = None, True, _ticks(one.scheduler)

    def discount_scaler(self, skips: Tensor | None = None) -> None:
        """Keep the scaler from counting this step as a good one; on the device, if `skips` is 1. Once per step."""
        tracker = self._scaler._growth_tracker if self._scaler is not None else None
        if tracker is not None:  # `update` adds the 1 that is subtracted here
            tracker.sub_(1 if skips is None else skips.to(tracker))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the schedulers when last seen."""
        return {name: [getattr(one, name) for one in self._schedulers] for name in ("each_step", "started")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, after the schedulers did."""
        for one, each_step, started in zip(self._schedulers, state["each_step"], state["started"], strict=True):
            one.each_step, one.started, one.saved = bool(each_step), bool(started), None
            one.count = _ticks(one.scheduler) - one.each_step


def _ticks(scheduler: Any) -> int:
    inner = getattr(scheduler, "_schedulers", None)  # a ChainedScheduler has no count of its own
    if not hasattr(scheduler, "last_epoch") and inner:
        return _ticks(inner[0])
    return int(getattr(scheduler, "last_epoch", 0))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }
