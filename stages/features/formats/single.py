"""Dictionaries of single layers, and joining them to one dictionary of several layers.

Most formats store each layer separately: a folder, or a file, with its own sizes and hook points. A format
describes each of them as `OneLayer`; `join` makes one dictionary of them after checking that they agree.

Border: sizes, hook points, file names; the layout of a file is defined by its format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ....store.errors import DictionaryError
from ...forward.architectures.points import BY_NAME
from ..layers.files import DictionaryFiles
from ..layers.layout import DictionaryLayout, Opened
from ..layers.names import HOOKS_ADVICE, NamedHook, parse_hook
from .layered import scan_of

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = [
    "LayerByLayer",
    "LayerHooks",
    "OneLayer",
    "StatedHooks",
    "config_beside",
    "files_beside",
    "files_named",
    "layer_hooks",
    "join",
]

_SHOWN = 6
"""Largest number of files that a message lists."""


@dataclass(frozen=True)
class StatedHooks:
    """Layer and hook points of one layer's dictionary, as its files state them."""

    layer: int | None = None
    """Layer number; None if the files omit it."""
    read: str | NamedHook | None = None
    """Hook point that features read, or its name; None if not stated."""
    write: str | NamedHook | None = None
    """Hook point that features write to; None: the same as `read`."""


class LayerHooks(NamedTuple):
    """Kinds of the hook points that the features of one layer read and write."""

    layer: int
    """Layer that the features read."""
    read: str
    """Kind of the input hook point, such as "resid_mid"."""
    write: str
    """Kind of the output hook point."""
    modules: tuple[NamedHook, ...] = ()
    """Those of the two hook points that the files name by a module of transformers."""


@dataclass(frozen=True)
class OneLayer:
    """Description of the dictionary of one layer, made without reading its weights."""

    where: str
    """Name of its folder or file, for messages."""
    hooks: LayerHooks
    """Layer, and kinds of the hook points read and written."""
    n_features: int
    """Number of features."""
    d_in: int
    """Width of the states that are read."""
    d_out: int
    """Width of the states that are written."""
    files: tuple[str, ...]
    """Names of its files."""
    open: Callable[[], LayerFeatures]
    """Function that returns the features with memory-mapped weights."""
    model_name: str | None = None
    """Model name in the configuration; None if unstated."""
    has_skip: bool = False
    """Whether there is a linear skip connection from input to output."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Entries of its configuration that change numbers, as plain values."""

    @property
    def layer(self) -> int:
        """Layer that the features read."""
        return self.hooks.layer

    @property
    def kind(self) -> str:
        """ "sae" if it reads and writes the same hook point, "plt" otherwise."""
        return "sae" if self.hooks.read == self.hooks.write else "plt"


@dataclass(frozen=True)
class LayerByLayer:
    """A file format that stores every layer separately, from two functions of its own."""

    name: str
    """Name of the format."""
    names_of: Callable[[DictionaryFiles], Sequence[str]]
    """Function that lists the file names which stand for one layer each; empty for another format."""
    part: Callable[..., OneLayer]
    """Function (files, name, read, write) that describes the layer of one of these names. `read` and `write`
    are hook points that replace those in the files, or None."""

    def recognises(self, files: DictionaryFiles) -> bool:
        """Whether the files of a dictionary are of this format."""
        return bool(self.names_of(files))

    def read(
        self,
        files: DictionaryFiles,
        *,
        read: str | None = None,
        write: str | None = None,
    ) -> Opened:
        """Layout of the dictionary of all layers.

        Arguments:
            files: Files of the dictionary.
            read: Hook point that features read; None: the one that the files name.
            write: Hook point that features write to; None: the one that the files name.

        Raises:
            DictionaryError: A layer occurs twice, or layers differ in size or hook points.
        """
        parts = [self.part(files, name, read, write) for name in self.names_of(files)]
        return join(files, self.name, parts)


def files_named(files: DictionaryFiles, file_name: str) -> list[str]:
    """Paths of a dictionary's files that are called `file_name`, in any folder."""
    return [name for name in files.listing if name.rpartition("/")[2] == file_name]


def config_beside(files: DictionaryFiles, name: str, config: str) -> tuple[Path, dict[str, Any]]:
    """Path and contents of the JSON file that describes a weight file.

    Arguments:
        files: Files of the dictionary.
        name: The weight file.
        config: Name of the JSON file in the same folder.

    Raises:
        DictionaryError: There is no such file.
    """
    folder, slash, _ = name.rpartition("/")
    beside = f"{folder}{slash}{config}"
    if beside not in files.listing:
        raise DictionaryError(
            f"expected {config} beside {files.path(name)}, found none; fetch the dictionary again"
        )
    return files.path(beside), files.json(beside)


def files_beside(files: DictionaryFiles, mates: Mapping[str, str]) -> list[str]:
    """Paths of the files that have another file, their partner, in the same folder.

    Arguments:
        files: Files of the dictionary.
        mates: Names of files and of their partners, relative to the folder.
    """
    listing, paths = set(files.listing), []
    for name in files.listing:
        folder, slash, file = name.rpartition("/")
        if file in mates and f"{folder}{slash}{mates[file]}" in listing:
            paths.append(name)
    return paths


def join(files: DictionaryFiles, name: str, parts: Iterable[OneLayer], *, zero_positions: int = 1) -> Opened:
    """Layout of one dictionary made of the dictionaries of single layers.

    Arguments:
        files: Files of all layers.
        name: Name of the format.
        parts: The dictionaries of single layers, in any order.
        zero_positions: Number of positions at the start of a prompt that training left out.

    Raises:
        DictionaryError: Two are of the same layer, or they differ in size or hook points.
    """
    # By folder within a layer: the message about duplicates is the same on every file system.
    ordered = sorted(parts, key=lambda part: (part.layer, part.where))
    _refuse_several_per_layer(files, ordered)
    reference = ordered[0]
    for part in ordered[1:]:
        for attribute in ("read", "write", "n_features", "d_in", "d_out"):
            expected, actual = (
                getattr(source.hooks if attribute in ("read", "write") else source, attribute)
                for source in (reference, part)
            )
            if expected != actual:
                raise DictionaryError(
                    f"expected dictionaries of equal {attribute} for all layers in {files.directory}, found "
                    f"{expected!r} in {reference.where} and {actual!r} in {part.where}; open one of these "
                    "folders alone"
                )
    by_layer = {part.layer: part for part in ordered}
    layout = DictionaryLayout(
        format=name,
        kind=reference.kind,
        read=reference.hooks.read,
        write=reference.hooks.write,
        layers=tuple(by_layer),
        targets={layer: (layer,) for layer in by_layer},
        n_features=reference.n_features,
        d_in=reference.d_in,
        d_out=reference.d_out,
        files=tuple(file for part in ordered for file in part.files),
        model_name=reference.model_name,
        scan=scan_of(files),
        has_skip=any(part.has_skip for part in ordered),
        # Per layer, as layers may differ in k or threshold; keys are strings, as in JSON.
        settings={"layers": {str(part.layer): dict(part.settings) for part in ordered}},
        zero_positions=zero_positions,
        modules=tuple(hook for part in ordered for hook in part.hooks.modules),
    )
    return Opened(files, layout, lambda layer: by_layer[layer].open())


def _refuse_several_per_layer(files: DictionaryFiles, parts: Sequence[OneLayer]) -> None:
    """Raise DictionaryError if two of the single-layer dictionaries are of the same layer."""
    for layer in {part.layer for part in parts}:
        duplicates = [part.where for part in parts if part.layer == layer]
        if len(duplicates) > 1:
            more = f" and {len(duplicates) - _SHOWN} more" if len(duplicates) > _SHOWN else ""
            raise DictionaryError(
                f"expected one dictionary per layer in {files.directory}, found {len(duplicates)} of layer "
                f"{layer}: {', '.join(duplicates[:_SHOWN])}{more}; open one of these folders"
            )


def layer_hooks(
    files: DictionaryFiles, stated: StatedHooks, read: str | None, write: str | None
) -> LayerHooks:
    """Layer and hook points of a single-layer dictionary, from its files and from the user.

    If the user names the hook point that an autoencoder reads, it also writes to that one.

    Arguments:
        files: Files of the dictionary, for messages.
        stated: Layer and hook points that the files state.
        read: Hook point that replaces the one read in the files, or None.
        write: Hook point that replaces the one written in the files, or None.

    Raises:
        DictionaryError: Neither caller nor files give the hook point to read, or its layer.
    """
    reads = _parsed(read or stated.read)
    if reads is None:
        raise DictionaryError(
            f"expected the name of the hook point that the features in {files.directory} read, found none in "
            f"its files; {HOOKS_ADVICE}"
        )
    is_autoencoder = stated.write is None or stated.write == stated.read
    writes = _parsed(write or (None if read and is_autoencoder else stated.write)) or reads
    layer = stated.layer if stated.layer is not None else reads.layer
    if layer is None:
        if BY_NAME[reads.kind].per_layer:
            raise DictionaryError(
                f"expected the layer that the features in {files.directory} read, found none in its files; "
                f"{HOOKS_ADVICE}"
            )
        # Hook points outside the blocks (the embedding) count as layer 0.
        layer = 0
    # A dict removes duplicates and keeps the order.
    modules = tuple({hook: None for hook in (reads, writes) if hook.module})
    return LayerHooks(layer, reads.kind, writes.kind, modules)


def _parsed(name: str | NamedHook | None) -> NamedHook | None:
    """Hook point that a name refers to; anything but a text is returned as it is."""
    return parse_hook(name) if isinstance(name, str) else name
