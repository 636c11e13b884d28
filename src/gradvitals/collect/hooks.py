"""Hooks where torch has none: gradient clipping, GradScaler, autocast, pipelines, the end of process groups."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import utils as nn_utils
from torch.nn.utils import clip_grad

_NAMES: dict[str, Any] = vars(clip_grad)
"""Namespace in which the functions that clip look up names."""

MOST_SAMPLES = 10_000
"""Up to so many samples, an accuracy is known as a multiple of 1/n; for more, any number is close to one."""


class Listener(Protocol):
    """A receiver of the events of these hooks: a StepRecorder."""

    def on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None, joined: Tensor | None) -> None:
        """The L2 norm of these gradients was computed. With it, their own norms, one by one or joined, if known."""
        return

    def on_clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> None:
        """The gradients of these parameters are about to be scaled (to a norm, if known) or clamped in place."""

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A loss was multiplied by this scaler's scale."""

    def on_autocast(self, device: str, dtype: torch.dtype) -> None:
        """A block of lower precision was entered."""

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` is about to run."""

    def after_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` has run, or skipped the step."""
        return

    def on_divided(self, parameters: Sequence[Tensor], factor: float) -> None:
        """A pipeline has divided the gradients of these parameters by the number of its micro-batches."""
        return

    def on_plateau(self, scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau, metric: Any) -> None:
        """`scheduler.step(metric)` has run."""
        return

    def before_groups_end(self) -> None:
        """torch.distributed is about to end."""
        return


_listeners: tuple[weakref.ref[Any], ...] = ()
_lock = threading.RLock()  # a garbage collection inside may close a Monitor that nobody holds any more
_undo: list[Callable[[], None]] = []


def attach(listener: Listener) -> None:
    """Start to call a listener."""
    global _listeners
    with _lock:
        _listeners = (*_others(listener), weakref.ref(listener))
        if not _undo:
            _install()


def detach(listener: Listener) -> None:
    """Stop calling a listener; with the last one gone, torch is as it was."""
    global _listeners
    with _lock:
        _listeners = _others(listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def _others(listener: Listener) -> tuple[weakref.ref[Any], ...]:
    return tuple(one for one in _listeners if one() is not None and one() is not listener)


def _notify(method: str, *args: Any) -> None:
    for reference in _listeners:
        listener = reference()
        if listener is not None:
            getattr(listener, method)(*args)


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is None:  # another version of torch: that one event is not seen
        return
    replacement = wrap(original)
    setattr(owner, name, replacement)

    def undo() -> None:
        if getattr(owner, name) is replacement:  # someone else may have wrapped it after us
            setattr(owner, name, original)

    _undo.append(undo)


def _install() -> None:
    # clip_grad_norm_ looks these two up in its module each time, so code that imported it before us is covered too.
    _replace(clip_grad, "_get_total_norm", _wrap_total_norm)
    _replace(clip_grad, "_clip_grads_with_norm_", _wrap_clip)
    _replace(nn_utils, "get_total_norm", _wrap_total_norm)
    _replace(nn_utils, "clip_grads_with_norm_", _wrap_clip)
    _replace(nn_utils, "clip_grad_value_", _wrap_clip)
    _replace(torch.amp.autocast_mode.autocast, "__enter__", _wrap_autocast)
    _replace(torch.amp.GradScaler, "scale", _wrap_scale)
    _replace(torch.amp.GradScaler, "step", _wrap_scaler_step)
    _replace(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", _wrap_plateau)
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is not None:
        _replace(stages._PipelineStageBase, "scale_grads", _wrap_division)
    if dist.is_available():
        _replace(dist, "destroy_process_group", _wrap_groups_end)


class _TorchProxy:
    """Stands for torch in the module that clips, for one call, and keeps the norms that are computed on the way.

    The norms of single gradients are a local variable there; so they need not be computed twice.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Forget the last call."""
        self._thread = threading.get_ident()
        self.grads: Sequence[Tensor] = ()
        self.norms: Sequence[Tensor] = ()
        self.joined: Tensor | None = None
        """All norms in one tensor, if the gradients have one device and dtype."""
        self._groups = 0

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(torch, name)
        return found

    def _foreach_norm(self, group: list[Tensor], *rest: Any, **options: Any) -> Any:
        result = torch._foreach_norm(group, *rest, **options)
        if threading.get_ident() == self._thread:
            self.grads, self.norms = (*self.grads, *group), (*self.norms, *result)
            self._groups += 1
        return result

    def stack(self, tensors: Any, *rest: Any, **options: Any) -> Any:
        """As torch's."""
        result = torch.stack(tensors, *rest, **options)
        if self._groups == 1 and len(tensors) == len(self.norms) and tensors[0] is self.norms[0]:
            self.joined = result
        return result


_proxy = _TorchProxy()


def _wrap_total_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or norm_type != 2 or not _proxy.lock.acquire(blocking=False):
            return original(tensors, norm_type, *args, **kwargs)
        try:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            _proxy.start()
            _NAMES["torch"] = _proxy
            try:
                total = original(tensors, norm_type, *args, **kwargs)
            finally:
                _NAMES["torch"] = torch
            grads, norms, joined = _proxy.grads, _proxy.norms, _proxy.joined
        finally:
            _proxy.start()  # holds no gradients between calls
            _proxy.lock.release()
        if len(norms) == len(tensors):
            _notify("on_total_norm", grads, norms, joined)
        else:
            _notify("on_total_norm", tensors, None, None)
        return total

    return get_total_norm


def _wrap_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    by_norm = "norm" in original.__name__

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if not isinstance(parameters, Tensor):
                parameters = list(parameters)  # a generator can be gone through once
            limit = kwargs.get("max_norm", args[0] if args else None)
            norm = float(limit) if by_norm and isinstance(limit, (int, float)) else None
            _notify("on_clip", [parameters] if isinstance(parameters, Tensor) else parameters, norm)
        return original(parameters, *args, **kwargs)

    return clip


def _wrap_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(self: torch.autocast) -> Any:
        if not torch.compiler.is_compiling() and getattr(self, "_enabled", False) and self.fast_dtype is not None:
            _notify("on_autocast", str(self.device), self.fast_dtype)
        return original(self)

    return enter


def _wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.is_enabled():
            _notify("on_loss_scaled", self)
        return result

    return scale


def _wrap_scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        _notify("before_scaler_step", self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        _notify("after_scaler_step", self, optimizer)
        return result

    return step


def wrong_mode(calls: Sequence[tuple[str, float, float, float]]) -> str | None:
    """Returns the mode of a ReduceLROnPlateau that lowers the learning rate when its metric improves; else None.

    Args:
        calls: Of each call: mode, patience, metric, learning rate after it.

    >>> wrong_mode([("max", 0, 4.0 - i, 0.1**i) for i in range(4)])
    'max'
    >>> wrong_mode([("min", 0, 4.0 - i, 0.1) for i in range(4)]) is None
    True
    >>> wrong_mode([("min", 0, 1 - 0.5**i, 0.1**i) for i in range(9)])  # an accuracy
    'min'
    >>> wrong_mode([("min", 0, 0.3 + 0.05 * i, 0.1**i) for i in range(9)]) is None  # the loss of a model that overfits
    True
    """
    lowered = [i for i in range(1, len(calls)) if calls[i][3] < calls[i - 1][3]]
    if len(lowered) < 2:
        return None
    mode = calls[0][0]
    sign = 1.0 if mode == "max" else -1.0  # so that a metric that falls is one that the mode takes for worse
    values = [sign * call[2] for call in calls]
    # A metric that the other mode would call improved: its best was among those that the scheduler was patient for.
    wrong = [min(values[int(max(i - calls[i][1], 0)) : i + 1]) <= min(values[: i + 1]) for i in lowered]
    third = max(len(values) // 3, 1)
    fell = sorted(values[-third:])[third // 2] < sorted(values[:third])[third // 2]
    never_better = values.index(max(values)) <= len(values) // 5
    if not (fell and never_better and sum(wrong[:3]) >= 2):
        return None
    return mode if mode == "max" or _is_accuracy([call[2] for call in calls]) else None


def _is_accuracy(values: Sequence[float]) -> bool:
    """Returns whether a metric that rises cannot be a validation loss: it nears 1, ever more slowly, in steps of 1/n.

    n is the number of samples; rounded losses come in such steps too.
    """
    third = max(len(values) // 3, 1)
    middle, late = (sorted(part)[third // 2] for part in (values[third : 2 * third], values[-third:]))
    if not (min(values) >= 0 and max(values) <= 1 and 2 * (1 - late) <= 1 - values[0]):
        return False
    shares = np.asarray(values)
    return middle - values[0] >= 2 * (late - middle) and any(
        np.abs(n * shares - np.round(n * shares)).max() < 1e-3 for n in range(1, MOST_SAMPLES + 1)
    )


def _wrap_plateau(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, metrics, *args, **kwargs)
        _notify("on_plateau", self, metrics)
        return result

    return step


def _wrap_division(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_grads(self: Any, grad_scale_factor: int) -> Any:
        result = original(self, grad_scale_factor)
        _notify("on_divided", list(self.submod.parameters()), float(grad_scale_factor))
        return result

    return scale_grads


def _wrap_groups_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> Any:
        if group is None or group is dist.group.WORLD:
            _notify("before_groups_end")
        return original(group)

    return destroy_process_group


def wrap_closure(
    closure: Callable[[], Any], mute: Callable[[bool], None], first: Callable[[Any], None]
) -> Callable[[], Any]:
    """Return a closure that does the same and reports its first evaluation.

    Args:
        closure: What the optimizer was given.
        mute: Called with True before every later evaluation, and with False after it: a line search evaluates again, at
            other weights.
        first: Called with the loss of the first evaluation.
    """
    evaluated = False

    def evaluate() -> Any:
        nonlocal evaluated
        mute(evaluated)
        try:
            loss = closure()
        finally:
            mute(False)
        if not evaluated:
            evaluated = True
            first(loss)
        return loss

    return evaluate


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments of an optimizer's step hook, whose first is the optimizer itself."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)
