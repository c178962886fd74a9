"""Every field that the writers of a format emit is honoured, refused, or known to change nothing."""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.formats import fields
from mizarr.stages.features.formats.fields import FIELDS, HONOURED, apply_fields

from ....random_dictionaries import (
    D,
    F,
    draw,
    save,
    write_clt,
    write_config,
    write_gemma_scope_2,
    write_plt,
    write_saelens,
    write_sparsify,
)

# Fields that each project's own code writes, as read in its public sources: dataclasses and `config`
# properties, by project and file.
WRITTEN = {
    # SAELens, sae_lens/saes/sae.py (SAEConfig and its architectures) and runner configurations.
    "saelens": """d_in d_sae dtype device apply_b_dec_to_input normalize_activations reshape_activations
        metadata architecture k rescale_acts_by_decoder_norm d_out activation_fn activation_fn_kwargs
        finetuning_scaling_factor training_tokens finetuning_method use_ghost_grads l1_coefficient lp_norm
        noise_scale mse_loss_normalization decoder_init_norm l1_warm_up_steps expansion_factor lr seed
        normalize_sae_decoder jumprelu_init_threshold jumprelu_bandwidth model_kwargs wandb_project""",
    # SAELens, sae_lens/saes/sae.py (SAEMetadata).
    "saelens metadata": """model_name hook_name model_class_name hook_layer hook_head_index
        model_from_pretrained_kwargs prepend_bos exclude_special_tokens neuronpedia_id context_size
        seqpos_slice dataset_path sae_lens_version sae_lens_training_version""",
    # TransformerLens, HookedTransformer.from_pretrained.
    "saelens model": """fold_ln center_writing_weights center_unembed refactor_factored_attn_matrices
        checkpoint_index checkpoint_value device n_devices move_to_device fold_value_biases
        default_prepend_bos default_padding_side dtype first_n_layers""",
    # sparsify, sparsify/config.py (SparseCoderConfig), and d_in of SparseCoder.save_to_disk; signed: older.
    "sparsify": """activation expansion_factor normalize_decoder num_latents k multi_topk skip_connection
        embed_skip gram_lookup lookup_max_order gram_table_hash transcode d_in signed""",
    # dictionary_learning, dictionary_learning/training.py and trainers/*.py (`config`), buffer.py.
    "dictionary_learning": "trainer buffer",
    "dictionary_learning trainer": """trainer_class dict_class lr steps auxk_alpha warmup_steps decay_start
        threshold_beta threshold_start_step seed activation_dim dict_size k device layer lm_name wandb_name
        submodule_name l1_penalty resample_steps sparsity_warmup_steps sparsity_penalty bandwidth target_l0
        group_fractions group_weights""",
    "dictionary_learning buffer": """d_submodule io n_ctxs ctx_len refresh_batch_size out_batch_size
        device""",
    # circuit-tracer, circuit_tracer/utils/hf_utils.py reads these of config.yaml.
    "plt": "model_name model_kind feature_input_hook feature_output_hook scan transcoders activation k",
    "clt": "model_name model_kind feature_input_hook feature_output_hook scan transcoders",
    "listed": "model_name model_kind feature_input_hook feature_output_hook scan transcoders",
    # Tensors. circuit-tracer, circuit_tracer/transcoder/{single_layer,cross_layer}_transcoder.py.
    "plt tensors": "W_enc W_dec b_enc b_dec W_skip activation_function.threshold",
    "clt tensors": "W_enc W_dec b_enc b_dec threshold",
    # SAELens, parameters of sae_lens/saes/*.py.
    "saelens tensors": "W_enc W_dec b_enc b_dec b_gate b_mag r_mag threshold W_skip scaling_factor",
    # sparsify, sparsify/sparse_coder.py.
    "sparsify tensors": "encoder.weight encoder.bias W_dec b_dec W_skip",
    # dictionary_learning 0.1.0, parameters and buffers of dictionary.py and trainers/*top_k.py.
    "dictionary_learning tensors": """encoder.weight encoder.bias decoder.weight W_enc W_dec b_enc b_dec bias
        decoder_bias threshold gate_bias mag_bias r_mag k group_sizes""",
    # Gemma Scope, arrays of params.npz; Gemma Scope 2, tensors of params.safetensors.
    "gemma_scope tensors": "W_enc W_dec b_enc b_dec threshold",
    "gemma_scope_2 tensors": "w_enc w_dec b_enc b_dec threshold affine_skip_connection",
    # Language-Model-SAEs (Llama Scope).
    "llama_scope tensors": "encoder.weight encoder.bias decoder.weight decoder.bias log_jumprelu_threshold",
    # Gemma Scope 2, config.json beside each params.safetensors.
    "gemma_scope_2": """hf_hook_point_in hf_hook_point_out width model_name architecture l0
        affine_connection type""",
    # Language-Model-SAEs (Llama Scope), hyperparams.json.
    "llama_scope": """d_model d_sae expansion_factor hook_point_in hook_point_out act_fn jump_relu_threshold
        norm_activation dataset_average_activation_norm use_decoder_bias top_k
        apply_decoder_bias_to_pre_encoder sparsity_include_decoder_norm""",
    # mizarr, Crosscoder.save.
    "crosscoder": "kind activation_dim dict_size num_layers places activation k",
}
FORMATS = Path(fields.__file__).parent


def test_every_field_that_writers_emit_is_accounted_for():
    assert WRITTEN.keys() == FIELDS.keys()
    for part, names in WRITTEN.items():
        assert [name for name in names.split() if name not in FIELDS[part]] == [], part


def test_every_field_that_is_honoured_is_named_by_a_reader():
    """And none by a reader that the table does not know."""
    names = {
        node.value
        for path in FORMATS.glob("*.py")
        if path.name != "fields.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    text = " ".join(names)
    honoured = {name for table in FIELDS.values() for name, kind in table.items() if kind == HONOURED}
    formatted = {"hf_hook_point_in", "hf_hook_point_out", "hook_point_in", "hook_point_out"}
    assert sorted(name for name in honoured - formatted if name not in names and name not in text) == []


def old_config(**more: Any) -> dict[str, Any]:
    return {"d_in": D, "d_sae": F, "dtype": "float32", "hook_point": "blocks.3.hook_resid_pre", **more}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"activation_fn_str": "tanh-relu"},
            "expected activation_fn to be 'relu' or 'topk' .* found 'tanh-relu'",
        ),
        ({"activation_fn_str": "gelu"}, "found 'gelu'"),
        (
            {"activation_fn_kwargs": {"beta": 2}},
            "expected activation_fn_kwargs in .* to hold nothing for the",
        ),
        (
            {"activation_fn_str": "topk", "architecture": "gated", "activation_fn_kwargs": {"k": 3}},
            "architecture",
        ),
        ({"normalize_activations": "anthropic"}, "expected normalize_activations to be"),
        (
            {"model_from_pretrained_kwargs": {"center_writing_weights": True}},
            "expected center_writing_weights to be",
        ),
        ({"model_from_pretrained_kwargs": {"refactor_factored_attn_matrices": True}}, "refactor_factored"),
        (
            {"hook_point_layer": 4},
            r"expected hook_layer in .* to be the layer of hook_name, 'blocks.3.hook_resid_pre', found 4",
        ),
        ({"hook_point": 3}, "expected a text as hook_name in"),
        (
            {
                "hook_point": "blocks.3.ln2.hook_normalized",
                "model_from_pretrained_kwargs": {"fold_ln": True},
            },
            r"weights were folded \(fold_ln is True\), .* at ln2_normalized that its features read",
        ),
    ],
)
def test_settings_of_saelens_that_are_not_computed_are_refused(config: dict, told: str, tmp_path: Path):
    write_saelens(tmp_path, draw())
    (tmp_path / "cfg.json").write_text(json.dumps(old_config(**config)))
    with pytest.raises(mizarr.MizarrError, match=told):
        Dictionary.from_pretrained(tmp_path)
    if "model_from_pretrained_kwargs" in config and "hook_point" not in config:
        write_saelens(tmp_path, draw(), metadata=config)
        with pytest.raises(mizarr.MizarrError, match=told):
            Dictionary.from_pretrained(tmp_path)


def test_settings_of_saelens_that_change_nothing_are_taken(tmp_path: Path):
    """Of the flat form, of version 6, and of its first releases, which say meta."""
    folded = {"fold_ln": True, "center_unembed": True, "center_writing_weights": False}
    write_saelens(tmp_path, draw())
    expected = Dictionary.from_pretrained(tmp_path).layer(1).encode(torch.ones(1, D))
    for config in (
        old_config(activation_fn_str="relu", activation_fn_kwargs={}, hook_point_layer=3, lr=1e-4),
        old_config(model_from_pretrained_kwargs=folded, normalize_activations=False),
        {
            "d_in": D,
            "d_sae": F,
            "architecture": "standard",
            "meta": {"hook_name": "blocks.3.hook_resid_pre", "sae_lens_version": "6.0.0"},
        },
    ):
        (tmp_path / "cfg.json").write_text(json.dumps(config))
        dictionary = Dictionary.from_pretrained(tmp_path)
        assert str(dictionary.read_hook(3)) == "blocks.3.hook_resid_pre"
        np.testing.assert_array_equal(dictionary.layer(3).encode(torch.ones(1, D)), expected)


def test_the_layer_is_that_of_its_own_field_where_the_name_has_none(tmp_path: Path):
    write_saelens(tmp_path, draw(), metadata={"hook_name": "somewhere", "hook_layer": 4})
    assert Dictionary.from_pretrained(tmp_path, read="hook_resid_pre").layers == (4,)


@pytest.mark.parametrize(
    ("field", "value"),
    [("activation", "relu"), ("signed", True), ("embed_skip", True), ("gram_lookup", True)],
)
def test_settings_of_sparsify_that_are_not_computed_are_refused(field: str, value: Any, tmp_path: Path):
    write_sparsify(tmp_path / "layers.2", draw(), **{field: value})
    with pytest.raises(mizarr.MizarrError, match=f"expected {field} to be "):
        Dictionary.from_pretrained(tmp_path)


def test_a_skip_that_is_said_must_be_there(tmp_path: Path):
    write_sparsify(tmp_path / "layers.2", draw(), skip_connection=True)
    with pytest.raises(mizarr.MizarrError, match="expected a tensor 'W_skip'"):
        Dictionary.from_pretrained(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("activation", "topk"), ("k", 4), ("rectified", True)])
def test_settings_of_cross_layer_transcoders_that_are_not_computed_are_refused(
    field: str, value: Any, tmp_path: Path
):
    weights = draw()
    write_clt(tmp_path, [weights | {"W_dec": weights["W_dec"][:, None]}])
    write_config(tmp_path, "cross_layer_transcoder", **{field: value})
    with pytest.raises(mizarr.MizarrError, match=f"expected {field} to be "):
        Dictionary.from_pretrained(tmp_path)


def test_states_that_dictionary_learning_read_at_an_input_need_to_be_said(tmp_path: Path):
    weights = draw()
    file = {
        "encoder.weight": weights["W_enc"],
        "decoder.weight": np.ascontiguousarray(weights["W_dec"].T),
        "encoder.bias": weights["b_enc"],
        "bias": weights["b_dec"],
    }
    torch.save({name: torch.from_numpy(value) for name, value in file.items()}, tmp_path / "ae.pt")
    trainer = {"dict_class": "AutoEncoder", "layer": 2, "activation_dim": D, "dict_size": F}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {"io": "in"}}))
    with pytest.raises(mizarr.MizarrError, match=r"expected io to be 'out' .* found 'in'"):
        Dictionary.from_pretrained(tmp_path)
    assert Dictionary.from_pretrained(tmp_path, read="hook_resid_pre").layers == (2,)


@pytest.mark.parametrize("field", ["act_fn", "norm_activation", "use_glu_encoder"])
def test_settings_of_llama_scope_that_are_not_computed_are_refused(field: str, tmp_path: Path):
    weights = draw()
    linear = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T,
    }
    save(tmp_path, "checkpoints/final.safetensors", linear)
    said = {
        "hook_point_in": "blocks.7.hook_resid_post",
        "jump_relu_threshold": 0.3,
        "dataset_average_activation_norm": {"in": 5.0},
    }
    (tmp_path / "hyperparams.json").write_text(json.dumps(said))
    assert Dictionary.from_pretrained(tmp_path).layers == (7,)
    (tmp_path / "hyperparams.json").write_text(json.dumps(said | {field: "token-wise"}))
    with pytest.raises(mizarr.MizarrError, match=f"expected {field} to be "):
        Dictionary.from_pretrained(tmp_path)


def write_llama_scope(folder: Path) -> None:
    weights = draw()
    linear = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T,
        "decoder.bias": weights["b_dec"],
    }
    save(folder, "checkpoints/final.safetensors", linear)
    config = {
        "hook_point_in": "blocks.7.hook_resid_post",
        "jump_relu_threshold": 0.3,
        "dataset_average_activation_norm": {"in": 5.0},
    }
    (folder / "hyperparams.json").write_text(json.dumps(config))


def write_every_file_of_a_clt(folder: Path) -> None:
    layer = draw() | {"W_dec": draw()["W_dec"][:, None]}
    write_clt(folder, [layer], jump=True)
    write_config(folder, "cross_layer_transcoder")


def write_every_file_of_a_plt(folder: Path) -> None:
    write_plt(folder, 0, draw(), skip=True)
    write_config(folder)


WRITERS = {
    "clt": write_every_file_of_a_clt,
    "plt": write_every_file_of_a_plt,
    "saelens": lambda folder: write_saelens(folder, draw(), "jumprelu"),
    "sparsify": lambda folder: write_sparsify(folder / "layers.1.mlp", draw(), transcode=True),
    "gemma_scope_2": lambda folder: write_gemma_scope_2(
        folder / "resid_post" / "layer_1_width_16_l0_medium" / "params.safetensors", draw()
    ),
    "llama_scope": write_llama_scope,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_that_no_reader_knows_is_told(name, tmp_path):
    """Its absence from the arithmetic could be the difference between these features and their author's."""
    WRITERS[name](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dictionary.from_pretrained(tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        original = path.read_bytes()
        save_file(load_file(path) | {"input_scale": torch.ones(D)}, path)
        with pytest.warns(
            UserWarning, match=rf"{path.name} has entries of unknown meaning, which are ignored: input_scale"
        ):
            Dictionary.from_pretrained(tmp_path)
        path.write_bytes(original)


def test_fields_that_are_not_known_are_told_unless_they_are_off(tmp_path: Path):
    write_plt(tmp_path, 0, draw())
    write_config(tmp_path, centre_inputs=True, twist=0, notes="")
    with pytest.warns(
        UserWarning, match=r"config.yaml has entries of unknown meaning, which are ignored: centre_inputs"
    ):
        Dictionary.from_pretrained(tmp_path)
    place = tmp_path / "gemma-scope-2b-pt-res" / "layer_0" / "params.npz"
    place.parent.mkdir(parents=True)
    arrays = {name: draw()[name] for name in ("W_dec", "b_enc", "b_dec", "threshold")}
    np.savez(place, W_enc=draw()["W_enc"].T, scaling_factor=np.ones(F, np.float32), **arrays)
    with pytest.warns(
        UserWarning, match=r"params.npz has entries of unknown meaning, which are ignored: scaling_factor"
    ):
        Dictionary.from_pretrained(place.parent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_fields("plt", {"twist": False, "notes": None}, tmp_path)
