"""The distributed lab: faults do what they say, scores follow from findings, and real processes find real faults."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from click.testing import CliRunner
from torch import nn

import gradvitals as gv
from benchmarks.distributed.__main__ import main
from benchmarks.distributed.cost import CASES, format_paper, format_ranks, on_paper, run_ranks, topology_of
from benchmarks.distributed.faults import (
    BATCH_SIZE,
    CLEAN,
    NUM_SAMPLES,
    OF_REPLICAS,
    UNSEEN,
    Cell,
    Planted,
    RankResult,
    Result,
    Shards,
)
from benchmarks.distributed.report import clean_row, fault_row
from benchmarks.distributed.run import plan
from gradvitals.distributed.allreduce import Kind as StepKind
from gradvitals.distributed.allreduce import StepPacker
from gradvitals.types import Finding

EXAMPLES = Path(__file__).parents[2] / "examples"
RANK = RankResult(rank=0, steps=100, seconds=0.01, loss=1.0, digest="a", collectives=20, bytes_sent=1000)


def shards(rank: int, seed: int = 0) -> Shards:
    return Shards(rank, 4, seed=0, generator=torch.Generator().manual_seed(seed))


def result(cell: Cell, *findings: Finding, ranks: tuple[RankResult, ...] = (RANK,)) -> Result:
    return Result(cell=cell, ranks=ranks, findings=tuple(finding.to_json() for finding in findings), steps_kept=100)


def finding(name: str, **more: Any) -> Finding:
    return Finding(id=name, severity="warning", title="something", **more)


# -- data ---------------------------------------------------------------------------------------------------------


def test_ranks_read_every_sample_of_an_epoch_once() -> None:
    ranks = [shards(rank) for rank in range(4)]
    seen = [
        tuple(row) for data in ranks for _ in range(NUM_SAMPLES // (4 * BATCH_SIZE)) for row in data.take()[0].tolist()
    ]
    assert len(seen) == len(set(seen)) == NUM_SAMPLES


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_REPLICAS)
def test_one_bit_of_one_number_flips(name: Any) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    target = model.weight if name == "weight_bit" else optimizer.state[model.weight]["exp_avg_sq"]
    before = target.detach().clone().view(torch.int32)
    cell = Cell(fault=name)
    Planted(cell, cell.odd_rank, shards(0)).after_step(cell.fault_step, optimizer)
    changed = before ^ target.detach().view(torch.int32)
    assert [bin(number).count("1") for number in changed.flatten().tolist() if number] == [1]


# -- plan and score -----------------------------------------------------------------------------------------------


def test_sharded_runs_have_no_faults_of_copies() -> None:
    cells = plan(wraps=("ddp", "fsdp"), clean_steps=10)
    of = {wrap: [cell.fault for cell in cells if cell.wrap == wrap] for wrap in ("ddp", "fsdp")}
    assert set(of["ddp"]) - set(of["fsdp"]) == set(OF_REPLICAS)
    assert set(CLEAN) <= set(of["ddp"])
    assert not set(UNSEEN) & set(of["ddp"])
    assert len({cell.label for cell in cells}) == len(cells)


def test_a_finding_of_the_right_kind_after_the_fault_counts() -> None:
    cell = Cell(fault="scaled")
    good = finding("high_dispersion", first_step=150, found_step=250, rank=2)
    row = fault_row(result(cell, finding("loss_spike"), good))
    assert (row["found"], row["rank_named"], row["steps_until_found"]) == (True, True, 250 - cell.fault_step)
    assert row["other_findings"] == ["loss_spike"]
    assert not fault_row(result(cell, replace(good, rank=1)))["rank_named"]
    assert not fault_row(result(cell, replace(good, found_step=100)))["found"]
    assert not fault_row(result(cell, finding("low_dispersion", found_step=250)))["found"]


def test_two_with_the_same_samples_must_be_named_together() -> None:
    cell = Cell(fault="shard")
    both = finding("low_dispersion", found_step=200, rank=2, evidence={"seen": {"ranks": [1, 2]}})
    assert fault_row(result(cell, both))["rank_named"]
    assert not fault_row(result(cell, replace(both, evidence={"seen": {"ranks": [0, 2]}})))["rank_named"]


def test_what_guarded_ranks_left_out_is_compared() -> None:
    cell = Cell(fault="nan")
    first = replace(RANK, left_out=(123,))
    found = finding("nonfinite", found_step=123)
    row = fault_row(result(cell, found, ranks=(first, replace(first, rank=1))))
    assert row["after"] == "all ranks left out step 123; weights equal at the end"
    assert not row["rank_named"]
    assert "NOT equal" in fault_row(result(cell, found, ranks=(first, replace(first, digest="b"))))["after"]
    assert "ranks differ" in fault_row(result(cell, found, ranks=(first, replace(first, left_out=()))))["after"]


def test_alarms_of_clean_runs_are_told_apart() -> None:
    cell = Cell(fault="clean", fault_step=0)
    note = replace(finding("noisy_gradients"), severity="info")
    row = clean_row(result(cell, finding("rng_mismatch"), finding("explosion"), note))
    assert (row["about_ranks"], row["others"], row["notes"]) == (["rng_mismatch"], ["explosion"], ["noisy_gradients"])


# -- on paper -----------------------------------------------------------------------------------------------------


def test_the_calculation_is_that_of_the_wire() -> None:
    paper = on_paper(CASES[:1])
    _, world, tensors, slots = CASES[0]
    case = paper["cases"][0]
    assert case["plain_bytes"] == 8 * StepPacker(topology_of(world, tensors, slots)).length(
        StepKind(full=False, detail=False)
    )
    assert case["plain_bytes"] <= case["bytes_per_step"] < case["full_bytes"]
    assert 0.25 <= case["collectives_per_step"] < 0.4
    assert CASES[0][0] in format_paper(paper)


# -- real processes -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_spawn")
def test_real_ranks_find_their_faults(tmp_path: Path) -> None:
    options = ["--ranks", "3", "--steps", "40", "--fault-step", "9", "--clean-steps", "0", "--audit-every", "10"]
    chosen = [word for name in ("weight_bit", "shard", "nan") for word in ("--fault", name)]
    done = CliRunner().invoke(main, ["faults", *options, *chosen, "--keep", str(tmp_path / "runs"), "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["fault"]: row for row in json.loads(done.stdout)["faults"]}
    assert {name: row["finding"] for name, row in rows.items()} == {
        "weight_bit": "replica_mismatch",
        "shard": "low_dispersion",
        "nan": "nonfinite",
    }
    for name in ("weight_bit", "shard"):
        assert rows[name]["rank_named"], rows[name]
        assert rows[name]["steps_until_found"] <= 20
    assert rows["weight_bit"]["tensors"] == ["layers.0.weight"]
    assert rows["nan"]["after"] == "all ranks left out step 9; weights equal at the end"
    assert (tmp_path / "runs" / "ddp.shard.0" / "run" / "run.db").exists()


@pytest.mark.usefixtures("warm_spawn")
def test_the_bench_runs_whole_and_counts_its_collectives() -> None:
    found = run_ranks(ranks=2, rounds=1, size="tiny")
    assert found["steps"] == 200
    assert len(found["ratios"]) == 5
    assert found["collectives_per_step"] == pytest.approx(57 / 200)
    assert "2 ranks over gloo" in format_ranks(found)


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    done = warm_python.run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", EXAMPLES / "ddp_train.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHON_EXEC": warm_python.executable()},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "512 steps of 2 ranks are in runs/ddp" in done.stdout
    with gv.open_run(tmp_path / "runs" / "ddp") as run:
        steps, _ = run.series("ranks/norm", rank=1)
        assert steps[0] == 0
        assert len(run.series("grad/norm")[0]) == 512
        assert not [one for one in run.findings if one.severity != "info"]
