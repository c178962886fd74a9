"""The vocabulary of RWKV World: read as its file means it, matched greedily, and shown without losing a byte.

The public vocabulary is not here; what its published cases show of it is enough to give the same answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mizarr.stages.forward.text.world import WorldTokenizer
from mizarr.store.errors import PromptError, TokenizerError

from ..random_models import save_world_vocabulary, world_lines

SHARED = Path(__file__).parents[4] / ".." / "shared" / "reference" / "recurrent" / "world_tokenizer"
published = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the reference cases in ../shared")
NAME = "<|rwkv_tokenizer_end_of_text|>"
SETTINGS = {
    "added_tokens_decoder": {"0": {"content": NAME, "special": True}},
    "bos_token": NAME,
    "eos_token": "\n\n",
    "chat_template": "{{ bos_token }}{% for message in messages %}User: {{ message.content }}{% endfor %}",
}
TOKENS = ("hel", "hello", " hello", "ab", "abcde", "\n\n", "it's", "日本", b"\xe6\x97", "o<")
"""Ids from 300 on."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return save_world_vocabulary(tmp_path_factory.mktemp("world"), *TOKENS)


@pytest.fixture(scope="module")
def tokenizer(file):
    return WorldTokenizer(file)


@pytest.fixture(scope="module")
def named(file):
    return WorldTokenizer(file, SETTINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("read")


def read(folder, content):
    file = folder / "rwkv_vocab_test.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return WorldTokenizer(file, {})


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("'a b'", b"a b"),
        ("'  '", b"  "),
        ('"it\'s"', b"it's"),
        ("'say \"hi\"'", b'say "hi"'),
        ("'é'", b"\xc3\xa9"),
        (r"'\x80'", b"\xc2\x80"),
        (r"b'\x80'", b"\x80"),
        (r'''b"'\x80"''', b"'\x80"),
        (r"'\u2028'", b"\xe2\x80\xa8"),
        ("'a\u2028\x0b\x85b'", b"a\xe2\x80\xa8\x0b\xc2\x85b"),
        (r"'\U0001F642'", b"\xf0\x9f\x99\x82"),
        (r"'\\n'", b"\\n"),
        (r"'\'\n\r\t\0\a\b\f\v'", b"'\n\r\t\0\a\b\f\v"),
    ],
)
def test_a_token_is_what_its_literal_means(folder, literal, expected):
    found = read(folder, f"1 'x' 1\n7 {literal} {len(expected)}\n")
    assert found.decode_bytes([7]) == expected
    assert found.encode_bytes(expected + b"x") == [7, 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2", "whole numbers"),
        ("two 'b' 1", "whole numbers"),
        ("-2 'b' 1", "whole numbers"),
        ("2 'b' 1.0", "whole numbers"),
        ("2 'b'", "whole numbers"),
        ("0 'b' 1", "id 0 ends a text"),
        ("2 b 1", "a literal in quotes"),
        ("2 'b 1", "a literal in quotes"),
        ("2 'b' 'c' 2", "a literal in quotes"),
        ("2 ['b'] 1", "a literal in quotes"),
        ("2 rb'b' 1", "a literal in quotes"),
        ("2 'é' 1", "the token has 2 bytes"),
        (r"2 '\x80' 1", "the token has 2 bytes"),
        ("2 '' 0", "the token has 0 bytes"),
        (r"2 '\x8' 1", r"truncated \\xXX escape"),
        (r"2 '\ud800' 3", "surrogates not allowed"),
        ("2 b'é' 2", "ASCII"),
        ("1 'b' 1", "the id of an earlier line"),
        ("2 b'a' 1", "the token of an earlier line"),
    ],
)
def test_a_line_that_is_no_token_is_named(folder, line, reason):
    with pytest.raises(
        TokenizerError, match=rf"in line 2 of .*rwkv_vocab_test.txt, found .*{reason}.*; fetch"
    ):
        read(folder, f"1 'a' 1\n{line}\n3 'c' 1\n")


@pytest.mark.parametrize(
    ("content", "found"), [(b"1 '\xff' 1\n", "found 0xff at byte 3"), (b"\n", "found no line")]
)
def test_a_file_that_is_no_vocabulary_says_so(folder, content, found):
    with pytest.raises(TokenizerError, match=found):
        read(folder, content)
    with pytest.raises(TokenizerError, match="No such file or directory; add the file, or pass token ids"):
        WorldTokenizer(folder / "none.txt")


def test_line_ends_and_the_order_of_lines_change_nothing(folder, file, tokenizer):
    lines = file.read_text().split("\n")
    for other in ("\r\n".join(lines), "\n".join(reversed(lines))):
        found = read(folder, other)
        assert found.digest == tokenizer.digest
        assert found.encode("hello\r\n").ids == tokenizer.encode("hello\r\n").ids == [301, 14, 11]


def test_the_digest_is_of_ids_bytes_and_names(folder, tokenizer, named):
    one, other, moved = (read(folder, world_lines(t)).digest for t in ({1: "a"}, {1: "b"}, {2: "a"}))
    assert len({one, other, moved, tokenizer.digest, named.digest}) == 5
    assert one.startswith("sha256:") and len(one) == 71


# Published answers


def cases(name):
    return json.loads((SHARED / name).read_text())


def shown_of(found):
    """What the cases show of a vocabulary: tokens of texts, and single tokens that were decoded."""
    tokens = {}
    for case in found["encode"]:
        data = case["text"].encode()
        spans = zip(case["ids"], case["byte_offsets"], strict=True)
        tokens |= {token: data[start:end] for token, (start, end) in spans}
    singles = (case for case in found["decode"] if len(case["ids"]) == len(case["bytes_hex"]) // 2)
    for case in singles:
        tokens |= zip(case["ids"], (bytes([byte]) for byte in bytes.fromhex(case["bytes_hex"])), strict=True)
    return tokens


def check_cases(tokenizer, found):
    for case in found["encode"]:
        if "error" in case:
            with pytest.raises(TokenizerError) as caught:
                tokenizer.encode(case["text"])
            assert case["error"] in str(caught.value)
            continue
        encoded = tokenizer.encode(case["text"])
        assert encoded.ids == case["ids"]
        assert [list(span) for span in encoded.byte_offsets] == case["byte_offsets"]
        assert tokenizer.encode_bytes(case["text"].encode()) == case["ids"]
        assert tokenizer.decode(case["ids"], errors="strict") == case["text"]
    for case in found["decode"]:
        assert tokenizer.decode_bytes(case["ids"]).hex() == case["bytes_hex"]
        assert tokenizer.decode(case["ids"]) == case["replace"]
        if case["strict"] is None:
            with pytest.raises(
                TokenizerError, match=r"expected token ids whose joined bytes are UTF-8, found 0x"
            ):
                tokenizer.decode(case["ids"], errors="strict")
        else:
            assert tokenizer.decode(case["ids"], errors="strict") == case["strict"]


@published
def test_the_mini_vocabulary_gives_the_published_answers():
    tokenizer, found = WorldTokenizer(SHARED / "mini_vocab.txt", {}), cases("mini_cases.json")
    check_cases(tokenizer, found)
    assert tokenizer.vocab_size == found["max_id"] + 1
    held = [token for token in range(1, tokenizer.vocab_size) if tokenizer.decode_token(token)]
    assert len(held) == found["n_tokens"]
    assert max(len(tokenizer.decode_bytes([t])) for t in held) == found["longest_token_bytes"]


@published
def test_what_is_shown_of_the_public_vocabulary_gives_its_published_answers(folder):
    """The longest match in a whole vocabulary is the longest in any part that holds it."""
    found = cases("world_v20230424_cases.json")
    shown = shown_of(found)
    assert len(shown) == 96 and len({token[:1] for token in shown.values()}) < 70, "tokens compete"
    check_cases(read(folder, world_lines(shown)), found)


# Matching


VOCABULARIES = st.sets(st.binary(min_size=1, max_size=5).map(lambda b: bytes(x % 4 + 97 for x in b)))


@given(extra=VOCABULARIES, data=st.binary(max_size=60).map(lambda b: bytes(x % 5 + 97 for x in b)))
def test_the_longest_token_is_taken_at_every_place(folder, extra, data):
    """Against a search of the whole vocabulary; "e" is in no token, and named where it first stands."""
    tokens = dict(enumerate(sorted(extra | {b"a", b"b", b"c", b"d"}), 5))
    tokenizer, expected, at = read(folder, world_lines(tokens)), [], 0
    while at < len(data):
        fitting = [token for token in tokens if data.startswith(tokens[token], at)]
        if not fitting:
            with pytest.raises(TokenizerError, match=rf"no token at byte {at} \(0x65\)"):
                tokenizer.encode_bytes(data)
            return
        expected.append(max(fitting, key=lambda token: len(tokens[token])))
        at += len(tokens[expected[-1]])
    assert tokenizer.encode_bytes(data) == expected


@given(data=st.binary(max_size=80))
def test_any_bytes_come_back_from_their_tokens(tokenizer, data):
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


@given(text=st.text(st.sampled_from("helo ab\n日本é🙂x"), max_size=40) | st.text(max_size=20))
def test_offsets_cover_the_text_in_bytes_and_in_whole_characters(tokenizer, text):
    found, data = tokenizer.encode(text), text.encode()
    owner = [i for i, char in enumerate(text) for _ in char.encode()]
    starts = {i for i in range(len(data)) if not i or owner[i] != owner[i - 1]} | {len(data)}
    edges = [0, *(end for _, end in found.byte_offsets)]
    assert [start for start, _ in found.byte_offsets] == edges[:-1] and edges[-1] == len(data)
    assert b"".join(data[s:e] for s, e in found.byte_offsets) == tokenizer.decode_bytes(found.ids) == data
    assert found.offsets == [(owner[s], owner[e - 1] + 1) for s, e in found.byte_offsets]
    assert found.splits_character == [not {s, e} <= starts for s, e in found.byte_offsets]
    assert tokenizer.decode(found.ids) == text and not any(found.special)


def test_a_long_match_that_fails_leaves_the_longest_before_it(tokenizer):
    assert tokenizer.encode("abcdx").ids == [303, 100, 101, 121]
    assert tokenizer.encode("helo").tokens == ["hel", "o"]


def test_a_text_that_is_none_is_refused(tokenizer):
    with pytest.raises(PromptError, match=r"half of a surrogate pair .* at character 1; remove this"):
        tokenizer.encode("a\ud83d")


# What every tokenizer answers


def test_a_character_of_several_tokens_has_them_all(tokenizer):
    found = tokenizer.encode("a日語 日本")
    assert found.tokens == ["a", r"\xe6\x97", r"\xa5", r"\xe8", r"\xaa", r"\x9e", " ", "日本"]
    assert found.offsets == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (2, 3), (3, 4), (4, 6)]
    assert found.byte_offsets[:4] == [(0, 1), (1, 3), (3, 4), (4, 5)]
    assert found.char_range_to_tokens(1, 2) == [1, 2] and found.char_to_token(2) == 3
    assert found.splits_character == [False, True, True, True, True, True, False, False]


def test_broken_bytes_are_shown_escaped_and_tell_tokens_apart(tokenizer):
    assert tokenizer.vocab_size == len(tokenizer.vocabulary) == 310
    assert tokenizer.vocabulary[129:257] == [rf"\x{byte:02x}" for byte in range(128, 256)]
    assert tokenizer.vocabulary[65:68] == ["@", "A", "B"] and tokenizer.vocabulary[305] == "\n\n"
    assert tokenizer.to_str_tokens("日") == [r"\xe6\x97", r"\xa5"]
    assert tokenizer.decode([308]) == "\N{REPLACEMENT CHARACTER}"
    assert [tokenizer.decode_token(token) for token in (280, 310, -1)] == ["", "", ""]
    for token in (280, 310, -1):
        with pytest.raises(TokenizerError, match=rf"expected ids of the 310 tokens of .*, found {token};"):
            tokenizer.decode([1, token])


def test_id_0_ends_a_text_and_is_no_part_of_it(tokenizer):
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.decode_token(0)) == (0, None, "<|endoftext|>")
    assert tokenizer.decode([301, 0], keep_special=False) == "hello"
    assert tokenizer.decode([301, 0]) == "hello<|endoftext|>"
    assert tokenizer.decode_bytes([301, 0]) == b"hello"
    assert 0 not in tokenizer.encode("<|endoftext|>").ids, "the vocabulary alone names nothing"


def test_names_of_the_settings_are_read_in_a_text(named):
    assert (named.bos_id, named.eos_id, named.decode_token(0)) == (0, 305, NAME)
    found = named.encode(f"hel{NAME}lo")
    assert found.ids == [300, 0, 109, 112] and found.offsets[1] == (3, 3 + len(NAME))
    assert named.encode(f"xo{NAME}").ids == [121, 112, 0], "no token reaches into a name"
    assert named.decode(found.ids) == found.text and named.decode(found.ids, keep_special=False) == "hello"
    assert named.encode_raw(named.chat("hello")).ids == [0, *named.encode("User: hello").ids]


def test_no_bos_is_added_unless_it_is_asked_for(tokenizer, named):
    assert tokenizer.encode("hello").ids == named.encode("hello").ids == [301]
    found = named.encode("é hello", prepend_bos=True)
    assert found.ids == [0, 196, 170, 302] and found.special == [True, False, False, False]
    assert found.byte_offsets == [(0, 0), (0, 1), (1, 2), (2, 8)]
    assert found.offsets == [(0, 0), (0, 1), (0, 1), (1, 7)]
    with pytest.raises(TokenizerError, match="expected a BOS token"):
        tokenizer.encode("hello", prepend_bos=True)


def test_a_word_is_one_token_with_its_space_or_bare(tokenizer):
    assert tokenizer.find_token_id("hello") == 302 and tokenizer.find_token_id("it's") == 306
    with pytest.raises(TokenizerError, match=r"to be one token of .*\['hel', 'p'\]"):
        tokenizer.find_token_id("help")


def test_many_texts_encode_as_each_alone(tokenizer):
    texts = ["hello", "", "日本 e\u0301"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
