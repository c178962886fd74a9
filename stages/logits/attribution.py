"""Direct logit attribution: the logit of a token as a sum over the layers of the model that wrote it.

Border: labelled states and a readout dataset; knows no model, never imports torch. Shares of single heads and
neurons are in attribution_units.py.

Idea (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"): the last residual stream is
the sum of the embedding and everything attention and MLPs added. With the divisor of the final norm held at
its captured value, the norm is linear, so each part has its own share of every logit, and the shares and a
constant add up to it - before a final soft cap, which is not linear (logit_directions.py).

TransformerLens assumes that norm weights are folded into the unembedding; here they are applied as they are.

Memory: tokens are taken in ranges, layer by layer; tokens without a target are not computed.

Axes: component, layer, token (any sample axes in `logit_attrs`), hidden.  Unit: logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Output, stage
from ...store.arrays import Array
from ...store.errors import ShapeError
from ..corpus.token_blocks import ahead, read_rows, token_ranges
from .lens import logits
from .logit_directions import MOST_LIKELY, NONE, Directions
from .readout import require_linear
from .residual import apply_ln_to_stack, of_one_layer

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["component_attribution", "contrasted_tokens", "logit_attrs"]


LOGIT_BYTES = 1 << 25
"""Of logits [token, vocab] that exist at a time while the most likely tokens are looked for."""


def join_tokens(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Results of consecutive token ranges as one."""
    import xarray as xr

    return xr.concat(parts, "token", data_vars="minimal", coords="minimal", compat="override", join="exact")


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
    """Which two tokens are told apart at each position, and their logits.

    final: resid_post [layer, token, hidden]; its last layer is read out.  targets, against: token ids
    [token], NONE (-1) for none, MOST_LIKELY (-2) for the likeliest token (for `against`: the likeliest one
    that is not the target; ties go to the smaller id).
    Returns target_id, other_id int32 and their logits float32 (NaN for none), [token], without soft cap.
    """
    import xarray as xr

    states = final.isel(layer=-1, drop=True).transpose("token", "hidden")
    wanted, others = (np.asarray(each.values, np.int64).copy() for each in (targets, against))
    others[wanted == NONE] = NONE
    found = {name: np.full(len(wanted), np.nan, np.float32) for name in ("target_logit", "other_logit")}
    chosen = np.flatnonzero(wanted != NONE)
    step = max(1, LOGIT_BYTES // (4 * readout.sizes["vocab"]))
    for start in range(0, len(chosen), step):
        rows = chosen[start : start + step]
        table = logits(states.isel(token=rows), readout, soft_cap=False).values
        _choose(table, rows, wanted, others, found)
    data = {"target_id": wanted.astype(np.int32), "other_id": others.astype(np.int32), **found}
    coords = {name: c for name, c in states.coords.items() if c.dims == ("token",)}
    return xr.Dataset({name: ("token", values) for name, values in data.items()}, coords=coords)


def _choose(table: Array, rows: Array, wanted: Array, others: Array, found: dict[str, Array]) -> None:
    """Fill in the ids that were left to the model, and the logits, from logits [row, vocab]."""
    at = np.arange(len(rows))
    wanted[rows] = np.where(wanted[rows] == MOST_LIKELY, table.argmax(axis=1), wanted[rows])
    own = table[at, wanted[rows]]
    found["target_logit"][rows] = own
    table[at, wanted[rows]] = -np.inf
    others[rows] = np.where(others[rows] == MOST_LIKELY, table.argmax(axis=1), others[rows])
    table[at, wanted[rows]] = own
    found["other_logit"][rows] = np.where(others[rows] == NONE, np.nan, table[at, others[rows]])


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
        "constant": Output(("token",), "logits", "what the biases of the readout add"),
        "total": Output(("token",), "logits", "sum of all: the logit (difference) before a soft cap"),
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
    """Share of every layer's attention (or other mixer) and MLP in the logit of each token's target.

    embed: what the stream begins with, [token, hidden]; or, where that is the norm of the embedding (RWKV),
    `pre_norm` [layer, token, hidden] of its one layer.  attn_out, mlp_out: [layer, token, hidden], all
    layers, lazy or not; no mlp_out of a model without MLPs (Mamba).  scale: `ln_final_scale` [token].
    targets, against: token ids [token], NONE (-1) for none; with `against` the shares are of the difference
    of the two logits.  readout: as
    stages/logits/readout.py describes it.
    Returns float32 (constant and total float64), NaN where there is no target.
    Raises ShapeError when a layer is missing or sizes do not fit.
    """
    import xarray as xr

    embed = of_one_layer(embed)
    require_whole(attn_out, mlp_out, readout)
    written = {"attn_share": attn_out} | ({} if mlp_out is None else {"mlp_share": mlp_out})
    directions = Directions.of(readout, targets.values, against.values)
    divisor = scale.values
    n_tokens = embed.sizes["token"]
    sources = {"embed_share": embed.expand_dims("layer"), **written}
    shares = {
        name: np.full((each.sizes["layer"], n_tokens), np.nan, np.float32) for name, each in sources.items()
    }
    ranges = directions.chosen(token_ranges(attn_out, embed.sizes["hidden"]))
    parts = [(name, layer) for name in sources for layer in range(sources[name].sizes["layer"])]
    reads = [(here, chosen, name, layer) for here, chosen in ranges for name, layer in parts]
    for (here, chosen, name, layer), rows in ahead(
        reads, lambda at: read_rows(sources[at[2]], at[0], at[1], layer=at[3])
    ):
        if (name, layer) == parts[0]:
            along = directions.along(here, chosen, divisor)
        shares[name][layer, here.start + chosen] = np.einsum("th,th->t", rows, along)
    constant = directions.constant()
    total = sum((part.astype(np.float64).sum(axis=0) for part in shares.values()), constant)
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
    """ShapeError unless layers of both are the same, from 0, without gaps; and as wide as the readout."""
    held = (attn_out,) if mlp_out is None else (attn_out, mlp_out)
    layers = [each["layer"].values.tolist() for each in held]
    if layers[0] != list(range(len(layers[0]))) or layers[0] != layers[-1]:
        raise ShapeError(
            f"expected attn_out and mlp_out of layers 0, 1, 2, …, found {layers[0]} and {layers[-1]}; "
            "capture all: mizarr capture --hook 'blocks.*.hook_attn_out' --hook 'blocks.*.hook_mlp_out'"
        )
    if attn_out.sizes["hidden"] != readout.sizes["hidden"]:
        raise ShapeError(
            f"expected states as wide as the readout ({readout.sizes['hidden']}), found hidden "
            f"{attn_out.sizes['hidden']}; are they of the same model?"
        )


def logit_attrs(
    stack: xr.DataArray,
    scale: xr.DataArray,
    readout: xr.Dataset,
    *,
    token: xr.DataArray | int,
    against: xr.DataArray | int | None = None,
) -> xr.DataArray:
    """Share of each component of a stack in the logit of `token`, or in its difference to that of `against`.

    stack: [component, ..., hidden], parts of the stream; they need not be all of it.  scale: [...], the
    captured divisor of the final norm.  token, against: token ids, one for all states or one per state [...].
    Returns [component, ...] in logits before the soft cap. Over all components of a decomposition, plus
    `constant_share`, the shares sum to the logit.
    """
    import xarray as xr

    require_linear(readout)
    unembed = readout["unembed"]
    direction = _rows(unembed, token) - (0 if against is None else _rows(unembed, against))
    direction = direction * float(readout.attrs.get("logit_scale", 1.0))
    parts = apply_ln_to_stack(stack, scale, norm=readout.attrs["norm"], weight=readout["norm_weight"])
    shares: xr.DataArray = xr.dot(parts.astype(np.float64), direction, dim="hidden")
    named = shares.transpose("component", ...).rename("logit_attrs")
    return named.assign_attrs(units="logits", long_name="share of the logit")


def constant_share(
    readout: xr.Dataset, *, token: xr.DataArray | int, against: xr.DataArray | int | None = None
) -> xr.DataArray:
    """What the biases of final norm and unembedding add to the logit of any state; 0 without biases."""
    import xarray as xr

    require_linear(readout)
    rows = _rows(readout["unembed"], token)
    if against is not None:
        rows = rows - _rows(readout["unembed"], against)
    total = xr.zeros_like(rows.isel(hidden=0, drop=True))
    if "norm_bias" in readout:
        total = total + xr.dot(rows, readout["norm_bias"].astype(np.float64), dim="hidden")
    if "unembed_bias" in readout:
        bias = readout["unembed_bias"]
        total = total + _rows(bias, token) - (0 if against is None else _rows(bias, against))
    scaled: xr.DataArray = total * float(readout.attrs.get("logit_scale", 1.0))
    return scaled


def _rows(table: xr.DataArray, token: xr.DataArray | int) -> xr.DataArray:
    """Rows of a [vocab, ...] table for token ids, float64; only these rows are read."""
    rows: xr.DataArray = table.isel(vocab=token).astype(np.float64)
    return rows.drop_vars("token", errors="ignore") if "token" not in rows.dims else rows
