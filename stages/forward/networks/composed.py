"""The network of every composed architecture: layers that each have their own mixers.

    embed -> [resid_pre -> ln1 -> mixers -> attn_out -> resid_mid
                        -> ln2 -> channel mixer -> mlp_out -> resid_post] * L -> final_norm -> logits

In layers that share a block (mixers/shared_block.py), ln1 norms what that adds to the stream as well.

Knows which class computes which kind of mixer, and nothing of what they do. A layer without a channel mixer,
or without a mixer, has neither its half nor resid_mid. Norms may stand behind what mixers give, around them,
on the stream, or on its sum with what they give (`LayerSpec.norms`); in a parallel layer both halves read
the same norm.

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
from .mixers.shared_block import SharedBlock
from .mixers.short_convolution import ShortConvolution
from .norms import apply_norm, normalise
from .weights import NormWeights, Weights, parts_of, read_weight

__all__ = ["ComposedNetwork", "LayerModules", "block", "tensors_of"]

MIXERS: dict[str, Callable[[Any, LayerTensors], PositionMixer]] = {
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
}
CHANNEL_MIXERS: dict[str, Callable[[Any, LayerTensors], ChannelMixer]] = {"mlp": Mlp, "experts": Experts}
"""Kind of a shape -> what computes it, from the shape and the tensors of a layer."""
KEPT_IN_TRAINING = 1 - 0.15 * 0.8
"""Share of tokens that were not masked when ESM was trained."""
START = "start"
"""The embedding, carried beside the stream where layers read it again."""


@dataclass(frozen=True)
class LayerModules:
    """One layer's mixers and norms; norms by their names in architectures/layer_tensors.py."""

    mixers: tuple[PositionMixer, ...]
    channel_mixer: ChannelMixer | None
    norms: Mapping[str, NormWeights]
    shared: SharedBlock | None = None
    gains: Mapping[str, Tensor] = field(default_factory=dict)
    """What the stream is multiplied by where something is added to it, "1" and "2"."""


def tensors_of(take: Take, config: ComposedArchitecture, layer: int) -> dict[str, Tensor]:
    """All weights of a layer by their names, from a function that gives a tensor by its checkpoint name."""
    tensors = config.tensors
    lent = {weight: tensors.outside[weight] for weight in LENT if weight in tensors.outside}
    found = {weight: take(stored.name) for weight, stored in lent.items()}
    stored = tensors.layers[layer]
    for weight, where in sorted(stored.items(), key=lambda item: item[1].constant is not None):
        found[weight] = read_weight(take, where, tensors.in_layer(layer, weight), found)
    return found


def block(take: Take, config: ComposedArchitecture, layer: int) -> LayerModules:
    """One layer from a function that gives a tensor by its checkpoint name."""
    found, shape = tensors_of(take, config, layer), config.blocks[layer]
    norms = parts_of({name: tensor for name, tensor in found.items() if name.startswith("ln")})
    mixers = tuple(MIXERS[mixer.kind](mixer, found) for mixer in shape.mixers)
    channel = shape.channel_mixer
    channel_mixer = None if channel is None else CHANNEL_MIXERS[channel.kind](channel, found)
    shared = None if shape.shared is None else SharedBlock(shape.shared, found)
    return LayerModules(mixers, channel_mixer, norms, shared, strip_prefix(found, "carry."))


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
        """Token ids [B, S] -> embeddings [B, S, D], scaled where the family does, and with those of their
        positions where these are learned; normed, and mapped to the stream, where it does that."""
        x, weights = self.weights.embedded(ids), self.weights
        if self.config.embedding_scale is not None:
            scale: float | Tensor = self.config.embedding_scale
            if self.config.rounds_embedding_scale:
                # Rounded to float32, then to the model's dtype, as transformers keeps the factor in a buffer.
                scale = torch.tensor(scale, dtype=torch.float32).to(x.dtype)
            x = x * scale
        if (dropped := self.config.dropped_token) is not None:
            share = (shares or share_of)(dropped, ids)[..., None]
            kept = x.masked_fill((ids == dropped)[..., None], 0)
            x = (kept * KEPT_IN_TRAINING / (1 - share)).to(x.dtype)
        if weights.token_type is not None:
            x = x + weights.token_type
        if positions is not None and weights.positions is not None:
            x = x + F.embedding(positions + self.config.first_position, weights.positions)
        if weights.embed_norm is not None:
            c = self.config
            x = apply_norm(x, weights.embed_norm, c.norm_type, c.norm_eps)
        if weights.embed_in is not None:
            x = product(x, weights.embed_in.weight, weights.embed_in.bias)
        # The reference keeps the stream in float32 where it is told to, whatever the weights are in.
        return {STREAM: x.to(torch.promote_types(x.dtype, torch.float32)) if self._is_wide else x}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """resid_pre [B, token, D] -> resid_post [B, kept, D] of one layer, where the loop shows it."""
        part, block = self.weights.layers[layer], self.config.blocks[layer]
        beside = self._beside(carried)
        h = x = entering = taps("resid_pre", layer, carried[STREAM])
        if part.mixers:
            ahead = None
            if part.shared is not None:
                ahead = part.shared(x, beside[START], layer, history, taps)
            h, x = self._read(x, "ln1", layer, taps, ahead)
            each = [self._mixed(mixer, h, entering, layer, history, taps) for mixer in part.mixers]
            added = self._added(sum(each[1:], each[0]), "ln1_post", layer, taps)
            x = self._carried(history.needed(x), "1", layer) + taps("attn_out", layer, added)
            x = self._summed(x, "ln1", layer, taps)
        else:
            x = history.needed(x)
        if part.channel_mixer is not None:
            if block.is_parallel:
                own = "ln2" in block.norm_names
                h = self._normed(history.needed(entering), "ln2", layer, taps) if own else history.needed(h)
            else:
                x = taps("resid_mid", layer, x) if part.mixers else x
                h, x = self._read(x, "ln2", layer, taps)
            x = self._summed(self._carried(x, "2", layer) + self._written(h, layer, taps), "ln2", layer, taps)
        return {STREAM: x} | {name: history.needed(each) for name, each in beside.items()}

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """What the channel mixer adds [B, token, D], of the stream that it reads; where norms stand before
        what reads them."""
        name = "ln2" if "ln2" in self.config.blocks[layer].norm_names else "ln1"
        return self._written(self._normed(x, name, layer, taps), layer, taps)

    def _written(self, h: Tensor, layer: int, taps: Taps) -> Tensor:
        """What the channel mixer adds to the stream, of what it reads behind its norm."""
        channel_mixer = self.weights.layers[layer].channel_mixer
        assert channel_mixer is not None  # nobody asks a layer without one
        h = channel_mixer(taps("mlp_pre", layer, h), layer, taps)
        return taps("mlp_out", layer, self._added(taps("mlp_post", layer, h), "ln2_post", layer, taps))

    def _mixed(
        self, mixer: PositionMixer, h: Tensor, stream: Tensor, layer: int, history: History, taps: Taps
    ) -> Tensor:
        """What a mixer gives of normed h; attention is told which stream that is the norm of, as its heads
        may be shown others."""
        if not isinstance(mixer, SelfAttention) or not self.config.blocks[layer].has_split_inputs:
            return mixer(h, layer, history, taps)
        c, norm = self.config, self.norm_of("ln1", layer)
        source = StreamRead(
            stream, lambda read: apply_norm(self._narrow(read), norm, c.norm_type, c.norm_eps)
        )
        return mixer(h, layer, history, taps, source)

    def _beside(self, carried: Carried) -> Carried:
        """What is carried beside the stream: the embedding, once it has been shown, where layers read it."""
        if not self._carries_embedding:
            return {}
        # A copy: somebody may write over the stream.
        return {START: carried[START] if START in carried else carried[STREAM].clone()}

    def _read(
        self, x: Tensor, name: str, layer: int, taps: Taps, ahead: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What mixers read of a stream x, and of what stands ahead of them; and the stream that their output
        is added to."""
        block = self.config.blocks[layer]
        if block.norms in ("after", "of sums") or name not in block.norm_names:
            # A copy, where somebody may write over what is read, and not over the stream.
            return self._narrow(x.clone() if name == "ln2" and taps.changes(layer, "mlp_pre") else x), x
        normed = self._normed(x if ahead is None else x + ahead, name, layer, taps)
        return normed, normed * block.carried[name == "ln2"] if block.norms == "of stream" else x

    def _carried(self, x: Tensor, half: str, layer: int) -> Tensor:
        """The stream as what attention ("1") or the channel mixer ("2") gives is added to it."""
        gain = self.weights.layers[layer].gains.get(half)
        return x if gain is None else x * gain

    def _summed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        """The stream that a sum becomes."""
        return self._normed(x, name, layer, taps) if self.config.blocks[layer].norms == "of sums" else x

    def _added(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        """What is added to the stream of what mixers give."""
        return self._normed(x, name, layer, taps) if name in self.config.blocks[layer].norm_names else x

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        c, norm = self.config, self.norm_of(name, layer)
        return normalise(self._narrow(x), norm, c.norm_type, c.norm_eps, taps, name, layer)

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """A norm of a layer that has it; ConfigError in others."""
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
        """The V projection [kv_head * d_head, hidden]; ConfigError in a layer that does not attend, or where
        values are no linear map."""
        attention = self._attention(layer)
        if (clip := attention.shape.clip_qkv) is not None:
            raise ConfigError(
                f"expected values that are a linear map of the stream in {self.config.model_type}, found "
                f"them held within {clip:g} in layer {layer}; no attribution follows such a model"
            )
        if attention.shape.inner_norm_eps is not None:
            raise ConfigError(
                f"expected heads that write what they read in {self.config.model_type}, found them normed "
                f"together in layer {layer}; no attribution follows such a model"
            )
        part = attention.weights.v
        assert part is not None  # hybrids keep q, k and v apart
        return part.weight

    def output_matrix(self, layer: int) -> Tensor:
        """The O projection [hidden, head * d_head]; ConfigError in a layer that does not attend."""
        return self._attention(layer).weights.o.weight

    def _attention(self, layer: int) -> SelfAttention:
        found = next((m for m in self.weights.layers[layer].mixers if isinstance(m, SelfAttention)), None)
        if found is None:
            raise ConfigError(
                f"expected attention in layer {layer} of {self.config.model_type}, found none that adds to "
                "the stream; ask `model.config.layers` which layers attend"
            )
        return found
