"""Absorption on paper: what is away, what comes back, what cannot be reached."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mizarr.stages.causal.pushes.absorption import Fate, fate, first_reached, label, share_left
from mizarr.stages.forward.architectures.known import from_hf_config

from ...conftest import TINY

BACK, FAR = Fate("absorbed", 3, 0.1), Fate("not absorbed", None, 0.9)


@pytest.mark.parametrize(("cosines", "word", "layer"), [
    ([0.5, 0.6, 0.9, 0.95, 0.97], "absorbed", 2),
    ([0.5, 0.97, 0.6, 0.97, 0.97], "absorbed", 3),  # near at 1, but not to stay
    ([0.9, 0.5, 0.6, 0.97, 0.97], "absorbed", 3),  # farther before it came back
    ([0.5, 0.97, 0.97, 0.97, 0.6], "not absorbed", None),  # back, and gone at the end
    ([0.952, 0.959, 0.958, 0.951, 0.936, 0.910], "not absorbed", None),
    ([0.9, 0.8, 0.7, 0.6], "not absorbed", None),
    ([0.99, 0.99], "not absorbed", None),
    ([0.5, 0.875], "absorbed", 1),
    ([0.5, 0.874], "not absorbed", None),
    ([0.5], "nothing follows", None),
    ([1.0, 1.0, 1.0], "never away", None),
])  # fmt: skip
def test_a_state_is_absorbed_when_it_was_away_and_stays_back(cosines, word, layer):
    found = fate(np.array(cosines), cosines[0], 0)
    assert (found.word, found.layer) == (word, layer)
    if found.is_verdict:
        assert found.left == pytest.approx((1 - cosines[-1]) / (1 - min(cosines)))


def test_layers_before_the_push_is_seen_do_not_count():
    row = np.array([1.0, 1.0, 0.5, 0.9, 0.99])
    assert fate(row, 0.5, 2) == Fate("absorbed", 3, pytest.approx(0.02))
    assert fate(row[:3], 0.5, 2).word == "nothing follows"
    assert fate(row, 0.5, None) == Fate("out of reach", None, pytest.approx(np.nan, nan_ok=True))


def test_what_moved_less_than_a_tenth_of_the_push_was_never_away():
    row = np.array([1.0, 0.96, 0.999])
    assert fate(row, 0.5, 1).word == "never away"
    assert fate(row, 0.61, 1).word == "absorbed"


def config(window=None, layers=4):
    found = from_hf_config(TINY | {"num_hidden_layers": layers})
    mixer = replace(found.layers[0].mixer, window=window)
    object.__setattr__(found, "layers", tuple(replace(each, mixer=mixer) for each in found.layers))
    return found


@pytest.mark.parametrize(("layer", "position", "read", "window", "first"), [
    (0, 5, 5, None, 0), (3, 5, 5, None, 3),  # where it is pushed, at once
    (0, 2, 5, None, 1), (2, 0, 9, None, 3),  # one layer of attention later
    (3, 2, 5, None, None),  # nothing looks back behind the last layer
    (0, 6, 5, None, None), (2, 9, 0, None, None),  # a causal model does not look ahead
    (0, 0, 2, 3, 1), (0, 0, 3, 3, 2), (0, 0, 6, 3, 3), (0, 0, 7, 3, None), (1, 0, 5, 3, None),
])  # fmt: skip
def test_a_push_is_seen_as_far_as_attention_carries_it(layer, position, read, window, first):
    assert first_reached(config(window), layer, position, read) == first


def test_shares_and_labels_leave_out_what_has_no_verdict():
    none = [Fate("out of reach"), Fate("never away"), Fate("nothing follows")]
    assert share_left([BACK, FAR, *none]) == pytest.approx(0.5)
    assert np.isnan(share_left(none))
    assert label(none, is_beyond_chance=True) == "no verdict"
    assert label([BACK, *none], is_beyond_chance=True) == "attractor"
    assert label([BACK, BACK], is_beyond_chance=False) == "absorbed like any push"
    assert label([FAR, *none], is_beyond_chance=True) == "not absorbed"
    assert label([BACK, FAR], is_beyond_chance=True) == "depth-dependent"
