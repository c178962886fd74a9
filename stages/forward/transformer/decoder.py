"""The decoder: embedding, blocks, final norm, LM head, as plain code over a TransformerConfig and its
weights.

Knows tensors and taps; knows no text, files or stores. Computes only what is asked: it ends at the last
wanted hook point, and the LM head runs only where logits are wanted.

    embed -> [resid_pre -> ln1 -> attention -> (ln1_post) -> attn_out -> resid_mid
                        -> ln2 -> MLP       -> (ln2_post) -> mlp_out  -> resid_post] * L -> final_norm ->
                        logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import TransformerConfig
from ..points import HookPoint, transformer_points
from ..products import product
from ..taps import AttentionTaps, EverythingHeld, RunTaps, Taps
from ..wants import Logits
from ..weights import LayerWeights, Weights
from .attention import Positions, WholeSequences, attention, causal, linear
from .norms import apply_norm, normalise
from .rope import depends_on_length, rope_tables
from .sweep import Result, sweep

if TYPE_CHECKING:
    from ..branches import Wanted
    from ..planner import Block

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "relu": lambda x: F.relu(x, inplace=True),
}
"""Same bits, no new tensor: the widest of a layer, whose fresh pages cost more than the function."""


class Decoder:
    """A transformer whose forward pass can be read and changed at every hook point."""

    version = "transformer/1"
    """Enters every key of what it computes: moves when its numbers move."""

    def __init__(self, config: TransformerConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._activation = ACTIVATIONS[config.activation]
        self.hook_points: tuple[HookPoint, ...] = transformer_points(
            config.num_layers, post_norms=config.use_post_norms, gated=config.mlp_layout != "plain"
        )

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix [vocab, hidden]."""
        return self.weights.embed

    @property
    def lengths_must_match(self) -> bool:
        """Whether prompts of different length may not share a batch, padded on the right."""
        return depends_on_length(self.config.rope)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the axes that do not depend on the batch."""
        c = self.config
        return {
            "hidden": c.hidden_size,
            "head": c.num_attention_heads,
            "kv_head": c.num_kv_heads,
            "d_head": c.head_dim,
            "mlp": c.intermediate_size,
            "one": 1,
        }

    def forward(self, ids: Tensor, taps: RunTaps, want: Logits | None) -> Tensor | None:
        """ids: int [B, S]. Returns the logits wanted, [B, positions, tokens], or None if none are.

        Taps made with ``stop_early`` end the pass at the last wanted hook point.
        """
        try:
            x = self.finish(self._blocks(ids, taps), taps, want)
            return None if want is None else self.unembed(x, want)
        except EverythingHeld:
            return None

    def sweep(self, block: Block, wanted: Sequence[Wanted], room: int) -> Iterator[Result]:
        """What the runs that end in a block of a plan give, many runs in one pass over the layers."""
        return sweep(self, block, wanted, room)

    def _blocks(self, ids: Tensor, taps: RunTaps) -> Tensor:
        x = taps("embed", None, self.embed(ids))
        positions = self.positions(ids.shape[1], x.device, taps)
        for layer, weights in enumerate(self.weights.layers):
            x = self.block(taps("resid_pre", layer, x), layer, weights, positions, taps)
        return x

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, S] -> embeddings [B, S, D], scaled where the family does."""
        x = F.embedding(ids, self.weights.embed)
        if self.config.embedding_scale is None:
            return x
        # Rounded to the model's dtype first, as the reference implementations do.
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)

    def positions(self, length: int, device: torch.device, taps: AttentionTaps) -> WholeSequences:
        """Rope tables and the masks of every window size, for positions 0 … length-1."""
        cos, sin = rope_tables(self.config.rope, length, device)
        narrow = {window for window in self.config.layer_windows if window is not None and window < length}
        windows: dict[int | None, Tensor] = {window: causal(length, window, device) for window in narrow}
        return WholeSequences(self.config, taps, cos, sin, windows)

    def block(self, x: Tensor, layer: int, weights: LayerWeights, positions: Positions, taps: Taps) -> Tensor:
        """resid_pre [B, S, D] -> resid_post [B, kept, D] of one layer."""
        c = self.config
        h = normalise(x, weights.ln1, c.norm_type, c.norm_eps, taps, "ln1", layer)
        h = attention(h, weights, c, layer, positions, taps)
        if weights.ln1_post is not None:
            h = normalise(h, weights.ln1_post, c.norm_type, c.norm_eps, taps, "ln1_post", layer)
        x = taps("resid_mid", layer, positions.kept(x) + taps("attn_out", layer, h))
        h = taps("mlp_pre", layer, normalise(x, weights.ln2, c.norm_type, c.norm_eps, taps, "ln2", layer))
        h = taps("mlp_post", layer, self._mlp(h, layer, weights, taps))
        if weights.ln2_post is not None:
            h = normalise(h, weights.ln2_post, c.norm_type, c.norm_eps, taps, "ln2_post", layer)
        return taps("resid_post", layer, x + taps("mlp_out", layer, h))

    def _mlp(self, x: Tensor, layer: int, weights: LayerWeights, taps: Taps) -> Tensor:
        gate: Tensor | None
        if weights.gate_up is not None:
            gate, up = linear(x, weights.gate_up).chunk(2, dim=-1)
        else:
            gate = None if weights.gate is None else linear(x, weights.gate)
            up = linear(x, weights.up)
        activated = up if gate is None else gate
        act = self._activation
        if not taps.touches(layer, "mlp_pre_act"):
            act = IN_PLACE.get(self.config.activation, act)
        inner = act(taps("mlp_pre_act", layer, activated))
        if gate is not None:
            inner.mul_(taps("mlp_pre_linear", layer, up))  # nobody else has seen it
        return linear(taps("mlp_post_act", layer, inner), weights.down)

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
        head = self.weights.embed if self.weights.lm_head is None else self.weights.lm_head
        logits = product(x, want.of_tokens(head))
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if softcap and cap is not None else logits
