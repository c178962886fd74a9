"""Which tokens each mixture-of-experts expert processes, and how much the token id alone decides the routing.

Border: labelled router weights and token ids; knows no model and never imports torch.

The share of a token that an expert reads is its routing weight over the sum of the routing weights of all
experts chosen for the token. Token ids and experts have a mutual information (nats): 0 if tokens of every id
are routed alike, log E if the id decides and E experts are used equally. On a finite corpus it exceeds 0 even
for independent routing, so the same statistic with permuted token ids is the null. That routing follows the
token id more than the topic is reported of Mixtral (Jiang et al., Mixtral of Experts, 2024, section 5).

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
"""Token id that marks tokens left out of the statistics, and empty ranks in lists of tokens."""
RANKED = ("layer", "expert", "rank")


@stage(
    version=1,
    inputs={"weights": ("layer", "token", "expert"), "token_id": ("token",)},
    outputs={
        "share": Output(("layer", "expert"), "1", "share of tokens routed to the expert"),
        "weight": Output(("layer", "expert"), "1", "mean share of a token that a routed expert reads"),
        "information": Output(("layer",), "nats", "mutual information of token id and expert"),
        "chance": Output(("layer", "draw"), "nats", "mutual information with permuted token ids"),
        "top_id": Output(RANKED, "1", "token ids of which the expert reads the largest share; -1 for none"),
        "top_share": Output(RANKED, "1", "mean share of that token id's occurrences read by the expert"),
        "top_count": Output(RANKED, "tokens", "occurrences of that token id"),
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
    """Which tokens the router of each layer sends to each expert, and how much the token id decides it.

    Arguments:
        weights: Routing weights [layer, token, expert], 0 for experts that are not chosen, any float dtype.
        token_id: Token ids, int [token]; `NO_TOKEN` for tokens to leave out, such as special tokens.
        top_k: Number of token ids listed for each expert.
        least: Smallest number of occurrences of a token id that is listed.
        draws: Number of permutations of the token ids, the null distribution.
        seed: Seed of the permutations.

    Returns:
        The variables in `outputs`: shares and nats as float64, ids and counts as int64.

    Raises:
        PromptError: All tokens are left out.
        ShapeError: A token that counts has no expert with a positive weight.
    """
    import xarray as xr

    ids = np.asarray(token_id.values, np.int64)
    counted = np.flatnonzero(ids != NO_TOKEN)
    if not len(counted):
        raise PromptError(
            "expected tokens other than special tokens to measure the use of experts, found none; give "
            "longer texts"
        )
    # id_row: row of each counted token's id in tables by token id.
    vocabulary, id_row, occurrences = np.unique(ids[counted], return_inverse=True, return_counts=True)
    is_frequent = occurrences >= least
    by_layer, layers = [], weights["layer"].values.tolist()
    for number, layer in enumerate(layers):
        # One layer at a time: the weights of a corpus may exceed memory.
        layer_weights = read_here(weights.variable.isel(layer=number).transpose("token", "expert"))
        mass = np.asarray(layer_weights, np.float64)[counted]
        totals = mass.sum(1, keepdims=True)
        if not (totals > 0).all():
            unrouted = int(counted[totals[:, 0] <= 0][0])
            raise ShapeError(
                "expected at least one expert with a positive routing weight for every token, found none "
                f"for token {unrouted} in layer {layer}; capture blocks.*.mlp.hook_expert_weights without "
                "interventions"
            )
        shares = mass / totals
        joint = _sums_by_id(shares, id_row, len(vocabulary))
        is_routed = mass > 0
        mean_share = joint / occurrences[:, None]
        # Infinity sorts rare ids last; a stable sort gives ties to the lower id, the same on every platform.
        order = np.argsort(np.where(is_frequent[:, None], -mean_share, np.inf), axis=0, kind="stable")
        top = order[:top_k].T
        top_share = np.take_along_axis(mean_share.T, top, 1)
        is_listed = is_frequent[top] & (top_share > 0)
        by_layer.append(
            {
                "share": is_routed.mean(0),
                # An expert without tokens has weight 0, not NaN.
                "weight": shares.sum(0) / np.maximum(is_routed.sum(0), 1),
                "information": information(joint),
                "chance": _permuted_information(shares, id_row, len(vocabulary), draws, (seed, layer)),
                "top_id": np.where(is_listed, vocabulary[top], NO_TOKEN),
                "top_share": np.where(is_listed, top_share, np.nan),
                "top_count": np.where(is_listed, occurrences[top], 0),
            }
        )
    # The declaration is the one place that states the axes.
    dims = {name: output.dims for name, output in expert_use.outputs.items()}
    data = {name: (dims[name], np.stack([values[name] for values in by_layer])) for name in by_layer[0]}
    return xr.Dataset(data, coords={"layer": layers})


def information(joint: Floats) -> Any:
    """Mutual information, in nats, of the two axes of a table of non-negative weights [token id, expert].

    >>> round(float(information(np.eye(4))), 3)  # each of four ids goes to an expert of its own: log 4
    1.386
    """
    p = joint / joint.sum()
    independent = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    positive = p > 0  # 0 log 0 counts as 0; numpy would give NaN
    return float((p[positive] * np.log(p[positive] / independent[positive])).sum())


def _permuted_information(shares: Floats, row: Array, size: int, draws: int, seed: tuple[int, int]) -> Floats:
    """Mutual information [draw] of expert and token id when the ids are permuted.

    Arguments:
        shares: Share of each token that each expert reads [token, expert].
        row: Row of each token's id in the table by token id [token].
        size: Number of distinct token ids.
        draws: Number of permutations.
        seed: Seed of the permutations; the index of the draw is appended.
    """
    values = np.empty(draws)
    for draw in range(draws):
        rng = np.random.default_rng([*seed, draw])
        values[draw] = information(_sums_by_id(shares, rng.permutation(row), size))
    return values


def _sums_by_id(shares: Floats, row: Array, size: int) -> Floats:
    """Shares [token, expert] summed over the tokens of each id, float64 [token id, expert]."""
    # bincount takes a single weight per token, hence one call for each expert.
    sums: Floats = np.stack([np.bincount(row, column, size) for column in shares.T], axis=1)
    return sums
