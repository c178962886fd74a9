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
"""Indices into WAYS: states before line 2, all states between line 1 and the last token, and direct reading
of line 1 by the last token."""
UNIT = "pp"
"""Unit of effects: percentage points of the probability that line 2 ends on a rhyme of the other couplet."""
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
"""Verdict by (whether the state before line 2 changes the rhyme, whether what the last token reads of line 1
itself does)."""
LATE = (
    "On the way: all states between line 1 and the last token together change the rhyme at the end of line "
    "2; no single state before line 2 does, nor what the last token reads of the end of line 1 itself."
)
"""Verdict if neither of these changes the rhyme, but all states between line 1 and the last token together
do."""
ON_THE_WAY: Mapping[str, Any] = {"kinds": ("same", "random"), "unit": "nats"}
"""Kinds of controls, and unit, of the claim about next tokens within line 2."""
Pick = Callable[[CoupletEffects], Floats]
"""Function that selects a measure of a result, [draw], such as the effect of one layer and role."""


@dataclass(frozen=True)
class CoupletPlanningSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `couplet_planning`: numbers of pairs and controls, and what counts as a change
    of the rhyme."""

    pairs: Count = setting(
        24, "pairs to choose layer and role on, and as many held-out pairs to score; at most 24"
    )
    donors: Count = setting(2, "control donors of every kind per pair to score")
    least: Share = setting(
        0.1, "least share of the whole other couplet's effect for a patch to count as changing the rhyme"
    )


class CoupletPlanning(ModelWorkflow):
    """Workflow that asks whether a model plans the rhyme of a couplet: patches states of a couplet with
    another rhyme, by layer and position."""

    name = "couplet_planning"
    question = "Is the rhyme of a couplet chosen before its second line, or at its end?"
    settings_type = CoupletPlanningSettings
    settings: CoupletPlanningSettings

    def plan(self) -> Nodes:
        """Nodes that patch pairs to choose on, pairs to score, and each kind of control donors."""
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
        """Effects in every result of patching, by name of the result."""
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
        """Measure of a result for the pairs whose couplets the model ends on rhymes: [pair, ...], or [pair,
        donor, ...] for control donors.

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
        """Claim that the model rhymes, over all pairs of the second half."""
        text = (
            "the probability that line 2 ends on a rhyme of line 1 is higher than after line 1 of the other "
            "couplet"
        )
        of = "draws with a random sign of the difference in each pair"
        return Claim.paired(text, self.unpatched["scored"].rhymes, of, self.settings, unit=UNIT)

    @property
    def fewest(self) -> int:
        """Smallest number of pairs of the second half that the model must end on rhymes, for a claim.

        A draw of the null picks, in each pair, the other couplet or one of its donors. With fewer pairs, more
        than CHANCE / 2 of the draws would pick the other couplet in all of them, and equal the effect
        itself."""
        # Each draw picks the other couplet with probability 1 / (1 + donors) in each pair.
        return math.ceil(math.log(2 / CHANCE) / math.log(1 + min(self.patches.donors.values())))

    @cached_property
    def not_claimed(self) -> str:
        """Reason why nothing is claimed: the model ends too few pairs on rhymes, or rhymes no more than by
        chance; empty otherwise."""
        if not self.settings.controls:
            return NO_CONTROLS
        counts = [int(self.unpatched[name].is_known.sum()) for name in ("choice", "scored")]
        if counts[0] >= KNOWN and counts[1] >= self.fewest and self.rhymes.is_beyond_chance:
            return ""
        pairs = len(self.patches.choice), len(self.patches.scored)
        return (
            f"{self.subject.name} ends both couplets on words that rhyme in {counts[0]} of {pairs[0]} pairs "
            f"to choose on and in {counts[1]} of {pairs[1]} pairs to score on; a claim needs {KNOWN} and "
            f"{self.fewest}. The probability that line 2 rhymes with line 1 is {self.rhymes.effect:+.1f} "
            "percentage points above that after another line 1: nothing is claimed."
        )

    def _finding(self, text: str, effects: Floats, controls: Floats, of: str, unit: str = UNIT) -> Claim:
        """Claim about the mean of effects, [pair], compared with those of control donors, [pair, donor]."""
        return Claim.over(text, effects, controls, of, self.settings, unit=unit, held_out=True)

    def strictest(
        self, text: str, pick: Pick, *, kinds: tuple[str, ...] = tuple(KINDS), unit: str = UNIT
    ) -> Claim:
        """Claim about a measure of the pairs to score, compared with the kind of control that gives the
        largest p-value.

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
        """Layer at which patching a role has the largest mean effect on the pairs to choose on. role: index
        into ROLES."""
        return int(self.values("choice", lambda result: result.effects).mean(0)[:, role].argmax())

    @cached_property
    def site(self) -> tuple[int, int]:
        """(layer, index into ROLES) of the state before line 2 that has the largest mean effect on the pairs
        to choose on."""
        mean = self.values("choice", lambda result: result.effects).mean(0)[:, list(PLAN)]
        layer, role = np.unravel_index(int(mean.argmax()), mean.shape)
        return int(layer), PLAN[int(role)]

    @cached_property
    def _claims(self) -> tuple[Claim, ...]:
        """All claims in order: that the model rhymes; about the chosen state before line 2; about each of
        WAYS, patched in every layer; about next tokens within line 2."""
        layer, role = self.site
        cause = f"patching the other couplet's state at the {ROLES[role]} after layer {layer}"
        raises = "raises the probability that line 2 ends on a rhyme of the other couplet"
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
        """Whether a patch changes the rhyme: its effect is beyond chance, and at least the share
        settings.least of the effect of the whole other couplet."""
        return claim.is_beyond_chance and claim.effect >= self.settings.least * self.total

    @cached_property
    def total(self) -> float:
        """Change of the other couplet's rhyme probability when all states come from the other couplet, mean
        over pairs, pp."""
        return float(self.values("scored", lambda result: result.total).mean())

    @property
    def verdict(self) -> str:
        """Verdict in words: planned, improvised, both, neither or on the way; with the effects of the whole
        other couplet and of each of WAYS."""
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
        """Caption of the claims: what the other couplet and pp are, and on which pairs layer and position
        were chosen and scored."""
        chosen_on, scored = (int(self.unpatched[name].is_known.sum()) for name in ("choice", "scored"))
        return (
            "The other couplet has the same words, except for another rhyme at the end of line 1. Effects "
            "are changes of the probability that line 2 ends on a word that rhymes with the other couplet, "
            f"in percentage points (pp). Claims are about {scored} of {len(self.patches.scored)} pairs of "
            "couplets, those that the model ends on their own rhymes. Layer and position were chosen on "
            f"{chosen_on} other pairs, among {len(PLAN) * self.subject.config.num_layers} combinations."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: the verdict, heatmaps of effects, tables by role and by set of positions,
        and one couplet as text."""
        yield Data(json={**self.subject.about, "pairs": self._pairs()})
        if self.not_claimed:
            return
        yield Note(title="Plan or improvisation?", text=self.verdict, json={"verdict": self.verdict})
        maps = (
            self._map("scored", "States of the other couplet", "the other couplet, mean over pairs"),
            self._map(
                "third",
                "Control: states with a third rhyme",
                "a couplet with a third rhyme, mean over pairs and such couplets",
            ),
        )
        title = f"Positions and layers of {self.subject.name} that change the rhyme of a couplet"
        caption = (
            "Each cell: probability that line 2 ends on a rhyme of the other couplet with one residual state "
            "patched, minus that without, in percentage points (pp). Row: layer after which it is patched; "
            "column: its position. The other couplet differs only in the last word of line 1."
        )
        yield from together("couplet_planning", title, *maps, caption=caption)
        yield from self._roles_tables()
        yield self._ways_table()
        yield self._example()

    def _pairs(self) -> list[dict[str, Any]]:
        """JSON records of all pairs: texts, the words that the model ends them on, and whether claims are
        about them."""
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

    def _map(self, name: str, title: str, donor: str) -> Heatmap:
        """Heatmap of mean effects in pp, [layer, role].

        Arguments:
            name: "scored" or "third", which share one colour scale.
            title: title of the heatmap.
            donor: the couplet that the patched states are from, for the caption.
        """
        means = {result: self._mean(result) for result in ("scored", "third")}
        layer, role = self.site
        return Heatmap(
            title=title,
            caption="Each cell: probability that line 2 ends on a rhyme of the other couplet with one state "
            f"patched from {donor}, minus that without, in percentage points (pp). Row: layer after which it "
            "is patched; column: its position. Framed: the state before line 2 that was chosen on other "
            "pairs.",
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
        """Mean effects of one result over pairs and donors, in pp, [layer, role]."""
        values = self.values(name, lambda result: result.effects)
        mean: Floats = values.reshape(-1, *values.shape[-2:]).mean(0)
        return mean

    def _record(self, pick: Pick, pick_own: Pick) -> dict[str, Any]:
        """JSON fields of an effect: its value, interval, controls and p-value, and the change of the
        couplet's own rhyme.

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
        """JSON fields of the KL of next tokens within line 2: its value, controls and p-value; all None for
        the last token, after which line 2 has none."""
        values = {kind: self.values(kind, pick) for kind in ("scored", *ON_THE_WAY["kinds"])}
        # No position lies from the last token to the last but one: its KL is NaN.
        if np.isnan(values["scored"]).any():
            return dict.fromkeys((*values, "p"))
        finding = self.strictest("", pick, **ON_THE_WAY)
        means = {kind: float(kl.mean()) for kind, kl in values.items()}
        return means | {"p": finding.p_value}

    def _roles_tables(self) -> Iterator[Table]:
        """Tables with a row per role, each at the layer chosen on other pairs: change of the rhyme at the end
        of line 2, and KL of next tokens within it."""
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
            caption="One row per position whose residual state is patched with that of the other couplet, "
            "after the layer chosen on other pairs. Change: probability that line 2 ends on a rhyme of the "
            "other couplet, patched minus unpatched, in percentage points (pp). Own rhyme: the same for a "
            "rhyme with the couplet's own line 1. Controls: states of couplets whose line 1 ends on a third "
            "rhyme (third rhyme) or on another word of the same rhyme (same rhyme), and random changes of "
            "the same norm (random). p: the largest p-value of the three controls, not corrected for the "
            "number of rows. Bold: beyond chance.",
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
            caption="One row per position whose residual state is patched. Cells: KL(unpatched run || "
            "patched run) of next-token distributions in nats, mean over positions from the patched one to "
            "the last but one of line 2. Columns: states of the other couplet; controls, states of couplets "
            "with the same rhyme and random changes of the same norm. Words of one rhyme often have one part "
            "of speech (she, we, he). So an effect larger than that of the same rhyme does not show planning "
            "by itself.",
            sources=tuple(self.nodes),
        )

    def _ways_table(self) -> Table:
        """Table with a row per set of positions of WAYS, patched in every layer."""
        records = [
            {"heard_by": name, **self._record(_pick("ways", index), _pick("own_ways", index))}
            for index, name in enumerate(WAYS)
        ]
        return Table.of(
            records,
            ("patched at", "heard_by"),
            *COLUMNS,
            strong=lambda record: record["is_beyond_chance"],
            title="Rhyme at the end of line 2, by positions patched in every layer",
            caption="One row per set of positions whose states are replaced by those of the other couplet, "
            "in every layer. Change: probability that line 2 ends on a rhyme of the other couplet, patched "
            "minus unpatched, in percentage points (pp). Own rhyme: the same for a rhyme with the couplet's "
            "own line 1. Controls: states of a couplet with a third rhyme, of one with the same rhyme, and "
            "random changes. With all positions patched, the change is "
            f"{self.total:+.1f} pp. p: the largest p-value of the three controls. Bold: beyond chance.",
            sources=tuple(self.nodes),
            json={"ways": records, "total": self.total},
        )

    def _example(self) -> Tokens:
        """View of one couplet with the effect of patching each token by layer; the pair is the one whose
        effect of the whole other couplet is nearest to the mean."""
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
            caption="One row per layer: the couplet, token by token. Shade: change of the probability that "
            "it ends on a rhyme of the other couplet, in percentage points (pp), when the state of that "
            "token after that layer is patched from the other couplet. The tokens in the middle of line 2 "
            f"are patched together. The model ends this couplet on {own_end!r} and the other couplet on "
            f"{other_end!r}. With the other's state at the {ROLES[role]} after layer {layer}, it ends this "
            f"couplet on {patched!r}. Shown is the pair whose effect of the whole other couplet is nearest "
            "to the mean.",
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
"""Columns of the tables whose rows are made by `_record`."""


def _pick(measure: str, *index: int) -> Pick:
    """Function that selects one entry of a measure of `CoupletEffects` in every draw.

    Arguments:
        measure: "effects", "own_effects" or "kl" by (layer, role), "ways" or "own_ways" by set of positions.
        index: indices of the entry.
    """
    return lambda read: getattr(read, measure)[:, *index]
