"""Is the rhyme of a couplet chosen before its second line, or at its end? Patched with controls.

Two couplets differ in the end of their first line alone, words of two families of rhymes. States of the one
are put into the other, layer by layer and role by role (stages/causal/grids/line_patching.py), and P(rhymes
with the other) is read at the end of line 2, by all words of that family but both ends themselves. What
becomes of its own rhyme is told beside it and decides nothing: any other state takes from that. That the end
of line 1 itself turns the end of line 2 says only that the rhyme is read.

*Planned* is what Lindsey et al. 2025 ("On the Biology of a Large Language Model", planning in poems) set
against improvisation, as far as patching can tell: a state at the line break or the first token of line 2
that alone turns the end. *Improvised*: the last token, and nothing between, reads the other rhyme, and the
end turns. Turns: beyond chance, and by at least `least` of what the other couplet does whole. Either, both or
neither may be so. What is asked is which rhyme comes, not which of its words.

Layer and role are chosen on half of the pairs and scored on the other half. Null: states under a third rhyme,
under another word of the same rhyme, and random directions as long, put in likewise; told is the strictest of
the three. Positions are no null, as a plan may lie at several: the map shows them all. Pairs count whose two
ends the model rhymes with, and nothing is claimed of a model that does not end couplets on their own rhyme
rather than on others.

What comes before the end is asked as well: whether the state that turns it changes next tokens on the way.
There a third rhyme is no null, as it would change them as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...stages.causal.controls import CHANCE
from ...stages.logits.lens import format_token
from ...store.arrays import Floats
from ..claim import Claim
from ..material.answers import KNOWN, named, require_next
from ..material.facts.known import NO_CONTROLS
from ..settings import ControlSettings, Count, ModelSettings, Share, setting
from ..views import Data, Heatmap, Note, Table, Text, Tokens, View, together
from ..workflow import ModelWorkflow, Nodes
from .couplet_patches import KINDS, PLAN, ROLES, WAYS, CoupletPatches, PairsRead

__all__ = ["CoupletPlanning", "CoupletPlanningSettings"]

BEFORE, BETWEEN, DIRECT = range(len(WAYS))
UNIT = "pp"
VERDICTS = {
    (True, False): (
        "Planned: a state before line 2 alone turns its end, and what the last token reads of the end of "
        "line 1 itself does not."
    ),
    (True, True): (
        "Both: a state before line 2 alone turns its end, and so does what the last token reads of the end "
        "of line 1 itself."
    ),
    (False, True): (
        "Improvised: what the last token reads of the end of line 1 itself turns the end of line 2; the "
        "state before line 2 that does most does not."
    ),
    (False, False): (
        "Neither: no state before line 2, and nothing that the last token reads of the end of line 1 itself, "
        "turns the end of line 2."
    ),
}
"""By whether the state before line 2 turns the end, and what the last token reads itself."""
LATE = (
    "On the way: states within line 2 turn its end; no single state before it does, nor what the last token "
    "reads of the end of line 1 itself."
)
"""Where neither does, and all states between together do."""
ON_THE_WAY: Mapping[str, Any] = {"kinds": ("same", "random"), "unit": "nats"}
"""What next tokens before the end are held against."""
Pick = Callable[[PairsRead], Floats]
"""A number of every draw of a result."""


@dataclass(frozen=True)
class CoupletPlanningSettings(ControlSettings, ModelSettings):
    """What `--set` can change."""

    pairs: Count = setting(24, "pairs layer and role are chosen on, and as many that are scored; at most 24")
    donors: Count = setting(2, "of every kind of control, per pair scored")
    least: Share = setting(
        0.1, "of what the other couplet does whole, for a state to be said to turn the end"
    )


class CoupletPlanning(ModelWorkflow):
    """States of another couplet, put in by layer and role."""

    name = "couplet_planning"
    question = "Is the rhyme of a couplet chosen before its second line, or at its end?"
    settings_type = CoupletPlanningSettings
    settings: CoupletPlanningSettings

    def plan(self) -> Nodes:
        """Patching experiments on the pairs to choose on, the pairs to score, and control donors."""
        require_next(self.subject)
        given = self.settings
        self.patches = CoupletPatches(self.subject, given.pairs, given.donors, given.seed)
        return {name: self.on_model(self.patches.experiment(name)) for name in ("choice", "scored", *KINDS)}

    # -- what came out

    @cached_property
    def read(self) -> Mapping[str, PairsRead]:
        """Every result, as numbers of its draws."""
        patches = self.patches
        return {
            name: PairsRead(
                self.result(name).load(),
                patches.choice if name == "choice" else patches.scored,
                patches.donors.get(name, 1),
            )
            for name in self.nodes
        }

    def values(self, name: str, pick: Pick) -> Floats:
        """A number of the pairs that count, [pair, ...]; of donors [pair, donor, ...]."""
        found, count = pick(self.read[name]), self.patches.donors.get(name, 0)
        if count:
            found = found.reshape(-1, count, *found.shape[1:])
        known: Floats = found[self.read["choice" if name == "choice" else "scored"].is_known]
        return known

    @cached_property
    def rhymes(self) -> Claim:
        """Whether couplets end on their own rhyme, of all pairs to score."""
        given, found = self.settings, self.read["scored"].rhymes
        text = "the end of line 2 rhymes with line 1 more often than under the line 1 of the other couplet"
        return Claim.paired(text, found, "draws of a sign for each pair", given, unit=UNIT)

    @property
    def fewest(self) -> int:
        """Pairs to score on that must count. Of fewer, more than one draw of a null in 40 is the other
        couplet itself in all of them, so that what turns every end would be no more than chance."""
        return math.ceil(math.log(2 / CHANCE) / math.log(1 + min(self.patches.donors.values())))

    @cached_property
    def not_claimed(self) -> str:
        """Why nothing is claimed; empty where something is."""
        if not self.settings.controls:
            return NO_CONTROLS
        counts = [int(self.read[name].is_known.sum()) for name in ("choice", "scored")]
        if counts[0] >= KNOWN and counts[1] >= self.fewest and self.rhymes.is_beyond_chance:
            return ""
        pairs = len(self.patches.choice), len(self.patches.scored)
        return (
            f"{self.subject.name} ends both couplets on words that rhyme in {counts[0]} of {pairs[0]} pairs "
            f"to choose on and {counts[1]} of {pairs[1]} to score on, of which {KNOWN} and {self.fewest} are "
            f"needed; words that rhyme with line 1 are {self.rhymes.effect:+.1f} pp likelier than under "
            "another line 1: nothing is claimed."
        )

    def _finding(self, claim: str, effects: Floats, others: Floats, of: str, unit: str = UNIT) -> Claim:
        return Claim.over(claim, effects, others, of, self.settings, unit=unit, held_out=True)

    def beside(
        self, claim: str, pick: Pick, *, kinds: tuple[str, ...] = tuple(KINDS), unit: str = UNIT
    ) -> Claim:
        """A claim beside the kind of donors that reaches it most often, the first of equal ones."""
        effects = self.values("scored", pick)
        return max(
            (self._finding(claim, effects, self.values(kind, pick), KINDS[kind], unit) for kind in kinds),
            key=lambda claim: claim.p_value,
        )

    def layer(self, role: int) -> int:
        """The layer after which a role's state does most on the pairs to choose on."""
        return int(self.values("choice", lambda read: read.effects).mean(0)[:, role].argmax())

    @cached_property
    def site(self) -> tuple[int, int]:
        """Layer and role of the state before line 2 with the largest mean effect on pairs to choose on."""
        mean = self.values("choice", lambda read: read.effects).mean(0)[:, list(PLAN)]
        layer, role = np.unravel_index(int(mean.argmax()), mean.shape)
        return int(layer), PLAN[int(role)]

    @cached_property
    def _claims(self) -> tuple[Claim, ...]:
        """That the model rhymes; the state before line 2; all of them; all between; none of them; and what
        comes before the end."""
        layer, role = self.site
        where = f"the state of the other couplet at the {ROLES[role]} after layer {layer}"
        likelier = "its rhyme likelier at the end of line 2"
        return (
            self.rhymes,
            self.beside(f"{where} makes {likelier}", _effect(layer, role)),
            *(
                self.beside(
                    f"states of the other couplet at {WAYS[way]}, in every layer, make {likelier}", _way(way)
                )
                for way in (BEFORE, BETWEEN)
            ),
            self.beside(
                "the end of line 1 of the other couplet, read by the last token alone while all between them "
                f"is held, makes {likelier}",
                _way(DIRECT),
            ),
            self.beside(f"{where} changes next tokens on the way", _kl(layer, role), **ON_THE_WAY),
        )

    def claims(self) -> Sequence[Claim]:
        """Whether couplets rhyme, and what each state and each way does to the end of line 2."""
        return self._claims

    def turns(self, finding: Claim) -> bool:
        """Whether an effect on the end is beyond chance, and enough of the whole."""
        return finding.is_beyond_chance and finding.effect >= self.settings.least * self.total

    @cached_property
    def total(self) -> float:
        """How far the other couplet, whole, raises P(rhymes with it), pp."""
        return float(self.values("scored", lambda read: read.total).mean())

    @property
    def verdict(self) -> str:
        """Sentence that says plan, improvisation, both or neither, with the share of each way."""
        _, site, *ways, _ = self._claims
        turns = self.turns(site), self.turns(ways[DIRECT])
        is_late = not any(turns) and self.turns(ways[BETWEEN])
        heard = "; ".join(
            f"read by {name}, {each.effect:+.1f}" for each, name in zip(ways, WAYS, strict=True)
        )
        return (
            f"{LATE if is_late else VERDICTS[turns]} The other couplet whole raises P(rhymes with it) by "
            f"{self.total:.1f} pp; {heard}. Turns: beyond chance, and by at least "
            f"{100 * self.settings.least:g} % of that."
        )

    def claims_caption(self) -> str:
        """Unit of the effects, and the pairs on which the state was chosen and scored."""
        chosen, scored = (int(self.read[name].is_known.sum()) for name in ("choice", "scored"))
        return (
            "The other couplet: the same words with another rhyme at the end of line 1. pp: percentage "
            f"points of P(rhymes with it) at the end of line 2. Scored are {scored} of "
            f"{len(self.patches.scored)} "
            "pairs, those whose two ends the model rhymes with; layer and place were chosen on "
            f"{chosen} other pairs, among {len(PLAN) * self.subject.config.num_layers}."
        )

    def views(self) -> Iterator[View]:
        """The verdict; the map; roles and ways in numbers; a couplet as text."""
        yield Data(json={**self.subject.about, "pairs": self._pairs()})
        if self.not_claimed:
            return
        yield Note(title="Plan or improvisation?", text=self.verdict, json={"verdict": self.verdict})
        maps = (
            self._map("scored", "States of the other couplet", "mean over pairs"),
            self._map("third", "States under a third rhyme", "mean over pairs and donors: what chance does"),
        )
        title = f"Where {self.subject.name} keeps the rhyme of a couplet"
        caption = "How far one state turns the end of line 2"
        yield from together("couplet_planning", title, *maps, caption=caption)
        yield from self._roles()
        yield self._ways()
        yield self._example()

    def _pairs(self) -> list[dict[str, Any]]:
        """Every pair asked, and whether it counts."""
        return [
            {
                "text": each.pair.text(each.pair.end),
                "end": each.pair.end,
                "other": each.pair.other,
                "is_scored": name == "scored",
                "ends_on": named(self.subject, tops),
                "counts": bool(known),
            }
            for name in ("choice", "scored")
            for each, tops, known in zip(
                getattr(self.patches, name),
                self.read[name].unpatched_top,
                self.read[name].is_known,
                strict=True,
            )
        ]

    def _map(self, name: str, title: str, caption: str) -> Heatmap:
        """Mean effects by layer and role; both maps on one scale."""
        means = {each: self._mean(each) for each in ("scored", "third")}
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
            high=float(max(np.abs(each).max() for each in means.values())),
            diverging=True,
            upward=True,
            numbers="+.0f",
            framed=((layer, role, layer, role),),
            frame_name="chosen before line 2, on other pairs",
            sources=(name,),
            json={"effects" if name == "scored" else "effects_third": means[name]},
        )

    def _mean(self, name: str) -> Floats:
        """Over pairs and donors, [layer, role]."""
        values = self.values(name, lambda read: read.effects)
        found: Floats = values.reshape(-1, *values.shape[-2:]).mean(0)
        return found

    def _record(self, pick: Pick, own: Pick) -> dict[str, Any]:
        """An effect with its nulls, and what becomes of the couplet's own rhyme."""
        finding = self.beside("", pick)
        return {
            "effect": finding.effect,
            "interval_95": finding.spread,
            "own": float(self.values("scored", own).mean()),
            **{kind: float(self.values(kind, pick).mean()) for kind in KINDS},
            "p": finding.null.share_as_large(finding.effect),
            "is_beyond_chance": finding.is_beyond_chance,
        }

    def _on_the_way(self, pick: Pick) -> dict[str, Any]:
        """How far next tokens change before the end, with its nulls; Nones for the last token."""
        values = {kind: self.values(kind, pick) for kind in ("scored", *ON_THE_WAY["kinds"])}
        if np.isnan(values["scored"]).any():
            return dict.fromkeys((*values, "p"))
        finding = self.beside("", pick, **ON_THE_WAY)
        means = {kind: float(each.mean()) for kind, each in values.items()}
        return means | {"p": finding.null.share_as_large(finding.effect)}

    def _roles(self) -> Iterator[Table]:
        """Every role at the layer chosen on the other pairs: the end, and next tokens from there to it."""
        records = [
            {
                "role": name,
                "layer": (layer := self.layer(role)),
                **self._record(_effect(layer, role), _own_effect(layer, role)),
                "kl": self._on_the_way(_kl(layer, role)),
            }
            for role, name in enumerate(ROLES)
        ]
        yield Table.of(
            records,
            ("patched at", "role"),
            ("layer", "layer", "d"),
            *COLUMNS,
            strong=lambda each: each["is_beyond_chance"],
            title="The end of line 2, by states of the other couplet",
            caption="change: of P(rhymes with the other couplet), in pp, by its states; own rhyme: what "
            "becomes of P(rhymes with its own); by a third rhyme, by the same, by random: the change by "
            "states under such ends of line 1, or by random directions as long; p: the largest beside any of "
            "the three, of each row by itself; layers were chosen on other pairs; bold: beyond chance",
            sources=tuple(self.nodes),
            json={"roles": records},
        )
        heads = {"the other couplet": "scored", "the same rhyme": "same", "random": "random"}
        yield Table.of(
            [each for each in records if each["kl"]["p"] is not None],
            ("patched at", "role"),
            ("layer", "layer", "d"),
            *((head, lambda each, kind=kind: each["kl"][kind], ".4f") for head, kind in heads.items()),
            ("p", lambda each: each["kl"]["p"], ".2g"),
            title="Next tokens on the way, by the same states",
            caption="KL of next tokens in nats, mean from what is patched to the last token but one; words "
            "of one rhyme are often of one kind (she, we, he), so that more than under the same rhyme is not "
            "yet planning",
            sources=tuple(self.nodes),
        )

    def _ways(self) -> Table:
        """Table of how much of the effect each way carries."""
        records = [
            {"heard_by": name, **self._record(_way(way), _own_way(way))} for way, name in enumerate(WAYS)
        ]
        return Table.of(
            records,
            ("heard by", "heard_by"),
            *COLUMNS,
            strong=lambda each: each["is_beyond_chance"],
            title="Who must hear of the other rhyme",
            caption="as above, where these alone have states of the other couplet, or read its line 1, in "
            f"every layer; where all have, the change is {self.total:+.1f} pp",
            sources=tuple(self.nodes),
            json={"ways": records, "total": self.total},
        )

    def _example(self) -> Tokens:
        """The pair that counts whose whole effect is nearest to the mean, token by token."""
        read = self.read["scored"]
        total = np.where(read.is_known, read.total, np.nan)
        row = int(np.nanargmin(np.abs(total - np.nanmean(total))))
        each, effects = self.patches.scored[row], read.effects[row]
        tokens = tuple(format_token(text) for text in named(self.subject, each.ids))
        shown = np.full((len(effects), len(tokens)), np.nan)
        for role, positions in enumerate(each.roles):
            shown[:, list(positions)] = effects[:, [role]]
        layer, role = self.site
        own, other = named(self.subject, read.unpatched_top[row])
        (patched,) = named(self.subject, read.top[row, layer, [role]])
        ends = {"own": own, "other": other, "patched": patched}
        return Tokens(
            title=f"One couplet, token by token: {each.pair.end!r} becomes {each.pair.other!r}",
            caption="How far the state of each token turns the end, by layer; tokens between are patched "
            f"together. The model ends on {own!r}, of the other couplet on "
            f"{other!r}, and with its state at the {ROLES[role]} after layer {layer} on "
            f"{patched!r}. The pair is the one whose whole change is nearest to "
            "the mean.",
            texts=tuple(Text(tokens, values, f"layer {layer}") for layer, values in enumerate(shown)),
            value_name="change of P(rhymes)",
            unit=UNIT,
            high=float(np.nanmax(np.abs(shown))),
            diverging=True,
            sources=("scored",),
            json={"example": {"text": each.pair.text(each.pair.end), "ends_on": ends}},
        )


COLUMNS: tuple[tuple[Any, ...], ...] = (
    ("change", "effect", "+.1f"),
    ("95 %", lambda each: "{:+.1f} to {:+.1f}".format(*each["interval_95"])),
    ("own rhyme", "own", "+.1f"),
    ("by a third rhyme", "third", "+.1f"),
    ("by the same rhyme", "same", "+.1f"),
    ("by random", "random", "+.1f"),
    ("p", "p", ".2g"),
)
"""Of what `_record` gives."""


def _effect(layer: int, role: int) -> Pick:
    return lambda read: read.effects[:, layer, role]


def _own_effect(layer: int, role: int) -> Pick:
    return lambda read: read.own_effects[:, layer, role]


def _kl(layer: int, role: int) -> Pick:
    return lambda read: read.kl[:, layer, role]


def _way(way: int) -> Pick:
    return lambda read: read.ways[:, way]


def _own_way(way: int) -> Pick:
    return lambda read: read.own_ways[:, way]
