"""What a user's type checker sees: never run, checked by `make typecheck`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
import xarray as xr

import mizarr
from mizarr.store import Store
from mizarr.workflows.workflow import Workflow

model = mizarr.Model.from_pretrained("specimen")
assert_type(model, mizarr.Model)

point = mizarr.HookPoint.resid_post(1)
assert_type(point, mizarr.HookPoint)

hooks = mizarr.HookSpec().capture(point, "blocks.*.attn.hook_pattern")
hooks = hooks.intervene("blocks.0.hook_mlp_out", mizarr.Scale(0.5))
assert_type(hooks, mizarr.HookSpec)

cache = model.forward("The capital of France is", hooks, want=mizarr.logits(position=-1))
again = mizarr.RecurrentPass(2, 4, feedback=[(-1, [0.5, 1.0], 2.0)], sustained=True)
texts: list[str | None] = mizarr.generate(model, "The capital", recurrent=again).texts
assert_type(cache, mizarr.HookCache)
assert_type(cache.logits, torch.Tensor)
assert_type(cache[point], torch.Tensor)

store = mizarr.open_store("activations")
assert_type(store, Store)
assert_type(mizarr.capture(model, ["a prompt"], hooks, store=store), xr.Dataset)
assert_type(mizarr.embed(model, ["a prompt"], store=store, pooling="mean"), xr.DataArray)
assert_type(mizarr.import_activations("states.npz", model="gpt2", store=store), xr.Dataset)
loader = mizarr.ActivationLoader(store["3f9a0c"], layers=[3, 4], epochs=2)
assert_type(loader.state_dict(), dict[str, Any])
assert_type(mizarr.export(store["3f9a0c"], "states.nc"), Path)
assert_type(mizarr.compute("logit_lens", store=store, model="specimen"), Workflow)

try:
    mizarr.open_store("nowhere", mode="r")
except mizarr.MizarrError as error:
    assert_type(error, mizarr.MizarrError)

mizarr.open_store("activations", mode="w")  # type: ignore[arg-type]  # a mode there is not
model.forward("text", hooks="blocks.0.hook_resid_post")  # type: ignore[arg-type]  # a HookSpec, not its string
