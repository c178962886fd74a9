"""xarray backend: `xarray.open_dataset(FOLDER, engine="mizarr")` opens a stored run or result.

    xarray.open_dataset("activations/data/35/35be…", engine="mizarr")

Works without importing mizarr, through the entry point in pyproject.toml. Plain `xarray.open_zarr` reads the
same folders, except bfloat16 runs, whose dtype zarr does not know; here they are float32, as a store opens
them.
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
    """xarray backend `engine="mizarr"` for the folders of stored runs and results."""

    description: ClassVar[str] = "Open a stored run or result of mizarr, labelled and lazy"
    open_dataset_parameters: ClassVar[tuple[str, ...]] = ("filename_or_obj", "drop_variables")

    def open_dataset(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None
    ) -> xr.Dataset:
        """Open the folder of a stored run or result as a lazy dataset with the `.mi` accessor.

        Arguments:
            filename_or_obj: Path or URL of the folder of a run or result.
            drop_variables: Names of variables to leave out.

        Raises:
            EntryNotFound: The path is not the folder of a run or result.
        """
        dataset = _opened(filename_or_obj)
        dropped = [drop_variables] if isinstance(drop_variables, str) else list(drop_variables or ())
        return dataset.drop_vars(dropped, errors="ignore")


def _opened(path: Any) -> xr.Dataset:
    """Open the run or result in a folder; EntryNotFound for any other path."""
    from .reading import accessor  # noqa: F401 - registers ds.mi
    from .reading.datasets import entry_at, open_entry
    from .results import DATASET, read_result_at

    if isinstance(path, str | os.PathLike):
        address = os.fspath(path)
        # encoding["source"] of a result is the Zarr group inside its folder; accepted here as well.
        source = (address if is_remote(address) else str(Path(address).expanduser().absolute())).rstrip("/")
        source = source.removesuffix(f"/{DATASET}")
        location = None
        # Any other path is simply not ours: xarray then gets one clear error below.
        with suppress(ValueError):
            location = folder_at(source)
        if location is not None:
            subfolders = set(location[0].subfolders(location[1]))
            if "manifest" in subfolders:
                return open_entry(entry_at(source), chunks=None)
            if DATASET in subfolders:
                return read_result_at(*location)
    raise EntryNotFound(
        f"engine='mizarr' opens the folder of a stored run or result, such as STORE/data/35/35be…, found "
        f"{str(path)!r}; dataset.encoding['source'] is the folder of an opened one, and `mizarr capture "
        "--json` "
        'prints it as "data"'
    )
