"""What `gradvitals bench gpu` times does what it says: in the interpreter, where no time means anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradvitals.kernels.adding import Adding
from gradvitals.lab import gpu_vr
from gradvitals.lab.gpu import moments_works

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def parameters(device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((6, 5), (4,))]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def test_every_part_of_a_variance_reduced_step_runs_and_has_its_bytes(device: torch.device) -> None:
    some = parameters(device)
    works = gpu_vr.passes(some)
    assert works.keys() == gpu_vr.BYTES.keys()
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
    found = gpu_vr.time_steps(lambda: parameters(device), 3, 1, once, lambda work: (7, 3.0))
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
