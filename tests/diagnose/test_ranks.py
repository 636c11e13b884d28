"""Rules that compare workers, on made-up numbers of what a distributed run would read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from made_up import Run, diagnose, diagnose_with_breaks, make_layout, same_findings, words_of

from gradvitals.diagnose import Facts, Rule
from gradvitals.diagnose.ranks import HighDispersion, LowDispersion, ReplicaMismatch
from gradvitals.types import Reading

EIGHT = Facts(world_size=8)


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
    [finding] = diagnose(checks(of_shards(1), in_general=in_general), LowDispersion(), HighDispersion(), facts=EIGHT)
    assert (finding.id, finding.severity, finding.first_step) == ("low_dispersion", "warning", 0)
    assert finding.found_step == 100
    assert "all 8 workers" in finding.title
    assert "?" not in words_of(finding)


def test_norms_of_zero_are_not_a_sign_of_the_same_data() -> None:
    values = {"ranks/norm_dispersion": 0.0, "grad/norm": 0.0}
    run = [[Reading(step=step, time=0.0, values=values)] for step in range(10)]
    assert diagnose(run, LowDispersion()) == []


def test_a_worker_that_goes_astray_is_found_against_what_was_usual() -> None:
    series = of_shards(8, count=40)
    series[30:] = [0.5] * 10
    [finding] = diagnose(checks(series), HighDispersion(), facts=EIGHT)
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 3000, 3200)
    assert "one worker has changed" in finding.causes[0]
    assert finding.evidence["expected"]["dispersion"] == pytest.approx(0.09, abs=0.03)
    assert "?" not in words_of(finding)


def test_workers_far_apart_from_the_start() -> None:
    [finding] = diagnose(checks([1.4] * 5), HighDispersion(), facts=EIGHT)
    assert (finding.first_step, finding.found_step) == (0, 200)


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
    [finding] = diagnose([*run, [Reading(step=7, time=0.0), differ]], ReplicaMismatch(), layout=layout, facts=EIGHT)
    assert (finding.severity, finding.first_step, finding.tensors) == ("critical", 7, ("blocks.4.weight",))
    assert "before step 7" in finding.cures[0]
    assert "?" not in words_of(finding)


def test_a_count_without_names_is_enough() -> None:
    run = [[Reading(step=0, time=0.0, values={"ranks/checksum_mismatch": 3.0})]]
    [finding] = diagnose(run, ReplicaMismatch())
    assert (finding.severity, finding.tensors) == ("critical", ())


def test_a_run_on_one_worker_says_nothing() -> None:
    run = [[Reading(step=step, time=0.0, values={"grad/norm": 1.0})] for step in range(50)]
    run += checks([math.nan] * 10)
    assert diagnose(run, HighDispersion(), LowDispersion(), ReplicaMismatch()) == []


@pytest.mark.parametrize("rule", [HighDispersion, LowDispersion])
def test_resuming_changes_nothing(rule: type[Rule]) -> None:
    series = of_shards(8, count=30) + [0.6] * 5 + of_shards(8, count=10) + [0.0] * 5
    run = checks(series)
    whole = diagnose(run, rule())
    assert len(whole) == 1
    assert same_findings(diagnose_with_breaks(run, rule, (0, 1500, 3100, 4600)), whole)
