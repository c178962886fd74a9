"""Features as cells of attribution patching: estimates and exact effects by transformers and the dictionary's
own arithmetic, a cell at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mizarr
from mizarr import HookSpec, Model
from mizarr.pipeline import run
from mizarr.stages.causal.attribution.patching import AttributionPatching
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Rank, Recovery
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.attribution import REST, FeatureAttribution
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
        ({"metric": Rank(3)}, StageError, "that says its gradient"),
        ({"metric": LogitDifference(3, VOCAB)}, PromptError, "expected a token id in 0"),
        ({"verify": -1}, StageError, "number of cells to verify, found -1"),
    ]:
        with pytest.raises(error, match=said):
            FeatureAttribution(**given | change).cells(model.config)
    other = save_random_sae(tmp_path / "wide", layer=1, hidden=HIDDEN * 2)
    wide = Dictionary.from_pretrained(other)
    with pytest.raises(DictionaryError, match="features that read 64 numbers"):
        computed(model, mizarr.open_store(tmp_path / "store"), dictionary=wide.name, features=wide.identity)
