"""Does a direction steer what a model writes? Contrast pairs, a direction, and random ones of the same norm.

A contrast pair is a prompt with a positive and a negative continuation, such as the same sentence in French
and in English (material/samples/contrasts.py, or a file of the user). One half of the pairs makes a direction
after each candidate layer and chooses layer and strength; the other half is scored
(stages/causal/pushes/steered_texts.py).

The claim: steering raises the log-probability per token of held-out positive continuations, compared with
random directions of the same norm in the same layer. Nothing is claimed unless the model predicts the
held-out negative continuations better in their order than with their tokens shuffled (sign test): a direction
may raise the probability of single tokens even in a network with random weights and tied embeddings. Whether
the model can predict the positive continuations is not tested.

Defaults are smaller for large models (material/sizes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...stages.causal.controls import CHANCE, by_sign
from ...stages.causal.pushes.steered_texts import ContrastPair, SteeredTexts
from ...stages.forward.text.prompts import check_prompts
from ...stages.logits.lens import format_text
from ...store.errors import ConfigError
from ...store.exchange.outside import json_file
from ..claim import Claim
from ..labelled import records
from ..material.answers import encoded, require_next
from ..material.samples.contrasts import PRESETS, ContrastPreset, ContrastTexts
from ..material.sizes import affordable, intervention_operations, spread_layers
from ..settings import ControlSettings, Count, ModelSettings, Natural, preset_of, setting
from ..views import Data, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

__all__ = ["Steering", "SteeringSettings"]

FIELDS = ("prompt", "positive", "negative")
"""Fields of a record of a file of contrast pairs."""
CANDIDATES = 6
"""Largest number of candidate layers by default, evenly spaced."""
FEWEST_PAIRS = 5
"""Smallest number of pairs to choose on, and to score: of fewer, no sign test is below 5 %."""


@dataclass(frozen=True)
class SteeringSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `steering`: contrast pairs, candidate layers and strengths, and the method.

    Raises:
        ConfigError: for an unknown preset, a preset together with a file, and fewer pairs than a claim needs.
    """

    preset: str = setting("", f"shipped contrast pairs: {', '.join(PRESETS)}; none: french")
    data: str = setting(
        "", "JSON file of contrast pairs, a list of records with prompt, positive and negative continuation"
    )
    method: Literal["mean", "pca", "logistic", "lda"] = setting(
        "mean",
        "how the direction is made: difference of means, first principal component of the differences of "
        "pairs, logistic regression, or linear discriminant analysis",
    )
    layers: tuple[int, ...] = setting(
        (), f"candidate layers after which the direction is added; none: {CANDIDATES}, evenly spaced"
    )
    strengths: tuple[float, ...] = setting(
        (0.25, 0.5, 1.0),
        "candidate strengths; at 1 the added vector is as long as the difference of the two mean states",
    )
    pairs: Natural = setting(
        0,
        "pairs to choose layer and strength on, and as many held-out ones to score; 0: half of them, or "
        f"fewer for a large model; at least {FEWEST_PAIRS} for a claim",
    )
    max_tokens: Count = setting(16, "number of tokens of the generated texts")

    def __post_init__(self) -> None:
        if self.preset and self.data:
            raise ConfigError(
                f"expected a preset or data, found preset={self.preset!r} and data={self.data!r}; leave "
                "one out"
            )
        preset_of(self.preset or "french", PRESETS)
        if self.controls and 0 < self.pairs < FEWEST_PAIRS:
            raise ConfigError(
                f"expected pairs of at least {FEWEST_PAIRS}, as no sign test of fewer is below 5 %, found "
                f"{self.pairs}; ask for {FEWEST_PAIRS} or more, or for no claim: controls=0"
            )


class Steering(ModelWorkflow):
    """Workflow that steers held-out texts along a direction made of contrast pairs, and along random ones."""

    name = "steering"
    question = "Does a direction steer what the model writes?"
    settings_type = SteeringSettings
    settings: SteeringSettings

    steered = loaded("steered")
    """Result of `SteeredTexts`, in memory."""

    def plan(self) -> Nodes:
        """Node that chooses layer and strength on one half of the pairs, and scores the other half.

        Raises:
            ConfigError: for a model that does not predict the next token, a file without valid pairs, and too
                few pairs.
            PromptError: for a pair that is longer than the context.
        """
        settings, config = self.settings, self.subject.config
        require_next(self.subject)
        self.texts = _read_pairs(settings.data) if settings.data else self._preset.pairs
        pairs = [self._encoded(*texts) for texts in self.texts]
        # A vector added after the last layer would raise the same tokens at every position.
        layers = settings.layers or spread_layers(config.num_layers, CANDIDATES)
        one_run = intervention_operations(
            config,
            float(np.mean([len(prompt) + len(positive) for prompt, positive, _ in pairs])),
            logit_rows=float(np.mean([len(positive) for _, positive, _ in pairs])),
        )
        half = len(pairs) // 2
        if settings.pairs > half:
            raise ConfigError(
                f"expected pairs of at most {half}, half of the {len(pairs)} contrast pairs, found "
                f"{settings.pairs}; ask for fewer, or give more: data=FILE"
            )
        runs_to_choose, runs_to_score = len(layers) * len(settings.strengths) + 1, settings.controls + 4
        n_chosen, n_scored = (
            settings.pairs or affordable(one_run * runs, half, least=FEWEST_PAIRS)
            for runs in (runs_to_choose, runs_to_score)
        )
        # Every other pair, so that both halves of a file sorted by topic have the same topics.
        self.scored = self.texts[1::2][:n_scored]
        experiment = SteeredTexts(
            tuple(pairs[::2][:n_chosen]),
            tuple(pairs[1::2][:n_scored]),
            layers=tuple(layers),
            strengths=settings.strengths,
            method=settings.method,
            draws=settings.controls,
            seed=settings.seed,
            max_tokens=settings.max_tokens,
        )
        experiment.cells(config)  # raises for layers that do not exist before anything runs
        return {"steered": self.on_model(experiment)}

    @property
    def _preset(self) -> ContrastPreset:
        return preset_of(self.settings.preset or "french", PRESETS)

    @property
    def _sides(self) -> tuple[str, str]:
        """Names of the positive and of the negative continuation."""
        if self.settings.data:
            return "positive continuation", "negative continuation"
        return self._preset.positive, self._preset.negative

    def _encoded(self, prompt: str, positive: str, negative: str) -> ContrastPair:
        """Token ids of a pair. Raises PromptError if it does not fit into the context."""
        ids = tuple(encoded(self.subject, prompt).ids)
        ends = self.subject.pieces_of_answers([(prompt, positive), (prompt, negative)])
        # The generated text, of any tokens, has to fit as well.
        whole = [[*ids, *end] for end in (*ends, [0] * self.settings.max_tokens)]
        config = self.subject.config
        check_prompts(whole, config.vocab_size, config.context_length, self.subject.name)
        return ids, tuple(ends[0]), tuple(ends[1])

    @property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed, in a sentence; empty if there are claims."""
        order = self.steered["order"].values
        # Without controls the claim itself says that nothing is claimed.
        if not self.settings.controls or by_sign(order) <= CHANCE:
            return ""
        return (
            f"{self.subject.name} predicts {int((order > 0).sum())} of {len(order)} held-out texts (the "
            f"{self._sides[1]}s) better than their tokens in random order, no more than chance. It may not "
            "model such texts at all, so nothing is claimed: give more texts of several tokens, or texts in "
            "a language that it was trained on, with data=FILE."
        )

    def claims(self) -> Iterator[Claim]:
        """Claim about the gain in log-probability of held-out positive continuations, against random
        directions."""
        steered = self.steered
        gains = (steered["steered"] - steered["plain"]).values
        draws = (steered["random"] - steered["plain"]).mean("pair").values
        yield Claim.against(
            f"steering with strength {float(steered['chosen_strength']):g} after layer "
            f"{int(steered['chosen_layer'])} raises the log-probability per token of the {self._sides[0]}",
            gains,
            draws,
            "random directions of the same norm in the same layer",
            seed=self.settings.seed,
            held_out=True,
            unit="nats",
            levels=(float(steered["plain"].mean()), float(steered["steered"].mean())),
        )

    def claims_caption(self) -> str:
        """Caption of the claim: how layer and strength were chosen, and the loss of the generated texts with
        and without steering."""
        return (
            f"Layer and strength were chosen among {self.steered['gain'].size} candidates on "
            f"{len(self.nodes['steered'].experiment.chosen_on)} other pairs, which also made the direction. "  # type: ignore[attr-defined]
            f"{self.summary}"
        )

    @property
    def summary(self) -> str:
        """See `Workflow`: the loss of the generated texts in the unsteered model."""
        plain, steered = (float(self.steered[name].mean()) for name in ("plain_loss", "steered_loss"))
        return (
            f"Loss per token of the generated texts in the unsteered model: {plain:.2f} nats without "
            f"steering, {steered:.2f} with it."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: the texts side by side, the candidates by layer, and their curves."""
        steered = self.steered
        layer, strength = int(steered["chosen_layer"]), float(steered["chosen_strength"])
        yield Data(
            json={
                **self.subject.about,
                "method": self.settings.method,
                "chosen_layer": layer,
                "chosen_strength": strength,
            }
        )
        gained = steered.assign(gain_of_pair=steered["steered"] - steered["plain"])
        columns = ("plain_text", "steered_text", "plain_loss", "steered_loss")
        rows = [
            {"prompt": prompt, "positive": positive.strip(), **row}
            for (prompt, positive, _), row in zip(
                self.scored, records(gained, "pair", *columns, gain="gain_of_pair"), strict=True
            )
        ]

        def text(name: str) -> Any:
            return lambda row: format_text(row[name])

        yield Table.of(
            rows,
            ("prompt", text("prompt")),
            ("without steering", text("plain_text")),
            ("steered", text("steered_text")),
            (self._sides[0], text("positive")),
            ("gain", "gain", "+.2f"),
            ("loss without", "plain_loss", ".2f"),
            ("loss steered", "steered_loss", ".2f"),
            title=f"{self.subject.name}: held-out prompts continued, steered after layer {layer} with "
            f"strength {strength:g}",
            caption="One row per held-out pair. Gain: increase of the log-probability per token of the "
            f"{self._sides[0]} by steering, in nats. Loss: per token of the generated text, in the unsteered "
            "model, in nats.",
            sources=("steered",),
            json={"texts": rows},
        )
        candidates = records(steered, "layer", "layer", "gain", "auc", "norm")
        yield Table.of(
            candidates,
            ("layer", "layer", "d"),
            ("AUC", "auc", ".3f"),
            ("norm", "norm", ".2f"),
            *(
                (f"gain at {value:g}", lambda row, i=i: row["gain"][i], "+.3f")
                for i, value in enumerate(steered["strength"].values.tolist())
            ),
            strong=lambda row: row["layer"] == layer,
            title="Candidates by layer",
            caption=f"One row per candidate layer. AUC: probability that a held-out {self._sides[0]} lies "
            f"farther along the direction than a held-out {self._sides[1]}; 0.5 is chance. Norm: of the "
            "vector at strength 1. Gain: increase of the log-probability per token of the "
            f"{self._sides[0]} by steering, in nats, on the pairs that choose. Bold: the chosen layer.",
            sources=("steered",),
            json={"candidates": candidates},
        )
        lines = Lines.of(
            steered["gain"].transpose("strength", "layer"),
            "Gain by layer and strength",
            "x: layer after which the direction is added. y: increase of the log-probability per token of "
            f"the {self._sides[0]} by steering, in nats, on the pairs that choose. One curve per strength.",
            y_name="gain",
            sources=("steered",),
        )
        title = f"{self.subject.name}: steering towards the {self._sides[0]}"
        yield from together("steering", title, lines, beside=[self.findings])


def _read_pairs(path: str) -> tuple[ContrastTexts, ...]:
    """Contrast pairs of a JSON file. Raises ConfigError unless it lists at least ten valid records."""
    listed = json_file(Path(path).expanduser(), ConfigError, "name a JSON list of contrast pairs")
    example = '[{"prompt": "The film was", "positive": "great.", "negative": "bad."}, …]'
    if not isinstance(listed, list) or len(listed) < 2 * FEWEST_PAIRS:
        found = f"{len(listed)} records" if isinstance(listed, list) else type(listed).__name__
        raise ConfigError(
            f"expected a JSON list of at least ten contrast pairs in {path!r}, five of which are held out, "
            f"found {found}; write {example}"
        )
    for number, record in enumerate(listed):
        texts = [record.get(name) if isinstance(record, dict) else None for name in FIELDS]
        missing = [
            name
            for name, text in zip(FIELDS, texts, strict=True)
            if not isinstance(text, str) or not text.strip()
        ]
        if missing:
            raise ConfigError(
                f"record {number} of {path!r}: expected texts of both sides after a prompt, found none in "
                f"{', '.join(missing)}; write {example}"
            )
        if record["positive"].strip() == record["negative"].strip():
            raise ConfigError(
                f"record {number} of {path!r}: expected two continuations that differ, found "
                f"{record['positive']!r} on both sides; change one"
            )
    return tuple((record["prompt"], record["positive"], record["negative"]) for record in listed)
