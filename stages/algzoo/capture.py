"""Hook points of AlgZoo in the store: a pass over some inputs under a spec, kept under the key of its run.

The key is a `RunKey` as of any model: network (weights, sizes, version of the pass, dtype), inputs,
interventions. A capture is one result, as these networks compute in no time what a run of shards is for.

Border: keys and labels; what computes is the model's business.

Axes: sample, time, neuron, output; of the transformer sample, layer, head, position, hidden.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pipeline import SourceNode
from ...store.arrays import Array
from ...store.digest import array_digest, digest
from ...store.keys import RunKey
from ..forward.hooks.spec import BoundSpec, HookSpec
from .model import AlgZooModel

if TYPE_CHECKING:
    import xarray as xr

    from ...store import Store

__all__ = ["capture", "capture_node", "run_key"]


def run_key(model: AlgZooModel, x: Array, spec: BoundSpec, dtype: str = "float64") -> RunKey:
    """Which pass this is: network, inputs, interventions."""
    inputs = digest("algzoo-inputs", array_digest(np.ascontiguousarray(x)))
    return RunKey(model.identity(dtype).digest, inputs, spec.run_digest)


def capture_node(model: AlgZooModel, x: Any, hooks: HookSpec, dtype: str = "float64") -> SourceNode:
    """A pass over inputs [sample, time] as a node: a variable per kind of hook point, the inputs as x
    [sample, position], and what the network says as logits [sample, output]."""
    given = np.array(x)
    spec = model.bind(hooks, given.shape[-1])
    captures = spec.canonical()["captures"]
    params = {"run": run_key(model, given, spec, dtype).digest, "captures": captures}
    make = partial(_captured, model, given, hooks, dtype)
    return SourceNode("algzoo_capture", 1, params, make, pinned=(model,))


def capture(
    model: AlgZooModel, x: Any, hooks: HookSpec, *, store: Store, dtype: str = "float64"
) -> xr.Dataset:
    """Store activations of inputs [sample, time] at hook points, and open them: labelled, lazy. What is
    stored is not computed again."""
    from ...pipeline import run

    node = capture_node(model, x, hooks, dtype)
    run(node, store)
    return node.open(store)


def _captured(model: AlgZooModel, x: Array, hooks: HookSpec, dtype: str) -> xr.Dataset:
    cache = model.forward(x, hooks, dtype)
    found = cache.to_xarray()
    said = {"x": (("batch", "position"), x), "logits": (("batch", "output"), cache.logits.numpy())}
    return found.assign(said).rename_dims({"batch": "sample"})
