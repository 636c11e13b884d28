"""A run that is interrupted and resumed reads like one that never was."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Data, Transformer, assert_no_errors, finished, next_token
from torch import nn

import gradvitals as gv
from gradvitals.errors import GradvitalsError
from gradvitals.metrics import INSPECTED

CONFIG = gv.Config(tensor_every=1, quiet=True, window_steps=20, gsnr_window=12, norm_window=15)


class Loop:
    """A training loop whose whole state can be saved and loaded, its Monitor's with it."""

    def __init__(
        self, path: Path, *, config: gv.Config = CONFIG, micro_batches: int = 2, scaler: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = Transformer(depth=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4, enabled=scaler)
        self.data = Data(kind="tokens")
        self.micro_batches = micro_batches
        self.monitor = gv.watch(self.model, self.optimizer, run=path, config=config, batch_size=6, **options)

    def run(self, steps: int) -> Loop:
        for _ in range(steps):
            for batch in self.data.batches((3,) * self.micro_batches):
                loss = next_token(self.model, batch)
                self.scaler.scale(loss / self.micro_batches).backward()
            self.monitor.observe(loss)
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return self

    def save(self) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "data": self.data.generator.get_state(),
                "monitor": self.monitor.state_dict(),
            },
            buffer,
        )
        return buffer

    def load(self, buffer: io.BytesIO) -> Loop:
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.data.generator.set_state(state["data"])
        self.monitor.load_state_dict(state["monitor"])
        return self


# The direction of the step before is not in a checkpoint, and the first batches after a resume are looked at anew.
VOLATILE = {"monitor/overhead", "update/cosine", *INSPECTED}


def assert_same_record(one: Path, other: Path) -> None:
    with gv.open_run(one) as a, gv.open_run(other) as b:
        assert a.names("tensors") == b.names("tensors")
        assert a.layers == b.layers
        assert a.heads == b.heads
        for kind in ("values", "tensors", "layers", "heads"):
            assert a.metrics(kind) == b.metrics(kind)
            for metric in set(a.metrics(kind)) - VOLATILE:
                for source in a.sources(metric, kind) or (None,):
                    steps_a, rows_a = a.matrix(metric, kind, source=source)
                    steps_b, rows_b = b.matrix(metric, kind, source=source)
                    assert steps_a.tolist() == steps_b.tolist(), (metric, kind, source)
                    what = f"{metric} of {kind} from {source}"
                    np.testing.assert_allclose(rows_a, rows_b, rtol=1e-6, atol=1e-9, err_msg=what)


@pytest.mark.parametrize(
    ("micro_batches", "scaler", "every"), [(1, False, 1), (2, True, 1), (2, False, 3), (1, True, 3)]
)
def test_resumed_run_reads_like_a_straight_one(tmp_path: Path, micro_batches: int, scaler: bool, every: int) -> None:
    config = gv.Config(tensor_every=every, quiet=True, window_steps=20, gsnr_window=12, norm_window=15)
    options: dict[str, Any] = {"config": config, "micro_batches": micro_batches, "scaler": scaler}
    straight = Loop(tmp_path / "straight", **options).run(25)
    straight.monitor.close()
    first = Loop(tmp_path / "run", **options).run(11)
    checkpoint = first.save()
    first.monitor.close()
    second = Loop(tmp_path / "run", **options).load(checkpoint)
    assert second.monitor.step == 11
    second.run(14)
    second.monitor.close()
    for loop in (straight, first, second):
        assert_no_errors(loop.monitor)
    assert second.monitor.run_path == first.monitor.run_path
    assert_same_record(straight.monitor.run_path, second.monitor.run_path)
    assert not (tmp_path / "run-2").exists()


def test_resume_after_a_crash_beyond_the_checkpoint(tmp_path: Path) -> None:
    straight = Loop(tmp_path / "straight").run(20)
    straight.monitor.close()
    first = Loop(tmp_path / "run").run(8)
    checkpoint = first.save()
    first.run(6)  # recorded, but lost with the process
    first.monitor.flush()
    second = Loop(tmp_path / "run").load(checkpoint).run(12)
    second.monitor.close()
    first.monitor.close()
    assert_no_errors(second.monitor)
    assert_same_record(straight.monitor.run_path, tmp_path / "run")


def test_state_is_a_snapshot(tmp_path: Path) -> None:
    """A state kept in memory does not move on with the run."""
    loop = Loop(tmp_path / "run").run(6)
    state = loop.monitor.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    loop.run(5)
    loop.monitor.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert _equal(state, saved)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def test_saving_does_not_disturb_the_run(tmp_path: Path) -> None:
    straight = Loop(tmp_path / "straight").run(12)
    straight.monitor.close()
    loop = Loop(tmp_path / "run")
    for _ in range(12):
        loop.run(1).save()
    loop.monitor.close()
    assert_same_record(straight.monitor.run_path, loop.monitor.run_path)


def test_saving_before_the_first_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    checkpoint = loop.save()
    loop.monitor.close()
    again = Loop(tmp_path / "run").load(checkpoint).run(3)
    with finished(again.monitor) as run:
        assert run.series("grad/norm")[0].tolist() == [0, 1, 2]


def test_loading_after_the_first_step_is_an_error(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run").run(2)
    state = loop.monitor.state_dict()
    with pytest.raises(GradvitalsError, match="before the first"):
        loop.monitor.load_state_dict(state)
    loop.run(1)
    with finished(loop.monitor) as run:
        assert run.last_step == 2


def test_state_of_another_version_is_an_error(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    with pytest.raises(GradvitalsError, match="version"):
        loop.monitor.load_state_dict({"version": 99})
    loop.monitor.close()


def test_record_that_is_gone_begins_anew_at_the_saved_step(tmp_path: Path) -> None:
    first = Loop(tmp_path / "run").run(5)
    checkpoint = first.save()
    first.monitor.close()
    (tmp_path / "run").rename(tmp_path / "moved")
    second = Loop(tmp_path / "elsewhere").load(checkpoint).run(3)
    second.monitor.close()
    assert_no_errors(second.monitor)
    assert second.monitor.run_path == tmp_path / "elsewhere"
    with gv.open_run(tmp_path / "elsewhere") as run:
        assert run.series("grad/norm")[0].tolist() == [5, 6, 7]


def test_another_run_in_the_saved_place_is_left_alone(tmp_path: Path) -> None:
    first = Loop(tmp_path / "run").run(3)
    checkpoint = first.save()
    first.monitor.close()
    (tmp_path / "run").rename(tmp_path / "moved")
    stranger = Loop(tmp_path / "run").run(4)
    stranger.monitor.close()
    second = Loop(tmp_path / "run").load(checkpoint).run(1)
    second.monitor.close()
    assert second.monitor.run_path == tmp_path / "run-2"
    with gv.open_run(tmp_path / "run") as run:
        assert run.series("grad/norm")[0].tolist() == [0, 1, 2, 3]


def test_state_of_another_model_is_left_aside(tmp_path: Path) -> None:
    """A changed window or model starts its windows anew instead of failing."""
    first = Loop(tmp_path / "run").run(5)
    state = first.monitor.state_dict()
    first.monitor.close()
    other = gv.Config(tensor_every=1, quiet=True, window_steps=40, gsnr_window=5, norm_window=7)
    second = Loop(tmp_path / "run", config=other)
    second.monitor.load_state_dict(state)
    second.run(3)
    with finished(second.monitor) as run:
        assert run.series("grad/norm")[0].tolist() == list(range(8))


@pytest.mark.parametrize("every", [1, 3])
def test_resume_without_a_state(tmp_path: Path, every: int) -> None:
    """resume=True counts on where the record ends and hides nothing of it."""
    config = gv.Config(tensor_every=every, quiet=True)
    first = Loop(tmp_path / "run", config=config).run(5)
    first.monitor.close()
    with gv.open_run(tmp_path / "run") as run:
        norms = run.series("grad/norm")[1]
    second = Loop(tmp_path / "run", config=config, resume=True)
    assert second.monitor.step == 5
    second.run(4)
    second.monitor.close()
    assert_no_errors(second.monitor)
    with gv.open_run(tmp_path / "run") as run:
        steps, values = run.series("grad/norm")
        assert steps.tolist() == list(range(9))
        np.testing.assert_array_equal(values[:5], norms)
        young = {1, 2} if every > 1 else set()  # powers of two before the first regular reading
        assert run.matrix("grad/norm")[0].tolist() == [s for s in range(9) if s % every == 0 or s in young]


def test_resume_where_there_is_no_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", resume=True).run(2)
    loop.monitor.close()
    assert_no_errors(loop.monitor)
    with gv.open_run(tmp_path / "run") as run:
        assert run.series("grad/norm")[0].tolist() == [0, 1]


def test_resume_of_a_run_without_readings(tmp_path: Path) -> None:
    from gradvitals.store.writer import RunWriter

    with RunWriter(tmp_path / "run", meta={}) as writer:
        writer.commit()
    loop = Loop(tmp_path / "run", resume=True)
    assert loop.monitor.step == 0
    loop.run(2)
    loop.monitor.close()
    with gv.open_run(tmp_path / "run") as run:
        assert run.series("grad/norm")[0].tolist() == [0, 1]
