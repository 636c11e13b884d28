from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradvitals.cli import main

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


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("examples.probe_factory", "expected package.module:function"),
        ("no_such_module:factory", "there is no module 'no_such_module'"),
        ("examples.probe_factory:none", "has no function 'none'"),
        ("examples.probe_factory:angles", "has no function 'angles'"),
        ("examples/probe_factory.py:factory", "without .py: examples.probe_factory:factory"),
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
    assert "expected (model, loader), (model, loader, loss)" in result.output


MADE = """
import torch
from torch import nn
def data(): return [(torch.randn(4, 3), torch.zeros(4, 1)) for _ in range(5)]
def plain():
    print("noise from the factory")
    return nn.Linear(3, 1), data(), nn.MSELoss()
def own_settings(): return {"model": nn.Linear(3, 1), "loader": data(), "loss_fn": nn.MSELoss(), "n_batches": 3}
def wrong_key(): return {"model": nn.Linear(3, 1), "loader": data(), "loss": nn.MSELoss()}
def wants_more(size): return nn.Linear(3, 1), data(), nn.MSELoss()
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_here.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "made_here", raising=False)


@pytest.mark.usefixtures("made")
def test_what_a_factory_prints_is_not_in_the_json() -> None:
    result = CliRunner().invoke(main, ["probe", "made_here:plain", "--only", "signal", "--json"])
    assert json.loads(result.stdout)["about"]["batches"] == 5
    assert "noise from the factory" in result.stderr


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(("options", "batches"), [([], 3), (["--batches", "2"], 2)])
def test_settings_of_the_factory_hold_unless_an_option_is_given(options: list[str], batches: int) -> None:
    args = ["probe", "made_here:own_settings", "--only", "signal", "--json", *options]
    assert json.loads(CliRunner().invoke(main, args).stdout)["about"]["batches_asked"] == batches


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong_key", "a dict with the key 'loss'; expected some of model, loader, loss_fn"),
        ("wants_more", "takes size; expected a function without arguments"),
    ],
)
def test_a_factory_with_odd_arguments(name: str, words: str) -> None:
    result = CliRunner().invoke(main, ["probe", f"made_here:{name}"])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.usefixtures("made")
def test_a_page_that_cannot_be_written_is_said_before_anything_runs() -> None:
    result = CliRunner().invoke(main, ["probe", "made_here:plain", "--html", "no/such/folder/out.html"])
    assert result.exit_code == 2
    assert "noise from the factory" not in result.output
