"""What does the model no longer say when one position may not read another? Attention knockout.

Cuts one attention edge at a time, in one layer at a time (stages/causal/knockout.py), and measures what
the last position predicts: KL from the undisturbed run, the logit of the target, the tokens that changed
most. One edge and layer are told in full; the sweep over all keys and layers, and over heads for the one
edge, shows whether they are special.

Defaults: the middle layer, all heads, the edge from the last token to the first. A target of several tokens
is followed by its first piece (logits) and by all of them (probability), never by its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stages.causal.knockout import EdgeKnockout, HeadKnockout
from ..stages.corpus.positions import position_of
from ..stages.forward.hooks.edges import KnockoutSpec
from ..stages.logits.lens import format_probability, format_token
from ..store.errors import ConfigError
from .material.answers import answer_pieces, encoded, fact, named, target_json, top_changed_json
from .settings import Count, EdgeSettings, FactSettings, setting
from .views import Data, Heatmap, Table, View, points, together
from .workflow import ModelWorkflow, loaded

if TYPE_CHECKING:
    import xarray as xr

    from ..pipeline.nodes import ResultNode

__all__ = ["AttentionKnockout", "AttentionKnockoutSettings"]


@dataclass(frozen=True)
class AttentionKnockoutSettings(EdgeSettings, FactSettings):
    """What `--set` can change."""

    layer: int | None = setting(None, "layer told in full; none: the middle one")
    sweep: bool = setting(True, "also cut every other key, layer and head")
    top_k: Count = setting(10, "changed tokens listed")


class AttentionKnockout(ModelWorkflow):
    """One edge in full, and all others for comparison."""

    name = "attention_knockout"
    question = "What does the model no longer say when one position may not read another?"
    settings_type = AttentionKnockoutSettings
    settings: AttentionKnockoutSettings

    edges = loaded("edges")
    """Every edge in every layer, [layer, edge], by key from the first on."""
    heads = loaded("heads")
    """The one edge in every layer and head, [layer, head]."""

    def plan(self) -> Mapping[str, ResultNode]:
        """The edges of one query, and the heads of one edge."""
        chosen, config = self.settings, self.subject.config
        self.prompt, self.target = fact(chosen.model, chosen.prompt, chosen.target)
        self.encoding = encoded(self.subject, self.prompt)
        self.pieces = answer_pieces(self.subject, self.prompt, self.target)
        layers = config.num_layers
        self.layer = layers // 2 if chosen.layer is None else chosen.layer
        if not 0 <= self.layer < layers:
            raise ConfigError(f"expected a layer in 0..{layers - 1}, found {self.layer}")
        self.edge = (position_of(self.encoding, chosen.query), position_of(self.encoding, chosen.key))
        tokens, query = tuple(self.encoding.ids), self.edge[0]
        KnockoutSpec().edge(*self.edge).validate(layers, config.axis_sizes["head"], len(tokens))
        told: dict[str, Any] = {"target": self.pieces, "top_k": chosen.top_k}
        if not chosen.sweep:
            return {"edges": self.on_model(EdgeKnockout(tokens, (self.edge,), layers=(self.layer,), **told))}
        keys = tuple((query, key) for key in range(query + 1))
        return {
            "edges": self.on_model(EdgeKnockout(tokens, keys, layers=None, **told)),
            "heads": self.on_model(HeadKnockout(tokens, (self.edge,), **told)),
        }

    @property
    def told(self) -> xr.Dataset:
        """The one edge in the one layer."""
        here = self.edges.sel(layer=self.layer)
        return here.isel(edge=int(np.flatnonzero(here["key"].values == self.edge[1])[0]))

    def views(self) -> Iterator[View]:
        """The one edge; every key and every head in its place."""
        told, (query, key) = self.told, self.edge
        tokens = [format_token(token) for token in named(self.subject, self.encoding.ids)]
        names = [f"{token!r} ({place})" for place, token in enumerate(tokens)]
        yield Data(json=self._about())
        changed = top_changed_json(self.subject, told, "ablated_prob")
        effect = f"KL {float(told['kl']):.5f} nats; weight of the edge {float(told['attention']):.3f}"
        if self.pieces:
            probabilities = (np.exp(told[name]) for name in ("baseline_target_logprob", "target_logprob"))
            effect += (
                f"; logit of {format_token(self.target)!r} lowered by {float(told['logit_diff']):+.4f}, "
                f"probability {' -> '.join(format_probability(float(p)) for p in probabilities)}"
            )
        yield Table.of(
            changed,
            ("token", lambda one: format_token(one["token"])),
            ("before", "baseline_prob", format_probability),
            ("after", "ablated_prob", format_probability),
            ("change", lambda one: one["ablated_prob"] - one["baseline_prob"], points),
            title=f"{self.subject.name}, layer {self.layer}: {names[query]} may not read {names[key]}",
            caption=effect,
            json={"top_changed": changed},
        )
        if not self.settings.sweep:
            return
        by_key = Heatmap.of(
            self.edges["kl"].transpose("layer", "edge"),
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
        title = f"What {self.subject.name} needs to read: {format_token(self.prompt)!r}"
        yield from together("attention_knockout", title, by_key, by_head)
        yield Table.of(
            [
                (layer, _most(self.edges.sel(layer=layer)), _most(self.heads.sel(layer=layer)))
                for layer in self.edges["layer"].values.tolist()
            ],
            ("layer", lambda row: row[0], "d"),
            ("key", lambda row: names[int(row[1]["key"])]),
            ("KL", lambda row: float(row[1]["kl"]), ".5f"),
            ("weight", lambda row: float(row[1]["attention"]), ".3f"),
            ("head", lambda row: int(row[2]["head"]), "d"),
            ("KL of the edge in it", lambda row: float(row[2]["kl"]), ".5f"),
            title=f"Where {names[query]} needs to read",
            caption="per layer the key whose edge matters most, and the head in which the edge above does",
        )

    def _about(self) -> dict[str, Any]:
        """The other fields of candle-mi's example."""
        told = self.told
        found = {
            **self.subject.about,
            "prompt": self.prompt,
            "tokens": named(self.subject, self.encoding.ids),
            "target_layer": self.layer,
            "knockout_edge": self.edge,
            "attention_before": told["attention"],
            "kl_divergence": told["kl"],
            **target_json(self.subject, self.target, self.pieces),
            "target_logit_diff": told["logit_diff"],
            "baseline_p_target": np.exp(told["baseline_target_logprob"]),
            "ablated_p_target": np.exp(told["target_logprob"]),
        }
        return found | ({"paris_logit_diff": told["logit_diff"]} if self.target.strip() == "Paris" else {})


def _sweep_json(sweep: xr.Dataset) -> dict[str, Any]:
    return {"kl_divergence": sweep["kl"], "attention_before": sweep["attention"]}


def _most(cells: xr.Dataset) -> xr.Dataset:
    """The one of some cells that loses most."""
    return cells.isel({str(cells["kl"].dims[0]): int(cells["kl"].values.argmax())})


WORKFLOW = AttentionKnockout
