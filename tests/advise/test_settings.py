"""Advice on the learning rate, the batch size, clipping and layers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from runs_to_advise import LAYERS, advised, lognormal, write_run

import gradvitals as gv
from gradvitals.advise import Advice, Advised, advise
from gradvitals.advise.advice import rounded_up
from gradvitals.advise.clip import quantile_interval
from gradvitals.advise.record import far_above
from gradvitals.cli import main
from gradvitals.diagnose import RULES
from gradvitals.report.report import Checks, Report
from gradvitals.store.reader import open_run
from gradvitals.types import Action, Finding, Fix


def lr(step: int) -> float:
    return 1e-3


@pytest.mark.parametrize(
    ("ratio", "proposed"),
    [
        (1e-3, 5e-3),  # five times to 0.5 %
        (5e-5, 1e-2),  # a hundred times, of which it takes ten
        (5e-2, 1e-4),
        (1.0, 1e-4),
        (2.1e-3, None),
        (5e-3, None),
        (2.9e-2, None),
    ],
)
def test_the_rate_goes_to_the_usual_size_of_updates(tmp_path: Path, ratio: float, proposed: float | None) -> None:
    advice = advised(tmp_path, lr=lr, ratio=lambda step: ratio).learning_rate
    assert advice.confidence == "fair"
    assert advice.values["proposed"] == (proposed if proposed is None else pytest.approx(proposed))
    assert advice.values["lr"] == pytest.approx(1e-3)
    assert advice.values["ratio"] == pytest.approx(ratio)
    assert advice.figures


def test_only_the_middle_of_the_run_counts(tmp_path: Path) -> None:
    def ratio(step: int) -> float:
        return 5e-3 if 150 <= step < 450 else 1e-6

    advice = advised(tmp_path, lr=lr, ratio=ratio).learning_rate
    assert advice.answer.startswith("Keep the learning rate of 0.001")


def test_readings_on_both_sides_of_the_limit_are_a_weak_sign(tmp_path: Path) -> None:
    advice = advised(tmp_path, lr=lr, ratio=lambda step: 1e-3 if step % 5 < 3 else 4e-3).learning_rate
    assert advice.values["proposed"] == pytest.approx(5e-3)
    assert advice.confidence == "low"


def warning(name: str, **more: int) -> Finding:
    return Finding(id=name, severity="warning", title=f"about {name}", first_step=5, **more)


@pytest.mark.parametrize("name", ["explosion", "lr_too_high", "dead_units", "clip_saturated", "loss_rising"])
def test_an_unstable_run_gets_no_higher_rate(tmp_path: Path, name: str) -> None:
    unstable = [warning(name, last_step=50)]
    advice = advised(tmp_path / "low", lr=lr, ratio=lambda step: 1e-4, findings=unstable).learning_rate
    assert not advice.can_tell
    assert f"not stable: about {name}" in advice.answer
    lower = advised(tmp_path / "high", lr=lr, ratio=lambda step: 0.5, findings=unstable).learning_rate
    assert lower.values["proposed"] == pytest.approx(1e-4)


def test_a_rate_that_the_doctor_calls_too_high_is_not_kept(tmp_path: Path) -> None:
    found = replace(warning("lr_too_high"), fixes=(Fix("lower it", {"lr": 2e-6}),))
    advice = advised(tmp_path / "open", lr=lr, ratio=lambda step: 5e-3, findings=[found]).learning_rate
    assert advice.values["proposed"] == pytest.approx(2e-6)
    assert advice.answer.startswith("Lower the learning rate from ")
    assert "about lr_too_high" in advice.answer
    over = replace(found, last_step=50)
    assert (
        advised(tmp_path / "over", lr=lr, ratio=lambda step: 5e-3, findings=[over]).learning_rate.answer[:4] == "Keep"
    )


BUGS = ["stale_gradients", "unchanged_weights", "loss_mismatch", "unscaled_data", "data_order"]


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_comes_before_settings(tmp_path: Path, name: str) -> None:
    bug, symptom = warning(name), replace(warning("explosion"), follows=name, first_step=0)
    made = {"lr": lr, "ratio": lambda step: 1e-4, "gsnr": lambda step: 0.02}
    advice = advised(tmp_path / "run", findings=[symptom, bug], **made)
    assert advice.root is not None
    assert (advice.root.id, advice.to_json()["root"]["title"]) == (name, f"about {name}")
    for piece in (advice.learning_rate, advice.max_grad_norm, advice.batch_size, advice.warmup, advice.decay):
        assert f"the numbers of this run show a bug ({name})" in piece.answer
        assert not any(piece.values.values())
    printed = CliRunner(env={"COLUMNS": "120"}).invoke(main, ["advise", str(tmp_path / "run")]).output
    assert printed.startswith(f"First: about {name} [{name}]\n")


def test_advice_leads_with_what_the_doctor_names_and_keeps_settings_that_it_leaves_alone(tmp_path: Path) -> None:
    too_high = replace(warning("lr_too_high"), fixes=(Fix("lower it", {"lr": 2e-6}),))
    short = advised(tmp_path / "short", steps=8, lr=lr, findings=[too_high])
    assert short.root is not None
    assert short.root.id == "lr_too_high"
    assert short.learning_rate.values["proposed"] == 2e-6
    assert advised(tmp_path / "healthy", lr=lr).root is None


# -- batch size ------------------------------------------------------------------------------------------------------


def batch(path: Path, **made: object) -> Advice:
    return advised(path, **made).batch_size


def test_the_noise_scale_is_the_batch_over_its_gsnr(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.2, gsnr_error=0.05)  # of 16 samples each
    assert advice.values["noise_scale"] == pytest.approx(16 / 0.2)
    assert advice.values["low"] == pytest.approx(16 / 0.25)
    assert advice.values["high"] == pytest.approx(16 / 0.15)
    assert advice.values["batch_size"] == 64
    assert advice.values["steps_factor"] == pytest.approx(1 + 80 / 64)
    assert advice.values["samples_factor"] == pytest.approx(1 + 64 / 80)
    assert advice.values["proposed"] is None
    assert advice.answer == "Keep the batch of 64: the noise scale is about 80 samples."
    assert "proxy" in advice.notes[0]
    assert advice.confidence == "fair"


def test_a_batch_far_below_the_noise_scale_may_grow(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.02, gsnr_error=0.005)  # 800 samples, 640 to 1067
    assert advice.values["proposed"] == 256
    assert advice.answer.startswith("Use a larger batch: 256 instead of 64")
    fewer = 1 - (1 + 800 / 256) / (1 + 800 / 64)
    assert f"{100 * fewer:.0f} % fewer steps" in advice.answer
    assert "Multiply the learning rate by 2 " in advice.notes[1]
    assert "Adam" in advice.notes[1]


def test_sgd_takes_the_learning_rate_with_the_batch(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.02, gsnr_error=0.005, facts={"optimizer": "SGD"})
    assert "Multiply the learning rate by 4 " in advice.notes[1]


def test_a_batch_far_above_the_noise_scale_may_shrink(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 2.0, gsnr_error=0.1)  # 8 samples
    assert advice.values["proposed"] == 16
    assert "A smaller batch is enough: 16 instead of 64" in advice.answer


def test_an_interval_that_holds_zero_says_cannot_tell(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.1, gsnr_error=0.5)
    assert not advice.can_tell
    assert "not identifiable" in advice.answer
    assert advice.values["noise_scale"] is None


def test_a_lower_end_far_over_the_batch_is_enough_for_a_larger_one(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.01, gsnr_error=0.02)  # over 16 / 0.03 = 533 samples
    assert advice.values["low"] == pytest.approx(16 / 0.03)
    assert advice.values["proposed"] == 256
    assert advice.confidence == "low"


def test_without_a_batch_size_the_noise_scale_is_told_in_micro_batches(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.2, batch_size=lambda step: None)
    assert advice.figures[0].values["micro_batches"] == pytest.approx(5)


def test_readings_at_another_batch_size_are_not_mixed_in(tmp_path: Path) -> None:
    def size(step: int) -> float:
        return 64.0 if step < 400 else 256.0

    def gsnr(step: int) -> float:  # one noise scale of 80 samples at first, another one later
        return 16 / 80 if step < 400 else 64 / 320

    advice = batch(tmp_path, steps=1000, gsnr=gsnr, gsnr_error=0.01, batch_size=size)
    assert advice.values["noise_scale"] == pytest.approx(320)
    assert advice.values["batch_size"] == 256
    assert all((figure.first_step or 400) >= 400 for figure in advice.figures)


def test_averages_that_share_no_reading_are_joined(tmp_path: Path) -> None:
    advice = batch(tmp_path, steps=2000, gsnr=lambda step: 0.2, gsnr_error=0.05)
    joined = advice.figures[0].values
    assert joined["readings"] > 80
    assert joined["low"] > 0.16  # narrower than each


# -- clipping --------------------------------------------------------------------------------------------------------

Z95 = 1.6449


def spike(first: int, last: int | None, severity: str = "warning") -> Finding:
    return Finding(id="explosion", severity=severity, title="a spike", first_step=first, last_step=last)  # type: ignore[arg-type]


def test_the_limit_is_the_known_quantile_of_healthy_norms(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=2000, norm=lognormal(2.0, 0.2)).max_grad_norm
    truth = 2.0 * math.exp(0.2 * Z95)
    assert advice.values["low"] < truth < advice.values["high"]
    assert truth * 0.95 < advice.values["max_norm"] < truth * 1.08
    assert advice.values["would_clip"] == pytest.approx(0.05, abs=0.02)
    assert advice.values["schedule"] is None
    assert advice.values["clips_at"] is None
    assert advice.confidence == "good"
    assert advice.answer.startswith("Clip to a norm of 2.8; this run does not clip.")


def test_the_interval_holds_the_quantile_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    truth = math.exp(0.3 * Z95)
    held = 0
    for _ in range(400):
        _, low, high = quantile_interval(np.exp(0.3 * rng.normal(size=600)), 0.95)
        held += low <= truth <= high
    assert 0.92 <= held / 400 <= 0.995


def test_the_interval_is_wider_where_neighbouring_steps_are_alike() -> None:
    rng = np.random.default_rng(0)
    independent, walk = rng.normal(size=2000), np.zeros(2000)
    for i in range(1, 2000):
        walk[i] = 0.95 * walk[i - 1] + math.sqrt(1 - 0.95**2) * independent[i]
    widths = []
    for values in (independent, walk):
        _, low, high = quantile_interval(np.exp(0.3 * values), 0.95)
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_spikes_neither_raise_the_limit_nor_go_uncounted(tmp_path: Path) -> None:
    calm = lognormal(1.0, 0.1)
    plain = advised(tmp_path / "a", norm=calm).max_grad_norm
    spiky = advised(tmp_path / "b", norm=lambda step: 50.0 if step % 40 == 7 else calm(step)).max_grad_norm
    assert spiky.values["max_norm"] == pytest.approx(plain.values["max_norm"], rel=0.1)
    assert any("and 13 of those left out (13)" in figure.text for figure in spiky.figures)


def test_steps_inside_findings_and_actions_are_left_out(tmp_path: Path) -> None:
    def norm(step: int) -> float:
        return 9.0 if 200 <= step < 300 else 1.0 + 0.001 * (step % 10)

    actions = [Action(kind="skip", step=step, finding="explosion", taken=True) for step in (400, 401)]
    advice = advised(tmp_path, norm=norm, findings=[spike(200, 299)], actions=actions).max_grad_norm
    assert advice.values["max_norm"] == 1.1
    counted = next(figure for figure in advice.figures if "in_findings" in figure.values)
    assert counted.values["in_findings"] == 102


def test_a_run_in_trouble_throughout_gives_no_limit(tmp_path: Path) -> None:
    advice = advised(tmp_path, findings=[spike(0, None)]).max_grad_norm
    assert not advice.can_tell
    assert advice.answer.startswith("Cannot tell, because it needs 100 healthy steps")


def test_falling_norms_give_a_schedule_and_name_what_follows_them(tmp_path: Path) -> None:
    noise = lognormal(1.0, 0.05)
    advice = advised(tmp_path, steps=1000, norm=lambda step: 4.0 * math.exp(-step / 400) * noise(step)).max_grad_norm
    limits = [part["max_norm"] for part in advice.values["schedule"]]
    assert limits == sorted(limits, reverse=True)
    assert advice.values["max_norm"] == limits[0]
    assert advice.values["drift"] == pytest.approx(math.exp(-675 / 400), rel=0.1)
    assert "Let the clipping limit fall" in advice.answer
    assert "ZClip" in advice.notes[0]
    assert "AdaGC" in advice.notes[0]


@pytest.mark.parametrize(
    ("max_norm", "words"), [(0.1, "Raise max_norm from 0.1"), (1.3, "Keep max_norm at 1.3"), (20.0, "Lower max_norm")]
)
def test_the_limit_in_use_is_judged(tmp_path: Path, max_norm: float, words: str) -> None:
    advice = advised(tmp_path, norm=lognormal(1.0, 0.1), max_norm=max_norm).max_grad_norm
    assert advice.answer.startswith(words)
    assert advice.values["clips_at"] == pytest.approx(max_norm)
    assert advice.values["clips"] == {0.1: 1.0, 1.3: pytest.approx(0.004, abs=0.01), 20.0: 0.0}[max_norm]


def test_raising_the_limit_makes_the_steps_of_sgd_longer(tmp_path: Path) -> None:
    sgd = advised(tmp_path, norm=lognormal(1.0, 0.1), max_norm=0.1, facts={"optimizer": "SGD"}).max_grad_norm
    assert "lower the learning rate" in sgd.notes[0]


def test_an_outlier_is_far_above_its_neighbours_alone() -> None:
    values = np.exp(np.linspace(0, 3, 500))  # rises twentyfold, slowly
    assert not far_above(values).any()
    values[250] *= 5
    assert np.flatnonzero(far_above(values)).tolist() == [250]


@settings(deadline=None, max_examples=60)
@given(hnp.arrays(np.float64, st.integers(100, 300), elements=st.floats(1e-6, 1e6)))
def test_the_limit_is_never_below_the_median(values: np.ndarray) -> None:
    value, low, high = quantile_interval(values, 0.95)
    assert low <= value <= high
    assert rounded_up(value) >= value >= np.median(values)


@given(st.floats(1e-12, 1e12))
def test_rounding_up_never_rounds_down(value: float) -> None:
    assert value <= rounded_up(value) <= 1.1 * value * (1 + 1e-9)


def named(name: str, **seen: float) -> Finding:
    return Finding(id=name, severity="info", title="a limit", first_step=9, evidence={"seen": seen})


@pytest.mark.parametrize(
    ("findings", "notes"),
    [
        ([], []),
        ([named("clip_saturated", max_norm=2.0)], []),  # the same
        (
            [
                named("clip_saturated", max_norm=1.5, steps=240),
                named("clip_saturated", max_norm=1.1, steps=200),
            ],
            [
                "`gradvitals doctor` names 1.1 (clip_saturated), which is based on 200 steps alone; "
                "prefer the one above."
            ],
        ),
        (
            [named("clipped_twice", loop=0.5, optimizer=0.2)],
            [
                "Clip in one place (clipped_twice): 0.2 is only the lower of two limits in use; prefer the one "
                "above, which is based on the norms."
            ],
        ),
    ],
)
def test_of_several_limits_it_says_which_to_take(tmp_path: Path, findings: list[Finding], notes: list[str]) -> None:
    advice = advised(tmp_path, norm=lambda step: 2.0, max_norm=1.9, findings=findings).max_grad_norm
    assert advice.values["max_norm"] == 2.0
    assert [note for note in advice.notes if "the one above" in note] == notes


@pytest.mark.parametrize("name", ["clip_saturated", "clip_idle"])
def test_a_finding_about_the_limit_names_the_advice_as_the_one_to_take(name: str) -> None:
    [cure, *_] = RULES[name].message.fixes.values()
    assert cure.endswith("After the run, `gradvitals advise` suggests a limit based on all healthy steps")


def test_notes_do_not_make_steps_unhealthy(tmp_path: Path) -> None:
    advice = advised(tmp_path, norm=lognormal(1.0, 0.1), findings=[spike(0, None, "info")]).max_grad_norm
    assert advice.can_tell


# -- layers ----------------------------------------------------------------------------------------------------------


def layers(path: Path, **made: Any) -> Advice:
    return advised(path, **made).layers


def only(place: int, value: float, usual: float) -> Any:
    return lambda step: [value if i == place else usual for i in range(len(LAYERS))]


def test_layers_alike_do_not_stand_out(tmp_path: Path) -> None:
    advice = layers(tmp_path)
    assert advice.answer == "No layer stands out."
    assert advice.values["layers"] == []
    assert any("0.001" in figure.text for figure in advice.figures)


@pytest.mark.parametrize(
    ("made", "pattern", "place"),
    [
        ({"norms": only(1, 0.0, 0.5)}, "no gradient", 1),
        ({"norms": only(2, 1e-6, 0.5)}, "vanishing", 2),
        ({"norms": lambda step: [0.5, 0.5, 0.5, 0.5, 0.5 if step < 300 else 50.0]}, "growing", 4),
        ({"updates": only(3, 0.3, 1e-3)}, "moves too far", 3),
        ({"updates": only(3, 1e-9, 1e-3)}, "hardly moves", 3),
    ],
)
def test_the_one_layer_that_stands_out_is_named(tmp_path: Path, made: dict[str, Any], pattern: str, place: int) -> None:
    advice = layers(tmp_path, **made)
    (need,) = advice.values["layers"]
    assert (need["layer"], need["pattern"]) == (LAYERS[place], pattern)
    assert advice.answer == "1 of 5 layers stand out."
    assert LAYERS[place] in advice.figures[0].text


def test_an_embedding_of_nothing_but_noise_is_told_as_one(tmp_path: Path) -> None:
    made = {"gsnr": lambda step: 2.0, "gsnr_error": 0.05, "layer_gsnr": only(0, 0.0, 2.0)}
    (need,) = layers(tmp_path, **made).values["layers"]
    assert (need["layer"], need["pattern"]) == ("embed", "noise only")
    assert "rare tokens" in need["to_do"]
    assert need["batch_size"] == 16


def test_gradients_near_eps_are_told_for_adam(tmp_path: Path) -> None:
    made = {"norms": lambda step: [2e-7] * 5}  # 2e-8 an element
    adam, sgd = layers(tmp_path / "a", **made), layers(tmp_path / "b", **made, facts={"optimizer": "SGD"})
    assert {need["pattern"] for need in adam.values["layers"]} == {"near eps"}
    assert sgd.values["layers"] == []


def test_the_worst_come_first_and_are_few(tmp_path: Path) -> None:
    advice = layers(tmp_path, norms=only(1, 0.0, 0.5), updates=lambda step: [0.2, 0.0, 0.9, 1e-3, 1e-3])
    assert [need["layer"] for need in advice.values["layers"]] == ["blocks.0", "blocks.1", "embed"]


def test_gradients_that_are_not_finite_are_not_taken_for_none(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, tensor_every=2)) as monitor:
        for step in range(60):
            optimizer.zero_grad()
            inputs = torch.full((8, 4), float("nan")) if step == 30 else torch.randn(8, 4)
            loss = model(inputs).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    with gv.open_run(monitor.run_path) as run:
        advice = advise(run).layers
        [finding] = [found for found in run.findings if found.id == "nonfinite"]
    assert not advice.can_tell
    # How many is known from where the worker's request to count them arrives, a few steps on.
    assert re.search(r"gradients are NaN or infinite at (9\d|100)% of steps", advice.answer)
    # How many of them is not known at the step at which it begins, only where.
    assert "of all tensors" in finding.title
    assert "share" not in {**finding.evidence["seen"], **finding.evidence["expected"]}


# -- what the doctor calls fine, advice does not change --------------------------------------------------------------

BATCH_RULES = {"batch_too_small", "batch_too_large"}


def both(path: Path, *, gsnr: float, error: float, steps: int = 600, **more: object) -> tuple[Checks, Advised]:
    """Of a run with 64 samples a step in 4 micro-batches, whose GSNR of one micro-batch is known this well."""
    written = write_run(path, steps=steps, gsnr=lambda step: gsnr, gsnr_error=error, **more)  # type: ignore[arg-type]
    with open_run(written) as run:
        return Report(run).checks, advise(run)


def passed(checks: Checks) -> set[str]:
    return set(checks.passed)


def why_skipped(checks: Checks, rule: str) -> str:
    return next((reason for reason, rules in checks.skipped.items() if rule in rules), "")


@pytest.mark.parametrize("steps", [70, 150, 400])
@pytest.mark.parametrize("error", [0.001, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("gsnr", [-0.01, 0.004, 0.03, 0.1, 0.25, 0.8, 4.0])
def test_they_never_contradict_each_other(tmp_path: Path, gsnr: float, error: float, steps: int) -> None:
    checks, advised = both(tmp_path / "run", gsnr=gsnr, error=error, steps=steps)
    told = passed(checks) & BATCH_RULES
    proposed = advised.batch_size.values["proposed"]
    if not advised.batch_size.can_tell:
        assert told == set()
    if proposed is not None:
        assert ("batch_too_small" if proposed > 64 else "batch_too_large") not in told


def test_a_batch_is_fine_where_the_noise_scale_is_known_to_be_near_it(tmp_path: Path) -> None:
    checks, advised = both(tmp_path / "run", gsnr=0.25, error=0.05)  # B_simple = 16 / 0.25 = 64
    assert passed(checks) >= BATCH_RULES | {"estimator_unreliable"}
    assert advised.batch_size.answer.startswith("Keep the batch of 64")


def test_what_is_not_known_yet_is_too_early_and_not_fine(tmp_path: Path) -> None:
    checks, advised = both(tmp_path / "run", gsnr=0.03, error=0.035, steps=300)  # 246 samples or more, or any number
    assert advised.batch_size.answer.startswith("Use a larger batch")
    assert why_skipped(checks, "batch_too_small").startswith("too early: the noise scale is still too uncertain")
    assert why_skipped(checks, "estimator_unreliable").startswith(
        "too early: the GSNR is not yet known within a factor of ten"
    )
    assert "batch_too_large" in passed(checks)


def test_what_the_advice_would_change_is_left_to_it(tmp_path: Path) -> None:
    checks, advised = both(tmp_path / "run", gsnr=0.08, error=0.01)  # 200 samples, 178 to 229
    assert advised.batch_size.values["proposed"] == 128
    assert why_skipped(checks, "batch_too_small").endswith("`gradvitals advise` finds that a larger batch pays off")


def test_the_advice_knows_what_the_doctor_found(tmp_path: Path) -> None:
    found = Finding(
        id="batch_too_small", severity="warning", title="a batch of 64 is small: the loss swings", first_step=9
    )
    _, advised = both(tmp_path / "known", gsnr=0.25, error=0.05, findings=[found])
    assert advised.batch_size.answer == (
        "The noise scale alone (about 64 samples) supports the batch of 64, "
        "but a batch of 64 is small: the loss swings."
    )
    _, advised = both(tmp_path / "unknown", gsnr=0.0, error=3.0, findings=[found])
    assert advised.batch_size.answer.endswith("includes zero. By other signs, a batch of 64 is small: the loss swings.")
