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
    """"hook_z" if the heads' outputs are concatenated, else "none"."""
    rescale_acts_by_decoder_norm: bool
    """Whether pre-activations are multiplied by the norms of decoder rows, and rows divided by them."""
    finetuning_scaling_factor: bool
    """Whether the file has factors of decoder rows from fine-tuning."""
    k: int
    """Number of active features of TopK architectures; 0 for others."""
    hook_name: str | None
    """Name of the hook point that is read; None if not stated."""
    hook_name_out: str | None
    """Name of the hook point that a transcoder writes to; None if not stated."""
    hook_layer: int | None
    """Layer; None if not stated."""
    model_name: str | None
    """Model name; None if unstated."""
    processing: frozenset[str]
    """How the model's weights were processed before training: "fold_ln", "fold_value_biases", or both."""

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes to another hook point than it reads."""
        return ARCHITECTURES[self.architecture][0]

    @property
    def activation(self) -> str:
        """Activation function: "relu", "jumprelu", "topk", "abstopk" or "gated"."""
        return ARCHITECTURES[self.architecture][1]

    @classmethod
    def parse(cls, fields: Mapping[str, Any], place: Path) -> SaeLensConfig:
        """Interpret the cfg.json of any SAELens version.

        Arguments:
            fields: Contents of the file.
            place: Path of the file, for messages.

        Raises:
            DictionaryError: An architecture or setting is not supported, or a size is missing.
        """
        config = _modern(fields, place)
        metadata = config["metadata"]
        architecture = str(config.get("architecture", "standard"))
        _require_one_of("architecture", architecture, ARCHITECTURES, place)
        processing = metadata.get("model_from_pretrained_kwargs") or {}
        if not isinstance(processing, Mapping):
            raise DictionaryError(
                f"expected a JSON object as model_from_pretrained_kwargs in {place}, found {processing!r:.80}"
            )
        apply_fields("saelens model", processing, place)
        if metadata.get("hook_head_index") is not None:
            raise DictionaryError(
                f"the dictionary of {place} reads only head {metadata['hook_head_index']} of "
                f"{metadata.get('hook_name')}; dictionaries of single heads cannot be read, use one of all "
                "heads"
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
    """Contents of a cfg.json in the form of SAELens 6; DictionaryError if an entry is not supported."""
    metadata = fields.get("metadata") or fields.get("meta") or {}
    if not isinstance(metadata, Mapping):
        raise DictionaryError(f"expected a JSON object as metadata in {place}, found {metadata!r:.80}")
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
    # Old versions have True or False here; True means that one factor scales all inputs.
    if isinstance(config.get("normalize_activations"), bool):
        config["normalize_activations"] = (
            "expected_average_only_in" if config["normalize_activations"] else "none"
        )
    config["normalize_activations"] = config.get("normalize_activations") or "none"
    config["reshape_activations"] = config.get("reshape_activations") or "none"
    return config


def _read_activation(config: dict[str, Any], place: Path) -> None:
    """Set `architecture` and `k` of a cfg.json from before version 6, where `activation_fn` states TopK."""
    name, arguments = config.get("activation_fn") or "relu", config.get("activation_fn_kwargs") or {}
    architecture = config.get("architecture") or "standard"
    expected = {"k"} if "topk" in (name, architecture) else set()
    if not isinstance(arguments, Mapping) or arguments.keys() - expected:
        raise DictionaryError(
            f"expected activation_fn_kwargs in {place} to hold {'only k' if expected else 'nothing'} for the "
            f"activation function {name}, found {arguments!r:.80}; use another dictionary"
        )
    if name == "topk":
        _require_one_of("architecture", architecture, ("standard", "topk"), place)
        config["architecture"] = "topk"
    if config.get("architecture") == "topk":
        config["k"] = arguments.get("k")


def _layer(metadata: Mapping[str, Any], place: Path) -> int | None:
    """Layer that hook_layer or the hook point's name states; None if neither does.

    DictionaryError if both do and differ.
    """
    for name in ("hook_name", "hook_name_out", "model_name"):
        if not isinstance(metadata.get(name), str | None):
            raise DictionaryError(f"expected a text as {name} in {place}, found {metadata[name]!r:.80}")
    named, layer = layer_in(metadata.get("hook_name")), metadata.get("hook_layer")
    if layer is None:
        return named
    if type(layer) is not int or (named is not None and layer != named):
        raise DictionaryError(
            f"expected hook_layer in {place} to be the layer of hook_name, {metadata.get('hook_name')!r}, "
            f"found {layer!r}; correct one of the two entries"
        )
    return layer


def _require_one_of(field: str, value: Any, supported: Any, place: Path) -> None:
    """Raise DictionaryError if a field of cfg.json has a value that is not supported."""
    if value not in supported:
        near = nearest(str(value), supported)
        hint = f"; did you mean {near!r}?" if near else ""
        raise DictionaryError(
            f"expected {field} in {place} to be one of {', '.join(supported)}, found {value!r}{hint}"
        )
