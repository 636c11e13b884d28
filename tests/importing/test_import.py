"""Import: a run that was never watched becomes one that can be judged, whatever its history was kept in."""

from __future__ import annotations

import csv
import json
import math
import random
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.importing import ImportSourceError, import_run
from gradvitals.importing import sources as limits
from gradvitals.importing.run import choose

Rows = list[dict[str, Any]]


def healthy(steps: int = 300) -> Rows:
    rng = random.Random(0)
    return [
        {
            "step": 10 * i,
            "loss": 3.0 / (1 + 0.02 * i) * (1 + 0.02 * rng.gauss(0, 1)),
            "grad_norm": 1.5 * (1 + 0.1 * rng.gauss(0, 1)),
            "lr": 3e-4,
        }
        for i in range(steps)
    ]


def diverging(steps: int = 300, at: int = 200) -> Rows:
    rows = healthy(steps)
    for i, row in enumerate(rows[at:]):
        row["loss"] *= 1.1**i
        row["grad_norm"] *= 1.2**i
    for row in rows[-20:]:
        row["loss"] = row["grad_norm"] = math.nan
    return rows


def write_csv(rows: Rows, folder: Path) -> Path:
    path = folder / "history.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(rows: Rows, folder: Path) -> Path:
    path = folder / "history.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_trainer_state(rows: Rows, folder: Path) -> Path:
    logs = [{"epoch": 1.0, **row, "learning_rate": row["lr"]} for row in rows]
    logs.append({"step": rows[-1]["step"], "train_loss": 1.0, "train_runtime": 3.0})
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / "trainer_state.json").write_text(json.dumps({"log_history": logs, "global_step": 9}))
    return folder


def write_tensorboard(rows: Rows, folder: Path) -> Path:
    sink = gv.sinks.TensorBoard(folder / "logs")
    for row in rows:
        sink.log({"train/loss": row["loss"], "train/grad_norm": row["grad_norm"], "lr-AdamW": row["lr"]}, row["step"])
        sink.log({"val/loss": 9.0}, row["step"])
    sink.close()
    return folder / "logs"


def write_wandb(rows: Rows, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third parties' deprecations when it is imported and begun
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        run = wandb.init(mode="offline", dir=folder, settings=settings, reinit="create_new")
        for row in rows:
            run.log({"train": {"loss": row["loss"], "grad_norm": row["grad_norm"]}, "trainer/global_step": row["step"]})
        run.finish()
    # Its other process may write the last block, which is not a whole one, a moment later.
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + 20
    while path.stat().st_size % 32768 == 0 and time.monotonic() < until:
        time.sleep(0.05)
    return folder / "wandb"


WAYS: dict[str, Callable[[Rows, Path], Path]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "trainer_state": write_trainer_state,
    "tensorboard": write_tensorboard,
    "wandb": write_wandb,
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_history_comes_back_and_a_diverging_run_is_found(kind: str, tmp_path: Path) -> None:
    rows = diverging()
    source = WAYS[kind](rows, tmp_path)
    done = import_run(source, tmp_path / "run")
    assert (done.kind, done.steps, done.notes) == (kind, len(rows), ())
    with gv.open_run(tmp_path / "run") as run:
        for metric, name in (("loss", "loss"), ("grad/norm", "grad_norm")):
            steps, values = run.series(metric)
            assert steps.tolist() == [row["step"] for row in rows]
            assert values.tolist() == pytest.approx([row[name] for row in rows], rel=1e-6, nan_ok=True)
        assert run.meta["imported"]["kind"] == kind
        assert run.meta["imported"]["columns"] == done.columns
        assert not run.is_live
        assert {"loss_nonfinite", "explosion"} <= {finding.id for finding in run.findings}
    result = CliRunner().invoke(main, ["doctor", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"]["level"] == "unhealthy"


def test_a_healthy_history_is_healthy_and_what_it_cannot_show_is_said(tmp_path: Path) -> None:
    import_run(write_csv(healthy(), tmp_path), tmp_path / "run")
    result = CliRunner().invoke(main, ["doctor", str(tmp_path / "run"), "--json"])
    checkup = json.loads(result.stdout)
    assert (result.exit_code, checkup["verdict"]["level"]) == (0, "healthy")
    unjudged = {name: entry["reason"] for entry in checkup["skipped"] for name in entry["ids"]}
    assert unjudged["dead_tensor"] == unjudged["vanishing"] == "no readings of single tensors"
    assert {"batch_too_small", "nonfinite", "update_ratio", "clip_idle"} <= unjudged.keys()
    assert {"loss_spike", "loss_rising", "explosion"} <= {entry["id"] for entry in checkup["passed"]}
    assert "it was imported" in CliRunner().invoke(main, ["doctor", str(tmp_path / "run")]).stdout.replace("\n", " ")
    assert CliRunner().invoke(main, ["report", str(tmp_path / "run")]).exit_code == 0


def test_words_name_no_number_that_nobody_knows(tmp_path: Path) -> None:
    rows = [{"step": row["step"], "loss": row["loss"]} for row in diverging()]
    for finding in import_run(write_jsonl(rows, tmp_path), tmp_path / "run").findings:
        assert not [text for text in (*finding.causes, *finding.fixes) if " nan" in text], finding


# -- columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["iter", "train/loss", "gradient_norm"], {"step": "iter", "loss": "train/loss", "grad/norm": "gradient_norm"}),
        (["Step", "Loss", "grad-norm"], {"step": "Step", "loss": "Loss", "grad/norm": "grad-norm"}),
        (["loss", "train_loss", "eval_loss"], {"loss": "loss"}),
        (["_step", "trainer/global_step", "trainLoss"], {"step": "trainer/global_step", "loss": "trainLoss"}),
        (["epoch", "total_loss", "val_loss"], {"loss": "total_loss"}),
        (["gradvitals/grad/norm", "gradvitals/gsnr"], {"grad/norm": "gradvitals/grad/norm"}),
    ],
)
def test_columns_are_guessed_by_name(columns: list[str], expected: dict[str, str]) -> None:
    assert choose(columns, {}) == expected


@pytest.mark.parametrize(
    ("columns", "told", "message"),
    [
        (["a", "val_loss"], {}, r"no column is known .* found 'a', 'val_loss'\. Say which is which: --map COLUMN=loss"),
        (["Loss", "loss"], {"x": "loss"}, "there is no column 'x'; found 'Loss', 'loss'"),
        (["LOSS", "Loss"], {}, "several columns may be the loss: 'LOSS', 'Loss'. Say which: --map LOSS=loss"),
        (["ce_loss", "aux_loss"], {}, "several columns may be the loss: 'ce_loss', 'aux_loss'"),
        (["a"], {"a": "accuracy"}, "there is no metric 'accuracy'; expected one of step, time, loss, grad/norm, lr"),
    ],
)
def test_what_is_unclear_is_an_error_that_says_what_to_do(
    columns: list[str], told: dict[str, str], message: str
) -> None:
    with pytest.raises(ImportSourceError, match=message):
        choose(columns, told)


def test_the_command_maps_columns_and_tells_what_it_took(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("when,nll,eval\n" + "".join(f"{i},{3 - i / 100},1\n" for i in range(60)))
    run = str(tmp_path / "run")
    assert "'when', 'nll', 'eval'" in CliRunner().invoke(main, ["import", str(path)]).stderr
    args = ["import", str(path), "--run", run, "--map", "nll=loss", "--map", "when=step", "--json"]
    done = json.loads(CliRunner().invoke(main, args).stdout)
    assert done["columns"] == {"loss": "nll", "step": "when"}
    assert "already" in CliRunner().invoke(main, args).stderr  # a run is never written over
    text = CliRunner().invoke(main, [*args[:3], run + "2", *args[4:-1]])
    assert "60 steps" in text.stdout
    assert f"gradvitals doctor {run}2" in text.stdout
    assert CliRunner().invoke(main, ["import", str(path), "--map", "nll"]).exit_code == 2


def test_a_metric_may_be_called_as_columns_are_and_a_missing_loss_is_told(tmp_path: Path) -> None:
    assert choose(["a", "b", "t"], {"a": "grad_norm", "b": "learning_rate", "t": "global_step"}) == {
        "grad/norm": "a",
        "lr": "b",
        "step": "t",
    }
    path = tmp_path / "a.csv"
    path.write_text("step,nll,gnorm\n" + "".join(f"{i},2,1\n" for i in range(60)))
    [note] = import_run(path, tmp_path / "run").notes
    assert note.startswith("no column is known to be the loss, so it is not judged; left out: 'nll'.")
    assert import_run(path, tmp_path / "other", columns={"nll": "loss"}).notes == ()


@pytest.mark.parametrize("column", ["learn_rate", "learnRate", "LearningRate", "lrate", "train/learn_rate", "last_lr"])
def test_a_learning_rate_is_known_by_the_names_it_has(column: str) -> None:
    assert choose(["step", "loss", column], {})["lr"] == column


def test_what_a_history_does_not_have_is_not_told_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    losses = [12.6 if i == 250 else 0.7 + 0.001 * (i % 7) for i in range(400)]
    path.write_text("step,loss\n" + "".join(f"{i},{loss}\n" for i, loss in enumerate(losses)))
    import_run(path, tmp_path / "run")
    told = CliRunner().invoke(main, ["doctor", "-v", str(tmp_path / "run")]).stdout
    assert "loss_spike" in told
    assert "nan" not in told


def test_what_gradvitals_writes_itself_can_be_imported(write_run: Callable[..., Path], tmp_path: Path) -> None:
    table = tmp_path / "readings.csv"
    assert CliRunner().invoke(main, ["export", str(write_run()), "--csv", str(table)]).exit_code == 0
    done = import_run(table, tmp_path / "again")
    with gv.open_run(tmp_path / "run") as first, gv.open_run(tmp_path / "again") as again:
        assert again.series("loss")[1].tolist() == pytest.approx(first.series("loss")[1].tolist())
    assert done.steps == 40


# -- sources that are not as they should be ----------------------------------------------------------------------


def test_rows_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"step": i, "loss": 1.0}) for i in range(50)]
    lines[10], lines[20], lines[30] = "{broken", "[1, 2]", json.dumps({"step": -4, "loss": 1.0})
    path.write_text("\n".join(lines) + '\n{"step": 50, "lo')
    done = import_run(path, tmp_path / "run")
    assert done.steps == 47
    assert done.notes == (
        "1 rows have no step and are left out",
        "2 rows could not be read and are left out",
        "the file ends in the middle of a row; everything before it was read",
    )
    with gv.open_run(done.run) as run:
        assert run.meta["imported"]["notes"] == list(done.notes)


def test_a_csv_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,loss\n" + "".join(f"{i},0.5\n" for i in range(9)) + "9,0.12")  # of 0.125, maybe
    done = import_run(path, tmp_path / "run")
    assert done.steps == 9
    assert "middle of a row" in done.notes[0]


def test_steps_that_come_again_are_those_that_came_last(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 1.0} for i in range(30)] + [{"step": i, "loss": 2.0} for i in range(20, 40)]
    done = import_run(write_jsonl(rows, tmp_path), tmp_path / "run")
    assert done.notes == ("10 rows were about a step that had come before; the last one counts",)
    with gv.open_run(done.run) as run:
        assert run.series("loss")[1].tolist() == [1.0] * 20 + [2.0] * 20


def test_without_a_column_for_the_step_rows_are_counted(tmp_path: Path) -> None:
    done = import_run(write_jsonl([{"loss": 1.0}] * 5, tmp_path), tmp_path / "run")
    assert done.notes == ("there is no column for the step; rows were counted",)
    with gv.open_run(done.run) as run:
        assert run.series("loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_event_files_that_end_too_early_or_are_damaged(tmp_path: Path) -> None:
    (path,) = write_tensorboard(healthy(50), tmp_path).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    done = import_run(path, tmp_path / "cut")
    assert (done.steps, done.notes) == (50, ("the file ends in the middle of a row; everything before it was read",))
    damaged = bytearray(whole)
    damaged[len(whole) // 2 :] = b"\xff" * (len(whole) - len(whole) // 2)
    path.write_bytes(bytes(damaged))
    done = import_run(path, tmp_path / "damaged")
    assert 10 < done.steps < 50
    assert done.notes


def test_a_scalar_called_like_a_step_is_not_taken_for_one(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "logs"))
    for step in range(5):
        values = {"train/loss": 1.0 / (step + 1), "train/global_step": 10.0 * step}
        both = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.add_event(Event(step=step, summary=Summary(value=both)))
    writer.close()
    import_run(tmp_path / "logs", tmp_path / "run")
    with gv.open_run(tmp_path / "run") as run:
        assert run.series("loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def value(tag: str, size: int, **content: Any) -> Any:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size)])
        return Summary.Value(tag=tag, tensor=TensorProto(tensor_shape=shape, **content))

    writer = EventFileWriter(str(tmp_path / "logs"))
    huge = value("huge", 1 << 40, dtype="DT_FLOAT", float_val=[1.0])
    packed = value("loss", 1, dtype="DT_FLOAT", tensor_content=struct.pack("<f", 0.25))
    writer.add_event(Event(step=3, summary=Summary(value=[huge, packed])))
    writer.close()
    done = import_run(tmp_path / "logs", tmp_path / "run")
    with gv.open_run(done.run) as run:
        assert [part.tolist() for part in run.series("loss")] == [[3], [0.25]]


def test_a_wandb_file_that_ends_too_early_or_is_damaged(tmp_path: Path) -> None:
    folder = write_wandb([{**row, "note": "x" * 500} for row in healthy(200)], tmp_path)
    (path,) = folder.glob("offline-run-*/*.wandb")
    whole = path.read_bytes()
    assert len(whole) > 2 * 32768  # more than one block, so that records are in pieces
    start = 32768  # of the second block; each piece has a header of 7 bytes, with its length in two of them
    while start < 32768 + 5000:
        start, last = start + 7 + int.from_bytes(whole[start + 4 : start + 6], "little"), start
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(whole[: last + 8])  # one byte into a piece
    done = import_run(cut, tmp_path / "cut")
    assert 50 < done.steps < 200
    assert "middle of a row" in done.notes[-1]
    cut.write_bytes(whole[: last + 3])  # in its header
    assert "middle of a row" in import_run(cut, tmp_path / "header").notes[-1]
    noise = tmp_path / "noise.wandb"
    noise.write_bytes(whole[:32768] + random.Random(0).randbytes(32768) + whole[65536:])
    done = import_run(noise, tmp_path / "noise")
    assert 50 < done.steps < 200
    assert done.notes


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "wandb", "tfevents"])
def test_noise_is_an_error_and_nothing_worse(kind: str, tmp_path: Path) -> None:
    name = "events.out.tfevents.1" if kind == "tfevents" else f"a.{kind}"
    for seed in range(5):
        noise = random.Random(seed).randbytes(5000)
        (tmp_path / name).write_bytes(b":W&B\xe1\xbe\0" + noise if kind == "wandb" else noise)
        with pytest.raises(ImportSourceError):
            import_run(tmp_path / name, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_there_and_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(ImportSourceError, match=message):
            import_run(path, tmp_path / "run")

    refused(tmp_path / "gone", "there is nothing at .*gone; expected TensorBoard event files")
    refused(tmp_path, "holds nothing that can be imported")
    for name in ("one", "two"):
        write_tensorboard(healthy(3), tmp_path / name)
    refused(tmp_path, r"holds 2 runs; name one of them: .*one.logs, .*two.logs")
    path = write_jsonl(healthy(50), tmp_path)
    monkeypatch.setattr("gradvitals.importing.sources.MAX_BYTES", limits.MAX_BYTES >> 30)
    refused(path, "GB; expected")
