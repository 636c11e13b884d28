"""Parameters without a gradient at some steps, as experts are, change nothing that a step must describe again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals.worker.record import Context


def test_a_context_is_not_sent_with_every_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    sent: list[Context] = []
    encode = Context.to_bytes
    monkeypatch.setattr(Context, "to_bytes", lambda context: (sent.append(context), encode(context))[1])
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    optimizer = gv.optim.AdamW(experts.parameters(), lr=1e-3)
    config = gv.Config(tensor_every=1, worker="thread", quiet=True)
    with gv.watch(experts, optimizer, run=tmp_path / "run", config=config) as monitor:
        for step in range(12):
            optimizer.zero_grad()
            loss = experts[step % 3](torch.randn(8, 4, device=device)).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    assert len(sent) <= 3  # one expert after the other has its first reading
    with gv.open_run(tmp_path / "run") as run:
        assert len(run.series("update/norm")[0]) == 12
