"""`LabelledEntry`: an entry that opens as a labelled dataset, the type that `Store.entry` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.entries import Entry

if TYPE_CHECKING:
    import xarray as xr


class LabelledEntry(Entry):
    """Stored activations of one run, with `open`. Kept apart from `Entry` so that writers need no xarray."""

    def open(
        self,
        variables: Sequence[str] | None = None,
        layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        **options: Any,
    ) -> xr.Dataset:
        """Open as a labelled lazy dataset with the `.mi` accessor.

        Arguments:
            variables: See `datasets.open_entry`.
            layers: See `datasets.open_entry`.
            options: Further arguments of `datasets.open_entry`.
        """
        from . import accessor  # noqa: F401 - registers ds.mi
        from .datasets import open_entry

        return open_entry(self, variables, layers, **options)
