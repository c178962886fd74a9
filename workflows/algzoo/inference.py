"""What does a tiny network predict, and what are its hidden states? Inputs, answers, states and accuracy.

An AlgZoo network (RNN or transformer) reads random samples of its task. The answer shows the first samples
with the correct answers; the accuracy over many more samples, computed in blocks that an interrupted run
resumes, or over all inputs of a transformer if there are few; the confusion matrix; and, for one input, the
pre-activations of an RNN at every step or the attention of every head of a transformer. The protocol is
candle-mi's `stoicheia_inference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...stages.algzoo.accuracy import sampled_accuracy_node
from ...stages.algzoo.analysis.ablation import classes_or_numbers
from ...stages.algzoo.capture import capture_node
from ...stages.algzoo.samples import SURPRISE_STATE, drawn, lcg
from ...stages.forward.hooks.spec import HookSpec
from ...store.errors import ConfigError
from ..settings import Count, Natural, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes, loaded
from .workflow import AlgZooSettings, AlgZooWorkflow

__all__ = ["StoicheiaInference", "StoicheiaInferenceSettings"]

ENUMERATED = 50_000
"""Largest number of possible integer inputs up to which accuracy is computed on all of them."""


@dataclass(frozen=True)
class StoicheiaInferenceSettings(AlgZooSettings):
    """Settings of the workflow `stoicheia_inference`, which runs one AlgZoo network on random inputs. Raises
    ConfigError if `shown` is not below `inputs`."""

    inputs: Count = setting(12, "number of random inputs listed with their answers")
    source: Literal["task", "lcg"] = setting(
        "task",
        "origin of the listed inputs: distribution of the training (task), or candle-mi's random generator "
        "(lcg)",
    )
    end_token: bool = setting(
        False, "whether the largest integer is an end token, at the end of a sequence and nowhere else"
    )
    shown: Natural = setting(0, "index of the input whose states or attention are drawn")
    dtype: Literal["float32", "float64"] = setting("float32", "dtype in which accuracy is computed")

    def __post_init__(self) -> None:
        if self.shown >= self.inputs:
            raise ConfigError(
                f"expected shown in 0..{self.inputs - 1}, found {self.shown}; raise inputs or lower shown"
            )


class StoicheiaInference(AlgZooWorkflow):
    """Workflow that shows answers, accuracy and hidden states of one AlgZoo network."""

    name = "stoicheia_inference"
    question = "What does a tiny network predict, and what are its hidden states?"
    descriptive = "Outputs of the network beside the targets, and its hidden states."
    settings_type = StoicheiaInferenceSettings
    settings: StoicheiaInferenceSettings
    states, counted = loaded("states"), loaded("accuracy")

    def plan(self) -> Nodes:
        """Nodes that compute all activations of the network on the listed inputs, and its accuracy.

        Raises:
            ConfigError: for `end_token` with an RNN, or source "lcg" with a transformer.
        """
        network, settings = self.network, self.settings
        task, sequence = network.task, network.sequence
        if settings.end_token and network.is_rnn:
            raise ConfigError(
                f"expected end_token only for a transformer, found the RNN {network.title}; leave it out"
            )
        if settings.source == "lcg" and not network.is_rnn:
            raise ConfigError(
                "expected source=task for a transformer, whose inputs are integers, found source=lcg, which "
                "draws real numbers; leave source out"
            )
        x = (
            # Seed 0 starts the generator as candle-mi does, so that numbers compare.
            lcg(settings.inputs, sequence, SURPRISE_STATE + settings.seed)
            if settings.source == "lcg"
            else drawn(task, sequence, settings.inputs, seed=settings.seed, end_token=settings.end_token)
        )
        return {
            "states": capture_node(network, x, HookSpec().capture("*")),
            "accuracy": sampled_accuracy_node(
                network.weights_node(),
                task=task.name,
                sequence=sequence,
                samples=settings.samples,
                seed=settings.seed,
                end_token=settings.end_token,
                exhaustive=self.is_exhaustive,
                dtype=settings.dtype,
            ),
        }

    @property
    def is_exhaustive(self) -> bool:
        """Whether accuracy is computed on all possible inputs instead of random samples."""
        network = self.network
        # Each of the `sequence` integers of an input is below `sequence`.
        is_small = network.sequence**network.sequence <= ENUMERATED
        return not network.is_rnn and is_small and not self.settings.end_token

    def views(self) -> Iterator[View]:
        """Accuracy, table of answers, confusion matrix, and states or attention of one input."""
        yield self._accuracy()
        yield self._answers()
        yield from self._drawn()

    def _accuracy(self) -> View:
        """View of the accuracy, with the number of sequences that the network was trained on."""
        counted, metadata = self.counted, self.network.metadata
        samples = "all {:,} inputs" if self.is_exhaustive else "{:,} samples"
        measured = self.accuracy(counted, samples, with_error=False)
        trained = (
            ()
            if metadata.trained is None
            else (("trained on", f"{metadata.trained:,} sequences, seed {metadata.seed}"),)
        )
        confusion = {} if self.network.task.is_scalar else {"confusion": counted["confusion"]}
        about = {**measured.json, "exhaustive": self.is_exhaustive, **confusion}
        return replace(measured, pairs=(*measured.pairs, *trained), json=about)

    def _answers(self) -> View:
        """Table with a row per listed input: the network's outputs, its answer and the correct answer."""
        x, outputs = self.states["x"].values, self.states["logits"].values
        answers, targets = classes_or_numbers(outputs), self.network.task.targets(x)
        is_scalar = self.network.task.is_scalar
        rows = [
            {
                "input": x[i].tolist(),
                "output": outputs[i].tolist(),
                "answer": answers[i].item(),
                "target": targets[i].item(),
            }
            for i in range(len(x))
        ]

        def shown(value: float) -> str:
            return f"{value:.4f}" if is_scalar else str(int(value))

        return Table.of(
            rows,
            ("input", lambda row: _numbers(row["input"])),
            ("output", lambda row: _numbers(row["output"])),
            ("answer", "answer", shown),
            ("correct", "target", shown),
            # A number is hardly ever exactly the correct one, so no answer of a scalar task is marked as
            # wrong.
            strong=lambda row: not is_scalar and row["answer"] != row["target"],
            title="Answers to the first inputs",
            caption="One row per input of the network: its outputs, the answer read from them, and the "
            f"correct answer of the task.{'' if is_scalar else ' Bold: wrong answers.'}",
            sources=("states",),
            json={"results": rows},
        )

    def _drawn(self) -> Iterator[View]:
        """Figure of the confusion matrix, and of the states or attention of the input `shown`."""
        network, states, shown = self.network, self.states, self.settings.shown
        panels: list[View] = []
        if not network.task.is_scalar:
            confusion = self.counted["confusion"]
            # A class that is the correct answer to no input has a sum of 0.
            shares = confusion / np.maximum(confusion.sum("output"), 1)
            labels = [str(i) for i in range(network.shape.outputs)]
            panels.append(
                Heatmap.of(
                    shares.assign_coords(target=labels, output=labels),
                    "Confusion matrix",
                    "Each cell: share of the inputs with one correct answer (row) to which the network gives "
                    "one answer (column).",
                    row_name="correct",
                    column_name="answer",
                    value_name="share",
                    unit="",
                    low=0.0,
                    high=1.0,
                    numbers=".2f",
                    sources=("accuracy",),
                )
            )
        x = states["x"].values[shown]
        if network.is_rnn:
            pre_activation = states["rnn_pre_activation"].isel(sample=shown).transpose("neuron", "time")
            steps = [f"{step}: {value:+.2f}" for step, value in enumerate(x)]
            neurons = [str(j) for j in range(pre_activation.sizes["neuron"])]
            panels.append(
                Heatmap.of(
                    pre_activation.assign_coords(time=steps, neuron=neurons),
                    f"Pre-activations of the ReLUs, input {shown}",
                    "Each cell: input of one neuron's ReLU (row) after one number (column). Below 0 the ReLU "
                    "is closed, and the neuron's state is 0.",
                    row_name="neuron",
                    column_name="time step: number read",
                    value_name="pre-activation",
                    diverging=True,
                    numbers=".1f",
                    sources=("states",),
                )
            )
        else:
            tokens = [f"{position}: {value}" for position, value in enumerate(x)]
            for layer in range(states.sizes["layer"]):
                for head in range(states.sizes["head"]):
                    pattern = states["pattern"].isel(sample=shown, head=head, layer=layer)
                    panels.append(
                        Heatmap.of(
                            pattern.assign_coords(query_position=tokens, key_position=tokens),
                            f"Attention of layer {layer}, head {head}, input {shown}",
                            "Each cell: attention weight of one query position (row) on one key position "
                            "(column).",
                            row_name="query position",
                            column_name="key position",
                            value_name="weight",
                            low=0.0,
                            high=1.0,
                            numbers=".2f",
                            sources=("states",),
                        )
                    )
        yield from together("stoicheia_inference", f"Predictions and states of {network.title}", *panels)
        yield Data(json={"shown": shown})


def _numbers(values: list[Any]) -> str:
    """The first eight numbers as text, separated by spaces; "…" for the others."""
    shown = [str(value) if isinstance(value, int) else f"{value:+.3g}" for value in values[:8]]
    return " ".join(shown) + (" …" if len(values) > 8 else "")
