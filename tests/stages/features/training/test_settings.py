"""Settings that do not go together are refused in one line."""

from __future__ import annotations

import pytest

from mizarr.stages.features.training.settings import TrainingSettings
from mizarr.stages.features.training.trainer import active_count, pressure, schedule
from mizarr.store.errors import ConfigError, DictionaryError


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"kind": "clts"}, "did you mean 'clt'"),
        ({"activation": "jumpelu"}, "did you mean 'jumprelu'"),
        ({"activation": "relu", "penalty": "step"}, "penalty of the activation relu to be one of l1, tanh"),
        ({"activation": "topk", "penalty": "l1"}, "topk is trained without a sparsity penalty"),
        ({"features": 8, "k": 9}, "k, the number of active features, to be at most features=8, found k=9"),
        ({"features": 0}, "features to be at least 1, found 0"),
        ({"lr": -1.0}, "lr to be above 0"),
        ({"decay": 1.0}, "decay to be a share"),
        ({"kind": "sae", "write": "hook_mlp_out"}, "reads and writes the same hook point"),
        ({"kind": "clt"}, "writes to another hook point than it reads"),
        ({"kind": "clt", "write": "hook_mlp_out", "activation": "topk"}, "cannot hold the activation topk"),
        ({"skip": True}, "only a dictionary of kind 'plt' can have a skip"),
        ({"read": "hook_embed"}, "a hook point that every layer has"),
        ({"prefixes": (4096,)}, "below features=4096"),
        ({"window": 100, "block": 200}, "window to be at least block=200"),
        ({"start": "zeros"}, "tied, samples"),
    ],
)
def test_what_does_not_go_together_is_refused(said, told):
    with pytest.raises(ConfigError) as caught:
        TrainingSettings(**said)
    assert told in str(caught.value)


def test_an_unknown_hook_point_names_the_nearest():
    with pytest.raises(DictionaryError, match="resid_post"):
        TrainingSettings(read="hook_resid_pst")


def test_names_are_those_of_hook_kinds():
    found = TrainingSettings(kind="plt", read="mlp.hook_in", write="hook_mlp_out")
    assert (found.read, found.writes) == ("mlp_pre", "mlp_out")


def test_schedules_rise_hold_and_fall():
    it = TrainingSettings(steps=100, warmup=0.1, decay=0.2, annealing=0.5, features=64, k=4)
    assert [schedule(step, it) for step in (0, 4, 9, 50, 80, 90, 99)] == pytest.approx(
        [0.1, 0.5, 1, 1, 1, 0.5, 0.05]
    )
    assert [active_count(step, it, d_in=4) for step in (0, 25, 50, 99)] == [40, 22, 4, 4]
    assert [pressure(step, it) for step in (0, 25, 80)] == [0.0, 0.5, 1.0]
