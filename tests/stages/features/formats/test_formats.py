"""Every format of dictionaries is read as its publisher means it: arithmetic by hand, sizes, hook points,
layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.formats.table import FORMATS
from mizarr.stages.features.layers.activations import AbsTopK, GroupMax, TopK
from mizarr.store.errors import DictionaryError
from mizarr.store.exchange.tensors import npz_array

from ....random_dictionaries import (
    D,
    F,
    draw,
    save,
    states,
    write_clt,
    write_config,
    write_gemma_scope_2,
    write_npz,
    write_plt,
    write_saelens,
    write_sparsify,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def relu(p: np.ndarray) -> np.ndarray:
    return np.maximum(p, 0)


def top(p: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros(p.shape, bool)
    np.put_along_axis(kept, np.argsort(-p, axis=-1, kind="stable")[:, :k], True, axis=-1)
    return p * kept


def check(dictionary: Dictionary, layer: int, activations: np.ndarray, output: np.ndarray) -> None:
    """The dictionary's own activations and reconstruction of `states()`, dense and sparse, are these."""
    x = states(width=dictionary.d_in)
    features = dictionary.layer(layer)
    np.testing.assert_allclose(features.encode(x), activations, **CLOSE)
    np.testing.assert_allclose(features.reconstruct(features.encode(x), x), output, **CLOSE)
    active = dictionary.encode({layer: x})
    assert len(active) == np.count_nonzero(activations)
    rebuilt = {layer: x} if dictionary.kind != "clt" else {}
    if rebuilt:
        np.testing.assert_allclose(dictionary.reconstruct(active, rebuilt)[layer], output, **CLOSE)


# -- SAELens


def standard(w, x, **_):
    a = relu((x - w["b_dec"]) @ w["W_enc"].T + w["b_enc"])
    return a, a @ w["W_dec"] + w["b_dec"]


def jumprelu(w, x, **_):
    p = (x - w["b_dec"]) @ w["W_enc"].T + w["b_enc"]
    a = relu(p) * (p > w["threshold"])
    return a, a @ w["W_dec"] + w["b_dec"]


def topk(w, x, k=3, rescale=False):
    norms = np.linalg.norm(w["W_dec"], axis=1) if rescale else np.float32(1)
    p = ((x - w["b_dec"]) @ w["W_enc"].T + w["b_enc"]) * norms
    a = relu(top(p, k))
    return a, (a / norms) @ w["W_dec"] + w["b_dec"]


def gated(w, x, **_):
    z = (x - w["b_dec"]) @ w["W_enc"].T
    a = (z + w["b_gate"] > 0) * relu(z * np.exp(w["r_mag"]) + w["b_mag"])
    return a, a @ w["W_dec"] + w["b_dec"]


def transcoder(w, x, **_):
    a = relu(x @ w["W_enc"].T + w["b_enc"])
    return a, a @ w["W_dec"] + w["b_dec"]


def jumprelu_transcoder(w, x, **_):
    p = x @ w["W_enc"].T + w["b_enc"]
    a = relu(p) * (p > w["threshold"])
    return a, a @ w["W_dec"] + w["b_dec"]


def skip_transcoder(w, x, **_):
    a, y = transcoder(w, x)
    return a, y + x @ w["W_skip"].T


def abstopk(w, x, k=3, **_):
    p = (x - w["b_dec"]) @ w["W_enc"].T + w["b_enc"]
    a = p * (top(np.abs(p), k) != 0)
    return a, a @ w["W_dec"] + w["b_dec"]


SAELENS: dict[str, tuple[Callable, dict]] = {
    "standard": (standard, {}),
    "jumprelu": (jumprelu, {}),
    "topk": (topk, {"k": 3}),
    "abstopk": (abstopk, {"k": 3}),
    "gated": (gated, {}),
    "transcoder": (transcoder, {}),
    "skip_transcoder": (skip_transcoder, {}),
    "jumprelu_transcoder": (jumprelu_transcoder, {}),
}


@pytest.mark.parametrize("architecture", SAELENS)
def test_saelens_architectures_are_what_its_documentation_says(architecture: str, tmp_path: Path):
    by_hand, config = SAELENS[architecture]
    is_transcoder = "transcoder" in architecture
    weights = draw(d_out=D + 4 if is_transcoder else None)
    write_saelens(tmp_path, weights, architecture, **config)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert (dictionary.kind, dictionary.layers, dictionary.n_features) == (
        "plt" if is_transcoder else "sae",
        (1,),
        F,
    )
    reads = "blocks.1.mlp.hook_pre" if is_transcoder else "blocks.1.hook_resid_post"
    assert str(dictionary.read_hook(1)) == reads
    check(dictionary, 1, *by_hand(weights, states().numpy(), **config))


def test_topk_by_decoder_norm_divides_by_the_same_norms(tmp_path: Path):
    weights = draw()
    write_saelens(tmp_path, weights, "topk", k=3, rescale_acts_by_decoder_norm=True)
    check(Dictionary.from_pretrained(tmp_path), 1, *topk(weights, states().numpy(), 3, True))


@pytest.mark.parametrize("name", ["constant_norm_rescale", "layer_norm", "expected_average_only_in"])
def test_scaled_inputs_are_scaled_back(name: str, tmp_path: Path):
    weights, x = draw(), states().numpy()
    write_saelens(tmp_path, weights, "standard", normalize_activations=name)
    if name == "constant_norm_rescale":
        c = D**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
        a, y = standard(weights, x * c)
        check(Dictionary.from_pretrained(tmp_path), 1, a, y / c)
    elif name == "layer_norm":
        mean = x.mean(1, keepdims=True)
        std = (x - mean).std(1, ddof=1, keepdims=True)
        a, y = standard(weights, (x - mean) / (std + 1e-5))
        check(Dictionary.from_pretrained(tmp_path), 1, a, y * std + mean)
    else:  # folded into the weights when training ended
        check(Dictionary.from_pretrained(tmp_path), 1, *standard(weights, x))


def test_without_apply_b_dec_inputs_are_taken_as_they_are(tmp_path: Path):
    weights = draw()
    write_saelens(tmp_path, weights, "standard", apply_b_dec_to_input=False)
    check(Dictionary.from_pretrained(tmp_path), 1, *transcoder(weights, states().numpy()))


def test_old_configurations_mean_what_they_meant(tmp_path: Path):
    weights = draw()
    write_saelens(tmp_path, weights)
    old = {
        "d_in": D,
        "d_sae": F,
        "dtype": "torch.float32",
        "hook_point": "blocks.3.hook_resid_pre",
        "model_name": "gpt2-small",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 5},
        "normalize_activations": None,
    }
    (tmp_path / "cfg.json").write_text(json.dumps(old))
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert dictionary.layers == (3,)
    assert str(dictionary.write_hook(3)) == "blocks.3.hook_resid_pre"
    assert dictionary.model_name == "gpt2-small"
    check(dictionary, 3, *topk(weights, states().numpy(), 5))


def test_batch_topk_in_training_is_read_as_the_jumprelu_it_will_be_saved_as(tmp_path: Path):
    weights = draw()
    write_saelens(tmp_path, weights, "matryoshka_batchtopk", k=5)
    file = {name: weights[name] for name in ("W_dec", "b_enc", "b_dec")} | {"W_enc": weights["W_enc"].T}
    save(tmp_path, "sae_weights.safetensors", file | {"topk_threshold": np.array(0.4, np.float32)})
    weights["threshold"] = np.full(F, 0.4, np.float32)
    check(Dictionary.from_pretrained(tmp_path), 1, *jumprelu(weights, states().numpy()))


def test_a_folder_of_saelens_folders_is_one_dictionary(tmp_path: Path):
    for layer in (2, 0):
        write_saelens(
            tmp_path / f"l{layer}",
            draw(layer),
            metadata={"hook_name": f"blocks.{layer}.hook_resid_post"},
        )
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert dictionary.layers == (0, 2)
    check(dictionary, 2, *standard(draw(2), states().numpy()))


def test_two_dictionaries_of_one_layer_are_told_apart_by_the_caller(tmp_path: Path):
    for name in ("small", "large"):
        write_saelens(tmp_path / name, draw())
    with pytest.raises(mizarr.MizarrError, match="found 2 of layer 1: large, small; open one of these"):
        Dictionary.from_pretrained(tmp_path)


# -- sparsify


def test_sparsify_autoencoders(tmp_path: Path):
    weights = draw()
    write_sparsify(tmp_path / "layers.2", weights)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert str(dictionary.read_hook(2)) == "blocks.2.hook_resid_post"
    check(dictionary, 2, *topk(weights, states().numpy(), 4))


def test_sparsify_transcoders_with_a_skip(tmp_path: Path):
    weights, x = draw(), states().numpy()
    write_sparsify(tmp_path / "layers.2.mlp", weights, skip=True)
    dictionary = Dictionary.from_pretrained(tmp_path / "layers.2.mlp")
    assert [str(dictionary.read_hook(2)), str(dictionary.write_hook(2))] == [
        "blocks.2.mlp.hook_pre",
        "blocks.2.mlp.hook_post",
    ]
    a = relu(top(x @ weights["W_enc"].T + weights["b_enc"], 4))
    check(dictionary, 2, a, a @ weights["W_dec"] + weights["b_dec"] + x @ weights["W_skip"].T)


def test_sparsify_groups_have_one_winner_each(tmp_path: Path):
    weights, x = draw(), states().numpy()
    write_sparsify(tmp_path / "layers.0", weights, activation="groupmax")
    p = (x - weights["b_dec"]) @ weights["W_enc"].T + weights["b_enc"]
    a = relu(np.concatenate([top(group, 1) for group in np.split(p, 4, axis=1)], axis=1))
    check(Dictionary.from_pretrained(tmp_path), 0, a, a @ weights["W_dec"] + weights["b_dec"])


# -- Gemma Scope


def gemma(w, x):
    p = x @ w["W_enc"].T + w["b_enc"]
    a = p * (p > w["threshold"])
    return a, a @ w["W_dec"] + w["b_dec"]


@pytest.mark.parametrize("deflated", [False, True])
def test_gemma_scope_files_are_read_stored_or_deflated(deflated: bool, tmp_path: Path):
    place = (
        tmp_path / "gemma-scope-2b-pt-transcoders" / "layer_3" / "width_16k" / "average_l0_7" / "params.npz"
    )
    write_npz(place, draw(), deflated=deflated)
    dictionary = Dictionary.from_pretrained(place.parent)
    assert [str(dictionary.read_hook(3)), str(dictionary.write_hook(3))] == [
        "blocks.3.ln2.hook_normalized",
        "blocks.3.hook_mlp_out",
    ]
    assert dictionary.model_name == "google/gemma-2-2b"
    check(dictionary, 3, *gemma(draw(), states().numpy()))
    assert isinstance(npz_array(place, "W_enc", DictionaryError), np.memmap) is not deflated


@pytest.mark.parametrize(
    ("repository", "hook"),
    [("res", "blocks.0.hook_resid_post"), ("mlp", "blocks.0.hook_mlp_out"), ("att", "blocks.0.attn.hook_z")],
)
def test_gemma_scope_repositories_say_what_is_read(repository: str, hook: str, tmp_path: Path):
    folder = tmp_path / f"gemma-scope-9b-it-{repository}"
    write_npz(folder / "layer_0" / "width_16k" / "average_l0_7" / "params.npz", draw())
    dictionary = Dictionary.from_pretrained(folder)
    assert (str(dictionary.read_hook(0)), dictionary.kind) == (hook, "sae")
    assert dictionary.model_name == "google/gemma-2-9b-it"


def test_gemma_scope_embeddings_are_scaled(tmp_path: Path):
    weights, x = draw(), states().numpy()
    write_npz(
        tmp_path / "gemma-scope-2b-pt-res" / "embedding" / "width_4k" / "average_l0_6" / "params.npz", weights
    )
    dictionary = Dictionary.from_pretrained(tmp_path / "gemma-scope-2b-pt-res")
    assert str(dictionary.read_hook(0)) == "hook_embed"
    root = np.float32(D**0.5)
    weights["W_enc"], weights["W_dec"] = weights["W_enc"] / root, weights["W_dec"] * root
    check(dictionary, 0, *gemma(weights, x))
    np.testing.assert_allclose(dictionary.decoder_vector((0, 5)), weights["W_dec"][5], **CLOSE)
    np.testing.assert_allclose(dictionary.layer(0).encoder_rows([5])[0], weights["W_enc"][5], **CLOSE)


def test_files_of_unknown_origin_need_to_be_told_what_they_read(tmp_path: Path):
    write_npz(tmp_path / "layer_5" / "params.npz", draw())
    with pytest.raises(
        mizarr.MizarrError,
        match=r"found none in its files; name the hook points that its features read and write with",
    ):
        Dictionary.from_pretrained(tmp_path)
    dictionary = Dictionary.from_pretrained(tmp_path, read="hook_resid_mid", write="hook_mlp_out")
    assert (str(dictionary.read_hook(5)), dictionary.kind) == ("blocks.5.hook_resid_mid", "plt")


@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2_transcoders(affine: bool, tmp_path: Path):
    weights, x = draw(), states().numpy()
    place = tmp_path / "transcoder_all" / "layer_4_width_16k_l0_small_affine" / "params.safetensors"
    write_gemma_scope_2(place, weights, affine=affine)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert str(dictionary.read_hook(4)) == "blocks.4.mlp.hook_pre"
    a, y = gemma(weights, x)
    check(dictionary, 4, a, y + x @ weights["W_skip"].T if affine else y)


def test_gemma_scope_2_config_says_where_and_for_which_model(tmp_path: Path):
    place = tmp_path / "layer_4_width_16k_l0_small" / "params.safetensors"
    write_gemma_scope_2(place, draw())
    said = {
        "model_name": "gemma-3-1b-it",
        "hf_hook_point_in": "model.layers.4.self_attn.o_proj.input",
        "hf_hook_point_out": "model.layers.4.self_attn.o_proj.input",
    }
    (place.parent / "config.json").write_text(json.dumps(said))
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert (str(dictionary.read_hook(4)), dictionary.kind) == ("blocks.4.attn.hook_z", "sae")
    assert dictionary.layout.zero_positions == 4


def test_gemma_scope_2_cross_layer_keeps_the_last_layer(tmp_path: Path):
    layers = [draw(seed) for seed in range(3)]
    rng = np.random.default_rng(9)
    for number, weights in enumerate(layers):
        weights["W_dec"] = rng.standard_normal((F, 3, D)).astype(np.float32)
        write_gemma_scope_2(
            tmp_path / "clt" / "width_8k_l0_big" / f"params_layer_{number}.safetensors", weights, affine=True
        )
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert (dictionary.kind, dictionary.layers, dictionary.targets(1)) == ("clt", (0, 1, 2), (1, 2))
    x = {layer: states(layer) for layer in range(3)}
    a = [gemma(draw(layer), x[layer].numpy())[0] for layer in range(3)]
    rebuilt = dictionary.reconstruct(dictionary.encode(x), x)
    for target in range(3):
        y = sum(a[source] @ layers[source]["W_dec"][:, target] for source in range(target + 1))
        y = y + layers[target]["b_dec"] + x[target].numpy() @ layers[target]["W_skip"].T
        np.testing.assert_allclose(rebuilt[target], y, **CLOSE)


# -- Llama Scope, dictionary_learning


def test_llama_scope_scales_by_the_norm_of_the_data(tmp_path: Path):
    weights, x = draw(), states().numpy()
    said = {
        "d_model": D,
        "d_sae": F,
        "jump_relu_threshold": 0.3,
        "dataset_average_activation_norm": {"in": 5.0, "out": 5.0},
        "hook_point_in": "blocks.7.hook_resid_post",
    }
    linear = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T,
        "decoder.bias": weights["b_dec"],
    }
    save(tmp_path, "checkpoints/final.safetensors", linear)
    (tmp_path / "hyperparams.json").write_text(json.dumps(said))
    s = np.float32(D**0.5 / 5)
    p = x @ (weights["W_enc"] * s).T + weights["b_enc"]
    a = relu(p) * (p > np.float32(0.3) * s)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert dictionary.layers == (7,)
    check(dictionary, 7, a, a @ (weights["W_dec"] / s) + weights["b_dec"] / s)
    np.testing.assert_allclose(dictionary.decoder_vector((7, 3)), weights["W_dec"][3] / s, **CLOSE)


def test_llama_scope_with_a_threshold_per_feature(tmp_path: Path):
    weights, x = draw(), states().numpy()
    linear = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T,
        "decoder.bias": weights["b_dec"],
        "log_jumprelu_threshold": np.log(weights["threshold"]),
    }
    save(tmp_path, "L5R/sae_weights.safetensors", linear)
    said = {"d_model": D, "expansion_factor": 3, "hook_point_in": "blocks.5.hook_resid_post"}
    (tmp_path / "L5R" / "config.json").write_text(json.dumps(said))
    p = x @ weights["W_enc"].T + weights["b_enc"]
    a = relu(p) * (p > weights["threshold"])
    check(Dictionary.from_pretrained(tmp_path), 5, a, a @ weights["W_dec"] + weights["b_dec"])


@pytest.mark.parametrize(
    "kind", ["AutoEncoder", "AutoEncoderTopK", "GatedAutoEncoder", "JumpReluAutoEncoder"]
)
def test_dictionary_learning(kind: str, tmp_path: Path):
    weights, x = draw(), states().numpy()
    file = {
        "encoder.weight": weights["W_enc"],
        "decoder.weight": np.ascontiguousarray(weights["W_dec"].T),
        "encoder.bias": weights["b_enc"],
        "b_dec": weights["b_dec"],
    }
    if kind == "GatedAutoEncoder":
        file |= {"gate_bias": weights["b_gate"], "mag_bias": weights["b_mag"], "r_mag": weights["r_mag"]}
    if kind == "JumpReluAutoEncoder":
        file |= {
            "W_enc": weights["W_enc"].T.copy(),
            "W_dec": weights["W_dec"],
            "threshold": weights["threshold"],
        }
    torch.save({name: torch.from_numpy(value) for name, value in file.items()}, tmp_path / "ae.pt")
    trainer = {"dict_class": kind, "layer": 2, "activation_dim": D, "dict_size": F, "k": 3, "lm_name": "a/b"}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer}))
    by_hand = {
        "AutoEncoder": standard,
        "AutoEncoderTopK": topk,
        "GatedAutoEncoder": gated,
        "JumpReluAutoEncoder": jumprelu_transcoder,
    }
    check(Dictionary.from_pretrained(tmp_path), 2, *by_hand[kind](weights, x))


# -- lists in config.yaml


def test_a_list_of_transcoders_is_in_the_order_of_layers(tmp_path: Path):
    for layer in range(2):
        write_npz(
            tmp_path / "npz" / f"layer_{layer}" / "width_16k" / "average_l0_9" / "params.npz", draw(layer)
        )
    listed = [f"npz/layer_{layer}/width_16k/average_l0_9/params.npz" for layer in range(2)]
    write_config(tmp_path, transcoders=listed, feature_input_hook="ln2.hook_normalized")
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert (dictionary.layers, str(dictionary.read_hook(1))) == ((0, 1), "blocks.1.ln2.hook_normalized")
    check(dictionary, 1, *gemma(draw(1), states().numpy()))


def test_a_list_out_of_order_is_refused(tmp_path: Path):
    for layer in range(2):
        write_plt(tmp_path / "files", layer, draw(layer))
    write_config(tmp_path, transcoders=["files/layer_1.safetensors", "files/layer_0.safetensors"])
    with pytest.raises(
        mizarr.MizarrError,
        match=r"order of layers, found files/layer_1.safetensors where the file of layer 0 belongs",
    ):
        Dictionary.from_pretrained(tmp_path)


def test_files_of_the_hub_are_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--someone--scope" / "snapshots" / "abc"
    write_npz(snapshot / "layer_0" / "width_16k" / "average_l0_9" / "params.npz", draw())
    references = cache / "models--someone--scope" / "refs"
    references.mkdir()
    (references / "v1").write_text("abc")
    entry = "hf://someone/scope/layer_0/width_16k/average_l0_9/params.npz?revision={}"
    write_config(tmp_path / "list", transcoders=[entry.format("v1")])
    dictionary = Dictionary.from_pretrained(tmp_path / "list")
    check(dictionary, 0, *gemma(draw(), states().numpy()))
    write_config(tmp_path / "list", transcoders=[entry.format("v2")])
    with pytest.raises(mizarr.MizarrError, match="mizarr features fetch"):
        Dictionary.from_pretrained(tmp_path / "list")


def test_gemma_scope_2_in_a_list_keeps_the_last_layer(tmp_path: Path):
    for layer in range(2):
        weights = draw(layer)
        weights["W_dec"] = np.stack([weights["W_dec"]] * 2, axis=1)
        write_gemma_scope_2(tmp_path / f"params_layer_{layer}.safetensors", weights)
    listed = [f"params_layer_{layer}.safetensors" for layer in range(2)]
    write_config(tmp_path, "cross_layer_transcoder", transcoders=listed)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert (dictionary.kind, dictionary.layers) == ("clt", (0, 1))
    np.testing.assert_allclose(dictionary.decoder_vector((1, 3), 1), draw(1)["W_dec"][3])


# -- what all share


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_stay_in_the_dtype_of_their_file(dtype: torch.dtype, tmp_path: Path):
    weights = draw()
    names = ("W_enc", "W_dec", "b_enc", "b_dec")
    save(tmp_path, "layer_0.safetensors", {name: weights[name] for name in names}, dtype)
    write_config(tmp_path)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert dictionary.layer(0).W_enc.dtype == dtype
    rounded = {n: torch.from_numpy(weights[n]).to(dtype).float().numpy() for n in names}
    check(dictionary, 0, *transcoder(rounded, states().numpy()))


def test_what_a_configuration_changes_is_part_of_the_identity(tmp_path: Path):
    write_plt(tmp_path, 0, draw())
    identities = set()
    for fields in (
        {},
        {"activation": "topk", "k": 3},
        {"activation": "topk", "k": 4},
        {"activation": "relu"},
    ):
        write_config(tmp_path, **fields)
        identities.add(Dictionary.from_pretrained(tmp_path).identity)
    assert len(identities) == 4


def test_negative_values_among_the_k_largest_stay_in_circuit_tracers_files(tmp_path: Path):
    weights = draw()
    weights["b_enc"] -= 10
    write_plt(tmp_path, 0, weights)
    write_config(tmp_path, activation="topk", k=3)
    a = top(states().numpy() @ weights["W_enc"].T + weights["b_enc"], 3)
    check(Dictionary.from_pretrained(tmp_path), 0, a, a @ weights["W_dec"] + weights["b_dec"])


def test_among_equal_pre_activations_the_lowest_features_are_kept():
    pre = torch.tensor([[1.0, 2.0, 1.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    kept = TopK(3)(pre)
    assert kept.tolist() == [[1, 2, 0, 0, 3], [0, 0, 0, 0, 0], [5, 4, 3, 0, 0]]
    assert GroupMax(1)(pre[:, [0, 2, 3]]).tolist()[0] == [1, 0, 0]
    assert AbsTopK(2)(torch.tensor([[-1.0, 1.0, -1.0]])).tolist() == [[-1, 1, 0]]


# -- what is wrong is said


def broken(tmp_path: Path, what: str) -> Path:
    weights = draw()
    if what == "nothing known":
        (tmp_path / "weights.bin").write_bytes(b"1")
    elif what == "truncated npz":
        place = tmp_path / "gemma-scope-2b-pt-res" / "layer_0" / "params.npz"
        write_npz(place, weights)
        place.write_bytes(place.read_bytes()[:-500])
    elif what == "truncated safetensors":
        write_plt(tmp_path, 0, weights)
        write_config(tmp_path)
        place = tmp_path / "layer_0.safetensors"
        place.write_bytes(place.read_bytes()[:-5])
    elif what == "missing layer":
        write_plt(tmp_path, 0, weights)
        write_plt(tmp_path, 2, weights)
        write_config(tmp_path)
    elif what == "another size":
        write_saelens(tmp_path, weights, d_in=D + 1)
    elif what == "wrong hook":
        write_saelens(tmp_path, weights, metadata={"hook_name": "blocks.1.hook_resid_psot"})
    elif what == "unknown architecture":
        write_saelens(tmp_path, weights, "standrad")
    elif what == "no k":
        write_saelens(tmp_path, weights, "topk")
    elif what == "another kind":
        write_plt(tmp_path, 0, weights)
        write_config(tmp_path, "cross_layer_transcoder")
    elif what == "missing decoder":
        write_clt(tmp_path, [weights | {"W_dec": weights["W_dec"][:, None]}])
        (tmp_path / "W_dec_0.safetensors").unlink()
        write_config(tmp_path, "cross_layer_transcoder")
    return tmp_path


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nothing known", r"no known layout .* found weights.bin; expected the files of one of .*params.npz"),
        ("truncated npz", r"the npz file .*params.npz cannot be read \(.*\); fetch it again"),
        ("truncated safetensors", r"is truncated: expected \d+ bytes, found \d+"),
        ("missing layer", r"found none for layer 1"),
        ("another size", r"expected the tensor 'W_enc' of shape \[13, 40\] .* found \[12, 40\]"),
        (
            "wrong hook",
            r"found 'blocks.1.hook_resid_psot', which is not known .did you mean .*_post'.*; name .* read=",
        ),
        ("unknown architecture", r"found 'standrad'; did you mean 'standard'"),
        ("no k", r"expected a whole number of at least 1 as k in"),
        ("another kind", r"expected model_kind transcoder_set in .* found 'cross_layer_transcoder'"),
        ("missing decoder", r"expected the decoder file W_dec_0.safetensors beside"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_reason(what: str, told: str, tmp_path: Path):
    with pytest.raises(mizarr.MizarrError, match=told):
        Dictionary.from_pretrained(broken(tmp_path, what))


def test_numbers_that_are_not_finite_are_found_when_they_are_used(tmp_path: Path):
    weights = draw()
    weights["W_enc"][3, 2] = weights["W_dec"][4, 1] = np.nan
    write_plt(tmp_path, 0, weights)
    write_config(tmp_path)
    dictionary = Dictionary.from_pretrained(tmp_path)
    with pytest.raises(
        mizarr.MizarrError, match="activations of layer 0 are infinite or NaN: the encoder holds"
    ):
        dictionary.encode({0: states()})
    with pytest.raises(mizarr.MizarrError, match="decoder of layer 0 holds infinite or NaN numbers"):
        dictionary.decoder_vector((0, 4))
    assert len(dictionary.decoder_vector((0, 5))) == D


def test_states_that_are_not_finite_are_told_from_weights_that_are_not(tmp_path: Path):
    write_plt(tmp_path, 0, draw())
    write_config(tmp_path)
    x = states()
    x[0, 0] = float("inf")
    with pytest.raises(mizarr.MizarrError, match="the states it read hold such numbers"):
        Dictionary.from_pretrained(tmp_path).encode({0: x})


@pytest.mark.parametrize(
    ("feature", "told"), [((0, F), "from 0 to 39 .*, found 40"), ((1, 0), r"\(layer 0\), found layer 1")]
)
def test_a_feature_there_is_not(feature: tuple[int, int], told: str, tmp_path: Path):
    write_plt(tmp_path, 0, draw())
    write_config(tmp_path)
    with pytest.raises(mizarr.MizarrError, match=told):
        Dictionary.from_pretrained(tmp_path).decoder_vector(feature)


def test_every_format_is_in_the_reference():
    page = (Path(__file__).parents[4] / "docs" / "reference" / "dictionaries.md").read_text()
    assert [name for name in FORMATS if f"| `{name}` " not in page] == []
