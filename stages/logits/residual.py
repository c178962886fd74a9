"""Decompose the residual stream: outputs of layers, heads and neurons, and the stream as it accumulates.

The functions return copies that are not meant to be stored. Over stored arrays opened with dask (all large
ones) they are lazy, and only the accessed chunks exist. Logit shares over whole corpora: attribution.py.
Needs no torch.

Idea (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; names, order and labels as in
TransformerLens' ActivationCache): every block adds its attention output and its MLP output to the stream; an
attention output is the sum over heads plus a bias, an MLP output the sum over neurons plus a bias. If a
family normalises these outputs before they are added (Gemma 2), the captured divisor and the weight of that
norm are applied to every part, which keeps the sums. In RWKV the stream starts with the *norm* of the
embedding, `blocks.0.hook_pre_norm`, instead of `hook_embed` (`Architecture.stream_start`).

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
    """The states of the residual stream from the first layer on, stacked as [component, ..., hidden].

    Arguments:
        resid_pre: States before attention [layer, ..., hidden].
        resid_mid: States between attention and MLP [layer, ..., hidden]; None to leave them out.
        final: State after the last layer [..., hidden], added as last component if `layer` is None.
        layer: Last layer whose resid_pre is included; None for all.
        mlp_input: Whether to include resid_mid of that layer.

    Returns:
        Components labelled "0_pre", "0_mid", "1_pre", …, "final_post".

    Raises:
        ShapeError: A layer is missing, or mlp_input is given without resid_mid.
    """
    layers = _layers(resid_pre, None if layer is None else layer + 1)
    if mlp_input and (resid_mid is None or layer is None):
        raise ShapeError(
            "mlp_input=True includes resid_mid of a layer, but resid_mid or layer is missing; pass both, and "
            "capture blocks.*.hook_resid_mid if needed"
        )
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
    """All outputs that were added to the residual stream, [component, ..., hidden], in order.

    Arguments:
        embed: Start of the stream [..., hidden], possibly with a layer axis of length 1.
        attn_out: Attention outputs [layer, ..., hidden] of layers 0 to n without gaps; None leaves them out.
        mlp_out: MLP outputs [layer, ..., hidden] of the same layers; None leaves them out.
        layer: Stop at the input of this layer; None for all layers.
        mlp_input: Whether to include the attention output of that layer.

    Returns:
        Components labelled "embed", "0_attn_out", "0_mlp_out", "1_attn_out", …. With all three inputs they
        sum to resid_post of the last layer (resid_pre of `layer`; its resid_mid with mlp_input).

    Raises:
        ShapeError: A layer is missing, so that the sum would have no meaning.
    """
    parts = [] if embed is None else [("embed", of_one_layer(embed))]
    outputs = [
        (name, part) for name, part in (("attn_out", attn_out), ("mlp_out", mlp_out)) if part is not None
    ]
    numbers = [_layers(part, layer) for _, part in outputs]
    if any(layers != numbers[0] for layers in numbers):
        raise ShapeError(
            f"expected attn_out and mlp_out of the same layers, found layers {numbers[0]} and {numbers[1]}; "
            "capture both in all layers up to the last one that you decompose"
        )
    for number in numbers[0] if numbers else []:
        parts += [(f"{number}_{name}", _at(part, number)) for name, part in outputs]
    if mlp_input:
        if layer is None or attn_out is None or layer not in attn_out["layer"]:
            raise ShapeError(
                f"mlp_input=True includes the attention output of layer {layer}, which attn_out lacks; "
                "capture it, too"
            )
        parts.append((f"{layer}_attn_out", _at(attn_out, layer)))
    return _stack(parts)


def stack_head_results(
    z: xr.DataArray,
    weights: xr.Dataset,
    *,
    post_scale: xr.DataArray | None = None,
    remainder_of: xr.DataArray | None = None,
) -> xr.DataArray:
    """Output of every head, [component, ..., hidden], labelled "L0H0", "L0H1", …

    Arguments:
        z: Outputs of the heads before the output projection, [layer, ..., head, d_head].
        weights: The "attention" dataset of component_weights.py.
        post_scale: Captured divisor `ln1_post_scale` [layer, ...], for families with a norm after attention.
        remainder_of: A state [..., hidden]; what remains of it after all heads becomes the component
            "remainder".
    """
    results = _written(z, weights, "W_O", "ln1_post", post_scale, over=["d_head"])
    return _flattened(results, "head", "L{}H{}", remainder_of)


def stack_neuron_results(
    post_act: xr.DataArray,
    weights: xr.Dataset,
    *,
    post_scale: xr.DataArray | None = None,
    remainder_of: xr.DataArray | None = None,
) -> xr.DataArray:
    """Output of every neuron, [component, ..., hidden], labelled "L0N0", "L0N1", …

    As large as mlp / 2 residual streams per layer: select tokens or neurons first.

    Arguments:
        post_act: Activations of the neurons, `mlp_post_act` [layer, ..., mlp].
        weights: The "mlp" dataset of component_weights.py.
        post_scale: Captured divisor `ln2_post_scale` [layer, ...], for families with a norm after the MLP.
        remainder_of: A state [..., hidden]; what remains of it after all neurons becomes the component
            "remainder".
    """
    results = _written(post_act, weights, "W_out", "ln2_post", post_scale, over=[])
    return _flattened(results, "mlp", "L{}N{}", remainder_of)


def full_resid_decomposition(
    embed: xr.DataArray,
    heads: xr.DataArray,
    mlp: xr.DataArray,
    *,
    attention_weights: xr.Dataset,
    mlp_weights: xr.Dataset | None = None,
    post_scales: tuple[xr.DataArray, xr.DataArray] | None = None,
) -> xr.DataArray:
    """The whole stream as heads, MLPs (or neurons), embedding and biases, [component, ..., hidden].

    Arguments:
        embed: Start of the stream [..., hidden], possibly with a layer axis of length 1.
        heads: Result of `stack_head_results`.
        mlp: `mlp_out` [layer, ..., hidden], or the result of `stack_neuron_results`.
        attention_weights: The "attention" dataset of component_weights.py.
        mlp_weights: The "mlp" dataset; only with neurons, whose biases are then added.
        post_scales: (ln1_post_scale, ln2_post_scale), each [layer, ...], of families with norms after
            attention and MLP.

    Returns:
        Components: heads, then "0_mlp_out", … or neurons, "embed", "bias". They sum to resid_post of the last
            layer.
    """
    embed = of_one_layer(embed)
    attention_scale, mlp_scale = post_scales or (None, None)
    # One component for all biases: none of them belongs to a head or neuron.
    bias = _bias(embed, attention_weights, "b_O", "ln1_post", attention_scale)
    if mlp_weights is not None:
        bias = bias + _bias(embed, mlp_weights, "b_out", "ln2_post", mlp_scale)
    elif "component" not in mlp.dims:
        mlp = decompose_resid(None, None, mlp)
    remainder = _stack([("embed", embed), ("bias", bias)])
    return _concatenated([heads, mlp, remainder])


def apply_ln_to_stack(
    stack: xr.DataArray,
    scale: xr.DataArray,
    *,
    norm: str,
    weight: xr.DataArray | None = None,
) -> xr.DataArray:
    """Apply a norm with fixed divisor to stream components: linear, so components still sum to the whole.

    The bias of a LayerNorm belongs to no part and is not added.

    Arguments:
        stack: [component, ..., hidden].
        scale: Captured divisor of the norm [...] (`ln1_scale` or `ln2_scale` of a layer, or
            `ln_final_scale`).
        norm: "layer" subtracts the mean of each part first, "rms" does not.
        weight: [hidden]; None if it is folded into the next weights, as TransformerLens assumes.
    """
    if norm not in ("rms", "layer"):
        raise ShapeError(f"expected 'rms' or 'layer' as the norm to apply, found {norm!r}")
    # Each part is centred by itself: the mean of a sum is the sum of means.
    centred = stack - stack.mean("hidden") if norm == "layer" else stack
    scaled: xr.DataArray = centred / scale
    return (scaled if weight is None else scaled * weight).transpose("component", ...)


def of_one_layer(state: xr.DataArray) -> xr.DataArray:
    """Remove a layer axis of length 1 from a state [..., hidden]; ShapeError if it has several layers."""
    layer_dim = next((str(dim) for dim in state.dims if str(dim).split("_")[0] == "layer"), None)
    if layer_dim is None:
        return state
    if state.sizes[layer_dim] != 1:
        raise ShapeError(
            f"expected the start of the residual stream in a single layer, found {state.sizes[layer_dim]} "
            f"layers of {state.name}; select layer 0 with sel(layer=[0])"
        )
    return state.isel({layer_dim: 0}, drop=True)


def _written(
    states: xr.DataArray,
    weights: xr.Dataset,
    matrix: str,
    post: str,
    post_scale: xr.DataArray | None,
    *,
    over: list[str],
) -> xr.DataArray:
    """What heads or neurons add to the residual stream: states times output matrix, then the norm after it.

    Arguments:
        states: States of the units [layer, ..., unit dims].
        weights: A dataset of component_weights.py.
        matrix: Variable of the output matrix: "W_O" or "W_out".
        post: Name of the norm after the output: "ln1_post" or "ln2_post".
        post_scale: Captured divisor of that norm; None for a model without it.
        over: Dims that are summed over.
    """
    import xarray as xr

    layer_weights = weights.sel(layer=states["layer"])
    return _after_norm(xr.dot(states, layer_weights[matrix], dim=over), layer_weights, post, post_scale)


def _after_norm(
    parts: xr.DataArray, weights: xr.Dataset, post: str, post_scale: xr.DataArray | None
) -> xr.DataArray:
    """Apply the norm after attention or MLP, with fixed divisor, to parts of their output [layer, ...,
    hidden].

    Arguments:
        parts: The parts.
        weights: A dataset of component_weights.py.
        post: Name of the norm: "ln1_post" or "ln2_post".
        post_scale: Captured divisor of the norm; None for a model without it, whose parts are unchanged.
    """
    require_post_scale(weights, post, post_scale)
    if post_scale is None:
        return parts
    centred = parts - parts.mean("hidden") if weights.attrs["norm"] == "layer" else parts
    return centred / post_scale * weights[f"{post}_weight"]


def require_post_scale(weights: xr.Dataset, post: str, post_scale: xr.DataArray | None) -> None:
    """Check the captured divisor of a norm after attention or MLP against the weights.

    Arguments:
        weights: a dataset of component_weights.py.
        post: "ln1_post" or "ln2_post".
        post_scale: divisor of that norm; None for none.

    Raises:
        ShapeError: the divisor is missing, or the model has no such norm.
    """
    has_norm = f"{post}_weight" in weights
    if has_norm and post_scale is None:
        raise ShapeError(
            "this model normalises the outputs of attention and MLPs, so post_scale, the captured divisor "
            f"of that norm, is needed; capture blocks.*.{post}.hook_scale and pass {post}_scale"
        )
    if post_scale is not None and not has_norm:
        raise ShapeError(
            f"these weights have no norm {post}, but its divisor post_scale was passed; leave it out, or "
            "pass the weights of the model that it was captured from"
        )


def _bias(
    embed: xr.DataArray, weights: xr.Dataset, name: str, post: str, post_scale: xr.DataArray | None
) -> xr.DataArray:
    """What the biases of all layers add to the residual stream, [..., hidden]; zeros without biases.

    Arguments:
        embed: Start of the stream, for the shape of the result.
        weights: A dataset of component_weights.py.
        name: Variable of the output bias: "b_O" or "b_out".
        post: Name of the norm after the output, which has a bias of its own for LayerNorm.
        post_scale: Captured divisor of that norm; None for a model without it.
    """
    import xarray as xr

    total = xr.zeros_like(embed)
    if name in weights:
        total = total + _after_norm(weights[name], weights, post, post_scale).sum("layer")
    if f"{post}_bias" in weights:
        total = total + weights[f"{post}_bias"].sum("layer")
    return total.transpose(*embed.dims)


def _flattened(
    results: xr.DataArray, unit: str, label: str, remainder_of: xr.DataArray | None
) -> xr.DataArray:
    """Flatten [layer, unit, ..., hidden] to [component, ..., hidden], units of the first layer first.

    Arguments:
        results: Outputs of heads or neurons.
        unit: Axis of heads ("head") or neurons ("mlp").
        label: Format of a component's label, from layer and number of the unit.
        remainder_of: State whose remainder becomes the last component; None for no such component.
    """
    results = results.transpose("layer", unit, ..., "hidden")
    numbers = results[unit].values if unit in results.coords else range(results.sizes[unit])
    labels = [label.format(layer, number) for layer in results["layer"].values for number in numbers]
    dropped = results.drop_vars([unit], errors="ignore")
    stacked = (
        # create_index=False: a MultiIndex of layers and units would take as much memory as small states.
        dropped.stack(component=("layer", unit), create_index=False)
        .drop_vars(["layer"], errors="ignore")
        .transpose("component", ..., "hidden")
        .assign_coords(component=labels)
    )
    if remainder_of is None:
        return stacked
    remainder = remainder_of.drop_vars("layer", errors="ignore") - stacked.sum("component")
    return _concatenated([stacked, _stack([("remainder", remainder)])])


def _layers(states: xr.DataArray, stop: int | None) -> list[int]:
    """Layer numbers 0 to `stop` of an array; ShapeError if one is missing."""
    layers: list[int] = states["layer"].values.tolist()
    expected = list(range(len(layers) if stop is None else stop))
    if layers[: len(expected)] != expected:
        raise ShapeError(
            f"expected layers {expected} of {states.name}, found layers {layers}; capture all layers up to "
            "the last one that you decompose"
        )
    return expected


def _at(states: xr.DataArray, layer: int) -> xr.DataArray:
    """The states of one layer (number), without a coordinate for the layer."""
    # drop=True: a scalar coordinate `layer` of one part would conflict with that of another in a
    # concatenation.
    return states.sel(layer=layer, drop=True)


def _stack(parts: Iterable[tuple[str, xr.DataArray]]) -> xr.DataArray:
    """Stack named parts [..., hidden] along a new axis `component`."""
    labels, arrays = zip(*parts, strict=True)
    plain = [array.drop_vars("layer", errors="ignore").expand_dims("component") for array in arrays]
    return _concatenated(plain).assign_coords(component=list(labels))


def _concatenated(parts: Sequence[xr.DataArray]) -> xr.DataArray:
    """Arrays [component, ..., hidden] joined along `component`."""
    import xarray as xr

    stacked = xr.concat(parts, dim="component", coords="minimal", compat="override")
    return stacked.rename(None).assign_attrs(units="1").transpose("component", ..., "hidden")
