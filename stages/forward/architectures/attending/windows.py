"""Which layers have a window, and which turn queries and keys: rules that families share.

Border: one config and a number of layers; never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .....store.errors import ConfigError
from ..transformer import ConfigReader
from .family import Windows

__all__ = [
    "all_whole",
    "alternating_windows_below",
    "but_every",
    "flags_of_rope",
    "in_windows",
    "in_windows_if_any",
    "none_in_every",
    "windows_in_upper_layers",
]


def but_every(default: int, key: str = "sliding_window_pattern") -> Callable[[ConfigReader, int], list[str]]:
    """A window in all layers but every n-th. key: which says n; "" for none."""

    def types(reader: ConfigReader, layers: int) -> list[str]:
        every = reader.integer(key, default) if key else default
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]

    return types


def none_in_every(period: int) -> Callable[[ConfigReader, int], list[str]]:
    """A window in all layers but the first of every few."""

    def types(reader: ConfigReader, layers: int) -> list[str]:
        return ["sliding_attention" if layer % period else "full_attention" for layer in range(layers)]

    return types


def all_whole(reader: ConfigReader, layers: int) -> list[str]:
    """No window, where none are listed."""
    return ["full_attention"] * layers


def windows_in_upper_layers(usual: int) -> Callable[[ConfigReader, int], list[str]]:
    """A window in all layers from some one on. usual: which, where the config does not say."""

    def types(reader: ConfigReader, layers: int) -> list[str]:
        first = reader.integer("max_window_layers", usual, least=0)
        return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]

    return types


def alternating_windows_below(usual: int) -> Callable[[ConfigReader, int], list[str]]:
    """A window in every second layer from the first on, below some layer. usual: which, where the config does
    not say."""

    def types(reader: ConfigReader, layers: int) -> list[str]:
        end = reader.integer("max_window_layers", usual, least=0)
        return [
            "sliding_attention" if layer % 2 == 0 and layer < end else "full_attention"
            for layer in range(layers)
        ]

    return types


def flags_of_rope(reader: ConfigReader, layers: int) -> list[bool]:
    """no_rope_layers lists 1 where there is rope; without it, all but every n-th layer."""
    listed = reader.raw.get("no_rope_layers")
    reader.read |= {"no_rope_layers", "no_rope_layer_interval"}
    if not listed:
        every = reader.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % every) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(each not in (0, 1) for each in listed):
        raise ConfigError(
            f"{reader.source}: expected no_rope_layers to list 0 or 1 for each of {layers} layers, found "
            f"{listed!r}; correct the file, or fetch it again"
        )
    return [bool(each) for each in listed]


def in_windows(reader: ConfigReader, windows: Windows) -> Sequence[bool]:
    """Layers with a window turn queries and keys; those that see everything know no positions."""
    return [window is not None for window in windows]


def in_windows_if_any(reader: ConfigReader, windows: Windows) -> Sequence[bool]:
    """The same, but all layers turn in a model without windows."""
    return in_windows(reader, windows) if reader.raw.get("sliding_window", 4096) else [True] * len(windows)
