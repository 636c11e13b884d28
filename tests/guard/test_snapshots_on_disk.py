"""Snapshots on disk: resumed in a new process, killed while writing, and in all kinds of trouble."""

from __future__ import annotations

import json
import os
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from snapshot_runs import Position, Run, bits, seed_all, snapshots_of
from torch import nn
from torch.optim import lr_scheduler

from gradvitals.guard import RollBack, snapshot
from gradvitals.guard.snapshot import SnapshotError, SnapshotManager
from gradvitals.guard.training_state import TrainingState


def adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(net.parameters(), lr=0.01)]


def kept_steps(folder: Path) -> dict[int, str]:
    metas = [json.loads(path.read_text()) for path in sorted(folder.glob("snapshot-*/meta.json"))]
    return {meta["step"]: "healthy" if meta["healthy"] else "pending" for meta in metas}


def test_a_resumed_run_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """10 steps, and 15 from the snapshot of step 8, are 23 at once in all bits, random numbers of all kinds too."""

    def make(folder: Path | None) -> Run:
        return Run(
            lambda net: [
                torch.optim.SGD(net[0].parameters(), lr=0.05, momentum=0.9),
                torch.optim.AdamW([*net[1].parameters(), *net[3].parameters(), *net[4].parameters()], lr=0.01),
            ],
            lambda both: [
                lr_scheduler.OneCycleLR(both[0], 0.1, total_steps=99),
                lr_scheduler.CosineAnnealingLR(both[1], 50),
            ],
            folder=folder,
            settle=2,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
        )

    whole, first = make(None), make(tmp_path)
    seed_all(1)
    whole.train(23)
    expected = whole.all_bits()
    seed_all(1)
    first.train(10, snapshots=True)
    assert first.snapshots.close()
    second = make(tmp_path)
    restored = second.snapshots.resume()
    assert restored is not None
    assert (restored.step, restored.extra) == (8, {"step": 8})
    second.step = 8
    second.train(15, snapshots=True)
    assert second.snapshots.close()
    assert second.all_bits() == expected


def test_the_folder_follows_the_ring(tmp_path: Path) -> None:
    run = Run(adamw, folder=tmp_path, every=4, settle=2, keep=1)
    run.train(5, snapshots=True)
    run.snapshots.flush()
    assert kept_steps(tmp_path) == {4: "pending"}
    run.train(5, snapshots=True)
    run.snapshots.flush()
    assert kept_steps(tmp_path) == {4: "healthy", 8: "healthy"}
    run.train(2, snapshots=True)
    run.snapshots.flush()
    assert kept_steps(tmp_path) == {4: "healthy", 8: "healthy", 12: "pending"}
    run.snapshots.spoil()
    assert kept_steps(tmp_path) == {4: "healthy", 8: "healthy"}  # at once, not in a while
    assert run.snapshots.restore().step == 8
    run.step = 8
    run.train(6, snapshots=True)
    assert run.snapshots.close()
    assert kept_steps(tmp_path) == {8: "healthy", 12: "healthy"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot-00000002", "snapshot-00000004"]
    meta = json.loads((tmp_path / "snapshot-00000004" / "meta.json").read_text())
    assert meta["format"] == 3
    assert meta["torch"] == torch.__version__


# -- killed -----------------------------------------------------------------------------------------------------

KILLS = 8
PACE = RollBack(mode="on", every=2, settle=0)

WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from gradvitals.guard import RollBack
from gradvitals.guard.snapshot import SnapshotManager
from gradvitals.guard.training_state import TrainingState


def write(pipe):
    \"\"\"Check what was resumed from, then write without a pause, and tell of each step when it is on disk.\"\"\"
    net = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    state = TrainingState(net, torch.optim.SGD(net.parameters()))
    snapshots = SnapshotManager(state, RollBack(mode="on", every=1, settle=2), folder=Path(sys.argv[1]))
    restored = snapshots.resume()
    step = restored.step if restored else 0
    if restored:
        assert restored.extra["step"] == step
        values = {float(value) for p in net.parameters() for value in (p.min(), p.max())}
        assert values == {float(step)}, values
    while True:
        os.write(pipe, b"%d\\n" % step)
        step += 1
        snapshots.settle(step)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(step)
        if step % 7 == 0:
            snapshots.spoil()
        assert snapshots.due(step)
        assert snapshots.take(step, {"step": step})
        snapshots.complete()
        assert snapshots.flush()
        assert not snapshots.problems


for kill in range(int(sys.argv[2])):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        try:
            write(theirs)
        finally:
            os._exit(1)
    os.close(theirs)
    told = os.read(ours, 100)
    time.sleep(random.Random(kill).uniform(0.0, 0.4))
    os.kill(child, signal.SIGKILL)
    while more := os.read(ours, 1000):
        told += more
    os.close(ours)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "a writer failed"
    steps = [int(step) for step in told.split()]
    print(steps[0], steps[-1])
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.slow
def test_killed_at_any_moment_the_one_before_is_usable(tmp_path: Path) -> None:
    done = warm_python.run("-c", WRITERS, tmp_path, KILLS)
    assert done.returncode == 0, done.stderr
    told = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(told) == KILLS
    for before, after in pairwise(told):
        assert after[0] >= before[-1] - 1  # what was said to be on disk is, but trouble takes the newest away
    assert told[-1][-1] > KILLS


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "snapshot-00000003").mkdir()
    (tmp_path / "snapshot-00000003" / "__0_0.distcp").write_bytes(b"half of it")
    run = Run(adamw, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert run.snapshots.resume() is None
    run.snapshots.close()


# -- a disk in trouble ------------------------------------------------------------------------------------------


def test_a_folder_that_is_gone_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    run = Run(adamw, folder=folder, every=2, settle=1)
    shutil.rmtree(folder)
    run.train(7, snapshots=True)
    assert run.snapshots.flush()
    (problem,) = run.snapshots.problems
    assert str(folder) in problem
    assert "the folder is gone" in problem
    assert run.snapshots.restore().step == 6  # memory is not concerned
    folder.mkdir()
    run.step = 6
    run.train(4, snapshots=True)
    assert run.snapshots.close()
    assert len(run.snapshots.problems) == 1
    assert kept_steps(folder) == {8: "healthy", 10: "pending"}


def test_a_full_disk_leaves_the_snapshot_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 3)
    snapshots = snapshots_of(net, tmp_path, settle=1)
    snapshots.take(1)
    snapshots.flush()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for step in (2, 3):
            snapshots.settle(step)
            snapshots.take(step)
            snapshots.flush()
    (problem,) = snapshots.problems
    assert "No space left on device" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-00000001"]
    snapshots.settle(4)
    snapshots.take(4)
    assert snapshots.close()
    assert list(kept_steps(tmp_path)) == [1, 4]


def test_a_slow_disk_skips_and_never_mixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being written its memory is not touched; those that were given up meanwhile are not written."""
    go, inside = threading.Event(), threading.Event()
    write = snapshot.save_tensors

    def slow(*arguments: Any) -> None:
        inside.set()
        assert go.wait(30)
        write(*arguments)

    monkeypatch.setattr(snapshot, "save_tensors", slow)
    net = nn.Linear(3, 3)
    snapshots = snapshots_of(net, tmp_path, settle=1, keep=1)
    for step in range(1, 10):
        snapshots.settle(step)
        with torch.no_grad():
            net.weight.fill_(step)
        if snapshots.due(step):
            snapshots.take(step)
        snapshots.complete()
        assert inside.wait(30)
    go.set()
    assert snapshots.close()
    # The first was under way; of the others, those that had their place to newer ones were skipped.
    steps = list(kept_steps(tmp_path))
    assert steps[0] == 1
    assert steps[-1] >= 8
    for path in tmp_path.iterdir():
        alone = tmp_path.with_name(f"alone-{path.name}")
        shutil.copytree(path, alone / path.name)
        one = nn.Linear(3, 3)
        other = snapshots_of(one, alone, settle=1)
        restored = other.resume()
        assert restored is not None
        assert set(one.weight.flatten().tolist()) == {float(restored.step)}
        other.close()


def test_spoiled_while_being_written_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 3)
    snapshots = snapshots_of(net, tmp_path, settle=1)
    write = snapshot.save_tensors

    def spoil_amid(*arguments: Any) -> None:
        snapshots.spoil()
        write(*arguments)

    monkeypatch.setattr(snapshot, "save_tensors", spoil_amid)
    snapshots.take(1)
    assert snapshots.close()
    assert list(tmp_path.iterdir()) == []


# -- what does not fit ------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    seed_all(0)
    run = Run(adamw, lambda all: [lr_scheduler.CosineAnnealingLR(all[0], 9)], folder=tmp_path, every=2)
    run.train(3, snapshots=True)
    assert run.snapshots.close()
    return tmp_path


def training_state(**changes: Any) -> TrainingState:
    torch.manual_seed(5)
    net = changes.pop("net", None) or Run(adamw).net
    optimizers = changes.pop("optimizers", adamw)(net)
    schedulers = changes.pop("schedulers", lambda all: [lr_scheduler.CosineAnnealingLR(all[0], 9)])(optimizers)
    return TrainingState(net, optimizers, **({"schedulers": schedulers, "data": Position()} | changes))


def other_net(**changes: Any) -> nn.Module:
    net = Run(adamw).net
    for index, module in changes.items():
        net[int(index[1:])] = module
    return net


MISFITS = {
    "shape": (
        lambda: training_state(net=other_net(_4=nn.Linear(12, 5))),
        r"parameter/4\.weight: \(3, 12\) float32 in the",
    ),
    "more": (lambda: training_state(net=other_net(_2=nn.PReLU())), r"not in the snapshot: parameter/2\.weight"),
    "kind": (
        lambda: training_state(optimizers=lambda net: [torch.optim.SGD(net.parameters())]),
        "has AdamW, this run has SGD",
    ),
    "group": (
        lambda: training_state(optimizers=lambda net: [torch.optim.AdamW([{"params": [p]} for p in net.parameters()])]),
        "parameter groups: the snapshot has .* this run has ",
    ),
    "schedulers": (lambda: training_state(schedulers=lambda all: []), "has CosineAnnealingLR, this run has none"),
    "data": (lambda: training_state(data=None), "data: the snapshot has a position, this run has none"),
}


@pytest.mark.parametrize("case", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_printed_and_nothing_is_touched(written: Path, case: Any) -> None:
    make, words = case
    one = make()
    snapshots = SnapshotManager(one, PACE, written)
    before = [bits(tensor) for tensor in one.read()[1].values()]
    with pytest.raises(SnapshotError, match=words):
        snapshots.resume()
    assert [bits(tensor) for tensor in one.read()[1].values()] == before
    snapshots.close()


def test_a_damaged_file_is_an_error_that_names_it(written: Path) -> None:
    (data,) = written.glob("snapshot-*/*.distcp")
    data.write_bytes(data.read_bytes()[:100])
    snapshots = SnapshotManager(training_state(), PACE, written)
    with pytest.raises(SnapshotError, match=r"snapshot-00000001 cannot be read .* remove it"):
        snapshots.resume()
    snapshots.close()


@pytest.mark.parametrize(
    ("meta", "words"),
    [("{", "is not a snapshot of gradvitals"), ('{"format": 1, "step": 1}', "has format 1; this gradvitals reads 3")],
)
def test_snapshots_of_another_kind_are_refused(written: Path, meta: str, words: str) -> None:
    (path,) = written.glob("snapshot-*/meta.json")
    path.write_text(meta)
    with pytest.raises(SnapshotError, match=words):
        SnapshotManager(training_state(), PACE, written)
