"""The recovery lab: faults do what they say, arms do what their originals do, and scores follow from the numbers."""

from __future__ import annotations

import json
import math
import signal
import struct
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
import warm_python
from click.testing import CliRunner
from torch import Tensor, nn

from benchmarks.recovery import train as training_loop
from benchmarks.recovery.__main__ import main
from benchmarks.recovery.cell import ARMS, FAULTS, MODELS, STRUCK_MODELS, Cell, Result
from benchmarks.recovery.faults import NUM_STATE_FLIPS, SPIKE, SPIKE_STEPS, flip_bit, plant
from benchmarks.recovery.report import bounded_ratio, format_recovery, ratio, recovered, references, summarise
from benchmarks.recovery.run import plan, read_results, run_cells
from benchmarks.recovery.tasks import Batches, Training, prepare
from benchmarks.recovery.train import FixedClip, OlmoSkip, Plain, Seen, ZClipped, checksum, train
from benchmarks.runs import append_line
from gradvitals.errors import GradvitalsError

CELL = Cell(model="mlp", fault="clean", arm="none", seed=0)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bits_of(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def backward(training: Training) -> Tensor:
    loss = training.model(*training.data.take())
    loss.backward()
    return loss.detach()


def a_few_steps(training: Training, count: int = 2) -> None:
    for _ in range(count):
        backward(training)
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()


# -- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_depends_on_seed_and_number_alone(model: str) -> None:
    first, again, other = Batches(model, 1), Batches(model, 1), Batches(model, 2)
    batches = [first.take() for _ in range(4)]
    again.load_state_dict({"index": 2})
    assert all(torch.equal(*pair) for pair in zip(batches[2], again.take(), strict=True))
    assert again.state_dict() == {"index": 3}
    assert not torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], other.take()[0])


@pytest.mark.parametrize("model", MODELS)
def test_judging_a_model_changes_nothing_and_repeats(model: str) -> None:
    training = prepare(model, 0, 40)
    before = checksum(training.model)
    loss = training.validation_loss()
    assert training.validation_loss() == loss
    assert checksum(training.model) == before
    assert training.model.training
    a_few_steps(training, 30)
    assert training.validation_loss() < loss


# -- faults ---------------------------------------------------------------------------------------------------------


def test_exactly_one_bit_flips() -> None:
    random = Random(0)
    values = torch.tensor([random.uniform(-2, 2) for _ in range(12)]).view(3, 4)
    for tensor in (values.clone(), values.t().clone().t()):  # also where memory is in another order
        for bit in range(32):
            element = random.randrange(12)
            before = tensor.flatten().tolist()
            flip_bit(tensor, element, bit)
            after = tensor.flatten().tolist()
            changed = [i for i in range(12) if bits_of(before[i]) != bits_of(after[i])]
            assert changed == [element]
            assert bits_of(before[element]) ^ bits_of(after[element]) == 1 << bit
            flip_bit(tensor, element, bit)
            assert tensor.flatten().tolist() == before


@pytest.mark.parametrize("name", [name for name in FAULTS if not name[-1].isdigit()])  # those name their step
def test_where_a_fault_strikes_depends_on_its_seed_alone(name: str) -> None:
    chosen = [plant(name, seed, 300).batches for seed in range(20)]
    assert chosen == [plant(name, seed, 300).batches for seed in range(20)]
    assert len(set(chosen)) > 10
    assert all(75 <= index < 300 for batches in chosen for index in batches)


def test_one_batch_in_a_hundred_is_garbage() -> None:
    assert {len(plant("corrupted", seed, 300).batches) for seed in range(20)} == {3}
    assert len(plant("corrupted", 0, 1000).batches) == 10
    for model in MODELS:
        training, fault = prepare(model, 0, 300), plant("corrupted", 0, 300)
        batch = training.data.take()
        for index in range(300):
            inputs, targets = fault.change(training, batch, index)
            assert torch.equal(targets, batch[1]) is (index not in fault.batches)
            assert torch.equal(inputs, batch[0]) is (index not in fault.batches)
        struck = min(fault.batches)
        once, again = fault.change(training, batch, struck), fault.change(training, batch, struck)
        assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_a_nan_is_one_element_of_one_gradient() -> None:
    training, fault = prepare("mlp", 0, 300), plant("nan_gradients", 0, 300)
    assert len(fault.batches) == 3
    backward(training)
    fault.after_backward(training, min(fault.batches) - 1)
    assert sum(int(p.grad.isnan().sum()) for p in training.model.parameters()) == 0
    fault.after_backward(training, min(fault.batches))
    assert sum(int(p.grad.isnan().sum()) for p in training.model.parameters()) == 1


def test_the_learning_rate_spikes_and_comes_back() -> None:
    training, fault = prepare("mlp", 0, 300), plant("lr_spike", 0, 300)
    group = training.optimizer.param_groups[0]
    usual, seen = group["lr"], {}
    for index in range(300):
        fault.before(training, index)
        seen[index] = group["lr"]
        fault.after(training, index)
        assert group["lr"] == usual
    raised = {index for index, lr in seen.items() if lr != usual}
    assert raised == fault.batches
    assert len(raised) == SPIKE_STEPS == max(raised) - min(raised) + 1
    assert {seen[index] for index in raised} == {SPIKE * usual}
    fault.before(training, min(raised))
    group["lr"] = 0.123  # as a schedule that has gone on, or a rollback
    fault.after(training, min(raised))
    assert group["lr"] == 0.123


@pytest.mark.parametrize(("model", "names"), [("mlp", {"exp_avg", "exp_avg_sq"}), ("cnn", {"momentum_buffer"})])
def test_bits_of_the_optimizer_flip_once(model: str, names: set[str]) -> None:
    training, fault = prepare(model, 0, 300), plant("state_bit_flips", 0, 300)
    a_few_steps(training)
    weights = checksum(training.model)

    def averages() -> list[Tensor]:
        states = training.optimizer.state.values()
        return [state[name].clone().view(torch.int32) for state in states for name in sorted(names)]

    before = averages()
    (struck,) = fault.batches
    fault.before(training, struck + 1)
    assert all(torch.equal(*pair) for pair in zip(before, averages(), strict=True))
    fault.before(training, struck)
    flipped = torch.cat([(a ^ b).flatten() for a, b in zip(before, averages(), strict=True)])
    changed = flipped[flipped != 0].tolist()
    assert NUM_STATE_FLIPS * 0.9 <= len(changed) <= NUM_STATE_FLIPS  # two may have hit the same number
    assert all(value & ~sum(1 << bit for bit in range(26, 31)) == 0 for value in changed)
    assert checksum(training.model) == weights


def test_one_bit_of_one_weight_flips() -> None:
    training, fault = prepare("mlp", 0, 300), plant("weight_bit_flip", 0, 300)
    before = nn.utils.parameters_to_vector(training.model.parameters()).view(torch.int32).clone()
    fault.before(training, min(fault.batches))
    after = nn.utils.parameters_to_vector(training.model.parameters()).view(torch.int32)
    difference = before ^ after
    assert difference[difference != 0].tolist() == [1 << 30]


# -- arms -----------------------------------------------------------------------------------------------------------


def arm_with_norm(kind: type[Plain], norms: list[float]) -> Plain:
    """Steps of one weight whose gradient has these norms."""
    training = prepare("mlp", 0, 300)
    arm = kind(training)
    parameters = list(training.model.parameters())
    for norm in norms:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        parameters[0].grad.view(-1)[0] = norm
        arm.step(torch.tensor(1.0))
    return arm


def test_olmo_leaves_out_what_is_far_over_its_window() -> None:
    random = Random(1)
    norms = [1 + 0.1 * random.random() for _ in range(70)]
    arm = arm_with_norm(OlmoSkip, [*norms, 50.0, 1.05])
    assert (arm.steps, arm.kept, dict(arm.actions)) == (72, 71, {"skip": 1})
    early = arm_with_norm(OlmoSkip, [1.0, 1.1, 50.0])
    assert early.kept == 3


def test_clips_leave_the_norm_that_is_allowed() -> None:
    clipped = arm_with_norm(FixedClip, [5.0])
    assert next(clipped.training.model.parameters()).grad.norm() == pytest.approx(1, rel=1e-4)
    assert dict(clipped.actions) == {"clip": 1}
    norms = [0.5 + 0.01 * (step % 2) for step in range(25)]
    mean, std = 0.505 - 0.01 / 50, 0.01 * math.sqrt(12 * 13) / 25
    arm = arm_with_norm(ZClipped, [*norms, 0.9])
    z = (0.9 - mean) / (std + 1e-6)
    assert next(arm.training.model.parameters()).grad.norm() == pytest.approx(mean + 2.5**2 * std / z, rel=1e-3)
    assert arm.actions["clip"] == 1


# -- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_is_a_plain_loop_and_repeats_bit_for_bit() -> None:
    cell = replace(CELL, steps=40)
    training = prepare("mlp", 0, 40)
    a_few_steps(training, 40)
    seen: list[Seen] = []
    result = train(cell, watcher=seen.append)
    assert result.checksum == checksum(training.model) == train(cell).checksum
    assert result.loss == training.validation_loss()
    assert (result.steps, result.batches, result.kept, result.lost) == (40, 40, 40, 0)
    assert [(one.index, one.step) for one in seen] == [(step, step) for step in range(40)]
    assert seen[-1].loss < seen[0].loss


def test_without_snapshots_a_killed_run_begins_again_with_what_batches_are_left() -> None:
    cell = replace(CELL, fault="killed", steps=40)
    result = train(cell)
    struck = min(plant("killed", 0, 40).batches)
    assert cell.max_batches == 48
    assert (result.batches, result.kept) == (min(48, struck + 1 + 40), min(40, 48 - struck - 1))


def test_the_guard_leaves_a_clean_run_alone_and_a_nan_out() -> None:
    clean = train(replace(CELL, steps=40, arm="guard"))
    assert clean.checksum == train(replace(CELL, steps=40)).checksum
    assert (clean.actions, clean.notes, clean.lost) == ({}, (), 0)
    struck = train(replace(CELL, fault="nan_gradients", steps=40, arm="guard"))
    assert struck.actions == {"skip": 3}
    assert (struck.steps, struck.batches, struck.lost) == (40, 43, 3)
    assert len(struck.notes) == 3
    assert not struck.diverged


@pytest.mark.slow
def test_a_process_is_really_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    start = training_loop._start

    def watched(cell: Cell, folder: Path):
        done = start(cell, folder)
        codes.append((done.returncode, (folder / training_loop.STRUCK).exists()))
        return done

    monkeypatch.setattr(training_loop, "_start", watched)
    monkeypatch.setattr(sys, "executable", warm_python.executable())
    cell = replace(CELL, fault="killed", steps=40)
    result = training_loop.train_killed(cell)
    assert codes == [(-signal.SIGKILL, True), (0, True)]
    assert replace(result, seconds=0) == replace(train(cell), seconds=0)


# -- scores by hand -------------------------------------------------------------------------------------------------


def result(loss: float, untrained: float = 4.0, **changes: object) -> Result:
    names = {"model", "fault", "arm", "seed", "steps", "killed"}
    cell = replace(CELL, **{name: changes.pop(name) for name in names & changes.keys()})
    values = {"steps": 300, "batches": 300, "kept": 300, "checksum": "a", **changes}
    return Result(cell=cell, loss=loss, untrained=untrained, **values)


HAND_MADE = [
    result(2.0),
    result(1.0, seed=1),
    result(2.0, arm="guard", checksum="same"),
    result(1.0, arm="guard", seed=1, checksum="same"),
    result(2.02, fault="lr_spike", arm="guard", batches=330, actions={"roll_back": 1}),
    result(1.05, fault="lr_spike", arm="guard", seed=1, notes=("too late",)),
    result(3.0, fault="lr_spike"),
    result(math.nan, fault="lr_spike", seed=1),
    result(2.0, fault="killed", arm="guard", checksum="same", batches=312),
    result(2.0, fault="killed", arm="guard", seed=1, checksum="other"),
    result(2.0, arm="guard", steps=1000, actions={"skip": 2}, notes=("skip at 5", "skip at 7")),
]


def test_a_run_is_judged_by_the_clean_one_of_its_seed() -> None:
    reference = references(HAND_MADE)
    assert reference == {("mlp", 0, 300): 2.0, ("mlp", 1, 300): 1.0}
    near, far, bad, broken = HAND_MADE[4:8]
    assert [ratio(run, reference) for run in (near, far, bad, broken)] == [1.01, 1.05, 1.5, math.inf]
    assert [recovered(run, reference) for run in (near, far, bad, broken)] == [True, False, False, False]
    assert [bounded_ratio(run, reference) for run in (near, bad, broken)] == [1.01, 1.5, 4.0]
    assert bounded_ratio(result(1e30, seed=1), reference) == 4.0
    assert [run.diverged for run in (bad, broken, result(4.0))] == [False, True, True]


def test_the_summary_has_what_must_be_reached() -> None:
    summary = summarise(HAND_MADE)
    assert json.loads(json.dumps(summary)) == summary
    share, mean, actions, identical = summary["bars"]
    assert (share["value"], share["reached"]) == (0.5, False)
    assert mean["value"] == pytest.approx((1.01 + 1.05 + 1 + 2) / 4)
    assert mean["reached"]
    assert "2.75 (none" in mean["expected"]
    assert (actions["value"], actions["reached"], actions["what"]) == (2, False, "actions in 1,600 clean steps")
    assert (identical["value"], identical["expected"], identical["reached"]) == (1, "all 2", False)
    row = next(row for row in summary["rows"] if (row["fault"], row["arm"]) == ("lr_spike", "guard"))
    assert (row["median"], row["worst"], row["recovered"]) == (pytest.approx(1.03), 1.05, 0.5)
    assert (row["lost"], row["batches"], row["actions"]) == (15, 315, {"roll_back": 1})
    assert [row["cell"] for row in summary["not_recovered"]] == ["mlp.lr_spike.guard.1", "mlp.killed.guard.1"]
    assert [(row["identical"], row["repeated"]) for row in summary["killed"]] == [(True, 12), (False, 0)]
    text = format_recovery(summary)
    for words in ("with the Guard", "1.0300", "broken", "skip at 7", "too late", "bit for bit", "times 30"):
        assert words in text


# -- the whole ------------------------------------------------------------------------------------------------------


def test_the_plan_has_every_cell_once_and_always_a_reference() -> None:
    cells = plan(seeds=2)
    cells_of_each = len(ARMS) * (1 + len(FAULTS)) + 1  # and one that is killed beside its fault
    assert len(cells) == len(set(cells)) == 2 * (len(STRUCK_MODELS) * cells_of_each + len(MODELS))
    one = plan(("mlp",), ("lr_spike",), ("olmo",), seeds=1)
    assert {(cell.fault, cell.arm) for cell in one} == {("clean", "none"), ("clean", "olmo"), ("lr_spike", "olmo")}
    assert {cell.seed for cell in plan(seeds=2, first_seed=5)} == {5, 6}


def test_finished_runs_are_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    cells = plan(("mlp",), ("poisoned",), ("none",), seeds=1, steps=40)
    told: list[tuple[int, int, str]] = []
    first = run_cells(cells, out=path, workers=1, progress=lambda *args: told.append(args))
    assert [done for done, _, _ in told] == [1, 2]
    assert [run.cell for run in first] == cells
    with path.open("a") as file:
        file.write('{"cell": {"mod')  # a command that was cut
    told.clear()
    again = run_cells([*cells, replace(CELL, steps=41)], out=path, workers=1, progress=lambda *args: told.append(args))
    assert again[:2] == first
    assert told == [(3, 3, "mlp.clean.none.0.41")]
    assert len(read_results(path)) == 3


def test_records_keep_what_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    broken = result(math.nan, actions={"clip": 2}, notes=("one",))
    append_line(path, broken.to_json())
    (read,) = read_results(path).values()
    assert math.isnan(read.loss)
    assert replace(read, loss=0.0) == replace(broken, loss=0.0)
    path.write_text("nonsense\n")
    with pytest.raises(GradvitalsError, match="line 1, is no finished run"):
        read_results(path)


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    args = ["--model", "mlp", "--arm", "none", "--arm", "clip", "--fault", "poisoned"]
    args += ["--seeds", "1", "--steps", "40", "--workers", "1", "--out", str(tmp_path / "runs.jsonl")]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.stderr
    assert "Arm beside arm" in done.stdout
    as_json = CliRunner().invoke(main, [*args, "--figure", str(tmp_path / "losses.svg"), "--json"])
    assert all(f">{arm}<" in (tmp_path / "losses.svg").read_text() for arm in ("none", "clip"))
    rows = json.loads(as_json.stdout)["rows"]
    assert [(row["fault"], row["arm"]) for row in rows] == [
        (fault, arm) for fault in ("clean", "poisoned") for arm in ("none", "clip")
    ]
    assert rows[0]["median"] == 1
