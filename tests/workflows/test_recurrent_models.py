"""Every question asked of a recurrent model: answered, or refused in one line that says why.

And what the two questions about states claim, of models whose states are known by construction.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from mizarr.stages.causal.controls import CHANCE
from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.hooks.spec import HookSpec
from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import ConfigError, MizarrError
from mizarr.workflows import WORKFLOWS, build, compute, kind_of
from tests.known_facts import compute_as_known
from tests.stages.forward.random_hybrids import save_random_hybrid
from tests.stages.forward.random_rwkv import draw_config, draw_tensors
from tests.stages.forward.toy_rwkv6 import CONFIG, SPECIMEN, memory, one_write, save

pytestmark = pytest.mark.wide

PROMPT, OTHER, LONGER = (
    f"The mother tongue of {name} is"
    for name in ("Danielle Darrieux", "Alberto Giacometti", "Louis Antoine de Bougainville")
)
PAIR = {"prompt": PROMPT, "corrupted": [OTHER], "answer": "French", "answer_piece": "first"}
FEW_PAIRS = {"limit": 2, "others": 2}
ATTENDS = r"expected a model with query-key attention, found \w+ \(rwkv6\)"
MADE_FOR = "has features of layer 5, but rwkv6 has only layers 0 to 1; use the model it was trained on"
KNOWS_NONE = "The model knows the answer of 0 of 2 pairs to choose on"
NO_FILE = r"weights of an AlgZoo network, in a file that ends in \.safetensors or \.pth, found a folder"
NO_DICTIONARY = "expected a dictionary of features for .*rwkv6, found none"
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "logit_lens": ({"prompts": [PROMPT]}, ""),
    "jacobian_lens": ({"limit": 2, "fit_prompts": 2, "cotangents": 4, "controls": 4}, ""),
    "logit_attribution": ({"limit": 2}, ""),
    "generate": ({"prompts": [PROMPT], "max_tokens": 4}, ""),
    "character_count_helix": ({"widths": [40, 60], "characters": 2000}, ""),
    "activation_patching": (PAIR | {"others": 2, "controls": 4}, ""),
    "attribution_patching": ({"pairs": 2, "verify": 3, "controls": 4}, ""),
    "feature_attribution": ({}, NO_DICTIONARY),
    "integrated_gradients": ({"pairs": 2, "steps": 4, "controls": 4}, ""),
    "circuit_discovery": ({}, ATTENDS),
    "circuit_evaluation": ({}, ATTENDS),
    "path_patching": ({}, ATTENDS),
    "causal_tracing": ({"prompt": PROMPT, "target": "French", "subject": "Danielle", "samples": 2}, ""),
    "ablation": ({"prompt": PROMPT, "target": "French", "facts": 2, "how": "zero"}, ""),
    "counterfact_patching": (FEW_PAIRS, KNOWS_NONE),
    "factual_routing": (FEW_PAIRS, KNOWS_NONE),
    "attention_knockout": ({}, ATTENDS),
    "attention_patterns": ({}, ""),
    "head_detection": ({"sequences": 2, "length": 12}, ""),
    "layer_scan": ({"samples": 4}, ""),
    "patchscopes": ({"facts": 2, "controls": 4}, ""),
    "expert_routing": ({}, r"expected a mixture-of-experts model, found \w+ \(rwkv6\)"),
    "probe": ({"targets": ["character_count"], "examples": 200}, ""),
    "monitor": ({"examples": 60, "controls": 4, "poolings": ["last"]}, ""),
    "inspect_weights": ({}, ""),
    "ov_qk": ({}, "attention heads with query, key and value matrices, and rwkv6 has none"),
    "composition": ({}, "attention heads with query, key and value matrices, and rwkv6 has none"),
    "evaluate": ({"limit": 4, "sequences": 4, "length": 12, "facts": 8, "controls": 20}, ""),
    "steering": ({"pairs": 5, "controls": 4, "layers": [0, 1], "strengths": [1.0], "max_tokens": 4}, ""),
    "steering_dose_response": ({}, ATTENDS),
    "steering_convergence": (
        {"prompt": PROMPT, "contrastive": OTHER, "controls": 2, "strength_steps": 1},
        "",
    ),
    "recurrent_feedback": (
        {"limit": 2, "sweep": False, "block": "0-1", "controls": 1, "max_tokens": 3},
        "",
    ),
    "rwkv_inference": ({"prompt": PROMPT, "target": "French", "facts": 2, "controls": 4}, ""),
    "state_patching": (PAIR | {"others": 2, "controls": 4}, ""),
    "token_positions": ({}, ""),
    "planning_in_poems": ({}, MADE_FOR),
    "couplet_planning": ({"pairs": 3, "donors": 1}, ""),
    "planning_pairs": ({}, MADE_FOR),
    "attention_routing": ({}, ATTENDS),
    "correction_test": ({}, MADE_FOR),
    "sae_features": ({}, NO_DICTIONARY),
    "feature_pages": ({}, NO_DICTIONARY),
    "clt_probe": ({}, NO_DICTIONARY),
    "clt_vs_plt": ({}, MADE_FOR),
    "attribution_graph": ({}, "expected transcoders that were trained on .*rwkv6, found none"),
    "stoicheia_inference": ({}, NO_FILE),
    "stoicheia_analysis": ({}, NO_FILE),
    "stoicheia_sweep": ({}, "stoicheia_sweep' has no setting 'model'"),
}
"""Settings of every workflow, and what it says where it refuses."""


@pytest.fixture(scope="module")
def rwkv6(tmp_path_factory) -> Path:
    """A random RWKV-6 of two layers."""
    config = draw_config("rwkv6", 0) | {"vocab_size": CONFIG["vocab_size"], "num_hidden_layers": 2}
    return save(tmp_path_factory.mktemp("models") / "rwkv6", draw_tensors(config, 0), config)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


def test_every_workflow_is_in_the_table():
    assert list(ASKED) == list(WORKFLOWS)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_workflow_answers_or_says_in_one_line_why_not(name, rwkv6, store, tmp_path):
    settings, refusal = ASKED[name]
    asked = settings if name == "token_positions" else settings | {"model": str(rwkv6)}
    if refusal:
        with pytest.raises(MizarrError, match=refusal) as caught:
            compute(name, store=store, **asked)
        assert "\n" not in str(caught.value)
        return
    done = compute(name, store=store, **asked)
    assert json.dumps(done.to_json(), allow_nan=False)
    assert done.tables() or name == "token_positions"
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", [name for name in WORKFLOWS if kind_of(name).needs == "weights"])
def test_rwkv_4_shows_no_weights_and_is_refused(name, tmp_path):
    config = draw_config("rwkv", 0) | {"vocab_size": CONFIG["vocab_size"]}
    model = save(tmp_path / "dove", draw_tensors(config, 0), config)
    with pytest.raises(ConfigError, match=r"attention weights between positions, found dove \(rwkv\)"):
        build(name, model=str(model))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("rwkv_inference", r"an RWKV model with matrix-valued states \(RWKV-5 to 7\)"),
        ("state_patching", "a recurrent model with a state in every layer"),
    ],
)
def test_a_model_without_a_state_is_refused_in_one_line(name, needed):
    refusal = rf"expected {needed}, found specimen \(llama\); name another model: model="
    with pytest.raises(ConfigError, match=refusal):
        build(name, model="specimen")


ELSEWHERE = {
    "attention_patterns": {},
    "head_detection": ASKED["head_detection"][0],
    "layer_scan": ASKED["layer_scan"][0],
    "activation_patching": ASKED["activation_patching"][0],
    "state_patching": ASKED["state_patching"][0],
    "ablation": ASKED["ablation"][0],
}
"""Questions about heads and states that are asked of every recurrence."""


def test_other_recurrences_answer_them_too(store, tmp_path):
    """A linear attention, and one whose heads are its channels; the weights are those of a plain pass."""
    for family, room in (("gla", "linear"), ("mamba2", "ssm")):
        folder = tmp_path / family
        save_random_hybrid(folder, family, 3, tokenizer=False, vocab_size=CONFIG["vocab_size"])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SPECIMEN / file, folder)
        for name, settings in ELSEWHERE.items():
            done = compute(name, store=store, model=str(folder), **settings)
            assert json.dumps(done.to_json(), allow_nan=False) and done.tables(), name
            if name != "attention_patterns":
                continue
            model = Model.from_pretrained(folder)
            point = HookPoint(f"{room}_effective_attn", 1)
            shown = model.forward(done.prompt, HookSpec().capture(point))[point][0]
            edge = done.flow["from_query"].sel(layer=1)
            np.testing.assert_allclose(edge, shown[:, done.query].numpy(), atol=1e-6)


@pytest.mark.parametrize("family", ["bamba", "nemotron_h"])
def test_a_hybrid_that_has_states_in_some_layers_only_is_told_so(family, tmp_path):
    save_random_hybrid(tmp_path / "model", family, 3)
    with pytest.raises(ConfigError, match="expected a recurrent model with a state in every"):
        build("state_patching", model=str(tmp_path / "model"))


# -- claims


def findings(name: str, model: Path, store: Path, **settings: Any) -> list[dict[str, Any]]:
    return compute(name, store=store, model=str(model), **settings).to_json()["findings"]


WORD, SAID = " French", " Paris"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A model in which " French" writes to layer 0 that " Paris" follows."""
    tokenizer = Model.from_pretrained("specimen").tokenizer
    word, said = (tokenizer.encode(each, add_special=False).ids[0] for each in (WORD, SAID))
    return save(tmp_path_factory.mktemp("toy") / "one_write", one_write(word, said), CONFIG)


TOLD = {"prompt": "The mother tongue of the French is in", "target": "Paris"}


def test_the_one_write_that_carries_the_answer_is_told(trained, tmp_path):
    done = compute("rwkv_inference", store=tmp_path, model=str(trained), position="French", layer=0, **TOLD)
    changes, lowers = done.to_json()["findings"]
    assert (changes["verdict"], lowers["verdict"]) == ("beyond chance", "beyond chance")
    kl = done.writes["kl"]
    place = done.position
    assert kl.sel(layer=0, position=place) > 0.1
    others = kl.values.copy()
    others[0, place] = 0
    assert others.max() < 1e-6, "no other write is read"
    every = done.together["kl"].isel(layer=0)
    assert float(every.sel(position=place)) == pytest.approx(float(kl.sel(layer=0, position=place)), rel=1e-4)
    assert lowers["effect"] == pytest.approx(float(done.selected["logit_diff"]))
    assert lowers["effect"] > 1


@pytest.mark.parametrize(("position", "layer"), [("tongue", 0), ("French", 1)])
def test_a_write_that_carries_nothing_is_told_as_chance(position, layer, trained, tmp_path):
    found = findings("rwkv_inference", trained, tmp_path, position=position, layer=layer, **TOLD)
    assert [each["verdict"] for each in found] == ["no more than chance"] * 2


def test_the_document_has_the_numbers_of_the_experiments(rwkv6, store):
    done = compute("rwkv_inference", store=store, model=str(rwkv6), **ASKED["rwkv_inference"][0])
    told = done.to_json()
    here = done.writes.sel(layer=told["target_layer"], position=told["knockout_position"])
    assert told["kl_divergence"] == float(here["kl"])
    assert np.shape(told["sweep"]["kl_divergence"]) == (2, len(told["tokens"]))
    assert [each["scale"] for each in told["steering"]] == [-1.0, 0.0, 0.5, 1.0, 2.0, 4.0]
    by_scale = {each["scale"]: each["kl_divergence"] for each in told["steering"]}
    assert by_scale[0.0] == pytest.approx(told["kl_divergence"], rel=1e-3)
    assert by_scale[1.0] == pytest.approx(0, abs=1e-12)
    logits = Model.from_pretrained(str(rwkv6)).forward(done.encoding.ids).logits[0, -1].double()
    chances = logits.softmax(-1).numpy()
    assert [each["token_id"] for each in told["top_tokens"]] == np.argsort(-chances)[:10].tolist()
    assert told["top_tokens"][0]["probability"] == pytest.approx(chances.max(), rel=1e-4)


@pytest.fixture(scope="module")
def remembering(tmp_path_factory) -> Path:
    """A model whose state in layer 0 holds every word."""
    return save(tmp_path_factory.mktemp("toy") / "memory", memory(), CONFIG)


def test_a_state_that_carries_the_subject_brings_the_answer_back(remembering, tmp_path):
    # It knows none of the shipped facts that the place is chosen on; claims are tried as if it did.
    done = compute_as_known("state_patching", store=tmp_path, model=str(remembering), seed=1, **PAIR)
    assert done.result("known")["rank"].values.min() > 0
    found, quiet = done.to_json()["findings"]
    assert found["verdict"] == "beyond chance" and quiet["verdict"] == "no more than chance"
    assert found["effect"] == pytest.approx(100, abs=0.1)
    assert found["claim"].startswith("patching the clean state of layer 0 at the subject's last token into")
    (pair,) = done.to_json()["results"]
    grid, last = np.array(pair["grid"]), pair["subject_last_pos"]
    assert grid[0, last:-1] == pytest.approx(100, abs=0.1), "the state goes on from there"
    assert abs(grid[0, : pair["subject_pos"]]).max() < 0.1, "before the subject both prompts are the same"
    assert abs(grid[0, -1]) < 0.1, "nobody reads the state behind the last token"
    assert abs(grid[1]).max() < 0.1, "layer 1 reads no state"


def random_model(folder: Path, seed: int, model_type: str) -> Path:
    config = draw_config(model_type, seed) | {"vocab_size": CONFIG["vocab_size"], "num_hidden_layers": 2}
    return save(folder, draw_tensors(config, seed), config)


def test_random_weights_are_said_to_carry_nothing(tmp_path):
    """A write named, in models of two generations; what settings choose is a test that takes longer."""
    verdicts = []
    for seed in range(4):
        for model_type in ("rwkv6", "rwkv7"):
            model = random_model(tmp_path / f"{model_type}_{seed}", seed, model_type)
            given = {"prompt": "The French", "target": "Paris", "position": 1 + seed % 2, "layer": seed // 2}
            found = findings("rwkv_inference", model, tmp_path / "store", **given, seed=seed)
            verdicts += [each["verdict"] == "beyond chance" for each in found]
    assert len(verdicts) == 16
    assert sum(verdicts) <= binom.ppf(0.999, len(verdicts), CHANCE), verdicts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rwkv_inference", "state_patching"])
def test_random_weights_are_said_to_carry_nothing_where_other_facts_choose(name, tmp_path):
    settings = {"prompt": PROMPT, "target": "French"} if name == "rwkv_inference" else PAIR
    verdicts = []
    for seed in range(20):
        model = random_model(tmp_path / str(seed), seed, "rwkv6" if seed % 2 else "rwkv7")
        found = findings(name, model, tmp_path / "store", **settings, seed=seed)
        verdicts += [each["verdict"] == "beyond chance" for each in found]
    assert sum(verdicts) <= binom.ppf(0.999, len(verdicts), CHANCE), verdicts


def test_the_specimens_tokenizer_is_what_these_models_read(rwkv6):
    assert (rwkv6 / "tokenizer.json").read_bytes() == (SPECIMEN / "tokenizer.json").read_bytes()
