from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs_to_advise import LAYERS, advised

import gradvitals as gv
from gradvitals.advise import Advice, advise


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


def test_few_readings_of_tensors_are_not_enough(tmp_path: Path) -> None:
    advice = layers(tmp_path, steps=10, every=50)
    assert not advice.can_tell
    assert "per-tensor readings" in advice.answer


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
    assert "gradients are NaN or infinite at 97% of steps" in advice.answer
    # How many of them is not known at the step at which it begins, only where.
    assert "of all tensors" in finding.title
    assert "share" not in {**finding.evidence["seen"], **finding.evidence["expected"]}
