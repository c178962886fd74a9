"""Queries as rope turns them towards keys some positions before them, as data.

Border: an architecture and rows of numbers; no weights, no pass. Torch is imported where something turns, as
angles must be those of the passes to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....store.arrays import Array
from ....store.errors import ConfigError

if TYPE_CHECKING:
    from ..architectures.architecture import Heads

__all__ = ["turned_queries"]


def turned_queries(heads: Heads, rows: Array, offset: int, length: int | None = None) -> Array:
    """Rows [..., d_head] of what queries are made with, turned so that their product with unturned keys is
    the score of a key `offset` positions before.

    Scores know positions by their difference alone (Su et al. 2021, eq. 16): (R_p q)'(R_s k) =
    (R_{p - s} q)' k. length: of the prompt, for schemes of rope that depend on it; by default the shortest
    with such a pair. ConfigError for an offset below 0. The scale that yarn and longrope put on both sides is
    put on the query.
    """
    if offset < 0:
        raise ConfigError(f"expected a key at or before its query, found it {-offset} positions behind")
    if heads.rope is None or (offset == 0 and heads.rope.magnitude == 1):
        return rows
    import torch

    from ..networks.rope import rope_tables, rotate

    dtype = torch.float32
    cos, sin = rope_tables(heads.rope, max(offset + 1, length or 0), torch.device("cpu"), dtype)
    given = torch.from_numpy(rows.copy()).float()
    found = rotate(given, cos[offset], sin[offset], interleaved=heads.rope.interleaved)
    turning = 2 * cos.shape[-1]
    found[..., :turning] *= heads.rope.magnitude
    values: Array = found.numpy()
    return values
