"""A stored run as people meet it: an entry that opens as a labelled dataset.

Border: what is stored, and how it is read, is told in entries.py and datasets.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.entries import Entry

if TYPE_CHECKING:
    import xarray as xr


class LabelledEntry(Entry):
    """The stored activations of one run, which open with their labels; made by a store."""

    def open(
        self,
        variables: Sequence[str] | None = None,
        layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        **options: Any,
    ) -> xr.Dataset:
        """The published activations as a labelled lazy dataset (`datasets.open_entry`), with `.mi`."""
        from . import accessor  # noqa: F401 - registers ds.mi
        from .datasets import open_entry

        return open_entry(self, variables, layers, **options)
