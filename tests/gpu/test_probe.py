from __future__ import annotations

import pytest
import torch
from torch import nn

import gradvitals as gv

pytestmark = pytest.mark.gpu


def model_and_batches(device: str) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    x = torch.randn(128, 16)
    return model, list(zip(x.split(16), (x[:, :5].argmax(1)).split(16), strict=True))


def test_everything_is_answered_and_nothing_moved() -> None:
    model, batches = model_and_batches("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.cuda.get_rng_state()
    found = gv.probe(model, batches, nn.CrossEntropyLoss(), 8, optimizer=optimizer, progress=False)
    assert found.about["questions"] == list(gv.probe.QUESTIONS), found.notes
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_same_numbers_as_on_a_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model, batches = model_and_batches(device)
        found.append(
            gv.probe(model, batches, nn.CrossEntropyLoss(), 8, questions=("signal", "samples"), progress=False)
        )
    cpu, gpu = found
    for here, there in zip(cpu.signal["tensors"], gpu.signal["tensors"], strict=True):
        if here["name"] != "0.bias":  # before batch norm its gradient is rounding
            assert there["gsnr"] == pytest.approx(here["gsnr"], rel=0.02, abs=0.01)
            assert there["norm"] == pytest.approx(here["norm"], rel=0.02)
    assert gpu.samples["norms"] == pytest.approx(cpu.samples["norms"], rel=0.02)
