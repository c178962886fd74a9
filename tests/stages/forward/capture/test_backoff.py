"""A pass that does not fit in memory is run again in smaller batches; nothing else changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mizarr import HookSpec, Model, capture, open_store
from mizarr.stages.forward.capture.backoff import is_out_of_memory
from mizarr.store.errors import ConfigError, PlanError
from mizarr.store.runs.packed import PackedTokens
from mizarr.workflows.cli.group import run

RESID = HookSpec().capture("blocks.*.hook_resid_post")
CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


@pytest.fixture(scope="module")
def model():
    return Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(2)
    return PackedTokens.from_lists(
        [rng.integers(0, 100, size).tolist() for size in (12, 12, 24, 24, 24, 24, 48, 9)]
    )


def too_small(monkeypatch, most, error):
    """Memory that holds batches of at most so many positions; returns what was tried."""
    tried, stream = [], Model.stream_batch

    def limited(self, rows, spec, want, sink):
        tried.append(len(rows) * len(rows[0]))
        if tried[-1] > most:
            sink(spec.captures[0], torch.full((len(rows), len(rows[0]), 192), torch.nan))
            raise error
        return stream(self, rows, spec, want, sink)

    monkeypatch.setattr(Model, "stream_batch", limited)
    return tried


@pytest.mark.parametrize("error", [CPU, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_batches_are_halved_until_they_fit_and_stay_so(model, tokens, tmp_path, monkeypatch, capfd, error):
    plain = capture(model, tokens, RESID, store=open_store(tmp_path / "a"), progress=False)
    tried = too_small(monkeypatch, 48, error)
    store = open_store(tmp_path / "b")
    found = capture(model, tokens, RESID, store=store, batch_tokens=192, segment_tokens=96)
    np.testing.assert_array_equal(found["resid_post"], plain["resid_post"])
    assert capfd.readouterr().err.count("out of memory with") == 1
    # Segments of prompts 12 12 24 24 24 and 24 48 9: the three of 24 fail together, and half of 72 is 36.
    # What has fewer than 32 positions is computed twice, or four times.
    assert tried == [48, 72, 48, 48, 48, 36, 48, 48]
    (note,) = [note for note in store.provenance(next(store.records())) if "batch_tokens_lowered_to" in note]
    assert note["batch_tokens_lowered_to"] == 36
    assert store.verify() == []


def test_a_prompt_that_does_not_fit_alone_ends_the_capture_in_one_line(model, tokens, tmp_path, monkeypatch):
    too_small(monkeypatch, 40, CPU)
    with pytest.raises(PlanError, match="one prompt of 24 tokens"):
        capture(model, tokens, RESID, store=open_store(tmp_path), progress=False)


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_log_has_a_line_for_every_segment(model, tokens, tmp_path):
    log = tmp_path / "log.jsonl"
    store = open_store(tmp_path / "store")
    for _ in range(2):  # the second time nothing is computed, and nothing said
        capture(model, tokens, RESID, store=store, segment_tokens=48, progress=False, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["done"] for line in lines] == [48, 96, 144, 177]
    assert {line["total"] for line in lines} == {177}
    per_token = 6 * 192 * 4
    assert [line["bytes"] for line in lines] == [line["done"] * per_token for line in lines]
    assert lines[-1]["seconds_left"] == 0
    for line in lines:
        assert line["rate"] == pytest.approx(line["done"] / line["seconds"], rel=0.05, abs=50)


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_computed(
    model, tokens, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Model, "stream_batch", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(ConfigError, match="cannot be written"):
        capture(model, tokens, RESID, store=open_store(tmp_path / "s"), log=tmp_path / "no" / "log")
    command = [
        "capture",
        "specimen",
        "a b",
        "--text",
        "--hooks",
        "hook_embed",
        "--store",
        str(tmp_path / "s"),
    ]
    assert run([*command, "--log", str(tmp_path / "no" / "log")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("given", "said"), [("first", "'last'"), ("mask.npy", "one bool per token")])
def test_positions_on_the_command_line_are_refused_in_one_line(tmp_path, capsys, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    np.save("mask.npy", np.ones(99, bool))
    command = ["capture", "specimen", "a b", "--text", "--hooks", "hook_embed", "--store", "s"]
    assert run([*command, "--positions", given]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not (tmp_path / "s").exists()
    assert run([*command, "--positions", "last"]) == 0
    assert "embed__last" in capsys.readouterr().out
