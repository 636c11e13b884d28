"""Ranks that disagree, leave or die: a clear word at the right time, never a hang, never a lost record."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm_python
from rank_compare import same
from rank_launch import end
from rank_mortal import DEATH, STEPS
from rank_results import Results

import gradvitals as gv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MORTAL = Path(__file__).with_name("rank_mortal.py")


# -- when watching begins -------------------------------------------------------------------------------------------


def test_one_rank_that_does_not_watch_is_named(results: Results) -> None:
    found, _ = results.of("trouble: watched_by_one_alone")
    assert found["kind"] == "MissingRanksError"
    assert "rank 1" in found["message"]
    assert "watch" in found["message"]
    assert 1.5 < found["seconds"] < 12


def test_ranks_may_meet_after_one_has_waited_in_vain(results: Results) -> None:
    for found in results.of("trouble: watched_by_one_alone"):
        assert found["then"]["kind"] is None, found["then"]["message"]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("another_config", ("tensor_every", "rank 1", "2")),
        ("a_tensor_on_one_alone", ("extra", "rank 1")),
        ("another_shape", ("blocks.0.mlp.up", "rank 1")),
    ],
)
def test_ranks_that_disagree_are_told_at_once(job: str, words: tuple[str, ...], results: Results) -> None:
    for found in results.of(f"trouble: {job}"):
        assert found["kind"] in ("RunError", "ConfigError"), found
        assert [word for word in words if word not in found["message"]] == [], found["message"]
        assert found["seconds"] < 8, "nobody waits for a timeout"
        assert found["runs"] == [], "and no run is begun"


# -- odd, but allowed -----------------------------------------------------------------------------------------------


def test_stages_with_the_same_names(results: Results) -> None:
    found = results.of("trouble: stages_with_the_same_names")
    assert len(found[0]["names"]) == len(set(found[0]["names"])) == 8
    assert {name.split(".", 1)[1] for name in found[0]["names"]} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for step, reading in enumerate(found[0]["readings"]):
        squares = sum(sum(rank["squares"][step]) for rank in found)
        assert reading["values"]["grad/norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert same(found[0]["readings"], found[1]["readings"])


def test_observe_on_one_rank_alone(results: Results) -> None:
    for found in results.of("trouble: observed_by_one_alone"):
        assert [reading["step"] for reading in found["readings"]] == [0, 1, 2]
        assert all(math.isfinite(reading["values"]["loss"]) for reading in found["readings"])
        assert "monitor_error" not in found["findings"]


def test_a_loss_that_all_ranks_know_is_taken_and_one_they_share_out_is_told(results: Results) -> None:
    for found in results.of("trouble: losses_that_are_spread"):
        assert found["losses"] == [2.0, 3.0, 4.0, None]
        assert any("loss.full_tensor()" in title for title in found["said"]), found["said"]


def test_steps_that_travel_together_all_arrive(results: Results) -> None:
    for found in results.of("trouble: rarely"):
        assert found["steps"] == list(range(60))


def test_a_group_of_its_own(results: Results) -> None:
    found = results.of("trouble: two_pairs")
    for pair in (0, 1):
        one, other = found[2 * pair], found[2 * pair + 1]
        assert same(one["readings"], other["readings"])
        assert [r["values"]["grad/norm"] for r in one["readings"]] == pytest.approx(one["norms"], rel=1e-5)
        assert all(len(r["ranks"].get("ranks/norm", [0, 0])) == 2 for r in one["readings"])
        assert not {"monitor_error", "ranks_lost"} & set(one["findings"])
    assert found[0]["norms"] != found[2]["norms"]
    assert found[0]["runs"] == ["pair0", "pair1"]


# -- the audit names who it is --------------------------------------------------------------------------------------


def audits(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(same(rank["readings"], found[0]["readings"]) for rank in found)
    assert len(found[0]["readings"]) == 6
    return found[0]["readings"]


def test_one_flipped_bit_on_one_rank(results: Results) -> None:
    found = results.of("trouble: one_flipped_bit")
    for reading in audits(found):
        mismatch = reading["tensors"].get("ranks/checksum_mismatch")
        if reading["step"] < 2:
            assert reading["values"]["ranks/checksum_mismatch"] == 0
            assert reading["ranks"]["ranks/replica"] == [0, 0, 0, 0]
            assert mismatch is None
        else:
            assert reading["values"]["ranks/checksum_mismatch"] == 1
            assert reading["ranks"]["ranks/replica"] == [0, 0, 1, 0]
            named = {name for name, count in zip(found[0]["names"], mismatch, strict=True) if count > 0}
            assert named == {"blocks.0.mlp.up.weight"}
    told = [finding for finding in found[0]["findings"] if finding[0] == "replica_mismatch"]
    assert [(finding[1], finding[2]) for finding in told] == [(2, ("blocks.0.mlp.up.weight",))]


def test_two_ranks_with_the_same_samples(results: Results) -> None:
    found = results.of("trouble: two_with_the_same_samples")
    for reading in audits(found):
        assert reading["ranks"]["ranks/twin"] == [-1, 3, -1, 1]
        assert reading["values"]["ranks/duplicates"] >= 1
    assert [finding for finding in found[0]["findings"] if finding[0] == "low_dispersion"]


def test_one_rank_with_a_larger_gradient(results: Results) -> None:
    for reading in audits(results.of("trouble: one_with_a_larger_loss")):
        scores = reading["ranks"]["ranks/norm_z"]
        assert max(range(4), key=lambda rank: abs(scores[rank])) == 1
        norms = reading["ranks"]["ranks/norm"]
        assert norms[1] > 3 * max(norms[0], norms[2], norms[3])
        assert reading["values"]["ranks/norm_dispersion"] > 1


def test_one_rank_whose_random_numbers_leave_the_others(results: Results) -> None:
    for reading in audits(results.of("trouble: one_draws_more_random_numbers")):
        left = reading["step"] >= 2
        assert reading["ranks"]["ranks/rng"] == ([0, 0, 1, 0] if left else [0, 0, 0, 0])
        assert reading["values"]["ranks/out_of_step"] == float(left)


def test_nan_of_one_rank_of_many_shards_is_traced_to_it(results: Results) -> None:
    found = results.of("trouble: nan_on_one_of_many_shards")[0]
    assert 7 not in found["read_in_full"]
    assert [finding for finding in found["findings"] if finding[0] == "nonfinite"] == [("nonfinite", 1, 7)]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_rank_with_another_learning_rate_is_named(way: str, results: Results) -> None:
    found = results.of(f"trouble: another_rate_under_{way}")[0]
    assert found["lr"] == pytest.approx([0.01] * 4)  # one that a rank has, not the mean of both
    assert [(name, rank) for name, rank, _ in found["findings"]] == [("rank_lr_differs", 1)]
    assert "0.02" in found["findings"][0][2]


# -- while training -------------------------------------------------------------------------------------------------


def test_ranks_that_make_different_numbers_of_steps(results: Results) -> None:
    found = results.of("trouble: one_stops_before_the_other")
    assert max(rank["seconds"] for rank in found) < 20
    assert found[0]["steps"][:9] == list(range(9))


def start(command: Sequence[object], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A Python process that writes to a log."""
    python = warm_python.executable()
    with log.open("ab") as out:
        return subprocess.Popen(
            [python, *map(str, command)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": python, **environment},
        )


@pytest.mark.parametrize("how", ["killed", "crash"])
def test_a_rank_that_dies_leaves_a_readable_run(how: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    processes = [
        start([MORTAL, how, tmp_path], tmp_path / f"log{rank}", RANK=str(rank), WORLD_SIZE="2") for rank in range(2)
    ]
    end(processes, time.monotonic() + 90, grace=75)
    assert time.monotonic() - begun < 80, "rank 0 does not wait for the dead"
    assert processes[1].poll() == 9
    if how == "killed":
        assert processes[0].poll() == 0, (tmp_path / "log0").read_text()
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    with gv.open_run(tmp_path / "run") as run:
        steps = run.series("grad/norm")[0].tolist()
        assert steps[:DEATH] == list(range(DEATH))
        findings = run.findings
    if how == "killed":
        lost = [finding for finding in findings if finding.id == "ranks_lost"]
        assert len(lost) == 1
        assert lost[0].rank == 1
    else:
        assert findings, "the error that ended training is kept"


def test_an_elastic_restart_continues_the_run(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone",
               MORTAL, "elastic", tmp_path]  # fmt: skip
    process = start(command, tmp_path / "log")
    end([process], time.monotonic() + 100)
    log = (tmp_path / "log").read_text()
    assert process.returncode == 0, log
    assert log.count(f"has made {STEPS} steps") == 2
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    with gv.open_run(tmp_path / "run") as run:
        assert run.series("grad/norm")[0].tolist() == list(range(STEPS))
