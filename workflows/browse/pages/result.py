"""Page of a result: its variables as tables, curves and heatmaps, its recipe, and its lineage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ....store.errors import MizarrError
from ...holdings import HeldFolder, Snapshot
from ...report.recipe import facts
from ...views import Choice, Heatmap, Line, Lines, Note, Table, Values, View, labels
from .. import addresses
from ..lineage import lineage
from ..page import Page
from .parts import entry_links, home, sized

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["report", "result_page"]

VARIABLES = 12
"""Largest number of variables that are drawn."""
POINTS, ROWS, COLUMNS, WORDS, SLICES = 2000, 128, 256, 40, 6
"""Largest number of points of a curve, rows and columns of a heatmap, texts of a list, and 2D slices of an
array with more than two dims."""
PROMPT_DIMS = ("position", "token", "key_position", "query_position")
"""Dims along the tokens of a prompt, where 0 is its first token."""
PARAMETERS = 4000
"""Largest number of characters of a parameter that are shown."""


def result_page(snapshot: Snapshot, folder: HeldFolder) -> Page:
    """Page of a result.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the result.
    """
    record = folder.records[0]
    address = addresses.result(record.key)
    views: list[View] = [_facts(snapshot, folder)]
    try:
        dataset = snapshot.store.open_result(record)
        views += [_variables(dataset), *report(dataset)]
    # A damaged result has a page too: its provenance may still be readable.
    except MizarrError as error:
        views.append(Note(title="Cannot be read", text=str(error)))
    views += [*_recipe(snapshot, folder), lineage(snapshot, folder, entry_links(address))]
    return Page(
        address=address,
        title=record.label,
        over=f"result {record.short}",
        up=(home(address),),
        views=tuple(views),
    )


def report(dataset: xr.Dataset) -> Iterator[View]:
    """Views of the variables of a dataset: scalars, texts, curves, heatmaps.

    Only the beginning of a large array is shown; the caption then says how much.
    """
    # An empty array is in the table of variables only: there is nothing to draw.
    names = [str(name) for name in dataset.data_vars if dataset[name].size]
    numbers = []
    for name in names[:VARIABLES]:
        array = dataset[name]
        # dtype kinds of numpy: U, T (StringDType) and O hold text; b, i, u and f numbers.
        if array.ndim == 0:
            numbers.append((labels.name(array), _scalar_text(array.values.item())))
        elif array.dtype.kind in "UTO":
            yield _texts(array, name)
        elif array.dtype.kind in "biuf":
            yield _drawing(array, name)
    if numbers:
        yield Values(title="Numbers", pairs=tuple(numbers))
    if len(names) > VARIABLES:
        yield Note(
            text=f"{len(names) - VARIABLES} more variables are not drawn: {', '.join(names[VARIABLES:])}."
        )


def _drawing(array: xr.DataArray, title: str) -> View:
    """Curve, heatmap, or a choice of heatmaps over the leading dims, by the number of dims."""
    if array.ndim == 1:
        return _curve(array, title)
    if array.ndim == 2:
        return _matrix(array, title)
    leading_dims = array.dims[:-2]
    indices = list(np.ndindex(*(array.sizes[dim] for dim in leading_dims)))
    options = []
    for index in indices[:SLICES]:
        selection = dict(zip(leading_dims, index, strict=True))
        label = ", ".join(f"{labels.word(str(dim))} {array[dim].values[i]}" for dim, i in selection.items())
        options.append((label, _matrix(array.isel(selection), "")))
    caption = f"The first {SLICES} of {len(indices):,}." if len(indices) > SLICES else ""
    return Choice(title=title, name="at", options=tuple(options), caption=caption)


def _curve(array: xr.DataArray, title: str) -> View:
    """A one-dimensional array as a curve; coordinates that do not increase become text labels."""
    dim = str(array.dims[0])
    part = array.isel({dim: slice(0, POINTS)})
    x = part[dim].values.tolist()
    is_increasing = all(isinstance(value, int | float) for value in x) and bool((np.diff(x) > 0).all())
    line = Line(title, np.asarray(part.values, np.float64))
    return Lines(
        title=title,
        caption=_caption(array, f"The first {POINTS:,} of {array.size:,}." if array.size > POINTS else ""),
        x=tuple(map(float, x)) if is_increasing else tuple(map(str, x)),
        lines=(line,),
        x_name=labels.word(dim),
        y_name=labels.name(array),
        unit=labels.unit(array),
    )


def _matrix(array: xr.DataArray, title: str) -> View:
    """A two-dimensional array as a heatmap."""
    row_dim, column_dim = map(str, array.dims)
    part = array.isel({row_dim: slice(0, ROWS), column_dim: slice(0, COLUMNS)})
    shape = f"{array.sizes[row_dim]:,} × {array.sizes[column_dim]:,}"
    extent = "" if part.shape == array.shape else f"The first {part.shape[0]} × {part.shape[1]} of {shape}."
    # Read once: the stored array is lazy.
    part = part.copy(data=np.asarray(part.values, np.float64))
    has_both_signs = bool((part.values < 0).any() and (part.values > 0).any())
    heatmap = Heatmap.of(part, title=title, caption=_caption(array, extent), diverging=has_both_signs)
    starts_prompt = column_dim in PROMPT_DIMS and part[column_dim].values.tolist()[:1] in ([0], ["0"])
    return heatmap.without_first_token() if starts_prompt else heatmap


def _texts(array: xr.DataArray, title: str) -> View:
    """An array of text as a table with one row per text."""
    words = [
        str(word) for word in array.isel({dim: slice(0, WORDS) for dim in array.dims}).values.ravel()[:WORDS]
    ]
    caption = f"The first {len(words)} of {array.size:,}." if array.size > len(words) else ""
    return Table.of(
        list(enumerate(words)), ("", lambda row: row[0], "d"), (title, lambda row: row[1]), caption=caption
    )


def _caption(array: xr.DataArray, extent: str) -> str:
    """Long name and unit of an array as a sentence, followed by `extent`, which says how much is shown."""
    name = str(array.attrs.get("long_name", ""))
    unit = labels.unit(array)
    quantity = f"{name}, {unit}" if name and unit else name
    sentence = f"{quantity[:1].upper()}{quantity[1:]}." if quantity else ""
    return " ".join(part for part in (sentence, extent) if part)


def _scalar_text(value: Any) -> str:
    """A scalar as text; floats with six significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _facts(snapshot: Snapshot, folder: HeldFolder) -> Values:
    """Date, size and pin of a result, and what `mizarr gc` would do with it."""
    pairs = {
        # An ISO 8601 time, to the minute.
        "stored (UTC)": folder.records[0].created[:16].replace("T", " "),
        "on disk": sized(folder.usage.bytes),
        "pinned as": snapshot.pin(folder) or "–",
    }
    return Values(pairs=tuple(pairs.items()), caption=f"mizarr gc: it {snapshot.fate(folder)}.")


def _variables(dataset: xr.Dataset) -> Table:
    """Table of the variables with dims, dtype, unit and description."""
    rows = [(str(name), array) for name, array in dataset.data_vars.items()]
    return Table.of(
        rows,
        ("variable", lambda row: row[0]),
        (
            "dims",
            lambda row: " × ".join(f"{dim} {size:,}" for dim, size in row[1].sizes.items()) or "one number",
        ),
        ("dtype", lambda row: _dtype(row[1].dtype)),
        ("unit", lambda row: labels.unit(row[1]) or "–"),
        ("description", lambda row: str(row[1].attrs.get("long_name", "")) or "–"),
        title="Variables",
    )


def _dtype(dtype: Any) -> str:
    """Name of a dtype; "text" for all string types."""
    return "text" if dtype.kind in "UTO" else str(dtype)


def _recipe(snapshot: Snapshot, folder: HeldFolder) -> Iterator[View]:
    """Table of key, stage, parameters, inputs, and the noted facts about the computation."""
    record, request = folder.records[0], folder.note("request") or {}
    stage = str(request.get("stage", "")).partition("/")[0]
    pairs = [("key", record.key), ("content", record.content)]
    if request:
        pairs.insert(0, ("stage", f"{request.get('stage')}/{request.get('version')}"))
    for name, value in sorted((request.get("params") or {}).items()):
        text = json.dumps(value, ensure_ascii=False)
        shown = f"{text[:PARAMETERS]} … ({len(text):,} characters)" if len(text) > PARAMETERS else text
        pairs.append((f"parameter {name}", shown))
    pairs += [(f"input {name}", content) for name, content in sorted((request.get("inputs") or {}).items())]
    pairs += [(name, text) for name, text in facts(snapshot.store, record) if name != "content"]
    yield Table.of(
        pairs,
        ("", lambda pair: pair[0]),
        ("how it was made", lambda pair: pair[1]),
        title="Recipe",
        caption=f"mizarr show {record.short} prints this result; mizarr stages {stage} describes the stage.",
    )
