"""CounterFact patching and routing: every number against full forwards of the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.counterfact import (
    CounterFactPatching,
    FactTokens,
    blocks_of,
    differing_span,
    position_map,
)
from mizarr.stages.causal.factual_routing import FactualRouting
from mizarr.stages.forward.runs.run import plan
from mizarr.store.errors import InterventionError, PromptError, StageError

from ..forward.random_models import save_random_model
from ..reference_runs import Reference, put

LAYERS = 3
SHORT = FactTokens((0, 7, 42, 99, 5, 13), (0, 9, 43, 99, 5, 13), fact=(1, 2, 3), subject=((2, 2),))
LONG = FactTokens((0, 7, 42, 99, 5), (0, 8, 51, 52, 99, 5), fact=(1, 2, 3), subject=((1, 2), (2, 3)))
OTHER = FactTokens((0, 31, 42, 99, 5), (0, 32, 42, 99, 5), fact=(1, 2), subject=((1, 1),))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A random Llama of 3 layers, on disk and as the reference."""
    path = tmp_path_factory.mktemp("llama")
    reference = save_random_model(
        path,
        "llama",
        6,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        head_dim=8,
    )
    return path, Reference(reference.eval())


def compute(experiment, folder: Path, where: Path):
    store = mizarr.open_store(where)
    node = experiment.on(str(folder))
    run(node, store)
    return node.open(store).load()


def patched_by_hand(reference: Reference, pair: FactTokens, block: list[int], *places: tuple[int, int]):
    """Logits and activations of the original with positions overwritten in every layer of a block."""
    _, states = reference.run(pair.counterfactual)
    edits = {}
    for layer in block:
        rows = torch.zeros(len(pair.original), states["resid_post", layer].shape[-1])
        for position, source in places:
            rows[position] = states["resid_post", layer][source]
        edits["resid_post", layer] = put(rows, None, [position for position, _ in places])
    return reference.run(pair.original, edits)


def divergence(baseline, other) -> float:
    p, q = baseline.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


@pytest.mark.parametrize("pair", [SHORT, LONG], ids=["equal lengths", "longer counterfactual"])
def test_every_patch_overwrites_its_position_in_each_layer_of_the_block(pair, random_model, tmp_path):
    folder, reference = random_model
    found = compute(CounterFactPatching(pairs=(pair,), block_size=2), folder, tmp_path)
    own, _ = reference.run(pair.original)
    length = len(pair.original)
    assert found.sizes["patch"] == 2 * length
    for i in range(found.sizes["patch"]):
        patch = found.isel(patch=i)
        position, source = int(patch["position"]), int(patch["counterfactual_position"])
        block = [[0, 1], [2]][int(patch["block"])]
        logits, _ = patched_by_hand(reference, pair, block, (position, source))
        assert float(patch["kl"]) == pytest.approx(divergence(own, logits), abs=1e-5)
        assert int(patch["token_id"]) == int(logits.argmax())
    assert found["original_token_id"].values.tolist() == [int(own.argmax())]
    other, _ = reference.run(pair.counterfactual)
    assert found["counterfactual_token_id"].values.tolist() == [int(other.argmax())]


def test_the_first_layers_of_a_block_have_an_effect(random_model, tmp_path):
    """Where the whole sequence is replaced at each layer, a block is as good as its last layer."""
    folder, reference = random_model
    found = compute(CounterFactPatching(pairs=(SHORT,), block_size=LAYERS), folder, tmp_path)
    own, _ = reference.run(SHORT.original)
    last, _ = patched_by_hand(reference, SHORT, [LAYERS - 1], (1, 1))
    assert divergence(own, last) == pytest.approx(0, abs=1e-7)
    at = found.isel(patch=int(np.flatnonzero(found["position"].values == 1)[0]))
    assert float(at["kl"]) > 1e-4


def test_the_last_block_at_the_last_position_says_what_the_counterfactual_says(random_model, tmp_path):
    folder, _ = random_model
    found = compute(CounterFactPatching(pairs=(SHORT,), block_size=1), folder, tmp_path)
    assert int(found["token_id"][-1]) == int(found["counterfactual_token_id"][0])


def test_routing_is_the_mean_attention_of_the_last_token_to_the_fact(random_model, tmp_path):
    folder, reference = random_model
    pairs = (SHORT, LONG)
    found = compute(FactualRouting(pairs=pairs, block_size=2), folder, tmp_path)
    assert found["attention"].dims == ("pair", "block", "layer", "head")
    for i, pair in enumerate(pairs):
        own, seen = reference.run(pair.original)
        for b, block in enumerate([[0, 1], [2]]):
            logits, after = patched_by_hand(reference, pair, block, *pair.subject)
            cell = found.isel(pair=i, block=b)
            assert float(cell["kl"]) == pytest.approx(divergence(own, logits), abs=1e-5)
            assert int(cell["token_id"]) == int(logits.argmax())
            for layer in range(LAYERS):
                rows = [each["pattern", layer][:, -1, list(pair.fact)].mean(-1) for each in (seen, after)]
                np.testing.assert_allclose(cell["baseline_attention"][layer], rows[0], atol=1e-5)
                np.testing.assert_allclose(cell["attention"][layer], rows[1], atol=1e-5)


def test_positions_of_the_fact_keep_their_index_and_later_ones_count_from_the_end():
    assert position_map(SHORT) == (0, 1, 2, 3, 4, 5)
    assert position_map(LONG) == (0, 1, 2, 3, 5)
    longer_fact = FactTokens((0, 1, 2, 3, 4, 9), (0, 1, 9), fact=(1, 2, 3, 4))
    assert position_map(longer_fact) == (0, 1, 2, 2, 2, 2), "kept within the counterfactual prompt"


def test_the_subject_is_where_the_prompts_differ_and_ends_where_they_begin_to_agree_again():
    assert differing_span((0, 1, 2, 9), (0, 3, 2, 9)) == ((1, 1),)
    assert differing_span((0, 1, 2, 9, 9), (0, 3, 4, 5, 9, 9)) == ((1, 2), (2, 3)), "they meet at their ends"
    assert differing_span((0, 3, 4, 5, 9, 9), (0, 1, 2, 9, 9)) == ((1, 1), (2, 1), (3, 2)), "the first twice"
    assert differing_span((0, 1, 9), (0, 1, 7, 9)) == ((1, 2),), "an inserted word ends one token further"
    assert differing_span((0, 1, 7, 9), (0, 1, 9)) == ((2, 1),), "for a word left out stands the one before"


def test_blocks_cover_all_layers_and_the_last_may_be_shorter():
    assert blocks_of(6, 4) == [[0, 1, 2, 3], [4, 5]]
    assert blocks_of(3, 1) == [[0], [1], [2]]


def test_one_more_pair_computes_one_pair(random_model, tmp_path, monkeypatch):
    from mizarr.stages.forward.runs import experiment

    asked, stream = [], experiment.stream

    def counted(model, runs, **given):
        asked.append(len(runs))
        return stream(model, runs, **given)

    monkeypatch.setattr(experiment, "stream", counted)
    folder, _ = random_model
    one = compute(CounterFactPatching(pairs=(LONG,), block_size=3), folder, tmp_path)
    both = compute(CounterFactPatching(pairs=(SHORT, LONG), block_size=3), folder, tmp_path)
    assert asked == [len(LONG.original), len(SHORT.original)]
    assert both["pair_of"].values.tolist() == [0] * len(SHORT.original) + [1] * len(LONG.original)
    np.testing.assert_array_equal(both["kl"].values[-len(LONG.original) :], one["kl"])


@pytest.mark.parametrize("kind", [CounterFactPatching, FactualRouting])
def test_patches_are_planned_without_the_model(kind, random_model, tmp_path):
    folder, _ = random_model
    experiment = kind(pairs=(SHORT, LONG), block_size=1)
    model = mizarr.Model.from_pretrained(folder)
    prepared = experiment.prepare(model)
    runs = [each for cell in experiment.cells(model.config) for each in experiment.runs(prepared, cell)]
    sketched = experiment.on(str(folder)).plan(mizarr.open_store(tmp_path))
    assert sketched.positions == plan(model, runs).positions < sketched.naive


def test_keys_move_with_pairs_blocks_facts_and_subjects(random_model, tmp_path):
    folder, _ = random_model
    store = mizarr.open_store(tmp_path)
    patching = [
        CounterFactPatching(pairs=(SHORT,), block_size=2),
        CounterFactPatching(pairs=(SHORT,), block_size=1),
        CounterFactPatching(pairs=(LONG,), block_size=2),
        CounterFactPatching(pairs=(SHORT, LONG), block_size=2),
        CounterFactPatching(pairs=(FactTokens(SHORT.original, SHORT.counterfactual, (1, 2)),), block_size=2),
    ]
    moved = FactTokens(SHORT.original, SHORT.counterfactual, SHORT.fact, ((1, 1),))
    routing = [FactualRouting(pairs=(each,), block_size=2) for each in (SHORT, moved)]
    keys = {each.on(str(folder)).key(store).digest for each in [*patching, *routing]}
    assert len(keys) == len(patching) + len(routing)
    same = CounterFactPatching(pairs=(moved,), block_size=2)
    assert same.on(str(folder)).key(store).digest in keys, "patching does not read the subject"


@pytest.mark.parametrize(
    ("experiment", "error", "match"),
    [
        (CounterFactPatching(pairs=()), StageError, "at least one pair"),
        (CounterFactPatching(pairs=(SHORT,), block_size=4), StageError, "block_size from 1 to 3"),
        (CounterFactPatching(pairs=(FactTokens((0, 1), (0, 1), (1,)),), block_size=1), PromptError, "equal"),
        (
            CounterFactPatching(pairs=(FactTokens((), (1,), (0,)),), block_size=1),
            PromptError,
            "of 0 and 1 tokens",
        ),
        (
            CounterFactPatching(pairs=(FactTokens((0, 1), (0, 2), ()),), block_size=1),
            PromptError,
            "of the fact",
        ),
        (
            CounterFactPatching(pairs=(FactTokens((0, 1), (0, 2), (2,)),), block_size=1),
            InterventionError,
            "found 2",
        ),
        (FactualRouting(pairs=(FactTokens((0, 1), (0, 2), (1,)),), block_size=1), PromptError, "subject"),
        (
            FactualRouting(pairs=(FactTokens((0, 1), (0, 2), (1,), ((1, 5),)),), block_size=1),
            InterventionError,
            "found 5",
        ),
    ],
)
def test_pairs_that_cannot_be_patched_are_refused(experiment, error, match, random_model):
    folder, _ = random_model
    with pytest.raises(error, match=match) as caught:
        experiment.on(str(folder)).cells()
    assert "\n" not in str(caught.value)


def test_a_killed_run_goes_on_at_the_pair_it_was_at(random_model, tmp_path, monkeypatch):
    folder, _ = random_model
    pairs = (SHORT, OTHER, LONG)
    experiment = CounterFactPatching(pairs=pairs, block_size=3)
    measured, measure = [], CounterFactPatching.measure

    def dies(self, prepared, cell, result):
        measured.append(cell)
        if len(measured) > len(SHORT.original) + len(OTHER.original) + 2:
            raise KeyboardInterrupt
        return measure(self, prepared, cell, result)

    with monkeypatch.context() as killed:
        killed.setattr(CounterFactPatching, "measure", dies)
        with pytest.raises(KeyboardInterrupt):
            compute(experiment, folder, tmp_path / "store")
    store = mizarr.open_store(tmp_path / "store")
    assert 1 <= len(experiment.on(str(folder)).missing(store)) < len(pairs)
    again = compute(experiment, folder, tmp_path / "store")
    whole = compute(experiment, folder, tmp_path / "other")
    np.testing.assert_allclose(again["kl"], whole["kl"], atol=1e-7)
