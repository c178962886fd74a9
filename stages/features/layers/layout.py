"""Layout of a dictionary, known before any weight is read, and the names of its features.

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

__all__ = [
    "FeatureId",
    "DictionaryLayout",
    "Opened",
    "CrosscoderPlace",
    "models_of",
]


@dataclass(frozen=True, order=True)
class FeatureId:
    """One feature: layer and index; its text form is "L14:13043"."""

    layer: int
    """Layer that the feature reads."""
    index: int
    """Index of the feature within its layer, from 0."""

    def __post_init__(self) -> None:
        for name in ("layer", "index"):
            value = getattr(self, name)
            # numpy integers would not be JSON values, and bool is a subclass of int.
            if type(value) is not int:
                object.__setattr__(self, name, as_index(value, f"a feature's {name}", DictionaryError))

    def __str__(self) -> str:
        return f"L{self.layer}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> FeatureId:
        """Parse "L14:13043" or "14:13043"; DictionaryError for other text."""
        layer, colon, index = text.strip().removeprefix("L").partition(":")
        if not (colon and layer.isdecimal() and index.isdecimal()):
            raise DictionaryError(f"expected a feature as layer:index, such as L14:13043, found {text!r}")
        return cls(int(layer), int(index))


@dataclass(frozen=True)
class CrosscoderPlace:
    """A model and a hook point in it that a crosscoder reads and writes."""

    model: str
    """Name of the model."""
    hook: str
    """Hook point, such as "blocks.3.hook_resid_post"."""
    scale: float
    """Factor of the states in training, for equal size at all places."""

    def __str__(self) -> str:
        return f"{self.model} {self.hook}"


def models_of(places: Iterable[CrosscoderPlace]) -> tuple[int, ...]:
    """Model number of each crosscoder place, from 0 in place order.

    Names of models cannot tell, since a model may be compared with itself: a hook point that occurs for the
    second time belongs to the second model.
    """
    previous_hooks: list[str] = []
    numbers = []
    for place in places:
        numbers.append(previous_hooks.count(place.hook))
        previous_hooks.append(place.hook)
    return tuple(numbers)


@dataclass(frozen=True)
class DictionaryLayout:
    """Properties of a dictionary, read from headers and configurations without any weights."""

    format: str
    """Name of the file format (formats/table.py)."""
    kind: str
    """One of "clt", "plt", "sae", "crosscoder"."""
    read: str
    """Kind of the hook points that features read."""
    write: str
    """Kind of the hook points that features write to."""
    layers: tuple[int, ...]
    """Layers that features read, ascending; for a crosscoder only the last of the layers it reads."""
    targets: Mapping[int, tuple[int, ...]]
    """By layer that is read, the layers that its features write to; for a crosscoder, in its first model."""
    n_features: int
    """Number of features per layer."""
    d_in: int
    """Input width; for a crosscoder the width per place."""
    d_out: int
    """Output width."""
    files: tuple[str, ...]
    """Names of the files that hold weights and configuration."""
    model_name: str | None = None
    """Name of the language model used in training; None if the files omit it."""
    scan: Any = None
    """Entry `scan` of circuit-tracer's config.yaml: its name for the dictionary; None if absent."""
    has_skip: bool = False
    """Whether there is a linear skip connection from input to output."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the configuration that change numbers, as plain values; part of the identity."""
    zero_positions: int = 1
    """Number of positions at the start of a prompt that training left out, such as that of the BOS token."""
    places: tuple[CrosscoderPlace, ...] = ()
    """Places that a crosscoder's features read; empty for other kinds."""
    modules: tuple[NamedHook, ...] = ()
    """Hook points that the files name by modules of transformers ("model.layers.12.mlp")."""


class Opened(NamedTuple):
    """A dictionary as its format opens it: arguments of `Dictionary`."""

    files: DictionaryFiles
    """Source files of the dictionary."""
    layout: DictionaryLayout
    """Kind, hook points, layers and sizes."""
    open_layer: Callable[[int], LayerFeatures]
    """Function from a layer number to the features that read this layer, with memory-mapped weights."""
