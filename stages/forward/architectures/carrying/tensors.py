"""Names and shapes of the tensors of Gemma 3n and Gemma 4 checkpoints.

Weights are named as networks/carrying/ looks them up. In layers: "input." (inputs of a layer), "altup.",
"laurel.", and "scalar". Outside of layers, with the prefix `BESIDE`: "table", "projection" and "norm" of the
inputs of layers; "in.{i}" and "out.{i}", which project the embedding to stream i, and that stream back at the
end.

Border: names and shapes; never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from ..architecture import BESIDE, Stored, Tensors
from ..layer_tensors import HybridShapes, composed_tensors
from ..mixers import AttentionSpec

__all__ = ["carrying_tensors"]

_OWN_KEYS = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias", "v_proj.bias")
"""Unused tensors that checkpoints may hold for layers that reuse keys and values of an earlier layer."""


class _Shapes(HybridShapes, Protocol):
    """Attributes of an architecture that determine its tensors and their shapes."""

    @property
    def num_layers(self) -> int: ...
    @property
    def input_size(self) -> int: ...
    @property
    def input_rows(self) -> int: ...
    @property
    def has_scalars(self) -> bool: ...
    @property
    def streams(self) -> int: ...
    @property
    def scales_corrected(self) -> bool: ...
    @property
    def laurel_rank(self) -> int: ...
    def attention(self, layer: int) -> AttentionSpec: ...


def carrying_tensors(config: _Shapes) -> Tensors:
    """Map of the weights of a Gemma 3n or 4 to tensors."""
    tensors = composed_tensors(config)
    in_layer = dict(_in_layer(config))
    layer_prefix, attention_prefix = config.spelling.layer, config.spelling.attention
    unread = {
        f"{layer_prefix.format(layer)}{attention_prefix}{name}"
        for layer in range(config.num_layers)
        if config.attention(layer).source is not None
        for name in _OWN_KEYS
    }
    if config.streams > 1 and not config.scales_corrected:
        unread |= {layer_prefix.format(layer) + _SCALE for layer in range(config.num_layers)}
    return replace(
        tensors,
        outside={**tensors.outside, **{f"{BESIDE}{name}": stored for name, stored in _outside(config)}},
        layers=[{**layer, **in_layer} for layer in tensors.layers],
        unread={*tensors.unread, *unread},
    )


_SCALE = "altup.correct_output_scale"


def _outside(config: _Shapes) -> Iterator[tuple[str, Stored]]:
    """Tensors outside of the layers."""
    # They have the same prefix as the embedding, which differs in multimodal checkpoints.
    root = config.spelling.embed.removesuffix("embed_tokens")
    c, hidden = config, config.hidden_size
    if c.input_size:
        width = c.num_layers * c.input_size
        yield "table", Stored(f"{root}embed_tokens_per_layer.weight", (c.input_rows, width))
        yield "projection", Stored(f"{root}per_layer_model_projection.weight", (width, hidden))
        yield "norm", Stored(f"{root}per_layer_projection_norm.weight", (c.input_size,))
    for stream in range(1, c.streams):
        for direction, name in (("in", "altup_projections"), ("out", "altup_unembed_projections")):
            yield f"{direction}.{stream}", Stored(f"{root}{name}.{stream - 1}.weight", (hidden, hidden))


def _in_layer(config: _Shapes) -> Iterator[tuple[str, Stored]]:
    """Tensors of every layer besides those of attention, MLP and norms."""
    c, hidden, streams, rank = config, config.hidden_size, config.streams, config.laurel_rank
    if c.input_size:
        yield "input.gate", Stored("per_layer_input_gate.weight", (c.input_size, hidden))
        yield "input.out", Stored("per_layer_projection.weight", (hidden, c.input_size))
        yield "input.norm", Stored("post_per_layer_input_norm.weight", (hidden,))
    if c.has_scalars:
        yield "scalar", Stored("layer_scalar", (1,))
    if rank:
        yield "laurel.left", Stored("laurel.linear_left.weight", (rank, hidden))
        yield "laurel.right", Stored("laurel.linear_right.weight", (hidden, rank))
        yield "laurel.norm", Stored("laurel.post_laurel_norm.weight", (hidden,))
    if streams > 1:
        yield "altup.router", Stored("altup.modality_router.weight", (streams, hidden))
        yield "altup.norm", Stored("altup.router_norm.weight", (hidden,))
        yield "altup.predicts", Stored("altup.prediction_coefs.weight", (streams**2, streams))
        yield "altup.corrects", Stored("altup.correction_coefs.weight", (streams, streams))
        if c.scales_corrected:
            yield "altup.scale", Stored(_SCALE, (hidden,))
