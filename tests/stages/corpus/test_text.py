"""Wrapping and counting characters, checked on lines one can count by eye."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mizarr.stages.corpus.text import character_counts, pack_lines, wrap
from mizarr.store.errors import PromptError

words = st.lists(st.text("abcé漢", min_size=1, max_size=12), min_size=1, max_size=60)


def test_old_newlines_become_spaces_before_wrapping():
    assert wrap("one\ntwo three\n\nfour", 9) == "one two\nthree\nfour"


@given(words, st.integers(1, 30))
def test_a_line_exceeds_the_width_only_for_one_long_word_and_no_word_is_lost(text: list[str], width: int):
    lines = wrap(" ".join(text), width).split("\n")
    assert [word for line in lines for word in line.split()] == text
    for line in lines:
        assert len(line) <= width or " " not in line


@given(words, st.integers(1, 30))
def test_wrapping_is_greedy(text: list[str], width: int):
    lines = wrap(" ".join(text), width).split("\n")
    for line, following in pairwise(lines):
        assert len(line) + 1 + len(following.split()[0]) > width


def test_a_token_counts_the_characters_before_it_on_its_line():
    #       0123 4567890
    text = "the\ncat sat"
    starts = [0, 3, 4, 7, 8]  # "the", "\n", "cat", " ", "sat"
    assert character_counts(text, starts).tolist() == [0, 3, 0, 3, 4]


def test_characters_are_code_points_not_bytes():
    assert character_counts("é漢字 x\nb", [4, 5, 6]).tolist() == [4, 5, 0]


def test_tokens_outside_the_text_have_no_count():
    assert character_counts("ab", [-1, 0, 1]).tolist() == [-1, 0, 1]


def test_offsets_into_another_text_are_refused():
    with pytest.raises(PromptError, match="in characters, not bytes"):
        character_counts("ab", [3])


def test_pieces_are_whole_lines_that_fit_the_context_and_join_to_the_text():
    text = "aaa\nbb\nc\ndddd\ne"
    starts = list(range(len(text)))  # a token per character: lines of 4, 3, 2, 5, 1 tokens
    assert pack_lines(text, starts, 7) == ["aaa\nbb\n", "c\ndddd\n", "e"]
    assert pack_lines(text, starts, 100) == [text]


def test_a_line_longer_than_the_context_is_refused():
    with pytest.raises(PromptError, match="smaller width"):
        pack_lines("abcdef\ng", range(8), 5)
