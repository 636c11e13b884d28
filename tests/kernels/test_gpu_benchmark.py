"""What `python -m benchmarks.gpu` times computes what it claims, in the interpreter, where times mean nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import gpu
from benchmarks.gpu import PAIRS, format_gpu, moments_works
from gradvitals.kernels.vrgd import Adding

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def parameters(device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((6, 5), (4,))]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def test_every_part_of_a_variance_reduced_step_runs_and_has_its_bytes(device: torch.device) -> None:
    some = parameters(device)
    works = gpu.passes(some)
    assert works.keys() == gpu.BYTES.keys()
    for name, work in works.items():
        before = [[p.detach().clone(), p.grad.clone()] for p in some]
        work()
        moved = [not torch.equal(p.detach(), old) for p, (old, _) in zip(some, before, strict=True)]
        added = [not torch.equal(p.grad, old) for p, (_, old) in zip(some, before, strict=True)]
        assert set(moved) == {name == "VRAdamW, its two passes"}
        assert set(added) == {name in ("torch foreach add", "VRGD, second part", "VRGD, later parts")}


def test_whole_steps_are_compared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[bool] = []
    original = Adding.add

    def add(self, *tensors, **settings):
        added.append(settings["added"])
        return original(self, *tensors, **settings)

    def once(works, rounds, repeats):
        for work in [*works.values()] * 2:
            work()
        return {"fused": 2.0, "fused, whole": 5.0, "vr, whole": 6.0}

    monkeypatch.setattr(Adding, "add", add)
    found = gpu.time_steps(lambda: parameters(device), 3, 1, once, lambda work: (7, 3.0))
    assert found["ratio"] == pytest.approx(1.5)
    assert found["kernels_ratio"] == pytest.approx(1.0)
    assert found["launches"] == {"fused": 7, "vr": 7}
    # The first comparison makes the places; from then on autograd adds nothing.
    assert added[0]
    assert not any(added[1:])


def test_readings_of_moments_agree_with_torchs(device: torch.device) -> None:
    firsts, seconds = ([p.detach().abs() for p in parameters(device)] for _ in range(2))
    works = moments_works(firsts, seconds)
    norms, sums = works["torch foreach norms of moments"]()
    found = works["moments"]()
    torch.testing.assert_close(found[:2].float(), torch.stack([torch.stack(norms), torch.stack(sums)]))
    assert works["medians of moments"]().isfinite().all()


def test_the_result_is_shown_as_it_was_measured() -> None:
    work = {"ms": 2.0, "bytes_per_parameter": 4, "share_of_copy": 0.5, "launches": 2}
    names = [name for pair in PAIRS for name in pair]
    step = {"ms": 75.0, "host_ms": 70.0, "ratio": 0.99, "ratio_low": 0.98, "ratio_high": 1.01}
    reduced = {"k": 2, "kernels_ms": 1.5, "kernels_ratio": 1.4, "vr_ms": 3.0, "ratio": 2.9, "fused_ms": 1.0}
    shape = {"parameters": 10**9, "tensors": 3, "works": dict.fromkeys(names, work)}
    result = {
        "machine": "a GPU",
        "torch": "2",
        "triton": "3",
        "date": "today",
        "rounds": 1,
        "copy_bytes_per_second": 4e12,
        "shapes": {"gpt": shape | {"from_idle_ms": dict.fromkeys(names, 3.0)}},
        "small": {"statistics": {"from_idle_ms": 0.5, "launches": 2}},
        "vr": [reduced | {"launches": {"vr": 24, "fused": 175}}],
        "training": {"gpt": {"micro_batches": 2, "variants": {"bare": step}}},
    }
    lines = [" ".join(line.replace("|", " ").split()) for line in format_gpu(result).splitlines()]
    assert f"{names[0]} 2.000 4 1.000 50 % 2" in lines  # 4 GB at 4 TB a second
    assert f"{names[0]} / {names[1]}: 1.00 on the device, 1.00 from idle (3.00 and 3.00 ms)" in lines
    assert "statistics 0.500 2" in lines
    assert any("kernels of 1.50 ms, 1.40 × torch's fused AdamW; 3.00 ms, 2.90 ×" in line for line in lines)
    assert "bare 75.00 70.00 0.9900 [0.9800, 1.0100]" in lines
