"""What zero-code runs find: which optimizers belong to which model, what it is called, what its loss is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint

import gradvitals as gv
from gradvitals.integrations.backward import BackwardPasses
from gradvitals.integrations.zero_code import watcher as watcher_module
from gradvitals.integrations.zero_code.program import Settings
from gradvitals.integrations.zero_code.watcher import Hooks, Watcher

Install = Callable[..., Watcher]


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(width, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Critic(Net):
    pass


def train(
    model: Callable[[Tensor], Tensor], optimizers: list[torch.optim.Optimizer], steps: int, micro_batches: int = 1
) -> list[float]:
    losses = []
    for _ in range(steps):
        total = 0.0
        for _ in range(micro_batches):
            loss = model(torch.randn(6, 4)).square().mean() / micro_batches
            loss.backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
    return losses


def finished(watcher: Watcher) -> dict[str, gv.Run]:
    watcher.close(None)
    return {name: gv.open_run(path) for path, name in watcher.runs.items()}


def test_a_pass_inside_another_is_no_pass_of_its_own(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=True)

    losses = train(checkpointed, [torch.optim.SGD(model.parameters(), 0.1)], 4, micro_batches=2)
    np.testing.assert_allclose(finished(watcher)["Net"].series("loss")[1], losses, rtol=1e-6)


def names(run: gv.Run) -> list[str]:
    return [tensor.name for tensor in run.layout.tensors]


NET_NAMES = ["body.weight", "body.bias", "head.weight", "head.bias"]


def test_a_model_is_found_with_names_loss_and_samples(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    losses = train(model, [torch.optim.AdamW(model.parameters())], 6, micro_batches=2)
    run = finished(watcher)["Net"]
    assert names(run) == NET_NAMES
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-6)  # the sum: what the loop would plot
    steps, sizes = run.batch_sizes("grad/norm")
    assert steps.tolist() == list(range(6))
    assert sizes.tolist()[4:] == [12, 12]  # learnt in the first steps
    assert run.series("gsnr", source="microbatch")[0].size
    assert set(run.stage("grad/norm")[1]) == {"raw"}


def test_gradients_are_read_before_the_loop_clips_them(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(6):
        model(torch.randn(6, 4)).square().mean().backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            for parameter in model.parameters():
                parameter.grad.clamp_(-1e-4, 1e-4)
        optimizer.step()
        optimizer.zero_grad()
    run = finished(watcher)["Net"]
    np.testing.assert_allclose(run.series("grad/norm")[1], norms, rtol=1e-5)
    assert set(run.stage("grad/norm")[1]) == {"raw"}


def test_two_optimizers_of_one_model_make_one_step(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    of_matrices = getattr(torch.optim, "Muon", torch.optim.SGD)  # older torch has none
    train(model, [of_matrices(matrices, lr=1e-2), torch.optim.AdamW(vectors)], 5)
    runs = finished(watcher)
    assert list(runs) == ["Net"]
    assert runs["Net"].series("grad/norm")[0].tolist() == list(range(5))
    assert names(runs["Net"]) == NET_NAMES


def test_a_gan_is_two_runs_each_with_its_own_loss(zero_code: Install) -> None:
    watcher = zero_code()
    generator, critic = Net(), Critic(1)
    make = torch.optim.Adam(generator.parameters(), lr=1e-3)
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3)
    made, judged = [], []
    for _ in range(7):
        judge.zero_grad()
        real = nn.functional.softplus(-critic(torch.randn(6, 1))).mean()
        real.backward()
        invented = generator(torch.randn(6, 4))
        fake = nn.functional.softplus(critic(invented.detach())).mean()
        fake.backward()
        judge.step()
        make.zero_grad()
        fooled = nn.functional.softplus(-critic(invented)).mean()
        fooled.backward()  # reaches the critic's gradients too, which the next zero_grad throws away
        make.step()
        made.append(fooled.item())
        judged.append(real.item() + fake.item())
    runs = finished(watcher)
    assert set(runs) == {"Net", "Critic"}
    np.testing.assert_allclose(runs["Net"].series("loss")[1], made, rtol=1e-6)
    np.testing.assert_allclose(runs["Critic"].series("loss")[1], judged, rtol=1e-6)
    assert runs["Critic"].batch_sizes("grad/norm")[1][-1] == 12  # the samples that the generator showed it do not count
    assert runs["Net"].batch_sizes("grad/norm")[1][-1] == 6
    assert {path.name for path in watcher.runs} == {"run", "run-Critic"}


def test_models_that_one_optimizer_steps_are_one_run_named_by_their_classes(zero_code: Install) -> None:
    watcher = zero_code()
    first, second = Net(), Critic(1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)
    train(lambda x: second(first(x)), [optimizer], 2)
    run = finished(watcher)["Net+Critic"]
    assert names(run) == [f"{model}.{name}" for model in ("Net", "Critic") for name in NET_NAMES]


def test_wrappers_leave_the_names_that_users_know(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(torch.compile(model, backend="eager"), [optimizer], 3)
    assert names(finished(watcher)["Net"]) == NET_NAMES
    torch.compiler.reset()


def test_a_copy_that_holds_the_model_does_not_rename_it(zero_code: Install) -> None:
    class Average(nn.Module):  # as those who keep a moving average of the weights do
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.online, self.average = model, copy.deepcopy(model)

    watcher = zero_code()
    model = Net()
    average, ddp_like = Average(model), torch.nn.DataParallel(model)
    train(ddp_like, [torch.optim.SGD(model.parameters(), lr=0.01)], 2)
    assert names(finished(watcher)["Net"]) == NET_NAMES
    assert average.online is model


def test_frozen_and_unstepped_parameters_do_not_hide_the_others(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    model.body.requires_grad_(False)
    train(model, [torch.optim.SGD(model.head.parameters(), lr=0.01)], 2)
    assert names(finished(watcher)["Net"]) == ["head.weight", "head.bias"]


def test_only_the_optimizer_that_steps_counts(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    unused = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, [torch.optim.AdamW(model.parameters())], 4)
    run = finished(watcher)["Net"]
    assert run.meta["facts"]["optimizer"] == "AdamW"
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-6)
    assert unused.param_groups


def test_an_optimizer_that_takes_over_continues_the_run(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    losses = train(model, [torch.optim.SGD(model.parameters(), lr=0.01)], 3)
    losses += train(model, [torch.optim.AdamW(model.parameters())], 3)
    (run,) = finished(watcher).values()
    assert run.series("loss")[0].tolist() == list(range(6))
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-6)


def test_models_that_come_one_after_the_other_are_runs_and_are_let_go(
    zero_code: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher_module, "IDLE_BACKWARDS", 3)
    watcher = zero_code()
    first = Net()
    first_optimizer = torch.optim.SGD(first.parameters(), lr=0.01)
    train(first, [first_optimizer], 4)
    second = Net()
    train(second, [torch.optim.SGD(second.parameters(), lr=0.01)], 8)
    assert len(watcher.watched) == 1
    train(first, [first_optimizer], 2)  # it comes back: the same run
    watcher.close(None)
    lengths = [len(gv.open_run(path).series("loss")[0]) for path in watcher.runs]
    assert sorted(lengths) == [6, 8]


def test_there_is_a_limit_to_the_number_of_runs(
    zero_code: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watcher_module, "MAX_RUNS", 2)
    watcher = zero_code(quiet=False)
    kept = []
    for _ in range(4):
        model = Net()
        kept.append(model)
        train(model, [torch.optim.SGD(model.parameters(), lr=0.01)], 2)
    assert len(finished(watcher)) <= 2
    assert len(watcher.runs) == 2
    assert "2 models have been watched already; Net is not" in capsys.readouterr().err


def test_an_optimizer_without_a_model_is_watched_only_where_there_is_nothing_else(zero_code: Install) -> None:
    watcher = zero_code()
    picture = torch.randn(3, 4, requires_grad=True)
    optimizer = torch.optim.Adam([picture])
    for _ in range(3):
        picture.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert names(finished(watcher)["Adam"]) == ["group0.0"]


def test_tensors_beside_a_model_get_no_run_of_their_own(zero_code: Install) -> None:
    watcher = zero_code()
    model, temperature = Net(), torch.zeros((), requires_grad=True)
    both = [torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD([temperature], lr=0.1)]
    for _ in range(3):
        (model(torch.randn(6, 4)).square().mean() * temperature.exp()).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert list(finished(watcher)) == ["Net"]


def test_backward_passes_that_train_nothing_are_forgotten(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        inputs = torch.randn(6, 4, requires_grad=True)
        (1e6 * model(inputs)).sum().backward()  # which input matters, asked between steps
    run = finished(watcher)["Net"]
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-6)


def test_a_scaled_loss_is_unscaled(zero_code: Install) -> None:
    watcher = zero_code()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, norms = [], []
    for _ in range(4):
        loss = model(torch.randn(6, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    run = finished(watcher)["Net"]
    np.testing.assert_allclose(run.series("loss")[1], losses, rtol=1e-6)
    np.testing.assert_allclose(run.series("grad/norm")[1], norms, rtol=1e-5)
    assert set(run.stage("grad/norm")[1]) == {"unscaled"}


def test_a_script_that_watches_itself_is_left_alone(zero_code: Install, tmp_path: Path) -> None:
    watcher = zero_code()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "own", config=gv.Config(quiet=True)):
        train(model, [optimizer], 2)
    assert not finished(watcher)
    assert watcher.watches_itself
    assert gv.open_run(tmp_path / "own").last_step == 1


def test_an_error_of_ours_stops_the_watching_and_not_the_training(
    zero_code: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(watcher_module, "find", broken)
    zero_code(quiet=False)
    model, twin = Net(), None
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    train(model, [torch.optim.SGD(model.parameters(), lr=0.01)], 2)
    assert capsys.readouterr().err.count("stopped watching after an internal error: RuntimeError('ours')") == 1
    torch.manual_seed(0)
    train(twin, [torch.optim.SGD(twin.parameters(), lr=0.01)], 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_everything_is_put_back(tmp_path: Path) -> None:
    def now() -> tuple[object, ...]:
        steps = optim
        hooks = (*steps._global_optimizer_pre_hooks, *steps._global_optimizer_post_hooks)
        clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
        forward = torch.nn.modules.module._global_forward_hooks
        return torch.autograd.backward, torch.optim.Optimizer.__init__, hooks, clip, *forward

    before = now()
    watcher = Watcher(Settings(run=tmp_path / "run", program="test", quiet=True))
    hooks = Hooks(watcher)
    hooks.install()
    model = Net()
    train(model, [torch.optim.SGD(model.parameters(), lr=0.01)], 1)
    assert now() != before
    hooks.remove()
    watcher.close(None)
    assert now() == before


def test_an_error_of_ours_is_not_one_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug of ours")

    weight = torch.nn.Parameter(torch.ones(3))
    elsewhere = torch.nn.Parameter(torch.ones(3, device="meta"))
    for listener in (BackwardPasses(lambda loss: None, fail), BackwardPasses(fail)):
        listener.start()
        try:
            torch.autograd.backward([weight.sum(), elsewhere.sum()])
            weight.sum().backward()
        finally:
            listener.stop()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4, 4]
    assert capsys.readouterr().err.count("losses are no longer recorded: ") == 2  # each prints it once
