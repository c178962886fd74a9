"""The network of decoders whose layers hand on more than the stream (architectures/carrying/config.py).

    embed -> [resid_pre -> (AltUp) -> ln1 -> attention -> ln1_post -> attn_out -> (LAuReL) -> resid_mid
                        -> ln2 -> MLP -> ln2_post -> mlp_out -> (AltUp) -> inputs of the layer -> resid_post]
          * L -> (mean of streams) -> final_norm -> logits

What is made of the embedding for later use - inputs of all layers, further streams - is made of it where it
enters the first layer, as it was shown and changed at its hook point.

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

TOLD, INPUTS, STREAMS = "told", "inputs", "streams"
"""Carried beside the stream: what a table gives tokens for all layers, until the embedding is there; that and
what is made of the embedding, [B, token, layer * input]; all streams but the residual one, side by side."""

BESIDE_MLP = ("input.", "laurel.", "altup.scale", "scalar")
"""What the names of weights begin with that a layer has besides those of its parts."""


@dataclass(frozen=True)
class CarryingLayer(LayerModules):
    """One layer, whose attention and experts are called with more than others are.

    tensors: of what it does besides attention and MLP, by the names of architectures/carrying/tensors.py.
    """

    attention: CarriedAttention = field(kw_only=True)
    experts: MlpAndExperts | None = None
    altup: AltUp | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def block(take: Take, config: CarryingConfig, layer: int) -> CarryingLayer:
    """One layer from a function that gives a tensor by its checkpoint name."""
    found, channel = tensors_of(take, config, layer), config.blocks[layer].channel_mixer
    altup = strip_prefix(found, "altup.")
    return CarryingLayer(
        (),
        Mlp(channel, found) if isinstance(channel, MlpSpec) else None,
        parts_of({name: tensor for name, tensor in found.items() if name.startswith("ln")}),
        attention=CarriedAttention(config.attention(layer), found),
        experts=MlpAndExperts(channel, found) if isinstance(channel, MlpAndExpertsSpec) else None,
        altup=AltUp(altup, config.active, config.norm_eps) if altup else None,
        tensors={name: tensor for name, tensor in found.items() if name.startswith(BESIDE_MLP)},
    )


class Carrying(ComposedNetwork):
    """The network of every such decoder (`Network` in loop.py)."""

    config: CarryingConfig

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Token ids [B, S] -> embeddings [B, S, D], and what a table gives them for all layers."""
        c, found = self.config, super().embed(ids, positions, shares, starts)
        if not c.input_size:
            return found
        rows = torch.where(ids < c.input_rows, ids, 0)
        # Rounded to the model's dtype, as the factor of the embedding is.
        factor = torch.tensor(math.sqrt(c.input_size), dtype=self.dtype, device=ids.device)
        return {**found, TOLD: F.embedding(rows, self.weights.beside["table"]) * factor}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """What enters a layer -> what comes out of it, see `Network`."""
        carried = self._begun(carried)
        x, predicted = self._entering(layer, carried, taps)
        h = self._normed(x, "ln1", layer, taps)
        made, lent = self._part(layer).attention(h, layer, history, taps, carried)
        added = taps("attn_out", layer, self._normed(made, "ln1_post", layer, taps))
        x = self._with_laurel(history.needed(x) + added, history.needed(h), layer, taps)
        x = taps("resid_mid", layer, x)
        x = x + self._fed(x, layer, taps)
        beside = {name: each for name, each in carried.items() if name not in (STREAM, STREAMS)} | lent
        beside = {name: history.needed(each) for name, each in beside.items()}
        streams = None
        if predicted is not None:
            altup = self._part(layer).altup
            assert altup is not None  # where there are several streams
            streams = taps("altup_corrected", layer, altup.corrected(history.needed(predicted), x))
            x = streams[:, self.config.active]
        if self.config.input_size:
            given = self._given(x, beside[INPUTS], layer, taps)
            if streams is None:
                x = x + given
            else:
                streams = torch.cat([streams[:, :1], streams[:, 1:] + given.unsqueeze(1)], dim=1)
        if streams is not None:
            return self._apart(streams) | beside
        scalar = self._part(layer).tensors.get("scalar")
        return {STREAM: x if scalar is None else x * scalar} | beside

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """What the final norm reads: of several streams their mean, mapped."""
        if self.config.streams == 1:
            return carried[STREAM]
        return taps("altup_merged", None, merged(self._together(carried), self.weights.beside))

    def _begun(self, carried: Carried) -> Carried:
        """What is carried, with what is made of the embedding where that enters the first layer."""
        if TOLD not in carried:
            return carried
        c, weights, x = self.config, self.weights.beside, carried[STREAM]
        told = product(x, weights["projection"]) * c.hidden_size**-0.5
        each = apply_norm(
            told.unflatten(-1, (c.num_layers, -1)), NormWeights(weights["norm"]), "rms", c.norm_eps
        )
        inputs = (each.flatten(2) + carried[TOLD]) * 2**-0.5
        if c.streams == 1:
            return {STREAM: x, INPUTS: inputs}
        return self._apart(spread(x, weights, c.streams)) | {INPUTS: inputs}

    def _entering(self, layer: int, carried: Carried, taps: Taps) -> tuple[Tensor, Tensor | None]:
        """The stream that attention reads [B, token, D]; of several streams, all as they are predicted."""
        x = taps("resid_pre", layer, carried[STREAM])
        altup = self._part(layer).altup
        if altup is None:
            return x, None
        streams = taps("altup_streams", layer, self._together({**carried, STREAM: x}))
        predicted = taps("altup_predicted", layer, altup.predicted(streams))
        return predicted[:, self.config.active], predicted

    def _with_laurel(self, x: Tensor, h: Tensor, layer: int, taps: Taps) -> Tensor:
        """The stream with what LAuReL makes of what attention has read [B, kept, D]."""
        c, w = self.config, self._part(layer).tensors
        if not c.laurel_rank:
            return x
        low = product(product(h, w["laurel.left"]), w["laurel.right"])
        normed = normalise(low, NormWeights(w["laurel.norm"]), "rms", c.norm_eps, taps, "laurel", layer)
        return (x + taps("laurel_out", layer, h + normed)) / math.sqrt(2)

    def _fed(self, x: Tensor, layer: int, taps: Taps) -> Tensor:
        """What MLP and experts add to the stream that they read."""
        experts = self._part(layer).experts
        h = self._normed(x, "ln2", layer, taps)
        if experts is None:
            return self._written(h, layer, taps)
        made = taps("mlp_post", layer, experts(taps("mlp_pre", layer, h), x, layer, taps))
        return taps("mlp_out", layer, self._normed(made, "ln2_post", layer, taps))

    def _given(self, x: Tensor, inputs: Tensor, layer: int, taps: Taps) -> Tensor:
        """What a layer makes of its own part of the inputs [B, kept, layer * input], as the stream says."""
        c, w = self.config, self._part(layer).tensors
        told = inputs[..., layer * c.input_size : (layer + 1) * c.input_size]
        told = taps(
            "layer_input_embed", layer, told.clone() if taps.changes(layer, "layer_input_embed") else told
        )
        read = x * w["altup.scale"] if "altup.scale" in w else x
        act = ACTIVATIONS[self._activation(layer)]
        gate = taps("layer_input_gate", layer, evenly(act, product(read, w["input.gate"])))
        made = product(gate * told, w["input.out"])
        norm = NormWeights(w["input.norm"])
        made = normalise(made, norm, "rms", c.norm_eps, taps, "layer_input", layer)
        return taps("layer_input_out", layer, made)

    def _activation(self, layer: int) -> str:
        """That of the MLP, which gates of inputs have as well."""
        shape = self.config.blocks[layer].channel_mixer
        mlp = shape.mlp if isinstance(shape, MlpAndExpertsSpec) else shape
        assert isinstance(mlp, MlpSpec)  # every layer has one
        return mlp.activation

    def _together(self, carried: Carried) -> Tensor:
        """All streams [B, stream, token, D] of what is carried."""
        others = split_heads(carried[STREAMS], self.config.hidden_size)
        own, active = carried[STREAM].unsqueeze(1), self.config.active
        return torch.cat([others[:, :active], own, others[:, active:]], dim=1)

    def _apart(self, streams: Tensor) -> Carried:
        """The residual stream, and the others beside it."""
        active = self.config.active
        others = torch.cat([streams[:, :active], streams[:, active + 1 :]], dim=1)
        # A copy: somebody may write over the stream.
        return {STREAM: streams[:, active].clone(), STREAMS: merge_heads(others)}

    def _part(self, layer: int) -> CarryingLayer:
        return cast(CarryingLayer, self.weights.layers[layer])  # as `block` makes them

    # -- weights as matrices

    def value_matrix(self, layer: int) -> Tensor:
        """Refused: values are normed. Raises ConfigError."""
        raise ConfigError(
            f"expected values that are a linear map of the stream in {self.config.model_type}, found them "
            f"normed in layer {layer}; no attribution follows such a model"
        )

    def output_matrix(self, layer: int) -> Tensor:
        """The O projection [hidden, head * d_head]."""
        found: Tensor = self._part(layer).attention.parts["o"].weight
        return found
