"""`mizarr capture` on a model of two layers, with token ids for prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, LogProbability, Probability
from mizarr.store import open_store
from mizarr.workflows.cli import run
from tests.stages.forward.random_pairs import random_pair


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[1, 2, 3]\n[4, 5]\n")
    return str(path)


@pytest.fixture
def capture(checkpoint, prompts, tmp_path, capsys):
    """Run `mizarr capture` on the tiny model; (exit code, stdout, stderr)."""
    model = checkpoint()

    def call(*arguments, hooks="blocks.*.hook_resid_post"):
        fixed = ["capture", model, prompts, "--hooks", hooks, "--store", str(tmp_path / "store"), "--quiet"]
        code = run([*fixed, *arguments])
        return code, *capsys.readouterr()

    return call


def test_captured_layers_are_listed_and_can_be_opened(capture, tmp_path):
    code, out, _ = capture()
    assert code == 0
    told, opened = out.splitlines()
    key = told.split()[1].removesuffix(":")
    assert told == f"run {key}: 2 prompts, 5 tokens, resid_post 0-1"
    assert opened == f"open it: mizarr.open_store({str(tmp_path / 'store')!r})[{key!r}]"
    states = open_store(tmp_path / "store", mode="r")[key]["resid_post"]
    assert dict(states.sizes)["hidden"] == 16
    assert states.sizes["token"] == 5


def test_capturing_again_gives_the_same_keys_and_contents(capture):
    first, second = (json.loads(capture("--json")[1]) for _ in range(2))
    assert first == second
    assert (first["prompts"], first["tokens"]) == (2, 5)


def test_prompts_that_a_larger_run_holds_are_told_as_that_run(capture, tmp_path, prompts):
    whole = json.loads(capture("--json")[1])
    Path(prompts).write_text("[4, 5]\n")
    code, out, _ = capture("--json")
    found = json.loads(out)
    assert (code, found["prompts"], found["tokens"]) == (0, 1, 2)
    assert (found["run"], found["arrays"]) == (whole["run"], whole["arrays"])


def test_a_dry_run_says_what_it_would_take_and_leaves_no_trace(capture, tmp_path):
    code, out, _ = capture("--dry-run", "--json")
    (step,) = json.loads(out)["steps"]
    assert code == 0
    assert step["state"].startswith("will run because")
    assert step["bytes_written"] == 2 * 5 * 16 * 4
    assert not (tmp_path / "store").exists()


def test_a_dry_run_over_what_is_stored_says_cached(capture):
    capture()
    assert " cached" in capture("--dry-run")[1]


def refused_alike(capture, *arguments):
    """The one line that a capture says, which a dry run says as well; both leave no trace."""
    told = [capture(*arguments, *more) for more in (["--dry-run"], [])]
    assert [code for code, _, _ in told] == [2, 2]
    assert told[0][1:] == told[1][1:]
    return told[0][2]


def test_a_dry_run_refuses_the_workers_that_a_capture_refuses(capture, tmp_path):
    two_kinds = refused_alike(capture, "--workers", "2", "--cluster", "tcp://127.0.0.1:1")
    assert two_kinds.startswith("mizarr: error: both a cluster ('tcp:")
    by_layers = refused_alike(capture, "--workers", "2", "--order", "layer")
    assert 'order="layer" runs in one process: expected no workers, found 2 workers' in by_layers
    assert capture("--workers", "2", "--dry-run")[0] == 0
    assert not any((tmp_path / "store" / "data").glob("*/*"))


def test_a_dry_run_over_what_is_stored_asks_for_no_workers(capture):
    """As nothing will run there."""
    capture()
    assert capture("--workers", "2", "--order", "layer")[0] == 0
    assert capture("--workers", "2", "--order", "layer", "--dry-run")[0] == 0


def test_storage_dtype_halves_what_is_stored(capture, tmp_path):
    _, out, _ = capture("--storage-dtype", "bfloat16", "--json")
    found = json.loads(out)
    entry = open_store(tmp_path / "store", mode="r").entry(found["run"])
    assert entry.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ("blocks.0.hook_resid_pots", "hook_resid_post"),
        ("blocks.7.hook_resid_post", "blocks.1.hook_resid_post"),
        ("block.*.hook_resid_post", "blocks."),
    ],
)
def test_a_hook_point_the_model_lacks_is_refused_before_a_store_is_made(capture, tmp_path, hooks, said):
    code, out, err = capture(hooks=hooks)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_text_without_a_tokenizer_is_one_line(checkpoint, capsys, tmp_path):
    arguments = ["capture", checkpoint(words=False), "words", "--text", "--hooks", "hook_embed"]
    assert run([*arguments, "--store", str(tmp_path / "store")]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_an_empty_prompt_is_refused_and_stores_no_lone_bos(tiny_model, capsys, tmp_path):
    store = tmp_path / "store"
    arguments = ["capture", str(tiny_model), "it was", "", "--text", "--hooks", "hook_embed"]
    assert run([*arguments, "--store", str(store), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "expected prompt 1 to have a token of its own" in said and said.count("\n") == 1
    assert not store.exists()


def test_a_lone_bos_can_be_captured_by_its_id(tiny_model, capsys, tmp_path):
    (tmp_path / "ids.jsonl").write_text("[0]\n")
    arguments = ["capture", str(tiny_model), str(tmp_path / "ids.jsonl"), "--hooks", "hook_embed", "--json"]
    assert run([*arguments, "--store", str(tmp_path / "store"), "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 1


def test_text_is_kept_beside_its_activations(checkpoint, capsys, tmp_path):
    arguments = [
        "capture",
        checkpoint(),
        "w1 w2",
        "w3",
        "--text",
        "--hooks",
        "hook_embed",
        "--json",
        "--quiet",
    ]
    assert run([*arguments, "--store", str(tmp_path / "store")]) == 0
    entry = open_store(tmp_path / "store", mode="r").entry(json.loads(capsys.readouterr().out)["run"])
    assert list(entry.tokens.texts) == ["w1 w2", "w3"]
    assert entry.open()["embed"].sizes["token"] == 3


GRADIENT = "grad:blocks.*.hook_resid_post"


@pytest.mark.parametrize(
    ("said", "metric", "how"),
    [
        (("logit_difference=[3, 7]",), LogitDifference(3, 7), {}),
        (('logit_difference=["w2", " w6"]',), LogitDifference(3, 7), {}),
        (("probability=w4", "--at", "-2"), Probability(5), {"at": -2}),
        (("log_probability=5", "--at", "0"), LogProbability(5), {"at": 0}),
        (("kl", "--baseline", "[4, 2, 6]"), KL(), {"baseline": (4, 2, 6)}),
        (("kl", "--baseline", "w3 w1 w5"), KL(), {"baseline": (4, 2, 6)}),
    ],
)
def test_a_metric_named_on_the_command_line_is_the_same_run_as_in_python(
    checkpoint, prompts, capsys, tmp_path, said, metric, how
):
    """The same key, so that the one finds what the other stored; and its numbers are the model's own."""
    model, store = checkpoint(), tmp_path / "store"
    fixed = ["capture", model, prompts, "--hooks", GRADIENT, "--store", str(store), "--quiet", "--json"]
    assert run([*fixed, "--metric", *said]) == 0
    entry = open_store(store, mode="r").entry(json.loads(capsys.readouterr().out)["run"])
    spec = mizarr.HookSpec().capture(GRADIENT).gradient_of(metric, **how)
    cached = mizarr.capture(model, [[1, 2, 3], [4, 5]], spec, store=open_store(store), progress=False)
    np.testing.assert_array_equal(cached["resid_post__grad"].values, entry.open()["resid_post__grad"].values)
    own = mizarr.Model.from_pretrained(model).forward([1, 2, 3], spec)["grad:blocks.1.hook_resid_post"][0]
    np.testing.assert_allclose(cached["resid_post__grad"].sel(layer=1).values[:3], own, rtol=1e-5, atol=1e-7)
    assert np.abs(own.numpy()).max() > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--metric"),
        (("--metric", "rank=3"), "no metric 'rank' that has a gradient; there are logit_difference"),
        (("--metric", "probabilty=3"), "did you mean 'probability'?"),
        (("--metric", "logit_difference=3"), "expected two tokens after the name, found 3"),
        (("--metric", "probability=0.5"), "expected one token after the name, found 0.5"),
        (("--metric", "probability=true"), "expected one token after the name, found true"),
        (("--metric", "kl=3", "--baseline", "[1]"), "expected no tokens after the name, found 3"),
        (("--metric", "probability=9999"), "expected token ids in 0.."),
        (("--metric", "probability=w1 w2"), "expected 'w1 w2' to be one token"),
        (("--metric", "probability=3", "--at", "2"), "expected a position at= in -2..1"),
        (("--metric", "kl"), "add --baseline"),
        (("--metric", "kl", "--baseline", "[99999]"), "expected token ids in 0.."),
        (
            ("--metric", "probability=3", "--baseline", "[1]"),
            "--baseline is a parameter of the metric kl only",
        ),
        (("--at", "1"), "--at is a parameter of the metric"),
    ],
)
def test_a_metric_that_cannot_be_is_one_line_before_a_store_is_made(capture, tmp_path, arguments, said):
    code, out, err = capture(*arguments, hooks=GRADIENT)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_a_metric_without_a_gradient_to_take_is_refused(capture, tmp_path):
    code, out, err = capture("--metric", "probability=3")
    assert (code, out) == (2, "") and "expected a captured gradient, found none" in err
    assert not (tmp_path / "store").exists()


def test_a_dry_run_of_gradients_tells_their_bytes(capture, tmp_path):
    code, out, _ = capture("--metric", "probability=3", "--dry-run", "--json", hooks=GRADIENT)
    (step,) = json.loads(out)["steps"]
    assert (code, step["bytes_written"]) == (0, 2 * 5 * 16 * 4)
    assert not (tmp_path / "store").exists()


def test_pairs_are_captured_as_python_captures_them(tmp_path, capsys):
    folder, store = tmp_path / "bart", str(tmp_path / "store")
    random_pair("bart", 0, folder)
    prompts = tmp_path / "pairs.jsonl"
    prompts.write_text('{"source": [7, 8], "target": [9]}\n{"source": [6], "target": []}\n')
    asked = ["capture", str(folder), str(prompts), "--hooks", "blocks.*.hook_resid_post", "--store", store]
    assert run([*asked, "--quiet"]) == 0
    model = mizarr.Model.from_pretrained(folder)
    pairs = [model.pair([7, 8], [9]), model.pair([6])]
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post")
    before = len(open_store(store).runs())
    held = mizarr.capture(model, pairs, hooks, store=open_store(store))
    assert held["token_id"].values.tolist() == [token for pair in pairs for token in pair]
    assert len(open_store(store).runs()) == before == 1


def test_a_pair_for_a_model_of_one_sequence_is_refused(capture, prompts):
    Path(prompts).write_text('{"source": [1, 2], "target": [3]}\n')
    code, out, told = capture()
    assert (code, out) == (2, "")
    assert "expected an encoder-decoder model" in told and "join the two texts" in told


def test_half_a_pair_is_refused(capture, prompts):
    Path(prompts).write_text('[1]\n{"source": [1, 2]}\n')
    code, out, told = capture()
    assert (code, out) == (2, "")
    assert "prompts.jsonl:2: expected both source and target" in told
