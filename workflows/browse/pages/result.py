"""Page of a stored result: its variables as tables, curves and heatmaps, its provenance, and its lineage."""

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
"""Largest number of variables that a page draws."""
POINTS, ROWS, COLUMNS, WORDS, SLICES = 2000, 128, 256, 40, 6
"""Largest numbers drawn: points of a curve, rows and columns of a heatmap, texts of a list, and slices
[row, column] of an array with more than two dims."""
PROMPT_DIMS = ("position", "token", "key_position", "query_position")
"""Dims along the tokens of a prompt, where index 0 is its first token."""
PARAMETERS = 4000
"""Largest number of characters of a stage parameter that a page shows."""


def result_page(snapshot: Snapshot, folder: HeldFolder) -> Page:
    """Page of a stored result: its variables, how it was computed, and its lineage.

    Arguments:
        snapshot: Content of the store.
        folder: Folder of the result.
    """
    record = folder.records[0]
    address = addresses.result(record.key)
    views: list[View] = [_storage_facts(snapshot, folder)]
    try:
        dataset = snapshot.store.open_result(record)
        views += [_variables_table(dataset), *report(dataset)]
    # A damaged result has a page too: its provenance may still be readable.
    except MizarrError as error:
        views.append(Note(title="This result cannot be read", text=str(error)))
    views += [*_provenance_table(snapshot, folder), lineage(snapshot, folder, entry_links(address))]
    return Page(
        address=address,
        title=record.label,
        over=f"result {record.short}",
        up=(home(address),),
        views=tuple(views),
    )


def report(dataset: xr.Dataset) -> Iterator[View]:
    """Views of the variables of a dataset: texts as tables, numbers as curves and heatmaps, scalars as a
    list.

    Only the beginning of a large array is shown; the caption then says how much.
    """
    # An empty array is in the table of variables only: there is nothing to draw.
    names = [str(name) for name in dataset.data_vars if dataset[name].size]
    scalars = []
    for name in names[:VARIABLES]:
        array = dataset[name]
        # dtype kinds of numpy: U, T (StringDType) and O hold text; b, i, u and f numbers.
        if array.ndim == 0:
            scalars.append((labels.name(array), _scalar_text(array.values.item())))
        elif array.dtype.kind in "UTO":
            yield _texts_table(array, name)
        elif array.dtype.kind in "biuf":
            yield _drawing(array, name)
    if scalars:
        yield Values(title="Numbers", pairs=tuple(scalars))
    if not_drawn := names[VARIABLES:]:
        yield Note(text=f"This page does not draw {len(not_drawn)} more variables: {', '.join(not_drawn)}.")


def _drawing(array: xr.DataArray, title: str) -> View:
    """An array as a curve (1 dim), a heatmap (2 dims), or a choice of heatmaps of its last two dims
    (more)."""
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
    dims = " and ".join(labels.word(str(dim)) for dim in leading_dims)
    is_cut = len(indices) > SLICES
    caption = f"The first {SLICES} of {len(indices):,} heatmaps, one for each {dims}." if is_cut else ""
    return Choice(title=title, name="at", options=tuple(options), caption=caption)


def _curve(array: xr.DataArray, title: str) -> View:
    """A one-dimensional array as a curve; coordinates that do not increase become text labels."""
    dim = str(array.dims[0])
    part = array.isel({dim: slice(0, POINTS)})
    x = part[dim].values.tolist()
    is_increasing = all(isinstance(value, int | float) for value in x) and bool((np.diff(x) > 0).all())
    line = Line(title, np.asarray(part.values, np.float64))
    extent = f"The first {POINTS:,} of {array.size:,} points." if array.size > POINTS else ""
    return Lines(
        title=title,
        caption=_caption(array, extent),
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
    drawn = f"{part.shape[0]} × {part.shape[1]}"
    extent = "" if part.shape == array.shape else f"The first {drawn} of {shape} values."
    # Read once: the stored array is lazy.
    part = part.copy(data=np.asarray(part.values, np.float64))
    has_both_signs = bool((part.values < 0).any() and (part.values > 0).any())
    heatmap = Heatmap.of(part, title=title, caption=_caption(array, extent), diverging=has_both_signs)
    starts_prompt = column_dim in PROMPT_DIMS and part[column_dim].values.tolist()[:1] in ([0], ["0"])
    return heatmap.without_first_token() if starts_prompt else heatmap


def _texts_table(array: xr.DataArray, title: str) -> View:
    """The first texts of an array as a table with one row per text."""
    # Sliced along each dim first: the whole array need not be read.
    beginning = array.isel({dim: slice(0, WORDS) for dim in array.dims}).values.ravel()[:WORDS]
    texts = [str(text) for text in beginning]
    caption = f"The first {len(texts)} of {array.size:,} texts." if array.size > len(texts) else ""
    return Table.of(
        list(enumerate(texts)),
        ("index", lambda row: row[0], "d"),
        (title, lambda row: row[1]),
        caption=caption,
    )


def _caption(array: xr.DataArray, extent: str) -> str:
    """Caption of an array: its long name and unit as a sentence, then a sentence on how much is shown.

    Arguments:
        array: The array.
        extent: Sentence such as "The first 40 of 100 texts."; "" if all is shown.
    """
    name = str(array.attrs.get("long_name", ""))
    unit = labels.unit(array)
    quantity = f"{name}, {unit}" if name and unit else name
    sentence = f"{quantity[:1].upper()}{quantity[1:]}." if quantity else ""
    return " ".join(part for part in (sentence, extent) if part)


def _scalar_text(value: Any) -> str:
    """A scalar as text; floats with six significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _storage_facts(snapshot: Snapshot, folder: HeldFolder) -> Values:
    """Date, size and pin of a stored result; the caption says whether `mizarr gc` deletes it."""
    pairs = {
        # An ISO 8601 time, to the minute.
        "stored (UTC)": folder.records[0].created[:16].replace("T", " "),
        "on disk": sized(folder.usage.bytes),
        "pinned as": snapshot.pin(folder) or "–",
    }
    caption = f"If `mizarr gc` runs now, this result {snapshot.fate(folder)}."
    return Values(pairs=tuple(pairs.items()), caption=caption)


def _variables_table(dataset: xr.Dataset) -> Table:
    """Table of a dataset's variables with dims, dtype, unit and description."""

    def dims(array: xr.DataArray) -> str:
        return " × ".join(f"{dim} {size:,}" for dim, size in array.sizes.items()) or "one number"

    return Table.of(
        dataset.data_vars.values(),
        ("variable", lambda array: str(array.name)),
        ("dims", dims),
        ("dtype", lambda array: "text" if array.dtype.kind in "UTO" else str(array.dtype)),
        ("unit", lambda array: labels.unit(array) or "–"),
        ("description", lambda array: str(array.attrs.get("long_name", "")) or "–"),
        title="Variables",
    )


def _provenance_table(snapshot: Snapshot, folder: HeldFolder) -> Iterator[View]:
    """Table of a result's stage, key, parameters and inputs, and of the facts noted when it was computed."""
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
        ("fact", lambda pair: pair[0]),
        ("value", lambda pair: pair[1]),
        title="How this result was computed",
        caption=f"`mizarr show {record.short}` prints this result; `mizarr stages {stage}` describes the "
        "stage.",
    )
