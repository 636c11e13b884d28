"""`gradvitals run` is as if it were not there: arguments, input, output, errors, exit status, child processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import ENVIRONMENT, Ended, python, watched

import gradvitals as gv
from gradvitals.cli import main

HERE = Path(__file__).parent / "scripts"


def without_ours(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("gradvitals: "))


@pytest.fixture(scope="module")
def all_sorts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Ended, Path]:
    folder = tmp_path_factory.mktemp("all_sorts")
    args = (str(HERE / "all_sorts.py"), "--run", "theirs", "-m", "--quiet")
    stdin = "first line\nsecond line\n"
    bare = python(*args, cwd=folder, stdin=stdin)
    return bare, watched("--run", "mine", "--every", "2", *args, cwd=folder, stdin=stdin), folder


def test_output_input_arguments_and_exit_status_stay(all_sorts: tuple[Ended, Ended, Path]) -> None:
    bare, run, _ = all_sorts
    assert bare.status == 3, bare.err
    assert run.status == 3
    assert run.out == bare.out
    assert "['--run', 'theirs', '-m', '--quiet'] all_sorts.py True __main__ None" in run.out
    assert without_ours(run.err) == bare.err


def test_workers_and_forks_keep_out_of_the_run(all_sorts: tuple[Ended, Ended, Path]) -> None:
    _, run, folder = all_sorts
    assert sorted(path.name for path in folder.iterdir()) == ["mine"]
    assert gv.open_run(folder / "mine").series("loss")[0].tolist() == list(range(9))
    assert run.err.count("details: gradvitals doctor mine") == 1
    assert run.err.count("9 steps") == 1  # the child that trained and ended has nothing to say


@pytest.mark.parametrize("way", ["chain", "exit", "interrupt", "terminate"])
def test_an_end_with_an_error_is_the_script_s_own(way: str, tmp_path: Path) -> None:
    script = str(HERE / "fails.py")
    bare, run = python(script, way, cwd=tmp_path), watched(script, way, cwd=tmp_path)
    assert bare.status != 0
    assert run.status == bare.status
    assert run.out == bare.out
    assert without_ours(run.err) == bare.err
    assert "nothing was watched" not in run.err, "the script's own error says more"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('no torch')", "did not import torch"),
        ("import torch", "no backward pass ran"),
        ("import torch\ntorch.ones(1, requires_grad=True).sum().backward()", "1 backward pass ran"),
        (
            "import torch\nw = torch.ones(3, requires_grad=True)\nfor _ in range(4):\n"
            "    w.square().sum().backward()\n    w.grad = None",
            "4 backward passes ran, but no weights were updated between them, by an optimizer or by the script",
        ),
        (
            "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.AdamW(model.parameters())\n"
            "for _ in range(4):\n    model(torch.ones(1, 2)).sum().backward()",
            "4 backward passes ran, but no weights were updated between them: AdamW never stepped; call its step()",
        ),
    ],
)
def test_the_reason_is_printed_if_nothing_was_watched(script: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    run = watched("script.py", cwd=tmp_path)
    assert run.status == 0
    assert run.err.count("gradvitals: nothing was watched: ") == 1
    assert reason in run.err


def test_the_verdict_of_a_terminated_script_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "GRADVITALS_WORKER", "process")
    (tmp_path / "script.py").write_text(
        "import os, signal, torch\nmodel = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(60):\n"
        "    optimizer.zero_grad()\n    (model(torch.randn(8, 4)) - 1).square().mean().backward()\n"
        "    optimizer.step()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    run = watched("script.py", cwd=tmp_path)  # returns once the worker has closed stderr
    assert run.status == -signal.SIGTERM
    assert "the training process was killed; every step it made is kept" in run.err
    assert "60 steps" in run.err


def test_a_traceback_through_torch_has_no_frame_of_ours(tmp_path: Path) -> None:
    run = watched(str(HERE / "fails.py"), "backward", cwd=tmp_path)
    assert run.status == 1
    assert "grad can be implicitly created only for scalar outputs" in run.err
    assert "_tensor.py" in run.err
    assert "gradvitals/" not in run.err
    assert 'File "<frozen' not in run.err


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "train"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    told = "import sys; print(__name__, __package__, __spec__.name, sys.argv, sys.path[0])\nfrom . import other\n"
    (package / "__main__.py").write_text(told)
    (package / "other.py").write_text("print('beside it')")
    bare = python("-m", "mine.train", "--lr", "3", cwd=tmp_path)
    run = watched("--quiet", "-m", "mine.train", "--lr", "3", cwd=tmp_path)
    assert bare.status == 0, bare.err
    assert (run.status, run.out, run.err) == (0, bare.out, "")


def test_what_cannot_be_run_is_told_in_a_line(tmp_path: Path) -> None:
    for args, told in (
        (["nowhere.py"], "nowhere.py cannot be read: No such file or directory; expected the path of a Python script"),
        (["-m", "no.such.module"], "there is no module 'no.such.module' to run"),
        ([str(tmp_path)], "is a folder; expected a script, or -m and the name of a module"),
        (["--sink", "nothing:x", "nowhere.py"], "'nothing:x' is not a sink"),
        (["--every", "0", "nowhere.py"], "Invalid value for '--every'"),
        (["--lr", "3", "nowhere.py"], "has no option --lr. Options of the script come after it: gradvitals run"),
    ):
        result = CliRunner().invoke(main, ["run", *args])
        assert result.exit_code == 2
        assert told in result.output


@pytest.mark.parametrize("way", ["find_spec", "submodule", "lazy", "own_finder"])
def test_a_script_is_watched_however_it_imports_torch(way: str, tmp_path: Path) -> None:
    run = watched("--run", "run", str(HERE / "imports_torch.py"), way, cwd=tmp_path)
    assert run.status == 0, run.err
    assert run.err.splitlines()[0] == "gradvitals: watching model with SGD, 8 samples per step; the run is in run"
    assert gv.open_run(tmp_path / "run").series("loss")[0].tolist() == list(range(6))


def test_ranks_that_the_script_starts_itself_are_left_alone_without_a_long_wait(tmp_path: Path) -> None:
    run = watched("--run", "run", str(HERE / "starts_ranks.py"), cwd=tmp_path)  # fails after 100 s
    assert run.status == 0, run.err
    assert run.out == "trained\n"
    lines = [line for line in run.err.splitlines() if line.startswith("gradvitals: ")]
    assert len(lines) == 1
    assert lines[0].startswith("gradvitals: model is not watched: the script itself started 2 ranks")
    assert not (tmp_path / "run").exists()
