"""The VRGD optimizers on a GPU: kernels, single tensors and the CPU agree, and watching changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import kernels

pytestmark = pytest.mark.gpu
NUM_PARTS = 8


class Given(nn.Module):
    """A model whose gradients are whatever it is given: a matrix, a kernel in channels-last order, odd sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(300, 128), (32, 16, 3, 3), (7,), (64,), (1,), (513, 40)]
        weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        weights[1] = weights[1].to(memory_format=torch.channels_last)
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return sum(((w * part).sum() for w, part in zip(self.weights, parts, strict=True)), torch.tensor(0.0))


def parts_of(model: Given, step: int, device: str) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    steps = []
    for _ in range(NUM_PARTS):
        part = [torch.randn(w.shape, generator=generator) + 0.3 for w in model.weights]
        part[0][:3] = 0  # dead
        part[3][5] = 2.0  # the same in every part
        steps.append([p.to(device=device, dtype=model.weights[0].dtype) for p in part])
    return steps


def train(make, device: str, dtype: torch.dtype = torch.float32, run: Path | None = None) -> list[torch.Tensor]:
    model = Given(dtype).to(device)
    optimizer = make(model.parameters())
    config = gv.Config(tensor_every=2, quiet=True)
    monitor = gv.watch(model, optimizer, run=run, config=config) if run is not None else None
    for step in range(5):
        for parts in parts_of(model, step, device):
            (model(parts) / NUM_PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
        assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
        with gv.open_run(monitor.run_path) as kept:
            assert kept.matrix("vrgd/mean")[1].shape == (4, 6)
    return [w.detach().cpu() for w in model.weights]


MAKERS = {
    "sgd": lambda params, **vr: gv.optim.VRSGD(params, lr=0.1, momentum=0.9, **vr),
    "adamw": lambda params, **vr: gv.optim.VRAdamW(params, lr=0.01, **vr),
    "lamb": lambda params, **vr: gv.optim.VRLAMB(params, lr=0.01, **vr),
    "lars": lambda params, **vr: gv.optim.VRLARS(params, lr=1.0, trust_coefficient=0.1, **vr),
}


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were used, call by call."""
    from gradvitals.kernels import adam, vrgd
    from gradvitals.kernels.vrgd import Adding

    calls: list[str] = []

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            if name != "update" or kwargs["reduction"] is not None:
                calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(vrgd, "scale")
    count(adam, "update")
    count(Adding, "add")
    return calls


@pytest.fixture(autouse=True)
def nothing_given_up() -> Iterator[None]:
    yield
    assert not kernels._State.broken


@pytest.mark.parametrize("name", MAKERS)
def test_kernels_agree_with_single_tensors_and_with_the_cpu(name: str, fused_calls: list[str]) -> None:
    fused = train(MAKERS[name], "cuda")
    assert {"add", "update" if name == "adamw" else "scale"} <= set(fused_calls)
    del fused_calls[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on_device", lambda tensor: False)
        single = train(lambda params: MAKERS[name](params, foreach=False), "cuda")
    assert not fused_calls
    for a, b, c in zip(fused, single, train(MAKERS[name], "cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, fused_calls: list[str]) -> None:
    fused = train(MAKERS["sgd"], "cuda", dtype)
    assert fused_calls
    for a, b in zip(fused, train(lambda p: MAKERS["sgd"](p, foreach=False), "cuda", dtype), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_watching_changes_no_bit(name: str, tmp_path: Path) -> None:
    plain = train(MAKERS[name], "cuda")
    for again in (train(MAKERS[name], "cuda"), train(MAKERS[name], "cuda", run=tmp_path / "run")):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_a_scaler_leaves_no_trace(fused: bool) -> None:
    """With a fused base the decision stays on the device: neither weights nor averages may move."""
    weight = nn.Parameter(torch.randn(64, device="cuda"))
    optimizer = gv.optim.VRAdamW([weight], lr=0.1, fused=fused or None)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    kept: list[torch.Tensor] = []
    for step in range(4):
        for part in range(NUM_PARTS):
            given = torch.randn(64, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * step + part))
            if step == 2 and part == 3:
                given[7] = torch.inf
            scaler.scale((weight * given).sum()).backward()
        if step == 2:
            kept = [weight.detach().clone(), optimizer.state[weight]["factor_avg"].clone()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 2:
            assert torch.equal(weight, kept[0])
            assert torch.equal(optimizer.state[weight]["factor_avg"], kept[1])
    assert not torch.equal(weight, kept[0])


def test_a_step_waits_for_nothing() -> None:
    model = Given(torch.float32).to("cuda")
    optimizer = gv.optim.VRAdamW(model.parameters(), lr=0.01)
    parts = [parts_of(model, step, "cuda") for step in range(3)]
    for step in range(3):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for part in parts[step]:
                (model(part) / NUM_PARTS).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_parts_are_those_of_autograd_to_the_last_bit(dtype: torch.dtype, fused_calls: list[str]) -> None:
    """Adding is taken over without a trace: also in 16 bits, where every sum is rounded."""
    model, plain = Given(dtype).to("cuda"), Given(dtype).to("cuda")
    optimizer = gv.optim.VRAdamW(model.parameters(), lr=0.01)
    for step in range(3):
        for parts in parts_of(model, step, "cuda"):
            model(parts).backward()
            plain(parts).backward()
            for one, other in zip(model.weights, plain.weights, strict=True):
                assert torch.equal(one.grad, other.grad)
        optimizer.step()
        for parameter in (*model.weights, *plain.weights):
            parameter.grad = None
    assert "add" in fused_calls


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream.*")  # the optimizer's own graph is on another stream
def test_parts_collected_in_a_cuda_graph() -> None:
    """Replayed, the graph adds up new gradients in the same places, and begins deviations anew."""
    kept = []
    for captured in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3000, 40, device="cuda"))
        optimizer = gv.optim.VRAdamW([weight], lr=0.01)
        static = torch.zeros(NUM_PARTS, 3000, 40, device="cuda")
        given = [torch.randn_like(static) + 0.3 for _ in range(6)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def passes(weight=weight, static=static) -> None:
            for part in static:
                (weight * part).sum().backward()

        for step, values in enumerate(given):
            static.copy_(values)
            if captured and step >= 3:
                if step == 3:
                    optimizer.zero_grad()
                    with torch.cuda.graph(graph):
                        passes()
                    optimizer.graph_captured()
                graph.replay()
                optimizer.graph_replayed()
                optimizer.step()
                continue
            optimizer.zero_grad()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                passes()
            torch.cuda.current_stream().wait_stream(stream)
            optimizer.step()
        kept.append(weight.detach().clone())
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6)
