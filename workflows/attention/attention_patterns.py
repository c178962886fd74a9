"""Which positions does each head attend to? Attention patterns of one prompt, by layer and by head.

Captures the attention weights of every layer (once; they stay in the store), and reads from them which keys
one query attends to, which queries attend to one key, and in which layer the weight of that edge is largest
(stages/attention/flow.py).

Defaults: the query is the last token; the key is the token with the largest mean weight, apart from the query
itself and the first token. Models use the first token as an attention sink: it takes most of the weight of
many heads, whatever they compute. `key=first` shows its weight.
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
from ...stages.logits.lens import format_text
from ..labelled import stacked
from ..material.answers import encoded, fact
from ..settings import Count, EdgeSettings, PromptSettings, setting
from ..views import Attention, Data, Figure, Heatmap, Lines, Table, View, bold, dim
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["AttentionPatterns", "AttentionPatternsSettings"]


@dataclass(frozen=True)
class AttentionPatternsSettings(EdgeSettings, PromptSettings):
    """Settings of the workflow `attention_patterns`, which shows the attention weights of one prompt."""

    top_k: Count = setting(5, "number of most attended positions listed per layer")


class AttentionPatterns(ModelWorkflow):
    """Workflow that shows the attention weights of one prompt: means over heads, and the weights of one query
    and one key in every head."""

    name = "attention_patterns"
    question = "Which positions does each head attend to?"
    needs = "weights"
    descriptive = "Which tokens each head attends to in this prompt."
    settings_type = AttentionPatternsSettings
    settings: AttentionPatternsSettings

    flow = loaded("flow")
    """Result of `attention_flow`, in memory: mean_pattern [layer, query_position, key_position], from_query
    [layer, head, key_position], largest, largest_head and entropy."""

    def plan(self) -> Nodes:
        """Node that captures the prompt's attention weights and reduces them to means over heads and the
        weights of one query.

        Raises:
            ConfigError, PromptError: for a query or key outside the prompt, or a key after the query in a
                causal model.
        """
        settings = self.settings
        self.prompt, _ = fact(settings.model, settings.prompt, "")
        self.encoding = encoded(self.subject, self.prompt)
        self.query = position_of(self.encoding, settings.query)
        if settings.key is not None:
            # `resolved` raises for a key after the query, unless attention is bidirectional.
            # Nothing is steered: the spec is made for the check of its edge alone.
            edge = SteeringSpec.scale(1.0).edge(self.query, position_of(self.encoding, settings.key))
            edge.resolved(len(self.encoding), ahead=self.subject.config.looks_ahead)
        tokens = self.subject.pack([self.prompt])
        self.captured = self.subject.capture_weights(tokens)
        pattern = self.captured[self.subject.attention_kind]
        return {"flow": attention_flow.on(pattern=pattern, query=self.query)}

    @cached_property
    def key(self) -> int:
        """Position of the attended key: the setting or, by default, the position with the largest weight from
        the query, in the mean over layers and heads, without the first token and the query itself; 0 if there
        is no other."""
        if self.settings.key is not None:
            return position_of(self.encoding, self.settings.key)
        weights = self.flow["from_query"].mean(("layer", "head")).values.copy()
        # Left out: the first token, an attention sink, and the query itself.
        weights[[0, self.query]] = 0.0
        return int(weights.argmax())

    @property
    def tokens(self) -> list[str]:
        """Text of each token of the prompt."""
        return self.subject.token_texts(self.encoding.ids)

    @property
    def summary(self) -> str:
        """See `Workflow`: the layer of the largest weight from query to key, and the mean weight on the first
        token."""
        labels, mean = self.subject.token_labels(self.encoding.ids), self.flow["mean_pattern"]
        layer, weight = peak_layer(mean, self.query, self.key)
        first = float(self.flow["from_query"].isel(key_position=0).mean())
        return (
            f"From {labels[self.query]!r} ({self.query}) the attention weight on {labels[self.key]!r} "
            f"({self.key}) is largest in layer {layer}: {weight:.3f}, mean over heads; that on the first "
            f"token is {first:.3f}, mean over all layers and heads."
        )

    def views(self) -> Iterator[View]:
        """Views in reading order: patterns of every head, weight of the edge from query to key by layer and
        head, and means over heads."""
        flow = self.flow.transpose("layer", "head", "query_position", "key_position")
        tokens, mean = tuple(self.subject.token_labels(self.encoding.ids)), flow["mean_pattern"]
        query_name, key_name = (f"{tokens[position]!r} ({position})" for position in (self.query, self.key))
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
                caption="For each head: attention weights from one token, the query, to all tokens, its "
                "keys. The weights of a query sum to 1. Point at a token to make it the query, or move with "
                "the arrow keys. Weights alone do not show what a head writes, nor whether its output "
                "matters.",
                tokens=tokens,
                layers=tuple(pattern["layer"].values.tolist()),
                pattern=pattern.values,
                overview=edge.values,
                overview_name=f"attention weight from {query_name} to {key_name}",
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
            f"Attention weight from {query_name} to {key_name}",
            "x: layer. y: weight of one attention edge, from a query to a key. Curves: mean, largest and "
            "smallest weight over the heads of the layer. "
            f"{self._key_choice(query_name, key_name)}".rstrip(),
            control="smallest head",
            y_name="attention weight",
            unit="",
            low=0.0,
        )
        yield from self._tables(tokens, edge, peak, weight)
        by_layer = Heatmap.of(
            mean.isel(query_position=self.query, key_position=slice(self.query + 1)),
            f"Attention weights of {query_name}",
            f"Each cell: attention weight from {query_name} to one key (column) in one layer (row), mean "
            f"over heads. Framed: the layer with the largest weight on {key_name}.",
            columns=tokens[: self.query + 1],
            column_name="key",
            value_name="weight",
            low=0.0,
            framed=((row, self.key, row, self.key),),
        ).without_first_token()
        all_queries = Heatmap.of(
            mean.sel(layer=peak),
            f"All queries, in layer {peak}",
            "Each cell: attention weight of one query (row) on one key (column), mean over heads. Shown is "
            f"the layer with the largest weight from {query_name} to {key_name}.",
            rows=tokens,
            columns=tokens,
            row_name="query",
            column_name="key",
            value_name="weight",
            low=0.0,
        ).without_first_token()
        by_head = Heatmap.of(
            edge,
            "Weight of one edge by head",
            f"Each cell: attention weight from {query_name} to {key_name} in one head (column) of one layer "
            "(row).",
            value_name="weight",
            low=0.0,
        )
        title = f"Attention of {self.subject.name}"
        yield Figure(name="attention_patterns", title=title, panels=(by_layer, by_head, all_queries))

    def _key_choice(self, query_name: str, key_name: str) -> str:
        """Sentence for captions on how the key was chosen; empty if the settings name it."""
        if self.settings.key is not None or self.key == 0:
            return ""
        return (
            f"{key_name} was chosen as the key with the largest weight from {query_name}, mean over layers "
            "and heads, apart from the query itself and the first token, an attention sink."
        )

    def _tables(
        self, tokens: tuple[str, ...], edge: xr.DataArray, peak: int, weight: float
    ) -> Iterator[Table]:
        """Tables of the query's largest weights in each layer, and of the weights on the key in layer `peak`.

        edge: weights from query to key, [layer, head]. peak, weight: layer of the largest mean over heads,
        and that mean.
        """
        mean, key = self.flow["mean_pattern"], self.key
        layers = [
            {
                "layer": layer,
                "top_attended": [
                    {"position": position, "token": self.tokens[position], "weight": value}
                    for position, value in top_attended_positions(
                        mean, layer, self.query, self.settings.top_k
                    )
                ],
                "weight_by_head": edge.sel(layer=layer),
            }
            for layer in mean["layer"].values.tolist()
        ]

        # The first token, an attention sink, would have the largest weight in nearly every layer.
        weights = mean.isel(query_position=self.query).transpose("layer", "key_position").values
        order = 1 + np.argsort(-weights[:, 1:], axis=1, kind="stable")
        row_of = {layer: i for i, layer in enumerate(mean["layer"].values.tolist())}

        def attended(rank: int, record: dict[str, Any]) -> Any:
            i = row_of[record["layer"]]
            position = int(order[i, rank])
            return f"{tokens[position]} ", dim(f"({position}) {weights[i, position]:.3f}")

        rank_names = ("largest", "2nd", "3rd", "4th", "5th")[: min(self.settings.top_k, self.query)]
        yield Table.of(
            layers,
            ("layer", "layer", lambda layer: bold(str(layer))),
            ("first token", lambda record: weights[row_of[record["layer"]], 0], ".3f"),
            *((name, partial(attended, rank)) for rank, name in enumerate(rank_names)),
            title=f"Attention weights of {tokens[self.query]!r} ({self.query}), mean over the heads of "
            f"{self.subject.name}",
            caption="One row per layer. First token: weight on the first token, an attention sink. Largest, "
            "2nd, …: the other keys with the largest attention weights of this query. The weight on "
            f"{tokens[key]!r} ({key}) is largest in layer {peak}: {weight:.3f}.",
            json={"layers": layers},
        )
        by_head = self.flow.sel(layer=peak).isel(key_position=key)
        incoming = attention_to_position(mean, peak, key).values.tolist()
        readers = [
            {"position": position, "token": self.tokens[position], "weight": incoming[position]}
            for position in range(key, len(tokens))
        ]

        def largest(reader: dict[str, Any]) -> str:
            of_query = by_head.isel(query_position=reader["position"])
            return f"{float(of_query['largest']):.3f} (head {int(of_query['largest_head'])})"

        yield Table.of(
            readers,
            ("position", "position", "d"),
            ("token", lambda reader: tokens[reader["position"]]),
            ("mean", "weight", ".3f"),
            ("largest head", largest, str),
            title=f"Attention weights on {tokens[key]!r} ({key}) in layer {peak}, by query",
            caption=f"One row per query: a token that may attend to {tokens[key]!r}. Mean: its attention "
            "weight, mean over all heads of the layer. Largest head: the largest weight of a single head. "
            f"For the query {tokens[self.query]!r} ({self.query}) the mean is {incoming[self.query]:.3f}.",
            json={"incoming": readers},
        )
