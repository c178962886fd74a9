"""Through which features do the tokens of a prompt affect the next token?

Replaces the MLPs by transcoders, holds attention and norms as the prompt made them, and computes what every
token, feature and error adds to every feature and to the likeliest logits (Ameisen et al. 2025, "Circuit
Tracing: Revealing Computational Graphs in Language Models"; stages/graph/). Told are the part that carries
most of the influence, its strongest features with the tokens they raise and lower, and how much of it all
the features explain rather than the errors.

The settings are those of circuit-tracer's command line, and so are their defaults. Files for other programs
come from the graph itself: `workflow.graph.to_pt(…)`, `workflow.pruned.to_viewer(…)`, `.to_graphml(…)`.

Offline the specimen with its own cross-layer transcoder, whose features are shown with the places of shipped
texts at which they are strongest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...pipeline import Port
from ...stages.features.labels import labels_of
from ...stages.graph.graph import AttributionGraph, PrunedGraph, graph_node
from ...stages.graph.logit_effects import logit_effects_node
from ...stages.graph.pruning import KeptPart, pruned_graph
from ...stages.graph.rows.nodes import ERROR, FEATURE, LOGIT, TOKEN
from ...stages.logits.lens import format_probability, format_text, format_token
from ...stages.logits.readout import readout_node
from ...store.errors import ConfigError
from ..material.feature_examples import ExampleNodes, corpus_texts, example_nodes, passages
from ..material.graph_views import examples_of, graph_views, kept_of
from ..settings import Count, ModelSettings, Natural, Share, preset_of, setting
from ..subject import Subject
from ..views import Data, Table, View, together
from ..views.graph.drawing import drawn_part
from ..views.graph.features import StrongFeature, strongest_features
from ..workflow import Nodes, Workflow

if TYPE_CHECKING:
    import xarray as xr

    from ...stages.features.dictionary import Dictionary
    from ...stages.forward.models.model import Model

__all__ = ["PRESETS", "AttributionGraphs", "GraphPreset", "AttributionGraphsSettings"]

SHOWN = 4
"""Places of the corpus shown per feature."""


class GraphPreset(NamedTuple):
    """A model, transcoders made for it, and a prompt to begin with."""

    model: str
    dictionary: str
    prompt: str


FRENCH = "The mother tongue of Danielle Darrieux is"
DALLAS = "Fact: the capital of the state containing Dallas is"
LLAMA, GEMMA = "meta-llama/Llama-3.2-1B", "google/gemma-2-2b"
PRESETS = {
    "specimen": GraphPreset("specimen", "specimen/clt", FRENCH),
    "specimen-transcoders": GraphPreset("specimen", "specimen/plt", FRENCH),
    "llama3.2-1b-524k": GraphPreset(LLAMA, "mntss/clt-llama-3.2-1b-524k", DALLAS),
    "llama3.2-1b-transcoders": GraphPreset(LLAMA, "mntss/transcoder-Llama-3.2-1B", DALLAS),
    "gemma2-2b-426k": GraphPreset(GEMMA, "mntss/clt-gemma-2-2b-426k", DALLAS),
    "gemma2-2b-2.5m": GraphPreset(GEMMA, "mntss/clt-gemma-2-2b-2.5M", DALLAS),
    "gemma2-2b-transcoders": GraphPreset(GEMMA, "mntss/gemma-scope-transcoders", DALLAS),
}
"""Models with the dictionaries published for them (Hanna and Ameisen et al. 2025), and the specimen."""


@dataclass(frozen=True)
class AttributionGraphsSettings(ModelSettings):
    """What `--set` can change; an empty model, dictionary or prompt is the preset's."""

    model: str = setting("", 'hub id, directory, or "specimen"')
    preset: str = setting("specimen", f"model with its transcoders: {', '.join(PRESETS)}")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    prompt: str = setting("", "prompt whose next token is explained; gets a BOS in front if it has none")
    targets: tuple[int | str, ...] = setting(
        (), "token ids, or strings of one token each, to explain; none: the likeliest tokens"
    )
    max_n_logits: int = setting(10, "likeliest tokens that are explained, at most")
    desired_logit_prob: float = setting(0.95, "probability they reach together, if so many can")
    max_feature_nodes: int | None = setting(7500, "features with incoming edges, by influence; null: all")
    batch_size: int = setting(256, "with update_interval: features chosen between two rankings")
    update_interval: int = setting(4, "batches between two rankings")
    zero_positions: Natural = setting(1, "first positions that have neither features nor errors")
    node_threshold: Share = setting(0.8, "share of the influence that the nodes told have together")
    edge_threshold: Share = setting(0.98, "share of what edges carry that the edges told carry together")
    top_k: Count = setting(15, "features listed")
    corpus: str = setting(
        "",
        'file, folder or glob of texts, in which features are looked up; "none": nowhere. Empty: for the '
        "specimen the texts shipped with it, for others nowhere",
    )
    corpus_tokens: Count = setting(
        8192, "tokens of the corpus that are read, at most; passages evenly spaced"
    )
    graph_memory: str = setting("1GiB", "bytes the graph may take beside the model while it is computed")
    arithmetic: str = setting("float32", "of the linear maps: float32 or float64")


class AttributionGraphs(Workflow):
    """The attribution graph of one prompt."""

    name = "attribution_graph"
    question = "Through which features do the tokens of a prompt affect the next token?"
    needs = "attention"
    descriptive = (
        "Direct effects of tokens and features on later features and logits, with attention patterns, "
        "normalisation scales and error nodes held at their values on the prompt. No feature is ablated."
    )
    settings_type = AttributionGraphsSettings

    def __init__(self, settings: AttributionGraphsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        chosen = chosen_preset(settings)
        self.subject = Subject(settings.reference(model, chosen.model))
        self.subject.require(self.needs, self.name)
        node = graph_node(
            self.subject.source,
            chosen.dictionary,
            chosen.prompt,
            targets=list(settings.targets) or None,
            max_n_logits=settings.max_n_logits,
            desired_logit_prob=settings.desired_logit_prob,
            max_feature_nodes=settings.max_feature_nodes,
            batch_size=settings.batch_size,
            update_interval=settings.update_interval,
            zero_positions=settings.zero_positions,
            arithmetic=settings.arithmetic,
            memory=settings.graph_memory,
        )
        self.dictionary: Dictionary = node.dictionary
        thresholds = {"node_threshold": settings.node_threshold, "edge_threshold": settings.edge_threshold}
        nodes: Nodes = {
            "graph": node,
            "pruned": pruned_graph.on(graph=Port(node), **thresholds),
            "effects": logit_effects_node(node, readout_node(self.subject.files, dtype=settings.dtype)),
        }
        self._examples: ExampleNodes | None = None
        if texts := corpus_texts(settings.corpus, chosen.model):
            self._examples = example_nodes(
                self.subject,
                self.dictionary,
                passages(self.subject, texts, settings.corpus_tokens),
                most=SHOWN,
                zero_positions=settings.zero_positions,
            )
            nodes |= {f"examples_{layer}": each for layer, each in self._examples.ranked.items()}
        self.nodes = nodes

    # -- what came out

    @cached_property
    def graph(self) -> AttributionGraph:
        """The whole graph, with edges read lazily."""
        return AttributionGraph(self.result("graph"))

    @cached_property
    def pruned(self) -> PrunedGraph:
        """The graph pruned by the two thresholds."""
        chosen, kept = self.settings, KeptPart.of(self.result("pruned").load())
        return PrunedGraph(self.graph, kept, chosen.node_threshold, chosen.edge_threshold)

    @cached_property
    def scores(self) -> dict[str, float]:
        """replacement_score and completeness_score of the whole graph, 0 to 1."""
        found = self.result("pruned")
        return {name: float(found[name]) for name in ("replacement_score", "completeness_score")}

    @cached_property
    def strongest(self) -> tuple[StrongFeature, ...]:
        """The features with most influence, with the tokens they raise and lower."""
        return strongest_features(self.pruned, **self._words, most=self.settings.top_k)

    @property
    def _words(self) -> dict[str, Any]:
        """The tokens each feature raises and lowers."""
        return {"vocabulary": self.subject.tokenizer.vocabulary, "effects": self.result("effects").load()}

    @property
    def _texts(self) -> dict[int, xr.Dataset]:
        """Strongest corpus examples of each feature, by layer."""
        if self._examples is None:
            return {}
        assert self.store is not None  # the graph's result is open
        encoded = {layer: node.open(self.store) for layer, node in self._examples.encoded.items()}
        ranked = {layer: self.result(f"examples_{layer}") for layer in encoded}
        return examples_of(self.graph, encoded, ranked, most=SHOWN)

    def views(self) -> Iterator[View]:
        """The tokens explained, the scores, the graph to look into, and its strongest features."""
        graph, counts, edges = self.graph, self.graph.counts, len(self.pruned.kept.weight)
        kept = {kind: kept_of(self.pruned, kind) for kind in (FEATURE, ERROR, TOKEN, LOGIT)}
        yield Data(
            json={
                "model_id": self.subject.files.name,
                "dictionary": self.dictionary.name,
                "prompt": graph.prompt,
                "tokens": [str(text) for text in graph.dataset["input_text"].values],
                "token_ids": graph.input_tokens,
                "active_features": len(graph.active_features),
                "nodes": {
                    FEATURE: counts.features,
                    ERROR: counts.errors,
                    TOKEN: counts.positions,
                    LOGIT: counts.logits,
                },
                "kept": {**kept, "edges": edges},
            }
        )
        ids, shares = graph.logit_token_ids.tolist(), graph.logit_probabilities.tolist()
        logits = [
            {"token": token, "token_id": i, "probability": share}
            for token, i, share in zip(graph.logit_tokens, ids, shares, strict=True)
        ]
        yield Table.of(
            logits,
            ("next token", lambda one: format_token(one["token"])),
            ("probability", "probability", format_probability),
            title=f"{self.subject.name} explained by {self.dictionary.name}: {format_text(graph.prompt)}",
            sources=("graph",),
            json={"logits": logits},
        )
        called = {feature: each.text for feature, each in labels_of(self.store, self.dictionary).items()}
        known = {**self._words, "examples": self._texts, "sources": tuple(self.nodes), "called": called}
        scores, net, strongest = graph_views(self.pruned, self.strongest, self.scores, **known)
        yield scores
        nodes, drawn, _ = drawn_part(self.pruned)
        yield from together(
            "attribution_graph",
            f"What brings about {_named(graph.logit_tokens)} in {self.subject.name}",
            net,
            caption=f"{np.count_nonzero(nodes < counts.features)} of {kept[FEATURE]:,} kept features, "
            f"{len(drawn)} of {edges:,} kept edges; {kept[ERROR]:,} kept errors not drawn. "
            f"Replacement {self.scores['replacement_score']:.2f}: influence of tokens, not of errors; "
            f"completeness {self.scores['completeness_score']:.2f}: input of nodes that is explained",
        )
        yield strongest


def chosen_preset(settings: AttributionGraphsSettings) -> GraphPreset:
    """The preset, with what the settings name in its place.

    Raises ConfigError for an unknown preset, and for another model without a dictionary.
    """
    own = preset_of(settings.preset, PRESETS)
    model = settings.model or own.model
    if model != own.model and not settings.dictionary:
        made = [name for name, preset in PRESETS.items() if preset.model == model]
        hint = f"or preset={made[0]}" if made else "a directory or org/repo"
        raise ConfigError(f"expected transcoders made for {model}, found none; set dictionary=, {hint}")
    return GraphPreset(model, settings.dictionary or own.dictionary, settings.prompt or own.prompt)


def _named(tokens: Sequence[str]) -> str:
    """The first three tokens, and the number of the others."""
    told = [repr(format_token(token)) for token in tokens[:3]]
    more = len(tokens) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")
