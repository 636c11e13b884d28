"""What an audit takes along: checksums that any changed bit changes, prints of samples and of random numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradvitals.collect.transfer import ReadingBuffer
from gradvitals.distributed import audit as checksum
from gradvitals.distributed.audit import (
    SAMPLES,
    Audit,
    Item,
    checksums,
    digest,
    sample_prints,
)
from gradvitals.worker.record import Decoder, Encoder, Section, StepRecord

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


def checksum_of(tensor: Tensor, salt: int = 0) -> int:
    [(rows, [number])] = list(checksums([Item(5, salt, tensor)]))
    assert rows == [5]
    return int(number)


def landed(packet: ReadingBuffer) -> dict[str, np.ndarray]:
    return {name: section.values for name, section in sections(packet).items()}


def sections(buffer: ReadingBuffer) -> dict[str, Section]:
    data = Encoder().encode(StepRecord(step=0), buffer.host_parts())
    return Decoder().decode(data).sections


def by_name(packet: ReadingBuffer, name: str) -> list[int]:
    got = landed(packet)
    return digest(got[f"{name}_lo"], got[f"{name}_hi"]).tolist() if f"{name}_lo" in got else []


def bits(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor, to be changed in place."""
    return tensor.view(torch.uint8).numpy().reshape(-1)


# -- checksums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_single_bit_changes_it(dtype: torch.dtype) -> None:
    values = torch.randn(4, 2, generator=torch.Generator().manual_seed(1)) * 3
    tensor = values.to(dtype)
    before = checksum_of(tensor)
    assert checksum_of(tensor.clone()) == before
    raw = bits(tensor)
    seen = {before}
    for place in range(len(raw)):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[place] ^= 1 << bit
            seen.add(checksum_of(tensor))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + len(raw) * (1 if dtype == torch.bool else 8)
    assert checksum_of(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_swapped_elements_change_it(dtype: torch.dtype) -> None:
    tensor = torch.arange(40).to(dtype)
    before, seen = checksum_of(tensor), set()
    for first in range(40):
        for second in range(first):
            swapped = tensor.clone()
            swapped[[first, second]] = tensor[[second, first]]
            seen.add(checksum_of(swapped))
    assert len(seen) == 40 * 39 // 2
    assert before not in seen


def test_the_signs_of_two_elements_change_it() -> None:
    """With one weight for each 64-bit number the highest bits of two would cancel."""
    tensor = torch.ones(100, dtype=torch.float64)
    flipped = tensor.clone()
    flipped[[3, 50]] *= -1
    assert checksum_of(flipped) != checksum_of(tensor)


def test_it_does_not_depend_on_how_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PIECE_WORDS", 1000)
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 7, 999, 1000, 1001, 2500, 3, 400, 0, 650)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    items = [Item(row, row, tensor) for row, tensor in enumerate(tensors)]
    [(rows, on_host)] = list(checksums(items))
    assert rows == list(range(len(sizes)))
    device = torch.device("cpu")
    monkeypatch.setattr(checksum, "_sums_on_host", lambda pieces: torch.cat(list(checksum._sums(pieces, device))))
    [(_, as_on_a_gpu)] = list(checksums(items))
    monkeypatch.setattr(checksum, "HOST_WORDS", 64)
    [(_, in_small_blocks)] = list(checksums(items))
    assert on_host.tolist() == as_on_a_gpu.tolist() == in_small_blocks.tolist()
    assert on_host.tolist() == [checksum_of(tensor, row) for row, tensor in enumerate(tensors)]


def test_where_a_tensor_lies_in_memory_does_not_matter() -> None:
    whole = torch.randn(11)
    for start in range(4):  # addresses that are no multiple of 4 bytes, too
        part = whole.to(torch.bfloat16)[start : start + 6]
        assert checksum_of(part) == checksum_of(part.clone())
    image = torch.randn(2, 3, 4, 5)
    channels_last = image.to(memory_format=torch.channels_last)
    assert checksum_of(channels_last) == checksum_of(channels_last.clone())
    assert checksum_of(image[:, :, ::2]) == checksum_of(image[:, :, ::2].clone())


def test_what_has_no_memory_of_its_own_is_not_readable() -> None:
    assert checksum.is_readable(nn.Parameter(torch.zeros(3)))
    assert not checksum.is_readable(torch.zeros(3, device="meta"))
    assert not checksum.is_readable(torch.eye(3).to_sparse())
    seen = []
    torch.vmap(lambda x: seen.append(checksum.is_readable(x)) or x)(torch.zeros(2, 3))
    assert seen == [False]


# -- replicas -----------------------------------------------------------------------------------------------------


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.full((3, 4), 0.5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def audited(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
    packet = ReadingBuffer()
    parameters = list(model.parameters())
    Audit(model).after_step(packet, range(len(parameters)), parameters, optimizer)
    found = sections(packet)
    of = {}
    for name in ("check", "state"):
        if f"{name}_lo" in found:
            low, high = (found[f"{name}_{half}"].by_row(len(parameters)) for half in ("lo", "hi"))
            of[name] = digest(low, high).tolist()
    return of


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p),
    "capturable": lambda p: torch.optim.AdamW(p, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_replicas_have_equal_checksums_and_others_not(name: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    first, again = audited(model, optimizer), audited(*trained(OPTIMIZERS[name]))
    assert first == again
    assert all(number != 0 for numbers in first.values() for number in numbers)
    assert len(first["check"]) == len(first["state"]) == 4
    one_more = audited(*trained(OPTIMIZERS[name], steps=3))
    assert all(a != b for a, b in zip(first["state"], one_more["state"], strict=True))
    weight = next(model.parameters())
    bits(weight.data)[5] ^= 1
    changed = audited(model, optimizer)
    assert [a != b for a, b in zip(first["check"], changed["check"], strict=True)] == [True, False, False, False]
    assert changed["state"] == first["state"]


def test_one_bit_of_the_optimizer_state_is_seen() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    before = audited(model, optimizer)
    parameter = list(model.parameters())[2]
    bits(optimizer.state[parameter]["exp_avg_sq"])[9] ^= 16
    after = audited(model, optimizer)
    assert after["check"] == before["check"]
    assert [a != b for a, b in zip(before["state"], after["state"], strict=True)] == [False, False, True, False]
    moments = optimizer.state[parameter]
    moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]
    assert audited(model, optimizer)["state"][2] != after["state"][2]


def test_state_that_is_nested_or_plain_numbers_counts_and_none_is_nothing() -> None:
    model, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.1))
    assert "state" not in audited(model, optimizer)
    first = next(model.parameters())
    optimizer.state[first] = {"step": 3, "parts": [torch.ones(2), {"a": torch.zeros(1)}], "name": "x"}
    before = audited(model, optimizer)["state"]
    assert [number != 0 for number in before] == [True, False, False, False]
    optimizer.state[first]["step"] = 4
    after = audited(model, optimizer)["state"]
    assert after[0] != before[0]
    assert set(optimizer.state) == {first}  # looking must not make an entry


def test_nothing_is_changed_by_looking() -> None:
    model, optimizer = trained(OPTIMIZERS["adam"])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    random = torch.get_rng_state()
    audited(model, optimizer)
    Audit(model).fingerprints(ReadingBuffer())
    assert torch.equal(random, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name])
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, before[1][key][name]) for name, tensor in state.items())


# -- samples ------------------------------------------------------------------------------------------------------


def armed(model: nn.Module) -> Audit:
    """As it is after the first step, at which it does not look."""
    audit = Audit(model)
    audit.arm()
    assert not model._forward_pre_hooks
    audit.arm()
    return audit


def seen_samples(model: nn.Module, *args: Any, call: Callable[..., Any] | None = None, **kwargs: Any) -> list[int]:
    audit = armed(model)
    (call or model)(*args, **kwargs)
    packet = ReadingBuffer()
    audit.fingerprints(packet)
    assert not model._forward_pre_hooks
    return by_name(packet, "sample")


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight * 2


@dataclass
class Batch:
    name: str
    ids: Tensor


def test_every_sample_has_its_own_print_wherever_it_is_in_the_batch() -> None:
    data = torch.randn(20, 3, 5)
    prints = seen_samples(Takes(), data)
    assert len(prints) == len(set(prints)) == SAMPLES
    moved = seen_samples(Takes(), data[[3, 0, 19]])
    assert moved[:2] == [prints[3], prints[0]]
    assert seen_samples(Takes(), data[4:5]) == [prints[4]]
    changed = data.clone()
    changed[2, 1, 1] += 1
    assert [a == b for a, b in zip(seen_samples(Takes(), changed), prints, strict=True)].count(False) == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ids: ((ids,), {}),
        lambda ids: ((None, "text", [1, 2], ids), {}),
        lambda ids: (({"a": {"b": [ids]}},), {}),
        lambda ids: ((), {"input_ids": ids, "labels": torch.randn(4)}),
        lambda ids: ((Batch("x", ids),), {}),
        lambda ids: ((torch.tensor(3.0), ids), {}),
    ],
)
def test_the_first_argument_that_holds_tensors_is_what_counts(wrap: Callable[[Tensor], Any]) -> None:
    ids = torch.arange(12).reshape(4, 3)
    args, kwargs = wrap(ids)
    expected = sample_prints((ids,), {})
    assert expected is not None
    assert seen_samples(Takes(), *args, **kwargs) == [number % 2**64 for number in expected.tolist()]


def test_all_tensors_of_the_argument_count_and_padding_does_not() -> None:
    ids, labels = torch.arange(1, 13).reshape(4, 3), torch.arange(4)
    both = seen_samples(Takes(), {"ids": ids, "labels": labels, "positions": torch.arange(3)})
    other = seen_samples(Takes(), {"ids": ids, "labels": labels + 1, "positions": torch.arange(3)})
    assert not set(both) & set(other)
    assert seen_samples(Takes(), ids) == seen_samples(Takes(), nn.functional.pad(ids, (0, 5)))


def test_what_is_no_data_is_not_looked_at() -> None:
    assert seen_samples(Takes()) == []
    assert seen_samples(Takes(), "text", 3) == []
    assert seen_samples(Takes(), torch.randn(3, 2, requires_grad=True)) == []  # a later stage of a pipeline
    assert seen_samples(Takes(), torch.zeros(0, 3)) == []


def test_an_evaluation_in_between_is_not_the_step() -> None:
    model = Takes()
    audit = armed(model)
    model.eval()(torch.zeros(2, 2))
    with torch.no_grad():
        model.train()(torch.zeros(2, 2))
    data = torch.ones(3, 2)
    model(data)
    model(torch.randn(5, 5))  # a second micro-batch
    packet = ReadingBuffer()
    audit.fingerprints(packet)
    assert by_name(packet, "sample") == seen_samples(Takes(), data)
    model(torch.randn(5, 5))
    packet = ReadingBuffer()
    audit.fingerprints(packet)  # nothing was armed
    assert by_name(packet, "sample") == []


def test_an_error_of_ours_does_not_end_the_forward() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        def values(self) -> Any:
            raise RuntimeError("no")

    model = Takes()
    audit = armed(model)
    assert model(Odd(a=1)).item() == 2.0
    packet = ReadingBuffer()
    with pytest.raises(RuntimeError, match="no"):
        audit.fingerprints(packet)
    assert by_name(packet, "rng")


def test_copies_of_the_model_do_not_look() -> None:
    model = Takes()
    audit = armed(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        other(torch.ones(2, 2))
    packet = ReadingBuffer()
    audit.fingerprints(packet)
    assert by_name(packet, "sample") == []


def test_compiled_models_are_left_alone() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Net(nn.Linear):
        pass

    model = Net(4, 4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    armed(compiled)
    assert not compiled._forward_pre_hooks
    inner = Audit(model)  # the loop has compiled the model that is watched
    data = torch.randn(3, 4)
    for _ in range(3):
        inner.arm()
        compiled(data).sum().backward()
        packet = ReadingBuffer()
        inner.fingerprints(packet)
        assert by_name(packet, "sample") == []
        compiled(data).sum().backward()
    assert len(graphs) == 1  # a hook that comes and goes compiles nothing anew
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_what_an_audit_remembers_survives_a_checkpoint_also_before_the_first_one(shape: tuple[int, int]) -> None:
    memory, restored = checksum.Memory(), checksum.Memory()
    memory.samples = np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape)
    restored.load_state_dict(memory.state_dict())
    assert restored.samples.shape == shape
    np.testing.assert_array_equal(restored.samples, memory.samples)
