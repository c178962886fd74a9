"""Folded matrices: norms, value biases and means folded into the weights.

Border: as matrices.py; no weight is changed or stored. Plain matrices ignore that heads read the stream
through a norm. Four things can be folded (TransformerLens' `process_weights_`), none of which changes the
next-token distribution:

* norms: a norm divides, then multiplies by a gain and adds a bias. Gain and bias are folded into the matrices
that read it, and with a layer norm the subtraction of the mean as well. A norm after a part (Gemma 2) is
folded into what the part writes with. Only the division of the norm remains.
* value biases: attention weights sum to 1, so value biases add a constant, b_O + sum_h b_V W_O.
* writing: where every norm subtracts the mean over hidden, that mean of whatever is written is invisible.
* unembedding: a constant added to all logits changes no probability.

Folding a norm after a part leaves out its division by a positive number at each position. Value biases are
not folded where attention weights do not sum to 1 (sinks), means of the stream not where norms keep them (RMS
norm), and the mean logit not under a soft cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...store.arrays import Array
from ...store.errors import ConfigError
from .matrices import Affine, Norm, Part, PlainMatrices, heads_in, vocabulary_blocks

if TYPE_CHECKING:
    from ..forward.architectures.architecture import Architecture

__all__ = ["FoldedMatrices"]


@dataclass(frozen=True, eq=False)
class FoldedMatrices:
    """`Matrices` with norms, value biases and means folded in; see the module.

    Methods raise ConfigError for a layer whose norms are applied to the residual stream itself (post-norm).
    """

    plain: PlainMatrices
    """The matrices as the checkpoint stores them."""
    norms: bool = True
    """Whether gain, bias and mean subtraction of norms are folded into the matrices that read them."""
    value_biases: bool = True
    """Whether value biases are folded into the output bias of attention."""
    writing: bool = True
    """Whether embeddings, output matrices and output biases are centred: their mean over the hidden axis is
    subtracted, as LayerNorm subtracts it anyway."""
    unembeddings: bool = True
    """Whether the vocabulary mean is subtracted from the unembedding, and so from the logits."""

    @property
    def config(self) -> Architecture:
        """Architecture of the model."""
        return self.plain.config

    def projection(self, part: Part, layer: int, head: int) -> Affine:
        """Query, key or value matrix of a head and its bias, with the norm before attention folded in.

        Arguments:
            part: "q", "k" or "v".
            layer: layer of the head.
            head: index of the query head.
        """
        folded = self._read_through("ln1", layer, self.plain.projection(part, layer, head))
        # The bias has moved into output_bias; counted here as well, it would be added twice.
        if part == "v" and self._folds_values(layer):
            return Affine(folded.matrix, np.zeros_like(folded.bias))
        return folded

    def output(self, layer: int, head: int) -> Array:
        """Output matrix of a head, [d_head, hidden], with the norm after attention folded in.

        Arguments:
            layer: layer of the head.
            head: index of the head.
        """
        return self._written("ln1_post", layer, self.plain.output(layer, head))

    def output_bias(self, layer: int) -> Array:
        """Constant that attention adds, [hidden], with the value biases folded in.

        Without the bias of a norm after attention, which is added after the division: see `behind`.
        """
        bias = self.plain.output_bias(layer).astype(np.float64)
        if self._folds_values(layer):
            for head in range(heads_in(self.config, layer).num_attention_heads):
                value = self._read_through("ln1", layer, self.plain.projection("v", layer, head))
                bias += value.bias.astype(np.float64) @ self.plain.output(layer, head)
        added: Array = self._written("ln1_post", layer, bias[None])[0]
        return added

    def mlp_in(self, layer: int) -> Mapping[str, Affine]:
        """Input matrices of the MLP [hidden, mlp], with the norm that they read folded in."""
        tensors = self.config.tensors.layers[layer]
        # Parallel layers without a second norm feed attention and MLP from the first.
        norm = "ln1" if self.config.layers[layer].is_parallel and "ln2" not in tensors else "ln2"
        return {
            name: self._read_through(norm, layer, affine) for name, affine in self.plain.mlp_in(layer).items()
        }

    def mlp_out(self, layer: int) -> Affine:
        """Output matrix [mlp, hidden] and bias of the MLP, with the norm after it folded in."""
        plain = self.plain.mlp_out(layer)
        written = [self._written("ln2_post", layer, rows) for rows in (plain.matrix, plain.bias[None])]
        return Affine(written[0], written[1][0])

    def behind(self, name: str, layer: int) -> Array:
        """Bias of the norm behind attention or MLP, [hidden]; zeros without such a norm.

        Arguments:
            name: "ln1_post" after attention, "ln2_post" after the MLP.
            layer: layer number.
        """
        norm = self.plain.norm(name, layer) if self.norms else None
        bias = np.zeros(self.config.hidden_size, np.float32) if norm is None else norm.bias
        added: Array = self._centred(bias[None])[0]
        return added

    def embedding(self, rows: slice | Array = slice(None)) -> Array:
        """Embeddings of some tokens [vocab, hidden]; without their mean over hidden if `writing` is
        folded."""
        return self._centred(self.plain.embedding(rows))

    def positions(self) -> Array:
        """Learned position embeddings [position, hidden]; without their mean over hidden if `writing` is
        folded."""
        return self._centred(self.plain.positions())

    def unembedding(self, rows: slice | Array = slice(None)) -> Affine:
        """Unembedding [hidden, vocab] and bias [vocab], with the final norm folded in and no mean logit."""
        norm = self.plain.norm("final_norm", None) if self.norms else None
        folded = _through(norm, self.plain.unembedding(rows))
        if not self._centres_logits:
            return folded
        matrix, bias = self._mean_logit
        return Affine(
            (folded.matrix - matrix[:, None]).astype(np.float32), (folded.bias - bias).astype(np.float32)
        )

    @property
    def _centres_logits(self) -> bool:
        """Whether the mean over the vocabulary is removed from the unembedding."""
        # A soft cap (tanh) is not invariant to a constant added to all logits.
        return self.unembeddings and self.config.final_logit_softcapping is None

    @cached_property
    def _mean_logit(self) -> tuple[Array, float]:
        """Mean unembedding row over the vocabulary, float64 [hidden], and mean bias."""
        norm = self.plain.norm("final_norm", None) if self.norms else None
        matrix, bias = np.zeros(self.config.hidden_size), 0.0
        for rows in vocabulary_blocks(self.config):
            part = _through(norm, self.plain.unembedding(rows))
            matrix += part.matrix.sum(axis=1, dtype=np.float64)
            bias += float(part.bias.sum(dtype=np.float64))
        return matrix / self.config.vocab_size, bias / self.config.vocab_size

    def _folds_values(self, layer: int) -> bool:
        """Whether the value biases of a layer are folded into its output bias."""
        # A sink takes a part of the attention weight, so the biases no longer add a constant.
        return self.value_biases and not heads_in(self.config, layer).attention_sinks

    @cached_property
    def _centres_writing(self) -> bool:
        """Whether the mean of the stream over hidden has no effect, as every norm subtracts it."""
        norm_placements = {layer.norms for layer in self.config.layers}
        is_layer_norm = self.config.norm_type == "layer"
        return self.writing and self.norms and is_layer_norm and norm_placements == {"before"}

    def _read_through(self, norm: str, layer: int, affine: Affine) -> Affine:
        """A map of a layer with the norm that it reads through folded in.

        Arguments:
            norm: name of the norm, "ln1" or "ln2".
            layer: layer number.
            affine: the map as stored.

        Raises:
            ConfigError: the layer normalises the residual stream itself (post-norm).
        """
        if not self.norms:
            return affine
        if self.config.layers[layer].norms == "of stream":
            raise ConfigError(
                f"norms cannot be folded into the matrices of layer {layer} of {self.config.model_type}, "
                "because it normalises the residual stream itself (post-norm); use plain matrices, "
                "StoredMatrices.of(…, folded=False)"
            )
        return _through(self.plain.norm(norm, layer), affine)

    def _written(self, norm: str, layer: int, rows: Array) -> Array:
        """What attention or MLP write, [row, hidden], with the norm after them folded in except its division.

        Arguments:
            norm: name of the norm, "ln1_post" or "ln2_post"; nothing is folded if the model has none.
            layer: layer number.
            rows: what is written, as stored.
        """
        norm_after = self.plain.norm(norm, layer) if self.norms else None
        if norm_after is not None:
            rows = rows.astype(np.float64)
            if norm_after.is_centring:
                rows = rows - rows.mean(axis=1, keepdims=True)
            rows = rows * norm_after.gain
        return self._centred(rows)

    def _centred(self, rows: Array) -> Array:
        """Rows [row, hidden] as float32, without their mean over hidden if `writing` is folded."""
        if self._centres_writing:
            rows = rows - rows.mean(axis=1, keepdims=True, dtype=np.float64)
        return rows.astype(np.float32)


def _through(norm: Norm | None, affine: Affine) -> Affine:
    """Fold a norm into the affine map that reads through it: all of the norm except its division.

    Arguments:
        norm: the norm; None returns the map unchanged.
        affine: the map of the normalised stream.
    """
    if norm is None:
        return affine
    matrix = affine.matrix.astype(np.float64)
    # Before the gain is multiplied in: the norm adds its bias after the gain, so it meets the bare matrix.
    bias = affine.bias + norm.bias.astype(np.float64) @ matrix
    matrix *= norm.gain[:, None]
    if norm.is_centring:
        matrix -= matrix.mean(axis=0)
    return Affine(matrix.astype(np.float32), bias.astype(np.float32))
