"""Access to the encoded features of a corpus: ragged arrays, opened as tables, never dense.

Border: labelled arrays; knows neither dictionaries nor models, and never imports torch.

Axes: token; edge = token + 1; active: the features of token t are at token_ptr[t] to token_ptr[t + 1],
ascending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....store.arrays import Ints
from ....store.errors import ShapeError
from ...corpus.token_blocks import ahead

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["ActiveBlock", "active_table", "blocks", "is_counted", "join_encoded", "rows_of"]

BLOCK = 1 << 20
"""Number of active features that are read at once."""


class ActiveBlock(NamedTuple):
    """Active features of consecutive tokens of a corpus, in the order of tokens; arrays are [active]."""

    token: npt.NDArray[np.int64]
    """Number of the token in the corpus, ascending."""
    feature: npt.NDArray[np.int32]
    """Index of the feature, ascending within a token."""
    value: npt.NDArray[np.float32]
    """Activation of the feature at the token."""


def blocks(encoded: xr.Dataset, size: int = BLOCK) -> Iterator[ActiveBlock]:
    """Yield the active features of a layer in blocks; the features of one token stay together.

    Arguments:
        encoded: Encoded layer, from `encode_features`.
        size: Number of active features per block, approximately.
    """
    ptr = encoded["token_ptr"].values

    def read(tokens: tuple[int, int]) -> ActiveBlock:
        start, stop = tokens
        active = encoded[["feature", "value"]].isel(active=slice(int(ptr[start]), int(ptr[stop])))
        token = np.repeat(np.arange(start, stop), np.diff(ptr[start : stop + 1]))
        return ActiveBlock(token, active["feature"].values, active["value"].values)

    for _, block in ahead(_ranges(ptr, size), read):
        yield block


def _ranges(ptr: npt.NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, last token + 1) of each block; token t's features are at ptr[t] to ptr[t + 1]."""
    start = 0
    while start < len(ptr) - 1:
        stop = int(np.searchsorted(ptr, ptr[start] + size, side="right")) - 1
        # At least one token, even if it has more than `size` active features.
        stop = min(max(stop, start + 1), len(ptr) - 1)
        yield start, stop
        start = stop


def is_counted(
    labelled: xr.DataArray | xr.Dataset, n_tokens: int, zero_positions: int
) -> npt.NDArray[np.bool_]:
    """Whether each token counts, bool [token]: it is not among the first positions that are left out.

    Arguments:
        labelled: States or features with the coordinate `position`.
        n_tokens: Number of tokens.
        zero_positions: Number of positions at the start of each prompt whose features are left out.

    Raises:
        ShapeError: `zero_positions` is above 0, and there is no coordinate `position`.
    """
    if zero_positions == 0:
        return np.ones(n_tokens, bool)
    if "position" not in labelled.coords:
        raise ShapeError(
            f"expected a coordinate 'position' of the tokens, as zero_positions={zero_positions} leaves out "
            "first positions, found none; add the coordinate, or set zero_positions=0"
        )
    return np.asarray(labelled["position"].values >= zero_positions)


def rows_of(features: Ints, n_features: int) -> Ints:
    """Row of each feature of a layer in a result about some of them, int64 [n_features]; -1 without a row.

    Arguments:
        features: Indices of the features that the result is about, one per row.
        n_features: Number of features of the layer.
    """
    row = np.full(n_features, -1, np.int64)
    row[features] = np.arange(len(features))
    return row


def join_encoded(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join the active features of consecutive token ranges of one layer; lazy, so that nothing is read."""
    import dask.array as da
    import xarray as xr

    if len(parts) == 1:
        return parts[0]
    counts = np.concatenate([np.diff(part["token_ptr"].values) for part in parts])
    labels = {
        name: ("token", np.concatenate([part[name].values for part in parts]), coord.attrs)
        for name, coord in parts[0].coords.items()
        if coord.dims == ("token",)
    }

    def end_to_end(name: str) -> Any:
        return da.concatenate([part[name].chunk(active=BLOCK).data for part in parts])

    joined = xr.Dataset(
        {
            "token_ptr": ("edge", np.concatenate([[0], counts.cumsum()])),
            "feature": ("active", end_to_end("feature")),
            "value": ("active", end_to_end("value")),
        },
        coords={**labels, "layer": parts[0]["layer"]},
        attrs=parts[0].attrs,
    )
    # Equal chunks: parts of other lengths would give irregular chunks, which Zarr does not store.
    return joined.chunk(active=BLOCK)


def active_table(encoded: Mapping[int, xr.Dataset]) -> xr.Dataset:
    """Active features of a corpus as a table, layer by layer.

    `table.where(table.feature == 7, drop=True)` selects rows, and `to_dataframe()` converts them.

    Arguments:
        encoded: Active features by layer, from `encode_features`.

    Returns:
        activation [active], lazy if it is large, with the coordinates layer, prompt, position, token (number
        in the corpus), token_id and feature.

    Raises:
        ShapeError: `encoded` is empty.
    """
    import xarray as xr

    if not encoded:
        raise ShapeError("expected the active features of at least one layer, found an empty mapping")
    tables = [_table(layer, encoded[layer]) for layer in sorted(encoded)]
    # "override": indexes and attributes of the layers are equal, and comparing them would read lazy columns.
    joined: xr.Dataset = xr.concat(
        tables,
        "active",
        data_vars="all",
        coords="all",
        compat="override",
        join="override",
        combine_attrs="override",
    )
    return joined


def _table(layer: int, encoded: xr.Dataset) -> xr.Dataset:
    """Table with one row per active feature of a layer; lazy above BLOCK rows."""
    import dask.array as da
    import xarray as xr

    ptr = encoded["token_ptr"].values
    size = int(ptr[-1])
    rows = da.arange(size, chunks=BLOCK, dtype=np.int64)

    def by_token(values: npt.NDArray[Any]) -> Any:
        # The token of a row is the last one whose features begin at or before the row.
        def look_up(row: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            token_values: npt.NDArray[Any] = values[np.searchsorted(ptr, row, side="right") - 1]
            return token_values

        column = rows.map_blocks(look_up, dtype=values.dtype)
        return column if size > BLOCK else column.compute()

    labels = {
        name: encoded[name].values for name in ("prompt", "position", "token_id") if name in encoded.coords
    }
    labels["token"] = np.arange(len(ptr) - 1)
    is_large = size > BLOCK
    active = encoded[["feature", "value"]]
    active = active.chunk(active=BLOCK) if is_large else active.load()
    attrs = {"units": "1", "long_name": "activation"}
    return xr.Dataset(
        {"activation": ("active", active["value"].data, attrs)},
        coords={
            "layer": ("active", np.full(size, layer, np.int32)),
            **{name: ("active", by_token(values)) for name, values in labels.items()},
            "feature": ("active", active["feature"].data),
        },
    )
