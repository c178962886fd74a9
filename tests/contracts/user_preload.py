"""What every forked process would import: done once, before anything is computed."""

import importlib

for _name in (
    "dask.array",
    "zarr",
    "mizarr.store.datasets",
    "mizarr.store.results",
    "mizarr.pipeline.execute",
    "mizarr.stages.continuation",
    "mizarr.stages.features.activity",
    "mizarr.stages.features.encode",
    "mizarr.stages.forward.harvest",
    "mizarr.stages.forward.transformer.decoder",
    "mizarr.stages.graph.attribute",
    "mizarr.stages.graph.prepare",
    "mizarr.stages.knockout",
    "mizarr.stages.patching",
    "mizarr.stages.steering",
    "mizarr.workflows.logit_lens",
):
    importlib.import_module(_name)
