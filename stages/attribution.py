"""Direct logit attribution: the logit of a token as a sum over the parts of the model that wrote it.

Border: labelled states and a readout dataset; knows no model, never imports torch.

Idea (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; names as in TransformerLens):
the last residual stream is the sum of the embedding and everything attention and MLPs added. With the scale
of the final norm held at its value for that state, the norm is linear, so each part has its own share of
every logit, and the shares add up to it - before a final soft cap, which is not linear.

TransformerLens assumes that norm weights are folded into the unembedding; here they are applied as they are.

Axes: component (labels "embed", "0_attn_out", "0_mlp_out", …), layer, token (any sample axes), hidden.
Unit: logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["accumulated_resid", "decompose_resid", "logit_attribution"]


def decompose_resid(embed: xr.DataArray, attn_out: xr.DataArray, mlp_out: xr.DataArray) -> xr.DataArray:
    """Everything that was added to the residual stream, [component, ..., hidden], in order of writing.

    embed: [..., hidden].  attn_out, mlp_out: [layer, ..., hidden], layers 0 to n without gaps.
    Labels "embed", "0_attn_out", "0_mlp_out", "1_attn_out", …; the sum over component is resid_post of the
    last layer given.  Raises ShapeError when a layer is missing, as the sum would be of nothing in
    particular.
    """
    import xarray as xr

    layers = attn_out["layer"].values.tolist()
    if layers != list(range(len(layers))) or mlp_out["layer"].values.tolist() != layers:
        raise ShapeError(
            f"expected attn_out and mlp_out of layers 0, 1, 2, …, found {layers} and "
            f"{mlp_out['layer'].values.tolist()}; capture all layers up to the one in question"
        )
    parts = [embed.drop_vars("layer", errors="ignore")]
    labels = ["embed"]
    for layer in layers:
        for name, states in (("attn_out", attn_out), ("mlp_out", mlp_out)):
            parts.append(states.sel(layer=layer, drop=True))
            labels.append(f"{layer}_{name}")
    return xr.concat(parts, dim="component", coords="minimal", compat="override").assign_coords(
        component=labels
    )


def accumulated_resid(
    resid_pre: xr.DataArray, resid_mid: xr.DataArray | None = None, *, final: xr.DataArray | None = None
) -> xr.DataArray:
    """The residual stream as it grows, [component, ..., hidden].

    resid_pre, resid_mid: [layer, ..., hidden].  final: resid_post of the last layer, [..., hidden].
    Labels "0_pre", "0_mid", "1_pre", …, "final_post".
    """
    import xarray as xr

    parts, labels = [], []
    for layer in resid_pre["layer"].values.tolist():
        parts.append(resid_pre.sel(layer=layer, drop=True))
        labels.append(f"{layer}_pre")
        if resid_mid is not None:
            parts.append(resid_mid.sel(layer=layer, drop=True))
            labels.append(f"{layer}_mid")
    if final is not None:
        parts.append(final.drop_vars("layer", errors="ignore"))
        labels.append("final_post")
    return xr.concat(parts, dim="component", coords="minimal", compat="override").assign_coords(
        component=labels
    )


def logit_attribution(
    components: xr.DataArray,
    final: xr.DataArray,
    readout: xr.Dataset,
    *,
    token: xr.DataArray | int,
    against: xr.DataArray | int | None = None,
) -> xr.DataArray:
    """Share of each component in the logit of `token`, or in its logit minus that of `against`; [component,
    ...].

    components: [component, ..., hidden], parts of the stream; they need not be all of it.
    final: [..., hidden], the state the model reads out, whose norm statistics are held fixed.
    token, against: token ids, one for all states or one per state [...].
    Over all components of a decomposition, plus the constant of `constant_share`, the shares sum to the logit
    before the soft cap.
    """
    import xarray as xr

    unembed = readout["unembed"]
    direction = _rows(unembed, token) - (0 if against is None else _rows(unembed, against))
    direction = direction * readout["norm_weight"] * float(readout.attrs.get("logit_scale", 1.0))
    if readout.attrs["norm"] == "layer":
        # Removing the mean of a state and removing that of the direction give the same product.
        direction = direction - direction.mean("hidden")
        final = final - final.mean("hidden")
    scale = np.sqrt((final.astype(np.float64) ** 2).mean("hidden") + readout.attrs["eps"])
    shares: xr.DataArray = xr.dot(components.astype(np.float64), direction, dim="hidden") / scale
    return shares.transpose("component", ...).rename("logit_attribution").assign_attrs(units="logits")


def constant_share(
    readout: xr.Dataset, *, token: xr.DataArray | int, against: xr.DataArray | int | None = None
) -> xr.DataArray:
    """What the biases of final norm and unembedding add to the logit of any state; 0 without biases."""
    import xarray as xr

    total: Any = xr.zeros_like(_rows(readout["unembed"], token).isel(hidden=0, drop=True), dtype=np.float64)
    if "norm_bias" in readout:
        rows = _rows(readout["unembed"], token) - (
            0 if against is None else _rows(readout["unembed"], against)
        )
        total = total + xr.dot(rows.astype(np.float64), readout["norm_bias"], dim="hidden")
    if "unembed_bias" in readout:
        bias = readout["unembed_bias"]
        total = total + _rows(bias, token) - (0 if against is None else _rows(bias, against))
    scaled: xr.DataArray = total * float(readout.attrs.get("logit_scale", 1.0))
    return scaled


def _rows(table: xr.DataArray, token: xr.DataArray | int) -> xr.DataArray:
    """Rows of a [vocab, ...] table for token ids, float64; only these rows are read."""
    rows: xr.DataArray = table.isel(vocab=token).astype(np.float64)
    return rows.drop_vars("token", errors="ignore") if "token" not in rows.dims else rows
