"""What sinks get, and when."""

from __future__ import annotations

import contextvars
import gc
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from torch import nn

import gradvitals as gv
from gradvitals.errors import ConfigError
from gradvitals.sinks.gauges import GaugeSink
from gradvitals.types import SEVERITIES, Action, Finding, Layout, Reading, Source, TensorInfo
from gradvitals.worker import publish
from gradvitals.worker.publish import MOST_TENSORS, WORST, Publisher, Selection

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Kept(gv.sinks.Sink):
    def __init__(self) -> None:
        self.steps: dict[int, Mapping[str, float]] = {}
        self.findings: list[Finding] = []
        self.actions: list[Action] = []
        self.closed = 0
        self.threads: set[str] = set()
        self.run: Path | None = None
        self.who = ""

    def begin(self, run: Path) -> None:
        self.run = run
        self.begun_on = threading.current_thread()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps[step] = metrics
        self.threads.add(threading.current_thread().name)
        self.who = WHO.get()

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)

    def action(self, action: Action) -> None:
        self.actions.append(action)

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        super().log(metrics, step)
        raise ValueError(f"no room for step {step}")


def train(
    sinks: list[Any], run: Path, *, steps: int = 60, bad: int = -1, worker: Any = "thread", **more: Any
) -> gv.Monitor:
    config = gv.Config(quiet=True, worker=worker, overhead_budget=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gv.watch(model, optimizer, run=run, config=config, sinks=sinks, **more) as monitor:
        for step in range(steps):
            inputs = torch.randn(16, 4)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True) * (1e4 if step == bad else 1.0)).square().mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
    return monitor


def test_a_sink_gets_every_step_and_each_finding_as_it_opens_and_closes(tmp_path: Path) -> None:
    sink = Kept()
    WHO.set("the training thread")
    monitor = train([sink], tmp_path / "run", steps=260, bad=150)
    assert list(sink.steps) == list(range(260))
    with gv.open_run(tmp_path / "run") as run:
        steps, norms = run.series("grad/norm")
        kept = {finding.id for finding in run.findings}
    assert [sink.steps[step]["grad/norm"] for step in steps] == pytest.approx(norms.tolist())
    explosion = [finding.last_step for finding in sink.findings if finding.id == "explosion"]
    assert explosion == [None, 150]
    assert {finding.id for finding in sink.findings} == kept
    assert sink.run == tmp_path / "run" == monitor.run_path
    assert sink.begun_on is threading.main_thread()
    assert sink.threads == {"gradvitals-publish"}
    assert sink.who == "the training thread"  # what is set there is seen by the sink
    assert sink.closed == 1


def test_what_a_guard_did_reaches_a_sink(tmp_path: Path) -> None:
    sink = Kept()
    monitor = train([sink], tmp_path / "run", steps=170, bad=150, guard=gv.Guard(mode="act"))
    assert sink.actions == monitor.actions != []


def test_a_sink_that_fails_is_left_out_with_one_finding_and_the_others_go_on(tmp_path: Path) -> None:
    broken, fine = Broken(), Kept()
    monitor = train([broken, fine], tmp_path / "run")
    assert list(broken.steps) == [0]
    assert len(fine.steps) == 60
    told = [finding for finding in monitor.findings if finding.id == "sink_error"]
    assert [finding.evidence["about"] for finding in told] == ["Broken"]
    assert "no room for step 0" in told[0].title
    with gv.open_run(tmp_path / "run") as run:
        assert [finding.id for finding in run.findings].count("sink_error") == 1
        assert run.meta["finished_at"] is not None
    assert broken.closed == 1


class Leaves(Kept):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise SystemExit("out of here")


class Never(Kept):
    every = 0


@pytest.mark.parametrize(("sink", "words"), [(Leaves(), "out of here"), (Never(), "every of Never is 0")])
def test_no_sink_ends_in_silence(tmp_path: Path, sink: Kept, words: str) -> None:
    told = [found for found in train([sink], tmp_path / "run").findings if found.id == "sink_error"]
    assert [words in found.title for found in told] == [True]
    assert sink.closed == (1 if isinstance(sink, Leaves) else 0)  # what never began has nothing to close


class Secretive(Kept):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise OSError("no answer from https://bob:s3cret@host/api?token=abc123 at all")


def test_what_a_sink_says_of_its_address_is_kept_without_its_secrets(tmp_path: Path) -> None:
    monitor = train([Secretive()], tmp_path / "run")
    (told,) = [finding for finding in monitor.findings if finding.id == "sink_error"]
    assert "https://…@host/api?… at all" in told.title
    assert not any(secret in json.dumps(told.to_json()) for secret in ("s3cret", "abc123"))


@pytest.mark.parametrize("where", ["begin", "finding", "close"])
def test_wherever_it_fails_it_is_told_once_and_kept_with_the_run(tmp_path: Path, where: str) -> None:
    def fail(*args: object) -> None:
        raise OSError("gone")

    sink, twin = Kept(), Kept()
    for one in (sink, twin):
        setattr(one, where, fail)
    train([sink, twin], tmp_path / "run", steps=30)
    with gv.open_run(tmp_path / "run") as run:
        told = [finding.evidence["about"] for finding in run.findings if finding.id == "sink_error"]
    assert sorted(told) == ["Kept", "Kept 2"]


def test_a_sink_that_hangs_holds_up_neither_training_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Hanging(Kept):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            super().log(metrics, step)
            release.wait(60)

    monkeypatch.setattr(publish, "MOST_WAITING", 10)
    monkeypatch.setattr(Publisher.close, "__defaults__", (0.2,))
    sink, fine = Hanging(), Kept()
    started = time.monotonic()
    try:
        monitor = train([sink, fine], tmp_path / "run")
        assert time.monotonic() - started < 30
    finally:
        release.set()
    told = {finding.evidence["about"]: finding for finding in monitor.findings if finding.id == "sink_error"}
    assert "had not finished" in told["Hanging"].title
    assert told["Hanging behind"].evidence["dropped"] > 0
    assert list(sink.steps)[:1] == [0]
    with gv.open_run(tmp_path / "run") as run:
        assert run.last_step == 59


SCRIPT = """
import sys, torch, gradvitals as gv
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gv.watch(model, optimizer, run=sys.argv[1] + "/run", sinks=["jsonl:" + sys.argv[1] + "/lines"])
monitor.add_alert(gv.alerts.Command(["sh", "-c", 'echo "$GRADVITALS_ID" >> "$0"', sys.argv[1] + "/alert"]))
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
raise ValueError("out of data")
"""


def test_a_script_that_ends_without_close_still_sends_everything(tmp_path: Path) -> None:
    done = warm_python.run("-c", SCRIPT, tmp_path)
    assert done.returncode == 1, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(20))
    assert "training_stopped" in [line["finding"]["id"] for line in lines if "finding" in line]
    assert "training_stopped" in (tmp_path / "alert").read_text().split()


def test_a_forked_child_publishes_nothing(tmp_path: Path) -> None:
    sink = Kept()
    publisher = Publisher([sink], lambda finding: None, tmp_path)
    reading = Reading(step=0, time=0.0, values={"loss": 1.0})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        publisher.put([reading])
        publisher.close()
        os.write(write, b"%d" % (len(sink.steps) + sink.closed))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"0"
    os.close(read)
    os.close(write)
    publisher.put([reading])
    publisher.close()
    assert (list(sink.steps), sink.closed) == ([0], 1)


def test_sinks_in_the_worker_process_and_here_get_every_step(tmp_path: Path) -> None:
    own = Kept()
    lines = tmp_path / "lines.jsonl"
    alert = gv.alerts.Command(["sh", "-c", 'echo "$GRADVITALS_ID $PPID" >> "$0"', str(tmp_path / "alert")])
    monitor = train([f"jsonl:{lines}", own], tmp_path / "run", steps=260, bad=150, alerts=[alert], worker="process")
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    metrics = {line["step"]: line["metrics"] for line in found if "metrics" in line}
    assert list(metrics) == list(own.steps) == list(range(260))
    assert metrics == {step: pytest.approx(dict(values)) for step, values in own.steps.items()}
    assert any(name.startswith("tensors/grad/norm/") for name in own.steps[250])
    published = [line["finding"]["id"] for line in found if "finding" in line]
    assert published == [finding.id for finding in own.findings]
    assert published.count("explosion") == 2
    assert (own.begun_on, own.threads, own.closed) == (threading.main_thread(), {"gradvitals-publish"}, 1)
    name, parent = (tmp_path / "alert").read_text().split()[:2]
    assert name in published
    assert int(parent) != os.getpid()  # it ran in the worker
    assert not [finding for finding in monitor.findings if finding.id == "sink_error"]


def test_a_sink_beside_the_worker_process_that_cannot_close_is_kept_with_the_run(tmp_path: Path) -> None:
    class CannotClose(Kept):
        def close(self) -> None:
            raise OSError("gone")

    train([CannotClose()], tmp_path / "run", steps=20, worker="process")
    with gv.open_run(tmp_path / "run") as run:
        assert [finding.evidence["about"] for finding in run.findings if finding.id == "sink_error"] == ["CannotClose"]


def test_readings_too_large_for_the_way_back_arrive_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradvitals.worker.link.REPLY_BYTES", 8192)
    sink = Kept()
    train([sink], tmp_path / "run", worker="process")
    assert list(sink.steps) == list(range(60))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.db"]


def test_a_monitor_that_is_dropped_is_not_kept_alive_by_its_sinks(tmp_path: Path) -> None:
    sink = Kept()

    def forget() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = gv.watch(model, optimizer, run=tmp_path / "run", sinks=[sink])
        for _ in range(3):
            loss = model(torch.ones(4, 2)).mean()
            loss.backward()
            monitor.observe(loss)
            optimizer.step()

    forget()
    deadline = time.monotonic() + 20
    while not sink.closed and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert sink.closed == 1
    assert list(sink.steps) == [0, 1, 2]


def test_sinks_may_come_later_and_what_is_none_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = Kept()
    late.every = 2
    with gv.watch(model, optimizer, run=tmp_path / "run") as monitor:
        for step in range(6):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
            if step == 2:
                monitor.flush()
                monitor.add_sink(late)
    assert list(late.steps) == [4]
    for wrong, message in ((42, "42 is not a sink"), (gv.sinks.JSONL, "with brackets")):
        with pytest.raises(TypeError, match=message):
            gv.watch(model, optimizer, sinks=[wrong])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="one of tensorboard:FOLDER"):
        gv.watch(model, optimizer, sinks=["tensorbord:logs"])


@pytest.mark.parametrize("text", ["tensorboard", "jsonl:", "prometheus:http", "prometheus:70000", "otel:x", "nothing"])
def test_texts_that_name_no_sink(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a sink; expected"):
        gv.sinks.from_text(text)


def test_texts() -> None:
    texts = {"tensorboard:logs": "TensorBoard('logs')", "wandb:p": "WandB(project='p')", "otel": "OpenTelemetry()"}
    texts |= {"jsonl:a.jsonl": "JSONL('a.jsonl')", "mlflow": "MLflow(experiment='gradvitals')"}
    texts |= {"trackio:p": "Trackio(project='p')", "prometheus:1": "Prometheus(port=1, addr='127.0.0.1')"}
    assert {text: repr(gv.sinks.from_text(text)) for text in texts} == texts


# -- what a sink is shown --------------------------------------------------------------------------------------------


def layout(names: list[str]) -> Layout:
    return Layout(
        tensors=tuple(
            TensorInfo(index=i, name=name, shape=(2,), dtype="float32", layer="all", depth=0)
            for i, name in enumerate(names)
        ),
        layers=("all",),
    )


def of_source(step: int, source: Source | None, **values: float) -> Reading:
    return Reading(step=step, time=0.0, source=source, values=values)


def test_the_best_source_has_the_id_and_no_key_ever_holds_two() -> None:
    selection = Selection()
    first = [of_source(0, None, loss=1.0), of_source(0, "adam", gsnr=2.0), of_source(0, "microbatch", gsnr=3.0)]
    later = [of_source(1, None, loss=0.9), of_source(1, "adam", gsnr=4.0)]
    shown = dict(selection.steps([*first, *later]))
    assert shown[0] == {"loss": 1.0, "gsnr": 3.0, "adam/gsnr": 2.0}
    assert shown[1] == {"loss": 0.9, "adam/gsnr": 4.0}  # and not gsnr, which is of micro-batches in this run


def test_a_better_source_that_comes_later_gets_a_key_of_its_own() -> None:
    selection = Selection()
    readings = [of_source(0, "adam", gsnr=2.0), of_source(1, "adam", gsnr=3.0), of_source(1, "microbatch", gsnr=9.0)]
    shown = dict(selection.steps(readings))
    assert shown == {0: {"gsnr": 2.0}, 1: {"gsnr": 3.0, "microbatch/gsnr": 9.0}}


def test_a_number_that_broke_is_shown_and_one_that_is_not_known_is_not() -> None:
    general = Reading(
        step=0, time=0.0, values={"loss": math.nan, "grad/norm": math.inf, "grad/spike_ratio": math.nan, "lr": 0.1}
    )
    ((_, shown),) = Selection().steps([general, of_source(0, "microbatch", noise_scale=math.nan, gsnr=1.0)])
    assert math.isnan(shown.pop("loss"))
    assert shown == {"grad/norm": math.inf, "lr": 0.1, "gsnr": 1.0}


def test_the_worst_tensors_are_few_and_stay() -> None:
    selection = Selection()
    names = [f"layer.{i}" for i in range(1000)]
    selection.describe(layout(names))
    seen: set[str] = set()
    rng = np.random.default_rng(0)
    for step in range(200):
        norms = rng.random(1000)
        ((_, shown),) = selection.steps([Reading(step=step, time=0.0, tensors={"grad/norm": norms})])
        if step == 0:
            worst = np.argsort(-norms)[:WORST]
            assert shown == {f"tensors/grad/norm/layer.{i}": norms[i] for i in worst}
        assert seen <= shown.keys()  # a line that was begun goes on
        seen |= shown.keys()
    assert len(seen) == MOST_TENSORS


def test_of_gsnr_the_lowest_are_the_worst_and_only_of_the_source_that_has_the_id() -> None:
    selection = Selection()
    selection.describe(layout(["a", "b", "c", "d"]))
    values, rows = {"gsnr": 1.0}, {"gsnr": np.array([4.0, 1.0, np.nan, 3.0])}
    adam = Reading(step=0, time=0.0, source="adam", values=values, tensors={"gsnr": np.zeros(4)})
    ((_, shown),) = selection.steps([Reading(step=0, time=0.0, source="microbatch", values=values, tensors=rows), adam])
    assert shown == {"gsnr": 1.0, "adam/gsnr": 1.0} | {
        f"tensors/gsnr/{k}": v for k, v in zip("bda", (1, 3, 4), strict=True)
    }


def test_names_of_ten_thousand_characters_are_cut_and_stay_apart() -> None:
    selection = Selection()
    selection.describe(layout(["x" * 10_000 + "1", "x" * 10_000 + "2"]))
    ((_, shown),) = selection.steps([Reading(step=0, time=0.0, tensors={"grad/norm": np.array([1.0, 2.0])})])
    assert len(shown) == 2
    assert all(len(key) < 200 for key in shown)


def test_globals_alone() -> None:
    selection = Selection(tensors=False)
    selection.describe(layout(["a"]))
    reading = Reading(step=0, time=0.0, values={"loss": 1.0}, tensors={"grad/norm": np.ones(1)})
    assert list(selection.steps([reading])) == [(0, {"loss": 1.0})]


def test_a_gauge_is_told_that_a_value_is_not_known_any_more() -> None:
    for gauges, shown in ((True, {"loss", "noise_scale"}), (False, {"loss"})):
        selection = Selection(gauges=gauges)
        ((_, metrics),) = selection.steps(
            [of_source(0, None, loss=1.0), of_source(0, "microbatch", noise_scale=math.nan)]
        )
        assert set(metrics) == shown


def test_a_finding_that_gets_worse_or_ends_leaves_what_it_was() -> None:
    class Gauges(GaugeSink):
        def _set(self, key: str, value: float, **labels: str) -> None:
            assert (key, labels["id"]) == ("finding/open", "explosion")
            shown[labels["severity"]] = value

    shown: dict[str, float] = {}
    sink = Gauges()
    for severity, first, last, counts in (
        ("warning", 3, None, (0, 1, 0)),
        ("critical", 3, None, (0, 0, 1)),
        ("warning", 9, None, (0, 1, 1)),
        ("critical", 3, 12, (0, 1, 0)),
    ):
        sink.finding(Finding(id="explosion", severity=severity, title="", first_step=first, last_step=last))
        assert shown == dict(zip(SEVERITIES, counts, strict=True))
