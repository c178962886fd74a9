"""Direct effects of the features of a graph on logits: the tokens that each raises and lowers most.

Computed from the decoder vectors alone (stages/features/effects/words.py); effects through later layers are
edges of the graph.

Axes: selected = features of the graph, in the order of its selected_features; rank, 0 = strongest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...pipeline import Node, Output, Port, StageNode, stage
from ..features.dictionary import Dictionary
from ..features.effects.words import direct_effects

if TYPE_CHECKING:
    import xarray as xr

    from .node import GraphNode

__all__ = ["logit_effects", "logit_effects_node"]


@stage(
    version=1,
    inputs={"active_features": ("active", "axis"), "selected_features": ("selected",), "readout": None},
    outputs={
        "raised": Output(("selected", "rank"), "1", "tokens raised most"),
        "raised_by": Output(("selected", "rank"), "logits", "increase per unit of activation"),
        "lowered": Output(("selected", "rank"), "1", "tokens lowered most"),
        "lowered_by": Output(("selected", "rank"), "logits", "change per unit of activation"),
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

    Arguments:
        active_features: (layer, position, index) of each active feature, from a graph.
        selected_features: indices of the features that are nodes, from a graph.
        readout: final norm and unembedding of the model, from the stage `readout`.
        dictionary: the transcoders of the graph.
        top_k: tokens per feature and direction.

    Returns:
        raised, lowered (token ids, int32) and raised_by, lowered_by (logits per unit of activation, float32),
        [selected, rank], strongest first.

    Raises:
        ShapeError: for a readout of another width.
    """
    import xarray as xr

    layer_and_index = active_features.values[selected_features.values][:, [0, 2]]
    # A feature that is active at several positions is computed once.
    unique, place = np.unique(layer_and_index, axis=0, return_inverse=True)
    # numpy 2.0 returned the inverse as [n, 1].
    effects, place = direct_effects(dictionary, unique, readout, top_k), place.reshape(-1)
    return xr.Dataset({name: (("selected", "rank"), values[place]) for name, values in effects.items()})


def logit_effects_node(graph: GraphNode, readout: Node, *, top_k: int = 5) -> StageNode:
    """Logit effects of the features of a graph, as a node.

    Arguments:
        graph: node of the graph.
        readout: readout of the same model (`readout_node`).
        top_k: tokens per feature and direction.
    """
    ports = {name: Port(graph, name) for name in ("active_features", "selected_features")}
    return logit_effects.on(**ports, readout=readout, dictionary=graph.dictionary.as_resource(), top_k=top_k)
