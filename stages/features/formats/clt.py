"""Cross-layer transcoders in the format of circuit-tracer: an encoder and a decoder file per layer.

W_enc_{l}: W_enc_{l} [feature, hidden], b_enc_{l}, b_dec_{l} of the output of layer l, and threshold_{l} for a
JumpReLU. W_dec_{l}: W_dec_{l} [feature, target, hidden]; target j is layer l + j. All layers are JumpReLU if
layer 0 has a threshold, else ReLU.
"""

from __future__ import annotations

import re

from ....store.errors import DictionaryError
from ..layers.files import CONFIG_YAML, DictionaryFiles
from ..layers.layer import LayerFeatures
from ..layers.layout import DictionaryLayout, Opened
from .fields import apply_fields
from .layered import hooks_of, numbered, require_kind, require_shapes, scan_of

__all__ = ["read", "recognises"]

_ENCODER = r"W_enc_(\d{1,9})\.safetensors"


def recognises(files: DictionaryFiles) -> bool:
    """Whether the root folder holds files named W_enc_{layer}.safetensors."""
    return any(re.fullmatch(_ENCODER, name) for name in files.listing)


def read(
    files: DictionaryFiles,
    *,
    read: str | None = None,
    write: str | None = None,
) -> Opened:
    """Layout of the cross-layer transcoder; the shapes in all files are checked, no weights are read.

    Arguments:
        files: Files of the dictionary.
        read: Hook point that features read; None: the one that config.yaml names.
        write: Hook point that features write to; None: the one that config.yaml names.

    Raises:
        DictionaryError: A file or tensor is missing, or shapes do not fit together.
    """
    apply_fields("clt", files.yaml, files.path(CONFIG_YAML))
    require_kind(files, "cross_layer_transcoder")
    layers = numbered(files, _ENCODER)
    read_kind, write_kind = hooks_of(files, read, write)
    # The encoder of layer 0 states sizes and activation, which all other layers must share.
    first_shapes = require_shapes(files, "W_enc_0.safetensors", {"W_enc_0": (None, None)})
    n_features, width = first_shapes["W_enc_0"]
    has_threshold = "threshold_0" in first_shapes
    for layer in layers:
        expected = {
            f"W_enc_{layer}": (n_features, width),
            f"b_enc_{layer}": (n_features,),
            f"b_dec_{layer}": (width,),
        }
        expected |= {f"threshold_{layer}": (n_features,)} if has_threshold else {}
        encoders = require_shapes(files, f"W_enc_{layer}.safetensors", expected)
        if f"W_dec_{layer}.safetensors" not in files.listing:
            raise DictionaryError(
                f"expected the decoder file W_dec_{layer}.safetensors beside W_enc_{layer}.safetensors in "
                f"{files.directory}, found none; fetch the dictionary again"
            )
        # Layer l writes to itself and all later layers.
        decoder = {f"W_dec_{layer}": (n_features, len(layers) - layer, width)}
        decoders = require_shapes(files, f"W_dec_{layer}.safetensors", decoder)
        for part, shapes in (("enc", encoders), ("dec", decoders)):
            # Tensor names contain the layer; the table of fields does not.
            unnumbered = {name.removesuffix(f"_{layer}"): shape for name, shape in shapes.items()}
            apply_fields("clt tensors", unnumbered, files.path(f"W_{part}_{layer}.safetensors"))
    layout = DictionaryLayout(
        format="clt",
        kind="clt",
        read=read_kind,
        write=write_kind,
        layers=layers,
        targets={layer: tuple(range(layer, len(layers))) for layer in layers},
        n_features=n_features,
        d_in=width,
        d_out=width,
        files=tuple(f"W_{part}_{layer}.safetensors" for part in ("enc", "dec") for layer in layers),
        model_name=files.yaml.get("model_name"),
        scan=scan_of(files),
    )

    def open_layer(layer: int) -> LayerFeatures:
        from ..layers.activations import JumpReLU, ReLU

        encoder = files.tensors(f"W_enc_{layer}.safetensors")
        decoder = files.tensors(f"W_dec_{layer}.safetensors")[f"W_dec_{layer}"]
        return LayerFeatures(
            layer=layer,
            W_enc=encoder[f"W_enc_{layer}"],
            W_dec={layer + j: decoder[:, j] for j in range(decoder.shape[1])},
            activation=JumpReLU(encoder[f"threshold_{layer}"]) if has_threshold else ReLU(),
            b_enc=encoder[f"b_enc_{layer}"],
            b_dec=encoder[f"b_dec_{layer}"],
        )

    return Opened(files, layout, open_layer)
