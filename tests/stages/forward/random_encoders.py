"""Small random encoders of every family, made by the reference and saved as it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .random_models import CONTEXT, VOCAB, draw_weights, save_tokenizer

LAYERS = 3
MASK = 4
"""Id of the mask token, of families whose config tells it."""
Draw = Callable[[random.Random], dict[str, Any]]
AXES = ("bert", "deberta-v2", "electra", "esm", "modernbert", "mpnet")
"""Families that between them have what no decoder has: norms on the sums, a transform before the head, token
types, embeddings of another width, tokens that are left out, windows on both sides, a layer without its first
norm, scores by distance."""


def draw(family: str, seed: int) -> dict[str, Any]:
    """Keyword arguments of the family's reference configuration."""
    rng = random.Random(f"{family} {seed}")
    common = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": rng.choice([0, 1]),
        "max_position_embeddings": CONTEXT,
    }
    return common | DRAWS[family](rng)


def _sizes(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 4])
    return {
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_hidden_layers": LAYERS,
        "intermediate_size": rng.choice([20, 36]),
    }


def _bert(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng) | {
        "hidden_act": rng.choice(["gelu", "gelu_new", "relu"]),
        "layer_norm_eps": rng.choice([1e-12, 1e-5]),
        "type_vocab_size": rng.choice([1, 2]),
    }


def _electra(rng: random.Random) -> dict[str, Any]:
    drawn = _bert(rng)
    return drawn | {"embedding_size": rng.choice([drawn["hidden_size"], 12, 40])}


def _roformer(rng: random.Random) -> dict[str, Any]:
    drawn = _electra(rng)
    return drawn | ({"embedding_size": None} if rng.random() < 0.3 else {})


def _rembert(rng: random.Random) -> dict[str, Any]:
    widths = {"input_embedding_size": rng.choice([12, 40]), "output_embedding_size": rng.choice([12, 40])}
    return _bert(rng) | widths


def _albert(rng: random.Random) -> dict[str, Any]:
    return _electra(rng) | {"num_hidden_groups": rng.choice([1, 2, 3])}


def _distilbert(rng: random.Random) -> dict[str, Any]:
    drawn = _sizes(rng)
    return {
        "dim": drawn["hidden_size"],
        "n_heads": drawn["num_attention_heads"],
        "n_layers": LAYERS,
        "hidden_dim": drawn["intermediate_size"],
        "activation": rng.choice(["gelu", "relu"]),
    }


def _esm(rng: random.Random) -> dict[str, Any]:
    return _sizes(rng) | {
        "layer_norm_eps": rng.choice([1e-12, 1e-5]),
        "position_embedding_type": rng.choice(["absolute", "rotary"]),
        "token_dropout": rng.random() < 0.6,
        "mask_token_id": MASK,
        "emb_layer_norm_before": rng.random() < 0.5,
    }


def _biases(rng: random.Random, *keys: str) -> dict[str, Any]:
    return {key: rng.random() < 0.5 for key in keys}


def _rope(rng: random.Random) -> dict[str, Any]:
    schemes = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}]
    return {"rope_theta": rng.choice([1e4, 300.0]), **rng.choice(schemes)}


def _turning(rng: random.Random) -> dict[str, Any]:
    """Nomic's and Jina's."""
    return _bert(rng) | {"rope_parameters": _rope(rng)}


def _eurobert(rng: random.Random) -> dict[str, Any]:
    own = {"rms_norm_eps": rng.choice([1e-5, 1e-6]), "rope_parameters": _rope(rng)}
    drawn = _sizes(rng)
    drawn["num_key_value_heads"] = rng.choice([1, drawn["num_attention_heads"]])
    return drawn | own | _biases(rng, "attention_bias", "mlp_bias")


def _esmc(rng: random.Random) -> dict[str, Any]:
    # The reference has no other epsilon, and gates with SiLU alone.
    return _sizes(rng) | {"rope_parameters": _rope(rng)} | _biases(rng, "attention_bias", "mlp_bias")


def _modernbert(rng: random.Random) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", rng.choice(["sliding_attention", "full_attention"])]
    rng.shuffle(kinds)
    own = {
        "norm_eps": rng.choice([1e-5, 1e-6]),
        "hidden_activation": rng.choice(["gelu", "silu"]),
        "classifier_activation": rng.choice(["gelu", "silu"]),
        "local_attention": rng.choice([4, 7, 16]),
        "layer_types": kinds,
        "rope_parameters": {"full_attention": _rope(rng), "sliding_attention": _rope(rng)},
    }
    biases = ("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    return _sizes(rng) | own | _biases(rng, *biases)


def _mpnet(rng: random.Random) -> dict[str, Any]:
    drawn = _bert(rng) | {"pad_token_id": 1}  # whatever the config says
    return {name: told for name, told in drawn.items() if name != "type_vocab_size"}


def _luke(rng: random.Random) -> dict[str, Any]:
    own = {"entity_vocab_size": 7, "entity_emb_size": 12}
    return _bert(rng) | own | _biases(rng, "use_entity_aware_attention")


def _squeezebert(rng: random.Random) -> dict[str, Any]:
    drawn, groups = _bert(rng), ("q", "k", "v", "post_attention", "intermediate", "output")
    own = {"embedding_size": drawn["hidden_size"], "layer_norm_eps": 1e-12}
    return drawn | own | {f"{name}_groups": rng.choice([1, 2, 4]) for name in groups}


def _deberta(rng: random.Random) -> dict[str, Any]:
    """Versions 2 and 3, with tables that prompts reach beyond; the head of version 3 is the embedding."""
    legacy = rng.random() < 0.6
    return (
        _bert(rng)
        | {
            "type_vocab_size": rng.choice([0, 2]),
            "relative_attention": rng.random() < 0.8,
            "pos_att_type": rng.choice(["p2c|c2p", ["c2p"], ["p2c"], None]),
            "max_relative_positions": rng.choice([-1, 30]),
            "norm_rel_ebd": rng.choice(["none", "layer_norm"]),
            "legacy": legacy,
        }
        | rng.choice([{}, {"position_buckets": 8, "max_relative_positions": 60}])
        | _biases(rng, "share_att_key", "position_biased_input")
        | ({} if legacy else {"tie_word_embeddings": True})
    )


def _first_deberta(rng: random.Random) -> dict[str, Any]:
    later = ("position_buckets", "norm_rel_ebd", "share_att_key")
    return {key: told for key, told in _deberta(rng).items() if key not in later}


DRAWS: dict[str, Draw] = {
    "albert": _albert,
    "bert": _bert,
    "camembert": _bert,
    "data2vec-text": _bert,
    "deberta": _first_deberta,
    "deberta-v2": _deberta,
    "distilbert": _distilbert,
    "electra": _electra,
    "ernie": _bert,
    "esm": _esm,
    "esmc": _esmc,
    "eurobert": _eurobert,
    "jina_embeddings_v3": _turning,
    "luke": _luke,
    "megatron-bert": _bert,
    "modernbert": _modernbert,
    "mpnet": _mpnet,
    "nomic_bert": _turning,
    "rembert": _rembert,
    "squeezebert": _squeezebert,
    "roberta": _bert,
    "roformer": _roformer,
    "roberta-prelayernorm": _bert,
    "xlm-roberta": _bert,
    "xlm-roberta-xl": _bert,
}
ENCODERS = tuple(DRAWS)
DECODERS = (
    *("bert", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
)
"""Families of which some checkpoints are decoders."""


def save_random_encoder(
    directory: Path, family: str, seed: int = 0, *, tokenizer: bool = True, **overrides: Any
) -> Any:
    """Write a random model of a family into `directory`; returns the reference model, eager, float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    described = AutoConfig.for_model(family, **(draw(family, seed) | overrides))
    described._attn_implementation = "eager"
    torch.manual_seed(seed)
    kind = AutoModelForCausalLM if overrides.get("is_decoder") else AutoModelForMaskedLM
    model = kind.from_config(described).float().eval()
    draw_weights(model)
    if family == "roformer":  # a table of sines that is a weight by its kind alone
        table = model.roformer.encoder.embed_positions
        table.weight.data = table.create_weight()
    model.save_pretrained(directory)
    if tokenizer:
        save_tokenizer(directory)
    return model


def save_masking_tokenizer(directory: Path, kind: str) -> None:
    """A tokenizer of at most VOCAB tokens that puts a token before a text and one behind it, and has a mask:
    "WordPiece" as BERT's, "Unigram" as XLM-RoBERTa's. Ids of special tokens from 0 on."""
    import json

    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    from mizarr.workflows.subject import shipped_facts

    texts = [f"{fact['prompt']} {fact['target']}." for fact in shipped_facts()]
    if kind == "WordPiece":
        first, last, mask, others = "[CLS]", "[SEP]", "[MASK]", ["[PAD]", "[UNK]"]
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        named = [*others, first, last, mask]
        trainer: Any = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=named, show_progress=False)
    else:
        first, last, mask, others = "<s>", "</s>", "<mask>", ["<pad>", "<unk>"]
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        named = [*others, first, last, mask]
        trainer = trainers.UnigramTrainer(
            vocab_size=VOCAB, special_tokens=named, unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mask, lstrip=kind == "Unigram", special=True)])
    ends = [(each, tokenizer.token_to_id(each)) for each in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ends)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"cls_token": first, "sep_token": last, "mask_token": mask} if kind == "Unigram" else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
