"""Loss, order of layers and recall against plain passes of the model, by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import mizarr
from mizarr import HookSpec, Model, Zero
from mizarr.pipeline import run
from mizarr.stages.evaluation import changed
from mizarr.stages.evaluation.loss import CorpusLoss, over_spans
from mizarr.stages.evaluation.order import LayerOrders, swaps
from mizarr.stages.evaluation.recall import FactualRecall
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.training.replacement import replacement_loss
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, PromptError

from ..forward.random_models import save_random_model
from ..forward.random_rwkv import save_random_rwkv

SPECIMEN = Path(mizarr.__file__).parent / "stages" / "forward" / "specimen"


def prompts(*lengths: int, vocab: int = 300, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(2, vocab, length).tolist()) for length in lengths)


def asked(experiment: Any, model: Any, folder: Path) -> Any:
    node, store = experiment.on(model), open_store(folder)
    run(node, store)
    return node.open(store).load()


def by_hand(model: Model, ids: tuple[int, ...], hooks: HookSpec | None = None) -> np.ndarray:
    """Loss of every token but the first."""
    logits = model.forward([list(ids)], hooks).logits[0].double()
    following = torch.tensor(ids)[1:, None]
    return -logits.log_softmax(-1)[:-1].gather(-1, following)[:, 0].numpy()


@pytest.mark.parametrize("family", ["llama", "gemma2", "rwkv6"])
@pytest.mark.parametrize("room", [1, 1 << 26])
def test_loss_is_that_of_plain_passes_however_little_is_held(family, room, tmp_path, monkeypatch):
    monkeypatch.setattr(changed, "LOGIT_BYTES", room)
    save = save_random_rwkv if family.startswith("rwkv") else save_random_model
    save(tmp_path / "model", family, 1)
    model = Model.from_pretrained(tmp_path / "model")
    given = prompts(9, 4, 9, 2, 17, vocab=model.config.vocab_size)
    found = asked(CorpusLoss(given), model, tmp_path / "store")
    each = [by_hand(model, ids) for ids in given]
    np.testing.assert_allclose(found["loss"], [one.mean() for one in each], rtol=1e-5)
    assert found["tokens"].values.tolist() == [8, 3, 8, 1, 16]
    assert np.isnan(found["position_loss"].values[0])
    for position in range(1, 17):
        here = [one[position - 1] for one in each if len(one) >= position]
        assert found["position_tokens"].values[position] == len(here)
        assert found["position_loss"].values[position] == pytest.approx(np.mean(here), rel=1e-5)
    spans = [(1, 4), (4, 17)]
    joined = [np.concatenate([one[a - 1 : b - 1] for one in each]).mean() for a, b in spans]
    np.testing.assert_allclose(over_spans(found, spans), joined, rtol=1e-5)
    said = [model.forward([list(ids)]).logits[0, :-1].argmax(-1).numpy() == ids[1:] for ids in given]
    np.testing.assert_allclose(found["correct"], [one.mean() for one in said])


def test_a_longer_corpus_computes_what_is_new(tmp_path):
    model = Model.from_pretrained("specimen")
    first = prompts(*[6] * 70, vocab=2000)
    store = open_store(tmp_path)
    run(CorpusLoss(first).on(model), store)
    longer = CorpusLoss((*first[:64], *prompts(5, 5, vocab=2000, seed=3))).on(model)
    assert [len(cell["prompts"]) for cell in longer.cells()] == [64, 2]
    assert len(longer.missing(store)) == 1
    run(longer, store)
    assert longer.open(store).sizes["prompt"] == 66


def test_interventions_and_reconstructions_are_those_of_the_model(tmp_path):
    model = Model.from_pretrained("specimen")
    given = prompts(20, 20, 13, vocab=2000)
    hooks = HookSpec().intervene("blocks.2.hook_mlp_out", Zero())
    found = asked(CorpusLoss(given, hooks=hooks), model, tmp_path)
    expected = [by_hand(model, ids, hooks).mean() for ids in given]
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    held = Dictionary.from_pretrained("specimen/clt")
    change = {"dictionary": held.name, "features": held.identity}
    found = asked(CorpusLoss(given, **change), model, tmp_path)
    layers = {layer: held.layer(layer) for layer in held.layers}
    read, write = held.read_hook(0).kind, held.write_hook(0).kind
    lost = replacement_loss(model, layers, read, write, [list(ids) for ids in given])
    expected = float(lost["ce"].sel(place="all", way="replaced"))
    assert over_spans(found, [(2, 20)])[0] == pytest.approx(expected, rel=1e-5)
    keys = {CorpusLoss(given, **more).on(model).key(open_store(tmp_path)).digest for more in ({}, change)}
    assert len(keys) == 2


def exchanged(folder: Path, one: int, other: int) -> Path:
    """The specimen with the tensors of two layers under each other's names."""
    shutil.copytree(SPECIMEN, folder)
    held = load_file(folder / "model.safetensors")
    names = {
        f"model.layers.{one}.": f"model.layers.{other}.",
        f"model.layers.{other}.": f"model.layers.{one}.",
    }

    def renamed(name: str) -> str:
        prefix = next((each for each in names if name.startswith(each)), None)
        return name if prefix is None else names[prefix] + name.removeprefix(prefix)

    save_file({renamed(name): value for name, value in held.items()}, folder / "model.safetensors")
    return folder


def test_another_order_is_what_a_checkpoint_in_that_order_computes(tmp_path):
    given = prompts(12, 12, 7, vocab=2000)
    orders = swaps(6, 100)
    assert len(orders) == 16 and orders[0] == tuple(range(6))
    chosen = (orders[0], orders[4], orders[11])
    found = asked(LayerOrders(given, chosen), "specimen", tmp_path / "store")
    np.testing.assert_array_equal(found["layers"], chosen)
    for row, order in enumerate(chosen):
        moved = [layer for layer in range(6) if order[layer] != layer] or [0, 0]
        model = Model.from_pretrained(exchanged(tmp_path / str(row), *moved))
        expected = [by_hand(model, ids).mean() for ids in given]
        np.testing.assert_allclose(found["loss"][row], expected, rtol=1e-5)


def test_orders_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"every layer 0\.\.5 once, found \(0, 0\)"):
        asked(LayerOrders(prompts(5), ((0, 0),)), "specimen", tmp_path)
    with pytest.raises(ConfigError, match="expected layer 0 first of rwkv7"):
        asked(LayerOrders(prompts(5), swaps(6, 100)), "specimen-rwkv", tmp_path)
    assert len(swaps(6, 100, first=1)) == 11
    assert len(swaps(30, 8, seed=1)) == 9 and swaps(30, 8, seed=1) != swaps(30, 8, seed=2)


def test_recall_is_what_is_said_behind_each_prompt(tmp_path):
    model = Model.from_pretrained("specimen")
    facts = json.loads((SPECIMEN / "facts.json").read_text())[:12]
    ids = tuple(tuple(model.tokenizer.encode(fact["prompt"]).ids) for fact in facts)
    answers = [model.tokenizer.encode(f" {fact['target']}", add_special=False).ids[0] for fact in facts]
    found = asked(FactualRecall(ids, tuple(answers)), model, tmp_path)
    assert found["answer"].values.tolist() == sorted(set(answers))
    for i, prompt in enumerate(ids):
        values = model.forward([list(prompt)]).logits[0, -1].double().log_softmax(-1)
        np.testing.assert_allclose(found["logprob"][i], values[sorted(set(answers))], atol=1e-5)
        assert found["rank"].values[i] == int((values > values[answers[i]]).sum())
        assert found["said"].values[i] == int(values.argmax())


def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path):
    with pytest.raises(PromptError, match="found one of 1"):
        asked(CorpusLoss(prompts(5, 1)), "specimen", tmp_path)
    with pytest.raises(PromptError, match="found none"):
        asked(CorpusLoss(()), "specimen", tmp_path)
    with pytest.raises(PromptError, match="found 1 for 2"):
        asked(FactualRecall(prompts(5, 5), (3,)), "specimen", tmp_path)
    with pytest.raises(ConfigError, match="interventions or a dictionary, found both"):
        CorpusLoss(prompts(5), hooks=HookSpec(), dictionary="specimen/clt", features="x")
    with pytest.raises(ConfigError, match="interventions alone, found captures"):
        CorpusLoss(prompts(5), hooks=HookSpec().capture("hook_embed"))
    measured = asked(CorpusLoss(prompts(5)), "specimen", tmp_path)
    with pytest.raises(PromptError, match="at positions 0 to 0, found none"):
        over_spans(measured, [(0, 1)])
