"""Storage of activations and results: content-addressed keys, Zarr arrays on disk, checksums. Never imports
torch.

    store = open_store("activations")
    record = store.lookup(key)          # what is published under a key, or None
    store.put_result(key, dataset)      # a labelled result, first one wins
    store[key]                          # labelled and lazy

Names are imported on first use, so that `import mizarr` does not import xarray and zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Public name -> the module that defines it.
_HOME = {
    "open_store": ".store",
    "Store": ".store",
    "Record": ".records",
    "PackedTokens": ".runs.packed",
    "ModelIdentity": ".keys",
    "RunKey": ".keys",
    "ActivationKey": ".keys",
    "ResultKey": ".keys",
}

__all__ = [*_HOME]  # noqa: PLE0604 - the table above is the list

if TYPE_CHECKING:
    from .keys import (
        ActivationKey as ActivationKey,
        ModelIdentity as ModelIdentity,
        ResultKey as ResultKey,
        RunKey as RunKey,
    )
    from .records import Record as Record
    from .runs.packed import PackedTokens as PackedTokens
    from .store import Store as Store, open_store as open_store


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached in globals, so that __getattr__ runs once per name.
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
