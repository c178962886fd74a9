"""Builders that the family functions of this folder share, and the table these functions enter by `@family`.

A builder reads the usual keys of a config.json, with the defaults of the reference implementation
(transformers) where a family function gives no other, and makes a spec of them: `attention`, `mlp`, ropes,
windows and position tables; `decoder` makes an architecture of these. What one family alone has is read and
built in that family's function.

Border: one config; never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .....store.errors import ConfigError
from ..architecture import HeadTransform
from ..composed import ComposedArchitecture, LayerSpec
from ..families import (
    ACTIVATIONS,
    asks_to_look_ahead,
    both_ways,
    kv_heads_of,
    listed_windows,
    read_activation,
    read_rope,
    refuse_unfollowed,
)
from ..layer_tensors import LLAMA, Spelling
from ..mamba_families import checked
from ..mixers import AttentionSpec, ChannelMixerSpec, MixerSpec, MlpSpec
from ..transformer import ActivationName, ConfigReader, RopeConfig

TensorShapes = Mapping[str, tuple[int, ...]]
Windows = Sequence[int | None]
"""By layer: how many keys back a query sees, itself included; None for all."""
Ropes = Callable[[ConfigReader, int, int | None, Windows], Sequence[RopeConfig | None]]
"""Rope of each layer (None for none) from a config, the width of a head, the default of
max_position_embeddings and the windows of the layers."""
LayerMixer = Callable[[RopeConfig | None, int | None, int], MixerSpec]
"""Mixer of a layer, from its rope, its window and its number."""
LayerTypes = Callable[[ConfigReader, int], list[str]]
"""Function from a config and a number of layers to layer_types, used if the config does not list them."""


# -- the table of families


@dataclass(frozen=True)
class AttendingFamily:
    """A family whose layers all attend."""

    examples: str
    """Models that people know the family by."""
    build: Callable[[ConfigReader, TensorShapes], ComposedArchitecture]
    """Its architecture, from its config and the shapes of its tensors by name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Usual name of a key -> what this family calls it."""
    never: tuple[str, ...] = ()
    """Config keys that must be absent, null or false: what they switch on is not implemented."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Config keys with the only value that is implemented; any other value is refused."""
    reads_tensors: bool = False
    """Whether names of tensors decide how the others are spelled."""
    reports_unread_keys: bool = False
    """Whether its function notes every key that it reads (`ConfigReader.read`); others are reported."""
    follows_is_causal: bool = True
    """Whether is_causal=false is followed: queries then see later keys."""
    follows_bidirectional: bool = False
    """Whether use_bidirectional_attention is followed: queries then see half of a window on each side."""

    def read(self, config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
        """The architecture that a config describes.

        Raises:
            ConfigError: A key is missing, of the wrong type, contradicts another, or asks for what is not
                followed.
        """
        config = self._renamed(config)
        refuse_unfollowed(config, looks_ahead=self.follows_is_causal, both_ways=self.follows_bidirectional)
        for key, followed in {**dict.fromkeys(self.never, None), **self.always}.items():
            found = config.raw.get(key, followed)
            if found != followed and not (followed is None and found is False):
                expected = f"no {key}" if followed is None else f"{key} to be {followed!r}"
                raise ConfigError(
                    f"{config.source}: expected {expected}, found {found!r}, which is not followed for "
                    f"{config.raw['model_type']}; this model cannot run here"
                )
        return self.build(config, shapes)

    def _renamed(self, config: ConfigReader) -> ConfigReader:
        """The config under the usual names of its keys; ConfigError for two names with two values, as which
        of them the reference takes depends on their order."""
        usual = {name: config.raw[own] for name, own in self.aliases.items() if own in config.raw}
        # What the reference knows by its own name alone has no other.
        one_name = {"hidden_act", "intermediate_size"} & set(self.aliases)
        raw = {key: value for key, value in config.raw.items() if key not in one_name}
        for name, value in usual.items():
            if name in raw and raw[name] != value:
                raise ConfigError(
                    f"{config.source}: expected one value of {self.aliases[name]} and {name}, two names of "
                    f"one key, found {value!r} and {raw[name]!r}; leave one out"
                )
        return config.reading(raw | usual)


ATTENDING: dict[str, AttendingFamily] = {}
"""model_type -> family."""
Build = Callable[[ConfigReader, TensorShapes], ComposedArchitecture]


def family(model_type: str, examples: str, **options: Any) -> Callable[[Build], Build]:
    """Enter a function under a model_type. options: further fields of `AttendingFamily`."""

    def enter(build: Build) -> Build:
        ATTENDING[model_type] = AttendingFamily(examples, build, **options)
        return build

    return enter


# -- parts of a layer


def attention(
    config: ConfigReader,
    *,
    heads: int | None = None,
    head_dim: int | None = None,
    width: int | None = None,
    kv_heads: int | None = None,
    bias: bool = False,
    **fields: Any,
) -> AttentionSpec:
    """Attention with grouped queries; `decoder` adds rope and window by layer.

    Args:
        heads: Number of query heads; None reads num_attention_heads.
        head_dim: Default of head_dim; None divides hidden_size by the number of heads.
        width: Of a head, whatever head_dim says.
        kv_heads: Default of num_key_value_heads; None is one per query head.
        bias: Of queries, keys, values and output, where `fields` say nothing else.
        fields: Of `AttentionSpec`.
    """
    heads = config.integer("num_attention_heads") if heads is None else heads
    usual = config.integer("hidden_size") // heads
    if width is None:
        # A null is no default of the family.
        is_null = "head_dim" in config.raw and config.raw["head_dim"] is None
        width = config.integer("head_dim", usual if is_null else head_dim or usual)
    defaults = {"num_attention_heads": heads, "qkv_bias": bias, "o_bias": bias}
    if "num_kv_heads" not in fields:
        defaults["num_kv_heads"] = kv_heads_of(config, kv_heads, heads)
    return AttentionSpec(**{**defaults, "head_dim": width, **fields})


def attention_bias(config: ConfigReader) -> bool:
    """Value of the config key attention_bias, with default False."""
    return config.flag("attention_bias", False)


def mlp(
    config: ConfigReader,
    act: ActivationName | None = None,
    *,
    width: int | None = None,
    default_width: int | None = None,
    bias: bool = False,
    **fields: Any,
) -> MlpSpec:
    """A gated MLP, unless `fields` of `MlpSpec` say otherwise.

    Args:
        act: None reads hidden_act, SiLU where it is absent.
        width: Of its inside, whatever intermediate_size says; None reads that.
        default_width: Default of intermediate_size.
        bias: Of all its projections.
    """
    width = config.integer("intermediate_size", default_width) if width is None else width
    return MlpSpec(width, read_activation(config) if act is None else act, has_bias=bias, **fields)


def head_transform(
    config: ConfigReader, eps: float, act: str = "gelu", *, key: str = "", **fields: Any
) -> HeadTransform:
    """Dense map, activation and norm before the head of an encoder. key: of the activation, `act` where it is
    absent; "" for `act` always. fields: of `HeadTransform`; its width is that of embeddings otherwise."""
    name = config.text(key, act) if key else act
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{config.source}: expected {key} among {', '.join(ACTIVATIONS)}, found {name!r}; this model "
            "cannot run here"
        )
    width = {"width": config.integer("hidden_size")} | fields
    return HeadTransform(activation=ACTIVATIONS[name], eps=eps, **width)


# -- ropes


def rope(
    theta: float = 10000.0,
    *,
    share: float = 1.0,
    interleaved: bool = False,
    default: Mapping[str, Any] | None = None,
    is_backwards: bool = False,
    **options: Any,
) -> Callable[[ConfigReader, int, int | None], RopeConfig]:
    """How one rope is read.

    Args:
        theta: Default of rope_theta.
        share: Default of partial_rotary_factor; 1 for families that take no other.
        interleaved: Whether entries 2i and 2i + 1 rotate together, not i and i + dim / 2.
        default: rope_parameters where a config has none; an empty object means rope without scaling.
        is_backwards: Whether angles are negative.
        options: Of `read_rope`.
    """
    options = {"theta": theta, "is_partial": share != 1, **options}

    def read(config: ConfigReader, head_dim: int, max_positions: int | None) -> RopeConfig:
        raw = {"partial_rotary_factor": share} | config.raw if share != 1 else dict(config.raw)
        if default and raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
            raw["rope_parameters"] = default
        context = config.integer("max_position_embeddings", max_positions)
        found = read_rope(config.reading(raw), head_dim, context, **options)
        return replace(found, interleaved=interleaved, is_backwards=is_backwards)

    return read


def rope_everywhere(theta: float = 10000.0, **options: Any) -> Ropes:
    """One rope for all layers. options: of `rope`."""
    return lambda config, head_dim, most, windows: (
        (rope(theta, **options)(config, head_dim, most),) * len(windows)
    )


PLAIN_ROPE = rope_everywhere()


def rope_flags(config: ConfigReader, layers: int) -> list[bool]:
    """no_rope_layers lists 1 where there is rope; without it, all but every n-th layer."""
    listed = config.raw.get("no_rope_layers")
    if not listed:
        every = config.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % every) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        raise ConfigError(
            f"{config.source}: expected no_rope_layers to list 0 or 1 for each of {layers} layers, found "
            f"{listed!r}; correct the file, or fetch it again"
        )
    return [bool(flag) for flag in listed]


def rope_where_flagged(theta: float, **options: Any) -> Ropes:
    """One rope for the layers of `rope_flags`."""

    def ropes(
        config: ConfigReader, head_dim: int, most: int | None, windows: Windows
    ) -> list[RopeConfig | None]:
        flags = rope_flags(config, len(windows))
        found = rope(theta, **options)(config, head_dim, most)
        return [found if flag else None for flag in flags]

    return ropes


def rope_in_windows(theta: float = 10000.0, *, unless_none: bool = False, **options: Any) -> Ropes:
    """One rope for layers with a window. unless_none: for all layers where sliding_window is null or 0."""

    def ropes(
        config: ConfigReader, head_dim: int, most: int | None, windows: Windows
    ) -> list[RopeConfig | None]:
        found = rope(theta, **options)(config, head_dim, most)
        everywhere = unless_none and not config.raw.get("sliding_window", 4096)
        return [found if everywhere or window is not None else None for window in windows]

    return ropes


def two_ropes(theta: float, local_theta: float, local_key: str = "") -> Ropes:
    """One rope for layers that see everything, and one for layers with a window.

    rope_parameters has a section for each. Older configs scale the rope of whole layers alone, and have
    rope_theta and, of the other, `local_key` ("" for none).
    """
    kinds = ("full_attention", "sliding_attention")

    def ropes(
        config: ConfigReader, head_dim: int, most: int | None, windows: Windows
    ) -> list[RopeConfig | None]:
        raw, parameters = config.raw, config.mapping("rope_parameters")
        if parameters and not set(parameters) <= set(kinds):
            raise ConfigError(
                f"{config.source}: expected rope_parameters of {' and '.join(kinds)}, found "
                f"{', '.join(parameters)}; this model cannot run here"
            )
        thetas = raw.get("rope_theta"), raw.get(local_key) if local_key else None
        found = [parameters.get(kind) for kind in kinds]
        if raw.get("rope_scaling"):
            found[0] = {**(found[0] or {}), **raw["rope_scaling"]}
        context = {"max_position_embeddings": config.integer("max_position_embeddings", most)}
        whole, local = (
            rope(default)(
                config.reading({"rope_theta": own, "rope_parameters": told} | context),
                head_dim,
                most,
            )
            for default, own, told in zip((theta, local_theta), thetas, found, strict=True)
        )
        return [whole if window is None else local for window in windows]

    return ropes


# -- windows


def window_everywhere(config: ConfigReader, default: int | None = None) -> Windows:
    """sliding_window in every layer; an explicit null is no window."""
    return (config.optional_integer("sliding_window", default),) * layers_of(config)


def windows_where_listed(
    config: ConfigReader, has_window: Callable[[int], bool], size: int | None
) -> Windows:
    """A window in layers that layer_types says have one; by `has_window` where it is absent."""
    types, layers = config.strings("layer_types"), layers_of(config)
    if types is not None:
        return listed_windows(config, types, size, layers)
    return tuple(size if has_window(layer) else None for layer in range(layers))


def upper_windows(config: ConfigReader, default: int | None = 4096) -> Windows:
    """A window from max_window_layers on, if use_sliding_window is on. default: of sliding_window."""
    size = config.optional_integer("sliding_window", default)
    first = config.integer("max_window_layers", 28, least=0)
    is_on = config.flag("use_sliding_window", False)
    return windows_where_listed(config, lambda layer: layer >= first, size if is_on else None)


def layers_of(config: ConfigReader) -> int:
    """Number of layers."""
    return config.integer("num_hidden_layers")


def windows_by_type(
    config: ConfigReader, types: LayerTypes, default: int | None = 4096, *, has_flag: bool = False
) -> Windows:
    """A window of sliding_window keys in layers that layer_types says have one.

    Args:
        types: Where layer_types is absent.
        default: Of sliding_window; an explicit null is no window.
        has_flag: Whether use_sliding_window must be true for any window.
    """
    layers, listed = layers_of(config), config.strings("layer_types")
    if has_flag and not config.flag("use_sliding_window", False):
        return listed_windows(config, listed or ["full_attention"] * layers, None, layers)
    size = config.optional_integer("sliding_window", default)
    return listed_windows(config, listed or types(config, layers), size, layers)


def _types(has_window: Callable[[int], bool], layers: int) -> list[str]:
    return ["sliding_attention" if has_window(layer) else "full_attention" for layer in range(layers)]


def every_nth_full(default: int, key: str = "") -> LayerTypes:
    """A window in all layers but every n-th. key: of n; "" for n = default."""

    def types(config: ConfigReader, layers: int) -> list[str]:
        every = config.integer(key, default) if key else default
        return _types(lambda layer: bool((layer + 1) % every), layers)

    return types


def every_layer_full(config: ConfigReader, layers: int) -> list[str]:
    """No window."""
    return ["full_attention"] * layers


def first_of_four_full(config: ConfigReader, layers: int) -> list[str]:
    """layer_types with a sliding window in all layers except the first of every four."""
    return _types(lambda layer: bool(layer % 4), layers)


def full_then_windows(default: int) -> LayerTypes:
    """A window in all layers from max_window_layers on."""

    def types(config: ConfigReader, layers: int) -> list[str]:
        first = config.integer("max_window_layers", default, least=0)
        return _types(lambda layer: layer >= first, layers)

    return types


# -- positions and names


def position_table(
    config: ConfigReader, default: int, *, first: int | None = None, counts_rows: bool = False
) -> dict[str, Any]:
    """A table of learned positions, as fields of `ComposedArchitecture`.

    Args:
        default: Of max_position_embeddings.
        first: Row of the first position; None for the one behind the padding token's (RoBERTa), where the
            config counts rows of the table and no prompt may hold the padding token.
        counts_rows: Whether the config counts rows of the table, not positions.
    """
    told = config.integer("max_position_embeddings", default)
    if first is None:
        pad = config.integer("pad_token_id", 1, least=0)
        return _table(told - pad - 1, told, pad + 1) | {"unknown_token": pad}
    return _table(told - first, told, first) if counts_rows else _table(told, told + first, first)


def _table(positions: int, rows: int, first: int) -> dict[str, Any]:
    return {"max_position_embeddings": positions, "position_rows": rows, "first_position": first}


def rooted(spelling: Spelling, root: str, shapes: TensorShapes) -> Spelling:
    """Names of tensors without their root where no tensor of the checkpoint begins with it."""
    if not shapes or any(name.startswith(root) for name in shapes):
        return spelling
    names = ("embed", "final_norm", "layer", "positions", "embed_norm")
    return replace(spelling, **{name: getattr(spelling, name).removeprefix(root) for name in names})


# -- the whole


def with_layers(
    model: ComposedArchitecture, changes: Callable[[int], Mapping[str, Any]]
) -> ComposedArchitecture:
    """Copy of a model with some fields of its `LayerSpec`s changed; changes: from a layer's number."""
    blocks = (replace(block, **changes(number)) for number, block in enumerate(model.blocks))
    return replace(model, blocks=tuple(blocks))


def decoder(
    config: ConfigReader,
    attention: AttentionSpec | LayerMixer,
    mlp: ChannelMixerSpec | Callable[[int], ChannelMixerSpec],
    *,
    eps: float,
    max_positions: int | None,
    rope: Ropes | None = PLAIN_ROPE,
    head_dim: int | None = None,
    windows: Windows | None = None,
    norms: Literal["before", "after", "around", "of sums"] = "before",
    is_parallel: bool = False,
    has_two_norms: bool = False,
    looks_ahead: bool | None = None,
    longest: int | None = None,
    tied: bool | None = False,
    spelling: Spelling = LLAMA,
    **fields: Any,
) -> ComposedArchitecture:
    """An architecture whose layers all attend.

    Args:
        attention: Attention of all layers without rope and window; or a function that makes a layer's mixer.
        mlp: Channel mixer of all layers; or a function from a layer's number to its channel mixer.
        eps: Epsilon of the norms of the residual stream.
        max_positions: Default of max_position_embeddings; None for an unbounded context.
        rope: None for none.
        head_dim: Entries of a head that rope may rotate, where `attention` makes the mixer of a layer.
        windows: By layer; None for none.
        norms: Where norms stand (`LayerSpec.norms`).
        is_parallel: Whether attention and MLP both read the stream that enters.
        has_two_norms: Whether each of them then reads it through a norm of its own.
        looks_ahead: Whether queries see later keys; None for what is_causal says.
        longest: Largest context, if longer prompts are computed otherwise by the reference.
        tied: Default of tie_word_embeddings; None for a head of its own, whatever the config says.
        fields: Of `ComposedArchitecture`.
    """
    hidden, layers, ahead = config.integer("hidden_size"), layers_of(config), asks_to_look_ahead(config)
    windows = (None,) * layers if windows is None else windows
    windows = both_ways(windows) if ahead else windows
    if is_bidirectional := config.flag("use_bidirectional_attention", False):
        windows = [window and window // 2 + 1 for window in windows]
    looks_ahead = is_bidirectional or (ahead if looks_ahead is None else looks_ahead)
    width = attention.head_dim if isinstance(attention, AttentionSpec) else head_dim
    ropes: Sequence[RopeConfig | None] = (None,) * layers
    if rope is not None:
        assert width is not None  # families of other mixers give it
        ropes = rope(config, width, max_positions, windows)

    def layer(number: int) -> LayerSpec:
        layer_rope, window = ropes[number], windows[number]
        if isinstance(attention, AttentionSpec):
            mixer: MixerSpec = replace(
                attention, rope=layer_rope, window=window, is_bidirectional=looks_ahead
            )
        else:
            mixer = attention(layer_rope, window, number)
        return LayerSpec(
            (mixer,),
            mlp(number) if callable(mlp) else mlp,
            norms,
            is_parallel=is_parallel,
            has_two_norms=has_two_norms or not is_parallel,
        )

    if "max_position_embeddings" not in fields:
        most = None if max_positions is None else config.integer("max_position_embeddings", max_positions)
        fields["max_position_embeddings"] = most if most is None or longest is None else min(most, longest)
    return ComposedArchitecture(
        model_type=config.raw["model_type"],
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        blocks=tuple(checked(config, layer(number)) for number in range(layers)),
        spelling=spelling,
        norm_eps=eps,
        tie_word_embeddings=config.flag("tie_word_embeddings", bool(tied)) and tied is not None,
        **fields,
    )
