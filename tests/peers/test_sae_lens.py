"""Dictionaries agree with SAELens 6: files of each read by the other, and what its converters make of other
formats.

SAELens is no dependency, and pins a TransformerLens that clashes with others: these tests run where both are
installed, and are skipped elsewhere.

    python -m venv peers/sae && peers/sae/bin/pip install torch==2.13.0
    peers/sae/bin/pip install sae-lens==6.54.12 pytest pytest-timeout hypothesis xarray zarr dask distributed
    PYTHONPATH=.venv/src peers/sae/bin/python -m pytest tests/peers/test_sae_lens.py -rP -p no:cacheprovider
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.export import export

from ..random_dictionaries import D, F, draw, save, states, write_gemma_scope_2, write_npz, write_sparsify

pytest.importorskip("sae_lens", exc_type=ImportError, reason="needs SAELens in an environment of its own")

from sae_lens import (
    SAE,
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    MatryoshkaBatchTopKTrainingSAE,
    MatryoshkaBatchTopKTrainingSAEConfig,
)
from sae_lens.loading import pretrained_sae_loaders as loaders

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-5
ARCHITECTURES = (
    "standard",
    "jumprelu",
    "topk",
    "abstopk",
    "gated",
    "transcoder",
    "skip_transcoder",
    "jumprelu_transcoder",
    "jumprelu_skip_transcoder",
)
NORMALISATIONS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm")


def reference(architecture: str, **config: Any) -> Any:
    """One of SAELens' own, with random weights."""
    said = {"d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu", "architecture": architecture}
    said["metadata"] = {"hook_name": "blocks.2.hook_resid_post", "model_name": "tiny"}
    if "transcoder" in architecture:
        said |= {"d_out": D + 4, "apply_b_dec_to_input": False}
        said["metadata"] |= {"hook_name": "blocks.2.mlp.hook_in", "hook_name_out": "blocks.2.hook_mlp_out"}
    if "topk" in architecture:
        said["k"] = 5
    made = SAE.from_dict(said | config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.ndim > 1 else 0.4))
            if name == "threshold":
                parameter.abs_()
    return made


def require_same(dictionary: Dictionary, layer: int, peer: Any, label: str) -> None:
    """Activations and output of both within the tolerance, relative to the largest number."""
    x = states(width=dictionary.d_in)
    with torch.no_grad():
        theirs, output = peer.encode(x), peer(x)
    features = dictionary.layer(layer)
    ours = features.encode(x)
    rebuilt = features.reconstruct(ours, x)
    active = dictionary.encode({layer: x})
    torch.testing.assert_close(
        torch.sparse_coo_tensor(active.indices[:, 1:].T, active.value, ours.shape).to_dense(), ours
    )
    scales = [float(found.abs().max()) for found in (theirs, output)]
    differences = [float((ours - theirs).abs().max()), float((rebuilt - output).abs().max())]
    print(
        f"{label}: activations {differences[0]:.1e}, output {differences[1]:.1e}, of {scales[0]:.1f}, "
        f"{scales[1]:.1f}"
    )
    assert float((theirs != 0).float().mean()) > 0.02
    assert differences[0] <= TOLERANCE * max(1.0, scales[0])
    assert differences[1] <= TOLERANCE * max(1.0, scales[1])


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_of_saelens_do_here_what_they_do_there(architecture: str, normalisation: str, tmp_path: Path):
    peer = reference(architecture, normalize_activations=normalisation)
    peer.save_model(tmp_path)
    dictionary = Dictionary.from_pretrained(tmp_path)
    require_same(dictionary, 2, peer, f"{architecture}, {normalisation}")


@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "topk", "gated"])
def test_inputs_may_be_taken_as_they_are(architecture: str, tmp_path: Path):
    peer = reference(architecture, apply_b_dec_to_input=False)
    peer.save_model(tmp_path)
    require_same(Dictionary.from_pretrained(tmp_path), 2, peer, f"{architecture}, b_dec not subtracted")


def test_activations_in_units_of_decoder_norms(tmp_path: Path):
    peer = reference("topk", rescale_acts_by_decoder_norm=True)
    peer.save_model(tmp_path)
    require_same(Dictionary.from_pretrained(tmp_path), 2, peer, "topk, rescaled")


def test_heads_are_read_side_by_side(tmp_path: Path):
    about = {"hook_name": "blocks.2.attn.hook_z", "model_name": "tiny"}
    peer = reference("standard", reshape_activations="hook_z", metadata=about)
    peer.save_model(tmp_path)
    dictionary = Dictionary.from_pretrained(tmp_path)
    x = states()
    with torch.no_grad():
        theirs = peer.encode(x.unflatten(-1, (3, D // 3)))
    torch.testing.assert_close(dictionary.layer(2).encode(x), theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("kind", ["batchtopk", "matryoshka"])
def test_batch_topk_in_training_and_finished(kind: str, rescaled: bool, tmp_path: Path):
    config: dict[str, Any] = {"d_in": D, "d_sae": F, "k": 5, "rescale_acts_by_decoder_norm": rescaled}
    if kind == "matryoshka":
        widths = {"matryoshka_widths": [F // 2, F]}
        trained = MatryoshkaBatchTopKTrainingSAE(MatryoshkaBatchTopKTrainingSAEConfig(**config, **widths))
    else:
        trained = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**config))
    with torch.no_grad():
        torch.manual_seed(4)
        for parameter in trained.parameters():
            parameter.copy_(torch.randn_like(parameter))
        trained.topk_threshold.fill_(0.7)
    trained.cfg.metadata.hook_name = "blocks.2.hook_resid_post"
    trained.save_model(tmp_path / "training")
    trained.save_inference_model(tmp_path / "finished")
    peer = SAE.load_from_disk(tmp_path / "finished")
    require_same(Dictionary.from_pretrained(tmp_path / "finished"), 2, peer, f"{kind}, finished")
    ours = Dictionary.from_pretrained(tmp_path / "training").layer(2)
    x = states()
    with torch.no_grad():
        torch.testing.assert_close(ours.reconstruct(ours.encode(x), x), peer(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_written_here_are_read_there(architecture: str, tmp_path: Path):
    reference(architecture).save_model(tmp_path / "theirs")
    dictionary = Dictionary.from_pretrained(tmp_path / "theirs")
    export(dictionary, tmp_path / "ours", "saelens")
    peer = SAE.load_from_disk(tmp_path / "ours")
    assert peer.cfg.architecture() == architecture
    require_same(dictionary, 2, peer, f"{architecture}, written here")


def test_old_configurations_are_read_alike(tmp_path: Path):
    peer = reference("topk")
    peer.save_model(tmp_path)
    old = {
        "d_in": D,
        "d_sae": F,
        "dtype": "torch.float32",
        "hook_point": "blocks.2.hook_resid_pre",
        "hook_point_layer": 2,
        "model_name": "tiny",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": 5},
        "normalize_activations": None,
    }
    (tmp_path / "cfg.json").write_text(json.dumps(old))
    require_same(
        Dictionary.from_pretrained(tmp_path), 2, SAE.load_from_disk(tmp_path), "topk, old configuration"
    )


# -- formats that SAELens converts


def converted(converter: str, repository: str, name: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What a converter of SAELens makes of a folder, as the SAE it would be."""

    def local(repo_id: str, filename: str, subfolder: str | None = None, **_: Any) -> str:
        return str(root / (subfolder or "") / filename)

    def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
        from safetensors import safe_open

        with safe_open(root / filename, framework="pt") as file:
            return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118

    patch.setattr(loaders, "hf_hub_download", local)
    patch.setattr(loaders, "get_safetensors_tensor_shapes", shapes)
    config, tensors, _ = getattr(loaders, converter)(repository, name, "cpu", False, {"dtype": "float32"})
    (width, size), written = tensors["W_enc"].shape, tensors["W_dec"].shape[1]
    config = loaders.handle_config_defaulting(config | {"d_in": width, "d_sae": size, "d_out": written})
    made = SAE.from_dict(config | {"dtype": "float32", "device": "cpu"})
    made.load_state_dict({key: value.float() for key, value in tensors.items()})
    return made


# Embeddings are scaled by the width that the converter knows from the name of the repository.
PLACES = [("res", "layer_3", D), ("mlp", "layer_3", D), ("att", "layer_3", D), ("res", "embedding", 2304)]


@pytest.mark.parametrize(("suffix", "folder", "width"), PLACES)
def test_gemma_scope(suffix: str, folder: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository = f"google/gemma-scope-2b-pt-{suffix}"
    name = f"{folder}/width_16k/average_l0_9"
    write_npz(tmp_path / repository / name / "params.npz", draw(d_in=width))
    root = tmp_path / repository
    peer = converted("gemma_2_sae_huggingface_loader", repository, name, root, monkeypatch)
    dictionary = Dictionary.from_pretrained(root)
    layer = dictionary.layers[0]
    assert dictionary.read_hook(layer).transformer_lens == peer.cfg.metadata.hook_name
    peer.turn_off_forward_pass_hook_z_reshaping()  # heads lie side by side in these states
    require_same(dictionary, layer, peer, f"Gemma Scope {suffix}, {folder}")


def test_gemma_scope_transcoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository, name = "google/gemma-scope-2b-pt-transcoders", "layer_3/width_16k/average_l0_9"
    write_npz(tmp_path / repository / name / "params.npz", draw())
    root = tmp_path / repository
    peer = converted("gemma_2_transcoder_huggingface_loader", repository, name, root, monkeypatch)
    dictionary = Dictionary.from_pretrained(root)
    assert str(dictionary.read_hook(3)) == peer.cfg.metadata.hook_name
    assert str(dictionary.write_hook(3)) == peer.cfg.metadata.hook_name_out
    require_same(dictionary, 3, peer, "Gemma Scope transcoder")


@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2(affine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = f"transcoder_all/layer_4_width_16k_l0_small{'_affine' if affine else ''}"
    write_gemma_scope_2(tmp_path / name / "params.safetensors", draw(), affine=affine)
    said = {
        "architecture": "jump_relu",
        "model_name": "gemma-3-1b-pt",
        "affine_connection": affine,
        "hf_hook_point_in": "model.layers.4.pre_feedforward_layernorm.output",
        "hf_hook_point_out": "model.layers.4.post_feedforward_layernorm.output",
    }
    (tmp_path / name / "config.json").write_text(json.dumps(said))
    peer = converted(
        "gemma_3_sae_huggingface_loader", "google/gemma-scope-2-1b-pt", name, tmp_path, monkeypatch
    )
    require_same(Dictionary.from_pretrained(tmp_path), 4, peer, f"Gemma Scope 2, affine {affine}")


def test_llama_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights, name = draw(), "Llama3_1-8B-Base-L7R-8x"
    linear = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T,
        "decoder.bias": weights["b_dec"],
    }
    save(tmp_path / name, "checkpoints/final.safetensors", linear)
    said = {
        "d_model": D,
        "d_sae": F,
        "jump_relu_threshold": 0.3,
        "dataset_average_activation_norm": {"in": 2.5, "out": 2.5},
        "hook_point_in": "blocks.7.hook_resid_post",
    }
    (tmp_path / name / "hyperparams.json").write_text(json.dumps(said))
    peer = converted("llama_scope_sae_huggingface_loader", "fnlp/x", name, tmp_path, monkeypatch)
    peer.fold_activation_norm_scaling_factor(D**0.5 / 2.5)
    require_same(Dictionary.from_pretrained(tmp_path), 7, peer, "Llama Scope")


def test_llama_scope_with_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = draw()
    linear = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T,
        "decoder.bias": weights["b_dec"],
        "log_jumprelu_threshold": np.log(weights["threshold"]),
    }
    save(tmp_path / "L5R", "sae_weights.safetensors", linear)
    said = {"d_model": D, "expansion_factor": F / D, "hook_point_in": "blocks.5.hook_resid_post"}
    (tmp_path / "L5R" / "config.json").write_text(json.dumps(said))
    peer = converted("llama_scope_r1_distill_sae_huggingface_loader", "fnlp/x", "L5R", tmp_path, monkeypatch)
    require_same(Dictionary.from_pretrained(tmp_path), 5, peer, "Llama Scope, thresholds")


@pytest.mark.parametrize(
    "kind", ["AutoEncoder", "AutoEncoderTopK", "GatedAutoEncoder", "JumpReluAutoEncoder", "BatchTopKSAE"]
)
def test_dictionary_learning(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = draw()
    if kind == "JumpReluAutoEncoder":
        file = {"W_enc": weights["W_enc"].T, "W_dec": weights["W_dec"], "b_enc": weights["b_enc"]}
    else:
        file = {"encoder.weight": weights["W_enc"], "decoder.weight": weights["W_dec"].T}
        file |= {} if kind == "GatedAutoEncoder" else {"encoder.bias": weights["b_enc"]}
    file["b_dec"] = weights["b_dec"]
    if kind == "GatedAutoEncoder":
        file |= {"gate_bias": weights["b_gate"], "mag_bias": weights["b_mag"], "r_mag": weights["r_mag"]}
    if kind in ("JumpReluAutoEncoder", "BatchTopKSAE"):
        file["threshold"] = weights["threshold"]
    (tmp_path / "t").mkdir()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in file.items()}
    torch.save(tensors, tmp_path / "t" / "ae.pt")
    trainer = {"dict_class": kind, "layer": 2, "activation_dim": D, "dict_size": F, "k": 4, "lm_name": "a/b"}
    said = {"trainer": trainer, "buffer": {"ctx_len": 128}}
    (tmp_path / "t" / "config.json").write_text(json.dumps(said))
    peer = converted("dictionary_learning_sae_huggingface_loader_1", "a/b", "t", tmp_path, monkeypatch)
    require_same(Dictionary.from_pretrained(tmp_path), 2, peer, f"dictionary_learning {kind}")


def test_sparsify_but_for_what_its_converter_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The converter transposes W_dec once more, and takes normalize_decoder for apply_b_dec_to_input.
    weights = draw()
    write_sparsify(tmp_path / "layers.2", weights, normalize_decoder=False)
    turned = tmp_path / "turned"
    write_sparsify(turned / "layers.2", weights | {"W_dec": weights["W_dec"].T}, normalize_decoder=False)
    peer = converted("sparsify_huggingface_loader", "a/b", "layers.2", turned, monkeypatch)
    require_same(Dictionary.from_pretrained(tmp_path / "layers.2"), 2, peer, "sparsify")
