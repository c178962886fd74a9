"""Encodes a stored corpus: active features at every token, layer by layer, computed once and stored.

    nodes = encode_nodes(dictionary, capture_node)     # layer -> node of a graph
    table = encode_corpus(dictionary, model, prompts, store=store)

Every layer is a result of its own, made of cells by token range: a killed run resumes at the next range, and
one more layer costs that layer. Memory holds one range, one block of pre-activations and the active features
of the range. The result is ragged as in SAE dashboards and delphi: the features of token t are at
token_ptr[t] to token_ptr[t + 1].

The features of a crosscoder read several layers at once, or those of two models on the same tokens, and give
one result.

Border: stored states in, ragged arrays out. The dictionary is a resource of the stage and enters the key by
content; the device is in no key. sparse.py reads the results, without torch.

Axes: edge = token + 1, boundaries of tokens; active = features of all tokens in sequence, ascending per
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....pipeline import Node, Output, Part, Port, StageNode, stage
from ....pipeline.context import Selection
from ....store.errors import DictionaryError, ShapeError
from ...forward.architectures.points import HookPoint
from ...options import RunOptions, split_options, takes_options
from ...training_data.conversion import as_tensor
from ..dictionary import Dictionary
from ..layers.layout import models_of
from .sparse import active_table, is_counted, join_encoded

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ....store import Store
    from ...forward.models.model import Model

__all__ = ["encode_corpus", "encode_crosscoder", "encode_features", "encode_nodes"]

BLOCK_BYTES = 1 << 26
"""Largest size in bytes of the states that are converted to float32 at once."""

_OUTPUTS = {
    "token_ptr": Output(("edge",), "1", "start of each token's features; the last entry is their number"),
    "feature": Output(("active",), "1", "index of the feature"),
    "value": Output(("active",), "1", "activation"),
}


@stage(
    version=1,
    forms={
        "encode_features": {"states": ("layer", "token", "hidden")},
        "encode_head_features": {"states": ("layer", "token", "head", "d_head")},
        "encode_neuron_features": {"states": ("layer", "token", "mlp")},
        "encode_embedding_features": {"states": ("token", "hidden")},
    },
    outputs=_OUTPUTS,
    cells="segment",
    combine=join_encoded,
    resources=("dictionary",),
)
def encode_features(states: xr.DataArray, *, dictionary: Dictionary, zero_positions: int = 0) -> xr.Dataset:
    """Active features at every token, for the states of one layer.

    Arguments:
        states: [layer, token, ...] with a single layer, may be lazy; [token, ...] for embeddings. Dims after
            `token` are flattened, so that heads are concatenated.
        dictionary: The opened dictionary.
        zero_positions: Number of positions at the start of each prompt whose features are left out.

    Returns:
        token_ptr int64 [edge], feature int32 [active], value float32 [active], and the tokens' coordinates.
    """
    layer = int(states["layer"].values[0]) if "layer" in states.dims else 0
    # A port of one layer keeps the dim with a single entry (see `nodes.cut`).
    states = states.isel(layer=0) if "layer" in states.dims else states
    return _encoded(states, layer, _blocks(states), dictionary, zero_positions)


@stage(
    version=1,
    forms={
        f"encode_{kind}crosscoder{many}": dict.fromkeys(names, ("layer", "token", *dims))
        for kind, dims in (("", ("hidden",)), ("head_", ("head", "d_head")), ("neuron_", ("mlp",)))
        for many, names in (("", ("states",)), ("_of_two", ("states", "other")))
    },
    outputs=_OUTPUTS,
    cells="segment",
    combine=join_encoded,
    resources=("dictionary",),
    several_models=True,
)
def encode_crosscoder(
    states: xr.DataArray,
    *,
    dictionary: Dictionary,
    other: xr.DataArray | None = None,
    zero_positions: int = 0,
) -> xr.Dataset:
    """Active features of a crosscoder at every token, for the states of one model or two.

    Arguments:
        states: States [layer, token, ...] of the first model, with all layers that it reads; may be lazy.
        dictionary: The opened crosscoder.
        other: States of the second model on the same tokens; None for a crosscoder of one model.
        zero_positions: Number of positions at the start of each prompt whose features are left out.

    Returns:
        token_ptr int64 [edge], feature int32 [active], value float32 [active], and the tokens' coordinates.

    Raises:
        ShapeError: The tokens differ, or a layer is missing.
    """
    states_by_model = [states] if other is None else [states, other]
    if other is not None:
        _require_same_tokens(states, other)
    parts = []
    for model, place in zip(models_of(dictionary.places), dictionary.places, strict=True):
        layer = HookPoint.parse(place.hook).layer
        if layer not in states_by_model[model]["layer"].values:
            present = states_by_model[model]["layer"].values.tolist()
            raise ShapeError(
                f"expected states at {place}, which the crosscoder {dictionary.name} reads, found only "
                f"layers {present}; capture this layer as well"
            )
        parts.append(states_by_model[model].sel(layer=layer))
    return _encoded(states, dictionary.layers[0], _side_by_side(parts), dictionary, zero_positions)


def _encoded(
    states: xr.DataArray,
    layer: int,
    blocks: Iterator[tuple[int, torch.Tensor]],
    dictionary: Dictionary,
    zero_positions: int,
) -> xr.Dataset:
    """Active features of one layer at every token, as `encode_features` returns them.

    Arguments:
        states: States of any layer, which give the tokens and their coordinates.
        layer: Layer of the dictionary.
        blocks: (first token, rows [token, width]) of consecutive blocks of tokens.
        dictionary: The opened dictionary.
        zero_positions: Number of positions at the start of each prompt whose features are left out.
    """
    counts_as_active = is_counted(states, states.sizes["token"], zero_positions)
    counts = np.zeros(states.sizes["token"], np.int64)
    feature_blocks: list[np.ndarray] = []
    value_blocks: list[np.ndarray] = []
    # The encoder moves to the device once, not for every block.
    features = dictionary.layer(layer).on(dictionary.device)
    for start, rows in blocks:
        # Token numbers are relative to the block. Features ascend within a token, as in every result.
        token, feature, value = (part.cpu().numpy() for part in features.active(rows))
        kept = counts_as_active[start + token]
        counts[start : start + len(rows)] = np.bincount(token[kept], minlength=len(rows))
        feature_blocks.append(feature[kept].astype(np.int32))
        value_blocks.append(value[kept].astype(np.float32))
    return _ragged(
        states, layer, counts, np.concatenate(feature_blocks), np.concatenate(value_blocks)
    ).assign_attrs({"n_features": features.n_features, "zero_positions": zero_positions})


_FORMS = {"hidden": "encode_features", "d_head": "encode_head_features", "mlp": "encode_neuron_features"}
"""Name of the form of `encode_features`, by the last dim of the states at the hook point."""
_CROSSCODER_FORMS = {
    "hidden": "encode_crosscoder",
    "d_head": "encode_head_crosscoder",
    "mlp": "encode_neuron_crosscoder",
}
"""Name of the form of `encode_crosscoder`, by the last dim of the states; two models append "_of_two"."""


# -- nodes


@dataclass(frozen=True)
class LayerPort(Port):
    """Input of a stage: one layer of a variable that another node computes."""

    layer: int = 0
    """Number of the layer."""

    def part(self, store: Store, selection: Selection) -> Part:
        """The layer's values along a selection of other dims.

        Arguments:
            store: The store that holds the node's result.
            selection: Selection along other dims.
        """
        return super().part(store, {**selection, "layer": self.layer})


def encode_nodes(
    dictionary: Dictionary,
    states: Node,
    *,
    other: Node | None = None,
    layers: Sequence[int] | None = None,
    zero_positions: int = 0,
    device: str | None = None,
) -> dict[int, StageNode]:
    """Plan nodes that encode the states of some layers, by layer; a crosscoder has one node.

    Arguments:
        dictionary: The dictionary.
        states: A node whose variables are named by hook kind, such as a capture of `Dictionary.reads`.
        other: Such a node for the second model of a crosscoder; None for other dictionaries.
        layers: Layers to encode; None for all of the dictionary.
        zero_positions: Number of positions at the start of each prompt whose features are left out.
        device: Device that encodes; None for a GPU if there is one.

    Raises:
        DictionaryError: The dictionary lacks a layer, or states of one model are missing or too many.
    """
    resource, kind = dictionary.as_resource(device), dictionary.layout.read
    nodes_by_model = [states] if other is None else [states, other]
    if len(nodes_by_model) != len(dictionary.reads(layers)):
        raise DictionaryError(
            f"expected states of {len(dictionary.reads(layers))} models for the dictionary "
            f"{dictionary.name}, found {len(nodes_by_model)}; give the states of a second model, if it has "
            "one, as other="
        )
    if dictionary.places:
        # strict=False: a crosscoder of one model has no port "other".
        ports = dict(zip(("states", "other"), (Port(node, kind) for node in nodes_by_model), strict=False))
        name = _CROSSCODER_FORMS[dictionary.reads()[0][0].dims[-1]] + "_of_two" * (len(nodes_by_model) - 1)
        form = encode_crosscoder.form(name)
        node = form.on(**ports, dictionary=resource, zero_positions=zero_positions)
        return {dictionary.layers[0]: node}
    # One node per layer: a layer that is added later leaves the results of the others valid.
    nodes = {}
    for layer in dictionary.layers if layers is None else layers:
        point = dictionary.read_hook(layer)
        port = Port(states, kind) if point.layer is None else LayerPort(states, kind, layer)
        name = "encode_embedding_features" if point.layer is None else _FORMS[point.dims[-1]]
        form = encode_features.form(name)
        nodes[layer] = form.on(states=port, dictionary=resource, zero_positions=zero_positions)
    return nodes


@takes_options(RunOptions)
def encode_corpus(
    dictionary: Dictionary,
    model: Model | str | Path,
    prompts: Any,
    *,
    store: Store,
    against: Model | str | Path | None = None,
    layers: Sequence[int] | None = None,
    zero_positions: int = 0,
    device: str | None = None,
    **options: Any,
) -> xr.Dataset:
    """Capture the states that a dictionary reads on some prompts, and return their active features.

    Results that are stored already are not computed again.

    Arguments:
        dictionary: Sparse autoencoder, transcoders or crosscoder.
        model: A loaded model, or the name of a model.
        prompts: Prompts in any form that `mizarr.capture` takes.
        store: Store for states and features.
        against: Second model of a crosscoder of two models; None for other dictionaries.
        layers: Layers of the dictionary; None for all.
        zero_positions: Number of positions at the start of each prompt whose features are left out.
        device: Device for model and dictionary; None for a GPU if there is one.
        options: See below.

    Returns:
        A table with one row for each active feature at a token; see `active_table`.

    Raises:
        DictionaryError: The dictionary does not fit the model.
        MizarrError: The states cannot be captured; see `mizarr.capture`.
    """
    from ....pipeline import run
    from ...forward.capture.capture import CaptureNode
    from ...forward.models.reference import ModelRef

    (running,) = split_options("encode_corpus", options, RunOptions)
    hooks = [list(map(str, points)) for points in dictionary.reads(layers)]

    def captured(source: Model | str | Path, points: list[str]) -> CaptureNode:
        # A loaded model stays on its device; `device` then applies to the dictionary only.
        reference = ModelRef(source, device=device) if isinstance(source, str | Path) else source
        return CaptureNode(reference, prompts, points)

    states = [captured(model, hooks[0])]
    if against is not None:
        states.append(captured(against, hooks[-1]))
    dictionary.require_models([node.source.name for node in states])
    for node in states:
        dictionary.require_fit(node.source.config, node.source.name)
    nodes = encode_nodes(
        dictionary,
        states[0],
        other=None if against is None else states[1],
        layers=layers,
        zero_positions=zero_positions,
        device=device,
    )
    run(list(nodes.values()), store, **RunOptions(**running).keywords)
    return active_table({layer: node.open(store) for layer, node in nodes.items()})


# -- helpers


def _blocks(states: xr.DataArray) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first token, rows [token, width] as float32) for consecutive blocks of tokens."""
    width = int(np.prod(states.shape[1:]))
    step = max(1, BLOCK_BYTES // (4 * width))
    # max(…, 1): an empty range still yields one empty block, so that concatenation has an array.
    for start in range(0, max(states.sizes["token"], 1), step):
        values = states.isel(token=slice(start, start + step)).values
        rows = np.ascontiguousarray(values.reshape(len(values), width))
        # A copy of float rows: torch warns of arrays that cannot be written, such as memory maps.
        yield start, as_tensor(rows if rows.dtype.name == "bfloat16" else rows.astype(np.float32))


def _side_by_side(parts: Sequence[xr.DataArray]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield blocks as `_blocks`, with the rows of several arrays of the same tokens concatenated."""
    import torch

    for blocks in zip(*map(_blocks, parts), strict=True):
        yield blocks[0][0], torch.cat([rows for _, rows in blocks], dim=1)


def _require_same_tokens(states: xr.DataArray, other: xr.DataArray) -> None:
    """Raise ShapeError unless two arrays of states have the same tokens."""
    names = [name for name in ("token_id", "position") if name in states.coords and name in other.coords]
    if states.sizes["token"] != other.sizes["token"] or any(
        (states[name].values != other[name].values).any() for name in names
    ):
        raise ShapeError(
            "expected states of the same tokens from both models of the crosscoder, found different tokens; "
            "capture the same prompts with both models, which must share a tokenizer"
        )


def _ragged(
    states: xr.DataArray, layer: int, counts: np.ndarray, feature: np.ndarray, value: np.ndarray
) -> xr.Dataset:
    """Dataset of one layer from feature counts [token] and all active features in sequence [active]."""
    import xarray as xr

    # Labels of tokens only: coordinates of hidden dims do not fit features.
    labels = {name: coord for name, coord in states.coords.items() if coord.dims == ("token",)}
    return xr.Dataset(
        {
            "token_ptr": ("edge", np.concatenate([[0], counts.cumsum()])),
            "feature": ("active", feature),
            "value": ("active", value),
        },
        coords={**labels, "layer": layer},
    )
