"""What is measured of a run, on logits with answers one can do on paper."""

from __future__ import annotations

import numpy as np
import pytest

from mizarr.stages.causal.effects import EFFECTS, edge_weight, effect, gather, layers_of, with_target
from mizarr.stages.forward.hooks.wants import Logits
from mizarr.store.errors import InterventionError


def test_a_target_is_run_up_to_its_last_piece_and_read_where_each_piece_is_predicted():
    assert with_target((1, 2), ()) == ((1, 2), Logits(positions=(1,)))
    assert with_target((1, 2), (5,)) == ((1, 2), Logits(positions=(1,)))
    assert with_target((1, 2), (5, 6, 7)) == ((1, 2, 5, 6), Logits(positions=(1, 2, 3)))


def test_halving_a_token_is_measured_in_nats_logits_and_probabilities():
    before = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    after = np.log([[0.25, 0.5, 0.25], [0.1, 0.4, 0.5]])
    found = effect(before, after, target=(0, 1), top_k=2)
    assert found["kl"] == pytest.approx(0.5 * np.log(2) - 0.25 * np.log(2))
    assert found["logit_diff"] == pytest.approx(np.log(2)), "lowered, so positive"
    assert found["first_probability"] == pytest.approx(0.25)
    assert found["target_logprob"] == pytest.approx(np.log(0.25 * 0.4)), "all pieces, not the last"
    assert found["changed_id"] == [0, 1]
    assert found["changed_baseline"] == pytest.approx([0.5, 0.25])
    assert found["changed_other"] == pytest.approx([0.25, 0.5])


def test_without_a_target_there_is_nothing_to_say_of_it():
    found = effect(np.zeros((1, 3)), np.zeros((1, 3)), target=(), top_k=1)
    assert np.isnan([found["logit_diff"], found["first_probability"], found["target_logprob"]]).all()


def test_measurements_are_laid_out_along_the_axes_of_the_runs():
    measured = [effect(np.zeros((1, 3)), np.eye(3)[[i % 3]] * i, (), 2) for i in range(6)]
    found = gather(measured, {"layer": 2, "dose": 3})
    assert found.keys() == EFFECTS.keys()
    dims, values, attrs = found["kl"]
    assert dims == ("layer", "dose") and values.shape == (2, 3) and attrs["units"] == "nats"
    assert values[1, 2] == measured[5]["kl"]
    assert found["changed_id"][0] == ("layer", "dose", "rank")
    assert found["changed_id"][1].shape == (2, 3, 2)


def test_the_weight_of_edges_is_a_mean_in_each_head():
    pattern = np.arange(18.0).reshape(2, 3, 3)
    assert edge_weight(pattern, None, [(2, 0), (1, 1)]).tolist() == [5.0, 14.0]
    assert edge_weight(pattern, [1], [(2, 0)]).tolist() == [15.0]


def test_layers_are_all_by_default_and_leave_room_for_a_window():
    assert layers_of(None, 4) == [0, 1, 2, 3]
    assert layers_of(None, 4, window=3) == [0, 1]
    assert layers_of((2, 0), 4) == [2, 0]
    for layers, window in (((-1,), 1), ((2,), 3), (None, 5), (None, 0)):
        with pytest.raises(InterventionError, match="expected"):
            layers_of(layers, 4, window)
