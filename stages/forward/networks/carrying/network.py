"""The network of decoders whose layers pass on more than the stream (architectures/carrying/config.py).

    embed -> [resid_pre -> (AltUp) -> ln1 -> attention -> ln1_post -> attn_out -> (LAuReL) -> resid_mid
                        -> ln2 -> MLP -> ln2_post -> mlp_out -> (AltUp) -> inputs of the layer -> resid_post]
          * L -> (mean of streams) -> final_norm -> logits

Per-layer inputs and further streams are computed from the embedding when it enters the first layer, that is
after interventions at its hook point.

Axes: [B, token, channel]; several streams are [B, stream, token, D].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .....store.errors import ConfigError
from ...architectures.carrying.config import CarryingConfig
from ...architectures.mixers import MlpAndExpertsSpec, MlpSpec
from ...checkpoints.source import Take
from ...hooks.taps import Taps
from ..composed import ComposedNetwork, LayerModules, tensors_of
from ..history import STREAM, Carried, History, Shares
from ..kernels.functions import evenly
from ..kernels.products import product
from ..mixers.mixer import merge_heads, split_heads, strip_prefix
from ..mixers.mlp import Mlp
from ..mlp import ACTIVATIONS
from ..norms import apply_norm, normalise
from ..weights import NormWeights, parts_of
from .altup import AltUp, merged, spread
from .attention import CarriedAttention
from .experts import MlpAndExperts

__all__ = ["Carrying", "block"]

TABLE_INPUTS = "told"
"""Name in `Carried` of per-layer token embeddings [B, token, layer * input], before the first layer only."""
INPUTS = "inputs"
"""Name in `Carried` of per-layer inputs [B, token, layer * input]: token embeddings plus a map of the
embedding."""
STREAMS = "streams"
"""Name in `Carried` of all AltUp streams but the active one, concatenated along channels."""

BESIDE_MLP = ("input.", "laurel.", "altup.scale", "scalar")
"""Prefixes of a layer's weights that belong neither to attention nor to MLP, norms or AltUp."""


@dataclass(frozen=True)
class CarryingLayer(LayerModules):
    """One layer, with modules whose call takes more arguments than those of `LayerModules`."""

    attention: CarriedAttention = field(kw_only=True)
    """Self-attention."""
    experts: MlpAndExperts | None = None
    """MLP with experts; None if the layer has a plain MLP."""
    altup: AltUp | None = None
    """Update of several streams; None in families with one."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights of per-layer inputs and LAuReL, by their names in architectures/carrying/tensors.py."""


def block(take: Take, config: CarryingConfig, layer: int) -> CarryingLayer:
    """Build one layer; take: reads a tensor by its checkpoint name."""
    tensors, channel = tensors_of(take, config, layer), config.blocks[layer].channel_mixer
    altup = strip_prefix(tensors, "altup.")
    return CarryingLayer(
        (),
        Mlp(channel, tensors) if isinstance(channel, MlpSpec) else None,
        parts_of({name: tensor for name, tensor in tensors.items() if name.startswith("ln")}),
        attention=CarriedAttention(config.attention(layer), tensors),
        experts=MlpAndExperts(channel, tensors) if isinstance(channel, MlpAndExpertsSpec) else None,
        altup=AltUp(altup, config.active, config.norm_eps) if altup else None,
        tensors={name: tensor for name, tensor in tensors.items() if name.startswith(BESIDE_MLP)},
    )


class Carrying(ComposedNetwork):
    """The network of decoders that carry more than the stream (`Network` in loop.py)."""

    config: CarryingConfig

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """See `Network`: embeddings [B, S, D], and per-layer embeddings of the tokens."""
        c, carried = self.config, super().embed(ids, positions, shares, starts)
        if not c.input_size:
            return carried
        rows = torch.where(ids < c.input_rows, ids, 0)
        # Rounded to the model's dtype, as the factor of the embedding is.
        factor = torch.tensor(math.sqrt(c.input_size), dtype=self.dtype, device=ids.device)
        return {**carried, TABLE_INPUTS: F.embedding(rows, self.weights.beside["table"]) * factor}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """See `Network`: one layer, input tensors -> output tensors."""
        carried = self._with_layer_inputs(carried)
        x, predicted = self._entering(layer, carried, taps)
        h = self._normed(x, "ln1", layer, taps)
        attn_out, lent = self._part(layer).attention(h, layer, history, taps, carried)
        added = taps("attn_out", layer, self._normed(attn_out, "ln1_post", layer, taps))
        x = self._with_laurel(history.needed(x) + added, history.needed(h), layer, taps)
        x = taps("resid_mid", layer, x)
        x = x + self._mlp_out(x, layer, taps)
        beside = {name: t for name, t in carried.items() if name not in (STREAM, STREAMS)} | lent
        beside = {name: history.needed(tensor) for name, tensor in beside.items()}
        streams = None
        if predicted is not None:
            altup = self._part(layer).altup
            assert altup is not None  # layers with several streams have it
            streams = taps("altup_corrected", layer, altup.corrected(history.needed(predicted), x))
            x = streams[:, self.config.active]
        if self.config.input_size:
            layer_input = self._layer_input(x, beside[INPUTS], layer, taps)
            if streams is None:
                x = x + layer_input
            else:
                streams = torch.cat([streams[:, :1], streams[:, 1:] + layer_input.unsqueeze(1)], dim=1)
        if streams is not None:
            return self._split_streams(streams) | beside
        scalar = self._part(layer).tensors.get("scalar")
        return {STREAM: x if scalar is None else x * scalar} | beside

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """Input of the final norm: the stream, or the merged AltUp streams."""
        if self.config.streams == 1:
            return carried[STREAM]
        return taps("altup_merged", None, merged(self._join_streams(carried), self.weights.beside))

    def _with_layer_inputs(self, carried: Carried) -> Carried:
        """Before the first layer: compute per-layer inputs and further streams from the embedding."""
        if TABLE_INPUTS not in carried:
            return carried
        c, weights, x = self.config, self.weights.beside, carried[STREAM]
        projected = product(x, weights["projection"]) * c.hidden_size**-0.5
        normed = apply_norm(
            projected.unflatten(-1, (c.num_layers, -1)), NormWeights(weights["norm"]), "rms", c.norm_eps
        )
        inputs = (normed.flatten(2) + carried[TABLE_INPUTS]) * 2**-0.5
        if c.streams == 1:
            return {STREAM: x, INPUTS: inputs}
        return self._split_streams(spread(x, weights, c.streams)) | {INPUTS: inputs}

    def _entering(self, layer: int, carried: Carried, taps: Taps) -> tuple[Tensor, Tensor | None]:
        """Input stream of attention [B, token, D], and with AltUp all predicted streams [B, stream, token,
        D]."""
        x = taps("resid_pre", layer, carried[STREAM])
        altup = self._part(layer).altup
        if altup is None:
            return x, None
        streams = taps("altup_streams", layer, self._join_streams({**carried, STREAM: x}))
        predicted = taps("altup_predicted", layer, altup.predicted(streams))
        return predicted[:, self.config.active], predicted

    def _with_laurel(self, x: Tensor, h: Tensor, layer: int, taps: Taps) -> Tensor:
        """Stream x with the low-rank residual connection LAuReL of attention's input h, each [B, kept, D]."""
        c, w = self.config, self._part(layer).tensors
        if not c.laurel_rank:
            return x
        low = product(product(h, w["laurel.left"]), w["laurel.right"])
        normed = normalise(low, NormWeights(w["laurel.norm"]), "rms", c.norm_eps, taps, "laurel", layer)
        return (x + taps("laurel_out", layer, h + normed)) / math.sqrt(2)

    def _mlp_out(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """Output of MLP and experts for the stream x, which is added to it."""
        experts = self._part(layer).experts
        h = self._normed(x, "ln2", layer, taps)
        if experts is None:
            return self._written(h, layer, taps)
        out = taps("mlp_post", layer, experts(taps("mlp_pre", layer, h), x, layer, taps))
        return taps("mlp_out", layer, self._normed(out, "ln2_post", layer, taps))

    def _layer_input(self, x: Tensor, inputs: Tensor, layer: int, taps: Taps) -> Tensor:
        """Output for the layer's part of the per-layer inputs [B, kept, layer * input], gated by the stream
        x."""
        c, w = self.config, self._part(layer).tensors
        part = inputs[..., layer * c.input_size : (layer + 1) * c.input_size]
        part = taps(
            "layer_input_embed", layer, part.clone() if taps.changes(layer, "layer_input_embed") else part
        )
        read = x * w["altup.scale"] if "altup.scale" in w else x
        act = ACTIVATIONS[self._activation(layer)]
        gate = taps("layer_input_gate", layer, evenly(act, product(read, w["input.gate"])))
        out = product(gate * part, w["input.out"])
        norm = NormWeights(w["input.norm"])
        out = normalise(out, norm, "rms", c.norm_eps, taps, "layer_input", layer)
        return taps("layer_input_out", layer, out)

    def _activation(self, layer: int) -> str:
        """Activation function of the MLP, which the gates of per-layer inputs share."""
        shape = self.config.blocks[layer].channel_mixer
        mlp = shape.mlp if isinstance(shape, MlpAndExpertsSpec) else shape
        assert isinstance(mlp, MlpSpec)  # every layer has one
        return mlp.activation

    def _join_streams(self, carried: Carried) -> Tensor:
        """All AltUp streams [B, stream, token, D] from the tensors carried between layers."""
        inactive = split_heads(carried[STREAMS], self.config.hidden_size)
        stream, active = carried[STREAM].unsqueeze(1), self.config.active
        return torch.cat([inactive[:, :active], stream, inactive[:, active:]], dim=1)

    def _split_streams(self, streams: Tensor) -> Carried:
        """The active stream as the residual stream, and the other streams."""
        active = self.config.active
        inactive = torch.cat([streams[:, :active], streams[:, active + 1 :]], dim=1)
        # A copy, because interventions may write into the stream.
        return {STREAM: streams[:, active].clone(), STREAMS: merge_heads(inactive)}

    def _part(self, layer: int) -> CarryingLayer:
        return cast(CarryingLayer, self.weights.layers[layer])  # built by `block`

    # -- weights as matrices

    def value_matrix(self, layer: int) -> Tensor:
        """Raises ConfigError: values are normalised, so they are not linear in the stream."""
        raise ConfigError(
            f"expected values that are a linear map of the stream in {self.config.model_type}, found them "
            f"normed in layer {layer}; attribution does not support such a model"
        )

    def output_matrix(self, layer: int) -> Tensor:
        """Output projection [hidden, head * d_head]."""
        weight: Tensor = self._part(layer).attention.parts["o"].weight
        return weight
