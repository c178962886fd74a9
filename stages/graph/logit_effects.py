"""Which tokens a feature raises and lowers by what it writes itself: its decoder, read by the unembedding.

Border: features of a graph, their dictionary's decoder rows and a readout (stages/logits/readout.py); no
prompt enters. Only the direct path counts, from the last layer a feature writes to into the logits; what
later layers make of it is what the graph's edges tell. Where a norm follows what is written (the raw MLP
output of Gemma), its gain is left out.

Idea (nostalgebraist's lens on a direction, as feature dashboards have it): (row * gain of the final norm) @
unembedding'. The norm also divides by a scale that each state has of its own, and is left out; a norm that
subtracts the mean does so here. The mean over the vocabulary is subtracted, as it moves no probability.

Axes: selected = features of the graph, as its selected_features; rank, 0 = strongest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...pipeline import Node, Output, Port, StageNode, stage
from ...store.arrays import Ints
from ...store.errors import ShapeError
from ..features.dictionary import Dictionary
from ..logits.lens import top_columns

if TYPE_CHECKING:
    import xarray as xr

    from .node import GraphNode

__all__ = ["logit_effects", "logit_effects_node"]

Floats = npt.NDArray[np.float32]

BLOCK_BYTES = 1 << 26
"""Of logits [feature, vocab] that exist at a time."""


@stage(
    version=1,
    inputs={"active_features": ("active", "axis"), "selected_features": ("selected",), "readout": None},
    outputs={
        "raised": Output(("selected", "rank"), "1", "tokens raised most"),
        "raised_by": Output(("selected", "rank"), "logits", "by so much per unit of activation"),
        "lowered": Output(("selected", "rank"), "1", "tokens lowered most"),
        "lowered_by": Output(("selected", "rank"), "logits", "by so much per unit of activation"),
    },
    resources=("dictionary",),
)
def logit_effects(
    active_features: xr.DataArray,
    selected_features: xr.DataArray,
    readout: xr.Dataset,
    *,
    dictionary: Dictionary,
    top_k: int = 5,
) -> xr.Dataset:
    """The tokens whose logits each feature raises and lowers most.

    active_features, selected_features: as a graph has them. readout: as `stages.readout` describes it.
    Returns raised, lowered int32, raised_by, lowered_by float32 [selected, rank]: strongest first.
    Raises ShapeError for a readout of another width.
    """
    import xarray as xr

    if dictionary.d_out != readout.sizes["hidden"]:
        raise ShapeError(
            f"expected a readout of width {dictionary.d_out}, as {dictionary.name} writes, found "
            f"{readout.sizes['hidden']}"
        )
    chosen = active_features.values[selected_features.values][:, [0, 2]]
    unique, place = np.unique(chosen, axis=0, return_inverse=True)  # a feature may be active often
    k = min(top_k, readout.sizes["vocab"])
    found = {name: np.empty((len(unique), k), np.int32) for name in ("raised", "lowered")}
    found |= {name: np.empty((len(unique), k), np.float32) for name in ("raised_by", "lowered_by")}
    read_out = _directions(readout)
    step = max(1, BLOCK_BYTES // (4 * len(read_out)))
    for layer in np.unique(unique[:, 0]).tolist():
        mine = np.flatnonzero(unique[:, 0] == layer)
        for start in range(0, len(mine), step):
            some = mine[start : start + step]
            effects = _rows(dictionary, layer, unique[some, 1], readout.attrs["norm"]) @ read_out.T
            for name, sign in (("raised", 1), ("lowered", -1)):
                columns = top_columns(sign * effects, k)
                found[name][some] = columns
                found[f"{name}_by"][some] = np.take_along_axis(effects, columns, axis=1)
    place = place.reshape(-1)
    return xr.Dataset({name: (("selected", "rank"), values[place]) for name, values in found.items()})


def logit_effects_node(graph: GraphNode, readout: Node, *, top_k: int = 5) -> StageNode:
    """The logit effects of a graph's features; readout: of the graph's model (`readout_node`)."""
    ports = {name: Port(graph, name) for name in ("active_features", "selected_features")}
    return logit_effects.on(**ports, readout=readout, dictionary=graph.dictionary.as_resource(), top_k=top_k)


def _directions(readout: xr.Dataset) -> Floats:
    """What reads each token's logit off a state before the final norm's division: [vocab, hidden]."""
    unembed: Floats = np.asarray(readout["unembed"].transpose("vocab", "hidden").values, np.float32)
    found: Floats = (unembed - unembed.mean(0)) * np.asarray(readout["norm_weight"].values, np.float32)
    return found


def _rows(dictionary: Dictionary, layer: int, features: Ints, norm: str) -> Floats:
    """What a unit of each feature writes to the last layer it writes to: [feature, hidden]."""
    import torch

    rows = dictionary.layer(layer).decoder_rows(torch.from_numpy(features), max(dictionary.targets(layer)))
    found: Floats = rows.cpu().numpy()
    return found - found.mean(1, keepdims=True) if norm == "layer" else found
