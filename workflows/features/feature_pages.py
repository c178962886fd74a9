"""On which tokens of a corpus is each feature active, and which tokens does it promote?

Encodes a corpus with one layer of a dictionary, and computes what a page of each of its features shows
(stages/features/pages/nodes.py): examples of every strength, histogram, effect on the logits, neighbours,
correlated features and those active together. The answer here is an overview; `pages` has the features, as
files a browser opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.features.corpus.encode import encode_nodes
from ...stages.features.labels import labels_of
from ...stages.features.layers.layout import FeatureId
from ...stages.features.pages.nodes import PageLayout, page_nodes
from ...stages.forward.models.reference import ModelRef
from ...stages.logits.lens import format_token
from ...stages.logits.readout import readout_node
from ...store.errors import ConfigError
from ..labelled import labelled
from ..material.answers import named
from ..material.feature_examples import corpus_texts, passages
from ..material.feature_labels import writes_to_stream
from ..settings import Count, ModelSettings, Natural, setting
from ..subject import Subject
from ..views import Data, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes
from .neuronpedia import NeuronpediaSource, write_neuronpedia
from .page_files import PageFiles, PageMaterial
from .place_views import place_views
from .sae_features import dictionary_of

if TYPE_CHECKING:
    import xarray as xr

    from ...store.upkeep.annotations import Annotation

__all__ = ["FeaturePages", "FeaturePagesSettings"]


@dataclass(frozen=True)
class FeaturePagesSettings(ModelSettings):
    """What `--set` can change.

    Raises ConfigError for intervals that do not divide the bins of the histogram.
    """

    dictionary: str = setting("", "dictionary: directory or org/repo; none: specimen/sae")
    against: str = setting("", "second model, of a crosscoder of two")
    layer: int | None = setting(None, "layer whose features are told, of several; none: the middle one")
    features: tuple[int, ...] = setting((), "features told; none: all of the layer")
    corpus: str = setting(
        "", "file, folder or glob of texts; none: for the specimen the texts shipped with it"
    )
    corpus_tokens: Count = setting(
        1 << 20, "tokens of the corpus that are read, at most; passages evenly spaced"
    )
    zero_positions: Natural = setting(1, "first positions of a passage that are left out: attention sinks")
    strongest: Count = setting(12, "strongest examples of a feature, one of each passage")
    intervals: Count = setting(
        5, "equal intervals of activation from which examples are drawn; they divide 50"
    )
    per_interval: Count = setting(4, "examples drawn from each")
    before: Natural = setting(16, "tokens shown before an example")
    after: Natural = setting(8, "tokens shown behind it")
    related: Count = setting(8, "neighbours, correlated and co-active features told of each")
    sample: Count = setting(1 << 15, "tokens among which pairs of features are counted, at most")
    seed: Natural = setting(0, "of what is drawn")
    block: Count = setting(
        1 << 14, "features computed together, which memory is in proportion to; in every key"
    )
    top_k: Count = setting(15, "features listed in the overview")

    def __post_init__(self) -> None:
        if PageLayout.bins % self.intervals:
            raise ConfigError(
                f"expected intervals that divide the {PageLayout.bins} bins of the histogram, found "
                f"{self.intervals}; take 5 or 10"
            )


class FeaturePages(ModelWorkflow):
    """Pages of one layer of a dictionary."""

    name = "feature_pages"
    question = "On which tokens of a corpus is each feature active, and which tokens does it promote?"
    descriptive = "Where features of a dictionary are active in a corpus, and which logits they raise."
    settings_type = FeaturePagesSettings
    settings: FeaturePagesSettings

    def plan(self) -> Nodes:
        """The corpus encoded, and what pages show."""
        given = self.settings
        self.dictionary = dictionary_of(given.dictionary, given.model, "sae")
        models = [self.subject]
        if given.against:
            models.append(Subject(ModelRef(given.against, dtype=given.dtype, device=given.device)))
        self.dictionary.require_models([each.files.name for each in models])
        for each in models:
            self.dictionary.require_fit(each.config, each.name)
        layers = self.dictionary.layers
        self.layer = layers[len(layers) // 2] if given.layer is None else given.layer
        reads = self.dictionary.reads((self.layer,))  # refuses a layer it does not have
        self.hook = str(reads[0][0]) if len(reads[0]) == 1 else f"{reads[0][0]} … {reads[0][-1]}"
        texts = corpus_texts(given.corpus, given.model)
        if not texts:
            raise ConfigError(
                f"expected a corpus in which features of {given.model} are looked up, found "
                "none; set corpus= a file, folder or glob of texts"
            )
        self.tokens = passages(self.subject, texts, given.corpus_tokens)
        if any(
            passages(each, texts, given.corpus_tokens).digest != self.tokens.digest for each in models[1:]
        ):
            raise ConfigError(
                f"expected a tokenizer that cuts the corpus as that of {given.model} does, found another in "
                f"{given.against}; features of two models are compared on the same tokens"
            )
        states = [
            each.capture(self.tokens, *map(str, hooks)) for each, hooks in zip(models, reads, strict=True)
        ]
        nodes = encode_nodes(
            self.dictionary,
            states[0],
            other=states[1] if given.against else None,
            layers=(self.layer,),
            zero_positions=given.zero_positions,
        )
        self.encoded = nodes[self.layer]
        writes = writes_to_stream(self.subject, self.dictionary)
        named_alike = (field.name for field in fields(PageLayout) if hasattr(given, field.name))
        shape = {name: getattr(given, name) for name in named_alike}
        pages = page_nodes(
            self.dictionary,
            encoded=self.encoded,
            layer=self.layer,
            readout=readout_node(self.subject.files, dtype=self.subject.dtype) if writes else None,
            features=given.features,
            layout=PageLayout(**shape),
        )
        return {**pages}

    @cached_property
    def labels(self) -> dict[FeatureId, Annotation]:
        """What people call its features."""
        return labels_of(self.store, self.dictionary)

    @cached_property
    def material(self) -> PageMaterial:
        """All that the pages tell; raises ConfigError before `run`."""
        results = {name: self.result(name) for name in self.nodes}
        assert self.store is not None
        return PageMaterial(
            results,
            self.encoded.open(self.store),
            named(self.subject, range(self.subject.config.vocab_size)),
            self.labels,
            self.about,
            f"Features of {self.dictionary.name} at {self.hook} of {self.subject.name}",
        )

    @property
    def about(self) -> list[tuple[str, str]]:
        """Names and values that say what the pages were made from."""
        it, tokens = self.dictionary, self.tokens
        corpus = f"{tokens.n_tokens:,} tokens in {tokens.n_prompts:,} passages"
        return [
            ("dictionary", f"{it.name}, {it.kind}"),
            ("features", f"{len(self.result('windows')['feature']):,} of {it.n_features:,}"),
            ("reads", ", ".join(map(str, it.places)) or self.hook),
            ("model", self.subject.name),
            ("corpus", f"{corpus}{self._left_out}"),
            ("identity", it.identity[:12]),
        ]

    @property
    def _left_out(self) -> str:
        """Which tokens have no features, for people. The states of an attention sink may be 100 times as long
        as others, and dictionaries are seldom trained on them."""
        first = self.settings.zero_positions
        if not first:
            return ""
        which = "token" if first == 1 else f"{first} tokens"
        return f"; without the first {which} of each passage, where attention sinks are"

    @property
    def pages(self) -> PageFiles:
        """The features, as files a browser opens."""
        return PageFiles(self.material)

    def write_pages(self, folder: str | Path) -> Path:
        """Every page into a folder; returns the file to open. Raises ConfigError for one that holds other
        things."""
        return self.pages.write(Path(folder))

    def write_neuronpedia(
        self, folder: str | Path, *, model: str, source_set: str, creator: str = "", dataset: str = ""
    ) -> Path:
        """Every feature as Neuronpedia imports it, into a new folder; see neuronpedia.py.

        model, source_set, creator: ids the service knows. dataset: what the corpus is called there.
        """
        of = NeuronpediaSource(model, source_set, self.layer, self.hook, creator, dataset)
        return write_neuronpedia(self.material, Path(folder), of)

    def views(self) -> Iterator[View]:
        """The most frequent features, how frequent features are, and how strongly they fire."""
        of, stats = self.material, self.material.statistics
        count = stats["firing_count"].values
        alive = int((count > 0).sum())
        n_tokens = int(self.result("statistics").attrs["n_tokens"])
        order = np.argsort(-count, kind="stable")[: self.settings.top_k]
        told = [self._told(stats.isel(feature=place), n_tokens) for place in order.tolist()]
        yield Data(
            json={
                "model_id": self.subject.files.name,
                "dictionary": self.dictionary.name,
                "hook": self.hook,
                "layer": self.layer,
                "n_features": len(count),
                "n_tokens": n_tokens,
                "alive": alive,
                "mean_l0": self.result("statistics").attrs["mean_l0"],
                "labelled": len([each for each in self.labels if each.layer == self.layer]),
                "tokens_of_pairs": of.results["partners"].attrs["n_tokens"],
            }
        )
        yield Table.of(
            told,
            ("feature", lambda one: FeatureId(one["layer"], one["index"]), str),
            ("", "label"),
            ("of tokens", "frequency", lambda share: f"{100 * share:.2f} %"),
            ("largest", "max_activation", ".3f"),
            ("mean where active", "mean_activation", ".3f"),
            title=f"The features most often active at {self.hook} of {self.subject.name}",
            caption=f"{alive:,} of {len(count):,} features are active somewhere in {n_tokens:,} tokens"
            f"{self._left_out}; every feature has a page of its own: mizarr features pages",
            json={"features": told},
        )
        histogram = Lines.of(
            self._frequencies(count, n_tokens),
            "How often features are active",
            "Of those that are active somewhere.",
            log_x=True,
        )
        yield from together(
            "feature_pages", f"Features of {self.dictionary.name}", histogram, caption=histogram.caption
        )
        if "places" in self.nodes:
            yield from place_views(self.result("places").load(), count > 0, self.dictionary.name)

    def _told(self, one: xr.Dataset, n_tokens: int) -> dict[str, Any]:
        """A feature of the overview."""
        feature = FeatureId(self.layer, int(one["feature"]))
        return {
            "layer": feature.layer,
            "index": feature.index,
            "label": self._label(feature),
            "frequency": int(one["firing_count"]) / n_tokens,
            "max_activation": float(one["max_activation"]),
            "mean_activation": float(one["mean_activation"]),
        }

    def _label(self, feature: FeatureId) -> str:
        """What people call it; what it writes, and the token it is strongest at."""
        told = [f'"{self.labels[feature].text}"'] if feature in self.labels else []
        words = self.material.vocabulary
        if "logits" in self.nodes:
            raised = self.result("logits")["raised"].sel(feature=feature.index).values
            told.append(f"writes '{format_token(words[int(raised[0])])}'")
        token = int(self.result("strongest")["token"].sel(feature=feature.index).values[0])
        if token >= 0:
            told.append(f"fires on '{format_token(words[int(self.material.token_id[token])])}'")
        return ", ".join(told) or "silent here"

    def _frequencies(self, count: Any, n_tokens: int) -> xr.DataArray:
        """Features by the share of tokens: [which, share_of_tokens], in bins of one factor."""
        shares = np.log10(count[count > 0] / n_tokens)
        low = np.floor(np.log10(1 / n_tokens))
        counts, edges = np.histogram(shares, 30, (low, 0))
        centres = 10 ** ((edges[:-1] + edges[1:]) / 2)
        return labelled(
            counts[None].astype(np.float64), "features", which=["features"], share_of_tokens=centres
        )
