"""A model with a vocabulary of RWKV World in place of a tokenizer.json, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mizarr
from mizarr.store import open_store
from mizarr.workflows.cli import run

TOKENS = {1: b" ", 2: b"a", 3: b"t", 4: b" the", 5: b"cat", 6: b" ca", 8: b"\xc3", 9: b"\xa9", 20: b" sat"}
PROMPT, IDS = "cat saté the cat", [5, 20, 8, 9, 4, 6, 3]
OFFSETS = [(0, 3), (3, 7), (7, 8), (7, 8), (8, 12), (12, 15), (15, 16)]
SHOWN = ["cat", " sat", r"\xc3", r"\xa9", " the", " ca", "t"]


@pytest.fixture
def model(checkpoint):
    """The tiny model; of its 32 ids these have a token."""
    folder = Path(checkpoint(words=False))
    lines = "".join(f"{i} {token!r} {len(token)}\r\n" for i, token in TOKENS.items())
    (folder / "rwkv_vocab_tiny.txt").write_bytes(lines.encode())
    return str(folder)


def test_a_text_runs_as_its_ids_do(model):
    loaded = mizarr.Model.from_pretrained(model)
    by_text, by_ids = loaded.forward(PROMPT), loaded.forward(IDS)
    assert by_text.logits.equal(by_ids.logits)
    assert loaded.tokenizer.find_token_id("the") == 4


def test_capture_keeps_characters_and_words(model, tmp_path, capsys):
    prompts, store = tmp_path / "prompts.jsonl", str(tmp_path / "store")
    prompts.write_text(json.dumps(PROMPT) + "\n")
    given = ["capture", model, str(prompts), "--hooks", "blocks.*.hook_resid_post", "--store", store]
    assert run([*given, "--quiet", "--json"]) == 0
    states = open_store(store, mode="r")[json.loads(capsys.readouterr().out)["run"]]
    assert states["token_id"].values.tolist() == IDS
    assert list(zip(states["char_start"].values, states["char_end"].values, strict=True)) == OFFSETS
    digest = mizarr.Model.from_pretrained(model).tokenizer.digest
    words = open_store(store, mode="r").vocabulary(digest)
    assert [words[token] for token in IDS] == SHOWN and words[7] == ""


def test_the_logit_lens_reads_its_tokens(model, tmp_path, capsys):
    given = ["compute", "logit_lens", "--model", model, "--set", f"prompts={json.dumps([PROMPT])}"]
    given += ["--set", 'answers=["the"]', "--set", "top_k=32", "--store", str(tmp_path / "store")]
    assert run([*given, "--quiet", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    own = mizarr.Model.from_pretrained(model).forward(PROMPT).logits[0, -1].softmax(-1).tolist()
    named = {0: "<|endoftext|>"} | dict(zip(IDS, SHOWN, strict=True))
    last = {each["token_id"]: each for each in result["layers"][-1]["predictions"]}
    assert {token: last[token]["token"] for token in named} == named
    assert [last[token]["probability"] for token in range(32)] == pytest.approx(own, abs=1e-5)
    assert result["answer_token_id"] == 4


def test_the_places_of_tokens_are_told_without_a_model(model, tmp_path, capsys):
    given = ["compute", "token_positions", "--model", model, "--set", f"text={json.dumps(PROMPT)}"]
    assert run([*given, "--store", str(tmp_path / "store"), "--quiet", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert [each["token_id"] for each in tokens] == IDS
    assert [each["token"] for each in tokens] == [each["piece"] for each in tokens] == SHOWN
    assert [(each["start"], each["end"]) for each in tokens] == OFFSETS


def test_without_either_file_both_are_named(checkpoint, tmp_path, capsys):
    model = checkpoint(words=False)
    assert run(["compute", "logit_lens", "--model", model, "--store", str(tmp_path / "store")]) == 2
    found = capsys.readouterr().err
    assert "expected a tokenizer.json, or an rwkv_vocab*.txt, in" in found and found.count("\n") == 1
