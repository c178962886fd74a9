"""What an architecture says of a model without its weights is what the model does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mizarr.stages.forward.architectures.architecture import Reach
from mizarr.stages.forward.architectures.composed import ComposedArchitecture
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.architectures.points import BY_NAME, SPLIT_INPUTS, HookPoint
from mizarr.stages.forward.architectures.transformer import RopeConfig
from mizarr.stages.forward.hooks.interventions import Add, Scale
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.models.model import Model
from mizarr.stages.forward.networks.rope import inverse_frequencies
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.stages.forward.passes.branches import Branch

from ..random_attending import AXES
from ..random_gemmas import GEMMAS
from ..random_hybrids import HYBRIDS, save_random_hybrid
from ..random_models import FAMILIES, VOCAB, save_random_model

pytest.importorskip("transformers")
LENGTH, TOUCHED = 9, 4
IDS = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[*FAMILIES, *HYBRIDS, *AXES, *GEMMAS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    (save_random_model if request.param in FAMILIES else save_random_hybrid)(folder, request.param, 5)
    return Model.from_pretrained(folder)


def test_every_hook_point_is_met_with_the_axes_and_widths_it_is_said_to_have(model):
    architecture = model.config
    cache = model.forward(IDS, HookSpec().capture(*model.hook_points))
    assert len(cache) == len(model.hook_points)
    for point in model.hook_points:
        sizes = architecture.sizes_in(point.layer) | {"batch": 1}
        assert list(cache[point].shape) == [sizes.get(axis, LENGTH) for axis in point.dims], point
        positions = LENGTH ** sum(axis.endswith("position") for axis in point.dims)
        if set(point.dims) & sizes.keys() <= {*architecture.axis_sizes, "batch"}:
            assert cache[point].numel() == positions * architecture.width(point.kind), point


def test_a_change_reaches_as_far_as_it_is_said_to(model):
    """Of a change at one position: nothing earlier differs, and later ones differ within the layer only where
    the reach says so. In float64: tokens that meet in an expert with others than before round otherwise."""
    end, wide = HookPoint.resid_post(0), Model.from_pretrained(model.name, dtype="float64")

    def scaled(point: HookPoint, factor: float) -> torch.Tensor:
        change: Any = Scale(factor, positions=(TOUCHED,))
        if point.kind in SPLIT_INPUTS:  # a norm stands behind them, which no factor gets through
            change = Add(factor * torch.arange(model.config.hidden_size).float(), positions=(TOUCHED,))
        hooks = HookSpec().intervene(point, change).capture(end)
        return wide.forward(IDS, hooks, want=None)[end][0]

    for point in model.hook_points:
        if point.order >= end.order or BY_NAME[point.kind].is_derived:
            continue
        # By one and by more: a point that is changed at all takes another road, and rounds otherwise.
        moved = (scaled(point, 1.0) - scaled(point, 1.5)).abs().amax(-1) > 1e-10
        assert not moved[:TOUCHED].any(), point
        assert bool(moved[TOUCHED + 1 :].any()) == (model.config.reach(point) == "later"), point


def test_the_map_of_tensors_is_the_checkpoint(model):
    files = resolve(model.name)
    found = read_shapes(files.weight_files)
    tensors = files.architecture().tensors
    # The reference writes a tied head out or leaves it, as it likes.
    assert {name: shape for name, shape in found.items() if name in tensors.shapes} == tensors.shapes
    for layer, weights in enumerate(tensors.layers):
        for weight, stored in weights.items():
            name = tensors.in_layer(layer, weight)
            assert tensors.placed(name) == (layer if stored.layer is None else stored.layer, stored.name)
            assert not stored.rows or sum(rows for _, rows in stored.rows) == stored.shape[0]
    assert tensors.placed(tensors.outside["embed"].name) == (None, tensors.outside["embed"].name)


def test_layers_say_what_the_family_is(model):
    architecture: Any = model.config
    if architecture.model_type not in FAMILIES:
        pytest.skip("layers of a hybrid differ")
    (channel_mixer,) = {layer.channel_mixer for layer in architecture.layers}
    (norms,) = {layer.norms for layer in architecture.layers}
    kinds = {point.kind for point in model.hook_points}
    assert (channel_mixer == "gated MLP") == ("mlp_pre_linear" in kinds)
    assert (norms == "around") == ("ln2_post_scale" in kinds)


def test_no_part_of_it_needs_torch():
    code = (
        "import sys\n"
        "from mizarr.stages.forward.models.files import resolve\n"
        "it = resolve('specimen').architecture()\n"
        "it.hook_points, it.layers, it.tensors.shapes, it.axis_sizes, it.digest, it.version\n"
        "it.width('z'), it.reach(it.hook_points[0]), it.bytes_per_token(4), it.keeps_keys(1, 2)\n"
        "print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


ROPES = [
    RopeConfig(1e4, 8),
    RopeConfig(1e4, 8, "linear", 2.0),
    RopeConfig(1e4, 8, "dynamic", 2.0, original_max_position_embeddings=6),
    RopeConfig(1e4, 8, "llama3", 4.0, original_max_position_embeddings=6),
    RopeConfig(
        1e4, 8, "longrope", 2.0, original_max_position_embeddings=6, short_factor=(1.0,) * 4,
        long_factor=(2.0,) * 4,
    ),
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.scheme)
def test_keys_are_kept_just_where_a_longer_sequence_turns_them_alike(rope):
    small = from_hf_config({**SMALL, "model_type": "llama", "head_dim": 8})
    (attention,) = small.blocks[0].mixers
    block = replace(small.blocks[0], mixers=(replace(attention, rope=rope),))
    architecture = replace(small, blocks=(block,) * 2)
    for before in range(1, 12):
        for length in range(before, 12):
            alike = torch.equal(inverse_frequencies(rope, before), inverse_frequencies(rope, length))
            assert architecture.keeps_keys(before, length) == alike, (before, length)
    lengths = range(1, 12)
    assert architecture.lengths_must_match == any(not architecture.keeps_keys(1, n) for n in lengths)


class Bidirectional(ComposedArchitecture):
    """A model in which every position sees every other."""

    def reach(self, point: HookPoint) -> Reach:
        return "all" if super().reach(point) == "later" else "here"


def test_where_a_change_reaches_all_positions_a_branch_holds_all_of_them():
    small = from_hf_config({**SMALL, "model_type": "llama"})
    architecture = Bidirectional(**{each.name: getattr(small, each.name) for each in fields(small)})
    tokens = tuple(range(LENGTH))
    root = Branch(tokens, None, (), 0, architecture)
    stream = Branch(tokens, root, ((HookPoint.resid_pre(0), Add([0.0], positions=(3,))),), 0, architecture)
    assert [len(stream.held(slot)) for slot in range(3)] == [LENGTH] * 2 + [0]
    # Behind the mixer: its own position in this layer, all of them in the next.
    output = Branch(tokens, root, ((HookPoint.mlp_out(0), Add([0.0], positions=(3,))),), 0, architecture)
    assert output.held(0).tolist() == [3]
    assert len(output.held(1)) == LENGTH
