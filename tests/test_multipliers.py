"""Attaching and merging learnable multipliers changes no output, and they learn in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gradvitals as gv
from gradvitals import multipliers
from gradvitals.diagnose import RunInfo
from gradvitals.errors import ConfigError, GradvitalsError
from gradvitals.multipliers import Kind
from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading, TensorInfo

KINDS: tuple[Kind, ...] = ("scalar", "row", "column", "both")


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mix(self.embed(tokens))))
        return out


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))


INPUTS = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def stir(model: nn.Module) -> None:
    """Give every multiplier its own value."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in multipliers.named_multipliers(model):
            parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_attach_and_merge_keep_outputs_bit_for_bit(kind: Kind) -> None:
    model = small()
    before = model(INPUTS)
    weights = dict(model.named_parameters())
    assert gv.multipliers.attach(model, kind=kind) == ("0.weight", "2.weight", "4.weight")
    assert torch.equal(model(INPUTS), before)
    stir(model)
    stirred = model(INPUTS)
    assert not torch.equal(stirred, before)
    assert multipliers.merge(model) == ("0.weight", "2.weight", "4.weight")
    assert torch.equal(model(INPUTS), stirred)
    assert dict(model.named_parameters()) == weights  # the same objects under the same names
    assert type(model[2]) is nn.Linear
    assert not model[2]._load_state_dict_pre_hooks


@given(st.sampled_from(KINDS), st.integers(0, 2**31 - 1), st.sampled_from([torch.float64, torch.bfloat16]))
@settings(max_examples=20, deadline=None)
def test_gradient_matches_the_formula(kind: Kind, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(3, 4, bias=False, dtype=dtype)
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    multipliers.attach(layer, kind=kind)
    stir(layer)
    pull = torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype)
    (layer.weight * pull).sum().backward()
    parts = {name.rsplit(".", 1)[1]: part for name, part in multipliers.named_multipliers(layer)}
    exact = {name: part.detach().double() for name, part in parts.items()}
    r, c = exact.get("row", torch.ones(4, 1)), exact.get("column", torch.ones(1, 3))
    w, g = weight.double(), pull.double()
    wanted = {
        "scale": (w * g).sum(),
        "row": (w * c * g).sum(1, keepdim=True),
        "column": (r * w * g).sum(0, keepdim=True),
    }
    for name, part in parts.items():
        assert part.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert part.grad is not None
        close = 1e-12 if dtype == torch.float64 else 0.1
        torch.testing.assert_close(part.grad.double(), wanted[name], rtol=close, atol=close)
    assert layer.weight.dtype == dtype


def test_where_takes_a_pattern_names_or_a_function() -> None:
    chosen: list[tuple[object, tuple[str, ...]]] = [
        ("^2", ("2.weight",)),
        (["4.weight", "0.weight"], ("4.weight", "0.weight")),
        (multipliers.Suggestion(names=("2.weight",)), ("2.weight",)),
        (lambda name, weight: weight.dim() == 1 and name.startswith("2"), ("2.bias",)),
    ]
    for where, names in chosen:
        assert multipliers.attach(small(), where=where) == names  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ("nothing", "scalar", "chooses no parameter"),
        (["9.weight"], "scalar", "'9.weight'"),
        (["2.bias"], "row", "two dimensions"),
        (None, "rows", "scalar, row, column, both"),
    ],
)
def test_invalid_choices_raise(where: object, kind: str, words: str) -> None:
    model = small()
    with pytest.raises(GradvitalsError, match=words):
        multipliers.attach(model, where=where, kind=kind)  # type: ignore[arg-type]
    assert not list(multipliers.named_multipliers(model))


@pytest.mark.parametrize("where", [["embed.weight"], ["head.weight"], "head"])
def test_tied_weights_stay_tied(where: object) -> None:
    model = Tied()
    tokens = torch.tensor([[0, 3, 6]])
    names = multipliers.attach(model, where=where, kind="column")  # type: ignore[arg-type]
    assert names == ("embed.weight",)
    assert len(list(multipliers.named_multipliers(model))) == 1
    stir(model)
    assert torch.equal(model.embed.weight, model.head.weight)
    out = model(tokens)
    out.sum().backward()
    multipliers.merge(model)
    assert model.embed.weight is model.head.weight
    assert torch.equal(model(tokens), out)


def test_embeddings_and_tied_weights_are_chosen_only_by_name() -> None:
    assert multipliers.attach(Tied()) == ("mix.weight",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [small, Tied])
def test_checkpoints_load_both_ways(kind: Kind, make: Callable[[], nn.Module]) -> None:
    plain, fresh, other = make(), make(), make()
    everything = [name for name, parameter in plain.named_parameters() if parameter.dim() > 1]
    multipliers.attach(fresh, where=everything, kind=kind)
    stir(fresh)
    inputs = INPUTS if make is small else torch.tensor([[1, 2]])
    multiplied = fresh(inputs)
    saved = copy.deepcopy(fresh.state_dict())
    # with multipliers -> without
    other.load_state_dict(multipliers.plain_state_dict(saved))
    assert torch.equal(other(inputs), multiplied)
    # without -> with: they start at 1
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(fresh(inputs), plain(inputs))
    assert all((part == 1).all() for _, part in multipliers.named_multipliers(fresh))
    # with -> with
    fresh.load_state_dict(saved)
    assert torch.equal(fresh(inputs), multiplied)
    # with -> with others
    others = make()
    multipliers.attach(others, where=everything, kind="row" if kind != "row" else "scalar")
    others.load_state_dict(saved)
    assert torch.equal(others(inputs), multiplied)
    assert set(saved) == set(fresh.state_dict())


def test_copied_model_has_its_own_multipliers() -> None:
    model = small()
    multipliers.attach(model)
    twin = copy.deepcopy(model)
    stir(twin)
    merged = twin(INPUTS)
    multipliers.merge(twin)
    assert torch.equal(twin(INPUTS), merged)
    assert len(list(multipliers.named_multipliers(model))) == 3
    model.load_state_dict(small().state_dict())  # its hooks are still there
    assert torch.equal(model(INPUTS), small()(INPUTS))


def test_multipliers_have_their_own_weight_decay() -> None:
    model = small()
    multipliers.attach(model, kind="both")
    mine = [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model[2:].parameters())}]
    for groups, count in ((None, 2), (mine, 3)):
        optimizer = torch.optim.AdamW(multipliers.param_groups(model, groups), lr=1e-3, weight_decay=0.1)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1] * (count - 1) + [2e-3]
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(held) == sorted(map(id, model.parameters()))
        assert len(optimizer.param_groups[-1]["params"]) == 6
    assert len(multipliers.param_groups(small())) == 1


def test_multipliers_are_not_part_of_the_clip_norm() -> None:
    model = small()
    multipliers.attach(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    others = multipliers.without_multipliers(model)
    count = sum(parameter.numel() for parameter in others)
    norm = multipliers.clip_grad_norm_(model, 1.0)
    assert float(norm) == pytest.approx(count**0.5)
    assert all(part.grad is not None and part.grad == 1 for _, part in multipliers.named_multipliers(model))
    clipped = sum(float(p.grad.square().sum()) for p in others if p.grad is not None)
    assert clipped == pytest.approx(1.0, rel=1e-4)


def test_compiled_model_computes_and_learns_the_same() -> None:
    grads = []
    for compiled in (False, True):
        model = small()
        multipliers.attach(model, kind="both")
        stir(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        F.mse_loss(run(INPUTS), torch.ones(6, 2)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for eager, made in zip(*grads, strict=True):
        torch.testing.assert_close(eager, made)


def test_multiplier_finds_the_scale_that_noise_hides_from_a_matrix() -> None:
    """AdamW on a gradient that is nearly all noise: noise sets the norm of the matrix, the loss that of s W."""
    generator = torch.Generator().manual_seed(0)
    lr, decay, side, wanted = 0.02, 0.5, 48, 0.5
    noise_rms = (lr / (2 * decay)) ** 0.5
    reached = []
    for with_multiplier in (False, True):
        layer = nn.Linear(side, side, bias=False)
        direction = torch.randn(side, side, generator=generator)
        with torch.no_grad():
            layer.weight.copy_(noise_rms * direction)
        if with_multiplier:
            multipliers.attach(layer)
        optimizer = torch.optim.AdamW(multipliers.param_groups(layer), lr=lr, weight_decay=decay)
        for _ in range(600):
            weight = layer.weight
            noise = torch.randn(side, side, generator=generator)
            # The loss pulls the norm to where it wants it, by a radial force far below the noise of one element.
            rms = weight.square().mean().sqrt()
            loss = 0.05 * weight.numel() * (rms - wanted).square() + (weight * noise).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached.append(float(layer.weight.detach().square().mean().sqrt()))
    assert reached[0] == pytest.approx(noise_rms, rel=0.25)
    assert reached[1] == pytest.approx(wanted, rel=0.25)


# -- suggestions ---------------------------------------------------------------------------------------------------


def write_norms(path: Path, norms: np.ndarray, lr: np.ndarray, facts: RunInfo, every: int = 50) -> Path:
    """A run with these norms, one column per tensor; the last tensor is a vector."""
    shapes = [(16, 16)] * (norms.shape[1] - 1) + [(16,)]
    tensors = tuple(
        TensorInfo(index=i, name=f"layer{i}.weight", shape=shape, dtype="float32", layer=f"layer{i}", depth=i)
        for i, shape in enumerate(shapes)
    )
    with RunWriter(path, meta={"facts": facts.to_json()}) as writer:
        writer.write(Layout(tensors=tensors, layers=tuple(info.layer for info in tensors)))
        for step in range(len(lr)):
            full = {"weight/norm": norms[step]} if step % every == 0 else {}
            writer.write(Reading(step=step, time=float(step), values={"lr": float(lr[step])}, tensors=full))
        writer.commit()
    return path


ADAMW = RunInfo(optimizer="AdamW", betas=(0.9, 0.999), weight_decay=0.5)


def norms_of_noise(lr: np.ndarray, decay: float, start: float) -> np.ndarray:
    """RMS by the recursion, written out."""
    squares = [start**2]
    for rate in lr[:-1]:
        squares.append((1 - rate * decay) ** 2 * squares[-1] + 0.98 * rate**2)  # with momentum, about
    return np.sqrt(np.array(squares))


def test_suggest_finds_matrices_with_the_norm_of_noise(tmp_path: Path) -> None:
    lr = np.full(1200, 5e-3)
    noise = 16 * norms_of_noise(lr, 0.5, 0.02)
    path = write_norms(tmp_path / "run", np.stack([1.03 * noise, 1.5 * noise, noise, noise / 4], axis=1), lr, ADAMW)
    found = multipliers.suggest(path)
    assert found.names == ("layer0.weight", "layer2.weight")
    # of the second reading on only: both begin at the norm that the walk then starts from
    assert found.ratios["layer1.weight"] == pytest.approx(1.5, rel=0.02)
    assert "2 of 3" in str(found)
    with gv.open_run(path) as run:
        assert multipliers.suggest(run) == found


@pytest.mark.parametrize(
    ("facts", "steps", "words"),
    [
        (RunInfo(optimizer="SGD", weight_decay=0.1), 400, "the optimizer is SGD"),
        (RunInfo(optimizer="AdamW", weight_decay=0.0), 400, "weight decay 0.0"),
        (ADAMW, 60, "cannot tell yet"),
    ],
)
def test_suggest_explains_why_it_cannot_tell(tmp_path: Path, facts: RunInfo, steps: int, words: str) -> None:
    lr = np.full(steps, 5e-3)
    norms = np.stack([16 * norms_of_noise(lr, 0.5, 0.02)] * 3, axis=1)
    found = multipliers.suggest(write_norms(tmp_path / "run", norms, lr, facts))
    assert not found.names
    assert words in found.reason


class TwoParts(nn.Module):
    """One matrix has something to learn; the other's gradient is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.learns = nn.Linear(16, 16, bias=False)
        self.drifts = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        loss = 10 * F.mse_loss(self.learns(x), wanted)
        return loss + (self.drifts(x) * torch.randn(len(x), 16)).mean()


def test_live_run_reports_the_drifting_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoParts()
    truth = torch.randn(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=10, quiet=True)):
        for _ in range(400):
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            model(x, x @ truth).backward()
            optimizer.step()
    found = multipliers.suggest(tmp_path / "run")
    assert found.names == ("drifts.weight",)
    assert found.ratios["learns.weight"] > 2
    with gv.open_run(tmp_path / "run") as run:
        trapped = [finding for finding in run.findings if finding.id == "trapped_scale"]
    assert [finding.tensors for finding in trapped] == [("drifts.weight",)]
    assert multipliers.attach(model, where=found) == ("drifts.weight",)


def test_watched_multiplier_gets_no_suggestion(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoParts()
    multipliers.attach(model, kind="both")
    optimizer = torch.optim.AdamW(multipliers.param_groups(model), lr=2e-2, weight_decay=1.0)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=10, quiet=True)):
        for _ in range(150):
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            model(x, x).backward()
            multipliers.clip_grad_norm_(model, 1.0)
            optimizer.step()
    assert multipliers.suggest(tmp_path / "run").names == ()
    with gv.open_run(tmp_path / "run") as run:
        assert "drifts.parametrizations.weight.0.row" in [info.name for info in run.tensors]
        assert "trapped_scale" not in [finding.id for finding in run.findings]


# -- real models: frozen, in half precision, with norms and embeddings -----------------------------------------


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
