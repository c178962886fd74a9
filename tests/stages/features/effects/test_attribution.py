"""Features as cells of attribution patching: estimates and exact effects by transformers and the dictionary's
own arithmetic, a cell at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

import mizarr
from mizarr import HookSpec, Model
from mizarr.pipeline import run
from mizarr.stages.causal.attribution.patching import AttributionPatching
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Rank, Recovery
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects import random_attribution
from mizarr.stages.features.effects.attribution import REST, FeatureAttribution
from mizarr.stages.features.effects.random_attribution import RandomAttribution
from mizarr.store.errors import DictionaryError, PromptError, StageError

from ....random_dictionaries import draw, save_random_clt, save_random_plt, save_random_sae, write_saelens
from ...forward.random_models import VOCAB, save_random_model

pytest.importorskip("transformers")
LENGTH, HIDDEN, LAYERS = 6, 32, 2
METRIC = LogitDifference(3, 7)


def prompt(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, VOCAB, LENGTH).tolist())


CLEAN, CORRUPTED = prompt(1), (*prompt(1)[:2], *prompt(2)[2:4], *prompt(1)[4:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4}
    save_random_model(path, "llama", 3, **sizes, num_key_value_heads=2)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.from_pretrained(folder)


def dictionary(kind: str, folder: Path) -> Dictionary:
    if kind == "clt":
        path = save_random_clt(folder, layers=LAYERS, hidden=HIDDEN)
    elif kind == "plt":
        path = save_random_plt(folder, layers=LAYERS, hidden=HIDDEN)
    elif kind == "sae":
        path = save_random_sae(folder, layer=1, hidden=HIDDEN)
    else:
        write_saelens(folder, draw(2, HIDDEN), "skip_transcoder")
        path = folder
    return Dictionary.from_pretrained(path)


def computed(model: Model, store: Any, **given: Any) -> Any:
    node = FeatureAttribution(**{"clean": CLEAN, "corrupted": CORRUPTED, "metric": METRIC} | given).on(model)
    run(node, store)
    return node.open(store).load()


class Theirs:
    """transformers' Llama with values added to, and gradients taken at, what its layers or MLPs give."""

    def __init__(self, folder: Path, writes: dict[int, str]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
        self.added: dict[int, tuple[int, torch.Tensor]] = {}
        self.seen: dict[int, torch.Tensor] = {}
        for layer, kind in writes.items():
            block = self.model.model.layers[layer]
            part = block if kind == "resid_post" else block.mlp
            part.register_forward_hook(self.hook(layer))

    def hook(self, layer: int) -> Any:
        def changed(module: Any, given: Any, out: Any) -> Any:
            x = out[0] if isinstance(out, tuple) else out
            if layer in self.added:
                position, vector = self.added[layer]
                x = x.clone()
                x[0, position] += vector.double()
            x.retain_grad()
            self.seen[layer] = x
            return (x, *out[1:]) if isinstance(out, tuple) else x

        return changed

    def metric(self, ids: Any) -> torch.Tensor:
        logits = self.model(torch.tensor([ids])).logits[0, -1]
        return logits[METRIC.correct] - logits[METRIC.wrong]


@pytest.mark.parametrize("kind", ["sae", "plt", "clt", "skip"])
def test_every_cell_is_that_of_transformers_and_the_dictionary_by_hand(model, folder, tmp_path, kind):
    """Estimates of all cells and exact effects of some, each by a run of its own; what features and rests
    write together is all that differs."""
    features = dictionary(kind, tmp_path / "d")
    found = computed(
        model,
        mizarr.open_store(tmp_path / "store"),
        dictionary=features.name,
        features=features.identity,
        verify=6,
    )
    reads = {layer: features.read_hook(layer) for layer in features.layers}
    states = {
        ids: model.forward([list(ids)], HookSpec().capture(*reads.values())) for ids in (CLEAN, CORRUPTED)
    }
    values = {
        ids: {n: features.layer(n).encode(states[ids][point][0]).double() for n, point in reads.items()}
        for ids in states
    }
    theirs = Theirs(folder, {n: features.write_hook(n).kind for n in features.write_layers})
    theirs.metric(CLEAN)
    clean = {n: x.detach()[0] for n, x in theirs.seen.items()}
    base = theirs.metric(CORRUPTED)
    base.backward()
    gradient = {n: x.grad[0] for n, x in theirs.seen.items()}
    rest = {n: clean[n] - x.detach()[0] for n, x in theirs.seen.items()}
    expected: dict[tuple[int, int, int], tuple[float, dict[int, torch.Tensor]]] = {}
    for layer in features.layers:
        change = values[CLEAN][layer] - values[CORRUPTED][layer]
        is_active = (values[CLEAN][layer] != 0) | (values[CORRUPTED][layer] != 0)
        for position, feature in is_active.nonzero().tolist():
            written = {
                m: change[position, feature] * features.decoder_vector((layer, feature), m).double()
                for m in features.targets(layer)
            }
            effect = sum(float(vector @ gradient[m][position]) for m, vector in written.items())
            expected[layer, position, feature] = effect, written
            for m, vector in written.items():
                rest[m][position] -= vector
    for layer, x in rest.items():
        for position in range(LENGTH):
            here = x[position]
            expected[layer, position, REST] = float(here @ gradient[layer][position]), {layer: here}
    cells = list(
        zip(*(found[name].values.tolist() for name in ("layer", "position", "feature")), strict=True)
    )
    assert sorted(cells) == sorted(expected)
    scale = max(abs(effect) for effect, _ in expected.values())
    assert scale > 1e-3
    ours = found["estimate"].values
    np.testing.assert_allclose(ours, [expected[each][0] for each in cells], rtol=0, atol=1e-4 * scale)
    chosen = found["chosen_cell"].values
    assert set(chosen[:6]) == set(np.argsort(-np.abs(ours))[:6]) and len(set(chosen)) == len(chosen) == 12
    exact = []
    for number in chosen:
        position = cells[number][1]
        theirs.added = {m: (position, vector) for m, vector in expected[cells[number]][1].items()}
        exact.append((theirs.metric(CORRUPTED) - base).item())
    np.testing.assert_allclose(found["exact"], exact, rtol=0, atol=1e-4 * np.abs(exact).max())
    assert np.isfinite(found["random"][:6]).all() and found["random"][6:].isnull().all()


@pytest.mark.parametrize(("kind", "written"), [("sae", "resid_post"), ("clt", "mlp_out")])
def test_cells_of_a_place_add_up_to_patching_the_place(model, tmp_path, kind, written):
    """Whatever the dictionary is worth: features and rest together are what is patched."""
    features = dictionary(kind, tmp_path / "d")
    assert features.layout.write.endswith(written), features.layout.write
    store = mizarr.open_store(tmp_path / "store")
    found = computed(
        model, store, dictionary=features.name, features=features.identity, metric=Recovery(KL())
    )
    grid = AttributionPatching(
        clean=CLEAN,
        corrupted=CORRUPTED,
        kinds=(written,),
        layers=features.write_layers,
        metrics=(Recovery(KL()),),
    ).on(model)
    run(grid, store)
    whole = grid.open(store)["recovery"].sum().item()
    assert float(found["estimate"].sum()) == pytest.approx(whole, rel=1e-4, abs=1e-4)
    assert found["exact"].size == 0 and found["worst_miss"].isnull().all()


def test_what_cannot_be_is_one_line(model, tmp_path):
    features = dictionary("sae", tmp_path / "d")
    named = {"dictionary": features.name, "features": features.identity}
    given: dict[str, Any] = {"clean": CLEAN, "corrupted": CORRUPTED, "metric": METRIC} | named
    for change, error, said in [
        ({"clean": CLEAN[:-1]}, PromptError, "expected a clean and a corrupted prompt of equal length"),
        ({"metric": Rank(3)}, StageError, "a differentiable metric, found Rank.*; use LogitDifference"),
        (
            {"metric": LogitDifference(3, VOCAB)},
            PromptError,
            "'logit_difference': expected a token id from 0 to 319, found 320",
        ),
        ({"verify": -1}, StageError, "expected verify to be at least 0, found -1"),
    ]:
        with pytest.raises(error, match=said):
            FeatureAttribution(**given | change).cells(model.config)
    other = save_random_sae(tmp_path / "wide", layer=1, hidden=HIDDEN * 2)
    wide = Dictionary.from_pretrained(other)
    with pytest.raises(
        DictionaryError, match=r"wide read states of width 64 at .*, but .* has width 32 there; use the model"
    ):
        computed(model, mizarr.open_store(tmp_path / "store"), dictionary=wide.name, features=wide.identity)


@pytest.mark.parametrize("kind", ["sae", "clt"])
def test_random_features_write_as_much_at_the_same_positions_and_the_largest_is_run(model, tmp_path, kind):
    """By hand: what each cause adds, its first order by a captured gradient, and a plain pass of it."""
    features = dictionary(kind, tmp_path / "d")
    own = {"dictionary": features.name, "features": features.identity}
    whole = computed(model, mizarr.open_store(tmp_path / "store"), **own, verify=3)
    node = RandomAttribution(clean=CLEAN, corrupted=CORRUPTED, metric=METRIC, **own, draws=6).on(model)
    run(node, store := mizarr.open_store(tmp_path / "store"))
    found = node.open(store).load()
    cells = whole.isel(cell=np.flatnonzero(whole["feature"].values != REST))
    most = int(np.abs(cells["estimate"].values).argmax())
    for name in ("layer", "position", "feature", "change", "estimate"):
        assert found[name].values[0] == pytest.approx(cells[name].values[most])
    assert int(found["candidates"]) == cells.sizes["cell"]

    def norm(layer: int, feature: int) -> float:
        written = [features.decoder_vector((layer, feature), m).double() for m in features.targets(layer)]
        return float(torch.cat(written).norm())

    columns = ("layer", "position", "feature", "change")
    written: dict[tuple[int, int], list[float]] = {}
    for layer, position, feature, change in zip(*(cells[n].values.tolist() for n in columns), strict=True):
        written.setdefault((layer, position), []).append(change * norm(layer, feature))
    slopes = HookSpec().capture(*(f"grad:{point}" for point in features.write_hooks)).gradient_of(METRIC)
    slope = model.forward([list(CORRUPTED)], slopes)
    base = model.forward([list(CORRUPTED)]).logits[0, -1].double()
    for i, (layer, position, feature, change) in enumerate(
        zip(*(found[n].values.tolist() for n in columns), strict=True)
    ):
        assert min(abs(each - change * norm(layer, feature)) for each in written[layer, position]) < 1e-4
        spec, first = HookSpec(), 0.0
        for m in features.targets(layer):
            vector = change * features.decoder_vector((layer, feature), m)
            point = features.write_hook(m)
            spec = spec.intervene(point, mizarr.AddAtPositions([(position, vector)]))
            first += float(vector.double() @ slope[f"grad:{point}"][0, position].double())
        logits = model.forward([list(CORRUPTED)], spec).logits[0, -1].double() - base
        assert found["estimate"].values[i] == pytest.approx(first, abs=1e-4)
        exact = float(logits[METRIC.correct] - logits[METRIC.wrong])
        assert found["exact"].values[i] == pytest.approx(exact, abs=1e-4)


def test_of_few_features_the_largest_is_where_they_move_most(model, tmp_path, monkeypatch):
    """With two features to draw, many draws give each cell either of them: the best of all is known."""
    monkeypatch.setattr(random_attribution, "POOL", 2)
    features = dictionary("sae", tmp_path / "d")
    own = {"dictionary": features.name, "features": features.identity}
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "metric": METRIC, **own}
    held = RandomAttribution(**given, draws=60).prepare(model)
    drawn = {int(place[2]) for place in held.place[1:]}
    cells = held.attributed

    def unit(feature: int) -> torch.Tensor:
        return features.decoder_vector((1, feature)).double()

    sizes = [
        abs(change)
        * float(unit(index).norm() * abs(cells.gradients[1][position] @ unit(other)) / unit(other).norm())
        for (_, position, index), change in zip(cells.place.tolist(), cells.change, strict=True)
        for other in drawn - {index}
        if index != REST
    ]
    assert 1 <= len(drawn) <= 2
    assert abs(held.estimate[1:]).max() == pytest.approx(max(sizes), rel=1e-6)


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_the_largest_feature_of_random_weights_is_no_larger_than_of_random_features(count, tmp_path):
    """A pair of prompts that nobody asks whether it is known: of 19 draws, all are exceeded once in 20."""
    beyond = 0
    for seed in range(count):
        folder = tmp_path / str(seed)
        sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4}
        save_random_model(folder / "model", "llama", seed, **sizes, num_key_value_heads=2)
        model = Model.from_pretrained(folder / "model")
        held = Dictionary.from_pretrained(
            save_random_sae(folder / "d", layer=0, hidden=HIDDEN, features=96, seed=seed)
        )
        given = {"dictionary": held.name, "features": held.identity, "draws": 19, "seed": seed}
        node = RandomAttribution(clean=prompt(seed), corrupted=prompt(seed + 99), metric=METRIC, **given)
        run(on := node.on(model), store := mizarr.open_store(folder / "store"))
        sizes_found = np.abs(on.open(store)["exact"].values)
        beyond += bool(sizes_found[0] > sizes_found[1:].max())
    assert beyond <= binom.ppf(0.999, count, 1 / 20)
