"""Model identity of labelled arrays: attributes, display name, and a consistency check.

An array carries the digest of its model as an attribute (`keys.py` defines the digest). Arrays without it,
such as most results, fit every model. The model's name is not an attribute, because attributes are digested:
the same activations captured under two names would differ. It is looked up when a message needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import StageError
from .files import folder_at
from .provenance import model_note

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["DIGEST", "model_name", "model_of", "require_same_model"]

DIGEST = "model_digest"
"""Attribute of activations: digest of the model, computed from its files or declared by the user."""
SOURCE = "source"
"""Encoding of activations: address of the folder they were opened from. Not an attribute, because attributes
are digested, and a path would make the digest depend on where a store lies."""


def model_of(array: xr.DataArray | xr.Dataset) -> dict[str, str]:
    """Attribute that identifies an array's model, to be copied to derived arrays; {} if it has none."""
    return {DIGEST: str(array.attrs[DIGEST])} if DIGEST in array.attrs else {}


def model_name(array: xr.DataArray | xr.Dataset) -> str | None:
    """Name of an array's model at capture; None for an unknown model."""
    if SOURCE not in array.encoding:
        return None
    try:
        files, data = folder_at(array.encoding[SOURCE])
    except ValueError:  # not a folder of a store: opened from a file of another program
        return None
    if (note := model_note(files, data)) is None:
        return None
    return f"{note['model']} as declared" if note.get("declared") else str(note["model"])


def require_same_model(**arrays: Any) -> None:
    """Check that labelled arrays come from one model.

    Arguments:
        arrays: Arrays by their names for messages. Arrays without a model and other values are ignored.

    Raises:
        StageError: Two arrays come from different models; the message names both.
    """
    identified = {name: array for name, array in arrays.items() if DIGEST in getattr(array, "attrs", {})}
    for name, array in identified.items():
        first_name = next(iter(identified))
        if array.attrs[DIGEST] != identified[first_name].attrs[DIGEST]:
            raise StageError(
                f"the inputs are of different models: {first_name!r} of {_describe(identified[first_name])}, "
                f"{name!r} of {_describe(array)}; capture both with the same weights and dtype"
            )


def _describe(array: xr.DataArray | xr.Dataset) -> str:
    """Name and short digest of an array's model, for messages."""
    digest, name = str(array.attrs[DIGEST]).rpartition(":")[2][:12], model_name(array)
    return digest if name is None else f"{name} ({digest})"
