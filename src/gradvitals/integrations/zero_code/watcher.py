"""Follows a script's training: finds its models when training starts, and gives each a Monitor."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim

from gradvitals import notices
from gradvitals.collect import hooks as torch_hooks
from gradvitals.collect.backward import STEPS, is_distributed
from gradvitals.collect.recorder import StepRecorder
from gradvitals.config import Config
from gradvitals.integrations.backward import (
    BackwardPasses,
    TorchEvents,
    divisor_of,
    sharded_modules,
    show_shards,
)
from gradvitals.integrations.zero_code.by_hand import OwnUpdates, UpdateFinder, optimizer_name
from gradvitals.integrations.zero_code.discovery import (
    Found,
    SampleCount,
    distinct_name,
    find,
    parameters_of,
    script_variables,
)
from gradvitals.integrations.zero_code.program import Settings
from gradvitals.monitor import Monitor
from gradvitals.places import relative
from gradvitals.worker.worker import print_line

MAX_RUNS = 8
"""The most models to watch in one process, at the same time or one after the other."""
RANKS_SECONDS = 5.0
"""Time to wait for the other ranks of a launcher before printing that they are missing."""
LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK",), ("PMI_RANK",))
"""Environment variables that a launcher gives to each rank. It starts all of them the same way: with gradvitals."""
IDLE_BACKWARDS = 200
"""Stop watching a model after this many backward passes that did not reach it, so that it does not fill the memory."""
REMADE, FEW_STEPS = 3, 2
"""So many optimizers in a row that made so few steps with the same weights show that a script makes one per step."""
RIVAL_STEPS = 20
"""Steps of an optimizer after another one took its weights over, from which the two step them in turn."""
ANNOUNCE_SECONDS = 5.0
"""Time to wait for the batch size before printing what is watched."""


class Watched:
    """One model of the script with its Monitor: which backward passes are its own, and what its loss is.

    Args:
        found: The model and its optimizers.
        watch: Makes the Monitor; gets the folder of the run to continue, or None.
        resume: That folder, if this model was watched before, perhaps with other optimizers.
        thread: The thread that is assumed to train it until another one does.
        announce: Prints a line; None prints nothing.
    """

    def __init__(
        self,
        found: Found,
        watch: Callable[[Found, Path | None], Monitor],
        resume: Path | None,
        thread: threading.Thread,
        announce: Callable[[str], None] | None,
    ) -> None:
        self.found = found
        self.monitor = watch(found, resume)
        self.monitor.recorder.add_up_losses()
        self.first_step = self.monitor.step
        self.remade = 0
        """Optimizers before this one that made hardly a step with the same weights."""
        self.parameters = list(self.monitor.recorder.table.parameters)
        self.thread = thread
        """The thread that trains it. No other may read its gradients: backward writes them without holding the GIL."""
        self.idle = 0
        """Backward passes of its thread since the last one that reached it; of all threads once its own has ended."""
        self._announce = announce
        self._announce_by = time.monotonic() + ANNOUNCE_SECONDS
        self._samples = SampleCount(found.model, self._on_samples)
        self._late = _reduces_by_hand(found.model, self.parameters)
        self._losses: list[Tensor] = []
        self._before: list[Any] = []
        self._passes = 0
        """Backward passes since the last step."""
        self._micro_batches: int | None = None
        """Backward passes of a step whose losses the script divides by their number."""
        self._divisor: int | None = None
        self._summed = 1
        """Backward passes of the last step whose losses were not divided by their number."""
        self._samples_per_pass: float | None = None
        self._step_passes: int | None = None
        """Backward passes since the optimizer's step has begun: those of a closure. None outside a step."""

    @property
    def run_path(self) -> Path:
        """The folder of its run."""
        return self.monitor.run_path

    @property
    def is_settled(self) -> bool:
        """Whether everything about it is known, so that a step brings nothing but its losses."""
        return self.own_updates is None and self._announce is None and not self._samples.is_counting and not self._late

    @property
    def own_updates(self) -> OwnUpdates | None:
        """The stand-in for the optimizer of a script that updates its weights without one."""
        first = self.found.optimizers[0]
        return first if isinstance(first, OwnUpdates) else None

    def note_divisor(self, tensors: Any) -> None:
        """Note by what the script divides its loss; a step may have fewer backward passes than that."""
        if self._micro_batches is None or (self._micro_batches > 1 and not self._passes):
            self._divisor = divisor_of(tensors)

    def before_backward(self, tensors: Any, *, alone: bool) -> None:
        """A backward pass starts. If there are other models, it may be theirs."""
        self._samples.in_backward = True
        self.note_divisor(tensors)
        self.monitor.recorder.check_loss(tensors)
        self._before = [] if alone else _versions(self.parameters)

    def after_backward(self, loss: Tensor | None, *, alone: bool) -> bool:
        """A backward pass is over. Returns whether it was this model's."""
        self._samples.in_backward = False
        if not alone and _versions(self.parameters) == self._before:
            return False
        if not self._late and self.monitor.recorder.observes == 0:
            self._samples.forget()  # no step used the passes so far, such as those of a generator through this model
            self._passes = 0
        self._samples.after_backward(counts=not self._step_passes)  # a closure may be evaluated again
        if self._late:
            self._losses += [loss] if loss is not None else []
        else:
            self.observe(loss)
        return True

    def observe(self, loss: Tensor | None) -> None:
        """A backward pass of the step had this loss."""
        self.monitor.observe(loss)
        if self._step_passes is None:
            self._passes += 1
            return
        self._step_passes += 1
        if self._step_passes == 1:  # of a closure that is evaluated often, the first time counts
            self._passes += 1
            self.complete()

    def before_step(self, *, has_closure: bool = False) -> None:
        """One of its optimizers is about to step."""
        self.idle = 0
        for loss in self._losses:
            self.observe(loss)
        self._losses = []
        if has_closure:
            self._step_passes = 0
        else:
            self.complete()

    def complete(self) -> None:
        """All losses of the step are here: make up for those of an incomplete accumulation."""
        passes, divisor = self._passes, self._divisor
        if not passes:
            return  # another optimizer of the model has stepped with the same gradients
        self._passes, self._summed = 0, 1 if passes == divisor else passes
        factor, recorder = 1.0, self.monitor.recorder
        if passes == divisor or self._micro_batches is None:
            self._micro_batches = passes if passes == divisor else 1 if passes == 1 else None
        elif divisor == self._micro_batches and passes < divisor:
            factor = divisor / passes
        samples = None if self._samples_per_pass is None else self._samples_per_pass * passes
        if factor != 1 or (samples is not None and samples != recorder.batch_size):
            recorder.correct_observed(factor, samples)

    def move(self, thread: threading.Thread, losses: Sequence[Tensor]) -> None:
        """A step showed that another thread trains it, whose backward passes since the last step had these losses."""
        self.thread = thread
        for loss in losses:
            self.observe(loss)

    def after_step(self) -> None:
        """One of its optimizers has stepped."""
        self._step_passes = None
        if self._announce is None and not self._samples.is_counting:
            return
        self._samples.after_step()
        if not self._samples.is_counting or time.monotonic() > self._announce_by:
            self._print_start()

    def end_own_step(self) -> None:
        """See whether the script has updated the weights itself since the last backward pass."""
        updates = self.own_updates
        if updates is None or not updates.made_step():
            return
        self.before_step()
        updates.end_step()
        if updates.has_new_gradients:
            for state in self.monitor.recorder.optimizers:
                state.backward.note_zeroed()
        self.after_step()

    def catch_up(self, losses: Sequence[Tensor], seen: TorchEvents) -> None:
        """Record what happened in the first step before the model was found."""
        recorder = self.monitor.recorder
        recorder.assumed_scaler = seen.scaler
        devices = {parameter.device.type for parameter in self.parameters}
        recorder.autocast = next((kind for device, kind in seen.autocast.items() if device in devices), None)
        if seen.clipped:
            for state in recorder.optimizers:
                state.clipped = state.step.clipped = True
        for loss in losses:
            self.observe(loss)

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching."""
        self._samples.stop()
        self.end_own_step()
        if self.monitor.step:
            self._print_start()
        self.monitor.close(error)

    def _print_start(self) -> None:
        """Print once what is watched. The line waits a few steps for the batch size."""
        if self._announce is None:
            return
        announce, self._announce = self._announce, None
        optimizers = " and ".join(dict.fromkeys(map(optimizer_name, self.found.optimizers)))
        samples = self.monitor.recorder.batch_size
        batch = "" if samples is None else f", {samples:g} samples per step"
        summed = f", its loss the sum of {self._summed} backward passes" if self._summed > 1 else ""
        where = relative(self.run_path)
        announce(f"watching {self.found.name} with {optimizers}{batch}{summed}; the run is in {where}")

    def _on_samples(self, samples: float, per_pass: float | None) -> None:
        self.monitor.recorder.batch_size, self._samples_per_pass = samples, per_pass


def _versions(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """Returns the identity of every gradient and how often it was written to."""
    return [(id(grad), grad._version) if (grad := parameter.grad) is not None else None for parameter in parameters]


def _reduces_by_hand(model: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the script reduces gradients itself: after a backward pass they are still those of this rank."""
    if not is_distributed() or any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return False
    return not any(hasattr(parameter, "placements") for parameter in parameters)  # DTensors reduce in backward


class Watcher:
    """Finds and follows the models of a script. `Hooks` calls it and catches what it raises."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.watched: list[Watched] = []
        self.runs: dict[Path, str] = {}
        """Folders of runs that have ended, with the name of their model."""
        self.reported_elsewhere = False
        """Whether a run has ended whose verdict another rank prints."""
        self.events = TorchEvents()
        """Events of torch's hooks from before a model had its own Monitor."""
        self.made: dict[str, None] = {}
        """The classes of the optimizers that the script has made."""
        self._num_started = 0
        self._names: set[str] = set()
        self._makers: weakref.WeakKeyDictionary[torch.optim.Optimizer, threading.Thread] = weakref.WeakKeyDictionary()
        """The thread that made each optimizer."""
        self._ignored: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that are not watched: replaced by others, or too many."""
        self._remade: set[int] = set()
        """The ids of parameters that get a new optimizer at every step."""
        self._rivals: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of optimizers that were replaced by others with the same weights, and step all the same."""
        self._idle: weakref.WeakKeyDictionary[torch.optim.Optimizer, Path] = weakref.WeakKeyDictionary()
        """Optimizers of models that are watched no more, and the run to continue if they step again."""
        self._updates: UpdateFinder | None = UpdateFinder()
        """Looks for weights that the script updates itself, until an optimizer of torch's steps."""
        self._looked = False
        self._only: Watched | None = None
        """The one model of the script, once it is clear that there are no others: nothing to search in each step."""
        self._only_thread = 0
        self._losses: dict[threading.Thread, deque[Tensor]] = {}
        """The losses of each thread since its last step, for a model that is found during the step."""
        self._finding = threading.RLock()
        self.prints = int(os.environ.get("RANK", "0")) == 0
        self.explained = False
        """Whether a line was printed about why a model is not watched."""
        self._launched = any(all(name in os.environ for name in names) for names in LAUNCHERS)
        """Whether a launcher such as torchrun started this process, and so started the other ranks the same way."""
        self.watches_itself = False
        """Whether the script made a Monitor itself."""
        self.num_backwards = 0
        """Backward passes so far, until the script is known to train one model."""

    @property
    def is_explained(self) -> bool:
        """Whether the user knows why this process has no run to judge."""
        return self.explained or self.watches_itself or self.reported_elsewhere

    # -- what the script does -----------------------------------------------------------------------------------

    def on_made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""
        self._only = None
        with self._finding:
            self._makers[optimizer] = threading.current_thread()
        if not isinstance(optimizer, OwnUpdates):
            self.made[type(optimizer).__name__] = None

    def before_backward(self, tensors: Any) -> None:
        """A backward pass starts. The first one shows that training starts: models and optimizers exist by now."""
        only = self._only
        if only is not None and threading.get_ident() == self._only_thread:
            only.note_divisor(tensors)
            only.monitor.recorder.check_loss(tensors)
            return
        if not self._looked:
            with self._finding:
                self._start_all()
        if self._updates is not None:
            self._find_updates(self._updates)
        here = self._watched_here()
        for watched in here:
            watched.end_own_step()
            watched.before_backward(tensors, alone=len(here) == 1)

    def _find_updates(self, updates: UpdateFinder) -> None:
        """Watch what the script updates itself, if it has no optimizer of torch's."""
        found = None
        if self.watched or updates.has_given_up or any(map(_has_parameters, self._alive())):
            self._updates = None
        else:
            found = updates.before_backward()
        if found is not None:
            self._updates = None
            self._losses_here(None)
            self._losses[threading.current_thread()].clear()
            self.events.clipped = False
            self._start(found)

    def _start_all(self) -> None:
        if self._looked:
            return  # another thread did it meanwhile
        self._looked = True
        for found in self._look():
            if not found.is_ambiguous and not sharded_modules(found.model):  # the others wait for an optimizer step
                self._start(found)

    def after_backward(self, loss: Tensor | None) -> None:
        """A backward pass is over."""
        only = self._only
        if only is not None and threading.get_ident() == self._only_thread:
            only.observe(loss)
            return
        self.num_backwards += 1
        if self._updates is not None:
            self._updates.after_backward()
        self._losses_here(loss)
        here = self._watched_here()
        for watched in list(self.watched):
            if watched in here and watched.after_backward(loss, alone=len(here) == 1):
                watched.idle = 0
                if watched.own_updates is not None:
                    watched.own_updates.after_backward()
            elif watched in here or not watched.thread.is_alive():
                watched.idle += 1
            if watched.idle > IDLE_BACKWARDS:
                self._stop_watching(watched)

    def _losses_here(self, loss: Tensor | None) -> None:
        """Keep a loss of this thread for a model that is found when an optimizer steps."""
        here = threading.current_thread()
        if here not in self._losses:
            with self._finding:  # replaced, not changed: other threads may go through it
                alive = {thread: losses for thread, losses in self._losses.items() if thread.is_alive()}
                self._losses = {**alive, here: deque(maxlen=64)}
        if loss is not None:
            self._losses[here].append(loss)

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step, not inside another one's step."""
        only = self._only
        is_usual = only is not None and not has_closure and threading.get_ident() == self._only_thread
        if only is not None and is_usual and optimizer in only.found.optimizers:
            only.complete()
            return
        self._only = self._updates = None
        trains = self._training_thread()
        with self._finding:
            watched = self._watched_by(optimizer)
            if watched is None:
                watched = self._meet(optimizer, trains)
            elif watched.thread is not trains:
                watched.move(trains, self._losses.get(trains, ()))
        if watched is not None:
            watched.before_step(has_closure=has_closure)
        if trains in self._losses:
            self._losses[trains].clear()
        self.events.clipped = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        if self._only is not None:
            return
        watched = self._watched_by(optimizer)
        if watched is None:
            return
        watched.after_step()
        is_only = self.watched == [watched] and watched.is_settled
        if is_only and watched.thread is threading.current_thread() and all(map(self._is_taken, self._alive())):
            self._only, self._only_thread = watched, threading.get_ident()

    def close(self, error: BaseException | None) -> None:
        """The script is over."""
        for watched in self.watched:
            self._end(watched, error)

    def _training_thread(self) -> threading.Thread:
        """The thread that made the gradients of this step: this one, unless only one other thread runs backward."""
        here, others = threading.current_thread(), list(self._losses)
        return others[0] if here not in others and len(others) == 1 else here

    def _watched_here(self) -> list[Watched]:
        """The models that this thread trains."""
        return [watched for watched in self.watched if watched.thread is threading.current_thread()]

    # -- finding ------------------------------------------------------------------------------------------------

    def _watched_by(self, optimizer: torch.optim.Optimizer) -> Watched | None:
        return next((one for one in self.watched if any(own is optimizer for own in one.found.optimizers)), None)

    def _meet(self, optimizer: torch.optim.Optimizer, trains: threading.Thread) -> Watched | None:
        """Watch the model of an optimizer that steps for the first time."""
        if optimizer in self._rivals:
            self._note_rival(optimizer)
        if optimizer in self._ignored or not self._remade.isdisjoint(map(id, parameters_of(optimizer))):
            return None
        self._looked = True
        found = None
        if not self._has_own_monitor(optimizer):
            found = next((one for one in self._look(optimizer) if optimizer in one.optimizers), None)
        if found is None or (self.watched and not found.has_modules):
            self._ignored.add(optimizer)
            return None
        found = found.stepped_by(optimizer)
        resume = self._idle.get(optimizer)
        stepped = set(map(id, parameters_of(optimizer)))
        watched = {id(parameter) for one in self.watched for parameter in one.parameters}
        if watched.isdisjoint(stepped) and not watched.isdisjoint(map(id, found.model.parameters())):
            found = found.narrowed()  # other parts of the model are trained by others
        remade = 0
        for before in list(self.watched):
            if not stepped.isdisjoint(map(id, before.parameters)):  # this one replaces other optimizers
                resume = before.run_path if before.monitor.step else None
                replaced = [old for old in before.found.optimizers if old not in found.optimizers]
                self._ignored.update(replaced)
                self._rivals.update(dict.fromkeys(replaced, 0))
                remade = before.remade + 1 if before.monitor.step - before.first_step <= FEW_STEPS else 0
                if remade == REMADE:
                    self._remade |= stepped
                    before.monitor.report(notices.optimizer_remade(optimizer_name(optimizer), before.monitor.step))
                self._stop_watching(before)
        if remade == REMADE:
            return None
        started = self._start(found, resume, trains)
        if started is not None:
            started.remade = remade
        return started

    def _note_rival(self, optimizer: torch.optim.Optimizer) -> None:
        """Report an optimizer that steps what another one steps too, if one has all that the other has."""
        self._rivals[optimizer] += 1
        own = set(map(id, parameters_of(optimizer)))
        for watched in self.watched:
            others = {id(p) for one in watched.found.optimizers for p in parameters_of(one)}
            in_turn = watched.monitor.step - watched.first_step >= RIVAL_STEPS // 2
            if self._rivals[optimizer] == RIVAL_STEPS and in_turn and (own < others or others < own):
                names = [optimizer_name(optimizer), optimizer_name(watched.found.optimizers[0])]
                kind, other = names if others < own else names[::-1]
                shared = len(own & others)
                watched.monitor.report(notices.optimizers_overlap(kind, other, shared, watched.monitor.step))

    def _look(self, stepping: torch.optim.Optimizer | None = None) -> list[Found]:
        made = self._alive()
        if stepping is not None and stepping not in made:
            made.append(stepping)  # it was copied or unpickled
        free = [one for one in made if one is stepping or not self._is_taken(one)]
        found = find([one for one in free if _has_parameters(one)])
        owned = [one for one in found if one.has_modules]
        return owned or found  # tensors beside a model, such as a temperature, get no run of their own

    def _alive(self) -> list[torch.optim.Optimizer]:
        with self._finding:
            return list(self._makers)

    def _is_taken(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._watched_by(optimizer) is not None or optimizer in self._ignored:
            return True
        return self._has_own_monitor(optimizer)

    def _has_own_monitor(self, optimizer: torch.optim.Optimizer) -> bool:
        hooks = optimizer._optimizer_step_pre_hooks.values()
        watched = any(getattr(hook, "__module__", None) == StepRecorder.__module__ for hook in hooks)
        self.watches_itself |= watched
        return watched

    # -- watching -----------------------------------------------------------------------------------------------

    def _start(
        self, found: Found, resume: Path | None = None, thread: threading.Thread | None = None
    ) -> Watched | None:
        """Watch a model. Returns None, and prints why, if that is not possible."""
        if is_distributed():
            self.prints = dist.get_rank() == 0
        too_many = resume is None and self._num_started >= MAX_RUNS
        if resume is None and not too_many:
            found = replace(found, name=distinct_name(found, self._names, script_variables()))
        if too_many:
            self._print(f"{MAX_RUNS} models have been watched already; {found.name} is not")
        elif is_distributed() and not self._launched:
            self.explained = True
            self._print(
                f"{found.name} is not watched: the script itself started {dist.get_world_size()} ranks. To watch them, "
                "start them with torchrun --nproc_per_node=N -m gradvitals run SCRIPT"
            )
        elif self.prints or is_distributed():  # of processes without a group, only the first is watched
            patience = threading.Timer(RANKS_SECONDS, self._print, [f"{found.name}: waiting for the other ranks"])
            patience.daemon = True
            try:
                if is_distributed():
                    patience.start()  # so that a long wait is not silent
                home = thread or self._makers.get(found.optimizers[0], threading.current_thread())
                watched = Watched(found, self._watch, resume, home, None if resume else self._print)
                watched.catch_up(self._losses.get(home, ()), self.events)
            except Exception as error:
                self.explained = True
                self._print(f"{found.name} is not watched: {error}")
            else:
                self.watched.append(watched)
                self._num_started += resume is None
                self._names.add(found.name)
                return watched
            finally:
                patience.cancel()
        self._ignored.update(found.optimizers)
        return None

    def _watch(self, found: Found, resume: Path | None) -> Monitor:
        settings = self.settings
        place = f"{settings.run.name}-{found.name.replace(' ', '-')}"
        path = settings.run if self._num_started == 0 else settings.run.with_name(place)
        config = Config(
            tensor_every=settings.every,
            quiet=settings.quiet,
            extra={"program": settings.program, "model": found.name},
        )
        show_shards(found.model)
        torch_hooks.detach(self.events)  # attached again below, after the hooks of the Monitor
        try:
            return Monitor(  # not watch(), which would print a verdict per model
                found.model,
                found.optimizers,
                run=resume or path,
                resume=resume is not None,
                config=config,
                sinks=settings.sinks if self._num_started == 0 else (),
                alerts=settings.alerts,
            )
        finally:
            torch_hooks.attach(self.events)

    def _stop_watching(self, watched: Watched) -> None:
        with self._finding:
            if watched not in self.watched:
                return  # another thread did it
            self.watched.remove(watched)
            self._only = None
        self._end(watched, None)
        if watched.monitor.step:
            self._idle.update(dict.fromkeys(watched.found.optimizers, watched.run_path))

    def _end(self, watched: Watched, error: BaseException | None) -> None:
        watched.close(error)
        if watched.monitor.step:
            if watched.monitor.speaks:
                self.runs.setdefault(watched.run_path, watched.found.name)
            else:
                self.reported_elsewhere = True

    def _print(self, line: str) -> None:
        print_line(line, self.settings.quiet or not self.prints)


def _has_parameters(optimizer: torch.optim.Optimizer) -> bool:
    return any(True for _ in parameters_of(optimizer))


class _ThreadState(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.steps: list[torch.optim.Optimizer] = []
        """The optimizers that are stepping now, one inside the other."""


class Hooks:
    """Reports to a Watcher, from `install` to `remove`, which optimizers are made and step, and backward passes.

    What the script calls does and returns what it did before. An error of ours is printed once and ends the watching,
    never the script.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._active = True
        self._undo: list[Callable[[], object]] = []
        self._thread = _ThreadState()
        self._backwards = BackwardPasses(watcher.after_backward, watcher.before_backward, self._fail)
        watcher.events = self._backwards.events

    def install(self) -> None:
        """Start reporting."""
        os.register_at_fork(after_in_child=self._stop)  # a process that the script forks is no part of its training
        original = torch.optim.Optimizer.__init__
        torch.optim.Optimizer.__init__ = self._with_report(original)  # type: ignore[method-assign]
        self._undo = [
            lambda: setattr(torch.optim.Optimizer, "__init__", original),
            optim.register_optimizer_step_pre_hook(self._before_step).remove,
            optim.register_optimizer_step_post_hook(self._after_step).remove,
            self._backwards.stop,
            STEPS.release,
        ]
        STEPS.hold()  # models start and stop being watched while an optimizer steps
        self._backwards.start()

    def remove(self) -> None:
        """Stop, and leave torch as it was."""
        self._stop()
        for watched in self._watcher.watched:
            watched.monitor.recorder.end_inspection()
        while self._undo:
            self._undo.pop()()

    def _stop(self) -> None:
        self._active = False
        self._backwards.pause()

    def _fail(self, error: Exception) -> None:
        self._stop()
        quiet = self._watcher.settings.quiet
        print_line(f"stopped watching after an internal error: {error!r}; the script continues", quiet)

    def _with_report(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._active:
                try:
                    self._watcher.on_made(optimizer)
                except Exception as error:
                    self._fail(error)

        return __init__

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepping = self._thread.steps
        if optimizer in stepping:  # its last step raised an error that the script caught
            stepping.clear()
        if self._active and not stepping:
            try:
                has_closure = (kwargs or len(args) > 1) and torch_hooks.closure_of(args, kwargs) is not None
                self._watcher.before_step(optimizer, has_closure)
            except Exception as error:
                self._fail(error)
        stepping.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepping = self._thread.steps
        while stepping:  # a step inside it that raised an error has no end
            if stepping.pop() is optimizer:
                break
        if self._active and not stepping:
            try:
                self._watcher.after_step(optimizer)
            except Exception as error:
                self._fail(error)
