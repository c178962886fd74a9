"""Newly trained features as a `Dictionary` in memory, for use, measurements and export.

Border: features by layer and their settings; export.py writes files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ....store.digest import array_digest
from ..dictionary import Dictionary
from ..layers.files import DictionaryFiles
from ..layers.layout import DictionaryLayout

if TYPE_CHECKING:
    from torch import Tensor

    from ..layers.layer import LayerFeatures
    from .settings import TrainingSettings

__all__ = ["FORMATS", "as_dictionary"]

FORMATS = {"sae": "saelens", "plt": "circuit_tracer", "clt": "circuit_tracer"}
"""For each kind of dictionary, an export format that can hold whatever training makes."""


def as_dictionary(
    layers: Mapping[int, LayerFeatures],
    settings: TrainingSettings,
    *,
    model_name: str | None,
) -> Dictionary:
    """Trained features as a `Dictionary`, whose identity is a digest of the weights and hook points.

    Arguments:
        layers: Trained features by layer, from `Training.layers`.
        settings: Settings of the training.
        model_name: Name of the model whose activations it was trained on; None if unknown.
    """
    features = next(iter(layers.values()))
    layout = DictionaryLayout(
        format="memory",
        kind=settings.kind,
        read=settings.read,
        write=settings.writes,
        layers=tuple(sorted(layers)),
        targets={layer: layer_features.targets for layer, layer_features in sorted(layers.items())},
        n_features=features.n_features,
        d_in=features.W_enc.shape[1],
        d_out=features.W_dec[features.layer].shape[1],
        files=(),
        model_name=model_name,
        has_skip=features.W_skip is not None,
    )

    def content() -> dict[str, dict[str, dict[str, str]]]:
        return {
            "weights": {
                str(layer): _weight_digests(layer_features)
                for layer, layer_features in sorted(layers.items())
            }
        }

    # No files: the digest of the weights, computed at each use, is the identity.
    return Dictionary(DictionaryFiles("trained", Path()), layout, layers.__getitem__, content)


def _weight_digests(features: LayerFeatures) -> dict[str, str]:
    """Digest of every tensor of a layer by name; "activation" is a text with its class and its numbers."""
    tensors: dict[str, Tensor | None] = {"W_enc": features.W_enc, "b_enc": features.b_enc}
    tensors |= {"b_dec": features.b_dec, "W_skip": features.W_skip}
    tensors |= {f"W_dec.{target}": rows for target, rows in features.W_dec.items()}
    parameters = vars(features.activation)
    tensors |= {f"activation.{name}": value for name, value in parameters.items() if hasattr(value, "numpy")}
    digests = {name: array_digest(value.numpy()) for name, value in tensors.items() if value is not None}
    # Numbers such as k enter the identity as text, tensors as digests.
    plain = {name: value for name, value in parameters.items() if not hasattr(value, "numpy")}
    return digests | {"activation": f"{type(features.activation).__name__} {sorted(plain.items())}"}
