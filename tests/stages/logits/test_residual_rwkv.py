"""The stream of a recurrent model taken apart: it begins with the norm of the embedding, not with that."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.pipeline import run
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.model import Model
from mizarr.stages.logits.residual import decompose_resid
from mizarr.store import PackedTokens, open_store
from mizarr.store.errors import ShapeError

from ..forward.random_rwkv import GENERATIONS, save_random_rwkv

HOOKS = ("hook_embed", "blocks.0.hook_pre_norm", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out")
IDS = [[7, 42, 3, 99, 120], [5, 61]]


@pytest.fixture(scope="module", params=GENERATIONS)
def states(request, tmp_path_factory):
    """What was captured of a model of each generation, and its description."""
    folder = tmp_path_factory.mktemp(request.param)
    save_random_rwkv(folder / "model", request.param, seed=3)
    model = Model.from_pretrained(str(folder / "model"))
    spec = HookSpec().capture(*HOOKS, "blocks.*.hook_resid_post", "blocks.*.hook_resid_mid")
    node = CaptureNode(model, PackedTokens.from_lists(IDS), spec)
    store = open_store(folder / "store")
    run(node, store)
    return node.open(store).load(), model.config


def test_the_parts_sum_to_the_stream(states):
    held, config = states
    start = held[config.stream_start.kind]
    parts = decompose_resid(start, held["attn_out"], held["mlp_out"])
    stream = held["resid_post"].isel(layer=-1)
    scale = float(abs(stream).max())
    assert abs(parts.sum("component") - stream).max() < 1e-5 * scale
    middle = decompose_resid(start, held["attn_out"], held["mlp_out"], layer=1, mlp_input=True)
    assert abs(middle.sum("component") - held["resid_mid"].sel(layer=1)).max() < 1e-5 * scale
    assert parts["component"].values.tolist()[:2] == ["embed", "0_attn_out"]


def test_the_embedding_itself_is_no_part_of_it(states):
    held, _ = states
    parts = decompose_resid(held["embed"], held["attn_out"], held["mlp_out"])
    stream = held["resid_post"].isel(layer=-1)
    assert abs(parts.sum("component") - stream).max() > 0.1 * float(abs(stream).max())


def test_a_beginning_of_several_layers_is_refused(states):
    held, _ = states
    with pytest.raises(ShapeError, match=r"in a single layer, found [23] layers of resid_post"):
        decompose_resid(held["resid_post"], held["attn_out"], held["mlp_out"])


def test_an_axis_of_one_layer_is_no_axis_of_the_sum(states):
    held, config = states
    start = held[config.stream_start.kind]
    parts = decompose_resid(start, held["attn_out"], held["mlp_out"])
    assert set(parts.dims) == {"component", "token", "hidden"}
    assert np.array_equal(parts.sel(component="embed"), start.isel({start.dims[0]: 0}))
