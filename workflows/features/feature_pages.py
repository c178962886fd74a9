"""On which tokens of a corpus is each feature active, and which tokens does it promote?

Encodes a corpus with one layer of a dictionary, and computes a page for each feature
(stages/features/pages/nodes.py): examples over the whole range of activations, histogram of activations,
logits that the decoder raises and lowers, features with similar decoders, correlated features and co-active
features. The views here are an overview; `pages` writes the features as files for a browser.
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
from ..material.dictionaries import dictionary_of
from ..material.feature_examples import corpus_texts, passages
from ..material.feature_labels import writes_to_stream
from ..settings import Count, ModelSettings, Natural, setting
from ..subject import Subject
from ..views import Data, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes
from .neuronpedia import NeuronpediaSource, write_neuronpedia
from .page_files import PageFiles, PageMaterial
from .place_views import place_views

if TYPE_CHECKING:
    import xarray as xr

    from ...store.upkeep.annotations import Annotation

__all__ = ["FeaturePages", "FeaturePagesSettings"]


@dataclass(frozen=True)
class FeaturePagesSettings(ModelSettings):
    """Settings of the workflow `feature_pages`: the dictionary, the corpus, and what each page shows.

    Raises:
        ConfigError: for `intervals` that do not divide the number of bins of the histogram.
    """

    dictionary: str = setting("", "dictionary: directory or org/repo; none: specimen/sae")
    against: str = setting("", "second model, for a crosscoder of two models")
    layer: int | None = setting(None, "layer of a dictionary with several layers; none: the middle one")
    features: tuple[int, ...] = setting((), "indices of the features that get pages; none: all of the layer")
    corpus: str = setting(
        "", "file, folder or glob of texts; none: for the specimen the texts shipped with it"
    )
    corpus_tokens: Count = setting(
        1 << 20, "largest number of corpus tokens that are read, in evenly spaced passages"
    )
    zero_positions: Natural = setting(
        1, "number of first positions of a passage that are left out, as they are attention sinks"
    )
    strongest: Count = setting(12, "number of strongest examples of a feature, at most one per passage")
    intervals: Count = setting(
        5, "number of equal intervals of activation from which examples are drawn; must divide 50"
    )
    per_interval: Count = setting(4, "number of examples drawn from each interval")
    before: Natural = setting(16, "number of tokens shown before an example")
    after: Natural = setting(8, "number of tokens shown after an example")
    related: Count = setting(
        8, "number of features with similar decoders, of correlated and of co-active features, each"
    )
    sample: Count = setting(
        1 << 15, "largest number of tokens over which correlations and co-activations are computed"
    )
    seed: Natural = setting(0, "seed for drawing examples and the sample of tokens")
    block: Count = setting(
        1 << 14, "number of features computed together; memory grows with it, and results are cached by it"
    )
    top_k: Count = setting(15, "number of features listed in the overview")

    def __post_init__(self) -> None:
        if PageLayout.bins % self.intervals:
            raise ConfigError(
                f"expected intervals that divide the {PageLayout.bins} bins of the histogram, found "
                f"{self.intervals}; set intervals to 5 or 10"
            )


class FeaturePages(ModelWorkflow):
    """Workflow that computes a page for each feature in one layer of a dictionary: examples, statistics and
    logit effects."""

    name = "feature_pages"
    question = "On which tokens of a corpus is each feature active, and which tokens does it promote?"
    descriptive = "Where features of a dictionary are active in a corpus, and which logits they raise."
    settings_type = FeaturePagesSettings
    settings: FeaturePagesSettings

    def plan(self) -> Nodes:
        """Nodes that encode the corpus and compute the content of the pages.

        Raises:
            ConfigError: without a corpus or a dictionary for a model other than the specimen, for models that
                the dictionary was not made for, or for two models whose tokenizers differ on the corpus.
        """
        settings = self.settings
        self.dictionary = dictionary_of(settings.dictionary, settings.model, "sae")
        models = [self.subject]
        if settings.against:
            models.append(Subject(ModelRef(settings.against, dtype=settings.dtype, device=settings.device)))
        self.dictionary.require_models([model.files.name for model in models])
        for model in models:
            self.dictionary.require_fit(model.config, model.name)
        layers = self.dictionary.layers
        self.layer = layers[len(layers) // 2] if settings.layer is None else settings.layer
        reads = self.dictionary.reads((self.layer,))  # raises for a layer that the dictionary does not have
        self.hook = str(reads[0][0]) if len(reads[0]) == 1 else f"{reads[0][0]} … {reads[0][-1]}"
        texts = corpus_texts(settings.corpus, settings.model)
        if not texts:
            raise ConfigError(
                f"expected a corpus to search for examples of features of {settings.model}, found none; name "
                "a file, folder or glob of texts: corpus=…"
            )
        self.tokens = passages(self.subject, texts, settings.corpus_tokens)
        if any(
            passages(model, texts, settings.corpus_tokens).digest != self.tokens.digest
            for model in models[1:]
        ):
            raise ConfigError(
                f"expected tokenizers of {settings.model} and {settings.against} that give the corpus the "
                "same token ids, as features of two models are compared on the same tokens, found different "
                "ones; name another model: against=…"
            )
        captures = [
            model.capture(self.tokens, *map(str, hooks)) for model, hooks in zip(models, reads, strict=True)
        ]
        nodes = encode_nodes(
            self.dictionary,
            captures[0],
            other=captures[1] if settings.against else None,
            layers=(self.layer,),
            zero_positions=settings.zero_positions,
        )
        # Encoding is a node of its own, which other settings of the pages share.
        self.encoded = nodes[self.layer]
        writes = writes_to_stream(self.subject, self.dictionary)
        # `PageLayout` has fields that are no settings, such as `bins`; these keep their defaults.
        shared_names = (field.name for field in fields(PageLayout) if hasattr(settings, field.name))
        layout = {name: getattr(settings, name) for name in shared_names}
        pages = page_nodes(
            self.dictionary,
            encoded=self.encoded,
            layer=self.layer,
            readout=readout_node(self.subject.files, dtype=self.subject.dtype) if writes else None,
            features=settings.features,
            layout=PageLayout(**layout),
        )
        return {**pages}

    @cached_property
    def labels(self) -> dict[FeatureId, Annotation]:
        """Labels that people gave to features of the dictionary (`mizarr features label`)."""
        return labels_of(self.store, self.dictionary)

    @cached_property
    def material(self) -> PageMaterial:
        """Content of the pages: results, corpus tokens, vocabulary and labels. Raises ConfigError before
        `run`."""
        results = {name: self.result(name) for name in self.nodes}
        assert self.store is not None
        return PageMaterial(
            results,
            self.encoded.open(self.store),
            self.subject.token_texts(range(self.subject.config.vocab_size)),
            self.labels,
            self.about,
            f"Features of {self.dictionary.name} at {self.hook} of {self.subject.name}",
        )

    @property
    def about(self) -> list[tuple[str, str]]:
        """(name, value) pairs of the dictionary, the model and the corpus, for the head of the pages."""
        dictionary, tokens = self.dictionary, self.tokens
        corpus = f"{tokens.n_tokens:,} tokens in {tokens.n_prompts:,} passages"
        return [
            ("dictionary", f"{dictionary.name}, {dictionary.kind}"),
            ("features", f"{len(self.result('windows')['feature']):,} of {dictionary.n_features:,}"),
            ("reads", ", ".join(map(str, dictionary.places)) or self.hook),
            ("model", self.subject.name),
            ("corpus", f"{corpus}{self._without_sinks}"),
            ("identity", dictionary.identity[:12]),
        ]

    @property
    def _without_sinks(self) -> str:
        """End of a sentence on the omitted first tokens of each passage; empty without omissions."""
        # Norms of states at an attention sink may be 100 times those elsewhere; dictionaries are seldom
        # trained on them.
        n_skipped = self.settings.zero_positions
        if not n_skipped:
            return ""
        tokens = "token" if n_skipped == 1 else f"{n_skipped} tokens"
        return f"; without the first {tokens} of each passage, where attention sinks are"

    @property
    def pages(self) -> PageFiles:
        """The pages of all features, as HTML and JavaScript files for a browser."""
        return PageFiles(self.material)

    def write_pages(self, folder: str | Path) -> Path:
        """Writes all pages into a folder and returns the path of its index.html.

        Raises ConfigError for a folder that holds files other than such pages.
        """
        return self.pages.write(Path(folder))

    def write_neuronpedia(
        self, folder: str | Path, *, model: str, source_set: str, creator: str = "", dataset: str = ""
    ) -> Path:
        """Writes all features in Neuronpedia's format for bulk import (neuronpedia.py).

        Arguments:
            folder: parent folder, to which "<model>/<source>" is added.
            model: Neuronpedia's id of the model, such as "gpt2-small".
            source_set: Neuronpedia's id of the dictionary; the source is "<layer>-<source_set>".
            creator: id of the account that imports the features; may be empty.
            dataset: name of the corpus on Neuronpedia; may be empty.

        Returns:
            The new folder of the source.

        Raises:
            ConfigError: for ids with other characters than letters, digits, ".", "_" and "-", or if the
                folder of the source exists.
        """
        of = NeuronpediaSource(model, source_set, self.layer, self.hook, creator, dataset)
        return write_neuronpedia(self.material, Path(folder), of)

    def views(self) -> Iterator[View]:
        """Views in reading order: the most frequently active features, a histogram of frequencies and, for a
        crosscoder, its decoder norms by hook point."""
        material, stats = self.material, self.material.statistics
        count = stats["firing_count"].values
        alive = int((count > 0).sum())
        n_tokens = int(self.result("statistics").attrs["n_tokens"])
        # A stable sort lists equally frequent features by index.
        order = np.argsort(-count, kind="stable")[: self.settings.top_k]
        features = [self._feature_record(stats.isel(feature=i), n_tokens) for i in order.tolist()]
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
                "labelled": len([feature for feature in self.labels if feature.layer == self.layer]),
                "tokens_of_pairs": material.results["partners"].attrs["n_tokens"],
            }
        )
        yield Table.of(
            features,
            ("feature", lambda row: FeatureId(row["layer"], row["index"]), str),
            ("label", "label"),
            ("share of tokens", "frequency", lambda share: f"{100 * share:.2f} %"),
            ("largest activation", "max_activation", ".3f"),
            ("mean where active", "mean_activation", ".3f"),
            title=f"Features that are active at the most tokens, at {self.hook} of {self.subject.name}",
            caption="One row per feature. Label: writes, the token whose logit its decoder raises most; "
            "fires on, the token of its largest activation. Share of tokens: at which it is active. "
            f"{alive:,} of {len(count):,} features are active at one or more of {n_tokens:,} tokens of the "
            f"corpus{self._without_sinks}. `mizarr features pages` writes a page for every feature.",
            json={"features": features},
        )
        histogram = Lines.of(
            self._frequencies(count, n_tokens),
            "Number of features by the share of tokens at which they are active",
            "x: share of tokens of the corpus at which a feature is active. y: number of features in a bin; "
            f"bins have equal width on the logarithmic axis. The {alive:,} features that are active at one "
            "or more tokens are counted.",
            log_x=True,
        )
        yield from together(
            "feature_pages", f"Features of {self.dictionary.name}", histogram, caption=histogram.caption
        )
        if "places" in self.nodes:
            yield from place_views(self.result("places").load(), count > 0, self.dictionary.name)

    def _feature_record(self, statistics: xr.Dataset, n_tokens: int) -> dict[str, Any]:
        """JSON record of one feature for the overview: label, share of the `n_tokens` tokens at which it is
        active, and activations."""
        feature = FeatureId(self.layer, int(statistics["feature"]))
        return {
            "layer": feature.layer,
            "index": feature.index,
            "label": self._label(feature),
            "frequency": int(statistics["firing_count"]) / n_tokens,
            "max_activation": float(statistics["max_activation"]),
            "mean_activation": float(statistics["mean_activation"]),
        }

    def _label(self, feature: FeatureId) -> str:
        """Label of a feature: a person's label if there is one, the token whose logit the feature raises
        most, and the token of its largest activation."""
        parts = [f'"{self.labels[feature].text}"'] if feature in self.labels else []
        words = self.material.vocabulary
        if "logits" in self.nodes:
            raised = self.result("logits")["raised"].sel(feature=feature.index).values
            parts.append(f"writes '{format_token(words[int(raised[0])])}'")
        token = int(self.result("strongest")["token"].sel(feature=feature.index).values[0])
        # -1: the feature is active nowhere in the corpus.
        if token >= 0:
            parts.append(f"fires on '{format_token(words[int(self.material.token_id[token])])}'")
        return ", ".join(parts) or "silent here"

    def _frequencies(self, count: Any, n_tokens: int) -> xr.DataArray:
        """Number of features by the share of tokens at which they are active, [which, share_of_tokens], in 30
        bins of equal width in log10; features that are active nowhere are left out."""
        shares = np.log10(count[count > 0] / n_tokens)
        # The rarest feature that is not silent is active at one token.
        low = np.floor(np.log10(1 / n_tokens))
        counts, edges = np.histogram(shares, 30, (low, 0))
        centres = 10 ** ((edges[:-1] + edges[1:]) / 2)
        return labelled(
            counts[None].astype(np.float64), "features", which=["features"], share_of_tokens=centres
        )
