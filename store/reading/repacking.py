"""Rearrange packed tokens: subsets packed anew, blocks [prompt, position], attention pairs as square
matrices.

The array operations behind `ds.mi` (accessor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from ..errors import ShapeError
from ..runs.coordinates import ABOUT
from ..runs.packed import MATRICES, exclusive_sum, rows_before
from ..runs.selections import AXIS

Indices = npt.NDArray[np.int64]


def repacked(
    dataset: xr.Dataset, starts: Indices, rows: Indices, positions: Sequence[Indices], *, whole: bool
) -> xr.Dataset:
    """Select tokens of prompts and pack them anew; lazy. `prompt_id` and `position` keep the original
    numbers.

    Arguments:
        dataset: Packed dataset.
        starts: First token of each prompt of the dataset.
        rows: Numbers of the prompts to keep.
        positions: Per kept prompt, positions of the tokens to keep.
        whole: Whether all tokens are kept, so that attention matrices stay.
    """
    sizes = np.array([len(places) for places in positions], np.int64)
    tokens = np.concatenate([start + places for start, places in zip(starts[rows], positions, strict=True)])
    indexers = {"prompt_id": rows, "token": tokens}
    new_sizes = {"row_start": exclusive_sum(sizes), "row_size": sizes}
    for axis in MATRICES if whole else ():
        if axis in dataset.dims:
            pairs = rows_before(axis, sizes, sizes)
            indexers[axis] = _ranges(matrix_starts(dataset, axis)[rows], pairs)
            new_sizes |= {"pair_start": exclusive_sum(pairs)} if axis == "pair" else {}
    columns: dict[str, Any] = {name: ("prompt_id", values, ABOUT[name]) for name, values in new_sizes.items()}
    if "prompt" in dataset.coords:
        numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        columns["prompt"] = ("token", numbers, ABOUT["prompt"])
    for dim, tokens in prompt_of_selections(dataset, rows).items():
        label = f"prompt_{dim.removeprefix(AXIS)}"
        new_number = {int(row): index for index, row in enumerate(rows)}
        prompts = np.array([new_number[row] for row in dataset[label].values[tokens].tolist()], np.int32)
        indexers[dim], columns[label] = tokens, (dim, prompts, ABOUT["prompt"])
    remainder = dataset.drop_vars(["prompt", *new_sizes], errors="ignore")
    return remainder.isel(indexers, missing_dims="ignore").assign_coords(columns)


def prompt_of_selections(dataset: xr.Dataset, rows: Sequence[int] | Indices) -> dict[str, Indices]:
    """Rows of prompts on the axes of selections that lie beside `token`.

    Arguments:
        dataset: Packed dataset.
        rows: Numbers of the prompts, in the order of the result.

    Returns:
        Axis -> indices on it, int64.
    """
    indices = {}
    for dim in (str(dim) for dim in dataset.dims if str(dim).startswith(AXIS)):
        prompt = dataset[f"prompt_{dim.removeprefix(AXIS)}"].values
        begin, end = (np.searchsorted(prompt, rows, side) for side in ("left", "right"))
        indices[dim] = _ranges(np.asarray(begin, np.int64), np.asarray(end - begin, np.int64))
    return indices


def position_labels(original: npt.NDArray[Any] | None, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Position coordinates of a block [prompt, position].

    Arguments:
        original: Position of each token in its prompt, which in a selection differs from its column; None
            if unknown.
        mask: True at tokens, [prompt, position].

    Returns:
        One `position` per column if all prompts agree, else also `position_in_prompt` [prompt, position].
    """
    columns = np.arange(mask.shape[1], dtype=np.int32)
    expected = np.where(mask, columns, -1)
    actual = expected if original is None else np.where(mask, original, -1)
    if (actual == expected).all():
        return {"position": ("position", columns, ABOUT["position"])}
    if (actual == actual[0]).all():
        return {"position": ("position", actual[0], ABOUT["position"])}
    return {
        "position": ("position", columns, {"long_name": "place among the tokens kept"}),
        "position_in_prompt": (("prompt", "position"), actual, ABOUT["position"]),
    }


def matrix_starts(dataset: xr.Dataset, axis: str) -> Indices:
    """First row of each prompt's attention matrix, int64 [prompt].

    Arguments:
        dataset: Packed dataset.
        axis: "pair" or "square".

    Raises:
        ShapeError: The axis has gaps, as in a run of several segments that was not opened by mizarr.
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
    """Unpack the attention matrix of one prompt, in memory.

    Arguments:
        packed: [..., axis, ...].
        axis: "pair" or "square".
        size: Tokens of the prompt.

    Returns:
        [..., query_position, key_position], 0 where the axis "pair" stores nothing, above the diagonal.
    """
    packed = packed.transpose(..., axis)
    square = np.zeros((*packed.shape[:-1], size, size), packed.dtype)
    if axis == "square":
        square[...] = packed.values.reshape(square.shape)
    else:
        # Row-major lower triangle, the order in which pairs are stored.
        rows, columns = np.tril_indices(size)
        square[..., rows, columns] = packed.values
    dims = (*packed.dims[:-1], "query_position", "key_position")
    coords: dict[Any, Any] = {
        name: coord for name, coord in packed.coords.items() if set(coord.dims) <= set(dims[:-2])
    }
    for dim, meaning in (("query_position", "attending position"), ("key_position", "attended position")):
        coords[dim] = (dim, np.arange(size, dtype=np.int32), {"long_name": meaning})
    return xr.DataArray(square, coords, dims, name=packed.name, attrs=packed.attrs)


def _ranges(starts: Indices, sizes: Indices) -> Indices:
    """Concatenate the ranges start[i] … start[i] + size[i] - 1 to one index array, without a Python loop."""
    return np.repeat(starts - exclusive_sum(sizes), sizes) + np.arange(int(sizes.sum()))
