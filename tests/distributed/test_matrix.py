"""Every metric in every scenario, against the dense model in one process in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from rank_compare import Seen, Tables, absolute, hold, names, ratio, relative
from rank_results import Results
from rank_scenarios import SCENARIOS, Scenario
from rank_truth import Truth

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES_BY_OTHERS = ("zero_by_hand",)
"""Ways in which the loop moves weights after the optimizer's step."""

SHARDED = {
    "embed.weight",
    "head.weight",
    *(f"blocks.{i}.attn.{part}" for i in (0, 1) for part in ("q_proj.weight", "q_proj.bias", "k_proj.weight")),
    *(f"blocks.{i}.attn.{part}" for i in (0, 1) for part in ("v_proj.weight", "v_proj.bias", "proj.weight")),
    *(f"blocks.0.{part}" for part in ("mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "side.weight")),
}
"""Tensors that tensor parallelism cuts."""


def finite_steps(scenario: Scenario, tables: Tables) -> Tables:
    """Up to where a fault has made everything nan."""
    return tables[:2] if scenario.fault == "nan" else tables


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def _zeros(x: np.ndarray) -> float:
    return float((x == 0).mean())


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


PLAIN: dict[str, Callable[[Truth], Tables]] = {
    "grad/norm": lambda truth: truth.of_gradients(_norm),
    "grad/max": lambda truth: truth.of_gradients(_largest),
    "grad/zero_fraction": lambda truth: truth.of_gradients(_zeros),
    "grad/spike_ratio": lambda truth: truth.spikes()[0],
    "weight/norm": Truth.weight_norm,
    "update/norm": Truth.update_norm,
    "update/ratio": Truth.update_ratio,
    "update/rms": Truth.update_rms,
}


def has_parts(scenario: Scenario) -> bool:
    return scenario.source is not None and scenario.fault != "carried" and not scenario.keep_none


@names(lambda scenario: not scenario.keep_none)  # of replicas that are not, only that nothing hangs
def test_values_of_tensors_and_model(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    for metric, of_truth in PLAIN.items():
        if scenario.way in UPDATES_BY_OTHERS and metric.startswith("update/"):
            continue
        found, truth = (
            finite_steps(scenario, tables) for tables in (seen.tables(metric), of_truth(results.truth(name)))
        )
        last = 2 if scenario.fault == "inf" else None  # what a skipped step would have shown is not asked of it
        hold(found[:last], truth[:last], relative(scenario.tolerance), metric)


@names(lambda scenario: not scenario.keep_none)
def test_variation_of_norms(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    found = finite_steps(scenario, Seen(results, name).tables("grad/norm_cv"))
    truth = finite_steps(scenario, results.truth(name).spikes()[1])
    hold(found, truth, absolute(3 * scenario.tolerance), "grad/norm_cv")


@names(lambda scenario: not scenario.keep_none and scenario.way not in UPDATES_BY_OTHERS and not scenario.scaler)
def test_direction_of_updates(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    found = finite_steps(scenario, Seen(results, name).tables("update/cosine"))
    truth = finite_steps(scenario, results.truth(name).update_cosine())
    hold(found, truth, absolute(scenario.tolerance), "update/cosine")


@names()
def test_loss_is_the_mean_over_data_workers(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    found = finite_steps(scenario, Seen(results, name).tables("loss"))
    truth = finite_steps(scenario, results.truth(name).loss())
    hold(found, truth, relative(1e-5 if scenario.precision == "float32" else 0.02), "loss")


@names()
def test_learning_rate_batch_size_and_stage(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    total = float(sum(scenario.total(d) for d in range(scenario.num_data)))
    rate = 0.1 if scenario.optimizer == "sgd" else 0.01
    for reading in results.of(name)[0]["readings"]:
        if reading["source"] is None:
            assert reading["values"]["lr"] == rate
            assert reading["stage"] == ("unscaled" if scenario.scaler else "raw")
        if reading["source"] in (None, "adam", "window"):
            assert reading["batch_size"] == (None if scenario.tell == "no" else total)


@names()
def test_every_tensor_is_there_once(name: str, results: Results) -> None:
    record = results.of(name)[0]
    truth = results.truth(name)
    shapes = {tensor: value.shape for tensor, value in truth.steps[0].before.items()}
    assert sorted(record["names"]["tensors"]) == sorted(shapes)
    assert record["shapes"] == shapes


# -- samples at the same weights ------------------------------------------------------------------------------------


def parts_tolerance(scenario: Scenario) -> float:
    """Against float64; in half precision, or through a lossy reduction, the parts are others."""
    return 3 * scenario.tolerance if scenario.exact else 0.3


@names(has_parts)
def test_gsnr_of_parts(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    for kind in ("values", "tensors", "layers", "heads"):
        truth = finite_steps(scenario, results.truth(name).parts_gsnr(kind))
        if scenario.fault == "inf":
            truth = truth[:2]
        for place, key in enumerate(("gsnr", "gsnr_low", "gsnr_high")):
            found = seen.tables(key, scenario.source, (kind,))[: len(truth)]
            wanted = [{group: ends[place] for group, ends in table.items()} for table in truth]
            tolerance = parts_tolerance(scenario) * (1 if place == 0 else 40)  # t of one degree of freedom is 12.7
            if place == 0 or scenario.exact:
                hold(found, wanted, ratio(tolerance), f"{key} of {kind}")


@names(has_parts)
def test_radial_gsnr(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    truth = finite_steps(scenario, results.truth(name).radial_gsnr())
    if scenario.fault == "inf":
        truth = truth[:2]
    found = seen.tables("radial_gsnr", scenario.source, ("tensors",))[: len(truth)]
    wanted = [{group: ends[0] for group, ends in table.items()} for table in truth]
    if "tp" in scenario.way:  # squares of sums over shards: not to be had there, but never wrong
        wanted = [
            {group: math.nan if math.isnan(table.get(group, math.nan)) and group in SHARDED else right
             for group, right in rights.items()}
            for table, rights in zip(found, wanted, strict=True)
        ]  # fmt: skip
    if scenario.exact:  # one number a part, which rounding to half precision may turn into any other
        hold(found, wanted, ratio(3 * parts_tolerance(scenario)), "radial_gsnr")
    else:
        told, due = (
            [sorted(name for name, value in table.items() if not math.isnan(value)) for table in tables]
            for tables in (found, wanted)
        )
        assert told == due


@names(lambda scenario: has_parts(scenario) and scenario.fault is None and scenario.exact)
def test_noise_scale(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    truth = results.truth(name)
    low, high = (seen.tables(f"noise_scale_{end}", scenario.source, ("values",)) for end in ("low", "high"))
    for step, (table, found) in enumerate(
        zip(truth.parts_gsnr("values"), seen.tables("noise_scale", scenario.source, ("values",)), strict=True)
    ):
        if scenario.tell == "no":
            assert not found, "there are no samples to count in"
            continue
        size = float(truth.steps[step].sizes.mean())
        top = table[""][2] / size
        if not math.isnan(found[""]):  # from the readings after those that showed a signal
            assert low[step][""] <= found[""] <= high[step][""]
        elif top > 0:
            assert low[step][""] == pytest.approx(1 / top, rel=0.01)
            assert high[step][""] == math.inf


@names(has_parts)
def test_a_part_is_its_share_of_the_batch(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    found = [r["batch_size"] for r in results.of(name)[0]["readings"] if r["source"] == scenario.source]
    assert len(found) == scenario.steps
    step = results.truth(name).steps[0]
    assert found == [None if scenario.tell == "no" else pytest.approx(step.sizes.mean())] * scenario.steps


@names()
def test_samples_at_the_same_weights_are_one_source(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    sources = {reading["source"] for reading in results.of(name)[0]["readings"]}
    found, wanted = sources & {"ranks", "microbatch"}, {scenario.source} - {None}
    assert found <= wanted
    assert found == wanted or not has_parts(scenario)


# -- from moments, and over a window --------------------------------------------------------------------------------


def has_moments(scenario: Scenario) -> bool:
    return scenario.optimizer == "adamw" and scenario.fault is None and not scenario.keep_none


def unavailable(results: Results, name: str, source: str) -> bool:
    """Whether it was said, once, that a source is not to be had."""
    told = [f for f in results.of(name)[0]["findings"] if f[0] == "source_unavailable" and source in f[1] + f[3]]
    assert len(told) <= 1
    return len(told) == 1


@names(has_moments)
def test_gsnr_of_moments(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    if scenario.way == "zero" and unavailable(results, name, "Adam"):
        return
    for kind in ("values", "tensors", "layers"):
        truth = results.truth(name).adam_gsnr(kind)
        found = seen.tables("gsnr", "adam", (kind,))
        wanted = [{group: ends[0] for group, ends in table.items()} for table in truth]
        hold(found, wanted, ratio(3 * scenario.tolerance), f"adam gsnr of {kind}")


@names(has_moments)
def test_share_of_coordinates_below_one(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    if scenario.way == "zero" and unavailable(results, name, "Adam"):
        return
    found = seen.tables("gsnr/below_one_fraction", "adam", ("tensors",))
    truth = results.truth(name).below_one()
    # A coordinate at its limit to the last digit may fall on either side; the first step is one gradient.
    hold(found[1:], truth[1:], absolute(1 / 56 + 1e-9), "gsnr/below_one_fraction")


@names(has_moments)
def test_median_over_coordinates(name: str, results: Results) -> None:
    scenario, seen = SCENARIOS[name], Seen(results, name)
    if scenario.way == "zero" and unavailable(results, name, "Adam"):
        return
    found, truth = seen.tables("gsnr/median", "adam", ("tensors",)), results.truth(name).adam_gsnr_of_coordinates()
    close = ratio(3 * scenario.tolerance)
    for got, wanted in zip(found[1:], truth[1:], strict=True):  # the first step is one gradient
        assert {tensor for tensor, value in got.items() if not math.isnan(value)} == set(wanted)
        for tensor, each in wanted.items():
            ends = np.sort(each)[[0, -1]]  # of shards, the mean of their medians
            if scenario.way == "ddp":
                ends = np.sort(each)[[(len(each) - 1) // 2, len(each) // 2]]
            assert ends[0] <= got[tensor] <= ends[1] or any(close(got[tensor], end) for end in ends), tensor


FACTORS: dict[str, Callable[[np.ndarray], float]] = {
    "vrgd/mean": lambda x: float(x.mean()),
    "vrgd/at_gamma": lambda x: float((x == 0.1).mean()),
    "vrgd/at_one": lambda x: float((x == 1).mean()),
}


@names(lambda scenario: scenario.optimizer == "vradamw")
def test_factors_of_a_variance_reduced_optimizer(name: str, results: Results) -> None:
    for metric, of_factors in FACTORS.items():
        found, truth = Seen(results, name).tables(metric), results.truth(name).factors(of_factors)
        for table in (*found, *truth):
            del table["gain"]  # of one element, whose factor is 1 but for rounding
        hold(found, truth, absolute(1e-4 if metric == "vrgd/mean" else 1e-6), metric)


@names(lambda scenario: scenario.steps >= 20)
def test_window_of_steps(name: str, results: Results) -> None:
    truth = results.truth(name)
    tables = [Seen(results, name).tables(key, "window", ("tensors",)) for key in ("gsnr", "gsnr_low", "gsnr_high")]
    steps = [step for step, table in enumerate(tables[0]) if table]
    assert steps == [19, 21]
    for step in steps:
        known = {tensor for tensor, value in tables[0][step].items() if not math.isnan(value)}
        assert known == {"embed.weight", "head.weight"}
        for tensor in known:
            expected = truth.window(tensor, step, 20)
            assert [table[step][tensor] for table in tables] == pytest.approx(expected, rel=1e-3, abs=1e-4)
