from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import probed
import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals.errors import ConfigError, GradvitalsError
from gradvitals.probe import QUESTIONS, Probe
from gradvitals.report.probe import probe_text


@pytest.fixture(scope="module")
def found() -> Probe:
    model = probed.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return probed.ask(model, n_batches=6, optimizer=optimizer)


def test_everything_is_answered(found: Probe) -> None:
    assert found.notes == []
    assert found.about["questions"] == list(QUESTIONS)
    assert all(getattr(found, question) for question in QUESTIONS)
    assert found.about["lr"] == 1e-2
    assert found.about["task"] == "classification"
    assert found.about["train_size"] == 48
    assert found.about["num_parameters"] == sum(p.numel() for p in probed.mlp().parameters())


def test_the_record_is_plain_and_strict_json(found: Probe) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(one) for key, one in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or type(value) in (str, int, float, bool)

    assert plain(found.record())
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again["signal"]["batch_size"] == 8
    assert list(again) == ["about", "verdict", "notes", *QUESTIONS]


def test_the_verdict_has_the_worst_first(found: Probe) -> None:
    order = ["critical", "warning", "info", "fine"]
    places = [order.index(item["severity"]) for item in found.verdict]
    assert places == sorted(places)
    assert all(set(item) == {"severity", "question", "title", "detail", "names", "advice"} for item in found.verdict)


def test_as_text_and_as_a_page(found: Probe, tmp_path: Path) -> None:
    text = str(found)
    assert text.startswith("Sequential  275 parameters in 6 tensors, classification task")
    for words in ("4.weight", "GSNR", "Noise scale", "2 / learning rate", "Effective rank", "relu"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 110
    page = found.save_html(tmp_path / "probe.html")
    assert page.read_text("utf-8").lstrip().lower().startswith("<!doctype html>")


def test_names_from_outside_are_text(found: Probe) -> None:
    record = json.loads(json.dumps(found.record()))
    for row in record["signal"]["tensors"]:
        row["name"] = "[red]\x1b[31m" + row["name"]
    assert "[red]\\x1b[31m0.weight" in probe_text(record)


def test_many_tensors_are_cut_and_the_bad_ones_kept(found: Probe) -> None:
    record = found.record()
    rows = [dict(record["signal"]["tensors"][0], name=f"t{i}", verdict="noise") for i in range(100)]
    rows[97]["verdict"] = "exploding"
    text = probe_text({**record, "signal": {**record["signal"], "tensors": rows}})
    assert "t97" in text
    assert "and 60 more" in text


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_question_alone(question: str) -> None:
    found = probed.ask(n_batches=3, questions=question)
    assert [name for name in QUESTIONS if getattr(found, name)] == [question]
    assert len(found.about["losses"]) == 3
    assert str(found)


def test_a_language_model_with_dict_batches() -> None:
    model = probed.Blocks()
    found = probed.ask(model, probed.tokens(), None, n_batches=4, lr=0.01)
    assert found.about["task"] == "language"
    assert found.about["questions"] == list(QUESTIONS), found.notes
    assert found.signal["tensors"][0]["name"] == "embed.weight"
    assert found.samples["method"] == "vmap"
    assert str(found)


def test_a_loader_shorter_than_asked_is_a_note() -> None:
    found = probed.ask(probed.mlp(), probed.classes(16), n_batches=10, questions="signal")
    assert found.about["batches"] == 2
    assert found.notes == ["2 of 10 batches: the loader had no more"]


def test_a_loader_without_a_batch() -> None:
    with pytest.raises(GradvitalsError, match="gave no batch"):
        gv.probe(probed.mlp(), [], nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_batches": 0}, "n_batches is 0"),
        ({"questions": "why"}, "questions is 'why'; expected some of signal"),
        ({"questions": []}, "questions is"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"examples": 1}, "examples is 1"),
        ({"memory_mb": 0}, "memory_mb is 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gv.probe(probed.mlp(), probed.classes(), nn.CrossEntropyLoss(), **settings)


def test_a_question_that_fails_is_a_note_and_the_others_are_answered() -> None:
    class Fragile(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 1:
                raise ValueError("one example is not enough")
            return super().forward(x)

    found = probed.ask(Fragile(6, 3), n_batches=3, questions=["signal", "samples", "landscape"])
    assert found.samples is None
    assert found.signal is not None
    assert found.landscape is not None
    assert any(note.startswith("samples: no answer: one example is not enough") for note in found.notes)


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    gv.probe(
        probed.mlp(),
        probed.classes(),
        nn.CrossEntropyLoss(),
        3,
        questions=["signal", "samples"],
        progress=lambda *now: told.append(now),
    )
    assert told[0] == (1, 5, "batch 1")
    assert told[-1] == (5, 5, "samples")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_checkpointing_that_knows_only_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.utils.checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)
            return self.head(x)

    model, batches = Checkpointed(), [(x.clone(), y) for x, y in probed.classes()]
    found = probed.ask(model, batches, n_batches=4, questions="signal")
    plain = nn.Sequential(model.inner, model.head)
    expected = probed.ask(plain, n_batches=4, questions="signal")
    assert found.signal["total"]["norm"] == pytest.approx(expected.signal["total"]["norm"])
    assert all(p.grad is None for p in model.parameters())


def test_the_package_is_the_function_whatever_is_imported_first() -> None:
    code = "import gradvitals.probe.gradients, gradvitals as gv; assert callable(gv.probe) and gv.probe.QUESTIONS"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_window_keeps_names_and_verdicts_and_cuts_no_number(found: Probe, width: int) -> None:
    text = probe_text(found.record(), width)
    assert max(map(len, text.splitlines())) <= width
    lines = [line.split() for line in text.splitlines()]
    for row in found.signal["tensors"]:
        assert any(line[:2] == [row["name"], row["verdict"]] for line in lines)
    assert "…" not in text


def test_regression_has_all_answers_and_no_accuracy() -> None:
    x = torch.randn(40, 3)
    batches = list(zip(x.split(8), x.sum(1, keepdim=True).split(8), strict=True))
    found = probed.ask(nn.Linear(3, 1), batches, nn.MSELoss(), 5, lr=0.1)
    assert found.about["task"] == "regression"
    assert found.about["questions"] == list(QUESTIONS), found.notes
    assert "Loss when inputs change" in str(found)
    assert "accuracy" not in str(found)


def test_examples_are_measured_with_the_statistics_of_the_model_as_given() -> None:
    """The passes over the batches must not move the statistics of batch norm that examples are measured with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    batches = [(5 * torch.randn(16, 4) + 3, torch.randn(16, 1)) for _ in range(10)]
    inputs, targets = batches[0]
    model.eval()
    norms = []
    for one, target in zip(inputs, targets, strict=True):
        model.zero_grad()
        torch.nn.functional.mse_loss(model(one[None]), target[None]).backward()
        norms.append(
            sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
        )
    model.zero_grad()
    model.train()
    for count in (1, 10):
        found = probed.ask(model, batches, torch.nn.functional.mse_loss, count, questions="samples", examples=16)
        assert found.samples is not None
        assert found.samples["norms"] == pytest.approx(norms, rel=1e-4)
