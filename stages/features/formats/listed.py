"""A config.yaml that lists the file of each layer's transcoder: circuit-tracer's curation repositories.

    transcoders:
      - hf://google/gemma-scope-2b-pt-transcoders/layer_0/width_16k/average_l0_76/params.npz
      - layer_1.safetensors

The order of the list is the order of layers. Entries are files of the hub (hf://org/repo/path[?revision=…]),
looked up in the local cache, or paths relative to the config.yaml; older lists hold {layer, filepath}. The
files have the format of Gemma Scope, Gemma Scope 2 or circuit-tracer. Hook points are those of the
config.yaml.

Border: locates files; their formats read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ....store.errors import DictionaryError, ModelNotFound
from ....store.exchange.outside import path_below
from ..layers.files import CONFIG_YAML, DictionaryFiles, resolve
from ..layers.layout import Opened
from . import gemma_scope, gemma_scope_2, plt
from .fields import apply_fields
from .layered import hooks_of
from .single import OneLayer, join

__all__ = ["Reference", "read", "recognises", "references"]

LONGEST_LIST, LARGEST_FILE = 1024, 1 << 20
"""Limits on the number of entries, and on the bytes of config.yaml, which comes from the hub."""
_LAYER = re.compile(r"layer_(\d{1,9})")


class Reference:
    """List entry: a hub file or a local path."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.repository, self.revision, self.file = None, None, text
        if text.startswith("hf://"):
            parts = urlsplit(text)
            repository, _, file = parts.path.strip("/").partition("/")
            if not (parts.netloc and repository and file):
                raise DictionaryError(f"expected hf://org/repo/file, found {text!r}")
            self.repository, self.file = f"{parts.netloc}/{repository}", file
            self.revision = parse_qs(parts.query).get("revision", [None])[0]

    def path(self, folder: Path) -> Path:
        """Path of the file. Raises ModelNotFound with the command that fetches it."""
        root = folder
        if self.repository is not None:
            root = resolve(self.repository + (f"@{self.revision}" if self.revision else "")).directory
        path = path_below(root, self.file, DictionaryError, folder / CONFIG_YAML)
        if not path.is_file():
            hint = f"fetch it: mizarr features fetch {folder}" if self.repository else "correct the list"
            raise ModelNotFound(f"{self.text} is not at {path}; {hint}")
        return path


def recognises(files: DictionaryFiles) -> bool:
    """Whether config.yaml lists transcoders."""
    return "transcoders" in files.yaml


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """The transcoders of the list as one dictionary; all headers are checked, no weights are read.

    Arguments:
        files: Files of the dictionary.
        read: Hook point that features read, in place of that in the files; None for that in the files.
        write: Hook point that features write to, likewise.

    Raises:
        DictionaryError: The list is invalid, or files do not fit together.
        ModelNotFound: A listed file is missing.
    """
    apply_fields("listed", files.yaml, files.path(CONFIG_YAML))
    entries = references(files)
    kinds = hooks_of(files, read, write)
    names = [f"layer_{layer}{Path(entry.file).suffix}" for layer, entry in enumerate(entries)]
    links = {name: entry.path(files.directory) for name, entry in zip(names, entries, strict=True)}
    # The listed files are presented under uniform names, so that existing readers apply.
    linked = DictionaryFiles(files.name, files.directory, files.revision, links)
    if _format(linked, names[0]) is gemma_scope_2 and gemma_scope_2.is_cross_layer(linked, names[0]):
        return gemma_scope_2.read_clt(linked, names, kinds[0], kinds[1])
    parts: list[OneLayer] = []
    for layer, name in enumerate(names):
        parts.append(_format(linked, name).part(linked, name, kinds[0], kinds[1], layer))
    return join(linked, "listed", parts)


def references(files: DictionaryFiles) -> Sequence[Reference]:
    """The entries of the list, one per layer from 0 on.

    Raises:
        DictionaryError: The list is empty, too long or out of order.
    """
    place = files.directory / CONFIG_YAML
    listed = files.yaml["transcoders"]
    size = files.path(CONFIG_YAML).stat().st_size
    if not isinstance(listed, list) or not 0 < len(listed) <= LONGEST_LIST or size > LARGEST_FILE:
        description = (
            f"{len(listed)} entries in {size} bytes" if isinstance(listed, list) else type(listed).__name__
        )
        raise DictionaryError(
            f"expected transcoders in {place} as a list of 1 to {LONGEST_LIST} files, found {description}"
        )
    entries = [_entry(item, layer, place) for layer, item in enumerate(listed)]
    for layer, entry in enumerate(entries):
        # The order of the list defines the layers; a layer number in a path must agree with it.
        numbers = _LAYER.findall(entry.file)
        if numbers and int(numbers[-1]) != layer:
            raise DictionaryError(
                f"expected the transcoders in {place} in the order of layers, found {entry.text} in place "
                f"{layer}"
            )
    return entries


def _entry(item: Any, layer: int, place: Path) -> Reference:
    """Reference of one list entry; DictionaryError for another layer, or another kind of value."""
    if isinstance(item, Mapping):  # the oldest layout: {id, layer, filepath}
        if item.get("layer", layer) != layer:
            raise DictionaryError(
                f"expected the transcoders in {place} in the order of layers, found layer {item['layer']!r} "
                f"in place {layer}"
            )
        item = item.get("filepath")
    if not isinstance(item, str):
        raise DictionaryError(f"expected a file for layer {layer} in {place}, found {item!r}")
    return Reference(item)


def _format(files: DictionaryFiles, name: str) -> Any:
    """The module that reads one file."""
    if name.endswith(".npz"):
        return gemma_scope
    return gemma_scope_2 if "w_enc" in files.shapes(name) else plt
