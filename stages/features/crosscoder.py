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
"""Threshold of `Crosscoder.relative_norm` for features of one model only: up to 0.1 of the first, from 0.9 on
of the second (Minder et al. 2025, "Overcoming Sparsity Artifacts in Crosscoders")."""


@dataclass(frozen=True, eq=False)
class Crosscoder:
    """Weights of a crosscoder, float32; they apply to activations without any scaling beforehand."""

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
        """A crosscoder from features that were trained on the concatenated states of all places.

        Arguments:
            features: Features with encoders and decoders [feature, place * width] and both biases.
            places: Models and hook points, in the order in which their states were concatenated.
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
        """Number of features; each reads and writes all places."""
        return len(self.b_enc)

    @plain_torch()
    def encode(self, rows: Tensor) -> Tensor:
        """Activations [row, feature] for states [row, place, width]; DictionaryError for other shapes."""
        if rows.shape[1:] != (len(self.places), self.W_enc.shape[2]):
            raise DictionaryError(
                f"expected states of shape [row, {len(self.places)}, {self.W_enc.shape[2]}] for this "
                f"crosscoder, found {list(rows.shape)}; the second axis is one of "
                f"{', '.join(map(str, self.places))}"
            )
        return self.features.encode(rows.flatten(1))

    @cached_property
    def features(self) -> LayerFeatures:
        """The same features in the form of other dictionaries: they read concatenated states [place * width].

        Their layer number is the last layer that is read in the first model, and they write only to layers of
        the first model.
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
        """Decoder norms [place, feature], in units of the states' spread at each place."""
        norms: Tensor = self._scaled().norm(dim=2)
        return norms

    def relative_norm(self) -> Tensor:
        """Second decoder norm divided by the sum of both decoder norms [feature], of two models or places.

        0: the feature writes only to the first, 1: only to the second, 1/2: equally to both.

        Raises:
            DictionaryError: The crosscoder has neither two models nor two places of one model.
        """
        norm_a, norm_b = (decoder.norm(dim=1) for decoder in self._decoder_pair())
        # The clamp gives 0 instead of NaN for features that write nothing.
        share: Tensor = norm_b / (norm_a + norm_b).clamp(min=1e-12)
        return share

    def decoder_cosine(self) -> Tensor:
        """Cosine similarity [feature] of the two decoders that each feature has in two models or places."""
        import torch

        return torch.cosine_similarity(*self._decoder_pair(), dim=1)

    def _decoder_pair(self) -> tuple[Tensor, Tensor]:
        """Decoders [feature, width] of two models (all their places concatenated), or of two places."""
        models = models_of(self.places)
        # One model: compare its two places; several models: all places of each together.
        groups = models if max(models) else tuple(range(len(self.places)))
        if max(groups) != 1:
            raise DictionaryError(
                "expected a crosscoder of two models, or of two hook points of one model, found "
                f"{', '.join(map(str, self.places))}; compare the decoder norms of all of them with `norms()`"
            )
        scaled = self._scaled()
        decoder_a, decoder_b = (
            scaled[[n for n, group in enumerate(groups) if group == side]].transpose(0, 1).flatten(1)
            for side in (0, 1)
        )
        return decoder_a, decoder_b

    def _scaled(self) -> Tensor:
        """Decoders [place, feature, width], in units of the spread of the states at each place."""
        import torch

        return self.W_dec * torch.tensor([place.scale for place in self.places])[:, None, None]

    # -- files

    def save(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors into a new folder, and return its path.

        Raises:
            ConfigError: The folder exists already.
        """
        from safetensors.torch import save_file

        from .layers.activations import JumpReLU, TopK

        folder = Path(folder)
        if folder.exists():
            raise ConfigError(
                f"expected a new folder for the crosscoder, found that {str(folder)!r} exists; choose "
                "another name"
            )
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
        """Read a crosscoder from a folder that `save` wrote.

        Raises:
            DictionaryError: Files are missing or damaged, or tensor shapes contradict config.json.
        """
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
                f"expected the files {CONFIG} and {WEIGHTS} of a crosscoder in {folder}, found that they "
                f"cannot be read ({error}); name a folder that crosscoder training wrote"
            ) from error
        shape = (len(places), crosscoder.n_features, crosscoder.b_dec.shape[-1])
        # Shapes are checked after loading, as config.json and tensors may come from different trainings.
        if not crosscoder.W_enc.shape == crosscoder.W_dec.shape == shape:
            raise DictionaryError(
                f"expected encoders and decoders of shape {list(shape)} in {folder}, found "
                f"{list(crosscoder.W_enc.shape)} and {list(crosscoder.W_dec.shape)}; its files come from "
                "different trainings, so save the crosscoder again"
            )
        return crosscoder


def _activation(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Activation:
    """Activation function that config.json names; ValueError for an unknown one."""
    from .layers.activations import JumpReLU, ReLU, TopK

    name = config["activation"]
    if name == "JumpReLU":
        return JumpReLU(tensors["threshold"])
    if name not in ("TopK", "ReLU"):
        raise ValueError(f"expected the activation function ReLU, TopK or JumpReLU, found {name!r}")
    return TopK(config["k"]) if name == "TopK" else ReLU()


def place_figures(crosscoder: Crosscoder, blocks: Iterable[Tensor]) -> xr.Dataset:
    """Measure a crosscoder on held-out states: reconstruction error, densities, features of one model only.

    Features that are never active are not counted as a model's own: training hardly moved their decoders.

    Arguments:
        crosscoder: The crosscoder.
        blocks: Blocks of states [row, place, width].

    Returns:
        fvu [place]: fraction of variance unexplained. density [feature]: share of rows in which a feature is
        active. norm [place, feature]: decoder norms. For two models or places also relative_norm and
        decoder_cosine [feature], and as attributes the number of features that are ever active (alive), and
        how many of these are written only to the first (first_alone) or the second (second_alone).

    Raises:
        DictionaryError: The blocks hold no rows.
    """
    import torch
    import xarray as xr

    n_places = len(crosscoder.places)
    squared_error, squares = torch.zeros(n_places).double(), torch.zeros(n_places).double()
    n_active_rows = torch.zeros(crosscoder.n_features, dtype=torch.int64)
    n_rows = 0
    state_sum: Tensor | float = 0.0
    for block in blocks:
        activations = crosscoder.encode(block)
        states, rebuilt = block.double(), crosscoder.decode(activations).double()
        squared_error += (rebuilt - states).square().sum((0, 2))
        squares += states.square().sum((0, 2))
        state_sum = state_sum + states.sum(0)
        n_active_rows += (activations != 0).sum(0)
        n_rows += len(block)
    if not n_rows or isinstance(state_sum, float):
        raise DictionaryError(
            "expected held-out states on which to measure the crosscoder, found none; keep some prompts out "
            "of the training"
        )
    # Sums are float64: the variance is a small difference of large sums.
    variance = squares - state_sum.square().sum(1) / n_rows
    figures = xr.Dataset(
        {
            "fvu": ("place", (squared_error / variance).numpy()),
            "density": ("feature", (n_active_rows / n_rows).numpy()),
            "norm": (("place", "feature"), crosscoder.norms().numpy()),
        },
        {"place": [str(place) for place in crosscoder.places]},
        {"rows": n_rows},
    )
    if n_places != 2 and max(models_of(crosscoder.places)) != 1:
        return figures
    relative, alive = crosscoder.relative_norm(), n_active_rows > 0
    figures["relative_norm"] = ("feature", relative.numpy())
    figures["decoder_cosine"] = ("feature", crosscoder.decoder_cosine().numpy())
    is_first_only, is_second_only = relative <= EXCLUSIVE, relative >= 1 - EXCLUSIVE
    figures.attrs |= {
        "alive": int(alive.sum()),
        "first_alone": int((is_first_only & alive).sum()),
        "second_alone": int((is_second_only & alive).sum()),
    }
    return figures
