"""A game is told from everything else that has two optimizers: by which passes reach what, and who steps then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals.collect.backward import LONG, AlternatingOptimizers

Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
Models = tuple[nn.Linear, nn.Linear]


@contextmanager
def followed(*optimizers: torch.optim.Optimizer) -> Iterator[AlternatingOptimizers]:
    turns = AlternatingOptimizers(optimizers)
    yield turns
    turns.stop()


def two(chained: bool = True) -> tuple[Models, Optimizers]:
    torch.manual_seed(0)
    models = nn.Linear(4, 3), nn.Linear(3 if chained else 4, 1)
    return models, (torch.optim.Adam(models[0].parameters()), torch.optim.SGD(models[1].parameters(), lr=0.1))


def play(models: Models, optimizers: Optimizers, rounds: int, *, one_pass: bool = False, freezes: bool = False) -> None:
    """A GAN: `one_pass` for a single backward of the critic, `freezes` for a critic closed while the other trains."""
    (maker, critic), (make, judge) = models, optimizers
    for _ in range(rounds):
        critic.requires_grad_(True)
        judge.zero_grad()
        invented = maker(torch.randn(5, 4))
        real, fake = critic(torch.randn(5, 3)).mean(), -critic(invented.detach()).mean()
        for loss in [real + fake] if one_pass else [real, fake]:
            loss.backward()
        judge.step()
        critic.requires_grad_(not freezes)
        make.zero_grad()
        critic(invented).mean().backward()
        make.step()


@pytest.mark.parametrize("watched", [(0,), (1,)], ids=["maker", "critic"])
@pytest.mark.parametrize("way", [{}, {"one_pass": True}, {"freezes": True}], ids=["plain", "one pass", "freezes"])
def test_either_side_of_a_gan_is_known_after_a_few_turns(watched: tuple[int, ...], way: dict[str, bool]) -> None:
    models, optimizers = two()
    with followed(*(optimizers[i] for i in watched)) as turns:
        play(models, optimizers, 2, **way)
        assert not turns.is_game
        play(models, optimizers, 2, **way)
        assert turns.is_game


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("every", [1, 3])
def test_two_optimizers_of_one_model_play_no_game(order: tuple[int, int], every: int) -> None:
    """Also where one of them steps more rarely, and where gradients are scaled in place between the two steps."""
    (body, head), optimizers = two()
    with followed(optimizers[0]) as turns:
        for step in range(12):
            optimizers[0].zero_grad()
            if step % every == 0:
                optimizers[1].zero_grad()
            head(body(torch.randn(5, 4))).mean().backward()
            for which in order:
                if which == 1 and (step + 1) % every:
                    continue
                for parameter in (body, head)[which].parameters():
                    parameter.grad.mul_(0.5)
                optimizers[which].step()
        assert not turns.is_game


@pytest.mark.parametrize("zeroed", ["all first", "own first", "own after", "in place"])
def test_models_trained_side_by_side_play_no_game(zeroed: str) -> None:
    models, optimizers = two(chained=False)
    with followed(optimizers[0]) as turns:
        for _ in range(8):
            if zeroed == "all first":
                for optimizer in optimizers:
                    optimizer.zero_grad()
            for model, optimizer in zip(models, optimizers, strict=True):
                if zeroed in ("own first", "in place"):
                    optimizer.zero_grad(set_to_none=zeroed == "own first")
                model(torch.randn(5, 4)).mean().backward()
                optimizer.step()
                if zeroed == "own after":
                    optimizer.zero_grad()
        assert not turns.is_game


def joint(models: Models, optimizers: Optimizers, steps: int, *, left_out: Callable[[int], bool], clip: bool) -> None:
    """One loss for both; the second optimizer, first in turn, is left out at some steps, and all gradients zeroed."""
    (body, head), (of_body, of_head) = models, optimizers
    every = [*body.parameters(), *head.parameters()]
    for step in range(steps):
        of_body.zero_grad()
        of_head.zero_grad()
        head(body(torch.randn(5, 4))).mean().backward()
        for optimizer in (of_head, of_body):
            if clip:
                nn.utils.clip_grad_norm_(every, 1e-3)
            if optimizer is of_body or not left_out(step):
                optimizer.step()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "left_out",
    [lambda step: step in (7, 12, 30, 31), lambda step: step % 2 == 0, lambda step: False],
    ids=["some", "half", "none"],
)
def test_an_optimizer_that_leaves_out_steps_plays_no_game(left_out: Callable[[int], bool], clip: bool) -> None:
    models, optimizers = two()
    with followed(*optimizers) as turns:
        joint(models, optimizers, 50, left_out=left_out, clip=clip)
        assert not turns.is_game


def test_a_game_that_has_ended_is_none() -> None:
    models, optimizers = two()
    with followed(*optimizers) as turns:
        play(models, optimizers, 6)
        assert turns.is_game
        joint(models, optimizers, 3, left_out=lambda step: False, clip=False)
        assert not turns.is_game


def test_one_side_that_goes_on_alone_plays_no_more() -> None:
    models, optimizers = two()
    with followed(*optimizers) as turns:
        play(models, optimizers, 6)
        for _ in range(LONG + 2):
            optimizers[1].zero_grad()
            models[1](torch.randn(5, 3)).mean().backward()
            optimizers[1].step()
        assert not turns.is_game


def test_a_game_is_known_where_one_side_steps_more_often() -> None:
    (maker, critic), (make, judge) = two()
    with followed(judge) as turns:
        for _ in range(5):
            for _ in range(5):
                judge.zero_grad()
                critic(torch.randn(5, 3)).mean().backward()
                judge.step()
            make.zero_grad()
            critic(maker(torch.randn(5, 4))).mean().backward()
            make.step()
        assert turns.is_game


def test_a_game_of_others_is_not_ours() -> None:
    models, optimizers = two()
    own = nn.Linear(2, 2)
    with followed(torch.optim.SGD(own.parameters(), lr=0.1)) as turns:
        play(models, optimizers, 6)
        assert not turns.is_game


def test_both_runs_of_a_gan_say_so_from_the_fourth_step_on(tmp_path) -> None:
    models, optimizers = two()
    config = gv.Config(quiet=True)
    monitors = [
        gv.watch(model, optimizer, run=tmp_path / str(i), config=config)
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    play(models, optimizers, 8)
    for i, monitor in enumerate(monitors):
        monitor.close()
        with gv.open_run(tmp_path / str(i)) as run:
            assert run.series("step/in_turn")[0].tolist()[-5:] == [3, 4, 5, 6, 7]
            assert "trained_in_turn" in {finding.id for finding in run.findings}
