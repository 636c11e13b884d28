"""Passes that are recorded once and replayed train exactly as passes that run: simulated on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vrgd import clicks, loop, text
from experiments.vrgd.cifar import make_resnet
from experiments.vrgd.loop import WARM_UP, GraphedPasses
from experiments.vrgd.trial import Trial, make_optimizer, warmup_cosine
from gradvitals import optim
from gradvitals.demo import CharLMConfig, shakespeare
from gradvitals.optim.vrgd import VarianceReduced

CPU = torch.device("cpu")
NUM_STEPS = 6
K = 6


def make_trial(arm: str, optimizer: str = "momentum", **changes: Any) -> Trial:
    options: dict[str, Any] = {"task": "test", "model": "resnet8-w4", "batch": 24, "lr": 0.02, "seed": 0, "k": K}
    return Trial(**(options | {"arm": arm, "optimizer": optimizer} | changes))


class Simulated:
    """Stands for a CUDA graph.

    Recording does nothing to numbers, but hooks are called. Replaying computes into the same memory, and calls none.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.buffers = list(model.buffers())
        self.optimizer = optimizer
        self.done: list[str] = []

    def run(self, passes: Callable[[], Tensor]) -> Tensor:
        self.done.append("run")
        return passes()

    def record(self, passes: Callable[[], Tensor]) -> Tensor:
        self.done.append("record")
        assert all(parameter.grad is None for parameter in self.parameters)
        before = [buffer.clone() for buffer in self.buffers]
        self.passes, self.loss = passes, passes()
        self.grads = [parameter.grad for parameter in self.parameters]
        for tensor in (self.loss, *self.grads):
            tensor.fill_(torch.nan)  # memory that nothing was written to yet
        for buffer, old in zip(self.buffers, before, strict=True):
            buffer.copy_(old)
        return self.loss

    def replay(self) -> None:
        self.done.append("replay")
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            assert parameter.grad is grad
            grad.zero_()  # the first micro-batch writes
        self.loss.copy_(self.passes())
        if isinstance(self.optimizer, VarianceReduced):
            parts = self.optimizer._parts
            for entry, _, _, norm in parts._captured:
                if norm is not None:
                    norm.copy_(entry.norm)
            parts.forget()


# -- passes of a network with batch norm ----------------------------------------------------------------------------


def trained(
    trial: Trial, device: torch.device = CPU, *, with_graphs: bool, compiled: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and weights and running averages after some steps with a learning rate that changes."""
    torch.manual_seed(0)
    model = make_resnet(trial.model).to(device)
    if compiled:
        model.compile_blocks()
    optimizer = make_optimizer(trial, model.named_parameters(), NUM_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, NUM_STEPS, 0.3))
    generator = torch.Generator().manual_seed(1)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)

    with pytest.MonkeyPatch.context() as patch:
        simulated = Simulated(model, optimizer)
        if device == CPU and with_graphs:
            patch.setattr(loop, "make_recorder", lambda device: simulated)
        losses = []
        with closing(GraphedPasses(loss, optimizer, trial.k, device=device, graphs=with_graphs)) as passes:
            for _ in range(NUM_STEPS):
                images = torch.randn(trial.batch, 3, 16, 16, generator=generator)
                labels = torch.randint(10, (trial.batch,), generator=generator)
                found = passes(images.to(device, memory_format=torch.channels_last), labels.to(device))
                losses.append(found.clone())
                optimizer.step()
                scheduler.step()
                with torch.no_grad():
                    model.eval()(images[:2].to(device))
                    model.train()
    if device == CPU and with_graphs:
        assert simulated.done == ["run"] * WARM_UP + ["record"] + ["replay"] * (NUM_STEPS - WARM_UP)
    return losses, [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "lamb"])
@pytest.mark.parametrize("arm", ["base", "vr", "mean"])
def test_replayed_passes_train_exactly_as_passes_that_run(arm: str, optimizer: str) -> None:
    trial = make_trial(arm, optimizer)
    (losses, state), (other_losses, other_state) = (trained(trial, with_graphs=on) for on in (False, True))
    for one, other in zip([*losses, *state], [*other_losses, *other_state], strict=True):
        assert torch.equal(one, other)
    assert all(torch.isfinite(tensor).all() for tensor in state)


# -- a few numbers that can be checked by hand ----------------------------------------------------------------------


def one_weight() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(1))
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_gradient_and_loss_are_means_over_the_batch_and_do_not_add_up() -> None:
    weight, optimizer = one_weight()
    passes = GraphedPasses(lambda x, y: ((weight + x) * y).mean(), optimizer, 2, device=CPU)
    for _ in range(2):
        loss = passes(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, 2.0, 2.0]))
        assert float(loss) == 4.25
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.5]


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that are the same each time, so that what is left to differ is what is looked for."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["momentum", "lamb"])
@pytest.mark.parametrize("arm", ["base", "vr", "mean", "wiener-row"])
def test_a_gpu_replays_what_it_would_run(arm: str, optimizer: str, exact: None) -> None:
    trial = make_trial(arm, optimizer)
    place = torch.device("cuda", torch.cuda.current_device())
    (losses, state), (other_losses, other_state) = (trained(trial, place, with_graphs=on) for on in (False, True))
    torch.testing.assert_close(losses, other_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, other_state, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_records_any_task() -> None:
    place = torch.device("cuda", torch.cuda.current_device())
    tiny = CharLMConfig(vocab_size=256, context=16, d_model=64, n_layer=1, n_head=2)
    content = text.Text(shakespeare().encode(), place)
    world = clicks.World(place, field_sizes=(400, 50))
    for make, draw, loss in (
        (
            lambda: text.CharLM(tiny),
            lambda generator: (content.windows(24, 16, generator),),
            lambda model: lambda windows: text.window_loss(model, windows),
        ),
        (
            lambda: clicks.SmallDLRM((400, 50)),
            lambda generator: world.draw(24 * 512, generator).observed,
            lambda model: lambda *observed: clicks._loss(model, *observed),
        ),
    ):
        found = []
        for with_graphs in (False, True):
            torch.manual_seed(0)
            model = make().to(place)
            optimizer = optim.VRSGD(model.parameters(), lr=0.05)
            generator = torch.Generator(place).manual_seed(0)
            with closing(GraphedPasses(loss(model), optimizer, K, device=place, graphs=with_graphs)) as passes:
                for _ in range(NUM_STEPS):
                    total = passes(*draw(generator)).clone()
                    optimizer.step()
            found.append(total)
        torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)
