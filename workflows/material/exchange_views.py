"""What is said of an exchange of features: its findings, what its parts do, what they are called.

Border: results of `FeatureControls` in, views out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import Null, interval
from ...stages.features.layers.layout import FeatureId
from ...stages.logits.lens import format_probability, format_token
from ...store.arrays import Floats
from ..views import Finding, Table, dash
from ..workflow import Workflow
from .feature_controls import FeatureControls, changes, probabilities
from .feature_labels import FeatureLabels

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "ExchangeWorkflow",
    "exchange_findings",
    "finding",
    "held_out_finding",
    "features_table",
    "parts_table",
    "site_told",
]

Results = Callable[[str], "xr.Dataset"]


class ExchangeWorkflow(Workflow):
    """A workflow that is about one exchange of features."""

    controls: FeatureControls

    @cached_property
    def labels(self) -> FeatureLabels:
        """What the features are called."""
        return self.controls.labels(self.result, self.store)

    @property
    def spoken(self) -> tuple[str, ...]:
        """See `Workflow`."""
        return self.labels.spoken


def exchange_findings(controls: FeatureControls, result: Results, labels: FeatureLabels) -> list[Finding]:
    """How much likelier the word becomes at the end of the prompt, and of others of its kind."""
    planned, word = controls.planned, controls.words[0]
    off = f" in place of {labels.several(planned.suppress)}" if planned.suppress else ""
    claim = f"{labels.short(planned.inject)}{off} at {site_told(controls)} changes P({word!r}) at the end"
    found = [finding(controls, changes(result("controls")), claim)]
    if controls.held_out:
        found.append(
            held_out_finding(controls, changes(result("held_out")), f"the same in {controls.kin.where}")
        )
    return found


def finding(controls: FeatureControls, values: Floats, claim: str, **more: Any) -> Finding:
    """The exchange among random features, at the site, or each at its best position.

    values: the measure [place, exchange], of `controls`.
    """
    best = values.max(axis=0)
    null = Null(controls.drawn(best), controls.of, looked_at=controls.looked_at)
    return Finding(claim, float(best[0]), null, **more)


def held_out_finding(controls: FeatureControls, values: Floats, claim: str, **more: Any) -> Finding:
    """The same over prompts on which nothing was chosen: means over them [place, exchange]."""
    null = Null(controls.drawn(values.mean(axis=0)), controls.of)
    own = values[:, 0]
    return Finding(
        claim, float(own.mean()), null, spread=interval(own), prompts=len(own), held_out=True, **more
    )


def site_told(controls: FeatureControls) -> str:
    """The token at which features are exchanged; of a prompt without a named site that nobody knows."""
    place = controls.planned.named_site
    if place is None:
        return "the best position"
    return f"'{format_token(controls.planned.tokens[place])}' ({place})"


def features_table(controls: FeatureControls, labels: FeatureLabels) -> Table:
    """Every feature that is exchanged: what it is for, what it writes, and where in the prompt it fires."""
    doses = {FeatureId(dose.layer, dose.index): dose for dose in controls.doses}
    parts = (controls.company,) * (len(doses) - 1) + (controls.cause,)
    return Table.of(
        list(zip(doses, parts, strict=True)),
        ("feature", lambda one: FeatureLabels(said=labels.said).short(one[0])),
        ("part", lambda one: one[1]),
        ("writes", lambda one: dash(labels.writes.get(one[0]), repr)),
        ("fires on", lambda one: dash(labels.fires.get(one[0]), repr)),
        title="The features that are exchanged",
        caption="the token that each one's decoder raises most, read by the unembedding, without what later "
        "layers make of it; the token of this prompt at which it is most active, if it is active at all",
    )


def parts_table(controls: FeatureControls, result: Results) -> Table:
    """The word's probability with all, some and none of the exchange, with random features, and elsewhere."""
    rows = list(_parts(controls, result))
    word = controls.words[0]
    return Table.of(
        rows,
        ("what is done", "done"),
        (f"P({format_token(word)})", "prob", format_probability),
        ("change", "change", "+.4f"),
        ("largest", "largest", "+.4f"),
        ("of", "draws", "d"),
        strong=lambda row: row["done"] == "both",
        title=f"What each part of the exchange at {site_told(controls)} does",
        caption="of several the median, and the largest change",
        json={"parts": rows},
    )


def _parts(controls: FeatureControls, result: Results) -> Iterator[dict[str, Any]]:
    """Records: what was done, P(word), its change; of several, medians, and the largest change."""

    def told(done: str, prob: Floats, change: Floats) -> dict[str, Any]:
        return {
            "done": done,
            "prob": float(np.median(prob)),
            "change": float(np.median(change)),
            "largest": float(change.max()),
            "draws": change.size,
        }

    found = result("controls")
    prob, change = probabilities(found), changes(found)
    best = int(change[:, 0].argmax())
    before = np.exp(found["baseline_logprob"].isel(word=0).values[best])
    yield told("nothing", before, np.zeros(1))
    names = {0: controls.cause}
    if controls.has_company:
        names = {0: "both", 1: f"{controls.company} alone", -1: f"{controls.cause} alone"}
    for i, name in names.items():
        yield told(name, prob[best, i], change[best, [i]])
    drawn = controls.drawn(change.max(0))
    if drawn.size:  # controls=0 draws none
        yield told(f"{controls.of}, in its place", controls.drawn(prob.max(0)), drawn)
    if controls.elsewhere:
        other = result("elsewhere")
        done = f"{names[0]}, in facts of other kinds, as far from their end"
        yield told(done, probabilities(other), changes(other))
