"""Clipping of every kind, before and after observe: norms are of the gradients before it."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Data, Rig, Truth, assert_no_errors, finished, mlp, regression
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import gradvitals as gv


def make(path: Path, **options: Any) -> Rig:
    torch.manual_seed(0)
    model = mlp()
    return Rig(path, model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def by_name(parameters: Iterable[nn.Parameter]) -> Any:
    return clip_grad_norm_(parameters, 0.1)


CLIPS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "by name": by_name,
    "by module": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "generator": lambda ps: nn.utils.clip_grad_norm_((p for p in ps), 0.1),
    "no foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=False),
    "inf norm": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, norm_type=float("inf")),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "subset": lambda ps: nn.utils.clip_grad_norm_(ps[2:4], 0.1),
    "two subsets": lambda ps: (nn.utils.clip_grad_norm_(ps[:3], 0.1), nn.utils.clip_grad_norm_(ps[3:], 0.1)),
    "two calls": lambda ps: nn.utils.clip_grads_with_norm_(
        ps, 0.1, nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None])
    ),
    "backwards": lambda ps: nn.utils.clip_grad_norm_(ps[::-1], 0.1),
    "one of them twice": lambda ps: nn.utils.clip_grad_norm_([*ps, ps[1]], 0.1),
    "far above": lambda ps: nn.utils.clip_grad_norm_(ps, 1e9),
    "twice": lambda ps: (nn.utils.clip_grad_norm_(ps, 0.1), nn.utils.clip_grad_norm_(ps, 0.01)),
}


@pytest.mark.parametrize(
    ("clip", "observe"),
    [
        *((clip, "never") for clip in CLIPS),
        *((clip, observe) for clip in ("by name", "two subsets", "value") for observe in ("step", "micro", "clipped")),
    ],
)
def test_norms_are_from_before_the_clip(tmp_path: Path, clip: str, observe: str) -> None:
    rig = make(tmp_path, clip=CLIPS[clip], observe=observe).steps(4)
    rig.check()
    assert rig.stages() == ["raw"] * 4


def scale_by_hand(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clamp_by_name(parameters: Iterable[nn.Parameter]) -> None:
    clip_grad_value_(parameters, 0.01)


@pytest.mark.parametrize("clip", [scale_by_hand, clamp_by_name])
def test_clipping_nobody_heard_is_called_clipped(tmp_path: Path, clip: Callable[..., Any]) -> None:
    rig = make(tmp_path, clip=clip, observe="never").steps(3)
    rig.monitor.close()
    assert_no_errors(rig.monitor)
    assert rig.stages() == ["clipped"] * 3


@pytest.mark.parametrize("clip", [scale_by_hand, clamp_by_name])
@pytest.mark.parametrize("sizes", [(4,), (4, 4)], ids=["one backward", "two backwards"])
def test_observe_before_a_clip_by_hand_reads_whole_gradients(
    tmp_path: Path, clip: Callable[..., Any], sizes: tuple[int, ...]
) -> None:
    rig = make(tmp_path, clip=clip, sizes=sizes).steps(3)
    rig.check()
    assert rig.stages() == ["raw"] * 3


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_norm_that_clipping_returns_is_bit_identical(tmp_path: Path, half: bool) -> None:
    results = []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = mlp().to(torch.bfloat16 if half else torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = gv.watch(model, optimizer, run=tmp_path / "run") if monitored else None
        data, norms = Data(), []
        for norm_type in (2.0, 2, float("inf"), 1.0, "inf"):
            regression(model, data.batch(4)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type))
            optimizer.step()
            optimizer.zero_grad()
        if monitor:
            monitor.close()
        results.append((norms, list(model.parameters())))
    for bare, watched in zip(*(norms for norms, _ in results), strict=True):
        assert bare.dtype == watched.dtype
        assert torch.equal(bare, watched)
    assert all(torch.equal(a, b) for a, b in zip(*(ps for _, ps in results), strict=True))


def test_error_if_nonfinite_still_raises(tmp_path: Path) -> None:
    rig = make(tmp_path)
    rig.step()
    regression(rig.model, rig.data.batch(4)).backward()
    rig.model[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(rig.model.parameters(), 1.0, error_if_nonfinite=True)
    assert vars(nn.utils.clip_grad)["torch"] is torch
    rig.optimizer.zero_grad()
    rig.steps(2)
    rig.check()


def test_clip_of_an_optimizer_that_comes_first_does_not_mark_the_second(tmp_path: Path) -> None:
    """A GAN clips and steps its first half before the gradients of the second exist."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": mlp(), "two": mlp()})
    optimizers = {name: torch.optim.AdamW(model[name].parameters(), lr=1e-2) for name in model}
    monitor = gv.watch(
        model, list(optimizers.values()), run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True)
    )

    def both(module: nn.ModuleDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return regression(module["one"], batch) + regression(module["two"], batch)

    truth, data = Truth(model, list(optimizers.values()), both), Data()
    for _ in range(3):
        batches = data.batches((4, 4))
        truth.before(batches, [0.5, 0.5], [1.0, 1.0])
        for name in model:
            for batch in batches:
                loss = regression(model[name], batch)
                (loss / 2).backward()
                monitor.observe(loss)
            nn.utils.clip_grad_norm_(model[name].parameters(), 0.1)
            optimizers[name].step()
            optimizers[name].zero_grad()
        truth.after()
    with finished(monitor) as run:
        truth.check(run, samples_known=False)
        assert run.stage("grad/norm")[1].tolist() == ["raw"] * 3


def test_clip_of_another_model_is_none_of_ours(tmp_path: Path) -> None:
    rig = make(tmp_path, observe="micro")
    other = mlp()

    def teacher() -> None:
        other.zero_grad()
        regression(other, Data(9).batch(4)).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)

    for _ in range(3):
        teacher()
        rig.step()
    rig.check()
    assert rig.stages() == ["raw"] * 3


@pytest.mark.parametrize("first", [True, False])
def test_two_models_that_are_clipped_together(tmp_path: Path, first: bool) -> None:
    other = mlp()

    def clip(parameters: list[nn.Parameter]) -> None:
        other.zero_grad()
        regression(other, Data(9).batch(4)).backward()
        others = list(other.parameters())
        nn.utils.clip_grad_norm_([*parameters, *others] if first else [*others, *parameters], 0.1)

    rig = make(tmp_path, clip=clip, observe="micro").steps(4)
    rig.check()
    assert rig.stages() == ["raw"] * 4


def test_torch_is_as_it_is_for_everybody_else_while_norms_are_heard(tmp_path: Path) -> None:
    originals = (torch._foreach_norm, torch.stack)
    found: set[bool] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            found.add((torch._foreach_norm, torch.stack) == originals)

    looking = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    looking.start()
    try:
        make(tmp_path, clip=by_name).steps(10).check()
    finally:
        done.set()
        looking.join()
        sys.setswitchinterval(interval)
    assert found == {True}


def test_norms_of_another_threads_clip_are_not_taken_for_ours(tmp_path: Path) -> None:
    others = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in others:
        parameter.grad = torch.full((3,), 7.0)

    def beside() -> None:
        while not done.is_set():
            clip_grad_norm_(others, 1e9)

    rig = make(tmp_path, clip=by_name)
    done = threading.Event()
    clipping = threading.Thread(target=beside)
    clipping.start()
    try:
        rig.steps(5).check()
    finally:
        done.set()
        clipping.join()


def test_two_threads_each_train_a_model(tmp_path: Path) -> None:
    rigs = [make(tmp_path / str(number), clip=by_name, observe="micro") for number in range(2)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda rig: rig.steps(20), rigs))
    for rig in rigs:
        rig.check()
        assert rig.stages() == ["raw"] * 20


def test_training_goes_on_in_another_thread(tmp_path: Path) -> None:
    rig = make(tmp_path, clip=by_name, observe="never").steps(3)
    with ThreadPoolExecutor() as threads:
        threads.submit(rig.steps, 3).result()
    rig.steps(3).check()
    assert rig.stages() == ["raw"] * 9


def test_norm_computed_for_logging_while_accumulating(tmp_path: Path) -> None:
    """get_total_norm after the first micro-batch is no clip: the step's norm is that of the whole gradient."""
    rig = make(tmp_path, observe="never")
    for _ in range(3):
        batches = rig.data.batches((4, 4))
        rig.truth.before(batches, [0.5, 0.5], [4.0, 4.0])
        for batch in batches:
            (regression(rig.model, batch) / 2).backward()
            nn.utils.get_total_norm([p.grad for p in rig.model.parameters()])
        rig.optimizer.step()
        rig.truth.after()
        rig.optimizer.zero_grad()
    rig.check(skip=("microbatch:gsnr",))


def test_fewer_micro_batches_than_before_and_a_clip_by_hand(tmp_path: Path) -> None:
    """The last step of an epoch has fewer micro-batches; observe still comes before the loop's own clipping."""
    rig = make(tmp_path, observe="micro", tell="micro", clip=scale_by_hand)
    for sizes in [(4, 4, 4), (4, 4, 4), (4, 4), (4, 4, 4)]:
        rig.step(sizes=sizes)
    rig.check(skip=("noise_scale",))
    assert rig.stages() == ["raw"] * 4


@pytest.mark.parametrize(
    ("loop", "own", "rules"),
    [(1.0, 0.5, 0.5), (0.5, 1.0, 0.5), (1.0, 1.0, 1.0), (None, 0.5, 0.5), (math.inf, 0.5, 0.5)],
)
def test_clipping_in_the_loop_and_in_the_optimizer_is_told_once(
    tmp_path: Path, loop: float | None, own: float, rules: float
) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = gv.optim.AdamW(model.parameters(), lr=1e-2, max_norm=own)
    with gv.watch(model, optimizer, run=tmp_path, config=gv.Config(quiet=True)):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, next(model.parameters()).shape[1])).square().mean().backward()
            if loop is not None:
                clip_grad_norm_(model.parameters(), loop)
            optimizer.step()
    run = gv.open_run(tmp_path)
    assert run.series("clip/max_norm")[1].tolist() == [rules] * 5
    told = [finding for finding in run.findings if finding.id == "clipped_twice"]
    if loop is None or math.isinf(loop):
        assert told == []
    else:
        assert [(finding.severity, finding.first_step) for finding in told] == [("info", 0)]
        assert (
            f"to {loop:g} by the loop, then to {own:g} by the optimizer; the lower, {rules:g}, rules" in told[0].title
        )


def test_each_of_two_optimizers_has_its_own_limit_beside_the_loops(tmp_path: Path) -> None:
    model = mlp()
    first, *rest = model.parameters()
    optimizers = [gv.optim.AdamW([first], 1e-2, max_norm=0.5), gv.optim.AdamW(rest, 1e-2, max_norm=1.0)]
    with gv.watch(model, optimizers, run=tmp_path, config=gv.Config(quiet=True)):
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, first.shape[1])).square().mean().backward()
            clip_grad_norm_(model.parameters(), 2.0)
            for optimizer in optimizers:
                optimizer.step()
    told = [finding.title for finding in gv.open_run(tmp_path).findings if finding.id == "clipped_twice"]
    assert told
    assert all("to 2 by the loop" in title for title in told)
