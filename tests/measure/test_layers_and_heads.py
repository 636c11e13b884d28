"""How tensors are grouped: layers in depth order, attention heads of every common make."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import Data, Rig, Transformer, finished, head_masks, next_token, regression
from torch import Tensor, nn

import gradvitals as gv

WIDTH, HEADS = 8, 2


class Conv1D(nn.Module):
    """A linear layer stored the other way round, as in transformers' GPT-2."""

    def __init__(self, out: int, inside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, out) * 0.3)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    """An attention module under test between an embedding and a head; only gradients matter, not attention."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.attn = attn
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if isinstance(self.attn, nn.MultiheadAttention):
            return self.head(x + self.attn(x, x, x, need_weights=False)[0])
        return self.head(x + self.attn(x))


class Parts(nn.Module):
    """Children by name, their outputs multiplied and summed in a way that lets every element have a gradient."""

    def __init__(self, children: dict[str, nn.Module], **attributes: Any) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        total = 0.0
        for child in self.children():
            y = torch.tanh(child(x))
            total = total + (y * torch.arange(1, y.shape[-1] + 1)).cumsum(-1)[..., :1] * 0.1
        return total


def train(path: Path, model: nn.Module, heads: dict[str, dict[str, np.ndarray]] | None, **settings: Any) -> Rig:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    rig = Rig(path, model, optimizer, loss=next_token, data=Data(kind="tokens"), heads=heads, **settings)
    # Some gradients are zero but for rounding (keys' bias), and cancel in float32.
    rig.steps(3).check(skip=("grad/zero_fraction",), rtol=1e-4)
    return rig


def expected(count: int, tensors: dict[str, tuple[Tensor, int, str]]) -> dict[str, dict[str, np.ndarray]]:
    masks = {name: head_masks(w, count, parts, layout=layout) for name, (w, parts, layout) in tensors.items()}
    return {f"attn/head{h}": {name: masks[name][h] for name in tensors} for h in range(count)}


def heads_of(rig: Rig) -> tuple[str, ...]:
    with gv.open_run(rig.monitor.run_path) as run:
        return run.heads


def test_multihead_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    weight = model.attn.in_proj_weight
    rig = train(tmp_path, model, expected(HEADS, {"attn.in_proj_weight": (weight, 3, "stacked")}))
    assert heads_of(rig) == ("attn/head0", "attn/head1")


def test_multihead_attention_with_separate_projections(tmp_path: Path) -> None:
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=6, batch_first=True)

    class Cross(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.head(x + self.attn(x, x[..., :6], x[..., :6], need_weights=False)[0])

    model = Cross(attn)
    tensors = {f"attn.{n}_proj_weight": (getattr(attn, f"{n}_proj_weight"), 1, "stacked") for n in "qkv"}
    train(tmp_path, model, expected(HEADS, tensors))


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        *((name, "stacked", "num_heads") for name in ("qkv", "Wqkv", "in_proj", "c_attn", "to_qkv")),
        ("c_attn", "transposed", "num_heads"),
        ("query_key_value", "interleaved", "num_attention_heads"),
    ],
)
def test_fused_projection(tmp_path: Path, name: str, layout: str, count: str) -> None:
    torch.manual_seed(0)
    fused = Conv1D(3 * WIDTH, WIDTH) if layout == "transposed" else nn.Linear(WIDTH, 3 * WIDTH)
    model = Model(Parts({name: fused}, **{count: HEADS}))
    train(tmp_path, model, expected(HEADS, {f"attn.{name}.weight": (fused.weight, 3, layout)}))


@pytest.mark.parametrize("trio", [("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv")])
def test_separate_projections(tmp_path: Path, trio: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    parts = {name: nn.Linear(WIDTH, WIDTH) for name in trio}
    model = Model(Parts(parts, n_heads=HEADS))
    train(tmp_path, model, expected(HEADS, {f"attn.{n}.weight": (p.weight, 1, "stacked") for n, p in parts.items()}))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_leave_shared_keys_and_values_out(tmp_path: Path, kv_heads: int) -> None:
    """4 query heads of 4; keys and values are shared and belong to no single head, though 4 divides them."""
    torch.manual_seed(0)
    q, k, v = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 4 * kv_heads), nn.Linear(WIDTH, 4 * kv_heads)
    model = Model(Parts({"q_proj": q, "k_proj": k, "v_proj": v}, num_heads=4, num_key_value_heads=kv_heads))
    rig = train(tmp_path, model, expected(4, {"attn.q_proj.weight": (q.weight, 1, "stacked")}))
    with gv.open_run(rig.monitor.run_path) as run:
        split = {info.name: info.heads for info in run.tensors if info.heads}
    assert split == {"attn.q_proj.weight": 4}


def test_fused_grouped_queries_are_not_split_as_if_all_had_their_own_keys(tmp_path: Path) -> None:
    """(4 + 1 + 1) x 4 rows divide by 3 x 4, but a third of them is not q."""
    torch.manual_seed(0)
    fused = nn.Linear(WIDTH, 24)
    model = Model(Parts({"qkv_proj": fused}, num_heads=4, num_key_value_heads=1))
    assert heads_of(train(tmp_path, model, None)) == ()


def test_head_count_from_the_model_config(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fused = nn.Linear(WIDTH, 3 * WIDTH)
    model = Model(Parts({"qkv": fused}))
    model.config = SimpleNamespace(num_attention_heads=4)
    train(tmp_path, model, expected(4, {"attn.qkv.weight": (fused.weight, 3, "stacked")}))


@pytest.mark.parametrize("heads", [4, {"attn": 4}])
def test_head_count_from_the_user_goes_first(tmp_path: Path, heads: Any) -> None:
    torch.manual_seed(0)
    fused = nn.Linear(WIDTH, 3 * WIDTH)
    model = Model(Parts({"qkv": fused}, num_heads=HEADS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    truth = expected(4, {"attn.qkv.weight": (fused.weight, 3, "stacked")})
    config = gv.Config(tensor_every=1, quiet=True, heads=heads)
    rig = Rig(tmp_path, model, optimizer, loss=next_token, data=Data(kind="tokens"), heads=truth)
    rig.monitor.close()
    rig.monitor = gv.watch(model, optimizer, run=tmp_path / "other", config=config, batch_size=12)
    rig.steps(3).check(skip=("grad/zero_fraction",), rtol=1e-4)


def test_heads_turned_off(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, heads=0)) as monitor:
        for _ in range(2):
            next_token(model, Data(kind="tokens").batch(2)).backward()
        optimizer.step()
    with finished(monitor) as run:
        assert run.heads == ()


@pytest.mark.parametrize("count", [3, 0, None])
def test_head_count_that_does_not_fit_gives_no_heads(tmp_path: Path, count: int | None) -> None:
    torch.manual_seed(0)
    model = Model(Parts({"qkv": nn.Linear(WIDTH, 3 * WIDTH)}, **({} if count is None else {"num_heads": count})))
    assert heads_of(train(tmp_path, model, None)) == ()


class Backwards(nn.Module):
    """Registered from the output to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.middle = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.enter = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for layer in reversed(self.middle):
            x = torch.tanh(layer(x))
        return self.out(x)


DEPTHS = ("enter", "middle.1", "middle.0", "out")


@pytest.mark.parametrize("sizes", [(4,), (4, 4)])
def test_depth_comes_from_the_first_backward(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Backwards()
    rig = Rig(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-2), sizes=sizes).steps(3)
    rig.check()
    with gv.open_run(rig.monitor.run_path) as run:
        assert run.layers == DEPTHS
        assert {info.name: info.depth for info in run.tensors if info.name.endswith("weight")} == {
            "enter.weight": 0,
            "middle.1.weight": 1,
            "middle.0.weight": 2,
            "out.weight": 3,
        }
        assert run.names("tensors") == tuple(name for name, _ in model.named_parameters())


def test_depth_with_two_optimizers(tmp_path: Path) -> None:
    """Matrices by one, the ends by another, as with Muon: depth is the model's, not the optimizer's."""
    torch.manual_seed(0)
    model = Backwards()
    optimizers = [
        torch.optim.SGD(model.middle.parameters(), lr=1e-2),
        torch.optim.AdamW([*model.enter.parameters(), *model.out.parameters()], lr=1e-2),
    ]
    with gv.watch(model, optimizers, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True)) as monitor:
        for _ in range(3):
            regression(model, Data().batch(4)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with finished(monitor) as run:
        assert run.layers == DEPTHS


def test_depth_with_a_head_that_only_the_second_micro_batch_uses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(6, 5), "one": nn.Linear(5, 3), "two": nn.Linear(5, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True)) as monitor:
        for _ in range(2):
            for name in ("one", "two"):
                x, y = Data().batch(4)
                (model[name](torch.tanh(model["body"](x))) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with gv.open_run(monitor.run_path) as run:
        assert run.layers[0] == "body"


def test_what_is_frozen_is_said_and_followed(tmp_path: Path) -> None:
    """Handing all parameters to the optimizer and freezing some is how fine-tuning is written."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for step in range(60):
            if step == 40:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        assert monitor.flush()
        with gv.open_run(monitor.run_path) as run:
            assert not any(info.frozen for info in run.tensors)
    assert not [finding for finding in monitor.findings if finding.id in ("dead_tensor", "monitor_error")]


def test_a_frozen_layer_stands_where_the_model_has_it(tmp_path: Path) -> None:
    """Backward does not reach it, so its depth cannot be seen; its neighbours' can."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True)) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        assert run.layers == ("0", "1", "2", "3", "4")
