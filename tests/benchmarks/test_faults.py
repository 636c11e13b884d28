"""The fault zoo: its scores are right by hand, every fault bites, and a small part of it runs whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from benchmarks.faults import tasks, zoo
from benchmarks.faults.__main__ import main
from benchmarks.faults.record import Recording, load_recordings, record, save_recording
from benchmarks.faults.report import format_zoo, summarise
from benchmarks.faults.run import QUICK, cases
from benchmarks.faults.score import (
    Alarm,
    Outcome,
    Planted,
    alarm_rate,
    belongs,
    diagnose,
    effect,
    false_alarms,
    found,
    judge,
    right_place,
    tally,
)
from benchmarks.faults.tasks import RECIPES, Task, prepare, with_changes
from benchmarks.faults.zoo import CONTROLS, FAULTS, FROZEN
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.errors import GradvitalsError
from gradvitals.types import Layout, Reading

PLANTED = Planted(kind="step", step=100, finds=("explosion", "loss_spike"), place=("blocks.1",))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def outcome(*ours: Alarm, others: tuple[Alarm, ...] = (), fault: Planted | None = PLANTED, **more: object) -> Outcome:
    values = {"name": "made up", "task": "mlp", "seed": 0, "steps": 200, **more}
    return Outcome(fault=fault, alarms={"gradvitals": ours, "olmo": others}, **values)


def alarm(step: int, rule: str = "explosion", *tensors: str) -> Alarm:
    return Alarm(id=rule, step=step, tensors=tensors)


# -- scores by hand -------------------------------------------------------------------------------------------------


def test_a_fault_is_found_by_an_expected_rule_from_its_step_on() -> None:
    early, other, late = alarm(99), alarm(100, "dead_tensor"), alarm(103, "loss_spike")
    assert found(outcome(early, other), "gradvitals") == []
    assert found(outcome(early, other, late), "gradvitals") == [late]
    assert found(outcome(alarm(100)), "gradvitals") == [alarm(100)]
    assert found(outcome(late, fault=None), "gradvitals") == []


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("blocks.1", True),
        ("blocks.1.mlp.weight", True),
        ("blocks.1.attn/head2", True),
        ("blocks.10.mlp.weight", False),
        ("blocks", False),
    ],
)
def test_a_name_belongs_to_a_place_by_whole_parts(name: str, inside: bool) -> None:
    assert belongs(name, ["blocks.1"]) is inside


def test_the_place_is_that_of_the_first_alarm_that_names_one() -> None:
    place = ("blocks.1",)
    right, wrong = alarm(100, "a", "blocks.1.w", "head.w"), alarm(100, "b", "head.w", "blocks.1.w")
    assert right_place([right, wrong], place)
    assert not right_place([wrong, right], place)
    assert right_place([alarm(100), right], place)
    assert not right_place([alarm(100)], place)
    assert not right_place([], place)


def test_a_tally_counts_finds_places_and_delays() -> None:
    runs = [
        outcome(alarm(102, "explosion", "blocks.1.w")),
        outcome(alarm(110, "loss_spike", "head.w")),
        outcome(alarm(50)),
        outcome(alarm(104), fault=replace(PLANTED, place=())),
        outcome(fault=None),
    ]
    result = tally(runs, "gradvitals")
    assert (result.runs, result.found, result.recall) == (4, 3, 0.75)
    assert (result.with_place, result.placed) == (3, 1)
    assert result.place == pytest.approx(1 / 3)
    assert (result.delays, result.delay) == ((2, 10, 4), 4)
    assert result.rules == ("explosion", "loss_spike")
    nothing = tally([], "gradvitals")
    assert (nothing.recall, nothing.place, nothing.delay) == (None, None, None)


def test_false_alarms_are_those_of_healthy_steps() -> None:
    sick, well = outcome(alarm(99), alarm(100)), outcome(alarm(10), alarm(20, "dead_tensor"), fault=None)
    assert false_alarms(sick, "gradvitals") == [alarm(99)]
    assert len(false_alarms(well, "gradvitals")) == 2
    assert alarm_rate([sick], "gradvitals") == pytest.approx(10_000 / 100)
    assert alarm_rate([sick, well], "gradvitals") == pytest.approx(10_000 * 3 / 300)
    assert alarm_rate([outcome(fault=replace(PLANTED, step=0))], "gradvitals") is None


def test_the_effect_is_measured_against_the_twin() -> None:
    steps = np.arange(200)
    healthy = {"loss": 1.0 + 0 * steps, "grad/norm": 2.0 + 0 * steps, "update/norm": 0.1 + 0 * steps}
    sick = {name: series.copy() for name, series in healthy.items()}
    sick["grad/norm"][100] *= 8
    sick["update/norm"][120] /= 5
    sick["loss"][100:] = math.nan
    seen = effect(outcome(series=sick), outcome(series=healthy, fault=None))
    assert (seen.norm_ratio, seen.update_ratio) == (pytest.approx(8), pytest.approx(0.2))
    assert math.isnan(seen.loss)
    assert (seen.twin_loss, seen.first_difference) == (1.0, 100)
    same = effect(outcome(series=healthy), outcome(series=healthy, fault=None))
    assert (same.norm_ratio, same.first_difference) == (1.0, None)


def test_tables_show_every_detector_fault_and_rule() -> None:
    runs = [outcome(alarm(102), others=(alarm(150, "olmo"),)), outcome(alarm(3, "clip_idle"), name="calm", fault=None)]
    result = summarise(runs)
    assert json.loads(json.dumps(result)) == result
    ours, olmo = result["detectors"]
    assert (ours["recall_step"], ours["recall_slow"], ours["delay_step"], ours["false_alarms"]) == (1, None, 2, 50.0)
    assert (olmo["recall_step"], olmo["delay_step"], olmo["place"], olmo["false_alarms"]) == (1, 50, None, 0)
    assert {row["rule"]: row["false_alarms"] for row in result["rules"]} == {"clip_idle": 1, "explosion": 0}
    text = format_zoo(result)
    for word in ("Side by side", "gradvitals", "olmo", "made up", "explosion", "clip_idle", "100 %", "50.0"):
        assert word in text
    widths = {len(line) for line in text.split("\n\n")[2].splitlines()}
    assert len(widths) == 1


# -- what detectors are shown ---------------------------------------------------------------------------------------


def calm_recording(steps: int = 60, **changes: object) -> Recording:
    readings = [
        [Reading(step=i, time=0.0, values={"loss": 2.0 - 0.001 * i, "grad/norm": 1.0, "lr": 0.1, "update/norm": 0.1})]
        for i in range(steps)
    ]
    values = {"name": "calm", "fault": None, "task": "mlp", "seed": 0, "planted": None, "layout": Layout()}
    return Recording(**{**values, "facts": {}, "steps": readings, **changes})


def test_a_nan_is_seen_by_gradvitals_and_trainpulse_and_a_calm_run_by_none() -> None:
    calm = calm_recording()
    broken = calm_recording()
    broken.steps[40][0].values["loss"] = math.nan
    said, level, milliseconds = judge(calm)
    assert level == "healthy"
    assert {name: len(alarms) for name, alarms in said.items() if alarms} == {}
    assert milliseconds > 0
    said, level, _ = judge(broken)
    assert level == "unhealthy"
    assert [alarm.step for alarm in said["trainpulse"]] == [40]
    assert ("loss_nonfinite", 40) in [(alarm.id, alarm.step) for alarm in said["gradvitals"]]
    assert set(said) >= {"gradvitals", "trainpulse", "olmo", "zclip", "llmfoundry", "lightning", "megatron", "llmc"}


# -- recordings -----------------------------------------------------------------------------------------------------


def test_a_kept_recording_says_the_same_as_the_run_it_is_of(tmp_path: Path) -> None:
    recording = record("short", with_changes(RECIPES["transformer"], steps=6), seed=3)
    save_recording(recording, tmp_path)
    (loaded,) = load_recordings(tmp_path)
    for name in ("name", "fault", "task", "seed", "planted", "layout", "facts", "label"):
        assert getattr(loaded, name) == getattr(recording, name)
    assert len(loaded.steps) == 6
    for before, after in zip(recording.steps, loaded.steps, strict=True):
        assert len(before) == len(after) >= 3
        for left, right in zip(before, after, strict=True):
            assert left.to_json() == right.to_json()
    assert diagnose(loaded) == diagnose(recording)


def test_a_folder_without_recordings_is_said(tmp_path: Path) -> None:
    with pytest.raises(GradvitalsError, match="holds no recordings"):
        load_recordings(tmp_path)
    (tmp_path / "old.json").write_text('{"format": 0}')
    with pytest.raises(GradvitalsError, match="record it again"):
        load_recordings(tmp_path)


# -- tasks, controls and faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear.regression", "mlp.logistic", "cnn.new_head"])
def test_a_loop_of_a_beginner_raises_no_alarm(name: str) -> None:
    task, _, control = name.partition(".")
    recipe = next(one.recipe for one in CONTROLS if (one.recipe.task, one.id) == (task, control))
    recording = record(control, with_changes(recipe, stop=60), seed=2, tensor_every=10)
    assert diagnose(recording) == ([], "healthy")


def test_the_sides_of_a_gan_are_trained_in_turn_and_their_passes_are_known_to_be_mixed() -> None:
    recording = record("two_sides", with_changes(RECIPES["gan"], stop=80), seed=0, tensor_every=10)
    told = recording.series("step/in_turn")
    assert np.isnan(told[:3]).all()
    assert (told[3:] == 1).all()
    assert diagnose(recording) == ([], "healthy")
    diagnosis = Diagnosis(info=RunInfo.from_json(recording.facts))
    diagnosis.describe(recording.layout)
    for step in recording.steps:
        diagnosis.read(step)
    [mixed] = [finding for finding in diagnosis.findings if finding.id == "mixed_passes"]
    assert mixed.severity == "info"
    assert "GAN" in mixed.causes[0]
    assert mixed.evidence["seen"]["gsnr"] < 0


@pytest.mark.parametrize("task", RECIPES)
def test_a_task_learns(task: str) -> None:
    training = prepare(with_changes(RECIPES[task], steps=60), seed=0)
    losses = []
    for step in range(60):
        training.set_lr(step)
        batches = training.batches()
        loss = torch.stack([training.loss(*batch) for batch in batches]).mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:5])


@pytest.fixture
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a few steps are trained, or none."""
    monkeypatch.setattr(tasks, "NUM_PICTURES", {"mlp": 640, "cnn": 640})


@pytest.fixture(scope="module")
def twin_of() -> Callable[[Task], Recording]:
    """The healthy twin of all faults of a task, trained once."""
    return cache(lambda task: record("twin", with_changes(RECIPES[task], steps=8), 0))


@pytest.mark.usefixtures("few_pictures")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_bites_from_its_step_on_and_not_before(
    name: str, twin_of: Callable[[Task], Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "MIDDLE", 4)
    fault = FAULTS[name]
    task = fault.tasks[0]
    ours, twin = record(name, with_changes(RECIPES[task], steps=8), 0, fault), twin_of(task)
    planted = fault.planted(0)
    assert ours.planted == planted == (4 if fault.later else 0)

    def numbers(recording: Recording) -> list[np.ndarray]:
        general = [step[0] for step in recording.steps]
        return [np.array([r.values["loss"], *r.tensors["grad/norm"], *r.tensors["update/norm"]]) for r in general]

    pairs = list(zip(numbers(ours), numbers(twin), strict=True))
    assert all(np.array_equal(left, right, equal_nan=True) for left, right in pairs[:planted])
    assert any(left.shape != right.shape or not np.allclose(left, right) for left, right in pairs[planted:])


@pytest.mark.usefixtures("few_pictures")
def test_a_fault_names_real_layers() -> None:
    for fault in FAULTS.values():
        for task, places in fault.place.items():
            model = prepare(fault.change(RECIPES[task]), seed=0).model
            for place in places:
                assert isinstance(model.get_submodule(place), nn.Module)


@pytest.mark.usefixtures("few_pictures")
@pytest.mark.parametrize("task", FROZEN)
@pytest.mark.parametrize("name", ["frozen_left_out", "frozen_lr_0", "frozen_detached"])
def test_a_frozen_layer_does_not_move_and_the_others_do(name: str, task: str) -> None:
    fault = FAULTS[name]
    training = prepare(RECIPES[task], seed=0)
    fault.attach(training, 0)
    names = [info for info, _ in training.model.named_parameters()]
    before = {key: value.clone() for key, value in training.model.state_dict().items()}
    for step in range(2):
        training.set_lr(step)
        for batch in training.batches():
            training.loss(*batch).backward()
        training.optimizer.step()
    assert [info for info, _ in training.model.named_parameters()] == names
    place = fault.place_in(task)
    for key, parameter in training.model.named_parameters():
        assert torch.equal(parameter, before[key]) is belongs(key, place), key


def test_a_planted_nan_is_in_its_layer_alone() -> None:
    fault = replace(FAULTS["nan_in_layer"], attach=lambda training, _: FAULTS["nan_in_layer"].attach(training, 3))
    recording = record("nan", with_changes(RECIPES["mlp"], steps=5), 0, fault)
    names = recording.layout.names("tensors")
    for step, readings in enumerate(recording.steps):
        bad = {names[i] for i in np.flatnonzero(np.isnan(readings[0].tensors["grad/norm"]))}
        assert bad == (set() if step < 3 else {"layers.1.weight"} if step == 3 else set(names))


# -- the whole ------------------------------------------------------------------------------------------------------


def test_cases_can_be_picked() -> None:
    assert {case.seed for case in cases(2)} == {0, 1}
    assert {case.seed for case in cases(2, first_seed=7)} == {7, 8}
    assert {case.task for case in cases(1, "transformer")} == {"transformer"}
    assert [case.label for case in cases(1, "cnn.lr_x30$")] == ["cnn.lr_x30.0"]
    assert sorted(f"{case.task}.{case.name}" for case in cases(3, quick=True)) == sorted(QUICK)
    with pytest.raises(GradvitalsError, match="no run of the zoo"):
        cases(1, "elephant")
    with pytest.raises(GradvitalsError, match="no regular expression"):
        cases(1, "(")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "elephant"], "no run of the zoo"),
        (["--reuse", "nowhere"], "nowhere"),
        (["--reuse", ".", "--keep", "x"], "give one of them"),
        (["--seeds", "0"], "--seeds"),
    ],
)
def test_what_cannot_be_done_exits_with_2_and_a_reason(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, [*args])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("warm_spawn")
def test_the_quick_zoo_runs_whole_and_says_the_same_again(tmp_path: Path) -> None:
    runner = CliRunner()
    kept = tmp_path / "zoo"
    first = runner.invoke(main, ["--quick", "--keep", str(kept), "--json"])
    assert first.exit_code == 0, first.stderr
    again = runner.invoke(main, ["--reuse", str(kept), "--json"])
    result, repeated = json.loads(first.stdout), json.loads(again.stdout)
    for name in ("detectors", "faults", "rules", "models", "effects"):
        assert result[name] == repeated[name]
    assert result["runs"] == len(QUICK)
    ours = next(row for row in result["detectors"] if row["detector"] == "gradvitals")
    assert ours["recall"] >= 0.85
    assert ours["place"] == 1
    assert ours["false_alarms"] == 0
    assert all(ours["recall"] > row["recall"] for row in result["detectors"] if row["detector"] != "gradvitals")
