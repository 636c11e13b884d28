"""A resumed run goes on in the same file; what it does again replaces what was done before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from gradvitals.errors import RunError
from gradvitals.store import RunWriter, open_run
from gradvitals.types import Action, Finding


def test_later_segments_win(tmp_path, make_reading):
    writer = RunWriter(tmp_path, meta={"note": 1})
    for step in range(400):
        writer.write(make_reading(step))
    writer.write(Finding(id="spike", severity="warning", title="s", first_step=100))
    writer.write(Finding(id="nan", severity="critical", title="n", first_step=350))
    writer.write(Action(kind="stop", step=360, finding="nan", taken=True))
    writer.commit()
    writer.discard()  # as a crash would: no close
    with RunWriter(tmp_path, meta={"again": True}, resume=True, first_step=300) as again:
        assert again.run_id == writer.run_id
        for step in range(300, 350):
            again.write(make_reading(step, values={"loss": -1.0 * step}))
    with RunWriter(tmp_path, meta={}, resume=True, first_step=340) as third:
        third.write(make_reading(340, values={"loss": 0.5}))
    with open_run(tmp_path) as run:
        steps, loss = run.series("loss")
        assert steps.tolist() == list(range(341))
        expected = [2.0 * step for step in range(300)] + [-1.0 * step for step in range(300, 340)] + [0.5]
        assert loss.tolist() == expected
        assert run.last_step == 340
        assert run.series("loss", since=330)[0].tolist() == list(range(331, 341))
        assert [reading.step for reading in run.readings(since=298)] == list(range(299, 341))
        assert run.matrix("grad/norm", since=335)[0].tolist() == list(range(336, 341))
        assert [finding.id for finding in run.findings] == ["spike"]
        assert [finding.id for segment in run.segments for finding in segment.hidden] == ["nan"]
        assert run.actions == []
        assert run.meta["note"] == 1
        assert run.meta["again"] is True


def test_the_last_step_is_that_of_the_checkpoint_until_new_ones_come(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(300):
            writer.write(make_reading(step))
    RunWriter(tmp_path, meta={}, resume=True, first_step=123).close()
    with open_run(tmp_path) as run:
        assert run.last_step == 122
        assert run.table("grad/norm")[0] == 122


def test_resuming_nothing_starts_a_run(tmp_path, make_reading):
    with RunWriter(tmp_path / "new", meta={}, resume=True, first_step=10) as writer:
        writer.write(make_reading(10))
    with open_run(tmp_path / "new") as run:
        assert run.last_step == 10


def test_dropped_adds_up_over_segments(tmp_path):
    for count in (2, 3):
        with RunWriter(tmp_path, meta={}, resume=True) as writer:
            writer.dropped = count
    with open_run(tmp_path) as run:
        assert run.dropped == 5


def test_two_processes_do_not_write_one_run(tmp_path):
    writer = RunWriter(tmp_path, meta={})
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        writer._execute("UPDATE segment SET pid = ?, hostname = ?", (child.pid, socket.gethostname()))
        writer.commit()
        with pytest.raises(RunError, match=f"process {child.pid}"):
            RunWriter(tmp_path, meta={}, resume=True)
    finally:
        child.communicate(b"\n")
    RunWriter(tmp_path, meta={}, resume=True).close()  # it is gone now
    writer.close()
    assert os.getpid() != child.pid


def test_layouts_of_each_segment_name_their_rows(tmp_path, make_layout, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_layout("a", "b", "c"))
        writer.write(make_reading(0))
    with RunWriter(tmp_path, meta={}, resume=True, first_step=1) as writer:
        writer.write(make_layout("c", "b", "a"))
        writer.write(make_reading(1))
    with open_run(tmp_path) as run:
        assert run.series("grad/norm", tensor="a")[1].tolist() == [0.0, 1.5]
        np.testing.assert_array_equal(run.matrix("grad/norm")[1], [[0.5, 0.25, 0.0], [1.0, 1.25, 1.5]])


def test_segments_tell_who_wrote_what_and_what_was_hidden(tmp_path, make_reading):
    writer = RunWriter(tmp_path, meta={})
    for step in range(50):
        writer.write(make_reading(step))
    writer.write(Finding(id="early", severity="warning", title="e", first_step=5))
    writer.write(Finding(id="training_stopped", severity="critical", title="boom", first_step=49))
    writer.commit()
    writer.discard()
    RunWriter(tmp_path, meta={}, resume=True, first_step=30).close()
    with open_run(tmp_path) as run:
        first, second = run.segments
    assert (first.first_step, second.first_step) == (0, 30)
    assert first.finished_at is None
    assert second.finished_at is not None
    assert [finding.id for finding in first.hidden] == ["training_stopped"]
    assert second.hidden == ()


def test_a_rank_that_is_not_there_is_told_which_there_are(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_reading(0, ranks={"ranks/norm": np.ones(3)}))
    with open_run(tmp_path) as run:
        assert run.series("ranks/norm", rank=2)[1].tolist() == [1.0]
        with pytest.raises(RunError, match=r"has no rank 5; it has ranks 0 to 2"):
            run.series("ranks/norm", rank=5)
