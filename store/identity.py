"""Whose activations these are: the model a labelled array comes from, and that two come from the same.

Border: attributes of labelled arrays. What the digest is made of is in keys.py; arrays without the
attribute, such as results of most stages, say nothing and fit everything. A model's name is for people and
stays out of attributes, where it would make two stores of the same activations differ: it is looked up when
an error needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import StageError
from .files import folder_at
from .provenance import get_provenance

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["DIGEST", "model_name", "model_of", "require_same_model"]

DIGEST = "model_digest"
"""Attribute of activations: the digest that identifies the model, of files or as somebody declared it."""
SOURCE = "source"
"""Encoding of activations: the folder of the run they were opened from."""


def model_of(array: xr.DataArray | xr.Dataset) -> dict[str, str]:
    """What an array says of its model, to hand on to what is made of it; empty where it says nothing."""
    return {DIGEST: str(array.attrs[DIGEST])} if DIGEST in array.attrs else {}


def model_name(array: xr.DataArray | xr.Dataset) -> str | None:
    """The model's name, as noted when the run was stored; None where that cannot be told."""
    if SOURCE not in array.encoding:
        return None
    try:
        files, data = folder_at(array.encoding[SOURCE])
    except ValueError:  # opened from another program's file
        return None
    notes = get_provenance(files, data)
    note = next((note for note in notes if isinstance(note.get("model"), str)), None)
    if note is None:
        return None
    return f"{note['model']} as declared" if note.get("declared") else str(note["model"])


def require_same_model(**arrays: Any) -> None:
    """StageError, naming both, if two labelled arrays come from different models.

    arrays: by the name they have where they meet; those that do not say, or are no labelled arrays, are
    passed over.
    """
    said = {name: array for name, array in arrays.items() if DIGEST in getattr(array, "attrs", {})}
    for name, array in said.items():
        first = next(iter(said))
        if array.attrs[DIGEST] != said[first].attrs[DIGEST]:
            raise StageError(
                f"expected arrays of one model, found {first!r} of {_told(said[first])} and {name!r} of "
                f"{_told(array)}; capture both with the same weights and dtype"
            )


def _told(array: xr.DataArray | xr.Dataset) -> str:
    digest, name = str(array.attrs[DIGEST]).rpartition(":")[2][:12], model_name(array)
    return digest if name is None else f"{name} ({digest})"
