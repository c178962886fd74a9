"""Encoders compute what the reference computes, and read its configs and checkpoints as it does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import HookPoint, HookSpec, Knockout, Model, Replace, Run
from mizarr.stages.forward.architectures.attending.families import ATTENDING as ROWS
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.generation.generate import generate
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.stages.forward.runs.run import plan
from mizarr.stages.graph.rows.frozen import require_attention
from mizarr.stages.logits.attribution import constant_share
from mizarr.stages.logits.prompt_test import tokens_to_residual_directions
from mizarr.stages.logits.readout import readout_from_files
from mizarr.stages.weights.matrices import PlainMatrices
from mizarr.store.errors import ConfigError, InterventionError, PromptError, ShapeError

from .compared import (
    RAGGED,
    assert_alike_together,
    assert_near,
    assert_parity,
    assert_read_by_its_files,
    draw_ids,
    normed_sum,
)
from .random_encoders import DECODERS, ENCODERS, LAYERS, MASK, draw, save_random_encoder
from .random_hybrids import save_random_hybrid
from .random_models import save_random_model

pytest.importorskip("transformers")
LINEAGES = ("bert", "modernbert")
"""Modules of encoders, and of two decoders made like them."""


def read(raw: dict[str, Any]) -> Any:
    return KNOWN[raw["model_type"]].read(ConfigReader(json.loads(json.dumps(raw))), {})


def test_every_family_has_its_draw():
    found = {name for name, row in ROWS.items() if row.build.__module__.rpartition(".")[2] in LINEAGES}
    assert found - {"bert-generation", "modernbert-decoder"} == set(ENCODERS)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("seed", range(2))
def test_logits_and_streams_agree_with_transformers(family, seed, tmp_path):
    reference = save_random_encoder(tmp_path, family, seed, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    assert_parity(model, reference)
    assert_alike_together(model, [*RAGGED[:2], [MASK, *RAGGED[2]]])


@pytest.mark.parametrize("family", ENCODERS)
def test_attention_patterns_agree_with_transformers(family, tmp_path):
    reference = save_random_encoder(tmp_path, family, 4, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 40)
    cache = model.forward(ids, HookSpec().capture("blocks.*.attn.hook_pattern"))
    with torch.no_grad():
        patterns = reference(ids, output_attentions=True).attentions
    assert len(patterns) == len(cache) == model.config.num_layers
    for point, pattern in zip(cache, patterns, strict=True):
        # Some references return scores.
        assert_near(cache[point], pattern.softmax(-1) if family == "squeezebert" else pattern)
    assert float(patterns[0].triu(1).sum()) > 0.1


@pytest.mark.parametrize("family", ENCODERS)
def test_padded_batches_of_the_reference_are_prompts_by_themselves_here(family, tmp_path):
    """Where its padding is masked it computes what a prompt alone gives, and so do we."""
    reference = save_random_encoder(tmp_path, family, 5, tokenizer=False)
    model, pad = Model.from_pretrained(tmp_path), reference.config.pad_token_id
    rows = [draw_ids(1, length)[0].tolist() for length in (3, 11, 8)]
    ids = torch.tensor([row + [pad] * (11 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (11 - len(row)) for row in rows])
    with torch.no_grad():
        padded = reference(ids, attention_mask=mask).logits
    found = model.forward(rows).logits
    for row, prompt in enumerate(rows):
        assert_near(found[row, : len(prompt)], padded[row, : len(prompt)])


@pytest.mark.parametrize("family", ENCODERS)
def test_the_stream_is_what_layers_add_to_it_and_their_norm_where_it_stands_on_the_sum(family, tmp_path):
    save_random_encoder(tmp_path, family, 2, tokenizer=False)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(1, 12)
    cache = model.forward(ids, HookSpec().capture("*"))
    assert_near(cache.logits, model.forward(ids).logits)
    stream = cache[HookPoint.embed()]
    halves = [
        ("ln1", HookPoint.attn_out, HookPoint.resid_mid),
        ("ln2", HookPoint.mlp_out, HookPoint.resid_post),
    ]
    for layer in range(model.config.num_layers):
        is_normed = model.config.layers[layer].norms == "of stream"
        assert is_normed == (model.config.blocks[layer].norms == "of sums")
        for norm, added, reached in halves:
            stream = normed_sum(model, cache, norm, layer, stream + cache[added(layer)])
            assert_near(stream, cache[reached(layer)])


@pytest.mark.parametrize("family", ENCODERS)
def test_what_stands_before_the_head_has_points_of_its_own(family, tmp_path):
    save_random_encoder(tmp_path, family, 3, tokenizer=False)
    model = Model.from_pretrained(tmp_path)
    last = HookPoint.resid_post(model.config.num_layers - 1)
    cache = model.forward(
        draw_ids(1, 9),
        HookSpec().capture("head.*", last)
        if family != "eurobert"
        else HookSpec().capture("hook_final_norm", last),
    )
    assert_near(model.project_to_vocab(cache[last]), cache.logits)
    if family == "eurobert":
        assert model.config.transform is None
        return
    width = model.config.transform.width
    assert cache["head.hook_pre_act"].shape == cache["head.hook_out"].shape == (1, 9, width)
    unembed, bias = model.network.unembedding, model.network.weights.head_bias
    logits = cache["head.hook_out"] @ unembed.T + (0 if bias is None else bias)
    assert_near(logits, cache.logits)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_encoder(tmp_path, family, 0, tokenizer=False)
    files = resolve(tmp_path)
    assert files.has_known_family
    found = report(files.config, read_shapes(files.weight_files))
    assert found.known_family and found.is_compatible and not found.warnings
    assert found.config == files.architecture()
    assert KNOWN[family].described["model_type"] == family
    assert found.config.looks_ahead and not found.config.predicts_next


@pytest.mark.parametrize("family", ENCODERS)
def test_absent_keys_mean_what_they_mean_to_the_reference(family):
    """The config the reference makes of the required keys says all others."""
    from transformers import AutoConfig

    usual = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 8, "intermediate_size": 96}
    required = {ROWS[family].aliases.get(key, key): value for key, value in usual.items()}
    required |= {"vocab_size": 96, **REQUIRED.get(family, {})}
    full = AutoConfig.for_model(family, **required).to_dict()
    silent = required | {"model_type": family}
    assert len(full) > len(required) + 5
    assert read(silent).fields == read(full).fields
    assert read(silent).digest == read(full).digest


REQUIRED: dict[str, dict[str, Any]] = {
    "esm": {"pad_token_id": 1, "mask_token_id": 4},
    "rembert": {"output_embedding_size": 1664},
}
"""What a config must say besides."""


@pytest.mark.parametrize("family", ["bert", "esm", "albert"])
def test_norms_may_have_the_names_of_old_checkpoints(family, tmp_path):
    save_random_encoder(tmp_path, family, 1, tokenizer=False)
    ids, path = draw_ids(1, 20), tmp_path / "model.safetensors"
    expected, held = Model.from_pretrained(tmp_path).forward(ids).logits, load_file(path)
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        held = {name.replace(f"LayerNorm.{new}", f"LayerNorm.{old}"): held[name] for name in held}
    save_file(held, path)
    assert any(name.endswith("LayerNorm.gamma") for name in held)
    assert torch.equal(Model.from_pretrained(tmp_path).forward(ids).logits, expected)


def test_rope_turns_by_what_the_checkpoint_tells(tmp_path):
    """ESM-2 was trained with angles rounded to 16 bits."""
    from transformers import AutoModelForMaskedLM

    save_random_encoder(tmp_path, "esm", 1, tokenizer=False, position_embedding_type="rotary")
    ids, path = draw_ids(1, 60), tmp_path / "model.safetensors"
    computed, held = Model.from_pretrained(tmp_path), load_file(path)
    stored = [name for name in held if name.endswith("inv_freq")]
    rounded = held.pop(stored[0]).mul(1.01).half().float()
    for layer in range(LAYERS):
        held[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = rounded.clone()
    save_file(held, path, {"format": "pt"})
    model = Model.from_pretrained(tmp_path)
    assert float((model.forward(ids).logits - computed.forward(ids).logits).abs().max()) > 1e-3
    reference = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").float().eval()
    assert_parity(model, reference)


@pytest.mark.parametrize("family", DECODERS)
def test_a_checkpoint_that_is_a_decoder_looks_back_alone(family, tmp_path):
    reference = save_random_encoder(tmp_path, family, 1, tokenizer=False, is_decoder=True)
    model = Model.from_pretrained(tmp_path)
    assert model.config.predicts_next and not model.config.looks_ahead
    assert_parity(model, reference)
    prompts = draw_ids(2, 7).tolist()
    anew, kept = (generate(model, prompts, max_tokens=9, eos=(), cache=cache) for cache in (False, True))
    assert kept.ids == anew.ids


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_texts_are_not_continued(family, tmp_path):
    save_random_encoder(tmp_path, family, 0, tokenizer=False)
    with pytest.raises(ConfigError, match="whose logits predict the next token"):
        generate(Model.from_pretrained(tmp_path), [[5, 6]], max_tokens=2)


def test_a_change_reaches_every_position_from_the_next_layer_on(tmp_path):
    save_random_encoder(tmp_path, "bert", 0, tokenizer=False)
    model, prompt = Model.from_pretrained(tmp_path), list(range(2, 12))
    layers, length = model.config.num_layers, len(prompt)
    patch = Replace(torch.zeros(model.config.hidden_size), positions=(7,))

    def cost(point: HookPoint) -> int:
        runs = [Run(prompt), Run(prompt, HookSpec().intervene(point, patch))]
        return plan(model, runs).positions - layers * length

    assert cost(HookPoint.resid_pre(1)) == (layers - 1) * length
    assert cost(HookPoint.mlp_out(0)) == 1 + (layers - 1) * length
    assert cost(HookPoint.resid_post(layers - 1)) == 0
    assert model.config.lengths_must_match


def test_edges_to_later_keys_may_be_cut(tmp_path):
    save_random_encoder(tmp_path, "bert", 0, tokenizer=False)
    model, prompt = Model.from_pretrained(tmp_path), [5, 6, 7, 8]
    cut = HookSpec().intervene(HookPoint.scores(0), Knockout(edges=[(0, 3)]))
    pattern = model.forward(prompt, cut.capture("blocks.0.attn.hook_pattern"))["blocks.0.attn.hook_pattern"]
    assert float(pattern[0, :, 0, 3].abs().max()) == 0 < float(pattern[0, :, 1, 3].min())
    assert_near(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
    blind = HookSpec().intervene(HookPoint.scores(0), Knockout(edges=[(0, None)]))
    with pytest.raises(InterventionError, match="leaves a query of head 0 no key to attend to"):
        model.forward(prompt, blind)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta-xl"])
def test_padding_has_no_position_and_is_refused(family, tmp_path):
    save_random_encoder(tmp_path, family, 0, tokenizer=False, pad_token_id=1)
    model = Model.from_pretrained(tmp_path)
    with pytest.raises(PromptError, match=r"expected no padding in the prompt, found the padding token 1 of"):
        model.forward([5, 1, 6])
    assert model.config.context_length == draw(family, 0)["max_position_embeddings"] - 2


@pytest.mark.parametrize(
    ("family", "told", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type to be 'absolute'"),
        ("bert", {"add_cross_attention": True}, "expected no add_cross_attention, found True"),
        ("ernie", {"use_task_id": True}, "expected no use_task_id, found True"),
        ("albert", {"inner_group_num": 2}, "expected inner_group_num to be 1, found 2"),
        ("esm", {"position_embedding_type": "relative_key"}, "to be 'absolute' or 'rotary', found"),
        ("bert", {"hidden_act": "mish"}, "expected an activation among"),
        ("modernbert", {"classifier_activation": "mish"}, "expected classifier_activation to be one of"),
        ("bert", {"is_encoder_decoder": True}, "expected a causal decoder, found"),
    ],
)
def test_what_is_not_followed_is_told(family, told, message):
    with pytest.raises(ConfigError, match=message):
        read({**draw(family, 0), "model_type": family, **told})


def test_draws_differ_along_every_axis():
    """Or the tests above would compare one configuration with itself."""
    for family in ENCODERS:
        drawn = {read({**draw(family, seed), "model_type": family}).digest for seed in range(12)}
        assert len(drawn) >= 10 or family == "distilbert", family


@pytest.mark.parametrize("family", ENCODERS)
def test_the_lens_on_the_last_stream_gives_the_logits(family, tmp_path):
    """By the files alone, without torch: final norm, transform, head."""
    save_random_encoder(tmp_path, family, 1, tokenizer=False)
    assert_read_by_its_files(tmp_path)


def test_what_is_not_linear_there_is_refused_in_one_line(tmp_path):
    save_random_encoder(tmp_path, "bert", 1, tokenizer=False)
    model, files = Model.from_pretrained(tmp_path), resolve(tmp_path)
    with pytest.raises(
        ConfigError, match="linear map of the normalised residual stream, found bert, which applies"
    ):
        tokens_to_residual_directions(model, 5)
    readout = readout_from_files(files.weight_files, model.config)
    with pytest.raises(
        ShapeError, match=r"a dense layer, an activation \(\w+\) and a norm; use the logit lens"
    ):
        constant_share(readout, token=3)
    with pytest.raises(ConfigError, match="need a causal model, found the bidirectional model bert"):
        require_attention(model.config, "bert")
    with pytest.raises(ConfigError, match="with a norm before its language head, found bert, which has none"):
        model.network.norm_gain("ln_final", None, torch.float32)


def reference_without_a_mask(family: str, told: dict[str, Any]) -> Any:
    """A decoder of the reference whose causal mask is taken away (is_causal)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.for_model(family, **told, is_causal=False)
    described._attn_implementation = "eager"
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(described).float().eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else weight.normal_(mean=0.5, std=0.3)
    return reference


@pytest.mark.parametrize(
    ("family", "save"),
    [
        *((family, save_random_model) for family in ("llama", "qwen3", "gemma2", "starcoder2")),
        *((family, save_random_hybrid) for family in ("olmo2", "cohere2", "gpt_neox", "bloom")),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_decoder_without_its_mask_looks_both_ways(family, save, seed, tmp_path):
    """Windows too, of which the reference then does not count the query itself."""
    reference = save(tmp_path, family, seed, tokenizer=False, is_causal=False)
    model = Model.from_pretrained(tmp_path)
    assert model.config.looks_ahead and not model.config.predicts_next
    assert all(layer.mixer.is_bidirectional for layer in model.config.layers)
    assert_parity(model, reference)
    with pytest.raises(ConfigError, match="whose logits predict the next token"):
        generate(model, [[5, 6]], max_tokens=2)


@pytest.mark.parametrize("seed", range(3))
def test_gemma_3_may_look_both_ways(seed, tmp_path):
    """As EmbeddingGemma: half of each window on either side."""
    told = {"use_bidirectional_attention": True}
    reference = save_random_hybrid(tmp_path, "gemma3_text", seed, tokenizer=False, **told)
    model = Model.from_pretrained(tmp_path)
    assert model.config.looks_ahead
    assert_parity(model, reference)


def test_dream_is_a_qwen_2_without_its_mask(tmp_path):
    """Its code is on the hub alone: names and keys are those of Qwen 2."""
    told = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "rope_theta": 1e5,
        "tie_word_embeddings": False,
    }
    reference = reference_without_a_mask("qwen2", told)
    reference.save_pretrained(tmp_path)
    raw = {**told, "model_type": "Dream", "mask_token_id": 4, "rms_norm_eps": 1e-6, "use_mrope": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_parity(Model.from_pretrained(tmp_path), reference)


OF_LLADA = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
"""Llama's names -> those of LLaDA's code on the hub."""


def test_llada_is_a_llama_without_its_mask(tmp_path):
    sizes = {"vocab_size": 320, "num_hidden_layers": 3, "intermediate_size": 40, "rms_norm_eps": 1e-5}
    heads = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5e5}
    reference = reference_without_a_mask("llama", sizes | heads | {"tie_word_embeddings": False})
    reference.save_pretrained(tmp_path)
    path, held = tmp_path / "model.safetensors", {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for old, new in OF_LLADA.items():
            name = name.replace(old, new)  # noqa: PLW2901
        held[name] = tensor
    save_file(held, path)
    raw = {
        "model_type": "llada",
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 3,
        "mlp_hidden_size": 40,
        "rope": True,
        "vocab_size": 320,
        "embedding_size": 320,
        "max_sequence_length": 256,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "weight_tying": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "alibi": False,
        "multi_query_attention": None,
        "mask_token_id": 4,
        "rope_full_precision": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = Model.from_pretrained(tmp_path)
    assert_parity(model, reference)
    found = report(resolve(tmp_path).config, read_shapes(resolve(tmp_path).weight_files))
    assert found.is_compatible and not found.warnings
    (tmp_path / "config.json").write_text(json.dumps(raw | {"block_type": "sequential"}))
    with pytest.raises(ConfigError, match="expected block_type to be 'llama', found 'sequential'"):
        Model.from_pretrained(tmp_path)


def test_a_head_of_the_third_deberta_is_known_by_its_tensors(tmp_path):
    """Its files do not say that it is no legacy; where they say so it is the reference's."""
    seed = next(seed for seed in range(9) if not draw("deberta-v2", seed)["legacy"])
    reference = save_random_encoder(tmp_path, "deberta-v2", seed, tokenizer=False)
    told = json.loads((tmp_path / "config.json").read_text())
    assert told.pop("legacy") is False
    (tmp_path / "config.json").write_text(json.dumps(told))
    with torch.no_grad():
        expected = reference(draw_ids(1, 20)).logits
    assert_near(Model.from_pretrained(tmp_path).forward(draw_ids(1, 20)).logits, expected)


@pytest.mark.parametrize(
    ("family", "told", "message"),
    [
        ("mpnet", {"pad_token_id": 0}, "expected pad_token_id to be 1, found 0"),
        ("deberta-v2", {"conv_kernel_size": 3}, "expected conv_kernel_size to be 0, found 3"),
        (
            "deberta-v2",
            {"pos_att_type": "p2p"},
            "expected pos_att_type to list 'c2p', 'p2c' or both, found 'p2p'",
        ),
        (
            "deberta-v2",
            {"legacy": False, "tie_word_embeddings": False},
            "tie_word_embeddings to be true in a DeBERTa",
        ),
        ("squeezebert", {"layer_norm_eps": 1e-5}, "expected layer_norm_eps to be 1e-12, found 1e-05"),
    ],
)
def test_what_newer_encoders_do_not_follow_is_told(family, told, message):
    with pytest.raises(ConfigError, match=message):
        read({**draw(family, 0), "model_type": family, **told})


@pytest.mark.parametrize("family", ["deberta", "squeezebert"])
def test_matrices_of_heads_are_those_the_network_multiplies_by(family, tmp_path):
    """Biases beside a tensor of queries, keys and values, and convolutions in groups."""
    save_random_encoder(tmp_path, family, 1, tokenizer=False)
    model, files = Model.from_pretrained(tmp_path), resolve(tmp_path)
    read, weights = (
        PlainMatrices(files.checkpoint, model.config),
        model.network.weights.layers[1].mixers[0].weights,
    )
    width = model.config.axis_sizes["d_head"]
    for head in range(model.config.axis_sizes["head"]):
        rows = slice(head * width, (head + 1) * width)
        for part in ("q", "k", "v"):
            found, held = read.projection(part, 1, head), getattr(weights, part)
            assert torch.equal(torch.from_numpy(found.matrix.T.copy()), held.weight[rows])
            bias = torch.zeros(width) if held.bias is None else held.bias[rows]
            assert torch.equal(torch.from_numpy(found.bias), bias)
        out = torch.from_numpy(read.output(1, head).copy())
        assert torch.equal(out.T, weights.o.weight[:, rows])
