"""`LabelledEntry`: a stored run that opens as a labelled dataset, the type that `Store.entry` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.entries import Entry

if TYPE_CHECKING:
    import xarray as xr


class LabelledEntry(Entry):
    """Stored activations of one run, which `open` returns as a labelled dataset.

    A class of its own, so that code that only writes runs (`Entry`) need not import xarray.
    """

    def open(
        self,
        variables: Sequence[str] | None = None,
        layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        **options: Any,
    ) -> xr.Dataset:
        """Open the published activations as a labelled, lazy dataset with the `.mi` accessor.

        Arguments:
            variables: Names of the variables; None for all.
            layers: Layer numbers, or a mapping from variable to layer numbers; None for all.
            options: Further arguments of `datasets.open_entry`, such as `chunks`.

        Raises:
            EntryNotFound: A variable or layer is not published.
        """
        from . import accessor  # noqa: F401 - registers ds.mi
        from .datasets import open_entry

        return open_entry(self, variables, layers, **options)
