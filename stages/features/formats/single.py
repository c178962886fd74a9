"""Single-layer dictionaries, and joining them to a multi-layer dictionary.

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
"""Number of files listed in a message."""


@dataclass(frozen=True)
class StatedHooks:
    """Hook points of one layer's dictionary as its files state them."""

    layer: int | None = None
    """Layer number; None if the files omit it."""
    read: str | NamedHook | None = None
    """Hook point that features read, None if not stated. A name is parsed only if the caller gives none."""
    write: str | NamedHook | None = None
    """Hook point that features write to; None: the same as `read`."""


class LayerHooks(NamedTuple):
    """Kinds of the hook points that the features of one layer read and write."""

    layer: int
    """Layer that the features read."""
    read: str
    """Kind of the hook point that they read."""
    write: str
    """Kind of the hook point that they write to."""
    modules: tuple[NamedHook, ...] = ()
    """Hook points that stand for modules of transformers, as in `DictionaryLayout`."""


@dataclass(frozen=True)
class OneLayer:
    """The dictionary of one layer; weights are not open."""

    where: str
    """Its folder or file within the files, for messages."""
    hooks: LayerHooks
    """Its layer and hook kinds."""
    n_features: int
    """Number of features."""
    d_in: int
    """Width of the states that are read."""
    d_out: int
    """Width of the states that are written."""
    files: tuple[str, ...]
    """Names of its files."""
    open: Callable[[], LayerFeatures]
    """Returns its features with memory-mapped weights."""
    model_name: str | None = None
    """Name of the model in its configuration; None if not stated."""
    has_skip: bool = False
    """Whether there is a linear skip from input to output."""
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
    """A format that stores every layer separately; modules of formats export its methods."""

    name: str
    """Name of the format."""
    names_of: Callable[[DictionaryFiles], Sequence[str]]
    """Lists the file names that represent one layer each."""
    part: Callable[..., OneLayer]
    """Describes one of them: (files, name, read, write) -> OneLayer. read and write: hook points given by the
    caller in place of those in the files, or None."""

    def recognises(self, files: DictionaryFiles) -> bool:
        """Whether a folder holds files of this format."""
        return bool(self.names_of(files))

    def read(
        self,
        files: DictionaryFiles,
        *,
        read: str | None = None,
        write: str | None = None,
    ) -> Opened:
        """Read all layers and join them.

        Arguments:
            files: Files of the dictionary.
            read: Hook point that features read, in place of that in the files; None for that in the files.
            write: Hook point that features write to, likewise.

        Raises:
            DictionaryError: A layer occurs twice, or layers differ in size or hook points.
        """
        parts = [self.part(files, name, read, write) for name in self.names_of(files)]
        return join(files, self.name, parts)


def files_named(files: DictionaryFiles, file_name: str) -> list[str]:
    """Paths of the files with this name, in any folder."""
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
        raise DictionaryError(f"expected {config} beside {files.path(name)}, found none; fetch it again")
    return files.path(beside), files.json(beside)


def files_beside(files: DictionaryFiles, mates: Mapping[str, str]) -> list[str]:
    """Paths of files with a partner in the same folder.

    Arguments:
        files: Files of the dictionary.
        mates: Name of the file -> name of its partner.
    """
    listing, paths = set(files.listing), []
    for name in files.listing:
        folder, slash, file = name.rpartition("/")
        if file in mates and f"{folder}{slash}{mates[file]}" in listing:
            paths.append(name)
    return paths


def join(files: DictionaryFiles, name: str, parts: Iterable[OneLayer], *, zero_positions: int = 1) -> Opened:
    """One dictionary of all layers.

    Arguments:
        files: Their files.
        name: Name of the format.
        parts: The layers' dictionaries.
        zero_positions: As in `DictionaryLayout`.

    Raises:
        DictionaryError: Two are of the same layer, or they differ in size or hook points.
    """
    # By folder within a layer: the message about duplicates is the same on every file system.
    ordered = sorted(parts, key=lambda part: (part.layer, part.where))
    _require_one_each(files, ordered)
    reference = ordered[0]
    for part in ordered[1:]:
        for attribute in ("read", "write", "n_features", "d_in", "d_out"):
            expected, actual = (
                getattr(source.hooks if attribute in ("read", "write") else source, attribute)
                for source in (reference, part)
            )
            if expected != actual:
                raise DictionaryError(
                    f"expected dictionaries of one kind in {files.directory}, found {attribute} "
                    f"{expected!r} in {reference.where} and {actual!r} in {part.where}; open one of them"
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


def _require_one_each(files: DictionaryFiles, parts: Sequence[OneLayer]) -> None:
    """Raise DictionaryError if two parts are of the same layer."""
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
    """Layer and hook kinds of a single-layer dictionary; names given by the caller override names in the
    files.

    An autoencoder whose read hook the caller overrides also writes to that hook.

    Arguments:
        files: Its files, for messages.
        stated: Layer and hook names in the files.
        read: Hook name given by the caller, or None.
        write: Hook name given by the caller, or None.

    Raises:
        DictionaryError: Neither caller nor files give the hook point to read, or its layer.
    """
    reads = _named(read or stated.read)
    if reads is None:
        raise DictionaryError(
            f"expected files that say where these features read, found none that do in {files.directory}; "
            f"{HOOKS_ADVICE}"
        )
    is_autoencoder = stated.write is None or stated.write == stated.read
    writes = _named(write or (None if read and is_autoencoder else stated.write)) or reads
    layer = stated.layer if stated.layer is not None else reads.layer
    if layer is None:
        if BY_NAME[reads.kind].per_layer:
            raise DictionaryError(
                f"expected the layer of these features in {files.directory}, found none; {HOOKS_ADVICE}"
            )
        # Hook points outside the blocks (the embedding) count as layer 0.
        layer = 0
    # A dict removes duplicates and keeps the order.
    modules = tuple({hook: None for hook in (reads, writes) if hook.module})
    return LayerHooks(layer, reads.kind, writes.kind, modules)


def _named(name: str | NamedHook | None) -> NamedHook | None:
    """Hook point of a name, if it is one."""
    return parse_hook(name) if isinstance(name, str) else name
