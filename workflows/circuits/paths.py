"""Which heads and MLPs affect the answer, and through which later heads? Path patching.

The output of a sender (a head, an MLP or the embedding) is replaced by its output in the corrupted prompt, on
its paths to the receivers only: the logits, or queries, keys and values of heads, or MLPs. All other heads
keep their clean outputs (stages/circuits/paths.py; Wang et al. 2023, "Interpretability in the Wild", section
3). One step back, the receivers are the queries, keys and values of the heads with the largest effect on the
logits.

Senders are chosen on half of a task's pairs and scored on the held-out half. Controls are random changes of
the sender's output with the same norm at every position, on the same path. The first claim is that the
effect, signed as on the pairs it was chosen on, exceeds the mean absolute effect of these controls; the
second that the strongest head exceeds the other heads in the same way. The null distribution draws the sign
of the excess at random in each pair. Unrelated prompts in place of the corrupted one would be no null, as
they remove the answer too. Nothing is claimed of a task that the model does not do.

Default tasks: copying of random tokens, for shipped models also facts.
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
from ..material.sizes import affordable
from ..settings import Count, Natural, TaskSettings, setting
from ..views import Bars, Data, Figure, Heatmap, Line, Table, View
from ..workflow import Nodes
from .tasks import NAMES, PROMPT_LENGTH, TaskWorkflow

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["PathPatchingTrace", "PathPatchingTraceSettings"]

HEAD, OTHER, QUIETEST = "strong head", "strong MLP or input", "quietest head"
"""Roles of the listed senders: as what `StrongestPaths` selected each of them."""
CHANGES = "random changes of the same norm, on the same path"
CONTROL_COLUMNS: tuple[tuple[Any, ...], ...] = (
    ("random, 95 %", lambda sender: "{low_95:+.3f} to {high_95:+.3f}".format(**sender["random"])),
    ("excess", "further", "+.3f"),
    ("p", "p", ".2g"),
)
"""Columns of the table of senders that are shown only if controls were run."""
SIGNS = 200
"""Number of draws of random signs; they need no further runs of the model."""


@dataclass(frozen=True)
class PathPatchingTraceSettings(TaskSettings):
    """Settings of the workflow `path_patching`: the tasks, the receivers of paths, and what happens to MLPs
    between."""

    controls: Natural = setting(
        20, "random changes of the same norm per sender, as controls; 0: none, and nothing is claimed"
    )
    receivers: tuple[str, ...] = setting(
        (LOGITS,), 'receivers of paths: logits, m4, a5.h0<q>; several as one receiver: "a5.h0<q>+a5.h1<q>"'
    )
    mlps: Literal["recomputed", "held"] = setting(
        "recomputed", "MLPs between sender and receiver: recomputed, or held at their clean outputs"
    )
    back: Natural | None = setting(
        None,
        "number of strongest heads whose queries, keys and values are receivers one step back; 0: no step; "
        "none: 1, or 0 for a large model",
    )
    strongest: Count = setting(4, "number of heads, and of MLPs or the input, listed with their controls")


class PathPatchingTrace(TaskWorkflow):
    """Workflow that patches paths: corrupts the output of one head, MLP or the embedding (sender) on its
    paths to a receiver only."""

    name = "path_patching"
    question = "Which heads and MLPs affect the answer, and through which later heads?"
    needs = "attention"
    done_node = "paths"
    settings_type = PathPatchingTraceSettings
    settings: PathPatchingTraceSettings

    @property
    def passes_per_pair(self) -> float:
        """See `TaskWorkflow`: one run per sender, and of the strongest senders one per random change."""
        n_runs = len(self.layout.sources) + 2 * self.settings.strongest * self.settings.controls
        # A run to the logits computes the layers above its sender, on average half of them, at the last
        # position alone, as attention is held.
        return n_runs / 2 / PROMPT_LENGTH

    @cached_property
    def back(self) -> int:
        """Number of heads one step back: the setting, or by default 1 if runs of each sender to the three
        inputs of such a head are affordable (material/sizes.py), else 0."""
        if self.settings.back is not None:
            return self.settings.back
        # Keys and values are read at all positions.
        n_runs = 3 * self.n_pairs * PROMPT_LENGTH
        return affordable(n_runs * self.operations_per_pair, 1, least=0)

    def plan(self) -> Nodes:
        """Nodes of each task: paths from all senders to the receivers of the settings, and to the inputs of
        the strongest heads, one step back."""
        settings = self.settings
        if not settings.receivers:
            raise ConfigError(f"expected at least one receiver, found none; set receivers={LOGITS}")
        nodes: Nodes = {}
        for task in self.tasks:
            chosen_on, scored = self.pairs[task]
            for step, back in (("paths", 0), ("back", self.back)):
                if step == "back" and not back:
                    continue
                paths = StrongestPaths(
                    chosen_on=chosen_on,
                    pairs=scored,
                    receivers=settings.receivers,
                    mlps=settings.mlps,
                    strongest=settings.strongest,
                    draws=settings.controls,
                    back=back,
                    seed=settings.seed,
                )
                nodes |= self.checked_nodes(task, {step: paths})
        return nodes

    @cached_property
    def receivers(self) -> list[_ReceiverEffects]:
        """Effects of all senders on every receiver, task by task; receivers one step back come last in each
        task."""
        effects = []
        for task in self.tasks:
            for node in (name for name in (f"{task}_paths", f"{task}_back") if name in self.nodes):
                result = self.result(node).load()
                by_receiver = (result.isel(receiver=i) for i in range(result.sizes["receiver"]))
                effects += [_ReceiverEffects(task, node, part, self.settings.seed) for part in by_receiver]
        return effects

    def claims(self) -> Iterator[Claim]:
        """Claims for each receiver about its strongest sender; for receivers that the settings name also
        about the strongest head compared with other heads and, for comparison, the weakest head. None about
        tasks that the model does not do."""
        for receiver in self.receivers:
            if receiver.task in self.done:
                yield from self._claims(receiver)

    def claims_caption(self) -> str:
        """Caption of the claims: selection and scoring of senders, or tasks that the model does not do."""
        count = self.n_pairs
        return self.not_done or (
            "A sender is a head or MLP whose output a receiver (a later input or the logits) reads. Its "
            "output is replaced by that of the corrupted prompt, on its paths to the receiver only. Senders "
            f"were chosen on {count} pairs of each task, among all with a path to the receiver. They are "
            f"scored on {count} held-out pairs. Control: {self.settings.controls} random changes per sender. "
            f"{NAMES}"
        )

    def _claims(self, receiver: _ReceiverEffects) -> Iterator[Claim]:
        """Claims about the senders to one receiver; see `claims`."""
        strong = [sender for sender in receiver.listed if sender["role"] != QUIETEST]
        heads = [sender for sender in strong if sender["role"] == HEAD]
        candidates = heads if heads and not receiver.is_back else strong
        # Chosen by the effects on the other pairs; the claim is about held-out ones.
        strongest = max(candidates, key=lambda sender: abs(sender["chosen_effect"]))
        total = f"{receiver.heads} heads" if candidates is heads else f"{receiver.senders} senders"
        yield self._beyond(receiver, strongest, f"the strongest of {total}")
        if candidates is not heads:
            return
        margin = receiver.beyond_heads(strongest)
        if margin is not None:
            text = (
                f"in the task {receiver.task}, the effect of {strongest['sender']} exceeds the mean absolute "
                "effect of the other heads"
            )
            yield receiver.claim(text, margin)
        for sender in receiver.listed:
            if sender["role"] == QUIETEST:
                yield self._beyond(receiver, sender, f"the weakest of {total}", "for comparison, ")

    def _beyond(
        self, receiver: _ReceiverEffects, sender: Mapping[str, Any], rank: str, before: str = ""
    ) -> Claim:
        """Claim that corrupting a sender's output changes the answer more than random changes of it do.

        Arguments:
            receiver: effects on the receiver.
            sender: record of the sender, of `_ReceiverEffects.listed`.
            rank: its rank in words, "the strongest of 36 heads".
            before: words that begin the sentence.
        """
        text = (
            f"{before}in the task {receiver.task}, corrupting {sender['sender']} ({rank}) on its paths to "
            f"{receiver.receiver} changes the right minus the wrong answer by {sender['effect']:+.3g} "
            f"{receiver.unit}"
        )
        # Without controls, `beyond` is the signed effect itself.
        text += "; excess over the effect of random changes of the same norm" if receiver.has_controls else ""
        return receiver.claim(text, receiver.beyond(sender))

    def views(self) -> Iterator[View]:
        """Views of each receiver: a heatmap of the effects of all senders, and a table and bars of the
        strongest."""
        yield Data(json={**self.subject.about, "paths": [receiver.to_json() for receiver in self.receivers]})
        for task in self.tasks:
            panels: list[View] = []
            of_task = [receiver for receiver in self.receivers if receiver.task == task]
            for receiver in of_task:
                grid = self._grid(receiver)
                yield grid
                yield self._table(receiver)
                panels += [grid, self._bars(receiver)]
            yield Figure(
                name=f"path_patching_{task}",
                title=f"Path patching in {self.subject.name}: {task}",
                caption="Effect of a sender (a head or MLP) on a receiver (what reads its output): change of "
                "the right minus the wrong answer when the sender's output is corrupted on its paths to the "
                "receiver only. In the clean run the difference is "
                f"{of_task[-1].clean:+.3g} {of_task[-1].unit}.",
                panels=(*panels, *([self.findings] if self.findings.findings else [])),
                columns=2,
            )

    def _grid(self, receiver: _ReceiverEffects) -> Heatmap:
        """Heatmap of mean effects by layer and head; MLPs are the last column."""
        heads = self.layout.num_heads
        values = np.full((self.layout.num_layers, heads + 1), np.nan)
        for name, effect in receiver.effects.items():
            if name != INPUT:
                # Names are "a3.h0" for head 0 of layer 3, and "m3" for the MLP of layer 3.
                layer, _, head = name[1:].partition(".h")
                mlp_column = heads
                values[int(layer), int(head) if head else mlp_column] = effect
        embedding = receiver.effects.get(INPUT)
        embedding_note = "" if embedding is None else f" For the embedding the change is {embedding:+.3f}."
        same_step = [other for other in self.receivers if other.node == receiver.node]
        effects_of_step = [effect for other in same_step for effect in other.effects.values()]
        framed: tuple[tuple[int, int, int, int], ...] = ()
        strongest = receiver.listed[0]["sender"] if receiver.listed else ""
        if is_head(strongest):
            row, column = map(int, strongest[1:].split(".h"))
            # A frame is (top, left, bottom, right): here a single cell.
            framed = ((row, column, row, column),)
        frame_note = " Framed: the head with the largest effect on other pairs." if framed else ""
        return Heatmap(
            title=f"{receiver.task}: effects of senders through {receiver.receiver}",
            caption="Each cell: one head (column) or MLP of one layer (row), the sender. Its output is "
            f"corrupted on its paths to {receiver.receiver} only. Value: right minus wrong answer "
            f"({receiver.unit}) in the corrupted run, minus the same in the clean run; mean over "
            f"{receiver.pairs} held-out pairs.{embedding_note}{frame_note}",
            values=values,
            rows=tuple(map(str, range(self.layout.num_layers))),
            columns=(*map(str, range(heads)), "MLP"),
            column_name="head",
            value_name="change",
            unit=receiver.unit,
            # One scale for all receivers of a step, so that small effects on one of them look small.
            high=float(np.abs(effects_of_step).max()),
            diverging=True,
            upward=True,
            framed=framed,
            frame_name="strongest head on other pairs",
            sources=(receiver.node,),
        )

    def _bars(self, receiver: _ReceiverEffects) -> Bars:
        """Bars of the listed senders' effects with their intervals, beside those of random changes."""
        listed = receiver.listed
        random = [sender["random"] for sender in listed]
        return Bars(
            title=f"{receiver.task}: the strongest senders to {receiver.receiver}",
            caption=f"x: sender, a head or MLP whose output is corrupted on its paths to {receiver.receiver} "
            "only. y: right minus wrong answer in the corrupted run, minus the same in the clean run. Lines: "
            f"95 % intervals over {receiver.pairs} held-out pairs. Grey: control, random changes of the "
            "sender's output of the same norm; median and range of 95 % of them.",
            x=tuple(sender["sender"] for sender in listed),
            x_name="sender",
            y_name="change of right minus wrong answer",
            unit=receiver.unit,
            lines=(
                Line(
                    "corrupted",
                    np.array([sender["effect"] for sender in listed]),
                    strong=True,
                    band=np.array([sender["interval_95"] for sender in listed]).T,
                ),
                Line(
                    "random changes",
                    np.array([null["median"] for null in random]),
                    control=True,
                    band=np.array([(null["low_95"], null["high_95"]) for null in random]).T,
                ),
            ),
            sources=(receiver.node,),
        )

    def _table(self, receiver: _ReceiverEffects) -> Table:
        """Table of the listed senders with their effects, controls and p-values."""
        return Table.of(
            receiver.listed,
            ("sender", "sender"),
            ("chosen as", "role"),
            ("on other pairs", "chosen_effect", "+.3f"),
            ("held out", "effect", "+.3f"),
            ("95 %", lambda sender: "{:+.3f} to {:+.3f}".format(*sender["interval_95"])),
            *(CONTROL_COLUMNS if receiver.has_controls else ()),
            strong=lambda sender: sender["is_beyond_chance"],
            title=f"{receiver.task}: the strongest senders to {receiver.receiver}",
            caption="One row per sender, a head or MLP whose output is corrupted on its paths to the "
            f"receiver only. Effect: change of the right minus the wrong answer, in {receiver.unit}; in the "
            f"clean run the difference is {receiver.clean:+.3g}. On other pairs: effect on the pairs on "
            "which senders were chosen. Held out: effect on held-out pairs, with its 95 % interval. Chosen "
            f"among {receiver.senders} senders, {receiver.heads} of them heads. Random: control, the effect "
            "of random changes of the sender's output of the same norm. Excess: effect, signed as on the "
            "other pairs, minus the mean absolute effect of random changes. p: of the excess, with random "
            f"signs in each pair as the null. Bold: beyond chance. {NAMES}",
            sources=(receiver.node,),
        )


class _ReceiverEffects:
    """Effects of all senders (heads, MLPs, embedding) on one receiver in one task."""

    def __init__(self, task: str, node: str, result: xr.Dataset, seed: int) -> None:
        """
        Arguments:
            task: name of the task.
            node: name of the result.
            result: the part of it for one receiver.
            seed: of intervals and of random signs.
        """
        self.task, self.node, self._result, self._seed = task, node, result, seed
        self.receiver = str(result["receiver"].values).replace(LOGITS, f"the {LOGITS}")
        self.is_back = node.endswith("_back")
        self.pairs = result.sizes["pair"]
        self.unit = str(result["effect"].attrs["units"])
        self.clean = float(result["clean"].mean())
        names = result["sender"].values.tolist()
        self._effects = {
            name: effects
            for name, effects in zip(names, result["effect"].transpose("sender", "pair").values, strict=True)
            # NaN: a sender without a path to the receiver.
            if np.isfinite(effects).all()
        }
        self.senders = len(self._effects)
        self.heads = sum(map(is_head, self._effects))
        self.has_controls = result.sizes["draw"] > 0

    @property
    def effects(self) -> dict[str, float]:
        """Mean effect over held-out pairs of every sender with a path to the receiver, by name."""
        return {name: float(effects.mean()) for name, effects in self._effects.items()}

    def beyond(self, sender: Mapping[str, Any]) -> Floats:
        """Effect of a sender minus the mean absolute effect of random changes of its output, [pair]; the
        effect is positive where it has the sign that it had on the pairs it was chosen on."""
        random = self._result["random"].isel(told=sender["place"]).transpose("pair", "draw").values
        excess: Floats = self._signed(sender) - (np.abs(random).mean(1) if self.has_controls else 0.0)
        return excess

    def beyond_heads(self, sender: Mapping[str, Any]) -> Floats | None:
        """Effect of a sender minus the mean absolute effect of all other heads, [pair]; None without other
        heads."""
        other_heads = [
            effects for name, effects in self._effects.items() if is_head(name) and name != sender["sender"]
        ]
        return self._signed(sender) - np.abs(other_heads).mean(0) if other_heads else None

    def _signed(self, sender: Mapping[str, Any]) -> Floats:
        """Effects of a sender, [pair], multiplied by the sign of its effect on the pairs that it was chosen
        on."""
        signed: Floats = np.sign(sender["chosen_effect"]) * self._effects[sender["sender"]]
        return signed

    def null(self, place: int) -> Null:
        """Null distribution of the sender at index `place` of `listed`: for each random change of its output,
        the mean effect over pairs."""
        return Null(self._result["random"].isel(told=place).mean("pair").values, CHANGES, "either")

    def claim(self, text: str, excess: Floats) -> Claim:
        """Claim that the mean excess of a sender over its controls is above that of random signs.

        Arguments:
            text: text of the claim.
            excess: effects of the sender minus the mean of its controls, [pair].
        """
        signs = Controls(SIGNS if self.has_controls else 0, self._seed)
        of = "draws with a random sign of the excess in each pair"
        return Claim.paired(text, excess, of, signs, unit=self.unit, held_out=True)

    @cached_property
    def listed(self) -> list[dict[str, Any]]:
        """Records of the senders that tables list: strongest heads, strongest other senders, then the weakest
        head."""
        selected = self._result["chosen"].values.tolist()
        # An odd number: as many heads as other senders, and one weakest head.
        half = len(selected) // 2
        roles = [*[HEAD] * half, *[OTHER] * half, QUIETEST]
        names = self._result["sender"].values.tolist()
        senders = []
        for place, (index, role) in enumerate(zip(selected, roles, strict=True)):
            # Fewer senders than asked for have a path to this receiver.
            if index == NONE:
                continue
            effects, null = self._effects[names[index]], self.null(place)
            effect = float(effects.mean())
            record = {
                "sender": names[index],
                "role": role,
                "place": place,
                "chosen_effect": float(self._result["chosen_effect"].values[index]),
                "effect": effect,
                "interval_95": interval(effects, seed=self._seed),
                "random": null.to_json(effect),
            }
            claim = self.claim("", self.beyond(record))
            record["further"] = claim.effect
            senders.append({**record, "p": claim.p_value, "is_beyond_chance": claim.is_beyond_chance})
        return senders

    def to_json(self) -> dict[str, Any]:
        """Record of the receiver for the JSON document."""
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
            "told": [
                {name: value for name, value in sender.items() if name != "place"} for sender in self.listed
            ],
        }
