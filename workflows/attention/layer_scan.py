"""At which layer does a marker attend to its target? Two conditions compared, layer by layer.

Captures attention patterns, takes for every sample the attention from its marker to its targets, mean over
heads, and compares two conditions with Welch's t test in every layer (stages/attention/layer_scan.py). The
JSON has the fields of the Deloson viewer's `layer_scan_universal_*.json` under their own names, in which
"python" is condition A and "rust" condition B.

Defaults: texts in which the beginning of a sentence is repeated, in condition A after that same sentence, in
condition B after another one. The marker is the last repeated token, the target the word that followed it in
the sentence. With a corpus of plip-rs the conditions are `python_doctest` and `rust_test`.

The best layer is that of the smallest p-value, which is not corrected for the search over layers. The claim
is corrected: it compares the largest t of any layer with the largest t of any layer after samples were
assigned to the conditions at random (permutation test).
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
"""Names of conditions A and B if samples are built from shipped prose."""
PLIP = ("python_doctest", "rust_test")
"""Default names of conditions A and B in a corpus file, those of plip-rs."""


@dataclass(frozen=True)
class LayerScanSettings(ControlSettings, ModelSettings):
    """Settings of the workflow `layer_scan`, which compares attention under two conditions. Raises
    ConfigError for conditions without a corpus."""

    corpus: str = setting("", "JSON file of samples; none: sentences of the prose shipped with mizarr")
    condition_a: str = setting(
        "", 'condition A of the corpus, whose attention is expected to be larger; none: "python_doctest"'
    )
    condition_b: str = setting("", 'condition B of the corpus, compared with A; none: "rust_test"')
    unit: Literal["characters", "bytes"] = setting("characters", "unit of positions in the corpus")
    samples: Count = setting(24, "number of samples per condition, without a corpus")
    start_layer: int = setting(-1, "first layer to scan; -1: a third of the number of layers")
    end_layer: int = setting(-1, "last layer to scan; -1: the last layer of the model")

    def __post_init__(self) -> None:
        if not self.corpus and (self.condition_a or self.condition_b):
            raise ConfigError(
                "expected a corpus with condition_a and condition_b, found none; set corpus=FILE"
            )


class LayerScan(ModelWorkflow):
    """Workflow that compares attention from a marker to its targets under two conditions, in every layer."""

    name = "layer_scan"
    question = "At which layer does a marker attend to its target?"
    needs = "weights"
    settings_type = LayerScanSettings
    extra = "probing"
    settings: LayerScanSettings

    scan = loaded("scan")
    """Result of the stage `layer_scan`, in memory: weight [layer, sample], mean and std [layer, condition],
    test statistics [layer]."""

    def plan(self) -> Nodes:
        """Node of the attention of every sample and of the test between conditions in each layer.

        Raises:
            ConfigError: for layers out of range or without attention.
            PromptError: if no sample's marker and targets are tokens of its text.
        """
        settings = self.settings
        self.layers = self._layers()
        default = PLIP if settings.corpus else BUILT_IN
        self.conditions = (settings.condition_a or default[0], settings.condition_b or default[1])
        self.version, groups = self._samples()
        # Counts of converted samples for the JSON document; `_placed` adds to them.
        self.conversion = Conversion()
        # Token positions of each sample, and its condition: 0 = A, 1 = B.
        self.placed, self.condition = self._placed(groups)
        tokens = self.subject.pack([placed.sample.code for placed in self.placed])
        # Of each target: index of its attention weight in the stored patterns, and index of its sample.
        pair, sample = self._pairs(tokens)
        scan = layer_scan.on(
            pattern=self.subject.capture_weights(tokens, self.layers)[self.subject.attention_kind],
            pair=column(pair, "target", "pair"),
            sample=column(sample, "target", "sample"),
            condition=column(self.condition, "sample", "condition"),
        )
        return {"scan": scan}

    def _layers(self) -> list[int]:
        """Layers with attention between `start_layer` and `end_layer`; raises ConfigError if there are
        none."""
        config, settings = self.subject.config, self.settings
        attention_layers, last = config.layers_with(self.subject.attention_kind), config.num_layers - 1
        start = (last + 1) // 3 if settings.start_layer == -1 else settings.start_layer
        end = last if settings.end_layer == -1 else settings.end_layer
        if not 0 <= start <= end <= last:
            raise ConfigError(
                f"expected start_layer <= end_layer, both in 0..{last}, found {start} and {end}; set "
                "start_layer and end_layer"
            )
        layers = [layer for layer in attention_layers if start <= layer <= end]
        if not layers:
            raise ConfigError(
                f"expected a layer with attention in {start}..{end}, found attention in layers "
                f"{attention_layers} only; set start_layer and end_layer"
            )
        return layers

    def _samples(self) -> tuple[str, list[list[Sample]]]:
        """(format version of the corpus, [samples of condition A, samples of condition B])."""
        settings = self.settings
        if settings.corpus:
            return read_samples(settings.corpus, self.conditions, unit=settings.unit)
        return "2.0", list(repeated_samples(shipped_prose(), settings.samples))

    def _placed(self, groups: list[list[Sample]]) -> tuple[list[Placed], list[int]]:
        """Find the tokens of marker and targets in each sample; samples whose marker or targets have no token
        are left out, and `conversion` counts them.

        Arguments:
            groups: samples of condition A and of condition B.

        Returns:
            (samples with token positions, those of condition A first; condition of each sample, 0 = A, 1 =
            B).

        Raises:
            PromptError: if no sample is left.
        """
        placed, condition = [], []
        for i, group in enumerate(groups):
            encodings = self.subject.tokenizer.encode_batch([sample.code for sample in group])
            for sample, encoding in zip(group, encodings, strict=True):
                if (placed_sample := place(sample, encoding, self.conversion)) is not None:
                    placed.append(placed_sample)
                    condition.append(i)
        if not placed:
            raise PromptError(
                "expected samples whose marker and targets are covered by tokens, found none among the "
                f"{self.conversion.total_samples} samples of {' and '.join(self.conditions)}; check the "
                "positions in the corpus, and whether unit is characters or bytes"
            )
        return placed, condition

    def _pairs(self, tokens: PackedTokens) -> tuple[Any, Any]:
        """Find the attention weight from marker to target of every target in the stored patterns.

        Arguments:
            tokens: token ids of all samples.

        Returns:
            Two arrays int64 [target]: index of the weight on the axis of all (query, key) pairs of all
            samples, UNSEEN if the target comes after its marker; and index of the target's sample.
        """
        pattern_starts = pair_starts(tokens)
        pair_indices, sample_indices = [], []
        for i, placed in enumerate(self.placed):
            query = placed.marker
            # Patterns are lower triangles, stored row by row: query q begins at q * (q + 1) / 2.
            row_start = int(pattern_starts[i]) + query * (query + 1) // 2
            # A target after its marker has no weight under a causal mask: UNSEEN.
            pair_indices += [row_start + key if key <= query else UNSEEN for key in placed.targets]
            sample_indices += [i] * len(placed.targets)
        self.unseen = pair_indices.count(UNSEEN)
        return np.array(pair_indices, np.int64), np.array(sample_indices, np.int64)

    @property
    def best(self) -> tuple[int, float]:
        """(layer, p-value) of the smallest p-value among layers with more attention in A than in B; (0, 1.0)
        without such a layer."""
        return best_layer(self.scan)

    @property
    def not_claimed(self) -> str:
        """Reason why fewer than two samples in a condition give no claim; empty for two or more."""
        fewest = min(self.condition.count(i) for i in (0, 1))
        return "Nothing is claimed, as a condition has fewer than two samples." if fewest < 2 else ""

    def claims(self) -> Iterator[Claim]:
        """Claim that attention is larger in condition A: the largest t of any layer, compared with that of
        random assignments of samples to conditions."""
        weight, is_b = self.scan["weight"].transpose("layer", "sample").values, np.array(self.condition) == 1
        t = welch_t(weight, is_b)
        drawn = permuted_t(weight, is_b, self.settings.controls, seed=self.settings.seed)
        condition_a, condition_b = self.conditions
        text = (
            f"in layer {self.layers[int(t.argmax())]}, markers attend to their targets more in "
            f"{condition_a!r} than in {condition_b!r} (Welch's t, the largest of {len(t)} layers)"
        )
        of = f"random assignments of samples to conditions, each with the largest t of {len(t)} layers"
        yield Claim.against(text, t.max(), drawn, of)

    def views(self) -> Iterator[View]:
        """Table of the test in each layer, attention of all samples, and p-values by layer."""
        document, (best, p), name = self.viewer_json(), self.best, self.subject.name
        results = document.pop("results")
        weight = self.scan["weight"].transpose("layer", "sample").values
        samples = [
            {
                "id": placed.sample.id,
                "condition": CONDITIONS[i],
                "marker": placed.marker,
                "targets": placed.targets,
                "attention": row,
            }
            for placed, i, row in zip(self.placed, self.condition, weight.T, strict=True)
        ]
        conditions = dict(zip(CONDITIONS, self.conditions, strict=True))
        yield Data(json={**document, "conditions": conditions, "targets_behind_marker": self.unseen})
        yield Table.of(
            results,
            ("layer", "layer", "d"),
            # Field names of the viewer, whatever the two conditions are.
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
        mean, std = (self.scan[name].transpose("condition", "layer").values for name in ("mean", "std"))
        lines = tuple(
            Line(
                condition,
                mean[i],
                control=i == 1,
                band=np.stack([mean[i] - std[i], mean[i] + std[i]]),
                dots=weight[:, np.array(self.condition) == i],
            )
            for i, condition in enumerate(self.conditions)
        )
        means = Lines(
            title="Attention from marker to target",
            caption="The marker is the token whose attention is read; its targets are the tokens attended "
            "to. x: layer. y: attention weight from marker to targets, mean over heads and targets. One line "
            "per condition, the mean over its samples. Bands: one standard deviation. Dots (in figures): "
            "single samples.",
            x=tuple(self.layers),
            x_name="layer",
            y_name="attention, mean over heads and targets",
            low=0.0,
            at=best if p < 1 else None,
            lines=lines,
        )
        # A p-value may underflow to 0, whose logarithm is not finite.
        log_p = -np.log10(np.maximum(self.scan["p"].values, np.finfo(float).tiny))
        is_a_larger = mean[0] > mean[1]
        verdict = (
            f"Smallest p-value with more attention in {self.conditions[0]}: {p:.1e} in layer {best}."
            if p < 1
            else f"In no layer is attention larger in {self.conditions[0]}."
        )
        p_values = Bars(
            title="P-value of the difference",
            caption="x: layer. y: -log10 of the p-value (Welch's t test) of a difference between "
            f"{self.conditions[0]} and {self.conditions[1]} in the attention from marker to target. It is "
            f"not corrected for the number of layers. Coloured: more attention in {self.conditions[0]}; "
            f"grey: less. {verdict}",
            x=tuple(map(str, self.layers)),
            x_name="layer",
            y_name="-log10 p",
            stacked=True,
            levels=tuple((-float(np.log10(level)), f"p = {level:g}") for level in (0.05, 0.001)),
            lines=(
                Line("more attention", np.where(is_a_larger, log_p, 0.0)),
                Line("less attention", np.where(is_a_larger, 0.0, log_p), control=True),
            ),
        )
        title = f"{name}: attention from marker to target, {self.conditions[0]} and {self.conditions[1]}"
        yield from together("layer_scan", title, means, p_values)

    def _caption(self) -> str:
        """Caption of the table of layers: its columns, numbers of samples, and samples or targets that are
        left out or moved."""
        counts = [int(n) for n in self.scan["n"].isel(layer=0)]
        conversion = self.conversion
        notes = [
            (
                "One row per layer. A, B: attention weight from the marker (the token whose attention is "
                "read) to its targets (the tokens attended to), mean over heads, ± standard deviation over "
                f"{counts[0]} samples of A and {counts[1]} of B. A/B: ratio of both means."
            ),
            (
                "t, df, p: Welch's t test of the difference, two-sided, not corrected for "
                f"{len(self.layers)} layers. Bold: the smallest p with more attention in A."
            ),
        ]
        if conversion.fuzzy_matches:
            notes.append(
                f"{conversion.fuzzy_matches} characters are in no token and were moved to the nearest one."
            )
        if conversion.total_samples > sum(counts):
            notes.append(
                f"{conversion.total_samples - sum(counts)} samples are left out, as their marker or targets "
                "are in no token."
            )
        if self.unseen:
            notes.append(f"{self.unseen} targets come after their marker, with a weight of 0.")
        return " ".join(notes)

    def viewer_json(self) -> dict[str, Any]:
        """JSON document in the format that the Deloson viewer reads (`layer_scan_universal_*.json`), with no
        other fields."""
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
        """Results of the test in each layer, with the viewer's field names in its order."""
        # Each group of fields has a dict per layer; those of a layer are merged, in the viewer's order.
        groups = [records(self.scan, "layer", "layer")]
        for name, condition in zip(("python", "rust"), CONDITIONS, strict=True):
            columns = {f"{name}_{statistic}": statistic for statistic in ("mean", "std", "n")}
            groups.append(records(self.scan.sel(condition=condition), "layer", **columns))
        groups.append(records(self.scan, "layer", ratio="ratio", t_statistic="t", df="df", p_value="p"))
        merged: list[dict[str, Any]] = groups[0]
        for group in groups[1:]:
            merged = [fields | further for fields, further in zip(merged, group, strict=True)]
        return merged
