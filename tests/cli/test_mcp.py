"""`gradvitals mcp` is used as an agent uses it: by the SDK's own client, over the pipes of a process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp")
WriteRun = Callable[..., Path]


@pytest.fixture
def folder(write_run: WriteRun) -> Path:
    return write_run().parent


def ask(folder: Path, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Starts the server on a folder; returns its tools, and the answers to calls."""

    async def talk() -> tuple[list[Any], list[Any]]:
        server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "gradvitals", "mcp", str(folder)])
        async with mcp.Client(server) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(asyncio.wait_for(talk(), 60))


def content(answer: Any) -> Any:
    assert not answer.is_error, answer.content[0].text
    return json.loads(answer.content[0].text)


def test_an_agent_finds_a_run_its_verdict_a_series_and_what_a_rule_means(folder: Path) -> None:
    tools, answers = ask(
        folder,
        ("list_runs", {}),
        ("verdict", {}),
        ("series", {"metric": "grad/norm", "points": 5}),
        ("explain", {"rule": "explosion"}),
        ("diff", {"a": "run", "b": "run"}),
        ("verdict", {"run": "../elsewhere"}),
    )
    assert {tool.name for tool in tools} == {"list_runs", "verdict", "series", "explain", "diff"}
    assert all(tool.annotations.read_only_hint for tool in tools)
    listed, verdict, series, rule, diff = map(content, answers[:5])
    assert [run["name"] for run in listed["runs"]] == ["run"]
    assert verdict["verdict"]["level"] == "attention"
    assert verdict["replayed"]
    assert series["steps"] == [0, 8, 16, 24, 32]
    assert max(series["high"]) == 40.0
    assert rule["causes"]
    assert diff["findings"] == {"gained": [], "lost": []}
    assert answers[5].is_error
    assert "there is no run '../elsewhere'; runs: run" in answers[5].content[0].text
