"""Small random dictionaries, written as their publishers write them, for tests of every reader.

Arrays are float32, rows features, in our orientation; each `write_*` turns them into its format. Biases and
thresholds are such that some features are active and some are not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mizarr.stages.features.crosscoder import Crosscoder, CrosscoderPlace
from mizarr.stages.features.layers.activations import JumpReLU

D, F = 12, 40


def draw(seed: int = 0, d_in: int = D, d_out: int | None = None, size: int = F) -> dict[str, np.ndarray]:
    """W_enc [feature, d_in], W_dec [feature, d_out], b_enc, b_dec, threshold, W_skip [d_out, d_in], and a
    gate's.
    """
    rng = np.random.default_rng(seed)
    out = d_in if d_out is None else d_out

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "W_enc": normal(size, d_in) / np.float32(d_in**0.5),
        "W_dec": normal(size, out),
        "b_enc": normal(size) * np.float32(0.3),
        "b_dec": normal(out),
        "threshold": np.abs(normal(size)) * np.float32(0.5),
        "W_skip": normal(out, d_in),
        "b_gate": normal(size) * np.float32(0.3),
        "b_mag": normal(size) * np.float32(0.3),
        "r_mag": normal(size) * np.float32(0.3),
    }


def states(seed: int = 1, rows: int = 7, width: int = D) -> torch.Tensor:
    """[row, width]."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)) * 2


def save(folder: Path, name: str, tensors: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> None:
    """A safetensors file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ready = {key: torch.from_numpy(np.array(value, order="C")).to(dtype) for key, value in tensors.items()}
    save_file(ready, path)


def write_saelens(
    folder: Path, weights: dict[str, np.ndarray], architecture: str = "standard", **config: Any
) -> None:
    """cfg.json of version 6 and sae_weights.safetensors."""
    kept = ["W_enc", "W_dec", "b_dec"]
    kept += ["b_gate", "b_mag", "r_mag"] if architecture == "gated" else ["b_enc"]
    kept += ["threshold"] if "jumprelu" in architecture else []
    kept += ["W_skip"] if "skip" in architecture else []
    chosen = {name: weights[name].T if name == "W_enc" else weights[name] for name in kept}
    save(folder, "sae_weights.safetensors", chosen)
    size, d_in = weights["W_enc"].shape
    about = {"hook_name": "blocks.1.hook_resid_post", "model_name": "tiny", "sae_lens_version": "6.54.12"}
    if "transcoder" in architecture:
        about |= {"hook_name": "blocks.1.mlp.hook_in", "hook_name_out": "blocks.1.hook_mlp_out"}
        config["d_out"] = weights["W_dec"].shape[1]
    said = {
        "architecture": architecture,
        "d_in": d_in,
        "d_sae": size,
        "dtype": "float32",
        "apply_b_dec_to_input": "transcoder" not in architecture,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": about | config.pop("metadata", {}),
    }
    (folder / "cfg.json").write_text(json.dumps(said | config))


def write_sparsify(
    folder: Path, weights: dict[str, np.ndarray], *, skip: bool = False, **config: Any
) -> None:
    """cfg.json and sae.safetensors."""
    chosen = {
        "encoder.weight": weights["W_enc"],
        "encoder.bias": weights["b_enc"],
        "W_dec": weights["W_dec"],
        "b_dec": weights["b_dec"],
        **({"W_skip": weights["W_skip"]} if skip else {}),
    }
    save(folder, "sae.safetensors", chosen)
    size, d_in = weights["W_enc"].shape
    said = {
        "activation": "topk",
        "expansion_factor": 32,
        "normalize_decoder": True,
        "num_latents": size,
        "k": 4,
    }
    said |= {"multi_topk": False, "skip_connection": skip, "transcode": skip, "d_in": d_in, "signed": False}
    (folder / "cfg.json").write_text(json.dumps(said | config))


def write_npz(path: Path, weights: dict[str, np.ndarray], *, deflated: bool = False) -> None:
    """Gemma Scope's params.npz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: weights[name] for name in ("W_dec", "b_enc", "b_dec", "threshold")}
    (np.savez_compressed if deflated else np.savez)(path, W_enc=weights["W_enc"].T, **kept)


def write_gemma_scope_2(path: Path, weights: dict[str, np.ndarray], *, affine: bool = False) -> None:
    """Gemma Scope 2's params.safetensors."""
    chosen = {
        "w_enc": weights["W_enc"].T,
        "w_dec": weights["W_dec"],
        **{name: weights[name] for name in ("b_enc", "b_dec", "threshold")},
        **({"affine_skip_connection": weights["W_skip"].T} if affine else {}),
    }
    save(path.parent, path.name, chosen)


def write_plt(
    folder: Path, layer: int, weights: dict[str, np.ndarray], *, skip: bool = False, jump: bool = False
) -> None:
    """circuit-tracer's layer_{l}.safetensors."""
    chosen = {name: weights[name] for name in ("W_enc", "W_dec", "b_enc", "b_dec")}
    chosen |= {"W_skip": weights["W_skip"]} if skip else {}
    chosen |= {"activation_function.threshold": weights["threshold"]} if jump else {}
    save(folder, f"layer_{layer}.safetensors", chosen)


def write_clt(folder: Path, layers: list[dict[str, np.ndarray]], *, jump: bool = False) -> None:
    """circuit-tracer's W_enc_{l} and W_dec_{l}; each W_dec [feature, target, hidden]."""
    for number, weights in enumerate(layers):
        kept = ("W_enc", "b_enc", "b_dec", *(("threshold",) if jump else ()))
        save(folder, f"W_enc_{number}.safetensors", {f"{name}_{number}": weights[name] for name in kept})
        save(folder, f"W_dec_{number}.safetensors", {f"W_dec_{number}": weights["W_dec"]})


def save_random_plt(folder: Path, *, layers: int, hidden: int, features: int = 12, seed: int = 0) -> Path:
    """Skip transcoders that read the MLP's input and write its output, ReLU, float32."""
    draw = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for layer in range(layers):
        tensors = {
            "W_enc": torch.randn(features, hidden, generator=draw),
            "b_enc": torch.randn(features, generator=draw),
            "W_dec": torch.randn(features, hidden, generator=draw),
            "b_dec": torch.randn(hidden, generator=draw),
            "W_skip": torch.randn(hidden, hidden, generator=draw) / hidden,
        }
        save_file(tensors, folder / f"layer_{layer}.safetensors")
    write_config(
        folder,
        model_kind="transcoder_set",
        feature_input_hook="mlp.hook_in",
        feature_output_hook="mlp.hook_out",
    )
    return folder


def write_config(folder: Path, kind: str = "transcoder_set", **fields: Any) -> None:
    """config.yaml; JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {"model_name": "tiny", "model_kind": kind, "scan": "local/tiny"}
    said |= {"feature_input_hook": "hook_resid_mid", "feature_output_hook": "hook_mlp_out"}
    (folder / "config.yaml").write_text(json.dumps(said | fields))


def save_random_clt(folder: Path, layers: int, hidden: int, size: int = 12, *, jump: bool = True) -> Path:
    """A cross-layer transcoder with its config.yaml; returns the folder."""
    found = []
    for layer in range(layers):
        weights = draw(layer, hidden, size=size)
        rng = np.random.default_rng(100 + layer)
        weights["W_dec"] = rng.standard_normal((size, layers - layer, hidden)).astype(np.float32)
        found.append(weights)
    write_clt(folder, found, jump=jump)
    write_config(folder, "cross_layer_transcoder")
    return folder


def save_random_sae(folder: Path, *, layer: int, hidden: int, features: int = 40, seed: int = 0) -> Path:
    """A ReLU autoencoder of the residual stream after a layer, in SAELens's files."""
    draw = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "W_enc": torch.randn(hidden, features, generator=draw) / hidden**0.5,
        "b_enc": torch.randn(features, generator=draw),
        "W_dec": torch.randn(features, hidden, generator=draw),
        "b_dec": torch.randn(hidden, generator=draw),
    }
    save_file(tensors, folder / "sae_weights.safetensors")
    config = {
        "architecture": "standard",
        "d_in": hidden,
        "d_sae": features,
        "dtype": "float32",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            "model_name": "random",
            "hook_name": f"blocks.{layer}.hook_resid_post",
            "sae_lens_version": "6.0.0",
        },
    }
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def save_random_crosscoder(
    folder: Path, places: Sequence[tuple[str, str, float]], hidden: int, size: int = 24, seed: int = 0
) -> Path:
    """A JumpReLU crosscoder. places: (model, hook, scale) of each."""
    every = [draw(seed + number, hidden, size=size) for number in range(len(places))]

    def stacked(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([weights[name] for weights in every]))

    made = Crosscoder(
        tuple(CrosscoderPlace(*place) for place in places),
        stacked("W_enc"),
        torch.from_numpy(every[0]["b_enc"]),
        stacked("W_dec"),
        stacked("b_dec"),
        JumpReLU(torch.from_numpy(every[0]["threshold"])),
    )
    return made.save(folder)
