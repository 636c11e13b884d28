"""Kernels on a GPU: a thousand steps equal to torch's, nothing waited for, graphs, AMP, torch.compile, streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import kernels
from gradvitals.bench import transformer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_given_up() -> None:
    yield
    assert not kernels._State.broken


def train(make, steps: int, run: Path | None = None, clip: float | None = None) -> list[torch.Tensor]:
    """A small language model on real gradients, two micro-batches a step."""
    torch.manual_seed(0)
    training = transformer(torch.device("cuda"), micro_batch_size=8)
    parameters = list(training.model.parameters())
    optimizer = make(parameters)
    config = gv.Config(tensor_every=1, quiet=True)
    monitor = gv.watch(training.model, optimizer, run=run, config=config) if run is not None else None
    for step in range(steps):
        optimizer.zero_grad()
        for inputs, targets in training.batches[step % len(training.batches)]:
            loss = training.loss(inputs, targets) / 2
            loss.backward()
        if monitor is not None:
            monitor.observe(loss)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    if monitor is not None:
        monitor.close()
        assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
    return [p.detach().clone() for p in parameters]


def test_a_thousand_steps_on_the_same_gradients_are_those_of_torch() -> None:
    """Gradients of a real model, given to both: training itself would multiply differences of rounding."""
    torch.manual_seed(0)
    training = transformer(torch.device("cuda"), micro_batch_size=2)
    ours = list(training.model.parameters())
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    one = gv.optim.AdamW(ours, lr=1e-3, max_norm=1.0)
    other = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    for step in range(1000):
        one.zero_grad()
        inputs, targets = training.batches[step % 8][0]
        training.loss(inputs, targets).backward()
        for mine, yours in zip(ours, theirs, strict=True):
            yours.grad = mine.grad.clone()
        nn.utils.clip_grad_norm_(theirs, 1.0)
        one.step()
        other.step()
    assert one.reports_vitals
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), yours.detach(), rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_watching_changes_no_bit(max_norm: float | None, tmp_path: Path) -> None:
    def make(parameters):
        return gv.optim.AdamW(parameters, lr=1e-3, max_norm=max_norm)

    plain = train(make, 6)
    for again in (train(make, 6), train(make, 6, run=tmp_path / "run")):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_readings_by_kernels_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    train(make, 4, run=tmp_path / "kernels", clip=1.0)
    monkeypatch.setattr(kernels, "on_device", lambda tensor: False)
    train(make, 4, run=tmp_path / "torch", clip=1.0)
    with gv.open_run(tmp_path / "kernels") as one, gv.open_run(tmp_path / "torch") as other:
        for metric in ("grad/norm", "grad/max", "grad/zero_fraction", "gsnr", "weight/norm", "gsnr/below_one_fraction"):
            found, expected = (torch.from_numpy(run.matrix(metric)[1]) for run in (one, other))
            atol = 0.05 if metric == "gsnr/below_one_fraction" else 1e-4  # which torch counts in a sample
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=atol, equal_nan=True, msg=metric)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # says torch
def test_a_watched_step_waits_for_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    training = transformer(torch.device("cuda"), micro_batch_size=2)
    optimizer = gv.optim.AdamW(training.model.parameters(), lr=1e-3, max_norm=1.0)
    monitor = gv.watch(training.model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))
    for step in range(6):
        optimizer.zero_grad()
        if step == 4:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for inputs, targets in training.batches[step]:
                loss = training.loss(inputs, targets)
                loss.backward()
            monitor.observe(loss)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    monitor.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_torchs_fused(dtype: torch.dtype) -> None:
    kept = []
    for make in (gv.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(300, 70, device="cuda", dtype=dtype))
        optimizer = make([parameter], lr=1e-2)
        for _ in range(20):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        kept.append(parameter.detach().float())
    torch.testing.assert_close(*kept, rtol=2e-2, atol=2e-2)


def test_a_gradient_scaler_is_served_as_by_torchs_fused() -> None:
    kept = []
    for make in (gv.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)):
        torch.manual_seed(0)
        model = nn.Linear(64, 32).cuda()
        optimizer = make(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=2)
        for step in range(8):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(16, 64, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            if step == 3:
                model.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        kept.append([model.weight.detach(), optimizer.state[model.weight]["step"].float().cpu(), scaler.get_scale()])
    assert kept[0][1] == kept[1][1] == 7
    assert kept[0][2] == kept[1][2]
    torch.testing.assert_close(kept[0][0], kept[1][0], rtol=1e-3, atol=1e-4)  # each has its own gradients


def test_a_step_in_a_cuda_graph() -> None:
    kept = []
    for captured in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((500, 40), (7,))]
        optimizer = gv.optim.AdamW(parameters, lr=1e-2, max_norm=1.0, capturable=True)
        static = [torch.zeros_like(p) for p in parameters]
        given = [[torch.randn_like(p) for p in parameters] for _ in range(6)]
        graph = torch.cuda.CUDAGraph()
        for step, values in enumerate(given):
            for place, value in zip(static, values, strict=True):
                place.copy_(value)
            for parameter, place in zip(parameters, static, strict=True):
                parameter.grad = place
            if captured and step == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    for parameter, place in zip(parameters, static, strict=True):
                        parameter.grad = place * 1.0  # elsewhere than in the steps before
                    optimizer.step()
            if captured and step >= 3:
                graph.replay()
            else:
                optimizer.step()
        torch.cuda.synchronize()
        kept.append([p.detach().clone() for p in parameters])
        assert int(optimizer.state[parameters[0]]["step"]) == 6
    for a, b in zip(*kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*script_method.*is deprecated:DeprecationWarning")  # used by torch's compiler
def test_torch_compile_leaves_the_step_as_it_is() -> None:
    parameter = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = gv.optim.AdamW([parameter], lr=1e-2, weight_decay=0.0)
    step = torch.compile(optimizer.step)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        step()
    assert optimizer.reports_vitals
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.98), rtol=1e-4, atol=1e-5)


def test_another_stream_is_followed() -> None:
    stream = torch.cuda.Stream()
    parameter = nn.Parameter(torch.ones(2_000_000, device="cuda"))
    optimizer = gv.optim.AdamW([parameter], lr=0.5, weight_decay=0.0, max_norm=1e9)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        result = parameter.detach().clone()
    stream.synchronize()
    torch.testing.assert_close(result, torch.full_like(result, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_read_as_float64_has_them(dtype: torch.dtype) -> None:
    from gradvitals.kernels.moments import BLOCK, SPAN, MomentReader

    torch.manual_seed(0)
    sizes = (7, 3000, SPAN, 300 * SPAN + 77)
    firsts = [(torch.randn(size, device="cuda") * torch.rand(size, device="cuda")).to(dtype) for size in sizes]
    seconds = [(torch.rand(size, device="cuda") + 0.5).to(dtype) for size in sizes]
    seconds[1][:100] = 0
    reader = MomentReader(sizes, firsts[0].device)
    sums = reader.sums(firsts, seconds, torch.full((len(sizes),), 0.5, device="cuda"))
    medians = reader.medians(firsts, seconds)
    assert torch.equal(medians, reader.medians(firsts, seconds))  # nothing is added in another order
    for column, (m, v) in enumerate(zip(firsts, seconds, strict=True)):
        m, v = m.double(), v.double()
        expected = torch.stack([m.norm(), v.sum(), (v > 0).sum(), ((m.square() < 0.5 * v) & (v > 0)).sum()])
        torch.testing.assert_close(sums[:, column], expected.double(), rtol=1e-5, atol=2.0)
        if len(m) >= SPAN:
            m, v = (torch.cat([part[:BLOCK] for part in x.split(SPAN)]) for x in (m, v))
        ratio = (m.square() / v)[v > 0]
        spacing = 0.13 if len(ratio) < 100 else 0.03
        torch.testing.assert_close(medians[column], ratio.quantile(0.5), rtol=spacing, atol=0)
