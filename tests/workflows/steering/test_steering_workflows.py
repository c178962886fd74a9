"""Dose-response and steering convergence, from a prompt (or a batch file) to tables, figures and JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import mizarr
from mizarr import Add, HookSpec, Steer
from mizarr.stages.causal.steering import DOSE_LEVELS
from mizarr.store.errors import ConfigError, MizarrError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.material.answers import counterpart, fact
from mizarr.workflows.material.edge_choice import ROLES, roles_of
from mizarr.workflows.subject import Subject
from tests.known_facts import compute_as_known

PROMPT, OTHER, TARGET = "it was the age of", "it was the epoch of", "wisdom"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steering") / "store"


@pytest.fixture(scope="module")
def doses(tiny_model: Path, store: Path):
    given = {"prompt": PROMPT, "target": TARGET, "layer": 1, "key": "first"}
    return compute("steering_dose_response", store=store, model=str(tiny_model), **given)


@pytest.fixture(scope="module")
def pushes(tiny_model: Path, store: Path, model):
    ids, others = (model.tokenizer.encode(text).ids for text in (PROMPT, OTHER))
    assert len(ids) == len(others)
    return compute(
        "steering_convergence",
        store=store,
        model=str(tiny_model),
        prompt=PROMPT,
        contrastive=OTHER,
        target=TARGET,
        inject_position="auto",
        controls=3,
    )


@pytest.fixture(scope="module")
def at_the_end(tiny_model: Path, store: Path):
    """Pushed where it is read, so that every push is away."""
    return compute(
        "steering_convergence",
        store=store,
        model=str(tiny_model),
        prompt=PROMPT,
        contrastive=OTHER,
        strength_steps=1,
        controls=20,
    )


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


# -- doses


def test_every_dose_is_a_plain_pass_with_the_edge_steered(doses, model):
    document = doses.to_json()
    last = len(model.tokenizer.encode(PROMPT)) - 1
    assert (document["target_layer"], document["edge"]) == (1, [last, 0])
    point = "blocks.1.attn.hook_pattern"
    plain = model.forward(PROMPT, HookSpec().capture(point))
    assert document["baseline_attention"] == pytest.approx(
        float(plain[point][0, :, last, 0].mean()), abs=1e-6
    )
    assert [one["scale_factor"] for one in document["points"]] == list(DOSE_LEVELS)
    for one in document["points"]:
        hooks = HookSpec().intervene(point, Steer([(last, 0)], one["scale_factor"])).capture(point)
        steered = model.forward(PROMPT, hooks)
        assert one["attention_level"] == pytest.approx(float(steered[point][0, :, last, 0].mean()), abs=1e-6)
        expected = kl(plain.logits[0, -1], steered.logits[0, -1])
        assert one["kl_divergence"] == pytest.approx(expected, rel=1e-3, abs=1e-8)
        token = document["target_token_id"]
        difference = float(plain.logits[0, -1, token] - steered.logits[0, -1, token])
        assert one["target_logit_diff"] == pytest.approx(difference, abs=1e-4)


def test_the_exact_factor_reaches_the_aim_and_the_linear_one_falls_short(doses, model):
    found = doses.to_json()["calibration"]
    point, last = "blocks.1.attn.hook_pattern", doses.edge[0]

    def reached(factor: float) -> float:
        hooks = HookSpec().intervene(point, Steer([(last, 0)], factor)).capture(point)
        return float(model.forward(PROMPT, hooks)[point][0, :, last, 0].mean())

    assert reached(found["scale_factor_exact"]) == pytest.approx(found["aim"], abs=1e-5)
    assert reached(found["scale_factor_linear"]) < found["aim"]
    assert found["scale_factor_interpolated"] == pytest.approx(found["scale_factor_exact"], rel=0.1)
    assert found["dose_levels_absolute_linear"][0] == pytest.approx([0.5, 0.25 * found["aim"]])


def test_the_finding_is_the_strongest_dose_beside_edges_of_as_much_attention(doses, model, tiny_model, store):
    """Effect, null and which edges it is made of, again by plain passes."""
    last, steered, weight = doses.edge[0], {}, {}
    plain = model.forward(PROMPT, HookSpec().capture("blocks.*.attn.hook_pattern"))
    for layer in range(3):
        point = f"blocks.{layer}.attn.hook_pattern"
        for key in range(last + 1):
            hooks = HookSpec().intervene(point, Steer([(last, key)], 6.0))
            steered[layer, key] = kl(plain.logits[0, -1], model.forward(PROMPT, hooks).logits[0, -1])
            weight[layer, key] = float(plain[point][0, :, last, key].mean())
    others = sorted(set(steered) - {(1, 0)}, key=lambda at: abs(np.log(weight[at] / weight[1, 0])))
    few = compute(
        "steering_dose_response",
        store=store,
        model=str(tiny_model),
        prompt=PROMPT,
        target=TARGET,
        layer=1,
        key="first",
        controls=7,
    )
    for done, draws in ((doses, others[:50]), (few, others[:7])):
        found = done.to_json()["findings"][0]
        values = np.array([steered[at] for at in draws])
        assert found["effect"] == pytest.approx(steered[1, 0], rel=1e-3)
        assert found["null"]["draws"] == len(values)
        assert found["null"]["median"] == pytest.approx(np.median(values), rel=1e-3)
        as_large = int((values >= steered[1, 0]).sum())
        assert found["null"]["as_large"] == as_large


def test_an_edge_nobody_named_is_the_one_that_moves_other_facts_most(tiny_model, model, tmp_path):
    """The choice, the effect on held-out facts and its null, again by plain passes over every edge drawn."""
    given = {"model": str(tiny_model), "prompt": "A spring is developed by", "doses": [0.5, 3.0]}
    done = compute_as_known("steering_dose_response", store=tmp_path / "s", facts=2, controls=200, **given)
    document = done.to_json()
    moved, weight = np.zeros((4, 3, 6)), np.zeros((4, 3, 6))
    edges = [each.edges[0] for each in done.nodes["facts"].experiment.experiments]
    for number, (encoding, *_) in enumerate(done.others):
        own = edges[6 * number : 6 * number + 6]
        assert [key for _, key in own[:3]] == list(roles_of(encoding, len(encoding) - 1).values())
        points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(3)]
        plain = model.forward(encoding.text, HookSpec().capture(*points))
        for (layer, point), (column, edge) in product(enumerate(points), enumerate(own)):
            hooks = HookSpec().intervene(point, Steer([edge], 3.0))
            steered = model.forward(encoding.text, hooks).logits[0, -1]
            moved[number, layer, column] = kl(plain.logits[0, -1], steered)
            weight[number, layer, column] = plain[point][0, :, edge[0], edge[1]].mean()
    chosen_on = moved[:2, :, :3].mean(0)
    layer, role = np.unravel_index(chosen_on.argmax(), chosen_on.shape)
    assert (document["choice"]["layer"], document["choice"]["role"]) == (layer, list(ROLES)[role])
    assert document["choice"]["lost"] == pytest.approx(chosen_on.max(), rel=1e-3)
    texts = [other.encoding.text for other in done.others]
    assert (document["choice"]["chosen_on"], document["choice"]["scored_on"]) == (texts[:2], texts[2:])
    assert (document["target_layer"], done.edge[1]) == (layer, done.roles[list(ROLES)[role]])
    held_out = document["findings"][0]
    effects, cell = moved[2:, layer, role], np.ravel_multi_index((layer, role), (3, 6))
    assert held_out["effect"] == pytest.approx(effects.mean(), rel=1e-3)
    assert held_out["interval_95"] == pytest.approx([effects.min(), effects.max()], rel=1e-3)
    causes = []
    for one, its in zip(moved[2:], weight[2:], strict=True):
        apart = np.abs(np.log(its.ravel() / its[layer, role]))
        nearest = [i for i in np.argsort(apart) if i != cell][:6]
        causes.append([*one.ravel()[nearest], one[layer, role]])
    means = np.add.outer(*causes).ravel() / 2
    drawn = done.findings.findings[0].null.values
    assert len(drawn) == 200
    nearest_mean = np.abs(np.subtract.outer(drawn, means)).argmin(1)
    np.testing.assert_allclose(drawn, means[nearest_mean], rtol=1e-3)
    assert len(set(nearest_mean)) > 40, "nearly all of the 49 there are"
    alone = compute(
        "steering_dose_response", store=tmp_path / "s", layer=done.layer, key=done.edge[1], **given
    )
    for one, other in zip(document["points"], alone.to_json()["points"], strict=True):
        assert one["kl_divergence"] == pytest.approx(other["kl_divergence"], rel=1e-3, abs=1e-9)
    assert len(document["findings"]) == len(alone.to_json()["findings"]) + 2


def test_layers_alone_or_in_a_sweep_say_the_same(doses, tiny_model, tmp_path):
    alone = compute(
        "steering_dose_response",
        store=tmp_path / "store",
        model=str(tiny_model),
        prompt=PROMPT,
        target=TARGET,
        layer=2,
        key="first",
        sweep=False,
        doses=[0.5, 6.0],
    )
    (layer,) = alone.to_json()["layers"]
    told = doses.to_json()["layers"][2]["points"]
    for one, other in zip(layer["points"], (told[0], told[-1]), strict=True):
        assert one["kl_divergence"] == pytest.approx(other["kl_divergence"], rel=1e-3, abs=1e-9)


def test_a_window_has_no_exact_factor(tiny_model, tmp_path):
    done = compute(
        "steering_dose_response",
        store=tmp_path / "store",
        model=str(tiny_model),
        prompt=PROMPT,
        window=2,
        facts=1,
        doses=[2.0],
    )
    document = done.to_json()
    assert document["calibration"]["scale_factor_exact"] is None
    assert document["points"][0]["target_logit_diff"] is None, "no target, no number"
    assert [one["layer"] for one in document["layers"]] == [0, 1]


# -- pushes


def test_the_matrix_is_that_of_plain_passes_with_the_vector_added(pushes, model):
    document = pushes.to_json()
    spec = HookSpec().capture("blocks.*.hook_resid_post")
    one, other = model.forward(PROMPT, spec), model.forward(OTHER, spec)
    ids, others = one.tokens[0], other.tokens[0]
    position = next(i for i, pair in enumerate(zip(ids, others, strict=True)) if pair[0] != pair[1])
    assert document["inject_position"] == position
    for layer in range(3):
        point = f"blocks.{layer}.hook_resid_post"
        vector = (one[point] - other[point])[0, position]
        for strength in (1.0, 6.0):
            hooks = HookSpec().intervene(point, Add(strength * vector, positions=position))
            steered = model.forward(PROMPT, hooks.capture("blocks.*.hook_resid_post"))
            similarity = [
                float(torch.cosine_similarity(one[p][0, -1].double(), steered[p][0, -1].double(), dim=0))
                for p in (f"blocks.{read}.hook_resid_post" for read in range(3))
            ]
            found = pushes.push_effects().sel(layer=layer, strength=strength)
            np.testing.assert_allclose(found["similarity"], similarity, atol=1e-5)
            if strength == 1.0:
                np.testing.assert_allclose(document["convergence_matrix"][layer], similarity, atol=1e-5)
                expected = kl(one.logits[0, -1], steered.logits[0, -1])
                summary = document["layer_summaries"][layer]
                assert summary["kl_divergence"] == pytest.approx(expected, rel=1e-3, abs=1e-8)


def test_the_json_has_the_fields_of_the_original(pushes):
    document = json.loads(json.dumps(pushes.to_json(), allow_nan=False))
    assert {
        "model_id",
        "prompt",
        "contrastive_prompt",
        "n_layers",
        "hidden_size",
        "target_token",
        "target_token_id",
        "baseline_p_target",
        "baseline_top5",
        "convergence_matrix",
        "layer_summaries",
        "best_injection_layer",
        "strength_sweep",
        "threshold",
    } <= document.keys()
    assert [one["strength"] for one in document["strength_sweep"]] == [k / 2 for k in range(1, 13)]
    assert document["threshold"] == 0.95
    assert len(document["baseline_top5"]) == 5
    assert document["layer_summaries"][-1]["absorption_layer"] is None, "nothing comes after the last layer"


def test_the_answer_has_the_probability_of_all_its_pieces(pushes, model):
    document = pushes.to_json()
    before = model.tokenizer.encode(PROMPT).ids
    both = model.tokenizer.encode(f"{PROMPT} {TARGET}").ids
    pieces = both[len(before) :]
    assert document["target_token_ids"] == pieces and len(pieces) > 1
    logprob = model.forward(both).logits[0].double().log_softmax(-1)
    whole = sum(logprob[len(before) - 1 + i, token] for i, token in enumerate(pieces))
    assert document["baseline_p_target"] == pytest.approx(float(whole.exp()), rel=1e-3)


def test_a_lower_threshold_reads_the_same_runs(pushes, tiny_model, store):
    again = build(
        "steering_convergence",
        model=str(tiny_model),
        prompt=PROMPT,
        contrastive=OTHER,
        target=TARGET,
        inject_position="auto",
        controls=3,
        threshold=-1.0,
    )
    assert all(node.status(mizarr.open_store(store)).is_cached for node in again.nodes.values())
    again.run(mizarr.open_store(store))
    assert again.to_json()["best_injection_layer"] == 1, "the deepest with a layer after it"


def left_of(model, vectors, strengths):
    """Mean share of the largest distance, 1 - cosine, that is left at the end: plain passes pushed at the
    last token, over layers and strengths."""
    spec = HookSpec().capture("blocks.*.hook_resid_post")
    plain, found = model.forward(PROMPT, spec), []
    for layer, vector in enumerate(vectors[:-1]):  # behind the last layer there is nothing to come back in
        for strength in strengths:
            add = Add(strength * vector, positions=plain.logits.shape[1] - 1)
            hooks = HookSpec().intervene(f"blocks.{layer}.hook_resid_post", add)
            pushed = model.forward(PROMPT, hooks.capture("blocks.*.hook_resid_post"))
            apart = [
                1 - float(torch.cosine_similarity(plain[n][0, -1].double(), pushed[n][0, -1].double(), dim=0))
                for n in (f"blocks.{read}.hook_resid_post" for read in range(layer, 3))
            ]
            found.append(apart[-1] / max(apart))
    return np.mean(found)


def test_the_headline_is_what_plain_passes_leave_of_chosen_and_random_pushes(at_the_end, model):
    """The claim again, from loops over single forwards and directions drawn here."""
    spec = HookSpec().capture("blocks.*.hook_resid_post")
    one, other = model.forward(PROMPT, spec), model.forward(OTHER, spec)
    vectors = [(one[name] - other[name])[0, -1] for name in sorted(map(str, one))]
    (claim,) = at_the_end.to_json()["findings"]
    assert claim["effect"] == pytest.approx(left_of(model, vectors, (1.0, 6.0)), abs=1e-4)
    null = at_the_end.fates[0].claim.null
    drawn = []
    for seed in np.random.SeedSequence(0).generate_state(20)[:4]:
        noise = np.random.default_rng(int(seed)).standard_normal((1, 3, 32))[0]
        directions = [
            torch.tensor(row / np.linalg.norm(row) * float(vector.norm()), dtype=torch.float32)
            for row, vector in zip(noise, vectors, strict=True)
        ]
        drawn.append(left_of(model, directions, (1.0, 6.0)))
    np.testing.assert_allclose(null.values[:4], drawn, atol=1e-4)
    share = (1 + (null.values <= claim["effect"]).sum()) / 21
    assert claim["null"]["share_as_large"] == pytest.approx(share)
    pushed = f"Pushes from {PROMPT!r} away from {OTHER!r}, added after layers 0 to 1 at strength 1"
    assert claim["sentence"].startswith(pushed)


@pytest.mark.parametrize(("name", "value"), [("controls", 3), ("seed", 1)])
def test_settings_of_the_controls_move_the_null_and_its_key_alone(at_the_end, store, name, value):
    given = {k: v for k, v in at_the_end.to_json()["settings"].items() if v is not None}
    other = build("steering_convergence", **given | {name: value}).run(mizarr.open_store(store))
    keys = [each.to_json()["provenance"]["keys"] for each in (at_the_end, other)]
    assert {key for key in keys[0] if keys[0][key] != keys[1][key]} == {"controls"}
    nulls = [each.fates[0].claim.null.values.tolist() for each in (at_the_end, other)]
    assert nulls[0] != nulls[1]
    assert (nulls[1] == nulls[0][:3]) == (name == "controls"), "fewer draws are the first of them"
    effects = [each.to_json()["findings"][0]["effect"] for each in (at_the_end, other)]
    assert effects[0] == effects[1]


def test_prompts_of_different_length_can_be_contrasted_at_their_ends_only(tiny_model):
    longer = f"{OTHER} all"
    given = {"model": str(tiny_model), "prompt": PROMPT, "contrastive": longer}
    assert build("steering_convergence", **given).cases[0].contrastive == longer
    with pytest.raises(PromptError, match="equal length"):
        build("steering_convergence", **given, inject_position="auto")


# -- batches


def write_batch(path: Path, *experiments: dict) -> str:
    path.write_text(json.dumps({"description": "two words", "experiments": list(experiments)}))
    return str(path)


GOOD = {"group": "ages", "prompt": PROMPT, "contrastive": OTHER, "target_token": TARGET}


def test_a_batch_answers_every_experiment_and_says_which_cannot_be_run(
    pushes, tiny_model, store, tmp_path, capsys
):
    file = write_batch(
        tmp_path / "batch.json",
        GOOD | {"inject_position": "auto"},
        {"group": "bad", "prompt": PROMPT, "contrastive": PROMPT, "inject_position": "auto"},
        {"group": "seasons", "prompt": "it was the season of", "contrastive": PROMPT},
    )
    done = compute("steering_convergence", store=store, model=str(tiny_model), batch_file=file, controls=3)
    document = done.to_json()
    assert [one["group"] for one in document["results"]] == ["ages", "seasons"]
    assert [one["group"] for one in document["skipped"]] == ["bad"]
    assert "the same prompt twice" in document["skipped"][0]["error"]
    alone = pushes.to_json()
    assert document["results"][0]["convergence_matrix"] == alone["convergence_matrix"], "a hit in the store"
    paths = done.render(Console(width=140), tmp_path / "figures")
    assert [path.name for path in paths] == ["steering_convergence_0.png", "steering_convergence_1.png"]
    printed = capsys.readouterr().out
    assert "seasons" in printed and "Left out: bad" in printed


@pytest.mark.parametrize(
    ("experiments", "message"),
    [
        ((), "no list of experiments"),
        (({"group": "a", "prompt": "b"},), "expected contrastive to be a text, found None"),
        ((GOOD | {"promt": "x"},), "did you mean 'prompt'"),
        ((GOOD | {"inject_position": 1.5},), "expected inject_position to be a text"),
        (("text",), "expected an object, found 'text'"),
        ((GOOD | {"prompt": ""},), "expected prompt to be a text, found ''"),
        (
            ({"group": "a", "prompt": PROMPT, "contrastive": PROMPT, "inject_position": 1},),
            "the same prompt twice",
        ),
    ],
)
def test_a_batch_file_that_cannot_be_used_is_one_clear_line(tiny_model, tmp_path, experiments, message):
    file = write_batch(tmp_path / "batch.json", *experiments)
    with pytest.raises(MizarrError, match=message) as found:
        build("steering_convergence", model=str(tiny_model), batch_file=file).run(
            mizarr.open_store(tmp_path / "store")
        )
    assert "\n" not in str(found.value)


def test_a_batch_file_that_is_not_there_is_an_error(tiny_model, tmp_path):
    with pytest.raises(
        ConfigError, match=r"cannot read the file .*none\.json: No such file or directory; write it as"
    ):
        build("steering_convergence", model=str(tiny_model), batch_file=str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="expected JSON in"):
        build("steering_convergence", model=str(tiny_model), batch_file=str(tmp_path / "text.json"))


# -- both


@pytest.mark.parametrize("name", ["doses", "pushes"])
def test_a_second_call_is_a_hit_and_needs_no_torch(name, doses, pushes, store):
    first = doses if name == "doses" else pushes
    given = {k: v for k, v in first.to_json()["settings"].items() if v is not None}
    program = (
        "import sys, json\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from mizarr.workflows import compute\n"
        "done = compute(sys.argv[1], store=sys.argv[2], **json.loads(sys.argv[3]))\n"
        "print(json.dumps(done.to_json()))"
    )
    command = [sys.executable, "-c", program, first.name, str(store), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(first.to_json(), allow_nan=False))


@pytest.mark.parametrize("name", ["doses", "pushes"])
def test_tables_and_figures_name_the_results(name, doses, pushes, tmp_path, capsys):
    done = doses if name == "doses" else pushes
    (path,) = done.render(Console(width=140), tmp_path)
    printed = capsys.readouterr().out
    assert "interpolated" in printed if name == "doses" else "outcome" in printed
    for key in done.to_json()["provenance"]["keys"].values():
        assert key[:12].encode() in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("steering_dose_response", {"layer": 3}, r"layer in 0\.\.2"),
        (
            "steering_dose_response",
            {"layer": 2, "window": 2},
            r"layer, the first of a window of 2, in 0\.\.1",
        ),
        ("steering_dose_response", {"doses": []}, "expected doses that is not empty"),
        ("steering_dose_response", {"doses": [-1.0]}, "factor >= 0"),
        ("steering_dose_response", {"ratio": 0.0}, "ratio to be float of more than 0"),
        ("steering_dose_response", {"query": 1, "key": 2}, "no weight there"),
        ("steering_convergence", {"contrastive": None}, "name one: contrastive="),
        ("steering_convergence", {"strength_steps": 0}, "strength_steps to be int of at least 1"),
        ("steering_convergence", {"max_strength": 0.0}, "max_strength to be float of more than 0"),
        ("steering_convergence", {"threshold": 2.0}, "threshold"),
        ("steering_convergence", {"inject_position": 99}, "found 99"),
        ("steering_convergence", {"batch_file": "x.json"}, "found both"),
    ],
)
def test_wrong_input_gives_one_clear_line_before_anything_runs(tiny_model, name, given, message):
    base = {"model": str(tiny_model), "prompt": PROMPT}
    base |= {"contrastive": OTHER} if name == "steering_convergence" else {}
    with pytest.raises(MizarrError, match=message) as found:
        build(name, **base | given)
    assert "\n" not in str(found.value)


def test_the_default_counterpart_is_as_long_and_has_another_answer():
    subject = Subject("specimen")
    prompt, target = fact("specimen", "", "")
    other = counterpart(subject, "specimen", prompt, target)
    assert other != prompt
    assert len(subject.tokenizer.encode(other)) == len(subject.tokenizer.encode(prompt))
    from mizarr.workflows.subject import shipped_facts

    assert all(f["target"] != target for f in shipped_facts() if f["prompt"] == other)


def test_other_models_contrast_france_with_the_first_country_of_as_many_tokens(tiny_model):
    subject = Subject(str(tiny_model))
    prompt, target = fact(str(tiny_model), "", "")
    assert (prompt, target) == ("The capital of France is", "Paris")
    lengths = {
        country: len(subject.tokenizer.encode(prompt.replace("France", country)))
        for country in ("Germany", "Poland", "Brazil", "Russia", "Canada")
    }
    fitting = [c for c, length in lengths.items() if length == len(subject.tokenizer.encode(prompt))]
    assert counterpart(subject, str(tiny_model), prompt, target) == f"The capital of {fitting[0]} is"


@pytest.mark.parametrize("name", ["steering_dose_response", "steering_convergence"])
def test_defaults_run_offline_on_the_specimen(name, tmp_path):
    given = (
        {"sweep": False, "facts": 2}
        if name == "steering_dose_response"
        else {"strength_steps": 1, "controls": 19}
    )
    done = compute(name, store=tmp_path / "store", **given)
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["model_id"] == "specimen"
    assert document["baseline_p_target"] > 0
    assert done.tables()
