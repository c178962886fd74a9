"""Head detection from random tokens to tables, figures and JSON; attention patterns as files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from rich.console import Console

import mizarr
from mizarr.stages.attention.head_detection import KINDS, detect_head
from mizarr.store.errors import ConfigError, EntryNotFound, MizarrError, PromptError
from mizarr.workflows import build, compute
from mizarr.workflows.attention_export import attention_document, export_attention
from mizarr.workflows.material.samples.repeated import repeated_tokens, shuffled

RANDOM = {"sequences": 3, "length": 6, "seed": 4}
PROMPTS = ["it was the best of times, it was the worst of times", "we had everything, we had nothing"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads") / "store"


@pytest.fixture(scope="module")
def found(tiny_model: Path, store: Path):
    return compute("head_detection", store=store, model=str(tiny_model), **RANDOM)


@pytest.fixture(scope="module")
def on_prompts(tiny_model: Path, store: Path):
    return compute("head_detection", store=store, model=str(tiny_model), prompts=PROMPTS)


def test_rows_repeat_a_block_of_different_tokens_behind_the_bos():
    rows = repeated_tokens(np.arange(5, 40), [0], sequences=4, length=7, repeats=3, seed=1)
    assert len(rows) == 4
    for row in rows:
        assert row[0] == 0 and len(row) == 22
        assert row[1:8] == row[8:15] == row[15:]
        assert len(set(row[1:8])) == 7 and set(row[1:8]) <= set(range(5, 40))
    assert rows[0] != rows[1]
    assert rows == repeated_tokens(np.arange(5, 40), [0], sequences=4, length=7, repeats=3, seed=1)
    assert rows != repeated_tokens(np.arange(5, 40), [0], sequences=4, length=7, repeats=3, seed=2)


def test_shuffling_moves_tokens_within_their_block_only():
    row = [0, *range(10), *range(10, 20), *range(20, 30)]
    mixed = shuffled(row, 11, 10, 3)
    assert mixed[:11] == row[:11]
    assert sorted(mixed[11:21]) == row[11:21] and mixed[11:21] != row[11:21]
    assert sorted(mixed[21:]) == row[21:]


def test_scores_are_those_of_detect_head_on_the_same_prompts(on_prompts, tiny_model, tmp_path):
    states = mizarr.capture(
        str(tiny_model),
        PROMPTS,
        "blocks.*.attn.hook_pattern",
        store=mizarr.open_store(tmp_path),
        progress=False,
    )
    document = on_prompts.to_json()
    for kind in KINDS:
        own = detect_head(states, kind)
        np.testing.assert_allclose(document["kinds"][kind]["score"], own, atol=1e-6)


def test_queries_of_the_first_block_have_found_nothing_and_take_no_part(found, tiny_model, store):
    """With them, half of the attention has nowhere to go that counts."""
    whole = compute("head_detection", store=store, model=str(tiny_model), **RANDOM, first_block=True)
    for kind in ("duplicate_token_head", "induction_head"):
        late, all_ = (w.scores["score"].sel(kind=kind).values for w in (found, whole))
        # 6 of 13 queries of a row; each query's weights sum to 1
        np.testing.assert_allclose(all_, late * 6 / 13, rtol=1e-4)


def test_the_control_reads_the_shuffled_tokens_at_the_places_of_the_others(found, tiny_model, tmp_path):
    tokens, mixed, first = found._tokens()
    model = mizarr.Model.from_pretrained(tiny_model)
    hooks = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")
    total = np.zeros((3, 2))
    for ids, other in zip(tokens, mixed, strict=True):
        assert sorted(ids) == sorted(other) and ids.tolist() != other.tolist()
        cache = model.forward(other.tolist(), hooks, want=None)
        for layer in range(3):
            weights = cache[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
            pairs = [(q, k + 1) for q in range(first, 13) for k in range(q) if ids[q] == ids[k]]
            total[layer] += sum(weights[:, q, k] for q, k in pairs) / (13 - first)
    control = found.to_json()["kinds"]["induction_head"]["control"]
    np.testing.assert_allclose(control, total / 3, rtol=1e-4)


def test_the_headline_is_the_lead_of_plain_passes_over_shuffled_ones(found, tiny_model):
    """The claim again, from single forwards, at every distance behind the earlier occurrence."""
    tokens, mixed, first = found._tokens()
    model = mizarr.Model.from_pretrained(tiny_model)
    hooks = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")

    def scores(ids, row, far):
        cache = model.forward(row.tolist(), hooks, want=None)
        n = len(ids)
        pairs = [(q, k + far) for q in range(first, n) for k in range(q - far + 1) if ids[q] == ids[k]]
        weights = [cache[f"blocks.{layer}.attn.hook_pattern"][0].numpy() for layer in range(3)]
        return np.concatenate([sum(w[:, q, k] for q, k in pairs) / (n - first) for w in weights])

    def lead(far):
        both = zip(tokens, mixed, strict=True)
        return np.mean([scores(ids, ids, far) - scores(ids, row, far) for ids, row in both], axis=0)

    claim = found.to_json()["findings"][0]
    best = int(lead(1).argmax())
    assert claim["claim"].startswith(f"layer {best // 2}, head {best % 2}, the best of ")
    assert claim["effect"] == pytest.approx(lead(1).max(), rel=1e-3)
    null = [lead(far).max() for far in range(2, found.settings.length)]
    finding = next(view for view in found.shown if view.kind == "findings").findings[0]
    np.testing.assert_allclose(finding.null.values, null, rtol=1e-3, atol=1e-6)


def test_the_specimen_copies_beyond_chance_and_controls_move_the_null_alone(tmp_path):
    given = {"store": tmp_path / "store", "sequences": 4, "length": 30}
    one, other = (compute("head_detection", **given, controls=n) for n in (50, 19))
    keys = [each.to_json()["provenance"]["keys"] for each in (one, other)]
    moved = {"displaced", "displaced_control", "loss_repeated_controls", "loss_prose_controls"}
    assert {key for key in keys[0] if keys[0][key] != keys[1][key]} == moved
    claims = [each.to_json()["findings"][0] for each in (one, other)]
    assert [claim["verdict"] for claim in claims] == ["beyond chance"] * 2
    assert claims[0]["effect"] == claims[1]["effect"] > 0.5
    assert [claim["null"]["draws"] for claim in claims] == [28, 19]


def test_the_specimen_copies_with_heads_that_match_content(tmp_path):
    """It was trained to copy: whichever head does it looks behind the earlier occurrence, and loses its way
    when the repetition is shuffled. A previous-token head, which reads places, does not."""
    done = compute("head_detection", store=tmp_path / "store", sequences=4)
    kinds = done.to_json()["kinds"]
    copying, before = kinds["induction_head"]["best"][0], kinds["previous_token_head"]["best"][0]
    assert copying["score"] > 10 * copying["control"]
    assert copying["score"] > 10 * np.median(kinds["induction_head"]["score"])
    assert before["score"] > 10 * np.median(kinds["previous_token_head"]["score"])
    assert before["control"] == pytest.approx(before["score"], rel=0.2)


def test_losses_without_heads_are_those_of_plain_passes(tmp_path):
    workflow = compute("head_detection", store=tmp_path / "store", sequences=4, knocked_out=2, controls=20)
    best = workflow.lead.values[0].ravel().argsort()[::-1][:2]
    heads = [(int(i) // 6, int(i) % 6) for i in best]
    assert list(workflow.knockout.heads) == heads
    assert not set(workflow.knockout.control_candidates) & set(heads)
    assert min(layer for layer, _ in workflow.knockout.control_candidates) == min(layer for layer, _ in heads)
    model = mizarr.Model.from_pretrained("specimen")
    # Four sequences that detection did not read: a block of 50 tokens behind the BOS, twice.
    rows = workflow.knockout._texts["repeated"]
    assert {len(row) for row in rows} == {101} and all(row[1:51] == row[51:] for row in rows)
    assert not set(rows) & {tuple(row.tolist()) for row in workflow._tokens()[0]}

    def loss(heads):
        hooks = mizarr.HookSpec()
        for layer, head in heads:
            hooks = hooks.intervene(f"blocks.{layer}.attn.hook_z", mizarr.Zero(heads=(head,)))
        said = [model.forward([list(row)], hooks).logits[0].log_softmax(-1) for row in rows]
        # Tokens 52 to 100: that of position 51 begins the repetition, and nothing announces it.
        return -np.mean(
            [
                logprobs[q, row[q + 1]].item()
                for row, logprobs in zip(rows, said, strict=True)
                for q in range(51, 100)
            ]
        )

    _, copying, prose = workflow.to_json()["findings"]
    assert copying["levels"] == pytest.approx([loss([]), loss(heads)], rel=1e-4)
    assert copying["effect"] == pytest.approx(loss(heads) - loss([]), rel=1e-3)
    control = workflow.knockout.control_heads[7]
    draw = workflow.result("loss_repeated_controls").isel(draw=7)["position_loss"].values[52:]
    assert draw.mean() == pytest.approx(loss(control), rel=1e-4)
    assert copying["held_out"] and copying["null"]["draws"] == prose["null"]["draws"] == 20


def test_without_its_induction_heads_the_specimen_copies_no_more_and_reads_prose_as_well(tmp_path):
    workflow = compute("head_detection", store=tmp_path / "store")
    lead = workflow.lead.values
    assert len(workflow.knockout.heads) == min(9, (lead[0] > lead[1:].max()).sum())
    _, copying, prose = workflow.to_json()["findings"]
    assert copying["verdict"] == "beyond chance" and copying["effect"] > 1
    assert prose["verdict"] == "beyond chance" and prose["effect"] < 0.1


@pytest.mark.parametrize("settings", [{"knocked_out": 0}, {"controls": 0}])
def test_nothing_is_knocked_out_where_not_asked_for(tiny_model, tmp_path, settings):
    workflow = compute("head_detection", store=tmp_path / "store", model=str(tiny_model), **RANDOM | settings)
    assert not [name for name in workflow.nodes if name.startswith("loss")]
    assert len(workflow.to_json()["findings"]) == 1


def test_json_has_every_head_and_the_best_first(found):
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (document["n_layers"], document["n_heads"]) == (3, 2)
    for kind in KINDS:
        told = document["kinds"][kind]
        assert np.array(told["score"]).shape == np.array(told["control"]).shape == (3, 2)
        best = told["best"]
        assert [one["score"] for one in best] == sorted((one["score"] for one in best), reverse=True)
        assert best[0]["score"] == told["score"][best[0]["layer"]][best[0]["head"]] == np.max(told["score"])
    statistics = document["statistics"]
    assert statistics["entropy"]["unit"] == "nats"
    assert np.array(statistics["distance"]["by_head"]).shape == (3, 2)


def test_tables_and_figures_show_the_heads_and_name_the_results(found, tmp_path, capsys):
    files = found.render(Console(width=100), tmp_path)
    printed = capsys.readouterr().out
    assert "induction" in printed and "3 sequences of 6 random tokens" in printed
    assert [path.name for path in files] == ["head_detection.png", "head_statistics.png"]
    key = found.to_json()["provenance"]["keys"]["scores"][:12].encode()
    assert all(key in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prompts": [""]}, PromptError, "a token of its own, found only the 1 .* in ''"),
        ({"length": 400}, PromptError, "found 400; set a smaller length"),
        ({"length": 40}, PromptError, "at most 64 positions"),
        ({"length": 1}, ConfigError, "length to be int of at least 2, found 1"),
        ({"repeats": 1}, ConfigError, "repeats to be int of at least 2"),
        ({"error_measure": "add"}, ConfigError, "mul or abs, found 'add'"),
    ],
)
def test_wrong_input_gives_one_clear_line_before_anything_runs(tiny_model, given, error, message):
    with pytest.raises(error, match=message) as told:
        build("head_detection", model=str(tiny_model), **given)
    assert isinstance(told.value, MizarrError)
    assert "\n" not in str(told.value)


@pytest.fixture(scope="module")
def states(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    opened = mizarr.open_store(tmp_path_factory.mktemp("export"))
    hooks = "blocks.*.attn.hook_pattern"
    return mizarr.capture(str(tiny_model), PROMPTS, hooks, store=opened, progress=False)


def test_json_patterns_hold_weights_and_tokens_of_each_prompt(states, tmp_path):
    path = export_attention(
        states, tmp_path / "new" / "attention.json", prompts=[1, 0], layers=[2, 0], heads=[1]
    )
    second, first = json.loads(path.read_text())
    assert (second["prompt"], second["text"], second["layers"], second["heads"]) == (
        1,
        PROMPTS[1],
        [2, 0],
        [1],
    )
    assert "".join(first["tokens"][1:]) == PROMPTS[0]
    own = states.mi.attn(1).sel(layer=[2, 0]).isel(head=[1])
    np.testing.assert_allclose(second["attention"], own, atol=1e-6)
    assert len(second["tokens"]) == own.sizes["key_position"]


def test_npz_patterns_are_the_stored_numbers(states, tmp_path):
    path = export_attention(states, tmp_path / "attention.npz", prompts=[0, 1])
    with np.load(path) as held:
        assert held["layers"].tolist() == [0, 1, 2] and held["heads"].tolist() == [0, 1]
        for i in (0, 1):
            np.testing.assert_array_equal(held[f"attention_{i}"], states.mi.attn(i))
            assert len(held[f"tokens_{i}"]) == held[f"attention_{i}"].shape[-1]


def test_patterns_of_fewer_layers_than_the_states_beside_them_are_found(tiny_model, tmp_path, states):
    """Then they have a layer axis of their own in the dataset."""
    hooks = ["blocks.*.hook_resid_post", "blocks.1.attn.hook_pattern"]
    store = mizarr.open_store(tmp_path / "store")
    mixed = mizarr.capture(str(tiny_model), PROMPTS, hooks, store=store, progress=False)
    assert "layer_pattern" in mixed.dims
    found = detect_head(mixed)
    assert found["layer"].values.tolist() == [1]
    np.testing.assert_allclose(found, detect_head(states).sel(layer=[1]))
    path = export_attention(mixed, tmp_path / "one.json")
    assert json.loads(path.read_text())[0]["layers"] == [1]


def test_an_export_of_what_is_not_there_is_an_error(states, tmp_path):
    pattern = states.mi.attn(0)
    with pytest.raises(EntryNotFound, match=r"layers among \[0, 1, 2\], found 3.*--hooks"):
        attention_document(pattern, [], layers=[3])
    with pytest.raises(ConfigError, match=r"expected heads in 0\.\.1, found 2"):
        attention_document(pattern, [], heads=[2])
    with pytest.raises(ConfigError, match=r"ending in .json or .npz, found 'a.csv'"):
        export_attention(states, tmp_path / "a.csv")
    with pytest.raises(PromptError, match="no prompt 2; prompts are numbered 0 to 1"):
        export_attention(states, tmp_path / "a.json", prompts=[2])
    with pytest.raises(EntryNotFound, match="no variable 'pattern'"):
        export_attention(states.drop_vars("pattern"), tmp_path / "a.json")
