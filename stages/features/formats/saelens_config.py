"""SAELens's cfg.json, of any version, as one value.

Border: names and numbers; tensors are saelens.py's. Before version 6 the fields were flat and some had other
names and other types; what those meant then is what they mean here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....store.errors import DictionaryError, nearest
from ..layers.names import layer_in
from .fields import FIELDS, apply_fields

__all__ = ["ARCHITECTURES", "SaeLensConfig"]

# Architecture -> whether it writes to another place than it reads, and how its activations come about.
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
    # In training only; finished ones are saved as jumprelu.
    "batchtopk": (False, "jumprelu"),
    "matryoshka_batchtopk": (False, "jumprelu"),
}
_RENAMED = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


@dataclass(frozen=True)
class SaeLensConfig:
    """What of a cfg.json matters here; fields as SAELens names them.

    k is 0 where there is none.
    """

    architecture: str
    d_in: int
    d_sae: int
    d_out: int
    apply_b_dec_to_input: bool
    normalize_activations: str
    reshape_activations: str
    rescale_acts_by_decoder_norm: bool
    finetuning_scaling_factor: bool
    k: int
    hook_name: str | None
    hook_name_out: str | None
    hook_layer: int | None
    model_name: str | None
    processing: frozenset[str]
    """What was done to the weights of the model before it was read: "fold_ln", "fold_value_biases"."""

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes to another place than it reads."""
        return ARCHITECTURES[self.architecture][0]

    @property
    def activation(self) -> str:
        """ "relu", "jumprelu", "topk", "abstopk" or "gated"."""
        return ARCHITECTURES[self.architecture][1]

    @classmethod
    def parse(cls, found: Mapping[str, Any], place: Path) -> SaeLensConfig:
        """From the fields of a cfg.json at `place`, which messages name.

        Raises DictionaryError for architectures and settings nobody here can compute, and for missing sizes.
        """
        said = _modern(found, place)
        about = said["metadata"]
        architecture = str(said.get("architecture", "standard"))
        _one_of("architecture", architecture, ARCHITECTURES, place)
        processing = about.get("model_from_pretrained_kwargs") or {}
        if not isinstance(processing, Mapping):
            raise DictionaryError(
                f"expected model_from_pretrained_kwargs to be names and values in {place}, found "
                f"{processing!r:.80}"
            )
        apply_fields("saelens model", processing, place)
        if about.get("hook_head_index") is not None:
            raise DictionaryError(
                f"{place} is about head {about['hook_head_index']} of {about.get('hook_name')} alone; "
                "dictionaries of single heads cannot be read"
            )
        d_in = _size(said, "d_in", place)
        is_transcoder = ARCHITECTURES[architecture][0]
        needs_k = ARCHITECTURES[architecture][1] in ("topk", "abstopk")
        return cls(
            architecture=architecture,
            d_in=d_in,
            d_sae=_size(said, "d_sae", place),
            d_out=_size(said, "d_out", place) if is_transcoder and "d_out" in said else d_in,
            apply_b_dec_to_input=bool(said.get("apply_b_dec_to_input", True)) and not is_transcoder,
            normalize_activations=said["normalize_activations"],
            reshape_activations=said["reshape_activations"],
            rescale_acts_by_decoder_norm=bool(said.get("rescale_acts_by_decoder_norm", False)),
            finetuning_scaling_factor=bool(said.get("finetuning_scaling_factor", False)),
            k=_size(said, "k", place) if needs_k else 0,
            hook_name=about.get("hook_name"),
            hook_name_out=about.get("hook_name_out"),
            hook_layer=_layer(about, place),
            model_name=about.get("model_name"),
            processing=frozenset(name for name in ("fold_ln", "fold_value_biases") if processing.get(name)),
        )


def _modern(found: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The fields as version 6 spells them, once all of them are known to ask for what is computed."""
    about = found.get("metadata") or found.get("meta") or {}
    if not isinstance(about, Mapping):
        raise DictionaryError(f"expected metadata to be names and values in {place}, found {about!r:.80}")
    version = str(found.get("sae_lens_version") or about.get("sae_lens_version") or "")
    said = {_RENAMED.get(name, name): value for name, value in found.items()}
    flat = {name: value for name, value in said.items() if name in FIELDS["saelens metadata"]}
    own = {name: value for name, value in said.items() if name not in flat}
    apply_fields("saelens", own, place)
    apply_fields("saelens metadata", {**flat, **about}, place)
    if not re.match(r"([6-9]|\d\d)\.", version):
        said["metadata"] = {**flat, **about}
        _read_activation(said, place)
        if "reshape_activations" not in said and "hook_z" in str(said["metadata"].get("hook_name") or ""):
            said["reshape_activations"] = "hook_z"
    else:
        said["metadata"] = about
    if isinstance(said.get("normalize_activations"), bool):
        said["normalize_activations"] = (
            "expected_average_only_in" if said["normalize_activations"] else "none"
        )
    said["normalize_activations"] = said.get("normalize_activations") or "none"
    said["reshape_activations"] = said.get("reshape_activations") or "none"
    return said


def _read_activation(said: dict[str, Any], place: Path) -> None:
    """Set architecture and k of a configuration before version 6, in which an activation function and its
    arguments say that it is TopK.
    """
    name, arguments = said.get("activation_fn") or "relu", said.get("activation_fn_kwargs") or {}
    architecture = said.get("architecture") or "standard"
    expected = {"k"} if "topk" in (name, architecture) else set()
    if not isinstance(arguments, Mapping) or arguments.keys() - expected:
        raise DictionaryError(
            f"expected activation_fn_kwargs of {name} to hold {'k' if expected else 'nothing'} in {place}, "
            f"found {arguments!r:.80}; take another dictionary"
        )
    if name == "topk":
        _one_of("architecture", architecture, ("standard", "topk"), place)
        said["architecture"] = "topk"
    if said.get("architecture") == "topk":
        said["k"] = arguments.get("k")


def _layer(about: Mapping[str, Any], place: Path) -> int | None:
    """The layer as hook_layer and the hook point's name say. Raises DictionaryError where they differ."""
    for name in ("hook_name", "hook_name_out", "model_name"):
        if not isinstance(about.get(name), str | None):
            raise DictionaryError(f"expected {name} to be a text in {place}, found {about[name]!r:.80}")
    named, layer = layer_in(about.get("hook_name")), about.get("hook_layer")
    if layer is None:
        return named
    if type(layer) is not int or (named is not None and layer != named):
        raise DictionaryError(
            f"expected hook_layer to be the layer of {about.get('hook_name')!r} in {place}, found {layer!r}; "
            "correct one of them"
        )
    return layer


def _one_of(field: str, value: Any, known: Any, place: Path) -> None:
    if value not in known:
        near = nearest(str(value), known)
        hint = f"; nearest is {near!r}" if near else ""
        raise DictionaryError(
            f"expected {field} to be one of {', '.join(known)} in {place}, found {value!r}{hint}"
        )


def _size(said: Mapping[str, Any], field: str, place: Path) -> int:
    value = said.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DictionaryError(f"expected {field} to be a positive number in {place}, found {value!r}")
    return value
