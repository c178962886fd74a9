"""Singular directions of a head's circuits, named by tokens through embedding and unembedding.

Border: matrices of a model; no forward pass. OV = U diag(S) V^T (Millidge and Black 2022, "The singular value
decompositions of transformer weight matrices are highly interpretable"): the head reads most strongly along
the first columns of U and writes along those of V. Tokens whose embedding lies along the first, and whose
logit lies along the second, name them. Of QK the two sides are queries and keys.

A singular vector is defined up to its sign, shared by both sides. The sign is chosen such that the token
farthest along the written side has its logit raised.

Axes: direction, rank (0: first token); the side is in the names of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from .circuits import ov_circuit, qk_circuit
from .matrices import vocabulary_blocks

if TYPE_CHECKING:
    import xarray as xr

    from .matrices import Matrices

__all__ = ["singular_directions"]

TOKENS = ("direction", "rank")
"""Dims of the tokens of each direction."""


@stage(
    version=1,
    forms={
        "singular_directions": {},
        "singular_directions_of_best": {"copying": ("layer", "head")},
    },
    outputs={
        "told_layer": Output((), "1", "layer of the head"),
        "told_head": Output((), "1", "index of the head in its layer"),
        "singular_value": Output(("direction",), "1", "singular value"),
        "share": Output(("direction",), "1", "share of the circuit's squared Frobenius norm"),
        "read_token": Output(TOKENS, "1", "tokens whose embedding lies farthest along the read direction"),
        "read_by": Output(TOKENS, "1", "projection of the token's embedding on the read direction"),
        "written_token": Output(TOKENS, "1", "tokens farthest along the written (of QK: key) direction"),
        "written_by": Output(TOKENS, "1", "projection of the token on the written direction"),
    },
    resources=("weights",),
)
def singular_directions(
    copying: xr.DataArray | None = None,
    *,
    weights: Matrices,
    layer: int = 0,
    head: int = 0,
    circuit: Literal["OV", "QK"] = "OV",
    directions: int = 5,
    top_k: int = 5,
    offset: int = 0,
) -> xr.Dataset:
    """First singular directions of a head's circuit, and the tokens farthest along each.

    Arguments:
        copying: copying scores [layer, head]; if given, the head with the largest score is used.
        weights: matrices of the model.
        layer: layer of the head, without `copying`.
        head: index of the head, without `copying`.
        circuit: "OV" or "QK".
        directions: number of singular directions.
        top_k: number of tokens per direction.
        offset: distance from the key to its query, for QK with rope.

    Returns:
        See the declared outputs; of OV, `written_by` is in logits per unit read.

    Raises:
        ConfigError: another circuit, or a head that does not exist.
    """
    import xarray as xr

    if circuit not in ("OV", "QK"):
        raise ConfigError(f"expected 'OV' or 'QK' as the circuit of a head, found {circuit!r}")
    if copying is not None:
        scores = copying.transpose("layer", "head")
        # Layers without attention have no row, so a row number is not a layer number.
        row, best = np.unravel_index(int(np.nanargmax(scores.values)), scores.shape)
        layer, head = int(scores["layer"].values[row]), int(best)
    is_ov = circuit == "OV"
    matrix = ov_circuit(weights, layer, head) if is_ov else qk_circuit(weights, layer, head, offset=offset)
    u, s, v = matrix.svd()
    count = min(directions, len(s))
    # Only the written side is scaled by S, so that `written_by` is logits per unit read.
    u, v = u[:, :count], v[:, :count] * s[:count]

    def unembedding(token_rows: slice) -> Array:
        return weights.unembedding(token_rows).matrix.T

    written, written_by, sign = _farthest_tokens(
        weights, unembedding if is_ov else weights.embedding, v, top_k
    )
    read, read_by, _ = _farthest_tokens(weights, weights.embedding, u, top_k, sign)
    return xr.Dataset(
        {
            "told_layer": layer,
            "told_head": head,
            "singular_value": ("direction", s[:count]),
            "share": ("direction", np.square(s[:count]) / np.square(s).sum()),
            "read_token": (TOKENS, read),
            "read_by": (TOKENS, read_by),
            "written_token": (TOKENS, written),
            "written_by": (TOKENS, written_by),
        }
    )


def _farthest_tokens(
    weights: Matrices,
    rows: Callable[[slice], Array],
    along: Floats,
    top_k: int,
    sign: Floats | None = None,
) -> tuple[Array, Floats, Floats]:
    """Tokens with the largest projections on directions; the vocabulary is read in blocks.

    Arguments:
        weights: matrices of the model.
        rows: function from a slice of the vocabulary to vectors of its tokens, [vocab, hidden].
        along: directions [hidden, direction].
        top_k: number of tokens per direction.
        sign: sign of each direction, [direction]; None chooses the side with the farthest token.

    Returns:
        (token ids [direction, rank], projections [direction, rank], sign [direction]).
    """
    count = min(top_k, weights.config.vocab_size)
    ids = np.empty((2, along.shape[1], 0), np.int64)
    values = np.empty((2, along.shape[1], 0))
    for block in vocabulary_blocks(weights.config):
        projections = (rows(block) @ along).T
        # Both signs are ranked: the sign of a direction is chosen after the whole vocabulary was read.
        candidates = np.concatenate([values, np.stack([projections, -projections])], axis=2)
        block_ids = np.broadcast_to(np.arange(block.start, block.stop), (2, *projections.shape))
        candidate_ids = np.concatenate([ids, block_ids], axis=2)
        # Stable, so that equal projections keep the order of token ids.
        order = np.argsort(-candidates, axis=2, kind="stable")[..., :count]
        values, ids = (np.take_along_axis(array, order, axis=2) for array in (candidates, candidate_ids))
    if sign is None:
        sign = np.where(values[0, :, 0] >= values[1, :, 0], 1.0, -1.0)
    side, direction = np.where(sign > 0, 0, 1), np.arange(along.shape[1])
    return ids[side, direction], values[side, direction], sign
