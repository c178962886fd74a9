"""Tokens in a text: every question about a character has one answer."""

from __future__ import annotations

import pytest

from mizarr.stages.forward.text.tokens import Encoding, byte_positions, byte_to_char
from mizarr.store.errors import TokenizerError

# "ab cd" behind a BOS, by hand: a[0,1) b[1,2) ␣cd[2,5), then an EOS.
BY_HAND = Encoding(
    [0, 5, 6, 7, 1],
    ["<s>", "a", "b", "Ġcd", "</s>"],
    [(0, 0), (0, 1), (1, 2), (2, 5), (0, 0)],
    [True, False, False, False, True],
    "ab cd",
)


def test_characters_find_their_tokens_and_specials_never_compete():
    assert [BY_HAND.char_to_token(c) for c in (0, 1, 2, 4, 5, -1)] == [1, 2, 3, 3, None, None]
    assert [BY_HAND.char_to_token_fuzzy(c) for c in (0, 4, 99, -3)] == [1, 3, 3, 1]
    assert [BY_HAND.char_to_token_start(c) for c in (0, 1, 3)] == [1, 2, None]
    assert BY_HAND.char_range_to_tokens(0, 3) == [1, 2, 3] and BY_HAND.char_range_to_tokens(2, 2) == []
    assert BY_HAND.token_to_char_range(3) == (2, 5) and BY_HAND.token_to_char_range(0) == (0, 0)
    with pytest.raises(
        TokenizerError, match=r"expected a token position in 0..4 of a text with 5 tokens, found 5"
    ):
        BY_HAND.token_to_char_range(5)


def test_the_earlier_of_two_tokens_as_near_is_taken():
    gap = Encoding([1, 2], ["a", "b"], [(0, 2), (4, 6)], [False, False], "a   b ")
    assert gap.char_to_token(3) is None and gap.char_to_token_fuzzy(3) == 0


def test_tokens_that_share_a_character_split_it():
    """a, then the two halves of é, then é and b in one."""
    halves = Encoding(
        [0, 1, 2, 3, 4],
        ["<s>", "a", "?", "?", "éb"],
        [(0, 0), (0, 1), (1, 2), (1, 2), (2, 4)],
        [True] + [False] * 4,
        "aééb",
    )
    assert halves.splits_character == [False, False, True, True, False]
    assert halves.byte_offsets == [(0, 0), (0, 1), (1, 3), (1, 3), (3, 6)]


def test_an_empty_text_has_no_nearest_token():
    empty = Encoding([0], ["<s>"], [(0, 0)], [True], "")
    assert empty.char_to_token_fuzzy(0) is None and empty.char_to_token_start(0) is None


def test_converted_positions_say_whether_a_token_covers_them():
    found = BY_HAND.convert_positions([1, 99])
    assert [(f.char_pos, f.token_idx, f.token, f.exact_match) for f in found] == [
        (1, 2, "b", True),
        (99, 3, "Ġcd", False),
    ]


def test_a_name_has_one_final_token_however_many_spans_it_stands_for():
    assert BY_HAND.label_spans([("x", (0, 1)), ("x", range(2, 5))]) == [
        "other",
        "x",
        "other",
        "x_final",
        "other",
    ]
    assert BY_HAND.label_spans([("x", (0, 2)), ("y", (1, 5))]) == [
        "other",
        "x",
        "x_final",
        "y_final",
        "other",
    ]


@pytest.mark.parametrize("span", [(0, 6), (3, 3), (-1, 2)])
def test_a_span_outside_the_text_is_an_error(span):
    with pytest.raises(
        TokenizerError, match=r"'x' within the 5 characters of the text, found .*, not byte offsets"
    ):
        BY_HAND.label_spans([("x", span)])


@pytest.mark.parametrize("name", ["other", "x_final"])
def test_a_span_cannot_be_named_like_a_label(name):
    with pytest.raises(TokenizerError, match="choose another name"):
        BY_HAND.label_spans([(name, (0, 1))])


def test_bytes_and_characters_convert_both_ways():
    assert byte_positions("né!") == [0, 1, 3, 4]
    assert [byte_to_char("né!", byte) for byte in range(5)] == [0, 1, 1, 2, 3]
    with pytest.raises(TokenizerError, match=r"expected a byte position in 0..4 of the text, found 5"):
        byte_to_char("né!", 5)
