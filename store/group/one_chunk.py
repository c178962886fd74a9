"""Arrays of a single chunk, encoded and decoded byte for byte as zarr does.

An array whose `zarr.json` is not exactly what this module would write is left to zarr (`stored.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array
from ..content import NUMBERS, TEXT
from ..runs.shards import SUM_BYTES, crc32c, with_crc32c
from ..runs.zarr_metadata import CRC32C, LITTLE_ENDIAN, UTF8_TEXT, array_metadata
from ..sealed import read_json

__all__ = ["OneChunk"]

_LENGTH = 4  # bytes of each length field in vlen-utf8, as defined by the numcodecs codec


@dataclass(frozen=True)
class OneChunk:
    """Description of an array that is stored as one chunk."""

    dtype: np.dtype[Any]
    """Numeric dtype, or `TEXT`."""
    shape: tuple[int, ...]
    """Shape of the array; () for a scalar."""
    dims: tuple[str, ...]
    """Dimension names; () for a scalar."""
    attributes: Mapping[str, Any]
    """Plain JSON values."""

    @classmethod
    def from_text(cls, text: bytes) -> OneChunk | None:
        """Parse a `zarr.json`; None unless it equals what the `text` property would give. ValueError if not
        JSON."""
        metadata = read_json(text)
        try:
            data_type = metadata["data_type"]
            # bfloat16, structured and other extension types are zarr's to read.
            if data_type != "string" and data_type not in NUMBERS:
                return None
            dtype = TEXT if data_type == "string" else np.dtype(data_type)
            dims = metadata.get("dimension_names", [])
            array = cls(dtype, tuple(metadata["shape"]), tuple(dims), metadata["attributes"])
            # type() rather than isinstance: True is an int in Python, and JSON has both.
            has_sizes = all(type(size) is int and size >= 0 for size in array.shape)
            has_dims = len(dims) == len(array.shape) and all(isinstance(dim, str) for dim in dims)
            is_ours = isinstance(array.attributes, dict) and has_sizes and has_dims and array.text == text
        except (AttributeError, KeyError, TypeError):
            return None
        return array if is_ours else None

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the chunk: that of the array, but 1 for an axis of length 0, as Zarr has no empty
        chunks."""
        return tuple(max(1, size) for size in self.shape)

    @property
    def path(self) -> str:
        """Path of the chunk file relative to the array's folder."""
        return "/".join(["c", *["0"] * len(self.shape)])

    @property
    def fill(self) -> Any:
        """Fill value, which readers see if the chunk file is missing."""
        return {"f": np.nan, "T": ""}.get(self.dtype.kind, 0)

    @property
    def text(self) -> bytes:
        """The `zarr.json`, byte for byte as zarr writes it."""
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
        """Content of the chunk file; None if all values equal the fill value, as zarr then writes no file."""
        return None if _is_fill(values) else with_crc32c(_packed(values))

    def values(self, chunk: bytes | None) -> Array:
        """Decode a chunk file.

        Arguments:
            chunk: Its content; None if the file does not exist.

        Returns:
            The array, possibly read-only.

        Raises:
            ValueError: The checksum or the number of values does not match.
        """
        size = math.prod(self.shape)
        if chunk is None or not size:
            return np.full(self.shape, self.fill, self.dtype)
        data, expected = chunk[:-SUM_BYTES], int.from_bytes(chunk[-SUM_BYTES:], "little")
        if (actual := crc32c(data)) != expected:
            raise ValueError(f"expected a chunk with crc32c {expected:08x}, found {actual:08x}")
        # numpy's StringDType has no fixed item size, so text cannot be read with frombuffer.
        if self.dtype.kind == "T":
            values = np.array(_unpacked(data), self.dtype)
        else:
            values = np.frombuffer(data, self.dtype.newbyteorder("<"))
        if values.size != size:
            raise ValueError(f"expected a chunk of {size} values, found {values.size}")
        return values.reshape(self.shape)


def _is_fill(values: Array) -> bool:
    """Whether zarr would omit this chunk because all its values equal the fill value."""
    if values.dtype.kind == "f":
        return bool(np.isnan(values).all())
    return not any(values.ravel()) if values.dtype.kind == "T" else not values.any()


def _packed(values: Array) -> bytes:
    """Encode in C order, little-endian; text as vlen-utf8: number of items, then each with its length."""
    if values.dtype.kind != "T":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    parts = [text.encode() for text in values.ravel().tolist()]
    lengths = [len(part).to_bytes(_LENGTH, "little") for part in parts]
    interleaved = (item for pair in zip(lengths, parts, strict=True) for item in pair)
    return b"".join([len(parts).to_bytes(_LENGTH, "little"), *interleaved])


def _unpacked(data: bytes) -> list[str]:
    """Decode a vlen-utf8 chunk; ValueError if the lengths do not add up to its size."""
    texts, offset = [], _LENGTH
    while offset < len(data):
        start = offset + _LENGTH
        offset = start + int.from_bytes(data[offset:start], "little")
        texts.append(data[start:offset].decode())
    # The loop may also end beyond the data if a length field is damaged.
    if (offset, len(texts)) != (len(data), int.from_bytes(data[:_LENGTH], "little")):
        raise ValueError(f"expected a chunk of text, found lengths that end at {offset} of {len(data)} bytes")
    return texts
