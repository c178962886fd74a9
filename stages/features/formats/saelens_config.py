"""SAELens's cfg.json, of any version, as one value.

Border: names and numbers; saelens.py reads tensors. Before version 6 the fields were flat, and some had other
names and types; they are interpreted as in their version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....store.errors import DictionaryError, nearest
from ..layers.names import layer_in
from .fields import FIELDS, apply_fields, to_whole

__all__ = ["ARCHITECTURES", "SaeLensConfig"]

# Architecture -> (whether it writes to another hook point than it reads, activation function).
ARCHITECTURES = {
    "standard": (False, "relu"),
    "jumprelu": (False, "jumprelu"),
    "topk": (False, "topk"),
    "abstopk": (False, "abstopk"),
    "gated": (False, "gated"),
    "transcoder": (True, "relu"),
    "skip_transcoder": (True, "relu"),
    "jumprelu_transcoder": (True, "jumprelu"),
    "jumprelu_skip_transcoder": (True, "jumprelu"),
    # Used in training only; SAELens saves finished dictionaries as jumprelu.
    "batchtopk": (False, "jumprelu"),
    "matryoshka_batchtopk": (False, "jumprelu"),
}
_RENAMED = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}
"""Field names before version 6, and their names since."""


@dataclass(frozen=True)
class SaeLensConfig:
    """The fields of cfg.json that affect results, named as in SAELens."""

    architecture: str
    """Key of `ARCHITECTURES`."""
    d_in: int
    """Width of the states that are read."""
    d_sae: int
    """Number of features."""
    d_out: int
    """Width of the states that are written."""
    apply_b_dec_to_input: bool
    """Whether b_dec is subtracted from the input."""
    normalize_activations: str
    """Scaling of the input: "none", "expected_average_only_in", "constant_norm_rescale" or "layer_norm"."""
    reshape_activations: str
    """"hook_z" if heads are put side by side, else "none"."""
    rescale_acts_by_decoder_norm: bool
    """Whether pre-activations are multiplied by the norms of decoder rows, and rows divided by them."""
    finetuning_scaling_factor: bool
    """Whether the file has factors of decoder rows from fine-tuning."""
    k: int
    """Number of active features; 0 for architectures without it."""
    hook_name: str | None
    """Name of the hook point that is read; None if not stated."""
    hook_name_out: str | None
    """Name of the hook point that a transcoder writes to; None if not stated."""
    hook_layer: int | None
    """Layer; None if not stated."""
    model_name: str | None
    """Name of the model; None if not stated."""
    processing: frozenset[str]
    """Processing of the model's weights in training: "fold_ln", "fold_value_biases"."""

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes to another hook point than it reads."""
        return ARCHITECTURES[self.architecture][0]

    @property
    def activation(self) -> str:
        """ "relu", "jumprelu", "topk", "abstopk" or "gated"."""
        return ARCHITECTURES[self.architecture][1]

    @classmethod
    def parse(cls, fields: Mapping[str, Any], place: Path) -> SaeLensConfig:
        """Parse a cfg.json of any version.

        Arguments:
            fields: Its fields.
            place: Its path, for messages.

        Raises:
            DictionaryError: An architecture or setting is not supported, or a size is missing.
        """
        config = _modern(fields, place)
        metadata = config["metadata"]
        architecture = str(config.get("architecture", "standard"))
        _one_of("architecture", architecture, ARCHITECTURES, place)
        processing = metadata.get("model_from_pretrained_kwargs") or {}
        if not isinstance(processing, Mapping):
            raise DictionaryError(
                f"expected model_from_pretrained_kwargs to be names and values in {place}, found "
                f"{processing!r:.80}"
            )
        apply_fields("saelens model", processing, place)
        if metadata.get("hook_head_index") is not None:
            raise DictionaryError(
                f"{place} is about head {metadata['hook_head_index']} of {metadata.get('hook_name')} alone; "
                "dictionaries of single heads cannot be read"
            )
        d_in = to_whole(config.get("d_in"), "d_in", place)
        is_transcoder = ARCHITECTURES[architecture][0]
        needs_k = ARCHITECTURES[architecture][1] in ("topk", "abstopk")
        return cls(
            architecture=architecture,
            d_in=d_in,
            d_sae=to_whole(config.get("d_sae"), "d_sae", place),
            d_out=to_whole(config["d_out"], "d_out", place) if is_transcoder and "d_out" in config else d_in,
            apply_b_dec_to_input=bool(config.get("apply_b_dec_to_input", True)) and not is_transcoder,
            normalize_activations=config["normalize_activations"],
            reshape_activations=config["reshape_activations"],
            rescale_acts_by_decoder_norm=bool(config.get("rescale_acts_by_decoder_norm", False)),
            finetuning_scaling_factor=bool(config.get("finetuning_scaling_factor", False)),
            k=to_whole(config.get("k"), "k", place) if needs_k else 0,
            hook_name=metadata.get("hook_name"),
            hook_name_out=metadata.get("hook_name_out"),
            hook_layer=_layer(metadata, place),
            model_name=metadata.get("model_name"),
            processing=frozenset(name for name in ("fold_ln", "fold_value_biases") if processing.get(name)),
        )


def _modern(fields: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Convert fields to version 6, after checking that every field is supported."""
    metadata = fields.get("metadata") or fields.get("meta") or {}
    if not isinstance(metadata, Mapping):
        raise DictionaryError(f"expected metadata to be names and values in {place}, found {metadata!r:.80}")
    version = str(fields.get("sae_lens_version") or metadata.get("sae_lens_version") or "")
    config = {_RENAMED.get(name, name): value for name, value in fields.items()}
    flat = {name: value for name, value in config.items() if name in FIELDS["saelens metadata"]}
    config_fields = {name: value for name, value in config.items() if name not in flat}
    apply_fields("saelens", config_fields, place)
    apply_fields("saelens metadata", {**flat, **metadata}, place)
    # Files of versions before 6, and files without a version, are flat.
    if not re.match(r"([6-9]|\d\d)\.", version):
        config["metadata"] = {**flat, **metadata}
        _read_activation(config, place)
        if "reshape_activations" not in config and "hook_z" in str(config["metadata"].get("hook_name") or ""):
            config["reshape_activations"] = "hook_z"
    else:
        config["metadata"] = metadata
    # Old versions have a flag, whose True means one factor for all inputs.
    if isinstance(config.get("normalize_activations"), bool):
        config["normalize_activations"] = (
            "expected_average_only_in" if config["normalize_activations"] else "none"
        )
    config["normalize_activations"] = config.get("normalize_activations") or "none"
    config["reshape_activations"] = config.get("reshape_activations") or "none"
    return config


def _read_activation(config: dict[str, Any], place: Path) -> None:
    """Set architecture and k before version 6, where the activation function states TopK."""
    name, arguments = config.get("activation_fn") or "relu", config.get("activation_fn_kwargs") or {}
    architecture = config.get("architecture") or "standard"
    expected = {"k"} if "topk" in (name, architecture) else set()
    if not isinstance(arguments, Mapping) or arguments.keys() - expected:
        raise DictionaryError(
            f"expected activation_fn_kwargs of {name} to hold {'k' if expected else 'nothing'} in {place}, "
            f"found {arguments!r:.80}; take another dictionary"
        )
    if name == "topk":
        _one_of("architecture", architecture, ("standard", "topk"), place)
        config["architecture"] = "topk"
    if config.get("architecture") == "topk":
        config["k"] = arguments.get("k")


def _layer(metadata: Mapping[str, Any], place: Path) -> int | None:
    """The layer in hook_layer or the hook point's name, else None; DictionaryError if they differ."""
    for name in ("hook_name", "hook_name_out", "model_name"):
        if not isinstance(metadata.get(name), str | None):
            raise DictionaryError(f"expected {name} to be a text in {place}, found {metadata[name]!r:.80}")
    named, layer = layer_in(metadata.get("hook_name")), metadata.get("hook_layer")
    if layer is None:
        return named
    if type(layer) is not int or (named is not None and layer != named):
        raise DictionaryError(
            f"expected hook_layer to be the layer of {metadata.get('hook_name')!r} in {place}, found "
            f"{layer!r}; correct one of them"
        )
    return layer


def _one_of(field: str, value: Any, supported: Any, place: Path) -> None:
    if value not in supported:
        near = nearest(str(value), supported)
        hint = f"; nearest is {near!r}" if near else ""
        raise DictionaryError(
            f"expected {field} to be one of {', '.join(supported)} in {place}, found {value!r}{hint}"
        )
