"""Rules that compare workers, on made-up numbers of what a distributed run would read."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up import Run, diagnose, diagnose_with_breaks, make_layout, same_findings, words_of

from gradvitals.diagnose import Rule, RunInfo
from gradvitals.diagnose.rules.ranks import HighDispersion, LowDispersion, ReplicaMismatch, RngMismatch
from gradvitals.functional.dispersion import leave_one_out_z, norm_dispersion, norm_ratios
from gradvitals.types import Reading

EIGHT = RunInfo(world_size=8)


def local_norms(step: int, rng: np.random.Generator, *, workers: int = 8, shards: int = 8) -> np.ndarray:
    """Norms of the workers' own gradients: the same shard gives the same norm."""
    own = 1 + 0.1 * rng.normal(size=shards)
    return np.resize(own, workers)


def checks(dispersion: list[float], *, every: int = 100, in_general: bool = False) -> Run:
    """One check of the workers every hundred steps."""
    run: Run = []
    for at, value in enumerate(dispersion):
        step = at * every
        values = {"ranks/norm_dispersion": value, "grad/norm": 1.0}
        general = Reading(step=step, time=0.0, values=values if in_general else {"grad/norm": 1.0})
        run.append([general] if in_general else [general, Reading(step=step, time=0.0, source="ranks", values=values)])
    return run


def of_shards(shards: int, *, count: int = 100, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    norms = [local_norms(step, rng, shards=shards) for step in range(count)]
    return [float(one.std() / one.mean()) for one in norms]


@pytest.mark.parametrize("seed", range(5))
def test_workers_with_data_of_their_own_are_fine(seed: int) -> None:
    assert diagnose(checks(of_shards(8, seed=seed)), HighDispersion(), LowDispersion(), ReplicaMismatch()) == []


@pytest.mark.parametrize("in_general", [True, False])
def test_the_same_shard_on_all_workers(in_general: bool) -> None:
    [finding] = diagnose(checks(of_shards(1), in_general=in_general), LowDispersion(), HighDispersion(), info=EIGHT)
    assert (finding.id, finding.severity, finding.first_step) == ("low_dispersion", "warning", 0)
    assert finding.found_step == 100
    assert "All 8 ranks" in finding.title
    assert "?" not in words_of(finding)


def test_norms_of_zero_are_not_a_sign_of_the_same_data() -> None:
    values = {"ranks/norm_dispersion": 0.0, "grad/norm": 0.0}
    run = [[Reading(step=step, time=0.0, values=values)] for step in range(10)]
    assert diagnose(run, LowDispersion()) == []


def test_a_worker_that_goes_astray_is_found_against_what_was_usual() -> None:
    series = of_shards(8, count=40)
    series[30:] = [0.5] * 10
    [finding] = diagnose(checks(series), HighDispersion(), info=EIGHT)
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 3000, 3300)
    assert "One rank has changed" in finding.causes[0]
    assert finding.evidence["expected"]["dispersion"] == pytest.approx(0.09, abs=0.03)
    assert "?" not in words_of(finding)


def test_workers_far_apart_from_the_start() -> None:
    [finding] = diagnose(checks([1.4] * 5), HighDispersion(), info=EIGHT)
    assert (finding.first_step, finding.found_step) == (0, 300)


def test_one_check_alone_is_not_enough() -> None:
    series = of_shards(8, count=60)
    series[20] = series[40] = 2.0
    assert diagnose(checks(series), HighDispersion()) == []


def test_copies_that_differ_are_critical_at_once_and_named() -> None:
    layout = make_layout()
    of_tensors = np.zeros(6)
    of_tensors[4] = 1
    differ = Reading(
        step=7,
        time=0.0,
        source="ranks",
        values={"ranks/checksum_mismatch": 1.0},
        tensors={"ranks/checksum_mismatch": of_tensors},
    )
    run = [[Reading(step=step, time=0.0, values={"ranks/checksum_mismatch": 0.0})] for step in range(7)]
    [finding] = diagnose([*run, [Reading(step=7, time=0.0), differ]], ReplicaMismatch(), layout=layout, info=EIGHT)
    assert (finding.severity, finding.first_step, finding.tensors) == ("critical", 7, ("blocks.4.weight",))
    assert "before step 7" in finding.fixes[0]
    assert "?" not in words_of(finding)


def test_a_count_without_names_is_enough() -> None:
    run = [[Reading(step=0, time=0.0, values={"ranks/checksum_mismatch": 3.0})]]
    [finding] = diagnose(run, ReplicaMismatch())
    assert (finding.severity, finding.tensors) == ("critical", ())


def test_a_run_on_one_worker_says_nothing() -> None:
    run = [[Reading(step=step, time=0.0, values={"grad/norm": 1.0})] for step in range(50)]
    run += checks([math.nan] * 10)
    assert diagnose(run, HighDispersion(), LowDispersion(), ReplicaMismatch()) == []


def audits(norms: np.ndarray, **more: list[np.ndarray]) -> Run:
    """An audit every hundred steps: one row of local norms for each, and other numbers of the ranks."""
    run: Run = []
    for at, row in enumerate(norms):
        ranks = {"ranks/norm": row, "ranks/norm_ratio": norm_ratios(row), "ranks/norm_z": leave_one_out_z(row)}
        ranks |= {f"ranks/{name}": np.asarray(rows[at], dtype=float) for name, rows in more.items()}
        values = {"grad/norm": 1.0, "ranks/norm_dispersion": norm_dispersion(row)}
        run.append([Reading(step=at * 100, time=0.0, values=values, ranks=ranks)])
    return run


def norms_of(world: int, *, count: int = 60, spread: float = 0.1, seed: int = 0) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).standard_normal((count, world)))


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64, 1000])
@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
def test_healthy_ranks_are_not_named(world: int, spread: float) -> None:
    run = audits(norms_of(world, spread=spread, seed=world))
    assert diagnose(run, HighDispersion(), LowDispersion(), info=RunInfo(world_size=world)) == []


@pytest.mark.parametrize("world", [3, 4, 8, 64, 1000])
@pytest.mark.parametrize("factor", [0.0, 0.1, 3.0, 10.0])
def test_a_rank_that_is_off_is_named(world: int, factor: float) -> None:
    norms = norms_of(world)
    norms[20:, 2] *= factor
    findings = diagnose(audits(norms), HighDispersion(), info=RunInfo(world_size=world))
    assert [finding.id for finding in findings] == ["high_dispersion"]
    [finding] = findings
    assert (finding.rank, finding.severity) == (2, "warning")
    assert finding.first_step == 2000
    assert finding.found_step is not None
    assert finding.found_step <= 2700
    assert "rank 2" in finding.title
    assert "Rank 2" in finding.causes[0]
    assert "rank 2" in finding.fixes[0]
    assert "?" not in words_of(finding)
    assert not [cause for cause in finding.causes if "two" in cause]


def test_a_rank_that_is_off_by_less_than_chance_is_found_on_average() -> None:
    norms = norms_of(8, count=60, spread=0.2, seed=3)
    norms[:, 5] *= 1.6
    [finding] = diagnose(audits(norms), HighDispersion())
    assert finding.rank == 5
    assert finding.evidence["seen"]["ratio"] == pytest.approx(1.6, rel=0.2)


def test_a_small_difference_does_not_matter_however_sure_it_is() -> None:
    norms = norms_of(8, spread=0.001)
    norms[:, 5] *= 1.2
    assert diagnose(audits(norms), HighDispersion()) == []


@pytest.mark.parametrize("per_worker", [1, 2])
def test_of_two_workers_both_are_told_and_none_is_blamed(per_worker: int) -> None:
    norms = norms_of(2)
    norms[20:, 1] *= 5
    run = audits(norms)
    for [reading] in run:
        for name, array in list(reading.ranks.items()):
            reading.ranks[name] = np.repeat(array, per_worker)  # type: ignore[index]
    [finding] = diagnose(run, HighDispersion(), info=RunInfo(world_size=2 * per_worker))
    assert finding.rank is None
    assert ("rank 0" if per_worker == 1 else "ranks 0 and 1") in finding.title
    assert ("rank 1" if per_worker == 1 else "ranks 2 and 3") in finding.title
    assert "do not show which" in finding.causes[0]
    assert "?" not in words_of(finding)


def test_a_rank_that_is_well_again_closes_the_finding() -> None:
    norms = norms_of(8, count=80)
    norms[20:40, 2] *= 5
    [finding] = diagnose(audits(norms), HighDispersion())
    assert finding.last_step is not None
    assert 3900 <= finding.last_step <= 5500


def test_norms_that_are_not_known_do_not_disturb() -> None:
    norms = norms_of(8)
    norms[:, 3] = np.nan
    norms[10, 5] = np.inf
    norms[20:, 6] *= 6
    [finding] = diagnose(audits(norms), HighDispersion())
    assert finding.rank == 6


def test_two_ranks_with_the_same_data_are_named() -> None:
    twins = [np.full(8, -1.0)] * 10 + [np.array([-1, -1, 5, -1, -1, 2, -1, -1.0])] * 10
    [finding] = diagnose(audits(norms_of(8, count=20), twin=twins), LowDispersion(), HighDispersion())
    assert (finding.id, finding.rank, finding.first_step, finding.found_step) == ("low_dispersion", 5, 1000, 1100)
    assert finding.title.startswith("Ranks 2 and 5 have the same data")
    assert "Rank 5 reads the shard of rank 2" in finding.causes[0]
    assert "ranks 2 and 5" in finding.fixes[0]
    assert "?" not in words_of(finding)


def test_chance_pairs_are_not_told() -> None:
    rng = np.random.default_rng(0)
    twins = []
    for _ in range(40):
        one, other = rng.choice(8, size=2, replace=False)
        twins.append(np.full(8, -1.0))
        twins[-1][[one, other]] = other, one
    twins[3::2] = [np.full(8, -1.0)] * len(twins[3::2])
    assert diagnose(audits(norms_of(8, count=40), twin=twins), LowDispersion()) == []


def test_all_ranks_with_the_same_samples() -> None:
    twins = [np.array([1.0, 0, 0, 0])] * 4
    [finding] = diagnose(audits(norms_of(4, count=4), twin=twins), LowDispersion())
    assert (finding.rank, finding.title.split(":")[0]) == (None, "All 4 ranks have the same data")
    assert "no DistributedSampler" in finding.causes[0]
    assert "?" not in words_of(finding)


def test_two_workers_can_have_nearly_the_same_norm_by_chance() -> None:
    norms = np.ones((20, 2))
    norms[:, 1] += 3e-5
    assert diagnose(audits(norms), LowDispersion(), info=RunInfo(world_size=2)) == []
    [finding] = diagnose(audits(np.ones((20, 2))), LowDispersion(), info=RunInfo(world_size=2))
    assert finding.title.startswith("Both ranks have the same data")


def mismatch(replica: list[float], tensor: int = 4, step: int = 300) -> Run:
    equal = {"ranks/replica": np.where(np.isnan(replica), np.nan, 0.0)}
    run: Run = [
        [Reading(step=at, time=0.0, values={"ranks/checksum_mismatch": 0.0}, ranks=equal)] for at in range(0, step, 100)
    ]
    of_tensors = np.zeros(6)
    of_tensors[tensor] = 1
    differ = Reading(
        step=step,
        time=0.0,
        values={"ranks/checksum_mismatch": 1.0},
        tensors={"ranks/checksum_mismatch": of_tensors},
        ranks={"ranks/replica": np.array(replica)},
    )
    return [*run, [differ]]


def test_the_rank_whose_copy_differs_is_named() -> None:
    [finding] = diagnose(mismatch([0, 0, 0, 1]), ReplicaMismatch())
    assert (finding.rank, finding.tensors, finding.severity) == (3, ("blocks.4.weight",), "critical")
    assert "differ between rank 3 and the others: blocks.4.weight" in finding.title
    assert any("last found equal at step 200" in cure for cure in finding.fixes)
    assert any("hardware of rank 3" in cure for cure in finding.fixes)
    assert "?" not in words_of(finding)


def test_of_two_copies_both_are_named() -> None:
    [finding] = diagnose(mismatch([1, 1]), ReplicaMismatch())
    assert finding.rank is None
    assert "differ between ranks 0 and 1: " in finding.title
    assert "?" not in words_of(finding)


def out_of_step(codes: list[list[float]]) -> Run:
    return [
        [
            Reading(
                step=at * 100,
                time=0.0,
                values={"ranks/out_of_step": float(np.count_nonzero(code))},
                ranks={"ranks/out_of_step": np.array(code)},
            )
        ]
        for at, code in enumerate(codes)
    ]


@pytest.mark.parametrize(("code", "what"), [(1.0, "random numbers"), (2.0, "samples"), (3.0, "samples")])
def test_a_rank_out_of_step(code: float, what: str) -> None:
    codes = [[0.0] * 4] * 5 + [[0, 0, code, 0]] * 5
    [finding] = diagnose(out_of_step(codes), RngMismatch())
    assert (finding.id, finding.rank, finding.severity) == ("rng_mismatch", 2, "warning")
    assert (finding.first_step, finding.found_step) == (500, 700)
    assert f"The {what} of rank 2" in finding.title
    assert "rank 2" in finding.causes[0]
    assert "?" not in words_of(finding)


def test_out_of_step_now_and_then_is_not_told() -> None:
    codes = [[0.0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0.0] * 4] * 5
    assert diagnose(out_of_step(codes), RngMismatch()) == []


def test_both_of_two_ranks_out_of_step() -> None:
    [finding] = diagnose(out_of_step([[1.0, 1.0]] * 4), RngMismatch())
    assert finding.rank is None
    assert "ranks 0 and 1" in finding.title


@pytest.mark.parametrize("rule", [HighDispersion, LowDispersion, RngMismatch, ReplicaMismatch])
def test_resuming_with_ranks_changes_nothing(rule: type[Rule]) -> None:
    norms = norms_of(4, count=50)
    norms[20:, 1] *= 4
    twins = [np.full(4, -1.0)] * 30 + [np.array([3.0, -1, -1, 0])] * 20
    run = audits(norms, twin=twins, out_of_step=[np.zeros(4)] * 30 + [np.array([0.0, 0, 0, 1])] * 20)
    run += [[replace(reading, step=reading.step + 5000) for reading in one] for one in mismatch([0, 0, 1, 0])]
    whole = diagnose(run, rule())
    assert len(whole) == 1
    assert same_findings(diagnose_with_breaks(run, rule, (0, 500, 2100, 2300, 3100, 5300)), whole)


@pytest.mark.parametrize("rule", [HighDispersion, LowDispersion])
def test_resuming_changes_nothing(rule: type[Rule]) -> None:
    series = of_shards(8, count=30) + [0.6] * 5 + of_shards(8, count=10) + [0.0] * 5
    run = checks(series)
    whole = diagnose(run, rule())
    assert len(whole) == 1
    assert same_findings(diagnose_with_breaks(run, rule, (0, 1500, 3100, 4600)), whole)
