"""A dictionary in memory, of features that were just trained: to be used, measured, exported.

Border: features by layer and their settings; files are export.py's.
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
"""Kind -> the format (of export.py) that says all of what training makes."""


def as_dictionary(
    layers: Mapping[int, LayerFeatures],
    settings: TrainingSettings,
    *,
    model_name: str | None,
    name: str = "trained",
) -> Dictionary:
    """Features as a dictionary; its identity is their weights' and where they read and write.

    layers: as `Training.layers` gives them. model_name: of the model whose activations these were.
    """
    first = next(iter(layers.values()))
    layout = DictionaryLayout(
        format="memory",
        kind=settings.kind,
        read=settings.read,
        write=settings.writes,
        layers=tuple(sorted(layers)),
        targets={layer: it.targets for layer, it in sorted(layers.items())},
        n_features=first.n_features,
        d_in=first.W_enc.shape[1],
        d_out=first.W_dec[first.layer].shape[1],
        files=(),
        model_name=model_name,
        has_skip=first.W_skip is not None,
    )

    def content() -> dict[str, dict[str, dict[str, str]]]:
        return {"weights": {str(layer): _content(it) for layer, it in sorted(layers.items())}}

    return Dictionary(DictionaryFiles(name, Path()), layout, layers.__getitem__, content)


def _content(features: LayerFeatures) -> dict[str, str]:
    """Digest of every tensor of a layer, and what its activation function is."""
    tensors: dict[str, Tensor | None] = {"W_enc": features.W_enc, "b_enc": features.b_enc}
    tensors |= {"b_dec": features.b_dec, "W_skip": features.W_skip}
    tensors |= {f"W_dec.{target}": rows for target, rows in features.W_dec.items()}
    how = vars(features.activation)
    tensors |= {f"activation.{name}": value for name, value in how.items() if hasattr(value, "numpy")}
    found = {name: array_digest(value.numpy()) for name, value in tensors.items() if value is not None}
    plain = {name: value for name, value in how.items() if not hasattr(value, "numpy")}
    return found | {"activation": f"{type(features.activation).__name__} {sorted(plain.items())}"}
