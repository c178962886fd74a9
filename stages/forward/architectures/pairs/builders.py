"""Functions that the families of encoder-decoders share: the table of families, checks of a config.json, and
layers.

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

__all__ = [
    "PAIRS",
    "PairFamily",
    "TensorShapes",
    "encoder_alone",
    "family",
    "pair_layers",
    "require_complete",
    "token_id",
]

TensorShapes = Mapping[str, tuple[int, ...]]
Build = Callable[[ConfigReader, TensorShapes], ComposedArchitecture]


@dataclass(frozen=True)
class PairFamily:
    """A family of encoder-decoders, and its row in the table of families."""

    build: Build
    """Function (config.json, shapes of the checkpoint's tensors by name) -> architecture."""
    described: Mapping[str, str]
    """The family's row in the table of families: column name -> text."""


PAIRS: dict[str, PairFamily] = {}
"""model_type -> family, for all encoder-decoders."""


def family(
    model_type: str, examples: str, *, norm: str, mlp: str, positions: str
) -> Callable[[Build], Build]:
    """Decorator that registers a function (config.json, shapes of tensors) -> architecture in the table
    `PAIRS`.

    Arguments:
        model_type: Value of the config key model_type.
        examples: Well-known models of the family.
        norm: Text about its norms, for the table of families.
        mlp: Text about its MLPs, for that table.
        positions: Text about its position embeddings, for that table.
    """
    row = {"model_type": model_type, "examples": examples, "norm": norm, "mlp": mlp}
    row |= {"attention": f"encoder, decoder, cross-attention; {positions}", "head": "tied or its own"}

    def register(build: Build) -> Build:
        PAIRS[model_type] = PairFamily(build, row)
        return build

    return register


def require_complete(config: ConfigReader, shapes: TensorShapes, cross_attention: str) -> None:
    """Raise ConfigError for a checkpoint with only the encoder, or only the decoder, of an encoder-decoder
    model.

    Arguments:
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.
        cross_attention: Name of a tensor of cross-attention, which a complete checkpoint must have.
    """
    # Files of a base model lack the prefix.
    if shapes and not any(name.endswith(cross_attention.removeprefix("model.")) for name in shapes):
        raise ConfigError(
            f"{config.source}: expected a checkpoint with encoder and decoder, found one without "
            f"the tensor {cross_attention!r}; for an encoder or a decoder alone, use backend='transformers', "
            "or --backend transformers"
        )


def token_id(config: ConfigReader, key: str, default: int | None) -> int:
    """The token id that a config key gives.

    Arguments:
        config: The config.json.
        key: The config key.
        default: Token id for an absent key; None for a required key.

    Raises:
        ConfigError: A required key is absent, or its value is no integer >= 0.
    """
    value: Any = config.raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{config.source}: expected {key} to be a token id, an integer from 0, found {value!r}; add it "
            "to the file"
        )
    return value


def pair_layers(
    attention: AttentionSpec,
    mlp: MlpSpec,
    depths: tuple[int, int],
    *,
    norms: Literal["before", "of sums"] = "before",
    relative: Callable[[int], RelativeSpec] | None = None,
) -> tuple[LayerSpec, ...]:
    """Specs of the encoder layers, whose attention is bidirectional, then of the decoder layers, with causal
    and cross-attention.

    Arguments:
        attention: Sizes and switches that the attention of all layers has in common.
        mlp: The MLP of every layer.
        depths: Number of encoder layers, and number of decoder layers.
        norms: Place of the norms in a layer (`LayerSpec.norms`).
        relative: Function (number of a layer) -> relative position terms of its self-attention; None for a
            model without such terms.
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


def encoder_alone(model: ComposedArchitecture) -> ComposedArchitecture:
    """The encoder of an encoder-decoder as a model of its own, whose prompts are plain sequences."""
    pair, names = model.pair, model.spelling.pair
    assert pair is not None  # the families of this folder set both
    assert names is not None
    layers = []
    for block in model.blocks[: pair.encoder_layers]:
        attention = (mixer for mixer in block.mixers if isinstance(mixer, AttentionSpec))
        layers.append(replace(block, mixers=tuple(replace(mixer, part=None) for mixer in attention)))
    spelling = replace(model.spelling, pair=None, final_norm=names.memory_norm, unread=())
    return replace(model, blocks=tuple(layers), pair=None, spelling=spelling)
