"""What single examples add to the gradients of norm layers, by a kernel: against float64, and as torch has it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gradvitals import functional, kernels
from gradvitals.kernels import examples
from gradvitals.measure.clock import Clock
from gradvitals.measure.examples import ExampleSums
from gradvitals.measure.examples_layers import NormLayer, norm_layers
from gradvitals.measure.packet import Packet
from gradvitals.measure.passes import NORM, Passes

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def given(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    x, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    return x * 3 + 1, grad


def layer_of(module: nn.Module) -> NormLayer:
    (layer,) = norm_layers(module, {id(module.weight): 0}, None)
    return layer


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The examples of every launch."""
    found: list[int] = []
    original = examples.gradients

    def counted(x, *others):
        found.append(len(x))
        return original(x, *others)

    monkeypatch.setattr(examples, "gradients", counted)
    return found


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("shape", [(3, 24), (2, 5, 7), (1, 300, 130), (4, 2, 9, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_float64(
    kind: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, launches: list[int]
) -> None:
    x, grad = given(shape, device, dtype)
    module = kind(shape[-1], eps=1e-5, device=device, dtype=dtype)
    scale = None
    if kind is nn.LayerNorm:
        wide = x.float()
        scale = wide.mean(-1, keepdim=True), (wide.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    found = layer_of(module).gradients(x, grad, scale).sum(1)
    exact = kind(shape[-1], eps=1e-5, elementwise_affine=False, device="cpu", dtype=torch.float64)
    expected = functional.norm_example_gradients(exact(x.double().cpu()), grad.double().cpu())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-4)
    assert launches == [shape[0]]


def test_positions_in_parts_are_all_there(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = given((2, 203, 20), device, torch.float32)
    inverse = torch.ones(2, 203, 1, device=device)
    expected = (x.double() * grad.double()).sum(1)
    for programs in (1, 4, 1024):
        monkeypatch.setattr(examples, "ENOUGH_PROGRAMS", programs)
        found = examples.gradients(x, grad, None, inverse).sum(1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_what_the_kernel_does_not_read_is_left_to_torch(device: torch.device, launches: list[int]) -> None:
    x, grad = given((6, 4, 8), device, torch.float32)
    layer = layer_of(nn.RMSNorm(8, eps=1e-5, device=device))
    expected = layer.gradients(x, grad)
    assert launches == [6]
    across = x.transpose(0, 1).contiguous().transpose(0, 1)  # the same numbers, positions first in memory
    torch.testing.assert_close(layer.gradients(across, grad), expected)
    torch.testing.assert_close(layer.gradients(x, grad.double()).float(), expected)
    (group,) = norm_layers(group_norm := nn.GroupNorm(2, 4, device=device), {id(group_norm.weight): 0}, None)
    assert group.gradients(x, grad).shape == (6, 1, 4)
    assert launches == [6]


def test_a_kernel_that_fails_leaves_it_to_torch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = given((6, 4, 8), device, torch.float32)
    layer = layer_of(nn.RMSNorm(8, eps=1e-5, device=device))
    expected = layer.gradients(x, grad)

    def fail(*args):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(kernels._State, "broken", {})
    monkeypatch.setattr(examples, "gradients", fail)
    with pytest.warns(UserWarning, match="single examples are read by torch.*no compiler here"):
        torch.testing.assert_close(layer.gradients(x, grad), expected)
    torch.testing.assert_close(layer.gradients(x, grad), expected)
    monkeypatch.undo()


def test_calls_of_other_lengths_and_an_empty_batch(device: torch.device, launches: list[int]) -> None:
    norm = nn.LayerNorm(16, device=device)
    wrong: list[Exception] = []
    sums = ExampleSums(norm_layers(norm, {id(norm.weight): 0}, None), clock=Clock(), on_error=wrong.append)
    short, long = (torch.randn(2, length, 16, device=device) for length in (40, 400))
    sums.arm()
    (norm(short).square().sum() + norm(long).square().sum()).backward()
    sizes, packet = sums.finish()
    assert sizes == {0: (2,)}
    ((_, total),) = packet.named("examples_sum")
    torch.testing.assert_close(total.float(), norm.weight.grad.norm().reshape(1), rtol=1e-4, atol=1e-4)
    assert len(launches) == 2
    sums.arm()
    norm(short[:0]).sum().backward()
    assert sums.finish()[0] == {}
    assert not wrong


def test_a_gradient_in_rows_is_left_to_torch(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch calls it a beta
        in_rows = torch.eye(3, device=device).to_sparse_csr()
    assert Passes().read(Packet(), {NORM: "norm"}, [0, 1], [torch.ones(3, device=device), in_rows]) == [1]
