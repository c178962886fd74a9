"""Fields of JSON documents stay: scripts that read them today read them in years to come.

`json_fields.json` lists every field of the documents of workflows as they were before their answers were said
in views: `results[].layers[].kl`, lists as what they hold, names that are numbers as `#`, of settings their
names. Fields may be added. One that is dropped or renamed on purpose is taken out of the list, and told in
CHANGELOG.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mizarr.workflows import compute

pytestmark = pytest.mark.wide

HELD = json.loads(Path(__file__).with_suffix(".json").with_stem("json_fields").read_text("utf-8"))
PROMPT, OTHER = (f"The mother tongue of {name} is" for name in ("John Calvin", "John Calvan"))
FEW: dict[str, Any] = {"controls": 2}
ASKED: dict[str, list[dict[str, Any]]] = {
    "logit_lens": [{"prompts": [PROMPT, "The capital of France is"], "answers": ["French", "Paris"]}],
    "logit_attribution": [{"limit": 2, "neurons": 2}],
    "generate": [{"prompts": [PROMPT], "max_tokens": 2, "zero": ["blocks.3.hook_attn_out"]}],
    "character_count_helix": [{"widths": [40, 60], "characters": 3000, "layers": [1, 2], "min_tokens": 4}],
    "activation_patching": [
        {
            "prompt": PROMPT,
            "corrupted": [OTHER],
            "answer": "French",
            "kinds": ["resid_mid", "resid_post", "attn_out", "mlp_out"],
            "others": 2,
            **FEW,
        }
    ],
    "counterfact_patching": [{"limit": 2, "others": 2, **FEW}],
    "factual_routing": [{"limit": 2, "others": 2, **FEW}],
    "attention_knockout": [{"facts": 2, **FEW}],
    "attention_patterns": [{}],
    "head_detection": [{"sequences": 2, "length": 8, **FEW}],
    "layer_scan": [{"samples": 4, **FEW}],
    "probe": [{"layers": [2], "examples": 200, "penalties": [0.01]}],
    "inspect_weights": [{}],
    "steering_dose_response": [{"facts": 2, **FEW}],
    "steering_convergence": [
        {"strength_steps": 1, **FEW},
        {"strength_steps": 1, "batch_file": "batch.json", **FEW},
    ],
    "token_positions": [{}],
    "planning_in_poems": [FEW],
    "attention_routing": [{"steps": 1, **FEW}],
    "correction_test": [{"steps": 1, **FEW}, {"steps": 1, "head": "3:0", **FEW}],
    "sae_features": [{"zero_positions": 1}],
    "clt_probe": [{"prompt": PROMPT, "search": "French"}],
    "clt_vs_plt": [FEW],
    "attribution_graph": [{"max_feature_nodes": 100, "corpus_tokens": 512}],
}

SLOW = (
    "activation_patching",
    "attribution_graph",
    "clt_vs_plt",
    "planning_in_poems",
    "probe",
    "steering_convergence",
    "steering_dose_response",
)
BATCH = {
    "experiments": [{"group": "tongues", "prompt": PROMPT, "contrastive": OTHER, "target_token": "French"}]
}


def fields(value: Any, at: str = "") -> Iterator[str]:
    """Every field below a value of a document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            told = "#" if name.isdigit() else name
            yield from fields(inner, f"{at}.{told}" if at else told)
    elif isinstance(value, list):
        nested = [inner for inner in value if isinstance(inner, dict | list)]
        if not nested:
            yield f"{at}[]"
        for inner in nested:
            yield from fields(inner, f"{at}[]")
    else:
        yield at


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in HELD]
)
def test_a_field_that_was_in_a_document_still_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("batch.json").write_text(json.dumps(BATCH))
    found: set[str] = set()
    for asked in ASKED[name]:
        document = compute(name, store="store", **asked).to_json()
        document["settings"] = dict.fromkeys(document["settings"])
        found |= set(fields(json.loads(json.dumps(document))))
    assert set(HELD[name]) <= found
