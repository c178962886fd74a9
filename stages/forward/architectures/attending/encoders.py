"""Encoders: families whose positions see all others, one row each.

Most are a BERT: norms on the sums of stream and what is added to it, learned positions, token types of which
prompts have one, and a transform before the LM head. A checkpoint of one that is a decoder (is_decoder) looks
back alone.

Border: never imports torch. How a row is read is told in reading.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from .....store.errors import ConfigError
from ..architecture import HeadTransform
from ..families import ACTIVATIONS, listed_windows
from ..layer_tensors import LLAMA, Spelling
from ..transformer import ConfigReader, RopeConfig
from .family import Attends, Factors, Windows

__all__ = [
    "BERT",
    "ENCODERS",
    "OF_BERT",
    "OF_MODERNBERT",
    "ROBERTA",
    "always",
    "of_bert",
    "of_roberta",
    "transform",
    "windows_of_modernbert",
]


def always(reader: ConfigReader) -> bool:
    """Of families whose positions see all others, whatever the config says."""
    return True


def _unless_decoder(reader: ConfigReader) -> bool:
    return not reader.flag("is_decoder", False)


def transform(
    key: str = "", *, width: str = "", bias: bool | str = True, norm_bias: bool | str = True
) -> Callable[[ConfigReader, Attends, int], HeadTransform]:
    """What stands before the head. key: which tells its activation, "" for GELU whatever the config says.
    width: the key of what the head reads, "" for the width of embeddings. bias, norm_bias: whether there are
    any, or the key that tells."""

    def read(reader: ConfigReader, family: Attends, embedding: int) -> HeadTransform:
        name = reader.text(key, family.activation) if key else "gelu"
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"{reader.source}: expected {key} among {', '.join(ACTIVATIONS)}, found {name!r}; this model "
                "cannot run here"
            )
        return HeadTransform(
            reader.integer(width) if width else embedding,
            ACTIVATIONS[name],
            family.fixed_eps or reader.number(family.eps_key, family.eps),
            bias if isinstance(bias, bool) else reader.flag(bias, False),
            norm_bias if isinstance(norm_bias, bool) else reader.flag(norm_bias, False),
        )

    return read


def of_bert(root: str) -> Spelling:
    """As BERT names its tensors, behind this."""
    return Spelling(
        embed=f"{root}embeddings.word_embeddings",
        head="cls.predictions.decoder",
        head_bias="cls.predictions.bias",
        transform=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
        positions=f"{root}embeddings.position_embeddings",
        token_types=f"{root}embeddings.token_type_embeddings",
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


def of_roberta(root: str) -> Spelling:
    """As RoBERTa names its tensors: BERT's, and a head of its own."""
    bert = of_bert(root)
    return replace(
        bert,
        head="lm_head.decoder",
        head_bias="lm_head.bias",
        transform=("lm_head.dense", "lm_head.layer_norm"),
        unread=(*bert.unread, "lm_head.bias"),
    )


OF_BERT = of_bert("bert.")
OF_MODERNBERT = Spelling(
    embed="model.embeddings.tok_embeddings",
    embed_norm="model.embeddings.norm",
    head="decoder",
    transform=("head.dense", "head.norm"),
    final_norm="model.final_norm",
    ln1="attn_norm",
    ln2="mlp_norm",
    attention="attn.",
    attention_in="Wqkv",
    attention_out="Wo",
    mlp="mlp.",
    mlp_parts=("Wi", "Wo"),
)
BERT = Attends(
    examples="BERT",
    norm="layer",
    eps_key="layer_norm_eps",
    eps=1e-12,
    activation="gelu",
    mlp="plain",
    places="of sums",
    looks_ahead=_unless_decoder,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    head_bias=True,
    has_embedding_norm=True,
    first_position=0,
    token_types=("type_vocab_size", 2),
    transform=transform("hidden_act"),
    has_final_norm=False,
    tied=True,
    max_positions=512,
    spelling=OF_BERT,
    may_have_old_norms=True,
    never=("add_cross_attention", "head_dim", "num_key_value_heads", "embedding_size"),
    always={"position_embedding_type": "absolute"},
)
ROBERTA = replace(
    BERT,
    examples="RoBERTa",
    first_position=None,
    positions_behind_padding=True,
    transform=transform(),
    spelling=of_roberta("roberta."),
)
"""What is BERT's but for its head, and where its positions begin."""


def _groups(reader: ConfigReader, layers: int) -> Sequence[int]:
    """ALBERT: layers in as many groups, each of which shares all weights."""
    groups = reader.integer("num_hidden_groups", 1)
    return [int(layer / (layers / groups)) for layer in range(layers)]


def _is_absolute(reader: ConfigReader) -> bool:
    # An explicit null means no positions at all to the reference, not the default.
    kind = reader.raw.get("position_embedding_type", "absolute")
    reader.read.add("position_embedding_type")
    if kind not in ("absolute", "rotary"):
        raise ConfigError(
            f"{reader.source}: expected position_embedding_type to be 'absolute' or 'rotary', found "
            f"{kind!r}; this model cannot run here"
        )
    return bool(kind == "absolute")


def _rope_of_esm(reader: ConfigReader, family: Attends, head_dim: int) -> RopeConfig:
    return RopeConfig(reader.number("rope_theta", family.theta), head_dim)


def _rope_of_roformer(reader: ConfigReader, family: Attends, head_dim: int) -> RopeConfig:
    return RopeConfig(family.theta, head_dim, interleaved=True)


def _masked_of_esm(reader: ConfigReader) -> int | None:
    return reader.integer("mask_token_id", least=0) if reader.flag("token_dropout", False) else None


def windows_of_modernbert(reader: ConfigReader, layers: int, *, itself: int = 1) -> Windows:
    """A query sees `local_attention // 2` keys on each side, and itself; in every third layer all of them.

    Raises:
        ConfigError: `sliding_window`, which the reference derives from `local_attention`, contradicts it.
    """
    half = reader.integer("local_attention", 128) // 2
    listed = reader.integer("sliding_window", half)
    if listed != half and reader.has("local_attention"):
        raise ConfigError(
            f"{reader.source}: expected sliding_window to be half of local_attention ({half}), found "
            f"{listed}; correct the file, or fetch it again"
        )
    size = listed + itself
    every = reader.integer("global_attn_every_n_layers", 3)
    types = reader.strings("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    return listed_windows(reader, types, size, layers)


ENCODERS: dict[str, Attends] = {
    "bert": BERT,
    "ernie": replace(
        BERT, examples="ERNIE 1 to 3", never=(*BERT.never, "use_task_id"), spelling=of_bert("ernie.")
    ),
    "roberta": ROBERTA,
    "camembert": replace(ROBERTA, examples="CamemBERT"),
    "xlm-roberta": replace(ROBERTA, examples="XLM-RoBERTa"),
    "data2vec-text": replace(ROBERTA, examples="data2vec, text", spelling=of_roberta("data2vec_text.")),
    "xlm-roberta-xl": replace(
        ROBERTA,
        examples="XLM-RoBERTa XL and XXL",
        eps=1e-5,
        places="before",
        has_embedding_norm=False,
        has_final_norm=True,
        token_types=("type_vocab_size", 1),
        max_positions=514,
        spelling=replace(
            of_roberta("roberta."),
            ln1="attention.self_attn_layer_norm",
            ln2="LayerNorm",
            final_norm="roberta.encoder.LayerNorm",
        ),
    ),
    "roberta-prelayernorm": replace(
        ROBERTA,
        examples="efficient MLM",
        places="before",
        has_final_norm=True,
        spelling=replace(
            of_roberta("roberta_prelayernorm."),
            ln1="attention.LayerNorm",
            ln2="intermediate.LayerNorm",
            final_norm="roberta_prelayernorm.LayerNorm",
        ),
    ),
    "megatron-bert": replace(
        BERT,
        examples="Megatron-BERT",
        places="before",
        has_embedding_norm=False,
        has_final_norm=True,
        spelling=replace(of_bert("bert."), ln1="attention.ln", ln2="ln", final_norm="bert.encoder.ln"),
    ),
    "electra": replace(
        BERT,
        examples="ELECTRA, its generator",
        embedding_width=("embedding_size", 128),
        transform=transform(),
        never=BERT.never[:-1],
        spelling=replace(
            of_bert("electra."),
            embed_in="electra.embeddings_project",
            head="generator_lm_head",
            head_bias="",
            transform=("generator_predictions.dense", "generator_predictions.LayerNorm"),
        ),
    ),
    "roformer": replace(
        BERT,
        examples="RoFormer",
        first_position=None,
        rope_of=_rope_of_roformer,
        interleaved_rope=True,
        embedding_width=("embedding_size", 0),
        max_positions=1536,
        never=(*BERT.never[:-1], "rotary_value"),
        spelling=replace(
            of_bert("roformer."),
            embed_in="roformer.embeddings_project",
            positions="",
            # Sines and cosines, always these: what rope turns by is worked out.
            unread=(*of_bert("roformer.").unread, "roformer.encoder.embed_positions.weight"),
        ),
    ),
    "rembert": replace(
        BERT,
        examples="RemBERT",
        embedding_width=("input_embedding_size", 256),
        always_maps_embeddings=True,
        transform=transform("hidden_act", width="output_embedding_size"),
        tied=False,
        is_never_tied=True,
        spelling=replace(
            of_bert("rembert."),
            embed_in="rembert.encoder.embedding_hidden_mapping_in",
            head_bias="",
            transform=("cls.predictions.dense", "cls.predictions.LayerNorm"),
        ),
    ),
    "albert": replace(
        BERT,
        examples="ALBERT",
        activation="gelu_new",
        looks_ahead=always,
        embedding_width=("embedding_size", 128),
        always_maps_embeddings=True,
        sources=_groups,
        never=BERT.never[:-1],
        always={**BERT.always, "inner_group_num": 1},
        spelling=replace(
            of_bert("albert."),
            embed_in="albert.encoder.embedding_hidden_mapping_in",
            head="predictions.decoder",
            head_bias="predictions.bias",
            transform=("predictions.dense", "predictions.LayerNorm"),
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
        ),
    ),
    "distilbert": replace(
        BERT,
        examples="DistilBERT",
        fixed_eps=1e-12,
        looks_ahead=always,
        token_types=None,
        transform=transform("hidden_act"),
        aliases={
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        spelling=replace(
            of_bert("distilbert."),
            head="vocab_projector",
            head_bias="",
            transform=("vocab_transform", "vocab_layer_norm"),
            layer="distilbert.transformer.layer.{}.",
            ln1="sa_layer_norm",
            ln2="output_layer_norm",
            attention_parts=("q_lin", "k_lin", "v_lin"),
            attention_out="out_lin",
            mlp="ffn.",
            mlp_parts=("lin1", "lin2"),
            unread=(),
        ),
    ),
    "esm": replace(
        ROBERTA,
        examples="ESM-1b and ESM-2",
        places="before",
        activation_keys=(),
        has_embedding_norm=("emb_layer_norm_before", False),
        has_final_norm=True,
        positions_behind_padding=_is_absolute,
        rope_of=_rope_of_esm,
        token_types=None,
        dropped_token=_masked_of_esm,
        frequencies="rotary_embeddings.inv_freq",
        max_positions=1026,
        always={"is_folding_model": False},
        spelling=replace(
            of_roberta("esm."),
            embed_norm="esm.embeddings.layer_norm",
            ln1="attention.LayerNorm",
            ln2="LayerNorm",
            own_head_bias="lm_head.bias",
            final_norm="esm.encoder.emb_layer_norm_after",
            unread=(
                "esm.embeddings.position_ids",
                "esm.embeddings.position_embeddings.weight",
                "esm.contact_head.regression.weight",
                "esm.contact_head.regression.bias",
                "esm.pooler.dense.weight",
                "esm.pooler.dense.bias",
            ),
        ),
    ),
    "esmc": Attends(
        examples="ESM Cambrian",
        norm="layer",
        fixed_eps=1e-5,
        looks_ahead=always,
        qk_norms="all",
        qk_norm_type="layer",
        has_qk_norm_bias=False,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        factors=lambda reader: Factors(residual=math.sqrt(36 / reader.integer("num_hidden_layers"))),
        has_final_norm_bias=False,
        head_bias=True,
        is_never_tied=True,
        transform=transform(),
        max_positions=2048,
        spelling=replace(
            LLAMA,
            embed="esmc.embed_tokens",
            head="lm_head.decoder",
            transform=("lm_head.dense", "lm_head.layer_norm"),
            final_norm="esmc.norm",
            layer="esmc.layers.{}.",
        ),
    ),
    "eurobert": Attends(
        examples="EuroBERT",
        eps=1e-5,
        looks_ahead=always,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        head_bias="mlp_bias",
        max_positions=8192,
    ),
    "modernbert": Attends(
        examples="ModernBERT",
        norm="layer",
        has_norm_bias=("norm_bias", False),
        eps_key="norm_eps",
        eps=1e-5,
        activation_keys=("hidden_activation",),
        activation="gelu",
        mlp="gated_fused",
        looks_ahead=always,
        skips_first_norm=True,
        has_embedding_norm=True,
        layout="by part",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        theta=160000.0,
        local_rope=("local_rope_theta", 10000.0),
        windows_of=windows_of_modernbert,
        transform=transform("classifier_activation", bias="classifier_bias", norm_bias="norm_bias"),
        head_bias=("decoder_bias", True),
        tied=True,
        max_positions=8192,
        aliases={"rope_theta": "global_rope_theta"},
        spelling=OF_MODERNBERT,
    ),
    "nomic_bert": Attends(
        examples="Nomic Embed",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-12,
        places="of sums",
        looks_ahead=always,
        layout="by part",
        has_embedding_norm=True,
        token_types=("type_vocab_size", 2),
        transform=transform("hidden_act"),
        has_final_norm=False,
        head_bias=True,
        theta=1000.0,
        tied=True,
        max_positions=2048,
        spelling=replace(
            of_bert("nomic_bert."),
            embed_norm="nomic_bert.emb_ln",
            transform=("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm"),
            layer="nomic_bert.encoder.layers.{}.",
            ln1="norm1",
            ln2="norm2",
            attention="attn.",
            attention_in="Wqkv",
            attention_out="out_proj",
            mlp="mlp.",
            mlp_parts=("fc12", "fc11", "fc2"),
        ),
    ),
    "jina_embeddings_v3": Attends(
        examples="Jina Embeddings 3",
        norm="layer",
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="gelu",
        mlp="plain",
        places="of sums",
        looks_ahead=always,
        layout="by part",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        has_embedding_norm=True,
        token_types=("type_vocab_size", 1),
        transform=transform(),
        has_final_norm=False,
        head_bias=True,
        theta=20000.0,
        tied=True,
        max_positions=8194,
        spelling=replace(
            of_roberta("roberta."),
            embed_norm="roberta.emb_ln",
            layer="roberta.encoder.layers.{}.",
            ln1="norm1",
            ln2="norm2",
            attention="mixer.",
            attention_in="Wqkv",
            attention_out="out_proj",
            mlp="mlp.",
            mlp_parts=("fc1", "fc2"),
        ),
    ),
}
"""model_type -> row."""
