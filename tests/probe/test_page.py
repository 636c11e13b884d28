"""The page of a probe: one file that shows everything, runs nothing, and takes names as text."""

from __future__ import annotations

import base64
import math
import re
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradvitals.report.charts import Axis, bar, heat, histogram, interval_mark, line_chart, photo, png
from gradvitals.report.markup import folded, join, table, tag, text
from gradvitals.report.probe_report import probe_page
from gradvitals.types import json_ready

HOSTILE = "</td><script>alert('x')</script>\"><img src=x onerror=alert(1)>\x1b[31m&amp;"
VOID = {"meta", "img", "br", "line", "circle", "rect", "path", "polyline"}
METHODS = ("integrated_gradients", "gradient_x_input", "gradient", "smoothgrad")


class Reader(HTMLParser):
    """Reads a page as a browser would: elements, attributes, text; and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def saliency_of(kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "where": "inputs",
        "place": name,
        "shape": [3],
        "explains": "the score of the label's class",
        "examples": 2,
        "tokens": [],
        "names": {},
        "by_class": {},
        "completeness": {"expected": 1.0, "found": 1.01, "error": 0.01},
    }
    if kind == "table":
        found["profiles"] = {method: {"feature": [3.0, 1.0, math.nan]} for method in METHODS}
        found["names"] = {"feature": [name, "b", "c"]}
        found["by_class"] = {name: {"feature": [1.0, 3.0, 0.0]}, "1": {"feature": [0.0, 0.0, 0.0]}}
        found["shown"] = [
            {
                "index": 0,
                "label": name,
                "predicted": "1",
                "values": [1.0, 2.0, 3.0],
                "scores": {METHODS[0]: [1.0, -2.0, 0.0]},
            }
        ]
    elif kind == "image":
        picture = np.arange(12.0).reshape(3, 4).tolist()
        found["profiles"] = {method: {"channel": [1.0, 2.0], "picture": picture} for method in METHODS}
        found["by_class"] = {name: {"picture": picture}, "1": {"picture": picture}}
        scores = {method: picture for method in METHODS}
        found["shown"] = [{"index": 0, "label": name, "predicted": name, "image": [picture] * 2, "scores": scores}]
    else:
        found["where"] = "embeddings"
        found["profiles"] = {method: {"position": [0.5, 1.0, 0.0]} for method in METHODS}
        found["tokens"] = [{"id": 4, "text": name, "count": 2, "score": 0.5}]
        scores = {method: [0.5, -1.0, 0.0] for method in METHODS}
        found["shown"] = [{"index": 0, "label": None, "predicted": None, "texts": [name, "\n", " "], "scores": scores}]
    return found


def record(kind: str = "table", name: str = "layer.0") -> dict[str, Any]:
    row = {"name": name, "layer": name, "shape": [3, 4], "numel": 12, "norm": 0.5, "cv": 0.1, "verdict": "signal"}
    gsnr = {"gsnr": 2.0, "gsnr_low": -0.5, "gsnr_high": math.inf, "words": f"{name} has signal"}
    tensor = {**row, **gsnr, "median": 0.1, "mean": 0.2, "below_one": 0.9, "plug_in_median": 0.1, "plug_in_mean": 0.3}
    example = {"index": 0, "batch": 1, "position": 2, "norm": 4.0, "norm_over_median": 9.0, "cosine": -0.9, "loss": 7.0}
    learning = {"name": name, "grad_norm": 1.0, "weight_norm": 2.0, "update_norm": 0.1, "update_ratio": 0.05}
    unit = {"module": name, "kind": "relu", "units": 8, "dead": 2, "dead_share": 0.25, "saturated_share": math.nan}
    curve = {"loss": [1.0, 1.5, 300.0], "accuracy": [0.9, 0.5, 0.0]}
    said = {
        "severity": "critical",
        "question": "signal",
        "title": name,
        "detail": name,
        "names": [name] * 12,
        "advice": name,
    }
    return {
        "about": {"model": name, "num_parameters": 12345, "num_tensors": 2, "batches": 3, "batch_size": 8, "loss": 1.25}
        | {"losses": [1.0, 1.5], "optimizer": name, "lr": 0.1, "train_size": 1000, "seconds": 2.0, "task": name},
        "verdict": [said, {"severity": "fine", "title": "All is well"}],
        "notes": [name],
        "signal": {
            "batch_size": 8,
            "total": {"gsnr": 0.5, "low": 0.1, "high": 1.0, "norm": 3.0, "noise_scale": math.nan},
            "tensors": [tensor] * 30,
            "layers": [{"layer": name, "norm": 0.5, "cv": 0.1, "verdict": "noise", **gsnr}] * 30,
            "thresholds": {
                "vanishing": 1e-9,
                "relative_low": 1e-4,
                "vanishing_names": [name],
                "vanishing_relative_names": [],
            },
        },
        "layers": {
            "tensors": [{**learning, "effective_rank": 3.5, "full_rank": 4, "rank_share": 0.875}],
            "update_by": "optimizer",
            "activations": [unit],
        },
        "samples": {
            "method": "loop",
            "why": name,
            "examples": 4,
            "gsnr": 0.1,
            "noise_scale": 10.0,
            "osgr": 0.9,
            "train_size": 1000,
            "norms": [1.0, 2.0, 0.0, 50.0],
            "histogram": {"edges": [-1.0, 0.0, 1.0], "counts": [1, 3]},
            "largest": [example],
            "contrary": [{**example, "target": 3}],
            "suspects": [{**example, "dataset_index": 731, "target": 3, "label": name, "excess_loss": 6.5}],
        },
        "landscape": {
            "direction": "gradient",
            "lr": 0.1,
            "line": {"step": [0.0, 0.1, 0.2, 0.3], "loss": [2.0, 1.0, 1.5, math.inf]},
            "best_step": 0.1,
            "edge": 0.25,
            "top_eigenvalue": 8.0,
            "sharpness_limit": 20.0,
            "converged": False,
        },
        "saliency": saliency_of(kind, name),
        "robustness": {
            "where": "inputs",
            "scale": 0.5,
            "relative": [0.0, 0.1, 1.0],
            "sizes": [0.0, 0.05, 0.5],
            "curves": {"noise": curve, "fgsm": curve, "pgd": curve},
            "slope": 2.0,
            "lipschitz": {"median": 3.0, "largest": 4.0, "loss": 1.0},
            "half_at": {"fgsm": 0.2, "noise": math.nan},
        },
    }


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_every_question_has_its_part(kind: str) -> None:
    read = Reader(probe_page(record(kind)))
    assert read.open == []
    parts = ("Signal and noise", "Layers", "Which inputs matter", "Robustness", "One example at a time", "Loss along")
    assert all(part in read.text for part in parts)
    ids = {attributes["id"] for _, attributes in read.elements if attributes.get("id")}
    links = {str(attributes["href"]) for name, attributes in read.elements if name == "a"}
    assert links == {f"#{name}" for name in ids}


def test_suspects_come_first_and_verdicts_stand_beside_names() -> None:
    found = record()
    found["verdict"].append({"severity": "info", "title": "So it is", "advice": "do this."})
    found["signal"]["layers"][0] |= {"gsnr": -0.06, "gsnr_low": -0.06, "gsnr_high": 0.14}
    read = Reader(probe_page(found))
    assert read.text.index("Suspects") < read.text.index("731") < read.text.index("Largest gradients")
    assert "4 of 1,000 examples" in read.text
    assert "Info So it is Try: do this." in read.text
    assert "Layer Verdict" in read.text
    assert "Tensor Verdict" in read.text
    assert "below 0.14" in read.text


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_nothing_is_fetched_and_nothing_runs(kind: str) -> None:
    page = probe_page(record(kind))
    read = Reader(page)
    names = {name for name, _ in read.elements}
    assert not names & {"script", "link", "iframe", "object", "embed", "form", "base"}
    for name, attributes in read.elements:
        assert not any(key.startswith("on") for key in attributes), name
        assert str(attributes.get("src") or "data:image/png").startswith("data:image/png")
    assert "http" not in page.replace("http-equiv", "")
    assert "url(" not in page
    assert "@import" not in page


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_hostile_names_are_text_wherever_they_come(kind: str) -> None:
    read, plain = Reader(probe_page(record(kind, HOSTILE))), Reader(probe_page(record(kind, "name")))
    assert [name for name, _ in read.elements] == [name for name, _ in plain.elements]
    for (_, found), (_, expected) in zip(read.elements, plain.elements, strict=True):
        assert found.keys() == expected.keys()
    assert "<script>alert('x')</script>" in read.text
    assert "\x1b" not in read.text


def test_a_record_that_went_through_json_gives_the_same_page() -> None:
    assert probe_page(json_ready(record())) == probe_page(record())


def test_a_probe_of_one_question_has_one_part() -> None:
    page = Reader(probe_page({"about": {"model": "Net"}, "verdict": [], "notes": [], "samples": None}))
    assert "Nothing stood out." in page.text
    assert not any(name == "section" for name, _ in page.elements)


@pytest.mark.parametrize("question", ["signal", "layers", "samples", "landscape", "saliency", "robustness"])
def test_an_answer_with_gaps_is_still_shown(question: str) -> None:
    full = record()[question]
    for left_out in full:
        Reader(probe_page({question: {key: value for key, value in full.items() if key != left_out}}))
    Reader(probe_page({question: {"batch_size": 1}}))


def test_colours_follow_the_reader_and_the_page_fits_a_phone() -> None:
    page = probe_page(record())
    assert "prefers-color-scheme: dark" in page
    assert 'content="width=device-width, initial-scale=1"' in page
    assert page.startswith("<!doctype html>")
    css = page[page.index("<style>") : page.index("</style>")]
    used = set(re.findall(r"var\((--[a-z0-9]+)", css))
    assert used <= set(re.findall(r"(--[a-z0-9]+):", css)) | {"--a"}


def test_a_page_is_made_without_torch() -> None:
    code = "import sys, gradvitals.report.probe_report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_words_are_coloured_by_their_sign_and_strength() -> None:
    page = probe_page({"saliency": saliency_of("text", "word")})
    assert '<span class="pro" style="--a:0.30" title="0.5">word</span>' in page
    assert '<span class="con" style="--a:0.60" title="-1">⏎</span>' in page
    assert '<span class="pro" style="--a:0.00" title="0">␣</span>' in page


def decoded(data: bytes) -> np.ndarray[Any, Any]:
    """A PNG read by its specification, with every checksum checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind], place = body, place + 12 + length
    columns, rows = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(rows, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(rows, columns, 4)


def test_pictures_are_what_they_show() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    np.testing.assert_array_equal(decoded(png(pixels)), pixels)
    page = probe_page({"saliency": saliency_of("image", "x")})
    for data in re.findall(r"base64,([A-Za-z0-9+/=]+)", page):
        assert decoded(base64.b64decode(data)).shape == (3, 4, 4)


def test_a_map_is_blue_for_and_red_against() -> None:
    pixels = heat([[1.0, -1.0], [0.0, 0.5]], signed=True)
    assert pixels[0, 0].tolist() == [37, 99, 235, 255]
    assert pixels[0, 1].tolist() == [220, 38, 38, 255]
    assert pixels[1, 0, 3] == 0
    assert pixels[1, 1, 3] in (127, 128, 129)
    assert heat([[0.0]], signed=False)[0, 0, 3] == 0
    assert heat([[math.nan, math.inf]], signed=False).shape == (1, 2, 4)


def test_a_photo_is_grey_or_in_colour() -> None:
    grey = photo([[[0.0, 5.0]]])
    assert grey.tolist() == [[[0, 0, 0, 255], [255, 255, 255, 255]]]
    red = photo([[[1.0]], [[0.0]], [[0.0]]])
    assert red.tolist() == [[[255, 0, 0, 255]]]
    assert photo([[[3.0]]]).tolist() == [[[128, 128, 128, 255]]]


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8), st.booleans(), st.booleans(), NUMBERS)
def test_any_numbers_can_be_drawn(points: list[tuple[float, float]], x_log: bool, y_log: bool, mark: float) -> None:
    line = {"a": ([x for x, _ in points], [y for _, y in points])}
    drawn = line_chart(line, title="t", x_name="x", y_name="y", x_log=x_log, y_log=y_log, marks={"m": mark})
    assert "nan" not in drawn
    assert "inf" not in drawn
    for x, y in points:
        Reader(bar(x, y, "words"))
        Reader(interval_mark(x, y, mark, Axis(0.1, 10, 0, 100, True)))


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e200, 1e200), st.floats(-1e200, 1e200))
def test_an_axis_holds_its_values_and_has_a_few_ticks(one: float, other: float) -> None:
    axis = Axis.over([one, other], 0, 100).rounded()
    for value in (one, other):
        assert -1e-6 <= axis.at(value) <= 100 + 1e-6
    assert 2 <= len(axis.ticks()) <= 12


def test_bars_are_as_high_as_their_counts() -> None:
    drawn = Reader(histogram([0.0, 1.0, 2.0, 3.0], [1, 0, 4], title="t", x_name="x"))
    heights = [float(str(found["height"])) for name, found in drawn.elements if name == "rect"]
    assert heights[1] == pytest.approx(4 * heights[0])
    assert len(heights) == 2


def test_elements_are_put_together_by_their_parts() -> None:
    assert tag("p", None, "a", tag("b", "<"), hidden=None, open=False) == "<p>a<b>&lt;</b></p>"
    assert text('"') == "&quot;"
    assert folded("more", "x", opened=True) == '<details open="open"><summary>more</summary>x</details>'
    assert '<td class="n">1</td>' in table(["a", "b"], [["<", "1"]])
    assert join(["<", None]) == "&lt;"
