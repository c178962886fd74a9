"""Stored runs made of given rows, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mizarr.store import PackedTokens, RunKey, open_store
from mizarr.store.runs.entries import ArraySpec, Entry
from mizarr.store.runs.shards import DTYPES


def write_rows(
    folder: Path,
    rows: Mapping[str, Mapping[int, np.ndarray]],
    prompts: Sequence[Sequence[int]],
    *,
    segment: int = 512,
    dtype: str = "float32",
    model: str = "rows",
) -> Entry:
    """Write rows into a store: variable -> layer -> [token, hidden]; returns the entry.

    dtype: as stored; int8 is made of float32.
    """
    tokens = PackedTokens.from_lists(prompts)
    dims = ("layer", "token", "hidden")
    specs = [
        ArraySpec(
            name,
            f"blocks.{{}}.hook_{name}",
            dims,
            {"hidden": next(iter(layers.values())).shape[1]},
            dtype,
            max(layers) + 1,
        )
        for name, layers in rows.items()
    ]
    store = open_store(folder, durability="process")
    entry = store.create_entry(RunKey(model, tokens.digest, "none"), tokens, specs, segment_tokens=segment)
    cells = {(name, layer): values for name, layers in rows.items() for layer, values in layers.items()}
    written = DTYPES["float32" if dtype == "int8" else dtype]
    for number, here in enumerate(entry.segments):
        part = {cell: values[here.start : here.stop] for cell, values in cells.items()}
        entry.write_segment(
            number,
            {cell: np.ascontiguousarray(values.astype(written)) for cell, values in part.items()},
        )
    entry.publish(list(cells))
    return entry
