"""Base of the exchange workflows: the effect at the end of a prompt of exchanging features at an earlier
position.

A subclass sets, by class variables, at which positions features are exchanged, which words and attention
weights are measured, and which settings of the preset apply. `ExchangeWorkflow` makes the nodes, claims and
views that all of them share (workflows/DESIGN.md, "Exchanges of features").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...stages.features.dictionary import Dictionary
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_probability, format_token
from ...store.arrays import Floats
from ..claim import Claim
from ..material.feature_labels import FeatureLabels
from ..subject import Subject
from ..views import Table, View, dash
from ..workflow import Nodes, Workflow
from .exchange import FeatureExchange, changes, probabilities
from .presets import FeaturePreset, chosen_preset

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.forward.models.model import Model

__all__ = ["ExchangeWorkflow", "position_sweep"]


class ExchangeWorkflow(Workflow):
    """Base class of workflows about one exchange of features in one prompt: some features are suppressed, one
    is injected."""

    exchange_type: ClassVar[type[FeatureExchange]] = FeatureExchange
    """Class of the attribute `exchange`, which prepares the exchange for the model."""
    every_position: ClassVar[bool] = True
    """Whether features are exchanged at every position in turn, so that a prompt in the settings needs no
    site; otherwise at the site only."""
    words: ClassVar[tuple[str, ...]] = ("inject_word", "suppress_word")
    """Names of the preset's fields with the words whose probabilities are measured; claims are about the
    first."""
    with_attention: ClassVar[bool] = False
    """Whether the attention of the last token to the site is stored."""
    with_ending: ClassVar[bool] = True
    """Whether the preset's ending is appended to the prompt."""

    def __init__(self, settings: Any, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = self.checked(chosen_preset(settings, keep_site=not self.every_position))
        if not self.with_ending:
            preset = replace(preset, ending="")
        self.preset = preset
        self.subject = Subject(settings.reference(model, preset.model))
        self.subject.require(self.needs, self.name)
        self.exchange = exchange = self.exchange_type(
            preset,
            self.subject,
            Dictionary.from_pretrained(preset.dictionary),
            settings,
            tuple(getattr(preset, word) for word in self.words),
            self.with_attention,
        )
        places = exchange.every_position if self.every_position else [(exchange.ids, exchange.required_site)]
        sweep = exchange.node(places, [exchange.doses], self.strengths())
        self.nodes = {"sweep": sweep, **exchange.nodes, **self.further_nodes()}

    def checked(self, preset: FeaturePreset) -> FeaturePreset:
        """The preset, if it has all fields that the workflow needs; raises ConfigError otherwise. Subclasses
        override it."""
        return preset

    def strengths(self) -> tuple[float, ...]:
        """Strengths at which the exchange is run: multiples of the decoder vectors."""
        return (self.exchange.strength,)

    def further_nodes(self) -> Nodes:
        """Nodes of a subclass in addition to the exchange and its controls."""
        return {}

    @cached_property
    def sweep(self) -> xr.Dataset:
        """Exchange result by strength and place (prompt position), [strength, place], in memory."""
        return self.result("sweep").load().isel(exchange=0)

    @cached_property
    def labels(self) -> FeatureLabels:
        """Labels of the exchanged features: tokens that they promote, tokens that they fire on, and labels
        that people gave."""
        exchange = self.exchange
        words = self.result("words") if "words" in self.nodes else None
        labels = FeatureLabels.of_trace(self.subject, exchange.ids, words, self.result("trace"))
        return labels.with_labels_by_people(self.store, exchange.dictionary)

    @property
    def spoken(self) -> tuple[str, ...]:
        """Labels that people gave to the exchanged features; see `Workflow.spoken`."""
        return self.labels.spoken

    # -- claims

    def effects(self, result: xr.Dataset) -> Floats:
        """Effect that claims are about, [place, exchange]: the change of the probability of the first
        word."""
        return changes(result)

    @property
    def claim(self) -> str:
        """Text of the claim about this prompt: which features are exchanged where, and which probability
        changes."""
        suppressed = self.labels.several(self.exchange.suppress) if self.exchange.suppress else ""
        return (
            f"injecting {self.labels.short(self.exchange.inject)}"
            f"{f' and suppressing {suppressed}' if suppressed else ''} at {self.exchange.site_label} changes "
            f"P({self.exchange.words[0]!r}) at the end of the prompt"
        )

    def claims(self) -> Iterator[Claim]:
        """Claims about the change of the first word's probability: in this prompt, and its mean over held-out
        prompts."""
        controls = self.result("controls")
        yield self.claim_here(self.effects(controls), self.claim, probabilities(controls)[:, 0])
        if self.exchange.held_out:
            held_out = self.effects(self.result("held_out"))
            text = f"the same exchange in {self.exchange.kin.where}, changes P({self.exchange.words[0]!r})"
            yield self.held_out_claim(held_out, text)

    def claims_caption(self) -> str:
        """Caption of the claims: the preset's description of the feature selection."""
        return self.preset.selection

    def claim_here(self, effects: Floats, text: str, after: Floats | None = None) -> Claim:
        """Claim about this prompt. Without a site, the exchange and each of its controls count at the
        position of their largest effect.

        Arguments:
            effects: [place, exchange]; the exchanges are those of `FeatureExchange.tried`.
            text: cause and effect; see `Claim`.
            after: probability under the exchange, [place], where the effect is its change; None otherwise.
        """
        # Each control takes its own best position too, so that the null includes the choice of position.
        best, exchange = effects.max(axis=0), self.exchange
        fields: dict[str, Any] = {"looked_at": exchange.looked_at}
        if after is not None:
            reached = float(after[effects[:, 0].argmax()])
            # The probability before is that after minus the change, at the same position.
            fields["levels"] = (reached - float(best[0]), reached)
        return Claim.against(text, best[0], exchange.of_random(best), exchange.controls_label, **fields)

    def held_out_claim(self, effects: Floats, text: str) -> Claim:
        """Claim about the mean effect of the exchange over held-out texts.

        Arguments:
            effects: effects, [text, exchange].
            text: text of the claim.
        """
        random, of = self.exchange.of_random(effects.mean(axis=0)), self.exchange.controls_label
        return Claim.against(text, effects[:, 0], random, of, held_out=True)

    # -- views

    def opening(self) -> Iterator[View]:
        """First views of every exchange workflow: a table of the exchanged features, and a table of the
        effects of single parts of the exchange."""
        yield self.features_table()
        if self.exchange.words:
            yield self.parts_table()

    def features_table(self) -> Table:
        """Table with a row per exchanged feature: its role, the token that it promotes, and the token that it
        fires on."""
        exchange, labels = self.exchange, self.labels
        features = [FeatureId(dose.layer, dose.index) for dose in exchange.doses]
        roles = [exchange.company] * (len(features) - 1) + [exchange.cause]
        return Table.of(
            list(dict(zip(features, roles, strict=True)).items()),
            ("feature", lambda row: FeatureLabels(by_people=labels.by_people).short(row[0])),
            ("role", lambda row: row[1]),
            ("promotes", lambda row: dash(labels.writes.get(row[0]), repr)),
            ("fires on", lambda row: dash(labels.fires.get(row[0]), repr)),
            title="Exchanged features",
            caption="One row per feature (layer:index). Role: its part in the exchange, such as injection. "
            "Promotes: the token whose logit its decoder raises most through the unembedding, without "
            "effects of later layers. Fires on: the token of this prompt at which it is most active, if it "
            "is active.",
        )

    def parts_table(self) -> Table:
        """Table of the first word's probability under the exchange, under each of its parts, with random
        features, and in other facts."""
        return Table.of(
            rows := list(self._parts()),
            ("intervention", "done"),
            (f"P({format_token(self.exchange.words[0])})", "prob", format_probability),
            ("change", "change", "+.4f"),
            ("largest change", "largest", "+.4f"),
            ("runs", "draws", "d"),
            strong=lambda row: row["done"] == "both",
            title=f"Effect of each part of the exchange at {self.exchange.site_label}",
            caption=f"One row per intervention. P({format_token(self.exchange.words[0])}): probability of "
            "the word at the end of the prompt. Change: P minus P of the run without intervention. Runs: "
            "number of runs; with several, P and change are medians, and largest change is the largest of "
            "them. Bold: the exchange as a whole.",
            json={"parts": rows},
        )

    def _parts(self) -> Iterator[dict[str, Any]]:
        """Rows of `parts_table`: name of the intervention, median probability of the first word, median and
        largest change of it, and number of runs."""
        exchange, controls = self.exchange, self.result("controls")

        def record(intervention: str, prob: Floats, change: Floats) -> dict[str, Any]:
            medians = {"prob": float(np.median(prob)), "change": float(np.median(change))}
            return {"done": intervention, **medians, "largest": float(change.max()), "draws": change.size}

        prob, change = probabilities(controls), changes(controls)
        # Without a site: the position at which the full exchange has the largest effect.
        best = int(change[:, 0].argmax())
        yield record("nothing", np.exp(controls["baseline_logprob"].values[best, 0]), np.zeros(1))
        names = {0: exchange.cause}
        if exchange.doses[:-1]:
            names = {0: "both", 1: f"{exchange.company} alone", -1: f"{exchange.cause} alone"}
        for i, name in names.items():
            yield record(name, prob[best, i], change[best, [i]])
        if exchange.random:  # controls=0 draws none
            drawn = (exchange.of_random(values.max(axis=0)) for values in (prob, change))
            yield record(f"{exchange.controls_label}, instead", *drawn)
        if exchange.elsewhere:
            elsewhere = self.result("elsewhere")
            intervention = f"{names[0]}, in facts of other kinds at the same distance from the end"
            yield record(intervention, probabilities(elsewhere), changes(elsewhere))


def position_sweep(tokens: list[str], **columns: Any) -> list[dict[str, Any]]:
    """JSON records of an exchange at every position: position, token and the value of each column.

    Arguments:
        tokens: text of the token at each position.
        columns: values [position] by name.
    """
    values = {name: np.asarray(column, float).tolist() for name, column in columns.items()}
    return [
        {"position": i, "token": token, **{name: column[i] for name, column in values.items()}}
        for i, token in enumerate(tokens)
    ]
