"""Norms of weights from checkpoints to tables, figure and JSON."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from mizarr.store import open_store
from mizarr.store.errors import ModelNotFound, WeightsError
from mizarr.workflows import build, compute

NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture(scope="module")
def done(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    return compute(
        "inspect_weights", store=tmp_path_factory.mktemp("weights") / "store", model=str(tiny_model)
    )


def changed(tiny_model: Path, folder: Path, change) -> str:
    """A copy of the model with changed tensors."""
    folder.mkdir()
    tensors = load_file(tiny_model / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((tiny_model / "config.json").read_text())
    return str(folder)


def test_every_tensor_is_told_with_numpys_numbers(done, tiny_model):
    tensors = load_file(tiny_model / "model.safetensors")
    document = json.loads(json.dumps(done.to_json(), allow_nan=False))
    told = [*document["outside_layers"], *(one for row in document["layers"] for one in row["tensors"])]
    assert {one["name"] for one in told} == set(tensors)
    for one in told:
        values = tensors[one["name"]].astype(np.float64)
        assert one["shape"] == list(values.shape)
        assert one["dtype"] == "F32"
        numbers = (np.linalg.norm(values), values.mean(), values.std())
        np.testing.assert_allclose([one["norm"], one["mean"], one["std"]], numbers, rtol=1e-9, atol=1e-12)
    assert document["parameters"] == sum(values.size for values in tensors.values())
    assert [row["layer"] for row in document["layers"]] == [0, 1, 2]
    assert (document["n_layers"], document["hidden_size"], document["vocab_size"]) == (3, 32, 300)
    assert document["embedding"]["shape"] == [300, 32]


def test_norms_by_layer_are_those_of_the_layers(done, tiny_model):
    tensors = load_file(tiny_model / "model.safetensors")
    assert sorted(done.short[:7]) == ["down", "gate", "k", "o", "q", "up", "v"]
    assert sorted(done.short[7:]) == ["ln1", "ln2"]
    column = done.matrices.index("self_attn.q_proj")
    own = [tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in range(3)]
    np.testing.assert_allclose(done.norms()[:, column], [np.linalg.norm(one) for one in own], rtol=1e-6)
    mean_square = [np.sqrt(np.mean(np.square(one))) for one in own]
    np.testing.assert_allclose(done.norms(rms=True)[:, column], mean_square, rtol=1e-6)


def test_bfloat16_and_several_files_are_read_alike(done, tiny_model, tmp_path):
    def narrow(tensors):
        tensors |= {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}

    folder = Path(changed(tiny_model, tmp_path / "narrow", narrow))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = compute("inspect_weights", store=tmp_path / "store", model=str(folder))
    assert {fact.dtype for _, _, fact in found.facts} == {"BF16"}
    np.testing.assert_allclose(found.norms(), done.norms(), rtol=1e-2)


def test_a_tensor_with_a_nan_is_named_and_has_no_norm(tiny_model, tmp_path, capsys):
    def spoil(tensors):
        tensors[NORM][3] = np.nan

    found = compute(
        "inspect_weights", store=tmp_path / "store", model=changed(tiny_model, tmp_path / "bad", spoil)
    )
    assert np.isnan(found.norms()).sum() == 1
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    (told,) = (one for one in document["layers"][1]["tensors"] if one["name"] == NORM)
    assert told["norm"] is None
    found.render(Console(width=120), tmp_path / "figures")
    assert f"Tensors with NaN or infinite entries: {NORM}" in " ".join(capsys.readouterr().out.split())


def test_tensors_of_no_use_to_the_forward_pass_are_told_too(tiny_model, tmp_path):
    def add(tensors):
        tensors["model.layers.2.adapter.scale"] = np.array(3.0, np.float32)
        tensors["vision.patch.weight"] = np.ones((2, 3, 4), np.float32)

    found = compute(
        "inspect_weights", store=tmp_path / "store", model=changed(tiny_model, tmp_path / "more", add)
    )
    facts = {fact.name: (layer, fact) for layer, _, fact in found.facts}
    layer, scale = facts["model.layers.2.adapter.scale"]
    assert (layer, scale.shape, scale.norm) == (2, (), 3)
    layer, patch = facts["vision.patch.weight"]
    assert (layer, patch.shape, patch.norm) == (-1, (2, 3, 4), pytest.approx(np.sqrt(24)))
    assert found.tables()


def test_table_and_figure_show_the_matrices_and_name_the_result(done, tmp_path, capsys):
    (path,) = done.render(Console(width=120), tmp_path)
    printed = capsys.readouterr().out
    assert "self_attn.q_proj" in printed and "32 x 32" in printed
    assert done.to_json()["provenance"]["keys"]["weights"][:12].encode() in path.read_bytes()


def test_matrices_that_outnumber_the_colours_are_shades_by_part_of_a_layer(done):
    families = {line.name: line.family for view in done.shown if view.kind == "lines" for line in view.lines}
    assert {families[name] for name in "qkvo"} == {"self_attn"}
    assert {families[name] for name in ("up", "down", "gate")} == {"mlp"}
    assert families["ln1"] == "", "two curves need no shades"


def test_the_same_files_elsewhere_are_not_read_again(tiny_model, tmp_path):
    store = open_store(tmp_path / "store")
    compute("inspect_weights", store=store, model=str(tiny_model))
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert build("inspect_weights", model=str(copy)).nodes["weights"].status(store).is_cached


def test_what_cannot_be_read_is_one_clear_line(tiny_model, tmp_path):
    with pytest.raises(ModelNotFound, match=r"found no nobody/nothing; .*mizarr models fetch nobody/nothing"):
        build("inspect_weights", model="nobody/nothing")
    folder = Path(changed(tiny_model, tmp_path / "cut", lambda tensors: None))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(WeightsError, match="safetensors"):
        compute("inspect_weights", store=tmp_path / "store", model=str(folder))


EMBED = "model.embed_tokens.weight"


def with_header(change):
    """Bytes of a safetensors file whose header was changed; its data stay."""

    def spoil(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = json.dumps(change(header) or header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return spoil


def of_entry(**fields):
    return with_header(lambda header: header[EMBED].update(fields))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
BAD = {
    "cut short": lambda data: data[:-100],
    "cut within its header": lambda data: data[:200],
    "longer than its header says": lambda data: data + b"\0" * 8,
    "empty": lambda data: b"",
    "a pointer of git-lfs": lambda data: POINTER,
    "a web page": lambda data: b"<!DOCTYPE html><html>Sign in</html>",
    "a header of zeros": lambda data: b"\0" * len(data),
    "a header of 2^40 bytes": lambda data: (2**40).to_bytes(8, "little") + data[8:],
    "a range of nothing": of_entry(data_offsets=[0, 0]),
    "a negative range": of_entry(data_offsets=[-8, 0]),
    "a range that ends before it starts": of_entry(data_offsets=[64, 0]),
    "a range of fractions": of_entry(data_offsets=[0.0, 1.5]),
    "ranges that overlap": with_header(
        lambda header: header[NORM].update(data_offsets=[0, 4 * header[NORM]["shape"][0]])
    ),
    "an unknown dtype": of_entry(dtype="F33"),
    "numbers of another width": of_entry(dtype="F16"),
    "a shape of 2^62": of_entry(shape=[2**31, 2**31]),
    "an entry that is a text": with_header(lambda header: header.update({EMBED: "gone"})),
    "a header that is a list": with_header(list),
}
"""Kind of damage -> what becomes of the bytes of a safetensors file."""
UNFIT = {
    "numbers that are integers": of_entry(dtype="I32"),
    "another shape": with_header(lambda header: header[EMBED].update(shape=header[EMBED]["shape"][::-1])),
    "a tensor under another name": with_header(
        lambda header: {name.replace(EMBED, "other"): entry for name, entry in header.items()}
    ),
    "no queries in a layer": with_header(
        lambda header: {name.replace("1.self_attn.q_proj", "x.q"): entry for name, entry in header.items()}
    ),
}
"""Of a sound file that is not of this model."""
CHOSEN = {"ov_qk": {"layer": 0, "head": 0}}
INCOMPLETE = (
    "model.safetensors is not a complete safetensors file: its header should have {} bytes, and {} follow; "
)
SAID = {
    "cut within its header": INCOMPLETE.format(3048, 192) + "download",
    "empty": "model.safetensors is empty; fetch it again",
    "a pointer of git-lfs": "model.safetensors holds only a git-lfs pointer .*git lfs pull",
    "a web page": INCOMPLETE.format(int.from_bytes(b"<!DOCTYP", "little"), 27) + "download",
    "a header of zeros": INCOMPLETE.format(0, "\\d+") + "download",
    "a header of 2^40 bytes": INCOMPLETE.format(2**40, "\\d+") + "download",
}
"""Kind of damage -> what is said of it; of all others, what was expected or found."""


@pytest.mark.parametrize(
    ("workflow", "kind"),
    [
        *((workflow, kind) for workflow in ("inspect_weights", "ov_qk", "composition") for kind in BAD),
        *((workflow, kind) for workflow in ("ov_qk", "composition") for kind in UNFIT),
    ],
)
def test_a_file_that_is_damaged_is_refused_in_a_line(workflow, kind, tiny_model, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(tiny_model, folder)
    path = folder / "model.safetensors"
    path.write_bytes({**BAD, **UNFIT}[kind](path.read_bytes()))
    store = open_store(tmp_path / "store", durability="process")
    with pytest.raises((WeightsError, ModelNotFound)) as refused:
        compute(workflow, store=store, model=str(folder), **CHOSEN.get(workflow, {}))
    line = str(refused.value)
    assert "\n" not in line and len(line) < 600 and re.search(SAID.get(kind, "found|expected"), line), line
    assert not list(store.records())
