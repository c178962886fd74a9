"""Which positions does each head attend to? Attention patterns of one prompt, by layer and by head.

Captures the attention weights of every layer (once; they stay in the store), and reads off them where one
query looks, who looks at one key, and in which layer that edge is strongest (stages/attention/flow.py).

Defaults: the last token as the query; as the key the token it reads most, but for itself and the first one.
Models use the first token as an attention sink, which takes most of the weight of many heads and says little
of what they do; `key=first` asks how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.attention.flow import (
    attention_flow,
    attention_to_position,
    peak_layer,
    top_attended_positions,
    unpacked,
)
from ...stages.corpus.positions import position_of
from ...stages.forward.hooks.edges import SteeringSpec
from ...stages.logits.lens import format_text, format_token
from ..labelled import stacked
from ..material.answers import encoded, fact, named
from ..settings import Count, EdgeSettings, ModelSettings, setting
from ..views import Attention, Data, Figure, Heatmap, Lines, Table, View, bold, dim
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AttentionPatterns", "AttentionPatternsSettings"]


@dataclass(frozen=True)
class AttentionPatternsSettings(EdgeSettings, ModelSettings):
    """What `--set` can change."""

    prompt: str = setting("", "prompt to read; none: a shipped fact, or the capital of France")
    top_k: Count = setting(5, "most attended positions listed per layer")


class AttentionPatterns(ModelWorkflow):
    """Attention weights of one prompt: head means, and one query and one key by head."""

    name = "attention_patterns"
    question = "Which positions does each head attend to?"
    needs = "weights"
    descriptive = "Which tokens each head attends to in this prompt."
    settings_type = AttentionPatternsSettings
    settings: AttentionPatternsSettings

    flow = loaded("flow")
    """The head means, and the chosen query and key by head; in memory."""

    def plan(self) -> Nodes:
        """The attention weights of the prompt, summed up for one query and one key."""
        given = self.settings
        self.prompt, _ = fact(given.model, given.prompt, "")
        self.encoding = encoded(self.subject, self.prompt)
        self.query = position_of(self.encoding, given.query)
        if given.key is not None:
            # Refuses an edge into the future, unless the model looks there.
            edge = SteeringSpec.scale(1.0).edge(self.query, position_of(self.encoding, given.key))
            edge.resolved(len(self.encoding), ahead=self.subject.config.looks_ahead)
        tokens = self.subject.pack([self.prompt])
        self.captured = self.subject.capture_weights(tokens)
        pattern = self.captured[self.subject.attention_kind]
        return {"flow": attention_flow.on(pattern=pattern, query=self.query)}

    @cached_property
    def key(self) -> int:
        """The position that is read: as asked, or the one with the largest mean weight over layers and heads
        but for the first token and the query; the first token where there is no other."""
        if self.settings.key is not None:
            return position_of(self.encoding, self.settings.key)
        weights = self.flow["from_query"].mean(("layer", "head")).values.copy()
        weights[[0, self.query]] = 0.0
        return int(weights.argmax())

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return named(self.subject, self.encoding.ids)

    def views(self) -> Iterator[View]:
        """Every head to look into, the edge by layer; who looks where on the mean over heads."""
        flow = self.flow.transpose("layer", "head", "query_position", "key_position")
        tokens, mean = tuple(map(format_token, self.tokens)), flow["mean_pattern"]
        reads, is_read = (f"{tokens[place]!r} ({place})" for place in (self.query, self.key))
        edge = flow["from_query"].isel(key_position=self.key)
        peak, weight = peak_layer(mean, self.query, self.key)
        row = flow["layer"].values.tolist().index(peak)
        about = {"model_id": self.subject.name, "prompt": self.prompt, "tokens": self.tokens}
        yield Data(json=about | {"n_layers": len(flow["layer"]), "n_heads": edge.sizes["head"]})
        yield Data(json={"query": self.query, "key": self.key, "peak_layer": peak, "peak_weight": weight})
        if self.store is not None:
            pattern = unpacked(self.captured.open(self.store)[self.subject.attention_kind]).transpose(
                "layer", "head", ...
            )
            yield Attention(
                title=f"Attention of each head in '{format_text(self.prompt)}'",
                caption="Point at a token, or walk with the arrow keys. The weights of a token sum to 1 over "
                "what it reads; weights alone do not say what a head does with them.",
                tokens=tokens,
                layers=tuple(pattern["layer"].values.tolist()),
                pattern=pattern.values,
                overview=edge.values,
                overview_name=f"how much {reads} reads {is_read}",
                layer=peak,
                head=int(edge.values[row].argmax()),
                query=self.query,
            )
        parts = {
            "mean over heads": edge.mean("head"),
            "largest head": edge.max("head"),
            "smallest head": edge.min("head"),
        }
        yield Lines.of(
            stacked("heads", parts),
            f"How much {reads} reads {is_read}",
            self._choice_told(reads, is_read),
            control="smallest head",
            y_name="attention weight",
            unit="",
            low=0.0,
        )
        yield from self._tables(tokens, edge, peak, weight)
        by_layer = Heatmap.of(
            mean.isel(query_position=self.query, key_position=slice(self.query + 1)),
            f"Where {reads} looks",
            f"by layer, mean over heads; framed: it reads {is_read} most",
            columns=tokens[: self.query + 1],
            column_name="key",
            value_name="weight",
            low=0.0,
            framed=((row, self.key) * 2,),
        ).without_first_token()
        everybody = Heatmap.of(
            mean.sel(layer=peak),
            f"Everybody, in layer {peak}",
            f"mean over heads, in the layer in which {reads} reads {is_read} most",
            rows=tokens,
            columns=tokens,
            row_name="query (reads)",
            column_name="key (is read)",
            value_name="weight",
            low=0.0,
        ).without_first_token()
        by_head = Heatmap.of(
            edge, "The same edge by head", f"{reads} reads {is_read}", value_name="weight", low=0.0
        )
        title = f"Attention of {self.subject.name}"
        yield Figure(name="attention_patterns", title=title, panels=(by_layer, by_head, everybody))

    def _choice_told(self, reads: str, is_read: str) -> str:
        """Why this key, where nobody named one."""
        if self.settings.key is not None or self.key == 0:
            return ""
        return (
            f"Of all positions but itself and the first, an attention sink, {reads} reads {is_read} most, "
            "mean over layers and heads."
        )

    def _tables(
        self, tokens: tuple[str, ...], edge: xr.DataArray, peak: int, weight: float
    ) -> Iterator[Table]:
        """Where the query looks in each layer, and who looks at the key in the layer of the peak."""
        mean, key = self.flow["mean_pattern"], self.key
        layers = [
            {
                "layer": layer,
                "top_attended": [
                    {"position": place, "token": self.tokens[place], "weight": value}
                    for place, value in top_attended_positions(mean, layer, self.query, self.settings.top_k)
                ],
                "weight_by_head": edge.sel(layer=layer),
            }
            for layer in mean["layer"].values.tolist()
        ]

        # The first token, an attention sink, would be the most read one of nearly every layer.
        row = mean.isel(query_position=self.query).transpose("layer", "key_position").values
        order = 1 + np.argsort(-row[:, 1:], axis=1, kind="stable")
        place = {layer: i for i, layer in enumerate(mean["layer"].values.tolist())}

        def attended(rank: int, told: dict[str, Any]) -> Any:
            i = place[told["layer"]]
            position = int(order[i, rank])
            return f"{tokens[position]} ", dim(f"({position}) {row[i, position]:.3f}")

        shown = ("most", "2nd", "3rd", "4th", "5th")[: min(self.settings.top_k, self.query)]
        yield Table.of(
            layers,
            ("layer", "layer", lambda layer: bold(str(layer))),
            ("first token", lambda told: row[place[told["layer"]], 0], ".3f"),
            *((name, partial(attended, rank)) for rank, name in enumerate(shown)),
            title=f"Where {tokens[self.query]!r} ({self.query}) looks, mean over the heads of "
            f"{self.subject.name}",
            caption=f"most, 2nd, …: of all tokens but the first, an attention sink; it looks most at "
            f"{tokens[key]!r} ({key}) in layer {peak}: {weight:.3f}",
            json={"layers": layers},
        )
        by_head = self.flow.sel(layer=peak).isel(key_position=key)
        incoming = attention_to_position(mean, peak, key).values.tolist()
        readers = [
            {"position": place, "token": self.tokens[place], "weight": incoming[place]}
            for place in range(key, len(tokens))
        ]

        def largest(reader: dict[str, Any]) -> str:
            one = by_head.isel(query_position=reader["position"])
            return f"{float(one['largest']):.3f} (head {int(one['largest_head'])})"

        yield Table.of(
            readers,
            ("position", "position", "d"),
            ("token", lambda reader: tokens[reader["position"]]),
            ("mean", "weight", ".3f"),
            ("largest head", largest, str),
            title=f"Who looks at {tokens[key]!r} ({key}) in layer {peak}",
            caption=f"the query above gives it {incoming[self.query]:.3f}",
            json={"incoming": readers},
        )
