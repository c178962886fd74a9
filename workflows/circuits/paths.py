"""Which heads and MLPs say what a task needs, to whom? Path patching.

A sender is put to what it adds in the corrupted prompt, and only the receivers hear of it: the logits, or
queries, keys and values of heads, or MLPs; every other head is held (stages/circuits/paths.py; Wang et al.,
Interpretability in the Wild, 2023). One step back, the queries, keys and values of the heads that say most
are the receivers.

Defaults: copying of random tokens, and on shipped models facts, to the logits, and one step back. Senders are
chosen on half of a task's pairs and scored on the other half. Each stands beside random changes of what it
adds, as long at every position, on the same path. What is claimed is that it moves the answer further, the
way it did in the pairs it was chosen on, than these do any way, and the strongest head further than other
heads; beside it the same with its sign drawn in each pair. Unrelated prompts in the place of the corrupted
one are no null here: they take the answer away as well. Of a task that the model does not do nothing is
claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.causal.controls import Null, interval
from ...stages.circuits.strongest_paths import NONE, StrongestPaths, is_head
from ...stages.forward.edges.layout import INPUT, LOGITS
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import Claim, Controls
from ..settings import Count, Natural, TaskSettings, setting
from ..views import Bars, Data, Figure, Heatmap, Line, Table, View
from ..workflow import Nodes
from .tasks import NAMES, TaskWorkflow

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["PathPatchingTrace", "PathPatchingTraceSettings"]

HEAD, OTHER, QUIETEST = "strong head", "strong MLP or input", "quietest head"
CHANGES = "random changes of it as long, on the same path"
BESIDE: tuple[tuple[Any, ...], ...] = (
    ("random, 95 %", lambda each: "{low_95:+.3f} to {high_95:+.3f}".format(**each["random"])),
    ("further", "further", "+.3f"),
    ("p", "p", ".2g"),
)
"""Columns of a table that controls give."""
SIGNS = 200
"""Draws of signs, which cost no runs."""


@dataclass(frozen=True)
class PathPatchingTraceSettings(TaskSettings):
    """What `--set` can change."""

    controls: Natural = setting(
        20, "random changes as long that a sender is held against; 0: none, nothing is claimed"
    )
    pairs: Count = setting(8, "pairs senders are chosen on, and as many others they are scored on")
    receivers: tuple[str, ...] = setting(
        (LOGITS,), 'who hears of the change: logits, m4, a5.h0<q>; several as one: "a5.h0<q>+a5.h1<q>"'
    )
    mlps: Literal["recomputed", "held"] = setting(
        "recomputed", "MLPs on the way: computed anew, or held, which leaves the edge alone"
    )
    back: Natural = setting(1, "strongest heads whose queries, keys and values are asked next; 0: none")
    strongest: Count = setting(4, "heads, and as many others, that are listed with their null")


class PathPatchingTrace(TaskWorkflow):
    """The effects of every sender on each receiver, and of the strongest beside chance."""

    name = "path_patching"
    question = "Which heads and MLPs affect the answer, and through which later heads?"
    needs = "attention"
    done_node = "paths"
    settings_type = PathPatchingTraceSettings
    settings: PathPatchingTraceSettings

    def plan(self) -> Nodes:
        """Of each task the paths to the receivers, and to those one step back."""
        given = self.settings
        if not given.receivers:
            raise ConfigError(f"expected at least one receiver, such as {LOGITS!r}, found none")
        nodes: Nodes = {}
        for task in self.tasks:
            chosen_on, scored = self.pairs[task]
            for step, back in (("paths", 0), ("back", given.back)):
                if step == "back" and not back:
                    continue
                paths = StrongestPaths(
                    chosen_on=chosen_on,
                    pairs=scored,
                    receivers=given.receivers,
                    mlps=given.mlps,
                    strongest=given.strongest,
                    draws=given.controls,
                    back=back,
                    seed=given.seed,
                )
                paths.check(self.subject.config)
                nodes[f"{task}_{step}"] = self.on_model(paths)
        return nodes

    @cached_property
    def heard(self) -> list[_Heard]:
        """What every receiver hears in each task; those one step back after all others of the task."""
        found = []
        for task in self.tasks:
            for node in (name for name in (f"{task}_paths", f"{task}_back") if name in self.nodes):
                result = self.result(node).load()
                each = (result.isel(receiver=number) for number in range(result.sizes["receiver"]))
                found += [_Heard(task, node, one, self.settings.seed) for one in each]
        return found

    def claims(self) -> Iterator[Claim]:
        """What the strongest sender of each receiver does beyond random changes; of the heads that the
        receivers asked for hear, the strongest beyond others, and the quietest for comparison. Nothing of
        tasks that the model does not do."""
        for heard in self.heard:
            if heard.task in self.done:
                yield from self._claims(heard)

    def claims_caption(self) -> str:
        """How senders were chosen, or which tasks the model does not do."""
        count = self.settings.pairs
        return self.not_done or (
            f"Senders were chosen on {count} pairs of each task, among all that have a path, and scored on "
            f"{count} others; {self.settings.controls} random changes of each. {NAMES}"
        )

    def _claims(self, heard: _Heard) -> Iterator[Claim]:
        listed = [each for each in heard.listed if each["role"] != QUIETEST]
        heads = [each for each in listed if each["role"] == HEAD]
        among = heads if heads and not heard.is_back else listed
        strongest = max(among, key=lambda each: abs(each["chosen_effect"]))
        which = f"{heard.heads} heads" if among is heads else f"{heard.senders} senders"
        yield self._beyond(heard, strongest, f"the strongest of {which}")
        if among is not heads:
            return
        further = heard.beyond_heads(strongest)
        if further is not None:
            claim = f"{heard.task}: {strongest['sender']} moves it further than other heads do, any way"
            yield heard.claim(claim, further)
        for each in heard.listed:
            if each["role"] == QUIETEST:
                yield self._beyond(heard, each, f"the quietest of {which}", "for comparison, ")

    def _beyond(self, heard: _Heard, record: Mapping[str, Any], which: str, before: str = "") -> Claim:
        claim = (
            f"{before}{heard.task}: {record['sender']}, {which}, moves right over wrong "
            f"({record['effect']:+.3g} {heard.unit}) by what it says to {heard.receiver}"
        )
        claim += ", further than random changes as long do" if heard.has_controls else ""
        return heard.claim(claim, heard.beyond(record))

    def views(self) -> Iterator[View]:
        """What is claimed; what every receiver hears, by layer and head, and the strongest senders."""
        yield Data(json={**self.subject.about, "paths": [heard.to_json() for heard in self.heard]})
        for task in self.tasks:
            panels: list[View] = []
            for heard in (each for each in self.heard if each.task == task):
                grid = self._grid(heard)
                yield grid
                yield self._table(heard)
                panels += [grid, self._bars(heard)]
            yield Figure(
                name=f"path_patching_{task}",
                title=f"Who says what {self.subject.name} needs for {task}, to whom",
                caption=f"right over wrong answer without the change: {heard.clean:+.3g} {heard.unit}",
                panels=(*panels, *([self.findings] if self.findings.findings else [])),
                columns=2,
            )

    def _grid(self, heard: _Heard) -> Heatmap:
        """Mean effects by layer and head; MLPs are a column of their own."""
        heads = self.layout.num_heads
        values = np.full((self.layout.num_layers, heads + 1), np.nan)
        for name, effect in heard.effects.items():
            if name != INPUT:
                row, _, column = name[1:].partition(".h")
                values[int(row), int(column) if column else heads] = effect
        own = heard.effects.get(INPUT)
        said = "" if own is None else f"; the embedding itself {own:+.3f}"
        beside = [
            effect for each in self.heard if each.node == heard.node for effect in each.effects.values()
        ]
        strongest = heard.listed[0]["sender"] if heard.listed else ""
        layer, head = map(int, strongest[1:].split(".h")) if is_head(strongest) else (-1, -1)
        return Heatmap(
            title=f"{heard.task}: what is said to {heard.receiver}",
            caption=f"change of right over wrong answer ({heard.unit}) where one sender is put to what it "
            f"adds in the corrupted prompt, mean over {heard.pairs} held-out pairs{said}",
            values=values,
            rows=tuple(map(str, range(self.layout.num_layers))),
            columns=(*map(str, range(heads)), "MLP"),
            column_name="head",
            value_name="change",
            unit=heard.unit,
            # One scale for the receivers of a step: what one of them hardly hears looks so.
            high=float(np.abs(beside).max()),
            diverging=True,
            upward=True,
            framed=() if head < 0 else ((layer, head, layer, head),),
            frame_name="strongest head on other pairs",
            sources=(heard.node,),
        )

    def _bars(self, heard: _Heard) -> Bars:
        """Effects of the listed senders with their intervals, beside what random changes do."""
        listed = heard.listed
        random = [each["random"] for each in listed]
        return Bars(
            title=f"{heard.task}: the strongest senders to {heard.receiver}",
            caption=f"95 % intervals over {heard.pairs} held-out pairs; grey: random changes as long, median "
            "and 95 % of them",
            x=tuple(each["sender"] for each in listed),
            x_name="sender",
            y_name="change of right over wrong",
            unit=heard.unit,
            lines=(
                Line(
                    "in the corrupted prompt",
                    np.array([each["effect"] for each in listed]),
                    strong=True,
                    band=np.array([each["interval_95"] for each in listed]).T,
                ),
                Line(
                    "random changes",
                    np.array([each["median"] for each in random]),
                    control=True,
                    band=np.array([(each["low_95"], each["high_95"]) for each in random]).T,
                ),
            ),
            sources=(heard.node,),
        )

    def _table(self, heard: _Heard) -> Table:
        return Table.of(
            heard.listed,
            ("sender", "sender"),
            ("chosen as", "role"),
            ("on other pairs", "chosen_effect", "+.3f"),
            ("held out", "effect", "+.3f"),
            ("95 %", lambda each: "{:+.3f} to {:+.3f}".format(*each["interval_95"])),
            *(BESIDE if heard.has_controls else ()),
            strong=lambda each: each["is_beyond_chance"],
            title=f"{heard.task}: the strongest senders to {heard.receiver}",
            caption=f"Change of right over wrong answer in {heard.unit}, {heard.clean:+.3g} without any; "
            f"chosen among {heard.senders} senders, {heard.heads} of them heads, by pairs not scored. "
            "Random: changes as long, on the same path. Further: the way of the other pairs, beyond what "
            "random changes do any way; p: with signs drawn in each pair. Bold: beyond chance.",
            sources=(heard.node,),
        )


class _Heard:
    """What one receiver hears in a task: a result of `StrongestPaths`, of one receiver."""

    def __init__(self, task: str, node: str, found: xr.Dataset, seed: int) -> None:
        self.task, self.node, self._found, self._seed = task, node, found, seed
        self.receiver = str(found["receiver"].values).replace(LOGITS, f"the {LOGITS}")
        self.is_back = node.endswith("_back")
        self.pairs = found.sizes["pair"]
        self.unit = str(found["effect"].attrs["units"])
        self.clean = float(found["clean"].mean())
        names = found["sender"].values.tolist()
        self._effects = {
            name: effects
            for name, effects in zip(names, found["effect"].transpose("sender", "pair").values, strict=True)
            if np.isfinite(effects).all()
        }
        self.senders = len(self._effects)
        self.heads = sum(map(is_head, self._effects))
        self.has_controls = found.sizes["draw"] > 0

    @property
    def effects(self) -> dict[str, float]:
        """Means over held-out pairs of every sender that has a path."""
        return {name: float(each.mean()) for name, each in self._effects.items()}

    def beyond(self, record: Mapping[str, Any]) -> Floats:
        """Margin [pair] of a sender's effect, signed as in the pairs it was chosen on, over the mean absolute
        effect of random changes."""
        random = self._found["random"].isel(told=record["place"]).transpose("pair", "draw").values
        found: Floats = self._forward(record) - (np.abs(random).mean(1) if self.has_controls else 0.0)
        return found

    def beyond_heads(self, record: Mapping[str, Any]) -> Floats | None:
        """Margin [pair] over the mean absolute effect of the other heads; None without other heads."""
        others = [each for name, each in self._effects.items() if is_head(name) and name != record["sender"]]
        return self._forward(record) - np.abs(others).mean(0) if others else None

    def _forward(self, record: Mapping[str, Any]) -> Floats:
        found: Floats = np.sign(record["chosen_effect"]) * self._effects[record["sender"]]
        return found

    def null(self, place: int) -> Null:
        """Null distribution of a listed sender: means over pairs under each random change."""
        return Null(self._found["random"].isel(told=place).mean("pair").values, CHANGES, "either")

    def claim(self, text: str, further: Floats) -> Claim:
        """How much further a sender goes than its controls in each pair, [pair]."""
        signs = Controls(SIGNS if self.has_controls else 0, self._seed)
        of = "draws of a sign for each pair"
        return Claim.paired(text, further, of, signs, unit=self.unit, held_out=True)

    @cached_property
    def listed(self) -> list[dict[str, Any]]:
        """The senders that were chosen, the strongest first, the quietest head last."""
        chosen = self._found["chosen"].values.tolist()
        half = len(chosen) // 2
        roles = [*[HEAD] * half, *[OTHER] * half, QUIETEST]
        names = self._found["sender"].values.tolist()
        found = []
        for place, (number, role) in enumerate(zip(chosen, roles, strict=True)):
            if number == NONE:
                continue
            effects, null = self._effects[names[number]], self.null(place)
            effect = float(effects.mean())
            record = {
                "sender": names[number],
                "role": role,
                "place": place,
                "chosen_effect": float(self._found["chosen_effect"].values[number]),
                "effect": effect,
                "interval_95": interval(effects, seed=self._seed),
                "random": null.to_json(effect),
            }
            claim = self.claim("", self.beyond(record))
            record["further"] = claim.effect
            found.append({**record, "p": claim.p_value, "is_beyond_chance": claim.is_beyond_chance})
        return found

    def to_json(self) -> dict[str, Any]:
        """Record of a document."""
        return {
            "task": self.task,
            "receiver": self.receiver,
            "is_step_back": self.is_back,
            "unit": self.unit,
            "clean": self.clean,
            "pairs": self.pairs,
            "heads_looked_at": self.heads,
            "senders_looked_at": self.senders,
            "effects": self.effects,
            "told": [{name: one for name, one in each.items() if name != "place"} for each in self.listed],
        }
