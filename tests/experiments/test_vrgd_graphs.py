"""Passes that are recorded once and replayed train as passes that run."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vrgd.cifar import make_resnet
from experiments.vrgd.loop import GraphedPasses
from experiments.vrgd.trial import Trial, make_optimizer, warmup_cosine

CPU = torch.device("cpu")
NUM_STEPS = 6
K = 6


def make_trial(arm: str, optimizer: str = "momentum", **changes: Any) -> Trial:
    options: dict[str, Any] = {"task": "test", "model": "resnet8-w4", "batch": 24, "lr": 0.02, "seed": 0, "k": K}
    return Trial(**(options | {"arm": arm, "optimizer": optimizer} | changes))


# -- passes of a network with batch norm ----------------------------------------------------------------------------


def trained(trial: Trial, device: torch.device, *, with_graphs: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and weights and running averages after some steps with a learning rate that changes."""
    torch.manual_seed(0)
    model = make_resnet(trial.model).to(device)
    optimizer = make_optimizer(trial, model.named_parameters(), NUM_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, NUM_STEPS, 0.3))
    generator = torch.Generator().manual_seed(1)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)

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
    return losses, [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


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
