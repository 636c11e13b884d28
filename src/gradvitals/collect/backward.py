"""Follows backward: its passes, discarded gradients, alternating optimizers, the gradient of the first layer."""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import optimizer as optim

from gradvitals.collect.parameters import ParameterTable
from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed.fsdp import Place, sharded_units
from gradvitals.distributed.shards import local


def is_distributed() -> bool:
    """Returns whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _nothing() -> None:
    """Stands for a reference to nothing."""


class BackwardCounter:
    """Counts the backward passes of a step, and detects gradients that the loop altered or discarded.

    Autograd adds to ``.grad`` in place, which increments the tensor's version. Any other change between two backward
    passes is the loop's: it zeroed the gradients without a step, so it skipped a batch.

    Args:
        on_discarded: Called when the next pass shows that gradients were discarded, with the number of lost passes and
            whether the gradient is a new tensor. A gradient that was changed in place may have been clipped.
    """

    def __init__(self, on_discarded: Callable[[int, bool], None]) -> None:
        self.backwards = 0
        """Backward passes since the last step."""
        self.singles = 0
        """Steps in a row, up to the last one, with one backward pass each."""
        self.carried = False
        """Whether the first of them added to the previous step's gradients, which the loop did not zero."""
        # Both weakly: autograd keeps the hook as long as the parameter lives, in a cycle that Python cannot collect.
        self._on_discarded = weakref.WeakMethod(on_discarded)
        self._parameter: Callable[[], nn.Parameter | None] = _nothing
        self._hook: Any = None
        self._version_of: Callable[[Tensor], int] = _PLAIN_VERSION
        self._distributed = False
        self._grad: weakref.ref[Tensor] | None = None
        self._version = 0
        self._left: tuple[weakref.ref[Tensor], int] | None = None
        self._read: tuple[weakref.ref[Tensor], int] | None = None

    def follow(self, parameter: nn.Parameter) -> None:
        """Count the passes that reach this parameter."""
        self._distributed = is_distributed()
        self._version_of = _PLAIN_VERSION if type(parameter) is nn.Parameter else _version_of
        if self._parameter() is parameter:
            return
        self.unhook()
        self._parameter = weakref.ref(parameter)
        self._hook = parameter.register_post_accumulate_grad_hook(self._after_accumulation)

    def unhook(self) -> None:
        """Stop counting."""
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._parameter = None, _nothing

    def reset(self) -> None:
        """Start a new step: the optimizer has stepped."""
        self.singles = self.singles + 1 if self.backwards == 1 else 0
        self.backwards, self._grad, self.carried, self._read = 0, None, False, None
        parameter = self._parameter()
        grad = parameter.grad if parameter is not None else None
        self._left = None if grad is None else (weakref.ref(grad), self._version_of(grad))

    def note_zeroed(self) -> None:
        """The loop zeroed the gradients of the last step before that step was known to be over."""
        self._left = None

    def note_read(self) -> None:
        """The gradients are being read as they are now. Only needed with several ranks: see `altered`."""
        parameter = self._parameter()
        if self._distributed and parameter is not None:
            grad = parameter.grad
            self._read = None if grad is None else (weakref.ref(grad), self._version_of(grad))

    def altered(self) -> bool:
        """Returns whether the loop changed the gradients since the last backward pass in a way that no hook sees."""
        parameter = self._parameter()
        if parameter is None or self._grad is None:
            return False
        grad = parameter.grad
        if self._distributed:  # the reduction over ranks changes gradients too, but not after they were read
            return self._read is not None and not self._is(grad, *self._read)
        return grad is None or self._grad() is not grad or self._version_of(grad) != self._version

    def _is(self, grad: Tensor | None, seen: weakref.ref[Tensor], version: int) -> bool:
        """Returns whether a gradient is the tensor seen before, at the same version."""
        return grad is not None and seen() is grad and self._version_of(grad) == version

    def _after_accumulation(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is None:
            return
        version = self._version_of(grad)
        if not torch.is_grad_enabled():  # with create_graph, autograd makes a new tensor each time
            seen = self._grad
            if seen is not None and not self._distributed and not (seen() is grad and version == self._version + 1):
                passes, self.backwards = self.backwards, 0
                on_discarded = self._on_discarded()
                if on_discarded is not None:
                    on_discarded(passes, seen() is not grad)
            left = self._left
            if self.backwards == 0 and left is not None:
                self.carried = left[0]() is grad and version == left[1] + 1
        self.backwards += 1
        self._grad, self._version, self._read = weakref.ref(grad), version, None


_PLAIN_VERSION: Callable[[Tensor], int] = operator.attrgetter("_version")


def _version_of(grad: Tensor) -> int:
    """Returns how often a gradient was changed in place; for a DTensor, including its local part."""
    part = local(grad)
    return grad._version if part is grad else grad._version + part._version


class FirstLayerGradient:
    """Reads the norm of one small gradient at every step before the reduction: it shows which rank made a NaN.

    Backward reaches it last, so a NaN from any layer is in it.

    Args:
        table: The watched parameters.
        buffer: Returns the buffer of the step in progress.
    """

    def __init__(self, table: ParameterTable, buffer: Callable[[], ReadingBuffer]) -> None:
        self._buffer = buffer
        self._row = -1
        self._leaf: Tensor | None = None
        self._handle: Any = None
        self._forward_handle: Any = None
        self.follow(table)

    def follow(self, table: ParameterTable) -> None:
        """Hook the smallest parameter of the layer nearest the input."""
        trainable = [row for row in table.order if table.parameters[row].requires_grad]
        if not trainable:
            return
        layers = [table.layout.tensors[row].layer for row in trainable]
        first = [row for row, layer in zip(trainable, layers, strict=True) if layer == layers[0]]
        chosen = min(first, key=lambda row: table.parameters[row].numel())
        if chosen == self._row:
            return
        self.stop()
        self._row = chosen
        for unit, (place,) in sharded_units(table.model, table.parameters, [chosen]).items():
            self._follow_whole(unit, place)
            return
        self._hook(table.parameters[chosen])

    def _follow_whole(self, unit: nn.Module, place: Place) -> None:
        """Hook the gathered parameter of `fully_shard`, which exists when its unit runs."""
        reference = weakref.ref(self)

        def before_forward(*_: Any) -> None:
            own = reference()
            if own is not None:
                with contextlib.suppress(Exception):  # inside forward: no error may escape
                    own._hook(place.current())

        self._forward_handle = unit.register_forward_pre_hook(torch.compiler.disable(before_forward))

    def _hook(self, leaf: Tensor | None) -> None:
        if leaf is None or leaf is self._leaf:
            return
        reference = weakref.WeakMethod(self._take)  # a parameter must not hold its watcher

        def incoming(grad: Tensor) -> None:
            take = reference()
            if take is not None:
                take(grad)

        if self._handle is not None:
            self._handle.remove()
        self._leaf, self._handle = leaf, leaf.register_hook(incoming)

    @torch.no_grad()
    def _take(self, grad: Tensor) -> None:
        with contextlib.suppress(Exception):  # inside backward: no error may escape
            if not grad.is_sparse and not (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._buffer().add("own_norm", torch.linalg.vector_norm(local(grad), dtype=torch.float32))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in (self._handle, self._forward_handle):
            if handle is not None:
                handle.remove()
        self._leaf = self._handle = self._forward_handle = None


MOST_SIDES = 8
"""The most optimizers to follow in a process: a game has few."""

TURNS = 3
"""Turns that make a game: a single batch may be discarded for other reasons."""

LONG = 200
"""Steps without a turn after which an optimizer no longer alternates. Freezing for an epoch is not a game."""


class AlternatingOptimizers:
    """Follows all optimizers in the process and detects those that alternate, as in a GAN.

    In a game, the loss of one side reaches the parameters of the other, or finds them frozen; then the first side
    steps. The gradients left on the other side are discarded before that side steps with gradients of its own. Two
    optimizers that ever step with gradients of the same pass train one model, even if one of them is skipped at times.
    Models trained side by side are not reached by each other's passes. Neither is a game.

    Args:
        optimizers: The optimizers of the watched model.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.is_game = False
        """Whether one of the optimizers alternates with another one."""
        self._own = {id(optimizer) for optimizer in optimizers}
        self._sides: list[_Side] = []
        self._joint: set[frozenset[int]] = set()
        """Pairs that stepped with gradients of the same pass."""
        STEPS.following.add(self)
        STEPS.hold()
        self._release = weakref.finalize(self, STEPS.release)

    def stop(self) -> None:
        """Stop following."""
        STEPS.following.discard(self)
        self._release()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before the step of any optimizer."""
        stepping = self._side(optimizer)
        if stepping is None:
            return
        stepping.thread = threading.get_ident()
        visitor, thrown_away = stepping.take_turn()
        if visitor is not None:
            pair = frozenset((visitor.number, stepping.number))
            if not thrown_away:
                self._joint.add(pair)
            elif not self._own.isdisjoint(pair):
                stepping.note_turn(pair)
        self.is_game = any([side.plays and side.pair not in self._joint for side in self._sides])
        for side in self._sides:
            # Optimizers of different threads do not alternate, and reading their gradients would be a race.
            if side.thread == stepping.thread and side.parameter() is not stepping.parameter():
                side.note_visit(stepping)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after the step of any optimizer."""
        stepped = self._side(optimizer)
        if stepped is not None:
            stepped.note_step()

    def forget_steps(self) -> None:
        """Steps were made without a call: what they left in gradients is unknown."""
        for side in self._sides:
            side.stepped = None

    def _side(self, optimizer: torch.optim.Optimizer) -> _Side | None:
        """Returns the side of an optimizer; None if there are too many, or if it trains nothing."""
        known = next((side for side in self._sides if side.optimizer() is optimizer), None)
        if known is not None:
            return known
        self._sides = [side for side in self._sides if side.parameter() is not None and side.optimizer() is not None]
        parameter = _first_trained(optimizer)
        if parameter is None or len(self._sides) == MOST_SIDES:
            return None
        self._sides.append(_Side(optimizer, parameter))
        return self._sides[-1]


class _Side:
    """One optimizer. The gradient of its first parameter shows which passes reach its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        self.number = id(optimizer)
        self.optimizer = weakref.ref(optimizer)
        self.parameter = weakref.ref(parameter)
        self.thread = threading.get_ident()
        self.pair: frozenset[int] = frozenset()
        """The two optimizers of its last turn."""
        self._steps = self._turns = self._last_turn = 0
        self.stepped: tuple[weakref.ref[Tensor], int] | None = None
        """The gradient of its last step and its version, if known."""
        self._visitor: _Side | None = None
        self._visited: weakref.ref[Tensor] | None = None

    def note_visit(self, visitor: _Side) -> None:
        """Another side is about to step: note whether its pass reached this side or found it frozen."""
        parameter = self.parameter()
        if parameter is None or self.stepped is None:
            return
        grad = parameter.grad
        if not parameter.requires_grad:
            self._visitor, self._visited = visitor, None
        elif grad is not None and (self.stepped[0]() is not grad or self.stepped[1] != grad._version):
            self._visitor, self._visited = visitor, weakref.ref(grad)

    def take_turn(self) -> tuple[_Side | None, bool]:
        """It is about to step. Returns whose pass reached it since its last step, and whether that gradient is gone."""
        self._steps += 1
        parameter = self.parameter()
        grad = None if parameter is None else parameter.grad
        kept = self._visited() if self._visited is not None else None
        visitor, self._visitor, self._visited = self._visitor, None, None
        return (visitor, kept is not grad) if grad is not None else (None, False)

    def note_turn(self, pair: frozenset[int]) -> None:
        """It takes its turn after another side."""
        self._turns = self._turns + 1 if self._steps - self._last_turn <= LONG else 1
        self._last_turn, self.pair = self._steps, pair

    @property
    def plays(self) -> bool:
        """Whether it took several turns recently."""
        return self._turns >= TURNS and self._steps - self._last_turn <= LONG

    def note_step(self) -> None:
        """It stepped with its current gradients."""
        parameter = self.parameter()
        if parameter is not None and parameter.grad is not None:
            self.stepped = (weakref.ref(parameter.grad), parameter.grad._version)


def _first_trained(optimizer: torch.optim.Optimizer) -> Tensor | None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter for parameter in parameters if parameter.requires_grad), None)


class _Steps:
    """Calls followers at every step of every optimizer in the process, while there are any.

    Torch's hooks must not be added or removed while an optimizer iterates over them, so whoever starts or stops
    watching inside a step calls `hold` before and `release` after it.
    """

    def __init__(self) -> None:
        self.following: weakref.WeakSet[AlternatingOptimizers] = weakref.WeakSet()
        self._holders = 0
        self._inside = 0
        """Steps in progress: more than one if an optimizer steps another one."""
        self._handles: list[Any] = []
        self._alone: weakref.ref[torch.optim.Optimizer] | None = None
        """The only optimizer that stepped so far; None if there are others, or none yet."""
        self._has_others = self._was_silent = False

    def hold(self) -> None:
        """Install the hooks."""
        if self._holders == 0:
            self._inside, self._has_others = 0, False  # after an error in a step, its end was not seen
        self._holders += 1
        self._alone, self._was_silent = None, False  # the new follower does not know it yet
        if not self._handles:
            self._handles = [
                optim.register_optimizer_step_pre_hook(self._before),
                optim.register_optimizer_step_post_hook(self._after),
            ]

    def release(self) -> None:
        """Remove the hooks with the last follower, unless a step is in progress."""
        self._holders -= 1
        if self._holders == 0 and not self._inside:
            while self._handles:
                self._handles.pop().remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside += 1
            if self._alone is not None and self._alone() is optimizer:
                self._was_silent = True
                return  # a single optimizer does not alternate
            if self._alone is not None:
                self._alone, self._has_others = None, True
                for turns in list(self.following) if self._was_silent else ():
                    turns.forget_steps()
            self._tell(AlternatingOptimizers.before_step, optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside = max(0, self._inside - 1)
            if self._alone is None:
                self._tell(AlternatingOptimizers.after_step, optimizer)
                if not self._has_others:
                    self._alone = weakref.ref(optimizer)

    def _tell(
        self, method: Callable[[AlternatingOptimizers, torch.optim.Optimizer], None], optimizer: torch.optim.Optimizer
    ) -> None:
        for turns in list(self.following):
            with contextlib.suppress(Exception):  # internal errors must not reach the training loop
                method(turns, optimizer)


STEPS = _Steps()
