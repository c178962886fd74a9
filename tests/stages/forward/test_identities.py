"""What must hold inside every family, whatever the weights: sums of the residual stream, and interventions
that change nothing."""

from __future__ import annotations

import pytest
import torch

import mizarr
from mizarr import Add, HookPoint, HookSpec, Knockout, Replace, Scale, SetValue, Steer, Zero
from mizarr.stages.forward.models.model import Model
from mizarr.store.errors import HookPointNotFound, InterventionError, PromptError
from tests.layer_parts import part_of

from .random_models import FAMILIES, VOCAB, save_random_model

pytest.importorskip("transformers")
LENGTH = 23


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_random_model(folder, request.param, 21)
    return Model.from_pretrained(folder)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def everything(model, ids):
    return model.forward(ids, HookSpec().capture("*", "blocks.*_input"))


def close(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


def test_capturing_everything_changes_no_bit_of_the_output(model, ids, everything):
    assert torch.equal(everything.logits, model.forward(ids).logits)
    assert everything.num_captures == len(model.hook_points)


def test_the_residual_stream_is_a_sum(model, everything):
    close(everything[HookPoint.embed()], everything[HookPoint.resid_pre(0)], atol=0)
    for layer in range(model.config.num_layers):
        at = {
            kind: everything[HookPoint(kind, layer)]
            for kind in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        }
        assert torch.equal(at["resid_mid"], at["resid_pre"] + at["attn_out"])
        assert torch.equal(at["resid_post"], at["resid_mid"] + at["mlp_out"])
        if layer:
            assert torch.equal(at["resid_pre"], everything[HookPoint.resid_post(layer - 1)])


def test_head_results_and_bias_sum_to_the_attention_output(model, everything):
    """Before any post-norm: for 4-norm families the post-norm's scale and normalised value give that output
    back."""
    for layer in range(model.config.num_layers):
        summed = everything[HookPoint.result(layer)].sum(1)
        bias = part_of(model.network.weights.layers[layer], "o").bias
        if bias is not None:
            summed = summed + bias
        if model.config.layers[layer].norms == "around":
            expected = (
                everything[HookPoint.ln1_post_scale(layer)] * everything[HookPoint.ln1_post_normalized(layer)]
            )
        else:
            expected = everything[HookPoint.attn_out(layer)]
        close(summed, expected)


def windows(model):
    return [layer.mixer.window for layer in model.config.layers]


def test_patterns_are_causal_windowed_distributions_that_mix_the_values(model, everything):
    for layer, window in enumerate(windows(model)):
        pattern = everything[HookPoint.pattern(layer)]
        close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        unseen = (distance < 0) | (distance >= (window or LENGTH))
        assert (pattern[..., unseen] == 0).all()
        assert everything[HookPoint.attn_scores(layer)][..., unseen].isneginf().all()
        value = everything[HookPoint.v(layer)].repeat_interleave(
            pattern.shape[1] // everything[HookPoint.v(layer)].shape[1], 1
        )
        close(pattern @ value, everything[HookPoint.z(layer)])


def test_scores_are_scaled_products_of_rotated_queries_and_keys(model, everything):
    query, key = everything[HookPoint.rot_q(0)], everything[HookPoint.rot_k(0)]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    close(
        everything[HookPoint.scores(0)],
        query @ key.transpose(-1, -2) * model.config.layers[0].mixer.scale,
        atol=1e-4,
    )


def test_normalised_values_times_scale_are_the_input_of_the_norm(model, everything):
    if model.config.norm_type == "layer":
        state = everything[HookPoint.resid_pre(1)]
        centred = state - state.mean(-1, keepdim=True)
    else:
        centred = everything[HookPoint.resid_pre(1)]
    close(everything[HookPoint.ln1_scale(1)] * everything[HookPoint.ln1_normalized(1)], centred)


def test_mlp_activations_project_to_the_mlp_output(model, everything):
    for layer in range(model.config.num_layers):
        down = part_of(model.network.weights.layers[layer], "down")
        expected = everything[HookPoint.mlp_post_act(layer)] @ down.weight.T + (
            0 if down.bias is None else down.bias
        )
        close(everything[HookPoint.mlp_post(layer)], expected, atol=1e-4)


KINDS_THAT_FLOW = (
    "embed",
    "resid_pre",
    "ln1_scale",
    "ln1_normalized",
    "q",
    "k",
    "v",
    "rot_q",
    "rot_k",
    "scores",
    "attn_scores",
    "pattern",
    "z",
    "result",
    "attn_out",
    "resid_mid",
    "ln2_scale",
    "ln2_normalized",
    "mlp_pre",
    "mlp_pre_act",
    "mlp_post_act",
    "mlp_post",
    "mlp_out",
    "resid_post",
    "final_norm",
)


@pytest.mark.parametrize("kind", KINDS_THAT_FLOW)
def test_putting_back_what_was_there_changes_nothing(model, ids, everything, kind):
    """Scale(1), Add(0) and Replace(captured), at every point; scores and patterns leave the fused kernel,
    so to rounding only."""
    point = HookPoint(kind, None if kind in ("embed", "final_norm") else 1)
    value = everything[point]
    neutral = [Scale(1.0)]
    if kind != "attn_scores":  # holds -inf where masked
        neutral += [Add(torch.zeros_like(value)), Replace(value)]
    for intervention in neutral:
        logits = model.forward(ids, HookSpec().intervene(point, intervention)).logits
        close(logits, everything.logits, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS_THAT_FLOW)
def test_a_change_at_every_point_reaches_the_output(model, ids, everything, kind):
    point = HookPoint(kind, None if kind in ("embed", "final_norm") else 0)
    # Not a mere factor, which a post-norm takes out again; but one vector added to every key shifts all
    # scores of a row alike, which the softmax takes out.
    tilt = torch.linspace(0.5, 1.5, everything[point].shape[-1])
    change = {"pattern": Steer([(-1, -1)], 9.0), "rot_k": Scale(1.7)}.get(kind, Add(tilt))
    logits = model.forward(ids, HookSpec().intervene(point, change)).logits
    assert (logits - everything.logits).abs().max() > 1e-4


def test_an_earlier_position_never_feels_a_later_one(model, ids, everything):
    """Interventions at position p change positions >= p only, and layers >= l only."""
    spec = HookSpec().intervene(HookPoint.resid_post(0), Zero(positions=(10,))).capture("*")
    changed = model.forward(ids, spec)
    close(changed.logits[:, :10], everything.logits[:, :10])
    assert torch.equal(changed[HookPoint.resid_mid(0)], everything[HookPoint.resid_mid(0)])


def test_captures_are_after_interventions_unless_asked_before(model, ids, everything):
    point = HookPoint.mlp_out(0)
    spec = HookSpec().intervene(point, Zero()).capture(point).capture(point, when="before")
    cache = model.forward(ids, spec)
    assert (cache[point] == 0).all()
    assert torch.equal(cache.get(point, when="before"), everything[point])


def test_interventions_at_one_point_apply_in_order(model, ids):
    point = HookPoint.resid_post(0)
    one = torch.ones(model.config.hidden_size)
    cache = model.forward(
        ids,
        HookSpec()
        .intervene(point, Zero())
        .intervene(point, Add(one))
        .intervene(point, Scale(3.0))
        .capture(point),
    )
    assert (cache[point] == 3).all()


def test_a_knocked_out_edge_has_no_weight_and_its_row_still_sums_to_one(model, ids):
    row = 4 if (windows(model)[1] or LENGTH) > 2 else None
    if row is None:
        pytest.skip("a window this narrow leaves no second key")
    spec = (
        HookSpec()
        .intervene(HookPoint.scores(1), Knockout([(row, row - 1)], heads=(0,)))
        .capture(HookPoint.pattern(1))
    )
    pattern = model.forward(ids, spec)[HookPoint.pattern(1)]
    assert (pattern[:, 0, row, row - 1] == 0).all()
    close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))


def test_a_knockout_gives_the_output_its_pattern_says(model, ids):
    """The fused kernel under a mask and the pattern computed on the side are one computation."""
    if (windows(model)[1] or LENGTH) <= 2:
        pytest.skip("a window this narrow leaves no second key")
    spec = (
        HookSpec()
        .intervene(HookPoint.scores(1), Knockout([(9, 8), (6, 5)]))
        .capture(HookPoint.pattern(1), HookPoint.v(1), HookPoint.z(1))
    )
    cache = model.forward(ids, spec)
    value = cache[HookPoint.v(1)]
    pattern = cache[HookPoint.pattern(1)]
    close(pattern @ value.repeat_interleave(pattern.shape[1] // value.shape[1], 1), cache[HookPoint.z(1)])


def test_a_row_with_nothing_left_to_see_is_an_error_that_says_so(model, ids):
    with pytest.raises(InterventionError, match="leaves query 3 of head 0 no key"):
        model.forward(ids, HookSpec().intervene(HookPoint.scores(0), Knockout([(3, None)])))


def test_steering_in_the_model_follows_the_formula_and_stays_causal(model, ids, everything):
    if (windows(model)[0] or LENGTH) <= 2:
        pytest.skip("a window this narrow leaves nothing to steer")
    weight = everything[HookPoint.pattern(0)][:, :, 6, 5]
    for change, expected in (
        (Steer([(6, 5)], 4.0), 4 * weight / (1 + 3 * weight)),
        (SetValue([(6, 5)], 0.25), torch.full_like(weight, 0.25)),
    ):
        pattern = model.forward(
            ids, HookSpec().intervene(HookPoint.pattern(0), change).capture(HookPoint.pattern(0))
        )[HookPoint.pattern(0)]
        close(pattern[:, :, 6, 5], expected)
        assert (pattern[:, :, 6, 7:] == 0).all()


def test_nothing_above_the_last_wanted_point_is_computed(model, ids, monkeypatch):
    ran = []
    layer = type(model.network).layer
    monkeypatch.setattr(
        type(model.network),
        "layer",
        lambda self, number, *rest: ran.append(number) or layer(self, number, *rest),
    )
    monkeypatch.setattr(type(model.network), "unembed", lambda *_: pytest.fail("the LM head ran"))
    model.forward(ids, HookSpec().capture(HookPoint.resid_mid(0)), want=None)
    assert ran == [0]


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        (HookSpec().capture("blocks.99.hook_resid_post"), HookPointNotFound, "has layers 0 to"),
        (
            HookSpec().intervene("blocks.0.hook_mlp_out", Add(torch.zeros(7))),
            InterventionError,
            r"found shape \[7\]",
        ),
        (
            HookSpec().intervene("blocks.0.hook_mlp_out", Zero(positions=(LENGTH,))),
            InterventionError,
            "found 23",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(model, ids, hooks, error, message, monkeypatch):
    monkeypatch.setattr(type(model.network), "embed", lambda *_: pytest.fail("the pass started"))
    with pytest.raises(error, match=message):
        model.forward(ids, hooks)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[]], "at least one token"),
        ([[1, VOCAB]], f"token ids in 0..{VOCAB - 1}, found {VOCAB}"),
        ([[-1]], "found -1"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(model, prompts, message):
    with pytest.raises(PromptError, match=message):
        model.forward(prompts)


def test_a_prompt_longer_than_the_context_is_refused(model):
    too_long = model.config.context_length + 1
    with pytest.raises(PromptError, match=f"at most {too_long - 1} positions, found {too_long}"):
        model.forward([1] * too_long)


def test_what_was_not_captured_is_named_with_the_nearest(model, ids):
    cache = model.forward(ids, HookSpec().capture(HookPoint.resid_post(0)))
    with pytest.raises(HookPointNotFound, match=r"nearest is 'blocks.0.hook_resid_post'"):
        cache["blocks.1.hook_resid_post"]
    with pytest.raises(HookPointNotFound, match="found one with want=None"):
        _ = model.forward(ids, want=None).logits


def test_labelled_captures_name_their_axes(model, ids):
    dataset = model.forward(
        ids, HookSpec().capture("blocks.*.hook_resid_post", "blocks.0.attn.hook_pattern")
    ).to_xarray()
    assert dataset["resid_post"].dims == ("layer", "batch", "position", "hidden")
    assert dataset["pattern"].dims == ("layer", "batch", "head", "query_position", "key_position")


def test_public_names_are_the_same_things():
    assert mizarr.HookSpec is HookSpec
    assert mizarr.Model is Model
