"""Token positions of a text, which no model has to run for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.console import Console

from mizarr.store.errors import ConfigError, MizarrError, PromptError, TokenizerError
from mizarr.workflows import build, compute
from mizarr.workflows.writing.token_positions import TEXT, read_span


@pytest.fixture
def done(tmp_path):
    return compute("token_positions", store=tmp_path / "store")


def test_every_token_is_placed_in_the_text_of_the_original(done):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["text"] == TEXT == "The Eiffel Tower is located in Paris, France."
    tokens = document["tokens"]
    assert "".join(one["token"] for one in tokens if not one["is_special"]) == TEXT
    for one in tokens:
        if not one["is_special"]:
            assert TEXT[one["start"] : one["end"]] == one["token"]
    assert [one["char_pos"] for one in document["characters"]] == [0, 4, 11, 31, 38, 44]
    assert [one["text"] for one in document["ranges"]] == ["Eiffel Tower", "Paris", "France"]
    assert [one["char_pos"] for one in document["converted"]] == [4, 16, 31, 36, 99]


def test_lookups_land_on_tokens_over_the_character(done):
    document = done.to_json()
    for one in document["characters"]:
        found = document["tokens"][one["token"]]
        assert found["start"] <= one["char_pos"] < found["end"]
    for one in document["ranges"]:
        covered = "".join(document["tokens"][i]["token"] for i in one["tokens"])
        assert one["text"] in covered
        assert document["tokens"][one["tokens"][-1]]["label"] == f"{one['name']}_final"
    beyond = document["converted"][-1]
    assert beyond["exact_match"] is False
    assert beyond["token_idx"] == len(document["tokens"]) - 1


def test_another_text_is_placed_by_its_words(tmp_path):
    text = "Ça va, 漢字 🙂 ok?"
    document = compute("token_positions", store=tmp_path / "store", text=text).to_json()
    assert [one["name"] for one in document["ranges"]] == ["Ça", "va", "漢字", "ok"]
    assert [one["char_pos"] for one in document["characters"]] == [0, 3, 7, 12]
    for one in document["ranges"]:
        assert text[one["start"] : one["end"]] == one["name"]
        assert one["tokens"]


def test_characters_spans_and_conversions_can_be_chosen(tmp_path):
    document = compute(
        "token_positions", store=tmp_path / "store", text="a cat", characters=[9], spans=["2-5"], convert=[1]
    ).to_json()
    (beyond,) = document["characters"]
    assert (beyond["token"], beyond["starts_at_or_after"]) == (None, None)
    assert beyond["fuzzy"] == len(document["tokens"]) - 1
    assert document["ranges"][0]["name"] == "2-5"
    assert len(document["converted"]) == 1


def test_a_span_is_written_with_or_without_a_name():
    assert read_span("a=b=4-16") == ("a=b", 4, 16)
    assert read_span("4-16") == ("4-16", 4, 16)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"text": ""}, ConfigError, "expected text that is not empty"),
        ({"text": "a " * 9000}, PromptError, "positions"),
        ({"spans": ["Paris"]}, ConfigError, "name=start-end"),
        ({"spans": ["x=40-60"]}, TokenizerError, r"within the 45 characters of the text, found 40\.\.60"),
        ({"spans": ["x=5-5"]}, TokenizerError, "found 5..5"),
        ({"spans": ["other=1-2"]}, TokenizerError, "which are labels themselves"),
    ],
)
def test_wrong_input_gives_one_clear_line(given, error, message):
    with pytest.raises(error, match=message) as found:
        build("token_positions", **given)
    assert isinstance(found.value, MizarrError)
    assert "\n" not in str(found.value)


def test_no_torch_is_needed_at_all(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from mizarr.workflows import compute\n"
        "print(len(compute('token_positions', store=sys.argv[1]).to_json()['tokens']))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) > 8


def test_tables_and_figure_show_the_tokens_and_the_tokenizer(done, tmp_path, capsys):
    (path,) = done.render(Console(width=120), tmp_path)
    printed = capsys.readouterr().out
    assert "Eiffel Tower_final" in printed
    assert "99" in printed and "nearest" in printed
    assert (
        f"tokenizer {done.to_json()['tokenizer'].removeprefix('sha256:')[:12]}".encode() in path.read_bytes()
    )


def test_a_text_of_two_rows_with_wide_characters_is_drawn(tmp_path):
    text = "The quick brown fox jumps over the lazy dog, 漢字 and 🙂 included, in more than one row."
    (path,) = compute("token_positions", store=tmp_path / "store", text=text).draw(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
