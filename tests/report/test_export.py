from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradvitals.report import series
from gradvitals.report.export import ExportError, write_csv, write_parquet
from gradvitals.store.reader import open_run
from gradvitals.types import Reading

WriteRun = Callable[..., Path]


def exported(path: Path, **selection: tuple[str, ...]) -> list[dict[str, str]]:
    stream = io.StringIO()
    with open_run(path) as run:
        count = write_csv(run, stream, **selection)
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert len(rows) == count
    return rows


def test_one_row_for_each_step_kind_and_name(write_run: WriteRun) -> None:
    rows = exported(write_run(steps=5))
    assert len(rows) == 5 * (1 + 3 + 4 + 2)
    keys = [(row["step"], row["kind"], row["name"]) for row in rows]
    assert len(set(keys)) == len(keys)


def test_csv_has_the_numbers_of_the_run_exactly(write_run: WriteRun) -> None:
    path = write_run()
    rows = exported(path, kinds=("tensor",))
    with open_run(path) as run:
        for name, column, source in (("head.weight", "grad/norm", None), ("embed.weight", "gsnr", "microbatch")):
            steps, values = run.series(column, tensor=name, source=source)
            header = column if source is None else f"{column}:{source}"
            found = [(int(row["step"]), np.float32(row[header])) for row in rows if row["name"] == name]
            assert found == list(zip(steps.tolist(), values.astype(np.float32), strict=True))


def test_time_stage_and_batch_size_are_there(write_run: WriteRun) -> None:
    row = exported(write_run(), kinds=("run",))[7]
    assert (row["step"], row["time"], row["stage"], row["batch_size:microbatch"]) == ("7", "1003.5", "raw", "32.0")


def test_filters(write_run: WriteRun) -> None:
    rows = exported(write_run(), kinds=("run", "layer"), metrics=("loss", "gsnr"))
    assert {row["kind"] for row in rows} == {"run", "layer"}
    assert [name for name in rows[0] if name not in ("step", "kind", "name", "time", "stage")] == [
        "gsnr:microbatch",
        "loss",
        "batch_size:microbatch",
    ]


def test_an_unknown_metric_is_named_beside_what_there_is(write_run: WriteRun) -> None:
    with pytest.raises(ExportError, match=r"no nope; it has .*loss"):
        exported(write_run(), metrics=("nope",))


def thinned(step: int) -> list[Reading]:
    tensors = {"grad/norm": np.array([1.0, np.nan, np.inf, 0.1])} if step % 3 == 0 else {}
    return [
        Reading(step=step, time=0.0, values={"loss": float(step)}, tensors=tensors),
        Reading(step=step, time=0.0, source="adam", values={"gsnr": 1.0}),
        Reading(step=step, time=0.0, source="window", values={"gsnr": 2.0}),
    ]


def test_sources_stay_apart_and_thinned_steps_have_no_rows(write_run: WriteRun) -> None:
    rows = exported(write_run(steps=9, readings=thinned))
    assert {(row["gsnr:adam"], row["gsnr:window"]) for row in rows if row["kind"] == "run"} == {("1.0", "2.0")}
    tensors = [row for row in rows if row["kind"] == "tensor"]
    assert sorted({int(row["step"]) for row in tensors}) == [0, 3, 6]
    assert [row["grad/norm"] for row in tensors[:3]] == ["1.0", "inf", "0.1"]


def test_parts_make_the_same_whole(write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run()
    whole = exported(path)
    monkeypatch.setattr(series, "NUMBERS_AT_A_TIME", 50)
    assert exported(path) == whole


def test_parquet_is_the_same_table(write_run: WriteRun, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    path = write_run()
    with open_run(path) as run:
        count = write_parquet(run, tmp_path / "table.parquet")
    table = pq.read_table(tmp_path / "table.parquet").to_pylist()
    rows = exported(path)
    assert len(table) == count == len(rows)
    for got, expected in zip(table, rows, strict=True):
        for name, text in expected.items():
            if isinstance(got[name], str):
                assert got[name] == text
            elif text == "":
                assert got[name] is None
            else:
                assert np.float32(got[name]) == np.float32(text)
