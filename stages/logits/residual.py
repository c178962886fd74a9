"""The residual stream taken apart: what was added to it, by whom, and what it was on the way.

Border: labelled arrays in and out; knows no model and never imports torch. The functions copy what they
stack, so their answers are not meant to be stored: of stored arrays that are opened with dask (all that are
large) they are lazy, and only the chunks one looks at ever exist. Shares of a logit of whole corpora are
attribution.py's.

Idea (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; names, order and labels as in
TransformerLens' ActivationCache): every block adds its attention output and its MLP output to the stream, an
attention output is the sum of its heads' and a bias, an MLP output that of its neurons' and a bias. Where a
family normalises the outputs before they are added (Gemma 2), the cached divisor of that norm and its weight
are applied to every part, which keeps the sums. In RWKV the stream begins with the *norm* of the embedding,
`blocks.0.hook_pre_norm`, which takes its place: that, and not `hook_embed`, is what the rest is added to
there (`Architecture.stream_start`).

Axes: component (labels "embed", "0_attn_out", "L0H1", "L0N7", …), layer, ... (any sample axes), head, d_head,
mlp, hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...store.errors import ShapeError

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "accumulated_resid",
    "apply_ln_to_stack",
    "decompose_resid",
    "full_resid_decomposition",
    "of_one_layer",
    "stack_head_results",
    "stack_neuron_results",
]


def accumulated_resid(
    resid_pre: xr.DataArray,
    resid_mid: xr.DataArray | None = None,
    *,
    final: xr.DataArray | None = None,
    layer: int | None = None,
    mlp_input: bool = False,
) -> xr.DataArray:
    """The residual stream as it grows, [component, ..., hidden].

    resid_pre, resid_mid: [layer, ..., hidden]; without resid_mid, one state per layer.  final: resid_post of
    the last layer, [..., hidden], last entry if `layer` is None.  layer: the last layer whose resid_pre is
    given; mlp_input: and its resid_mid too.
    Labels "0_pre", "0_mid", "1_pre", …, "final_post".
    Raises ShapeError for a layer that is not there, and for mlp_input without resid_mid.
    """
    layers = _layers(resid_pre, None if layer is None else layer + 1)
    if mlp_input and (resid_mid is None or layer is None):
        raise ShapeError("expected resid_mid and layer with mlp_input=True; capture blocks.*.hook_resid_mid")
    parts = []
    for number in layers:
        parts.append((f"{number}_pre", _at(resid_pre, number)))
        if resid_mid is not None and (number != layer or mlp_input):
            parts.append((f"{number}_mid", _at(resid_mid, number)))
    if final is not None and layer is None:
        parts.append(("final_post", final))
    return _stack(parts)


def decompose_resid(
    embed: xr.DataArray | None,
    attn_out: xr.DataArray | None,
    mlp_out: xr.DataArray | None,
    *,
    layer: int | None = None,
    mlp_input: bool = False,
) -> xr.DataArray:
    """Everything that was added to the residual stream, [component, ..., hidden], in order of writing.

    embed: what the stream begins with, [..., hidden], or with an axis of its one layer.  attn_out, mlp_out:
    [layer, ..., hidden], layers 0 to n without gaps; None leaves a kind out.  layer: up to the input of this
    layer, None for all; mlp_input: and its attention output.
    Labels "embed", "0_attn_out", "0_mlp_out", "1_attn_out", …; with all three the sum over component is
    resid_post of the last layer (resid_pre of `layer`; its resid_mid with mlp_input).
    Raises ShapeError when a layer is missing, as the sum would be of nothing in particular.
    """
    parts = [] if embed is None else [("embed", of_one_layer(embed))]
    given = [
        (name, part) for name, part in (("attn_out", attn_out), ("mlp_out", mlp_out)) if part is not None
    ]
    numbers = [_layers(part, layer) for _, part in given]
    if any(each != numbers[0] for each in numbers):
        raise ShapeError(
            f"expected attn_out and mlp_out of the same layers, found {numbers[0]} and {numbers[1]}; "
            "capture all layers up to the one in question"
        )
    for number in numbers[0] if numbers else []:
        parts += [(f"{number}_{name}", _at(part, number)) for name, part in given]
    if mlp_input:
        if layer is None or attn_out is None or layer not in attn_out["layer"]:
            raise ShapeError(f"expected attn_out of layer {layer} with mlp_input=True; capture it too")
        parts.append((f"{layer}_attn_out", _at(attn_out, layer)))
    return _stack(parts)


def stack_head_results(
    z: xr.DataArray,
    weights: xr.Dataset,
    *,
    post_scale: xr.DataArray | None = None,
    remainder_of: xr.DataArray | None = None,
) -> xr.DataArray:
    """What every head added to the stream, [component, ..., hidden], labels "L0H0", "L0H1", …

    z: [layer, ..., head, d_head].  weights: the "attention" dataset of component_weights.py.  post_scale:
    [layer, ...], `ln1_post_scale` of families that have that norm.  remainder_of: a state [..., hidden] whose
    rest after all heads becomes the last component, "remainder".
    """
    results = _written(z, weights, "W_O", "ln1_post", post_scale, over=["d_head"])
    stacked = _flattened(results, "head", "L{}H{}")
    return stacked if remainder_of is None else _with_remainder(stacked, remainder_of)


def stack_neuron_results(
    post_act: xr.DataArray,
    weights: xr.Dataset,
    *,
    post_scale: xr.DataArray | None = None,
    remainder_of: xr.DataArray | None = None,
) -> xr.DataArray:
    """What every neuron added to the stream, [component, ..., hidden], labels "L0N0", "L0N1", …

    post_act: [layer, ..., mlp], `mlp_post_act`.  weights: the "mlp" dataset.  post_scale: `ln2_post_scale`.
    As large as mlp / 2 streams per layer: select tokens, or neurons, first.
    """
    results = _written(post_act, weights, "W_out", "ln2_post", post_scale, over=[])
    stacked = _flattened(results, "mlp", "L{}N{}")
    return stacked if remainder_of is None else _with_remainder(stacked, remainder_of)


def full_resid_decomposition(
    embed: xr.DataArray,
    heads: xr.DataArray,
    mlp: xr.DataArray,
    *,
    attention_weights: xr.Dataset,
    mlp_weights: xr.Dataset | None = None,
    post_scales: tuple[xr.DataArray, xr.DataArray] | None = None,
) -> xr.DataArray:
    """The whole stream as heads, MLPs (or neurons), embedding and biases: [component, ..., hidden].

    heads: of `stack_head_results`.  mlp: `mlp_out` [layer, ..., hidden], or `stack_neuron_results`.
    mlp_weights: with neurons, whose biases are then added.  post_scales: (ln1_post_scale, ln2_post_scale),
    [layer, ...], of families with norms after attention and MLP.
    Labels: heads, then "0_mlp_out" … or neurons, "embed", "bias". The sum is resid_post of the last layer.
    """
    embed = of_one_layer(embed)
    first, second = post_scales or (None, None)
    bias = _bias(embed, attention_weights, "b_O", "ln1_post", first)
    if mlp_weights is not None:
        bias = bias + _bias(embed, mlp_weights, "b_out", "ln2_post", second)
    elif "component" not in mlp.dims:
        mlp = decompose_resid(None, None, mlp)
    rest = _stack([("embed", embed), ("bias", bias)])
    return _concatenated([heads, mlp, rest])


def apply_ln_to_stack(
    stack: xr.DataArray,
    scale: xr.DataArray,
    *,
    norm: str,
    weight: xr.DataArray | None = None,
) -> xr.DataArray:
    """Parts of a stream as a norm passes them on when its divisor is held fixed: linear, so parts still sum.

    stack: [component, ..., hidden].  scale: [...], the cached divisor of the norm in question (`ln1_scale` or
    `ln2_scale` of a layer, or `ln_final_scale`).  norm: "layer" subtracts each part's mean first, "rms" does
    not.  weight: [hidden], applied where it is not folded into what reads the norm (TransformerLens assumes
    that it is).  The bias of a LayerNorm belongs to no part.
    """
    if norm not in ("rms", "layer"):
        raise ShapeError(f"expected norm 'rms' or 'layer', found {norm!r}")
    centred = stack - stack.mean("hidden") if norm == "layer" else stack
    scaled: xr.DataArray = centred / scale
    return (scaled if weight is None else scaled * weight).transpose("component", ...)


def of_one_layer(state: xr.DataArray) -> xr.DataArray:
    """A state [..., hidden] without the axis of the one layer it was captured in, if it has one; ShapeError
    where there are several."""
    own = next((str(dim) for dim in state.dims if str(dim).split("_")[0] == "layer"), None)
    if own is None:
        return state
    if state.sizes[own] != 1:
        raise ShapeError(
            f"expected what the stream begins with in one layer, found {state.sizes[own]} layers of "
            f"{state.name}; select layer 0"
        )
    return state.isel({own: 0}, drop=True)


def _written(
    states: xr.DataArray,
    weights: xr.Dataset,
    matrix: str,
    post: str,
    post_scale: xr.DataArray | None,
    *,
    over: list[str],
) -> xr.DataArray:
    """States through the matrix they are written with, and through the norm after it."""
    import xarray as xr

    chosen = weights.sel(layer=states["layer"])
    return _after_norm(xr.dot(states, chosen[matrix], dim=over), chosen, post, post_scale)


def _after_norm(
    parts: xr.DataArray, weights: xr.Dataset, post: str, post_scale: xr.DataArray | None
) -> xr.DataArray:
    """Parts of an output [layer, ..., hidden] as a norm after it passes them on; as they are without one."""
    require_post_scale(weights, post, post_scale)
    if post_scale is None:
        return parts
    centred = parts - parts.mean("hidden") if weights.attrs["norm"] == "layer" else parts
    return centred / post_scale * weights[f"{post}_weight"]


def require_post_scale(weights: xr.Dataset, post: str, post_scale: xr.DataArray | None) -> None:
    """Raise ShapeError when the divisor of a norm after attention or MLP is missing, or belongs to none."""
    has_norm = f"{post}_weight" in weights
    if has_norm and post_scale is None:
        raise ShapeError(
            f"expected post_scale: this family normalises what attention and MLPs add; capture "
            f"blocks.*.{post}.hook_scale and give {post}_scale"
        )
    if post_scale is not None and not has_norm:
        raise ShapeError(
            f"expected no post_scale: these weights have no {post} norm; are they of this model?"
        )


def _bias(
    embed: xr.DataArray, weights: xr.Dataset, name: str, post: str, post_scale: xr.DataArray | None
) -> xr.DataArray:
    """Sum over layers of what biases added, [..., hidden], zeros where there are none."""
    import xarray as xr

    total = xr.zeros_like(embed)
    if name in weights:
        total = total + _after_norm(weights[name], weights, post, post_scale).sum("layer")
    if f"{post}_bias" in weights:
        total = total + weights[f"{post}_bias"].sum("layer")
    return total.transpose(*embed.dims)


def _flattened(results: xr.DataArray, unit: str, label: str) -> xr.DataArray:
    """[layer, unit, ..., hidden] -> [component, ..., hidden], units of the first layer first."""
    results = results.transpose("layer", unit, ..., "hidden")
    numbers = results[unit].values if unit in results.coords else range(results.sizes[unit])
    labels = [label.format(layer, number) for layer in results["layer"].values for number in numbers]
    dropped = results.drop_vars([unit], errors="ignore")
    return (
        dropped.stack(component=("layer", unit), create_index=False)
        .drop_vars(["layer"], errors="ignore")
        .transpose("component", ..., "hidden")
        .assign_coords(component=labels)
    )


def _with_remainder(stacked: xr.DataArray, whole: xr.DataArray) -> xr.DataArray:
    rest = whole.drop_vars("layer", errors="ignore") - stacked.sum("component")
    return _concatenated([stacked, _stack([("remainder", rest)])])


def _layers(states: xr.DataArray, stop: int | None) -> list[int]:
    """Layers of an array, 0 to `stop` without gaps."""
    found: list[int] = states["layer"].values.tolist()
    wanted = list(range(len(found) if stop is None else stop))
    if found[: len(wanted)] != wanted:
        raise ShapeError(
            f"expected layers {wanted} of {states.name}, found {found}; capture all layers up to the one in "
            "question"
        )
    return wanted


def _at(states: xr.DataArray, layer: int) -> xr.DataArray:
    return states.sel(layer=layer, drop=True)


def _stack(parts: Iterable[tuple[str, xr.DataArray]]) -> xr.DataArray:
    """Parts [..., hidden] along a new axis of their names."""
    labels, arrays = zip(*parts, strict=True)
    plain = [array.drop_vars("layer", errors="ignore").expand_dims("component") for array in arrays]
    return _concatenated(plain).assign_coords(component=list(labels))


def _concatenated(parts: Sequence[xr.DataArray]) -> xr.DataArray:
    import xarray as xr

    found = xr.concat(parts, dim="component", coords="minimal", compat="override")
    return found.rename(None).assign_attrs(units="1").transpose("component", ..., "hidden")
