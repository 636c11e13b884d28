"""What a plain step costs on the writer's thread, counted in calls: a clock would tell of the machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gradvitals as gv
from gradvitals.completion import Completion
from gradvitals.measure import RawStep, Tap

MOST_CALLS = 935
"""A plain step of this model makes about 930 calls of Python and numpy, however many tensors there are."""


def calls_of(work: Any) -> int:
    """How many functions are called meanwhile, those of C too."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def steps_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Completion, list[RawStep], Tap]:
    """The steps 101 to 129 of a run, and who has finished all those before."""
    kept: list[tuple[Completion, RawStep, Tap]] = []
    finish = Completion.records

    def records(self: Completion, raws: Sequence[RawStep], tap: Tap) -> Any:
        kept.extend((self, raw, tap) for raw in raws)
        return finish(self, [raw for raw in raws if raw.step <= 100], tap)

    monkeypatch.setattr(Completion, "records", records)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(30)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gv.watch(model, optimizer, run=folder / "run", config=gv.Config(quiet=True), batch_size=8) as monitor:
        for _ in range(130):
            loss = (model(torch.randn(8, 4)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    monkeypatch.setattr(Completion, "records", finish)
    assert [raw.step for _, raw, _ in kept] == list(range(130))
    return kept[0][0], [raw for _, raw, _ in kept if raw.step > 100], kept[0][2]


def test_a_plain_step_makes_few_calls_on_the_writers_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completion, raws, tap = steps_of_a_run(tmp_path, monkeypatch)
    records: dict[int, list[Any]] = {}
    calls = {
        raw.step: calls_of(lambda raw=raw: records.update({raw.step: list(completion.records([raw], tap))}))
        for raw in raws
    }
    plain = [raw.step for raw in raws if not raw.full]
    assert len(plain) > 20
    assert all(records[step][-1].step == step for step in plain)
    mean = sum(calls[step] for step in plain) / len(plain)
    assert mean < MOST_CALLS, f"{mean:.0f} calls a step"
