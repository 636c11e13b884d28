"""What a Guard does to training: wraps `optimizer.step`, checks it on the host or the device, clips, skips, resets."""

from __future__ import annotations

import copy
import functools
import math
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradvitals.collect.moments import stepping
from gradvitals.collect.recorder import StepInputs
from gradvitals.distributed.shards import local
from gradvitals.functional.clipping import adagc_factors, clip_factor, zclip_norm
from gradvitals.guard.monitor_link import Ranks
from gradvitals.guard.policy import LARGEST_NORM, Clip, Skip, StepBaseline
from gradvitals.schedules import lr_factors

LAG = 8
"""Steps after which the host reads what was decided on a GPU. The host is hardly ever that far ahead, so it does not
wait; and as the number is fixed, decisions do not depend on how fast the host runs."""

# -- the numbers of a step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepNumbers:
    """The gradient norm and the loss of a step, as scalars on one device; the same on all ranks."""

    norm: Tensor
    loss: Tensor
    """NaN if the loop observed none."""
    tensor_norms: Sequence[tuple[Sequence[int], Tensor]] = ()
    """Rows, and the norms of their gradients; row -1 for one that only other ranks hold."""
    scaler_skips: Tensor | None = None
    """Nonzero if the GradScaler of any rank skips the step; None in a single process, which knows its own."""


@torch.no_grad()
def step_numbers(
    inputs: StepInputs | None, *, per_tensor: bool, ranks: Ranks | None = None, scaler_skips: Tensor | float = 0.0
) -> StepNumbers | None:
    """The norm of the whole gradient and the loss; None if nothing was read.

    Args:
        inputs: What the Monitor read.
        per_tensor: Whether the norms of single tensors are needed too.
        ranks: The ranks of the run. If there are several, all of them must call this.
        scaler_skips: Nonzero if a GradScaler skips the step.
    """
    several = ranks is not None and ranks.several
    parts: list[tuple[Sequence[int], Tensor]] = []
    for rows, values in inputs.norms if inputs is not None else ():
        norms = local(values) if isinstance(values, Tensor) else torch.stack([local(value) for value in values])
        if inputs is not None and inputs.scale is not None and (per_tensor or several):
            norms = norms / inputs.scale.to(norms.device)
        parts.append((rows, norms))
    if ranks is not None and several:
        return _reduced(inputs, parts, per_tensor, ranks, scaler_skips)
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
    return StepNumbers(_recheck(inputs, parts, norm), _mean(inputs.losses, device), parts if per_tensor else [])


def _reduced(
    inputs: StepInputs | None,
    parts: Sequence[tuple[Sequence[int], Tensor]],
    per_tensor: bool,
    ranks: Ranks,
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
    total = ranks.sum(torch.cat([torch.stack([square, loss, observed, skips]), per_row]))
    loss = torch.where(total[2] > 0, (total[1] / total[2]).nan_to_num(math.inf, math.inf, math.inf), math.nan)
    tensor_norms = [(ranks.local_rows(), total[4:].sqrt().float())] if per_tensor else []
    return StepNumbers(total[0].sqrt().float(), loss.float(), tensor_norms, scaler_skips=total[3])


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


@dataclass(frozen=True)
class DeviceResult:
    """A step that was decided on the device, as the host reads it later."""

    step: int
    limits: tuple[float, float]
    """Limits of the norm and the loss at that step."""
    clipping: bool
    """Whether gradients were multiplied by `factor`; not in a dry run or with a spent budget."""
    norm: float
    loss: float
    skipped: bool
    scaler_skipped: bool
    factor: float
    """What clipping left of the gradient."""
    streak: float
    """Bad steps in a row, this one included."""


class DeviceCheck:
    """Compares a step with its limits on the device, so that the host need not wait.

    Skips bad steps, at most `max_streak` in a row, and all that are not finite. The host reads the result `LAG` steps
    later.
    """

    def __init__(self, max_streak: int) -> None:
        self._max_streak = max_streak
        self.streak: Tensor | float = 0.0
        """Bad steps in a row, a number on the device."""
        self._pending: deque[tuple[int, tuple[float, float], bool, Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def skips(self, numbers: StepNumbers, norm_limit: float, loss_limit: float) -> Tensor:
        """1 if the step is to be skipped, else 0, as optimizers expect ``found_inf``. A limit may be inf."""
        finite = numbers.norm <= LARGEST_NORM  # False for NaN
        bad = numbers.norm > min(norm_limit, LARGEST_NORM)
        if loss_limit < math.inf:
            bad = bad | (numbers.loss > loss_limit)
        self.streak = torch.where(bad | ~finite, self.streak + 1, 0.0)
        skips = ~finite | (bad & (self.streak <= self._max_streak))
        return (skips if numbers.scaler_skips is None else skips | (numbers.scaler_skips > 0)).float()

    def send(self, step: int, limits: tuple[float, float], clipping: bool, *numbers: Tensor) -> None:
        """Start copying a step's norm, loss, skipped, scaler_skipped, factor and streak to the host."""
        here = torch.stack([number.float().reshape(()) for number in numbers])
        event = None
        if here.device.type == "cuda":
            host = torch.empty(len(numbers), pin_memory=True)
            host.copy_(here, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(here.device))
            here = host
        self._pending.append((step, limits, clipping, here, event))

    def results(self, now: int | None = None) -> list[DeviceResult]:
        """The results to read before step `now`; all of them for None."""
        found = []
        while self._pending and (now is None or self._pending[0][0] <= now - LAG):
            found.append(_result(*self._pending.popleft()))
        return found

    def state_later(self) -> Callable[[], list[dict[str, Any]]]:
        """What is pending, as a function that waits for it on another thread."""
        pending = list(self._pending)
        return lambda: [asdict(_result(*one)) for one in pending]

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue with saved pending results."""
        self._pending.clear()
        for one in saved:
            numbers = [one[name] for name in ("norm", "loss", "skipped", "scaler_skipped", "factor", "streak")]
            values = torch.tensor(numbers, dtype=torch.float32)
            self._pending.append((one["step"], tuple(one["limits"]), one["clipping"], values, None))
        self.streak = saved[-1]["streak"] if saved else 0.0


def _result(
    step: int, limits: tuple[float, float], clipping: bool, values: Tensor, event: torch.cuda.Event | None
) -> DeviceResult:
    if event is not None:
        event.synchronize()
    norm, loss, skipped, scaler_skipped, factor, streak = values.tolist()
    return DeviceResult(step, limits, clipping, norm, loss, skipped > 0, scaler_skipped > 0, factor, streak)


# -- clipping ----------------------------------------------------------------------------------------------------


class Clipper:
    """Computes the clip factors of one optimizer's gradients, and applies them."""

    BETA = 0.98
    """Decay of the moving average of each tensor's norm, as in AdaGC."""

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self._averages: list[Tensor] = []
        """Of each tensor's norm, for ``method="tensor"``."""
        self._count = 0

    @property
    def per_tensor(self) -> bool:
        """Whether it needs the norms of single tensors."""
        return self.clip.method == "tensor" and self.clip.mode != "off"

    @torch.no_grad()
    def factors(self, numbers: StepNumbers, inputs: StepInputs, baseline: StepBaseline) -> list[Tensor] | None:
        """One factor for all gradients, or one per tensor for each part of `tensor_norms`; None for no clipping."""
        clip = self.clip
        if clip.mode == "off" or (inputs.clipped and (inputs.max_norm is None or self.per_tensor)):
            return None  # off, or the loop has clipped them to an unknown norm
        if self.per_tensor:
            return self._tensor_factors(numbers)
        if baseline.norm.count < clip.first_steps:
            return None
        norm = numbers.norm if inputs.max_norm is None else numbers.norm.clamp(max=inputs.max_norm)
        if clip.method == "zscore":
            mean, std = baseline.moments()
            return [clip_factor(norm, zclip_norm(norm, mean, max(std, 1e-6 * mean), clip.z_threshold))]
        if clip.method == "quantile":
            return [clip_factor(norm, baseline.quantile(clip.quantile))]
        limit = baseline.norm_limit(clip.ratio, clip.z, clip.first_steps)
        return [clip_factor(norm, limit)] if limit < math.inf else None

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
        return {"averages": lambda: [values.tolist() for values in averages], "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved averages."""
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
    """One guarded optimizer: wraps its `step`, on this object alone, until `unwrap`.

    Args:
        optimizer: The optimizer.
        on_device: Whether to skip steps on the device, through ``found_inf``.
        clip: How to clip.
        skip: When to skip.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, on_device: bool, clip: Clip, skip: Skip) -> None:
        self.optimizer = optimizer
        self.on_device = on_device
        self.baseline = StepBaseline(window=clip.window)
        self.clipper = Clipper(clip)
        self.check = DeviceCheck(skip.max_streak)
        self.is_new = True
        """Whether the optimizer has no state yet: some create it in a skipped step, and do not fill it."""
        self._scaler_found_inf: Tensor | None = None
        self._marked = False
        self._unwrap: Callable[[], None] = lambda: None

    def wrap(
        self,
        before: Callable[[StepWrapper], bool],
        after: Callable[[StepWrapper, bool], None],
        failed: Callable[[StepWrapper], None],
        unguarded: Callable[[], None],
    ) -> None:
        """Replace the optimizer's `step`.

        Args:
            before: Returns whether to make the step.
            after: Called with whether it was made.
            failed: Called after a step that raised.
            unguarded: Called before a step with a closure, which is not checked.
        """
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
                return  # wrapped again since; `before` lets every step pass from now on
            if own:
                optimizer.step = original  # type: ignore[method-assign]
            else:
                del optimizer.step

        self._unwrap = unwrap

    def unwrap(self) -> None:
        """Give the optimizer its own `step` back."""
        self._unwrap()

    def mark(self, skips: Tensor, scaler_skips: Tensor | None = None) -> Tensor:
        """Make the optimizer's step do nothing if `skips` is 1 or a GradScaler has found Inf.

        Args:
            skips: 1 or 0.
            scaler_skips: Nonzero if the scaler of any rank has; None in a single process.

        Returns:
            Whether the scaler, of any rank, skips the step: nonzero or 0.
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
        """What it has learned; values that are not on the host yet are functions that wait for them."""
        learned = {"baseline": self.baseline.state_dict(), "clipper": self.clipper.state_dict(), "is_new": self.is_new}
        return {**learned, "pending": self.check.state_later()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.baseline.load_state_dict(state["baseline"])
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


# -- resetting momentum, cutting the learning rate ---------------------------------------------------------------


@torch.no_grad()
def reset_momentum(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter] | None = None) -> int:
    """Clear the optimizer state of some parameters, or of all for None; returns how many had any.

    The optimizer then creates the state anew and corrects its bias as at the start of a run. With ``capturable=True``
    the tensors stay, filled with zeros, as a CUDA graph may know them by address.
    """
    chosen = None if parameters is None else set(map(id, parameters))
    optimizer = stepping(optimizer)
    count = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or (chosen is not None and id(parameter) not in chosen):
                continue
            count += 1
            if group.get("capturable"):
                for value in state.values():
                    if isinstance(value, Tensor):
                        local(value).zero_()
            else:
                del optimizer.state[parameter]
    return count


@dataclass(frozen=True)
class LRCut:
    """One reason for a lower rate: `share` of it from step `start`, held, then back to all of it."""

    start: int
    share: float
    hold: int
    rise: int
    cosine: bool = False

    def factor(self, step: int) -> float:
        """The factor on the learning rate at a step."""
        passed = step - self.start - self.hold
        if passed < 0:
            return self.share
        if passed >= self.rise:
            return 1.0
        done = passed / self.rise
        if self.cosine:
            done = (1 - math.cos(math.pi * done)) / 2
        return self.share + (1 - self.share) * done


@dataclass
class LRCuts:
    """The cuts in force, and the factor that follows from them."""

    cuts: dict[str, LRCut] = field(default_factory=dict)
    """By the kind of action that made it; a new one replaces the old."""
    _applied: dict[int, float] = field(default_factory=dict)
    _owner: object = field(default_factory=object)

    def factor(self, step: int) -> float:
        """The factor on the learning rate at a step."""
        return math.prod(cut.factor(step) for cut in self.cuts.values())

    def remove_expired(self, step: int) -> list[str]:
        """Remove cuts that have ended; returns their kinds."""
        ended = [kind for kind, cut in self.cuts.items() if step >= cut.start + cut.hold + cut.rise]
        for kind in ended:
            del self.cuts[kind]
        return ended

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Multiply the rates of the optimizer's next step; see `gradvitals.schedules.LRFactors`."""
        factor = self.factor(step) if self.cuts else 1.0
        if factor != self._applied.get(id(optimizer), 1.0):
            self._applied[id(optimizer)] = factor
            lr_factors(optimizer).set(self._owner, factor)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop multiplying."""
        if self._applied.pop(id(optimizer), None) is not None:
            lr_factors(optimizer).drop(self._owner)

    def state_dict(self) -> dict[str, Any]:
        """The cuts in force."""
        return {kind: asdict(cut) for kind, cut in self.cuts.items()}

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Continue with saved cuts; `shift` is added to their start steps."""
        self.cuts = {kind: LRCut(**{**values, "start": values["start"] + shift}) for kind, values in state.items()}


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
        """What it has seen of the schedulers."""
        return {
            "each_step": [one.each_step for one in self._schedulers],
            "started": [one.started for one in self._schedulers],
        }

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
