"""The logit lens from prompts to figures, against the model's own logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mizarr
from mizarr.store.errors import ConfigError, MissingExtra, PromptError
from mizarr.workflows import build, compute

PROMPTS = ["it was the age of", "we had everything before"]
ANSWERS = ["wisdom", "us"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lens") / "store"


@pytest.fixture(scope="module")
def done(tiny_model: Path, store: Path):
    return compute(
        "logit_lens",
        store=store,
        model=str(tiny_model),
        prompts=PROMPTS,
        answers=ANSWERS,
        top_k=5,
    )


def own_logprobs(folder: Path, ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def test_the_last_layer_gives_the_distribution_of_the_model_itself(done, tiny_model: Path):
    for i in range(len(PROMPTS)):
        part = done.prompt(i)
        own = own_logprobs(tiny_model, part["token_id"].values.tolist())
        last = part.isel(layer=-1)
        np.testing.assert_allclose(
            last["top_logprob"], np.take_along_axis(own, last["top_id"].values, axis=1), atol=1e-4
        )
        np.testing.assert_array_equal(last["top_id"].values[:, 0], own.argmax(axis=1))
        np.testing.assert_allclose(last["entropy"], -(np.exp(own) * own).sum(axis=1), atol=1e-4)
        assert not last["kl"].any()


def test_targets_are_the_next_tokens_and_at_the_end_the_answer(done):
    tokenizer = done.subject.tokenizer
    for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        ids = tokenizer.encode(f"{prompt} {answer}").ids
        part = done.prompt(i)
        n = part.sizes["position"]
        assert part["token_id"].values.tolist() == ids[:n]
        assert part["target_id"].values.tolist() == ids[1 : n + 1]


def test_ranks_and_probabilities_of_the_answer_are_those_of_the_model(done, tiny_model: Path):
    answers = done.answers()
    assert answers["prompt"].values.tolist() == [0, 1]
    for i in range(2):
        own = own_logprobs(tiny_model, done.prompt(i)["token_id"].values.tolist())[-1]
        target = int(answers["target_id"][i])
        assert float(answers["target_logprob"][-1, i]) == pytest.approx(own[target], abs=1e-4)
        assert int(answers["target_rank"][-1, i]) == 1 + int((own > own[target]).sum())


def test_json_has_the_fields_of_the_original_and_says_where_it_comes_from(done):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["total_time_secs"] > 0
    assert document["provenance"]["keys"].keys() == {"lens", "readout"}
    assert document["settings"]["prompts"] == PROMPTS
    first = document["results"][0]
    assert {"model_id", "prompt", "n_layers", "n_heads", "hidden_size", "layers"} <= first.keys()
    assert (first["n_layers"], first["n_heads"], first["hidden_size"]) == (3, 2, 32)
    assert [layer["layer"] for layer in first["layers"]] == [0, 1, 2]
    best = first["layers"][0]["predictions"]
    assert [p["rank"] for p in best] == [1, 2, 3, 4, 5]
    assert sorted((p["probability"] for p in best), reverse=True) == [p["probability"] for p in best]
    assert best[0]["token"] == done.subject.tokenizer.decode_token(best[0]["token_id"])


def test_prompts_without_answers_are_read_too(tiny_model: Path, tmp_path: Path):
    done = compute("logit_lens", store=tmp_path / "store", model=str(tiny_model), prompts=PROMPTS)
    assert done.answers().sizes["prompt"] == 0
    assert len(done.tables()) == 1
    assert "answer" not in done.to_json()["results"][0]


@pytest.mark.parametrize("workflow", ["logit_lens", "logit_attribution"])
def test_an_answer_of_no_token_is_refused_in_words(tiny_model: Path, workflow):
    with pytest.raises(ConfigError, match=r"expected an answer of at least one token .* found ''"):
        build(workflow, model=str(tiny_model), prompts=PROMPTS, answers=["wisdom", ""])


def test_a_prompt_without_a_token_of_its_own_is_refused(tiny_model: Path):
    with pytest.raises(PromptError, match=r"prompt 1 .*only the 1 that the tokenizer adds in ''"):
        build("logit_lens", model=str(tiny_model), prompts=["it was", ""])


def test_a_result_asked_for_too_early_or_by_a_wrong_name_is_an_error(done, tiny_model: Path):
    with pytest.raises(ConfigError, match="has not run"):
        build("logit_lens", model=str(tiny_model), prompts=PROMPTS).result("lens")
    with pytest.raises(ConfigError, match="nearest is 'lens'"):
        done.result("lense")


def test_a_loaded_model_serves_as_well_as_its_name(done, tiny_model: Path, tmp_path: Path):
    model = mizarr.Model.from_pretrained(tiny_model)
    again = compute(
        "logit_lens", store=tmp_path / "other", model=model, prompts=PROMPTS, answers=ANSWERS, top_k=5
    )
    assert again.to_json()["provenance"] == done.to_json()["provenance"]
    np.testing.assert_array_equal(again.lens["top_id"], done.lens["top_id"])


def test_figures_name_the_results_and_are_drawn_once(done, tmp_path: Path):
    folder = tmp_path / "figures"
    files = done.draw(folder)
    assert [path.name for path in files] == ["logit_lens_0.png", "logit_lens_1.png", "logit_lens_answers.png"]
    for path in files:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert done.to_json()["provenance"]["keys"]["lens"][:12].encode() in path.read_bytes()
    times = [path.stat().st_mtime_ns for path in files]
    assert done.draw(folder) == files
    assert [path.stat().st_mtime_ns for path in files] == times


def test_a_figure_of_other_results_is_drawn_anew(done, tiny_model: Path, tmp_path: Path):
    folder = tmp_path / "figures"
    before = done.draw(folder)[0].read_bytes()
    other = compute(
        "logit_lens",
        store=tmp_path / "store",
        model=str(tiny_model),
        prompts=PROMPTS[::-1],
        answers=ANSWERS[::-1],
    )
    assert other.draw(folder)[0].read_bytes() != before


def test_without_matplotlib_figures_name_the_extra_and_tables_still_print(
    done, tmp_path, monkeypatch, capsys
):
    from rich.console import Console

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done.render(Console())
    assert "wisdom" in capsys.readouterr().out
    with pytest.raises(MissingExtra, match=r"mizarr\[plots\]"):
        done.draw(tmp_path / "figures")


def test_prompts_print_as_they_are_even_if_they_look_like_markup(tiny_model: Path, tmp_path: Path, capsys):
    from rich.console import Console

    done = compute(
        "logit_lens", store=tmp_path / "s", model=str(tiny_model), prompts=["[bold]a[/]\n"], answers=["b"]
    )
    done.render(Console())
    assert "[bold]a[/]⏎" in capsys.readouterr().out
