"""What does a recurrent model no longer predict when one token is not written to its state? RWKV, end to end.

A recurrent model reads a token later through the state it wrote to. Told are its most likely next tokens,
what its heads read of each position (the attention their recurrence amounts to), and what happens when the
write of one token is left out, in one layer at a time or in all at once, and when it is multiplied by
several scales (stages/causal/state_writes.py): candle-mi's `rwkv_inference`, state knockout and steering.

The selected write stands beside random values as long, written in its place and left out likewise: recent
writes are read more than old ones whatever they hold, so that other positions would be no control.
Defaults: the layer and kind of position where such random values matter most on other shipped facts, beside
the one where they matter least (material/edge_choice.py). The write itself has no part in that choice: chosen
for its own effect it would be the luckiest of many, in random weights too, as a token writes the same in
every prompt.

A token has two more ways to be read, the token shift and other layers: a write that does nothing says nothing
about them.
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
from ..material.answers import named, target_json, top_changed_json
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

OTHERS = "random values as long, written in its place"
FEW = 4
"""Number of random values in each of the other facts."""


@dataclass(frozen=True)
class RwkvInferenceSettings(ChosenPlaceSettings):
    """What `--set` can change."""

    model: str = setting(RECURRENT, MODEL_HELP)
    position: int | str | None = setting(
        None, "token whose write is shown; none: the kind of position that matters most on other facts"
    )
    controls: Natural = setting(
        20, "random values that the effect is held against, for each place; 0: none, nothing is claimed"
    )
    scales: tuple[float, ...] = setting(WRITE_SCALES, "what its write is multiplied by")


class RwkvInference(PlaceWorkflow):
    """Knockout of one write in full, and of all writes for comparison."""

    name = "rwkv_inference"
    question = "What does a recurrent model no longer predict when one token is not written to its state?"
    needs = "state of RWKV"
    settings_type = RwkvInferenceSettings
    settings: RwkvInferenceSettings
    rule = "kind of position whose write, were its values random, left out,"
    beside = "random values as long, written in their place"

    writes = loaded("writes")
    """Knockout of every write in every layer, [layer, position]."""
    controls = loaded("controls")
    """Random values in place of the candidates, [layer, position, draw_of_write]."""
    together = loaded("together")
    """Knockout of every write in all layers at once, [layer = 0, position]."""

    def plan(self) -> Nodes:
        """Knockouts of every write, scaled writes and random values at the candidates, and other facts."""
        given, layers = self.settings, self.subject.config.num_layers
        shared = self.read_place("last", given.position)
        self.captured = self.subject.capture_weights(self.subject.pack([self.prompt]))
        pattern = self.captured[self.subject.attention_kind]
        response = tuple(StateSteering(positions=(key,), doses=given.scales, **shared) for key in self.keys)
        for each in response:
            each.cells(self.subject.config)  # refuse wrong settings now, before anything runs
        nodes = {
            "writes": self.on_model(StateKnockout(**shared)),
            "together": self.on_model(StateKnockout(window=layers, **shared | {"top_k": 1})),
            "response": self.on_model(AtOnce(response)),
            "attention": attention_flow.on(pattern=pattern, query=self.query),
        }
        if not given.controls:
            return nodes
        places = tuple(dict.fromkeys((*self.keys, *self.roles.values())))
        drawn = RandomWrites(positions=places, draws=given.controls, seed=given.seed, **shared | {"top_k": 1})
        self.only_claims = ("controls", "scored")
        return {
            **nodes,
            "controls": self.on_model(drawn),
            **self.facts_node(),
            **self._scored_node(),
        }

    def lost_here(self, key: int) -> Floats:
        """See `PlaceWorkflow`: with one write left out, [layer]."""
        return values_of(self.writes["kl"].sel(position=key), "layer")

    def _scored_node(self) -> Nodes:
        """Knockouts of the write of every role in the facts that score the choice."""
        if not self.is_chosen:
            return {}
        cut = (
            StateKnockout(tuple(each.encoding.ids), tuple(each.roles.values()), top_k=1)
            for each in self.others[self.half :]
        )
        return {"scored": self.on_model(AtOnce(tuple(cut)))}

    def on_fact(self, tokens: tuple[int, ...], edges: Sequence[tuple[int, int]]) -> list[RandomWrites]:
        """Random values at every role of another fact."""
        places = tuple(key for _, key in edges)
        return [RandomWrites(tokens, positions=places, draws=FEW, seed=self.settings.seed, top_k=1)]

    def on_facts(self, chosen_on: Indices, scored: Indices) -> CandidateEffects:
        """See `PlaceWorkflow`: chosen by what random values do, scored by the write itself."""
        random = values_of(self.result("facts")["kl"], "draw", "draw_of_write", "layer", "position")
        cut = values_of(self.result("scored")["kl"], "draw", "layer", "position")
        return CandidateEffects(random[chosen_on].mean(1), cut[scored - self.half], random[scored])

    @property
    def position(self) -> int:
        """Position of the selected write."""
        return self.edge[1]

    @property
    def selected(self) -> xr.Dataset:
        """Knockout of the selected write in the selected layer."""
        return self.writes.sel(layer=self.layer, position=self.position)

    @cached_property
    def response(self) -> xr.Dataset:
        """The selected write at every scale, [layer, dose]."""
        return self.result("response").load().isel(draw=self.keys.index(self.position))

    def cause(self, layer: int, key: int) -> str:
        """See `PlaceWorkflow`."""
        return f"leaving out what {self.token_label(key)} writes in layer {layer}"

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """The claim about one write of this prompt, beside random values in its place."""
        at = {"layer": layer, "position": key}
        effect, draws = (float(self.writes.sel(at)[measure]), self.controls.sel(at)[measure].values)
        return Claim.against(text, effect, draws, OTHERS, **fields)

    def cause_elsewhere(self, layer: int, role: str) -> str:
        """See `PlaceWorkflow`."""
        return f"leaving out what {ROLES[role]} writes in layer {layer}"

    def views(self) -> Iterator[View]:
        """Next tokens, attention, the selected write, every write, every scale."""
        names = [self.token_label(place) for place in range(len(self.encoding))]
        yield Data(json=self._about() | self.choice_json())
        yield self._next_tokens()
        if self.store is not None:
            yield self._attention()
        yield self._one_write(names)
        sweep = Heatmap.of(
            self.writes["kl"].transpose("layer", "position"),
            "What is lost without a write",
            f"by one token in one layer; framed: {names[self.position]} in layer {self.layer}, as selected",
            columns=tuple(names),
            column_name="token that writes",
            low=0.0,
            framed=((self.layer, self.position) * 2,),
            frame_name="the selected one",
            sources=("writes",),
            json={"sweep": {"kl_divergence": self.writes["kl"], "logit_diff": self.writes["logit_diff"]}},
        )
        yield sweep
        yield self._positions(names)
        curves = Lines.of(
            self.response["kl"].transpose("layer", "dose"),
            f"How far the next token moves as {names[self.position]} writes more or less",
            f"0: left out, 1: as it is; a layer each, thick: layer {self.layer}",
            x_name="factor of the write",
            low=0.0,
            strong=self.layer,
            sources=("response",),
        )
        yield curves
        yield self._scales(names)
        title = f"What {self.subject.name} keeps of '{format_text(self.prompt)}'"
        panels = (sweep, curves, self.findings)
        yield Figure(name="rwkv_inference", title=title, panels=panels, columns=2)

    def _next_tokens(self) -> Table:
        """Table of the most likely next tokens of the unchanged model."""
        columns = {"token_id": "baseline_id", "probability": "baseline_probability"}
        (rank,) = self.writes["baseline_id"].dims
        top = [
            {"rank": place, "token": self.subject.tokenizer.decode_token(row["token_id"]), **row}
            for place, row in enumerate(records(self.writes, str(rank), **columns), start=1)
        ]
        return Table.of(
            top,
            ("rank", "rank", "d"),
            ("token", lambda one: format_token(one["token"])),
            ("probability", "probability", format_probability),
            title=f"{self.subject.name} after '{format_text(self.prompt)}'",
            caption="most likely next tokens, nothing changed",
            sources=("writes",),
            json={"top_tokens": top},
        )

    def _attention(self) -> Attention:
        """Effective attention of every head to every position."""
        assert self.store is not None
        kind = self.subject.attention_kind
        pattern = unpacked(self.captured.open(self.store)[kind]).transpose("layer", "head", ...)
        edge = self.result("attention").load()["from_query"].isel(key_position=self.position)
        here = edge.transpose("layer", "head").values
        return Attention(
            title="What heads read of each position",
            caption="Effective attention: what a head reads of the value a position wrote, as a share of all "
            "that it reads with a positive sign (what it takes away is left out). Point at a token, or "
            "walk with the arrow keys.",
            tokens=tuple(map(format_token, named(self.subject, self.encoding.ids))),
            layers=tuple(pattern["layer"].values.tolist()),
            pattern=pattern.values,
            overview=here,
            overview_name=f"how much {self.token_label(self.query)} reads {self.token_label(self.position)}",
            layer=self.layer,
            head=int(here[self.layer].argmax()),
            query=self.query,
            sources=("attention",),
        )

    def _one_write(self, names: Sequence[str]) -> Table:
        """Table of the tokens whose probability the knockout of the write changes most."""
        title = f"Without what {names[self.position]} writes in layer {self.layer}"
        return self.changed_table(self.selected, title, sources=("writes",))

    def _positions(self, names: Sequence[str]) -> Table:
        """Table of KL without each token's writes: in the layer of the largest KL, and in all layers."""
        kl, every = self.writes["kl"], self.together["kl"].isel(layer=0, drop=True)
        worth = self.writes.assign(most=kl.max("layer"), at=kl.argmax("layer"), every=every)
        columns = {"layer": "at", "kl": "most", "kl_all_layers": "every"}
        rows = [
            row | {"token": names[row["position"]]}
            for row in records(worth, "position", "position", **columns)
        ]
        return Table.of(
            rows,
            ("token", "token", str),
            ("KL, one layer", "kl", ".5f"),
            ("layer", "layer", lambda layer: dim(str(layer))),
            ("KL, all layers", "kl_all_layers", ".5f"),
            title="What each token's writes are worth",
            caption="KL from the run as it is, in nats: the layer without whose write most is lost, and all "
            "layers at once",
            sources=("writes", "together"),
            json={"positions": rows},
        )

    def _scales(self, names: Sequence[str]) -> Table:
        """Table of the selected write at every scale in the selected layer."""
        here = self.response.sel(layer=self.layer)
        here = here.assign(p_target=np.exp(here["target_logprob"]))
        columns = {"scale": "dose", "kl_divergence": "kl", "target_logit_diff": "logit_diff"}
        rows = [
            row | {"top_changed": top_changed_json(self.subject, here.isel(dose=i), "steered_prob")}
            for i, row in enumerate(records(here, "dose", "p_target", **columns))
        ]
        return Table.of(
            rows,
            ("factor", "scale", "{:g}x".format),
            ("KL", "kl_divergence", ".5f"),
            ("logit diff", lambda one: dash(one["target_logit_diff"], "+.4f"), str),
            ("p(target)", lambda one: dash(one["p_target"], ".4f"), str),
            ("changed most", lambda one: format_token(one["top_changed"][0]["token"])),
            title=f"{names[self.position]} writes more or less in layer {self.layer}",
            caption="logit diff: as it is minus steered",
            sources=("response",),
            json={"steering": rows},
        )

    def _about(self) -> dict[str, Any]:
        """Model, prompt and the one write, under the names of candle-mi's example."""
        selected = self.selected
        return {
            **self.subject.about,
            **target_json(self.subject, self.target, self.pieces),
            "prompt": self.prompt,
            "tokens": named(self.subject, self.encoding.ids),
            "target_layer": self.layer,
            "knockout_position": self.position,
            "kl_divergence": selected["kl"],
            "target_logit_diff": selected["logit_diff"],
            "baseline_p_target": np.exp(selected["baseline_target_logprob"]),
            "ablated_p_target": np.exp(selected["target_logprob"]),
        }
