"""What questions about networks of AlgZoo share: which network, its task, and samples to score it on.

Border: names and nodes; reads a file of a few kilobytes, computes nothing.
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
    """A question about one network of AlgZoo."""

    model: str = setting(
        SHIPPED[1],
        f"file (.safetensors, .pth), {', '.join(SHIPPED)}, or handcrafted-2nd-argmax-2, -3, -10",
    )
    task: str = setting("", "what it does; none: what its file says")
    sequence: Count | None = setting(None, "numbers it reads; none: what its tensors or its file say")
    heads: Count = setting(1, "of a transformer, which no file tells")
    samples: Count = setting(100_000, "drawn samples its accuracy is counted on")
    seed: Natural = setting(0, "of what is drawn")


class AlgZooWorkflow(Workflow):
    """A question about one network of AlgZoo: `plan` says what is computed."""

    settings: AlgZooSettings

    def __init__(self, settings: AlgZooSettings, model: Any = None) -> None:
        """model: a loaded network to use in place of the one `settings` names."""
        super().__init__(settings)
        self.network: AlgZooModel = model or load_model(
            settings.model, task=settings.task or None, sequence=settings.sequence, heads=settings.heads
        )
        self.nodes = self.plan()

    def plan(self) -> Nodes:
        """What is computed, by name. Raises ConfigError for settings that this network cannot meet."""
        raise NotImplementedError

    def accuracy(
        self, counted: xr.Dataset, samples: str = "{:,} samples", *, with_error: bool = True
    ) -> Values:
        """How often the network is right, or how far it is off, with what it is.

        Arguments:
            counted: of `sampled_accuracy_node`.
            samples: what was counted, with the number left open.
            with_error: whether to say the standard error of an accuracy.
        """
        network, count = self.network, int(counted["samples"].sum())
        on = samples.format(count)
        if network.task.is_scalar:
            error = rmse_of(counted)
            pairs, numbers = [("root mean squared error", f"{error:.5g} on {on}")], {"rmse": error}
        else:
            share, guess = accuracy_of(counted), network.task.chance(network.sequence)
            spread = float(np.sqrt(share * (1 - share) / count))
            numbers = {"accuracy": share} | ({"accuracy_error": spread} if with_error else {})
            between = f" ± {100 * spread:.2g}" if with_error else ""
            pairs = [
                ("accuracy", f"{100 * share:.4f} %{between} on {on}"),
                ("a guess", f"{100 * guess:.1f} %"),
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
        """Fields about the network that every document has."""
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
        """The network in a line."""
        network = self.network
        kind = "RNN" if network.is_rnn else "transformer"
        return (
            f"{kind} of {network.parameters} numbers, {network.shape.hidden} wide, {network.sequence} steps; "
            f"{network.task.meaning}"
        )
