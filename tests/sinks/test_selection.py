"""What a sink is shown: tens of keys, one source in each, and nothing that could not be told."""

from __future__ import annotations

import math

import numpy as np

from gradvitals.sinks.sink import OpenFindings
from gradvitals.types import Finding, Layout, Reading, Severity, Source, TensorInfo
from gradvitals.worker.publish import MOST_TENSORS, WORST, Selection


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
    def seen(severity: Severity, first_step: int, last_step: int | None = None) -> dict[str, int]:
        return open_findings.after(
            Finding(id="explosion", severity=severity, title="", first_step=first_step, last_step=last_step)
        )

    open_findings = OpenFindings()
    assert seen("warning", 3) == {"info": 0, "warning": 1, "critical": 0}
    assert seen("critical", 3) == {"info": 0, "warning": 0, "critical": 1}
    assert seen("warning", 9) == {"info": 0, "warning": 1, "critical": 1}
    assert seen("critical", 3, 12) == {"info": 0, "warning": 1, "critical": 0}
