"""Downloads a dictionary's files from the Hugging Face hub into its usual local cache.

Border: names and files; their contents are read by formats. Only the files of one dictionary are downloaded:
for a repository with many (Gemma Scope has hundreds, of several GB each) a folder must be given. Files of
other repositories that config.yaml lists are downloaded, too.
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

__all__ = ["fetch", "files_to_fetch"]

CONFIGS = (CONFIG_YAML, "cfg.json", "config.json", "hyperparams.json")
"""Names of configuration files."""
WEIGHTS = (".safetensors", ".npz", "ae.pt")
"""Endings of weight files."""
UNUSED = ("sparsity.safetensors",)
"""Weight files that no format reads."""
# Layers as folders of published dictionaries name them: layer_3, layers.3, blocks.3, L3; or embedding.
_LAYER = re.compile(r"(?:layers?[._]|blocks\.|(?:^|-)L)(\d{1,9})|(embedding)")
_SHOWN = 4
"""Number of files or folders listed in a message."""


def fetch(name: str | Path, *, progress: bool = True) -> DictionaryFiles:
    """Download a dictionary; files that are cached already, and shipped dictionaries, are not downloaded.

    Arguments:
        name: "org/repo[/subfolder][@revision]", or a directory whose config.yaml lists files of the hub.
        progress: Whether to show progress bars.

    Raises:
        ModelNotFound: There is no such dictionary.
        DownloadError: The hub cannot be reached, or the folder has no dictionary, or several of one layer.
    """
    name = DictionaryReference.parse(name).name
    if not (is_shipped(name) or Path(name).expanduser().is_dir()):
        repository, subfolder, revision = parse_reference(name)
        with hub_errors(repository, revision):
            commit, sizes = listed_files(repository, revision)
        sizes_to_fetch = files_to_fetch(sizes, subfolder, str(name))
        fetch_files(repository, revision, commit, sizes_to_fetch, progress=progress)
    # A config.yaml may list files of other repositories, which the first download does not contain.
    files = resolve(name)
    if recognises(files):
        _fetch_listed(files, progress)
    return files


def files_to_fetch(sizes: Mapping[str, int], subfolder: str, name: str) -> dict[str, int]:
    """Configurations and weights in a folder, with their sizes in bytes.

    Arguments:
        sizes: Size in bytes of every file of the repository.
        subfolder: The folder; "" for the root.
        name: The dictionary's reference, for messages.

    Raises:
        DownloadError: There is no dictionary, or there are several of one layer.
    """
    # With the slash: "layer_1" must not match "layer_12".
    below = f"{subfolder}/" if subfolder else ""
    files_below = {file: size for file, size in sizes.items() if file.startswith(below)}
    configs = {file: size for file, size in files_below.items() if file.rpartition("/")[2] in CONFIGS}
    weights = {
        file: size
        for file, size in files_below.items()
        if file.endswith(WEIGHTS) and file.rpartition("/")[2] not in UNUSED
    }
    if not weights and f"{below}{CONFIG_YAML}" not in configs:
        shown = ", ".join(sorted(files_below or sizes)[:_SHOWN]) or "nothing"
        raise DownloadError(
            f"expected transcoders or autoencoders at {name}, found {shown}; name another folder"
        )
    _require_one_each(weights, below, name)
    return configs | weights


def _require_one_each(weights: Mapping[str, int], below: str, name: str) -> None:
    """Raise DownloadError, before any download, if there are several dictionaries of one layer."""
    folders: dict[str, set[str]] = defaultdict(set)
    for file in weights:
        folder = file.rpartition("/")[0]
        layer = _LAYER.search(folder.removeprefix(below.rstrip("/")))
        if layer:
            folders[layer[0]].add(folder)
    crowded = next(
        (sorted(layer_folders) for layer_folders in folders.values() if len(layer_folders) > 1), None
    )
    if crowded:
        more = f" and {len(crowded) - _SHOWN} more" if len(crowded) > _SHOWN else ""
        repository, _, revision = parse_reference(name)
        at = f"@{revision}" if revision else ""
        raise DownloadError(
            f"{name} holds {len(crowded)} dictionaries of one layer: {', '.join(crowded[:_SHOWN])}{more}; "
            f"name one, for example {repository}/{crowded[0]}{at}"
        )


def _fetch_listed(files: DictionaryFiles, progress: bool) -> None:
    """Download the files of other repositories that config.yaml lists."""
    files_by_source: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for entry in references(files):
        if entry.repository is not None and not _is_cached(entry, files.directory):
            files_by_source[entry.repository, entry.revision].add(entry.file)
    for (repository, revision), names in files_by_source.items():
        with hub_errors(repository, revision):
            commit, sizes = listed_files(repository, revision)
        # Before any download of this repository.
        missing = sorted(names - set(sizes))
        if missing:
            raise DownloadError(
                f"{files.directory / CONFIG_YAML} lists {missing[0]} of {repository}, which does not have it"
            )
        fetch_files(repository, revision, commit, {file: sizes[file] for file in names}, progress=progress)


def _is_cached(entry: Reference, folder: Path) -> bool:
    """Whether the hub's cache has the file of a list entry."""
    try:
        return entry.path(folder).is_file()
    except OSError:
        return False
