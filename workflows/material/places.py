"""What questions share that change one place of a model at a time: names of what is changed.

Border: words; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...store.errors import ConfigError, nearest

__all__ = ["NAMES", "check_kinds"]

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
    "rwkv_state_seq": "State behind each token",
    "rwkv_r": "Receptance of each head",
    "rwkv_k": "Keys that each head writes",
    "rwkv_v": "Values that each head writes",
    "rwkv_wkv_out": "What each head reads of its state",
}
"""Kind of hook point -> title of a grid of it."""


def check_kinds(kinds: Sequence[str], allowed: Sequence[str]) -> None:
    """ConfigError for no kinds, or one that is not allowed, with the nearest."""
    for kind in kinds:
        if kind not in allowed:
            near = nearest(kind, allowed) or allowed[0]
            raise ConfigError(
                f"expected kinds among {', '.join(allowed)}, found {kind!r}; nearest is {near!r}"
            )
    if not kinds:
        raise ConfigError("expected at least one of kinds, found none")
