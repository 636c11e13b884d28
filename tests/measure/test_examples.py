"""Norm layers tell what single examples add to their gradient: exactly, however the model calls them."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from examples_truth import (
    WIDTH,
    GemmaLikeNorm,
    LlamaLikeNorm,
    Loss,
    Net,
    batch,
    collect,
    example_parts,
    mean_square,
    randomise,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from gradvitals.measure.clock import Clock
from gradvitals.measure.examples import ExampleSums
from gradvitals.measure.examples_layers import norm_layers

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without bias": partial(nn.LayerNorm, bias=False),
    "RMSNorm": nn.RMSNorm,
    "Llama": LlamaLikeNorm,
    "Gemma": GemmaLikeNorm,
}


def check(
    model: nn.Module,
    *,
    sizes: Sequence[int] = (5,),
    loss: Loss = mean_square,
    rows: int | None = None,
    rtol: float = 1e-5,
    scale: float = 1.0,
    autocast: torch.dtype | None = None,
    shape: Sequence[int] = (4, WIDTH),
) -> None:
    """Train one step and hold the sums over examples against one backward for each example."""
    batches = [batch(size, *shape, seed=size) for size in sizes]
    weights = [size / sum(sizes) for size in sizes]
    truth = example_parts(model, batches, weights, loss)

    def train() -> None:
        for (x, y), weight in zip(batches, weights, strict=True):
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                value = loss(model, x, y)
            (scale * weight * value).backward()

    found = collect(model, train)
    norms = [name for name in truth if "norm" in name and name.endswith("weight")]
    assert sorted(found) == sorted(norms[:rows])
    for name, (counts, squares, norm_of_sum) in found.items():
        assert counts == tuple(sizes)
        split = np.split(truth[name], np.cumsum(sizes)[:-1])
        assert squares == pytest.approx([scale**2 * float(np.square(part).sum()) for part in split], rel=2 * rtol)
        assert norm_of_sum == pytest.approx(scale * float(np.linalg.norm(truth[name].sum(0))), rel=rtol)
        assert norm_of_sum == pytest.approx(float(dict(model.named_parameters())[name].grad.norm()), rel=rtol)


@pytest.mark.parametrize("kind", NORMS)
def test_every_kind_of_norm(kind: str) -> None:
    check(randomise(Net(NORMS[kind])))


@pytest.mark.parametrize("kind", NORMS)
def test_a_layer_that_is_called_several_times_has_the_sum_of_its_calls(kind: str) -> None:
    check(randomise(Net(NORMS[kind], depth=3, shared=True)), rows=1)


@pytest.mark.parametrize("kind", ["LayerNorm", "Llama"])
def test_micro_batches_of_unequal_size(kind: str) -> None:
    check(randomise(Net(NORMS[kind])), sizes=(2, 7, 1))


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "Llama"])
def test_checkpointed_segments(kind: str, reentrant: bool, norm_last: bool) -> None:
    model = Net(NORMS[kind], norm_last=norm_last)
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    check(randomise(model), sizes=(3, 4))


def test_a_shared_layer_in_checkpointed_segments_is_left_out() -> None:
    model = randomise(Net(nn.LayerNorm, shared=True))
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    x, y = batch(4)
    assert collect(model, lambda: mean_square(model, x, y).backward()) == {}


class NotedNorm(nn.LayerNorm):
    """Knows whether the memory of its inputs is still in use."""

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = [*getattr(self, "inputs", ()), StorageWeakRef(x.untyped_storage())]
        return super().forward(x)


def test_a_checkpointed_segment_keeps_no_input() -> None:
    model = randomise(Net(NotedNorm, depth=1))
    model.run = lambda block, x: checkpoint(lambda z: block(z * 1), x, use_reentrant=False)
    x, y = batch(4)

    def train() -> None:
        value = mean_square(model, x, y)
        assert [found.expired() for found in model.blocks[0].norm.inputs] == [True]
        value.backward()

    assert len(collect(model, train)) == 1


def test_inputs_are_let_go_after_backward_while_the_loss_lives_on() -> None:
    model = randomise(Net(NotedNorm, depth=1))
    x, y = batch(4)

    def train() -> None:
        value = mean_square(model, x, y)
        assert not model.blocks[0].norm.inputs[0].expired()
        value.backward()
        assert value.grad_fn is not None
        assert model.blocks[0].norm.inputs[0].expired()

    collect(model, train)


def test_autocast() -> None:
    check(randomise(Net(nn.LayerNorm)), autocast=torch.bfloat16, rtol=0.02)
    check(randomise(Net(LlamaLikeNorm)), autocast=torch.bfloat16, rtol=0.02)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "Llama"])
def test_a_model_in_half_precision(kind: str) -> None:
    model = randomise(Net(NORMS[kind])).bfloat16()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        kind = next(model.parameters()).dtype
        return (model(x.to(kind)).to(y.dtype) - y).square().mean()

    check(model, loss=loss, rtol=0.02)


def test_a_sum_of_losses_is_only_another_scale() -> None:
    check(randomise(Net(nn.RMSNorm)), scale=1024.0)


def test_vectors_without_positions_and_images() -> None:
    check(randomise(Net(nn.LayerNorm)), shape=(WIDTH,))
    check(randomise(Net(nn.LayerNorm)), shape=(2, 3, WIDTH))


class GroupNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))))


def test_group_norm() -> None:
    check(randomise(GroupNet()), shape=(3, 5, 5))


def test_layer_norm_over_several_dimensions() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm((4, WIDTH))
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    check(randomise(Whole()))


def test_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradvitals.measure.examples_layers.CHUNK_ELEMENTS", 2 * 4 * WIDTH)
    check(randomise(Net(nn.LayerNorm)), sizes=(5,))


def test_examples_in_the_second_dimension() -> None:
    class TimeFirst(nn.Module):
        def __init__(self, *, attention: bool) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.mix = nn.MultiheadAttention(WIDTH, 2) if attention else None

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x.transpose(0, 1))
            y = y if self.mix is None else self.mix(y, y, y, need_weights=False)[0]
            return y.transpose(0, 1)

    x, y = batch(5, 3, WIDTH)
    for attention, dim in ((True, None), (False, 1)):  # torch's attention tells where its examples are
        model = randomise(TimeFirst(attention=attention))
        truth = example_parts(model, [(x, y)], [1.0])["norm.weight"]
        found = collect(model, lambda model=model: mean_square(model, x, y).backward(), example_dim=dim)
        counts, squares, _ = found["norm.weight"]
        assert counts == (5,)
        assert squares == pytest.approx([float(np.square(truth).sum())], rel=1e-5)


def test_the_llama_of_the_transformers_library() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    check(randomise(Net(LlamaRMSNorm)))


def test_what_only_has_the_name_of_a_norm_is_left_alone() -> None:
    class ScaledNorm(nn.Module):  # its weight does not multiply what is normalised
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(x * self.weight, dim=-1)

    class BatchMeanNorm(ScaledNorm):  # examples enter each other's normalisation
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) * self.weight

    class TwoInputsNorm(ScaledNorm):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return (x + residual) * self.weight

    x, y = batch(4)
    for kind in (ScaledNorm, BatchMeanNorm, nn.Identity):
        model = Net(kind)
        assert collect(model, lambda model=model: mean_square(model, x, y).backward()) == {}
    model = nn.ModuleList([TwoInputsNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)])
    assert collect(model, lambda: None) == {}


def test_calls_without_backward_and_under_no_grad_do_not_count() -> None:
    model = randomise(Net(nn.LayerNorm))
    x, y = batch(5)

    def train() -> None:
        with torch.no_grad():
            model(batch(9)[0])
        model(batch(7)[0])
        mean_square(model, x, y).backward()
        model(batch(3)[0])

    assert {counts for counts, _, _ in collect(model, train).values()} == {(5,)}


def test_an_input_that_is_changed_in_place_is_left_out() -> None:
    model = randomise(Net(LlamaLikeNorm, depth=1)).bfloat16()  # which makes a copy for itself, so autograd allows it
    x, y = batch(4)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        out = block.norm(x)
        x.mul_(2.0)
        return out + x

    model.run = run
    assert collect(model, lambda: (model(x.bfloat16()) - y).square().mean().backward()) == {}


def test_calls_over_different_examples_are_left_out() -> None:
    model = randomise(Net(nn.LayerNorm, depth=1))
    (x, y), (other, target) = batch(4), batch(6, seed=2)
    assert collect(model, lambda: (mean_square(model, x, y) + mean_square(model, other, target)).backward()) == {}


def test_copies_and_files_of_a_model_have_hooks_that_do_nothing() -> None:
    model = randomise(Net(nn.LayerNorm))
    x, y = batch(4)

    def train() -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            mean_square(other, x, y).backward()
        mean_square(model, x, y).backward()

    assert {counts for counts, _, _ in collect(model, train).values()} == {(4,)}


WITHOUT_GRADVITALS = """
import sys
class Refuses:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "gradvitals":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuses())
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert all(layer._forward_hooks and layer._forward_pre_hooks for layer in (model[1], model[2]))
print(model(torch.ones(3, 4)).sum().item(), [name for name in sys.modules if "gradvitals" in name])
"""


def test_a_saved_model_loads_where_there_is_no_gradvitals(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.RMSNorm(8))
    with torch.no_grad():
        model[2].weight.zero_().add_(torch.arange(8.0) == 0)
    wanted = model(torch.ones(3, 4)).sum().item()
    file = tmp_path / "model.pt"
    said: list[str] = []

    def train() -> None:
        torch.save(model, file)
        command = [sys.executable, "-c", WITHOUT_GRADVITALS, str(file)]
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        said.append(found.stdout + found.stderr)

    collect(model, train)
    assert said == [f"{wanted} []\n"]


def test_a_compiled_function_is_neither_seen_nor_compiled_again() -> None:
    model = randomise(Net(nn.LayerNorm))
    x, y = batch(4)
    compiled = torch.compile(lambda: mean_square(model, x, y), backend="eager", fullgraph=True)
    row_of = {id(p): row for row, p in enumerate(model.parameters())}
    sums = ExampleSums(norm_layers(model, row_of, None), clock=Clock(), on_error=raises)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            sums.arm()
            compiled().backward()
            assert sums.finish()[0] == {}
            sums.disarm()
            compiled().backward()
    mean_square(model, x, y).backward()  # this one is seen, so the hooks can go
    sums.disarm()
    assert not any(module._forward_hooks for module in model.modules())
    torch._dynamo.reset()


def raises(error: Exception) -> None:
    raise error
