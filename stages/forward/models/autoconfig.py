"""Architecture of a checkpoint: that of its family, or inferred from config and tensors.

For an unknown model_type it is inferred from config.json and from names and shapes in the safetensors
headers; no weight is read. A report lists why a checkpoint cannot run, and which keys of the config were not
read. Torch-free.

An unknown family runs only if the decoder uses every tensor inside its layers, and follows every key known to
change numbers: a wrong guess that loads is worse than an error.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ....store.errors import ConfigError, MizarrError, WeightsError
from ..architectures.architecture import Architecture
from ..architectures.attending import builders as build
from ..architectures.composed import ComposedArchitecture
from ..architectures.families import model_type_of, read_activation, refuse_unfollowed
from ..architectures.heads import needs_tensors
from ..architectures.known import KNOWN, KnownFamily
from ..architectures.layer_tensors import LLAMA
from ..architectures.mixers import QkNorm
from ..architectures.transformer import ConfigReader, Norm
from ..checkpoints.checkpoint import Files, checkpoint_of
from ..networks.weights import expected_tensors, read_shapes, unused_tensors

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
EPS_KEYS = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
CONVENTIONS = {
    "transformer.h.": "GPT-2 or GPT-J",
    "transformer.blocks.": "MPT",
    "gpt_neox.layers.": "GPT-NeoX or Pythia",
    "transformer.layer.": "BLOOM",
}
BENIGN_KEYS = frozenset(
    """
    model_type architectures auto_map torch_dtype dtype transformers_version tokenizer_class name_or_path
    _name_or_path _commit_hash _attn_implementation_autoset use_cache cache_implementation initializer_range
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id
    attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob residual_dropout
    embedding_dropout classifier_dropout pretraining_tp is_decoder is_encoder_decoder add_cross_attention
    output_attentions output_hidden_states return_dict torchscript chunk_size_feed_forward id2label label2id
    problem_type finetuning_task task_specific_params tie_encoder_decoder cross_attention_hidden_size
    use_bfloat16 pruned_heads prefix max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens tf_legacy_loss router_aux_loss_coef transformers.js_config
    """.split()  # noqa: SIM905 - eighty words read better as words
)
"""Config keys that do not affect a forward pass."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "clip_qkv": (),
    "attention_multiplier": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "kv_lora_rank": (),
    "sliding_window_pattern": (),
    "no_rope_layers": ([],),
    "rope_interleaved": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "alibi": (False,),
    "position_embedding_type": ("rope", "rotary"),
}
"""Config keys that change the forward pass of some family -> values, besides null, that change nothing."""
TensorShapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by their name in the checkpoint."""


@dataclass(frozen=True)
class CompatibilityReport:
    """Whether mizarr's own networks can run a checkpoint, and why not."""

    model_type: str
    """`model_type` of config.json."""
    known_family: bool
    """Whether the family is supported by name."""
    config: Architecture | None
    """The architecture; None if it cannot be read or inferred."""
    issues: list[str] = field(default_factory=list)
    """Reasons why the checkpoint cannot run, one line each."""
    warnings: list[str] = field(default_factory=list)
    """Unread keys and unused tensors, which do not prevent running, one line each."""

    @property
    def is_compatible(self) -> bool:
        """Whether mizarr's own networks can run the checkpoint."""
        return not self.issues

    def require(self) -> Architecture:
        """Return the architecture.

        Raises:
            ConfigError: for a checkpoint that cannot run; lists every issue.
        """
        if self.issues or self.config is None:
            family_note = "" if self.known_family else ", an unknown family,"
            listed = "\n".join(f"  - {issue}" for issue in self.issues)
            raise ConfigError(
                f"mizarr's own networks cannot run this {self.model_type!r} checkpoint{family_note} for "
                f"{len(self.issues)} reasons:\n{listed}\ntransformers may be able to run it: "
                "backend='transformers', or --backend transformers. Supported families: "
                f"{', '.join(sorted(KNOWN))}, and models whose tensors are laid out as in one of these"
            )
        return self.config


def architecture_of(raw: dict[str, Any], weight_files: Files, source: str = "config.json") -> Architecture:
    """Layers, sizes and hook points of a checkpoint, from config.json and, if needed, shapes of its tensors.

    Shapes decide sizes that the config of an unknown family, or of a few known ones, leaves open; which head
    a checkpoint has; and the prefix of its tensors.

    Arguments:
        raw: contents of config.json.
        weight_files: the weight files.
        source: name of the config, for errors.

    Raises:
        ConfigError: if the checkpoint cannot run, with the whole report.
    """
    family = KNOWN.get(model_type_of(raw, source))
    if family is None:
        return report(raw, read_shapes(weight_files), source).require()
    # Headers of pickled checkpoints can only be read with torch, which a plan imports only if it has to.
    needs_shapes = family.reads_tensors or needs_tensors(raw) or not checkpoint_of(weight_files).is_pickled
    shapes = read_shapes(weight_files) if needs_shapes else {}
    with _config_errors(source):
        return family.read(ConfigReader(raw, source), shapes)


@contextmanager
def _config_errors(source: str) -> Iterator[None]:
    """In this block, arithmetic and type errors from absurd config values become a ConfigError."""
    try:
        yield
    except MizarrError:
        raise
    # config.json may come from anyone: a width of 0 or a list for a number must not end in a traceback.
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source}: expected sizes and options that a model of this family can have, found values that "
            f"cannot be read ({type(error).__name__}: {error!s:.80}); correct the file, or fetch it again"
        ) from error


def report(raw: dict[str, Any], shapes: TensorShapes, source: str = "config.json") -> CompatibilityReport:
    """Report whether a checkpoint can run.

    Arguments:
        raw: contents of config.json.
        shapes: shapes of its tensors by name.
        source: name of the config, for errors.

    Raises:
        ConfigError: if the config has no model_type.
    """
    model_type = model_type_of(raw, source)
    with _config_errors(source):
        family = KNOWN.get(model_type)
        if family is not None and not family.reports_unread_keys:
            return _report_without_unread_keys(family, raw, shapes, source)
        return examine(raw, shapes, family, source)


def _report_without_unread_keys(
    family: KnownFamily, raw: dict[str, Any], shapes: TensorShapes, source: str
) -> CompatibilityReport:
    """Report whether a checkpoint of a known family can run, without warnings about unread config keys."""
    try:
        config = family.read(ConfigReader(raw, source), shapes)
    except (ConfigError, WeightsError) as error:
        return CompatibilityReport(raw["model_type"], True, None, [str(error)])
    issues = tensor_issues(shapes, config)
    warnings = [f"tensor {name} is not used" for name in one_per_kind(unused_tensors(shapes, config))]
    return CompatibilityReport(config.model_type, True, config, issues, warnings)


def examine(
    raw: dict[str, Any], shapes: TensorShapes, family: KnownFamily | None, source: str = "config.json"
) -> CompatibilityReport:
    """Report whether a checkpoint can run, read as a given family or with an inferred architecture.

    Arguments:
        raw: contents of config.json.
        shapes: shapes of its tensors by name.
        family: the known family; None to infer the architecture.
        source: name of the config, for errors.
    """
    model_type, is_known = model_type_of(raw, source), family is not None
    issues = required_scalars(raw, source)
    if issues:
        return CompatibilityReport(model_type, is_known, None, issues)
    if family is None:
        issues += unfollowed_keys(raw, source)
    reader = ConfigReader(raw, source)
    try:
        config = inferred(reader, shapes) if family is None else family.read(reader, shapes)
    except ConfigError as error:
        return CompatibilityReport(model_type, is_known, None, [*issues, str(error)])
    unused = unused_tensors(shapes, config)
    if not is_known:
        # An issue, not a warning: a tensor inside a layer that nothing uses means another computation.
        inside = [name for name in unused if ".layers." in name]
        issues += [
            f"expected only tensors that mizarr's decoder uses, found {name}" for name in one_per_kind(inside)
        ]
    issues += tensor_issues(shapes, config)
    warnings = [f"{key} in {source} was not read" for key in unread_keys(raw, reader)]
    warnings += [f"tensor {name} is not used" for name in one_per_kind(unused)]
    return CompatibilityReport(model_type, is_known, config, issues, warnings)


def required_scalars(raw: Mapping[str, Any], source: str) -> list[str]:
    """Issues, one line each, for required sizes that config.json lacks as integers.

    Arguments:
        raw: contents of config.json.
        source: name of the config, for errors.
    """
    issues = []
    for key in REQUIRED:
        value = raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            description = repr(value) if key in raw else "no such key"
            issues.append(f"{source}: expected {key} to be an integer, found {description}")
    # The usual reason why all of these keys are missing at once.
    if issues and isinstance(raw.get("text_config"), dict):
        issues.append(
            f"{source} describes a multimodal model (it has a text_config); mizarr runs text models only"
        )
    return issues


def unfollowed_keys(raw: Mapping[str, Any], source: str) -> list[str]:
    """Issues for config keys that change the forward pass in ways that the decoder does not implement.

    Arguments:
        raw: contents of config.json.
        source: name of the config, for errors.
    """
    return [
        f"{source}: expected {key} to be absent, null{''.join(f' or {value!r}' for value in neutral)}, found "
        f"{raw[key]!r}, which mizarr's decoder does not implement"
        for key, neutral in NEUTRAL.items()
        if raw.get(key) is not None and raw[key] not in neutral
    ]


def unread_keys(raw: Mapping[str, Any], reader: ConfigReader) -> list[str]:
    """Config keys that may change the forward pass and that mizarr did not read, sorted.

    Arguments:
        raw: contents of config.json.
        reader: the reader that has read the architecture, which knows the keys it was asked for.
    """
    # A null key counts as absent.
    set_keys = {key for key, value in raw.items() if value is not None}
    return sorted((set_keys - reader.read - BENIGN_KEYS) | reader.ignored)


def inferred(config: ConfigReader, shapes: TensorShapes) -> ComposedArchitecture:
    """Infer a decoder from config keys and the tensors of layer 0; `tensor_issues` checks later layers.

    Arguments:
        config: contents of config.json.
        shapes: shapes of the checkpoint's tensors by name.
    """
    refuse_unfollowed(config, looks_ahead=True)
    raw, layer_0 = config.raw, r"\.layers\.0\.(.*)"
    layer_0_shapes = {
        match[1]: shape for name, shape in shapes.items() if (match := re.search(layer_0, name))
    }
    gemma = "gemma" in str(raw.get("model_type"))
    # `post_attention_layernorm` does not tell: Llama uses that name for the norm before the MLP.
    post_norms = (
        "pre_feedforward_layernorm.weight" in layer_0_shapes
        or "post_feedforward_layernorm.weight" in layer_0_shapes
    )
    gemma2 = gemma and post_norms
    norm: Norm = "gemma_rms" if gemma else "layer" if "input_layernorm.bias" in layer_0_shapes else "rms"
    # Families name epsilon differently; the first key that is set counts.
    eps_key = next((key for key in EPS_KEYS if raw.get(key) is not None), EPS_KEYS[0])
    eps, hidden = config.number(eps_key, 1e-6 if gemma else 1e-5), config.integer("hidden_size")
    is_qkv_fused = "self_attn.qkv_proj.weight" in layer_0_shapes
    is_mlp_fused, is_gated = _mlp_layout(layer_0_shapes)
    act = read_activation(
        config,
        "gelu_pytorch_tanh" if gemma else "silu",
        "hidden_activation",
        "hidden_act",
        # Gemma 1 means the tanh form by "gelu", later ones do not.
        gelu_is_tanh=gemma and not post_norms,
    )
    heads = config.integer("num_attention_heads")
    attention = build.attention(
        config,
        width=config.integer("head_dim", _inferred_head_dim(raw, layer_0_shapes) or hidden // heads),
        kv_heads=_inferred_kv_heads(raw, layer_0_shapes),
        qkv_bias="self_attn.q_proj.bias" in layer_0_shapes or "self_attn.qkv_proj.bias" in layer_0_shapes,
        o_bias="self_attn.o_proj.bias" in layer_0_shapes,
        layout="by part" if is_qkv_fused else "separate",
        qk_norm=QkNorm("head", eps, norm) if "self_attn.q_norm.weight" in layer_0_shapes else None,
        scale=_query_scale(config, gemma2=gemma2),
        logit_softcap=config.optional_number("attn_logit_softcapping"),
    )
    names = ("down_proj", "c_fc", "gate_proj", "gate_up_proj")
    mlp_bias = any(f"mlp.{name}.bias" in layer_0_shapes for name in names)
    separate_parts = LLAMA.mlp_parts if is_gated else ("c_fc", "c_proj")
    mlp_parts = ("gate_up_proj", "down_proj") if is_mlp_fused else separate_parts
    return build.decoder(
        config,
        attention,
        build.mlp(config, act, is_fused=is_mlp_fused, is_gated=is_gated, bias=mlp_bias),
        context=build.PositionContext(
            max_positions=4096,
            rope=build.rope_everywhere(is_partial=True),
            windows=_windows(config, alternates=gemma2),
        ),
        norms="around" if post_norms else "before",
        norm_type=norm,
        eps=eps,
        embedding_scale=math.sqrt(hidden) if gemma else None,
        rounds_embedding_scale=gemma,
        final_logit_softcapping=config.optional_number("final_logit_softcapping"),
        # By the tensors, whatever `tie_word_embeddings` says.
        tied="lm_head.weight" not in shapes,
        spelling=replace(
            LLAMA,
            ln2="pre_feedforward_layernorm" if post_norms else LLAMA.ln2,
            attention_in="qkv_proj" if is_qkv_fused else "",
            mlp_parts=mlp_parts,
        ),
    )


def tensor_issues(shapes: TensorShapes, config: Architecture) -> list[str]:
    """Issues for missing tensors and unexpected shapes; one issue for the same tensor of all layers.

    Arguments:
        shapes: shapes of the checkpoint's tensors by name.
        config: architecture that they should fit.
    """
    shapes = {**shapes, **{name: shapes[copy] for name, copy in config.tensors.stand_ins(shapes).items()}}
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in shapes]
    issues = [
        f"expected a tensor {name}, found {_similar_names(name, shapes)}" for name in one_per_kind(missing)
    ]
    misshapen = [name for name, shape in expected.items() if name in shapes and shapes[name] != shape]
    for label in one_per_kind(misshapen):
        name = label.partition(" ")[0]
        issues.append(f"expected {label} of shape {list(expected[name])}, found {list(shapes[name])}")
    if missing and shapes:
        issues += _naming_hint(shapes)
    return issues


def one_per_kind(names: Iterable[str]) -> list[str]:
    """Group tensor names that differ only in the layer, e.g. "layers.0.w (and in 11 more layers)".

    Arguments:
        names: names of tensors.

    Returns:
        One text per group: its first name and the number of further layers.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        # Only numbers between dots: experts and layers have them.
        groups[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    return [
        group[0] + (f" (and in {len(group) - 1} more layers)" if group[1:] else "")
        for group in groups.values()
    ]


def _mlp_layout(layer_0_shapes: TensorShapes) -> tuple[bool, bool]:
    """(whether gate and up projection are one tensor, whether there is a gate) of the tensors of layer 0."""
    if "mlp.gate_up_proj.weight" in layer_0_shapes:
        return True, True
    return False, "mlp.c_fc.weight" not in layer_0_shapes or "mlp.gate_proj.weight" in layer_0_shapes


def _windows(config: ConfigReader, *, alternates: bool) -> build.Windows:
    if "use_sliding_window" in config.raw:
        return build.upper_windows(config, None)
    size = config.optional_integer("sliding_window")
    if alternates or config.raw.get("layer_types") is not None:
        return build.windows_where_listed(config, lambda layer: layer % 2 == 0, size)
    return (size,) * build.layers_of(config)


def _query_scale(config: ConfigReader, *, gemma2: bool) -> float | None:
    """Factor on attention scores by `query_pre_attn_scalar` (Gemma 2: default 256); None if it is absent."""
    if not gemma2 and config.raw.get("query_pre_attn_scalar") is None:
        return None
    return 1 / math.sqrt(config.positive("query_pre_attn_scalar", 256.0))


def _inferred_head_dim(raw: Mapping[str, Any], layer_0_shapes: TensorShapes) -> int | None:
    shape = layer_0_shapes.get("self_attn.q_proj.weight", ())
    heads = raw["num_attention_heads"]
    return shape[0] // heads if shape and heads > 0 and shape[0] % heads == 0 else None


def _inferred_kv_heads(raw: Mapping[str, Any], layer_0_shapes: TensorShapes) -> int | None:
    """Number of key-value heads from the rows of k_proj; None if they do not fit the head size."""
    # By the weights: a config that leaves out num_key_value_heads leaves the number open.
    width = raw.get("head_dim") or _inferred_head_dim(raw, layer_0_shapes)
    shape = layer_0_shapes.get("self_attn.k_proj.weight", ())
    return shape[0] // width if shape and isinstance(width, int) and shape[0] % width == 0 else None


def _similar_names(name: str, shapes: TensorShapes) -> str:
    """Up to four checkpoint tensor names that resemble a missing tensor's name."""
    words_by_part = {
        "embed": ("embed", "wte"),
        "norm": ("norm", "ln_"),
        "attn": ("attn", "attention"),
        "mlp": ("mlp", "ffn", "fc"),
        "lm_head": ("head", "embed_out"),
    }
    # A name may be followed by " (and in 11 more layers)".
    tensor_name = name.partition(" ")[0]
    words = next((words for part, words in words_by_part.items() if part in tensor_name), ())
    candidates = [
        tensor
        for tensor in shapes
        # Tensors of layer 0 stand for those of all layers.
        if any(word in tensor.lower() for word in words) and not re.search(r"\.[1-9]\d*\.", tensor)
    ]
    return ", ".join(sorted(candidates)[:4]) or "nothing like it"


def _naming_hint(shapes: TensorShapes) -> list[str]:
    for prefix, convention in CONVENTIONS.items():
        if any(name.startswith(prefix) for name in shapes):
            return [f"the tensors are named as in {convention} ({prefix}…), which other families cannot use"]
    if not any(name.startswith("model.layers.") for name in shapes):
        return [f"no tensor is named model.layers.…; the first are {', '.join(sorted(shapes)[:5])}"]
    return []
