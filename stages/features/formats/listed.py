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
"""Largest number of listed files, and largest size of config.yaml in bytes: the file comes from outside."""
_LAYER = re.compile(r"layer_(\d{1,9})")


class Reference:
    """One entry of the list: a file of the hub (hf://...) or a path relative to the folder of config.yaml."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.repository, self.revision, self.file = None, None, text
        if text.startswith("hf://"):
            parts = urlsplit(text)
            repository, _, file = parts.path.strip("/").partition("/")
            if not (parts.netloc and repository and file):
                raise DictionaryError(
                    f"expected a file of the hub in the list of config.yaml as hf://org/repo/file, found "
                    f"{text!r}; correct the entry"
                )
            self.repository, self.file = f"{parts.netloc}/{repository}", file
            self.revision = parse_qs(parts.query).get("revision", [None])[0]

    def path(self, folder: Path) -> Path:
        """Local path of the file; a missing file raises ModelNotFound with a command that fetches it.

        Arguments:
            folder: Folder of the config.yaml.
        """
        root = folder
        if self.repository is not None:
            root = resolve(self.repository + (f"@{self.revision}" if self.revision else "")).directory
        path = path_below(root, self.file, DictionaryError, folder / CONFIG_YAML)
        if not path.is_file():
            hint = f"fetch it: mizarr features fetch {folder}" if self.repository else "correct the list"
            raise ModelNotFound(f"{self.text}, which {folder / CONFIG_YAML} lists, is not at {path}; {hint}")
        return path


def recognises(files: DictionaryFiles) -> bool:
    """Whether config.yaml has the entry `transcoders`, a list of files."""
    return "transcoders" in files.yaml


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """Layout of the listed transcoders; the shapes in all files are checked, no weights are read.

    Arguments:
        files: Files of the dictionary.
        read: Hook point that features read; None: the one that config.yaml names.
        write: Hook point that features write to; None: the one that config.yaml names.

    Raises:
        DictionaryError: The list is invalid, or files do not fit together.
        ModelNotFound: A listed file is missing.
    """
    apply_fields("listed", files.yaml, files.path(CONFIG_YAML))
    entries = references(files)
    read_kind, write_kind = hooks_of(files, read, write)
    names = [f"layer_{layer}{Path(entry.file).suffix}" for layer, entry in enumerate(entries)]
    links = {name: entry.path(files.directory) for name, entry in zip(names, entries, strict=True)}
    # The listed files get uniform names, so that the readers of their formats apply.
    linked = DictionaryFiles(files.name, files.directory, files.revision, links)
    if _format_module(linked, names[0]) is gemma_scope_2 and gemma_scope_2.is_cross_layer(linked, names[0]):
        return gemma_scope_2.read_clt(linked, names, read_kind, write_kind)
    layer_dictionaries: list[OneLayer] = []
    for layer, name in enumerate(names):
        format_module = _format_module(linked, name)
        layer_dictionaries.append(format_module.part(linked, name, read_kind, write_kind, layer))
    return join(linked, "listed", layer_dictionaries)


def references(files: DictionaryFiles) -> Sequence[Reference]:
    """The files that config.yaml lists, one per layer from 0 on.

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
            f"expected the entry transcoders of {place} to be a list of 1 to {LONGEST_LIST} files "
            f"(config.yaml at most {LARGEST_FILE} bytes), found {description}"
        )
    entries = [_entry(item, layer, place) for layer, item in enumerate(listed)]
    for layer, entry in enumerate(entries):
        # The order of the list defines the layers; a layer number in a path must agree with it.
        numbers = _LAYER.findall(entry.file)
        if numbers and int(numbers[-1]) != layer:
            raise DictionaryError(
                f"expected the transcoders listed in {place} in the order of layers, found {entry.text} "
                f"where the file of layer {layer} belongs; sort the list"
            )
    return entries


def _entry(item: Any, layer: int, place: Path) -> Reference:
    """File that the entry for a layer names; DictionaryError if it names another layer or no file."""
    if isinstance(item, Mapping):  # the oldest layout: {id, layer, filepath}
        if item.get("layer", layer) != layer:
            raise DictionaryError(
                f"expected the transcoders listed in {place} in the order of layers, found layer "
                f"{item['layer']!r} where layer {layer} belongs; sort the list"
            )
        item = item.get("filepath")
    if not isinstance(item, str):
        raise DictionaryError(
            f"expected a file name for layer {layer} in the list of {place}, found {item!r}"
        )
    return Reference(item)


def _format_module(files: DictionaryFiles, name: str) -> Any:
    """Module of the format of a file: gemma_scope, gemma_scope_2 or plt."""
    if name.endswith(".npz"):
        return gemma_scope
    return gemma_scope_2 if "w_enc" in files.shapes(name) else plt
