"""The decoder: embedding, layers, final norm and LM head, as plain code over a TransformerConfig and its
weights.

Knows tensors, taps and a history; knows no text, files or stores, and no loop: loop.py has that.

    embed -> [resid_pre -> ln1 -> attention -> (ln1_post) -> attn_out -> resid_mid
                        -> ln2 -> MLP       -> (ln2_post) -> mlp_out  -> resid_post] * L
          -> final_norm -> logits
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..architectures.transformer import TransformerConfig
from ..hooks.taps import Taps
from .attention import StreamRead, attention
from .ends import Ends
from .history import STREAM, Carried, History, Shares
from .mlp import mlp
from .norms import apply_norm, normalise
from .weights import LayerWeights, NormWeights


class Decoder(Ends[TransformerConfig, LayerWeights]):
    """The network of every supported transformer family (`Network` in loop.py)."""

    def embed(
        self,
        ids: Tensor,
        positions: Tensor | None,
        shares: Shares | None = None,
        starts: Tensor | None = None,
    ) -> Carried:
        """Token ids [B, S] -> embeddings [B, S, D], scaled where the family does."""
        x = self.weights.embedded(ids)
        if self.config.embedding_scale is not None:
            # Rounded to float32, then to the model's dtype, as the reference implementations do.
            x = x * torch.tensor(self.config.embedding_scale).to(x.dtype)
        return {STREAM: x}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """resid_pre [B, token, D] -> resid_post [B, kept, D] of one layer, where the loop shows it."""
        c, weights = self.config, self.weights.layers[layer]
        x = taps("resid_pre", layer, carried[STREAM])
        h = normalise(x, weights.ln1, c.norm_type, c.norm_eps, taps, "ln1", layer)
        source = StreamRead(x, lambda read: apply_norm(read, weights.ln1, c.norm_type, c.norm_eps))
        h = attention(h, weights, c, c.mixers[layer], layer, history, taps, source=source)
        if weights.ln1_post is not None:
            h = normalise(h, weights.ln1_post, c.norm_type, c.norm_eps, taps, "ln1_post", layer)
        x = taps("resid_mid", layer, history.kept(x) + taps("attn_out", layer, h))
        return {**carried, STREAM: x + self.fed(layer, x, taps)}

    def fed(self, layer: int, x: Tensor, taps: Taps) -> Tensor:
        """What the MLP adds [B, token, D], of the stream that it reads."""
        c, weights = self.config, self.weights.layers[layer]
        h = taps("mlp_pre", layer, normalise(x, weights.ln2, c.norm_type, c.norm_eps, taps, "ln2", layer))
        h = taps("mlp_post", layer, mlp(h, weights, c.activation, layer, taps))
        if weights.ln2_post is not None:
            h = normalise(h, weights.ln2_post, c.norm_type, c.norm_eps, taps, "ln2_post", layer)
        return taps("mlp_out", layer, h)

    def norm_of(self, name: str, layer: int) -> NormWeights:
        """One of "ln1", "ln2", "ln1_post", "ln2_post"."""
        norm: NormWeights = getattr(self.weights.layers[layer], name)
        return norm

    # -- weights as matrices, for what is linear once attention and norms are held

    def value_matrix(self, layer: int) -> Tensor:
        """The V projection [kv_head * d_head, hidden]."""
        weights = self.weights.layers[layer]
        part = weights.v if weights.v is not None else weights.qkv
        assert part is not None  # every attention has values
        return part.weight[-self.config.num_kv_heads * self.config.head_dim :]

    def output_matrix(self, layer: int) -> Tensor:
        """The O projection [hidden, head * d_head]."""
        return self.weights.layers[layer].o.weight
