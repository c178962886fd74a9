"""The network of every composed architecture: layers that each have their own mixers.

    embed -> [resid_pre -> ln1 -> mixers -> attn_out -> resid_mid
                        -> ln2 -> channel mixer -> mlp_out -> resid_post] * L -> final_norm -> logits

In layers with a shared block (mixers/shared_block.py), ln1 normalises the sum of stream and block output.

This file maps kinds of mixers to the classes that compute them. A layer without a mixer, or without a channel
mixer, has only the other half, and no resid_mid. Norms are applied to the mixers' input, to their output, to
both, to the stream, or to the stream after the addition (`LayerSpec.norms`); in a parallel layer both halves
read the same norm unless the channel mixer has one. In layer 0 of RWKV, the norm of the embedding
(`pre_norm`) replaces the stream.

Axes: [B, token, channel].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....store.errors import ConfigError
from ..architectures.architecture import LENT
from ..architectures.composed import ComposedArchitecture
from ..checkpoints.source import Take
from ..hooks.taps import Taps
from .attention import StreamRead
from .ends import Ends
from .history import STREAM, Carried, History, Shares, share_of
from .kernels.products import product
from .mixers.attention import GatedAttention, SelfAttention
from .mixers.convolution import ShortConvolution
from .mixers.differential_attention import DifferentialAttention
from .mixers.experts import Experts
from .mixers.gated_delta import GatedDelta
from .mixers.latent_attention import LatentAttention
from .mixers.lightning import Lightning
from .mixers.linear_attention import LinearAttention
from .mixers.linear_unit import LinearUnit
from .mixers.mamba import Mamba
from .mixers.mamba2 import Mamba2
from .mixers.mixer import ChannelMixer, LayerTensors, PositionMixer, strip_prefix
from .mixers.mlp import Mlp
from .mixers.mlstm import Mlstm
from .mixers.routed_attention import RoutedAttention
from .mixers.rwkv import ChannelMix, TimeMix, time_mix
from .mixers.shared_block import SharedBlock
from .norms import apply_norm, normalise
from .weights import NormWeights, Weights, parts_of, read_weight

__all__ = ["ComposedNetwork", "LayerModules", "block", "tensors_of"]

MIXERS: dict[str, Callable[[Any, LayerTensors], PositionMixer | TimeMix]] = {
    "attention": SelfAttention,
    "differential_attention": DifferentialAttention,
    "gated_attention": GatedAttention,
    "gated_delta": GatedDelta,
    "latent_attention": LatentAttention,
    "lightning": Lightning,
    "linear_attention": LinearAttention,
    "linear_unit": LinearUnit,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mlstm": Mlstm,
    "routed_attention": RoutedAttention,
    "short_convolution": ShortConvolution,
    "time_mix": time_mix,
}
"""Kind of mixer (`MixerSpec.kind`) -> class that computes it, built from the spec and the layer's tensors."""
CHANNEL_MIXERS: dict[str, Callable[[Any, LayerTensors], ChannelMixer | ChannelMix]] = {
    "channel_mix": ChannelMix,
    "experts": Experts,
    "mlp": Mlp,
}
"""Likewise for channel mixers."""
KEPT_IN_TRAINING = 1 - 0.15 * 0.8
"""Share of tokens that were not masked in training of ESM: 15 % were selected, 80 % of these masked."""
START = "start"
"""Name in `Carried` of the embedding, in families whose layers read it again (Zamba)."""


@dataclass(frozen=True)
class LayerModules:
    """Mixers and norms of one layer, with their weights."""

    mixers: tuple[PositionMixer | TimeMix, ...]
    """Mixers that read the same input and whose outputs are added; mostly one."""
    channel_mixer: ChannelMixer | ChannelMix | None
    """MLP, experts or channel mix of RWKV; None if the layer has none."""
    norms: Mapping[str, NormWeights]
    """Norms by their names in architectures/layer_tensors.py, such as "ln1" and "ln2_post"."""
    shared: SharedBlock | None = None
    """Block before the mixer, with weights that several layers share."""
    gains: Mapping[str, Tensor] = field(default_factory=dict)
    """Factors of the stream at its two additions, by "1" (mixer) and "2" (channel mixer); {} for none."""


def tensors_of(take: Take, config: ComposedArchitecture, layer: int) -> dict[str, Tensor]:
    """All weights of a layer by their names in architectures/layer_tensors.py.

    Arguments:
        take: reads a tensor by its checkpoint name.
        config: the architecture.
        layer: the layer.
    """
    tensors = config.tensors
    lent = {weight: tensors.outside[weight] for weight in LENT if weight in tensors.outside}
    weights = {weight: take(stored.name) for weight, stored in lent.items()}
    # Constants last: they get dtype and device of the weights read before.
    for weight, stored in sorted(
        tensors.layers[layer].items(), key=lambda item: item[1].constant is not None
    ):
        weights[weight] = read_weight(take, stored, tensors.in_layer(layer, weight), weights)
    return weights


def block(take: Take, config: ComposedArchitecture, layer: int) -> LayerModules:
    """Build one layer; take: reads a tensor by its checkpoint name."""
    tensors, spec = tensors_of(take, config, layer), config.blocks[layer]
    norms = parts_of(
        {name: tensor for name, tensor in tensors.items() if name.startswith(("ln", "pre_norm"))}
    )
    mixers = tuple(MIXERS[mixer.kind](mixer, tensors) for mixer in spec.mixers)
    channel = spec.channel_mixer
    channel_mixer = None if channel is None else CHANNEL_MIXERS[channel.kind](channel, tensors)
    shared = None if spec.shared is None else SharedBlock(spec.shared, tensors)
    return LayerModules(mixers, channel_mixer, norms, shared, strip_prefix(tensors, "carry."))


class ComposedNetwork(Ends[ComposedArchitecture, LayerModules]):
    """The network of every composed architecture (`Network` in loop.py)."""

    def __init__(self, config: ComposedArchitecture, weights: Weights[LayerModules]) -> None:
        super().__init__(config, weights)
        self._carries_embedding = any(block.shared for block in config.blocks)

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """See `Network`: token embeddings, with scale, position embeddings, norm and projection as the family
        has them."""
        x, weights = self.weights.embedded(ids), self.weights
        if self.config.embedding_scale is not None:
            scale: float | Tensor = self.config.embedding_scale
            if self.config.rounds_embedding_scale:
                # Rounded to float32, then to the model's dtype, as transformers keeps the factor in a buffer.
                scale = torch.tensor(scale, dtype=torch.float32).to(x.dtype)
            x = x * scale
        if (dropped := self.config.dropped_token) is not None:
            # ESM's token dropout: embeddings of mask tokens are zero and the others are rescaled.
            share = (shares or share_of)(dropped, ids)[..., None]
            unmasked = x.masked_fill((ids == dropped)[..., None], 0)
            x = (unmasked * KEPT_IN_TRAINING / (1 - share)).to(x.dtype)
        if weights.token_type is not None:
            x = x + weights.token_type
        if positions is not None and weights.positions is not None:
            x = x + F.embedding(positions + self.config.first_position, weights.positions)
        if weights.embed_norm is not None:
            c = self.config
            x = apply_norm(x, weights.embed_norm, c.norm_type, c.norm_eps)
        if weights.embed_in is not None:
            x = product(x, weights.embed_in.weight, weights.embed_in.bias)
        # The reference keeps the stream in float32 if its config says so, whatever the dtype of the weights.
        return {STREAM: x.to(torch.promote_types(x.dtype, torch.float32)) if self._is_wide else x}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """One layer: resid_pre [B, token, D] -> resid_post [B, kept, D], at which the loop calls the taps."""
        modules, block = self.weights.layers[layer], self.config.blocks[layer]
        beside = self._beside(carried)
        x = taps("resid_pre", layer, carried[STREAM])
        if block.has_pre_norm:
            norm, c = modules.norms["pre_norm"], self.config
            x = taps("pre_norm", layer, apply_norm(self._narrow(x), norm, c.norm_type, c.norm_eps))
        h = resid_pre = x
        if modules.mixers:
            block_out = None
            if modules.shared is not None:
                block_out = modules.shared(x, beside[START], layer, history, taps)
            h, x = self._read(x, "ln1", layer, taps, block_out)
            outputs = [
                self._mixed(mixer, h, resid_pre, layer, history, taps, beside) for mixer in modules.mixers
            ]
            added = sum(outputs[1:], outputs[0])
            if "ln1_post" in block.norm_names:
                added = self._normed(added, "ln1_post", layer, taps)
            # A token shift reads all tokens once more.
            x = x if block.has_token_shift else history.needed(x)
            x = x * modules.gains["1"] if modules.gains else x
            x = x + taps("attn_out", layer, added)
            x = self._normed(x, "ln1", layer, taps) if block.norms == "of sums" else x
        else:
            x = history.needed(x)
        if modules.channel_mixer is not None:
            if block.is_parallel:
                has_norm = "ln2" in block.norm_names
                h = history.needed(resid_pre if has_norm else h)
                h = self._normed(h, "ln2", layer, taps) if has_norm else h
            else:
                x = taps("resid_mid", layer, x) if modules.mixers else x
                h, x = self._read(x, "ln2", layer, taps)
            written = self._written(h, layer, taps, history)
            x = history.needed(x) if block.has_token_shift else x
            x = (x * modules.gains["2"] if modules.gains else x) + written
            x = self._normed(x, "ln2", layer, taps) if block.norms == "of sums" else x
        return {STREAM: x} | {name: history.needed(tensor) for name, tensor in beside.items()}

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """Output of the channel mixer [B, token, D] for a given stream x, in layers whose norms are applied
        to the mixers' input."""
        name = "ln2" if "ln2" in self.config.blocks[layer].norm_names else "ln1"
        return self._written(self._normed(x, name, layer, taps), layer, taps)

    def _written(self, h: Tensor, layer: int, taps: Taps, history: History | None = None) -> Tensor:
        """Output of the channel mixer, with its hook points, for its normalised input h. Only token-shifted
        channel mixers need the history."""
        channel_mixer = self.weights.layers[layer].channel_mixer
        assert channel_mixer is not None  # callers check
        h = taps("mlp_pre", layer, h)
        if isinstance(channel_mixer, ChannelMix):
            assert history is not None  # as `fed` is for attention layers
            h = channel_mixer(h, layer, history, taps)
        else:
            h = channel_mixer(h, layer, taps)
        h = taps("mlp_post", layer, h)
        if "ln2_post" in self.config.blocks[layer].norm_names:
            h = self._normed(h, "ln2_post", layer, taps)
        return taps("mlp_out", layer, h)

    def _mixed(
        self,
        mixer: PositionMixer | TimeMix,
        h: Tensor,
        stream: Tensor,
        layer: int,
        history: History,
        taps: Taps,
        beside: Carried,
    ) -> Tensor:
        """Output of a mixer for normalised h. Attention with hook points for inputs of single heads also gets
        the stream before the norm, as interventions may change it per head; a time mix the tensors beside
        the stream, to which it may add."""
        if isinstance(mixer, TimeMix):
            return mixer(h, layer, history, taps, beside)
        if not isinstance(mixer, SelfAttention) or not self.config.blocks[layer].has_split_inputs:
            return mixer(h, layer, history, taps)
        c, norm = self.config, self.norm_of("ln1", layer)
        source = StreamRead(
            stream, lambda read: apply_norm(self._narrow(read), norm, c.norm_type, c.norm_eps)
        )
        return mixer(h, layer, history, taps, source)

    def _beside(self, carried: Carried) -> Carried:
        """Tensors carried in addition to the stream: the embedding, in families whose layers read it
        again, and what mixers have added."""
        beside = dict(carried)
        stream = beside.pop(STREAM)
        if self._carries_embedding and START not in beside:
            # A copy, because interventions may write into the stream.
            beside[START] = stream.clone()
        return beside

    def _read(
        self, x: Tensor, name: str, layer: int, taps: Taps, block_out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalised input of mixers from the stream x, plus the output of a shared block; and the stream
        that the mixers' output is added to."""
        block = self.config.blocks[layer]
        if block.norms in ("after", "of sums") or name not in block.norm_names:
            # A copy, because an intervention at mlp_pre may write into the input but must not change the
            # stream.
            return self._narrow(x.clone() if name == "ln2" and taps.changes(layer, "mlp_pre") else x), x
        normed = self._normed(x if block_out is None else x + block_out, name, layer, taps)
        return normed, normed * block.carried[name == "ln2"] if block.norms == "of stream" else x

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        c, norm = self.config, self.weights.layers[layer].norms[name]
        return normalise(self._narrow(x), norm, c.norm_type, c.norm_eps, taps, name, layer)

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """Weights of a norm of a layer, by name ("ln1"); ConfigError if the layer has no such norm."""
        norm = self.weights.layers[layer].norms.get(name)
        if norm is None:
            raise ConfigError(
                f"expected {name} in layer {layer} of {self.config.model_type}, found no such norm"
            )
        return norm

    @property
    def _is_wide(self) -> bool:
        return self.config.has_wide_stream

    # -- weights as matrices

    def value_matrix(self, layer: int) -> Tensor:
        """Value projection [kv_head * d_head, hidden].

        Raises:
            ConfigError: the layer has no attention, or heads' outputs are not linear in the stream.
        """
        attention = self._attention(layer)
        if (clip := attention.shape.clip_qkv) is not None:
            raise ConfigError(
                f"expected values that are a linear map of the stream in {self.config.model_type}, found "
                f"them clipped to {clip:g} in layer {layer}; attribution does not support such a model"
            )
        if attention.shape.inner_norm_eps is not None:
            raise ConfigError(
                f"expected head outputs without a norm in {self.config.model_type}, found a norm over all "
                f"heads in layer {layer}; attribution does not support such a model"
            )
        part = attention.weights.v
        assert part is not None  # SelfAttention separates q, k and v
        return part.weight

    def output_matrix(self, layer: int) -> Tensor:
        """Output projection [hidden, head * d_head]; ConfigError in a layer without attention."""
        return self._attention(layer).weights.o.weight

    def _attention(self, layer: int) -> SelfAttention:
        attention = next((m for m in self.weights.layers[layer].mixers if isinstance(m, SelfAttention)), None)
        if attention is None:
            raise ConfigError(
                f"expected attention in layer {layer} of {self.config.model_type}, found none that adds to "
                "the stream; `model.config.layers` lists the mixer of each layer"
            )
        return attention
