"""Does figure 13 hold over many pairs? Features of many words exchanged, each pair at every position.

In each pair the features of the word a text would end on are suppressed and one of another word is injected,
at every position by itself; told is where that makes the other word likeliest, and how much likelier it
becomes at the site where the word is held to be decided (figure 13 of Lindsey et al. 2025, "On the Biology of
a Large Language Model"; of candle-mi's predecessor 136 such pairs on Gemma 2, 70 % of which peak at the
site).

Every pair stands beside random features of the same layer that write as much, with the same suppression: at
the site, and, for the share of pairs that peak there, at every position. Which pairs work is compared with
the same pairs on another dictionary or model, beside sets as large that were drawn (Jaccard). Which layers
the words need is described: what is left of them when the MLPs of some neighbouring layers say their mean
over the prompts.

A pair is an experiment of its own, so that a killed run goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...stages.causal.controls import Null
from ...stages.causal.draws import Draws
from ...stages.causal.grids.ablation import Ablation
from ...stages.causal.grids.patching_metrics import Probability, Rank
from ...stages.logits.lens import format_probability, format_text, format_token
from ...store.arrays import Floats
from ...store.errors import ConfigError
from ..material.feature_presets import preset_of
from ..settings import ControlSettings, Count, ModelSettings, Natural, Positive, setting
from ..views import Data, Finding, Findings, Heatmap, Line, Lines, Table, View, together
from ..workflow import Workflow
from .exchanges import OWN, RANDOM, Exchanged, Exchanges, jaccard, shuffled_jaccard
from .presets import PAIR_PRESETS, ExchangePair, read_pairs

if TYPE_CHECKING:
    from ...pipeline.nodes import ResultNode
    from ...stages.forward.models.model import Model

__all__ = ["PlanningPairs", "PlanningPairsSettings"]

SHUFFLES = 1000
"""Sets that were drawn, which the overlap of two is held against."""


@dataclass(frozen=True)
class PlanningPairsSettings(ControlSettings, ModelSettings):
    """What `--set` can change; what is left empty is the preset's."""

    model: str = setting("", "hub id or directory")
    preset: str = setting("specimen", "published pairs, or the specimen's own")
    pairs: str = setting("", "JSON file of pairs, in place of the preset's")
    dictionary: str = setting("", "transcoders: directory or org/repo")
    against: str = setting(
        "",
        'preset whose dictionary and model the same pairs are tried on, at its own strength; "none"; none: '
        "the preset's",
    )
    limit: Natural = setting(12, "how many pairs, from the first on; 0 takes all")
    strength: Positive | None = setting(None, "units added and taken away; none: the preset's")
    window: Count = setting(1, "neighbouring layers suppressed together")
    controls: Natural = setting(
        20, "random features in place of the injected one, at every position; 0: none, nothing is claimed"
    )


class PlanningPairs(Workflow):
    """Pair by pair, position by position."""

    name = "planning_pairs"
    question = "Over many pairs of words: is the end decided at the site, more than by random features?"
    settings_type = PlanningPairsSettings
    settings: PlanningPairsSettings

    def __init__(self, settings: PlanningPairsSettings, model: Model | None = None) -> None:
        super().__init__(settings)
        chosen = preset_of(settings.preset, PAIR_PRESETS)
        own = {
            name: value for name in ("model", "dictionary", "strength") if (value := getattr(settings, name))
        }
        pairs = read_pairs(Path(settings.pairs)) if settings.pairs else chosen.pairs
        self.exchanges = Exchanges(
            replace(chosen, **own), pairs[: settings.limit or None], settings, settings, model
        )
        self.subject = self.exchanges.subject
        self.other = self._other("" if settings.pairs or own else chosen.against)
        self.nodes = self._nodes()

    def _other(self, fallback: str) -> Exchanges | None:
        """The same pairs of another preset; None for none. Raises ConfigError where it has other pairs."""
        name = self.settings.against or fallback
        if name in ("", "none"):
            return None
        preset = preset_of(name, PAIR_PRESETS)
        by_what = {_what(pair): pair for pair in preset.pairs}
        if missing := [pair for pair in self.exchanges.pairs if _what(pair) not in by_what]:
            raise ConfigError(
                f"expected {name} to have the pairs of this preset, found none that ends "
                f"{missing[0].prompt!r} on {missing[0].inject_word!r}; compare with another: against=…, or "
                "with none: against=none"
            )
        pairs = [by_what[_what(pair)] for pair in self.exchanges.pairs]
        # The revision that is named is of the first model.
        on = (
            self.settings
            if preset.model == self.exchanges.preset.model
            else replace(self.settings, revision=None)
        )
        return Exchanges(preset, pairs, self.settings, on)

    def _nodes(self) -> Mapping[str, ResultNode]:
        """A node per pair, of both dictionaries, and the layers."""
        found = self.exchanges.nodes()
        if self.other is not None:
            found |= self.other.nodes("against")
        return found | {"layers": self.subject.on_model(self._layers())}

    @cached_property
    def prompts(self) -> list[int]:
        """Number of the first pair of every prompt."""
        ids = self.exchanges.ids
        return sorted({ids[number]: number for number in reversed(range(len(ids)))}.values())

    def _layers(self) -> Draws:
        """The MLPs of some layers replaced by their mean, in every prompt: a cell per prompt and layer."""
        exchanges = self.exchanges
        references = tuple(exchanges.ids[number] for number in self.prompts)
        return Draws(
            tuple(
                Ablation(
                    tokens=exchanges.ids[number],
                    kinds=("mlp_out",),
                    over="layer",
                    how="mean",
                    references=references,
                    window=self.settings.window,
                    metrics=(Probability(word), Rank(word)),
                )
                for number in self.prompts
                for word in [exchanges.words(exchanges.pairs[number])[1]]
            )
        )

    @cached_property
    def found(self) -> list[Exchanged]:
        """What came out for each pair."""
        return self.exchanges.read(self.result)

    @cached_property
    def found_against(self) -> list[Exchanged]:
        """The same on the other dictionary; none without."""
        return [] if self.other is None else self.other.read(self.result, "against")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Every pair in the fields of candle-mi's figure 13, beside its null."""
        return [_told(each) for each in self.found]

    def views(self) -> Iterator[View]:
        """What holds over the pairs, each pair beside its null, every position, and the layers."""
        preset, records = self.exchanges.preset, self.records
        yield self._findings()
        yield Data(
            json={
                "model": self.subject.files.name,
                "clt_repo": preset.dictionary,
                "strength": preset.strength,
                "n_pairs": len(records),
                "n_peak_at_site": sum(row["peaks_at_site"] for row in records),
                "n_work": sum(row["works"] for row in records),
                **self._overlap_json,
            }
        )
        yield self._table()
        yield from self._sweeps()
        yield from self._of_layers()

    def _findings(self) -> Findings:
        found, given = self.found, self.settings
        drawn = np.array([each.drawn for each in found])
        peaks = np.array([each.peaks for each in found])
        shared: dict[str, Any] = {"draws": 1000, "seed": given.seed, "held_out": bool(self._is_held_out)}
        of = "times another feature of its layer in each pair, that writes as much"
        many = f"over {len(found)} pairs of {self.subject.name}"
        findings = [
            Finding.over(
                f"{many}, the exchange at the site changes the probability of the injected word",
                np.array([each.effect for each in found]),
                drawn,
                of,
                **shared,
            ),
            Finding.over(
                f"{many}, the share that changes it most at the site", peaks[:, 0], peaks[:, 1:], of, **shared
            ),
        ]
        overlap = self.overlap
        if overlap is not None and np.isfinite(overlap[0]):
            null = Null(overlap[1], "pairings of as many pairs at random")
            findings.append(Finding(f"pairs that work in {self._both}, Jaccard", overlap[0], null))
        caption = self.exchanges.preset.found
        if overlap is not None and not np.isfinite(overlap[0]):
            caption += f" No pair works in {self._both}: nothing is said of their overlap."
        return Findings.of(*findings, caption=caption, sources=tuple(self.nodes))

    @property
    def _is_held_out(self) -> bool:
        """Whether the features were chosen on other prompts: of the shipped pairs alone it is known."""
        return not self.settings.pairs and self.exchanges.preset.model == "specimen"

    @property
    def _both(self) -> str:
        names = [each.preset.dictionary for each in (self.exchanges, self.other) if each is not None]
        return " and ".join(names)

    @cached_property
    def overlap(self) -> tuple[float, Floats] | None:
        """Jaccard of the pairs that work here and there, and of sets drawn; None without another."""
        if self.other is None:
            return None
        one, other = ([each.works for each in found] for found in (self.found, self.found_against))
        own = jaccard(one, other)
        null = (
            shuffled_jaccard(one, other, SHUFFLES, seed=self.settings.seed)
            if any(one + other)
            else np.zeros(0)
        )
        return own, null

    @property
    def _overlap_json(self) -> dict[str, Any]:
        if self.other is None or self.overlap is None:
            return {"against": None}
        own = self.overlap[0]
        return {
            "against": {
                "model": self.other.subject.files.name,
                "clt_repo": self.other.preset.dictionary,
                "jaccard": own if np.isfinite(own) else None,
                "n_work": sum(each.works for each in self.found_against),
                "pairs": list(map(_told, self.found_against)),
            }
        }

    def _table(self) -> Table:
        there = {_what(each.pair): each for each in self.found_against}
        also: tuple[tuple[Any, ...], ...] = ()
        if self.other is not None:
            also = ((f"on {self.other.preset.dictionary}", lambda row: _yes(there[row["what"]].works)),)
        rows = [row | {"what": _what(each.pair)} for row, each in zip(self.records, self.found, strict=True)]
        random: tuple[tuple[Any, ...], ...] = (
            ("random", "null_median", format_probability),
            ("p", lambda row: row["null"]["share_as_large"], ".2g"),
        )
        random = random if self.settings.controls else ()
        return Table.of(
            rows,
            ("prompt", lambda row: format_text(row["prompt"].splitlines()[-1])),
            ("words", lambda row: f"{row['suppress_word']} → {row['inject_word']}"),
            ("before", "baseline_prob", format_probability),
            ("at the site", "prob_at_site", format_probability),
            *random,
            ("most at", lambda row: f"{format_token(row['max_token'])} ({row['max_position']})"),
            ("works", lambda row: _yes(row["works"])),
            *also,
            strong=lambda row: row["works"],
            title=f"{len(rows)} pairs on {self.subject.name}, features of "
            f"{self.exchanges.preset.dictionary}, strength {self.exchanges.preset.strength:g}",
            caption="probability of the injected word at the end; random: the median of "
            f"{self.settings.controls} other features of its layer that write as much, at the site; a pair "
            "works that changes the word most at the site, and there more than 95 % of those",
            json={"pairs": self.records},
        )

    def _sweeps(self) -> Iterator[View]:
        """Change of the injected word, pair by position counted from the site, beside the random ones'."""
        reach = (
            max(each.site for each in self.found),
            max(len(each.tokens) - 1 - each.site for each in self.found),
        )
        places = tuple(range(-reach[0], reach[1] + 1))
        own, drawn = (np.full((len(self.found), len(places)), np.nan) for _ in range(2))
        for row, each in enumerate(self.found):
            start = reach[0] - each.site
            own[row, start : start + len(each.tokens)] = each.change[:, OWN]
            if self.settings.controls:
                drawn[row, start : start + len(each.tokens)] = each.change[:, RANDOM:].mean(axis=1)
        labels = tuple(f"{each.pair.suppress_word} → {each.pair.inject_word}" for each in self.found)
        grid = Heatmap(
            title="Where the exchange makes the other word likelier",
            values=own,
            rows=tuple(f"{label} ({i})" for i, label in enumerate(labels)),
            columns=tuple(map(str, places)),
            row_name="pair",
            column_name="token, counted from the site",
            value_name="change of the probability",
            diverging=True,
        )
        seen = np.isfinite(own)
        mean = Lines(
            title="Mean over the pairs",
            x=places,
            x_name="token, counted from the site",
            y_name="change of the probability",
            lines=(
                Line("exchange", _mean(own, seen), strong=True),
                Line("random features", _mean(drawn, seen), control=True),
            ),
            low=0.0,
            at=0,
        )
        yield from together("planning_pairs", f"{len(labels)} pairs on {self.subject.name}", grid, mean)

    def _of_layers(self) -> Iterator[View]:
        found = self.result("layers").load()
        rank = found["rank"].transpose("draw", "layer").values
        probability = found["probability"].transpose("draw", "layer").values
        kept = (rank == 0).sum(axis=0)
        said = int((found["unpatched"].sel(run="clean", metric="rank").values == 0).sum())
        rows = [
            {
                "layer": layer,
                "still_first": int(kept[i]),
                "mean_prob": float(probability[:, i].mean()),
            }
            for i, layer in enumerate(found["layer"].values.tolist())
        ]
        width = f"{self.settings.window} layers around it" if self.settings.window > 1 else "one layer"
        yield Table.of(
            rows,
            ("layer", "layer", "d"),
            ("still said", "still_first", "d"),
            ("mean probability", "mean_prob", format_probability),
            title=f"Without the MLPs of {width}: prompts of {len(rank)} in which the word is still likeliest",
            caption=f"untouched it is in {said}; the MLP says its mean over these prompts; layers are "
            "described, not claimed: there are too few of them",
            sources=("layers",),
            json={"layer_suppression": rows, "prompts": len(rank), "said_untouched": said},
        )


def _told(each: Exchanged) -> dict[str, Any]:
    """A pair in plain values."""
    pair, sweep = each.pair, each.probability[:, OWN]
    best = int(sweep.argmax())
    return {
        "prompt": pair.prompt,
        "suppress_word": pair.suppress_word,
        "inject_word": pair.inject_word,
        "suppress_features": list(pair.suppress),
        "inject_feature": pair.inject,
        "site": each.site,
        "baseline_prob": each.before,
        "baseline_suppress_prob": each.before_own,
        "suppress_only_prob": float(each.probability[each.site, 1]),
        "prob_at_site": float(sweep[each.site]),
        "max_prob": float(sweep[best]),
        "max_position": best,
        "max_token": each.tokens[best],
        "peaks_at_site": bool(each.peaks[0]),
        "works": each.works,
        "change": each.effect,
        "null": each.null.to_json(each.effect),
        "null_median": Null(each.probability[each.site, RANDOM:], "random features").median,
        "sweep": [
            {"position": place, "token": token, "prob": float(value)}
            for place, (token, value) in enumerate(zip(each.tokens, sweep, strict=True))
        ],
    }


def _what(pair: ExchangePair) -> tuple[str, str]:
    """What makes a pair the same on another dictionary."""
    return pair.prompt, pair.inject_word


def _yes(works: bool) -> str:
    return "yes" if works else "–"


def _mean(values: Floats, seen: Any) -> Floats:
    """Over the pairs that reach a place, [place]; every place is some pair's."""
    found: Floats = np.where(seen, values, 0.0).sum(axis=0) / seen.sum(axis=0)
    return found


WORKFLOW = PlanningPairs
