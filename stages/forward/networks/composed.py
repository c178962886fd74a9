"""Network of composed architectures: layers that each have their own mixers.

    embed -> [resid_pre -> ln1 -> mixers -> attn_out -> resid_mid
                        -> ln2 -> channel mixer -> mlp_out -> resid_post] * L -> final_norm -> logits

AltUp predicts several streams before ln1, of which the layer computes one, and corrects all of them after
the channel mixer; LAuReL adds to the stream together with attention; a per-layer input is added last
(layer_parts.py). Per-layer inputs and further streams are computed from the embedding when it enters the
first layer, that is after interventions at its hook point.

In layers with a shared block (mixers/shared_block.py), ln1 normalises the sum of stream and block output.
In encoder-decoders (pairs.py), layers add only at positions of their side, and decoder layers have
cross-attention after resid_mid.

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
from .layer_parts import (
    INPUTS,
    STREAMS,
    TABLE_INPUTS,
    AltUp,
    Laurel,
    LayerInput,
    join_streams,
    layer_inputs,
    merged,
    split_streams,
    spread,
    table_inputs,
)
from .mixers.attention import SelfAttention
from .mixers.convolution import ShortConvolution
from .mixers.differential_attention import DifferentialAttention
from .mixers.experts import Experts, MlpAndExperts
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
from .pairs import MEMORY, CrossAttention, embed_sides, enter_side, no_pairs
from .weights import NormWeights, Weights, parts_of, read_weight

__all__ = ["ComposedNetwork", "LayerModules", "block", "tensors_of"]

MIXERS: dict[str, Callable[[Any, LayerTensors], PositionMixer | TimeMix]] = {
    "attention": SelfAttention,
    "differential_attention": DifferentialAttention,
    "gated_attention": SelfAttention,
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
"""Kind of mixer (`MixerSpec.kind`) -> class that computes it, which is constructed from a spec and the
layer's tensors."""
CHANNEL_MIXERS: dict[str, Callable[[Any, LayerTensors], ChannelMixer | ChannelMix | MlpAndExperts]] = {
    "channel_mix": ChannelMix,
    "experts": Experts,
    "mlp": Mlp,
    "mlp_and_experts": MlpAndExperts,
}
"""Kind of channel mixer (`ChannelMixerSpec.kind`) -> class that computes it, which is constructed from a spec
and the layer's tensors."""
KEPT_IN_TRAINING = 1 - 0.15 * 0.8
"""Share of tokens that were not masked in training of ESM: 15 % were selected, 80 % of these masked."""
START = "start"
"""Name in `Carried` of the embedding, in families whose layers read it again (Zamba)."""


@dataclass(frozen=True)
class LayerModules:
    """Modules of one layer with their weights: mixers, channel mixer, norms and special parts of some
    families."""

    mixers: tuple[PositionMixer | TimeMix, ...]
    """Mixers that read the same input and whose outputs are added; mostly one."""
    channel_mixer: ChannelMixer | ChannelMix | MlpAndExperts | None
    """MLP, experts or RWKV's channel mix; None if the layer has only mixers."""
    norms: Mapping[str, NormWeights]
    """Name of a norm, such as "ln1" or "ln2_post" -> its weights."""
    shared: SharedBlock | None = None
    """Block of attention and MLP before the mixer, with weights that several layers share (Zamba); None in
    other layers."""
    gains: Mapping[str, Tensor] = field(default_factory=dict)
    """Learned factors [D] of the residual stream before the output of the mixer ("1") and that of the channel
    mixer ("2") is added (Doge); empty in other families."""
    altup: AltUp | None = None
    """Update of the parallel residual streams (Gemma 3n); None in families with one stream."""
    laurel: Laurel | None = None
    """Low-rank projection of attention's input, added to the stream (Gemma 3n); None in other families."""
    layer_input: LayerInput | None = None
    """Per-layer input, added to the stream (Gemma 3n and 4); None in other families."""
    scalar: Tensor | None = None
    """Learned factor [1] of the stream that leaves the layer (Gemma 4); None in other families."""
    cross: CrossAttention | None = None
    """Cross-attention between mixers and channel mixer; None outside of decoders of encoder-decoders."""


def tensors_of(take: Take, config: ComposedArchitecture, layer: int) -> dict[str, Tensor]:
    """Name of each weight of a layer, such as "q" or "ln1" (architectures/layer_tensors.py) -> the weight.

    Arguments:
        take: reads a tensor by its checkpoint name.
        config: the architecture.
        layer: number of the layer.
    """
    tensors = config.tensors
    # Weights that are stored once, outside of the layers, and used by every layer.
    weights = {name: take(tensors.outside[name].name) for name in LENT if name in tensors.outside}
    # Constants last: they get dtype and device of the weights read before.
    in_order = sorted(tensors.layers[layer].items(), key=lambda item: item[1].constant is not None)
    for name, stored in in_order:
        weights[name] = read_weight(take, stored, tensors.in_layer(layer, name), weights)
    return weights


def block(take: Take, config: ComposedArchitecture, layer: int) -> LayerModules:
    """Build the modules of one layer with their weights.

    Arguments:
        take: Reads a tensor by its checkpoint name.
        config: The architecture.
        layer: Number of the layer.
    """
    tensors, spec = tensors_of(take, config, layer), config.blocks[layer]
    norms = parts_of(
        {name: tensor for name, tensor in tensors.items() if name.startswith(("ln", "pre_norm"))}
    )
    mixers = tuple(MIXERS[mixer.kind](mixer, tensors) for mixer in spec.mixers)
    channel = spec.channel_mixer
    channel_mixer = None if channel is None else CHANNEL_MIXERS[channel.kind](channel, tensors)
    shared = None if spec.shared is None else SharedBlock(spec.shared, tensors)
    altup, eps = config.altup, config.norm_eps
    return LayerModules(
        mixers,
        channel_mixer,
        norms,
        shared,
        strip_prefix(tensors, "carry."),
        altup=None if altup is None else AltUp(altup, strip_prefix(tensors, "altup."), eps),
        laurel=Laurel(strip_prefix(tensors, "laurel."), eps) if spec.laurel_rank else None,
        layer_input=None if spec.layer_input is None else LayerInput(spec.layer_input, tensors, layer, eps),
        scalar=tensors.get("scalar"),
        cross=None if spec.cross is None else CrossAttention(spec.cross, tensors),
    )


class ComposedNetwork(Ends[ComposedArchitecture, LayerModules]):
    """The network of every composed architecture (`Network` in loop.py)."""

    def __init__(self, config: ComposedArchitecture, weights: Weights[LayerModules]) -> None:
        super().__init__(config, weights)
        self._carries_embedding = any(block.shared for block in config.blocks)
        self._key_sources, self._layer_input = config.key_sources, config.blocks[0].layer_input
        self._active = 0 if config.altup is None else config.altup.active

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Tensors that enter the first layer: the residual stream [B, S, D] from token embeddings, with
        scale, position embeddings, norm and projection as the family has them; and rows of the table of
        per-layer inputs.

        Arguments:
            ids: token ids, int [B, S].
            positions: their positions, int [S]; None to leave out learned position embeddings.
            shares: function that returns which share of its prompt a token makes up (`History.shares`); None
                if each row is one prompt.
            starts: position at which the target begins, per token or row (`History.starts`); None unless the
                model is an encoder-decoder.
        """
        config = self.config
        if config.pair is not None:
            return embed_sides(config, self.weights, ids, positions, starts)
        x, weights = self.weights.embedded(ids), self.weights
        if config.embedding_scale is not None:
            scale: float | Tensor = config.embedding_scale
            if config.rounds_embedding_scale:
                # Rounded to float32, then to the model's dtype, as transformers keeps the factor in a buffer.
                scale = torch.tensor(scale, dtype=torch.float32).to(x.dtype)
            x = x * scale
        if (mask_token := config.dropped_token) is not None:
            # ESM's token dropout: embeddings of mask tokens are zero and the others are rescaled.
            masked_share = (shares or share_of)(mask_token, ids)[..., None]
            unmasked = x.masked_fill((ids == mask_token)[..., None], 0)
            x = (unmasked * KEPT_IN_TRAINING / (1 - masked_share)).to(x.dtype)
        if weights.token_type is not None:
            x = x + weights.token_type
        if positions is not None and weights.positions is not None:
            x = x + F.embedding(positions + config.first_position, weights.positions)
        if weights.embed_norm is not None:
            x = apply_norm(x, weights.embed_norm, config.norm_type, config.norm_eps)
        if weights.embed_in is not None:
            x = product(x, weights.embed_in.weight, weights.embed_in.bias)
        # transformers keeps the stream in float32 if its config says so, whatever the dtype of the weights.
        is_wide = config.has_wide_stream
        carried = {STREAM: x.to(torch.promote_types(x.dtype, torch.float32)) if is_wide else x}
        if self._layer_input is not None:
            carried[TABLE_INPUTS] = table_inputs(ids, weights.beside["table"], self._layer_input.size)
        return carried

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """Tensors that leave a layer, by name, for the tokens whose output is needed later; the stream is
        resid_post [B, kept, D], at which the caller calls the taps.

        Arguments:
            layer: number of the layer.
            carried: tensors that enter the layer, by name, each [B, token, width].
            history: which tokens the pass computes and how they see each other.
            taps: captures and interventions of the pass, called at its hook points.
        """
        modules, block = self.weights.layers[layer], self.config.blocks[layer]
        beside, streams = self._entered(carried), None
        x = taps("resid_pre", layer, beside.pop(STREAM))
        if block.has_pre_norm:
            norm, c = modules.norms["pre_norm"], self.config
            x = taps("pre_norm", layer, apply_norm(self._narrow(x), norm, c.norm_type, c.norm_eps))
        acts, sums_are_normed = None, block.norms == "of sums"
        if block.side is not None:
            beside, acts = enter_side(self.config, self.weights.beside, layer, x, beside, history)
        if modules.altup is not None:
            streams = modules.altup.predicted(x, beside.pop(STREAMS), layer, taps)
            x = streams[:, self._active]
        h = entering = x
        if modules.mixers:
            block_out = None
            if modules.shared is not None:
                block_out = modules.shared(x, beside[START], layer, history, taps)
            h, x = self._read(x, "ln1", layer, taps, block_out)
            outputs = [self._mixed(m, h, entering, layer, history, taps, beside) for m in modules.mixers]
            added = self._added(sum(outputs[1:], outputs[0]), "ln1_post", layer, taps, acts)
            # A token shift reads all tokens once more.
            x = x if block.has_token_shift else history.needed(x)
            x = (x * modules.gains["1"] if modules.gains else x) + taps("attn_out", layer, added)
            if modules.laurel is not None:
                x = modules.laurel(x, history.needed(h), layer, taps)
            x = self._summed(x, "ln1", layer, taps, acts) if sums_are_normed else x
        else:
            x = history.needed(x)
        if modules.channel_mixer is not None:
            if block.is_parallel:
                has_norm = "ln2" in block.norm_names
                h = history.needed(entering if has_norm else h)
                h = self._normed(h, "ln2", layer, taps) if has_norm else h
            else:
                x = taps("resid_mid", layer, x) if modules.mixers else x
                if modules.cross is not None:
                    h, x = self._read(x, "ln_cross", layer, taps)
                    h = modules.cross(h, beside[MEMORY], layer, history, taps)
                    assert acts is not None  # a layer with cross-attention has a side
                    x = x + taps("cross_attn_out", layer, torch.where(acts, h, 0))
                    x = self._summed(x, "ln_cross", layer, taps, acts) if sums_are_normed else x
                    x = taps("resid_mid_cross", layer, x)
                h, x = self._read(x, "ln2", layer, taps)
            written = self._written(h, x, layer, taps, acts, history)
            x = history.needed(x) if block.has_token_shift else x
            x = (x * modules.gains["2"] if modules.gains else x) + written
            x = self._summed(x, "ln2", layer, taps, acts) if sums_are_normed else x
        beside = {name: history.needed(tensor) for name, tensor in beside.items()}
        if modules.altup is not None and streams is not None:
            streams = modules.altup.corrected(history.needed(streams), x, layer, taps)
            x = streams[:, self._active]
        if modules.layer_input is not None:
            added = modules.layer_input(x, beside[INPUTS], layer, taps)
            if streams is None:
                x = x + added
            else:  # with several streams, it is added to all but the first
                streams = torch.cat([streams[:, :1], streams[:, 1:] + added.unsqueeze(1)], dim=1)
        left = ({STREAM: x} if streams is None else split_streams(streams, self._active)) | beside
        if modules.scalar is not None:
            left[STREAM] = left[STREAM] * modules.scalar
        return left

    def gathered(self, carried: Carried, taps: Taps) -> Tensor:
        """Input of the final norm, [B, token, D], from the tensors that leave the last layer: the residual
        stream, or the mean of all AltUp streams."""
        if self.config.altup is None:
            return carried[STREAM]
        streams = join_streams(carried[STREAM], carried[STREAMS], self._active)
        return taps("altup_merged", None, merged(streams, self.weights.beside))

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """Output of a layer's channel mixer [B, token, D] for a given stream x of the same shape, in layers
        with pre-norms; ConfigError for an encoder-decoder, whose layers act on one side only."""
        if self.config.pair is not None:
            raise no_pairs()
        name = "ln2" if "ln2" in self.config.blocks[layer].norm_names else "ln1"
        return self._written(self._normed(x, name, layer, taps), x, layer, taps)

    def _written(
        self,
        h: Tensor,
        x: Tensor,
        layer: int,
        taps: Taps,
        acts: Tensor | None = None,
        history: History | None = None,
    ) -> Tensor:
        """Output of the channel mixer that is added to the stream, [B, kept, D], with its hook points.

        Arguments:
            h: normalised input of the channel mixer, [B, token, D].
            x: stream before the norm, of the same shape.
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
            acts: bool [B, kept, 1], True at positions that the layer acts on; None for all positions.
            history: finds the previous token; only token-shifted channel mixers need it.
        """
        channel_mixer, h = self.weights.layers[layer].channel_mixer, taps("mlp_pre", layer, h)
        assert channel_mixer is not None  # callers check
        if isinstance(channel_mixer, MlpAndExperts):
            out = channel_mixer(h, layer, taps, x)
        elif isinstance(channel_mixer, ChannelMix):
            assert history is not None  # only `fed` passes none, and not for layers of RWKV
            out = channel_mixer(h, layer, history, taps)
        else:
            out = channel_mixer(h, layer, taps)
        added = self._added(taps("mlp_post", layer, out), "ln2_post", layer, taps, acts)
        return taps("mlp_out", layer, added)

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
        """Output of one mixer of a layer, [B, kept, D].

        Arguments:
            mixer: the mixer.
            h: normalised stream, [B, token, D].
            stream: stream before the norm, which attention needs if interventions change the inputs of single
                heads.
            layer: number of the layer.
            history: finds the earlier tokens and mixes the positions.
            taps: captures and interventions of the pass, called at its hook points.
            beside: tensors that layers pass on besides the stream; time mixes, and attention that shares keys
                and values, read them and may add to them.
        """
        if isinstance(mixer, TimeMix):
            return mixer(h, layer, history, taps, beside)
        if not isinstance(mixer, SelfAttention):
            return mixer(h, layer, history, taps)
        config, source = self.config, None
        if config.blocks[layer].has_split_inputs:
            ln1 = self.norm_of("ln1", layer)
            source = StreamRead(
                stream, lambda x: apply_norm(self._narrow(x), ln1, config.norm_type, config.norm_eps)
            )
        shares_keys = layer in self._key_sources or mixer.spec.source is not None
        return mixer(h, layer, history, taps, source, beside if shares_keys else None)

    def _entered(self, carried: Carried) -> Carried:
        """Copy of the dict of tensors that enter a layer. Before the first layer, the tensors besides the
        stream are added, computed from the embedding: the embedding itself (Zamba), per-layer inputs, AltUp
        streams."""
        carried = dict(carried)
        x, weights = carried[STREAM], self.weights.beside
        if self._carries_embedding and START not in carried:
            carried[START] = x.clone()  # a copy, because interventions may write into the stream
        if TABLE_INPUTS in carried:
            carried[INPUTS] = layer_inputs(x, carried.pop(TABLE_INPUTS), weights, self.config.norm_eps)
        if (altup := self.config.altup) is not None and STREAMS not in carried:
            carried |= split_streams(spread(x, weights, altup.streams), altup.active)
        return carried

    def _read(
        self, x: Tensor, name: str, layer: int, taps: Taps, block_out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Input of the mixers or the channel mixer, and the stream that their output is added to, each [B,
        token, D].

        Arguments:
            x: residual stream, [B, token, D].
            name: name of the norm before them, "ln1", "ln2" or "ln_cross"; without such a norm, the input is
                the stream.
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
            block_out: output of a shared block, which is added to the stream before the norm; None without
                such a block.
        """
        block = self.config.blocks[layer]
        if block.norms in ("after", "of sums") or name not in block.norm_names:
            # A copy, because an intervention at mlp_pre may write into the input but must not change the
            # stream.
            is_written = name == "ln2" and taps.changes(layer, "mlp_pre")
            return self._narrow(x.clone() if is_written else x), x
        normed = self._normed(x if block_out is None else x + block_out, name, layer, taps)
        if block.norms != "of stream":
            return normed, x
        return normed, normed * block.carried[1 if name == "ln2" else 0]

    def _summed(self, x: Tensor, name: str, layer: int, taps: Taps, acts: Tensor | None) -> Tensor:
        """Stream x [B, kept, D] after an addition in a post-norm layer, normalised by the norm called `name`
        where the layer acts (acts: bool [B, kept, 1]; None for all positions), unchanged elsewhere."""
        normed = self._normed(x, name, layer, taps)
        return normed if acts is None else torch.where(acts, normed, x)

    def _added(self, x: Tensor, name: str, layer: int, taps: Taps, acts: Tensor | None = None) -> Tensor:
        """What mixers add to the stream, [B, kept, D].

        Arguments:
            x: their output, [B, kept, D].
            name: name of the norm after them, "ln1_post" or "ln2_post", which is applied if the layer has it.
            layer: number of the layer.
            taps: captures and interventions of the pass, called at its hook points.
            acts: bool [B, kept, 1], True at positions of the layer's side in an encoder-decoder; the result
                is 0 elsewhere. None where layers act on every position.
        """
        x = self._normed(x, name, layer, taps) if name in self.config.blocks[layer].norm_names else x
        return x if acts is None else torch.where(acts, x, 0)

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        """x [B, token, D] after the layer's norm called `name`, with the norm's hook points."""
        config, norm = self.config, self.weights.layers[layer].norms[name]
        return normalise(self._narrow(x), norm, config.norm_type, config.norm_eps, taps, name, layer)

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """Weights of a layer's norm; name: of its hook points, such as "ln1". ConfigError if the layer has no
        such norm."""
        norms = self.weights.layers[layer].norms
        if name not in norms:
            raise ConfigError(
                f"expected layer {layer} of {self.config.model_type} to have a norm {name!r}, found the "
                f"norms {', '.join(norms) or 'none'}; `model.hook_points` lists the hook points of the norms"
            )
        return norms[name]

    # -- weights as matrices

    def value_matrix(self, layer: int) -> Tensor:
        """Value projection of a layer's attention, [kv_head * d_head, hidden].

        Raises:
            ConfigError: the layer has no attention, or heads' outputs are not linear in the stream.
        """
        attention = self._attention(layer)
        clip = attention.spec.clip_qkv
        if clip is not None or attention.spec.has_v_norm:
            change = "normalises them" if clip is None else f"clips them to {clip:g}"
            raise ConfigError(
                "expected a model whose attention values are a linear map of the normalised stream, found "
                f"{self.config.model_type}, which {change} in layer {layer}; attribution does not support "
                "this model, so use activation patching"
            )
        if attention.spec.inner_norm_eps is not None:
            raise ConfigError(
                "expected a model whose head outputs are not normalised before the output projection, found "
                f"{self.config.model_type}, which normalises them in layer {layer}; attribution does not "
                "support this model, so use activation patching"
            )
        projection = attention.weights.v
        assert projection is not None  # SelfAttention separates q, k and v
        return projection.weight

    def output_matrix(self, layer: int) -> Tensor:
        """Output projection of a layer's attention, [hidden, head * d_head]; ConfigError in a layer without
        attention."""
        return self._attention(layer).weights.o.weight

    def _attention(self, layer: int) -> SelfAttention:
        """The self-attention of a layer; ConfigError if the layer has another kind of mixer."""
        for mixer in self.weights.layers[layer].mixers:
            if isinstance(mixer, SelfAttention):
                return mixer
        raise ConfigError(
            f"expected layer {layer} of {self.config.model_type} to have self-attention, found none that "
            "adds to the residual stream; `model.config.layers` lists the mixer of each layer"
        )
