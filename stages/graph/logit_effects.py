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
    """The tokens whose logits each feature of a graph raises and lowers most, by the direct path.

    Arguments:
        active_features: (layer, position, index) of each active feature, from a graph.
        selected_features: Rows of `active_features` that are nodes of the graph.
        readout: Final norm and unembedding of the model, from the stage `readout`.
        dictionary: The transcoders of the graph.
        top_k: Number of tokens raised, and of tokens lowered, per feature.

    Returns:
        raised, lowered (token ids, int32) and raised_by, lowered_by (logits per unit of activation, float32),
        [selected, rank], strongest first.

    Raises:
        ShapeError: The readout has another width than the decoder vectors.
    """
    import xarray as xr

    layer_and_index = active_features.values[selected_features.values][:, [0, 2]]
    # A feature that is active at several positions is computed once.
    unique, row_of_selected = np.unique(layer_and_index, axis=0, return_inverse=True)
    effects = direct_effects(dictionary, unique, readout, top_k)
    # numpy 2.0 returned the inverse as [n, 1].
    rows = row_of_selected.reshape(-1)
    return xr.Dataset({name: (("selected", "rank"), values[rows]) for name, values in effects.items()})


def logit_effects_node(graph: GraphNode, readout: Node, *, top_k: int = 5) -> StageNode:
    """Plan node that computes the direct logit effects of the features of a graph.

    Arguments:
        graph: Node that computes the graph.
        readout: Node that computes the readout of the same model (`readout_node`).
        top_k: Number of tokens raised, and of tokens lowered, per feature.
    """
    ports = {name: Port(graph, name) for name in ("active_features", "selected_features")}
    return logit_effects.on(**ports, readout=readout, dictionary=graph.dictionary.as_resource(), top_k=top_k)
