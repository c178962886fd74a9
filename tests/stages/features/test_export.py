"""What is written in another format does the same when it is read again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

import mizarr
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.export import export

from ...random_dictionaries import (
    D,
    draw,
    save_random_clt,
    states,
    write_config,
    write_npz,
    write_plt,
    write_saelens,
    write_sparsify,
)


def made(folder: Path, what: str) -> Dictionary:
    """A dictionary that reads one place or two, in some format with something to fold."""
    weights = draw()
    if what == "clt":
        return Dictionary.from_pretrained(save_random_clt(folder, layers=3, hidden=D))
    if what == "relu clt":
        return Dictionary.from_pretrained(save_random_clt(folder, layers=3, hidden=D, jump=False))
    if what in ("plt", "skip plt", "topk plt"):
        for layer in range(2):
            write_plt(folder, layer, draw(layer), skip=what == "skip plt", jump=what == "plt")
        write_config(folder, **({"activation": "topk", "k": 3} if what == "topk plt" else {}))
    elif what == "embedding":
        folder = folder / "gemma-scope-2b-pt-res" / "embedding"
        write_npz(folder / "params.npz", weights)
    elif what.startswith("sparsify"):
        write_sparsify(
            folder / ("layers.0.mlp" if "skip" in what else "layers.0"), weights, skip="skip" in what
        )
    elif what == "rescaled":
        write_saelens(folder, weights, "topk", k=3, rescale_acts_by_decoder_norm=True)
    elif what == "normalised":
        write_saelens(folder, weights, "standard", normalize_activations="layer_norm")
    else:
        config = {"k": 3} if what == "topk" else {}
        write_saelens(folder, weights, what, metadata={"hook_name": "blocks.0.hook_resid_post"}, **config)
    return Dictionary.from_pretrained(folder)


CASES = [
    *(("saelens", what) for what in ("standard", "jumprelu", "topk", "gated", "rescaled", "normalised")),
    *(("saelens", what) for what in ("plt", "skip plt", "embedding", "sparsify")),
    *(("sparsify", what) for what in ("topk", "sparsify", "sparsify skip")),
    *(("circuit_tracer", what) for what in ("clt", "relu clt", "plt", "skip plt", "topk plt")),
    *(("circuit_tracer", what) for what in ("standard", "jumprelu", "topk", "sparsify")),
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_what_is_written_does_the_same(name: str, what: str, tmp_path: Path):
    dictionary = made(tmp_path / "in", what)
    again = Dictionary.from_pretrained(export(dictionary, tmp_path / "out", name))
    assert (again.layers, again.n_features, again.layout.read, again.layout.write) == (
        dictionary.layers,
        dictionary.n_features,
        dictionary.layout.read,
        dictionary.layout.write,
    )
    x = {layer: states(layer) for layer in dictionary.layers}
    ours, theirs = dictionary.encode(x), again.encode(x)
    torch.testing.assert_close(theirs.indices, ours.indices)
    assert len(ours)
    rescaled = what == "rescaled"  # activations were divided by the norms only when decoding
    if not rescaled:
        torch.testing.assert_close(theirs.value, ours.value, atol=1e-5, rtol=1e-5)
    for layer, y in dictionary.reconstruct(ours, x).items():
        torch.testing.assert_close(again.reconstruct(theirs, x)[layer], y, atol=1e-5, rtol=1e-5)


def test_files_written_in_their_own_format_hold_the_same_numbers(tmp_path: Path):
    dictionary = made(tmp_path / "in", "clt")
    again = Dictionary.from_pretrained(export(dictionary, tmp_path / "out", "circuit_tracer"))
    assert again.identity == dictionary.identity


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_may_be_read_by_whom_the_umask_says(umask: int, tmp_path: Path):
    dictionary, before = made(tmp_path / "in", "plt"), os.umask(umask)
    try:
        export(dictionary, tmp_path / "out", "circuit_tracer")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}


def test_weights_may_be_rounded_on_the_way(tmp_path: Path):
    export(made(tmp_path / "in", "plt"), tmp_path / "out", "circuit_tracer", dtype="bfloat16")
    assert Dictionary.from_pretrained(tmp_path / "out").layer(1).W_dec[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "what", "told"),
    [
        ("saelens", "clt", "SAELens has no cross-layer transcoders, .*; export to circuit_tracer"),
        ("saelens", "topk plt", "no architecture for TopK transcoders"),
        ("sparsify", "standard", "only TopK with ReLU and group-max activations, found ReLU in "),
        ("circuit_tracer", "gated", "only ReLU, JumpReLU and TopK activations, found Gated in "),
        ("circuit_tracer", "normalised", r"every layer from 0 on, found layer 1"),
        ("circuit-tracer", "clt", "did you mean 'circuit_tracer'"),
    ],
)
def test_what_a_format_cannot_say_is_refused_and_nothing_is_left(
    name: str, what: str, told: str, tmp_path: Path
):
    dictionary = made(tmp_path / "in", what)
    with pytest.raises(mizarr.MizarrError, match=told):
        export(dictionary, tmp_path / "out", name)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_folder_in_use_is_left_alone(tmp_path: Path):
    dictionary = made(tmp_path / "in", "plt")
    with pytest.raises(mizarr.MizarrError, match="found files at"):
        export(dictionary, tmp_path / "in", "saelens")
