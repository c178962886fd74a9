"""What the families of encoder-decoders share: their table, checks of a config.json, and the layers.

Border: never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, LayerSpec
from ..mixers import AttentionSpec, CrossAttentionSpec, MlpSpec, RelativeSpec
from ..transformer import ConfigReader

__all__ = ["PAIRS", "PairFamily", "TensorShapes", "family", "pair_layers", "require_complete", "token_id"]

TensorShapes = Mapping[str, tuple[int, ...]]
Build = Callable[[ConfigReader, TensorShapes], ComposedArchitecture]


@dataclass(frozen=True)
class PairFamily:
    """A family of encoder-decoders, and its row in the table of families."""

    build: Build
    """Function (config, shapes of the checkpoint's tensors by name) -> architecture."""
    described: Mapping[str, str]
    """Column name -> text."""


PAIRS: dict[str, PairFamily] = {}
"""model_type -> family."""


def family(
    model_type: str, examples: str, *, norm: str, mlp: str, positions: str
) -> Callable[[Build], Build]:
    """Decorator that registers a function `(config, shapes) -> architecture` in `PAIRS`.

    Arguments:
        model_type: Value of the config key model_type.
        examples: Well-known models of the family.
        norm: Its norms in words, for the table of families.
        mlp: Its MLPs in words.
        positions: Its position embeddings in words.
    """
    row = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    row |= {"attention": f"encoder, decoder, cross-attention; {positions}", "head": "tied or its own"}

    def register(build: Build) -> Build:
        PAIRS[model_type] = PairFamily(build, row)
        return build

    return register


def require_complete(config: ConfigReader, shapes: TensorShapes, cross_attention: str) -> None:
    """Raise ConfigError for a checkpoint of an encoder or a decoder alone.

    Arguments:
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        cross_attention: Name of a tensor of cross-attention, which a complete checkpoint must have.
    """
    if shapes and cross_attention not in shapes:
        raise ConfigError(
            f"{config.source}: expected an encoder with its decoder and LM head, found a checkpoint without "
            f"{cross_attention!r}; load a part by itself with backend='transformers'"
        )


def token_id(config: ConfigReader, key: str, default: int | None) -> int:
    """Token id under a config key.

    Arguments:
        config: The config.json.
        key: The config key.
        default: Token id for an absent key; None for a required key.

    Raises:
        ConfigError: A required key is absent, or its value is no integer >= 0.
    """
    value: Any = config.raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{config.source}: expected {key} to be a token id, found {value!r}; add it")
    return value


def pair_layers(
    attention: AttentionSpec,
    mlp: MlpSpec,
    depths: tuple[int, int],
    *,
    norms: Literal["before", "of sums"] = "before",
    relative: Callable[[int], RelativeSpec] | None = None,
) -> tuple[LayerSpec, ...]:
    """Encoder layers, whose attention is bidirectional, then decoder layers with causal and cross-attention.

    Arguments:
        attention: Sizes and switches that all attention has in common.
        mlp: The MLP of every layer.
        depths: Numbers of encoder and of decoder layers.
        norms: `LayerSpec.norms`.
        relative: Function layer number -> relative position terms of its self-attention; None for none.
    """
    cross = CrossAttentionSpec(replace(attention, part="cross", is_bidirectional=True))
    layers = []
    for layer in range(sum(depths)):
        is_encoder = layer < depths[0]
        spec = replace(
            attention,
            part="source" if is_encoder else "target",
            is_bidirectional=is_encoder,
            relative=None if relative is None else relative(layer),
        )
        layers.append(LayerSpec((spec,), mlp, norms, cross=None if is_encoder else cross))
    return tuple(layers)
