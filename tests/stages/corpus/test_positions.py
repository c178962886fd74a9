"""Places in a text: the mapping between characters and tokens on random texts, and phrases by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import mizarr
from mizarr.stages.corpus.positions import first_difference, phrase_tokens, position_of
from mizarr.stages.forward.text.library import LibraryTokenizer
from mizarr.stages.forward.text.tokens import Encoding, byte_positions, byte_to_char
from mizarr.store.errors import PromptError
from mizarr.store.reading.characters import find_span, find_spans, words

TOKENIZER = LibraryTokenizer(Path(mizarr.__file__).parent / "stages/forward/specimen/tokenizer.json")
TEXTS = st.text(st.sampled_from("abc The\n\té漢字🙂ßñ.,'0̈"), max_size=30)


def encoded(text: str) -> Encoding:
    return TOKENIZER.encode(text)


def cover(encoding: Encoding, char: int) -> list[int]:
    """Brute force: the tokens over a character."""
    return [i for i, (start, end) in enumerate(encoding.offsets) if char in range(start, end)]


@given(TEXTS)
def test_every_character_has_a_token_that_covers_it(text: str):
    encoding = encoded(text)
    for char in range(len(text)):
        assert encoding.char_to_token(char) == cover(encoding, char)[0]
        assert encoding.char_to_token_fuzzy(char) == encoding.char_to_token(char)


@given(TEXTS)
def test_special_tokens_stand_for_no_character_and_never_win_one(text: str):
    encoding = encoded(text)
    added = {i for i, mark in enumerate(encoding.special) if mark}
    assert added, "the specimen's tokenizer adds a BOS"
    for char in range(-2, len(text) + 3):
        for found in (
            encoding.char_to_token(char),
            encoding.char_to_token_fuzzy(char),
            encoding.char_to_token_start(char),
        ):
            assert found not in added
    assert not added & set(encoding.char_range_to_tokens(0, len(text)))


@given(TEXTS, st.integers(-3, 40))
def test_a_character_beyond_the_text_goes_to_the_nearest_token(text: str, char: int):
    encoding = encoded(text)
    found = encoding.char_to_token_fuzzy(char)
    placed = [(i, span) for i, span in enumerate(encoding.offsets) if span[1] > span[0]]
    if not placed:
        assert found is None
    elif not cover(encoding, char):
        distance = {i: abs(char - (start + end) // 2) for i, (start, end) in placed}
        assert found == min(distance, key=lambda i: (distance[i], i))


@given(TEXTS, st.integers(0, 30))
def test_the_next_token_to_start(text: str, char: int):
    encoding = encoded(text)
    later = [i for i, (start, end) in enumerate(encoding.offsets) if end > start >= char]
    assert encoding.char_to_token_start(char) == (later[0] if later else None)


@given(TEXTS, st.integers(0, 30), st.integers(0, 30))
def test_a_range_has_the_tokens_of_its_characters(text: str, start: int, end: int):
    encoding = encoded(text)
    expected = {i for char in range(start, min(end, len(text))) for i in cover(encoding, char)}
    assert set(encoding.char_range_to_tokens(start, end)) == expected
    assert encoding.char_range_to_tokens(start, end) == sorted(expected)


@given(TEXTS)
def test_tokens_map_back_to_the_text_they_came_from(text: str):
    encoding = encoded(text)
    for i in range(len(encoding)):
        start, end = encoding.token_to_char_range(i)
        assert 0 <= start <= end <= len(text)
        at_bytes = encoding.byte_offsets[i]
        assert text.encode()[at_bytes[0] : at_bytes[1]].decode() == text[start:end]
    assert byte_positions(text)[-1] == len(text.encode())
    assert all(byte_to_char(text, byte) == char for char, byte in enumerate(byte_positions(text)))


@given(TEXTS.filter(lambda text: len(text) > 3), st.data())
def test_labels_are_of_the_first_span_and_one_token_of_each_name_is_final(text: str, data: st.DataObject):
    edge = st.integers(0, len(text))
    drawn = data.draw(st.lists(st.tuples(st.sampled_from("xyz"), edge, edge), max_size=4))
    spans = [(name, (min(a, b), max(a, b))) for name, a, b in drawn if a != b]
    encoding = encoded(text)
    labels = encoding.label_spans(spans)
    for i, label in enumerate(labels):
        name = label.removesuffix("_final")
        hits = [n for n, (a, b) in spans if i in encoding.char_range_to_tokens(a, b)]
        assert name == (hits[0] if hits else "other")
    for name in "xyz":
        held = [i for i, label in enumerate(labels) if label.removesuffix("_final") == name]
        assert [i for i in held if labels[i].endswith("_final")] == held[-1:]


@given(TEXTS, st.lists(st.integers(-2, 40), max_size=5))
def test_converted_positions_say_whether_they_were_exact(text: str, chars: list[int]):
    encoding = encoded(text)
    for char, found in zip(chars, encoding.convert_positions(chars), strict=True):
        assert found.char_pos == char
        assert found.exact_match == bool(cover(encoding, char))
        assert found.token_idx == encoding.char_to_token_fuzzy(char)
        assert found.token == (None if found.token_idx is None else encoding.tokens[found.token_idx])


def test_an_empty_text_has_no_tokens_to_map_to():
    (found,) = encoded("").convert_positions([0])
    assert (found.token_idx, found.token, found.exact_match) == (None, None, False)


# -- phrases


def test_a_phrase_is_found_as_whole_words():
    assert find_spans("Parisian Paris", "Paris") == [(9, 14)]
    assert find_spans("aXa a", "a") == [(4, 5)]
    assert find_spans("é café", "é") == [(0, 1)]
    assert find_spans("a, b", ",") == [(1, 2)]
    assert find_span("The Eiffel Tower is", "Eiffel Tower") == (4, 16)


@pytest.mark.parametrize(
    ("text", "phrase", "message"),
    [
        ("the cat the", "the", "occurs at characters 0, 8"),
        ("The Eiffel Tower", "Eifel", "did you mean 'Eiffel'"),
        ("abc", "xyz", r"phrase 'xyz' does not occur as whole words in the prompt 'abc'$"),
        ("abc", "", "the phrase to find in the prompt is empty; give a word of the prompt"),
    ],
)
def test_a_phrase_that_is_not_there_once_is_an_error(text: str, phrase: str, message: str):
    with pytest.raises(PromptError, match=message):
        find_span(text, phrase)


@given(TEXTS)
def test_words_are_runs_of_letters_and_digits(text: str):
    covered = {i for start, end in words(text) for i in range(start, end)}
    assert covered == {i for i, char in enumerate(text) if char.isalnum()}


def test_positions_are_named_by_number_by_end_or_by_phrase():
    encoding = encoded("The Eiffel Tower is located in")
    last = len(encoding) - 1
    assert [position_of(encoding, where) for where in (0, -1, "first", "last")] == [0, last, 0, last]
    tokens = phrase_tokens(encoding, "Eiffel Tower")
    assert "".join(TOKENIZER.decode_token(encoding.ids[i]) for i in tokens).strip() == "Eiffel Tower"
    assert position_of(encoding, "Eiffel Tower") == tokens[-1]
    for where in (last + 1, -last - 2):
        with pytest.raises(PromptError, match=f"from 0 to {last}"):
            position_of(encoding, where)


def test_where_two_prompts_first_differ():
    assert first_difference([1, 2, 3], [1, 5, 6]) == 1
    with pytest.raises(PromptError, match="found 2 and 3 tokens"):
        first_difference([1, 2], [1, 2, 3])
    with pytest.raises(PromptError, match="the same prompt twice"):
        first_difference([1, 2], [1, 2])
