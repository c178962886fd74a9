"""BERT and its relatives: encoders with post-norms, learned positions, token types, and a dense transform
before the language head.

A post-norm normalises the sum of the residual stream and a layer half's output (`LayerSpec.norms` "of
sums"). All tokens of a prompt have token type 0. With is_decoder, queries see earlier keys only.

Border: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .....store.errors import ConfigError
from ..architecture import FinalNorm
from ..composed import ComposedArchitecture
from ..families import ACTIVATIONS, read_activation
from ..layer_tensors import EncoderNames, Spelling
from ..mixers import RelativeSpec
from ..transformer import TRY_TRANSFORMERS, ConfigReader, RopeConfig
from . import builders as build
from .builders import Build, TensorShapes, family

UNSUPPORTED = ("add_cross_attention", "head_dim", "num_key_value_heads")
"""Config keys that change the results of these families and are not implemented."""
NEVER = (*UNSUPPORTED, "embedding_size")
"""Unsupported keys of families whose embedding width is always the hidden size."""
ABSOLUTE = {"position_embedding_type": "absolute"}
"""The only implemented value of that config key, except in ESM."""


def bert_spelling(root: str) -> Spelling:
    """Tensor names of BERT's checkpoints. root: prefix of all tensors of the encoder, such as "bert."."""
    return Spelling(
        embed=f"{root}embeddings.word_embeddings",
        head="cls.predictions.decoder",
        encoder=EncoderNames(
            head_bias="cls.predictions.bias",
            transform=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
            token_types=f"{root}embeddings.token_type_embeddings",
        ),
        positions=f"{root}embeddings.position_embeddings",
        embed_norm=f"{root}embeddings.LayerNorm",
        layer=f"{root}encoder.layer.{{}}.",
        ln1="attention.output.LayerNorm",
        ln2="output.LayerNorm",
        attention="attention.",
        attention_parts=("self.query", "self.key", "self.value"),
        attention_out="output.dense",
        mlp="",
        mlp_parts=("intermediate.dense", "output.dense"),
        unread=(
            f"{root}embeddings.position_ids",
            f"{root}pooler.dense.weight",
            f"{root}pooler.dense.bias",
            "cls.predictions.bias",
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
        ),
    )


def roberta_spelling(root: str) -> Spelling:
    """Tensor names of RoBERTa's checkpoints: those of BERT, except for the language head. root: prefix of the
    encoder's tensors, such as "roberta."."""
    base = bert_spelling(root)
    return replace(
        base,
        head="lm_head.decoder",
        encoder=replace(
            base.encoder, head_bias="lm_head.bias", transform=("lm_head.dense", "lm_head.layer_norm")
        ),
        unread=(*base.unread, "lm_head.bias"),
    )


BERT_SPELLING = bert_spelling("bert.")


@dataclass(frozen=True)
class BertLayers:
    """Differences between the layers of a family related to BERT and those of BERT."""

    act: str = "gelu"
    """Name of the activation function if the config key hidden_act is absent."""
    reads_act: bool = True
    """Whether hidden_act is read; otherwise the activation function is always `act`."""
    looks_ahead: bool | None = None
    """Whether queries see later keys; None for True unless the config key is_decoder is true."""
    attention: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `AttentionSpec` that differ from BERT's, by name."""
    mlp: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `MlpSpec` that differ from BERT's, by name."""


def bert_like(
    config: ConfigReader,
    shapes: TensorShapes,
    spelling: Spelling,
    *,
    eps: float | None = None,
    layers: BertLayers = BertLayers(),
    context: build.PositionContext | None = None,
    transform_key: str = "hidden_act",
    token_types: int | None = 2,
    **options: Any,
) -> ComposedArchitecture:
    """Architecture of BERT, with the differences of a related family.

    Arguments:
        config: The config.json, under the usual names of its keys.
        shapes: Shapes of the checkpoint's tensors by name.
        spelling: Names of the checkpoint's tensors.
        eps: Epsilon of all norms; None reads layer_norm_eps, with default 1e-12.
        layers: Differences inside of layers.
        context: Positions; None for a table of 512 positions, which begin at its first row.
        transform_key: Config key of the activation before the language head; "" for GELU.
        token_types: Default of type_vocab_size; None for families without token types.
        options: Further arguments of `decoder`.
    """
    eps = config.number("layer_norm_eps", 1e-12) if eps is None else eps
    looks_ahead = layers.looks_ahead
    if looks_ahead is None:
        looks_ahead = not config.flag("is_decoder", False)
    # Checkpoints converted from TensorFlow call weight and bias of their norms gamma and beta.
    if any(name.endswith("LayerNorm.gamma") for name in shapes):
        spelling = replace(spelling, encoder=replace(spelling.encoder, has_old_norms=True))
    act = read_activation(config, layers.act) if layers.reads_act else ACTIVATIONS[layers.act]
    if "transform" not in options:
        width = options.get("embedding_width") or config.integer("hidden_size")
        name = layers.act if transform_key else "gelu"
        options["transform"] = build.head_transform(config, eps, name, key=transform_key, width=width)
    context = build.position_table(config, 512, start_row=0) if context is None else context
    # The direction is set here and in `context`, as `AttentionSpec` checks relative positions against it.
    attention_fields = {"bias": True, "is_bidirectional": looks_ahead, **layers.attention}
    defaults = {"norms": "of sums", "has_embedding_norm": True, "final_norm": None, "tied": True}
    return build.decoder(
        config,
        build.attention(config, **attention_fields),
        build.mlp(config, act, is_gated=False, bias=True, **layers.mlp),
        context=replace(context, looks_ahead=looks_ahead),
        norm_type="layer",
        eps=eps,
        has_head_bias=True,
        token_types=0 if token_types is None else config.integer("type_vocab_size", token_types, least=0),
        spelling=spelling,
        **{**defaults, **options},
    )


def bert_family(model_type: str, examples: str, **options: Any) -> Callable[[Build], Build]:
    """The decorator `family` with the config keys and values that relatives of BERT refuse.

    Arguments:
        model_type: Value of the config key model_type.
        examples: Well-known models of the family.
        options: Fields of `AttendingFamily` that replace these defaults.
    """
    defaults = {"never": NEVER, "always": ABSOLUTE, "reads_tensors": True}
    return family(model_type, examples, **{**defaults, **options})


@bert_family("bert", "BERT")
def bert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of BERT."""
    return bert_like(config, shapes, BERT_SPELLING)


@bert_family("ernie", "ERNIE 1 to 3", never=(*NEVER, "use_task_id"))
def ernie(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ERNIE 1 to 3, without their task embeddings."""
    return bert_like(config, shapes, bert_spelling("ernie."))


@bert_family("bert-generation", "BERT for generation")
def bert_generation(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of BERT for generation: BERT without token types and without the transform before the
    head; encoder or decoder."""
    spelling = replace(
        BERT_SPELLING,
        head="lm_head.decoder",
        encoder=replace(BERT_SPELLING.encoder, head_bias="lm_head.bias", transform=("", ""), token_types=""),
        unread=("bert.embeddings.position_ids", "lm_head.bias"),
    )
    return bert_like(config, shapes, spelling, token_types=None, transform=None)


@bert_family("megatron-bert", "Megatron-BERT")
def megatron_bert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of Megatron-BERT: BERT with pre-norms and a final norm."""
    return bert_like(
        config,
        shapes,
        replace(BERT_SPELLING, ln1="attention.ln", ln2="ln", final_norm="bert.encoder.ln"),
        norms="before",
        has_embedding_norm=False,
        final_norm=FinalNorm(),
    )


def _projected_width(width: int, hidden: int) -> int | None:
    """Embedding width if a linear projection to the hidden size follows; None if both widths are equal."""
    return None if width == hidden else width


@bert_family("electra", "ELECTRA, its generator", never=UNSUPPORTED)
def electra(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ELECTRA's generator, whose embeddings may be narrower than the stream."""
    width = config.integer("embedding_size", 128)
    base = bert_spelling("electra.")
    spelling = replace(
        base,
        encoder=replace(
            base.encoder,
            embed_in="electra.embeddings_project",
            head_bias="",
            transform=("generator_predictions.dense", "generator_predictions.LayerNorm"),
        ),
        head="generator_lm_head",
    )
    return bert_like(
        config,
        shapes,
        spelling,
        transform_key="",
        embedding_width=_projected_width(width, config.integer("hidden_size")),
    )


@bert_family("roformer", "RoFormer", never=(*UNSUPPORTED, "rotary_value"))
def roformer(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of RoFormer: BERT with rope of neighbouring entries, instead of learned positions."""
    hidden = config.integer("hidden_size")
    base = bert_spelling("roformer.")
    spelling = replace(
        base,
        encoder=replace(base.encoder, embed_in="roformer.embeddings_project"),
        positions="",
        # A stored table of sines and cosines that are always the same; rope is computed here.
        unread=(*base.unread, "roformer.encoder.embed_positions.weight"),
    )
    return bert_like(
        config,
        shapes,
        spelling,
        context=build.PositionContext(
            1536,
            rope=lambda config, head_dim, max_positions, windows: (
                (RopeConfig(10000.0, head_dim, interleaved=True),) * len(windows)
            ),
        ),
        embedding_width=_projected_width(config.integer("embedding_size", hidden), hidden),
    )


@bert_family("rembert", "RemBERT")
def rembert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of RemBERT: input embedding, stream and output embedding have different widths, and the
    head is untied."""
    eps = config.number("layer_norm_eps", 1e-12)
    base = bert_spelling("rembert.")
    spelling = replace(
        base,
        encoder=replace(
            base.encoder,
            embed_in="rembert.encoder.embedding_hidden_mapping_in",
            head_bias="",
            transform=("cls.predictions.dense", "cls.predictions.LayerNorm"),
        ),
    )
    width = config.integer("output_embedding_size")
    return bert_like(
        config,
        shapes,
        spelling,
        embedding_width=config.integer("input_embedding_size", 256),
        transform=build.head_transform(config, eps, key="hidden_act", width=width),
        tied=None,
    )


@bert_family("albert", "ALBERT", never=UNSUPPORTED, always={**ABSOLUTE, "inner_group_num": 1})
def albert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ALBERT: layers in groups; the layers of a group share all their weights."""
    layers, groups = build.layers_of(config), config.integer("num_hidden_groups", 1)
    base = bert_spelling("albert.")
    spelling = replace(
        base,
        encoder=replace(
            base.encoder,
            embed_in="albert.encoder.embedding_hidden_mapping_in",
            head_bias="predictions.bias",
            transform=("predictions.dense", "predictions.LayerNorm"),
        ),
        head="predictions.decoder",
        layer="albert.encoder.albert_layer_groups.{}.albert_layers.0.",
        ln1="attention.LayerNorm",
        ln2="full_layer_layer_norm",
        attention_parts=("query", "key", "value"),
        attention_out="dense",
        mlp_parts=("ffn", "ffn_output"),
        unread=(
            "albert.pooler.weight",
            "albert.pooler.bias",
            "predictions.bias",
            "sop_classifier.classifier.weight",
            "sop_classifier.classifier.bias",
        ),
    )
    model = bert_like(
        config,
        shapes,
        spelling,
        layers=BertLayers(act="gelu_new", looks_ahead=True),
        embedding_width=config.integer("embedding_size", 128),
    )
    # transformers' assignment of layers to groups.
    return build.with_layers(model, lambda layer: {"source": int(layer / (layers / groups))})


@bert_family(
    "distilbert",
    "DistilBERT",
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    },
)
def distilbert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DistilBERT: no token types; fixed epsilon."""
    base = bert_spelling("distilbert.")
    spelling = replace(
        base,
        head="vocab_projector",
        encoder=replace(base.encoder, head_bias="", transform=("vocab_transform", "vocab_layer_norm")),
        layer="distilbert.transformer.layer.{}.",
        ln1="sa_layer_norm",
        ln2="output_layer_norm",
        attention_parts=("q_lin", "k_lin", "v_lin"),
        attention_out="out_lin",
        mlp="ffn.",
        mlp_parts=("lin1", "lin2"),
        unread=(),
    )
    # DistilBERT has no layer_norm_eps; its norms use 1e-12.
    layers = BertLayers(looks_ahead=True)
    return bert_like(config, shapes, spelling, eps=1e-12, layers=layers, token_types=None)


# transformers ignores layer_norm_eps in layers and uses 1e-12 there, so no other value is accepted.
@bert_family("squeezebert", "SqueezeBERT", never=UNSUPPORTED, always={**ABSOLUTE, "layer_norm_eps": 1e-12})
def squeezebert(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of SqueezeBERT: grouped convolutions of width 1 replace the linear projections."""
    keys = {"q_groups": 4, "k_groups": 4, "v_groups": 4, "post_attention_groups": 1}
    keys |= {"intermediate_groups": 4, "output_groups": 4}
    groups = tuple(config.integer(key, default) for key, default in keys.items())
    spelling = replace(
        bert_spelling("transformer."),
        layer="transformer.encoder.layers.{}.",
        attention="",
        attention_parts=("attention.query", "attention.key", "attention.value"),
        attention_out="post_attention.conv1d",
        ln1="post_attention.layernorm",
        ln2="output.layernorm",
        mlp_parts=("intermediate.conv1d", "output.conv1d"),
    )
    return bert_like(
        config,
        shapes,
        spelling,
        layers=BertLayers(looks_ahead=True, attention={"groups": groups[:4]}, mlp={"groups": groups[4:]}),
    )


# -- RoBERTa: positions begin in the table row after that of the padding token; the head has other names


def roberta_like(
    config: ConfigReader, shapes: TensorShapes, spelling: Spelling, **options: Any
) -> ComposedArchitecture:
    """Architecture of RoBERTa, with the differences of a related family.

    Arguments:
        config: The config.json, under the usual names of its keys.
        shapes: Shapes of the checkpoint's tensors by name.
        spelling: Names of the checkpoint's tensors.
        options: Further arguments of `bert_like`.
    """
    if "context" not in options:
        options["context"] = build.position_table(config, 512)
    return bert_like(config, shapes, spelling, transform_key="", **options)


@bert_family("xlm-roberta", "XLM-RoBERTa")
@bert_family("camembert", "CamemBERT")
@bert_family("roberta", "RoBERTa")
def roberta(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of RoBERTa and its multilingual and French versions."""
    return roberta_like(config, shapes, roberta_spelling("roberta."))


@bert_family("data2vec-text", "data2vec, text")
def data2vec_text(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of data2vec for text: RoBERTa under another tensor prefix."""
    return roberta_like(config, shapes, roberta_spelling("data2vec_text."))


@bert_family("xlm-roberta-xl", "XLM-RoBERTa XL and XXL")
def xlm_roberta_xl(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of XLM-RoBERTa XL: RoBERTa with pre-norms and a final norm."""
    spelling = replace(
        roberta_spelling("roberta."),
        ln1="attention.self_attn_layer_norm",
        ln2="LayerNorm",
        final_norm="roberta.encoder.LayerNorm",
    )
    return roberta_like(
        config,
        shapes,
        spelling,
        eps=config.number("layer_norm_eps", 1e-5),
        norms="before",
        has_embedding_norm=False,
        final_norm=FinalNorm(),
        token_types=1,
        context=build.position_table(config, 514),
    )


@bert_family("roberta-prelayernorm", "efficient MLM")
def roberta_prelayernorm(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of efficient MLM: RoBERTa with pre-norms, a norm of the embeddings, and a final norm."""
    spelling = replace(
        roberta_spelling("roberta_prelayernorm."),
        ln1="attention.LayerNorm",
        ln2="intermediate.LayerNorm",
        final_norm="roberta_prelayernorm.LayerNorm",
    )
    return roberta_like(config, shapes, spelling, norms="before", final_norm=FinalNorm())


@bert_family("luke", "LUKE, its words")
def luke(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of LUKE without entities: RoBERTa with an untied head; tensors of entities are not
    used."""
    entities, predictions = "luke.entity_embeddings.", "entity_predictions."
    base = roberta_spelling("luke.")
    spelling = replace(
        base,
        unread=(
            *base.unread,
            f"{entities}entity_embeddings.weight",
            f"{entities}entity_embedding_dense.weight",
            f"{entities}position_embeddings.weight",
            f"{entities}token_type_embeddings.weight",
            f"{entities}LayerNorm.weight",
            f"{entities}LayerNorm.bias",
            f"{predictions}bias",
            f"{predictions}decoder.weight",
            f"{predictions}transform.dense.weight",
            f"{predictions}transform.dense.bias",
            f"{predictions}transform.LayerNorm.weight",
            f"{predictions}transform.LayerNorm.bias",
            *(
                f"luke.encoder.layer.{{}}.attention.self.{query}_query.{end}"
                for query in ("w2e", "e2w", "e2e")
                for end in ("weight", "bias")
            ),
        ),
    )
    return roberta_like(config, shapes, spelling, layers=BertLayers(looks_ahead=True), tied=None)


@bert_family("mpnet", "MPNet", always={"pad_token_id": 1})
def mpnet(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of MPNet, with T5's relative position bias, always with 32 buckets: transformers ignores
    relative_attention_num_buckets."""
    base = roberta_spelling("mpnet.")
    spelling = replace(
        base,
        attention="attention.attn.",
        attention_parts=("q", "k", "v"),
        attention_out="o",
        encoder=replace(base.encoder, relative="mpnet.encoder.relative_attention_bias", token_types=""),
        ln1="attention.LayerNorm",
    )
    return roberta_like(
        config,
        shapes,
        spelling,
        layers=BertLayers(looks_ahead=True, attention={"relative": RelativeSpec(32, 8, 128, ("bias",))}),
        context=build.position_table(config, 512, start_row=2, counts_rows=True),
        token_types=None,
    )


@bert_family("esm", "ESM-1b and ESM-2", always={"is_folding_model": False})
def esm(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of ESM-1b and ESM-2: a table of positions, or rope, whose frequencies may be stored in the
    checkpoint."""
    # To transformers, an explicit null means a model without positions, not the default.
    kind = config.raw.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise ConfigError(
            f"{config.source}: expected position_embedding_type to be 'absolute' or 'rotary', found "
            f"{kind!r}; {TRY_TRANSFORMERS}"
        )
    # token_dropout: embeddings of masks are zeroed, and all others rescaled.
    is_dropped = config.flag("token_dropout", False)
    base = roberta_spelling("esm.")
    spelling = replace(
        base,
        embed_norm="esm.embeddings.layer_norm",
        ln1="attention.LayerNorm",
        ln2="LayerNorm",
        encoder=replace(base.encoder, own_head_bias="lm_head.bias"),
        final_norm="esm.encoder.emb_layer_norm_after",
        unread=(
            "esm.embeddings.position_ids",
            "esm.embeddings.position_embeddings.weight",
            "esm.contact_head.regression.weight",
            "esm.contact_head.regression.bias",
            "esm.pooler.dense.weight",
            "esm.pooler.dense.bias",
        ),
    )
    # ESM ignores hidden_act and always uses GELU, hence reads_act=False.
    if kind == "rotary":
        ending = "rotary_embeddings.inv_freq"
        stored = next((name for name in sorted(shapes) if name.endswith(ending)), "")
        spelling = replace(spelling, encoder=replace(spelling.encoder, frequencies=stored))
        theta = config.number("rope_theta", 10000.0)
        layers = BertLayers(reads_act=False, attention={"has_stored_frequencies": bool(stored)})
        context = build.PositionContext(
            1026,
            rope=lambda config, head_dim, max_positions, windows: (
                (RopeConfig(theta, head_dim),) * len(windows)
            ),
        )
    else:
        layers, context = BertLayers(reads_act=False), build.position_table(config, 1026)
    return roberta_like(
        config,
        shapes,
        spelling,
        layers=layers,
        context=context,
        norms="before",
        has_embedding_norm=config.flag("emb_layer_norm_before", False),
        final_norm=FinalNorm(),
        token_types=None,
        dropped_token=config.integer("mask_token_id", least=0) if is_dropped else None,
    )


# -- DeBERTa: attention scores by content and by relative position (disentangled attention)

NEVER_IN_DEBERTA = (*NEVER, "attention_head_size", "z_steps")
"""Config keys of DeBERTa that change its results and are not implemented."""


def _terms(config: ConfigReader) -> list[str]:
    """Terms of DeBERTa's scores besides content-to-content, from the config key pos_att_type: "c2p" (content
    to position) and "p2c" (position to content). Older configs list them in one string, "p2c|c2p"."""
    value = config.raw.get("pos_att_type") or []
    terms = [part.strip() for part in value.lower().split("|")] if isinstance(value, str) else list(value)
    if not set(terms) <= {"c2p", "p2c"} or len(set(terms)) < len(terms):
        raise ConfigError(
            f"{config.source}: expected pos_att_type to list 'c2p', 'p2c' or both, found {value!r}; "
            f"{TRY_TRANSFORMERS}"
        )
    return terms


def _relative(config: ConfigReader, *, is_first: bool) -> RelativeSpec | None:
    """Relative position terms of disentangled attention; None if the config has none.

    Arguments:
        config: The config.json.
        is_first: Whether this is the first DeBERTa: it has no buckets of distances and no norm of the table,
            and always projects the table by matrices of its own.
    """
    terms = _terms(config)
    if not config.flag("relative_attention", False) or not terms:
        return None
    farthest = config.integer("max_relative_positions", -1, least=-1)
    farthest = farthest if farthest > 0 else config.integer("max_position_embeddings", 512)
    names = {"c2p": "content to position", "p2c": "position to content"}
    spec_terms: tuple[Any, ...] = tuple(words for name, words in names.items() if name in terms)
    if is_first:
        return RelativeSpec(2 * farthest, farthest, farthest, spec_terms, has_key_bias=False)
    buckets = config.integer("position_buckets", -1, least=-1)
    norms = config.text("norm_rel_ebd", "none").lower().split("|")
    has_norm = "layer_norm" in map(str.strip, norms)
    return RelativeSpec(
        2 * (buckets if buckets > 0 else farthest),
        buckets // 2 if buckets > 0 else farthest,
        farthest,
        spec_terms,
        shares_maps=config.flag("share_att_key", False),
        norm_eps=config.number("layer_norm_eps", 1e-7) if has_norm else None,
    )


def _spelling(config: ConfigReader, shapes: TensorShapes) -> Spelling:
    """Tensor names of a DeBERTa checkpoint, with the language head of versions 1 and 2, or of version 3.

    The head of version 3 is always tied to the embedding. Its configs lack `legacy: false`, with which
    transformers would load the head; so tensor names decide which head the checkpoint has.

    Raises:
        ConfigError: tie_word_embeddings is false for a head of version 3.
    """
    base = bert_spelling("deberta.")
    old_head = replace(
        base,
        attention_parts=("self.query_proj", "self.key_proj", "self.value_proj"),
        encoder=replace(
            base.encoder,
            relative="deberta.encoder.rel_embeddings",
            relative_norm="deberta.encoder.LayerNorm",
            relative_parts=("self.pos_query_proj", "self.pos_key_proj"),
        ),
        unread=(
            *BERT_SPELLING.unread,
            "deberta.embeddings.position_embeddings.weight",
            "deberta.embeddings.position_ids",
            # Version 3 was trained to detect replaced tokens; this head is not used here.
            *(
                f"mask_predictions.{part}.{end}"
                for part in ("dense", "LayerNorm", "classifier")
                for end in ("weight", "bias")
            ),
        ),
    )
    head = "lm_predictions.lm_head"
    if config.flag("legacy", f"{head}.dense.weight" not in shapes):
        return old_head
    if not config.flag("tie_word_embeddings", True):
        raise ConfigError(
            f"{config.source}: expected tie_word_embeddings to be true in a DeBERTa with legacy=false, whose "
            "head is the embedding matrix, found false; remove tie_word_embeddings from the file"
        )
    return replace(
        old_head,
        head=head,
        encoder=replace(
            old_head.encoder, head_bias=f"{head}.bias", transform=(f"{head}.dense", f"{head}.LayerNorm")
        ),
    )


def _deberta(
    config: ConfigReader,
    shapes: TensorShapes,
    spelling: Spelling,
    relative: RelativeSpec | None,
    **attention_fields: Any,
) -> ComposedArchitecture:
    """Architecture of a DeBERTa of any version.

    Arguments:
        config: The config.json.
        shapes: Shapes of the checkpoint's tensors by name.
        spelling: Names of the checkpoint's tensors.
        relative: Relative position terms of the scores; None for no such terms.
        attention_fields: Further fields of `AttentionSpec`.
    """
    # He et al., DeBERTa, 2021, equation 4: scores are divided by sqrt(3 d) when both terms are added.
    head_dim = build.attention(config).head_dim
    scale = 1 / math.sqrt(head_dim * (1 + len(set(_terms(config)))))
    has_table = config.flag("position_biased_input", True)
    return bert_like(
        config,
        shapes,
        spelling,
        eps=config.number("layer_norm_eps", 1e-7),
        layers=BertLayers(
            looks_ahead=True, attention={"scale": scale, "relative": relative, **attention_fields}
        ),
        token_types=0,
        context=None if has_table else build.PositionContext(512, rope=None),
    )


@bert_family("deberta-v2", "DeBERTa 2 and 3", never=NEVER_IN_DEBERTA, always={"conv_kernel_size": 0})
def deberta_v2(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DeBERTa 2 and 3: bucketed distances; separate query, key and value projections."""
    spelling = _spelling(config, shapes)
    return _deberta(config, shapes, spelling, _relative(config, is_first=False))


@bert_family("deberta", "DeBERTa 1", never=(*NEVER_IN_DEBERTA, "talking_head"), always={})
def deberta(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Architecture of DeBERTa 1: queries, keys and values in one tensor; only queries and values have
    biases."""
    version_2 = _spelling(config, shapes)
    spelling = replace(
        version_2,
        attention_in="self.in_proj",
        encoder=replace(
            version_2.encoder,
            attention_biases=("self.q_bias", "self.v_bias"),
            relative_parts=("self.pos_q_proj", "self.pos_proj"),
        ),
    )
    relative = _relative(config, is_first=True)
    return _deberta(config, shapes, spelling, relative, qkv_bias=False, layout="by head")
