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
"""Active features read at a time."""


class ActiveBlock(NamedTuple):
    """Active features of some consecutive tokens; each array is [active]."""

    token: npt.NDArray[np.int64]
    """Number of the token in the corpus, ascending."""
    feature: npt.NDArray[np.int32]
    """Index of the feature, ascending within a token."""
    value: npt.NDArray[np.float32]
    """Activation."""


def blocks(encoded: xr.Dataset, size: int = BLOCK) -> Iterator[ActiveBlock]:
    """Active features of a layer, block by block in order; the features of one token stay together.

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
    """Yield (first token, last token + 1) of each block."""
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
    """Whether each token can have features, bool [token]; the first ones of a prompt may be left out.

    Arguments:
        labelled: States or features with the coordinate `position`.
        n_tokens: Number of tokens.
        zero_positions: Number of first positions of each prompt without features.

    Raises:
        ShapeError: Positions matter, and the coordinate is missing.
    """
    if zero_positions == 0:
        return np.ones(n_tokens, bool)
    if "position" not in labelled.coords:
        raise ShapeError(
            "expected a coordinate 'position' of the states, found none; add it, or leave zero_positions at 0"
        )
    return np.asarray(labelled["position"].values >= zero_positions)


def rows_of(features: Ints, n_features: int) -> Ints:
    """Row of each of a layer's features in a result, int64 [n_features].

    Arguments:
        features: indices of the features of the result, one per row.
        n_features: number of features of the layer; those without a row get -1.
    """
    row = np.full(n_features, -1, np.int64)
    row[features] = np.arange(len(features))
    return row


def join_encoded(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Token ranges of one layer joined end to end; lazy, so that a corpus is copied block by block."""
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

    Select rows with `table.where(table.feature == 7, drop=True)`, or convert a part with `to_dataframe()`.

    Arguments:
        encoded: Encoded layers by layer number.

    Returns:
        activation [active], lazy if it is large, with the coordinates layer, prompt, position, token (number
        in the corpus), token_id and feature.

    Raises:
        ShapeError: `encoded` is empty.
    """
    import xarray as xr

    if not encoded:
        raise ShapeError("expected at least one encoded layer, found none")
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
    """Active features of one layer as a table; lazy if there are more than BLOCK."""
    import dask.array as da
    import xarray as xr

    ptr = encoded["token_ptr"].values
    size = int(ptr[-1])
    places = da.arange(size, chunks=BLOCK, dtype=np.int64)

    def by_token(values: npt.NDArray[Any]) -> Any:
        # The token of a place is the last one whose features begin at or before it.
        def look_up(place: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            token_values: npt.NDArray[Any] = values[np.searchsorted(ptr, place, side="right") - 1]
            return token_values

        column = places.map_blocks(look_up, dtype=values.dtype)
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
