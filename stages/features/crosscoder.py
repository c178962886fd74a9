"""Crosscoders: one set of features for several places - layers of a model, or models - and their differences.

    f = activation(sum over places W_enc[p] x[p] + b),   x[p] ~ W_dec[p] f + b_dec[p]

(Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing"). A feature that one
model has and the other has not is written to one only: the relative norm of its decoders tells.

Files are `config.json` and `model.safetensors`, tensors named and shaped as `CrossCoder` of
dictionary_learning has them, and `threshold` beside them where the activation is JumpReLU.

Border: rows of states in, features out; training is training/'s, which joins the places to one row.

Axes: place, feature, width; rows [row, place, width].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...store.errors import ConfigError, DictionaryError
from .layers.activations import JumpReLU, ReLU, TopK

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from .layers.activations import Activation
    from .layers.layer import LayerFeatures

__all__ = ["Crosscoder", "Place", "place_figures"]

WEIGHTS, CONFIG, KIND = "model.safetensors", "config.json", "mizarr crosscoder"
EXCLUSIVE = 0.1
"""Relative norm up to which a feature is one model's alone, and from 1 - which on the other's (Minder et al.
2025, "Overcoming Sparsity Artifacts in Crosscoders")."""


@dataclass(frozen=True)
class Place:
    """Where a crosscoder reads and writes. scale: by which states there are as large as at other places."""

    model: str
    hook: str
    scale: float

    def __str__(self) -> str:
        return f"{self.model} {self.hook}"


@dataclass(frozen=True, eq=False)
class Crosscoder:
    """W_enc, W_dec [place, feature, width]; b_enc [feature]; b_dec [place, width]; all float32, on states as
    they are stored.
    """

    places: tuple[Place, ...]
    W_enc: Tensor
    b_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    activation: Activation

    @classmethod
    def of_joined(cls, features: LayerFeatures, places: Iterable[Place]) -> Self:
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

    def encode(self, rows: Tensor) -> Tensor:
        """Activations [row, feature] of states [row, place, width]; DictionaryError for another shape."""
        import torch

        if rows.shape[1:] != (len(self.places), self.W_enc.shape[2]):
            raise DictionaryError(
                f"expected states [row, {len(self.places)} places, {self.W_enc.shape[2]}], found "
                f"{list(rows.shape)}; the places are {', '.join(map(str, self.places))}"
            )
        return self.activation(torch.einsum("rpw,pfw->rf", rows.float(), self.W_enc) + self.b_enc)

    def decode(self, activations: Tensor) -> Tensor:
        """States [row, place, width] of activations [row, feature]."""
        import torch

        return torch.einsum("rf,pfw->rpw", activations, self.W_dec) + self.b_dec

    def norms(self) -> Tensor:
        """Norm of what each feature writes, in units of the spread of the states there [place, feature]."""
        import torch

        scales = torch.tensor([place.scale for place in self.places])
        found: Tensor = self.W_dec.norm(dim=2) * scales[:, None]
        return found

    def relative_norm(self, one: int = 0, other: int = 1) -> Tensor:
        """Share of the second place in the norms at two places [feature]: 0 is written to the first alone, 1
        to the second alone, 1/2 to both alike.
        """
        norms = self.norms()
        both: Tensor = norms[one] + norms[other]
        return norms[other] / both.clamp(min=1e-12)

    def decoder_cosine(self, one: int = 0, other: int = 1) -> Tensor:
        """Cosine of what each feature writes to two places [feature]."""
        import torch

        return torch.cosine_similarity(self.W_dec[one], self.W_dec[other], dim=1)

    # -- files

    def save(self, folder: str | Path) -> Path:
        """Write a new folder; returns it. Raises ConfigError where something is there already."""
        from safetensors.torch import save_file

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
            said = json.loads((folder / CONFIG).read_text("utf-8"))
            held = load_file(folder / WEIGHTS)
            places = tuple(Place(**place) for place in said["places"])
            found = cls(
                places,
                held["encoder.weight"].transpose(1, 2).contiguous(),
                held["encoder.bias"],
                held["decoder.weight"],
                held["decoder.bias"],
                _activation(said, held),
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
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
    if said["activation"] == "JumpReLU":
        return JumpReLU(held["threshold"])
    return TopK(said["k"]) if said["activation"] == "TopK" else ReLU()


def place_figures(crosscoder: Crosscoder, blocks: Iterable[Tensor]) -> xr.Dataset:
    """How well each place is reconstructed, and of two places which features are one's alone.

    blocks: states [row, place, width], one after the other.
    Returns fvu [place]: fraction of variance unexplained; density [feature]: share of rows in which it is
    active; norm [place, feature]; of two places relative_norm and decoder_cosine [feature], and how many of
    the features that are active at all are exclusive to the first, to the second, or neither. Features that
    never fire say nothing of the models: their decoders are where training left them.
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
    if count != 2:
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
