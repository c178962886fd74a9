"""Wrapped prose through a model, averaged by character count, against a plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mizarr.stages.corpus.text import character_counts, token_counts, wrap
from mizarr.stages.geometry import character_count
from mizarr.store import open_store
from mizarr.store.errors import MizarrError
from mizarr.workflows import build, compute
from mizarr.workflows.material.line_corpus import line_corpus
from mizarr.workflows.subject import Subject

WIDTHS = (20, 27)
SETTINGS = {"widths": WIDTHS, "components": 3, "min_tokens": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("helix") / "store"


@pytest.fixture(scope="module")
def done(tiny_model: Path, prose_file: Path, store: Path):
    return compute(
        "character_count_helix",
        store=store,
        model=str(tiny_model),
        text=str(prose_file),
        **SETTINGS,
    )


def test_prompts_start_at_line_starts_fit_the_context_and_lose_no_text(tiny_model: Path, prose_file: Path):
    text = prose_file.read_text()
    tokens = line_corpus(Subject(str(tiny_model)), [text], WIDTHS, context=64)
    assert tokens.n_prompts > len(WIDTHS)  # the context forced a cut
    assert tokens.row_size.max() <= 64
    whole = [wrap(text, width) for width in WIDTHS]
    for wrapped in whole:
        pieces = sorted((p for p in tokens.texts if p in wrapped), key=wrapped.index)
        assert "".join(pieces) == wrapped
    assert sum(map(len, tokens.texts)) == sum(map(len, whole))


def test_prompts_of_all_widths_are_mixed(tiny_model: Path, prose_file: Path):
    """A control that is shuffled within a stretch of the corpus is shuffled among all widths."""
    text = prose_file.read_text()
    tokens = line_corpus(Subject(str(tiny_model)), [text], (20, 60), context=64)
    narrow = [max(map(len, piece.split("\n"))) <= 20 for piece in tokens.texts]
    half = len(narrow) // 2
    assert 0 < sum(narrow[:half]) < half
    assert 0 < sum(narrow[half:]) < len(narrow) - half


def test_counts_of_cut_text_are_those_of_the_whole_line(tiny_model: Path, prose_file: Path):
    subject = Subject(str(tiny_model))
    text = wrap(prose_file.read_text(), 27)
    tokens = line_corpus(subject, [prose_file.read_text()], (27,), context=64)
    counts = token_counts(tokens, line_breaks=True)
    whole = character_counts(text, subject.starts(text))
    pieces = sorted(range(tokens.n_prompts), key=lambda i: text.index(tokens.texts[i]))
    found = np.concatenate([counts[tokens.row(i)] for i in pieces])
    assert found[found >= 0].tolist() == whole.tolist()
    assert (counts == -1).sum() == tokens.n_prompts  # one BOS each
    first = counts[tokens.row_start + 1]
    assert first.tolist() == [0] * tokens.n_prompts


def test_line_breaks_take_no_part_unless_asked(tiny_model: Path, prose_file: Path):
    tokens = line_corpus(Subject(str(tiny_model)), [prose_file.read_text()], (27,), context=64)
    with_breaks, without = (token_counts(tokens, line_breaks=on) for on in (True, False))
    is_break = np.concatenate(
        [
            ["\n" in text[a:b] for a, b in zip(tokens.char_start[row], tokens.char_end[row], strict=True)]
            for text, row in zip(tokens.texts, map(tokens.row, range(tokens.n_prompts)), strict=True)
        ]
    )
    assert is_break.sum() == sum(text.count("\n") for text in tokens.texts)
    np.testing.assert_array_equal(without[~is_break], with_breaks[~is_break])
    assert (without[is_break] == -1).all()


def test_means_are_those_of_a_plain_loop_over_the_model(done, tiny_model: Path, prose_file: Path):
    tokens = line_corpus(Subject(str(tiny_model)), [prose_file.read_text()], WIDTHS, context=64)
    counts = token_counts(tokens, line_breaks=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    with torch.no_grad():
        states = [
            model(torch.tensor(tokens.prompt(i)[None]).long(), output_hidden_states=True).hidden_states[2][0]
            for i in range(tokens.n_prompts)
        ]
    states = np.concatenate([s.numpy() for s in states])  # after layer 1
    for count in (1, 5, 12):
        expected = states[counts == count].mean(axis=0)
        np.testing.assert_allclose(done.geometry["mean"].sel(layer=1, count=count), expected, atol=1e-4)
    assert int(done.geometry["n"].sum()) == ((counts >= 1) & (counts <= 27)).sum()


def test_json_has_the_fields_of_the_original(done):
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert document["provenance"]["keys"].keys() == {"geometry", "control", "decodability"}
    assert [part["layer"] for part in document["results"]] == [0, 1, 2]
    part = document["results"][1]
    assert part["max_char_count"] == 27
    assert part["line_widths"] == list(WIDTHS)
    assert len(part["explained_variance"]) == 3
    assert part["total_variance_top6"] == pytest.approx(sum(part["explained_variance"]))
    n = len(part["projections"])
    assert np.shape(part["cosine_similarity"]) == (n, n)
    assert part["projections"][0]["char_count"] == 1
    assert len(part["projections"][0]["pc"]) == 3
    assert part["centred"] is True


def test_uncentred_projections_are_the_centred_ones_plus_what_json_says(done, tiny_model, prose_file, store):
    raw = compute(
        "character_count_helix",
        store=store,
        model=str(tiny_model),
        text=str(prose_file),
        centre=False,
        **SETTINGS,
    )
    centred, uncentred = (w.to_json()["results"][2] for w in (done, raw))
    shifted = np.array([p["pc"] for p in centred["projections"]]) + centred["mean_projection"]
    np.testing.assert_allclose(shifted, [p["pc"] for p in uncentred["projections"]], atol=1e-9)
    assert uncentred["centred"] is False


def test_a_killed_sweep_goes_on_with_the_layer_it_was_at(tiny_model, prose_file, tmp_path, monkeypatch):
    given = {
        "store": tmp_path / "store",
        "model": str(tiny_model),
        "text": str(prose_file),
        "threads": 1,
        **SETTINGS,
    }
    sums, calls = character_count._sums_by_count, []

    def killed(states, *rest):
        calls.append(int(states["layer"]))
        if len(calls) == 2:
            raise RuntimeError("killed")
        return sums(states, *rest)

    monkeypatch.setattr(character_count, "_sums_by_count", killed)
    with pytest.raises(MizarrError, match="killed"):
        compute("character_count_helix", **given)
    finished = set(calls) - {calls[1]}
    calls.clear()
    monkeypatch.setattr(
        character_count,
        "_sums_by_count",
        lambda states, *rest: calls.append(int(states["layer"])) or sums(states, *rest),
    )
    compute("character_count_helix", **given)
    assert set(calls) == {0, 1, 2} - finished
    assert len(finished) in (1, 2)


def test_fewer_layers_are_a_selection_of_what_is_stored(done, tiny_model, prose_file, store):
    given = {"store": store, "model": str(tiny_model), "text": str(prose_file), **SETTINGS}
    one = compute("character_count_helix", layers=[1], **given)
    np.testing.assert_array_equal(one.geometry["mean"].sel(layer=1), done.geometry["mean"].sel(layer=1))


def test_the_page_is_drawn_for_the_layer_shown(done, tmp_path: Path):
    (page,) = done.draw(tmp_path / "figures")
    assert page.name == f"character_count_helix_L{done.layer}.png"
    assert page.stat().st_size > 50_000


def test_planning_loads_no_weights(tiny_model: Path, prose_file: Path, monkeypatch: pytest.MonkeyPatch):
    from mizarr.stages.forward.networks import weights

    monkeypatch.setattr(weights, "load", None)
    workflow = build("character_count_helix", model=str(tiny_model), text=str(prose_file), **SETTINGS)
    assert set(workflow.nodes) == {"geometry", "control", "decodability"}


def test_layers_are_computed_so_many_at_a_time_and_the_same_command_goes_on(
    tiny_model: Path, prose_file: Path, store: Path, done, tmp_path: Path
):
    """Each call adds a layer, leaves a line of it, and ends with what one call for all gives."""
    own, lines = tmp_path / "store", tmp_path / "lines"
    given = {"model": str(tiny_model), "text": str(prose_file), "stop": 1, "jsonl": str(lines), **SETTINGS}
    for layers in ([0], [0, 1], [0, 1, 2], [0, 1, 2]):
        found = compute("character_count_helix", store=own, **given)
        assert found.geometry["layer"].values.tolist() == layers
        assert sorted(path.name for path in lines.iterdir()) == [
            f"layer_{layer:02d}_variance.jsonl" for layer in layers
        ]
    np.testing.assert_allclose(found.geometry["mean"].values, done.geometry["mean"].values, atol=1e-6)
    for told in done.to_json()["results"]:
        (line,) = (lines / f"layer_{told['layer']:02d}_variance.jsonl").read_text().splitlines()
        written = json.loads(line)
        assert written["layer"] == told["layer"] and written["max_tokens"] == 64
        assert written["explained_variance"] == pytest.approx(told["explained_variance"], abs=1e-6)
        assert written["total_variance_top6"] == pytest.approx(told["total_variance_top6"], abs=1e-6)


def test_a_run_killed_in_a_layer_keeps_the_lines_of_those_before(
    tiny_model: Path, prose_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines = tmp_path / "lines"
    given = {"model": str(tiny_model), "text": str(prose_file), "jsonl": str(lines), **SETTINGS}
    planned, written = build("character_count_helix", **given), type(build("character_count_helix"))._write

    def killed(self, layer: int, *rest) -> None:
        if layer == 1:
            raise KeyboardInterrupt
        written(self, layer, *rest)

    monkeypatch.setattr(type(planned), "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        planned.run(open_store(tmp_path / "store"))
    assert [path.name for path in lines.iterdir()] == ["layer_00_variance.jsonl"]


def test_the_published_protocol_is_what_is_left_at_its_default():
    asked = {"preset": "gemma2-2b", "model": "specimen-rwkv", "characters": 3000}
    given = build("character_count_helix", **asked).settings
    assert given.widths == tuple(range(20, 151, 10)) and given.max_count == 150
    assert given.model == "specimen-rwkv" and given.line_breaks
    assert build("character_count_helix", **asked, widths=[30]).settings.widths == (30,)
    with pytest.raises(MizarrError, match="did you mean 'gemma2-2b'"):
        build("character_count_helix", preset="gemma2-2")


def test_lines_do_not_go_into_a_file(tmp_path: Path):
    taken = tmp_path / "taken"
    taken.write_text("kept")
    with pytest.raises(MizarrError, match="expected jsonl to be a folder"):
        build("character_count_helix", jsonl=str(taken), characters=2000)
    assert taken.read_text() == "kept"
