"""What does a recurrent model no longer predict when one token is not written to its state? RWKV, end to end.

In a recurrent model later tokens read a token through the state to which it wrote. The answer shows the most
likely next tokens; the effective attention of the heads to each position; the effect of leaving out the write
of one token, in one layer at a time or in all layers; and the effect of scaling that write
(stages/causal/state_writes.py). These are state knockout and state steering of candle-mi's `rwkv_inference`.

Control: random values of equal norm, written in place of the selected write and left out in the same way.
Other positions would be no control, as recent writes are read more than old ones whatever they contain.
Defaults: the layer and kind of position at which leaving out such random values has the largest effect on
other shipped facts, and, for comparison, the smallest (material/edge_choice.py). The effect of the write
itself has no part in this choice. Otherwise the selected write would be the best of many by chance, even in a
model of random weights, as a token writes the same values in every prompt.

Later tokens also read a token through the token shift and through other layers; a knockout without effect
says nothing about these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.attention.flow import attention_flow, unpacked
from ...stages.causal.draws import AtOnce
from ...stages.causal.state_writes import WRITE_SCALES, RandomWrites, StateKnockout, StateSteering
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ..claim import CandidateEffects, Claim
from ..labelled import records, values_of
from ..material.answers import target_json, top_changed_json
from ..material.edge_choice import ROLES, Indices, PlaceWorkflow
from ..settings import MODEL_HELP, RECURRENT, ChosenPlaceSettings, Natural, setting
from ..views import (
    Attention,
    Data,
    Figure,
    Heatmap,
    Lines,
    Table,
    View,
    dash,
    dim,
)
from ..workflow import Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["RwkvInference", "RwkvInferenceSettings"]

CONTROLS = "random values of equal norm, written in its place and left out in the same way"
"""Name of the null distribution of a claim about the displayed prompt."""
FEW = 4
"""Number of random values written at each position of the other facts."""


@dataclass(frozen=True)
class RwkvInferenceSettings(ChosenPlaceSettings):
    """Settings of the workflow `rwkv_inference`: the prompt, and the state write that is left out and
    scaled."""

    model: str = setting(RECURRENT, MODEL_HELP)
    position: int | str | None = setting(
        None,
        "position of the write shown in full; none: the kind of position with the largest effect on other "
        "facts",
    )
    controls: Natural = setting(
        20, "number of random values in place of each write; 0: none, nothing is claimed"
    )
    scales: tuple[float, ...] = setting(WRITE_SCALES, "factors by which the selected write is multiplied")


class RwkvInference(PlaceWorkflow):
    """Workflow that leaves out or scales what one token writes to the recurrent state of RWKV."""

    name = "rwkv_inference"
    question = "What does a recurrent model no longer predict when one token is not written to its state?"
    needs = "state of RWKV"
    settings_type = RwkvInferenceSettings
    settings: RwkvInferenceSettings
    rule = "kind of position at which leaving out a write of random values changes"
    beside = "random values of equal norm, written in place of the writes and left out in the same way"

    writes = loaded("writes")
    """Result of leaving out each position's write in one layer at a time, in memory, [layer, position]; its
    variable kl is in nats."""
    controls = loaded("controls")
    """Result of leaving out random values in place of the writes at the candidate positions, in memory,
    [layer, position, draw_of_write]."""
    together = loaded("together")
    """Result of leaving out each position's writes in all layers at once, in memory, [layer, position] with a
    single layer."""

    def plan(self) -> Nodes:
        """Nodes that leave out every write, scale writes and leave out random values at the candidate
        positions, and intervene in other facts.

        Raises ConfigError, PromptError or InterventionError for a layer, position or scale that is invalid.
        """
        settings, layers = self.settings, self.subject.config.num_layers
        shared = self.read_place("last", settings.position)
        self.captured = self.subject.capture_weights(self.subject.pack([self.prompt]))
        pattern = self.captured[self.subject.attention_kind]
        response = tuple(
            StateSteering(positions=(key,), doses=settings.scales, **shared) for key in self.keys
        )
        # `cells` raises for invalid settings, so that nothing runs before they are found.
        for steering in response:
            steering.cells(self.subject.config)
        # Where only KL and logit difference are read, `top_k` 1 keeps stored results small.
        nodes = {
            "writes": self.on_model(StateKnockout(**shared)),
            # A window of all layers is one intervention, stored under a single layer.
            "together": self.on_model(StateKnockout(window=layers, **shared | {"top_k": 1})),
            "response": self.on_model(AtOnce(response)),
            "attention": attention_flow.on(pattern=pattern, query=self.query),
        }
        if not settings.controls:
            return nodes
        positions = tuple(dict.fromkeys((*self.keys, *self.roles.values())))
        random_writes = RandomWrites(
            positions=positions, draws=settings.controls, seed=settings.seed, **shared | {"top_k": 1}
        )
        # Not computed if the model knows too few facts for a claim.
        self.only_claims = ("controls", "scored")
        return {
            **nodes,
            "controls": self.on_model(random_writes),
            **self.facts_node(),
            **self._scored_node(),
        }

    def lost_here(self, key: int) -> Floats:
        """KL by layer when the write at position `key` of the displayed prompt is left out, in nats,
        [layer]."""
        return values_of(self.writes["kl"].sel(position=key), "layer")

    def _scored_node(self) -> Nodes:
        """Node that leaves out the writes at each role in the held-out facts, which score the choice; empty
        if the settings name the write."""
        if not self.is_chosen:
            return {}
        knockouts = (
            StateKnockout(tuple(fact.encoding.ids), tuple(fact.roles.values()), top_k=1)
            for fact in self.others[self.half :]
        )
        return {"scored": self.on_model(AtOnce(tuple(knockouts)))}

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> list[RandomWrites]:
        """Experiment on another fact that leaves out random values written at the key positions of
        `edges`."""
        positions = tuple(key for _, key in edges)
        return [RandomWrites(tokens, positions=positions, draws=FEW, seed=self.settings.seed, top_k=1)]

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """KL in nats by layer and role in other facts, [fact, layer, role]: of random values, to choose by;
        of the writes themselves, to score. See `PlaceWorkflow` for the arguments."""
        # A token writes the same in every prompt: a write chosen for its own effect, the largest of many by
        # chance, would have a large effect on held-out prompts too.
        random = values_of(self.result("facts")["kl"], "draw", "draw_of_write", "layer", "position")
        # The node "scored" holds only the second half of the facts, hence `scored - self.half` below.
        knockout = values_of(self.result("scored")["kl"], "draw", "layer", "position")
        # Axis 1: the random values of each write.
        return CandidateEffects(random[chosen_on].mean(1), knockout[scored - self.half], random[scored])

    @property
    def position(self) -> int:
        """Position of the selected write."""
        return self.edge[1]

    @property
    def selected(self) -> xr.Dataset:
        """Result of leaving out the selected write in the selected layer."""
        return self.writes.sel(layer=self.layer, position=self.position)

    @cached_property
    def response(self) -> xr.Dataset:
        """Result of multiplying the selected write by every factor, in memory, [layer, dose]."""
        return self.result("response").load().isel(draw=self.keys.index(self.position))

    def cause(self, layer: int, key: int) -> str:
        """Intervention in the displayed prompt, as claims begin: "leaving out the state write of '␣in' (2) in
        layer 3"."""
        return f"leaving out the state write of {self.token_label(key)} in layer {layer}"

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """Claim about leaving out one write of the displayed prompt, compared with random values in its
        place."""
        # Writes of other positions would be no control: recent writes are read most, whatever they contain.
        labels = {"layer": layer, "position": key}
        effect = float(self.writes.sel(labels)[measure])
        draws = self.controls.sel(labels)[measure].values
        return Claim.against(text, effect, draws, CONTROLS, **fields)

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """Intervention at a role of other facts, as claims begin: "leaving out the state write of the first
        position in layer 3"."""
        return f"leaving out the state write of {ROLES[role]} in layer {layer}"

    def views(self) -> Iterator[View]:
        """Views in reading order: next tokens, effective attention, effects of leaving out the selected write
        and every write, and of scaling."""
        names = [self.token_label(position) for position in range(len(self.encoding))]
        yield Data(json=self._about() | self.choice_json())
        yield self._next_tokens()
        if self.store is not None:
            yield self._attention()
        yield self._one_write(names)
        sweep = Heatmap.of(
            self.writes["kl"].transpose("layer", "position"),
            "Effect of leaving out a write, KL in nats",
            "Each cell: what one token (column) writes to the recurrent state of one layer (row) is left "
            "out. Value: KL of the last token's prediction from that of the unchanged run, in nats. Framed: "
            f"the selected write of {names[self.position]} in layer {self.layer}.",
            columns=tuple(names),
            column_name="writing token",
            low=0.0,
            framed=((self.layer, self.position, self.layer, self.position),),
            frame_name="the selected write",
            sources=("writes",),
            json={"sweep": {"kl_divergence": self.writes["kl"], "logit_diff": self.writes["logit_diff"]}},
        )
        yield sweep
        yield self._positions(names)
        curves = Lines.of(
            self.response["kl"].transpose("layer", "dose"),
            f"Effect of scaling the write of {names[self.position]}, KL in nats",
            f"x: factor by which the write of {names[self.position]} to the recurrent state of one layer is "
            "multiplied (0: left out; 1: unchanged). y: KL of the last token's prediction from that of the "
            f"unchanged run, in nats. One curve per layer; thick: layer {self.layer}.",
            x_name="factor of the write",
            low=0.0,
            strong=self.layer,
            sources=("response",),
        )
        yield curves
        yield self._scales(names)
        title = f"State writes of {self.subject.name} in '{format_text(self.prompt)}'"
        panels = (sweep, curves, self.findings)
        yield Figure(name="rwkv_inference", title=title, panels=panels, columns=2)

    def _next_tokens(self) -> Table:
        """Table of the most likely next tokens of the unchanged model."""
        columns = {"token_id": "baseline_id", "probability": "baseline_probability"}
        (rank,) = self.writes["baseline_id"].dims
        top = [
            {"rank": i, "token": self.subject.tokenizer.decode_token(row["token_id"]), **row}
            for i, row in enumerate(records(self.writes, str(rank), **columns), start=1)
        ]
        return Table.of(
            top,
            ("rank", "rank", "d"),
            ("token", lambda row: format_token(row["token"])),
            ("probability", "probability", format_probability),
            title=f"{self.subject.name} after '{format_text(self.prompt)}'",
            caption="The most likely next tokens of the unchanged model.",
            sources=("writes",),
            json={"top_tokens": top},
        )

    def _attention(self) -> Attention:
        """View of the effective attention of every head to every position."""
        assert self.store is not None
        kind = self.subject.attention_kind
        pattern = unpacked(self.captured.open(self.store)[kind]).transpose("layer", "head", ...)
        edge = self.result("attention").load()["from_query"].isel(key_position=self.position)
        weights = edge.transpose("layer", "head").values
        return Attention(
            title="Effective attention of each head",
            caption="Effective attention, for each head and token: how much the value that an earlier "
            "position wrote contributes to the head's output, as a share of all positive contributions. "
            "Negative ones are left out. Point at a token, or move with the arrow keys.",
            tokens=tuple(self.subject.token_labels(self.encoding.ids)),
            layers=tuple(pattern["layer"].values.tolist()),
            pattern=pattern.values,
            overview=weights,
            overview_name=f"effective attention from {self.token_label(self.query)} to "
            f"{self.token_label(self.position)}",
            layer=self.layer,
            head=int(weights[self.layer].argmax()),
            query=self.query,
            sources=("attention",),
        )

    def _one_write(self, names: Sequence[str]) -> Table:
        """Table of the tokens whose probability the knockout of the write changes most."""
        title = f"Without the write of {names[self.position]} in layer {self.layer}"
        return self.changed_table(self.selected, title, sources=("writes",))

    def _positions(self, names: Sequence[str]) -> Table:
        """Table with a row per token: KL when its write is left out, in the layer where this is largest, and
        in all layers."""
        kl, kl_all_layers = self.writes["kl"], self.together["kl"].isel(layer=0, drop=True)
        effects = self.writes.assign(
            largest=kl.max("layer"), best_layer=kl.argmax("layer"), all_layers=kl_all_layers
        )
        columns = {"layer": "best_layer", "kl": "largest", "kl_all_layers": "all_layers"}
        rows = [
            row | {"token": names[row["position"]]}
            for row in records(effects, "position", "position", **columns)
        ]
        return Table.of(
            rows,
            ("token", "token", str),
            ("KL, one layer", "kl", ".5f"),
            ("layer", "layer", lambda layer: dim(str(layer))),
            ("KL, all layers", "kl_all_layers", ".5f"),
            title="Effect of leaving out the writes of each token",
            caption="One row per token of the prompt. What it writes to the recurrent state is left out. KL: "
            "of the last token's prediction from that of the unchanged run, in nats. One layer: the write is "
            "left out in the layer where this has the largest KL. All layers: in all.",
            sources=("writes", "together"),
            json={"positions": rows},
        )

    def _scales(self, names: Sequence[str]) -> Table:
        """Table with a row per factor of the selected write, in the selected layer."""
        response = self.response.sel(layer=self.layer)
        response = response.assign(p_target=np.exp(response["target_logprob"]))
        columns = {"scale": "dose", "kl_divergence": "kl", "target_logit_diff": "logit_diff"}
        rows = [
            row | {"top_changed": top_changed_json(self.subject, response.isel(dose=i), "steered_prob")}
            for i, row in enumerate(records(response, "dose", "p_target", **columns))
        ]
        return Table.of(
            rows,
            ("factor", "scale", "{:g}x".format),
            ("KL", "kl_divergence", ".5f"),
            ("logit diff", lambda row: dash(row["target_logit_diff"], "+.4f"), str),
            ("p(target)", lambda row: dash(row["p_target"], ".4f"), str),
            ("largest change", lambda row: format_token(row["top_changed"][0]["token"])),
            title=f"Effect of scaling the write of {names[self.position]} in layer {self.layer}",
            caption="One row per factor: the write to the recurrent state is multiplied by it (0: left out; "
            "1: unchanged). KL: of the last token's prediction from that of the unchanged run, in nats. "
            "Logit diff: target logit of the unchanged run minus that with the scaled write. Largest change: "
            "token whose probability changes most.",
            sources=("response",),
            json={"steering": rows},
        )

    def _about(self) -> dict[str, Any]:
        """JSON fields on model, prompt and the selected write, named as in candle-mi's example."""
        selected = self.selected
        return {
            **self.subject.about,
            **target_json(self.subject, self.target, self.pieces),
            "prompt": self.prompt,
            "tokens": self.subject.token_texts(self.encoding.ids),
            "target_layer": self.layer,
            "knockout_position": self.position,
            "kl_divergence": selected["kl"],
            "target_logit_diff": selected["logit_diff"],
            "baseline_p_target": np.exp(selected["baseline_target_logprob"]),
            "ablated_p_target": np.exp(selected["target_logprob"]),
        }
