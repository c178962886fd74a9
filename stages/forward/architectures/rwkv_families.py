"""How the config.json of an RWKV checkpoint is read, with the shapes of its tensors where it is silent.

Ranks of low-rank maps stand in no released config in a way that can be trusted: they are those of the
tensors. `rescale_every` is a trick of float16 inference that changes nothing in exact arithmetic; it is read
and not followed, so that the stream is in the units of the weights everywhere.

Border: one config and names and shapes of tensors; never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....store.errors import ConfigError, WeightsError
from .families import refuse_unfollowed
from .rwkv import Generation, RwkvConfig
from .rwkv_tensors import LAYER, Spelling
from .transformer import ConfigReader

__all__ = ["RWKV", "read_rwkv"]

RWKV: dict[str, tuple[Generation, str]] = {
    "rwkv": (4, "RWKV-4 Dove, Raven"),
    "rwkv5": (5, "RWKV-5 Eagle"),
    "rwkv6": (6, "RWKV-6 Finch"),
    "rwkv7": (7, "RWKV-7 Goose"),
}
"""model_type -> generation, and what people know it by."""
TensorShapes = Mapping[str, tuple[int, ...]]


def read_rwkv(reader: ConfigReader, shapes: TensorShapes) -> RwkvConfig:
    """The architecture of an RWKV checkpoint. shapes: of its tensors by name.

    Raises ConfigError for a key that is missing, contradicts another, or asks for what is not followed;
    WeightsError for a tensor that must say a rank and is not there.
    """
    model_type, source = reader.raw["model_type"], reader.source
    generation = RWKV[model_type][0]
    _refuse_unfollowed(reader, generation)
    hidden, layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    spelling = _spelling(shapes, generation, source)
    width = hidden if generation == 7 else reader.integer("attention_hidden_size", hidden)
    if generation > 4 and width != hidden:
        raise ConfigError(
            f"{source}: expected attention_hidden_size to be hidden_size ({hidden}), found {width}; this "
            "model cannot run here"
        )
    size = _head_size(reader, generation, width, shapes)
    eps = reader.number("norm_eps" if generation == 7 else "layer_norm_epsilon", 1e-5)
    divisor = 1 if generation in (4, 7) else reader.integer("head_size_divisor", 8)
    first = LAYER[spelling.partition(",")[0]].format(0)
    decays = shapes.get(f"{first}attention.time_decay", shapes.get(f"{first}att.time_decay", ()))
    has_gate = generation > 5 or (generation == 5 and any(".gate.weight" in name for name in shapes))
    return RwkvConfig(
        model_type=model_type,
        generation=generation,
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=reader.integer("vocab_size"),
        num_heads=width // size,
        head_dim=size,
        attention_size=width,
        intermediate_size=_intermediate(reader, generation, hidden),
        norm_eps=eps,
        head_norm_eps=eps * (size if generation == 7 else divisor**2),
        ranks=_ranks(shapes, generation, first, spelling),
        spelling=spelling,
        has_gate=has_gate,
        has_norm_bias=reader.flag("norm_bias", True),
        norm_first=reader.flag("norm_first", True),
        decays_per_head=generation == 5 and len(decays) == 1,
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _refuse_unfollowed(reader: ConfigReader, generation: Generation) -> None:
    """Settings that change numbers and that nothing here follows."""
    refuse_unfollowed(reader)
    if generation == 7 and reader.has("attn"):
        raise ConfigError(
            f"{reader.source}: expected no attention layers in an RWKV-7, found attn={reader.raw['attn']!r}; "
            "such hybrids cannot run here"
        )
    if generation == 7 and (act := reader.text("hidden_act", "sqrelu")) != "sqrelu":
        raise ConfigError(
            f"{reader.source}: expected hidden_act 'sqrelu', found {act!r}; this model cannot run here"
        )
    sizes = reader.raw.get("value_dim")
    hidden = reader.raw.get("hidden_size")
    listed = sizes if isinstance(sizes, list) else [sizes]
    if generation == 7 and any(size not in (None, hidden) for size in listed):
        raise ConfigError(
            f"{reader.source}: expected value_dim to be hidden_size ({hidden}) in every layer, found "
            f"{sizes!r}; this model cannot run here"
        )


def _spelling(shapes: TensorShapes, generation: Generation, source: str) -> Spelling:
    """How a checkpoint names its tensors, by those of layer 0."""
    if f"{LAYER['fla'].format(0)}attn.r_proj.weight" in shapes and generation == 7:
        return "fla, one x_x" if f"{LAYER['fla'].format(0)}attn.x_x" in shapes else "fla"
    if f"{LAYER['hf'].format(0)}attention.key.weight" in shapes and generation < 7:
        return "hf"
    if f"{LAYER['native'].format(0)}att.key.weight" in shapes:
        return "native"
    raise ConfigError(
        f"{source}: expected the tensors of an RWKV-{generation} "
        f"({'model.layers.0.attn.r_proj' if generation == 7 else 'rwkv.blocks.0.attention.key'}.weight, or "
        f"blocks.0.att.key.weight), found {', '.join(list(shapes)[:3]) or 'none'}; is config.json of another "
        "model?"
    )


def _head_size(reader: ConfigReader, generation: Generation, width: int, shapes: TensorShapes) -> int:
    """Channels of a head. RWKV-5 and 6 configs write the *size* under num_attention_heads."""
    if generation == 4:
        return 1
    if generation == 7:
        size = reader.integer("head_dim", 64)
        told = reader.optional_integer("num_heads")
        if told is not None and told * size != width:
            raise ConfigError(
                f"{reader.source}: expected num_heads * head_dim to be hidden_size ({width}), found "
                f"{told} * {size}; correct the file, or fetch it again"
            )
    else:
        bonus = next((shape for name, shape in shapes.items() if name.endswith("time_faaaa")), ())
        own = bonus[1] if len(bonus) == 2 else None
        key = "head_size" if reader.has("head_size") else "num_attention_heads"
        size = reader.integer(key, own)
    if width % size:
        raise ConfigError(
            f"{reader.source}: expected a head size that divides {width}, found {size}; correct the file, or "
            "fetch it again"
        )
    return size


def _intermediate(reader: ConfigReader, generation: Generation, hidden: int) -> int:
    """Width of the channel mix; a null is as good as no key."""
    if generation == 7:
        ratio = reader.number("hidden_ratio", 4.0)
        usual = -(-int(hidden * ratio) // 32) * 32
    else:
        usual = 4 * hidden if generation == 4 else int(hidden * 3.5) // 32 * 32
    return reader.optional_integer("intermediate_size", usual) or usual


def _ranks(
    shapes: TensorShapes, generation: Generation, first: str, spelling: Spelling
) -> tuple[tuple[str, int], ...]:
    """Ranks of the low-rank maps, as the tensors of the first layer that has them say."""
    if generation < 6:
        return ()

    def shape(name: str) -> tuple[int, ...]:
        if name not in shapes:
            raise WeightsError(
                f"expected a tensor {name!r}, whose shape says the rank of a low-rank map, found none among "
                f"{len(shapes)} tensors; the checkpoint is incomplete, fetch it again"
            )
        return shapes[name]

    if generation == 6:
        room = "attention" if spelling == "hf" else "att"
        return (
            ("mix", shape(f"{first}{room}.time_maa_w1")[1] // 5),
            ("decay", shape(f"{first}{room}.time_decay_w1")[1]),
        )
    second = LAYER[spelling.partition(",")[0]].format(1)
    found = []
    for map_ in ("w", "a", "v", "g"):
        layer = second if map_ == "v" else first
        if map_ == "v" and not any(name.startswith(second) for name in shapes):
            found.append((map_, 0))  # a single layer mixes no values
        elif spelling == "native":
            found.append((map_, shape(f"{layer}att.{map_}1")[1]))
        else:
            found.append((map_, shape(f"{layer}attn.{map_}_lora.lora.0.weight")[0]))
    return tuple(found)
