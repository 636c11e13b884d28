"""The inspection of batches stays out of the script's way."""

from __future__ import annotations

import copy
import inspect
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _global_forward_pre_hooks as hooks_of_all_modules
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import gradvitals as gv


def depth(function: object) -> int:
    """Wrappers around a function of torch."""
    wrappers = 0
    while hasattr(function, "__wrapped__"):
        function, wrappers = function.__wrapped__, wrappers + 1
    return wrappers


def test_monitors_that_come_and_go_leave_torch_as_it_was(tmp_path: Path) -> None:
    before = (torch.autograd.backward, nn.Module.train, nn.functional.mse_loss)
    models = [nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    config = gv.Config(quiet=True, tensor_every=1, overhead_budget=1)
    monitors = [
        gv.watch(model, optimizer, run=tmp_path / f"run{index}", config=config)
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    wrappers = set()
    for step in range(40):
        for index in (0, 1) if step % 2 else (1, 0):
            model, optimizer = models[index], optimizers[index]
            model.eval()
            nn.functional.mse_loss(model(torch.ones(4, 4)).detach(), torch.ones(4, 1))
            model.train()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 1)).backward()
            optimizer.step()
            wrappers.add(depth(torch.autograd.backward) - depth(before[0]))
    assert wrappers <= {0, 1, 2}, "one, and a second if something was compiled in this process before"
    for monitor in monitors:
        monitor.close()
    assert (torch.autograd.backward, nn.Module.train, nn.functional.mse_loss) == before


def test_losses_on_several_devices_do_not_disturb_an_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        model.eval()
        for device in ("cpu", "meta"):
            nn.functional.mse_loss(torch.ones(2, device=device), torch.zeros(2, device=device))
        assert model.train() is model


def test_wrapped_functions_keep_their_signature(tmp_path: Path) -> None:
    expected = inspect.signature(torch.autograd.backward)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        assert inspect.signature(torch.autograd.backward) == expected


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def penalized(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    squares = [weight.square().sum() for weight in model.parameters()]
    return functional.cross_entropy(model(x), y) + 1e-4 * torch.stack(squares).sum()


def symmetric(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """As of CLIP: each row belongs to the column at the same place."""
    scores, pairs = model(x) @ model(x + 1).t(), torch.arange(len(x))
    return (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.t(), pairs)) / 2


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x, y: functional.cross_entropy(model(x), y) / 2,
        lambda model, x, y: functional.cross_entropy(model(x), y) * 1024,
        lambda model, x, y: functional.cross_entropy(model(x), y, label_smoothing=0.1),
        lambda model, x, y: functional.cross_entropy(model(x), y, reduction="sum"),
        penalized,
        symmetric,
    ],
    ids=["half", "scaled", "smoothed", "summed", "penalized", "symmetric"],
)
def test_the_error_of_any_cross_entropy_is_read(tmp_path: Path, loss_of: Loss) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        for _ in range(12):
            pixels = torch.randint(256, (32, 4)).float()
            optimizer.zero_grad()
            loss_of(model, pixels, pixels[:, :3].argmax(1)).backward()
            optimizer.step()
    with gv.open_run(tmp_path / "run") as run:
        assert "unscaled_data" in {finding.id for finding in run.findings}
        assert len(run.series("head/error")[0])


class Select(torch.autograd.Function):
    """Has the name of an operation of torch, and saves nothing that it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return functional.pad(grad[:, None], (0, 0, ctx.shape[1] - 1, 0))


class Reader(nn.Module):
    """Reads ids and puts out shares of two classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.out = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        shares: Tensor = self.out(Select.apply(self.rnn(self.embed(x))[0])).softmax(1)
        return shares


def test_an_operation_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(12):
            ids = torch.randint(9, (16, 6))
            optimizer.zero_grad()
            functional.cross_entropy(model(ids), ids[:, 0] % 2).backward()
            optimizer.step()
    assert "loss_mismatch" in {finding.id for finding in monitor.findings}


def dropping() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore")  # torch.jit is on its way out
@pytest.mark.parametrize(
    "use",
    [copy.deepcopy, lambda model: torch.save(model, io.BytesIO()), AveragedModel, torch.jit.script],
    ids=["copy", "save", "average", "script"],
)
def test_a_model_can_be_copied_and_saved_in_a_block_without_gradients_and_after_it(
    tmp_path: Path, use: Callable[[nn.Module], object]
) -> None:
    model, optimizer = dropping()
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        with torch.no_grad():
            use(model)
        use(model)
        with torch.inference_mode():
            model(torch.ones(2, 4))
        use(model)


def test_nothing_looks_at_calls_of_modules_after_a_block_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)  # another test may have compiled something
    model, optimizer = dropping()

    def evaluate() -> None:
        for _ in range(50):
            with torch.no_grad():
                model(torch.ones(2, 4))

    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)):
        with torch.no_grad():
            assert hooks_of_all_modules
            assert not model._forward_pre_hooks
        assert not hooks_of_all_modules
        torch.no_grad().__enter__()  # and never left
        torch.set_grad_enabled(True)
        model(torch.ones(2, 4))
        assert not hooks_of_all_modules
        threads = [threading.Thread(target=evaluate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not hooks_of_all_modules
        block = torch.no_grad()
        block.__enter__()
    assert not hooks_of_all_modules
    block.__exit__(None, None, None)


def test_a_hook_of_the_script_may_switch_to_evaluation_in_the_middle_of_a_call(tmp_path: Path) -> None:
    model, optimizer = dropping()

    def switch(module: nn.Module, _: object) -> None:
        module.train(torch.is_grad_enabled())

    model.register_forward_pre_hook(switch)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)), torch.no_grad():
        assert torch.equal(model(torch.ones(2, 4)), model(torch.ones(2, 4)))


class Largest(TorchDispatchMode):
    """Notes the elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = func.is_view or func.name().startswith("aten::detach")
        if isinstance(result, Tensor) and not views:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_batch_drawn_again_is_looked_for_at_little_cost_and_not_where_memory_is_gone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    freed, sparse, data = torch.zeros(4000, 16), torch.ones(4000, 16).to_sparse_csr(), torch.randn(20_000, 16)
    data[:, 0] = 0  # tells nothing about a row
    freed.untyped_storage().resize_(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor,
        Largest() as largest,
    ):
        for _ in range(40):
            batch = data[5000:5032].clone()
            optimizer.zero_grad()
            functional.mse_loss(model(batch), batch[:, :1] + batch[:, 1:2]).backward()
            optimizer.step()
    assert "data_order" in {finding.id for finding in monitor.findings}
    assert largest.elements <= len(data) < data.numel()
    assert freed.numel() == sparse.numel()
