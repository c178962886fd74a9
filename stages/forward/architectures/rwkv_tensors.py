"""Names and shapes of the tensors of RWKV's time mix and channel mix, in three naming schemes.

    rwkv.blocks.0.attention.key.weight    transformers and the RWKV organisation (4, 5, 6)
    blocks.0.att.key.weight               the training code, saved as safetensors (4 to 7)
    model.layers.0.attn.k_proj.weight     flash-linear-attention, fla (7)

Weights have the names of `networks/mixers/rwkv.py`, whatever their names in the file. Matrices are [out, in]
there; low-rank matrices that the training code multiplies from the left are transposed on loading.

Border: names and shapes; never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .architecture import Stored
from .rwkv import ChannelMixSpec, TimeMixSpec

__all__ = ["MIXES", "RwkvNames", "channel_mix_tensors", "time_mix_tensors"]

MIXES = ("r", "w", "k", "v", "a", "g")
"""Token-shift mixes of the time mix of version 7, in their order in the fused tensor x_x."""
_WORDS = {"r": "receptance", "k": "key", "v": "value", "g": "gate", "o": "output"}
_MIXES_6 = ("x", "w", "k", "v", "r", "g")


@dataclass(frozen=True)
class RwkvNames:
    """Names of RWKV's tensors within a layer, in one of the naming schemes. Prefixes of modules end with a
    dot."""

    time_mix: str = "attention."
    """Prefix of the tensors of the time mix."""
    head_norm: str = "ln_x"
    """Name of the norm of each head's output, below the prefix of the time mix."""
    channel_mix: str = "feed_forward."
    """Prefix of the tensors of the channel mix."""
    pre_norm: str = "pre_ln"
    """Name of the norm of the embedding, which is stored in layer 0."""
    is_fla: bool = False
    """Whether the checkpoint has the names and shapes of flash-linear-attention."""
    has_fused_mixes: bool = False
    """Whether the token-shift mixes of version 7 are one tensor, x_x."""


def time_mix_tensors(spec: TimeMixSpec, names: RwkvNames, hidden: int) -> Iterator[tuple[str, Stored]]:
    """Yield name and checkpoint tensor of each weight of the time mix of a layer.

    Arguments:
        spec: Sizes and switches of the time mix.
        names: Names of the checkpoint's tensors.
        hidden: Width of the residual stream.
    """
    prefix, width, is_7 = names.time_mix, spec.width, spec.generation == 7
    if spec.generation > 4:
        # This norm has a bias even if norm_bias is false.
        for weight, part in (("head_norm", "weight"), ("head_norm.bias", "bias")):
            yield f"rwkv.{weight}", Stored(f"{prefix}{names.head_norm}.{part}", (width,))
    # The gate of version 7 is low-rank.
    for weight in "rkvog" if spec.has_gate and not is_7 else "rkvo":
        name = f"{weight}_proj" if names.is_fla else _WORDS[weight]
        shape = (hidden, width) if weight == "o" else (width, hidden)
        yield f"rwkv.{weight}", Stored(f"{prefix}{name}.weight", shape)
    for weight, stored in (_version_7 if is_7 else _versions_4_to_6)(spec, names, hidden):
        yield f"rwkv.{weight}", stored


def _versions_4_to_6(spec: TimeMixSpec, names: RwkvNames, hidden: int) -> Iterator[tuple[str, Stored]]:
    """Yield name and checkpoint tensor of each weight of the token-shift mixes, decay and bonus of versions 4
    to 6, which have the same names in both naming schemes; arguments as in `time_mix_tensors`."""
    prefix, ranks, flat = names.time_mix, dict(spec.ranks), (1, 1, hidden)
    channels = (spec.width,) if spec.generation == 4 else (spec.heads, spec.head_dim)
    if spec.has_decay_per_head:
        channels = (spec.heads,)
    if spec.generation < 6:
        for mix in "kvrg" if spec.has_gate else "kvr":
            yield f"mix_{mix}", Stored(f"{prefix}time_mix_{_WORDS[mix]}", flat)
        yield "decay", Stored(f"{prefix}time_decay", channels)
    else:
        for mix in _MIXES_6:
            yield f"mix_{mix}", Stored(f"{prefix}time_maa_{mix}", flat)
        yield "mix_w1", Stored(f"{prefix}time_maa_w1", (hidden, 5 * ranks["mix"]))
        yield "mix_w2", Stored(f"{prefix}time_maa_w2", (5, ranks["mix"], hidden))
        yield "decay", Stored(f"{prefix}time_decay", (1, 1, spec.width))
        yield "decay_w1", Stored(f"{prefix}time_decay_w1", (hidden, ranks["decay"]))
        yield "decay_w2", Stored(f"{prefix}time_decay_w2", (ranks["decay"], spec.width))
    yield "bonus", Stored(f"{prefix}{'time_first' if spec.generation == 4 else 'time_faaaa'}", channels)


def _version_7(spec: TimeMixSpec, names: RwkvNames, hidden: int) -> Iterator[tuple[str, Stored]]:
    """Yield name and checkpoint tensor of each weight of the token-shift mixes and low-rank maps of version
    7; arguments as in `time_mix_tensors`."""
    prefix, width = names.time_mix, spec.width
    if names.has_fused_mixes:
        yield "mixes", Stored(f"{prefix}x_x", (len(MIXES), hidden))
    else:
        for mix in MIXES:
            yield f"mix_{mix}", Stored(f"{prefix}x_{mix}", (1, 1, hidden))
    vector = (width,) if names.is_fla else (1, 1, width)
    for weight in ("k_k", "k_a"):
        yield weight, Stored(f"{prefix}{weight}", vector)
    yield "r_k", Stored(f"{prefix}r_k", (spec.heads, spec.head_dim))
    # Low-rank maps: matrices "<name>1" and "<name>2" and a bias "<name>0", which the gate "g" does not have.
    for name, rank in spec.ranks:
        if name == "v" and not spec.reads_first_values:
            continue
        if names.is_fla:
            down, up, bias = (f"{name}_lora.lora.{part}" for part in ("0.weight", "2.weight", "2.bias"))
            down_shape, up_shape = (rank, hidden), (width, rank)
        else:
            down, up, bias = f"{name}1", f"{name}2", f"{name}0"
            down_shape, up_shape = (hidden, rank), (rank, width)
        yield f"{name}1", Stored(f"{prefix}{down}", down_shape, is_transposed=not names.is_fla)
        yield f"{name}2", Stored(f"{prefix}{up}", up_shape, is_transposed=not names.is_fla)
        if name != "g":
            yield f"{name}0", Stored(f"{prefix}{bias}", vector)


def channel_mix_tensors(spec: ChannelMixSpec, names: RwkvNames, hidden: int) -> Iterator[tuple[str, Stored]]:
    """Yield name and checkpoint tensor of each weight of the channel mix of a layer.

    Arguments:
        spec: Sizes and switches of the channel mix.
        names: Names of the checkpoint's tensors.
        hidden: Width of the residual stream.
    """
    prefix, inner, flat = names.channel_mix, spec.intermediate_size, (1, 1, hidden)
    yield "shifted.up", Stored(f"{prefix}key.weight", (inner, hidden))
    yield "shifted.down", Stored(f"{prefix}value.weight", (hidden, inner))
    if spec.generation == 7:
        yield "shifted.mix_k", Stored(f"{prefix}x_k", (hidden,) if names.is_fla else flat)
        return
    yield "shifted.receptance", Stored(f"{prefix}receptance.weight", (hidden, hidden))
    for mix in "kr":
        word = f"time_maa_{mix}" if spec.generation == 6 else f"time_mix_{_WORDS[mix]}"
        yield f"shifted.mix_{mix}", Stored(f"{prefix}{word}", flat)
