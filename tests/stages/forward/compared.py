"""What tests of parity compare, and how: prompts, logits and streams of the reference, differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xarray as xr

from mizarr import HookPoint, HookSpec, Model
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.logits.lens import logits as read_by
from mizarr.stages.logits.readout import readout_from_files

from .random_models import VOCAB

LENGTHS = (1, 2, 37, 100)
RAGGED = [[5, 9, 100], [7] * 12, list(range(2, 43))]
"""Prompts of several lengths."""
BOUND = 1e-5
"""Of the scale of what is compared; 1e-7 to 3e-6 is measured, as for float32 against float64."""


def draw_ids(rows: int, length: int) -> torch.Tensor:
    """Prompts [row, position], the same for every model."""
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    """To a share of the scale of what is expected."""
    scale = max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= bound * scale


def assert_alike_together(model: Model, prompts: list[list[int]]) -> None:
    """Prompts of several lengths have the logits that each has alone."""
    together = model.forward(prompts)
    for row, prompt in enumerate(together.tokens):
        assert_near(together.logits[row, : len(prompt)], model.forward(prompt).logits[0])


def outputs_of(reference: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and what comes out of every layer, which families list in different ways."""
    streams: list[torch.Tensor] = []
    if getattr(getattr(reference, "config", None), "model_type", "") == "squeezebert":
        with torch.no_grad():  # which calls its layers past their hooks
            told = reference(ids, output_hidden_states=True)
        return told.logits, list(told.hidden_states[1:])

    # Of several streams side by side the one that layers compute.
    active = getattr(getattr(reference, "config", None), "altup_active_idx", None)

    def keep(module: Any, inputs: Any, output: Any) -> None:
        whole = output[0] if isinstance(output, tuple | list) else output
        streams.append(whole if active is None else whole[active])

    body = reference.base_model
    body = body.model if body is reference and hasattr(body, "model") else body
    body = next((getattr(body, name) for name in ("decoder", "transformer") if hasattr(body, name)), body)
    body = body if hasattr(body, "layers") else getattr(body, "encoder", body)
    names = ("layers", "h", "blocks", "layer", "albert_layer_groups")
    layers = next(getattr(body, name) for name in names if hasattr(body, name))
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    with torch.no_grad():
        told = {"use_cache": False} if hasattr(getattr(reference, "config", None), "use_cache") else {}
        logits = reference(ids, **told).logits
    for hook in hooks:
        hook.remove()
    return logits, streams


def normed_sum(model: Model, cache: Any, norm: str, layer: int, total: torch.Tensor) -> torch.Tensor:
    """What becomes the stream where a norm stands on the sum; elsewhere the sum."""
    blocks = getattr(model.config, "blocks", None)
    if blocks is None or blocks[layer].norms != "of sums":
        return total
    unit = (total - total.mean(-1, keepdim=True)) / cache[HookPoint(f"{norm}_scale", layer)]
    assert_near(unit, cache[HookPoint(f"{norm}_normalized", layer)])
    held = model.network.norm_of(norm, layer)
    return unit * held.weight + held.bias


def assert_read_by_its_files(folder: Path) -> None:
    """The last stream, read by a readout of the files alone, gives the logits of the pass."""
    model, files = Model.from_pretrained(folder), resolve(folder)
    last = HookPoint.resid_post(model.config.num_layers - 1)
    cache = model.forward(draw_ids(1, 20), HookSpec().capture(last))
    states = xr.DataArray(cache[last][0].numpy(), dims=("position", "hidden"))
    found = read_by(states, readout_from_files(files.weight_files, model.config))
    assert_near(torch.from_numpy(found.to_numpy()), cache.logits[0])


def assert_parity(model: Model, reference: Any, bound: float = BOUND) -> None:
    """Logits, and what comes out of every layer, at every length."""
    for length in LENGTHS:
        ids = draw_ids(2, length)
        logits, streams = outputs_of(reference, ids)
        cache = model.forward(ids, HookSpec().capture("blocks.*.hook_resid_post"))
        assert_near(cache.logits, logits, bound)
        assert len(streams) == model.config.num_layers
        for layer, stream in enumerate(streams):
            assert_near(cache[HookPoint.resid_post(layer)], stream, bound)
