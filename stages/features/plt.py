"""Per-layer transcoders as circuit-tracer writes them: one file per layer.

layer_{l}: W_enc [feature, hidden], b_enc, W_dec [feature, hidden], b_dec, optionally W_skip [out, in] (its
output is x W_skip') and activation_function.threshold (JumpReLU). config.yaml may say `activation: topk`
with `k`, or relu. Negative values among the k largest stay, as in circuit-tracer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...store.errors import DictionaryError
from .dictionary import Dictionary, Layout
from .files import DictionaryFiles
from .layer import LayerFeatures
from .layered import hooks_of, numbered, require_shapes, scan_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .activations import Activation

__all__ = ["read", "recognises"]

_LAYER = r"layer_(\d+)\.safetensors"
_THRESHOLD = "activation_function.threshold"
ACTIVATIONS = ("topk", "relu", "jumprelu")


def recognises(files: DictionaryFiles) -> bool:
    """Whether there is a file per layer at the root."""
    return any(re.fullmatch(_LAYER, name) for name in files.listing)


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
    device: torch.device | str = "cpu",
) -> Dictionary:
    """The transcoders, with every header checked and no weight read."""
    layers = numbered(files, _LAYER)
    kinds = hooks_of(files, read, write)
    name, k = _activation(files)
    size, d_in = require_shapes(files, "layer_0.safetensors", {"W_enc": (None, None)})["W_enc"]
    _, d_out = require_shapes(files, "layer_0.safetensors", {"W_dec": (size, None)})["W_dec"]
    expected = {"W_enc": (size, d_in), "b_enc": (size,), "W_dec": (size, d_out), "b_dec": (d_out,)}
    if name == "jumprelu":
        expected[_THRESHOLD] = (size,)
    has_skip = False
    for layer in layers:
        optional = {"W_skip": (d_out, d_in), _THRESHOLD: (size,)}
        found = require_shapes(files, f"layer_{layer}.safetensors", expected, optional)
        has_skip |= "W_skip" in found
    layout = Layout(
        format="plt",
        kind="plt",
        read=kinds[0],
        write=kinds[1],
        layers=layers,
        targets={layer: (layer,) for layer in layers},
        n_features=size,
        d_in=d_in,
        d_out=d_out,
        files=tuple(f"layer_{layer}.safetensors" for layer in layers),
        model_name=files.yaml.get("model_name"),
        scan=scan_of(files),
        has_skip=has_skip,
    )

    def open_layer(layer: int) -> LayerFeatures:
        found = files.tensors(f"layer_{layer}.safetensors")
        return LayerFeatures(
            layer=layer,
            W_enc=found["W_enc"],
            W_dec={layer: found["W_dec"]},
            activation=_made(name, k, found),
            b_enc=found["b_enc"],
            b_dec=found["b_dec"],
            W_skip=found.get("W_skip"),
            device=device,
        )

    return Dictionary(files, layout, open_layer)


def _activation(files: DictionaryFiles) -> tuple[str | None, int]:
    """(name or None where the tensors decide, k) as config.yaml says."""
    name, k = files.yaml.get("activation"), files.yaml.get("k", 0)
    if name is not None and name not in ACTIVATIONS:
        raise DictionaryError(f"expected activation to be one of {', '.join(ACTIVATIONS)}, found {name!r}")
    if name == "topk" and not (isinstance(k, int) and k > 0):
        raise DictionaryError(f"expected a positive k beside activation: topk in config.yaml, found {k!r}")
    return name, k


def _made(name: str | None, k: int, tensors: dict[str, Tensor]) -> Activation:
    from .activations import JumpReLU, ReLU, TopK

    if name == "topk":
        return TopK(k, rectified=False)
    if name == "relu" or _THRESHOLD not in tensors:
        return ReLU()
    return JumpReLU(tensors[_THRESHOLD])
