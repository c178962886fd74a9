"""The network of encoder-decoder models, as plain code over a PairConfig and its weights.

    source: embed -> [self-attention -> MLP] * E -> norm -> memory
    target: embed -> [self-attention -> cross-attention to memory -> MLP] * D -> norm -> logits

Source and target are positions of one row. A mask of target positions is carried with the stream, and from
the decoder's first layer on also the memory; the history decides which positions see each other. A layer
computes all positions and adds its outputs at positions of its side only. An intervention at the hook point
of such an output is added at any position.

Axes: [B, token, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .....store.errors import ConfigError, PromptError
from ...architectures.layer_summaries import AttentionMixer
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

TARGET = "target"
"""Name in `Carried` of the mask of target positions, 1 or 0, [B, token, 1]."""
MEMORY = "memory"
"""Name in `Carried` of the encoder's normalised output, [B, token, D]."""


@dataclass(frozen=True)
class PairLayer:
    """Weights of one layer of encoder or decoder."""

    attn: AttentionWeights
    """Self-attention."""
    mlp: MlpWeights
    """MLP."""
    norms: dict[str, NormWeights]
    """Norms by name, "ln1", "ln2" and "ln_cross"."""
    mixer: AttentionMixer
    """Parameters of self-attention, such as its scale."""
    cross: AttentionWeights | None
    """Cross-attention; None in the encoder."""
    positions: Tensor | None
    """Position embeddings of the layer's side, in its first layer, if each side has a table of its own."""
    outer_norms: dict[str, NormWeights]
    """In the first layer of a side, norms before all of its layers: "embed_norm" and "memory_norm"."""


def block(take: Take, config: PairConfig, layer: int) -> PairLayer:
    """Build one layer; take: reads a tensor by its checkpoint name."""
    tensors = config.tensors
    weights: dict[str, Tensor] = {}
    for weight, stored in tensors.layers[layer].items():
        weights[weight] = read_weight(take, stored, tensors.in_layer(layer, weight), weights)

    def with_prefix(prefix: str) -> dict[str, Tensor]:
        return {w.removeprefix(prefix): x for w, x in weights.items() if w.startswith(prefix)}

    attn = AttentionWeights(**parts_of(with_prefix("attn.")))
    cross = AttentionWeights(**parts_of(with_prefix("cross."))) if config.is_decoder(layer) else None
    mixer, shape = config.mixer(layer), config.shape(layer)
    if shape.relative is not None:
        mixer = replace(mixer, relative=Relative(shape, attn, weights))
    outer = with_prefix(OUTER)
    positions = outer.pop("positions", None)
    norms = parts_of({w: x for w, x in weights.items() if w.startswith("ln")})
    mlp_weights = MlpWeights(**parts_of(with_prefix("mlp.")))
    return PairLayer(attn, mlp_weights, norms, mixer, cross, positions, parts_of(outer))


class PairNetwork(Ends[PairConfig, PairLayer]):
    """The network of every encoder-decoder (`Network` in loop.py)."""

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """See `Network`: embeddings [B, S, D] of both sides with their positions, normalised if the family
        does that.

        Raises:
            ConfigError: the pass does not know where targets begin.
            PromptError: a side is too long, or contains padding.
        """
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
        side_positions = torch.where(is_target[..., 0], positions - starts, positions)
        if c.side_length is not None and int(side_positions.max()) >= c.side_length:
            raise PromptError(
                f"expected at most {c.side_length} positions of a source or a target, found "
                f"{int(side_positions.max()) + 1}; shorten it, or generate fewer tokens"
            )
        source, target = (
            self._side_embeddings(x, side_positions, first_layer) for first_layer in (0, c.encoder_layers)
        )
        return {STREAM: torch.where(is_target, target, source), TARGET: is_target.to(x.dtype)}

    def _side_embeddings(self, x: Tensor, positions: Tensor, first_layer: int) -> Tensor:
        """Embeddings for one side, with its position embeddings and norm; positions within it: int [B, S]."""
        c, layer = self.config, self.weights.layers[first_layer]
        norm = layer.outer_norms.get("embed_norm")
        is_early = c.norms_target_tokens and first_layer > 0
        if norm is not None and is_early:
            x = apply_norm(x, norm, c.norm_type, c.norm_eps)
        elif c.embedding_scale is not None:
            x = x * c.embedding_scale
        table = self.weights.positions if layer.positions is None else layer.positions
        if table is not None:
            # Clamped for positions of the other side, whose results are discarded.
            x = x + table[(positions + c.position_offset).clamp(max=len(table) - 1)]
        return x if norm is None or is_early else apply_norm(x, norm, c.norm_type, c.norm_eps)

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """See `Network`: one layer, input tensors -> output tensors."""
        c, weights = self.config, self.weights.layers[layer]
        x = taps("resid_pre", layer, carried[STREAM])
        beside = {name: tensor for name, tensor in carried.items() if name != STREAM}
        if layer == c.encoder_layers:
            norm = weights.outer_norms.get("memory_norm")
            # A copy, because interventions may write into the stream.
            beside[MEMORY] = x.clone() if norm is None else apply_norm(x, norm, c.norm_type, c.norm_eps)
        acts = history.needed(beside[TARGET]) > 0.5
        acts = acts if c.is_decoder(layer) else ~acts
        h = self._before(x, "ln1", layer, taps)
        h = attention(h, weights.attn, c.shape(layer), weights.mixer, layer, history, taps)
        x = self._added(history.needed(x), h, acts, ("attn_out", "ln1", "resid_mid"), layer, taps)
        if weights.cross is not None:
            h = self._crossed(x, beside[MEMORY], weights.cross, layer, history, taps)
            x = self._added(x, h, acts, ("cross_attn_out", "ln_cross", "resid_mid_cross"), layer, taps)
        h = taps("mlp_pre", layer, self._before(x, "ln2", layer, taps, "mlp_pre"))
        h = taps("mlp_post", layer, mlp(h, weights.mlp, c.activation, layer, taps))
        x = self._added(x, h, acts, ("mlp_out", "ln2", None), layer, taps)
        return {STREAM: x} | {name: history.needed(tensor) for name, tensor in beside.items()}

    def _before(self, x: Tensor, name: str, layer: int, taps: Taps, point: str = "") -> Tensor:
        """Input of attention or MLP from the stream x: its norm in pre-norm families, x itself in others."""
        if self.config.norms == "before":
            return self._normed(x, name, layer, taps)
        # A copy, because an intervention may write into the input but must not change the stream.
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
        """Add outputs h to the stream x at the positions of the layer's side.

        Arguments:
            x: stream [B, kept, D].
            h: outputs to add [B, kept, D].
            acts: bool [B, kept, 1], True at positions of the layer's side.
            names: hook point of the output, norm of the sum in post-norm families, hook point of the sum or
                None.
            layer: the layer.
            taps: hook points of the pass.
        """
        added, norm, sum_of = names
        x = x + taps(added, layer, torch.where(acts, h, 0))
        if self.config.norms == "of sums":
            x = torch.where(acts, self._normed(x, norm, layer, taps), x)
        return x if sum_of is None else taps(sum_of, layer, x)

    def _crossed(
        self, x: Tensor, memory: Tensor, weights: AttentionWeights, layer: int, history: History, taps: Taps
    ) -> Tensor:
        """Output of cross-attention [B, kept, D], from the stream x [B, kept, D] to the memory [B, token,
        D]."""
        c = self.config
        h = self._before(x, "ln_cross", layer, taps)
        memory = taps(
            "cross_memory", layer, memory.clone() if taps.changes(layer, "cross_memory") else memory
        )
        inputs = (("q", h), ("k", memory), ("v", memory))
        q, k, v = (
            taps(
                f"cross_{part}",
                layer,
                linear(states, getattr(weights, part)).unflatten(-1, (c.heads, c.head_dim)).transpose(1, 2),
            )
            for part, states in inputs
        )
        mixer = AttentionMixer(self.config.mixer(layer).scale, is_bidirectional=True, part="cross")
        z = taps("cross_z", layer, history.attend(layer, q, k, v, mixer))
        return linear(z.transpose(1, 2).flatten(2), weights.o)

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """Raises ConfigError: a layer acts on the positions of one side only."""
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
        """Weights of a norm of a layer, by name; ConfigError if the layer has no such norm."""
        norm = self.weights.layers[layer].norms.get(name)
        if norm is None:
            raise ConfigError(
                f"expected {name} in layer {layer} of {self.config.model_type}, found no such norm"
            )
        return norm

    # -- weights as matrices, of self-attention

    def value_matrix(self, layer: int) -> Tensor:
        """Value projection of self-attention, [head * d_head, hidden]."""
        part = self.weights.layers[layer].attn.v
        assert part is not None  # these families store q, k and v separately
        return part.weight

    def output_matrix(self, layer: int) -> Tensor:
        """Output projection of self-attention, [hidden, head * d_head]."""
        return self.weights.layers[layer].attn.o.weight
