"""What an experiment declares is what it gives, or nothing is joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import xarray as xr

import mizarr
from mizarr.pipeline import Output, run
from mizarr.stages.causal.grids.patching import ActivationPatching
from mizarr.stages.causal.grids.patching_grid import HEAD_KINDS
from mizarr.stages.causal.grids.patching_metrics import KL, LogitDifference, Recovery
from mizarr.stages.forward.runs.experiment import CellLabels, Experiment
from mizarr.store.errors import StageError

from .random_models import save_random_model


@dataclass(frozen=True)
class Lengths(Experiment):
    """The length of a prompt, in a unit and under a name that may be other than declared."""

    name: ClassVar[str] = "lengths"
    version: ClassVar[int] = 1
    outputs: ClassVar[Mapping[str, Output]] = {"length": Output(("layer",), "tokens", "length of the prompt")}

    tokens: tuple[int, ...]
    given: str = "length"
    dim: str = "layer"
    unit: str = "tokens"

    def cells(self, config: Any) -> Sequence[CellLabels]:
        return [{"layer": 0}]

    def runs(self, prepared: Any, cell: CellLabels) -> list[Any]:
        return []

    def measure(self, prepared: Any, cell: CellLabels, result: Any) -> None:
        raise AssertionError("there are no runs")

    def dataset(self, prepared: Any, cell: CellLabels, measured: Sequence[Any]) -> xr.Dataset:
        return xr.Dataset({self.given: (self.dim, [len(self.tokens)], {"units": self.unit})})

    def joined(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        return parts[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    axes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_random_model(folder, "llama", 3, hidden_size=32, head_dim=8, **axes)
    return str(folder)


def computed(experiment: Experiment, model: str, where: Any) -> xr.Dataset:
    store, node = mizarr.open_store(where), experiment.on(model)
    run(node, store)
    return node.open(store).load()


def test_what_is_declared_is_stored(model, tmp_path):
    assert computed(Lengths((1, 2, 3)), model, tmp_path)["length"].item() == 3


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"given": "lenght"}, "declared output 'length' [layer] tokens is missing; the dataset has lenght"),
        ({"dim": "head"}, "output 'length': expected [layer] tokens, found [head] tokens"),
        ({"unit": "1"}, "output 'length': expected [layer] tokens, found [layer] 1"),
    ],
)
def test_what_is_not_declared_is_told_and_not_stored(wrong, complaint, model, tmp_path):
    experiment = Lengths((1, 2, 3), **wrong)
    with pytest.raises(StageError) as told:
        computed(experiment, model, tmp_path)
    assert str(told.value).startswith("experiment 'lengths'") and complaint in str(told.value)
    store = mizarr.open_store(tmp_path)
    assert store.lookup(experiment.on(model).key(store)) is None


@pytest.mark.parametrize("over", ["layer", "position", "head", "head_position", "edge"])
@pytest.mark.parametrize(
    "kinds", [("resid_post",), ("resid_post", "mlp_out"), HEAD_KINDS, ("pattern",), ("k",)]
)
def test_the_dims_a_grid_has_for_its_parameters_are_among_those_it_declares(kinds, over, model):
    grid = ActivationPatching(
        clean=(1, 2, 3),
        corrupted=(1, 4, 3),
        kinds=kinds,
        over=over,
        metrics=(Recovery(KL()), LogitDifference(3, 4)),
    )
    config = grid.on(model).source.config
    declared = ActivationPatching.outputs["<metric>"]
    found = grid.outputs_on(config)
    assert list(found) == ["recovery", "logit_difference", "unpatched"]
    assert found["logit_difference"].unit == "logits"
    assert declared.fits(found["recovery"].dims)
