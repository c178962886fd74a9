"""ComposedArchitecture: a model as a sequence of layers, each made of mixers (attention, state spaces,
convolutions) and a channel mixer (MLP, experts).

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
    LANGUAGE,
    UNLIMITED,
    Architecture,
    AxisSizes,
    FinalNorm,
    HeadSpec,
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
"""Kinds of hook points whose values the mixers of the layer read."""
_FINAL_NORM = ("ln_final_scale", "ln_final_normalized", "final_norm")
_LAUREL = ("laurel_scale", "laurel_normalized", "laurel_out")
_TRANSFORM = ("head_pre_act", "head_post_act")
_TRANSFORM_NORM = ("head_scale", "head_normalized", "head_out")


@dataclass(frozen=True)
class LayerSpec:
    """One layer: mixers that read the same normalised stream, and a channel mixer after them."""

    mixers: tuple[MixerSpec, ...]
    """Parallel mixers, whose outputs are summed; () for a layer with a channel mixer only."""
    channel_mixer: ChannelMixerSpec | None = None
    """MLP, experts or RWKV's channel mix; None for a layer with mixers only."""
    norms: Literal["before", "after", "around", "of stream", "of sums"] = "before"
    """Place of the norms of each half of the layer: "before" its input (pre-norm), "after" its output, or
    "around" it (both). "of stream": the normalised input also replaces the residual stream (MiniMax). "of
    sums": post-norm, the sum of stream and output is normalised (BERT)."""
    carried: tuple[float, float] = (1.0, 1.0)
    """With norms "of stream": factors of the residual stream before the mixers' output and before the channel
    mixer's output is added; unused otherwise."""
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
    """Whether the mixers' input is normalised, in layers with pre-norms; False in ModernBERT's first
    layer."""
    has_gains: bool = False
    """Whether the residual stream is multiplied by learned weights, [hidden], before the output of the mixers
    and that of the channel mixer are added (Doge)."""
    laurel_rank: int = 0
    """Rank of LAuReL, a low-rank projection of the mixers' input that is added to the stream together with
    their output (Gemma 3n); 0 for no LAuReL."""
    layer_input: LayerInputSpec | None = None
    """Per-layer input, added after the channel mixer (Gemma 3n and 4); None for no such input."""
    has_scalar: bool = False
    """Whether the layer finally multiplies the stream by a learned number (Gemma 4)."""
    cross: CrossAttentionSpec | None = None
    """Cross-attention, which runs after the mixers and before the channel mixer; only in decoder layers of an
    encoder-decoder, None in other layers."""
    has_pre_norm: bool = False
    """Whether the stream is replaced by its norm as it enters the layer (layer 0 of RWKV)."""

    def __post_init__(self) -> None:
        if not self.mixers and self.channel_mixer is None:
            raise ConfigError(
                "expected a mixer or a channel mixer in every LayerSpec, found mixers=() and "
                "channel_mixer=None; give one of them"
            )
        if self.is_parallel and (self.norms != "before" or not self.mixers or self.channel_mixer is None):
            raise ConfigError(
                "expected mixers, a channel mixer and norms='before' in a LayerSpec with is_parallel=True, "
                f"found {len(self.mixers)} mixers, channel_mixer={self.channel_mixer!r:.80} and "
                f"norms={self.norms!r}"
            )
        if self.shared is not None and (not self.mixers or self.norms != "before" or self.is_parallel):
            raise ConfigError(
                "expected mixers, norms='before' and is_parallel=False in a LayerSpec with a shared block, "
                f"found {len(self.mixers)} mixers, norms={self.norms!r} and is_parallel={self.is_parallel}"
            )
        for axis, size in (item for spec in self.shapes for item in spec.axis_sizes.items()):
            if self.axis_sizes[axis] != size:
                raise ConfigError(
                    f"expected the axis {axis!r} to have one size in all parts of a layer, found the sizes "
                    f"{size} and {self.axis_sizes[axis]}; {TRY_TRANSFORMERS}"
                )
        has_time_mix = any(isinstance(spec, TimeMixSpec) for spec in self.mixers)
        if self.has_token_shift != has_time_mix:
            raise ConfigError(
                "expected each RWKV layer to have a time mix and a token-shifted channel mixer, found a "
                f"layer with only {'the time mix' if has_time_mix else 'the channel mixer'}; give it both"
            )

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name -> size, for the axes of the layer's hook points whose size depends on the layer."""
        sizes = {} if self.layer_input is None else {"layer_input": self.layer_input.size}
        return sizes | {axis: size for spec in self.shapes for axis, size in spec.axis_sizes.items()}

    @cached_property
    def norm_names(self) -> tuple[str, ...]:
        """Names of the layer's norms: "ln1" and "ln2" before mixers and channel mixer, "ln1_post" and
        "ln2_post" after them, "ln_cross" before cross-attention."""
        # Post-norms of BERT ("of sums") are still called ln1 and ln2, as in TransformerLens.
        suffixes = {"after": ("_post",), "around": ("", "_post")}.get(self.norms, ("",))
        names = ["ln1"] if self.mixers and self.reads_normed else []
        names += ["ln_cross"] if self.cross is not None else []
        has_ln2 = self.channel_mixer is not None and (self.has_two_norms or not self.is_parallel)
        names += ["ln2"] if has_ln2 else []
        return tuple(name + suffix for name in names for suffix in suffixes)

    @cached_property
    def side(self) -> Literal["source", "target"] | None:
        """In encoder-decoders: the part of each prompt that the layer acts on, source in encoder layers and
        target in decoder layers; None in other models."""
        parts = {spec.part for spec in self.mixers if isinstance(spec, AttentionSpec)}
        return next((part for part in parts if part != "cross"), None)

    @property
    def mixer(self) -> Mixer:
        """Torch-free summary of all mixers of the layer together; `NoMixer` for a layer without mixers."""
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
        is_no_sum = self.has_gains or self.has_scalar or self.laurel_rank or self.layer_input is not None
        norms = "of stream" if self.norms == "of sums" or is_no_sum else self.norms
        return Layer(self.mixer, channel_mixer, norms, self.is_parallel)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the layer's hook points (`HookKind.name`), such as "resid_pre"."""
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
        is_linear = any(isinstance(mixer, AttentionSpec) and not mixer.has_v_norm for mixer in self.mixers)
        reads_stream_only = self.reads_normed and self.shared is None and self.side is None
        return is_linear and self.norms in ("before", "around") and reads_stream_only

    @property
    def mixes_positions(self) -> bool:
        """Whether later positions depend on the stream that enters the layer; they do not if its only mixer
        is attention that reads keys and values of an earlier layer."""
        return any(not isinstance(spec, AttentionSpec) or spec.source is None for spec in self.all_mixers)

    @cached_property
    def has_token_shift(self) -> bool:
        """Whether the channel mixer also reads the previous token."""
        return self.channel_mixer is not None and self.channel_mixer.has_token_shift

    @property
    def all_mixers(self) -> tuple[MixerSpec, ...]:
        """Specs of all parts of the layer that mix positions: shared block, mixers and cross-attention."""
        mixers = self.mixers if self.shared is None else (self.shared, *self.mixers)
        return mixers if self.cross is None else (*mixers, self.cross)

    @property
    def shapes(self) -> Iterator[MixerSpec | ChannelMixerSpec]:
        """Specs of all parts of the layer: shared block, mixers, cross-attention and channel mixer."""
        yield from self.all_mixers
        if self.channel_mixer is not None:
            yield self.channel_mixer

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token inside this layer. itemsize: bytes per number."""
        return sum(spec.bytes_per_token(itemsize) for spec in self.shapes)

    @property
    def fields(self) -> dict[str, Any]:
        """Name of each field -> its value as numbers, strings, tuples and dicts; each mixer has a key
        "kind"."""
        mixers = [_fields_with_kind(spec) for spec in self.mixers]
        channel_mixer = self.channel_mixer and _fields_with_kind(self.channel_mixer)
        shared = self.shared and _fields_with_kind(self.shared)
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
    """A model made of layers that `LayerSpec` describes: everything except the weights that decides its
    results."""

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
    """Whether `embedding_scale` is rounded to the dtype of the embeddings (Gemma)."""
    logit_factor: float = 1.0
    """Factor of the logits, before any soft cap."""
    final_logit_softcapping: float | None = None
    """Cap c of the logits, c tanh(logits / c); None for no cap."""
    has_wide_stream: bool = False
    """Whether the residual stream is float32, whatever the dtype of the weights."""
    position_rows: int = 0
    """Number of rows of the position table; 0 without a position table."""
    first_position: int = 0
    """Row of the table of positions for the first token of a prompt."""
    tie_word_embeddings: bool = False
    """Whether the matrix of the language head is the embedding matrix."""
    norm_biases: Literal["of layer norms", "in layers", "none"] = "of layer norms"
    """Which norms of the stream have a bias: all layer norms ("of layer norms"), the norms inside of layers
    whatever their kind ("in layers"), or none."""
    position_waves: Literal["fairseq", "transformer"] | None = None
    """Kind of sinusoidal table of positions, computed instead of loaded (`Architecture.position_waves`); None
    for a learned table."""
    has_embedding_norm: bool = False
    """Whether embeddings are normalised before they enter the stream."""
    has_norm_weights: bool = True
    """Whether norms of the stream have learned weights."""
    has_unit_norms: bool = False
    """Whether the norms of the stream multiply by 1 + weight instead of by the weight."""
    has_head_bias: bool = False
    """Whether the language head has a bias, one number per logit."""
    embedding_width: int | None = None
    """Embedding width, if a linear projection maps embeddings (with positions and norm) to the hidden size;
    None without such a projection."""
    token_types: int = 0
    """Rows of the table of token types, whose first row is added to every embedding; 0 for no table."""
    unknown_token: int | None = None
    """Id of the padding token, which prompts must not contain, as transformers gives it no position
    (RoBERTa); None in other families."""
    dropped_token: int | None = None
    """Id of the mask token, whose embedding is replaced by 0, while all other embeddings are rescaled by the
    share of mask tokens in the prompt (Rives et al., ESM-1b, 2021, and its reference code); None in other
    families."""
    final_norm: FinalNorm | None = FinalNorm()
    """Norm before the language head; None if the head reads the residual stream without a norm."""
    transform: HeadTransform | None = None
    """Dense layer, activation and norm before the head; None if the head reads the final norm."""
    head: HeadSpec = LANGUAGE
    """What the model computes from its final states: logits of the vocabulary or of labels, or nothing."""
    altup: AltUpSpec | None = None
    """Parallel streams of all layers (Gemma 3n); None for a single stream."""
    pair: PairSpec | None = None
    """Encoder-decoders (T5, BART): number of encoder layers, start token and largest length; None for all
    other models."""

    def __post_init__(self) -> None:
        # One table holds the inputs of all layers side by side, each of the same width.
        if len({block.layer_input for block in self.blocks}) > 1:
            raise ConfigError(
                "expected per-layer inputs of the same width and activation in all layers, found layers that "
                f"differ; {TRY_TRANSFORMERS}"
            )

    def under(self, root: str, head: str) -> ComposedArchitecture:
        """Copy for a checkpoint whose tensors have other names: root replaces the prefix "model.", head is
        the name of the language head without ".weight". ConfigError for encoder-decoders."""
        if self.pair is not None:
            super().under(root, head)  # raises ConfigError
        return replace(self, spelling=replace(self.spelling, prefix=("model.", root), head=head))

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
        """Number of entries of an attention head; 0 for a model without attention."""
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
        """Name of each field -> its value as numbers, strings, lists and dicts: "blocks" lists the distinct
        layers, "layers" the index of each layer in that list."""
        # Layers are listed once, as models with many equal layers would have very long keys.
        distinct = list(dict.fromkeys(self.blocks))
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "blocks"}
        if self.head.kind == "vocabulary":
            del values["head"]  # so that keys of language models say nothing of other heads
        return {name: plain(value) if is_dataclass(value) else value for name, value in values.items()} | {
            "blocks": [block.fields for block in distinct],
            "layers": [distinct.index(block) for block in self.blocks],
        }

    @property
    def digest(self) -> str:
        """Hex digest of every field except the tensor names (`spelling`), which do not change results."""
        return digest("architecture", self.fields | {"spelling": None})

    @cached_property
    def context_length(self) -> int:
        """Largest length of a prompt, in tokens: max_position_embeddings, times the factor of dynamic rope;
        `UNLIMITED` for a model without limit, such as a pure state space."""
        # Dynamic NTK scaling extends the context while it runs; other schemes are part of the config's
        # length.
        stretch = max((rope.factor for rope in self._ropes if rope.scheme == "dynamic"), default=1.0)
        return int((self.max_position_embeddings or UNLIMITED) * stretch)

    @property
    def final_norm_eps(self) -> float:
        """Epsilon that the final norm adds to the mean square or variance."""
        eps = None if self.final_norm is None else self.final_norm.eps
        return self.norm_eps if eps is None else eps

    @cached_property
    def axis_sizes(self) -> AxisSizes:
        """Axis name -> size, for the axes of hook points whose size does not depend on the prompts; axes
        whose size differs between layers are in `AxisSizes.differing`. Attention and state spaces have
        different axes for their heads."""
        sizes: dict[str, set[int]] = {}
        for axis, size in (item for block in self.blocks for item in block.axis_sizes.items()):
            sizes.setdefault(axis, set()).add(size)
        outside_layers = {"hidden": self.hidden_size, "one": 1}
        outside_layers |= {} if self.transform is None else {"embedding": self.transform.width}
        outside_layers |= {} if self.altup is None else {"stream": self.altup.streams}
        same_in_all_layers = {axis: min(values) for axis, values in sizes.items() if len(values) == 1}
        axis_sizes = AxisSizes(outside_layers | same_in_all_layers)
        axis_sizes.differing = {axis: values for axis, values in sizes.items() if len(values) > 1}
        return axis_sizes

    def sizes_in(self, layer: int | None) -> dict[str, int]:
        """Axis name -> size, for the hook points of one layer; layer: its number, or None for those outside
        of layers."""
        return self.axis_sizes | ({} if layer is None else self.blocks[layer].axis_sizes)

    @cached_property
    def hook_points(self) -> tuple[HookPoint, ...]:
        """All hook points of the model, in execution order; layers with different mixers have different hook
        points."""
        outside = (
            "embed",
            *(_FINAL_NORM if self.final_norm is not None else ()),
            *(_TRANSFORM if self.transform is not None else ()),
            *(_TRANSFORM_NORM if self.transform is not None and self.transform.eps is not None else ()),
            *(("altup_merged",) if self.altup is not None else ()),
        )
        altup_in_layers = () if self.altup is None else self.altup.points
        points = [HookPoint(kind) for kind in outside]
        for layer, block in enumerate(self.blocks):
            points += [HookPoint(kind, layer) for kind in (*block.kinds, *altup_in_layers)]
        return tuple(sorted(points, key=lambda point: point.order))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Summary of each layer, in order; with AltUp, no stream is the plain sum of all outputs, so that all
        layers have norms "of stream"."""
        layers = tuple(block.summary for block in self.blocks)
        return layers if self.altup is None else tuple(replace(layer, norms="of stream") for layer in layers)

    def heads_of(self, layer: int) -> AttentionSpec | None:
        """Attention of a layer, for analyses of the QK and OV circuits of its heads. None if the layer has no
        attention, latent attention, attention in a shared block only, or normalised values, with which head
        outputs are no linear maps of the stream."""
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
        """Positions that a change at one position of a hook point can affect before the end of its layer:
        also later ones (or all, if attention is bidirectional) for a change before a mixer or a token shift,
        or at a mixer's keys, values or states; only that position for any other change."""
        others: Reach = "all" if self.looks_ahead else "later"
        if point.kind in ("embed", "resid_post"):
            # The next layer reads these.
            layer = 0 if point.layer is None else point.layer + 1
            return others if layer < self.num_layers and self.blocks[layer].mixes_positions else "here"
        if point.layer is None:
            return "here"
        block = self.blocks[point.layer]
        # With post-norms ("of sums"), mixers read resid_pre directly, and ln1 comes after them.
        before_mixers = _BEFORE_MIXERS if block.norms != "of sums" else ("resid_pre",)
        enters_mixer = block.mixes_positions and point.kind in before_mixers
        enters_token_shift = block.has_token_shift and ORDER[point.kind] <= ORDER["mlp_pre"]
        enters_state = any(point.kind in spec.reaches_later for spec in block.all_mixers)
        return others if enters_mixer or enters_token_shift or enters_state else "here"

    def reaches_from(self, tokens: Sequence[int], position: int) -> int:
        """First position of a prompt that a change at one position can affect, for a hook point whose `reach`
        is "all": 0, or in encoder-decoders a target position itself.

        Arguments:
            tokens: Token ids of the prompt.
            position: Position of the change.
        """
        if self.pair is None:
            return 0
        # The first target id is raised by the vocabulary size.
        is_target_start = (token >= self.vocab_size for token in tokens)
        target_start = next((i for i, is_start in enumerate(is_target_start) if is_start), len(tokens))
        return position if position >= target_start else 0

    @property
    def shares_prefixes(self) -> bool:
        """Whether runs can share the computation of their first layers; not with a head that reads the mean
        over positions, which needs every position of a run."""
        return self.head.reads != "mean"

    @property
    def lengths_must_match(self) -> bool:
        """Whether results depend on the prompt's length, so that prompts of different lengths must not share
        a padded batch: with bidirectional attention, which would see the padding, and with dynamic rope."""
        return self.looks_ahead or any(rope.depends_on_length for rope in self._ropes)

    def keeps_keys(self, before: int, length: int) -> bool:
        """Whether keys, values and states computed for a prefix of `before` tokens remain valid when the
        sequence grows to `length` tokens: in causal models whose rope rotates the prefix alike at both
        lengths."""
        # Keys are cached after rope, so a changed rotation makes them invalid.
        same_rotation = all(rope.turns_alike(before, length) for rope in self._ropes)
        return before == 0 or (same_rotation and not self.looks_ahead)

    @property
    def weight_counts(self) -> WeightCounts:
        """Numbers of weights: total, in layers and in the head; layers count only experts that a token
        uses."""
        counts = super().weight_counts
        assert counts is not None
        idle = sum(
            block.channel_mixer.idle_weights(self.hidden_size) for block in self.blocks if block.channel_mixer
        )
        return replace(counts, in_layers=counts.in_layers - idle)

    def bytes_per_token(self, itemsize: int) -> int:
        """Estimated bytes of activations per token, with itemsize bytes per number: stream and norms (six
        tensors of hidden size), and the largest layer; all AltUp streams before and after their prediction;
        the inputs of all layers, and the keys and values that later layers reuse."""
        largest_layer = max(block.bytes_per_token(itemsize) for block in set(self.blocks))
        if self.pair is not None:
            # The encoder's output, its norm, and the output of cross-attention.
            largest_layer += itemsize * 3 * self.hidden_size
        # A float32 stream takes 4 bytes per number in any dtype.
        stream = (4 if self.has_wide_stream else itemsize) * 6 * self.hidden_size
        altup = 0 if self.altup is None else 4 * (self.altup.streams - 1) * self.hidden_size
        layer_inputs = 2 * sum(block.layer_input.size for block in self.blocks if block.layer_input)
        axes_of_sources = (self.blocks[layer].axis_sizes for layer in self.key_sources)
        reused_keys = sum(4 * axes["kv_head"] * axes["d_head"] for axes in axes_of_sources)
        return stream + largest_layer + itemsize * (altup + layer_inputs + reused_keys)

    @cached_property
    def _ropes(self) -> set[RopeConfig]:
        """The distinct rotary embeddings of all layers."""
        specs = (spec for block in self.blocks for spec in block.all_mixers)
        return {spec.rope for spec in specs if spec.rope is not None}


def _fields_with_kind(spec: MixerSpec | ChannelMixerSpec) -> dict[str, Any]:
    """Name of each field of a mixer's spec -> its plain value, and "kind", because different kinds of mixers
    can have equal fields (AttentionSpec and GatedAttentionSpec)."""
    return {"kind": spec.kind} | plain(spec)
