"""A stored corpus as features: what is active at every token, layer by layer, written once.

    nodes = encode_nodes(dictionary, capture_node)     # layer -> node of a graph
    table = encode_corpus(dictionary, model, prompts, store=store)

Every layer is a result of its own, made of cells by token range: a killed run goes on at the next range,
another layer costs that layer, and no more than one range, a block of pre-activations and what was found is
in memory at a time. Ragged as SAE dashboards and delphi store it: a token's features lie at token_ptr[t] to
token_ptr[t + 1].

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
from ....store.errors import ShapeError
from ..dictionary import Dictionary
from .sparse import active_table, join_encoded

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ....store import Store
    from ...forward.models.model import Model

__all__ = ["encode_corpus", "encode_features", "encode_nodes"]

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
    first = _first_positions(states, zero_positions)
    counts = np.zeros(states.sizes["token"], np.int64)
    found: list[np.ndarray] = []
    values: list[np.ndarray] = []
    here = dictionary.layer(layer).on(dictionary.device)
    for start, rows in _blocks(states):
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
    layers: Sequence[int] | None = None,
    zero_positions: int = 0,
    device: str | None = None,
) -> dict[int, StageNode]:
    """Nodes that encode what is read at some layers (default: all the dictionary has), by layer.

    states: a node whose variables are named by hook kind, such as a capture of the dictionary's read hooks.
    Raises DictionaryError for a layer it does not have.
    """
    held, kind = dictionary.as_resource(device), dictionary.layout.read
    found = {}
    for layer in dictionary.layers if layers is None else layers:
        point = dictionary.read_hook(layer)
        port = Port(states, kind) if point.layer is None else LayerPort(states, kind, layer)
        name = "encode_embedding_features" if point.layer is None else _FORMS[point.dims[-1]]
        form = encode_features.form(name)
        found[layer] = form.on(states=port, dictionary=held, zero_positions=zero_positions)
    return found


def encode_corpus(
    dictionary: Dictionary,
    model: Model | str | Path,
    prompts: Any,
    *,
    store: Store,
    layers: Sequence[int] | None = None,
    zero_positions: int = 0,
    device: str | None = None,
    cluster: str | None = None,
    workers: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """Capture what a dictionary reads of some prompts, encode it, and open what is active: see
    `active_table`.

    What is stored is not computed again. Raises what capture raises, and DictionaryError for a misfit.
    """
    from ....pipeline import run
    from ...forward.capture.capture import CaptureNode

    chosen = dictionary.layers if layers is None else tuple(layers)
    states = CaptureNode(
        model, prompts, [str(dictionary.read_hook(layer)) for layer in chosen], device=device
    )
    dictionary.require_fit(states.source.config, states.source.name)
    nodes = encode_nodes(dictionary, states, layers=chosen, zero_positions=zero_positions, device=device)
    run(list(nodes.values()), store, cluster=cluster, workers=workers, quiet=not progress)
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
