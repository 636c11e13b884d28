"""Generated clicks: an AUC counted pair by pair, a truth with a known ceiling, and rare ids."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from experiments.vrgd import clicks
from experiments.vrgd.__main__ import main
from experiments.vrgd.clicks import World, auc, factors_by_frequency, format_factors, train_clicks
from experiments.vrgd.trial import Trial
from gradvitals.errors import GradvitalsError

CPU = torch.device("cpu")
TRIAL = Trial(
    task="clicks", model="dlrm-small", batch=512, optimizer="adam", arm="base", lr=0.02, seed=1, k=8, epochs=60,
    weight_decay=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def small_world() -> World:
    return World(CPU, field_sizes=(300, 30, 5))


@pytest.fixture
def small(small_world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    test = small_world.draw(20_000, torch.Generator().manual_seed(7))
    monkeypatch.setattr(clicks, "_world", lambda device: small_world)
    monkeypatch.setattr(clicks, "_test_samples", lambda device: test)
    monkeypatch.setattr(clicks, "CURVE_SAMPLES", 5000)
    return small_world


def pair_by_pair(score: Tensor, clicked: Tensor) -> float:
    hits, misses = score[clicked == 1].tolist(), score[clicked == 0].tolist()
    return sum((a > b) + 0.5 * (a == b) for a in hits for b in misses) / (len(hits) * len(misses))


@pytest.mark.parametrize("decimals", [8, 1], ids=["all different", "many equal"])
def test_auc_is_the_share_of_pairs_in_order(decimals: int) -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(120, generator=generator).round(decimals=decimals)
    clicked = torch.bernoulli(torch.sigmoid(score), generator=generator)
    assert auc(score, clicked) == pytest.approx(pair_by_pair(score, clicked), abs=1e-12)


def test_the_ceiling_is_what_the_true_probabilities_give_on_average(small: World) -> None:
    samples = small.draw(4000, torch.Generator().manual_seed(3))
    ordered = samples.probability.double().sort().values
    misses_below = (1 - ordered).cumsum(0) - (1 - ordered)
    expected = (ordered * misses_below).sum() / (ordered.sum() * (1 - ordered).sum() - (ordered * (1 - ordered)).sum())
    assert auc(samples.probability, samples.clicked) == pytest.approx(float(expected), abs=0.025)
    noisy = torch.logit(samples.probability) + torch.randn(4000, generator=torch.Generator().manual_seed(5))
    assert auc(noisy, samples.clicked) < auc(samples.probability, samples.clicked)


def test_a_short_pass_learns_part_of_what_can_be_known(small: World) -> None:
    found = train_clicks(TRIAL)
    assert 0.6 < found["score"] < found["ceiling"] < 0.95
    assert found["score@10"] < found["score@60"]
    assert found["test_loss"] < math.log(2)
    assert found["steps"] == 60


def test_ids_in_one_part_alone_have_a_ratio_of_their_own_and_unseen_ones_are_left_out(small: World) -> None:
    rows = {row["parts"]: row for row in factors_by_frequency(replace(TRIAL, epochs=3))}
    assert sum(row["share_of_ids"] for row in rows.values()) == pytest.approx(1.0)
    assert rows[1.0]["r"] == pytest.approx(1 / (TRIAL.k - 1), rel=1e-3)
    assert rows[0.0]["factor"] == 1.0
    assert math.isnan(rows[0.0]["r"])
    assert rows[8.0]["factor"] < rows[1.0]["factor"]  # the rare ids are damped least
    text = format_factors(TRIAL, list(rows.values()))
    assert "1 of 8" in text
    assert "0.143" in text


@pytest.mark.parametrize("wrong", [{"batch": 500}, {"model": "dlrm"}])
def test_what_cannot_be_trained_is_said(wrong: dict[str, object], small: World) -> None:
    with pytest.raises(GradvitalsError, match="expected"):
        train_clicks(replace(TRIAL, **wrong))


def test_the_command(small: World) -> None:
    options = ["clicks", "--batch", "64", "--epochs", "3", "--device", "cpu"]
    done = CliRunner().invoke(main, [*options, "--span", "1", "--reach", "0", "--refine", "0", "--seeds", "1"])
    assert done.exit_code == 0, done.output
    assert "clicks dlrm-small, batch 64, sgd" in done.output
    assert f"true probabilities is {clicks.ceiling('cpu'):.4f}" in done.output
    shown = CliRunner().invoke(main, [*options, "--factors", "--json"])
    assert {row["parts"] for row in json.loads(shown.output)} >= {0.0, 1.0}
