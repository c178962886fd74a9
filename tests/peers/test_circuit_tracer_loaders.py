"""Transcoders agree with circuit-tracer's loaders: its files read here, ours read there, Gemma Scope's read
by both.

circuit-tracer is no dependency: these tests run where it is installed, and are skipped elsewhere.

    python -m venv peers/ct && peers/ct/bin/pip install torch==2.13.0 circuit-tracer==0.5.0
    peers/ct/bin/pip install pytest pytest-timeout hypothesis
    PYTHONPATH=.venv/src peers/ct/bin/python -m pytest tests/peers/test_circuit_tracer_loaders.py -rP
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.export import export

from ..random_dictionaries import (
    D,
    F,
    draw,
    save_random_clt,
    states,
    write_config,
    write_gemma_scope_2,
    write_npz,
    write_plt,
)

pytest.importorskip(
    "circuit_tracer", exc_type=ImportError, reason="needs circuit-tracer in an environment of its own"
)

from circuit_tracer.transcoder.cross_layer_transcoder import load_clt, load_gemma_scope_2_clt
from circuit_tracer.transcoder.single_layer_transcoder import load_transcoder_set

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-5
LAYERS = 3
HOOKS = {"feature_input_hook": "hook_resid_mid", "feature_output_hook": "hook_mlp_out"}
CPU = torch.device("cpu")


def require_same(dictionary: Dictionary, peer: Any, label: str) -> None:
    """What is active, and what that is decoded to, within the tolerance relative to the largest number."""
    x = {layer: states(layer) for layer in dictionary.layers}
    stacked = torch.stack([x[layer] for layer in dictionary.layers])
    with torch.no_grad():
        theirs = peer.encode(stacked)
        output = peer.decode(theirs.to_sparse() if dictionary.kind == "clt" else theirs, stacked)
    active = dictionary.encode(x)
    assert active.indices.tolist() == theirs.nonzero().tolist()
    rebuilt = torch.stack([y for _, y in sorted(dictionary.reconstruct(active, x).items())])
    found = theirs[tuple(active.indices.T)]
    differences = [float((active.value - found).abs().max()), float((rebuilt - output).abs().max())]
    scales = [float(found.abs().max()), float(output.abs().max())]
    told = [f"{difference:.1e} of {scale:.1f}" for difference, scale in zip(differences, scales, strict=True)]
    print(f"{label}: {len(active)} active, activations {told[0]}, output {told[1]}")
    assert len(active) > LAYERS * 7
    assert differences[0] <= TOLERANCE * max(1.0, scales[0])
    assert differences[1] <= TOLERANCE * max(1.0, scales[1])


def transcoder_set(paths: list[Path], special: str | None = None) -> Any:
    chosen = {layer: str(path) for layer, path in enumerate(paths)}
    lazy = {"lazy_encoder": False, "lazy_decoder": False}
    return load_transcoder_set(chosen, "local/tiny", device=CPU, special_load_fn=special, **HOOKS, **lazy)


def cross_layer(folder: Path) -> Any:
    return load_clt(str(folder), device=CPU, dtype=torch.float32, lazy_decoder=False, **HOOKS)


@pytest.mark.parametrize("jump", [False, True])
def test_cross_layer_transcoders(jump: bool, tmp_path: Path):
    save_random_clt(tmp_path, LAYERS, D, F, jump=jump)
    dictionary = Dictionary.from_pretrained(tmp_path)
    require_same(dictionary, cross_layer(tmp_path), f"CLT, {'JumpReLU' if jump else 'ReLU'}")


def test_cross_layer_transcoders_written_there(tmp_path: Path):
    save_random_clt(tmp_path / "in", LAYERS, D, F)
    peer = cross_layer(tmp_path / "in")
    peer.to_safetensors(str(tmp_path / "theirs"))
    write_config(tmp_path / "theirs", "cross_layer_transcoder")
    require_same(Dictionary.from_pretrained(tmp_path / "theirs"), peer, "CLT, written there")


def test_cross_layer_transcoders_written_here(tmp_path: Path):
    dictionary = Dictionary.from_pretrained(save_random_clt(tmp_path / "in", LAYERS, D, F))
    export(dictionary, tmp_path / "ours", "circuit_tracer")
    require_same(dictionary, cross_layer(tmp_path / "ours"), "CLT, written here")


@pytest.mark.parametrize("jump", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_per_layer_transcoders(skip: bool, jump: bool, tmp_path: Path):
    for layer in range(LAYERS):
        write_plt(tmp_path, layer, draw(layer), skip=skip, jump=jump)
    write_config(tmp_path)
    dictionary = Dictionary.from_pretrained(tmp_path)
    peer = transcoder_set([tmp_path / f"layer_{layer}.safetensors" for layer in range(LAYERS)])
    label = f"PLT, {'JumpReLU' if jump else 'ReLU'}{', skip' if skip else ''}"
    require_same(dictionary, peer, label)
    export(dictionary, tmp_path / "ours", "circuit_tracer")
    again = transcoder_set([tmp_path / "ours" / f"layer_{layer}.safetensors" for layer in range(LAYERS)])
    require_same(dictionary, again, f"{label}, written here")
    peer.to_safetensors(str(tmp_path / "theirs"))
    write_config(tmp_path / "theirs")
    require_same(Dictionary.from_pretrained(tmp_path / "theirs"), peer, f"{label}, written there")


def test_gemma_scope_in_a_list(tmp_path: Path):
    listed = [f"layer_{layer}/width_16k/average_l0_9/params.npz" for layer in range(LAYERS)]
    for layer, name in enumerate(listed):
        write_npz(tmp_path / name, draw(layer))
    write_config(tmp_path, transcoders=listed)
    peer = transcoder_set([tmp_path / name for name in listed], "gemma-scope")
    require_same(Dictionary.from_pretrained(tmp_path), peer, "Gemma Scope, listed")


@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2_in_a_list(affine: bool, tmp_path: Path):
    listed = [f"layer_{layer}_width_16k_l0_small/params.safetensors" for layer in range(LAYERS)]
    for layer, name in enumerate(listed):
        write_gemma_scope_2(tmp_path / name, draw(layer), affine=affine)
    write_config(tmp_path, transcoders=listed)
    peer = transcoder_set([tmp_path / name for name in listed], "gemma-scope-2")
    require_same(Dictionary.from_pretrained(tmp_path), peer, f"Gemma Scope 2, affine {affine}")


@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2_across_layers_with_the_layer_that_is_dropped_there(affine: bool, tmp_path: Path):
    listed = [f"params_layer_{layer}.safetensors" for layer in range(LAYERS)]
    rng = np.random.default_rng(5)
    for layer, name in enumerate(listed):
        decoder = rng.standard_normal((F, LAYERS, D)).astype(np.float32)
        write_gemma_scope_2(tmp_path / name, draw(layer) | {"W_dec": decoder}, affine=affine)
    write_config(tmp_path, "cross_layer_transcoder", transcoders=listed)
    # Its loader leaves out the last of its paths: give it one more, which is then not opened.
    paths = {layer: str(tmp_path / name) for layer, name in enumerate([*listed, "not opened"])}
    peer = load_gemma_scope_2_clt(paths, device=CPU, dtype=torch.float32, **HOOKS)
    dictionary = Dictionary.from_pretrained(tmp_path)
    assert dictionary.layers == tuple(range(LAYERS))
    require_same(dictionary, peer, f"Gemma Scope 2 CLT, affine {affine}")
