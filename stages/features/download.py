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
"""File names of the configurations that published dictionaries have."""
WEIGHTS = (".safetensors", ".npz", "ae.pt")
"""Endings of the names of weight files."""
UNUSED = ("sparsity.safetensors",)
"""File names that end like weight files but are not downloaded, because no format reads them."""
# Layers as folders of published dictionaries name them: layer_3, layers.3, blocks.3, L3; or embedding.
_LAYER = re.compile(r"(?:layers?[._]|blocks\.|(?:^|-)L)(\d{1,9})|(embedding)")
_SHOWN = 4
"""Number of files or folders listed in a message."""


def fetch(name: str | Path, *, progress: bool = True) -> DictionaryFiles:
    """Download the files of a dictionary that are missing in the local cache, and return their paths.

    Arguments:
        name: "org/repo[/subfolder][@revision]", or a directory whose config.yaml lists files of the hub.
        progress: Whether to show progress bars.

    Raises:
        ModelNotFound: There is no repository or directory of this name.
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
    """Files of a repository that one dictionary consists of, with their sizes in bytes.

    Arguments:
        sizes: Size in bytes of every file of the repository.
        subfolder: Folder of the repository that holds the dictionary; "" for the root.
        name: The dictionary's name, for messages.

    Raises:
        DownloadError: The folder holds no dictionary, or several of one layer.
    """
    # With the slash: "layer_1" must not match "layer_12".
    prefix = f"{subfolder}/" if subfolder else ""
    files_below = {file: size for file, size in sizes.items() if file.startswith(prefix)}
    configs = {file: size for file, size in files_below.items() if file.rpartition("/")[2] in CONFIGS}
    weights = {
        file: size
        for file, size in files_below.items()
        if file.endswith(WEIGHTS) and file.rpartition("/")[2] not in UNUSED
    }
    if not weights and f"{prefix}{CONFIG_YAML}" not in configs:
        shown = ", ".join(sorted(files_below or sizes)[:_SHOWN]) or "nothing"
        raise DownloadError(
            f"expected weights of transcoders or autoencoders at {name}, found only {shown}; name the folder "
            "of the repository that holds them: org/repo/subfolder"
        )
    _refuse_several_per_layer(weights, prefix, name)
    return configs | weights


def _refuse_several_per_layer(weights: Mapping[str, int], prefix: str, name: str) -> None:
    """Raise DownloadError if the weight files below a folder belong to several dictionaries of one layer."""
    folders_by_layer: dict[str, set[str]] = defaultdict(set)
    for file in weights:
        folder = file.rpartition("/")[0]
        layer = _LAYER.search(folder.removeprefix(prefix.rstrip("/")))
        if layer:
            folders_by_layer[layer[0]].add(folder)
    several = next((sorted(folders) for folders in folders_by_layer.values() if len(folders) > 1), None)
    if several:
        more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
        repository, _, revision = parse_reference(name)
        at = f"@{revision}" if revision else ""
        raise DownloadError(
            f"{name} holds {len(several)} dictionaries of one layer: {', '.join(several[:_SHOWN])}{more}; "
            f"name one of these folders, for example {repository}/{several[0]}{at}"
        )


def _fetch_listed(files: DictionaryFiles, progress: bool) -> None:
    """Download files of other repositories that the dictionary's config.yaml lists and the cache lacks."""
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
                f"{files.directory / CONFIG_YAML} lists the file {missing[0]} of the repository "
                f"{repository}, which has no such file; correct the entry in config.yaml"
            )
        fetch_files(repository, revision, commit, {file: sizes[file] for file in names}, progress=progress)


def _is_cached(entry: Reference, folder: Path) -> bool:
    """Whether the local cache of the hub has the file that an entry of config.yaml (in `folder`) names."""
    try:
        return entry.path(folder).is_file()
    except OSError:
        return False
