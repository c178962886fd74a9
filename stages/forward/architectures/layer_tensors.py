"""Names and shapes of the tensors of a `ComposedArchitecture` in a checkpoint.

Checkpoints differ in module names (`Spelling`); below its module, a mixer's tensors have the names of the
code it comes from. Weights are named as the classes of networks/mixers/ look them up: "q", "o.bias", "up" for
attention and MLP; with a prefix for others: "ssm." (state spaces), "latent." (latent attention), "linear."
(linear attention), "conv." (short convolutions), "experts.", "shared." (a block that layers share), "mlstm.",
"rwkv." (time mix), "shifted." (token-shifted channel mix); parts of Gemma 3n and 4 as in layer_parts.py.
Factors of a layer's outputs are multiplied into weights (`Stored.factors`).

Border: names and shapes; never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .architecture import BESIDE, FinalNorm, HeadSpec, HeadTransform, Stored, Tensors
from .layer_parts import CORRECTED_SCALE, AltUpSpec, LayerInputSpec, laurel_tensors
from .linear_mixers import (
    GatedDeltaSpec,
    LightningSpec,
    LinearAttentionSpec,
    LinearUnitSpec,
    MlstmSpec,
    ShortConvolutionSpec,
)
from .mixers import (
    AttentionSpec,
    CrossAttentionSpec,
    DifferentialSpec,
    ExpertsSpec,
    GatedAttentionSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    MlpAndExpertsSpec,
    MlpSpec,
    RoutedAttentionSpec,
    SharedBlockSpec,
)
from .rwkv import ChannelMixSpec, TimeMixSpec
from .rwkv_tensors import RwkvNames, channel_mix_tensors, time_mix_tensors

__all__ = ["LLAMA", "EncoderNames", "ExpertNames", "PairNames", "Spelling", "composed_tensors"]

Named = Iterator[tuple[str, Stored]]
"""Pairs of a weight's name in mizarr, such as "linear.out", and its tensor in the checkpoint."""
Factors = tuple[tuple[int, float], ...]
"""(number of rows, factor) of consecutive rows of a weight (`Stored.factors`); () for no factors."""
CORRECTED = ("sigmoid", "sigmoid of chosen", "chosen of corrected softmax")
"""Routings (`ExpertsSpec.routing`) in which a learned correction is added to the router's scores when experts
are chosen."""
_OWN_KEYS = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias", "v_proj.bias")
"""Tensors of keys and values below the attention module (Gemma 3n and 4)."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of the tensors of router and experts within a layer."""

    prefix: str = "mlp."
    """Prefix of the tensors of router and experts, below the layer."""
    router: str = "gate"
    """Name of the router."""
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of each expert's projections; or of two tensors (gate and up, down) that hold all experts."""
    ending: str = ".weight"
    """Suffix of the names of tensors that hold all experts."""
    correction: str = ".e_score_correction_bias"
    """Correction bias of the router scores: a suffix of the router's name if it begins with a dot, a name in
    the layer if it begins with a slash."""
    router_gains: tuple[str, str] = ("", "")
    """For experts parallel to an MLP: names of the learned factors of the router's input, and of each
    expert's routing weight; "" for other experts."""
    beside_norms: tuple[str, str, str] = ("", "", "")
    """For experts parallel to an MLP: names of the norms of the MLP's output, of the experts' input, and of
    the experts' output; "" for other experts."""
    shared: str = ""
    """Prefix of the shared expert's tensors; "" for no shared expert."""
    shared_gate: str = ""
    """Name of the gate of the shared expert; "" for no gate."""


@dataclass(frozen=True)
class EncoderNames:
    """Tensor names of parts that mostly encoders have: token types, head transform, relative positions."""

    token_types: str = ""
    """Name of the table of token type embeddings; "" if the checkpoint has none."""
    embed_in: str = ""
    """Name of the projection from the embedding width to the hidden size; "" for no projection."""
    transform: tuple[str, str] = ("", "")
    """Names of the dense map and the norm before the language head; "" for no transform."""
    head_bias: str = ""
    """Name of the bias of a tied language head; "" if it is the head's name with ".bias"."""
    own_head_bias: str = ""
    """Name of the bias of an untied language head; "" if it is the head's name with ".bias"."""
    frequencies: str = ""
    """Name of the tensor with the frequencies of rope; "" if the checkpoint has none."""
    has_old_norms: bool = False
    """Whether weight and bias of modules called LayerNorm are named gamma and beta, as in TensorFlow."""
    attention_biases: tuple[str, ...] = ()
    """Names of the query and value biases, if they are stored apart from a fused projection; () otherwise."""
    relative: str = ""
    """Name of the table of relative position embeddings; below the layer if layers have tables of their own
    (`RelativeSpec.source`). "" for no table."""
    relative_norm: str = ""
    """Name of the layer norm of the table of relative position embeddings; "" for no norm."""
    relative_parts: tuple[str, str] = ("", "")
    """Names of the query and key projections of the table of relative position embeddings; "" for none."""


@dataclass(frozen=True)
class PairNames:
    """Tensor names of encoder-decoders, in addition to those of the encoder and its layers in `Spelling`."""

    layer: str
    """Prefix of the tensors of decoder layers; "{}" stands for the layer's number within the decoder."""
    ln2: str
    """Name of a decoder layer's MLP norm, before or after the MLP."""
    mlp: str
    """Prefix of the MLP's tensors in a decoder layer."""
    cross: str
    """Prefix of the tensors of cross-attention, whose projections are named as those of self-attention."""
    ln_cross: str
    """Name of the norm of cross-attention."""
    memory_norm: str
    """Name of the final norm of the encoder."""
    positions: str = ""
    """Name of the decoder's table of learned positions; "" for no table."""
    embed_norm: str = ""
    """Name of the decoder's norm of the embeddings; "" for no norm."""
    embeds: tuple[str, ...] = ("encoder.embed_tokens", "decoder.embed_tokens")
    """Other names under which a checkpoint may repeat the embedding."""


@dataclass(frozen=True)
class Spelling:
    """Tensor names of a checkpoint, without ".weight" and ".bias". Prefixes of modules inside a layer end
    with a dot; names inside a layer are below the layer's prefix. "" stands for a tensor that the family does
    not have."""

    embed: str = "model.embed_tokens"
    """Name of the token embedding."""
    head: str = "lm_head"
    """Name of the language head; if it is tied, the checkpoint may leave it out."""
    positions: str = ""
    """Name of the table of learned positions."""
    embed_norm: str = ""
    """Name of the norm of the embeddings."""
    unread: tuple[str, ...] = ()
    """Full names of tensors that checkpoints hold and no layer reads; "{}" stands for the number of each
    layer."""
    final_norm: str = "model.final_layernorm"
    """Name of the norm before the language head, or before its transform in encoders."""
    layer: str = "model.layers.{}."
    """Prefix of the tensors of a layer; "{}" stands for the layer's number."""
    ln1: str = "input_layernorm"
    """Name of the norm of the mixer's input; in post-norm layers, of the sum of stream and mixer output."""
    ln2: str = "pre_ff_layernorm"
    """Name of the norm of the channel mixer's input; in post-norm layers, of the sum of stream and channel
    mixer output."""
    ln1_post: str = "post_attention_layernorm"
    """Name of the norm of the mixer's output, before the output is added to the stream."""
    ln2_post: str = "post_feedforward_layernorm"
    """Name of the norm of the channel mixer's output, before the output is added to the stream."""
    mixer: str = "mamba."
    """Prefix of the tensors of mixers other than attention."""
    mixer_norm: str = "norm"
    """Name of the norm before a mixer's output projection, below the mixer's prefix."""
    attention: str = "self_attn."
    """Prefix of the tensors of attention."""
    attention_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Names of the norms of queries and of keys, below the attention prefix."""
    attention_out: str = "o_proj"
    """Name of the output projection, below the attention prefix."""
    attention_in: str = ""
    """Name of the fused query, key and value projection, below the attention prefix; "" if they are
    separate."""
    attention_parts: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    """Names of the separate query, key and value projections, below the attention prefix."""
    gains: tuple[str, str] = ("", "")
    """Names of the weights [hidden] that scale the stream before the outputs of attention and MLP are added
    (Doge)."""
    inner_norms: tuple[str, str] = ("", "")
    """Names of the norms before the attention output projection and before the MLP down projection."""
    mlp: str = "feed_forward."
    """Prefix of the tensors of the MLP."""
    mlp_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of the MLP projections: gate, up and down; or fused gate_up and down; or up and down."""
    experts: ExpertNames = ExpertNames("feed_forward.", "router")
    """Names of the tensors of router, routed experts and shared expert."""
    encoder: EncoderNames = EncoderNames()
    """Names of the tensors of parts that mostly encoders have, such as token types and head transform."""
    is_transposed: bool = False
    """Whether attention and MLP weights are stored as [in, out] instead of [out, in]."""
    blocks: tuple[str, str] = ("shared_transformer.", "mamba_decoder.")
    """Prefixes of the tensors of a block that several layers share, and of a layer's own mixer after it
    (Zamba)."""
    ln_cross: str = ""
    """Name of the norm of cross-attention, which is set from `pair` in decoder layers."""
    pair: PairNames | None = None
    """Names of the tensors of an encoder-decoder's decoder; None for other models."""
    rwkv: RwkvNames = RwkvNames()
    """Names of the tensors of RWKV's time mix and channel mix."""
    prefix: tuple[str, str] = ("", "")
    """Prefix of names outside of the head, such as "model.", and what the checkpoint has in its place: "" in
    files of a base model, a longer prefix in those of multimodal models."""


LLAMA = Spelling(
    final_norm="model.norm",
    ln2="post_attention_layernorm",
    mixer="linear_attn.",
    mlp="mlp.",
    experts=ExpertNames(),
)
"""Names of tensors in Llama's checkpoints, which most families follow."""


class _Block(Protocol):
    """Attributes of a `LayerSpec` that determine its tensors."""

    @property
    def mixers(self) -> Sequence[MixerSpec]: ...
    @property
    def channel_mixer(self) -> Any: ...
    @property
    def norm_names(self) -> Sequence[str]: ...
    @property
    def shared(self) -> SharedBlockSpec | None: ...
    @property
    def post_factor(self) -> float: ...
    @property
    def source(self) -> int | None: ...
    @property
    def has_gains(self) -> bool: ...
    @property
    def laurel_rank(self) -> int: ...
    @property
    def layer_input(self) -> LayerInputSpec | None: ...
    @property
    def has_scalar(self) -> bool: ...
    @property
    def cross(self) -> CrossAttentionSpec | None: ...
    @property
    def has_pre_norm(self) -> bool: ...


class HybridShapes(Protocol):
    """Attributes of an architecture that determine its tensors and their shapes."""

    @property
    def blocks(self) -> Sequence[_Block]: ...
    @property
    def spelling(self) -> Spelling: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def head(self) -> HeadSpec: ...
    @property
    def n_logits(self) -> int: ...
    @property
    def norm_type(self) -> str: ...
    @property
    def norm_biases(self) -> str: ...
    @property
    def logit_factor(self) -> float: ...
    @property
    def position_rows(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def position_waves(self) -> str | None: ...
    @property
    def has_embedding_norm(self) -> bool: ...
    @property
    def has_norm_weights(self) -> bool: ...
    @property
    def has_unit_norms(self) -> bool: ...
    @property
    def has_head_bias(self) -> bool: ...
    @property
    def embedding_width(self) -> int | None: ...
    @property
    def token_types(self) -> int: ...
    @property
    def final_norm(self) -> FinalNorm | None: ...
    @property
    def transform(self) -> HeadTransform | None: ...
    @property
    def altup(self) -> AltUpSpec | None: ...


def composed_tensors(config: HybridShapes) -> Tensors:
    """Map from an architecture's weights to the tensors of a checkpoint; the weight "head" is stored in the
    tensor of the embedding if both are tied, and absent in a model without head."""
    c, spelling = config, config.spelling
    outside = _embeddings(c)
    if c.final_norm is not None:
        has_bias = _has_biased_norms(c) and c.final_norm.has_bias
        outside |= _norm("final_norm", spelling.final_norm, c, has_bias=has_bias)
    if spelling.encoder.frequencies:
        # ESM-2 stores inv_freq of its rope, one per pair of entries.
        head_dim = c.blocks[0].mixers[0].axis_sizes["d_head"]
        outside["frequencies"] = Stored(spelling.encoder.frequencies, (head_dim // 2,))
    outside |= _relative_table(c)
    # These have the same prefix as the embedding, which differs in multimodal checkpoints.
    root = spelling.embed.removesuffix("embed_tokens")
    if c.altup is not None:
        outside |= c.altup.outer_tensors(root, c.hidden_size)
    if (layer_input := c.blocks[0].layer_input) is not None:
        outside |= layer_input.outer_tensors(root, c.hidden_size, len(c.blocks))
    layers = [dict(_layer_tensors(c, block)) for block in c.blocks]
    copies, unread = _copies_of_shared_blocks(c)
    unread |= {name.format(layer) for name in spelling.unread for layer in range(len(c.blocks))}
    for layer, block in enumerate(c.blocks):
        unread |= {spelling.layer.format(layer) + name for name in _unread_in(block, spelling, c.altup)}
    tensors = Tensors(outside, layers, spelling.layer, copies, unread)
    if (pair := spelling.pair) is not None:
        embeds = {f"{name}.weight": outside["embed"].name for name in pair.embeds}
        decoder = sum(block.cross is None for block in c.blocks), pair.layer
        tensors = replace(tensors, decoder=decoder, copies=copies | embeds)
    tensors = tensors.under(*spelling.prefix)
    head, head_copies = _head(c, tensors.outside["embed"].name)
    tensors = replace(tensors, outside={**tensors.outside, **head}, copies={**head_copies, **tensors.copies})
    return replace(tensors, unread=set(tensors.unread) - tensors.shapes.keys())


def _head(config: HybridShapes, embed: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors of the head and of the transform before it; none for a model without head.

    Arguments:
        config: The architecture.
        embed: Name of the embedding's tensor, which a tied head shares.

    Returns:
        (name of a weight -> its tensor, name of an optional copy -> name of the original).
    """
    c, spelling = config, config.spelling
    tensors: dict[str, Stored] = {}
    copies: dict[str, str] = {}
    if c.head.kind == "none":
        return tensors, copies
    width = c.hidden_size
    if c.transform is not None:
        tensors, width = _transform(c, c.transform), c.transform.width
    tied, factors = c.tie_word_embeddings, _one_factor(c.n_logits, c.logit_factor)
    untied_head = f"{spelling.head}.weight"
    tensors["head"] = Stored(embed if tied else untied_head, (c.n_logits, width), factors=factors)
    # Writers may store a tied head under its own name, too; it must then equal the embedding.
    copies |= {untied_head: embed} if tied else {}
    if c.has_head_bias:
        untied_bias = spelling.encoder.own_head_bias or f"{spelling.head}.bias"
        bias = (spelling.encoder.head_bias or untied_bias) if tied else untied_bias
        shape = (c.n_logits,) if spelling.pair is None else (1, c.n_logits)
        tensors["head.bias"] = Stored(bias, shape, factors=factors)
        copies |= {untied_bias: bias} if bias != untied_bias else {}
    return tensors, copies


def _unread_in(block: _Block, spelling: Spelling, altup: AltUpSpec | None) -> Iterator[str]:
    """Names, within a layer, of tensors that released checkpoints hold and the layer does not read: its key
    and value projections, if it reuses keys and values of an earlier layer, and the scale of AltUp's output,
    if that is off."""
    mixers = (mixer for mixer in block.mixers if isinstance(mixer, AttentionSpec))
    if any(mixer.source is not None for mixer in mixers):
        yield from (f"{spelling.attention}{name}" for name in _OWN_KEYS)
    if altup is not None and not altup.scales_corrected:
        yield CORRECTED_SCALE


def _embeddings(config: HybridShapes) -> dict[str, Stored]:
    """Name of a weight -> its tensor, for embeddings of tokens, token types and positions, the norm of the
    embeddings, and their projection to the hidden size."""
    c, spelling = config, config.spelling
    width = c.embedding_width or c.hidden_size
    tensors = {"embed": Stored(f"{spelling.embed}.weight", (c.vocab_size, width))}
    sides: list[tuple[str, Spelling | PairNames]] = [("", spelling)]
    if (pair := spelling.pair) is not None:
        sides = [(f"{BESIDE}source.", spelling), (f"{BESIDE}target.", pair)]
        if c.final_norm is not None:
            has_bias = _has_biased_norms(c)
            tensors |= _norm(f"{BESIDE}memory_norm", pair.memory_norm, c, has_bias=has_bias)
    for side, names in sides:
        if c.has_embedding_norm:
            name, has_bias = f"{side}embed_norm", _has_biased_norms(c)
            tensors |= _norm(name, names.embed_norm, c, has_bias=has_bias, width=width)
        if c.position_rows and not c.position_waves:
            tensors[f"{side}positions"] = Stored(f"{names.positions}.weight", (c.position_rows, width))
    if c.token_types:
        tensors["token_types"] = Stored(f"{spelling.encoder.token_types}.weight", (c.token_types, width))
    if c.embedding_width is not None:
        tensors |= dict(_linear("embed_in", spelling.encoder.embed_in, (c.hidden_size, width), bias=True))
    return tensors


def _relative_table(config: HybridShapes) -> dict[str, Stored]:
    """Name of a weight -> its tensor, for a table of relative positions that all layers share, and its norm;
    empty for models without such a table."""
    mixer, spelling = next(iter(config.blocks[0].mixers), None), config.spelling
    if not isinstance(mixer, AttentionSpec) or (spec := mixer.relative) is None or spec.source is not None:
        return {}
    width = mixer.num_attention_heads if spec.terms == ("bias",) else config.hidden_size
    tensors = {"relative": Stored(f"{spelling.encoder.relative}.weight", (spec.rows, width))}
    if spec.norm_eps is None:
        return tensors
    return tensors | _norm("relative_norm", spelling.encoder.relative_norm, config, has_bias=True)


def _transform(config: HybridShapes, transform: HeadTransform) -> dict[str, Stored]:
    """Name of a weight -> its tensor, for the dense layer and the norm before the head of an encoder."""
    dense, norm = config.spelling.encoder.transform
    size, has_bias = (transform.width, config.hidden_size), transform.has_norm_bias
    tensors = dict(_linear("transform", dense, size, bias=transform.has_bias))
    if transform.eps is None:
        return tensors
    return tensors | _norm("transform_norm", norm, config, has_bias=has_bias, width=transform.width)


def _copies_of_shared_blocks(config: HybridShapes) -> tuple[dict[str, str], set[str]]:
    """Yield name and checkpoint tensor of each weight of blocks that layers share (Zamba), under the prefixes
    of all layers.

    Returns:
        Name of a copy -> name of the original, for tensors that a checkpoint may repeat under the prefix of
        each sharing layer; and the names of all tensors of blocks under the prefix of the layer that stores
        them, including adapters of other layers.
    """
    copies, stored_here = {}, set()
    for layer, block in enumerate(config.blocks):
        if (spec := block.shared) is None:
            continue
        prefix, source_prefix = (config.spelling.layer.format(number) for number in (layer, spec.source))
        for place in spec.listed:
            for _, stored in _shared_block(replace(spec, place=place), config.spelling, config.hidden_size):
                if stored.layer == layer:
                    stored_here.add(prefix + stored.name)
                elif stored.layer is not None:
                    copies[prefix + stored.name] = source_prefix + stored.name
    return copies, stored_here


def _one_factor(rows: int, factor: float) -> Factors:
    """`Stored.factors` of a weight with this number of rows, all of which have the same factor; () for factor
    1."""
    return () if factor == 1 else ((rows, factor),)


def _has_biased_norms(config: HybridShapes) -> bool:
    """Whether the norms of the residual stream are layer norms with a bias."""
    return config.norm_type == "layer" and config.norm_biases != "none"


def _norm(
    weight: str,
    name: str,
    config: HybridShapes,
    *,
    has_bias: bool,
    factor: float = 1.0,
    width: int | None = None,
) -> dict[str, Stored]:
    """Name of a weight -> its tensor, for the weight and the optional bias of a norm.

    Arguments:
        weight: Name of the weight, such as "ln1".
        name: Name of the norm's module in the checkpoint.
        config: The architecture.
        has_bias: Whether the norm has a bias.
        factor: Factor of the norm's output.
        width: Width of the norm's input; None for the hidden size.
    """
    width = width or config.hidden_size
    is_old = config.spelling.encoder.has_old_norms and name.endswith("LayerNorm")
    scale, bias = ("gamma", "beta") if is_old else ("weight", "bias")
    constant, plus = None if config.has_norm_weights else 1.0, 1.0 if config.has_unit_norms else 0.0
    stored = Stored(
        f"{name}.{scale}", (width,), factors=_one_factor(width, factor), plus=plus, constant=constant
    )
    tensors = {weight: stored}
    if has_bias:
        tensors[f"{weight}.bias"] = Stored(f"{name}.{bias}", (width,))
    return tensors


def _layer_tensors(config: HybridShapes, block: _Block) -> Named:
    """Yield name and checkpoint tensor of each weight of a layer; the tensors are stored under the prefix of
    another layer if the layer shares that layer's weights (`LayerSpec.source`)."""
    for weight, stored in _tensors_of_parts(config, block):
        yield weight, stored if block.source is None else replace(stored, layer=block.source)


def _tensors_of_parts(config: HybridShapes, block: _Block) -> Named:
    """Yield name and checkpoint tensor of each weight of one layer, part by part: shared block, norms,
    mixers, cross-attention, channel mixer."""
    spelling, hidden = config.spelling, config.hidden_size
    if block.cross is not None and (pair := spelling.pair) is not None:
        spelling = replace(spelling, ln2=pair.ln2, mlp=pair.mlp, ln_cross=pair.ln_cross)
        names = replace(spelling, attention=pair.cross)
        cross = _attention(block.cross.attention, names, hidden)
        yield from ((f"cross.{weight}", stored) for weight, stored in cross)
    if block.shared is not None:
        yield from _shared_block(block.shared, spelling, hidden)
        # In Zamba, the layer's own mixer is one module deeper if a shared block precedes it.
        prefix = spelling.blocks[1]
        spelling = replace(spelling, ln1=prefix + spelling.ln1, mixer=prefix + spelling.mixer)
    has_bias = config.norm_biases == "in layers" or _has_biased_norms(config)
    if block.has_pre_norm:
        yield from _norm("pre_norm", spelling.rwkv.pre_norm, config, has_bias=has_bias).items()
    for name in block.norm_names:
        factor = block.post_factor if name.endswith("_post") else 1.0
        yield from _norm(name, getattr(spelling, name), config, has_bias=has_bias, factor=factor).items()
    for half, name in zip("12", spelling.gains if block.has_gains else (), strict=False):
        yield f"carry.{half}", Stored(name, (hidden,))
    if block.laurel_rank:
        yield from laurel_tensors(block.laurel_rank, hidden)
    if block.layer_input is not None:
        yield from block.layer_input.tensors(hidden)
    if block.has_scalar:
        yield "scalar", Stored("layer_scalar", (1,))
    if config.altup is not None:
        yield from config.altup.tensors(hidden)
    for mixer in block.mixers:
        yield from MIXERS[mixer.kind](mixer, spelling, hidden)
    if block.channel_mixer is not None:
        yield from MIXERS[block.channel_mixer.kind](block.channel_mixer, spelling, hidden)


def _linear(
    weight: str,
    name: str,
    shape: tuple[int, int],
    factors: Factors = (),
    *,
    into: float = 1.0,
    bias: bool,
    transposed: bool = False,
    groups: int | None = None,
) -> Named:
    """Yield name and checkpoint tensor of each weight of a linear layer: the matrix and an optional bias.

    Arguments:
        weight: Name of the matrix among the weights, such as "q".
        name: Name of the module in the checkpoint.
        shape: Shape [out, in] of the matrix.
        factors: (number of rows, factor) of consecutive rows of the output; () for no factors.
        into: Factor of the input, which multiplies the matrix and not the bias.
        bias: Whether there is a bias.
        transposed: Whether the checkpoint stores the matrix as [in, out].
        groups: Number of groups if the checkpoint stores a width-1 convolution (`Stored.groups`); None for a
            matrix.
    """
    matrix_factors = factors
    if into != 1:
        matrix_factors = tuple((rows, factor * into) for rows, factor in factors or ((shape[0], 1),))
    size: tuple[int, ...] = shape[::-1] if transposed else shape
    if groups is not None:
        size = (shape[0], shape[1] // groups, 1)
    stored = Stored(f"{name}.weight", size, is_transposed=transposed, factors=matrix_factors, groups=groups)
    yield weight, stored
    if bias:
        yield f"{weight}.bias", Stored(f"{name}.bias", shape[:1], factors=factors)


def _attention(spec: AttentionSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of grouped-query attention, with all its optional
    parts."""
    prefix = spelling.attention
    into, of_keys, out = spec.factors
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gated = spec if isinstance(spec, GatedAttentionSpec) else None
    query_rows = 2 * queries if gated and not gated.has_gate_projection else queries
    if gated and gated.has_gate_projection:
        # Trinity has a separate projection for gates; Qwen3-Next stores them with the queries.
        yield "gate_of_heads", Stored(f"{prefix}gate_proj.weight", (queries, hidden))
    transposed = spelling.is_transposed
    parts = [("q", query_rows, 1.0), ("k", keys, of_keys), ("v", keys, 1.0)]
    if spec.source is not None or spec.values_from_keys:
        # Layers with shared keys only have queries; Gemma 4's full attention has no value projection.
        parts = parts[: 1 if spec.source is not None else 2]
    groups: Sequence[int | None] = spec.groups or (None,) * 4
    if spec.layout == "separate":
        for (weight, size, factor), part, n in zip(parts, spelling.attention_parts, groups, strict=False):
            yield from _linear(
                weight,
                f"{prefix}{part}",
                (size, hidden),
                _one_factor(size, factor),
                into=into,
                bias=spec.qkv_bias,
                groups=n,
            )
    else:
        name, rows = f"{prefix}{spelling.attention_in}", queries + 2 * keys
        yield from _linear("qkv", name, (rows, hidden), bias=spec.qkv_bias, transposed=transposed)
    # The first DeBERTa stores biases of queries and values apart from its fused projection.
    for weight, name in zip("qv", spelling.encoder.attention_biases, strict=False):
        yield f"{weight}.bias", Stored(f"{prefix}{name}", (queries if weight == "q" else keys,))
    name = f"{prefix}{spelling.attention_out}"
    factors = _one_factor(hidden, out)
    size_out = (hidden, queries)
    yield from _linear(
        "o", name, size_out, factors, bias=spec.o_bias, transposed=transposed, groups=groups[3]
    )
    if (norm := spec.qk_norm) is not None:
        widths = (spec.head_dim,) * 2 if norm.per == "head" else (queries, keys)
        constant = None if norm.has_weights else 1.0
        normed = [("q_norm", spelling.attention_norms[0], widths[0])]
        if spec.source is None:
            normed.append(("k_norm", spelling.attention_norms[1], widths[1]))
        for weight, name, width in normed:
            yield weight, Stored(f"{prefix}{name}.weight", (width,), constant=constant)
            if norm.kind == "layer" and norm.has_bias:
                yield f"{weight}.bias", Stored(f"{prefix}{name}.bias", (width,))
    # A constant instead of a tensor: this norm has no weights.
    if spec.has_v_norm and spec.source is None:
        yield "v_norm", Stored(f"{prefix}v_norm.weight", (spec.head_dim,), constant=1.0)
    if spec.has_value_scores:
        yield "rise.gain", Stored(f"{prefix}A", (spec.num_kv_heads,))
        yield from _linear("rise", f"{prefix}dt_proj", (spec.num_kv_heads, keys), bias=spec.qkv_bias)
    if spec.inner_norm_eps is not None:
        yield "z_norm", Stored(f"{prefix}{spelling.inner_norms[0]}.weight", (queries,))
    if spec.relative is not None and spec.relative.source is not None:
        table = (spec.relative.rows, spec.num_attention_heads)
        name = f"{prefix}{spelling.encoder.relative}.weight"
        yield "relative", Stored(name, table, layer=spec.relative.source)
    if spec.relative is not None and not spec.relative.shares_maps:
        # Content-to-position needs keys projected from the table, position-to-content queries.
        for term, weight in (("content to position", "k"), ("position to content", "q")):
            if term in spec.relative.terms:
                name = f"{prefix}{spelling.encoder.relative_parts['qk'.index(weight)]}"
                has_bias = weight == "q" or spec.relative.has_key_bias
                yield from _linear(f"relative.{weight}", name, (queries, hidden), bias=has_bias)
    if spec.attention_sinks:
        yield "sinks", Stored(f"{prefix}sinks", (spec.num_attention_heads,))


def _differential_attention(spec: DifferentialSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of differential attention: those of attention, and the
    learned vectors of lambda."""
    yield from _attention(spec.attention, spelling, hidden)
    for part in ("q1", "k1", "q2", "k2"):
        yield f"diff.{part}", Stored(f"{spelling.attention}lambda_{part}", (spec.attention.head_dim,))


def _routed_attention(spec: RoutedAttentionSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of a mixture of attention heads."""
    prefix, width = spelling.attention, spec.kv_heads * spec.head_dim
    yield "moa.router", Stored(f"{prefix}experts.router.layer.weight", (spec.experts, hidden))
    yield "moa.q", Stored(f"{prefix}experts.input_linear.weight", (spec.experts, width, hidden))
    yield "moa.kv", Stored(f"{prefix}kv_proj.weight", (2 * width, hidden))
    yield "moa.out", Stored(f"{prefix}experts.output_linear.weight", (spec.experts, hidden, width))
    yield "moa.out.bias", Stored(f"{prefix}experts.bias", (hidden,))


def _latent_attention(spec: LatentAttentionSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of multi-head latent attention."""
    prefix, bias, query_rows = spelling.attention, spec.has_bias, spec.heads * spec.key_size
    if spec.query_rank is None:
        yield "latent.q", Stored(f"{prefix}q_proj.weight", (query_rows, hidden))
    else:
        yield from _linear("latent.q.down", f"{prefix}q_a_proj", (spec.query_rank, hidden), bias=bias)
        yield "latent.q.norm", Stored(f"{prefix}q_a_layernorm.weight", (spec.query_rank,))
        yield "latent.q", Stored(f"{prefix}q_b_proj.weight", (query_rows, spec.query_rank))
    rows = spec.rank + spec.shared_size
    yield from _linear("latent.down", f"{prefix}kv_a_proj_with_mqa", (rows, hidden), bias=bias)
    yield "latent.norm", Stored(f"{prefix}kv_a_layernorm.weight", (spec.rank,))
    rows = spec.heads * (spec.own_size + spec.value_size)
    yield "latent.up", Stored(f"{prefix}kv_b_proj.weight", (rows, spec.rank))
    out = _one_factor(hidden, spec.factor)
    size = (hidden, spec.heads * spec.value_size)
    yield from _linear("latent.out", f"{prefix}o_proj", size, out, bias=bias)


def _shared_block(spec: SharedBlockSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of a shared block, and the layer's own projection of
    its output."""
    yield from (
        (weight, replace(stored, name=f"{spelling.blocks[0]}{stored.name}", layer=spec.source))
        for weight, stored in _in_shared_block(spec, spelling, hidden)
    )
    yield "shared.out", Stored("linear.weight", (hidden, hidden))


def _in_shared_block(spec: SharedBlockSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight that layers share in a block, and of one layer's
    low-rank adapters, which are stored in lists next to them."""
    attention, both = spec.attention, 2 * hidden
    queries = attention.num_attention_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    yield "shared.ln", Stored("input_layernorm.weight", (both,))
    for weight, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"shared.{weight}", Stored(f"{spelling.attention}{weight}_proj.weight", (rows, both))
        if spec.adapts_attention:
            name = f"{spelling.attention}linear_{weight}_adapter_list"
            yield from _low_rank(f"shared.{weight}", name, spec, (rows, both))
    yield "shared.o", Stored(f"{spelling.attention}o_proj.weight", (hidden, queries))
    yield "ln2", Stored(f"{spelling.ln2}.weight", (hidden,))
    for weight, stored in _mlp(spec.mlp, spelling, hidden):
        yield f"shared.{weight}", stored
    if spec.rank is not None:
        size = (2 * spec.mlp.intermediate_size, hidden)
        name = f"{spelling.mlp}{spelling.mlp_parts[0]}_adapter_list"
        yield from _low_rank("shared.gate_up", name, spec, size)


def _low_rank(weight: str, name: str, spec: SharedBlockSpec, size: tuple[int, int]) -> Named:
    """Yield name and checkpoint tensor of each weight of a low-rank adapter: two matrices whose product is
    added to a shared matrix in one layer.

    Arguments:
        weight: Name of the shared matrix among the weights.
        name: Name of the list of all layers' adapters in the checkpoint.
        spec: The shared block, as the layer uses it.
        size: Shape [out, in] of the shared matrix.
    """
    assert spec.rank is not None
    rows, columns = size
    yield f"{weight}.low_in", Stored(f"{name}.{spec.place}.0.weight", (spec.rank, columns))
    yield f"{weight}.low_out", Stored(f"{name}.{spec.place}.1.weight", (rows, spec.rank))


def _convolution(prefix: str, channels: int, size: int, has_bias: bool) -> Named:
    """Yield name and checkpoint tensor of each weight of a state space's short convolution."""
    yield "ssm.conv", Stored(f"{prefix}conv1d.weight", (channels, 1, size))
    if has_bias:
        yield "ssm.conv.bias", Stored(f"{prefix}conv1d.bias", (channels,))


def _mamba(spec: MambaSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of Mamba-1."""
    prefix, channels, bias = spelling.mixer, spec.channels, spec.has_bias
    yield from _linear("ssm.in", f"{prefix}in_proj", (2 * channels, hidden), bias=bias)
    yield from _convolution(prefix, channels, spec.conv_size, spec.has_conv_bias)
    yield from _selection(spec, prefix)
    yield from _linear("ssm.out", f"{prefix}out_proj", (hidden, channels), bias=bias)
    if spec.norms == "weighted":
        for weight, size in (("dt", spec.rank), ("b", spec.state_size), ("c", spec.state_size)):
            yield f"ssm.{weight}_norm", Stored(f"{prefix}{weight}_layernorm.weight", (size,))


def _selection(spec: MambaSpec, prefix: str) -> Named:
    """Yield name and checkpoint tensor of each weight of Mamba-1's projections to step sizes, B and C, and of
    A and D. The layout "by group" has a leading axis of groups; prefix: of the mixer's tensors."""
    channels, rank, keys = spec.channels, spec.rank, spec.state_size
    groups: tuple[int, ...] = ()
    dot = "."
    if spec.layout == "by group":
        groups, channels, dot = (spec.groups,), channels // spec.groups, "_"
    yield "ssm.select", Stored(f"{prefix}x_proj{dot}weight", (*groups, rank + 2 * keys, channels))
    yield "ssm.dt", Stored(f"{prefix}dt_proj{dot}weight", (*groups, channels, rank))
    yield "ssm.dt.bias", Stored(f"{prefix}dt_proj{dot}bias", (*groups, channels))
    yield "ssm.A_log", Stored(f"{prefix}A_log", (*groups, channels, keys))
    yield "ssm.D", Stored(f"{prefix}D", (*groups, channels))


def _mamba2(spec: Mamba2Spec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of Mamba-2."""
    prefix, channels, shared = spelling.mixer, spec.channels, spec.groups * spec.state_size
    # Rows of the input projection: gate, x, B, C, step sizes.
    sizes = (channels, channels, shared, shared, spec.heads)
    factors = tuple(zip(sizes, spec.in_factors, strict=True)) if set(spec.in_factors) != {1.0} else ()
    size = (sum(sizes), hidden)
    yield from _linear("ssm.in", f"{prefix}in_proj", size, factors, into=spec.into_factor, bias=spec.has_bias)
    yield from _convolution(prefix, spec.convolved, spec.conv_size, spec.has_conv_bias)
    for weight in ("dt_bias", "A_log", "D"):
        yield f"ssm.{weight}", Stored(f"{prefix}{weight}", (spec.heads,))
    if spec.norm is not None:
        yield "ssm.norm", Stored(f"{prefix}norm.weight", (channels,))
    out = _one_factor(hidden, spec.out_factor)
    yield from _linear("ssm.out", f"{prefix}out_proj", (hidden, channels), out, bias=spec.has_out_bias)


def _mlp(spec: MlpSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of an MLP."""
    prefix, parts, inner = spelling.mlp, spelling.mlp_parts, spec.intermediate_size
    of_gate, out = spec.factors
    gate = _one_factor(inner, of_gate)
    groups: Sequence[int | None] = spec.groups or (None, None)
    if spec.is_fused:
        both = ((inner, of_gate), (inner, 1.0)) if gate else ()
        yield from _linear("gate_up", f"{prefix}{parts[0]}", (2 * inner, hidden), both, bias=spec.has_bias)
    else:
        if spec.is_gated:
            yield from _linear("gate", f"{prefix}{parts[0]}", (inner, hidden), gate, bias=spec.has_bias)
        name = f"{prefix}{parts[-2]}"
        yield from _linear(
            "up",
            name,
            (inner, hidden),
            bias=spec.has_bias,
            transposed=spelling.is_transposed,
            groups=groups[0],
        )
    name, factors = f"{prefix}{parts[-1]}", _one_factor(hidden, out)
    transposed, size = spelling.is_transposed, (hidden, inner)
    yield from _linear(
        "down", name, size, factors, bias=spec.has_bias, transposed=transposed, groups=groups[1]
    )
    if spec.inner_norm_eps is not None:
        yield "inner_norm", Stored(f"{prefix}{spelling.inner_norms[1]}.weight", (inner,))
    # beta and eps are constants of the activation that checkpoints store as scalars.
    if spec.activation == "xielu":
        for weight in ("alpha_p", "alpha_n"):
            yield f"act.{weight}", Stored(f"{prefix}act_fn.{weight}", (1,))
        for weight in ("beta", "eps"):
            yield f"act.{weight}", Stored(f"{prefix}act_fn.{weight}", ())


def _experts(spec: ExpertsSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of router, routed experts and shared expert."""
    prefix, parts, inner, bias = (
        spelling.experts.prefix,
        spelling.experts.parts,
        spec.intermediate_size,
        spec.has_bias,
    )
    width, out = spec.latent_size or hidden, spec.factor
    yield "experts.router", Stored(f"{prefix}{spelling.experts.router}.weight", (spec.count, hidden))
    if spec.has_routed_bias:
        yield "experts.router.bias", Stored(f"{prefix}{spelling.experts.router}.bias", (spec.count,))
    if spec.routing in CORRECTED and spec.has_correction:
        # A name in the layer ("/name"), a suffix of the router's name (".name"), or a name below the prefix.
        correction = spelling.experts.correction
        if correction.startswith("/"):
            name = correction.removeprefix("/")
        else:
            name = prefix + (spelling.experts.router if correction.startswith(".") else "") + correction
        size = (1, spec.count) if spec.routing == "chosen of corrected softmax" else (spec.count,)
        yield "experts.correction", Stored(name, size)
    # With a latent, the factor is applied once, by the projection from the latent.
    last = 1.0 if spec.latent_size else out
    if spec.is_listed:
        words = ("gate", "up", "down") if spec.is_gated else ("up", "down")
        for expert in range(spec.count):
            for word, part in zip(words, parts, strict=True):
                size = (width, inner) if word == "down" else (inner, width)
                factors = _one_factor(width, last) if word == "down" else ()
                name = f"{prefix}experts.{expert}.{part}.weight"
                yield f"experts.{expert}.{word}", Stored(name, size, factors=factors)
    else:
        both = 2 * inner if spec.is_gated else inner
        ending = spelling.experts.ending
        up, down = (both, width), (width, inner)
        # gpt-oss and Llama 4 store the matrices of all experts as [expert, in, out].
        if spec.limits is not None or spec.is_transposed:
            up, down = up[::-1], down[::-1]
        yield "experts.up", Stored(f"{prefix}{parts[0]}{ending}", (spec.count, *up))
        factors = _one_factor(spec.count, last)
        yield "experts.down", Stored(f"{prefix}{parts[1]}{ending}", (spec.count, *down), factors=factors)
        if spec.has_routed_bias:
            yield "experts.up.bias", Stored(f"{prefix}{parts[0]}_bias", (spec.count, both))
            yield "experts.down.bias", Stored(f"{prefix}{parts[1]}_bias", (spec.count, width))
    if spec.has_output_bias:
        yield "experts.out.bias", Stored(f"{prefix}bias", (hidden,))
    if spec.latent_size:
        into = (spec.latent_size, hidden)
        yield from _linear("experts.into_latent", f"{prefix}fc1_latent_proj", into, bias=bias)
        yield from _linear(
            "experts.from_latent", f"{prefix}fc2_latent_proj", into[::-1], _one_factor(hidden, out), bias=bias
        )
    if spec.shared_size:
        shared = MlpSpec(
            spec.shared_size,
            spec.activation,
            is_gated=spec.is_gated,
            # Two names for a gated MLP mean a fused gate and up projection.
            is_fused=len(spelling.mlp_parts) == 2 and spec.is_gated,
            has_bias=bias,
            factors=(1.0, out),
        )
        names = Spelling(mlp=spelling.experts.shared, mlp_parts=spelling.mlp_parts)
        yield from ((f"experts.shared.{weight}", stored) for weight, stored in _mlp(shared, names, hidden))
    if spec.has_shared_gate:
        yield "experts.shared_gate", Stored(f"{prefix}{spelling.experts.shared_gate}.weight", (1, hidden))


def _gated_delta(spec: GatedDeltaSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of a gated delta net in three layouts: "by group", one
    tensor with queries, keys, values and gates of each group of heads; "by part", one tensor of all queries,
    keys and values; "separate" tensors."""
    prefix, (queries, keys, values) = spelling.mixer, spec.parts
    if spec.layout == "separate":
        yield from _separate_delta(spec, spelling, hidden)
        return
    convolved = queries + keys + values
    rows = {"in_proj_qkvz": convolved + values, "in_proj_ba": 2 * spec.heads}
    if spec.layout == "by part":
        parts = {"qkv": convolved, "z": values, "b": spec.heads, "a": spec.heads}
        rows = {f"in_proj_{part}": count for part, count in parts.items()}
    for name, count in rows.items():
        yield f"linear.{name.removeprefix('in_proj_')}", Stored(f"{prefix}{name}.weight", (count, hidden))
    yield "linear.conv", Stored(f"{prefix}conv1d.weight", (convolved, 1, spec.conv_size))
    for weight in ("A_log", "dt_bias"):
        yield f"linear.{weight}", Stored(f"{prefix}{weight}", (spec.heads,))
    yield "linear.norm", Stored(f"{prefix}norm.weight", (spec.value_size,))
    yield "linear.out", Stored(f"{prefix}out_proj.weight", (hidden, values))


def _separate_delta(spec: GatedDeltaSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of a gated delta net with separate projections. With a
    decay per key channel, the projections to decays and gates are low-rank, with as many channels in between
    as a head has values."""
    prefix, heads = spelling.mixer, spec.heads
    for part, width in zip("qkv", spec.parts, strict=True):
        yield f"linear.{part}", Stored(f"{prefix}{part}_proj.weight", (width, hidden))
        if spec.conv_size:
            yield f"linear.conv.{part}", Stored(f"{prefix}{part}_conv1d.weight", (width, 1, spec.conv_size))
    values, decays = spec.parts[2], heads
    sizes = {"b_proj": (heads, hidden)}
    if spec.decays is not None:
        sizes["a_proj"] = (heads, hidden)
    if spec.gate is not None:
        sizes["g_proj"] = (values, hidden)
    if spec.decays == "key":
        decays, low = heads * spec.key_size, spec.value_size
        sizes = {"b_proj": (heads, hidden), "f_a_proj": (low, hidden), "f_b_proj": (decays, low)}
        sizes |= {"g_a_proj": (low, hidden), "g_b_proj": (values, low)}
    for name, size in sizes.items():
        yield f"linear.{name.removesuffix('_proj')}", Stored(f"{prefix}{name}.weight", size)
    if spec.decays is not None:
        # Kimi Linear stores A_log with singleton axes, other families as [head].
        yield "linear.A_log", Stored(f"{prefix}A_log", (1, 1, heads, 1) if spec.decays == "key" else (heads,))
        yield "linear.dt_bias", Stored(f"{prefix}dt_bias", (decays,))
    yield "linear.norm", Stored(f"{prefix}o_norm.weight", (spec.value_size,))
    yield "linear.out", Stored(f"{prefix}o_proj.weight", (hidden, values))


def _linear_attention(spec: LinearAttentionSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of gated linear attention or retention."""
    prefix, values = spelling.mixer, spec.heads * spec.value_size
    for part, width in zip("qkv", spec.parts, strict=True):
        yield f"linear.{part}", Stored(f"{prefix}{part}_proj.weight", (width, hidden))
        if spec.conv_size:
            yield f"linear.conv.{part}", Stored(f"{prefix}{part}_conv1d.weight", (width, 1, spec.conv_size))
    if spec.decays == "key":
        rank, keys = spec.decay_rank, spec.parts[1]
        yield "linear.decay.down", Stored(f"{prefix}gk_proj.0.weight", (rank, hidden))
        yield from _linear("linear.decay", f"{prefix}gk_proj.1", (keys, rank), bias=True)
    if spec.has_gate:
        yield "linear.gate", Stored(f"{prefix}g_proj.weight", (values, hidden))
    if spec.has_norm_weight:
        yield "linear.norm", Stored(f"{prefix}{spelling.mixer_norm}.weight", (spec.value_size,))
    yield "linear.out", Stored(f"{prefix}o_proj.weight", (hidden, values))


def _lightning(spec: LightningSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of lightning attention."""
    prefix, width = spelling.mixer, spec.heads * spec.head_dim
    # Head by head: query, key, value.
    yield "linear.qkv", Stored(f"{prefix}qkv_proj.weight", (3 * width, hidden))
    yield "linear.gate", Stored(f"{prefix}output_gate.weight", (width, hidden))
    yield "linear.norm", Stored(f"{prefix}norm.weight", (width,))
    out = _one_factor(hidden, spec.out_factor)
    yield "linear.out", Stored(f"{prefix}out_proj.weight", (hidden, width), factors=out)


def _linear_unit(spec: LinearUnitSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of an RG-LRU."""
    prefix, width = spelling.mixer, spec.channels
    for weight, name in (("in", "linear_x"), ("gate", "linear_y")):
        yield from _linear(f"linear.{weight}", f"{prefix}{name}", (width, hidden), bias=True)
    yield "linear.conv", Stored(f"{prefix}conv_1d.weight", (width, 1, spec.conv_size))
    yield "linear.conv.bias", Stored(f"{prefix}conv_1d.bias", (width,))
    block = (spec.gates, width // spec.gates)
    for weight, name in (("input", "input_gate"), ("forget", "recurrent_gate")):
        yield f"linear.{weight}", Stored(f"{prefix}rg_lru.{name}_weight", (*block, block[1]))
        yield f"linear.{weight}.bias", Stored(f"{prefix}rg_lru.{name}_bias", block)
    yield "linear.decays", Stored(f"{prefix}rg_lru.recurrent_param", (width,))
    yield from _linear("linear.out", f"{prefix}linear_out", (hidden, width), bias=True)


def _mlstm(spec: MlstmSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of an mLSTM."""
    prefix, heads, bias, values = spelling.mixer, spec.heads, spec.has_bias, spec.parts[2]
    if spec.is_fused:
        yield from _linear("mlstm.qkvo", f"{prefix}qkv_opreact", (sum(spec.parts), hidden), bias=bias)
        yield from _linear("mlstm.gates", f"{prefix}ifgate_preact", (2 * heads, hidden), bias=True)
    else:
        for name, width in zip(("q", "k", "v", "ogate_preact"), spec.parts, strict=True):
            yield from _linear(f"mlstm.{name}", f"{prefix}{name}", (width, hidden), bias=bias)
        for name in ("igate_preact", "fgate_preact"):
            yield from _linear(f"mlstm.{name}", f"{prefix}{name}", (heads, hidden), bias=True)
    yield "mlstm.norm", Stored(f"{prefix}multihead_norm.weight", (values,))
    if bias:
        yield "mlstm.norm.bias", Stored(f"{prefix}multihead_norm.bias", (values,))
    yield from _linear("mlstm.out", f"{prefix}out_proj", (hidden, values), bias=bias)


def _short_convolution(spec: ShortConvolutionSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of a gated short convolution (LFM2)."""
    prefix, bias = spelling.mixer, spec.has_bias
    yield from _linear("conv.in", f"{prefix}in_proj", (3 * spec.channels, hidden), bias=bias)
    yield "conv.conv", Stored(f"{prefix}conv.weight", (spec.channels, 1, spec.conv_size))
    if bias:
        yield "conv.conv.bias", Stored(f"{prefix}conv.bias", (spec.channels,))
    yield from _linear("conv.out", f"{prefix}out_proj", (hidden, spec.channels), bias=bias)


def _mlp_and_experts(spec: MlpAndExpertsSpec, spelling: Spelling, hidden: int) -> Named:
    """Yield name and checkpoint tensor of each weight of an MLP with parallel experts, their gains and norms
    (Gemma 4)."""
    yield from _mlp(spec.mlp, spelling, hidden)
    yield from _experts(spec.experts, spelling, hidden)
    yield (
        "beside.router_gain",
        Stored(f"{spelling.experts.prefix}{spelling.experts.router_gains[0]}", (hidden,)),
    )
    yield (
        "beside.expert_gains",
        Stored(f"{spelling.experts.prefix}{spelling.experts.router_gains[1]}", (spec.experts.count,)),
    )
    for weight, name in zip(
        ("mlp_post", "experts", "experts_post"), spelling.experts.beside_norms, strict=True
    ):
        yield f"beside.{weight}", Stored(f"{name}.weight", (hidden,))


MIXERS: dict[str, Callable[[Any, Spelling, int], Named]] = {
    AttentionSpec.kind: _attention,
    GatedAttentionSpec.kind: _attention,
    DifferentialSpec.kind: _differential_attention,
    LatentAttentionSpec.kind: _latent_attention,
    RoutedAttentionSpec.kind: _routed_attention,
    GatedDeltaSpec.kind: _gated_delta,
    LightningSpec.kind: _lightning,
    LinearAttentionSpec.kind: _linear_attention,
    LinearUnitSpec.kind: _linear_unit,
    MlstmSpec.kind: _mlstm,
    ShortConvolutionSpec.kind: _short_convolution,
    MambaSpec.kind: _mamba,
    Mamba2Spec.kind: _mamba2,
    MlpSpec.kind: _mlp,
    ExpertsSpec.kind: _experts,
    MlpAndExpertsSpec.kind: _mlp_and_experts,
    TimeMixSpec.kind: lambda spec, spelling, hidden: time_mix_tensors(spec, spelling.rwkv, hidden),
    ChannelMixSpec.kind: lambda spec, spelling, hidden: channel_mix_tensors(spec, spelling.rwkv, hidden),
}
"""Kind of a mixer or channel mixer -> function (spec, tensor names, hidden size) -> its tensors."""
