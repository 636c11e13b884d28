"""`gradvitals lab examples`: the exact noise scale is exact, and a live one stands beside it."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.lab.char_lm import Characters, CharLM, CharLMConfig
from gradvitals.lab.examples import cost, exact_signals, is_norm_weight


def test_exact_signal_and_noise_are_those_of_one_backward_for_each_example() -> None:
    torch.manual_seed(0)
    data = Characters("to be, or not to be, that is the question")
    model = CharLM(CharLMConfig(vocab_size=data.vocab_size, context=6, d_model=8, n_layer=1, n_head=2))
    tokens, targets = data.batch(5, 6)
    found = exact_signals(model, tokens, targets)
    vectors: dict[str, list[np.ndarray]] = {}
    for i in range(5):
        model.zero_grad()
        model(tokens[i : i + 1], targets[i : i + 1]).backward()
        for name, parameter in model.named_parameters():
            vectors.setdefault(name, []).append(parameter.grad.double().numpy().ravel())
    of_one = {name: signal_and_noise(np.array(rows)) for name, rows in vectors.items()}
    assert found["model"] == pytest.approx(np.sum(list(of_one.values()), axis=0), rel=1e-4)
    norms = np.array([pair for name, pair in of_one.items() if is_norm_weight(name)])
    assert len(norms) == 3
    shares = norms / norms.sum(1, keepdims=True)  # every layer counts the same
    assert found["norms"] == pytest.approx(shares.sum(0), rel=1e-4)


def signal_and_noise(rows: np.ndarray) -> tuple[float, float]:
    mean = rows.mean(0)
    noise = np.square(rows - mean).sum() / (len(rows) - 1)
    return float(mean @ mean - noise / len(rows)), float(noise)


def test_the_live_value_is_that_of_the_exact_gradients_of_norm_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradvitals.lab.examples.cost", partial(cost, rounds=5))
    result = CliRunner().invoke(main, ["lab", "examples", "--steps", "10", "--every", "6", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    readings = found["runs"][0]["readings"]
    assert [row["step"] for row in readings] == [0, 1, 2, 4, 6]
    assert all(row["examples"] == pytest.approx(row["norms"], rel=1e-4) for row in readings)
    assert found["summary"]["against_exact_norm_weights"] < 1e-4
    assert found["cost"]["step_ms"] > 0
