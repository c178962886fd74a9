"""Interventions on hand-made tensors, with answers one can do on paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mizarr.stages.forward.architectures.points import HookPoint
from mizarr.stages.forward.hooks.edge_interventions import Knockout, SetValue, Steer
from mizarr.stages.forward.hooks.interventions import Add, AddAtPositions, Replace, Scale, Zero
from mizarr.store.errors import InterventionError

RESID = HookPoint.resid_post(0)
HEADS = HookPoint.z(0)
PATTERN = HookPoint.pattern(0)
SCORES = HookPoint.scores(0)
SIZES = {
    "batch": 2,
    "position": 4,
    "hidden": 3,
    "head": 2,
    "d_head": 5,
    "query_position": 4,
    "key_position": 4,
}
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


def uniform_pattern() -> torch.Tensor:
    """[batch 1, head 2, query 4, key 4]: every query attends equally to what it may see."""
    return (CAUSAL / CAUSAL.sum(-1, keepdim=True)).expand(1, 2, 4, 4).clone()


def test_a_hidden_vector_is_added_at_every_position():
    x = torch.zeros(2, 4, 3)
    assert torch.equal(Add([1.0, 2.0, 3.0]).apply(x, RESID), torch.tensor([1.0, 2.0, 3.0]).expand(2, 4, 3))


def test_positions_narrow_an_addition_and_count_from_the_end():
    x = torch.zeros(1, 4, 3)
    changed = Add([1.0, 1.0, 1.0], positions=-1).apply(x, RESID)
    assert changed.sum() == 3
    assert torch.equal(changed[0, 3], torch.ones(3))
    assert torch.equal(x, torch.zeros(1, 4, 3)), "the activation handed in is never written to"


def test_heads_and_positions_select_their_crossing():
    x = torch.ones(1, 2, 4, 5)
    changed = Zero(heads=(1,), positions=(0, 2)).apply(x, HEADS)
    expected = torch.ones(1, 2, 4, 5)
    expected[:, 1, 0] = expected[:, 1, 2] = 0
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("positions", [None, (1, 3)])
def test_neurons_are_chosen_beside_positions(positions):
    point = HookPoint.mlp_post_act(0)
    x = torch.arange(2 * 4 * 6.0).reshape(2, 4, 6) + 1
    changed = Scale(-1.0, neurons=(0, -1), positions=positions).apply(x, point)
    expected = x.clone()
    for position in range(4) if positions is None else positions:
        expected[:, position, [0, 5]] *= -1
    assert torch.equal(changed, expected)
    sizes = SIZES | {"mlp": 6}
    Replace(np.zeros((2, 2)), neurons=(0, 5), positions=(1, 3)).check(point, sizes)
    with pytest.raises(InterventionError, match=r"expected neurons in 0\.\.5"):
        Zero(neurons=(6,)).check(point, sizes)
    with pytest.raises(InterventionError, match="with neurons to select"):
        Zero(neurons=(0,)).check(RESID, sizes)


def test_an_intervention_that_names_no_neurons_keeps_its_key():
    assert "neurons" not in Zero(positions=(0,)).canonical()
    assert Zero(neurons=(1,)) != Zero()


def test_replace_of_one_cell_takes_the_region_of_the_value():
    x = torch.zeros(1, 2, 4, 5)
    value = torch.arange(10.0).reshape(1, 2, 1, 5)
    changed = Replace(value, positions=(2,)).apply(x, HEADS)
    assert torch.equal(changed[:, :, 2], value[:, :, 0])
    assert changed.count_nonzero() == 9


def test_vectors_at_one_position_add_up():
    changed = AddAtPositions(
        [(1, [1.0, 0.0, 0.0]), (1, [0.0, 2.0, 0.0]), (-1, [0.0, 0.0, 4.0])], scale=0.5
    ).apply(torch.zeros(2, 4, 3), RESID)
    expected = torch.zeros(2, 4, 3)
    expected[:, 1] = torch.tensor([0.5, 1.0, 0.0])
    expected[:, 3, 2] = 2.0
    assert torch.equal(changed, expected)


def test_a_float32_vector_enters_a_bfloat16_pass():
    changed = AddAtPositions([(0, torch.ones(3))], scale=3.0).apply(
        torch.zeros(1, 4, 3, dtype=torch.bfloat16), RESID
    )
    assert changed.dtype == torch.bfloat16
    assert torch.equal(changed[0, 0].float(), torch.full((3,), 3.0))


def test_steering_one_edge_follows_the_formula():
    """A uniform row of four at factor 2 becomes 0.2, 0.4, 0.2, 0.2."""
    steered = Steer([(3, 1)], 2.0).apply(uniform_pattern(), PATTERN, CAUSAL)
    torch.testing.assert_close(steered[0, :, 3], torch.tensor([0.2, 0.4, 0.2, 0.2]).expand(2, 4))
    assert torch.equal(steered[0, :, :3], uniform_pattern()[0, :, :3]), "untouched rows keep every bit"


def test_an_edge_named_twice_counts_once():
    once, twice = (
        Steer(edges, 3.0).apply(uniform_pattern(), PATTERN, CAUSAL) for edges in ([(3, 1)], [(3, 1), (3, 1)])
    )
    assert torch.equal(once, twice)


def test_steering_some_heads_leaves_the_others():
    steered = Steer([(3, 0)], 5.0, heads=(1,)).apply(uniform_pattern(), PATTERN, CAUSAL)
    assert torch.equal(steered[:, 0], uniform_pattern()[:, 0])
    torch.testing.assert_close(steered[0, 1, 3, 0], torch.tensor(5 / 8))


@pytest.mark.parametrize("value", [0.0, 0.1, 0.9])
def test_set_value_is_exact_and_leaks_nothing_to_the_future(value):
    steered = SetValue([(2, 1)], value).apply(uniform_pattern(), PATTERN, CAUSAL)
    rest = (1 - value) / 2
    torch.testing.assert_close(steered[0, 0, 2], torch.tensor([rest, value, rest, 0.0]))


def test_set_value_shares_the_rest_in_proportion():
    pattern = torch.tensor([[0.6, 0.2, 0.2, 0.0]]).expand(1, 1, 4, 4)
    steered = SetValue([(3, 2)], 0.6).apply(pattern, PATTERN, torch.ones(4, 4, dtype=torch.bool))
    torch.testing.assert_close(steered[0, 0, 3], torch.tensor([0.3, 0.1, 0.6, 0.0]))


def test_set_value_of_more_than_a_row_holds_is_refused():
    with pytest.raises(InterventionError, match="expected attention weights that sum to at most 1"):
        SetValue([(3, 0), (3, 1)], 0.7).apply(uniform_pattern(), PATTERN, CAUSAL)


def test_a_knockout_mask_may_be_bool_or_additive():
    cut = np.zeros((4, 4), bool)
    cut[3, 0] = True
    additive = np.where(cut, -np.inf, 0.0)
    by_edge = Knockout([(3, 0)]).cut(2, 4, 4, "cpu")
    assert torch.equal(Knockout(mask=cut).cut(2, 4, 4, "cpu"), by_edge)
    assert torch.equal(Knockout(mask=additive).cut(2, 4, 4, "cpu"), by_edge)
    assert torch.equal(Knockout(mask=torch.from_numpy(cut)).cut(2, 4, 4, "cpu"), by_edge)


def test_an_open_edge_means_every_position():
    assert Knockout([(None, 2)]).cut(1, 4, 4, "cpu")[0, :, 2].all()
    assert Knockout([(1, None)]).cut(1, 4, 4, "cpu")[0, 1].all()


@pytest.mark.parametrize(
    ("intervention", "point", "message"),
    [
        (
            Replace(np.zeros((2, 5, 3), np.float32)),
            RESID,
            r"broadcasts to \[batch=2, position=4, hidden=3\], found shape \[2, 5, 3\]",
        ),
        (Add(np.zeros(4, np.float32)), RESID, r"found shape \[4\]"),
        (Replace(np.zeros((3, 2, 4, 3), np.float32)), RESID, "broadcasts to"),
        (Zero(positions=(4,)), RESID, r"expected positions in 0..3 .*found 4"),
        (Zero(heads=(2,)), HEADS, r"expected heads in 0..1 .*found 2"),
        (Zero(heads=(0,)), RESID, "with heads to select"),
        (AddAtPositions([(4, [0.0, 0.0, 0.0])]), RESID, "found 4"),
        (AddAtPositions([(0, [0.0, 0.0])]), RESID, "vector of length 3"),
        (AddAtPositions([(0, [0.0, 0.0, 0.0])]), HEADS, "expected a hook point with axes"),
        (Knockout([(3, 0)]), RESID, "expected the hook point 'blocks.0.attn.hook_scores'"),
        (Knockout([(0, 3)]), SCORES, "expected a query at or after its key"),
        (Knockout([(9, 3)]), SCORES, "found 9"),
        (Knockout(mask=np.zeros((3, 3), bool)), SCORES, "expected a mask of shape"),
        (Steer([(3, 1)], 2.0), SCORES, "expected the hook point 'blocks.0.attn.hook_pattern'"),
        (SetValue([(3, 1)], 0.5, heads=(7,)), PATTERN, "found 7"),
    ],
)
def test_what_cannot_be_applied_is_refused_before_the_pass(intervention, point, message):
    def check() -> None:
        intervention.check(point, SIZES)
        intervention.require_causal(point, SIZES["query_position"])

    with pytest.raises(InterventionError, match=message):
        check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scale(float("nan")),
        lambda: Steer([(1, 0)], -1.0),
        lambda: SetValue([(1, 0)], 1.5),
        lambda: SetValue([], 0.5),
        Knockout,
        lambda: Knockout([(None, None)]),
        lambda: Knockout([(1, 0)], mask=np.zeros((4, 4), bool)),
        lambda: Knockout(mask=np.full((4, 4), 0.5)),
        lambda: Zero(positions=()),
        lambda: AddAtPositions([]),
        lambda: AddAtPositions([-1], [0.0, 0.0, 0.0]),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(make):
    with pytest.raises(InterventionError):
        make()
