"""The `zarr.json` of arrays and groups, byte for byte as zarr writes it: the one place that spells it.

Border: plain values in, the bytes of a file out; which array it describes, and how its chunks lie, is known
by whoever writes them (`shards.py`, `coordinates.py`, `entries.py`, `../group/`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CRC32C", "LITTLE_ENDIAN", "UTF8_TEXT", "array_metadata", "group_metadata"]

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
"""Codec of numbers of more than one byte."""
UTF8_TEXT = {"name": "vlen-utf8", "configuration": {}}
"""Codec of text."""
CRC32C = {"name": "crc32c"}
"""Codec that puts a checksum of four bytes behind a chunk."""


def array_metadata(
    data_type: str,
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    codecs: Sequence[Mapping[str, Any]],
    *,
    dims: Sequence[str],
    fill_value: Any,
    attributes: Mapping[str, Any],
) -> bytes:
    """The `zarr.json` of an array.

    Arguments:
        data_type: zarr's name of the dtype, such as "float32" or "string".
        shape, dims: of the whole array; neither has an item for a scalar.
        chunk_shape: of the chunks that are files, which are shards where the codec is one.
        codecs: in the order in which they encode a chunk.
        fill_value: what is read where there is no chunk, as JSON spells it ("NaN").
        attributes: plain JSON values.
    """
    metadata = {
        "shape": shape,
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": codecs,
        "attributes": attributes,
        **({"dimension_names": dims} if dims else {}),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
    return json.dumps(metadata, indent=2).encode()


def group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """The `zarr.json` of a group. attributes: plain JSON values."""
    return json.dumps({"attributes": attributes, "zarr_format": 3, "node_type": "group"}, indent=2).encode()
