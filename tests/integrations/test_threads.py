"""Several threads train in one process: none of them looks at the gradients of another.

Backward exchanges `.grad` without Python's lock, so that who looks at it meanwhile ends the process, now and then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.integrations.zero_code import watcher as watcher_module
from gradvitals.integrations.zero_code.watcher import Watcher

looked: set[tuple[str, int]] = set()
"""Whose gradient was looked at, and by which thread."""


class Spied(nn.Parameter):
    """Tells who looks at its gradient."""

    owner = ""

    @property
    def grad(self) -> Tensor | None:
        looked.add((self.owner, threading.get_ident()))
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)


class Training:
    """A model of one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        for module in self.model:
            for key, parameter in list(module.named_parameters()):
                setattr(module, key, Spied(parameter.detach()))
                getattr(module, key).owner = name
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []

    def backward(self) -> None:
        loss = self.model(torch.randn(6, 4)).square().mean()
        loss.backward()
        self.losses.append(loss.item())

    def clip_and_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.only_step()

    def only_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.clip_and_step()


@pytest.fixture
def threads() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Does something in a thread that lives on, and returns which it was."""
    with ThreadPoolExecutor(1) as pool:

        def do(work: Callable[[], None]) -> int:
            looked.clear()
            pool.submit(work).result(60)
            return pool.submit(threading.get_ident).result()

        yield do


Elsewhere = Callable[[Callable[[], None]], int]


def test_the_clip_of_a_model_that_is_not_watched(tmp_path: Path, threads: Elsewhere) -> None:
    ours, theirs = Training("ours"), Training("theirs")
    config = gv.Config(quiet=True)
    with gv.watch(ours.model, ours.optimizer, run=tmp_path / "run", config=config):
        ours.step()
        there = threads(theirs.step)
        assert looked == {("theirs", there)}
        looked.clear()
        nn.utils.clip_grad_norm_(ours.model.parameters(), 0.1)
        assert looked == {("ours", threading.get_ident())}


def test_two_that_are_watched(tmp_path: Path, threads: Elsewhere) -> None:
    ours, theirs = Training("ours"), Training("theirs")
    config = gv.Config(quiet=True)
    with (
        gv.watch(ours.model, ours.optimizer, run=tmp_path / "ours", config=config),
        gv.watch(theirs.model, theirs.optimizer, run=tmp_path / "theirs", config=config),
    ):
        threads(theirs.step)  # shows where it is trained
        for _ in range(3):
            looked.clear()
            ours.step()
            assert looked == {("ours", threading.get_ident())}
            there = threads(theirs.step)
            assert looked == {("theirs", there)}


def test_one_that_does_not_clip(tmp_path: Path, threads: Elsewhere) -> None:
    ours, theirs = Training("ours"), Training("theirs")
    config = gv.Config(quiet=True)
    with (
        gv.watch(ours.model, ours.optimizer, run=tmp_path / "ours", config=config),
        gv.watch(theirs.model, theirs.optimizer, run=tmp_path / "theirs", config=config),
    ):
        for _ in range(3):
            threads(theirs.backward)
            looked.clear()
            ours.step()
            assert looked == {("ours", threading.get_ident())}
            there = threads(theirs.only_step)
            assert looked == {("theirs", there)}


@pytest.mark.parametrize("made_here", [True, False])
def test_two_that_run_as_they_are(zero_code: Callable[..., Watcher], threads: Elsewhere, made_here: bool) -> None:
    watcher = zero_code()
    ours, theirs = Training("ours"), Training("theirs")
    if not made_here:
        made: list[Training] = []
        threads(lambda: made.append(Training("theirs")))
        theirs = made[0]
    for number in range(3):
        looked.clear()
        ours.backward()
        is_known = number > 0 or not made_here  # else it is taken to be trained where it was made
        assert not is_known or looked <= {("ours", threading.get_ident())}
        there = threads(theirs.step)
        assert looked == {("theirs", there)}
        ours.clip_and_step()
    watcher.close(None)
    for training, path in zip((ours, theirs), watcher.runs, strict=True):
        with gv.open_run(path) as run:
            np.testing.assert_allclose(run.series("loss")[1], training.losses, rtol=1e-6)


def losses_of(watcher: Watcher) -> list[list[float]]:
    watcher.close(None)
    found = []
    for path in watcher.runs:
        with gv.open_run(path) as run:
            found.append(run.series("loss")[1].tolist())
    return found


def test_one_thread_goes_backward_and_another_steps(zero_code: Callable[..., Watcher], threads: Elsewhere) -> None:
    watcher = zero_code()
    ours = Training("ours")
    for _ in range(3):
        threads(ours.backward)
        ours.clip_and_step()
    assert losses_of(watcher) == [pytest.approx(ours.losses)]


def test_several_optimizers_in_one_thread_beside_another(zero_code: Callable[..., Watcher], threads: Elsewhere) -> None:
    """The second one steps when the losses of its thread were taken by the first: it is trained there all the same."""
    watcher = zero_code()
    one, two, theirs = Training("one"), Training("two"), Training("theirs")
    for _ in range(3):
        one.backward()
        two.backward()
        threads(theirs.backward)
        one.clip_and_step()
        two.clip_and_step()
        threads(theirs.clip_and_step)
    assert losses_of(watcher) == [pytest.approx(training.losses) for training in (one, two, theirs)]


def test_each_thread_has_a_scaler(zero_code: Callable[..., Watcher], threads: Elsewhere) -> None:
    watcher = zero_code()
    trainings = [Training("ours"), Training("theirs")]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**power) for power in (8, 12)]
    scaled: list[Tensor] = [torch.empty(()), torch.empty(())]

    def scale(who: int) -> None:
        loss = trainings[who].model(torch.randn(6, 4)).square().mean()
        trainings[who].losses.append(loss.item())
        scaled[who] = scalers[who].scale(loss)

    def step(who: int) -> None:
        scaled[who].backward()
        scalers[who].step(trainings[who].optimizer)
        scalers[who].update()
        trainings[who].optimizer.zero_grad()

    for _ in range(3):
        scale(0)
        threads(lambda: scale(1))
        threads(lambda: step(1))
        step(0)
    assert losses_of(watcher) == [pytest.approx(training.losses) for training in trainings]


def test_threads_that_begin_together_get_a_run_each(zero_code: Callable[..., Watcher]) -> None:
    watcher = zero_code()
    together = threading.Barrier(4)

    def train(number: int) -> list[float]:
        training = Training(str(number))
        together.wait()
        for _ in range(20):
            training.step()
        return training.losses

    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(train, range(4)))
    found = losses_of(watcher)
    assert len(found) == 4
    for told in found:
        assert len(told) >= 19  # what is found while it is in its first step may have missed that one's loss
        assert any(told == pytest.approx(losses[own][-len(told) :]) for own in range(4))


def test_a_model_is_idle_by_the_passes_of_its_own_thread(
    zero_code: Callable[..., Watcher], threads: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "IDLE_BACKWARDS", 3)
    watcher = zero_code()
    slow, fast = Training("slow"), Training("fast")
    for _ in range(2):
        slow.step()
        for _ in range(6):
            threads(fast.step)
    assert len(watcher.watched) == 2
    assert losses_of(watcher) == [pytest.approx(slow.losses), pytest.approx(fast.losses)]
