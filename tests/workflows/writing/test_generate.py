"""Generated text as a workflow: the same as `generate`, stored prompt by prompt, told as it comes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mizarr
from mizarr.stages.causal.continuation import Continuation
from mizarr.stages.forward.generation.continuations import GenerationSettings
from mizarr.stages.forward.generation.generate import TokenStream, generate
from mizarr.stages.logits.lens import format_text
from mizarr.store.errors import ConfigError, HookPointNotFound, PromptError, TokenizerError
from mizarr.workflows import build, compute
from tests.torch_free import TORCH_BLOCKED

PROMPTS = ["it was the age of", "we had everything before", "it was"]
SILENCED = "blocks.1.hook_*_out"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generate") / "store"


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> mizarr.Model:
    return mizarr.Model.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def done(tiny_model: Path, store: Path):
    return compute("generate", store=store, model=str(tiny_model), prompts=PROMPTS, max_tokens=9)


@pytest.fixture
def prompts_run(monkeypatch) -> list[tuple[int, ...]]:
    """Prompts that are continued from here on."""
    seen = []
    begin = TokenStream.__init__

    def counted(self, model, prompts, *rest):
        seen.extend(prompts)
        begin(self, model, prompts, *rest)

    monkeypatch.setattr(TokenStream, "__init__", counted)
    return seen


def test_the_document_has_the_fields_of_the_original_and_what_generate_gives(done, model):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["provenance"]["keys"].keys() == {"generation"}
    expected = generate(model, PROMPTS, max_tokens=9)
    for prompt, told, result in zip(PROMPTS, document["results"], expected, strict=True):
        assert told["prompt"] == prompt
        assert told["generated_text"] == result.generated_text
        assert told["full_text"] == prompt + result.generated_text
        counts = (told["prompt_tokens"], told["generated_tokens"], told["total_tokens"])
        assert counts == (result.prompt_tokens, result.generated_tokens, result.total_tokens)
        assert tuple(told["prompt_token_ids"]) == result.prompt_ids
        assert tuple(told["token_ids"]) == result.generated_ids
        assert told["tokens"] == [model.tokenizer.decode_token(token) for token in told["token_ids"]]
        assert told["probabilities"] == pytest.approx(result.probabilities, abs=1e-6)
        assert told["finish_reason"] == result.finish_reason


def test_prompts_are_stored_one_by_one(done, tiny_model, store, prompts_run):
    again = compute("generate", store=store, model=str(tiny_model), prompts=PROMPTS, max_tokens=9)
    assert again.to_json() == done.to_json()
    assert prompts_run == []
    more = compute("generate", store=store, model=str(tiny_model), prompts=[*PROMPTS, "us"], max_tokens=9)
    assert len(prompts_run) == 1
    assert more.to_json()["results"][:3] == done.to_json()["results"]
    compute("generate", store=store, model=str(tiny_model), prompts=PROMPTS, max_tokens=9, seed=4)
    assert len(prompts_run) == 1, "greedy text knows no seed"
    compute("generate", store=store, model=str(tiny_model), prompts=PROMPTS, max_tokens=8)
    assert len(prompts_run) == 4


def test_whether_keys_are_kept_is_in_no_key_where_it_is_left_open(tiny_model, store):
    def key(cache: bool | None):
        return (
            Continuation(((3, 4),), GenerationSettings(cache=cache, eos=()))
            .on(str(tiny_model))
            .key(mizarr.open_store(store))
        )

    assert key(None) == key(False)  # as in stores written when every position was read anew
    assert key(True) != key(False)


def test_a_stored_generation_tells_how_it_was_read(done):
    assert done.generation.attrs["reading"] == "keys and values kept"


def test_what_is_cached_needs_no_torch(done, tiny_model, store):
    program = (
        TORCH_BLOCKED
        + """
from mizarr.workflows import compute
store, model, prompts = sys.argv[1:]
done = compute("generate", store=store, model=model, prompts=json.loads(prompts), max_tokens=9)
done.tables()
print(json.dumps(done.to_json()))
"""
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(store), str(tiny_model), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(json.dumps(done.to_json()))


def test_what_is_silenced_is_silenced_at_every_step(done, tiny_model, store, model, prompts_run):
    found = compute(
        "generate", store=store, model=str(tiny_model), prompts=PROMPTS, max_tokens=9, zero=SILENCED
    )
    assert len(prompts_run) == len(PROMPTS), "the whole model's text was there already"
    hooks = mizarr.HookSpec()
    for point in ("blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"):
        hooks = hooks.intervene(point, mizarr.Zero())
    expected = generate(model, PROMPTS, hooks, max_tokens=9)
    results = found.to_json()["results"]
    assert [tuple(told["token_ids"]) for told in results] == [each.generated_ids for each in expected]
    whole = [told["generated_text"] for told in done.to_json()["results"]]
    assert [told["unchanged_text"] for told in results] == whole
    assert [told["generated_text"] for told in results] != whole
    (table,) = found.tables()
    assert [str(column.header) for column in table.columns][:3] == ["prompt", "continuation", "unchanged"]


def test_draws_are_those_of_the_seed(tiny_model, tmp_path, model):
    chosen = {"max_tokens": 8, "temperature": 1.5, "seed": 7, "top_k": 40, "top_p": 0.95}
    found = compute("generate", store=tmp_path, model=str(tiny_model), prompts=PROMPTS, **chosen)
    expected = generate(model, PROMPTS, **chosen)
    assert [told["token_ids"] for told in found.to_json()["results"]] == expected.ids


def test_a_stop_string_ends_a_text(done, tiny_model, tmp_path):
    text = done.to_json()["results"][0]["generated_text"]
    found = compute(
        "generate", store=tmp_path, model=str(tiny_model), prompts=PROMPTS[:1], max_tokens=9, stop=text[1:3]
    )
    told = found.to_json()["results"][0]
    assert (told["finish_reason"], told["generated_text"]) == ("stop", text[: text.index(text[1:3])])


def test_text_appears_as_it_is_generated_for_somebody_at_a_terminal(
    tiny_model, tmp_path, monkeypatch, capsys, done
):
    planned = build("generate", model=str(tiny_model), prompts=PROMPTS, max_tokens=9)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    planned.run(mizarr.open_store(tmp_path / "loud"), quiet=False)
    said = capsys.readouterr()
    shown = re.sub("\x1b\\[\\d*m", "", said.err)  # without colours
    for told in done.to_json()["results"]:
        assert format_text(told["full_text"]) + "\n\n" in shown
    assert said.out == ""
    planned.run(mizarr.open_store(tmp_path / "loud"), quiet=False)
    assert PROMPTS[0] not in capsys.readouterr().err, "what is stored is not told again"
    build("generate", model=str(tiny_model), prompts=PROMPTS, max_tokens=9).run(
        mizarr.open_store(tmp_path / "quiet"), quiet=True
    )
    assert capsys.readouterr().err == ""


def test_captures_are_stored_step_by_step(tiny_model, tmp_path, model):
    ids = tuple(tuple(model.tokenizer.encode(prompt).ids) for prompt in PROMPTS)
    hooks = mizarr.HookSpec().capture("blocks.*.hook_resid_post", "blocks.2.attn.hook_pattern")
    stage = Continuation(ids, GenerationSettings(max_tokens=5, eos=()), hooks)
    store = mizarr.open_store(tmp_path)
    from mizarr.pipeline import run

    node = stage.on(str(tiny_model))
    run([node], store)
    found = node.open(store).load()
    expected = generate(model, PROMPTS, hooks, max_tokens=5, eos=()).to_xarray()
    for name in ("token_id", "logprob", "resid_post", "pattern"):
        assert found[name].dims == expected[name].dims
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    assert found["layer"].values.tolist() == expected["layer"].values.tolist()
    assert found["position_read"].values.tolist() == expected["position_read"].values.tolist()
    assert found["prompt_tokens"].values.tolist() == [len(row) for row in ids]
    for row, prompt in enumerate(ids):
        assert tuple(found["prompt_id"].values[row, : len(prompt)]) == prompt
        assert (found["prompt_id"].values[row, len(prompt) :] == -1).all()


def test_without_settings_the_specimen_continues_what_ships_with_it():
    planned = build("generate")
    assert planned.settings.max_tokens == 20
    assert len(planned.texts) >= 4
    assert any("\n" in text for text in planned.texts), "wrapped prose is among them"
    assert build("generate").nodes["generation"].experiment.settings.eos == (1,)


def test_a_figure_shows_every_row(done, tiny_model, store, tmp_path):
    (path,) = done.draw(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert done.to_json()["provenance"]["keys"]["generation"][:12].encode() in path.read_bytes()
    compared = compute(
        "generate", store=store, model=str(tiny_model), prompts=PROMPTS, max_tokens=9, zero=SILENCED
    )
    (other,) = compared.draw(tmp_path / "compared")
    assert other.read_bytes() != path.read_bytes()


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({"max_tokens": 0}, ConfigError, "max_tokens of at least 1"),
        ({"top_k": 3}, ConfigError, "temperature > 0"),
        ({"zero": ["blocks.0.hook_mlp_put"]}, HookPointNotFound, r"did you mean 'blocks\.0\.hook_mlp_out'"),
        ({"prompts": ["it was " * 60]}, PromptError, "at most 64 positions"),
        ({"prompts": [""], "max_tokens": 99}, None, None),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(tiny_model, chosen, error, message):
    if error is None:  # a BOS by itself is a prompt
        assert build("generate", model=str(tiny_model), **chosen).texts == ("",)
        return
    with pytest.raises(error, match=message) as caught:
        build("generate", model=str(tiny_model), **({"prompts": PROMPTS} | chosen))
    assert "\n" not in str(caught.value)


def test_what_a_user_says_is_put_into_the_models_chat_template(tiny_model: Path, tmp_path: Path):
    """The tokens are those of `Model.chat`, continued; without a template that is said in a line."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text()) if path.is_file() else {}
    told.pop("chat_template", None)
    path.write_text(json.dumps(told))
    asked = {"model": str(folder), "prompts": ("it was",), "max_tokens": 4, "chat": True}
    with pytest.raises(TokenizerError, match="expected a chat template of"):
        build("generate", **asked)
    template = "{% for said in messages %}<{{ said.role }}> {{ said.content }}\n{% endfor %}<assistant>"
    path.write_text(json.dumps(told | {"chat_template": template}))
    (result,) = compute("generate", store=tmp_path / "store", **asked).to_json()["results"]
    model = mizarr.Model.from_pretrained(folder)
    ids = model.chat("it was")
    assert result["prompt_token_ids"] == ids and result["prompt"] == "it was"
    assert result["full_text"] == "<user> it was\n<assistant>" + result["generated_text"]
    assert model.tokenizer.decode(ids) == "<user> it was\n<assistant>"
    assert result["token_ids"] == list(generate(model, [ids], max_tokens=4)[0].generated_ids)
