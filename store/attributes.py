"""Attributes of datasets and variables: as plain JSON values, as a digest takes them, and as they are stored.

xarray's decoding takes some attributes for its own: `dtype: bool` makes booleans of numbers, `scale_factor`
scales them, `coordinates` moves variables, units such as "days since 2000-01-01" make dates. Where a stage
gave one of those, it is stored under `SHIELD`, where no reader decodes it, and put back when the store opens
the result. Plain `xr.open_zarr` then reads the right values, too, and shows such attributes under that
name; so do exported files.

Border: mappings and datasets; knows no file and no key.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .digest import exact
from .errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SHIELD", "attribute_record", "plain", "shielded", "unshielded"]

SHIELD = "mizarr:attributes"
"""Attribute that holds those which readers of Zarr and NetCDF would decode: name -> record of its value."""
SPACED = "mizarr:coordinates"
"""Attribute of a dataset: names of coordinates with a space, which the `coordinates` of CF cannot hold."""
DECODED = frozenset(
    (
        *("dtype", "missing_value", "scale_factor", "add_offset", "calendar", "coordinates"),
        # References between variables, which xarray moves where it decodes coordinates.
        *("bounds", "grid_mapping", "climatology", "geometry", "node_coordinates", "node_count"),
        *("part_node_count", "interior_ring", "cell_measures", "formula_terms", "char_dim_name"),
        # Names that HDF5 keeps for dimension scales.
        *("CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST"),
        # Ours: in exported files, and in a store.
        *("mizarr", "escaped", SHIELD, SPACED),
    )
)
"""Attributes that readers of Zarr and NetCDF take for their own, as they do all that start with "_"."""
TIME_UNITS = frozenset(("days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"))
"""Units that make durations of numbers, as xarray spells them."""
_LARGEST = 2**53
_TAGS = ("float", "str", "dict")


def plain(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Attributes as plain JSON values, sorted by name: numpy scalars and arrays unpacked, tuples as lists.

    Args:
        attrs: of a dataset or a variable.

    Raises:
        ShapeError: for values that JSON does not hold, and for two names of one spelling (1 and "1").
    """
    names = {str(name): name for name in attrs}
    if len(names) < len(attrs):
        raise ShapeError(f"expected attributes of different names, found {list(attrs)!r:.120}; rename one")
    return {name: _plain(name, attrs[names[name]]) for name in sorted(names)}


def attribute_record(value: Any) -> Any:
    """A plain value as canonical JSON tells it from every other; `_value_of` reads it again.

    Args:
        value: as `plain` gives it.
    """
    if isinstance(value, float | str):
        return exact(value)
    if isinstance(value, list):
        return [attribute_record(item) for item in value]
    if isinstance(value, dict):
        record = {name: attribute_record(item) for name, item in value.items()}
        return {"dict": record} if len(record) == 1 and next(iter(record)) in _TAGS else record
    return value


def shielded(dataset: xr.Dataset) -> xr.Dataset:
    """A copy whose attributes are plain and leave nothing to decode: the rest is under `SHIELD`.

    Args:
        dataset: a dataset whose variables' attributes may be anything that `plain` takes.

    Raises:
        ShapeError: as `plain`.
    """
    spaced = sorted(str(name) for name in set(dataset.coords) - set(dataset.dims) if " " in str(name))
    changed = dataset.reset_coords(spaced) if spaced else dataset.copy(deep=False)
    changed.attrs = _shield(dataset.attrs) | ({SPACED: spaced} if spaced else {})
    for variable in changed.variables.values():
        variable.attrs = _shield(variable.attrs)
    return changed


def unshielded(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset that `shielded` was given, from the decoded one that it became.

    Args:
        dataset: as xarray decoded it.
    """
    spaced = dataset.attrs.get(SPACED, [])
    restored = dataset.set_coords(spaced) if spaced else dataset.copy(deep=False)
    restored.attrs = _restored({name: value for name, value in dataset.attrs.items() if name != SPACED})
    for variable in restored.variables.values():
        variable.attrs = _restored(variable.attrs)
    return restored


def _shield(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    values = plain(attrs)
    hidden = {name: value for name, value in values.items() if _is_decoded(name, value)}
    shown = {name: value for name, value in values.items() if name not in hidden}
    return shown | ({SHIELD: attribute_record(hidden)} if hidden else {})


def _restored(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    shown = {str(name): value for name, value in attrs.items() if name != SHIELD}
    return dict(sorted((shown | _value_of(attrs.get(SHIELD, {}))).items()))


def _is_decoded(name: str, value: Any) -> bool:
    if name in DECODED or name.startswith("_") or not _is_json(value):
        return True
    return name == "units" and isinstance(value, str) and ("since" in value or value in TIME_UNITS)


def _is_json(value: Any) -> bool:
    """Whether a plain value is in JSON as every reader reads it, NaN and infinity left out."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | dict):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return True


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _value_of(record: Any) -> Any:
    """The value whose `attribute_record` this is."""
    if isinstance(record, list):
        return [_value_of(item) for item in record]
    if isinstance(record, dict):
        tag = next(iter(record)) if len(record) == 1 else ""
        if tag == "float":
            return float(record[tag])
        if tag == "str":
            return record[tag]
        return {name: _value_of(item) for name, item in (record[tag] if tag == "dict" else record).items()}
    return record


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if _is_utf8(value):
            return str.__str__(value)
        raise ShapeError(f"expected text that UTF-8 can hold in attribute {name!r}, found {value!r:.80}")
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) <= _LARGEST:
        return int(value)
    raise ShapeError(
        f"expected attribute {name!r} of numbers (integers within 2**53), text, lists and mappings, found "
        f"{type(value).__name__} {value!r:.80}; convert it first"
    )
