"""dictionary_learning (Marks, Karvonen, Mueller): ae.pt beside config.json, a folder per trainer.

config.json's `trainer` gives the class, the layer and the sizes. Linear layers (encoder.weight [feature,
hidden], decoder.weight [hidden, feature]) or matrices (W_enc, W_dec the other way round), with biases under
several names.

Border: one pickled state dict, of tensors only; nothing else in it is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError, nearest
from ...torch_files import load_pickled
from ..layers.files import DictionaryFiles
from .fields import apply_fields
from .single import LayerByLayer, OneLayer, SaidHooks, files_named, hooks_given

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers.activations import Activation
    from ..layers.layer import LayerFeatures

__all__ = ["part", "read", "recognises"]

WEIGHTS, CONFIG = "ae.pt", "config.json"
# Class -> (activation, whether b_dec is subtracted from the input).
CLASSES = {
    "AutoEncoder": ("relu", True),
    "AutoEncoderNew": ("relu", False),
    "AutoEncoderTopK": ("topk", True),
    "GatedAutoEncoder": ("gated", True),
    "JumpReluAutoEncoder": ("jumprelu", False),
    "BatchTopKSAE": ("jumprelu", True),
    "MatryoshkaBatchTopKSAE": ("jumprelu", True),
}
SUBMODULES = {"resid_post": "resid_post", "mlp_out": "mlp_post", "attention_out": "attn_out"}
_DECODER_BIASES = ("b_dec", "bias", "decoder_bias")


def part(files: DictionaryFiles, name: str, read: str | None, write: str | None) -> OneLayer:
    """The dictionary of one folder, given its weight file."""
    folder, slash, _ = name.rpartition("/")
    config = f"{folder}{slash}{CONFIG}"
    if config not in files.listing:
        raise DictionaryError(f"expected {CONFIG} beside {files.path(name)}, found none; fetch it again")
    place, said = files.path(config), files.json(config)
    apply_fields("dictionary_learning", said, place)
    trainer, buffer = said.get("trainer"), said.get("buffer") or {}
    if not isinstance(trainer, dict) or not isinstance(buffer, dict):
        raise DictionaryError(f"expected fields of trainer and buffer in {place}, found {trainer!r:.80}")
    apply_fields("dictionary_learning trainer", trainer, place)
    if read is None:  # a caller who says where it reads knows better
        apply_fields("dictionary_learning buffer", buffer, place)
    label = trainer.get("dict_class", "AutoEncoder")
    if label not in CLASSES:
        near = nearest(str(label), CLASSES)
        raise DictionaryError(
            f"expected trainer.dict_class to be one of {', '.join(CLASSES)} in {place}, found {label!r}"
            + (f"; nearest is {near!r}" if near else "")
        )
    layer, d_in, size = (_whole(trainer, field, place) for field in ("layer", "activation_dim", "dict_size"))
    hooks = hooks_given(files, _hooks_said(trainer, layer), read, write)
    activation, centred = CLASSES[label]
    k = _whole(trainer, "k", place) if activation == "topk" else 0

    def open_layer() -> LayerFeatures:
        from ..layers.layer import LayerFeatures

        given = _loaded(files, name)
        W_enc, W_dec = _matrices(given, size, d_in, files, name)
        b_dec = next((given[field] for field in _DECODER_BIASES if field in given), None)
        return LayerFeatures(
            layer=layer,
            W_enc=W_enc,
            W_dec={layer: W_dec},
            activation=_activation(activation, k, given, files, name),
            b_enc=None if activation == "gated" else given.get("encoder.bias", given.get("b_enc")),
            b_dec=b_dec,
            centred=centred,
        )

    return OneLayer(
        where=folder or name,
        hooks=hooks,
        n_features=size,
        d_in=d_in,
        d_out=d_in,
        files=(name,),
        open=open_layer,
        model_name=trainer.get("lm_name"),
        settings={"class": label, "k": k},
    )


FORMAT = LayerByLayer("dictionary_learning", lambda files: files_named(files, WEIGHTS), part)
recognises, read = FORMAT.recognises, FORMAT.read


def _hooks_said(trainer: Mapping[str, Any], layer: int) -> SaidHooks:
    """Hook kinds of the submodule's name, "resid_post_layer_12"; the residual stream where none is given."""
    name = str(trainer.get("submodule_name") or "resid_post")
    return SaidHooks(layer, next((kind for word, kind in SUBMODULES.items() if name.startswith(word)), None))


def _loaded(files: DictionaryFiles, name: str) -> dict[str, Tensor]:
    import torch

    state = load_pickled(files.path(name), DictionaryError)
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise DictionaryError(
            f"expected a state dict of tensors in {files.path(name)}, found other values; fetch it again"
        )
    apply_fields("dictionary_learning tensors", state, files.path(name))
    return dict(state)


def _matrices(
    given: Mapping[str, Tensor], size: int, d_in: int, files: DictionaryFiles, name: str
) -> tuple[Tensor, Tensor]:
    """Encoder and decoder, rows features, of the sizes the configuration says."""
    found = []
    for turned, linear in (("W_enc", "encoder.weight"), ("W_dec", "decoder.weight")):
        if turned in given:
            found.append(given[turned].T if turned == "W_enc" else given[turned])
        elif linear in given:
            found.append(given[linear] if linear == "encoder.weight" else given[linear].T)
        else:
            raise DictionaryError(
                f"expected {linear} or {turned} in {files.path(name)}, found {', '.join(sorted(given))}"
            )
        if tuple(found[-1].shape) != (size, d_in):
            raise DictionaryError(
                f"expected {size} features of {d_in} numbers in {files.path(name)}, found "
                f"{list(found[-1].shape)}"
            )
    return found[0], found[1]


def _activation(
    name: str, k: int, given: Mapping[str, Tensor], files: DictionaryFiles, file: str
) -> Activation:
    from ..layers.activations import Gated, JumpReLU, ReLU, TopK

    needed = {"jumprelu": ["threshold"], "gated": ["gate_bias", "mag_bias", "r_mag"]}.get(name, [])
    missing = [field for field in needed if field not in given]
    if missing:
        raise DictionaryError(
            f"expected {missing[0]} in {files.path(file)}, found {', '.join(sorted(given))}"
        )
    if name == "jumprelu":
        return JumpReLU(given["threshold"], rectified=True)
    if name == "gated":
        return Gated(given["gate_bias"], given["mag_bias"], given["r_mag"])
    return TopK(k) if name == "topk" else ReLU()


def _whole(trainer: Mapping[str, Any], field: str, place: Any) -> int:
    value = trainer.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DictionaryError(f"expected trainer.{field} to be a whole number in {place}, found {value!r}")
    return value
