"""A dictionary in memory made of newly trained features: for use, measurements and export.

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
"""Export format for each kind, able to express every dictionary that training makes."""


def as_dictionary(
    layers: Mapping[int, LayerFeatures],
    settings: TrainingSettings,
    *,
    model_name: str | None,
) -> Dictionary:
    """Trained features as a dictionary; its identity is the digest of weights and hook points.

    Arguments:
        layers: Features by layer, from `Training.layers`.
        settings: Settings of the training.
        model_name: Name of the model whose activations were used.
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
                str(layer): _content(layer_features) for layer, layer_features in sorted(layers.items())
            }
        }

    # No files: the digest of the weights, computed at each use, is the identity.
    return Dictionary(DictionaryFiles("trained", Path()), layout, layers.__getitem__, content)


def _content(features: LayerFeatures) -> dict[str, str]:
    """Digest of every tensor of a layer, and a text for its activation function."""
    tensors: dict[str, Tensor | None] = {"W_enc": features.W_enc, "b_enc": features.b_enc}
    tensors |= {"b_dec": features.b_dec, "W_skip": features.W_skip}
    tensors |= {f"W_dec.{target}": rows for target, rows in features.W_dec.items()}
    parameters = vars(features.activation)
    tensors |= {f"activation.{name}": value for name, value in parameters.items() if hasattr(value, "numpy")}
    digests = {name: array_digest(value.numpy()) for name, value in tensors.items() if value is not None}
    # Numbers such as k enter the identity as text, tensors as digests.
    plain = {name: value for name, value in parameters.items() if not hasattr(value, "numpy")}
    return digests | {"activation": f"{type(features.activation).__name__} {sorted(plain.items())}"}
