"""What does the model predict when one position cannot attend to another? Attention knockout.

Knocks out one attention edge (query, key) at a time, in one layer at a time (stages/causal/knockout.py), and
measures the effect on the last position's prediction: KL from the unchanged run, change of the target's
logit, and the tokens whose probability changes most. One edge and layer are shown in full; a sweep over all
keys and layers, and over the heads of that edge, shows whether they are special.

Null distribution of the claims: random other (layer, key) edges of the same query. Default edge: the query is
the last token; layer and key are those, by role, whose knockout has the largest mean KL on other shipped
facts (material/edge_choice.py); the ones with the smallest are shown for comparison. Of a target of several
tokens, logits are those of its first token, and the probability is that of all of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import chosen_at_random
from ...stages.causal.knockout import EdgeKnockout, HeadKnockout
from ...stages.logits.lens import format_text
from ...store.arrays import Floats
from ..claim import Claim
from ..labelled import largest, values_of
from ..material.answers import target_json
from ..material.edge_choice import EdgeWorkflow
from ..settings import ChosenEdgeSettings, setting
from ..views import Data, Heatmap, Table, View, together
from ..workflow import Nodes

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AttentionKnockout", "AttentionKnockoutSettings"]


@dataclass(frozen=True)
class AttentionKnockoutSettings(ChosenEdgeSettings):
    """Settings of the workflow `attention_knockout`, which cuts attention from one position to another."""

    sweep: bool = setting(
        True, "knock out every key and every head; false: only the edges that claims and controls need"
    )


class AttentionKnockout(EdgeWorkflow):
    """Workflow that knocks out one attention edge and, for comparison, all other edges of the same query."""

    name = "attention_knockout"
    question = "What does the model predict when one position cannot attend to another?"
    needs = "attention"
    settings_type = AttentionKnockoutSettings
    settings: AttentionKnockoutSettings

    @cached_property
    def edges(self) -> xr.Dataset:
        """Result of knocking out the edge from the query to every key, in all heads of one layer at a time,
        [layer, key], in memory."""
        # All edges have the same query, so that the key alone identifies an edge.
        return self.result("edges").load().swap_dims(edge="key")

    def plan(self) -> Nodes:
        """Nodes that knock out the edges of one query, single heads of candidate edges, and edges in other
        facts."""
        shared, query = self.read_edge(), self.query
        edges = EdgeKnockout(edges=tuple((query, key) for key in self._swept_keys()), layers=None, **shared)
        nodes = {"edges": self.on_model(edges), **self.facts_node()}
        if self.settings.sweep:
            nodes["heads"] = self.by_key([HeadKnockout(edges=((query, key),), **shared) for key in self.keys])
        return nodes

    def _swept_keys(self) -> list[int]:
        """Key positions whose edges are knocked out: all with the setting `sweep`, else the candidates and
        random controls."""
        every = range(self.query + 1)
        if self.settings.sweep:
            return list(every)
        # Every key gives one control edge per layer.
        needed = -(-self.settings.controls // self.subject.config.num_layers)
        control_keys = [key for key in every if key not in self.keys]
        drawn = chosen_at_random(control_keys, needed, seed=self.settings.seed) if control_keys else ()
        return sorted((*self.keys, *drawn))

    def lost_here(self, key: int) -> Floats:
        """KL by layer when the edge to one key of the displayed prompt is knocked out, in nats, [layer]."""
        return values_of(self.edges["kl"].sel(key=key), "layer")

    @cached_property
    def heads(self) -> xr.Dataset:
        """Result of knocking out the selected edge in one head at a time, [layer, head]."""
        return self.at_key("heads", self.edge[1])

    @property
    def selected(self) -> xr.Dataset:
        """Result of knocking out the selected edge in all heads of the selected layer."""
        return self.edges.sel(layer=self.layer, key=self.edge[1])

    def claim_here(self, layer: int, key: int, measure: str, text: str, **fields: Any) -> Claim:
        """Claim about one edge of the displayed prompt, compared with other edges of the same query; see
        `PlaceWorkflow` for the arguments."""
        effects = self.edges[measure].transpose("layer", "key")
        row, column = (effects.get_index(dim).get_loc(at) for dim, at in (("layer", layer), ("key", key)))
        of = "other (layer, key) edges of this query"
        own_cell = row * effects.sizes["key"] + column
        return Claim.among(text, effects.values, own_cell, of, self.settings, **fields)

    def views(self) -> Iterator[View]:
        """Views in reading order: tokens changed by the selected edge; with `sweep` also heatmaps and a table
        of every key and head."""
        selected, (query, key) = self.selected, self.edge
        tokens = self.subject.token_labels(self.encoding.ids)
        names = list(map(self.token_label, range(len(tokens))))
        yield Data(json=self._about() | self.choice_json())
        yield self.changed_table(
            selected,
            f"{self.subject.name}, layer {self.layer}: {names[query]} cannot attend to {names[key]}",
            beside=f"Attention weight of the edge before the knockout: {float(selected['attention']):.3f}.",
        )
        if not self.settings.sweep:
            return
        row = self.edges["layer"].values.tolist().index(self.layer)
        by_key = Heatmap.of(
            self.edges["kl"].transpose("layer", "key"),
            "KL when an edge is knocked out in all heads",
            f"Each cell: no head of one layer (row) can attend from {names[query]} to one key (column). "
            "Value: KL(unchanged run || knockout) of the next-token distribution, in nats. Framed: the edge "
            "in the table.",
            sources=("edges",),
            columns=tuple(f"{tokens[place]} ({place})" for place in self.edges["key"].values.tolist()),
            column_name="key",
            low=0.0,
            framed=((row, key, row, key),),
            frame_name="the edge in the table",
            json={"sweep": {"query": query, "keys": self.edges["key"], **_sweep_json(self.edges)}},
        )
        by_head = Heatmap.of(
            self.heads["kl"].transpose("layer", "head"),
            "KL when one edge is knocked out in one head",
            f"Each cell: one head (column) of one layer (row) cannot attend from {names[query]} to "
            f"{names[key]}. Value: KL(unchanged run || knockout) of the next-token distribution, in nats.",
            sources=("heads",),
            low=0.0,
            json={"heads": _sweep_json(self.heads)},
        )
        title = f"Attention knockout in {self.subject.name}: '{format_text(self.prompt)}'"
        beside = [self.findings]
        yield from together("attention_knockout", title, by_key, by_head, beside=beside, columns=2)
        yield Table.of(
            [
                {"layer": layer, **_most(self.edges, layer), "in_head": _most(self.heads, layer)}
                for layer in self.edges["layer"].values.tolist()
            ],
            ("layer", "layer", "d"),
            ("key", lambda row: names[row["key"]]),
            ("KL, all heads", "kl", ".5f"),
            ("weight", "attention", ".3f"),
            ("head", lambda row: row["in_head"]["head"], "d"),
            ("KL, this head", lambda row: row["in_head"]["kl"], ".5f"),
            title=f"Attention edges from {names[query]} with the largest effect",
            caption="One row per layer. KL: of the next-token distribution from that of the unchanged run, "
            f"in nats. Key: the token for which knocking out the edge from {names[query]} in all heads has "
            "the largest KL. Weight: attention weight of this edge before the knockout, mean over heads. "
            f"Head: the one in which knocking out the edge to {names[key]} alone has the largest KL.",
        )

    def _about(self) -> dict[str, Any]:
        """JSON fields on prompt, edge and effect, named as in candle-mi's example; fields of the tables are
        not among them."""
        selected = self.selected
        fields = {
            **self.subject.about,
            "prompt": self.prompt,
            "tokens": self.subject.token_texts(self.encoding.ids),
            "target_layer": self.layer,
            "knockout_edge": self.edge,
            "attention_before": selected["attention"],
            "kl_divergence": selected["kl"],
            **target_json(self.subject, self.target, self.pieces),
            "target_logit_diff": selected["logit_diff"],
            "baseline_p_target": np.exp(selected["baseline_target_logprob"]),
            "ablated_p_target": np.exp(selected["target_logprob"]),
        }
        return fields | (
            # candle-mi names this field after the target of its own example.
            {"paris_logit_diff": selected["logit_diff"]} if self.target.strip() == "Paris" else {}
        )


def _sweep_json(sweep: xr.Dataset) -> dict[str, Any]:
    """KL and attention weights of all knockouts of a sweep, as JSON fields."""
    return {"kl_divergence": sweep["kl"], "attention_before": sweep["attention"]}


def _most(sweep: xr.Dataset, layer: int) -> dict[str, Any]:
    """Record of the key or head of a layer whose knockout has the largest KL, with its KL and attention
    weight."""
    cells = sweep.sel(layer=layer)
    return largest(cells, cells["kl"], 1, "kl", "attention")[0]
