"""Treatment of every configuration field of every dictionary format: one table, applied by the readers.

A field is honoured by the reader of its format, or has no effect here (how it was trained, on which prompts,
where it ran), or accepts certain values and any other value is refused. A field that is not in the table
causes a warning, since its meaning is unknown, unless it is empty or off.

Border: names and values; the meaning of honoured fields is defined by their format.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....store.errors import DictionaryError, nearest

__all__ = ["FIELDS", "HONOURED", "UNUSED", "Only", "apply_fields", "to_float", "to_whole"]

HONOURED, UNUSED = "honoured", "unused"
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "none")
"""Values of an unknown field that cause no warning."""


@dataclass(frozen=True)
class Only:
    """The values of a configuration field that are supported; any other value is refused."""

    values: tuple[Any, ...]
    """The supported values; None stands for a missing field."""
    reason: str
    """What mizarr cannot compute if the field has another value, such as "another activation function": the
    subject of "... cannot be computed" in the error message."""


def _all(kind: str, *names: str) -> dict[str, str | Only]:
    """One entry of kind HONOURED or UNUSED per field; each text in `names` lists fields, separated by
    spaces."""
    return {name: kind for text in names for name in text.split()}


_STREAM = Only((None, False), "a stream that is processed before it is read")
_PROCESSED = {
    "center_writing_weights": _STREAM,
    "refactor_factored_attn_matrices": Only((None, False), "heads that are processed before they are read"),
    # These two affect only some hook points; the reader checks for them.
    **_all(HONOURED, "fold_ln fold_value_biases"),
    # Logits; precision; selection and loading of the checkpoint.
    **_all(
        UNUSED,
        "center_unembed dtype torch_dtype n_ctx n_devices device device_map move_to_device revision",
        "checkpoint_index checkpoint_value checkpoint_label first_n_layers trust_remote_code cache_dir",
        "low_cpu_mem_usage attn_implementation default_prepend_bos default_padding_side local_files_only",
    ),
}

_SAELENS_METADATA = {
    **_all(HONOURED, "hook_name hook_name_out hook_layer hook_head_index model_name sae_lens_version"),
    **_all(HONOURED, "model_from_pretrained_kwargs"),
    # Training data, and names.
    **_all(
        UNUSED,
        "model_class_name prepend_bos exclude_special_tokens neuronpedia_id context_size seqpos_slice",
        "dataset_path dataset_trust_remote_code sae_lens_training_version hook_layer_out hook_head_index_out",
        "hf_hook_name hf_hook_name_out sequence_separator_token disable_concat_sequences training_tokens",
    ),
}
_SAELENS = {
    **_all(
        HONOURED,
        "architecture d_in d_sae d_out k apply_b_dec_to_input rescale_acts_by_decoder_norm metadata meta",
        "finetuning_scaling_factor activation_fn_kwargs",
    ),
    "normalize_activations": Only(
        (None, False, True, "none", "expected_average_only_in", "constant_norm_rescale", "layer_norm"),
        "inputs that are scaled in another way",
    ),
    "reshape_activations": Only((None, "none", "hook_z"), "inputs in another shape"),
    "activation_fn": Only((None, "relu", "topk"), "another activation function"),
    "dtype": UNUSED,
    "device": UNUSED,
    # Training configuration of all SAELens versions.
    **_all(
        UNUSED,
        "name hook_eval streaming is_dataset_tokenized use_cached_activations cached_activations_path",
        "b_dec_init_method expansion_factor normalize_sae_decoder noise_scale from_pretrained_path",
        "decoder_orthogonal_init decoder_heuristic_init decoder_heuristic_init_norm decoder_init_norm",
        "init_encoder_as_decoder_transpose n_batches_in_buffer n_batches_for_norm_estimate training_tokens",
        "finetuning_tokens finetuning_method store_batch_size store_batch_size_prompts train_batch_size",
        "train_batch_size_tokens act_store_device seed autocast autocast_lm compile_llm",
        "llm_compilation_mode compile_sae sae_compilation_mode adam_beta1 adam_beta2",
        "mse_loss_normalization l1_coefficient l0_coefficient lp_norm l1_loss_wd_norm",
        "scale_sparsity_penalty_by_decoder_norm l1_warm_up_steps l0_warm_up_steps lr lr_scheduler_name",
        "lr_warm_up_steps lr_end lr_decay_steps n_restart_cycles use_ghost_grads feature_sampling_window",
        "feature_reinit_scale feature_sampling_method resample_batches dead_feature_window",
        "dead_feature_threshold dead_feature_estimation_method n_eval_batches eval_batch_size_prompts",
        "n_eval_seqs eval_every_n_wandb_logs log_to_wandb log_activations_store_to_wandb",
        "log_optimizer_state_to_wandb wandb_project wandb_id wandb_entity wandb_log_frequency run_name",
        "resume",
        "n_checkpoints checkpoint_path save_final_checkpoint output_path verbose model_kwargs logger",
        "jumprelu_init_threshold jumprelu_bandwidth jumprelu_sparsity_loss_mode jumprelu_tanh_scale",
        "pre_act_loss_coefficient aux_loss_coefficient topk_threshold_lr use_sparse_activations",
        "matryoshka_widths tokens_per_buffer sparsity d_head l1_loss_coefficient ghost_grads",
        "decoder_bias_init",
    ),
}

_CONFIG_YAML = {
    **_all(HONOURED, "model_name model_kind feature_input_hook feature_output_hook scan transcoders"),
    **_all(UNUSED, "repo_id repo revision subfolder dtype license description name"),
}

FIELDS: Mapping[str, Mapping[str, str | Only]] = {
    "saelens": _SAELENS,
    "saelens metadata": _SAELENS_METADATA,
    "saelens model": _PROCESSED,
    "plt": {**_CONFIG_YAML, **_all(HONOURED, "activation k rectified")},
    "clt": {
        **_CONFIG_YAML,
        "activation": Only((None, "relu", "jumprelu"), "another activation function"),
        "k": Only((None, 0), "another activation function"),
        "rectified": Only((None, False), "activations that are rectified"),
    },
    "listed": {**_CONFIG_YAML, **_all(HONOURED, "activation k rectified")},
    "sparsify": {
        **_all(HONOURED, "k transcode skip_connection"),
        "activation": Only((None, "topk", "groupmax"), "another activation function"),
        "signed": Only((None, False), "the largest by magnitude, with their signs"),
        "embed_skip": Only((None, False), "a skip from the embedding, which the states do not hold"),
        "gram_lookup": Only(
            (None, False), "means of n-grams that are subtracted, which the files do not hold"
        ),
        **_all(
            UNUSED,
            "d_in num_latents expansion_factor normalize_decoder multi_topk lookup_max_order",
            "gram_table_hash",
        ),
    },
    "dictionary_learning": {**_all(HONOURED, "trainer buffer")},
    "dictionary_learning trainer": {
        **_all(HONOURED, "dict_class layer activation_dim dict_size k lm_name submodule_name"),
        **_all(
            UNUSED,
            "trainer_class lr steps auxk_alpha warmup_steps decay_start threshold_beta threshold_start_step",
            "seed device wandb_name l1_penalty l1_penalty_warmup resample_steps sparsity_warmup_steps",
            "sparsity_penalty sparsity_function bandwidth target_l0 initial_sparsity_penalty top_k_aux",
            "group_fractions group_weights group_sizes active_groups p_start p_end anneal_start anneal_end",
            "n_sparsity_updates optimizer layers buffer_size dtype n_kept",
        ),
    },
    "dictionary_learning buffer": {
        "io": Only((None, "out"), "states that are read at the input of a module"),
        **_all(
            UNUSED,
            "d_submodule n_ctxs ctx_len refresh_batch_size out_batch_size device remove_bos",
            "add_special_tokens max_activation_norm_multiple",
        ),
    },
    "clt tensors": _all(HONOURED, "W_enc W_dec b_enc b_dec threshold"),
    "plt tensors": _all(HONOURED, "W_enc W_dec b_enc b_dec W_skip activation_function.threshold"),
    "saelens tensors": _all(
        HONOURED,
        "W_enc W_dec b_enc b_dec b_gate b_mag r_mag threshold log_threshold topk_threshold W_skip",
        "scaling_factor",
    ),
    "sparsify tensors": _all(HONOURED, "encoder.weight encoder.bias W_dec b_dec W_skip"),
    "dictionary_learning tensors": {
        **_all(
            HONOURED,
            "encoder.weight encoder.bias decoder.weight W_enc b_enc W_dec b_dec bias decoder_bias threshold",
            "gate_bias mag_bias r_mag",
        ),
        # k is read from config.json; groups of a Matryoshka autoencoder matter in training only.
        **_all(UNUSED, "k group_sizes"),
    },
    "gemma_scope tensors": _all(HONOURED, "W_enc W_dec b_enc b_dec threshold"),
    "gemma_scope_2 tensors": _all(HONOURED, "w_enc w_dec b_enc b_dec threshold affine_skip_connection"),
    "llama_scope tensors": _all(
        HONOURED, "encoder.weight encoder.bias decoder.weight decoder.bias log_jumprelu_threshold"
    ),
    "gemma_scope_2": {
        **_all(HONOURED, "hf_hook_point_in hf_hook_point_out model_name"),
        "architecture": Only((None, "jump_relu", "jumprelu"), "another activation function"),
        "apply_b_dec_to_input": Only((None, False), "the decoder's bias subtracted from the input"),
        **_all(UNUSED, "width l0 affine_connection type layer"),
    },
    "llama_scope": {
        **_all(HONOURED, "dataset_average_activation_norm jump_relu_threshold hook_point_in hook_point_out"),
        "model_name": HONOURED,
        "act_fn": Only((None, "jumprelu"), "another activation function"),
        "norm_activation": Only((None, "dataset-wise", "inference"), "inputs that are scaled in another way"),
        "apply_decoder_bias_to_pre_encoder": Only(
            (None, False), "the decoder's bias subtracted from the input"
        ),
        "use_glu_encoder": Only((None, False), "an encoder that is gated"),
        # Decoder rows of finished files have norm 1, as its converters count on.
        **_all(
            UNUSED,
            "d_model d_sae expansion_factor top_k use_decoder_bias sparsity_include_decoder_norm dtype",
            "device",
            "sae_type model_from_pretrained_path sae_pretrained_name_or_path strict_loading",
            "use_triton_kernel",
            "sparsity_threshold_for_triton_spmm_kernel use_batch_norm_mse",
            "init_encoder_with_decoder_transpose",
            "decoder_exactly_unit_norm decoder_bias_init_method init_decoder_norm init_encoder_norm",
            "lp l1_coefficient",
            "seed use_ghost_grads noise_scale jumprelu_threshold_window hook_points tp_size ddp_size",
        ),
    },
    "crosscoder": {
        **_all(HONOURED, "kind places k"),
        "activation": Only(("ReLU", "TopK", "JumpReLU"), "another activation function"),
        **_all(UNUSED, "activation_dim dict_size num_layers"),
    },
}
"""Part of a format (configuration, or "tensors" of weight files) -> field -> treatment."""


def apply_fields(part: str, fields: Mapping[str, Any], place: object) -> None:
    """Refuse unsupported values in a dictionary's configuration, and warn of unknown fields.

    Arguments:
        part: Name of the format, or of a part of its configuration: a key of `FIELDS`.
        fields: Names and values of the fields.
        place: Path of the file that holds the fields, for messages.

    Raises:
        DictionaryError: A field has a value that is not supported.
    """
    table, unknown = FIELDS[part], []
    for name, value in fields.items():
        kind = table.get(name)
        # Types are compared as well, because True == 1 and False == 0.
        if isinstance(kind, Only) and not any(type(value) is type(v) and value == v for v in kind.values):
            supported = [repr(v) for v in kind.values if v is not None]
            near = nearest(str(value), [v for v in kind.values if isinstance(v, str)])
            raise DictionaryError(
                f"expected {name} to be {' or '.join(supported)} in {place}, found {value!r:.80}"
                f"{f' (did you mean {near!r}?)' if near else ''}: {kind.reason} cannot be computed; use "
                "another dictionary"
            )
        # Unknown fields only warn: new versions of other programs add fields that rarely matter.
        if kind is None and value not in _OFF:
            unknown.append(name)
    if unknown:
        shown = ", ".join(unknown[:6]) + (f" and {len(unknown) - 6} more" if len(unknown) > 6 else "")
        warnings.warn(
            f"{place} has entries of unknown meaning, which are ignored: {shown}",
            UserWarning,
            stacklevel=2,
        )


def to_float(value: Any, field: str, place: object) -> float:
    """Number in a configuration field, as a float.

    Arguments:
        value: Value of the field.
        field: Name of the field, for messages.
        place: Path of the configuration file, for messages.

    Raises:
        DictionaryError: The value is not a number.
    """
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DictionaryError(f"expected a number as {field} in {place}, found {value!r}")
    return float(value)


def to_whole(value: Any, field: str, place: object, *, least: int = 1) -> int:
    """The whole number in a field of a configuration.

    Arguments:
        value: Value of the field.
        field: Name of the field, for messages.
        place: Path of the configuration file, for messages.
        least: Smallest value that is allowed, 0 or 1.

    Raises:
        DictionaryError: The value is not a whole number, or smaller than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = f"a whole number of at least {least}"
        raise DictionaryError(f"expected {kind} as {field} in {place}, found {value!r}")
    return value
