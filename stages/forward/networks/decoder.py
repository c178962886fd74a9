"""The decoder: embedding, layers, final norm and LM head, as plain code over a TransformerConfig and its
weights.

Knows tensors, taps and a history; knows no text, files or stores, and no loop: layers.py has that.

    embed -> [resid_pre -> ln1 -> attention -> (ln1_post) -> attn_out -> resid_mid
                        -> ln2 -> MLP       -> (ln2_post) -> mlp_out  -> resid_post] * L -> final_norm ->
                        logits
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..architectures.transformer import TransformerConfig
from ..hooks.taps import Taps
from ..hooks.wants import Logits
from .attention import attention
from .history import STREAM, Carried, History
from .mlp import mlp
from .norms import apply_norm, normalise
from .products import product
from .weights import Weights


class Decoder:
    """The network of every supported transformer family (`Network` in layers.py)."""

    def __init__(self, config: TransformerConfig, weights: Weights) -> None:
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
            # Rounded to the model's dtype first, as the reference implementations do.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)
        return {STREAM: x}

    def layer(self, layer: int, carried: Carried, history: History, taps: Taps) -> Carried:
        """resid_pre [B, token, D] -> resid_post [B, kept, D] of one layer, where the loop shows it."""
        c, weights = self.config, self.weights.layers[layer]
        x = taps("resid_pre", layer, carried[STREAM])
        h = normalise(x, weights.ln1, c.norm_type, c.norm_eps, taps, "ln1", layer)
        h = attention(h, weights, c, c.mixers[layer], layer, history, taps)
        if weights.ln1_post is not None:
            h = normalise(h, weights.ln1_post, c.norm_type, c.norm_eps, taps, "ln1_post", layer)
        x = taps("resid_mid", layer, history.kept(x) + taps("attn_out", layer, h))
        h = taps("mlp_pre", layer, normalise(x, weights.ln2, c.norm_type, c.norm_eps, taps, "ln2", layer))
        h = taps("mlp_post", layer, mlp(h, weights, c.activation, layer, taps))
        if weights.ln2_post is not None:
            h = normalise(h, weights.ln2_post, c.norm_type, c.norm_eps, taps, "ln2_post", layer)
        return {**carried, STREAM: x + taps("mlp_out", layer, h)}

    def finish(self, x: Tensor, taps: Taps, want: Logits | None) -> Tensor:
        """The last residual stream [B, S, D] -> normalised, [B, wanted positions, D]."""
        c, final = self.config, self.weights.final_norm
        if want is not None and not taps.touches(None, "ln_final_scale", "ln_final_normalized", "final_norm"):
            return apply_norm(want.at_positions(x), final, c.norm_type, c.norm_eps)
        x = taps("final_norm", None, normalise(x, final, c.norm_type, c.norm_eps, taps, "ln_final", None))
        return x if want is None else want.at_positions(x)

    def final_norm(self, x: Tensor) -> Tensor:
        """The final norm of residual states [..., D]."""
        return apply_norm(x, self.weights.final_norm, self.config.norm_type, self.config.norm_eps)

    def unembed(self, x: Tensor, want: Logits, *, softcap: bool = True) -> Tensor:
        """Normalised states [..., D] -> logits [..., tokens], soft-capped as the model's output is."""
        logits = product(x, want.of_tokens(self.unembedding))
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits

    # -- weights as matrices, for what is linear once attention and norms are held

    @property
    def unembedding(self) -> Tensor:
        """What the LM head multiplies by, [vocab, hidden]."""
        return self.weights.embed if self.weights.lm_head is None else self.weights.lm_head

    def norm_gain(self, name: str, layer: int | None, dtype: torch.dtype) -> Tensor:
        """What a norm multiplies by [hidden]: "ln1", "ln2", "ln1_post", "ln2_post" of a layer; "ln_final"."""
        norm = self.weights.final_norm if layer is None else getattr(self.weights.layers[layer], name)
        weight: Tensor = norm.weight.to(dtype)
        return 1 + weight if self.config.norm_type == "gemma_rms" else weight

    def value_matrix(self, layer: int) -> Tensor:
        """The V projection [kv_head * d_head, hidden]."""
        weights = self.weights.layers[layer]
        part = weights.v if weights.v is not None else weights.qkv
        assert part is not None  # every attention has values
        return part.weight[-self.config.num_kv_heads * self.config.head_dim :]

    def output_matrix(self, layer: int) -> Tensor:
        """The O projection [hidden, head * d_head]."""
        return self.weights.layers[layer].o.weight
