"""VRGD's parts added and compared by a kernel: equal to autograd and torch, and invisible to other hooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals import kernels
from gradvitals.kernels import vrgd
from gradvitals.kernels.vrgd import Adding
from gradvitals.optim import parts as parts_module
from gradvitals.optim.parts import PartBatch, add_by_torch, rounding_of

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SHAPES = ((30, 16), (4, 3, 3, 3), (7,), (), (1, 64))
NUM_PARTS = 6


def some(shapes, device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in tensors]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every launch."""
    found: list[dict[str, Any]] = []
    original = Adding.add

    def counted(self, given, totals, noises, **settings):
        found.append(settings | {"tensors": len(given)})
        return original(self, given, totals, noises, **settings)

    monkeypatch.setattr(Adding, "add", counted)
    return found


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_launch_matches_torch(added: bool, fresh: bool, device: torch.device) -> None:
    sizes = (5, 8192, 3 * 8192 + 17)
    given = some([(size,) for size in sizes], device, 0)
    kept = []
    for by_kernel in (True, False):
        totals, noises = (some([(size,) for size in sizes], device, seed) for seed in (1, 2))
        if by_kernel:
            share = rounding_of(torch.float32, 3) / 9
            Adding(sizes, device).add(given, totals, noises, count=3, rounding=share, added=added, fresh=fresh)
        else:
            add_by_torch(PartBatch(3, added, fresh, False, list(zip(given, totals, noises, strict=True))))
        kept.append((totals, noises))
    for one, other in zip(kept[0][0], kept[1][0], strict=True):
        assert torch.equal(one, other)  # the sum equals torch's bit for bit
    torch.testing.assert_close(kept[0][1], kept[1][1], rtol=3e-6, atol=1e-6)


def test_part_with_another_layout_gives_the_same_sums(device: torch.device, launches: list[dict]) -> None:
    """As autograd passes it if there are other hooks; a watched run must round in the same way."""
    part, total, noise = (some([(4, 3, 3, 3)], device, seed)[0] for seed in range(3))
    kept = []
    for given in (part, part.contiguous()):
        totals, noises = total.clone(), noise.clone()
        parts_module.PartAdder().add(PartBatch(3, True, False, True, [(given, totals, noises)]))
        kept.append(noises)
    assert len(launches) == 2
    assert torch.equal(*kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Numbers whose sums need no rounding: the interpreter rounds differently from a GPU."""
    part, total = (torch.tensor(values, device=device, dtype=dtype) for values in ([2.0, -1, 0.5], [1.0, 3, 0.5]))
    noise = torch.tensor([1.0, 2, 4], device=device)
    Adding([3], device).add([part], [total], [noise], count=2, rounding=0.0, added=False, fresh=False)
    assert total.tolist() == [3.0, 2.0, 1.0]
    assert noise.tolist() == [1 + 2 * 0.25, 2 + 2 * 4.0, 4.0]


def weights(device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in some(SHAPES, device, 0)]


def backward(parameters: list[nn.Parameter], given: list[torch.Tensor]) -> None:
    sum((p * part).sum() / NUM_PARTS for p, part in zip(parameters, given, strict=True)).backward()


def train(device: torch.device, *, steps: int = 3, watcher: Any = None, **settings: Any) -> list[Any]:
    """Weights, and ``.grad`` as it was before every step."""
    parameters = weights(device)
    optimizer = gv.optim.VRSGD(parameters, lr=0.1, momentum=0.9, **settings)
    seen = []
    for step in range(steps):
        for part in range(NUM_PARTS):
            handles = watcher(parameters) if watcher is not None else ()
            backward(parameters, some(SHAPES, device, 100 * step + part + 1))
            for handle in handles:
                handle.remove()
        seen += [p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return [[p.detach() for p in parameters], seen]


@pytest.fixture
def without_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a training with everything done by torch."""

    def run(**settings: Any) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "on_device", lambda tensor: False)
            return train(device, **settings)

    return run


@pytest.mark.parametrize("settings", [{}, {"scale": "wiener"}, {"moments_dtype": torch.bfloat16}, {"beta3": 0.9}])
def test_steps_and_gradients_match_those_without_kernels(
    settings: dict, device: torch.device, without_kernels, launches: list[dict]
) -> None:
    found, expected = train(device, **settings), without_kernels(**settings)
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)
    loose = {"rtol": 0.05, "atol": 5e-3} if "moments_dtype" in settings else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[0], expected[0], **loose)
    taken = [launch for launch in launches if not launch["added"]]
    # Two kinds of places in memory, and the very first comparison makes the places that later ones are added in.
    assert {launch["count"] for launch in taken} == set(range(2, NUM_PARTS + 1))
    assert sum(launch["tensors"] for launch in taken) >= len(SHAPES) * (3 * (NUM_PARTS - 1) - 1)
    assert all(launch["fresh"] == (launch["count"] == 2) for launch in launches)


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_other_hooks_see_the_usual_gradients(kind: str, device: torch.device, launches: list[dict]) -> None:
    """With other hooks on a parameter, autograd adds, and no bit changes."""
    heard: list[torch.Tensor] = []

    def watcher(parameters):
        if kind == "tensor":
            return [p.register_hook(lambda grad, p=p: heard.append(p.grad)) for p in parameters]
        return [p.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone())) for p in parameters]

    watched = train(device, watcher=watcher)
    assert all(launch["added"] for launch in launches)
    assert sum(grad is not None for grad in heard) >= 3 * (NUM_PARTS - 1) * len(SHAPES)
    plain = train(device)
    assert not all(launch["added"] for launch in launches)
    for one, other in zip([*watched[0], *watched[1]], [*plain[0], *plain[1]], strict=True):
        assert torch.equal(one, other)


def ready_for_a_part(device: torch.device) -> tuple[list[nn.Parameter], gv.optim.VRSGD]:
    """Parameters with one part in ``.grad``, whose next part the kernel will add."""
    parameters = weights(device)
    optimizer = gv.optim.VRSGD(parameters, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts
        for part in range(2):
            backward(parameters, some(SHAPES, device, part))
        optimizer.step()
    optimizer.zero_grad()
    backward(parameters, some(SHAPES, device, 7))
    return parameters, optimizer


def test_torch_autograd_grad_leaves_grad_unchanged(device: torch.device, launches: list[dict]) -> None:
    parameters, _ = ready_for_a_part(device)
    before = [p.grad for p in parameters]
    torch.autograd.grad(sum(p.square().sum() for p in parameters), parameters)
    assert all(p.grad is grad for p, grad in zip(parameters, before, strict=True))
    del launches[:]
    backward(parameters, some(SHAPES, device, 8))
    assert launches
    assert not any(launch["added"] for launch in launches)
    assert all(p.grad is grad for p, grad in zip(parameters, before, strict=True))  # the very tensor


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


def two_ones(device: torch.device) -> tuple[nn.Parameter, nn.Parameter, gv.optim.VRSGD]:
    """Two parameters with one part of ones in ``.grad``, whose next part the kernel will add."""
    first, second = parameters = [nn.Parameter(torch.ones(8, device=device)) for _ in range(2)]
    optimizer = gv.optim.VRSGD(parameters, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts
        for _ in range(2):
            sum((p * torch.rand_like(p)).sum() for p in parameters).backward()
        optimizer.step()
    optimizer.zero_grad()
    (first.sum() + second.sum()).backward()
    return first, second, optimizer


def fail_after_the_first(first: nn.Parameter, second: nn.Parameter) -> None:
    failing = Fails.apply(second * 1).sum()  # the older node, so that autograd comes to it last
    with pytest.raises(RuntimeError, match="out of memory"):
        (failing + 1000 * first.sum()).backward()


def values(*parameters: nn.Parameter) -> list[float]:
    assert all((p.grad == p.grad[0]).all() for p in parameters)
    return [p.grad[0].item() for p in parameters]


def test_failed_backward_leaves_grad_as_autograd_would(device: torch.device) -> None:
    first, second, _ = two_ones(device)
    fail_after_the_first(first, second)
    assert values(first, second) == [1001, 1]
    (first.sum() + second.sum()).backward()
    assert values(first, second) == [1002, 2]


@pytest.mark.parametrize("late", [False, True])
def test_gradients_zeroed_after_a_failure_stay_zero(
    late: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, optimizer = two_ones(device)
    with monkeypatch.context() as patch:
        if late:  # a device's own thread may let go of a backward after it has raised
            patch.setattr(parts_module.BackwardEnd, "__del__", lambda self: None)
        fail_after_the_first(first, second)
    for parameter in (first, second):
        parameter.grad.zero_()
    if late:
        (task,) = optimizer._parts._awaited
        optimizer._parts.fail_backward(task)
    (first.sum() + second.sum()).backward()
    assert values(first, second) == [1, 1]


@pytest.mark.parametrize("zeroed", [False, True])
def test_error_during_accumulation_loses_nothing(zeroed: bool, device: torch.device) -> None:
    first, second, _ = two_ones(device)

    def fail(grads):
        raise RuntimeError("out of memory")

    node = first.expand_as(first).grad_fn.next_functions[0][0]  # autograd makes it anew when nobody keeps it
    handle = node.register_prehook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        first.sum().backward()
    handle.remove()
    assert values(first, second) == [1, 1]
    if zeroed:
        first.grad = second.grad = None
    (first.sum() + second.sum()).backward()
    assert values(first, second) == ([1, 1] if zeroed else [2, 2])


def test_none_gradient_is_no_part(device: torch.device) -> None:
    class OfTheFirst(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    first, second, optimizer = two_ones(device)
    OfTheFirst.apply(first, second).sum().backward()
    assert values(first, second) == [2, 1]
    assert [optimizer._parts.count_of(p) for p in (first, second)] == [2, 1]


def test_parts_of_different_streams_are_not_held_together(
    device: torch.device, launches: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    first, second, _ = two_ones(device)
    del launches[:]
    numbers = iter((1, 2, 2, 2, 2, 2))
    monkeypatch.setattr(parts_module, "stream_of", lambda device: next(numbers))
    monkeypatch.setattr(parts_module, "on_current_stream", lambda held, device: waited.append(held.stream))
    (first.sum() + second.sum()).backward()
    assert waited == [1, 2]
    assert [launch["tensors"] for launch in launches] == [1, 1]
    assert values(first, second) == [2, 2]


def test_gradients_with_a_graph_stay_unchanged(device: torch.device, launches: list[dict]) -> None:
    parameters, _ = ready_for_a_part(device)
    del launches[:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle
        sum((p**3).sum() for p in parameters).backward(create_graph=True)
    assert all(launch["added"] for launch in launches)
    assert all(p.grad.requires_grad for p in parameters)
    for parameter in parameters:
        parameter.grad = None


def test_parameters_used_in_some_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers of one step in accumulators do not affect the next one."""
    kept = []
    for by_kernels in (True, False):
        with monkeypatch.context() as patch:
            if not by_kernels:
                patch.setattr(kernels, "on_device", lambda tensor: False)
            parameters = weights(device)
            optimizer = gv.optim.VRSGD(parameters, lr=0.1)
            for step in range(4):
                for part in range(NUM_PARTS):
                    given = some(SHAPES, device, 100 * step + part + 1)
                    # The first in all steps, the second in one part of odd ones, the others in even ones.
                    chosen = [0, *([1] if part == 2 else [])] if step % 2 else range(len(SHAPES))
                    sum((parameters[i] * given[i]).sum() for i in chosen).backward()
                optimizer.step()
                optimizer.zero_grad()
            kept.append([p.detach() for p in parameters])
    torch.testing.assert_close(*kept, rtol=1e-5, atol=1e-6)


def test_failed_kernel_falls_back_to_torch(
    device: torch.device, without_kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler")

    expected = without_kernels()
    monkeypatch.setattr(vrgd.Adding, "add", fail)
    with pytest.warns(UserWarning, match="no compiler"):
        found = train(device)
    kernels._State.broken.clear()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
