"""What answers claim: every workflow has findings or says that it describes; chance is told as chance."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from scipy.stats import binom

import mizarr
from mizarr.stages.causal.controls import CHANCE
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.forward.networks.weights import expected_tensors
from mizarr.store.errors import ConfigError
from mizarr.workflows import WORKFLOWS, compute, kind_of
from mizarr.workflows.workflow import Workflow
from tests.random_dictionaries import save_random_plt

SPECIMEN = Path(mizarr.__file__).parent / "stages" / "forward" / "specimen"


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_claims_with_findings_or_describes_and_never_neither(name: str):
    kind = kind_of(name)
    claims = kind.claims is not Workflow.claims
    assert bool(kind.descriptive) + claims == 1


# -- chance

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
CHEAP: dict[str, dict[str, Any]] = {
    "head_detection": {"sequences": 6, "length": 24},
    "layer_scan": {"samples": 8},
    "composition": {"controls": 30},
    "ov_qk": {"controls": 30},
    "evaluate": {"limit": 6, "sequences": 4, "length": 20, "facts": 12, "controls": 100},
    "steering_convergence": {
        "prompt": "The mother tongue of Antonietta Di Martino is",
        "contrastive": "The mother tongue of Michel-Jean Sedaine is",
        "strength_steps": 1,
        "controls": 20,
    },
}
"""Workflows that make claims and take seconds, with settings that keep them small."""
CLAIMS = {"composition": 3, "ov_qk": 2, "evaluate": 4}
"""How many they make, where that is not one."""


def random_model(folder: Path, seed: int, **config: int) -> Path:
    """A model of random weights with the specimen's tokenizer, of its shape but for `config`."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SPECIMEN / name, folder)
    told = json.loads((SPECIMEN / "config.json").read_text()) | {"torch_dtype": "float32"} | config
    (folder / "config.json").write_text(json.dumps(told))
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if "norm" in name
        else (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in expected_tensors(from_hf_config(told)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def claimed(folder: Path, seeds: int, name: str, settings: dict[str, Any], **config: int) -> list[list[bool]]:
    """Of every random model, whether each finding of a workflow is told as more than chance."""
    found = []
    for seed in range(seeds):
        model = random_model(folder / str(seed), seed, **config)
        store = folder / f"store_{seed}"
        answer = compute(name, store=store, model=str(model), **settings | {"seed": seed}).to_json()
        found.append([each["verdict"] == "beyond chance" for each in answer["findings"]])
        shutil.rmtree(store)
    return found


def most(tries: int) -> int:
    """As many claims as chance makes in this many tries, but for one time in a thousand."""
    return int(binom.ppf(0.999, tries, CHANCE))


@pytest.mark.parametrize("name", CHEAP)
def test_random_weights_are_said_to_do_nothing(name: str, tmp_path: Path):
    found = np.array(claimed(tmp_path, 3, name, CHEAP[name], **SMALL))
    assert found.shape == (3, CLAIMS.get(name, 1))
    assert found.sum() <= most(found.size), found


PROMPTS = {name: CHEAP["steering_convergence"][name] for name in ("prompt", "contrastive")}
AT_DEFAULTS: dict[str, dict[str, Any]] = {
    "head_detection": {},
    "layer_scan": {},
    "composition": {"controls": 30},
    "ov_qk": {"controls": 30},
    "evaluate": {"limit": 12, "sequences": 8, "facts": 40},
    "steering_convergence": PROMPTS,
    "ablation": {},
    "attention_knockout": {},
    "steering_dose_response": {},
    "causal_tracing": {},
    "activation_patching": {"answer_piece": "first"},
    "attribution_patching": {},
    "integrated_gradients": {},
    "jacobian_lens": {"fit_prompts": 2, "cotangents": 8},
    "planning_pairs": {"limit": 3},
}
ON_KNOWN_FACTS = (
    "ablation",
    "activation_patching",
    "attribution_patching",
    "integrated_gradients",
    "jacobian_lens",
    "attention_knockout",
    "steering_dose_response",
    "causal_tracing",
)
"""Workflows that claim nothing of facts a model does not know, as these models know none."""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 20 models
@pytest.mark.parametrize("name", AT_DEFAULTS)
def test_random_weights_of_the_specimens_shape_are_said_to_do_nothing(name: str, tmp_path: Path):
    """Twenty models, the workflow at its defaults."""
    found = claimed(tmp_path, 20, name, AT_DEFAULTS[name])
    if name in ON_KNOWN_FACTS:
        assert found == [[]] * 20
    else:
        assert min(map(len, found)) > 0
        assert (np.array(found).sum(0) <= most(20)).all(), np.sum(found, axis=0)


def drawn_change(folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """Three layers of eight, drawn, whose MLPs or heads say nothing of their own; or a random dictionary."""
    if kind == "dictionary":
        return {kind: str(save_random_plt(folder, layers=8, hidden=32, seed=seed))}
    layers = np.random.default_rng(seed).permutation(8)[:3]
    return {
        kind: [f"blocks.{layer}.{'hook_mlp_out' if kind == 'zero' else 'attn.hook_z'}" for layer in layers]
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 20 models, of each three corpora under 20 changes
@pytest.mark.parametrize("kind", ["zero", "mean", "dictionary"])
def test_no_change_of_random_weights_is_said_to_cost_more_than_others(kind: str, tmp_path: Path):
    """Of random weights no layer, and no error of a dictionary that knows nothing of them, is special."""
    found = []
    for seed in range(20):
        folder = tmp_path / str(seed)
        model = random_model(folder, seed, **SMALL | {"num_hidden_layers": 8})
        asked = CHEAP["evaluate"] | {"swapped": 0} | drawn_change(folder / "dictionary", kind, seed)
        answer = compute("evaluate", store=folder / "store", model=str(model), seed=seed, **asked).to_json()
        costs = [each for each in answer["findings"] if " increases the model's loss on " in each["claim"]]
        found.append([each["verdict"] == "beyond chance" for each in costs])
        shutil.rmtree(folder)
    assert np.shape(found) == (20, 3)
    assert (np.sum(found, axis=0) <= most(20)).all(), np.sum(found, axis=0)


@pytest.mark.parametrize("name", ["counterfact_patching", "factual_routing"])
def test_random_weights_are_refused_where_nothing_but_claims_is_worth_showing(name: str, tmp_path: Path):
    model = random_model(tmp_path / "model", 0, **SMALL)
    with pytest.raises(ConfigError, match=r"The model knows the answer of 0 of 6 pairs .* a claim needs 2"):
        compute(name, store=tmp_path / "store", model=str(model), limit=2)


WITHOUT_CONTROLS: dict[str, dict[str, Any]] = {
    "circuit_discovery": {"tasks": ["copying"], "pairs": 6, "size": 20},
    "circuit_evaluation": {"tasks": ["copying"], "pairs": 6, "shares": [0.1, 1.0]},
    "composition": {},
    "evaluate": {"limit": 6, "sequences": 4, "length": 20, "facts": 12},
    "head_detection": {"sequences": 2, "length": 8},
    "layer_scan": {"samples": 4},
    "ov_qk": {},
    "path_patching": {"tasks": ["copying"], "pairs": 6, "back": 0},
    "planning_in_poems": {},
    "steering": {"pairs": 2, "layers": [1], "max_tokens": 1},
    "steering_convergence": {"strength_steps": 1},
}


@pytest.mark.parametrize("name", WITHOUT_CONTROLS)
def test_without_controls_effects_are_told_and_nothing_is_claimed(name: str, tmp_path: Path):
    done = compute(name, store=tmp_path / "store", controls=0, **WITHOUT_CONTROLS[name])
    findings = done.to_json()["findings"]
    assert findings
    for found in findings:
        assert found["verdict"] == "nothing is claimed, as no control was run"
        assert found["sentence"].endswith("; nothing is claimed, as no control was run (controls=0).")
        assert found["null"]["draws"] == 0 and found["null"]["share_as_large"] is None
        assert np.isfinite(found["effect"])
    done.render(Console(file=StringIO()), tmp_path)
    assert done.report(tmp_path / "page.html").is_file()
