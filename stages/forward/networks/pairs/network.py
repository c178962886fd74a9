"""An encoder with a decoder, as plain code over a PairConfig and its weights.

    source: embed -> [self-attention -> MLP] * E -> norm -> memory
    target: embed -> [self-attention -> cross-attention to memory -> MLP] * D -> norm -> logits

Both are positions of one row. Which are the target's is carried beside the stream, and so is the memory from
the first layer of the decoder on; who sees whom is the history's. A layer computes every position it is given
and adds what it made to those of its side alone: what is changed there, at the hook points of what is added,
counts at any position.

Axes: [B, token, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .....store.errors import ConfigError, PromptError
from ...architectures.architecture import AttentionMixer
from ...architectures.pairs.config import PairConfig
from ...architectures.pairs.tensors import OUTER
from ...checkpoints.source import Take
from ...hooks.taps import Taps
from ...hooks.wants import Logits
from ..attention import attention, linear
from ..ends import Ends
from ..history import STREAM, Carried, History, Shares
from ..kernels.products import product
from ..mlp import mlp
from ..norms import apply_norm, normalise
from ..relative import Relative
from ..weights import AttentionWeights, MlpWeights, NormWeights, parts_of, read_weight
from .parts import no_pairs

__all__ = ["PairNetwork", "block"]

TARGET, MEMORY = "target", "memory"
"""Carried beside the stream: 1 at target positions, else 0, [B, token, 1]; the encoder's normed output."""


@dataclass(frozen=True)
class PairLayer:
    """One layer. cross: of a decoder's. outer: what stands before all layers of its side, in the first of
    them."""

    attn: AttentionWeights
    mlp: MlpWeights
    norms: dict[str, NormWeights]
    how: AttentionMixer
    cross: AttentionWeights | None
    positions: Tensor | None
    outer_norms: dict[str, NormWeights]


def block(take: Take, config: PairConfig, layer: int) -> PairLayer:
    """One layer from a function that gives a tensor by its checkpoint name."""
    tensors = config.tensors
    found: dict[str, Tensor] = {}
    for weight, stored in tensors.layers[layer].items():
        found[weight] = read_weight(take, stored, tensors.in_layer(layer, weight), found)

    def room(name: str) -> dict[str, Any]:
        own = {w.removeprefix(name): x for w, x in found.items() if w.startswith(name)}
        return parts_of(own)

    attn = AttentionWeights(**room("attn."))
    cross = AttentionWeights(**room("cross.")) if config.is_decoder(layer) else None
    how, shape = config.mixer(layer), config.shape(layer)
    if shape.relative is not None:
        how = replace(how, relative=Relative(shape, attn, found))
    outer = {w.removeprefix(OUTER): x for w, x in found.items() if w.startswith(OUTER)}
    positions = outer.pop("positions", None)
    norms = parts_of({w: x for w, x in found.items() if w.startswith("ln")})
    return PairLayer(attn, MlpWeights(**room("mlp.")), norms, how, cross, positions, parts_of(outer))


class PairNetwork(Ends[PairConfig, PairLayer]):
    """The network of every encoder with a decoder (`Network` in loop.py)."""

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Token ids [B, S] -> embeddings [B, S, D] of either side, with its positions, normed where the
        family does. starts: where targets begin, [B, 1] or [B, S]."""
        if positions is None or starts is None:
            raise no_pairs()
        c = self.config
        is_target = (positions >= starts).expand_as(ids)[..., None]
        ids = ids % c.vocab_size
        if c.unknown_token is not None and bool((ids == c.unknown_token).any()):
            raise PromptError(
                f"expected no padding in a source or a target, found token {c.unknown_token}, which has no "
                f"position in {c.model_type}; leave it out"
            )
        x = self.weights.embedded(ids)
        place = torch.where(is_target[..., 0], positions - starts, positions)
        if c.side_length is not None and int(place.max()) >= c.side_length:
            raise PromptError(
                f"expected at most {c.side_length} positions of a source or a target, found "
                f"{int(place.max()) + 1}; shorten it, or generate fewer tokens"
            )
        sides = [self._begun(x, place, first) for first in (0, c.encoder_layers)]
        return {STREAM: torch.where(is_target, sides[1], sides[0]), TARGET: is_target.to(x.dtype)}

    def _begun(self, x: Tensor, place: Tensor, first: int) -> Tensor:
        """Embeddings as the side whose first layer this is reads them; place: in it, int [B, S]."""
        c, layer = self.config, self.weights.layers[first]
        norm = layer.outer_norms.get("embed_norm")
        is_early = c.norms_target_tokens and first > 0
        if norm is not None and is_early:
            x = apply_norm(x, norm, c.norm_type, c.norm_eps)
        elif c.embedding_scale is not None:
            x = x * c.embedding_scale
        table = self.weights.positions if layer.positions is None else layer.positions
        if table is not None:
            # Of the other side, whose rows are not taken.
            x = x + table[(place + c.position_offset).clamp(max=len(table) - 1)]
        return x if norm is None or is_early else apply_norm(x, norm, c.norm_type, c.norm_eps)

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """What enters a layer -> what comes out of it, see `Network`."""
        c, weights = self.config, self.weights.layers[layer]
        x = taps("resid_pre", layer, carried[STREAM])
        beside = {name: each for name, each in carried.items() if name != STREAM}
        if layer == c.encoder_layers:
            norm = weights.outer_norms.get("memory_norm")
            # A copy: somebody may write over the stream.
            beside[MEMORY] = x.clone() if norm is None else apply_norm(x, norm, c.norm_type, c.norm_eps)
        acts = history.needed(beside[TARGET]) > 0.5
        acts = acts if c.is_decoder(layer) else ~acts
        h = self._before(x, "ln1", layer, taps)
        h = attention(h, weights.attn, c.shape(layer), weights.how, layer, history, taps)
        x = self._added(history.needed(x), h, acts, ("attn_out", "ln1", "resid_mid"), layer, taps)
        if weights.cross is not None:
            h = self._crossed(x, beside[MEMORY], weights.cross, layer, history, taps)
            x = self._added(x, h, acts, ("cross_attn_out", "ln_cross", "resid_mid_cross"), layer, taps)
        h = taps("mlp_pre", layer, self._before(x, "ln2", layer, taps, "mlp_pre"))
        h = taps("mlp_post", layer, mlp(h, weights.mlp, c.activation, layer, taps))
        x = self._added(x, h, acts, ("mlp_out", "ln2", None), layer, taps)
        return {STREAM: x} | {name: history.needed(each) for name, each in beside.items()}

    def _before(self, x: Tensor, name: str, layer: int, taps: Taps, point: str = "") -> Tensor:
        """What is read of the stream: its norm, where norms stand before what reads."""
        if self.config.norms == "before":
            return self._normed(x, name, layer, taps)
        # A copy, where somebody may write over what is read, and not over the stream.
        return x.clone() if point and taps.changes(layer, point) else x

    def _added(
        self,
        x: Tensor,
        h: Tensor,
        acts: Tensor,
        names: tuple[str, str, str | None],
        layer: int,
        taps: Taps,
    ) -> Tensor:
        """The stream with what was made where the layer acts; names: of what is added, of the norm that may
        stand on the sum, of the sum."""
        added, norm, sum_of = names
        x = x + taps(added, layer, torch.where(acts, h, 0))
        if self.config.norms == "of sums":
            x = torch.where(acts, self._normed(x, norm, layer, taps), x)
        return x if sum_of is None else taps(sum_of, layer, x)

    def _crossed(
        self, x: Tensor, memory: Tensor, weights: AttentionWeights, layer: int, history: History, taps: Taps
    ) -> Tensor:
        """What targets [B, kept, D] read of the memory [B, token, D]."""
        c = self.config
        h = self._before(x, "ln_cross", layer, taps)
        memory = taps(
            "cross_memory", layer, memory.clone() if taps.changes(layer, "cross_memory") else memory
        )
        pairs = (("q", h), ("k", memory), ("v", memory))
        q, k, v = (
            taps(
                f"cross_{part}",
                layer,
                linear(read, getattr(weights, part)).unflatten(-1, (c.heads, c.head_dim)).transpose(1, 2),
            )
            for part, read in pairs
        )
        how = AttentionMixer(self.config.mixer(layer).scale, is_bidirectional=True, part="cross")
        z = taps("cross_z", layer, history.attend(layer, q, k, v, how))
        return linear(z.transpose(1, 2).flatten(2), weights.o)

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """Of a layer that acts on some positions only, nobody can say: ConfigError."""
        raise no_pairs()

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Normalised states [..., D] -> logits [..., tokens]."""
        bias = self.weights.head_bias
        bias = None if bias is None else want.of_tokens(bias.flatten())
        return product(x, want.of_tokens(self.unembedding), bias)

    def _normed(self, x: Tensor, name: str, layer: int, taps: Taps) -> Tensor:
        c = self.config
        return normalise(x, self.norm_of(name, layer), c.norm_type, c.norm_eps, taps, name, layer)

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """A norm of a layer that has it; ConfigError in others."""
        norm = self.weights.layers[layer].norms.get(name)
        if norm is None:
            raise ConfigError(
                f"expected {name} in layer {layer} of {self.config.model_type}, found no such norm"
            )
        return norm

    # -- weights as matrices, of self-attention

    def value_matrix(self, layer: int) -> Tensor:
        """The V projection [head * d_head, hidden]."""
        part = self.weights.layers[layer].attn.v
        assert part is not None  # q, k and v are apart here
        return part.weight

    def output_matrix(self, layer: int) -> Tensor:
        """The O projection [hidden, head * d_head]."""
        return self.weights.layers[layer].attn.o.weight
