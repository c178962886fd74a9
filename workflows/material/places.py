"""Hook points for interventions on a single layer and position, and their titles.

Border: names, and the kinds of hook points that an architecture has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...store.errors import ConfigError, nearest

if TYPE_CHECKING:
    from ...stages.forward.architectures.architecture import Architecture

__all__ = ["NAMES", "USUAL", "check_kinds", "in_every_layer"]

USUAL = ("resid_post", "attn_out", "mlp_out")
"""Kinds of hook points that are patched or restored by default."""

NAMES = {
    "resid_pre": "State entering the layer",
    "resid_mid": "State after attention",
    "resid_post": "State after the layer",
    "attn_out": "Attention output",
    "mlp_out": "MLP output",
    "z": "Output of each head",
    "q": "Queries of each head",
    "k": "Keys of each key/value head",
    "v": "Values of each key/value head",
    "pattern": "Pattern of each head",
    "rwkv_state_seq": "State after each token",
    "rwkv_r": "Receptance of each head",
    "rwkv_k": "Keys that each head writes",
    "rwkv_v": "Values that each head writes",
    "rwkv_wkv_out": "Output of each head, read from its state",
    "ssm_state_seq": "State after each token",
    "ssm_x": "Values that each head writes",
    "ssm_out": "Output of each head, read from its state",
    "linear_state_seq": "State after each token",
    "linear_v": "Values that each head writes",
    "linear_out": "Output of each head, read from its state",
    "mlstm_state_seq": "Memory after each token",
    "mlstm_q": "Queries of each head, which read its memory",
    "mlstm_k": "Keys that each head writes",
    "mlstm_v": "Values that each head writes",
    "mlstm_out": "Output of each head, read from its memory",
}
"""Kind of hook point -> title of a heatmap of it."""


def check_kinds(kinds: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError for a kind of hook point that is not allowed, with the nearest allowed one.

    Arguments:
        kinds: the kinds to check.
        allowed: the kinds that are allowed.
    """
    for kind in kinds:
        if kind not in allowed:
            near = nearest(kind, allowed) or allowed[0]
            raise ConfigError(
                f"expected kinds among {', '.join(allowed)}, found {kind!r}; nearest is {near!r}"
            )


def in_every_layer(config: Architecture, kinds: Sequence[str]) -> tuple[str, ...]:
    """Select the kinds of hook points present in every layer of a model.

    Arguments:
        config: configuration of the model.
        kinds: the kinds to choose from.
    """
    return tuple(kind for kind in kinds if len(config.layers_with(kind)) == config.num_layers)
