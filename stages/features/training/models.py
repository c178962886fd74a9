"""The parameters of a dictionary in training, and its arithmetic: encode, decode, and as files will say it.

Border: rows in and out; knows neither losses nor the order of batches.

One model for all kinds: a feature reads one layer and writes to its targets - its own layer (sae, plt) or it
and all later ones (clt; Lindsey et al. 2025). A crosscoder is an autoencoder of several hook points joined to
one row, each centred and scaled by itself. Inside, inputs are centred and scaled to a mean squared entry
of 1, and so are outputs: then the squared error per entry is the fraction of variance unexplained (FVU) with
the variance of all the data, equal for every layer, and one learning rate fits all. `folded` undoes that in
the weights.

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
    """(x - mean) * scale: rows with mean 0 and mean squared entry 1. mean: float32 [width]. scale: one for
    all entries, or, of joined hook points, [width].
    """

    mean: Tensor
    scale: float | Tensor

    @classmethod
    def of(cls, found: RowStatistics) -> Normaliser:
        """Of a hook point's moments; the scale of one that never changes is 1."""
        entry = found.variance / len(found.mean)
        return cls(found.mean.float(), entry**-0.5 if entry > 0 else 1.0)

    @classmethod
    def joined(cls, found: Sequence[RowStatistics]) -> Normaliser:
        """Of hook points in a row, each scaled by itself."""
        parts = [cls.of(each) for each in found]
        each = [torch.full_like(part.mean, float(part.scale)) for part in parts]
        return cls(torch.cat([part.mean for part in parts]), torch.cat(each))

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows as the model sees them."""
        return (rows - self.mean) * self.scale


class DictionaryModel(nn.Module):
    """Features that read some layers and write to some; see the module's docstring.

    read, write: layer -> how its rows are scaled. seed: of the first weights. widths: of the places whose
    rows are joined to one (crosscoder).
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
        generator = torch.Generator().manual_seed(seed)
        count = settings.features
        self.W_enc, self.b_enc, self.W_dec = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self.b_dec, self.W_skip, self.log_threshold = (
            nn.ParameterDict(),
            nn.ParameterDict(),
            nn.ParameterDict(),
        )
        for layer in self.layers:
            name = str(layer)
            decoder = _unit(torch.randn(count, len(self.targets(layer)), self.d_out, generator=generator))
            tied = settings.is_autoencoder
            encoder = decoder[:, 0].clone() if tied else torch.randn(count, self.d_in, generator=generator)
            self.W_enc[name] = encoder if tied else _unit(encoder)
            self.b_enc[name] = torch.zeros(count)
            self.W_dec[name] = decoder
            if settings.activation == "jumprelu":
                self.log_threshold[name] = torch.full((count,), settings.threshold).log()
            if settings.skip:
                self.W_skip[name] = torch.zeros(self.d_out, self.d_in)
        for layer in self.write:
            self.b_dec[str(layer)] = torch.zeros(self.d_out)
        # Of batchtopk: a running mean in double precision, which a hundredth at a time does not wear out.
        self.running = dict.fromkeys(self.layers, 0.0)

    def targets(self, layer: int) -> tuple[int, ...]:
        """Layers that the features of `layer` write to."""
        if self.settings.kind != "clt":
            return (layer,)
        return tuple(target for target in sorted(self.write) if target >= layer)

    @torch.no_grad()
    def start_from(self, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """First weights from samples: feature i of a layer reads the direction of row i, and writes that of
        the outputs that came with it. Rows [row, width] as stored; features beyond them keep their random
        weights.
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
        """Pre-activations [batch, feature] of scaled rows [batch, d_in]."""
        made: Tensor = nn.functional.linear(x, self.W_enc[str(layer)], self.b_enc[str(layer)])
        return made

    def threshold(self, layer: int) -> Tensor:
        """JumpReLU threshold [feature], as trained."""
        found: Tensor = self.log_threshold[str(layer)].exp()
        return found

    def decode(
        self, activations: Mapping[int, Tensor], inputs: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """What all features write: target -> scaled rows [batch, d_out].

        inputs: scaled rows, for biases and the linear part; without them only what features write.
        """
        written: dict[int, Tensor] = {}
        for layer, a in activations.items():
            targets = self.targets(layer)
            together = (a @ self.W_dec[str(layer)].flatten(1)).unflatten(1, (len(targets), self.d_out))
            for place, target in enumerate(targets):
                here = together[:, place]
                written[target] = written[target] + here if target in written else here
        if inputs is None:
            return written
        return {target: self._finished(target, here, inputs) for target, here in written.items()}

    def _finished(self, target: int, here: Tensor, inputs: Mapping[int, Tensor]) -> Tensor:
        out: Tensor = here + self.b_dec[str(target)]
        return out + inputs[target] @ self.W_skip[str(target)].T if self.settings.skip else out

    def norms(self, layer: int) -> Tensor:
        """Norm of what a feature writes, all targets together [feature]; of a crosscoder the sum of the norms
        at its places (Lindsey et al. 2024, "Sparse Crosscoders").
        """
        rows: Tensor = self.W_dec[str(layer)].flatten(1)
        parts = rows.split(self.widths, dim=1) if self.widths else (rows,)
        found: Tensor = torch.stack([part.norm(dim=1) for part in parts]).sum(0)
        return found

    # -- decoder rows of norm 1

    @torch.no_grad()
    def keep_norms(self) -> None:
        """Set decoder rows to norm 1."""
        for decoder in self.W_dec.values():
            decoder.copy_(_unit(decoder))

    @torch.no_grad()
    def remove_parallel_gradients(self) -> None:
        """Take out of each decoder row's gradient what only changes its norm."""
        for decoder in self.W_dec.values():
            assert decoder.grad is not None
            rows, slope = decoder.flatten(1), decoder.grad.flatten(1)
            slope -= (slope * rows).sum(1, keepdim=True) * rows

    # -- as others read it

    def activation(self, layer: int) -> Activation:
        """The activation function that files will name."""
        if self.settings.activation == "relu":
            return ReLU()
        if self.settings.activation == "topk":
            # SAELens rectifies what is largest, circuit-tracer does not.
            return TopK(self.settings.k, rectified=self.settings.is_autoencoder)
        if self.settings.activation == "batchtopk":
            return JumpReLU(torch.full((self.settings.features,), self.running[layer]))
        return JumpReLU(self.threshold(layer).detach())

    @torch.no_grad()
    def folded(self, layer: int) -> LayerFeatures:
        """The features of a layer on rows as stored, scales and means inside the weights; float32.

        Activations are those of training: what is scaled is what features read and write.
        """
        name, into, out = str(layer), self.read[layer], self.write[layer]
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


def scales(found: Mapping[int, RowStatistics], layers: Sequence[int]) -> dict[int, Normaliser]:
    """How the rows of each layer are scaled."""
    return {layer: Normaliser.of(found[layer]) for layer in layers}


def _unit(rows: Tensor) -> Tensor:
    """Rows [row, ...] divided by their norms over all further axes."""
    norms = rows.flatten(1).norm(dim=1).clamp(min=1e-8)
    unit: Tensor = rows / norms.view(-1, *[1] * (rows.dim() - 1))
    return unit
