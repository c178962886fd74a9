"""Sizes, durations and settings as people type them; how data is printed."""

from __future__ import annotations

import click
import pytest

from mizarr.workflows.cli import run
from mizarr.workflows.cli.options import duration, print_table, settings, size

OPTION = click.Option(["--set"])
CONTEXT = click.Context(click.Command("compute"))


@pytest.mark.parametrize(
    ("typed", "count"), [("500MB", 500 * 10**6), ("2GiB", 2**31), ("1.5e9", 1_500_000_000), (None, None)]
)
def test_sizes_are_bytes(typed, count):
    assert size(CONTEXT, OPTION, typed) == count


@pytest.mark.parametrize(("typed", "seconds"), [("90s", 90), ("24h", 86_400), ("7d", 604_800), ("0s", 0)])
def test_durations_are_seconds(typed, seconds):
    assert duration(CONTEXT, OPTION, typed) == seconds


@pytest.mark.parametrize("typed", ["much", "12 parsecs", "-3GiB", "0", "", "MB"])
def test_a_size_that_is_none_says_what_was_found(typed):
    with pytest.raises(click.BadParameter, match="expected a size") as error:
        size(CONTEXT, OPTION, typed)
    assert repr(typed) in error.value.message


@pytest.mark.parametrize("typed", ["soon", "24", "-1h", "3 parsecs", "", "h"])
def test_a_duration_needs_a_unit_and_a_sign_above_zero(typed):
    with pytest.raises(click.BadParameter, match="expected a duration"):
        duration(CONTEXT, OPTION, typed)


def set_to(*pairs):
    return settings(CONTEXT, OPTION, pairs)


def test_settings_are_json_where_they_are_json_and_text_elsewhere():
    assert set_to("k=3", "on=true", "layers=[0, 2]", "model=specimen", "note=a=b", "empty=") == {
        "k": 3,
        "on": True,
        "layers": [0, 2],
        "model": "specimen",
        "note": "a=b",
        "empty": "",
    }


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["k"], "name=value"),
        (["=3"], "name=value"),
        (["two words=3"], "name=value"),
        (["k=1", "k=2"], "twice"),
    ],
)
def test_settings_without_a_name_or_given_twice_are_refused(pairs, said):
    with pytest.raises(click.BadParameter, match=said):
        set_to(*pairs)


def test_tables_are_aligned_and_show_what_is_missing(capsys):
    print_table(["KEY", "SIZE"], [{"KEY": "ab12", "SIZE": 3}, {"KEY": "c", "SIZE": None}])
    assert capsys.readouterr().out == "KEY   SIZE\nab12  3\nc     -\n"


@pytest.mark.parametrize(
    ("typed", "place"),
    [('["a"', 4), ('["a" "b"]', 5), ('{"a": 1', 7), ('"a', 0), ("[1, 2", 5), ("[INST] hi", 1), (' ["a"', 5)],
)
def test_broken_json_is_no_text(typed, place):
    with pytest.raises(
        click.BadParameter, match=rf"prompts: expected valid JSON, .* at character {place}\); correct it"
    ) as caught:
        set_to(f"prompts={typed}")
    quoted = caught.value.message.partition("as a JSON string: ")[2]
    assert set_to(f"prompts={quoted}") == {"prompts": typed}


@pytest.mark.parametrize(
    "args",
    [
        ["capture", "specimen", "a", "--text", "--hooks", ""],
        ["capture", "specimen", "a", "--hooks", "*", "--column="],
        ["compute", "logit_lens", "--model", ""],
        ["compute", "logit_lens", "--set", "prompts="],
        ["compute", "logit_lens", "--set", "prompts=[]"],
        ["compute", "logit_lens", "--set", 'prompts=""'],
        ["explain", "logit_lens", "--set", "prompts=[]"],
        ["train", "specimen", "a", "--text", "--out", "x", "--set", "layers=[]"],
        ["features", "pages", "out", "--set", "dictionary="],
        ["ls", "--store", ""],
    ],
)
def test_an_empty_value_is_refused_in_a_line(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(args) == 2
    said = capsys.readouterr().err
    assert "empty" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_settings_that_explain_prints_can_be_typed(tmp_path, capsys):
    assert run(["explain", "logit_lens", "--store", str(tmp_path / "store")]) == 0
    lines = [line.split("=", 1) for line in capsys.readouterr().err.splitlines() if "--set" in line]
    typed = [f"{name.split()[-1]}={value.split('  ')[0]}" for name, value in lines]
    args = [text for pair in typed for text in ("--set", pair)]
    assert run(["explain", "logit_lens", "--store", str(tmp_path / "store"), *args]) == 0
