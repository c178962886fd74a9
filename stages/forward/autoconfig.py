"""Which configuration a checkpoint needs: by its family, or by looking at its tensors.

For a model_type no table knows, the axes are worked out from config.json and from the names and shapes in the safetensors headers; no
weight is read. A report lists what was expected and found, so that a checkpoint which cannot run says why. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...store.errors import ConfigError
from .config import ConfigReader, TransformerConfig
from .families import FAMILIES, Family, from_hf_config, model_type_of, read_family
from .weights import expected_tensors, read_shapes, unused_tensors

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_CONVENTIONS = {
    "transformer.h.": "GPT-2 / GPT-J", "transformer.blocks.": "MPT", "gpt_neox.layers.": "GPT-NeoX / Pythia", "transformer.layer.": "BLOOM",
}  # fmt: skip
_BENIGN_KEYS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id initializer_range "
    "attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout residual_dropout embedding_dropout pretraining_tp _name_or_path "
    "auto_map cache_implementation tokenizer_class is_decoder unk_token_id sep_token_id decoder_start_token_id".split()
)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class CompatibilityReport:
    """Whether a checkpoint can run. issues stop it; warnings do not."""

    model_type: str
    known_family: bool
    config: TransformerConfig | None
    issues: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_compatible(self) -> bool:
        return not self.issues

    def require(self) -> TransformerConfig:
        """The configuration, or one ConfigError that lists every issue."""
        if self.issues or self.config is None:
            raise ConfigError(f"a {self.model_type!r} checkpoint cannot run: " + "; ".join(self.issues))
        return self.config


def transformer_config(raw: dict[str, Any], weight_files: Sequence[Path], source: str = "config.json") -> TransformerConfig:
    """The configuration of a checkpoint; ConfigError with the whole report if it cannot run."""
    if raw.get("model_type") in FAMILIES:
        return from_hf_config(raw, source)
    return report(raw, read_shapes(weight_files), source).require()


def report(raw: dict[str, Any], shapes: Shapes, source: str = "config.json") -> CompatibilityReport:
    """What a checkpoint is and whether it can run. shapes: of its tensors by name. ConfigError without a model_type."""
    model_type = model_type_of(raw, source)
    known = model_type in FAMILIES
    issues = [f"{source}: expected {key} as an integer, found {raw.get(key)!r}" for key in REQUIRED if not isinstance(raw.get(key), int)]
    if issues:
        return CompatibilityReport(model_type, known, None, issues)
    reader = ConfigReader(raw, source)
    family = FAMILIES[model_type] if known else family_of(raw, shapes)
    try:
        config = read_family(reader, model_type, family)
    except ConfigError as error:
        return CompatibilityReport(model_type, known, None, [str(error)])
    unread = sorted(set(raw) - reader.read - _BENIGN_KEYS)
    warnings = [f"config key {key!r} was not read" for key in unread]
    warnings += [f"tensor {name!r} is not used" for name in unused_tensors(shapes, config)]
    return CompatibilityReport(model_type, known, config, _tensor_issues(shapes, config), warnings)


def family_of(raw: Mapping[str, Any], shapes: Shapes) -> Family:
    """A family row worked out from config keys and the tensors of the first layer."""
    first = {name.split("layers.0.", 1)[1]: shape for name, shape in shapes.items() if "layers.0." in name}
    gemma = "gemma" in str(raw.get("model_type"))
    post_norms = "pre_feedforward_layernorm.weight" in first and "post_feedforward_layernorm.weight" in first
    caps = ("attn_logit_softcapping" in raw or "final_logit_softcapping" in raw) and (50.0, 30.0)
    activation = next((str(raw[key]) for key in ("hidden_activation", "hidden_act") if raw.get(key)), "silu")
    eps_key = next((key for key in ("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon") if raw.get(key) is not None), "rms_norm_eps")
    scalar = raw.get("query_pre_attn_scalar") or (256.0 if gemma and post_norms else None)
    layer_norm = "input_layernorm.bias" in first
    window_rule = "none" if raw.get("use_sliding_window") is False else "alternating" if gemma and post_norms else "all"
    if raw.get("layer_types") is not None and window_rule == "all":
        window_rule = "alternating"  # the listed types decide, layer by layer
    return Family(
        norm="gemma_rms" if gemma else "layer" if layer_norm else "rms",
        eps_key=eps_key,
        eps=1e-6 if gemma else 1e-5,
        activation_keys=("hidden_activation", "hidden_act"),
        activation=activation,
        gelu_is_tanh=gemma,
        fused="self_attn.qkv_proj.weight" in first,
        fused_mlp="mlp.gate_up_proj.weight" in first,
        plain_mlp="mlp.c_fc.weight" in first and "mlp.gate_proj.weight" not in first,
        qkv_bias="self_attn.q_proj.bias" in first or "self_attn.qkv_proj.bias" in first,
        o_bias="self_attn.o_proj.bias" in first,
        mlp_bias=any(f"mlp.{name}.bias" in first for name in ("down_proj", "c_fc", "gate_proj", "gate_up_proj")),
        scaled_embedding=gemma,
        tied="lm_head.weight" not in shapes,
        windows=window_rule,  # type: ignore[arg-type]  # one of the literals above
        soft_caps=_declared_caps(raw) if caps else None,
        query_scalar=float(scalar) if scalar else None,
        post_norms=post_norms,
        qk_norm="self_attn.q_norm.weight" in first,
    )


def _declared_caps(raw: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """A cap an unknown family does not declare is none, not Gemma's default."""
    attention, final = raw.get("attn_logit_softcapping"), raw.get("final_logit_softcapping")
    return (None if attention is None else float(attention), None if final is None else float(final))


def _tensor_issues(shapes: Shapes, config: TransformerConfig) -> list[str]:
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in shapes]
    issues = [f"expected a tensor {name!r}, found {_instead(name, shapes)}" for name in _representatives(missing)]
    issues += [f"expected {name!r} of shape {list(shape)}, found {list(shapes[name])}" for name, shape in expected.items() if name in shapes and shapes[name] != shape][:8]
    if missing and shapes:
        issues.append(_naming_hint(shapes))
    return issues


def _representatives(missing: Sequence[str]) -> list[str]:
    """One name per kind of tensor: the same one in every layer is one issue."""
    seen: dict[str, str] = {}
    for name in missing:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        seen.setdefault(kind, name)
    return list(seen.values())


def _instead(name: str, shapes: Shapes) -> str:
    """Up to four tensors that look like what is missing."""
    marks = {
        "embed": ("embed", "wte"), "norm": ("norm", "ln_"), "attn": ("attn", "attention"), "mlp": ("mlp", "ffn", "fc"), "lm_head": ("head", "embed_out"),
    }  # fmt: skip
    wanted = next((found for mark, found in marks.items() if mark in name), ())
    first = [other for other in shapes if any(mark in other.lower() for mark in wanted) and (".0." in other or not any(part.isdigit() for part in other.split(".")))]
    return ", ".join(sorted(first)[:4]) or "nothing like it"


def _naming_hint(shapes: Shapes) -> str:
    for prefix, convention in _CONVENTIONS.items():
        if any(name.startswith(prefix) for name in shapes):
            return f"its tensors are named as in {convention} ({prefix}…), which this decoder does not read"
    if not any(name.startswith("model.layers.") for name in shapes):
        return f"no tensor is named model.layers.…; the first are {', '.join(sorted(shapes)[:5])}"
    return f"{len(shapes)} tensors were found"
