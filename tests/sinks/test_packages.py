"""Every sink with its real package: trained once with all of them, then read back from where each has written."""

from __future__ import annotations

import importlib.util
import json
import math
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradvitals as gv
from gradvitals.errors import MissingExtraError
from gradvitals.importing.sources import Notes, _record_class, _records, find_source

STEPS, BAD = 200, 150


class Trained(NamedTuple):
    folder: Path
    norms: dict[int, float]
    scraped: str
    otel: dict[str, Any]
    mlflow_run: str
    monitor: gv.Monitor


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A run with a bad batch; the script logs to runs of W&B, MLflow and Trackio of its own, as scripts do."""
    folder = tmp_path_factory.mktemp("sinks")
    patch = pytest.MonkeyPatch()
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
    }.items():
        patch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third parties' deprecations when they are imported and begun
        import mlflow
        import trackio
        import wandb
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        wandb.teardown()  # what a test before this one made it read of the environment
        reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[reader])
        their_wandb = wandb.init(project="theirs")
        mlflow_run = mlflow.start_run().info.run_id
        trackio.init(project="theirs", embed=False, auto_log_cpu=False, auto_log_gpu=False)
        prometheus = gv.sinks.Prometheus(port=0)
        sinks: list[gv.sinks.Sink | str] = [
            gv.sinks.TensorBoard(folder / "tb"),
            gv.sinks.WandB(),
            gv.sinks.MLflow(),
            gv.sinks.Trackio(),
            prometheus,
            gv.sinks.OpenTelemetry(provider),
            f"jsonl:{folder / 'lines' / 'run.jsonl'}",
        ]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = gv.Config(quiet=True, overhead_budget=1)
        with gv.watch(model, optimizer, run=folder / "gpt", config=config, batch_size=32, sinks=sinks) as monitor:
            for step in range(STEPS):
                optimizer.zero_grad()
                for _ in range(2):
                    inputs = torch.randn(16, 4)
                    scale = 1e4 if step == BAD else 1.0
                    loss = (model(inputs) - inputs.sum(1, keepdim=True) * scale).square().mean()
                    (loss / 2).backward()
                    monitor.observe(loss)
                optimizer.step()
                their_wandb.log({"loss": float(step)}, step=step)
            monitor.flush()
            scraped = _scrape(prometheus.port)
            deadline = time.monotonic() + 30
            while f'gradvitals_step{{run="gpt"}} {STEPS - 1:.1f}' not in scraped and time.monotonic() < deadline:
                time.sleep(0.02)
                scraped = _scrape(prometheus.port)
        otel = _points(reader)
        their_wandb.finish()
        mlflow.end_run()
        trackio.finish()
    with gv.open_run(folder / "gpt") as run:
        steps, norms = run.series("grad/norm")
    yield Trained(folder, dict(zip(steps.tolist(), norms.tolist(), strict=True)), scraped, otel, mlflow_run, monitor)
    patch.undo()


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _points(reader: Any) -> dict[str, Any]:
    scopes = [scope for resource in reader.get_metrics_data().resource_metrics for scope in resource.scope_metrics]
    return {metric.name: metric.data.data_points for scope in scopes for metric in scope.metrics}


def _wandb_rows(path: Path) -> list[Any]:
    return [row.cells for row in find_source(path).rows(Notes())]


def test_no_sink_failed(trained: Trained) -> None:
    assert [str(finding) for finding in trained.monitor.findings if finding.id == "sink_error"] == []


def test_tensorboard(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.folder / "tb"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    norms = {event.step: event.value for event in events.Scalars("grad/norm")}
    assert norms == pytest.approx(trained.norms)
    assert {"gsnr", "adam/gsnr", "tensors/grad/norm/2.bias"} <= set(tags["scalars"])
    assert len(tags["scalars"]) < 60
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("findings/loss_spike")]
    assert texts[0].startswith("[warning] step 150")


def test_wandb_shares_the_scripts_run_and_leaves_its_steps_alone(trained: Trained) -> None:
    (path,) = (trained.folder / "wandb").glob("offline-run-*/*.wandb")
    with path.open("rb") as file:
        records = [_record_class().FromString(content) for content in _records(file, Notes())]
    rows = _wandb_rows(path)
    theirs = {row["_step"]: row["loss"] for row in rows if "loss" in row}
    assert theirs == {step: float(step) for step in range(STEPS)}  # nothing the script logged was ignored
    ours = {row["gradvitals/step"]: row["gradvitals/grad/norm"] for row in rows if "gradvitals/grad/norm" in row}
    assert ours
    assert ours == pytest.approx({step: trained.norms[step] for step in ours})
    axes = {record.metric.glob_name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert axes["gradvitals/*"] == "gradvitals/step"
    alerts = [record.alert for record in records if record.HasField("alert")]
    titles = sorted(alert.title.split(":")[1][:18] for alert in alerts)
    assert titles == [" The loss jumped t"]
    assert {alert.level for alert in alerts} == {"WARN"}


def test_mlflow_goes_to_the_run_of_the_training_thread(trained: Trained) -> None:
    import mlflow

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = mlflow.MlflowClient()
        history = client.get_metric_history(trained.mlflow_run, "gradvitals/grad/norm")
        data = client.get_run(trained.mlflow_run).data
    assert {metric.step: metric.value for metric in history} == pytest.approx(trained.norms)
    assert "gradvitals/tensors/grad/norm/2.bias" in data.metrics
    assert data.tags["gradvitals.finding.loss_spike"].startswith("resolved after step 150")


def test_trackio(trained: Trained) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("theirs")
    rows = SQLiteStorage.get_logs("theirs", run)
    norms = {row["step"]: row["gradvitals/grad/norm"] for row in rows if "gradvitals/grad/norm" in row}
    assert norms == pytest.approx(trained.norms)
    alerts = SQLiteStorage.get_alerts("theirs")
    assert [alert["title"][:29] for alert in alerts] == ["gradvitals: The loss jumped t"]


def test_prometheus_serves_the_latest_globals_on_this_machine_alone(trained: Trained) -> None:
    lines = dict(line.rsplit(" ", 1) for line in trained.scraped.splitlines() if not line.startswith("#"))
    assert float(lines['gradvitals_grad_norm{run="gpt"}']) == pytest.approx(trained.norms[STEPS - 1])
    assert float(lines['gradvitals_step{run="gpt"}']) == STEPS - 1
    assert lines['gradvitals_finding_open{id="loss_spike",run="gpt",severity="warning"}'] == "1.0"
    assert not [name for name in lines if "bias" in name]
    assert repr(gv.sinks.Prometheus()) == "Prometheus(port=9464, addr='127.0.0.1')"


def test_opentelemetry(trained: Trained) -> None:
    (point,) = trained.otel["gradvitals.grad.norm"]
    assert point.value == pytest.approx(trained.norms[STEPS - 1])
    assert dict(point.attributes) == {"run": "gpt"}
    assert not [name for name in trained.otel if "bias" in name]
    states = {point.attributes["id"]: point.value for point in trained.otel["gradvitals.finding.open"]}
    assert states["explosion"] == 0  # over at the end of the run


def test_jsonl(trained: Trained) -> None:
    lines = [json.loads(line) for line in (trained.folder / "lines" / "run.jsonl").read_text("utf-8").splitlines()]
    norms = {line["step"]: line["metrics"]["grad/norm"] for line in lines if "metrics" in line}
    assert norms == pytest.approx(trained.norms)
    opened = [line["finding"] for line in lines if "finding" in line and line["finding"]["id"] == "explosion"]
    assert [finding["last_step"] for finding in opened] == [None, 150]


def test_without_a_run_of_the_scripts_each_starts_one_and_ends_it(trained: Trained) -> None:
    import mlflow
    import wandb
    from trackio.sqlite_storage import SQLiteStorage

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sink in (gv.sinks.WandB(settings={"dir": trained.folder / "own"}), gv.sinks.MLflow(), gv.sinks.Trackio()):
            sink.begin(Path("runs/alone"))
            for step in range(3):
                sink.log({"loss": 1.0 + step}, step)
            sink.close()
        assert wandb.run is None  # a later wandb.init of the script's is not handed ours
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name("gradvitals")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "gradvitals/loss")
    assert (run.info.run_name, run.info.status) == ("alone", "FINISHED")
    assert [(metric.step, metric.value) for metric in history] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    logs = SQLiteStorage.get_logs("gradvitals", "alone")
    assert [(row["step"], row["gradvitals/loss"]) for row in logs] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    (path,) = (trained.folder / "own").glob("wandb/offline-run-*/*.wandb")
    rows = _wandb_rows(path)
    assert [(row["gradvitals/step"], row["gradvitals/loss"]) for row in rows] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_run_that_the_script_has_finished_is_no_error(trained: Trained) -> None:
    class Finished:
        def define_metric(self, *args: object, **more: object) -> None:
            import wandb

            raise wandb.errors.UsageError("the run is finished")

    sink = gv.sinks.WandB(run=Finished())
    sink.log({"loss": 1.0}, 0)
    sink.log({"loss": 1.0}, 1)
    sink.close()


def test_jsonl_is_strict_json_whatever_the_numbers(tmp_path: Path) -> None:
    sink = gv.sinks.JSONL(tmp_path / "a.jsonl")
    sink.log({"loss": math.nan, "grad/norm": math.inf}, 3)
    sink.close()
    line = json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert line["metrics"] == {"loss": "nan", "grad/norm": "inf"}


def test_keys_that_mlflow_would_refuse() -> None:
    sink = gv.sinks.MLflow()
    key = sink._key("tensors/grad/norm/../../a:<b>\n" + "x" * 500)
    assert key.startswith("gradvitals/tensors/a__b__xx")
    assert len(key) == 250


@pytest.mark.parametrize(
    ("package", "extra", "text"),
    [
        ("tensorboard", "tensorboard", "tensorboard:logs"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
        ("trackio", "trackio", "trackio"),
        ("prometheus_client", "prometheus", "prometheus"),
        ("opentelemetry.sdk", "otel", "otel"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, text: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "gradvitals.sinks.sink.find_spec", lambda name, *more: None if name == package else real(name, *more)
    )
    with pytest.raises(MissingExtraError, match=rf"pip install 'gradvitals\[{extra}\]'"):
        gv.sinks.from_text(text)
