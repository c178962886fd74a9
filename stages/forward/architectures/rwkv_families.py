"""Reader of config.json for RWKV, which also needs the shapes of the checkpoint's tensors.

The ranks of low-rank maps are taken from the tensors, as released configs do not state them reliably.
`rescale_every` is a trick for float16 inference that changes nothing in exact arithmetic; it is ignored, so
that the stream has the same scale in all layers.

Border: one config, and names and shapes of tensors; never imports torch.
"""

from __future__ import annotations

from dataclasses import replace

from ....store.errors import ConfigError, WeightsError
from .architecture import FinalNorm
from .composed import ComposedArchitecture, LayerSpec
from .hybrids.mamba_families import FamilyReader, TensorShapes
from .layer_tensors import Spelling
from .rwkv import ChannelMixSpec, Generation, TimeMixSpec
from .rwkv_tensors import RwkvNames, time_mix_tensors
from .transformer import TRY_TRANSFORMERS, ConfigReader

__all__ = ["RWKV"]

HF = Spelling(
    embed="rwkv.embeddings",
    final_norm="rwkv.ln_out",
    head="head",
    layer="rwkv.blocks.{}.",
    ln1="ln1",
    ln2="ln2",
)
"""Tensor names in checkpoints of transformers and of the RWKV organisation."""
NATIVE = replace(
    HF,
    embed="emb",
    final_norm="ln_out",
    layer="blocks.{}.",
    rwkv=RwkvNames(time_mix="att.", channel_mix="ffn.", pre_norm="ln0"),
)
"""Tensor names in checkpoints of RWKV's training code."""
FLA = Spelling(
    embed="model.embeddings",
    final_norm="model.norm",
    layer="model.layers.{}.",
    ln1="attn_norm",
    ln2="ffn_norm",
    rwkv=RwkvNames("attn.", "g_norm", "ffn.", "pre_norm", is_fla=True),
)
"""Tensor names in checkpoints of flash-linear-attention."""


def read_rwkv(reader: ConfigReader, shapes: TensorShapes, generation: Generation) -> ComposedArchitecture:
    """The architecture of an RWKV checkpoint.

    Arguments:
        reader: The config.json.
        shapes: Shapes of the checkpoint's tensors by name.
        generation: Version of RWKV.

    Raises:
        ConfigError: A key is missing, contradicts another key, or asks for a feature that is not implemented.
        WeightsError: A tensor whose shape determines a rank is missing.
    """
    source = reader.source
    if generation == 7:
        _refuse_unsupported(reader)
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    spelling = _spelling(shapes, generation, source)
    width = hidden if generation == 7 else reader.integer("attention_hidden_size", hidden)
    if generation > 4 and width != hidden:
        raise ConfigError(
            f"{source}: expected attention_hidden_size to be hidden_size ({hidden}), found {width}; "
            f"{TRY_TRANSFORMERS}"
        )
    head_size = _head_size(reader, generation, width, shapes)
    eps = reader.number("norm_eps" if generation == 7 else "layer_norm_epsilon", 1e-5)
    # RWKV-5 and 6 divide head outputs by this number before their norm, which scales its epsilon.
    divisor = 1 if generation in (4, 7) else reader.integer("head_size_divisor", 8)
    time_mix_0 = spelling.layer.format(0) + spelling.rwkv.time_mix
    decays = shapes.get(f"{time_mix_0}time_decay", ())
    # RWKV-5.0 has no gate; no config key states the minor version, so the tensors decide.
    has_gate = generation > 5 or (generation == 5 and any(".gate.weight" in name for name in shapes))
    mixer = TimeMixSpec(
        generation,
        heads=width // head_size,
        head_dim=head_size,
        norm_eps=eps * (head_size if generation == 7 else divisor**2),
        ranks=_ranks(shapes, generation, spelling),
        has_gate=has_gate,
        has_decay_per_head=generation == 5 and len(decays) == 1,
    )
    later_mixer = replace(mixer, reads_first_values=generation == 7)
    channel_mixer = ChannelMixSpec(generation, hidden, _intermediate(reader, generation, hidden))
    first_block = LayerSpec((mixer,), channel_mixer, has_pre_norm=reader.flag("norm_first", True))
    if generation == 7:
        # Old files hold a value residual of layer 0, too, which has no earlier layer.
        value_residual = ("rwkv.v0", "rwkv.v1", "rwkv.v2")
        tensors = time_mix_tensors(later_mixer, spelling.rwkv, hidden)
        unread = [stored.name for weight, stored in tensors if weight in value_residual]
        spelling = replace(spelling, unread=tuple(spelling.layer.format(0) + name for name in unread))
    return ComposedArchitecture(
        model_type=reader.raw["model_type"],
        hidden_size=hidden,
        vocab_size=reader.integer("vocab_size"),
        blocks=(first_block, *(LayerSpec((later_mixer,), channel_mixer),) * (layers - 1)),
        spelling=spelling,
        norm_eps=eps,
        norm_type="layer",
        norm_biases="of layer norms" if reader.flag("norm_bias", True) else "none",
        # Up to RWKV-6, transformers' final norm ignores the config and has PyTorch's default epsilon.
        final_norm=FinalNorm() if generation == 7 else FinalNorm(eps=1e-5),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    """Raise ConfigError for settings of RWKV-7 that change results and are not implemented: layers with
    attention, other activation functions, and values of another width."""
    if reader.has("attn"):
        raise ConfigError(
            f"{reader.source}: expected an RWKV-7 without attention layers, found "
            f"attn={reader.raw['attn']!r}; {TRY_TRANSFORMERS}"
        )
    if (act := reader.text("hidden_act", "sqrelu")) != "sqrelu":
        raise ConfigError(
            f"{reader.source}: expected hidden_act of an RWKV-7 to be 'sqrelu', found {act!r}; "
            f"{TRY_TRANSFORMERS}"
        )
    sizes, hidden = reader.raw.get("value_dim"), reader.raw.get("hidden_size")
    size_by_layer = sizes if isinstance(sizes, list) else [sizes]
    if any(size not in (None, hidden) for size in size_by_layer):
        raise ConfigError(
            f"{reader.source}: expected value_dim to be hidden_size ({hidden}) in every layer, found "
            f"{sizes!r}; {TRY_TRANSFORMERS}"
        )


def _spelling(shapes: TensorShapes, generation: Generation, source: str) -> Spelling:
    """Naming scheme of a checkpoint's tensors, recognised by the tensors of layer 0; ConfigError if they fit
    none.

    Arguments:
        shapes: Shapes of the checkpoint's tensors by name.
        generation: Version of RWKV.
        source: Path or name of config.json, for the message.
    """
    layer_0 = FLA.layer.format(0)
    if f"{layer_0}attn.r_proj.weight" in shapes and generation == 7:
        is_fused = f"{layer_0}attn.x_x" in shapes
        return replace(FLA, rwkv=replace(FLA.rwkv, has_fused_mixes=is_fused))
    # Files of the base model lack the prefix.
    if any(name.endswith("blocks.0.attention.key.weight") for name in shapes) and generation < 7:
        return HF
    if f"{NATIVE.layer.format(0)}att.key.weight" in shapes:
        return NATIVE
    first_name = "model.layers.0.attn.r_proj" if generation == 7 else "rwkv.blocks.0.attention.key"
    raise ConfigError(
        f"{source}: expected a checkpoint of RWKV-{generation} with a tensor {first_name}.weight or "
        f"blocks.0.att.key.weight, found the tensors {', '.join(list(shapes)[:3]) or '(none)'}; check that "
        "config.json and weights are of the same model"
    )


def _head_size(reader: ConfigReader, generation: Generation, width: int, shapes: TensorShapes) -> int:
    """Number of channels of a head.

    Configs of RWKV-5 and 6 without the key head_size state it under num_attention_heads, despite that name.

    Arguments:
        reader: The config.json.
        generation: Version of RWKV.
        width: Width of the time mix.
        shapes: Shapes of the checkpoint's tensors by name.

    Raises:
        ConfigError: The head size does not divide the width, or contradicts the number of heads.
    """
    if generation == 4:
        return 1
    if generation == 7:
        size = reader.integer("head_dim", 64)
        heads = reader.optional_integer("num_heads")
        if heads is not None and heads * size != width:
            raise ConfigError(
                f"{reader.source}: expected num_heads * head_dim to be hidden_size ({width}), found "
                f"{heads} * {size}; correct the file, or fetch it again"
            )
    else:
        # The tensor time_faaaa, the bonus of the current token, is [head, channel].
        bonus = next((shape for name, shape in shapes.items() if name.endswith("time_faaaa")), ())
        default = bonus[1] if len(bonus) == 2 else None
        key = "head_size" if reader.has("head_size") else "num_attention_heads"
        size = reader.integer(key, default)
    if width % size:
        raise ConfigError(
            f"{reader.source}: expected the head size to divide the width of the time mix, {width}, found "
            f"{size}; correct the file, or fetch it again"
        )
    return size


def _intermediate(reader: ConfigReader, generation: Generation, hidden: int) -> int:
    """Hidden width of the channel mix, from the config key intermediate_size; for a null or an absent key,
    the default of the version, a multiple of 32.

    Arguments:
        reader: The config.json.
        generation: Version of RWKV.
        hidden: Hidden size of the model.
    """
    if generation == 7:
        ratio = reader.number("hidden_ratio", 4.0)
        default = -(-int(hidden * ratio) // 32) * 32
    else:
        default = 4 * hidden if generation == 4 else int(hidden * 3.5) // 32 * 32
    return reader.optional_integer("intermediate_size", default) or default


def _ranks(shapes: TensorShapes, generation: Generation, spelling: Spelling) -> tuple[tuple[str, int], ...]:
    """(name, rank) of each low-rank map of the time mix, from the shapes of the first layer's tensors that
    has it; () for versions without low-rank maps.

    Arguments:
        shapes: Shapes of the checkpoint's tensors by name.
        generation: Version of RWKV.
        spelling: Names of the checkpoint's tensors.

    Raises:
        WeightsError: A tensor is missing.
    """
    names = spelling.rwkv

    def shape(layer: int, name: str) -> tuple[int, ...]:
        full_name = f"{spelling.layer.format(layer)}{names.time_mix}{name}"
        if full_name not in shapes:
            raise WeightsError(
                f"expected a tensor {full_name!r}, whose shape gives the rank of a low-rank map, found none "
                f"among the checkpoint's {len(shapes)} tensors; the checkpoint is incomplete, so fetch it "
                "again"
            )
        return shapes[full_name]

    if generation < 6:
        return ()
    if generation == 6:
        return (("mix", shape(0, "time_maa_w1")[1] // 5), ("decay", shape(0, "time_decay_w1")[1]))
    # Name of the first matrix of a low-rank map, and the axis of its rank.
    first_matrix, rank_axis = ("{}_lora.lora.0.weight", 0) if names.is_fla else ("{}1", 1)
    # The value residual reads layer 0 and exists from layer 1 on.
    has_two_layers = any(name.startswith(spelling.layer.format(1)) for name in shapes)
    ranks = {name: shape(0, first_matrix.format(name))[rank_axis] for name in "wag"}
    return (*ranks.items(), ("v", shape(1, first_matrix.format("v"))[rank_axis] if has_two_layers else 0))


def _family(generation: Generation, examples: str) -> FamilyReader:
    """Entry of the table `RWKV`: reader and description of one version. examples: well-known models."""
    return FamilyReader(
        lambda reader, shapes: read_rwkv(reader, shapes, generation),
        examples,
        f"none: the state of RWKV-{generation}",
        "token-shifted squared ReLU",
        reads_tensors=True,
        norm="layer norm",
    )


RWKV: dict[str, FamilyReader] = {
    "rwkv": _family(4, "RWKV-4 Dove, Raven"),
    "rwkv5": _family(5, "RWKV-5 Eagle"),
    "rwkv6": _family(6, "RWKV-6 Finch"),
    "rwkv7": _family(7, "RWKV-7 Goose"),
}
"""model_type -> version of RWKV."""
