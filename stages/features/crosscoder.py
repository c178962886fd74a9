"""Crosscoders: one set of features for several places - layers of a model, or models - and their differences.

    f = activation(sum over places W_enc[p] x[p] + b),   x[p] ~ W_dec[p] f + b_dec[p]

(Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing"). A feature that one
model has and the other has not is written to one only: the relative norm of its decoders tells.

Files are `config.json` and `model.safetensors`, tensors named and shaped as `CrossCoder` of
dictionary_learning has them, and `threshold` beside them where the activation is JumpReLU. Opened by
`Dictionary.from_pretrained` they are a dictionary as any other (formats/crosscoder.py).

Border: rows of states in, features out; training is training/'s, which joins the places to one row.

Axes: place, feature, width; rows [row, place, width].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...pipeline.ambient import plain_torch
from ...store.errors import ConfigError, DictionaryError
from ...store.exchange.outside import json_object, require_content
from ..forward.architectures.points import HookPoint
from .layers.layout import CrosscoderPlace, models_of

if TYPE_CHECKING:
    import torch
    import xarray as xr
    from torch import Tensor

    from .layers.activations import Activation
    from .layers.layer import LayerFeatures

__all__ = ["CONFIG", "EXCLUSIVE", "KIND", "WEIGHTS", "Crosscoder", "CrosscoderPlace", "place_figures"]

WEIGHTS, CONFIG, KIND = "model.safetensors", "config.json", "mizarr crosscoder"
EXCLUSIVE = 0.1
"""Relative norm up to which a feature is one model's alone, and from 1 - which on the other's (Minder et al.
2025, "Overcoming Sparsity Artifacts in Crosscoders")."""


@dataclass(frozen=True, eq=False)
class Crosscoder:
    """W_enc, W_dec [place, feature, width]; b_enc [feature]; b_dec [place, width]; all float32, on states as
    they are stored.
    """

    places: tuple[CrosscoderPlace, ...]
    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    activation: Activation

    @classmethod
    def of_joined(cls, features: LayerFeatures, places: Iterable[CrosscoderPlace]) -> Self:
        """Of features that read and write the rows of all places, one behind the other."""
        there = tuple(places)
        W_enc, W_dec, b_dec = features.W_enc, features.W_dec[features.layer], features.b_dec
        assert features.b_enc is not None
        assert b_dec is not None
        return cls(
            there,
            W_enc.unflatten(1, (len(there), -1)).transpose(0, 1).contiguous(),
            features.b_enc,
            W_dec.unflatten(1, (len(there), -1)).transpose(0, 1).contiguous(),
            b_dec.unflatten(0, (len(there), -1)).contiguous(),
            features.activation,
        )

    @property
    def n_features(self) -> int:
        """Features, of all places together."""
        return len(self.b_enc)

    @plain_torch()
    def encode(self, rows: Tensor) -> Tensor:
        """Activations [row, feature] of states [row, place, width]; DictionaryError for another shape."""
        if rows.shape[1:] != (len(self.places), self.W_enc.shape[2]):
            raise DictionaryError(
                f"expected states [row, {len(self.places)} places, {self.W_enc.shape[2]}], found "
                f"{list(rows.shape)}; the places are {', '.join(map(str, self.places))}"
            )
        return self._features.encode(rows.flatten(1))

    @cached_property
    def _features(self) -> LayerFeatures:
        return self.features()

    def features(self, device: torch.device | str = "cpu") -> LayerFeatures:
        """The same features on the states of all places in one row [row, place * width], as a dictionary's:
        of the last layer they read, written to the layers of the first model.
        """
        from .layers.layer import LayerFeatures

        own = [number for number, model in enumerate(models_of(self.places)) if model == 0]
        layers = [HookPoint.parse(self.places[number].hook).layer or 0 for number in own]
        last = layers.index(max(layers))
        return LayerFeatures(
            layer=layers[last],
            W_enc=self.W_enc.transpose(1, 2).flatten(0, 1).T,
            W_dec={layer: self.W_dec[number] for layer, number in zip(layers, own, strict=True)},
            activation=self.activation,
            b_enc=self.b_enc,
            b_dec=self.b_dec[own[last]],
            device=device,
        )

    @plain_torch()
    def decode(self, activations: Tensor) -> Tensor:
        """States [row, place, width] of activations [row, feature]."""
        import torch

        return torch.einsum("rf,pfw->rpw", activations, self.W_dec) + self.b_dec

    def norms(self) -> Tensor:
        """Norm of what each feature writes, in units of the spread of the states there [place, feature]."""
        found: Tensor = self._scaled().norm(dim=2)
        return found

    def relative_norm(self) -> Tensor:
        """Share of the second in the norms of two models, or of two places of one [feature]: 0 is written to
        the first alone, 1 to the second alone, 1/2 to both alike. DictionaryError where there are not two.
        """
        first, second = (each.norm(dim=1) for each in self._two())
        found: Tensor = second / (first + second).clamp(min=1e-12)
        return found

    def decoder_cosine(self) -> Tensor:
        """Cosine of what each feature writes to the same two [feature]."""
        import torch

        return torch.cosine_similarity(*self._two(), dim=1)

    def _two(self) -> tuple[Tensor, Tensor]:
        """What is written to each of two models, all places in a row, or to two places [feature, width]."""
        models = models_of(self.places)
        groups = models if max(models) else tuple(range(len(self.places)))
        if max(groups) != 1:
            raise DictionaryError(
                f"expected two models, or two places of one, found {', '.join(map(str, self.places))}; "
                "compare `norms()`"
            )
        scaled = self._scaled()
        first, second = (
            scaled[[n for n, group in enumerate(groups) if group == one]].transpose(0, 1).flatten(1)
            for one in (0, 1)
        )
        return first, second

    def _scaled(self) -> Tensor:
        """What features write, in units of the spread of the states there [place, feature, width]."""
        import torch

        return self.W_dec * torch.tensor([place.scale for place in self.places])[:, None, None]

    # -- files

    def save(self, folder: str | Path) -> Path:
        """Write a new folder; returns it. Raises ConfigError where something is there already."""
        from safetensors.torch import save_file

        from .layers.activations import JumpReLU, TopK

        folder = Path(folder)
        if folder.exists():
            raise ConfigError(f"expected a new folder, found {str(folder)!r} there already; name another")
        hidden = folder.with_name(f".{folder.name}.part")
        hidden.mkdir(parents=True, exist_ok=True)
        tensors = {
            "encoder.weight": self.W_enc.transpose(1, 2),
            "encoder.bias": self.b_enc,
            "decoder.weight": self.W_dec,
            "decoder.bias": self.b_dec,
        }
        said: dict[str, Any] = {
            "kind": KIND,
            "activation_dim": self.W_dec.shape[2],
            "dict_size": self.n_features,
            "num_layers": len(self.places),
            "places": [asdict(place) for place in self.places],
            "activation": type(self.activation).__name__,
        }
        if isinstance(self.activation, JumpReLU):
            tensors["threshold"] = self.activation.threshold
        if isinstance(self.activation, TopK):
            said["k"] = self.activation.k
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, hidden / WEIGHTS)
        (hidden / CONFIG).write_text(json.dumps(said, indent=1) + "\n", "utf-8")
        hidden.rename(folder)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """What `save` wrote; DictionaryError for a folder that holds none, or tensors that do not fit."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            said = json_object(folder / CONFIG, DictionaryError)
            require_content(folder / WEIGHTS, DictionaryError)
            held = load_file(folder / WEIGHTS)
            places = tuple(CrosscoderPlace(**place) for place in said["places"])
            found = cls(
                places,
                held["encoder.weight"].transpose(1, 2),
                held["encoder.bias"],
                held["decoder.weight"],
                held["decoder.bias"],
                _activation(said, held),
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, SafetensorError) as error:
            raise DictionaryError(
                f"expected a crosscoder in {folder} ({CONFIG} and {WEIGHTS}), found none ({error}); name the "
                "folder that a training wrote"
            ) from error
        size = (len(places), found.n_features, found.b_dec.shape[-1])
        if not found.W_enc.shape == found.W_dec.shape == size:
            raise DictionaryError(
                f"expected encoders and decoders of shape {list(size)} in {folder}, found "
                f"{list(found.W_enc.shape)} and {list(found.W_dec.shape)}; write it again"
            )
        return found


def _activation(said: Mapping[str, Any], held: Mapping[str, Tensor]) -> Activation:
    from .layers.activations import JumpReLU, ReLU, TopK

    name = said["activation"]
    if name == "JumpReLU":
        return JumpReLU(held["threshold"])
    if name not in ("TopK", "ReLU"):
        raise ValueError(f"expected an activation among ReLU, TopK, JumpReLU, found {name!r}")
    return TopK(said["k"]) if name == "TopK" else ReLU()


def place_figures(crosscoder: Crosscoder, blocks: Iterable[Tensor]) -> xr.Dataset:
    """How well each place is reconstructed, and of two models, or places, which features are one's alone.

    blocks: states [row, place, width], one after the other.
    Returns fvu [place]: fraction of variance unexplained; density [feature]: share of rows in which it is
    active; norm [place, feature]; of two models, or places, relative_norm and decoder_cosine [feature], and
    how many of the features that are active at all are exclusive to the first, to the second, or neither.
    Features that never fire say nothing of the models: their decoders are where training left them.
    """
    import torch
    import xarray as xr

    count = len(crosscoder.places)
    error, squares, rows = torch.zeros(count).double(), torch.zeros(count).double(), 0
    fired = torch.zeros(crosscoder.n_features, dtype=torch.int64)
    total: Tensor | float = 0.0
    for block in blocks:
        active = crosscoder.encode(block)
        wide, made = block.double(), crosscoder.decode(active).double()
        error += (made - wide).square().sum((0, 2))
        squares += wide.square().sum((0, 2))
        total = total + wide.sum(0)
        fired += (active != 0).sum(0)
        rows += len(block)
    if not rows or isinstance(total, float):
        raise DictionaryError("expected states to measure on, found no rows; hold some prompts out")
    variance = squares - total.square().sum(1) / rows
    found = xr.Dataset(
        {
            "fvu": ("place", (error / variance).numpy()),
            "density": ("feature", (fired / rows).numpy()),
            "norm": (("place", "feature"), crosscoder.norms().numpy()),
        },
        {"place": [str(place) for place in crosscoder.places]},
        {"rows": rows},
    )
    if count != 2 and max(models_of(crosscoder.places)) != 1:
        return found
    relative, alive = crosscoder.relative_norm(), fired > 0
    found["relative_norm"] = ("feature", relative.numpy())
    found["decoder_cosine"] = ("feature", crosscoder.decoder_cosine().numpy())
    first, second = relative <= EXCLUSIVE, relative >= 1 - EXCLUSIVE
    found.attrs |= {
        "alive": int(alive.sum()),
        "first_alone": int((first & alive).sum()),
        "second_alone": int((second & alive).sum()),
    }
    return found
