"""Base of workflows about one AlgZoo network: settings of the network, its task and the samples it is scored
on.

Border: names and nodes; reads the network's file of a few kilobytes, computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.algzoo.accuracy import accuracy_of, rmse_of
from ...stages.algzoo.model import SHIPPED, AlgZooModel, load_model
from ..settings import Count, Natural, setting
from ..views import Values
from ..workflow import Nodes, Workflow

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["AlgZooSettings", "AlgZooWorkflow"]


@dataclass(frozen=True)
class AlgZooSettings:
    """Settings that all workflows about one AlgZoo network share: the network, its task, and the samples it
    is scored on."""

    model: str = setting(
        SHIPPED[1],
        f"file (.safetensors, .pth), {', '.join(SHIPPED)}, or handcrafted-2nd-argmax-2, -3, -10",
    )
    task: str = setting("", "task of the network; none: as its file states")
    sequence: Count | None = setting(
        None, "length of the sequences it reads; none: as its tensors or its file state"
    )
    heads: Count = setting(1, "number of heads of a transformer, which files do not state")
    samples: Count = setting(100_000, "number of random samples on which accuracy is measured")
    seed: Natural = setting(0, "seed of all random samples")


class AlgZooWorkflow(Workflow):
    """Base class of workflows about one AlgZoo network; subclasses define the computed nodes in `plan`."""

    settings: AlgZooSettings

    def __init__(self, settings: AlgZooSettings, model: Any = None) -> None:
        """Loads the network and plans the nodes.

        model: a loaded `AlgZooModel` in place of the one that `settings` names; None for that one.
        """
        super().__init__(settings)
        self.network: AlgZooModel = model or load_model(
            settings.model, task=settings.task or None, sequence=settings.sequence, heads=settings.heads
        )
        self.nodes = self.plan()

    def plan(self) -> Nodes:
        """Nodes to compute, by name of their result. Raises ConfigError for settings that do not apply to the
        network."""
        raise NotImplementedError

    def accuracy(
        self, counted: xr.Dataset, samples: str = "{:,} samples", *, with_error: bool = True
    ) -> Values:
        """View of the accuracy of the network, or of its root mean squared error for a scalar task.

        Arguments:
            counted: result of `sampled_accuracy_node`.
            samples: format of the number of samples.
            with_error: whether to show the standard error of an accuracy.
        """
        network, count = self.network, int(counted["samples"].sum())
        on = samples.format(count)
        if network.task.is_scalar:
            error = rmse_of(counted)
            pairs, numbers = [("root mean squared error", f"{error:.5g} on {on}")], {"rmse": error}
        else:
            accuracy, chance = accuracy_of(counted), network.task.chance(network.sequence)
            # Standard error of a proportion: samples are independent.
            standard_error = float(np.sqrt(accuracy * (1 - accuracy) / count))
            numbers = {"accuracy": accuracy} | ({"accuracy_error": standard_error} if with_error else {})
            error_text = f" ± {100 * standard_error:.2g}" if with_error else ""
            pairs = [
                ("accuracy", f"{100 * accuracy:.4f} %{error_text} on {on}"),
                ("guessing", f"{100 * chance:.1f} %"),
            ]
        return Values(
            pairs=tuple(pairs),
            title=f"{network.title}: {network.task.name}",
            caption=self.summary,
            sources=("accuracy",),
            json={**self.about, **numbers, "samples": count},
        )

    @property
    def about(self) -> dict[str, Any]:
        """Fields of every JSON document that describe the network."""
        network = self.network
        return {
            "model_id": network.title,
            "network": network.shape.kind,
            "task": network.task.name,
            "hidden_size": network.shape.hidden,
            "sequence": network.sequence,
            "output_size": network.shape.outputs,
            "param_count": network.parameters,
            "trained_sequences": network.metadata.trained,
            "training_seed": network.metadata.seed,
        }

    @property
    def summary(self) -> str:
        """One line about the network: kind, number of parameters, width, sequence length and task."""
        network = self.network
        kind = "RNN" if network.is_rnn else "transformer"
        return (
            f"{kind} with {network.parameters} parameters and {network.shape.hidden} neurons, which reads "
            f"{network.sequence} numbers. Task: {network.task.meaning}."
        )
