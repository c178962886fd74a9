"""Optional parts of mizarr: what each is for, which modules it takes, and whether they are here.

An extra is what `pip install 'mizarr[name]'` adds. Whoever needs one asks before work begins (`require`), as
an answer that cannot be shown after a minute of computing is worse than none.

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
    """An optional part.

    modules: what it imports. purpose: what cannot be done without it, in words.
    """

    modules: tuple[str, ...]
    purpose: str


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
    """Whether all modules of an extra can be found."""
    return not missing_modules(extra)


def missing_modules(extra: str) -> list[str]:
    """Modules of an extra that cannot be found."""
    return [name for name in EXTRAS[extra].modules if not _is_there(name)]


def require(extra: str, what: str) -> None:
    """Raise MissingExtra unless an extra is installed. what: who needs it, as the beginning of a sentence."""
    if missing := missing_modules(extra):
        raise MissingExtra(
            f"{what} needs {' and '.join(missing)}, not installed here; pip install 'mizarr[{extra}]'"
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a module that hides itself, as tests do
        return False
