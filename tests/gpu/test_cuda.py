"""The same run on a CPU and on a GPU reads the same, whatever implementation steps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradvitals as gv
from gradvitals.bench import transformer
from gradvitals.demo import CharLM, CharLMConfig

pytestmark = pytest.mark.gpu

STEPS = 12
METRICS = ("loss", "grad/norm", "grad/max", "grad/zero_fraction", "weight/norm", "update/norm")


def train(path: Path, device: str, **options: Any) -> gv.Run:
    torch.manual_seed(0)
    model = CharLM(CharLMConfig(vocab_size=50, context=16, d_model=64, n_layer=2, n_head=4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    generator = torch.Generator().manual_seed(1)
    busy = torch.randn(4096, 4096, device=device) if device == "cuda" else None
    with gv.watch(model, optimizer, run=path, batch_size=16, config=gv.Config(tensor_every=1, quiet=True)) as monitor:
        for _ in range(STEPS):
            for _ in range(2):
                tokens = torch.randint(50, (8, 17), generator=generator).to(device)
                loss = model(tokens[:, :-1], tokens[:, 1:])
                (loss / 2).backward()
            monitor.observe(loss)
            if busy is not None:  # the device lags far behind the host: nothing may be read before it has arrived
                for _ in range(20):
                    busy = (busy @ busy).clamp(-1, 1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert not [finding for finding in monitor.findings if finding.severity != "info"]
    return gv.open_run(path)


WAYS = ({"foreach": True}, {"fused": True}, {"foreach": True, "capturable": True})


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_gpu_reads_what_a_cpu_reads(tmp_path: Path, options: dict[str, bool]) -> None:
    with train(tmp_path / "cpu", "cpu") as cpu, train(tmp_path / "gpu", "cuda", **options) as gpu:
        for metric in METRICS:
            # A product may be exactly zero on one device and not on the other: a few elements in a hundred thousand.
            loose = 1e-3 if metric == "grad/zero_fraction" else 0.0
            ours, theirs = gpu.series(metric)[1], cpu.series(metric)[1]
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=loose, err_msg=metric)
        for kind in ("tensors", "layers", "heads"):
            ours, theirs = (run.matrix("gsnr", kind=kind, source="microbatch")[1] for run in (gpu, cpu))
            np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2, err_msg=kind)
        ours, theirs = (run.matrix("gsnr", source="adam")[1] for run in (gpu, cpu))
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_broken_gradient_that_the_loop_throws_away_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for batch in range(60):
            loss = torch.sqrt(model(torch.randn(4, 4, device="cuda")).square().sum() * (batch != 30))
            loss.backward()
            monitor.observe(loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
    [finding] = [finding for finding in monitor.findings if finding.id == "batches_given_up"]
    assert (finding.severity, finding.first_step) == ("warning", 30)
    assert "with a gradient norm of NaN" in finding.title
    with gv.open_run(monitor.run_path) as run:
        assert run.series("batches/given_up_loss")[1].tolist() == [0.0]
        assert np.isnan(run.series("batches/given_up_norm")[1]).all()


def test_fp16_with_a_scaler(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CharLM(CharLMConfig(vocab_size=50, context=16, d_model=64, n_layer=2, n_head=4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20)
    norms = []
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True)) as monitor:
        for _ in range(STEPS):
            tokens = torch.randint(50, (8, 17)).cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            grads = [p.grad.double() / scale for p in model.parameters()]
            norms.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    with gv.open_run(monitor.run_path) as run:
        np.testing.assert_allclose(run.series("grad/norm")[1], norms, rtol=1e-4)
        skipped = run.series("step/skipped")[1]
        np.testing.assert_array_equal(skipped, ~np.isfinite(norms))
        assert run.stage("grad/norm")[1][-1] == "unscaled"


@pytest.mark.parametrize("every", [1, 50])
def test_a_monitored_step_never_waits_for_the_device(every: int, tmp_path: Path) -> None:
    config = gv.Config(tensor_every=every, quiet=True)
    training = transformer(torch.device("cuda"), micro_batch_size=4)
    for _ in range(10):
        training.step()
    with gv.watch(training.model, training.optimizer, run=tmp_path / "run", config=config) as monitor:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):
                training.step(monitor.observe)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        monitor.flush()
    # The monitor catches its own errors, those of a wait among them.
    assert [finding for finding in monitor.findings if finding.id == "monitor_error"] == []
