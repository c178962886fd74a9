"""Stored activations of AlgZoo networks: a forward pass over inputs with captures and interventions.

Its key is a `RunKey` as for language models: network (weights, sizes, version of the pass, dtype), inputs,
interventions. A capture is stored as a single result, without shards: it is small, and computed in
milliseconds.

Border: keys and labels; the model computes.

Axes: sample, time, neuron, output; for the transformer sample, layer, head, position, hidden.
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
    """Key of a forward pass in the store, from network, inputs and interventions.

    Arguments:
        model: the network.
        x: inputs [sample, time].
        spec: captures and interventions, bound to the network's hook points.
        dtype: dtype of the pass, "float32" or "float64".
    """
    inputs = digest("algzoo-inputs", array_digest(np.ascontiguousarray(x)))
    return RunKey(model.identity(dtype).digest, inputs, spec.run_digest)


def capture_node(model: AlgZooModel, x: Any, hooks: HookSpec, dtype: str = "float64") -> SourceNode:
    """Node of a computation graph that runs a network over inputs with captures and interventions.

    Its result has a variable per kind of hook point, the inputs as x [sample, position], and the outputs as
    logits [sample, output].

    Arguments:
        model: the network.
        x: inputs [sample, time].
        hooks: captures and interventions.
        dtype: dtype of the pass, "float32" or "float64".
    """
    # A copy: the key is computed now, and the caller may change the array before the node is computed.
    inputs = np.array(x)
    spec = model.bind(hooks, inputs.shape[-1])
    captures = spec.canonical()["captures"]
    params = {"run": run_key(model, inputs, spec, dtype).digest, "captures": captures}
    make = partial(_captured, model, inputs, hooks, dtype)
    return SourceNode("algzoo_capture", 1, params, make, pinned=(model,))


def capture(
    model: AlgZooModel, x: Any, hooks: HookSpec, *, store: Store, dtype: str = "float64"
) -> xr.Dataset:
    """Activations at hook points, opened lazily from the store; computed only if not yet stored.

    Arguments:
        model: the network.
        x: inputs [sample, time].
        hooks: captures and interventions.
        store: store in which the activations are looked up and written.
        dtype: dtype of the pass, "float32" or "float64".
    """
    from ...pipeline import run

    node = capture_node(model, x, hooks, dtype)
    run(node, store)
    return node.open(store)


def _captured(model: AlgZooModel, x: Array, hooks: HookSpec, dtype: str) -> xr.Dataset:
    """Run a network over inputs, and return captured activations, inputs and outputs as labelled arrays."""
    cache = model.forward(x, hooks, dtype)
    activations = cache.to_xarray()
    inputs_and_outputs = {
        "x": (("batch", "position"), x),
        "logits": (("batch", "output"), cache.logits.numpy()),
    }
    return activations.assign(inputs_and_outputs).rename_dims({"batch": "sample"})
