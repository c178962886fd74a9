"""Fetch a dictionary's files from the Hugging Face hub into its usual local cache.

Border: names and files; what is in them is their format's. Only what one dictionary reads is fetched: of a
repository of many (Gemma Scope has hundreds, of several GB each) a folder has to be named. Where config.yaml
lists files of other repositories, those are fetched too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from ...store.errors import DownloadError
from ..forward.models.download import fetch_files, hub_errors, listed_files
from .formats.listed import Reference, recognises, references
from .layers.files import (
    CONFIG_YAML,
    DictionaryFiles,
    DictionaryReference,
    is_shipped,
    parse_reference,
    resolve,
)

__all__ = ["fetch", "wanted_files"]

CONFIGS = (CONFIG_YAML, "cfg.json", "config.json", "hyperparams.json")
WEIGHTS = (".safetensors", ".npz", "ae.pt")
UNUSED = ("sparsity.safetensors",)
_LAYER = re.compile(r"(?:layers?[._]|blocks\.|(?:^|-)L)(\d{1,9})|(embedding)")
_SHOWN = 4


def fetch(name: str | Path, *, progress: bool = True) -> DictionaryFiles:
    """Fetch a dictionary; files that are there already are not fetched again, nor is what ships with mizarr.

    name: "org/repo[/subfolder][@revision]", or a directory whose config.yaml lists files of the hub.
    Raises ModelNotFound, or DownloadError when the hub cannot be reached, holds nothing to read there, or
    several dictionaries of one layer.
    """
    name = DictionaryReference.parse(name).name
    if not (is_shipped(name) or Path(name).expanduser().is_dir()):
        repository, subfolder, revision = parse_reference(name)
        with hub_errors(repository, revision):
            commit, sizes = listed_files(repository, revision)
        wanted = wanted_files(sizes, subfolder, str(name))
        fetch_files(repository, revision, commit, wanted, progress=progress)
    found = resolve(name)
    if recognises(found):
        _fetch_listed(found, progress)
    return found


def wanted_files(sizes: Mapping[str, int], subfolder: str, name: str) -> dict[str, int]:
    """Configurations and weights below a folder, with their bytes.

    sizes: file -> bytes of all a repository holds. Raises DownloadError where there are none, or several of
    a layer.
    """
    below = f"{subfolder}/" if subfolder else ""
    here = {file: size for file, size in sizes.items() if file.startswith(below)}
    configs = {file: size for file, size in here.items() if file.rpartition("/")[2] in CONFIGS}
    weights = {
        file: size
        for file, size in here.items()
        if file.endswith(WEIGHTS) and file.rpartition("/")[2] not in UNUSED
    }
    if not weights and f"{below}{CONFIG_YAML}" not in configs:
        held = ", ".join(sorted(here or sizes)[:_SHOWN]) or "nothing"
        raise DownloadError(
            f"expected transcoders or autoencoders at {name}, found {held}; name another folder"
        )
    _require_one_each(weights, below, name)
    return configs | weights


def _require_one_each(weights: Mapping[str, int], below: str, name: str) -> None:
    """DownloadError where folders hold several dictionaries of one layer: they would be fetched in vain."""
    folders: dict[str, set[str]] = defaultdict(set)
    for file in weights:
        folder = file.rpartition("/")[0]
        layer = _LAYER.search(folder.removeprefix(below.rstrip("/")))
        if layer:
            folders[layer[0]].add(folder)
    crowded = next((sorted(held) for held in folders.values() if len(held) > 1), None)
    if crowded:
        more = f" and {len(crowded) - _SHOWN} more" if len(crowded) > _SHOWN else ""
        repository, _, revision = parse_reference(name)
        at = f"@{revision}" if revision else ""
        raise DownloadError(
            f"{name} holds {len(crowded)} dictionaries of one layer: {', '.join(crowded[:_SHOWN])}{more}; "
            f"name one, for example {repository}/{crowded[0]}{at}"
        )


def _fetch_listed(files: DictionaryFiles, progress: bool) -> None:
    """The files of other repositories that config.yaml lists."""
    wanted: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for entry in references(files):
        if entry.repository is not None and not _is_here(entry, files.directory):
            wanted[entry.repository, entry.revision].add(entry.file)
    for (repository, revision), names in wanted.items():
        with hub_errors(repository, revision):
            commit, sizes = listed_files(repository, revision)
        missing = sorted(names - set(sizes))
        if missing:
            raise DownloadError(
                f"{files.directory / CONFIG_YAML} lists {missing[0]} of {repository}, which does not have it"
            )
        fetch_files(repository, revision, commit, {file: sizes[file] for file in names}, progress=progress)


def _is_here(entry: Reference, folder: Path) -> bool:
    try:
        return entry.path(folder).is_file()
    except OSError:
        return False
