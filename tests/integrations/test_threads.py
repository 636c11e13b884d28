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


@pytest.mark.parametrize("asleep", [False, True])
def test_the_clip_of_a_model_that_is_not_watched(tmp_path: Path, threads: Elsewhere, asleep: bool) -> None:
    ours, theirs = Training("ours"), Training("theirs")
    config = gv.Config(quiet=True)
    with gv.watch(ours.model, ours.optimizer, run=tmp_path / "run", config=config) as monitor:
        ours.step()
        monitor.tap.passing.asleep = asleep
        there = threads(theirs.step)
        assert looked == {("theirs", there)}
        looked.clear()
        nn.utils.clip_grad_norm_(ours.model.parameters(), 0.1)
        assert looked == {("ours", threading.get_ident())}
        monitor.tap.passing.asleep = False


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
