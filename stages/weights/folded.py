"""Matrices with what stands around them folded in: views of a model that gives the same logits.

Border: as matrices.py; no weight is changed or stored. A circuit read off plain matrices leaves out that
heads read through a norm. Four things can be folded (TransformerLens' `process_weights_`), each of which
changes no next-token distribution:

* norms: a norm divides, then multiplies by a gain and adds a bias. Gain and bias go into what reads it; where
  the norm takes the mean out first, that goes into the matrix too. A norm behind a part (Gemma 2) goes into
  what the part writes with. What is left of a norm is its division alone.
* value biases: weights sum to 1, so whatever is read, the biases of values add the same: b_O + sum_h b_V W_O.
* writing: where every norm takes out the mean of the stream, nobody sees what is written along it.
* unembedding: what is added to all logits alike moves no probability.

Folding the norm of a part that writes leaves its division out, a positive number of each position. Value
biases and the means of the stream are left as they are where they are not constant (sinks; RMS norms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError
from .matrices import Affine, Norm, Part, PlainMatrices, heads_in

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture

__all__ = ["FoldedMatrices"]

ROWS = 4096
"""Of the vocabulary that are read at once where all of it is summed."""


@dataclass(frozen=True, eq=False)
class FoldedMatrices:
    """`Matrices` with norms, value biases and means folded in; see the module.

    Raises ConfigError, when a matrix is asked for, of a layer whose norms stand on the stream itself.
    """

    plain: PlainMatrices
    norms: bool = True
    value_biases: bool = True
    writing: bool = True
    unembeddings: bool = True

    @property
    def config(self) -> Architecture:
        """See `Matrices`."""
        return self.plain.config

    def projection(self, part: Part, layer: int, head: int) -> Affine:
        """See `Matrices`."""
        found = self._read_through("ln1", layer, self.plain.projection(part, layer, head))
        if part == "v" and self._folds_values(layer):
            return Affine(found.matrix, np.zeros_like(found.bias))
        return found

    def output(self, layer: int, head: int) -> Array:
        """See `Matrices`."""
        return self._written("ln1_post", layer, self.plain.output(layer, head))

    def output_bias(self, layer: int) -> Array:
        """See `Matrices`; with what the biases of values add. What a norm behind attention adds is added
        behind its division, and is in no matrix: `behind`."""
        found = self.plain.output_bias(layer).astype(np.float64)
        if self._folds_values(layer):
            for head in range(heads_in(self.config, layer).count):
                value = self._read_through("ln1", layer, self.plain.projection("v", layer, head))
                found += value.bias.astype(np.float64) @ self.plain.output(layer, head)
        added: Array = self._written("ln1_post", layer, found[None])[0]
        return added

    def mlp_in(self, layer: int) -> Mapping[str, Affine]:
        """See `Matrices`."""
        held = self.config.tensors.layers[layer]
        norm = "ln1" if self.config.layers[layer].is_parallel and "ln2" not in held else "ln2"
        return {
            name: self._read_through(norm, layer, each) for name, each in self.plain.mlp_in(layer).items()
        }

    def mlp_out(self, layer: int) -> Affine:
        """See `Matrices`."""
        found = self.plain.mlp_out(layer)
        written = [self._written("ln2_post", layer, each) for each in (found.matrix, found.bias[None])]
        return Affine(written[0], written[1][0])

    def behind(self, name: str, layer: int) -> Array:
        """What a norm behind a part ("ln1_post", "ln2_post") adds to the stream, [hidden]; zeros mostly."""
        norm = self.plain.norm(name, layer) if self.norms else None
        bias = np.zeros(self.config.hidden_size, np.float32) if norm is None else norm.bias
        added: Array = self._centred(bias[None])[0]
        return added

    def embedding(self, rows: slice | Array = slice(None)) -> Array:
        """See `Matrices`."""
        return self._centred(self.plain.embedding(rows))

    def positions(self) -> Array:
        """See `Matrices`."""
        return self._centred(self.plain.positions())

    def unembedding(self, rows: slice | Array = slice(None)) -> Affine:
        """See `Matrices`."""
        norm = self.plain.norm("final_norm", None) if self.norms else None
        found = _through(norm, self.plain.unembedding(rows))
        if not self._centres_logits:
            return found
        matrix, bias = self._mean_logit
        return Affine(
            (found.matrix - matrix[:, None]).astype(np.float32), (found.bias - bias).astype(np.float32)
        )

    @property
    def _centres_logits(self) -> bool:
        # A soft cap sees what is added to all logits.
        return self.unembeddings and self.config.final_logit_softcapping is None

    @cached_property
    def _mean_logit(self) -> tuple[Array, float]:
        """What all tokens' logits have in common: mean row [hidden] and mean bias, float64."""
        norm, vocab = self.plain.norm("final_norm", None) if self.norms else None, self.config.vocab_size
        matrix, bias = np.zeros(self.config.hidden_size), 0.0
        for start in range(0, vocab, ROWS):
            part = _through(norm, self.plain.unembedding(slice(start, min(start + ROWS, vocab))))
            matrix += part.matrix.sum(axis=1, dtype=np.float64)
            bias += float(part.bias.sum(dtype=np.float64))
        return matrix / vocab, bias / vocab

    def _folds_values(self, layer: int) -> bool:
        return self.value_biases and not heads_in(self.config, layer).has_sinks

    @cached_property
    def _centres_writing(self) -> bool:
        """Whether nothing ever sees the mean of the stream: all norms are layer norms, and all stand before
        what they norm."""
        places = {layer.norms for layer in self.config.layers}
        return self.writing and self.norms and self.config.norm_type == "layer" and places == {"before"}

    def _read_through(self, norm: str, layer: int, read: Affine) -> Affine:
        if not self.norms:
            return read
        if self.config.layers[layer].norms == "of stream":
            raise ConfigError(
                f"expected norms that stand beside the stream, found them on it in layer {layer} of "
                f"{self.config.model_type}; read its plain matrices"
            )
        return _through(self.plain.norm(norm, layer), read)

    def _written(self, norm: str, layer: int, rows: Array) -> Array:
        """Rows [..., hidden] as they are added to the stream, but for what a norm behind them divides by."""
        behind = self.plain.norm(norm, layer) if self.norms else None
        if behind is not None:
            rows = rows.astype(np.float64)
            rows = (rows - rows.mean(axis=1, keepdims=True) if behind.is_centring else rows) * behind.gain
        return self._centred(rows)

    def _centred(self, rows: Array) -> Array:
        if self._centres_writing:
            rows = rows - rows.mean(axis=1, keepdims=True, dtype=np.float64)
        return rows.astype(np.float32)


def _through(norm: Norm | None, read: Affine) -> Affine:
    """What reads a norm, as it reads what the norm divides."""
    if norm is None:
        return read
    matrix = read.matrix.astype(np.float64)
    bias = read.bias + norm.bias.astype(np.float64) @ matrix
    matrix *= norm.gain[:, None]
    if norm.is_centring:
        matrix -= matrix.mean(axis=0)
    return Affine(matrix.astype(np.float32), bias.astype(np.float32))
