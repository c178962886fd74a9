"""A stored corpus as features: what one prompt at a time gives, in pieces, resumed, and read again without
torch.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mizarr
from mizarr.pipeline import StageNode, plan, run
from mizarr.stages.features.corpus import encode, sparse
from mizarr.stages.features.corpus.encode import encode_corpus, encode_nodes
from mizarr.stages.features.corpus.examples import contexts, top_examples
from mizarr.stages.features.corpus.sparse import active_table, blocks
from mizarr.stages.features.corpus.statistics import feature_statistics
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store.errors import MizarrError

from ....random_dictionaries import draw, save, save_random_clt, write_config, write_plt, write_saelens

PROMPTS = [[5, 9, 2, 31, 7, 4], [11, 3, 3, 8], [40, 2, 17, 5, 5, 6, 1, 60, 9], [7, 7]]
SIZE = 30


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    return Dictionary.from_pretrained(save_random_clt(tmp_path_factory.mktemp("clt"), 6, 192, SIZE))


def states_of(model: mizarr.Model, clt: Dictionary, *, segment_tokens: int | None = None) -> CaptureNode:
    return CaptureNode(model, PROMPTS, [str(hook) for hook in clt.read_hooks], segment_tokens=segment_tokens)


@pytest.fixture(scope="module")
def stored(model: mizarr.Model, clt: Dictionary, tmp_path_factory: pytest.TempPathFactory):
    """The store, the nodes, and layer 2 encoded in pieces of 8 tokens."""
    store = mizarr.open_store(tmp_path_factory.mktemp("store"))
    nodes = encode_nodes(clt, states_of(model, clt, segment_tokens=8), layers=(2, 4))
    run(list(nodes.values()), store)
    return store, nodes, nodes[2].open(store)


def one_by_one(model: mizarr.Model, clt: Dictionary, **how: int) -> list[tuple[int, int, int, int, float]]:
    """(layer, prompt, position, feature, activation) of every prompt on its own."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        cache = model.forward([prompt], mizarr.HookSpec().capture(*clt.read_hooks))
        active = clt.encode({layer: cache[clt.read_hook(layer)][0] for layer in (2, 4)}, **how)
        found += [
            (layer, number, position, feature, value)
            for (layer, position, feature), value in zip(
                active.indices.tolist(), active.value.tolist(), strict=True
            )
        ]
    return sorted(found)


def rows(table: xr.Dataset) -> list[tuple[int, int, int, int, float]]:
    columns = [
        table[name].values.tolist() for name in ("layer", "prompt", "position", "feature", "activation")
    ]
    return list(zip(*columns, strict=True))


def test_a_corpus_has_the_features_of_its_prompts(model: mizarr.Model, clt: Dictionary, stored):
    store, nodes, _ = stored
    table = active_table({layer: node.open(store) for layer, node in nodes.items()})
    expected = one_by_one(model, clt)
    found = rows(table)
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    np.testing.assert_allclose([row[4] for row in found], [row[4] for row in expected], rtol=1e-4, atol=1e-5)
    ids = [PROMPTS[prompt][position] for _, prompt, position, _, _ in expected]
    assert table["token_id"].values.tolist() == ids


def test_features_of_a_token_lie_between_its_pointers_ascending(stored):
    _, _, encoded = stored
    ptr, feature = encoded["token_ptr"].values, encoded["feature"].values
    assert encoded["feature"].dtype == np.int32
    assert encoded["value"].dtype == np.float32
    assert len(ptr) == 1 + sum(map(len, PROMPTS))
    for start, stop in itertools.pairwise(ptr):
        assert (np.diff(feature[start:stop]) > 0).all()


def test_first_positions_can_be_left_out(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    store = mizarr.open_store(tmp_path)
    table = encode_corpus(clt, model, PROMPTS, store=store, layers=(2, 4), zero_positions=1, progress=False)
    assert [row[:4] for row in rows(table)] == [row[:4] for row in one_by_one(model, clt, zero_positions=1)]
    assert table["position"].values.min() == 1


def test_what_stands_is_not_computed_again(
    model: mizarr.Model, clt: Dictionary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = mizarr.open_store(tmp_path)
    states = states_of(model, clt, segment_tokens=8)
    seen: list[int] = []
    real, lasts = encode.is_counted, [2]

    def counting(states: xr.DataArray, n_tokens: int, zero_positions: int) -> np.ndarray:
        if len(seen) == lasts[0]:
            raise RuntimeError("power cut")
        seen.append(n_tokens)
        return real(states, n_tokens, zero_positions)

    monkeypatch.setattr(encode, "is_counted", counting)
    with pytest.raises(MizarrError, match="power cut"):
        run(encode_nodes(clt, states, layers=(2,))[2], store, threads=1)
    lasts[0] = 99
    node = encode_nodes(clt, states, layers=(2,))[2]
    run(node, store, threads=1)
    assert sorted(seen) == [5, 8, 8]  # in what order blocks are taken follows their digests
    seen.clear()
    run(list(encode_nodes(clt, states, layers=(2, 3)).values()), store, threads=1)
    assert len(seen) == 3


def test_neither_place_nor_device_is_in_the_key(model: mizarr.Model, clt: Dictionary, stored, tmp_path: Path):
    store, _, _ = stored
    moved = Dictionary.from_pretrained(save_random_clt(tmp_path / "elsewhere", 6, 192, SIZE))
    nodes = encode_nodes(moved, states_of(model, moved, segment_tokens=8), layers=(2,), device="cpu")
    assert plan([nodes[2]], store).is_cached


def test_a_dictionary_that_changed_since_is_not_mistaken_for_the_planned_one(
    model: mizarr.Model, tmp_path: Path
):
    clt = Dictionary.from_pretrained(save_random_clt(tmp_path / "clt", 6, 192, SIZE))
    node = encode_nodes(clt, states_of(model, clt), layers=(5,))[5]
    assert clt.identity
    weights = draw(77, 192, size=SIZE)
    kept = {f"{name}_5": weights[name] for name in ("W_enc", "b_enc", "b_dec", "threshold")}
    save(tmp_path / "clt", "W_enc_5.safetensors", kept)
    store = mizarr.open_store(tmp_path / "store")
    with pytest.raises(
        MizarrError, match=r"W_enc_5.safetensors of the dictionary .*clt changed while .*; open it again"
    ):
        run(node, store)


def test_heads_are_encoded_side_by_side(model: mizarr.Model, tmp_path: Path):
    write_saelens(tmp_path / "sae", draw(3, 192), metadata={"hook_name": "blocks.1.attn.hook_z"})
    sae = Dictionary.from_pretrained(tmp_path / "sae")
    table = encode_corpus(sae, model, PROMPTS, store=mizarr.open_store(tmp_path / "s"), progress=False)
    z = model.forward([PROMPTS[1]], mizarr.HookSpec().capture("blocks.1.attn.hook_z"))[
        "blocks.1.attn.hook_z"
    ][0]
    flat = torch.cat(list(z), dim=-1)
    _, position, feature = sae.encode({1: flat}).indices.T
    here = table.isel(active=np.flatnonzero(table["prompt"].values == 1))
    assert here["position"].values.tolist() == position.tolist()
    assert here["feature"].values.tolist() == feature.tolist()


def test_embeddings_are_encoded_too(model: mizarr.Model, tmp_path: Path):
    write_saelens(tmp_path / "sae", draw(3, 192), metadata={"hook_name": "hook_embed"})
    sae = Dictionary.from_pretrained(tmp_path / "sae")
    table = encode_corpus(sae, model, PROMPTS, store=mizarr.open_store(tmp_path / "s"), progress=False)
    embed = model.forward([PROMPTS[0]], mizarr.HookSpec().capture("hook_embed"))["hook_embed"][0]
    expected = sae.encode({0: embed})
    here = table.isel(active=np.flatnonzero(table["prompt"].values == 0))
    assert here["feature"].values.tolist() == expected.feature.tolist()


def test_nothing_active_is_an_empty_table(model: mizarr.Model, tmp_path: Path):
    weights = draw(0, 192, size=SIZE)
    weights["b_enc"] -= 1e6
    for layer in range(6):
        write_plt(tmp_path / "plt", layer, weights)
    write_config(tmp_path / "plt")
    plt = Dictionary.from_pretrained(tmp_path / "plt")
    states = states_of(model, plt, segment_tokens=8)
    node = encode_nodes(plt, states, layers=(0,))[0]
    store = mizarr.open_store(tmp_path / "s")
    run(node, store)
    encoded = node.open(store)
    assert active_table({0: encoded}).sizes["active"] == 0
    assert feature_statistics(encoded)["l0_count"].values.tolist() == [sum(map(len, PROMPTS))]


def test_a_dictionary_of_another_model_is_refused_before_anything_runs(model: mizarr.Model, tmp_path: Path):
    clt = Dictionary.from_pretrained(save_random_clt(tmp_path / "clt", 6, 64, SIZE))
    with pytest.raises(MizarrError, match="states of width 64 at"):
        encode_corpus(clt, model, PROMPTS, store=mizarr.open_store(tmp_path / "s"), progress=False)


# -- reading it again


def dense(encoded: xr.Dataset) -> np.ndarray:
    """[token, feature]."""
    ptr = encoded["token_ptr"].values
    found = np.zeros((len(ptr) - 1, SIZE), np.float32)
    token = np.repeat(np.arange(len(found)), np.diff(ptr))
    found[token, encoded["feature"].values] = encoded["value"].values
    return found


@pytest.mark.parametrize("size", [1, 7, 50, 1 << 20])
def test_blocks_together_are_everything_in_order(size: int, stored):
    _, _, encoded = stored
    parts = list(blocks(encoded, size))
    np.testing.assert_array_equal(np.concatenate([part.feature for part in parts]), encoded["feature"].values)
    assert (np.diff(np.concatenate([part.token for part in parts])) >= 0).all()


def test_statistics_are_those_of_the_dense_activations(stored):
    _, _, encoded = stored
    x = dense(encoded)
    found = feature_statistics(encoded)
    fires = x > 0
    np.testing.assert_array_equal(found["firing_count"], fires.sum(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(found["log10_frequency"], np.log10(fires.mean(0)))
        mean = np.where(fires.any(0), x.sum(0) / fires.sum(0), 0)
    np.testing.assert_allclose(found["mean_activation"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["max_activation"], x.max(0))
    np.testing.assert_array_equal(found["l0_count"], np.bincount(fires.sum(1)))
    assert found.attrs["n_tokens"] == len(x)


@pytest.mark.parametrize("one_per_prompt", [False, True])
@pytest.mark.parametrize("size", [1, 13, 1 << 20])
def test_examples_do_not_depend_on_blocks(
    one_per_prompt: bool, size: int, stored, monkeypatch: pytest.MonkeyPatch
):
    _, _, encoded = stored
    monkeypatch.setattr(sparse.blocks, "__defaults__", (size,))
    x, prompt = dense(encoded), encoded["prompt"].values
    found = top_examples(encoded, k=3, one_per_prompt=one_per_prompt)
    for feature in range(SIZE):
        order = [t for t in np.argsort(-x[:, feature], kind="stable") if x[t, feature] > 0]
        if one_per_prompt:
            order = [t for i, t in enumerate(order) if prompt[t] not in prompt[order[:i]]]
        expected = (order + [-1] * 3)[:3]
        assert found["token"][feature].values.tolist() == expected


def test_contexts_are_the_tokens_around_with_their_activations(stored):
    _, _, encoded = stored
    x = dense(encoded)
    examples = top_examples(encoded, k=2, one_per_prompt=True)
    fired = int(examples["feature"].values[(examples["token"].values[:, 1] >= 0).argmax()])
    found = contexts(examples, encoded, features=[fired], before=2, after=3).isel(feature=0)
    assert found["window"].values.tolist() == [-2, -1, 0, 1, 2, 3]
    flat = [(p, i) for p, prompt in enumerate(PROMPTS) for i in range(len(prompt))]
    for rank in range(2):
        token = int(examples["token"].sel(feature=fired)[rank])
        prompt, position = flat[token]
        assert (int(found["prompt"][rank]), int(found["position"][rank])) == (prompt, position)
        for w, offset in enumerate(range(-2, 4)):
            there = position + offset
            inside = 0 <= there < len(PROMPTS[prompt])
            assert int(found["token_id"][rank, w]) == (PROMPTS[prompt][there] if inside else -1)
            assert float(found["activation"][rank, w]) == (x[token + offset, fired] if inside else 0)


def test_a_feature_there_is_not_has_no_examples(stored):
    _, _, encoded = stored
    with pytest.raises(MizarrError, match=f"from 0 to {SIZE - 1}, found {SIZE}"):
        top_examples(encoded, features=(SIZE,))


def test_statistics_and_examples_of_a_stored_corpus_never_load_torch(stored, tmp_path: Path):
    store, nodes, _ = stored
    statistics = feature_statistics.on(encoded=nodes[2])
    examples = top_examples.on(encoded=nodes[2], k=3)
    assert isinstance(statistics, StageNode)
    run([statistics, examples], store)
    assert statistics.open(store).sizes["feature"] == SIZE
    key = nodes[2].key(store).digest
    code = f"""
import sys
import mizarr
from mizarr.stages.features.corpus.sparse import active_table
from mizarr.stages.features.corpus.statistics import feature_statistics
from mizarr.stages.features.corpus.examples import contexts, top_examples
store = mizarr.open_store({str(store.path)!r}, mode="r")
record = next(r for r in store.records() if r.key == {key!r})
encoded = store.open_result(record)
feature_statistics(encoded); contexts(top_examples(encoded), encoded); active_table({{2: encoded}})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_features(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    stores = [mizarr.open_store(tmp_path / device) for device in ("cpu", "cuda")]
    tables = [
        encode_corpus(clt, "specimen", PROMPTS, store=store, layers=(2,), device=device, progress=False)
        for store, device in zip(stores, ("cpu", "cuda"), strict=True)
    ]
    assert [row[:4] for row in rows(tables[0])] == [row[:4] for row in rows(tables[1])]
    np.testing.assert_allclose(tables[0]["activation"], tables[1]["activation"], rtol=1e-3, atol=1e-4)
