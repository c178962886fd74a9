"""What does a tiny network predict, and what are its hidden states? Inputs, answers, states, and how often it
is right.

A network of AlgZoo (RNN or transformer) reads drawn samples of its task. Told are the first of them with
their right answers, how often it is right over many more (counted block by block, resumable; a transformer's
inputs all of them where they are few), what is mistaken for what, and, for one input, the states behind every
time step or the attention of every layer: candle-mi's `stoicheia_inference`.
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
"""Largest number of integer inputs that are all counted instead of sampled."""


@dataclass(frozen=True)
class StoicheiaInferenceSettings(AlgZooSettings):
    """What `--set` can change. Raises ConfigError where the input shown is not among those drawn."""

    inputs: Count = setting(12, "drawn inputs that are shown with their answers")
    source: Literal["task", "lcg"] = setting(
        "task", "where the inputs shown come from: what the task is trained on, or candle-mi's generator"
    )
    end_token: bool = setting(False, "of integers: the last one ends the sequence, and no other one does")
    shown: Natural = setting(0, "the input whose states or attention are drawn")
    dtype: Literal["float32", "float64"] = setting("float32", "what accuracy is counted in")

    def __post_init__(self) -> None:
        if self.shown >= self.inputs:
            raise ConfigError(f"expected shown in 0..{self.inputs - 1}, found {self.shown}; draw more inputs")


class StoicheiaInference(AlgZooWorkflow):
    """Answers and states of one network."""

    name = "stoicheia_inference"
    question = "What does a tiny network predict, and what are its hidden states?"
    descriptive = "Outputs of the network beside the targets, and its hidden states."
    settings_type = StoicheiaInferenceSettings
    settings: StoicheiaInferenceSettings
    held, counted = loaded("states"), loaded("accuracy")

    def plan(self) -> Nodes:
        """A pass over the inputs shown, with everything captured, and the count."""
        network, settings = self.network, self.settings
        task, sequence = network.task, network.sequence
        if settings.end_token and network.is_rnn:
            raise ConfigError(f"expected a transformer for end_token, found the RNN {network.title}")
        if settings.source == "lcg" and not network.is_rnn:
            raise ConfigError(
                "expected source=task for a transformer, whose inputs are integers, found 'lcg'"
            )
        x = (
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
        """Whether every input there is was counted."""
        network = self.network
        is_small = network.sequence**network.sequence <= ENUMERATED
        return not network.is_rnn and is_small and not self.settings.end_token

    def views(self) -> Iterator[View]:
        """Accuracy, answers, mistakes, states."""
        yield self._accuracy()
        yield self._answers()
        yield from self._drawn()

    def _accuracy(self) -> View:
        counted, metadata = self.counted, self.network.metadata
        of = "all {:,} inputs" if self.is_exhaustive else "{:,} samples"
        found = self.accuracy(counted, of, with_error=False)
        trained = (
            ()
            if metadata.trained is None
            else (("trained on", f"{metadata.trained:,} sequences, seed {metadata.seed}"),)
        )
        confusion = {} if self.network.task.is_scalar else {"confusion": counted["confusion"]}
        about = {**found.json, "exhaustive": self.is_exhaustive, **confusion}
        return replace(found, pairs=(*found.pairs, *trained), json=about)

    def _answers(self) -> View:
        x, said = self.held["x"].values, self.held["logits"].values
        answers, targets = classes_or_numbers(said), self.network.task.targets(x)
        is_scalar = self.network.task.is_scalar
        rows = [
            {
                "input": x[i].tolist(),
                "output": said[i].tolist(),
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
            ("says", "answer", shown),
            ("right", "target", shown),
            strong=lambda row: not is_scalar and row["answer"] != row["target"],
            title="Answers to the first inputs",
            caption="" if is_scalar else "wrong ones are bold",
            sources=("states",),
            json={"results": rows},
        )

    def _drawn(self) -> Iterator[View]:
        network, held, place = self.network, self.held, self.settings.shown
        panels: list[View] = []
        if not network.task.is_scalar:
            confusion = self.counted["confusion"]
            shares = confusion / np.maximum(confusion.sum("output"), 1)
            labels = [str(i) for i in range(network.shape.outputs)]
            panels.append(
                Heatmap.of(
                    shares.assign_coords(target=labels, output=labels),
                    "What is taken for what",
                    "share of the inputs of each right answer",
                    row_name="right",
                    column_name="says",
                    value_name="share",
                    unit="",
                    low=0.0,
                    high=1.0,
                    numbers=".2f",
                    sources=("accuracy",),
                )
            )
        x = held["x"].values[place]
        if network.is_rnn:
            states = held["rnn_pre_activation"].isel(sample=place).transpose("neuron", "time")
            steps = [f"{step}: {value:+.2f}" for step, value in enumerate(x)]
            neurons = [str(j) for j in range(states.sizes["neuron"])]
            panels.append(
                Heatmap.of(
                    states.assign_coords(time=steps, neuron=neurons),
                    f"What enters each ReLU, input {place}",
                    "below 0 it is closed",
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
            for layer in range(held.sizes["layer"]):
                for head in range(held.sizes["head"]):
                    pattern = held["pattern"].isel(sample=place, head=head, layer=layer)
                    panels.append(
                        Heatmap.of(
                            pattern.assign_coords(query_position=tokens, key_position=tokens),
                            f"Attention of layer {layer}, head {head}, input {place}",
                            "rows read, columns are read",
                            row_name="position",
                            column_name="position that is read",
                            value_name="weight",
                            low=0.0,
                            high=1.0,
                            numbers=".2f",
                            sources=("states",),
                        )
                    )
        yield from together("stoicheia_inference", f"{network.title} at its task", *panels)
        yield Data(json={"shown": place})


def _numbers(values: list[Any]) -> str:
    shown = [str(value) if isinstance(value, int) else f"{value:+.3g}" for value in values[:8]]
    return " ".join(shown) + (" …" if len(values) > 8 else "")
