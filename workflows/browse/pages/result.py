"""A result: what is in it, as tables, curves and heatmaps; the recipe that made it; its lineage."""

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
from .parts import home, sized, way_to

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["report", "result_page"]

VARIABLES = 12
"""Variables of a result that are drawn."""
POINTS, ROWS, COLUMNS, WORDS, SLICES = 2000, 128, 256, 40, 6
"""Of a curve, of a heatmap, of a list of text; matrices of an array of more dims."""
PROMPT_DIMS = ("position", "token", "key_position", "query_position")
"""Dims along the tokens of a prompt, where position 0 is its first token."""
PARAMETERS = 4000
"""Characters of a parameter that are written out."""


def result_page(held: Snapshot, folder: HeldFolder) -> Page:
    """The page of a result."""
    record = folder.records[0]
    here = addresses.result(record.key)
    views: list[View] = [_facts(held, folder)]
    try:
        dataset = held.store.open_result(record)
        views += [_variables(dataset), *report(dataset)]
    except MizarrError as error:
        views.append(Note(title="Cannot be read", text=str(error)))
    views += [*_recipe(held, folder), lineage(held, folder, way_to(here))]
    return Page(
        address=here,
        title=record.label,
        over=f"result {record.short}",
        up=(home(here),),
        views=tuple(views),
    )


def report(dataset: xr.Dataset) -> Iterator[View]:
    """What is in a result, drawn; large arrays as far as one can look at them, which they say."""
    names = [str(name) for name in dataset.data_vars if dataset[name].size]
    numbers = []
    for name in names[:VARIABLES]:
        array = dataset[name]
        if array.ndim == 0:
            numbers.append((labels.name(array), _word(array.values.item())))
        elif array.dtype.kind in "UTO":
            yield _texts(array, name)
        elif array.dtype.kind in "biuf":
            yield _drawn(array, name)
    if numbers:
        yield Values(title="Numbers", pairs=tuple(numbers))
    if len(names) > VARIABLES:
        yield Note(
            text=f"{len(names) - VARIABLES} more variables are not drawn: {', '.join(names[VARIABLES:])}."
        )


def _drawn(array: xr.DataArray, title: str) -> View:
    if array.ndim == 1:
        return _curve(array, title)
    if array.ndim == 2:
        return _matrix(array, title)
    front = array.dims[:-2]
    places = list(np.ndindex(*(array.sizes[dim] for dim in front)))
    options = []
    for place in places[:SLICES]:
        at = dict(zip(front, place, strict=True))
        label = ", ".join(f"{labels.word(str(dim))} {array[dim].values[i]}" for dim, i in at.items())
        options.append((label, _matrix(array.isel(at), "")))
    told = f"The first {SLICES} of {len(places):,}." if len(places) > SLICES else ""
    return Choice(title=title, name="at", options=tuple(options), caption=told)


def _curve(array: xr.DataArray, title: str) -> View:
    dim = str(array.dims[0])
    part = array.isel({dim: slice(0, POINTS)})
    x = part[dim].values.tolist()
    is_rising = all(isinstance(at, int | float) for at in x) and bool((np.diff(x) > 0).all())
    line = Line(title, np.asarray(part.values, np.float64))
    return Lines(
        title=title,
        caption=_about(array, f"The first {POINTS:,} of {array.size:,}." if array.size > POINTS else ""),
        x=tuple(map(float, x)) if is_rising else tuple(map(str, x)),
        lines=(line,),
        x_name=labels.word(dim),
        y_name=labels.name(array),
        unit=labels.unit(array),
    )


def _matrix(array: xr.DataArray, title: str) -> View:
    down, across = map(str, array.dims)
    part = array.isel({down: slice(0, ROWS), across: slice(0, COLUMNS)})
    shape = f"{array.sizes[down]:,} × {array.sizes[across]:,}"
    told = "" if part.shape == array.shape else f"The first {part.shape[0]} × {part.shape[1]} of {shape}."
    part = part.copy(data=np.asarray(part.values, np.float64))
    has_both_signs = bool((part.values < 0).any() and (part.values > 0).any())
    heatmap = Heatmap.of(part, title=title, caption=_about(array, told), diverging=has_both_signs)
    starts_prompt = across in PROMPT_DIMS and part[across].values.tolist()[:1] in ([0], ["0"])
    return heatmap.without_first_token() if starts_prompt else heatmap


def _texts(array: xr.DataArray, title: str) -> View:
    words = [
        str(word) for word in array.isel({dim: slice(0, WORDS) for dim in array.dims}).values.ravel()[:WORDS]
    ]
    told = f"The first {len(words)} of {array.size:,}." if array.size > len(words) else ""
    return Table.of(
        list(enumerate(words)), ("", lambda row: row[0], "d"), (title, lambda row: row[1]), caption=told
    )


def _about(array: xr.DataArray, told: str) -> str:
    name = str(array.attrs.get("long_name", ""))
    unit = labels.unit(array)
    said = f"{name}, {unit}" if name and unit else name
    return " ".join(part for part in (f"{said[:1].upper()}{said[1:]}." if said else "", told) if part)


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _facts(held: Snapshot, folder: HeldFolder) -> Values:
    pairs = {
        "stored (UTC)": folder.records[0].created[:16].replace("T", " "),
        "on disk": sized(folder.usage.bytes),
        "pinned as": held.pin(folder) or "–",
    }
    return Values(pairs=tuple(pairs.items()), caption=f"mizarr gc: it {held.fate(folder)}.")


def _variables(dataset: xr.Dataset) -> Table:
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
        ("what it is", lambda row: str(row[1].attrs.get("long_name", "")) or "–"),
        title="What it holds",
    )


def _dtype(dtype: Any) -> str:
    return "text" if dtype.kind in "UTO" else str(dtype)


def _recipe(held: Snapshot, folder: HeldFolder) -> Iterator[View]:
    """Stage, parameters and what is noted about the computation."""
    record, asked = folder.records[0], folder.note("request") or {}
    stage = str(asked.get("stage", "")).partition("/")[0]
    pairs = [("key", record.key), ("content", record.content)]
    if asked:
        pairs.insert(0, ("stage", f"{asked.get('stage')}/{asked.get('version')}"))
    for name, value in sorted((asked.get("params") or {}).items()):
        text = json.dumps(value, ensure_ascii=False)
        cut = f"{text[:PARAMETERS]} … ({len(text):,} characters)" if len(text) > PARAMETERS else text
        pairs.append((f"parameter {name}", cut))
    pairs += [(f"input {name}", content) for name, content in sorted((asked.get("inputs") or {}).items())]
    pairs += [(name, told) for name, told in facts(held.store, record) if name != "content"]
    yield Table.of(
        pairs,
        ("", lambda pair: pair[0]),
        ("how it was made", lambda pair: pair[1]),
        title="Recipe",
        caption=f"mizarr show {record.short} opens it; mizarr stages {stage} tells what the stage does.",
    )
