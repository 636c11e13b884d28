"""What the tests of the page share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

import gradvitals as gv
from benchmarks.synthetic_run import readings, transformer_layout
from gradvitals.store.schema import APPLICATION_ID
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

STEPS = 600
LONG = 4500
"""Steps of the run that does not fit into the buckets of a chart."""
TENSORS = 26
HOSTILE = '<img src=x onerror="window.hacked=1">\'"`&amp;<script>window.hacked=1</script>'


def run_id(client: TestClient, name: str) -> str:
    found = {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}
    return str(found[name])


def hostile_run(path: Path) -> None:
    long = "x" * 10_000
    names = (f"{HOSTILE}.weight", f"{long}.weight", "a\x1b[31m\x00b.weight", "../../etc/passwd")
    layers = (HOSTILE, long, "a\x1b[31m", "..")
    tensors = tuple(
        TensorInfo(index=i, name=name, shape=(2,), dtype=HOSTILE, layer=layers[i], depth=i)
        for i, name in enumerate(names)
    )
    with RunWriter(path, meta={"facts": {}, "name": HOSTILE}) as writer:
        writer.write(Layout(tensors=tensors, layers=layers, heads=(f"{HOSTILE}/head0",)))
        for step in range(60):
            row = [1.0 + i for i in range(4)]
            tensor_values = {"grad/norm": row, "gsnr": row, "update/ratio": row, "grad/spike_ratio": row}
            writer.write(
                Reading(
                    step=step,
                    time=step,
                    values={"loss": 1.0, "grad/norm": 2.0},
                    tensors=tensor_values,
                    heads={"gsnr": [1.0]},
                )
            )
        writer.write(
            Finding(
                id=HOSTILE,
                severity="warning",
                title=f"{HOSTILE} {long}",
                tensors=names,
                first_step=10,
                evidence={"seen": {HOSTILE: HOSTILE}, "expected": {HOSTILE: HOSTILE}},
                causes=(HOSTILE,),
                fixes=(long,),
            )
        )
        writer.commit()


def wait(page: Any, expression: str, seconds: float = 60.0) -> None:
    """Until the expression is true. Playwright's own way evaluates text in the page, which the page forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(30)


def wait_for_charts(page: Any) -> None:
    wait(page, "performance.getEntriesByName('charts').length && !document.querySelector('.plot-state:not([hidden])')")


@contextmanager
def writing(path: Path, first: int = 0) -> Iterator[Callable[[int], None]]:
    """A run that is being written: a function that adds so many steps."""
    layout = transformer_layout(14)
    writer = RunWriter(path, meta={"facts": {}})
    writer.write(layout)
    done = first

    def write(steps: int) -> None:
        nonlocal done
        for reading in readings(layout, steps, gv.Config(), 0, time.time(), first=done):
            writer.write(reading)
        done += steps
        writer.commit()

    write(60)
    write.writer = writer  # type: ignore[attr-defined]
    yield write
    writer.close()


def damaged_run(path: Path) -> None:
    """Writes a file that begins as a run does, and holds no database."""
    path.mkdir(parents=True)
    header = b"SQLite format 3\0" + bytes(52) + APPLICATION_ID.to_bytes(4, "big")
    (path / "run.db").write_bytes(header + b"no database at all" * 100)
