"""What a config.json of a state-space model or a hybrid means: the reference's defaults, and one line for
what nobody follows."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from mizarr.stages.forward.architectures.hybrids.mamba_families import HYBRIDS, read_mamba
from mizarr.stages.forward.architectures.known import KNOWN
from mizarr.stages.forward.architectures.layer_summaries import (
    AttentionMixer,
    MixersSideBySide,
    RecurrentMixer,
)
from mizarr.stages.forward.architectures.transformer import ConfigReader
from mizarr.stages.forward.models.autoconfig import report
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.forward.networks.weights import read_shapes
from mizarr.store.errors import ConfigError

from ..random_hybrids import save_random_hybrid

pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 12, "vocab_size": 96}
HEADS = {"num_attention_heads": 8, "intermediate_size": 48}
REQUIRED: dict[str, dict[str, Any]] = {
    "mamba": SIZES,
    "falcon_mamba": SIZES,
    "mamba2": SIZES | {"hidden_size": 4096},
    "bamba": SIZES | HEADS,
    "granitemoehybrid": SIZES | HEADS,
    "jamba": SIZES | HEADS,
    "falcon_h1": SIZES | HEADS,
    "nemotron_h": {"hidden_size": 64, "vocab_size": 96, "hybrid_override_pattern": "ME*-M-"},
}
"""Keys without a default here, as small as the reference's own defaults let them be."""


def read(raw: dict[str, Any]) -> Any:
    return read_mamba(ConfigReader(raw), {})


@pytest.mark.parametrize("family", HYBRIDS)
def test_absent_keys_mean_what_they_mean_to_the_reference(family):
    """The config the reference makes of the required keys says all others."""
    from transformers import AutoConfig

    full = AutoConfig.for_model(family, **REQUIRED[family]).to_dict()
    assert len(full) > len(REQUIRED[family]) + 10
    told, silent = read(json.loads(json.dumps(full))), read(REQUIRED[family] | {"model_type": family})
    assert silent.fields == told.fields
    assert silent.digest == told.digest


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ([0.0, {"__float__": "Infinity"}], (0.0, None)),
        ([0.001, float("inf")], (0.001, None)),
        ([0.1, "inf"], (0.1, None)),
        ([0.1, 0.5], (0.1, 0.5)),
        (None, (0.0, None)),
    ],
)
def test_the_limits_of_step_sizes_may_be_infinite_in_every_spelling(told, meant):
    raw = REQUIRED["mamba2"] | {"model_type": "mamba2", "time_step_limit": told}
    assert read(raw).blocks[0].mixers[0].limits == meant


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mamba", {"hidden_act": "gelu"}, r"expected hidden_act 'silu' in a model with .*found 'gelu'"),
        ("mamba", {"state_size": "16"}, r"expected state_size to be a positive integer, found '16'"),
        ("mamba", {"quantization_config": {}}, r"expected unquantised weights"),
        ("mamba2", {"time_step_limit": [0.1]}, r"expected time_step_limit to be two numbers, found \[0\.1\]"),
        ("mamba2", {"time_step_limit": [0, "much"]}, r"expected time_step_limit to hold numbers"),
        (
            "mamba2",
            {"num_heads": 6, "n_groups": 4},
            r"multiple of the number of groups, found 6 heads and 4 groups",
        ),
        ("bamba", {"mamba_d_head": 5}, r"expected mamba_n_heads \* mamba_d_head to be 128, found 128 \* 5"),
        ("falcon_h1", {"ssm_multipliers": [1, 2]}, r"expected ssm_multipliers to list 5 numbers, found"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "conv"]},
            r"type of each layer, attention or mamba, found 'conv'",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"]},
            r"layer_types to have one entry for each of 12 layers, found 1",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, r"type of each layer, .* or moe, found 'X'"),
        ("nemotron_h", {"hybrid_override_pattern": ""}, r"type of each layer, .* or moe, found no types"),
        ("jamba", {"vocab_size": None}, r"expected vocab_size to be a positive integer, found None"),
    ],
)
def test_what_is_not_followed_is_one_line(family, changes, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read(REQUIRED[family] | {"model_type": family} | changes)
    assert "\n" not in str(raised.value)


def test_layers_say_what_mixes_in_them():
    """To who asks whether all layers attend, how far back, and what else there is."""

    def facts(family: str) -> list[tuple[str, int | None, str | None]]:
        layers = read(REQUIRED[family] | {"model_type": family}).layers
        return [(layer.mixer.kind, layer.mixer.window, layer.channel_mixer) for layer in layers]

    assert facts("mamba") == [("recurrence", None, None)] * 12
    assert facts("falcon_h1") == [("side by side", None, "gated MLP")] * 12
    experts, mixer, attention = ("none", 1, "experts"), ("recurrence", None, None), ("attention", None, None)
    assert facts("nemotron_h") == [mixer, experts, attention, ("none", 1, "MLP"), mixer, ("none", 1, "MLP")]
    jamba = facts("jamba")
    assert [layer for layer, (kind, _, _) in enumerate(jamba) if kind == "attention"] == [4]
    assert [channel for _, _, channel in jamba] == ["gated MLP", "experts"] * 6
    windows = AttentionMixer(1.0, 5), AttentionMixer(1.0, 9)
    assert MixersSideBySide(windows).window == 9
    assert MixersSideBySide((*windows, RecurrentMixer("mamba2"))).window is None


def test_names_of_tensors_are_no_part_of_what_a_model_is():
    raw = REQUIRED["nemotron_h"] | {"model_type": "nemotron_h"}
    here, there = (
        read_mamba(ConfigReader(raw), {f"{root}.norm_f.weight": (64,)}) for root in ("model", "backbone")
    )
    assert here.digest == there.digest and here.tensors.prefix != there.tensors.prefix
    assert here.digest != read(raw | {"hybrid_override_pattern": "EM*-M-"}).digest


LINEAR_SIZES = {"hidden_size": 960, "num_hidden_layers": 6, "vocab_size": 96}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_checkpoint_is_known_and_complete(family, tmp_path):
    save_random_hybrid(tmp_path, family, 0, tokenizer=False)
    files = resolve(tmp_path)
    assert files.has_known_family
    found = report(files.config, read_shapes(files.weight_files))
    assert found.known_family and found.is_compatible and not found.warnings
    assert found.config == files.architecture()
    assert KNOWN[family].described["model_type"] == family


def test_a_missing_tensor_is_told(tmp_path):
    save_random_hybrid(tmp_path, "bamba", 0, tokenizer=False, attn_layer_indices=[1])
    files = resolve(tmp_path)
    shapes = read_shapes(files.weight_files)
    del shapes["model.layers.0.mamba.A_log"]
    issues = report(files.config, shapes).issues
    assert len(issues) == 1 and issues[0].startswith("expected a tensor model.layers.0.mamba.A_log, found ")


def test_no_part_of_it_needs_torch(tmp_path):
    save_random_hybrid(tmp_path, "falcon_h1", 0, tokenizer=False)
    code = (
        "import sys\n"
        "from mizarr.stages.forward.models.files import resolve\n"
        f"it = resolve({str(tmp_path)!r}).architecture()\n"
        "it.hook_points, it.layers, it.tensors.shapes, it.axis_sizes, it.digest, it.version, it.fields\n"
        "it.width('ssm_state_seq'), it.reach(it.hook_points[0]), it.bytes_per_token(4), it.keeps_keys(1, 2)\n"
        "print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"
