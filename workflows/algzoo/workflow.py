"""What questions about networks of AlgZoo share: which network, its task, and samples to score it on.

Border: names and nodes; reads a file of a few kilobytes, computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...stages.algzoo.model import SHIPPED, AlgZooModel, load_model
from ..settings import Count, Natural, setting
from ..workflow import Workflow

if TYPE_CHECKING:
    from ...pipeline.nodes import ResultNode

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

    def plan(self) -> Mapping[str, ResultNode]:
        """What is computed, by name. Raises ConfigError for settings that this network cannot meet."""
        raise NotImplementedError

    @property
    def about(self) -> dict[str, Any]:
        """What every document says of the network."""
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
    def told(self) -> str:
        """The network in a line."""
        network = self.network
        kind = "RNN" if network.is_rnn else "transformer"
        return (
            f"{kind} of {network.parameters} numbers, {network.shape.hidden} wide, {network.sequence} steps; "
            f"{network.task.meaning}"
        )
