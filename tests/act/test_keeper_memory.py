"""Host memory: cut from large pieces as on a GPU, each tensor in its own place and its own order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradvitals.act import snap_copy

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES), st.booleans()), max_size=12)
)
def test_pieces_do_not_overlap_and_keep_their_order(wanted: list[tuple[list[int], torch.dtype, bool]]) -> None:
    tensors = {}
    for index, (shape, dtype, turned) in enumerate(wanted):
        tensor = torch.randint(2, shape).to(dtype)
        tensors[str(index)] = tensor.t() if turned and tensor.dim() == 2 else tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snap_copy, "ARENA_BYTES", 200)
        made = snap_copy.packed(tensors, pin_memory=False)
    assert snap_copy.layout_of(made) == snap_copy.layout_of(tensors)
    for name, tensor in tensors.items():
        made[name].copy_(tensor)
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
