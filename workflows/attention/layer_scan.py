"""At which layer does a marker attend to its target? Two conditions compared, layer by layer.

Captures attention patterns, takes of every sample the head-averaged attention from its marker to its
targets, and compares two conditions with Welch's t test in every layer (stages/attention/layer_scan.py).
The JSON holds the fields of the Deloson viewer's `layer_scan_universal_*.json` under their own names:
there "python" is condition A, "rust" B.

Defaults: the beginning of a sentence said again (A: after that sentence; B: after another one), the marker
its last token, the target the word that came next the first time. With a corpus of plip-rs: `python_doctest`
against `rust_test`.

The best layer is the one with the smallest p among several: its p is not corrected for the search. What is
claimed is: the largest t of any layer stands beside that of samples dealt to the conditions at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...stages.attention.layer_scan import CONDITIONS, UNSEEN, best_layer, layer_scan, permuted_t, welch_t
from ...store.errors import ConfigError, PromptError
from ...store.runs.coordinates import pair_starts
from ..claim import Claim
from ..labelled import column, records
from ..material.samples.marker_samples import (
    Conversion,
    Placed,
    Sample,
    place,
    read_samples,
    repeated_samples,
)
from ..settings import ControlSettings, Count, ModelSettings, setting
from ..subject import shipped_prose
from ..views import Bars, Data, Line, Lines, Table, View, together
from ..workflow import ModelWorkflow, Nodes, loaded

if TYPE_CHECKING:
    from ...store import PackedTokens

__all__ = ["LayerScan", "LayerScanSettings"]

BUILT_IN = ("repeated", "unrepeated")
PLIP = ("python_doctest", "rust_test")


@dataclass(frozen=True)
class LayerScanSettings(ControlSettings, ModelSettings):
    """What `--set` can change.

    Raises ConfigError for conditions without a corpus.
    """

    corpus: str = setting("", "JSON file of samples; none: sentences of the prose shipped with mizarr")
    condition_a: str = setting("", 'samples expected to look more; of a corpus by default "python_doctest"')
    condition_b: str = setting("", 'samples to compare them with; of a corpus by default "rust_test"')
    unit: Literal["characters", "bytes"] = setting("characters", "what positions of a corpus count")
    samples: Count = setting(24, "samples per condition made of prose, without a corpus")
    start_layer: int = setting(-1, "first layer scanned; -1: a third of the way up")
    end_layer: int = setting(-1, "last layer scanned; -1: the last")

    def __post_init__(self) -> None:
        if not self.corpus and (self.condition_a or self.condition_b):
            raise ConfigError(
                "expected a corpus with condition_a and condition_b, found none; set corpus=FILE"
            )


class LayerScan(ModelWorkflow):
    """Attention from markers to targets under two conditions."""

    name = "layer_scan"
    question = "At which layer does a marker attend to its target?"
    needs = "weights"
    settings_type = LayerScanSettings
    extra = "probing"
    settings: LayerScanSettings

    found = loaded("scan")
    """`layer_scan` of the layers scanned, in memory."""

    def plan(self) -> Nodes:
        """Attention of every sample, and the test between its conditions in each layer."""
        given = self.settings
        self.layers = self._layers()
        default = PLIP if given.corpus else BUILT_IN
        self.conditions = (given.condition_a or default[0], given.condition_b or default[1])
        self.version, groups = self._samples()
        self.conversion = Conversion()
        self.placed, self.condition = self._placed(groups)
        tokens = self.subject.pack([one.sample.code for one in self.placed])
        pair, sample = self._pairs(tokens)
        scan = layer_scan.on(
            pattern=self.subject.capture_weights(tokens, self.layers)[self.subject.attention_kind],
            pair=column(pair, "target", "pair"),
            sample=column(sample, "target", "sample"),
            condition=column(self.condition, "sample", "condition"),
        )
        return {"scan": scan}

    def _layers(self) -> list[int]:
        config, chosen = self.subject.config, self.settings
        held, last = config.layers_with(self.subject.attention_kind), config.num_layers - 1
        start = (last + 1) // 3 if chosen.start_layer == -1 else chosen.start_layer
        end = last if chosen.end_layer == -1 else chosen.end_layer
        if not 0 <= start <= end <= last:
            raise ConfigError(
                f"expected layers in 0..{last}, the first before the last, found {start} to {end}; set "
                "start_layer and end_layer"
            )
        chosen_layers = [layer for layer in held if start <= layer <= end]
        if not chosen_layers:
            raise ConfigError(
                f"expected a layer that attends in {start}..{end}, found them at {held}; set start_layer and "
                "end_layer"
            )
        return chosen_layers

    def _samples(self) -> tuple[str, list[list[Sample]]]:
        """The version of the corpus' format, and the samples of A and B."""
        chosen = self.settings
        if chosen.corpus:
            return read_samples(chosen.corpus, self.conditions, unit=chosen.unit)
        return "2.0", list(repeated_samples(shipped_prose(), chosen.samples))

    def _placed(self, groups: list[list[Sample]]) -> tuple[list[Placed], list[int]]:
        """Samples whose places became tokens, those of A first; which condition each is of."""
        placed, condition = [], []
        for which, group in enumerate(groups):
            encodings = self.subject.tokenizer.encode_batch([one.code for one in group])
            for sample, encoding in zip(group, encodings, strict=True):
                if (found := place(sample, encoding, self.conversion)) is not None:
                    placed.append(found)
                    condition.append(which)
        if not placed:
            raise PromptError(
                f"expected samples whose marker and targets are tokens, found none among "
                f"{self.conversion.total_samples} of {' and '.join(self.conditions)}"
            )
        return placed, condition

    def _pairs(self, tokens: PackedTokens) -> tuple[Any, Any]:
        """Of every target the pair (marker, target) on the pair axis, and its sample."""
        starts = pair_starts(tokens)
        pair, sample = [], []
        for i, one in enumerate(self.placed):
            row = int(starts[i]) + one.marker * (one.marker + 1) // 2
            pair += [row + target if target <= one.marker else UNSEEN for target in one.targets]
            sample += [i] * len(one.targets)
        self.unseen = pair.count(UNSEEN)
        return np.array(pair, np.int64), np.array(sample, np.int64)

    @property
    def best(self) -> tuple[int, float]:
        """(layer, p) of the smallest p with more attention in A than in B; (0, 1.0) without such a layer."""
        return best_layer(self.found)

    @property
    def not_claimed(self) -> str:
        """Why there is no verdict on a condition of one sample."""
        fewest = min(self.condition.count(which) for which in (0, 1))
        return "no verdict: a condition has fewer than two samples" if fewest < 2 else ""

    def claims(self) -> Iterator[Claim]:
        """The largest difference of any layer, beside that of samples dealt at random."""
        weight, is_b = self.found["weight"].transpose("layer", "sample").values, np.array(self.condition) == 1
        t = welch_t(weight, is_b)
        drawn = permuted_t(weight, is_b, self.settings.controls, seed=self.settings.seed)
        one, other = self.conditions
        text = (
            f"in layer {self.layers[int(t.argmax())]} markers look at their targets more in {one!r} than in "
            f"{other!r}, Welch's t"
        )
        of = f"random deals of the samples, every time the best of {len(t)} layers"
        yield Claim.against(text, t.max(), drawn, of)

    def views(self) -> Iterator[View]:
        """The test layer by layer, every sample, and how sure the difference is."""
        told, (best, p), name = self.viewer_json(), self.best, self.subject.name
        results = told.pop("results")
        weight = self.found["weight"].transpose("layer", "sample").values
        samples = [
            {
                "id": one.sample.id,
                "condition": CONDITIONS[which],
                "marker": one.marker,
                "targets": one.targets,
                "attention": row,
            }
            for one, which, row in zip(self.placed, self.condition, weight.T, strict=True)
        ]
        conditions = dict(zip(CONDITIONS, self.conditions, strict=True))
        yield Data(json={**told, "conditions": conditions, "targets_behind_marker": self.unseen})
        yield Table.of(
            results,
            ("layer", "layer", "d"),
            ("A", "python_mean", ".4f"),
            ("±", "python_std", ".4f"),
            ("B", "rust_mean", ".4f"),
            ("±", "rust_std", ".4f"),
            ("A/B", "ratio", ".2f"),
            ("t", "t_statistic", ".2f"),
            ("df", "df", ".2f"),
            ("p", "p_value", ".1e"),
            strong=lambda row: row["layer"] == best and p < 1,
            title=f"{name}: attention from marker to target, {self.conditions[0]} (A) and "
            f"{self.conditions[1]} (B)",
            caption=self._caption(),
            json={"results": results, "samples": samples},
        )
        mean, std = (self.found[each].transpose("condition", "layer").values for each in ("mean", "std"))
        lines = tuple(
            Line(
                called,
                mean[i],
                control=i == 1,
                band=np.stack([mean[i] - std[i], mean[i] + std[i]]),
                dots=weight[:, np.array(self.condition) == i],
            )
            for i, called in enumerate(self.conditions)
        )
        means = Lines(
            title="From marker to target",
            caption="mean of the samples, with one standard deviation; in a figure a dot per sample",
            x=tuple(self.layers),
            x_name="layer",
            y_name="attention, mean over heads and targets",
            low=0.0,
            at=best if p < 1 else None,
            lines=lines,
        )
        sure = -np.log10(np.maximum(self.found["p"].values, np.finfo(float).tiny))
        ahead = mean[0] > mean[1]
        verdict = f"most sure: layer {best}, p = {p:.1e}" if p < 1 else "in no layer is A ahead"
        sureness = Bars(
            title="How sure the difference is",
            caption=f"Welch's t test; grey: {self.conditions[0]} looks less; {verdict}",
            x=tuple(map(str, self.layers)),
            x_name="layer",
            y_name="-log10 p",
            stacked=True,
            levels=tuple((-float(np.log10(level)), f"p = {level:g}") for level in (0.05, 0.001)),
            lines=(
                Line("looks more", np.where(ahead, sure, 0.0)),
                Line("looks less", np.where(ahead, 0.0, sure), control=True),
            ),
        )
        title = f"{name}: where a marker looks, {self.conditions[0]} against {self.conditions[1]}"
        yield from together("layer_scan", title, means, sureness)

    def _caption(self) -> str:
        counts = [int(n) for n in self.found["n"].isel(layer=0)]
        told = self.conversion
        test = f"Welch's t test, two-sided, not corrected for {len(self.layers)} layers"
        notes = [f"{counts[0]} and {counts[1]} samples, head mean; {test}"]
        if told.fuzzy_matches:
            notes.append(f"{told.fuzzy_matches} places between tokens, put to the nearest")
        if told.total_samples > sum(counts):
            notes.append(
                f"{told.total_samples - sum(counts)} samples left out, as their places are no tokens"
            )
        if self.unseen:
            notes.append(f"{self.unseen} targets lie behind their marker and count 0")
        return "; ".join(notes)

    def viewer_json(self) -> dict[str, Any]:
        """What the Deloson viewer loads as `layer_scan_universal_*.json`: its fields and no others."""
        layer, p = self.best
        return {
            "model": self.subject.files.name,
            "corpus_format": f"universal_v{self.version}",
            "n_layers": self.subject.config.num_layers,
            "scanned_layers": self.layers,
            "best_layer": layer,
            "best_p_value": p,
            "position_conversion_stats": self.conversion.to_json(),
            "results": self._tests(),
        }

    def _tests(self) -> list[dict[str, Any]]:
        """The test of each layer, under the viewer's names and in its order."""
        parts = [records(self.found, "layer", "layer")]
        for name, which in zip(("python", "rust"), CONDITIONS, strict=True):
            columns = {f"{name}_{of}": of for of in ("mean", "std", "n")}
            parts.append(records(self.found.sel(condition=which), "layer", **columns))
        parts.append(records(self.found, "layer", ratio="ratio", t_statistic="t", df="df", p_value="p"))
        return [
            {name: value for row in rows for name, value in row.items()} for rows in zip(*parts, strict=True)
        ]
