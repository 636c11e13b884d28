"""The rules of the house that no linter knows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gradvitals.cli import main

ROOT = Path(__file__).parent.parent
NO_TORCH = ("gradvitals", "gradvitals.types", "gradvitals.config", "gradvitals.store.reader", "gradvitals.store.writer")
NO_TORCH += (
    "gradvitals.diagnose",
    "gradvitals.advise",
    "gradvitals.worker.publish",
    "gradvitals.sinks",
    "gradvitals.alerts",
)
NO_TORCH += tuple(f"gradvitals.report.{name}" for name in ("terminal", "html", "live", "notebook", "export"))
NO_TORCH += ("gradvitals.report.probe", "gradvitals.web.app", "gradvitals.cli")

HELP_OF_EACH = """
import sys
from gradvitals.cli import main
for path in sys.argv[1:]:
    try:
        main([*path.split(), "--help"])
    except SystemExit as stop:
        assert not stop.code
loaded = {"torch", "numpy", "rich"} & set(sys.modules)
sys.exit(f"{loaded} loaded" if loaded else 0)
"""

IMPORT_EACH_APART = """
import importlib, numpy, os, sys
for module in sys.argv[1:]:  # each in a process of its own, which Python need not start again
    child = os.fork()
    if child == 0:
        importlib.import_module(module)
        os._exit("torch" in sys.modules)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{module} cannot be imported, or imports torch")
"""


def all_commands() -> Iterator[tuple[str, ...]]:
    def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                yield from walk(child, (*path, name))

    yield from walk(main, ())


COMMANDS = list(all_commands())


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


def test_reading_a_run_never_imports_torch() -> None:
    done = run_python(IMPORT_EACH_APART, *NO_TORCH)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_of_any_command_imports_neither_torch_nor_numpy() -> None:
    done = run_python(HELP_OF_EACH, *(" ".join(path) for path in COMMANDS))
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    def cpu_seconds() -> float:  # which other work on the machine does not lengthen
        before = os.times()
        subprocess.run([sys.executable, "-m", "gradvitals.cli", "--help"], check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_seconds() for _ in range(5)) < 0.3


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output or "Start here:" in result.output
    assert " ".join(("gradvitals", *path)) in result.output.split("Usage:", 1)[1].split("\n", 1)[1]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_says_what_it_does(path: tuple[str, ...]) -> None:
    for parameter in command_at(path).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.opts} has no help"


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_every_command_is_in_the_docs(path: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert " ".join(("gradvitals", *path)) in text
    for parameter in command_at(path).params:
        if isinstance(parameter, click.Option):
            names = (*parameter.opts, *parameter.secondary_opts)
            assert any(name in text for name in names), f"{parameter.opts} of {path} is not in docs/commands.md"


def test_every_metric_is_in_the_docs() -> None:
    from gradvitals.metrics import INSPECTED, METRICS

    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert [metric for metric in METRICS if f"`{metric}`" not in text] == []
    assert [metric for metric, meaning in INSPECTED.items() if f"| `{metric}` | {meaning} |" not in text] == []


def test_no_file_is_a_grab_bag() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "common.py"}
    assert not [path for path in (ROOT / "src").rglob("*.py") if path.name in vague]


def test_constraints_pin_the_tested_torch_for_any_build() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert "torch==2.13.0" in lines
    assert all("==" in line and "+" not in line for line in lines if line and not line.startswith("#"))
