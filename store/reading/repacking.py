"""Packed tokens rearranged: some of them packed anew, all of them as a block, packed pairs as a square.

Border: indices and labels; which tokens are meant is told in selection.py, `ds.mi` (accessor.py) is how it
is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from ..errors import ShapeError
from ..runs.coordinates import ABOUT
from ..runs.packed import MATRICES, rows_before
from ..runs.selections import AXIS

Indices = npt.NDArray[np.int64]


def repacked(
    dataset: xr.Dataset, starts: Indices, rows: Indices, kept: Sequence[Indices], *, whole: bool
) -> xr.Dataset:
    """Some tokens of some prompts, packed anew, lazy; `prompt_id` and `position` keep their numbers.

    starts: first token of every prompt of the dataset.  rows: the prompts.  kept: per row, places from its
    first token.  whole: all tokens are kept, so that attention matrices can come along.
    """
    sizes = np.array([len(some) for some in kept], np.int64)
    at = np.concatenate([start + some for start, some in zip(starts[rows], kept, strict=True)])
    picked = {"prompt_id": rows, "token": at}
    fresh = {"row_start": exclusive_sum(sizes), "row_size": sizes}
    for axis in MATRICES if whole else ():
        if axis in dataset.dims:
            pairs = rows_before(axis, sizes, sizes)
            picked[axis] = _ranges(matrix_starts(dataset, axis)[rows], pairs)
            fresh |= {"pair_start": exclusive_sum(pairs)} if axis == "pair" else {}
    columns: dict[str, Any] = {name: ("prompt_id", values, ABOUT[name]) for name, values in fresh.items()}
    if "prompt" in dataset.coords:
        numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        columns["prompt"] = ("token", numbers, ABOUT["prompt"])
    for dim, at in prompt_of_selections(dataset, rows).items():
        label = f"prompt_{dim.removeprefix(AXIS)}"
        number = {int(row): place for place, row in enumerate(rows)}
        own = np.array([number[row] for row in dataset[label].values[at].tolist()], np.int32)
        picked[dim], columns[label] = at, (dim, own, ABOUT["prompt"])
    part = dataset.drop_vars(["prompt", *fresh], errors="ignore")
    return part.isel(picked, missing_dims="ignore").assign_coords(columns)


def prompt_of_selections(dataset: xr.Dataset, rows: Sequence[int] | Indices) -> dict[str, Indices]:
    """Places of some prompts, in that order, on the axes of selections that lie beside `token`."""
    found = {}
    for dim in (str(dim) for dim in dataset.dims if str(dim).startswith(AXIS)):
        prompt = dataset[f"prompt_{dim.removeprefix(AXIS)}"].values
        first, end = (np.searchsorted(prompt, rows, side) for side in ("left", "right"))
        found[dim] = _ranges(np.asarray(first, np.int64), np.asarray(end - first, np.int64))
    return found


def position_labels(own: npt.NDArray[Any] | None, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Coordinates of a block [prompt, position].

    own: where each token stood in its prompt; of a selection it need not be its column. One number per
    column where all prompts agree, else `position_in_prompt` beside the columns.
    """
    columns = np.arange(mask.shape[1], dtype=np.int32)
    expected = np.where(mask, columns, -1)
    found = expected if own is None else np.where(mask, own, -1)
    if (found == expected).all():
        return {"position": ("position", columns, ABOUT["position"])}
    if (found == found[0]).all():
        return {"position": ("position", found[0], ABOUT["position"])}
    return {
        "position": ("position", columns, {"long_name": "place among the tokens kept"}),
        "position_in_prompt": (("prompt", "position"), found, ABOUT["position"]),
    }


def matrix_starts(dataset: xr.Dataset, axis: str) -> Indices:
    """First row of each prompt's attention matrix on "pair" or "square", int64 [prompt].

    Raises ShapeError where the axis is not that of these prompts, end to end: of a run of several segments
    that another reader opened.
    """
    if axis == "pair":
        return np.asarray(dataset["pair_start"].values, np.int64)
    sizes = dataset["row_size"].values.astype(np.int64)
    whole = rows_before(axis, sizes, sizes)
    if int(whole.sum()) != dataset.sizes[axis]:
        raise ShapeError(
            f"expected {int(whole.sum())} pairs, those of {len(sizes)} prompts end to end, found "
            f"{dataset.sizes[axis]}; open the run with mizarr, with all tokens of its prompts"
        )
    return exclusive_sum(whole)


def squared(packed: xr.DataArray, axis: str, size: int) -> xr.DataArray:
    """The attention matrix of one prompt, [..., pair or square, ...] as [..., query_position, key_position],
    in memory."""
    packed = packed.transpose(..., axis)
    square = np.zeros((*packed.shape[:-1], size, size), packed.dtype)
    if axis == "square":
        square[...] = packed.values.reshape(square.shape)
    else:
        rows, columns = np.tril_indices(size)
        square[..., rows, columns] = packed.values
    dims = (*packed.dims[:-1], "query_position", "key_position")
    coords: dict[Any, Any] = {
        name: coord for name, coord in packed.coords.items() if set(coord.dims) <= set(dims[:-2])
    }
    for dim, meaning in (("query_position", "attending position"), ("key_position", "attended position")):
        coords[dim] = (dim, np.arange(size, dtype=np.int32), {"long_name": meaning})
    return xr.DataArray(square, coords, dims, name=packed.name, attrs=packed.attrs)


def exclusive_sum(sizes: Indices) -> Indices:
    """Where each of some runs of these sizes starts, when they lie end to end."""
    sums = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=sums[1:])
    return sums


def _ranges(starts: Indices, sizes: Indices) -> Indices:
    """start[0] … start[0]+size[0]-1, start[1] …, as one array."""
    return np.repeat(starts - exclusive_sum(sizes), sizes) + np.arange(int(sizes.sum()))
