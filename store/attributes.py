"""Attributes of datasets: as plain JSON values, in digests, and protected from decoding in stored files.

xarray interprets some attributes when it opens a file: `dtype: bool` converts numbers to booleans,
`scale_factor` scales them, `coordinates` moves variables, units such as "days since 2000-01-01" make dates.
If a stage sets one of these, it is stored under `SHIELD`, where no reader interprets it, and restored when
the store opens the result. So plain `xr.open_zarr` reads the right values as well; it shows these attributes
under that name, as do exported files.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .digest import LARGEST, exact
from .errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SHIELD", "attribute_record", "plain", "shielded", "unshielded"]

SHIELD = "mizarr:attributes"
"""Attribute under which other attributes are hidden from readers of Zarr and NetCDF, which would interpret
them: name -> encoded value."""
SPACED = "mizarr:coordinates"
"""Attribute of a dataset that lists coordinates with a space in their name, which CF's space-separated list
cannot hold."""
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
"""Attributes that readers of Zarr and NetCDF interpret, as they do all names that start with "_"."""
TIME_UNITS = frozenset(("days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"))
"""Units from which xarray makes durations, as it spells them."""
_TAGS = ("float", "str", "dict")


def plain(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Convert attributes to plain JSON values, sorted by name; numpy values become Python's, tuples lists.

    Arguments:
        attrs: Attributes of a dataset or variable.

    Raises:
        ShapeError: A value has no JSON form, or two names have one spelling (1 and "1").
    """
    # JSON has text names only, so 1 and "1" would collide silently.
    names = {str(name): name for name in attrs}
    if len(names) < len(attrs):
        raise ShapeError(
            f"two of the attributes {list(attrs)!r:.120} have the same name as text; rename one of them"
        )
    return {name: _plain(name, attrs[names[name]]) for name in sorted(names)}


def attribute_record(value: Any) -> Any:
    """Encode an attribute's value so that its JSON text differs from that of every other value.

    For example -0.0 becomes {"float": "-0.0"}, as canonical JSON would write 0.0.

    Arguments:
        value: A value as returned by `plain`.
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
    """Hide attributes that readers of Zarr and NetCDF would interpret, such as `scale_factor`.

    Arguments:
        dataset: A dataset with any attributes that have a JSON form.

    Returns:
        A copy with these attributes encoded in one attribute, `mizarr:attributes`.

    Raises:
        ShapeError: An attribute has no JSON form.
    """
    # CF lists auxiliary coordinates in one attribute, separated by spaces.
    spaced = sorted(str(name) for name in set(dataset.coords) - set(dataset.dims) if " " in str(name))
    changed = dataset.reset_coords(spaced) if spaced else dataset.copy(deep=False)
    changed.attrs = _shield(dataset.attrs) | ({SPACED: spaced} if spaced else {})
    for variable in changed.variables.values():
        variable.attrs = _shield(variable.attrs)
    return changed


def unshielded(dataset: xr.Dataset) -> xr.Dataset:
    """Restore the attributes that `shielded` has hidden.

    Arguments:
        dataset: The stored dataset, decoded by xarray.
    """
    spaced = dataset.attrs.get(SPACED, [])
    restored = dataset.set_coords(spaced) if spaced else dataset.copy(deep=False)
    restored.attrs = _restored({name: value for name, value in dataset.attrs.items() if name != SPACED})
    for variable in restored.variables.values():
        variable.attrs = _restored(variable.attrs)
    return restored


def _shield(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Attributes as plain values, those that readers would interpret encoded under `SHIELD`."""
    values = plain(attrs)
    hidden = {name: value for name, value in values.items() if _is_interpreted(name, value)}
    visible = {name: value for name, value in values.items() if name not in hidden}
    return visible | ({SHIELD: attribute_record(hidden)} if hidden else {})


def _restored(attrs: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Attributes with those under `SHIELD` decoded and restored, sorted by name."""
    visible = {str(name): value for name, value in attrs.items() if name != SHIELD}
    return dict(sorted((visible | _value_of(attrs.get(SHIELD, {}))).items()))


def _is_interpreted(name: str, value: Any) -> bool:
    """Whether a reader of Zarr or NetCDF would interpret an attribute, or could not read its value."""
    # xarray and netCDF4 use the underscore for their own (_FillValue, _Unsigned, _ARRAY_DIMENSIONS).
    if name in DECODED or name.startswith("_") or not _is_json(value):
        return True
    return name == "units" and isinstance(value, str) and ("since" in value or value in TIME_UNITS)


def _is_json(value: Any) -> bool:
    """Whether all JSON readers agree on a plain value; NaN and infinity are excluded."""
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
    """Decode an `attribute_record`."""
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
    """Convert the value of the attribute `name` to plain JSON values; ShapeError if it has no such form."""
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
            # A plain str also for subclasses such as numpy's str_ and StrEnum, whose own __str__ may differ.
            return str.__str__(value)
        raise ShapeError(
            f"the text of attribute {name!r} cannot be encoded as UTF-8: {value!r:.80}; remove lone "
            "surrogates"
        )
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) <= LARGEST:
        return int(value)
    raise ShapeError(
        f"expected attribute {name!r} to consist of numbers (integers within 2**53), text, lists and "
        f"mappings, found {type(value).__name__} {value!r:.80}; convert it first"
    )
