"""Small pictures as PNG files inside the page: images, and maps of what matters in them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.html import Html, tag
from gradvitals.types import FloatArray

_FOR, _AGAINST, _STRONG = (37, 99, 235), (220, 38, 38), (217, 119, 6)


def photo(image: Any) -> NDArray[np.uint8]:
    """Channels by rows by columns as pixels: three channels are red, green and blue, others their mean in grey.

    Brightness runs from the smallest to the largest value, whatever the data were scaled to.
    """
    array = np.nan_to_num(np.asarray(image, dtype=np.float64))
    if array.shape[0] != 3:
        array = np.repeat(array.mean(axis=0, keepdims=True), 3, axis=0)
    low, high = array.min(), array.max()
    bright = (array - low) / (high - low) if high > low else np.full_like(array, 0.5)
    opaque = np.ones((1, *array.shape[1:]))
    return _bytes(np.concatenate([bright, opaque]).transpose(1, 2, 0))


def heat(values: Any, *, signed: bool) -> NDArray[np.uint8]:
    """Rows by columns of numbers as colours over whatever is behind: strong is opaque, nothing is transparent.

    Full colour is the 99th percentile of the absolute values, so that one pixel does not hide the others. With
    signs, blue is for and red against.
    """
    array = np.nan_to_num(np.asarray(values, dtype=np.float64))
    full = float(np.quantile(np.abs(array), 0.99)) or float(np.abs(array).max()) or 1.0
    strength = np.clip(np.abs(array) / full, 0, 1)
    colour = np.where(array[..., None] >= 0, _FOR if signed else _STRONG, _AGAINST) / 255
    return _bytes(np.concatenate([colour, strength[..., None]], axis=-1))


def picture(pixels: NDArray[np.uint8], words: str, palette: NDArray[np.uint8] | None = None, **more: object) -> Html:
    """The pixels as an element of the page; `words` say what is to be seen, `more` are its attributes."""
    data = base64.b64encode(png(pixels, palette)).decode("ascii")
    return tag("img", src=f"data:image/png;base64,{data}", alt=words, **{"class_": "px", **more})


def png(pixels: NDArray[np.uint8], palette: NDArray[np.uint8] | None = None) -> bytes:
    """A PNG file of rows by columns of red, green, blue and opacity; or, with a palette of these, of places in it.

    Reference: W3C, PNG specification (third edition), sections 5 and 11: signature, IHDR, PLTE, tRNS, IDAT, IEND.
    """
    rows, columns = pixels.shape[:2]
    lines = np.zeros((rows, 1 + pixels[0].size), dtype=np.uint8)  # each line begins with its filter: 0, none
    lines[:, 1:] = pixels.reshape(rows, -1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6 if palette is None else 3, 0, 0, 0)
    parts = [(b"IHDR", header)]
    if palette is not None:
        parts += [(b"PLTE", palette[:, :3].tobytes()), (b"tRNS", palette[:, 3].tobytes())]
    parts += [(b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bytes(shares: FloatArray) -> NDArray[np.uint8]:
    return np.round(shares * 255).astype(np.uint8)
