"""The `zarr.json` of arrays and groups, byte for byte as zarr-python writes it.

Written by hand because two processes in `zarr.open_group(mode="a")` race, and because importing zarr takes
longer than writing the file. Tests compare with what zarr writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["CRC32C", "LITTLE_ENDIAN", "UTF8_TEXT", "array_metadata", "group_metadata"]

LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
"""Bytes codec for numbers of more than one byte."""
UTF8_TEXT = {"name": "vlen-utf8", "configuration": {}}
"""Bytes codec for strings."""
CRC32C = {"name": "crc32c"}
"""Codec that appends a checksum of four bytes to a chunk."""


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
    """Content of the `zarr.json` of an array, byte for byte as zarr-python writes it.

    Arguments:
        data_type: Zarr's name of the dtype, such as "float32" or "string".
        shape: Shape of the whole array; () for a scalar.
        chunk_shape: Shape of one chunk file (of the shard, with a sharding codec).
        codecs: Codecs in the order in which they encode a chunk.
        dims: Dimension names; () for a scalar.
        fill_value: Value of missing chunks, as JSON spells it (such as "NaN").
        attributes: Attributes of the array or group, as plain JSON values.
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
    """Content of the `zarr.json` of a group, byte for byte as zarr-python writes it.

    Arguments:
        attributes: Attributes of the array or group, as plain JSON values.
    """
    return json.dumps({"attributes": attributes, "zarr_format": 3, "node_type": "group"}, indent=2).encode()
