"""Zamba and Zamba2: a block of attention and MLP that layers share, ahead of state spaces of their own.

Parity, planned runs and generation are tested with all hybrids (test_hybrids.py and others); here is what
they alone have.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizarr import HookPoint, HookSpec, Model, Replace
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.stages.forward.runs.run import Run, stream
from mizarr.stages.logits.component_weights import component_weights
from mizarr.store.errors import ConfigError, WeightsError

from .compared import assert_near, draw_ids, outputs_of
from .random_hybrids import draw, save_random_hybrid
from .random_models import VOCAB

pytest.importorskip("transformers")
ZAMBA = ("zamba", "zamba2")
TYPES = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"]


@pytest.mark.parametrize("family", ZAMBA)
def test_attention_patterns_of_the_shared_block_agree_with_transformers(family, tmp_path):
    reference = save_random_hybrid(tmp_path, family, 4, layers_block_type=TYPES)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 40)
    cache = model.forward(ids, HookSpec().capture("blocks.*.attn.hook_pattern"))
    assert [point.layer for point in cache] == [1, 2, 4]
    with torch.no_grad():
        held = reference(ids, output_attentions=True, use_cache=False).attentions
    expected = [pattern for pattern in held if pattern is not None]
    for point, pattern in zip(cache, expected, strict=True):
        assert_near(cache[point], pattern)


@pytest.mark.parametrize("family", ZAMBA)
def test_another_embedding_is_another_token_for_the_stream_and_for_shared_blocks(family, tmp_path):
    """What is carried beside the stream is the embedding as it was changed; a stream changed behind it is
    not what shared blocks read as the embedding."""
    save_random_hybrid(tmp_path, family, 0, layers_block_type=TYPES)
    model, ids = Model.from_pretrained(tmp_path, dtype="float64"), draw_ids(1, 9)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % VOCAB
    change = Replace(model.network.embedding[other[0, 3]], positions=(3,))
    expected = model.forward(other).logits
    assert_near(model.forward(ids, HookSpec().intervene("hook_embed", change)).logits, expected, 1e-9)
    moved = model.forward(ids, HookSpec().intervene("blocks.0.hook_resid_pre", change)).logits
    assert float((moved - expected)[:, 3:].abs().max()) > 1e-5


@pytest.mark.parametrize("family", ZAMBA)
def test_what_the_block_gives_is_added_to_what_the_mixer_reads_and_not_to_the_stream(family, tmp_path):
    save_random_hybrid(tmp_path, family, 1, layers_block_type=TYPES)
    model = Model.from_pretrained(tmp_path)
    names = ("shared.*", "ln?.hook_*", "hook_*", "mlp.hook_*", "attn.hook_z")
    cache = model.forward(draw_ids(2, 9), HookSpec().capture(*(f"blocks.2.{name}" for name in names)))
    held = {point.kind: cache[point] for point in cache}
    assert_near(held["resid_pre"] + held["attn_out"], held["resid_post"])
    read = held["resid_pre"] + held["shared_out"]
    eps = model.config.norm_eps
    assert_near(held["ln1_scale"], (read.square().mean(-1, keepdim=True) + eps).sqrt())
    assert_near(held["ln1_normalized"], read / held["ln1_scale"])
    scale = (held["shared_attn_out"].square().mean(-1, keepdim=True) + eps).sqrt()
    assert_near(held["ln2_scale"], scale)
    out = model.network.weights.layers[2].shared._out
    assert_near(held["mlp_post"] @ out.T, held["shared_out"])
    assert held["shared_normalized"].shape[-1] == 2 * model.config.hidden_size


def test_layers_that_share_a_block_share_its_memory(tmp_path):
    types = ["hybrid"] * 5
    save_random_hybrid(
        tmp_path, "zamba2", 0, layers_block_type=types, num_mem_blocks=2, tie_word_embeddings=True
    )
    model = Model.from_pretrained(tmp_path)
    blocks = [layer.shared for layer in model.network.weights.layers]
    places = [block.attention.weights.q.weight.data_ptr() for block in blocks]
    assert places[0] == places[2] == places[4] != places[1] == places[3]
    low = {block.mlp.weights.gate_up.low[0].data_ptr() for block in blocks}
    assert len(low) == 5
    sources = [block.shared.source for block in model.config.blocks]
    assert sources == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("family", ZAMBA)
def test_a_checkpoint_may_repeat_a_shared_block_but_not_change_it(family, tmp_path):
    tied = {"tie_word_embeddings": True}
    reference = save_random_hybrid(tmp_path, family, 0, layers_block_type=TYPES, **tied)
    path, files = tmp_path / "model.safetensors", resolve(tmp_path)
    held, tensors = load_file(path), files.architecture().tensors
    repeated = {copy: held[original].clone() for copy, original in tensors.copies.items() if original in held}
    assert any(".layers.4." in name for name in repeated)
    save_file(held | repeated, path, {"format": "pt"})
    ids = draw_ids(1, 9)
    found = report(files.config, read_shapes([path]))
    assert found.is_compatible and not found.warnings
    assert_near(Model.from_pretrained(tmp_path).forward(ids).logits, outputs_of(reference, ids)[0])
    name = next(name for name in repeated if name.startswith("model.layers.4."))
    save_file(held | repeated | {name: repeated[name] + 1}, path, {"format": "pt"})
    with pytest.raises(
        WeightsError, match=f"'{name}' and 'model.layers.1.shared_transf.* to be equal.* so fetch .* again$"
    ):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ZAMBA)
def test_where_nothing_is_tied_every_layer_has_a_block_of_its_own(family, tmp_path):
    """As the reference has it, which ties blocks where it ties the head."""
    untied = {"tie_word_embeddings": False}
    reference = save_random_hybrid(tmp_path, family, 1, layers_block_type=TYPES, **untied)
    model, ids = Model.from_pretrained(tmp_path), draw_ids(2, 19)
    assert [block.shared.source for block in model.config.blocks if block.shared] == [1, 2, 4]
    assert_near(model.forward(ids).logits, outputs_of(reference, ids)[0])
    files = resolve(tmp_path)
    assert not report(files.config, read_shapes(files.weight_files)).warnings


def test_heads_of_a_shared_block_are_no_parts_of_the_stream(tmp_path):
    save_random_hybrid(tmp_path, "zamba", 0, layers_block_type=["hybrid"] * 5)
    model, files = Model.from_pretrained(tmp_path), resolve(tmp_path)
    told = "layer 1 of zamba to have self-attention, found none that adds to the residual stream"
    with pytest.raises(ConfigError, match=told):
        model.network.output_matrix(1)
    for part in ("attention", "mlp"):
        with pytest.raises(ConfigError, match="in every layer; this 'zamba' model has it in 0 of 5 layers"):
            component_weights(files.weight_files, files.architecture(), part)


@pytest.mark.parametrize("family", ZAMBA)
def test_a_branch_computes_every_position_of_a_last_layer_whose_mixer_stands_behind_another(family, tmp_path):
    """Logits of the last token alone are wanted: still, its state has read every other."""
    save_random_hybrid(tmp_path, family, 2, layers_block_type=[*TYPES[:4], "hybrid"])
    model, (ids,) = Model.from_pretrained(tmp_path), draw_ids(1, 12).tolist()
    change = Replace(torch.ones(model.config.hidden_size), positions=(5,))
    runs = [
        Run(ids, HookSpec().intervene(f"blocks.{i}.hook_resid_pre", change), Logits((-1,))) for i in range(5)
    ]
    for index, found in stream(model, runs):
        plain = model.forward(ids, runs[index].hooks, want=runs[index].want)
        assert_near(found.logits, plain.logits)


@pytest.mark.parametrize("family", ZAMBA)
def test_a_branch_that_ends_where_a_shared_block_begins_stands_beside_those_that_go_on(family, tmp_path):
    save_random_hybrid(tmp_path, family, 2, layers_block_type=TYPES)
    model, (ids,) = Model.from_pretrained(tmp_path), draw_ids(1, 12).tolist()
    change, end = Replace(torch.ones(model.config.hidden_size), positions=(5,)), HookPoint.resid_pre(2)
    runs = [Run(ids), Run(ids, HookSpec().intervene("blocks.0.hook_resid_pre", change).capture(end), None)]
    for index, found in stream(model, runs):
        plain = model.forward(ids, runs[index].hooks, want=runs[index].want)
        if found.has_logits:
            assert_near(found.logits, plain.logits)
        else:
            assert_near(found[end], plain[end])


# Configurations


def read(family: str, **changes):
    raw = {"model_type": family, "hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4} | changes
    return KNOWN[family].read(ConfigReader(raw), {})


@pytest.mark.parametrize(("family", "layers"), [("zamba", 9), ("zamba2", 54)])
def test_absent_keys_mean_what_they_mean_to_the_reference(family, layers):
    from transformers import AutoConfig

    given = {"hidden_size": 32, "vocab_size": 96, "num_hidden_layers": layers, "num_attention_heads": 16}
    full = AutoConfig.for_model(family, **given).to_dict()
    silent = KNOWN[family].read(ConfigReader(given | {"model_type": family}), {})
    assert silent.fields == KNOWN[family].read(ConfigReader(full), {}).fields
    assert any(block.shared for block in silent.blocks)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("zamba", {"hidden_mamba_act": "gelu"}, r"expected hidden_mamba_act 'silu' .*found 'gelu'"),
        (
            "zamba",
            {"attention_hidden_size": 32},
            r"attention_hidden_size to be twice hidden_size, 64, .*found 32",
        ),
        ("zamba", {"num_key_value_heads": 3}, r"multiple of num_key_value_heads, found 3"),
        ("zamba", {"n_mamba_heads": 5, "num_key_value_heads": 4}, r"found 64 heads and 5 groups"),
        ("zamba2", {"n_mamba_heads": 3}, r"expected n_mamba_heads to divide 64 channels, found 3"),
        (
            "zamba2",
            {"layers_block_type": ["hybrid", "conv"]},
            r"type of each layer, mamba or hybrid, found 'conv'",
        ),
        (
            "zamba2",
            {"use_shared_attention_adapter": True, "num_key_value_heads": 2},
            r"as many key heads as query heads, .* and 2 key heads",
        ),
        ("zamba2", {"hidden_act": "snake"}, r"expected an activation among .*found 'snake'"),
    ],
)
def test_what_is_not_followed_is_one_line(family, changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read(family, **changes)
    assert "\n" not in str(raised.value)


def test_a_long_context_is_what_the_reference_takes_for_one():
    assert read("zamba2", use_long_context=True, max_position_embeddings=4096).context_length == 16384


@pytest.mark.parametrize("family", ZAMBA)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_hybrid(tmp_path, family, 0, tokenizer=False)
    files = resolve(Path(tmp_path))
    found = report(files.config, read_shapes(files.weight_files))
    assert files.has_known_family and found.known_family and found.is_compatible and not found.warnings
    assert found.config == files.architecture()
    assert found.config.hidden_size == draw(family, 0)["hidden_size"]
