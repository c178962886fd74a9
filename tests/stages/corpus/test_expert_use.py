"""What experts read of a corpus, against counting by hand."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import xarray as xr

from mizarr.stages.corpus.expert_use import NO_TOKEN, expert_use, information
from mizarr.store.errors import PromptError, ShapeError

LAYERS, TOKENS, EXPERTS, KINDS = 2, 240, 5, 9


def drawn(seed: int) -> tuple[xr.DataArray, xr.DataArray]:
    """Two experts per token, their weights at random; some tokens are special."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((LAYERS, TOKENS, EXPERTS), np.float32)
    for layer in range(LAYERS):
        for token in range(TOKENS):
            weights[layer, token, rng.choice(EXPERTS, 2, replace=False)] = rng.random(2) + 0.1
    ids = rng.integers(0, KINDS, TOKENS) * 7
    ids[rng.random(TOKENS) < 0.1] = NO_TOKEN
    labels = {"layer": [3, 8]}
    return xr.DataArray(weights, labels, ("layer", "token", "expert")), xr.DataArray(ids, dims="token")


def counted(weights: np.ndarray, ids: np.ndarray) -> dict[tuple[int, int], float]:
    """Share of every (token id, expert), summed one token at a time."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    for row, token in zip(weights.astype(np.float64), ids, strict=True):
        if token != NO_TOKEN:
            for expert, weight in enumerate(row):
                found[int(token), expert] += weight / row.sum()
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_shares_and_readers_are_those_counted_one_token_at_a_time(seed):
    weights, ids = drawn(seed)
    found = expert_use(weights, ids, top_k=3, least=4, draws=3, seed=1)
    counts = {int(token): int((ids == token).sum()) for token in set(ids.values.tolist()) - {NO_TOKEN}}
    total = sum(counts.values())
    for layer in range(LAYERS):
        table = counted(weights.values[layer], ids.values)
        for expert in range(EXPERTS):
            here = found.isel(layer=layer, expert=expert)
            sent = (weights.values[layer, ids.values != NO_TOKEN, expert] > 0).sum()
            assert float(here["share"]) == pytest.approx(sent / total)
            mass = sum(value for (_, e), value in table.items() if e == expert)
            assert float(here["weight"]) == pytest.approx(mass / sent)
            read = sorted(
                ((table[token, expert] / count, token) for token, count in counts.items() if count >= 4),
                reverse=True,
            )[:3]
            assert here["top_share"].values == pytest.approx([share for share, _ in read])
            assert here["top_id"].values.tolist() == [token for _, token in read]
            assert here["top_count"].values.tolist() == [counts[token] for _, token in read]
        told = 0.0
        for (token, expert), value in table.items():
            if value:
                of_expert = sum(v for (_, e), v in table.items() if e == expert) / total
                told += value / total * np.log(value / total / (counts[token] / total * of_expert))
        assert float(found["information"][layer]) == pytest.approx(told)
    assert found["layer"].values.tolist() == [3, 8]


def test_what_a_token_says_is_log_of_the_experts_where_it_decides_and_chance_where_it_does_not():
    ids = np.arange(4000) % 4
    decided = np.eye(4)[ids][None]
    rng = np.random.default_rng(0)
    drawn_anew = np.eye(4)[rng.integers(0, 4, 4000)][None]
    both = xr.DataArray(
        np.concatenate([decided, drawn_anew]), {"layer": [0, 1]}, ("layer", "token", "expert")
    )
    found = expert_use(both, xr.DataArray(ids, dims="token"), draws=40)
    assert float(found["information"][0]) == pytest.approx(np.log(4))
    assert float(found["chance"][0].max()) < 0.01
    assert float(found["information"][1]) <= float(found["chance"][1].max())
    assert information(np.ones((3, 3))) == pytest.approx(0)


def test_tokens_too_rare_leave_their_places_empty():
    weights, ids = drawn(2)
    found = expert_use(weights, ids, top_k=2, least=TOKENS, draws=1)
    assert (found["top_id"] == NO_TOKEN).all() and np.isnan(found["top_share"]).all()
    assert (found["top_count"] == 0).all()


def test_a_corpus_without_tokens_or_experts_is_refused():
    weights, ids = drawn(3)
    with pytest.raises(PromptError, match="expected tokens other than special tokens"):
        expert_use(weights, xr.full_like(ids, NO_TOKEN))
    place = int(np.flatnonzero(ids.values != NO_TOKEN)[0])
    weights[1, place] = 0
    with pytest.raises(ShapeError, match=f"found none for token {place} in layer 8"):
        expert_use(weights, ids)
