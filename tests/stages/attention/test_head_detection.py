"""Scores of heads on patterns whose answers can be done on paper, and against a dense loop."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings, strategies as st

import mizarr.stages.attention.rows
from mizarr.stages.attention.head_detection import (
    KINDS,
    detect_head,
    detection_pattern,
    displaced_scores,
    head_scores,
    pattern_scores,
)
from mizarr.stages.attention.statistics import head_statistics
from mizarr.store.errors import ConfigError, EntryNotFound, PromptError, ShapeError

# Every query looks at itself, at the token before, or at the first token, with these weights.
EVEN = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]], np.float32)
BEFORE = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32)


def packed(*prompts: np.ndarray) -> dict[str, xr.DataArray]:
    """Patterns [layer, head, query, key], one per prompt, as a store holds them."""
    parts = [p[..., *np.tril_indices(p.shape[-1])] for p in prompts]
    pattern = np.concatenate(parts, axis=-1).transpose(0, 2, 1)
    layers = {"layer": np.arange(len(pattern)) + 3}
    return {
        "pattern": xr.DataArray(pattern, layers, ("layer", "pair", "head")),
        "row_size": xr.DataArray([p.shape[-1] for p in prompts], dims="prompt"),
    }


def ids(*prompts: list[int]) -> xr.DataArray:
    return xr.DataArray(np.concatenate(prompts), dims="token")


def random_patterns(sizes: list[int], seed: int, layers: int = 2, heads: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    made = []
    for size in sizes:
        weights = np.tril(rng.random((layers, heads, size, size)) ** 3 + 1e-3)
        made.append((weights / weights.sum(-1, keepdims=True)).astype(np.float32))
    return made


def dense_score(a: np.ndarray, p: np.ndarray, *, bos=False, current=False, measure="mul") -> float:
    """One head, one prompt, as the definition is written."""
    keep = np.tril(np.ones_like(p))
    if bos:
        keep[:, 0] = 0
    if current:
        np.fill_diagonal(keep, 0)
    if measure == "mul":
        return float((a * p * keep).sum() / (a * keep).sum())
    return 1 - round(float((np.abs(a - p) * keep).sum() / len(p)), 3)


def test_patterns_of_a_repeated_pair_of_tokens_are_those_on_paper():
    tokens = [7, 8, 7, 8]
    previous = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    duplicate = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    induction = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    for kind, wanted in zip(KINDS, (previous, duplicate, induction), strict=True):
        assert detection_pattern(kind, tokens).tolist() == wanted


def test_a_token_that_follows_itself_is_induced_by_looking_at_itself():
    """The duplicate at key 0, one to the right, is the query."""
    assert detection_pattern("induction_head", [5, 5]).tolist() == [[0, 0], [0, 1]]


def test_the_share_of_attention_is_that_on_paper():
    stored = packed(np.stack([EVEN, BEFORE])[None])
    found = head_scores(**stored, token_id=ids([1, 2, 1]))["score"].sel(layer=3)
    assert found.sel(kind="previous_token_head").values.tolist() == [0.25, pytest.approx(2 / 3)]
    assert found.sel(kind="duplicate_token_head").values.tolist() == [pytest.approx(0.25 / 3), 0]
    assert found.sel(kind="induction_head").values.tolist() == [pytest.approx(0.25 / 3), pytest.approx(1 / 3)]


def test_without_bos_and_the_current_token_only_the_rest_is_shared():
    stored = packed(np.stack([EVEN, BEFORE])[None])
    asked = {"kinds": ("previous_token_head",), "exclude_bos": True, "exclude_current_token": True}
    found = head_scores(**stored, token_id=ids([1, 2, 1]), **asked)["score"]
    assert found.values.ravel().tolist() == [1.0, 1.0]


def test_the_absolute_measure_is_that_on_paper_and_rounded():
    stored = packed(EVEN[None, None])
    found = head_scores(**stored, token_id=ids([1, 2, 1]), error_measure="abs")["score"]
    # |A - P| of the previous-token pattern: 1; 0.5 + 0.5; 0.25 + 0.75 + 0.5; over 3 rows
    assert found.sel(kind="previous_token_head").item() == pytest.approx(1 - 1.167, abs=1e-12)


def test_a_head_with_all_its_attention_on_bos_scores_nothing_without_it():
    """TransformerLens divides 0 by 0 here; one such prompt would hide a whole corpus."""
    rest = np.zeros((1, 1, 3, 3), np.float32)
    rest[..., 0] = 1
    found = head_scores(**packed(rest), token_id=ids([1, 2, 1]), exclude_bos=True)["score"]
    assert not found.values.any()


def test_prompts_are_averaged_and_their_spread_told():
    stored = packed(EVEN[None, None], BEFORE[None, None])
    found = head_scores(**stored, token_id=ids([1, 2, 1], [4, 5, 6]), kinds=("previous_token_head",))
    assert found["score"].item() == pytest.approx((0.25 + 2 / 3) / 2)
    assert found["spread"].item() == pytest.approx(np.std([0.25, 2 / 3], ddof=1))


def test_equal_tokens_of_two_prompts_are_no_duplicates():
    flat = np.tril(np.ones((1, 1, 2, 2), np.float32)) / np.array([1, 2], np.float32)[:, None]
    found = head_scores(**packed(flat, flat), token_id=ids([1, 2], [1, 2]))["score"]
    assert found.sel(kind="duplicate_token_head").item() == 0
    assert found.sel(kind="induction_head").item() == 0


@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["mul", "abs"]),
    st.integers(1, 200),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_block_gives_the_mean_of_the_dense_definition(sizes, bos, current, measure, block, seed):
    patterns = random_patterns(sizes, seed)
    tokens = [np.random.default_rng(seed + i).integers(0, 3, n).tolist() for i, n in enumerate(sizes)]
    stored = packed(*patterns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mizarr.stages.attention.rows, "BLOCK", block)
        found = head_scores(
            **stored,
            token_id=ids(*tokens),
            exclude_bos=bos,
            exclude_current_token=current,
            error_measure=measure,
        )["score"]
    for kind in KINDS:
        for layer in range(2):
            for head in range(3):
                each = [
                    dense_score(
                        a[layer, head].astype(np.float64),
                        detection_pattern(kind, t),
                        bos=bos,
                        current=current,
                        measure=measure,
                    )
                    if not (bos and current and len(t) == 2 and measure == "mul")
                    else 0.0
                    for a, t in zip(patterns, tokens, strict=True)
                ]
                own = found.sel(kind=kind).values[layer, head]
                # A rounding tie may fall either way.
                assert own == pytest.approx(np.mean(each), abs=1e-6 if measure == "mul" else 1.1e-3)


def test_chunks_are_read_whole_and_give_the_same(monkeypatch):
    stored = packed(*random_patterns([5, 4, 7, 6], 0))
    tokens = ids([1, 2, 1, 2, 1], [1] * 4, [1, 2, 3, 1, 2, 3, 1], [3] * 6)
    whole = head_scores(**stored, token_id=tokens)
    chunked = {**stored, "pattern": stored["pattern"].chunk(layer=1, pair=(15, 10, 28 + 21))}
    monkeypatch.setattr(mizarr.stages.attention.rows, "BLOCK", 90)
    xr.testing.assert_allclose(head_scores(**chunked, token_id=tokens), whole, atol=1e-12)


def test_heads_that_were_not_asked_about_score_minus_one():
    patterns = random_patterns([6], 1)
    stored, tokens = packed(*patterns), ids([1, 2, 3, 1, 2, 3])
    whole = head_scores(**stored, token_id=tokens)["score"]
    found = head_scores(**stored, token_id=tokens, heads=[(4, 0), (4, 2)])["score"]
    assert (found.sel(layer=3) == -1).all()
    assert (found.sel(layer=4).isel(head=1) == -1).all()
    np.testing.assert_array_equal(found.sel(layer=4)[:, [0, 2]], whole.sel(layer=4)[:, [0, 2]])


def test_a_matrix_of_ones_own_is_scored_like_the_named_one():
    tokens = [1, 2, 1, 2, 3]
    stored = packed(*random_patterns([5, 5], 2))
    for measure in ("mul", "abs"):
        named = head_scores(**stored, token_id=ids(tokens, tokens), error_measure=measure)["score"]
        wanted = xr.DataArray(
            detection_pattern("induction_head", tokens), dims=("query_position", "key_position")
        )
        own = pattern_scores(**stored, detection_pattern=wanted, error_measure=measure)["score"]
        np.testing.assert_allclose(own, named.sel(kind="induction_head"), atol=1e-12)


def test_a_pattern_that_is_the_detection_pattern_is_a_perfect_match_by_either_measure():
    wanted = xr.DataArray(EVEN, dims=("query_position", "key_position"))
    stored = packed(EVEN[None, None])
    assert pattern_scores(**stored, detection_pattern=wanted, error_measure="abs")["score"].item() == 1


def test_later_queries_alone_can_be_scored():
    stored = packed(EVEN[None, None])
    found = head_scores(**stored, token_id=ids([1, 2, 1]), kinds=("induction_head",), first_query=2)
    assert found["score"].item() == 0.25


def test_the_patterns_given_are_not_changed():
    stored = packed(*random_patterns([4], 3))
    before = stored["pattern"].values.copy()
    head_scores(**stored, token_id=ids([1, 1, 1, 1]), exclude_bos=True, exclude_current_token=True)
    np.testing.assert_array_equal(stored["pattern"].values, before)


def test_statistics_of_an_even_head_are_those_on_paper():
    found = head_statistics(**packed(EVEN[None, None], BEFORE[None, None])).sel(layer=3).isel(head=0)
    half, quarter = np.log(2), 1.5 * np.log(2)
    assert found["entropy"].item() == pytest.approx((half + quarter + 0 + 0) / 4)
    assert found["bos_share"].item() == pytest.approx((0.5 + 0.25 + 1 + 0) / 4)
    assert found["current_share"].item() == pytest.approx((0.5 + 0.5 + 0 + 0) / 4)
    assert found["distance"].item() == pytest.approx((0.5 + (0.25 * 2 + 0.25) + 1 + 1) / 4)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.integers(1, 300), st.integers(0, 99))
def test_statistics_do_not_depend_on_blocks(sizes, block, seed):
    stored = packed(*random_patterns(sizes, seed))
    whole = head_statistics(**stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mizarr.stages.attention.rows, "BLOCK", block)
        xr.testing.assert_allclose(head_statistics(**stored), whole, atol=1e-6)
    assert (whole["entropy"] <= np.log(max(sizes)) + 1e-6).all() and (whole["entropy"] >= 0).all()


def test_a_dataset_without_patterns_names_the_capture():
    states = xr.Dataset({"resid_post": (("layer", "token", "hidden"), np.zeros((1, 2, 3)))})
    with pytest.raises(EntryNotFound, match=r"only resid_post; .*--hooks 'blocks.\*.attn.hook_pattern'"):
        detect_head(states)


def test_what_cannot_be_scored_is_an_error():
    stored = packed(EVEN[None, None])
    tokens = ids([1, 2, 1])
    with pytest.raises(PromptError, match=r"at least 2 tokens, found 1 in prompt 1"):
        head_scores(**packed(EVEN[None, None], np.ones((1, 1, 1, 1))), token_id=ids([1, 2, 1], [4]))
    with pytest.raises(PromptError, match="at least 4 tokens, found 3"):
        head_scores(**stored, token_id=tokens, first_query=3)
    with pytest.raises(ShapeError, match=r"have 6 .* pairs, found a pattern with 5"):
        head_scores(
            pattern=stored["pattern"].isel(pair=slice(5)), row_size=stored["row_size"], token_id=tokens
        )
    with pytest.raises(ShapeError, match=r"a token id for each of the 3 tokens .*, found 2 ids"):
        head_scores(**stored, token_id=tokens[:2])
    with pytest.raises(ConfigError, match="did you mean 'induction_head'"):
        head_scores(**stored, token_id=tokens, kinds=("induction",))
    with pytest.raises(ConfigError, match="'mul' or 'abs' as error_measure, found 'add'"):
        head_scores(**stored, token_id=tokens, error_measure="add")
    with pytest.raises(ConfigError, match=r"head numbers from 0 to 0, found head 1"):
        head_scores(**stored, token_id=tokens, heads=[(3, 1)])
    square = xr.DataArray(np.ones((3, 3)), dims=("query_position", "key_position"))
    with pytest.raises(ShapeError, match="lower-triangular"):
        pattern_scores(**stored, detection_pattern=square)
    with pytest.raises(ShapeError, match=r"prompts of 2 tokens.*found prompts of 3 to 3"):
        pattern_scores(**stored, detection_pattern=square[:2, :2] * np.tri(2))


@pytest.mark.parametrize("measure", ["mul", "abs"])
def test_looking_one_behind_is_induction_and_further_behind_is_where_it_says(measure):
    prompts = [[5, 6, 5, 7, 6, 5], [9, 8, 9, 8, 9, 8, 8]]
    made = random_patterns([len(one) for one in prompts], seed=4)
    given = {**packed(*made), "token_id": ids(*prompts), "error_measure": measure}
    found = displaced_scores(**given, displacements=(1, 3))["score"]
    induction = head_scores(**given, kinds=("induction_head",))["score"].isel(kind=0)
    np.testing.assert_allclose(found.sel(displacement=1), induction)
    for layer in range(2):
        for head in range(3):
            scores = []
            for one, pattern in zip(prompts, made, strict=True):
                wanted = np.array([[float(3 <= k <= q and one[k - 3] == one[q]) for k in range(len(one))]
                                   for q in range(len(one))])  # fmt: skip
                scores.append(dense_score(pattern[layer, head], wanted, measure=measure))
            assert found.values[1, layer, head] == pytest.approx(np.mean(scores), abs=1e-3)
