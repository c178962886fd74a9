"""Loss, order of layers and recall against plain passes of the model, by hand."""

from __future__ import annotations

import json
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import mizarr
from mizarr import HookSpec, Model, Zero
from mizarr.pipeline import run
from mizarr.stages.causal.draws import Draws
from mizarr.stages.evaluation import changed, random_errors
from mizarr.stages.evaluation.changed import SKIP, Means
from mizarr.stages.evaluation.layer_controls import layer_controls
from mizarr.stages.evaluation.loss import CorpusLoss, over_spans
from mizarr.stages.evaluation.order import LayerOrders, swaps
from mizarr.stages.evaluation.random_errors import rotated
from mizarr.stages.evaluation.recall import FactualRecall
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.training.replacement import replacement_loss
from mizarr.stages.forward.architectures.points import HookPoint, points_of
from mizarr.store import open_store
from mizarr.store.errors import ConfigError, HookPointNotFound, PromptError

from ..forward.random_hybrids import save_random_hybrid
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


@pytest.mark.parametrize("point", ["blocks.2.hook_mlp_out", "blocks.1.attn.hook_z"])
def test_hook_points_set_to_their_mean_are_set_to_that_of_other_prompts(point, tmp_path):
    """By hand: ragged references, their first tokens out of the mean and left alone."""
    model = Model.from_pretrained("specimen")
    given, references = prompts(12, 7, 12, vocab=2000), prompts(9, 4, 14, vocab=2000, seed=1)
    found = asked(CorpusLoss(given, mean=Means((point,), references, skip=2)), model, tmp_path)
    axis = 1 if point.endswith("hook_z") else 0
    held = [model.forward([list(ids)], HookSpec().capture(point))[point][0].double() for ids in references]
    every = torch.cat([each.narrow(axis, 2, each.shape[axis] - 2) for each in held], axis)
    mean = every.mean(axis, keepdim=True).float()
    for ids, loss in zip(given, found["loss"].values, strict=True):
        hooks = HookSpec().intervene(point, mizarr.Replace(mean, positions=tuple(range(2, len(ids)))))
        assert loss == pytest.approx(by_hand(model, ids, hooks).mean(), rel=1e-5)


def test_a_change_of_before_has_the_key_it_had():
    hooks = HookSpec().intervene("blocks.2.hook_mlp_out", Zero())
    assert CorpusLoss(prompts(5), hooks=hooks).params() == {"hooks": hooks.canonical(), "features": None}
    assert CorpusLoss(prompts(5)).params() == {"hooks": None, "features": None}


def test_turned_errors_keep_their_lengths_and_angles_and_point_anywhere():
    errors = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 12))).float()
    errors[0] = torch.eye(12)[3]
    drawn = torch.stack([rotated(errors, (seed, 1)) for seed in range(2000)])
    gram = drawn @ drawn.transpose(1, 2)
    np.testing.assert_allclose(gram, (errors @ errors.T).expand_as(gram), atol=1e-4)
    outer = torch.einsum("dti,dtj->tij", drawn, drawn) / 2000  # of an even draw: |e|^2 / width, times 1
    expected = (errors**2).sum(1)[:, None, None] * torch.eye(12) / 12
    assert float((outer - expected).abs().max()) < 0.1 * float((errors**2).sum(1).max())
    assert float(drawn.mean(0).norm(dim=1).max()) < 0.1 * float(errors.norm(dim=1).max())
    assert torch.equal(rotated(errors, (7, 1)), drawn[7]) and not torch.equal(
        drawn[7], rotated(errors, (7, 2))
    )


def test_errors_that_are_not_turned_are_the_reconstructions(tmp_path, monkeypatch):
    """In every layer, each reading what the errors below made of it."""
    model, held = Model.from_pretrained("specimen"), Dictionary.from_pretrained("specimen/clt")
    change = {"dictionary": held.name, "features": held.identity}
    given = prompts(20, 20, 13, 1 + SKIP, vocab=2000)
    found = asked(CorpusLoss(given, **change), model, tmp_path / "own")
    turns = asked(CorpusLoss(given, **change, turned=0), model, tmp_path / "turned")
    monkeypatch.setattr(random_errors, "rotated", lambda vectors, seed: vectors)
    same = asked(CorpusLoss(given, **change, turned=0), model, tmp_path / "same")
    np.testing.assert_allclose(same["loss"], found["loss"], rtol=1e-4)
    assert abs(turns["loss"] - found["loss"]).values[:3].min() > 1e-2


def test_draws_share_what_they_need_and_are_each_what_they_are_alone(tmp_path, monkeypatch):
    model, given = Model.from_pretrained("specimen"), prompts(9, 6, vocab=2000)
    references, passes = prompts(8, 8, vocab=2000, seed=1), []
    taken = Means.taken
    monkeypatch.setattr(Means, "taken", lambda self, model: passes.append(1) or taken(self, model))
    drawn = [CorpusLoss(given, mean=Means((f"blocks.{i}.hook_mlp_out",), references)) for i in (0, 3, 5)]
    found = asked(Draws(tuple(drawn)), model, tmp_path / "draws")
    assert len(passes) == 1
    for loss, each in zip(found["loss"].values, drawn, strict=True):
        np.testing.assert_allclose(loss, asked(each, model, tmp_path / "alone")["loss"], rtol=1e-6)


def points(*names: str) -> tuple[HookPoint, ...]:
    return tuple(map(HookPoint.parse, names))


def test_the_same_elsewhere_is_every_other_choice_of_layers_once():
    six = points_of(("embed", "attn_out", "mlp_out", "z", "final_norm"), 6)
    one = layer_controls(points("blocks.3.hook_mlp_out"), six, 50, seed=0)
    assert set(one) == {points(f"blocks.{i}.hook_mlp_out") for i in (0, 1, 2, 4, 5)} and len(one) == 5
    own = points("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out", "blocks.4.hook_mlp_out", "hook_embed")
    found = layer_controls(own, six, 100, seed=0)
    expected = {
        tuple(sorted(points(f"blocks.{both}.hook_attn_out", f"blocks.{both}.hook_mlp_out",
                            f"blocks.{alone}.hook_mlp_out", "hook_embed"), key=lambda point: point.order))
        for both, alone in permutations(range(6), 2) if (both, alone) != (0, 4)
    }  # fmt: skip
    assert set(found) == expected and len(found) == 29
    few = layer_controls(own, six, 7, seed=3)
    assert len(few) == 7 and few == layer_controls(own, six, 7, seed=3) != layer_controls(own, six, 7, seed=4)
    assert layer_controls(points("hook_embed"), six, 5, seed=0) == []
    assert layer_controls([point for point in six if point.kind == "z"], six, 5, seed=0) == []
    hybrid = points(
        "blocks.0.attn.hook_z", "blocks.3.attn.hook_z", *(f"blocks.{i}.hook_mlp_out" for i in range(5))
    )
    assert layer_controls(points("blocks.0.attn.hook_z"), hybrid, 5, seed=0) == [
        points("blocks.3.attn.hook_z")
    ]


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
    with pytest.raises(ConfigError, match=r"every layer from 0 to 5 once, found \(0, 0\)"):
        asked(LayerOrders(prompts(5), ((0, 0),)), "specimen", tmp_path)
    with pytest.raises(ConfigError, match="expected orders that begin with layer 0 for rwkv7"):
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
        logits = model.forward([list(prompt)]).logits[0, -1].double()
        values = logits.log_softmax(-1)
        # Float32 passes round logits to about a millionth of the largest, on no two instruction sets alike.
        atol = 2e-6 * float(logits.abs().max())
        np.testing.assert_allclose(found["logprob"][i], values[sorted(set(answers))], rtol=0, atol=atol)
        assert found["rank"].values[i] == int((values > values[answers[i]]).sum())
        assert found["said"].values[i] == int(values.argmax())


def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path):
    with pytest.raises(PromptError, match="found a prompt of 1"):
        asked(CorpusLoss(prompts(5, 1)), "specimen", tmp_path)
    with pytest.raises(PromptError, match=r"at least two tokens, .* found no prompts"):
        asked(CorpusLoss(()), "specimen", tmp_path)
    with pytest.raises(PromptError, match=r"one answer for each prompt, .*, found 1 answers for 2 prompts"):
        asked(FactualRecall(prompts(5, 5), (3,)), "specimen", tmp_path)
    with pytest.raises(
        ConfigError, match="one change of the model at a time, found interventions and a dictionary"
    ):
        CorpusLoss(prompts(5), hooks=HookSpec(), dictionary="specimen/clt", features="x")
    with pytest.raises(ConfigError, match="interventions only, found captures"):
        CorpusLoss(prompts(5), hooks=HookSpec().capture("hook_embed"))
    with pytest.raises(ConfigError, match=r"with a position axis .* found 'blocks.0.attn.hook_pattern'"):
        Means(("blocks.0.attn.hook_pattern",), prompts(5))
    with pytest.raises(ConfigError, match="more than 1 tokens for mean ablation, found none"):
        Means(("blocks.0.hook_mlp_out",), ())
    with pytest.raises(ConfigError, match="expected a dictionary, as turned rotates its errors, found none"):
        CorpusLoss(prompts(5), turned=0)
    with pytest.raises(HookPointNotFound, match=r"blocks\.9\.hook_mlp_out"):
        asked(
            CorpusLoss(prompts(5), mean=Means(("blocks.9.hook_mlp_out",), prompts(5))), "specimen", tmp_path
        )
    measured = asked(CorpusLoss(prompts(5)), "specimen", tmp_path)
    with pytest.raises(PromptError, match=r"at positions 0 to 0 .*, found none; give longer prompts"):
        over_spans(measured, [(0, 1)])


def test_a_model_that_sees_what_it_should_predict_is_refused(tmp_path):
    save_random_hybrid(tmp_path, "gpt2", 0, tokenizer=False, is_causal=False, n_layer=2)
    model, ids = Model.from_pretrained(tmp_path), prompts(5, 6)
    orders = tuple(permutations(range(2)))
    for ask in (CorpusLoss(ids), LayerOrders(ids, orders), FactualRecall(ids, (3, 4))):
        with pytest.raises(
            ConfigError, match="predicts the next token, found gpt2, in which every position also"
        ):
            asked(ask, model, tmp_path / "store")
    with pytest.raises(ConfigError, match="predicts the next token, found gpt2"):
        replacement_loss(model, {}, "resid_post", "resid_post", ids)
