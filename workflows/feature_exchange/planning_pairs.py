"""Does figure 13 hold over many pairs? Features of many words exchanged, each pair at every position.

In each pair, the features of the expected last word of a text are suppressed and one of another word is
injected, at one position at a time. Measured are the position with the highest probability of the other word,
and the change of that probability at the site, the position at which the word is assumed to be decided
(figure 13 of Lindsey et al. 2025, "On the Biology of a Large Language Model"; candle-mi's predecessor reports
136 such pairs on Gemma 2, of which 70 % peak at the site).

Controls of every pair are random features of the same layer with the same norm of their write and the same
suppression: at the site, and for the share of pairs that peak there, at every position. The set of pairs that
work is compared with that of the same pairs on another dictionary or model, against random sets of the same
sizes (Jaccard index). The importance of layers is described, not claimed: predictions with the MLPs of
neighbouring layers replaced by their mean over the prompts.

Each pair is an experiment of its own, so that an interrupted run continues with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import Null
from ...stages.causal.draws import Draws
from ...stages.causal.grids.ablation import Ablation
from ...stages.causal.grids.patching_metrics import Probability, Rank
from ...stages.features.dictionary import Dictionary
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..claim import Claim, Controls
from ..labelled import records
from ..settings import ControlSettings, Count, ModelSettings, Natural, Positive, preset_of, setting
from ..subject import Subject
from ..views import Data, Heatmap, Line, Lines, Table, View, together
from ..workflow import Nodes, Workflow
from .exchange import FeatureExchange, changes, probabilities
from .presets import PAIR_PRESETS, ExchangePair, PairPreset, read_pairs
from .workflow import position_sweep

if TYPE_CHECKING:
    import xarray as xr

    from ...pipeline.nodes import ResultNode
    from ...stages.forward.models.model import Model

__all__ = ["PlanningPairs", "PlanningPairsSettings"]

SHUFFLES = 1000
"""Number of random sets that the overlap of two sets of pairs is compared with."""
ALL_DOSES, SUPPRESSION, RANDOM = 0, 1, 2
"""Indices into the axis "exchange" of each pair's result: the full exchange, the suppression alone, and the
first random feature."""


@dataclass(frozen=True)
class PlanningPairsSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `planning_pairs`; empty ones are taken from the preset."""

    model: str = setting("", "hub id or directory")
    preset: str = setting("specimen", "published pairs, or the specimen's own")
    pairs: str = setting("", "JSON file of pairs, instead of the preset's")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    against: str = setting(
        "",
        'preset with another dictionary or model for the same pairs, at its own strength; "none" for no '
        "comparison; none: the preset's",
    )
    limit: Natural = setting(12, "number of pairs, from the first on; 0: all")
    strength: Positive | None = setting(
        None, "multiple of the decoder vectors that is added and subtracted; none: the preset's"
    )
    window: Count = setting(1, "number of neighbouring layers whose MLPs are replaced together")
    controls: Natural = setting(
        20, "random features instead of the injected one, at every position; 0: none, and nothing is claimed"
    )


class PairExchange(FeatureExchange):
    """Exchange of features of one pair of words; the probability of each word is that of its first token
    after the prompt."""

    @cached_property
    def word_ids(self) -> tuple[int, int]:
        """First token ids of the injected and of the suppressed word. Raises ConfigError if they are
        equal."""
        inject, suppress = (
            self.subject.answer_id(self.preset.prompt, word)
            for word in (self.preset.inject_word, self.preset.suppress_word)
        )
        if inject == suppress:
            raise ConfigError(
                "expected words that begin with different tokens, found "
                f"{self.preset.inject_word!r} and {self.preset.suppress_word!r}; choose another pair"
            )
        return inject, suppress

    def every_position_node(self) -> ResultNode:
        """Node that runs the full exchange, the suppression alone and the exchange with each random feature,
        at every position."""
        if not self.suppress:
            raise ConfigError(
                f"expected features to suppress in the pair with the prompt {self.preset.prompt[-40:]!r}, "
                "found none; name some in its field suppress"
            )
        return self.node(self.every_position, self.tried, words=self.word_ids)


@dataclass(frozen=True)
class PairResult:
    """Result of one pair of words, at every position."""

    exchange: PairExchange
    """The exchange of the pair, prepared for its model."""
    result: xr.Dataset
    """Result of `PairExchange.every_position_node`."""

    @cached_property
    def probability(self) -> Floats:
        """Probability of the injected word at the end of the prompt, [position, exchange]."""
        return probabilities(self.result)

    @cached_property
    def change(self) -> Floats:
        """Probability of the injected word minus that without injection, [position, exchange]."""
        return changes(self.result)

    @property
    def site(self) -> int:
        """Position at which the word is assumed to be decided."""
        return self.exchange.required_site

    @property
    def effect(self) -> float:
        """Change of the probability of the injected word by the exchange at the site."""
        return float(self.change[self.site, ALL_DOSES])

    @property
    def null(self) -> Null:
        """Null distribution of `effect`: the change by random features in place of the injected one."""
        return Null(self.change[self.site, RANDOM:], self.exchange.controls_label)

    @property
    def peaks(self) -> Floats:
        """Whether each exchange changes the probability of the injected word most at the site, 1 or 0,
        [exchange]: the full exchange, then those with random features."""
        # The suppression alone is no control of the injection.
        largest = np.delete(self.change.argmax(axis=0), SUPPRESSION)
        return np.where(largest == self.site, 1.0, 0.0)

    @property
    def works(self) -> bool:
        """Whether the exchange has its largest effect at the site, and one beyond chance."""
        return bool(self.peaks[ALL_DOSES]) and self.null.is_beyond_chance(self.effect)

    def record(self) -> dict[str, Any]:
        """JSON record of the pair: the fields of candle-mi's figure 13, and the null distribution."""
        preset, tokens, sweep = self.exchange.preset, self.exchange.tokens, self.probability[:, ALL_DOSES]
        best = int(sweep.argmax())
        # The run without injection is the same for every position.
        baseline, baseline_suppressed = np.exp(self.result["baseline_logprob"].isel(place=0).values).tolist()
        return {
            "prompt": preset.prompt,
            "suppress_word": preset.suppress_word,
            "inject_word": preset.inject_word,
            "suppress_features": list(preset.suppress),
            "inject_feature": preset.inject,
            "site": self.site,
            "baseline_prob": baseline,
            "baseline_suppress_prob": baseline_suppressed,
            "suppress_only_prob": float(self.probability[self.site, SUPPRESSION]),
            "prob_at_site": float(sweep[self.site]),
            "max_prob": float(sweep[best]),
            "max_position": best,
            "max_token": tokens[best],
            "peaks_at_site": bool(self.peaks[ALL_DOSES]),
            "works": self.works,
            "change": self.effect,
            "null": self.null.to_json(self.effect),
            "null_median": Null(self.probability[self.site, RANDOM:], "random features").median,
            "sweep": position_sweep(tokens, prob=sweep),
        }


class PairSet:
    """All pairs of words of one preset, prepared for its model and dictionary."""

    def __init__(
        self,
        preset: PairPreset,
        pairs: Sequence[ExchangePair],
        settings: PlanningPairsSettings,
        model: Model | None = None,
    ) -> None:
        """
        Arguments:
            preset: model, dictionary and strength.
            pairs: the pairs.
            settings: controls, seed, and how the model is loaded.
            model: a loaded model to use instead of the preset's; None for the preset's.

        Raises:
            ConfigError, DictionaryError, PromptError: a pair does not fit the model or the dictionary.
        """
        self.preset, self.pairs = preset, tuple(pairs)
        self.subject = Subject(settings.reference(model, preset.model))
        dictionary = Dictionary.from_pretrained(preset.dictionary)
        self.exchanges = [
            PairExchange(preset.of(pair), self.subject, dictionary, settings) for pair in self.pairs
        ]
        for number, exchange in enumerate(self.exchanges):
            try:
                _ = exchange.required_site
            except ConfigError as error:
                # A file has many pairs: the message must say which one to mend.
                raise ConfigError(f"pair {number}: {error}") from error

    def nodes(self, prefix: str) -> Nodes:
        """A node per pair, by name: prefix "pair" gives "pair_0", "pair_1", ..."""
        return {f"{prefix}_{i}": pair.every_position_node() for i, pair in enumerate(self.exchanges)}


class PlanningPairs(Workflow):
    """Workflow that exchanges features of many pairs of words, each at every position of its prompt."""

    name = "planning_pairs"
    question = (
        "Over many pairs of words: do features at an earlier token decide the last word, more than random "
        "features do?"
    )
    settings_type = PlanningPairsSettings
    settings: PlanningPairsSettings

    def __init__(self, settings: PlanningPairsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        preset = preset_of(settings.preset, PAIR_PRESETS)
        replaced = {
            name: value for name in ("model", "dictionary", "strength") if (value := getattr(settings, name))
        }
        pairs = read_pairs(Path(settings.pairs)) if settings.pairs else preset.pairs
        # limit=0 stands for all pairs.
        self.own = PairSet(replace(preset, **replaced), pairs[: settings.limit or None], settings, model)
        self.preset, self.subject = self.own.preset, self.own.subject
        self.other = self._other("" if settings.pairs or replaced else preset.against)
        self.nodes = self.own.nodes("pair")
        if self.other is not None:
            self.nodes |= self.other.nodes("against")
        self.nodes |= {"layers": self.subject.on_model(self._layers())}

    def _other(self, fallback: str) -> PairSet | None:
        """Same pairs with model and dictionary of the preset `against`; None without this preset.

        Arguments:
            fallback: name of the preset if settings.against is empty; "" for none.
        """
        name = self.settings.against or fallback
        if name in ("", "none"):
            return None
        preset = preset_of(name, PAIR_PRESETS)
        by_name = {pair_name(pair): pair for pair in preset.pairs}
        if missing := [pair for pair in self.own.pairs if pair_name(pair) not in by_name]:
            raise ConfigError(
                f"expected the preset {name} to have the same pairs, found none with the prompt "
                f"{missing[0].prompt!r} and the injected word {missing[0].inject_word!r}; compare with "
                "another preset: against=…, or with none: against=none"
            )
        pairs = [by_name[pair_name(pair)] for pair in self.own.pairs]
        # A revision is a commit of the repository of the first model.
        is_same_model = preset.model == self.preset.model
        settings = self.settings if is_same_model else replace(self.settings, revision=None)
        return PairSet(preset, pairs, settings)

    def _layers(self) -> Draws:
        """Experiment that replaces MLP outputs of each window of layers by their mean over the prompts, one
        draw per prompt."""
        # Several pairs may share a prompt; the first of them stands for it.
        by_prompt = {exchange.ids: exchange for exchange in reversed(self.own.exchanges)}
        prompts = [exchange for exchange in self.own.exchanges if by_prompt[exchange.ids] is exchange]
        return Draws(
            tuple(
                Ablation(
                    tokens=exchange.ids,
                    kinds=("mlp_out",),
                    over="layer",
                    how="mean",
                    references=tuple(reference.ids for reference in prompts),
                    window=self.settings.window,
                    metrics=(Probability(exchange.word_ids[1]), Rank(exchange.word_ids[1])),
                )
                for exchange in prompts
            )
        )

    @cached_property
    def results(self) -> list[PairResult]:
        """Results of all pairs, in their order."""
        return self._read(self.own, "pair")

    @cached_property
    def results_against(self) -> list[PairResult]:
        """Results of the pairs with the second preset, `against`; empty without one."""
        return [] if self.other is None else self._read(self.other, "against")

    def _read(self, pairs: PairSet, prefix: str) -> list[PairResult]:
        """Results of the nodes with this prefix, one per pair, in memory."""
        return [
            PairResult(pair, self.result(f"{prefix}_{i}").load()) for i, pair in enumerate(pairs.exchanges)
        ]

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The record of each pair."""
        return [result.record() for result in self.results]

    def views(self) -> Iterator[View]:
        """Views in reading order: table of the pairs with their controls, changes by position, and a table of
        layers."""
        records = self.records
        yield Data(
            json={
                "model": self.subject.files.name,
                "clt_repo": self.preset.dictionary,
                "strength": self.preset.strength,
                "n_pairs": len(records),
                "n_peak_at_site": sum(row["peaks_at_site"] for row in records),
                "n_work": sum(row["works"] for row in records),
                "against": self._against_json(),
            }
        )
        yield self._table()
        yield from self._sweeps()
        yield self._layers_table()

    def claims(self) -> Iterator[Claim]:
        """Claims about the mean effect at the site, the share of pairs with the largest effect there, and the
        overlap with the pairs that work on the other dictionary."""
        results, settings = self.results, self.settings
        peaks = np.array([result.peaks for result in results])
        # The features of the specimen's pairs were chosen on other prompts; of other pairs this is unknown.
        is_held_out = not settings.pairs and self.preset.model == "specimen"
        # The runs give `controls` features per pair; their combinations over pairs give far more means.
        draws = Controls(1000, settings.seed)
        controls = "another feature of the same layer in each pair, with the same write norm"
        pairs = f"{len(results)} pairs of {self.subject.name}"
        effects_at_site = np.array([result.effect for result in results])
        for text, effects, random_effects in (
            (
                (
                    f"over {pairs}, exchanging features at the site, where the word is assumed to be "
                    "decided, changes the probability of the injected word"
                ),
                effects_at_site,
                np.array([result.null.values for result in results]),
            ),
            (
                f"share of {pairs} in which the probability of the injected word changes most at the site",
                peaks[:, 0],
                peaks[:, 1:],
            ),
        ):
            yield Claim.over(text, effects, random_effects, controls, draws, held_out=is_held_out)
        if self.other is not None and np.isfinite(self.overlap[0]):
            text, of = (
                f"pairs that work with {self._both} overlap (Jaccard index)",
                "random sets of as many pairs",
            )
            yield Claim.against(text, *self.overlap, of)

    def claims_caption(self) -> str:
        """Caption of the claims: how the features were chosen, and whether any pair works on either
        dictionary."""
        if self.other is None or np.isfinite(self.overlap[0]):
            return self.preset.selection
        return (
            f"{self.preset.selection} No pair works with {self._both}, so that no claim is made about their "
            "overlap."
        )

    @property
    def _both(self) -> str:
        """Names of the two compared dictionaries, for claims."""
        assert self.other is not None
        return f"{self.preset.dictionary} and {self.other.preset.dictionary}"

    @cached_property
    def overlap(self) -> tuple[float, Floats]:
        """Jaccard index of the pairs that work on each dictionary, and those of random sets of the same
        sizes."""
        works, works_against = (
            [result.works for result in results] for results in (self.results, self.results_against)
        )
        random = np.zeros(0)
        if any(works + works_against):
            random = shuffled_jaccard(works, works_against, SHUFFLES, seed=self.settings.seed)
        return jaccard(works, works_against), random

    def _against_json(self) -> dict[str, Any] | None:
        """JSON fields of the second preset: Jaccard index and records of its pairs; None without a second
        preset."""
        if self.other is None:
            return None
        overlap = self.overlap[0]
        return {
            "model": self.other.subject.files.name,
            "clt_repo": self.other.preset.dictionary,
            "jaccard": overlap if np.isfinite(overlap) else None,
            "n_work": sum(result.works for result in self.results_against),
            "pairs": [result.record() for result in self.results_against],
        }

    def _table(self) -> Table:
        """Table of pairs: P(injected word) before and with the exchange, control median, p-value, and whether
        the pair works."""
        rows, columns = self.records, list[tuple[Any, ...]]()
        if self.settings.controls:
            columns += [
                ("random", "null_median", format_probability),
                ("p", lambda row: row["null"]["share_as_large"], ".2g"),
            ]
        columns += [
            ("largest at", lambda row: f"{format_token(row['max_token'])} ({row['max_position']})"),
            ("works", lambda row: "yes" if row["works"] else "–"),
        ]
        if self.other is not None:
            works = {pair_name(result.exchange.preset): result.works for result in self.results_against}
            name = f"on {self.other.preset.dictionary}"
            columns += [(name, lambda row: "yes" if works[row["prompt"], row["inject_word"]] else "–")]
        return Table.of(
            rows,
            ("prompt", lambda row: format_text(row["prompt"].splitlines()[-1])),
            ("words", lambda row: f"{row['suppress_word']} → {row['inject_word']}"),
            ("before", "baseline_prob", format_probability),
            ("at the site", "prob_at_site", format_probability),
            *columns,
            strong=lambda row: row["works"],
            title=f"{len(rows)} pairs on {self.subject.name}, features of {self.preset.dictionary}, strength "
            f"{self.preset.strength:g}",
            caption="One row per pair of words. The features of the prompt's expected last word are "
            "suppressed; a feature of another word is injected. Before: probability of the injected word at "
            "the end of the prompt, without the exchange. At the site: with the exchange at the site, the "
            "position at which the word is assumed to be decided. Random, p: control, "
            f"{self.settings.controls} other features of the same layer with the same write norm. Largest "
            "at: position with the highest probability. Bold: the pair works, that is, the change is largest "
            "at the site and beyond chance there.",
            json={"pairs": rows},
        )

    def _sweeps(self) -> Iterator[View]:
        """Heatmap of the change of P(injected word) by pair and position relative to the site, and curves of
        its mean over pairs and that of random features."""
        results = self.results
        # Sites differ between pairs, so that columns are aligned at the site and padded with NaN.
        before = max(result.site for result in results)
        after = max(result.exchange.last - result.site for result in results)
        offsets = tuple(range(-before, after + 1))
        exchange, random = (np.full((len(results), len(offsets)), np.nan) for _ in range(2))
        for row, result in enumerate(results):
            columns = slice(before - result.site, before - result.site + len(result.change))
            exchange[row, columns] = result.change[:, ALL_DOSES]
            if self.settings.controls:
                random[row, columns] = result.change[:, RANDOM:].mean(axis=1)
        names = [f"{row['suppress_word']} → {row['inject_word']} ({i})" for i, row in enumerate(self.records)]
        grid = Heatmap(
            title="Change of the injected word by position of the exchange",
            caption="Each cell: one pair of words (row), with features exchanged at one position (column). "
            "Value: probability of the injected word at the end of the prompt with the exchange, minus that "
            "without. Column 0: the site, the position at which the word is assumed to be decided.",
            values=exchange,
            rows=tuple(names),
            columns=tuple(map(str, offsets)),
            row_name="pair",
            column_name="position relative to the site",
            value_name="change of the probability",
            diverging=True,
        )
        in_prompt = np.isfinite(exchange)

        def mean(values: Floats) -> Any:
            return np.where(in_prompt, values, 0.0).sum(axis=0) / in_prompt.sum(axis=0)

        lines = Lines(
            title="Mean over the pairs",
            caption="x: position of the exchange, counted from the site, the position at which the word is "
            "assumed to be decided. y: change of the probability of the injected word, mean over the pairs "
            "that have the position. Dashed: control, random features of the same layer with the same write "
            "norm.",
            x=offsets,
            x_name="position relative to the site",
            y_name="change of the probability",
            lines=(
                Line("exchange", mean(exchange), strong=True),
                Line("random features", mean(random), control=True),
            ),
            low=0.0,
            at=0,
        )
        yield from together("planning_pairs", f"{len(names)} pairs on {self.subject.name}", grid, lines)

    def _layers_table(self) -> Table:
        """Table of the prompts whose word stays the likeliest when MLPs of a window of layers are ablated."""
        layers = self.result("layers").load()
        untouched = int((layers["unpatched"].sel(run="clean", metric="rank") == 0).sum())
        summed = layers.assign(
            first=(layers["rank"] == 0).sum("draw"), mean=layers["probability"].mean("draw")
        )
        rows, count = (
            records(summed, "layer", "layer", still_first="first", mean_prob="mean"),
            layers.sizes["draw"],
        )
        width = f"{self.settings.window} layers around it" if self.settings.window > 1 else "one layer"
        return Table.of(
            rows,
            ("layer", "layer", "d"),
            ("still likeliest", "still_first", "d"),
            ("mean probability", "mean_prob", format_probability),
            title=f"MLPs of {width} ablated: prompts of {count} in which the expected word is still "
            "likeliest",
            caption="One row per layer whose MLP output is replaced by its mean over these prompts. Still "
            "likeliest: number of prompts whose expected word stays the most likely next token (without "
            f"ablation: {untouched}). Mean probability: of the expected word. Nothing is claimed about "
            "layers: there are too few for a null distribution.",
            sources=("layers",),
            json={"layer_suppression": rows, "prompts": count, "said_untouched": untouched},
        )


def pair_name(pair: Any) -> tuple[str, str]:
    """Prompt and injected word of a pair, which identify it on every dictionary."""
    return pair.prompt, pair.inject_word


def jaccard(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Jaccard index of two sets: size of the intersection over that of the union; NaN for two empty sets.

    Arguments:
        a: mask of the first set.
        b: mask of the second set.
    """
    intersection, union = np.logical_and(a, b).sum(), np.logical_or(a, b).sum()
    return float(intersection / union) if union else float("nan")


def shuffled_jaccard(a: Sequence[bool], b: Sequence[bool], count: int, *, seed: int) -> Floats:
    """Jaccard indices of set `a` with random sets of the size of `b`, [draw].

    Arguments:
        a: mask of the first set.
        b: mask of the second set; the random sets have its size.
        count: number of draws.
        seed: of the draws.
    """
    random = np.random.default_rng(seed)
    shuffled = (random.permutation(np.asarray(b, bool)).tolist() for _ in range(count))
    return np.array([jaccard(a, members) for members in shuffled])
