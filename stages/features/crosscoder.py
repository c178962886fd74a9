"""Crosscoders: one set of features for several places - layers of a model, or models - and their differences.

    f = activation(sum over places W_enc[p] x[p] + b),   x[p] ~ W_dec[p] f + b_dec[p]

(Lindsey et al. 2024, "Sparse Crosscoders for Cross-Layer Features and Model Diffing"). A feature that exists
in only one of two models is written only to that model, which the relative norm of its decoders shows.

Files are `config.json` and `model.safetensors`, with tensors named and shaped as in `CrossCoder` of
dictionary_learning, and `threshold` in addition if the activation is JumpReLU. `Dictionary.from_pretrained`
opens them like any other dictionary (formats/crosscoder.py).

Border: rows of states in, features out; training/ trains them, on the places joined to one row.

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
    import xarray as xr
    from torch import Tensor

    from .layers.activations import Activation
    from .layers.layer import LayerFeatures

__all__ = ["CONFIG", "EXCLUSIVE", "KIND", "WEIGHTS", "Crosscoder", "CrosscoderPlace", "place_figures"]

WEIGHTS, CONFIG, KIND = "model.safetensors", "config.json", "mizarr crosscoder"
"""Names of the two files, and the entry `kind` of config.json."""
EXCLUSIVE = 0.1
"""A feature with a relative norm up to this is exclusive to the first model, from 1 minus this on to the
second (Minder et al. 2025, "Overcoming Sparsity Artifacts in Crosscoders")."""


@dataclass(frozen=True, eq=False)
class Crosscoder:
    """Weights of a crosscoder, float32, that apply to states as they are stored."""

    places: tuple[CrosscoderPlace, ...]
    """Models and hook points that are read and written, in the order of the tensors."""
    W_enc: Tensor
    """Encoders [place, feature, width]."""
    b_enc: Tensor
    """Encoder bias [feature]."""
    W_dec: Tensor
    """Decoders [place, feature, width]."""
    b_dec: Tensor
    """Decoder bias [place, width]."""
    activation: Activation
    """Activation function, with thresholds if it is JumpReLU."""

    @classmethod
    def of_joined(cls, features: LayerFeatures, places: Iterable[CrosscoderPlace]) -> Self:
        """A crosscoder from features that read and write the states of all places joined to one row.

        Arguments:
            features: Features with one row [place * width], as training makes them.
            places: The places, in the order in which their states are joined.
        """
        place_list = tuple(places)
        W_enc, W_dec, b_dec = features.W_enc, features.W_dec[features.layer], features.b_dec
        assert features.b_enc is not None
        assert b_dec is not None
        return cls(
            place_list,
            W_enc.unflatten(1, (len(place_list), -1)).transpose(0, 1).contiguous(),
            features.b_enc,
            W_dec.unflatten(1, (len(place_list), -1)).transpose(0, 1).contiguous(),
            b_dec.unflatten(0, (len(place_list), -1)).contiguous(),
            features.activation,
        )

    @property
    def n_features(self) -> int:
        """Number of features, which all places share."""
        return len(self.b_enc)

    @plain_torch()
    def encode(self, rows: Tensor) -> Tensor:
        """Activations [row, feature] of states [row, place, width]; DictionaryError for another shape."""
        if rows.shape[1:] != (len(self.places), self.W_enc.shape[2]):
            raise DictionaryError(
                f"expected states [row, {len(self.places)} places, {self.W_enc.shape[2]}], found "
                f"{list(rows.shape)}; the places are {', '.join(map(str, self.places))}"
            )
        return self.features.encode(rows.flatten(1))

    @cached_property
    def features(self) -> LayerFeatures:
        """The crosscoder as plain features that read all places joined to one row [row, place * width].

        Layer number: the last layer that is read. Targets: the layers of the first model.
        """
        from .layers.layer import LayerFeatures

        first_model = [number for number, model in enumerate(models_of(self.places)) if model == 0]
        # Hook points outside the blocks, such as the embedding, count as layer 0.
        layers = [HookPoint.parse(self.places[number].hook).layer or 0 for number in first_model]
        last_place = layers.index(max(layers))
        return LayerFeatures(
            layer=layers[last_place],
            W_enc=self.W_enc.transpose(1, 2).flatten(0, 1).T,  # [feature, place * width]
            W_dec={layer: self.W_dec[number] for layer, number in zip(layers, first_model, strict=True)},
            activation=self.activation,
            b_enc=self.b_enc,
            b_dec=self.b_dec[first_model[last_place]],
        )

    @plain_torch()
    def decode(self, activations: Tensor) -> Tensor:
        """Reconstructed states [row, place, width] from activations [row, feature]."""
        import torch

        return torch.einsum("rf,pfw->rpw", activations, self.W_dec) + self.b_dec

    def norms(self) -> Tensor:
        """Decoder norms [place, feature], in units of the spread of the states at each place."""
        norms: Tensor = self._scaled().norm(dim=2)
        return norms

    def relative_norm(self) -> Tensor:
        """Second decoder norm divided by the sum of both, of two models or of two places of one model
        [feature].

        0: written only to the first, 1: only to the second, 1/2: equally to both. DictionaryError unless
        there are two.
        """
        norm_a, norm_b = (decoder.norm(dim=1) for decoder in self._decoder_pair())
        # The clamp gives 0 instead of NaN for features that write nothing.
        share: Tensor = norm_b / (norm_a + norm_b).clamp(min=1e-12)
        return share

    def decoder_cosine(self) -> Tensor:
        """Cosine similarity of each feature's two decoders [feature]."""
        import torch

        return torch.cosine_similarity(*self._decoder_pair(), dim=1)

    def _decoder_pair(self) -> tuple[Tensor, Tensor]:
        """Decoders [feature, width] of two models (all places side by side), or of one model's two places."""
        models = models_of(self.places)
        # One model: compare its two places; several models: all places of each together.
        groups = models if max(models) else tuple(range(len(self.places)))
        if max(groups) != 1:
            raise DictionaryError(
                f"expected two models, or two places of one, found {', '.join(map(str, self.places))}; "
                "compare `norms()`"
            )
        scaled = self._scaled()
        decoder_a, decoder_b = (
            scaled[[n for n, group in enumerate(groups) if group == side]].transpose(0, 1).flatten(1)
            for side in (0, 1)
        )
        return decoder_a, decoder_b

    def _scaled(self) -> Tensor:
        """Decoders in units of the spread of the states at each place [place, feature, width]."""
        import torch

        return self.W_dec * torch.tensor([place.scale for place in self.places])[:, None, None]

    # -- files

    def save(self, folder: str | Path) -> Path:
        """Write a new folder, and return it. ConfigError if it exists already."""
        from safetensors.torch import save_file

        from .layers.activations import JumpReLU, TopK

        folder = Path(folder)
        if folder.exists():
            raise ConfigError(f"expected a new folder, found {str(folder)!r} there already; name another")
        # Renamed when complete: a killed process leaves no folder that looks like a dictionary.
        hidden = folder.with_name(f".{folder.name}.part")
        hidden.mkdir(parents=True, exist_ok=True)
        tensors = {
            # dictionary_learning stores the encoder as [place, width, feature].
            "encoder.weight": self.W_enc.transpose(1, 2),
            "encoder.bias": self.b_enc,
            "decoder.weight": self.W_dec,
            "decoder.bias": self.b_dec,
        }
        config: dict[str, Any] = {
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
            config["k"] = self.activation.k
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, hidden / WEIGHTS)
        (hidden / CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
        hidden.rename(folder)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the folder that `save` wrote; DictionaryError if files are missing or tensors do not fit."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            config = json_object(folder / CONFIG, DictionaryError)
            require_content(folder / WEIGHTS, DictionaryError)
            tensors = load_file(folder / WEIGHTS)
            places = tuple(CrosscoderPlace(**place) for place in config["places"])
            crosscoder = cls(
                places,
                tensors["encoder.weight"].transpose(1, 2),
                tensors["encoder.bias"],
                tensors["decoder.weight"],
                tensors["decoder.bias"],
                _activation(config, tensors),
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, SafetensorError) as error:
            raise DictionaryError(
                f"expected a crosscoder in {folder} ({CONFIG} and {WEIGHTS}), found none ({error}); name the "
                "folder that a training wrote"
            ) from error
        size = (len(places), crosscoder.n_features, crosscoder.b_dec.shape[-1])
        # Shapes are checked after loading, as config.json and tensors may come from different trainings.
        if not crosscoder.W_enc.shape == crosscoder.W_dec.shape == size:
            raise DictionaryError(
                f"expected encoders and decoders of shape {list(size)} in {folder}, found "
                f"{list(crosscoder.W_enc.shape)} and {list(crosscoder.W_dec.shape)}; write it again"
            )
        return crosscoder


def _activation(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Activation:
    """Activation function that config.json names; ValueError for an unknown one."""
    from .layers.activations import JumpReLU, ReLU, TopK

    name = config["activation"]
    if name == "JumpReLU":
        return JumpReLU(tensors["threshold"])
    if name not in ("TopK", "ReLU"):
        raise ValueError(f"expected an activation among ReLU, TopK, JumpReLU, found {name!r}")
    return TopK(config["k"]) if name == "TopK" else ReLU()


def place_figures(crosscoder: Crosscoder, blocks: Iterable[Tensor]) -> xr.Dataset:
    """Reconstruction error of each place, and for two models or places the number of exclusive features.

    Features that never fire are not counted as exclusive: training left their decoders near the start.

    Arguments:
        crosscoder: The crosscoder.
        blocks: Blocks of states [row, place, width].

    Returns:
        fvu [place]: fraction of variance unexplained. density [feature]: share of rows in which a feature is
        active. norm [place, feature]: decoder norms. For two models or places also relative_norm and
        decoder_cosine [feature], and the attributes alive, first_alone, second_alone: number of features that
        fire at all, and of those that are exclusive to each side.

    Raises:
        DictionaryError: There are no rows.
    """
    import torch
    import xarray as xr

    count = len(crosscoder.places)
    error, squares, rows = torch.zeros(count).double(), torch.zeros(count).double(), 0
    fired = torch.zeros(crosscoder.n_features, dtype=torch.int64)
    total: Tensor | float = 0.0
    for block in blocks:
        active = crosscoder.encode(block)
        states, rebuilt = block.double(), crosscoder.decode(active).double()
        error += (rebuilt - states).square().sum((0, 2))
        squares += states.square().sum((0, 2))
        total = total + states.sum(0)
        fired += (active != 0).sum(0)
        rows += len(block)
    if not rows or isinstance(total, float):
        raise DictionaryError("expected states to measure on, found no rows; hold some prompts out")
    # Sums are float64: the variance is a small difference of large sums.
    variance = squares - total.square().sum(1) / rows
    figures = xr.Dataset(
        {
            "fvu": ("place", (error / variance).numpy()),
            "density": ("feature", (fired / rows).numpy()),
            "norm": (("place", "feature"), crosscoder.norms().numpy()),
        },
        {"place": [str(place) for place in crosscoder.places]},
        {"rows": rows},
    )
    if count != 2 and max(models_of(crosscoder.places)) != 1:
        return figures
    relative, alive = crosscoder.relative_norm(), fired > 0
    figures["relative_norm"] = ("feature", relative.numpy())
    figures["decoder_cosine"] = ("feature", crosscoder.decoder_cosine().numpy())
    is_first_only, is_second_only = relative <= EXCLUSIVE, relative >= 1 - EXCLUSIVE
    figures.attrs |= {
        "alive": int(alive.sum()),
        "first_alone": int((is_first_only & alive).sum()),
        "second_alone": int((is_second_only & alive).sum()),
    }
    return figures
