"""Line patching: places and ways whose outcome is known without patching, controls as large, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mizarr
from mizarr.pipeline import run
from mizarr.stages.causal.draws import AtOnce
from mizarr.stages.causal.grids.line_patching import LinePatching
from mizarr.stages.causal.metrics import kl_divergence, log_softmax
from mizarr.store.errors import PromptError, StageError
from tests.stages.forward.random_models import save_random_model

OWN, OTHER = (1, 5, 9, 12, 7, 3), (1, 5, 20, 12, 7, 3)
AT, END = 2, 5
BEHIND = tuple(range(AT, END + 1))
LINE = LinePatching(
    prompt=OWN,
    donor=OTHER,
    places=((AT,), (3, 4), (END,), (0, 1)),
    ways=((BEHIND, ()), ((AT,), (3, 4, 5)), ((3, 4), ())),
    groups=((2, 3), (4,)),
    read=(2, 3, 4),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_random_model(folder, "llama", 0, tokenizer=False)
    return mizarr.Model.from_pretrained(folder)


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    return computed(LINE, model, tmp_path_factory.mktemp("store"))


def computed(experiment, model, folder):
    store = mizarr.open_store(folder)
    node = experiment.on(model)
    run(node, store)
    return node.open(store).load()


def said(model, ids, spec=None):
    """Logits [position, vocab] of a plain pass, float64."""
    return model.forward(ids, spec).logits[0].detach().double().numpy()


def of_groups(logits):
    probability = np.exp(log_softmax(logits[END]))
    return [probability[list(group)].sum() for group in LINE.groups]


def test_unpatched_runs_are_plain_passes(model, found):
    own, other = (said(model, ids) for ids in (OWN, OTHER))
    np.testing.assert_allclose(found["unpatched"], [of_groups(own), of_groups(other)], rtol=1e-4)
    assert found["unpatched_top"].values.tolist() == [own[END].argmax(), other[END].argmax()]
    wanted = kl_divergence(own, other)[[2, 3, 4]].mean()
    assert float(found["donor_kl"]) == pytest.approx(wanted, rel=1e-4)


def test_a_place_is_one_state_of_the_donor(model, found):
    point = mizarr.HookPoint.resid_post(0)
    donor = model.forward(OTHER, mizarr.HookSpec().capture(point))[point][0]
    spec = mizarr.HookSpec().intervene(point, mizarr.Replace(donor[[3, 4]], positions=(3, 4)))
    patched = said(model, OWN, spec)
    np.testing.assert_allclose(found["probability"][0, 1], of_groups(patched), rtol=1e-4)
    wanted = kl_divergence(said(model, OWN), patched)[[3, 4]].mean()
    assert float(found["kl"][0, 1]) == pytest.approx(wanted, rel=1e-3)
    assert int(found["top"][0, 1]) == patched[END].argmax()


def test_after_the_last_layer_only_the_end_says_what_the_donor_says(found):
    own, other = found["unpatched"].values
    np.testing.assert_allclose(found["probability"][-1, 2], other, rtol=1e-5)
    np.testing.assert_allclose(found["probability"][-1, [0, 1, 3]], [own] * 3, rtol=1e-6)
    assert np.isnan(found["kl"][:, 2]).all()  # nothing is read from the end on
    np.testing.assert_allclose(found["kl"][:, 3], 0.0, atol=1e-12)  # alike in both prompts


def test_ways_are_known_where_all_hear_of_the_change_or_nobody_does(found):
    own, other = found["unpatched"].values
    everyone, nobody, through = found["way_probability"].values
    np.testing.assert_allclose(everyone, other, rtol=1e-5)
    assert float(found["way_kl"][0]) == pytest.approx(float(found["donor_kl"]), rel=1e-4)
    # All behind the change are held up to the last layer, whose own attention hears of it.
    assert np.abs(nobody - own).max() < np.abs(other - own).max()
    assert not np.allclose(through, own, rtol=1e-3) and not np.allclose(through, other, rtol=1e-3)


def test_a_donor_that_is_the_prompt_changes_nothing(model, tmp_path):
    same = computed(replace(LINE, donor=OWN), model, tmp_path)
    own = same["unpatched"].values[0]
    for name in ("probability", "way_probability"):
        np.testing.assert_allclose(same[name], np.broadcast_to(own, same[name].shape), rtol=1e-5)
    np.testing.assert_allclose(same["kl"][:, [0, 1, 3]], 0.0, atol=1e-9)


def test_random_changes_are_as_long_as_the_donors_and_each_draw_another(model):
    """Nothing changes where the prompts are alike."""
    plain, one, again, another = (replace(LINE, seed=seed).prepare(model) for seed in (None, 0, 0, 1))
    lengths = np.linalg.norm(plain.patch_states - plain.prompt_states, axis=-1)
    np.testing.assert_allclose(
        np.linalg.norm(one.patch_states - one.prompt_states, axis=-1), lengths, rtol=1e-4
    )
    assert (lengths[:, :AT] == 0).all() and (lengths[:, AT:] > 0).any()
    np.testing.assert_array_equal(one.patch_states, again.patch_states)
    assert not np.allclose(one.patch_states[:, AT], another.patch_states[:, AT])
    assert not np.allclose(one.patch_states[:, AT], plain.patch_states[:, AT])


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"donor": (1, 2)}, PromptError, "of equal length, found 6 and 2 tokens"),
        ({"places": ()}, StageError, "at least one entry in places"),
        ({"groups": ((),)}, StageError, "at least one entry in groups"),
        ({"ways": (((), (1,)),)}, StageError, "at least one entry in ways"),
        ({"places": ((6,),)}, StageError, "expected positions from 0 to 5, .*, found 6"),
        ({"ways": (((1,), (-1,)),)}, StageError, "expected positions from 0 to 5, .*, found -1"),
    ],
)
def test_what_cannot_be_patched_is_refused(given, error, match):
    with pytest.raises(error, match=match):
        replace(LINE, **given)


def test_a_token_the_model_has_not_is_refused(model):
    with pytest.raises(PromptError, match="expected token ids from 0 to"):
        replace(LINE, groups=((10**6,),)).cells(model.config)


def test_a_sketch_without_the_model_acts_where_the_runs_do(model):
    (cell,) = LINE.cells(model.config)
    sketched, made = LINE.sketch(model.config, cell), LINE.runs(LINE.prepare(model), cell)
    assert len(made) == 4 * model.config.num_layers + 3

    def acts(run):
        bound = run.hooks.bind(model.config.hook_points, model.name)
        return run.prompt, run.want, [(point, change.positions) for point, change in bound.interventions]

    assert list(map(acts, sketched)) == list(map(acts, made))


def test_draws_are_planned_as_runs_of_their_own(model, tmp_path):
    store = mizarr.open_store(tmp_path)
    one, three = (
        AtOnce(tuple(replace(LINE, seed=seed) for seed in seeds)).on(model).plan(store)
        for seeds in ((None,), (None, 0, 1))
    )
    assert three.naive == 3 * one.naive and three.positions > 2 * one.positions
