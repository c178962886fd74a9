"""path_patching: who says what the guided specimen copies with, to whom; and chance."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scipy.stats import binom

from mizarr import open_store, pipeline
from mizarr.stages.causal.controls import CHANCE
from mizarr.stages.circuits.paths import PathPatching
from mizarr.store.errors import ConfigError
from mizarr.workflows import build, compute
from mizarr.workflows.circuits.tasks import TaskWorkflow
from mizarr.workflows.cli import run
from mizarr.workflows.subject import SPECIMEN_FOLDER as SPECIMEN
from tests.stages.forward.random_models import save_random_model

FEW = {"tasks": ["copying"], "pairs": 7, "controls": 4, "strongest": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def copying(store):
    return compute("path_patching", store=store, model="specimen-guided", **FEW)


def by_receiver(done):
    return {heard["receiver"]: heard for heard in done.to_json()["paths"]}


def test_the_induction_head_says_the_answer_and_hears_the_previous_token_head(copying):
    """Its card tells of both: L3H0 was trained to copy, by keys that L1H0 writes."""
    assert "L1H0" in copying.trained_with_help and "L3H0" in copying.trained_with_help
    heard = by_receiver(copying)
    assert list(heard) == ["the logits", "a3.h0<q>", "a3.h0<k>", "a3.h0<v>"]
    assert heard["the logits"]["told"][0]["sender"] == "a3.h0"
    assert heard["a3.h0<k>"]["told"][0]["sender"] == "a1.h0"
    assert {each["sender"] for each in heard["a3.h0<v>"]["told"]} >= {"input"}
    first, further, quiet, queries, keys, values = copying.findings.findings
    assert [each.verdict for each in (first, further, keys, values)] == ["beyond chance"] * 4
    assert "a1.h0 (the strongest of" in keys.text and "input (the strongest of" in values.text
    assert [each.verdict for each in (quiet, queries)] == ["no more than chance"] * 2
    assert all(each.held_out for each in copying.findings.findings)


def test_what_is_told_is_the_difference_from_random_changes_in_each_pair(copying):
    """From the stored result by hand; half of the pairs chose, the other half is scored."""
    chosen_on, scored = copying.pairs["copying"]
    found = copying.result("copying_paths")
    assert found.sizes["pair"] == len(scored) == 7 and not set(chosen_on) & set(scored)
    record = by_receiver(copying)["the logits"]["told"][0]
    effect = found["effect"].sel(sender="a3.h0", receiver="logits").values
    random = found["random"].values[:, :, 0, 0]
    chosen = float(found["chosen_effect"].sel(sender="a3.h0", receiver="logits"))
    assert record["effect"] == pytest.approx(effect.mean())
    assert record["chosen_effect"] == pytest.approx(chosen) and chosen < 0
    assert record["further"] == pytest.approx((-effect - np.abs(random).mean(1)).mean())
    assert record["random"]["median"] == pytest.approx(np.median(random.mean(0)))
    assert copying.findings.findings[0].effect == pytest.approx(record["further"])
    others = found["effect"].sel(receiver="logits")
    heads = [str(name) for name in others["sender"].values if str(name)[0] == "a" and name != "a3.h0"]
    beyond = -effect - np.abs(others.sel(sender=heads)).mean("sender").values
    assert copying.findings.findings[1].effect == pytest.approx(beyond.mean())
    told = by_receiver(copying)["the logits"]
    assert (told["heads_looked_at"], told["senders_looked_at"]) == (36, 43)
    assert "the strongest of 36 heads" in copying.findings.findings[0].text


def test_other_receivers_are_asked_as_an_experiment_would(store):
    """Joined queries and an MLP, MLPs held: the effects are those of `PathPatching`."""
    receivers = ["a3.h0<k>+a3.h0<v>", "m5"]
    given = {**FEW, "pairs": 2, "back": 0, "receivers": receivers, "mlps": "held"}
    asked = compute("path_patching", store=store, **given)
    assert list(asked.nodes) == ["copying_paths"]
    paths = PathPatching(pairs=asked.pairs["copying"][1], receivers=tuple(receivers), mlps="held")
    node = asked.on_model(paths)
    pipeline.run(node, open_store(store))
    wanted = node.open(open_store(store))["effect"]
    np.testing.assert_allclose(asked.result("copying_paths")["effect"], wanted, atol=1e-6)
    assert list(by_receiver(asked)) == receivers


def test_it_is_told_in_every_form(copying, tmp_path):
    assert json.dumps(copying.to_json(), allow_nan=False)
    assert len(copying.tables()) == 5
    assert [path.name for path in copying.draw(tmp_path)] == ["path_patching_copying.png"]
    page = copying.report(tmp_path / "page.html").read_text()
    assert "Chosen among 43 senders, 36 of them heads" in page


def test_maps_of_a_step_have_one_scale_and_the_strongest_head_framed(copying):
    maps = [view for view in copying.views() if view.kind == "heatmap"]
    assert [view.columns for view in maps] == [(*map(str, range(6)), "MLP")] * 4
    first, queries, keys, values = maps
    assert queries.high == keys.high == values.high > first.high
    assert first.framed == ((3, 0, 3, 0),) and keys.framed == ((1, 0, 1, 0),)
    effects = by_receiver(copying)["the logits"]["effects"]
    assert first.values[3, 0] == pytest.approx(effects["a3.h0"])
    assert first.values[5, 6] == pytest.approx(effects["m5"])
    assert np.isnan(keys.values[3:]).all() and np.isfinite(keys.values[:3]).all()


def test_the_command_line_says_the_same(copying, store, capsys):
    told = [f"{name}={json.dumps(value)}" for name, value in FEW.items()]
    settings = [word for each in told for word in ("--set", each)]
    assert (
        run(
            [
                "compute",
                "path_patching",
                "--store",
                str(store),
                "--model",
                "specimen-guided",
                "--json",
                *settings,
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["paths"] == json.loads(json.dumps(copying.to_json()["paths"]))


@pytest.mark.parametrize("seeds", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_random_weights_claim_nothing(seeds, tmp_path, monkeypatch):
    """Of what they do not do nothing at all; and asked all the same, no more often than chance says."""
    claims = []
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        save_random_model(folder, "llama", seed, tokenizer=False, vocab_size=2048)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SPECIMEN / file, folder)
        done = compute("path_patching", store=tmp_path / "store", model=str(folder), **FEW)
        told = done.findings
        assert not told.findings and told.caption.startswith("The model does not do copying: ")
        with monkeypatch.context() as patched:
            patched.setattr(TaskWorkflow, "is_done", lambda self, values: True)
            del done.findings, done.done  # cached properties
            claims += [each.is_beyond_chance for each in done.findings.findings]
    assert len(claims) >= 4 * seeds
    assert sum(claims) <= binom.ppf(0.99, len(claims), CHANCE)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"receivers": ["a3.h0"]},
            "the name of a receiver of this model, found 'a3.h0'; did you mean 'a3.h0<",
        ),
        ({"receivers": ["logits", "logits"]}, "found a repeated name"),
        ({"receivers": ["logits+m1"]}, "expected the logits as a receiver of their own"),
        ({"receivers": []}, "expected receivers that is not empty"),
        ({"receivers": ["a0.h0<q>"]}, "back to be at most 0"),
        ({"back": 37}, "the field back to be at most 36, the number of heads with a path to logits"),
        ({"mlps": "frozen"}, "expected mlps to be recomputed or held, found 'frozen'"),
        ({"tasks": ["copy"]}, "no task 'copy'; there are facts, ioi"),
        ({"strongest": 0}, "expected strongest to be int of at least 1, found 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(given, said, capsys):
    with pytest.raises(Exception, match=said) as caught:
        build("path_patching", **given)
    assert "\n" not in str(caught.value)
    words = [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    assert run(["explain", "path_patching", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_model_whose_parts_are_no_sum_is_refused(tmp_path):
    save_random_model(tmp_path, "gemma2", 0)
    with pytest.raises(ConfigError, match="norms 'around' the output of heads or MLP in layer 0 of gemma2"):
        build("path_patching", model=str(tmp_path))
