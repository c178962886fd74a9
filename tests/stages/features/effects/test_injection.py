"""Features injected by hand, one run at a time and as sweeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mizarr
from mizarr.pipeline import run
from mizarr.stages.features.dictionary import Dictionary
from mizarr.stages.features.effects.doses import Dose, in_place_of, random_like
from mizarr.stages.features.effects.exchanges import FeatureExchanges
from mizarr.stages.features.effects.injection import Injection, added, clamped, injected
from mizarr.store.errors import InterventionError

from ....random_dictionaries import draw, save_random_clt, write_config, write_plt, write_saelens

PROMPT = (5, 9, 2, 31, 7, 4)
EVERY_POSITION = tuple((PROMPT, position) for position in range(len(PROMPT)))
LAYERS = 6  # of the specimen, hidden 192


@pytest.fixture(scope="module")
def model() -> mizarr.Model:
    return mizarr.Model.from_pretrained("specimen")


@pytest.fixture(scope="module")
def clt(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    return Dictionary.from_pretrained(
        save_random_clt(tmp_path_factory.mktemp("clt"), layers=LAYERS, hidden=192)
    )


def logits_of(model: mizarr.Model, hooks: mizarr.HookSpec) -> torch.Tensor:
    return model.forward([list(PROMPT)], hooks).logits[0]


def test_a_feature_is_added_at_every_layer_it_writes_to(model: mizarr.Model, clt: Dictionary):
    by_hand = mizarr.HookSpec()
    for layer in (2, 3, 4, 5):
        vector = 4.0 * clt.layer(2).W_dec[layer][7]
        by_hand = by_hand.intervene(f"blocks.{layer}.hook_resid_post", mizarr.AddAtPositions([(3, vector)]))
    ours = logits_of(model, injected(clt, [Injection("L2:7", 4.0)], [3]))
    torch.testing.assert_close(ours, logits_of(model, by_hand), atol=1e-4, rtol=1e-4)
    plain = logits_of(model, mizarr.HookSpec())
    torch.testing.assert_close(ours[:3], plain[:3], atol=1e-4, rtol=1e-4)
    assert (ours[3] - plain[3]).abs().max() > 0.1


def test_what_injections_add_is_the_sum_of_their_vectors(clt: Dictionary):
    found = added(clt, [Injection("1:3", 2.0), Injection("4:0", -1.5), Injection("L1:5", 1.0, from_layer=5)])
    assert list(found) == [1, 2, 3, 4, 5]
    first, second = clt.layer(1), clt.layer(4)
    torch.testing.assert_close(found[1], 2 * first.W_dec[1][3])
    torch.testing.assert_close(found[4], 2 * first.W_dec[4][3] - 1.5 * second.W_dec[4][0])
    expected = 2 * first.W_dec[5][3] - 1.5 * second.W_dec[5][0] + first.W_dec[5][5]
    torch.testing.assert_close(found[5], expected)


def test_opposite_strengths_cancel(model: mizarr.Model, clt: Dictionary):
    spec = injected(clt, [Injection("L0:1", 3.0), Injection("L0:1", -3.0)], [2, -1])
    torch.testing.assert_close(logits_of(model, spec), logits_of(model, mizarr.HookSpec()))


@pytest.mark.parametrize(("feature", "from_layer", "said"), [
    ("L2:12", None, "feature number from 0 to 11 in layer 2 .*, found 12"),
    ("L6:0", None, r"reads \(layers 0 to 5\), found layer 6"),
    ("2.3", None, "as layer:index"),
    ("L4:0", 3, "layers 4 to 5, found layer 3"),
])  # fmt: skip
def test_features_there_are_not_are_refused(clt: Dictionary, feature: str, from_layer: int | None, said: str):
    with pytest.raises(mizarr.MizarrError, match=said):
        added(clt, [Injection(feature, 1.0, from_layer)])


def test_a_sweep_is_its_runs_one_by_one(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    sweep = FeatureExchanges(
        EVERY_POSITION,
        dictionary=clt.name,
        features=clt.identity,
        exchanges=((Dose(0, 4, fixed=-2.0),), (Dose(3, 2, factor=1.0), Dose(0, 4, fixed=-2.0))),
        strengths=(1.0, 6.0),
        words=(8, 300),
        edge=True,
    )
    store = mizarr.open_store(tmp_path / "store")
    node = sweep.on(model)
    run(node, store, quiet=True)
    found = node.open(store)
    plain = model.forward([list(PROMPT)]).logits[0, -1].double().log_softmax(-1)
    np.testing.assert_allclose(found["baseline_logprob"][0], plain[[8, 300]], atol=1e-5)
    assert found["position"].values.tolist() == list(range(len(PROMPT)))
    capture = mizarr.HookSpec().capture("blocks.*.attn.hook_pattern")
    for strength in (1.0, 6.0):
        for position in range(len(PROMPT)):
            hooks = injected(clt, [Injection("3:2", strength), Injection("0:4", -2.0)], [position])
            cache = model.forward([list(PROMPT)], hooks.extend(capture))
            here = found.sel(strength=strength).isel(place=position, exchange=1)
            logprob = cache.logits[0, -1].double().log_softmax(-1)
            np.testing.assert_allclose(here["logprob"], logprob[[8, 300]], rtol=1e-5, atol=2e-4)
            np.testing.assert_allclose(here["kl"], (plain.exp() * (plain - logprob)).sum(), 1e-4, 1e-5)
            for layer in range(LAYERS):
                edge = cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1, position]
                np.testing.assert_allclose(here["attention"][layer], edge, atol=1e-5)


def test_a_sweep_with_one_more_strength_computes_one(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    store = mizarr.open_store(tmp_path / "store")

    def node(*strengths: float):
        return FeatureExchanges(
            ((PROMPT, 1),), clt.name, clt.identity, ((Dose(3, 2, factor=1.0),),), strengths, (8,)
        ).on(model)

    run(node(1.0, 2.0), store, quiet=True)
    more = node(1.0, 2.0, 3.0)
    assert [cell["strength"] for cell in more.missing(store)] == [3.0]
    run(more, store, quiet=True)
    assert more.open(store)["strength"].values.tolist() == [1.0, 2.0, 3.0]


def test_a_sweep_tells_what_it_will_cost_before_a_model_is_loaded(clt: Dictionary, tmp_path: Path):
    doses = ((Dose(3, 2, factor=1.0),),)
    sweep = FeatureExchanges(EVERY_POSITION, clt.name, clt.identity, doses, (1.0,), (8,))
    work = sweep.on("specimen").estimate(mizarr.open_store(tmp_path / "store")).work
    # The shared run, and of each branch layer 3 where features are added and layers 4 and 5 from there on.
    length = len(PROMPT)
    changed = sum(1 + 2 * (length - place) for place in range(length))
    told = f"{LAYERS * length + changed} layer-positions instead of {length * LAYERS * length}"
    assert told in work, work


# -- clamping


@pytest.fixture(scope="module")
def plt(tmp_path_factory: pytest.TempPathFactory) -> Dictionary:
    folder = tmp_path_factory.mktemp("plt")
    for layer in range(LAYERS):
        write_plt(folder, layer, draw(layer, 192, size=30))
    write_config(folder)
    return Dictionary.from_pretrained(folder)


def active_of(model: mizarr.Model, dictionary: Dictionary, hooks: mizarr.HookSpec | None = None):
    """What is active, and what is written, in the prompt."""
    spec = (
        mizarr.HookSpec()
        .capture(*dictionary.read_hooks, *dictionary.write_hooks)
        .extend(hooks or mizarr.HookSpec())
    )
    cache = model.forward([list(PROMPT)], spec)
    states = {layer: cache[dictionary.read_hook(layer)][0] for layer in dictionary.layers}
    return dictionary.encode(states), {
        layer: cache[dictionary.write_hook(layer)][0] for layer in dictionary.layers
    }


def test_clamping_adds_what_is_missing(model: mizarr.Model, plt: Dictionary):
    active, written = active_of(model, plt)
    layer, position, feature = next(
        row for row in active.indices.tolist() if row[0] == 3 and row[1] not in (0, len(PROMPT) - 1)
    )
    has = float(active.value[(active.indices == torch.tensor([layer, position, feature])).all(1)])
    _, changed = active_of(model, plt, clamped(plt, {f"{layer}:{feature}": 7.0}, [position], active))
    expected = (7.0 - has) * plt.decoder_vector((layer, feature))
    difference = changed[layer] - written[layer]
    torch.testing.assert_close(difference[position], expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        difference[:position], torch.zeros_like(difference[:position]), atol=1e-5, rtol=0
    )
    assert (difference[position] - expected).abs().max() < 1e-3 * expected.abs().max()


def test_clamping_to_what_a_feature_has_changes_nothing(model: mizarr.Model, clt: Dictionary):
    active, _ = active_of(model, clt)
    (layer, position, feature), value = active.indices[5].tolist(), float(active.value[5])
    spec = clamped(clt, {f"{layer}:{feature}": value}, [position], active)
    torch.testing.assert_close(
        logits_of(model, spec), logits_of(model, mizarr.HookSpec()), atol=1e-4, rtol=1e-4
    )


def test_clamping_an_inactive_feature_is_injecting_it(model: mizarr.Model, clt: Dictionary):
    active, _ = active_of(model, clt)
    silent = next(f for f in range(clt.n_features) if [2, 1, f] not in active.indices.tolist())
    ours = logits_of(model, clamped(clt, {f"2:{silent}": 5.0}, [1], active))
    torch.testing.assert_close(ours, logits_of(model, injected(clt, [Injection(f"2:{silent}", 5.0)], [1])))


def test_what_is_injected_can_be_added_outside_the_forward_pass(model: mizarr.Model, plt: Dictionary):
    last, position = LAYERS - 1, 2
    point = f"blocks.{last}.hook_resid_post"
    (vector,) = added(plt, [Injection(f"{last}:4", 6.0)]).values()
    residual = model.forward([list(PROMPT)], mizarr.HookSpec().capture(point))[point]
    residual[:, position] += vector
    by_hand = logits_of(model, mizarr.HookSpec().intervene(point, mizarr.Replace(residual)))
    ours = logits_of(model, injected(plt, [Injection(f"{last}:4", 6.0)], [position]))
    torch.testing.assert_close(ours, by_hand, atol=1e-4, rtol=1e-4)


def test_features_of_heads_are_added_head_by_head(model: mizarr.Model, tmp_path: Path):
    write_saelens(tmp_path, draw(3, 192), metadata={"hook_name": "blocks.1.attn.hook_z"})
    sae = Dictionary.from_pretrained(tmp_path)
    point, heads = "blocks.1.attn.hook_z", model.config.num_attention_heads
    spec = injected(sae, [Injection("1:3", 2.0)], [2, -1], heads=heads)
    before = model.forward([list(PROMPT)], mizarr.HookSpec().capture(point))[point][0]
    after = model.forward([list(PROMPT)], spec.capture(point))[point][0]
    expected = 2 * sae.decoder_vector((1, 3)).reshape(heads, -1)
    for position in (2, len(PROMPT) - 1):
        torch.testing.assert_close(after[:, position] - before[:, position], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[:, 1], before[:, 1])
    with pytest.raises(mizarr.MizarrError, match="found heads=None"):
        injected(sae, [Injection("1:3", 2.0)], [2])


def test_clamping_goes_through_the_planner(model: mizarr.Model, clt: Dictionary):
    active, _ = active_of(model, clt)
    specs = [clamped(clt, {f"{layer}:2": 4.0}, [3], active) for layer in range(LAYERS)]
    found = mizarr.run(model, [mizarr.Run(PROMPT, spec, mizarr.logits()) for spec in specs])
    for spec, cache in zip(specs, found, strict=True):
        torch.testing.assert_close(cache.logits[0, -1], logits_of(model, spec)[-1], atol=1e-4, rtol=1e-4)


def test_positions_of_a_clamp_count_from_the_start(model: mizarr.Model, clt: Dictionary):
    active, _ = active_of(model, clt)
    with pytest.raises(mizarr.MizarrError, match="counted from 0"):
        clamped(clt, {"2:1": 1.0}, [-1], active)
    with pytest.raises(mizarr.MizarrError, match="at least one feature"):
        clamped(clt, {}, [1], active)


def test_a_dose_like_another_writes_as_much_to_all_layers_together(clt: Dictionary):
    def norm(index: int, strength: float, first: int) -> float:
        part = clt.layer(2)
        return float(torch.cat([strength * part.W_dec[m][index] for m in range(first, LAYERS)]).norm())

    plain, scaled = Dose(2, 7, factor=1.5, fixed=1.0), Dose(2, 3, factor=1.5, fixed=1.0, like="L2:7")
    assert plain.at(2.0, clt).strength == 4.0
    assert norm(3, scaled.at(2.0, clt).strength, 2) == pytest.approx(norm(7, 4.0, 2), rel=1e-6)
    late = Dose(2, 3, factor=-1.0, from_layer=4, like="L2:7").at(2.0, clt)
    assert (late.from_layer, late.strength < 0) == (4, True)
    assert norm(3, late.strength, 4) == pytest.approx(norm(7, -2.0, 4), rel=1e-6)
    assert norm(3, late.strength, 2) != pytest.approx(norm(7, -2.0, 2), rel=1e-3)


def test_every_field_of_a_dose_is_in_its_key(clt: Dictionary):
    def params(**given: str):
        doses = ((Dose(3, 2, 1.0, **given),),)
        sweep = FeatureExchanges(EVERY_POSITION, clt.name, clt.identity, doses, (1.0,), (8,))
        return sweep.params()["exchanges"][0]

    plain = {"layer": 3, "index": 2, "factor": 1.0, "fixed": 0.0, "from_layer": None, "like": None}
    assert params() == [plain]
    assert params(like="L3:5") == [plain | {"like": "L3:5"}]


def test_a_sweep_scales_what_it_injects(model: mizarr.Model, clt: Dictionary, tmp_path: Path):
    sweep = FeatureExchanges(
        ((PROMPT, 2),), clt.name, clt.identity, ((Dose(3, 2, 1.0, like="L3:5"),),), (6.0,), (8,)
    )
    store = mizarr.open_store(tmp_path / "store")
    run(node := sweep.on(model), store, quiet=True)
    theirs, own = (torch.cat([clt.layer(3).W_dec[m][i] for m in (3, 4, 5)]).norm() for i in (5, 2))
    hooks = injected(clt, [Injection("3:2", 6.0 * float(theirs / own))], [2])
    logprob = model.forward([list(PROMPT)], hooks).logits[0, -1].double().log_softmax(-1)
    np.testing.assert_allclose(node.open(store)["logprob"].squeeze(), logprob[8], rtol=1e-5)


def test_random_doses_are_others_of_the_layer():
    dose, other = Dose(2, 7, factor=1.0), Dose(2, 3, factor=-1.0)
    drawn = random_like(dose, 50, 12, seed=0, without=[other, Dose(1, 5)])
    assert sorted(one.index for one in drawn) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert {(one.layer, one.factor, one.like) for one in drawn} == {(2, 1.0, "L2:7")}
    assert random_like(dose, 4, 12, seed=1) != random_like(dose, 4, 12, seed=0)


def test_what_stands_in_for_several_features_keeps_who_is_who():
    doses = [Dose(2, 7, fixed=-3.0), Dose(2, 3, fixed=-3.0), Dose(1, 4, fixed=-3.0), Dose(2, 7, fixed=3.0)]
    drawn = in_place_of(doses, 12, seed=5)
    assert drawn[0].index == drawn[3].index != drawn[1].index
    assert not {(one.layer, one.index) for one in drawn} & {(2, 7), (2, 3), (1, 4)}
    assert [(one.layer, one.fixed, one.like) for one in drawn] == [
        (2, -3.0, "L2:7"), (2, -3.0, "L2:3"), (1, -3.0, "L1:4"), (2, 3.0, "L2:7"),
    ]  # fmt: skip
    with pytest.raises(
        InterventionError, match=r"expected at least 2 other features in layer 2 to draw .*, found 1"
    ):
        in_place_of(doses, 3, seed=5)
