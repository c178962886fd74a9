"""Functions that build parts of an architecture from a config.json, for the family functions of this folder,
and the table in which the decorator `@family` registers these family functions.

A builder reads the usual keys of a config.json, with the defaults of Hugging Face transformers where a family
function gives no other, and makes a spec of them: `attention`, `mlp`, ropes, windows and position tables
(`PositionContext`); `decoder` makes an architecture of these. A key that only one family has is read in that
family's function.

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
from ..hybrids.mamba_families import checked
from ..layer_tensors import LLAMA
from ..mixers import AttentionSpec, ChannelMixerSpec, MixerSpec, MlpSpec
from ..transformer import TRY_TRANSFORMERS, ActivationName, ConfigReader, RopeConfig

TensorShapes = Mapping[str, tuple[int, ...]]
Windows = Sequence[int | None]
"""For each layer, the number of keys that a query sees, itself included; None for full attention."""
Ropes = Callable[[ConfigReader, int, int | None, Windows], Sequence[RopeConfig | None]]
"""Function (config.json, entries of a head, default of max_position_embeddings, windows of the layers) ->
rope of each layer; None for a layer without rope."""
LayerMixer = Callable[[RopeConfig | None, int | None, int], MixerSpec]
"""Function (rope of a layer, its window, its number) -> spec of the layer's mixer."""
LayerTypes = Callable[[ConfigReader, int], list[str]]
"""Function (config.json, number of layers) -> layer_types, the type of each layer, for a config that does not
list them."""


# -- the table of families


@dataclass(frozen=True)
class AttendingFamily:
    """A family of models whose layers all have attention: how its config.json is read."""

    examples: str
    """Well-known models of the family, for the table of families."""
    build: Callable[[ConfigReader, TensorShapes], ComposedArchitecture]
    """Function (config.json, shapes of the checkpoint's tensors by name) -> architecture."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Usual name of a config key -> name of the key in this family's files."""
    never: tuple[str, ...] = ()
    """Config keys that must be absent, null or false, because the features that they enable are not
    implemented."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Config key -> its only implemented value; any other value is refused."""
    reads_tensors: bool = False
    """Whether `build` needs the tensor shapes, because checkpoints of the family use several naming
    schemes."""
    reports_unread_keys: bool = False
    """Whether a warning lists the keys of a config.json that `build` does not read (`ConfigReader.read`)."""
    follows_is_causal: bool = True
    """Whether is_causal=false is implemented: queries then see later keys."""
    follows_bidirectional: bool = False
    """Whether use_bidirectional_attention is implemented: queries then see half of a window on each side."""

    def read(self, config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
        """The architecture that a config.json of this family describes.

        Arguments:
            config: The config.json, with the key names of this family.
            shapes: Shapes of the checkpoint's tensors by name; empty if they are not known.

        Raises:
            ConfigError: A key is missing, has the wrong type, contradicts another key, or asks for a feature
                that is not implemented.
        """
        config = self._renamed(config)
        refuse_unfollowed(
            config, looks_ahead=self.follows_is_causal, bidirectional=self.follows_bidirectional
        )
        for key, implemented in {**dict.fromkeys(self.never, None), **self.always}.items():
            value = config.raw.get(key, implemented)
            if value != implemented and not (implemented is None and value is False):
                expected = f"no {key}" if implemented is None else f"{key} to be {implemented!r}"
                raise ConfigError(
                    f"{config.source}: expected {expected}, found {value!r} in a {config.raw['model_type']} "
                    f"model; {TRY_TRANSFORMERS}"
                )
        return self.build(config, shapes)

    def _renamed(self, config: ConfigReader) -> ConfigReader:
        """Copy of a config.json in which the family's key names are replaced by the usual ones.

        Raises:
            ConfigError: A key is present under both names with two values; which of them transformers uses
                depends on their order in the file.
        """
        by_usual_name = {name: config.raw[own] for name, own in self.aliases.items() if own in config.raw}
        # transformers ignores these usual names in a file that has the family's names.
        ignored_names = {"hidden_act", "intermediate_size"} & set(self.aliases)
        raw = {key: value for key, value in config.raw.items() if key not in ignored_names}
        for name, value in by_usual_name.items():
            if name in raw and raw[name] != value:
                raise ConfigError(
                    f"{config.source}: expected {self.aliases[name]} and {name}, two names of the same "
                    f"setting, to have one value, found {value!r} and {raw[name]!r}; remove one of them"
                )
        return config.reading(raw | by_usual_name)


ATTENDING: dict[str, AttendingFamily] = {}
"""model_type -> family, for families whose layers all have attention."""
Build = Callable[[ConfigReader, TensorShapes], ComposedArchitecture]
"""Function (config.json, shapes of the checkpoint's tensors by name) -> architecture."""


def family(model_type: str, examples: str, **options: Any) -> Callable[[Build], Build]:
    """Decorator that registers a function (config.json, shapes of tensors) -> architecture in the table
    `ATTENDING`.

    Arguments:
        model_type: Value of the config key model_type.
        examples: Well-known models of the family.
        options: Further fields of `AttendingFamily`.
    """

    # Stacked decorators register one function under several model types.
    def register(build: Build) -> Build:
        ATTENDING[model_type] = AttendingFamily(examples, build, **options)
        return build

    return register


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
    """Spec of grouped-query attention without rope and window, which `decoder` adds for each layer.

    Arguments:
        config: The config.json.
        heads: Number of query heads; None reads num_attention_heads.
        head_dim: Default of the config key head_dim; None divides hidden_size by the number of heads.
        width: Number of entries of a head; None reads head_dim.
        kv_heads: Default of num_key_value_heads; None for one key head per query head.
        bias: Whether the query, key, value and output projections have biases, unless `fields` set
            `qkv_bias` or `o_bias`.
        fields: Further fields of `AttentionSpec`.
    """
    heads = config.integer("num_attention_heads") if heads is None else heads
    equal_share = config.integer("hidden_size") // heads
    if width is None:
        # An explicit null means hidden_size / heads to transformers, not the default of the family.
        is_null = "head_dim" in config.raw and config.raw["head_dim"] is None
        width = config.integer("head_dim", equal_share if is_null else head_dim or equal_share)
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
    """Spec of an MLP, gated unless `fields` set `is_gated`.

    Arguments:
        config: The config.json.
        act: Activation function; None reads hidden_act, with default SiLU.
        width: Hidden width; None reads intermediate_size.
        default_width: Default of intermediate_size; None if the config must have the key.
        bias: Whether all projections of the MLP have biases.
        fields: Further fields of `MlpSpec`.
    """
    width = config.integer("intermediate_size", default_width) if width is None else width
    return MlpSpec(width, read_activation(config) if act is None else act, has_bias=bias, **fields)


def head_transform(
    config: ConfigReader, eps: float, act: str = "gelu", *, key: str = "", **fields: Any
) -> HeadTransform:
    """Spec of the dense map, activation and norm before the language head of an encoder.

    Arguments:
        config: The config.json.
        eps: Epsilon of the norm.
        act: Name of the activation function in a config.json, if `key` is absent there.
        key: Config key of the activation function; "" to use `act` always.
        fields: Further fields of `HeadTransform`; its width is hidden_size unless they set it.

    Raises:
        ConfigError: The activation is not implemented.
    """
    name = config.text(key, act) if key else act
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{config.source}: expected {key} to be one of {', '.join(ACTIVATIONS)}, found {name!r}; "
            f"{TRY_TRANSFORMERS}"
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
    """Make a function (config.json, entries of a head, default of max_position_embeddings) -> rotary
    embedding.

    Arguments:
        theta: Default of rope_theta.
        share: Default of partial_rotary_factor; 1 for families whose rope always rotates whole heads.
        interleaved: Whether entries 2i and 2i + 1 rotate together, instead of i and i + dim / 2.
        default: Value of rope_parameters if the config has none; None for rope without context extension.
        is_backwards: Whether rotation angles are negative.
        options: Further arguments of `read_rope`.
    """
    options = {"theta": theta, "is_partial": share != 1, **options}

    def read(config: ConfigReader, head_dim: int, max_positions: int | None) -> RopeConfig:
        raw = {"partial_rotary_factor": share} | config.raw if share != 1 else dict(config.raw)
        # An empty object is no null: it means rope without scaling.
        if default and raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
            raw["rope_parameters"] = default
        context = config.integer("max_position_embeddings", max_positions)
        rope_config = read_rope(config.reading(raw), head_dim, context, **options)
        return replace(rope_config, interleaved=interleaved, is_backwards=is_backwards)

    return read


def rope_everywhere(theta: float = 10000.0, **options: Any) -> Ropes:
    """Make a function (`Ropes`) that gives all layers the same rope. theta: default of rope_theta; options:
    further arguments of `rope`."""
    return lambda config, head_dim, max_positions, windows: (
        (rope(theta, **options)(config, head_dim, max_positions),) * len(windows)
    )


PLAIN_ROPE = rope_everywhere()
"""Rope in all layers with the default base 10000."""


def rope_flags(config: ConfigReader, layers: int) -> list[bool]:
    """For each layer, whether it has rope: by the config key no_rope_layers (in which, despite the name, 1
    means rope), or else in all but every n-th layer, where n is no_rope_layer_interval, with default 4.

    Arguments:
        config: The config.json.
        layers: Number of layers.

    Raises:
        ConfigError: no_rope_layers is not a list of 0 or 1 for each layer.
    """
    flags = config.raw.get("no_rope_layers")
    if not flags:
        interval = config.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % interval) for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        raise ConfigError(
            f"{config.source}: expected no_rope_layers to list 0 or 1 for each of {layers} layers, found "
            f"{flags!r}; correct the file, or fetch it again"
        )
    return [bool(flag) for flag in flags]


def rope_where_flagged(theta: float, **options: Any) -> Ropes:
    """Make a function (`Ropes`) that gives the same rope to the layers that the config key no_rope_layers
    selects, and none to the others.

    Arguments:
        theta: Default of rope_theta.
        options: Further arguments of `rope`.
    """

    def ropes(
        config: ConfigReader, head_dim: int, max_positions: int | None, windows: Windows
    ) -> list[RopeConfig | None]:
        flags = rope_flags(config, len(windows))
        rope_config = rope(theta, **options)(config, head_dim, max_positions)
        return [rope_config if flag else None for flag in flags]

    return ropes


def rope_in_windows(theta: float = 10000.0, *, unless_none: bool = False, **options: Any) -> Ropes:
    """Make a function (`Ropes`) that gives the same rope to layers with a sliding window, and none to layers
    of full attention.

    Arguments:
        theta: Default of rope_theta.
        unless_none: Whether all layers have rope in a model without windows (sliding_window null or 0).
        options: Further arguments of `rope`.
    """

    def ropes(
        config: ConfigReader, head_dim: int, max_positions: int | None, windows: Windows
    ) -> list[RopeConfig | None]:
        rope_config = rope(theta, **options)(config, head_dim, max_positions)
        everywhere = unless_none and not config.raw.get("sliding_window", 4096)
        return [rope_config if everywhere or window is not None else None for window in windows]

    return ropes


def two_ropes(theta: float, local_theta: float, local_key: str = "") -> Ropes:
    """Make a function (`Ropes`) that gives one rope to layers of full attention, and another to layers with a
    sliding window. In a config.json, rope_parameters has a section for each of the two layer types; older
    files have rope_theta and rope_scaling for full attention, and `local_key` for windows.

    Arguments:
        theta: Default of the base in layers of full attention.
        local_theta: Default of the base in layers with a window.
        local_key: Config key of the base in layers with a window; "" if the family has none.
    """
    kinds = ("full_attention", "sliding_attention")

    def ropes(
        config: ConfigReader, head_dim: int, max_positions: int | None, windows: Windows
    ) -> list[RopeConfig | None]:
        raw, parameters = config.raw, config.mapping("rope_parameters")
        if parameters and not set(parameters) <= set(kinds):
            raise ConfigError(
                f"{config.source}: expected rope_parameters to have the sections {' and '.join(kinds)}, "
                f"found {', '.join(parameters)}; {TRY_TRANSFORMERS}"
            )
        full_section, local_section = (parameters.get(kind) for kind in kinds)
        if raw.get("rope_scaling"):
            full_section = {**(full_section or {}), **raw["rope_scaling"]}
        context = config.integer("max_position_embeddings", max_positions)

        def read(default: float, key: str, section: Any) -> RopeConfig:
            values = {"rope_theta": raw.get(key) if key else None, "rope_parameters": section}
            reader = config.reading(values | {"max_position_embeddings": context})
            return rope(default)(reader, head_dim, max_positions)

        full = read(theta, "rope_theta", full_section)
        local = read(local_theta, local_key, local_section)
        return [full if window is None else local for window in windows]

    return ropes


# -- windows


def window_everywhere(config: ConfigReader, default: int | None = None) -> Windows:
    """The same window in every layer: the config key sliding_window, where an explicit null means no window.
    default: value for an absent key."""
    return (config.optional_integer("sliding_window", default),) * layers_of(config)


def windows_where_listed(
    config: ConfigReader, has_window: Callable[[int], bool], size: int | None
) -> Windows:
    """Window of each layer: `size` keys in the layers that layer_types lists as "sliding_attention", None in
    others.

    Arguments:
        config: The config.json.
        has_window: Function (number of a layer) -> whether it has a window, for a config without layer_types.
        size: Number of keys that a query sees, itself included; None for no window in any layer.
    """
    types, layers = config.strings("layer_types"), layers_of(config)
    if types is not None:
        return listed_windows(config, types, size, layers)
    return tuple(size if has_window(layer) else None for layer in range(layers))


def upper_windows(config: ConfigReader, default: int | None = 4096) -> Windows:
    """Window of each layer: sliding_window keys in layers from max_window_layers on, if use_sliding_window is
    true (Qwen 2), else None.

    Arguments:
        config: The config.json.
        default: Default of sliding_window.
    """
    size = config.optional_integer("sliding_window", default)
    start = config.integer("max_window_layers", 28, least=0)
    is_on = config.flag("use_sliding_window", False)
    return windows_where_listed(config, lambda layer: layer >= start, size if is_on else None)


def layers_of(config: ConfigReader) -> int:
    """Number of layers: the config key num_hidden_layers."""
    return config.integer("num_hidden_layers")


def windows_by_type(
    config: ConfigReader, types: LayerTypes, default: int | None = 4096, *, has_flag: bool = False
) -> Windows:
    """Window of each layer: sliding_window keys in the layers that layer_types lists as "sliding_attention",
    None in others.

    Arguments:
        config: The config.json.
        types: Function that gives layer_types for a config that does not list them.
        default: Default of sliding_window; an explicit null means no window.
        has_flag: Whether windows exist only if use_sliding_window is true.
    """
    # layer_types is checked even if the flag disables all windows.
    layers, listed = layers_of(config), config.strings("layer_types")
    if has_flag and not config.flag("use_sliding_window", False):
        return listed_windows(config, listed or ["full_attention"] * layers, None, layers)
    size = config.optional_integer("sliding_window", default)
    return listed_windows(config, listed or types(config, layers), size, layers)


def _types_with_windows(has_window: Callable[[int], bool], layers: int) -> list[str]:
    """layer_types, the type of each layer, from a function (number of a layer) -> whether it has a window;
    layers: number of layers."""
    return ["sliding_attention" if has_window(layer) else "full_attention" for layer in range(layers)]


def every_nth_full(default: int, key: str = "") -> LayerTypes:
    """Make a function (`LayerTypes`) that gives full attention to every n-th layer and a sliding window to
    all others.

    Arguments:
        default: The period n, or the default of `key`.
        key: Config key of n; "" if n is always `default`.
    """

    def types(config: ConfigReader, layers: int) -> list[str]:
        period = config.integer(key, default) if key else default
        return _types_with_windows(lambda layer: bool((layer + 1) % period), layers)

    return types


def every_layer_full(config: ConfigReader, layers: int) -> list[str]:
    """layer_types for a model with full attention in all layers; layers: number of layers."""
    return ["full_attention"] * layers


def first_of_four_full(config: ConfigReader, layers: int) -> list[str]:
    """layer_types for a model with a sliding window in all layers except the first of every four; layers:
    number of layers."""
    return _types_with_windows(lambda layer: bool(layer % 4), layers)


def full_then_windows(default: int) -> LayerTypes:
    """Make a function (`LayerTypes`) that gives a sliding window to layers from max_window_layers on, and
    full attention to those before. default: default of max_window_layers."""

    def types(config: ConfigReader, layers: int) -> list[str]:
        start = config.integer("max_window_layers", default, least=0)
        return _types_with_windows(lambda layer: layer >= start, layers)

    return types


# -- positions and names


@dataclass(frozen=True)
class PositionContext:
    """How the layers of a model see positions: length of the context, rope, windows, and a table of
    positions."""

    max_positions: int | None
    """Default of max_position_embeddings; None for an unbounded context."""
    rope: Ropes | None = PLAIN_ROPE
    """Rope of the layers; None for a model without rope."""
    windows: Windows | None = None
    """Window of each layer; None for full attention in all layers."""
    looks_ahead: bool | None = None
    """Whether queries see later keys; None to read the config key is_causal."""
    longest: int | None = None
    """Largest length of a prompt, in tokens, if transformers computes longer prompts in another way; None for
    no such limit."""
    head_dim: int | None = None
    """Number of entries of a head that rope may rotate; needed only if `decoder` gets a function as mixer
    instead of an `AttentionSpec`."""
    table: Mapping[str, Any] = field(default_factory=dict)
    """`ComposedArchitecture` fields of a position table; empty without a position table."""


def position_table(
    config: ConfigReader,
    default: int,
    *,
    start_row: int | None = None,
    counts_rows: bool = False,
    windows: Windows | None = None,
) -> PositionContext:
    """Context, windows and table of positions of a model with a table of positions instead of rope.

    Arguments:
        config: The config.json.
        default: Default of max_position_embeddings.
        start_row: Row of the table for the first position. None for the row after pad_token_id (RoBERTa): the
            config then counts rows of the table, and no prompt may hold the padding token.
        counts_rows: Whether max_position_embeddings counts rows of the table instead of positions.
        windows: Window of each layer; None for full attention in all layers.
    """
    size, unknown = config.integer("max_position_embeddings", default), {}
    if start_row is None:
        # RoBERTa numbers positions from pad_token_id + 1 and gives padding tokens the row pad_token_id.
        pad = config.integer("pad_token_id", 1, least=0)
        start_row, counts_rows, unknown = pad + 1, True, {"unknown_token": pad}
    positions, rows = (size - start_row, size) if counts_rows else (size, size + start_row)
    table = {"max_position_embeddings": positions, "position_rows": rows, "first_position": start_row}
    return PositionContext(default, rope=None, windows=windows, table=table | unknown)


# -- the whole


def with_layers(
    model: ComposedArchitecture, changes: Callable[[int], Mapping[str, Any]]
) -> ComposedArchitecture:
    """Copy of an architecture with changed layers. changes: function (number of a layer) -> fields of its
    `LayerSpec` to replace, by name."""
    blocks = (replace(block, **changes(number)) for number, block in enumerate(model.blocks))
    return replace(model, blocks=tuple(blocks))


def decoder(
    config: ConfigReader,
    mixer: AttentionSpec | LayerMixer,
    channel_mixer: ChannelMixerSpec | Callable[[int], ChannelMixerSpec],
    *,
    context: PositionContext,
    eps: float,
    norms: Literal["before", "after", "around", "of sums"] = "before",
    parallel_norms: int = 0,
    tied: bool | None = False,
    **fields: Any,
) -> ComposedArchitecture:
    """Architecture of a model whose layers all have attention.

    Arguments:
        config: The config.json, under the usual names of its keys.
        mixer: Attention of all layers, to which rope and window are added; or a function that makes the
            mixer of a layer.
        channel_mixer: Channel mixer of all layers; or a function (number of a layer) -> its channel mixer.
        context: Context length, rope, windows and table of positions.
        eps: Epsilon of the norms of the residual stream.
        norms: Place of the norms in a layer (`LayerSpec.norms`).
        parallel_norms: 0 if the MLP reads the stream after attention has been added. In parallel layers,
            where both read the stream that enters: 1 if they share a norm, 2 if each has its own.
        tied: Default of tie_word_embeddings; None for an untied head, whatever the config says.
        fields: Further fields of `ComposedArchitecture`; `spelling` is `LLAMA` unless they set it.

    Raises:
        ConfigError: A required key is missing, or sizes do not fit together.
    """
    hidden, layers, is_acausal = config.integer("hidden_size"), layers_of(config), asks_to_look_ahead(config)
    windows = (None,) * layers if context.windows is None else context.windows
    # is_causal=false: transformers' window then excludes the query itself, on both sides.
    windows = both_ways(windows) if is_acausal else windows
    if is_bidirectional := config.flag("use_bidirectional_attention", False):
        # transformers then splits the window between both sides of the query (EmbeddingGemma).
        windows = [window and window // 2 + 1 for window in windows]
    looks_ahead = is_bidirectional or (is_acausal if context.looks_ahead is None else context.looks_ahead)
    head_dim = mixer.head_dim if isinstance(mixer, AttentionSpec) else context.head_dim
    ropes: Sequence[RopeConfig | None] = (None,) * layers
    if context.rope is not None:
        assert head_dim is not None  # families with a function as mixer set `PositionContext.head_dim`
        ropes = context.rope(config, head_dim, context.max_positions, windows)

    def layer_spec(layer: int) -> LayerSpec:
        if isinstance(mixer, AttentionSpec):
            layer_mixer: MixerSpec = replace(
                mixer, rope=ropes[layer], window=windows[layer], is_bidirectional=looks_ahead
            )
        else:
            layer_mixer = mixer(ropes[layer], windows[layer], layer)
        return LayerSpec(
            (layer_mixer,),
            channel_mixer(layer) if callable(channel_mixer) else channel_mixer,
            norms,
            is_parallel=parallel_norms > 0,
            has_two_norms=parallel_norms != 1,
        )

    fields = {"spelling": LLAMA, **context.table, **fields}
    if "max_position_embeddings" not in fields:
        length = context.max_positions and config.integer("max_position_embeddings", context.max_positions)
        # Longer prompts would be computed differently by transformers, so they are refused.
        is_limited = length is not None and context.longest is not None and context.longest < length
        fields["max_position_embeddings"] = context.longest if is_limited else length
    return ComposedArchitecture(
        model_type=config.raw["model_type"],
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        blocks=tuple(checked(config, layer_spec(layer)) for layer in range(layers)),
        norm_eps=eps,
        tie_word_embeddings=config.flag("tie_word_embeddings", bool(tied)) and tied is not None,
        **fields,
    )
