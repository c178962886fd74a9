"""No field of a known family's config.json is misread: changed, it is followed as transformers follows it, or
refused.

Every field of the family's own configuration class, and every key other families know, is changed by itself
in a saved checkpoint; transformers then reads the same directory.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter

import pytest
import torch

from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import MizarrError

from . import random_models

pytest.importorskip("transformers")
LENGTHS = (1, 2, 37, 70, 140)
FULL, SLIDING = "full_attention", "sliding_attention"
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "head_dim": 16,
}
NEUTRAL = {"model_type", "architectures", "transformers_version", "id2label", "label2id", "dtype", *SIZES}
LISTS = [
    [FULL] * 3,
    [SLIDING] * 3,
    [SLIDING, FULL, SLIDING],
    [FULL, SLIDING, FULL],
    ["chunked_attention"] * 3,
]
FOREIGN: dict[str, list] = {
    "is_causal": [False, None],
    "use_bidirectional_attention": [True],
    "partial_rotary_factor": [0.5],
    "tie_word_embeddings": [True],
    "layer_types": LISTS,
    "sliding_window": [5, 200, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "attention_bias": [True],
    "mlp_bias": [True],
    "use_bias": [True, False],
    "hidden_activation": ["relu", "gelu", "silu", None],
    "query_pre_attn_scalar": [16, 100],
    "attn_logit_softcapping": [None, 5.0],
    "final_logit_softcapping": [None, 5.0],
    "logit_scale": [0.5],
    "embedding_multiplier": [2.0],
    "residual_multiplier": [0.5],
    "attention_multiplier": [0.5],
    "clip_qkv": [0.5],
    "no_rope_layers": [[0, 1, 0]],
    "rope_theta": [500.0],
    "rope_interleaved": [True],
    "original_max_position_embeddings": [32],
    "max_position_embeddings": [100, 256],
    "num_key_value_heads": [1, 4],
    "head_dim": [8, 32],
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [2 + i / 3 for i in range(8)]}
ROPES = [
    {"rope_type": "default", "factor": 3.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32} | FACTORS,
    {"rope_type": "longrope", "original_max_position_embeddings": 32} | FACTORS,
    {"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.7} | FACTORS,
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def plausible(value):
    """Other values a field could have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, None]
    if isinstance(value, float):
        return [value * 1.7 + 0.1, None]
    return [2, True, 0.5] if value is None else []


def changes(family):
    """Changes of config.json: one field each, and every way ropes are written."""
    from transformers import AutoConfig
    from transformers.activations import ACT2FN

    default = AutoConfig.for_model(family).to_dict()
    for key in sorted((set(default) - NEUTRAL) | set(FOREIGN)):
        for value in FOREIGN.get(key) or plausible(default.get(key)):
            yield {key: value}
    yield from ({"hidden_act": name} for name in ACT2FN)
    for listed in LISTS:
        for sliding in (True, False):
            yield {"layer_types": listed, "sliding_window": 5, "use_sliding_window": sliding}
    for rope in ROPES:
        for share in ({}, {"partial_rotary_factor": 0.5}):
            yield {"rope_parameters": {"rope_theta": 500.0} | rope | share}
            yield {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": rope} | share
            old = {key: value for key, value in rope.items() if key != "rope_type"}
            yield {
                "rope_parameters": None,
                "rope_theta": 500.0,
                "rope_scaling": old | {"type": rope["rope_type"]},
            }
    yield {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 9.0}}}


def judged(folder):
    """What becomes of a directory here, beside what transformers computes from it."""
    from transformers import AutoModelForCausalLM

    try:
        model = Model.from_pretrained(folder, device="cpu")
    except MizarrError:
        return "refused"
    expected = {}
    try:
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for length in LENGTHS:
            if length <= model.config.context_length:
                seeded = torch.Generator().manual_seed(length)
                ids = torch.randint(0, random_models.VOCAB, (1, length), generator=seeded)
                with torch.no_grad():
                    expected[ids] = reference(ids, use_cache=False).logits
    except Exception:  # noqa: BLE001 - a configuration transformers cannot run has no numbers to differ from
        return "no reference"
    for ids, logits in expected.items():
        apart = float((model.forward(ids).logits - logits).abs().max())
        if not apart <= 1e-4 * max(1.0, float(logits.abs().max())):
            return "WRONG"
    return "right"


def swept(family, tmp_path, wanted):
    """Verdict -> number, of a family's changes; and those that came out wrong."""
    base = tmp_path / "base"
    described = SIZES | ({} if family not in ("phi3", "qwen2", "starcoder2") else {"head_dim": None})
    described = {key: value for key, value in described.items() if value is not None}
    random_models.save_random_model(base, family, 1, tokenizer=False, **described)
    raw = json.loads((base / "config.json").read_text())
    counts, wrong = Counter(), []
    for number, change in enumerate(wanted):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw | change))
        (folder / "model.safetensors").symlink_to(base / "model.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = judged(folder)
        counts[verdict] += 1
        wrong += [change] if verdict == "WRONG" else []
        shutil.rmtree(folder)
    return counts, wrong


@pytest.mark.parametrize("family", random_models.FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": False},
        {"is_causal": None},
        {"partial_rotary_factor": 0.5},
        {"tie_word_embeddings": True},
        {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 5, "use_sliding_window": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_that_once_came_out_wrong_is_right_or_refused(family, change, tmp_path):
    _, wrong = swept(family, tmp_path, [change])
    assert wrong == []


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["llama", "helium", "qwen3"])
def test_yarn_is_followed_however_it_is_told(family, tmp_path):
    told = [{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"truncate": False}, {"attention_factor": 1.3}]
    told += [{"mscale": 0.7, "mscale_all_dim": 1.1}, {"mscale": 0.7}]
    wanted = [{"rope_parameters": YARN | each} for each in told]
    wanted.append({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": YARN})
    counts, wrong = swept(family, tmp_path, wanted)
    assert wrong == [] and counts["right"] == len(wanted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", random_models.FAMILIES)
def test_every_field_is_followed_or_refused(family, tmp_path, capsys):
    counts, wrong = swept(family, tmp_path, changes(family))
    with capsys.disabled():
        print(f"\n{family}: {dict(counts)}")
    assert wrong == [] and counts["right"] > 20
