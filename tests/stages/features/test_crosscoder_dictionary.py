"""A trained crosscoder is a dictionary: opened by name, encoded over stored states, told by workflows."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mizarr
from mizarr.pipeline import plan, run
from mizarr.stages.features.corpus.encode import encode_corpus, encode_nodes
from mizarr.stages.features.crosscoder import Crosscoder
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.export import export
from mizarr.stages.features.formats.table import FORMATS
from mizarr.stages.forward.capture.capture import CaptureNode
from mizarr.store.errors import ConfigError, DictionaryError, MizarrError, ShapeError, SourceChanged
from mizarr.workflows import build, compute
from mizarr.workflows.cli import run as cli
from tests.random_dictionaries import save_random_crosscoder

from ..forward.random_models import save_random_model

PROMPTS = [[5, 9, 2, 31, 7, 4], [11, 3, 3, 8], [40, 2, 17, 5, 5, 6, 1, 60, 9], [7, 7]]
HOOKS = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
SCALES = [1.0, 0.5, 2.0, 0.25]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[mizarr.Model]:
    """Two of one configuration and other weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "tuned")):
        save_random_model(folder / name, "llama", seed)
    return [mizarr.Model.from_pretrained(folder / name) for name in ("base", "tuned")]


@pytest.fixture(scope="module")
def folders(models: list[mizarr.Model], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two layers of the first model, and of two layers of both."""
    folder, width = tmp_path_factory.mktemp("crosscoders"), models[0].config.hidden_size
    places = [(model.name, hook) for model in models for hook in HOOKS]
    told = [(*place, scale) for place, scale in zip(places, SCALES, strict=True)]
    return [
        save_random_crosscoder(folder / "layers", told[:2], width),
        save_random_crosscoder(folder / "models", told, width),
    ]


@pytest.fixture
def store(tmp_path: Path) -> mizarr.store.Store:
    return mizarr.open_store(tmp_path / "store", durability="process")


def by_hand(folder: Path, models: list[mizarr.Model]) -> dict[tuple[int, int, int], float]:
    """(prompt, position, feature) -> activation, from the files, in float64."""
    held = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    found = {}
    for number, prompt in enumerate(PROMPTS):
        caches = [model.forward([prompt], mizarr.HookSpec().capture(*HOOKS)) for model in models]
        rows = np.stack([cache[hook][0].double().numpy() for cache in caches for hook in HOOKS])
        pre = np.einsum("ptw,pwf->tf", rows, held["encoder.weight"]) + held["encoder.bias"]
        for position, feature in np.argwhere(pre > held["threshold"]).tolist():
            found[number, position, feature] = float(pre[position, feature])
    return found


def told(table: Any) -> dict[tuple[int, int, int], float]:
    columns = [table[name].values.tolist() for name in ("prompt", "position", "feature", "activation")]
    return {tuple(row[:3]): row[3] for row in zip(*columns, strict=True)}


@pytest.mark.parametrize("many", [1, 2])
def test_a_corpus_has_the_features_that_its_states_have_by_hand(models, folders, store, many):
    dictionary = Dictionary.from_pretrained(folders[many - 1])
    against = models[1] if many == 2 else None
    table = encode_corpus(dictionary, models[0], PROMPTS, store=store, against=against, progress=False)
    expected, found = by_hand(folders[many - 1], models[:many]), told(table)
    assert found.keys() == expected.keys()
    assert len(found) > 100
    np.testing.assert_allclose([found[key] for key in expected], [*expected.values()], rtol=1e-4, atol=1e-5)
    assert set(table["layer"].values.tolist()) == {1}


def states(models: list[mizarr.Model], *segments: int) -> list[CaptureNode]:
    return [
        CaptureNode(model, PROMPTS, HOOKS, segment_tokens=segment)
        for model, segment in zip(models, segments, strict=True)
    ]


def test_killed_and_resumed_an_encoding_is_that_of_an_empty_store(
    models, folders, store, tmp_path, monkeypatch
):
    """Of two models whose runs are cut at other tokens."""
    from mizarr.stages.features.corpus import encode

    dictionary = Dictionary.from_pretrained(folders[1])
    small = states(models, 8, 16)
    (node,) = encode_nodes(dictionary, small[0], other=small[1]).values()
    real, calls = encode._side_by_side, []

    def failing(parts: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("power cut")
        return real(parts)

    monkeypatch.setattr(encode, "_side_by_side", failing)
    with pytest.raises(MizarrError, match="power cut"):
        run(node, store, threads=1)
    calls.clear()
    calls.extend([1, 1])
    (node,) = encode_nodes(dictionary, small[0], other=small[1]).values()
    run(node, store, threads=1)
    assert len(calls) == 2 + 2  # of three pieces one stood
    empty = mizarr.open_store(tmp_path / "empty", durability="process")
    run(node, empty)
    assert node.record(empty).content == node.record(store).content
    base, tuned = states(models, 16, 8)
    (other,) = encode_nodes(dictionary, base, other=tuned).values()
    run(other, mizarr.open_store(tmp_path / "other", durability="process"))
    one, two = node.open(empty).load(), other.open(mizarr.open_store(tmp_path / "other")).load()
    for name in ("token_ptr", "feature", "token_id", "position", "prompt"):
        np.testing.assert_array_equal(one[name], two[name])
    np.testing.assert_allclose(one["value"], two["value"], rtol=1e-5)  # products of other numbers of rows
    moved = Dictionary.from_pretrained(shutil.copytree(folders[1], tmp_path / "moved"))
    assert plan([*encode_nodes(moved, small[0], other=small[1]).values()], store).is_cached


def test_what_is_read_decides_the_identity_and_names_of_models_do_not(folders, tmp_path):
    dictionary = Dictionary.from_pretrained(folders[1])
    assert (dictionary.kind, dictionary.layers, dictionary.targets(1)) == ("crosscoder", (1,), (0, 1))
    assert [[str(hook) for hook in hooks] for hooks in dictionary.reads()] == [HOOKS, HOOKS]
    assert "crosscoder" in FORMATS
    assert "tuned blocks.1" in dictionary._repr_html_()
    identities = [dictionary.identity]
    for name, change in {
        "names": lambda said: [place.update(model="moved/" + place["model"]) for place in said["places"]],
        "scale": lambda said: said["places"][3].update(scale=0.3),
        "order": lambda said: said["places"].reverse(),
        "activation": lambda said: said.update(activation="ReLU"),
    }.items():
        folder = shutil.copytree(folders[1], tmp_path / name)
        said = json.loads((folder / "config.json").read_text())
        change(said)
        (folder / "config.json").write_text(json.dumps(said))
        identities.append(Dictionary.from_pretrained(folder).identity)
    assert identities[0] == identities[1]
    assert len(set(identities)) == 4


def test_files_changed_under_the_name_are_noticed(models, folders, store, tmp_path):
    """The encoder of one place, at the same size and time, after it was planned and opened."""
    folder = shutil.copytree(folders[1], tmp_path / "cc")
    dictionary, (base, tuned) = Dictionary.from_pretrained(folder), states(models, 64, 64)
    (node,) = encode_nodes(dictionary, base, other=tuned).values()
    run([base, tuned], store)
    held, before = load_file(folder / "model.safetensors"), (folder / "model.safetensors").stat()
    held["encoder.weight"][3] *= -1
    save_file(held, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(
        SourceChanged, match=r"model.safetensors of the dictionary .*cc changed .*; open it again"
    ):
        run(node, store)
    assert not [record for record in store.records() if "crosscoder" in record.label]
    anew = encode_corpus(
        Dictionary.from_pretrained(folder), models[0], PROMPTS, store=store, against=models[1], progress=False
    )
    assert told(anew).keys() == by_hand(folder, models).keys()


def test_models_in_the_wrong_order_or_number_and_other_tokens_are_refused(models, folders, store):
    layers, both = map(Dictionary.from_pretrained, folders)
    with pytest.raises(DictionaryError, match=r"order of its training, .*base, .*tuned, found .*; swap"):
        encode_corpus(both, models[1], PROMPTS, store=store, against=models[0])
    with pytest.raises(DictionaryError, match=r"expected 2 models .* name the second model with against="):
        encode_corpus(both, models[0], PROMPTS, store=store)
    with pytest.raises(DictionaryError, match="expected 1 model "):
        encode_corpus(layers, models[0], PROMPTS, store=store, against=models[1])
    base = CaptureNode(models[0], PROMPTS, HOOKS)
    with pytest.raises(DictionaryError, match="expected states of 2 models"):
        encode_nodes(both, base)
    for others in (PROMPTS[::-1], PROMPTS[:3]):
        other = CaptureNode(models[1], others, HOOKS)
        with pytest.raises(MizarrError, match="expected states of the same tokens") as error:
            run(encode_nodes(both, base, other=other)[1], store)
        assert isinstance(error.value, ShapeError) or "ShapeError" in repr(error.value.__cause__)


def test_whoever_reads_one_layer_is_refused_in_one_line(models, folders, store, tmp_path):
    dictionary = Dictionary.from_pretrained(folders[0])
    with pytest.raises(DictionaryError, match="expected a dictionary whose features read one layer"):
        mizarr.HookSpec().capture(*HOOKS, reduce=dictionary)
    with pytest.raises(DictionaryError, match="expected a dictionary whose features read one layer"):
        build("sae_features", dictionary=str(folders[0]), model=models[0].name)
    with pytest.raises(DictionaryError, match="expected transcoders"):
        mizarr.attribution_graph(models[0], dictionary, PROMPTS[0], store=store)
    for name in ("saelens", "sparsify", "circuit_tracer"):
        with pytest.raises(DictionaryError, match="copy its folder"):
            export(dictionary, tmp_path / name, name)
    with pytest.raises(DictionaryError, match="write to several"):
        _ = Dictionary.from_pretrained(folders[1]).write_hooks


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda said, held: said.update(places=[]), "expected a list of models and hook points"),
        (lambda said, held: said["places"][0].pop("scale"), "expected model, hook and scale"),
        (
            lambda said, held: said["places"][0].update(hook="blocks.0.hook_mlp_out"),
            "hook points of one kind",
        ),
        (
            lambda said, held: said["places"][0].update(hook="blocks.1.hook_what"),
            "expected a known hook point in",
        ),
        (lambda said, held: said["places"].pop(), "of shape"),
        (lambda said, held: held.pop("threshold"), "expected a tensor 'threshold'"),
        (lambda said, held: held.update({"encoder.bias": held["encoder.bias"][:-1]}), "of shape"),
        (lambda said, held: said.update(activation="Softmax"), "expected activation to be"),
    ],
)
def test_files_that_do_not_fit_are_told(folders, tmp_path, change, error):
    folder = shutil.copytree(folders[0], tmp_path / "cc")
    said = json.loads((folder / "config.json").read_text())
    held = load_file(folder / "model.safetensors")
    change(said, held)
    (folder / "config.json").write_text(json.dumps(said))
    save_file(held, folder / "model.safetensors")
    with pytest.raises(DictionaryError, match=error):
        Dictionary.from_pretrained(folder).layer(1)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The specimen beside a copy with other weights in its last layers: two models, one tokenizer."""
    folder = tmp_path_factory.mktemp("pages")
    shipped = Path(mizarr.__file__).parent / "stages/forward/specimen"
    shutil.copytree(shipped, folder / "tuned")
    held = load_file(folder / "tuned/model.safetensors")
    name = next(name for name in sorted(held) if ".0." in name and "down_proj" in name)
    held[name] = held[name] * 2
    save_file(held, folder / "tuned/model.safetensors", {"format": "pt"})
    names = ["specimen", str(folder / "tuned")]
    places = [(name, HOOKS[1], scale) for name, scale in zip(names, (1.0, 0.5), strict=True)]
    crosscoder = save_random_crosscoder(folder / "cc", places, 192)
    held = load_file(crosscoder / "model.safetensors")
    held["decoder.weight"][0, :3], held["decoder.weight"][1, 3:5] = 0, 0
    save_file(held, crosscoder / "model.safetensors")
    few = {
        "corpus_tokens": 600,
        "strongest": 2,
        "per_interval": 1,
        "related": 2,
        "dictionary": str(crosscoder),
    }
    return few | {"against": names[1]}, mizarr.open_store(folder / "store", durability="process")


def test_pages_tell_which_features_are_one_models_alone(pages, capsys):
    settings, store = pages
    done = compute("feature_pages", store=store, **settings)
    norms = done.result("places").load()
    crosscoder = Crosscoder.load(settings["dictionary"])
    held = load_file(Path(settings["dictionary"]) / "model.safetensors")
    by_hand = np.linalg.norm(held["decoder.weight"], axis=2) * np.array([[1.0], [0.5]])
    np.testing.assert_allclose(norms["norm"], by_hand, rtol=1e-5)
    np.testing.assert_allclose(norms["relative_norm"], by_hand[1] / by_hand.sum(0), rtol=1e-5)
    np.testing.assert_allclose(norms["decoder_cosine"], crosscoder.decoder_cosine(), rtol=1e-5)
    assert norms["place_model"].values.tolist() == [0, 1]
    alive = done.result("statistics")["firing_count"].values > 0
    document = done.to_json()
    counts = (by_hand[1] / by_hand.sum(0))[alive]
    assert document["models"] == {
        "first_alone": int((counts <= 0.1).sum()),
        "second_alone": int((counts >= 0.9).sum()),
        "shared": int(((counts > 0.1) & (counts < 0.9)).sum()),
    }
    assert document["models"]["second_alone"] >= 1
    assert [each["place"] for each in document["places"]] == [str(place) for place in crosscoder.places]
    assert done.pages.read("data/00000.js")
    with pytest.raises(ConfigError, match="tokenizer"):
        build("feature_pages", **settings | {"against": "specimen-guided"})
    with pytest.raises(DictionaryError, match="swap the two models"):
        build("feature_pages", **settings | {"model": settings["against"], "against": "specimen"})

    assert cli(["features", "inspect", settings["dictionary"], "--values", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [row["decoder_norm"] for row in seen["weights"]] == pytest.approx(by_hand.mean(1).tolist())
    assert [row["zero_decoders"] for row in seen["weights"]] == [3, 2]
    assert seen["read"] == seen["write"] == [str(place) for place in crosscoder.places]
    assert cli(["features", "inspect", settings["dictionary"], "--values"]) == 0
    assert "PLACE" in capsys.readouterr().out
