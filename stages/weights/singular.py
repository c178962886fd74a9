"""What a head does, in tokens: the singular directions of its circuits, read through the vocabulary.

Border: matrices of a model; runs nothing. Idea (Millidge and Black 2022, "The singular value decompositions
of transformer weight matrices are highly interpretable"): OV = U diag(S) V'. What is read most strongly lies
along the first columns of U and is written along those of V; each token's embedding along the one, and each
logit along the other, name them. Of QK the two sides are what queries and what keys look for.

A direction and its opposite are the same singular vector: both sides are turned so that the token that lies
farthest along what is written raises its logit.

Axes: direction, rank (0: first token), side in the names of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import ConfigError
from .circuits import ov_circuit, qk_circuit

if TYPE_CHECKING:
    import xarray as xr

    from .matrices import Matrices

__all__ = ["singular_directions"]

ROWS = 4096
TOKENS = ("direction", "rank")


@stage(
    version=1,
    forms={
        "singular_directions": {},
        "singular_directions_of_best": {"copying": ("layer", "head")},
    },
    outputs={
        "told_layer": Output((), "1", "layer of the head"),
        "told_head": Output((), "1", "the head"),
        "singular_value": Output(("direction",), "1", "singular value"),
        "share": Output(("direction",), "1", "share of the squared norm"),
        "read_token": Output(TOKENS, "1", "tokens whose embedding lies farthest along what is read"),
        "read_by": Output(TOKENS, "1", "and how far"),
        "written_token": Output(TOKENS, "1", "tokens farthest along what is written, or of QK what keys are"),
        "written_by": Output(TOKENS, "1", "and how far"),
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
    """The first singular directions of a head's circuit, and the tokens along each.

    copying: scores by layer and head, instead of a head: the one whose is largest. offset: positions between
    query and key, of QK with rope. Of OV, written_by is logits per unit read.
    Raises ConfigError for another circuit, or a head there is not.
    """
    import xarray as xr

    if circuit not in ("OV", "QK"):
        raise ConfigError(f"expected circuit 'OV' or 'QK', found {circuit!r}")
    if copying is not None:
        scores = copying.transpose("layer", "head")
        place, best = np.unravel_index(int(np.nanargmax(scores.values)), scores.shape)
        layer, head = int(scores["layer"].values[place]), int(best)
    of_values = circuit == "OV"
    matrix = (
        ov_circuit(weights, layer, head) if of_values else qk_circuit(weights, layer, head, offset=offset)
    )
    u, s, v = matrix.svd()
    count = min(directions, len(s))
    u, v = u[:, :count], v[:, :count] * s[:count]

    def entered(here: slice) -> Array:
        return weights.embedding(here)

    def read_out(here: slice) -> Array:
        return weights.unembedding(here).matrix.T

    written, written_by, sign = _top(weights, read_out if of_values else entered, v, top_k)
    read, read_by, _ = _top(weights, entered, u, top_k, sign)
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


def _top(
    weights: Matrices,
    rows: Callable[[slice], Array],
    along: Floats,
    top_k: int,
    sign: Floats | None = None,
) -> tuple[Array, Floats, Floats]:
    """(tokens, how far [direction, rank], sign [direction]) farthest along directions [hidden, direction],
    one block of the vocabulary after another; sign: as given, or that of whichever lies farthest."""
    vocab, best = weights.config.vocab_size, min(top_k, weights.config.vocab_size)
    ids = np.empty((2, along.shape[1], 0), np.int64)
    values = np.empty((2, along.shape[1], 0))
    for start in range(0, vocab, ROWS):
        here = slice(start, min(start + ROWS, vocab))
        found = (rows(here) @ along).T
        both = np.concatenate([values, np.stack([found, -found])], axis=2)
        every = np.broadcast_to(np.arange(here.start, here.stop), (2, *found.shape))
        named = np.concatenate([ids, every], axis=2)
        order = np.argsort(-both, axis=2, kind="stable")[..., :best]
        values, ids = (np.take_along_axis(each, order, axis=2) for each in (both, named))
    if sign is None:
        sign = np.where(values[0, :, 0] >= values[1, :, 0], 1.0, -1.0)
    side, each = np.where(sign > 0, 0, 1), np.arange(along.shape[1])
    return ids[side, each], values[side, each], sign
