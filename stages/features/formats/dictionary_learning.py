"""dictionary_learning (Marks, Karvonen, Mueller): ae.pt beside config.json, a folder per trainer.

The entry `trainer` of config.json gives the class, the layer and the sizes. Weights are linear layers
(encoder.weight [feature, hidden], decoder.weight [hidden, feature]) or matrices (W_enc, W_dec, transposed),
with biases under several names.

Border: one pickled state dict, of tensors only; no other object is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError, nearest
from ...torch_files import load_pickled
from ..layers.files import DictionaryFiles
from .fields import apply_fields, to_whole
from .single import LayerByLayer, OneLayer, StatedHooks, config_beside, files_named, layer_hooks

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers.activations import Activation
    from ..layers.layer import LayerFeatures

__all__ = ["part", "read", "recognises"]

WEIGHTS, CONFIG = "ae.pt", "config.json"
# dict_class -> (activation, whether b_dec is subtracted from the input).
CLASSES = {
    "AutoEncoder": ("relu", True),
    "AutoEncoderNew": ("relu", False),
    "AutoEncoderTopK": ("topk", True),
    "GatedAutoEncoder": ("gated", True),
    "JumpReluAutoEncoder": ("jumprelu", False),
    "BatchTopKSAE": ("jumprelu", True),
    "MatryoshkaBatchTopKSAE": ("jumprelu", True),
}
# Prefix of trainer.submodule_name -> hook kind.
SUBMODULES = {"resid_post": "resid_post", "mlp_out": "mlp_post", "attention_out": "attn_out"}
_DECODER_BIASES = ("b_dec", "bias", "decoder_bias")


def part(files: DictionaryFiles, name: str, read: str | None, write: str | None) -> OneLayer:
    """The autoencoder in one folder; see `LayerByLayer.part`. `name` is the folder's ae.pt."""
    place, config_fields = config_beside(files, name, CONFIG)
    apply_fields("dictionary_learning", config_fields, place)
    trainer, buffer = config_fields.get("trainer"), config_fields.get("buffer") or {}
    if not isinstance(trainer, dict) or not isinstance(buffer, dict):
        raise DictionaryError(
            f"expected JSON objects as trainer and buffer in {place}, found {trainer!r:.80} and "
            f"{buffer!r:.80}"
        )
    apply_fields("dictionary_learning trainer", trainer, place)
    if read is None:  # the buffer only describes where it reads, which the caller overrides
        apply_fields("dictionary_learning buffer", buffer, place)
    label = trainer.get("dict_class", "AutoEncoder")
    if label not in CLASSES:
        near = nearest(str(label), CLASSES)
        raise DictionaryError(
            f"expected the class trainer.dict_class in {place} to be one of {', '.join(CLASSES)}, found "
            f"{label!r}" + (f"; did you mean {near!r}?" if near else "; only these can be read")
        )
    # Sizes come from the configuration: reading the pickle would load all weights.
    layer, d_in, size = (
        to_whole(trainer.get(field), f"trainer.{field}", place, least=0)
        for field in ("layer", "activation_dim", "dict_size")
    )
    hooks = layer_hooks(files, _stated_hooks(trainer, layer), read, write)
    activation, centred = CLASSES[label]
    k = to_whole(trainer.get("k"), "trainer.k", place, least=0) if activation == "topk" else 0

    def open_layer() -> LayerFeatures:
        from ..layers.layer import LayerFeatures

        tensors = _loaded(files, name)
        W_enc, W_dec = _matrices(tensors, size, d_in, files, name)
        b_dec = next((tensors[field] for field in _DECODER_BIASES if field in tensors), None)
        return LayerFeatures(
            layer=layer,
            W_enc=W_enc,
            W_dec={layer: W_dec},
            activation=_activation(activation, k, tensors, files, name),
            b_enc=None if activation == "gated" else tensors.get("encoder.bias", tensors.get("b_enc")),
            b_dec=b_dec,
            centred=centred,
        )

    return OneLayer(
        where=name.rpartition("/")[0] or name,
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


def _stated_hooks(trainer: Mapping[str, Any], layer: int) -> StatedHooks:
    """Hook point by the name of the submodule ("mlp_out_layer_12"); resid_post if the trainer names none."""
    name = str(trainer.get("submodule_name") or "resid_post")
    return StatedHooks(
        layer, next((kind for word, kind in SUBMODULES.items() if name.startswith(word)), None)
    )


def _loaded(files: DictionaryFiles, name: str) -> dict[str, Tensor]:
    """Tensors of the state dict in a pickled file; DictionaryError if it holds anything else."""
    import torch

    state = load_pickled(files.path(name), DictionaryError)
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise DictionaryError(
            f"expected a state dict of tensors in {files.path(name)}, found other values; fetch it again"
        )
    apply_fields("dictionary_learning tensors", state, files.path(name))
    return dict(state)


def _matrices(
    tensors: Mapping[str, Tensor], size: int, d_in: int, files: DictionaryFiles, name: str
) -> tuple[Tensor, Tensor]:
    """Encoder and decoder, both [feature, hidden], found under either of their names; checks the sizes."""
    matrices = []
    for matrix_name, linear_name in (("W_enc", "encoder.weight"), ("W_dec", "decoder.weight")):
        if matrix_name in tensors:
            matrices.append(tensors[matrix_name].T if matrix_name == "W_enc" else tensors[matrix_name])
        elif linear_name in tensors:
            matrices.append(
                tensors[linear_name] if linear_name == "encoder.weight" else tensors[linear_name].T
            )
        else:
            raise DictionaryError(
                f"expected a tensor {linear_name} or {matrix_name} in {files.path(name)}, found only "
                f"{', '.join(sorted(tensors))}"
            )
        if tuple(matrices[-1].shape) != (size, d_in):
            raise DictionaryError(
                f"expected {matrix_name} of {size} features and width {d_in} in {files.path(name)}, as "
                f"config.json states, found shape {list(matrices[-1].shape)}"
            )
    return matrices[0], matrices[1]


def _activation(
    name: str, k: int, tensors: Mapping[str, Tensor], files: DictionaryFiles, file: str
) -> Activation:
    """Activation function, with its thresholds or gates from `tensors`; DictionaryError if one is missing."""
    from ..layers.activations import Gated, JumpReLU, ReLU, TopK

    needed = {"jumprelu": ["threshold"], "gated": ["gate_bias", "mag_bias", "r_mag"]}.get(name, [])
    missing = [field for field in needed if field not in tensors]
    if missing:
        raise DictionaryError(
            f"expected a tensor {missing[0]} in {files.path(file)} for the activation function {name}, found "
            f"only {', '.join(sorted(tensors))}"
        )
    if name == "jumprelu":
        return JumpReLU(tensors["threshold"], rectified=True)
    if name == "gated":
        return Gated(tensors["gate_bias"], tensors["mag_bias"], tensors["r_mag"])
    return TopK(k) if name == "topk" else ReLU()
