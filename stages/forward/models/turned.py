"""Query vectors rotated by RoPE for keys at a given distance, without a forward pass.

Torch is imported when a rotation is computed, because angles must equal those of forward passes to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....store.arrays import Array
from ....store.errors import ConfigError

if TYPE_CHECKING:
    from ..architectures.transformer import RopeConfig

__all__ = ["turned_queries"]


def turned_queries(rope: RopeConfig | None, rows: Array, offset: int, length: int | None = None) -> Array:
    """Rotate query vectors by RoPE, so that their dot product with unrotated keys is the score at a distance.

    Attention scores depend on the difference of positions alone (Su et al. 2021, eq. 16):
    (R_p q)'(R_s k) = (R_{p - s} q)' k.

    Arguments:
        rope: RoPE of a layer; None for a layer without.
        rows: [..., d_head], queries, or rows of a matrix that makes queries.
        offset: positions from the key to the query, 0 or more.
        length: length of the prompt, for RoPE schemes that depend on it; None for `offset + 1`.

    Returns:
        The rotated rows, float32, or `rows` itself if nothing is rotated. The magnitude that YaRN and
        LongRoPE apply to queries and keys is applied to the queries twice.

    Raises:
        ConfigError: if `offset` is negative.
    """
    if offset < 0:
        raise ConfigError(
            f"expected an offset of 0 or more positions from key to query, found {offset}, a key after its "
            "query"
        )
    # At distance 0 the rotation is the identity; a magnitude stays.
    if rope is None or (offset == 0 and rope.magnitude == 1):
        return rows
    import torch

    from ..networks.rope import rope_tables, rotate

    dtype = torch.float32
    cos, sin = rope_tables(rope, max(offset + 1, length or 0), torch.device("cpu"), dtype)
    # Copied: weights are mapped read-only, and torch warns about such arrays.
    queries = torch.from_numpy(rows.copy()).float()
    rotated = rotate(queries, cos[offset], sin[offset], interleaved=rope.interleaved)
    rotary_dim = 2 * cos.shape[-1]
    # The tables hold the magnitude of one side; keys, which stay unrotated, lack theirs.
    rotated[..., :rotary_dim] *= rope.magnitude
    values: Array = rotated.numpy()
    return values
