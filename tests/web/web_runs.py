"""What the tests of the page share."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

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
                cures=(long,),
            )
        )
        writer.commit()
