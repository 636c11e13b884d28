from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.cli.probe import QUESTIONS

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = "examples.probe_factory:factory"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    result = CliRunner().invoke(main, ["probe", EXAMPLE, "--batches", "4", "--examples", "64", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "GSNR" in result.stdout
    assert "Loss along the update" in result.stdout
    assert "batch 1" in result.stderr
    assert page.exists()


def test_json_of_one_question() -> None:
    args = ["probe", EXAMPLE, "--only", "landscape", "--lr", "0.5", "--json"]
    found = json.loads(CliRunner().invoke(main, args).stdout)
    assert found["landscape"]["lr"] == 0.5
    assert found["signal"] is None
    assert found["about"]["batches_asked"] == 10


def test_the_questions_offered_are_those_there_are() -> None:
    from gradvitals.probe import QUESTIONS as there_are

    assert there_are == QUESTIONS


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("examples.probe_factory", "expected package.module:function"),
        ("no_such_module:factory", "there is no module 'no_such_module'"),
        ("examples.probe_factory:none", "has no function 'none'"),
        ("examples.probe_factory:angles", "has no function 'angles'"),
    ],
)
def test_a_factory_that_is_not_there(factory: str, words: str) -> None:
    result = CliRunner().invoke(main, ["probe", factory])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("made", ["3", "(1, 2, 3)", "{'model': 3}", "(torch.nn.Linear(1, 1),)"])
def test_a_factory_that_makes_something_else(made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_factory.py").write_text(f"import torch\ndef factory(): return {made}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "odd_factory", raising=False)
    result = CliRunner().invoke(main, ["probe", "odd_factory:factory"])
    assert result.exit_code == 2
    assert "expected (model, loader, loss)" in result.output
