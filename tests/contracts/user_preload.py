"""What every forked process would import: done once, before anything is computed."""

import importlib

for _name in (
    "dask.array",
    "zarr",
    "mizarr.store.reading.datasets",
    "mizarr.store.results",
    "mizarr.pipeline.execute",
    "mizarr.stages.causal.continuation",
    "mizarr.stages.features.effects.activity",
    "mizarr.stages.features.corpus.encode",
    "mizarr.stages.forward.capture.harvest",
    "mizarr.stages.forward.networks.composed",
    "mizarr.stages.graph.rows.attribute",
    "mizarr.stages.graph.prepare",
    "mizarr.stages.causal.knockout",
    "mizarr.stages.causal.grids.patching",
    "mizarr.stages.causal.steering",
    "mizarr.workflows.readout.logit_lens",
):
    importlib.import_module(_name)
