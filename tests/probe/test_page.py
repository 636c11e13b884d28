"""The page of a probe: one file that shows everything, runs nothing, and takes names as text."""

from __future__ import annotations

import base64
import copy
import math
import re
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from typing import Any

import numpy as np
import probed
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradvitals as gv
from gradvitals.report.charts import Axis, bar, heat, histogram, interval_mark, line_chart, photo, png
from gradvitals.report.probe import probe_page

HOSTILE = "</td><script>alert('x')</script>\"><img src=x onerror=alert(1)>\x1b[31m&amp;"
VOID = {"meta", "img", "br", "line", "circle", "rect", "path", "polyline"}


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


HOSTILE_NAMES = gv.probe.Names(features=[HOSTILE] * 6, classes=[HOSTILE, "b", "c"], tokens=[HOSTILE] * 11)


def probed_record(
    kind: str, names: gv.probe.Names | None = None, questions: Any = gv.probe.QUESTIONS
) -> dict[str, Any]:
    """A probe of a model of tables, images or texts."""
    torch.manual_seed(0)
    if kind == "table":
        data: tuple[Any, ...] = (probed.mlp(), probed.classes(), nn.CrossEntropyLoss())
    elif kind == "image":
        batches = [(torch.randn(8, 1, 6, 5), torch.arange(8) % 3) for _ in range(3)]
        data = (probed.ConvNet(), batches, nn.CrossEntropyLoss())
    else:
        data = (probed.Blocks(), probed.tokens(), None)
    return gv.probe(*data, 3, lr=0.1, names=names, questions=questions, progress=False).record()


def with_hostile_names(record: dict[str, Any]) -> dict[str, Any]:
    """The same record with hostile names of modules and tensors, as another person's model may have."""
    found = copy.deepcopy(record)
    found["about"]["model"] = found["notes"] = HOSTILE
    found["notes"] = [HOSTILE]
    found["verdict"][0] |= {"title": HOSTILE, "detail": HOSTILE, "names": [HOSTILE] * 12, "advice": HOSTILE}
    for rows in (found["signal"]["tensors"], found["signal"]["layers"], found["layers"]["tensors"]):
        rows[0] |= {"name": HOSTILE, "layer": HOSTILE}
    return found


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_every_question_has_its_part_and_nothing_is_fetched_or_run(kind: str) -> None:
    page = probe_page(probed_record(kind))
    read = Reader(page)
    assert read.open == []
    parts = ("Signal and noise", "Layers", "Which inputs matter", "Robustness", "One example at a time", "Loss along")
    assert all(part in read.text for part in parts)
    ids = {attributes["id"] for _, attributes in read.elements if attributes.get("id")}
    assert {str(attributes["href"]) for name, attributes in read.elements if name == "a"} == {
        f"#{name}" for name in ids
    }
    assert not {name for name, _ in read.elements} & {"script", "link", "iframe", "object", "embed", "form", "base"}
    for name, attributes in read.elements:
        assert not any(key.startswith("on") for key in attributes), name
        assert str(attributes.get("src") or "data:image/png").startswith("data:image/png")
    assert not any(word in page.replace("http-equiv", "") for word in ("http", "url(", "@import"))


def test_suspects_come_first_and_verdicts_stand_beside_names() -> None:
    read = Reader(probe_page(probed_record("table")))
    assert read.text.index("Suspects") < read.text.index("Largest gradients")
    assert "24 of 48 examples" in read.text
    assert "Layer Verdict" in read.text
    assert "Tensor Verdict" in read.text


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_hostile_names_are_text_wherever_they_come(kind: str) -> None:
    read = Reader(probe_page(with_hostile_names(probed_record(kind, HOSTILE_NAMES))))
    assert read.open == []
    assert not any(name == "script" for name, _ in read.elements)
    assert not any(key.startswith("on") for _, attributes in read.elements for key in attributes)
    assert "<script>alert('x')</script>" in read.text
    assert "\x1b" not in read.text


def test_a_page_is_made_without_torch() -> None:
    code = "import sys, gradvitals.report.probe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_words_are_colored_by_their_sign_and_strength() -> None:
    found = probed_record("text", questions="saliency")
    example = found["saliency"]["shown"][0]
    example["texts"], example["scores"]["integrated_gradients"] = ["word", "\n", " "], [0.5, -1.0, 0.0]
    example["scores"] = {method: [0.5, -1.0, 0.0] for method in example["scores"]}
    page = probe_page(found)
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
    images = re.findall(r"base64,([A-Za-z0-9+/=]+)", probe_page(probed_record("image", questions="saliency")))
    assert {decoded(base64.b64decode(data)).shape for data in images} == {(6, 5, 4)}


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


def test_bars_are_as_high_as_their_counts() -> None:
    drawn = Reader(histogram([0.0, 1.0, 2.0, 3.0], [1, 0, 4], title="t", x_name="x"))
    heights = [float(str(found["height"])) for name, found in drawn.elements if name == "rect"]
    assert heights[1] == pytest.approx(4 * heights[0])
    assert len(heights) == 2
