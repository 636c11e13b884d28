"""Whatever id a finding can have, `gradvitals doctor --explain` knows it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradvitals
from gradvitals.cli import main
from gradvitals.diagnose import RULES
from gradvitals.report.catalog import NOTICES, entry


def ids_in_the_source() -> dict[str, set[str]]:
    """Every id that a Finding is made with in plain sight, and the severities beside it."""
    found: dict[str, set[str]] = {}
    texts = (file.read_text("utf-8") for file in Path(gradvitals.__file__).parent.rglob("*.py"))
    for text in texts:
        for node in ast.walk(ast.parse(text)) if "Finding(" in text else ():  # most files make none
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                if isinstance(given.get("id"), ast.Constant):
                    name = given["id"].value  # type: ignore[attr-defined]
                    parts = ast.walk(given["severity"])
                    named = {part.value for part in parts if isinstance(part, ast.Constant)}
                    found.setdefault(name, set()).update(named)
    return found


IDS = {name: severities for name, severities in ids_in_the_source().items() if name not in RULES}


@pytest.mark.parametrize("name", sorted(IDS))
def test_every_notice_is_explained_with_its_severities(name: str) -> None:
    found = entry(name)
    assert set(found.severities) == IDS[name]
    assert found.causes
    assert found.fixes
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["doctor", "--explain", name])
    assert result.exit_code == 0
    for part in (found.name, f"[{name}]", "Likely causes", "Fixes", "Severity: "):
        assert part in result.output


def test_no_words_are_left_without_a_notice() -> None:
    assert set(NOTICES) == set(IDS)


def test_json_and_unknown_ids() -> None:
    assert '"id": "ranks_lost"' in CliRunner().invoke(main, ["doctor", "--explain", "ranks_lost", "--json"]).output
    unknown = CliRunner().invoke(main, ["doctor", "--explain", "nothing"])
    assert unknown.exit_code == 2
