"""Readers of config.json for Zamba and Zamba2: Mamba layers, some of them preceded by a shared block.

Semantics and defaults are those of Hugging Face transformers; helpers shared with other
state-space models are in mamba_families.py.

Border: one config; never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .....store.errors import ConfigError
from ..composed import ComposedArchitecture, LayerSpec
from ..families import confirm_derived
from ..layer_tensors import Spelling
from ..mixers import AttentionSpec, Mamba2Spec, MambaSpec, MlpSpec, SharedBlockSpec
from ..transformer import TRY_TRANSFORMERS, ConfigReader, RopeConfig
from .mamba_families import (
    FamilyReader,
    TensorShapes,
    activation_of,
    checked,
    expanded,
    layer_types_of,
    rank_of,
    require_silu,
    rope_of,
)

__all__ = ["ZAMBA"]

LONG_CONTEXT = 16384
"""Context of a Zamba2 with `use_long_context`, in positions."""


def _zamba(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Zamba: Mamba-1 with groups of channels, and one shared block of attention and MLP."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads", 16)
    require_silu(reader, "hidden_mamba_act")
    width = reader.integer("attention_hidden_size", 2 * hidden)
    if width != 2 * hidden:
        raise ConfigError(
            f"{reader.source}: expected attention_hidden_size to be twice hidden_size, {2 * hidden}, as "
            f"attention reads stream and embedding side by side, found {width}; correct the file, or fetch "
            "it again"
        )
    mamba = MambaSpec(
        channels=expanded(reader, "mamba_expand", hidden),
        state_size=reader.integer("mamba_d_state", 16),
        conv_size=reader.integer("mamba_d_conv", 4),
        rank=rank_of(reader, "mamba_dt_rank", hidden),
        has_bias=reader.flag("mamba_proj_bias", False),
        has_conv_bias=reader.flag("mamba_conv_bias", True),
        groups=reader.integer("n_mamba_heads", 2),
        layout="by group",
    )
    kv_heads, head_dim = (
        reader.integer("num_key_value_heads", 16),
        reader.integer("attention_head_dim", 2 * hidden // heads),
    )
    attention = _attention(heads, kv_heads, head_dim, rope=None)
    mlp = MlpSpec(reader.integer("intermediate_size", 14848), activation_of(reader, "hidden_act", "gelu"))
    period, offset = reader.integer("attn_layer_period", 6), reader.integer("attn_layer_offset", 4, least=0)
    # transformers' default pattern has three fixed layers, then the period.
    n_periodic = reader.integer("num_hidden_layers", 76) - 3
    periodic = ["hybrid" if i % period == offset else "mamba" for i in range(n_periodic)]
    types = _types(reader, ["mamba", "mamba", "hybrid", *periodic])
    eps, sharing = reader.number("rms_norm_eps", 1e-5), _Sharing.of(reader, types, count=1)
    plain = LayerSpec((mamba,))
    blocks = tuple(
        replace(plain, shared=SharedBlockSpec(hidden, attention, mlp, sharing.source(layer), norm_eps=eps))
        if kind == "hybrid"
        else plain
        for layer, kind in enumerate(types)
    )
    return _config(
        reader,
        blocks,
        Spelling(blocks=("shared_transf.", "mamba_decoder.")),
        reader.integer("max_position_embeddings", 4096),
    )


def _zamba2(reader: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Zamba2: Mamba-2, and several shared blocks of attention and MLP used in turn, to which
    each layer adds its own low-rank adapters."""
    hidden, heads = reader.integer("hidden_size", 2560), reader.integer("num_attention_heads", 32)
    head_dim, eps = 2 * hidden // heads, reader.number("rms_norm_eps", 1e-5)
    context = reader.integer("max_position_embeddings", 4096)
    if reader.flag("use_long_context", False):
        context = LONG_CONTEXT
    rope = None
    if reader.flag("use_mem_rope", False):
        with_context = ConfigReader(reader.raw | {"max_position_embeddings": context}, reader.source)
        rope = rope_of(with_context, head_dim, context)
    attention = _attention(heads, reader.integer("num_key_value_heads", heads), head_dim, rope)
    adapts = reader.flag("use_shared_attention_adapter", False)
    # Adapters of queries, keys and values all have the shape [2 hidden, 2 hidden].
    if adapts and (attention.num_kv_heads != heads or heads * head_dim != 2 * hidden):
        raise ConfigError(
            f"{reader.source}: expected as many key heads as query heads, with {2 * hidden} entries in all "
            f"of them together, as use_shared_attention_adapter is true, found {heads} query heads and "
            f"{attention.num_kv_heads} key heads of {head_dim} entries; {TRY_TRANSFORMERS}"
        )
    bias = reader.flag("add_bias_linear", False)
    mlp = MlpSpec(
        reader.integer("intermediate_size", 4 * hidden),
        activation_of(reader, "hidden_act", "gelu"),
        is_fused=True,
        has_bias=bias,
    )
    mamba, rank = _mamba2(reader, hidden, has_bias=bias), reader.integer("adapter_rank", 128)
    types = _types(reader, _ZAMBA2_TYPES)
    sharing = _Sharing.of(reader, types, count=reader.integer("num_mem_blocks", 1))

    def block(layer: int, kind: str) -> LayerSpec:
        if kind != "hybrid":
            return LayerSpec((mamba,))
        shared = SharedBlockSpec(
            hidden,
            attention,
            mlp,
            sharing.source(layer),
            sharing.layers.index(layer),
            sharing.listed(layer),
            rank,
            adapts,
            norm_eps=eps,
        )
        return LayerSpec((mamba,), shared=shared)

    blocks = tuple(block(layer, kind) for layer, kind in enumerate(types))
    return _config(reader, blocks, Spelling(mlp_parts=("gate_up_proj", "down_proj")), context)


@dataclass(frozen=True)
class _Sharing:
    """Which layers of a Zamba share which block of attention and MLP: `count` blocks are used in turn."""

    layers: tuple[int, ...]
    """Numbers of the layers with a shared block."""
    count: int
    """Number of different blocks."""
    is_tied: bool
    """Whether layers share blocks at all; otherwise each layer stores a block of its own."""

    @classmethod
    def of(cls, reader: ConfigReader, types: list[str], *, count: int) -> _Sharing:
        """Sharing of `count` blocks among the layers whose type is "hybrid". In transformers,
        tie_word_embeddings=false also gives each layer a block of its own.

        Arguments:
            reader: The config.json.
            types: Type of each layer.
            count: Number of different blocks.
        """
        layers = tuple(layer for layer, kind in enumerate(types) if kind == "hybrid")
        return cls(layers, count, reader.flag("tie_word_embeddings", True))

    def source(self, layer: int) -> int:
        """Number of the layer among whose tensors the block of `layer` is stored."""
        return self.layers[self.layers.index(layer) % self.count] if self.is_tied else layer

    def listed(self, layer: int) -> tuple[int, ...]:
        """Indices, among the layers with a shared block, of all layers that share the block of layer number
        `layer`."""
        return tuple(range(self.layers.index(layer) % self.count, len(self.layers), self.count))


def _mamba2(reader: ConfigReader, hidden: int, *, has_bias: bool) -> Mamba2Spec:
    """Sizes and switches of Zamba2's Mamba-2 mixers; ConfigError if the number of heads does not divide the
    channels.

    Arguments:
        reader: The config.json.
        hidden: Hidden size of the model.
        has_bias: Whether input and output projections have biases.
    """
    heads, channels = reader.integer("n_mamba_heads", 8), expanded(reader, "mamba_expand", hidden)
    if channels % heads:
        raise ConfigError(
            f"{reader.source}: expected n_mamba_heads to divide {channels} channels, found {heads}; correct "
            "the file, or fetch it again"
        )
    return Mamba2Spec(
        heads=heads,
        head_dim=channels // heads,
        groups=reader.integer("mamba_ngroups", 1),
        state_size=reader.integer("mamba_d_state", 64),
        conv_size=reader.integer("mamba_d_conv", 4),
        limits=(reader.number("time_step_min", 0.001), None),
        norm_eps=1e-5,  # transformers ignores rms_norm_eps here
        has_bias=has_bias,
        has_out_bias=has_bias,
    )


def _attention(heads: int, kv_heads: int, head_dim: int, rope: RopeConfig | None) -> AttentionSpec:
    """Sizes and switches of the attention of a shared block, whose scores are scaled by 1 / sqrt(head_dim /
    2)."""
    return AttentionSpec(heads, kv_heads, head_dim, rope, scale=1 / math.sqrt(head_dim / 2))


def _types(reader: ConfigReader, default: list[str]) -> list[str]:
    """Type of each layer of a Zamba: "mamba", or "hybrid" for a layer with a shared block before its mixer.
    default: types if the config lists none."""
    key = "layer_types" if reader.has("layer_types") else "layers_block_type"
    types = layer_types_of(reader, key, default, ("mamba", "hybrid"))
    # transformers writes the list of hybrid layers next to their types.
    confirm_derived(reader, "hybrid_layer_ids", [i for i, kind in enumerate(types) if kind == "hybrid"])
    return types


_ZAMBA2_TYPES = ["mamba", *(["mamba"] * 5 + ["hybrid"]) * 7]
_ZAMBA2_TYPES += [*["mamba"] * 4, "hybrid", *["mamba"] * 3, "hybrid", *["mamba"] * 2]
"""Types of the layers of a Zamba2 whose config lists none."""


def _config(
    reader: ConfigReader, blocks: tuple[LayerSpec, ...], spelling: Spelling, context: int
) -> ComposedArchitecture:
    """Architecture of a Zamba, from its layers, its tensor names and the largest length of a prompt, in
    tokens."""
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=reader.integer("hidden_size"),
        vocab_size=reader.integer("vocab_size", 32000),
        blocks=tuple(checked(reader, block) for block in blocks),
        spelling=spelling,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        max_position_embeddings=context,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


ZAMBA: dict[str, FamilyReader] = {
    "zamba": FamilyReader(
        _zamba,
        "Zamba 7B",
        "Mamba-1 with groups of channels; before some layers a shared block: attention without rope",
        "gated GELU, in the shared block",
        head="tied",
    ),
    "zamba2": FamilyReader(
        _zamba2,
        "Zamba2 1.2B to 7B",
        "Mamba-2; before some layers a shared block: attention, with low-rank adapters per layer",
        "gated GELU, in the shared block",
        head="tied",
    ),
}
"""model_type -> family, for Zamba and Zamba2."""
