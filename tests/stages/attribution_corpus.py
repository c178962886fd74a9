"""A stored corpus of a random model with everything attribution reads, for tests of several files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

import mizarr
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.logits.component_weights import component_weights
from mizarr.stages.logits.readout import readout_from_files

from .forward.random_models import save_random_model

PROMPTS = [[0, 7, 42, 99, 5, 13, 60], [0, 250, 31], [0, 5, 5, 8, 120, 44, 3, 200, 17, 90]]
HOOKS = (
    "hook_embed",
    "blocks.*.hook_resid_pre",
    "blocks.*.hook_resid_mid",
    "blocks.*.hook_resid_post",
    "blocks.*.hook_attn_out",
    "blocks.*.hook_mlp_out",
    "blocks.*.attn.hook_z",
    "blocks.*.attn.hook_result",
    "blocks.*.mlp.hook_post_act",
    "ln_final.hook_scale",
)
POST = ("blocks.*.ln1_post.hook_scale", "blocks.*.ln2_post.hook_scale")

# What makes a family special here: biases, fused projections, layer norm, 1 + w, post norms, tied or not.
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 10.0},
    "phi3": {},
    "starcoder2": {"use_bias": True},
}


@dataclass
class Corpus:
    """States of a few prompts, the model's readout and weights, and its own logits."""

    states: xr.Dataset
    readout: xr.Dataset
    attention: xr.Dataset
    mlp: xr.Dataset
    logits: np.ndarray
    """[token, vocab], before a soft cap, as the model computes them."""

    @property
    def final(self) -> xr.DataArray:
        """resid_post of the last layer."""
        return self.states["resid_post"].isel(layer=-1, drop=True)

    def post_scale(self, name: str) -> xr.DataArray | None:
        """The divisor of a norm after attention ("ln1") or MLP ("ln2"), where there is one."""
        return self.states.get(f"{name}_post_scale")

    def ids(self, seed: int) -> xr.DataArray:
        """A token id for every token."""
        rng = np.random.default_rng(seed)
        found = rng.integers(0, self.readout.sizes["vocab"], self.states.sizes["token"])
        return xr.DataArray(found, dims="token")

    def logit_difference(self, targets: xr.DataArray, against: xr.DataArray) -> np.ndarray:
        """Of the model itself; -1 in `against` subtracts nothing."""
        at = np.arange(len(self.logits))
        other = np.where(against.values < 0, 0, self.logits[at, against.values])
        return self.logits[at, targets.values] - other


def make_corpus(folder: Path, family: str, seed: int = 1) -> Corpus:
    """Write a random model of a family, run it over PROMPTS and store what it does."""
    reference = save_random_model(folder, family, seed, **FAMILIES[family])
    hooks = [*HOOKS, *(POST if family == "gemma2" else ())]
    store = mizarr.open_store(folder / "store")
    states = mizarr.capture(str(folder), PROMPTS, hooks, store=store, progress=False)
    config = from_hf_config(json.loads((folder / "config.json").read_text()))
    files = [folder / "model.safetensors"]
    return Corpus(
        states,
        readout_from_files(files, config),
        component_weights(files, config, "attention"),
        component_weights(files, config, "mlp"),
        _logits(reference),
    )


def _logits(reference) -> np.ndarray:
    """Logits of the reference implementation over all prompts, end to end, without its soft cap."""
    import torch

    with torch.no_grad():
        states = [reference.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
        return reference.lm_head(torch.cat(states)).double().numpy()
