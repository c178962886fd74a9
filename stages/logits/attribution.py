"""Direct logit attribution: the logit of a token as a sum of contributions of all layers.

Idea (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"): the final residual stream is
the sum of the embedding and the outputs of all attention and MLP layers. With the divisor of the final norm
fixed to its captured value the norm is linear, so each part has a share of every logit. The shares and a
constant add up to the logit before a final soft cap, which is not linear (logit_directions.py). Single heads
and neurons: attribution_units.py.

TransformerLens assumes that norm weights are folded into the unembedding; here they are applied explicitly.

Memory: tokens are processed in ranges, layer by layer; tokens without a target are skipped. Needs no torch.

Axes: component, layer, token (any sample axes in `logit_attrs`), hidden. Unit: logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from ..corpus.token_blocks import ahead, read_rows, token_ranges
from .lens import join_tokens, logits
from .logit_directions import MOST_LIKELY, NONE, Directions
from .readout import require_linear
from .residual import apply_ln_to_stack, of_one_layer

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["component_attribution", "contrasted_tokens", "logit_attrs"]


LOGIT_BYTES = 1 << 25
"""Bytes of logits [token, vocab] in memory at a time during the search for the most likely tokens."""


@stage(
    version=1,
    inputs={
        "final": ("layer", "token", "hidden"),
        "targets": ("token",),
        "against": ("token",),
        "readout": None,
    },
    outputs={
        "target_id": Output(("token",), "1", "token whose logit is attributed, -1 for none"),
        "other_id": Output(("token",), "1", "token whose logit is subtracted, -1 for none"),
        "target_logit": Output(("token",), "logits", "logit of the target before a soft cap"),
        "other_logit": Output(("token",), "logits", "logit of the other token before a soft cap"),
    },
    cells="segment",
    combine=join_tokens,
)
def contrasted_tokens(
    final: xr.DataArray, targets: xr.DataArray, against: xr.DataArray, readout: xr.Dataset
) -> xr.Dataset:
    """Resolve the two tokens that are contrasted at each position, and their logits.

    Arguments:
        final: Residual stream after each layer (resid_post), [layer, token, hidden]; its last layer gives the
            logits.
        targets: Token ids [token]; NONE (-1) for no target, MOST_LIKELY (-2) for the most likely token.
        against: Token ids [token] whose logit is subtracted; NONE, or MOST_LIKELY for the most likely token
            other than the target. Ties go to the smaller id.
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.

    Returns:
        target_id and other_id, int32 [token], and their logits without soft cap, float32 [token], NaN for
        none.
    """
    import xarray as xr

    states = final.isel(layer=-1, drop=True).transpose("token", "hidden")
    target_ids, other_ids = (np.asarray(ids.values, np.int64).copy() for ids in (targets, against))
    # A contrast without a target has no meaning, and would otherwise get a logit.
    other_ids[target_ids == NONE] = NONE
    found_logits = {
        name: np.full(len(target_ids), np.nan, np.float32) for name in ("target_logit", "other_logit")
    }
    with_target = np.flatnonzero(target_ids != NONE)
    # float32 logits of a whole corpus would be vocab / hidden times as large as its states.
    step = max(1, LOGIT_BYTES // (4 * readout.sizes["vocab"]))
    for start in range(0, len(with_target), step):
        rows = with_target[start : start + step]
        block_logits = logits(states.isel(token=rows), readout, soft_cap=False).values
        _resolve_tokens(block_logits, rows, target_ids, other_ids, found_logits)
    data = {"target_id": target_ids.astype(np.int32), "other_id": other_ids.astype(np.int32), **found_logits}
    coords = {name: c for name, c in states.coords.items() if c.dims == ("token",)}
    return xr.Dataset({name: ("token", values) for name, values in data.items()}, coords=coords)


def _resolve_tokens(
    logits: Array, tokens: Array, target_ids: Array, other_ids: Array, found_logits: dict[str, Array]
) -> None:
    """Replace MOST_LIKELY by the most likely token id and look up the logits at some positions, both in
    place.

    Arguments:
        logits: Logits at these positions, [row, vocab].
        tokens: Indices of these positions among all tokens, [row].
        target_ids: Token ids, [token].
        other_ids: Ids of the contrasted tokens, [token].
        found_logits: Arrays [token] for the logits of both.
    """
    row = np.arange(len(tokens))
    target_ids[tokens] = np.where(
        target_ids[tokens] == MOST_LIKELY, logits.argmax(axis=1), target_ids[tokens]
    )
    target_logits = logits[row, target_ids[tokens]]
    found_logits["target_logit"][tokens] = target_logits
    # The target must not be chosen as its own contrast; restored, as a given contrast may equal the target.
    logits[row, target_ids[tokens]] = -np.inf
    other_ids[tokens] = np.where(other_ids[tokens] == MOST_LIKELY, logits.argmax(axis=1), other_ids[tokens])
    logits[row, target_ids[tokens]] = target_logits
    found_logits["other_logit"][tokens] = np.where(
        other_ids[tokens] == NONE, np.nan, logits[row, other_ids[tokens]]
    )


# Dims of each input of `component_attribution`.
_WRITTEN: Mapping[str, tuple[str, ...] | None] = {
    "embed": ("token", "hidden"),
    "attn_out": ("layer", "token", "hidden"),
    "mlp_out": ("layer", "token", "hidden"),
    "scale": ("token",),
    "targets": ("token",),
    "against": ("token",),
    "readout": None,
}


@stage(
    version=1,
    forms={
        "component_attribution": _WRITTEN,
        "component_attribution_pre_norm": {**_WRITTEN, "embed": ("layer", "token", "hidden")},
        "component_attribution_of_mixers": {
            name: dims for name, dims in _WRITTEN.items() if name != "mlp_out"
        },
    },
    outputs={
        "embed_share": Output(("token",), "logits", "share of the embedding"),
        "attn_share": Output(("layer", "token"), "logits", "share of each layer's attention"),
        "mlp_share": Output(("layer", "token"), "logits", "share of each layer's MLP", is_optional=True),
        "constant": Output(("token",), "logits", "share of the biases of final norm and unembedding"),
        "total": Output(("token",), "logits", "sum of all shares: the logit (difference) before a soft cap"),
    },
    cells="segment",
    combine=join_tokens,
    memory=0.5,
)
def component_attribution(
    embed: xr.DataArray,
    attn_out: xr.DataArray,
    scale: xr.DataArray,
    targets: xr.DataArray,
    against: xr.DataArray,
    readout: xr.Dataset,
    mlp_out: xr.DataArray | None = None,
) -> xr.Dataset:
    """Share of every attention (or other mixer) and MLP layer in the logit of each token's target.

    Arguments:
        embed: Start of the residual stream [token, hidden]; or, if that is the norm of the embedding (RWKV),
            `pre_norm` [layer, token, hidden] of its single layer.
        attn_out: Attention outputs of all layers [layer, token, hidden], lazy or not.
        mlp_out: MLP outputs likewise; None for a model without MLPs (Mamba).
        scale: Captured divisor of the final norm, `ln_final_scale` [token].
        targets: Token ids [token]; NONE (-1) for no target.
        against: Token ids [token]; shares are then of the difference of the two logits. NONE for no contrast.
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.

    Returns:
        Shares in float32, constant and total in float64; NaN without a target.

    Raises:
        ShapeError: A layer is missing, or sizes do not match.
    """
    import xarray as xr

    # RWKV's `pre_norm` comes with the layer axis it was captured with.
    embed = of_one_layer(embed)
    require_whole(attn_out, mlp_out, readout)
    written = {"attn_share": attn_out} | ({} if mlp_out is None else {"mlp_share": mlp_out})
    directions = Directions.of(readout, targets.values, against.values)
    divisor = scale.values
    n_tokens = embed.sizes["token"]
    sources = {"embed_share": embed.expand_dims("layer"), **written}
    shares = {
        name: np.full((source.sizes["layer"], n_tokens), np.nan, np.float32)
        for name, source in sources.items()
    }
    ranges = directions.chosen(token_ranges(attn_out, embed.sizes["hidden"]))
    # All parts of one token range before the next: the directions of the range are then computed once.
    parts = [(name, layer) for name in sources for layer in range(sources[name].sizes["layer"])]
    reads = [
        (token_range, with_target, name, layer)
        for token_range, with_target in ranges
        for name, layer in parts
    ]
    for (token_range, with_target, name, layer), rows in ahead(
        reads, lambda request: read_rows(sources[request[2]], request[0], request[1], layer=request[3])
    ):
        if (name, layer) == parts[0]:
            direction = directions.along(token_range, with_target, divisor)
        shares[name][layer, token_range.start + with_target] = np.einsum("th,th->t", rows, direction)
    constant = directions.constant()
    # float64, because thousands of float32 shares of mixed sign cancel.
    total = sum((share.astype(np.float64).sum(axis=0) for share in shares.values()), constant)
    coords = {name: c for name, c in attn_out.coords.items() if "hidden" not in c.dims}
    return xr.Dataset(
        {
            "embed_share": ("token", shares["embed_share"][0]),
            **{name: (("layer", "token"), shares[name]) for name in written},
            "constant": ("token", constant),
            "total": ("token", total),
        },
        coords=coords,
    )


def require_whole(attn_out: xr.DataArray, mlp_out: xr.DataArray | None, readout: xr.Dataset) -> None:
    """Check that attention and MLP outputs have all layers, so that shares add up to the logit.

    Arguments:
        attn_out: Attention outputs [layer, token, hidden].
        mlp_out: MLP outputs [layer, token, hidden]; None for a model without MLPs.
        readout: Final norm and unembedding of the model.

    Raises:
        ShapeError: A layer is missing in one of them, or their width is not that of the readout.
    """
    present = (attn_out,) if mlp_out is None else (attn_out, mlp_out)
    layers = [array["layer"].values.tolist() for array in present]
    if layers[0] != list(range(len(layers[0]))) or layers[0] != layers[-1]:
        raise ShapeError(
            "logit attribution needs attn_out and mlp_out of all layers 0, 1, 2, …, found layers "
            f"{layers[0]} and {layers[-1]}; capture all: mizarr capture MODEL PROMPTS --hooks "
            "'blocks.*.hook_attn_out' --hooks 'blocks.*.hook_mlp_out'"
        )
    if attn_out.sizes["hidden"] != readout.sizes["hidden"]:
        raise ShapeError(
            f"the unembedding reads states of width {readout.sizes['hidden']}, found states of width "
            f"{attn_out.sizes['hidden']}; pass states and readout of the same model"
        )


def logit_attrs(
    stack: xr.DataArray,
    scale: xr.DataArray,
    readout: xr.Dataset,
    *,
    token: xr.DataArray | int,
    against: xr.DataArray | int | None = None,
) -> xr.DataArray:
    """Logit contribution of each component of a stack, optionally as a difference of two tokens.

    Over all components of a decomposition, plus `constant_share`, the shares sum to the logit.

    Arguments:
        stack: Parts of the residual stream [component, ..., hidden]; possibly not all of them.
        scale: Captured divisor of the final norm [...].
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        token: Token id, one for all states or one per state [...].
        against: Token id whose logit is subtracted, in the same form; None for no contrast.

    Returns:
        Contributions [component, ...] in logits before the soft cap.
    """
    import xarray as xr

    require_linear(readout)
    unembed = readout["unembed"]
    direction = _rows(unembed, token) - (0 if against is None else _rows(unembed, against))
    parts = apply_ln_to_stack(stack, scale, norm=readout.attrs["norm"], weight=readout["norm_weight"])
    shares: xr.DataArray = xr.dot(parts.astype(np.float64), direction, dim="hidden")
    named = shares.transpose("component", ...).rename("logit_attrs")
    return named.assign_attrs(units="logits", long_name="share of the logit")


def constant_share(
    readout: xr.Dataset, *, token: xr.DataArray | int, against: xr.DataArray | int | None = None
) -> xr.DataArray:
    """Contribution of the biases of final norm and unembedding to a logit; 0 without biases.

    Arguments:
        readout: Final norm and unembedding of the model, see stages/logits/readout.py.
        token: Token id, or one per state [...].
        against: Token id whose logit is subtracted, in the same form; None for no contrast.
    """
    import xarray as xr

    require_linear(readout)
    rows = _rows(readout["unembed"], token)
    if against is not None:
        rows = rows - _rows(readout["unembed"], against)
    total: xr.DataArray = xr.zeros_like(rows.isel(hidden=0, drop=True))
    if "norm_bias" in readout:
        total = total + xr.dot(rows, readout["norm_bias"].astype(np.float64), dim="hidden")
    if "unembed_bias" in readout:
        bias = readout["unembed_bias"]
        total = total + _rows(bias, token) - (0 if against is None else _rows(bias, against))
    return total


def _rows(table: xr.DataArray, token: xr.DataArray | int) -> xr.DataArray:
    """Entries of a table [vocab, ...] for token ids, float64 [..., ...]; reads only these entries."""
    # isel before astype: otherwise the whole unembedding would be widened to float64.
    rows: xr.DataArray = table.isel(vocab=token).astype(np.float64)
    return rows.drop_vars("token", errors="ignore") if "token" not in rows.dims else rows
