"""Circuits, composition and copying against the formulas as they are printed, multiplied out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mizarr import HookSpec, Model
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.weights.circuits import (
    bigrams,
    feature_to_head,
    head_to_mlp,
    mlp_to_mlp,
    ov_circuit,
    ov_of_tokens,
    qk_circuit,
    qk_of_tokens,
)
from mizarr.stages.weights.composition import composition_scores
from mizarr.stages.weights.copying import copying_scores, eigenvalue_positivity
from mizarr.stages.weights.folded import FoldedMatrices
from mizarr.stages.weights.positional import position_scores
from mizarr.stages.weights.random_heads import RandomWriters
from mizarr.stages.weights.singular import singular_directions
from mizarr.store.errors import ConfigError
from tests.stages.forward.random_encoders import ENCODERS, save_random_encoder
from tests.stages.forward.random_hybrids import save_random_hybrid

from .test_matrices import matrices, saved

pytest.importorskip("transformers")


def reference(folder: Path) -> dict[str, np.ndarray]:
    """W_Q, W_K, W_V [layer, head, hidden, d_head], W_O [layer, head, d_head, hidden], by the names a Llama's
    checkpoint has, keys and values repeated; W_E, W_U."""
    from safetensors.numpy import load_file

    held = load_file(folder / "model.safetensors")
    config = resolve(str(folder)).architecture()
    heads = config.heads_of(0)
    found: dict[str, list[np.ndarray]] = {name: [] for name in "qkvo"}
    for layer in range(config.num_layers):
        part = {
            name: held[f"model.layers.{layer}.self_attn.{name}_proj.weight"].astype(float) for name in "qkvo"
        }
        for name in "qkv":
            rows = part[name].reshape(-1, heads.head_dim, config.hidden_size).transpose(0, 2, 1)
            found[name].append(rows if name == "q" else np.repeat(rows, heads.queries_per_key, axis=0))
        found["o"].append(part["o"].T.reshape(heads.num_attention_heads, heads.head_dim, -1))
    embed = held["model.embed_tokens.weight"].astype(float)
    made = {f"W_{name.upper()}": np.stack(each) for name, each in found.items()}
    return made | {"W_E": embed, "W_U": held.get("lm_head.weight", embed).astype(float).T}


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_composition_scores_are_the_printed_formula(seed, tmp_path):
    weights, w = matrices(saved("llama", seed, tmp_path)), reference(tmp_path)
    found = composition_scores(weights=weights, controls=0)["score"].values
    norm = np.linalg.norm
    layers, heads = w["W_Q"].shape[:2]
    ov = np.einsum("lhxd,lhdy->lhxy", w["W_V"], w["W_O"])
    qk = np.einsum("lhxd,lhyd->lhxy", w["W_Q"], w["W_K"])
    for a in range(layers):
        for b in range(layers):
            if b <= a:
                assert np.isnan(found[:, a, :, b]).all()
                continue
            for i in range(heads):
                for j in range(heads):
                    right = (qk[b, j], qk[b, j].T, ov[b, j])
                    expected = [norm(ov[a, i] @ m) / (norm(ov[a, i]) * norm(m)) for m in right]
                    np.testing.assert_allclose(found[:, a, i, b, j], expected, rtol=1e-6)


def test_a_head_that_reads_just_what_another_writes_is_beyond_every_control(tmp_path):
    """A pair made by hand in a wide stream: head 0 of layer 1 reads just what head 1 of layer 0 writes."""
    from safetensors.numpy import load_file, save_file

    from ..forward.random_models import save_random_model

    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 64}

    rope = {"rope_type": "default", "rope_theta": 1e4}
    save_random_model(tmp_path, "llama", 0, tokenizer=False, rope_parameters=rope, **config)
    held = load_file(tmp_path / "model.safetensors")
    written = held["model.layers.0.self_attn.o_proj.weight"][:, 8:]
    held["model.layers.1.self_attn.k_proj.weight"][:8] = written.T
    save_file(held, tmp_path / "model.safetensors")
    found = composition_scores(weights=matrices(tmp_path), controls=50, seed=3)
    key = found["score"].sel(mode="K", source_layer=0, layer=1).values
    assert np.unravel_index(key.argmax(), key.shape) == (1, 0)
    assert key[1, 0] > found["largest_control"].sel(mode="K").max()
    share = found["share_as_large"].sel(source_layer=0, layer=1)
    assert share.sel(mode="K").values[1, 0] == pytest.approx(1 / 51)
    # What nobody made: between 0 and 1, as often low as high.
    rest = share.sel(mode=["Q", "V"]).values
    assert 0.2 < rest.mean() < 0.8


def test_random_writers_keep_every_singular_value_and_no_direction():
    rng = np.random.default_rng(0)
    written = rng.normal(size=(3, 4, 12))
    read = rng.normal(size=(12, 4))
    drawn = RandomWriters.of(written).draw(np.random.default_rng(1))
    for one, other in zip(written, drawn, strict=True):
        kept = np.linalg.svd(read @ one, compute_uv=False)
        np.testing.assert_allclose(np.linalg.svd(read @ other, compute_uv=False), kept, atol=1e-9)
        assert np.abs(one - other).max() > 0.1
    centred = written - written.mean(-1, keepdims=True)
    drawn = RandomWriters.of(centred).draw(np.random.default_rng(1))
    np.testing.assert_allclose(drawn.sum(-1), 0, atol=1e-10)
    np.testing.assert_allclose(np.linalg.norm(drawn), np.linalg.norm(centred))


@pytest.mark.parametrize("seed", [0, 3])
def test_circuits_through_the_vocabulary_are_the_products_multiplied_out(seed, tmp_path):
    weights, w = matrices(saved("llama", seed, tmp_path)), reference(tmp_path)
    ov = w["W_E"] @ w["W_V"][1, 0] @ w["W_O"][1, 0] @ w["W_U"]
    found = ov_of_tokens(weights, 1, 0, block=100)
    lazy = found.labelled(100)
    assert lazy.chunks is not None and lazy.dims == ("source_token", "target_token")
    np.testing.assert_allclose(lazy.values, ov, atol=1e-4 * np.abs(ov).max())
    qk = w["W_E"] @ w["W_Q"][1, 0] @ w["W_K"][1, 0].T @ w["W_E"].T
    tokens = qk_of_tokens(weights, 1, 0, block=77)
    np.testing.assert_allclose(
        tokens[3:9, [4, 200]].dense(), qk[3:9][:, [4, 200]], atol=1e-4 * np.abs(qk).max()
    )
    direct = w["W_E"] @ w["W_U"]
    np.testing.assert_allclose(bigrams(weights).dense(), direct, atol=1e-4 * np.abs(direct).max())
    scores = copying_scores(weights=weights, controls=2)
    eigenvalues = np.linalg.eigvals(ov)
    expected = eigenvalues.sum().real / np.abs(eigenvalues).sum()
    assert scores["copying"].values[1, 0] == pytest.approx(expected, abs=1e-5)
    assert eigenvalue_positivity(ov) == pytest.approx(expected, abs=1e-5)
    assert scores["ov_norm"].values[1, 0] == pytest.approx(np.linalg.norm(w["W_V"][1, 0] @ w["W_O"][1, 0]))


@pytest.mark.parametrize("family", ["llama", "phi3", "helium", "gemma", "glm", "gpt_neox", "bloom"])
@pytest.mark.parametrize("seed", [0, 1])
def test_qk_of_one_distance_is_the_score_of_the_pass_less_its_biases(family, seed, tmp_path):
    """Partial, interleaved and stretched rope: normed streams through QK are scores of the pass, where
    queries and keys have no biases; else both sides are without them."""
    model = Model.from_pretrained(saved(family, seed, tmp_path))
    ids = [3, 200, 31, 8, 8, 120]
    points = HookSpec().capture("blocks.*.attn.hook_scores", "blocks.*.ln1.hook_normalized")
    cache = model.forward([ids], points)
    folded = FoldedMatrices(matrices(tmp_path))
    for layer in range(model.config.num_layers):
        heads = model.config.heads_of(layer)
        scores = cache[f"blocks.{layer}.attn.hook_scores"][0].double().numpy()
        read = cache[f"blocks.{layer}.ln1.hook_normalized"][0].double().numpy()
        for head in range(heads.num_attention_heads):
            if any(folded.projection(part, layer, head).bias.any() for part in "qk"):
                continue
            for query, key in ((5, 2), (3, 3), (5, 0), (1, 0)):
                qk = qk_circuit(folded, layer, head, offset=query - key, length=len(ids))
                expected = scores[head, query, key] - (
                    heads.alibi_slopes[head] * key if heads.alibi_slopes else 0
                )
                found = heads.summary.scale * (read[query] @ qk.left) @ (qk.right @ read[key])
                assert found == pytest.approx(expected, rel=1e-4, abs=1e-4 * np.abs(scores).max())


def test_queries_that_are_normed_have_no_qk_circuit_and_an_ov_circuit(tmp_path):
    weights = matrices(saved("qwen3", 0, tmp_path))
    with pytest.raises(ConfigError, match=r"layer 0 of qwen3 have no QK circuit, .* normed before"):
        qk_circuit(weights, 0, 0)
    assert ov_circuit(weights, 0, 0).shape == (weights.config.hidden_size,) * 2
    assert composition_scores(weights=weights, modes=["V"], controls=1)["score"].notnull().any()
    with pytest.raises(ConfigError, match="expected at least one of Q, K, V as the modes"):
        composition_scores(weights=weights, modes=["W"])
    with pytest.raises(ConfigError, match="expected an offset of 0 or more"):
        qk_circuit(matrices(saved("llama", 0, tmp_path / "other")), 0, 0, offset=-1)


def test_virtual_weights_are_products_of_what_one_writes_and_another_reads(tmp_path):
    weights = matrices(saved("llama", 2, tmp_path))
    up, gate = (weights.mlp_in(1)[part].matrix.astype(float) for part in ("up", "gate"))
    down = weights.mlp_out(0).matrix.astype(float)
    np.testing.assert_allclose(mlp_to_mlp(weights, 0, 1).dense(), down @ up, atol=1e-5)
    np.testing.assert_allclose(mlp_to_mlp(weights, 0, 1, part="gate").dense(), down @ gate, atol=1e-5)
    ov = ov_circuit(weights, 1, 0)
    found = head_to_mlp(weights, 1, 0, 1)
    assert found.inner == ov.inner
    np.testing.assert_allclose(found.dense(), ov.dense() @ up, atol=1e-4)
    written = np.random.default_rng(0).normal(size=(3, weights.config.hidden_size))
    qk = qk_circuit(weights, 1, 0).dense()
    for part, expected in (("v", written @ ov.dense()), ("q", written @ qk), ("k", written @ qk.T)):
        made = feature_to_head(weights, written, 1, 0, part=part)
        assert made.dims[0] == "feature"
        np.testing.assert_allclose(made.dense(), expected, atol=1e-3)
    with pytest.raises(ConfigError, match="source layer 1 and reading layer 1"):
        mlp_to_mlp(weights, 1, 1)
    with pytest.raises(ConfigError, match="found 'w'"):
        feature_to_head(weights, written, 1, 0, part="w")
    with pytest.raises(ConfigError, match="input matrices gate, up, found part='down'"):
        mlp_to_mlp(weights, 0, 1, part="down")


BOTH_WAYS = {
    "is_causal": False,
    "window_size": 4,
    "num_layers": 2,
    "attention_types": [[["local", "global"], 1]],
}
"""A decoder whose first layer sees three positions on each side."""


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gpt2", {}),
        ("opt", {}),
        ("gpt_neo", BOTH_WAYS),
        ("megatron-bert", {}),
        ("xlm-roberta-xl", {}),
    ],
)
def test_positions_alone_are_what_the_pass_attends_to_when_all_tokens_are_the_mean(family, told, tmp_path):
    save = save_random_encoder if family in ENCODERS else save_random_hybrid
    save(tmp_path, family, 1, tokenizer=False, **told)
    model = Model.from_pretrained(tmp_path)
    with torch.no_grad():
        embed = model.network.weights.embed
        embed[:] = embed.double().mean(0).float()
    cache = model.forward([[5] * 20], HookSpec().capture("blocks.0.attn.hook_pattern"))
    pattern = cache["blocks.0.attn.hook_pattern"][0].numpy()
    found = position_scores(weights=matrices(tmp_path), length=20, offsets=4)["weight"].sel(layer=0)
    assert found["offset"].values.tolist() == list(range(-4 if model.config.looks_ahead else 0, 5))
    expected = np.stack(
        [[each.diagonal(-back).mean() for back in found["offset"].values] for each in pattern]
    )
    assert not model.config.looks_ahead or expected[:, 0].max() > (0 if "window_size" in told else 1e-3)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    with pytest.raises(ConfigError, match="found folded ones"):
        position_scores(weights=FoldedMatrices(matrices(tmp_path)))
    with pytest.raises(ConfigError, match=r"offsets in 1\.\.19"):
        position_scores(weights=matrices(tmp_path), length=20, offsets=20)


@pytest.mark.parametrize("family", ["bert", "openai-gpt"])
def test_norms_on_the_stream_leave_no_positions_to_ask_about(family, tmp_path):
    save = save_random_encoder if family in ENCODERS else save_random_hybrid
    save(tmp_path, family, 0, tokenizer=False)
    with pytest.raises(ConfigError, match=f"layer 0 of {family} normalises the residual stream itself"):
        position_scores(weights=matrices(tmp_path))


def test_what_a_transform_or_the_masks_of_a_prompt_stand_between_is_no_circuit_of_tokens(tmp_path):
    """Shapes fit: the head of Megatron-BERT is as wide as its stream; ESM's embeddings are rows of a matrix
    until they are multiplied by what the prompt says."""
    save_random_encoder(tmp_path / "bert", "megatron-bert", 0, tokenizer=False)
    weights = matrices(tmp_path / "bert")
    assert (
        weights.embedding(slice(0, 2)).shape[1]
        == weights.config.hidden_size
        == weights.config.transform.width
    )
    for ask in (lambda: weights.unembedding(slice(0, 2)), lambda: copying_scores(weights=weights)):
        with pytest.raises(
            ConfigError, match=r"found megatron-bert, which applies a dense map, .* before its language head"
        ):
            ask()
    drops = {"token_dropout": True, "emb_layer_norm_before": False}
    save_random_encoder(tmp_path / "esm", "esm", 0, tokenizer=False, **drops)
    weights = matrices(tmp_path / "esm")
    with pytest.raises(ConfigError, match="multiplied by the share of masks in their prompt"):
        weights.embedding(slice(0, 2))
    assert qk_circuit(weights, 0, 0).shape == (weights.config.hidden_size,) * 2


@pytest.mark.parametrize("circuit", ["OV", "QK"])
def test_singular_directions_name_the_tokens_farthest_along_them(circuit, tmp_path, monkeypatch):
    from mizarr.stages.weights import matrices as stored_matrices

    monkeypatch.setattr(stored_matrices, "ROWS", 90)
    weights, w = matrices(saved("llama", 1, tmp_path)), reference(tmp_path)
    found = singular_directions(weights=weights, layer=1, head=0, circuit=circuit, directions=3, top_k=4)
    inner = w["W_K"][1, 0].T if circuit == "QK" else w["W_O"][1, 0]
    u, s, vt = np.linalg.svd((w["W_Q"] if circuit == "QK" else w["W_V"])[1, 0] @ inner)
    np.testing.assert_allclose(found["singular_value"], s[:3], rtol=1e-5)
    for d in range(3):
        written = s[d] * vt[d] @ (w["W_E"].T if circuit == "QK" else w["W_U"])
        read = w["W_E"] @ u[:, d]
        sign = 1 if written.max() >= -written.min() else -1
        for name, values in (("written", sign * written), ("read", sign * read)):
            order = np.argsort(-values)[:4]
            assert found[f"{name}_token"].values[d].tolist() == order.tolist()
            np.testing.assert_allclose(found[f"{name}_by"].values[d], values[order], rtol=1e-4)


def test_a_stage_is_keyed_by_the_weights_it_reads(tmp_path):
    from mizarr.pipeline import run
    from mizarr.stages.weights.stored import StoredMatrices
    from mizarr.store import open_store
    from mizarr.store.errors import SourceChanged

    files = resolve(str(saved("llama", 0, tmp_path / "model")))
    store = open_store(tmp_path / "store")
    node = copying_scores.on(weights=StoredMatrices.of(files), controls=1)
    run(node, store)
    copy = tmp_path / "copy"
    (tmp_path / "model").rename(copy)
    again = copying_scores.on(weights=StoredMatrices.of(resolve(str(copy))), controls=1)
    assert again.status(store).is_cached
    plain = copying_scores.on(weights=StoredMatrices.of(resolve(str(copy)), folded=False), controls=1)
    assert not plain.status(store).is_cached
    saved("llama", 7, copy)
    with pytest.raises(SourceChanged):
        again.status(store)


def test_no_torch_is_needed_where_files_hold_plain_numbers(tmp_path):
    from tests.torch_free import without_torch

    saved("gpt2", 0, tmp_path)
    program = """
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.weights.composition import composition_scores
from mizarr.stages.weights.folded import FoldedMatrices
from mizarr.stages.weights.matrices import PlainMatrices
files = resolve(sys.argv[1])
weights = FoldedMatrices(PlainMatrices(files.checkpoint, files.architecture()))
print(json.dumps(float(composition_scores(weights=weights, controls=1)["score"].max())))
"""
    here = composition_scores(weights=FoldedMatrices(matrices(tmp_path)), controls=1)["score"].max()
    assert without_torch(program, tmp_path) == pytest.approx(float(here), rel=1e-9)


@pytest.mark.slow
def test_a_million_tokens_open_lazily_within_a_gigabyte(tmp_path):
    import json

    from safetensors.numpy import save_file

    from tests.memory import PEAK, printed

    vocab, hidden, size = 1_000_000, 128, 32
    rng = np.random.default_rng(0)
    config = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": size, "intermediate_size": 64, "vocab_size": vocab,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = resolve_shapes(config)
    save_file(
        {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    script = f"""
import sys
from mizarr.stages.forward.models.files import resolve
from mizarr.stages.weights.circuits import ov_of_tokens
from mizarr.stages.weights.folded import FoldedMatrices
from mizarr.stages.weights.matrices import PlainMatrices
files = resolve(sys.argv[1])
weights = FoldedMatrices(PlainMatrices(files.checkpoint, files.architecture()), unembeddings=False)
circuit = ov_of_tokens(weights, 0, 1)
lazy = circuit.labelled()
assert lazy.shape == ({vocab}, {vocab})
block = lazy[500_000:502_000, 999_000:].values
assert abs(block[3, 5] - circuit[500_003, 999_005]) < 1e-3 * abs(block).max()
assert len(circuit.eigenvalues) == {size}
print({PEAK})
"""
    assert printed(script, str(tmp_path)) < 1 << 30


def resolve_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    from mizarr.stages.forward.architectures.known import from_hf_config
    from mizarr.stages.forward.networks.weights import expected_tensors

    return expected_tensors(from_hf_config(config))
