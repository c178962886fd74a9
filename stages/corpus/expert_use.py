"""Which tokens experts read: shares, and how far the token alone decides where it goes.

Border: labelled weights of experts, token ids; knows no model and never imports torch.

An expert that is sent a token reads a share of it, its weight over those of all experts chosen. What a token
says about its experts is the mutual information of the two, in nats: 0 where tokens of every kind go
everywhere alike, log E where each goes to one of E experts that are used alike. A corpus is finite, so that
it is above 0 for tokens that have nothing to do with their experts, too: the same with token ids rearranged
is what chance gives. That routing follows the token, more than what the text is about, is reported of Mixtral
(Jiang et al., Mixtral of Experts, 2024, section 5).

Axes: layer, token, expert; rank, draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array, Floats
from ...store.errors import PromptError, ShapeError
from .token_blocks import read_here

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["NO_TOKEN", "expert_use"]

NO_TOKEN = -1
"""Id of a token that takes no part, and of a place for which no token is left."""
RANKED = ("layer", "expert", "rank")


@stage(
    version=1,
    inputs={"weights": ("layer", "token", "expert"), "token_id": ("token",)},
    outputs={
        "share": Output(("layer", "expert"), "1", "share of tokens sent to the expert"),
        "weight": Output(("layer", "expert"), "1", "share it reads of a token sent to it, mean"),
        "information": Output(("layer",), "nats", "what a token says about its experts"),
        "chance": Output(("layer", "draw"), "nats", "the same with token ids rearranged"),
        "top_id": Output(RANKED, "1", "tokens of which it reads the largest share; -1 where there is none"),
        "top_share": Output(RANKED, "1", "the share it reads of all occurrences of that token"),
        "top_count": Output(RANKED, "tokens", "occurrences of that token"),
    },
    cells="layer",
)
def expert_use(
    weights: xr.DataArray,
    token_id: xr.DataArray,
    *,
    top_k: int = 5,
    least: int = 5,
    draws: int = 50,
    seed: int = 0,
) -> xr.Dataset:
    """What the experts of each layer read of a corpus.

    weights: [layer, token, expert], 0 of experts that are not chosen, any float dtype.  token_id: int
    [token], NO_TOKEN for those that take no part (special ones).  top_k: tokens listed of each expert.
    least: how often a token must occur to be listed.  draws: times that token ids are rearranged, by seed.
    Returns float64, ids and counts int64.
    Raises PromptError where no token takes part, ShapeError where a token that does has no expert.
    """
    import xarray as xr

    ids = np.asarray(token_id.values, np.int64)
    counted = np.flatnonzero(ids != NO_TOKEN)
    if not len(counted):
        raise PromptError("expected tokens that are not special, found none; give longer texts")
    held, kind, occurrences = np.unique(ids[counted], return_inverse=True, return_counts=True)
    often = occurrences >= least
    parts, layers = [], weights["layer"].values.tolist()
    for number, layer in enumerate(layers):
        read = read_here(weights.variable.isel(layer=number).transpose("token", "expert"))
        mass = np.asarray(read, np.float64)[counted]
        totals = mass.sum(1, keepdims=True)
        if not (totals > 0).all():
            left = int(counted[totals[:, 0] <= 0][0])
            raise ShapeError(
                f"expected an expert with a weight for every token, found none for token {left} of layer "
                f"{layer}; capture blocks.*.mlp.hook_expert_weights with nothing changed"
            )
        shares = mass / totals
        by_token = _summed(shares, kind, len(held))
        sent = mass > 0
        read_of = by_token / occurrences[:, None]
        order = np.argsort(np.where(often[:, None], -read_of, np.inf), axis=0, kind="stable")[:top_k].T
        is_read = often[order] & (np.take_along_axis(read_of.T, order, 1) > 0)
        parts.append(
            {
                "share": sent.mean(0),
                "weight": shares.sum(0) / np.maximum(sent.sum(0), 1),
                "information": information(by_token),
                "chance": _by_chance(shares, kind, len(held), draws, (seed, layer)),
                "top_id": np.where(is_read, held[order], NO_TOKEN),
                "top_share": np.where(is_read, np.take_along_axis(read_of.T, order, 1), np.nan),
                "top_count": np.where(is_read, occurrences[order], 0),
            }
        )
    dims = {name: output.dims for name, output in expert_use.outputs.items()}
    data = {name: (dims[name], np.stack([part[name] for part in parts])) for name in parts[0]}
    return xr.Dataset(data, coords={"layer": layers})


def information(joint: Floats) -> Any:
    """Mutual information, in nats, of the two axes of a table of weights [token, expert].

    >>> round(float(information(np.eye(4))), 3)  # each of four goes to an expert of its own: log 4
    1.386
    """
    p = joint / joint.sum()
    independent = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    held = p > 0
    return float((p[held] * np.log(p[held] / independent[held])).sum())


def _by_chance(shares: Floats, kind: Array, size: int, draws: int, seed: tuple[int, int]) -> Floats:
    """Information about experts of tokens that are rearranged, [draw]."""
    found = np.empty(draws)
    for draw in range(draws):
        rng = np.random.default_rng([*seed, draw])
        found[draw] = information(_summed(shares, rng.permutation(kind), size))
    return found


def _summed(shares: Floats, kind: Array, size: int) -> Floats:
    """Shares summed by kind of token, [kind, expert]."""
    columns = [np.bincount(kind, column, size) for column in shares.T]
    found: Floats = np.stack(columns, axis=1)
    return found
