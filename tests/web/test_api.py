"""The page's data: what each address returns, and that the docs say it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anyio import to_thread
from click.testing import CliRunner
from starlette.testclient import TestClient
from web_runs import STEPS, damaged_run, run_id

import gradvitals as gv
from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.cli import main
from gradvitals.errors import ConfigError
from gradvitals.report import series
from gradvitals.report.listing import RunFile
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo
from gradvitals.web import views
from gradvitals.web.api import Api
from gradvitals.web.app import addresses, bind
from gradvitals.web.run_index import RunIndex, Watcher

ClientOf = Callable[..., TestClient]


def read_series(body: bytes) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]], float, float]:
    points, metrics, readings, last = struct.unpack_from("<IIdd", body)
    start = 24 + 8 * metrics
    steps = np.frombuffer(body, "<f8", points, start)
    times = np.frombuffer(body, "<f8", points, start + 8 * points)
    rest = np.frombuffer(body, "<f4", 4 * metrics * points, start + 16 * points).reshape(metrics, 4, points)
    return steps, times, [tuple(one[:3]) for one in rest], readings, last


def read_last_and_nonfinite(body: bytes) -> tuple[list[float], np.ndarray]:
    points, metrics, *_ = struct.unpack_from("<IIdd", body)
    start = 24 + 8 * metrics
    rest = np.frombuffer(body, "<f4", 4 * metrics * points, start + 16 * points).reshape(metrics, 4, points)
    return np.frombuffer(body, "<f8", metrics, 24).tolist(), rest[:, 3]


def read_heatmap(body: bytes) -> tuple[np.ndarray, np.ndarray, float]:
    rows, columns, end, _ = struct.unpack_from("<IIdd", body)
    starts = np.frombuffer(body, "<f8", columns, 24)
    return starts, np.frombuffer(body, "<f4", rows * columns, 24 + 8 * columns).reshape(rows, columns), end


def test_the_list_names_every_run_with_its_verdict(client: TestClient, folder: Path) -> None:
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert list(runs) == ["gpt", "sweep/wide"]
    assert runs["gpt"]["last_step"] == STEPS - 1
    assert runs["gpt"]["state"] == "finished"
    assert runs["gpt"]["level"] == "attention"


def test_the_verdict_is_the_one_of_doctor(client: TestClient, folder: Path) -> None:
    told = client.get(f"/api/runs/{run_id(client, 'gpt')}").json()
    with gv.open_run(folder / "gpt") as run:
        verdict = run.verdict
    assert told["line"] == verdict.headline
    assert [finding["title"] for finding in told["findings"]] == [finding.title for finding in verdict.findings]
    explosion = next(finding for finding in told["findings"] if finding["id"] == "explosion")
    assert explosion["seen"] == ["norm over its baseline 14 (healthy: under 5)"]
    assert explosion["tensors"][0] == {"name": "blocks.0.norm1.bias", "row": 2}
    assert told["num_tensors"] == 26
    assert len(told["actions"]) == 3


def test_a_short_series_comes_as_it_is(client: TestClient, folder: Path) -> None:
    body = client.get(f"/api/runs/{run_id(client, 'gpt')}/series?metric=gsnr&metric=gsnr_low").content
    steps, times, (value, low), readings, last = read_series(body)
    with gv.open_run(folder / "gpt") as run:
        expected_steps, expected = run.series("gsnr")
        _, expected_low = run.series("gsnr_low")
        _, expected_times = run.times("gsnr")
    np.testing.assert_array_equal(steps, expected_steps)
    np.testing.assert_array_equal(times, expected_times)
    for part in value:
        np.testing.assert_array_equal(part, expected.astype("<f4"))
    np.testing.assert_array_equal(low[2], expected_low.astype("<f4"))
    assert (readings, last) == (STEPS, STEPS - 1)


def test_a_long_series_keeps_its_peaks_in_few_buckets(client: TestClient, folder: Path) -> None:
    body = client.get(f"/api/runs/{run_id(client, 'gpt')}/series?metric=grad/norm&buckets=50").content
    steps, _, [(low, high, mean)], readings, last = read_series(body)
    with gv.open_run(folder / "gpt") as run:
        _, expected = run.series("grad/norm")
    assert len(steps) == 50
    assert high.max() == expected.max().astype("<f4")
    assert low.min() == expected.min().astype("<f4")
    np.testing.assert_allclose(mean, expected.reshape(50, -1).mean(axis=1), rtol=1e-6)
    assert (readings, last) == (STEPS, STEPS - 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bucket_counts_nonfinite_values_and_the_last_reading_is_exact(
    tmp_path: Path, client_of: ClientOf, bad: float
) -> None:
    with RunWriter(tmp_path / "run", meta={}) as writer:
        for step in range(100):
            writer.write(Reading(step=step, time=0.0, values={"loss": bad if step in (33, 34, 75) else float(step)}))
    client = client_of(tmp_path)
    run = run_id(client, "run")
    now, nonfinite = read_last_and_nonfinite(client.get(f"/api/runs/{run}/series?metric=loss&buckets=10").content)
    assert now == [99.0]
    assert nonfinite.tolist() == [[0, 0, 0, 2, 0, 0, 0, 1, 0, 0]]
    _, nonfinite = read_last_and_nonfinite(client.get(f"/api/runs/{run}/series?metric=loss").content)
    assert np.flatnonzero(nonfinite).tolist() == [33, 34, 75]


def test_a_range_is_after_since_up_to_until(client: TestClient) -> None:
    body = client.get(f"/api/runs/{run_id(client, 'gpt')}/series?metric=loss&since=99&until=120.0").content
    steps, *_ = read_series(body)
    assert steps.tolist() == list(range(100, 121))
    body = client.get(f"/api/runs/{run_id(client, 'gpt')}/series?metric=loss&since={STEPS + 5}").content
    steps, _, _, readings, last = read_series(body)
    assert (len(steps), readings) == (0, 0)
    assert np.isnan(last)


def test_one_tensor_is_asked_for_by_its_row(client: TestClient, folder: Path) -> None:
    body = client.get(f"/api/runs/{run_id(client, 'gpt')}/series?metric=grad/norm&kind=tensors&row=4").content
    steps, _, [(_, _, mean)], *_ = read_series(body)
    with gv.open_run(folder / "gpt") as run:
        expected_steps, expected = run.series("grad/norm", tensor=run.names("tensors")[4])
    np.testing.assert_array_equal(steps, expected_steps)
    np.testing.assert_array_equal(mean, expected.astype("<f4"))


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("series?metric=nope", 404, "no metric 'nope'"),
        ("series", 400, "metric is []"),
        ("series?metric=loss&metric=loss&metric=loss&metric=loss&metric=loss", 400, "1 to 4 names"),
        ("series?metric=loss&buckets=1000000", 400, "buckets is 1000000"),
        ("series?metric=loss&since=soon", 400, "since is 'soon'"),
        ("series?metric=loss&since=nan", 400, "since is 'nan'"),
        ("series?metric=loss&kind=secrets", 400, "kind is 'secrets'"),
        ("series?metric=grad/norm&kind=tensors&row=26", 404, "row is 26"),
        ("series?metric=grad/norm&kind=tensors&row=-1", 404, "row is -1"),
        ("series?metric=gsnr&source=magic", 404, "no 'gsnr' from source 'magic'"),
        ("heatmap?picture=cat", 400, "picture is 'cat'"),
        ("heatmap?columns=0", 400, "columns is 0"),
        ("heatmap?rows=ranks", 400, "rows is 'ranks'"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    client: TestClient, folder: Path, query: str, status: int, said: str
) -> None:
    answer = client.get(f"/api/runs/{run_id(client, 'gpt')}/{query}")
    assert answer.status_code == status
    assert said in answer.json()["error"]
    assert str(folder) not in answer.text


def test_a_layer_is_the_root_sum_of_squares_of_its_tensors(client: TestClient, folder: Path) -> None:
    body = client.get(f"/api/runs/{run_id(client, 'gpt')}/heatmap?picture=norm&columns=800").content
    starts, cells, end = read_heatmap(body)
    with gv.open_run(folder / "gpt") as run:
        steps, rows = run.matrix("grad/norm")
        members = [[i for i, info in enumerate(run.tensors) if info.layer == layer] for layer in run.layers]
    np.testing.assert_array_equal(starts, steps)
    for layer, tensors in enumerate(members):
        np.testing.assert_allclose(cells[layer], np.sqrt((rows[:, tensors] ** 2).sum(axis=1)), rtol=1e-5)
    assert end == steps[-1] + 50


def test_a_column_has_the_largest_of_its_bin_and_the_mean_gsnr(client: TestClient, folder: Path) -> None:
    run = run_id(client, "gpt")
    with gv.open_run(folder / "gpt") as opened:
        steps, updates = opened.matrix("update/ratio")
        _, heads = opened.matrix("gsnr", "heads")
        _, layers = opened.matrix("gsnr", "layers")
    cuts = np.arange(5) * steps.size // 5
    _, cells, _ = read_heatmap(client.get(f"/api/runs/{run}/heatmap?picture=update&rows=tensors&columns=5").content)
    np.testing.assert_allclose(cells, np.maximum.reduceat(updates, cuts, axis=0).T, rtol=1e-6)
    for rows, expected in (("heads", heads), ("layers", layers)):
        starts, cells, _ = read_heatmap(
            client.get(f"/api/runs/{run}/heatmap?picture=gsnr&rows={rows}&columns=5").content
        )
        many = np.diff(cuts, append=steps.size)
        np.testing.assert_allclose(cells, np.add.reduceat(expected, cuts, axis=0).T / many, rtol=1e-5)
        np.testing.assert_array_equal(starts, steps[cuts])


def test_the_page_and_the_report_show_the_same_number_of_each_layer(client: TestClient, folder: Path) -> None:
    from gradvitals.report.series import Span
    from gradvitals.report.series import read_heatmap as of_report

    run = run_id(client, "gpt")
    for picture, metric in (("norm", "grad/norm"), ("gsnr", "gsnr"), ("update", "update/ratio")):
        _, cells, _ = read_heatmap(client.get(f"/api/runs/{run}/heatmap?picture={picture}&columns=1").content)
        with gv.open_run(folder / "gpt") as opened:
            found = of_report(opened, metric, "layers", Span(0, STEPS - 1))
            assert found is not None
            whole = of_report(opened, metric, "layers", Span(0, 10**9))  # all steps in the first column
        assert whole is not None
        infinite = np.isinf(cells[:, 0])  # on the page, NaN is infinite too
        np.testing.assert_allclose(cells[~infinite, 0], whole.values[~infinite, 0], rtol=1e-5)
        np.testing.assert_array_equal(infinite, whole.nonfinite[:, 0])


def test_the_heatmap_of_a_range_is_finer(client: TestClient) -> None:
    run = run_id(client, "gpt")
    starts, cells, _ = read_heatmap(client.get(f"/api/runs/{run}/heatmap?since=99&until=300&columns=800").content)
    assert starts.tolist() == [100, 150, 200, 250, 300]
    assert cells.shape[1] == 5


def test_a_gradient_with_nan_is_infinite_in_the_heatmap(tmp_path: Path, client_of: ClientOf) -> None:
    layout = Layout(
        tensors=tuple(
            TensorInfo(index=i, name=f"{layer}.weight", shape=(2,), dtype="float32", layer=layer, depth=i)
            for i, layer in enumerate(("first", "second"))
        ),
        layers=("first", "second"),
    )
    with RunWriter(tmp_path / "run", meta={}) as writer:
        writer.write(layout)
        for step in range(3):
            bad = np.array([0.0, float(step == 1)])
            norms = np.array([1.0 + step, np.nan if step == 1 else 3.0])
            writer.write(Reading(step=step, time=0.0, tensors={"grad/norm": norms, "grad/nonfinite": bad}))
        writer.commit()
    client = client_of(tmp_path)
    for rows in ("layers", "tensors"):
        _, cells, _ = read_heatmap(client.get(f"/api/runs/{run_id(client, 'run')}/heatmap?rows={rows}").content)
        np.testing.assert_array_equal(cells, [[1, 2, 3], [3, np.inf, 3]])
    layers = client.get(f"/api/runs/{run_id(client, 'run')}/layout").json()["layers"]
    assert [layer["tensors"] for layer in layers] == [[0], [1]]


def test_layers_know_their_tensors_and_heads(client: TestClient) -> None:
    layout = client.get(f"/api/runs/{run_id(client, 'gpt')}/layout").json()
    assert [layer["name"] for layer in layout["layers"]] == ["embed", "blocks.0", "blocks.1", "head"]
    assert layout["layers"][1]["tensors"] == list(range(1, 13))
    assert [layout["heads"][row] for row in layout["layers"][2]["heads"]][:2] == [
        "blocks.1.attn/head0",
        "blocks.1.attn/head1",
    ]


def test_the_worst_tensors_are_those_of_the_report(client: TestClient, folder: Path) -> None:
    from gradvitals.report.summary import summarize

    lists = client.get(f"/api/runs/{run_id(client, 'gpt')}/worst").json()["lists"]
    with gv.open_run(folder / "gpt") as run:
        summary = summarize(run)
        names = run.names("tensors")
    by_metric = {each["metric"]: each["rows"] for each in lists}
    assert [(row["name"], row["value"]) for found in lists for row in found["rows"]] == [
        (row.name, row.value) for found in summary.worst for row in found.rows
    ]
    assert all(names[row["row"]] == row["name"] for row in by_metric["update/ratio"])


def test_a_run_that_appears_is_found_and_one_that_goes_is_missed(tmp_path: Path, client_of: ClientOf) -> None:
    client = client_of(tmp_path / "later")
    assert client.get("/api/runs").json()["runs"] == []
    write_synthetic_run(tmp_path / "later" / "a" / "b" / "deep", steps=20, num_tensors=14)
    client.app.state.api.index._scanned = 0.0  # as if a second had passed
    run = run_id(client, "a/b/deep")
    assert client.get(f"/api/runs/{run}").status_code == 200
    shutil.rmtree(tmp_path / "later" / "a")
    client.app.state.api.index._scanned = 0.0
    assert client.get(f"/api/runs/{run}").status_code == 404
    assert client.get("/api/runs").json()["runs"] == []


def test_a_folder_that_is_a_run_is_served_as_that_run(folder: Path, client_of: ClientOf) -> None:
    runs = client_of(folder / "gpt").get("/api/runs").json()["runs"]
    assert [run["name"] for run in runs] == ["gpt"]


def test_a_damaged_run_is_listed_with_its_error_and_a_foreign_file_is_not(tmp_path: Path, client_of: ClientOf) -> None:
    write_synthetic_run(tmp_path / "fine", steps=20, num_tensors=14)
    damaged_run(tmp_path / "broken")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.db").write_bytes(b"no database at all" * 100)
    client = client_of(tmp_path)
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(runs) == {"fine", "broken"}
    assert runs["broken"]["state"] == "error"
    assert "is not a gradvitals run" in runs["broken"]["line"]
    assert runs["fine"]["state"] == "finished"
    assert client.get(f"/api/runs/{runs['broken']['id']}").status_code == 422


def test_a_run_without_a_reading_has_no_verdict(tmp_path: Path, client_of: ClientOf) -> None:
    RunWriter(tmp_path / "empty", meta={"facts": {}}).close()
    client = client_of(tmp_path)
    told = client.get(f"/api/runs/{run_id(client, 'empty')}").json()
    assert (told["last_step"], told["level"], told["charts"], told["pictures"]) == (None, "unknown", [], [])
    heatmap = client.get(f"/api/runs/{run_id(client, 'empty')}/heatmap")
    assert heatmap.status_code == 200
    assert client.get(f"/api/runs/{run_id(client, 'empty')}/worst").json() == {"lists": []}


def test_a_run_recorded_without_diagnosis_names_the_command_that_judges_it(tmp_path: Path, client_of: ClientOf) -> None:
    with RunWriter(tmp_path / "old", meta={}) as writer:
        for step in range(200):
            writer.write(Reading(step=step, time=step, values={"loss": float("nan"), "grad/norm": 1.0}))
    client = client_of(tmp_path)
    told = client.get(f"/api/runs/{run_id(client, 'old')}").json()
    assert told["level"] == "unknown"
    assert "gradvitals doctor" in told["line"]


def test_a_long_list_comes_in_parts_the_newest_first(
    tmp_path: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradvitals.web import api

    monkeypatch.setattr(api, "LIST_SECONDS", -1.0)
    for number, name in enumerate(("c", "a", "b")):
        write_synthetic_run(tmp_path / name, steps=5, num_tensors=14)
        os.utime(tmp_path / name / "run.db", (1000 + number, 1000 + number))
    client = client_of(tmp_path)
    seen = [{run["name"]: run["state"] for run in client.get("/api/runs").json()["runs"]} for _ in range(3)]
    assert seen == [
        {"a": "unread", "b": "finished", "c": "unread"},
        {"a": "finished", "b": "finished", "c": "unread"},
        {"a": "finished", "b": "finished", "c": "finished"},
    ]


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A sound run, and one that tests damage."""
    for name in ("good", "bad"):
        write_synthetic_run(tmp_path / name, steps=5, num_tensors=14)
    return tmp_path


@pytest.mark.parametrize(
    "statement",
    ["UPDATE segment SET finished_at = NULL, heartbeat = 'abc'", "INSERT INTO finding VALUES (NULL, 'k', 1, 0, '{}')"],
)
def test_a_damaged_file_does_not_hide_the_others(both: Path, client_of: ClientOf, statement: str) -> None:
    db = sqlite3.connect(both / "bad" / "run.db")
    db.execute(statement)
    db.commit()
    db.close()
    client = client_of(both)
    found = client.get(f"/api/runs/{run_id(client, 'bad')}")
    assert found.status_code == 422
    assert "damaged" in found.json()["error"]
    assert client.get(f"/api/runs/{run_id(client, 'good')}").status_code == 200


def test_an_unforeseen_error_in_one_run_is_reported_for_that_run_alone(
    both: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = views.list_entry

    def fails(file: RunFile, *rest: Any) -> dict[str, Any]:
        return made(file, *rest) if file.name == "good" else {"line": "\ud800"}  # no response can encode it

    monkeypatch.setattr(views, "list_entry", fails)
    runs = {run["name"]: run for run in client_of(both).get("/api/runs").json()["runs"]}
    assert runs["good"]["state"] == "finished"
    assert runs["bad"]["state"] == "error"
    assert "cannot be read" in runs["bad"]["line"]


def test_many_layers_with_few_tensors_take_little_memory(tmp_path: Path, client_of: ClientOf) -> None:
    many = 50_000
    layers = tuple(f"l{at}" for at in range(many))
    tensors = tuple(
        TensorInfo(index=at, name=f"{layers[-1 - at]}.w", shape=(2,), dtype="f", layer=layers[-1 - at], depth=0)
        for at in range(2)
    )
    heads = tuple(f"{layers[at]}.attn/head0" for at in range(many))
    with RunWriter(tmp_path / "wide", meta={}) as writer:
        writer.write(Layout(tensors=tensors, layers=layers, heads=heads))
        for step in range(400):
            writer.write(Reading(step=step, time=0.0, tensors={"grad/norm": [1.0, 2.0 + step]}))
    client = client_of(tmp_path)
    run = run_id(client, "wide")
    found = client.get(f"/api/runs/{run}/layout").json()["layers"]
    assert [layer["heads"] for layer in (found[0], found[-1])] == [[0], [many - 1]]
    tracemalloc.start()
    try:
        _, cells, _ = read_heatmap(client.get(f"/api/runs/{run}/heatmap?picture=norm").content)
        with gv.open_run(tmp_path / "wide") as opened:
            of_report = series.read_heatmap(opened, "grad/norm", "layers", series.Span(0, 399), max_rows=160)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cells[-2, -1] == 401.0
    assert np.isnan(cells[0]).all()
    assert of_report is not None
    assert of_report.values.shape == (160, 400)
    assert of_report.values[-1, -1] == 401.0
    assert peak < 140 << 20  # all steps of all layers would take 160 MB, several times over


# -- the documentation names the addresses ---------------------------------------------------------------------------

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


# -- news of runs ----------------------------------------------------------------------------------------------------


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: {}":
            yield json.loads(line[6:])


def test_news_come_as_a_run_is_written(tmp_path: Path, serve: Callable[[Path], Any]) -> None:
    write_synthetic_run(tmp_path / "old", steps=5, num_tensors=14)
    writer = RunWriter(tmp_path / "live", meta={"facts": {}})
    writer.write(Reading(step=0, time=0.0, values={"loss": 1.0}))
    writer.commit()
    url = serve(tmp_path).url
    with httpx.stream("GET", f"{url}api/stream", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer)
        first = [next(found) for _ in range(2)]
        by_step = {news["last_step"]: news for news in first}
        assert set(by_step) == {0, 4}
        assert by_step[0]["live"]
        assert not by_step[4]["live"]
        live = by_step[0]["run"]
        writer.write(Reading(step=1, time=1.0, values={"loss": 1.0}))
        writer.write(Finding(id="x", severity="info", title="t"))
        writer.commit()
        assert next(found) == {"run": live, "last_step": 1, "findings": 1, "segments": 1, "live": True}
    writer.close()


def test_the_command_prints_its_address_and_ends_at_ctrl_c_with_a_reader_listening(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    command = [sys.executable, "-m", "gradvitals.cli", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[0]
        tunnel = process.stdout.readline()
        port = url.rstrip("/").rpartition(":")[2]
        assert url == f"http://127.0.0.1:{port}/"
        assert f"ssh -L {port}:127.0.0.1:{port} " in tunnel
        for _ in range(200):
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        with httpx.stream("GET", f"{url}api/stream", timeout=10) as answer:
            assert next(events(answer))["last_step"] == 4
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(10) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in process.stderr.read()


def test_without_a_folder_the_command_shows_the_runs_in_both_default_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served: list[tuple[Path, ...]] = []

    def serve_runs(folders: list[Path], listening: Any, *, host: str) -> None:
        listening.close()
        served.append((*folders,))

    monkeypatch.setattr("gradvitals.web.app.serve_runs", serve_runs)
    for made, said in (("runs", "runs"), ("gradvitals_runs", "gradvitals_runs and runs")):
        write_synthetic_run(tmp_path / made / "gpt", steps=5, num_tensors=14)
        result = CliRunner().invoke(main, ["serve", "--port", "0"])
        assert f"/ shows the runs in {said}; Ctrl-C stops it" in result.output
    assert served == [(Path("runs"), Path("gradvitals_runs")), (Path("gradvitals_runs"), Path("runs"))]


def test_runs_of_two_folders_are_told_apart(tmp_path: Path, client_of: ClientOf) -> None:
    ours, others = tmp_path / "gradvitals_runs", tmp_path / "runs"
    write_synthetic_run(ours / "gpt", steps=5, num_tensors=14)
    write_synthetic_run(ours / "runs" / "gpt", steps=6, num_tensors=14)
    assert client_of(ours, others).get("/api/runs").json()["folder"] == "gradvitals_runs"
    write_synthetic_run(others / "gpt", steps=7, num_tensors=14)
    damaged_run(others / "bad")
    client = client_of(ours, others, others)
    told = client.get("/api/runs").json()
    assert told["folder"] == "gradvitals_runs and runs"
    assert sorted((run["name"], run["steps"]) for run in told["runs"]) == [
        ("gpt", 5),
        ("runs/bad", 0),
        ("runs/gpt", 6),
        ("runs/gpt", 7),
    ]
    for run in told["runs"]:
        answer = client.get(f"/api/runs/{run['id']}")
        assert answer.json().get("steps", 0) == run["steps"]
        assert str(tmp_path) not in answer.text + str(told)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output


def test_a_taken_port_is_an_error_and_the_default_one_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradvitals.web import app

    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"port {port} .*--port 0 takes a free one"):
        bind("127.0.0.1", port)
    monkeypatch.setattr(app, "DEFAULT_PORT", port)
    other = bind("127.0.0.1", None)
    assert other.getsockname()[1] != port
    assert addresses(other)[0] == f"http://127.0.0.1:{other.getsockname()[1]}/"
    for each in (taken, other):
        each.close()
    with pytest.raises(ConfigError, match="expected an address or name of this machine"):
        bind("no-such-host.invalid", 0)


def test_news_do_not_wait_behind_requests(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    watcher = Watcher(RunIndex(tmp_path))
    done = threading.Event()
    told: list[bytes] = []

    async def look_while_all_requests_are_busy() -> None:
        to_thread.current_default_thread_limiter().total_tokens = 1
        busy = asyncio.create_task(to_thread.run_sync(done.wait, 30))
        await asyncio.sleep(0)
        try:
            found = aiter(watcher.events())
            await anext(found)  # how long to wait before it connects again
            told.append(await asyncio.wait_for(anext(found), 10))
        finally:
            done.set()
            await busy

    with ThreadPoolExecutor(1) as thread:  # the browser of other tests keeps a loop in this one
        thread.submit(asyncio.run, look_while_all_requests_are_busy()).result(60)
    assert b'"last_step": 4' in told[0]
