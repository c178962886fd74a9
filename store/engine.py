"""What xarray opens a stored run or result with when it is told `engine="mizarr"`.

    xarray.open_dataset("activations/data/35/35be…", engine="mizarr")

Needs no import of mizarr: the engine is found by its entry point. Plain `xarray.open_zarr` reads the same
folders but for runs in bfloat16, which zarr does not know; here those are float32, as a store opens them.

Border: a folder in, a lazy dataset out; which run or result lies where, a store tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import xarray as xr
from xarray.backends import BackendEntrypoint

from .errors import EntryNotFound
from .files import folder_at, is_remote

__all__ = ["MizarrBackend"]


class MizarrBackend(BackendEntrypoint):
    """Folders of a store, by path."""

    description: ClassVar[str] = "Open a stored run or result of mizarr, labelled and lazy"
    open_dataset_parameters: ClassVar[tuple[str, ...]] = ("filename_or_obj", "drop_variables")

    def open_dataset(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None
    ) -> xr.Dataset:
        """The dataset of one folder, with `.mi`; values are read when they are asked for.

        Raises EntryNotFound for a path at which neither a run nor a result lies.
        """
        found = _opened(filename_or_obj)
        dropped = [drop_variables] if isinstance(drop_variables, str) else list(drop_variables or ())
        return found.drop_vars(dropped, errors="ignore")


def _opened(place: Any) -> xr.Dataset:
    from .reading import accessor  # noqa: F401 - registers ds.mi
    from .reading.datasets import entry_at, open_entry
    from .results import DATASET, read_result_at

    if isinstance(place, str | os.PathLike):
        told = os.fspath(place)
        # What a result's dataset says it was opened from is the Zarr group in its folder.
        source = (told if is_remote(told) else str(Path(told).expanduser().absolute())).rstrip("/")
        source = source.removesuffix(f"/{DATASET}")
        found = None
        with suppress(ValueError):
            found = folder_at(source)
        if found is not None:
            held = set(found[0].subfolders(found[1]))
            if "manifest" in held:
                return open_entry(entry_at(source), chunks=None)
            if DATASET in held:
                return read_result_at(*found)
    raise EntryNotFound(
        f"expected the folder of a stored run or result, such as STORE/data/35/35be…, found {str(place)!r}; "
        "dataset.encoding['source'] tells where one lies, and `mizarr capture --json` as \"data\""
    )
