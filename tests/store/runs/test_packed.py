"""Packed prompts: the ragged axis and its digest."""

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mizarr.store.errors import PromptError
from mizarr.store.runs import packed
from mizarr.store.runs.packed import PackedTokens

prompts_of = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=9)


def test_prompts_lie_end_to_end():
    tokens = PackedTokens.from_lists([[5, 6, 7], [8], [9, 9]])
    assert tokens.ids.tolist() == [5, 6, 7, 8, 9, 9]
    assert tokens.row_start.tolist() == [0, 3, 4]
    assert [p.tolist() for p in tokens] == [[5, 6, 7], [8], [9, 9]]
    assert tokens.prompt(-1).tolist() == [9, 9]
    assert (tokens.n_prompts, tokens.n_tokens) == (3, 6)


def test_digest_is_sha256_of_ids_then_row_sizes_little_endian():
    raw = struct.pack("<4i", 5, 6, 7, 8) + struct.pack("<2q", 3, 1)
    assert PackedTokens.from_lists([[5, 6, 7], [8]]).digest == "sha256:" + hashlib.sha256(raw).hexdigest()


def test_digest_tells_where_prompts_are_cut_apart():
    assert PackedTokens.from_lists([[1, 2], [3]]).digest != PackedTokens.from_lists([[1], [2, 3]]).digest


def test_labels_and_integer_width_stay_out_of_the_digest():
    plain = PackedTokens(np.array([1, 2, 3], np.int64), np.array([2, 1], np.int32))
    labelled = PackedTokens.from_lists([[1, 2], [3]], texts=["ab", "c"], offsets=[[(0, 1), (1, 2)], [(0, 1)]])
    assert plain.digest == labelled.digest and plain == labelled and hash(plain) == hash(labelled)


@given(prompts_of)
def test_prompt_digest_is_that_of_the_prompt_alone(prompts):
    tokens = PackedTokens.from_lists(prompts)
    for i, ids in enumerate(prompts):
        assert tokens.prompt_digest(i) == PackedTokens.from_lists([ids]).digest


@given(prompts_of, st.data())
def test_prompt_and_position_of_a_slice_match_the_spelled_out_columns(prompts, data):
    tokens = PackedTokens.from_lists(prompts)
    prompt = [i for i, ids in enumerate(prompts) for _ in ids]
    position = [p for ids in prompts for p in range(len(ids))]
    start = data.draw(st.integers(0, tokens.n_tokens))
    stop = data.draw(st.integers(start, tokens.n_tokens))
    assert tokens.prompt_of(slice(start, stop)).tolist() == prompt[start:stop]
    assert tokens.position_of(slice(start, stop)).tolist() == position[start:stop]


def test_long_id_arrays_are_digested_in_blocks(monkeypatch):
    tokens = PackedTokens.from_lists([list(range(10)), [3]])
    whole = tokens.digest
    monkeypatch.setattr("mizarr.store.runs.packed._BLOCK_TOKENS", 3)
    assert PackedTokens.from_lists([list(range(10)), [3]]).digest == whole


def test_select_packs_the_chosen_prompts_with_their_labels():
    tokens = PackedTokens.from_lists(
        [[5, 6], [8], [9, 7]], texts=["ab", "c", "de"], offsets=[[(0, 1), (1, 2)], [(0, 1)], [(0, 1), (1, 2)]]
    )
    chosen = tokens.select([2, 0])
    assert chosen.ids.tolist() == [9, 7, 5, 6]
    assert chosen.texts == ["de", "ab"]
    assert chosen.char_start.tolist() == [0, 1, 0, 1]
    assert tokens.tokens_of([2, 0]).tolist() == [3, 4, 0, 1]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[1], [], [2]], "prompt 1 has 0 tokens, expected at least one"),
        ([], "at least one prompt"),
        ([[1], [-3]], "prompt 1"),
        ([[2**31]], "prompt 0"),
        ([[1.5]], "prompt 0"),
    ],
)
def test_prompts_that_cannot_be_packed_are_refused_by_index(prompts, said):
    with pytest.raises(PromptError, match=said):
        PackedTokens.from_lists(prompts)


@pytest.mark.parametrize(
    "change",
    [
        {"row_size": [2, 2]},
        {"row_size": [3, 0]},
        {"texts": ["only one"]},
        {"char_start": [0, 1, 0]},
        {"char_start": [0, 1], "char_end": [1, 2]},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(change):
    with pytest.raises(PromptError):
        PackedTokens(**({"ids": np.array([1, 2, 3]), "row_size": np.array([2, 1])} | change))


def test_negative_ids_never_reach_a_key():
    with pytest.raises(PromptError, match="-1"):
        _ = PackedTokens(np.array([1, -1], np.int32), np.array([2])).digest


def test_a_prompt_index_out_of_range_names_the_range():
    with pytest.raises(PromptError, match="numbered 0 to 0"):
        PackedTokens.from_lists([[1]]).prompt(1)


def test_columns_are_read_only_and_the_callers_array_is_not():
    ids = np.array([1, 2], np.int32)
    tokens = PackedTokens(ids, np.array([2]))
    assert not tokens.ids.flags.writeable and ids.flags.writeable
    assert np.shares_memory(tokens.ids, ids)


@pytest.mark.parametrize("begin", [0, 5])
def test_a_mapped_corpus_is_let_go_of_behind_the_one_who_streams_it(begin, tmp_path, monkeypatch):
    """From a size on: the digest is that of ids in memory, wherever the view begins, and of what was mapped
    little stays resident."""
    monkeypatch.setattr(packed, "_BLOCK_TOKENS", 1 << 19)
    monkeypatch.setattr(packed, "_PAGE_OUT_BYTES", 1 << 20)
    drawn = np.random.default_rng(0).integers(0, 999, 3 << 20, dtype=np.int32)
    with (tmp_path / "ids.npy").open("wb") as file:
        np.save(file, drawn)
        file.flush()
        os.fsync(file.fileno())  # what is not on disk yet stays in memory
    ids = np.load(tmp_path / "ids.npy", mmap_mode="r")[begin:]
    tokens = PackedTokens(ids, np.array([len(ids)], np.int64))
    assert tokens.digest == PackedTokens(drawn[begin:], tokens.row_size).digest
    assert tokens.largest == drawn[begin:].max()
    assert tokens.holds(int(drawn[-1]))
    assert not tokens.holds(999)
    assert resident_of(tmp_path / "ids.npy") < drawn.nbytes // 4
    assert np.array_equal(tokens.ids, drawn[begin:])


def resident_of(file):
    """Bytes of a mapped file that this process holds in memory, as Linux tells."""
    maps = Path("/proc/self/smaps")
    if not maps.is_file():
        pytest.skip("needs Linux's smaps")
    told = maps.read_text().partition(f" {file}\n")[2]
    return int(told.partition("Rss:")[2].split()[0]) << 10


def test_the_largest_id_is_told_without_its_sign():
    tokens = PackedTokens(np.array([3, -1, 7], np.int32), np.array([3]))
    assert tokens.largest == 2**32 - 1
    assert not PackedTokens.from_lists([[3, 7]]).holds(5)
