"""ComposedArchitecture: a model as a sequence of layers of attention, state spaces, convolutions, MLPs,
experts.

    norm -> mixer, or several in parallel -> +        norm -> channel mixer -> +

Norms may instead follow the output, apply to the stream itself, or to the sum of stream and output
(`LayerSpec.norms`). A layer is a list of mixers and a channel mixer; either may be missing. A pure Mamba
model has layers of one mixer and no channel mixer; decoder layers of an encoder-decoder (T5) also have
cross-attention. Mixers are described in mixers.py; this module derives from their sequence which hook points
exist in which layers, and which positions a change at them affects.

Border: sizes and switches; tensor names are in layer_tensors.py. Never imports torch.

Axes: as in points.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from ....store.digest import digest
from ....store.errors import ConfigError
from .architecture import (
    UNLIMITED,
    Architecture,
    AxisSizes,
    FinalNorm,
    HeadTransform,
    Reach,
    Tensors,
    WeightCounts,
    plain,
)
from .layer_parts import AltUpSpec, LayerInputSpec
from .layer_summaries import Layer, Mixer, MixersInSequence, MixersSideBySide, NoMixer
from .layer_tensors import Spelling, composed_tensors
from .mixers import AttentionSpec, ChannelMixerSpec, CrossAttentionSpec, MixerSpec, SharedBlockSpec
from .points import ORDER, SPLIT_INPUTS, HookPoint
from .rwkv import TimeMixSpec
from .transformer import TRY_TRANSFORMERS, RopeConfig

__all__ = ["ComposedArchitecture", "LayerSpec", "PairSpec"]

_BEFORE_MIXERS = frozenset(("resid_pre", "altup_streams", "altup_predicted", "ln1_scale", "ln1_normalized"))
_FINAL_NORM = ("ln_final_scale", "ln_final_normalized", "final_norm")
_LAUREL = ("laurel_scale", "laurel_normalized", "laurel_out")
_TRANSFORM = ("head_pre_act", "head_post_act", "head_scale", "head_normalized", "head_out")


@dataclass(frozen=True)
class LayerSpec:
    """One layer: mixers that read the same normalised stream, and a channel mixer after them."""

    mixers: tuple[MixerSpec, ...]
    """Parallel mixers, whose outputs are summed; () for a layer with a channel mixer only."""
    channel_mixer: ChannelMixerSpec | None = None
    """MLP, experts or RWKV's channel mix; None for a layer with mixers only."""
    norms: Literal["before", "after", "around", "of stream", "of sums"] = "before"
    """Norms of each half of the layer: before its input (pre-norm), after its output, or both. "of stream":
    the normalised input is also carried on as the stream (MiniMax). "of sums": post-norm, the sum of stream
    and output is normalised (BERT)."""
    carried: tuple[float, float] = (1.0, 1.0)
    """With norms "of stream": factors of the stream at the additions of the mixers' and the channel mixer's
    outputs."""
    is_parallel: bool = False
    """Whether the channel mixer also reads the stream that enters the layer (GPT-J)."""
    has_two_norms: bool = True
    """Parallel layers: separate norms for mixer and channel mixer, instead of one shared norm."""
    shared: SharedBlockSpec | None = None
    """Shared block before the mixers, whose output is added to their input (Zamba); None for no such
    block."""
    post_factor: float = 1.0
    """Factor of each half's output after its post-norm, before it is added to the stream."""
    source: int | None = None
    """Layer number whose tensors this layer shares (ALBERT); None for a layer with its own tensors."""
    reads_normed: bool = True
    """Whether pre-norms apply to the mixers' input; false in ModernBERT's first layer."""
    has_gains: bool = False
    """Whether the stream is multiplied by learned weights, [hidden], before each addition (Doge)."""
    laurel_rank: int = 0
    """Rank of LAuReL's projections, whose output is added to the stream with that of the mixers (Gemma 3n); 0
    for no LAuReL."""
    layer_input: LayerInputSpec | None = None
    """Per-layer input, added after the channel mixer (Gemma 3n and 4); None for no such input."""
    has_scalar: bool = False
    """Whether the layer finally multiplies the stream by a learned number (Gemma 4)."""
    cross: CrossAttentionSpec | None = None
    """Cross-attention between mixers and channel mixer, in decoder layers of an encoder-decoder; None in
    other layers."""
    has_pre_norm: bool = False
    """Whether the stream is replaced by its norm as it enters the layer (layer 0 of RWKV)."""

    def __post_init__(self) -> None:
        if not self.mixers and self.channel_mixer is None:
            raise ConfigError("expected a mixer or a channel mixer in every layer, found neither in one")
        if self.is_parallel and (self.norms != "before" or not self.mixers or self.channel_mixer is None):
            raise ConfigError(
                "expected a parallel layer to have a mixer, a channel mixer and norms before them, found "
                f"norms {self.norms!r}"
            )
        if self.shared is not None and (not self.mixers or self.norms != "before" or self.is_parallel):
            raise ConfigError(
                "expected a shared block only in layers with a pre-norm mixer, found another layer with one"
            )
        for axis, size in (item for spec in self.shapes for item in spec.axis_sizes.items()):
            if self.axis_sizes[axis] != size:
                raise ConfigError(
                    f"expected {axis} to be of one size in all parts of a layer, found {size} and "
                    f"{self.axis_sizes[axis]}; {TRY_TRANSFORMERS}"
                )
        if self.has_token_shift != any(isinstance(spec, TimeMixSpec) for spec in self.mixers):
            raise ConfigError(
                "expected a time mix in just the layers with a token-shifted channel mixer, found one of "
                "them alone"
            )

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of its hook points."""
        sizes = {} if self.layer_input is None else {"layer_input": self.layer_input.size}
        return sizes | {axis: size for spec in self.shapes for axis, size in spec.axis_sizes.items()}

    @cached_property
    def norm_names(self) -> tuple[str, ...]:
        """Names of its norms: "ln1" and "ln2" before mixers and channel mixer, "ln1_post" and "ln2_post"
        after them."""
        # Post-norms of BERT ("of sums") are still called ln1 and ln2, as in TransformerLens.
        suffixes = {"after": ("_post",), "around": ("", "_post")}.get(self.norms, ("",))
        halves = ["ln1"] if self.mixers and self.reads_normed else []
        halves += ["ln_cross"] if self.cross is not None else []
        has_second = self.channel_mixer is not None and (self.has_two_norms or not self.is_parallel)
        halves += ["ln2"] if has_second else []
        return tuple(half + suffix for half in halves for suffix in suffixes)

    @cached_property
    def side(self) -> Literal["source", "target"] | None:
        """In encoder-decoders: the part of each prompt that the layer acts on, source in encoder layers and
        target in decoder layers; None in other models."""
        parts = {spec.part for spec in self.mixers if isinstance(spec, AttentionSpec)}
        return next((part for part in parts if part != "cross"), None)

    @property
    def mixer(self) -> Mixer:
        """Summary of all its mixers together."""
        summaries = tuple(spec.summary for spec in self.mixers)
        if not summaries:
            return NoMixer()
        parallel = summaries[0] if len(summaries) == 1 else MixersSideBySide(summaries)
        return parallel if self.shared is None else MixersInSequence((self.shared.summary, parallel))

    @property
    def summary(self) -> Layer:
        """Torch-free summary of this layer, as `Architecture.layers` shows it."""
        channel_mixer = None if self.channel_mixer is None else self.channel_mixer.summary
        # In these cases the stream is no plain sum of outputs, which is what users of summaries need to know.
        is_changed = self.has_gains or self.has_scalar or self.laurel_rank or self.layer_input is not None
        norms = "of stream" if self.norms == "of sums" or is_changed else self.norms
        return Layer(self.mixer, channel_mixer, norms, self.is_parallel)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its hook points (`HookKind.name`)."""
        kinds = ["resid_pre", "resid_post"]
        kinds += [f"{norm}_{part}" for norm in self.norm_names for part in ("scale", "normalized")]
        if self.has_split_inputs:
            kinds += SPLIT_INPUTS
        if self.mixers:
            kinds += ["attn_out", *(kind for spec in self.mixers for kind in spec.held_points)]
        if self.channel_mixer is not None:
            kinds += ["mlp_pre", "mlp_post", "mlp_out", *self.channel_mixer.points]
        if self.mixers and self.channel_mixer is not None and not self.is_parallel:
            kinds.append("resid_mid")
        for part in (self.shared, self.layer_input):
            kinds += () if part is None else part.points
        if self.cross is not None:
            kinds += [*self.cross.points, "cross_attn_out", "resid_mid_cross"]
        if self.has_pre_norm:
            kinds.append("pre_norm")
        return (*kinds, *(_LAUREL if self.laurel_rank else ()))

    @cached_property
    def has_split_inputs(self) -> bool:
        """Whether each attention head can be given a separate input (`SPLIT_INPUTS`): q, k and v must be
        linear maps of the normalised stream only."""
        attends = any(isinstance(mixer, AttentionSpec) and not mixer.has_v_norm for mixer in self.mixers)
        is_plain = self.reads_normed and self.shared is None and self.side is None
        return attends and self.norms in ("before", "around") and is_plain

    @property
    def mixes_positions(self) -> bool:
        """Whether later positions depend on the stream that enters; they do not if the only mixer reads keys
        and values of an earlier layer."""
        return any(not isinstance(spec, AttentionSpec) or spec.source is None for spec in self.all_mixers)

    @cached_property
    def has_token_shift(self) -> bool:
        """Whether the channel mixer also reads the previous token."""
        return self.channel_mixer is not None and self.channel_mixer.has_token_shift

    @property
    def all_mixers(self) -> tuple[MixerSpec, ...]:
        """All specs that mix positions: shared block, mixers and cross-attention."""
        mixers = self.mixers if self.shared is None else (self.shared, *self.mixers)
        return mixers if self.cross is None else (*mixers, self.cross)

    @property
    def shapes(self) -> Iterator[MixerSpec | ChannelMixerSpec]:
        """Specs of all parts: shared block, mixers, channel mixer."""
        yield from self.all_mixers
        if self.channel_mixer is not None:
            yield self.channel_mixer

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token inside this layer. itemsize: bytes per number."""
        return sum(spec.bytes_per_token(itemsize) for spec in self.shapes)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields as plain values, each mixer with its kind."""
        mixers = [_named(spec) for spec in self.mixers]
        channel_mixer = self.channel_mixer and _named(self.channel_mixer)
        shared = self.shared and _named(self.shared)
        return plain(self) | {"mixers": mixers, "channel_mixer": channel_mixer, "shared": shared}


@dataclass(frozen=True)
class PairSpec:
    """Properties of an encoder-decoder that belong to no single layer.

    A prompt is a pair of source and target on one axis of positions: source tokens, then target tokens. The
    id of the first target token is raised by the vocabulary size, which marks where the target begins, so
    that the token ids alone identify the pair in keys, stores and plans. Layers are numbered consecutively:
    encoder layers act on source positions; decoder layers act on target positions and read the encoder's
    normalised output by cross-attention. At all other positions a layer adds nothing to the stream.
    """

    encoder_layers: int
    """Number of encoder layers, which come before the decoder layers."""
    start_token: int
    """Token id with which a target begins if the caller gives none."""
    side_length: int | None = None
    """Largest length of a source and of a target, in tokens; None for no bound."""
    norms_target_tokens: bool = False
    """Whether the embedding norm of a target is applied to its unscaled token embeddings before positions are
    added (Blenderbot 90M); in a source it is always applied to the sum."""


@dataclass(frozen=True)
class ComposedArchitecture(Architecture):
    """A model of `LayerSpec`s: everything except the weights that decides its results."""

    kind: ClassVar[str] = "composed"
    version: ClassVar[str] = "transformer/1"

    model_type: str
    """Model type in config.json, which selects the family."""
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Rows of the embedding matrix, and number of logits."""
    blocks: tuple[LayerSpec, ...]
    """Specs of the layers, in order of execution."""
    spelling: Spelling
    """Tensor names of the checkpoint."""
    norm_eps: float
    """Epsilon that norms of the stream add to the mean square or variance; the final norm may have its
    own."""
    norm_type: Literal["rms", "gemma_rms", "layer"] = "rms"
    """Kind of all norms of the stream: RMS norm, RMS norm with 1 + weight, or layer norm."""
    max_position_embeddings: int | None = None
    """Largest length of a prompt in tokens; None for an unbounded context."""
    embedding_scale: float | None = None
    """Factor of the token embeddings as they enter the stream; None for no factor."""
    rounds_embedding_scale: bool = False
    """Whether that factor is rounded to the dtype of the embeddings (Gemma)."""
    logit_factor: float = 1.0
    """Factor of the logits, before any soft cap."""
    final_logit_softcapping: float | None = None
    """Cap c of the logits, c tanh(logits / c); None for no cap."""
    has_wide_stream: bool = False
    """Whether the residual stream is float32, whatever the dtype of the weights."""
    position_rows: int = 0
    """Rows of the table of positions; 0 for a model without such a table."""
    first_position: int = 0
    """Row of that table for the first position of a prompt."""
    tie_word_embeddings: bool = False
    """Whether the matrix of the language head is the embedding matrix."""
    norm_biases: Literal["of layer norms", "in layers", "none"] = "of layer norms"
    """Norms with a bias: all layer norms, the norms inside of layers whatever their kind, or none."""
    position_waves: Literal["fairseq", "transformer"] | None = None
    """Kind of sinusoidal table of positions, computed instead of loaded (`Architecture.position_waves`); None
    for a learned table."""
    has_embedding_norm: bool = False
    """Whether embeddings are normalised before they enter the stream."""
    has_norm_weights: bool = True
    """Whether norms of the stream have learned weights."""
    has_unit_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    has_head_bias: bool = False
    """Whether the language head has a bias, one number per logit."""
    embedding_width: int | None = None
    """Embedding width, if a linear projection maps embeddings (with positions and norm) to the hidden size;
    None without such a projection."""
    token_types: int = 0
    """Rows of the table of token types, whose first row is added to every embedding; 0 for no table."""
    unknown_token: int | None = None
    """Token id that prompts must not contain, as transformers gives it no position; None for no such
    token."""
    dropped_token: int | None = None
    """Token id whose embedding is 0, while all others are rescaled for its share of the prompt, as in
    training with masks (Rives et al., ESM-1b, 2021, and its reference code); None for no such token."""
    final_norm: FinalNorm | None = FinalNorm()
    """Norm before the head; None if the head reads the stream."""
    transform: HeadTransform | None = None
    """Dense layer, activation and norm before the language head; None if the head reads the final norm."""
    altup: AltUpSpec | None = None
    """Parallel streams of all layers (Gemma 3n); None for a single stream."""
    pair: PairSpec | None = None
    """Sides, start and lengths of an encoder-decoder; None for models of single sequences."""

    def __post_init__(self) -> None:
        # The table of all layers' inputs is divided evenly.
        if len({block.layer_input for block in self.blocks}) > 1:
            raise ConfigError(
                "expected per-layer inputs that are alike in all layers, found several kinds; "
                f"{TRY_TRANSFORMERS}"
            )

    def under(self, root: str, head: str) -> ComposedArchitecture:
        """Copy for a checkpoint whose tensors have other names: root replaces the prefix "model.", head is
        the name of the language head without ".weight". ConfigError for encoder-decoders."""
        if self.pair is not None:
            super().under(root, head)  # raises ConfigError
        names = ("embed", "embed_norm", "positions", "final_norm", "layer")
        old = {name: getattr(self.spelling, name) for name in names}
        new = {
            name: root + path.removeprefix("model.")
            for name, path in old.items()
            if path.startswith("model.")
        }
        return replace(self, spelling=replace(self.spelling, **new, head=head))

    @property
    def target_start(self) -> int | None:  # type: ignore[override]
        """Encoder-decoders: id of the first target token, which is raised by the vocabulary size to mark
        where the target begins; None for other models."""
        return None if self.pair is None else self.vocab_size + self.pair.start_token

    @property
    def side_length(self) -> int | None:
        """Encoder-decoders: largest length of a source and of a target, in tokens; None for no bound, and for
        other models."""
        return None if self.pair is None else self.pair.side_length

    @property
    def head_dim(self) -> int:
        """Entries of an attention head; 0 for a model without attention."""
        return int(self.axis_sizes.get("d_head", 0))

    @property
    def intermediate_size(self) -> int:
        """Hidden width of the MLPs; 0 for a model without MLPs."""
        return int(self.axis_sizes.get("mlp", 0))

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Number of layers."""
        return len(self.blocks)

    @property
    def fields(self) -> dict[str, Any]:
        """Every field as plain values: "blocks" lists the distinct layers, "layers" the index of each layer
        in that list."""
        # Layers are listed once, as models with many equal layers would have very long keys.
        distinct = list(dict.fromkeys(self.blocks))
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "blocks"}
        return {name: plain(value) if is_dataclass(value) else value for name, value in values.items()} | {
            "blocks": [block.fields for block in distinct],
            "layers": [distinct.index(block) for block in self.blocks],
        }

    @property
    def digest(self) -> str:
        """Digest of every field except the tensor names (`spelling`), which do not change results."""
        return digest("architecture", self.fields | {"spelling": None})

    @cached_property
    def context_length(self) -> int:
        """See `Architecture`; `UNLIMITED` for state spaces. Dynamic rope multiplies the length by its
        factor."""
        # Dynamic NTK scaling extends the context while it runs; other schemes are part of the config's
        # length.
        stretch = max((rope.factor for rope in self._ropes if rope.scheme == "dynamic"), default=1.0)
        return int((self.max_position_embeddings or UNLIMITED) * stretch)

    @property
    def final_norm_eps(self) -> float:
        """Epsilon that the final norm adds to the mean square or variance."""
        own = None if self.final_norm is None else self.final_norm.eps
        return self.norm_eps if own is None else own

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """See `Architecture`; attention and state spaces have different axes for their heads. Axes whose size
        differs between layers are in `AxisSizes.differing`."""
        sizes: dict[str, set[int]] = {}
        for axis, size in (item for block in self.blocks for item in block.axis_sizes.items()):
            sizes.setdefault(axis, set()).add(size)
        model = {"hidden": self.hidden_size, "one": 1}
        model |= {} if self.transform is None else {"embedding": self.transform.width}
        model |= {} if self.altup is None else {"stream": self.altup.streams}
        fixed = {axis: size for axis, (size, *others) in sizes.items() if not others}
        axis_sizes = AxisSizes(model | fixed)
        axis_sizes.differing = {axis: values for axis, values in sizes.items() if len(values) > 1}
        return axis_sizes

    def sizes_in(self, layer: int | None) -> dict[str, int]:
        """Axis name -> size, for the hook points of one layer; layer: its number, or None for those outside
        of layers."""
        return self.axis_sizes | ({} if layer is None else self.blocks[layer].axis_sizes)

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """See `Architecture`; layers with different mixers have different hook points."""
        outside = _FINAL_NORM * (self.final_norm is not None) + _TRANSFORM * (self.transform is not None)
        in_layers, merged = ((), ()) if self.altup is None else (self.altup.points, ("altup_merged",))
        points = [HookPoint(kind) for kind in ("embed", *outside, *merged)]
        for layer, block in enumerate(self.blocks):
            points += [HookPoint(kind, layer) for kind in (*block.kinds, *in_layers)]
        return tuple(sorted(points, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """See `Architecture`; with AltUp, no stream is the plain sum of all outputs."""
        layers = tuple(block.summary for block in self.blocks)
        return layers if self.altup is None else tuple(replace(layer, norms="of stream") for layer in layers)

    def heads_of(self, layer: int) -> AttentionSpec | None:
        """See `Architecture`; None for latent attention, for attention in a shared block, and if values are
        normalised, so that head outputs are no linear maps of the stream."""
        specs = (spec for spec in self.blocks[layer].mixers if isinstance(spec, AttentionSpec))
        return next((spec for spec in specs if not spec.has_v_norm), None)

    @cached_property
    def key_sources(self) -> frozenset[int]:
        """Numbers of the layers whose keys and values later layers reuse."""
        specs = (spec for block in self.blocks for spec in block.mixers if isinstance(spec, AttentionSpec))
        return frozenset(spec.source for spec in specs if spec.source is not None)

    @cached_property
    def tensors(self) -> Tensors:
        """Map from this model's weights to the tensors of a checkpoint."""
        return composed_tensors(self)

    def reach(self, point: HookPoint) -> Reach:
        """See `Architecture`: a change before a mixer or a token shift, or at a mixer's keys, values or
        states, also affects later positions, or all positions if attention is bidirectional; any other
        change only its own position."""
        spread: Reach = "all" if self.looks_ahead else "later"
        if point.kind in ("embed", "resid_post"):
            layer = 0 if point.layer is None else point.layer + 1
            return spread if layer < self.num_layers and self.blocks[layer].mixes_positions else "here"
        if point.layer is None:
            return "here"
        block = self.blocks[point.layer]
        mixers = block.all_mixers
        # With post-norms ("of sums"), mixers read resid_pre directly, and ln1 comes after them.
        before = _BEFORE_MIXERS if block.norms != "of sums" else ("resid_pre",)
        spreads = block.mixes_positions and point.kind in before
        spreads = spreads or (block.has_token_shift and ORDER[point.kind] <= ORDER["mlp_pre"])
        return spread if spreads or any(point.kind in spec.reaches_later for spec in mixers) else "here"

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """See `Architecture`: in encoder-decoders a target position affects those from itself on."""
        if self.pair is None:
            return 0
        # The first target id is raised by the vocabulary size.
        start = next((place for place, token in enumerate(tokens) if token >= self.vocab_size), len(tokens))
        return position if position >= start else 0

    @property
    def lengths_must_match(self) -> bool:
        """See `Architecture`; with bidirectional attention, positions would attend to the padding."""
        return self.looks_ahead or any(rope.depends_on_length for rope in self._ropes)

    def keeps_keys(self, before: int, length: int) -> bool:
        """See `Architecture`: states stay valid in causal models; keys only if rope rotates them alike at
        both lengths."""
        # Keys are cached after rope, so a changed rotation makes them invalid.
        alike = all(rope.turns_alike(before, length) for rope in self._ropes)
        return before == 0 or (alike and not self.looks_ahead)

    @property
    def weight_counts(self) -> WeightCounts:
        """See `Architecture`; `in_layers` leaves out the experts that a token does not use."""
        counts = super().weight_counts
        assert counts is not None
        idle = sum(
            block.channel_mixer.idle_weights(self.hidden_size) for block in self.blocks if block.channel_mixer
        )
        return replace(counts, in_layers=counts.in_layers - idle)

    def bytes_per_token(self, itemsize: int) -> int:
        """See `Architecture`: stream and norms (six tensors of hidden size), and the largest layer; all AltUp
        streams before and after their prediction; the inputs of all layers, and the keys and values that
        later layers reuse."""
        inside = max(block.bytes_per_token(itemsize) for block in set(self.blocks))
        if self.pair is not None:
            # The encoder's output, its norm, and what cross-attention adds.
            inside += itemsize * 3 * self.hidden_size
        # A float32 stream takes 4 bytes per number in any dtype.
        stream = (4 if self.has_wide_stream else itemsize) * 6 * self.hidden_size
        beside = 0 if self.altup is None else 4 * (self.altup.streams - 1) * self.hidden_size
        beside += 2 * sum(block.layer_input.size for block in self.blocks if block.layer_input is not None)
        shared = (self.blocks[layer].axis_sizes for layer in self.key_sources)
        beside += sum(4 * sizes["kv_head"] * sizes["d_head"] for sizes in shared)
        return stream + inside + itemsize * beside

    @cached_property
    def _ropes(self) -> set[RopeConfig]:
        """The distinct ropes of all layers."""
        specs = (spec for block in self.blocks for spec in block.all_mixers)
        return {spec.rope for spec in specs if spec.rope is not None}


def _named(spec: MixerSpec | ChannelMixerSpec) -> dict[str, Any]:
    """Plain values of a spec, with its kind: GatedAttentionSpec and AttentionSpec share most fields."""
    return {"kind": spec.kind} | plain(spec)
