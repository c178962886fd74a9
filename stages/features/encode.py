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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import Node, Output, Part, Port, Stage, StageNode, stage
from ...pipeline.nodes import Selection
from ...store.errors import ShapeError
from .dictionary import Dictionary
from .sparse import active_table, join_encoded

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ...store import Store
    from ..forward.model import Model

__all__ = [
    "EncodeNode",
    "encode_corpus",
    "encode_embedding_features",
    "encode_features",
    "encode_head_features",
    "encode_neuron_features",
    "encode_nodes",
]

BLOCK_BYTES = 1 << 26
"""Of states widened to float32 at a time."""

_OUTPUTS = {
    "token_ptr": Output(("edge",), "1", "where a token's features begin; the last one is their number"),
    "feature": Output(("active",), "1", "feature"),
    "value": Output(("active",), "1", "activation"),
}


def _encode(
    states: xr.DataArray,
    *,
    dictionary: str,
    features: str,
    read: str,
    write: str,
    zero_positions: int = 0,
    device: str | None = None,
) -> xr.Dataset:
    """What is active in states of one layer.

    states: [layer, token, ...] with one layer, lazy or not; what follows the token are heads side by side.
    dictionary: its name; features: its identity; read, write: its hook kinds. zero_positions: first
    positions of a prompt without features. device: where to compute, default a GPU if there is one.
    Returns token_ptr int64 [edge], feature int32 [active], value float32 [active], and the tokens' labels.
    """
    layer = int(states["layer"].values[0]) if "layer" in states.dims else 0
    states = states.isel(layer=0) if "layer" in states.dims else states
    place = device or _default_device()
    whole = _opened(dictionary, features, read, write)
    opened = whole.layer(layer).on(place)
    first = _first_positions(states, zero_positions)
    counts = np.zeros(states.sizes["token"], np.int64)
    found: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for start, rows in _blocks(states):
        token, feature, value = (part.cpu().numpy() for part in opened.active(rows))
        kept = ~first[start + token]
        counts[start : start + len(rows)] = np.bincount(token[kept], minlength=len(rows))
        found.append(feature[kept].astype(np.int32))
        values.append(value[kept].astype(np.float32))
    whole.require_unchanged()
    return _ragged(states, layer, counts, np.concatenate(found), np.concatenate(values)).assign_attrs(
        {"n_features": opened.n_features, "zero_positions": zero_positions}
    )


def _declared(name: str, dims: tuple[str, ...]) -> Callable[[Callable[..., Any]], Stage]:
    return stage(
        version=1, name=name, inputs={"states": dims}, outputs=_OUTPUTS, cells="segment", combine=join_encoded
    )


@_declared("encode_features", ("layer", "token", "hidden"))
def encode_features(
    states: xr.DataArray,
    *,
    dictionary: str,
    features: str,
    read: str,
    write: str,
    zero_positions: int = 0,
    device: str | None = None,
) -> xr.Dataset:
    """Features of states of the model's width, see `_encode`."""
    return _encode(**locals())


@_declared("encode_head_features", ("layer", "token", "head", "d_head"))
def encode_head_features(
    states: xr.DataArray,
    *,
    dictionary: str,
    features: str,
    read: str,
    write: str,
    zero_positions: int = 0,
    device: str | None = None,
) -> xr.Dataset:
    """Features of what heads give, heads side by side, see `_encode`."""
    return _encode(**locals())


@_declared("encode_neuron_features", ("layer", "token", "mlp"))
def encode_neuron_features(
    states: xr.DataArray,
    *,
    dictionary: str,
    features: str,
    read: str,
    write: str,
    zero_positions: int = 0,
    device: str | None = None,
) -> xr.Dataset:
    """Features of an MLP's neurons, see `_encode`."""
    return _encode(**locals())


@_declared("encode_embedding_features", ("token", "hidden"))
def encode_embedding_features(
    states: xr.DataArray,
    *,
    dictionary: str,
    features: str,
    read: str,
    write: str,
    zero_positions: int = 0,
    device: str | None = None,
) -> xr.Dataset:
    """Features of embeddings, which have no layer, see `_encode`."""
    return _encode(**locals())


_STAGES: Mapping[str, Stage] = {
    "hidden": encode_features,
    "d_head": encode_head_features,
    "mlp": encode_neuron_features,
}


# -- nodes


@dataclass(frozen=True)
class LayerPort(Port):
    """One layer of a node's variable."""

    layer: int = 0

    def part(self, store: Store, selection: Selection) -> Part:
        """A piece of that layer."""
        return super().part(store, {**selection, "layer": self.layer})


class EncodeNode(StageNode):
    """One layer's features of stored states. Name and device of the dictionary are no part of the key."""

    def __init__(
        self,
        dictionary: Dictionary,
        layer: int,
        states: Node,
        *,
        zero_positions: int = 0,
        device: str | None = None,
    ) -> None:
        """states: a node whose variables are named by hook kind, such as a capture."""
        layout = dictionary.layout
        point = dictionary.read_hook(layer)
        port = Port(states, layout.read) if point.layer is None else LayerPort(states, layout.read, layer)
        chosen = encode_embedding_features if point.layer is None else _STAGES[point.dims[-1]]
        kept = {
            "features": dictionary.identity,
            "read": layout.read,
            "write": layout.write,
            "zero_positions": zero_positions,
        }
        super().__init__(chosen, {"states": port}, {**kept, "dictionary": dictionary.name, "device": device})
        self._key_params = kept


def encode_nodes(
    dictionary: Dictionary,
    states: Node,
    *,
    layers: Sequence[int] | None = None,
    zero_positions: int = 0,
    device: str | None = None,
) -> dict[int, EncodeNode]:
    """Nodes that encode what is read at some layers (default: all the dictionary has), by layer.

    states: a capture of the dictionary's read hooks. Raises DictionaryError for a layer it does not have.
    """
    chosen = dictionary.layers if layers is None else tuple(layers)
    return {
        layer: EncodeNode(dictionary, layer, states, zero_positions=zero_positions, device=device)
        for layer in chosen
    }


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
    progress: bool = True,
) -> xr.Dataset:
    """Capture what a dictionary reads of some prompts, encode it, and open what is active: see
    `active_table`.

    What is stored is not computed again. Raises what capture raises, and DictionaryError for a misfit.
    """
    from ...pipeline import run
    from ..forward.capture import CaptureNode

    chosen = dictionary.layers if layers is None else tuple(layers)
    states = CaptureNode(
        model, prompts, [str(dictionary.read_hook(layer)) for layer in chosen], device=device
    )
    dictionary.require_fit(states.source.config, states.source.name)
    nodes = encode_nodes(dictionary, states, layers=chosen, zero_positions=zero_positions, device=device)
    run(list(nodes.values()), store, cluster=cluster, quiet=not progress)
    return active_table({layer: node.open(store) for layer, node in nodes.items()})


# -- helpers


def _opened(name: str, features: str, read: str, write: str) -> Dictionary:
    """The dictionary of that name, which must be the one that the key speaks of."""
    if not _kept(name, read, write).is_unchanged:
        _kept.cache_clear()
    return _kept(name, read, write).require(features)


@lru_cache(maxsize=2)
def _kept(name: str, read: str, write: str) -> Dictionary:
    return Dictionary.from_pretrained(name, read=read, write=write)


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


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
