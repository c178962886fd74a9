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
    """Select tokens of prompts and lay them end to end again; lazy.

    `prompt_id` and `position` keep the original numbers.

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        starts: First token of each prompt of the dataset.
        rows: Numbers of the prompts to keep.
        positions: Per kept prompt, positions of the tokens to keep.
        whole: Whether all tokens are kept, so that attention matrices stay.
    """
    sizes = np.array([len(kept) for kept in positions], np.int64)
    tokens = np.concatenate([start + kept for start, kept in zip(starts[rows], positions, strict=True)])
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
    new_number = {int(row): number for number, row in enumerate(rows)}
    for dim, selected_rows in prompt_of_selections(dataset, rows).items():
        label = f"prompt_{dim.removeprefix(AXIS)}"
        old_numbers = dataset[label].values[selected_rows].tolist()
        prompts = np.array([new_number[number] for number in old_numbers], np.int32)
        indexers[dim], columns[label] = selected_rows, (dim, prompts, ABOUT["prompt"])
    remainder = dataset.drop_vars(["prompt", *new_sizes], errors="ignore")
    return remainder.isel(indexers, missing_dims="ignore").assign_coords(columns)


def prompt_of_selections(dataset: xr.Dataset, rows: Sequence[int] | Indices) -> dict[str, Indices]:
    """Find the rows of prompts on axes of selected tokens, such as `token_last`.

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        rows: Numbers of the prompts, in the order of the result.

    Returns:
        Name of the axis -> indices on it, int64.
    """
    indices = {}
    for dim in (str(dim) for dim in dataset.dims if str(dim).startswith(AXIS)):
        prompt = dataset[f"prompt_{dim.removeprefix(AXIS)}"].values
        begin, end = (np.searchsorted(prompt, rows, side) for side in ("left", "right"))
        indices[dim] = _ranges(np.asarray(begin, np.int64), np.asarray(end - begin, np.int64))
    return indices


def position_labels(original: npt.NDArray[Any] | None, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Make the position coordinates of a padded block [prompt, position].

    Arguments:
        original: Position of each token in its prompt, [prompt, position], which differs from its column if
            tokens were selected; None if unknown.
        mask: True at tokens, False in the padding, [prompt, position].

    Returns:
        Coordinates for `assign_coords`: one `position` per column if all prompts agree, else also
        `position_in_prompt` [prompt, position], -1 in the padding.
    """
    columns = np.arange(mask.shape[1], dtype=np.int32)
    column_of_token = np.where(mask, columns, -1)
    positions = column_of_token if original is None else np.where(mask, original, -1)
    if (positions == column_of_token).all():
        return {"position": ("position", columns, ABOUT["position"])}
    if (positions == positions[0]).all():
        return {"position": ("position", positions[0], ABOUT["position"])}
    return {
        "position": ("position", columns, {"long_name": "place among the tokens kept"}),
        "position_in_prompt": (("prompt", "position"), positions, ABOUT["position"]),
    }


def matrix_starts(dataset: xr.Dataset, axis: str) -> Indices:
    """First row of each prompt's attention matrix on the axis that holds them end to end, int64 [prompt].

    Arguments:
        dataset: Dataset whose prompts lie end to end on the token axis.
        axis: "pair" (lower triangles) or "square" (whole matrices).

    Raises:
        ShapeError: The axis has gaps, as in a run of several segments that was not opened by mizarr.
    """
    if axis == "pair":
        return np.asarray(dataset["pair_start"].values, np.int64)
    sizes = dataset["row_size"].values.astype(np.int64)
    whole = rows_before(axis, sizes, sizes)
    if int(whole.sum()) != dataset.sizes[axis]:
        raise ShapeError(
            f"expected {int(whole.sum())} rows on axis {axis!r} for the attention matrices of {len(sizes)} "
            f"prompts, found {dataset.sizes[axis]}; open the run with store.entry(digest).open(), and all "
            "tokens of its prompts"
        )
    return exclusive_sum(whole)


def squared(packed: xr.DataArray, axis: str, size: int) -> xr.DataArray:
    """Turn the stored rows of one prompt's attention matrix into a matrix, in memory.

    Arguments:
        packed: Rows of the prompt, [..., axis, ...].
        axis: "pair" (lower triangle) or "square" (whole matrix).
        size: Tokens of the prompt.

    Returns:
        [..., query_position, key_position]; for "pair" 0 above the diagonal, which is not stored.
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
