"""Is the rhyme of a couplet chosen before its second line, or at its end? Activation patching with controls.

Two couplets differ only in the last word of line 1, which belongs to two different rhymes. Residual states of
the other couplet are patched into the first, one layer and role at a time
(stages/causal/grids/line_patching.py). The effect is the change of P(rhymes with the other couplet) at the
end of line 2: the summed probability of all words of that rhyme except both ends of line 1. The change of the
couplet's own rhyme is reported but decides nothing, as any foreign state lowers it. That patching the end of
line 1 itself has an effect only shows that the model rhymes.

Following Lindsey et al. 2025 ("On the Biology of a Large Language Model", planning in poems), as far as
patching can tell, the verdict is
- *planned* if one state at the line break or the first token of line 2 changes the rhyme at the end;
- *improvised* if the last token alone, reading the other end of line 1 while all tokens between keep their
  states, changes it.
Both or neither may hold. A patch "changes the rhyme" if its effect is beyond chance and at least the share
`least` of the effect of the whole other couplet. The question is about the rhyme, not about the word.

Layer and role are chosen on half of the pairs and scored on the other half. Controls, patched likewise, are
states of a couplet with a third rhyme, of one with another word of the same rhyme, and random changes of the
same norm; claims use the one with the largest p-value. Other positions are no null, as a plan may be held at
several: the heatmap shows all. Only pairs count whose two couplets the model ends on their rhymes, and
nothing is claimed of a model that does not rhyme.

A further claim is about the tokens before the end: whether the same state also changes next-token
distributions within line 2. A third rhyme is no control there, as it would change them as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...stages.causal.controls import CHANCE
from ...store.arrays import Floats
from ..claim import Claim
from ..material.answers import KNOWN, require_next
from ..material.facts.known import NO_CONTROLS
from ..settings import ControlSettings, Count, ModelSettings, Share, setting
from ..views import Data, Heatmap, Note, Table, Text, Tokens, View, together
from ..workflow import ModelWorkflow, Nodes
from .couplet_patches import ASKED, KINDS, PLAN, ROLES, WAYS, CoupletEffects, CoupletPatches

if TYPE_CHECKING:
    from ...store import Store

__all__ = ["CoupletPlanning", "CoupletPlanningSettings"]

BEFORE, BETWEEN, DIRECT = range(len(WAYS))
"""Indices into WAYS."""
UNIT = "pp"
"""Percentage points of P(rhymes with the other couplet) at the end of line 2."""
VERDICTS = {
    (True, False): (
        "Planned: one state at the line break or the first token of line 2 changes the rhyme at its end; "
        "what the last token reads of the end of line 1 itself does not."
    ),
    (True, True): (
        "Both: one state at the line break or the first token of line 2 changes the rhyme at its end, and so "
        "does what the last token reads of the end of line 1 itself."
    ),
    (False, True): (
        "Improvised: what the last token reads of the end of line 1 itself changes the rhyme at the end of "
        "line 2; the strongest state at the line break or the first token of line 2 does not."
    ),
    (False, False): (
        "Neither: no state at the line break or the first token of line 2, and nothing that the last token "
        "reads of the end of line 1 itself, changes the rhyme at the end of line 2."
    ),
}
"""Verdict by whether the state before line 2 changes the rhyme, and whether direct reading of line 1 does."""
LATE = (
    "On the way: all states between line 1 and the last token together change the rhyme at the end of line "
    "2; no single state before line 2 does, nor what the last token reads of the end of line 1 itself."
)
"""Verdict if neither changes the rhyme, but all states between together do."""
ON_THE_WAY: Mapping[str, Any] = {"kinds": ("same", "random"), "unit": "nats"}
"""Controls and unit of the claim about next tokens before the end of line 2."""
Pick = Callable[[CoupletEffects], Floats]
"""Selects a measure of a result, such as the effect of one layer and role, [draw]."""


@dataclass(frozen=True)
class CoupletPlanningSettings(ControlSettings, ModelSettings):
    """Settings of `CoupletPlanning`."""

    pairs: Count = setting(
        24, "pairs to choose layer and role on, and as many held-out pairs to score; at most 24"
    )
    donors: Count = setting(2, "control donors of every kind per pair to score")
    least: Share = setting(
        0.1, "least share of the whole other couplet's effect for a patch to count as changing the rhyme"
    )


class CoupletPlanning(ModelWorkflow):
    """Patching of another couplet's states by layer and role."""

    name = "couplet_planning"
    question = "Is the rhyme of a couplet chosen before its second line, or at its end?"
    settings_type = CoupletPlanningSettings
    settings: CoupletPlanningSettings

    def plan(self) -> Nodes:
        """Patching experiments on pairs to choose on, on pairs to score, and with each kind of control
        donor."""
        require_next(self.subject)
        settings = self.settings
        self.patches = CoupletPatches(self.subject, settings.pairs, settings.donors, settings.seed)
        names = (ASKED, "choice", "scored", *KINDS)
        return {name: self.on_model(self.patches.experiment(name)) for name in names}

    def first_nodes(self) -> Nodes:
        """See `Workflow`: both couplets of all pairs without patches."""
        return {ASKED: self.nodes[ASKED]}

    def settle(self, store: Store, *, refuses: bool = True) -> Self:
        """See `Workflow`: leaves out all patching of a model that does not rhyme."""
        self.store = store
        for name in ("unpatched", "rhymes", "not_claimed"):
            # Read from another store before.
            vars(self).pop(name, None)
        if self.not_claimed:
            self.nodes = {ASKED: self.nodes[ASKED]}
        return self

    # -- the results

    @cached_property
    def unpatched(self) -> Mapping[str, CoupletEffects]:
        """What the model ends the couplets on without patches, of the pairs of "choice" and of "scored"."""
        assert self.store is not None, "measured by `run`"
        result, n_chosen = self.nodes[ASKED].open(self.store).load(), len(self.patches.choice)
        return {
            "choice": CoupletEffects(result.isel(draw=slice(None, n_chosen)), self.patches.choice),
            "scored": CoupletEffects(result.isel(draw=slice(n_chosen, None)), self.patches.scored),
        }

    @cached_property
    def read(self) -> Mapping[str, CoupletEffects]:
        """Effects of every result of patching, by its name."""
        patches = self.patches
        return {
            name: CoupletEffects(
                self.result(name).load(),
                patches.choice if name == "choice" else patches.scored,
                patches.donors.get(name, 1),
            )
            for name in self.nodes
            if name != ASKED
        }

    def values(self, name: str, pick: Pick) -> Floats:
        """A measure of a result for the pairs that count: [pair, ...], for control donors [pair, donor, ...].

        Arguments:
            name: name of the result.
            pick: selects the measure.
        """
        measured, count = pick(self.read[name]), self.patches.donors.get(name, 0)
        if count:
            measured = measured.reshape(-1, count, *measured.shape[1:])
        values: Floats = measured[self.unpatched["choice" if name == "choice" else "scored"].is_known]
        return values

    @cached_property
    def rhymes(self) -> Claim:
        """Claim that the model rhymes, over all pairs to score."""
        text = "P(the end of line 2 rhymes with line 1) is higher than after the line 1 of the other couplet"
        of = "draws of a random sign for each pair"
        return Claim.paired(text, self.unpatched["scored"].rhymes, of, self.settings, unit=UNIT)

    @property
    def fewest(self) -> int:
        """Least number of pairs to score that must count.

        A draw of the null picks, in each pair, the other couplet or one of its donors. With fewer pairs, more
        than CHANCE / 2 of the draws would pick the other couplet in all of them, and equal the effect
        itself."""
        # Each draw picks the other couplet with probability 1 / (1 + donors) in each pair.
        return math.ceil(math.log(2 / CHANCE) / math.log(1 + min(self.patches.donors.values())))

    @cached_property
    def not_claimed(self) -> str:
        """See `Workflow`: too few pairs that the model rhymes, or rhymes no likelier than by chance."""
        if not self.settings.controls:
            return NO_CONTROLS
        counts = [int(self.unpatched[name].is_known.sum()) for name in ("choice", "scored")]
        if counts[0] >= KNOWN and counts[1] >= self.fewest and self.rhymes.is_beyond_chance:
            return ""
        pairs = len(self.patches.choice), len(self.patches.scored)
        return (
            f"{self.subject.name} ends both couplets on words that rhyme in {counts[0]} of {pairs[0]} pairs "
            f"to choose on and {counts[1]} of {pairs[1]} to score on; {KNOWN} and {self.fewest} are needed. "
            f"P(rhymes with line 1) is {self.rhymes.effect:+.1f} pp above that after another line 1: nothing "
            "is claimed."
        )

    def _finding(self, text: str, effects: Floats, controls: Floats, of: str, unit: str = UNIT) -> Claim:
        """Claim about the mean of effects [pair], against control donors [pair, donor]."""
        return Claim.over(text, effects, controls, of, self.settings, unit=unit, held_out=True)

    def strictest(
        self, text: str, pick: Pick, *, kinds: tuple[str, ...] = tuple(KINDS), unit: str = UNIT
    ) -> Claim:
        """Claim about a measure of the pairs to score, against the kind of control with the largest p-value.

        Arguments:
            text: cause and effect, see `Claim`.
            pick: selects the measure.
            kinds: kinds of controls to compare with; of equal p-values the first.
            unit: unit of the measure.
        """
        effects = self.values("scored", pick)
        return max(
            (self._finding(text, effects, self.values(kind, pick), KINDS[kind], unit) for kind in kinds),
            key=lambda claim: claim.p_value,
        )

    def layer(self, role: int) -> int:
        """The layer at which patching a role has the largest mean effect on the pairs to choose on."""
        return int(self.values("choice", lambda result: result.effects).mean(0)[:, role].argmax())

    @cached_property
    def site(self) -> tuple[int, int]:
        """Layer and role of the state before line 2 with the largest mean effect on pairs to choose on."""
        mean = self.values("choice", lambda result: result.effects).mean(0)[:, list(PLAN)]
        layer, role = np.unravel_index(int(mean.argmax()), mean.shape)
        return int(layer), PLAN[int(role)]

    @cached_property
    def _claims(self) -> tuple[Claim, ...]:
        """Claims that the model rhymes; about the chosen state before line 2; about all states before line 2,
        all states between line 1 and the last token, and direct reading of line 1, each in every layer; and
        about next tokens within line 2."""
        layer, role = self.site
        cause = f"patching the other couplet's state at the {ROLES[role]} after layer {layer}"
        raises = "raises the probability of its rhyme at the end of line 2"
        return (
            self.rhymes,
            self.strictest(f"{cause} {raises}", _pick("effects", layer, role)),
            *(
                self.strictest(
                    f"patching the other couplet's states at {WAYS[index]}, in every layer, {raises}",
                    _pick("ways", index),
                )
                for index in (BEFORE, BETWEEN)
            ),
            self.strictest(
                "patching the other couplet's end of line 1, with all tokens between it and the last token "
                f"held at their states, {raises}",
                _pick("ways", DIRECT),
            ),
            self.strictest(
                f"{cause} changes next-token distributions within line 2 (KL)",
                _pick("kl", layer, role),
                **ON_THE_WAY,
            ),
        )

    def claims(self) -> Sequence[Claim]:
        """Claims that the model rhymes, and about the effects of states before, between, and at the last
        token."""
        return self._claims

    def changes_rhyme(self, claim: Claim) -> bool:
        """Whether an effect is beyond chance, and at least the share settings.least of the whole effect."""
        return claim.is_beyond_chance and claim.effect >= self.settings.least * self.total

    @cached_property
    def total(self) -> float:
        """Mean change of P(rhymes with the other couplet) from this couplet to the other, pp."""
        return float(self.values("scored", lambda result: result.total).mean())

    @property
    def verdict(self) -> str:
        """The verdict of VERDICTS or LATE, with the effects of the whole other couplet and of each set of
        positions."""
        _, site, *ways, _ = self._claims
        changes = self.changes_rhyme(site), self.changes_rhyme(ways[DIRECT])
        is_late = not any(changes) and self.changes_rhyme(ways[BETWEEN])
        by_way = "; ".join(
            f"patched at {name}, by {claim.effect:+.1f} pp" for claim, name in zip(ways, WAYS, strict=True)
        )
        return (
            f"{LATE if is_late else VERDICTS[changes]} The whole other couplet changes P(rhymes with it) by "
            f"{self.total:+.1f} pp; {by_way}. A patch changes the rhyme if its effect is beyond chance and "
            f"at least {100 * self.settings.least:g} % of that of the whole other couplet."
        )

    def claims_caption(self) -> str:
        """Caption of the claims: meaning of pp, numbers of scored pairs, and selection of layer and
        position."""
        chosen_on, scored = (int(self.unpatched[name].is_known.sum()) for name in ("choice", "scored"))
        return (
            "The other couplet: the same words with another rhyme at the end of line 1. pp: percentage "
            f"points of P(rhymes with it) at the end of line 2. Scored on {scored} of "
            f"{len(self.patches.scored)} pairs, those whose two couplets the model ends on their rhymes; "
            f"layer and position were chosen on {chosen_on} other pairs, among "
            f"{len(PLAN) * self.subject.config.num_layers}."
        )

    def views(self) -> Iterator[View]:
        """The verdict, heatmaps of effects, tables by role and by set of positions, and one couplet as
        text."""
        yield Data(json={**self.subject.about, "pairs": self._pairs()})
        if self.not_claimed:
            return
        yield Note(title="Plan or improvisation?", text=self.verdict, json={"verdict": self.verdict})
        maps = (
            self._map("scored", "States of the other couplet", "mean over pairs"),
            self._map("third", "Control: states with a third rhyme", "mean over pairs and donors"),
        )
        title = f"Positions and layers of {self.subject.name} that change the rhyme of a couplet"
        caption = "Effect of patching one state on the rhyme at the end of line 2"
        yield from together("couplet_planning", title, *maps, caption=caption)
        yield from self._roles_tables()
        yield self._ways_table()
        yield self._example()

    def _pairs(self) -> list[dict[str, Any]]:
        """Every pair for the JSON document: its texts, what the model ends it on, and whether it counts."""
        return [
            {
                "text": placed.pair.text(placed.pair.end),
                "end": placed.pair.end,
                "other": placed.pair.other,
                "is_scored": name == "scored",
                "ends_on": self.subject.token_texts(tops),
                "counts": bool(counts),
            }
            for name in ("choice", "scored")
            for placed, tops, counts in zip(
                getattr(self.patches, name),
                self.unpatched[name].unpatched_top,
                self.unpatched[name].is_known,
                strict=True,
            )
        ]

    def _map(self, name: str, title: str, caption: str) -> Heatmap:
        """Heatmap of mean effects in one result, [layer, role]; "scored" and "third" share one scale."""
        means = {result: self._mean(result) for result in ("scored", "third")}
        layer, role = self.site
        return Heatmap(
            title=title,
            caption=f"change of P(rhymes with the other couplet), {caption}",
            values=means[name],
            rows=tuple(map(str, range(len(means[name])))),
            columns=ROLES,
            column_name="patched at",
            value_name="change of P(rhymes)",
            unit=UNIT,
            high=float(max(np.abs(mean).max() for mean in means.values())),
            diverging=True,
            upward=True,
            numbers="+.0f",
            framed=((layer, role, layer, role),),
            frame_name="chosen before line 2, on other pairs",
            sources=(name,),
            json={"effects" if name == "scored" else "effects_third": means[name]},
        )

    def _mean(self, name: str) -> Floats:
        """Mean effects of one result over pairs and donors, pp [layer, role]."""
        values = self.values(name, lambda result: result.effects)
        mean: Floats = values.reshape(-1, *values.shape[-2:]).mean(0)
        return mean

    def _record(self, pick: Pick, pick_own: Pick) -> dict[str, Any]:
        """An effect with its interval, controls and p-value, and the change of the couplet's own rhyme.

        Arguments:
            pick: selects the effect on the other rhyme.
            pick_own: selects the effect on the own rhyme.
        """
        finding = self.strictest("", pick)
        return {
            "effect": finding.effect,
            "interval_95": finding.spread,
            "own": float(self.values("scored", pick_own).mean()),
            **{kind: float(self.values(kind, pick).mean()) for kind in KINDS},
            "p": finding.p_value,
            "is_beyond_chance": finding.is_beyond_chance,
        }

    def _on_the_way(self, pick: Pick) -> dict[str, Any]:
        """KL of next tokens within line 2, with its controls and p-value; all None for the last token."""
        values = {kind: self.values(kind, pick) for kind in ("scored", *ON_THE_WAY["kinds"])}
        # No position lies from the last token to the last but one: its KL is NaN.
        if np.isnan(values["scored"]).any():
            return dict.fromkeys((*values, "p"))
        finding = self.strictest("", pick, **ON_THE_WAY)
        means = {kind: float(kl.mean()) for kind, kl in values.items()}
        return means | {"p": finding.p_value}

    def _roles_tables(self) -> Iterator[Table]:
        """Tables by role, each at the layer chosen on other pairs: change of P(rhymes) at the end, and KL of
        next tokens within line 2."""
        records = [
            {
                "role": name,
                "layer": (layer := self.layer(role)),
                **self._record(_pick("effects", layer, role), _pick("own_effects", layer, role)),
                "kl": self._on_the_way(_pick("kl", layer, role)),
            }
            for role, name in enumerate(ROLES)
        ]
        yield Table.of(
            records,
            ("patched at", "role"),
            ("layer", "layer", "d"),
            *COLUMNS,
            strong=lambda record: record["is_beyond_chance"],
            title="Rhyme at the end of line 2, by patched state of the other couplet",
            caption="change: of P(rhymes with the other couplet), in pp, by patching its state; own rhyme: "
            "change of P(rhymes with its own line 1); third rhyme, same rhyme, random: the change by control "
            "states of couplets with such an end of line 1, or by random changes of the same norm; p: the "
            "largest of the three controls, not corrected for the number of rows; layers were chosen on "
            "other pairs; bold: beyond chance",
            sources=tuple(self.nodes),
            json={"roles": records},
        )
        heads = {"the other couplet": "scored", "the same rhyme": "same", "random": "random"}
        yield Table.of(
            [record for record in records if record["kl"]["p"] is not None],
            ("patched at", "role"),
            ("layer", "layer", "d"),
            *((head, lambda record, kind=kind: record["kl"][kind], ".4f") for head, kind in heads.items()),
            ("p", lambda record: record["kl"]["p"], ".2g"),
            title="Next tokens within line 2, by the same patches",
            caption="KL of next-token distributions in nats, mean from the patched position to the last "
            "token but one; words of one rhyme often have one part of speech (she, we, he), so that an "
            "effect larger than that of the same rhyme does not show planning by itself",
            sources=tuple(self.nodes),
        )

    def _ways_table(self) -> Table:
        """Table of the effect of patching each set of positions in every layer."""
        records = [
            {"heard_by": name, **self._record(_pick("ways", index), _pick("own_ways", index))}
            for index, name in enumerate(WAYS)
        ]
        return Table.of(
            records,
            ("patched at", "heard_by"),
            *COLUMNS,
            strong=lambda record: record["is_beyond_chance"],
            title="Effect of patching in every layer",
            caption="columns as above; only these positions have states of the other couplet, or read the "
            f"end of its line 1, in every layer; if all positions have, the change is {self.total:+.1f} pp",
            sources=tuple(self.nodes),
            json={"ways": records, "total": self.total},
        )

    def _example(self) -> Tokens:
        """Effects by token and layer in one pair, the one whose whole effect is nearest to the mean."""
        read = self.read["scored"]
        # Pairs that do not count are NaN, which `nanargmin` leaves out.
        total = np.where(read.is_known, read.total, np.nan)
        row = int(np.nanargmin(np.abs(total - np.nanmean(total))))
        placed, effects = self.patches.scored[row], read.effects[row]
        tokens = tuple(self.subject.token_labels(placed.ids))
        shown = np.full((len(effects), len(tokens)), np.nan)
        for role, positions in enumerate(placed.roles):
            shown[:, list(positions)] = effects[:, [role]]
        layer, role = self.site
        own_end, other_end = self.subject.token_texts(read.unpatched_top[row])
        (patched,) = self.subject.token_texts(read.top[row, layer, [role]])
        ends = {"own": own_end, "other": other_end, "patched": patched}
        return Tokens(
            title=f"One couplet, token by token: {placed.pair.end!r} becomes {placed.pair.other!r}",
            caption="Effect of patching the state of each token, by layer; tokens between are patched "
            f"together. The model ends this couplet on {own_end!r}, the other couplet on {other_end!r}, and "
            f"this couplet with the other's state at the {ROLES[role]} after layer {layer} on {patched!r}. "
            "Shown is the pair whose effect of the whole other couplet is nearest to the mean.",
            texts=tuple(Text(tokens, values, f"layer {layer}") for layer, values in enumerate(shown)),
            value_name="change of P(rhymes)",
            unit=UNIT,
            high=float(np.nanmax(np.abs(shown))),
            diverging=True,
            sources=("scored",),
            json={"example": {"text": placed.pair.text(placed.pair.end), "ends_on": ends}},
        )


COLUMNS: tuple[tuple[Any, ...], ...] = (
    ("change", "effect", "+.1f"),
    ("95 %", lambda record: "{:+.1f} to {:+.1f}".format(*record["interval_95"])),
    ("own rhyme", "own", "+.1f"),
    ("third rhyme", "third", "+.1f"),
    ("same rhyme", "same", "+.1f"),
    ("random", "random", "+.1f"),
    ("p", "p", ".2g"),
)
"""Columns of tables of the records that `_record` returns."""


def _pick(measure: str, *index: int) -> Pick:
    """Selects one entry of a measure of `CoupletEffects` in every draw.

    Arguments:
        measure: "effects", "own_effects" or "kl" by (layer, role), "ways" or "own_ways" by set of positions.
        index: indices of the entry.
    """
    return lambda read: getattr(read, measure)[:, *index]
