"""Layers of a composed architecture may differ in the sizes of their parts; parts of one layer may not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mizarr
from mizarr import Add, HookSpec, Model, Run, Zero
from mizarr.stages.forward.architectures.composed import ComposedArchitecture, LayerSpec
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.architectures.layer_parts import AltUpSpec, LayerInputSpec
from mizarr.stages.forward.architectures.linear_mixers import ShortConvolutionSpec
from mizarr.stages.forward.architectures.mixers import AttentionSpec, MlpSpec
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.networks.table import over
from mizarr.store.errors import ConfigError, InterventionError

RAW = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
RAW |= {"num_hidden_layers": 3, "vocab_size": 40, "num_key_value_heads": 2, "tie_word_embeddings": True}


def llama() -> ComposedArchitecture:
    architecture = from_hf_config(dict(RAW))
    assert isinstance(architecture, ComposedArchitecture)
    return architecture


def widened() -> ComposedArchitecture:
    """A Llama whose layer 1 has wider heads, other numbers of them, and a wider MLP."""
    config = llama()
    wide = LayerSpec((AttentionSpec(6, 3, 8),), MlpSpec(36, "silu"), "before")
    return replace(config, blocks=(config.blocks[0], wide, config.blocks[2]))


@pytest.mark.parametrize("sizes", [(4, 2, 0), (4, 0, 8), (0, 2, 8), (4, -2, 8)])
def test_attention_without_heads_or_entries_is_refused(sizes):
    with pytest.raises(ConfigError, match=f"num_attention_heads, .* to be at least 1, found {sizes[0]}, "):
        AttentionSpec(*sizes)


def test_axes_of_several_sizes_are_refused_by_name_and_known_layer_by_layer():
    config = widened()
    assert dict(config.axis_sizes) == {"hidden": 16, "one": 1}
    assert config.axis_sizes.differing == {
        "head": {4, 6},
        "kv_head": {2, 3},
        "d_head": {4, 8},
        "mlp": {24, 36},
    }
    sizes = [config.sizes_in(layer) for layer in range(3)]
    assert [(s["head"], s["kv_head"], s["d_head"], s["mlp"]) for s in sizes] == [
        (4, 2, 4, 24),
        (6, 3, 8, 36),
        (4, 2, 4, 24),
    ]
    assert config.sizes_in(None) == {"hidden": 16, "one": 1}
    with pytest.raises(
        ConfigError,
        match="the axis .head. to have one size in all layers of the model, found the sizes 4 and 6",
    ):
        config.width("z")
    assert dict(llama().axis_sizes) == llama().sizes_in(1)


def drawn(config: ComposedArchitecture) -> dict[str, torch.Tensor]:
    """Random tensors of a checkpoint, by name."""
    generator = torch.Generator().manual_seed(0)
    shapes = config.tensors.shapes
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def test_layers_of_several_sizes_are_captured_changed_and_planned():
    config = widened()
    model = Model(over(config, drawn(config).__getitem__))
    hooks = HookSpec().capture("blocks.*.attn.hook_z", "blocks.*.mlp.hook_post_act")
    cache = model.forward([3, 4, 5], hooks)
    shapes = [tuple(cache[HookPoint.z(layer)].shape) for layer in range(3)]
    assert shapes == [(1, 4, 3, 4), (1, 6, 3, 8), (1, 4, 3, 4)]
    assert [cache[HookPoint.mlp_post_act(layer)].shape[-1] for layer in range(3)] == [24, 36, 24]
    fits, misses = (
        HookSpec().intervene("blocks.1.attn.hook_z", Add(torch.ones(width), positions=(1,)))
        for width in (8, 4)
    )
    with pytest.raises(InterventionError, match="d_head=8"):
        model.forward([3, 4, 5], misses)
    cut = HookSpec().intervene("blocks.0.mlp.hook_post_act", Zero(positions=(0,)))
    runs = [Run([3, 4, 5], spec) for spec in (HookSpec(), fits, cut)]
    for one, planned in zip(runs, mizarr.run(model, runs), strict=True):
        alone = model.forward(one.prompt, one.hooks, want=one.want).logits
        torch.testing.assert_close(planned.logits, alone, rtol=0, atol=1e-5)


def test_a_narrower_layer_is_a_wide_one_with_zeros():
    """An MLP of 24 entries is one of 36, of which 12 are 0."""
    narrow = llama()
    block = narrow.blocks[1]
    mixed, even = (
        replace(
            narrow, blocks=tuple(replace(block, channel_mixer=MlpSpec(width, "silu")) for width in widths)
        )
        for widths in ((36, 24, 36), (36, 36, 36))
    )
    tensors = drawn(mixed)
    padded = dict(tensors)
    for part, size in (("gate", (36, 16)), ("up", (36, 16)), ("down", (16, 36))):
        name = f"model.layers.1.mlp.{part}_proj.weight"
        padded[name] = torch.zeros(size)
        rows, columns = tensors[name].shape
        padded[name][:rows, :columns] = tensors[name]
    logits = [
        Model(over(c, t.__getitem__)).forward([3, 4, 5, 6]).logits
        for c, t in ((mixed, tensors), (even, padded))
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def test_parts_of_one_layer_have_one_size_per_axis():
    two = (AttentionSpec(4, 2, 4), AttentionSpec(4, 2, 8))
    with pytest.raises(
        ConfigError, match="axis .d_head. to have one size in all parts of a layer, found the sizes 4 and 8"
    ):
        LayerSpec(two, MlpSpec(24, "silu"))


def test_per_layer_inputs_are_alike_in_all_layers():
    config = llama()
    first = replace(config.blocks[0], layer_input=LayerInputSpec(4, 40, "silu"))
    with pytest.raises(
        ConfigError, match="per-layer inputs of the same width and activation in all layers, found"
    ):
        replace(config, blocks=(first, *config.blocks[1:]))


def test_changes_reach_later_positions_only_where_a_mixer_reads_the_stream():
    """A layer that reuses keys passes nothing on, unless another mixer beside it does."""
    reusing = AttentionSpec(4, 2, 4, source=0, has_v_norm=True)
    channel = MlpSpec(24, "silu")
    convolution = ShortConvolutionSpec(16, 3)
    config = llama()
    first = config.blocks[0]
    config = replace(
        config, blocks=(first, LayerSpec((reusing,), channel), LayerSpec((reusing, convolution), channel))
    )
    assert config.key_sources == {0}
    reaches = [config.reach(HookPoint.resid_pre(layer)) for layer in range(3)]
    assert reaches == ["later", "here", "later"]
    assert [config.reach(HookPoint.resid_post(layer)) for layer in range(3)] == ["here", "later", "here"]


def test_with_parallel_streams_no_layer_is_a_plain_sum():
    config = replace(llama(), altup=AltUpSpec(3, 1))
    assert {layer.norms for layer in config.layers} == {"of stream"}
    assert {layer.norms for layer in llama().layers} == {"before"}
    assert config.axis_sizes["stream"] == 3
    assert config.bytes_per_token(4) == llama().bytes_per_token(4) + 4 * 4 * 2 * 16
