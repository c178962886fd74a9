"""Which tokens the features of a graph raise and lower by what they write themselves.

Border: features of a graph and a readout; how a decoder is read is in stages/features/effects/words.py. What
later layers make of a feature is what the graph's edges tell.

Axes: selected = features of the graph, as its selected_features; rank, 0 = strongest.
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

    chosen = active_features.values[selected_features.values][:, [0, 2]]
    unique, place = np.unique(chosen, axis=0, return_inverse=True)  # a feature may be active often
    found, place = direct_effects(dictionary, unique, readout, top_k), place.reshape(-1)
    return xr.Dataset({name: (("selected", "rank"), values[place]) for name, values in found.items()})


def logit_effects_node(graph: GraphNode, readout: Node, *, top_k: int = 5) -> StageNode:
    """The logit effects of a graph's features; readout: of the graph's model (`readout_node`)."""
    ports = {name: Port(graph, name) for name in ("active_features", "selected_features")}
    return logit_effects.on(**ports, readout=readout, dictionary=graph.dictionary.as_resource(), top_k=top_k)
