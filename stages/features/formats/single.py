"""Dictionaries of one layer each, and several of them as one.

Most formats keep a layer to itself: a folder, or a file, with sizes and hook points of its own. A format
says what each of them is; `join` makes a dictionary of them, once they agree with each other.

Border: sizes, hook points, file names; how a file is laid out is a format's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError
from ..layers.files import DictionaryFiles
from ..layers.layout import DictionaryLayout, Opened
from ..layers.names import hook_kind
from .layered import scan_of

if TYPE_CHECKING:
    import torch

    from ..layers.layer import LayerFeatures

__all__ = ["LayerByLayer", "OneLayer", "files_beside", "files_named", "hooks_given", "join", "to_float"]

_SHOWN = 6


@dataclass(frozen=True)
class OneLayer:
    """The dictionary of one layer, unopened.

    where: its folder or file within the files, for messages. read, write: hook kinds. open: its features,
    with mapped weights. settings: what of its configuration changes numbers, as plain values.
    """

    where: str
    layer: int
    read: str
    write: str
    n_features: int
    d_in: int
    d_out: int
    files: tuple[str, ...]
    open: Callable[[], LayerFeatures]
    model_name: str | None = None
    has_skip: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """ "sae" where it reads and writes one place, "plt" otherwise."""
        return "sae" if self.read == self.write else "plt"


@dataclass(frozen=True)
class LayerByLayer:
    """A format that keeps every layer to itself; its methods are what the module of a format offers.

    found: files that stand for a layer each. part: what one is, of (files, name, read, write, device).
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
        device: torch.device | str = "cpu",
    ) -> Opened:
        """The dictionaries of all files found, of which there must be one per layer."""
        parts = [self.part(files, name, read, write, device) for name in self.found(files)]
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
            ours, theirs = getattr(first, what), getattr(part, what)
            if ours != theirs:
                raise DictionaryError(
                    f"expected dictionaries of one kind in {files.directory}, found {what} {ours!r} in "
                    f"{first.where} and {theirs!r} in {part.where}; open one of them"
                )
    by_layer = {part.layer: part for part in ordered}
    layout = DictionaryLayout(
        format=name,
        kind=first.kind,
        read=first.read,
        write=first.write,
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


def hooks_given(
    files: DictionaryFiles, said: tuple[str | None, str | None], read: str | None, write: str | None
) -> tuple[str, str]:
    """Hook kinds that are read and written: as asked for, else as the files say. A missing `write` is `read`.

    said: kinds the files give. Raises DictionaryError when nobody says what is read.
    """
    reads = hook_kind(read) if read else said[0]
    if reads is None:
        raise DictionaryError(
            f"nothing in {files.directory} says where these features read; pass read= the hook point, for "
            "example read='hook_resid_post' (and write= where they write to another)"
        )
    if write:
        return reads, hook_kind(write)
    return reads, said[1] or reads


def to_float(value: Any, what: str, place: Any) -> float:
    """A number of a configuration; DictionaryError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DictionaryError(f"expected {what} to be a number in {place}, found {value!r}")
    return float(value)
