"""Random transcoders for a model's directory, written as circuit-tracer writes them.

Biases and thresholds are set from the model's own states, so that about a share `density` of features fires.
Decoders are random: what they leave over is what error nodes are for.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

import mizarr
from mizarr.stages.features.layers.names import hook_kind
from mizarr.stages.forward.architectures.points import HookPoint

KINDS = {
    "clt-jumprelu": ("hook_resid_mid", "hook_mlp_out"),
    "clt-relu": ("mlp.hook_in", "hook_mlp_out"),
    "plt-relu-skip": ("mlp.hook_in", "mlp.hook_out"),
    "plt-jumprelu": ("ln2.hook_normalized", "hook_mlp_out"),
    "plt-topk": ("hook_resid_mid", "mlp.hook_out"),
}


def save_random_transcoders(
    folder: Path, model: mizarr.Model, kind: str, *, seed: int = 0, features: int = 24, density: float = 0.15
) -> Path:
    """Write transcoders of a kind of KINDS; returns the folder."""
    folder.mkdir(parents=True)
    read, write = KINDS[kind]
    rng = torch.Generator().manual_seed(seed)
    config = model.config
    layers, width = config.num_layers, config.hidden_size
    ids = torch.randint(3, config.vocab_size, (24, 24), generator=rng)
    points = [HookPoint(hook_kind(read), layer) for layer in range(layers)]
    states = model.forward(ids, mizarr.HookSpec().capture(*points), want=None)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * scale / width**0.5

    said = [f"feature_input_hook: {read}", f"feature_output_hook: {write}", f"scan: local/{folder.name}"]
    is_clt = kind.startswith("clt")
    for layer, point in enumerate(points):
        encoder, bias = draw(features, width), 0.1 * torch.randn(features, generator=rng)
        pre = states[point].flatten(0, 1).cpu() @ encoder.T + bias
        limit = pre.quantile(1 - density, dim=0)
        tensors = {"W_enc": encoder, "b_enc": bias, "b_dec": draw(width)}
        threshold = limit.clamp(min=0.02)
        if "-relu" in kind:
            tensors["b_enc"] = bias - limit
        if kind.endswith("skip"):
            tensors["W_skip"] = draw(width, width, scale=0.5)
        if is_clt:
            named = {f"{name}_{layer}": value for name, value in tensors.items()}
            if kind == "clt-jumprelu":
                named[f"threshold_{layer}"] = threshold
            save_file(named, folder / f"W_enc_{layer}.safetensors")
            decoder = draw(features, layers - layer, width)
            save_file({f"W_dec_{layer}": decoder}, folder / f"W_dec_{layer}.safetensors")
            continue
        tensors["W_dec"] = draw(features, width)
        if kind == "plt-jumprelu":
            tensors["activation_function.threshold"] = threshold
        save_file(tensors, folder / f"layer_{layer}.safetensors")
    if kind == "plt-topk":
        said += ["activation: topk", f"k: {max(1, int(density * features))}"]
    said.append(f"model_kind: {'cross_layer_transcoder' if is_clt else 'transcoder_set'}")
    (folder / "config.yaml").write_text("\n".join(said) + "\n")
    return folder
