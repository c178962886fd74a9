"""What is known of a dictionary before any weight is read, and how its features are named.

Border: plain values, made by formats from headers and configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ....store.arrays import as_index
from ....store.errors import DictionaryError

if TYPE_CHECKING:
    from .files import DictionaryFiles
    from .layer import LayerFeatures
    from .names import NamedHook

__all__ = ["FeatureId", "DictionaryLayout", "Opened", "CrosscoderPlace", "models_of", "told"]


@dataclass(frozen=True, order=True)
class FeatureId:
    """One feature; prints as "L14:13043"."""

    layer: int
    index: int

    def __post_init__(self) -> None:
        for name in ("layer", "index"):
            value = getattr(self, name)
            if type(value) is not int:
                object.__setattr__(self, name, as_index(value, f"a feature's {name}", DictionaryError))

    def __str__(self) -> str:
        return f"L{self.layer}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> FeatureId:
        """From "L14:13043" or "14:13043"; DictionaryError otherwise."""
        layer, colon, index = text.strip().removeprefix("L").partition(":")
        if not (colon and layer.isdecimal() and index.isdecimal()):
            raise DictionaryError(f"expected a feature as layer:index, such as L14:13043, found {text!r}")
        return cls(int(layer), int(index))


@dataclass(frozen=True)
class CrosscoderPlace:
    """Where a crosscoder reads and writes. scale: by which states there are as large as at other places."""

    model: str
    hook: str
    scale: float

    def __str__(self) -> str:
        return f"{self.model} {self.hook}"


def models_of(places: Iterable[CrosscoderPlace]) -> tuple[int, ...]:
    """Number of the model of each place. Names do not tell, as a model may stand against itself: a hook point
    that is there again is that of the next model.
    """
    before: list[str] = []
    found = []
    for place in places:
        found.append(before.count(place.hook))
        before.append(place.hook)
    return tuple(found)


@dataclass(frozen=True)
class DictionaryLayout:
    """What a format knows of a dictionary before any weight is read.

    read, write: hook kinds. layers: those that are read. targets: layer -> layers its features write to.
    n_features: of each layer. settings: what else of the configuration changes numbers, as plain values;
    part of the identity. zero_positions: how many first positions of a prompt it has nothing to say about.
    places: of a crosscoder, whose features read all of them; d_in is the width of one, the last layer is
    theirs, and targets are the first model's. modules: hook points that stand for modules of transformers,
    which files name instead of them.
    """

    format: str
    kind: str
    read: str
    write: str
    layers: tuple[int, ...]
    targets: Mapping[int, tuple[int, ...]]
    n_features: int
    d_in: int
    d_out: int
    files: tuple[str, ...]
    model_name: str | None = None
    scan: Any = None
    has_skip: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    zero_positions: int = 1
    places: tuple[CrosscoderPlace, ...] = ()
    modules: tuple[NamedHook, ...] = ()


class Opened(NamedTuple):
    """Files of a dictionary as a format reads them; open_layer: the features that read a layer, mapped."""

    files: DictionaryFiles
    layout: DictionaryLayout
    open_layer: Callable[[int], LayerFeatures]


def told(layers: Iterable[int]) -> str:
    """Layers in words: "layers 0 to 15", "layers 3, 7, 12", "layer 5"."""
    found = sorted(layers)
    if len(found) == 1:
        return f"layer {found[0]}"
    if found == list(range(found[0], found[-1] + 1)):
        return f"layers {found[0]} to {found[-1]}"
    return f"layers {', '.join(map(str, found))}"
