"""What pages of a dictionary show, against dense arithmetic on all tokens at once; in pieces, resumed, in any
order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr.pipeline import plan, run
from mizarr.stages.features.corpus import sparse
from mizarr.stages.features.corpus.encode import encode_nodes
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.pages import intervals as intervals_module
from mizarr.stages.features.pages.decoders import decoder_neighbours
from mizarr.stages.features.pages.feature_blocks import feature_blocks
from mizarr.stages.features.pages.intervals import feature_intervals
from mizarr.stages.features.pages.nodes import PageLayout, page_nodes
from mizarr.stages.features.pages.partners import feature_partners
from mizarr.stages.features.pages.windows import example_windows
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.stages.logits.readout import readout
from mizarr.store.errors import MizarrError

from ....random_dictionaries import draw, save_random_clt, write_saelens, write_sparsify

HIDDEN, SIZE, VOCABULARY = 192, 37, 160
LAYOUT = PageLayout(
    strongest=5, intervals=4, per_interval=3, before=3, after=2, related=4, logits=6, bins=12, block=11
)


def prompts(seed: int, many: int = 40) -> list[list[int]]:
    """Prompts of random ids and lengths, one of them there twice."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(3, 90, rng.integers(2, 30)).tolist() for _ in range(many)]
    return [*drawn, drawn[3]]


def make(folder: Path, kind: str, seed: int) -> tuple[Dictionary, int]:
    """A random dictionary of an architecture, and the layer that is looked at."""
    if kind == "clt":
        return Dictionary.from_pretrained(save_random_clt(folder, 6, HIDDEN, SIZE)), 2
    weights = draw(seed, HIDDEN, size=SIZE)
    folder.mkdir()
    if kind == "topk":
        write_saelens(folder, weights, "topk", k=5)
    elif kind == "sparsify":
        write_sparsify(folder, weights)
        return Dictionary.from_pretrained(folder, read="hook_resid_post", write="hook_resid_post"), 0
    else:
        write_saelens(folder, weights, kind)
    return Dictionary.from_pretrained(folder), 1


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


def head() -> xr.Dataset:
    rng = np.random.default_rng(5)
    unembed = rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
    return readout(unembed, rng.random(HIDDEN) + 0.5, norm="rms", eps=1e-6)


def computed(
    model: mizarr.Model, dictionary: Dictionary, layer: int, texts: Any, folder: Path, **how: Any
) -> tuple[dict[str, xr.Dataset], xr.Dataset]:
    """Every result, and the encoded corpus."""
    store = mizarr.open_store(folder)
    states = CaptureNode(model, texts, [str(dictionary.read_hook(layer))], segment_tokens=128)
    encoded = encode_nodes(dictionary, states, layers=(layer,))[layer]
    from mizarr.pipeline.sources import ConstantNode

    nodes = page_nodes(
        dictionary, encoded=encoded, layer=layer, readout=ConstantNode(head()), **{"layout": LAYOUT, **how}
    )
    run(list(nodes.values()), store, quiet=True)
    return {name: node.open(store).load() for name, node in nodes.items()}, encoded.open(store).load()


def dense(encoded: xr.Dataset) -> np.ndarray:
    """[token, feature], float32."""
    ptr = encoded["token_ptr"].values
    found = np.zeros((len(ptr) - 1, int(encoded.attrs["n_features"])), np.float32)
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    found[owner, encoded["feature"].values] = encoded["value"].values
    return found


KINDS = ("standard", "jumprelu", "topk", "gated", "clt")


@pytest.fixture(scope="module", params=KINDS)
def done(request, model: mizarr.Model, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    seed = KINDS.index(request.param)
    dictionary, layer = make(folder / "dictionary", request.param, seed)
    found, encoded = computed(model, dictionary, layer, prompts(seed), folder / "store")
    return dictionary, layer, found, encoded, dense(encoded)


def test_histograms_and_intervals_count_every_activation(done):
    _, _, found, _, x = done
    told = found["intervals"]
    for feature in range(SIZE):
        active = x[x[:, feature] > 0, feature].astype(np.float64)
        counts = told["histogram"].values[feature]
        assert counts.sum() == len(active)
        if len(active):
            expected, edges = np.histogram(active, LAYOUT.bins, (0, active.max()))
            # On a boundary float32 and float64 may differ; nowhere else.
            near = np.abs(active[:, None] - edges).min(1) < 1e-6 * active.max()
            assert np.abs(counts - expected).sum() <= 2 * near.sum()
        np.testing.assert_array_equal(
            told["interval_count"].values[feature], counts.reshape(LAYOUT.intervals, -1).sum(1)
        )


def test_draws_are_of_their_interval_and_as_many_as_there_are(done):
    _, _, found, encoded, x = done
    told = found["intervals"]
    prompt, position = encoded["prompt"].values, encoded["position"].values
    texts = [tuple(encoded["token_id"].values[prompt == number]) for number in range(prompt.max() + 1)]
    for feature in range(SIZE):
        largest = x[:, feature].max()
        if largest == 0:
            assert (told["token"].values[feature] == -1).all()
            continue
        for interval in range(LAYOUT.intervals):
            token = told["token"].values[feature, interval]
            value = told["value"].values[feature, interval]
            there = token >= 0
            np.testing.assert_array_equal(x[token[there], feature], value[there])
            assert not value[~there].any()
            low, high = (largest * (interval + step) / LAYOUT.intervals for step in (0, 1))
            assert (value[there] >= low * (1 - 1e-6)).all()
            assert (value[there] <= high * (1 + 1e-6)).all()
            # The same text at the same position is drawn once.
            seen = {(texts[prompt[t]], position[t]) for t in token[there]}
            assert len(seen) == there.sum()
            inside = (x[:, feature] > 0) & (
                np.minimum((x[:, feature] * (np.float32(LAYOUT.bins) / largest)).astype(int), LAYOUT.bins - 1)
                // (LAYOUT.bins // LAYOUT.intervals)
                == interval
            )
            differ = {(texts[prompt[t]], position[t]) for t in np.flatnonzero(inside)}
            assert there.sum() == min(LAYOUT.per_interval, len(differ))


def test_windows_are_the_activations_around_examples(done):
    _, _, found, encoded, x = done
    windows, prompt = found["windows"], encoded["prompt"].values
    assert (windows["token"].values[:, : LAYOUT.strongest] == found["strongest"]["token"].values).all()
    offsets = windows["window"].values.tolist()
    assert offsets == list(range(-LAYOUT.before, LAYOUT.after + 1))
    for feature in range(SIZE):
        for example, token in enumerate(windows["token"].values[feature].tolist()):
            for place, offset in enumerate(offsets):
                at = token + offset
                inside = token >= 0 and 0 <= at < len(prompt) and prompt[at] == prompt[token]
                expected = x[at, feature] if inside else 0.0
                assert windows["activation"].values[feature, example, place] == expected


def closest(matrix: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of each row above 0, by value: -1 and 0 beyond."""
    order = np.argsort(-matrix, axis=1, kind="stable")[:, :k]
    value = np.take_along_axis(matrix, order, axis=1)
    return np.where(value > 0, order, -1), np.maximum(value, 0)


def test_partners_are_those_of_dense_correlations(done):
    _, _, found, _, x = done
    told, x = found["partners"], x.astype(np.float64)
    assert told.attrs["n_tokens"] == len(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        pearson = np.nan_to_num(np.corrcoef(x.T))
    active = (x > 0).astype(np.float64)
    both = active.T @ active
    either = active.sum(0)[:, None] + active.sum(0) - both
    jaccard = np.divide(both, either, out=np.zeros_like(both), where=either > 0)
    unseen = (both < 2) | np.eye(SIZE, dtype=bool)
    for name, value, matrix in (("correlated", "correlation", pearson), ("companion", "jaccard", jaccard)):
        expected, sizes = closest(np.where(unseen, -1, matrix), LAYOUT.related)
        np.testing.assert_allclose(told[value].values, sizes, atol=1e-5)
        chosen = told[name].values
        np.testing.assert_array_equal(chosen >= 0, expected >= 0)
        rows, ranks = np.nonzero(chosen >= 0)
        # Who they are, by what they measure: equal ones may change places in the last bits.
        np.testing.assert_allclose(matrix[rows, chosen[rows, ranks]], sizes[rows, ranks], atol=1e-5)
    rows, ranks = np.nonzero(told["companion"].values >= 0)
    np.testing.assert_array_equal(
        told["together"].values[rows, ranks], both[rows, told["companion"].values[rows, ranks]]
    )
    norm = np.linalg.norm(x, axis=0)
    rows, ranks = np.nonzero(told["correlated"].values >= 0)
    others = told["correlated"].values[rows, ranks]
    cosine = (x.T @ x)[rows, others] / (norm[rows] * norm[others])
    np.testing.assert_allclose(told["cosine"].values[rows, ranks], cosine, atol=1e-5)


def test_neighbours_and_logits_are_those_of_the_decoder(done):
    dictionary, layer, found, _, _ = done
    target = max(dictionary.targets(layer))
    rows = dictionary.layer(layer).decoder_rows(torch.arange(SIZE), target).numpy().astype(np.float64)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    alike = unit @ unit.T
    np.fill_diagonal(alike, -np.inf)
    order = np.argsort(-alike, axis=1)[:, : LAYOUT.related]
    told = found["decoders"]
    np.testing.assert_array_equal(told["neighbour"].values, order)
    np.testing.assert_allclose(told["cosine"].values, np.take_along_axis(alike, order, 1), atol=1e-6)
    np.testing.assert_allclose(told["norm"].values, np.linalg.norm(rows, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(told["dim"].values, np.argsort(-np.abs(rows), axis=1)[:, :3])
    np.testing.assert_allclose(
        told["l1_share"].values[:, 0], np.abs(rows).max(1) / np.abs(rows).sum(1), rtol=1e-6
    )
    unembed = head()["unembed"].values.astype(np.float64)
    effects = rows @ ((unembed - unembed.mean(0)) * head()["norm_weight"].values).T
    logits = found["logits"]
    for name, sign in (("raised", -1), ("lowered", 1)):
        order = np.argsort(sign * effects, axis=1)[:, : LAYOUT.logits]
        np.testing.assert_array_equal(logits[name].values, order)
        expected = np.take_along_axis(effects, order, 1)
        np.testing.assert_allclose(logits[f"{name}_by"].values, expected, rtol=1e-4, atol=1e-5)
    assert (logits["histogram"].values.sum(1) == VOCABULARY).all()
    for feature in range(SIZE):
        counts, edges = np.histogram(effects[feature], LAYOUT.bins)
        assert np.abs(counts - logits["histogram"].values[feature]).sum() <= 2
        ends = [float(logits[end][feature]) for end in ("low", "high")]
        np.testing.assert_allclose(ends, edges[[0, -1]], rtol=1e-4)


def test_neither_order_of_the_corpus_nor_blocks_change_what_is_shown(
    model: mizarr.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dictionary, layer = make(tmp_path / "d", "standard", 9)
    given = prompts(9)[:-1]
    order = np.random.default_rng(0).permutation(len(given))
    first, one = computed(model, dictionary, layer, given, tmp_path / "a")
    monkeypatch.setattr(sparse.blocks, "__defaults__", (64,))
    layout = PageLayout(**{**vars(LAYOUT), "block": 1000})
    second, other = computed(
        model, dictionary, layer, [given[i] for i in order], tmp_path / "b", layout=layout
    )

    def places(encoded: xr.Dataset, token: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """(prompt, position) of tokens, prompts by their number in `given`."""
        named = numbers[encoded["prompt"].values[token]], encoded["position"].values[token]
        return np.where(token >= 0, np.stack(named), -1)

    itself = np.arange(len(given))
    for name in ("interval_count", "histogram", "value"):
        np.testing.assert_allclose(
            first["intervals"][name].values, second["intervals"][name].values, rtol=1e-5, atol=1e-6
        )
    np.testing.assert_array_equal(
        places(one, first["intervals"]["token"].values, itself),
        places(other, second["intervals"]["token"].values, order),
    )
    # Of the strongest, equal ones stand in the order of the corpus.
    np.testing.assert_allclose(
        first["strongest"]["value"].values, second["strongest"]["value"].values, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        first["partners"]["correlation"].values, second["partners"]["correlation"].values, atol=1e-5
    )


def test_a_sample_of_tokens_is_the_same_in_any_order_and_close_to_all(model: mizarr.Model, tmp_path: Path):
    dictionary, layer = make(tmp_path / "d", "standard", 3)
    _, encoded = computed(model, dictionary, layer, prompts(3, 200), tmp_path / "a")
    blocks = feature_blocks(SIZE, SIZE)
    few, all_of_them = (feature_partners(encoded, blocks, k=SIZE - 1, tokens=n) for n in (800, 10**6))
    assert few.attrs["n_tokens"] == 800 < all_of_them.attrs["n_tokens"]

    def matrix(told: xr.Dataset) -> np.ndarray:
        found = np.zeros((SIZE, SIZE))
        rows, ranks = np.nonzero(told["correlated"].values >= 0)
        found[rows, told["correlated"].values[rows, ranks]] = told["correlation"].values[rows, ranks]
        return found

    assert np.abs(matrix(few) - matrix(all_of_them)).max() < 6 / 800**0.5


def test_a_killed_build_goes_on_at_the_next_block(
    model: mizarr.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dictionary, layer = make(tmp_path / "d", "topk", 4)
    real, seen = intervals_module.feature_numbers, []

    def failing(features: np.ndarray) -> np.ndarray:
        if len(seen) == 2:
            raise RuntimeError("power cut")
        seen.append(features.tolist())
        return real(features)

    monkeypatch.setattr(intervals_module, "feature_numbers", failing)
    store = mizarr.open_store(tmp_path / "s")
    states = CaptureNode(model, prompts(4), [str(dictionary.read_hook(layer))])
    encoded = encode_nodes(dictionary, states, layers=(layer,))[layer]
    node = page_nodes(dictionary, encoded=encoded, layer=layer, layout=LAYOUT)["intervals"]
    with pytest.raises(MizarrError, match=r"block \d failed: RuntimeError: power cut"):
        run(node, store, quiet=True, threads=1)
    monkeypatch.setattr(
        intervals_module, "feature_numbers", lambda features: (seen.append(1), real(features))[1]
    )
    step = plan(node, store).steps[-1]
    assert (step.status.cells_cached, step.status.cells) == (2, 4)
    run(node, store, quiet=True, threads=1)
    assert len(seen) == 4
    whole, _ = computed(model, dictionary, layer, prompts(4), tmp_path / "whole")
    xr.testing.assert_allclose(node.open(store).load(), whole["intervals"], rtol=1e-5)


def test_features_can_be_chosen(model: mizarr.Model, tmp_path: Path):
    dictionary, layer = make(tmp_path / "d", "jumprelu", 1)
    chosen = (30, 2, 17)
    every, _ = computed(model, dictionary, layer, prompts(1), tmp_path / "s")
    some, _ = computed(model, dictionary, layer, prompts(1), tmp_path / "s", features=chosen)
    for name in set(every) - {"statistics"}:
        assert some[name]["feature"].values.tolist() == sorted(chosen)
        xr.testing.assert_allclose(some[name], every[name].sel(feature=sorted(chosen)), rtol=1e-5)


def test_misuse_is_told(model: mizarr.Model, tmp_path: Path):
    dictionary, layer = make(tmp_path / "d", "standard", 1)
    encoded = xr.Dataset(attrs={"n_features": 3})
    for make_wrong, told in (
        (lambda: page_nodes(dictionary, encoded=encoded, layer=5), "found layer 5"),
        (
            lambda: page_nodes(dictionary, encoded=encoded, layer=layer, features=[99]),
            "from 0 to 36 in layer 1 of .*, found 99",
        ),
        (lambda: feature_blocks([1, 1], 4), "each feature once, .* found 2 features, 1 of them different"),
        (lambda: feature_intervals(encoded, encoded, feature_blocks(3, 3), bins=7), "multiple"),
        (lambda: feature_intervals(encoded, encoded, feature_blocks(9, 9)), "from 0 to 2, found 8"),
        (lambda: feature_partners(encoded, feature_blocks(3, 3), k=0), "at least 1"),
    ):
        with pytest.raises(MizarrError, match=told):
            make_wrong()


def test_a_feature_that_never_fires_has_an_empty_page():
    encoded = xr.Dataset(
        {
            "token_ptr": ("edge", [0, 1, 1, 2]),
            "feature": ("active", np.array([1, 1], np.int32)),
            "value": ("active", np.array([2.0, 1.0], np.float32)),
        },
        {
            "prompt": ("token", [0, 0, 1]),
            "position": ("token", [0, 1, 0]),
            "token_id": ("token", [7, 8, 9]),
            "layer": 0,
        },
        {"n_features": 3, "zero_positions": 0},
    )
    from mizarr.stages.features.corpus.examples import top_examples
    from mizarr.stages.features.corpus.statistics import feature_statistics

    blocks = feature_blocks(3, 2)
    told = feature_intervals(encoded, feature_statistics(encoded), blocks, bins=4, intervals=2, draws=2)
    assert told["histogram"].values.tolist() == [[0] * 4, [0, 0, 1, 1], [0] * 4]
    assert told["token"].values[1, 0].tolist() == [-1, -1]
    assert sorted(told["token"].values[1, 1].tolist()) == [0, 2]
    windows = example_windows(encoded, top_examples(encoded, k=2), told, blocks, before=1, after=1)
    assert windows["token"].values[0].tolist() == [-1] * 6
    assert windows["activation"].values[1, 0].tolist() == [0, 2, 0]
    partners = feature_partners(encoded, blocks)
    assert (partners["correlated"].values == -1).all()


def test_twins_are_neighbours_and_a_row_of_zeros_has_none_close(tmp_path: Path):
    weights = draw(2, 8, size=5)
    weights["W_dec"][3] = 2 * weights["W_dec"][1]
    weights["W_dec"][4] = 0
    (tmp_path / "d").mkdir()
    write_saelens(tmp_path / "d", weights)
    dictionary = Dictionary.from_pretrained(tmp_path / "d")
    told = decoder_neighbours(feature_blocks(5, 5), dictionary=dictionary, layer=1, k=9)
    assert told.sizes["rank"] == 4
    assert told["neighbour"].values[[1, 3], 0].tolist() == [3, 1]
    np.testing.assert_allclose(told["cosine"].values[1, 0], 1, atol=1e-6)
    assert not told["cosine"].values[4].any()
    assert not told["l1_share"].values[4].any()
