"""Follows a script's training: finds its models when it begins to train them, and gives each a Monitor."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from gradvitals.collect import hooks as torch_hooks
from gradvitals.collect.recorder import StepRecorder
from gradvitals.config import Config
from gradvitals.distributed.topology import MissingRanksError
from gradvitals.integrations.backward import Ear
from gradvitals.integrations.sharded import sharded_modules, show_shards
from gradvitals.integrations.zero_code.discovery import Found, distinct_name, find, parameters_of
from gradvitals.integrations.zero_code.settings import Settings
from gradvitals.integrations.zero_code.watched import Watched
from gradvitals.monitor import Monitor
from gradvitals.worker.worker import print_line

MAX_RUNS = 8
"""Models that are watched in one process, at the same time or one after the other."""
RANKS_SECONDS = 5.0
"""How long to wait for ranks that no launcher started together with this one: most likely nothing watches them."""
IDLE_BACKWARDS = 200
"""A model that this many backward passes have not reached is let go, so that it does not fill the memory."""


class Watcher:
    """Told by `hooks` what the script does. Nothing of it may raise; `hooks` sees to that."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.watched: list[Watched] = []
        self.runs: dict[Path, str] = {}
        """Runs that have ended, with the name of their model."""
        self.said_elsewhere = False
        """Whether a run has ended of which another rank says how."""
        self.ear = Ear()
        """What was heard before a model had a Monitor that hears it itself."""
        self._num_begun = 0
        self._names: set[str] = set()
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        self._homes: weakref.WeakKeyDictionary[torch.optim.Optimizer, threading.Thread] = weakref.WeakKeyDictionary()
        """The thread in which each was made."""
        self._left: list[weakref.ref[torch.optim.Optimizer]] = []
        """Optimizers that are not watched: superseded, or too many."""
        self._idle: list[tuple[weakref.ref[torch.optim.Optimizer], Path]] = []
        """Optimizers whose model was let go, and the run to continue if they step again."""
        self._looked = False
        self._losses: weakref.WeakKeyDictionary[threading.Thread, deque[Tensor]] = weakref.WeakKeyDictionary()
        """Of every thread that has gone backward, those since the last step, for a model that is found in it."""
        self._finding = threading.RLock()
        self.speaks = int(os.environ.get("RANK", "0")) == 0
        self.explained = False
        """Whether a line was printed that says why a model is not watched."""
        self._launched = "WORLD_SIZE" in os.environ and "RANK" in os.environ
        """Whether a launcher such as torchrun started this process, and so started the other ranks the same way."""
        self.watches_itself = False
        """Whether the script has a Monitor of its own making."""

    @property
    def is_explained(self) -> bool:
        """Whether it is known, or printed elsewhere, why this process has no run to judge."""
        return self.explained or self.watches_itself or self.said_elsewhere

    # -- what the script does -----------------------------------------------------------------------------------

    def on_made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""
        self._made = [*(made for made in self._made if made() is not None), weakref.ref(optimizer)]
        self._homes[optimizer] = threading.current_thread()

    def before_backward(self) -> None:
        """The first backward pass shows that training begins: models and optimizers are there by now."""
        if not self._looked:
            with self._finding:
                self._begin_all()
        here = self._watched_here()
        for watched in here:
            watched.before_backward(alone=len(here) == 1)

    def _begin_all(self) -> None:
        if self._looked:
            return  # by another thread, meanwhile
        self._looked = True
        for found in self._look():
            if not found.is_ambiguous and not sharded_modules(found.model):  # else when an optimizer steps
                self._begin(found)

    def after_backward(self, loss: Tensor | None) -> None:
        """A backward pass is over."""
        losses = self._losses.setdefault(threading.current_thread(), deque(maxlen=64))
        if loss is not None:
            losses.append(loss)
        here = self._watched_here()
        for watched in list(self.watched):
            if watched in here and watched.after_backward(loss, alone=len(here) == 1):
                watched.idle = 0
            elif watched in here or not watched.thread.is_alive():
                watched.idle += 1
            if watched.idle > IDLE_BACKWARDS:
                self._let_go(watched)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, by itself and not inside another one's step."""
        trains = self._gone_backward()
        with self._finding:
            watched = self._watched_by(optimizer)
            if watched is None:
                watched = self._meet(optimizer, trains)
            elif watched.thread is not trains:
                watched.move(trains, self._losses.get(trains, ()))
        if watched is not None:
            watched.before_step()
        if trains in self._losses:
            self._losses[trains].clear()
        self.ear.clipped = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        watched = self._watched_by(optimizer)
        if watched is not None:
            watched.after_step()

    def close(self, error: BaseException | None) -> None:
        """The script is over."""
        for watched in self.watched:
            self._end(watched, error)

    def _gone_backward(self) -> threading.Thread:
        """The thread whose gradients this one steps with: itself, unless it never goes backward, and only one other."""
        here, others = threading.current_thread(), list(self._losses)
        return others[0] if here not in others and len(others) == 1 else here

    def _watched_here(self) -> list[Watched]:
        """Those that this thread trains."""
        return [watched for watched in self.watched if watched.thread is threading.current_thread()]

    # -- finding ------------------------------------------------------------------------------------------------

    def _watched_by(self, optimizer: torch.optim.Optimizer) -> Watched | None:
        return next((one for one in self.watched if any(own is optimizer for own in one.found.optimizers)), None)

    def _meet(self, optimizer: torch.optim.Optimizer, trains: threading.Thread) -> Watched | None:
        """An optimizer steps that is not watched: it is new, or it was not clear whether it would."""
        if any(left() is optimizer for left in self._left):
            return None
        self._looked = True
        found = None
        if not self._has_own_monitor(optimizer):
            found = next((one for one in self._look(optimizer) if optimizer in one.optimizers), None)
        if found is None or (self.watched and not found.has_modules):
            self._left.append(weakref.ref(optimizer))
            return None
        found = found.stepped_by(optimizer)
        resume = next((path for idle, path in self._idle if idle() is optimizer), None)
        stepped = set(map(id, parameters_of(optimizer)))
        for before in list(self.watched):
            if not stepped.isdisjoint(map(id, before.parameters)):  # it takes over from other optimizers
                resume = before.run_path if before.monitor.step else None
                self._left += [weakref.ref(old) for old in before.found.optimizers if old not in found.optimizers]
                self._let_go(before)
        return self._begin(found, resume, trains)

    def _look(self, stepping: torch.optim.Optimizer | None = None) -> list[Found]:
        made = [one for made in self._made if (one := made()) is not None]
        if stepping is not None and stepping not in made:
            made.append(stepping)  # it was copied, or loaded from a file
        free = [one for one in made if one is stepping or not self._is_taken(one)]
        found = find([one for one in free if any(True for _ in parameters_of(one))])
        owned = [one for one in found if one.has_modules]
        return owned or found  # tensors beside a model, such as a temperature, get no run of their own

    def _is_taken(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._watched_by(optimizer) is not None or any(left() is optimizer for left in self._left):
            return True
        return self._has_own_monitor(optimizer)

    def _has_own_monitor(self, optimizer: torch.optim.Optimizer) -> bool:
        hooks = optimizer._optimizer_step_pre_hooks.values()
        watched = any(getattr(hook, "__module__", None) == StepRecorder.__module__ for hook in hooks)
        self.watches_itself |= watched
        return watched

    # -- watching -----------------------------------------------------------------------------------------------

    def _begin(
        self, found: Found, resume: Path | None = None, thread: threading.Thread | None = None
    ) -> Watched | None:
        """Watch a model; None where it cannot be, which is said."""
        if _has_others():
            self.speaks = dist.get_rank() == 0
        if resume is None and self._num_begun >= MAX_RUNS:
            self._say(f"{MAX_RUNS} models have been watched already; {found.name} is not")
        elif self.speaks or _has_others():  # of processes that do not know each other, one is watched
            patience = threading.Timer(RANKS_SECONDS, self._say, [f"{found.name}: waiting for the other ranks"])
            patience.daemon = True
            try:
                if _has_others() and self._launched:
                    patience.start()  # never a silent wait
                if resume is None:
                    variables = dict(vars(sys.modules["__main__"]))
                    found = replace(found, name=distinct_name(found, self._names, variables))
                home = thread or self._homes.get(found.optimizers[0], threading.current_thread())
                watched = Watched(found, self._watch, resume, home, None if resume else self._say)
                watched.catch_up(self._losses.get(home, ()), self.ear)
            except Exception as error:
                self._explain(found, error)
            else:
                self.watched.append(watched)
                self._num_begun += resume is None
                self._names.add(found.name)
                return watched
            finally:
                patience.cancel()
        self._left += map(weakref.ref, found.optimizers)
        return None

    def _watch(self, found: Found, resume: Path | None) -> Monitor:
        settings = self.settings
        path = settings.run if self._num_begun == 0 else settings.run.with_name(f"{settings.run.name}-{found.name}")
        config = Config(
            tensor_every=settings.every,
            quiet=settings.quiet,
            rank_timeout=Config.rank_timeout if self._launched else RANKS_SECONDS,
            extra={"program": settings.program, "model": found.name},
        )
        show_shards(found.model)
        torch_hooks.detach(self.ear)  # so that it looks anew for what there is to listen to
        try:
            return Monitor(  # not watch(): what there is to say at the end is said of all models together
                found.model,
                found.optimizers,
                run=resume or path,
                resume=resume is not None,
                config=config,
                sinks=settings.sinks if self._num_begun == 0 else (),
                alerts=settings.alerts,
            )
        finally:
            torch_hooks.attach(self.ear)

    def _let_go(self, watched: Watched) -> None:
        with self._finding:
            if watched not in self.watched:
                return  # another thread has
            self.watched.remove(watched)
        self._end(watched, None)
        if watched.monitor.step:
            self._idle += [(weakref.ref(optimizer), watched.run_path) for optimizer in watched.found.optimizers]

    def _end(self, watched: Watched, error: BaseException | None) -> None:
        watched.close(error)
        if watched.monitor.step:
            if watched.monitor.speaks:
                self.runs.setdefault(watched.run_path, watched.found.name)
            else:
                self.said_elsewhere = True

    def _explain(self, found: Found, error: Exception) -> None:
        self.explained = True
        if isinstance(error, MissingRanksError) and not self._launched:
            self._say(
                f"{found.name} is not watched: the script itself started {dist.get_world_size()} ranks. To watch them, "
                "start them with torchrun --nproc_per_node=N -m gradvitals run SCRIPT"
            )
        else:
            self._say(f"{found.name} is not watched: {error}")

    def _say(self, line: str) -> None:
        print_line(line, self.settings.quiet or not self.speaks)


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
