"""Sizes, durations and settings as people type them; how data is printed."""

from __future__ import annotations

import click
import pytest

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
