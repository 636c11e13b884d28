"""Healthy workloads learn, repeat, and are left alone by a Guard."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.clean_runs import main, summarize
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_depends_on_its_seed_alone(name: str) -> None:
    def train(seed: int) -> list[float]:
        workload, losses = WORKLOADS[name](seed), []
        for i in range(12):
            workload.step(i, lambda loss: losses.append(float(loss.detach())))
        return [*losses, workload.metric()]

    assert train(0) == train(0)
    assert train(0) != train(1)


def test_a_short_run_of_two_workloads_has_no_action() -> None:
    command = ["--workload", "rare_class", "--workload", "curriculum", "--seeds", "1", "--steps", "150", "--json"]
    result = json.loads(CliRunner().invoke(main, [*command, "--workers", "1"]).stdout)
    assert (result["runs"], result["acted"], result["worse"]) == (2, 0, 0)
    assert all(bar["reached"] for bar in result["bars"])
    assert not result["broken"]


def test_an_action_or_a_worse_run_misses_the_bar() -> None:
    run: dict[str, object] = {
        "workload": "gan",
        "seed": 0,
        "plain": 1.0,
        "actions": {},
        "lost": 0,
        "notes": [],
        "broken": [],
    }
    run |= {"warned": [], "healthy": True}
    warned = {**run, "acted": False, "guarded": 1.0, "warned": ["loss_spike"]}
    assert [bar["reached"] for bar in summarize([warned], 10)["bars"]] == [False, True, True, True]
    fine, acted, worse = ({**run, "acted": a, "guarded": g} for a, g in ((False, 1.0), (True, 1.0), (False, 1.02)))
    assert [bar["reached"] for bar in summarize([fine], 10)["bars"]] == [True, True, True, True]
    assert [bar["reached"] for bar in summarize([acted], 10)["bars"]] == [True, True, False, True]
    assert [bar["reached"] for bar in summarize([worse], 10)["bars"]] == [True, True, True, False]
