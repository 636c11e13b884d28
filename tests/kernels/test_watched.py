"""A Monitor reads the same by kernels as by torch, and does not read again what AdamW's vitals report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import kernels
from gradvitals.collect import moments
from gradvitals.kernels import reductions
from gradvitals.worker.record import Context

# The interpreter computes with numpy, which warns about results that are valid on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

STEPS = 3


class Attention(nn.Module):
    """Two heads of 16 over a fused qkv weight, so that heads are read too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(inputs).chunk(3, dim=-1)
        return self.out(torch.tanh(q) * k + v)


def train(make, run: Path | None, device: torch.device, clip: bool = False) -> tuple[list[torch.Tensor], object]:
    torch.manual_seed(0)
    model = Attention().to(device)
    optimizer = make(model.parameters())
    config = gv.Config(tensor_every=1, quiet=True)
    monitor = gv.watch(model, optimizer, run=run, config=config, batch_size=8) if run is not None else None
    data = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            inputs = torch.randn(4, 32, generator=data).to(device)
            loss = model(inputs).square().mean() / 2
            loss.backward()
        if monitor is not None:
            monitor.observe(loss)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    if monitor is not None:
        monitor.close()
        assert not [finding for finding in monitor.findings if finding.id == "monitor_error"]
    return [p.detach().clone() for p in model.parameters()], monitor


def everything(run: Path) -> dict[tuple[str, str, str | None], np.ndarray]:
    found = {}
    with gv.open_run(run) as kept:
        for kind in ("tensors", "layers", "heads"):
            for metric in kept.metrics(kind):
                for source in kept.sources(metric, kind) or [None]:
                    found[kind, metric, source] = kept.matrix(metric, kind, source=source)[1]
    return found


def compare(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert {("heads", "gsnr", "microbatch"), ("tensors", "radial_gsnr", "microbatch")} <= found.keys()
    assert np.isfinite(found["tensors", "gsnr/median", "adam"][-1]).all()
    for key, values in expected.items():
        atol = 0.01 if key[1] == "gsnr/median" else 1e-6  # kernels find it in bins
        np.testing.assert_allclose(found[key], values, rtol=2e-4, atol=atol, err_msg=str(key))


MAKERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "ours": lambda params: gv.optim.AdamW(params, lr=1e-2),
    "ours, clipping": lambda params: gv.optim.AdamW(params, lr=1e-2, max_norm=0.1),
}


def by_torch(monkeypatch: pytest.MonkeyPatch, *args, **kwargs):
    """The same without kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "on_device", lambda tensor: False)
        patch.setattr(moments, "SHARE_ELEMENTS", 10_000)  # otherwise torch reads a sample
        return train(*args, **kwargs)


@pytest.mark.parametrize("name", ["torch", "ours, clipping"])
def test_readings_match_torch(name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    train(MAKERS[name], tmp_path / "kernels", device)
    by_torch(monkeypatch, MAKERS[name], tmp_path / "torch", device)
    compare(everything(tmp_path / "kernels"), everything(tmp_path / "torch"))


def test_gradients_are_read_before_clipping(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(MAKERS["ours"], tmp_path / "kernels", device, clip=True)
    by_torch(monkeypatch, MAKERS["ours"], tmp_path / "torch", device, clip=True)
    compare(everything(tmp_path / "kernels"), everything(tmp_path / "torch"))


def test_watching_changes_no_bit(tmp_path: Path, device: torch.device) -> None:
    plain, _ = train(MAKERS["ours, clipping"], None, device)
    watched, _ = train(MAKERS["ours, clipping"], tmp_path / "run", device)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_vitals_of_the_optimizer_are_not_read_again(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step, only micro-batches are read in a separate pass."""
    reads: list[bool] = []
    original = reductions.Reader.read

    def counted(self, tensors, **options):
        reads.append(options.get("others") is not None)  # only micro-batches are read beside their weights
        return original(self, tensors, **options)

    monkeypatch.setattr(reductions.Reader, "read", counted)
    train(MAKERS["ours"], tmp_path / "run", device)
    assert reads.count(True) == 2 * STEPS
    assert reads.count(False) <= 4  # the first step
    with gv.open_run(tmp_path / "run") as kept:
        assert np.isfinite(kept.matrix("update/norm")[1]).all()


def test_failed_kernels_fall_back_to_torchs_readings(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(reductions, "chunk_sums", fail)
    with pytest.warns(UserWarning, match="no compiler"):
        train(MAKERS["torch"], tmp_path / "run", device)
    assert kernels._State.broken == {"reductions": "no compiler"}
    kernels._State.broken.clear()
    with gv.open_run(tmp_path / "run") as kept:
        assert np.isfinite(kept.matrix("grad/norm")[1]).all()


def test_a_context_is_not_sent_with_every_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Parameters without a gradient at some steps, as experts are, change nothing that a step must describe again."""
    sent: list[Context] = []
    encode = Context.to_bytes
    monkeypatch.setattr(Context, "to_bytes", lambda context: (sent.append(context), encode(context))[1])
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    optimizer = gv.optim.AdamW(experts.parameters(), lr=1e-3)
    config = gv.Config(tensor_every=1, worker="thread", quiet=True)
    with gv.watch(experts, optimizer, run=tmp_path / "run", config=config) as monitor:
        for step in range(12):
            optimizer.zero_grad()
            loss = experts[step % 3](torch.randn(8, 4, device=device)).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    assert len(sent) <= 3  # one expert after the other has its first reading
    with gv.open_run(tmp_path / "run") as run:
        assert len(run.series("update/norm")[0]) == 12
