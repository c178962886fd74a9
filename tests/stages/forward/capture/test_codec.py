"""Captures that are written compressed: the same keys, contents and numbers as plain ones, reused alike."""

from __future__ import annotations

import json

import pytest
import xarray as xr

from mizarr import capture, open_store
from mizarr.pipeline import plan
from mizarr.stages.forward.capture import capture as planning
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store.errors import ConfigError
from mizarr.store.runs.entries import Entry
from mizarr.workflows.cli import run

HOOKS = ["blocks.*.hook_resid_post", "blocks.*.attn.hook_z"]
OPTIONS = {"segment_tokens": 16, "batch_tokens": 32, "progress": False}


def made(model, tokens, folder, **options):
    store = open_store(folder, durability="process")
    return store, capture(model, tokens, HOOKS, store=store, **{**OPTIONS, **options}).load()


def contents(store):
    return {record.key: (record.label, record.content) for record in store.records()}


def codecs(entry):
    return {entry.layout(name).codec for name in entry.specs}


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_a_compressed_capture_is_the_plain_one_in_other_bytes(model, tokens, tmp_path, storage):
    plain, expected = made(model, tokens, tmp_path / "plain", storage_dtype=storage)
    store, found = made(model, tokens, tmp_path / "zstd", storage_dtype=storage, codec="zstd")
    assert contents(store) == contents(plain)
    xr.testing.assert_identical(found, expected)
    (entry,) = store.entries()
    assert codecs(entry) == {"zstd"}
    assert store.verify() == []
    for codec in (None, "none", "zstd"):  # whichever is asked next, it is there
        again = CaptureNode(model, tokens, HOOKS, storage_dtype=storage, codec=codec)
        assert again.status(store).is_cached
        assert "cached" in str(plan(again, store))


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ("zstd", None, "zstd"),
        ("zstd", "none", ""),
        (None, "zstd", "zstd"),
        ("zstd", "zstd", "zstd"),
        (None, None, ""),
    ],
)
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_a_run_that_begins_as_another_takes_it_over_whatever_the_codecs(
    model, tokens, tmp_path, monkeypatch, first, then, kept, storage
):
    monkeypatch.setattr(planning, "WORTH_A_LOOK", 1)
    rows, take_over = [], Entry.take_over
    monkeypatch.setattr(Entry, "take_over", lambda *told: rows.append(take_over(*told)) or rows[-1])
    store, _ = made(model, tokens.select(range(5)), tmp_path / "a", codec=first, storage_dtype=storage)
    before = contents(store)
    _, found = made(model, tokens, tmp_path / "a", codec=then, storage_dtype=storage)
    plain, expected = made(model, tokens, tmp_path / "b", storage_dtype=storage)
    assert rows == [32]  # of the first 47 tokens, in segments of 16
    xr.testing.assert_identical(found, expected)
    assert contents(store) == before | contents(plain)
    (entry,) = (each for each in store.entries() if each.tokens.n_tokens == tokens.n_tokens)
    assert codecs(entry) == {kept}
    assert store.verify() == []


def test_a_damaged_start_is_computed_instead_of_recoded(model, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "WORTH_A_LOOK", 1)
    store, _ = made(model, tokens.select(range(5)), tmp_path / "a")
    (entry,) = store.entries()
    file = store.path / entry.path / "resid_post/c/1/0/0"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 8
    file.chmod(0o644)
    file.write_bytes(raw)
    _, found = made(model, tokens, tmp_path / "a", codec="zstd")
    _, expected = made(model, tokens, tmp_path / "b")
    xr.testing.assert_identical(found, expected)


def test_a_codec_there_is_not_is_refused(model, tokens):
    with pytest.raises(ConfigError, match="among zstd, none, found 'gzip'"):
        CaptureNode(model, tokens, HOOKS, codec="gzip")


@pytest.mark.parametrize("damaged", ["resid_post", "resid_post__scale"])
def test_numbers_and_their_scales_are_recoded_together_or_computed(
    model, tokens, tmp_path, monkeypatch, damaged
):
    """Of a cell in two files: one that is not what was recorded, whichever, and neither is taken over."""
    monkeypatch.setattr(planning, "WORTH_A_LOOK", 1)
    store, _ = made(model, tokens.select(range(5)), tmp_path / "a", storage_dtype="int8")
    (entry,) = store.entries()
    (file, *_) = sorted(p for p in (store.path / entry.path / damaged / "c").rglob("*") if p.is_file())
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 8
    file.chmod(0o644)
    file.write_bytes(raw)
    store, found = made(model, tokens, tmp_path / "a", storage_dtype="int8", codec="zstd")
    plain, expected = made(model, tokens, tmp_path / "b", storage_dtype="int8")
    xr.testing.assert_identical(found, expected)
    assert contents(store).items() >= contents(plain).items()
    (whole,) = (each for each in store.entries() if each.tokens.n_tokens == tokens.n_tokens)
    assert not [each for each in store.verify() if whole.path in str(each)]


def test_the_command_takes_it_and_a_second_capture_finds_the_run(tmp_path, capsys):
    asked = [
        "capture",
        "specimen",
        "It was the best of times",
        "--text",
        "--hooks",
        "blocks.1.hook_resid_post",
    ]
    asked += ["--store", str(tmp_path / "s"), "--json", "--quiet"]
    assert run([*asked, "--codec", "zstd"]) == 0
    first = capsys.readouterr().out
    (entry,) = open_store(tmp_path / "s").entries()
    assert codecs(entry) == {"zstd"}
    assert run(asked) == 0
    again = capsys.readouterr().out
    assert [json.loads(each)["run"] for each in (first, again)] == [entry.digest] * 2
    assert run([*asked, "--codec", "gzip"]) == 2
    assert "zstd" in capsys.readouterr().err
