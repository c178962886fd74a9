"""TransformerConfig: the axes along which decoder families differ, as one frozen value.

A family is data, a row of `families.py`; the decoder reads this value and knows no family by name.
Torch-free, so that hook points and identities can be had without loading anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from ....store.digest import digest
from ....store.errors import ConfigError
from .architecture import (
    EVERYWHERE,
    LATER,
    Architecture,
    AttentionMixer,
    Heads,
    Layer,
    Reach,
    Tensors,
    later,
)
from .checkpoint import transformer_tensors
from .points import ORDER, HookPoint, transformer_points

Norm = Literal["rms", "gemma_rms", "layer"]
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
RopeScheme = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the first `dim` entries of a head.

    theta: base wavelength. factor: how far the context is stretched. original_max_position_embeddings:
    context before stretching. short_factor, long_factor: per-frequency divisors (longrope), [dim / 2].
    attention_factor: multiplies cos and sin; None derives it. interleaved: entries 2i and 2i + 1 turn
    together (as Su et al. 2021 write it), not i and i + dim / 2. bounds: rotations within the original
    context from which an entry turns as it did, and up to which it turns slower by the whole factor (yarn);
    is_truncated: whether the places of these entries are rounded. is_backwards: whether angles are negative.
    frequencies: a weight, radians per position [dim / 2], which the network puts here where a checkpoint
    tells them; None for what the others say. turning: of a head's pairs of entries, how many turn, the
    fastest ones of a head that turns as a whole (proportional).
    """

    theta: float
    dim: int
    scheme: RopeScheme = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    interleaved: bool = False
    bounds: tuple[float, float] = later((32.0, 1.0), everywhere=True)
    is_truncated: bool = later(True, everywhere=True)
    is_backwards: bool = later(False, everywhere=True)
    frequencies: Any = field(default=None, compare=False, repr=False, metadata={LATER: EVERYWHERE})
    turning: int = later(0, everywhere=True)

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim <= 0:
            raise ConfigError(
                f"expected a positive, even number of rotary dimensions per head, found {self.dim}; check "
                "head_dim, rotary_dim and partial_rotary_factor in config.json"
            )
        if self.theta <= 0:
            raise ConfigError(
                f"expected rope_theta to be positive, found {self.theta:g}; correct config.json, or fetch it "
                "again"
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether two prompts of different length rotate the same position differently."""
        return self.scheme in ("dynamic", "longrope")

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: 1 but for yarn and longrope, where it keeps the scale of the
        scores (LongRoPE, section 3.2)."""
        if self.scheme not in ("longrope", "yarn"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings or 0
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(original))

    def turns_alike(self, before: int, length: int) -> bool:
        """Whether a sequence of `length` positions turns the first `before` of them as it did when it had no
        more: dynamic NTK scaling stretches its base beyond the original context, longrope changes its factors
        there."""
        original = self.original_max_position_embeddings or 0
        if self.scheme == "dynamic":
            return max(before, original) == max(length, original)
        return self.scheme != "longrope" or (before > original) == (length > original)


_REACHES_LATER = frozenset(
    kind
    for kind, place in ORDER.items()
    if ORDER["resid_pre"] <= place <= ORDER["rot_k"] and kind not in ("q_input", "q", "rot_q")
) | {"embed", "resid_post"}
"""Points at which a change reaches later positions within its layer, through keys and values."""


@dataclass(frozen=True)
class TransformerConfig(Architecture):
    """A decoder of attention and MLP: everything that decides its numbers besides its weights."""

    kind: ClassVar[str] = "transformer"
    version: ClassVar[str] = "transformer/1"
    norms_behind_rope: ClassVar[bool] = False
    clip: ClassVar[float | None] = None
    slopes: ClassVar[tuple[float, ...]] = ()
    growth: ClassVar[tuple[float, int] | None] = None
    growth_start: ClassVar[int] = 0
    inner_norm_eps: ClassVar[float | None] = None

    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    """Per layer, how many keys back a query sees, itself included; None for all."""
    norm_type: Norm = "rms"
    norm_eps: float = 1e-5
    activation: ActivationName = "silu"
    qkv_layout: Literal["separate", "fused"] = "separate"
    mlp_layout: Literal["gated_separate", "gated_fused", "plain"] = "gated_separate"
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float | None = None
    tie_word_embeddings: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    use_post_norms: bool = False
    use_qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    is_bidirectional: bool = later(False, everywhere=True)
    """Whether a query sees later keys, too."""
    root: str = "model."
    head: str = "lm_head"
    """What names of tensors begin with, and the LM head's; like any spelling, in no digest."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_kv_heads:
            raise ConfigError(
                f"expected num_attention_heads ({self.num_attention_heads}) to be a multiple of "
                f"num_key_value_heads, found {self.num_kv_heads}; correct config.json, or fetch it again"
            )
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(
                f"expected one attention window per layer ({self.num_layers}), found "
                f"{len(self.layer_windows)}"
            )
        if self.rope.dim > self.head_dim:
            raise ConfigError(
                f"expected at most head_dim={self.head_dim} rotary dimensions, found {self.rope.dim}; check "
                "head_dim and partial_rotary_factor in config.json"
            )

    def under(self, root: str, head: str) -> TransformerConfig:
        """See `Architecture`."""
        return replace(self, root=root, head=head)

    @property
    def attention_scale(self) -> float:
        """What q k^T is multiplied by."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def context_length(self) -> int:
        """Longest prompt the model reads; dynamic rope stretches it by its factor."""
        if self.rope.scheme == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def digest(self) -> str:
        """Of every field; of those that came later, where they are not as they were for all before."""
        fields = self.fields
        del fields["root"], fields["head"]
        if not self.rope.interleaved:
            del fields["rope"]["interleaved"]
        return digest("transformer-config", fields)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """See `Architecture`."""
        return {
            "hidden": self.hidden_size,
            "head": self.num_attention_heads,
            "kv_head": self.num_kv_heads,
            "d_head": self.head_dim,
            "mlp": self.intermediate_size,
            "one": 1,
        }

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`."""
        return transformer_points(self.num_layers, post_norms=self.use_post_norms, gated=self._is_gated)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`."""
        channel_mixer: Literal["MLP", "gated MLP"] = "gated MLP" if self._is_gated else "MLP"
        norms: Literal["before", "around"] = "around" if self.use_post_norms else "before"
        return tuple(Layer(mixer, channel_mixer, norms) for mixer in self.mixers)

    @cached_property
    def mixers(self) -> tuple[AttentionMixer, ...]:
        """How each layer attends; layers differ in their window alone."""
        scale, cap = self.attention_scale, self.attn_logit_softcapping
        ahead = self.is_bidirectional
        return tuple(
            AttentionMixer(scale, window, cap, is_bidirectional=ahead) for window in self.layer_windows
        )

    def heads_of(self, layer: int) -> Heads:
        """See `Architecture`; every layer attends."""
        return Heads(
            self.num_attention_heads,
            self.num_kv_heads,
            self.head_dim,
            self.mixers[layer],
            "by part" if self.qkv_layout == "fused" else "separate",
            rope=self.rope,
            are_normed=self.use_qk_norm,
        )

    @cached_property
    def tensors(self) -> Tensors:
        """See `Architecture`."""
        return transformer_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """Before keys and values later positions as well, or all that see it, behind them its own."""
        if point.kind not in _REACHES_LATER:
            return "here"
        return "all" if self.is_bidirectional else "later"

    @property
    def lengths_must_match(self) -> bool:
        """See `Architecture`."""
        return self.is_bidirectional or self.rope.depends_on_length

    def keeps_keys(self, before: int, length: int) -> bool:
        """See `Architecture`; never where later tokens change earlier ones."""
        return before == 0 or (not self.is_bidirectional and self.rope.turns_alike(before, length))

    def bytes_per_token(self, itemsize: int) -> int:
        """Stream and norms, projections, the MLP's inside."""
        heads = (2 * self.num_attention_heads + 3 * self.num_kv_heads) * self.head_dim
        return itemsize * (6 * self.hidden_size + 2 * heads + 4 * self.intermediate_size)

    @property
    def _is_gated(self) -> bool:
        return self.mlp_layout != "plain"


_MOST = {"layers": 10_000, "num_blocks": 10_000, "n_layer": 10_000, "head": 1_000_000, "expert": 1_000_000}
"""Of what there may be, by a word in the key."""
_LARGEST = 2**53


class ConfigReader:
    """A parsed config.json, with errors that name the key; remembers which keys were read.

    A null counts as absent. A value of another type than asked is an error, never a default.
    """

    def __init__(self, raw: dict[str, Any], source: str = "config.json") -> None:
        self.raw = raw
        self.source = source
        self.read: set[str] = set()
        self.ignored: set[str] = set()
        """Keys of nested sections that were seen and not read."""

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer, the default where the key is absent or null."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise ConfigError(
                f"{self.source}: expected {key} to be {kind}, found {self._shown(key, value)}; correct the "
                "file, or fetch it again"
            )
        # What there is one of for each of them is listed before anything is compared with tensors.
        most = next((count for word, count in _MOST.items() if word in key), _LARGEST)
        if value > most:
            raise ConfigError(
                f"{self.source}: expected {key} to be at most {most}, found {self._shown(key, value)}; "
                "correct the file, or fetch it again"
            )
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A positive integer, None for an explicit null, the default where the key is absent."""
        if key in self.raw and self.raw[key] is None:
            self.read.add(key)
            return None
        return None if self._get(key, default) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, whole or not."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{self.source}: expected {key} to be a finite number, found {self._shown(key, value)}; "
                "correct the file, or fetch it again"
            )
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise ConfigError(
                f"{self.source}: expected {key} to be positive, found {value:g}; correct the file, or fetch "
                "it again"
            )
        return value

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A number, or None for an explicit null (or an absent key without a default)."""
        self.read.add(key)
        if key in self.raw and self.raw[key] is None:
            return None
        return None if self._get(key, default) is None else self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, the default where the key is absent; a null is false, as to the reference."""
        value = self._get(key, default)
        if key in self.raw and self.raw[key] is None:
            return False
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.source}: expected {key} to be true or false, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string, the default where the key is absent or null; ConfigError where there is neither."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ConfigError(
                f"{self.source}: expected {key} to be a string, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty where the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(
                f"{self.source}: expected {key} to be an object, found {value!r:.80}; correct "
                "the file, or fetch it again"
            )
        return value

    def strings(self, key: str) -> list[str] | None:
        """A list of strings, None where the key is absent."""
        value = self._get(key, None)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise ConfigError(
                f"{self.source}: expected {key} to be a list of strings, found {value!r:.80}; "
                "correct the file, or fetch it again"
            )
        return value

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self.raw.get(key) is not None

    def _shown(self, key: str, value: Any) -> str:
        return "no such key" if key not in self.raw and value is None else f"{value!r:.80}"

    def _get(self, key: str, default: Any) -> Any:
        self.read.add(key)
        value = self.raw.get(key)
        return default if value is None else value
