"""Limits on the chunk grid of an array, checked before zarr opens its `zarr.json`.

zarr trusts `zarr.json`: a chunk length of 0 divides by zero, a grid of 2^40 chunks is iterated over by dask,
and absent chunks are filled in memory however large the array is. So the declared sizes are compared with the
bytes of the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["expect_bounded"]

MOST_CHUNKS = 1 << 20
"""Maximum number of chunks per array, and of inner chunks per shard."""
MOST_ABSENT = 4 << 30
"""Bytes that an array or chunk may have beyond what its files can hold, as absent chunks read as zeros or
NaN."""
MOST_COMPRESSED = 1024
"""Assumed upper limit of a compression ratio."""
_ITEMSIZE = {"bool": 1, "string": 16}
_BITS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def expect_bounded(metadata: Mapping[str, Any], stored: int) -> None:
    """Check that an array's `zarr.json` does not claim more data than its chunk files can hold.

    Arguments:
        metadata: The parsed `zarr.json`.
        stored: Bytes of the array's chunk files.

    Raises:
        ValueError: The grid has too many chunks, or the array or a chunk is too large for its files.
    """
    shape = _sizes(metadata.get("shape"), "shape", least=0)
    grid = metadata.get("chunk_grid")
    if not isinstance(grid, Mapping) or grid.get("name") != "regular":
        raise ValueError(f"expected a regular chunk_grid, found {grid!s:.80}")
    chunks = _sizes(_configuration(grid).get("chunk_shape"), "chunk_shape", least=1)
    itemsize = _itemsize(metadata.get("data_type"))
    # Absent chunks are legal (all fill values), so a small file may describe a large array, but not an
    # endless one.
    limit = MOST_ABSENT + MOST_COMPRESSED * stored
    _require_few_chunks(shape, chunks)
    for name, sizes in (("array", shape), ("chunk", chunks)):
        if math.prod(sizes) * itemsize > limit:
            raise ValueError(
                f"the {name} shape {sizes!s:.80} needs more bytes than chunk files of {stored} bytes can hold"
            )
    codecs = metadata.get("codecs")
    if not isinstance(metadata.get("data_type"), str | Mapping) or not isinstance(codecs, list):
        raise ValueError("data_type or the list of codecs is missing")
    for codec in codecs:
        if isinstance(codec, Mapping) and codec.get("name") == "sharding_indexed":
            inner = _sizes(_configuration(codec).get("chunk_shape"), "chunk_shape of a shard", least=1)
            _require_few_chunks(chunks, inner)


def _require_few_chunks(shape: Sequence[int], chunks: Sequence[int]) -> None:
    """Raise ValueError if a chunk shape has another number of axes than the array, or gives more than a
    million chunks."""
    if len(shape) != len(chunks):
        raise ValueError(f"expected a chunk shape of {len(shape)} axes, found {list(chunks)!s:.80}")
    count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    if count > MOST_CHUNKS:
        raise ValueError(
            f"expected at most {MOST_CHUNKS} chunks, found {count}: chunks of shape {list(chunks)!s:.80} in "
            f"an array of shape {list(shape)!s:.80}"
        )


def _configuration(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The field "configuration" of a codec or chunk grid in `zarr.json`; empty if it is missing."""
    configuration = item.get("configuration")
    return configuration if isinstance(configuration, Mapping) else {}


def _sizes(value: Any, name: str, least: int) -> list[int]:
    """Validate a shape read from `zarr.json`; ValueError unless it is a list of integers >= `least`."""
    if not isinstance(value, list) or not all(type(size) is int and size >= least for size in value):
        raise ValueError(f"expected {name} as integers of at least {least}, found {value!s:.80}")
    return value


def _itemsize(data_type: Any) -> int:
    """Bytes of one element; 16 for variable-length types."""
    name = str(data_type)
    bits = name.lstrip("abcdefghijklmnopqrstuvwxyz")
    return _ITEMSIZE.get(name) or _BITS.get(bits, 16)
