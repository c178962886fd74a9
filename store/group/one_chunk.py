"""An array of one chunk, described and laid out as zarr does it, byte for byte.

Border: values, dims and attributes in, the text of a `zarr.json` and the bytes of a chunk out, and back;
where the files lie is known elsewhere. What is described in other words than here is zarr's to read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array
from ..content import NUMBERS
from ..runs.shards import SUM_BYTES, crc32c
from ..runs.zarr_metadata import CRC32C, LITTLE_ENDIAN, UTF8_TEXT, array_metadata
from ..sealed import read_json

__all__ = ["TEXT", "OneChunk"]

TEXT = np.dtypes.StringDType()
_LENGTH = 4  # bytes of a length before text


@dataclass(frozen=True)
class OneChunk:
    """What describes an array.  dtype: of numbers, or `TEXT`. dims: none for a scalar. attributes: plain."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    attributes: Mapping[str, Any]

    @classmethod
    def from_text(cls, text: bytes) -> OneChunk | None:
        """What a `zarr.json` describes; None unless it is the one `text` gives. ValueError for no JSON."""
        found = read_json(text)
        try:
            told = found["data_type"]
            if told != "string" and told not in NUMBERS:
                return None
            dtype = TEXT if told == "string" else np.dtype(told)
            dims = found.get("dimension_names", [])
            one = cls(dtype, tuple(found["shape"]), tuple(dims), found["attributes"])
            sizes = all(type(size) is int and size >= 0 for size in one.shape)
            named = len(dims) == len(one.shape) and all(isinstance(dim, str) for dim in dims)
            is_ours = isinstance(one.attributes, dict) and sizes and named and one.text == text
        except (AttributeError, KeyError, TypeError):
            return None
        return one if is_ours else None

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the chunk: that of the array, but one for an axis without elements."""
        return tuple(max(1, size) for size in self.shape)

    @property
    def path(self) -> str:
        """Name of the chunk's file within the array's folder."""
        return "/".join(["c", *["0"] * len(self.shape)])

    @property
    def fill(self) -> Any:
        """What is read where there is no chunk."""
        return {"f": np.nan, "T": ""}.get(self.dtype.kind, 0)

    @property
    def text(self) -> bytes:
        """The `zarr.json`, as zarr writes it."""
        kind = self.dtype.kind
        numbers = LITTLE_ENDIAN if self.dtype.itemsize > 1 else {"name": "bytes"}
        return array_metadata(
            "string" if kind == "T" else self.dtype.name,
            self.shape,
            self.chunks,
            [UTF8_TEXT if kind == "T" else numbers, CRC32C],
            dims=self.dims,
            fill_value={"f": "NaN", "c": [0.0, 0.0], "b": False, "T": ""}.get(kind, 0),
            attributes=self.attributes,
        )

    def chunk(self, values: Array) -> bytes | None:
        """The bytes of the chunk's file; None for values that are read where there is none."""
        if _is_fill(values):
            return None
        data = _packed(values)
        return data + crc32c(data).to_bytes(SUM_BYTES, "little")

    def values(self, chunk: bytes | None) -> Array:
        """What is read from the chunk's file, which may be read-only; None: there is no file.

        ValueError for bytes that are not what their checksum says, or another number of values.
        """
        size = math.prod(self.shape)
        if chunk is None or not size:
            return np.full(self.shape, self.fill, self.dtype)
        data, told = chunk[:-SUM_BYTES], int.from_bytes(chunk[-SUM_BYTES:], "little")
        if (found := crc32c(data)) != told:
            raise ValueError(f"expected a chunk with crc32c {told:08x}, found {found:08x}")
        if self.dtype.kind == "T":
            held = np.array(_unpacked(data), self.dtype)
        else:
            held = np.frombuffer(data, self.dtype.newbyteorder("<"))
        if held.size != size:
            raise ValueError(f"expected a chunk of {size} values, found {held.size}")
        return held.reshape(self.shape)


def _is_fill(values: Array) -> bool:
    """Whether a chunk is what zarr reads where there is none; it writes no such chunk."""
    if values.dtype.kind == "f":
        return bool(np.isnan(values).all())
    return not any(values.ravel()) if values.dtype.kind == "T" else not values.any()


def _packed(values: Array) -> bytes:
    """C order, little-endian; of text its number, then each with its length (UTF-8)."""
    if values.dtype.kind != "T":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    parts = [text.encode() for text in values.ravel().tolist()]
    lengths = [len(part).to_bytes(_LENGTH, "little") for part in parts]
    told = (each for pair in zip(lengths, parts, strict=True) for each in pair)
    return b"".join([len(parts).to_bytes(_LENGTH, "little"), *told])


def _unpacked(data: bytes) -> list[str]:
    """The text in a chunk; ValueError where lengths lead elsewhere than to its end."""
    texts, at = [], _LENGTH
    while at < len(data):
        start = at + _LENGTH
        at = start + int.from_bytes(data[at:start], "little")
        texts.append(data[start:at].decode())
    if (at, len(texts)) != (len(data), int.from_bytes(data[:_LENGTH], "little")):
        raise ValueError(f"expected a chunk of text, found lengths that end at {at} of {len(data)} bytes")
    return texts
