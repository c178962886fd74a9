"""What gradients propose, and what exact runs say of it: answers of both workflows, and what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.cli import run
from tests.random_dictionaries import save_random_plt

from ..test_claims import SMALL, random_model

SPEAKERS = {
    "prompt": "Vera Lynn, speaker of",
    "corrupted": "Bernard Blier, speaker of",
    "answer": "English",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def patched(store):
    return compute("attribution_patching", store=store, pairs=4, verify=6)


@pytest.fixture(scope="module")
def integrated(store):
    return compute("integrated_gradients", store=store, pairs=4, steps=48)


def test_the_largest_estimates_are_there_beyond_chance(patched):
    found = patched.to_json()
    assert [each["verdict"] for each in found["findings"]] == ["beyond chance"] * 2
    assert [each["prompts"] for each in found["findings"]] == [4, 4]
    exact = np.array([abs(float(x)) for x in patched.checked["exact"].values[:, 0]])
    assert found["findings"][0]["effect"] == pytest.approx(100 * exact.mean())


def test_cells_told_are_those_of_the_grid(patched):
    grid = patched.grid["recovery"]
    cells = patched.to_json()["cells"]
    assert [each["sort"] for each in cells] == ["largest"] * 6 + ["random"] * 6
    for each in cells:
        here = grid.sel(layer=each["layer"], head=each["head"], position=each["position"])
        assert each["estimate"] == pytest.approx(100 * float(here), abs=1e-3)
    sizes = np.sort(np.abs(grid.values).ravel())[::-1][:6]
    np.testing.assert_allclose([abs(each["estimate"]) for each in cells[:6]], 100 * sizes, atol=1e-3)


def test_heads_and_positions_are_sums_of_one_grid(patched):
    found = patched.to_json()
    by_head, by_position = (np.array(found[f"estimate_by_{name}"]) for name in ("head", "position"))
    whole = 100 * patched.grid["recovery"].transpose("layer", "head", "position").values
    np.testing.assert_allclose(by_head, whole.sum(2), atol=1e-9)
    np.testing.assert_allclose(by_position, whole.sum(1), atol=1e-9)


def test_states_of_the_stream_are_asked_for_instead_of_heads(store):
    done = compute("attribution_patching", store=store, pairs=2, verify=3, what="states")
    assert done.grid["recovery"].dims == ("layer", "position")
    assert {each["head"] for each in done.to_json()["cells"]} == {-1}
    # The last state is all that is read: by a run, it brings everything back.
    last = done.grid.sizes["position"] - 1
    for each in done.to_json()["cells"]:
        if each["layer"] == 5 and each["position"] == last:
            assert each["exact"] == pytest.approx(100, abs=1e-2)


def test_shares_add_up_and_rank_tokens_beyond_chance(integrated):
    found = integrated.to_json()
    assert [each["verdict"] for each in found["findings"]] == ["beyond chance"] * 2
    for each in found["facts"]:
        shares = sum(token["share"] for token in each["tokens"])
        whole = each["log_probability"] - each["baseline_log_probability"]
        assert shares + each["gap"] == pytest.approx(whole, abs=1e-6)
        assert abs(each["gap"]) < 0.01 * abs(whole)


@pytest.fixture(scope="module")
def featured(store):
    return compute("feature_attribution", store=store, pairs=4, verify=6, draws=20)


def test_features_are_told_by_what_they_write_and_held_against_random_ones(featured):
    found = json.loads(json.dumps(featured.to_json(), allow_nan=False))
    first, second = found["findings"]
    exact = np.abs([pair["exact"] for pair in found["pairs"]])
    assert first["effect"] == pytest.approx(exact.mean()) and first["prompts"] == 4
    assert second["verdict"] == "beyond chance" and second["effect"] > 0.5
    drawn = 100 * np.abs(featured.random["exact"].transpose("draw", "cause").values)
    for number, pair in enumerate(found["pairs"]):
        assert pair["quantile"] == (drawn[number, 1:] < drawn[number, 0]).mean()
        assert pair["label"].startswith("writes ")
    cells = found["cells"]
    assert [each["sort"] for each in cells] == ["largest"] * 6 + ["random"] * 6
    assert all(each["label"].startswith("writes ") for each in cells if each["index"] is not None)
    rests = np.mean([each["index"] is None for each in cells[:6]])
    assert found["pairs"][0]["rests"] == pytest.approx(100 * rests)


def test_sums_by_place_are_of_all_cells(featured):
    found, pair = featured.to_json(), featured.pairs[0]
    summed = np.sum(found["estimate_of_features"]) + np.sum(found["estimate_of_rests"])
    assert summed == pytest.approx(100 * float(pair["estimate"].sum()), abs=1e-6)


def test_the_command_line_says_the_same_and_refuses_in_a_line(featured, store, capsys):
    asked = ["compute", "feature_attribution", "--store", str(store), "--json", "--quiet"]
    few = [word for pair in ("pairs=4", "verify=6", "draws=20") for word in ("--set", pair)]
    assert run([*asked, *few]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == json.loads(json.dumps(featured.to_json()))["cells"]
    assert run([*asked, "--set", "dictionary=/nowhere"]) == 2
    assert "no such directory '/nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_feature_of_random_weights_is_said_to_carry_anything(seed, tmp_path):
    model = random_model(tmp_path / "model", seed, **SMALL)
    held = save_random_plt(tmp_path / "dictionary", layers=2, hidden=32, features=64, seed=seed)
    asked = {"model": str(model), "dictionary": str(held), "pairs": 2, "verify": 2, "draws": 2}
    done = compute("feature_attribution", store=tmp_path / "store", **asked)
    assert done.to_json()["findings"] == [] and "nothing is claimed" in done.findings.caption


@pytest.mark.parametrize("name", ["attribution_patching", "feature_attribution", "integrated_gradients"])
def test_a_pair_of_ones_own_is_asked_about(name, store, tmp_path):
    own = SPEAKERS | ({} if name == "integrated_gradients" else {"wrong": "French"})
    done = compute(name, store=store, **own)
    found = done.to_json()
    assert json.dumps(found, allow_nan=False)
    pairs = found["facts" if name == "integrated_gradients" else "pairs"]
    assert [each["corrupted_prompt"] for each in pairs] == [SPEAKERS["corrupted"]]
    assert found["findings"]
    (figure,) = done.draw(tmp_path)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert done.report(tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["attribution_patching", "integrated_gradients"])
def test_nothing_is_claimed_of_a_model_that_knows_nothing(name, tmp_path):
    model = random_model(tmp_path / "model", 0, **SMALL)
    done = compute(name, store=tmp_path / "store", model=str(model), pairs=2)
    found = done.to_json()
    assert found["findings"] == []
    assert "nothing is claimed" in done.findings.caption


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        (
            "attribution_patching",
            {"prompt": "The law in"},
            "expected prompt, corrupted, answer and wrong together",
        ),
        ("attribution_patching", SPEAKERS, "expected prompt, corrupted, answer and wrong together"),
        ("attribution_patching", SPEAKERS | {"wrong": "English"}, "begin with different tokens"),
        (
            "attribution_patching",
            SPEAKERS | {"corrupted": "Chad, speaker of", "wrong": "French"},
            "expected prompts with the same number of tokens, found 12 .* and ",
        ),
        *(
            (name, SPEAKERS | {"corrupted": SPEAKERS["prompt"]} | own, "Vera Lynn, speaker of' twice")
            for name, own in (
                ("integrated_gradients", {}),
                ("attribution_patching", {"wrong": "French"}),
                ("feature_attribution", {"wrong": "French"}),
            )
        ),
        ("feature_attribution", SPEAKERS, "expected prompt, corrupted, answer and wrong together"),
        ("integrated_gradients", {"answer": "x"}, "expected prompt, corrupted and answer together"),
        ("integrated_gradients", {"steps": 0}, "expected steps to be int of at least 1"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(name, given, told):
    with pytest.raises(ConfigError, match=told) as raised:
        build(name, **given)
    assert "\n" not in str(raised.value)
