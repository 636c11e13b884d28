"""A heatmap as a picture on the page: layers down, steps across, and what its colours stand for."""

from __future__ import annotations

import json
import math

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.curves import Floats
from gradvitals.show.heatmap import Heatmap
from gradvitals.show.html import Html, tag
from gradvitals.show.pictures import picture
from gradvitals.show.text import clean, cut, number

_SHADES = ((48, 18, 92), (45, 62, 140), (26, 108, 148), (34, 148, 128), (96, 186, 94), (184, 214, 70), (255, 236, 92))
"""From low to high. They grow brighter all the way, so that they can be told apart without seeing colours."""
_BROKEN = (255, 45, 85)
FEWEST, MOST = 1, 254
"""Places of the palette for values; 0 is for nothing known, 255 for what is broken."""
ROW, TALLEST = 18, 460
"""Height of a row, and of a whole picture, in pixels of the page."""
LINE = 15
"""Room that a name takes."""


def palette() -> NDArray[np.uint8]:
    """The 256 colours, each red, green, blue and opacity."""
    shades = np.array(_SHADES, dtype=np.float64)
    places = np.linspace(0, len(shades) - 1, MOST - FEWEST + 1)
    colours = np.full((256, 4), 255, dtype=np.uint8)
    for part in range(3):
        colours[FEWEST : MOST + 1, part] = np.round(np.interp(places, np.arange(len(shades)), shades[:, part]))
    colours[0], colours[255, :3] = 0, _BROKEN
    return colours


def scale_of(values: Floats) -> tuple[float, float] | None:
    """The values that the lowest and the highest colour stand for: all but the outermost few, above zero."""
    known = values[np.isfinite(values) & (values > 0)]
    if not known.size:
        return None
    low, high = np.quantile(known, [0.01, 0.999])
    low = max(float(low), float(high) / 1e6)
    return (low, float(high)) if high > 1.2 * low else (float(high) / 1.2, float(high) * 1.2)


def shades(found: Heatmap, scale: tuple[float, float]) -> NDArray[np.uint8]:
    """The place of every cell in the palette, by the logarithm; what is not above zero has the lowest colour."""
    low, high = scale
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (np.log(found.values) - math.log(low)) / (math.log(high) - math.log(low))
    share = np.where(found.values <= 0, 0.0, np.clip(share, 0.0, 1.0))
    place = np.round(FEWEST + np.nan_to_num(share) * (MOST - FEWEST))
    place = np.where(np.isnan(found.values), 0, place)
    return np.where(found.broken, 255, place).astype(np.uint8)


def heat_picture(found: Heatmap) -> Html | None:
    """The figure; None where there is nothing to show."""
    scale = scale_of(found.values)
    if scale is None:
        return None
    rows = len(found.names)
    height = min(rows * ROW, TALLEST)
    every = max(1, math.ceil(LINE * rows / height))
    names = [
        tag(
            "span",
            tag("bdi", cut(name, 80)),
            style=f"top:{100 * (row + 0.5) / rows:.2f}%",
            title=cut(name, 300),
            class_="critical" if found.broken[row : row + every].any() else None,
        )
        for row, name in enumerate(found.names)
        if row % every == 0
    ]
    words = f"{found.title} of {rows} layers over steps, from {number(scale[0])} to {number(scale[1])}"
    image = picture(
        shades(found, scale),
        words,
        palette(),
        class_="heat",
        style=f"height:{height}px",
        data_low=f"{scale[0]:.4g}",
        data_high=f"{scale[1]:.4g}",
    )
    label = tag("div", *names, class_="label rows", style=f"height:{height}px")
    return tag(
        "div",
        tag("div", tag("b", found.title), tag("small", found.note), _legend(found, scale), class_="heat-head"),
        tag("div", label, tag("div", image, class_="plot heats"), class_="lane"),
        class_="heatmap",
        data_names=json.dumps([clean(cut(name, 80)) for name in found.names], ensure_ascii=False),
    )


def _legend(found: Heatmap, scale: tuple[float, float]) -> Html:
    ramp = np.arange(FEWEST, MOST + 1, dtype=np.uint8)[None, :]
    bar = picture(ramp, "the colours from low to high", palette(), class_="ramp")
    broken = tag("span", tag("i", class_="key broken"), "NaN or Inf") if found.broken.any() else None
    output = tag("output", "", class_="at")
    return tag("span", output, number(scale[0]), bar, number(scale[1]), broken, class_="scale")
