"""Llama Scope (He et al. 2024): autoencoders as linear layers, a folder per layer.

    hyperparams.json + checkpoints/final.safetensors        one threshold for all features
    config.json + sae_weights.safetensors                   later variant: log_jumprelu_threshold [feature]

encoder.weight [feature, hidden], decoder.weight [hidden, feature], biases. Inputs are scaled to mean norm
sqrt(hidden) over the data set (dataset_average_activation_norm); thresholds are multiplied by the same
factor.

Border: files and names; the arithmetic is that of SAELens' converters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....store.errors import DictionaryError
from ..layers.files import DictionaryFiles
from ..layers.names import layer_in
from .fields import apply_fields, to_float
from .layered import require_shapes
from .single import LayerByLayer, OneLayer, StatedHooks, files_beside, layer_hooks

if TYPE_CHECKING:
    from pathlib import Path

    from ..layers.layer import LayerFeatures

__all__ = ["part", "read", "recognises"]

# Configuration file -> weight file, both in a layer's folder.
VARIANTS = {
    "hyperparams.json": "checkpoints/final.safetensors",
    "config.json": "sae_weights.safetensors",
}


def part(files: DictionaryFiles, name: str, read: str | None, write: str | None) -> OneLayer:
    """The autoencoder in one folder; see `LayerByLayer.part`. `name` is the folder's configuration file."""
    folder, slash, file = name.rpartition("/")
    weights = f"{folder}{slash}{VARIANTS[file]}"
    config, config_path = files.json(name), files.path(name)
    apply_fields("llama_scope", config, config_path)
    hooks = layer_hooks(files, _stated_hooks(config, config_path), read, write)
    layer = hooks.layer
    size, d_in = require_shapes(files, weights, {"encoder.weight": (None, None)})["encoder.weight"]
    expected: dict[str, tuple[int | None, ...]] = {"encoder.bias": (size,), "decoder.weight": (None, size)}
    # The two variants differ in the threshold: one number in the configuration, or a tensor of logarithms.
    is_scalar = file == "hyperparams.json"
    if not is_scalar:
        expected["log_jumprelu_threshold"] = (size,)
    d_out = require_shapes(files, weights, expected)["decoder.weight"][0]
    shapes = require_shapes(files, weights, {}, {"decoder.bias": (d_out,)})
    apply_fields("llama_scope tensors", shapes, files.path(weights))
    norm = (config.get("dataset_average_activation_norm") or {}).get("in")
    if norm is None and is_scalar:
        raise DictionaryError(
            f"expected the mean norm of inputs as dataset_average_activation_norm.in in {config_path}, found "
            "none; fetch the dictionary again"
        )
    # The autoencoder was trained on inputs scaled from this mean norm to sqrt(d_in).
    gain = (
        1.0 if norm is None else d_in**0.5 / to_float(norm, "dataset_average_activation_norm.in", config_path)
    )
    threshold = (
        to_float(config.get("jump_relu_threshold"), "jump_relu_threshold", config_path) if is_scalar else 0.0
    )

    def open_layer() -> LayerFeatures:
        import torch

        from ..layers.activations import JumpReLU
        from ..layers.layer import LayerFeatures

        tensors = files.tensors(weights)
        thresholds = (
            torch.tensor(threshold * gain) if is_scalar else tensors["log_jumprelu_threshold"].float().exp()
        )
        return LayerFeatures(
            layer=layer,
            W_enc=tensors["encoder.weight"],
            W_dec={layer: tensors["decoder.weight"].T},
            activation=JumpReLU(thresholds, rectified=True),
            b_enc=tensors["encoder.bias"],
            b_dec=tensors.get("decoder.bias"),
            gain=gain,
        )

    return OneLayer(
        where=folder or name,
        hooks=hooks,
        n_features=size,
        d_in=d_in,
        d_out=d_out,
        files=(weights,),
        open=open_layer,
        model_name=config.get("model_name"),
        settings={"threshold": threshold, "gain": gain},
    )


FORMAT = LayerByLayer("llama_scope", lambda files: files_beside(files, VARIANTS), part)
recognises, read = FORMAT.recognises, FORMAT.read


def _stated_hooks(config: dict[str, Any], config_path: Path) -> StatedHooks:
    """Hook points at hook_point_in and hook_point_out of the configuration; None for an absent key."""
    names = [config.get(f"hook_point_{end}") for end in ("in", "out")]
    if not all(name is None or isinstance(name, str) for name in names):
        raise DictionaryError(
            f"expected texts as hook_point_in and hook_point_out in {config_path}, found {names}; correct "
            "the file"
        )
    return StatedHooks(layer_in(names[0]), *names)
