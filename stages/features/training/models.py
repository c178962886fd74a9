"""Parameters of a dictionary in training, and its arithmetic: encode, decode, and export to plain features.

Border: rows in and out; knows neither losses nor the order of batches.

One model serves all kinds: a feature reads one layer and writes to its targets, which are its own layer (sae,
plt) or this and all later layers (clt; Lindsey et al. 2025). A crosscoder is an autoencoder of several hook
points joined to one row, each centred and scaled separately. Internally, inputs and outputs are centred and
scaled to a mean squared entry of 1: then the squared error per entry is the fraction of variance unexplained
(FVU) with the variance of all the data, comparable between layers, and one learning rate fits all. `folded`
folds the scaling into the weights.

Axes: W_enc [feature, d_in]; W_dec [feature, target, d_out]; rows [batch, width].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layers.activations import Activation, JumpReLU, ReLU, TopK
from ..layers.layer import LayerFeatures
from .settings import TrainingSettings
from .statistics import RowStatistics

__all__ = ["Normaliser", "DictionaryModel"]


@dataclass(frozen=True, eq=False)
class Normaliser:
    """Function (x - mean) * scale that gives activations mean 0 and mean squared entry 1."""

    mean: Tensor
    """Mean row, float32 [width]."""
    scale: float | Tensor
    """One factor for all entries; a factor per entry [width] if several hook points are concatenated."""

    @classmethod
    def of(cls, statistics: RowStatistics) -> Normaliser:
        """The normaliser for a hook point's statistics; scale 1 if its activations are constant."""
        entry = statistics.variance / len(statistics.mean)
        return cls(statistics.mean.float(), entry**-0.5 if entry > 0 else 1.0)

    @classmethod
    def joined(cls, statistics: Sequence[RowStatistics]) -> Normaliser:
        """The normaliser of several hook points concatenated to one row, each with its own scale."""
        parts = [cls.of(hook_statistics) for hook_statistics in statistics]
        scales = [torch.full_like(part.mean, float(part.scale)) for part in parts]
        return cls(torch.cat([part.mean for part in parts]), torch.cat(scales))

    def __call__(self, rows: Tensor) -> Tensor:
        """Normalised activations [row, width]."""
        return (rows - self.mean) * self.scale


class DictionaryModel(nn.Module):
    """A dictionary in training: parameters of all layers, and the arithmetic on normalised activations.

    Arguments:
        settings: Settings of the training.
        read: Normaliser of the activations of each layer that is read.
        write: Normaliser of the activations of each layer that is written.
        seed: Seed of the initial weights.
        widths: Widths of the hook points that a crosscoder concatenates to one row; empty for other kinds.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        read: Mapping[int, Normaliser],
        write: Mapping[int, Normaliser],
        *,
        seed: int,
        widths: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.settings, self.widths = settings, widths
        self.read, self.write = dict(read), dict(write)
        self.layers = tuple(sorted(read))
        self.d_in = len(next(iter(read.values())).mean)
        self.d_out = len(next(iter(write.values())).mean)
        # A generator of its own: the global random state of torch is neither used nor changed.
        generator = torch.Generator().manual_seed(seed)
        n_features = settings.features
        self.W_enc, self.b_enc, self.W_dec = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self.b_dec, self.W_skip, self.log_threshold = (
            nn.ParameterDict(),
            nn.ParameterDict(),
            nn.ParameterDict(),
        )
        for layer in self.layers:
            name = str(layer)
            decoder = _unit(
                torch.randn(n_features, len(self.targets(layer)), self.d_out, generator=generator)
            )
            # Autoencoders start with equal encoder and decoder (Gao et al. 2024); transcoders cannot.
            tied = settings.is_autoencoder
            encoder = (
                decoder[:, 0].clone() if tied else torch.randn(n_features, self.d_in, generator=generator)
            )
            self.W_enc[name] = encoder if tied else _unit(encoder)
            self.b_enc[name] = torch.zeros(n_features)
            self.W_dec[name] = decoder
            if settings.activation == "jumprelu":
                # The logarithm keeps thresholds positive under gradient steps.
                self.log_threshold[name] = torch.full((n_features,), settings.threshold).log()
            if settings.skip:
                self.W_skip[name] = torch.zeros(self.d_out, self.d_in)
        for layer in self.write:
            self.b_dec[str(layer)] = torch.zeros(self.d_out)
        # Thresholds of batchtopk: running means in Python floats, as float32 would lose updates of 1 %.
        self.running = dict.fromkeys(self.layers, 0.0)

    def targets(self, layer: int) -> tuple[int, ...]:
        """Layers that the features of `layer` write to."""
        if self.settings.kind != "clt":
            return (layer,)
        return tuple(target for target in sorted(self.write) if target >= layer)

    @torch.no_grad()
    def start_from(self, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Initialise feature i with the activations of token i: it reads the input's direction and writes the
        output's.

        Features beyond the number of rows keep their random weights.

        Arguments:
            inputs: Activations [row, width] as stored, by layer that is read.
            outputs: Activations of the same tokens, by layer that is written.
        """
        for layer in self.layers:
            name = str(layer)
            x = self.read[layer](inputs[layer])
            y = torch.stack([self.write[target](outputs[target]) for target in self.targets(layer)], dim=1)
            rows = min(len(x), self.settings.features)
            self.W_enc[name][:rows] = _unit(x[:rows])
            self.W_dec[name][:rows] = _unit(y[:rows])

    # -- arithmetic, on scaled rows

    def preactivations(self, layer: int, x: Tensor) -> Tensor:
        """Pre-activations [batch, feature].

        Arguments:
            layer: Layer that is read.
            x: Normalised activations [batch, d_in].
        """
        pre: Tensor = nn.functional.linear(x, self.W_enc[str(layer)], self.b_enc[str(layer)])
        return pre

    def threshold(self, layer: int) -> Tensor:
        """Current JumpReLU threshold [feature] of a layer."""
        threshold: Tensor = self.log_threshold[str(layer)].exp()
        return threshold

    def decode(
        self, activations: Mapping[int, Tensor], inputs: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Reconstruction of each written layer, normalised [batch, d_out].

        Arguments:
            activations: Feature activations [batch, feature] by layer.
            inputs: Normalised inputs by layer, for the skip connection. None: only what the features write,
                without biases and skip connection.
        """
        written: dict[int, Tensor] = {}
        for layer, a in activations.items():
            targets = self.targets(layer)
            # One product for all targets of a layer.
            contributions = (a @ self.W_dec[str(layer)].flatten(1)).unflatten(1, (len(targets), self.d_out))
            for number, target in enumerate(targets):
                contribution = contributions[:, number]
                written[target] = written[target] + contribution if target in written else contribution
        if inputs is None:
            return written
        return {
            target: self._finished(target, contribution, inputs) for target, contribution in written.items()
        }

    def _finished(self, target: int, contribution: Tensor, inputs: Mapping[int, Tensor]) -> Tensor:
        """Reconstruction of one written layer: what the features write, plus bias and skip connection."""
        out: Tensor = contribution + self.b_dec[str(target)]
        return out + inputs[target] @ self.W_skip[str(target)].T if self.settings.skip else out

    def norms(self, layer: int) -> Tensor:
        """Decoder norm [feature] over all targets; for a crosscoder the sum of the norms at its hook points.

        The sum is that of Lindsey et al. 2024, "Sparse Crosscoders".
        """
        rows: Tensor = self.W_dec[str(layer)].flatten(1)
        parts = rows.split(self.widths, dim=1) if self.widths else (rows,)
        norms: Tensor = torch.stack([part.norm(dim=1) for part in parts]).sum(0)
        return norms

    # -- decoder rows of norm 1

    @torch.no_grad()
    def keep_norms(self) -> None:
        """Rescale the decoder row of every feature, over all targets, to norm 1."""
        for decoder in self.W_dec.values():
            decoder.copy_(_unit(decoder))

    @torch.no_grad()
    def remove_parallel_gradients(self) -> None:
        """Remove the part of each decoder row's gradient that would only change the norm of the row."""
        for decoder in self.W_dec.values():
            assert decoder.grad is not None
            rows, slope = decoder.flatten(1), decoder.grad.flatten(1)
            # In place on a view of the gradient.
            slope -= (slope * rows).sum(1, keepdim=True) * rows

    # -- export

    def activation(self, layer: int) -> Activation:
        """Activation function that the finished dictionary has in a layer."""
        if self.settings.activation == "relu":
            return ReLU()
        if self.settings.activation == "topk":
            # SAELens rectifies the k largest values, circuit-tracer does not.
            return TopK(self.settings.k, rectified=self.settings.is_autoencoder)
        if self.settings.activation == "batchtopk":
            return JumpReLU(torch.full((self.settings.features,), self.running[layer]))
        return JumpReLU(self.threshold(layer).detach())

    @torch.no_grad()
    def folded(self, layer: int) -> LayerFeatures:
        """The features of a layer for activations as stored, float32: normalisers are folded into weights.

        Activations equal those of training, because only the vectors that are read and written are rescaled.
        """
        name, into, out = str(layer), self.read[layer], self.write[layer]
        # W (x - mean) * s + b = (s W) x + (b - s W mean); outputs are unscaled and shifted back.
        W_enc = self.W_enc[name] * into.scale
        b_dec = self.b_dec[name] / out.scale + out.mean
        skip = self.W_skip[name] * (into.scale / out.scale) if self.settings.skip else None
        targets = self.targets(layer)
        return LayerFeatures(
            layer=layer,
            W_enc=W_enc,
            W_dec={m: self.W_dec[name][:, i] / self.write[m].scale for i, m in enumerate(targets)},
            activation=self.activation(layer),
            b_enc=self.b_enc[name] - W_enc @ into.mean,
            b_dec=b_dec if skip is None else b_dec - skip @ into.mean,
            W_skip=skip,
        )


def _unit(rows: Tensor) -> Tensor:
    """Rows [row, ...] divided by their norms over all further axes."""
    # The clamp avoids NaN for rows of zeros, which constant samples give.
    norms = rows.flatten(1).norm(dim=1).clamp(min=1e-8)
    unit: Tensor = rows / norms.view(-1, *[1] * (rows.dim() - 1))
    return unit
