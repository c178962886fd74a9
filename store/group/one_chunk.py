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

_LENGTH_BYTES = 4  # of each length field in vlen-utf8, as defined by the numcodecs codec


@dataclass(frozen=True)
class OneChunk:
    """Description of a Zarr array that is stored as one chunk: dtype, shape, dimension names, attributes."""

    dtype: np.dtype[Any]
    """Numeric dtype, or numpy's StringDType for text."""
    shape: tuple[int, ...]
    """Shape of the array; () for a scalar."""
    dims: tuple[str, ...]
    """Dimension names; () for a scalar."""
    attributes: Mapping[str, Any]
    """Attributes of the array, as plain JSON values."""

    @classmethod
    def from_text(cls, text: bytes) -> OneChunk | None:
        """Parse the `zarr.json` of an array.

        Returns:
            None unless it is byte for byte what this class writes (property `text`); zarr reads other arrays.

        Raises:
            ValueError: The file is not JSON.
        """
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
            is_valid = isinstance(array.attributes, dict) and has_sizes and has_dims
            return array if is_valid and array.text == text else None
        except (AttributeError, KeyError, TypeError):
            return None

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the chunk: the array's shape, with 1 for axes of length 0, as Zarr has no empty chunks."""
        return tuple(max(1, size) for size in self.shape)

    @property
    def path(self) -> str:
        """Path of the chunk file relative to the array's folder."""
        return "/".join(["c", *["0"] * len(self.shape)])

    @property
    def fill(self) -> Any:
        """Value that all elements read as if the chunk file is missing: NaN, 0 or ""."""
        return {"f": np.nan, "T": ""}.get(self.dtype.kind, 0)

    @property
    def text(self) -> bytes:
        """Content of the array's `zarr.json`, byte for byte as zarr writes it."""
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
        return None if _is_fill(values) else with_crc32c(_encoded(values))

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
            raise ValueError(f"the chunk is damaged: expected crc32c {expected:08x}, found {actual:08x}")
        # numpy's StringDType has no fixed item size, so text cannot be read with frombuffer.
        if self.dtype.kind == "T":
            values = np.array(_decoded_texts(data), self.dtype)
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


def _encoded(values: Array) -> bytes:
    """Encode numbers as little-endian bytes in C order, texts as vlen-utf8: their number, then each with its
    length."""
    if values.dtype.kind != "T":
        return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    parts = [text.encode() for text in values.ravel().tolist()]
    lengths = [len(part).to_bytes(_LENGTH_BYTES, "little") for part in parts]
    interleaved = (item for pair in zip(lengths, parts, strict=True) for item in pair)
    return b"".join([len(parts).to_bytes(_LENGTH_BYTES, "little"), *interleaved])


def _decoded_texts(data: bytes) -> list[str]:
    """Decode the texts of a vlen-utf8 chunk; ValueError if their lengths do not add up to its size."""
    texts, offset = [], _LENGTH_BYTES
    while offset < len(data):
        start = offset + _LENGTH_BYTES
        offset = start + int.from_bytes(data[offset:start], "little")
        texts.append(data[start:offset].decode())
    # The loop may also end beyond the data if a length field is damaged.
    if (offset, len(texts)) != (len(data), int.from_bytes(data[:_LENGTH_BYTES], "little")):
        raise ValueError(
            f"the lengths of texts in the chunk add up to {offset} bytes, the chunk has {len(data)}"
        )
    return texts
