"""How an array of a foreign Zarr group is cut into chunks, checked before zarr opens it.

zarr believes what a `zarr.json` says: a chunk of length 0 divides by zero, a grid of 2^40 chunks is walked
through, and chunks that are absent are made of nothing, however large the array. So sizes are held against
the bytes of its files.

Border: parsed metadata in, ValueError out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["expect_bounded"]

MOST_CHUNKS = 1 << 20
"""Of an array, and of a shard."""
MOST_ABSENT = 4 << 30
"""Bytes of an array, or of a chunk, beside those that its files hold: absent chunks read as zeros or NaN."""
MOST_COMPRESSED = 1024
"""Bytes of values that a byte of a file holds at most."""
_ITEMSIZE = {"bool": 1, "string": 16}
_BITS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def expect_bounded(metadata: Mapping[str, Any], stored: int) -> None:
    """Raise ValueError unless an array is cut as its files can be.

    metadata: its `zarr.json`, parsed. stored: bytes of its chunks' files.
    """
    shape = _sizes(metadata.get("shape"), "shape", least=0)
    grid = metadata.get("chunk_grid")
    if not isinstance(grid, Mapping) or grid.get("name") != "regular":
        raise ValueError(f"expected a regular grid of chunks, found {grid!s:.80}")
    chunks = _sizes(_configuration(grid).get("chunk_shape"), "chunk_shape", least=1)
    itemsize = _itemsize(metadata.get("data_type"))
    most = MOST_ABSENT + MOST_COMPRESSED * stored
    _expect_grid(shape, chunks)
    for name, sizes in (("an array", shape), ("a chunk", chunks)):
        if math.prod(sizes) * itemsize > most:
            raise ValueError(
                f"expected {name} that files of {stored} bytes can hold, found a shape of {sizes!s:.80}"
            )
    codecs = metadata.get("codecs")
    if not isinstance(metadata.get("data_type"), str | Mapping) or not isinstance(codecs, list):
        raise ValueError("no data_type, or no list of codecs")
    for codec in codecs:
        if isinstance(codec, Mapping) and codec.get("name") == "sharding_indexed":
            inner = _sizes(_configuration(codec).get("chunk_shape"), "chunk_shape of a shard", least=1)
            _expect_grid(chunks, inner)


def _expect_grid(shape: Sequence[int], chunks: Sequence[int]) -> None:
    if len(shape) != len(chunks):
        raise ValueError(f"expected chunks of {len(shape)} axes, found {list(chunks)!s:.80}")
    count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    if count > MOST_CHUNKS:
        raise ValueError(
            f"expected at most {MOST_CHUNKS} chunks, found {count} of shape {list(chunks)!s:.80} in "
            f"{list(shape)!s:.80}"
        )


def _configuration(of: Mapping[str, Any]) -> Mapping[str, Any]:
    found = of.get("configuration")
    return found if isinstance(found, Mapping) else {}


def _sizes(value: Any, what: str, least: int) -> list[int]:
    if not isinstance(value, list) or not all(type(size) is int and size >= least for size in value):
        raise ValueError(f"expected {what} as integers of at least {least}, found {value!s:.80}")
    return value


def _itemsize(data_type: Any) -> int:
    """Bytes of an element; 16 for what is of no fixed size."""
    name = str(data_type)
    bits = name.lstrip("abcdefghijklmnopqrstuvwxyz")
    return _ITEMSIZE.get(name) or _BITS.get(bits, 16)
