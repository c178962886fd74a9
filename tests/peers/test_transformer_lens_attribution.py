"""Decompositions of the stream and logit attribution agree with TransformerLens on the same random weights.

Llama throughout, Qwen 2 and Gemma 2 where TransformerLens supports them: it applies no norm after attention
or MLP to heads and neurons. To run these, see test_transformer_lens_patching.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mizarr
from mizarr.stages.forward.architectures.known import from_hf_config
from mizarr.stages.logits.attribution import component_attribution, logit_attrs
from mizarr.stages.logits.attribution_units import head_attribution, neuron_attribution
from mizarr.stages.logits.component_weights import component_weights
from mizarr.stages.logits.readout import readout_from_files
from mizarr.stages.logits.residual import (
    accumulated_resid,
    apply_ln_to_stack,
    decompose_resid,
    full_resid_decomposition,
    stack_head_results,
    stack_neuron_results,
)

from ..stages.forward.random_models import save_random_model

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = (0, 7, 42, 99, 5, 13, 60)
CORRECT, WRONG = 17, 200
TOLERANCE = 1e-4
"""Of logits, and of states; both compute in float32, in another order."""

HOOKS = (
    "hook_embed",
    *(f"blocks.*.hook_{name}" for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")),
    *("blocks.*.attn.hook_z", "blocks.*.mlp.hook_post_act"),
    *("blocks.*.ln1.hook_scale", "blocks.*.ln2.hook_scale", "ln_final.hook_scale"),
)
PLAIN = {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
MODELS = {
    "llama": {"attention_bias": False, "mlp_bias": False, "head_dim": 8},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"head_dim": 8, "sliding_window": 64},
}


class Pair:
    """One random model in both, with the activations of one prompt."""

    def __init__(self, family: str, folder: Path) -> None:
        pytest.importorskip("transformer_lens", exc_type=ImportError)
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        save_random_model(folder, family, 3, **(PLAIN | SIZES | MODELS[family]))
        store = mizarr.open_store(folder / "store")
        self.states = mizarr.capture(str(folder), [list(PROMPT)], HOOKS, store=store, progress=False)
        config = from_hf_config(json.loads((folder / "config.json").read_text()))
        files = [folder / "model.safetensors"]
        self.readout = readout_from_files(files, config)
        self.attention = component_weights(files, config, "attention")
        self.mlp = component_weights(files, config, "mlp")
        self.torch = torch
        self.bridge = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
        self.bridge.eval()
        self.cache = self.cached()

    def cached(self):
        with self.torch.no_grad():
            return self.bridge.run_with_cache(self.torch.tensor([PROMPT]))[1]

    @property
    def written(self) -> tuple[xr.DataArray, ...]:
        return tuple(self.states[name] for name in ("embed", "attn_out", "mlp_out"))

    @property
    def scale(self) -> xr.DataArray:
        return self.states["ln_final_scale"]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Of a family without norms after attention and MLP."""
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Llama whose norm weights TransformerLens has folded into their readers, as its logit_attrs asks."""
    made = Pair("llama", tmp_path_factory.mktemp("folded"))
    made.bridge.enable_compatibility_mode(
        disable_warnings=True, center_unembed=False, center_writing_weights=False, fold_value_biases=False
    )
    made.cache = made.cached()
    return made


def compare(found: xr.DataArray, expected) -> None:
    """Within tolerance, [component, position, …], on values that are far from constant."""
    theirs = expected.detach().cpu().numpy()
    theirs = theirs[:, 0] if theirs.ndim == found.ndim + 1 else theirs
    assert found.shape == theirs.shape
    difference = float(np.abs(found.values - theirs).max())
    print(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}: max |difference| {difference:.1e}")
    assert float(np.ptp(theirs)) > 1e-2
    assert difference <= TOLERANCE * max(1.0, float(np.abs(theirs).max()))


@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize("incl_mid", [False, True])
def test_accumulated_resid(layer, incl_mid, pair):
    final = pair.states["resid_post"].isel(layer=-1, drop=True)
    mid = pair.states["resid_mid"] if incl_mid else None
    found = accumulated_resid(pair.states["resid_pre"], mid, final=final, layer=layer)
    expected, labels = pair.cache.accumulated_resid(layer=layer, incl_mid=incl_mid, return_labels=True)
    compare(found, expected)
    assert found["component"].values.tolist() == labels


@pytest.mark.parametrize(("layer", "mlp_input"), [(None, False), (2, False), (1, True)])
def test_decompose_resid(layer, mlp_input, pair):
    found = decompose_resid(*pair.written, layer=layer, mlp_input=mlp_input)
    expected, labels = pair.cache.decompose_resid(layer=layer, mlp_input=mlp_input, return_labels=True)
    compare(found, expected)
    assert found["component"].values.tolist() == labels


@pytest.mark.parametrize("mode", ["attn", "mlp"])
def test_decompose_resid_of_one_kind(mode, pair):
    embed, attn_out, mlp_out = pair.written
    found = decompose_resid(embed, attn_out if mode == "attn" else None, mlp_out if mode == "mlp" else None)
    compare(found, pair.cache.decompose_resid(mode=mode))


def test_apply_ln_to_stack_of_an_inner_norm(pair):
    stack = decompose_resid(*pair.written, layer=1)
    found = apply_ln_to_stack(stack, pair.states["ln1_scale"].sel(layer=1), norm="rms")
    compare(found, pair.cache.apply_ln_to_stack(pair.cache.decompose_resid(layer=1), layer=1))


def test_stack_head_results(plain):
    final = plain.states["resid_post"].isel(layer=-1, drop=True)
    found = stack_head_results(plain.states["z"], plain.attention, remainder_of=final)
    expected, labels = plain.cache.stack_head_results(incl_remainder=True, return_labels=True)
    compare(found, expected)
    assert found["component"].values.tolist() == labels


def test_stack_neuron_results(plain):
    found = stack_neuron_results(plain.states["mlp_post_act"], plain.mlp)
    expected, labels = plain.cache.stack_neuron_results(layer=-1, return_labels=True)
    compare(found, expected)
    assert found["component"].values.tolist() == labels


@pytest.mark.parametrize("expand_neurons", [False, True])
def test_full_resid_decomposition(expand_neurons, plain):
    heads = stack_head_results(plain.states["z"], plain.attention)
    neurons = stack_neuron_results(plain.states["mlp_post_act"], plain.mlp)
    found = full_resid_decomposition(
        plain.states["embed"],
        heads,
        neurons if expand_neurons else plain.states["mlp_out"],
        attention_weights=plain.attention,
        mlp_weights=plain.mlp if expand_neurons else None,
    )
    expected, labels = plain.cache.get_full_resid_decomposition(
        expand_neurons=expand_neurons, return_labels=True
    )
    compare(found.sel(component=labels), expected)
    left = found.drop_sel(component=labels)
    assert not np.abs(left).values.any()


@pytest.mark.parametrize("wrong", [None, WRONG])
def test_logit_attrs(wrong, folded):
    stack, theirs = decompose_resid(*folded.written), folded.cache.decompose_resid()
    heads, their_heads = (
        stack_head_results(folded.states["z"], folded.attention),
        folded.cache.stack_head_results(),
    )
    for ours, other in ((stack, theirs), (heads, their_heads)):
        found = logit_attrs(ours, folded.scale, folded.readout, token=CORRECT, against=wrong)
        compare(found, folded.cache.logit_attrs(other, CORRECT, wrong))


def test_logit_attrs_without_the_weight_of_the_norm(pair):
    # What TransformerLens computes where norm weights are not folded.
    bare = pair.readout.assign(norm_weight=xr.ones_like(pair.readout["norm_weight"]))
    found = logit_attrs(decompose_resid(*pair.written), pair.scale, bare, token=CORRECT, against=WRONG)
    compare(found, pair.cache.logit_attrs(pair.cache.decompose_resid(), CORRECT, WRONG))


def test_shares_over_a_corpus_are_their_logit_attrs(folded):
    n = len(PROMPT)
    targets, against = (xr.DataArray(np.full(n, token), dims="token") for token in (CORRECT, WRONG))
    told = (folded.scale, targets, against, folded.readout)
    embed, attn_out, mlp_out = folded.written
    found = component_attribution(embed, attn_out, *told, mlp_out)
    layers = np.stack([found["attn_share"].values, found["mlp_share"].values], axis=1).reshape(-1, n)
    rows = np.concatenate([found["embed_share"].values[None], layers])
    rows = xr.DataArray(rows, dims=("component", "token"))
    compare(rows, folded.cache.logit_attrs(folded.cache.decompose_resid(), CORRECT, WRONG))
    heads = head_attribution(folded.states["z"], *told, folded.attention)["head_share"]
    heads = heads.transpose("layer", "head", "token")
    flat = xr.DataArray(heads.values.reshape(-1, n), dims=("component", "token"))
    compare(flat, folded.cache.logit_attrs(folded.cache.stack_head_results(), CORRECT, WRONG))
    width = folded.states.sizes["mlp"]
    top = neuron_attribution(folded.states["mlp_post_act"], *told, folded.mlp, top_k=width)
    shares = np.empty(top["neuron_share"].shape)
    np.put_along_axis(shares, top["neuron_id"].values.astype(int), top["neuron_share"].values, axis=2)
    flat = xr.DataArray(shares.transpose(0, 2, 1).reshape(-1, n), dims=("component", "token"))
    compare(flat, folded.cache.logit_attrs(folded.cache.stack_neuron_results(layer=-1), CORRECT, WRONG))
