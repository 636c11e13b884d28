"""docs/page.md names the addresses of the page: each answers as documented, and none is missing."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from web_runs import run_id

from gradvitals.web.api import Api
from gradvitals.web.run_index import RunIndex

PAGE = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(/api/[^`]+)` \| (.+) \|$", PAGE, re.MULTILINE))
JSON = [address for address, answer in ROWS.items() if answer.startswith("JSON")]
BYTES = [address for address, answer in ROWS.items() if answer.startswith("bytes")]


def test_every_address_is_documented(tmp_path: Path) -> None:
    api = Api(RunIndex(tmp_path))
    paths = {f"/api{route.path}".replace("{run_id:str}", "{id}") for route in api.routes()}
    api.close()
    assert paths == {address.partition("?")[0] for address in ROWS}
    assert len(JSON) + len(BYTES) + 1 == len(ROWS)  # the stream has no end


@pytest.mark.parametrize("address", JSON)
def test_json_has_the_documented_names(client: TestClient, address: str) -> None:
    answer = client.get(address.replace("{id}", run_id(client, "gpt")))
    assert answer.status_code == 200
    content = answer.json()
    of_runs = set().union(*(run.keys() for run in content.get("runs", ())))
    of_lists = set().union(*(part.keys() for part in content.get("lists", ())))
    named = set(re.findall(r"`(\w+)`", ROWS[address]))
    assert named
    assert named <= set(content) | of_runs | of_lists


@pytest.mark.parametrize("address", BYTES)
def test_bytes_are_as_long_as_their_header_says(client: TestClient, address: str) -> None:
    answer = client.get(address.replace("{id}", run_id(client, "gpt")))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
    first, second, *_ = struct.unpack_from("<IIdd", answer.content)
    is_series = "/series" in address
    points, metrics, rows, columns = first, second, first, second
    numbers = 8 * metrics + 16 * points + 16 * metrics * points if is_series else 8 * columns + 4 * rows * columns
    assert len(answer.content) == 24 + numbers


@pytest.mark.parametrize(
    ("query", "status"),
    [("series?metric=nothing", 404), ("heatmap?picture=nothing", 400), ("series?metric=loss&buckets=0", 400)],
)
def test_a_request_that_cannot_be_answered_says_why(client: TestClient, query: str, status: int) -> None:
    answer = client.get(f"/api/runs/{run_id(client, 'gpt')}/{query}")
    assert answer.status_code == status
    assert answer.json()["error"]
    assert client.get("/api/runs/nobody").status_code == 404
