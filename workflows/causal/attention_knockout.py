"""What does the model predict when one position cannot attend to another? Attention knockout.

Cuts one attention edge at a time, in one layer at a time (stages/causal/knockout.py), and measures what
the last position predicts: KL from the undisturbed run, the logit of the target, the tokens that changed
most. One edge and layer are shown in full; the sweep over all keys and layers, and over heads for the one
edge, shows whether they are special.

The selected edge stands beside others of the same query, drawn at random among all layers and keys.
Defaults: the last token's edge, in all heads, whose layer and kind of key lose most on other shipped facts
(material/edge_choice.py), beside the one that loses least there. A target of several tokens is followed by
its first piece (logits) and by all of them (probability), never by its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.draws import AtOnce
from ...stages.causal.knockout import EdgeKnockout, HeadKnockout
from ...stages.logits.lens import format_text, format_token
from ...store.arrays import Floats
from ..claim import Claim
from ..labelled import largest, values_of
from ..material.answers import named, target_json
from ..material.edge_choice import EdgeWorkflow
from ..settings import ChosenEdgeSettings, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AttentionKnockout", "AttentionKnockoutSettings"]


@dataclass(frozen=True)
class AttentionKnockoutSettings(ChosenEdgeSettings):
    """What `--set` can change."""

    sweep: bool = setting(True, "cut every other key and head, and not only what controls need")


class AttentionKnockout(EdgeWorkflow):
    """Knockout of one attention edge in full, and of all others for comparison."""

    name = "attention_knockout"
    question = "What does the model predict when one position cannot attend to another?"
    needs = "attention"
    settings_type = AttentionKnockoutSettings
    settings: AttentionKnockoutSettings

    @cached_property
    def edges(self) -> xr.Dataset:
        """Every edge in every layer, [layer, key], in memory."""
        return self.result("edges").load().swap_dims(edge="key")

    def plan(self) -> Nodes:
        """Edges of one query, heads of the candidate edges, and edges of other facts."""
        shared, query = self.read_edge(), self.query
        edges = EdgeKnockout(edges=tuple((query, key) for key in self._cut()), layers=None, **shared)
        nodes = {"edges": self.on_model(edges), **self.facts_node()}
        if self.settings.sweep:
            heads = tuple(HeadKnockout(edges=((query, key),), **shared) for key in self.keys)
            nodes["heads"] = self.on_model(heads[0] if len(heads) == 1 else AtOnce(heads))
        return nodes

    def _cut(self) -> list[int]:
        """Keys that are cut: all, or the candidates and as many more as the controls need."""
        every = range(self.query + 1)
        if self.settings.sweep:
            return list(every)
        needed = -(-self.settings.controls // self.subject.config.num_layers)
        rest = [key for key in every if key not in self.keys]
        return sorted(
            (*self.keys, *(chosen_at_random(rest, needed, seed=self.settings.seed) if rest else ()))
        )

    def lost_here(self, key: int) -> Floats:
        """See `PlaceWorkflow`: with the edge to one key cut, [layer]."""
        return values_of(self.edges["kl"].sel(key=key), "layer")

    @cached_property
    def heads(self) -> xr.Dataset:
        """Knockout of the selected edge in every layer and head, [layer, head]."""
        found = self.result("heads").load()
        return found.isel(draw=self.keys.index(self.edge[1])) if "draw" in found.dims else found

    @property
    def selected(self) -> xr.Dataset:
        """Knockout of the selected edge in the selected layer."""
        return self.edges.sel(layer=self.layer, key=self.edge[1])

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """The claim about one edge of this prompt, beside other edges of the query."""
        effects = self.edges[measure].transpose("layer", "key")
        row, column = (effects.get_index(dim).get_loc(at) for dim, at in (("layer", layer), ("key", key)))
        of = "other (layer, key) edges of this query"
        own = row * effects.sizes["key"] + column
        return Claim.among(text, effects.values, own, of, self.settings, **fields)

    def views(self) -> Iterator[View]:
        """The selected edge, then every key and every head in its place."""
        selected, (query, key) = self.selected, self.edge
        tokens = [format_token(token) for token in named(self.subject, self.encoding.ids)]
        names = [f"{token!r} ({place})" for place, token in enumerate(tokens)]
        yield Data(json=self._about() | self.choice_json())
        yield self.changed_table(
            selected,
            f"{self.subject.name}, layer {self.layer}: {names[query]} may not read {names[key]}",
            beside=f"; weight of the edge {float(selected['attention']):.3f}",
        )
        if not self.settings.sweep:
            return
        by_key = Heatmap.of(
            self.edges["kl"].transpose("layer", "key"),
            "What is lost by key, in all heads",
            f"{names[query]} may not read a key in one layer; framed: as in the table",
            sources=("edges",),
            columns=tuple(f"{tokens[place]} ({place})" for place in self.edges["key"].values.tolist()),
            column_name="key",
            low=0.0,
            framed=((self.edges["layer"].values.tolist().index(self.layer), key) * 2,),
            frame_name="as in the table",
            json={"sweep": {"query": query, "keys": self.edges["key"], **_sweep_json(self.edges)}},
        )
        by_head = Heatmap.of(
            self.heads["kl"].transpose("layer", "head"),
            "What is lost by head, of one edge",
            f"{names[query]} may not read {names[key]} in one head of one layer",
            sources=("heads",),
            low=0.0,
            json={"heads": _sweep_json(self.heads)},
        )
        title = f"What {self.subject.name} needs to read: '{format_text(self.prompt)}'"
        beside = [self.findings]
        yield from together("attention_knockout", title, by_key, by_head, beside=beside, columns=2)
        yield Table.of(
            [
                {"layer": layer, **_most(self.edges, layer), "in_head": _most(self.heads, layer)}
                for layer in self.edges["layer"].values.tolist()
            ],
            ("layer", "layer", "d"),
            ("key", lambda row: names[row["key"]]),
            ("KL", "kl", ".5f"),
            ("weight", "attention", ".3f"),
            ("head", lambda row: row["in_head"]["head"], "d"),
            ("KL of the edge in it", lambda row: row["in_head"]["kl"], ".5f"),
            title=f"Where {names[query]} needs to read",
            caption="per layer the key whose edge matters most, and the head in which the edge above does",
        )

    def _about(self) -> dict[str, Any]:
        """The other fields of candle-mi's example."""
        selected = self.selected
        found = {
            **self.subject.about,
            "prompt": self.prompt,
            "tokens": named(self.subject, self.encoding.ids),
            "target_layer": self.layer,
            "knockout_edge": self.edge,
            "attention_before": selected["attention"],
            "kl_divergence": selected["kl"],
            **target_json(self.subject, self.target, self.pieces),
            "target_logit_diff": selected["logit_diff"],
            "baseline_p_target": np.exp(selected["baseline_target_logprob"]),
            "ablated_p_target": np.exp(selected["target_logprob"]),
        }
        return found | (
            {"paris_logit_diff": selected["logit_diff"]} if self.target.strip() == "Paris" else {}
        )


def _sweep_json(sweep: xr.Dataset) -> dict[str, Any]:
    return {"kl_divergence": sweep["kl"], "attention_before": sweep["attention"]}


def _most(sweep: xr.Dataset, layer: int) -> dict[str, Any]:
    """Key or head of a layer whose knockout has the largest KL."""
    cells = sweep.sel(layer=layer)
    return largest(cells, cells["kl"], 1, "kl", "attention")[0]
