"""Extras: optional dependencies of mizarr, installed by `pip install 'mizarr[name]'`.

Code that needs an extra calls `require` before it computes, so that a missing plotting library fails at once
and not after the analysis.

Border: names of modules; imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from ..store.errors import MissingExtra

__all__ = ["EXTRAS", "Extra", "is_installed", "require"]


@dataclass(frozen=True)
class Extra:
    """One set of optional dependencies, installed by `pip install 'mizarr[name]'`."""

    modules: tuple[str, ...]
    """Names of the Python modules that it installs and mizarr imports."""
    purpose: str
    """Features that need it, as text for users."""


EXTRAS: Mapping[str, Extra] = {
    "plots": Extra(("matplotlib",), "figures: --figures, those of mizarr demo and of reports"),
    "corpora": Extra(("pyarrow",), "Parquet and Arrow files, of prompts and of exports"),
    "gguf": Extra(("gguf",), "models in GGUF files"),
    "probing": Extra(("sklearn", "scipy"), "probes and t tests: the workflows probe and layer_scan"),
    "netcdf": Extra(("h5netcdf", "h5py"), "NetCDF files: mizarr export --to FILE.nc"),
    "remote": Extra(("obstore",), "stores at s3://, gs://, az:// and memory://"),
    "browse": Extra(("starlette", "uvicorn"), "a store in a browser: mizarr browse"),
    "check": Extra(("transformers",), "models of families not known by name, and --backend transformers"),
}


def is_installed(extra: str) -> bool:
    """Whether all modules of an extra can be imported."""
    return not missing_modules(extra)


def missing_modules(extra: str) -> list[str]:
    """Names of the Python modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra].modules if not _is_importable(name)]


def require(extra: str, what: str) -> None:
    """Check that an extra (a set of optional dependencies) is installed.

    Arguments:
        extra: name of the extra, a key of `EXTRAS`.
        what: feature that needs it, as subject of the message, e.g. "A t test".

    Raises:
        MissingExtra: if a module is missing; the message has the pip command.
    """
    if missing := missing_modules(extra):
        raise MissingExtra(
            f"{what} needs {' and '.join(missing)}, not installed here; run: pip install 'mizarr[{extra}]'"
        )


def _is_importable(module: str) -> bool:
    try:
        # find_spec: importing the module itself would take seconds for matplotlib or sklearn.
        return find_spec(module) is not None
    # `sys.modules[name] = None`, by which tests hide a module, makes find_spec raise instead of returning
    # None.
    except (ImportError, ValueError):
        return False
