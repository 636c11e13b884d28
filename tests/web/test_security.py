"""What must not be possible: other hosts and folders, changes, names read as markup, files that use up cachery."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from web_runs import HOSTILE, hostile_run, run_id

from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.report import listing
from gradvitals.store.writer import RunWriter
from gradvitals.web import run_index, views
from gradvitals.web.app import STATIC

ClientOf = Callable[..., TestClient]
PATHS = ("/", "/api/runs", "/static/page.css", "/static/js/main.js", "/nowhere")
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
OURS = sorted(path for path in STATIC.rglob("*") if path.is_file() and "vendor" not in path.parts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8484", "10.0.0.7", ""]
)
def test_a_request_under_another_name_is_refused(client: TestClient, path: str, host: str) -> None:
    answer = client.get(path, headers={"host": host})
    assert answer.status_code == 400
    assert "gpt" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8484", "localhost:1", "LOCALHOST", "[::1]:8484"])
def test_the_names_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_on_another_address_its_name_and_addresses_are_answered_but_no_stranger(
    tmp_path: Path, client_of: ClientOf
) -> None:
    client = client_of(tmp_path, host="train-7")
    hosts = ("train-7:8484", "10.0.0.7", "10.0.0.7:8484", "[fd00::7]:8484", "evil.example", "10.0.0.7.evil.example")
    answers = [client.get("/api/runs", headers={"host": host}).status_code for host in hosts]
    assert answers == [200, 200, 200, 200, 400, 400]  # nobody else can point an address here


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_forbids_the_page_to_load_anything_else(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/stream"])
def test_nothing_can_be_changed(client: TestClient, method: str, path: str) -> None:
    assert client.request(method, path).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2F..%2Fsecret",
        "/api/runs/%2Fetc%2Fpasswd",
        "/api/runs/gpt",
        "/api/runs/../secret",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2f..%2fapp.py",
        "/static//etc/passwd",
    ],
)
def test_no_address_leads_out_of_the_folder(tmp_path: Path, client_of: ClientOf, path: str) -> None:
    write_synthetic_run(tmp_path / "secret", steps=5, num_tensors=14)
    write_synthetic_run(tmp_path / "served" / "gpt", steps=5, num_tensors=14)
    assert client_of(tmp_path / "served").get(path).status_code == 404


def test_links_that_leave_the_folder_are_not_followed(tmp_path: Path, client_of: ClientOf) -> None:
    write_synthetic_run(tmp_path / "secret", steps=5, num_tensors=14)
    served = tmp_path / "served"
    write_synthetic_run(served / "own", steps=5, num_tensors=14)
    (served / "folder-link").symlink_to(tmp_path / "secret")
    (served / "up").symlink_to(tmp_path)
    (served / "file-link").mkdir()
    (served / "file-link" / "run.db").symlink_to(tmp_path / "secret" / "run.db")
    (served / "round").symlink_to(served)
    (served / "latest").symlink_to(served / "own")
    assert [run["name"] for run in client_of(served).get("/api/runs").json()["runs"]] == ["own"]


def test_a_run_that_becomes_a_link_is_not_opened(tmp_path: Path, client_of: ClientOf) -> None:
    write_synthetic_run(tmp_path / "secret", steps=5, num_tensors=14)
    write_synthetic_run(tmp_path / "served" / "own", steps=5, num_tensors=14)
    client = client_of(tmp_path / "served")
    run = run_id(client, "own")
    (tmp_path / "served" / "own" / "run.db").unlink()
    (tmp_path / "served" / "own" / "run.db").symlink_to(tmp_path / "secret" / "run.db")
    assert client.get(f"/api/runs/{run}").status_code == 404


def test_hidden_and_too_deep_folders_are_skipped(tmp_path: Path) -> None:
    deep = Path(*["d"] * (listing.MAX_DEPTH + 1))
    for place in (".trash/run", "a/run", deep):
        RunWriter(tmp_path / place, meta={}).close()
    assert [place.name for place in listing.find_runs(tmp_path)] == ["a/run"]


def test_hostile_names_stay_text_of_bounded_length_without_control_characters(
    tmp_path: Path, client_of: ClientOf
) -> None:
    hostile_run(tmp_path / "<b>run")
    client = client_of(tmp_path)
    run = run_id(client, "<b>run")
    for path in (f"/api/runs/{run}", f"/api/runs/{run}/layout", f"/api/runs/{run}/worst"):
        answer = client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert len(answer.text) < 40_000
        assert not re.search(r"[\x00-\x1f\x7f]|\\u00[01]", answer.text)
    assert client.get(f"/api/runs/{run}/layout").json()["tensors"][0] == f"{HOSTILE}.weight"


def test_no_script_reads_text_as_markup_and_no_file_names_another_machine() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.style"
    )
    for path in OURS:
        text = path.read_text("utf-8")
        assert not forbidden.search(text), path
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text.replace("http://www.w3.org/2000/svg", "")), path


def test_the_page_names_every_module_so_that_none_waits_for_another() -> None:
    page = (STATIC / "index.html").read_text("utf-8")
    assert [path.name for path in OURS if path.suffix == ".js" and f'"/static/js/{path.name}"' not in page] == []


def test_the_vendored_files_are_the_ones_that_were_looked_at() -> None:
    for name, expected in VENDORED.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == expected
    licence = (STATIC / "vendor" / "uPlot.LICENSE").read_text("utf-8")
    assert "The MIT License" in licence
    assert licence.strip() in (Path(__file__).parents[2] / "THIRD_PARTY_NOTICES").read_text("utf-8")


def test_a_heatmap_of_too_many_rows_is_refused(
    tmp_path: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    monkeypatch.setattr(views, "MAX_NUMBERS", 14 * 16 - 1)
    client = client_of(tmp_path)
    answer = client.get(f"/api/runs/{run_id(client, 'run')}/heatmap?rows=tensors")
    assert answer.status_code == 422
    assert "too many for one heatmap" in answer.json()["error"]


def test_a_run_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    import shutil

    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    kept = run_index.RunIndex(tmp_path)
    [place] = kept.files()
    with kept.opened(place.id) as run:
        assert run.last_step == 4
    write_synthetic_run(tmp_path / "other", steps=9, num_tensors=14)
    shutil.move(tmp_path / "other" / "run.db", tmp_path / "run" / "run.db")
    with kept.opened(place.id) as run:
        assert run.last_step == 8
