"""A stored corpus as features: what is active at every token, layer by layer, written once.

    nodes = encode_nodes(dictionary, capture_node)     # layer -> node of a graph
    table = encode_corpus(dictionary, model, prompts, store=store)

Every layer is a result of its own, made of cells by token range: a killed run goes on at the next range,
another layer costs that layer, and no more than one range, a block of pre-activations and what was found is
in memory at a time. Ragged as SAE dashboards and delphi store it: a token's features lie at token_ptr[t] to
token_ptr[t + 1].

The features of a crosscoder read several layers at once, or those of two models on the same tokens: one
result, of all of them.

Border: stored states in, ragged arrays out. The dictionary is named in a stage's parameters and is in its
key by content; which device computes is in no key. Reading them again is sparse.py's, and needs no torch.

Axes: edge = token + 1, boundaries of tokens; active = features of all tokens end to end, ascending per token.
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
from ..dictionary import Dictionary
from ..layers.layout import models_of
from .sparse import active_table, join_encoded

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ....store import Store
    from ...forward.models.model import Model

__all__ = ["encode_corpus", "encode_crosscoder", "encode_features", "encode_nodes"]

BLOCK_BYTES = 1 << 26
"""Of states widened to float32 at a time."""

_OUTPUTS = {
    "token_ptr": Output(("edge",), "1", "where a token's features begin; the last one is their number"),
    "feature": Output(("active",), "1", "feature"),
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
    """What is active in states of one layer.

    states: [layer, token, ...] with one layer, lazy or not; what follows the token are heads side by side;
    embeddings have no layer. zero_positions: first positions of a prompt without features.
    Returns token_ptr int64 [edge], feature int32 [active], value float32 [active], and the tokens' labels.
    """
    layer = int(states["layer"].values[0]) if "layer" in states.dims else 0
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
    """What is active in the states of all layers that a crosscoder reads, or of those of two models.

    states, other: [layer, token, ...] of each model, lazy or not, on the same tokens.
    Returns what `encode_features` does, of the crosscoder's one layer. Raises ShapeError where tokens differ,
    or a layer is missing.
    """
    given = [states] if other is None else [states, other]
    if other is not None:
        _require_same_tokens(states, other)
    parts = []
    for model, place in zip(models_of(dictionary.places), dictionary.places, strict=True):
        layer = HookPoint.parse(place.hook).layer
        if layer not in given[model]["layer"].values:
            held = given[model]["layer"].values.tolist()
            raise ShapeError(f"expected states of {place}, found layers {held}; capture it as well")
        parts.append(given[model].sel(layer=layer))
    return _encoded(states, dictionary.layers[0], _side_by_side(parts), dictionary, zero_positions)


def _encoded(
    states: xr.DataArray,
    layer: int,
    blocks: Iterator[tuple[int, torch.Tensor]],
    dictionary: Dictionary,
    zero_positions: int,
) -> xr.Dataset:
    """What is active in blocks of rows of a layer; states: whose tokens these are."""
    first = _first_positions(states, zero_positions)
    counts = np.zeros(states.sizes["token"], np.int64)
    found: list[np.ndarray] = []
    values: list[np.ndarray] = []
    here = dictionary.layer(layer).on(dictionary.device)
    for start, rows in blocks:
        token, feature, value = (part.cpu().numpy() for part in here.active(rows))
        kept = ~first[start + token]
        counts[start : start + len(rows)] = np.bincount(token[kept], minlength=len(rows))
        found.append(feature[kept].astype(np.int32))
        values.append(value[kept].astype(np.float32))
    return _ragged(states, layer, counts, np.concatenate(found), np.concatenate(values)).assign_attrs(
        {"n_features": here.n_features, "zero_positions": zero_positions}
    )


_FORMS = {"hidden": "encode_features", "d_head": "encode_head_features", "mlp": "encode_neuron_features"}
"""Last dim of what is read -> the form that reads it, of what has a layer."""
_CROSSCODER_FORMS = {
    "hidden": "encode_crosscoder",
    "d_head": "encode_head_crosscoder",
    "mlp": "encode_neuron_crosscoder",
}


# -- nodes


@dataclass(frozen=True)
class LayerPort(Port):
    """One layer of a node's variable."""

    layer: int = 0

    def part(self, store: Store, selection: Selection) -> Part:
        """A piece of that layer."""
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
    """Nodes that encode what is read at some layers (default: all the dictionary has), by layer.

    states: a node whose variables are named by hook kind, such as a capture of what the dictionary reads
    (`Dictionary.reads`). other: the same of a crosscoder's second model.
    Raises DictionaryError for a layer it does not have, or states of too few or too many models.
    """
    held, kind = dictionary.as_resource(device), dictionary.layout.read
    given = [states] if other is None else [states, other]
    if len(given) != len(dictionary.reads(layers)):
        raise DictionaryError(
            f"expected states of {len(dictionary.reads(layers))} models for {dictionary.name}, found "
            f"{len(given)}; give those of a second model as other="
        )
    if dictionary.places:
        ports = dict(zip(("states", "other"), (Port(node, kind) for node in given), strict=False))
        name = _CROSSCODER_FORMS[dictionary.reads()[0][0].dims[-1]] + "_of_two" * (len(given) - 1)
        form = encode_crosscoder.form(name)
        node = form.on(**ports, dictionary=held, zero_positions=zero_positions)
        return {dictionary.layers[0]: node}
    found = {}
    for layer in dictionary.layers if layers is None else layers:
        point = dictionary.read_hook(layer)
        port = Port(states, kind) if point.layer is None else LayerPort(states, kind, layer)
        name = "encode_embedding_features" if point.layer is None else _FORMS[point.dims[-1]]
        form = encode_features.form(name)
        found[layer] = form.on(states=port, dictionary=held, zero_positions=zero_positions)
    return found


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
    """Capture what a dictionary reads of some prompts, encode it, and open the active features.

    What is stored is not computed again.

    Args:
        dictionary: sparse autoencoder, transcoders or crosscoder.
        model: a loaded model, or the name of one.
        prompts: as for `mizarr.capture`.
        store: where states and features are kept.
        against: the second model of a crosscoder of two.
        layers: layers of the dictionary; default all.
        zero_positions: number of first positions of each prompt whose features count as 0.
        device: where model and dictionary compute.
        options: see below.

    Returns:
        A row for each active feature; see `active_table`.

    Raises:
        DictionaryError: for a dictionary that does not fit the model; and what `capture` raises.
    """
    from ....pipeline import run
    from ...forward.capture.capture import CaptureNode
    from ...forward.models.reference import ModelRef

    (running,) = split_options("encode_corpus", options, RunOptions)
    hooks = [list(map(str, points)) for points in dictionary.reads(layers)]

    def captured(source: Model | str | Path, points: list[str]) -> CaptureNode:
        # A loaded model stays where it is, wherever the dictionary computes.
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
    """(first token, rows [token, width] as float32) of a range of tokens after another."""
    import torch

    width = int(np.prod(states.shape[1:]))
    step = max(1, BLOCK_BYTES // (4 * width))
    for start in range(0, max(states.sizes["token"], 1), step):
        values = states.isel(token=slice(start, start + step)).values
        rows = np.ascontiguousarray(values.reshape(len(values), width))
        if rows.dtype.name == "bfloat16":
            yield start, torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16).float()
        else:
            yield start, torch.from_numpy(rows.astype(np.float32))


def _side_by_side(parts: Sequence[xr.DataArray]) -> Iterator[tuple[int, torch.Tensor]]:
    """The same of several states of the same tokens, in one row."""
    import torch

    for blocks in zip(*map(_blocks, parts), strict=True):
        yield blocks[0][0], torch.cat([rows for _, rows in blocks], dim=1)


def _require_same_tokens(states: xr.DataArray, other: xr.DataArray) -> None:
    """Raise ShapeError unless the token axes are the same."""
    names = [name for name in ("token_id", "position") if name in states.coords and name in other.coords]
    if states.sizes["token"] != other.sizes["token"] or any(
        (states[name].values != other[name].values).any() for name in names
    ):
        raise ShapeError(
            "expected states of the same tokens from both models, found others; capture the same prompts of "
            "both, which must share a tokenizer"
        )


def _first_positions(states: xr.DataArray, zero_positions: int) -> np.ndarray:
    """Which tokens are among the first of their prompt, bool [token]."""
    if zero_positions == 0:
        return np.zeros(states.sizes["token"], bool)
    if "position" not in states.coords:
        raise ShapeError(
            "expected a coordinate 'position' beside the states, found none; or leave zero_positions at 0"
        )
    first: np.ndarray = states["position"].values < zero_positions
    return first


def _ragged(
    states: xr.DataArray, layer: int, counts: np.ndarray, feature: np.ndarray, value: np.ndarray
) -> xr.Dataset:
    import xarray as xr

    labels = {name: coord for name, coord in states.coords.items() if coord.dims == ("token",)}
    return xr.Dataset(
        {
            "token_ptr": ("edge", np.concatenate([[0], counts.cumsum()])),
            "feature": ("active", feature),
            "value": ("active", value),
        },
        coords={**labels, "layer": layer},
    )
