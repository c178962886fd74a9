"""`mizarr doctor`: reports versions, devices, paths and missing optional packages, for a bug report."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import click

from ...stages.extras import EXTRAS, missing_modules
from ...store.display.terminal import echo
from ...store.version import __version__
from .options import json_option, print_json, store_option

VARIABLES = (
    "MIZARR_STORE",
    "MIZARR_CACHE",
    "MIZARR_CACHE_QUOTA",
    "MIZARR_TIMEOUT",
    "MIZARR_TUNING",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
)
"""Environment variables that change how mizarr runs. None holds a secret: the report is pasted in public."""


@click.command(epilog="Example: mizarr doctor")
@store_option
@json_option
def doctor(store_path: str, as_json: bool) -> None:
    """Show installed versions, devices and folders, and missing optional packages.

    Nothing is written, fetched or computed. Paste the output into a bug report: it contains folder names of
    this machine, but no access token.
    """
    report = environment_report(store_path)
    if as_json:
        print_json(report)
        return
    for title, facts in report.items():
        echo(title)
        width = max(map(len, facts))
        for name, fact in facts.items():
            echo(f"  {name.ljust(width)}  {fact}".rstrip())


def environment_report(store_path: str) -> dict[str, dict[str, str]]:
    """Section title -> name -> value as text: versions, packages, devices, folders, environment variables."""
    return {
        "mizarr": {
            "version": __version__,
            "lies in": str(Path(__file__).parents[2]),
            "Python": f"{platform.python_version()}, {sys.executable}",
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        },
        "packages": _packages(),
        "optional parts": {name: _extra(name) for name in EXTRAS},
        "computing": _computing(),
        "places": {"store": _store(store_path), **_places()},
        "variables": {name: os.environ.get(name, "-") for name in VARIABLES},
    }


def _packages() -> dict[str, str]:
    """Required packages of mizarr -> installed version."""
    # Requirements of extras have the marker `extra == "..."`.
    requirements = [line for line in requires("mizarr") or () if "extra ==" not in line]
    # A requirement such as "numpy>=1.26": its name ends before the first other character.
    names = [match[0] for line in requirements if (match := re.match(r"[\w.-]+", line))]
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    """Installed version of a package; if it is missing, the command that installs it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing; pip install --force-reinstall mizarr"


def _extra(name: str) -> str:
    """State and purpose of an extra such as "plots": installed, or its missing modules and their install
    command."""
    missing = missing_modules(name)
    state = f"missing {', '.join(missing)}: pip install 'mizarr[{name}]'" if missing else "installed"
    return f"{state} ({EXTRAS[name].purpose})"


def _computing() -> dict[str, str]:
    """Devices and threads that torch reports, and memory; the error if torch cannot be imported."""
    try:
        import torch
    # A broken installation of torch is what this command is meant to find: it is reported, not raised.
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "devices": ", ".join(["cpu", *devices]),
        "threads": f"{torch.get_num_threads()} of torch",
        "memory": _memory(),
    }


def _memory() -> str:
    """Total and available physical memory of the machine in GiB."""
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.1f} GiB, of which {memory.available / 2**30:.1f} GiB are available"


def _store(path: str) -> str:
    """Path or URL of a store, and whether it can be read or written; the error if it cannot be opened."""
    from ...store import open_store
    from ...store.errors import MizarrError
    from ...store.files import is_remote

    # Whether a bucket can be written would show only by writing to it, which this command does not do.
    if is_remote(path):
        try:
            open_store(path, mode="r")
        except MizarrError as error:
            return str(error)
        return f"{path}, can be read"
    folder = Path(path).absolute()
    if not folder.exists():
        return f"{folder}, does not exist yet"
    try:
        open_store(folder, mode="r")
    except MizarrError as error:
        return f"{folder}: {error}"
    return f"{folder}, {'can' if os.access(folder, os.W_OK) else 'cannot'} be written"


def _places() -> dict[str, str]:
    """Folders of mizarr's cache and of the hub's models, and whether they exist."""
    from ...stages.forward.models.files import hub_cache
    from ...store.files import cache_folder

    folders = {"cache": cache_folder(), "models": hub_cache()}
    return {
        name: f"{folder}{'' if folder.exists() else ', does not exist yet'}"
        for name, folder in folders.items()
    }
