"""Dictionaries of one layer each, and several of them as one.

Most formats keep a layer to itself: a folder, or a file, with sizes and hook points of its own. A format
says what each of them is; `join` makes a dictionary of them, once they agree with each other.

Border: sizes, hook points, file names; how a file is laid out is a format's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ....store.errors import DictionaryError
from ...forward.architectures.points import BY_NAME
from ..layers.files import DictionaryFiles
from ..layers.layout import DictionaryLayout, Opened
from ..layers.names import HOW_TO_SAY, NamedHook, parse_hook
from .layered import scan_of

if TYPE_CHECKING:
    from ..layers.layer import LayerFeatures

__all__ = [
    "LayerByLayer",
    "LayerHooks",
    "OneLayer",
    "SaidHooks",
    "files_beside",
    "files_named",
    "hooks_given",
    "join",
    "to_float",
]

_SHOWN = 6


@dataclass(frozen=True)
class SaidHooks:
    """Where the files of one layer's dictionary say that its features read and write.

    layer: None where they do not say. read, write: names, which are parsed only where the caller gives none,
    or hook points; None where they do not say. A missing `write` is `read`.
    """

    layer: int | None = None
    read: str | NamedHook | None = None
    write: str | NamedHook | None = None


class LayerHooks(NamedTuple):
    """Where the features of one layer read and write. modules: as in `DictionaryLayout`."""

    layer: int
    read: str
    write: str
    modules: tuple[NamedHook, ...] = ()


@dataclass(frozen=True)
class OneLayer:
    """The dictionary of one layer, unopened.

    where: its folder or file within the files, for messages. hooks: its layer, and where it reads and writes.
    open: its features, with mapped weights. settings: what of its configuration changes numbers, as plain
    values.
    """

    where: str
    hooks: LayerHooks
    n_features: int
    d_in: int
    d_out: int
    files: tuple[str, ...]
    open: Callable[[], LayerFeatures]
    model_name: str | None = None
    has_skip: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> int:
        """The layer it reads."""
        return self.hooks.layer

    @property
    def kind(self) -> str:
        """ "sae" where it reads and writes one place, "plt" otherwise."""
        return "sae" if self.hooks.read == self.hooks.write else "plt"


@dataclass(frozen=True)
class LayerByLayer:
    """A format that keeps every layer to itself; its methods are what the module of a format offers.

    found: files that stand for a layer each. part: what one is, of (files, name, read, write).
    """

    name: str
    found: Callable[[DictionaryFiles], Sequence[str]]
    part: Callable[..., OneLayer]

    def recognises(self, files: DictionaryFiles) -> bool:
        """Whether a folder holds such files."""
        return bool(self.found(files))

    def read(
        self,
        files: DictionaryFiles,
        *,
        read: str | None = None,
        write: str | None = None,
    ) -> Opened:
        """The dictionaries of all files found, of which there must be one per layer."""
        parts = [self.part(files, name, read, write) for name in self.found(files)]
        return join(files, self.name, parts)


def files_named(files: DictionaryFiles, wanted: str) -> list[str]:
    """Files of this name, in any folder."""
    return [name for name in files.listing if name.rpartition("/")[2] == wanted]


def files_beside(files: DictionaryFiles, mates: Mapping[str, str]) -> list[str]:
    """Files of the names in `mates`, in any folder that holds the mate as well."""
    held, found = set(files.listing), []
    for name in files.listing:
        folder, slash, file = name.rpartition("/")
        if file in mates and f"{folder}{slash}{mates[file]}" in held:
            found.append(name)
    return found


def join(files: DictionaryFiles, name: str, parts: Iterable[OneLayer], *, zero_positions: int = 1) -> Opened:
    """One dictionary of the layers' own. name: of the format.

    Raises DictionaryError when two are of one layer, listing them, or when they differ in size or hook
    points.
    """
    ordered = sorted(parts, key=lambda part: (part.layer, part.where))
    _require_one_each(files, ordered)
    first = ordered[0]
    for part in ordered[1:]:
        for what in ("read", "write", "n_features", "d_in", "d_out"):
            ours, theirs = (
                getattr(each.hooks if what in ("read", "write") else each, what) for each in (first, part)
            )
            if ours != theirs:
                raise DictionaryError(
                    f"expected dictionaries of one kind in {files.directory}, found {what} {ours!r} in "
                    f"{first.where} and {theirs!r} in {part.where}; open one of them"
                )
    by_layer = {part.layer: part for part in ordered}
    layout = DictionaryLayout(
        format=name,
        kind=first.kind,
        read=first.hooks.read,
        write=first.hooks.write,
        layers=tuple(by_layer),
        targets={layer: (layer,) for layer in by_layer},
        n_features=first.n_features,
        d_in=first.d_in,
        d_out=first.d_out,
        files=tuple(file for part in ordered for file in part.files),
        model_name=first.model_name,
        scan=scan_of(files),
        has_skip=any(part.has_skip for part in ordered),
        settings={"layers": {str(part.layer): dict(part.settings) for part in ordered}},
        zero_positions=zero_positions,
        modules=tuple(hook for part in ordered for hook in part.hooks.modules),
    )
    return Opened(files, layout, lambda layer: by_layer[layer].open())


def _require_one_each(files: DictionaryFiles, parts: Sequence[OneLayer]) -> None:
    for layer in {part.layer for part in parts}:
        found = [part.where for part in parts if part.layer == layer]
        if len(found) > 1:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise DictionaryError(
                f"expected one dictionary per layer in {files.directory}, found {len(found)} of layer "
                f"{layer}: {', '.join(found[:_SHOWN])}{more}; open one of these folders"
            )


def hooks_given(files: DictionaryFiles, said: SaidHooks, read: str | None, write: str | None) -> LayerHooks:
    """Layer and hook kinds of a dictionary of one layer: those of the caller, else those in its files.

    said: hook names and layer in the files. read, write: hook names of the caller, or None. An autoencoder
    that the caller has read another hook point writes there, too.
    Raises DictionaryError where neither gives the hook point that is read, or its layer.
    """
    reads = _named(read or said.read)
    if reads is None:
        raise DictionaryError(
            f"expected files that say where these features read, found none that do in {files.directory}; "
            f"{HOW_TO_SAY}"
        )
    is_autoencoder = said.write is None or said.write == said.read
    writes = _named(write or (None if read and is_autoencoder else said.write)) or reads
    layer = said.layer if said.layer is not None else reads.layer
    if layer is None:
        if BY_NAME[reads.kind].per_layer:
            raise DictionaryError(
                f"expected the layer of these features in {files.directory}, found none; {HOW_TO_SAY}"
            )
        layer = 0
    modules = tuple({hook: None for hook in (reads, writes) if hook.module})
    return LayerHooks(layer, reads.kind, writes.kind, modules)


def _named(name: str | NamedHook | None) -> NamedHook | None:
    return parse_hook(name) if isinstance(name, str) else name


def to_float(value: Any, what: str, place: Any) -> float:
    """A number of a configuration; DictionaryError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DictionaryError(f"expected {what} to be a number in {place}, found {value!r}")
    return float(value)
