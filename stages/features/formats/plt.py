"""Per-layer transcoders in the format of circuit-tracer: one file per layer.

layer_{l}: W_enc [feature, hidden], b_enc, W_dec [feature, hidden], b_dec, optionally W_skip [out, in] (its
output is x W_skip') and activation_function.threshold (JumpReLU). config.yaml may state `activation: topk`
with `k`, or relu. TopK keeps negative values among the k largest, as in circuit-tracer, unless config.yaml
states `rectified: true`, which circuit-tracer ignores.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ....store.errors import DictionaryError
from ..layers.files import CONFIG_YAML, DictionaryFiles
from ..layers.layout import Opened
from .fields import apply_fields
from .layered import hooks_of, numbered, require_kind, require_shapes
from .single import LayerHooks, OneLayer, join

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers.activations import Activation
    from ..layers.layer import LayerFeatures

__all__ = ["part", "read", "recognises"]

_LAYER = r"layer_(\d{1,9})\.safetensors"
_THRESHOLD = "activation_function.threshold"
ACTIVATIONS = ("topk", "relu", "jumprelu")
"""Values that the entry `activation` of config.yaml may have."""
TOP_K = {"facebook/crv-8b-instruct-transcoders": 128}
"""k of TopK dictionaries on the hub whose config.yaml states neither TopK nor k, by repository name."""


def recognises(files: DictionaryFiles) -> bool:
    """Whether the root folder holds files named layer_{layer}.safetensors."""
    return any(re.fullmatch(_LAYER, name) for name in files.listing)


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """Layout of the transcoders of all layers; the shapes in all files are checked, no weights are read.

    Arguments:
        files: Files of the dictionary.
        read: Hook point that features read; None: the one that config.yaml names.
        write: Hook point that features write to; None: the one that config.yaml names.

    Raises:
        DictionaryError: A layer or tensor is missing, or shapes do not fit together.
    """
    apply_fields("plt", files.yaml, files.path(CONFIG_YAML))
    require_kind(files, "transcoder_set")
    kinds = hooks_of(files, read, write)
    parts = [
        part(files, f"layer_{layer}.safetensors", kinds[0], kinds[1], layer)
        for layer in numbered(files, _LAYER)
    ]
    return join(files, "plt", parts)


def part(files: DictionaryFiles, file: str, read: str, write: str, layer: int) -> OneLayer:
    """Description of one layer's transcoder, from the shapes in its file and from config.yaml.

    Arguments:
        files: Files of the dictionary.
        file: Name of the layer's safetensors file.
        read: Kind of the hook point that features read.
        write: Kind of the hook point that features write to.
        layer: Layer that the features read.
    """
    name, k = _stated_activation(files)
    # An entry of mizarr's own exports, which circuit-tracer ignores.
    rectified = bool(files.yaml.get("rectified", False))
    size, d_in = require_shapes(files, file, {"W_enc": (None, None)})["W_enc"]
    _, d_out = require_shapes(files, file, {"W_dec": (size, None)})["W_dec"]
    expected = {"b_enc": (size,), "b_dec": (d_out,)}
    if name == "jumprelu":
        expected[_THRESHOLD] = (size,)
    # Without a stated activation, the threshold decides between JumpReLU and ReLU.
    optional = {"W_skip": (d_out, d_in), _THRESHOLD: (size,)}
    shapes = require_shapes(files, file, expected, optional)
    apply_fields("plt tensors", shapes, files.path(file))
    has_skip = "W_skip" in shapes

    def open_layer() -> LayerFeatures:
        from ..layers.layer import LayerFeatures

        tensors = files.tensors(file)
        return LayerFeatures(
            layer=layer,
            W_enc=tensors["W_enc"],
            W_dec={layer: tensors["W_dec"]},
            activation=_activation_of(name, k, rectified, tensors),
            b_enc=tensors["b_enc"],
            b_dec=tensors["b_dec"],
            W_skip=tensors.get("W_skip"),
        )

    return OneLayer(
        where=file,
        hooks=LayerHooks(layer, read, write),
        n_features=size,
        d_in=d_in,
        d_out=d_out,
        files=(file,),
        open=open_layer,
        model_name=files.yaml.get("model_name"),
        has_skip=has_skip,
        settings={"activation": name, "k": k, "rectified": rectified},
    )


def _stated_activation(files: DictionaryFiles) -> tuple[str | None, int]:
    """(activation function, k of TopK or 0) as config.yaml states; (None, 0) if it states none."""
    name, k = files.yaml.get("activation"), files.yaml.get("k", 0)
    if name is None:
        # By prefix: a reference may end with a subfolder or a revision.
        k_of_repository = next(
            (k for repository, k in TOP_K.items() if files.name.startswith(repository)), None
        )
        name, k = (None, k) if k_of_repository is None else ("topk", k_of_repository)
    if name is not None and name not in ACTIVATIONS:
        raise DictionaryError(
            f"expected the entry activation of config.yaml in {files.directory} to be one of "
            f"{', '.join(ACTIVATIONS)}, found {name!r}; correct it"
        )
    if name == "topk" and not (isinstance(k, int) and k > 0):
        raise DictionaryError(
            f"expected a positive whole number as k beside 'activation: topk' in config.yaml in "
            f"{files.directory}, found {k!r}; add it"
        )
    return name, k


def _activation_of(name: str | None, k: int, rectified: bool, tensors: dict[str, Tensor]) -> Activation:
    """Activation function: as config.yaml states, else JumpReLU if there is a threshold, else ReLU."""
    from ..layers.activations import JumpReLU, ReLU, TopK

    if name == "topk":
        return TopK(k, rectified)
    if name == "relu" or _THRESHOLD not in tensors:
        return ReLU()
    return JumpReLU(tensors[_THRESHOLD], rectified)
