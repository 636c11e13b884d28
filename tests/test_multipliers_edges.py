"""Multipliers on real models: frozen, in half precision, with norms and embeddings, and groups of all kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradvitals as gv
from gradvitals import multipliers
from gradvitals.errors import ConfigError, GradvitalsError


class Seeing(nn.Module):
    """A class token, a table of positions, a norm over two dimensions, a frozen layer, a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(3, 4))
        self.norm, self.frozen = nn.LayerNorm((3, 4)), nn.Linear(4, 4)
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.norm(x + self.positions + self.token))
        return self.head(self.attend(x, x, x)[0])


def test_default_chooses_only_trained_matrices() -> None:
    model = Seeing()
    assert multipliers.attach(model) == ("attend.in_proj_weight", "attend.out_proj.weight", "head.weight")


def test_multipliers_stay_in_float32_in_a_bfloat16_model() -> None:
    model = nn.Linear(3, 4)
    multipliers.attach(model, kind="both")
    with torch.no_grad():
        model.parametrizations.weight[0].row.fill_(1.001)
    model.bfloat16()
    assert model.parametrizations.weight.original.dtype == torch.bfloat16
    assert {p.dtype for _, p in multipliers.named_multipliers(model)} == {torch.float32}
    assert float(model.parametrizations.weight[0].row[0].detach()) == pytest.approx(1.001, rel=1e-6)
    assert model(torch.ones(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model.double()
    assert {p.dtype for _, p in multipliers.named_multipliers(model)} == {torch.float64}


@pytest.mark.parametrize("kind", ["groups", "named groups", "parameters", "named"])
def test_param_groups_takes_what_an_optimizer_takes(kind: str) -> None:
    model = nn.Linear(3, 4)
    multipliers.attach(model)
    given = {
        "groups": [{"params": model.parameters(), "lr": 0.3}],
        "named groups": [{"params": list(model.named_parameters())}],
        "parameters": model.parameters(),
        "named": model.named_parameters(),
    }[kind]
    groups = multipliers.param_groups(model, given)
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert optimizer.param_groups[1]["weight_decay"] == 2e-3
    if "named" in kind:
        assert optimizer.param_groups[1]["param_names"] == ["parametrizations.weight.0.scale"]


def test_mixing_groups_and_parameters_raises() -> None:
    model = nn.Linear(3, 4)
    with pytest.raises(ConfigError, match="expected one or the other"):
        multipliers.param_groups(model, [{"params": [model.weight]}, model.bias])


def test_multipliers_before_a_batch_norm_raise_no_finding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    multipliers.attach(model, where="^0", kind="both")
    batches = [(torch.randn(16, 6), torch.randn(16, 1)) for _ in range(5)]
    found = gv.probe(model, batches, nn.MSELoss(), 5, questions="signal", progress=False)
    told = [item for item in found.verdict if "vanish" in item["title"]]
    assert [item["names"] for item in told] == [["0.parametrizations.weight.0.row"]]
    assert told[0]["severity"] == "info"


def test_probe_reports_an_optimizer_without_the_multipliers() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    multipliers.attach(model)
    batches = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(2)]
    found = gv.probe(model, batches, nn.MSELoss(), optimizer=optimizer, questions=["signal", "samples"], progress=False)
    assert found.samples is not None  # a scalar has its own gradient for each example
    assert any("leaves out parametrizations.weight.0.scale" in note for note in found.notes)


def test_other_weights_can_be_attached_after_the_head() -> None:
    model = Seeing()
    multipliers.attach(model, where=["head.weight"], kind="column")
    assert multipliers.attach(model, kind="both") == ("attend.in_proj_weight", "attend.out_proj.weight")
    with pytest.raises(GradvitalsError, match="has a parametrization already"):
        multipliers.attach(model, where=["head.weight"])
