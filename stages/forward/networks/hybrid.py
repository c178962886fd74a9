"""The network of hybrids and of state-space models: layers that each have their own mixers.

    embed -> [resid_pre -> ln1 -> mixers -> attn_out -> resid_mid
                        -> ln2 -> channel mixer -> mlp_out -> resid_post] * L -> final_norm -> logits

Knows which class computes which kind of mixer, and nothing of what they do. A layer without a channel mixer,
or without a mixer, has neither its half nor resid_mid. Norms may stand behind what mixers give, or on the
stream (`Block.norms`).

Axes: [B, token, channel].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import ConfigError
from ..architectures.hybrid import HybridConfig
from ..hooks.taps import Taps
from ..hooks.wants import Logits
from .history import STREAM, Carried, History
from .mixers.attention import GatedAttention, SelfAttention
from .mixers.experts import Experts
from .mixers.gated_delta import GatedDelta
from .mixers.latent_attention import LatentAttention
from .mixers.lightning import Lightning
from .mixers.linear_unit import LinearUnit
from .mixers.mamba import Mamba
from .mixers.mamba2 import Mamba2
from .mixers.mixer import ChannelMixer, LayerTensors, Mixer
from .mixers.mlp import Mlp
from .mixers.short_convolution import ShortConvolution
from .norms import apply_norm, normalise
from .products import product
from .weights import NormWeights, multiplied, parts_of

__all__ = ["Hybrid", "HybridWeights", "assemble"]

MIXERS: dict[str, Callable[[Any, LayerTensors], Mixer]] = {
    "attention": SelfAttention,
    "gated_attention": GatedAttention,
    "gated_delta": GatedDelta,
    "latent_attention": LatentAttention,
    "lightning": Lightning,
    "linear_unit": LinearUnit,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "short_convolution": ShortConvolution,
}
CHANNEL_MIXERS: dict[str, Callable[[Any, LayerTensors], ChannelMixer]] = {"mlp": Mlp, "experts": Experts}
"""Kind of a shape -> what computes it, from the shape and the tensors of a layer."""


@dataclass(frozen=True)
class HybridLayer:
    """One layer's mixers and norms; norms by their names in architectures/hybrid_tensors.py."""

    mixers: tuple[Mixer, ...]
    channel_mixer: ChannelMixer | None
    norms: Mapping[str, NormWeights]


@dataclass(frozen=True)
class HybridWeights:
    """All there is of a hybrid; lm_head None: the embedding is the head."""

    embed: Tensor
    layers: tuple[HybridLayer, ...]
    final_norm: NormWeights
    lm_head: Tensor | None = None


def assemble(take: Callable[[str], Tensor], config: HybridConfig) -> HybridWeights:
    """Weights from a function that gives a tensor by its checkpoint name."""
    tensors, layers = config.tensors, []
    for layer, (block, stored) in enumerate(zip(config.blocks, tensors.layers, strict=True)):
        found = {
            weight: multiplied(take(tensors.in_layer(layer, weight)), where.factors)
            for weight, where in stored.items()
        }
        norms = parts_of({name: tensor for name, tensor in found.items() if name.startswith("ln")})
        mixers = tuple(MIXERS[shape.kind](shape, found) for shape in block.mixers)
        channel = block.channel_mixer
        channel_mixer = None if channel is None else CHANNEL_MIXERS[channel.kind](channel, found)
        layers.append(HybridLayer(mixers, channel_mixer, norms))
    outside = tensors.outside
    embed = take(outside["embed"].name)
    bias = outside.get("final_norm.bias")
    final = NormWeights(take(outside["final_norm"].name), None if bias is None else take(bias.name))
    if outside["head"] == outside["embed"]:
        return HybridWeights(embed, tuple(layers), final)
    head = embed if outside["head"].name == outside["embed"].name else take(outside["head"].name)
    return HybridWeights(embed, tuple(layers), final, multiplied(head, outside["head"].factors))


class Hybrid:
    """The network of every hybrid (`Network` in loop.py)."""

    def __init__(self, config: HybridConfig, weights: HybridWeights) -> None:
        self.config = config
        self.weights = weights

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix [vocab, hidden]."""
        return self.weights.embed

    def embed(self, ids: Tensor) -> Carried:
        """Token ids [B, S] -> embeddings [B, S, D], scaled where the family does."""
        x = F.embedding(ids, self.weights.embed)
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        # The reference keeps the stream in float32 where it is told to, whatever the weights are in.
        return {STREAM: x.to(torch.promote_types(x.dtype, torch.float32)) if self._is_wide else x}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """resid_pre [B, token, D] -> resid_post [B, kept, D] of one layer, where the loop shows it."""
        part = self.weights.layers[layer]
        x = taps("resid_pre", layer, carried[STREAM])
        if part.mixers:
            h, x = self._read(x, "ln1", layer, taps)
            each = [mixer(h, layer, history, taps) for mixer in part.mixers]
            added = self._added(sum(each[1:], each[0]), "ln1_post", layer, taps)
            x = history.kept(x) + taps("attn_out", layer, added)
        else:
            x = history.kept(x)
        if part.channel_mixer is not None:
            x = taps("resid_mid", layer, x) if part.mixers else x
            h, x = self._read(x, "ln2", layer, taps)
            h = part.channel_mixer(taps("mlp_pre", layer, h), layer, taps)
            added = self._added(taps("mlp_post", layer, h), "ln2_post", layer, taps)
            x = x + taps("mlp_out", layer, added)
        return {STREAM: x}

    def _read(self, x: Tensor, name: str, layer: int, taps: Taps) -> tuple[Tensor, Tensor]:
        """What mixers read of a stream x, and the stream that their output is added to."""
        block = self.config.blocks[layer]
        if block.norms == "after":
            # A copy, where somebody may write over what is read, and not over the stream.
            return self._narrow(x.clone() if name == "ln2" and taps.changes(layer, "mlp_pre") else x), x
        normed = self._normed(x, name, layer, taps)
        return normed, x if block.norms == "before" else normed * block.carried[name == "ln2"]

    def _added(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        """What is added to the stream of what mixers give."""
        return self._normed(x, name, layer, taps) if self.config.blocks[layer].norms == "after" else x

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        c, norm = self.config, self._norm(name, layer)
        return normalise(self._narrow(x), norm, c.norm_type, c.norm_eps, taps, name, layer)

    def _norm(self, name: str, layer: int) -> NormWeights:
        norm = self.weights.layers[layer].norms.get(name)
        if norm is None:
            raise ConfigError(
                f"expected {name} in layer {layer} of {self.config.model_type}, found no such norm"
            )
        return norm

    @property
    def _is_wide(self) -> bool:
        return self.config.has_wide_stream

    def _narrow(self, x: Tensor) -> Tensor:
        """The stream in the dtype of the weights."""
        return x.to(self.weights.embed.dtype)

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """The last residual stream [B, S, D] -> normalised, [B, wanted positions, D]."""
        c, final, x = self.config, self.weights.final_norm, self._narrow(x)
        if want is not None and not taps.touches(None, "ln_final_scale", "ln_final_normalized", "final_norm"):
            return apply_norm(want.at_positions(x), final, c.norm_type, c.norm_eps)
        x = taps("final_norm", None, normalise(x, final, c.norm_type, c.norm_eps, taps, "ln_final", None))
        return x if want is None else want.at_positions(x)

    def final_norm(self, x: Tensor) -> Tensor:
        """The final norm of residual states [..., D]."""
        c = self.config
        return apply_norm(self._narrow(x), self.weights.final_norm, c.norm_type, c.norm_eps)

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Normalised states [..., D] -> logits [..., tokens], soft-capped as the model's output is."""
        logits = product(x, want.of_tokens(self.unembedding))
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits

    # -- weights as matrices

    @property
    def unembedding(self) -> Tensor:
        """What the LM head multiplies by, [vocab, hidden]."""
        return self.weights.embed if self.weights.lm_head is None else self.weights.lm_head

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies by [hidden]: "ln1", "ln2" of a layer that has it; "ln_final"."""
        norm = self.weights.final_norm if layer is None else self._norm(name, layer)
        weight = norm.weight.to(dtype)
        return 1 + weight if self.config.norm_type == "gemma_rms" else weight

    def value_matrix(self, layer: int) -> Tensor:
        """The V projection [kv_head * d_head, hidden]; ConfigError in a layer that does not attend."""
        part = self._attention(layer).weights.v
        assert part is not None  # hybrids keep q, k and v apart
        return part.weight

    def output_matrix(self, layer: int) -> Tensor:
        """The O projection [hidden, head * d_head]; ConfigError in a layer that does not attend."""
        return self._attention(layer).weights.o.weight

    def _attention(self, layer: int) -> SelfAttention:
        found = next((m for m in self.weights.layers[layer].mixers if isinstance(m, SelfAttention)), None)
        if found is None:
            raise ConfigError(
                f"expected attention in layer {layer} of {self.config.model_type}, found none; ask "
                "`model.config.layers` which layers attend"
            )
        return found
