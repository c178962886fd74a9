"""Through which features do the tokens of a prompt affect the next token?

Replaces the MLPs by transcoders, holds attention patterns and normalisation scales at their values on the
prompt, and computes the direct effect of every token, feature and error node on every feature and on the most
likely logits (Ameisen et al. 2025, "Circuit Tracing: Revealing Computational Graphs in Language Models";
stages/graph/). The answer shows the pruned graph, which carries most of the influence on the logits; its
strongest features, with the tokens whose logits they raise and lower; and the share of the influence that
comes from tokens and features rather than from error nodes.

Settings and their defaults are those of circuit-tracer's command line. Files for other programs are written
by the graph: `workflow.graph.to_pt(…)`, `workflow.pruned.to_viewer(…)`, `.to_graphml(…)`.

The default runs offline: the specimen model with its own cross-layer transcoder, whose features are shown
with the passages of the shipped texts in which their activations are largest.
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
"""Number of corpus examples shown for each feature."""


class GraphPreset(NamedTuple):
    """A model, transcoders that were trained on it, and an example prompt."""

    model: str
    """Hub id of the model, or "specimen"."""
    dictionary: str
    """Transcoders: org/repo on the hub, or the name of shipped ones."""
    prompt: str
    """Example prompt, whose next token is explained."""


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
"""Presets by name: models with the transcoders published for them (Hanna and Ameisen et al. 2025), and the
specimen."""


@dataclass(frozen=True)
class AttributionGraphsSettings(ModelSettings):
    """Settings of the workflow `attribution_graph`; an empty model, dictionary or prompt is taken from the
    preset."""

    model: str = setting("", 'hub id, directory, or "specimen"')
    preset: str = setting("specimen", f"model with its transcoders: {', '.join(PRESETS)}")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    prompt: str = setting("", "prompt whose next token is explained; gets a BOS in front if it has none")
    targets: tuple[int | str, ...] = setting(
        (), "tokens to explain: token ids, or strings of one token each; none: the most likely next tokens"
    )
    max_n_logits: int = setting(10, "largest number of most likely tokens that are explained")
    desired_logit_prob: float = setting(
        0.95, "fewer tokens are explained if their probabilities already sum to this"
    )
    max_feature_nodes: int | None = setting(
        7500, "largest number of features whose incoming edges are computed, by influence; null: all"
    )
    # Two settings, as on circuit-tracer's command line; here only their product matters.
    batch_size: int = setting(
        256, "times update_interval: number of features added before influences are ranked again"
    )
    update_interval: int = setting(4, "number of batches before influences are ranked again")
    # The first position is an attention sink: its states are far larger, and dictionaries are seldom trained
    # on them.
    zero_positions: Natural = setting(1, "number of first positions without features and error nodes")
    node_threshold: Share = setting(
        0.8, "nodes are kept, largest influence first, until they have this share of the influence"
    )
    edge_threshold: Share = setting(
        0.98, "edges are kept, largest first, until they carry this share of the influence"
    )
    top_k: Count = setting(15, "number of features in the table")
    corpus: str = setting(
        "",
        'texts in which examples of features are searched: file, folder or glob; "none": no examples. Empty: '
        "the shipped texts for the specimen, no examples for other models",
    )
    corpus_tokens: Count = setting(
        8192, "largest number of corpus tokens that are read, in evenly spaced passages"
    )
    graph_memory: str = setting("1GiB", "memory that computing the graph may use beside the model")
    arithmetic: str = setting("float32", "dtype of the graph's linear maps: float32 or float64")


class AttributionGraphs(Workflow):
    """Workflow that computes and prunes the attribution graph of one prompt, with labels and corpus examples
    of its features."""

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
        preset = chosen_preset(settings)
        self.subject = Subject(settings.reference(model, preset.model))
        self.subject.require(self.needs, self.name)
        node = graph_node(
            self.subject.source,
            preset.dictionary,
            preset.prompt,
            # No targets mean the most likely tokens, for which the graph expects None.
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
        if texts := corpus_texts(settings.corpus, preset.model):
            self._examples = example_nodes(
                self.subject,
                self.dictionary,
                passages(self.subject, texts, settings.corpus_tokens),
                most=SHOWN,
                zero_positions=settings.zero_positions,
            )
            nodes |= {f"examples_{layer}": node for layer, node in self._examples.ranked.items()}
        self.nodes = nodes

    # -- results

    @cached_property
    def graph(self) -> AttributionGraph:
        """The graph before pruning; its edge weights are read from the store when they are used."""
        return AttributionGraph(self.result("graph"))

    @cached_property
    def pruned(self) -> PrunedGraph:
        """The graph pruned by `node_threshold` and `edge_threshold`."""
        settings, kept_part = self.settings, KeptPart.of(self.result("pruned").load())
        return PrunedGraph(self.graph, kept_part, settings.node_threshold, settings.edge_threshold)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Replacement and completeness score (Ameisen et al. 2025) of the unpruned graph, each from 0 to
        1."""
        pruned = self.result("pruned")
        return {name: float(pruned[name]) for name in ("replacement_score", "completeness_score")}

    @cached_property
    def strongest(self) -> tuple[StrongFeature, ...]:
        """The `top_k` features of largest influence, with the tokens whose logits they raise and lower."""
        return strongest_features(self.pruned, **self._logit_effects, most=self.settings.top_k)

    @property
    def _logit_effects(self) -> dict[str, Any]:
        """Keyword arguments that views of features share: the vocabulary, and each feature's effect on the
        logits."""
        return {"vocabulary": self.subject.tokenizer.vocabulary, "effects": self.result("effects").load()}

    @property
    def _texts(self) -> dict[int, xr.Dataset]:
        """Corpus examples with the largest activations of each feature, by layer; empty without a corpus."""
        if self._examples is None:
            return {}
        assert self.store is not None  # `run` has set it, as the result of the graph is open
        encoded = {layer: node.open(self.store) for layer, node in self._examples.encoded.items()}
        ranked = {layer: self.result(f"examples_{layer}") for layer in encoded}
        return examples_of(self.graph, encoded, ranked, most=SHOWN)

    def views(self) -> Iterator[View]:
        """Views in reading order: the explained tokens, the scores, the pruned graph, and a table of its
        strongest features."""
        graph, counts, edges = self.graph, self.graph.counts, len(self.pruned.kept.weight)
        n_kept = {kind: kept_of(self.pruned, kind) for kind in (FEATURE, ERROR, TOKEN, LOGIT)}
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
                "kept": {**n_kept, "edges": edges},
            }
        )
        token_ids, probabilities = graph.logit_token_ids.tolist(), graph.logit_probabilities.tolist()
        logits = [
            {"token": token, "token_id": token_id, "probability": probability}
            for token, token_id, probability in zip(graph.logit_tokens, token_ids, probabilities, strict=True)
        ]
        yield Table.of(
            logits,
            ("next token", lambda row: format_token(row["token"])),
            ("probability", "probability", format_probability),
            title=f"Next tokens that the graph explains, in {self.subject.name} with {self.dictionary.name}: "
            f"'{format_text(graph.prompt)}'",
            caption="One row per next token that the graph explains: the most likely ones, or those set by "
            "the user. Their logits are the targets of the attribution graph.",
            sources=("graph",),
            json={"logits": logits},
        )
        labels = {
            feature: annotation.text for feature, annotation in labels_of(self.store, self.dictionary).items()
        }
        scores, net, strongest = graph_views(
            self.pruned,
            self.strongest,
            self.scores,
            **self._logit_effects,
            examples=self._texts,
            sources=tuple(self.nodes),
            called=labels,
        )
        yield scores
        drawn_nodes, drawn_edges, _ = drawn_part(self.pruned)
        yield from together(
            "attribution_graph",
            f"Direct effects on {_listed(graph.logit_tokens)} in {self.subject.name}",
            net,
            # In circuit-tracer's order of nodes, which this graph keeps, features come first.
            caption="Nodes: tokens (bottom), features of the dictionary by layer, and logits (top). Lines: "
            "direct effects of one node on another. Drawn: "
            f"{np.count_nonzero(drawn_nodes < counts.features)} of the {n_kept[FEATURE]:,} features and "
            f"{len(drawn_edges)} of the {edges:,} edges that pruning kept, without its {n_kept[ERROR]:,} "
            "error nodes. An error node is what the features of one layer leave unexplained at one token. "
            f"Replacement score {self.scores['replacement_score']:.2f}: share of the influence on the logits "
            "that comes from tokens through features, not from error nodes. Completeness score "
            f"{self.scores['completeness_score']:.2f}: share of the input of all nodes that comes from "
            "tokens and features.",
        )
        yield strongest


def chosen_preset(settings: AttributionGraphsSettings) -> GraphPreset:
    """The preset that the settings name, with the model, dictionary and prompt of the settings where they are
    set.

    Raises:
        ConfigError: for an unknown preset, or for a model other than the preset's without a dictionary.
    """
    preset = preset_of(settings.preset, PRESETS)
    model = settings.model or preset.model
    # Transcoders of one model mean nothing for another, so the preset's are never used with a new model.
    if model != preset.model and not settings.dictionary:
        matching = [name for name, candidate in PRESETS.items() if candidate.model == model]
        hint = f", or set preset={matching[0]}" if matching else ""
        raise ConfigError(
            f"expected transcoders that were trained on {model}, found none; name them: dictionary=DIRECTORY "
            f"or ORG/REPO{hint}"
        )
    return GraphPreset(model, settings.dictionary or preset.dictionary, settings.prompt or preset.prompt)


def _listed(tokens: Sequence[str]) -> str:
    """The first three tokens, quoted, and the number of further ones: "' a', ' b', ' c' and 2 more"."""
    quoted = [repr(format_token(token)) for token in tokens[:3]]
    n_further = len(tokens) - len(quoted)
    return ", ".join(quoted) + (f" and {n_further} more" if n_further else "")
